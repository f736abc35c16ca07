"""Mistakes that people make in reshaping a distribution, drawing from it, and in the two loops."""

import math

import torch
import torch.nn.functional as F

from tfmlib import sampling

from . import wrong

INF = math.inf


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _only(logits, keep):
    return logits.masked_fill(~keep, -INF)


# apply_temperature ----------------------------------------------------------------------------------------------------


def _not_negative(number):
    if not number >= 0:
        raise ValueError("expected 0 or more")


def _greedy(logits):
    return _only(logits, F.one_hot(logits.argmax(-1), logits.shape[-1]).bool())


@wrong(
    "apply_temperature",
    caught_by="test_logits_are_divided",
    hint="The logits are multiplied by the temperature. Divide: a low temperature makes likely tokens likelier.",
)
def multiplied(logits, temperature):
    _not_negative(temperature)
    return logits * temperature if temperature else _greedy(logits)


@wrong(
    "apply_temperature",
    caught_by="test_logits_are_divided",
    hint="The softmax comes before the division, so these are no longer logits. Divide the logits; `sample` does the "
    "softmax.",
)
def softmax_before_dividing(logits, temperature):
    _not_negative(temperature)
    return logits.softmax(-1) / temperature if temperature else _greedy(logits)


@wrong(
    "apply_temperature",
    caught_by="test_logits_are_divided",
    hint="Probabilities are returned. The next steps expect logits: leave the softmax to `sample`.",
)
def probabilities_returned(logits, temperature):
    _not_negative(temperature)
    return (logits / temperature).softmax(-1) if temperature else _greedy(logits)


@wrong(
    "apply_temperature",
    caught_by="test_logits_are_divided",
    hint="The logits are divided by the square root of the temperature. Divide by the temperature itself.",
)
def divided_by_the_root(logits, temperature):
    _not_negative(temperature)
    return logits / temperature**0.5 if temperature else _greedy(logits)


@wrong(
    "apply_temperature",
    caught_by="test_zero_is_greedy",
    hint="Temperature 0 divides by zero, which gives inf or NaN. Treat it apart: keep the first maximum, "
    "set the rest to -inf.",
)
def divided_by_zero(logits, temperature):
    _not_negative(temperature)
    return logits / temperature


@wrong(
    "apply_temperature",
    caught_by="test_zero_is_greedy",
    hint="Temperature 0 is replaced by a tiny number, so that equal maxima stay equal and logits become huge. "
    "Treat it apart: keep the first maximum, set the rest to -inf.",
)
def tiny_for_zero(logits, temperature):
    _not_negative(temperature)
    return logits / max(temperature, 1e-6)


@wrong(
    "apply_temperature",
    caught_by="test_zero_is_greedy",
    hint="Temperature 0 leaves the logits as they are. It means greedy: keep the first maximum, set the rest to -inf.",
)
def zero_ignored(logits, temperature):
    _not_negative(temperature)
    return logits / temperature if temperature else logits.clone()


@wrong(
    "apply_temperature",
    caught_by="test_zero_is_greedy",
    hint="At temperature 0 the result is a one-hot row, whose zeros are logits that can still be drawn. "
    "The rest must be -inf, and the maximum keeps its logit.",
)
def one_hot_for_zero(logits, temperature):
    _not_negative(temperature)
    return logits / temperature if temperature else F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


@wrong(
    "apply_temperature",
    caught_by="test_zero_is_greedy",
    hint="At temperature 0 the maximum's logit is replaced by 0. It keeps its value; only the rest changes, to -inf.",
)
def zero_for_the_maximum(logits, temperature):
    _not_negative(temperature)
    return (
        logits / temperature
        if temperature
        else _greedy(logits).clamp(max=0) - _greedy(logits).clamp(max=0).amax(-1, keepdim=True)
    )


@wrong(
    "apply_temperature",
    caught_by="test_of_equal_maxima_the_first_stays",
    hint="At temperature 0 all equal maxima stay, and chance still decides. Keep only the first: argmax finds it.",
)
def all_maxima_stay(logits, temperature):
    _not_negative(temperature)
    if temperature:
        return logits / temperature
    return _only(logits, logits == logits.amax(-1, keepdim=True))


@wrong(
    "apply_temperature",
    caught_by="test_of_equal_maxima_the_first_stays",
    hint="At temperature 0 the last of equal maxima stays. It must be the first: the lowest id.",
)
def the_last_maximum_stays(logits, temperature):
    _not_negative(temperature)
    return logits / temperature if temperature else _greedy(logits.flip(-1)).flip(-1)


@wrong(
    "apply_temperature",
    caught_by="test_zero_is_greedy",
    hint="At temperature 0 one maximum is taken over all rows. Each row keeps its own: work along the last axis.",
)
def one_maximum_for_all(logits, temperature):
    _not_negative(temperature)
    return logits / temperature if temperature else _greedy(logits.flatten()).view(logits.shape)


@wrong(
    "apply_temperature",
    caught_by="test_zero_is_greedy",
    hint="At temperature 0 the result is the best token's id. Return logits, with -inf for all other tokens.",
)
def ids_for_zero(logits, temperature):
    _not_negative(temperature)
    return logits / temperature if temperature else logits.argmax(-1)


@wrong(
    "apply_temperature",
    caught_by="test_temperature_must_not_be_negative",
    hint="A negative temperature is accepted and makes unlikely tokens likely. It must be a ValueError; so must NaN.",
)
def negative_temperature_accepted(logits, temperature):
    return logits / temperature if temperature else _greedy(logits)


@wrong(
    "apply_temperature",
    caught_by="test_temperature_must_not_be_negative",
    hint="NaN passes the test `temperature < 0`, as every comparison with NaN is False. Ask `not temperature >= 0`.",
)
def nan_temperature_accepted(logits, temperature):
    if temperature < 0:
        raise ValueError("negative")
    return logits / temperature if temperature else _greedy(logits)


# keep_top_k -----------------------------------------------------------------------------------------------------------


def _positive(k):
    if k < 1:
        raise ValueError("k must be 1 or more")


def _ranks(logits):
    """The place of every token in its row, from the most likely down, the lower of equal ids first."""
    return logits.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


@wrong(
    "keep_top_k",
    caught_by="test_of_equal_tokens_the_lower_ids_stay",
    hint="Every token as large as the k-th stays, so equal logits make it more than k. "
    "Keep k ids, not all above a threshold: sort with stable=True and take the first k.",
)
def threshold_keeps_ties(logits, k):
    _positive(k)
    return _only(logits, logits >= logits.sort(-1, descending=True).values[..., min(k, logits.shape[-1]) - 1, None])


@wrong(
    "keep_top_k",
    caught_by="test_of_equal_tokens_the_lower_ids_stay",
    hint="Among equal logits the wrong ids stay: `topk` does not promise which it takes. "
    "The lower ids must: sort with stable=True, descending.",
)
def ties_by_topk(logits, k):
    _positive(k)
    best = logits.topk(min(k, logits.shape[-1])).indices
    return torch.full_like(logits, -INF).scatter(-1, best, logits.gather(-1, best))


@wrong(
    "keep_top_k",
    caught_by="test_of_equal_tokens_the_lower_ids_stay",
    hint="Among equal logits the higher ids stay. The lower ids must: sort descending with stable=True, "
    "do not flip an ascending order.",
)
def ties_to_the_higher_ids(logits, k):
    _positive(k)
    return _only(logits, _ranks(logits.flip(-1)).flip(-1) < k)


@wrong(
    "keep_top_k",
    caught_by="test_the_two_largest_stay",
    hint="The k smallest logits stay. Sort from the largest down: descending=True.",
)
def the_smallest_stay(logits, k):
    _positive(k)
    return _only(logits, _ranks(-logits) < k)


@wrong(
    "keep_top_k",
    caught_by="test_the_two_largest_stay",
    hint="The k largest are removed, and the rest stay. It is the other way round.",
)
def the_largest_removed(logits, k):
    _positive(k)
    return _only(logits, _ranks(logits) >= k)


@wrong(
    "keep_top_k",
    caught_by="test_the_two_largest_stay",
    hint="The mask is in sorted order: the first k places stay, whatever stands there. "
    "Scatter it back to the ids with the sort's indices.",
)
def k_mask_in_sorted_order(logits, k):
    _positive(k)
    return _only(logits, (torch.arange(logits.shape[-1]) < k).expand(logits.shape))


@wrong(
    "keep_top_k",
    caught_by="test_the_two_largest_stay",
    hint="The tokens that are dropped get the logit 0, which can still be drawn. They must be -inf.",
)
def dropped_are_zero(logits, k):
    _positive(k)
    return logits.masked_fill(_ranks(logits) >= k, 0.0)


@wrong(
    "keep_top_k",
    caught_by="test_the_two_largest_stay",
    hint="The tokens that are dropped get a large negative number. Use -inf: no finite number is safe beside "
    "large logits.",
)
def dropped_are_large_and_negative(logits, k):
    _positive(k)
    return logits.masked_fill(_ranks(logits) >= k, -1e4)


@wrong(
    "keep_top_k",
    caught_by="test_the_two_largest_stay",
    hint="Only the k largest are returned, without the places they stood at. Return all V logits, the rest at -inf.",
)
def only_the_sorted(logits, k):
    _positive(k)
    return logits.sort(-1, descending=True).values[..., :k]


@wrong(
    "keep_top_k",
    caught_by="test_the_two_largest_stay",
    hint="The kept logits are turned into log-probabilities. They keep their values: only the rest changes.",
)
def kept_are_renormalised(logits, k):
    _positive(k)
    return _only(logits, _ranks(logits) < k).log_softmax(-1)


@wrong(
    "keep_top_k",
    caught_by="test_every_row_has_its_own_k",
    hint="The k largest are sought over all rows together. Each row keeps its own k: work along the last axis.",
)
def k_for_all_rows(logits, k):
    _positive(k)
    return _only(logits, (_ranks(logits.flatten()) < k).view(logits.shape))


@wrong(
    "keep_top_k",
    caught_by="test_k_may_be_one_or_all",
    hint="k > V ends in an error of torch's. Then every token stays: use min(k, V).",
)
def k_beyond_the_vocabulary(logits, k):
    _positive(k)
    threshold = logits.topk(k).values[..., -1:]
    rank = _ranks(logits)
    return _only(logits, (logits >= threshold) & (rank < k))


@wrong(
    "keep_top_k",
    caught_by="test_k_must_be_positive",
    hint="k = 0 is accepted, and no token is left to draw. Raise a ValueError for k < 1.",
)
def k_of_zero_accepted(logits, k):
    return _only(logits, _ranks(logits) < k)


@wrong(
    "keep_top_k",
    caught_by="test_k_must_be_positive",
    hint="k below 1 is taken for 1. It is a mistake of the caller's: raise a ValueError.",
)
def k_at_least_one(logits, k):
    return _only(logits, _ranks(logits) < max(k, 1))


# keep_top_p -----------------------------------------------------------------------------------------------------------


def _kept(logits, p, rule, width=_wide, descending=True):
    """Right but for the rule: which places stay, given the sorted probabilities and their running sum."""
    _not_negative(p)
    if p >= 1:
        return logits.clone()
    probabilities = width(logits).softmax(-1)
    probabilities, order = probabilities.sort(dim=-1, descending=descending, stable=True)
    stays = rule(probabilities, probabilities.cumsum(-1))
    return _only(logits, torch.zeros_like(stays).scatter(-1, order, stays))


def _before(probabilities, total, p):
    """The right rule."""
    return _and_the_first(total - probabilities < p)


def _and_the_first(stays):
    return stays | (torch.arange(stays.shape[-1]) == 0)


_CROSSING = (
    "The token that crosses p is dropped, so that less than p stays. "
    "Ask for the sum *before* each token: it stays while that is below p."
)


@wrong("keep_top_p", caught_by="test_the_token_that_crosses_stays", hint=_CROSSING)
def crossing_token_dropped(logits, p):
    return _kept(logits, p, lambda probabilities, total: _and_the_first(total <= p))


@wrong("keep_top_p", caught_by="test_the_token_that_crosses_stays", hint=_CROSSING)
def crossing_token_dropped_at_p_too(logits, p):
    return _kept(logits, p, lambda probabilities, total: _and_the_first(total < p))


@wrong(
    "keep_top_p",
    caught_by="test_there_is_always_one",
    hint="The token that crosses p is dropped, even if it is the first, and nothing is left. "
    "Ask for the sum *before* each token: it stays while that is below p.",
)
def crossing_token_dropped_always(logits, p):
    return _kept(logits, p, lambda probabilities, total: total <= p)


@wrong(
    "keep_top_p",
    caught_by="test_the_fewest_that_reach_p",
    hint="When the sum is exactly p, one token more is kept. p itself is enough: a token is out once the sum before "
    "it is p or more (>=).",
)
def one_more_at_p(logits, p):
    return _kept(
        logits,
        p,
        lambda probabilities, total: _and_the_first(total - probabilities <= p) if p else _and_the_first(total < 0),
    )


@wrong(
    "keep_top_p",
    caught_by="test_tokens_may_stand_in_any_order",
    hint="The mask is in sorted order, but the logits are not. Scatter it back with the sort's indices.",
)
def p_mask_in_sorted_order(logits, p):
    _not_negative(p)
    if p >= 1:
        return logits.clone()
    probabilities = _wide(logits).softmax(-1).sort(dim=-1, descending=True).values
    return _only(logits, _before(probabilities, probabilities.cumsum(-1), p))


@wrong(
    "keep_top_p",
    caught_by="test_tokens_may_stand_in_any_order",
    hint="The mask is gathered by the sort's indices, which sorts it a second time. To undo the sort, scatter: "
    "mask.scatter(-1, indices, mask).",
)
def gathered_not_scattered(logits, p):
    _not_negative(p)
    if p >= 1:
        return logits.clone()
    probabilities, order = _wide(logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    return _only(logits, _before(probabilities, probabilities.cumsum(-1), p).gather(-1, order))


@wrong(
    "keep_top_p",
    caught_by="test_tokens_may_stand_in_any_order",
    hint="The running sum goes over the tokens in the order of their ids. Sort them first, the most likely first.",
)
def not_sorted(logits, p):
    _not_negative(p)
    if p >= 1:
        return logits.clone()
    probabilities = _wide(logits).softmax(-1)
    return _only(logits, _before(probabilities, probabilities.cumsum(-1), p))


@wrong(
    "keep_top_p",
    caught_by="test_the_token_that_crosses_stays",
    hint="The sort is ascending, so the unlikely tokens stay. Sort with descending=True.",
)
def ascending(logits, p):
    return _kept(logits, p, lambda probabilities, total: _before(probabilities, total, p), descending=False)


@wrong(
    "keep_top_p",
    caught_by="test_tokens_may_stand_in_any_order",
    hint="The logits come back sorted. Every token must keep its place: scatter the mask back to the ids.",
)
def sorted_logits_returned(logits, p):
    _not_negative(p)
    if p >= 1:
        return logits.clone()
    ranked = logits.sort(dim=-1, descending=True).values
    probabilities = _wide(ranked).softmax(-1)
    return _only(ranked, _before(probabilities, probabilities.cumsum(-1), p))


@wrong(
    "keep_top_p",
    caught_by="test_the_token_that_crosses_stays",
    hint="The running sum is one of logits. Sum probabilities: softmax first.",
)
def sum_of_logits(logits, p):
    _not_negative(p)
    if p >= 1:
        return logits.clone()
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    stays = _before(ranked, ranked.cumsum(-1), p)
    return _only(logits, torch.zeros_like(stays).scatter(-1, order, stays))


@wrong(
    "keep_top_p",
    caught_by="test_the_token_that_crosses_stays",
    hint="Tokens stay whose own probability is p or more. It is the sum, from the most likely down, that must reach p.",
)
def each_alone_against_p(logits, p):
    return _kept(logits, p, lambda probabilities, total: _and_the_first(probabilities >= p))


@wrong(
    "keep_top_p",
    caught_by="test_every_row_has_its_own_nucleus",
    hint="Tokens stay whose probability is at least a share of the largest: that is min-p. "
    "Here the sum, from the most likely down, must reach p.",
)
def min_p(logits, p):
    return _kept(logits, p, lambda probabilities, total: probabilities >= (1 - p) * probabilities[..., :1])


@wrong(
    "keep_top_p",
    caught_by="test_of_equal_tokens_the_lower_ids_enter",
    hint="All tokens as likely as the last one needed stay. Of equal ones only as many may enter as p needs, "
    "the lower ids first.",
)
def p_threshold_keeps_ties(logits, p):
    def rule(probabilities, total):
        last = probabilities.masked_fill(~_before(probabilities, total, p), INF).amin(-1, keepdim=True)
        return probabilities >= last

    return _kept(logits, p, rule)


@wrong(
    "keep_top_p",
    caught_by="test_of_equal_tokens_the_lower_ids_enter",
    hint="Of equal tokens the higher ids enter first. The lower ids must: sort descending with stable=True, "
    "do not flip an ascending order.",
)
def p_ties_to_the_higher_ids(logits, p):
    return _kept(logits.flip(-1), p, lambda probabilities, total: _before(probabilities, total, p)).flip(-1)


@wrong(
    "keep_top_p",
    caught_by="test_every_row_has_its_own_nucleus",
    hint="All rows keep as many tokens as the first. Each row has a nucleus of its own size.",
)
def one_size_for_all(logits, p):
    def rule(probabilities, total):
        stays = _before(probabilities, total, p)
        return stays.reshape(-1, stays.shape[-1])[0].expand(stays.shape).contiguous()

    return _kept(logits, p, rule)


@wrong(
    "keep_top_p",
    caught_by="test_the_token_that_crosses_stays",
    hint="The kept logits are turned into log-probabilities. They keep their values: `sample` renormalises.",
)
def nucleus_renormalised(logits, p):
    kept = _kept(logits, p, lambda probabilities, total: _before(probabilities, total, p))
    return _wide(kept).log_softmax(-1).to(logits.dtype)


@wrong(
    "keep_top_p",
    caught_by="test_the_token_that_crosses_stays",
    hint="Probabilities are returned, 0 for those that are dropped. Return logits, with -inf for those.",
)
def nucleus_as_probabilities(logits, p):
    kept = _kept(logits, p, lambda probabilities, total: _before(probabilities, total, p))
    return _wide(kept).softmax(-1).to(logits.dtype)


@wrong(
    "keep_top_p",
    caught_by="test_p_of_one_keeps_all",
    hint="With p = 1 tokens are dropped once the sum has been rounded to 1. p >= 1 keeps all: return early.",
)
def tail_dropped_at_one(logits, p):
    _not_negative(p)
    probabilities, order = _wide(logits).softmax(-1).sort(dim=-1, descending=True, stable=True)
    stays = _before(probabilities, probabilities.cumsum(-1), min(p, 1.0))
    return _only(logits, torch.zeros_like(stays).scatter(-1, order, stays))


@wrong(
    "keep_top_p",
    caught_by="test_there_is_always_one",
    hint="p = 0 keeps no token at all. The most likely one always stays.",
)
def none_at_zero(logits, p):
    return _kept(logits, p, lambda probabilities, total: total - probabilities < p)


@wrong(
    "keep_top_p",
    caught_by="test_there_is_always_one",
    hint="p = 0 is taken for `no limit`, and all tokens stay. It keeps the most likely one.",
)
def zero_keeps_all(logits, p):
    if p == 0:
        return logits.clone()
    return _kept(logits, p, lambda probabilities, total: _before(probabilities, total, p))


@wrong(
    "keep_top_p",
    caught_by="test_nucleus_of_large_logits_and_halves",
    hint="Probabilities are summed in half precision, where small ones get lost. Use float32 at least: "
    "logits.float() where they are narrower.",
)
def summed_in_half(logits, p):
    return _kept(logits, p, lambda probabilities, total: _before(probabilities, total, p), width=lambda x: x)


@wrong(
    "keep_top_p",
    caught_by="test_nucleus_of_large_logits_and_halves",
    hint="exp of large logits overflows to inf. Use softmax, which subtracts the maximum first.",
)
def exp_overflows(logits, p):
    _not_negative(p)
    if p >= 1:
        return logits.clone()
    ranked, order = _wide(logits).sort(dim=-1, descending=True, stable=True)
    weights = ranked.float().exp()
    probabilities = weights / weights.sum(-1, keepdim=True)
    stays = _before(probabilities, probabilities.cumsum(-1), p)
    return _only(logits, torch.zeros_like(stays).scatter(-1, order, stays))


@wrong(
    "keep_top_p",
    caught_by="test_p_must_not_be_negative",
    hint="A negative p is accepted. It must be a ValueError, as must NaN.",
)
def negative_p_accepted(logits, p):
    return _kept(logits, abs(max(p, 0.0)), lambda probabilities, total: _before(probabilities, total, p))


@wrong(
    "keep_top_p",
    caught_by="test_p_must_not_be_negative",
    hint="NaN passes the test `p < 0`, as every comparison with NaN is False. Ask `not p >= 0`.",
)
def nan_p_accepted(logits, p):
    if p < 0:
        raise ValueError("negative")
    return _kept(logits, 0.0 if p != p else p, lambda probabilities, total: _before(probabilities, total, p))


# sample ---------------------------------------------------------------------------------------------------------------


def _draw(weights, generator):
    """One id for each row of weights (..., V)."""
    ids = torch.multinomial(weights.reshape(-1, weights.shape[-1]), 1, generator=generator)
    return ids.view(weights.shape[:-1])


def _noise(logits, generator):
    return torch.rand(logits.shape, generator=generator, dtype=torch.float64)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="The most likely token is always taken. That is greedy; draw at random instead.",
)
def always_argmax(logits, generator=None):
    torch.rand(1, generator=generator)
    return logits.argmax(-1)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="The logits are drawn from as if they were probabilities. Softmax first.",
)
def logits_as_weights(logits, generator=None):
    weights = logits.double().clamp(min=0)
    return _draw(torch.where(weights.sum(-1, keepdim=True) > 0, weights, 1.0), generator)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="The logits go to `multinomial` as they are, which wants weights that are not negative. Softmax first.",
)
def logits_to_multinomial(logits, generator=None):
    return _draw(logits, generator)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="All tokens are equally likely. Draw from softmax(logits).",
)
def all_equally_likely(logits, generator=None):
    return _draw((logits > -INF).double(), generator)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="The softmax is taken twice, which flattens the distribution. Once is enough.",
)
def softmax_twice(logits, generator=None):
    return _draw(_wide(logits).softmax(-1).softmax(-1) * (logits > -INF), generator)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="Normal noise is added to the logits. To draw from the softmax it must be Gumbel noise: "
    "-log(-log(u)), u uniform.",
)
def normal_noise(logits, generator=None):
    return (logits + torch.randn(logits.shape, generator=generator)).argmax(-1)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="Uniform noise is added to the logits. To draw from the softmax it must be Gumbel noise: "
    "-log(-log(u)), u uniform.",
)
def uniform_noise(logits, generator=None):
    return (logits + _noise(logits, generator)).argmax(-1)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="One logarithm is missing: -log(u) is exponential noise. Gumbel noise is -log(-log(u)).",
)
def exponential_noise(logits, generator=None):
    return (logits - _noise(logits, generator).log()).argmax(-1)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="The Gumbel noise has the wrong sign: it is -log(-log(u)), and not log(-log(u)).",
)
def gumbel_with_the_wrong_sign(logits, generator=None):
    return (logits + (-_noise(logits, generator).log()).log()).argmax(-1)


@wrong(
    "sample",
    caught_by="test_tokens_come_as_often_as_softmax_says",
    hint="Probabilities times uniform noise favours the likely tokens. Divide them by exponential noise, "
    "add Gumbel noise to the logits, or use `multinomial`.",
)
def probability_times_noise(logits, generator=None):
    return (logits.double().softmax(-1) * _noise(logits, generator)).argmax(-1)


@wrong(
    "sample",
    caught_by="test_every_row_has_its_own_distribution",
    hint="The softmax runs over the rows. It must run over the vocabulary, the last axis.",
)
def softmax_over_rows(logits, generator=None):
    weights = _wide(logits)
    return _draw(weights.softmax(0 if logits.ndim > 1 else -1).nan_to_num(0.0), generator)


@wrong(
    "sample",
    caught_by="test_rows_do_not_share_their_luck",
    hint="All rows share one random number, so that rows with equal logits get equal tokens. Draw one for each row.",
)
def one_number_for_all_rows(logits, generator=None):
    cumulative = logits.double().softmax(-1).cumsum(-1)
    u = torch.rand(1, generator=generator, dtype=torch.float64)
    return (cumulative <= u * cumulative[..., -1:]).sum(-1)


@wrong(
    "sample",
    caught_by="test_rows_do_not_share_their_luck",
    hint="Rows that differ only in their last place share one random number. Draw one for each row, of every axis.",
)
def one_number_for_each_batch(logits, generator=None):
    cumulative = logits.double().softmax(-1).cumsum(-1)
    sizes = [n if i == 0 else 1 for i, n in enumerate(logits.shape[:-1])]
    u = torch.rand(*sizes, 1, generator=generator, dtype=torch.float64)
    return (cumulative <= u * cumulative[..., -1:]).sum(-1)


@wrong(
    "sample",
    caught_by="test_a_sure_token_is_drawn",
    hint="The ids have a last axis of size 1. It is (..., V) -> (...): squeeze it.",
)
def ids_with_an_axis_too_many(logits, generator=None):
    return _draw(_wide(logits).softmax(-1), generator)[..., None]


@wrong(
    "sample",
    caught_by="test_a_sure_token_is_drawn",
    hint="Squeezing drops every axis of size 1, also those of the batch. Give the ids the shape logits.shape[:-1].",
)
def all_axes_squeezed(logits, generator=None):
    return _draw(_wide(logits).softmax(-1), generator).squeeze()


@wrong(
    "sample",
    caught_by="test_a_sure_token_is_drawn",
    hint="Only (B, V) works: `multinomial` takes no more axes. Flatten the others first, and view the ids back.",
)
def only_two_axes(logits, generator=None):
    return torch.multinomial(_wide(logits).softmax(-1), 1, generator=generator)[:, 0]


@wrong(
    "sample",
    caught_by="test_a_sure_token_is_drawn",
    hint="The ids are not int64, and a table of embeddings cannot be asked with them everywhere. Return int64.",
)
def small_integers(logits, generator=None):
    return _draw(_wide(logits).softmax(-1), generator).int()


@wrong(
    "sample",
    caught_by="test_a_sure_token_is_drawn",
    hint="Every id is too large by one: count the sums that are below the random number, and do not add one.",
)
def off_by_one(logits, generator=None):
    return (_draw(_wide(logits).softmax(-1), generator) + 1).clamp(max=logits.shape[-1] - 1)


@wrong(
    "sample",
    caught_by="test_chance_comes_from_the_generator",
    hint="`generator` is ignored: the draws come from torch's own. Hand it on to the function that draws.",
)
def generator_ignored(logits, generator=None):
    return _draw(_wide(logits).softmax(-1), None)


@wrong(
    "sample",
    caught_by="test_chance_comes_from_the_generator",
    hint="The generator is set back at every call, so that every call draws the same. Only use it: never seed it here.",
)
def seeded_again(logits, generator=None):
    if generator is not None:
        generator.manual_seed(generator.initial_seed())
    return _draw(_wide(logits).softmax(-1), generator)


@wrong(
    "sample",
    caught_by="test_chance_comes_from_the_generator",
    hint="torch's own generator is seeded from the one given, which disturbs everybody else's draws. "
    "Hand the generator on to the function that draws.",
)
def seeds_torchs_own(logits, generator=None):
    if generator is not None:
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
    return _draw(_wide(logits).softmax(-1), None)


@wrong(
    "sample",
    caught_by="test_without_a_generator_torchs_own_is_used",
    hint="Without a generator one with a fixed seed is made, so that every call draws the same. "
    "None means torch's own: hand None on.",
)
def fixed_seed_without_one(logits, generator=None):
    return _draw(_wide(logits).softmax(-1), torch.Generator().manual_seed(0) if generator is None else generator)


@wrong(
    "sample",
    caught_by="test_without_a_generator_torchs_own_is_used",
    hint="Without a generator a fresh one is made, so that torch.manual_seed repeats nothing. "
    "None means torch's own: hand None on.",
)
def fresh_generator_without_one(logits, generator=None):
    if generator is None:
        generator = torch.Generator()
        generator.seed()
    return _draw(_wide(logits).softmax(-1), generator)


@wrong(
    "sample",
    caught_by="test_draws_from_large_logits_and_halves",
    hint="exp of large logits overflows to inf. Use softmax, which subtracts the maximum first.",
)
def exp_of_large_logits(logits, generator=None):
    weights = _wide(logits).float().exp()
    return _draw(weights / weights.sum(-1, keepdim=True), generator)


# generate -------------------------------------------------------------------------------------------------------------
#
# The variants share a correct loop whose steps are handed in; each variant gets one step wrong.


def _reshaped(logits, temperature, top_k, top_p):
    logits = sampling.apply_temperature(logits, temperature)
    logits = logits if top_k is None else sampling.keep_top_k(logits, top_k)
    return logits if top_p is None else sampling.keep_top_p(logits, top_p)


def _eval(model):
    """Puts all in eval mode, and returns what undoes it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()

    def undo():
        for module, mode in modes:
            module.training = mode

    return undo


def _fill(chosen, ended, eos_id):
    return torch.where(ended, eos_id, chosen)


def _grow(
    model,
    ids,
    max_new_tokens,
    *,
    temperature=1.0,
    top_k=None,
    top_p=None,
    generator=None,
    eos_id=None,
    read=lambda ids: ids,
    last=lambda logits: logits[:, -1],
    reshape=_reshaped,
    draw=sampling.sample,
    begin=_eval,
    no_grad=torch.no_grad,
    has_eos=lambda eos_id: eos_id is not None,
    ended_at_first=lambda ids, eos_id: torch.zeros(len(ids), dtype=torch.bool),
    fill=_fill,
    all_ended=torch.all,
    always_undo=True,
):
    undo = begin(model)
    done = False
    ended = ended_at_first(ids, eos_id)
    try:
        with no_grad():
            for _ in range(max_new_tokens):
                chosen = draw(reshape(last(model(read(ids))), temperature, top_k, top_p), generator)
                if has_eos(eos_id):
                    chosen = fill(chosen, ended, eos_id)
                    ended = ended | (chosen == eos_id)
                ids = torch.cat([ids, chosen[:, None]], 1)
                if has_eos(eos_id) and all_ended(ended):
                    break
        done = True
    finally:
        if done or always_undo:
            undo()
    return ids


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="The logits are read at the first position. The next token's stand at the last: logits[:, -1].",
)
def first_position(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, last=lambda logits: logits[:, 0])


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="The logits are read at the last but one position. The next token's stand at the last: logits[:, -1].",
)
def last_but_one_position(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, last=lambda logits: logits[:, -2:][:, 0])


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="The logits are averaged over the positions. The next token's stand at the last: logits[:, -1].",
)
def mean_over_positions(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, last=lambda logits: logits.mean(1))


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="The model gets the last token alone and forgets all before. Without a cache it needs the whole of ids.",
)
def last_token_alone(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, read=lambda ids: ids[:, -1:])


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="The model gets the prompt at every step, and never what it has written. Call it with the longer ids.",
)
def prompt_again_and_again(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, read=lambda _: ids)


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="Only the new tokens are returned. Return the prompt with them: (B, T + new).",
)
def new_tokens_alone(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options)[:, ids.shape[1] :]


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="There is one token too many: the loop runs max_new_tokens times, and no more.",
)
def one_too_many(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens + 1, **options)


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="max_new_tokens is taken for the whole length. It counts the new tokens, without the prompt.",
)
def length_of_the_whole(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens - ids.shape[1], **options)


@wrong(
    "generate",
    caught_by="test_each_token_depends_on_all_before",
    hint="All rows get the first row's token. Draw one for each row.",
)
def first_rows_token_for_all(model, ids, max_new_tokens, **options):
    def draw(logits, generator):
        return sampling.sample(logits, generator)[:1].expand(len(logits))

    return _grow(model, ids, max_new_tokens, **options, draw=draw)


@wrong(
    "generate",
    caught_by="test_tokens_follow_the_chain",
    hint="The most likely token is always taken. Draw with `sample`; temperature 0 is for greedy.",
)
def greedy_always(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, draw=lambda logits, generator: logits.argmax(-1))


@wrong(
    "generate",
    caught_by="test_tokens_follow_the_chain",
    hint="`sample` gets probabilities, and takes their softmax once more. Hand it logits.",
)
def probabilities_to_sample(model, ids, max_new_tokens, **options):
    def draw(logits, generator):
        p = logits.softmax(-1)
        return sampling.sample(torch.where(p > 0, p, -INF), generator)

    return _grow(model, ids, max_new_tokens, **options, draw=draw)


@wrong(
    "generate",
    caught_by="test_temperature_reshapes_what_is_drawn",
    hint="The logits are multiplied by the temperature. Use `apply_temperature`, which divides.",
)
def temperature_multiplied(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(logits, 1 / temperature if temperature else 0, top_k, top_p)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_temperature_reshapes_what_is_drawn",
    hint="Temperature 0 is taken for `not given` (`if temperature:`), so that tokens are drawn at temperature 1. "
    "0 is greedy: always call `apply_temperature`.",
)
def zero_temperature_skipped(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(logits, temperature or 1.0, top_k, top_p)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_temperature_reshapes_what_is_drawn",
    hint="The temperature is not used. Begin with `apply_temperature`.",
)
def temperature_forgotten(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(logits, 1.0, top_k, top_p)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_first_temperature_then_top_k_then_top_p",
    hint="The temperature comes last, when top_p has already chosen by the old probabilities. "
    "The order is temperature, top_k, top_p.",
)
def temperature_last(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return sampling.apply_temperature(_reshaped(logits, 1.0, top_k, top_p), temperature)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_first_temperature_then_top_k_then_top_p",
    hint="top_p comes before top_k, so that its share is not one of the k tokens. "
    "The order is temperature, top_k, top_p.",
)
def top_p_before_top_k(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(_reshaped(logits, temperature, None, top_p), 1.0, top_k, None)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_first_temperature_then_top_k_then_top_p",
    hint="The order is reversed: top_p, then top_k, then temperature. It is temperature, top_k, top_p.",
)
def top_p_first_of_all(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(_reshaped(logits, 1.0, None, top_p), temperature, top_k, None)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_first_temperature_then_top_k_then_top_p",
    hint="top_k and top_p are alternatives here: with top_k, top_p is ignored. Apply both, one after the other.",
)
def either_k_or_p(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(logits, temperature, top_k, top_p if top_k is None else None)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_top_k_and_top_p_limit_the_choice",
    hint="top_p = 0 is taken for `not given` (`if top_p:`). It keeps one token: ask `top_p is not None`.",
)
def zero_top_p_skipped(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(logits, temperature, top_k, top_p or None)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_top_k_and_top_p_limit_the_choice",
    hint="top_k is not used. Apply `keep_top_k` after the temperature, unless it is None.",
)
def top_k_forgotten(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(logits, temperature, None, top_p)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_top_k_and_top_p_limit_the_choice",
    hint="top_p is not used. Apply `keep_top_p` last, unless it is None.",
)
def top_p_forgotten(model, ids, max_new_tokens, **options):
    def reshape(logits, temperature, top_k, top_p):
        return _reshaped(logits, temperature, top_k, None)

    return _grow(model, ids, max_new_tokens, **options, reshape=reshape)


@wrong(
    "generate",
    caught_by="test_all_chance_comes_from_the_generator",
    hint="The generator is not handed on to `sample`, so that draws cannot be repeated with it.",
)
def generator_not_handed_on(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, draw=lambda logits, generator: sampling.sample(logits))


@wrong(
    "generate",
    caught_by="test_a_row_that_has_ended_is_filled",
    hint="A row that has chosen eos_id goes on with other tokens. Fill it up with eos_id while others still grow.",
)
def ended_rows_go_on(model, ids, max_new_tokens, **options):
    seen = []

    def fill(chosen, ended, eos_id):
        return chosen

    def all_ended(ended):
        seen.append(ended)
        return torch.stack(seen).any(0).all()

    return _grow(model, ids, max_new_tokens, **options, fill=fill, all_ended=all_ended)


@wrong(
    "generate",
    caught_by="test_a_row_that_has_ended_is_filled",
    hint="A row that has ended is filled up with 0. Fill it up with eos_id.",
)
def filled_with_zeros(model, ids, max_new_tokens, **options):
    def fill(chosen, ended, eos_id):
        return chosen.masked_fill(ended, 0)

    return _grow(model, ids, max_new_tokens, **options, fill=fill)


@wrong(
    "generate",
    caught_by="test_a_row_that_has_ended_is_filled",
    hint="The loop stops as soon as any row has chosen eos_id. It stops when all rows have.",
)
def stops_with_the_first(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, all_ended=torch.any)


@wrong(
    "generate",
    caught_by="test_a_row_that_has_ended_is_filled",
    hint="The loop goes on to max_new_tokens when all rows have ended. Stop then.",
)
def never_stops_early(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, all_ended=lambda ended: False)


@wrong(
    "generate",
    caught_by="test_a_row_that_has_ended_is_filled",
    hint="The loop stops only if all rows choose eos_id in the same step. Remember which rows have ended.",
)
def ended_forgotten(model, ids, max_new_tokens, *, eos_id=None, **options):
    last = []

    def draw(logits, generator):
        last[:] = [sampling.sample(logits, generator)]
        return last[0]

    def all_ended(ended):
        return bool((last[0] == eos_id).all())

    fill = lambda chosen, ended, eos_id: chosen  # noqa: E731
    return _grow(model, ids, max_new_tokens, **options, eos_id=eos_id, draw=draw, fill=fill, all_ended=all_ended)


@wrong(
    "generate",
    caught_by="test_a_row_that_has_ended_is_filled",
    hint="eos_id = 0 is taken for `not given` (`if eos_id:`). Ask `eos_id is not None`.",
)
def eos_of_zero_skipped(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, has_eos=bool)


@wrong(
    "generate",
    caught_by="test_only_a_chosen_eos_ends_a_row",
    hint="A prompt that holds eos_id counts as ended. Only an eos_id that was chosen ends a row.",
)
def eos_in_the_prompt_ends(model, ids, max_new_tokens, **options):
    def ended_at_first(ids, eos_id):
        none = torch.zeros(len(ids), dtype=torch.bool)
        return none if eos_id is None else (ids == eos_id).any(1)

    return _grow(model, ids, max_new_tokens, **options, ended_at_first=ended_at_first)


@wrong(
    "generate",
    caught_by="test_only_a_chosen_eos_ends_a_row",
    hint="A prompt whose last token is eos_id counts as ended. Only an eos_id that was chosen ends a row.",
)
def eos_at_the_prompts_end_ends(model, ids, max_new_tokens, **options):
    def ended_at_first(ids, eos_id):
        none = torch.zeros(len(ids), dtype=torch.bool)
        return none if eos_id is None else ids[:, -1] == eos_id

    return _grow(model, ids, max_new_tokens, **options, ended_at_first=ended_at_first)


@wrong(
    "generate",
    caught_by="test_the_model_runs_in_eval_mode",
    hint="The model runs in the mode that it is in, so that dropout disturbs it. Put it in eval mode first.",
)
def eval_forgotten(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, begin=lambda model: lambda: None)


@wrong(
    "generate",
    caught_by="test_the_model_runs_in_eval_mode",
    hint="Only the model's own flag is set, and its parts stay in train mode. model.eval() reaches all of them.",
)
def only_the_top_in_eval(model, ids, max_new_tokens, **options):
    def begin(model):
        mode, model.training = model.training, False
        return lambda: setattr(model, "training", mode)

    return _grow(model, ids, max_new_tokens, **options, begin=begin)


@wrong(
    "generate",
    caught_by="test_every_mode_is_restored",
    hint="The model is left in eval mode, so that training goes on without dropout. Restore every module's mode.",
)
def left_in_eval(model, ids, max_new_tokens, **options):
    def begin(model):
        model.eval()
        return lambda: None

    return _grow(model, ids, max_new_tokens, **options, begin=begin)


@wrong(
    "generate",
    caught_by="test_every_mode_is_restored",
    hint="The model is put in train mode at the end, whatever mode it was in. Remember every module's mode.",
)
def always_back_to_train(model, ids, max_new_tokens, **options):
    def begin(model):
        model.eval()
        return model.train

    return _grow(model, ids, max_new_tokens, **options, begin=begin)


@wrong(
    "generate",
    caught_by="test_every_mode_is_restored",
    hint="All parts get the model's own mode back, also those that were in another. Remember every module's mode.",
)
def only_the_tops_mode(model, ids, max_new_tokens, **options):
    def begin(model):
        mode = model.training
        model.eval()
        return lambda: model.train(mode)

    return _grow(model, ids, max_new_tokens, **options, begin=begin)


@wrong(
    "generate",
    caught_by="test_every_mode_is_restored",
    hint="When the model raises an error, the modes are not restored. Do it in a `finally`.",
)
def modes_lost_in_an_error(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, always_undo=False)


@wrong(
    "generate",
    caught_by="test_nothing_is_recorded_for_gradients",
    hint="Every step is recorded for gradients, which costs memory. Run the loop under torch.no_grad().",
)
def gradients_recorded(model, ids, max_new_tokens, **options):
    return _grow(model, ids, max_new_tokens, **options, no_grad=torch.enable_grad)


@wrong(
    "generate",
    caught_by="test_nothing_is_recorded_for_gradients",
    hint="Gradients are switched off for everybody who comes after. Use `with torch.no_grad():` around the loop.",
)
def gradients_left_off(model, ids, max_new_tokens, **options):
    ids = _grow(model, ids, max_new_tokens, **options)
    torch.set_grad_enabled(False)
    return ids


# beam_search ----------------------------------------------------------------------------------------------------------
#
# The same: a correct search whose steps are handed in. A beam is (ids, sum of log-probabilities, whether it has ended).


def _score(total, n_new, length_penalty):
    return total / n_new**length_penalty if n_new else 0.0


def _best(candidates, score, n_beams):
    return sorted(candidates, key=score, reverse=True)[:n_beams]


def _search(
    log_probs,
    prompt,
    n_beams,
    max_new_tokens,
    eos_id=None,
    length_penalty=0.0,
    *,
    least=1,
    start=lambda prompt, n_beams, eos_id: [(prompt.tolist(), 0.0, False)],
    measure=_score,
    rank=None,
    is_eos=lambda token, eos_id: token == eos_id,
    add=lambda total, log_p: total + log_p,
    may_follow=lambda log_p: log_p > -INF,
    best=_best,
    stop=lambda beams: all(ended for *_, ended in beams),
    keep_ended=True,
    shape=lambda found, prompt: found,
):
    if n_beams < least:
        raise ValueError("too few beams")
    T = len(prompt)

    def score(beam):
        return measure(beam[1], len(beam[0]) - T, length_penalty)

    beams = start(prompt, n_beams, eos_id)
    for _ in range(max_new_tokens):
        if stop(beams):
            break
        growing = [ids for ids, _, ended in beams if not ended]
        rows = iter(log_probs(torch.tensor(growing)).double().tolist())
        candidates = []
        for ids, total, ended in beams:
            if ended:
                candidates += [(ids, total, True)] * keep_ended
                continue
            for token, log_p in enumerate(next(rows)):
                if may_follow(log_p):
                    candidates.append(([*ids, token], add(total, log_p), is_eos(token, eos_id)))
        beams = best(candidates, rank(T) if rank else score, n_beams)
    return shape([(torch.tensor(beam[0]), score(beam)) for beam in beams], prompt)


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="The worst beam comes first. Sort from the highest score down: log-probabilities are negative, "
    "and the best is nearest to 0.",
)
def worst_first(*args, **kwargs):
    return _search(*args, **kwargs, shape=lambda found, prompt: found[::-1])


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="The worst continuations stay at every step. Sort from the highest score down.",
)
def worst_stay(*args, **kwargs):
    return _search(*args, **kwargs, best=lambda beams, score, n: sorted(beams, key=score)[:n])


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="n_beams is ignored: this is greedy search. Keep the best n_beams at every step.",
)
def greedy_search(*args, **kwargs):
    return _search(*args, **kwargs, best=lambda beams, score, n: _best(beams, score, 1))


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="The score is the last token's log-probability alone. Add it to the beam's sum.",
)
def last_token_scores(*args, **kwargs):
    return _search(*args, **kwargs, add=lambda total, log_p: log_p)


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="The search starts from n_beams copies of the prompt, whose continuations are the same. Start from one.",
)
def copies_of_the_prompt(*args, **kwargs):
    return _search(*args, **kwargs, start=lambda prompt, n, eos_id: [(prompt.tolist(), 0.0, False)] * n)


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="Probabilities are added up. The probability of a sequence is a product: add their logarithms.",
)
def probabilities_added(*args, **kwargs):
    return _search(*args, **kwargs, add=lambda total, log_p: total + math.exp(log_p))


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="The score is a probability. Return the sum of log-probabilities itself, without exp.",
)
def scores_as_probabilities(*args, **kwargs):
    return _search(*args, **kwargs, shape=lambda found, prompt: [(ids, math.exp(score)) for ids, score in found])


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="Only the new tokens are returned. `ids` begin with the prompt.",
)
def without_the_prompt(*args, **kwargs):
    return _search(*args, **kwargs, shape=lambda found, prompt: [(ids[len(prompt) :], score) for ids, score in found])


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="Only the best beam is returned. Return all that are left, the best first.",
)
def only_the_best(*args, **kwargs):
    return _search(*args, **kwargs, shape=lambda found, prompt: found[:1])


@wrong(
    "beam_search",
    caught_by="test_two_beams_find_what_greedy_misses",
    hint="The scores are tensors. Return floats: .item() makes one.",
)
def scores_as_tensors(*args, **kwargs):
    return _search(*args, **kwargs, shape=lambda found, prompt: [(ids, torch.tensor(score)) for ids, score in found])


@wrong(
    "beam_search",
    caught_by="test_the_best_stay_at_every_step",
    hint="Each beam goes on alone with its own likeliest token. The continuations of all beams must compete.",
)
def beams_do_not_compete(*args, **kwargs):
    def best(candidates, score, n_beams):
        own = {}
        for beam in candidates:
            key = tuple(beam[0][:-1]) if not beam[2] else (tuple(beam[0]),)
            own.setdefault(key, []).append(beam)
        if len(own) == 1:
            return _best(candidates, score, n_beams)
        return _best([max(beams, key=score) for beams in own.values()], score, n_beams)

    return _search(*args, **kwargs, best=best)


@wrong(
    "beam_search",
    caught_by="test_the_best_stay_at_every_step",
    hint="A chosen token is appended to the beam at its place, not to the beam it continues. "
    "Take the ids of the beam that the continuation came from.",
)
def beams_not_reordered(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    # Continuations are told by their scores; their ids are put together from the beams in place.
    places = []

    def best(candidates, score, n):
        chosen = _best(candidates, score, n)
        old = list(places) or [prompt.tolist()]
        mixed = []
        for i, (ids, total, ended) in enumerate(chosen):
            grown = len(ids) == max(len(c[0]) for c in candidates)
            head = old[i][: len(ids) - 1] if grown and i < len(old) and len(old[i]) >= len(ids) - 1 else ids[:-1]
            mixed.append(([*head, ids[-1]] if grown else ids, total, ended))
        places[:] = [ids for ids, *_ in mixed]
        return mixed

    return _search(log_probs, prompt, n_beams, max_new_tokens, eos_id, length_penalty, best=best)


@wrong(
    "beam_search",
    caught_by="test_a_finished_beam_grows_no_more",
    hint="A beam goes on after eos_id. It keeps its ids and its score, and competes with the others as it is.",
)
def finished_beams_grow(*args, **kwargs):
    return _search(*args, **kwargs, is_eos=lambda token, eos_id: False)


@wrong(
    "beam_search",
    caught_by="test_a_finished_beam_grows_no_more",
    hint="A beam is thrown away when it has chosen eos_id. It stays, and is ranked with all continuations.",
)
def finished_beams_dropped(*args, **kwargs):
    return _search(*args, **kwargs, keep_ended=False)


@wrong(
    "beam_search",
    caught_by="test_a_finished_beam_grows_no_more",
    hint="Finished beams are set aside and never leave. They compete at every step: when n_beams others score higher, "
    "they are gone.",
)
def finished_beams_set_aside(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    aside = []

    def best(candidates, score, n):
        chosen = _best([beam for beam in candidates if not beam[2]], score, n)
        fresh = [beam for beam in _best(candidates, score, n) if beam[2] and beam not in aside]
        aside.extend(fresh)
        return chosen

    found = _search(log_probs, prompt, n_beams, max_new_tokens, eos_id, length_penalty, best=best, stop=lambda b: not b)
    T = len(prompt)
    found += [(torch.tensor(ids), _score(total, len(ids) - T, length_penalty)) for ids, total, _ in aside]
    return sorted(found, key=lambda beam: -beam[1])[:n_beams]


@wrong(
    "beam_search",
    caught_by="test_a_finished_beam_grows_no_more",
    hint="The search stops with the first beam that ends. Others may still become better: go on until all have ended.",
)
def stops_with_the_first_end(*args, **kwargs):
    return _search(*args, **kwargs, stop=lambda beams: any(ended for *_, ended in beams))


@wrong(
    "beam_search",
    caught_by="test_a_finished_beam_grows_no_more",
    hint="eos_id = 0 is taken for `not given` (`if eos_id`). Ask `eos_id is not None`, or compare the token with it.",
)
def eos_of_zero_never_ends(*args, **kwargs):
    return _search(*args, **kwargs, is_eos=lambda token, eos_id: bool(eos_id) and token == eos_id)


@wrong(
    "beam_search",
    caught_by="test_eos_in_the_prompt_ends_nothing",
    hint="A prompt that ends with eos_id counts as finished. Only an eos_id that the search has chosen ends a beam.",
)
def prompt_counts_as_finished(*args, **kwargs):
    def start(prompt, n_beams, eos_id):
        return [(prompt.tolist(), 0.0, int(prompt[-1]) == eos_id)]

    return _search(*args, **kwargs, start=start)


@wrong(
    "beam_search",
    caught_by="test_length_penalty_divides_the_score",
    hint="The length counts the prompt too. Divide by the number of new tokens ** length_penalty.",
)
def length_with_the_prompt(log_probs, prompt, *args, **kwargs):
    def measure(total, n_new, penalty):
        return total / (n_new + len(prompt)) ** penalty

    return _search(log_probs, prompt, *args, **kwargs, measure=measure)


@wrong(
    "beam_search",
    caught_by="test_length_penalty_divides_the_score",
    hint="The sum is multiplied by length ** length_penalty. Divide by it: then longer beams lose less.",
)
def penalty_multiplied(*args, **kwargs):
    return _search(*args, **kwargs, measure=lambda total, n_new, penalty: total * n_new**penalty)


@wrong(
    "beam_search",
    caught_by="test_length_penalty_divides_the_score",
    hint="The sum is divided by length * length_penalty. It is a power: length ** length_penalty.",
)
def penalty_is_a_factor(*args, **kwargs):
    def measure(total, n_new, penalty):
        return total / (n_new * penalty) if penalty and n_new else total

    return _search(*args, **kwargs, measure=measure)


@wrong(
    "beam_search",
    caught_by="test_length_penalty_divides_the_score",
    hint="length_penalty is ignored. The score is the sum / (number of new tokens) ** length_penalty.",
)
def penalty_ignored(*args, **kwargs):
    return _search(*args, **kwargs, measure=lambda total, n_new, penalty: total)


@wrong(
    "beam_search",
    caught_by="test_length_penalty_divides_the_score",
    hint="length_penalty only changes the scores at the end. Beams are ranked by the divided score at every step.",
)
def penalty_only_at_the_end(*args, **kwargs):
    found = _search(*args, **kwargs, rank=lambda T: lambda beam: beam[1])
    return sorted(found, key=lambda beam: -beam[1])


@wrong(
    "beam_search",
    caught_by="test_length_penalty_divides_the_score",
    hint="The score is divided again at every step, as it is kept divided. Keep the plain sum, and divide to rank.",
)
def divided_again_and_again(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    T = len(prompt)

    def best(candidates, score, n):
        fresh = [
            beam
            if len(beam[0]) < (longest := max(len(c[0]) for c in candidates))
            else (beam[0], beam[1] / (longest - T) ** length_penalty, beam[2])
            for beam in candidates
        ]
        return _best(fresh, lambda beam: beam[1], n)

    measure = lambda total, n_new, penalty: total  # noqa: E731
    return _search(log_probs, prompt, n_beams, max_new_tokens, eos_id, length_penalty, best=best, measure=measure)


@wrong(
    "beam_search",
    caught_by="test_length_penalty_divides_the_score",
    hint="eos_id does not count as a token of its beam. It does: a beam that ends at once has length 1.",
)
def eos_not_counted(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    T = len(prompt)

    def divided(beam):
        n_new = len(beam[0]) - T - beam[2]
        return _score(beam[1], max(n_new, 1), length_penalty)

    kept = []

    def best(candidates, score, n):
        kept[:] = _best(candidates, divided, n)
        return kept

    found = _search(log_probs, prompt, n_beams, max_new_tokens, eos_id, length_penalty, best=best)
    return [(ids, divided(beam)) for (ids, _), beam in zip(found, kept, strict=True)] if kept else found


@wrong(
    "beam_search",
    caught_by="test_minus_infinity_is_no_continuation",
    hint="Continuations of probability 0 fill up the beams. A token at -inf is no continuation: leave it out.",
)
def impossible_continuations(*args, **kwargs):
    return _search(*args, **kwargs, may_follow=lambda log_p: True)


@wrong(
    "beam_search",
    caught_by="test_of_equal_scores_the_first_found_stays",
    hint="Of equal scores the last found comes first. Keep the order they were found in: a stable sort, "
    "not a reversed ascending one.",
)
def equals_in_reverse(*args, **kwargs):
    return _search(*args, **kwargs, best=lambda beams, score, n: sorted(beams, key=score)[::-1][:n])


@wrong(
    "beam_search",
    caught_by="test_the_search_may_be_short",
    hint="n_beams below 1 is accepted. It must be a ValueError.",
)
def no_beams_accepted(*args, **kwargs):
    return _search(*args, **kwargs, least=-INF)
