"""The checks of chapter 13's kernel. Outside truth: torch, float64, on the CPU.

Where there is no GPU the kernel runs in Triton's interpreter, and is stopped where it leaves its tensors. Sizes are
given in tiles, which are larger on a GPU.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tfmlib import kernels

from .bounds import OutOfBounds, Traffic, within_bounds
from .same import Broken, Raised, Skip, expect, outcome, raises, rng, same

# What a piece may not call, since the kernel is to do it.
FORBIDDEN = {
    "flash_attention_triton": [
        F.scaled_dot_product_attention,
        "aten::_scaled_dot_product",
        "aten::_softmax",
        "aten::_safe_softmax",
        "aten::logsumexp",
        "aten::mm",
        "aten::bmm",
        "aten::addmm",
        "aten::baddbmm",
    ]
}
# A GPU's compiler takes seconds for each dtype and width, and the interpreter is slow.
SECONDS = {"flash_attention_triton": 180.0 if kernels.RUNS_ON == "GPU" else 20.0}
DEVICE = "cuda" if kernels.RUNS_ON == "GPU" else "cpu"
MISSING = "Triton is missing on this machine, so no kernel can run here. It exists for Linux: pip install triton."
AROUND = 1 << 15  # elements of memory before and behind a tensor, filled with NaN

# Running a kernel under observation -----------------------------------------------------------------------------------


def _in_nan(shape, strides, dtype, device) -> tuple[Tensor, Tensor]:
    """A tensor of NaN in the middle of more NaN: the tensor, and all of the memory."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    length = last + 1 if math.prod(shape) else 0
    memory = torch.full((AROUND + length + AROUND,), math.nan, dtype=dtype, device=device)
    return memory.as_strided(shape, strides, AROUND), memory


class _FreshMemoryIsNaN(TorchFunctionMode):
    """Memory that a launch asks for has no lucky values in it. Notes all that was given."""

    def __init__(self):
        super().__init__()
        self.given: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function not in (torch.empty, torch.empty_like, Tensor.new_empty) or not made.is_floating_point():
            return made
        if not made.numel() or made.layout != torch.strided:
            return made
        self.given.append(_in_nan(made.shape, made.stride(), made.dtype, made.device))
        return self.given[-1][0]

    def expect_untouched_around(self) -> None:
        """The watcher's work where there is no watcher: on a GPU."""
        for x, memory in self.given:
            around = memory.clone()
            around.as_strided(x.shape, x.stride(), AROUND).fill_(math.nan)
            if not around.isnan().all():
                raise OutOfBounds("writes", "out", int((~around.isnan()).sum()), x.numel())


@dataclass
class Run:
    """What was seen while a piece ran: each launch's out and logsumexp, and the interpreter's Traffic."""

    launches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


@contextmanager
def _observed() -> Iterator[Run]:
    """Where pieces are called. Raises a kernel's own exception, without the interpreter's wrapping."""
    if kernels.RUNS_ON == "missing":
        raise Skip(MISSING)
    run, memory, forward = Run(), _FreshMemoryIsNaN(), kernels._forward

    def noted(*args):
        run.launches.append(forward(*args))
        return run.launches[-1]

    try:
        with ExitStack() as stack:
            if kernels.RUNS_ON == "interpreter":
                run.traffic = stack.enter_context(within_bounds())
            stack.enter_context(np.errstate(all="ignore"))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore", RuntimeWarning)  # the interpreter computes with numpy, which warns of inf
            stack.enter_context(memory)
            stack.callback(setattr, kernels, "_forward", forward)
            kernels._forward = noted
            yield run
    except Exception as error:
        while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, OutOfBounds):
            raise Broken(str(error)) from error  # its own lines are those of the kernel
        raise error
    memory.expect_untouched_around()


def _run(piece, *args, **kwargs) -> tuple[Tensor, Run]:
    with _observed() as run:
        out = piece(*args, **kwargs)
    return out, run


# Inputs and what torch makes of them ----------------------------------------------------------------------------------


def _x(*shape, salt=0, dtype=torch.float32) -> Tensor:
    """Random numbers, with NaN in the memory around them."""
    values = torch.randn(shape, generator=rng(salt))
    return _placed(values.to(dtype))


def _placed(values: Tensor) -> Tensor:
    """The same numbers on the device of the kernels, with NaN in the memory around them."""
    x, _ = _in_nan(values.shape, values.stride(), values.dtype, DEVICE)
    return x.copy_(values)


def _qkv(T, S, B=1, H=1, K=1, D=16, dtype=torch.float32, salt=0) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, H, T, D), (B, K, S, D), (B, K, S, D)
    return tuple(_x(*shape, salt=salt + i, dtype=dtype) for i, shape in enumerate(shapes))


def _with_scores(rows, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """One head of width 16 in which query t gives key s the score rows[t][s], exactly. At most 16 queries."""
    rows = torch.tensor(rows, dtype=torch.float32)  # (T, S)
    T, S = rows.shape
    q, k = torch.eye(T, 16) * 4.0, torch.zeros(S, 16)  # 4 = sqrt(16)
    k[:, :T] = rows.T
    v = torch.randn(S, 16, generator=rng(3))
    return tuple(_placed(x.to(dtype)[None, None]) for x in (q, k, v))


def _blocks(dtype=torch.float32, D=16) -> tuple[int, int]:
    return kernels.blocks_for(dtype, D)[:2]


def _sees(T, S) -> Tensor:
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)


def _torch_attention(q, k, v, causal=False) -> Tensor:
    q, k, v = (x.double().cpu() for x in (q, k, v))
    mask = _sees(q.shape[2], k.shape[2]) if causal else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _agree(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    """`same`, for a kernel's result. A GPU may multiply float32 in fewer bits (TF32): there fewer digits count."""
    want = want.to(DEVICE, dtype)
    if kernels.RUNS_ON == "GPU" and dtype == torch.float32:
        expect(got.dtype == dtype, f"{what}: expected dtype {dtype}, got {got.dtype}")
        got, want = got.half(), want.half()
    if got.isnan().any():
        what += " (what a kernel does not write is NaN here)"
    same(got, want, what)


def _expect_attention(piece, q, k, v, causal: bool, what: str) -> Run:
    """Compare a piece with torch. Where nothing is causal, the argument is not given."""
    out, run = _run(piece, q, k, v, **({"causal": True} if causal else {}))
    _agree(out, _torch_attention(q, k, v, causal), q.dtype, what)
    return run


def _steps(*levels: float) -> list[list[float]]:
    """Scores of four queries: about `levels[i]` in tile i, and the other way round for every second query."""
    size = _blocks()[1]
    wave = torch.randn(len(levels) * size, generator=rng(7)).clamp(-2, 2) / 2
    up = torch.tensor(levels).repeat_interleave(size)
    down = torch.tensor(levels[::-1]).repeat_interleave(size)
    return torch.stack([up + wave, down - wave, up.roll(size) - wave, down.roll(size) + wave]).tolist()


def _large_sums(scores: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
    """Values near 20000, in float16: their sum is beyond its range, their mean is not."""
    q, k, v = _with_scores(scores, torch.float16)
    return q, k, v.mul_(1000.0).add_(20_000.0)


def _poisoned() -> tuple[Tensor, Tensor, Tensor, int]:
    """q, k, v, and how many queries the first tile has. Values are NaN in the last tile of keys that it never sees."""
    block_q, block_k = _blocks()
    q, k, v = _qkv(2 * block_q, 2 * block_q, salt=20)
    v[:, :, block_q + block_k :] = math.nan
    return q, k, v, block_q


# flash_attention_triton -----------------------------------------------------------------------------------------------


def probe_flash_attention_triton(flash_attention_triton):
    """Results that tell the known mistakes apart: few, as all mistakes are tried on them. In half precision."""

    def ask(q, k, v, causal):
        try:
            out, run = _run(flash_attention_triton, q, k, v, causal)
        except Broken as broken:
            if not isinstance(broken.__cause__, OutOfBounds):
                raise
            return Raised(f"{broken.__cause__.access} beyond {broken.__cause__.tensor}")
        return [out.half(), *(lse.half() for _, lse in run.launches)]

    block_q, block_k = _blocks()
    scores = _steps(0.0, 3.0, 6.0)
    scores.append([0.0, 0.0, *[-30.0] * (len(scores[0]) - 2)])  # of two keys even float16 can hold the sum
    q = _x(1, 3, 4, 32).transpose(1, 2)[..., ::2]
    k, v = _x(1, 5, 2, 16, salt=1).transpose(1, 2), _x(1, 2, 16, 5, salt=2).mT
    ahead = _qkv(block_q + block_k + 1, block_q + block_k + 2, salt=4)
    ahead[2][:, :, -1] = math.nan  # the value of the last key, which only the last query sees
    questions = [
        (q, k, v, False),
        (*ahead, True),
        (*_qkv(7, 3, salt=8), True),
        (*_large_sums(scores), False),
    ]
    return [outcome(lambda question=question: ask(*question)) for question in questions]


def test_one_key_gives_its_value(flash_attention_triton):
    """A query that sees one key gets that key's value."""
    q, k, v = _qkv(1, 1)
    out, _ = _run(flash_attention_triton, q, k, v)
    _agree(out, v, torch.float32, "one query and one key")


def test_two_keys_by_hand(flash_attention_triton):
    """Scaled scores ln 3 and 0 give weights 3/4 and 1/4: values 8 and 4 are mixed to 7."""
    q, k, v = _with_scores([[math.log(3.0), 0.0]])
    v[0, 0, 0], v[0, 0, 1] = 8.0, 4.0
    out, _ = _run(flash_attention_triton, q, k, v)
    _agree(out, torch.full((1, 1, 1, 16), 7.0), torch.float32, "one query and two keys")


def test_whole_tiles(flash_attention_triton):
    """One tile of queries and two tiles of keys, all full: softmax(q k^T / sqrt(D)) v."""
    block_q, block_k = _blocks()
    q, k, v = _qkv(block_q, 2 * block_k)
    _expect_attention(flash_attention_triton, q, k, v, False, f"T={block_q}, S={2 * block_k}")


def test_any_number_of_queries_and_keys(flash_attention_triton):
    """T and S need not be multiples of the blocks. The kernel reads and writes nothing beyond its tensors."""
    block_q, block_k = _blocks()
    for T, S in ((block_q + 5, 2 * block_k + 5), (5, block_k - 3)):
        _expect_attention(flash_attention_triton, *_qkv(T, S), False, f"T={T}, S={S}")


def test_the_maximum_moves_from_tile_to_tile(flash_attention_triton):
    """Largest scores of 0, 3 and 6 in three tiles, in any order: what was summed before is rescaled."""
    q, k, v = _with_scores(_steps(0.0, 3.0, 6.0))
    _expect_attention(flash_attention_triton, q, k, v, False, "largest scores that rise and fall from tile to tile")


def test_large_scores_do_not_overflow(flash_attention_triton):
    """Scores of -1000 to 1000 give finite results, though exp(1000) is beyond float32."""
    scores = _steps(-1000.0, -900.0, 1000.0) + _steps(-990.0, -995.0, -1000.0)
    q, k, v = _with_scores(scores, torch.float16)
    _expect_attention(flash_attention_triton, q, k, v, False, "scores near -1000 and 1000 in float16")


def test_the_future_is_hidden(flash_attention_triton):
    """Causal, with T = S: query t sees the keys 0 to t, itself included."""
    T = _blocks()[0] + 5
    _expect_attention(flash_attention_triton, *_qkv(T, T), True, f"causal, T=S={T}")


def test_queries_are_the_last_tokens(flash_attention_triton):
    """Causal, with T < S: query t is token S - T + t, and sees the keys up to there."""
    block_q, block_k = _blocks()
    for T, S in ((block_q + 5, block_q + 6 + block_k), (1, block_k + 1)):
        _expect_attention(flash_attention_triton, *_qkv(T, S), True, f"causal, T={T}, S={S}")


def test_a_query_that_sees_nothing_gets_zero(flash_attention_triton):
    """Causal, with T > S: the first T - S queries see no key and get 0, not NaN. So do all where S = 0."""
    T = _blocks()[0] + 5
    _expect_attention(flash_attention_triton, *_qkv(T, 3), True, f"causal, T={T}, S=3")
    _expect_attention(flash_attention_triton, *_qkv(3, 0), False, "T=3, S=0")


def test_query_heads_share_keys_in_groups(flash_attention_triton):
    """Query head h of H reads key head h // (H / K): with 6 and 2, heads 0 to 2 read 0, and 3 to 5 read 1."""
    _expect_attention(flash_attention_triton, *_qkv(3, 5, H=6, K=2), False, "H=6, K=2")


def test_any_strides(flash_attention_triton):
    """Transposed and sliced tensors: an element is found by its tensor's own four strides."""
    q = _x(2, 3, 2, 32).transpose(1, 2)[..., ::2]
    k, v = _x(2, 2, 5, 48, salt=1)[..., ::3], _x(2, 2, 16, 7, salt=2).mT[:, :, :5]
    _expect_attention(flash_attention_triton, q, k, v, False, "q and k sliced, v transposed")
    q, k, v = (_x(1, 3, 2, 16, salt=salt).transpose(1, 2) for salt in (3, 4, 5))
    _expect_attention(flash_attention_triton, q, k, v, False, "q, k and v as (B, T, H, D), transposed")


def test_every_width(flash_attention_triton):
    """D is 16, 32, 64 or 128, and scores are divided by its root."""
    for D in kernels.WIDTHS:
        _expect_attention(flash_attention_triton, *_qkv(3, 5, D=D), False, f"D={D}")


def test_half_precision(flash_attention_triton):
    """float16 and bfloat16 go in and come out, causal or not."""
    for dtype, causal in ((torch.float16, False), (torch.bfloat16, True)):
        _expect_attention(flash_attention_triton, *_qkv(5, 7, dtype=dtype), causal, f"{dtype}")


def test_sums_are_kept_in_float32(flash_attention_triton):
    """Float16 values near 20000 have a mean near 20000, though the sum of four is beyond float16 (65504)."""
    keys = 2 * _blocks(torch.float16)[1]
    q, k, v = _large_sums(torch.zeros(2, keys).tolist())
    _expect_attention(flash_attention_triton, q, k, v, False, f"the mean of {keys} values near 20000 in float16")


def test_tiles_of_the_future_are_skipped(flash_attention_triton):
    """Causal: tiles of keys that no query of a tile sees are not mixed in with weight 0, but left out."""
    q, k, v, seen = _poisoned()
    out, _ = _run(flash_attention_triton, q, k, v, causal=True)
    want = _torch_attention(q[:, :, :seen], k[:, :, :seen], v[:, :, :seen], causal=True)
    what = f"queries 0 to {seen - 1}, where the values of keys from {int(v[0, 0, :, 0].isfinite().sum())} on are NaN"
    _agree(out[:, :, :seen], want, torch.float32, what)


def test_logsumexp_is_stored_for_the_backward_pass(flash_attention_triton):
    """The kernel stores the natural logarithm of the sum of exp(scaled score), one float32 number a query."""
    q, k, v = _qkv(3, 5, B=2, H=2, K=1)
    run = _expect_attention(flash_attention_triton, q, k, v, False, "B=2, H=2, K=1")
    expect(bool(run.launches), "expected the piece to launch a kernel with `launch`, but no kernel ran")
    scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
    _agree(run.launches[-1][1], scores.logsumexp(-1), torch.float32, "logsumexp")


def test_gradients(flash_attention_triton):
    """The gradients of q, k and v, which the given backward pass makes from out and logsumexp, are torch's."""
    inputs = [x.requires_grad_() for x in _qkv(7, 5, H=2)]
    with _observed():
        out = flash_attention_triton(*inputs, causal=True)
        expect(out.requires_grad, "expected a result with a gradient: return what `launch` returns")
        grad_out = torch.randn(out.shape, generator=rng(10)).to(DEVICE)
        got = torch.autograd.grad(out, inputs, grad_out)
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    want = torch.autograd.grad(_torch_attention(*exact, causal=True), exact, grad_out.double().cpu())
    for name, ours, theirs in zip("qkv", got, want, strict=True):
        _agree(ours, theirs, torch.float32, f"gradient of {name}, causal, T=7, S=5, H=2, K=1")


def test_the_kernel_does_the_work(flash_attention_triton):
    """The piece launches the kernel, which writes all of out; inputs that it does not take are refused."""
    q, k, v = _qkv(3, 5, D=32)
    out, run = _run(flash_attention_triton, q, k, v)
    expect(bool(run.launches), "expected the piece to launch a kernel with `launch`, but no kernel ran")
    _agree(out, run.launches[-1][0], torch.float32, "the result, compared with what the kernel wrote")
    if kernels.RUNS_ON == "interpreter":
        written = run.traffic.written.total()
        expect(written >= out.numel(), f"expected the kernel to write {out.numel()} elements of out, got {written}")
    raises(ValueError, lambda: _run(flash_attention_triton, *_qkv(3, 5, D=24)), "D=24")
    raises(ValueError, lambda: _run(flash_attention_triton, *_qkv(3, 5, H=3, K=2)), "H=3, K=2")
    raises(TypeError, lambda: _run(flash_attention_triton, *_qkv(3, 5, dtype=torch.float64)), "float64")
