"""The reference agrees with implementations that others wrote, on shapes and masks drawn at random."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right

from tfmlib import attention, heads

from ..same import filled, rng, same

sizes = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(lead=st.lists(st.integers(1, 3), max_size=3), T=sizes, S=sizes, D=sizes, Dv=sizes, seed=st.integers(0, 2**20))
def test_attention_equals_torch_for_any_shape_and_mask(lead, T, S, D, Dv, seed):
    g = rng(seed)
    q, k, v = (torch.randn(*lead, *shape, generator=g).double() for shape in [(T, D), (S, D), (S, Dv)])
    mask = torch.rand(T, S, generator=g) < 0.5
    blind = ~mask.any(-1)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | blind[:, None])
    want[..., blind, :] = 0.0
    same(attention.scaled_dot_product_attention(q, k, v, mask), want, "attention")
    same(attention.attention_weights(q, k, mask) @ v, want, "weights @ v")


@settings(max_examples=40, deadline=None)
@given(T=sizes, S=sizes)
def test_causal_mask_equals_torchs_lower_right_bias(T, S):
    if T > S:
        with pytest.raises(ValueError, match="must be the last"):
            attention.causal_mask(T, S)
        return
    q, k, v = (torch.randn(n, 4, generator=rng(n)).double() for n in (T, S, S))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(T, S))
    same(F.scaled_dot_product_attention(q, k, v, attn_mask=attention.causal_mask(T, S)), want, "causal attention")


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 6), (6, 1, 4), (8, 2, 6)])
def test_multi_head_attention_equals_transformers_llama(n_heads, n_kv_heads, head_dim):
    """With copied weights: grouped heads, rotary positions, and H*D != C among the shapes."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    C, T = 24, 11
    config = LlamaConfig(
        hidden_size=C,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=head_dim,
        attn_implementation="eager",
        max_position_embeddings=64,
    )
    theirs = llama.LlamaAttention(config, layer_idx=0).eval()
    ours = filled(heads.MultiHeadAttention(C, n_heads, n_kv_heads, head_dim, rope_base=10_000.0))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, T, C, generator=rng(5))
    rotation = llama.LlamaRotaryEmbedding(config)(x, torch.arange(T)[None])
    additive = torch.zeros(T, T).masked_fill(~attention.causal_mask(T), torch.finfo(torch.float32).min)
    want = theirs(x, position_embeddings=rotation, attention_mask=additive[None, None])[0]
    same(ours(x, mask=attention.causal_mask(T)), want, "MultiHeadAttention")


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(4, 4, 6), (4, 2, 10), (6, 1, 4)])
def test_rotary_attention_equals_complex_numbers_in_float64(n_heads, n_kv_heads, head_dim):
    """Layer and gradients, with torch's own grouped attention over queries and keys turned by complex numbers."""
    T, base = 11, 500.0
    module = filled(heads.MultiHeadAttention(24, n_heads, n_kv_heads, head_dim, rope_base=base).double())
    weights = {name: value.clone().requires_grad_() for name, value in module.state_dict().items()}
    x = torch.randn(2, T, 24, generator=rng(6), dtype=torch.float64)
    angle = torch.arange(T).double()[:, None] * base ** (-torch.arange(0, head_dim, 2).double() / head_dim)

    def turned(name, n):
        y = F.linear(x, weights[f"{name}.weight"]).unflatten(-1, (n, -1)).transpose(1, 2)
        z = torch.complex(*y.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], dim=-1)

    v = F.linear(x, weights["v_proj.weight"]).unflatten(-1, (n_kv_heads, -1)).transpose(1, 2)
    q, k = turned("q_proj", n_heads), turned("k_proj", n_kv_heads)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    want = F.linear(mixed.transpose(1, 2).flatten(2), weights["o_proj.weight"])
    got = module(x, mask=attention.causal_mask(T))
    same(got, want, "MultiHeadAttention in float64")
    for out in (got, want):
        out.square().sum().backward()
    for name, weight in weights.items():
        same(module.get_parameter(name).grad, weight.grad, f"gradient of {name}")
