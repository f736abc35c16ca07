"""Norms, MLPs and blocks equal torch's own layers and transformers', in float64, gradients too."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tfmlib import attention, blocks, heads

from ..same import filled, rng, same

B, T, S = 2, 5, 7


def _x(*shape, salt=0):
    return torch.randn(shape, generator=rng(salt), dtype=torch.float64)


def _same_with_gradients(ours, theirs, names, *inputs, what):
    """Two modules give the same on the same inputs, and get the same gradients. `names`: theirs -> ours."""
    goal, results = None, []
    for module in (ours, theirs):
        given = [x.clone().requires_grad_() for x in inputs]
        out = module(*given)
        goal = _x(*out.shape, salt=9) if goal is None else goal
        out.backward(goal)
        results.append((out, [x.grad for x in given]))
    (got, got_grads), (want, want_grads) = results
    same(got, want, what)
    for i, (g, w) in enumerate(zip(got_grads, want_grads, strict=True)):
        same(g, w, f"{what}: gradient of input {i}")
    for theirs_name, parameter in theirs.named_parameters():
        parts = names(theirs_name)
        gradient = torch.cat([ours.get_parameter(name).grad for name in parts])
        same(gradient, parameter.grad, f"{what}: gradient of {theirs_name}")


@settings(max_examples=50, deadline=None)
@given(
    lead=st.lists(st.integers(1, 6), max_size=3),
    C=st.integers(2, 9),  # with one feature the variance is 0, and rounding all that is left
    eps=st.floats(1e-12, 0.1),
    scale=st.floats(1e-3, 1e3),
    kind=st.sampled_from([(blocks.LayerNorm, nn.LayerNorm), (blocks.RMSNorm, nn.RMSNorm)]),
)
def test_norms_equal_torchs(lead, C, eps, scale, kind):
    ours, theirs = (filled(module(C, eps=eps).double()) for module in kind)
    _same_with_gradients(ours, theirs, lambda name: [name], _x(*lead, C) * scale, what=kind[0].__name__)


@pytest.mark.parametrize(("bias", "activation"), [(True, F.gelu), (False, F.relu), (True, torch.tanh)])
def test_mlp_equals_torchs_layers(bias, activation):
    ours = filled(blocks.MLP(12, 31, bias=bias, activation=activation).double())

    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(12, 31, bias=bias), nn.Linear(31, 12, bias=bias)

        def forward(self, x):
            return self.down(activation(self.up(x)))

    _same_with_gradients(ours, filled(Theirs().double()), lambda name: [name], _x(B, T, 12), what="MLP")


def test_swiglu_equals_transformers_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    theirs = llama.LlamaMLP(LlamaConfig(hidden_size=12, num_attention_heads=3, intermediate_size=31)).double()
    ours = filled(blocks.SwiGLU(12, 31).double())
    theirs.load_state_dict({name.replace(".", "_proj."): value for name, value in ours.state_dict().items()})
    _same_with_gradients(ours, theirs, lambda name: [name.replace("_proj.", ".")], _x(B, T, 12), what="SwiGLU")


def test_rms_norm_equals_transformers_llama():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs, ours = filled(llama.LlamaRMSNorm(12, eps=1e-3)), filled(blocks.RMSNorm(12, eps=1e-3))
    x = _x(B, T, 12).float()
    same(ours(x), theirs(x), "RMSNorm")


ATTENTION = {"self_attn": "attention", "multihead_attn": "cross_attention"}
PARTS = {"linear1": "mlp.up", "linear2": "mlp.down"}


def _ours_for(name, self_attention="attention"):
    """Our names for a parameter of torch's layer: query, key and value rows are three of ours."""
    part, _, rest = name.partition(".")
    if part in PARTS:
        return [f"{PARTS[part]}.{rest}"]
    if part.startswith("norm"):
        return [name]
    ours = self_attention if part == "self_attn" else ATTENTION[part]
    if rest.startswith("in_proj"):
        return [f"{ours}.{x}_proj.{rest.removeprefix('in_proj_')}" for x in "qkv"]
    return [f"{ours}.o_proj.{rest.removeprefix('out_proj.')}"]


def _copied(theirs, ours, names):
    state = ours.state_dict()
    theirs.load_state_dict({n: torch.cat([state[part] for part in names(n)]) for n in theirs.state_dict()})
    return theirs


def _attention():
    return heads.MultiHeadAttention(12, 3, bias=True)


@pytest.mark.parametrize("block", [blocks.PreNormBlock, blocks.PostNormBlock])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_equal_torchs_encoder_layer(block, masked):
    ours = block(_attention(), blocks.MLP(12, 31), blocks.LayerNorm(12), blocks.LayerNorm(12))
    ours = filled(ours.double())
    theirs = nn.TransformerEncoderLayer(
        12, 3, 31, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=block is blocks.PreNormBlock
    )
    theirs = _copied(theirs.double(), ours, _ours_for)
    mask = attention.causal_mask(T) if masked else None

    class Both(nn.Module):
        def __init__(self, layer, **options):
            super().__init__()
            self.layer, self.options = layer, options

        def forward(self, x):
            return self.layer(x, **self.options)

    def names(name):
        return [f"layer.{part}" for part in _ours_for(name.removeprefix("layer."))]

    mine = Both(ours, mask=mask)
    torchs = Both(theirs, src_mask=None if mask is None else ~mask)
    _same_with_gradients(mine, torchs, names, _x(B, T, 12), what=block.__name__)


def test_decoder_block_equals_torchs_decoder_layer():
    norms = [blocks.LayerNorm(12) for _ in range(3)]
    ours = filled(
        blocks.DecoderBlock(_attention(), _attention(), blocks.MLP(12, 31, activation=F.relu), *norms).double()
    )
    theirs = nn.TransformerDecoderLayer(12, 3, 31, dropout=0.0, batch_first=True).double()

    def names(name):
        return _ours_for(name, self_attention="self_attention")

    _copied(theirs, ours, names)
    context_mask = torch.tensor([[True] * S, [True] * 4 + [False] * 3])
    mask = attention.causal_mask(T)

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("layer", ours)

        def forward(self, x, context):
            return ours(x, context, mask=mask, context_mask=context_mask[:, None, None])

    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("layer", theirs)

        def forward(self, x, context):
            return theirs(x, context, tgt_mask=~mask, memory_key_padding_mask=~context_mask)

    def in_layer(name):
        return [f"layer.{part}" for part in names(name.removeprefix("layer."))]

    _same_with_gradients(Ours(), Theirs(), in_layer, _x(B, T, 12), _x(B, S, 12, salt=1), what="DecoderBlock")
