"""The checks of chapter 09: batches of tokens. Outside truth: windows one can count, and the odds of fair draws."""

import itertools
import random

import numpy as np
import torch

from .same import Broken, expect, is_tensor, outcome, raises, random_states, random_states_kept, rng, same


def _first(made, n):
    """The first n batches of what token_batches returned: a list of pairs inputs, labels."""
    if not hasattr(made, "__next__"):
        raise Broken(f"expected an iterator, so that next(...) gives a batch; got {type(made).__name__}")
    batches = list(itertools.islice(made, n))
    expect(len(batches) == n, f"expected batches without end, got {len(batches)} of {n}: the loop must not stop")
    for batch in batches:
        right = isinstance(batch, (tuple, list)) and len(batch) == 2
        expect(right, f"expected a batch to be a pair inputs, labels; got {type(batch).__name__}")
        is_tensor(batch[0], "inputs")
        is_tensor(batch[1], "labels")
    return batches


def _starts(token_batches, n_starts, T, B, n, generator):
    """Where the windows of n batches begin, (n, B), seen from a text whose tokens are 0, 1, 2 ..."""
    batches = _first(token_batches(torch.arange(n_starts + T), B, T, generator), n)
    for inputs, labels in batches:
        for name, x in (("inputs", inputs), ("labels", labels)):
            expect(tuple(x.shape) == (B, T), f"{name}: expected shape {(B, T)}, got {tuple(x.shape)}")
    inputs, labels = (torch.stack(parts) for parts in zip(*batches, strict=True))  # (n, B, T)
    begin = inputs[..., :1]
    same(inputs, begin + torch.arange(T), f"inputs of windows of {T} from the tokens 0, 1, 2 ...")
    same(labels, inputs + 1, "labels, which are the next tokens")
    return begin[..., 0]


def _distinct(N):
    """N tokens below 211, none of them twice: a token tells its place."""
    return torch.randperm(211, generator=rng(1))[:N]


def _right(batches, tokens, B, T):
    """Break the promise unless these are windows of `_distinct` tokens, with the next tokens as labels."""
    N = len(tokens)
    place = torch.full((211,), -1)
    place[tokens.long()] = torch.arange(N)
    for inputs, labels in batches:
        for name, x in (("inputs", inputs), ("labels", labels)):
            what = f"{name} of {B=}, {T=} from {N} tokens in {tokens.dtype}"
            expect(tuple(x.shape) == (B, T), f"{what}: expected shape {(B, T)}, got {tuple(x.shape)}")
            expect(x.dtype == torch.int64, f"{what}: expected dtype torch.int64, got {x.dtype}")
            expect(bool(torch.isin(x, tokens).all()), f"{what}: expected tokens of the text, got {x.tolist()}")
        begin = place[inputs[:, :1]]
        at = begin[:, 0].tolist()
        expect(bool((begin + T < N).all()), f"{T=}, {N} tokens: expected places 0 ... {N - T - 1}, got windows at {at}")
        run = begin + torch.arange(T)
        same(inputs, tokens[run].long(), f"inputs of {T=} from places {at}")
        same(labels, tokens[run + 1].long(), f"labels of {T=} from places {at}")


def _evenly(counts, what):
    """Break the promise unless equally likely things came about equally often: within 7 standard deviations."""
    n, share = int(counts.sum()), 1 / counts.numel()
    mean, deviation = n * share, (n * share * (1 - share)) ** 0.5
    if ((counts - mean).abs() > 7 * deviation).any():
        raise Broken(f"{what}: expected each about {mean:.0f} times in {n}, got {counts.tolist()}")


# token_batches -------------------------------------------------------------------------------------------------------


def probe_token_batches(token_batches):
    """Results that tell the known mistakes apart."""
    text = torch.randint(50, (23,), generator=rng(3))

    def batches(n, N=23, B=3, T=5, tokens=text):
        return [tuple(batch) for batch in itertools.islice(token_batches(tokens[:N], B, T, rng()), n)]

    def legal():
        """Whether all windows are whole, of neighbours, and labelled with the next token."""
        made = list(itertools.islice(token_batches(torch.arange(11), 7, 4, rng()), 60))
        steps = [torch.equal(inputs, inputs[:, :1] + torch.arange(4)) for inputs, _ in made]
        return all(steps), sorted({(labels - inputs).unique().numel() for inputs, labels in made})

    def shifts():
        made = itertools.islice(token_batches(torch.arange(11), 7, 4, rng()), 60)
        return sorted({int(d) for inputs, labels in made for d in (labels - inputs).unique()})

    def reached():
        made = itertools.islice(token_batches(torch.arange(11), 7, 4, rng()), 60)
        return sorted({int(start) for inputs, _ in made for start in inputs[:, 0]})

    def spread():
        """How often the first, the middle and the last of three windows come, in twelfths: 4, 4, 4."""
        made = itertools.islice(token_batches(torch.arange(7), 100, 4, rng()), 40)
        counts = torch.cat([inputs[:, 0] for inputs, _ in made]).bincount(minlength=3)
        return [round(c / 4000 * 12) for c in counts.tolist()]

    def pairs():
        """The differences between windows of one batch, among three places."""
        made = itertools.islice(token_batches(torch.arange(7), 2, 4, rng()), 200)
        return sorted({int(inputs[1, 0] - inputs[0, 0]) for inputs, _ in made})

    def equal_rows():
        """In how many sixths of the cases a row is the one before it, among three places: 2."""
        made = itertools.islice(token_batches(torch.arange(7), 50, 4, rng()), 20)
        rows = torch.cat([inputs[:, 0] for inputs, _ in made])
        return round(6 * (rows[1:] == rows[:-1]).double().mean().item())

    def repeated():
        """Whether a batch comes again when the generator is set back, and whether the generator moves."""
        generator = rng()
        made = token_batches(torch.arange(1009), 5, 4, generator)
        before = generator.get_state()
        next(made)
        after = generator.get_state()
        one = next(made)[0]
        generator.set_state(after)
        return torch.equal(next(made)[0], one), torch.equal(before, after)

    def lazily():
        generator = rng()
        before = generator.get_state()
        token_batches(torch.arange(1009), 5, 4, generator)
        return torch.equal(before, generator.get_state())

    def fixed():
        """Whether equal generators give equal batches."""
        one, other = (next(token_batches(torch.arange(1009), 5, 4, rng()))[0] for _ in range(2))
        return torch.equal(one, other)

    def followed():
        """Whether many windows begin where the one before begins, or ends."""
        made = token_batches(torch.arange(1009), 2, 4, rng())
        rows = torch.cat([next(made)[0][:, 0] for _ in range(4)])
        steps = rows[1:] - rows[:-1]
        return [int((steps == step).sum()) > 2 for step in (0, 4)]

    def moved():
        """Which other generators move."""
        with random_states_kept():
            before = random_states()
            next(token_batches(torch.arange(1009), 5, 4, rng()))
            return [name for name, state in random_states().items() if state != before[name]]

    def multiples():
        made = token_batches(torch.arange(1009), 50, 4, rng())
        return bool((next(made)[0][:, 0] % 4 == 0).all())

    return [
        outcome(lambda: [tuple(x.shape) for batch in batches(1) for x in batch]),
        outcome(lambda: len(batches(40))),
        outcome(lambda: [str(x.dtype) for batch in batches(1, tokens=text.int()) for x in batch]),
        outcome(lambda: [x.tolist() for batch in batches(2, N=6) for x in batch]),
        outcome(legal),
        outcome(shifts),
        outcome(reached),
        outcome(spread),
        outcome(pairs),
        outcome(equal_rows),
        outcome(repeated),
        outcome(lazily),
        outcome(fixed),
        outcome(followed),
        outcome(moved),
        outcome(multiples),
        outcome(lambda: len(batches(1, N=5))),
        outcome(lambda: len(batches(1, N=2))),
    ]


def test_the_only_window_by_hand(token_batches):
    """Of the tokens 5, 6, 7 there is one window of T = 2: the inputs are 5, 6 and the labels 6, 7."""
    made = token_batches(torch.tensor([5, 6, 7]), 1, 2, rng())
    inputs, labels = _first(made, 1)[0]
    same(inputs, torch.tensor([[5, 6]]), "inputs from the tokens 5, 6, 7")
    same(labels, torch.tensor([[6, 7]]), "labels from the tokens 5, 6, 7")


def test_labels_are_the_next_tokens(token_batches):
    """Each row is a run of neighbouring tokens, (B, T), and the label of a token is the token after it."""
    for N, B, T in ((53, 3, 7), (53, 1, 1), (53, 7, 51), (5, 11, 2), (2, 3, 1)):
        tokens = _distinct(N)
        _right(_first(token_batches(tokens, B, T, rng()), 5), tokens, B, T)


def test_every_window_is_reached(token_batches):
    """Of N = 9 tokens all five windows of T = 4 come, from the first to the one whose last label is the last token."""
    for n_starts, T in ((5, 4), (2, 1), (3, 11)):
        starts = _starts(token_batches, n_starts, T, 8, 50, rng(n_starts))
        got = starts.unique().tolist()
        what = f"{n_starts + T} tokens, {T=}, 400 windows"
        expect(got == list(range(n_starts)), f"{what}: expected windows from each of 0 ... {n_starts - 1}, got {got}")


def test_every_window_is_equally_likely(token_batches):
    """In many draws each of 3 windows comes about equally often, and so does each quarter of a long text."""
    starts = _starts(token_batches, 3, 4, 50, 40, rng(5))
    _evenly(starts.flatten().bincount(minlength=3), "the windows that begin at 0, 1 and 2 of 7 tokens")
    starts = _starts(token_batches, 1000, 7, 50, 20, rng(6)).flatten()
    _evenly((starts // 250).bincount(minlength=4), "the windows from the four quarters of a text")
    _evenly((starts % 5).bincount(minlength=5), "the windows that begin at 5k, 5k + 1, 5k + 2, 5k + 3, 5k + 4")


def test_each_window_is_drawn_by_itself(token_batches):
    """One window says nothing of another, in the same batch or the next: all pairs of places are equally likely."""
    starts = _starts(token_batches, 3, 2, 50, 120, rng(7))  # (120, 50)
    pairs = (starts[:, 0::2] * 3 + starts[:, 1::2]).flatten().bincount(minlength=9)
    _evenly(pairs, "the places (0, 0), (0, 1), (0, 2), (1, 0) ... of two windows in a batch")
    pairs = (starts[1:] * 3 + starts[:-1]).flatten().bincount(minlength=9)
    _evenly(pairs, "the places (0, 0), (0, 1), (0, 2), (1, 0) ... of a row in two batches")
    starts = _starts(token_batches, 1000, 3, 7, 3, rng(8))
    expect(len({tuple(row) for row in starts.T.tolist()}) == 7, "expected 7 different rows, got some twice")
    steps = (starts[:, 1:] - starts[:, :-1]).flatten()
    expect(steps.unique().numel() > 2, f"expected places without a rule, got steps of {steps.unique().tolist()}")


def test_batches_never_end(token_batches):
    """There is always a next batch, however short the text, and an earlier batch stays as it was."""
    tokens = torch.arange(9)
    made = token_batches(tokens, 2, 3, rng())
    first = _first(made, 1)[0]
    copies = [x.clone() for x in first]
    for inputs, labels in _first(made, 100):
        same(labels, inputs + 1, "labels of a later batch from the tokens 0, 1, 2 ...")
    for name, now, copy in zip(("inputs", "labels"), first, copies, strict=True):
        same(now, copy, f"{name} of the first batch, after 100 more")
    same(tokens, torch.arange(9), "the tokens, after 100 batches")


def test_batches_follow_from_the_generator(token_batches):
    """Equal states of the generator give equal batches; a batch moves the generator when it is drawn, not before."""
    tokens = torch.arange(1009)
    generator = rng(2)
    state = generator.get_state()
    made = token_batches(tokens, 5, 3, generator)
    expect(torch.equal(generator.get_state(), state), "expected no draw before a batch is asked for, but one was made")
    batches = [batch[0] for batch in _first(made, 3)]
    expect(not torch.equal(generator.get_state(), state), "expected the caller's generator to move, but it did not")
    again = token_batches(tokens, B=5, T=3, generator=rng(2))
    for i, batch in enumerate(_first(again, 3)):
        same(batch[0], batches[i], f"inputs of batch {i} from an equal generator")
    generator.set_state(state)
    for i, batch in enumerate(_first(made, 3)):
        same(batch[0], batches[i], f"inputs of batch {i} after the generator was set back")
    other = _first(token_batches(tokens, 5, 3, rng(3)), 1)[0][0]
    expect(not torch.equal(other, batches[0]), "expected other batches from another generator, got the same")


def test_other_generators_are_left_alone(token_batches):
    """torch's global generator, Python's and NumPy's are neither used nor moved."""
    tokens = torch.arange(1009)
    with random_states_kept():
        before = random_states()
        first = [inputs for inputs, _ in _first(token_batches(tokens, 5, 3, rng(2)), 2)]
        for name, state in random_states().items():
            expect(state == before[name], f"{name}'s own random generator was moved: draw from the one that is given")
        torch.rand(7), random.random(), np.random.rand(3)  # move them
        for i, (inputs, _) in enumerate(_first(token_batches(tokens, 5, 3, rng(2)), 2)):
            same(inputs, first[i], f"inputs of batch {i}, after other generators have moved")


def test_tokens_of_any_integer_dtype(token_batches):
    """Tokens may be int32, int16 or uint8, and non-contiguous; inputs and labels are int64 all the same."""
    for dtype in (torch.int32, torch.int16, torch.uint8):
        tokens = _distinct(31).to(dtype)
        copy = tokens.clone()
        _right(_first(token_batches(tokens, 3, 5, rng()), 3), tokens, 3, 5)
        expect(torch.equal(tokens, copy), f"the {dtype} tokens were changed: the caller still needs them")
    tokens = torch.stack([_distinct(31), torch.zeros(31).long()], dim=1)[:, 0]
    _right(_first(token_batches(tokens, 3, 5, rng()), 3), tokens, 3, 5)


def test_too_few_tokens_are_an_error(token_batches):
    """A window needs T + 1 tokens: N = T is a ValueError, N = T + 1 works."""
    _, labels = _first(token_batches(torch.arange(6), 2, 5, rng()), 1)[0]
    same(labels, torch.arange(1, 6).expand(2, 5), "labels of the only window, N = 6, T = 5")
    for N, T in ((5, 5), (2, 5), (1, 1), (0, 1)):
        raises(ValueError, lambda N=N, T=T: next(token_batches(torch.arange(N), 2, T, rng())), f"{N=}, {T=}")
