"""Attention: every query mixes the values of the keys it may see, by similarity.

Shapes: B batch, T queries, S keys, D width of a query and of a key, Dv width of a value.
A mask is boolean and True where a query may look.
"""

import math

import torch
from torch import Tensor


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Turn scores into positive weights that sum to 1 along `dim`; the shape stays.

    softmax(x)_i = exp(x_i) / sum_j exp(x_j), computed so that large scores do not
    overflow: subtracting the maximum changes nothing, since exp(-max) cancels.
    Not defined for a row of only -inf.

    >>> softmax(torch.tensor([0.0, math.log(3.0)]))
    tensor([0.2500, 0.7500])
    """
    shifted = x - x.detach().amax(dim, keepdim=True)  # detached: it cancels, so it needs no gradient
    e = shifted.exp_()
    return e * e.sum(dim, keepdim=True).reciprocal()


def causal_mask(T: int, S: int | None = None) -> Tensor:
    """Which keys each of T queries may see: (T, S) bool, True unless in the future.

    The queries are the last T of the S tokens (S = T if not given), so query t stands
    at position S - T + t. Raises ValueError if there are more queries than keys.

    >>> causal_mask(2, 3).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    S = T if S is None else S
    if T > S:
        raise ValueError(f"T={T} queries must be the last of S={S} keys: make S >= T")
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)


def padding_mask(is_token: Tensor) -> Tensor:
    """Hide padding from every query of every head: (B, S) bool -> (B, 1, 1, S) bool.

    `is_token` is True for a token and False for padding. The ones broadcast over heads
    and queries: padding is hidden as a key, wherever it stands.

    >>> padding_mask(torch.tensor([[True, True, False]])).shape
    torch.Size([1, 1, 1, 3])
    """
    return is_token[:, None, None, :]  # (B, 1, 1, S)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """What each query reads from each key: (..., T, D), (..., S, D) -> (..., T, S).

    softmax(q k^T / sqrt(D)) over the keys that `mask` shows, so rows sum to 1. `mask` is
    boolean, True where a query may look, and broadcasts to (..., T, S). A query that may
    see nothing gets zeros, and gradients stay finite. Raises TypeError if `mask` is not
    boolean. Vaswani et al. (2017), equation 1.

    >>> attention_weights(torch.zeros(1, 2), torch.zeros(4, 2))
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    scores = q / math.sqrt(q.shape[-1]) @ k.contiguous().mT  # (..., T, S)
    if mask is None:
        return softmax(scores)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, True where visible; got {mask.dtype}")
    blind = ~mask.any(-1, keepdim=True)  # (..., T, 1): softmax of nothing is 0/0
    scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask & ~blind, -math.inf)
    return softmax(scores).masked_fill(blind, 0.0)


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mix values by similarity: (..., T, D), (..., S, D), (..., S, Dv) -> (..., T, Dv).

    Row t is the mean of the values, weighted by `attention_weights(q, k, mask)[t]`; zeros
    where the query may see nothing. Raises TypeError if `mask` is not boolean.
    Vaswani et al. (2017), equation 1.

    >>> q, k, v = torch.zeros(1, 2), torch.zeros(2, 2), torch.tensor([[0.0], [4.0]])
    >>> scaled_dot_product_attention(q, k, v)
    tensor([[2.]])
    """
    return attention_weights(q, k, mask) @ v
