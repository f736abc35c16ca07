"""A learner whose code is right, in another style, and noisy."""

import sys
import warnings

import torch


class Running:
    """A maximum, a sum, and whatever is mixed, one row each."""

    def __init__(self, rows, width, dtype):
        self.top = torch.full((*rows, 1), float("-inf"), dtype=dtype)
        self.sum = torch.zeros((*rows, 1), dtype=dtype)
        self.mix = torch.zeros((*rows, width), dtype=dtype)

    def take(self, scores, values=None):
        top = torch.maximum(self.top, scores.max(dim=-1, keepdim=True).values)
        zero = torch.where(top.isinf(), torch.zeros_like(top), top)
        shrink, weights = (self.top - zero).exp(), (scores - zero).exp()
        self.sum = self.sum * shrink + weights.sum(dim=-1, keepdim=True)
        if values is not None:
            self.mix = self.mix * shrink + torch.matmul(weights, values)
        self.top = top


def pieces_of(length, size):
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def hidden(rows, columns, shift):
    row = torch.arange(rows.start, rows.stop).unsqueeze(1)
    return torch.arange(columns.start, columns.stop).unsqueeze(0) > row + shift


def online_softmax(chunks):
    print("one chunk at a time", file=sys.stderr)
    state = None
    for chunk in chunks:
        if state is None:
            state = Running(chunk.shape[:-1], 1, chunk.dtype)
        state.take(chunk)
    if state is None:
        raise ValueError("there is no chunk")
    return state.top.squeeze(-1), state.sum.squeeze(-1)


def flash_attention(q, k, v, causal=False, block_q=64, block_k=64):
    warnings.warn("slow, but small", UserWarning, stacklevel=2)
    B, H, T, D = q.size()
    S, shift, group = k.size(2), k.size(2) - T, H // k.size(1)
    dtype = torch.double if q.dtype == torch.double else torch.float
    out, lse = torch.empty(B, H, T, v.size(3), dtype=q.dtype), torch.empty(B, H, T, dtype=dtype)
    for h in range(H):
        for rows in pieces_of(T, block_q):
            state = Running((B, rows.stop - rows.start), v.size(3), dtype)
            for columns in pieces_of(S, block_k):
                if causal and columns.start >= rows.stop + shift:
                    continue
                scores = torch.bmm(q[:, h, rows].to(dtype), k[:, h // group, columns].to(dtype).transpose(1, 2))
                scores = scores * D**-0.5
                if causal:
                    scores[:, hidden(rows, columns, shift)] = float("-inf")
                state.take(scores, v[:, h // group, columns].to(dtype))
            out[:, h, rows] = torch.where(state.sum > 0, state.mix / state.sum, torch.zeros_like(state.mix)).to(q.dtype)
            lse[:, h, rows] = (state.top + state.sum.log()).squeeze(-1)
    return out, lse


def flash_attention_backward(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    print("backwards", file=sys.stderr)
    H, T, D = q.size()[1:]
    S, shift, group = k.size(2), k.size(2) - T, H // k.size(1)
    dtype = torch.double if q.dtype == torch.double else torch.float
    dq, dk, dv = (torch.zeros(x.size(), dtype=dtype) for x in (q, k, v))
    for h in range(H):
        for columns in pieces_of(S, block_k):
            key, value = k[:, h // group, columns].to(dtype), v[:, h // group, columns].to(dtype)
            for rows in pieces_of(T, block_q):
                if causal and columns.start >= rows.stop + shift:
                    continue
                query, g = q[:, h, rows].to(dtype), grad_out[:, h, rows].to(dtype)
                p = (torch.bmm(query, key.transpose(1, 2)) * D**-0.5 - logsumexp[:, h, rows].unsqueeze(2)).exp()
                if causal:
                    p = p.masked_fill(hidden(rows, columns, shift), 0.0)
                delta = (g * out[:, h, rows].to(dtype)).sum(dim=2, keepdim=True)
                ds = p * (torch.bmm(g, value.transpose(1, 2)) - delta) * D**-0.5
                dq[:, h, rows] += torch.bmm(ds, key)
                dk[:, h // group, columns] += torch.bmm(ds.transpose(1, 2), query)
                dv[:, h // group, columns] += torch.bmm(p.transpose(1, 2), g)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
