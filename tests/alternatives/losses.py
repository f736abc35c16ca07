"""Other correct implementations of labels and losses."""

import cmath
import math
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F

from tfmlib.losses import IGNORE

from . import correct

# shift_labels --------------------------------------------------------------------------------------------------------


@correct("shift_labels")
def shift_by_where(ids, is_token=None):
    """torch.where, and a mask of ones where there is none."""
    if is_token is None:
        is_token = torch.ones_like(ids, dtype=torch.bool)
    counts = torch.logical_and(is_token[:, 1:], is_token[:, :-1])
    return ids[:, :-1].contiguous(), torch.where(counts, ids[:, 1:], IGNORE)


@correct("shift_labels")
def shift_by_clone(ids, is_token=None):
    """A copy of the labels, written to in place."""
    labels = ids[:, 1:].clone()
    if is_token is not None:
        labels[~is_token[:, 1:]] = IGNORE
        labels[~is_token[:, :-1]] = IGNORE
    return ids[:, :-1], labels


@correct("shift_labels")
def shift_by_roll(ids, is_token=None):
    """Everything is rolled, and the last column dropped."""
    T = ids.size(1)
    labels = torch.roll(ids, shifts=-1, dims=1)
    if is_token is not None:
        keep = is_token * torch.roll(is_token, -1, 1)
        labels = labels * keep + IGNORE * ~keep
    return ids.narrow(1, 0, T - 1), labels.narrow(1, 0, T - 1)


@correct("shift_labels")
def shift_token_by_token(ids, is_token=None):
    """Lists, one token at a time."""
    B, T = ids.shape
    inputs, labels = torch.empty(B, T - 1).long(), torch.full((B, T - 1), -100)
    for b in range(B):
        for t in range(T - 1):
            inputs[b, t] = ids[b, t]
            if is_token is None or is_token[b, t : t + 2].all():
                labels[b, t] = ids[b, t + 1]
    return inputs, labels


@correct("shift_labels")
def shift_by_unfold(ids, is_token=None):
    """Windows of two tokens: the first is read, the second said."""
    if ids.shape[1] < 2:
        return ids[:, :0], ids[:, :0]
    inputs, labels = ids.unfold(1, 2, 1).unbind(-1)
    if is_token is not None:
        labels = labels.masked_fill(is_token.unfold(1, 2, 1).all(-1).logical_not(), IGNORE)
    return inputs, labels


# cross_entropy -------------------------------------------------------------------------------------------------------


def _wider(x):
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@correct("cross_entropy")
def loss_by_logsumexp(logits, labels):
    """logsumexp minus the label's logit, times a mask."""
    if tuple(logits.shape[:-1]) != tuple(labels.shape):
        raise ValueError(f"{tuple(logits.shape)} and {tuple(labels.shape)} do not fit")
    logits = _wider(logits)
    counted = (labels != IGNORE).to(logits.dtype)
    index = torch.where(labels == IGNORE, 0, labels)
    chosen = torch.take_along_dim(logits, index[..., None], dim=-1)[..., 0]
    return ((torch.logsumexp(logits, -1) - chosen) * counted).sum() / torch.clamp(counted.sum(), min=1.0)


@correct("cross_entropy")
def loss_of_selected(logits, labels):
    """The counted places alone, and advanced indexing."""
    if logits.ndim != labels.ndim + 1:
        raise ValueError("one axis more")
    for axis in range(labels.ndim):
        if logits.shape[axis] != labels.shape[axis]:
            raise ValueError(f"axis {axis}")
    counted = labels.ne(IGNORE)
    x, y = _wider(logits[counted]), labels[counted]  # (n, V), (n,)
    n = y.numel()
    if n == 0:
        return x.sum()
    x = x - x.max(dim=1, keepdim=True).values
    return (x.exp().sum(dim=1).log() - x[torch.arange(n), y]).mean()


@correct("cross_entropy")
def loss_by_one_hot(logits, labels):
    """The label's distribution against the model's."""
    if logits.shape[:-1] != labels.shape:
        raise ValueError("shapes")
    x = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    y = labels.reshape(-1)
    target = F.one_hot(y.clamp(min=0), x.shape[1]).to(x.dtype) * (y >= 0).to(x.dtype).unsqueeze(1)
    return -torch.einsum("nv,nv->", target, F.log_softmax(x, dim=1)) / max(int((y >= 0).sum()), 1)


@correct("cross_entropy")
def loss_place_by_place(logits, labels):
    """A loop over places."""
    if labels.shape + logits.shape[-1:] != logits.shape:
        raise ValueError("shapes")
    x = _wider(logits).flatten(0, -2)
    terms = []
    for row, label in zip(x, labels.flatten().tolist(), strict=True):
        if label == IGNORE:
            continue
        top = row.detach().max()
        terms.append((row - top).exp().sum().log() + top - row[label])
    return sum(terms) / len(terms) if terms else (x * 0).sum()


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        counted = y != IGNORE
        n = max(int(counted.sum()), 1)
        log_p = x - torch.logsumexp(x, 1, keepdim=True)
        rows = torch.arange(len(y))[counted]
        slope = torch.zeros_like(x)
        slope[rows] = log_p[rows].exp()
        slope[rows, y[rows]] -= 1
        ctx.save_for_backward(slope / n)
        return -log_p[rows, y[rows]].sum() / n

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


@correct("cross_entropy")
def loss_with_its_own_backward(logits, labels):
    """The gradient written by hand."""
    if logits.shape[:-1] != labels.shape:
        raise ValueError("shapes")
    return _Loss.apply(_wider(logits).flatten(0, -2), labels.flatten())


# perplexity ----------------------------------------------------------------------------------------------------------


@correct("perplexity")
def perplexity_by_limit(loss):
    """The largest exponent, worked out beforehand."""
    return float("inf") if loss > math.log(sys.float_info.max) else math.exp(loss)


@correct("perplexity")
def perplexity_by_torch(loss):
    """torch in float64, which gives inf by itself."""
    return torch.tensor(loss, dtype=torch.float64).exp().item()


@correct("perplexity")
def perplexity_by_power(loss):
    """A power of e."""
    try:
        return math.e**loss
    except OverflowError:
        return float("inf")


@correct("perplexity")
def perplexity_by_numpy(loss):
    """numpy, whose float64 is a float."""
    with np.errstate(over="ignore"):
        return np.exp(np.float64(loss))


@correct("perplexity")
def perplexity_by_cmath(loss):
    """The real part of a complex exponential."""
    if math.isinf(loss):
        return loss
    try:
        return cmath.exp(loss).real
    except OverflowError:
        return math.inf


# bits_per_byte -------------------------------------------------------------------------------------------------------


@correct("bits_per_byte")
def bits_in_another_order(loss, n_tokens, n_bytes):
    """Bits per token, then tokens per byte."""
    if not n_bytes >= 1:
        raise ValueError("n_bytes")
    return (loss / math.log(2.0)) * (n_tokens / n_bytes)


@correct("bits_per_byte")
def bits_by_log2_e(loss, n_tokens, n_bytes):
    """One nat is log2(e) bits."""
    if n_bytes <= 0:
        raise ValueError("there must be bytes")
    total_bits = loss * math.log2(math.e) * n_tokens
    return total_bits / n_bytes


@correct("bits_per_byte")
def bits_by_fractions(loss, n_tokens, n_bytes):
    """Exact numbers until the end."""
    if n_bytes < 1:
        raise ValueError("no bytes")
    return float(Fraction(loss) * n_tokens / n_bytes / Fraction(Decimal(2).ln()))


@correct("bits_per_byte")
def bits_by_torch(loss, n_tokens, n_bytes):
    """torch, float32."""
    if n_bytes < 1:
        raise ValueError("no bytes")
    return (torch.tensor(loss) * n_tokens / torch.tensor(2.0).log() / n_bytes).item()


# tail_loss -----------------------------------------------------------------------------------------------------------


def _in_range(fraction, n):
    if n == 0 or not 0 < fraction <= 1:
        raise ValueError(f"fraction {fraction} of {n} losses")


@correct("tail_loss")
def tail_by_sort(losses, fraction):
    """Sorted upwards, the last k."""
    n = losses.shape[0]
    _in_range(fraction, n)
    k = max(round(n * fraction), 1)
    return torch.sort(losses)[0][n - k :].sum() / k


@correct("tail_loss")
def tail_by_kthvalue(losses, fraction):
    """Rockafellar and Uryasev's formula: the k-th largest, plus the mean excess over it."""
    n = len(losses)
    _in_range(fraction, n)
    k = max(1, round(fraction * n))
    threshold = losses.detach().kthvalue(n - k + 1).values
    excess = torch.where(losses > threshold, losses - threshold, 0.0)
    at_threshold = (losses == threshold).nonzero()[: k - int((losses > threshold).sum()), 0]
    return threshold + (excess.sum() + (losses[at_threshold] - threshold).sum()) / k


@correct("tail_loss")
def tail_by_mask(losses, fraction):
    """A weight of 1/k for the k largest, 0 for the others."""
    _in_range(fraction, losses.numel())
    k = max(1, int(torch.tensor(fraction * losses.numel(), dtype=torch.float64).round()))  # torch rounds to even, too
    weights = torch.zeros_like(losses)
    weights[losses.argsort(descending=True)[:k]] = 1 / k
    return (weights * losses).sum()


@correct("tail_loss")
def tail_by_python(losses, fraction):
    """Python's sorted, over tensors of one number."""
    _in_range(fraction, len(losses))
    worst = sorted(losses, key=float, reverse=True)[: max(1, round(fraction * len(losses)))]
    return torch.stack(worst).mean()


@correct("tail_loss")
def tail_one_by_one(losses, fraction):
    """The largest is taken away again and again."""
    _in_range(fraction, len(losses))
    left, total = losses, 0
    k = round(fraction * len(losses)) or 1
    for _ in range(k):
        i = int(left.argmax())
        total = total + left[i]
        left = torch.cat([left[:i], left[i + 1 :]])
    return total / k


# group_advantages ----------------------------------------------------------------------------------------------------


@correct("group_advantages")
def advantages_by_std(rewards):
    """torch's std, and where."""
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    std, mean = torch.std_mean(rewards, dim=-1, unbiased=False, keepdim=True)
    same = (rewards == rewards[:, :1]).all(dim=-1, keepdim=True)
    return torch.where(same, 0.0, (rewards - mean) / torch.where(same, 1.0, std))


@correct("group_advantages")
def advantages_group_by_group(rewards):
    """A loop over groups, in float64."""
    out = torch.zeros(rewards.shape, dtype=torch.promote_types(rewards.dtype, torch.float32))
    for g, group in enumerate(rewards.double()):
        if len(set(group.tolist())) > 1:
            out[g] = ((group - group.mean()) / group.var(correction=0).sqrt()).to(out.dtype)
    return out


@correct("group_advantages")
def advantages_from_the_first(rewards):
    """Rewards as differences to the first, which are exactly 0 where all are equal."""
    x = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    x = x - x[:, :1]
    x = x - x.mean(1, keepdim=True)
    norm = x.norm(dim=1, keepdim=True)
    return x * rewards.shape[1] ** 0.5 / norm.masked_fill(norm == 0, 1.0)


@correct("group_advantages")
def advantages_in_python(rewards):
    """Lists and Python's own floats."""
    groups = []
    for group in rewards.tolist():
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / len(group))
        groups.append([0.0 if max(group) == min(group) else (r - mean) / std for r in group])
    return torch.tensor(groups, dtype=torch.float64 if rewards.dtype == torch.float64 else torch.float32)


@correct("group_advantages")
def advantages_by_layer_norm(rewards):
    """A layer norm without epsilon is the same formula."""
    x = rewards.to(torch.float64)
    scaled = F.layer_norm(x, x.shape[-1:], eps=0.0)
    scaled[(x.max(1).values == x.min(1).values)] = 0.0
    return scaled.to(torch.promote_types(rewards.dtype, torch.float32))


# policy_gradient_loss ------------------------------------------------------------------------------------------------


@correct("policy_gradient_loss")
def policy_of_selected(log_probs, advantages, is_token):
    """The counted tokens alone, each with its answer's advantage."""
    chosen = _wider(log_probs[is_token])
    weights = advantages.detach().unsqueeze(1).expand_as(is_token)[is_token]
    return -(weights * chosen).sum() / max(1, chosen.numel())


@correct("policy_gradient_loss")
def policy_by_product(log_probs, advantages, is_token):
    """A row of advantages times a column of each answer's sum."""
    x = torch.where(is_token, log_probs, 0.0).to(torch.promote_types(log_probs.dtype, torch.float32))
    n = is_token.count_nonzero().clamp(min=1)
    return torch.dot(-advantages.detach().to(x.dtype), x.sum(1)) / n


@correct("policy_gradient_loss")
def policy_masked_last(log_probs, advantages, is_token):
    """Everything is weighed; padding is put out afterwards."""
    with torch.no_grad():
        weights = -advantages.reshape(-1, 1)
    terms = (weights * _wider(log_probs)).masked_fill(torch.logical_not(is_token), 0)
    return terms.sum() / is_token.sum().clamp(min=1)


@correct("policy_gradient_loss")
def policy_answer_by_answer(log_probs, advantages, is_token):
    """A loop over answers."""
    total, n = torch.zeros((), dtype=torch.promote_types(log_probs.dtype, torch.float32)), 0
    for row, advantage, counts in zip(log_probs, advantages.tolist(), is_token, strict=True):
        total = total - advantage * row[counts].to(total.dtype).sum()
        n += int(counts.sum())
    return total / n if n else total


@correct("policy_gradient_loss")
def policy_by_einsum(log_probs, advantages, is_token):
    """One sum over answers and tokens."""
    log_probs = _wider(log_probs)
    log_probs = log_probs.where(is_token, torch.zeros_like(log_probs))
    total = torch.einsum("b,bt->", advantages.detach().to(log_probs.dtype), log_probs)
    return total.neg().div(max(is_token.sum().item(), 1))
