"""Other correct implementations of softmax, masks and attention."""

import math

import torch

from . import correct


@correct("softmax")
def softmax_by_log_sum(x, dim=-1):
    """Through the logarithm of the sum, in place on its own memory."""
    top = x.max(dim, keepdim=True).values
    log_sum = (x - top).exp_().sum(dim, keepdim=True).log_() + top
    return (x - log_sum).exp_()


@correct("softmax")
def softmax_row_by_row(x, dim=-1):
    """A Python loop over rows, in float64."""
    rows = x.movedim(dim, -1)
    flat = rows.reshape(-1, rows.shape[-1]).double()
    done = torch.stack([(row - row.max()).exp() / (row - row.max()).exp().sum() for row in flat])
    return done.view(rows.shape).movedim(-1, dim).to(x.dtype)


@correct("softmax")
def softmax_in_base_two(x, dim=-1):
    """With 2 to the power of x log2(e), and a detached maximum."""
    y = x * math.log2(math.e)
    power = torch.pow(2.0, y - y.detach().amax(dim, keepdim=True))
    return power.div(power.sum(dim, keepdim=True))


@correct("causal_mask")
def causal_by_comparison(T, S=None):
    """Key position <= query position."""
    S = T if S is None else S
    if T > S:
        raise ValueError(f"{T} queries, {S} keys")
    return torch.arange(S) <= torch.arange(S - T, S)[:, None]


@correct("causal_mask")
def causal_row_by_row(T, S=None):
    """A list of rows."""
    S = T if S is None else S
    if S < T:
        raise ValueError("fewer keys than queries")
    return torch.tensor([[s <= t + S - T for s in range(S)] for t in range(T)])


@correct("causal_mask")
def causal_by_hiding(T, S=None):
    """The complement of the future."""
    if S is not None and S < T:
        raise ValueError("fewer keys than queries")
    return torch.triu(torch.ones(T, S or T), (S or T) - T + 1) == 0


@correct("padding_mask")
def padding_by_view(is_token):
    """A view with axes of one."""
    B, S = is_token.shape
    return is_token.reshape(B, 1, 1, S)


@correct("padding_mask")
def padding_by_unsqueeze(is_token):
    """New memory, not a view."""
    return is_token.clone().unsqueeze(1).unsqueeze(2)


@correct("attention_weights")
def weights_by_smallest_number(q, k, mask=None):
    """Hidden scores get the smallest finite number; the product with the mask then clears blind rows."""
    scores = torch.einsum("...td,...sd->...ts", q, k) * k.shape[-1] ** -0.5
    if mask is None:
        return torch.softmax(scores, dim=-1)
    if mask.dtype is not torch.bool:
        raise TypeError("a boolean mask, please")
    return torch.softmax(torch.where(mask, scores, torch.finfo(scores.dtype).min), dim=-1) * mask


@correct("attention_weights")
def weights_one_query_at_a_time(q, k, mask=None):
    """A Python loop over queries; each looks at its visible keys only."""
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError("mask must be bool")
    lead, T, S = q.shape[:-2], q.shape[-2], k.shape[-2]
    mask = torch.ones(T, S, dtype=torch.bool) if mask is None else mask
    mask = mask.expand(*lead, T, S).reshape(-1, T, S)
    rows = []
    for qs, ks, ms in zip(q.reshape(-1, T, q.shape[-1]), k.reshape(-1, S, k.shape[-1]), mask, strict=True):
        for t in range(T):
            seen = ms[t].nonzero()[:, 0]
            row = torch.zeros(S, dtype=q.dtype)
            if len(seen):
                row = row.index_put((seen,), torch.softmax(ks[seen] @ qs[t] / math.sqrt(q.shape[-1]), 0))
            rows.append(row)
    return torch.stack(rows).view(*lead, T, S)


@correct("attention_weights")
def weights_with_nan_replaced(q, k, mask=None):
    """NaN on blind rows is replaced afterwards; masked_fill keeps it out of the gradient."""
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}")
    scores = torch.matmul(q, torch.swapaxes(k, -1, -2)) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(torch.logical_not(mask), float("-inf"))
    return scores.softmax(dim=-1).nan_to_num(nan=0.0)


@correct("attention_weights")
def weights_from_exponentials(q, k, mask=None):
    """No softmax: exponentials, a masked sum, a safe division. The scale is split between q and k."""
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError("mask must be bool")
    root = q.shape[-1] ** 0.25
    scores = (q / root) @ (k / root).transpose(-2, -1)
    hidden = torch.zeros_like(scores, dtype=torch.bool) if mask is None else ~mask.expand(scores.shape)
    top = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).amax(-1, keepdim=True).detach()
    e = (scores - top).masked_fill(hidden, -math.inf).exp()
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


@correct("scaled_dot_product_attention")
def attention_by_smallest_number(q, k, v, mask=None):
    """One expression, by einsum."""
    return torch.einsum("...ts,...sd->...td", weights_by_smallest_number(q, k, mask), v)


@correct("scaled_dot_product_attention")
def attention_one_query_at_a_time(q, k, v, mask=None):
    """A Python loop: slow, odd, right."""
    return weights_one_query_at_a_time(q, k, mask) @ v


@correct("scaled_dot_product_attention")
def attention_divided_at_the_end(q, k, v, mask=None):
    """The values are mixed by exponentials first, and divided by their sum afterwards, as flash attention does."""
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError("mask must be bool")
    scores = q.matmul(k.transpose(-1, -2)).div(q.size(-1) ** 0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    e = torch.exp(scores - scores.max(-1, keepdim=True).values)
    if mask is not None:
        e = e * mask
    return e @ v / e.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
