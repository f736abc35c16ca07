"""Other correct implementations of batches of tokens."""

import random

import numpy as np
import torch

from . import correct


@correct("token_batches")
def rows_one_by_one(tokens, B, T, generator):
    """A generator function: a place and a slice for each row, as in many published training loops."""
    if len(tokens) <= T:
        raise ValueError("too few tokens")
    while True:
        starts = torch.randint(0, len(tokens) - T, size=(B,), generator=generator)
        x = torch.stack([tokens[i : i + T] for i in starts])
        y = torch.stack([tokens[i + 1 : i + 1 + T] for i in starts])
        yield x.to(torch.int64), y.to(torch.int64)


class _Windows:
    """An iterator of its own class; the windows are a view made once."""

    def __init__(self, tokens, B, T, generator):
        if tokens.numel() <= T:
            raise ValueError(f"{tokens.numel()} tokens, T = {T}")
        self.windows = tokens.unfold(0, T + 1, 1)  # (N - T, T + 1)
        self.B, self.generator = B, generator

    def __iter__(self):
        return self

    def __next__(self):
        chosen = torch.randint(self.windows.shape[0], (self.B,), generator=self.generator)
        batch = self.windows.index_select(0, chosen).long()
        return [batch[:, :-1].contiguous(), batch[:, 1:].contiguous()]


@correct("token_batches")
def windows_unfolded(tokens, B, T, generator):
    """All windows as a view, of which rows are chosen."""
    return _Windows(tokens, B, T, generator)


@correct("token_batches")
def places_by_multinomial(tokens, B, T, generator):
    """Places drawn with replacement from equal weights; labels gathered by their own indices."""
    n = tokens.shape[0] - T
    if n <= 0:
        raise ValueError("no window fits")
    weights = torch.ones(n, dtype=torch.double)
    tokens = tokens.to(torch.long)
    while True:
        index = torch.multinomial(weights, B, replacement=True, generator=generator).view(B, 1) + torch.arange(T)
        yield tokens.gather(0, index.flatten()).view(B, T), tokens.take(index + 1)


@correct("token_batches")
def seeded_from_the_generator(tokens, B, T, generator):
    """Each batch by another generator, whose seed is drawn from the caller's."""
    array = np.asarray(tokens)

    def batches():
        while True:
            seed = int(torch.randint(2**62, (), generator=generator))
            places = [random.Random(seed + row).randrange(len(array) - T) for row in range(B)]
            rows = np.stack([array[place : place + T + 1] for place in places]).astype(np.int64)
            yield torch.from_numpy(rows[:, :T].copy()), torch.from_numpy(rows[:, 1:].copy())

    if len(array) < T + 1:
        raise ValueError("too short")
    return batches()


@correct("token_batches")
def places_from_one_draw_a_row(tokens, B, T, generator):
    """A float in [0, 1) for each row, in double precision, rounded down."""

    def batch():
        inputs, labels = torch.empty(B, T, dtype=torch.long), torch.empty(B, T, dtype=torch.long)
        for row in range(B):
            start = int(torch.rand((), generator=generator, dtype=torch.float64) * (len(tokens) - T))
            inputs[row], labels[row] = tokens[start : start + T], tokens[start + 1 : start + T + 1]
        return inputs, labels

    if len(tokens) - T < 1:
        raise ValueError("N must be at least T + 1")
    return iter(batch, None)
