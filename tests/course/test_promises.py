"""The course keeps its promises about every piece: its checks judge rightly and name the mistake."""

import inspect

import pytest
import torch
from tfmlib_checks.alternatives import alternatives
from tfmlib_checks.misconceptions import known
from tfmlib_checks.same import seeded
from tfmlib_checks.toys import LayerCache

from tfmlib import attention, heads, pieces
from tfmlib.course import check as judge

NAMES = list(pieces.PIECES)
SEEDS = [0, 1, 20_261]

WRONG = [pytest.param(name, m, id=f"{name}-{m.name}") for name in NAMES for m in known(name)]
RIGHT = [pytest.param(name, f, id=f"{name}-{f.__name__}") for name in NAMES for f in alternatives(name)]
RIGHT += [pytest.param(name, pieces.reference(name), id=f"{name}-reference") for name in NAMES]


@pytest.fixture(params=SEEDS)
def seed(request):
    with seeded(request.param):
        yield request.param


# 1. Every piece has checks, misconceptions and other correct implementations ------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_piece_is_well_provided(name):
    tests = judge.checks(name)
    assert len(tests) >= 3
    assert all(inspect.getdoc(test) for test in tests), "a check's docstring is the sentence that a learner sees"
    assert len(known(name)) >= 3
    assert len(alternatives(name)) >= 2
    assert callable(judge.probe(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_misconception_names_its_check(name):
    tests = {test.__name__ for test in judge.checks(name)}
    for misconception in known(name):
        assert misconception.caught_by in tests, misconception.name
        assert misconception.hint.endswith(".")


def test_every_check_belongs_to_a_piece():
    modules = {judge.check_module(name) for name in NAMES}
    tests = {f"{m.__name__}.{n}" for m in modules for n in vars(m) if n.startswith("test_")}
    used = {f"{test.__module__}.{test.__name__}" for name in NAMES for test in judge.checks(name)}
    assert tests == used


# 2. Every misconception is rejected and diagnosed as itself -----------------------------------------------------------


@pytest.mark.parametrize(("name", "misconception"), WRONG)
def test_misconception_is_rejected_and_named(name, misconception, seed):
    report = judge.examine(misconception.implementation, name)
    failed = {result.name for result in report.results if result.status == judge.FAILED}
    assert not report.passed
    assert misconception.caught_by in failed
    assert report.hint == misconception.hint


# 3. No correct implementation is ever rejected or diagnosed -----------------------------------------------------------


@pytest.mark.parametrize(("name", "implementation"), RIGHT)
def test_correct_implementation_is_accepted(name, implementation, seed):
    report = judge.examine(implementation, name)
    assert report.passed, str(report)
    assert report.hint is None
    with judge._in_scope(implementation, name):
        assert judge.diagnose(implementation, name) is None


# 4. A replacement reaches whatever is built from the piece ------------------------------------------------------------


class Reached(Exception):
    """The replaced piece was called."""


def _attend_over(x):
    return heads.MultiHeadAttention(12, 4, n_kv_heads=2)(x, mask=torch.ones(5, 5, dtype=torch.bool))


def _decode(x):
    return heads.MultiHeadAttention(12, 2, rope_base=100.0)(x, cache=LayerCache())


# What is built from each piece: something that calls it, though it stands elsewhere.
BUILT_FROM = {
    "softmax": [lambda x: attention.attention_weights(x, x), lambda x: attention.attention_weights(x, x, x[0] > 9)],
    "attention_weights": [lambda x: attention.scaled_dot_product_attention(x, x, x), _attend_over],
    "scaled_dot_product_attention": [_attend_over, _decode],
    "split_heads": [_attend_over, _decode],
    "merge_heads": [_attend_over, _decode],
    "repeat_kv": [_attend_over, _decode],
}
NOTHING_YET = {"causal_mask", "padding_mask", "MultiHeadAttention"}  # models are built from them, in chapter 06


def test_every_piece_says_what_is_built_from_it():
    assert set(BUILT_FROM) | NOTHING_YET == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_replacement_reaches_what_is_built_from_it(name):
    def stub(*args, **kwargs):
        raise Reached

    x = torch.randn(5, 5, 12)[:, :, :5] if name == "softmax" else torch.randn(2, 5, 12)
    for build in BUILT_FROM.get(name, []):
        build(x)
        with pieces.using(stub, name), pytest.raises(Reached):
            build(x)
        build(x)
    with pieces.using(stub, name):
        assert pieces.in_use(name) is stub
        assert pieces.reference(name) is not stub
    assert pieces.in_use(name) is pieces.reference(name)


# 5. An untouched stub is not written yet, and never wrong -------------------------------------------------------------


def _stub(name):
    """The learner's untouched version, made as the labs make it."""
    from tfmlib.course.notebooks import stub_source

    scope = {"torch": torch, "Tensor": torch.Tensor, "nn": torch.nn}
    exec(compile(stub_source(name), f"<stub of {name}>", "exec"), scope)
    return scope[name]


@pytest.mark.parametrize("name", NAMES)
def test_untouched_stub_is_not_written_yet(name, seed):
    report = judge.examine(_stub(name), name)
    assert report.unwritten
    assert not report.passed
    assert report.hint is None
    assert report.share == 0
    assert "not written yet" in str(report)
    assert {result.status for result in report.results} == {judge.UNWRITTEN}
