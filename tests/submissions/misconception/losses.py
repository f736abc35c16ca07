"""A learner who averages each answer before the batch, and has everything else right."""

import math

import torch

from tfmlib.losses import IGNORE


def widened(x):
    return x if x.dtype == torch.float64 else x.float()


def shift_labels(ids, is_token=None):
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if is_token is not None:
        labels = torch.where(is_token[:, :-1] & is_token[:, 1:], labels, IGNORE)
    return inputs, labels


def cross_entropy(logits, labels):
    if logits.shape[:-1] != labels.shape:
        raise ValueError("the shapes do not fit")
    counted = labels != IGNORE
    log_p = widened(logits).log_softmax(-1)[counted]
    if not counted.any():
        return log_p.sum()
    return -log_p[torch.arange(len(log_p)), labels[counted]].mean()


def perplexity(loss):
    try:
        return math.exp(loss)
    except OverflowError:
        return float("inf")


def bits_per_byte(loss, n_tokens, n_bytes):
    if n_bytes <= 0:
        raise ValueError("n_bytes must be positive")
    return loss / math.log(2) * n_tokens / n_bytes


def tail_loss(losses, fraction):
    if len(losses) == 0 or fraction <= 0 or fraction > 1:
        raise ValueError("0 < fraction <= 1, and at least one loss")
    k = max(1, round(fraction * len(losses)))
    return torch.topk(losses, k)[0].mean()


def group_advantages(rewards):
    rewards = widened(rewards)
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, correction=0, keepdim=True)
    equal = (rewards == rewards[:, :1]).all(1, keepdim=True)
    return ((rewards - mean) / std).masked_fill(equal, 0)


def policy_gradient_loss(log_probs, advantages, is_token):
    log_probs = widened(log_probs).masked_fill(~is_token, 0)
    per_answer = log_probs.sum(1) / is_token.sum(1).clamp(min=1)
    return -(advantages.detach() * per_answer).mean()
