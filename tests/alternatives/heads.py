"""Other correct implementations of heads and of multi-head attention."""

import torch
import torch.nn.functional as F
from torch import nn

from . import correct


@correct("split_heads")
def split_by_chunks(x, n_heads):
    """Blocks of features, stacked on a new axis."""
    if x.size(-1) % n_heads != 0:
        raise ValueError(f"{x.size(-1)} features, {n_heads} heads")
    return torch.stack(torch.chunk(x, n_heads, dim=-1), dim=1)


@correct("split_heads")
def split_by_index(x, n_heads):
    """One slice a head."""
    D, rest = divmod(x.shape[2], n_heads)
    if rest:
        raise ValueError("the width does not divide")
    out = x.new_empty(x.shape[0], n_heads, x.shape[1], D)
    for h in range(n_heads):
        out[:, h] = x[:, :, h * D : (h + 1) * D]
    return out


@correct("split_heads")
def split_by_unflatten(x, n_heads):
    """Unflatten, then permute, into contiguous memory."""
    if x.shape[-1] % n_heads:
        raise ValueError("the width does not divide")
    return x.unflatten(-1, (n_heads, -1)).permute(0, 2, 1, 3).contiguous()


@correct("merge_heads")
def merge_by_cat(x):
    """The heads, concatenated."""
    return torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1)


@correct("merge_heads")
def merge_by_einsum(x):
    """The axes in a new order by einsum, then a view of contiguous memory."""
    B, H, T, D = x.shape
    return torch.einsum("bhtd->bthd", x).contiguous().view(B, T, H * D)


@correct("repeat_kv")
def repeat_by_expand(x, n_repeat):
    """A view with a copy axis, merged: as in Llama's published code."""
    B, K, S, D = x.shape
    return x[:, :, None].expand(B, K, n_repeat, S, D).reshape(B, K * n_repeat, S, D)


@correct("repeat_kv")
def repeat_by_index(x, n_repeat):
    """Query head h reads key head h // n."""
    return x[:, torch.arange(x.shape[1] * n_repeat) // n_repeat]


class _Projections(nn.Module):
    """The constructor, which leaves little room for taste."""

    def __init__(self, d_model, n_heads, n_kv_heads=None, head_dim=None, bias=False, rope_base=None):
        super().__init__()
        n_kv_heads = n_kv_heads or n_heads
        if n_heads % n_kv_heads:
            raise ValueError(f"{n_heads} query heads on {n_kv_heads} key heads")
        if not head_dim:
            head_dim, rest = divmod(d_model, n_heads)
            if rest:
                raise ValueError(f"{d_model} features for {n_heads} heads")
        self.heads, self.groups, self.head_dim, self.rope_base = n_heads, n_kv_heads, head_dim, rope_base
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias)
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias)

    def angles(self, T, positions, cache):
        """(..., T, D/2) angles in float64, with an axis for heads where the batch has its own positions."""
        if positions is None:
            positions = torch.arange(T) + (cache.length if cache is not None else 0)
        exponent = torch.arange(self.head_dim // 2, dtype=torch.float64) * 2 / self.head_dim
        angle = positions.double().unsqueeze(-1) / self.rope_base**exponent
        return angle.unsqueeze(1) if positions.dim() == 2 else angle


@correct("MultiHeadAttention")
class OneHeadAtATime(_Projections):
    """A loop over query heads, each with its own slice of the weights."""

    def forward(self, x, context=None, mask=None, positions=None, cache=None):
        if context is not None and cache is not None:
            raise ValueError("context and cache")
        source = x if context is None else context
        k = torch.stack([self._head(self.k_proj, source, g) for g in range(self.groups)], 1)
        v = torch.stack([self._head(self.v_proj, source, g) for g in range(self.groups)], 1)
        q = torch.stack([self._head(self.q_proj, x, h) for h in range(self.heads)], 1)
        if self.rope_base is not None and context is None:
            angle = self.angles(x.shape[1], positions, cache)
            q, k = self._turned(q, angle), self._turned(k, angle)
        if cache is not None:
            k, v = cache.append(k, v)
        outs = []
        for h in range(self.heads):
            g = h // (self.heads // self.groups)
            scores = q[:, h] @ k[:, g].transpose(1, 2) / self.head_dim**0.5
            if mask is not None:
                m = mask.expand(x.shape[0], self.heads, *scores.shape[1:])[:, h]
                scores = torch.where(m, scores, torch.finfo(scores.dtype).min)
            weights = torch.softmax(scores, -1)
            outs.append((weights if mask is None else weights * m) @ v[:, g])
        return self.o_proj(torch.cat(outs, -1))

    def _head(self, proj, x, h):
        rows = slice(h * self.head_dim, (h + 1) * self.head_dim)
        return F.linear(x, proj.weight[rows], None if proj.bias is None else proj.bias[rows])

    def _turned(self, x, angle):
        half = self.head_dim // 2
        rotated = torch.cat([-x[..., half:], x[..., :half]], -1).double()
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        return (x.double() * cos + rotated * sin).to(x.dtype)


@correct("MultiHeadAttention")
class FusedByTorch(_Projections):
    """torch's own attention with grouped heads; rotation by complex numbers."""

    def forward(self, x, context=None, mask=None, positions=None, cache=None):
        if not (context is None or cache is None):
            raise ValueError("a cache with a context")
        B, T, _ = x.shape
        memory = context if context is not None else x
        q = self.q_proj(x).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.k_proj(memory).view(B, -1, self.groups, self.head_dim).transpose(1, 2)
        v = self.v_proj(memory).view(B, -1, self.groups, self.head_dim).transpose(1, 2)
        if self.rope_base and context is None:
            turn = torch.polar(torch.ones((), dtype=torch.float64), self.angles(T, positions, cache))
            q, k = self._turned(q, turn), self._turned(k, turn)
        if cache is not None:
            k, v = cache.append(k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.heads != self.groups)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))

    def _turned(self, x, turn):
        z = torch.complex(*x.double().chunk(2, -1)) * turn
        return torch.cat([z.real, z.imag], -1).to(x.dtype)


@correct("MultiHeadAttention")
class GroupedByEinsum(_Projections):
    """Keys and values are never repeated: the query heads get a group axis instead."""

    def forward(self, x, context=None, mask=None, positions=None, cache=None):
        if context is not None and cache is not None:
            raise ValueError("context and cache")
        source = x if context is None else context
        q = self.q_proj(x).unflatten(-1, (self.groups, -1, self.head_dim))  # (B, T, K, n, D)
        k = self.k_proj(source).unflatten(-1, (self.groups, self.head_dim))  # (B, S, K, D)
        v = self.v_proj(source).unflatten(-1, (self.groups, self.head_dim))
        if self.rope_base is not None and context is None:
            angle = self.angles(x.shape[1], positions, cache)
            q = self._turned(q.flatten(2, 3).transpose(1, 2), angle).transpose(1, 2).unflatten(2, (self.groups, -1))
            k = self._turned(k.transpose(1, 2), angle).transpose(1, 2)
        if cache is not None:
            k, v = (y.transpose(1, 2) for y in cache.append(k.transpose(1, 2), v.transpose(1, 2)))
        scores = torch.einsum("btknd,bskd->bknts", q, k).flatten(1, 2) / self.head_dim**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0).unflatten(1, (self.groups, -1))
        return self.o_proj(torch.einsum("bknts,bskd->btknd", weights, v).flatten(2))

    def _turned(self, x, angle):
        a, b = x.tensor_split(2, dim=-1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
