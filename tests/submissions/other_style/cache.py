"""A learner whose code is right, in another style, and noisy."""

import sys
import warnings

import torch
from torch import nn

from tfmlib import sampling as choosing

KEYS, VALUES = 0, 1


def complain_unless(condition, message):
    if not condition:
        print("refused:", message, file=sys.stderr)
        raise ValueError(message)


class Drawer:
    """What one layer keeps."""

    def __init__(self, cabinet, i):
        self.cabinet, self.i, self.length = cabinet, i, 0

    def append(self, k, v):
        rows = self.cabinet.rows[self.i]
        _, B, K, capacity, D = rows.shape
        for x in (k, v):
            complain_unless(x.shape == (B, K, k.shape[2], D), f"not ({B}, {K}, T, {D})")
        old, self_and_new = self.length, self.length + k.shape[2]
        complain_unless(self_and_new <= capacity, "full")
        with torch.no_grad():
            rows[KEYS, :, :, old:self_and_new].copy_(k)
            rows[VALUES, :, :, old:self_and_new].copy_(v)
        self.length = self_and_new
        return rows[KEYS, :, :, :self_and_new], rows[VALUES, :, :, :self_and_new]


class KVCache:
    def __init__(self, n_layers, batch, n_kv_heads, head_dim, capacity, dtype=torch.float32, device="cpu"):
        warnings.warn("a new cache", UserWarning, stacklevel=2)
        self.rows = torch.zeros(n_layers, 2, batch, n_kv_heads, capacity, head_dim).to(device=device, dtype=dtype)
        self.drawers = tuple(Drawer(self, i) for i in range(n_layers))

    def layer(self, i):
        complain_unless(i in range(len(self.drawers)), "no such layer")
        return self.drawers[i]

    length = property(lambda self: min(drawer.length for drawer in self.drawers))

    def trim(self, length):
        complain_unless(length >= 0, "negative")
        for drawer in self.drawers:
            if drawer.length > length:
                drawer.length = length

    def reset(self):
        self.trim(length=0)


def prefill(model, ids, cache, is_token=None):
    B, T = ids.shape
    S = cache.length + T
    extra = {}
    if is_token is not None:
        complain_unless(list(is_token.shape) == [B, S], f"is_token must be ({B}, {S})")
        padding = (~is_token).long().cumsum(dim=1)
        extra["positions"] = torch.clamp(torch.arange(S) - padding, min=0)[:, S - T :]
        extra["mask"] = is_token.reshape(B, 1, 1, S)
    with torch.inference_mode():
        logits = model(ids, cache=cache, **extra)
    return logits.select(dim=1, index=T - 1)


def decode_step(model, ids, cache, is_token=None):
    complain_unless(tuple(ids.shape[1:]) == (1,), "one token at a time")
    print("step", cache.length)
    return prefill(model, ids, cache, is_token=is_token)


class Reader(nn.Module):
    """Reads what is new in a text that grows."""

    def __init__(self, model, cache, is_token):
        super().__init__()
        self.model, self.cache, self.is_token = model, cache, is_token

    def forward(self, ids):
        new = ids[:, self.cache.length :]
        if self.is_token is not None and self.is_token.shape[1] < ids.shape[1]:
            self.is_token = nn.functional.pad(self.is_token, (0, new.shape[1]), value=True)
        read = prefill if self.cache.length == 0 else decode_step
        return read(self.model, new, self.cache, self.is_token).unsqueeze(1)


def generate_cached(model, ids, max_new_tokens, *, is_token=None, **options):
    c, most = model.config, ids.shape[1] + max_new_tokens
    if is_token is not None:
        complain_unless(bool(is_token[:, -1].all()), "padding belongs to the left")
        most -= int(is_token.logical_not().sum(dim=1).min())
    complain_unless(most <= c.context_length + 1, "too long")
    like = model.head.weight
    capacity = ids.shape[1] + max_new_tokens
    cache = KVCache(c.n_layers, ids.shape[0], c.n_kv_heads, c.head_dim, capacity, like.dtype, like.device)
    return choosing.generate(Reader(model, cache, is_token), ids, max_new_tokens, **options)
