"""Mistakes that people make in cutting a text into batches."""

import itertools
import random

import torch

from . import wrong

# token_batches -------------------------------------------------------------------------------------------------------


def _enough(tokens, T):
    if len(tokens) < T + 1:
        raise ValueError(f"{len(tokens)} tokens for windows of {T}")


def _windows(tokens, starts, T):
    """Right windows from given places."""
    runs = torch.stack([tokens[start : start + T + 1] for start in starts.tolist()]).long()
    return runs[:, :-1], runs[:, 1:]


@wrong(
    "token_batches",
    caught_by="test_every_window_is_reached",
    hint="The last window is never drawn: the places end one too early. `torch.randint(n, ...)` already leaves out n, "
    "and N - T windows fit with their labels.",
)
def last_window_missing(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        yield _windows(tokens, torch.randint(max(len(tokens) - T - 1, 1), (B,), generator=generator), T)


@wrong(
    "token_batches",
    caught_by="test_every_window_is_reached",
    hint="The last place that is drawn has no label for its last token. A window needs T + 1 tokens, so N - T places "
    "are possible, from 0 to N - T - 1.",
)
def one_place_too_many(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        starts = torch.randint(len(tokens) - T + 1, (B,), generator=generator)
        inputs = torch.stack([tokens[start : start + T] for start in starts.tolist()]).long()
        yield inputs, torch.stack([tokens[start + 1 : start + T + 1] for start in starts.tolist()]).long()


@wrong(
    "token_batches",
    caught_by="test_the_only_window_by_hand",
    hint="The labels are the inputs themselves: the model would learn to copy. The label of a token is the token after "
    "it, so cut the labels one place later.",
)
def labels_not_shifted(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        inputs, _ = _windows(tokens, torch.randint(len(tokens) - T, (B,), generator=generator), T)
        yield inputs, inputs.clone()


@wrong(
    "token_batches",
    caught_by="test_labels_are_the_next_tokens",
    hint="The labels lie two tokens ahead: they are shifted twice. The label of a token is the token right after it.",
)
def labels_shifted_twice(tokens, B, T, generator):
    _enough(tokens, T)
    n_starts = max(len(tokens) - T - 1, 1)
    while True:
        inputs, labels = _windows(tokens, torch.randint(n_starts, (B,), generator=generator), T)
        starts_two_later = torch.cat([labels[:, 1:], inputs[:, :1]], dim=1)
        yield inputs, starts_two_later


@wrong(
    "token_batches",
    caught_by="test_batches_follow_from_the_generator",
    hint="The windows are drawn from torch's global generator, and the caller's is not used. "
    "Give it to the draw: torch.randint(..., generator=generator).",
)
def global_generator(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        yield _windows(tokens, torch.randint(len(tokens) - T, (B,)), T)


@wrong(
    "token_batches",
    caught_by="test_batches_follow_from_the_generator",
    hint="The windows are drawn with Python's `random`, and the caller's generator is not used. "
    "Draw with torch.randint(..., generator=generator).",
)
def python_random(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        yield _windows(tokens, torch.tensor([random.randrange(len(tokens) - T) for _ in range(B)]), T)


@wrong(
    "token_batches",
    caught_by="test_batches_follow_from_the_generator",
    hint="The batches come from a generator of your own with the caller's seed: the caller's does not move, so neither "
    "its state nor another user of it matters. Draw from the one that is given.",
)
def generator_used_as_a_seed(tokens, B, T, generator):
    _enough(tokens, T)
    own = torch.Generator().manual_seed(generator.initial_seed())
    while True:
        yield _windows(tokens, torch.randint(len(tokens) - T, (B,), generator=own), T)


@wrong(
    "token_batches",
    caught_by="test_batches_follow_from_the_generator",
    hint="All places are drawn at the start, so the generator's state when a batch is asked for does not matter. "
    "Draw the places of a batch inside the loop, right before its `yield`.",
)
def all_drawn_in_advance(tokens, B, T, generator):
    _enough(tokens, T)
    starts = torch.randint(len(tokens) - T, (500, B), generator=generator)
    return (_windows(tokens, row, T) for row in itertools.cycle(starts))


@wrong(
    "token_batches",
    caught_by="test_each_window_is_drawn_by_itself",
    hint="One place is drawn for the whole batch, and its rows are neighbours in the text. "
    "Draw B places, one for each row.",
)
def rows_follow_each_other(tokens, B, T, generator):
    _enough(tokens, T)
    n_starts = len(tokens) - T
    while True:
        start = torch.randint(n_starts, (1,), generator=generator)
        yield _windows(tokens, (start + T * torch.arange(B)) % n_starts, T)


@wrong(
    "token_batches",
    caught_by="test_each_window_is_drawn_by_itself",
    hint="The text is read from its beginning, a window after the other, and nothing is drawn. "
    "Draw the place of each window from the generator.",
)
def read_in_order(tokens, B, T, generator):
    _enough(tokens, T)
    n_starts = len(tokens) - T
    for i in itertools.count():
        yield _windows(tokens, (torch.arange(i * B, (i + 1) * B) * T) % n_starts, T)


@wrong(
    "token_batches",
    caught_by="test_each_window_is_drawn_by_itself",
    hint="One place is drawn for the whole batch, so that all rows are the same window. "
    "Draw B places, one for each row.",
)
def one_place_for_all_rows(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        yield _windows(tokens, torch.randint(len(tokens) - T, (1,), generator=generator).expand(B), T)


@wrong(
    "token_batches",
    caught_by="test_every_window_is_reached",
    hint="Windows begin at multiples of T only, so most of those that fit never come. "
    "Any place from 0 to N - T - 1 may begin one.",
)
def windows_that_do_not_overlap(tokens, B, T, generator):
    _enough(tokens, T)
    n = (len(tokens) - 1) // T
    while True:
        yield _windows(tokens, torch.randint(n, (B,), generator=generator) * T, T)


@wrong(
    "token_batches",
    caught_by="test_each_window_is_drawn_by_itself",
    hint="The places are a shuffled list that is used up before it is shuffled again, so one window says which others "
    "are still to come. Draw each place by itself, with torch.randint.",
)
def shuffled_epochs(tokens, B, T, generator):
    _enough(tokens, T)

    def starts():
        while True:
            yield from torch.randperm(len(tokens) - T, generator=generator).tolist()

    stream = starts()
    while True:
        yield _windows(tokens, torch.tensor(list(itertools.islice(stream, B))), T)


@wrong(
    "token_batches",
    caught_by="test_each_window_is_drawn_by_itself",
    hint="The rows of a batch are always different windows. Each place is drawn by itself, so that two rows may be the "
    "same one.",
)
def no_window_twice_in_a_batch(tokens, B, T, generator):
    _enough(tokens, T)
    n_starts = len(tokens) - T
    while True:
        parts = [torch.randperm(n_starts, generator=generator) for _ in range(-(-B // n_starts))]
        yield _windows(tokens, torch.cat(parts)[:B], T)


@wrong(
    "token_batches",
    caught_by="test_every_window_is_equally_likely",
    hint="Rounding a random number makes the first and the last window half as likely as the others. "
    "Draw whole numbers: torch.randint(N - T, (B,), generator=generator).",
)
def rounded_places(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        yield _windows(tokens, (torch.rand(B, generator=generator) * (len(tokens) - T - 1)).round().long(), T)


@wrong(
    "token_batches",
    caught_by="test_tokens_of_any_integer_dtype",
    hint="Inputs and labels have the dtype of the tokens. Embeddings and losses want int64: convert with .long().",
)
def dtype_of_the_tokens(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        starts = torch.randint(len(tokens) - T, (B, 1), generator=generator)
        runs = tokens[starts + torch.arange(T + 1)]
        yield runs[:, :-1], runs[:, 1:]


@wrong(
    "token_batches",
    caught_by="test_batches_never_end",
    hint="The batches end when the text has been seen about once. Loop without end: the caller decides when to stop.",
)
def one_epoch(tokens, B, T, generator):
    _enough(tokens, T)
    for _ in range(max(len(tokens) // (B * T), 1)):
        yield _windows(tokens, torch.randint(len(tokens) - T, (B,), generator=generator), T)


@wrong(
    "token_batches",
    caught_by="test_too_few_tokens_are_an_error",
    hint="Too few tokens end in torch's own error, or in a batch of nothing. A window needs T + 1 tokens: "
    "compare first, and raise a ValueError that names both numbers.",
)
def without_a_check(tokens, B, T, generator):
    while True:
        starts = torch.randint(len(tokens) - T, (B, 1), generator=generator)
        runs = tokens[starts + torch.arange(T + 1)].long()
        yield runs[:, :-1], runs[:, 1:]


@wrong(
    "token_batches",
    caught_by="test_too_few_tokens_are_an_error",
    hint="N = T + 1 tokens are refused, though they hold one window with its labels. "
    "Raise a ValueError only if N < T + 1.",
)
def one_window_is_refused(tokens, B, T, generator):
    if len(tokens) <= T + 1:
        raise ValueError("too few tokens")
    while True:
        yield _windows(tokens, torch.randint(len(tokens) - T, (B,), generator=generator), T)


@wrong(
    "token_batches",
    caught_by="test_labels_are_the_next_tokens",
    hint="The windows stand in columns: (T, B). Each row of a batch is one window, (B, T): stack along axis 0.",
)
def windows_as_columns(tokens, B, T, generator):
    _enough(tokens, T)
    while True:
        inputs, labels = _windows(tokens, torch.randint(len(tokens) - T, (B,), generator=generator), T)
        yield inputs.T, labels.T
