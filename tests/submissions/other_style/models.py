"""A learner whose code is right, in another style, and noisy: hardly anything of tfmlib, and prints."""

import math
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn

print("lab 06", file=sys.stderr)


def init_weights(model):
    warnings.warn("weights are drawn anew", UserWarning, stacklevel=2)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    ends = {name for name, m in layers.items() if isinstance(m, nn.Linear) and name.rpartition(".")[2] in ENDS}
    with torch.no_grad():
        for name, layer in layers.items():
            layer.weight.copy_(torch.randn_like(layer.weight) * 0.02)
            if name in ends:
                layer.weight /= len(ends) ** 0.5
            if getattr(layer, "bias", None) is not None:
                layer.bias.zero_()


ENDS = ("o_proj", "down")


def decoder_inputs(ids, context_length, positions=None, mask=None, cache=None):
    print("decoder_inputs of", tuple(ids.shape), file=sys.stderr)
    old = cache.length if cache is not None else 0
    new = ids.size(1)
    if positions is None:
        positions = torch.tensor(list(range(old, old + new)))
    highest = max(positions.reshape(-1).tolist())
    if not highest < context_length:
        raise ValueError(f"{highest} >= {context_length}")
    keys, queries = torch.arange(old + new), torch.arange(old, old + new)
    visible = (queries.unsqueeze(1) >= keys.unsqueeze(0)).view(1, 1, new, old + new)
    return positions, visible * mask if mask is not None else visible


class Attention(nn.Module):
    def __init__(self, c, bias):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.d_model, c.n_heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=bias)

    def forward(self, x, memory=None, seen=None, turn=lambda y: y, view=None):
        memory = x if memory is None else memory
        q = turn(rearrange(self.q_proj(x), self.c.n_heads))
        k, v = (
            turn(rearrange(self.k_proj(memory), self.c.n_kv_heads)),
            rearrange(self.v_proj(memory), self.c.n_kv_heads),
        )
        if view is not None:
            k, v = view.append(k, v)
        copies = self.c.n_heads // self.c.n_kv_heads
        k, v = (y.repeat_interleave(copies, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(torch.cat(y.unbind(1), dim=-1))


def rearrange(x, n):
    return torch.stack(x.chunk(n, dim=-1), dim=1)


class TwoMatrices(nn.Module):
    def __init__(self, c, activation):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model), activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


class ThreeMatrices(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.gate = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x):
        return self.down(self.up(x) * F.silu(self.gate(x)))


class Layer(nn.Module):
    """Any layer: attentions by name, an MLP, and a norm for each."""

    def __init__(self, attentions, mlp, norms, first):
        super().__init__()
        for name, attention in attentions.items():
            self.add_module(name, attention)
        self.mlp, self.first, self.parts = mlp, first, [*attentions, "mlp"]
        for i, norm in enumerate(norms, start=1):
            self.add_module(f"norm{i}", norm)

    def forward(self, x, **arguments):
        for i, part in enumerate(self.parts, start=1):
            module, norm = getattr(self, part), getattr(self, f"norm{i}")
            given = arguments.get(part, {})
            x = x + module(norm(x), **given) if self.first else norm(x + module(x, **given))
        return x


def norms(c, n, kind=nn.LayerNorm):
    return [kind(c.d_model, eps=c.norm_eps) for _ in range(n)]


def decode(model, ids, positions, mask, cache, start):
    positions, seen = decoder_inputs(ids, model.config.context_length, positions, mask, cache)
    x, turn = start(positions)
    for i, layer in enumerate(model.blocks):
        x = layer(x, attention={"seen": seen, "turn": turn, "view": cache.layer(i) if cache is not None else None})
    return model.head(model.norm(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.tied:
            self.token_embedding.weight = self.head.weight
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        self.norm = norms(config, 1)[0]
        self.blocks = nn.ModuleList()
        while len(self.blocks) < config.n_layers:
            mlp = TwoMatrices(config, nn.GELU(approximate="tanh"))
            self.blocks.append(Layer({"attention": Attention(config, True)}, mlp, norms(config, 2), first=True))
        init_weights(self)

    def forward(self, ids, positions=None, mask=None, cache=None):
        def start(positions):
            return self.token_embedding(ids) + self.position_embedding(positions), lambda y: y

        return decode(self, ids, positions, mask, cache, start)


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.norm = norms(config, 1, nn.RMSNorm)[0]
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight
        self.blocks = nn.ModuleList()
        while len(self.blocks) < config.n_layers:
            attention, two = {"attention": Attention(config, False)}, norms(config, 2, nn.RMSNorm)
            self.blocks.append(Layer(attention, ThreeMatrices(config), two, first=True))
        init_weights(self)

    def forward(self, ids, positions=None, mask=None, cache=None):
        def start(positions):
            D = self.config.head_dim
            angle = positions.unsqueeze(-1) / self.config.rope_base ** (torch.arange(0, D, 2) / D)
            angle = angle.unsqueeze(-3)

            def turn(y):
                a, b = y[..., : D // 2], y[..., D // 2 :]
                cos, sin = angle.cos().to(y.dtype), angle.sin().to(y.dtype)
                return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

            return self.token_embedding(ids), turn

        return decode(self, ids, positions, mask, cache, start)


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        self.segment_embedding = nn.Embedding(config.n_segments, config.d_model)
        self.norm = norms(config, 1)[0]
        self.blocks = nn.ModuleList()
        while len(self.blocks) < config.n_layers:
            mlp = TwoMatrices(config, F.gelu)
            self.blocks.append(Layer({"attention": Attention(config, True)}, mlp, norms(config, 2), first=False))
        init_weights(self)

    def forward(self, ids, is_token=None, segments=None):
        warnings.warn("reading both ways", RuntimeWarning, stacklevel=2)
        if ids.shape[1] > len(self.position_embedding.weight):
            raise ValueError("too long")
        segment = self.segment_embedding.weight[0] if segments is None else self.segment_embedding(segments)
        x = self.norm(self.token_embedding(ids) + segment + self.position_embedding.weight[: ids.shape[1]])
        seen = is_token[:, None, None] if is_token is not None else None
        for layer in self.blocks:
            x = layer(x, attention={"seen": seen})
        return x


class Seq2Seq(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.token_embedding.weight = self.head.weight
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        while len(self.encoder) < config.n_layers:
            reads = {"attention": Attention(config, True)}
            writes = {"self_attention": Attention(config, True), "cross_attention": Attention(config, True)}
            self.encoder.append(Layer(reads, TwoMatrices(config, torch.relu), norms(config, 2), first=False))
            self.decoder.append(Layer(writes, TwoMatrices(config, torch.relu), norms(config, 3), first=False))
        init_weights(self)

    def embed(self, ids):
        T, C = ids.size(1), self.config.d_model
        if self.config.context_length < T:
            raise ValueError("too long")
        x = self.token_embedding(ids) * math.sqrt(C)
        angle = torch.arange(T).unsqueeze(1) / 10_000 ** (torch.arange(0, C, 2) / C)
        table = torch.zeros(T, C)
        table[:, ::2], table[:, 1::2] = angle.sin(), angle.cos()
        return x + table.to(x.dtype)

    def forward(self, source, target, source_is_token=None, target_is_token=None):
        seen = source_is_token[:, None, None] if source_is_token is not None else None
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, attention={"seen": seen})
        own = decoder_inputs(target, target.size(1), mask=None)[1]
        if target_is_token is not None:
            own = own & target_is_token[:, None, None]
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, self_attention={"seen": own}, cross_attention={"memory": memory, "seen": seen})
        return self.head(x)
