"""The encoder-decoder of 2017: one stack reads the source; another writes the target and reads what the first made."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from tfmlib import attention, blocks, heads
from tfmlib import positions as places
from tfmlib.models import shared


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(shared.Sizes):
    """The sizes of an encoder-decoder: `n_layers` in each of its two stacks, one vocabulary for both sides."""

    norm_eps: float = 1e-5


class Seq2Seq(nn.Module):
    """The transformer of 2017: source (B, S), target (B, T) -> logits (B, T, V) of each next target token.

    Tokens are `token_embedding` * sqrt(C) + sinusoidal positions, for both sides. `encoder` holds post-norm blocks in
    which every source token sees every other, `decoder` DecoderBlocks in which a target token sees itself and those
    before it, and every token of the encoded source. All with LayerNorm, ReLU and biases, and without a last norm.
    `head` has no bias and shares the embedding's weight. Padding is hidden as a key where `source_is_token` (B, S) or
    `target_is_token` (B, T) is False. Starts with `init_weights`. Logits have the weights' dtype.
    Raises ValueError for more than `config.context_length` tokens on a side. Vaswani et al. (2017).
    """

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        self.config, C, eps = config, config.d_model, config.norm_eps

        def attend() -> nn.Module:
            return heads.MultiHeadAttention(C, config.n_heads, config.n_kv_heads, config.head_dim, bias=True)

        def mlp() -> nn.Module:
            return blocks.MLP(C, config.d_ff, activation=F.relu)

        def norms(n: int) -> list[nn.Module]:
            return [blocks.LayerNorm(C, eps) for _ in range(n)]

        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.encoder = nn.ModuleList(blocks.PostNormBlock(attend(), mlp(), *norms(2)) for _ in range(config.n_layers))
        self.decoder = nn.ModuleList(
            blocks.DecoderBlock(attend(), attend(), mlp(), *norms(3)) for _ in range(config.n_layers)
        )
        self.head = nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        shared.init_weights(self)

    def _embed(self, ids: Tensor) -> Tensor:
        T, C = ids.shape[1], self.config.d_model
        if self.config.context_length < T:
            raise ValueError(f"{T} tokens are more than context_length={self.config.context_length}: cut the text")
        x = places.embed(ids, self.token_embedding.weight) * math.sqrt(C)  # (B, T, C)
        return x + places.sinusoidal(T, C).to(x)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_is_token: Tensor | None = None,
        target_is_token: Tensor | None = None,
    ) -> Tensor:
        source_mask = None if source_is_token is None else attention.padding_mask(source_is_token)  # (B, 1, 1, S)
        memory = self._embed(source)
        for block in self.encoder:
            memory = block(memory, mask=source_mask)  # (B, S, C)
        target_mask = attention.causal_mask(target.shape[1]).to(target.device)
        if target_is_token is not None:
            target_mask = target_mask & attention.padding_mask(target_is_token)  # (B, 1, T, T)
        x = self._embed(target)
        for block in self.decoder:
            x = block(x, context=memory, mask=target_mask, context_mask=source_mask)
        return self.head(x)  # (B, T, V)
