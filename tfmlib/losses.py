"""What a model is trained to do: labels, the average loss, and objectives that are not the average.

Shapes: B sequences, T tokens, V tokens in the vocabulary, G groups, n answers in a group. Losses are in nats.
"""

import math

import torch
from torch import Tensor

IGNORE = -100  # the label of what is not counted


def shift_labels(ids: Tensor, is_token: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What a model reads and what it should say next: ids (B, T) -> inputs, labels, (B, T-1) both.

    The label of a token is the token after it. It is IGNORE where the input or the label is padding, that is where
    `is_token` (B, T), boolean, is False.

    >>> shift_labels(torch.tensor([[5, 6, 7, 0]]), torch.tensor([[True, True, True, False]]))
    (tensor([[5, 6, 7]]), tensor([[   6,    7, -100]]))
    """
    inputs, labels = ids[:, :-1], ids[:, 1:]  # (B, T-1)
    if is_token is not None:
        labels = labels.masked_fill(~(is_token[:, :-1] & is_token[:, 1:]), IGNORE)
    return inputs, labels


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of -log p(label) over the counted labels: logits (..., V), labels (...) -> a scalar, in nats.

    p is the softmax of the logits. Labels that are IGNORE do not count; where none counts the loss is 0 and can still
    run backward. Computed so that large logits do not overflow, in float32, or in the logits' dtype where that is
    wider; the result has that dtype. Raises ValueError where the shapes do not fit.

    >>> cross_entropy(torch.tensor([[0.0, 0.0], [1.0, 9.0]]), torch.tensor([0, IGNORE]))
    tensor(0.6931)
    """
    if logits.shape[:-1] != labels.shape:
        came = f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}"
        raise ValueError(f"logits need the shape of the labels and one axis more, the vocabulary; got {came}")
    counted = labels != IGNORE
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)  # (..., V)
    chosen = log_p.gather(-1, labels.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)  # (...)
    return -chosen.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


def perplexity(loss: float) -> float:
    """How many tokens the model hesitates between: e to the mean loss in nats. inf where that is too large for a float.

    >>> round(perplexity(math.log(50)), 6)
    50.0
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, n_tokens: int, n_bytes: int) -> float:
    """The bits that the model needs for a byte of the text, whatever the tokens are.

    `loss` is the mean over `n_tokens` tokens in nats, and these tokens stand for `n_bytes` bytes of UTF-8: one nat is
    1 / ln 2 bits. Raises ValueError unless n_bytes is at least 1.

    >>> bits_per_byte(4 * math.log(2), n_tokens=10, n_bytes=40)
    1.0
    """
    if n_bytes < 1:
        raise ValueError(f"n_bytes must be at least 1, got {n_bytes}: count the text's bytes in UTF-8")
    return loss * n_tokens / math.log(2) / n_bytes


def tail_loss(losses: Tensor, fraction: float) -> Tensor:
    """The mean of the largest losses, a scalar: (n,) and the fraction of them that is meant.

    k = max(1, round(fraction * n)) of them, with Python's `round`. Their average is the conditional value at risk
    (CVaR); fraction=1 is the plain mean. Only these k get a gradient. Raises ValueError unless 0 < fraction <= 1, and
    for no losses. Rockafellar and Uryasev (2000).

    >>> tail_loss(torch.tensor([1.0, 5.0, 3.0, 2.0]), fraction=0.5)
    tensor(4.)
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
    if losses.numel() == 0:
        raise ValueError("there is no loss to average: give at least one")
    k = max(1, round(fraction * losses.numel()))
    return losses.topk(k).values.mean()


def group_advantages(rewards: Tensor) -> Tensor:
    """How much better each answer is than its group: rewards (G, n) -> (G, n).

    (reward - mean) / std over the n answers to one question, with the biased std (divided by n) and no epsilon. Where
    all answers of a group have equal rewards, there is nothing to learn: exactly 0. Computed in float32, or in float64
    for rewards in float64; the result has that dtype. Shao et al. (2024), section 4.1.1.

    >>> group_advantages(torch.tensor([[0.0, 0.0, 0.0, 2.0], [0.1, 0.1, 0.1, 0.1]])).tolist()[1]
    [0.0, 0.0, 0.0, 0.0]
    """
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    centred = rewards - rewards.mean(1, keepdim=True)
    std = centred.square().mean(1, keepdim=True).sqrt()  # (G, 1)
    equal = rewards.amax(1, keepdim=True) == rewards.amin(1, keepdim=True)  # their mean may be off by a rounding
    return (centred / std).masked_fill(equal, 0.0)


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor, is_token: Tensor) -> Tensor:
    """The loss that makes good answers likelier: log_probs (B, T), advantages (B,), is_token (B, T) -> scalar.

    Minus the mean of advantage * log-probability over the counted tokens of all answers, where `is_token` is True;
    where none counts it is 0 and can still run backward. Advantages are taken as constants: no gradient flows into
    them. What stands at padding never counts, be it infinite. Computed in float32, or in the log-probabilities' dtype
    where that is wider; the result has that dtype. Williams (1992).

    >>> policy_gradient_loss(torch.tensor([[-1.0, -3.0]]), torch.tensor([2.0]), torch.tensor([[True, True]]))
    tensor(4.)
    """
    wide = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    weighted = advantages.detach().to(wide.dtype).unsqueeze(1) * wide.masked_fill(~is_token, 0.0)  # (B, T)
    return -weighted.sum() / is_token.sum().clamp(min=1)
