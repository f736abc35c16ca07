"""Our models compute what transformers' models compute with the same weights: logits, every layer, every gradient.

transformers saves a folder of weights, and `weights` loads it. The gradients travel in the same way: a model whose
weights are the gradients is saved and loaded, which puts each gradient where its weight went.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tfmlib import attention
from tfmlib.models import encoder, gpt, llama, seq2seq, weights

from ..same import filled, rng, same

transformers = pytest.importorskip("transformers")

B, T = 2, 11

GPT2 = [  # width, heads, layers, hidden, tied
    (24, 4, 3, None, True),
    (40, 5, 2, 56, False),
    (14, 1, 4, 30, True),
    (48, 6, 1, 192, False),
]
LLAMA = [  # width, heads, key heads, head width, layers, hidden, tied, rotary base
    (24, 4, 4, 6, 3, 64, False, 10_000.0),
    (24, 6, 2, 8, 2, 40, True, 500.0),
    (20, 4, 1, 10, 4, 28, False, 500_000.0),
    (32, 8, 4, 2, 1, 86, True, 10_000.0),
]
BERT = [  # width, heads, layers, hidden
    (24, 4, 3, 96),
    (40, 5, 2, 56),
    (14, 1, 4, 30),
]


def _gpt2(C, H, L, hidden, tied):
    config = transformers.GPT2Config(
        n_embd=C, n_head=H, n_layer=L, n_inner=hidden, vocab_size=53, n_positions=32, tie_word_embeddings=tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=1e-4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), weights.load_gpt2


def _llama(C, H, K, D, L, hidden, tied, base):
    config = transformers.LlamaConfig(
        hidden_size=C, num_attention_heads=H, num_key_value_heads=K, head_dim=D, num_hidden_layers=L,
        intermediate_size=hidden, vocab_size=53, max_position_embeddings=32, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": base}, rms_norm_eps=1e-4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), weights.load_llama


def _bert(C, H, L, hidden):
    config = transformers.BertConfig(
        hidden_size=C, num_attention_heads=H, num_hidden_layers=L, intermediate_size=hidden, vocab_size=53,
        max_position_embeddings=32, type_vocab_size=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config), weights.load_bert


CASES = [
    pytest.param(make, sizes, id=f"{make.__name__[1:]}-{i}")
    for make, table in ((_gpt2, GPT2), (_llama, LLAMA), (_bert, BERT))
    for i, sizes in enumerate(table)
]


def _made(make, sizes, folder):
    """Their model with random weights, norms and biases included, the same as ours, and how to load it."""
    theirs, load = make(*sizes)
    filled(theirs.eval())
    theirs.save_pretrained(folder)
    return theirs, load(folder), load


def _ids(salt=0):
    return torch.randint(0, 53, (B, T), generator=rng(salt))


def _ours(model, ids, is_token=None):
    if isinstance(model, encoder.Encoder):
        return model(ids, is_token)
    return model(ids, mask=None if is_token is None else attention.padding_mask(is_token))


def _theirs(model, ids, is_token=None, **options):
    out = model(ids, attention_mask=None if is_token is None else is_token.long(), **options)
    return out.last_hidden_state if hasattr(out, "last_hidden_state") else out.logits


@pytest.mark.parametrize(("make", "sizes"), CASES)
def test_logits_equal_theirs(make, sizes, tmp_path):
    theirs, ours, _ = _made(make, sizes, tmp_path)
    ids = _ids()
    want = _theirs(theirs, ids)
    assert want.std() > 0.3  # else 1e-4 would say little
    got = _ours(ours, ids)
    assert (got - want).abs().max() <= 1e-4
    same(got, want, "output")


@pytest.mark.parametrize(("make", "sizes"), CASES)
def test_every_layer_equals_theirs(make, sizes, tmp_path):
    theirs, ours, _ = _made(make, sizes, tmp_path)
    found = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: found.append(out)) for block in ours.blocks]
    ids = _ids()
    _ours(ours, ids)
    for hook in hooks:
        hook.remove()
    want = theirs(ids, output_hidden_states=True).hidden_states[1:]
    last = found.pop() if make is _bert else ours.norm(found.pop())
    assert len(want) == len(found) + 1
    for i, (got, layer) in enumerate(zip([*found, last], want, strict=True)):
        same(got, layer, f"output of layer {i}")


@pytest.mark.parametrize(("make", "sizes"), CASES)
def test_every_gradient_equals_theirs(make, sizes, tmp_path):
    theirs, ours, load = _made(make, sizes, tmp_path)
    ids, goal = _ids(), None
    for run in (lambda: _theirs(theirs, ids), lambda: _ours(ours, ids)):
        out = run()
        goal = torch.randn(out.shape, generator=rng(3)) if goal is None else goal
        (out * goal).mean().backward()
    as_weights = copy.deepcopy(theirs)
    with torch.no_grad():
        for weight, source in zip(as_weights.parameters(), theirs.parameters(), strict=True):
            weight.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    as_weights.save_pretrained(tmp_path / "gradients")
    want = load(tmp_path / "gradients").state_dict()
    compared = dict(ours.named_parameters())
    assert len(compared) > 10
    for name, parameter in compared.items():
        same(parameter.grad, want[name], f"gradient of {name}")


@pytest.mark.parametrize(("make", "sizes"), [case for case in CASES if case.id.endswith(("-0", "-1"))])
def test_padding_is_hidden_as_theirs(make, sizes, tmp_path):
    theirs, ours, _ = _made(make, sizes, tmp_path)
    is_token = torch.arange(T) < torch.tensor([[T], [5]])
    got, want = (f(model, _ids(), is_token) for f, model in ((_ours, ours), (_theirs, theirs)))
    same(got[is_token], want[is_token], "output at the tokens")


@pytest.mark.parametrize(("make", "sizes"), [case for case in CASES if case.id.startswith(("gpt2", "llama"))])
def test_left_padding_with_own_positions_equals_theirs(make, sizes, tmp_path):
    theirs, ours, _ = _made(make, sizes, tmp_path)
    is_token = torch.arange(T) >= torch.tensor([[0], [4]])
    positions = (is_token.cumsum(-1) - 1).clamp(min=0)
    want = _theirs(theirs, _ids(), is_token, position_ids=positions)
    got = ours(_ids(), positions=positions, mask=attention.padding_mask(is_token))
    same(got[is_token], want[is_token], "logits at the tokens")


def test_segments_equal_theirs(tmp_path):
    theirs, ours, _ = _made(_bert, BERT[0], tmp_path)
    segments = torch.randint(0, 3, (B, T), generator=rng(5))
    want = theirs(_ids(), token_type_ids=segments).last_hidden_state
    same(ours(_ids(), segments=segments), want, "output with segments")


@pytest.mark.parametrize(("C", "H", "L", "hidden"), [(24, 4, 2, 40), (20, 5, 1, 96), (12, 1, 3, 28)])
def test_the_encoder_decoder_equals_torchs_own_layers(C, H, L, hidden):
    """nn.Transformer's stacks in float64, without their last norms; embeddings and positions as in 2017."""
    config = seq2seq.Seq2SeqConfig(n_layers=L, d_model=C, n_heads=H, d_ff=hidden, vocab_size=53, context_length=32)
    ours = filled(seq2seq.Seq2Seq(config).double())
    options = {"dim_feedforward": hidden, "dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    encoder_layer, decoder_layer = (
        layer(C, H, **options) for layer in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    stacks = {  # by themselves they end in a norm
        "custom_encoder": nn.TransformerEncoder(encoder_layer, L, enable_nested_tensor=False),
        "custom_decoder": nn.TransformerDecoder(decoder_layer, L),
    }
    theirs = nn.Transformer(C, H, L, L, **stacks, **options)
    theirs.load_state_dict(_as_torchs(ours))
    source, target = torch.randint(0, 53, (B, 7), generator=rng(1)), _ids(2)
    source_is_token = torch.arange(7) < torch.tensor([[7], [4]])
    target_is_token = torch.arange(T) < torch.tensor([[T], [8]])

    def embedded(ids):
        angle = torch.arange(ids.shape[1])[:, None].double() / 10_000.0 ** (torch.arange(0, C, 2) / C)
        places = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        return F.embedding(ids, ours.token_embedding.weight) * C**0.5 + places.float()

    out = theirs(
        embedded(source), embedded(target),
        tgt_mask=~attention.causal_mask(T), src_key_padding_mask=~source_is_token,
        tgt_key_padding_mask=~target_is_token, memory_key_padding_mask=~source_is_token,
    )  # fmt: skip
    want = out @ ours.token_embedding.weight.T
    got = ours(source, target, source_is_token, target_is_token)
    assert (got - want)[target_is_token].abs().max() < 1e-7  # positions are float32 on both sides
    got[target_is_token].square().mean().backward()
    mine = {name: p.grad.clone() for name, p in ours.named_parameters()}
    ours.zero_grad()
    want[target_is_token].square().mean().backward()
    for name, gradient in _as_torchs(ours, lambda name: mine[name]).items():
        assert (theirs.get_parameter(name).grad - gradient).abs().max() < 1e-7, name
    assert (ours.token_embedding.weight.grad - mine["token_embedding.weight"]).abs().max() < 1e-7


def _as_torchs(ours, value=None):
    """Our tensors under nn.Transformer's names: query, key and value rows in one."""
    value = value or (lambda name: ours.state_dict()[name])
    state = {}
    parts = {"mlp.up": "linear1", "mlp.down": "linear2", "norm1": "norm1", "norm2": "norm2", "norm3": "norm3"}
    for stack, attentions in (
        ("encoder", {"attention": "self_attn"}),
        ("decoder", {"self_attention": "self_attn", "cross_attention": "multihead_attn"}),
    ):
        for i in range(ours.config.n_layers):
            mine, theirs = f"{stack}.{i}", f"{stack}.layers.{i}"
            for kind in ("weight", "bias"):
                for part, name in parts.items():
                    if stack == "decoder" or part != "norm3":
                        state[f"{theirs}.{name}.{kind}"] = value(f"{mine}.{part}.{kind}")
                for part, name in attentions.items():
                    rows = [value(f"{mine}.{part}.{x}_proj.{kind}") for x in "qkv"]
                    state[f"{theirs}.{name}.in_proj_{kind}"] = torch.cat(rows)
                    state[f"{theirs}.{name}.out_proj.{kind}"] = value(f"{mine}.{part}.o_proj.{kind}")
    return state


@pytest.mark.parametrize(
    ("model", "config", "n_parameters"),
    [
        (gpt.GPT, gpt.GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50_257, context_length=1024),
         124_439_808),
        (llama.Llama, llama.LlamaConfig(n_layers=22, d_model=2048, n_heads=32, n_kv_heads=4, d_ff=5632,
                                        vocab_size=32_000, context_length=2048), 1_100_048_384),
        (encoder.Encoder, encoder.EncoderConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=30_522,
                                                context_length=512), 109_482_240 - 768 * 769),  # without the pooler
    ],
)  # fmt: skip
def test_published_sizes_have_the_published_number_of_parameters(model, config, n_parameters):
    with torch.device("meta"):
        made = model(config)
    assert sum(p.numel() for p in made.parameters()) == n_parameters
