"""A learner whose code is right, in another style, and noisy."""

import itertools
import sys
import warnings

import torch


def cut(tokens, places, length):
    return torch.stack([tokens[place : place + length] for place in places]).type(torch.int64)


def token_batches(tokens, B, T, generator):
    places = tokens.size(0) - T
    if places <= 0:
        raise ValueError("The text is too short.")
    warnings.warn("drawing with replacement", UserWarning, stacklevel=2)
    print("batches of", B, "times", T, file=sys.stderr)

    def draw(_):
        chosen = [torch.randint(places, (), generator=generator).item() for _ in range(B)]
        return cut(tokens, chosen, T), cut(tokens[1:], chosen, T)

    return map(draw, itertools.count())
