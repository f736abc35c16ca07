"""A learner who has done top-k and the draw, and nothing else."""

import torch


def keep_top_k(logits, k):
    if k < 1:
        raise ValueError("k must be positive")
    rank = logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return logits.masked_fill(rank >= k, float("-inf"))


def sample(logits, generator=None):
    u = torch.rand(logits.shape, dtype=torch.float64, generator=generator)
    return (logits.double() - torch.log(-torch.log(u))).argmax(-1)
