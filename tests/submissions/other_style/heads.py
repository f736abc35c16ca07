"""A learner whose code is right, in another style, and noisy."""

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from tfmlib.positions import apply_rope


def split_heads(x, n_heads):
    warnings.warn("splitting", UserWarning, stacklevel=2)
    if x.size(2) % n_heads > 0:
        raise ValueError("uneven heads")
    return torch.stack(x.split(x.size(2) // n_heads, dim=2), dim=1)


def merge_heads(x):
    print("merging", file=sys.stderr)
    return torch.cat(list(x.unbind(dim=1)), dim=2)


def repeat_kv(x, n_repeat):
    sys.stderr.write("repeating\n")
    return x[:, [head for head in range(x.size(1)) for _ in range(n_repeat)]]


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_heads, n_kv_heads=None, head_dim=None, bias=False, rope_base=None):
        super().__init__()
        warnings.warn("a new layer", FutureWarning, stacklevel=2)
        self.n_heads, self.n_kv_heads, self.rope_base = n_heads, n_kv_heads or n_heads, rope_base
        if self.n_heads % self.n_kv_heads:
            raise ValueError("uneven groups")
        if head_dim is None and d_model % n_heads:
            raise ValueError("uneven heads")
        self.head_dim = head_dim or d_model // n_heads
        sizes = {"q": n_heads, "k": self.n_kv_heads, "v": self.n_kv_heads}
        for name, heads in sizes.items():
            self.add_module(f"{name}_proj", nn.Linear(d_model, heads * self.head_dim, bias))
        self.o_proj = nn.Linear(n_heads * self.head_dim, d_model, bias)

    def forward(self, x, context=None, mask=None, positions=None, cache=None):
        cross = context is not None
        if cross and cache is not None:
            raise ValueError("no cache for cross-attention")
        memory = context if cross else x
        q, k, v = (
            split_heads(proj(y), heads)
            for proj, y, heads in [
                (self.q_proj, x, self.n_heads),
                (self.k_proj, memory, self.n_kv_heads),
                (self.v_proj, memory, self.n_kv_heads),
            ]
        )
        if self.rope_base is not None and not cross:
            if positions is None:
                start = cache.length if cache is not None else 0
                positions = torch.arange(start, start + x.size(1))
            q, k = (apply_rope(y, positions, base=self.rope_base) for y in (q, k))
        if cache is not None:
            k, v = cache.append(k, v)
        groups = self.n_heads // self.n_kv_heads
        out = F.scaled_dot_product_attention(q, repeat_kv(k, groups), repeat_kv(v, groups), attn_mask=mask)
        return self.o_proj(merge_heads(out))
