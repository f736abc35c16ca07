"""FlashAttention as a Triton kernel, and a way for it into the models.

Shapes: B batch, H query heads, K key/value heads (K divides H), T queries, S keys, D head width.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tfmlib import attention, flash, heads, kernels
from tfmlib.kernels import launch, tl, triton


@triton.jit(do_not_specialize=["H", "K", "T", "S"])
def flash_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    H,
    K,
    T,
    S,
    D: tl.constexpr,
    causal: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of out and logsumexp: the program (i, h, b) owns the queries from i * BLOCK_Q of head h of row b.

    The pointers are those of q (B, H, T, D), k and v (B, K, S, D), out (B, H, T, D) and logsumexp (B, H, T), which is
    contiguous, float32: the natural logarithm of a query's sum of exp(score), scores divided by sqrt(D). Strides are in
    elements, one for each axis. T and S need not be multiples of the blocks. With `causal` query t sees the keys up to
    S - T + t, and tiles that lie wholly in the future are not computed.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q  # causal: the longest tiles start first
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head = h // (H // K)
    t, d, s = first + tl.arange(0, BLOCK_Q), tl.arange(0, D), tl.arange(0, BLOCK_K)
    q_ptr += b * q_strides[0] + h * q_strides[1]
    k_ptr += b * k_strides[0] + kv_head * k_strides[1]
    v_ptr += b * v_strides[0] + kv_head * v_strides[1]
    q = tl.load(q_ptr + t[:, None] * q_strides[2] + d[None, :] * q_strides[3], mask=t[:, None] < T, other=0.0)
    to_log2 = 1.4426950408889634 / tl.sqrt(D * 1.0)  # the scale 1 / sqrt(D), and exp(x) = 2 ** (x * log2(e))
    maximum = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, D), tl.float32)
    end, whole = S, S  # keys that some query of the tile sees, and keys that all of them see
    if causal:
        end = tl.minimum(S, tl.maximum(S - T + first + BLOCK_Q, 0))
        whole = tl.minimum(S, tl.maximum(S - T + first + 1, 0))
    whole = whole // BLOCK_K * BLOCK_K
    for edge in tl.static_range(2):  # first the tiles that need no mask, then the others
        for start in range(whole if edge else 0, end if edge else whole, BLOCK_K):
            key = start + s
            k_tile = k_ptr + key[None, :] * k_strides[2] + d[:, None] * k_strides[3]  # (D, BLOCK_K): transposed
            v_tile = v_ptr + key[:, None] * v_strides[2] + d[None, :] * v_strides[3]
            if edge:
                k = tl.load(k_tile, mask=key[None, :] < S, other=0.0)
                v = tl.load(v_tile, mask=key[:, None] < S, other=0.0)
            else:
                k, v = tl.load(k_tile), tl.load(v_tile)
            scores = tl.dot(q, k, input_precision="ieee") * to_log2
            if edge:
                seen = key[None, :] < S
                if causal:
                    seen = seen & (key[None, :] <= S - T + t[:, None])
                scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(maximum, tl.max(scores, 1))
            origin = tl.where(higher == -float("inf"), 0.0, higher)
            shrink = tl.exp2(maximum - origin)
            p = tl.exp2(scores - origin[:, None])
            total = total * shrink + tl.sum(p, 1)
            mixed = mixed * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            maximum = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptr += b * out_strides[0] + h * out_strides[1]
    out_tile = out_ptr + t[:, None] * out_strides[2] + d[None, :] * out_strides[3]
    tl.store(out_tile, mixed.to(out_ptr.dtype.element_ty), mask=t[:, None] < T)
    lse = (maximum + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453  # of a blind row: -inf
    tl.store(lse_ptr + (b * H + h) * T + t, lse, mask=t < T)


def flash_attention_triton(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention in one kernel: (B, H, T, D), (B, K, S, D), (B, K, S, D) -> (B, H, T, D), with gradients.

    softmax(q k^T / sqrt(D)) v; with `causal` the queries are the last T of the S tokens. Query head h reads key/value
    head h // (H // K). A query that sees nothing gets 0. Any T and S and any strides; D is one of kernels.WIDTHS, the
    dtype one of kernels.DTYPES. `launch` runs the kernel, and raises ValueError or TypeError for other inputs,
    RuntimeError where Triton is missing.
    """
    return launch(flash_kernel, q, k, v, causal)


@contextlib.contextmanager
def flash_in_models(attend: Callable[..., Tensor] | None = None) -> Iterator[None]:
    """Within the block every model's attention runs in `attend(q, k, v, causal)`, without T x S scores.

    `attend` is `flash_attention_triton`, yours or the reference; where Triton is missing `flash.attend`. It takes the
    place of `attention.scaled_dot_product_attention` for calls without a mask or with a causal one, if it takes their
    width and dtype. All others, such as batches with padding, go on as before. Keys and values are not repeated for
    their groups: `heads.repeat_kv` leaves them as they are.
    """
    if attend is None:
        attend = flash.attend if kernels.RUNS_ON == "missing" else flash_attention_triton
    any_width = attend is flash.attend
    written_out, repeat = attention.scaled_dot_product_attention, heads.repeat_kv
    causal: dict[tuple, Tensor] = {}  # the layers of a model share one mask

    def is_causal(mask: Tensor) -> bool:
        T, S = mask.shape[-2:]
        if mask.dtype != torch.bool or mask.numel() != T * S or T > S:
            return False
        if (T, S, mask.device) not in causal:
            causal.clear()
            causal[T, S, mask.device] = attention.causal_mask(T, S).to(mask.device)
        return torch.equal(mask.reshape(T, S), causal[T, S, mask.device])

    def attention_in_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        takes = any_width or (
            q.shape[-1] in kernels.WIDTHS and q.shape[-1] == v.shape[-1] and q.dtype in kernels.DTYPES
        )
        if q.dim() == 4 and takes and (mask is None or is_causal(mask)):
            return attend(q, k, v, mask is not None)
        n_repeat = q.shape[1] // k.shape[1] if q.dim() == 4 else 1
        return written_out(q, repeat(k, n_repeat), repeat(v, n_repeat), mask)

    attention.scaled_dot_product_attention, heads.repeat_kv = attention_in_tiles, lambda x, n_repeat: x
    try:
        yield
    finally:
        attention.scaled_dot_product_attention, heads.repeat_kv = written_out, repeat
