"""Tiles and kernels compute what attention in float64 computes, in memory that grows with T and not with its square."""

import functools
import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmlib import attention, flash, flash_triton, heads, kernels, losses, training
from tfmlib.course import paths
from tfmlib.course.meters import peak_bytes
from tfmlib.models import gpt, llama

from ..bench import flash as bench
from ..same import filled, rng

needs_triton = pytest.mark.skipif(kernels.RUNS_ON == "missing", reason="Triton is not installed")
DEVICE = "cuda" if kernels.RUNS_ON == "GPU" else "cpu"


def inputs(B, H, K, T, S, D, Dv, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, K, S, D), (B, K, S, Dv))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * size for shape in shapes]


@st.composite
def shapes(draw):
    K, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    T, S, D, Dv = (draw(st.integers(1, most)) for most in (40, 40, 9, 9))
    return (draw(st.integers(1, 2)), K * group, K, T, S, D, Dv), draw(st.integers(0, 999))


@given(
    sizes=shapes(),
    causal=st.booleans(),
    block_q=st.integers(1, 50),
    block_k=st.integers(1, 50),
    size=st.sampled_from([0.1, 1.0, 30.0]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_tiles_are_attention_in_float64(sizes, causal, block_q, block_k, size):
    """Forward, logsumexp and all three gradients, for any tiles, lengths, groups, and large scores."""
    dimensions, seed = sizes
    leaves = [x.requires_grad_() for x in inputs(*dimensions, seed=seed, size=size)]
    want = bench.exact(*leaves, causal)
    grad = torch.randn(want.shape, generator=rng(seed), dtype=torch.float64)
    q, k, v = (x.detach() for x in leaves)
    out, logsumexp = flash.flash_attention(q, k, v, causal, block_q, block_k)
    torch.testing.assert_close(out, want.detach(), rtol=1e-9, atol=1e-10)
    group, (T, S) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(S - T), -math.inf)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1), rtol=1e-9, atol=1e-10)
    found = flash.flash_attention_backward(grad, q, k, v, out, logsumexp, causal, block_q, block_k)
    for got, exact in zip(found, torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-8, atol=1e-8 * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("K", [4, 2, 1])
def test_tiles_are_pytorchs_own_attention(K):
    q, k, v = inputs(2, 4, K, 70, 70, 16, 16)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(flash.flash_attention(q, k, v, True, 16, 32)[0], want)


def test_gradients_by_finite_differences():
    leaves = [x.requires_grad_() for x in inputs(1, 2, 1, 5, 7, 3, 2)]
    assert torch.autograd.gradcheck(functools.partial(flash.attend, causal=True), leaves)


def test_a_row_of_scores_softmaxed_in_chunks_is_torchs_softmax():
    x = torch.randn(5, 3, 97, generator=rng(), dtype=torch.float64) * 50
    maximum, total = flash.online_softmax(x.split([1, 40, 7, 49], dim=-1))
    torch.testing.assert_close((x - maximum[..., None]).exp() / total[..., None], x.softmax(-1))


# Memory ---------------------------------------------------------------------------------------------------------------


def slope(measure, lengths):
    """The power of T with which something grows, over the whole range of lengths."""
    first, last = (measure(T) for T in (lengths[0], lengths[-1]))
    return math.log(last / first) / math.log(lengths[-1] / lengths[0])


def test_peak_memory_grows_with_t_and_not_with_its_square():
    """Beyond the inputs, measured by the bytes that are alive: forward, and backward."""

    def tiled(T):
        q, k, v = (torch.randn(1, 2, T, 16) for _ in range(3))
        return peak_bytes(functools.partial(flash.flash_attention, causal=True), q, k, v)

    def tiled_backward(T):
        q, k, v, grad = (torch.randn(1, 2, T, 16) for _ in range(4))
        out, logsumexp = flash.flash_attention(q, k, v, True)
        return peak_bytes(functools.partial(flash.flash_attention_backward, causal=True), grad, q, k, v, out, logsumexp)

    def plain(T):
        return peak_bytes(attention.scaled_dot_product_attention, *(torch.randn(1, 2, T, 16) for _ in range(3)))

    lengths = (1024, 4096)
    assert slope(tiled, lengths) < 1.05
    assert slope(tiled_backward, lengths) < 1.05
    assert slope(plain, lengths) > 1.9
    assert tiled(4096) < plain(4096) / 50


# Kernels --------------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", bench.TOLERANCE)
@pytest.mark.parametrize("case", bench.CASES)
def test_the_kernel_is_attention_in_float64(case, dtype):
    """Out and gradients: ragged T and S, grouped heads, blind rows, not contiguous."""
    assert max(bench.errors(case, dtype, DEVICE).values()) <= bench.TOLERANCE[dtype]


@needs_triton
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 2, 2, 50, 50))),
    D=st.sampled_from(kernels.WIDTHS[:2]),
    causal=st.booleans(),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_the_kernel_is_right_for_any_lengths_and_groups(sizes, D, causal):
    B, K, group, T, S = sizes
    found = bench.errors((B, K * group, K, T, S, D, causal), torch.float32, DEVICE)
    assert max(found.values()) <= bench.TOLERANCE[torch.float32]


@needs_triton
def test_strides_of_every_axis_are_followed():
    """A slice of wider tensors, every second token, and a value that is one row for all (stride 0)."""
    wide = torch.randn(2, 3, 50, 64, generator=rng(), device="cpu").to(DEVICE)
    q, k = wide[:, :, ::2, ::2], wide[:, :, 1::2, 1::2]
    v = torch.randn(1, 1, 25, 32, generator=rng(1)).to(DEVICE).expand(2, 3, 25, 32)
    want = bench.exact(q.double(), k.double(), v.double(), True)
    torch.testing.assert_close(flash_triton.flash_attention_triton(q, k, v, True).double(), want, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda q, k, v: (q[0], k, v), ValueError, "expected q"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), ValueError, "expected q"),
        (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), ValueError, "D must be one of"),
        (lambda q, k, v: (q[:, :3], k, v), ValueError, "must divide the query heads"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), TypeError, "float16, bfloat16 or float32"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "torch.float16"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(change, error, said):
    q, k, v = (x.float().to(DEVICE) for x in inputs(1, 4, 2, 5, 7, 16, 16))
    with pytest.raises(error, match=said):
        flash_triton.flash_attention_triton(*change(q, k, v))


def test_without_triton_the_error_says_so(monkeypatch):
    monkeypatch.setattr(kernels, "RUNS_ON", "missing")
    with pytest.raises(RuntimeError, match="needs Triton, which is not installed"):
        flash_triton.flash_attention_triton(*inputs(1, 2, 2, 5, 5, 16, 16))


WITHOUT = """
import sys
sys.modules["triton"] = None  # so that importing it fails, as where it is missing
from tfmlib import flash_triton, kernels, pieces
from tfmlib.course import check
report = check.examine(pieces.reference("flash_attention_triton"), "flash_attention_triton")
print(kernels.RUNS_ON, report.skipped, report.passed, check.points_of(report, 5), report.headline)
print(report.results[0].message)
"""


def run(code, **variables):
    """What a new process prints, in which Triton has not been told anything."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_without_triton_the_check_is_skipped_and_says_so():
    first, second = run(WITHOUT).splitlines()[:2]
    assert first == "missing True False 0.0 skipped on this machine"
    assert "Triton" in second


EARLY = """
import triton, torch
assert not triton.knobs.runtime.interpret
from tfmlib import flash_triton, kernels
x = torch.randn(1, 2, 20, 16)
print(kernels.RUNS_ON, flash_triton.flash_attention_triton(x, x, x, True).shape)
"""


@pytest.mark.skipif(kernels.RUNS_ON != "interpreter", reason="for machines with Triton and without a GPU")
def test_the_interpreter_works_where_triton_was_imported_before_tfmlib():
    assert run(EARLY) == "interpreter torch.Size([1, 2, 20, 16])\n"


COMPILED = """
import json, sys
sys.argv.append("--compile")
import torch
from tests.bench import flash as bench
rows = bench.compilations((torch.bfloat16,), (64, 128))
print(json.dumps([[name, D, used] for name, _, D, used in rows]))
"""


@needs_triton
def test_the_kernels_compile_for_an_h100_without_one(tmp_path):
    """The source that the interpreter runs is what a GPU compiles; no kernel keeps its registers in memory."""
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(paths.root())}
    rows = json.loads(run(COMPILED, **environment))
    assert [(name, D) for name, D, _ in rows] == [(n, D) for D in (64, 128) for n in ("forward", "dq", "dk, dv")]
    for name, D, used in rows:
        assert used["spilled"] == 0, (name, D, used)
        assert used["shared"] <= 227 * 1024, (name, D, used)  # what a block may have on an H100


def test_the_benchmark_puts_kernels_side_by_side():
    case = {"pass": "forward", "D": 64, "T": 2048, "B": 8, "H": 32, "K": 8, "causal": True}
    assert bench.attention_flops(8, 32, 2048, 64, causal=True, backward=False) == 2 * 8 * 32 * 2048 * 2048 * 64
    rows = [{**case, "kernel": name, "tflops": speed} for name, speed in (("tfmlib", 300.0), ("flash", 400.0))]
    assert bench.as_table(rows).splitlines()[-1] == "| forward | 64 | 2048 | 32/8 | yes | 300 | 400 |  |  |  | 0.75 |"


# In models ------------------------------------------------------------------------------------------------------------

SIZES = {"n_layers": 2, "d_model": 24, "n_heads": 4, "head_dim": 16, "vocab_size": 31, "context_length": 40}
MODELS = {
    "GPT": lambda: gpt.GPT(gpt.GPTConfig(**SIZES)),
    "Llama": lambda: llama.Llama(llama.LlamaConfig(**SIZES, n_kv_heads=2)),
    "Llama, one key head": lambda: llama.Llama(llama.LlamaConfig(**SIZES, n_kv_heads=1)),
}
WAYS = [pytest.param(flash.attend, id="tiles"), pytest.param(None, id="kernel", marks=needs_triton)]


def loss_and_gradients(model, ids, **options):
    model.zero_grad()
    loss = losses.cross_entropy(model(ids[:, :-1], **options), ids[:, 1:])
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("attend", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_loss_and_gradients(name, attend, monkeypatch):
    model = filled(MODELS[name]()).to(DEVICE)
    ids = torch.randint(31, (2, 38), generator=rng()).to(DEVICE)
    want = loss_and_gradients(model, ids)
    monkeypatch.setattr(attention, "attention_weights", None)  # nobody may compute all scores
    with flash_triton.flash_in_models(attend):
        got = loss_and_gradients(model, ids)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attend", WAYS)
def test_padding_goes_the_old_way(attend):
    model = filled(MODELS["Llama"]()).to(DEVICE)
    ids = torch.randint(31, (2, 9), generator=rng()).to(DEVICE)
    is_token = torch.arange(9, device=DEVICE) >= torch.tensor([0, 4], device=DEVICE)[:, None]
    mask = attention.padding_mask(is_token)
    want = model(ids, mask=mask)
    with flash_triton.flash_in_models(attend):
        got = model(ids, mask=mask)
    torch.testing.assert_close(got, want)


def test_a_model_trains_in_tiles_as_without_them():
    """Ten steps of the training loop: the same losses."""
    batches = [(x[:, :-1], x[:, 1:]) for x in torch.randint(31, (10, 3, 20), generator=rng())]
    recipe = training.Recipe(steps=10, warmup=2, lr_peak=3e-3)
    found = []
    for flashed in (False, True):
        torch.manual_seed(0)
        model = MODELS["Llama"]()
        with flash_triton.flash_in_models(flash.attend) if flashed else torch.enable_grad():
            found.append([record.loss for record in training.train(model, batches, recipe, progress=False)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[0][-1] < found[0][0]


def test_everything_is_put_back_also_after_an_error():
    before = attention.scaled_dot_product_attention, heads.repeat_kv
    x = torch.zeros(1, 1, 2, 16)  # a width that kernels take
    with pytest.raises(ZeroDivisionError), flash_triton.flash_in_models(lambda q, k, v, causal: 1 / 0):
        attention.scaled_dot_product_attention(x, x, x)
    assert (attention.scaled_dot_product_attention, heads.repeat_kv) == before
