"""Chapter 2's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pydoc_data.topics import topics
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfmlib import attention, blocks, heads, positions

from . import Figure, claim, colour, draw, ink, one_thread, rng, weights_from


def _seconds(function: Callable[[], Tensor], repeats: int = 15) -> float:
    """Median processor time of a call, on one core."""
    spent = []
    with one_thread():
        for _ in range(repeats + 1):
            start = time.thread_time()
            function()
            spent.append(time.thread_time() - start)
    return statistics.median(spent[1:])  # the first call warms up


# --- ids to vectors ----------------------------------------------------------------------------------------------


def look_up(V: int = 20_000, C: int = 256, T: int = 64, seed: int = 0) -> dict[str, str]:
    """The two forms of an embedding: numbers touched, operations, and time."""
    table, ids = torch.randn(V, C, generator=rng(seed)), torch.randint(V, (T,), generator=rng(seed))
    one_hot = F.one_hot(ids, V).float()
    assert torch.allclose(positions.embed(ids, table), one_hot @ table)
    ratio = _seconds(lambda: one_hot @ table) / _seconds(lambda: positions.embed(ids, table))
    gpt2 = {"V": 50_257, "C": 768, "T": 1024}
    claim(ratio > 30, "the product takes much longer than the look-up")
    return {
        "lookup-ratio": f"{ratio:,.0f}" if ratio < 100 else f"{round(ratio, -2):,.0f}",
        "lookup-copied": f"{gpt2['T'] * gpt2['C'] / 1e6:.2f} million",
        "lookup-operations": f"{2 * gpt2['T'] * gpt2['V'] * gpt2['C'] / 1e9:.0f} billion",
    }


# --- order -------------------------------------------------------------------------------------------------------


def causal_order(T: int = 6, C: int = 16, seed: int = 0) -> dict[str, str]:
    """How far the last output moves when the tokens before it change places: one causal layer, and two."""
    x = torch.randn(1, T, C, generator=rng(seed))
    shuffled = x[:, [3, 0, 4, 1, 2, 5]]
    layers = []
    for n in range(2):
        with weights_from(seed + n):
            layers.append(heads.MultiHeadAttention(C, 2))
    mask, moved = attention.causal_mask(T), []
    with torch.no_grad():
        a, b = x, shuffled
        for layer in layers:
            a, b = a + layer(a, mask=mask), b + layer(b, mask=mask)
            moved.append((a - b)[:, -1].abs().max().item())
    claim(moved[0] < 1e-5 and moved[1] > 1e-3, "one causal layer is blind to the order before the last token")
    return {"causal-1": f"{moved[0]:.6f}", "causal-2": f"{moved[1]:.3f}"}


# --- wavelengths -------------------------------------------------------------------------------------------------


def wavelengths(D: int = 128, bases: tuple[int, ...] = (10_000, 500_000), T: int = 8192) -> tuple[Figure, dict]:
    """Tokens for one full turn of each pair, for two bases, against the length of a training text."""
    turns = {base: [2 * math.pi * base ** (2 * i / D) for i in range(D // 2)] for base in bases}
    for base, wave in turns.items():  # the code's angles say the same
        assert torch.allclose(positions.rope_angles(torch.tensor([1.0]), D, base)[0], 2 * math.pi / torch.tensor(wave))
    slow = {base: sum(wave > T for wave in waves) for base, waves in turns.items()}

    def paint(canvas):
        ax = canvas.subplots()
        for (base, waves), style in zip(turns.items(), ("-", "--"), strict=True):
            ax.plot(range(D // 2), waves, style, label=f"base {base:,}")
        ax.axhline(T, color=ink(), linewidth=1, linestyle=":")
        ax.text(0, T * 1.15, f"{T:,} tokens", va="bottom", fontsize=9)
        ax.set(title=f"Tokens for one full turn, D = {D}", xlabel="pair i", ylabel="wavelength (tokens)", yscale="log")
        ax.legend(fontsize=9, loc="lower right")

    low, high = bases
    alt = (
        f"Wavelength against the pair, on a logarithmic axis: two straight lines that start at 6.3 tokens. With base "
        f"{low:,} the last pair needs {turns[low][-1]:,.0f} tokens for a turn, with base {high:,} "
        f"{turns[high][-1] / 1e6:.1f} million. A dotted line marks {T:,} tokens."
    )
    texts = {
        "wave-first": f"{turns[low][0]:.1f}",
        "wave-low": f"{round(turns[low][-1], -2):,.0f}",
        "wave-high": f"{turns[high][-1] / 1e6:.1f} million",
        "wave-slow-low": str(slow[low]),
        "wave-slow-high": str(slow[high]),
        "wave-pairs": str(D // 2),
    }
    return draw(paint, alt, size=(6.4, 3.2)), texts


# --- the score depends on the distance ---------------------------------------------------------------------------


def relative(T: int = 24, D: int = 16, seed: int = 0) -> tuple[Figure, dict]:
    """One query and one key at all pairs of positions: turned by RoPE, and with sinusoidal vectors added."""
    generator = rng(seed)
    content = torch.randn(2, D, generator=generator)
    w_q, w_k = torch.randn(2, D, D, generator=generator) / math.sqrt(D)
    where = torch.arange(T)
    x, y = (row.expand(T, D) for row in content)
    turned = positions.apply_rope(x @ w_q, where) @ positions.apply_rope(y @ w_k, where).T
    vectors = positions.sinusoidal(T, D)
    added = ((x + vectors) @ w_q) @ ((y + vectors) @ w_k).T
    found = {"Sinusoidal vectors added\nto the tokens": added, "Queries and keys turned\n(RoPE)": turned}
    distance = where[:, None] - where[None, :]  # m - n

    def spread(scores: Tensor) -> float:
        return max(
            (scores.diagonal(d).max() - scores.diagonal(d).min()).item() for d in range(1 - T, T)
        )  # among pairs at the same distance

    def paint(canvas):
        for i, (ax, (title, scores)) in enumerate(zip(canvas.subplots(1, 2), found.items(), strict=True)):
            ax.plot(distance.flatten(), scores.flatten(), ".", markersize=3.5, color=colour(1 - i))
            ax.set(title=title, xlabel="distance m − n (tokens)")
        canvas.axes[0].set_ylabel("score q · k")

    wide, narrow = spread(added), spread(turned)
    size = turned.abs().mean().item()
    claim(narrow < 1e-4 < 0.1 < wide, "with RoPE the score depends on the distance only")
    alt = (
        f"Two charts of the score of one query and one key against their distance, one point for each of {T * T} pairs "
        f"of positions. With added sinusoidal vectors the points form a cloud, up to {wide:.1f} wide at one distance. "
        "With RoPE all points of a distance coincide and form one curve."
    )
    texts = {"relative-added": f"{wide:.1f}", "relative-turned": f"{narrow:.6f}", "relative-size": f"{size:.1f}"}
    return draw(paint, alt, size=(6.6, 3.2)), texts


# --- precision ---------------------------------------------------------------------------------------------------


def narrow_rope(x: Tensor, where: Tensor, base: float = 10_000.0) -> Tensor:
    """A common mistake: positions, frequencies and angles in bfloat16."""
    frequency = base ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = where.to(torch.bfloat16)[:, None] * frequency.to(torch.bfloat16)
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def precision(D: int = 64, longest: int = 4096, gap: int = 3) -> tuple[Figure, dict]:
    """The score of a query and a key `gap` tokens apart, further and further into the text; both are all ones."""
    where = torch.arange(gap, longest, 11)  # meets every remainder of the roundings to 2, 4, 8 and 16
    ones = torch.full((len(where), D), D**-0.5)  # of length 1: the score is the mean of cos(gap * frequency)
    scores = {
        name: (rope(ones, where) * rope(ones, where - gap)).sum(-1)
        for name, rope in (("float32", positions.apply_rope), ("bfloat16", narrow_rope))
    }
    right = scores["float32"][0].item()
    error = (scores["bfloat16"] - right).abs()
    mean = {"near": error[where < 256].mean().item(), "far": error[where >= 1024].mean().item()}
    steady = (scores["float32"] - right).abs().max().item()
    claim(mean["near"] < 0.02 < 0.1 < mean["far"] and steady < 1e-4, "bfloat16 angles go wrong far into the text")

    def paint(canvas):
        ax = canvas.subplots()
        ax.plot(where, scores["bfloat16"], ".", color=colour(1), markersize=4, label="angles in bfloat16")
        ax.plot(where, scores["float32"], "-", color=colour(0), label="angles in float32")
        ax.set(title=f"One query and one key, always {gap} tokens apart", xlabel="position of the query (tokens)")
        ax.set(ylabel="score q · k", xticks=range(0, longest + 1, 1024), ylim=(0, 1.1))
        canvas.legend(loc="outside lower center", fontsize=9, ncols=2)

    alt = (
        f"The score of a query and a key {gap} tokens apart, against the position up to {longest:,}. With angles in "
        f"float32 it is a flat line at {right:.2f}. With angles in bfloat16 the points leave the line from 256 on, and "
        f"jump between values from {scores['bfloat16'].min():.2f} to {scores['bfloat16'].max():.2f}."
    )
    numbers = (257, 1001, 1028, 1031)
    texts = {f"bf16-{n}": f"{torch.tensor(n).to(torch.bfloat16).item():,.0f}" for n in numbers}
    return draw(paint, alt, size=(6.4, 3.2)), texts | {
        "narrow-right": f"{right:.2f}",
        "narrow-near": f"{mean['near']:.3f}",
        "narrow-far": f"{mean['far']:.2f}",
        "narrow-steady": f"{steady:.6f}",
    }


# --- tiny models -------------------------------------------------------------------------------------------------

TRAINED, LONGEST = 32, 128  # tokens


class Tiny(nn.Module):
    """Embedding, positions of one kind, causal blocks: ids (B, T, n) -> logits (B, T, outputs).

    A token is n ids, and its vector the sum of their rows (n = 1: an ordinary text). `kind` is learned, sinusoidal or
    rope.
    """

    def __init__(self, kind: str, inputs: int, outputs: int, C: int, n_heads: int, n_layers: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(inputs, C))
        self.kind, base = kind, 10_000.0 if kind == "rope" else None
        if kind == "learned":  # rows from TRAINED on are never trained
            self.rows = nn.Parameter(torch.randn(LONGEST, C) / math.sqrt(2))  # of the sinusoidal vectors' size
        if kind == "sinusoidal":
            self.register_buffer("rows", positions.sinusoidal(LONGEST, C))
        self.blocks = nn.ModuleList(
            blocks.PreNormBlock(
                heads.MultiHeadAttention(C, n_heads, rope_base=base),
                blocks.MLP(C, 4 * C),
                blocks.RMSNorm(C),
                blocks.RMSNorm(C),
            )
            for _ in range(n_layers)
        )
        self.norm, self.out = blocks.RMSNorm(C), nn.Linear(C, outputs, bias=False)

    def forward(self, ids: Tensor, where: Tensor | None = None, window: int | None = None) -> Tensor:
        T = ids.shape[1]
        x = positions.embed(ids, self.table).sum(2)  # (B, T, C)
        if self.kind != "rope":
            x = x + self.rows[:T]
        mask = attention.causal_mask(T)
        if window is not None:
            mask = mask & ~mask.tril(-window)  # the last `window` tokens only
        for block in self.blocks:
            x = block(x, mask=mask, positions=where)
        return self.out(self.norm(x))


def _fit(model: Tiny, batch: Callable, steps: int, rate: float, where: Tensor | None = None, seed: int = 0) -> Tiny:
    """Adam with a short warm-up and a linear decay, on `batch(generator) -> ids, labels`."""
    generator, optimizer = rng(seed), torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - step / steps)
        ids, labels = batch(generator)
        loss = F.cross_entropy(model(ids, where).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


# --- trained short, evaluated long: real text --------------------------------------------------------------------


@functools.cache
def _text() -> tuple[Tensor, int, int]:
    """Python's own documentation as ids of characters, how many ids there are, and where the test part begins."""
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = {char: i for i, char in enumerate(sorted(set(text)))}
    return torch.tensor([ids[char] for char in text]), len(ids), len(text) * 9 // 10


def _cut_out(starts: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """Pieces of text (B, T, 1) and the characters that follow each of theirs (B, T)."""
    ids = _text()[0][starts[:, None] + torch.arange(T + 1)]
    return ids[:, :-1, None], ids[:, 1:]


def _pieces(B: int, T: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the training part."""
    return _cut_out(torch.randint(_text()[2] - T, (B,), generator=generator), T)


@functools.cache
def _reader(kind: str, seed: int) -> Tiny:
    """A model that has learned to predict the next character in pieces of TRAINED."""
    _, V, _ = _text()
    with weights_from(seed):
        model = Tiny(kind, V, V, C=48, n_heads=3, n_layers=2)
    with one_thread():
        return _fit(model, lambda generator: _pieces(32, TRAINED, generator), 300, 0.005, seed=seed)


@functools.cache
def _tuned(interpolate: bool, seed: int, steps: int = 50) -> Tiny:
    """The RoPE model after a few more steps on pieces of LONGEST, with interpolated positions or plain ones."""
    where, model = _squeezed() if interpolate else None, copy.deepcopy(_reader("rope", seed))
    with one_thread():
        return _fit(model, lambda generator: _pieces(8, LONGEST, generator), steps, 0.002, where, seed=seed)


def _squeezed(length: int = LONGEST) -> Tensor:
    return positions.interpolate_positions(torch.arange(length), TRAINED, length)


def _test_starts() -> Tensor:
    """512 pieces of the test part; positions 0-31, 32-63, ... predict nearly the same characters."""
    return _text()[2] + TRAINED * torch.arange(512)


@torch.no_grad()
def _losses(model: Tiny, T: int = LONGEST, where: Tensor | None = None, window: int | None = None) -> Tensor:
    """Mean loss in nats at each position (T,), on the test pieces."""
    losses = []
    with one_thread():
        for some in _test_starts().split(64):
            ids, labels = _cut_out(some, T)
            losses.append(F.cross_entropy(model(ids, where, window).mT, labels, reduction="none"))
    return torch.cat(losses).mean(0)


def _pair_loss() -> float:
    """Loss in nats, on the same pieces, of a table that knows only the last character."""
    ids, V, cut = _text()
    counts = torch.full((V, V), 0.01)
    counts.index_put_((ids[: cut - 1], ids[1:cut]), torch.ones(cut - 1), accumulate=True)
    last, following = _cut_out(_test_starts(), LONGEST)
    return F.nll_loss(
        (counts / counts.sum(1, keepdim=True)).log()[last[..., 0]].flatten(0, 1), following.flatten()
    ).item()


def extrapolation(seed: int = 0, step: int = 8) -> tuple[Figure, dict]:
    """The loss at each position of models trained on short pieces, and of three repairs of one of them."""
    rope = _reader("rope", seed)
    found = {
        "learned": _losses(_reader("learned", seed)),
        "sinusoidal": _losses(_reader("sinusoidal", seed)),
        "rope": _losses(rope),
        "interpolated": _losses(rope, where=_squeezed()),
        "window": _losses(rope, window=TRAINED),
        "window-sinusoidal": _losses(_reader("sinusoidal", seed), window=TRAINED),
        "tuned": _losses(_tuned(True, seed), where=_squeezed()),
        "direct": _losses(_tuned(False, seed)),
    }
    spans = {"start": (0, 32), "near": (32, 64), "end": (96, 128), "all": (0, 128)}
    mean = {name: {span: loss[a:b].mean().item() for span, (a, b) in spans.items()} for name, loss in found.items()}
    pair = _pair_loss()
    for name in ("sinusoidal", "rope"):
        claim(mean[name]["start"] < pair < mean[name]["end"], f"{name} ends worse than a table of pairs")
    claim(mean["window"]["end"] < mean["window"]["start"] + 0.06, "the window repairs RoPE at every position")
    claim(mean["window-sinusoidal"]["end"] > pair, "the window does not repair sinusoidal positions")
    claim(mean["interpolated"]["start"] > mean["rope"]["start"] + 0.3, "interpolation alone hurts on this text")
    claim(abs(mean["tuned"]["end"] - mean["tuned"]["start"]) < 0.08, "after fine-tuning interpolation is flat")
    claim(mean["direct"]["end"] > mean["direct"]["start"] + 0.15, "with plain positions the loss still rises")
    claim(mean["direct"]["all"] < mean["tuned"]["all"], "on average plain positions are better")
    claim(max(mean["direct"]["end"], mean["tuned"]["end"]) < pair < mean["rope"]["end"], "fine-tuning helps")
    claim(mean["window"]["all"] < mean["direct"]["all"], "nothing beats the window")
    places = [a + step / 2 for a in range(0, LONGEST, step)]
    rows = {name: loss.view(-1, step).mean(1) for name, loss in found.items()}
    inside = TRAINED // step

    def paint(canvas):
        top, bottom = canvas.subplots(2, 1, sharex=True, sharey=True)
        top.plot(places[:inside], rows["learned"][:inside], "-", color=colour(3), label="learned")
        top.plot(places[inside:], rows["learned"][inside:], ":", color=colour(3), label="learned, untrained rows")
        top.plot(places, rows["sinusoidal"], "--", color=colour(2), label="sinusoidal")
        top.plot(places, rows["rope"], "-", color=colour(0), label="RoPE")
        top.plot(places, rows["interpolated"], "-.", color=colour(1), label="RoPE, interpolated")
        bottom.plot(places, rows["window"], "-", color=colour(0), label=f"sees the last {TRAINED} only")
        bottom.plot(places, rows["direct"], "--", color=colour(2), label="50 more steps, plain positions")
        bottom.plot(places, rows["tuned"], "-.", color=colour(1), label="50 more steps, interpolated")
        top.set_title(f"Trained on {TRAINED} characters, used on {LONGEST}")
        bottom.set_title("Three repairs of the RoPE model")
        for ax in (top, bottom):
            ax.axvline(TRAINED, color=ink(), linewidth=1, linestyle=":")
            ax.axhline(pair, color=ink(), linewidth=1, linestyle=(0, (1, 3)))
            ax.set_ylabel("loss (nats)")
        bottom.set_xlabel("position in the piece (characters)")
        bottom.set_xticks(range(0, LONGEST + 1, 16))
        bottom.text(1, pair + 0.03, "table of character pairs", fontsize=8)
        top.legend(fontsize=8.5, loc="lower right", labelspacing=0.3)
        bottom.legend(fontsize=8.5, loc="upper right")
        top.set_ylim(1.85, None)

    alt = (
        f"Loss against position. Above: up to {TRAINED}, where training ended, RoPE is lowest. Beyond, sinusoidal "
        f"positions rise to {mean['sinusoidal']['end']:.1f}, RoPE to {mean['rope']['end']:.1f}, untrained learned rows "
        f"to {mean['learned']['end']:.1f}; interpolated RoPE is flat at {mean['interpolated']['end']:.1f} everywhere. "
        f"Below: with a window of {TRAINED} the RoPE model stays at {mean['window']['end']:.1f}; 50 steps of "
        "fine-tuning bring it below the table of pairs, with interpolation and without."
    )
    texts = {f"text-{name}-{span}": f"{loss:.2f}" for name, row in mean.items() for span, loss in row.items()}
    ids, V, _ = _text()
    texts |= {"text-pair": f"{pair:.2f}", "text-chars": f"{len(ids):,}", "text-vocabulary": str(V)}
    texts |= {"text-parameters": f"{sum(p.numel() for p in rope.parameters()):,}"}
    return draw(paint, alt, size=(6.6, 6.4)), texts


# --- accepted, retrieved, used -----------------------------------------------------------------------------------
#
# A token is a note: a value is put into a box, and another box is asked for. The answer is the last value put there.

BOXES, VALUES = 16, 16


def _notes(B: int, T: int, generator: torch.Generator, writes: int | None = None) -> tuple[Tensor, Tensor]:
    """Notes (B, T, 3): box, value, box asked for; and answers (B, T), -100 where the box is still empty.

    With `writes` the last token asks for box 0, into which exactly so many notes at random places have put something.
    """
    first = 0 if writes is None else 1
    box = torch.randint(first, BOXES, (B, T), generator=generator)
    value = torch.randint(VALUES, (B, T), generator=generator)
    asked = torch.randint(BOXES, (B, T), generator=generator)
    if writes is not None:
        asked[:, -1] = 0
        box.scatter_(1, torch.rand(B, T, generator=generator).argsort(1)[:, :writes], 0)
    fits = (box[:, None] == asked[:, :, None]) & attention.causal_mask(T)  # (B, T, S)
    last = torch.where(fits, torch.arange(T), -1).amax(-1)
    answers = torch.where(last >= 0, value.gather(1, last.clamp_min(0)), -100)
    return torch.stack([box, BOXES + value, BOXES + VALUES + asked], dim=-1), answers


@functools.cache
def _clerk(seed: int) -> Tiny:
    """A one-layer, one-head RoPE model that has learned to answer on TRAINED notes."""
    with weights_from(seed):
        model = Tiny("rope", 2 * BOXES + VALUES, VALUES, C=48, n_heads=1, n_layers=1)
    with one_thread():
        return _fit(model, lambda generator: _notes(32, TRAINED, generator), 400, 0.005, seed=seed)


@torch.no_grad()
def _exam(model: Tiny, T: int, interpolate: bool, writes: int = 4, n: int = 512) -> dict[str, float]:
    """Shares of n questions where the model answers at all, names a value that was in the box, and names the last."""
    notes, answers = _notes(n, T, rng(1_000_003), writes)
    with one_thread():
        where = _squeezed(T) if interpolate else None
        logits = torch.cat([model(part, where)[:, -1] for part in notes.split(64)])
    named = logits.argmax(-1)
    in_box = (notes[..., 0] == 0) & (notes[..., 1] - BOXES == named[:, None])
    right = {"accepts": logits.isfinite().all(-1), "retrieves": in_box.any(1), "uses": named == answers[:, -1]}
    return {name: hits.double().mean().item() for name, hits in right.items()}


def three_things(lengths: tuple[int, ...] = (16, 32, 64, 128), seed: int = 0) -> tuple[Figure, dict]:
    """Accepting a length, retrieving over it and using it, with plain and with interpolated positions."""
    model = _clerk(seed)
    found = {
        title: {T: _exam(model, T, interpolate) for T in lengths}
        for title, interpolate in (("RoPE", False), ("RoPE, interpolated", True))
    }
    plain, squeezed = found.values()
    claim(all(row["accepts"] == 1 for rows in found.values() for row in rows.values()), "every length is accepted")
    claim(plain[32]["uses"] > 0.88 and plain[128]["retrieves"] > 0.8 > 0.72 > plain[128]["uses"], "it is not used")
    claim(squeezed[128]["uses"] > 0.82, "interpolation repairs this task")

    def paint(canvas):
        axes = canvas.subplots(1, 2, sharey=True)
        names = {"accepts": "accepts the text", "retrieves": "names a value of the box", "uses": "names the last value"}
        for ax, (title, rows) in zip(axes, found.items(), strict=True):
            for (name, label), style in zip(names.items(), ("s:", "^--", "o-"), strict=True):
                ax.plot(lengths, [100 * row[name] for row in rows.values()], style, label=label)
            ax.axvline(TRAINED, color=ink(), linewidth=1, linestyle=":")
            ax.set_xscale("log", base=2)
            ax.set_xticks(lengths, [str(T) for T in lengths])
            ax.set(title=title, xlabel="length (notes)", ylim=(0, 105))
        axes[0].set_ylabel("questions (%)")
        canvas.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=9, ncols=3)

    alt = (
        f"Shares of questions against length, trained at {TRAINED} notes. Plain RoPE accepts every length; at 128 it "
        f"still names a value of the box in {100 * plain[128]['retrieves']:.0f} % of cases, but the last value only in "
        f"{100 * plain[128]['uses']:.0f} %. With interpolated positions the last value is named in "
        f"{100 * squeezed[128]['uses']:.0f} %."
    )
    some = 1 - (1 - 1 / VALUES) ** 4  # that a random value is one of four random ones
    texts = {"box-chance-some": f"{100 * some:.0f} %", "box-chance": f"{100 / VALUES:.0f} %"}
    for kind, rows in (("plain", plain), ("squeezed", squeezed)):
        texts |= {f"box-{kind}-{name}-{T}": f"{100 * v:.0f} %" for T, row in rows.items() for name, v in row.items()}
    return draw(paint, alt, size=(6.6, 3.4)), texts


# --- what it costs -----------------------------------------------------------------------------------------------


def cost(C: int = 512, n_heads: int = 8, T: int = 256) -> dict[str, str]:
    """Parameters of a learned table; RoPE's multiplications and time against the projections of a layer."""
    with weights_from(0):
        layer = heads.MultiHeadAttention(C, n_heads)
    x = torch.randn(1, T, C, generator=rng(0))
    q = torch.randn(2, n_heads, T, C // n_heads, generator=rng(1))  # a query and a key for each head and token
    where = torch.arange(T)
    with torch.no_grad():
        turn = _seconds(lambda: positions.apply_rope(q, where))
        project = _seconds(lambda: layer.o_proj(layer.q_proj(x) + layer.k_proj(x) + layer.v_proj(x)))
    return {
        "table-gpt2": f"{1024 * 768:,}",
        "table-long": f"{131_072 * 4096 / 1e6:.0f} million",
        "rope-share": f"{100 / C:.1f} %",
        "rope-time": f"{100 * turn / project:.0f} %",
    }


# --- what breaks -------------------------------------------------------------------------------------------------


def unequal_halves(x: Tensor, where: Tensor, base: float = 10_000.0) -> Tensor:
    """A common mistake: angles for neighbours, t0 t0 t1 t1, on pairs of halves."""
    angles = positions.rope_angles(where, x.shape[-1], base).repeat_interleave(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()


def _plain(x: Tensor, where: Tensor) -> Tensor:
    return x


def _shift(on_qk: Callable, on_v: Callable = _plain, on_x: Callable = _plain, by: int = 1000, seed: int = 0) -> float:
    """How far the outputs of one head move when all its tokens move by `by` positions, relative to their size."""
    T, D = 8, 16
    generator = rng(seed)
    x = torch.randn(T, D, generator=generator)
    w_q, w_k, w_v = torch.randn(3, D, D, generator=generator) / math.sqrt(D)
    out = []
    for where in (torch.arange(T), torch.arange(by, by + T)):
        seen = on_x(x, where)
        q, k, v = on_qk(seen @ w_q, where), on_qk(seen @ w_k, where), on_v(seen @ w_v, where)
        out.append(attention.scaled_dot_product_attention(q, k, v, attention.causal_mask(T)))
    return ((out[1] - out[0]).norm() / out[0].norm()).item()


@contextmanager
def _interleaved() -> Iterator[None]:
    """Let the layers pair neighbours."""
    with mock.patch.object(positions, "apply_rope", functools.partial(positions.apply_rope, interleaved=True)):
        yield


def _neighbours(model: Tiny) -> Tiny:
    """The same model for neighbours: the rows of W_Q and W_K change places inside each head."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for projection in (block.attention.q_proj, block.attention.k_proj):
            rows = projection.weight.data.unflatten(0, (block.attention.n_heads, 2, -1))  # (H, 2, D/2, C)
            projection.weight.data = rows.transpose(1, 2).flatten(0, 2)
    return model


def mistakes() -> dict[str, str]:
    """The symptom of each mistake in the table."""
    rope = positions.apply_rope
    shifts = {
        "right": _shift(rope),
        "value": _shift(rope, on_v=rope),
        "input": _shift(_plain, on_x=rope),
        "halves": _shift(unequal_halves),
        "narrow": _shift(narrow_rope),
    }
    claim(shifts["right"] < 1e-3 < 0.03 < min(shifts[name] for name in shifts if name != "right"), "they move")
    x = torch.randn(1000, 16, generator=rng(0))
    norms = unequal_halves(x, torch.arange(1000)).norm(dim=-1) / x.norm(dim=-1)

    reader, sinusoidal = _reader("rope", 0), copy.deepcopy(_reader("sinusoidal", 0))
    loss = {"right": _losses(reader, TRAINED), "repaired": None, "pairs": None}
    with _interleaved():
        loss["pairs"], loss["repaired"] = _losses(reader, TRAINED), _losses(_neighbours(reader), TRAINED)
    table = sinusoidal.rows
    loss["sinusoidal"] = _losses(sinusoidal, TRAINED)
    sinusoidal.rows = torch.cat([table[:, 0::2], table[:, 1::2]], dim=-1)
    loss["blocks"] = _losses(sinusoidal, TRAINED)
    sinusoidal.rows = positions.sinusoidal(LONGEST, table.shape[1], base=1000.0)
    loss["base"] = _losses(sinusoidal, TRAINED)
    losses = {name: values.mean().item() for name, values in loss.items()}
    claim(abs(losses["repaired"] - losses["right"]) < 1e-3 < 0.3 < losses["pairs"] - losses["right"], "pairs")
    claim(losses["blocks"] > losses["sinusoidal"] + 0.1, "another layout hurts a trained model")

    C = 512
    frequency = torch.exp(torch.arange(0, C, 2) * (-math.log(10_000.0) / C // 2))  # -0.018 // 2 is -1.0
    right = positions.rope_angles(torch.tensor([1000.0]), C)[0]
    texts = {f"shift-{name}": f"{100 * value:.{3 if name == 'right' else 0}f} %" for name, value in shifts.items()}
    texts |= {f"pairing-{name}": f"{value:.2f}" for name, value in losses.items()}
    return texts | {
        "halves-low": f"{norms.min():.2f}",
        "halves-high": f"{norms.max():.2f}",
        "precedence-moving": str(int((1000 * frequency > 0.1).sum())),
        "precedence-right": str(int((right > 0.1).sum())),
        "precedence-pairs": str(C // 2),
        "base-short": f"{2 * math.pi * 1000 ** (510 / 512):,.0f}",
        "base-long": f"{2 * math.pi * 10_000 ** (510 / 512):,.0f}",
    }
