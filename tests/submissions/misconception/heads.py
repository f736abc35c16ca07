"""A learner who repeats key heads in turn, a, b, a, b, and has everything else right."""

import torch
from torch import nn

from tfmlib import attention
from tfmlib import positions as rotary


def split_heads(x, n_heads):
    if x.shape[-1] % n_heads:
        raise ValueError("n_heads must divide the width")
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x):
    return x.transpose(1, 2).flatten(-2)


def repeat_kv(x, n_repeat):
    return x.repeat(1, n_repeat, 1, 1)


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_heads, n_kv_heads=None, head_dim=None, bias=False, rope_base=None):
        super().__init__()
        n_kv_heads = n_kv_heads or n_heads
        if n_heads % n_kv_heads != 0 or (head_dim is None and d_model % n_heads != 0):
            raise ValueError("heads do not divide")
        head_dim = head_dim or d_model // n_heads
        self.h, self.k, self.base = n_heads, n_kv_heads, rope_base
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias=bias)

    def forward(self, x, context=None, mask=None, positions=None, cache=None):
        if context is not None and cache is not None:
            raise ValueError("either a context or a cache")
        source = x if context is None else context
        q = split_heads(self.q_proj(x), self.h)
        k = split_heads(self.k_proj(source), self.k)
        v = split_heads(self.v_proj(source), self.k)
        if self.base is not None and context is None:
            if positions is None:
                positions = torch.arange(x.shape[1]) + (cache.length if cache else 0)
            q = rotary.apply_rope(q, positions, self.base)
            k = rotary.apply_rope(k, positions, self.base)
        if cache is not None:
            k, v = cache.append(k, v)
        k = repeat_kv(k, self.h // self.k)
        v = repeat_kv(v, self.h // self.k)
        return self.o_proj(merge_heads(attention.scaled_dot_product_attention(q, k, v, mask)))
