"""However a text is fed, its logits are those of one pass over all of it; and greedy text is transformers' own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmlib import cache, costs, sampling
from tfmlib.course.meters import Alive
from tfmlib.models import gpt, llama, weights

from ..same import filled
from .data import data

SIZES = {"n_layers": 3, "d_model": 24, "n_heads": 4, "vocab_size": 53, "context_length": 48}
MODELS = {  # learned and rotary positions, each with as many key/value heads, with groups, and with one for all
    f"{make.__name__}-{name}": (make, config, n_kv_heads)
    for make, config in ((gpt.GPT, gpt.GPTConfig), (llama.Llama, llama.LlamaConfig))
    for name, n_kv_heads in (("MHA", 4), ("GQA", 2), ("MQA", 1))
}


def made(name, dtype=torch.float32):
    make, config, n_kv_heads = MODELS[name]
    return filled(make(config(**SIZES, n_kv_heads=n_kv_heads)).to(dtype))


def empty(model, B, capacity, dtype=torch.float32):
    config = model.config
    return cache.KVCache(config.n_layers, B, config.n_kv_heads, config.head_dim, capacity, dtype)


@st.composite
def feedings(draw):
    """A batch of prompts of unequal lengths, padded on the left, and how it is cut into chunks."""
    lengths = draw(st.lists(st.integers(1, 21), min_size=1, max_size=4))
    T = max(lengths)
    cuts = sorted(draw(st.sets(st.integers(1, T - 1), max_size=8))) if T > 1 else []
    chunks = [b - a for a, b in zip([0, *cuts], [*cuts, T], strict=True)]
    return lengths, chunks, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("name", MODELS)
@given(feeding=feedings())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_way_of_feeding_gives_the_logits_of_one_pass(name, feeding):
    lengths, chunks, seed = feeding
    model, T = made(name), max(lengths)
    assert 0.5 < model(torch.arange(9)[None]).std() < 5  # else 1e-5 would say little
    ids = torch.randint(0, 53, (len(lengths), T), generator=torch.Generator().manual_seed(seed))
    is_token = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    kept = empty(model, len(lengths), T + 2)
    place = 0
    for n in chunks:
        place += n
        mask = None if is_token.all() else is_token[:, :place]
        got = cache.prefill(model, ids[:, place - n : place], kept, mask)
        assert kept.length == place
        for row, length in enumerate(lengths):
            alone = ids[row, T - length : place]
            if len(alone):
                with torch.no_grad():
                    want = model(alone[None])[0, -1]
                assert (got[row] - want).abs().max() <= 1e-5


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_a_trimmed_cache_goes_on_as_if_the_rest_had_never_been(name, data):
    model, text = made(name, torch.float64), torch.zeros(2, 0, dtype=torch.long)
    kept = empty(model, 2, 30, torch.float64)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    for _ in range(4):
        keep = data.draw(st.integers(0, text.shape[1] + 2))
        kept.trim(keep)
        text = text[:, :keep]
        new = torch.randint(0, 53, (2, data.draw(st.integers(1, 6))), generator=generator)
        text = torch.cat([text, new], dim=1)
        got = cache.prefill(model, new, kept)
        assert (got - model(text)[:, -1]).abs().max() <= 1e-12


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_generate_cached_is_generate(name, seed):
    model = made(name)
    ids = torch.randint(0, 53, (3, 7), generator=torch.Generator().manual_seed(seed))
    how = {"temperature": 1.3, "top_k": 30, "top_p": 0.95, "eos_id": 3}
    plain = sampling.generate(model, ids, 25, **how, generator=torch.Generator().manual_seed(seed))
    fast = cache.generate_cached(model, ids, 25, **how, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(fast, plain)


@pytest.mark.parametrize("name", MODELS)
def test_stored_by_columns_a_model_is_the_same(name):
    model, ids = made(name, torch.float64), torch.arange(20)[None]
    want = model(ids).detach()
    before = {key: (value.shape, value.clone()) for key, value in model.state_dict().items()}
    cache.store_by_columns(model)
    assert model.blocks[0].mlp.up.weight.stride() == (1, model.blocks[0].mlp.up.out_features)
    assert all(
        value.shape == shape and value.equal(old)
        for (shape, old), value in zip(before.values(), model.state_dict().values(), strict=True)
    )
    torch.testing.assert_close(model(ids).detach(), want)
    model(ids).sum().backward()  # it can still be trained


@pytest.mark.parametrize("name", MODELS)
def test_bytes_measured_are_bytes_counted(name):
    model = made(name)
    with Alive() as alive:
        empty(model, 5, 31, torch.float16)
    assert alive.peak == costs.kv_cache_bytes(model.config, B=5, T=31, bytes_per_element=2)


# Beside transformers --------------------------------------------------------------------------------------------------


def their_gpt2(K):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=24, n_head=4, n_layer=3, vocab_size=53, n_positions=48, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config), weights.load_gpt2


def their_llama(K):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=K, num_hidden_layers=3, intermediate_size=56,
        vocab_size=53, max_position_embeddings=48, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), weights.load_llama


THEIRS = [pytest.param(their_gpt2, 4, id="GPT-2"), *(pytest.param(their_llama, K, id=f"Llama-{K}") for K in (4, 2, 1))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("make", "K"), THEIRS)
def test_greedy_text_is_that_of_transformers(make, K, seed, tmp_path):
    """In a batch with padding on the left, and with an end token that cuts some rows short."""
    theirs, load = make(K)
    filled(theirs.eval(), salt=seed)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 53, (4, 9), generator=generator)
    is_token = torch.arange(9) >= torch.tensor([0, 4, 8, 1])[:, None]
    ids = ids.masked_fill(~is_token, 0)
    free = cache.generate_cached(ours, ids, 30, temperature=0, is_token=is_token)
    eos = int(free[:, 12:20].flatten()[seed])  # a token that comes up
    for end in (None, eos):
        got = cache.generate_cached(ours, ids, 30, temperature=0, is_token=is_token, eos_id=end)
        want = theirs.generate(
            ids, attention_mask=is_token.long(), max_new_tokens=30, do_sample=False, pad_token_id=end or 0,
            eos_token_id=end,
        )  # fmt: skip
        assert got.tolist() == want.tolist()


def test_a_trained_model_writes_the_same_with_and_without_a_cache():
    from tfmlib.models.checkpoints import find

    data("aidreams260K.bin")
    model, _, ids = find().load()
    prompt = torch.tensor([ids])
    plain = sampling.generate(model, prompt, 80, temperature=0)
    assert torch.equal(cache.generate_cached(model, prompt, 80, temperature=0), plain)
