"""Chapter 4's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tfmlib import attention, heads

from . import Figure, cells, colour, draw, ink, one_thread, rng, weights_from

GIB = 2**30


def _layer(seed: int, *sizes, **options) -> heads.MultiHeadAttention:
    """A layer with weights that depend on the seed alone."""
    with weights_from(seed):
        return heads.MultiHeadAttention(*sizes, **options)


# --- the family and the three machines ---------------------------------------------------------------------------


def family(H: int = 8, sizes: tuple[int, ...] = (8, 2, 1)) -> Figure:
    """Which key/value head each query head reads, as `repeat_kv` assigns them."""
    names = {H: "MHA", 1: "MQA"}

    def paint(canvas):
        for ax, K in zip(canvas.subplots(len(sizes), 1), sizes, strict=True):
            owner = heads.repeat_kv(torch.arange(K).view(1, K, 1, 1), H // K).flatten().tolist()
            middle = [sum(h for h in range(H) if owner[h] == k) * K / H for k in range(K)]
            for h, k in enumerate(owner):
                ax.plot([h, middle[k]], [0.86, 0.14], color=colour(k), linewidth=1.6)
                ax.text(h, 1, f"q{h}", ha="center", va="center")
            for k in range(K):
                ax.text(middle[k], 0, f"kv{k}", ha="center", va="center", color=colour(k), weight="bold")
            ax.set_title(f"{names.get(K, 'GQA')}: H = {H} query heads, K = {K} key/value head{'s' * (K > 1)}")
            ax.set(xlim=(-0.6, H - 0.4), ylim=(-0.2, 1.2))
            ax.axis("off")

    alt = (
        f"Three drawings of {H} query heads above their key/value heads. In multi-head attention each query head has "
        f"its own key/value head. In grouped-query attention with {sizes[1]} key/value heads, query heads 0 to "
        f"{H // sizes[1] - 1} share the first and the others the second. In multi-query attention all share one."
    )
    return draw(paint, alt, size=(6.2, 4.4))


def machines(T: int = 5, S: int = 4, n_padding: int = 1) -> Figure:
    """The masks of an encoder, of a decoder, and of a decoder that reads an encoder."""
    is_token = torch.arange(S)[None] < S - n_padding
    padding = attention.padding_mask(is_token)[0, 0]  # (1, S)
    encoder, causal, cross = padding.expand(S, S), attention.causal_mask(T), padding.expand(T, S)

    def paint(canvas):
        axes = canvas.subplots(1, 3, width_ratios=[S, T, S])
        cells(axes[0], encoder.float(), "Encoder", "source key", "source query", lines=True)
        cells(axes[1], causal.float(), "Decoder", "target key", "target query", lines=True)
        cells(axes[2], cross.float(), "Cross-attention", "source key", "target query", lines=True)

    alt = (
        f"Three masks, shaded where a query may look. Encoder: all {S} queries see the first {S - n_padding} keys "
        f"and none sees the last one, which is padding. Decoder: a lower triangle of {T} by {T}. Cross-attention: each "
        f"of {T} target queries sees the same {S - n_padding} source keys."
    )
    return draw(paint, alt, size=(6.6, 2.8))


# --- mistakes that keep every shape ----------------------------------------------------------------------------------


def view_only_split(x: Tensor, n_heads: int) -> Tensor:
    """A common mistake: the shape is right, but every head holds whole tokens."""
    B, T, width = x.shape
    return x.reshape(B, n_heads, T, width // n_heads)


def view_only_merge(x: Tensor) -> Tensor:
    """A common mistake: the heads are not brought back behind the tokens."""
    B, H, T, D = x.shape
    return x.reshape(B, T, H * D)


def tiled(x: Tensor, n_repeat: int) -> Tensor:
    """A common mistake: heads 0, 1, 0, 1 in place of 0, 0, 1, 1."""
    return x.repeat(1, n_repeat, 1, 1)


@contextlib.contextmanager
def _with(**replaced: Callable) -> Iterator[None]:
    """Put other functions in the place of pieces of `tfmlib.heads`."""
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(heads, name, function))
        yield


MISTAKES = {
    "right": {},
    "split by view only": {"split_heads": view_only_split, "merge_heads": view_only_merge},
    "merge by view only": {"merge_heads": view_only_merge},
    "tiled": {"repeat_kv": tiled},
}


# --- a task that needs several reads at once ---------------------------------------------------------------------
#
# A memory of 8 tokens; each has a name (one-hot), and holds fields of random numbers with variance 1. A question
# names 4 different tokens, and the answer is a field of the first, of the second, ..., side by side.

NAMES, READS = 8, 4
WIDTH = NAMES + READS * 8  # d_model: a name and four fields of 8
INNER = 32  # H * D, the same for every H


def questions(B: int, T: int, generator: torch.Generator, field: int = 8, own_field: bool = False):
    """Questions (B, T, C), a memory (B, 8, C) and answers (B, T, 4, field).

    Read i asks for field i of its token with `own_field`, and for the only field there is without.
    """
    asked = torch.rand(B, T, NAMES, generator=generator).argsort(-1)[..., :READS]  # (B, T, 4), all different
    fields = torch.randn(B, NAMES, READS if own_field else 1, field, generator=generator)
    x = F.one_hot(asked, NAMES).flatten(2).float()
    memory = torch.cat([torch.eye(NAMES).expand(B, -1, -1), fields.flatten(2)], dim=-1)
    x, memory = (F.pad(t, (0, WIDTH - t.shape[-1])) for t in (x, memory))
    which = torch.arange(READS) if own_field else torch.zeros(READS, dtype=torch.long)
    return x, memory, fields[torch.arange(B)[:, None, None], asked, which]


def _error(layer, x: Tensor, memory: Tensor, answers: Tensor) -> Tensor:
    """Squared error of every number of the answer: (B, T, 4, field)."""
    return (layer(x, memory)[..., : answers[0, 0].numel()].view_as(answers) - answers).square()


@functools.cache
def train(H: int, K: int, field: int = 8, own_field: bool = False, split: str = "right", seed: int = 0):
    """Train one layer on fresh questions at every step; returns it and the mean squared error of each step.

    `split` names the pieces to use: the right ones, or those of a mistake.
    """
    layer = _layer(seed, WIDTH, H, K, head_dim=INNER // H)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.005)
    generator, losses = rng(seed), []
    with one_thread(), _with(**MISTAKES[split]):
        for _ in range(600):
            loss = _error(layer, *questions(64, 8, generator, field, own_field)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return layer, losses


def _final(losses: list[float]) -> float:
    """The mean of the last 50 steps."""
    return sum(losses[-50:]) / 50


def several_reads(counts: tuple[int, ...] = (1, 2, 4, 8, 16), seed: int = 0) -> tuple[Figure, dict]:
    """The same parameters cut into more and more heads, on questions that need four reads."""
    runs = {H: train(H, H, seed=seed) for H in counts}
    final = {H: _final(losses) for H, (_, losses) in runs.items()}
    (parameters,) = {sum(p.numel() for p in layer.parameters()) for layer, _ in runs.values()}  # one number for all

    def paint(canvas):
        ax = canvas.subplots()
        for floor in (0.75, 0.5):
            ax.axhline(floor, color=ink(), linewidth=1, linestyle=(0, (2, 3)))
        styles = ["-", "--", "-.", (0, (5, 1)), ":"]
        for (H, (_, losses)), style in zip(runs.items(), styles, strict=True):
            name = f"{H} head{'s' * (H > 1)}, D = {INNER // H}"
            ax.plot(range(1, len(losses) + 1), losses, linestyle=style, linewidth=1.8, label=name)
        ax.set(title="Four reads at once: the same parameters, cut into H heads")
        ax.set(xlabel="training step", ylabel="mean squared error", ylim=(0, 1.05))
        canvas.legend(loc="outside lower center", fontsize=9, ncols=3)

    alt = (
        "Loss against training step for 1, 2, 4, 8 and 16 heads. One head stays at 0.75 and two heads at 0.5, on their "
        f"dotted floors. Four and eight heads fall to zero. Sixteen heads are slower and end at {final[16]:.2f}."
    )
    texts = {f"reads-{H}": f"{loss:.2f}" for H, loss in final.items()}
    return draw(paint, alt, size=(6.4, 4.2)), texts | {"reads-parameters": f"{parameters:,}"}


def shared_heads(sizes: tuple[int, ...] = (4, 2, 1), H: int = 4, seed: int = 0) -> tuple[Figure, dict]:
    """What it costs in quality to share key/value heads, where all reads want the same field and where each wants
    its own."""
    kinds = {"all four reads want the same field": False, "each read wants a field of its own": True}
    final = {
        own: {K: _final(train(H, K, own_field=own, seed=seed)[1]) for K in sizes} for own in sorted(kinds.values())
    }

    def paint(canvas):
        ax = canvas.subplots()
        for i, (label, own) in enumerate(kinds.items()):
            places = [n + (i - 0.5) * 0.36 for n in range(len(sizes))]
            bars = ax.bar(places, final[own].values(), width=0.34, color=colour(i), label=label)
            ax.bar_label(bars, [f"{value:.2f}" for value in final[own].values()], padding=2, fontsize=9)
        ax.set(title=f"{H} query heads read K key/value heads", xlabel="key/value heads K and cache, relative to MHA")
        ax.set(ylabel="mean squared error", ylim=(0, 1))
        ax.set_xticks(range(len(sizes)), [f"K = {K}\n{100 * K // H} % of the cache" for K in sizes])
        ax.legend(loc="upper left", fontsize=9)
        ax.grid(axis="x", visible=False)
        ax.set_axisbelow(True)

    alt = (
        "Bars of the error after training for K = 4, 2 and 1. Where all reads want the same field, the error is zero "
        f"for every K. Where each wants its own, it is {final[True][4]:.2f}, {final[True][2]:.2f} and "
        f"{final[True][1]:.2f}."
    )
    names = {False: "same", True: "own"}
    texts = {f"{names[own]}-{K}": f"{loss:.2f}" for own, losses in final.items() for K, loss in losses.items()}
    return draw(paint, alt, size=(6.4, 3.4)), texts


@contextlib.contextmanager
def _only(layer, kept: Tensor) -> Iterator[None]:
    """Zero the heads that are not kept (H,), in front of the output projection."""
    mask = kept.repeat_interleave(layer.o_proj.in_features // layer.n_heads)  # (H*D,)
    hook = layer.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * mask,))
    try:
        yield
    finally:
        hook.remove()


def _ablate(layer, field: int) -> dict:
    """By how much the error of each read grows without head h: (H, 4); and the spare heads, removed together."""
    asked = questions(256, 8, rng(1_000_003), field)

    def error(kept: Tensor) -> Tensor:
        with torch.no_grad(), _only(layer, kept):
            return _error(layer, *asked).mean((0, 1, 3))  # (4,)

    everyone = torch.ones(layer.n_heads)
    whole = error(everyone)
    growth = torch.stack([error(everyone - one) - whole for one in torch.eye(layer.n_heads)])
    spare = growth.mean(1) < 0.02
    together = (error(everyone - spare.float()) - whole).mean().item()
    return {"growth": growth, "spare": int(spare.sum()), "spare_together": together}


def ablation(H: int = 8, fields: tuple[int, ...] = (8, 4), seed: int = 0, others: tuple[int, ...] = (1, 2, 3)):
    """Train with H heads, then remove one head at a time, for two sizes of what a read must carry."""
    found = {field: _ablate(train(H, H, field, seed=seed)[0], field) for field in fields}

    def paint(canvas):
        for ax, field in zip(canvas.subplots(1, len(fields)), fields, strict=True):
            growth = found[field]["growth"]
            texts = [[f"{abs(value):.2f}" for value in row] for row in growth.tolist()]
            cells(ax, growth, f"Fields of {field} numbers", "read", "head removed", texts, lines=True)
            ax.set_xticks(range(READS), range(1, READS + 1))
            ax.set_aspect("auto")

    spares = [found[field]["spare"] for field in fields]
    alt = (
        f"Two tables of {H} heads by {READS} reads: by how much the squared error of a read grows when a head is "
        f"removed. Fields of {fields[0]} numbers: {H - spares[0]} of {H} heads matter, each for about half of one "
        f"read. Fields of {fields[1]} numbers: {spares[1]} of {H} heads can be removed with almost no effect."
    )
    wide, narrow = (found[field] for field in fields)
    elsewhere = [_ablate(train(H, H, fields[1], seed=other)[0], fields[1])["spare"] for other in others]
    texts = {
        "wide-least": f"{wide['growth'].amax(1).min():.2f}",
        "wide-most": f"{wide['growth'].max():.2f}",
        "narrow-most": f"{narrow['growth'].max():.2f}",
        "narrow-spare": str(narrow["spare"]),
        "narrow-together": f"{narrow['spare_together']:.2f}",
        "narrow-others": ", ".join(map(str, elsewhere)),
    }
    return draw(paint, alt, size=(6.4, 3.8)), texts


# --- what it costs -----------------------------------------------------------------------------------------------


def kv_bytes(L: int, B: int, T: int, K: int, D: int, itemsize: int = 2) -> int:
    """Bytes of the keys and values of T tokens in L layers."""
    return 2 * L * B * T * K * D * itemsize


class Kept:
    """One layer's keys and values, as `MultiHeadAttention` hands them to a cache."""

    length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.tensors = k, v
        return k, v

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def measured_kv_bytes(L: int, T: int, H: int, K: int, D: int, seed: int = 0) -> int:
    """Run T tokens through L small layers in 16 bits, keep their keys and values, and ask the tensors."""
    generator, total = rng(seed), 0
    for _ in range(L):
        layer, kept = _layer(seed, H * D, H, K).to(torch.bfloat16), Kept()
        with torch.no_grad():
            layer(torch.randn(1, T, H * D, generator=generator, dtype=torch.bfloat16), cache=kept)
        total += kept.n_bytes
    return total


def cache_size() -> tuple[Figure, dict]:
    """KV bytes against T: counted for the shape of Llama 2 70B, counted and measured for a small one."""
    big = {"L": 80, "D": 128}
    lengths = [2**n for n in range(10, 18)]
    kinds = {64: "MHA, K = 64", 8: "GQA, K = 8 (as published)", 1: "MQA, K = 1"}
    small = {"L": 2, "H": 8, "D": 16}
    short = [64, 128, 192, 256]
    measured = {K: [measured_kv_bytes(T=T, K=K, **small) for T in short] for K in (8, 2, 1)}
    counted = {K: [kv_bytes(small["L"], 1, T, K, small["D"]) for T in short] for K in measured}

    def paint(canvas):
        top, bottom = canvas.subplots(2, 1)
        for (K, label), style in zip(kinds.items(), ("-", "--", "-."), strict=True):
            top.plot(lengths, [kv_bytes(B=1, T=T, K=K, **big) / GIB for T in lengths], style, label=label)
        top.axvline(4096, color=ink(), linewidth=1, linestyle=":")
        top.set_xscale("log", base=2)
        top.set_yscale("log")
        top.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        top.set(title="Counted: 80 layers, D = 128, one sequence, 16 bits", ylabel="KV cache (GiB)")
        top.set_xticks(lengths, [f"{T // 1024} Ki" for T in lengths])
        top.set(xlabel="tokens T (Ki = 1024)")
        for (K, sizes), style, i in zip(measured.items(), ("-", "--", "-."), range(3), strict=True):
            bottom.plot(short, [n / 1024 for n in counted[K]], style, color=colour(i), label=f"K = {K}, counted")
            bottom.plot(short, [n / 1024 for n in sizes], "o", color=colour(i), label=f"K = {K}, measured")
        bottom.set(title="Measured on real tensors: 2 layers, H = 8, D = 16, 16 bits", xlabel="tokens T")
        bottom.set(ylabel="KV cache (KiB)", xticks=short, ylim=(0, None))
        top.legend(fontsize=9)
        bottom.legend(fontsize=9, ncols=3, loc="upper left", columnspacing=1)
        bottom.set_ylim(top=1.45 * max(measured[8]) / 1024)

    numbers = {K: {T: kv_bytes(B=1, T=T, K=K, **big) / GIB for T in (4096, 131072)} for K in kinds}
    equal = measured == counted
    alt = (
        "Two charts of the size of the KV cache against the number of tokens. Above, counted for 80 layers: three "
        f"parallel lines; at 4096 tokens MHA needs {numbers[64][4096]:.2f} GiB, GQA with 8 heads "
        f"{numbers[8][4096]:.2f} GiB and MQA {numbers[1][4096]:.2f} GiB. Below, a small model: the measured points lie "
        f"{'exactly on' if equal else 'off'} the counted lines."
    )
    texts = {f"gib-{K}-{T}": f"{gib:.2f}".rstrip("0").rstrip(".") for K in kinds for T, gib in numbers[K].items()}
    return draw(paint, alt, size=(6.4, 5.6)), texts | {"kv-equal": "equal" if equal else "not equal"}


def work(C: int = 64, B: int = 2, T: int = 48, S: int = 80) -> dict:
    """Parameters and multiply-adds of a few shapes, counted by formula and measured by PyTorch."""
    texts, equal = {}, True
    for H, K in ((1, 1), (4, 4), (4, 2), (4, 1)):
        D = C // H
        layer = _layer(0, C, H, K)
        x, context = torch.randn(B, T, C, generator=rng(1)), torch.randn(B, S, C, generator=rng(2))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x, context)
        parameters = 2 * C * D * (H + K)
        multiply_adds = 2 * B * T * C * H * D + 2 * B * S * C * K * D + 2 * B * T * S * H * D
        equal &= parameters == sum(p.numel() for p in layer.parameters())
        equal &= 2 * multiply_adds == counter.get_total_flops()  # PyTorch counts a multiply-add as 2
        texts |= {f"parameters-{H}-{K}": f"{parameters:,}", f"multiply-adds-{H}-{K}": f"{multiply_adds:,}"}
        texts |= {f"weights-{H}-{K}": f"{B * H * T * S:,}"}
    return texts | {"work-equal": "equal" if equal else "not equal"}


def published() -> dict:
    """KiB of keys and values for one token in published models, 16 bits a number."""
    models = {  # L, K, D
        "gpt2-xl": (48, 25, 64),
        "llama2-7b": (32, 32, 128),
        "llama2-70b": (80, 8, 128),
        "llama3-8b": (32, 8, 128),
        "gemma-2b": (18, 1, 256),
        "qwen3-0.6b": (28, 8, 128),
    }
    return {f"token-{name}": f"{kv_bytes(L, 1, 1, K, D) / 1024:.0f}" for name, (L, K, D) in models.items()}


# --- what breaks -------------------------------------------------------------------------------------------------


def influence(T: int, H: int, split: str, D: int = 4, seed: int = 0) -> Tensor:
    """Whether output t of a causal layer moves with input s: (T, T) bool, from the Jacobian."""
    layer = _layer(seed, H * D, H)
    x = torch.randn(1, T, H * D, generator=rng(seed))
    with _with(**MISTAKES[split]):
        jacobian = torch.autograd.functional.jacobian(lambda x: layer(x, mask=attention.causal_mask(T)), x)
    return jacobian[0, :, :, 0].abs().amax((1, 3)) > 1e-9  # exact zeros where nothing flows


def reshapes(T: int = 8, H: int = 4) -> tuple[Figure, dict]:
    """Who reads whom in a causal layer: the right reshape, and two that have the same shapes."""
    kinds = ("right", "split by view only", "merge by view only")
    right, split, merge = maps = [influence(T, H, kind) for kind in kinds]

    def paint(canvas):
        for i, (ax, kind, seen) in enumerate(zip(canvas.subplots(1, 3), kinds, maps, strict=True)):
            cells(ax, seen.float(), kind, "input token", "" if i else "output token", lines=True)

    causal = attention.causal_mask(T)
    assert right.equal(causal)  # else the layer itself is broken
    block, future = int(split.sum(1).max()), int((merge & ~causal).sum())
    alt = (
        "Three tables of output tokens by input tokens, shaded where the output depends on the input. Right: a lower "
        f"triangle. Split by view only: blocks of {block} tokens on the diagonal, nothing outside. "
        f"Merge by view only: {future} cells above the diagonal are shaded: the future."
    )
    return draw(paint, alt, size=(6.6, 2.7)), {"block": str(block), "future": str(future)}


def mistakes(H: int = 4, seed: int = 0) -> dict:
    """The error that is left after training with a mistake inside, and after loading good weights into it."""
    found = {split: _final(train(H, H, split=split, seed=seed)[1]) for split in list(MISTAKES)[:3]}
    grouped = {"K": 2, "field": 4, "own_field": True, "seed": seed}
    layer, losses = train(H, **grouped)
    found["grouped"] = _final(losses)
    with _with(**MISTAKES["tiled"]), torch.no_grad():
        found["tiled, loaded"] = _error(layer, *questions(256, 8, rng(1_000_003), 4, True)).mean().item()
    found["tiled, trained"] = _final(train(H, split="tiled", **grouped)[1])
    return {f"mistake-{name}": f"{loss:.2f}" for name, loss in found.items()}
