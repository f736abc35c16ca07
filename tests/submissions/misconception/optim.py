"""A learner who adds the decay to the gradient, as plain Adam does, and has everything else right."""

import math

import torch
from torch import nn


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise ValueError("bad values")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if len(s) == 0:
                    s["step"] = 0
                    s["exp_avg"] = torch.zeros_like(p)
                    s["exp_avg_sq"] = torch.zeros_like(p)
                s["step"] += 1
                g = p.grad + group["weight_decay"] * p
                s["exp_avg"].mul_(b1).add_(g, alpha=1 - b1)
                s["exp_avg_sq"].mul_(b2).addcmul_(g, g, value=1 - b2)
                m = s["exp_avg"] / (1 - b1 ** s["step"])
                v = s["exp_avg_sq"] / (1 - b2 ** s["step"])
                p.sub_(group["lr"] * m / (v.sqrt() + group["eps"]))
        return loss


def warmup_inverse_sqrt(step, warmup, peak):
    if step < warmup:
        return peak * (step + 1) / warmup
    if warmup == 0:
        return peak / math.sqrt(step + 1)
    return peak * math.sqrt(warmup / (step + 1))


def warmup_cosine(step, warmup, total, peak, floor=0.0):
    if total <= warmup + 1:
        raise ValueError("total must be larger")
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= total - 1:
        return floor
    progress = (step - warmup) / (total - 1 - warmup)
    return floor + 0.5 * (peak - floor) * (1 + math.cos(math.pi * progress))


def clip_gradients(parameters, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    squares = [p.grad.to(torch.promote_types(p.grad.dtype, torch.float32)).square().sum() for p in parameters]
    norm = sum(squares, torch.tensor(0.0)).sqrt()
    if torch.isfinite(norm):
        for p in parameters:
            p.grad.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def parameter_groups(model, weight_decay):
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    decay, rest = [], []
    for p in model.parameters():
        if p.requires_grad:
            (decay if id(p) in linear and id(p) not in tables else rest).append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
