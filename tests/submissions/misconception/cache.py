"""A learner whose padding is hidden but still takes positions, and who has everything else right."""

import torch

from tfmlib import attention, sampling


class CacheLayer:
    def __init__(self, keys, values):
        self.keys, self.values = keys, values
        self.length = 0

    def append(self, k, v):
        if k.shape != v.shape:
            raise ValueError("k and v must have the same shape")
        B, K, T, D = k.shape
        if self.keys.shape[:2] != (B, K) or self.keys.shape[3] != D:
            raise ValueError("k has another shape than the cache")
        if self.length + T > self.keys.shape[2]:
            raise ValueError("the cache is full")
        new = slice(self.length, self.length + T)
        self.keys[:, :, new] = k.detach()
        self.values[:, :, new] = v.detach()
        self.length += T
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class KVCache:
    def __init__(self, n_layers, batch, n_kv_heads, head_dim, capacity, dtype=torch.float32, device="cpu"):
        self.layers = []
        for _ in range(n_layers):
            keys = torch.zeros(batch, n_kv_heads, capacity, head_dim, dtype=dtype, device=device)
            self.layers.append(CacheLayer(keys, torch.zeros_like(keys)))

    def layer(self, i):
        if i < 0 or i >= len(self.layers):
            raise ValueError(f"there is no layer {i}")
        return self.layers[i]

    @property
    def length(self):
        return min(layer.length for layer in self.layers)

    def trim(self, length):
        if length < 0:
            raise ValueError("length must not be negative")
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def reset(self):
        for layer in self.layers:
            layer.length = 0


def prefill(model, ids, cache, is_token=None):
    mask = None
    if is_token is not None:
        if is_token.shape != (ids.shape[0], cache.length + ids.shape[1]):
            raise ValueError("is_token must cover everything in the cache")
        mask = attention.padding_mask(is_token)
    with torch.no_grad():
        return model(ids, mask=mask, cache=cache)[:, -1]


def decode_step(model, ids, cache, is_token=None):
    if ids.shape[1] != 1:
        raise ValueError("a step takes one token")
    return prefill(model, ids, cache, is_token)


def generate_cached(
    model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None, eos_id=None, is_token=None
):
    config = model.config
    if is_token is not None and not is_token[:, -1].all():
        raise ValueError("pad on the left")
    longest = ids.shape[1] if is_token is None else int(is_token.sum(1).max())
    if longest + max_new_tokens - 1 > config.context_length:
        raise ValueError("the text does not fit")
    weight = next(model.parameters())
    cache = KVCache(
        config.n_layers,
        len(ids),
        config.n_kv_heads,
        config.head_dim,
        ids.shape[1] + max_new_tokens,
        weight.dtype,
        weight.device,
    )
    modes = {module: module.training for module in model.modules()}
    model.eval()
    ended = torch.zeros(len(ids), dtype=torch.bool)
    new = ids
    for n in range(max_new_tokens):
        feed = decode_step if n else prefill
        logits = sampling.apply_temperature(feed(model, new, cache, is_token), temperature)
        if top_k is not None:
            logits = sampling.keep_top_k(logits, top_k)
        if top_p is not None:
            logits = sampling.keep_top_p(logits, top_p)
        chosen = sampling.sample(logits, generator)
        if eos_id is not None:
            chosen[ended] = eos_id
            ended |= chosen == eos_id
        new = chosen[:, None]
        ids = torch.cat([ids, new], dim=1)
        if is_token is not None:
            is_token = torch.cat([is_token, torch.ones_like(new, dtype=torch.bool)], dim=1)
        if ended.all():
            break
    for module, training in modes.items():
        module.training = training
    return ids
