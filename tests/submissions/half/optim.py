"""A learner who has done the schedules and clipping, and not AdamW."""

import math

import torch


def warmup_inverse_sqrt(step, warmup, peak):
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (max(warmup, 1) / (step + 1)) ** 0.5


def warmup_cosine(step, warmup, total, peak, floor=0.0):
    if total < warmup + 2:
        raise ValueError("total is too small")
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1, (step - warmup) / (total - warmup - 1))
    return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def clip_gradients(parameters, max_norm):
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    wide = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
    norm = torch.cat([g.to(wide).flatten() for g in grads]).norm()
    if norm.isfinite() and norm > max_norm:
        for g in grads:
            g.mul_(max_norm / (norm + 1e-6))
    return norm
