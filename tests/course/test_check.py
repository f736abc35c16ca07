"""What a learner meets: messages, points, limits, and one rule for names."""

import linecache
import math
import os
import random
import sys
import textwrap
import time

import pytest
import torch
import torch.nn.functional as F

import tfmlib.attention
from tfmlib import cache, flash_triton, kernels, pieces
from tfmlib.course import check as judge
from tfmlib.course import limits

_cells = iter(range(10**6))


def cell(source, scope=None):
    """Run a learner's cell; returns the names it defines. Its lines can be shown, as a notebook's can."""
    source = textwrap.dedent(source)
    name = f"/tmp/ipykernel_0/{next(_cells)}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope = {} if scope is None else scope
    scope.update({"__name__": "__main__", "torch": torch, "F": F, "math": math})
    exec(compile(source, name, "exec"), scope)
    return scope


def report(source, name="softmax", **kwargs):
    return judge.examine(cell(source)[name], name, **kwargs)


@pytest.fixture(autouse=True)
def fresh():
    """Each test starts and ends with the reference in use, as after a kernel restart."""

    def reset():
        judge._submitted.clear()
        for name in pieces.PIECES:
            pieces.use(pieces.reference(name), name)

    reset()
    yield
    reset()


RIGHT = "def softmax(x, dim=-1): return (x - x.logsumexp(dim, keepdim=True)).exp()"
MINE = """
    def softmax(x, dim=-1):
        e = (x - x.amax(dim, keepdim=True)).exp()
        return e / e.sum(dim, keepdim=True)
"""
OVERFLOWS = """
    def softmax(x, dim=-1):
        e = x.exp()
        return e / e.sum(dim, keepdim=True)
"""


# Messages ------------------------------------------------------------------------------------------------------------


def test_a_broken_promise_says_what_was_expected_and_what_came():
    got = report("def softmax(x, dim=-1): return x - x + 0.5")
    first = got.results[0]
    assert first.promise == "Scores 0 and ln 3 stand 1 to 3: the weights are 0.25 and 0.75."
    assert first.message == "softmax([0, ln 3]): expected 0.25, got 0.5 at [0] (2 of 2 entries differ)"
    assert got.headline == f"{sum(r.passed for r in got.results)} of {len(got.results)} checks passed"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("x.exp()", "softmax: expected a Tensor, got None. Is a `return` missing?"),
        ("return 3", "expected a Tensor, got int"),
        ("return x.exp().numpy()", "expected a Tensor, got ndarray"),
        ("return torch.ones(7)", "expected shape (2,), got (7,)"),
        ("return (x * 0 + 0.5).double()", "expected dtype torch.float32, got torch.float64"),
        ("return (x * 0 + 0.5).to('meta')", "expected device cpu, got meta"),
        ("return x * math.nan", "got NaN at [0]"),
        ("x -= x.max(); return x.exp() / x.exp().sum(dim, keepdim=True)", "softmax changed its argument `x` in place"),
        ("return torch.softmax(x, dim)", "softmax calls torch's own `softmax`"),
        ("return F.softmax(x, dim)", "softmax calls torch's own `softmax`"),
        ("return x.softmax(dim)", "softmax calls torch's own `softmax`"),
        ("return torch.nn.Softmax(dim)(x)", "softmax calls torch's own `softmax`"),
        ("return torch.nonsense(x)", "AttributeError: module 'torch' has no attribute 'nonsense'"),
        ("assert False, 'my own assertion'", "AssertionError: my own assertion"),
        ("raise SystemExit", "softmax ended the program (SystemExit)"),
        ("return softmax(x, dim)", "softmax calls itself without end"),
        ("import tfmlib.attention as a; return a.softmax(x, dim)", "softmax calls itself without end"),
    ],
)
def test_each_kind_of_mistake_has_its_own_sentence(body, says):
    got = report(f"def softmax(x, dim=-1):\n    {body}")
    assert not got.passed
    assert says in str(got)


def test_a_shortcut_under_another_name_is_seen():
    source = """
        from torch.nn.functional import scaled_dot_product_attention as fast
        def scaled_dot_product_attention(q, k, v, mask=None):
            try:
                return fast(q, k, v, mask)
            except Exception:
                return None
    """
    got = report(source, "scaled_dot_product_attention")
    assert "calls torch's own `scaled_dot_product_attention`, the very thing to be written here" in str(got)


@pytest.mark.parametrize(
    "body",
    [
        "return torch.ops.aten._softmax(x, dim, False)",
        "with torch._C.DisableTorchFunction():\n        return torch.softmax(x, dim)",
        "return reference(x, dim)",
    ],
)
def test_no_back_door_is_open(body):
    """Neither torch's inner operations nor the reference itself, taken hold of before, can stand in for the piece."""
    got = report(f"from tfmlib.attention import softmax as reference\ndef softmax(x, dim=-1):\n    {body}")
    assert got.share == 0
    assert "the very thing to be written here" in str(got)
    assert judge.examine(pieces.reference("softmax"), "softmax").passed


def test_a_subclass_of_the_reference_is_no_solution():
    source = "from tfmlib.heads import MultiHeadAttention as R\nclass MultiHeadAttention(R): pass"
    got = report(source, "MultiHeadAttention")
    assert got.share == 0
    assert "calls tfmlib's own `MultiHeadAttention`, the very thing to be written here" in str(got)
    assert pieces.reference("MultiHeadAttention")(8, 2)(torch.ones(1, 2, 8)).shape == (1, 2, 8)


def test_parts_of_the_reference_are_no_solution():
    """A kernel or a helper class of tfmlib's is closed while the piece that it is part of is judged, and then back."""
    before = cache.CacheLayer, flash_triton.flash_kernel
    borrowed = """
        from tfmlib import cache

        class KVCache:
            def __init__(self, n_layers, batch, n_kv_heads, head_dim, capacity, dtype=torch.float32, device="cpu"):
                rows = torch.zeros(n_layers, 2, batch, n_kv_heads, capacity, head_dim, dtype=dtype)
                self.layers = [cache.CacheLayer(*pair) for pair in rows]
    """
    assert "KVCache calls tfmlib's own `CacheLayer`" in str(report(borrowed, "KVCache"))
    if kernels.RUNS_ON != "missing":
        launched = """
            from tfmlib import flash_triton, kernels

            def flash_attention_triton(q, k, v, causal=False):
                return kernels.launch(flash_triton.flash_kernel, q, k, v, causal)
        """
        said = str(report(launched, "flash_attention_triton"))
        assert "flash_attention_triton calls tfmlib's own `flash_kernel`" in said
    assert (cache.CacheLayer, flash_triton.flash_kernel) == before


def test_an_exception_shows_the_learners_lines_only():
    got = report("def helper(x):\n    return x.nothing\n\ndef softmax(x, dim=-1):\n    return helper(x)\n")
    message = got.results[0].message
    assert "line 5, in softmax:  return helper(x)" in message
    assert "line 2, in helper:  return x.nothing" in message
    assert "check.py" not in message
    assert "test_attention" not in message


def test_wrong_arguments_are_named():
    got = report("def softmax(x):\n    return x")
    assert any("unexpected keyword argument 'dim'" in r.message for r in got.results)


def test_the_hint_is_shown_and_names_the_mistake():
    got = report(OVERFLOWS)
    assert got.hint.startswith("exp overflows for large scores.")
    assert f"Likely: {got.hint}" in str(got)
    assert "<b>Likely:</b> exp overflows" in got._repr_html_()


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("merge_heads", "raise RuntimeError"),
        ("repeat_kv", "raise RuntimeError"),
        ("split_heads", "return x.nothing"),
        ("causal_mask", "raise RuntimeError"),
        ("scaled_dot_product_attention", "return q @ k"),
    ],
)
def test_an_exception_alone_is_no_diagnosis(name, body):
    """Many mistakes raise; that a misconception raises as well does not make it the likely one."""
    arguments = {"merge_heads": "x", "repeat_kv": "x, n", "split_heads": "x, n", "causal_mask": "T, S=None"}
    got = report(f"def {name}({arguments.get(name, 'q, k, v, mask=None')}):\n    {body}", name)
    assert got.share == 0
    assert got.hint is None


def test_a_piece_cannot_skip_its_checks():
    got = report("from tfmlib_checks.same import Skip\ndef softmax(x, dim=-1):\n    raise Skip('hard')")
    assert got.share == 0
    assert "Skip: hard" in got.results[0].message


def test_an_exception_that_cannot_speak_or_says_too_much():
    mute = "class E(Exception):\n    def __str__(self): raise ValueError\ndef softmax(x, dim=-1): raise E"
    assert "E: (its text cannot be shown)" in str(report(mute))
    assert len(report("def softmax(x, dim=-1): raise ValueError('x' * 10**7)").results[0].message) < 1000


def test_two_mistakes_at_once_still_get_a_hint():
    """A mistake is known by what it changes, so another one beside it does not hide it."""
    source = """
        def causal_mask(T, S=None):
            S = T if S is None else S
            return torch.ones(T, S, dtype=torch.bool).tril()   # aligned to the first keys, and no ValueError
    """
    assert "the queries are taken for the first T tokens" in report(source, "causal_mask").hint


def test_a_half_written_class_says_what_is_missing():
    source = """
        class MultiHeadAttention(torch.nn.Module):
            def __init__(self, d_model, n_heads, n_kv_heads=None, head_dim=None, bias=False, rope_base=None):
                super().__init__()
                K, D = n_kv_heads or n_heads, head_dim or d_model // n_heads
                for name, i, o in [("q", d_model, n_heads * D), ("k", d_model, K * D), ("v", d_model, K * D)]:
                    self.add_module(name + "_proj", torch.nn.Linear(i, o, bias=bias))
                self.o_proj = torch.nn.Linear(n_heads * D, d_model, bias=bias)
            def forward(self, x, context=None, mask=None, positions=None, cache=None):
                raise NotImplementedError
    """
    got = report(source, "MultiHeadAttention")
    by_name = {result.name: result.status for result in got.results}
    assert by_name["test_four_projections"] == judge.PASSED
    assert by_name["test_equals_torch_multihead_attention"] == judge.UNWRITTEN
    assert not got.unwritten


def test_html_escapes_what_the_learner_wrote():
    got = report("def softmax(x, dim=-1):\n    print('<script>')\n    raise ValueError('<b>')")
    assert "<script>" not in got._repr_html_()
    assert "&lt;script&gt;" in got._repr_html_()
    assert "ValueError: &lt;b&gt;" in got._repr_html_()


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "while True:\n        try: torch.ones(2)\n        except Exception: pass",
        "import time; time.sleep(60)",
        "while True:\n        try: torch.ones(2)\n        except: pass",
        "import time\n    while True:\n        try: time.sleep(60)\n        except: pass",
    ],
)
def test_an_endless_loop_ends_with_a_message(body):
    start = time.monotonic()
    got = report(f"def softmax(x, dim=-1):\n    {body}", seconds=0.5)
    assert time.monotonic() - start < 60
    assert "stopped after 0.5 seconds: does a loop never end?" in got.results[0].message
    assert "in softmax" in got.results[0].message
    assert {r.status for r in got.results[1:]} == {judge.NOT_RUN}
    assert report(MINE).passed  # the next check works


def test_an_interrupt_leaves_nothing_behind(monkeypatch):
    """Wherever the alarm strikes, also in the middle of the guard, later checks judge rightly."""
    monkeypatch.setattr(limits, "_REPEAT_SECONDS", 0.001)
    loops = cell("def softmax(x, dim=-1):\n    while True:\n        torch.ones(2)\n")["softmax"]
    quick = cell("def softmax(x, dim=-1):\n    return torch.zeros(2)\n")["softmax"]
    for attempt in range(30):
        judge.examine(loops if attempt % 2 else quick, "softmax", seconds=0.0005 * (attempt + 1))
        assert torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
        assert torch.equal(pieces.reference("softmax")(torch.zeros(2)), torch.full((2,), 0.5))
    assert report(MINE).passed


def test_a_check_within_a_check_is_refused():
    source = """
        from tfmlib.course.check import examine
        def softmax(x, dim=-1):
            examine(softmax)
    """
    assert "a piece cannot have itself checked while it is checked" in str(report(source))
    assert report(MINE).passed


def test_an_endless_loop_in_a_thread_ends_too():
    """Where there is no alarm (Windows, threads), a watchdog does it."""

    def endless():
        with limits._watchdog(0.3):
            while True:
                time.sleep(0.01)

    with pytest.raises(limits.OutOfTime):
        endless()


@pytest.mark.skipif(limits._address_space() is None, reason="only Linux limits the memory of a running process")
@pytest.mark.parametrize(
    "body",
    [
        "torch.ones(10**6, 10**5)",
        "bytes(10**11)",
        "kept = []\n    while True: kept.append(bytes(10**8))",  # never touched: a slow machine has no work with it
        "x = x.repeat(10**10)",
        "[torch.zeros(10**8) for _ in range(100)]",
    ],
)
def test_a_runaway_allocation_ends_with_a_message(body):
    got = report(f"def softmax(x, dim=-1):\n    {body}\n    return x")
    assert "softmax asked for more memory than a check allows (2 GiB)" in got.results[0].message
    assert report(MINE).passed


def test_warnings_and_output_cost_nothing(capfd):
    source = """
        import logging, os, sys, warnings
        logging.basicConfig()
        def softmax(x, dim=-1):
            warnings.warn("a warning")
            print("to stdout"); print("to stderr", file=sys.stderr); os.write(2, b"below Python ")
            logging.warning("to the log")
            e = (x - x.amax(dim, keepdim=True)).exp()
            return e / e.sum(dim, keepdim=True)
    """
    got = report(source)
    assert got.passed
    assert "to stdout" in got.printed
    assert len(got.printed) < 1000
    shown = capfd.readouterr()
    assert shown.err == ""
    assert shown.out == ""


def test_what_the_piece_does_to_torch_is_undone():
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    source = """
        import os, random, sys
        def softmax(x, dim=-1):
            torch.manual_seed(0); torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)
            torch.set_num_threads(1); torch.set_default_device("meta"); torch.use_deterministic_algorithms(True)
            random.seed(1); os.chdir("/"); sys.setrecursionlimit(500); sys.stdout.close()
            return x
    """
    threads, folder, limit, state = torch.get_num_threads(), os.getcwd(), sys.getrecursionlimit(), random.getstate()
    report(source)
    assert (threads, folder, limit) == (torch.get_num_threads(), os.getcwd(), sys.getrecursionlimit())
    assert random.getstate() == state
    assert torch.ones(1).device.type == "cpu"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.rand(2), want)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


# Points, and one rule for names --------------------------------------------------------------------------------------

# check() looks at the names where it is called, so these tests call it from within a learner's scope.


def call_check(scope, name="softmax", points=None):
    scope["check"] = judge.check
    cell(f"earned = check({name}, points={points})", scope)
    return scope["earned"]


def test_points_are_in_proportion_to_the_checks_that_hold(capsys):
    assert call_check(cell(MINE)) == 2.0
    assert call_check(cell(MINE), points=7) == 7.0
    got = call_check(cell(OVERFLOWS), points=10)
    assert got == 10 * report(OVERFLOWS).share < 10
    assert isinstance(got, float)
    stub = "def softmax(x, dim=-1): raise NotImplementedError"
    assert call_check(cell(stub)) == 0.0
    assert "softmax   not written yet" in capsys.readouterr().out


def test_points_are_rounded_down():
    """9 of 10 checks of 0.33 points are 0.29, not 0.3; but of 7 points they are 6.3, whatever floats make of it."""
    always_float = MINE.replace("return e", "e = e if x.dtype == torch.float64 else e.float()\n        return e")
    got = report(always_float)
    assert [result.name for result in got.results if not result.passed] == ["test_keeps_half_precision"]
    assert call_check(cell(always_float), points=0.33) == 0.29
    assert call_check(cell(always_float), points=7) == 6.3


@pytest.mark.parametrize("points", [0, -1, math.inf, math.nan, "'2'"])
def test_points_must_be_a_positive_number(points):
    text = str(points).replace("inf", "math.inf").replace("nan", "math.nan")
    with pytest.raises(ValueError, match="points must be a positive number"):
        call_check(cell(MINE), points=text)


def test_a_piece_that_passes_is_in_use(capsys):
    scope = cell(MINE)
    mine = scope["softmax"]
    call_check(scope)
    assert scope["softmax"] is mine
    assert tfmlib.attention.softmax is mine
    assert "[ok]" in capsys.readouterr().out


def test_a_piece_that_fails_leaves_the_reference_in_use(capsys):
    scope = cell(OVERFLOWS)
    call_check(scope)
    assert scope["softmax"] is pieces.reference("softmax")
    assert tfmlib.attention.softmax is pieces.reference("softmax")
    assert "The lab goes on with the reference until yours passes." in capsys.readouterr().out


def test_checking_twice_gives_the_same_verdict():
    """After a failure the plain name means the reference; running the check cell again still judges the learner's."""
    scope = cell(OVERFLOWS)
    first = call_check(scope)
    assert call_check(scope) == first < 2


def test_a_later_wrong_version_falls_back_to_the_one_that_passed(capsys):
    scope = cell(MINE)
    mine = scope["softmax"]
    call_check(scope)
    cell(OVERFLOWS, scope)
    assert call_check(scope) < 2
    assert scope["softmax"] is mine
    assert "the version of yours that passed before" in capsys.readouterr().out


def test_tfmlibs_own_piece_earns_nothing(capsys):
    scope = cell("from tfmlib.attention import softmax")
    assert call_check(scope) == 0.0
    assert "`softmax` is tfmlib's own here" in capsys.readouterr().out


def test_a_lambda_is_known_by_the_name_it_is_bound_to():
    scope = cell("softmax = lambda x, dim=-1: (y := (x - x.amax(dim, keepdim=True)).exp()) / y.sum(dim, keepdim=True)")
    assert call_check(scope) == 2.0


def test_what_is_not_a_piece_is_an_error():
    with pytest.raises(ValueError, match="'soft_max' is not a piece of the course; the pieces are pair_counts, "):
        call_check(cell("def soft_max(x): return x"), "soft_max")


def test_something_that_cannot_be_called_is_said():
    scope = cell("softmax = 3")
    assert call_check(scope) == 0.0
    assert "expected softmax to be a function or a class, got int" in str(judge.examine(3, "softmax"))


STUB = """
    def softmax(x, dim=-1):
        raise NotImplementedError
"""


@pytest.mark.parametrize("earlier", [STUB, OVERFLOWS, MINE])
def test_a_wrong_or_missing_piece_does_not_break_the_next(earlier):
    """attention_weights calls softmax by plain name: whatever stands there, it is judged alone."""
    scope = cell(earlier)
    source = """
        def attention_weights(q, k, mask=None):
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if mask is None:
                return softmax(scores)
            if mask.dtype != torch.bool:
                raise TypeError("bool")
            return softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min)) * mask
    """
    cell(source, scope)
    before = scope["softmax"]
    assert call_check(scope, "attention_weights") == 3.0
    assert scope["softmax"] is before
