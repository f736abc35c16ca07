"""The checks of chapter 03: softmax, masks, attention weights, attention. Outside truth: torch, float64."""

import math

import torch
import torch.nn.functional as F

from .same import expect, gradients, outcome, raises, rng, same

# What a piece may not call, since it is torch's version of the same thing: functions, and beginnings of the names of
# torch's inner operations, which all ways lead to.
_SOFTMAX = [
    torch.softmax,
    torch.log_softmax,
    torch.logsumexp,
    torch.Tensor.softmax,
    torch.Tensor.log_softmax,
    torch.Tensor.logsumexp,
    F.softmax,
    F.log_softmax,
    F.softmin,
    F.gumbel_softmax,
    torch.special.softmax,
    torch.special.log_softmax,
    torch.special.logsumexp,
    "aten::_softmax",
    "aten::_log_softmax",
    "aten::_safe_softmax",
    "aten::logsumexp",
    "aten::logcumsumexp",
    "aten::_scaled_dot_product",
]
_ATTENTION = [F.scaled_dot_product_attention, F.multi_head_attention_forward, "aten::_scaled_dot_product"]
FORBIDDEN = {
    "softmax": _SOFTMAX,
    "attention_weights": _ATTENTION,
    "scaled_dot_product_attention": _ATTENTION,
}


# softmax -------------------------------------------------------------------------------------------------------------


def probe_softmax(softmax):
    """Results that tell the known mistakes apart."""
    x = torch.randn(3, 5, 7, generator=rng())
    far = torch.stack([x[0, 0], x[0, 0] + 300.0])
    return [
        outcome(lambda: softmax(x)),
        outcome(lambda: softmax(x, 0)),
        outcome(lambda: softmax(x, dim=1)),
        outcome(lambda: softmax(x * 1e4)),
        outcome(lambda: softmax(far)),
        outcome(lambda: softmax(x - 1e4)),
        outcome(lambda: softmax(x.half())),
        outcome(lambda: softmax(x[0].masked_fill(x[0] > 0.8, -math.inf))),
    ]


def test_two_scores_by_hand(softmax):
    """Scores 0 and ln 3 stand 1 to 3: the weights are 0.25 and 0.75."""
    same(softmax(torch.tensor([0.0, math.log(3.0)])), torch.tensor([0.25, 0.75]), "softmax([0, ln 3])")


def test_weights_are_positive_and_sum_to_one(softmax):
    """Along the last axis the weights are positive and sum to 1."""
    got = softmax(torch.randn(3, 5, 7, generator=rng()))
    same(got.sum(-1), torch.ones(3, 5), "sum of the weights over the last axis")
    expect(bool((got > 0).all()), f"expected positive weights, got {got.min().item():.4g} as the smallest")


def test_dim_names_the_axis(softmax):
    """`dim` says along which axis the weights sum to 1: the first, one in the middle, or the last."""
    x = torch.randn(2, 3, 5, 7, generator=rng(1)).double()
    for dim in (0, 1, 3, -1, -2, -3, -4):
        same(softmax(x, dim=dim), torch.softmax(x, dim), f"softmax(x, dim={dim})")
    same(softmax(x, 1), torch.softmax(x, 1), "softmax(x, 1)")


def test_large_scores_do_not_overflow(softmax):
    """Scores of 1000 are fine: only differences matter, and exp(1000) is never needed."""
    same(softmax(torch.tensor([1000.0, 1000.0])), torch.tensor([0.5, 0.5]), "softmax([1000, 1000])")
    x = torch.randn(5, 7, generator=rng(2)) * 1e4
    same(softmax(x), torch.softmax(x, -1), "softmax of scores around 10,000")


def test_very_negative_scores_do_not_vanish(softmax):
    """Scores of -1000 are fine too: not every exp may underflow to 0."""
    x = torch.randn(5, 7, generator=rng(3)) - 1e3
    same(softmax(x), torch.softmax(x, -1), "softmax of scores around -1000")
    x = torch.tensor([-2e4, -math.inf, -2e4]).double()
    same(softmax(x), torch.tensor([0.5, 0.0, 0.5]).double(), "softmax([-20000, -inf, -20000])")


def test_tiny_weights_keep_their_digits(softmax):
    """Weights of e^-60 and e^-80 are small, not wrong: no epsilon and no clamp."""
    x = torch.tensor([0.0, -60.0, -80.0]).double()
    same(softmax(x) / torch.softmax(x, -1), torch.ones(3).double(), "ratio of softmax([0, -60, -80]) to the right one")


def test_rows_do_not_touch_each_other(softmax):
    """A row with huge scores leaves the other rows as they were."""
    x = torch.randn(2, 7, generator=rng(4))
    x[1] += 300.0
    same(softmax(x), torch.softmax(x, -1), "a row of scores near 0 above a row of scores near 300")


def test_minus_infinity_gets_exactly_zero(softmax):
    """A score of -inf gets the weight 0, and the others share the rest."""
    x = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    same(softmax(x), torch.tensor([[0.5, 0.0, 0.5, 0.0]]), "softmax([0, -inf, 0, -inf])")


def test_keeps_half_precision(softmax):
    """float16 in, float16 out; bfloat16 likewise; shapes of one entry and a transposed input work."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(5, 7, generator=rng(5)).to(dtype)
        same(softmax(x), torch.softmax(x, -1), f"softmax in {dtype}")
    x = torch.randn(5, 7, generator=rng(5)).half() + 15  # exp(15) is beyond float16
    apart = (softmax(x) - torch.softmax(x, -1)).abs().max().item()
    expect(
        apart < 0.05, f"softmax in float16 of scores around 15: expected torch's weights, got {apart:.2g} more or less"
    )
    same(softmax(torch.tensor([[3.0]])), torch.ones(1, 1), "softmax of a single score")
    x = torch.randn(5, 7, generator=rng(6)).T
    same(softmax(x), torch.softmax(x, -1), "softmax of a transposed (non-contiguous) input")


def test_softmax_gradient_agrees_with_torch(softmax):
    """The gradient is that of the formula, along any axis, in float64 and float32."""
    for dtype, dim in ((torch.float64, -1), (torch.float64, 0), (torch.float32, -1)):
        x = torch.randn(5, 7, generator=rng(7)).to(dtype)
        (got,) = gradients(lambda x, dim=dim: softmax(x, dim=dim), x)
        (want,) = gradients(lambda x, dim=dim: torch.softmax(x, dim), x)
        same(got, want, f"gradient of softmax along dim={dim} in {dtype}")


# causal_mask ---------------------------------------------------------------------------------------------------------


def probe_causal_mask(causal_mask):
    """Results that tell the known mistakes apart."""
    return [
        outcome(lambda: causal_mask(4)),
        outcome(lambda: causal_mask(3, 5)),
        outcome(lambda: causal_mask(1, 5)),
        outcome(lambda: causal_mask(5, 3)),
    ]


def test_a_query_sees_itself_and_the_past(causal_mask):
    """Row t is True at the keys 0 ... t, and False after."""
    want = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    same(causal_mask(3), want, "causal_mask(3)")


def test_one_token_sees_itself(causal_mask):
    """A single token may see itself."""
    same(causal_mask(1), torch.ones(1, 1, dtype=torch.bool), "causal_mask(1)")


def test_queries_are_the_last_keys(causal_mask):
    """With T < S the queries are the last T of the S keys: the last query sees everything."""
    want = torch.tensor([[True, True, True, True, False], [True, True, True, True, True]])
    same(causal_mask(2, 5), want, "causal_mask(2, 5)")
    same(causal_mask(1, 7), torch.ones(1, 7, dtype=torch.bool), "causal_mask(1, 7)")
    same(causal_mask(7, 7), torch.ones(7, 7, dtype=torch.bool).tril(), "causal_mask(7, 7)")
    same(causal_mask(3, S=11), torch.ones(3, 11, dtype=torch.bool).tril(8), "causal_mask(3, S=11)")


def test_any_size_will_do(causal_mask):
    """The rule is the same for 67 tokens."""
    same(causal_mask(67), torch.ones(67, 67, dtype=torch.bool).tril(), "causal_mask(67)")
    same(causal_mask(2, 67), torch.ones(2, 67, dtype=torch.bool).tril(65), "causal_mask(2, 67)")


def test_more_queries_than_keys_is_an_error(causal_mask):
    """More queries than keys is a ValueError: queries cannot be the last of fewer keys."""
    expect(causal_mask(3, 5) is not None, "causal_mask(3, 5): expected a mask, got None")
    raises(ValueError, lambda: causal_mask(5, 3), "causal_mask(5, 3)")
    raises(ValueError, lambda: causal_mask(4, 3), "causal_mask(4, 3)")


def test_causal_mask_hides_the_future_in_torch(causal_mask):
    """Given to torch's own attention, it gives what torch's causal attention gives."""
    q, k, v = torch.randn(3, 2, 5, 11, generator=rng()).double()
    got = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(5))
    same(got, F.scaled_dot_product_attention(q, k, v, is_causal=True), "torch's attention with causal_mask(5)")


# padding_mask --------------------------------------------------------------------------------------------------------


def _is_token():
    return torch.arange(7) < torch.tensor([[7], [3], [5]])  # three sequences, padded on the right to 7


def probe_padding_mask(padding_mask):
    """Results that tell the known mistakes apart."""
    left = _is_token().flip(-1)
    return [outcome(lambda: padding_mask(_is_token())), outcome(lambda: padding_mask(left))]


def test_padding_mask_has_four_axes(padding_mask):
    """(B, S) becomes (B, 1, 1, S): one row for all heads and all queries."""
    got = padding_mask(_is_token())
    expect(isinstance(got, torch.Tensor), f"expected a Tensor, got {type(got).__name__}")
    expect(got.shape == (3, 1, 1, 7), f"expected shape (3, 1, 1, 7), got {tuple(got.shape)}")
    expect(got.dtype == torch.bool, f"expected dtype torch.bool, got {got.dtype}")


def test_true_means_token(padding_mask):
    """The mask is True where a query may look: at tokens, wherever the padding stands."""
    for is_token in (_is_token(), _is_token().flip(-1)):
        same(padding_mask(is_token), is_token.view(3, 1, 1, 7), "padding_mask(is_token)")


def test_any_batch_will_do(padding_mask):
    """A batch of one, a length of one, padding in the middle, a sequence of nothing but padding: the same rule."""
    for B, S in ((3, 7), (1, 7), (5, 1), (1, 1)):
        some, none = torch.rand(B, S, generator=rng(B)) < 0.5, torch.zeros(B, S, dtype=torch.bool)
        same(padding_mask(some), some[:, None, None], f"padding_mask of shape {(B, S)}")
        same(padding_mask(none), none[:, None, None], f"padding_mask of {(B, S)} entries of padding")


def test_padding_cannot_be_read(padding_mask):
    """Given to torch's own attention, what stands in the padding changes nothing."""
    q, k, v = torch.randn(3, 3, 2, 7, 11, generator=rng())
    mask = padding_mask(_is_token())
    before = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    pad = ~_is_token()[:, None, :, None]
    k, v = k.masked_fill(pad, 50.0), v.masked_fill(pad, 50.0)
    after = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    same(after, before, "torch's attention after the padded keys and values were changed")


def test_two_masks_combine(padding_mask):
    """It combines with a causal mask by `&`, giving (B, 1, T, S)."""
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    want = torch.stack([causal & row for row in _is_token()])[:, None]
    same(padding_mask(_is_token()) & causal, want, "padding_mask(is_token) & causal")


# attention_weights and scaled_dot_product_attention ------------------------------------------------------------------


def _qkv(T=5, S=7, D=11, Dv=3, batch=(2,), salt=0, dtype=torch.float32):
    shapes = [(*batch, T, D), (*batch, S, D), (*batch, S, Dv)]
    return [torch.randn(shape, generator=rng(salt + i)).to(dtype) for i, shape in enumerate(shapes)]


def _holes(T=5, S=7):
    """A mask with holes, whatever the seed, and at least one key for every query."""
    mask = torch.rand(T, S, generator=rng(9)) < 0.5
    mask[2, 4] = mask[3, 1] = mask[1, 2] = False
    mask[:, 0] |= ~mask.any(-1)
    return mask


def _weights(q, k, mask=None):
    """The weights, from torch's own attention: with the identity as values it returns them."""
    return F.scaled_dot_product_attention(q, k, torch.eye(k.shape[-2], dtype=q.dtype), attn_mask=mask)


def _blind(mask, row=1):
    mask = mask.clone()
    mask[row] = False
    return mask


def _masks():
    """Masks of every shape that broadcasts to (2, 3, 5, 7); each shows key 0."""
    full = torch.rand(2, 3, 5, 7, generator=rng(11)) < 0.6
    full[..., 0] = True
    return [full, full[:, :1], full[:1], full[0], full[0, 0], full[0, 0, :1], full[:, :1, :1], full[0, 0, 0]]


def _hidden_sequences():
    """Masks under which some queries of shape (2, 3, 5) may see nothing: one sequence, or all."""
    padding = torch.tensor([[True] * 7, [False] * 7]).view(2, 1, 1, 7)
    return [padding, padding.expand(2, 3, 5, 7), torch.zeros(5, 7, dtype=torch.bool)]


def _refuses_numbers(attend):
    attend(_holes())
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8):
        raises(TypeError, lambda dtype=dtype: attend(_holes().to(dtype)), f"a mask of {dtype}")


def _probe(attend, keys_and_values):
    """The same questions for the weights and for the whole of attention."""
    q, *kv = keys_and_values
    mask = _holes()
    big = [kv[0].clone(), *kv[1:]]
    big[0][:, ~mask.any(0) | ~mask[2]] *= 40.0
    return [
        outcome(lambda: attend(q, *kv)),
        outcome(lambda: attend(q, *kv, mask)),
        outcome(lambda: attend(q, *kv, _blind(mask))),
        outcome(lambda: attend(q, *big, mask)[:, 2]),
        outcome(lambda: attend(q[0], *(x[0] for x in kv))),
        outcome(lambda: attend(q, *kv, mask.float())),
        outcome(lambda: gradients(lambda *x: attend(*x, _blind(mask)), q, *kv)),
    ]


def probe_attention_weights(attention_weights):
    """Results that tell the known mistakes apart."""
    q, k, _ = _qkv()
    return _probe(attention_weights, (q, k))


def test_equal_scores_share_equally(attention_weights):
    """A query of zeros has no preference: each of 4 keys gets 0.25."""
    k = torch.randn(4, 2, generator=rng())
    same(attention_weights(torch.zeros(1, 2), k), torch.full((1, 4), 0.25), "weights of a query of zeros")


def test_scores_by_hand(attention_weights):
    """With D = 4 and q·k = 2 ln 3, scaling by sqrt(4) leaves ln 3: the weights are 0.75 and 0.25."""
    q = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    k = torch.tensor([[math.log(3.0), 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    same(attention_weights(q, k), torch.tensor([[0.75, 0.25]]), "weights")


def test_each_query_spends_all_its_attention(attention_weights):
    """The weights of one query sum to 1 over the keys, for T != S."""
    q, k, _ = _qkv()
    same(attention_weights(q, k).sum(-1), torch.ones(2, 5), "sum of the weights over the keys")


def test_weights_agree_with_torch(attention_weights):
    """The formula in float64: for one head, for many, and without a batch."""
    for batch in ((), (2,), (2, 3)):
        q, k, _ = _qkv(batch=batch, dtype=torch.float64)
        same(attention_weights(q, k), _weights(q, k), f"weights with leading axes {batch}")
    q, k, _ = _qkv(T=7, dtype=torch.float64)
    same(attention_weights(q, k), _weights(q, k), "weights for T = S, without a mask")


def test_hidden_keys_get_exactly_zero(attention_weights):
    """A hidden key gets weight 0 and the visible ones share the whole, however large the hidden scores are."""
    q, k, _ = _qkv(dtype=torch.float64)
    mask = _holes()
    k[:, ~mask[2]] *= 1e4
    got, want = attention_weights(q, k, mask), _weights(q, k, mask)
    same(got, want, "weights under a mask with holes")
    leaked = got[:, ~mask].abs().max().item()
    expect(leaked == 0.0, f"expected weight 0 at hidden keys, got {leaked:.3g}")
    low = attention_weights(torch.full((1, 4), -100.0), torch.full((3, 4), 500.0), torch.tensor([[True, True, False]]))
    same(low, torch.tensor([[0.5, 0.5, 0.0]]), "weights of visible scores of -100,000")


def test_mask_broadcasts(attention_weights):
    """Any mask that broadcasts to (..., T, S) works, and the input may be transposed."""
    q, k, _ = _qkv(batch=(2, 3), dtype=torch.float64)
    for mask in _masks():
        want = _weights(q, k, mask.expand(2, 3, 5, 7))
        same(attention_weights(q, k, mask), want, f"weights with a mask of shape {tuple(mask.shape)}")
    one = _masks()[0][:, :, :1]
    same(attention_weights(q[:, :, :1], k, one), _weights(q[:, :, :1], k, one), "weights of a single query")
    q, k = q.mT.contiguous().mT, k.mT.contiguous().mT
    same(attention_weights(q, k), _weights(q, k), "weights of non-contiguous q and k")


def test_a_blind_query_gets_zeros(attention_weights):
    """A query that may see nothing gets weights of 0, not NaN and not 1/S."""
    q, k, _ = _qkv(dtype=torch.float64)
    mask = _holes()
    want = _weights(q, k, mask)
    want[:, 1] = 0.0
    same(attention_weights(q, k, _blind(mask)), want, "weights where query 1 may see nothing")
    for dtype in (torch.float64, torch.bfloat16):
        q, k, _ = _qkv(batch=(2, 3), dtype=dtype)
        for mask in _hidden_sequences():
            what = f"weights in {dtype} where a mask of shape {tuple(mask.shape)} hides whole sequences"
            same(attention_weights(q, k, mask), (_weights(q, k) * mask).expand(2, 3, 5, 7), what)
    q, k, _ = _qkv(S=1)
    got = attention_weights(q, k, torch.zeros(5, 1, dtype=torch.bool))
    same(got, torch.zeros(2, 5, 1), "weights where the only key is hidden")


def test_a_blind_query_keeps_gradients_finite(attention_weights):
    """A query that may see nothing sends no gradient back, and no NaN."""
    q, k, _ = _qkv(dtype=torch.float64)
    got = gradients(lambda q, k: attention_weights(q, k, _blind(_holes())), q, k)
    rest = torch.tensor([0, 2, 3, 4])
    want = gradients(lambda q, k: _weights(q, k, _holes()).index_fill(1, torch.tensor([1]), 0.0), q, k)
    same(got[0][:, 1], torch.zeros(2, 11).double(), "gradient of the blind query")
    same(got[0][:, rest], want[0][:, rest], "gradient of the other queries")
    same(got[1], want[1], "gradient of the keys")


def test_weights_gradients_agree_with_torch(attention_weights):
    """The gradients of queries and keys are those of the formula, with and without a mask."""
    for mask, dtype in ((None, torch.float64), (_holes(), torch.float64), (_blind(_holes()), torch.float32)):
        q, k, _ = _qkv(dtype=dtype)
        got = gradients(lambda q, k, mask=mask: attention_weights(q, k, mask), q, k)
        seen = None if mask is None else mask | ~mask.any(-1, keepdim=True)
        blind = 1.0 if mask is None else mask.any(-1, keepdim=True).to(dtype)
        want = gradients(lambda q, k, seen=seen, blind=blind: _weights(q, k, seen) * blind, q, k)
        for name, g, w in zip("qk", got, want, strict=True):
            same(g, w, f"gradient of {name} {'without' if mask is None else 'with'} a mask")


def test_a_mask_of_numbers_is_an_error(attention_weights):
    """A mask that is not boolean is a TypeError: 0 and 1 could mean either sense."""
    q, k, _ = _qkv()
    _refuses_numbers(lambda mask: attention_weights(q, k, mask))


def test_weights_keep_half_precision(attention_weights):
    """float16 and bfloat16 in, the same out."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k, _ = _qkv(dtype=dtype)
        for mask in (None, _holes()):
            same(attention_weights(q, k, mask), _weights(q, k, mask), f"weights in {dtype}")


def probe_scaled_dot_product_attention(scaled_dot_product_attention):
    """Results that tell the known mistakes apart."""
    square = _qkv(T=5, S=5, D=11, Dv=11)
    return [
        *_probe(scaled_dot_product_attention, _qkv()),
        outcome(lambda: scaled_dot_product_attention(*square)),
        outcome(lambda: scaled_dot_product_attention(*_qkv(batch=(2, 3)))),
    ]


def test_one_key_is_copied(scaled_dot_product_attention):
    """With a single key there is nothing to choose: the output is its value."""
    q, k, v = _qkv(S=1)
    same(scaled_dot_product_attention(q, k, v), v.expand(2, 5, 3), "attention over one key")


def test_a_blank_query_takes_the_mean(scaled_dot_product_attention):
    """A query of zeros has no preference: its output is the mean of the values."""
    q, k, v = _qkv()
    want = v.mean(-2, keepdim=True).expand(2, 5, 3)
    same(scaled_dot_product_attention(torch.zeros_like(q), k, v), want, "attention of a query of zeros")


def test_attention_agrees_with_torch(scaled_dot_product_attention):
    """The formula in float64, for T != S and D != Dv, with and without leading axes."""
    for batch in ((), (2,), (2, 3)):
        q, k, v = _qkv(batch=batch, dtype=torch.float64)
        want = F.scaled_dot_product_attention(q, k, v)
        same(scaled_dot_product_attention(q, k, v), want, f"attention with leading axes {batch}")
    q, k, v = _qkv(T=7, Dv=11, dtype=torch.float64)
    want = F.scaled_dot_product_attention(q, k, v)
    same(scaled_dot_product_attention(q, k, v), want, "attention for T = S and D = Dv, without a mask")


def test_every_width_is_scaled_by_its_own_root(scaled_dot_product_attention):
    """The scale is the square root of the width of the keys, whatever T, S and Dv are."""
    for D in (1, 2, 64):
        q, k, v = _qkv(T=3, S=5, D=D, Dv=13, salt=D, dtype=torch.float64)
        same(scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v), f"attention with D={D}")


def test_attention_under_a_mask_agrees_with_torch(scaled_dot_product_attention):
    """True means "may look": under any mask that broadcasts, the formula in float64."""
    q, k, v = _qkv(batch=(2, 3), dtype=torch.float64)
    for mask in _masks():
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(2, 3, 5, 7))
        same(scaled_dot_product_attention(q, k, v, mask), want, f"attention under a mask of shape {tuple(mask.shape)}")
    q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=_holes())
    same(scaled_dot_product_attention(q, k, v, _holes()), want, "attention of non-contiguous inputs")


def test_scores_of_any_size(scaled_dot_product_attention):
    """Scores of 10,000 and of -100,000 are fine, with and without a mask."""
    q, k, v = _qkv()
    for mask in (None, _holes()):
        want = F.scaled_dot_product_attention(q * 100, k * 100, v, attn_mask=mask)
        same(scaled_dot_product_attention(q * 100, k * 100, v, mask), want, "attention of scores around 10,000")
    q, k, v = torch.full((1, 4), -100.0), torch.full((3, 4), 500.0), torch.tensor([[1.0], [2.0], [100.0]])
    got = scaled_dot_product_attention(q, k, v, torch.tensor([[True, True, False]]))
    same(got, torch.tensor([[1.5]]), "attention of visible scores of -100,000 to the values 1 and 2")


def test_the_future_cannot_change_the_past(scaled_dot_product_attention):
    """Keys and values that the mask hides have no effect at all, however large."""
    q, k, v = _qkv(T=5, S=5)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    before = scaled_dot_product_attention(q, k, v, mask)[:, :3]
    k, v = k.clone(), v.clone()
    k[:, 3:], v[:, 3:] = 1e4, 1e4
    after = scaled_dot_product_attention(q, k, v, mask)[:, :3]
    same(after, before, "rows 0-2 after keys and values 3-4 were changed")


def test_a_blind_query_outputs_zeros(scaled_dot_product_attention):
    """A query that may see nothing outputs zeros, and all gradients stay finite."""
    q, k, v = _qkv(dtype=torch.float64)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=_holes())
    want[:, 1] = 0.0
    same(scaled_dot_product_attention(q, k, v, _blind(_holes())), want, "attention where query 1 may see nothing")
    got = gradients(lambda *x: scaled_dot_product_attention(*x, _blind(_holes())), q, k, v)
    for name, grad in zip("qkv", got, strict=True):
        expect(bool(grad.isfinite().all()), f"expected a finite gradient of {name}, got NaN or inf")
    q, k, v = _qkv(batch=(2, 3), dtype=torch.float64)
    for mask in _hidden_sequences():
        what = f"attention where a mask of shape {tuple(mask.shape)} hides whole sequences"
        want = F.scaled_dot_product_attention(q, k, v) * mask.any(-1, keepdim=True)
        same(scaled_dot_product_attention(q, k, v, mask), want, what)
    q, k, v = _qkv(S=1)
    got = scaled_dot_product_attention(q, k, v, torch.zeros(5, 1, dtype=torch.bool))
    same(got, torch.zeros(2, 5, 3), "attention where the only key is hidden")


def test_gradients_agree_with_torch(scaled_dot_product_attention):
    """The gradients of q, k and v, in float64."""
    for mask, inputs in (
        (None, _qkv(dtype=torch.float64)),
        (_holes(), _qkv(dtype=torch.float64)),
        (None, _qkv(Dv=11)),
        (_holes(), _qkv(Dv=11)),
    ):
        got = gradients(lambda *x, mask=mask: scaled_dot_product_attention(*x, mask), *inputs)
        want = gradients(lambda *x, mask=mask: F.scaled_dot_product_attention(*x, attn_mask=mask), *inputs)
        for name, g, w in zip("qkv", got, want, strict=True):
            same(g, w, f"gradient of {name} {'without' if mask is None else 'with'} a mask")


def test_attention_takes_no_mask_of_numbers(scaled_dot_product_attention):
    """A mask that is not boolean is a TypeError: 0 and 1 could mean either sense."""
    _refuses_numbers(lambda mask: scaled_dot_product_attention(*_qkv(), mask))


def test_attention_keeps_half_precision(scaled_dot_product_attention):
    """float16 and bfloat16 in, the same out."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = _qkv(dtype=dtype)
        for mask in (None, _holes()):
            want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            same(scaled_dot_product_attention(q, k, v, mask), want, f"attention in {dtype}")
