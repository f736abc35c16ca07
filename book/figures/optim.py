"""Chapter 8's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tfmlib import attention, data, losses, optim
from tfmlib.models.gpt import GPT, GPTConfig

from . import Figure, claim, colour, draw, ink, one_thread, rng, weights_from
from .attention import naive_attention


def _minus(text: str) -> str:
    """A number for the running text, with a true minus sign."""
    return text.replace("-", "−")


def _span(values: list[float], digits: int = 2) -> str:
    """From the least to the largest: 0.64–0.71."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}–{high}"


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0).item()


# --- by hand -------------------------------------------------------------------------------------------------------


def valley(steep: float = 100.0, steps: int = 50) -> dict[str, str]:
    """Gradient descent on w1² / 2 + steep · w2² / 2 from (1, 1): what is left after some steps."""
    texts = {}
    for lr in (0.005, 0.019, 0.021):
        w, curvature = torch.ones(2, dtype=torch.float64), torch.tensor([1.0, steep], dtype=torch.float64)
        for _ in range(steps):
            w = w - lr * curvature * w
        claim(torch.allclose(w, (1 - lr * curvature) ** steps), "each step multiplies a weight by 1 - lr * curvature")
        texts |= {f"valley_{lr:g}_{i}": _minus(f"{n:.3g}") for i, n in enumerate(w.tolist(), 1)}
    return texts


def by_hand(gradients: tuple[float, ...] = (2.0, -1.0), lr: float = 0.1) -> dict[str, str]:
    """Each number of Adam's first steps on one weight, which starts at 1."""
    b1, b2, m, v, w, texts = 0.9, 0.999, 0.0, 0.0, 1.0, {}
    p = nn.Parameter(torch.tensor([w], dtype=torch.float64))
    adam = optim.AdamW([p], lr=lr, weight_decay=0.0)
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        fair_m, fair_v = m / (1 - b1**t), v / (1 - b2**t)
        step = lr * fair_m / (math.sqrt(fair_v) + 1e-8)
        w -= step
        p.grad = torch.full_like(p, g)
        adam.step()
        claim(abs(p.item() - w) < 1e-12, "the table is what AdamW does")
        row = {"g": f"{g:g}", "m": f"{m:.4g}", "v": f"{v:.6f}", "fair_m": f"{fair_m:.4g}", "fair_v": f"{fair_v:.4g}"}
        row |= {"root": f"{math.sqrt(fair_v):.4g}", "step": f"{step:.4f}", "w": f"{w:.4f}"}
        row |= {"c1": f"{1 - b1**t:.2f}", "c2": f"{1 - b2**t:.6f}"}
        texts |= {f"{name}_{t}": _minus(text) for name, text in row.items()}
    return texts


def no_correction(t: float, b1: float, b2: float) -> float:
    """Adam's step without bias correction, as a multiple of the right one: (1 - b1^t) / sqrt(1 - b2^t)."""
    return (1 - b1**t) / math.sqrt(1 - b2**t)


def no_exponent(t: float, b1: float, b2: float) -> float:
    """The same where 1 - b1 and 1 - b2 stand in place of 1 - b1^t and 1 - b2^t."""
    return no_correction(t, b1, b2) / no_correction(1, b1, b2)


def _steps(gradients: list[float], betas: tuple[float, float], lr: float = 1.0) -> list[float]:
    """How far AdamW moves one number at each of these gradients."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam, moved = optim.AdamW([p], lr=lr, betas=betas, weight_decay=0.0), []
    for g in gradients:
        before = p.item()
        p.grad = torch.full_like(p, g)
        adam.step()
        moved.append(before - p.item())
    return moved


def corrections(last: int = 5000) -> tuple[Figure, dict[str, str]]:
    """How far a constant gradient moves a weight at step t, in units of lr, with and without bias correction."""
    at = sorted({round(10 ** (n / 40)) for n in range(int(40 * math.log10(last)) + 1)})
    claim(all(abs(n - 1) < 1e-6 for n in _steps([3.0] * 50, (0.9, 0.999))), "with correction each step is lr")
    curves = {
        "right": ([1.0] * len(at), "-", 0),
        "no correction, betas 0.9, 0.999": ([no_correction(t, 0.9, 0.999) for t in at], "--", 1),
        "no correction, betas 0.9, 0.95": ([no_correction(t, 0.9, 0.95) for t in at], "-.", 2),
        "t not in the exponent, 0.9, 0.999": ([no_exponent(t, 0.9, 0.999) for t in at], ":", 3),
    }
    slow, fast = ([no_correction(t, 0.9, b2) for t in range(1, last)] for b2 in (0.999, 0.95))
    peak = max(range(len(slow)), key=slow.__getitem__)
    silence = _steps([0.0] * 1000 + [1.0], (0.9, 0.95))[-1]
    claim(abs(silence - no_correction(1, 0.9, 0.95)) < 1e-6, "after a silence the step is as if uncorrected")
    claim(max(fast) < 1.1, "with betas 0.9 and 0.95 the step without correction is never much too large")
    gone = next(t for t in range(peak, last) if slow[t] < 1.1) + 1

    def paint(canvas):
        ax = canvas.subplots()
        for name, (values, style, i) in curves.items():
            ax.plot(at, values, style, color=colour(i), label=name)
        ax.set(title="The step for a constant gradient", xscale="log", ylim=(0, 7), xlim=(1, last))
        ax.set(xlabel="step t", ylabel="step, in units of lr")
        ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
        canvas.legend(loc="outside lower center", fontsize=9, ncols=2)

    alt = (
        "Size of Adam's step against the step's number, for a constant gradient. With bias correction it is always 1 "
        f"lr. Without it and with betas 0.9 and 0.999 it starts at {slow[0]:.2f}, rises to {max(slow):.1f} at step "
        f"{peak + 1} and comes back to 1 only after thousands of steps. With betas 0.9 and 0.95 it rises from "
        f"{fast[0]:.2f} to 1. With t left out of the exponent it starts at 1 and ends at a third."
    )
    texts = {
        "first_999": f"{slow[0]:.2f}",
        "first_95": f"{fast[0]:.2f}",
        "peak": f"{max(slow):.1f}",
        "peak_at": f"{peak + 1}",
        "gone_at": f"{gone:,}",
        "exponent_peak": f"{max(no_exponent(t, 0.9, 0.999) for t in range(1, 100)):.1f}",
        "exponent_end": f"{no_exponent(10**6, 0.9, 0.999):.2f}",
    }
    return draw(paint, alt, size=(6.4, 3.9)), texts


# --- weight decay --------------------------------------------------------------------------------------------------


def decay(lr: float = 0.01) -> dict[str, str]:
    """The first step of a weight of 1, in units of lr; then many steps of noise."""
    kinds = {"l2": torch.optim.Adam, "decoupled": optim.AdamW}
    texts = {}
    for i, (g, decays) in enumerate(((10.0, 0.0), (10.0, 0.1), (0.0, 0.1), (0.0, 0.001))):
        for name, kind in kinds.items():
            w = nn.Parameter(torch.ones(1, dtype=torch.float64))
            w.grad = torch.full_like(w, g)
            kind([w], lr=lr, weight_decay=decays).step()
            texts[f"{name}_{i}"] = f"{(1 - w.item()) / lr:.3f}"
    for size in (10.0, 0.01):
        for name, kind in kinds.items():
            w, generator = nn.Parameter(torch.ones(2000)), rng(0)
            optimizer = kind([w], lr=0.001, weight_decay=0.1)
            for _ in range(1000):
                w.grad = size * (2.0 * torch.randint(2, w.shape, generator=generator) - 1)
                optimizer.step()
            texts[f"{name}_noise_{size:g}"] = f"{abs(w.mean().item()):.2f}"
    model = _gpt2()
    decayed, kept = ([p.numel() for p in group["params"]] for group in optim.parameter_groups(model, 0.1))
    tables = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding)]
    return texts | {
        "decayed": f"{sum(decayed):,}",
        "kept": f"{sum(kept):,}",
        "tables": f"{sum(tables):,}",
        "vectors": f"{sum(kept) - sum(tables):,}",
    }


def _gpt2() -> GPT:
    """The shapes of the smallest GPT-2, without any numbers in them."""
    with torch.device("meta"):
        return GPT(GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50257, context_length=1024))


def decayed_bias(steps: int = 4000, seed: int = 0) -> dict[str, str]:
    """One bias learns the mean of noisy targets, 5, with and without decay: the mean of its last thousand values."""
    found = {}
    for decays in (0.0, 0.1):
        b, generator, values = nn.Parameter(torch.zeros(100)), rng(seed), []  # a hundred at once
        adam = optim.AdamW([b], lr=0.01, weight_decay=decays)
        for _ in range(steps):
            b.grad = b.detach() - (5 + torch.randn(100, generator=generator))
            adam.step()
            values.append(b.detach().mean().item())
        found[decays] = statistics.mean(values[-1000:])
    claim(abs(found[0.0] - 5) < 0.05 and found[0.1] < 4.7, "decay keeps a bias from its best value")
    return {"bias_free": f"{found[0.0]:.2f}", "bias_decayed": f"{found[0.1]:.2f}"}


# --- schedules -----------------------------------------------------------------------------------------------------


def schedules(total: int = 1000, warmup: int = 50, floor: float = 0.1) -> tuple[Figure, dict[str, str]]:
    """Both schedules with the same warm-up."""
    root = [optim.warmup_inverse_sqrt(step, warmup, 1.0) for step in range(total)]
    cosine = [optim.warmup_cosine(step, warmup, total, 1.0, floor) for step in range(total)]
    claim(root[0] == cosine[0] == 1 / warmup and root[warmup - 1] == cosine[warmup - 1] == 1, "both warm up alike")

    def paint(canvas):
        ax = canvas.subplots()
        ax.plot(cosine, label=f"cosine, floor {floor:g}")
        ax.plot(root, "--", label="inverse square root")
        ax.axvline(warmup, color=ink(), linewidth=1, linestyle=":")
        ax.text(warmup + 8, 0.04, "end of warm-up")
        ax.set(title=f"{total:,} steps, the first {warmup} of them warm-up", xlabel="step", ylim=(0, 1.05))
        ax.set_ylabel("lr, in units of the peak")
        ax.legend(fontsize=9, loc="upper right")

    alt = (
        f"Learning rate against step. Both schedules rise in a line to the peak at step {warmup}. The inverse square "
        f"root falls fast at first and slowly later, to {root[-1]:.2f}; the cosine stays high for long, is half way "
        f"down in the middle and ends at {floor:g}."
    )
    texts = {"root_200": f"{root[199]:g}", "root_end": f"{root[-1]:.2f}", "cosine_200": f"{cosine[199]:.2f}"}
    return draw(paint, alt, size=(6.4, 3.2)), texts


# --- a small GPT on Python's documentation, letter by letter -------------------------------------------------------


@functools.cache
def corpus() -> tuple[Tensor, data.Characters]:
    """The text as ids, and who made them."""
    text = data.python_docs()
    characters = data.Characters(text)
    return torch.tensor(characters.encode(text)), characters


def _frequencies() -> float:
    """The loss of a model that knows how frequent each character is, and nothing else: nats."""
    tokens, _ = corpus()
    p = tokens.bincount().double() / len(tokens)
    return -(p * p.log()).nansum().item()


def small_gpt(seed: int) -> GPT:
    """Two layers, C = 48."""
    V = corpus()[1].vocab_size
    with weights_from(seed):
        return GPT(GPTConfig(n_layers=2, d_model=48, n_heads=4, vocab_size=V, context_length=32))


def batches(seed: int, B: int = 16):
    """Windows of 32 characters, with their labels."""
    return data.token_batches(corpus()[0], B, 32, rng(1000 + seed))


@dataclass(frozen=True)
class Recipe:
    """How to train: `factor(t, b1, b2)` multiplies lr at step t; the loss of step `bad_step` is multiplied by 1,000."""

    peak: float = 0.008
    warmup: int = 50
    max_norm: float | None = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    factor: Callable[[int, float, float], float] | None = None
    bad_step: int | None = None


def train(recipe: Recipe, seed: int, steps: int = 100) -> tuple[list[float], list[float], list[float]]:
    """Losses, norms of the gradient, and how far a weight moves on average, in units of the peak."""
    model, stream, found = small_gpt(seed), batches(seed), ([], [], [])
    parameters = list(model.parameters())
    optimizer = optim.AdamW(parameters, betas=recipe.betas, weight_decay=0.0)
    for step in range(steps):
        inputs, labels = next(stream)
        loss = losses.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        (loss * 1000 if step == recipe.bad_step else loss).backward()
        norm = optim.clip_gradients(parameters, recipe.max_norm or math.inf)
        lr = optim.warmup_cosine(step, recipe.warmup, 2000, recipe.peak)
        if recipe.factor:
            lr *= recipe.factor(step + 1, *recipe.betas)
        optimizer.param_groups[0]["lr"] = lr
        before = nn.utils.parameters_to_vector(parameters).detach().clone()
        optimizer.step()
        moved = (nn.utils.parameters_to_vector(parameters).detach() - before).abs().mean().item() / recipe.peak
        for values, value in zip(found, (loss.item(), norm.item(), moved), strict=True):
            values.append(value)
    return found


def _end(values: list[float], n: int = 20) -> float:
    return statistics.mean(values[-n:])


def _tens(values: list[float]) -> list[float]:
    """The means of ten steps at a time."""
    return [statistics.mean(values[i : i + 10]) for i in range(0, len(values), 10)]


def hundred(seeds: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Figure, dict[str, str]]:
    """The first hundred steps with all three measures, and with one of them left out."""
    full = Recipe()
    recipes = {
        "all three": full,
        "no clipping": replace(full, max_norm=None),
        "no warm-up": replace(full, warmup=0),
        "no bias correction": replace(full, factor=no_correction),
    }
    with one_thread():
        found = {name: [train(recipe, seed) for seed in seeds] for name, recipe in recipes.items()}
    ends = {name: [_end(run[0]) for run in runs] for name, runs in found.items()}
    level = _frequencies()
    early = {name: [statistics.mean(run[0][:20]) for run in runs] for name, runs in found.items()}
    claim(max(early["no warm-up"]) < min(early["all three"]), "without warm-up the first twenty steps are better")
    least = {
        name: min(bare - full for full, bare in zip(ends["all three"], ends[name], strict=True))
        for name in ("no warm-up", "no bias correction")
    }
    claim(min(least.values()) > 0.1, f"with every seed it is worse to leave one out: {ends}")
    moves = {name: [run[2] for run in runs] for name, runs in found.items()}
    firsts = {"all three": 1 / 50, "no warm-up": 1.0, "no bias correction": no_correction(1, 0.9, 0.999) / 50}
    for name, first in firsts.items():
        claim(all(abs(m[0] / first - 1) < 0.05 for m in moves[name]), f"{name} starts with a step of {first:.2f}")
    later = [_end(m) for m in moves["no warm-up"]]
    claim(max(later) < 0.35, f"later steps are smaller: {later}")

    def paint(canvas):
        top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=[1.25, 1])
        styles = ["-", ":", "--", "-."]
        at = [10 * n + 4.5 for n in range(10)]
        for i, (name, runs) in enumerate(found.items()):
            for run in runs:
                (line,) = top.plot(at, _tens(run[0]), linestyle=styles[i], color=colour(i), linewidth=1.1)
            mean = [statistics.mean(values) for values in zip(*moves[name], strict=True)]
            bottom.plot(range(100), mean, linestyle=styles[i], color=colour(i), linewidth=1.6)
            line.set_label(name)
        top.axhline(level, color=ink(), linewidth=1, linestyle=(0, (2, 3)))
        top.set(title="Loss", ylabel="loss (nats)", ylim=(2.5, 4.6))
        bottom.set(title="How far a weight moves on average", xlabel="training step", yscale="log", ylim=(0.01, 5))
        bottom.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
        bottom.set_ylabel("in units of the peak lr")
        canvas.legend(loc="outside lower center", fontsize=9, ncols=2)

    alt = (
        f"Two charts of the first hundred training steps, {len(seeds)} seeds. Loss: with all three measures it falls "
        f"to {statistics.mean(ends['all three']):.1f}, without clipping to a little more; without warm-up or without "
        f"bias correction it stays near {statistics.mean(ends['no bias correction']):.1f}. Step size: with warm-up it "
        "starts at one fiftieth and rises; without warm-up it starts at 1 and falls; without bias correction it is "
        "three times that of all three at first, and more later."
    )
    texts = {f"end_{name}": _span(values) for name, values in ends.items()}
    texts |= {f"least_{name}": f"{n:.2f}" for name, n in least.items()}

    def pairs(name: str, values: dict[str, list]):
        return zip(values["all three"], values[name], strict=True)

    return draw(paint, alt, size=(6.4, 5.8)), texts | {
        "level": f"{level:.2f}",
        "guess": f"{math.log(corpus()[1].vocab_size):.2f}",
        "V": f"{corpus()[1].vocab_size}",
        "moved_first": f"{statistics.mean(m[0] for m in moves['no warm-up']):.2f}",
        "moved_ratio": _span([bare[0] / full[0] for full, bare in pairs("no bias correction", moves)]),
        "gaps": ", ".join(_minus(f"{bare - full:+.2f}") for full, bare in pairs("no clipping", ends)),
        "moved_later": _span(later),
        "moved_max": f"{max(max(m) for m in moves['all three']):.2f}",
        "norm_first": _span([run[1][0] for run in found["all three"]], 1),
        "norm_max": f"{max(max(run[1][10:]) for run in found['all three']):.0f}",
        "norm_end": _span([statistics.median(run[1][-20:]) for run in found["all three"]], 1),
        "parameters": f"{sum(p.numel() for p in small_gpt(0).parameters()):,}",
    }


def scales(seed: int = 0, steps: int = 60) -> dict[str, str]:
    """The loss multiplied by a constant: SGD and Adam after some steps."""

    def run(make, scale: float) -> float:
        model, stream, values = small_gpt(seed), batches(seed, B=8), []
        optimizer = make(model.parameters())
        for _ in range(steps):
            inputs, labels = next(stream)
            loss = losses.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            (scale * loss).backward()
            optimizer.step()
            values.append(loss.item())
        return _end(values)

    makers = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.3),
        "adam": functools.partial(optim.AdamW, lr=0.002, weight_decay=0.0),
    }
    with one_thread():
        found = {name: [run(make, scale) for scale in (0.001, 1.0, 1000.0)] for name, make in makers.items()}
    adam, sgd = found["adam"], found["sgd"]
    claim(max(adam) - min(adam) < 0.1, f"Adam does not see the scale: {adam}")
    claim(sgd[0] > 4.4 and not sgd[2] < 10, f"SGD does: {sgd}")
    names = ("small", "one", "large")
    return {
        f"{kind}_{n}": f"{v:.2f}".replace("nan", "NaN")
        for kind in found
        for n, v in zip(names, found[kind], strict=True)
    }


# --- clipping, and one bad batch -----------------------------------------------------------------------------------


def clipped() -> dict[str, str]:
    """(1, 10) shortened to 1, and cut at 1; then the gradient of a fresh GPT, 1,000 times too large."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, 10.0])
    norm = optim.clip_gradients([p], 1.0)
    texts = {"clip_norm": f"{norm:.2f}"} | {f"clip_{i}": f"{n:.3f}" for i, n in enumerate(p.grad.tolist())}

    model = small_gpt(0)
    inputs, labels = next(batches(0))
    with one_thread():
        (1000 * losses.cross_entropy(model(inputs), labels)).backward()
    gradients = [p.grad.flatten().clone() for p in model.parameters()]
    whole = torch.cat(gradients)
    each = torch.cat([g * min(1.0, 1 / g.norm().item()) for g in gradients])
    generator = model.parameters()
    optim.clip_gradients(generator, 1.0)
    once = torch.cat([p.grad.flatten() for p in model.parameters()])
    texts |= {
        "cos_norm": f"{_cosine(once, whole):.3f}",
        "cos_value": f"{_cosine(whole.clamp(-1, 1), whole):.2f}",
        "cos_each": f"{_cosine(each, whole):.2f}",
        "norm_each": f"{each.norm():.1f}",
        "norm_used_up": f"{optim.clip_gradients(generator, 1.0):g}",
        "n_tensors": f"{len(gradients)}",
    }
    return texts


def one_number() -> dict[str, str]:
    """What one bad gradient does to a single weight: 50 gradients of 1, the bad one, then 1,000 of 1; lr is 1."""
    texts = {}
    for name, bad in {"1e3": 1e3, "1e22": 1e22, "nan": math.nan}.items():
        p = nn.Parameter(torch.zeros(1))
        adam, moved = optim.AdamW([p], lr=1.0, weight_decay=0.0), []
        for g in [1.0] * 50 + [bad] + [1.0] * 1000:
            before = p.item()
            p.grad = torch.full_like(p, g)
            adam.step()
            moved.append(before - p.item())
        v = adam.state[p]["exp_avg_sq"].item()
        row = {"bad": moved[50], "after": moved[150], "later": moved[-1], "v": v}
        names = {math.inf: "∞"}
        texts |= {
            f"one_{k}_{name}": "NaN" if math.isnan(n) else names.get(n, f"{n:.2g}" if n < 1 else f"{n:,.0f}")
            for k, n in row.items()
        }
    claim(texts["one_v_1e22"] == "∞" and texts["one_later_1e22"] == "0", "v overflows and the weight stands still")
    return texts


def bad_batch(at: int = 40, seeds: tuple[int, ...] = (0, 1, 2)) -> tuple[Figure, dict[str, str]]:
    """The loss of one batch is 1,000 times too large."""
    base = Recipe(peak=0.002, warmup=20, bad_step=at)
    recipes = {
        "clipped to 1.0": base,
        "not clipped, betas 0.9, 0.999": replace(base, max_norm=None),
        "not clipped, betas 0.9, 0.95": replace(base, max_norm=None, betas=(0.9, 0.95)),
    }
    with one_thread():
        found = {name: [train(recipe, seed) for seed in seeds] for name, recipe in recipes.items()}
    before = [statistics.mean(run[0][at - 10 : at]) for runs in found.values() for run in runs]
    ends = {name: [_end(run[0]) for run in runs] for name, runs in found.items()}
    clip, slow, fast = ends.values()
    claim(max(clip) < min(before) - 0.2, f"with clipping the loss goes on falling: {before}, {ends}")
    claim(min(slow + fast) > min(before), f"without it nothing is learned in the 60 steps after: {before}, {ends}")
    moves = {name: [run[2] for run in runs] for name, runs in found.items()}
    frozen = [_end(m) for m in moves["not clipped, betas 0.9, 0.999"]]
    usual = [_end(m) for m in moves["clipped to 1.0"]]

    def paint(canvas):
        top, bottom = canvas.subplots(2, 1, sharex=True, height_ratios=[1.2, 1])
        for i, (name, runs) in enumerate(found.items()):
            style = ("-", "--", "-.")[i]
            for run in runs:
                (line,) = top.plot(range(100), run[0], style, color=colour(i), linewidth=1)
            mean = [statistics.mean(values) for values in zip(*moves[name], strict=True)]
            bottom.plot(range(100), mean, style, color=colour(i), linewidth=1.6)
            line.set_label(name)
        for ax in (top, bottom):
            ax.axvline(at, color=ink(), linewidth=1, linestyle=":")
        top.set(title="Loss", ylabel="loss (nats)", ylim=(2.4, 5))
        bottom.set(title="How far a weight moves on average", xlabel="training step", yscale="log", ylim=(0.01, 2))
        bottom.set_yticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
        bottom.set_ylabel("in units of the peak lr")
        canvas.legend(loc="outside lower center", fontsize=9, ncols=1)

    alt = (
        f"Loss and step size; at step {at}, a dotted line, one batch has a loss 1,000 times too large. With "
        "clipping nothing is seen. Without, the loss jumps up and then stays flat, because the steps of the weights "
        "have become a hundred times smaller with beta2 = 0.999; with 0.95 they recover slowly."
    )
    texts = {f"bad_{name}": _span(values) for name, values in zip(("clip", "slow", "fast"), ends.values(), strict=True)}
    peaks = [max(run[0][at + 1 :]) for run in found["not clipped, betas 0.9, 0.999"]]
    return draw(paint, alt, size=(6.4, 5.6)), texts | {
        "bad_before": _span(before),
        "bad_jump": _span(peaks, 1),
        "bad_norm": f"{min(run[1][at] for run in found['clipped to 1.0']):,.0f}",
        "frozen": _span(frozen, 3),
        "usual": _span(usual),
    }


# --- a NaN, and where it comes from --------------------------------------------------------------------------------


def sequence_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of each sequence over its counted labels: (B, T, V), (B, T) -> (B,). 0 / 0 where none counts."""
    counted = labels != losses.IGNORE
    log_p = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # (B, T)
    return -(log_p * counted).sum(1) / counted.sum(1)


def step_if_finite(optimizer: torch.optim.Optimizer, parameters: list[Tensor], max_norm: float = 1.0) -> Tensor:
    """Clip, and make the step only if the norm is a number; returns the norm, to be written down."""
    norm = optim.clip_gradients(parameters, max_norm)
    if norm.isfinite():
        optimizer.step()
    return norm


def nan_run(guard: bool, restore: bool = False, at: int = 30, steps: int = 60, seed: int = 0):
    """Train with one batch in which sequence 11 has no label that counts; losses, the model, and that batch."""
    model, stream, log = small_gpt(seed), batches(seed), []
    parameters = list(model.parameters())
    optimizer = optim.AdamW(parameters, lr=0.002, weight_decay=0.0)
    for step in range(steps):
        inputs, labels = next(stream)
        if step == at:
            labels = labels.clone()
            labels[11] = losses.IGNORE
            kept = copy.deepcopy(model.state_dict()), (inputs, labels)
        loss = sequence_losses(model(inputs), labels).mean()
        optimizer.zero_grad()
        loss.backward()
        if guard:
            norm = step_if_finite(optimizer, parameters)
        else:
            norm = optim.clip_gradients(parameters, 1.0)
            optimizer.step()
        if step == at and restore:
            model.load_state_dict(kept[0])
        log.append((loss.item(), norm.item()))
    return model, optimizer, log, kept[1]


@functools.cache
def nan_runs():
    with one_thread():
        return {
            "step made": nan_run(guard=False),
            "step made, then the weights restored": nan_run(guard=False, restore=True),
            "step skipped": nan_run(guard=True),
        }


def poisoned(at: int = 30) -> dict[str, str]:
    """What a NaN leaves behind."""
    runs = nan_runs()
    model, optimizer, log, _ = runs["step made"]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    moments = torch.cat([s["exp_avg_sq"].flatten() for s in optimizer.state.values()])
    claim(all(math.isnan(loss) for loss, _ in log[at:]), "all later losses are NaN")
    restored = [loss for loss, _ in runs["step made, then the weights restored"][2]]
    claim(math.isfinite(restored[at + 1]) and math.isnan(restored[at + 2]), "one good loss, then NaN again")
    skipped = [loss for loss, _ in runs["step skipped"][2]]
    claim([math.isnan(n) for n in skipped] == [i == at for i in range(len(skipped))], "only the bad loss is NaN")
    return {
        "nan_weights": f"{100 * weights.isnan().double().mean():.0f} %",
        "nan_moments": f"{100 * moments.isnan().double().mean():.0f} %",
        "norm_before": f"{log[at - 1][1]:.2f}",
        "norm_nan": f"{log[at][1]}".replace("nan", "NaN"),
        "loss_nan": f"{log[at][0]}".replace("nan", "NaN"),
        "loss_before": f"{log[at - 1][0]:.2f}",
        "restored_1": f"{restored[at + 1]:.2f}",
        "skipped_end": f"{_end(skipped, 10):.2f}",
    }


def saved_batch() -> tuple[GPT, Tensor, Tensor]:
    """The model and the batch of the step that was skipped."""
    model, _, _, (inputs, labels) = nan_runs()["step skipped"]
    return model, inputs, labels


def find(is_bad: Callable[[list[int]], bool], rows: list[int]) -> int:
    """The row that spoils the batch, by halves. `is_bad` runs the model on some rows only."""
    while len(rows) > 1:
        first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        rows = first if is_bad(first) else second
    return rows[0]


def bisected(B: int = 16, T: int = 6, D: int = 8, empty: int = 5) -> dict[str, str]:
    """A finite loss with a NaN gradient: one sequence is all padding, the loss leaves it out, attention is naive."""
    x = torch.randn(B, T, D, generator=rng(0))
    is_token = torch.ones(B, T, dtype=torch.bool)
    is_token[empty] = False
    mask = attention.causal_mask(T) & attention.padding_mask(is_token)[:, 0]  # (B, T, T)
    passes, found = [], {}

    def backward(rows: list[int]) -> tuple[float, float]:
        passes.append(len(rows))
        with weights_from(0):
            value = nn.Linear(D, D)
        rows = torch.tensor(rows)
        out = naive_attention(x[rows], x[rows], value(x[rows]), mask[rows])
        loss = out[is_token[rows]].square().mean()
        loss.backward()
        return loss.item(), value.weight.grad.norm().item()

    found["loss"], found["norm"] = backward(list(range(B)))
    row = find(lambda rows: math.isnan(backward(rows)[1]), list(range(B)))
    claim(row == empty and math.isfinite(found["loss"]) and math.isnan(found["norm"]), "the bisection finds it")
    return {
        "bisect_loss": f"{found['loss']:.2f}",
        "bisect_row": f"{row}",
        "bisect_passes": f"{len(passes) - 1}",
        "bisect_rows": ", ".join(str(n) for n in passes[1:]),
    }


# --- what it costs -------------------------------------------------------------------------------------------------


def costs(n: int = 4_000_000, repeats: int = 9) -> dict[str, str]:
    """Bytes of a training state, counted and measured; time of a step on n numbers, beside one pass over them."""
    model = small_gpt(0)
    adam = optim.AdamW(model.parameters())
    inputs, labels = next(batches(0))
    losses.cross_entropy(model(inputs), labels).backward()
    adam.step()
    tensors = [t for p in model.parameters() for t in (p, p.grad)]
    tensors += [t for state in adam.state.values() for t in state.values() if isinstance(t, Tensor)]
    parameters = sum(p.numel() for p in model.parameters())
    measured = sum(t.nbytes for t in tensors) / parameters
    claim(measured == 16, f"16 bytes for each parameter, measured {measured}")
    gpt2 = sum(p.numel() for p in _gpt2().parameters())
    p = nn.Parameter(torch.zeros(n))
    p.grad = torch.randn(n, generator=rng(0))
    other = torch.ones(n)
    steps = {
        "ours": optim.AdamW([p]).step,
        "fused": torch.optim.AdamW([p], fused=True).step,
        "pass": lambda: other.mul_(0.999),
    }
    spent = {name: [] for name in steps}
    with one_thread():
        for _ in range(repeats):
            for name, step in steps.items():
                start = time.thread_time()
                step()
                spent[name].append(time.thread_time() - start)
    middle = {name: statistics.median(values[1:]) for name, values in spent.items()}
    claim(middle["fused"] < middle["ours"], "fewer passes take less time")
    return {
        "gpt2": f"{gpt2:,}",
        "gpt2_gb": f"{16 * gpt2 / 1e9:.2f} GB",
        "gpt2_state": f"{8 * gpt2 / 1e9:.2f} GB",
        "bytes": f"{measured:g}",
        "gpt2_traffic": f"{28 * gpt2 / 1e9:.1f} GB",
        "plain_traffic": f"{80 * gpt2 / 1e9:.1f} GB",
        "time_ours": f"{middle['ours'] / middle['pass']:.0f}",
        "time_fused": f"{middle['fused'] / middle['pass']:.1f}",
    }


# --- what breaks ---------------------------------------------------------------------------------------------------


def mistakes(steps: int = 50, seed: int = 0) -> dict[str, str]:
    """What a reader of numbers sees after each mistake."""
    model, stream = small_gpt(seed), batches(seed)
    adam = optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.0)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    with one_thread():
        for step in range(steps):
            adam.param_groups[0]["lr"] = 0.002 * step / 20 if step < 20 else 0.002  # the mistake: 0 at step 0
            inputs, labels = next(stream)
            adam.zero_grad()
            losses.cross_entropy(model(inputs), labels).backward()
            adam.step()
            if step == 0:
                claim(
                    start.equal(nn.utils.parameters_to_vector(model.parameters())), "lr 0 at step 0 leaves all weights"
                )
    correct = 1 - adam.param_groups[0]["betas"][1] ** steps
    v = torch.cat([s["exp_avg_sq"].flatten() for s in adam.state.values()]) / correct
    v = v[v > 0]  # characters that have not come up have none
    ratios = {scale: (v.sqrt() * scale + 1e-8) / (v * scale**2 + 1e-8).sqrt() for scale in (1.0, 0.001)}
    return {
        "eps_typical": f"{v.sqrt().median():.4f}",
        "eps_share": f"{100 * (ratios[1.0] < 0.9).double().mean():.0f} %",
        "eps_small": f"{100 * ratios[0.001].median():.0f} %",
        "norm_weight": f"{(1 - 0.001 * 0.1) ** 10_000:.2f}",
    }


def too_high(seeds: tuple[int, ...] = (0, 1)) -> dict[str, str]:
    """Adam at a learning rate that is far too high, without clipping or warm-up."""
    with one_thread():
        runs = [train(Recipe(peak=0.1, warmup=0, max_norm=None), seed, steps=60) for seed in seeds]
    claim(min(max(run[0]) for run in runs) > math.log(corpus()[1].vocab_size) + 0.3, "the loss first rises")
    ends = [_end(run[0]) for run in runs]
    claim(all(abs(n - _frequencies()) < 0.2 for n in ends), f"and then stays at the frequencies: {ends}")
    return {"high_max": _span([max(run[0]) for run in runs], 1), "high_end": _span(ends)}


def numbers() -> dict[str, str]:
    """The texts of all experiments that have no figure."""
    texts = {}
    for experiment in (valley, by_hand, decay, decayed_bias, scales, clipped, one_number, poisoned, bisected, costs):
        texts |= experiment()
    return texts | mistakes() | too_high()
