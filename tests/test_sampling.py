"""The checks of chapter 11: temperature, top-k, top-p, drawing, the loop, and beam search.

Outside truth: hand-worked values, plain Python on small vocabularies, and chi-square tests of exact distributions.
"""

import contextlib
import itertools
import math
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .same import Broken, expect, is_tensor, outcome, raises, random_states, random_states_kept, rng, same

HALVES = (torch.float16, torch.bfloat16)
INF, NAN = math.inf, math.nan


def _randn(*shape, salt=0, dtype=torch.float32):
    return torch.randn(shape, generator=rng(salt)).to(dtype)


def _logs(*probabilities, dtype=torch.float32):
    """The logits of a distribution. 0 becomes -inf."""
    return torch.tensor(probabilities, dtype=torch.float64).log().to(dtype)


def _values(got, want, what):
    """Like `same`. What was computed from half precision may come in a wider type."""
    is_tensor(got, what)
    if want.dtype in HALVES and got.dtype in (torch.float32, torch.float64):
        got = got.to(want.dtype)
    same(got, want, what)


def _rows(logits):
    """Every distribution as a list of numbers."""
    return logits.double().reshape(-1, logits.shape[-1]).tolist()


def _wider(answer):
    """An outcome as a probe tells it, whatever type it was computed in."""
    return answer.double() if isinstance(answer, Tensor) else answer


# apply_temperature ----------------------------------------------------------------------------------------------------


def probe_apply_temperature(apply_temperature):
    """Results that tell the known mistakes apart."""
    x = torch.tensor([[1.0, -3.0, 2.0, 0.5], [-1.0, -2.0, -4.0, -1.5]])
    ties = torch.tensor([[1.0, 3.0, 3.0], [-2.0, -2.0, -5.0]])
    asked = [(x, 2.0), (x, 0.5), (x, 0.25), (x, 1.0), (x, 0), (ties, 0), (x[0], 0), (x, -1.0), (x, NAN)]
    return [_wider(outcome(lambda x=x, t=t: apply_temperature(x, t))) for x, t in asked]


def test_logits_are_divided(apply_temperature):
    """Logits 1, 2, 4 become 0.5, 1, 2 at temperature 2, and 2, 4, 8 at temperature 0.5."""
    x = torch.tensor([1.0, 2.0, 4.0])
    same(apply_temperature(x, 2.0), torch.tensor([0.5, 1.0, 2.0]), "apply_temperature([1, 2, 4], 2.0)")
    same(apply_temperature(x, 0.5), torch.tensor([2.0, 4.0, 8.0]), "apply_temperature([1, 2, 4], 0.5)")
    same(apply_temperature(x, 1), x, "apply_temperature([1, 2, 4], 1)")
    same(apply_temperature(logits=x, temperature=4), x / 4, "apply_temperature([1, 2, 4], 4)")


def test_probabilities_are_raised_to_a_power(apply_temperature):
    """The new probabilities are in proportion to p ** (1 / temperature), in every row."""
    x = _randn(2, 3, 7, dtype=torch.float64)
    p = x.softmax(-1)
    for temperature in (0.3, 0.9, 1.0, 1.7, 10.0):
        power = p ** (1 / temperature)
        got = apply_temperature(x, temperature)
        same(got, x / temperature, f"logits at temperature {temperature}")
        same(got.softmax(-1), power / power.sum(-1, keepdim=True), f"probabilities at temperature {temperature}")


def test_any_shape_and_type_of_logits(apply_temperature):
    """(V,), (B, V) and (B, T, V), one token, a non-contiguous tensor, half precision, tokens at -inf."""
    for shape in ((7,), (1,), (3, 1), (2, 5), (1, 1, 1), (2, 3, 11)):
        x = _randn(*shape)
        same(apply_temperature(x, 0.7), x / 0.7, f"apply_temperature of shape {shape}")
    x = _randn(5, 3).T
    same(apply_temperature(x, 1.9), x / 1.9, "apply_temperature of a non-contiguous tensor")
    for dtype in HALVES:
        x = _randn(3, 5, dtype=dtype)
        _values(apply_temperature(x, 1.6), (x.double() / 1.6).to(dtype), f"apply_temperature in {dtype}")
    x = torch.tensor([[1.0, -INF, 2.0], [-INF, 0.0, -INF]])
    same(apply_temperature(x, 0.8), x / 0.8, "apply_temperature of logits with -inf")
    same(apply_temperature(x * 1000, 0.1), x * 10_000, "apply_temperature of large logits")


def test_zero_is_greedy(apply_temperature):
    """At temperature 0 the largest logit stays as it is, and all others become -inf."""
    x = torch.tensor([[1.0, 3.0, 2.0], [-1.0, -4.0, -2.0], [0.0, -0.5, 0.25]])
    want = torch.tensor([[-INF, 3.0, -INF], [-1.0, -INF, -INF], [-INF, -INF, 0.25]])
    for zero in (0, 0.0):
        same(apply_temperature(x, zero), want, f"three rows at temperature {zero}")
        same(apply_temperature(x[1], zero), want[1], f"logits -1, -4, -2 at temperature {zero}")
        same(apply_temperature(x[:, None], zero), want[:, None], f"logits of shape (3, 1, 3) at temperature {zero}")
    x = _randn(2, 5, 7, dtype=torch.float64)
    want = x.masked_fill(x < x.max(-1, keepdim=True).values, -INF)
    same(apply_temperature(x, 0), want, "logits of shape (2, 5, 7) at temperature 0")
    same(apply_temperature(x[..., :1], 0), x[..., :1], "a vocabulary of one token at temperature 0")
    for dtype in HALVES:
        x = torch.tensor([[100.0, 300.0, -INF], [-INF, -60.0, -50.0]], dtype=dtype)
        want = torch.tensor([[-INF, 300.0, -INF], [-INF, -INF, -50.0]], dtype=dtype)
        _values(apply_temperature(x, 0), want, f"logits at temperature 0 in {dtype}")


def test_of_equal_maxima_the_first_stays(apply_temperature):
    """At temperature 0 exactly one token stays: of equal maxima the one with the lowest id."""
    x = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-1.0, -2.0, -1.0], [-INF, -INF, 0.0]])
    want = torch.tensor([[-INF, 3.0, -INF], [2.0, -INF, -INF], [-1.0, -INF, -INF], [-INF, -INF, 0.0]])
    same(apply_temperature(x, 0), want, "rows with equal maxima at temperature 0")
    x = torch.zeros(101)
    x[:13] = -1.0
    want = torch.full((101,), -INF)
    want[13] = 0.0
    same(apply_temperature(x, 0), want, "101 logits at temperature 0, the maximum at ids 13 to 100")


def test_temperature_must_not_be_negative(apply_temperature):
    """A negative temperature, or NaN, is a ValueError."""
    x = torch.tensor([1.0, 2.0])
    for bad in (-1.0, -1, -0.001, -INF, NAN):
        raises(ValueError, lambda bad=bad: apply_temperature(x, bad), f"a temperature of {bad}")


# keep_top_k -----------------------------------------------------------------------------------------------------------


def _kept(got, logits, stays, what):
    """Break the promise unless the tokens where `stays` keep their logits, and all others are -inf."""
    is_tensor(got, what)
    expect(got.shape == logits.shape, f"{what}: expected shape {tuple(logits.shape)}, got {tuple(got.shape)}")
    want = logits.masked_fill(~stays, -INF)
    pairs = zip(_rows(got), _rows(want), strict=True)
    for i, (row, wanted) in enumerate(pairs):
        here, there = ([t for t, value in enumerate(values) if value != -INF] for values in (row, wanted))
        at = f"row {i}: " if got.ndim > 1 else ""
        if here != there:
            raise Broken(f"{what}: {at}expected {_named(there)} kept, the rest at -inf; got {_named(here)} kept")
    _values(got, want, what)
    exact = (got.double() == want.double()).all()
    expect(bool(exact), f"{what}: expected the logits of the tokens that stay as they are, got others, if close")


def _named(ids):
    """Tokens by their ids, up to ten of them."""
    if not ids:
        return "no token"
    few = ", ".join(map(str, ids[:10])) + (f", ... ({len(ids)} in all)" if len(ids) > 10 else "")
    return f"token{'s' if len(ids) > 1 else ''} {few}"


def _mask(rows, logits):
    """True at the listed ids of each row, in the shape of the logits."""
    V = logits.shape[-1]
    return torch.tensor([[t in row for t in range(V)] for row in rows]).view(logits.shape)


def _best(row, k):
    return set(sorted(range(len(row)), key=lambda t: -row[t])[:k])  # sorted() leaves equals in order


def _top_k_checked(keep_top_k, logits, k, what):
    _kept(keep_top_k(logits, k), logits, _mask([_best(row, k) for row in _rows(logits)], logits), what)


def probe_keep_top_k(keep_top_k):
    """Results that tell the known mistakes apart."""
    x = torch.tensor([[1.0, -3.0, 2.0, 0.5, -0.5], [-1.0, -2.0, -4.0, -0.25, -5.0]])
    ties = torch.zeros(2, 11)
    ties[:, 3:5] = -1.0
    ties[:, 9] = 1.0
    asked = [(x, 2), (x, 1), (x, 3), (x[0], 2), (x, 5), (x, 7), (ties, 4), (ties, 1), (x, 0), (x, -1)]
    return [_wider(outcome(lambda x=x, k=k: keep_top_k(x, k))) for x, k in asked]


def test_the_two_largest_stay(keep_top_k):
    """Of logits 1, 4, 2, 3 with k = 2 the tokens 1 and 3 keep theirs; the rest are -inf."""
    want = torch.tensor([-INF, 4.0, -INF, 3.0])
    same(keep_top_k(torch.tensor([1.0, 4.0, 2.0, 3.0]), 2), want, "keep_top_k([1, 4, 2, 3], 2)")
    want = torch.tensor([-INF, 0.0, -INF, -1.0])
    same(keep_top_k(logits=torch.tensor([-3.0, 0.0, -2.0, -1.0]), k=2), want, "keep_top_k([-3, 0, -2, -1], 2)")


def test_every_row_has_its_own_k(keep_top_k):
    """Exactly k tokens stay in every row of (V,), (B, V) or (B, T, V), and each keeps its logit."""
    for shape, k in (((7,), 3), ((3, 11), 4), ((2, 3, 5), 2), ((13, 2), 1), ((1, 1, 17), 16)):
        _top_k_checked(keep_top_k, _randn(*shape), k, f"keep_top_k of logits of shape {shape} with k = {k}")
    _top_k_checked(keep_top_k, _randn(7, 3, dtype=torch.float64).T, 3, "keep_top_k of a non-contiguous tensor")
    x = _randn(2, 7) * 1e30
    _top_k_checked(keep_top_k, x, 3, "keep_top_k of very large logits")
    for dtype, step in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        x = 1 + torch.randperm(29, generator=rng(2)).to(dtype) * step
        _top_k_checked(keep_top_k, x, 7, f"keep_top_k of logits that differ by {step}, in {dtype}")


def test_of_equal_tokens_the_lower_ids_stay(keep_top_k):
    """Equal logits do not make it more than k: 1, 3, 3, 3 with k = 2 keeps tokens 1 and 2."""
    _top_k_checked(keep_top_k, torch.tensor([1.0, 3.0, 3.0, 3.0]), 2, "keep_top_k([1, 3, 3, 3], 2)")
    for V, k in ((2, 1), (7, 3), (50, 20), (101, 1)):
        _top_k_checked(keep_top_k, torch.zeros(2, V), k, f"keep_top_k of {V} equal logits with k = {k}")
    x = torch.randint(3, (3, 29), generator=rng(1)).float() - 1
    for k in (1, 5, 17, 28):
        _top_k_checked(keep_top_k, x, k, f"keep_top_k of 29 logits that are -1, 0 or 1, with k = {k}")


def test_k_may_be_one_or_all(keep_top_k):
    """k = 1 keeps the first maximum; k = V, or more than V, keeps every token."""
    x = _randn(3, 5)
    for k in (1, 5, 6, 1000):
        _top_k_checked(keep_top_k, x, k, f"keep_top_k of 5 tokens with k = {k}")
    _top_k_checked(keep_top_k, x[:, :1], 1, "keep_top_k of a single token with k = 1")
    _top_k_checked(keep_top_k, x[0, :1], 2, "keep_top_k of a single token with k = 2")
    x = torch.tensor([2.0, 5.0, 5.0])
    _top_k_checked(keep_top_k, x, 1, "keep_top_k([2, 5, 5], 1)")


def test_what_is_out_stays_out(keep_top_k):
    """A token that is -inf already is no choice, even where fewer than k others are left."""
    x = torch.tensor([[-INF, 1.0, -INF, 0.0, -INF], [2.0, -INF, -1.0, 3.0, 0.0]])
    for k in (1, 2, 3, 5):
        _top_k_checked(keep_top_k, x, k, f"keep_top_k of logits with -inf, k = {k}")


def test_top_k_in_half_precision(keep_top_k):
    """float16 and bfloat16: the same tokens stay, with the same logits."""
    for dtype in HALVES:
        x = _randn(3, 29, dtype=dtype)
        _top_k_checked(keep_top_k, x, 5, f"keep_top_k in {dtype}")
        _top_k_checked(keep_top_k, (x * 4).round() * 100, 11, f"keep_top_k of large, often equal logits in {dtype}")


def test_k_must_be_positive(keep_top_k):
    """k = 0, or less, is a ValueError."""
    x = torch.tensor([1.0, 2.0])
    for bad in (0, -1, -5):
        raises(ValueError, lambda bad=bad: keep_top_k(x, bad), f"k = {bad}")


# keep_top_p -----------------------------------------------------------------------------------------------------------


def _shares(row):
    """Ids from the most likely down, and what all before each of them sum to."""
    order = sorted(range(len(row)), key=lambda t: -row[t])  # sorted() leaves equals in order
    weights = [math.exp(row[t] - row[order[0]]) for t in order]
    total = math.fsum(weights)
    return order, [math.fsum(weights[:i]) / total for i in range(len(row))]


def _nucleus(row, p):
    order, before = _shares(row)
    return {t for i, t in enumerate(order) if i == 0 or p >= 1 or before[i] < p}


def _clear(logits, near):
    """A p near this number that no sum comes close to: rounding must not decide."""
    sums = torch.tensor([total for row in _rows(logits) for total in _shares(row)[1]], dtype=torch.float64)
    candidates = near + torch.linspace(-0.08, 0.08, 321, dtype=torch.float64)
    gaps = (candidates[:, None] - sums).abs().min(1).values
    return candidates[gaps.argmax()].item()


def _top_p_checked(keep_top_p, logits, p, what):
    _kept(keep_top_p(logits, p), logits, _mask([_nucleus(row, p) for row in _rows(logits)], logits), what)


def probe_keep_top_p(keep_top_p):
    """Results that tell the known mistakes apart."""
    x = torch.stack([_logs(0.07, 0.4, 0.03, 0.3, 0.2), _logs(0.01, 0.02, 0.9, 0.03, 0.04)])
    turned = _logs(0.2, 0.1, 0.4, 0.3)  # 2, 3, 0, 1: the order is not its own inverse
    equal, tail = torch.zeros(8), torch.tensor([0.0, -40.0, -80.0])
    pair = torch.tensor([1.0, 3.0, 3.0, 0.0])
    half = torch.zeros(1024, dtype=torch.bfloat16)
    asked = [(x, 0.6), (x, 0.8), (x[0], 0.6), (x, 0.95), (turned, 0.6), (turned, 0.85), (equal, 0.5), (equal, 0.3)]
    asked += [(tail, 1.0), (tail, 2.0), (x, 0.0), (x, 1.0), (pair, 0.3), (x + 800, 0.8), (half, 0.7505)]
    asked += [(x, -0.5), (x, NAN)]
    return [_wider(outcome(lambda x=x, p=p: keep_top_p(x, p))) for x, p in asked]


def test_the_token_that_crosses_stays(keep_top_p):
    """Of 0.5, 0.41, 0.09 with p = 0.9 two stay: 0.5 alone is not enough, and 0.91 is."""
    for probabilities, p in (((0.5, 0.41, 0.09), 0.9), ((0.6, 0.3, 0.1), 0.5), ((0.6, 0.3, 0.1), 0.95)):
        x = _logs(*probabilities)
        _top_p_checked(keep_top_p, x, p, f"keep_top_p of probabilities {probabilities} with p = {p}")
    x = _logs(0.5, 0.41, 0.09)
    _kept(keep_top_p(logits=x, p=0.4), x, torch.tensor([True, False, False]), "keep_top_p with p = 0.4")


def test_tokens_may_stand_in_any_order(keep_top_p):
    """The likely tokens stay wherever they stand: of 0.2, 0.1, 0.4, 0.3 with p = 0.6 tokens 2 and 3."""
    for probabilities in ((0.2, 0.1, 0.4, 0.3), (0.1, 0.2, 0.3, 0.4), (0.3, 0.4, 0.1, 0.2), (0.1, 0.4, 0.2, 0.3)):
        for p in (0.35, 0.6, 0.85):
            x = _logs(*probabilities)
            _top_p_checked(keep_top_p, x, p, f"keep_top_p of probabilities {probabilities} with p = {p}")


def test_every_row_has_its_own_nucleus(keep_top_p):
    """A sure row keeps few tokens and an unsure one many, in (V,), (B, V) and (B, T, V); logits stay as they are."""
    x = torch.stack([_logs(0.07, 0.4, 0.03, 0.3, 0.2), _logs(0.01, 0.02, 0.9, 0.03, 0.04), torch.zeros(5)])
    for p in (0.25, 0.5, 0.75, 0.85):
        _top_p_checked(keep_top_p, x, p, f"keep_top_p of a row of 0.4, of 0.9 and of 0.2 at most, with p = {p}")
    for shape in ((7,), (3, 11), (2, 3, 5), (1, 1, 17)):
        for near in (0.3, 0.6, 0.9):
            x = _randn(*shape) * 2
            p = _clear(x, near)
            _top_p_checked(keep_top_p, x, p, f"keep_top_p of logits of shape {shape} with p = {p:.4f}")
    x = _randn(7, 3, dtype=torch.float64).T
    _top_p_checked(keep_top_p, x, _clear(x, 0.7), "keep_top_p of a non-contiguous tensor")
    x = torch.randperm(29, generator=rng(2)) * 1e-4
    _top_p_checked(keep_top_p, x, _clear(x, 0.4), "keep_top_p of logits that differ by 0.0001")


def test_the_fewest_that_reach_p(keep_top_p):
    """p itself is enough: of 8 equal tokens p = 0.5 keeps 4, the lower ids, and p = 0.51 keeps 5."""
    for V, p in ((8, 0.5), (8, 0.51), (8, 0.125), (8, 0.25), (2, 0.5), (4, 0.75), (8, 0.874), (16, 0.3125)):
        x = torch.zeros(V)
        _top_p_checked(keep_top_p, x, p, f"keep_top_p of {V} equal tokens with p = {p}")
        _top_p_checked(keep_top_p, x.double() - 3, p, f"keep_top_p of {V} equal tokens in float64 with p = {p}")
    x = torch.tensor([[-INF, 0.0, -INF, 0.0], [0.0, 0.0, -INF, -INF]])
    _top_p_checked(keep_top_p, x, 0.5, "keep_top_p of rows with two equal tokens and p = 0.5")


def test_of_equal_tokens_the_lower_ids_enter(keep_top_p):
    """Equal tokens enter one by one, the lower id first: not all of them, only as many as p needs."""
    x = torch.tensor([1.0, 3.0, 3.0, 0.0])
    _top_p_checked(keep_top_p, x, 0.3, "keep_top_p([1, 3, 3, 0], 0.3)")
    _top_p_checked(keep_top_p, x, 0.7, "keep_top_p([1, 3, 3, 0], 0.7)")
    x = torch.randint(3, (3, 29), generator=rng(1)).float()
    for near in (0.2, 0.5, 0.8):
        p = _clear(x, near)
        _top_p_checked(keep_top_p, x, p, f"keep_top_p of 29 logits that are 0, 1 or 2, with p = {p:.4f}")


def test_there_is_always_one(keep_top_p):
    """p = 0 keeps the most likely token, the first of several; a single token always stays."""
    x = _randn(3, 7)
    for p in (0, 0.0, 1e-9):
        _top_p_checked(keep_top_p, x, p, f"keep_top_p with p = {p}")
        _top_p_checked(keep_top_p, torch.tensor([0.0, 2.0, 2.0]), p, f"keep_top_p([0, 2, 2], {p})")
    for p in (0.0, 0.5, 1.0):
        _top_p_checked(keep_top_p, x[:, :1], p, f"keep_top_p of a single token with p = {p}")
    x = torch.tensor([[0.0, 20.0, -20.0], [-INF, -INF, -5.0]])
    _top_p_checked(keep_top_p, x, 0.1, "keep_top_p of rows in which one token is all but sure")
    _top_p_checked(keep_top_p, x, 0.9, "keep_top_p of rows in which one token is all but sure")


def test_p_of_one_keeps_all(keep_top_p):
    """p = 1 or more keeps every token, even one so unlikely that the sum is 1 without it."""
    for x in (
        torch.tensor([0.0, -40.0, -80.0]),
        torch.tensor([[-300.0, 5.0, 0.0], [1.0, -INF, 1.0]]),
        _randn(2, 3, 97),
    ):
        for p in (1, 1.0, 1.5, INF):
            _top_p_checked(keep_top_p, x, p, f"keep_top_p of logits of shape {tuple(x.shape)} with p = {p}")
    for V in (3, 7, 11):
        _top_p_checked(keep_top_p, torch.zeros(2, V), 0.999999, f"keep_top_p of {V} equal tokens with p = 0.999999")


def test_nucleus_of_large_logits_and_halves(keep_top_p):
    """Logits around 1000 do not overflow; half precision is summed in float32 at least."""
    x = torch.stack([_logs(0.07, 0.4, 0.03, 0.3, 0.2), _logs(0.01, 0.02, 0.9, 0.03, 0.04)])
    for shift in (1000.0, -1000.0):
        _top_p_checked(keep_top_p, x + shift, 0.8, f"keep_top_p of logits around {shift:g} with p = 0.8")
    for dtype in HALVES:
        x = _randn(3, 29, dtype=dtype) * 2
        _top_p_checked(keep_top_p, x, _clear(x, 0.7), f"keep_top_p in {dtype}")
        x = torch.zeros(1024, dtype=dtype)
        _top_p_checked(keep_top_p, x, 0.7505, f"keep_top_p of 1024 equal tokens in {dtype} with p = 0.7505")


def test_p_must_not_be_negative(keep_top_p):
    """A negative p, or NaN, is a ValueError."""
    x = torch.tensor([1.0, 2.0])
    for bad in (-0.5, -1, -0.001, -INF, NAN):
        raises(ValueError, lambda bad=bad: keep_top_p(x, bad), f"p = {bad}")


# What is drawn --------------------------------------------------------------------------------------------------------


def _limit(cells, z):
    """What chi-square exceeds as seldom as a normal number exceeds z, for so many cells (Wilson and Hilferty)."""
    degrees = cells - 1
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


RARE, NEVER = 3.09, 5.6  # one in a thousand, one in a hundred million


def _distributed(draw, want, what, n, cell="token"):
    """Break the promise unless draws have this distribution: `want` holds the probability of every cell.

    `draw(n, generator)` gives n cells, and `cell` is what one of them is called. A first lot that looks unlikely, as
    one in a thousand does for a right piece, is not the last word: a second one, four times as large, decides, and is
    held unlikely once in a hundred million.
    """
    names = [f"{cell} {', '.join(map(str, at))}" for at in torch.ones_like(want).nonzero().tolist()]
    p = want.flatten().double()
    for many, z, generator in ((n, RARE, rng(20)), (4 * n, NEVER, rng(21))):
        drawn = _ids(draw(many, generator), (many,), len(p), what)
        counts = torch.bincount(drawn, minlength=len(p)).double()
        stray = counts.masked_fill(p > 0, 0)
        if stray.any():
            at = int(stray.argmax())
            raise Broken(f"{what}: expected never to draw {names[at]}, got it {int(stray[at])} times in {many} draws")
        expected = p * many
        off = (counts - expected).square() / expected.clamp_min(1e-9)
        few = expected < 10  # too few to judge alone: together they are one cell, if they are enough
        cells, total = int((~few).sum()), off[~few].sum()
        if expected[few].sum() >= 10:
            cells, total = cells + 1, total + (counts[few].sum() - expected[few].sum()) ** 2 / expected[few].sum()
        if cells < 2 or total <= _limit(cells, z):
            return
    at = int(off.masked_fill(few, 0).argmax())
    raise Broken(
        f"{what}: in {many} draws expected {names[at]} about {expected[at]:.0f} times, got it {counts[at]:.0f} times "
        f"(chi-square {total:.0f}, where {_limit(cells, z):.0f} is all that chance may explain)"
    )


def _ids(got, shape, V, what):
    """Break the promise unless these are ids below V in this shape."""
    is_tensor(got, what)
    expect(got.shape == shape, f"{what}: expected shape {tuple(shape)}, got {tuple(got.shape)}")
    expect(got.dtype == torch.int64, f"{what}: expected dtype torch.int64, got {got.dtype}")
    if got.numel():
        low, high = int(got.min()), int(got.max())
        expect(low >= 0 and high < V, f"{what}: expected ids from 0 to {V - 1}, got {low if low < 0 else high}")
    return got


def _moved(before):
    """Which of the process's own generators have been moved since."""
    now = random_states()
    return [name for name in before if now[name] != before[name]]


def _nearest(draw, n, named):
    """The name of the distribution that n draws come nearest to."""
    cells = len(next(iter(named.values())))
    share = torch.bincount(draw(n, rng(30)).flatten(), minlength=cells)[:cells].double() / n
    return min(named, key=lambda name: float((share - named[name].double()).abs().sum()))


# sample ---------------------------------------------------------------------------------------------------------------

P = torch.tensor([0.1, 0.45, 0.25, 0.2], dtype=torch.float64)


def _wrong_draws():
    """What known mistakes draw from P, and what is right."""
    logits, shifted = P.log(), P.log() + 3.0
    uniform = torch.rand(50_000, 4, generator=rng(8), dtype=torch.float64)

    def of(scores):
        return torch.bincount(scores.argmax(-1), minlength=4) / len(scores)

    return {
        "softmax of the logits": P,
        "always the most likely": F.one_hot(P.argmax(), 4),
        "all alike": torch.full((4,), 0.25),
        "the logits as weights": shifted / shifted.sum(),
        "softmax of the probabilities": P.softmax(-1),
        "noise that multiplies": of(P * uniform),
        "normal noise, or Gumbel noise with the wrong sign": torch.tensor([0.056, 0.516, 0.248, 0.18]),
        "exponential noise": of(logits - uniform.log()),
        "uniform noise": of(logits + uniform),
    }


# The same of two tokens, 0.9 and 0.1, where the sign of Gumbel noise makes no difference.
WRONG_PAIRS = {"softmax": [0.9, 0.1], "noise of another kind": [0.942, 0.058], "the first": [1, 0], "alike": [0.5, 0.5]}


def probe_sample(sample):
    """Results that tell the known mistakes apart."""
    named = _wrong_draws()
    x = P.log().float() + 3.0

    def drawn(logits, named):
        return outcome(lambda: _nearest(lambda n, g: sample(logits.expand(n, len(logits)), g), 8000, named))

    def state(seed=None):
        """Whether torch's own generator was moved, by a draw with a generator or without."""
        with random_states_kept():
            before = random_states()
            sample(x.expand(50, 4), *([] if seed is None else [torch.Generator().manual_seed(seed)]))
            return _moved(before)

    def twelve(generator):
        return torch.stack([sample(x.expand(50, 4), generator) for _ in range(12)])

    def again(seed, other):
        return torch.equal(*(twelve(torch.Generator().manual_seed(s)) for s in (seed, other)))

    def advances(generator):
        ids = twelve(generator)
        return bool((ids == ids[:1]).all())

    def own_generator():
        """Whether torch's own generator goes on from call to call, and whether its seed repeats the draws."""
        with random_states_kept():
            torch.manual_seed(1)
            still = advances(None)
            torch.manual_seed(2)
            first = twelve(None)
            torch.manual_seed(2)
            return still, torch.equal(twelve(None), first)

    def rows_alike():
        ids = sample(x.expand(40, 3, 4), rng(31))
        return bool((ids == ids[:1]).all()), bool((ids == ids[:, :1]).all())

    def open_and_sure():
        """Which tokens are drawn where both are likely, and where the first is sure."""
        logits, generator = torch.tensor([[0.0, 0.0], [100.0, -100.0]]).repeat(2, 1), rng(35)
        ids = torch.stack([sample(logits, generator) for _ in range(30)]).view(-1, 2)
        return [sorted(set(column.tolist())) for column in ids.unbind(1)]

    sure = torch.tensor([[0.0, -INF, -INF], [-INF, -INF, 2.0]])

    def shape(*sizes):
        """The shape and type of ids where nothing is left to chance."""
        ids = sample(torch.zeros(*sizes, 1), rng(32))
        return tuple(ids.shape), ids.dtype

    return [
        drawn(x, named),
        drawn(P.log().float() + 1000.0, named),
        drawn(_logs(0.9, 0.1), {name: torch.tensor(p) for name, p in WRONG_PAIRS.items()}),
        outcome(lambda: state(3)),
        outcome(state),
        outcome(lambda: again(5, 5)),
        outcome(lambda: again(5, 6)),
        outcome(lambda: advances(rng(33))),
        outcome(own_generator),
        outcome(rows_alike),
        outcome(lambda: sample(sure, rng(34))),
        outcome(lambda: shape()),
        outcome(lambda: shape(2)),
        outcome(lambda: shape(1)),
        outcome(lambda: shape(2, 1, 3)),
        outcome(open_and_sure),
        outcome(lambda: shape(2, 3)),
    ]


def test_a_sure_token_is_drawn(sample):
    """Where only one token is possible, it is drawn: (..., V) gives ids of shape (...), int64."""
    for shape in ((), (2,), (2, 3), (1, 1), (2, 1, 3)):
        want = torch.randint(5, shape, generator=rng(1))
        x = torch.where(F.one_hot(want, 5) > 0, _randn(*shape, 5), -INF)
        got = _ids(sample(x, rng(2)), shape, 5, f"sample of logits of shape {tuple(x.shape)}")
        same(got, want, f"the sure token of logits of shape {tuple(x.shape)}")
        one = sample(logits=_randn(*shape, 1), generator=rng(3))
        _ids(one, shape, 1, f"sample of a vocabulary of one, shape {(*shape, 1)}")
    want = torch.tensor([4, 0, 2])
    x = torch.where(F.one_hot(want, 5) > 0, 0.0, -INF).T.contiguous().T
    same(sample(x), want, "the sure token of non-contiguous logits")


def test_tokens_come_as_often_as_softmax_says(sample):
    """Of 20 000 draws from 0.1, 0.45, 0.25, 0.2 about 2000, 9000, 5000 and 4000: a chi-square test."""
    for shift in (0.0, 3.0):
        x = P.log().float() + shift

        def draw(n, generator, x=x):
            return _ids(sample(x.expand(n, 4), generator), (n,), 4, "sample of (n, 4) logits")

        _distributed(draw, P, f"tokens of logits log(0.1, 0.45, 0.25, 0.2) + {shift:g}", 20_000)
    x = _randn(7) * 1.2
    _distributed(lambda n, g: sample(x.expand(n, 7), g), x.double().softmax(-1), "tokens of random logits", 20_000)


def test_every_row_has_its_own_distribution(sample):
    """Rows with different logits are drawn from each by its own, in (B, T, V) too."""
    want = torch.stack([P, P.flip(0), torch.tensor([0.05, 0.05, 0.2, 0.7]).double(), torch.full((4,), 0.25)])
    x = want.log().float()
    for shape in ((4,), (2, 2)):

        def draw(n, generator, shape=shape):
            got = sample(x.view(*shape, 4).expand(n, *shape, 4), generator)
            got = _ids(got, (n, *shape), 4, f"sample of logits of shape {(n, *shape, 4)}")
            return got.view(n, 4) + 4 * torch.arange(4)

        cells = lambda n, g, draw=draw: draw(-(-n // 4), g).flatten()[:n]  # noqa: E731
        what = f"draws from logits of shape (n, {', '.join(map(str, shape))}, 4)"
        _distributed(cells, want / 4, what, 20_000, cell="row, token")


def test_rows_do_not_share_their_luck(sample):
    """Two rows with the same logits are drawn apart: every pair of tokens comes as often as the product says."""
    x = P.log().float()

    def beside(n, generator):
        first, second = sample(x.expand(n, 2, 4), generator).unbind(1)
        return first * 4 + second

    def below(n, generator):
        ids = sample(x.expand(2, n, 4), generator)
        return ids[0] * 4 + ids[1]

    def following(n, generator):
        ids = sample(x.expand(2 * n, 4), generator)
        return ids[::2] * 4 + ids[1::2]

    for draw, where in ((beside, "(n, 2, 4)"), (below, "(2, n, 4)"), (following, "(2n, 4)")):
        _distributed(draw, P[:, None] * P, f"pairs of tokens from logits of shape {where}", 10_000, cell="the pair")


def test_chance_comes_from_the_generator(sample):
    """The same state of the generator draws the same ids; with a generator no other is touched."""
    x = P.log().float().expand(50, 4)
    with random_states_kept():
        sample(x[0], rng(4))
        before = random_states()
        generator = rng(5)
        first = sample(x, generator)
        second = sample(x, generator=generator)
        moved = _moved(before)
        expect(not moved, f"expected all chance from the generator given, but {' and '.join(moved)}'s own was used")
        torch.manual_seed(1)
        generator = rng(5)
        same(sample(x, generator), first, "50 draws after the generator was set back")
        same(sample(x, generator), second, "50 more draws after the generator was set back")
    expect(not torch.equal(first, second), "expected a generator to move on, but a second call drew the same 50 ids")
    other = sample(x, rng(6))
    expect(not torch.equal(first, other), "expected other ids from another seed, but all 50 draws are the same")


def test_without_a_generator_torchs_own_is_used(sample):
    """Without one torch's own generator is used: torch.manual_seed repeats the draws, and the next call differs."""
    x = P.log().float().expand(50, 4)
    with random_states_kept():
        torch.manual_seed(int(rng(7).initial_seed()) % 2**31)
        start = random_states()
        first = sample(x)
        moved = _moved(start)
        expect(moved == ["torch"], f"expected torch's own generator to be used, and no other; used: {moved or 'none'}")
        second = sample(x, None)
        torch.set_rng_state(torch.tensor(start["torch"], dtype=torch.uint8))
        same(sample(x), first, "50 draws after torch's generator was set back")
    expect(not torch.equal(first, second), "expected two calls to differ, but both drew the same 50 ids")


def test_minus_infinity_is_never_drawn(sample):
    """A token with the logit -inf never comes, at the ends or in the middle; the others share all of it."""
    for want in ((0.0, 0.5, 0.0, 0.3, 0.2, 0.0), (0.7, 0.0, 0.0, 0.0, 0.3, 0.0), (0.0, 0.0, 0.0, 0.0, 0.4, 0.6)):
        x = _logs(*want)
        for dtype in (torch.float32, torch.float64, torch.float16):
            what = f"tokens of probabilities {want} in {dtype}"
            y = x.to(dtype)
            _distributed(lambda n, g, y=y: sample(y.expand(n, 6), g), y.double().softmax(-1), what, 2000)


def test_draws_from_large_logits_and_halves(sample):
    """Logits around 1000 or -1000, float64, float16 and bfloat16 have the same distribution."""
    for shift in (1000.0, -1000.0):
        x = P.log().float() + shift
        what = f"tokens of logits around {shift:g}"
        _distributed(lambda n, g, x=x: sample(x.expand(n, 4), g), x.double().softmax(-1), what, 5000)
    for dtype in (torch.float64, *HALVES):
        x = (_logs(0.02, 0.3, 0.08, 0.4, 0.2) + 30).to(dtype)
        what = f"tokens of logits in {dtype}"
        _distributed(lambda n, g, x=x: sample(x.expand(n, 5), g), x.double().softmax(-1), what, 10_000)
    x, want = torch.zeros(171, dtype=torch.bfloat16), torch.full((171,), 1 / 171)
    _distributed(lambda n, g: sample(x.expand(n, 171), g), want, "171 equally likely tokens in torch.bfloat16", 3000)


# generate -------------------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """An error that comes on purpose."""


class Toy(nn.Module):
    """A little language model, (B, T) -> (B, T, V), that notes how it is called.

    `fails` is the number of the call that raises an error.
    """

    def __init__(self, V: int, fails: int | None = None):
        super().__init__()
        self.V, self.fails = V, fails
        self.inner = nn.Sequential(nn.Dropout(0.9), nn.Sequential(nn.Identity(), nn.Dropout(0.9)))
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.shapes: list[tuple[int, ...]] = []
        self.recorded: list[bool] = []  # for gradients
        self.in_train_mode: set[str] = set()

    def forward(self, ids):
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
            raise TypeError("the model expects ids of shape (B, T), int64")
        self.shapes.append(tuple(ids.shape))
        if len(self.shapes) == self.fails:
            raise Trouble("this model fails, on purpose")
        self.in_train_mode |= {name or "the model" for name, module in self.named_modules() if module.training}
        logits = self.inner(self.logits(ids)) * self.scale + self.frozen
        self.recorded.append(logits.requires_grad)
        return logits


class Adder(Toy):
    """The next token is sure: the sum of all ids so far plus one, modulo V."""

    def logits(self, ids):
        return F.one_hot((ids.cumsum(1) + 1) % self.V, self.V).float() * 200


class Counter7(Toy):
    """The next token is sure: the last one plus one, modulo 7."""

    def __init__(self, fails: int | None = None):
        super().__init__(7, fails)

    def logits(self, ids):
        return F.one_hot((ids + 1) % 7, 7).float() * 200


class Chain(Toy):
    """A Markov chain: the last id alone decides, by a row of a table of probabilities."""

    def __init__(self, table: Tensor):
        super().__init__(len(table))
        self.register_buffer("table", table.double().log().float())
        self.inner = nn.Identity()

    def logits(self, ids):
        return self.table[ids]


def _summed(prompt, n, V):
    """What the adder says, by plain Python."""
    rows = [list(row) for row in prompt]
    for row in rows:
        for _ in range(n):
            row.append((sum(row) + 1) % V)
    return torch.tensor(rows)


# Weights of seven tokens. With temperature 2, k = 5, p = 0.85 in the right order the four largest stay. With
# temperature 0.5, k = 4, p = 0.7 every order keeps another number of the others. LEVEL has no unlikely token.
WEIGHTS = torch.tensor([3.0, 38.0, 5.0, 1.0, 39.0, 2.0, 15.0])
LEVEL = torch.tensor([3.0, 4.0, 2.0, 6.0, 1.5, 5.0, 2.5])
OTHERS = torch.tensor([11.0, 5.0, 8.0, 28.0, 7.0, 11.0, 7.0])


def _one_step(generate, weights, n, generator, **options):
    """The next token of n rows, where all prompts end alike."""
    chain = Chain(weights.double().expand(7, 7) / weights.double().sum())
    prompt = torch.tensor([[2, 5]]).expand(n, 2)
    return _new(generate(chain, prompt, 1, generator=generator, **options), prompt, 1, 7, "one new token")[:, 0]


def _new(got, prompt, n, V, what):
    """The new tokens: break the promise unless there are n, after the prompt."""
    B, T = prompt.shape
    _ids(got, (B, T + n), V, what)
    same(got[:, :T], prompt, f"{what}: the prompt, with which each row begins")
    return got[:, T:]


def _reshaped(weights, temperature=1.0, top_k=None, top_p=None):
    """What is left of a distribution, by plain Python: temperature, then top_k, then top_p."""
    powers = [w ** (1 / temperature) for w in weights.tolist()]
    order = sorted(range(len(powers)), key=lambda t: -powers[t])[:top_k]
    total, stays, so_far = sum(powers[t] for t in order), [], 0.0
    for t in order:
        if stays and top_p is not None and so_far >= top_p * total:
            break
        stays.append(t)
        so_far += powers[t]
    left = torch.zeros(len(powers), dtype=torch.float64)
    left[stays] = torch.tensor([powers[t] for t in stays], dtype=torch.float64)
    return left / left.sum()


def _modes(model):
    return {name or "the model": module.training for name, module in model.named_modules()}


def _mixed_modes(model):
    """Some parts in train mode, some in eval mode, and parts of parts otherwise than the part."""
    model.train()
    model.inner.eval()
    model.inner[1].train()
    model.inner[1][1].eval()
    return model


def _same_modes(model, before, what):
    words = {True: "train", False: "eval"}
    for name, mode in _modes(model).items():
        expect(mode == before[name], f"{what}: expected {name} in {words[before[name]]} mode, got {words[mode]} mode")


CHAIN = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.25, 0.3, 0.45]], dtype=torch.float64)


def probe_generate(generate):
    """Results that tell the known mistakes apart."""
    prompt = torch.tensor([[2, 3], [5, 0], [6, 6]])
    count = torch.tensor([[0, 3], [2, 5], [6, 1]])

    def greedy(model, ids, n, **options):
        """The ids and the number of calls."""
        model.eval()
        return outcome(lambda: (generate(model, ids, n, temperature=0, **options), len(model.shapes)))

    def modes(model, n=2):
        with contextlib.suppress(Exception):
            generate(model, prompt, n, temperature=0)
        return sorted(_modes(model).items())

    def seen(model):
        generate(model, prompt, 2, temperature=0)
        return sorted(model.in_train_mode), sorted(set(model.recorded))

    def stays(weights, **options):
        """Which tokens come up at all."""
        ids = _one_step(generate, weights, 400, rng(60), **options)
        return sorted(set(ids.tolist()))

    def drawn():
        named = {
            "softmax": CHAIN[1],
            "the most likely": F.one_hot(CHAIN[1].argmax(), 3),
            "the first position's": CHAIN[2],
            "the logits' own": torch.full((3,), 1 / 3),
            "flatter": _reshaped(CHAIN[1], 2.0),
            "steeper": _reshaped(CHAIN[1], 0.5),
        }
        ids = torch.tensor([[2, 1]])

        def draw(temperature):
            return lambda n, g: generate(Chain(CHAIN), ids.expand(n, 2), 1, temperature=temperature, generator=g)[:, -1]

        return [_nearest(draw(temperature), 2000, named) for temperature in (1.0, 2.0)]

    def alike():
        """Whether all rows share their luck, whether all steps do, and whether torch's own generator is moved."""
        with random_states_kept():
            before = random_states()
            ids = generate(Chain(torch.full((7, 7), 1 / 7)), count, 6, generator=rng(61))[:, 2:]
            moved = _moved(before)
        return bool((ids == ids[:1]).all()), bool((ids == ids[:, :1]).all()), moved

    def enabled():
        with torch.enable_grad():
            generate(Counter7(), count, 1)
            return torch.is_grad_enabled()

    return [
        greedy(Adder(11), prompt, 5),
        greedy(Adder(11), prompt[:1], 1),
        greedy(Adder(11), prompt, 0),
        greedy(Counter7(), count, 9, eos_id=6),
        greedy(Counter7(), count[:2], 3, eos_id=6),
        greedy(Counter7(), count[2:], 9, eos_id=6),
        greedy(Counter7(), count, 9, eos_id=0),
        greedy(Counter7(), count, 5),
        greedy(Counter7(), torch.tensor([[3, 6], [6, 6]]), 3, eos_id=6),
        outcome(drawn),
        outcome(lambda: stays(OTHERS, temperature=0.5, top_k=4, top_p=0.7)),
        outcome(lambda: stays(WEIGHTS, temperature=2.0, top_k=5, top_p=0.85)),
        outcome(lambda: stays(LEVEL, top_k=3)),
        outcome(lambda: stays(LEVEL, top_p=0.7)),
        outcome(lambda: stays(LEVEL, top_p=0.0)),
        outcome(lambda: stays(LEVEL, temperature=0)),
        outcome(alike),
        outcome(enabled),
        outcome(lambda: seen(Adder(11))),
        outcome(lambda: seen(_mixed_modes(Adder(11)))),
        outcome(lambda: modes(Adder(11).eval())),
        outcome(lambda: modes(Adder(11).train())),
        outcome(lambda: modes(_mixed_modes(Adder(11)))),
        outcome(lambda: modes(_mixed_modes(Adder(11, fails=2)))),
    ]


def test_each_token_depends_on_all_before(generate):
    """The model's next token is the sum of all ids plus one, modulo 11: 2, 3 goes on 6, 1, 2 at temperature 0."""
    got = generate(Adder(11).eval(), torch.tensor([[2, 3]]), 3, temperature=0)
    same(got, torch.tensor([[2, 3, 6, 1, 2]]), "generate from 2, 3")
    for shape, n in (((1, 1), 5), ((3, 2), 4), ((2, 7), 1), ((5, 3), 11)):
        prompt = torch.randint(11, shape, generator=rng(1))
        model = Adder(11).eval()
        want = _summed(prompt.tolist(), n, 11)
        same(generate(model, prompt, max_new_tokens=n, temperature=0), want, f"generate {n} tokens from {shape} ids")
        calls = len(model.shapes)
        expect(calls <= n, f"generate {n} tokens: expected {n} calls of the model, got {calls}")


def test_no_new_tokens_give_the_prompt_back(generate):
    """max_new_tokens = 0 gives the prompt back."""
    prompt = torch.randint(7, (2, 3), generator=rng(2))
    for eos_id in (None, 3):
        got = generate(Counter7().eval(), prompt, 0, eos_id=eos_id)
        _ids(got, (2, 3), 7, "generate with max_new_tokens = 0")
        same(got, prompt, "generate with max_new_tokens = 0")


def test_tokens_follow_the_chain(generate):
    """From a Markov chain the next two tokens come as pairs exactly as often as its table says: a chi-square test."""
    for start in (0, 1):
        want = CHAIN[start][:, None] * CHAIN  # of the pair

        def draw(n, generator, start=start):
            prompt = torch.tensor([[2, start]]).expand(n, 2)
            first, second = _new(generate(Chain(CHAIN), prompt, 2, generator=generator), prompt, 2, 3, "pairs").unbind(
                1
            )
            return first * 3 + second

        _distributed(draw, want, f"pairs of new tokens after token {start}", 6000, cell="the pair")


def test_temperature_reshapes_what_is_drawn(generate):
    """Temperatures 0.5 and 2 sharpen and flatten what is drawn; 0 takes the first of the most likely tokens."""
    for temperature in (0.5, 2.0):
        want = _reshaped(WEIGHTS, temperature)
        what = f"the next token at temperature {temperature}"
        _distributed(lambda n, g, t=temperature: _one_step(generate, WEIGHTS, n, g, temperature=t), want, what, 4000)
    got = _one_step(generate, WEIGHTS, 5, rng(3), temperature=0)
    same(got, torch.full((5,), 4), "the next token at temperature 0, where token 4 is the most likely")
    got = _one_step(generate, torch.tensor([1.0, 3, 3, 1, 3, 1, 1]), 5, rng(3), temperature=0, top_p=0.9, top_k=2)
    same(got, torch.full((5,), 1), "the next token at temperature 0, where tokens 1, 2 and 4 are the most likely")


def test_top_k_and_top_p_limit_the_choice(generate):
    """top_k = 3 draws from three tokens, top_p = 0.7 from the nucleus, each as often as what is left says."""
    cases = [{"top_k": 3}, {"top_k": 1}, {"top_k": 100}, {"top_p": 0.7}, {"top_p": 0.0}, {"top_p": 1.0}]
    for options in cases:
        want = _reshaped(WEIGHTS, **options)
        what = "the next token with " + ", ".join(f"{name} = {value}" for name, value in options.items())
        _distributed(lambda n, g, o=options: _one_step(generate, WEIGHTS, n, g, **o), want, what, 2000)


def test_first_temperature_then_top_k_then_top_p(generate):
    """top_k sees what temperature leaves, and top_p what both leave: another order keeps other tokens."""
    cases = [
        (WEIGHTS, {"temperature": 2.0, "top_k": 5, "top_p": 0.85}),
        (OTHERS, {"temperature": 0.5, "top_k": 4, "top_p": 0.7}),
        (WEIGHTS, {"temperature": 2.0, "top_p": 0.85}),
        (OTHERS, {"top_k": 4, "top_p": 0.7}),
    ]
    for weights, options in cases:
        want = _reshaped(weights, **options)
        what = "the next token with " + ", ".join(f"{name} = {value}" for name, value in options.items())
        _distributed(lambda n, g, w=weights, o=options: _one_step(generate, w, n, g, **o), want, what, 3000)


def test_all_chance_comes_from_the_generator(generate):
    """The generator's state decides all tokens, and no other generator is touched; without one it is torch's own."""
    model, prompt = Chain(torch.full((7, 7), 1 / 7)), torch.zeros(3, 1, dtype=torch.int64)
    with random_states_kept():
        generate(model, prompt, 1, generator=rng(4))
        before = random_states()
        generator = rng(5)
        first = generate(model, prompt, 23, generator=generator)
        second = generate(model, prompt, 23, generator=generator)
        moved = _moved(before)
        expect(not moved, f"expected all chance from the generator given, but {' and '.join(moved)}'s own was used")
        same(generate(model, prompt, 23, generator=rng(5)), first, "23 tokens after the generator was set back")
        torch.manual_seed(6)
        third = generate(model, prompt, 23)
        fourth = generate(model, prompt, 23)
        torch.manual_seed(6)
        same(generate(model, prompt, 23), third, "23 tokens after torch.manual_seed")
    pairs = {"a generator is used again": (first, second), "torch's own generator is used again": (third, fourth)}
    for when, (a, b) in pairs.items():
        expect(not torch.equal(a, b), f"expected other tokens when {when}, but all 3 x 23 are the same")
    expect(not (first == first[:1]).all(), "expected rows to be drawn apart, but 3 rows of 23 tokens are the same")


def test_a_row_that_has_ended_is_filled(generate):
    """A row that has chosen eos_id goes on with eos_id; the loop stops as soon as all rows have chosen it."""
    prompt = torch.tensor([[2, 5], [0, 2], [6, 4]])  # neither the first row nor the last ends last
    want = torch.tensor([[2, 5, 6, 6, 6, 6], [0, 2, 3, 4, 5, 6], [6, 4, 5, 6, 6, 6]])
    for n in (1, 2, 3, 4, 5, 9):
        model = Counter7().eval()
        got = generate(model, prompt, n, temperature=0, eos_id=6)
        steps = min(n, 4)
        same(got, want[:, : 2 + steps], f"counting up from 5, 2 and 4 with eos_id = 6 and max_new_tokens = {n}")
        calls = len(model.shapes)
        expect(calls <= steps, f"max_new_tokens = {n}: all have ended after {steps} calls of the model, got {calls}")
    got = generate(Counter7().eval(), prompt, 9, temperature=0, eos_id=0)
    want = [[2, 5, 6, 0, 0, 0, 0], [0, 2, 3, 4, 5, 6, 0], [6, 4, 5, 6, 0, 0, 0]]
    same(got, torch.tensor(want), "counting up from 5, 2 and 4, modulo 7, with eos_id = 0")
    got = generate(Counter7().eval(), prompt[:, 1:], 6, temperature=0)
    want = (prompt[:, 1:] + torch.arange(7)) % 7
    same(got, want, "counting up from 5, 2 and 4, modulo 7, without an eos_id")


def test_only_a_chosen_eos_ends_a_row(generate):
    """eos_id in the prompt ends nothing, even as its last token: only a chosen one does."""
    prompt = torch.tensor([[6, 6], [3, 6]])
    got = generate(Counter7().eval(), prompt, 3, temperature=0, eos_id=6)
    same(got, torch.tensor([[6, 6, 0, 1, 2], [3, 6, 0, 1, 2]]), "counting up from 6, with eos_id = 6")
    got = generate(Counter7().eval(), prompt[:1], 1, temperature=0, eos_id=6)
    same(got, torch.tensor([[6, 6, 0]]), "one token after 6, with eos_id = 6")


def test_chance_ends_rows_one_by_one(generate):
    """Rows draw on until their own eos_id, whose number of steps is geometric: 0.3, 0.7 * 0.3, ..."""
    chain = Chain(torch.tensor([[0.3, 0.4, 0.3]]).expand(3, 3))

    def lengths(n, generator):
        ids = generate(chain, torch.zeros(n, 1, dtype=torch.int64), 6, generator=generator, eos_id=0)
        new = _new(ids, torch.zeros(n, 1, dtype=torch.int64), 6, 3, "draws with eos_id = 0")
        ended = (new == 0).cumsum(1) > 0
        after = int((new[:, 1:].ne(0) & ended[:, :-1]).sum())
        expect(after == 0, f"expected nothing but eos_id after the first one, got {after} other tokens")
        return (~ended).sum(1)

    want = torch.tensor([0.3 * 0.7**i for i in range(6)] + [0.7**6], dtype=torch.float64)
    _distributed(lengths, want, "draws with eos_id = 0", 1000, cell="as many tokens before it as")


def test_the_model_runs_in_eval_mode(generate):
    """While it runs every part of the model is in eval mode, so that dropout drops nothing."""
    prompt = torch.tensor([[2, 3], [5, 0], [6, 6]])
    for prepare in (nn.Module.train, _mixed_modes, nn.Module.eval):
        model = prepare(Adder(11))
        got = generate(model, prompt, 5, temperature=0)
        found = ", ".join(sorted(model.in_train_mode))
        expect(not found, f"expected every part in eval mode while it runs, but in train mode were: {found}")
        same(got, _summed(prompt.tolist(), 5, 11), "generate with a model that has dropout")


def test_every_mode_is_restored(generate):
    """Afterwards every submodule is in the mode it was in, also when the model raises an error."""
    prompt = torch.tensor([[2, 3], [5, 0]])
    for prepare in (nn.Module.train, nn.Module.eval, _mixed_modes):
        for fails in (None, 1, 2):
            model = prepare(Adder(11, fails))
            before = _modes(model)
            if fails:
                raises(Trouble, lambda m=model: generate(m, prompt, 3), "generate with a model that raises Trouble")
            else:
                generate(model, prompt, 3)
            _same_modes(model, before, f"after an error in call {fails}" if fails else "after generate")
    model = _mixed_modes(Counter7())
    before = _modes(model)
    generate(model, prompt, 0)
    _same_modes(model, before, "after generate with max_new_tokens = 0")
    generate(model, prompt, 9, temperature=0, eos_id=6)
    _same_modes(model, before, "after generate that stopped early")


def test_nothing_is_recorded_for_gradients(generate):
    """The model computes no gradients while it runs; the caller's setting and the parameters stay as they were."""
    prompt = torch.tensor([[2, 3], [5, 0]])
    for setting in (True, False):
        model = Adder(11)
        with torch.set_grad_enabled(setting):
            generate(model, prompt, 3)
            after = torch.is_grad_enabled()
        expect(not any(model.recorded), "expected the model to run without recording for gradients (torch.no_grad)")
        expect(after == setting, f"expected torch.is_grad_enabled() to stay {setting} afterwards, got {after}")
        kept = model.scale.requires_grad and not model.frozen.requires_grad
        expect(kept, "expected requires_grad of every parameter as it was")
        with torch.set_grad_enabled(setting):
            with contextlib.suppress(Trouble):
                generate(Adder(11, fails=1), prompt, 3)
            after = torch.is_grad_enabled()
        expect(after == setting, f"expected torch.is_grad_enabled() to stay {setting} after an error, got {after}")


# beam_search ----------------------------------------------------------------------------------------------------------


class Table:
    """Log-probabilities from a table: a row for each last id, (V, V), or one such matrix for each length, (L, V, V).

    It notes every prefix that it is asked about.
    """

    def __init__(self, table: Tensor, prompt: Tensor):
        self.table, self.prompt = table if table.ndim == 3 else table[None], prompt
        self.asked: list[list[int]] = []

    def __call__(self, ids):
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype != torch.int64:
            got = f"{tuple(ids.shape)}, {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(f"log_probs expects ids of shape (N, T), int64, got {got}")
        self.asked += ids.tolist()
        step = min(ids.shape[1] - len(self.prompt), len(self.table) - 1)
        return self.table[step][ids[:, -1]]


def _found(beam_search, table, prompt, *args, **kwargs):
    """The beams as (ids, score) of plain Python, after their types have been judged; and the prefixes asked about."""
    prompt = torch.tensor(prompt)
    asked = Table(table, prompt)
    got = beam_search(asked, prompt, *args, **kwargs)
    return _plain(got, prompt, table.shape[-1]), asked.asked


def _plain(got, prompt, V):
    expect(got is not None, "expected a list of (ids, score), got None. Is a `return` missing?")
    expect(isinstance(got, list), f"expected a list of (ids, score), got {type(got).__name__}")
    beams = []
    for beam in got:
        pair = isinstance(beam, (tuple, list)) and len(beam) == 2
        expect(pair, f"expected every beam as a pair (ids, score), got {type(beam).__name__}")
        ids, score = beam
        is_tensor(ids, "ids of a beam")
        expect(ids.ndim == 1, f"ids of a beam: expected shape (T + new,), got {tuple(ids.shape)}")
        _ids(ids, ids.shape, V, "ids of a beam")
        head = ids[: len(prompt)]
        expect(
            torch.equal(head, prompt), f"expected ids to begin with the prompt {prompt.tolist()}, got {ids.tolist()}"
        )
        kind = type(score).__name__
        expect(isinstance(score, float), f"score of a beam: expected a float, got {kind}")
        beams.append((ids.tolist(), score))
    return beams


def _same_beams(got, want, what):
    """Break the promise unless these are the beams, in this order, with these scores."""
    expect(len(got) == len(want), f"{what}: number of beams: expected {len(want)}, got {len(got)}: {_told(got)}")
    ids, wanted = ([beam for beam, _ in beams] for beams in (got, want))
    expect(ids == wanted, f"{what}: expected {_told(want)}; got {_told(got)}")
    for (beam, score), (_, right) in zip(got, want, strict=True):
        close = math.isclose(score, right, rel_tol=1e-4, abs_tol=1e-5)
        expect(close, f"{what}: expected the score {right:.5g} of {beam}, got {score:.5g}")


def _told(beams):
    shown = ", ".join(f"{ids} ({score:.3g})" for ids, score in beams[:4])
    return f"{shown or 'none'}{', ...' if len(beams) > 4 else ''}"


def _simulated(table, prompt, n_beams, steps, eos_id=None, length_penalty=0.0):
    """Beam search with plain numbers, and the smallest distance between two scores that it had to tell apart."""
    rows = (table if table.ndim == 3 else table[None]).double().tolist()
    beams, gap = [((), 0.0)], INF

    def score(new, total):
        return total / len(new) ** length_penalty if new else 0.0

    for step in range(steps):
        matrix = rows[min(step, len(rows) - 1)]
        every = []
        for new, total in beams:
            if eos_id is not None and eos_id in new:
                every.append((new, total))
                continue
            row = matrix[new[-1] if new else prompt[-1]]
            every += [((*new, t), total + log_p) for t, log_p in enumerate(row) if log_p > -INF]
        every.sort(key=lambda beam: -score(*beam))
        ranked = [score(*beam) for beam in every]
        gap = min([gap, *(a - b for a, b in itertools.pairwise(ranked))])
        beams = every[:n_beams]
    return [([*prompt, *new], score(new, total)) for new, total in beams], gap


def _random_case(salt, V, steps, prompt, n_beams, eos_id=None, length_penalty=0.0, share_out=0.0):
    """A random table in which no two scores come close, so that rounding cannot decide; and its beams."""
    for attempt in range(50):
        generator = rng(salt + 1000 * attempt)
        logits = torch.randn(steps, V, V, generator=generator) * 1.5
        out = torch.rand(steps, V, V, generator=generator) < share_out
        out[..., 0] = False
        table = logits.masked_fill(out, -INF).log_softmax(-1)
        want, gap = _simulated(table, prompt, n_beams, steps, eos_id, length_penalty)
        if gap > 1e-4:
            return table, want
    raise RuntimeError("no table without close scores")


# After token 2 (or 3): 0 with 0.6 or 1 with 0.4; after 0 all is open, after 1 nearly sure. The best pair begins with 1.
TRAP = torch.stack([_logs(0.35, 0.26, 0.22, 0.17), _logs(0.06, 0.05, 0.85, 0.04), *[_logs(0.6, 0.4, 0.0, 0.0)] * 2])
# Token 0 ends. After 3 it ends with 0.35, else 1 (0.6) or 2 (0.05); later it ends with 0.2 after 1, 0.4 after 2.
ENDS = torch.stack(
    [
        _logs(0.29, 0.27, 0.23, 0.21),
        _logs(0.2, 0.5, 0.23, 0.07),
        _logs(0.4, 0.31, 0.18, 0.11),
        _logs(0.35, 0.6, 0.05, 0.0),
    ]
)


def probe_beam_search(beam_search):
    """Results that tell the known mistakes apart."""

    def ask(table, prompt, *args, **kwargs):
        """Sequences, scores, and what was asked."""

        def asked():
            given = torch.tensor(prompt)
            log_probs = Table(table, given)
            got = beam_search(log_probs, given, *args, **kwargs)
            scores = [score for _, score in got]
            kinds = sorted({type(score).__name__ for score in scores})
            return [ids.tolist() for ids, _ in got], kinds, torch.tensor([float(s) for s in scores]), log_probs.asked

        answer = outcome(asked)
        return list(answer) if isinstance(answer, tuple) else [answer] * 4

    ties = torch.zeros(4, 4) - 1.5
    dead = torch.stack([_logs(0.0, 0.0, 0.0), _logs(0.5, 0.2, 0.3), _logs(0.6, 0.4, 0.0)])
    questions = [
        ask(TRAP, [2], 2, 2),
        ask(TRAP, [1, 2], 1, 3),
        ask(TRAP, [2], 3, 3, length_penalty=1.0),
        ask(ENDS, [3], 2, 4, eos_id=0),
        ask(ENDS, [3], 3, 4, eos_id=0),
        ask(ENDS, [3], 2, 3, 0, 1.0),
        ask(ENDS, [3], 3, 4, 0, 0.7),
        ask(ENDS, [3, 0], 2, 2, eos_id=0),
        ask(ENDS, [1], 2, 3, eos_id=1),
        ask(ENDS, [3], 2, 3, 2, 0.5),
        ask(ENDS, [1], 3, 4, 2, 0.5),
        ask(dead, [2], 2, 2),
        ask(dead, [2], 9, 2),
        ask(ties, [0], 3, 2),
        ask(TRAP, [2], 50, 2),
        ask(TRAP, [2], 0, 2)[:1],
        ask(TRAP, [2], -1, 2)[:1],
    ]
    return [part for question in questions for part in question]


def test_two_beams_find_what_greedy_misses(beam_search):
    """0 (0.6) looks better than 1 (0.4), but the best pair is 1, 2 with 0.4 * 0.85 = 0.34; the score is its log."""
    got, _ = _found(beam_search, TRAP, [2], 2, 2)
    want = [([2, 1, 2], math.log(0.34)), ([2, 0, 0], math.log(0.21))]
    _same_beams(got, want, "beam_search with two beams, two tokens")
    prompt = torch.tensor([3, 2])
    got = beam_search(log_probs=Table(TRAP, prompt), prompt=prompt, n_beams=2, max_new_tokens=1)
    want = [([3, 2, 0], math.log(0.6)), ([3, 2, 1], math.log(0.4))]
    _same_beams(_plain(got, prompt, 4), want, "beam_search with two beams, one token")


def test_one_beam_is_greedy(beam_search):
    """With one beam each step takes the likeliest token."""
    got, _ = _found(beam_search, TRAP, [2], 1, 2)
    _same_beams(got, [([2, 0, 0], math.log(0.21))], "beam_search with one beam, two tokens")
    for salt, V, steps in ((1, 5, 7), (2, 11, 3), (3, 2, 5)):
        table, _ = _random_case(salt, V, steps, [1], 1)
        last, ids, total = 1, [1], 0.0
        for matrix in table.double():
            row = matrix[last].tolist()
            last = row.index(max(row))
            ids.append(last)
            total += row[last]
        got, _ = _found(beam_search, table, [1], 1, steps)
        _same_beams(got, [(ids, total)], f"beam_search with one beam, {steps} tokens")


def test_enough_beams_find_everything(beam_search):
    """With V ** T beams all sequences come, from the likeliest down, and their probabilities sum to 1."""
    for salt, V, steps in ((4, 3, 3), (5, 2, 4), (6, 5, 2)):
        table, want = _random_case(salt, V, steps, [1, 0], V**steps)
        for more in (0, 7):
            got, _ = _found(beam_search, table, [1, 0], V**steps + more, steps)
            _same_beams(got, want, f"all {V**steps} sequences of {steps} tokens from a vocabulary of {V}")
        total = math.fsum(math.exp(score) for _, score in got)
        expect(abs(total - 1) < 1e-4, f"expected probabilities that sum to 1, got {total:.5g}")


def test_the_best_stay_at_every_step(beam_search):
    """The continuations of all beams compete, and n_beams stay: the same as a search by hand on random tables."""
    for salt, V, steps, n_beams in ((7, 5, 4, 3), (8, 11, 5, 2), (9, 3, 6, 5), (10, 7, 3, 4)):
        table, want = _random_case(salt, V, steps, [2, 1], n_beams)
        got, _ = _found(beam_search, table, [2, 1], n_beams, steps)
        _same_beams(got, want, f"{n_beams} beams, {steps} tokens, a vocabulary of {V}")


def test_a_finished_beam_grows_no_more(beam_search):
    """A beam that has chosen eos_id keeps its ids and score, and leaves only when n_beams others score higher."""
    log = math.log
    want = [([3, 0], log(0.35)), ([3, 1, 1], log(0.3))]
    got, _ = _found(beam_search, ENDS, [3], 2, 2, eos_id=0)
    _same_beams(got, want, "two tokens, where 0 ends with 0.35 and 1, 1 has 0.3")
    want = [([3, 0], log(0.35)), ([3, 1, 1, 1], log(0.15)), ([3, 1, 1, 2], log(0.069))]
    got, _ = _found(beam_search, ENDS, [3], 3, 3, 0)
    _same_beams(got, want, "three beams, three tokens, eos_id = 0")
    # Two unlikely ends, which two likelier beams push out.
    table = torch.stack([_logs(0.15, 0.1, 0.75), _logs(0.1, 0.45, 0.45), _logs(0.05, 0.5, 0.45)])
    got, _ = _found(beam_search, table, [0], 2, 1, eos_id=0)
    _same_beams(got, [([0, 2], log(0.75)), ([0, 0], log(0.15))], "one token, where 0 ends with 0.15")
    got, _ = _found(beam_search, table, [0], 2, 2, eos_id=0)
    want = [([0, 2, 1], log(0.375)), ([0, 2, 2], log(0.3375))]
    _same_beams(got, want, "two tokens, where the end with 0.15 is left behind by 0.375 and 0.3375")
    for salt, n_beams, eos_id in ((11, 3, 0), (12, 2, 4), (13, 5, 1)):
        table, want = _random_case(salt, 5, 5, [2], n_beams, eos_id)
        got, _ = _found(beam_search, table, [2], n_beams, 5, eos_id)
        _same_beams(got, want, f"{n_beams} beams, 5 tokens, eos_id = {eos_id}")


def test_eos_in_the_prompt_ends_nothing(beam_search):
    """A prompt that ends with eos_id, or holds it, goes on; without an eos_id nothing ends."""
    want = _simulated(ENDS, [3, 0, 1], 2, 3, 0)[0]
    got, _ = _found(beam_search, ENDS, [3, 0, 1], 2, 3, eos_id=0)
    _same_beams(got, want, "a prompt with eos_id in the middle")
    table, want = _random_case(14, 5, 3, [1, 4], 3, 4)
    got, _ = _found(beam_search, table, [1, 4], 3, 3, eos_id=4)
    _same_beams(got, want, "a prompt that ends with eos_id")
    got, _ = _found(beam_search, table, [4], 1, 1, eos_id=4)
    best = table[0, 4].max().item()
    _same_beams(got, [([4, int(table[0, 4].argmax())], best)], "one token after eos_id")


def test_length_penalty_divides_the_score(beam_search):
    """The score is the sum divided by (number of new tokens, eos_id included) ** length_penalty, at every step."""
    log = math.log
    # 0 ends at once with 0.35; 1, 1 has log(0.3) / 2 = -0.602, better than log(0.35) = -1.05.
    got, _ = _found(beam_search, ENDS, [3], 2, 2, 0, 1.0)
    want = [([3, 1, 1], log(0.3) / 2), ([3, 1, 2], log(0.138) / 2)]
    _same_beams(got, want, "two tokens with length_penalty = 1, eos_id = 0")
    got, _ = _found(beam_search, ENDS, [1, 2, 3], 1, 1, eos_id=None, length_penalty=2.0)
    _same_beams(got, [([1, 2, 3, 1], log(0.6))], "one new token with length_penalty = 2")
    got, _ = _found(beam_search, TRAP, [2], 2, 2, length_penalty=2.0)
    want = [([2, 1, 2], log(0.34) / 4), ([2, 0, 0], log(0.21) / 4)]
    _same_beams(got, want, "two new tokens with length_penalty = 2")
    for salt, n_beams, power in ((15, 3, 1.0), (16, 4, 0.5), (17, 2, 1.7), (18, 3, -1.0)):
        table, want = _random_case(salt, 5, 5, [2, 3, 2], n_beams, 0, power)
        got, _ = _found(beam_search, table, [2, 3, 2], n_beams, 5, 0, power)
        _same_beams(got, want, f"{n_beams} beams, 5 tokens, eos_id = 0, length_penalty = {power}")


def test_minus_infinity_is_no_continuation(beam_search):
    """A token of log-probability -inf is not chosen: there may be fewer than n_beams, or none at all."""
    log = math.log
    # After 0 nothing can follow; after 1 anything can.
    table = torch.stack([_logs(0.0, 0.0, 0.0), _logs(0.5, 0.2, 0.3), _logs(0.6, 0.4, 0.0)])
    got, _ = _found(beam_search, table, [2], 5, 1)
    _same_beams(got, [([2, 0], log(0.6)), ([2, 1], log(0.4))], "one token of three, one of them at -inf")
    got, _ = _found(beam_search, table, [2], 2, 2)
    want = [([2, 1, 0], log(0.2)), ([2, 1, 2], log(0.12))]
    _same_beams(got, want, "two tokens, where 0 has no continuation")
    got, _ = _found(beam_search, table, [2], 1, 2)
    _same_beams(got, [], "one beam, whose only continuations are at -inf")
    for salt, n_beams in ((19, 3), (20, 100)):
        table, want = _random_case(salt, 5, 3, [2], n_beams, 4, share_out=0.5)
        got, _ = _found(beam_search, table, [2], n_beams, 3, 4)
        _same_beams(got, want, f"{n_beams} beams, where half of the tokens are at -inf")


def test_of_equal_scores_the_first_found_stays(beam_search):
    """Equal scores rank by the better beam, then by the lower id."""
    table = torch.full((4, 4), -1.5)
    got, _ = _found(beam_search, table, [0], 3, 1)
    _same_beams(got, [([0, t], -1.5) for t in range(3)], "three beams of four equal tokens")
    got, _ = _found(beam_search, table, [0], 3, 2)
    _same_beams(got, [([0, 0, t], -3.0) for t in range(3)], "three beams, two of four equal tokens")
    table = torch.tensor([[-4.0, -1.0, -2.0], [-2.0, -3.0, -2.0], [-1.0, -1.0, -3.0]])
    got, _ = _found(beam_search, table, [0], 2, 2)
    _same_beams(got, [([0, 1, 0], -3.0), ([0, 1, 2], -3.0)], "0, 1, 0 and 0, 1, 2 and 0, 2, 0 and 0, 2, 1 score -3")


def test_only_growing_beams_are_asked_about(beam_search):
    """log_probs gets growing beams alone, at most n_beams at each length, and nothing once all have ended."""
    for salt, n_beams in ((21, 2), (22, 3)):
        table, _ = _random_case(salt, 5, 6, [3, 1], n_beams, 1)
        _, asked = _found(beam_search, table, [3, 1], n_beams, 6, eos_id=1)
        for ids in asked:
            expect(ids[:2] == [3, 1], f"expected log_probs to get ids that begin with the prompt 3, 1; got {ids}")
            expect(1 not in ids[2:], f"expected log_probs to get growing beams, but {ids} has ended with eos_id = 1")
        expect(len(asked) > 0, "expected log_probs to be asked, but it was not called")
        lengths = Counter(map(len, asked))
        most = max(lengths.values())
        expect(
            most <= n_beams, f"expected at most n_beams = {n_beams} beams of one length, but {most} were asked about"
        )
        expect(max(lengths) <= 7, f"expected no question about finished length, got ids of length {max(lengths)}")
    table = torch.stack([_logs(0.97, 0.02, 0.01)] * 3)
    got, asked = _found(beam_search, table, [1], 1, 5, eos_id=0)
    _same_beams(got, [([1, 0], math.log(0.97))], "one beam, which ends at once")
    expect(len(asked) == 1, f"expected one question, as the only beam has ended, got {len(asked)}")


def test_the_search_may_be_short(beam_search):
    """No new tokens give the prompt with the score 0.0; n_beams below 1 is a ValueError."""
    got, _ = _found(beam_search, TRAP, [2, 3], 3, 0)
    _same_beams(got, [([2, 3], 0.0)], "max_new_tokens = 0")
    for bad in (0, -1):
        raises(ValueError, lambda bad=bad: _found(beam_search, TRAP, [2], bad, 2), f"n_beams = {bad}")
