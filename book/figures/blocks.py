"""Chapter 5's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.flop_counter import FlopCounterMode

from tfmlib import attention, blocks, heads, positions
from tfmlib.course.meters import kept_tensors

from . import Figure, cells, claim, colour, draw, ink, one_thread, rng, weights_from


def _power(n: float) -> str:
    """The next power of ten above a small number, as text: 10⁻⁸."""
    return "10" + f"{math.floor(math.log10(n)) + 1}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _minus(text: str) -> str:
    """A number for the running text, with a true minus sign."""
    return text.replace("-", "−")


def _span(values: list[float], digits: int = 2) -> str:
    """From the least to the largest: 0.64–0.71."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low}–{high}"


# --- norms by hand -----------------------------------------------------------------------------------------------


def by_hand(x: Tensor) -> dict[str, str]:
    """The steps of LayerNorm and RMSNorm for a token of four numbers, and what the unbiased variance would give."""
    centred, C = x - x.mean(), len(x)
    variance, mean_square = centred.square().mean(), x.square().mean()
    unbiased = centred.square().sum() / (C - 1)
    with torch.no_grad():
        layer, rms = blocks.LayerNorm(C)(x), blocks.RMSNorm(C)(x)
    rows = {
        "centred": [_minus(f"{n:g}") for n in centred.tolist()],
        "layer": [_minus(f"{n:.3f}") for n in layer.tolist()],
        "rms": [f"{n:.0f}" for n in rms.tolist()],
    }
    texts = {f"{name}{i}": text for name, texts in rows.items() for i, text in enumerate(texts)}
    return texts | {
        "mean": f"{x.mean():g}",
        "variance": f"{variance:g}",
        "root": f"{variance.sqrt():.3f}",
        "mean_square": f"{mean_square:g}",
        "root_mean_square": f"{mean_square.sqrt():g}",
        "unbiased": f"{unbiased:g}",
        "unbiased0": f"{centred[0] / unbiased.sqrt():g}",
    }


def naive_rms(x: Tensor, eps: float = 1e-5) -> Tensor:
    """RMSNorm in x's own dtype: the squares of half precision overflow."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def eps_outside(x: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm with eps added to the root and not under it."""
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, correction=0) + eps)


def eps_after_sqrt(x: Tensor, eps: float = 1e-5) -> Tensor:
    """The same written with a square root, whose slope at 0 is infinite."""
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0).sqrt() + eps)


def precision(C: int = 1024, seed: int = 0) -> dict[str, str]:
    """Half precision, and the place of eps."""
    largest = torch.finfo(torch.float16).max
    half = {n: torch.tensor([n, 0, 0, 0], dtype=torch.float16) for n in (255, 256)}
    x = torch.randn(64, C, generator=rng(seed))
    exact = blocks.RMSNorm(C).double()(x.bfloat16().double()).detach()
    worst = {
        name: ((out.double() - exact) / exact).abs().max().item()
        for name, out in (("naive", naive_rms(x.bfloat16())), ("ours", blocks.RMSNorm(C)(x.bfloat16()).detach()))
    }
    claim(worst["naive"] > 1.5 * worst["ours"], "bfloat16 without float32 is less exact")
    unit, constant = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64), torch.ones(4)
    small = (unit / 1000).float()
    gradients = {}
    for name, norm in (("inside", blocks.LayerNorm(4)), ("outside", eps_outside), ("sqrt", eps_after_sqrt)):
        leaf = constant.clone().requires_grad_()
        norm(leaf)[0].backward()
        gradients[name] = leaf.grad
    claim(bool(gradients["sqrt"].isnan().all()), "sqrt(variance) + eps gives NaN gradients for a constant token")
    return {
        "fp16_max": f"{largest:,.0f}",
        "naive_255": f"{naive_rms(half[255])[0].item():g}",
        "naive_256": f"{naive_rms(half[256])[0].item():g}",
        "ours_256": f"{blocks.RMSNorm(4)(half[256])[0].item():g}",
        "bf16_naive": f"{100 * worst['naive']:.1f} %",
        "bf16_ours": f"{100 * worst['ours']:.1f} %",
        "eps_gap": _power((eps_outside(unit) - blocks.LayerNorm(4)(unit)).abs().max().item()),
        "small_inside": f"{blocks.LayerNorm(4)(small)[0].item():.2f}",
        "small_outside": f"{eps_outside(small)[0].item():.2f}",
        "gradient_inside": f"{gradients['inside'].abs().max():.0f}",
        "gradient_outside": f"{gradients['outside'].abs().max():,.0f}",
        "eps_fp16": f"{torch.tensor(1e-12).half().item():g}",
    }


# --- the MLP's activations ---------------------------------------------------------------------------------------


def activations() -> tuple[Figure, dict[str, str]]:
    """ReLU, GELU and SiLU, and what the tanh form of GELU changes."""
    x = torch.linspace(-4, 4, 801, dtype=torch.float64)
    phi = (1 + torch.erf(x / math.sqrt(2))) / 2
    tanh = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    claim(torch.allclose(x * phi, F.gelu(x)), "GELU is x times Phi(x)")
    claim(torch.allclose(tanh, F.gelu(x, approximate="tanh")), "the tanh form is the formula given")
    difference = (tanh - F.gelu(x)).abs()
    worst = difference.argmax()

    def paint(canvas):
        left, right = canvas.subplots(1, 2, width_ratios=[1.2, 1])
        for name, function, style in (("ReLU", F.relu, ":"), ("GELU", F.gelu, "-"), ("SiLU", F.silu, "--")):
            left.plot(x, function(x), style, label=name)
        left.set(title="Three activations", xlabel="x", ylabel="activation of x", ylim=(-0.5, 4))
        left.legend(fontsize=9)
        right.plot(x, 1e4 * (tanh - F.gelu(x)), color=colour(1))
        right.set(title="GELU: tanh form minus exact", xlabel="x", ylabel="difference (1/10,000)")

    alt = (
        "Left: ReLU, GELU and SiLU against x. All are near zero for very negative x and near x for large x; GELU and "
        "SiLU dip below zero and have no corner. Right: the tanh form of GELU differs by at most "
        f"{difference.max():.5f}."
    )
    texts = {
        "gelu_worst": f"{difference[worst]:.5f}",
        "gelu_at": f"{x[worst].abs():.1f}",
        "gelu_1": f"{F.gelu(torch.tensor(1.0)):.3f}",
        "gelu_m1": _minus(f"{F.gelu(torch.tensor(-1.0)):.3f}"),
        "phi_1": f"{phi[500]:.3f}",
    }
    return draw(paint, alt, size=(6.6, 3.0)), texts


# --- who mixes what ----------------------------------------------------------------------------------------------


def jacobians(T: int = 4, C: int = 4, H: int = 2, seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """|d out[t, c] / d in[s, c']| of attention with fixed weights, of the MLP, and of a whole attention layer."""
    generator = rng(seed)
    q, k, x = torch.randn(3, T, C, generator=generator, dtype=torch.float64)
    mask = attention.causal_mask(T)
    with weights_from(seed):
        mlp, layer = blocks.MLP(C, 4 * C).double(), heads.MultiHeadAttention(C, H).double()
    maps = {
        "attention on the values": lambda v: attention.scaled_dot_product_attention(q, k, v, mask),
        "MLP": mlp,
        "attention layer": lambda x: layer(x[None], mask=mask)[0],
    }
    found = {name: torch.autograd.functional.jacobian(f, x).abs() for name, f in maps.items()}  # (T, C, T, C)
    fixed, per_token, whole = found.values()
    other_feature, other_token = ~torch.eye(C, dtype=torch.bool), ~torch.eye(T, dtype=torch.bool)
    a = attention.attention_weights(q, k, mask)
    claim(bool((fixed.permute(0, 2, 1, 3)[..., other_feature] == 0).all()), "fixed weights mix no features, exactly")
    claim(torch.allclose(fixed, torch.einsum("ts,cd->tcsd", a, torch.eye(C).double())), "each block is A[t,s] times I")
    claim(bool((per_token.permute(1, 3, 0, 2)[..., other_token] == 0).all()), "the MLP mixes no tokens, exactly")
    claim(bool((whole.permute(1, 3, 0, 2)[..., mask] > 0).all()), "the whole layer mixes both")

    def paint(canvas):
        for i, (ax, (name, jacobian)) in enumerate(zip(canvas.subplots(1, 3), found.items(), strict=True)):
            table = jacobian.reshape(T * C, T * C)
            cells(ax, 2 * table / table.max(), name, "input: token", "" if i else "output: token")
            middle = [t * C + (C - 1) / 2 for t in range(T)]
            ax.set_xticks(middle, range(T))
            ax.set_yticks(middle, range(T))
            for t in range(1, T):
                for line in (ax.axhline, ax.axvline):
                    line(t * C - 0.5, color=ink(), linewidth=0.6)

    alt = (
        f"Three square tables of {T} by {T} blocks, one for each pair of tokens, each with {C} by {C} features. "
        "Attention on the values: blocks below and on the diagonal, and in each only its own diagonal is shaded. "
        "MLP: only the blocks on the diagonal, full. A whole attention layer: full blocks below and on the diagonal."
    )
    nonzero = {name: int((jacobian != 0).sum()) for name, jacobian in found.items()}
    texts = {
        "cells_attention": f"{nonzero['attention on the values']}",
        "cells_mlp": f"{nonzero['MLP']}",
        "cells_layer": f"{nonzero['attention layer']}",
        "cells_all": f"{(T * C) ** 2}",
    }
    return draw(paint, alt, size=(6.6, 2.8)), texts


# --- stacks of blocks --------------------------------------------------------------------------------------------


class NoResidualBlock(blocks.PreNormBlock):
    """A pre-norm block without its two additions: every branch replaces the stream."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mlp(self.norm2(self.attention(self.norm1(x), mask=mask)))


class NormOnStreamBlock(blocks.PreNormBlock):
    """A common mistake: the normalised x, and not x, goes on beside the branch."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x)
        x = self.norm2(x + self.attention(x, mask=mask))
        return x + self.mlp(x)


BLOCKS = {
    "pre-norm": blocks.PreNormBlock,
    "post-norm": blocks.PostNormBlock,
    "no residual": NoResidualBlock,
    "no residual, no norm": NoResidualBlock,
    "norm on the stream": NormOnStreamBlock,
}


def _block(kind: str, C: int, H: int) -> nn.Module:
    """One block of this kind, with biases and F = 4C."""
    norm = nn.Identity if kind == "no residual, no norm" else partial(blocks.LayerNorm, C)
    return BLOCKS[kind](heads.MultiHeadAttention(C, H, bias=True), blocks.MLP(C, 4 * C), norm(), norm())


class Stack(nn.Module):
    """L blocks of one kind with a causal mask, and a last norm where the kind has one: (B, T, C) -> (B, T, C)."""

    def __init__(self, kind: str, L: int, C: int, H: int, xavier: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(_block(kind, C, H) for _ in range(L))
        self.norm = nn.Identity() if kind in ("post-norm", "no residual, no norm") else blocks.LayerNorm(C)
        for module in self.modules():
            if xavier and isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def stream(self, x: Tensor) -> list[Tensor]:
        """What enters the first block and what leaves each."""
        mask, states = attention.causal_mask(x.shape[1]), [x]
        for block in self.blocks:
            states.append(block(states[-1], mask=mask))
        return states

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stream(x)[-1])


@contextlib.contextmanager
def _road_only(stack: Stack) -> Iterator[None]:
    """No gradient enters a branch: what arrives at the bottom has come down the blocks' residual road alone."""
    parts = [part for block in stack.blocks for part in (block.attention, block.mlp)]
    hooks = [part.register_forward_hook(lambda module, args, out: out.detach()) for part in parts]
    hooks.append(stack.norm.register_forward_hook(lambda module, args, out: args[0]))  # stands outside the blocks
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _norm_of_gradients(module: nn.Module) -> float:
    return math.sqrt(sum(p.grad.square().sum().item() for p in module.parameters()))


def _cosine(a: Tensor, b: Tensor) -> float:
    return F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def _start(kind: str, L: int, seed: int, xavier: bool = False, C: int = 64, H: int = 4, V: int = 32) -> dict:
    """Random tokens through a fresh stack, random labels, one backward pass."""
    generator = rng(seed)
    x = torch.randn(2, 16, C, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(V, (2, 16), generator=generator)
    with weights_from(seed):
        stack, head = Stack(kind, L, C, H, xavier).double(), nn.Linear(C, V).double()
    states = stack.stream(x)
    states[-1].retain_grad()
    out = stack.norm(states[-1])
    F.cross_entropy(head(out).flatten(0, 1), labels.flatten()).backward()
    top = states[-1].grad
    unit = F.normalize(out.detach(), dim=-1)
    alike = unit @ unit.mT  # (B, T, T)
    found = {
        "stream": states[-1].square().mean().sqrt().item(),
        "first": _norm_of_gradients(stack.blocks[0]),
        "last": _norm_of_gradients(stack.blocks[-1]),
        "whole": x.grad.norm().item() / top.norm().item(),
        "same": _cosine(x.grad, top),
        "alike": alike[:, ~torch.eye(16, dtype=torch.bool)].mean().item(),
    }
    if not kind.startswith("no residual"):
        with _road_only(stack):
            (road,) = torch.autograd.grad(stack(x), x, top)
        found["road"] = road.norm().item() / top.norm().item()
    return found


def depth(
    depths: tuple[int, ...] = (2, 6, 12, 24, 48), seeds: tuple[int, ...] = (0, 1, 2, 3)
) -> tuple[Figure, dict[str, str]]:
    """At the start of training, against the number of layers: size of the stream, and gradients."""
    kinds = list(BLOCKS)[:4]
    with one_thread():
        found = {kind: {L: [_start(kind, L, seed) for seed in seeds] for L in depths} for kind in kinds}
        found["Xavier"] = {L: [_start("post-norm", L, seed, xavier=True) for seed in seeds] for L in depths}

    def every(kind: str, what: str, L: int) -> list[float]:
        return [run[what] for run in found[kind][L]]

    def span(kind: str, what: str, L: int, digits: int = 2) -> str:
        return _span(every(kind, what, L), digits)

    pre, post, none, bare = kinds
    low, high = depths[0], depths[-1]
    claim(all(abs(n - 1) < 1e-9 for L in depths for n in every(pre, "road", L)), "the road of pre-norm is 1")
    claim(max(every(post, "road", high)) < 0.2 < 0.8 < min(every(post, "road", low)), "the road of post-norm falls")
    claim(max(every("Xavier", "road", high)) < 1e-6, "with Xavier's weights the road is closed")
    for kind in (pre, post):
        sizes = [n for L in depths for n in every(kind, "first", L)]
        claim(min(sizes) > 0.4 and max(sizes) < 2, f"the first gradient of {kind} keeps its size")
    claim(max(every(bare, "first", 12)) < 1e-9, "without residual and norm the first gradient vanishes")
    claim(min(n for L in depths[1:] for n in every(none, "alike", L)) > 0.98, "without residuals tokens become alike")
    claim(max(every(pre, "last", high)) < 0.75 * min(every(pre, "last", low)), "pre-norm's last gradient falls")
    claim(min(every(post, "last", high)) > 0.9 * max(every(pre, "last", low)), "post-norm's last gradient stays")
    claim(min(every(pre, "same", high)) > 0.2 > max(every(post, "same", high)), "the signal is kept in pre-norm")

    def paint(canvas):
        axes = canvas.subplots(2, 2)

        def lines(ax, what, kinds, title, label):
            for kind in kinds:
                i = list(found).index(kind)
                style = ("o-", "s--", "^-.", "v:", "D:")[i]
                name = "post-norm, larger weights" if kind == "Xavier" else kind
                for seed in range(len(seeds)):
                    ax.plot(depths, [every(kind, what, L)[seed] for L in depths], color=colour(i), lw=0.7, alpha=0.5)
                middle = [statistics.geometric_mean(every(kind, what, L)) for L in depths]
                ax.plot(depths, middle, style, color=colour(i), label=name, markersize=5)
            ax.set(title=title, xlabel="layers L", ylabel=label, xscale="log")
            ax.set_xticks(depths, depths)
            ax.set_xticks([], minor=True)

        lines(axes[0, 0], "stream", (pre, post), "Size of the stream at the top", "root mean square")
        axes[0, 0].set_ylim(0, 3)
        lines(axes[0, 1], "first", kinds, "Gradient of the first layer", "norm, all weights")
        axes[0, 1].set(yscale="log", ylim=(1e-8, 1e2))
        lines(axes[1, 0], "road", (pre, post, "Xavier"), "Gradient down the road alone", "part that arrives")
        axes[1, 0].set(yscale="log", ylim=(1e-10, 10))
        lines(axes[1, 1], "last", (pre, post), "Gradient of the last layer", "norm, all weights")
        axes[1, 1].set_ylim(0, 1.5)
        handles = {}
        for ax in axes.flat:
            handles |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        canvas.legend(handles.values(), handles, loc="outside lower center", fontsize=9, ncols=2)

    alt = (
        f"Four charts against the number of layers, from {low} to {high}. The stream of pre-norm grows to "
        f"{statistics.mean(every(pre, 'stream', high)):.1f}, that of post-norm stays at 1. The first layer's gradient "
        "keeps its size in pre-norm and post-norm, jumps about without residuals, and vanishes without residuals and "
        "norms. The part that comes down the road alone is 1 in pre-norm and falls in post-norm, faster with larger "
        "weights. The last layer's gradient falls in pre-norm and does not in post-norm."
    )
    v = statistics.mean(every(pre, "stream", high)) ** 2 - 1
    texts = {
        "stream_pre": f"{statistics.mean(every(pre, 'stream', high)):.1f}",
        "stream_post": f"{statistics.mean(every(post, 'stream', high)):.1f}",
        "branch_share": f"{v / 2 / high:.2f}",
        "first_pre": span(pre, "first", high),
        "first_post": span(post, "first", high),
        "first_none": span(none, "first", high, 1),
        "first_bare": _power(max(every(bare, "first", 12))),
        "road_post": span(post, "road", high),
        "road_xavier": _power(max(every("Xavier", "road", high))),
        "last_pre_low": span(pre, "last", low),
        "last_pre": span(pre, "last", high),
        "last_post_low": span(post, "last", low),
        "last_post": span(post, "last", high),
        "same_pre": span(pre, "same", high),
        "same_post": span(post, "same", high),
        "alike_none": f"{min(every(none, 'alike', 6)):.2f}",
        "alike_pre": span(pre, "alike", 6),
    }
    return draw(paint, alt, size=(6.6, 5.8)), texts


# --- a small language, and who learns it --------------------------------------------------------------------------
#
# Each token is decided by the one two places before it, except that one in ten is random.

V, NOISE = 16, 0.1


def sentences(n: int, T: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and labels, (n, T) both."""
    follows = torch.randperm(V, generator=rng(0))
    ids = torch.randint(V, (n, T + 1), generator=generator)
    random = torch.rand(n, T + 1, generator=generator) < NOISE
    for t in range(2, T + 1):
        ids[:, t] = torch.where(random[:, t], ids[:, t], follows[ids[:, t - 2]])
    return ids[:, :-1], ids[:, 1:]


def floor(T: int) -> float:
    """The least mean loss that a model can reach, in nats: the first label is a guess, the others are nearly known."""
    likely, rare = 1 - NOISE + NOISE / V, NOISE / V
    later = -likely * math.log(likely) - (V - 1) * rare * math.log(rare)
    return (math.log(V) + (T - 1) * later) / T


class Model(nn.Module):
    """Embedding and positions, a stack, and a linear layer to the logits."""

    def __init__(self, kind: str, L: int = 6, C: int = 32, H: int = 2):
        super().__init__()
        self.embedding, self.stack, self.head = nn.Embedding(V, C), Stack(kind, L, C, H), nn.Linear(C, V)

    def enter(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + positions.sinusoidal(ids.shape[1], self.embedding.embedding_dim)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.stack(self.enter(ids)))


def _road(model: Model, weights: dict, ids: Tensor) -> Tensor:
    """The part of a random gradient that comes down the road alone, for each of the models (S,)."""
    x = model.enter(ids).detach().expand(len(weights["head.bias"]), *ids.shape, -1).clone().requires_grad_()
    stack = {name.removeprefix("stack."): w for name, w in weights.items() if name.startswith("stack.")}
    with _road_only(model.stack):
        out = vmap(lambda w, x: functional_call(model.stack, w, (x,)))(stack, x)
        top = torch.randn(out.shape, generator=rng(1))
        (bottom,) = torch.autograd.grad(out, x, top)
    return bottom.flatten(1).norm(dim=1) / top.flatten(1).norm(dim=1)


def train(kind: str, lr: float, warmup: int, seeds: tuple[int, ...], steps: int = 120, B: int = 8, T: int = 12):
    """Adam on fresh sentences, one model for each seed, all at once: losses (S, steps) and roads (S, some steps)."""
    models = []
    for seed in seeds:
        with weights_from(seed):
            models.append(Model(kind))
    weights, _ = stack_module_state(models)
    generators = [rng(1000 + seed) for seed in seeds]
    optimizer = torch.optim.Adam(weights.values(), lr=lr, foreach=True)

    def loss(weights: dict, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(models[0], weights, (ids,)).flatten(0, 1), labels.flatten())

    losses, roads = [], []
    for step in range(steps + 1):
        ids, labels = (torch.stack(part) for part in zip(*(sentences(B, T, g) for g in generators), strict=True))
        if step % 10 == 0 and kind != "no residual":
            roads.append(_road(models[0], {name: w.detach() for name, w in weights.items()}, ids[0]))
        if step == steps:
            break
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / warmup) if warmup else lr
        each = vmap(loss)(weights, ids, labels)  # (S,)
        optimizer.zero_grad()
        each.sum().backward()
        optimizer.step()
        losses.append(each.detach())
    return torch.stack(losses, dim=1), torch.stack(roads, dim=1) if roads else None


def training(
    high: float = 0.01, low: float = 0.0025, warmup: int = 60, seeds: tuple[int, ...] = (0, 1, 2, 3)
) -> tuple[Figure, dict[str, str]]:
    """Six layers on the small language at two learning rates: losses, and how open the road stays."""
    runs = {  # learning rate, warm-up, line colour and style
        "pre-norm": ("pre-norm", high, 0, 0, "-"),
        "post-norm": ("post-norm", high, 0, 1, "--"),
        "post-norm, warm-up": ("post-norm", high, warmup, 3, "-."),
        "post-norm, low": ("post-norm", low, 0, 1, "--"),
        "no residual": ("no residual", low, 0, 2, ":"),
    }
    with one_thread():
        found = {name: train(kind, lr, warm, seeds) for name, (kind, lr, warm, _, _) in runs.items()}
    last = {name: losses[:, -20:].mean(1) for name, (losses, _) in found.items()}
    ends = {name: (min(values).item(), max(values).item()) for name, values in last.items()}
    guess, T = math.log(V), 12
    for name in ("pre-norm", "post-norm, warm-up", "post-norm, low"):
        claim(ends[name][1] < 2.2, f"{name} learns with every seed, ends {ends[name]}")
    for name in ("post-norm", "no residual"):
        claim(ends[name][0] > 2.5, f"{name} fails with every seed, ends {ends[name]}")
    road = {name: roads for name, (_, roads) in found.items() if roads is not None}
    claim(bool((road["pre-norm"] - 1).abs().max() < 1e-5), "the road of pre-norm is 1")
    claim(road["post-norm"][:, -1].max() < 1e-2 < 0.03 < road["post-norm, warm-up"].min(), "the road closes")

    def paint(canvas):
        axes = canvas.subplots(2, 2, sharex=True, sharey="row", height_ratios=[1.25, 1])
        handles = {}
        for name, (_, lr, _, i, style) in runs.items():
            column = 0 if lr == high else 1
            losses, roads = found[name]
            mean = losses.unfold(1, 10, 10).mean(-1)  # of ten steps
            at = [10 * n + 5.5 for n in range(mean.shape[1])]
            for seed in range(len(seeds)):
                (line,) = axes[0, column].plot(at, mean[seed], style, color=colour(i), linewidth=1.1)
                if roads is not None:
                    steps = [10 * n for n in range(roads.shape[1])]
                    axes[1, column].plot(steps, roads[seed], style, color=colour(i), linewidth=1.1)
            handles.setdefault(name.removesuffix(", low"), line)
        for ax, lr in zip(axes[0], (high, low), strict=True):
            for level in (guess, floor(T)):
                ax.axhline(level, color=ink(), linewidth=1, linestyle=(0, (2, 3)))
            ax.set(title=f"Learning rate {lr:g}: loss", ylim=(0.5, 3.2))
        for ax in axes[1]:
            ax.set(title="Gradient down the road alone", yscale="log", ylim=(1e-8, 5), xlabel="training step")
        axes[0, 0].set_ylabel("loss (nats)")
        axes[1, 0].set_ylabel("part that arrives")
        canvas.legend(handles.values(), handles, loc="outside lower center", fontsize=9, ncols=2)

    alt = (
        f"Loss and open road against training step, {len(seeds)} seeds each. At learning rate {high:g} pre-norm learns "
        f"and its road stays at 1; post-norm without warm-up stays near {guess:.2f} and its road closes; with warm-up "
        f"it learns and the road stays open. At {low:g} post-norm learns without warm-up; the stack without residuals "
        "does not."
    )
    texts = {f"end_{name}": _span(values) for name, values in ends.items()}
    texts |= {
        "guess": f"{guess:.2f}",
        "floor": f"{floor(T):.2f}",
        "road_start": f"{road['post-norm'][:, 0].mean():.2f}",
        "road_10": f"{road['post-norm'][:, 1].max():.2f}",
        "road_20": f"{road['post-norm'][:, 2].max():.2f}",
        "road_end": _power(road["post-norm"][:, -1].max().item()),
        "road_warm": f"{road['post-norm, warm-up'].min():.2f}",
        "road_low": f"{road['post-norm, low'].min():.2f}",
    }
    return draw(paint, alt, size=(6.6, 5.4)), texts


# --- what it costs -----------------------------------------------------------------------------------------------


def _kept(function, x: Tensor, known: Iterable[Tensor]) -> int:
    """How many numbers autograd keeps for the backward pass, those of `known` (the parameters) left out."""
    with kept_tensors(known) as kept:
        function(x)
    return sum(tensor.untyped_storage().nbytes() // tensor.itemsize for tensor in kept)


def _milliseconds(functions: dict, x: Tensor, repeats: int = 15) -> dict[str, float]:
    """Median processor time of a forward call of each function, on one core; the functions take turns."""
    times = {name: [] for name in functions}
    with one_thread(), torch.no_grad():
        for _ in range(repeats):
            for name, function in functions.items():
                start = time.thread_time()
                function(x)
                times[name].append(1e3 * (time.thread_time() - start))
    return {name: statistics.median(spent) for name, spent in times.items()}


def costs(C: int = 256, H: int = 4, T: int = 256) -> dict[str, str]:
    """One pre-norm block with F = 4C, part by part: parameters, multiply-adds, numbers kept, time."""
    with weights_from(0):
        block = _block("pre-norm", C, H)
    x = torch.randn(1, T, C, generator=rng(0), requires_grad=True)
    norms = lambda x: block.norm2(block.norm1(x))  # noqa: E731
    parts = {"norms": norms, "attention": block.attention, "mlp": block.mlp, "block": block}
    modules = {"norms": nn.ModuleList([block.norm1, block.norm2]), **dict(block.named_children()), "block": block}
    parameters = {name: sum(p.numel() for p in modules[name].parameters()) for name in parts}
    counted = {"norms": 4 * C, "attention": 4 * C * C + 4 * C, "mlp": 8 * C * C + 5 * C, "block": 12 * C * C + 13 * C}
    claim(parameters == counted, "a block has 12 C^2 + 13 C parameters")
    flops = {}
    for name, part in parts.items():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            part(x)
        flops[name] = counter.get_total_flops()
    claim(flops["attention"] == 2 * T * (4 * C * C + 2 * T * C), "attention takes 4 C^2 + 2 T C multiply-adds a token")
    claim(flops["mlp"] == 2 * T * 8 * C * C, "the MLP takes 8 C^2 multiply-adds a token")
    kept = {name: _kept(part, x, block.parameters()) / (T * C) for name, part in parts.items()}
    spent = _milliseconds(parts, x)
    with torch.device("meta"):
        small = _block("pre-norm", 768, 12)
        cross = blocks.DecoderBlock(
            *(heads.MultiHeadAttention(512, 8, bias=True) for _ in range(2)),
            blocks.MLP(512, 2048),
            *(blocks.LayerNorm(512) for _ in range(3)),
        )
        gated = {F_: sum(p.numel() for p in blocks.SwiGLU(6, F_).parameters()) for F_ in (16, 24)}
        plain = sum(p.numel() for p in blocks.MLP(6, 24, bias=False).parameters())
    whole = sum(p.numel() for p in small.parameters())
    texts = {f"parameters_{name}": f"{n:,}" for name, n in parameters.items()}
    texts |= {f"kept_{name}": f"{n:.1f}" for name, n in kept.items()}
    texts |= {f"share_{name}": f"{100 * spent[name] / spent['block']:.0f} %" for name in ("norms", "attention", "mlp")}
    return texts | {
        "norm_work": f"{100 * 2 * 7 / (24 * C + 4 * T + 2 * 7):.1f} %",
        "gpt2_block": f"{whole:,}",
        "gpt2_layers": f"{12 * whole:,}",
        "decoder": f"{sum(p.numel() for p in cross.parameters()):,}",
        "mlp_6_24": f"{plain}",
        "swiglu_6_16": f"{gated[16]}",
        "swiglu_6_24": f"{gated[24]}",
    }


# --- what breaks -------------------------------------------------------------------------------------------------


def mistakes(T: int = 6, C: int = 8, seed: int = 0) -> dict[str, str]:
    """What a reader of numbers sees after each mistake."""
    generator = rng(seed)
    x = torch.randn(1, T, C, generator=generator)
    changed = x.clone()
    changed[:, -1] = torch.randn(C, generator=generator)

    def leak(function) -> float:
        """How far the earlier outputs move when the last token is replaced."""
        with torch.no_grad():
            return (function(changed) - function(x))[:, :-1].abs().max().item()

    with weights_from(seed):
        both_axes, each = nn.LayerNorm((T, C)), nn.LayerNorm(C)
        linear = blocks.MLP(C, 4 * C, activation=lambda hidden: hidden)
        gated = blocks.SwiGLU(C, 2 * C)
    matrix, shift = linear.down.weight @ linear.up.weight, linear.down(linear.up.bias)
    with torch.no_grad():
        gap = (linear(x) - (x @ matrix.T + shift)).abs().max().item()
        right = gated(x)
        gated.gate, gated.up = gated.up, gated.gate
        swapped = ((gated(x) - right).norm() / right.norm()).item()
    claim(leak(each) == 0, "a norm over the features does not leak")
    with one_thread():
        on_stream = [_start("norm on the stream", 48, s)["road"] for s in range(2)]
    constant = torch.ones(4).half()
    half = constant - constant.mean()
    broken = half * torch.rsqrt(half.square().mean() + torch.tensor(1e-12).half())
    return {
        "unbiased_768": f"{100 * (1 - math.sqrt(767 / 768)):.2f} %",
        "leak_axes": f"{leak(both_axes):.2f}",
        "linear_gap": _power(gap),
        "swapped": f"{100 * swapped:.0f} %",
        "road_on_stream": f"{max(on_stream):.2f}",
        "eps_nan": "NaN" if broken.isnan().all() else f"{broken[0]:g}",
    }
