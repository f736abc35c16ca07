"""Chapter 13's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from IPython.display import Markdown
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tfmlib import attention, costs, flash, flash_triton, kernels
from tfmlib.course.meters import Alive, kept_bytes

from . import Figure, claim, colour, draw, ink, one_thread, rng, slope
from .costs import H100

SPEED = Path(__file__).with_name("flash_speed.json")
BALANCE = H100["flops"] / H100["bytes"]


def _size(n: float) -> str:
    """Bytes with three digits: 33554432 -> "33.6 MB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{_three(n / unit)} {name}"
    return f"{n:.0f} bytes"


def _three(n: float) -> str:
    """Three digits: 1234.5 -> "1,234", 12.345 -> "12.3", 1.2345 -> "1.23"."""
    return f"{n:,.0f}" if n >= 100 else f"{n:.1f}" if n >= 10 else f"{n:.2f}"


def _inputs(T: int, S: int, D: int, seed: int = 0, H: int = 1, K: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (1, H, T, D), k and v (1, K, S, D)."""
    generator = rng(seed)
    q = torch.randn(1, H, T, D, generator=generator)
    return q, *torch.randn(2, 1, K, S, D, generator=generator)


# --- bytes moved, counted ----------------------------------------------------------------------------------------

KINDS = {  # what moves bytes -> its name in the figures
    "plain": "plain: 10 passes",
    "fused": "softmax fused: 4 passes",
    "tiles": "tiles, all from memory",
    "once": "tiles, each byte once",
}


def moved_bytes(kind: str, T: int, S: int, D: int, block_q: int = 128, b: int = 2) -> int:
    """Bytes that one head reads from memory and writes to it. The scale, masks and sums of rows are left out."""
    ends = 2 * T * D + 2 * S * D  # q, k and v are read, the output is written
    if kind == "plain":
        return b * (ends + 10 * T * S)
    if kind == "fused":
        return b * (ends + 4 * T * S)
    rounds = math.ceil(T / block_q) if kind == "tiles" else 1
    return b * (2 * T * D + 2 * S * D * rounds) + 4 * T  # and logsumexp, float32


def _bound(kind: str, T: int, D: int) -> dict[str, float]:
    """FLOPs, bytes and seconds of one head by the H100's data sheet, T = S."""
    flops, n_bytes = 4 * T * T * D, moved_bytes(kind, T, T, D)
    seconds = costs.roofline_seconds(flops, n_bytes, H100["flops"], H100["bytes"])
    return {"flops": flops, "bytes": n_bytes, "seconds": seconds, "memory": n_bytes / H100["bytes"] >= seconds}


def traffic(widths: tuple[int, ...] = (64, 128), T: int = 4096) -> tuple[Figure, dict[str, str]]:
    """Bytes of one head against T, counted, and the rate that the H100's data sheet allows."""
    lengths = [2**n for n in range(8, 17)]
    bounds = {(kind, D): [_bound(kind, n, D) for n in lengths] for kind in KINDS for D in widths}

    def paint(canvas):
        axes = canvas.subplots(2, len(widths), sharex=True, sharey="row")
        for column, D in enumerate(widths):
            top, bottom = axes[:, column]
            for (kind, label), style in zip(KINDS.items(), ("-", "--", "-.", (0, (1, 1.2))), strict=True):
                rows = bounds[kind, D]
                top.plot(lengths, [row["bytes"] for row in rows], linestyle=style, label=label)
                rate = [row["flops"] / row["seconds"] / 1e12 for row in rows]
                bottom.plot(lengths, rate, linestyle=style)
            top.set(title=f"D = {D}: bytes moved", yscale="log")
            bottom.axhline(H100["flops"] / 1e12, color=ink(), linewidth=1, linestyle=":")
            bottom.set(
                title=f"D = {D}: rate at most", xscale="log", yscale="log", ylim=(10, 1900), xlabel="tokens T = S"
            )
            bottom.set_yticks([10, 100, 989], ["10", "100", "989"])
            bottom.set_xticks([256, 4096, 65536], ["256", "4,096", "65,536"])
            bottom.minorticks_off()
        axes[0, 0].set_yticks([1e5, 1e6, 1e7, 1e8, 1e9, 1e10], ["", "1 MB", "", "100 MB", "", "10 GB"])
        axes[0, 0].set_ylabel("bytes of one head")
        axes[1, 0].set_ylabel("TFLOP/s")
        canvas.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9.5)

    at = {(kind, D): _bound(kind, T, D) for kind in KINDS for D in widths}
    texts = {"balance": f"{BALANCE:.0f}"}
    for (kind, D), row in at.items():
        texts |= {
            f"{kind}-{D}-bytes": _size(row["bytes"]),
            f"{kind}-{D}-intensity": _three(row["flops"] / row["bytes"]),
            f"{kind}-{D}-us": _three(1e6 * row["seconds"]),
            f"{kind}-{D}-bound": "memory" if row["memory"] else "computing",
            f"{kind}-{D}-rate": f"{row['flops'] / row['seconds'] / 1e12:,.0f}",
        }
    for D in widths:
        slow = all(row["memory"] for kind in ("plain", "fused", "tiles") for row in bounds[kind, D])
        claim(slow, "only the last kind is ever bound by computing")
        turn = next(n for n in range(1, T) if not _bound("once", n, D)["memory"])
        texts |= {f"turn-{D}": f"{turn}", f"flops-{D}": f"{4 * T * T * D / 1e9:.2f}"}
    texts |= {
        "entries": f"{T * T / 1e6:.1f} million",
        "head-kv": _size(2 * 2 * T * widths[-1]),
        "rounds": f"{math.ceil(T / 128)}",
        "flat": _three(max(r["flops"] / r["bytes"] for r in bounds["plain", widths[-1]])),
    }
    alt = (
        "Four charts against the length T, for D = 64 and 128, all axes logarithmic. Above, the bytes that one head "
        f"moves: at T = {T} and D = 64 the plain code {texts['plain-64-bytes']}, with a fused softmax "
        f"{texts['fused-64-bytes']}, tiles {texts['tiles-64-bytes']}, and each byte once {texts['once-64-bytes']}. "
        "Below, the rate which the H100 allows: the first three are flat lines below the roof of 989 TFLOP/s; the "
        f"last one rises and meets the roof at about T = {texts['turn-64']}."
    )
    return draw(paint, alt, size=(6.6, 5.4)), texts


class Traffic(TorchDispatchMode):
    """Within the block, `n_bytes` grows by what each PyTorch operation reads and writes; views are free."""

    n_bytes = calls = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        name, changes = operation.__name__.split(".")[0], operation._schema.is_mutable
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        here = {x.untyped_storage().data_ptr() for x in read}
        is_view = not changes and all(x.untyped_storage().data_ptr() in here for x in written)
        if is_view or "empty" in name:
            return out
        if name == "copy_" or any(word in name for word in ("full", "zeros", "ones")):
            read = read[1:]  # the first is only written, or only tells the shape
        self.calls += 1
        self.n_bytes += sum(_touched(x) for x in [*read, *written])
        return out


def _touched(x: Tensor) -> int:
    """Bytes behind a tensor; an axis that is only repeated counts once."""
    return x.itemsize * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)


def traffic_here(T: int = 512, D: int = 64, seed: int = 0) -> dict[str, str]:
    """What the operations of plain PyTorch code read and write, in units of T x S entries of float32."""
    inputs = _inputs(T, T, D, seed)
    mask = attention.causal_mask(T)
    runs = {
        "plain": lambda: attention.scaled_dot_product_attention(*inputs),
        "masked": lambda: attention.scaled_dot_product_attention(*inputs, mask),
        "tiled": lambda: flash.flash_attention(*inputs),
    }
    texts, passes = {}, {}
    for name, run in runs.items():
        with Traffic() as counted:
            run()
        passes[name] = counted.n_bytes / (4 * T * T)
        texts |= {f"passes-{name}": f"{passes[name]:.1f}", f"calls-{name}": f"{counted.calls:,}"}
    exact = moved_bytes("plain", T, T, D, b=4)
    texts["passes-formula"] = f"{exact / (4 * T * T):.1f}"
    claim(0 <= passes["plain"] - exact / (4 * T * T) < 0.5, "the formula leaves out little")
    claim(passes["tiled"] > passes["plain"] < passes["masked"], "tiles in PyTorch move more than the plain code")
    return texts


# --- tiles -------------------------------------------------------------------------------------------------------


def _tile_kinds(T: int, S: int, block: int) -> dict[tuple[int, int], str]:
    """Which tile (row, column) is whole, which needs a mask and which is skipped: as `flash_kernel` decides."""
    kinds = {}
    for first in range(0, T, block):
        end = min(S, max(S - T + first + block, 0))  # keys that some query of the tile sees
        whole = min(S, max(S - T + first + 1, 0)) // block * block  # keys that all of them see
        for start in range(0, S, block):
            kind = "whole" if start < whole else "edge" if start < end else "skipped"
            kinds[first // block, start // block] = kind
    return kinds


def tiles(T: int = 14, few: int = 6, block: int = 4) -> tuple[Figure, dict[str, str]]:
    """A causal score matrix cut into tiles; and the same for the last queries only."""
    cases = ((T, T, f"T = S = {T}"), (few, T, f"T = {few}, S = {T}"))

    def paint(canvas):
        for ax, (rows, columns, title) in zip(canvas.subplots(1, 2), cases, strict=True):
            kinds, seen = _tile_kinds(rows, columns, block), attention.causal_mask(rows, columns)
            for (i, j), kind in kinds.items():
                height, width = min(block, rows - i * block), min(block, columns - j * block)
                if kind == "whole":
                    ax.add_patch(Rectangle((j * block, i * block), width, height, color=colour(0), alpha=0.6, lw=0))
                for t in range(i * block, i * block + height) if kind == "edge" else ():
                    n = int(seen[t, j * block : j * block + width].sum())  # these are seen, the rest of the row is not
                    ax.add_patch(Rectangle((j * block, t), n, 1, color=colour(0), alpha=0.28, lw=0))
                    hidden = {"facecolor": "none", "hatch": "////", "edgecolor": colour(1), "linewidth": 0}
                    ax.add_patch(Rectangle((j * block + n, t), width - n, 1, **hidden))
                ax.add_patch(Rectangle((j * block, i * block), block, block, fill=False, ec=ink(), lw=1.2, zorder=3))
            ax.set(title=title, xlabel="key", ylabel="query", aspect="equal")
            ax.set(xlim=(-0.1, block * math.ceil(columns / block) + 0.1))
            ax.set(ylim=(block * math.ceil(rows / block) + 0.1, -0.1))
            ax.set_xticks([s + 0.5 for s in range(0, columns, block)], range(0, columns, block))
            ax.set_yticks([t + 0.5 for t in range(0, rows, block)], range(0, rows, block))
            ax.grid(False)
            ax.tick_params(length=0)
            for spine in ax.spines.values():
                spine.set_visible(False)
        handles = [
            Patch(facecolor=colour(0), alpha=0.6, label="tile without a mask"),
            Patch(facecolor=colour(0), alpha=0.28, label="tile with a mask"),
            Patch(facecolor="none", edgecolor=colour(1), hatch="////", linewidth=0, label="computed, then hidden"),
            Patch(facecolor="none", edgecolor=ink(), label="skipped, or outside"),
        ]
        canvas.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9.5)

    kinds = list(_tile_kinds(T, T, block).values())
    n = 4096 // 128
    texts = {
        "tiles-all": f"{len(kinds)}",
        **{f"tiles-{kind}": f"{kinds.count(kind)}" for kind in ("whole", "edge", "skipped")},
        "tiles-share": f"{100 * (n + 1) / (2 * n):.1f} %",
    }
    late = list(_tile_kinds(few, T, block).values())
    alt = (
        f"Two score matrices cut into tiles of {block} by {block}. Left, {T} queries and keys: {texts['tiles-whole']} "
        f"tiles below the diagonal are whole, {texts['tiles-edge']} tiles at the diagonal and the right end need a "
        f"mask, {texts['tiles-skipped']} above are skipped. Right, the last {few} queries: the diagonal ends in the "
        f"lower right corner, {late.count('whole')} tiles are whole, {late.count('edge')} need a mask and "
        f"{late.count('skipped')} are skipped."
    )
    return draw(paint, alt, size=(6.6, 4.2)), texts


# --- measured here -----------------------------------------------------------------------------------------------


def extra_bytes(function: Callable, *inputs: Tensor) -> int:
    """The most bytes that tensors made by `function` hold at the same time; views of the inputs do not count."""
    with Alive(inputs) as alive:
        start = alive.peak
        function(*inputs)
    return alive.peak - start


def _seconds(functions: list[Callable], repeats: int = 3) -> list[float]:
    """Median processor time of each, on one core; they take turns."""
    times: list[list[float]] = [[] for _ in functions]
    with one_thread():
        for _ in range(repeats):
            for function, spent in zip(functions, times, strict=True):
                function()  # does not count
                start = time.thread_time()
                function()
                spent.append(time.thread_time() - start)
    return [statistics.median(spent) for spent in times]


def _backend(backend: SDPBackend) -> Callable:
    """PyTorch's attention with this backend and no other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def measured(lengths: tuple[int, ...] = (256, 512, 1024, 2048), D: int = 64, seed: int = 0):
    """Extra memory and time of one head on one core, plain, in tiles, and in PyTorch's fused kernel."""
    codes = {
        "plain": attention.scaled_dot_product_attention,
        "tiles": flash.flash_attention,
        "large": lambda q, k, v: flash.flash_attention(q, k, v, block_q=256, block_k=256),
        "torch": _backend(SDPBackend.FLASH_ATTENTION),
    }
    peak, kept, seconds = ({name: [] for name in codes} for _ in range(3))
    for T in lengths:
        inputs = _inputs(T, T, D, seed)
        for name in ("plain", "tiles"):
            peak[name].append(extra_bytes(codes[name], *inputs))
            kept[name].append(kept_bytes({"plain": codes["plain"], "tiles": flash.attend}[name], *inputs))
        spent = _seconds([lambda code=code, inputs=inputs: code(*inputs) for code in codes.values()])
        for name, value in zip(codes, spent, strict=True):
            seconds[name].append(value)
    low, high = lengths[0], lengths[-1]
    a_token = (peak["tiles"][-1] - peak["tiles"][0]) / (high - low)
    claim(a_token == 4 * (D + 1), "each further token costs D + 1 numbers")
    claim(all(n == 4 * T * (D + 1) for n, T in zip(kept["tiles"], lengths, strict=True)), "kept are out and logsumexp")

    def paint(canvas):
        left, right = canvas.subplots(1, 2)
        for i, name in enumerate(("plain", "tiles")):
            left.plot(lengths, [n / 1e6 for n in peak[name]], "o-", color=colour(i), label=f"{name}, peak")
            left.plot(lengths, [n / 1e6 for n in kept[name]], "s:", color=colour(i), label=f"{name}, kept")
        left.set(title="Memory beyond q, k, v", ylabel="MB")
        labels = {"plain": "plain", "tiles": "tiles 64 × 64", "large": "tiles 256 × 256", "torch": "PyTorch's kernel"}
        for i, (name, label) in enumerate(labels.items()):
            style = ("o-", "o-", "^--", "s-.")[i]
            right.plot(lengths, [1e3 * n for n in seconds[name]], style, color=colour(i), label=label)
        right.set(title="Time, one core", ylabel="milliseconds")
        for ax in (left, right):
            ax.set(xlabel="tokens T = S", xscale="log", yscale="log")
            ax.set_xticks([256, 512, 1024, 2048], ["256", "512", "1024", "2048"])
            ax.set_xticks([], minor=True)
            ax.yaxis.set_major_locator(LogLocator())
            ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.legend(fontsize=8.5, loc="upper left")
        left.set_ylim(top=20 * max(peak["plain"]) / 1e6)
        right.set_ylim(top=20e3 * max(seconds["tiles"] + seconds["plain"]))

    place = lengths.index(1024)
    ratio = {name: seconds[name][place] / seconds["plain"][place] for name in codes}
    texts = {
        "slope-plain": f"{slope(lengths, peak['plain']):.2f}",
        "slope-tiles": f"{slope(lengths, peak['tiles']):.2f}",
        "a-token": f"{a_token:.0f}",
        "peak-plain": _size(peak["plain"][-1]),
        "peak-tiles": _size(peak["tiles"][-1]),
        "kept-plain": _size(kept["plain"][-1]),
        "kept-tiles": _size(kept["tiles"][-1]),
        **{f"ratio-{name}": f"{value:.1f}" for name, value in ratio.items()},
    }
    alt = (
        "Two charts against the length, all axes logarithmic. Left, memory: the plain code's peak and what it keeps "
        f"for the backward pass rise with slope {texts['slope-plain']}; those of the tiles stay far below, with slope "
        f"{texts['slope-tiles']} at the peak. Right, time: all codes rise alike; at T = 1024 tiles of 64 take "
        f"{texts['ratio-tiles']} times as long as the plain code, tiles of 256 {texts['ratio-large']} times and "
        f"PyTorch's kernel {texts['ratio-torch']} times."
    )
    return draw(paint, alt, size=(6.6, 3.6)), texts


def exact(T: int = 300, S: int = 500, D: int = 64, seed: int = 0) -> dict[str, str]:
    """Errors of the plain code and of tiles, against float64."""
    q, k, v = _inputs(T, S, D, seed)
    mask = attention.causal_mask(T, S)
    truth = attention.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask)
    plain = attention.scaled_dot_product_attention(q, k, v, mask)
    tiled, _ = flash.flash_attention(q, k, v, causal=True)
    half = [x.bfloat16() for x in (q, k, v)]
    rounded = attention.scaled_dot_product_attention(*(x.double() for x in half), mask)
    plain_half = attention.scaled_dot_product_attention(*half, mask)
    tiled_half, _ = flash.flash_attention(*half, causal=True)
    gap = {"plain": (plain - truth).abs().max(), "tiles": (tiled - truth).abs().max()}
    mean = {"plain": (plain_half - rounded).abs().mean(), "tiles": (tiled_half - rounded).abs().mean()}
    claim(max(gap.values()) < 3e-6, "both are off by rounding only")
    claim(mean["plain"] > 1.5 * mean["tiles"], "in bfloat16 tiles are nearer to the truth")
    return {
        "error-plain": f"{gap['plain']:.7f}",
        "error-tiles": f"{gap['tiles']:.7f}",
        "half-plain": f"{mean['plain']:.5f}",
        "half-tiles": f"{mean['tiles']:.5f}",
        "mean-size": f"{truth.abs().mean():.2f}",
    }


# --- the kernel --------------------------------------------------------------------------------------------------


def _counted_in_interpreter(run: Callable) -> int:
    """Bytes that a kernel loads and stores, from every load and store of Triton's interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store, total = Builder.create_masked_load, Builder.create_masked_store, 0

    def counted(kind: Callable, where: int) -> Callable:
        def call(self, ptrs, *args):
            nonlocal total
            total += int(args[where].data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
            return kind(self, ptrs, *args)

        return call

    with (
        mock.patch.object(Builder, "create_masked_load", counted(load, 0)),  # (ptrs, mask, ...)
        mock.patch.object(Builder, "create_masked_store", counted(store, 1)),  # (ptrs, value, mask, ...)
    ):
        run()
    return total


def loads_and_stores(T: int = 100, D: int = 16, seed: int = 0) -> dict[str, str]:
    """What the kernel loads and stores, by the interpreter and by the formula."""
    inputs = _inputs(T, T, D, seed)
    block_q = kernels.blocks_for(torch.float32, D)[0] if kernels.RUNS_ON != "missing" else 32
    formula = moved_bytes("tiles", T, T, D, block_q, b=4)
    texts = {"loads-block": f"{block_q}", "loads-formula": f"{formula:,}", "loads-T": f"{T}", "loads-D": f"{D}"}
    if kernels.RUNS_ON != "interpreter":
        return texts | {"loads": "not counted here, because this page was built without Triton's interpreter"}
    loads = _counted_in_interpreter(lambda: flash_triton.flash_attention_triton(*inputs))
    claim(loads == formula, "the kernel moves what the formula says")
    return texts | {"loads": f"{loads:,} bytes"}


def addresses(B: int = 2, T: int = 100, H: int = 4, D: int = 64, at: tuple[int, ...] = (1, 2, 70, 5)) -> dict[str, str]:
    """Strides of q (B, H, T, D), contiguous and as a model makes it, and where one entry lies."""
    whole = torch.empty(B, H, T, D, device="meta")
    split = torch.empty(B, T, H, D, device="meta").transpose(1, 2)
    texts = {}
    for name, x in (("whole", whole), ("split", split)):
        place = sum(i * stride for i, stride in zip(at, x.stride(), strict=True))
        texts |= {f"strides-{name}": str(x.stride()), f"place-{name}": f"{place:,}"}
    return texts


# --- published, and measured on a GPU --------------------------------------------------------------------------------

NAMES = {  # in the file -> in the chart
    "tfmlib": "this course",
    "flash": "PyTorch: flash",
    "cudnn": "PyTorch: cuDNN",
    "efficient": "PyTorch: efficient",
    "math": "PyTorch: math",
}


def speed(path: Path = SPEED) -> tuple[Figure | Markdown, dict[str, str]]:
    """The chart of what `tests.bench.flash` measured on a GPU, or a note that nobody has measured yet."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    causal = any(row["causal"] for row in found["rows"])
    rows = [row for row in found["rows"] if row["causal"] == causal and row["K"] == row["H"]]
    if not rows:
        note = (
            "**Not measured yet.** No GPU was at hand when this page was written. Run the command above on one, and a "
            "chart of TFLOP/s against T takes the place of this note."
        )
        reading = "A run in the interpreter shows that a kernel is right. It says nothing about its speed."
        return Markdown(note), {"speed-reading": reading}
    passes = [name for name in ("forward", "backward") if any(row["pass"] == name for row in rows)]
    widths = sorted({row["D"] for row in rows})

    def rates(kernel: str, which: str, D: int) -> dict[int, float]:
        picked = [row for row in rows if (row["kernel"], row["pass"], row["D"]) == (kernel, which, D)]
        return {row["T"]: row["tflops"] for row in sorted(picked, key=lambda row: row["T"])}

    def paint(canvas):
        axes = canvas.subplots(len(passes), len(widths), squeeze=False, sharex=True, sharey=True)
        styles = ("o-", "s--", "^-.", "v:", "D:")
        for i, which in enumerate(passes):
            for j, D in enumerate(widths):
                ax = axes[i, j]
                for n, (kernel, label) in enumerate(NAMES.items()):
                    points = rates(kernel, which, D)
                    if points:
                        ax.plot(points.keys(), points.values(), styles[n], color=colour(n), markersize=4, label=label)
                ax.set_xscale("log", base=2)
                ax.set(title=f"{which}, D = {D}")
        axes[0, 0].set_ylim(0, 1.08 * max(row["tflops"] for row in rows))
        ticks = sorted({row["T"] for row in rows})[::2]
        for ax in axes[-1]:
            ax.set(xlabel="tokens T")
            ax.set_xticks(ticks, [f"{T:,}" for T in ticks])
            ax.minorticks_off()
        for ax in axes[:, 0]:
            ax.set_ylabel("TFLOP/s")
        by_label = {}
        for ax in axes.flat:
            by_label |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        canvas.legend(by_label.values(), by_label.keys(), loc="outside lower center", ncols=3, fontsize=9)

    parts, best = [], []
    for which in passes:
        for D in widths:
            ours, theirs = rates("tfmlib", which, D), rates("flash", which, D)
            both = [ours[T] / theirs[T] for T in ours if T >= 2048 and T in theirs]
            if both:
                low, high = f"{min(both):.2f}", f"{max(both):.2f}"
                parts.append(f"{which}, D = {D}: {low}" + (f" to {high}" if high != low else ""))
            if ours:
                best.append(f"{max(ours.values()):.0f} ({which}, D = {D})")
    compared = "; ".join(parts) or "not measured"
    reading = (
        f"Measured on {found['device']}, {found['date']}, driver {found['driver']}, CUDA {found['cuda']}, PyTorch "
        f"{found['torch']}, Triton {found['triton']}, {found['dtype']}, {'causal' if causal else 'no mask'}, K = H, "
        f"B T = {rows[0]['B'] * rows[0]['T']:,}, H D = {rows[0]['H'] * rows[0]['D']:,}. The rate of this course's "
        f"kernels divided by that of PyTorch's flash backend, for T of 2,048 and more: {compared}. The course's best "
        f"rates, in TFLOP/s: {', '.join(best)}."
    )
    alt = f"Charts of TFLOP/s against the length, one for each pass and width. {reading}"
    return draw(paint, alt, size=(6.6, 2.9 * len(passes) + 0.8)), {"speed-reading": reading}


# --- what breaks -------------------------------------------------------------------------------------------------


def tiles_with(mistake: str, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, block: int = 16) -> Tensor:
    """Tiles for one head, (T, D), (S, D), (S, Dv) -> (T, Dv), right or with one mistake.

    Like a kernel, it reads whole tiles and gets zeros for keys that do not exist.
    """
    (T, D), S = q.shape, k.shape[0]
    k, v = (F.pad(x, (0, 0, 0, -S % block)) for x in (k, v))
    place = torch.arange(T) + (0 if mistake == "corner" else S - T)
    maximum = torch.full((T,), -math.inf)
    total, mixed = torch.zeros(T), torch.zeros(T, v.shape[1])
    for start in range(0, len(k), block):
        key = torch.arange(start, start + block)
        scores = q @ k[key].T / math.sqrt(D)
        seen = (key < S) | (mistake == "ragged")
        if causal:
            seen = seen & (key <= place[:, None])
        scores = scores.masked_fill(~seen, -math.inf)
        higher = torch.maximum(maximum, scores.amax(-1))
        origin = higher if mistake == "blind" else higher.masked_fill(higher == -math.inf, 0.0)
        shrink, p = (maximum - origin).exp(), (scores - origin[:, None]).exp()
        total = total * (1 if mistake == "total" else shrink) + p.sum(-1)
        mixed = mixed * (1 if mistake == "mixed" else shrink[:, None]) + p @ v[key]
        maximum = higher
    return mixed / total.masked_fill(total == 0, 1.0)[:, None]


def mistakes(D: int = 16, block: int = 16, seed: int = 0) -> dict[str, str]:
    """Small wrong variants, at a size which hides them and at one which shows them."""

    def error(mistake: str, T: int, S: int, causal: bool = False) -> float:
        q, k, v = (x[0, 0] for x in _inputs(T, S, D, seed))
        mask = attention.causal_mask(T, S) if causal else None
        right = attention.scaled_dot_product_attention(q, k, v, mask)
        return (tiles_with(mistake, q, k, v, causal, block) - right).abs().max().item()

    def text(value: float) -> str:
        return "0" if value < 1e-5 else f"{value:.2f}"

    claim(error("", 65, 65, True) < 1e-5 and error("", 5, 65, True) < 1e-5, "the right variant is right")
    cases = {
        "mixed-one": ("mixed", block, block),
        "mixed": ("mixed", 64, 64),
        "total": ("total", 64, 64),
        "ragged-64": ("ragged", 64, 64),
        "ragged-65": ("ragged", 65, 65),
        "ragged-causal": ("ragged", 65, 65, True),
        "corner-64": ("corner", 64, 64, True),
        "corner": ("corner", 5, 65, True),
    }
    values = {name: error(*case) for name, case in cases.items()}
    hidden = ("mixed-one", "ragged-64", "ragged-causal", "corner-64")
    claim(all((value < 1e-5) == (name in hidden) for name, value in values.items()), "these sizes hide or show them")
    texts = {f"wrong-{name}": text(value) for name, value in values.items()}

    q, k, v = (x[0, 0] for x in _inputs(block + 4, block, D, seed))
    nan = tiles_with("blind", q, k, v, True, block).isnan().any(-1)
    claim(not tiles_with("", q, k, v, True, block).isnan().any(), "the right variant has no NaN")
    texts |= {"blind-rows": f"{int(nan.sum())}", "blind-T": f"{block + 4}", "blind-S": f"{block}"}

    q, k, v = _inputs(64, 64, D, seed)
    out, lse = flash.flash_attention(q, k, v)
    grad_out = torch.randn(out.shape, generator=rng(seed + 1))
    right = flash.flash_attention_backward(grad_out, q, k, v, out, lse)
    base2 = flash.flash_attention_backward(grad_out, q, k, v, out, lse / math.log(2))
    no_delta = flash.flash_attention_backward(grad_out, q, k, v, torch.zeros_like(out), lse)
    texts["base2-sum"] = f"{(lse - lse / math.log(2)).exp().mean():.2f}"
    texts["base2-dv"] = f"{base2[2].norm() / right[2].norm():.2f}"
    texts["delta-dv"] = text((no_delta[2] - right[2]).abs().max().item())
    texts["delta-dq"] = f"{100 * (no_delta[0] - right[0]).norm() / right[0].norm():.0f} %"

    for K in (4, 2, 1):
        q, k, v = _inputs(40, 40, D, seed, H=4, K=K)
        taken = torch.arange(4) % K  # in place of h // (H // K)
        wrong = flash.flash_attention(q, k[:, taken], v[:, taken])[0]
        texts[f"group-{K}"] = text((wrong - flash.flash_attention(q, k, v)[0]).abs().max().item())
    return texts
