"""Several heads in one matrix product; multi-head, grouped-query and multi-query attention as one family.

Shapes: B batch, T queries, S keys, C model width, H query heads, K key/value heads, D head width.
"""

import torch
from torch import Tensor, nn

from tfmlib import attention
from tfmlib import positions as rotary


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Cut the width into heads, and put them before tokens: (B, T, H*D) -> (B, H, T, D).

    Head h takes the features h*D ... h*D + D - 1 of every token. Raises ValueError if
    the width does not divide into the heads.

    >>> split_heads(torch.arange(6).view(1, 1, 6), 2).tolist()
    [[[[0, 1, 2]], [[3, 4, 5]]]]
    """
    B, T, width = x.shape
    if width % n_heads:
        raise ValueError(f"{width=} must divide into {n_heads=}")
    return x.view(B, T, n_heads, width // n_heads).transpose(1, 2)  # (B, H, T, D)


def merge_heads(x: Tensor) -> Tensor:
    """Put each token's heads side by side, undoing `split_heads`: (B, H, T, D) -> (B, T, H*D).

    >>> merge_heads(torch.arange(6).view(1, 2, 1, 3)).tolist()
    [[[0, 1, 2, 3, 4, 5]]]
    """
    return x.transpose(1, 2).flatten(2)  # (B, T, H*D)


def repeat_kv(x: Tensor, n_repeat: int) -> Tensor:
    """Give each key/value head n_repeat query heads: (B, K, S, D) -> (B, K*n_repeat, S, D).

    Query head h reads key/value head h // n_repeat, so copies stand side by side.
    Ainslie et al. (2023).

    >>> repeat_kv(torch.tensor([1, 2]).view(1, 2, 1, 1), 2).flatten().tolist()
    [1, 1, 2, 2]
    """
    return x.unsqueeze(2).expand(-1, -1, n_repeat, -1, -1).flatten(1, 2)  # (B, K*n_repeat, S, D)


class MultiHeadAttention(nn.Module):
    """Attention with H query heads and K key/value heads: (B, T, C) -> (B, T, C).

    K = H is multi-head attention, 1 < K < H grouped-query (GQA), K = 1 multi-query (MQA).
    `n_kv_heads` defaults to n_heads and `head_dim` to d_model // n_heads; H * D may differ
    from C. The four projections q_proj, k_proj, v_proj and o_proj have a bias, or none has.
    With `rope_base`, queries and keys are turned by their positions (half-split pairs), in
    self-attention only.

    `context` (B, S, C) holds the tokens to read from, x itself if None. `mask` is boolean,
    True where a query may look, and broadcasts to (B, H, T, S); None shows everything.
    `positions` (T,) or (B, T) default to those that follow the cache. `cache` is one layer's
    view: `cache.length` tokens so far, and `cache.append(k, v)`, which takes (B, K, T, D)
    and returns all keys and values.

    Raises ValueError if K does not divide H, if d_model does not divide into heads of a
    default width, or for a cache together with a context. Vaswani et al. (2017), section
    3.2.2; Ainslie et al. (2023).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rope_base: float | None = None,
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if n_heads % n_kv_heads:
            raise ValueError(f"{n_kv_heads=} must divide {n_heads=}")
        if head_dim is None and d_model % n_heads:
            raise ValueError(f"{d_model=} must divide into {n_heads=}, or give head_dim")
        head_dim = d_model // n_heads if head_dim is None else head_dim
        self.n_heads, self.n_kv_heads, self.rope_base = n_heads, n_kv_heads, rope_base
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache=None,
    ) -> Tensor:
        if cache is not None and context is not None:
            raise ValueError("pass a cache or a context, not both: it holds own keys")
        source = x if context is None else context
        q = split_heads(self.q_proj(x), self.n_heads)  # (B, H, T, D)
        k = split_heads(self.k_proj(source), self.n_kv_heads)  # (B, K, S, D)
        v = split_heads(self.v_proj(source), self.n_kv_heads)  # (B, K, S, D)
        if self.rope_base is not None and context is None:
            if positions is None:
                start = 0 if cache is None else cache.length
                positions = torch.arange(start, start + x.shape[1], device=x.device)
            q = rotary.apply_rope(q, positions, self.rope_base)
            k = rotary.apply_rope(k, positions, self.rope_base)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, K, all so far, D)
        group = self.n_heads // self.n_kv_heads
        k, v = repeat_kv(k, group), repeat_kv(v, group)  # (B, H, S, D)
        mixed = attention.scaled_dot_product_attention(q, k, v, mask)  # (B, H, T, D)
        return self.o_proj(merge_heads(mixed))  # (B, T, C)
