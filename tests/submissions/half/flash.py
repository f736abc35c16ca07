"""A learner who has done attention in tiles, and neither online softmax nor the backward pass."""

import torch


def flash_attention(q, k, v, causal=False, block_q=64, block_k=64):
    (B, H, T, D), S = q.shape, k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    outs, logs = [], []
    for i in range(0, T, block_q):
        rows = torch.arange(i, min(i + block_q, T)) + S - T
        out, log = (
            torch.zeros(B, H, len(rows), v.shape[3], dtype=wide),
            torch.full((B, H, len(rows)), -torch.inf).to(wide),
        )
        for j in range(0, min(S, int(rows[-1]) + 1) if causal else S, block_k):
            s = q[:, :, i : i + block_q].to(wide) @ k[:, :, j : j + block_k].to(wide).mT / D**0.5
            if causal:
                s = s.masked_fill(torch.arange(j, j + s.shape[-1]) > rows[:, None], -torch.inf)
            top = s.amax(-1).clamp(min=-1e30)
            new = torch.logaddexp(log, top + (s - top[..., None]).exp().sum(-1).log())
            safe = new.clamp(min=-1e30)[..., None]
            out = out * (log[..., None] - safe).exp() + (s - safe).exp() @ v[:, :, j : j + block_k].to(wide)
            log = new
        outs.append(out.to(q.dtype))
        logs.append(log)
    return torch.cat(outs, dim=2), torch.cat(logs, dim=2)
