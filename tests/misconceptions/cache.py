"""Mistakes that people make in a key/value cache, in feeding a model through it, and in generating with it."""

import torch
from torch import nn

from tfmlib import attention, cache, sampling

from . import wrong

# KVCache --------------------------------------------------------------------------------------------------------------


class _Layer:
    """One layer, in steps that a misconception can get wrong."""

    def __init__(self, keys, values):
        self.keys, self.values, self.length = keys, values, 0

    def complain(self, k, v):
        B, K, _, D = self.keys.shape
        for x in (k, v):
            if (x.shape[0], x.shape[1], x.shape[3]) != (B, K, D) or x.shape[2] != k.shape[2]:
                raise ValueError(f"expected ({B}, {K}, T, {D})")

    def fit(self, end):
        if end > self.keys.shape[2]:
            raise ValueError("no room")

    def write(self, rows, end, new):
        rows[:, :, self.length : end] = new.detach()

    def append(self, k, v):
        self.complain(k, v)
        end = self.length + k.shape[2]
        self.fit(end)
        self.write(self.keys, end, k)
        self.write(self.values, end, v)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


class _Cache:
    """All layers, in steps that a misconception can get wrong."""

    Layer = _Layer

    def __init__(self, n_layers, batch, n_kv_heads, head_dim, capacity, dtype=torch.float32, device="cpu"):
        self.layers = self.made(n_layers, (batch, n_kv_heads, capacity, head_dim), {"dtype": dtype, "device": device})

    def made(self, n_layers, shape, kind):
        return [self.Layer(torch.zeros(shape, **kind), torch.zeros(shape, **kind)) for _ in range(n_layers)]

    def layer(self, i):
        if not 0 <= i < len(self.layers):
            raise ValueError("no such layer")
        return self.layers[i]

    @property
    def length(self):
        return min(layer.length for layer in self.layers)

    def trim(self, length):
        if length < 0:
            raise ValueError("negative")
        for layer in self.layers:
            layer.length = min(layer.length, length)

    def reset(self):
        self.trim(0)


class _ReturnsNew(_Layer):
    def append(self, k, v):
        start = self.length
        keys, values = super().append(k, v)
        return keys[:, :, start:], values[:, :, start:]


@wrong(
    "KVCache",
    caught_by="test_two_tokens_then_one_by_hand",
    hint="`append` returns only the new keys and values. A query looks at all tokens so far: return those as well.",
)
class OnlyTheNew(_Cache):
    Layer = _ReturnsNew


class _ReturnsOld(_Layer):
    def append(self, k, v):
        old = self.length
        keys, values = super().append(k, v)
        return keys[:, :, :old], values[:, :, :old]


@wrong(
    "KVCache",
    caught_by="test_two_tokens_then_one_by_hand",
    hint="`append` returns what was there before, without the new tokens. A token also looks at itself: "
    "write first, then return all up to the new length.",
)
class WithoutTheNew(_Cache):
    Layer = _ReturnsOld


class _ReturnsAll(_Layer):
    def append(self, k, v):
        super().append(k, v)
        return self.keys[:], self.values[:]


@wrong(
    "KVCache",
    caught_by="test_two_tokens_then_one_by_hand",
    hint="`append` returns the whole room with its empty places, which attention takes for tokens. "
    "Return the first `length` only.",
)
class WholeRoom(_Cache):
    Layer = _ReturnsAll


class _AtTheStart(_Layer):
    def append(self, k, v):
        self.length = 0
        return super().append(k, v)


@wrong(
    "KVCache",
    caught_by="test_two_tokens_then_one_by_hand",
    hint="Every append writes at the beginning, over what was there. Write from `length` to `length + T`.",
)
class StartsOver(_Cache):
    Layer = _AtTheStart


class _Growing(_Layer):
    def __init__(self, shape, kind):
        B, K, self.capacity, D = shape
        super().__init__(torch.zeros(B, K, 0, D, **kind), torch.zeros(B, K, 0, D, **kind))

    def append(self, k, v):
        self.complain(k, v)
        self.fit(self.length + k.shape[2])
        self.keys = torch.cat([self.keys[:, :, : self.length], self.own(k)], dim=2)
        self.values = torch.cat([self.values[:, :, : self.length], self.own(v)], dim=2)
        self.length = self.keys.shape[2]
        return self.keys, self.values

    def own(self, x):
        return x.detach().to(self.keys)

    def fit(self, end):
        if end > self.capacity:
            raise ValueError("no room")


@wrong(
    "KVCache",
    caught_by="test_all_bytes_are_taken_at_once",
    hint="Every append copies all so far into a larger tensor. "
    "Take the room for `capacity` tokens once, in the constructor, and write new ones into it.",
)
class GrowsByCat(_Cache):
    Layer = _Growing

    def made(self, n_layers, shape, kind):
        return [self.Layer(shape, kind) for _ in range(n_layers)]


class _Endless(_Growing):
    def fit(self, end):
        pass


@wrong(
    "KVCache",
    caught_by="test_a_full_cache_takes_no_more",
    hint="The cache grows without end. Take the room for `capacity` tokens once, "
    "and raise a ValueError where new ones do not fit.",
)
class GrowsWithoutEnd(GrowsByCat):
    Layer = _Endless


class _Referring(_Growing):
    def append(self, k, v):
        if self.length:
            return super().append(k, v)
        self.complain(k, v)
        self.fit(k.shape[2])
        self.keys, self.values, self.length = self.own(k), self.own(v), k.shape[2]
        return self.keys, self.values


@wrong(
    "KVCache",
    caught_by="test_it_keeps_copies_without_gradients",
    hint="The caller's own k and v are kept, so that the cache changes when they do. Copy them into the cache's room.",
)
class KeepsReferences(GrowsByCat):
    Layer = _Referring


class _Ring(_Layer):
    def append(self, k, v):
        self.complain(k, v)
        room = self.keys.shape[2]
        end = min(self.length + k.shape[2], room)
        for rows, new in ((self.keys, k), (self.values, v)):
            rows[:, :, :end] = torch.cat([rows[:, :, : self.length], new.detach().to(rows)], dim=2)[:, :, -end:]
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


@wrong(
    "KVCache",
    caught_by="test_a_full_cache_takes_no_more",
    hint="Where there is no room the oldest tokens are dropped in silence. A full cache must raise a ValueError.",
)
class DropsTheOldest(_Cache):
    Layer = _Ring


class _Cutting(_Layer):
    def append(self, k, v):
        left = self.keys.shape[2] - self.length
        return super().append(k[:, :, :left], v[:, :, :left])


@wrong(
    "KVCache",
    caught_by="test_a_full_cache_takes_no_more",
    hint="New tokens that do not fit are dropped in silence. A full cache must raise a ValueError.",
)
class DropsTheNewest(_Cache):
    Layer = _Cutting


class _Unfitted(_Layer):
    def fit(self, end):
        pass


@wrong(
    "KVCache",
    caught_by="test_a_full_cache_takes_no_more",
    hint="Where there is no room, writing ends in torch's error about sizes. "
    "Compare the new length with the capacity first, and raise a ValueError.",
)
class TorchSaysThatItIsFull(_Cache):
    Layer = _Unfitted


class _OneShort(_Layer):
    def fit(self, end):
        super().fit(end + 1)


@wrong(
    "KVCache",
    caught_by="test_append_returns_all_so_far",
    hint="The last place is never used. `capacity` tokens fit: only a new length above the capacity is an error.",
)
class OnePlaceShort(_Cache):
    Layer = _OneShort


class _Unchecked(_Layer):
    def complain(self, k, v):
        pass


@wrong(
    "KVCache",
    caught_by="test_other_shapes_are_errors",
    hint="Nothing checks the shapes of k and v. A batch, a head or a width of 1 is copied to all places in silence: "
    "compare them with the cache's, and raise a ValueError.",
)
class AnyShape(_Cache):
    Layer = _Unchecked


class _OnlyKeysChecked(_Layer):
    def complain(self, k, v):
        super().complain(k, k)


@wrong(
    "KVCache",
    caught_by="test_other_shapes_are_errors",
    hint="Only the shape of k is checked. v must have the same shape, else a ValueError.",
)
class OnlyKeysChecked(_Cache):
    Layer = _OnlyKeysChecked


class _CountsFirst(_Layer):
    def append(self, k, v):
        start, self.length = self.length, self.length + k.shape[2]
        self.complain(k, v)
        self.fit(self.length)
        self.length = start
        return super().append(k, v)


@wrong(
    "KVCache",
    caught_by="test_a_full_cache_takes_no_more",
    hint="`length` has grown although `append` raised an error. Check everything first, and set `length` at the end.",
)
class CountsBeforeItChecks(_Cache):
    Layer = _CountsFirst


class _Learning(_Layer):
    def write(self, rows, end, new):
        rows[:, :, self.length : end] = new


@wrong(
    "KVCache",
    caught_by="test_it_keeps_copies_without_gradients",
    hint="The keys and values are kept with their gradients, and so is everything that they were computed from. "
    "Detach them.",
)
class KeepsGradients(_Cache):
    Layer = _Learning


class _Swapped(_Layer):
    def append(self, k, v):
        return super().append(k, v)[::-1]


@wrong(
    "KVCache",
    caught_by="test_two_tokens_then_one_by_hand",
    hint="Keys and values are exchanged. `append` returns the keys first.",
)
class ValuesFirst(_Cache):
    Layer = _Swapped


class _KeysTwice(_Layer):
    def append(self, k, v):
        keys, _ = super().append(k, v)
        return keys, keys


@wrong(
    "KVCache",
    caught_by="test_two_tokens_then_one_by_hand",
    hint="The keys come out as values, too. Keys and values need a room each.",
)
class KeysForValues(_Cache):
    Layer = _KeysTwice


@wrong(
    "KVCache",
    caught_by="test_every_layer_has_its_own",
    hint="All layers are the same object: `[layer] * n` repeats one. Make a new one for each.",
)
class OneLayerForAll(_Cache):
    def made(self, n_layers, shape, kind):
        return super().made(1, shape, kind) * n_layers


@wrong(
    "KVCache",
    caught_by="test_every_layer_has_its_own",
    hint="Each layer counts for itself, but all write into the same memory, the one's keys over the other's. "
    "Every layer needs its own room.",
)
class OneRoomForAll(_Cache):
    def made(self, n_layers, shape, kind):
        keys, values = torch.zeros(2, *shape, **kind)
        return [self.Layer(keys, values) for _ in range(n_layers)]


@wrong(
    "KVCache",
    caught_by="test_every_layer_has_its_own",
    hint="`layer(i)` gives the last layer for every i. "
    "A function made in a loop sees the loop variable's last value: hand i on.",
)
class AlwaysTheLastLayer(_Cache):
    def layer(self, i):
        return super().layer(i) and self.layers[-1]


@wrong(
    "KVCache",
    caught_by="test_two_tokens_then_one_by_hand",
    hint="Keys and values are written into the same memory, the values over the keys. Each needs a room of its own.",
)
class OneRoomForBoth(_Cache):
    def made(self, n_layers, shape, kind):
        rooms = [torch.zeros(shape, **kind) for _ in range(n_layers)]
        return [self.Layer(room, room) for room in rooms]


@wrong(
    "KVCache",
    caught_by="test_it_keeps_its_own_dtype",
    hint="The cache is float32 whatever `dtype` says. Hand it on where the memory is taken.",
)
class AlwaysFloat32(_Cache):
    def made(self, n_layers, shape, kind):
        return super().made(n_layers, shape, kind | {"dtype": torch.float32})


@wrong(
    "KVCache",
    caught_by="test_length_is_what_all_layers_hold",
    hint="`length` is that of the first layer, which is ahead of the others while tokens are fed. Take the least.",
)
class LengthOfTheFirst(_Cache):
    @property
    def length(self):
        return self.layers[0].length


@wrong(
    "KVCache",
    caught_by="test_length_is_what_all_layers_hold",
    hint="`length` is that of the last layer. A token counts once every layer has it: take the least.",
)
class LengthOfTheLast(_Cache):
    @property
    def length(self):
        return self.layers[-1].length


@wrong(
    "KVCache",
    caught_by="test_length_is_what_all_layers_hold",
    hint="`length` is that of the longest layer. A token counts once every layer has it: take the least.",
)
class LengthOfTheLongest(_Cache):
    @property
    def length(self):
        return max(layer.length for layer in self.layers)


@wrong(
    "KVCache",
    caught_by="test_trim_where_there_is_no_more",
    hint="`trim` makes a layer longer where it holds less, so that empty places come out as tokens. "
    "Take the smaller of the two lengths.",
)
class TrimMakesLonger(_Cache):
    def trim(self, length):
        if length < 0:
            raise ValueError("negative")
        for layer in self.layers:
            layer.length = length


@wrong(
    "KVCache",
    caught_by="test_trim_forgets_what_comes_after",
    hint="`trim(length)` takes `length` tokens away. It keeps the first `length` and forgets the rest.",
)
class TrimTakesAway(_Cache):
    def trim(self, length):
        if length < 0:
            raise ValueError("negative")
        for layer in self.layers:
            layer.length = max(layer.length - length, 0)

    def reset(self):
        super().trim(0)


@wrong(
    "KVCache",
    caught_by="test_trim_forgets_what_comes_after",
    hint="`trim` shortens the first layer only. All layers forget.",
)
class TrimOfOneLayer(_Cache):
    def trim(self, length):
        if length < 0:
            raise ValueError("negative")
        self.layers[0].length = min(self.layers[0].length, length)

    def reset(self):
        super().trim(0)


@wrong(
    "KVCache",
    caught_by="test_trim_forgets_what_comes_after",
    hint="`trim(length)` keeps the last `length` tokens. It keeps the first ones, and forgets those after them.",
)
class TrimKeepsTheEnd(_Cache):
    def trim(self, length):
        if length < 0:
            raise ValueError("negative")
        for layer in self.layers:
            keep = min(layer.length, length)
            for rows in (layer.keys, layer.values):
                rows[:, :, :keep] = rows[:, :, layer.length - keep : layer.length].clone()
            layer.length = keep


@wrong(
    "KVCache",
    caught_by="test_trim_where_there_is_no_more",
    hint="A negative length is accepted by `trim`. It must be a ValueError.",
)
class TrimToLessThanNothing(_Cache):
    def trim(self, length):
        for layer in self.layers:
            layer.length = min(layer.length, max(length, 0))


@wrong(
    "KVCache",
    caught_by="test_trim_where_there_is_no_more",
    hint="A negative length counts from the end, as a slice does. `trim` must raise a ValueError for it.",
)
class TrimCountsFromTheEnd(_Cache):
    def trim(self, length):
        for layer in self.layers:
            layer.length = len(range(layer.length)[:length])


@wrong(
    "KVCache",
    caught_by="test_trim_where_there_is_no_more",
    hint="`trim` beyond the length is an error here. It does nothing where there are no more tokens.",
)
class TrimBeyondIsAnError(_Cache):
    def trim(self, length):
        if not 0 <= length <= self.length:
            raise ValueError("out of range")
        super().trim(length)


@wrong(
    "KVCache",
    caught_by="test_reset_forgets_all",
    hint="`reset` fills the memory with zeros, but keeps the lengths: the zeros count as tokens. "
    "Set every layer's length to 0.",
)
class ResetKeepsLengths(_Cache):
    def reset(self):
        for layer in self.layers:
            layer.keys.zero_()
            layer.values.zero_()


@wrong(
    "KVCache",
    caught_by="test_a_layer_must_exist",
    hint="A list takes -1 for its last entry and raises an IndexError beyond its end. "
    "Check i yourself, and raise a ValueError.",
)
class AnyLayer(_Cache):
    def layer(self, i):
        return self.layers[i]


# prefill --------------------------------------------------------------------------------------------------------------


def _prepared(ids, kv, is_token):
    """Positions and mask by the contract; None for both where no padding is told."""
    if is_token is None:
        return None, None
    T = ids.shape[1]
    if is_token.shape != (len(ids), kv.length + T):
        raise ValueError("is_token must cover all that is cached")
    return (is_token.long().cumsum(1) - 1).clamp(min=0)[:, -T:], attention.padding_mask(is_token)


@torch.no_grad()
def _feed(model, ids, kv, positions=None, mask=None):
    return model(ids, positions=positions, mask=mask, cache=kv)[:, -1]


@wrong(
    "prefill",
    caught_by="test_a_prompt_by_hand",
    hint="The logits of all tokens come out. Only the last one's are needed: (B, V).",
)
def prefill_all_logits(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    with torch.no_grad():
        return model(ids, positions=positions, mask=mask, cache=cache)


@wrong(
    "prefill",
    caught_by="test_a_prompt_by_hand",
    hint="The logits are those of the first token. The last one's tell what comes next: [:, -1].",
)
def prefill_first_logits(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    with torch.no_grad():
        return model(ids, positions=positions, mask=mask, cache=cache)[:, 0]


@wrong(
    "prefill",
    caught_by="test_a_prompt_by_hand",
    hint="The logits come out as (B, 1, V): [:, -1:] keeps the axis of tokens. Take [:, -1].",
)
def prefill_keeping_the_axis(model, ids, cache, is_token=None):
    return _feed(model, ids, cache, *_prepared(ids, cache, is_token))[:, None]


@wrong(
    "prefill",
    caught_by="test_a_prompt_by_hand",
    hint="The model does not get the cache: nothing is kept, and a second chunk does not see the first. "
    "Hand it on as cache=cache.",
)
def prefill_without_the_cache(model, ids, cache, is_token=None):
    if is_token is None:
        return _feed(model, ids, None)
    T = ids.shape[1]
    positions, mask = _prepared(ids, cache, is_token)
    return _feed(model, ids, None, positions, mask[..., -T:])


@wrong(
    "prefill",
    caught_by="test_a_prompt_by_hand",
    hint="The cache is emptied first, so that a second chunk does not see the first. New tokens follow those in it.",
)
def prefill_after_a_reset(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    cache.reset()
    return _feed(model, ids, cache, positions, mask if mask is None else mask[..., -ids.shape[1] :])


@wrong(
    "prefill",
    caught_by="test_a_prompt_by_hand",
    hint="Every chunk's positions start at 0 again. Its first token stands at cache.length: "
    "leave positions to the model, or begin there.",
)
def prefill_positions_restart(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    return _feed(model, ids, cache, torch.arange(ids.shape[1]) if positions is None else positions, mask)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="`is_token` is ignored: padding is seen and counted as if it were text. "
    "Hide it by a mask, and give each row its own positions.",
)
def prefill_padding_ignored(model, ids, cache, is_token=None):
    _prepared(ids, cache, is_token)
    return _feed(model, ids, cache)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="Padding is hidden, but still takes positions. Count tokens only: a row's first token stands at position 0.",
)
def prefill_padding_counted(model, ids, cache, is_token=None):
    _, mask = _prepared(ids, cache, is_token)
    return _feed(model, ids, cache, None, mask)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="The positions are right, but padding is seen. Hand on a mask: `padding_mask(is_token)`.",
)
def prefill_padding_seen(model, ids, cache, is_token=None):
    positions, _ = _prepared(ids, cache, is_token)
    return _feed(model, ids, cache, positions)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="The mask is upside down: the padding is seen, and the tokens are hidden. True means that a query may look.",
)
def prefill_mask_inverted(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    return _feed(model, ids, cache, positions, mask if mask is None else ~mask)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="The positions are one too high: a running count of tokens starts at 1. Subtract 1.",
)
def prefill_positions_from_one(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    if is_token is not None:
        positions = is_token.long().cumsum(1)[:, -ids.shape[1] :]
    return _feed(model, ids, cache, positions, mask)


@wrong(
    "prefill",
    caught_by="test_each_row_as_if_it_were_alone",
    hint="Padding gets the position -1, which a table of learned positions does not have. Clamp positions at 0.",
)
def prefill_positions_below_zero(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    if is_token is not None:
        positions = is_token.long().cumsum(1)[:, -ids.shape[1] :] - 1
    return _feed(model, ids, cache, positions, mask)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="Tokens are counted in the new chunk only, so its positions start at 0 again. "
    "Count over all of `is_token`, then take the last T columns.",
)
def prefill_counting_the_new(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    if is_token is not None:
        positions = (is_token[:, -ids.shape[1] :].long().cumsum(1) - 1).clamp(min=0)
    return _feed(model, ids, cache, positions, mask)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="The new tokens get the first T positions. They are the last T columns: [:, -T:].",
)
def prefill_first_positions(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    if is_token is not None:
        positions = (is_token.long().cumsum(1) - 1).clamp(min=0)[:, : ids.shape[1]]
    return _feed(model, ids, cache, positions, mask)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="All rows get the positions of the first. Rows have different padding: positions are (B, T).",
)
def prefill_positions_of_one_row(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    return _feed(model, ids, cache, positions if positions is None else positions[0], mask)


@wrong(
    "prefill",
    caught_by="test_padding_by_hand",
    hint="`is_token` is taken for the new tokens only. It covers everything in the cache after the call: (B, S).",
)
def prefill_is_token_of_the_new(model, ids, cache, is_token=None):
    if is_token is None:
        return _feed(model, ids, cache)
    if is_token.shape != ids.shape:
        raise ValueError("is_token must have the shape of ids")
    old = torch.ones(len(ids), cache.length, dtype=torch.bool)
    positions, mask = _prepared(ids, cache, torch.cat([old, is_token], dim=1))
    return _feed(model, ids, cache, positions, mask)


@wrong(
    "prefill",
    caught_by="test_is_token_covers_all_that_is_cached",
    hint="The shape of `is_token` is not checked: one row for all, or another error from deep inside. "
    "Raise a ValueError unless it is (B, cache.length + T).",
)
def prefill_any_is_token(model, ids, cache, is_token=None):
    if is_token is None:
        return _feed(model, ids, cache)
    positions = (is_token.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return _feed(model, ids, cache, positions, attention.padding_mask(is_token))


@wrong(
    "prefill",
    caught_by="test_is_token_covers_all_that_is_cached",
    hint="Only the number of columns of `is_token` is checked. Its rows must be those of ids, too.",
)
def prefill_any_number_of_rows(model, ids, cache, is_token=None):
    if is_token is None:
        return _feed(model, ids, cache)
    if is_token.shape[1] != cache.length + ids.shape[1]:
        raise ValueError("columns")
    positions = (is_token.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return _feed(model, ids, cache, positions, attention.padding_mask(is_token))


@wrong(
    "prefill",
    caught_by="test_a_prompt_without_gradients",
    hint="Gradients are computed, and everything that they need is kept. Call the model under torch.no_grad().",
)
def prefill_with_gradients(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    return model(ids, positions=positions, mask=mask, cache=cache)[:, -1]


@wrong(
    "prefill",
    caught_by="test_a_prompt_without_gradients",
    hint="detach() comes too late: the graph is built, held and then thrown away. "
    "Call the model under torch.no_grad().",
)
def prefill_detached_at_the_end(model, ids, cache, is_token=None):
    positions, mask = _prepared(ids, cache, is_token)
    return model(ids, positions=positions, mask=mask, cache=cache)[:, -1].detach()


# decode_step ----------------------------------------------------------------------------------------------------------


def _one(ids):
    if ids.shape[1] != 1:
        raise ValueError("one token at a time")


@wrong(
    "decode_step",
    caught_by="test_a_step_takes_one_token",
    hint="Any number of tokens is accepted. A step takes one: raise a ValueError unless ids are (B, 1).",
)
def step_of_any_length(model, ids, cache, is_token=None):
    return _feed(model, ids, cache, *_prepared(ids, cache, is_token))


@wrong(
    "decode_step",
    caught_by="test_a_step_takes_one_token",
    hint="Of several tokens only the last is fed, in silence. Raise a ValueError unless ids are (B, 1).",
)
def step_of_the_last(model, ids, cache, is_token=None):
    ids = ids[:, -1:]
    return _feed(model, ids, cache, *_prepared(ids, cache, is_token))


@wrong(
    "decode_step",
    caught_by="test_a_step_takes_one_token",
    hint="More than one token is an error, but none is not. Raise a ValueError unless ids are (B, 1).",
)
def step_of_none(model, ids, cache, is_token=None):
    if ids.shape[1] > 1:
        raise ValueError("too many")
    return _feed(model, ids, cache, *_prepared(ids, cache, is_token))


@wrong(
    "decode_step",
    caught_by="test_one_step_by_hand",
    hint="Every step's token stands at position 0. It stands at cache.length, after what the cache holds.",
)
def step_at_position_zero(model, ids, cache, is_token=None):
    _one(ids)
    positions, mask = _prepared(ids, cache, is_token)
    return _feed(model, ids, cache, torch.zeros(1, dtype=torch.long) if positions is None else positions, mask)


@wrong(
    "decode_step",
    caught_by="test_one_step_by_hand",
    hint="The token's position is one too low. With n tokens in the cache, the new one stands at n.",
)
def step_one_behind(model, ids, cache, is_token=None):
    _one(ids)
    positions, mask = _prepared(ids, cache, is_token)
    positions = torch.tensor([cache.length]) if positions is None else positions
    return _feed(model, ids, cache, (positions - 1).clamp(min=0), mask)


@wrong(
    "decode_step",
    caught_by="test_one_step_by_hand",
    hint="The token's position is one too high. With n tokens in the cache, the new one stands at n.",
)
def step_one_ahead(model, ids, cache, is_token=None):
    _one(ids)
    positions, mask = _prepared(ids, cache, is_token)
    positions = torch.tensor([cache.length]) if positions is None else positions
    return _feed(model, ids, cache, positions + 1, mask)


@wrong(
    "decode_step",
    caught_by="test_one_step_by_hand",
    hint="The logits keep the axis of the one token: (B, 1, V). Take [:, -1].",
)
def step_keeping_the_axis(model, ids, cache, is_token=None):
    _one(ids)
    return _feed(model, ids, cache, *_prepared(ids, cache, is_token))[:, None]


@wrong(
    "decode_step",
    caught_by="test_one_step_by_hand",
    hint="The model does not get the cache, so the token sees only itself. Hand it on as cache=cache.",
)
def step_without_the_cache(model, ids, cache, is_token=None):
    _one(ids)
    positions, mask = _prepared(ids, cache, is_token)
    return _feed(model, ids, None, positions, mask if mask is None else mask[..., -1:])


@wrong(
    "decode_step",
    caught_by="test_a_step_with_padding_by_hand",
    hint="`is_token` is not handed on: from the first step on padding is seen and counted.",
)
def step_forgetting_padding(model, ids, cache, is_token=None):
    _one(ids)
    _prepared(ids, cache, is_token)
    return _feed(model, ids, cache)


@wrong(
    "decode_step",
    caught_by="test_a_step_with_padding_by_hand",
    hint="Padding is hidden, but the position is cache.length, which counts it. "
    "A row's position is its number of tokens so far.",
)
def step_counting_padding(model, ids, cache, is_token=None):
    _one(ids)
    _, mask = _prepared(ids, cache, is_token)
    return _feed(model, ids, cache, None, mask)


@wrong(
    "decode_step",
    caught_by="test_a_step_with_padding_by_hand",
    hint="The positions are right, but padding is seen. The mask covers all that the cache holds, old tokens too.",
)
def step_seeing_padding(model, ids, cache, is_token=None):
    _one(ids)
    positions, _ = _prepared(ids, cache, is_token)
    return _feed(model, ids, cache, positions)


@wrong(
    "decode_step",
    caught_by="test_a_step_with_padding_by_hand",
    hint="`is_token` is taken for what was in the cache before the step. It covers the new token, too.",
)
def step_adding_itself(model, ids, cache, is_token=None):
    _one(ids)
    if is_token is not None:
        is_token = torch.cat([is_token, is_token.new_ones(len(is_token), 1)], dim=1)
    return _feed(model, ids, cache, *_prepared(ids, cache, is_token))


@wrong(
    "decode_step",
    caught_by="test_a_step_needs_all_of_is_token",
    hint="The shape of `is_token` is not checked. Raise a ValueError unless it is (B, cache.length + 1).",
)
def step_with_any_is_token(model, ids, cache, is_token=None):
    _one(ids)
    if is_token is None:
        return _feed(model, ids, cache)
    positions = (is_token.long().sum(1, keepdim=True) - 1).clamp(min=0)
    return _feed(model, ids, cache, positions, attention.padding_mask(is_token))


@wrong(
    "decode_step",
    caught_by="test_a_step_without_gradients",
    hint="Gradients are computed, and everything that they need is kept. Call the model under torch.no_grad().",
)
def step_with_gradients(model, ids, cache, is_token=None):
    _one(ids)
    positions, mask = _prepared(ids, cache, is_token)
    return model(ids, positions=positions, mask=mask, cache=cache)[:, -1]


# generate_cached ------------------------------------------------------------------------------------------------------


def _checked(model, ids, max_new_tokens, is_token):
    """The greatest number of columns that will be fed. Raises ValueError for what the contract forbids."""
    if is_token is not None and not is_token[:, -1].all():
        raise ValueError("pad on the left")
    n_rows = ids.shape[1] + max(max_new_tokens - 1, 0)
    longest = n_rows if is_token is None else n_rows - int((~is_token).sum(1).min())
    if longest > model.config.context_length:
        raise ValueError("too long")
    return n_rows


def _made(model, ids, capacity, **changes):
    """A cache for a model, with some of its sizes changed."""
    config, weight = model.config, next(model.parameters())
    sizes = {"n_layers": config.n_layers, "n_kv_heads": config.n_kv_heads, "head_dim": config.head_dim}
    kind = {"dtype": weight.dtype, "device": weight.device}
    return cache.KVCache(batch=len(ids), capacity=capacity, **(sizes | kind | changes))


def _told(is_token, ids):
    """`is_token` for all ids so far: what came after the prompt are tokens."""
    if is_token is None:
        return None
    return torch.cat([is_token, is_token.new_ones(len(ids), ids.shape[1] - is_token.shape[1])], dim=1)


def _next(model, ids, kv, is_token):
    """Feed what the cache does not hold yet: the last token's logits (B, V)."""
    return cache.prefill(model, ids[:, kv.length :], kv, _told(is_token, ids))


def _chosen(logits, temperature, top_k, top_p, generator):
    logits = sampling.apply_temperature(logits, temperature)
    logits = logits if top_k is None else sampling.keep_top_k(logits, top_k)
    logits = logits if top_p is None else sampling.keep_top_p(logits, top_p)
    return sampling.sample(logits, generator)


def _in_eval(model):
    """Eval mode; returns what restores all modes."""
    modes = {module: module.training for module in model.modules()}
    model.eval()

    def restore():
        for module, training in modes.items():
            module.training = training

    return restore


def _ended_by(eos_id, chosen, ended):
    """The tokens, filled up in rows that have ended, and which rows have."""
    if eos_id is None:
        return chosen, ended
    chosen = chosen.masked_fill(ended, eos_id)
    return chosen, ended | (chosen == eos_id)


def _generate(
    model,
    ids,
    max_new_tokens,
    *,
    temperature=1.0,
    top_k=None,
    top_p=None,
    generator=None,
    eos_id=None,
    is_token=None,
    check=_checked,
    make=_made,
    feed=_next,
    choose=_chosen,
    modes=_in_eval,
    end=_ended_by,
    stop=torch.all,
):
    """Right, unless one of the last arguments, the steps, is replaced."""
    n_rows = check(model, ids, max_new_tokens, is_token)
    kv, restore = make(model, ids, n_rows), modes(model)
    ended = torch.zeros(len(ids), dtype=torch.bool)
    with torch.no_grad():
        for _ in range(max_new_tokens):
            logits = feed(model, ids, kv, is_token)
            chosen, ended = end(eos_id, choose(logits, temperature, top_k, top_p, generator), ended)
            ids = torch.cat([ids, chosen[:, None]], dim=1)
            if stop(ended):
                break
    restore()
    return ids


@wrong(
    "generate_cached",
    caught_by="test_each_token_is_fed_once",
    hint="The text is right, but the whole of it is fed again for every token. "
    "Keep one cache: feed the prompt once, then only the newest token.",
)
def generate_without_the_cache(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        if is_token is None:
            return model(ids)[:, -1]
        is_token = _told(is_token, ids)
        return model(ids, (is_token.cumsum(1) - 1).clamp(min=0), attention.padding_mask(is_token))[:, -1]

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_counting_by_hand",
    hint="The whole text is fed at each step, on top of what the cache holds already. "
    "After the prompt feed the newest token only.",
)
def generate_feeding_all_again(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        return cache.prefill(model, ids, kv, _told(is_token, ids))

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_the_cache_changes_no_token",
    hint="The prompt's last token is fed twice: once with the prompt, and again in the first step. "
    "The first new token comes from the logits of the prompt.",
)
def generate_feeding_the_last_twice(model, ids, max_new_tokens, **options):
    def make(model, ids, capacity):
        return _made(model, ids, capacity + 1)

    def feed(model, ids, kv, is_token):
        if kv.length == 0:
            cache.prefill(model, ids, kv, is_token)
        if is_token is None:
            return cache.decode_step(model, ids[:, -1:], kv)
        is_token = torch.cat([is_token, is_token.new_ones(len(ids), kv.length + 1 - is_token.shape[1])], dim=1)
        return cache.decode_step(model, ids[:, -1:], kv, is_token)

    return _generate(model, ids, max_new_tokens, make=make, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_each_token_is_fed_once",
    hint="The prompt is fed token by token. Feed it in one call, with `prefill`: that is one pass, not T.",
)
def generate_reading_token_by_token(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        is_token = _told(is_token, ids)
        for n in range(kv.length, ids.shape[1]):
            told = None if is_token is None else is_token[:, : n + 1]
            logits = cache.decode_step(model, ids[:, n : n + 1], kv, told)
        return logits

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_the_cache_changes_no_token",
    hint="In each step the position is one too high: after n tokens the next one fed stands at n, counted from 0. "
    "Leave it to `decode_step`.",
)
def generate_one_position_ahead(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        if kv.length == 0 or is_token is not None:
            return _next(model, ids, kv, is_token)
        where = torch.tensor([min(ids.shape[1], model.config.context_length - 1)])
        return model(ids[:, -1:], positions=where, cache=kv)[:, -1]

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_the_cache_changes_no_token",
    hint="In each step the newest token is fed at position 0. It stands after what the cache holds: "
    "leave it to `decode_step`.",
)
def generate_at_position_zero(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        if kv.length == 0 or is_token is not None:
            return _next(model, ids, kv, is_token)
        return model(ids[:, -1:], positions=torch.tensor([0]), cache=kv)[:, -1]

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_padded_rows_go_on_as_if_alone",
    hint="`is_token` is not handed on: padding is read as text. Give it to `prefill` and to `decode_step`.",
)
def generate_reading_padding(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        return _next(model, ids, kv, None)

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_padded_rows_go_on_as_if_alone",
    hint="`is_token` is used for the prompt only, and each step sees the padding again. "
    "Hand it on in every step, with a column for each new token.",
)
def generate_forgetting_padding(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        return _next(model, ids, kv, is_token if kv.length == 0 else None)

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_padded_rows_go_on_as_if_alone",
    hint="Padding is hidden, but counted in the positions. A row's first token stands at position 0.",
)
def generate_counting_padding(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        if is_token is None:
            return _next(model, ids, kv, is_token)
        where = torch.arange(kv.length, ids.shape[1])
        return model(ids[:, kv.length :], where, attention.padding_mask(_told(is_token, ids)), kv)[:, -1]

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_padded_rows_go_on_as_if_alone",
    hint="`is_token` stays as wide as the prompt. It covers all that is cached: add a column of True for each new one.",
)
def generate_with_is_token_of_the_prompt(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        return cache.prefill(model, ids[:, kv.length :], kv, is_token)

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_padded_rows_go_on_as_if_alone",
    hint="New tokens are entered into `is_token` as padding, so that nobody sees them. They are tokens: True.",
)
def generate_hiding_what_is_new(model, ids, max_new_tokens, **options):
    def feed(model, ids, kv, is_token):
        if is_token is not None:
            is_token = torch.cat([is_token, is_token.new_zeros(len(ids), ids.shape[1] - is_token.shape[1])], dim=1)
        return cache.prefill(model, ids[:, kv.length :], kv, is_token)

    return _generate(model, ids, max_new_tokens, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_counting_by_hand",
    hint="The cache has room for the prompt only. New tokens are fed, too: "
    "capacity must be at least T + max_new_tokens - 1.",
)
def generate_without_room(model, ids, max_new_tokens, **options):
    def make(model, ids, capacity):
        return _made(model, ids, ids.shape[1])

    return _generate(model, ids, max_new_tokens, make=make, **options)


@wrong(
    "generate_cached",
    caught_by="test_counting_by_hand",
    hint="The cache is float32 whatever the model is. Give it the dtype of the model's weights.",
)
def generate_with_a_float32_cache(model, ids, max_new_tokens, **options):
    def make(model, ids, capacity):
        return _made(model, ids, capacity, dtype=torch.float32)

    return _generate(model, ids, max_new_tokens, make=make, **options)


@wrong(
    "generate_cached",
    caught_by="test_the_cache_changes_no_token",
    hint="The cache has a place for each query head. It keeps keys: n_kv_heads, of which there may be fewer.",
)
def generate_with_query_heads(model, ids, max_new_tokens, **options):
    def make(model, ids, capacity):
        return _made(model, ids, capacity, n_kv_heads=model.config.n_heads)

    return _generate(model, ids, max_new_tokens, make=make, **options)


@wrong(
    "generate_cached",
    caught_by="test_the_cache_changes_no_token",
    hint="The width of a head is computed as d_model // n_heads. A model may have another one: config.head_dim.",
)
def generate_with_computed_head_dim(model, ids, max_new_tokens, **options):
    def make(model, ids, capacity):
        return _made(model, ids, capacity, head_dim=model.config.d_model // model.config.n_heads)

    return _generate(model, ids, max_new_tokens, make=make, **options)


@wrong(
    "generate_cached",
    caught_by="test_every_text_starts_afresh",
    hint="The cache is kept from one call to the next, so that a second text goes on from the first. "
    "Make a new one in each call.",
)
def generate_keeping_the_cache(model, ids, max_new_tokens, **options):
    def make(model, ids, capacity):
        model.kept = getattr(model, "kept", None) or _made(model, ids, 3 * model.config.context_length)
        return model.kept

    def feed(model, ids, kv, is_token):
        new = ids if kv.length == before else ids[:, -1:]
        if is_token is None:
            return cache.prefill(model, new, kv)
        old = torch.zeros(len(ids), kv.length - ids.shape[1] + new.shape[1], dtype=torch.bool)
        return cache.prefill(model, new, kv, torch.cat([old, _told(is_token, ids)], dim=1))

    before = model.kept.length if hasattr(model, "kept") else 0
    return _generate(model, ids, max_new_tokens, make=make, feed=feed, **options)


@wrong(
    "generate_cached",
    caught_by="test_modes_and_gradients_are_left_alone",
    hint="The model stays in eval mode afterwards. Note every submodule's mode, and put it back.",
)
def generate_leaving_eval_mode(model, ids, max_new_tokens, **options):
    return _generate(model, ids, max_new_tokens, modes=lambda model: model.eval, **options)


@wrong(
    "generate_cached",
    caught_by="test_modes_and_gradients_are_left_alone",
    hint="model.train() at the end puts every submodule into train mode. Put each one's own mode back.",
)
def generate_training_all_afterwards(model, ids, max_new_tokens, **options):
    return _generate(model, ids, max_new_tokens, modes=lambda model: model.eval().train, **options)


@wrong(
    "generate_cached",
    caught_by="test_modes_and_gradients_are_left_alone",
    hint="The model runs in train mode, with dropout. Put it into eval mode while it generates.",
)
def generate_in_train_mode(model, ids, max_new_tokens, **options):
    return _generate(model, ids, max_new_tokens, modes=lambda model: lambda: None, **options)


@wrong(
    "generate_cached",
    caught_by="test_padding_is_on_the_left",
    hint="Padding on the right is accepted, and the text goes on after padding. "
    "Raise a ValueError if the last column of `is_token` has any.",
)
def generate_after_padding(model, ids, max_new_tokens, **options):
    def check(model, ids, max_new_tokens, is_token):
        last = None if is_token is None else is_token | (torch.arange(ids.shape[1]) == ids.shape[1] - 1)
        return _checked(model, ids, max_new_tokens, last)

    return _generate(model, ids, max_new_tokens, check=check, **options)


@wrong(
    "generate_cached",
    caught_by="test_the_text_must_fit",
    hint="A text that does not fit is cut short in silence. Raise a ValueError.",
)
def generate_cutting_short(model, ids, max_new_tokens, *, is_token=None, **options):
    longest = ids.shape[1] if is_token is None else int(is_token.sum(1).max())
    max_new_tokens = min(max_new_tokens, max(model.config.context_length - longest + 1, 0))
    return _generate(model, ids, max_new_tokens, is_token=is_token, **options)


@wrong(
    "generate_cached",
    caught_by="test_the_text_must_fit",
    hint="Padding is counted when the text is compared with context_length, or the cache has no room for it. "
    "It takes no position, so count the longest row's tokens. In the cache it does take a place.",
)
def generate_padding_takes_room(model, ids, max_new_tokens, **options):
    def check(model, ids, max_new_tokens, is_token):
        _checked(model, ids, max_new_tokens, None)
        return _checked(model, ids, max_new_tokens, is_token)

    return _generate(model, ids, max_new_tokens, check=check, **options)


@wrong(
    "generate_cached",
    caught_by="test_rows_end_at_eos",
    hint="A row that has ended goes on with other tokens while it waits for the rest. Fill it up with eos_id.",
)
def generate_after_the_end(model, ids, max_new_tokens, **options):
    def end(eos_id, chosen, ended):
        return chosen, ended if eos_id is None else ended | (chosen == eos_id)

    return _generate(model, ids, max_new_tokens, end=end, **options)


@wrong(
    "generate_cached",
    caught_by="test_rows_end_at_eos",
    hint="It goes on although all rows have ended. Stop then.",
)
def generate_never_stopping(model, ids, max_new_tokens, **options):
    return _generate(model, ids, max_new_tokens, stop=lambda ended: False, **options)


@wrong(
    "generate_cached",
    caught_by="test_rows_end_at_eos",
    hint="It stops as soon as one row has ended. The others go on until all have.",
)
def generate_stopping_at_the_first(model, ids, max_new_tokens, **options):
    return _generate(model, ids, max_new_tokens, stop=torch.any, **options)


@wrong(
    "generate_cached",
    caught_by="test_rows_end_at_eos",
    hint="eos_id=0 is taken for none, since 0 is false. Ask `eos_id is None`.",
)
def generate_without_eos_zero(model, ids, max_new_tokens, *, eos_id=None, **options):
    return _generate(model, ids, max_new_tokens, eos_id=eos_id or None, **options)


@wrong(
    "generate_cached",
    caught_by="test_counting_by_hand",
    hint="Only the new tokens come out. The result begins with the prompt: (B, T + new).",
)
def generate_only_what_is_new(model, ids, max_new_tokens, **options):
    return _generate(model, ids, max_new_tokens, **options)[:, ids.shape[1] :]


@wrong(
    "generate_cached",
    caught_by="test_tokens_are_drawn_as_generate_does",
    hint="The likeliest token is taken at every step, whatever the temperature. Draw one, as `generate` does.",
)
def generate_greedily(model, ids, max_new_tokens, **options):
    def choose(logits, temperature, top_k, top_p, generator):
        return logits.argmax(-1)

    return _generate(model, ids, max_new_tokens, choose=choose, **options)


@wrong(
    "generate_cached",
    caught_by="test_tokens_are_drawn_as_generate_does",
    hint="top_k is not handed on.",
)
def generate_without_top_k(model, ids, max_new_tokens, *, top_k=None, **options):
    return _generate(model, ids, max_new_tokens, **options)


@wrong(
    "generate_cached",
    caught_by="test_tokens_are_drawn_as_generate_does",
    hint="top_p is not handed on.",
)
def generate_without_top_p(model, ids, max_new_tokens, *, top_p=None, **options):
    return _generate(model, ids, max_new_tokens, **options)


@wrong(
    "generate_cached",
    caught_by="test_tokens_are_drawn_as_generate_does",
    hint="top_p comes before top_k. `generate` applies temperature, then top_k, then top_p.",
)
def generate_top_p_before_top_k(model, ids, max_new_tokens, **options):
    def choose(logits, temperature, top_k, top_p, generator):
        logits = sampling.apply_temperature(logits, temperature)
        logits = logits if top_p is None else sampling.keep_top_p(logits, top_p)
        logits = logits if top_k is None else sampling.keep_top_k(logits, top_k)
        return sampling.sample(logits, generator)

    return _generate(model, ids, max_new_tokens, choose=choose, **options)


@wrong(
    "generate_cached",
    caught_by="test_the_generator_decides",
    hint="`generator` is not handed on, so that the same seed does not give the same text.",
)
def generate_without_the_generator(model, ids, max_new_tokens, *, generator=None, **options):
    return _generate(model, ids, max_new_tokens, **options)


class _Everything(nn.Module):
    """Calls a model with all ids, and returns the last one's logits as `sampling.generate` wants them."""

    def __init__(self, model, kv, is_token):
        super().__init__()
        self.model, self.kv, self.is_token = model, kv, is_token

    def forward(self, ids):
        told = _told(self.is_token, ids)
        return cache.prefill(self.model, ids[:, -1:], self.kv, None if told is None else told[:, -1:])[:, None]


@wrong(
    "generate_cached",
    caught_by="test_the_cache_changes_no_token",
    hint="Only the prompt's last token is fed, and all before it is lost. Feed the whole prompt first.",
)
def generate_from_the_last_token(model, ids, max_new_tokens, *, is_token=None, **options):
    kv = _made(model, ids, _checked(model, ids, max_new_tokens, is_token))
    padded = is_token is not None and not is_token.all()
    return sampling.generate(_Everything(model, kv, is_token if padded else None), ids, max_new_tokens, **options)
