"""A learner whose code is right, in another style, and noisy."""

import math
import sys
import warnings

import numpy as np
import torch
import torch.nn.functional as F

from tfmlib import losses as chapter


def at_least_float32(x):
    print("from", x.dtype, file=sys.stderr)
    return x.type(torch.promote_types(x.dtype, torch.float))


def average(total, number):
    return total / max(int(number), 1)


def shift_labels(ids, is_token=None):
    warnings.warn("shifting", UserWarning, stacklevel=2)
    labels = ids.clone()[:, 1:]
    if is_token is not None:
        padding = ~is_token
        labels[padding[:, 1:] | padding[:, :-1]] = chapter.IGNORE
    return (ids[:, : ids.size(1) - 1], labels)


def cross_entropy(logits, labels):
    *places, V = logits.size()
    if places != list(labels.size()):
        raise ValueError("labels do not fit the logits")
    print("cross_entropy over", V, "tokens")
    logits, labels = at_least_float32(logits).reshape(-1, V), labels.reshape(-1)
    kept = torch.nonzero(labels != chapter.IGNORE).squeeze(1)
    log_p = F.log_softmax(logits[kept], dim=1)
    return average(log_p.gather(1, labels[kept].unsqueeze(1)).sum().neg(), kept.numel())


def perplexity(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(np.exp(np.float64(loss)))


def bits_per_byte(loss, n_tokens, n_bytes):
    sys.stderr.write("counting bits\n")
    if not n_bytes > 0:
        raise ValueError("a text has bytes")
    nats = loss * n_tokens
    return nats * math.log2(math.e) / n_bytes


def tail_loss(losses, fraction):
    warnings.warn("only the tail", RuntimeWarning, stacklevel=2)
    if fraction <= 0 or fraction > 1 or not len(losses):
        raise ValueError("which tail?")
    order = torch.argsort(losses, descending=True)
    count = round(len(losses) * fraction)
    return losses[order[: count if count > 0 else 1]].mean()


def group_advantages(rewards):
    print("advantages of", len(rewards), "groups")
    rows = []
    for row in at_least_float32(rewards).unbind(0):
        if row.unique().numel() == 1:
            rows.append(torch.zeros_like(row))
        else:
            rows.append((row - row.mean()) / row.var(unbiased=False) ** 0.5)
    return torch.stack(rows)


def policy_gradient_loss(log_probs, advantages, is_token):
    kept = at_least_float32(log_probs)[is_token]
    repeated = torch.repeat_interleave(advantages.detach(), is_token.sum(dim=1))
    return -average((kept * repeated).sum(), len(kept))
