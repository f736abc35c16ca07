"""Llama: rotary positions, RMSNorm before each part, SwiGLU, grouped key heads, no biases."""

from dataclasses import dataclass

from torch import Tensor, nn

from tfmlib import blocks, heads
from tfmlib import positions as places
from tfmlib.models import shared


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(shared.Sizes):
    """The sizes of a Llama. `rope_base` sets its rotary angles; `tied`: the head's weight is the embedding's."""

    rope_base: float = 10_000.0
    tied: bool = False
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.d_ff is None:  # SwiGLU has three matrices: two thirds of 4C keep an MLP's parameters
            object.__setattr__(self, "d_ff", 8 * self.d_model // 3)
        super().__post_init__()


class Llama(nn.Module):
    """A decoder like Llama: ids (B, T) -> logits (B, T, V).

    `token_embedding`, the `blocks` (pre-norm, RMSNorm, rotary attention with K key heads, SwiGLU, no biases), `norm`,
    and `head`, a linear layer without a bias that shares the embedding's weight if `config.tied`. Starts with
    `init_weights`. `positions`, `mask` and `cache` are those of `decoder_inputs`; block i gets `cache.layer(i)`. Keeps
    its configuration as `config`; logits have the weights' dtype. Raises ValueError for a position beyond
    `config.context_length - 1`. Touvron et al. (2023).
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, C, base = config, config.d_model, config.rope_base
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.blocks = nn.ModuleList(
            blocks.PreNormBlock(
                heads.MultiHeadAttention(C, config.n_heads, config.n_kv_heads, config.head_dim, rope_base=base),
                blocks.SwiGLU(C, config.d_ff),
                blocks.RMSNorm(C, config.norm_eps),
                blocks.RMSNorm(C, config.norm_eps),
            )
            for _ in range(config.n_layers)
        )
        self.norm = blocks.RMSNorm(C, config.norm_eps)
        self.head = nn.Linear(C, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        shared.init_weights(self)

    def forward(self, ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None, cache=None) -> Tensor:
        positions, visible = shared.decoder_inputs(ids, self.config.context_length, positions, mask, cache)
        x = places.embed(ids, self.token_embedding.weight)  # (B, T, C)
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layer(i)
            x = block(x, mask=visible, positions=positions, cache=layer)
        return self.head(self.norm(x))  # (B, T, V)
