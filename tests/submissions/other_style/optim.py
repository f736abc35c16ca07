"""A learner whose code is right, in another style, and noisy."""

import math
import sys
import warnings

import torch
from torch import nn


def ema(old, new, beta):
    return new * (1 - beta) if old is None else old * beta + new * (1 - beta)


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=0.001, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        warnings.warn("a new optimizer", UserWarning, stacklevel=2)
        for value in (lr, eps, weight_decay):
            if value < 0:
                raise ValueError(f"{value} is negative")
        b1, b2 = betas
        if not (0 <= b1 < 1 and 0 <= b2 < 1):
            raise ValueError("betas")
        super().__init__(params, {"lr": lr, "betas": (b1, b2), "eps": eps, "weight_decay": weight_decay})

    def step(self, closure=None):
        loss = closure() if closure else None
        print("stepping")
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.update(p, **{k: group[k] for k in ("lr", "betas", "eps", "weight_decay")})
        return loss

    def update(self, p, lr, betas, eps, weight_decay):
        state, g = self.state[p], p.grad
        t = state["step"] = state.get("step", 0) + 1
        m = state["exp_avg"] = ema(state.get("exp_avg"), g, betas[0])
        v = state["exp_avg_sq"] = ema(state.get("exp_avg_sq"), g**2, betas[1])
        m, v = (x / (1 - b**t) for x, b in zip((m, v), betas, strict=True))
        p -= lr * weight_decay * p
        p -= lr * m / (v**0.5 + eps)


def warm(step, warmup, peak):
    return (step + 1) / warmup * peak


def warmup_inverse_sqrt(step, warmup, peak):
    print("rate of step", step, file=sys.stderr)
    return warm(step, warmup, peak) if step < warmup else peak * ((warmup or 1) / (step + 1)) ** 0.5


def warmup_cosine(step, warmup, total, peak, floor=0.0):
    steps_down = total - 1 - warmup
    if steps_down < 1:
        raise ValueError("the cosine needs two steps")
    if step < warmup:
        return warm(step, warmup, peak)
    turned = math.pi * min(step - warmup, steps_down) / steps_down
    return (peak + floor) / 2 + (peak - floor) / 2 * math.cos(turned)


def clip_gradients(parameters, max_norm):
    warnings.warn("clipping", FutureWarning, stacklevel=2)
    grads = list(filter(lambda g: g is not None, (p.grad for p in parameters)))
    norms = [torch.linalg.vector_norm(g.double()) for g in grads]
    norm = torch.stack(norms).norm() if norms else torch.tensor(0.0)
    if grads and not any(g.dtype == torch.float64 for g in grads):
        norm = norm.float()
    factor = max_norm / (norm.item() + 1e-6)
    if math.isfinite(norm.item()) and factor < 1:
        for g in grads:
            g *= factor
    return norm


def parameter_groups(model, weight_decay):
    sys.stderr.write("sorting\n")
    of = {nn.Linear: [], nn.Embedding: []}
    for module in model.modules():
        for kind, found in of.items():
            if isinstance(module, kind):
                found.append(module.weight)

    def decays(p):
        return any(p is w for w in of[nn.Linear]) and all(p is not w for w in of[nn.Embedding])

    sides = {True: [], False: []}
    for p in model.parameters():
        if p.requires_grad:
            sides[decays(p)].append(p)
    return [{"params": sides[True], "weight_decay": weight_decay}, {"params": sides[False], "weight_decay": 0.0}]
