"""A learner who has done the batches and the evaluation, and nothing else."""

import torch


def token_batches(tokens, B, T, generator):
    windows = tokens.unfold(0, T + 1, 1).long() if len(tokens) > T else None
    if windows is None:
        raise ValueError("too few tokens")
    while True:
        chosen = windows[torch.randint(len(windows), (B,), generator=generator)]
        yield chosen[:, :T], chosen[:, 1:]
