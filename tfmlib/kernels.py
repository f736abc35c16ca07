"""How a FlashAttention kernel runs: compiled on a GPU or in Triton's interpreter, its launch, and its backward pass.

On an NVIDIA GPU kernels are compiled. Where there is none, the same source runs in Triton's interpreter, slowly and on
the CPU. Where Triton is missing, kernels can be read but not run.

Shapes: B batch, H query heads, K key/value heads (K divides H), T queries, S keys, D head width.
"""

import contextlib
import math
import os
import sys
from types import SimpleNamespace

import torch
from torch import Tensor


def _read_only(kernel=None, **options):
    """Stands in for triton.jit, with options or without: leaves a kernel as it is."""
    return (lambda kernel: kernel) if kernel is None else kernel


_STAND_INS = SimpleNamespace(jit=_read_only), SimpleNamespace(constexpr=object), "missing"


def _import_triton() -> tuple:
    """Triton and its language, set to the interpreter where there is no GPU; stand-ins where Triton is missing."""
    gpu, early = torch.cuda.is_available(), "triton" in sys.modules
    if not gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
    try:
        import triton
        import triton.language as tl
    except ImportError:  # as on macOS and Windows
        return _STAND_INS
    interpreted = triton.knobs.runtime.interpret
    if interpreted and early:  # its own functions, such as tl.max, may have been made for a GPU
        from triton.runtime.interpreter import InterpretedFunction

        for owner in (tl, tl.standard, tl.tensor):
            for name, value in list(vars(owner).items()):
                if isinstance(value, triton.JITFunction):
                    setattr(owner, name, InterpretedFunction(value.fn))
    return triton, tl, "interpreter" if interpreted else "GPU"


triton, tl, RUNS_ON = _import_triton()  # "GPU", "interpreter", or "missing"


WIDTHS = (16, 32, 64, 128)  # of a head: D
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BLOCKS = {  # (BLOCK_Q, BLOCK_K, num_warps, num_stages) by bytes per element and D: as large as registers allow
    2: {16: (128, 128, 4, 3), 32: (128, 128, 4, 3), 64: (128, 128, 8, 3), 128: (128, 64, 8, 3)},
    4: {16: (64, 32, 4, 2), 32: (64, 32, 4, 2), 64: (64, 32, 8, 2), 128: (32, 16, 8, 2)},
}


def blocks_for(dtype: torch.dtype, D: int) -> tuple[int, int, dict[str, int]]:
    """How `launch` cuts the work: BLOCK_Q, BLOCK_K, and the compiler's options. Small in the interpreter."""
    if RUNS_ON == "interpreter":
        return 32, 16, {}
    block_q, block_k, num_warps, num_stages = _BLOCKS[dtype.itemsize][D]
    return block_q, block_k, {"num_warps": num_warps, "num_stages": num_stages}


def backward_block(dtype: torch.dtype, D: int) -> tuple[int, dict[str, int]]:
    """The same for the backward pass, whose tiles are square: BLOCK, and the compiler's options."""
    if RUNS_ON == "interpreter":
        return 16, {}
    block = 64 if dtype.itemsize == 2 else 32 if D < 128 else 16
    return block, {"num_warps": 8 if D * dtype.itemsize >= 256 else 4, "num_stages": 2}


def launch(kernel, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Run a forward kernel on tensors, and remember what its backward pass needs: -> out (B, H, T, D), in q's dtype.

    One program for each tile of BLOCK_Q queries, of each head, of each row: the grid is (tiles, H, B). `kernel` takes
    what `flash_triton.flash_kernel` does. Raises ValueError for shapes that do not fit or tensors on the wrong device,
    TypeError for a dtype, RuntimeError without Triton.
    """
    if RUNS_ON == "missing":
        raise RuntimeError("a kernel needs Triton, which is not installed; it exists for Linux: pip install triton")
    _expect_fit(q, k, v)
    return _Attention.apply(kernel, q, k, v, causal)


def _expect_fit(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"expected q (B, H, T, D), k and v (B, K, S, D), got {shapes}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"the key/value heads must divide the query heads, got {shapes}")
    if q.shape[3] not in WIDTHS:
        raise ValueError(f"D must be one of {WIDTHS}, got {q.shape[3]}")
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise TypeError(f"q, k and v must all be float16, bfloat16 or float32, got {', '.join(map(str, dtypes))}")
    if RUNS_ON == "GPU" and not all(x.is_cuda for x in (q, k, v)):
        raise ValueError(f"the kernel runs on the GPU, but got tensors on {q.device}, {k.device}, {v.device}")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, q, k, v, causal):
        # The interpreter multiplies the bits of bfloat16 as if they were integers: give it float32.
        wide = [x.float() if RUNS_ON == "interpreter" and x.dtype == torch.bfloat16 else x for x in (q, k, v)]
        out, lse = _forward(kernel, *wide, causal)
        ctx.save_for_backward(*wide, out, lse)
        ctx.causal, ctx.dtype = causal, q.dtype
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = _backward(grad_out.to(q.dtype), q, k, v, out, lse, ctx.causal)
        return None, *(x.to(ctx.dtype) for x in gradients), None


def _forward(kernel, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    out, lse = torch.empty_like(q), q.new_empty(B, H, T, dtype=torch.float32)
    block_q, block_k, options = blocks_for(q.dtype, D)
    grid = (triton.cdiv(T, block_q), H, B)
    if out.numel():
        strides = [x.stride() for x in (q, k, v, out)]
        with _on(q):
            kernel[grid](q, k, v, out, lse, *strides, H, K, T, S, D, causal, block_q, block_k, **options)
    return out, lse


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from two kernels: each program owns a tile of dq, or one of dk and dv."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    delta = (grad_out.float() * out.float()).sum(-1)  # (B, H, T)
    lse = lse.masked_fill(lse == -math.inf, math.inf)  # a query that sees nothing: all its weights are 0
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    block, options = backward_block(q.dtype, D)
    given = (q, k, v, grad_out, lse, delta)
    strides = [x.stride() for x in (q, k, v, grad_out)]
    sizes = (H, K, T, S, D, causal, block)
    if min(q.numel(), k.numel()) == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    with _on(q):
        _dq_kernel[triton.cdiv(T, block), H, B](*given, dq, *strides, dq.stride(), *sizes, **options)
        _dkdv_kernel[triton.cdiv(S, block), K, B](*given, dk, dv, *strides, dk.stride(), dv.stride(), *sizes, **options)
    return dq, dk, dv


def _on(x: Tensor):
    """The device that a kernel is launched on."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@triton.jit(do_not_specialize=["H", "K", "T", "S"])
def _dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    q_strides,
    k_strides,
    v_strides,
    grad_strides,
    dq_strides,
    H,
    K,
    T,
    S,
    D: tl.constexpr,
    causal: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of dq: the program (i, h, b) owns the queries from i * BLOCK."""
    first = tl.program_id(0) * BLOCK
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head = h // (H // K)
    t, d, s = first + tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, BLOCK)
    real = t[:, None] < T
    q_tile = q_ptr + b * q_strides[0] + h * q_strides[1] + t[:, None] * q_strides[2] + d[None, :] * q_strides[3]
    q = tl.load(q_tile, mask=real, other=0.0)
    grad_ptr += b * grad_strides[0] + h * grad_strides[1]
    grad = tl.load(grad_ptr + t[:, None] * grad_strides[2] + d[None, :] * grad_strides[3], mask=real, other=0.0)
    row = (b * H + h) * T + t
    lse = tl.load(lse_ptr + row, mask=t < T, other=float("inf")) * 1.4426950408889634
    delta = tl.load(delta_ptr + row, mask=t < T, other=0.0)
    k_ptr += b * k_strides[0] + kv_head * k_strides[1]
    v_ptr += b * v_strides[0] + kv_head * v_strides[1]
    scale = 1.0 / tl.sqrt(D * 1.0)
    dq = tl.zeros((BLOCK, D), tl.float32)
    end = S
    if causal:
        end = tl.minimum(S, tl.maximum(S - T + first + BLOCK, 0))
    for start in range(0, end, BLOCK):
        key = start + s
        there = key[:, None] < S
        k = tl.load(k_ptr + key[:, None] * k_strides[2] + d[None, :] * k_strides[3], mask=there, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_strides[2] + d[None, :] * v_strides[3], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * 1.4426950408889634)
        seen = key[None, :] < S
        if causal:
            seen = seen & (key[None, :] <= S - T + t[:, None])
        p = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        d_scores = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq += tl.dot(d_scores.to(k.dtype), k, input_precision="ieee")
    dq_ptr += b * dq_strides[0] + h * dq_strides[1]
    dq_tile = dq_ptr + t[:, None] * dq_strides[2] + d[None, :] * dq_strides[3]
    tl.store(dq_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["H", "K", "T", "S"])
def _dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    q_strides,
    k_strides,
    v_strides,
    grad_strides,
    dk_strides,
    dv_strides,
    H,
    K,
    T,
    S,
    D: tl.constexpr,
    causal: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of dk and dv: the program (j, kv_head, b) owns the keys from j * BLOCK, for all heads of their group."""
    start = tl.program_id(0) * BLOCK
    kv_head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    key, d, rows = start + tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, BLOCK)
    there = key[:, None] < S
    k_tile = k_ptr + b * k_strides[0] + kv_head * k_strides[1] + key[:, None] * k_strides[2] + d[None, :] * k_strides[3]
    v_tile = v_ptr + b * v_strides[0] + kv_head * v_strides[1] + key[:, None] * v_strides[2] + d[None, :] * v_strides[3]
    k = tl.load(k_tile, mask=there, other=0.0)
    v = tl.load(v_tile, mask=there, other=0.0)
    scale = 1.0 / tl.sqrt(D * 1.0)
    dk = tl.zeros((BLOCK, D), tl.float32)
    dv = tl.zeros((BLOCK, D), tl.float32)
    first = 0
    if causal:
        first = tl.maximum(start - (S - T), 0) // BLOCK * BLOCK  # the first query that sees the first key
    for member in range(0, H // K):
        h = kv_head * (H // K) + member
        q_head = q_ptr + b * q_strides[0] + h * q_strides[1]
        grad_head = grad_ptr + b * grad_strides[0] + h * grad_strides[1]
        row = (b * H + h) * T
        for t0 in range(first, T, BLOCK):
            t = t0 + rows
            real = t[:, None] < T
            q = tl.load(q_head + t[:, None] * q_strides[2] + d[None, :] * q_strides[3], mask=real, other=0.0)
            grad_tile = grad_head + t[:, None] * grad_strides[2] + d[None, :] * grad_strides[3]
            grad = tl.load(grad_tile, mask=real, other=0.0)
            lse = tl.load(lse_ptr + row + t, mask=t < T, other=float("inf")) * 1.4426950408889634
            delta = tl.load(delta_ptr + row + t, mask=t < T, other=0.0)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * 1.4426950408889634)  # (keys, queries)
            p = tl.exp2(scores - lse[None, :])
            if causal:
                p = tl.where(key[:, None] <= S - T + t[None, :], p, 0.0)
            dv += tl.dot(p.to(grad.dtype), grad, input_precision="ieee")
            d_scores = p * (tl.dot(v, tl.trans(grad), input_precision="ieee") - delta[None, :])
            dk += tl.dot(d_scores.to(q.dtype), q, input_precision="ieee")
    dk_ptr += b * dk_strides[0] + kv_head * dk_strides[1]
    dv_ptr += b * dv_strides[0] + kv_head * dv_strides[1]
    dk_tile = dk_ptr + key[:, None] * dk_strides[2] + d[None, :] * dk_strides[3]
    dv_tile = dv_ptr + key[:, None] * dv_strides[2] + d[None, :] * dv_strides[3]
    tl.store(dk_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=there)
    tl.store(dv_tile, dv.to(dv_ptr.dtype.element_ty), mask=there)
