"""Rotary positions equal transformers' and complex numbers', sinusoids NumPy's, embeddings torch's."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmlib import positions

from ..same import rng, same


@pytest.mark.parametrize(("D", "base"), [(8, 10_000.0), (34, 500_000.0), (2, 100.0)])
@pytest.mark.parametrize("shape", [(11,), (2, 11)])
def test_apply_rope_equals_transformers_llama(D, base, shape):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    parameters = {"rope_type": "default", "rope_theta": base}
    config = LlamaConfig(hidden_size=3 * D, num_attention_heads=3, head_dim=D, rope_parameters=parameters)
    q, k = (torch.randn(2, 3, 11, D, generator=rng(i)) for i in range(2))
    places = torch.randint(0, 64, shape, generator=rng(4))
    cos, sin = llama.LlamaRotaryEmbedding(config)(q, places.expand(2, 11))
    want = llama.apply_rotary_pos_emb(q, k, cos, sin)
    for x, turned, name in zip((q, k), want, "qk", strict=True):
        same(positions.apply_rope(x, places, base), turned, name)


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(1, 4), max_size=3),
    T=st.integers(1, 7),
    half=st.integers(1, 9),
    base=st.floats(2, 1e6),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_apply_rope_is_a_product_with_complex_numbers(lead, T, half, base, interleaved, seed):
    x = torch.randn(*lead, T, 2 * half, generator=rng(seed), dtype=torch.float64)
    places = torch.randint(0, 5_000, (T,), generator=rng(seed + 1))
    angle = places.numpy()[:, None] * base ** (-np.arange(half) / half)
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).mT
    turned = pairs.numpy()[..., 0] + 1j * pairs.numpy()[..., 1]
    turned = turned * np.exp(1j * angle)
    want = torch.from_numpy(np.stack([turned.real, turned.imag], axis=-1))
    want = want.flatten(-2) if interleaved else want.mT.flatten(-2)
    same(positions.apply_rope(x, places, base, interleaved), want, "apply_rope in float64")


@settings(max_examples=40, deadline=None)
@given(T=st.integers(1, 40), half=st.integers(1, 20), base=st.floats(2, 1e6))
def test_sinusoids_equal_numpy(T, half, base):
    angle = np.arange(T)[:, None] * base ** (-np.arange(half) / half)
    want = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(T, 2 * half)
    same(positions.sinusoidal(T, 2 * half, base), torch.from_numpy(want).float(), "sinusoidal")


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(0, 5), max_size=3), V=st.integers(1, 9), C=st.integers(1, 9))
def test_embed_equals_torch_with_its_gradient(shape, V, C):
    ids = torch.randint(0, V, shape, generator=rng(V))
    mine, theirs = (torch.randn(V, C, generator=rng(C), dtype=torch.float64).requires_grad_() for _ in range(2))
    got, want = positions.embed(ids, mine), F.embedding(ids, theirs)
    same(got, want, "embed")
    (got.square().sum() + mine.sum()).backward()
    (want.square().sum() + theirs.sum()).backward()
    same(mine.grad, theirs.grad, "gradient of the table")
