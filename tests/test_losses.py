"""The checks of chapter 07: labels, the average loss, and objectives that are not the average.

Outside truth: torch's losses, float64, hand-worked values.
"""

import math

import torch
import torch.nn.functional as F

from .same import expect, is_tensor, outcome, raises, rng, same

# What a piece may not call, since it is torch's version of the same thing.
FORBIDDEN = {"cross_entropy": [F.cross_entropy, F.nll_loss, "aten::cross_entropy", "aten::nll_loss"]}

IGNORE = -100
HALVES = (torch.float16, torch.bfloat16)


def _randn(*shape, salt=0, dtype=torch.float32):
    return torch.randn(shape, generator=rng(salt)).to(dtype)


def _after(function, x, *rest):
    """What x is after a call: a probe's calls are not watched."""
    x = x.clone()
    function(x, *rest)
    return x


def _gradient(function, x, what, scale=1.0):
    """The gradient that x gets from scale times the function of it."""
    x = x.detach().clone().requires_grad_()
    loss = function(x)
    is_tensor(loss, what)
    expect(loss.shape == (), f"{what}: expected a scalar, shape (), got {tuple(loss.shape)}")
    cut = f"{what}: expected it to run backward, but it has no graph: was it cut by detach(), item() or a new tensor?"
    expect(loss.requires_grad, cut)
    (scale * loss).backward()
    return torch.zeros_like(x) if x.grad is None else x.grad


def _close(got, want, what):
    """A float, up to a millionth of it."""
    expect(got is not None, f"{what}: expected a float, got None. Is a `return` missing?")
    expect(isinstance(got, float), f"{what}: expected a float, got {type(got).__name__}")
    expect(math.isclose(got, want, rel_tol=1e-6), f"{what}: expected {want:.7g}, got {got:.7g}")


def _float(call):
    """An outcome whose float is a tensor, so that a probe compares it up to rounding."""
    got = outcome(call)
    return torch.tensor(got, dtype=torch.float64) if isinstance(got, float) else got


# shift_labels --------------------------------------------------------------------------------------------------------


def _ids(*shape, salt=0):
    """Ids that are all different, none of them 0."""
    return (torch.randperm(math.prod(shape), generator=rng(salt)) + 1).view(shape)


def _lengths(T, *lengths):
    """True at the first tokens of each row."""
    return torch.arange(T) < torch.tensor(lengths)[:, None]


def _pair(got, what):
    expect(got is not None, f"{what}: expected inputs and labels, got None. Is a `return` missing?")
    two = isinstance(got, (tuple, list)) and len(got) == 2
    expect(two, f"{what}: expected two tensors, inputs and labels, got {type(got).__name__}")
    return got


def _shifted(got, inputs, labels, what):
    got_inputs, got_labels = _pair(got, what)
    same(got_inputs, inputs, f"inputs of {what}")
    same(got_labels, labels, f"labels of {what}")


def _next(ids, is_token=None):
    """Inputs and labels, one place at a time."""
    B, T = ids.shape
    labels = torch.full((B, T - 1), IGNORE)
    for b in range(B):
        for t in range(T - 1):
            if is_token is None or (is_token[b, t] and is_token[b, t + 1]):
                labels[b, t] = ids[b, t + 1]
    return ids[:, : T - 1], labels


def probe_shift_labels(shift_labels):
    """Results that tell the known mistakes apart."""
    ids, right = _ids(3, 5), _lengths(5, 5, 2, 3)
    holes = torch.tensor([[True, False, True, True, False]]).expand(3, 5)
    with_0 = torch.tensor([1, 1, 0, 1, 1])
    return [
        outcome(lambda: shift_labels(ids.clone())),
        outcome(lambda: shift_labels(ids.clone(), right)),
        outcome(lambda: shift_labels(ids.clone(), right.flip(1))),
        outcome(lambda: shift_labels(ids.clone(), holes)),
        outcome(lambda: shift_labels(ids * with_0)),
        outcome(lambda: shift_labels(ids * with_0, right | True)),
        outcome(lambda: _after(shift_labels, ids, right)),
        outcome(lambda: shift_labels(ids[:, :1].clone())),
    ]


def test_the_label_is_the_next_token(shift_labels):
    """Of the ids 5, 6, 7, 8 the model reads 5, 6, 7 and should say 6, 7, 8."""
    ids = torch.tensor([[5, 6, 7, 8]])
    _shifted(shift_labels(ids), torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 8]]), "shift_labels([[5, 6, 7, 8]])")


def test_each_row_is_shifted_alone(shift_labels):
    """In a batch every row is shifted along its tokens, and no token moves to another row."""
    for shape in ((3, 7), (5, 2), (1, 11)):
        ids = _ids(*shape)
        _shifted(shift_labels(ids), *_next(ids), f"shift_labels of ids {shape}")
    ids = _ids(7, 3).T
    _shifted(shift_labels(ids), *_next(ids), "shift_labels of transposed (non-contiguous) ids")


def test_padding_after_the_text_is_no_label(shift_labels):
    """Where the next token is padding there is nothing to say: 5, 6, padding gives the labels 6 and -100."""
    ids = torch.tensor([[5, 6, 9, 9], [1, 2, 3, 4]])
    is_token = torch.tensor([[True, True, False, False], [True, True, True, True]])
    want = torch.tensor([[6, IGNORE, IGNORE], [2, 3, 4]])
    _shifted(shift_labels(ids, is_token), ids[:, :3], want, "shift_labels of ids padded on the right")


def test_padding_before_the_text_is_no_input(shift_labels):
    """Nothing can be said from padding: padding, 5, 6 gives the labels -100 and 6."""
    ids = torch.tensor([[9, 5, 6], [1, 2, 3]])
    is_token = torch.tensor([[False, True, True], [True, True, True]])
    want = torch.tensor([[IGNORE, 6], [2, 3]])
    _shifted(shift_labels(ids, is_token=is_token), ids[:, :2], want, "shift_labels of ids padded on the left")


def test_a_label_needs_two_tokens(shift_labels):
    """Wherever padding stands, a label counts only between two tokens, and the inputs stay as they are."""
    ids = _ids(5, 7)
    for salt in range(3):
        is_token = torch.rand(5, 7, generator=rng(salt)) < 0.7
        is_token[0] = False
        _shifted(shift_labels(ids, is_token), *_next(ids, is_token), "shift_labels of ids with padding anywhere")
    is_token = _lengths(7, 7, 2, 1, 3, 6)
    _shifted(shift_labels(ids, is_token), *_next(ids, is_token), "shift_labels of ids padded on the right")
    is_token = is_token.flip(1)
    _shifted(shift_labels(ids, is_token), *_next(ids, is_token), "shift_labels of ids padded on the left")


def test_no_id_means_padding(shift_labels):
    """Only `is_token` tells what is padding: an id 0 is a token like any other."""
    ids = torch.tensor([[0, 3, 0, 0], [2, 2, 2, 2], [1, 0, 50256, 1]])
    _shifted(shift_labels(ids), ids[:, :3], ids[:, 1:], "shift_labels of ids with 0 among them")
    every = torch.ones(3, 4, dtype=torch.bool)
    _shifted(shift_labels(ids, every), ids[:, :3], ids[:, 1:], "shift_labels of ids with 0, all of them tokens")


def test_one_token_has_no_next(shift_labels):
    """A single token has nothing to say next: inputs and labels of shape (B, 0)."""
    ids = _ids(3, 1)
    _shifted(shift_labels(ids), ids[:, :0], ids[:, :0], "shift_labels of one token a row")
    is_token = torch.tensor([[True], [False], [True]])
    _shifted(shift_labels(ids, is_token), ids[:, :0], ids[:, :0], "shift_labels of one token a row, with is_token")


# cross_entropy -------------------------------------------------------------------------------------------------------


def _labels(*shape, V=7, ignored=0, salt=0):
    """Labels below V, a 0 among them; the last `ignored` of the first row, or of all, do not count."""
    labels = torch.randint(V, shape, generator=rng(salt + 50))
    labels.view(-1)[0] = 0
    if ignored:
        first = labels if len(shape) == 1 else labels[0]
        first[-ignored:] = IGNORE
    return labels


def _torch_loss(logits, labels):
    """torch's loss, computed in float64."""
    V = logits.shape[-1]
    return F.cross_entropy(logits.double().reshape(-1, V), labels.reshape(-1), ignore_index=IGNORE)


def _loss_and_gradient(function, x, *rest):
    x = x.clone().requires_grad_()
    loss = function(x, *rest)
    loss.backward()
    return [loss.detach(), torch.zeros_like(x) if x.grad is None else x.grad]


def _each_label(cross_entropy, logits):
    """The loss of each label alone."""
    return [outcome(lambda i=i: cross_entropy(logits, torch.tensor([i]))) for i in range(logits.shape[-1])]


def probe_cross_entropy(cross_entropy):
    """Results that tell the known mistakes apart."""
    x = _randn(2, 5, 7)
    labels = _labels(2, 5, ignored=3)
    flat = _labels(11, ignored=4)
    return [
        outcome(lambda: cross_entropy(x, _labels(2, 5))),
        outcome(lambda: cross_entropy(x, labels.clone())),
        outcome(lambda: cross_entropy(_randn(11, 7), flat.clone())),
        outcome(lambda: cross_entropy(_randn(11, 7), _labels(11))),
        outcome(lambda: _loss_and_gradient(cross_entropy, x, labels.clone())),
        outcome(lambda: _loss_and_gradient(cross_entropy, x, torch.full((2, 5), IGNORE))),
        outcome(lambda: cross_entropy(x, torch.full((2, 5), IGNORE))),
        outcome(lambda: cross_entropy(torch.tensor([[1e4, 0.0]]), torch.tensor([1]))),
        outcome(lambda: cross_entropy(torch.tensor([[40.0, 0.0]]), torch.tensor([1]))),
        outcome(lambda: cross_entropy(torch.tensor([[-500.0, -500.0]]), torch.tensor([1]))),
        outcome(lambda: cross_entropy(torch.tensor([[500.0, 500.0]]), torch.tensor([1]))),
        _each_label(cross_entropy, torch.tensor([[0.0, 1.0, 3.0]]).bfloat16()),
        outcome(lambda: cross_entropy(torch.tensor([[6e4, -6e4]]).half(), torch.tensor([1]))),
        outcome(lambda: cross_entropy(x.double(), _labels(2, 5))),
        outcome(lambda: cross_entropy(x, _labels(5, 2))),
        outcome(lambda: cross_entropy(x, _labels(10))),
        outcome(lambda: cross_entropy(x, _labels(1, 5))),
        outcome(lambda: cross_entropy(x, _labels(2, 4))),
        outcome(lambda: cross_entropy(_randn(2, 6, 7)[:, :-1], _labels(2, 6, ignored=2)[:, 1:])),
        outcome(lambda: _after(lambda labels: cross_entropy(x, labels), labels)),
    ]


def test_the_loss_by_hand(cross_entropy):
    """Logits 0 and ln 3 stand 1 to 3: the label 0 costs ln 4, the label 1 costs ln 4/3."""
    logits = torch.tensor([[0.0, math.log(3.0)]])
    same(cross_entropy(logits, torch.tensor([0])), torch.tensor(math.log(4.0)), "the loss of label 0, p = 1/4")
    same(cross_entropy(logits, torch.tensor([1])), torch.tensor(math.log(4 / 3)), "the loss of label 1, p = 3/4")


def test_equal_logits_cost_the_log_of_the_vocabulary(cross_entropy):
    """A model that knows nothing pays ln V a token, whatever the labels: ln 7 for 7 tokens; nothing if V is 1."""
    same(cross_entropy(torch.zeros(2, 5, 7), _labels(2, 5)), torch.tensor(math.log(7)), "the loss of 7 equal logits")
    same(cross_entropy(_randn(3, 1), torch.zeros(3).long()), torch.tensor(0.0), "the loss of a vocabulary of one token")


def test_loss_equals_torch(cross_entropy):
    """The mean over all labels is that of torch, for labels (N,), (B, T) or with more axes, in float32 and float64."""
    for shape in ((11,), (2, 5), (3, 3), (2, 1), (1, 5), (1,), (2, 3, 5)):
        labels = _labels(*shape)
        for dtype in (torch.float32, torch.float64):
            logits = 3 * _randn(*shape, 7, salt=1, dtype=dtype)
            want = _torch_loss(logits, labels).to(dtype)
            same(cross_entropy(logits, labels), want, f"cross_entropy of labels {shape} in {dtype}")
    logits, labels = _randn(2, 5, 7), _labels(2, 5)
    want = _torch_loss(logits, labels).float()
    same(cross_entropy(logits=logits, labels=labels), want, "cross_entropy(logits=..., labels=...)")


def test_ignored_labels_leave_the_mean(cross_entropy):
    """A label of -100 does not count: the mean is over the counted labels only, and its logits do not matter."""
    logits, labels = _randn(2, 5, 7), _labels(2, 5, ignored=3)
    counted = labels != IGNORE
    want = _torch_loss(logits[counted], labels[counted]).float()
    same(cross_entropy(logits, labels), want, "cross_entropy with 3 of 10 labels ignored")
    other = torch.where(counted[..., None], logits, 20 * _randn(2, 5, 7, salt=1))
    same(cross_entropy(other, labels), want, "the same with other logits at the ignored places")
    want = _torch_loss(logits[0], labels[0]).float()
    same(cross_entropy(logits[0], labels[0]), want, "cross_entropy with 3 of 5 ignored")
    labels = torch.full((3, 5), IGNORE)
    labels[1, 3] = 6
    logits = _randn(3, 5, 7)
    same(cross_entropy(logits, labels), _torch_loss(logits, labels).float(), "cross_entropy with one label counted")
    zero = torch.zeros(3, 5, dtype=torch.long)
    same(cross_entropy(logits, zero), _torch_loss(logits, zero).float(), "cross_entropy with the label 0 everywhere")


def test_every_counted_label_weighs_the_same(cross_entropy):
    """One mean over the whole batch: a row of one counted label does not weigh as much as a row of five."""
    logits, labels = _randn(2, 5, 7), _labels(2, 5, ignored=4)
    logits[0] *= 5
    same(cross_entropy(logits, labels), _torch_loss(logits, labels).float(), "rows of 1 and 5 counted labels")


def test_the_labels_are_not_shifted_again(cross_entropy):
    """The label of place t is labels[t]: a single place has a loss, and the last of five places has one, too."""
    same(cross_entropy(torch.tensor([[[0.0, 2.0]]]), torch.tensor([[1]])), torch.tensor(0.126928), "one place")
    labels = torch.full((1, 5), IGNORE)
    labels[0, 4] = 3
    logits = _randn(1, 5, 7)
    same(cross_entropy(logits, labels), _torch_loss(logits, labels).float(), "only the last place counted")
    same(cross_entropy(logits, labels.flip(1)), _torch_loss(logits, labels.flip(1)).float(), "only the first counted")


def test_large_logits_do_not_overflow(cross_entropy):
    """Logits of 10,000 are fine: exp(10,000) is never needed, and a wrong and sure model pays 10,000 nats."""
    got = cross_entropy(torch.tensor([[1e4, 0.0]]), torch.tensor([1]))
    same(got, torch.tensor(1e4), "the loss of label 1 with logits [10000, 0]")
    got = cross_entropy(torch.tensor([[1e4, 0.0]]), torch.tensor([0]))
    same(got, torch.tensor(0.0), "the loss of label 0 with logits [10000, 0]")
    logits, labels = 1e4 * _randn(2, 5, 7), _labels(2, 5)
    same(cross_entropy(logits, labels), _torch_loss(logits, labels).float(), "the loss of logits around 10,000")
    for shift in (1e4, -1e4):
        logits = _randn(2, 5, 7).round() + shift
        got, want = cross_entropy(logits, labels), _torch_loss(logits, labels)
        same(got.half(), want.half(), f"the loss of logits of {shift:g} and a little more or less")  # to 3 digits


def test_a_small_probability_keeps_its_digits(cross_entropy):
    """A label of probability e^-40 costs 40 nats: no epsilon and no clamp under the logarithm."""
    for gap in (17.0, 40.0, 200.0):
        got = cross_entropy(torch.tensor([[gap, 0.0]]), torch.tensor([1]))
        same(got, torch.tensor(gap), f"the loss of a label whose logit is {gap:g} below the other")
        got = cross_entropy(torch.tensor([[0.0, -gap]]), torch.tensor([1]))
        same(got, torch.tensor(gap), f"the loss of label 1 with logits [0, {-gap:g}]")
    got = cross_entropy(torch.tensor([[40.0, 0.0]]), torch.tensor([0])).item()
    expect(abs(got) < 1e-7, f"the loss of a label whose logit is 40 above the other: expected 0, got {got:.4g}")


def test_none_counted_costs_nothing(cross_entropy):
    """Where no label counts the loss is 0, not NaN, and can still run backward: every gradient is 0."""
    logits, labels = _randn(2, 5, 7), torch.full((2, 5), IGNORE)
    same(cross_entropy(logits, labels), torch.tensor(0.0), "the loss of ignored labels")
    got = _gradient(lambda x: cross_entropy(x, labels), logits, "the loss of ignored labels")
    same(got, torch.zeros(2, 5, 7), "gradient of the loss of ignored labels")
    got = cross_entropy(_randn(3, 0, 7), torch.zeros(3, 0, dtype=torch.long))
    same(got, torch.tensor(0.0), "the loss of no labels at all, as single tokens have")


def test_loss_in_at_least_float32(cross_entropy):
    """Half precision is taken to float32 first, float64 stays: the loss of label 0 with logits 0 and 1 is 1.3133."""
    logits = torch.tensor([[0.0, 1.0]])
    for dtype in HALVES:
        got = cross_entropy(logits.to(dtype), torch.tensor([0]))
        same(got, torch.tensor(1.3132617), f"the loss of logits [0, 1] in {dtype}, label 0")
        x, labels = _randn(2, 5, 7, dtype=dtype), _labels(2, 5)
        same(cross_entropy(x, labels), _torch_loss(x, labels).float(), f"the loss of random logits in {dtype}")
        none = cross_entropy(x, torch.full((2, 5), IGNORE))
        same(none, torch.tensor(0.0), f"the loss of logits in {dtype} with no label counted")
    got = cross_entropy(torch.tensor([[6e4, -6e4]]).half(), torch.tensor([1]))
    same(got, torch.tensor(12e4), "the loss of logits [60000, -60000] in float16, label 1")
    got = cross_entropy(logits.double(), torch.tensor([0]))
    same(got, torch.tensor(math.log1p(math.e), dtype=torch.float64), "the loss of logits [0, 1] in float64, label 0")
    got = cross_entropy(logits.double(), torch.tensor([IGNORE]))
    same(got, torch.tensor(0.0).double(), "the loss of an ignored label in float64")
    x = torch.zeros(4099, 3).half()
    same(cross_entropy(x, torch.zeros(4099).long()), torch.tensor(math.log(3)), "the loss of 4,099 labels in float16")


def test_a_loss_takes_any_layout(cross_entropy):
    """Logits and labels may be slices or transposed (non-contiguous), as `logits[:, :-1]` and `ids[:, 1:]` are."""
    logits, labels = _randn(3, 6, 7)[:, :-1], _labels(3, 6)[:, 1:]
    same(cross_entropy(logits, labels), _torch_loss(logits, labels).float(), "logits[:, :-1] and labels[:, 1:]")
    logits, labels = _randn(2, 7, 5).transpose(1, 2), _labels(5, 2).T
    same(cross_entropy(logits, labels), _torch_loss(logits, labels).float(), "transposed logits and labels")


def test_gradient_is_softmax_minus_label(cross_entropy):
    """A counted place gets (softmax - 1 at the label) / n as its gradient, an ignored one exactly 0."""
    for dtype in (torch.float32, torch.bfloat16):
        logits, labels = _randn(2, 5, 7, dtype=dtype), _labels(2, 5, ignored=3)
        got = _gradient(lambda x, y=labels: cross_entropy(x, y), logits, f"the loss in {dtype}")
        counted = labels != IGNORE
        want = torch.softmax(logits.double(), -1) - F.one_hot(labels.clamp(min=0), 7)
        want = want * counted[..., None] / 7
        same(got, want.to(dtype), f"gradient of the loss in {dtype}")
        zero = bool((got[~counted] == 0).all())
        expect(zero, f"gradient of the loss in {dtype}: expected exactly 0 at ignored places, got another number")
    x, y = 50 * _randn(5, 7), _labels(5)
    got = _gradient(lambda x: cross_entropy(x, y), x, "3 times the loss of large logits", scale=3)
    want = 3 * (torch.softmax(x.double(), -1) - F.one_hot(y, 7)) / 5
    same(got, want.float(), "gradient of 3 times the loss of large logits")


def test_shapes_that_do_not_fit_are_an_error(cross_entropy):
    """Logits (2, 5, 7) need labels (2, 5): any other shape is a ValueError, also one with as many labels."""
    logits = _randn(2, 5, 7)
    is_tensor(cross_entropy(logits, _labels(2, 5)), "cross_entropy of labels (2, 5)")
    for shape in ((5, 2), (10,), (2, 4), (2, 5, 1), (1, 5), (2, 1), (5,), (2, 5, 7), ()):
        labels = torch.zeros(shape, dtype=torch.long)
        raises(ValueError, lambda y=labels: cross_entropy(logits, y), f"logits (2, 5, 7) and labels {shape}")
    for shape in ((4,), (6,), (1,), (7,), (5, 1), (5, 7)):
        labels = torch.zeros(shape, dtype=torch.long)
        raises(ValueError, lambda y=labels: cross_entropy(logits[0], y), f"logits (5, 7) and labels {shape}")
    ignored = torch.full((5, 2), IGNORE)
    raises(ValueError, lambda: cross_entropy(logits, ignored), "logits (2, 5, 7) and labels (5, 2), all ignored")


# perplexity ----------------------------------------------------------------------------------------------------------


def probe_perplexity(perplexity):
    """Results that tell the known mistakes apart."""
    return [_float(lambda loss=loss: perplexity(loss)) for loss in (0.0, 0.5, 3.7, 25.0, 100.0, 709.7, 800.0, math.inf)]


def test_hesitating_between_fifty(perplexity):
    """A loss of ln 50 is that of 50 equally likely tokens: the perplexity is 50."""
    for n in (2, 50, 50_257):
        _close(perplexity(math.log(n)), float(n), f"perplexity(ln {n})")


def test_a_sure_model_hesitates_not(perplexity):
    """A loss of 0 is a model that is sure and right: perplexity 1."""
    _close(perplexity(0.0), 1.0, "perplexity(0.0)")


def test_perplexity_is_e_to_the_loss(perplexity):
    """e to the loss, for any loss: e for 1 nat, 20.0855 for 3."""
    _close(perplexity(loss=1.0), math.e, "perplexity(loss=1.0)")
    _close(perplexity(3.0), 20.085537, "perplexity(3.0)")
    for loss in torch.rand(5, generator=rng()).mul(12).tolist():
        _close(perplexity(loss), math.e**loss, f"perplexity({loss:.4f})")


def test_a_large_loss_is_still_a_number(perplexity):
    """Up to 709 nats e to the loss is a float: 100 nats give 2.688e43, more than float32 can hold."""
    for loss, want in ((20.0, 485165195.4), (50.0, 5.184705529e21), (100.0, 2.688117142e43), (709.7, 1.654984025e308)):
        _close(perplexity(loss), want, f"perplexity({loss:g})")


def test_too_large_is_inf(perplexity):
    """A loss of 710 or more gives inf, and no OverflowError."""
    for loss in (709.8, 710.0, 1000.0, 1e4, 1e300, math.inf):
        got = perplexity(loss)
        _close(got, math.inf, f"perplexity({loss:g})")


# bits_per_byte -------------------------------------------------------------------------------------------------------


def probe_bits_per_byte(bits_per_byte):
    """Results that tell the known mistakes apart."""
    cases = [(math.log(2), 7, 7), (2.9, 11, 37), (0.7, 37, 11), (2.9, 11, 0), (2.9, 11, -3), (2.9, 11, 1)]
    return [_float(lambda case=case: bits_per_byte(*case)) for case in cases]


def test_one_bit_a_token(bits_per_byte):
    """ln 2 nats are 1 bit: with as many bytes as tokens, a loss of ln 2 is 1 bit per byte."""
    _close(bits_per_byte(math.log(2), 7, 7), 1.0, "bits_per_byte(ln 2, 7, 7)")


def test_bits_are_shared_among_the_bytes(bits_per_byte):
    """10 tokens of 4 bits each, 40 bits, stand for 40 bytes: 1 bit per byte; for 20 bytes, 2."""
    loss = 4 * math.log(2)
    _close(bits_per_byte(loss, 10, 40), 1.0, "bits_per_byte(4 ln 2, 10, 40)")
    _close(bits_per_byte(loss, n_tokens=10, n_bytes=20), 2.0, "bits_per_byte(4 ln 2, n_tokens=10, n_bytes=20)")
    _close(bits_per_byte(loss=loss, n_tokens=10, n_bytes=1), 40.0, "bits_per_byte(loss=4 ln 2, n_tokens=10, n_bytes=1)")


def test_any_loss_in_bits(bits_per_byte):
    """The rule holds for any numbers: 3 nats a token, 5 tokens in 17 bytes are 1.272966 bits per byte."""
    _close(bits_per_byte(3.0, 5, 17), 1.272966, "bits_per_byte(3.0, 5, 17)")
    _close(bits_per_byte(0.25, 1_000_003, 4_300_019), 0.0838774997, "bits_per_byte(0.25, 1_000_003, 4_300_019)")
    _close(bits_per_byte(0.0, 5, 17), 0.0, "bits_per_byte(0.0, 5, 17)")
    for loss in torch.rand(5, generator=rng()).add(0.1).mul(5).tolist():
        want = loss * math.log2(math.e) * 13 / 31
        _close(bits_per_byte(loss, 13, 31), want, f"bits_per_byte({loss:.4f}, 13, 31)")


def test_other_tokens_of_the_same_text_cost_the_same(bits_per_byte):
    """Half as many tokens with twice the loss each are the same bits per byte: the tokens' size cancels out."""
    for loss in (torch.rand(3, generator=rng(1)) + 0.5).tolist():
        _close(bits_per_byte(2 * loss, 11, 67), bits_per_byte(loss, 22, 67), "11 tokens of twice the loss against 22")
        want = loss * math.log2(math.e) * 22 / 67
        _close(bits_per_byte(loss, 22, 67), want, f"bits_per_byte({loss:.4f}, 22, 67)")


def test_no_bytes_is_an_error(bits_per_byte):
    """No bytes, or fewer than none, is a ValueError; a single byte is fine."""
    _close(bits_per_byte(math.log(2), 1, 1), 1.0, "bits_per_byte(ln 2, 1, 1)")
    for n_bytes in (0, -1, -40):
        raises(ValueError, lambda n=n_bytes: bits_per_byte(1.0, 10, n), f"bits_per_byte(1.0, 10, {n_bytes})")


# tail_loss -----------------------------------------------------------------------------------------------------------


def _losses(n, salt=0, dtype=torch.float64):
    """Losses that are all different, some below 0, in no order."""
    steps = torch.rand(n, generator=rng(salt)) + 0.5
    order = torch.randperm(n, generator=rng(salt + 1))
    return (steps.cumsum(0) - 2.2)[order].to(dtype)


def _worst(losses, k):
    return torch.tensor(sum(sorted(losses.tolist())[-k:]) / k, dtype=losses.dtype)


def probe_tail_loss(tail_loss):
    """Results that tell the known mistakes apart."""
    x = _losses(11)
    return [
        outcome(lambda: tail_loss(x, 0.5)),
        outcome(lambda: tail_loss(_losses(3), 0.5)),
        outcome(lambda: tail_loss(_losses(5), 0.5)),
        outcome(lambda: tail_loss(_losses(7), 0.5)),
        outcome(lambda: tail_loss(_losses(9), 0.5)),
        outcome(lambda: tail_loss(_losses(10), 0.25)),
        outcome(lambda: tail_loss(_losses(6), 0.75)),
        outcome(lambda: tail_loss(x, 0.3)),
        outcome(lambda: tail_loss(x, 1.0)),
        outcome(lambda: tail_loss(x, 0.01)),
        outcome(lambda: tail_loss(torch.tensor([2.0, 5.0, 3.0, 3.0, 3.0, 1.0]), 0.5)),
        outcome(lambda: tail_loss(torch.tensor([4.0, 4.0, 4.0, 1.0]), 0.5)),
        outcome(lambda: tail_loss(torch.tensor([2.0, 9.0, 2.0, 2.0]), 0.5)),
        outcome(lambda: tail_loss(x, 0.0)),
        outcome(lambda: tail_loss(x, -0.5)),
        outcome(lambda: tail_loss(x, 1.5)),
        outcome(lambda: tail_loss(x[:0], 0.5)),
        outcome(lambda: _loss_and_gradient(tail_loss, x, 0.3)),
        outcome(lambda: _after(tail_loss, x, 0.3)),
    ]


def test_the_worst_half_by_hand(tail_loss):
    """Of the losses 1, 5, 3, 2 the worst half is 5 and 3: their mean is 4."""
    same(tail_loss(torch.tensor([1.0, 5.0, 3.0, 2.0]), 0.5), torch.tensor(4.0), "tail_loss([1, 5, 3, 2], 0.5)")
    same(tail_loss(torch.tensor([1.0, 5.0, 3.0, 2.0]), 0.25), torch.tensor(5.0), "tail_loss([1, 5, 3, 2], 0.25)")


def test_all_of_them_is_the_plain_mean(tail_loss):
    """fraction=1 takes every loss: the plain mean."""
    for n in (11, 2, 1):
        losses = _losses(n)
        same(tail_loss(losses, 1.0), losses.mean(), f"tail_loss of {n} losses, fraction 1.0")
        same(tail_loss(losses=losses, fraction=1), losses.mean(), f"tail_loss of {n} losses, fraction=1")


def test_the_tail_is_rounded(tail_loss):
    """round(fraction * n) losses are taken: 3 of 11 for 0.3, 9 of 11 for 0.8."""
    losses = _losses(11)
    for fraction, k in ((0.3, 3), (0.35, 4), (0.8, 9), (0.4, 4), (0.6, 7), (0.95, 10), (0.96, 11), (0.14, 2)):
        got = tail_loss(losses, fraction)
        same(got, _worst(losses, k), f"tail_loss of 11 losses, fraction {fraction} (the largest {k})")
    losses = _losses(97)
    same(tail_loss(losses, 0.1), _worst(losses, 10), "tail_loss of 97 losses, fraction 0.1 (the largest 10)")


def test_a_half_is_rounded_to_even(tail_loss):
    """Python's `round` goes to the even neighbour: half of 3 is 2, half of 5 is 2, half of 7 is 4."""
    for n, k in ((3, 2), (5, 2), (7, 4), (9, 4), (11, 6), (1, 1)):
        losses = _losses(n)
        same(tail_loss(losses, 0.5), _worst(losses, k), f"tail_loss of {n} losses, fraction 0.5 (the largest {k})")
    losses = _losses(10)
    same(tail_loss(losses, 0.25), _worst(losses, 2), "tail_loss of 10 losses, fraction 0.25 (the largest 2)")
    same(tail_loss(losses, 0.75), _worst(losses, 8), "tail_loss of 10 losses, fraction 0.75 (the largest 8)")


def test_at_least_one_loss(tail_loss):
    """However small the fraction, the single largest loss is left."""
    losses = _losses(11)
    for fraction in (0.1, 0.04, 0.045, 1e-9):
        got = tail_loss(losses, fraction)
        same(got, losses.max(), f"tail_loss of 11 losses, fraction {fraction:g} (the largest one)")
    same(tail_loss(torch.tensor([-2.5]), 0.01), torch.tensor(-2.5), "tail_loss([-2.5], 0.01)")


def test_equal_losses_are_not_all_taken(tail_loss):
    """Among equal losses as many are taken as there is room for: half of 5, 3, 3, 3, 2, 1 is 5, 3, 3."""
    losses = torch.tensor([2.0, 5.0, 3.0, 3.0, 3.0, 1.0])
    same(tail_loss(losses, 0.5), torch.tensor(11 / 3), "tail_loss([2, 5, 3, 3, 3, 1], 0.5)")
    same(tail_loss(torch.tensor([4.0, 4.0, 4.0, 1.0]), 0.5), torch.tensor(4.0), "tail_loss([4, 4, 4, 1], 0.5)")
    same(tail_loss(torch.full((7,), 3.0), 0.3), torch.tensor(3.0), "tail_loss of seven losses of 3, fraction 0.3")
    losses = torch.tensor([-1.0, -5.0, -3.0, -2.0])
    same(tail_loss(losses, 0.75), torch.tensor(-2.0), "tail_loss([-1, -5, -3, -2], 0.75)")


def test_a_tail_takes_any_layout(tail_loss):
    """A slice with steps (non-contiguous), in float32 or float64: the same rule, in any order of the losses."""
    for dtype in (torch.float32, torch.float64):
        losses = _losses(22, dtype=dtype)[::2]
        for x in (losses, losses.flip(0), losses.sort().values, losses.sort(descending=True).values):
            same(tail_loss(x, 0.3), _worst(losses, 3), f"tail_loss of 11 losses in {dtype}, fraction 0.3")


def test_only_the_worst_learn(tail_loss):
    """The k largest losses get 1/k as their gradient each, the others exactly 0."""
    for n, fraction, k in ((11, 0.3, 3), (11, 1.0, 11), (5, 0.5, 2), (11, 1e-6, 1)):
        losses = _losses(n)
        got = _gradient(lambda x, f=fraction: tail_loss(x, f), losses, "tail_loss")
        want = (losses >= losses.sort().values[n - k]).double() / k
        same(got, want, f"gradient of tail_loss of {n} losses, fraction {fraction:g} (the largest {k})")
        outside = bool((got[want == 0] == 0).all())
        expect(outside, "gradient of tail_loss: expected exactly 0 outside the tail, got another number")
    losses = _losses(11)
    got = _gradient(lambda x: tail_loss(x.square(), 0.3), losses, "3 times tail_loss of squares", scale=3)
    want = 2 * losses * (losses.square() >= losses.square().sort().values[8])
    same(got, want, "gradient of 3 times tail_loss(x ** 2, 0.3)")


def test_a_fraction_lies_between_0_and_1(tail_loss):
    """A fraction of 0, below 0 or above 1 is a ValueError, and so is a tail of no losses."""
    losses = _losses(11)
    is_tensor(tail_loss(losses, 0.5), "tail_loss(losses, 0.5)")
    for fraction in (0, 0.0, -0.5, -1e-9, 1.0001, 2, -1):
        raises(ValueError, lambda f=fraction: tail_loss(losses, f), f"tail_loss with fraction {fraction}")
    raises(ValueError, lambda: tail_loss(losses[:0], 0.5), "tail_loss of no losses")
    raises(ValueError, lambda: tail_loss(losses[:0], 1), "tail_loss of no losses, fraction 1")


# group_advantages ----------------------------------------------------------------------------------------------------


def _rewards(G, n, salt=0, dtype=torch.float32):
    """Rewards that are at least 0.5 apart in each group."""
    order = torch.rand(G, n, generator=rng(salt)).argsort(1)
    return (order + torch.rand(G, n, generator=rng(salt + 1)) / 2 - n / 2).to(dtype)


def _advantages(rewards):
    """The formula, computed in float64, for groups whose rewards are not all equal."""
    x = rewards.double()
    wide = torch.promote_types(rewards.dtype, torch.float32)
    return ((x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)).to(wide)


def _equal_groups(n, dtype):
    """Groups of n equal rewards, 0.1 to 2.9: their means are often off by a rounding."""
    return (torch.arange(1, 30, dtype=dtype) / 10)[:, None].repeat(1, n)


def probe_group_advantages(group_advantages):
    """Results that tell the known mistakes apart."""
    x = _rewards(3, 5)
    return [
        outcome(lambda: group_advantages(x)),
        outcome(lambda: group_advantages(x.double())),
        outcome(lambda: group_advantages(x * 1e-6)),
        outcome(lambda: group_advantages(_rewards(5, 5) + 2)),
        outcome(lambda: group_advantages(torch.tensor([[0, 0, 0, 2], [1, 3, 1, 3]]))),
        outcome(lambda: group_advantages(x.bfloat16())),
        outcome(lambda: group_advantages(torch.tensor([[300.0, 0.0, 0.0, 600.0]]).half())),
        outcome(lambda: group_advantages(torch.ones(3, 4))),
        outcome(lambda: group_advantages(torch.zeros(2, 4))),
        outcome(lambda: [group_advantages(_equal_groups(n, torch.float32)) for n in (3, 5, 7, 11)]),
        outcome(lambda: group_advantages(torch.ones(3, 1))),
        outcome(lambda: _after(group_advantages, x)),
    ]


def test_advantages_by_hand(group_advantages):
    """Rewards 0, 0, 0, 2 have the mean 0.5 and the std 0.866: the advantages are -0.577 three times, and 1.732."""
    rewards = torch.tensor([[0.0, 0.0, 0.0, 2.0]])
    third = 3**-0.5
    want = torch.tensor([[-third, -third, -third, 3**0.5]])
    same(group_advantages(rewards), want, "advantages of the rewards 0, 0, 0, 2")


def test_the_better_answer_is_positive(group_advantages):
    """Of two answers the better one gets 1 and the worse one -1, by however little it is better."""
    rewards = torch.tensor([[0.0, 1.0], [7.0, -3.0], [2.0, 2.5]])
    same(group_advantages(rewards), torch.tensor([[-1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]]), "advantages of two answers")
    rewards = torch.tensor([[0.0, 1e-6], [3e-5, 0.0]])
    same(group_advantages(rewards), torch.tensor([[-1.0, 1.0], [1.0, -1.0]]), "advantages of rewards of 0 and 1e-6")
    got = group_advantages(torch.tensor([[100.0, 100.0005]]).double())
    same(got.float(), torch.tensor([[-1.0, 1.0]]), "advantages of rewards of 100 and 100.0005")


def test_each_group_is_judged_alone(group_advantages):
    """Mean and std are those of one group, a row: an easy question's rewards do not touch a hard one's."""
    for G, n in ((3, 5), (5, 3), (5, 5), (1, 7), (7, 2)):
        rewards = _rewards(G, n)
        rewards = rewards * torch.arange(1, G + 1)[:, None] + 2 * torch.arange(G)[:, None]
        same(group_advantages(rewards), _advantages(rewards), f"advantages of {G} groups of {n} answers")
    rewards = _rewards(3, 5).T.contiguous().T
    same(group_advantages(rewards=rewards), _advantages(rewards), "advantages of transposed rewards")


def test_the_size_of_the_rewards_cancels_out(group_advantages):
    """Rewards a million times smaller, or 10 higher, give the same advantages: there is no epsilon."""
    rewards = _rewards(3, 5)
    for scale in (1e-6, 1e-9, 1e6):
        scaled = rewards * scale
        same(group_advantages(scaled), _advantages(scaled), f"advantages of rewards times {scale:g}")
    same(group_advantages(rewards + 10), _advantages(rewards + 10), "advantages of rewards plus 10")


def test_mean_is_0_and_mean_square_is_1(group_advantages):
    """In every group the advantages have the mean 0 and the mean square 1, by the std that divides by n."""
    for n in (2, 3, 11):
        got = group_advantages(_rewards(5, n))
        same(got.mean(1), torch.zeros(5), f"mean of the advantages of {n} answers")
        same(got.square().mean(1), torch.ones(5), f"mean square of the advantages of {n} answers")


def test_a_rare_success_counts_more(group_advantages):
    """The only right one of 101 answers gets 10, the others -0.1: nothing is clipped."""
    rewards = torch.zeros(2, 101)
    rewards[0, 7], rewards[1] = 1.0, 1.0
    rewards[1, 100] = 0.0
    want = torch.full((2, 101), 0.1)
    want[0] = -0.1
    want[0, 7], want[1, 100] = 10.0, -10.0
    same(group_advantages(rewards), want, "advantages of one answer that is unlike 100 others")


def test_equal_rewards_teach_nothing(group_advantages):
    """Where all rewards of a group are equal its advantages are exactly 0, not NaN; other groups stay as they are."""
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0], [-2.0, -2.0, -2.0]])
    want = torch.zeros(4, 3)
    want[1] = torch.tensor([-1.0, -1.0, 2.0]) / 2**0.5
    got = group_advantages(rewards)
    same(got, want, "advantages of groups 1 1 1, 0 0 3, 0 0 0, -2 -2 -2")
    expect(bool((got[[0, 2, 3]] == 0).all()), f"groups of equal rewards: expected exactly 0, got {got.tolist()}")
    same(group_advantages(_randn(3, 1)), torch.zeros(3, 1), "advantages of a single answer in its group")
    rewards = torch.tensor([[2.0, -1.0, 2.0], [0.0, 3.0, 3.0]])
    want = torch.tensor([[1.0, -2.0, 1.0], [-2.0, 1.0, 1.0]]) / 2**0.5
    same(group_advantages(rewards), want, "advantages of groups 2 -1 2 and 0 3 3, of which two are equal")


def test_equal_rewards_give_exactly_0(group_advantages):
    """Three rewards of 0.1 give exactly 0, too, though their mean may not be exactly 0.1."""
    for dtype in (torch.float32, torch.float64):
        for n in (3, 5, 6, 7, 11, 13):
            rewards = _equal_groups(n, dtype)
            got = group_advantages(rewards)
            same(got, torch.zeros_like(rewards), f"advantages of {n} equal rewards in {dtype}")
            off = got != 0
            if off.any():
                row = int(off.any(1).nonzero()[0])
                came = f"{n} rewards of {rewards[row, 0].item():.1f} in {dtype} give {got[row].abs().max().item():.3g}"
                expect(False, f"expected exactly 0 for equal rewards, but {came}")


def test_whole_rewards_give_fractions(group_advantages):
    """Integers, as the counts 0 and 1 of right answers are, give float32."""
    for dtype in (torch.int64, torch.int32):
        rewards = torch.tensor([[0, 0, 0, 2], [1, 0, 1, 0], [3, 3, 3, 3]], dtype=dtype)
        third = 3**-0.5
        want = torch.tensor([[-third, -third, -third, 3**0.5], [1, -1, 1, -1], [0, 0, 0, 0]])
        same(group_advantages(rewards), want, f"advantages of rewards in {dtype}")


def test_advantages_in_at_least_float32(group_advantages):
    """Half precision is taken to float32 first, float64 stays float64; a reward of 600 does not overflow float16."""
    rewards = torch.tensor([[300.0, 0.0, 0.0, 600.0]])
    for dtype in HALVES:
        half = rewards.to(dtype)
        same(group_advantages(half), _advantages(half), f"advantages of 300, 0, 0, 600 in {dtype}")
        half = _rewards(3, 5, dtype=dtype)
        same(group_advantages(half), _advantages(half), f"advantages of random rewards in {dtype}")
    for wide in (rewards.double(), _rewards(3, 5, dtype=torch.float64)):
        same(group_advantages(wide), _advantages(wide), "advantages in float64")


# policy_gradient_loss ------------------------------------------------------------------------------------------------


def _episode(B, T, *lengths, dtype=torch.float32):
    """Log-probabilities below 0, advantages of both signs, and which tokens count."""
    log_probs = -_randn(B, T, salt=1).abs().to(dtype) - 0.1
    advantages = _randn(B, salt=2).to(dtype) + torch.arange(B) - B / 2
    return log_probs, advantages, _lengths(T, *lengths)


def _policy_loss(log_probs, advantages, is_token):
    """The formula, one token at a time, computed in float64."""
    terms = [
        -advantages[b].double() * log_probs[b, t].double()
        for b in range(log_probs.shape[0])
        for t in range(log_probs.shape[1])
        if is_token[b, t]
    ]
    return torch.stack(terms).mean().to(torch.promote_types(log_probs.dtype, torch.float32))


def _advantage_gradient(policy_gradient_loss, log_probs, advantages, is_token):
    advantages = advantages.clone().requires_grad_()
    policy_gradient_loss(log_probs.clone().requires_grad_(), advantages, is_token).backward()
    return torch.zeros_like(advantages) if advantages.grad is None else advantages.grad


def probe_policy_gradient_loss(policy_gradient_loss):
    """Results that tell the known mistakes apart."""
    log_probs, advantages, is_token = _episode(3, 5, 5, 2, 3)
    square = _episode(5, 5, 5, 2, 3, 1, 4)
    every, none = torch.ones_like(is_token), torch.zeros_like(is_token)
    padded = log_probs.masked_fill(~is_token, -math.inf)
    narrow = torch.tensor([[-1.001953125, -3.0]]).half()
    return [
        outcome(lambda: policy_gradient_loss(log_probs, advantages, every)),
        outcome(lambda: policy_gradient_loss(log_probs.double() / 3, advantages.double() / 3, every)),
        outcome(lambda: policy_gradient_loss(log_probs, advantages, is_token)),
        outcome(lambda: policy_gradient_loss(*square)),
        outcome(lambda: policy_gradient_loss(log_probs, advantages, is_token.flip(1))),
        outcome(lambda: policy_gradient_loss(padded, advantages, is_token)),
        outcome(lambda: policy_gradient_loss(log_probs, advantages, none)),
        outcome(lambda: policy_gradient_loss(padded, advantages, none)),
        outcome(lambda: _loss_and_gradient(policy_gradient_loss, log_probs, advantages, is_token)),
        outcome(lambda: _loss_and_gradient(policy_gradient_loss, log_probs, advantages, none)),
        outcome(lambda: _loss_and_gradient(policy_gradient_loss, padded, advantages, is_token)),
        outcome(lambda: _loss_and_gradient(policy_gradient_loss, padded, advantages, none)),
        outcome(lambda: _advantage_gradient(policy_gradient_loss, log_probs, advantages, is_token)),
        outcome(lambda: policy_gradient_loss(narrow, torch.tensor([0.3]), every[:1, :2])),
        outcome(lambda: policy_gradient_loss(log_probs[:1], advantages[:1], every[:1])),
        outcome(lambda: _after(lambda x: policy_gradient_loss(x, advantages, is_token), log_probs)),
    ]


def test_policy_loss_by_hand(policy_gradient_loss):
    """Log-probabilities -1 and -3 and an advantage of 2: minus the mean of -2 and -6, that is 4."""
    log_probs, both = torch.tensor([[-1.0, -3.0]]), torch.tensor([[True, True]])
    same(policy_gradient_loss(log_probs, torch.tensor([2.0]), both), torch.tensor(4.0), "the loss, advantage 2")
    same(policy_gradient_loss(log_probs, torch.tensor([-2.0]), both), torch.tensor(-4.0), "the loss, advantage -2")
    same(policy_gradient_loss(log_probs, torch.tensor([0.0]), both), torch.tensor(0.0), "the loss, advantage 0")


def test_an_answer_has_its_own_advantage(policy_gradient_loss):
    """All tokens of answer b are weighed with advantages[b], also where there are as many answers as tokens."""
    for B, T in ((3, 5), (5, 5), (2, 2), (5, 1), (1, 5)):
        log_probs, advantages, is_token = _episode(B, T, *[T] * B)
        got = policy_gradient_loss(log_probs, advantages, is_token)
        same(got, _policy_loss(log_probs, advantages, is_token), f"the loss of {B} answers of {T} tokens")


def test_padding_leaves_the_mean(policy_gradient_loss):
    """Only tokens count, and the mean is over them: what stands at padding, and how much of it, does not matter."""
    log_probs, advantages, is_token = _episode(3, 5, 3, 3, 3)
    want = _policy_loss(log_probs, advantages, is_token)
    same(policy_gradient_loss(log_probs, advantages, is_token), want, "3 answers of 3 tokens, padded to 5")
    other = log_probs.masked_fill(~is_token, -7.0)
    same(policy_gradient_loss(other, advantages, is_token), want, "the same with -7 at padding")
    wider = F.pad(log_probs, (0, 4)), advantages, F.pad(is_token, (0, 4))
    same(policy_gradient_loss(*wider), want, "the same with 4 places of padding more")
    holes = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 1, 0, 1], [0, 0, 1, 1, 1]]).bool()
    got = policy_gradient_loss(log_probs=log_probs, advantages=advantages, is_token=holes)
    same(got, _policy_loss(log_probs, advantages, holes), "padding on both sides and in between")


def test_every_token_weighs_the_same(policy_gradient_loss):
    """One mean over the tokens of all answers: a token of a long answer weighs as much as one of a short answer."""
    log_probs = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0]])
    is_token = _lengths(3, 3, 1)
    got = policy_gradient_loss(log_probs, torch.tensor([1.0, -1.0]), is_token)
    same(got, torch.tensor(0.5), "3 tokens of advantage 1 and 1 token of advantage -1, each of log-probability -1")
    for lengths in ((5, 2, 3), (1, 5, 0)):
        log_probs, advantages, is_token = _episode(3, 5, *lengths)
        want = _policy_loss(log_probs, advantages, is_token)
        same(policy_gradient_loss(log_probs, advantages, is_token), want, f"answers of {lengths} tokens")


def test_nothing_at_padding_counts(policy_gradient_loss):
    """-inf at padding, as masked tokens have, spoils neither the loss nor the gradients; nor does NaN."""
    log_probs, advantages, is_token = _episode(3, 5, 3, 3, 3)
    advantages[1] = 0.0
    want, slope = _policy_loss(log_probs, advantages, is_token), -advantages[:, None] * is_token / 9
    for stray in (-math.inf, math.inf, math.nan):
        padded = log_probs.masked_fill(~is_token, stray)
        same(policy_gradient_loss(padded, advantages, is_token), want, f"the loss with {stray} at padding")
        got = _gradient(lambda x: policy_gradient_loss(x, advantages, is_token), padded, "the loss")
        same(got, slope, f"gradient of the loss with {stray} at padding")


def test_unlikely_tokens_count_in_full(policy_gradient_loss):
    """A token of log-probability -1000 counts like any other: nothing is clamped."""
    log_probs = torch.tensor([[-1000.0, 0.0, -3.0]])
    got = policy_gradient_loss(log_probs, torch.tensor([1.5]), torch.tensor([[True, True, False]]))
    same(got, torch.tensor(750.0), "log-probabilities -1000 and 0, advantage 1.5")


def test_no_tokens_cost_nothing(policy_gradient_loss):
    """Where no token counts the loss is 0, not NaN, and can still run backward, whatever stands at padding."""
    log_probs, advantages, _ = _episode(3, 5, 3, 3, 3)
    none = torch.zeros(3, 5, dtype=torch.bool)
    for stray in (-1.0, -math.inf):
        padded = torch.full_like(log_probs, stray)
        same(policy_gradient_loss(padded, advantages, none), torch.tensor(0.0), f"no token counted, {stray} at padding")
        got = _gradient(lambda x: policy_gradient_loss(x, advantages, none), padded, "the loss where no token counts")
        same(got, torch.zeros(3, 5), f"gradient where no token counts, {stray} at padding")


def test_good_answers_become_likelier(policy_gradient_loss):
    """Each counted log-probability gets -advantage / n as its gradient, padding exactly 0."""
    log_probs, advantages, is_token = _episode(3, 5, 3, 3, 3)
    got = _gradient(lambda x: policy_gradient_loss(x, advantages, is_token), log_probs, "the loss")
    same(got, -advantages[:, None] * is_token / 9, "gradient of the log-probabilities")
    expect(bool((got[~is_token] == 0).all()), "expected a gradient of exactly 0 at padding, got another number")
    got = _gradient(lambda x: policy_gradient_loss(x, advantages, is_token), log_probs, "3 times the loss", scale=3)
    same(got, -3 * advantages[:, None] * is_token / 9, "gradient of 3 times the loss")


def test_advantages_are_constants(policy_gradient_loss):
    """No gradient flows into the advantages, even if they ask for one."""
    log_probs, advantages, is_token = _episode(3, 5, 3, 3, 3)
    advantages.requires_grad_()
    log_probs.requires_grad_()
    loss = policy_gradient_loss(log_probs, advantages, is_token)
    is_tensor(loss, "the loss")
    expect(loss.requires_grad, "the loss: expected it to run backward, but it has no graph: was it cut by detach()?")
    loss.backward()
    free = advantages.grad is None or not bool(advantages.grad.any())
    expect(free, f"gradient of the advantages: expected none, got {advantages.grad}")
    same(log_probs.grad, -advantages.detach()[:, None] * is_token / 9, "gradient of the log-probabilities")


def test_policy_loss_in_at_least_float32(policy_gradient_loss):
    """Half precision is taken to float32 first, float64 stays float64: 2,049 tokens of -1.5 have the mean -1.5."""
    for dtype in HALVES:
        log_probs, advantages, is_token = _episode(3, 5, 3, 3, 3, dtype=dtype)
        want = _policy_loss(log_probs, advantages, is_token)
        same(policy_gradient_loss(log_probs, advantages.float(), is_token), want, f"the loss in {dtype}")
        got = policy_gradient_loss(log_probs, advantages, ~is_token | True)
        want = _policy_loss(log_probs, advantages, is_token | True)
        same(got, want, f"the loss in {dtype}, advantages too")
        none = policy_gradient_loss(log_probs, advantages, is_token & False)
        same(none, torch.tensor(0.0), f"the loss in {dtype}, no token counted")
        many = torch.full((3, 683), -1.5, dtype=dtype)
        got = policy_gradient_loss(many, torch.ones(3, dtype=dtype), torch.ones(3, 683, dtype=torch.bool))
        same(got, torch.tensor(1.5), f"the loss of 2,049 tokens in {dtype}")
    log_probs, advantages, is_token = _episode(3, 5, 3, 3, 3, dtype=torch.float64)
    want = _policy_loss(log_probs, advantages, is_token)
    same(policy_gradient_loss(log_probs, advantages, is_token), want, "the loss in float64")
    same(policy_gradient_loss(log_probs, advantages, is_token & False), want * 0, "the same, no token counted")
    one = torch.ones(1, dtype=torch.float64)
    third = -torch.ones(1, 2, dtype=torch.float64) / 3  # not what it is in float32
    got = policy_gradient_loss(third, one, torch.ones(1, 2, dtype=torch.bool))
    same(got, one[0] / 3, "log-probabilities of -1/3 in float64, advantage 1")


def test_policy_loss_takes_any_layout(policy_gradient_loss):
    """Transposed or sliced (non-contiguous) log-probabilities and masks: the same rule."""
    log_probs, advantages, is_token = _episode(3, 5, 3, 3, 3)
    log_probs, is_token = log_probs.T.contiguous().T, is_token.T.contiguous().T
    want = _policy_loss(log_probs, advantages, is_token)
    same(policy_gradient_loss(log_probs, advantages, is_token), want, "transposed log-probabilities")
    got = policy_gradient_loss(log_probs[:, 1:], advantages, is_token[:, 1:])
    same(got, _policy_loss(log_probs[:, 1:], advantages, is_token[:, 1:]), "log_probs[:, 1:]")
