"""Chapter 3's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import math
import statistics
import time

import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from torch import Tensor

from tfmlib import attention
from tfmlib.course.meters import kept_bytes, peak_bytes

from . import Figure, cells, colour, draw, ink, one_thread, rng, slope

# --- by hand -----------------------------------------------------------------------------------------------------


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> dict[str, str]:
    """The steps of the worked example: one query, three keys."""
    raw = (q @ k.mT)[0]
    scores = raw / math.sqrt(q.shape[-1])
    out = attention.scaled_dot_product_attention(q, k, v)[0]
    hidden = attention.attention_weights(q, k, torch.tensor([False, True, True]))[0]
    rows = {
        "raw": [f"{n:.0f}" for n in raw],
        "scaled": [f"{n:.0f}" for n in scores],
        "exp": [f"{n:.2f}" for n in scores.exp()],
        "weight": [f"{n:.2f}" for n in attention.attention_weights(q, k)[0]],
        "plain": [f"{n:.2f}" for n in attention.softmax(raw)],
        "hidden": [f"{n:.2f}" for n in hidden],
        "out": [f"{n:.2f}" for n in out],
        "sum": [f"{scores.exp().sum():.2f}"],
    }
    return {f"{name}{i}": text for name, texts in rows.items() for i, text in enumerate(texts)}


# --- why divide by sqrt(D) ---------------------------------------------------------------------------------------


def jacobian_norm(weights: Tensor) -> Tensor:
    """Frobenius norm of d weights / d scores = diag(a) - a a^T, one for each row: (..., S) -> (...)."""
    weights = weights.double()  # near one-hot rows the three terms almost cancel
    square, cube = weights.pow(2).sum(-1), weights.pow(3).sum(-1)
    return (square - 2 * cube + square**2).clamp_min(0).sqrt()


def scaling(
    widths: tuple[int, ...] = (4, 16, 64, 256, 1024),
    n_queries: int = 4000,
    n_keys: int = 16,
    n_heads: int = 8,
    seed: int = 0,
) -> tuple[Figure, dict[str, str]]:
    """Variance of scores, and how sharp and how trainable the softmax is.

    Three kinds: "scaled" by 1/sqrt(D), "plain" without a scale, "small" by 1/sqrt(n_heads * D), a common mistake.
    """
    generator = rng(seed)
    kinds = ("scaled", "plain", "small")
    names = ("variance", "largest", "entropy", "jacobian", "median", "stuck")
    found = {kind: {name: {} for name in names} for kind in kinds}
    for D in widths:
        q = torch.randn(n_queries, 1, D, generator=generator)
        k = torch.randn(n_queries, n_keys, D, generator=generator)
        # attention_weights divides by sqrt(D): a factor on the queries gives any other scale
        for kind, factor in zip(kinds, (1.0, math.sqrt(D), 1 / math.sqrt(n_heads)), strict=True):
            a = attention.attention_weights(q * factor, k)[:, 0]  # (n_queries, n_keys)
            norms = jacobian_norm(a)
            measured = (
                (q * factor @ k.mT / math.sqrt(D)).var(),
                a.amax(-1).mean(),
                torch.special.entr(a).sum(-1).mean(),
                norms.mean(),
                norms.median(),
                (norms < 0.01).double().mean(),
            )
            for name, value in zip(names, measured, strict=True):
                found[kind][name][D] = value.item()
    plain, scaled = found["plain"], found["scaled"]

    def paint(canvas):
        axes = canvas.subplots(2, 2)
        titles = {
            "variance": ("Variance of the scores", "variance"),
            "largest": (f"Largest of {n_keys} weights", "mean weight"),
            "entropy": ("Entropy of the weights", "mean entropy (nats)"),
            "jacobian": ("Jacobian of the softmax", "Frobenius norm"),
        }
        for ax, (name, (title, label)) in zip(axes.flat, titles.items(), strict=True):
            ax.plot(widths, scaled[name].values(), "o-", label=r"with $1/\sqrt{D}$")
            ax.plot(widths, plain[name].values(), "s--", label="without")
            ax.set_xscale("log", base=2)
            ax.set(title=title, xlabel="width D", ylabel=label, xticks=widths, xticklabels=widths)
            ax.set_ylim(bottom=0)
        axes[1, 1].set_ylim(0, 0.36)
        axes[0, 0].set_yscale("log")
        axes[0, 0].set_ylim(0.5, 2 * max(widths))
        axes[0, 0].legend(fontsize=9)
        axes[1, 1].plot(widths, plain["median"].values(), "^:", color=colour(3), label="without, median")
        axes[1, 1].legend(*(part[-1:] for part in axes[1, 1].get_legend_handles_labels()), fontsize=9)

    low, high = widths[0], widths[-1]
    alt = (
        f"Four charts against the width D from {low} to {high}. Without the scale the variance of the scores grows "
        f"from {plain['variance'][low]:.0f} to {plain['variance'][high]:.0f}, the largest weight rises to "
        f"{plain['largest'][high]:.2f}, the entropy falls to {plain['entropy'][high]:.2f} nats and the mean norm of "
        f"the Jacobian falls to {plain['jacobian'][high]:.2f}. With the scale all four stay flat."
    )
    texts = {
        "flat_max": f"{scaled['largest'][64]:.2f}",
        "flat_entropy": f"{scaled['entropy'][64]:.2f}",
        "flat_jacobian": f"{scaled['jacobian'][64]:.2f}",
        "small_max": f"{found['small']['largest'][64]:.2f}",
        "uniform": f"{1 / n_keys:.2f}",
    }
    for D in (64, 1024):
        texts[f"max_{D}"] = f"{plain['largest'][D]:.2f}"
        texts[f"jacobian_{D}"] = f"{plain['jacobian'][D]:.2f}"
        texts[f"stuck_{D}"] = f"{100 * plain['stuck'][D]:.0f} %"
    return draw(paint, alt, size=(6.6, 5.2)), texts


# --- masks -------------------------------------------------------------------------------------------------------


def masks() -> Figure:
    """Three masks as grids: causal, causal with fewer queries than keys, causal together with padding."""
    is_token = torch.tensor([[True, True, True, False, False]])
    grids = (
        ("causal_mask(5)", attention.causal_mask(5)),
        ("causal_mask(2, 5)", attention.causal_mask(2, 5)),
        ("causal and padding", attention.causal_mask(5) & attention.padding_mask(is_token)[0, 0]),
    )

    def paint(canvas):
        axes = canvas.subplots(1, 3, sharex=True)
        for ax, (title, mask) in zip(axes, grids, strict=True):
            texts = [["1" if seen else "" for seen in row] for row in mask.tolist()]
            cells(ax, mask.float(), title, "key s", "query t", texts)

    alt = (
        "Three grids, one row for a query, one column for a key, 1 where the query may look. causal_mask(5) is a lower "
        "triangle. causal_mask(2, 5) is its last two rows: the first query sees four keys, the second five. Causal "
        "and padding together: the last two keys, which are padding, are hidden from every query."
    )
    return draw(paint, alt, size=(6.6, 2.7))


# --- the future cannot change the past ---------------------------------------------------------------------------


def _layer(x: Tensor, projections: Tensor, mask: Tensor | None) -> Tensor:
    """Self-attention of one head, all widths equal, plus its input: (T, C) -> (T, C)."""
    w_q, w_k, w_v = projections
    return x + attention.scaled_dot_product_attention(x @ w_q, x @ w_k, x @ w_v, mask)


def influence(mask: Tensor | None, T: int = 6, C: int = 8, n_layers: int = 3, seed: int = 3) -> Tensor:
    """How far output t moves when token s is replaced: (T, T), by a stack of layers."""
    generator = rng(seed)
    x = torch.randn(T, C, generator=generator)
    layers = torch.randn(n_layers, 3, C, C, generator=generator) / math.sqrt(C)
    other = torch.randn(T, C, generator=generator)

    def stack(x: Tensor) -> Tensor:
        for projections in layers:
            x = _layer(x, projections, mask)
        return x

    moved = torch.empty(T, T)
    for s in range(T):
        changed = x.clone()
        changed[s] = other[s]
        moved[:, s] = (stack(changed) - stack(x)).norm(dim=-1)
    return moved


def future(T: int = 6) -> tuple[Figure, dict[str, str]]:
    """Replace one token at a time and look at every output, with the causal mask and without."""
    pairs = (("with the causal mask", influence(attention.causal_mask(T), T)), ("without a mask", influence(None, T)))

    def paint(canvas):
        for ax, (title, moved) in zip(canvas.subplots(1, 2), pairs, strict=True):
            texts = [["0" if change == 0 else f"{change:.1f}" for change in row] for row in moved.tolist()]
            top = max(moved.max().item() for _, moved in pairs)
            cells(ax, moved, title, "token s that is replaced", "output t", texts, top)

    ahead = torch.ones(T, T, dtype=torch.bool).triu(1)  # outputs before the replaced token
    causal, free = (moved[ahead] for _, moved in pairs)
    alt = (
        f"Two {T} by {T} grids: how far output t moves when token s is replaced. With the causal mask every cell "
        f"above the diagonal is exactly 0. Without it all cells are positive; the least above it is {free.min():.1f}."
    )
    texts = {"pairs": f"{len(causal)}", "causal": f"{causal.abs().max():g}", "free": f"{free.min():.1f}"}
    return draw(paint, alt, size=(6.6, 3.6)), texts


def one_pass_or_many(T: int = 64, C: int = 32, seed: int = 1) -> dict[str, str]:
    """The rows of one masked pass against T separate passes over the prefixes, without any mask."""
    generator = rng(seed)
    x = torch.randn(T, C, generator=generator)
    projections = torch.randn(3, C, C, generator=generator) / math.sqrt(C)
    together = _layer(x, projections, attention.causal_mask(T))
    apart = torch.stack([_layer(x[: t + 1], projections, None)[-1] for t in range(T)])
    return {"difference": f"{(together - apart).abs().max():.7f}", "size": f"{together.abs().mean():.1f}"}


# --- what it costs -----------------------------------------------------------------------------------------------


def counted(lengths: tuple[int, ...] = (512, 4096, 32768)) -> dict[str, str]:
    """Scores of one head and their bytes, and the bytes of a layer and a model."""
    texts = {}
    for T in lengths:
        n = T * T
        texts[f"scores_{T}"] = f"{n / 1e9:.2f} billion" if n > 1e9 else f"{n / 1e6:.{1 if n > 1e6 else 2}f} million"
        texts[f"bytes_{T}"] = f"{4 * n / 1e9:.1f} GB" if n > 1e9 else f"{4 * n / 1e6:.0f} MB"
    layer = 8 * 12 * 4096**2 * 4
    return {**texts, "layer": f"{layer / 1e9:.1f} GB", "layers": f"{12 * layer / 1e9:.0f} GB"}


def _seconds(function, cases: list[tuple[Tensor, ...]], repeats: int = 9) -> list[float]:
    """Median processor time of a call for each case, on one core; the cases take turns."""
    torch.empty(31 * 2**20, dtype=torch.uint8)  # once freed, glibc keeps blocks of up to this size at hand
    times = [[] for _ in cases]
    with one_thread():
        for _ in range(repeats):
            for case, spent in zip(cases, times, strict=True):
                function(*case)  # does not count: it brings memory and caches to the state of this case
                start = time.thread_time()
                function(*case)
                spent.append(time.thread_time() - start)
    return [statistics.median(spent) for spent in times]


def cost(
    lengths: tuple[int, ...] = (256, 362, 512, 724, 1024, 1448), D: int = 64, seed: int = 0
) -> tuple[Figure, dict[str, str]]:
    """Time and memory of one head, one sequence, against T = S; PyTorch's fused function for comparison."""
    plain, fused = attention.scaled_dot_product_attention, F.scaled_dot_product_attention
    generator = rng(seed)
    cases = [torch.randn(3, 1, 1, T, D, generator=generator).unbind() for T in lengths]
    rows = [
        {
            "time": seconds,
            "peak": peak_bytes(plain, *case),
            "kept": kept_bytes(plain, *case),
            "fused": kept_bytes(fused, *case),
            "scores": 4 * T * T,
        }
        for T, case, seconds in zip(lengths, cases, _seconds(plain, cases), strict=True)
    ]
    column = {name: [row[name] for row in rows] for name in rows[0]}
    slopes = {name: slope(lengths, values) for name, values in column.items()}

    def paint(canvas):
        left, right = canvas.subplots(1, 2)
        left.plot(lengths, [1e3 * t for t in column["time"]], "o-", label="measured")
        guide = [1e3 * column["time"][-1] * (T / lengths[-1]) ** 2 for T in lengths]
        left.plot(lengths, guide, ":", color=ink(), label="slope 2")
        left.set(title="Time, one head, one core", ylabel="milliseconds")
        for name, style, label in (
            ("peak", "s-", "alive at the peak"),
            ("kept", "o-", "kept for backward"),
            ("scores", ":", r"one score matrix, $4\,T^2$"),
            ("fused", "^--", "kept, fused kernel"),
        ):
            dark = {"color": ink()} if name == "scores" else {}
            right.plot(lengths, [n / 1e6 for n in column[name]], style, label=label, **dark)
        right.set(title="Memory, one head", ylabel="MB")
        for ax in (left, right):
            ax.set(xlabel="tokens T = S", xscale="log", yscale="log")
            ax.set_xticks([256, 512, 1024], ["256", "512", "1024"])
            ax.set_xticks([], minor=True)
            ax.legend(fontsize=8.5)
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter(ScalarFormatter())
        left.yaxis.set_minor_formatter(NullFormatter())
        right.set_ylim(top=4 * max(column["peak"]) / 1e6)

    alt = (
        "Time and memory of one attention head against length, both axes logarithmic. Time rises with slope "
        f"{slopes['time']:.1f}. The plain code's memory rises with slope {slopes['peak']:.1f}, parallel to the size of "
        f"one score matrix; what the fused kernel keeps rises with slope {slopes['fused']:.1f}."
    )
    last, layers = rows[-1], 12 * 8 * 12 * 4096**2 * 4
    texts = {
        **{f"{name}_slope": f"{slope:.2f}" for name, slope in slopes.items()},
        "peak": f"{last['peak'] / last['scores']:.1f}",
        "kept": f"{last['kept'] / last['scores']:.1f}",
        "kept_layers": f"{last['kept'] / last['scores'] * layers / 1e9:.0f} GB",
        "kept_bytes": f"{last['kept'] / 1e6:.0f} MB",
        "fused_bytes": f"{last['fused'] / 1e6:.2f} MB",
        "longest": f"{lengths[-1]:,}",
    }
    return draw(paint, alt, size=(6.6, 3.6)), texts


# --- a query that may see nothing --------------------------------------------------------------------------------


def naive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention as it is often written. A row of only -inf becomes 0/0."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def additive_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same with a mask that is added: 0 or -inf."""
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def empty_row(T: int = 3, C: int = 4, seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """A batch of one sentence and one empty one; the loss reads the good sentence only."""
    generator = rng(seed)
    x = torch.randn(2, T, C, generator=generator)
    start = torch.randn(3, C, C, generator=generator) / math.sqrt(C)
    is_token = torch.tensor([[True] * T, [False] * T])
    mask = attention.padding_mask(is_token)[:, 0]  # (B, 1, S): there is no head axis here
    functions = {
        "naive": naive_attention,
        "tfmlib": attention.scaled_dot_product_attention,
        "additive": additive_attention,
        "repaired": lambda *inputs: naive_attention(*inputs).nan_to_num(0.0),
    }
    found = {}
    for name, function in functions.items():
        w_q, w_k, w_v = (w.clone().requires_grad_() for w in start)
        out = function(x @ w_q, x @ w_k, x @ w_v, mask)
        loss = out[is_token].square().mean()
        loss.backward()
        found[name] = {
            "out": out.detach().flatten(0, 1),
            "gradient": w_v.grad,
            "loss": loss.item(),
            "nan": {n: int(w.grad.isnan().sum()) for n, w in (("W_Q", w_q), ("W_K", w_k), ("W_V", w_v))},
        }
    fused = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    def paint(canvas):
        for row, name in zip(canvas.subplots(2, 2), ("naive", "tfmlib"), strict=True):
            for ax, what, title in zip(row, ("out", "gradient"), ("output", "gradient of $W_V$"), strict=True):
                table = found[name][what]
                texts = [["NaN" if math.isnan(n) else f"{n:z.2f}" for n in row] for row in table.tolist()]
                top = found["tfmlib"][what].abs().max().item()
                y = "sentence, token" if what == "out" else "row"
                cells(ax, table.abs(), f"{name}: {title}", "column", y, texts, top)
                ax.set_aspect("auto")
            row[0].set_yticks(range(2 * T), [f"{b}, {t}" for b in range(2) for t in range(T)])

    alt = (
        f"Four grids. Naive code: the {T} output rows of the empty sentence are NaN, and so are all {C * C} entries of "
        f"the gradient of W_V. The course's code: those {T} rows are zeros and every gradient is finite."
    )
    n_nan = {name: sum(result["nan"].values()) for name, result in found.items()}
    texts = {
        "naive_loss": f"{found['naive']['loss']:.3f}",
        "our_loss": f"{found['tfmlib']['loss']:.3f}",
        "naive_nan": f"{found['naive']['nan']['W_V']}",
        "entries": f"{C * C}",
        "additive_nan": f"{n_nan['additive']}",
        "all_entries": f"{3 * C * C}",
        "repaired_nan": f"{found['repaired']['nan']['W_V']}",
        "our_nan": f"{n_nan['tfmlib']}",
        "fused_zero": f"{fused[1].abs().max():g}",
    }
    return draw(paint, alt, size=(6.6, 5.2)), texts


# --- weight is not importance ------------------------------------------------------------------------------------


def effect_of_removal(weights: Tensor, values: Tensor) -> Tensor:
    """How far the output moves if key j is hidden and the rest is renormalised: (..., S), (..., S, Dv) -> (..., S)."""
    out = weights[..., None, :] @ values  # (..., 1, Dv)
    return weights / (1 - weights) * (out - values).norm(dim=-1)


def _measure(weights: list[float], values: list[float]) -> dict:
    """Build a query and keys that give exactly these weights, then hide one key after another with a mask."""
    k, v = torch.tensor(weights).log()[:, None], torch.tensor(values)[:, None]
    q = torch.ones(1, 1)  # D = 1: the score of key j is log of its weight
    a = attention.attention_weights(q, k)[0]
    out = attention.scaled_dot_product_attention(q, k, v)
    hidden = [attention.scaled_dot_product_attention(q, k, v, torch.arange(len(weights)) != j) for j in range(len(v))]
    return {
        "weight": a.tolist(),
        "contribution": (a * v[:, 0]).abs().tolist(),
        "effect": [(h - out).abs().item() for h in hidden],
        "out": out.item(),
        "without": [h.item() for h in hidden],
    }


def importance(n_queries: int = 4000, n_keys: int = 8, D: int = 16, seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """Two hand-made cases, and how often the largest weight is not the largest effect on random data."""
    cases = (
        ("A: key 1 has the value 0", _measure([0.7, 0.1, 0.1, 0.1], [0.0, 5.0, 3.0, 2.0])),
        ("B: key 1 has the mean value", _measure([0.5, 0.3, 0.2], [4.0, 0.0, 10.0])),
    )

    def paint(canvas):
        for ax, (title, case) in zip(canvas.subplots(1, 2, sharey=True), cases, strict=True):
            for i, (name, hatch) in enumerate((("weight", ""), ("contribution", "//"), ("effect", ".."))):
                share = [100 * value / sum(case[name]) for value in case[name]]
                place = [j + 1 + 0.27 * (i - 1) for j in range(len(share))]
                ax.bar(place, share, 0.25, label=name, hatch=hatch, edgecolor=ink())
                for x, height in zip(place, share, strict=True):
                    if height < 0.1:
                        ax.text(x, 1, "0", ha="center")
            ax.set(title=title, xlabel="key", xticks=range(1, len(share) + 1))
            ax.grid(axis="x", visible=False)
            ax.set_axisbelow(True)
        canvas.axes[0].set_ylabel("share of the sum (%)")
        canvas.axes[1].legend(fontsize=8.5)

    generator = rng(seed)
    q = torch.randn(n_queries, 1, D, generator=generator)
    k, v = torch.randn(2, n_queries, n_keys, D, generator=generator)
    differ = {}
    for name, norms in (("equal", 1.0), ("spread", torch.randn(n_queries, n_keys, 1, generator=generator).exp())):
        values = v / v.norm(dim=-1, keepdim=True) * norms
        a = attention.attention_weights(q, k)[:, 0]
        differ[name] = (a.argmax(-1) != effect_of_removal(a, values).argmax(-1)).float().mean().item()
    alt = (
        "Bars for each key: its share of weight, of contribution (weight times size of value) and of effect (how far "
        "the output moves without it). Case A: key 1 has 70 % of the weight, no contribution, and the largest effect. "
        "Case B: key 1 has half of the weight and half of the contribution, and no effect at all."
    )
    a, b = (case for _, case in cases)
    other = torch.tensor([0.0, 0.6, 0.4]) @ torch.tensor([4.0, 0.0, 10.0])  # case B's values with other weights
    texts = {
        "a_out": f"{a['out']:.1f}",
        "a_contribution": f"{a['contribution'][0]:g}",
        "a_without": f"{a['without'][0]:.1f}",
        "b_out": f"{b['out']:.1f}",
        "b_without": f"{b['without'][0]:.1f}",
        "b_effect2": f"{b['effect'][1]:.2f}",
        "b_effect3": f"{b['effect'][2]:.2f}",
        "b_other": f"{other:.1f}",
        "equal": f"{100 * differ['equal']:.0f} %",
        "spread": f"{100 * differ['spread']:.0f} %",
    }
    return draw(paint, alt, size=(6.6, 3.4)), texts


# --- mistakes ----------------------------------------------------------------------------------------------------


def mistakes(T: int = 6, D: int = 8, seed: int = 0) -> dict[str, str]:
    """What mistakes do to the sums of rows, and to outputs 0 .. T-2 when the last token is replaced."""
    generator = rng(seed)
    x, w_q, w_k = (torch.randn(n, D, generator=generator) for n in (T, D, D))
    mask, inf = attention.causal_mask(T), math.inf
    variants = {
        "right": lambda s: torch.softmax(s.masked_fill(~mask, -inf), -1),
        "axis": lambda s: torch.softmax(s.masked_fill(~mask, -inf), -2),
        "zero": lambda s: torch.softmax(s.masked_fill(~mask, 0.0), -1),
        "after": lambda s: torch.softmax(s, -1) * mask,
        "inverted": lambda s: torch.softmax(s.masked_fill(mask, -inf), -1),
    }

    def scores(x: Tensor) -> Tensor:
        return (x @ w_q) @ (x @ w_k).mT / D**1.5  # the last factor D is for w_q and w_k

    changed = x.clone()
    changed[-1] = torch.randn(D, generator=generator)
    texts = {}
    for name, weigh in variants.items():
        a = weigh(scores(x))
        leak = (weigh(scores(changed)) @ changed - a @ x)[:-1].abs().max()
        texts[f"{name}_low"], texts[f"{name}_high"] = f"{a.sum(-1).min():.2f}", f"{a.sum(-1).max():.2f}"
        texts[f"{name}_leak"] = f"{leak:.2f}" if leak else "0"
        texts[f"{name}_nan"] = f"{int(a.isnan().any(-1).sum())}"
    texts["seen_wrong"] = f"{int(torch.ones(1, T, dtype=torch.bool).tril().sum())}"  # aligned at the wrong corner
    texts["seen_right"] = f"{int(attention.causal_mask(1, T).sum())}"
    per_token = attention.padding_mask(torch.ones(2, 5, dtype=torch.bool))
    texts["bad_shape"] = str(tuple(torch.zeros(2, 3, 5).masked_fill(~per_token, -inf).shape))
    texts["blind_uniform"] = f"{torch.softmax(torch.randn(5, generator=generator) - 1e9, -1).max():.2f}"
    hidden = torch.tensor([[1.0], [math.nan]])
    sees_first = torch.tensor([True, False])
    out = attention.scaled_dot_product_attention(torch.ones(1, 1), torch.ones(2, 1), hidden, sees_first)
    texts["nan_value"] = "NaN" if out.isnan() else f"{out.item():g}"
    return texts
