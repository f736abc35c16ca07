"""What the four models share: their sizes, how they start, and what a decoder makes of its inputs."""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from tfmlib import attention


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that every model has. Those left out are filled in; all are positive."""

    n_layers: int
    d_model: int  # C
    n_heads: int  # H
    vocab_size: int  # V
    context_length: int  # the most tokens in a sequence
    n_kv_heads: int | None = None  # K; n_heads if None
    head_dim: int | None = None  # D; d_model // n_heads if None
    d_ff: int | None = None  # F; 4 * d_model if None

    def __post_init__(self):
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} must divide into n_heads={self.n_heads}, or give head_dim")
        defaults = {"n_kv_heads": self.n_heads, "head_dim": self.d_model // self.n_heads, "d_ff": 4 * self.d_model}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in fields(Sizes):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")


def init_weights(model: nn.Module) -> None:
    """Give a model its first weights, in place: small, random, and smaller where a branch joins the residual stream.

    The weights of every nn.Linear and nn.Embedding are drawn from a normal distribution of mean 0 and standard
    deviation 0.02, those of a linear layer called `o_proj` or `down` of 0.02 / sqrt(number of such layers). Biases of
    linear layers are 0. Everything else stays as it is. Radford et al. (2019), section 2.3.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    ends = [module for name, module in linear.items() if name.split(".")[-1] in ("o_proj", "down")]
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02 / math.sqrt(len(ends)) if module in ends else 0.02
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)


def decoder_inputs(
    ids: Tensor, context_length: int, positions: Tensor | None = None, mask: Tensor | None = None, cache=None
) -> tuple[Tensor, Tensor]:
    """Where a decoder's new tokens stand and what they may see: ids (B, T) -> (positions, visible).

    `positions`, (T,) or (B, T), default to those that follow the `cache.length` tokens of the cache. `visible` is
    boolean, True where a token may look: at itself and what came before, the S = cache.length + T tokens that the cache
    will hold, (T, S); with a padding mask (B, 1, 1, S) only at tokens, (B, 1, T, S). Positions run from 0 to
    context_length - 1: beyond that a ValueError is raised.

    >>> decoder_inputs(torch.tensor([[7, 7]]), context_length=8)[0]
    tensor([0, 1])
    """
    T = ids.shape[1]
    start = 0 if cache is None else cache.length
    last = start + T - 1 if positions is None else int(positions.max())
    if last >= context_length:
        raise ValueError(f"position {last} is beyond {context_length=}: the last one is {context_length - 1}")
    if positions is None:
        positions = torch.arange(start, start + T, device=ids.device)
    visible = attention.causal_mask(T, start + T).to(ids.device)
    return positions, visible if mask is None else visible & mask
