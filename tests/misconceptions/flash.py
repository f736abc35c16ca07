"""Mistakes that people make in online softmax and in attention by tiles, forward and backward."""

import math

import torch

from . import wrong

INF = math.inf


def _finite(x):
    """x with 0 in place of -inf, so that -inf - -inf does not become NaN."""
    return x.masked_fill(x == -INF, 0.0)


# online_softmax ------------------------------------------------------------------------------------------------------


def _online(chunks, *, start=-INF, top=lambda x: x.amax(-1), origin=_finite, merge=None, keep=lambda chunks: chunks):
    """A correct online softmax, as long as no step is exchanged."""
    merge = merge or (lambda total, new, shrink: total * shrink + new)
    maximum = total = None
    for chunk in keep(chunks):
        if maximum is None:
            maximum, total = torch.full_like(chunk[..., 0], start), torch.zeros_like(chunk[..., 0])
        higher = torch.maximum(maximum, top(chunk))
        zero = origin(higher)
        total = merge(total, (chunk - zero[..., None]).exp().sum(-1), (maximum - zero).exp())
        maximum = higher
    if maximum is None:
        raise ValueError("no chunk")
    return maximum, total


@wrong(
    "online_softmax",
    caught_by="test_what_was_summed_is_rescaled",
    hint="When the maximum grows, what was summed before still counts from the old one. "
    "Multiply it by exp(old maximum - new maximum).",
)
def total_not_rescaled(chunks):
    return _online(chunks, merge=lambda total, new, shrink: total + new)


@wrong(
    "online_softmax",
    caught_by="test_what_was_summed_is_rescaled",
    hint="The sum is rescaled the wrong way round, by exp(new - old). A growing maximum makes old terms smaller: "
    "exp(old - new).",
)
def total_rescaled_upwards(chunks):
    return _online(chunks, merge=lambda total, new, shrink: total / shrink.masked_fill(shrink == 0, 1.0) + new)


@wrong(
    "online_softmax",
    caught_by="test_what_was_summed_is_rescaled",
    hint="The new chunk's sum is rescaled too. It already counts from the new maximum: rescale only what was there.",
)
def new_terms_rescaled_too(chunks):
    # The first chunk has nothing to be rescaled by.
    return _online(chunks, merge=lambda total, new, shrink: (total + new) * shrink.masked_fill(shrink == 0, 1.0))


@wrong(
    "online_softmax",
    caught_by="test_what_was_summed_is_rescaled",
    hint="Each chunk is summed from its own maximum and then added as it is. All terms must count from one maximum: "
    "the running one, which includes this chunk.",
)
def each_chunk_from_its_own_maximum(chunks):
    maximum = total = None
    for chunk in chunks:
        top = chunk.amax(-1)
        new = (chunk - _finite(top)[..., None]).exp().sum(-1)
        maximum, total = (top, new) if maximum is None else (torch.maximum(maximum, top), total + new)
    if maximum is None:
        raise ValueError("no chunk")
    return maximum, total


@wrong(
    "online_softmax",
    caught_by="test_what_was_summed_is_rescaled",
    hint="The maximum starts at 0, so a row of negative numbers only gets the maximum 0. Start at -inf.",
)
def maximum_starts_at_zero(chunks):
    return _online(chunks, start=0.0)


@wrong(
    "online_softmax",
    caught_by="test_minus_infinity_adds_nothing",
    hint="The maximum starts at a large negative number, which a row of only -inf then keeps. Start at -inf, and "
    "see to it that -inf - -inf is never computed.",
)
def maximum_starts_at_a_finite_number(chunks):
    return _online(chunks, start=-1e30)


@wrong(
    "online_softmax",
    caught_by="test_minus_infinity_adds_nothing",
    hint="-inf - -inf is NaN. While a row's maximum is still -inf, subtract 0 in its place: exp(-inf) is 0.",
)
def nan_while_nothing_was_seen(chunks):
    return _online(chunks, origin=lambda x: x)


@wrong(
    "online_softmax",
    caught_by="test_what_was_summed_is_rescaled",
    hint="One maximum is taken over the whole chunk. Every row has its own: amax over the last axis.",
)
def one_maximum_for_all_rows(chunks):
    return _online(chunks, top=lambda x: x.max().expand(x.shape[:-1]))


@wrong(
    "online_softmax",
    caught_by="test_large_numbers_do_not_overflow",
    hint="exp meets the numbers as they are, which overflows at 710 in float64 and at 89 in float32. "
    "Subtract the running maximum first.",
)
def maximum_taken_off_at_the_end(chunks):
    maximum = total = None
    for chunk in chunks:
        top, new = chunk.amax(-1), chunk.exp().sum(-1)
        maximum, total = (top, new) if maximum is None else (torch.maximum(maximum, top), total + new)
    if maximum is None:
        raise ValueError("no chunk")
    return maximum, total * torch.exp(-_finite(maximum))


@wrong(
    "online_softmax",
    caught_by="test_only_one_chunk_at_a_time",
    hint="All chunks are collected first, and then it is an ordinary softmax. Take them one at a time and keep two "
    "numbers a row.",
)
def all_chunks_collected(chunks):
    return _online(chunks, keep=lambda chunks: [torch.cat(rows, -1)] if (rows := list(chunks)) else [])


@wrong(
    "online_softmax",
    caught_by="test_only_one_chunk_at_a_time",
    hint="The chunks are gone through twice. A generator gives them once: find maximum and total in the same pass.",
)
def two_passes_over_the_chunks(chunks):
    maximum = None
    for chunk in chunks:
        maximum = chunk.amax(-1) if maximum is None else torch.maximum(maximum, chunk.amax(-1))
    if maximum is None:
        raise ValueError("no chunk")
    total = torch.zeros_like(maximum)
    for chunk in chunks:
        total = total + (chunk - _finite(maximum)[..., None]).exp().sum(-1)
    return maximum, total


@wrong(
    "online_softmax",
    caught_by="test_a_row_in_two_chunks_by_hand",
    hint="The second result is the logarithm of the sum. Return the sum of exp(x - maximum) itself.",
)
def logarithm_of_the_total(chunks):
    maximum, total = _online(chunks)
    return maximum, maximum + total.log()


@wrong(
    "online_softmax",
    caught_by="test_no_chunk_is_an_error",
    hint="Without any chunk there is no softmax: raise a ValueError, and mind what an empty generator does to `next` "
    "or to a variable that is set in the loop.",
)
def no_chunk_is_a_number(chunks):
    maximum, total = torch.tensor(-INF), torch.tensor(0.0)
    for chunk in chunks:
        higher = torch.maximum(maximum.to(chunk.dtype), chunk.amax(-1))
        total = total.to(chunk.dtype) * (maximum - _finite(higher)).exp()
        total = total + (chunk - _finite(higher)[..., None]).exp().sum(-1)
        maximum = higher
    return maximum, total


# flash_attention -----------------------------------------------------------------------------------------------------
#
# The variants share a correct body whose steps are arguments; each variant gets one step wrong.


def _wide(q):
    return torch.promote_types(q.dtype, torch.float32)


def _keys(S, T, first, stop, causal, block_k):
    """Where the key tiles of a query tile begin."""
    return range(0, min(S, S - T + stop) if causal else S, block_k)


def _group(H, K):
    """The key head of every query head."""
    return torch.arange(H) // (H // K)


def _future(rows, keys, S, T, causal):
    """Which entries of a tile lie in the future."""
    return (keys > rows[:, None] + S - T) if causal else torch.zeros(len(rows), len(keys), dtype=torch.bool)


def _flash(
    q,
    k,
    v,
    causal=False,
    block_q=64,
    block_k=64,
    *,
    scale=lambda q, k, v: q.shape[-1] ** -0.5,
    group=_group,
    keys=_keys,
    future=_future,
    blank=-INF,
    wide=_wide,
    pad=lambda tile, size: tile,
    highest=torch.maximum,
    origin=_finite,
    shrink_total=lambda shrink: shrink,
    shrink_mixed=lambda shrink: shrink,
    finish=lambda mixed, total: mixed / total.masked_fill(total == 0, 1.0)[..., None],
    log=lambda maximum, total, scale: maximum + total.log(),
    typed=lambda out, log, q: (out.to(q.dtype), log),
):
    (B, H, T), (K, S) = q.shape[:3], k.shape[1:3]
    real = wide(q)
    heads, factor = group(H, K), scale(q, k, v)
    k, v = k[:, heads], v[:, heads]
    outs, logs = [], []
    for first in range(0, T, block_q):
        rows = torch.arange(first, min(first + block_q, T))
        q_tile = q[:, :, rows].to(real) * factor
        maximum = q_tile.new_full((B, H, len(rows)), -INF)
        total, mixed = torch.zeros_like(maximum), q_tile.new_zeros(B, H, len(rows), v.shape[-1])
        for start in keys(S, T, first, int(rows[-1]) + 1, causal, block_k):
            k_tile, v_tile = (pad(x[:, :, start : start + block_k].to(real), block_k) for x in (k, v))
            scores = q_tile @ k_tile.mT
            where = torch.arange(start, start + scores.shape[-1])
            scores = scores.masked_fill(future(rows, where, S, T, causal), blank)
            higher = highest(maximum, scores.amax(-1))
            zero = origin(higher)
            shrink, p = (maximum - zero).exp(), (scores - zero[..., None]).exp()
            total = total * shrink_total(shrink) + p.sum(-1)
            mixed = mixed * shrink_mixed(shrink)[..., None] + p @ v_tile
            maximum = higher
        outs.append(finish(mixed, total))
        logs.append(log(maximum, total, factor))
    return typed(torch.cat(outs, 2), torch.cat(logs, 2), q)


def _not_at_all(shrink):
    """A factor of 1: nothing is rescaled."""
    return torch.ones_like(shrink)


def _upwards(shrink):
    return 1 / shrink.masked_fill(shrink == 0, 1.0)


@wrong(
    "flash_attention",
    caught_by="test_two_keys_by_hand",
    hint="The scores are not divided by sqrt(D).",
)
def scale_forgotten(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, scale=lambda q, k, v: 1.0)


@wrong(
    "flash_attention",
    caught_by="test_two_keys_by_hand",
    hint="The scores are divided by sqrt(D) twice: the queries are scaled, and then the scores again.",
)
def scaled_twice(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, scale=lambda q, k, v: 1 / q.shape[-1])


@wrong(
    "flash_attention",
    caught_by="test_one_tile_is_ordinary_attention",
    hint="The scores are divided by the root of H * D, the model's width. Each head has scores of its own: sqrt(D).",
)
def scaled_by_the_model_width(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, scale=lambda q, k, v: (q.shape[1] * q.shape[-1]) ** -0.5)


@wrong(
    "flash_attention",
    caught_by="test_tiles_of_one_key_by_hand",
    hint="When the maximum moves, neither the sum nor the mixed values are rescaled. "
    "Multiply both by exp(old maximum - new maximum).",
)
def nothing_rescaled(q, k, v, causal=False, block_q=64, block_k=64):
    steps = {"shrink_total": _not_at_all, "shrink_mixed": _not_at_all}
    return _flash(q, k, v, causal, block_q, block_k, **steps)


@wrong(
    "flash_attention",
    caught_by="test_tiles_of_one_key_by_hand",
    hint="The mixed values are not rescaled when the maximum moves, only the sum is. "
    "Multiply both by exp(old maximum - new maximum).",
)
def values_not_rescaled(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, shrink_mixed=_not_at_all)


@wrong(
    "flash_attention",
    caught_by="test_tiles_of_one_key_by_hand",
    hint="The sum is not rescaled when the maximum moves, only the mixed values are. "
    "Multiply both by exp(old maximum - new maximum).",
)
def sum_not_rescaled(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, shrink_total=_not_at_all)


@wrong(
    "flash_attention",
    caught_by="test_tiles_of_one_key_by_hand",
    hint="What was summed is rescaled by exp(new - old), the wrong way round. "
    "A growing maximum makes old terms smaller: exp(old - new).",
)
def rescaled_upwards(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, shrink_total=_upwards, shrink_mixed=_upwards)


@wrong(
    "flash_attention",
    caught_by="test_tiles_of_one_key_by_hand",
    hint="Each tile is normalised by itself, so every tile has the same say. "
    "Collect the sum over all tiles and divide once, at the end.",
)
def normalised_in_every_tile(q, k, v, causal=False, block_q=64, block_k=64):
    _, log = _flash(q, k, v, causal, block_q, block_k)
    T, S = q.shape[2], k.shape[2]
    heads = _group(q.shape[1], k.shape[1])
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=_wide(q))
    for first in range(0, T, block_q):
        rows = torch.arange(first, min(first + block_q, T))
        tiles = list(_keys(S, T, first, int(rows[-1]) + 1, causal, block_k))
        for start in tiles:
            where = torch.arange(start, min(start + block_k, S))
            scores = q[:, :, rows].to(_wide(q)) @ k[:, heads][:, :, where].to(_wide(q)).mT / q.shape[-1] ** 0.5
            weights = scores.masked_fill(_future(rows, where, S, T, causal), -INF).softmax(-1).nan_to_num(0.0)
            out[:, :, rows] += weights @ v[:, heads][:, :, where].to(_wide(q)) / len(tiles)
    return out.to(q.dtype), log


@wrong(
    "flash_attention",
    caught_by="test_two_keys_by_hand",
    hint="The mixed values are never divided by the sum of the weights: do it once, after the last tile.",
)
def never_normalised(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, finish=lambda mixed, total: mixed)


@wrong(
    "flash_attention",
    caught_by="test_the_maximum_may_move",
    hint="exp meets the scores as they are, which overflows. Subtract the running maximum first.",
)
def no_maximum_taken_off(q, k, v, causal=False, block_q=64, block_k=64):
    steps = {"highest": lambda old, new: torch.zeros_like(new), "shrink_total": _not_at_all}
    return _flash(q, k, v, causal, block_q, block_k, shrink_mixed=_not_at_all, **steps)


@wrong(
    "flash_attention",
    caught_by="test_blind_queries_get_nothing",
    hint="-inf - -inf is NaN: while a query has seen nothing, its maximum is -inf. Subtract 0 in its place, and do not "
    "divide by a sum of 0.",
)
def nan_for_blind_queries(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, origin=lambda x: x, finish=lambda o, total: o / total[..., None])


@wrong(
    "flash_attention",
    caught_by="test_blind_queries_get_nothing",
    hint="A query that sees nothing has the sum 0, and 0 / 0 is NaN. Divide by 1 there: its out is 0.",
)
def blind_queries_divided_by_zero(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, finish=lambda mixed, total: mixed / total[..., None])


@wrong(
    "flash_attention",
    caught_by="test_blind_queries_get_nothing",
    hint="Hidden scores are set to a large negative number, so a query that sees nothing mixes hidden values. "
    "Set them to -inf.",
)
def hidden_by_a_finite_number(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, blank=-1e9)


@wrong(
    "flash_attention",
    caught_by="test_two_keys_by_hand",
    hint="The second result is the maximum alone. The logsumexp is maximum + log(sum).",
)
def maximum_as_logsumexp(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, log=lambda maximum, total, scale: maximum)


@wrong(
    "flash_attention",
    caught_by="test_two_keys_by_hand",
    hint="The maximum is missing in the logsumexp: it is maximum + log(sum), since the sum counts from the maximum.",
)
def maximum_missing_in_logsumexp(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, log=lambda maximum, total, scale: total.log())


@wrong(
    "flash_attention",
    caught_by="test_two_keys_by_hand",
    hint="The logsumexp is that of the scores before they were scaled. It must be that of the scores divided by "
    "sqrt(D): the backward pass subtracts it from those.",
)
def logsumexp_without_scale(q, k, v, causal=False, block_q=64, block_k=64):
    def log(maximum, total, scale):
        return maximum / scale + total.log()

    return _flash(q, k, v, causal, block_q, block_k, log=log)


@wrong(
    "flash_attention",
    caught_by="test_two_keys_by_hand",
    hint="The logsumexp is in powers of two. It is to be the natural logarithm.",
)
def logsumexp_in_powers_of_two(q, k, v, causal=False, block_q=64, block_k=64):
    def log(maximum, total, scale):
        return maximum / math.log(2.0) + total.log2()

    return _flash(q, k, v, causal, block_q, block_k, log=log)


@wrong(
    "flash_attention",
    caught_by="test_the_future_is_hidden",
    hint="`causal` is not used: queries see the future.",
)
def causal_ignored(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, False, block_q, block_k)


@wrong(
    "flash_attention",
    caught_by="test_the_future_is_hidden",
    hint="Query i is compared with key i. The queries are the last T of the S tokens: query i stands at S - T + i.",
)
def causal_from_the_top_left(q, k, v, causal=False, block_q=64, block_k=64):
    def keys(S, T, first, stop, causal, block_k):
        return range(0, min(S, stop) if causal else S, block_k)

    def future(rows, where, S, T, causal):
        return _future(rows, where, 0, 0, causal)

    return _flash(q, k, v, causal, block_q, block_k, keys=keys, future=future)


@wrong(
    "flash_attention",
    caught_by="test_the_future_is_hidden",
    hint="A query does not see its own token. Hide only keys that come after it: > and not >=.",
)
def own_token_hidden(q, k, v, causal=False, block_q=64, block_k=64):
    def future(rows, where, S, T, causal):
        return _future(rows - 1, where, S, T, causal)

    return _flash(q, k, v, causal, block_q, block_k, future=future)


@wrong(
    "flash_attention",
    caught_by="test_the_future_is_hidden",
    hint="A query sees the token after its own. The last key it may see is its own place, S - T + i.",
)
def next_token_seen(q, k, v, causal=False, block_q=64, block_k=64):
    def future(rows, where, S, T, causal):
        return _future(rows + 1, where, S, T, causal)

    def keys(S, T, first, stop, causal, block_k):
        return _keys(S, T, first, stop + 1, causal, block_k)

    return _flash(q, k, v, causal, block_q, block_k, keys=keys, future=future)


@wrong(
    "flash_attention",
    caught_by="test_the_future_is_hidden",
    hint="Whole tiles of the future are skipped, but the tiles that the diagonal crosses are not masked.",
)
def diagonal_tiles_not_masked(q, k, v, causal=False, block_q=64, block_k=64):
    def future(rows, where, S, T, causal):
        return _future(rows, where, S, T, False)

    return _flash(q, k, v, causal, block_q, block_k, future=future)


@wrong(
    "flash_attention",
    caught_by="test_the_future_is_hidden",
    hint="One tile too many is skipped. A tile counts as long as its first key is seen by the last query of the tile.",
)
def diagonal_tiles_skipped(q, k, v, causal=False, block_q=64, block_k=64):
    def keys(S, T, first, stop, causal, block_k):
        return range(0, max(0, S - T + stop) // block_k * block_k if causal else S, block_k)

    return _flash(q, k, v, causal, block_q, block_k, keys=keys)


@wrong(
    "flash_attention",
    caught_by="test_any_sizes_in_any_tiles",
    hint="The last keys are dropped where block_k does not divide S. Count the tiles with rounding up, "
    "and let the last one be smaller.",
)
def last_keys_dropped(q, k, v, causal=False, block_q=64, block_k=64):
    def keys(S, T, first, stop, causal, block_k):
        seen = _keys(S, T, first, stop, causal, block_k)
        return [start for start in seen if start + block_k <= S or block_k >= S]

    return _flash(q, k, v, causal, block_q, block_k, keys=keys)


@wrong(
    "flash_attention",
    caught_by="test_any_sizes_in_any_tiles",
    hint="The last tile is filled up with keys of zeros, and these are counted: a score of 0 has the weight exp(0). "
    "Set the scores of the padding to -inf.",
)
def padding_counted(q, k, v, causal=False, block_q=64, block_k=64):
    def pad(tile, size):
        return torch.nn.functional.pad(tile, (0, 0, 0, size - tile.shape[2]))

    return _flash(q, k, v, causal, block_q, block_k, pad=pad)


@wrong(
    "flash_attention",
    caught_by="test_query_heads_share_a_key_head",
    hint="Query head h reads key head h % K. Neighbours share one: with 6 on 2 heads, 0-2 read head 0: h // (H // K).",
)
def key_heads_in_turn(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, group=lambda H, K: torch.arange(H) % K)


@wrong(
    "flash_attention",
    caught_by="test_half_precision_is_rounded_at_the_end",
    hint="out stays in float32. Return it in q's dtype.",
)
def out_in_float32(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, typed=lambda out, log, q: (out, log))


@wrong(
    "flash_attention",
    caught_by="test_half_precision_is_rounded_at_the_end",
    hint="Scores and sums are computed in half precision. Convert each tile to float32 first, and out back at the end.",
)
def computed_in_half_precision(q, k, v, causal=False, block_q=64, block_k=64):
    def typed(out, log, q):
        return out, log.to(_wide(q))

    return _flash(q, k, v, causal, block_q, block_k, wide=lambda q: q.dtype, typed=typed)


@wrong(
    "flash_attention",
    caught_by="test_half_precision_is_rounded_at_the_end",
    hint="The logsumexp is rounded to q's half precision. Leave it in float32: the backward pass puts it into exp.",
)
def logsumexp_in_half_precision(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, typed=lambda out, log, q: (out.to(q.dtype), log.to(q.dtype)))


@wrong(
    "flash_attention",
    caught_by="test_one_tile_is_ordinary_attention",
    hint="All is computed in float32, also where q is float64. "
    "Compute in float32 or better: torch.promote_types(q.dtype, torch.float32).",
)
def always_in_float32(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal, block_q, block_k, wide=lambda q: torch.float32)


@wrong(
    "flash_attention",
    caught_by="test_one_tile_is_ordinary_attention",
    hint="q is scaled in place, and the caller still needs it. `.to(dtype)` of a tensor that has this dtype is no "
    "copy: write q * scale, not q *= scale.",
)
def queries_scaled_in_place(q, k, v, causal=False, block_q=64, block_k=64):
    q *= q.shape[-1] ** -0.5
    return _flash(q, k, v, causal, block_q, block_k, scale=lambda q, k, v: 1.0)


@wrong(
    "flash_attention",
    caught_by="test_no_tensor_has_all_scores",
    hint="This is plain attention: all T x S scores are there at once. Loop over tiles of keys, and keep a maximum, "
    "a sum and the mixed values for each query.",
)
def all_scores_at_once(q, k, v, causal=False, block_q=64, block_k=64):
    T, S = q.shape[2], k.shape[2]
    out, log = _flash(q, k, v, causal, T, S, keys=lambda S, T, first, stop, causal, block_k: [0])
    return out, log


@wrong(
    "flash_attention",
    caught_by="test_no_tensor_has_all_scores",
    hint="The causal mask is made for all T x S entries at once. Make it tile by tile, from the places of the tile's "
    "queries and keys.",
)
def whole_mask_at_once(q, k, v, causal=False, block_q=64, block_k=64):
    T, S = q.shape[2], k.shape[2]
    mask = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1) if causal else None

    def future(rows, where, S, T, causal):
        return mask[rows][:, where] if causal else _future(rows, where, S, T, False)

    return _flash(q, k, v, causal, block_q, block_k, future=future)


@wrong(
    "flash_attention",
    caught_by="test_no_tensor_has_all_scores",
    hint="The score tiles are kept until the end, which is as much memory as all T x S scores. "
    "Use a tile at once, and forget it.",
)
def tiles_kept(q, k, v, causal=False, block_q=64, block_k=64):
    kept = []

    def pad(tile, size):
        kept.append(tile.new_empty(*q.shape[:2], min(block_q, q.shape[2]), tile.shape[2]))  # as many as its scores
        return tile

    return _flash(q, k, v, causal, block_q, block_k, pad=pad)


@wrong(
    "flash_attention",
    caught_by="test_no_tensor_has_all_scores",
    hint="block_q and block_k are not used: the tiles are always 64 wide.",
)
def block_sizes_ignored(q, k, v, causal=False, block_q=64, block_k=64):
    return _flash(q, k, v, causal)


@wrong(
    "flash_attention",
    caught_by="test_future_tiles_are_skipped",
    hint="Tiles that lie wholly in the future are computed and then masked. "
    "Skip them: end the loop over keys at the last key that the tile's last query sees.",
)
def future_tiles_computed(q, k, v, causal=False, block_q=64, block_k=64):
    def keys(S, T, first, stop, causal, block_k):
        return range(0, S, block_k)

    return _flash(q, k, v, causal, block_q, block_k, keys=keys)


# flash_attention_backward --------------------------------------------------------------------------------------------


def _weights(scores, logsumexp, future):
    """A tile's weights, made again."""
    return (scores - _finite(logsumexp)).exp().masked_fill(future, 0.0)


def _back(
    grad_out,
    q,
    k,
    v,
    out,
    logsumexp,
    causal=False,
    block_q=64,
    block_k=64,
    *,
    scale=lambda D: D**-0.5,
    scale_q=lambda D: D**-0.5,
    scale_k=lambda D: D**-0.5,
    group=_group,
    keys=_keys,
    future=_future,
    wide=_wide,
    weights=_weights,
    delta=lambda g, o: (g * o).sum(-1, keepdim=True),
    d_scores=lambda p, dp, delta: p * (dp - delta),
    for_dv=lambda p, ds: p,
    put_dq=torch.add,
    put_dkv=torch.add,
    fold=lambda x: x.sum(1),
    typed=lambda x, like: x.to(like.dtype),
):
    (_, H, T, D), (K, S) = q.shape, k.shape[1:3]
    real, heads = wide(q), group(H, K)
    many_k, many_v = k[:, heads], v[:, heads]
    dq, dk, dv = (torch.zeros(x.shape, dtype=real) for x in (q, many_k, many_v))
    for first in range(0, T, block_q):
        rows = torch.arange(first, min(first + block_q, T))
        q_tile, g, o = (x[:, :, rows].to(real) for x in (q, grad_out, out))
        for start in keys(S, T, first, int(rows[-1]) + 1, causal, block_k):
            where = torch.arange(start, min(start + block_k, S))
            k_tile, v_tile = (x[:, :, where].to(real) for x in (many_k, many_v))
            scores = q_tile @ k_tile.mT * scale(D)
            p = weights(scores, logsumexp[:, :, rows, None].to(real), future(rows, where, S, T, causal))
            ds = d_scores(p, g @ v_tile.mT, delta(g, o))
            dq_tile = ds @ k_tile * scale_q(D)
            dk_tile = ds.mT @ q_tile * scale_k(D)
            dv_tile = for_dv(p, ds).mT @ g
            dq[:, :, rows] = put_dq(dq[:, :, rows], dq_tile)
            dk[:, :, where] = put_dkv(dk[:, :, where], dk_tile)
            dv[:, :, where] = put_dkv(dv[:, :, where], dv_tile)
    dk, dv = (torch.stack([fold(x[:, heads == i]) for i in range(K)], dim=1) for x in (dk, dv))
    return typed(dq, q), typed(dk, k), typed(dv, v)


def wrong_steps(caught_by, hint):
    """Enter the backward pass with some steps exchanged, for those that a function gives."""

    def enter(steps):
        def variant(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
            return _back(grad_out, q, k, v, out, logsumexp, causal, block_q, block_k, **steps())

        variant.__name__ = variant.__qualname__ = steps.__name__
        return wrong("flash_attention_backward", caught_by, hint)(variant)

    return enter


@wrong_steps(
    caught_by="test_two_keys_backward_by_hand",
    hint="Softmax's own part is missing: the gradient of a score is p * (dp - delta), with delta the sum of "
    "grad_out * out over the query's row.",
)
def delta_forgotten():
    return {"d_scores": lambda p, dp, delta: p * dp}


@wrong_steps(
    caught_by="test_gradients_add_up_over_tiles",
    hint="delta is summed over one tile. It belongs to the whole row, over all keys: grad_out * out, summed over Dv, "
    "is just that.",
)
def delta_of_one_tile():
    return {"d_scores": lambda p, dp, delta: p * (dp - (p * dp).sum(-1, keepdim=True))}


@wrong_steps(
    caught_by="test_one_tile_gives_torchs_gradients",
    hint="delta is summed over the queries. Each query has its own: sum p * dp over the keys, "
    "or grad_out * out over Dv, the last axis.",
)
def delta_over_the_queries():
    return {"d_scores": lambda p, dp, delta: p * (dp - (p * dp).sum(-2, keepdim=True))}


@wrong_steps(
    caught_by="test_one_tile_gives_torchs_gradients",
    hint="delta is the mean of grad_out * out over Dv. It is the sum.",
)
def delta_averaged():
    return {"delta": lambda g, o: (g * o).mean(-1, keepdim=True)}


@wrong_steps(
    caught_by="test_one_tile_gives_torchs_gradients",
    hint="The scores are made again without the scale: divide them by sqrt(D) before the logsumexp is subtracted.",
)
def scores_not_scaled():
    return {"scale": lambda D: 1.0}


@wrong_steps(
    caught_by="test_two_keys_backward_by_hand",
    hint="dq lacks the scale: the scores are q k^T / sqrt(D), so both dq and dk are divided by sqrt(D).",
)
def dq_not_scaled():
    return {"scale_q": lambda D: 1.0}


@wrong_steps(
    caught_by="test_two_keys_backward_by_hand",
    hint="dk lacks the scale: the scores are q k^T / sqrt(D), so both dq and dk are divided by sqrt(D).",
)
def dk_not_scaled():
    return {"scale_k": lambda D: 1.0}


@wrong_steps(
    caught_by="test_two_keys_backward_by_hand",
    hint="dq and dk both lack the scale: the scores are q k^T / sqrt(D), so both are divided by sqrt(D).",
)
def neither_scaled():
    return {"scale_q": lambda D: 1.0, "scale_k": lambda D: 1.0}


@wrong_steps(
    caught_by="test_two_keys_backward_by_hand",
    hint="dk is scaled twice: its queries are scaled already, and then it is divided by sqrt(D) again.",
)
def dk_scaled_twice():
    return {"scale_k": lambda D: 1 / D}


@wrong_steps(
    caught_by="test_two_keys_backward_by_hand",
    hint="dv is made from the gradients of the scores. The values were mixed by the weights: dv = p^T grad_out.",
)
def dv_from_the_scores_gradient():
    return {"for_dv": lambda p, ds: ds}


@wrong_steps(
    caught_by="test_gradients_add_up_over_tiles",
    hint="The weights are a softmax of the tile alone. The whole row's are exp(score - logsumexp).",
)
def softmax_of_one_tile():
    def weights(scores, logsumexp, future):
        return scores.masked_fill(future, -INF).softmax(-1).nan_to_num(0.0)

    return {"weights": weights}


@wrong_steps(
    caught_by="test_weights_come_from_the_logsumexp",
    hint="exp(score) / exp(logsumexp) overflows for large scores. Subtract first: exp(score - logsumexp).",
)
def exponentials_divided():
    def weights(scores, logsumexp, future):
        return (scores.exp() / _finite(logsumexp).exp()).masked_fill(future, 0.0)

    return {"weights": weights}


@wrong_steps(
    caught_by="test_gradients_add_up_over_tiles",
    hint="dq is overwritten by each tile of keys. It adds up over them.",
)
def dq_overwritten():
    return {"put_dq": lambda old, new: new}


@wrong_steps(
    caught_by="test_gradients_add_up_over_tiles",
    hint="dk and dv are overwritten by each tile of queries. They add up over them.",
)
def dk_and_dv_overwritten():
    return {"put_dkv": lambda old, new: new}


@wrong_steps(
    caught_by="test_gradients_add_up_over_tiles",
    hint="The last keys are dropped where block_k does not divide S. Count the tiles with rounding up, "
    "and let the last one be smaller.",
)
def last_keys_get_no_gradient():
    def keys(S, T, first, stop, causal, block_k):
        seen = _keys(S, T, first, stop, causal, block_k)
        return [start for start in seen if start + block_k <= S or block_k >= S]

    return {"keys": keys}


@wrong_steps(
    caught_by="test_no_gradient_from_the_future",
    hint="Whole tiles of the future are skipped, but in the tiles that the diagonal crosses hidden keys get weights: "
    "set those to 0.",
)
def diagonal_tiles_without_mask():
    def weights(scores, logsumexp, future):
        return (scores - logsumexp.masked_fill(logsumexp == -INF, INF)).exp()

    return {"weights": weights}


@wrong_steps(
    caught_by="test_no_gradient_from_the_future",
    hint="`causal` is not used: hidden keys get weights and gradients.",
)
def backward_without_causal():
    def keys(S, T, first, stop, causal, block_k):
        return range(0, S, block_k)

    return {"keys": keys, "future": lambda rows, where, S, T, causal: _future(rows, where, S, T, False)}


@wrong_steps(
    caught_by="test_no_gradient_from_the_future",
    hint="Query i is compared with key i. The queries are the last T of the S tokens: query i stands at S - T + i.",
)
def backward_from_the_top_left():
    def keys(S, T, first, stop, causal, block_k):
        return range(0, min(S, stop) if causal else S, block_k)

    return {"keys": keys, "future": lambda rows, where, S, T, causal: _future(rows, where, 0, 0, causal)}


@wrong_steps(
    caught_by="test_no_gradient_from_the_future",
    hint="A query's own token gets no gradient from it. Hide only keys that come after it: > and not >=.",
)
def own_token_gets_no_gradient():
    return {"future": lambda rows, where, S, T, causal: _future(rows - 1, where, S, T, causal)}


@wrong_steps(
    caught_by="test_blind_queries_get_no_gradient",
    hint="A query that sees nothing has the logsumexp -inf, and -inf - -inf is NaN. Its weights are all 0.",
)
def nan_from_blind_queries():
    def weights(scores, logsumexp, future):
        return (scores.masked_fill(future, -INF) - logsumexp).exp()

    return {"weights": weights}


@wrong_steps(
    caught_by="test_key_heads_sum_over_their_group",
    hint="A key head's gradients are those of one query head of its group. They are the sum over the whole group.",
)
def one_head_of_the_group():
    return {"fold": lambda x: x[:, -1]}


@wrong_steps(
    caught_by="test_key_heads_sum_over_their_group",
    hint="dk and dv are averaged over the query heads of a group. They are the sum.",
)
def averaged_over_the_group():
    return {"fold": lambda x: x.mean(1)}


@wrong_steps(
    caught_by="test_key_heads_sum_over_their_group",
    hint="Query head h reads key head h % K. Neighbours share one: with 6 on 2 heads, 0-2 read head 0: h // (H // K).",
)
def groups_in_turn():
    return {"group": lambda H, K: torch.arange(H) % K}


@wrong_steps(
    caught_by="test_half_precision_gradients",
    hint="Weights and gradients are computed in half precision. Convert each tile to float32 first, "
    "add up in float32, and convert back at the end.",
)
def gradients_in_half_precision():
    return {"wide": lambda q: q.dtype}


@wrong_steps(
    caught_by="test_half_precision_gradients",
    hint="The gradients stay in float32. Return dq, dk and dv in the dtypes of q, k and v.",
)
def gradients_stay_in_float32():
    return {"typed": lambda x, like: x}


@wrong_steps(
    caught_by="test_one_tile_gives_torchs_gradients",
    hint="All is computed in float32, also where q is float64. "
    "Compute in float32 or better: torch.promote_types(q.dtype, torch.float32).",
)
def gradients_always_in_float32():
    return {"wide": lambda q: torch.float32}


@wrong_steps(
    caught_by="test_future_tiles_need_no_gradient",
    hint="Tiles that lie wholly in the future are computed and then masked. "
    "Skip them: end the loop over keys at the last key that the tile's last query sees.",
)
def gradients_of_future_tiles():
    def keys(S, T, first, stop, causal, block_k):
        return range(0, S, block_k)

    return {"keys": keys}


@wrong(
    "flash_attention_backward",
    caught_by="test_no_tensor_has_all_weights",
    hint="All T x S weights are there at once. Loop over tiles: a tile's weights are exp(score - logsumexp), "
    "whatever the other tiles hold.",
)
def all_weights_at_once(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    def keys(S, T, first, stop, causal, block_k):
        return [0]

    return _back(grad_out, q, k, v, out, logsumexp, causal, q.shape[2], k.shape[2], keys=keys)


@wrong(
    "flash_attention_backward",
    caught_by="test_no_tensor_has_all_weights",
    hint="The causal mask is made for all T x S entries at once. Make it tile by tile, from the places of the tile's "
    "queries and keys.",
)
def whole_mask_in_backward(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    T, S = q.shape[2], k.shape[2]
    mask = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1) if causal else None

    def future(rows, where, S, T, causal):
        return mask[rows][:, where] if causal else _future(rows, where, S, T, False)

    return _back(grad_out, q, k, v, out, logsumexp, causal, block_q, block_k, future=future)


@wrong(
    "flash_attention_backward",
    caught_by="test_no_tensor_has_all_weights",
    hint="block_q and block_k are not used: the tiles are always 64 wide.",
)
def block_sizes_ignored_in_backward(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    return _back(grad_out, q, k, v, out, logsumexp, causal)


@wrong(
    "flash_attention_backward",
    caught_by="test_no_tensor_has_all_weights",
    hint="The weights of all tiles are kept, which is as much memory as all T x S weights. "
    "Use a tile at once for dq, dk and dv, and forget it.",
)
def weights_kept(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    kept = []

    def weights(scores, logsumexp, future):
        kept.append(_weights(scores, logsumexp, future))
        return kept[-1]

    return _back(grad_out, q, k, v, out, logsumexp, causal, block_q, block_k, weights=weights)
