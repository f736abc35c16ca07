"""Other correct implementations of the cache, of feeding a model through it, and of generating with it."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tfmlib import attention, sampling
from tfmlib import cache as library

from . import correct

# KVCache --------------------------------------------------------------------------------------------------------------


@correct("KVCache")
class OneTensorAndAList:
    """One tensor for all, (layers, 2, B, K, capacity, D), a list of lengths, and views without any state."""

    @dataclass
    class View:
        """What a layer shows: it asks the cache for everything."""

        cache: "OneTensorAndAList"
        i: int

        @property
        def length(self):
            return self.cache.lengths[self.i]

        def append(self, k, v):
            return self.cache.put(self.i, k, v)

    def __init__(self, n_layers, batch, n_kv_heads, head_dim, capacity, dtype=torch.float32, device="cpu"):
        self.store = torch.empty((n_layers, 2, batch, n_kv_heads, capacity, head_dim), dtype=dtype, device=device)
        self.lengths = [0 for _ in range(n_layers)]

    def layer(self, i):
        if i not in range(len(self.lengths)):
            raise ValueError(f"no layer {i}")
        return self.View(self, i)

    def put(self, i, k, v):
        mine, start = self.store[i], self.lengths[i]
        B, K, T, D = k.shape
        if k.shape != v.shape or mine.shape[1:3] + mine.shape[4:] != (B, K, D):
            raise ValueError(f"keys {tuple(k.shape)} and values {tuple(v.shape)} do not go into {tuple(mine.shape)}")
        if start + T > mine.shape[3]:
            raise ValueError("the cache is full")
        with torch.no_grad():
            mine.narrow(3, start, T).copy_(torch.stack((k, v)))
        self.lengths[i] += T
        return tuple(mine[..., : self.lengths[i], :].unbind())

    @property
    def length(self):
        return min(self.lengths)

    def trim(self, length):
        if length < 0:
            raise ValueError("a length is never negative")
        self.lengths = [min(length, old) for old in self.lengths]

    def reset(self):
        self.lengths = [0] * len(self.lengths)


@correct("KVCache")
class Buffers(nn.Module):
    """A module with a buffer for each layer, so that .to() moves it; tokens before heads in memory; copies go out."""

    length = property(lambda self: min(view.length for view in self.views))

    def __init__(self, n_layers, batch, n_kv_heads, head_dim, capacity, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.expected, self.capacity = (batch, n_kv_heads, head_dim), capacity
        self.views = []
        for i in range(n_layers):
            for name in ("keys", "values"):
                rows = torch.zeros(batch, capacity, n_kv_heads, head_dim, dtype=dtype, device=device)
                self.register_buffer(f"{name}{i}", rows, persistent=False)
            self.views.append(self.view(i))

    def view(self, i):
        view = SimpleNamespace(length=0)

        def append(k: Tensor, v: Tensor):
            for x in (k, v):
                if (x.size(0), x.size(1), x.size(3)) != self.expected:
                    raise ValueError("unexpected shape")
            if k.size(2) != v.size(2):
                raise ValueError("as many values as keys")
            if view.length + k.size(2) > self.capacity:
                raise ValueError("full")
            places = torch.arange(view.length, view.length + k.size(2), device=k.device)
            out = []
            for name, x in (("keys", k), ("values", v)):
                rows = getattr(self, f"{name}{i}")
                rows.index_copy_(1, places, x.detach().transpose(1, 2).to(rows.dtype))
                out.append(rows[:, : view.length + k.size(2)].transpose(1, 2).contiguous())
            view.length += k.size(2)
            return out

        view.append = append
        return view

    def layer(self, i):
        if i < 0 or i >= len(self.views):
            raise ValueError("unknown layer")
        return self.views[i]

    def trim(self, length):
        if length < 0:
            raise ValueError("length < 0")
        for view in self.views:
            if view.length > length:
                view.length = length

    def reset(self):
        for view in self.views:
            view.length = 0


class _Room:
    """Keys and values side by side in one tensor, (B, K, capacity, 2 * D)."""

    __slots__ = ("length", "rows")

    def __init__(self, rows, length=0):
        self.rows, self.length = rows, length

    def append(self, k, v):
        B, K, capacity, width = self.rows.shape
        if k.shape != v.shape or k.shape != (B, K, k.shape[2], width // 2) or self.length + k.shape[2] > capacity:
            raise ValueError("these keys and values do not fit")
        self.length += k.shape[2]
        self.rows.data[:, :, self.length - k.shape[2] : self.length] = torch.cat([k.data, v.data], dim=-1)
        keys, values = self.rows[:, :, : self.length].chunk(2, dim=-1)
        return keys, values


@correct("KVCache")
class SideBySide:
    """Keys and values in one tensor a layer; trimming and resetting make new views of the same memory."""

    def __init__(self, n_layers, batch, n_kv_heads, head_dim, capacity, dtype=torch.float32, device="cpu"):
        shape = (batch, n_kv_heads, capacity, 2 * head_dim)
        self.rooms = dict(enumerate(_Room(torch.zeros(*shape).to(device, dtype)) for _ in range(n_layers)))

    def layer(self, i):
        try:
            return self.rooms[i]
        except KeyError:
            raise ValueError(f"layer {i}?") from None

    @property
    def length(self):
        return sorted(room.length for room in self.rooms.values())[0]

    def trim(self, length):
        if length < 0:
            raise ValueError(length)
        self.rooms = {i: _Room(room.rows, min(room.length, length)) for i, room in self.rooms.items()}

    def reset(self):
        self.rooms = {i: _Room(room.rows) for i, room in self.rooms.items()}


# prefill and decode_step ----------------------------------------------------------------------------------------------


@correct("prefill")
@torch.inference_mode()
def prefill_from_the_first_token(model, ids, cache, is_token=None):
    """Each row's positions counted from its first token; inference mode; a mask for every query."""
    T = ids.size(1)
    if is_token is None:
        return model(ids, cache=cache).select(1, -1)
    if tuple(is_token.shape) != (ids.size(0), cache.length + T):
        raise ValueError("is_token and ids do not belong together")
    S = is_token.size(1)
    first = is_token.int().argmax(dim=1, keepdim=True)  # 0 where a row has no token yet
    positions = torch.arange(S).sub(first).clamp_min(0)[:, S - T :]
    mask = is_token[:, None, None].expand(-1, 1, T, -1)
    return model(ids, positions, mask, cache).select(1, -1)


@correct("prefill")
def prefill_always_with_positions(model, ids, cache, is_token=None):
    """Without padding everything is a token, so that there is only one case."""
    B, T = ids.shape
    held = cache.length
    if is_token is None:
        is_token = torch.ones(B, held + T, dtype=torch.bool)
    if is_token.ndim != 2 or len(is_token) != B or is_token.shape[1] != held + T:
        raise ValueError("is_token must be (B, S)")
    before = is_token[:, :held].sum(1, keepdim=True)
    positions = before + is_token[:, held:].cumsum(1) - is_token[:, held:].int()
    with torch.no_grad():
        logits = model(ids, positions=positions, mask=is_token.view(B, 1, 1, held + T), cache=cache)
    return logits[:, T - 1, :]


@correct("prefill")
def prefill_in_two_chunks(model, ids, cache, is_token=None):
    """A long prompt in chunks, so that the scores of all pairs are never there at once."""
    B, T = ids.shape
    if is_token is not None and is_token.shape != torch.Size([B, cache.length + T]):
        raise ValueError("shape of is_token")
    grad = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    try:
        for new in ids.split(max(T // 2, 1), dim=1):
            positions = mask = None
            if is_token is not None:
                told = is_token[:, : cache.length + new.shape[1]]
                positions = torch.stack([row.cumsum(0)[-new.shape[1] :] - 1 for row in told]).clamp(min=0)
                mask = attention.padding_mask(told)
            logits = model(ids=new, positions=positions, mask=mask, cache=cache)
    finally:
        torch.set_grad_enabled(grad)
    return logits[:, -1].detach().clone()


@correct("decode_step")
@torch.no_grad()
def step_by_the_model(model, ids, cache, is_token=None):
    """Without prefill: a row's position is the number of its earlier tokens."""
    B, T = ids.shape
    if T != 1:
        raise ValueError("one token")
    if is_token is None:
        return model(ids, cache=cache).squeeze(1)
    if is_token.shape != (B, cache.length + 1):
        raise ValueError("is_token (B, S)")
    return model(ids, is_token[:, :-1].sum(1)[:, None], is_token[:, None, None, :], cache).squeeze(1)


@correct("decode_step")
def step_by_prefill(model, ids, cache, is_token=None):
    """All by prefill; the shape is checked as a whole."""
    if ids.shape != (ids.shape[0], 1):
        raise ValueError(f"ids {tuple(ids.shape)}")
    return library.prefill(model, ids, cache, is_token=is_token)


@correct("decode_step")
def step_with_one_case(model, ids, cache, is_token=None):
    """Explicit positions in every case, and inference mode."""
    if ids.numel() != ids.shape[0]:
        raise ValueError("exactly one token a row")
    shape = (len(ids), cache.length + 1)
    is_token = torch.ones(shape, dtype=torch.bool) if is_token is None else is_token
    if is_token.shape != shape:
        raise ValueError("is_token")
    with torch.inference_mode():
        positions = is_token.sum(dim=-1, keepdim=True) - 1
        return model(ids, positions=positions, mask=attention.padding_mask(is_token), cache=cache)[:, 0]


# generate_cached ------------------------------------------------------------------------------------------------------


def _choose(logits, options, generator):
    for name, step in (("temperature", "apply_temperature"), ("top_k", "keep_top_k"), ("top_p", "keep_top_p")):
        if options.get(name) is not None:
            logits = getattr(sampling, step)(logits, options[name])
    return sampling.sample(logits, generator)


@correct("generate_cached")
@torch.no_grad()
def generate_in_a_loop(
    model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None, eos_id=None, is_token=None
):
    """Its own loop over prefill and decode_step; is_token has all its columns from the start."""
    B, T = ids.shape
    c, options = model.config, {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    told = None
    if is_token is not None:
        if (is_token[:, -1] == 0).any():
            raise ValueError("padding on the right")
        told = torch.nn.functional.pad(is_token, (0, max_new_tokens), value=True)
    tokens = T if is_token is None else int(is_token.sum(1).max())
    if tokens + max_new_tokens > c.context_length + 1:
        raise ValueError("the context is too short")
    out = torch.cat([ids, ids.new_zeros(B, max_new_tokens)], dim=1)
    if not max_new_tokens:
        return out
    kv = library.KVCache(
        c.n_layers, B, c.n_kv_heads, c.head_dim, T + max_new_tokens, model.head.weight.dtype, model.head.weight.device
    )
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        live = torch.ones(B, dtype=torch.bool)
        logits = library.prefill(model, ids, kv, is_token)
        for n in range(T, T + max_new_tokens):
            out[:, n] = _choose(logits, options, generator)
            if eos_id is not None:
                out[:, n] = torch.where(live, out[:, n], eos_id)
                live = live & (out[:, n] != eos_id)
                if not live.any():
                    return out[:, : n + 1]
            if n < T + max_new_tokens - 1:
                logits = library.decode_step(model, out[:, n : n + 1], kv, None if told is None else told[:, : n + 1])
    finally:
        for m, mode in modes:
            m.train(mode) if not list(m.children()) else setattr(m, "training", mode)
    return out


@correct("generate_cached")
def generate_row_by_row(
    model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None, eos_id=None, is_token=None
):
    """Every row by itself, without its padding; short rows are filled up at the end."""
    if is_token is None:
        is_token = torch.ones_like(ids, dtype=torch.bool)
    if not bool(is_token[:, -1].all()):
        raise ValueError("the last column must hold tokens")
    config, weights = model.config, next(iter(model.parameters()))
    if is_token.sum(1).max() + max_new_tokens - 1 > config.context_length:
        raise ValueError("too long")
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    modes = {m: m.training for m in model.modules()}
    model.eval()
    rows = []
    for row, token in zip(ids, is_token, strict=True):
        kv = library.KVCache(
            n_layers=config.n_layers,
            batch=1,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            capacity=config.context_length,
            dtype=weights.dtype,
            device=weights.device,
        )
        new, feed = [], row[token][None]
        while len(new) < max_new_tokens and (not new or new[-1] != eos_id):
            chosen = _choose(library.prefill(model, feed, kv), options, generator)
            new.append(int(chosen))
            feed = chosen[None]
        rows.append(new)
    for m, mode in modes.items():
        m.training = mode
    longest = max(map(len, rows))
    filled = [row + [eos_id] * (longest - len(row)) for row in rows]
    return torch.cat([ids, torch.tensor(filled, dtype=ids.dtype).view(len(ids), longest)], dim=1)


class _Fed(nn.Module):
    """Feeds what is new, straight to the model: positions from is_token, whose columns grow with the text."""

    def __init__(self, model, kv, told):
        super().__init__()
        self.model, self.kv, self.told = model, kv, told

    def forward(self, ids):
        start, end = self.kv.length, ids.shape[1]
        told = self.told[:, :end]
        positions = told.cumsum(1).sub(1).clamp(min=0)[:, start:]
        return self.model(ids[:, start:], positions=positions, mask=attention.padding_mask(told), cache=self.kv)


@correct("generate_cached")
def generate_by_generate(model, ids, max_new_tokens, *, is_token=None, **options):
    """By `generate`, with a module that feeds the model itself; padding is always told."""
    if is_token is None:
        is_token = torch.ones(ids.shape, dtype=torch.bool)
    elif not torch.all(is_token[:, -1]):
        raise ValueError("left padding only")
    room = ids.shape[1] + max_new_tokens
    padding = int((~is_token).sum(1).min())
    if room - padding - 1 > model.config.context_length:
        raise ValueError(f"{room - padding} tokens")
    c, weight = model.config, model.token_embedding.weight
    kv = library.KVCache(c.n_layers, len(ids), c.n_kv_heads, c.head_dim, room, dtype=weight.dtype)
    told = torch.cat([is_token, torch.ones(len(ids), max_new_tokens, dtype=torch.bool)], dim=1)
    return sampling.generate(_Fed(model, kv, told), ids, max_new_tokens, **options)


@correct("generate_cached")
def generate_with_steps_only(model, ids, max_new_tokens, *, eos_id=None, is_token=None, **options):
    """All of the prompt but its last token first; then every new token comes from a step, as in a uniform loop."""
    B, T = ids.shape
    if is_token is not None and not is_token[:, -1].all():
        raise ValueError("the last column is padding")
    padding = 0 if is_token is None else int((~is_token).sum(1).min())
    if T - padding + max_new_tokens > model.config.context_length:
        raise ValueError("no place for so much text")
    c, weight, generator = model.config, next(model.parameters()), options.pop("generator", None)
    options.setdefault("temperature", 1.0)
    kv = library.KVCache(c.n_layers, B, c.n_kv_heads, c.head_dim, T + max_new_tokens, weight.dtype, weight.device)
    told = None if is_token is None else torch.nn.functional.pad(is_token, (0, max_new_tokens), value=True)
    training = {m for m in model.modules() if m.training}
    model.eval()
    if T > 1 and max_new_tokens > 0:
        library.prefill(model, ids[:, :-1], kv, None if told is None else told[:, : T - 1])
    ended = torch.zeros(B, 1, dtype=torch.bool)
    for n in range(T, T + max_new_tokens):
        logits = library.decode_step(model, ids[:, -1:], kv, None if told is None else told[:, :n])
        new = _choose(logits, options, generator)[:, None]
        if eos_id is not None:
            new = torch.where(ended, torch.full_like(new, eos_id), new)
            ended = ended | (new == eos_id)
        ids = torch.hstack([ids, new])
        if bool(ended.all()):
            break
    for m in training:
        m.training = True
    return ids
