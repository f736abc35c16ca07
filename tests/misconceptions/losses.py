"""Mistakes that people make in labels, in the average loss, and in losses that are not the average."""

import math

import torch

from tfmlib.losses import IGNORE

from . import wrong


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


# shift_labels --------------------------------------------------------------------------------------------------------


def _masked(labels, counts):
    return torch.where(counts, labels, torch.full_like(labels, IGNORE))


def _pairs(is_token):
    return is_token[:, :-1] & is_token[:, 1:]


@wrong(
    "shift_labels",
    caught_by="test_the_label_is_the_next_token",
    hint="The labels are not shifted: each place is asked for its own input, and a model learns to copy. "
    "The labels are ids[:, 1:].",
)
def labels_not_shifted(ids, is_token=None):
    inputs = labels = ids[:, :-1]
    return inputs, labels if is_token is None else _masked(labels, is_token[:, :-1])


@wrong(
    "shift_labels",
    caught_by="test_the_label_is_the_next_token",
    hint="The labels are shifted by two: each place is asked for the token after the next. Shift once, by one.",
)
def labels_shifted_twice(ids, is_token=None):
    labels = ids[:, 2:]
    return ids[:, :-2], labels if is_token is None else _masked(labels, is_token[:, :-2] & is_token[:, 2:])


@wrong(
    "shift_labels",
    caught_by="test_the_label_is_the_next_token",
    hint="The labels are shifted by two within the full length: the inputs lose their last token, the labels skip one. "
    "The label of place t is ids[:, t + 1].",
)
def labels_two_ahead(ids, is_token=None):
    labels = torch.cat([ids[:, 2:], torch.full_like(ids[:, :1], IGNORE)], 1)[:, : ids.shape[1] - 1]
    return ids[:, :-1], labels if is_token is None else _masked(labels, _pairs(is_token))


@wrong(
    "shift_labels",
    caught_by="test_the_label_is_the_next_token",
    hint="Inputs and labels are exchanged: the model is asked for the token before. "
    "The inputs are ids[:, :-1], the labels ids[:, 1:].",
)
def labels_of_the_past(ids, is_token=None):
    labels = ids[:, :-1]
    return ids[:, 1:], labels if is_token is None else _masked(labels, _pairs(is_token))


@wrong(
    "shift_labels",
    caught_by="test_the_label_is_the_next_token",
    hint="`roll` moves the first token to the end, where it becomes the label of the last. "
    "The last token has no next: leave it out of the inputs.",
)
def labels_rolled(ids, is_token=None):
    labels = ids.roll(-1, dims=1)
    return ids, labels if is_token is None else _masked(labels, is_token & is_token.roll(-1, dims=1))


@wrong(
    "shift_labels",
    caught_by="test_the_label_is_the_next_token",
    hint="The rows are shifted, not the tokens: the label comes from the next sequence. Shift along axis 1.",
)
def rows_shifted(ids, is_token=None):
    labels = ids[1:]
    return ids[:-1], labels if is_token is None else _masked(labels, is_token[:-1] & is_token[1:])


@wrong(
    "shift_labels",
    caught_by="test_padding_after_the_text_is_no_label",
    hint="is_token is not used: padding is learned as if it were text. Put IGNORE where input or label is padding.",
)
def padding_counted(ids, is_token=None):
    return ids[:, :-1], ids[:, 1:].clone()


@wrong(
    "shift_labels",
    caught_by="test_padding_before_the_text_is_no_input",
    hint="Only a label that is padding is ignored. With padding on the left the input is padding and the label is "
    "the first token: ignore that, too.",
)
def padding_as_input(ids, is_token=None):
    return ids[:, :-1], ids[:, 1:] if is_token is None else _masked(ids[:, 1:], is_token[:, 1:])


@wrong(
    "shift_labels",
    caught_by="test_padding_after_the_text_is_no_label",
    hint="is_token is not shifted with the labels: it says whether the input is padding. "
    "The last token of a text is asked for the padding after it: look at is_token[:, 1:], too.",
)
def padding_as_label(ids, is_token=None):
    return ids[:, :-1], ids[:, 1:] if is_token is None else _masked(ids[:, 1:], is_token[:, :-1])


@wrong(
    "shift_labels",
    caught_by="test_padding_after_the_text_is_no_label",
    hint="A label counts where input or label is a token. Both must be: `&`, not `|`.",
)
def padding_if_both(ids, is_token=None):
    return ids[:, :-1], ids[:, 1:] if is_token is None else _masked(ids[:, 1:], is_token[:, :-1] | is_token[:, 1:])


@wrong(
    "shift_labels",
    caught_by="test_padding_after_the_text_is_no_label",
    hint="The sense of is_token is inverted: True means a token, and its label counts.",
)
def tokens_ignored(ids, is_token=None):
    return ids[:, :-1], ids[:, 1:] if is_token is None else _masked(ids[:, 1:], ~_pairs(is_token))


@wrong(
    "shift_labels",
    caught_by="test_no_id_means_padding",
    hint="The id 0 is taken for padding. It is a token like any other: only `is_token` tells what is padding.",
)
def zero_is_padding(ids, is_token=None):
    counts = ids[:, 1:] != 0
    return ids[:, :-1], _masked(ids[:, 1:], counts if is_token is None else counts & _pairs(is_token))


@wrong(
    "shift_labels",
    caught_by="test_padding_after_the_text_is_no_label",
    hint="The labels are written into `ids`: a slice is a view of the same memory, and the caller's ids and the inputs "
    "change with it. Use masked_fill or torch.where, or clone first.",
)
def labels_in_place(ids, is_token=None):
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if is_token is not None:
        labels[~_pairs(is_token)] = IGNORE
    return inputs, labels


@wrong(
    "shift_labels",
    caught_by="test_padding_after_the_text_is_no_label",
    hint="The inputs are set to IGNORE at padding: -100 is no id, and an embedding has no row for it. "
    "IGNORE is for labels only.",
)
def inputs_ignored(ids, is_token=None):
    if is_token is None:
        return ids[:, :-1], ids[:, 1:]
    return _masked(ids[:, :-1], is_token[:, :-1]), _masked(ids[:, 1:], _pairs(is_token))


@wrong(
    "shift_labels",
    caught_by="test_padding_after_the_text_is_no_label",
    hint="Padding gets the label 0, which is a token: the model learns to say it. The label of what is not counted is "
    "IGNORE, -100.",
)
def zero_for_ignored(ids, is_token=None):
    labels = ids[:, 1:]
    return ids[:, :-1], labels if is_token is None else labels * _pairs(is_token)


@wrong(
    "shift_labels",
    caught_by="test_padding_after_the_text_is_no_label",
    hint="Padding gets the label -1. What is not counted is marked with IGNORE, -100.",
)
def minus_one_for_ignored(ids, is_token=None):
    labels = ids[:, 1:]
    return ids[:, :-1], labels if is_token is None else labels.masked_fill(~_pairs(is_token), -1)


@wrong(
    "shift_labels",
    caught_by="test_the_label_is_the_next_token",
    hint="is_token is used also where it is None, its default. None means that there is no padding.",
)
def mask_always_expected(ids, is_token=None):
    return ids[:, :-1], _masked(ids[:, 1:], is_token[:, :-1] & is_token[:, 1:])


# cross_entropy -------------------------------------------------------------------------------------------------------
#
# The variants share a correct body whose steps are functions; each variant gets one step wrong.


def _fitting(logits, labels):
    if logits.dim() != labels.dim() + 1 or logits.shape[:-1] != labels.shape:
        raise ValueError("logits are (..., V), labels (...)")


def _log_softmax(x):
    return torch.log_softmax(x, dim=-1)


def _nll(log_p, labels):
    """Minus the log-probability of each label; 0 where it is ignored."""
    counted = labels != IGNORE
    chosen = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -torch.where(counted, chosen, torch.zeros_like(chosen))


def _mean(nll, labels):
    return nll.sum() / (labels != IGNORE).sum().clamp(min=1)


def _loss(logits, labels, fitting=_fitting, wide=_wide, log_p=_log_softmax, nll=_nll, mean=_mean):
    fitting(logits, labels)
    return mean(nll(log_p(wide(logits)), labels), labels)


@wrong(
    "cross_entropy",
    caught_by="test_large_logits_do_not_overflow",
    hint="The logarithm is taken of a softmax: a small probability is rounded to 0, and its logarithm is -inf. "
    "Use log_softmax, which never computes the probability.",
)
def log_of_softmax(logits, labels):
    return _loss(logits, labels, log_p=lambda x: torch.softmax(x, -1).log())


@wrong(
    "cross_entropy",
    caught_by="test_a_small_probability_keeps_its_digits",
    hint="An epsilon is added to the probabilities, or they are clamped: no label can cost more than about 20 nats, "
    "and what is worse learns nothing. Use log_softmax.",
)
def log_of_softmax_with_epsilon(logits, labels):
    return _loss(logits, labels, log_p=lambda x: (torch.softmax(x, -1) + 1e-9).log())


@wrong(
    "cross_entropy",
    caught_by="test_a_small_probability_keeps_its_digits",
    hint="The probabilities are clamped from below, so that a very wrong answer costs no more and learns nothing. "
    "Use log_softmax.",
)
def log_of_clamped_softmax(logits, labels):
    return _loss(logits, labels, log_p=lambda x: torch.softmax(x, -1).clamp(min=1e-12).log())


@wrong(
    "cross_entropy",
    caught_by="test_large_logits_do_not_overflow",
    hint="exp of the logits overflows at 89 and vanishes at -104 in float32. "
    "Subtract the largest logit first, or use logsumexp.",
)
def exp_of_raw_logits(logits, labels):
    return _loss(logits, labels, log_p=lambda x: x - x.exp().sum(-1, keepdim=True).log())


@wrong(
    "cross_entropy",
    caught_by="test_the_loss_by_hand",
    hint="The logits are taken for log-probabilities. They are not normalised yet: apply log_softmax.",
)
def logits_as_log_probabilities(logits, labels):
    return _loss(logits, labels, log_p=lambda x: x)


@wrong(
    "cross_entropy",
    caught_by="test_the_loss_by_hand",
    hint="The softmax is taken twice: log_softmax already contains it. Give it the logits themselves.",
)
def softmax_twice(logits, labels):
    return _loss(logits, labels, log_p=lambda x: torch.log_softmax(torch.softmax(x, -1), -1))


@wrong(
    "cross_entropy",
    caught_by="test_loss_equals_torch",
    hint="The softmax runs over the tokens: dim=1 is the vocabulary only if there is no batch. Use dim=-1.",
)
def softmax_over_tokens(logits, labels):
    return _loss(logits, labels, log_p=lambda x: torch.log_softmax(x, dim=1))


@wrong(
    "cross_entropy",
    caught_by="test_loss_equals_torch",
    hint="The softmax runs over the first axis, the batch. It runs over the vocabulary, the last axis: dim=-1.",
)
def softmax_over_batch(logits, labels):
    return _loss(logits, labels, log_p=lambda x: torch.log_softmax(x, dim=0))


@wrong(
    "cross_entropy",
    caught_by="test_the_loss_by_hand",
    hint="The sign is missing: the loss is minus the mean log-probability, so that less is better.",
)
def sign_missing(logits, labels):
    return -_loss(logits, labels)


@wrong(
    "cross_entropy",
    caught_by="test_the_loss_by_hand",
    hint="The loss is in bits (log2). It is in nats here: the natural logarithm.",
)
def loss_in_bits(logits, labels):
    return _loss(logits, labels) / math.log(2)


@wrong(
    "cross_entropy",
    caught_by="test_equal_logits_cost_the_log_of_the_vocabulary",
    hint="The mean runs over the vocabulary as well, so the loss is V times too small. "
    "Each label has one term: sum over the vocabulary, then average.",
)
def mean_over_the_vocabulary(logits, labels):
    return _loss(logits, labels) / logits.shape[-1]


@wrong(
    "cross_entropy",
    caught_by="test_loss_equals_torch",
    hint="The losses are summed. Divide by the number of counted labels, so that it does not depend on the batch.",
)
def summed_up(logits, labels):
    return _loss(logits, labels, mean=lambda nll, labels: nll.sum())


@wrong(
    "cross_entropy",
    caught_by="test_ignored_labels_leave_the_mean",
    hint="The mean runs over all places, also the ignored ones: the more padding, the smaller the loss. "
    "Divide by the number of counted labels.",
)
def mean_over_all_places(logits, labels):
    return _loss(logits, labels, mean=lambda nll, labels: nll.sum() / max(nll.numel(), 1))


@wrong(
    "cross_entropy",
    caught_by="test_ignored_labels_leave_the_mean",
    hint="IGNORE is turned into the label 0 and then counted: the model learns to say token 0 at padding. "
    "Leave these places out of the sum and out of the number of labels.",
)
def ignored_as_label_0(logits, labels):
    return _loss(logits, labels.clamp(min=0))


@wrong(
    "cross_entropy",
    caught_by="test_ignored_labels_leave_the_mean",
    hint="Ignored places are left out of the number of labels, but not out of the sum. Set their loss to 0 first.",
)
def ignored_in_the_sum(logits, labels):
    return _loss(logits, labels, nll=lambda log_p, labels: _nll(log_p, labels.clamp(min=0)))


@wrong(
    "cross_entropy",
    caught_by="test_ignored_labels_leave_the_mean",
    hint="-100 is used as an index, which fails, or counts from the end. "
    "Put a valid index at ignored places first, or select the counted places.",
)
def ignored_as_index(logits, labels):
    def nll(log_p, labels):
        return _nll(log_p, labels) - 0 * log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    return _loss(logits, labels, nll=nll)


@wrong(
    "cross_entropy",
    caught_by="test_ignored_labels_leave_the_mean",
    hint="The label 0 is ignored. It is a token like any other: only IGNORE, -100, does not count.",
)
def zero_ignored_too(logits, labels):
    _fitting(logits, labels)
    return _loss(logits, labels.masked_fill(labels == 0, IGNORE))


@wrong(
    "cross_entropy",
    caught_by="test_every_counted_label_weighs_the_same",
    hint="Each sequence is averaged, then the sequences: a token of a short one weighs more. "
    "Take one mean over all counted labels of the batch.",
)
def mean_of_row_means(logits, labels):
    def mean(nll, labels):
        counted = (labels != IGNORE).sum(-1)
        rows = nll.sum(-1) / counted.clamp(min=1)
        return rows.sum() / (counted > 0).sum().clamp(min=1)

    return _loss(logits, labels, mean=mean)


@wrong(
    "cross_entropy",
    caught_by="test_the_labels_are_not_shifted_again",
    hint="The labels are shifted once more in the loss: `shift_labels` has done so already, and each place now learns "
    "the token after the next. Compare logits[t] with labels[t].",
)
def shifted_in_the_loss(logits, labels):
    _fitting(logits, labels)
    if labels.dim() < 2:
        return _loss(logits, labels)
    return _loss(logits[..., :-1, :], labels[..., 1:])


@wrong(
    "cross_entropy",
    caught_by="test_none_counted_costs_nothing",
    hint="Where no label counts the mean is 0/0, NaN. Divide by at least 1.",
)
def nothing_by_nothing(logits, labels):
    return _loss(logits, labels, mean=lambda nll, labels: nll.sum() / (labels != IGNORE).sum())


@wrong(
    "cross_entropy",
    caught_by="test_none_counted_costs_nothing",
    hint="Where no label counts a new tensor 0 is returned, which has no graph: backward() fails. "
    "Let the 0 come from the logits: divide their sum, 0, by at least 1.",
)
def zero_without_a_graph(logits, labels):
    _fitting(logits, labels)
    if (labels == IGNORE).all():
        return torch.zeros((), dtype=_wide(logits).dtype)
    return _loss(logits, labels)


@wrong(
    "cross_entropy",
    caught_by="test_gradient_is_softmax_minus_label",
    hint="The graph is cut (detach, item, numpy, no_grad or a new tensor): the loss has a value, but nothing learns.",
)
def loss_detached(logits, labels):
    return _loss(logits.detach(), labels)


@wrong(
    "cross_entropy",
    caught_by="test_loss_in_at_least_float32",
    hint="Logits in half precision give a loss in half precision. Take them to float32 first, and stay there.",
)
def loss_in_half_precision(logits, labels):
    return _loss(logits, labels, wide=lambda x: x)


@wrong(
    "cross_entropy",
    caught_by="test_loss_in_at_least_float32",
    hint="The log-softmax is computed in half precision, and only its result is taken to float32: "
    "the digits are lost by then. Convert the logits first.",
)
def widened_too_late(logits, labels):
    return _loss(logits, labels, wide=lambda x: x, log_p=lambda x: _wide(torch.log_softmax(x, -1)))


@wrong(
    "cross_entropy",
    caught_by="test_loss_equals_torch",
    hint="Logits in float64 are taken to float32. Only what is narrower than float32 is converted.",
)
def always_float32(logits, labels):
    return _loss(logits, labels, wide=lambda x: x.float())


@wrong(
    "cross_entropy",
    caught_by="test_loss_equals_torch",
    hint="The loss comes in float64 whatever the logits are. float32 stays float32.",
)
def always_float64(logits, labels):
    return _loss(logits, labels, wide=lambda x: x.double())


@wrong(
    "cross_entropy",
    caught_by="test_shapes_that_do_not_fit_are_an_error",
    hint="Only the number of labels is compared: labels (T, B) are paired with the wrong logits and nothing is said. "
    "Compare logits.shape[:-1] with labels.shape and raise ValueError.",
)
def paired_by_number(logits, labels):
    if logits.shape[:-1].numel() != labels.numel():
        raise ValueError("not as many labels as logits")
    return _loss(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


@wrong(
    "cross_entropy",
    caught_by="test_shapes_that_do_not_fit_are_an_error",
    hint="Shapes that do not fit are not noticed, or end in torch's own error. "
    "Compare logits.shape[:-1] with labels.shape first and raise ValueError.",
)
def shapes_not_compared(logits, labels):
    return _loss(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), fitting=lambda logits, labels: None)


@wrong(
    "cross_entropy",
    caught_by="test_shapes_that_do_not_fit_are_an_error",
    hint="Labels of another shape are broadcast against the logits. Compare the shapes first and raise ValueError.",
)
def labels_broadcast(logits, labels):
    try:
        labels = labels.expand(logits.shape[:-1])
    except RuntimeError as error:
        raise ValueError("shapes") from error
    return _loss(logits, labels)


@wrong(
    "cross_entropy",
    caught_by="test_a_loss_takes_any_layout",
    hint="`view` fails for slices such as ids[:, 1:], which leave gaps in memory. Use reshape or flatten.",
)
def flattened_by_view(logits, labels):
    _fitting(logits, labels)
    return _loss(logits.view(-1, logits.shape[-1]), labels.view(-1))


@wrong(
    "cross_entropy",
    caught_by="test_ignored_labels_leave_the_mean",
    hint="The caller's labels are changed in place, so that IGNORE is gone from them. Use masked_fill, which copies.",
)
def labels_overwritten(logits, labels):
    _fitting(logits, labels)
    ignored = labels == IGNORE
    nll = _nll(_log_softmax(_wide(logits)), labels).masked_fill(ignored, 0.0)
    labels[ignored] = 0
    return nll.sum() / (~ignored).sum().clamp(min=1)


@wrong(
    "cross_entropy",
    caught_by="test_loss_equals_torch",
    hint="Every place has its own loss here. Average them: the result is a scalar.",
)
def not_averaged(logits, labels):
    return _loss(logits, labels, mean=lambda nll, labels: nll)


# perplexity ----------------------------------------------------------------------------------------------------------


def _exp(loss):
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@wrong(
    "perplexity",
    caught_by="test_hesitating_between_fifty",
    hint="The loss is in nats, and 2 to the loss is for bits. Use e to the loss.",
)
def two_to_the_loss(loss):
    return 2.0**loss if loss < 1024 else math.inf


@wrong(
    "perplexity",
    caught_by="test_too_large_is_inf",
    hint="math.exp raises OverflowError above 709 nats. Catch it and return math.inf.",
)
def overflow_not_caught(loss):
    return math.exp(loss)


@wrong(
    "perplexity",
    caught_by="test_a_large_loss_is_still_a_number",
    hint="It is computed in float32, which ends at 88 nats. A Python float holds up to 709: use math.exp.",
)
def in_float32(loss):
    return torch.tensor(loss, dtype=torch.float32).exp().item()


@wrong(
    "perplexity",
    caught_by="test_a_large_loss_is_still_a_number",
    hint="The loss is capped, so that all bad models look the same. Give the true number, and inf only where it is "
    "too large for a float.",
)
def capped_at_20(loss):
    return _exp(min(loss, 20.0))


@wrong(
    "perplexity",
    caught_by="test_a_large_loss_is_still_a_number",
    hint="inf comes too early: e to the loss is a float up to 709 nats. Try math.exp, and return inf where it raises "
    "OverflowError.",
)
def inf_above_100(loss):
    return math.exp(loss) if loss < 100 else math.inf


@wrong(
    "perplexity",
    caught_by="test_hesitating_between_fifty",
    hint="The sign of the loss is inverted: e to minus the loss is the probability of a token. "
    "Perplexity is e to the loss.",
)
def probability_of_a_token(loss):
    return math.exp(-loss)


@wrong(
    "perplexity",
    caught_by="test_hesitating_between_fifty",
    hint="The loss is returned as it is. Perplexity is e to the loss.",
)
def loss_itself(loss):
    return float(loss)


@wrong(
    "perplexity",
    caught_by="test_hesitating_between_fifty",
    hint="A tensor is returned. Perplexity is a Python float: use math.exp.",
)
def perplexity_as_tensor(loss):
    return torch.tensor(loss).exp()


@wrong(
    "perplexity",
    caught_by="test_too_large_is_inf",
    hint="The largest float is returned where the result is too large for one. Return math.inf.",
)
def largest_float(loss):
    return min(_exp(loss), torch.finfo(torch.float64).max)


@wrong(
    "perplexity",
    caught_by="test_perplexity_is_e_to_the_loss",
    hint="The perplexity is rounded to a whole number. Return e to the loss as it is.",
)
def rounded(loss):
    value = _exp(loss)
    return value if math.isinf(value) else float(round(value))


# bits_per_byte -------------------------------------------------------------------------------------------------------


def _no_bytes(n_bytes):
    if n_bytes < 1:
        raise ValueError("no bytes")


@wrong(
    "bits_per_byte",
    caught_by="test_one_bit_a_token",
    hint="The result is in nats. One nat is 1 / ln 2 bits: divide by math.log(2).",
)
def nats_per_byte(loss, n_tokens, n_bytes):
    _no_bytes(n_bytes)
    return loss * n_tokens / n_bytes


@wrong(
    "bits_per_byte",
    caught_by="test_one_bit_a_token",
    hint="Nats are multiplied by ln 2. One nat is 1 / ln 2 = 1.44 bits: divide.",
)
def multiplied_by_ln_2(loss, n_tokens, n_bytes):
    _no_bytes(n_bytes)
    return loss * n_tokens * math.log(2) / n_bytes


@wrong(
    "bits_per_byte",
    caught_by="test_bits_are_shared_among_the_bytes",
    hint="These are bits per token. Multiply by n_tokens, and divide by n_bytes.",
)
def bits_per_token(loss, n_tokens, n_bytes):
    _no_bytes(n_bytes)
    return loss / math.log(2)


@wrong(
    "bits_per_byte",
    caught_by="test_bits_are_shared_among_the_bytes",
    hint="Tokens and bytes are exchanged. All tokens together cost loss * n_tokens: share that among n_bytes.",
)
def tokens_and_bytes_exchanged(loss, n_tokens, n_bytes):
    _no_bytes(n_bytes)
    return loss / math.log(2) * n_bytes / n_tokens


@wrong(
    "bits_per_byte",
    caught_by="test_one_bit_a_token",
    hint="The loss is taken for the sum over all tokens. It is their mean: multiply by n_tokens first.",
)
def loss_as_a_sum(loss, n_tokens, n_bytes):
    _no_bytes(n_bytes)
    return loss / math.log(2) / n_bytes


@wrong(
    "bits_per_byte",
    caught_by="test_one_bit_a_token",
    hint="The logarithm of the loss is taken. The loss is a logarithm already: divide it by math.log(2).",
)
def log2_of_the_loss(loss, n_tokens, n_bytes):
    _no_bytes(n_bytes)
    return (math.log2(loss) if loss > 0 else 0.0) * n_tokens / n_bytes


@wrong(
    "bits_per_byte",
    caught_by="test_bits_are_shared_among_the_bytes",
    hint="The bytes are counted as 8 bits each, and the cost is divided by bits. It is for a byte: divide by n_bytes.",
)
def bits_per_bit(loss, n_tokens, n_bytes):
    _no_bytes(n_bytes)
    return loss * n_tokens / math.log(2) / (8 * n_bytes)


@wrong(
    "bits_per_byte",
    caught_by="test_bits_are_shared_among_the_bytes",
    hint="`//` drops the fraction of tokens per byte. Use `/`.",
)
def whole_tokens_per_byte(loss, n_tokens, n_bytes):
    _no_bytes(n_bytes)
    return loss / math.log(2) * (n_tokens // n_bytes)


@wrong(
    "bits_per_byte",
    caught_by="test_no_bytes_is_an_error",
    hint="No bytes end in a ZeroDivisionError, and a negative number in a negative result. "
    "Check n_bytes first and raise ValueError unless it is at least 1.",
)
def bytes_not_checked(loss, n_tokens, n_bytes):
    return loss * n_tokens / math.log(2) / n_bytes


@wrong(
    "bits_per_byte",
    caught_by="test_no_bytes_is_an_error",
    hint="Only n_bytes=0 is an error here. A negative number is one, too: raise ValueError below 1.",
)
def negative_bytes_accepted(loss, n_tokens, n_bytes):
    if n_bytes == 0:
        raise ValueError("no bytes")
    return loss * n_tokens / math.log(2) / n_bytes


@wrong(
    "bits_per_byte",
    caught_by="test_no_bytes_is_an_error",
    hint="Where there are no bytes a number is returned. That must be a ValueError.",
)
def no_bytes_cost_nothing(loss, n_tokens, n_bytes):
    return loss * n_tokens / math.log(2) / n_bytes if n_bytes > 0 else 0.0


# tail_loss -----------------------------------------------------------------------------------------------------------


def _check_tail(losses, fraction):
    if losses.numel() == 0:
        raise ValueError("no losses")
    if fraction <= 0 or fraction > 1:
        raise ValueError("a fraction")


def _tail(losses, k):
    return losses.sort(descending=True).values[:k].mean()


@wrong(
    "tail_loss",
    caught_by="test_the_worst_half_by_hand",
    hint="The smallest losses are averaged. The tail is where the model is worst: the largest.",
)
def best_losses(losses, fraction):
    _check_tail(losses, fraction)
    return losses.sort().values[: max(1, round(fraction * len(losses)))].mean()


@wrong(
    "tail_loss",
    caught_by="test_the_worst_half_by_hand",
    hint="The first losses are averaged, in the order they came. Sort them, or use topk.",
)
def first_losses(losses, fraction):
    _check_tail(losses, fraction)
    return losses[: max(1, round(fraction * len(losses)))].mean()


@wrong(
    "tail_loss",
    caught_by="test_a_half_is_rounded_to_even",
    hint="int() and // round down. The number of losses is round(fraction * n), and at least 1.",
)
def rounded_down(losses, fraction):
    _check_tail(losses, fraction)
    return _tail(losses, max(1, int(fraction * len(losses))))


@wrong(
    "tail_loss",
    caught_by="test_a_half_is_rounded_to_even",
    hint="The number of losses is rounded up. It is round(fraction * n), to the nearest, and at least 1.",
)
def rounded_up(losses, fraction):
    _check_tail(losses, fraction)
    return _tail(losses, math.ceil(fraction * len(losses)))


@wrong(
    "tail_loss",
    caught_by="test_a_half_is_rounded_to_even",
    hint="A half is rounded up, by adding 0.5. Python's `round` goes to the even neighbour: half of 5 is 2.",
)
def half_rounded_up(losses, fraction):
    _check_tail(losses, fraction)
    return _tail(losses, max(1, int(fraction * len(losses) + 0.5)))


@wrong(
    "tail_loss",
    caught_by="test_the_worst_half_by_hand",
    hint="One loss too few is taken. k = max(1, round(fraction * n)), and a slice [:k] holds k of them.",
)
def one_too_few(losses, fraction):
    _check_tail(losses, fraction)
    return _tail(losses, max(1, round(fraction * len(losses)) - 1))


@wrong(
    "tail_loss",
    caught_by="test_the_worst_half_by_hand",
    hint="One loss too many is taken. k = max(1, round(fraction * n)): the 1 is the least, it is not added.",
)
def one_too_many(losses, fraction):
    _check_tail(losses, fraction)
    return _tail(losses, 1 + round(fraction * len(losses)))


@wrong(
    "tail_loss",
    caught_by="test_at_least_one_loss",
    hint="A small fraction rounds to no loss at all, whose mean is NaN. Take at least one.",
)
def perhaps_none(losses, fraction):
    _check_tail(losses, fraction)
    return _tail(losses, round(fraction * len(losses)))


@wrong(
    "tail_loss",
    caught_by="test_all_of_them_is_the_plain_mean",
    hint="The fraction is taken away: the mean runs over the largest (1 - fraction). "
    "It says how much of the losses is meant.",
)
def the_other_fraction(losses, fraction):
    _check_tail(losses, fraction)
    return _tail(losses, max(1, round((1 - fraction) * len(losses))))


@wrong(
    "tail_loss",
    caught_by="test_the_worst_half_by_hand",
    hint="The smallest loss of the tail is returned, a quantile (the value at risk). "
    "What is meant is the mean of the tail.",
)
def value_at_risk(losses, fraction):
    _check_tail(losses, fraction)
    return losses.topk(max(1, round(fraction * len(losses)))).values[-1]


@wrong(
    "tail_loss",
    caught_by="test_the_worst_half_by_hand",
    hint="The tail is summed up. Divide by the number of losses in it.",
)
def tail_summed(losses, fraction):
    _check_tail(losses, fraction)
    return losses.topk(max(1, round(fraction * len(losses)))).values.sum()


@wrong(
    "tail_loss",
    caught_by="test_the_worst_half_by_hand",
    hint="The sum of the tail is divided by the number of all losses. Divide by the number of those in the tail.",
)
def tail_over_all(losses, fraction):
    _check_tail(losses, fraction)
    return losses.topk(max(1, round(fraction * len(losses)))).values.sum() / len(losses)


@wrong(
    "tail_loss",
    caught_by="test_equal_losses_are_not_all_taken",
    hint="All losses from a threshold on are taken: where several equal it, that is more than k. "
    "Take exactly k of them, by sort or topk.",
)
def from_a_threshold(losses, fraction):
    _check_tail(losses, fraction)
    threshold = losses.topk(max(1, round(fraction * len(losses)))).values[-1]
    return losses[losses >= threshold].mean()


@wrong(
    "tail_loss",
    caught_by="test_the_tail_is_rounded",
    hint="The tail starts at an interpolated quantile, and how many losses lie above it is not round(fraction * n). "
    "Count them instead: take the k largest.",
)
def above_a_quantile(losses, fraction):
    _check_tail(losses, fraction)
    return losses[losses >= torch.quantile(losses, 1 - fraction)].mean()


@wrong(
    "tail_loss",
    caught_by="test_only_the_worst_learn",
    hint="The graph is cut (detach, item, tolist or a new tensor): the loss has a value, but nothing learns.",
)
def tail_detached(losses, fraction):
    _check_tail(losses, fraction)
    return _tail(losses.detach(), max(1, round(fraction * len(losses))))


@wrong(
    "tail_loss",
    caught_by="test_a_fraction_lies_between_0_and_1",
    hint="The fraction is not checked: 0, a negative one or one above 1 must be a ValueError.",
)
def fraction_not_checked(losses, fraction):
    if losses.numel() == 0:
        raise ValueError("no losses")
    return _tail(losses, max(1, round(fraction * len(losses))))


@wrong(
    "tail_loss",
    caught_by="test_a_fraction_lies_between_0_and_1",
    hint="The fraction 0 is accepted. There is no mean of no losses: raise ValueError unless 0 < fraction <= 1.",
)
def zero_accepted(losses, fraction):
    if not 0 <= fraction <= 1 or losses.numel() == 0:
        raise ValueError("a fraction")
    return _tail(losses, max(1, round(fraction * len(losses))))


@wrong(
    "tail_loss",
    caught_by="test_all_of_them_is_the_plain_mean",
    hint="The fraction 1 is refused. It is the plain mean: raise ValueError unless 0 < fraction <= 1.",
)
def one_refused(losses, fraction):
    if not 0 < fraction < 1 or losses.numel() == 0:
        raise ValueError("a fraction")
    return _tail(losses, max(1, round(fraction * len(losses))))


@wrong(
    "tail_loss",
    caught_by="test_a_fraction_lies_between_0_and_1",
    hint="No losses give NaN or torch's own error. Check losses.numel() and raise ValueError.",
)
def emptiness_not_checked(losses, fraction):
    if not 0 < fraction <= 1:
        raise ValueError("a fraction")
    return _tail(losses, max(1, round(fraction * len(losses))))


@wrong(
    "tail_loss",
    caught_by="test_the_worst_half_by_hand",
    hint="`losses.sort_()` and numpy's sort change the caller's tensor. Use torch.sort or topk, which copy.",
)
def sorted_in_place(losses, fraction):
    _check_tail(losses, fraction)
    k = max(1, round(fraction * len(losses)))
    tail = _tail(losses, k)
    losses.data.copy_(losses.sort(descending=True).values)
    return tail


# group_advantages ----------------------------------------------------------------------------------------------------


def _advantages(rewards, centre=None, scale=None, wide=_wide):
    x = wide(rewards)
    centred = x - x.mean(1, keepdim=True) if centre is None else centre(x)
    std = x.std(1, correction=0, keepdim=True) if scale is None else scale(x)
    equal = (x == x[:, :1]).all(1, keepdim=True)
    return torch.where(equal, torch.zeros_like(x), centred / std)


@wrong(
    "group_advantages",
    caught_by="test_advantages_by_hand",
    hint="The std is the unbiased one, torch's default, divided by n - 1. Divide by n: correction=0.",
)
def unbiased_std(rewards):
    return _advantages(rewards, scale=lambda x: x.std(1, keepdim=True) if x.shape[1] > 1 else x)


@wrong(
    "group_advantages",
    caught_by="test_the_size_of_the_rewards_cancels_out",
    hint="An epsilon is added to the std, so that close rewards give small advantages. "
    "Divide by the std itself, and set groups of equal rewards to 0.",
)
def epsilon_in_the_std(rewards):
    return _advantages(rewards, scale=lambda x: x.std(1, correction=0, keepdim=True) + 1e-8)


@wrong(
    "group_advantages",
    caught_by="test_the_size_of_the_rewards_cancels_out",
    hint="An epsilon of 1e-4 or so is added to the std: all advantages come out too small. "
    "Divide by the std itself, and set groups of equal rewards to 0.",
)
def large_epsilon(rewards):
    return _advantages(rewards, scale=lambda x: x.std(1, correction=0, keepdim=True) + 1e-4)


@wrong(
    "group_advantages",
    caught_by="test_advantages_by_hand",
    hint="The rewards are only centred. Divide by the std of their group as well.",
)
def only_centred(rewards):
    return _advantages(rewards, scale=torch.ones_like)


@wrong(
    "group_advantages",
    caught_by="test_advantages_by_hand",
    hint="The rewards are divided by the std, but their mean is not subtracted: a poor answer looks good where all "
    "are rewarded.",
)
def not_centred(rewards):
    return _advantages(rewards, centre=lambda x: x)


@wrong(
    "group_advantages",
    caught_by="test_advantages_by_hand",
    hint="The rewards are divided by their variance. Take its square root: the std.",
)
def by_the_variance(rewards):
    return _advantages(rewards, scale=lambda x: x.var(1, correction=0, keepdim=True))


@wrong(
    "group_advantages",
    caught_by="test_advantages_by_hand",
    hint="The sign is inverted: an answer that is better than its group has a positive advantage.",
)
def sign_of_advantage_inverted(rewards):
    return -_advantages(rewards)


@wrong(
    "group_advantages",
    caught_by="test_each_group_is_judged_alone",
    hint="Mean and std run over the groups, axis 0: answers to different questions are compared. "
    "They run over the answers to one question, axis 1.",
)
def across_the_groups(rewards):
    x = _wide(rewards)
    equal = (x == x[:, :1]).all(1, keepdim=True)
    scaled = (x - x.mean(0)) / x.std(0, correction=0)
    return torch.where(equal, torch.zeros_like(x), scaled)


@wrong(
    "group_advantages",
    caught_by="test_each_group_is_judged_alone",
    hint="Mean and std are those of all groups together, so that a hard question has bad answers only. "
    "Use dim=1, the answers to one question.",
)
def over_all_groups(rewards):
    return _advantages(
        rewards, centre=lambda x: x - x.mean(), scale=lambda x: x.std(correction=0).expand(len(x), 1).clone()
    )


@wrong(
    "group_advantages",
    caught_by="test_each_group_is_judged_alone",
    hint="The mean is that of a group, but the std is that of all rewards together. Both belong to one group: dim=1.",
)
def std_over_all_groups(rewards):
    return _advantages(rewards, scale=lambda x: x.std(correction=0))


@wrong(
    "group_advantages",
    caught_by="test_equal_rewards_teach_nothing",
    hint="Where all rewards of a group are equal this is 0/0, NaN. Set the advantages of such a group to 0.",
)
def nan_for_equal_rewards(rewards):
    x = _wide(rewards)
    return (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)


@wrong(
    "group_advantages",
    caught_by="test_equal_rewards_give_exactly_0",
    hint="Equal rewards are told by a std of exactly 0, or by NaN. Their mean may be off by a rounding, and then the "
    "std is not 0: compare the rewards themselves.",
)
def equal_by_std(rewards):
    x = _wide(rewards)
    centred = x - x.mean(1, keepdim=True)
    std = centred.square().mean(1, keepdim=True).sqrt()
    return torch.where(std == 0, torch.zeros_like(x), centred / std)


@wrong(
    "group_advantages",
    caught_by="test_advantages_in_at_least_float32",
    hint="Rewards in half precision give advantages in half precision. Take them to float32 first, and stay there.",
)
def advantages_in_half_precision(rewards):
    return _advantages(rewards if rewards.is_floating_point() else rewards.float(), wide=lambda x: x)


@wrong(
    "group_advantages",
    caught_by="test_advantages_in_at_least_float32",
    hint="Rewards in float64 are taken to float32. Only what is narrower than float32, or an integer, is converted.",
)
def advantages_in_float32(rewards):
    return _advantages(rewards.float())


@wrong(
    "group_advantages",
    caught_by="test_whole_rewards_give_fractions",
    hint="Integer rewards end in torch's error: a mean needs floating point. Convert them to float32 first.",
)
def integers_refused(rewards):
    return _advantages(rewards, wide=lambda x: _wide(x) if x.is_floating_point() else x)


@wrong(
    "group_advantages",
    caught_by="test_advantages_by_hand",
    hint="`-=` and other operations in place change the caller's rewards. Write x = x - ..., which makes a new tensor.",
)
def centred_in_place(rewards):
    advantages = _advantages(rewards)
    if rewards.is_floating_point():
        rewards -= rewards.mean(1, keepdim=True)
    return advantages


@wrong(
    "group_advantages",
    caught_by="test_advantages_by_hand",
    hint="Each answer is compared with the mean of the others. Take the mean of the whole group, the answer itself "
    "included.",
)
def leave_one_out(rewards):
    def centre(x):
        n = x.shape[1]
        return x - (x.sum(1, keepdim=True) - x) / max(n - 1, 1)

    return _advantages(rewards, centre=centre)


# policy_gradient_loss ------------------------------------------------------------------------------------------------
#
# As above: a correct body whose steps are functions.


def _selected(log_probs, is_token):
    return torch.where(is_token, log_probs, torch.zeros_like(log_probs))


def _weights(advantages, log_probs):
    return advantages.detach()[:, None]


def _over_tokens(terms, is_token):
    return terms.sum() / is_token.sum().clamp(min=1)


def _policy(log_probs, advantages, is_token, wide=_wide, select=_selected, weights=_weights, mean=_over_tokens):
    x = select(wide(log_probs), is_token)
    return -mean(weights(advantages, x) * x, is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_policy_loss_by_hand",
    hint="The sign is missing: a loss is made smaller, and good answers would become rarer. "
    "Take minus the mean of advantage times log-probability.",
)
def good_made_rare(log_probs, advantages, is_token):
    return -_policy(log_probs, advantages, is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_padding_leaves_the_mean",
    hint="is_token is not used: padding counts like text. Leave it out of the sum and of the number.",
)
def padding_in_the_policy(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, torch.ones_like(is_token))


@wrong(
    "policy_gradient_loss",
    caught_by="test_padding_leaves_the_mean",
    hint="The sense of is_token is inverted: True means a token, which counts.",
)
def only_padding_counts(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, ~is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_padding_leaves_the_mean",
    hint="The sum is divided by all places, also by padding. Divide by the number of tokens that count.",
)
def mean_over_padding(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, mean=lambda terms, is_token: terms.mean())


@wrong(
    "policy_gradient_loss",
    caught_by="test_padding_leaves_the_mean",
    hint="Padding is left out of the number of tokens, but not out of the sum. Set it to 0 first.",
)
def padding_in_the_sum(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, select=lambda x, is_token: x)


@wrong(
    "policy_gradient_loss",
    caught_by="test_every_token_weighs_the_same",
    hint="Each answer is averaged, then the answers: a token of a short answer weighs more. "
    "Take one mean over the tokens of all answers.",
)
def mean_of_answer_means(log_probs, advantages, is_token):
    def mean(terms, is_token):
        return (terms.sum(1) / is_token.sum(1).clamp(min=1)).mean()

    return _policy(log_probs, advantages, is_token, mean=mean)


@wrong(
    "policy_gradient_loss",
    caught_by="test_policy_loss_by_hand",
    hint="The tokens of an answer are summed, and only the answers averaged. Divide by the number of tokens that "
    "count.",
)
def mean_over_answers(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, mean=lambda terms, is_token: terms.sum(1).mean())


@wrong(
    "policy_gradient_loss",
    caught_by="test_policy_loss_by_hand",
    hint="The terms are summed up. Divide by the number of tokens that count.",
)
def policy_summed(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, mean=lambda terms, is_token: terms.sum())


@wrong(
    "policy_gradient_loss",
    caught_by="test_nothing_at_padding_counts",
    hint="Padding is multiplied by 0, but 0 * -inf is NaN. Replace what stands there: masked_fill or torch.where.",
)
def padding_times_zero(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, select=lambda x, is_token: x * is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_padding_leaves_the_mean",
    hint="Padding is set to 0 in the caller's own log-probabilities. Use masked_fill or torch.where, which copy.",
)
def padding_filled_in_place(log_probs, advantages, is_token):
    log_probs[~is_token] = 0.0
    return _policy(log_probs, advantages, is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_an_answer_has_its_own_advantage",
    hint="advantages (B,) are multiplied along the last axis: token t gets the advantage of answer t, and nothing is "
    "said where B = T. Make them (B, 1).",
)
def advantage_of_the_token(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, weights=lambda advantages, x: advantages.detach())


@wrong(
    "policy_gradient_loss",
    caught_by="test_advantages_are_constants",
    hint="A gradient flows into the advantages. They are constants here: detach them.",
)
def advantages_learn(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, weights=lambda advantages, x: advantages[:, None])


@wrong(
    "policy_gradient_loss",
    caught_by="test_good_answers_become_likelier",
    hint="The graph of the log-probabilities is cut: nothing learns. Only the advantages are detached.",
)
def policy_detached(log_probs, advantages, is_token):
    return _policy(log_probs.detach(), advantages, is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_policy_loss_by_hand",
    hint="The probabilities are weighed, not their logarithms. Use log_probs as they are.",
)
def probabilities_weighed(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, select=lambda x, is_token: _selected(x.exp(), is_token))


@wrong(
    "policy_gradient_loss",
    caught_by="test_policy_loss_by_hand",
    hint="The advantages are not used: every answer becomes likelier, good or bad.",
)
def advantages_ignored(log_probs, advantages, is_token):
    return _policy(log_probs, torch.ones_like(advantages), is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_policy_loss_by_hand",
    hint="Negative advantages are dropped, so that bad answers teach nothing. They count, too: bad answers get rarer.",
)
def only_good_answers(log_probs, advantages, is_token):
    return _policy(log_probs, advantages.clamp(min=0), is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_an_answer_has_its_own_advantage",
    hint="The mean of the advantages is subtracted once more. Take them as they come.",
)
def centred_again(log_probs, advantages, is_token):
    return _policy(log_probs, advantages - advantages.mean() if len(advantages) > 1 else advantages, is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_no_tokens_cost_nothing",
    hint="Where no token counts the mean is 0/0, NaN. Divide by at least 1.",
)
def policy_of_nothing(log_probs, advantages, is_token):
    return _policy(log_probs, advantages, is_token, mean=lambda terms, is_token: terms.sum() / is_token.sum())


@wrong(
    "policy_gradient_loss",
    caught_by="test_no_tokens_cost_nothing",
    hint="Where no token counts a new tensor 0 is returned, which has no graph: backward() fails. "
    "Let the 0 come from the log-probabilities: set padding to 0, sum, and divide by at least 1.",
)
def policy_without_a_graph(log_probs, advantages, is_token):
    if not is_token.any():
        return torch.zeros((), dtype=_wide(log_probs).dtype)
    return _policy(log_probs, advantages, is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_no_tokens_cost_nothing",
    hint="Where no token counts the log-probabilities are multiplied by 0, and 0 * -inf is NaN. "
    "Set padding to 0 first: the sum is 0 then, and has a graph.",
)
def nothing_times_infinity(log_probs, advantages, is_token):
    if not is_token.any():
        return 0 * _wide(log_probs).sum()
    return _policy(log_probs, advantages, is_token)


@wrong(
    "policy_gradient_loss",
    caught_by="test_policy_loss_in_at_least_float32",
    hint="Half precision gives a loss in half precision. Take the log-probabilities to float32 first, and stay there.",
)
def policy_in_half_precision(log_probs, advantages, is_token):
    return _policy(log_probs, advantages.to(log_probs.dtype), is_token, wide=lambda x: x)


@wrong(
    "policy_gradient_loss",
    caught_by="test_policy_loss_in_at_least_float32",
    hint="Log-probabilities in float64 are taken to float32. Only what is narrower than float32 is converted.",
)
def policy_in_float32(log_probs, advantages, is_token):
    return _policy(log_probs, advantages.float(), is_token, wide=lambda x: x.float())
