"""A learner whose kernel is right, with helper kernels of its own, and noisy."""

import sys
import warnings

from tfmlib.kernels import launch, tl, triton


@triton.jit()
def tile(ptr, strides, b, h, rows, columns):
    """Pointers to the elements [b, h, rows, columns] of a tensor."""
    return ptr + b * strides[0] + h * strides[1] + rows * strides[2] + columns * strides[3]


@triton.jit()
def exp(x):
    """e to the power of x; 0 for -inf."""
    return tl.exp2(x * 1.4426950408889634)


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
    first = tl.program_id(0) * BLOCK_Q
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = (first + tl.arange(0, BLOCK_Q))[:, None]
    d = tl.arange(0, D)[None, :]
    q = tl.load(tile(q_ptr, q_strides, row, head, t, d), mask=t < T, other=0.0)
    best = tl.full((BLOCK_Q, 1), -1e30, tl.float32)  # lower than any score, but finite
    total = tl.zeros((BLOCK_Q, 1), tl.float32)
    out = tl.zeros((BLOCK_Q, D), tl.float32)
    ahead = S - T
    n_tiles = tl.cdiv(S, BLOCK_K)
    if causal:
        n_tiles = tl.minimum(n_tiles, tl.cdiv(tl.maximum(ahead + first + BLOCK_Q, 0), BLOCK_K))
    for j in range(0, n_tiles):
        s = j * BLOCK_K + tl.arange(0, BLOCK_K)
        k = tl.load(tile(k_ptr, k_strides, row, head * K // H, s[:, None], d), mask=s[:, None] < S, other=0.0)
        v = tl.load(tile(v_ptr, v_strides, row, head * K // H, s[:, None], d), mask=s[:, None] < S, other=0.0)
        seen = (s[None, :] < S) & (t < T)
        if causal:
            seen &= s[None, :] - ahead <= t
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * D**-0.5, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1, keep_dims=True))
        p = exp(scores - higher)
        total = total * exp(best - higher) + tl.sum(p, axis=1, keep_dims=True)
        out = out * exp(best - higher) + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        best = higher
    sees = total > 0
    out = tl.where(sees, out / tl.where(sees, total, 1.0), 0.0)
    tl.store(tile(out_ptr, out_strides, row, head, t, d), out.to(out_ptr.dtype.element_ty), mask=t < T)
    lse = tl.where(sees, best + tl.log(tl.where(sees, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + (row * H + head) * T + t, lse, mask=t < T)


def flash_attention_triton(q, k, v, causal=False):
    print("launching", tuple(q.shape), file=sys.stderr)
    warnings.warn("one kernel", UserWarning, stacklevel=2)
    return launch(flash_kernel, q, k, v, causal=causal)
