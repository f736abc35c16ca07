"""How weights move: AdamW, learning-rate schedules, clipping, and which weights decay."""

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class AdamW(torch.optim.Optimizer):
    """Adam with weight decay that is decoupled from the gradient; the same steps as torch.optim.AdamW.

    For each parameter p with gradient g, at its t-th step (t = 1, 2, ...):

        p = p - lr * weight_decay * p
        m = beta1 * m + (1 - beta1) * g           v = beta2 * v + (1 - beta2) * g^2
        p = p - lr * m' / (sqrt(v') + eps)        m' = m / (1 - beta1^t), v' = v / (1 - beta2^t)

    with m = v = 0 before the first step. A parameter without a gradient is left alone, its t too. `params` are
    parameters, or groups with own values. `state` keeps t, m and v of each parameter as "step", "exp_avg" and
    "exp_avg_sq". Raises ValueError for an lr, eps or weight_decay below 0, or a beta outside [0, 1). Loshchilov and
    Hutter (2019), algorithm 2; Kingma and Ba (2015).
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"both betas must be at least 0 and below 1, got {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure=None):
        """Move all parameters by one step. `closure`, if given, first computes the loss anew, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                m, v, t = state["exp_avg"], state["exp_avg_sq"], state["step"]
                with torch.no_grad():
                    m.lerp_(p.grad, 1 - beta1)
                    v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                    root = (v.sqrt() / math.sqrt(1 - beta2**t)).add_(group["eps"])
                    p.mul_(1 - lr * group["weight_decay"])
                    p.addcdiv_(m, root, value=-lr / (1 - beta1**t))
        return loss


def warmup_inverse_sqrt(step: int, warmup: int, peak: float) -> float:
    """The learning rate of the 2017 paper, by its peak: up in a line, then down with the root of the steps.

    peak * (step + 1) / warmup while step < warmup, then peak * sqrt(warmup / (step + 1)); without warm-up, peak /
    sqrt(step + 1). The first step is 0, and already learns. Vaswani et al. (2017), equation 3.

    >>> [warmup_inverse_sqrt(step, warmup=2, peak=1.0) for step in (0, 1, 7)]
    [0.5, 1.0, 0.5]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * math.sqrt(max(warmup, 1) / (step + 1))


def warmup_cosine(step: int, warmup: int, total: int, peak: float, floor: float = 0.0) -> float:
    """Up in a line, then down half a cosine, from `peak` at step `warmup` to `floor` at step `total` - 1 and after.

    peak * (step + 1) / warmup while step < warmup: the first step is 0, and already learns. Raises ValueError unless
    total > warmup + 1. Loshchilov and Hutter (2017), equation 5.

    >>> [round(warmup_cosine(step, warmup=2, total=5, peak=1.0), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """
    if total <= warmup + 1:
        raise ValueError(f"{total=} must be above warmup + 1 = {warmup + 1}: the cosine needs two steps")
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / (total - 1 - warmup))
    return floor + (peak - floor) * (1 + math.cos(math.pi * progress)) / 2


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Shorten the gradient, taken as one long vector, to `max_norm`, in place; returns its norm before, a scalar.

    All gradients are multiplied by max_norm / (norm + 1e-6), as in PyTorch, where that is below 1; they never grow.
    If the norm is not finite they stay as they are. Parameters without a gradient are left out; the norm of no gradient
    is 0. The norm is computed in float32, or in the gradients' dtype where that is wider. Pascanu et al. (2013),
    algorithm 1.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    wide = functools.reduce(torch.promote_types, [g.dtype for g in gradients], torch.float32)
    norm = torch.stack([torch.linalg.vector_norm(g, dtype=wide) for g in gradients]).norm()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale = torch.where(norm.isfinite(), scale, 1.0)
    for g in gradients:
        g.mul_(scale)
    return norm


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups for an optimizer: first the parameters that decay, then those that do not.

    Decay is for the weight of an `nn.Linear`, unless an `nn.Embedding` shares it; not for biases, norms, tables and
    anything else. Each group is {"params": [...], "weight_decay": ...}, `weight_decay` in the first and 0.0 in the
    second. Parameters that are frozen (requires_grad is False) are left out; each of the others stands in one group,
    once.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)} - tables
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if id(p) in matrices], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) not in matrices], "weight_decay": 0.0},
    ]
