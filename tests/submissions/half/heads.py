"""A learner who has done the second and the third piece, and not the first."""

import torch


def merge_heads(x):
    return torch.cat(tuple(x.transpose(0, 1)), dim=-1)


def repeat_kv(x, n_repeat):
    return torch.stack([x] * n_repeat, dim=2).flatten(1, 2)
