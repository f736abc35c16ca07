"""A learner who has done a decoder's inputs and the encoder, and nothing else."""

import torch
from torch import nn

from tfmlib import attention, blocks, heads
from tfmlib.models import shared


def decoder_inputs(ids, context_length, positions=None, mask=None, cache=None):
    start = cache.length if cache is not None else 0
    S = start + ids.shape[1]
    if positions is None:
        positions = torch.arange(start, S)
    if positions.max() >= context_length:
        raise ValueError("the context is full")
    visible = attention.causal_mask(ids.shape[1], S)
    return positions, visible if mask is None else visible & mask


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        C, eps = config.d_model, config.norm_eps
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = nn.Embedding(config.context_length, C)
        self.segment_embedding = nn.Embedding(config.n_segments, C)
        self.norm = blocks.LayerNorm(C, eps)
        self.blocks = nn.ModuleList()
        for _ in range(config.n_layers):
            mha = heads.MultiHeadAttention(C, config.n_heads, config.n_kv_heads, config.head_dim, bias=True)
            mlp = blocks.MLP(C, config.d_ff)
            self.blocks.append(blocks.PostNormBlock(mha, mlp, blocks.LayerNorm(C, eps), blocks.LayerNorm(C, eps)))
        shared.init_weights(self)

    def forward(self, ids, is_token=None, segments=None):
        T = ids.shape[1]
        if self.config.context_length < T:
            raise ValueError("too long")
        if segments is None:
            segments = torch.zeros_like(ids)
        x = self.token_embedding(ids) + self.position_embedding.weight[:T] + self.segment_embedding(segments)
        x = self.norm(x)
        mask = None
        if is_token is not None:
            mask = attention.padding_mask(is_token)
        for block in self.blocks:
            x = block(x, mask)
        return x
