"""A learner who hides source padding in the encoder, not in the cross-attention, and has everything else right."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tfmlib import attention, blocks, heads
from tfmlib import positions as places


def init_weights(model):
    ends = [m for name, m in model.named_modules() if name.split(".")[-1] in ("o_proj", "down")]
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            std = 0.02 / math.sqrt(len(ends)) if module in ends else 0.02
            nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def decoder_inputs(ids, context_length, positions=None, mask=None, cache=None):
    start = 0 if cache is None else cache.length
    T = ids.shape[1]
    if positions is None:
        positions = torch.arange(start, start + T)
    if positions.max().item() >= context_length:
        raise ValueError(f"positions end at {context_length - 1}")
    visible = attention.causal_mask(T, start + T)
    if mask is not None:
        visible = visible & mask
    return positions, visible


def self_attention(c, **options):
    return heads.MultiHeadAttention(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, **options)


def layer_norms(c, n):
    return [blocks.LayerNorm(c.d_model, c.norm_eps) for _ in range(n)]


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        layers = []
        for _ in range(config.n_layers):
            mlp = blocks.MLP(config.d_model, config.d_ff, activation=gelu_tanh)
            layers.append(blocks.PreNormBlock(self_attention(config, bias=True), mlp, *layer_norms(config, 2)))
        self.blocks = nn.ModuleList(layers)
        self.norm = layer_norms(config, 1)[0]
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        init_weights(self)

    def forward(self, ids, positions=None, mask=None, cache=None):
        positions, visible = decoder_inputs(ids, self.config.context_length, positions, mask, cache)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, mask=visible, positions=positions, cache=cache.layer(i) if cache is not None else None)
        return self.head(self.norm(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        C, eps = config.d_model, config.norm_eps
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        layers = []
        for _ in range(config.n_layers):
            mha, mlp = self_attention(config, rope_base=config.rope_base), blocks.SwiGLU(C, config.d_ff)
            layers.append(blocks.PreNormBlock(mha, mlp, blocks.RMSNorm(C, eps), blocks.RMSNorm(C, eps)))
        self.blocks = nn.ModuleList(layers)
        self.norm = blocks.RMSNorm(C, eps)
        self.head = nn.Linear(C, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        init_weights(self)

    def forward(self, ids, positions=None, mask=None, cache=None):
        positions, visible = decoder_inputs(ids, self.config.context_length, positions, mask, cache)
        x = self.token_embedding(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, mask=visible, positions=positions, cache=cache.layer(i) if cache is not None else None)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.d_model
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = nn.Embedding(config.context_length, C)
        self.segment_embedding = nn.Embedding(config.n_segments, C)
        self.norm = layer_norms(config, 1)[0]
        self.blocks = nn.ModuleList(
            blocks.PostNormBlock(self_attention(config, bias=True), blocks.MLP(C, config.d_ff), *layer_norms(config, 2))
            for _ in range(config.n_layers)
        )
        init_weights(self)

    def forward(self, ids, is_token=None, segments=None):
        T = ids.shape[1]
        if self.config.context_length < T:
            raise ValueError(f"at most {self.config.context_length} tokens")
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(T))
        x = x + self.segment_embedding(ids * 0 if segments is None else segments)
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask=None if is_token is None else attention.padding_mask(is_token))
        return x


class Seq2Seq(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, C, n = config, config.d_model, range(config.n_layers)

        def attend():
            return self_attention(config, bias=True)

        def mlp():
            return blocks.MLP(C, config.d_ff, activation=F.relu)

        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.encoder = nn.ModuleList(blocks.PostNormBlock(attend(), mlp(), *layer_norms(config, 2)) for _ in n)
        self.decoder = nn.ModuleList(blocks.DecoderBlock(attend(), attend(), mlp(), *layer_norms(config, 3)) for _ in n)
        self.head = nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        init_weights(self)

    def embed(self, ids):
        T, C = ids.shape[1], self.config.d_model
        if self.config.context_length < T:
            raise ValueError(f"at most {self.config.context_length} tokens")
        x = self.token_embedding(ids) * math.sqrt(C)
        return x + places.sinusoidal(T, C).to(x.dtype)

    def forward(self, source, target, source_is_token=None, target_is_token=None):
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory, mask=None if source_is_token is None else attention.padding_mask(source_is_token))
        mask = attention.causal_mask(target.shape[1])
        if target_is_token is not None:
            mask = mask & attention.padding_mask(target_is_token)
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, memory, mask)
        return self.head(x)
