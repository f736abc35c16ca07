"""Other correct implementations of AdamW, schedules, clipping and decay groups."""

import math

import torch
from torch import nn

from . import correct

# AdamW ---------------------------------------------------------------------------------------------------------------


def _complain(lr, betas, eps, weight_decay):
    if lr < 0 or eps < 0 or weight_decay < 0:
        raise ValueError("lr, eps and weight_decay are not negative")
    if any(beta < 0 or beta >= 1 for beta in betas):
        raise ValueError("betas lie in [0, 1)")


@correct("AdamW")
class AsInTheFormula(torch.optim.Optimizer):
    """The formula line by line, in new tensors; the result is copied into the parameter."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        _complain(lr, betas, eps, weight_decay)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))  # noqa: C408

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                t = state.get("step", 0) + 1
                m = beta1 * state.get("exp_avg", 0) + (1 - beta1) * p.grad
                v = beta2 * state.get("exp_avg_sq", 0) + (1 - beta2) * p.grad**2
                new = p - group["lr"] * group["weight_decay"] * p
                new = new - group["lr"] * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)) ** 0.5 + group["eps"])
                p.copy_(new)
                state["step"], state["exp_avg"], state["exp_avg_sq"] = t, m, v
        return loss


@correct("AdamW")
class AsInTorch(torch.optim.Optimizer):
    """t is a tensor, as torch keeps it; one step size, a corrected denominator, everything in place through `data`."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        if not (lr >= 0.0 and eps >= 0.0 and weight_decay >= 0.0):
            raise ValueError("negative")
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError("betas")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                self._move(p.data, p.grad.data, self.state[p], group)
        return loss

    def _move(self, p, g, state, group):
        lr, betas = group["lr"], group["betas"]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        t = state["step"].item()
        p *= 1 - lr * group["weight_decay"]
        state["exp_avg"].mul_(betas[0]).add_(g, alpha=1 - betas[0])
        state["exp_avg_sq"].mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        denominator = state["exp_avg_sq"].sqrt().div_((1 - betas[1] ** t) ** 0.5).add_(group["eps"])
        p.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - betas[0] ** t))


@correct("AdamW")
class AllAtOnce(torch.optim.Optimizer):
    """All weights of a group together, by torch's operations on lists."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2):
        _complain(lr, betas, eps, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _step_group(self, group):
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        (beta1, beta2), lr = group["betas"], group["lr"]
        gradients = [p.grad for p in weights]
        states = [self.state[p] for p in weights]
        for p, state in zip(weights, states, strict=True):
            state.setdefault("exp_avg", torch.zeros_like(p))
            state.setdefault("exp_avg_sq", torch.zeros_like(p))
            state["step"] = state.get("step", 0) + 1
        means, squares = ([state[k] for state in states] for k in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        roots = torch._foreach_sqrt(torch._foreach_div(squares, [1 - beta2 ** s["step"] for s in states]))
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(means, [1 - beta1 ** s["step"] for s in states]), roots)
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-lr)


@correct("AdamW")
class PowersKept(torch.optim.Optimizer):
    """beta ** t is kept beside the averages, which start at once for all weights; decay and step in one expression."""

    def __init__(self, params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01):
        if min(lr, eps, weight_decay) < 0:
            raise ValueError("below 0")
        for beta in betas:
            if beta < 0.0 or beta >= 1.0:
                raise ValueError("no such beta")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "step": 0,
                    "exp_avg": torch.zeros(p.shape, dtype=p.dtype, device=p.device),
                    "exp_avg_sq": torch.zeros(p.shape, dtype=p.dtype, device=p.device),
                    "left": [1.0, 1.0],
                }

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad.detach(), group)
        return loss

    def _move(self, p, g, group):
        state = self.state[p]
        state["step"] += 1
        state["left"] = [left * beta for left, beta in zip(state["left"], group["betas"], strict=True)]
        for name, beta, new in zip(("exp_avg", "exp_avg_sq"), group["betas"], (g, g.square()), strict=True):
            state[name] = state[name] + (1 - beta) * (new - state[name])
        mean, square = (state[k] / (1 - left) for k, left in zip(("exp_avg", "exp_avg_sq"), state["left"], strict=True))
        old = p.detach()
        p.data = old - group["lr"] * (group["weight_decay"] * old + mean / (torch.sqrt(square) + group["eps"]))


# warmup_inverse_sqrt, warmup_cosine ----------------------------------------------------------------------------------


@correct("warmup_inverse_sqrt")
def the_papers_minimum(step, warmup, peak):
    """The paper's formula, times sqrt(warmup)."""
    n = step + 1
    if warmup == 0:
        return peak * n**-0.5
    return peak * warmup**0.5 * min(n**-0.5, n * warmup**-1.5)


@correct("warmup_inverse_sqrt")
def the_lower_of_two(step, warmup, peak):
    """The line and the root cross at the peak."""
    root = peak / ((step + 1) / max(1, warmup)) ** 0.5
    return min(root, peak * (step + 1) / warmup) if warmup > 0 else root


@correct("warmup_inverse_sqrt")
def by_tensor(step, warmup, peak):
    """torch's root, as a plain number."""
    if step >= warmup:
        ratio = torch.tensor((warmup or 1) / (step + 1), dtype=torch.float64)
        return peak * ratio.sqrt().item()
    return float(peak) * ((step + 1) / warmup)


@correct("warmup_cosine")
def by_sines(step, warmup, total, peak, floor=0.0):
    """Half a cosine is a squared sine."""
    if not total > warmup + 1:
        raise ValueError("too short")
    if step < warmup:
        return (step + 1) / warmup * peak
    left = max(0, total - 1 - step) / (total - 1 - warmup)
    return floor + (peak - floor) * math.sin(math.pi / 2 * left) ** 2


@correct("warmup_cosine")
def case_by_case(step, warmup, total, peak, floor=0.0):
    """Three cases."""
    last = total - 1
    if last <= warmup:
        raise ValueError(f"{total} steps are too few")
    if step >= last:
        return float(floor)
    if step < warmup:
        return peak / warmup * (step + 1)
    share = 0.5 + 0.5 * math.cos((step - warmup) / (last - warmup) * math.pi)
    return share * peak + (1 - share) * floor


@correct("warmup_cosine")
def by_polar(step, warmup, total, peak, floor=0.0):
    """A point that turns by half a circle, in torch."""
    if total < warmup + 2:
        raise ValueError("the cosine needs two steps")
    if step - warmup < 0:
        return peak * (1 + step) / warmup
    angle = torch.tensor(math.pi * min(1, (step - warmup) / (total - warmup - 1)), dtype=torch.float64)
    return (floor + 0.5 * (peak - floor) * (1 + torch.polar(torch.ones_like(angle), angle).real)).item()


# clip_gradients ------------------------------------------------------------------------------------------------------


@correct("clip_gradients")
def one_long_vector(parameters, max_norm):
    """All gradients, put end to end."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if len(gradients) == 0:
        return torch.zeros(())
    flat = torch.cat([g.reshape(-1).to(torch.promote_types(g.dtype, torch.float32)) for g in gradients])
    norm = torch.sqrt(torch.dot(flat, flat))
    factor = (max_norm / (norm + 1e-6)).item()
    if math.isfinite(norm.item()) and factor < 1:
        for g in gradients:
            g *= factor
    return norm


@correct("clip_gradients")
def sum_of_squares(parameters, max_norm):
    """A running sum of squares in float32 or wider; nothing happens to short gradients."""
    total, gradients = torch.tensor(0.0), []
    for p in parameters:
        if p.grad is None:
            continue
        g = p.grad if p.grad.dtype == torch.float64 else p.grad.float()
        total = total + g.pow(2).sum()
        gradients.append(p.grad)
    total = total**0.5
    if not torch.isfinite(total) or total <= max_norm:
        return total
    for g in gradients:
        g.copy_(g * (max_norm / (total + 1e-6)))
    return total


@correct("clip_gradients")
def by_lists(parameters, max_norm):
    """torch's operations on lists; the factor is 1 where nothing is to be done."""
    with torch.no_grad():
        gradients = [p.grad.detach() for p in list(parameters) if p.grad is not None]
        if not gradients:
            return torch.tensor(0.0)
        wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(wide)))
        factor = min(1.0, max_norm / (float(norm) + 1e-6)) if norm.isfinite() else 1.0
        torch._foreach_mul_(gradients, factor)
        return norm


@correct("clip_gradients")
def through_data(parameters, max_norm):
    """The gradient keeps its tensor, whose data is exchanged."""
    parameters = tuple(filter(lambda p: p.grad is not None, parameters))
    if not parameters:
        return torch.tensor(0.0)
    wide = torch.float64 if parameters[0].grad.dtype == torch.float64 else torch.float32
    norm = torch.tensor([p.grad.to(wide).norm().item() for p in parameters], dtype=wide).norm()
    coefficient = max_norm / (norm.item() + 1e-6)
    if coefficient < 1.0 and not norm.isinf():
        for p in parameters:
            p.grad.data = (p.grad.data.to(wide) * coefficient).to(p.grad.dtype)
    return norm


# parameter_groups ----------------------------------------------------------------------------------------------------


@correct("parameter_groups")
def module_by_module(model, weight_decay):
    """A walk over the modules; what an embedding has is known first."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    decaying, others, seen = [], [], set()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in seen or not p.requires_grad:
                continue
            seen.add(id(p))
            decays = isinstance(module, nn.Linear) and name == "weight" and not any(p is t for t in tables)
            (decaying if decays else others).append(p)
    return [dict(params=decaying, weight_decay=weight_decay), dict(params=others, weight_decay=0.0)]  # noqa: C408


@correct("parameter_groups")
def by_kinds(model, weight_decay):
    """For each parameter the kinds of the layers that have it as their weight: parameters can be keys."""
    kinds = {p: set() for p in model.parameters()}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            kinds[module.weight].add(nn.Linear if isinstance(module, nn.Linear) else nn.Embedding)
    trained = {p: kind == {nn.Linear} for p, kind in kinds.items() if p.requires_grad}
    return [
        {"params": [p for p, decays in trained.items() if decays], "weight_decay": weight_decay, "name": "matrices"},
        {"params": [p for p, decays in trained.items() if not decays], "weight_decay": 0.0, "name": "the rest"},
    ]


@correct("parameter_groups")
def by_names(model, weight_decay):
    """Through the names of all, doubles included; the layer is looked up by its name."""
    layers = dict(model.named_modules(remove_duplicate=False))
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), (p, []))[1].append(name)
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for p, its in names.values():
        owners = [layers[name.rpartition(".")[0]] for name in its if name.rpartition(".")[2] == "weight"]
        table = any(isinstance(owner, nn.Embedding) for owner in owners)
        linear = any(isinstance(owner, nn.Linear) for owner in owners)
        if p.requires_grad:
            groups[0 if linear and not table else 1]["params"].append(p)
    return groups
