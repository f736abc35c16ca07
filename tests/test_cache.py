"""The checks of chapter 12: the key/value cache, prefill, decoding steps, generation with a cache.

Outside truth: torch.cat of all that was appended, sums to follow by hand, and the same model's forward pass over the
whole text without a cache. Positions may be computed in float32 where weights are float64, so logits of two ways are
compared as float32 numbers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from tfmlib.models import gpt, llama

from .same import Broken, expect, filled, is_tensor, outcome, raises, rng, same
from .toys import ModelCache

# torch has no ready-made version of any of these. That `generate` is not run without a cache shows in what is fed.
FORBIDDEN = {}

# KVCache --------------------------------------------------------------------------------------------------------------

N, B, K, D, CAPACITY = 3, 5, 2, 7, 11


def _cache(KVCache, dtype=torch.float32):
    return KVCache(n_layers=N, batch=B, n_kv_heads=K, head_dim=D, capacity=CAPACITY, dtype=dtype)


def _new(T, salt, B=B, K=K, D=D, dtype=torch.float32):
    """Keys and values of T new tokens, (B, K, T, D) each, laid out as split_heads leaves them: not contiguous."""
    x = torch.randn(2, B, T, K, D, generator=rng(salt)).to(dtype).transpose(2, 3)
    return x[0], x[1]


def _all(*chunks):
    """Keys and values of all tokens so far."""
    keys, values = zip(*chunks, strict=True)
    return torch.cat(keys, dim=2), torch.cat(values, dim=2)


def _same_rows(got, want, what):
    """Break the promise unless what append returned is these keys and these values."""
    pair = isinstance(got, (tuple, list)) and len(got) == 2
    kind = f"{len(got)} things" if isinstance(got, (tuple, list)) else type(got).__name__
    expect(pair, f"{what}: expected (keys, values), got {kind}")
    for name, came, due in zip(("keys", "values"), got, want, strict=True):
        same(came, due, f"{name} returned by {what}")


def _length(owner, want, what):
    """Break the promise unless `owner.length` is this number."""
    got = owner.length
    expect(not callable(got), f"{what}: expected a length that is read without brackets: an attribute or a property")
    expect(isinstance(got, (int, Tensor)), f"{what}: expected length {want}, got {type(got).__name__}")
    expect(int(got) == want, f"{what}: expected length {want}, got {int(got)}")


class _Allocations(TorchDispatchMode):
    """Within the block: the memory of every tensor that torch makes."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch loads its compiler, seconds long, at the first operation."""
        return False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for x in tree.tree_leaves(result):
            if isinstance(x, Tensor):
                self.made[x.untyped_storage()._cdata] = x
        return result

    def n_bytes(self) -> int:
        return sum(x.untyped_storage().nbytes() for x in self.made.values())


def _taken(KVCache, *args):
    """The bytes that are taken while a cache is made."""
    with _Allocations() as allocations:
        KVCache(*args)
    return allocations.n_bytes()


def probe_KVCache(KVCache):
    """Results that tell the known mistakes apart."""
    a, b, c = _new(3, 1), _new(1, 2), _new(5, 3)

    def lengths(cache):
        return [int(cache.length), *(int(cache.layer(i).length) for i in range(N))]

    def rows(*sizes):
        def ask():
            layer = _cache(KVCache).layer(1)
            return [layer.append(*_new(T, T)) for T in sizes]

        return outcome(ask)

    def after(*steps):
        """Fill layers 0, 1, 2 with 5, 3, 1 tokens, take some steps, then give lengths, and rows of one more append."""

        def ask():
            cache = _cache(KVCache)
            for i, new in enumerate((c, a, b)):
                cache.layer(i).append(*new)
            said = [outcome(lambda step=step: step(cache)) for step in steps]
            said = [x if not isinstance(x, tuple) else "rows" for x in said]
            return [said, lengths(cache), [x.clone() for x in cache.layer(0).append(*b)]]

        answer = outcome(ask)
        return answer if isinstance(answer, list) else [answer] * 3

    def held(*sizes):
        cache = _cache(KVCache)
        for i, T in enumerate(sizes):
            cache.layer(i).append(*_new(T, i))
        return lengths(cache)

    def apart():
        cache, other = _cache(KVCache), _cache(KVCache)
        cache.layer(0).append(*a)
        other.layer(0).append(*c)
        return lengths(cache), lengths(other), [x.clone() for x in cache.layer(0).append(*b)]

    def layers():
        cache = _cache(KVCache)
        for new in (a, b):
            got = [[x.clone() for x in cache.layer(i).append(*(x + i for x in new))] for i in range(N)]
        return [cache.layer(i).append(*c) for i in range(N)], got

    def learning():
        k, v = (x.clone().requires_grad_() for x in a)
        keys, values = _cache(KVCache).layer(0).append(k, v)
        return keys.requires_grad, values.requires_grad

    def changed():
        layer = _cache(KVCache).layer(0)
        k, v = (x.clone() for x in a)
        layer.append(k, v)
        k.zero_(), v.zero_()
        return layer.append(*b)

    def grows():
        layer = _cache(KVCache).layer(0)
        layer.append(*c)
        with _Allocations() as allocations:
            keys, _ = layer.append(*b)
        return allocations.made[keys.untyped_storage()._cdata].untyped_storage().nbytes() < B * K * D * CAPACITY * 4

    def other_shape(**sizes):
        return after(lambda cache: cache.layer(0).append(*_new(2, 5, **sizes)))

    def full(*sizes):
        def ask():
            layer = _cache(KVCache).layer(0)
            return [layer.append(*_new(T, T)) for T in sizes], int(layer.length)

        return outcome(ask)

    return [
        rows(3),
        rows(3, 1, 2),
        outcome(lambda: _cache(KVCache, torch.bfloat16).layer(0).append(*a)),
        outcome(lambda: _cache(KVCache, torch.float64).layer(0).append(*a)),
        outcome(lambda: held(5, 1, 3)),
        outcome(lambda: held(3, 5, 1)),
        *after(),
        *after(lambda cache: cache.trim(2)),
        *after(lambda cache: cache.trim(4)),
        *after(lambda cache: cache.trim(9)),
        *after(lambda cache: cache.trim(0)),
        *after(lambda cache: cache.trim(-1)),
        *after(lambda cache: cache.reset()),
        *after(lambda cache: cache.layer(0).append(*_new(7, 7))),
        *after(lambda cache: cache.layer(-1) and None),
        *after(lambda cache: cache.layer(N) and None),
        *other_shape(B=1),
        *other_shape(B=B + 1),
        *other_shape(K=1),
        *other_shape(K=K + 1),
        *other_shape(D=1),
        *other_shape(D=D - 1),
        *after(lambda cache: cache.layer(0).append(a[0], b[1])),
        *after(lambda cache: cache.layer(0).append(b[0], a[1])),
        full(11),
        full(5, 6),
        full(5, 7),
        outcome(apart),
        outcome(layers),
        outcome(learning),
        outcome(changed),
        outcome(lambda: min(8, 8 * _taken(KVCache, 2, 3, 5, 7, 11) // (2 * 2 * 3 * 5 * 7 * 11 * 4))),
        outcome(grows),
    ]


def test_two_tokens_then_one_by_hand(KVCache):
    """Keys 1 and 2 are appended, then 3: the second append returns 1, 2, 3, the old ones and the new; so do values."""
    cache = KVCache(n_layers=1, batch=1, n_kv_heads=1, head_dim=1, capacity=4)
    numbers = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    k, v = numbers, numbers * 10
    _same_rows(cache.layer(0).append(k[:, :, :2], v[:, :, :2]), (k[:, :, :2], v[:, :, :2]), "the first append")
    _length(cache.layer(0), 2, "layer(0)")
    _same_rows(cache.layer(0).append(k[:, :, 2:], v[:, :, 2:]), (k, v), "the second append")
    _length(cache.layer(0), 3, "layer(0)")


def test_append_returns_all_so_far(KVCache):
    """Chunks of 3, 1, 4 and 2 tokens: each append returns what torch.cat makes of all so far, (B, K, length, D)."""
    for sizes in ((3, 1, 4, 2), (1, 1, 1), (11,)):
        cache, chunks = _cache(KVCache), []
        for n, T in enumerate(sizes):
            chunks.append(_new(T, n))
            got = cache.layer(1).append(*chunks[-1])
            _same_rows(got, _all(*chunks), f"append number {n + 1} of {sizes} tokens")
            _length(cache.layer(1), sum(sizes[: n + 1]), "layer(1)")
    cache = KVCache(2, 1, 3, 4, 5)  # the same arguments by position
    chunks = [_new(2, 1, B=1, K=3, D=4), _new(3, 2, B=1, K=3, D=4)]
    cache.layer(0).append(*chunks[0])
    _same_rows(cache.layer(0).append(k=chunks[1][0], v=chunks[1][1]), _all(*chunks), "append to KVCache(2, 1, 3, 4, 5)")


def test_every_layer_has_its_own(KVCache):
    """Three layers of one cache, and two caches, share nothing: each layer returns what was appended to it."""
    cache, other = _cache(KVCache), _cache(KVCache)
    chunks = {(c, i): [] for c in (0, 1) for i in range(N)}
    for n, T in enumerate((2, 1, 3)):
        for (c, i), so_far in chunks.items():
            so_far.append(_new(T + c, 10 * n + 2 * i + c))
            got = (cache, other)[c].layer(i).append(*so_far[-1])
            _same_rows(got, _all(*so_far), f"append to layer {i} of cache {'AB'[c]}")
    for i in range(N):
        _length(cache.layer(i), 6, f"layer({i})")
        _length(other.layer(i), 9, f"layer({i}) of another cache")


def test_length_is_what_all_layers_hold(KVCache):
    """While layer 0 holds 5 tokens, layer 1 holds 3 and layer 2 none, the length is 0; with 5, 3 and 4 it is 3."""
    cache = _cache(KVCache)
    _length(cache, 0, "a new cache")
    for i, T, want in ((0, 5, 0), (1, 3, 0), (2, 4, 3), (1, 1, 4), (1, 2, 4), (2, 1, 5)):
        cache.layer(i).append(*_new(T, i))
        held = ", ".join(str(int(cache.layer(j).length)) for j in range(N))
        _length(cache, want, f"a cache whose layers hold {held} tokens")
    expect(isinstance(cache.length, int), f"cache.length: expected an int, got {type(cache.length).__name__}")


def test_it_keeps_copies_without_gradients(KVCache):
    """What comes out needs no gradient, though k and v do; what the caller does to k and v later changes nothing."""
    cache = _cache(KVCache)
    first, second = _new(3, 1), _new(2, 2)
    k, v = (x.clone().requires_grad_() for x in first)
    early = cache.layer(0).append(k * 1, v * 1)
    for name, x in zip(("keys", "values"), early, strict=True):
        is_tensor(x, name)
        expect(not x.requires_grad, f"expected {name} without a gradient, got requires_grad=True: detach them")
    _same_rows(cache.layer(0).append(*second), _all(first, second), "an append after one that needed gradients")
    _same_rows(early, first, "the first append, looked at after the second,")
    for T in (3, 1):
        cache = _cache(KVCache)
        k, v = (x.clone() for x in _new(T, 3))
        cache.layer(0).append(k, v)
        same(k, _new(T, 3)[0], "k after append, which must not change it")
        same(v, _new(T, 3)[1], "v after append, which must not change it")
        k.zero_(), v.zero_()
        got = cache.layer(0).append(*second)
        _same_rows(got, _all(_new(T, 3), second), "an append after the caller set the earlier k and v to 0")


def test_it_keeps_its_own_dtype(KVCache):
    """Float32 by default. Whatever dtype comes in, the cache's comes out, and float64 keeps all its digits."""
    new = _new(2, 1, dtype=torch.float64)
    _same_rows(_cache(KVCache).layer(0).append(*new), [x.float() for x in new], "append of float64 to float32")
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        for given in (dtype, torch.float32):
            chunks = [_new(2, 3, dtype=given), _new(1, 4, dtype=given)]
            cache = _cache(KVCache, dtype)
            cache.layer(0).append(*chunks[0])
            want = [x.to(dtype) for x in _all(*chunks)]
            _same_rows(cache.layer(0).append(*chunks[1]), want, f"append of {given} to {dtype}")


def test_a_full_cache_takes_no_more(KVCache):
    """With room for 11 tokens and 8 in it, 3 fit and 4 are a ValueError, after which everything is as before."""
    chunks = [_new(5, 1), _new(3, 2), _new(3, 3)]
    cache = _cache(KVCache)
    layer = cache.layer(0)
    for chunk in chunks[:2]:
        layer.append(*chunk)
    raises(ValueError, lambda: layer.append(*_new(4, 4)), "append of 4 tokens where 3 fit")
    raises(ValueError, lambda: layer.append(*_new(12, 4)), "append of 12 tokens where 3 fit")
    _length(layer, 8, "after the error layer(0)")
    _same_rows(layer.append(*chunks[2]), _all(*chunks), "append of 3 tokens where 3 fit")
    raises(ValueError, lambda: layer.append(*_new(1, 4)), "append of 1 token to a full layer")
    _length(layer, 11, "after the error layer(0)")
    _same_rows(
        cache.layer(1).append(*_new(11, 5)), _new(11, 5), "append of 11 tokens to another layer with room for 11"
    )
    raises(ValueError, lambda: _cache(KVCache).layer(2).append(*_new(12, 4)), "append of 12 tokens to an empty layer")


def test_other_shapes_are_errors(KVCache):
    """Keys or values of another batch, another number of heads or another width are a ValueError; nothing is kept."""
    first, last = _new(3, 1), _new(2, 2)
    cache = _cache(KVCache)
    layer = cache.layer(0)
    layer.append(*first)
    good = _new(2, 3)
    wrong_sizes = [{"B": 1}, {"B": B - 1}, {"B": B + 1}, {"K": 1}, {"K": K + 1}, {"D": 1}, {"D": D - 1}, {"D": D + 1}]
    for sizes in [*wrong_sizes, {"B": K, "K": B}, {"K": D, "D": K}]:
        other = _new(2, 4, **sizes)
        shapes = f"({B}, {K}, T, {D}) are kept and {tuple(other[0].shape)}"
        raises(ValueError, lambda other=other: layer.append(*other), f"append where {shapes} come")
        raises(ValueError, lambda other=other: layer.append(other[0], good[1]), f"append where {shapes} come as k")
        raises(ValueError, lambda other=other: layer.append(good[0], other[1]), f"append where {shapes} come as v")
        _length(layer, 3, "after the error layer(0)")
    one = _new(1, 5)
    raises(ValueError, lambda: layer.append(good[0], one[1]), "append of 2 keys and 1 value")
    raises(ValueError, lambda: layer.append(one[0], good[1]), "append of 1 key and 2 values")
    _length(layer, 3, "after the error layer(0)")
    _same_rows(layer.append(*last), _all(first, last), "an append after the errors")


def test_a_layer_must_exist(KVCache):
    """With 3 layers, layer(0), layer(1) and layer(2) are there; layer(3) and layer(-1) are a ValueError."""
    cache = _cache(KVCache)
    for i in range(N):
        _length(cache.layer(i), 0, f"a new cache's layer({i})")
    for i in (N, N + 4, -1, -N):
        raises(ValueError, lambda i=i: cache.layer(i), f"layer({i}) of {N} layers")


def test_trim_forgets_what_comes_after(KVCache):
    """Of 5 tokens trim(2) keeps the first 2 in every layer; what is appended next follows them."""
    for keep in (2, 3, 4, 0, 1):
        cache = _cache(KVCache)
        for i in range(N):
            cache.layer(i).append(*_new(3, i))
            cache.layer(i).append(*_new(2, 10 + i))
        cache.trim(keep)
        _length(cache, keep, f"after trim({keep}) the cache")
        for i in range(N):
            chunks = [[x[:, :, :keep] for x in _all(_new(3, i), _new(2, 10 + i))]]
            for T in (1, 4):
                chunks.append(_new(T, 20 + T + i))
                got = cache.layer(i).append(*chunks[-1])
                _same_rows(got, _all(*chunks), f"append to layer {i} after trim({keep})")


def test_trim_where_there_is_no_more(KVCache):
    """Layers with 5, 3 and 4 tokens have 4, 3 and 4 after trim(4); trim(9) does nothing; trim(-1) is a ValueError."""
    cache = _cache(KVCache)
    sizes, left = (5, 3, 4), (4, 3, 4)
    for i, T in enumerate(sizes):
        cache.layer(i).append(*_new(T, i))
    for length in (9, 5, CAPACITY + 6):
        cache.trim(length)
        for i, T in enumerate(sizes):
            _length(cache.layer(i), T, f"after trim({length}) layer({i}) of {T} tokens")
    raises(ValueError, lambda: cache.trim(-1), "trim(-1)")
    raises(ValueError, lambda: cache.trim(-9), "trim(-9)")
    for i, T in enumerate(sizes):
        _length(cache.layer(i), T, f"after the error layer({i})")
    cache.trim(length=4)
    for i, T in enumerate(left):
        _length(cache.layer(i), T, f"after trim(4) layer({i}) of {sizes[i]} tokens")
        kept = [x[:, :, :T] for x in _new(sizes[i], i)]
        _same_rows(cache.layer(i).append(*_new(2, 9)), _all(kept, _new(2, 9)), f"append to layer {i} after trim(4)")


def test_reset_forgets_all(KVCache):
    """After reset() every layer holds 0 tokens, and the cache is as good as new: its whole room can be filled again."""
    cache = _cache(KVCache)
    for i in range(N):
        cache.layer(i).append(*_new(7, i))
    cache.reset()
    _length(cache, 0, "after reset() the cache")
    for i in range(N):
        _length(cache.layer(i), 0, f"after reset() layer({i})")
        _same_rows(cache.layer(i).append(*_new(11, 5 + i)), _new(11, 5 + i), f"append to layer {i} after reset()")
    _length(cache, 11, "the cache, filled again,")
    cache.reset()
    _length(cache, 0, "after a second reset() the cache")


def test_all_bytes_are_taken_at_once(KVCache):
    """A new cache takes all its room: 2 * n_layers * batch * n_kv_heads * capacity * head_dim elements."""
    for dtype, size in ((torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 2)):
        got, want = _taken(KVCache, 2, 3, 5, 7, 1100, dtype), 2 * 2 * 3 * 5 * 7 * 1100 * size
        expect(got >= want, f"making KVCache(2, 3, 5, 7, 1100, {dtype}): expected {want} bytes to be taken, got {got}")


# Models to feed -------------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """A decoder to follow by hand. A token's four logits are sums over what it sees, itself among it.

    They are the sum of the tokens it sees, how many these are, the token itself, and its position.
    """

    said = ("the sum of the tokens seen", "the number of tokens seen", "the token itself", "its position")

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.made_a_graph = False

    def forward(self, ids, positions=None, mask=None, cache=None):
        T = ids.shape[1]
        start = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(start, start + T)
        seen = torch.ones(T, start + T, dtype=torch.bool).tril(start)
        seen = seen if mask is None else seen & mask
        seen = seen.expand(len(ids), 1, T, start + T)[:, 0].double()
        tokens = self.weight * ids.double()[:, None, :, None]
        if cache is not None:
            tokens = cache.layer(0).append(tokens, tokens)[0]
        total = (seen @ tokens[:, 0])[..., 0]
        self.made_a_graph = self.made_a_graph or total.requires_grad
        return torch.stack([total, seen.sum(-1), ids.double(), positions.double().expand_as(total)], dim=-1)


def _by_hand(got, want, what):
    """Break the promise unless these are the last token's four numbers, row by row."""
    is_tensor(got, what)
    want = torch.tensor(want, dtype=torch.float64)
    expect(got.shape == want.shape, f"{what}: expected logits (B, V) = {tuple(want.shape)}, got {tuple(got.shape)}")
    for row in range(len(want)):
        for said, came, due in zip(Sums.said, got[row].tolist(), want[row].tolist(), strict=True):
            expect(came == due, f"{what}, row {row}, {said}: expected {due:g}, got {came:g}")


V = 13


def _gpt(context_length=11, vocab_size=V):
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "vocab_size": vocab_size, "d_ff": 12}
    return filled(gpt.GPT(gpt.GPTConfig(**sizes, context_length=context_length)).double())


def _llama(n_kv_heads=2, context_length=11, vocab_size=V):
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 4, "head_dim": 6, "vocab_size": vocab_size, "d_ff": 12}
    config = llama.LlamaConfig(**sizes, context_length=context_length, n_kv_heads=n_kv_heads, rope_base=100.0)
    return filled(llama.Llama(config).double())


def _models(**options):
    """Learned positions with as many key heads as heads; rotary ones with fewer."""
    return {"a GPT": _gpt(**options), "a Llama with 2 key heads": _llama(2, **options)}


def _more_models():
    """The same, and every head with its own key head, and all heads with one."""
    return _models() | {"a Llama with 4 key heads": _llama(4), "a Llama with 1 key head": _llama(1)}


def _ids(B, T, salt=0, vocab_size=V):
    return torch.randint(vocab_size, (B, T), generator=rng(salt))


def _plain(model, ids):
    """The logits (B, T, V) of a forward pass without a cache."""
    with torch.no_grad():
        return model(ids)


def _fed(model, ids, is_token=None):
    """A cache into which the model has put these tokens."""
    cache = ModelCache(2)
    positions = mask = None
    if is_token is not None:
        positions, mask = (is_token.cumsum(1) - 1).clamp(min=0), is_token[:, None, None]
    with torch.no_grad():
        model(ids, positions=positions, mask=mask, cache=cache)
    return cache


def _same_logits(got, want, what):
    """Break the promise unless these are the logits, as float32 numbers."""
    is_tensor(got, what)
    expect(got.shape == want.shape, f"{what}: expected logits (B, V) = {tuple(want.shape)}, got {tuple(got.shape)}")
    expect(got.dtype == want.dtype, f"{what}: expected dtype {want.dtype}, got {got.dtype}")
    same(got.float(), want.float(), what)


def _left_padded(lengths, T, salt=0):
    """ids (B, T) and is_token: rows of these lengths at the right, padding of any id to their left."""
    is_token = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    return _ids(len(lengths), T, salt), is_token


def _alone(model, ids, is_token):
    """Each row's last logits when the row is fed without its padding, by itself and without a cache: (B, V)."""
    return torch.cat([_plain(model, row[token][None])[:, -1] for row, token in zip(ids, is_token, strict=True)])


def _leaves_no_graph(model, feed, what):
    """Break the promise unless no gradients are computed, and afterwards everything learns as before."""
    logits = feed()
    expect(not logits.requires_grad, f"{what}: expected logits without a gradient, got requires_grad=True")
    said = "expected the model to run without gradients, got a graph that is built and thrown away: use no_grad"
    expect(not model.made_a_graph, f"{what}: {said}")
    expect(torch.is_grad_enabled(), f"{what}: expected gradients to be on again afterwards")
    expect(model.weight.requires_grad, f"{what}: expected the model's weights to learn as before")


# prefill --------------------------------------------------------------------------------------------------------------


def probe_prefill(prefill):
    """Results that tell the known mistakes apart."""

    def by_hand(ids, held=None, is_token=None, held_is_token=None):
        def ask():
            model = Sums()
            cache = ModelCache(1) if held is None else _fed_sums(model, held, held_is_token)
            return prefill(model, ids, cache, is_token).detach()

        return outcome(ask)

    def length():
        cache = ModelCache(1)
        prefill(Sums(), _ids(2, 3), cache)
        prefill(Sums(), _ids(2, 2), cache)
        return cache.length

    def graph():
        model = Sums()
        return prefill(model, _ids(2, 3), ModelCache(1)).requires_grad, model.made_a_graph

    def real(model, lengths, T):
        ids, is_token = _left_padded(lengths, T)
        return outcome(lambda: prefill(model, ids, ModelCache(2), is_token).detach().float())

    ids, more = _ids(2, 5), _ids(2, 2, 1)
    padded, is_token = _left_padded((2, 4), 5, 2)
    later = torch.cat([is_token, torch.ones(2, 2, dtype=torch.bool)], dim=1)
    empty, all_padding = torch.zeros(2, 3, dtype=torch.bool), torch.tensor([[False] * 3, [True] * 3])
    return [
        by_hand(ids),
        by_hand(ids[:, :1]),
        by_hand(more, held=ids),
        by_hand(padded, is_token=is_token),
        by_hand(padded, is_token=torch.ones_like(is_token)),
        by_hand(padded[:1], is_token=is_token[:1]),
        by_hand(more, held=padded, is_token=later, held_is_token=is_token),
        by_hand(ids[:, 3:], held=ids[:, :3], is_token=torch.cat([all_padding, ~empty[:, :2]], 1), held_is_token=~empty),
        by_hand(more, held=padded, is_token=later[:, -2:], held_is_token=is_token),
        by_hand(more, held=padded, is_token=later[:1], held_is_token=is_token),
        by_hand(more, held=padded, is_token=later[:, 1:], held_is_token=is_token),
        by_hand(padded, is_token=is_token[:, 1:]),
        by_hand(padded, is_token=is_token[1:]),
        outcome(length),
        outcome(graph),
        real(_gpt(), (5, 2, 7), 7),
        real(_gpt(context_length=4), (4, 2, 3), 7),
        real(_llama(), (5, 2, 7), 7),
    ]


def _fed_sums(model, ids, is_token=None):
    """A cache of one layer into which a Sums model has put these tokens."""
    cache = ModelCache(1)
    with torch.no_grad():
        model(ids, mask=None if is_token is None else is_token[:, None, None], cache=cache)
    return cache


def test_a_prompt_by_hand(prefill):
    """A model that adds up what it sees: tokens 2, 3, 4 give the sum 9 of 3 tokens, the last one, 4, at position 2."""
    cache = ModelCache(1)
    got = prefill(Sums(), torch.tensor([[2, 3, 4], [1, 0, 5]]), cache)
    _by_hand(got, [[9, 3, 4, 2], [6, 3, 5, 2]], "three tokens")
    expect(cache.length == 3, f"three tokens: expected 3 in the cache afterwards, got {cache.length}")
    got = prefill(Sums(), torch.tensor([[10, 20], [30, 40]]), cache)
    _by_hand(got, [[39, 5, 20, 4], [76, 5, 40, 4]], "two tokens that follow three in the cache")
    expect(cache.length == 5, f"two more tokens: expected 5 in the cache afterwards, got {cache.length}")


def test_padding_by_hand(prefill):
    """Two tokens of padding, then 5: the sum is 5, of 1 token, at position 0. Padding is not seen, nor counted."""
    F, T = False, True
    ids, is_token = torch.tensor([[7, 7, 5], [1, 2, 3], [9, 4, 6]]), torch.tensor([[F, F, T], [T, T, T], [F, T, T]])
    cache = ModelCache(1)
    got = prefill(Sums(), ids, cache, is_token)
    _by_hand(got, [[5, 1, 5, 0], [6, 3, 3, 2], [10, 2, 6, 1]], "rows of 1, 3 and 2 tokens")
    is_token = torch.tensor([[F, F, T, T, T], [T, T, T, T, T], [F, T, T, T, T]])
    got = prefill(model=Sums(), ids=torch.tensor([[1, 1], [2, 3], [4, 5]]), cache=cache, is_token=is_token)
    want = [[7, 3, 1, 2], [11, 5, 3, 4], [19, 4, 5, 3]]
    _by_hand(got, want, "two tokens that follow rows of 1, 3 and 2 tokens")


def test_a_prompt_gives_the_last_logits(prefill):
    """The logits (B, V) are those of the last token in a forward pass without a cache, for a GPT and for Llamas."""
    for name, model in _more_models().items():
        for B, T in ((3, 7), (1, 1)):
            got = prefill(model, _ids(B, T), ModelCache(2))
            _same_logits(got, _plain(model, _ids(B, T))[:, -1], f"a prompt of {T} tokens for {name}")


def test_chunks_change_nothing(prefill):
    """Seven tokens at once, as 3 and 4, as 1 and 6, as 2, 1, 3 and 1: after each chunk the logits are the same."""
    everything = torch.ones(3, 7, dtype=torch.bool)
    for name, model in _models().items():
        ids = _ids(3, 7)
        want = _plain(model, ids)
        for sizes, is_token in (((3, 4), None), ((1, 6), None), ((2, 1, 3, 1), None), ((3, 4), everything)):
            cache, done = ModelCache(2), 0
            for T in sizes:
                new, done = ids[:, done : done + T], done + T
                got = prefill(model, new, cache, None if is_token is None else is_token[:, :done])
                what = f"chunks of {', '.join(map(str, sizes))} tokens for {name}, after {done} tokens"
                _same_logits(got, want[:, done - 1], what)


def test_each_row_as_if_it_were_alone(prefill):
    """Rows of 5, 2 and 7 tokens, padded on the left with any ids: each gets the logits that it gets alone."""
    for name, model in _models().items():
        ids, is_token = _left_padded((5, 2, 7), 7)
        got = prefill(model, ids, ModelCache(2), is_token)
        _same_logits(got, _alone(model, ids, is_token), f"rows of 5, 2 and 7 tokens for {name}")
        other = torch.where(is_token, ids, (ids + 1) % V)
        again = prefill(model, other, ModelCache(2), is_token)
        _same_logits(again, got, f"the same rows for {name}, with other ids in the padding")


def test_padding_takes_no_positions(prefill):
    """Rows of 4, 2 and 3 tokens fit into 4 positions, although 3 columns of padding stand before them all."""
    for name, model in _models(context_length=4).items():
        ids, is_token = _left_padded((4, 2, 3), 7)
        got = prefill(model, ids, ModelCache(2), is_token)
        _same_logits(got, _alone(model, ids, is_token), f"rows of 4, 2 and 3 tokens in 7 columns for {name}")


def test_padded_prompts_in_chunks(prefill):
    """The same in chunks: the first chunk is all padding for one row, whose tokens still start at position 0."""
    for name, model in _models().items():
        ids, is_token = _left_padded((5, 2, 7), 7)
        for sizes in ((3, 2, 2), (5, 2), (6, 1)):
            cache, done = ModelCache(2), 0
            for T in sizes:
                new, done = ids[:, done : done + T], done + T
                got = prefill(model, new, cache, is_token[:, :done])
            what = f"rows of 5, 2 and 7 tokens in chunks of {', '.join(map(str, sizes))} for {name}"
            _same_logits(got, _alone(model, ids, is_token), what)


def test_is_token_covers_all_that_is_cached(prefill):
    """With 3 tokens in the cache and 2 new ones is_token is (B, 5): (B, 2), (B, 3) and (1, 5) are a ValueError."""
    model = Sums()
    ids, is_token = _left_padded((3, 5), 5)
    got = prefill(model, ids[:, 3:], _fed_sums(model, ids[:, :3], is_token[:, :3]), is_token)
    tokens = [row[token] for row, token in zip(ids, is_token, strict=True)]
    want = [[int(row.sum()), len(row), int(row[-1]), len(row) - 1] for row in tokens]
    _by_hand(got, want, "2 tokens that follow 3 columns in the cache")
    for held, T, B, S in (
        (3, 2, 2, 2),
        (3, 2, 2, 3),
        (3, 2, 2, 6),
        (3, 2, 1, 5),
        (3, 2, 3, 5),
        (0, 3, 2, 2),
        (0, 3, 1, 3),
    ):
        other = torch.ones(B, S, dtype=torch.bool)
        cache = _fed_sums(model, ids[:, :held]) if held else ModelCache(1)
        what = f"is_token {(B, S)} for {T} new tokens in 2 rows, with {held} in the cache"
        raises(ValueError, lambda x=other, c=cache, T=T: prefill(model, ids[:, :T], c, x), what)


def test_a_prompt_without_gradients(prefill):
    """No gradients are computed, whether padding is given or not; afterwards they are on again."""
    for is_token in (None, torch.tensor([[False, True, True], [True, True, True]])):
        model = Sums()
        _leaves_no_graph(model, lambda m=model, x=is_token: prefill(m, _ids(2, 3), ModelCache(1), x), "a prompt")
    model = _llama()
    got = prefill(model, _ids(2, 3), ModelCache(2))
    expect(not got.requires_grad, "logits of a Llama: expected none that need a gradient, got requires_grad=True")
    expect(all(p.requires_grad for p in model.parameters()), "expected parameters that learn as before")


# decode_step ----------------------------------------------------------------------------------------------------------


def probe_decode_step(decode_step):
    """Results that tell the known mistakes apart."""

    def by_hand(ids, held=None, is_token=None, held_is_token=None):
        def ask():
            model = Sums()
            cache = ModelCache(1) if held is None else _fed_sums(model, held, held_is_token)
            return decode_step(model, ids, cache, is_token).detach()

        return outcome(ask)

    def length():
        cache = ModelCache(1)
        decode_step(Sums(), _ids(2, 1), cache)
        return cache.length

    def graph():
        model = Sums()
        return decode_step(model, _ids(2, 1), ModelCache(1)).requires_grad, model.made_a_graph

    held, one = _ids(2, 4), _ids(2, 1, 1)
    _, is_token = _left_padded((2, 5), 5, 2)
    told = {"held": held, "held_is_token": is_token[:, :4]}

    def real(model):
        cache = _fed(model, held, is_token[:, :4])
        return outcome(lambda: decode_step(model, one, cache, is_token).detach().float())

    return [
        by_hand(one),
        by_hand(one[:1], held=held[:1]),
        by_hand(one, held=held),
        by_hand(one, is_token=is_token, **told),
        by_hand(one, is_token=torch.ones_like(is_token), **told),
        by_hand(one, is_token=is_token[:, :4], **told),
        by_hand(one, is_token=is_token[:, 4:], **told),
        by_hand(one, is_token=is_token[:1], **told),
        by_hand(held[:, :2]),
        by_hand(held[:, :2], held=held),
        by_hand(held[:, :0], held=held),
        outcome(length),
        outcome(graph),
        real(_gpt()),
        real(_llama()),
    ]


def test_one_step_by_hand(decode_step):
    """Token 4 after 2 and 3, with a model that adds up what it sees: the sum 9, of 3 tokens, 4 itself, position 2."""
    model = Sums()
    cache = _fed_sums(model, torch.tensor([[2, 3], [1, 0]]))
    got = decode_step(model, torch.tensor([[4], [5]]), cache)
    _by_hand(got, [[9, 3, 4, 2], [6, 3, 5, 2]], "one token that follows two")
    expect(cache.length == 3, f"one token after two: expected 3 in the cache afterwards, got {cache.length}")
    _by_hand(decode_step(model, torch.tensor([[1], [1]]), cache), [[10, 4, 1, 3], [7, 4, 1, 3]], "the step after it")


def test_a_step_with_padding_by_hand(decode_step):
    """Padding is not seen and does not count: after a row of 1 token and one of 3, the next stand at 1 and at 3."""
    F, T = False, True
    model, is_token = Sums(), torch.tensor([[F, F, T], [T, T, T]])
    cache = _fed_sums(model, torch.tensor([[7, 7, 5], [1, 2, 3]]), is_token)
    for token, want in ((4, [[9, 2, 4, 1], [10, 4, 4, 3]]), (8, [[17, 3, 8, 2], [18, 5, 8, 4]])):
        is_token = torch.cat([is_token, torch.tensor([[T], [T]])], dim=1)
        got = decode_step(model=model, ids=torch.tensor([[token], [token]]), cache=cache, is_token=is_token)
        _by_hand(got, want, f"token {token} after padded rows")


def test_steps_equal_the_whole(decode_step):
    """After 3 tokens in the cache, three steps give the logits of a forward pass over the whole text."""
    for name, model in _more_models().items():
        ids = _ids(3, 6)
        want, cache = _plain(model, ids), _fed(model, ids[:, :3])
        for t in range(3, 6):
            got = decode_step(model, ids[:, t : t + 1], cache)
            _same_logits(got, want[:, t], f"the step at position {t} of {name}")


def test_the_first_token_of_all(decode_step):
    """An empty cache is no special case: the first token stands at position 0 and sees itself."""
    _by_hand(decode_step(Sums(), torch.tensor([[6]]), ModelCache(1)), [[6, 1, 6, 0]], "one token in an empty cache")
    for name, model in _models().items():
        ids, cache = _ids(2, 3), ModelCache(2)
        want = _plain(model, ids)
        for t in range(3):
            _same_logits(decode_step(model, ids[:, t : t + 1], cache), want[:, t], f"token {t} of {name}")


def test_steps_of_padded_rows(decode_step):
    """Rows of 3, 1 and 5 tokens, padded on the left, go on for two steps: each row as if it were alone."""
    for name, model in _models().items():
        ids, is_token = _left_padded((5, 3, 7), 7)
        cache = _fed(model, ids[:, :5], is_token[:, :5])
        for t in (5, 6):
            got = decode_step(model, ids[:, t : t + 1], cache, is_token[:, : t + 1])
            want = _alone(model, ids[:, : t + 1], is_token[:, : t + 1])
            _same_logits(got, want, f"step {t - 4} of rows of 3, 1 and 5 tokens for {name}")


def test_a_step_takes_one_token(decode_step):
    """ids are (B, 1): two tokens, or none, are a ValueError."""
    model = Sums()
    _by_hand(decode_step(model, torch.tensor([[6]]), ModelCache(1)), [[6, 1, 6, 0]], "one token")
    for T in (2, 3, 0):
        for held in (0, 2):
            cache = _fed_sums(model, _ids(2, held)) if held else ModelCache(1)
            what = f"a step with ids of the shape (2, {T}), with {held} tokens in the cache"
            raises(ValueError, lambda c=cache, T=T: decode_step(model, _ids(2, T), c), what)


def test_a_step_needs_all_of_is_token(decode_step):
    """With 3 tokens in the cache is_token is (B, 4): (B, 1), (B, 3), (B, 5) and (1, 4) are a ValueError."""
    model, ids = Sums(), _ids(2, 1)
    cache = _fed_sums(model, torch.tensor([[7, 2, 3], [1, 1, 1]]), torch.tensor([[False, True, True], [True] * 3]))
    is_token = torch.tensor([[False, True, True, True], [True] * 4])
    got = decode_step(model, torch.tensor([[4], [4]]), cache, is_token)
    _by_hand(got, [[9, 3, 4, 2], [7, 4, 4, 3]], "a step with is_token (2, 4)")
    for B, S in ((2, 1), (2, 3), (1, 4), (2, 5)):
        cache = _fed_sums(model, _ids(2, 3))
        other = torch.ones(B, S, dtype=torch.bool)
        what = f"a step with is_token {(B, S)}, with 3 tokens of 2 rows in the cache"
        raises(ValueError, lambda x=other, c=cache: decode_step(model, ids, c, x), what)


def test_a_step_without_gradients(decode_step):
    """No gradients are computed, whether padding is given or not; afterwards they are on again."""
    for is_token in (None, torch.tensor([[False, True], [True, True]])):
        model = Sums()
        cache = _fed_sums(model, _ids(2, 1))
        _leaves_no_graph(model, lambda m=model, c=cache, x=is_token: decode_step(m, _ids(2, 1), c, x), "a step")


# generate_cached ------------------------------------------------------------------------------------------------------


@dataclass
class Fed:
    """One call of a model: rows, tokens, whether any part was in train mode, and whether a graph was made."""

    rows: int
    tokens: int
    training: bool
    graph: bool


def _recorded(model):
    """The calls of a model, noted from now on."""
    calls, own = [], model.forward

    def forward(ids, positions=None, mask=None, cache=None):
        logits = own(ids, positions=positions, mask=mask, cache=cache)
        training = any(module.training for module in model.modules())
        calls.append(Fed(*ids.shape, training, logits.requires_grad))
        return logits

    model.forward = forward
    return calls


def _counting(vocab_size=11, context_length=11):
    """A GPT that counts: after token 3 it finds 4 most likely by far, and after the last one 0."""
    sizes = {"n_layers": 1, "d_model": vocab_size + 1, "n_heads": 1, "d_ff": 1}
    config = gpt.GPTConfig(**sizes, vocab_size=vocab_size, context_length=context_length, tied=False)
    model = gpt.GPT(config).double()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    one_hot = torch.eye(vocab_size, vocab_size + 1, dtype=torch.float64)
    state |= {"token_embedding.weight": one_hot, "head.weight": 100 * one_hot.roll(1, dims=0)}
    state |= {name: torch.ones_like(value) for name, value in state.items() if "norm" in name and "weight" in name}
    model.load_state_dict(state)
    return model


def _continued(got, ids, n_new, what):
    """Break the promise unless these are ids followed by n_new tokens a row."""
    is_tensor(got, what)
    B, T = ids.shape
    expect(got.shape == (B, T + n_new), f"{what}: expected shape {(B, T + n_new)}, got {tuple(got.shape)}")
    expect(got.dtype == torch.int64, f"{what}: expected dtype torch.int64, got {got.dtype}")
    same(got[:, :T], ids, f"{what}: the prompt at the beginning")


def _greedy(model, got, ids, n_new, what, is_token=None):
    """Break the promise unless every new token is the likeliest after its row, fed alone and without a cache."""
    _continued(got, ids, n_new, what)
    if is_token is None:
        likeliest = _plain(model, got[:, :-1])[:, -n_new:].argmax(-1)
    else:
        rows = [row[int((~token).sum()) : -1][None] for row, token in zip(got, is_token, strict=True)]
        likeliest = torch.cat([_plain(model, row)[:, -n_new:].argmax(-1) for row in rows])
    for row, n in (likeliest != got[:, -n_new:]).nonzero().tolist():
        want, came = int(likeliest[row, n]), int(got[row, n - n_new])
        raise Broken(f"{what}: expected {want} as new token {n + 1} of row {row}, got {came}")


def probe_generate_cached(generate_cached):
    """Results that tell the known mistakes apart."""

    def ask(model, ids, n_new, fed=True, **options):
        """The ids, what was fed, and the modes afterwards."""

        def asked():
            calls = _recorded(model)
            got = generate_cached(model, ids, n_new, **options)
            noted = [(call.rows, call.tokens) for call in calls] if fed else None
            modes = [any(call.training for call in calls), any(call.graph for call in calls)]
            return [got, noted, modes]

        answer = outcome(asked)
        return answer if isinstance(answer, list) else [answer] * 3

    greedy = {"temperature": 0}
    padded, is_token = _left_padded((3, 1, 4), 4)
    rows, many = torch.tensor([[9, 3], [0, 1]]), _ids(1, 2, vocab_size=5).expand(40, 2)

    def modes():
        model = _gpt()
        model.blocks[0].eval()
        generate_cached(model, rows, 2, **greedy)
        return [module.training for module in model.modules()]

    def drawn(**options):
        """Which tokens are drawn, and how often the whole is the same for the same seed."""

        def asked():
            got = generate_cached(_peaked(), many, 1, generator=rng(1), **options)
            return sorted(set(got[:, -1].tolist()))

        return outcome(asked)

    def repeated():
        first, second, third = (generate_cached(_flat(), many[:8], 3, generator=rng(n)) for n in (1, 1, 2))
        return torch.equal(first, second), torch.equal(first, third)

    def twice(model, rows):
        generate_cached(model, _ids(2, 3), 3, **greedy)
        return generate_cached(model, _ids(rows, 3, 1), 3, **greedy)

    return [
        *ask(_gpt(), _ids(2, 3), 4, **greedy),
        *ask(_llama(), _ids(2, 3), 4, **greedy),
        *ask(_llama(4), _ids(1, 1), 4, **greedy),
        *ask(_llama().float(), _ids(1, 3), 3, **greedy),
        *ask(_gpt(), padded, 4, **greedy, is_token=is_token),
        *ask(_llama(), padded, 4, **greedy, is_token=is_token),
        *ask(_llama(), padded, 1, **greedy, is_token=is_token),
        *ask(_gpt(context_length=8), padded.repeat(1, 3)[:, -9:], 3, **greedy, is_token=_left_padded((3, 1, 4), 9)[1]),
        *ask(_gpt(), padded, 2, fed=False, **greedy, is_token=is_token.flip(1)),
        *ask(_gpt(context_length=5), _ids(2, 3), 2, **greedy),
        *ask(_gpt(context_length=5), _ids(2, 3), 4, fed=False, **greedy),
        *ask(_gpt(), _ids(2, 3), 0, fed=False, **greedy),
        *ask(_gpt(), _ids(2, 3), 1, **greedy),
        *ask(_counting(), rows, 6, **greedy, eos_id=4),
        *ask(_counting(), torch.tensor([[9], [10]]), 4, **greedy, eos_id=0),
        outcome(modes),
        drawn(),
        drawn(temperature=1e6),
        drawn(temperature=1e6, top_k=2),
        drawn(temperature=1e6, top_p=0.5),
        drawn(temperature=1e6, top_k=3, top_p=0.5),
        outcome(repeated),
        outcome(lambda: twice(_llama(), 2)),
        outcome(lambda: twice(_gpt(), 2)),
        outcome(lambda: twice(_gpt(), 1)),
    ]


def _scaled(factor):
    model = _llama(vocab_size=5)
    with torch.no_grad():
        model.head.weight.mul_(factor)
    return model


def _peaked():
    """A Llama that finds one of 5 tokens far likelier than all others."""
    return _scaled(100.0)


def _flat():
    """A Llama that finds 5 tokens about equally likely."""
    return _scaled(1e-3)


def test_counting_by_hand(generate_cached):
    """A GPT that counts goes on from 2, 3 with 4, 5, 6 and from 10 with 0, 1, 2 (it knows 11 tokens)."""
    ids = torch.tensor([[2, 3], [9, 10]])
    got = generate_cached(_counting(), ids, 3, temperature=0)
    same(got, torch.tensor([[2, 3, 4, 5, 6], [9, 10, 0, 1, 2]]), "three tokens after 2, 3 and after 9, 10")
    for n_new in (0, 1):
        got = generate_cached(_counting(), ids, n_new, temperature=0)
        same(got, torch.tensor([[2, 3, 4], [9, 10, 0]])[:, : 2 + n_new], f"max_new_tokens={n_new}")


def test_the_cache_changes_no_token(generate_cached):
    """With temperature 0 every token is the likeliest in a forward pass over the whole text without a cache."""
    for name, model in _more_models().items():
        ids = _ids(3, 4)
        _greedy(model, generate_cached(model, ids, 4, temperature=0), ids, 4, f"text of {name}")
    for model in (_llama(2).float(), _llama(2).bfloat16()):
        dtype = next(model.parameters()).dtype
        ids = _ids(2, 1)
        _continued(generate_cached(model, ids, 2, temperature=0), ids, 2, f"text of a Llama in {dtype}")


def test_each_token_is_fed_once(generate_cached):
    """A prompt of 6 tokens and 4 new ones: 9 tokens are fed, the prompt's together, then one at a time."""
    for rows in (1, 3):
        model, ids = _llama(), _ids(rows, 6)
        calls = _recorded(model)
        generate_cached(model, ids, 4, temperature=0)
        fed = sum(call.rows * call.tokens for call in calls)
        sizes = ", ".join(f"{call.rows} x {call.tokens}" for call in calls)
        said = f"{rows} x 6 tokens and 4 new ones: expected {rows} x 9 tokens fed to the model, got {sizes}"
        expect(fed in (rows * 9, rows * 10), said)  # the very last token need not be fed, but may
        most = max(call.tokens for call in calls)
        expect(most >= 5, f"{rows} x 6 tokens: expected the prompt fed in one call, got {sizes}")


def test_every_text_starts_afresh(generate_cached):
    """A second text does not depend on the first: the same prompt gives the same text, another one its own."""
    model = _llama()
    first = generate_cached(model, _ids(2, 3), 3, temperature=0)
    for B, T in ((2, 4), (1, 2)):
        ids = _ids(B, T, 1)
        _greedy(model, generate_cached(model, ids, 3, temperature=0), ids, 3, "text after another text")
    again = generate_cached(model, _ids(2, 3), 3, temperature=0)
    same(again, first, "the first prompt's text, once more")


def test_padded_rows_go_on_as_if_alone(generate_cached):
    """Prompts of 3, 1 and 4 tokens, padded on the left: each row's text is the one that it gets alone."""
    for name, model in _models().items():
        ids, is_token = _left_padded((3, 1, 4), 5)
        got = generate_cached(model, ids, 4, temperature=0, is_token=is_token)
        _greedy(model, got, ids, 4, f"text of {name} after rows of 3, 1 and 4 tokens", is_token)
    ids, is_token = torch.tensor([[7, 7, 5], [1, 2, 3]]), torch.tensor([[False, False, True], [True] * 3])
    got = generate_cached(_counting(), ids, 4, temperature=0, is_token=is_token, eos_id=7)
    same(got, torch.tensor([[7, 7, 5, 6, 7, 7, 7], [1, 2, 3, 4, 5, 6, 7]]), "padded rows that end with 7")


def test_padding_is_on_the_left(generate_cached):
    """A row whose last column is padding is a ValueError."""
    ids, is_token = _ids(2, 3), torch.tensor([[False, True, True], [True, True, True]])
    model = _gpt()
    got = generate_cached(model, ids, 2, temperature=0, is_token=is_token)
    _greedy(model, got, ids, 2, "text after prompts padded on the left", is_token)
    everything = torch.ones(2, 3, dtype=torch.bool)
    got = generate_cached(model, ids, 2, temperature=0, is_token=everything)
    _greedy(model, got, ids, 2, "text after prompts without padding, and is_token True")
    right = is_token.flip(1)
    raises(ValueError, lambda: generate_cached(model, ids, 2, is_token=right), "a prompt padded on the right")
    right = torch.tensor([[True, False, False], [False, True, False]])
    raises(ValueError, lambda: generate_cached(model, ids, 2, is_token=right), "two prompts padded on the right")


def test_the_text_must_fit(generate_cached):
    """With room for 7 positions, 4 tokens and 3 new ones fit, and 4 and 5 are a ValueError. Padding takes no room."""
    for model in _models(context_length=7).values():
        ids = _ids(3, 4)
        _greedy(model, generate_cached(model, ids, 3, temperature=0), ids, 3, "3 tokens after 4, for 7 positions")
        raises(ValueError, lambda m=model, x=ids: generate_cached(m, x, 5), "5 tokens after 4, for 7 positions")
        raises(ValueError, lambda m=model, x=ids: generate_cached(m, x, 50), "50 tokens after 4, for 7 positions")
        ids, is_token = _left_padded((3, 1, 4), 9)
        got = generate_cached(model, ids, 3, temperature=0, is_token=is_token)
        _greedy(model, got, ids, 3, "3 tokens after rows of 3, 1 and 4 in 9 columns, for 7 positions", is_token)
        what = "5 tokens after rows of 3, 1 and 4 in 9 columns, for 7 positions"
        raises(ValueError, lambda m=model, x=ids, t=is_token: generate_cached(m, x, 5, is_token=t), what)


def test_rows_end_at_eos(generate_cached):
    """A row that has chosen eos_id is filled up with it; when all rows have, nothing more is fed. Any id may be it."""
    ids = torch.tensor([[9, 3], [0, 1]])
    model = _counting()
    calls = _recorded(model)
    got = generate_cached(model, ids, 6, temperature=0, eos_id=4)
    same(got, torch.tensor([[9, 3, 4, 4, 4], [0, 1, 2, 3, 4]]), "rows that end with 4")
    fed = sum(call.rows * call.tokens for call in calls)
    expect(fed <= 2 * 5, f"2 rows of 2 tokens and 3 new, then the end: expected at most 10 tokens fed, got {fed}")
    got = generate_cached(_counting(), torch.tensor([[9], [10]]), 5, temperature=0, eos_id=0)
    same(got, torch.tensor([[9, 10, 0], [10, 0, 0]]), "rows that end with 0")
    got = generate_cached(_counting(), torch.tensor([[4, 1]]), 3, temperature=0, eos_id=4)
    same(got, torch.tensor([[4, 1, 2, 3, 4]]), "a prompt that has eos_id in it")


def test_modes_and_gradients_are_left_alone(generate_cached):
    """While it runs every module is in eval mode and nothing computes gradients; then each mode is as it was."""
    model = _gpt()
    model.blocks[0].eval()
    model.head.eval()
    modes = {name or "the model": module.training for name, module in model.named_modules()}
    calls = _recorded(model)
    generate_cached(model, _ids(2, 3), 3, temperature=0)
    expect(not any(call.training for call in calls), "expected every module in eval mode while it runs, got train mode")
    expect(not any(call.graph for call in calls), "expected no gradients while it runs: use no_grad")
    for name, module in model.named_modules():
        name, words = name or "the model", {True: "train", False: "eval"}
        came, due = words[module.training], words[modes[name]]
        expect(came == due, f"expected {name} in {due} mode afterwards, as before, got {came} mode")
    expect(torch.is_grad_enabled(), "expected gradients to be on again afterwards")
    expect(all(p.requires_grad for p in model.parameters()), "expected parameters that learn as before")


def test_tokens_are_drawn_as_generate_does(generate_cached):
    """Temperature, then top_k, then top_p, then a draw: of 5 tokens as good as equally likely, top_p=0.5 leaves 3."""
    ids = _ids(1, 2, vocab_size=5).expand(40, 2)
    order = _plain(_peaked(), ids[:1])[0, -1].argsort(descending=True).tolist()
    for n, options in ((2, {"top_k": 2}), (3, {"top_p": 0.5}), (2, {"top_k": 3, "top_p": 0.5})):
        got = generate_cached(_peaked(), ids, 1, temperature=1e6, **options, generator=rng(1))
        came = sorted(set(got[:, -1].tolist()))
        said = ", ".join(f"{name}={value}" for name, value in options.items())
        what = f"40 draws with temperature=1e6, {said}"
        expect(came == sorted(order[:n]), f"{what}: expected tokens {sorted(order[:n])}, got {came}")
    got = generate_cached(_peaked(), ids, 1, temperature=1e6, generator=rng(1))
    n = len(set(got[:, -1].tolist()))
    expect(n >= 4, f"40 draws with temperature=1e6: expected nearly all of 5 tokens among them, got {n}")
    got = generate_cached(_peaked(), ids[:3], 2, temperature=0)
    expect(set(got[:, 2].tolist()) == set(order[:1]), "3 rows with temperature=0: expected the likeliest token in each")
    got = generate_cached(_flat(), ids[:16], 2)
    for n in (2, 3):
        expect(len(set(got[:, n].tolist())) > 1, f"new token {n - 1} in 16 rows: expected draws, got the same in all")


def test_the_generator_decides(generate_cached):
    """The same generator state gives the same text, another one another; torch's own generator is not touched."""
    ids, model = _ids(1, 2, vocab_size=5).expand(8, 2), _flat()
    before = torch.get_rng_state()
    first = generate_cached(model, ids, 3, generator=rng(1))
    again = generate_cached(model, ids, 3, generator=rng(1))
    other = generate_cached(model, ids, 3, generator=rng(2))
    expect(torch.equal(first, again), "expected the same text from the same generator state, got another")
    expect(not torch.equal(first, other), "expected another text from another generator state, got the same")
    untouched = torch.equal(before, torch.get_rng_state())
    expect(untouched, "expected chance from the generator that is given only, got draws from torch's own too")
