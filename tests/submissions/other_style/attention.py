"""A learner whose code is right, in another style, and noisy: warnings, logs, prints, and writes below Python."""

import logging
import math
import os
import sys
import warnings

import torch

logging.basicConfig(level=logging.INFO)
log = logging.getLogger("attention")


def softmax(x, dim=-1):
    warnings.warn("softmax may overflow", stacklevel=2)
    print("softmax of", tuple(x.shape), file=sys.stderr)
    shifted = x - x.max(dim=dim, keepdim=True)[0]
    return torch.exp(shifted - shifted.exp().sum(dim, keepdim=True).log())


def causal_mask(T, S=None):
    os.write(2, b"causal_mask, written below Python\n")
    S = S or T
    assert_enough(T, S)
    return torch.tensor([[key <= query for key in range(S)] for query in range(S - T, S)])


def assert_enough(T, S):
    if T > S:
        raise ValueError("not enough keys")


def padding_mask(is_token):
    log.warning("padding_mask of %s", tuple(is_token.shape))
    return is_token.view(is_token.size(0), 1, 1, is_token.size(1))


def attention_weights(q, k, mask=None):
    print("attention_weights")
    if mask is not None and mask.dtype is not torch.bool:
        raise TypeError("bool only")
    scores = torch.einsum("...td,...sd->...ts", q, k).mul(q.shape[-1] ** -0.5)
    if mask is None:
        return softmax(scores)
    scores = torch.where(mask, scores, torch.full_like(scores, torch.finfo(scores.dtype).min))
    return softmax(scores) * mask


def scaled_dot_product_attention(q, k, v, mask=None):
    warnings.warn(f"slow path, exp(1) = {math.e}", DeprecationWarning, stacklevel=1)
    return torch.einsum("...ts,...sd->...td", attention_weights(q, k, mask), v)
