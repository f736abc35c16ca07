"""FlashAttention in plain PyTorch: exact attention from tiles, which never holds all T x S scores.

Shapes: B batch, H query heads, K key/value heads (K divides H; query head h reads h // (H // K)), T queries, S keys,
D width of a query and of a key, Dv width of a value. Dao et al. (2022); Dao (2023).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def online_softmax(chunks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """The maximum and the sum of a softmax, in one pass: chunks (..., any width) -> maximum (...), total (...).

    The chunks are parts of one row, along the last axis. softmax is exp(x - maximum) / total, so total is the sum of
    exp(x - maximum) over all chunks. Only one chunk is looked at at a time; when the maximum grows, what has been
    summed is rescaled. A row of only -inf has the maximum -inf and the total 0. Raises ValueError if there is no chunk.
    Milakov and Gimelshein (2018).

    >>> online_softmax([torch.tensor([0.0, 0.0]), torch.tensor([math.log(2.0)])])
    (tensor(0.6931), tensor(2.))
    """
    maximum = total = None
    for chunk in chunks:
        if maximum is None:
            maximum = torch.full_like(chunk[..., 0], -math.inf)
            total = torch.zeros_like(maximum)
        higher = torch.maximum(maximum, chunk.amax(-1))
        origin = higher.masked_fill(higher == -math.inf, 0.0)  # -inf - -inf would be NaN
        total = total * (maximum - origin).exp() + (chunk - origin[..., None]).exp().sum(-1)
        maximum = higher
    if maximum is None:
        raise ValueError("a softmax needs at least one chunk")
    return maximum, total


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, block_q: int = 64, block_k: int = 64
) -> tuple[Tensor, Tensor]:
    """Attention from tiles of block_q queries and block_k keys: out (B, H, T, Dv) and logsumexp (B, H, T).

    q (B, H, T, D), k (B, K, S, D), v (B, K, S, Dv). `out` is softmax(q k^T / sqrt(D)) v, in q's dtype. `logsumexp` is
    the natural logarithm of each query's sum of exp(score), scores scaled: all that the backward pass needs of them.
    With `causal` the queries are the last T of the S tokens, and tiles that lie in the future are skipped. A query that
    sees nothing gets 0, and -inf. Computed in at least float32, as `logsumexp` is. Nothing of size T x S ever exists,
    in one tensor or in many. Dao (2023), algorithm 1.

    >>> out, logsumexp = flash_attention(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4), torch.eye(2)[None, None])
    >>> out.tolist(), round(logsumexp.item(), 4)  # log(2)
    ([[[[0.5, 0.5]]]], 0.6931)
    """
    (B, H, T, D), (K, S, Dv) = q.shape, v.shape[1:]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, logsumexp = q.new_empty(B, H, T, Dv), q.new_empty(B, H, T, dtype=wide)
    for first in range(0, T, block_q):
        rows = slice(first, min(first + block_q, T))
        n = rows.stop - first
        q_tile = q[:, :, rows].to(wide).reshape(B, K, -1, D) / math.sqrt(D)  # (B, K, G*n, D): a group side by side
        place = torch.arange(S - T + first, S - T + rows.stop, device=q.device).repeat(H // K)  # (G*n,)
        maximum = q_tile.new_full(q_tile.shape[:3], -math.inf)
        total, mixed = torch.zeros_like(maximum), q_tile.new_zeros(*q_tile.shape[:3], Dv)
        for start in range(0, min(S, S - T + rows.stop) if causal else S, block_k):
            keys = slice(start, start + block_k)
            scores = q_tile @ k[:, :, keys].to(wide).mT  # (B, K, G*n, block_k)
            if causal and start + block_k > S - T + first:  # the tile crosses the diagonal
                future = torch.arange(start, start + scores.shape[-1], device=q.device) > place[:, None]
                scores = scores.masked_fill(future, -math.inf)
            higher = torch.maximum(maximum, scores.amax(-1))
            origin = higher.masked_fill(higher == -math.inf, 0.0)  # a blind row: -inf - -inf would be NaN
            shrink, p = (maximum - origin).exp(), (scores - origin[..., None]).exp()
            total = total * shrink + p.sum(-1)
            mixed = mixed * shrink[..., None] + p @ v[:, :, keys].to(wide)
            maximum = higher
        mixed = mixed / total.masked_fill(total == 0, 1.0)[..., None]
        out[:, :, rows] = mixed.view(B, H, n, Dv).to(q.dtype)
        logsumexp[:, :, rows] = (maximum + total.log()).view(B, H, n)
    return out, logsumexp


def flash_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool = False,
    block_q: int = 64,
    block_k: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients dq, dk, dv of `flash_attention`, tile by tile, shaped and typed as q, k and v.

    `grad_out` (B, H, T, Dv) is the gradient of `out`; `out` and `logsumexp` are what the forward pass gave. A tile's
    weights are computed again, exp(score - logsumexp), so nothing of size T x S was kept and none is made; and without
    torch's autograd. dk and dv
    sum over the query heads of their group. Computed in at least float32. Dao et al. (2022), algorithm 4; Dao (2023).
    """
    (B, H, T, D), (K, S, Dv) = q.shape, v.shape[1:]
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    for first in range(0, T, block_q):
        rows = slice(first, min(first + block_q, T))
        n = rows.stop - first
        q_tile = q[:, :, rows].to(wide).reshape(B, K, -1, D) / math.sqrt(D)  # (B, K, G*n, D)
        g_tile = grad_out[:, :, rows].to(wide).reshape(B, K, -1, Dv)
        place = torch.arange(S - T + first, S - T + rows.stop, device=q.device).repeat(H // K)  # (G*n,)
        lse = logsumexp[:, :, rows].reshape(B, K, -1, 1)
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # a blind row: all its weights are 0
        delta = (g_tile * out[:, :, rows].to(wide).reshape(B, K, -1, Dv)).sum(-1, keepdim=True)
        dq_tile = torch.zeros_like(q_tile)
        for start in range(0, min(S, S - T + rows.stop) if causal else S, block_k):
            keys = slice(start, start + block_k)
            k_tile = k[:, :, keys].to(wide)
            p = (q_tile @ k_tile.mT - lse).exp()  # (B, K, G*n, block_k)
            if causal and start + block_k > S - T + first:
                future = torch.arange(start, start + p.shape[-1], device=q.device) > place[:, None]
                p = p.masked_fill(future, 0.0)
            dv[:, :, keys] += p.mT @ g_tile
            d_scores = p * (g_tile @ v[:, :, keys].to(wide).mT - delta)
            dk[:, :, keys] += d_scores.mT @ q_tile  # q_tile is scaled
            dq_tile += d_scores @ k_tile
        dq[:, :, rows] = (dq_tile / math.sqrt(D)).view(B, H, n, D)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, logsumexp = flash_attention(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return *flash_attention_backward(grad_out, *ctx.saved_tensors, ctx.causal), None


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """`flash_attention`'s out (B, H, T, Dv) for use in a model: its gradients are `flash_attention_backward`'s.

    For the backward pass q, k, v, out and logsumexp are kept: nothing grows with T x S.
    """
    return _Tiled.apply(q, k, v, causal)
