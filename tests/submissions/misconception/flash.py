"""A learner who rescales the sum, but not the mixed values, when the maximum moves. The rest is right."""

import math

import torch


def online_softmax(chunks):
    m, total = None, None
    for chunk in chunks:
        if m is None:
            m = chunk.amax(-1)
            total = torch.zeros_like(m)
        new = torch.maximum(m, chunk.amax(-1))
        safe = torch.where(new == -math.inf, 0.0, new)
        total = total * torch.exp(m - safe) + torch.exp(chunk - safe.unsqueeze(-1)).sum(-1)
        m = new
    if m is None:
        raise ValueError("no chunks")
    return m, total


def flash_attention(q, k, v, causal=False, block_q=64, block_k=64):
    B, H, T, D = q.shape
    S, Dv = v.shape[2:]
    n = H // k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(B, H, T, Dv, dtype=q.dtype)
    lse = torch.zeros(B, H, T, dtype=dtype)
    for i in range(0, T, block_q):
        qi = q[:, :, i : i + block_q].to(dtype) / math.sqrt(D)
        rows = torch.arange(i, i + qi.shape[2])[:, None] + S - T
        m = torch.full((B, H, qi.shape[2], 1), -math.inf, dtype=dtype)
        total = torch.zeros_like(m)
        mix = torch.zeros(B, H, qi.shape[2], Dv, dtype=dtype)
        for j in range(0, S, block_k):
            if causal and j > int(rows[-1]):
                break
            kj = k[:, :, j : j + block_k].to(dtype).repeat_interleave(n, 1)
            vj = v[:, :, j : j + block_k].to(dtype).repeat_interleave(n, 1)
            s = qi @ kj.transpose(-1, -2)
            if causal:
                s = s.masked_fill(torch.arange(j, j + s.shape[-1]) > rows, -math.inf)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            safe = torch.where(new == -math.inf, 0.0, new)
            p = torch.exp(s - safe)
            total = total * torch.exp(m - safe) + p.sum(-1, keepdim=True)
            mix = mix + p @ vj
            m = new
        out[:, :, i : i + block_q] = (mix / torch.where(total == 0, 1.0, total)).to(q.dtype)
        lse[:, :, i : i + block_q] = (m + total.log())[..., 0]
    return out, lse


def flash_attention_backward(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    H, T, D = q.shape[1:]
    K, S = k.shape[1:3]
    n = H // K
    dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    lse = torch.where(logsumexp == -math.inf, 0.0, logsumexp)[..., None]
    for i in range(0, T, block_q):
        qi, gi = (x[:, :, i : i + block_q].to(dtype) for x in (q, grad_out))
        rows = torch.arange(i, i + qi.shape[2])[:, None] + S - T
        for j in range(0, S, block_k):
            if causal and j > int(rows[-1]):
                break
            kj = k[:, :, j : j + block_k].to(dtype).repeat_interleave(n, 1)
            vj = v[:, :, j : j + block_k].to(dtype).repeat_interleave(n, 1)
            s = qi @ kj.mT / math.sqrt(D)
            if causal:
                s = s.masked_fill(torch.arange(j, j + s.shape[-1]) > rows, -math.inf)
            p = torch.exp(s - lse[:, :, i : i + block_q])
            ds = p * (gi @ vj.mT - delta[:, :, i : i + block_q]) / math.sqrt(D)
            dq[:, :, i : i + block_q] += ds @ kj
            dk[:, :, j : j + block_k] += (ds.mT @ qi).unflatten(1, (K, n)).sum(2)
            dv[:, :, j : j + block_k] += (p.mT @ gi).unflatten(1, (K, n)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
