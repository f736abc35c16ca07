"""GPT-2: learned positions, LayerNorm before each part, biases, a two-matrix MLP."""

import functools
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from tfmlib import blocks, heads
from tfmlib import positions as places
from tfmlib.models import shared


@dataclass(frozen=True, kw_only=True)
class GPTConfig(shared.Sizes):
    """The sizes of a GPT. `tied`: the head's weight is the token embedding's."""

    tied: bool = True
    norm_eps: float = 1e-5


class GPT(nn.Module):
    """A decoder like GPT-2: ids (B, T) -> logits (B, T, V).

    `token_embedding` + `position_embedding`, the `blocks` (pre-norm, LayerNorm, GELU's tanh form, biases), `norm`, and
    `head`, a linear layer without a bias that shares the token embedding's weight if `config.tied`. Starts with
    `init_weights`. `positions`, `mask` and `cache` are those of `decoder_inputs`; block i gets `cache.layer(i)`. Keeps
    its configuration as `config`; logits have the weights' dtype. Raises ValueError for a position beyond
    `config.context_length - 1`. Radford et al. (2019).
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config, C = config, config.d_model
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = nn.Embedding(config.context_length, C)
        self.blocks = nn.ModuleList(
            blocks.PreNormBlock(
                heads.MultiHeadAttention(C, config.n_heads, config.n_kv_heads, config.head_dim, bias=True),
                blocks.MLP(C, config.d_ff, activation=functools.partial(F.gelu, approximate="tanh")),
                blocks.LayerNorm(C, config.norm_eps),
                blocks.LayerNorm(C, config.norm_eps),
            )
            for _ in range(config.n_layers)
        )
        self.norm = blocks.LayerNorm(C, config.norm_eps)
        self.head = nn.Linear(C, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        shared.init_weights(self)

    def forward(self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache=None) -> Tensor:
        positions, visible = shared.decoder_inputs(ids, self.config.context_length, positions, mask, cache)
        x = places.embed(ids, self.token_embedding.weight)  # (B, T, C)
        x = x + places.embed(positions, self.position_embedding.weight)
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layer(i)
            x = block(x, mask=visible, positions=positions, cache=layer)
        return self.head(self.norm(x))  # (B, T, V)
