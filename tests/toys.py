"""Small stand-ins for parts of tfmlib that belong to other chapters, for the checks to hand to a piece."""

import torch
from torch import Tensor


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
