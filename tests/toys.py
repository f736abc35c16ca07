"""Small stand-ins for parts of tfmlib that belong to other chapters, for the checks to hand to a piece."""

import torch
from torch import Tensor, nn


class LayerCache:
    """One layer's view of a key/value cache: what chapter 12's cache shows to an attention module."""

    def __init__(self):
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens have been appended so far."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, (B, K, T, D) each; returns all so far."""
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=-2), torch.cat([self.values, v], dim=-2)
        self.keys, self.values = k, v
        return k, v

    def trim(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        if self.keys is not None:
            self.keys, self.values = self.keys[..., :length, :], self.values[..., :length, :]


class ListCache:
    """The same view, kept in another way: a list of the chunks that were appended."""

    def __init__(self):
        self.chunks: list[tuple[Tensor, Tensor]] = []

    @property
    def length(self) -> int:
        """How many tokens have been appended so far."""
        return sum(k.shape[-2] for k, _ in self.chunks)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, (B, K, T, D) each; returns all so far."""
        self.chunks.append((k, v))
        keys, values = zip(*self.chunks, strict=True)
        return torch.cat(keys, dim=-2), torch.cat(values, dim=-2)


class Plus(nn.Module):
    """A part of a layer to follow by hand: adds a number to x, or to the context, if there is one."""

    def __init__(self, number: float):
        super().__init__()
        self.number = number

    def forward(self, x, context=None, mask=None, positions=None, cache=None) -> Tensor:
        return self.number + (x if context is None else context)


class Times(nn.Module):
    """A part of a layer to follow by hand: multiplies x by a number, or the context, if there is one."""

    def __init__(self, number: float):
        super().__init__()
        self.number = number

    def forward(self, x, context=None, mask=None, positions=None, cache=None) -> Tensor:
        return self.number * (x if context is None else context)


class ToyAttention(nn.Module):
    """Mixes tokens and is called as attention is. Its result tells whether an argument was given, and which."""

    def __init__(self, d_model: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in ("q", "k", "v"):
            values = torch.randn(d_model, d_model, generator=generator, dtype=torch.float64) / d_model**0.5
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, x, context=None, mask=None, positions=None, cache=None) -> Tensor:
        source = x if context is None else context
        if source.dtype == torch.bool:
            raise TypeError("attention got a mask where it expects a context: hand it on as mask=...")
        q, k, v = x @ self.q, source @ self.k, source @ self.v
        if positions is not None:
            q = q * torch.cos(positions + 1.0).to(q.dtype)[..., None]
        if cache is not None:
            k, v = (rows[:, 0] for rows in cache.append(k[:, None], v[:, None]))
        scores = torch.sin(q @ k.mT) if context is None else torch.cos(q @ k.mT)  # (B, T, S)
        if mask is not None:
            scores = scores * mask.expand(x.shape[0], 1, *scores.shape[1:])[:, 0]
        return scores @ v


class KeywordAttention(ToyAttention):
    """The same, but mask, positions and cache can only be given by keyword."""

    def forward(self, x, context=None, *, cache=None, positions=None, mask=None) -> Tensor:
        return super().forward(x, context, mask, positions, cache)


class TorchAttention(nn.Module):
    """torch's multi-head attention, called as this course calls its own: a mask is True where a query may look."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.theirs = nn.MultiheadAttention(d_model, n_heads, batch_first=True, dtype=torch.float64)

    def forward(self, x, context=None, mask=None, positions=None, cache=None) -> Tensor:
        source = x if context is None else context
        hidden = None if mask is None else ~mask
        return self.theirs(x, source, source, attn_mask=hidden, need_weights=False)[0]


class ModelCache:
    """All layers' views: what chapter 12's cache shows to a model."""

    def __init__(self, n_layers: int):
        self.layers = [LayerCache() for _ in range(n_layers)]

    def layer(self, i: int) -> LayerCache:
        """The view of layer i. Raises ValueError for a layer that is not there."""
        if not 0 <= i < len(self.layers):
            raise ValueError(f"layer {i} of a cache with {len(self.layers)} layers")
        return self.layers[i]

    @property
    def length(self) -> int:
        """How many tokens are complete in every layer."""
        return min(layer.length for layer in self.layers)

    def trim(self, length: int) -> None:
        """Forget all tokens after the first `length`, in every layer."""
        if length < 0:
            raise ValueError(f"length must be 0 or more, got {length}")
        for layer in self.layers:
            layer.trim(length)

    def reset(self) -> None:
        """Forget all tokens."""
        self.trim(0)
