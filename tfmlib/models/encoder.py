"""A BERT-style encoder: every token sees every token, and comes out as a vector."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tfmlib import attention, blocks, heads
from tfmlib import positions as places
from tfmlib.models import shared


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(shared.Sizes):
    """The sizes of an encoder. `n_segments`: how many kinds of text a sequence may join, two in BERT."""

    n_segments: int = 2
    norm_eps: float = 1e-12  # BERT's


class Encoder(nn.Module):
    """An encoder like BERT: ids (B, T) -> a vector for each token (B, T, C).

    `norm` of `token_embedding` + `position_embedding` + `segment_embedding`, then the `blocks` (post-norm, LayerNorm,
    exact GELU, biases). No token is hidden from another but padding: `is_token` (B, T) is True for tokens, all if None.
    `segments` (B, T) are all 0 if None. Starts with `init_weights`. The result has the weights' dtype. Raises
    ValueError for more than `config.context_length` tokens. Devlin et al. (2019).
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config, C = config, config.d_model
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = nn.Embedding(config.context_length, C)
        self.segment_embedding = nn.Embedding(config.n_segments, C)
        self.norm = blocks.LayerNorm(C, config.norm_eps)
        self.blocks = nn.ModuleList(
            blocks.PostNormBlock(
                heads.MultiHeadAttention(C, config.n_heads, config.n_kv_heads, config.head_dim, bias=True),
                blocks.MLP(C, config.d_ff),
                blocks.LayerNorm(C, config.norm_eps),
                blocks.LayerNorm(C, config.norm_eps),
            )
            for _ in range(config.n_layers)
        )
        shared.init_weights(self)

    def forward(self, ids: Tensor, is_token: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        T = ids.shape[1]
        if self.config.context_length < T:
            raise ValueError(f"{T} tokens are more than context_length={self.config.context_length}: cut the text")
        segments = torch.zeros_like(ids) if segments is None else segments
        x = places.embed(ids, self.token_embedding.weight)  # (B, T, C)
        x = x + places.embed(torch.arange(T, device=ids.device), self.position_embedding.weight)
        x = self.norm(x + places.embed(segments, self.segment_embedding.weight))
        mask = None if is_token is None else attention.padding_mask(is_token)  # (B, 1, 1, T)
        for block in self.blocks:
            x = block(x, mask=mask)
        return x
