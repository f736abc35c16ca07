"""A learner who has done the second, the third and the fourth piece, and not the first."""

import math

import torch

from tfmlib.losses import IGNORE


def cross_entropy(logits, labels):
    if logits.shape[:-1] != labels.shape:
        raise ValueError("one label for each row of logits")
    counted = labels != IGNORE
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = x.logsumexp(-1) - x.gather(-1, labels.where(counted, 0)[..., None])[..., 0]
    return (loss * counted).sum() / counted.sum().clamp(min=1)


def perplexity(loss):
    return math.exp(loss) if loss < 709.78 else math.inf


def bits_per_byte(loss, n_tokens, n_bytes):
    if n_bytes < 1:
        raise ValueError("no bytes")
    return loss * n_tokens / n_bytes / math.log(2)
