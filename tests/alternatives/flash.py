"""Other correct implementations of online softmax and of attention in tiles, forward and backward."""

import functools
import math

import torch

from . import correct

# online_softmax ------------------------------------------------------------------------------------------------------


@correct("online_softmax")
def summed_by_logaddexp(chunks):
    """The running quantity is the logarithm of the sum, which needs no rescaling by hand."""
    maximum = log_sum = None
    for chunk in chunks:
        for x in chunk.unbind(-1):
            maximum = x.clone() if maximum is None else torch.maximum(maximum, x)
            log_sum = x.clone() if log_sum is None else torch.logaddexp(log_sum, x)
    if maximum is None:
        raise ValueError("nothing to sum")
    return maximum, torch.where(maximum == -math.inf, 0.0, (log_sum - maximum).exp())


@correct("online_softmax")
def merged_statistics(chunks):
    """Each chunk has a maximum and a total; two such pairs merge into one, so functools.reduce does the rest."""

    def of_one(chunk):
        top = chunk.max(dim=-1).values
        return top, (chunk - top.unsqueeze(-1)).exp().nan_to_num(nan=0.0).sum(dim=-1)

    def merged(a, b):
        top = torch.where(a[0] > b[0], a[0], b[0])
        parts = [torch.where(m == -math.inf, 0.0, total * (m - top).exp()) for m, total in (a, b)]
        return top, parts[0] + parts[1]

    pairs = map(of_one, chunks)
    try:
        return functools.reduce(merged, pairs)
    except TypeError as error:
        raise ValueError("no chunks") from error


@correct("online_softmax")
def first_chunk_apart(chunks):
    """The first chunk starts the sums; the finite stand-in for a maximum of -inf keeps NaN away."""
    stream = iter(chunks)
    try:
        chunk = next(stream)
    except StopIteration:
        raise ValueError("empty") from None
    maximum = chunk.amax(dim=-1, keepdim=True)
    total = torch.exp(chunk - maximum.clamp(min=torch.finfo(chunk.dtype).min)).sum(dim=-1, keepdim=True)
    for chunk in stream:
        new = torch.maximum(maximum, chunk.amax(dim=-1, keepdim=True))
        safe = new.clamp(min=torch.finfo(chunk.dtype).min)
        total *= torch.exp(maximum - safe)
        total += torch.exp(chunk - safe).sum(dim=-1, keepdim=True)
        maximum = new
    return maximum.squeeze(-1), total.squeeze(-1)


@correct("online_softmax")
def statistics_kept_to_the_end(chunks):
    """Two numbers a chunk are kept, and combined at the end."""
    tops, sums = [], []
    for chunk in chunks:
        top = chunk.amax(-1)
        tops.append(top)
        sums.append(torch.exp(chunk - top.masked_fill(top.isneginf(), 0).unsqueeze(-1)).sum(-1))
    if not tops:
        raise ValueError("no chunk came")
    tops, sums = torch.stack(tops), torch.stack(sums)
    maximum = tops.amax(0)
    return maximum, (sums * (tops - maximum.masked_fill(maximum.isneginf(), 0)).exp()).sum(0)


# flash_attention -----------------------------------------------------------------------------------------------------


@correct("flash_attention")
def head_by_head(q, k, v, causal=False, block_q=64, block_k=64):
    """Matrices only: a loop over sequences, heads, query tiles and key tiles, as a kernel's programs run."""
    B, H, T, D = q.shape
    K, S = k.shape[1:3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(B, H, T, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.zeros(B, H, T, dtype=dtype, device=q.device)
    for b in range(B):
        for h in range(H):
            keys, values = k[b, h // (H // K)], v[b, h // (H // K)]
            for i in range(0, T, block_q):
                Q = q[b, h, i : i + block_q].to(dtype)
                m = torch.full((len(Q), 1), -math.inf, dtype=dtype)
                total = torch.zeros(len(Q), 1, dtype=dtype)
                acc = torch.zeros(len(Q), v.shape[-1], dtype=dtype)
                for j in range(0, S, block_k):
                    if causal and j > i + len(Q) - 1 + S - T:
                        break
                    s = Q @ keys[j : j + block_k].to(dtype).T * D**-0.5
                    if causal:
                        rows = torch.arange(i, i + len(Q)).unsqueeze(1) + S - T
                        s[torch.arange(j, j + s.shape[1]) > rows] = -math.inf
                    new = torch.maximum(m, s.max(dim=1, keepdim=True).values)
                    p = torch.where(s == -math.inf, 0.0, torch.exp(s - new))
                    alpha = torch.where(m == -math.inf, 0.0, torch.exp(m - new))
                    total = alpha * total + p.sum(1, keepdim=True)
                    acc = alpha * acc + p @ values[j : j + block_k].to(dtype)
                    m = new
                seen = total > 0
                out[b, h, i : i + block_q] = torch.where(seen, acc / total, 0.0).to(q.dtype)
                lse[b, h, i : i + block_q] = torch.where(seen, m + total.log(), -math.inf)[:, 0]
    return out, lse


@correct("flash_attention")
def keys_in_the_outer_loop(q, k, v, causal=False, block_q=64, block_k=64):
    """The order of the first FlashAttention: each key tile meets all query tiles, whose state waits in memory."""
    (B, H, T, D), (S, Dv) = q.shape, v.shape[2:]
    real = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    v = v.repeat_interleave(H // v.shape[1], dim=1)
    state = torch.zeros(B, H, T, Dv, dtype=real)
    total, highest = torch.zeros(B, H, T, 1, dtype=real), torch.full((B, H, T, 1), -torch.inf, dtype=real)
    for j in range(0, S, block_k):
        kj, vj = k[:, :, j : j + block_k].to(real), v[:, :, j : j + block_k].to(real)
        for i in range(0, T, block_q):
            stop = min(i + block_q, T)
            if causal and stop - 1 + (S - T) < j:
                continue
            s = torch.einsum("bhid,bhjd->bhij", q[:, :, i:stop].to(real), kj) / math.sqrt(D)
            if causal:
                allowed = torch.ones(stop - i, kj.shape[2], dtype=torch.bool).tril(i + (S - T) - j)
                s = s.where(allowed, torch.tensor(-torch.inf, dtype=real))
            old = highest[:, :, i:stop]
            new = torch.maximum(old, s.amax(-1, keepdim=True))
            base = torch.where(new.isinf(), torch.zeros_like(new), new)
            p, alpha = torch.exp(s - base), torch.exp(old - base)
            state[:, :, i:stop] = state[:, :, i:stop] * alpha + torch.einsum("bhij,bhjd->bhid", p, vj)
            total[:, :, i:stop] = total[:, :, i:stop] * alpha + p.sum(-1, keepdim=True)
            highest[:, :, i:stop] = new
    out = torch.where(total > 0, state / total.clamp(min=1e-30), 0.0)
    return out.to(q.dtype), (highest + total.log()).squeeze(-1)


@correct("flash_attention")
def two_passes(q, k, v, causal=False, block_q=64, block_k=64):
    """First the logsumexp, tile by tile; then the scores are made again, and nothing has to be rescaled."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    wide = torch.promote_types(torch.float32, q.dtype)
    group = torch.arange(H) // (H // K)
    outs, sums = [], []
    for rows in torch.arange(T).split(block_q):
        q_tile = q[:, :, rows].to(wide)
        last = S if not causal else max(0, S - T + int(rows[-1]) + 1)

        def tiles(q_tile=q_tile, rows=rows, last=last):
            for keys in torch.arange(last).split(block_k) if last else ():
                s = q_tile @ k[:, group][:, :, keys].to(wide).transpose(2, 3) / D**0.5
                if causal:
                    s = s.masked_fill(keys > rows[:, None] + S - T, -math.inf)
                yield s, keys

        lse = q.new_full((B, H, len(rows)), -math.inf, dtype=wide)
        for s, _ in tiles():
            for column in s.unbind(-1):
                lse = torch.logaddexp(lse, column)
        out = q.new_zeros((B, H, len(rows), v.shape[-1]), dtype=wide)
        for s, keys in tiles():
            out += (s - lse.clamp(min=-1e30)[..., None]).exp() @ v[:, group][:, :, keys].to(wide)
        outs.append(out.to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


@correct("flash_attention")
def merged_partial_results(q, k, v, causal=False, block_q=64, block_k=64):
    """Every key tile gives a finished result with its logsumexp; results are merged by their logsumexps."""
    (B, H, T, D), (K, S, Dv) = q.shape, v.shape[1:]
    wide = torch.promote_types(torch.float32, q.dtype)
    log2e = 1 / math.log(2)
    out, lse = torch.zeros(B, H, T, Dv, dtype=q.dtype), torch.empty(B, H, T, dtype=wide)
    for start in range(0, T, block_q):
        Q = q[:, :, start : start + block_q].to(wide).unflatten(1, (K, H // K)) * (log2e / D**0.5)  # (B, K, G, n, D)
        n = Q.shape[3]
        mix, log = Q.new_zeros(B, K, H // K, n, Dv), Q.new_full((B, K, H // K, n, 1), -math.inf)
        position = torch.arange(start, start + n) + (S - T)
        for begin in range(0, S, block_k):
            where = torch.arange(begin, min(begin + block_k, S))
            if causal and where[0] > position[-1]:
                continue
            s = torch.einsum("bkgnd,bksd->bkgns", Q, k[:, :, where].to(wide))  # in units of ln 2
            if causal:
                s.masked_fill_(position[:, None] < where, -math.inf)
            top = s.amax(-1, keepdim=True).clamp(min=-1e30)
            p = torch.exp2(s - top)
            total = p.sum(-1, keepdim=True)
            part = torch.einsum("bkgns,bksd->bkgnd", p, v[:, :, where].to(wide)) / total.clamp(min=1e-30)
            part_log = (top + total.log2()).masked_fill(total == 0, -math.inf)
            both = torch.logaddexp2(log, part_log)
            safe = both.clamp(min=-1e30)
            mix = mix * torch.exp2(log - safe) + part * torch.exp2(part_log - safe)
            log = both
        out[:, :, start : start + n] = mix.flatten(1, 2).to(q.dtype)
        lse[:, :, start : start + n] = (log / log2e).squeeze(-1).flatten(1, 2)
    return out, lse


@correct("flash_attention")
def strips_of_queries(q, k, v, causal=False, block_q=64, block_k=64):
    """Per query tile, the score tiles of its strip are kept in a list: memory still grows with S only."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    k, v = (torch.repeat_interleave(x, H // K, 1).to(wide) for x in (k, v))
    out, lse = torch.zeros(B, H, T, v.shape[3]).to(wide), torch.full((B, H, T), -math.inf).to(wide)
    for i in range(0, T, block_q):
        rows = torch.arange(i, min(i + block_q, T))
        seen = (rows + 1 + S - T).clamp(min=0) if causal else torch.full_like(rows, S)
        tiles = []
        for j in range(0, int(seen[-1]), block_k):
            columns = torch.arange(j, min(j + block_k, S))
            tile = (q[:, :, rows].to(wide) / math.sqrt(D)) @ k[:, :, columns].mT
            tiles.append(tile.masked_fill(columns >= seen[:, None], -math.inf))
        if tiles:
            top = functools.reduce(torch.maximum, [tile.amax(-1, keepdim=True) for tile in tiles])
            weights = [(tile - top).nan_to_num(nan=-math.inf, neginf=-math.inf).exp() for tile in tiles]
            total = sum(w.sum(-1, keepdim=True) for w in weights)
            mixed = sum(w @ v[:, :, j * block_k : (j + 1) * block_k] for j, w in enumerate(weights))
            out[:, :, rows] = (mixed / total).nan_to_num(0.0)
            lse[:, :, rows] = (top + total.log())[..., 0]
    return out.to(q.dtype), lse


# flash_attention_backward --------------------------------------------------------------------------------------------


@correct("flash_attention_backward")
def keys_first(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    """The published order: an outer loop over key tiles, whose dk and dv stay at hand; delta is made beforehand."""
    (H, T, D), (K, S) = q.shape[1:], k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    G = H // K
    scale = D**-0.5
    delta = (grad_out.to(wide) * out.to(wide)).sum(-1)  # (B, H, T)
    lse = torch.where(logsumexp == -math.inf, 0.0, logsumexp)
    dq = torch.zeros(q.shape, dtype=wide)
    dk_tiles, dv_tiles = [], []
    for j in range(0, S, block_k):
        kj = k[:, :, j : j + block_k].to(wide)
        vj = v[:, :, j : j + block_k].to(wide)
        dk, dv = torch.zeros_like(kj), torch.zeros_like(vj)
        for i in range(0, T, block_q):
            rows = slice(i, min(i + block_q, T))
            if causal and rows.stop - 1 + S - T < j:
                continue
            Q, g = (x[:, :, rows].to(wide).unflatten(1, (K, G)) for x in (q, grad_out))  # (B, K, G, n, D)
            s = torch.einsum("bkgnd,bksd->bkgns", Q, kj) * scale
            if causal:
                where = torch.arange(j, j + kj.shape[2])
                s = s.masked_fill(where > torch.arange(i, rows.stop)[:, None] + S - T, -math.inf)
            p = torch.exp(s - lse[:, :, rows].unflatten(1, (K, G)).unsqueeze(-1))
            dv += torch.einsum("bkgns,bkgnd->bksd", p, g)
            dp = torch.einsum("bkgnd,bksd->bkgns", g, vj)
            ds = p * (dp - delta[:, :, rows].unflatten(1, (K, G)).unsqueeze(-1)) * scale
            dk += torch.einsum("bkgns,bkgnd->bksd", ds, Q)
            dq[:, :, rows] += torch.einsum("bkgns,bksd->bkgnd", ds, kj).flatten(1, 2)
        dk_tiles.append(dk.to(k.dtype))
        dv_tiles.append(dv.to(v.dtype))
    return dq.to(q.dtype), torch.cat(dk_tiles, 2), torch.cat(dv_tiles, 2)


@correct("flash_attention_backward")
def gradients_head_by_head(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    """Matrices only, one head at a time; a key head's gradients are added up as its query heads come by."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[2]
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    for b in range(B):
        for h in range(H):
            kh = h * K // H
            for i in range(0, T, block_q):
                Q, g = q[b, h, i : i + block_q].to(wide), grad_out[b, h, i : i + block_q].to(wide)
                L = logsumexp[b, h, i : i + block_q, None]
                delta = torch.linalg.vecdot(g, out[b, h, i : i + block_q].to(wide))[:, None]
                for j in range(0, S, block_k):
                    if causal and j > min(i + block_q, T) - 1 + S - T:
                        break
                    keys, values = k[b, kh, j : j + block_k].to(wide), v[b, kh, j : j + block_k].to(wide)
                    P = torch.exp(Q @ keys.T / math.sqrt(D) - L)
                    if causal:
                        P[torch.ones(P.shape, dtype=torch.bool).triu(i + S - T - j + 1)] = 0
                    dS = P * (g @ values.T - delta) / math.sqrt(D)
                    dv[b, kh, j : j + block_k] += P.T @ g
                    dk[b, kh, j : j + block_k] += dS.T @ Q
                    dq[b, h, i : i + block_q] += dS @ keys
    return dq.to(q), dk.to(k), dv.to(v)


@correct("flash_attention_backward")
def a_pass_for_each(grad_out, q, k, v, out, logsumexp, causal=False, block_q=64, block_k=64):
    """One pass over the tiles for delta, from the weights and not from out; one for dq; one for dk and dv."""
    (B, H, T, D), (K, S) = q.shape, k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = torch.arange(H).div(H // K, rounding_mode="floor")
    q, g, k, v = (x.to(wide) for x in (q, grad_out, k[:, heads], v[:, heads]))
    result = [x.dtype for x in (grad_out, out, out)]

    def tile(i, j):
        rows, keys = slice(i, min(i + block_q, T)), slice(j, min(j + block_k, S))
        s = (q[:, :, rows] @ k[:, :, keys].mT) / math.sqrt(D) - logsumexp[:, :, rows].unsqueeze(-1).clamp(min=-1e30)
        if causal:
            ahead = torch.arange(keys.start, keys.stop) - torch.arange(rows.start, rows.stop)[:, None] - (S - T)
            s = torch.where(ahead > 0, -math.inf, s)
        return rows, keys, s.exp(), g[:, :, rows] @ v[:, :, keys].mT

    pairs = [
        (i, j)
        for i in range(0, T, block_q)
        for j in range(0, S, block_k)
        if not causal or j <= min(i + block_q, T) - 1 + S - T
    ]
    delta = torch.zeros(B, H, T, 1, dtype=wide)
    for i, j in pairs:
        rows, _, p, dp = tile(i, j)
        delta[:, :, rows] += (p * dp).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i, j in pairs:
        rows, keys, p, dp = tile(i, j)
        dq[:, :, rows] += p * (dp - delta[:, :, rows]) @ k[:, :, keys] / math.sqrt(D)
    for i, j in sorted(pairs, key=lambda pair: pair[::-1]):
        rows, keys, p, dp = tile(i, j)
        dk[:, :, keys] += (p * (dp - delta[:, :, rows])).mT @ q[:, :, rows] / math.sqrt(D)
        dv[:, :, keys] += p.mT @ g[:, :, rows]
    dk, dv = (x.unflatten(1, (K, H // K)).sum(2) for x in (dk, dv))
    return tuple(x.to(dtype) for x, dtype in zip((dq, dk, dv), result, strict=True))
