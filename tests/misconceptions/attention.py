"""Mistakes that people make in softmax, masks and attention."""

import math

import torch
import torch.nn.functional as F

from . import wrong

# softmax -------------------------------------------------------------------------------------------------------------


@wrong(
    "softmax",
    caught_by="test_large_scores_do_not_overflow",
    hint="exp overflows for large scores. Subtract the row's maximum first: the result is the same.",
)
def softmax_of_raw_scores(x, dim=-1):
    e = x.exp()
    return e / e.sum(dim, keepdim=True)


@wrong(
    "softmax",
    caught_by="test_rows_do_not_touch_each_other",
    hint="The maximum is taken over the whole tensor, so that rows with small scores underflow to 0/0. "
    "Take it along `dim`, with keepdim=True.",
)
def softmax_with_one_maximum(x, dim=-1):
    e = (x - x.max()).exp()
    return e / e.sum(dim, keepdim=True)


@wrong(
    "softmax",
    caught_by="test_dim_names_the_axis",
    hint="`dim` is ignored: the sum always runs over the last axis.",
)
def softmax_always_over_the_last_axis(x, dim=-1):
    return torch.softmax(x, -1)


@wrong(
    "softmax",
    caught_by="test_weights_are_positive_and_sum_to_one",
    hint="The default axis is the first. The contract's default is the last: dim=-1.",
)
def softmax_over_the_first_axis_by_default(x, dim=0):
    return torch.softmax(x, dim)


@wrong(
    "softmax",
    caught_by="test_weights_are_positive_and_sum_to_one",
    hint="The weights are divided by the sum over the whole tensor. Each row sums to 1 on its own: sum along `dim`.",
)
def softmax_of_everything(x, dim=-1):
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum()


@wrong(
    "softmax",
    caught_by="test_weights_are_positive_and_sum_to_one",
    hint="These are the logarithms of the weights. Take exp of them.",
)
def log_of_softmax(x, dim=-1):
    return torch.log_softmax(x, dim)


@wrong(
    "softmax",
    caught_by="test_two_scores_by_hand",
    hint="The scores themselves are divided by their sum. It is their exponentials that must be.",
)
def softmax_without_exp(x, dim=-1):
    return x / x.sum(dim, keepdim=True)


@wrong(
    "softmax",
    caught_by="test_large_scores_do_not_overflow",
    hint="The mean is subtracted, which leaves large positive scores to overflow. Subtract the maximum.",
)
def softmax_minus_the_mean(x, dim=-1):
    e = (x - x.mean(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


@wrong(
    "softmax",
    caught_by="test_very_negative_scores_do_not_vanish",
    hint="The maximum is subtracted only where it is positive, so very negative scores underflow to 0/0. "
    "Subtract it always.",
)
def softmax_minus_the_positive_maximum(x, dim=-1):
    e = (x - x.amax(dim, keepdim=True).clamp(min=0)).exp()
    return e / e.sum(dim, keepdim=True)


@wrong(
    "softmax",
    caught_by="test_keeps_half_precision",
    hint="The result is float32 whatever came in. Return the dtype of `x`.",
)
def softmax_always_in_float32(x, dim=-1):
    return torch.softmax(x.double() if x.dtype == torch.float64 else x.float(), dim)


# causal_mask ---------------------------------------------------------------------------------------------------------


@wrong(
    "causal_mask",
    caught_by="test_a_query_sees_itself_and_the_past",
    hint="The past is hidden and the future shown: rows are queries, columns are keys. Keep the lower triangle.",
)
def future_shown(T, S=None):
    S = T if S is None else S
    if T > S:
        raise ValueError
    return torch.ones(T, S, dtype=torch.bool).triu(S - T)


@wrong(
    "causal_mask",
    caught_by="test_a_query_sees_itself_and_the_past",
    hint="A token must also see itself: keep the diagonal.",
)
def blind_to_itself(T, S=None):
    S = T if S is None else S
    if T > S:
        raise ValueError
    return torch.ones(T, S, dtype=torch.bool).tril(S - T - 1)


@wrong(
    "causal_mask",
    caught_by="test_a_query_sees_itself_and_the_past",
    hint="Each query also sees the next token: the diagonal is one too far to the right.",
)
def one_token_of_future(T, S=None):
    S = T if S is None else S
    if T > S:
        raise ValueError
    return torch.ones(T, S, dtype=torch.bool).tril(S - T + 1)


@wrong(
    "causal_mask",
    caught_by="test_a_query_sees_itself_and_the_past",
    hint="True marks what is hidden. In this course, as in torch's attention, True marks what a query may see.",
)
def true_means_hidden(T, S=None):
    S = T if S is None else S
    if T > S:
        raise ValueError
    return torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)


@wrong(
    "causal_mask",
    caught_by="test_queries_are_the_last_keys",
    hint="With T < S the queries are taken for the first T tokens. They are the last: shift the diagonal by S - T.",
)
def queries_are_the_first_keys(T, S=None):
    S = T if S is None else S
    if T > S:
        raise ValueError
    return torch.ones(T, S, dtype=torch.bool).tril()


@wrong(
    "causal_mask",
    caught_by="test_queries_are_the_last_keys",
    hint="S is ignored. The mask has a column for each of the S keys.",
)
def keys_ignored(T, S=None):
    if S is not None and T > S:
        raise ValueError
    return torch.ones(T, T, dtype=torch.bool).tril()


@wrong(
    "causal_mask",
    caught_by="test_a_query_sees_itself_and_the_past",
    hint="The mask holds 0 and -inf, to be added to scores. The contract wants a boolean mask, True where visible.",
)
def additive_mask(T, S=None):
    S = T if S is None else S
    if T > S:
        raise ValueError
    return torch.zeros(T, S).masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(S - T), -math.inf)


@wrong(
    "causal_mask",
    caught_by="test_a_query_sees_itself_and_the_past",
    hint="The mask holds the numbers 1 and 0. Make it boolean: dtype=torch.bool, or compare.",
)
def mask_of_ones(T, S=None):
    S = T if S is None else S
    if T > S:
        raise ValueError
    return torch.ones(T, S).tril(S - T)


@wrong(
    "causal_mask",
    caught_by="test_more_queries_than_keys_is_an_error",
    hint="More queries than keys gives a mask all the same. It should be a ValueError: something is wrong upstream.",
)
def no_complaint(T, S=None):
    S = T if S is None else S
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)


# padding_mask --------------------------------------------------------------------------------------------------------


@wrong(
    "padding_mask",
    caught_by="test_padding_mask_has_four_axes",
    hint="The tokens lie on the query axis, (B, 1, S, 1): that blinds the padded queries and shows padded keys. "
    "Put them on the last axis, where the keys are.",
)
def padding_hidden_as_query(is_token):
    return is_token[:, None, :, None]


@wrong(
    "padding_mask",
    caught_by="test_padding_mask_has_four_axes",
    hint="The head axis is missing, so that the batch would be taken for heads: (B, 1, 1, S) has two axes of 1.",
)
def head_axis_missing(is_token):
    return is_token[:, None, :]


@wrong(
    "padding_mask",
    caught_by="test_padding_mask_has_four_axes",
    hint="No axes were added. Scores are (B, H, T, S): the mask needs axes of 1 for the heads and the queries.",
)
def padding_mask_unchanged(is_token):
    return is_token.clone()


@wrong(
    "padding_mask",
    caught_by="test_true_means_token",
    hint="True marks the padding. In this course, as in torch's attention, True marks what a query may see.",
)
def true_means_padding(is_token):
    return ~is_token[:, None, None, :]


@wrong(
    "padding_mask",
    caught_by="test_padding_mask_has_four_axes",
    hint="The mask holds 0 and -inf, to be added to scores. The contract wants a boolean mask, True at tokens.",
)
def additive_padding_mask(is_token):
    return torch.zeros(is_token.shape).masked_fill(~is_token, -math.inf)[:, None, None, :]


@wrong(
    "padding_mask",
    caught_by="test_padding_mask_has_four_axes",
    hint="Padded queries are blinded too, (B, 1, S, S). Hide padding as a key only: nobody reads a padded query's row.",
)
def padding_hidden_on_both_axes(is_token):
    return (is_token[:, None, :] & is_token[:, :, None])[:, None]


@wrong(
    "padding_mask",
    caught_by="test_true_means_token",
    hint="The mask counts tokens and assumes that padding stands on the right. Use `is_token` itself.",
)
def padding_always_on_the_right(is_token):
    length = is_token.sum(-1, keepdim=True)
    return (torch.arange(is_token.shape[-1]) < length)[:, None, None, :]


# attention_weights and scaled_dot_product_attention ------------------------------------------------------------------
#
# Most mistakes concern the weights and can be made in both. Each is written once, as a way to get the weights, and
# entered for both pieces.


def _bool_only(mask):
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError("mask must be bool")


def _softmax_under(scores, mask, dim=-1):
    """What the reference does from the scores on."""
    _bool_only(mask)
    if mask is None:
        return scores.softmax(dim)
    blind = ~mask.any(-1, keepdim=True)
    return scores.masked_fill(~mask & ~blind, -math.inf).softmax(dim).masked_fill(blind, 0.0)


def _scores(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


def wrong_in_both(hint, weights_caught_by, attention_caught_by):
    """Enter wrong weights under both pieces, with the same hint."""

    def enter(weights):
        def attention(q, k, v, mask=None):
            return weights(q, k, mask) @ v

        attention.__name__ = weights.__name__
        wrong("attention_weights", weights_caught_by, hint)(weights)
        wrong("scaled_dot_product_attention", attention_caught_by, hint)(attention)
        return weights

    return enter


@wrong_in_both(
    "The scores are not divided by sqrt(D). Without it they grow with the width, and the softmax saturates.",
    "test_scores_by_hand",
    "test_attention_agrees_with_torch",
)
def unscaled(q, k, mask=None):
    return _softmax_under(q @ k.mT, mask)


@wrong_in_both(
    "The scores are divided by D. Divide by its square root: that is what brings their variance back to 1.",
    "test_scores_by_hand",
    "test_attention_agrees_with_torch",
)
def scaled_by_width(q, k, mask=None):
    return _softmax_under(q @ k.mT / q.shape[-1], mask)


@wrong_in_both(
    "The scores are multiplied by sqrt(D). Divide instead.",
    "test_scores_by_hand",
    "test_attention_agrees_with_torch",
)
def scaled_up(q, k, mask=None):
    return _softmax_under(q @ k.mT * math.sqrt(q.shape[-1]), mask)


@wrong_in_both(
    "The scale is the square root of the number of keys. It is the square root of the width D of a key.",
    "test_scores_by_hand",
    "test_attention_agrees_with_torch",
)
def scaled_by_number_of_keys(q, k, mask=None):
    return _softmax_under(q @ k.mT / math.sqrt(k.shape[-2]), mask)


@wrong_in_both(
    "The softmax runs over the queries (dim=-2). Each query spreads its attention over the keys: dim=-1.",
    "test_each_query_spends_all_its_attention",
    "test_attention_agrees_with_torch",
)
def softmax_over_queries(q, k, mask=None):
    return _softmax_under(_scores(q, k), mask, dim=-2)


@wrong_in_both(
    "The mask is ignored.",
    "test_hidden_keys_get_exactly_zero",
    "test_attention_under_a_mask_agrees_with_torch",
)
def mask_ignored(q, k, mask=None):
    _bool_only(mask)
    return _scores(q, k).softmax(-1)


@wrong_in_both(
    "The sense of the mask is inverted: True means that the query may look, and its score must stay.",
    "test_hidden_keys_get_exactly_zero",
    "test_attention_under_a_mask_agrees_with_torch",
)
def mask_inverted(q, k, mask=None):
    _bool_only(mask)
    return _softmax_under(_scores(q, k), None if mask is None else ~mask)


@wrong_in_both(
    "The mask is applied after the softmax, so that the visible weights no longer sum to 1. "
    "Set hidden scores to -inf before it.",
    "test_hidden_keys_get_exactly_zero",
    "test_attention_under_a_mask_agrees_with_torch",
)
def mask_after_softmax(q, k, mask=None):
    _bool_only(mask)
    weights = _scores(q, k).softmax(-1)
    return weights if mask is None else weights * mask


@wrong_in_both(
    "The hidden scores are set to 0, which is a score like any other: exp(0) = 1. Set them to -inf.",
    "test_hidden_keys_get_exactly_zero",
    "test_attention_under_a_mask_agrees_with_torch",
)
def hidden_scores_set_to_zero(q, k, mask=None):
    _bool_only(mask)
    scores = _scores(q, k)
    if mask is None:
        return scores.softmax(-1)
    return (scores * mask).softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0.0)


@wrong_in_both(
    "The boolean mask is added to the scores, where True counts as 1. Use masked_fill or where.",
    "test_hidden_keys_get_exactly_zero",
    "test_attention_under_a_mask_agrees_with_torch",
)
def mask_added(q, k, mask=None):
    _bool_only(mask)
    scores = _scores(q, k)
    return (scores if mask is None else scores + mask.to(scores.dtype)).softmax(-1)


@wrong_in_both(
    "A row without any visible key is a softmax of only -inf: 0/0 is NaN, and it spreads. Give such a row zeros.",
    "test_a_blind_query_gets_zeros",
    "test_a_blind_query_outputs_zeros",
)
def nan_on_blind_rows(q, k, mask=None):
    _bool_only(mask)
    scores = _scores(q, k)
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1)


@wrong_in_both(
    "The NaN of a row without visible keys is replaced afterwards, but its gradient is still NaN. "
    "Keep -inf out of such a row, or set scores by masked_fill, which lets no gradient through.",
    "test_a_blind_query_keeps_gradients_finite",
    "test_a_blind_query_outputs_zeros",
)
def nan_in_the_gradient(q, k, mask=None):
    _bool_only(mask)
    scores = _scores(q, k)
    if mask is None:
        return scores.softmax(-1)
    return (scores + torch.zeros(mask.shape).masked_fill(~mask, -math.inf)).softmax(-1).nan_to_num(0.0)


@wrong_in_both(
    "Hidden scores get a large negative number, so a row without visible keys becomes uniform, 1/S. "
    "Such a row must be zeros.",
    "test_a_blind_query_gets_zeros",
    "test_a_blind_query_outputs_zeros",
)
def uniform_on_blind_rows(q, k, mask=None):
    _bool_only(mask)
    scores = _scores(q, k)
    return (scores if mask is None else scores.masked_fill(~mask, torch.finfo(scores.dtype).min)).softmax(-1)


@wrong_in_both(
    "A mask of numbers is accepted. Whether 1 means visible or hidden is anyone's guess: raise a TypeError "
    "unless it is boolean.",
    "test_a_mask_of_numbers_is_an_error",
    "test_attention_takes_no_mask_of_numbers",
)
def mask_of_numbers_accepted(q, k, mask=None):
    return _softmax_under(_scores(q, k), None if mask is None else mask.bool())


@wrong_in_both(
    "The code takes the axes for (B, H, T, D). It should work for any leading axes, none included: count from the end.",
    "test_weights_agree_with_torch",
    "test_attention_agrees_with_torch",
)
def four_axes_only(q, k, mask=None):
    *_, D = q.shape
    return _softmax_under(torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(D), mask)


@wrong(
    "attention_weights",
    caught_by="test_scores_by_hand",
    hint="These are the scores. The softmax over the keys is missing.",
)
def scores_instead_of_weights(q, k, mask=None):
    _bool_only(mask)
    scores = _scores(q, k)
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


@wrong(
    "attention_weights",
    caught_by="test_hidden_keys_get_exactly_zero",
    hint="Hidden scores get +inf. It is -inf that gives the weight 0.",
)
def plus_infinity(q, k, mask=None):
    _bool_only(mask)
    scores = _scores(q, k)
    return (scores if mask is None else scores.masked_fill(~mask, math.inf)).softmax(-1)


@wrong(
    "scaled_dot_product_attention",
    caught_by="test_attention_agrees_with_torch",
    hint="The weights are returned. Multiply them by the values: weights @ v.",
)
def weights_instead_of_output(q, k, v, mask=None):
    return _softmax_under(_scores(q, k), mask)


@wrong(
    "scaled_dot_product_attention",
    caught_by="test_attention_agrees_with_torch",
    hint="The scale is the square root of the width of the values. It is that of the keys: D, not Dv.",
)
def scaled_by_width_of_values(q, k, v, mask=None):
    return _softmax_under(q @ k.mT / math.sqrt(v.shape[-1]), mask) @ v


@wrong(
    "scaled_dot_product_attention",
    caught_by="test_attention_agrees_with_torch",
    hint="The softmax is missing: the values are mixed by the raw scores.",
)
def softmax_missing(q, k, v, mask=None):
    _bool_only(mask)
    scores = _scores(q, k)
    return (scores if mask is None else scores.masked_fill(~mask, 0.0)) @ v


@wrong(
    "scaled_dot_product_attention",
    caught_by="test_attention_agrees_with_torch",
    hint="The output is given the shape of `q`. Its width is that of the values, which may differ.",
)
def values_as_wide_as_queries(q, k, v, mask=None):
    return (_softmax_under(_scores(q, k), mask) @ v).view(q.shape)


@wrong(
    "scaled_dot_product_attention",
    caught_by="test_attention_agrees_with_torch",
    hint="Dropout is on although nobody asked for it: the same call gives another result each time.",
)
def dropout_left_on(q, k, v, mask=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return F.dropout(_softmax_under(_scores(q, k), mask), 0.1) @ v
