"""A learner who has done the prompt and the step, and not the cache itself."""

import torch

from tfmlib import attention


@torch.no_grad()
def prefill(model, ids, cache, is_token=None):
    if is_token is None:
        return model(ids, cache=cache)[:, -1]
    B, T = ids.shape
    if is_token.shape != (B, cache.length + T):
        raise ValueError("is_token covers the cache and the new tokens")
    positions = (is_token.cumsum(1) - 1).clamp(min=0)[:, -T:]
    return model(ids, positions, attention.padding_mask(is_token), cache)[:, -1]


def decode_step(model, ids, cache, is_token=None):
    if ids.shape[1] != 1:
        raise ValueError("one token")
    return prefill(model, ids, cache, is_token)
