"""Other correct models, first weights and decoder's inputs.

Each model comes three times: assembled from the parts of tfmlib in another way, written with torch alone, and as
functions of parameters that are kept by name.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tfmlib import attention, blocks, heads
from tfmlib import positions as places
from tfmlib.models import shared

from . import correct

# init_weights --------------------------------------------------------------------------------------------------------


@correct("init_weights")
def init_by_apply(model):
    """A function applied to every module, which looks its own name up."""
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    ends = [i for i, name in names.items() if name in {"o_proj", "down"}]

    def start(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02 * len(ends) ** -0.5 if id(module) in ends else 0.02
            module.weight.data.normal_(0.0, std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    model.apply(start)


@correct("init_weights")
@torch.no_grad()
def init_by_parameter_names(model):
    """A walk over the parameters' names, with the owner of each."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name, _ in model.named_parameters()}
    ends = [name for name, owner in owners.items() if isinstance(owner, nn.Linear) and _is_end(name)]
    for name, p in model.named_parameters():
        if not isinstance(owners[name], (nn.Linear, nn.Embedding)):
            continue
        if name.endswith("bias"):
            p.fill_(0)
        else:
            p.copy_(0.02 * torch.randn(p.shape, dtype=p.dtype) / (len(ends) ** 0.5 if name in ends else 1.0))


def _is_end(name):
    parts = ["", *name.split(".")]
    return parts[-1] == "weight" and parts[-2] in ("o_proj", "down")


@correct("init_weights")
def init_in_two_passes(model):
    """Everything alike first, then the ends of branches are made smaller."""
    found = []

    def walk(module, name):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                torch.nn.init.constant_(module.bias, 0.0)
            if name in ("o_proj", "down"):
                found.append(module.weight)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, 0.0, 0.02)
        for own, child in module.named_children():
            walk(child, own)

    walk(model, "")
    with torch.no_grad():
        for weight in found:
            weight.div_(math.sqrt(len(found)))
    return model


# decoder_inputs ------------------------------------------------------------------------------------------------------


@correct("decoder_inputs")
def inputs_by_comparison(ids, context_length, positions=None, mask=None, cache=None):
    """Each key's place is compared with each query's; all four axes are there from the start."""
    held = cache.length if cache is not None else 0
    query = torch.arange(held, held + ids.shape[1])
    positions = query if positions is None else positions
    if (positions >= context_length).any():
        raise ValueError("too far")
    visible = torch.arange(held + ids.shape[1]) <= query[:, None]
    visible = visible[None, None]
    return positions, visible if mask is None else torch.logical_and(visible, mask)


@correct("decoder_inputs")
def inputs_row_by_row(ids, context_length, positions=None, mask=None, cache=None):
    """Plain lists of the rows; a position for each token of each sequence."""
    (B, T), start = ids.shape, getattr(cache, "length", 0)
    if positions is None:
        positions = torch.tensor([[start + t for t in range(T)] for _ in range(B)])
    if max(positions.flatten().tolist()) > context_length - 1:
        raise ValueError(f"there are {context_length} positions")
    rows = [[s <= start + t for s in range(start + T)] for t in range(T)]
    visible = torch.tensor(rows)
    if mask is not None:
        visible = torch.where(mask, visible, torch.zeros((), dtype=torch.bool))
    return positions, visible


@correct("decoder_inputs")
def inputs_by_triangle(ids, context_length, positions=None, mask=None, cache=None):
    """What is hidden, upside down."""
    T = ids.size(1)
    S = T if cache is None else T + cache.length
    if positions is None:
        positions = torch.arange(S)[-T:]
    if positions.amax() >= context_length:
        raise ValueError("beyond the context")
    hidden = torch.ones(T, S).triu(1 + S - T).bool()
    if mask is not None:
        hidden = hidden | mask.logical_not()
    return positions, ~hidden


# Parts of the models that are written with torch alone ----------------------------------------------------------------


class _PlainAttention(nn.Module):
    """torch's attention between four projections; `turn` rotates queries and keys."""

    def __init__(self, c, bias):
        super().__init__()
        self.D = c.head_dim
        self.groups = c.n_heads != c.n_kv_heads
        self.q_proj = nn.Linear(c.d_model, c.n_heads * c.head_dim, bias)
        self.k_proj = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, bias)
        self.v_proj = nn.Linear(c.d_model, c.n_kv_heads * c.head_dim, bias)
        self.o_proj = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias)

    def forward(self, x, memory=None, mask=None, turn=None, view=None):
        memory = x if memory is None else memory
        q, k, v = self.q_proj(x), self.k_proj(memory), self.v_proj(memory)
        q, k, v = (y.view(*y.shape[:2], -1, self.D).transpose(1, 2) for y in (q, k, v))
        if turn is not None:
            q, k = turn(q), turn(k)
        if view is not None:
            k, v = view.append(k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self.groups)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class _PlainMLP(nn.Sequential):
    def __init__(self, c, activation):
        super().__init__()
        self.add_module("up", nn.Linear(c.d_model, c.d_ff))
        self.add_module("activation", activation)
        self.add_module("down", nn.Linear(c.d_ff, c.d_model))


def _plain_init(model, count):
    for name, p in model.named_parameters():
        if "norm" in name:
            continue
        if name.endswith(".bias"):
            nn.init.zeros_(p)
        else:
            end = name.endswith(("o_proj.weight", "down.weight"))
            nn.init.normal_(p, std=0.02 / math.sqrt(count) if end else 0.02)


class _PlainBlock(nn.Module):
    def __init__(self, c, activation, post):
        super().__init__()
        self.attention, self.mlp, self.post = _PlainAttention(c, True), _PlainMLP(c, activation), post
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model, c.norm_eps), nn.LayerNorm(c.d_model, c.norm_eps)

    def forward(self, x, mask, view=None):
        if self.post:
            x = self.norm1(x + self.attention(x, mask=mask))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x), mask=mask, view=view)
        return x + self.mlp(self.norm2(x))


# GPT -----------------------------------------------------------------------------------------------------------------


@correct("GPT")
class PlainGPT(nn.Module):
    """torch alone, with the whole causal triangle kept in a buffer."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        tanh = nn.GELU(approximate="tanh")
        self.blocks = nn.ModuleList([_PlainBlock(config, tanh, post=False) for _ in range(config.n_layers)])
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        L = config.context_length
        self.register_buffer("triangle", torch.tril(torch.ones(L, L, dtype=torch.bool)))
        _plain_init(self, 2 * config.n_layers)
        if config.tied:
            self.token_embedding.weight = self.head.weight

    def forward(self, ids, positions=None, mask=None, cache=None):
        start = cache.length if cache is not None else 0
        end = start + ids.size(1)
        if positions is None:
            positions = torch.arange(start, end, device=ids.device)
        if positions.max() >= self.config.context_length:
            raise ValueError(f"cannot go beyond position {self.config.context_length - 1}")
        seen = self.triangle[start:end, :end]
        if mask is not None:
            seen = seen & mask
        x = self.token_embedding(ids) + self.position_embedding(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, seen, cache.layer(i) if cache is not None else None)
        return self.head(self.norm(x))


@correct("GPT")
class AssembledGPT(nn.Module):
    """tfmlib's parts, made and joined by helpers; the head is made first."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.norm = blocks.LayerNorm(config.d_model, eps=config.norm_eps)
        self.blocks = nn.Sequential()
        for i in range(config.n_layers):
            self.blocks.add_module(str(i), self._block())
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = nn.Embedding(config.context_length, config.d_model)
        if config.tied:
            self.token_embedding.weight = self.head.weight
        shared.init_weights(self)

    def _block(self):
        c = self.config
        return blocks.PreNormBlock(
            attention=heads.MultiHeadAttention(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, True),
            mlp=blocks.MLP(c.d_model, c.d_ff, activation=lambda x: F.gelu(x, approximate="tanh")),
            norm1=blocks.LayerNorm(c.d_model, c.norm_eps),
            norm2=blocks.LayerNorm(c.d_model, c.norm_eps),
        )

    def forward(self, ids, positions=None, mask=None, cache=None):
        place, seen = shared.decoder_inputs(ids, self.config.context_length, positions, mask, cache)
        views = [None] * self.config.n_layers if cache is None else map(cache.layer, range(self.config.n_layers))
        x = self.token_embedding(ids) + self.position_embedding(place)
        for block, view in zip(self.blocks, views, strict=True):
            x = block(x, seen, cache=view)
        return F.linear(self.norm(x), self.head.weight)


class _ByName(nn.Module):
    """Parameters by dotted name, and functions that use them."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def table(self, name, rows):
        self._put(f"{name}.weight", 0.02 * torch.randn(rows, self.config.d_model))

    def linear(self, name, out, into, bias=True, std=0.02):
        self._put(f"{name}.weight", std * torch.randn(out, into))
        if bias:
            self._put(f"{name}.bias", torch.zeros(out))

    def norm_parameters(self, name, bias=True):
        self._put(f"{name}.weight", torch.ones(self.config.d_model))
        if bias:
            self._put(f"{name}.bias", torch.zeros(self.config.d_model))

    def attention_parameters(self, name, std, bias=True):
        c = self.config
        for part, n in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads)):
            self.linear(f"{name}.{part}_proj", n * c.head_dim, c.d_model, bias)
        self.linear(f"{name}.o_proj", c.d_model, c.n_heads * c.head_dim, bias, std)

    def mlp_parameters(self, name, std, bias=True):
        self.linear(f"{name}.up", self.config.d_ff, self.config.d_model, bias)
        self.linear(f"{name}.down", self.config.d_model, self.config.d_ff, bias, std)

    def _put(self, name, value):
        *path, last = name.split(".")
        at = self
        for step in path:
            if step not in dict(at.named_children()):
                at.add_module(step, nn.Module())
            at = at.get_submodule(step)
        at.register_parameter(last, nn.Parameter(value))

    def weight(self, name):
        return self.get_parameter(f"{name}.weight")

    def bias(self, name):
        return dict(self.named_parameters()).get(f"{name}.bias")

    def project(self, name, x):
        y = torch.einsum("bti,oi->bto", x, self.weight(name))
        return y if self.bias(name) is None else y + self.bias(name)

    def layer_norm(self, name, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
        return (x - mean) / (variance + self.config.norm_eps).sqrt() * self.weight(name) + self.bias(name)

    def attend(self, name, x, memory, seen, turn=None, view=None):
        c = self.config
        q = self.project(f"{name}.q_proj", x).unflatten(-1, (c.n_heads, -1)).transpose(1, 2)
        k = self.project(f"{name}.k_proj", memory).unflatten(-1, (c.n_kv_heads, -1)).transpose(1, 2)
        v = self.project(f"{name}.v_proj", memory).unflatten(-1, (c.n_kv_heads, -1)).transpose(1, 2)
        if turn is not None:
            q, k = turn(q), turn(k)
        if view is not None:
            k, v = view.append(k, v)
        outs = []
        for h in range(c.n_heads):
            g = h * c.n_kv_heads // c.n_heads
            scores = q[:, h] @ k[:, g].transpose(1, 2) * c.head_dim**-0.5  # (B, T, S)
            if seen is not None:
                scores = scores.masked_fill(~seen.expand(*seen.shape[:-2], *scores.shape[-2:]).squeeze(1), -1e30)
            outs.append(scores.softmax(-1) @ v[:, g])
        return self.project(f"{name}.o_proj", torch.cat(outs, -1))

    def mlp(self, name, x, activation):
        return self.project(f"{name}.down", activation(self.project(f"{name}.up", x)))


def _triangle(ids, mask, cache):
    """(B or 1, 1, T, S): the past, without padding."""
    T = ids.shape[1]
    S = T + (cache.length if cache is not None else 0)
    seen = (torch.arange(S)[None] <= torch.arange(S - T, S)[:, None])[None, None]
    return seen if mask is None else seen & mask


def _gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@correct("GPT")
class FunctionalGPT(_ByName):
    """Parameters by name, one head at a time; positions as a product with one-hot rows."""

    def __init__(self, config):
        super().__init__(config)
        std = 0.02 / math.sqrt(2 * config.n_layers)
        self.table("token_embedding", config.vocab_size)
        self.table("position_embedding", config.context_length)
        for i in range(config.n_layers):
            self.attention_parameters(f"blocks.{i}.attention", std)
            self.mlp_parameters(f"blocks.{i}.mlp", std)
            self.norm_parameters(f"blocks.{i}.norm1")
            self.norm_parameters(f"blocks.{i}.norm2")
        self.norm_parameters("norm")
        self.linear("head", config.vocab_size, config.d_model, bias=False)
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, ids, positions=None, mask=None, cache=None):
        seen = _triangle(ids, mask, cache)
        if positions is None:
            positions = torch.arange(seen.shape[-1])[-ids.shape[1] :]
        if positions.max() > self.config.context_length - 1:
            raise ValueError(f"position {positions.max()}")
        rows = F.one_hot(positions, self.config.context_length).to(self.weight("position_embedding"))
        x = self.weight("token_embedding")[ids] + rows @ self.weight("position_embedding")
        for i in range(self.config.n_layers):
            view = cache.layer(i) if cache is not None else None
            y = self.layer_norm(f"blocks.{i}.norm1", x)
            x = x + self.attend(f"blocks.{i}.attention", y, y, seen, view=view)
            x = x + self.mlp(f"blocks.{i}.mlp", self.layer_norm(f"blocks.{i}.norm2", x), _gelu_tanh)
        return self.layer_norm("norm", x) @ self.weight("head").T


# Llama ---------------------------------------------------------------------------------------------------------------


class _PlainLlamaBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = _PlainAttention(c, False)
        sizes = {"gate": (c.d_model, c.d_ff), "up": (c.d_model, c.d_ff), "down": (c.d_ff, c.d_model)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.norm1, self.norm2 = nn.RMSNorm(c.d_model, c.norm_eps), nn.RMSNorm(c.d_model, c.norm_eps)

    def forward(self, x, mask, turn, view):
        x = x + self.attention(self.norm1(x), mask=mask, turn=turn, view=view)
        y = self.norm2(x)
        return x + self.mlp["down"](self.mlp["up"](y) * F.silu(self.mlp["gate"](y)))


@correct("Llama")
class PlainLlama(nn.Module):
    """torch alone; all turns of the context are made once, as complex numbers, as in Llama's published code."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.token_embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(_PlainLlamaBlock(c) for _ in range(c.n_layers))
        self.norm = nn.RMSNorm(c.d_model, c.norm_eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        frequency = 1.0 / c.rope_base ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        angle = torch.outer(torch.arange(c.context_length).float(), frequency)
        self.register_buffer("turns", torch.polar(torch.ones_like(angle), angle), persistent=False)
        _plain_init(self, 2 * c.n_layers)
        if c.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, ids, positions=None, mask=None, cache=None):
        seen = _triangle(ids, mask, cache)
        if positions is None:
            positions = torch.arange(seen.shape[-1] - ids.shape[1], seen.shape[-1])
        if int(positions.max()) >= len(self.turns):
            raise ValueError("the context is full")
        turns = self.turns[positions]
        turns = turns.unsqueeze(1) if positions.ndim == 2 else turns

        def turn(x):
            z = torch.complex(*x.float().chunk(2, dim=-1)) * turns
            return torch.cat((z.real, z.imag), dim=-1).type_as(x)

        x = self.token_embedding(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, seen, turn, None if cache is None else cache.layer(i))
        return self.head(self.norm(x))


@correct("Llama")
class AssembledLlama(nn.Module):
    """tfmlib's parts; every argument is passed on by keyword, the logits are a plain product."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList()
        for _ in range(config.n_layers):
            self.blocks.append(blocks.PreNormBlock(**self._parts()))
        self.norm = blocks.RMSNorm(d_model=config.d_model, eps=config.norm_eps)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        shared.init_weights(self)
        if config.tied:
            del self.head.weight
            self.head.weight = self.token_embedding.weight

    def _parts(self):
        c = self.config
        mha = heads.MultiHeadAttention(
            c.d_model, c.n_heads, n_kv_heads=c.n_kv_heads, head_dim=c.head_dim, rope_base=c.rope_base
        )
        norms = {name: blocks.RMSNorm(c.d_model, c.norm_eps) for name in ("norm1", "norm2")}
        return {"attention": mha, "mlp": blocks.SwiGLU(c.d_model, c.d_ff), **norms}

    def forward(self, ids, positions=None, mask=None, cache=None):
        options = {"context_length": self.config.context_length, "positions": positions, "mask": mask, "cache": cache}
        where, seen = shared.decoder_inputs(ids, **options)
        x = places.embed(ids, self.token_embedding.weight)
        for i in range(self.config.n_layers):
            own = {} if cache is None else {"cache": cache.layer(i)}
            x = self.blocks[i](x, mask=seen, positions=where, **own)
        return self.norm(x) @ self.head.weight.mT


@correct("Llama")
class FunctionalLlama(_ByName):
    """Parameters by name; rotation by cos, sin and a half-turned copy, as in transformers."""

    def __init__(self, config):
        super().__init__(config)
        std = 0.02 / math.sqrt(2 * config.n_layers)
        self.table("token_embedding", config.vocab_size)
        for i in range(config.n_layers):
            self.norm_parameters(f"blocks.{i}.norm1", bias=False)
            self.attention_parameters(f"blocks.{i}.attention", std, bias=False)
            self.norm_parameters(f"blocks.{i}.norm2", bias=False)
            self.mlp_parameters(f"blocks.{i}.mlp", std, bias=False)
            self.linear(f"blocks.{i}.mlp.gate", config.d_ff, config.d_model, bias=False)
        self.norm_parameters("norm", bias=False)
        self.linear("head", config.vocab_size, config.d_model, bias=False)
        if config.tied:
            self.head.register_parameter("weight", self.token_embedding.weight)

    def rms_norm(self, name, x):
        return self.weight(name) * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)

    def forward(self, ids, positions=None, mask=None, cache=None):
        c, seen = self.config, _triangle(ids, mask, cache)
        if positions is None:
            positions = torch.arange(seen.shape[-1])[-ids.shape[1] :]
        if bool((positions >= c.context_length).any()):
            raise ValueError("no such position")
        angle = positions[..., None] * c.rope_base ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.cat([angle, angle], dim=-1)
        angle = angle[:, None] if positions.ndim == 2 else angle

        def turn(x):
            half = x.shape[-1] // 2
            other = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
            return x * angle.cos().to(x.dtype) + other * angle.sin().to(x.dtype)

        x = self.weight("token_embedding")[ids]
        for i in range(c.n_layers):
            view = None if cache is None else cache.layer(i)
            y = self.rms_norm(f"blocks.{i}.norm1", x)
            x = x + self.attend(f"blocks.{i}.attention", y, y, seen, turn, view)
            y, mlp = self.rms_norm(f"blocks.{i}.norm2", x), f"blocks.{i}.mlp"
            gate = self.project(f"{mlp}.gate", y)
            x = x + self.project(f"{mlp}.down", gate * torch.sigmoid(gate) * self.project(f"{mlp}.up", y))
        return self.rms_norm("norm", x) @ self.weight("head").T


# Encoder -------------------------------------------------------------------------------------------------------------


@correct("Encoder")
class PlainEncoder(nn.Module):
    """torch alone."""

    def __init__(self, config):
        super().__init__()
        C, self.longest = config.d_model, config.context_length
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = nn.Embedding(config.context_length, C)
        self.segment_embedding = nn.Embedding(config.n_segments, C)
        self.norm = nn.LayerNorm(C, eps=config.norm_eps)
        self.blocks = nn.ModuleList([_PlainBlock(config, nn.GELU(), post=True) for _ in range(config.n_layers)])
        _plain_init(self, 2 * config.n_layers)

    def forward(self, ids, is_token=None, segments=None):
        T = ids.size(1)
        if self.longest < T:
            raise ValueError("too long")
        x = self.token_embedding(ids) + self.position_embedding.weight[:T]
        x = x + (self.segment_embedding.weight[0] if segments is None else self.segment_embedding(segments))
        x = self.norm(x)
        mask = None if is_token is None else is_token[:, None, None, :].expand(-1, 1, T, -1)
        for block in self.blocks:
            x = block(x, mask)
        return x


@correct("Encoder")
class AssembledEncoder(nn.Module):
    """tfmlib's parts; the rows of all three tables are summed at once, and a missing mask is one that shows all."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        rows = {"token": c.vocab_size, "position": c.context_length, "segment": c.n_segments}
        for name, n in rows.items():
            self.add_module(f"{name}_embedding", nn.Embedding(n, c.d_model))
        self.norm = self._norm()
        self.blocks = nn.ModuleList([self._block() for _ in range(c.n_layers)])
        shared.init_weights(self)

    def _norm(self):
        return blocks.LayerNorm(self.config.d_model, self.config.norm_eps)

    def _block(self):
        c = self.config
        mha = heads.MultiHeadAttention(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, bias=True)
        return blocks.PostNormBlock(mha, blocks.MLP(c.d_model, c.d_ff), self._norm(), self._norm())

    def forward(self, ids, is_token=None, segments=None):
        B, T = ids.shape
        if self.config.context_length < T:
            raise ValueError("too long")
        if is_token is None:
            is_token = torch.ones(B, T, dtype=torch.bool)
        if segments is None:
            segments = ids * 0
        wanted = (ids, self.token_embedding), (torch.arange(T).expand(B, T), self.position_embedding)
        wanted = (*wanted, (segments, self.segment_embedding))
        x = self.norm(torch.stack([table(rows) for rows, table in wanted]).sum(0))
        for block in self.blocks:
            x = block(x, attention.padding_mask(is_token))
        return x


@correct("Encoder")
class FunctionalEncoder(_ByName):
    """Parameters by name; the vectors of padding are set to zero at the end."""

    def __init__(self, config):
        super().__init__(config)
        std = 0.02 / math.sqrt(2 * config.n_layers)
        self.table("token_embedding", config.vocab_size)
        self.table("position_embedding", config.context_length)
        self.table("segment_embedding", config.n_segments)
        self.norm_parameters("norm")
        for i in range(config.n_layers):
            self.attention_parameters(f"blocks.{i}.attention", std)
            self.mlp_parameters(f"blocks.{i}.mlp", std)
            self.norm_parameters(f"blocks.{i}.norm1")
            self.norm_parameters(f"blocks.{i}.norm2")

    def forward(self, ids, is_token=None, segments=None):
        if ids.shape[1] not in range(self.config.context_length + 1):
            raise ValueError("too long")
        segments = torch.zeros(ids.shape, dtype=torch.long) if segments is None else segments
        x = self.weight("segment_embedding")[segments] + self.weight("token_embedding")[ids]
        x = self.layer_norm("norm", x + self.weight("position_embedding")[: ids.shape[1]])
        seen = None if is_token is None else is_token[:, None, None]
        for i in range(self.config.n_layers):
            x = self.layer_norm(f"blocks.{i}.norm1", x + self.attend(f"blocks.{i}.attention", x, x, seen))
            x = self.layer_norm(f"blocks.{i}.norm2", x + self.mlp(f"blocks.{i}.mlp", x, F.gelu))
        return x if is_token is None else x * is_token[..., None]


# Seq2Seq -------------------------------------------------------------------------------------------------------------


class _PlainDecoderBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attention, self.cross_attention = _PlainAttention(c, True), _PlainAttention(c, True)
        self.mlp = _PlainMLP(c, nn.ReLU())
        for n in (1, 2, 3):
            self.add_module(f"norm{n}", nn.LayerNorm(c.d_model, eps=c.norm_eps))

    def forward(self, x, memory, mask, memory_mask):
        x = self.norm1(x + self.self_attention(x, mask=mask))
        x = self.norm2(x + self.cross_attention(x, memory, memory_mask))
        return self.norm3(x + self.mlp(x))


@correct("Seq2Seq")
class PlainSeq2Seq(nn.Module):
    """torch alone; the sinusoids of the whole context are kept in a buffer."""

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.d_model
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.encoder = nn.ModuleList([_PlainBlock(config, nn.ReLU(), post=True) for _ in range(config.n_layers)])
        self.decoder = nn.ModuleList([_PlainDecoderBlock(config) for _ in range(config.n_layers)])
        self.head = nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        table = torch.zeros(config.context_length, C)
        where = torch.arange(config.context_length).float().unsqueeze(1)
        slower = torch.exp(torch.arange(0, C, 2).float() * (-math.log(10_000.0) / C))
        table[:, 0::2] = torch.sin(where * slower)
        table[:, 1::2] = torch.cos(where * slower)
        self.register_buffer("sinusoids", table)
        _plain_init(self, 5 * config.n_layers)

    def _embed(self, ids):
        if ids.size(1) > self.config.context_length:
            raise ValueError("too long")
        return self.token_embedding(ids) * self.config.d_model**0.5 + self.sinusoids[: ids.size(1)]

    def forward(self, source, target, source_is_token=None, target_is_token=None):
        source_seen = None if source_is_token is None else source_is_token[:, None, None]
        memory = self._embed(source)
        for block in self.encoder:
            memory = block(memory, source_seen)
        T = target.size(1)
        target_seen = torch.tril(torch.ones(T, T, dtype=torch.bool))
        if target_is_token is not None:
            target_seen = target_seen & target_is_token[:, None, None]
        x = self._embed(target)
        for block in self.decoder:
            x = block(x, memory, target_seen, source_seen)
        return self.head(x)


@correct("Seq2Seq")
class AssembledSeq2Seq(nn.Module):
    """tfmlib's parts; each side has a method of its own, and missing masks are made."""

    def __init__(self, config):
        super().__init__()
        self.config, n = config, range(config.n_layers)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.token_embedding.weight = self.head.weight
        self.decoder = nn.ModuleList([blocks.DecoderBlock(*self._parts(2, 3)) for _ in n])
        self.encoder = nn.ModuleList([blocks.PostNormBlock(*self._parts(1, 2)) for _ in n])
        shared.init_weights(self)

    def _parts(self, n_attentions, n_norms):
        c = self.config
        sizes = {"n_kv_heads": c.n_kv_heads, "head_dim": c.head_dim, "bias": True}
        yield from (heads.MultiHeadAttention(c.d_model, c.n_heads, **sizes) for _ in range(n_attentions))
        yield blocks.MLP(c.d_model, c.d_ff, activation=torch.relu)
        yield from (blocks.LayerNorm(c.d_model, c.norm_eps) for _ in range(n_norms))

    def _vectors(self, ids):
        if ids.shape[1] > self.config.context_length:
            raise ValueError(f"at most {self.config.context_length} tokens")
        x = self.token_embedding(ids)
        return torch.add(places.sinusoidal(x.shape[1], x.shape[2]).to(x.dtype), x, alpha=math.sqrt(x.shape[2]))

    def _read(self, source, mask):
        x = self._vectors(source)
        for block in self.encoder:
            x = block(x, mask)
        return x

    def _write(self, target, memory, mask, memory_mask):
        x = self._vectors(target)
        for block in self.decoder:
            x = block(x, memory, mask, memory_mask)
        return self.head(x)

    def forward(self, source, target, source_is_token=None, target_is_token=None):
        source_is_token = torch.ones_like(source).bool() if source_is_token is None else source_is_token
        target_is_token = torch.ones_like(target).bool() if target_is_token is None else target_is_token
        source_mask = attention.padding_mask(source_is_token)
        target_mask = attention.padding_mask(target_is_token) & attention.causal_mask(target.shape[1])
        memory = self._read(source, source_mask)
        return self._write(target, memory, target_mask, source_mask)


@correct("Seq2Seq")
class FunctionalSeq2Seq(_ByName):
    """Parameters by name; the sinusoids are the imaginary and real parts of turning numbers."""

    def __init__(self, config):
        super().__init__(config)
        std = 0.02 / math.sqrt(5 * config.n_layers)
        self.table("token_embedding", config.vocab_size)
        for i in range(config.n_layers):
            for name in (f"encoder.{i}.attention", f"decoder.{i}.self_attention", f"decoder.{i}.cross_attention"):
                self.attention_parameters(name, std)
            for name in (f"encoder.{i}", f"decoder.{i}"):
                self.mlp_parameters(f"{name}.mlp", std)
                self.norm_parameters(f"{name}.norm1")
                self.norm_parameters(f"{name}.norm2")
            self.norm_parameters(f"decoder.{i}.norm3")
        self.linear("head", config.vocab_size, config.d_model, bias=False)
        self.head.weight = self.token_embedding.weight

    def embed(self, ids):
        T, C = ids.shape[1], self.config.d_model
        if self.config.context_length < T:
            raise ValueError("too long")
        angle = torch.arange(T).double()[:, None] / 10_000 ** (torch.arange(C // 2) * 2 / C)
        turning = torch.view_as_real(torch.polar(torch.ones_like(angle), angle)).flip(-1).flatten(-2)
        x = self.weight("token_embedding")[ids] * math.sqrt(C)
        return x + turning.to(x.dtype)

    def forward(self, source, target, source_is_token=None, target_is_token=None):
        source_seen = None if source_is_token is None else source_is_token[:, None, None]
        target_seen = _triangle(target, None if target_is_token is None else target_is_token[:, None, None], None)
        x, y = self.embed(source), self.embed(target)
        for i in range(self.config.n_layers):
            name = f"encoder.{i}"
            x = self.layer_norm(f"{name}.norm1", x + self.attend(f"{name}.attention", x, x, source_seen))
            x = self.layer_norm(f"{name}.norm2", x + self.mlp(f"{name}.mlp", x, torch.relu))
        for i in range(self.config.n_layers):
            name = f"decoder.{i}"
            y = self.layer_norm(f"{name}.norm1", y + self.attend(f"{name}.self_attention", y, y, target_seen))
            y = self.layer_norm(f"{name}.norm2", y + self.attend(f"{name}.cross_attention", y, x, source_seen))
            y = self.layer_norm(f"{name}.norm3", y + self.mlp(f"{name}.mlp", y, F.relu))
        return y @ self.weight("head").T
