"""The key/value cache: what was computed for earlier tokens is kept, so that a new token costs one token's work.

Shapes: B batch, T new tokens, S tokens in the cache after the call, K key/value heads, D head width, V vocabulary.
"""

import torch
from torch import Tensor, nn

from tfmlib import attention, sampling


class CacheLayer:
    """One layer's keys and values: room for `capacity` tokens, (B, K, capacity, D) each, of which `length` are set.

    `append(k, v)` adds those of T new tokens, (B, K, T, D) each, and returns all so far, (B, K, length, D) each. They
    are kept without gradients, in the cache's dtype. Raises ValueError, and keeps nothing, for another batch, number of
    heads or width, for k and v of different length, and where there is no room.

    >>> layer = CacheLayer(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2))
    >>> keys, values = layer.append(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    >>> keys.shape, layer.length
    (torch.Size([1, 1, 3, 2]), 3)
    """

    def __init__(self, keys: Tensor, values: Tensor):
        self.keys, self.values, self.length = keys, values, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        B, K, capacity, D = self.keys.shape
        for name, new in (("k", k), ("v", v)):
            if new.dim() != 4 or (*new.shape[:2], new.shape[3]) != (B, K, D) or new.shape != k.shape:
                raise ValueError(f"{name} must have the shape ({B}, {K}, T, {D}), got {tuple(new.shape)}")
        end = self.length + k.shape[2]
        if end > capacity:
            raise ValueError(f"no room: {self.length} tokens kept and {k.shape[2]} new ones, but {capacity=}")
        self.keys[:, :, self.length : end] = k.detach()
        self.values[:, :, self.length : end] = v.detach()
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class KVCache:
    """Keys and values of all layers of a decoder, for at most `capacity` tokens in each of `batch` rows.

    Its bytes, 2 * n_layers * batch * n_kv_heads * capacity * head_dim elements of `dtype`, are taken at once.
    `layer(i)` is layer i's view, with `length` and `append(k, v)`: a ValueError for a layer that is not there.
    `length` is how many tokens are complete in every layer. `trim(length)` forgets all tokens after the first `length`,
    in every layer; where there are no more it does nothing, and a negative length is a ValueError. `reset()` forgets
    all.

    >>> cache = KVCache(n_layers=2, batch=1, n_kv_heads=1, head_dim=2, capacity=4)
    >>> cache.layer(0).append(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))[0].shape
    torch.Size([1, 1, 3, 2])
    >>> cache.length  # layer 1 has none yet
    0
    """

    def __init__(
        self,
        n_layers: int,
        batch: int,
        n_kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        rows = torch.zeros(n_layers, 2, batch, n_kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.layers = [CacheLayer(keys, values) for keys, values in rows]

    def layer(self, i: int) -> CacheLayer:
        if not 0 <= i < len(self.layers):
            raise ValueError(f"layer {i} does not exist: the cache has {len(self.layers)} layers, 0 the first")
        return self.layers[i]

    @property
    def length(self) -> int:
        return min(layer.length for layer in self.layers)

    def trim(self, length: int) -> None:
        if length < 0:
            raise ValueError(f"length must be 0 or more, got {length}")
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def reset(self) -> None:
        self.trim(0)


def prefill(model: nn.Module, ids: Tensor, cache: KVCache, is_token: Tensor | None = None) -> Tensor:
    """Feed tokens that follow those in the cache: ids (B, T) -> the last one's logits (B, V), without gradients.

    A long prompt may come in several chunks. In a batch of prompts of unequal length, `is_token` (B, S) is False for
    padding and covers all that the cache holds after the call. Padding is never looked at, and does not count: a row's
    first token stands at position 0. A padding token's own logits mean nothing, so pad on the left. Raises ValueError
    for an `is_token` of another shape.
    """
    positions = mask = None
    if is_token is not None:
        B, T = ids.shape
        if is_token.shape != (B, cache.length + T):
            expected = f"({B}, {cache.length} in the cache + {T} new)"
            raise ValueError(f"is_token must have the shape {expected}, got {tuple(is_token.shape)}")
        positions = (is_token.long().cumsum(1) - 1).clamp(min=0)[:, -T:]  # (B, T)
        mask = attention.padding_mask(is_token)  # (B, 1, 1, S)
    with torch.no_grad():
        return model(ids, positions=positions, mask=mask, cache=cache)[:, -1]


def decode_step(model: nn.Module, ids: Tensor, cache: KVCache, is_token: Tensor | None = None) -> Tensor:
    """Feed the one token that follows those in the cache: ids (B, 1) -> its logits (B, V), without gradients.

    `is_token` (B, S) as in `prefill`. Raises ValueError for more tokens or none.
    """
    if ids.shape[1] != 1:
        raise ValueError(f"a decoding step takes ids of the shape (B, 1), got {tuple(ids.shape)}")
    return prefill(model, ids, cache, is_token)


class CachedModel(nn.Module):
    """A model with its cache, as `generate` wants to call it: all ids so far (B, T) -> the last one's logits (B, 1, V).

    Only what the cache does not hold yet is fed. `is_token` tells which tokens of the prompt are none; later ones are.
    """

    def __init__(self, model: nn.Module, cache: KVCache, is_token: Tensor | None = None):
        super().__init__()
        self.model, self.cache, self.is_token = model, cache, is_token

    def forward(self, ids: Tensor) -> Tensor:
        is_token = self.is_token
        if is_token is not None:
            n_later = ids.shape[1] - is_token.shape[1]
            is_token = torch.cat([is_token, is_token.new_ones(len(ids), n_later)], dim=1)
        feed = decode_step if self.cache.length else prefill
        return feed(self.model, ids[:, self.cache.length :], self.cache, is_token)[:, None]


def generate_cached(
    model: nn.Module,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    eos_id: int | None = None,
    is_token: Tensor | None = None,
) -> Tensor:
    """What `generate` does, with a cache: ids (B, T) -> (B, T + new), new <= max_new_tokens.

    The prompt is fed once, then one token at a time. `model` is a GPT or a Llama; the cache gets its sizes from
    `model.config`, and the dtype and the device of its weights. Prompts of unequal length stand in one batch padded on
    the left, `is_token` (B, T) False for padding: each row is continued as if it were alone. Raises ValueError if the
    last column of `is_token` has padding, or if what is fed, the text without its last token, does not fit into
    `model.config.context_length`.
    """
    config, n_rows = model.config, ids.shape[1] + max(max_new_tokens - 1, 0)  # the last token is not fed
    if is_token is not None and not is_token[:, -1].all():
        raise ValueError("pad on the left: every row's last column must be a token")
    longest = n_rows if is_token is None else n_rows - int((~is_token).sum(1).min())
    if longest > config.context_length:
        raise ValueError(f"{longest} tokens do not fit into context_length={config.context_length}")
    weight = next(model.parameters())
    sizes = (config.n_layers, len(ids), config.n_kv_heads, config.head_dim, n_rows)
    cached = CachedModel(model, KVCache(*sizes, weight.dtype, weight.device), is_token)
    choice = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return sampling.generate(cached, ids, max_new_tokens, **choice, generator=generator, eos_id=eos_id)


def store_by_columns(model: nn.Module) -> None:
    """Keep the matrices of linear layers with more outputs than inputs column by column in memory: values stay.

    PyTorch keeps them row by row. For one token, a row times the matrix, a CPU is faster by columns; how much the
    benchmark of decoding measures. Shapes, parameters and results are the same, up to rounding.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.out_features > layer.in_features:
            layer.weight.data = layer.weight.data.t().contiguous().t()
