"""Chapter 6's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import copy
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import NullFormatter
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tfmlib import attention, heads, positions
from tfmlib.models import encoder, gpt, llama, seq2seq, weights

from . import Figure, cells, claim, colour, draw, ink, one_thread, rng, weights_from

MACHINES = {
    "GPT": (gpt.GPT, gpt.GPTConfig),
    "Llama": (llama.Llama, llama.LlamaConfig),
    "Encoder": (encoder.Encoder, encoder.EncoderConfig),
    "Seq2Seq": (seq2seq.Seq2Seq, seq2seq.Seq2SeqConfig),
}


def _build(machine: str, seed: int = 0, **sizes) -> nn.Module:
    """A model whose first weights depend on the seed alone."""
    model, config = MACHINES[machine]
    with weights_from(seed):
        return model(config(**sizes))


@functools.cache
def _outline(machine: str, **sizes) -> nn.Module:
    """A model without numbers: its tensors have shapes and no storage, so even the largest costs nothing."""
    with torch.device("meta"):
        return _build(machine, **sizes)


def _n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- the four machines ---------------------------------------------------------------------------------------------

EMBED, ATTEND, CROSS, MIX, NORM, HEAD = range(6)
PLANS = {  # from the bottom to the top: (kind, text); a list is the block that is repeated
    "GPT-2": [
        [(EMBED, "token + position table")],
        [(NORM, "LayerNorm"), (ATTEND, "attention, causal"), (NORM, "LayerNorm"), (MIX, "MLP, GELU")],
        [(NORM, "LayerNorm"), (HEAD, "head = embedding")],
    ],
    "Llama": [
        [(EMBED, "token table")],
        [(NORM, "RMSNorm"), (ATTEND, "attention, causal,\nrotary, K ≤ H"), (NORM, "RMSNorm"), (MIX, "SwiGLU")],
        [(NORM, "RMSNorm"), (HEAD, "head")],
    ],
    "Encoder (BERT)": [
        [(EMBED, "token + position\n+ segment table"), (NORM, "LayerNorm")],
        [(ATTEND, "attention, all see all"), (NORM, "LayerNorm"), (MIX, "MLP, GELU"), (NORM, "LayerNorm")],
        [],
    ],
    "Seq2Seq, source": [
        [(EMBED, "token table + sinusoids")],
        [(ATTEND, "attention, all see all"), (NORM, "LayerNorm"), (MIX, "MLP, ReLU"), (NORM, "LayerNorm")],
        [],
    ],
    "Seq2Seq, target": [
        [(EMBED, "token table + sinusoids")],
        [
            (ATTEND, "attention, causal"),
            (NORM, "LayerNorm"),
            (CROSS, "cross-attention"),
            (NORM, "LayerNorm"),
            (MIX, "MLP, ReLU"),
            (NORM, "LayerNorm"),
        ],
        [(HEAD, "head = embedding")],
    ],
}


def _shade(kind: int) -> str:
    """One colour for each kind of part, in every machine."""
    return ink() if kind == NORM else colour({EMBED: 0, ATTEND: 1, MIX: 2, CROSS: 3, HEAD: 4}[kind])


def _box(x: float, y: float, width: float, height: float, **style) -> FancyBboxPatch:
    style = {"linewidth": 1.2, "edgecolor": ink(), "facecolor": "none"} | style
    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", **style)


def machines() -> Figure:
    """The four machines as stacks of parts."""
    width, gap = 2.35, 0.62

    def stack(ax, name: str, left: float) -> dict[str, float]:
        """Draw one stack from the bottom up; returns the middle heights of its parts, and its top."""
        y, heights = 0.0, {}
        ax.text(left + width / 2, -0.32, name, ha="center", va="center", weight="bold", fontsize=10)
        for i, boxes in enumerate(PLANS[name]):
            start = y
            for kind, text in boxes:
                tall, shade = (0.66 if "\n" in text else 0.42), _shade(kind)
                ax.add_patch(_box(left, y, width, tall, edgecolor=shade, facecolor=(*to_rgb(shade), 0.16)))
                ax.text(left + width / 2, y + tall / 2 - 0.02, text, ha="center", va="center", fontsize=9.5)
                heights[text] = y + tall / 2
                y += tall + 0.12
            if i == 1:  # the block, which is repeated
                frame = _box(left - 0.12, start - 0.12, width + 0.24, y - start + 0.12, linestyle=":")
                ax.add_patch(frame)
                ax.text(left + width + 0.17, (start + y) / 2, "×L", va="center", fontsize=9.5)
            y += 0.16
        return heights | {"top": y}

    def paint(canvas):
        tall = (4.85, 5.2)  # of the highest stack in each row, with its name
        above, below = canvas.subplots(2, 1, height_ratios=tall)
        for i, name in enumerate(("GPT-2", "Llama", "Encoder (BERT)")):
            stack(above, name, i * (width + gap))
        left, right = 0.5 * (width + gap) - 0.3, 1.5 * (width + gap) + 0.3
        source, target = stack(below, "Seq2Seq, source", left), stack(below, "Seq2Seq, target", right)
        up, across, reads_ = source["top"], right - 0.5, target["cross-attention"]
        way = [(left + width / 2, up - 0.26), (left + width / 2, up), (across, up), (across, reads_)]
        way.append((right - 0.06, reads_))
        below.plot(*zip(*way[:-1], strict=True), color=_shade(CROSS))
        arrow = {"arrowstyle": "->", "color": _shade(CROSS), "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        below.annotate("", way[-1], way[-2], arrowprops=arrow)
        for ax, height in zip((above, below), tall, strict=True):
            ax.set(xlim=(-0.15, 3 * width + 2 * gap + 0.45), ylim=(-0.5, height - 0.5), aspect="equal")
            ax.axis("off")

    alt = (
        "Stacks of parts, to be read from the bottom up. GPT-2: token and position table; L times LayerNorm, causal "
        "attention, LayerNorm, MLP; LayerNorm, head. Llama: token table; L times RMSNorm, causal rotary attention, "
        "RMSNorm, SwiGLU; RMSNorm, head. Encoder: three tables and a LayerNorm; L times attention in which all see "
        "all, LayerNorm, MLP, LayerNorm. Seq2Seq has a source stack like the encoder, and a target stack: L times "
        "causal attention, cross-attention, MLP, each followed by LayerNorm, then the head. An arrow leads from the "
        "top of the source stack to every cross-attention of the target stack."
    )
    return draw(paint, alt, size=(6.4, 7.3))


# --- one pass, followed by hand ------------------------------------------------------------------------------------


def pencil() -> nn.Module:
    """A GPT of two numbers a token, three tokens a, b, c, and weights that were chosen for a pencil."""
    model = _build("GPT", n_layers=1, d_model=2, n_heads=1, d_ff=2, vocab_size=3, context_length=2).double()
    chosen = {
        "token_embedding.weight": [[2.0, 0], [0, 2], [-1, -1]],
        "position_embedding.weight": [[0.0, 0], [1, 0]],
        "blocks.0.attention.q_proj.weight": [[0.0, 0], [0, 0]],  # all scores 0: each token reads a plain mean
        "blocks.0.attention.k_proj.weight": [[0.0, 0], [0, 0]],
        "blocks.0.attention.v_proj.weight": [[1.0, 0], [0, 1]],
        "blocks.0.attention.o_proj.weight": [[1.0, 0], [0, 1]],
        "blocks.0.mlp.up.weight": [[1.0, -1], [-1, 1]],
        "blocks.0.mlp.down.weight": [[-2.0, 2], [2, -2]],
    }
    state = model.state_dict()  # its tensors share memory with the model's
    for name, numbers in chosen.items():
        state[name].copy_(torch.tensor(numbers))
    return model


def by_hand() -> dict[str, str]:
    """What every step of the pencil model gives for the ids 0, 1."""
    model, seen = pencil(), {}

    def keep(name: str) -> Callable:
        return lambda module, args, output: seen.update({f"{name}-in": args[0], name: output})

    block = model.blocks[0]
    parts = {"norm1": block.norm1, "attention": block.attention, "norm2": block.norm2, "mlp": block.mlp}
    for name, module in (parts | {"block": block, "last": model.norm}).items():
        module.register_forward_hook(keep(name))
    with torch.no_grad():
        seen["logits"] = model(torch.tensor([[0, 1]]))
        seen["token"] = model.token_embedding.weight[None, :2]
    seen["share"] = seen["logits"].softmax(-1)
    steps = ("token", "norm1-in", "norm1", "attention", "norm2-in", "norm2", "mlp", "block", "last", "logits")
    rows = {step: seen[step][0].round(decimals=3) for step in steps}  # LayerNorm's eps shows in the sixth decimal only
    claim(all(row.equal(row.round()) for row in rows.values()), "every number of the pencil model is whole")
    texts = {f"{step}{t}": _row(row, "{:.0f}") for step, rows_ in rows.items() for t, row in enumerate(rows_)}
    return texts | {f"share{t}": _row(row, "{:.2f}") for t, row in enumerate(seen["share"][0])}


def _row(numbers: Tensor, form: str) -> str:
    """(2, −1), with a real minus sign."""
    return "(" + ", ".join(form.format(n + 0.0).replace("-", "−") for n in numbers.tolist()) + ")"


# --- who reads whom ------------------------------------------------------------------------------------------------


def _moved(run: Callable[[Tensor], Tensor], ids: Tensor, V: int) -> Tensor:
    """How far each output row moves when one token is replaced: (1, S) of ids -> (T, S)."""
    before, columns = run(ids), []
    for s in range(ids.shape[1]):
        other = ids.clone()
        other[0, s] = (ids[0, s] + 1) % V
        columns.append((run(other) - before)[0].abs().amax(-1))
    return torch.stack(columns, dim=1)


def _shaken(machine: str, seed: int, **sizes) -> nn.Module:
    """A model with larger random weights than a fresh one has: what moves should move visibly."""
    model = _build(machine, seed, n_layers=3, d_model=16, n_heads=2, context_length=8, **sizes).double()
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=rng(seed), dtype=p.dtype) * 0.2)
    return model


@one_thread()
def reads(T: int = 6, S: int = 5, V: int = 13, seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """Replace one token after another, and see which outputs of each whole machine move."""
    models = {name: _shaken(name, seed, vocab_size=V) for name in MACHINES}
    generator = rng(seed)
    source, target = (torch.randint(0, V, (1, n), generator=generator) for n in (S, T))
    is_token = torch.arange(S)[None] < S - 1  # the last source token is padding
    both, coder = models["Seq2Seq"], models["Encoder"]
    with torch.no_grad():
        found = {
            "GPT": _moved(models["GPT"], target, V),
            "Llama": _moved(models["Llama"], target, V),
            "Encoder": _moved(lambda ids: coder(ids, is_token), source, V),
            "Seq2Seq, source": _moved(lambda ids: both(ids, target, is_token), source, V),
            "Seq2Seq, target": _moved(lambda ids: both(source, ids, is_token), target, V),
        }
    causal, shown = attention.causal_mask(T), is_token.expand(S, S)
    may = {
        "GPT": causal,
        "Llama": causal,
        "Encoder": shown | torch.eye(S, dtype=torch.bool),  # the padding's own row keeps its residual
        "Seq2Seq, source": is_token.expand(T, S),
        "Seq2Seq, target": causal,
    }
    forbidden = torch.cat([moved[~may[name]] for name, moved in found.items()])
    allowed = torch.cat([moved[may[name]] for name, moved in found.items()])
    claim(not forbidden.any(), "outputs that may not see a token do not move at all when it changes")
    claim(bool(allowed.min() > 1e-6), "outputs that may see a token move when it changes")

    def paint(canvas):
        canvas.get_layout_engine().set(hspace=0.08)
        left, middle, right, last = canvas.subplots(2, 2).flat
        plots = (
            (left, "GPT", "GPT, and Llama", "token replaced", "logits row"),
            (middle, "Encoder", "Encoder", "token replaced", "vector"),
            (right, "Seq2Seq, source", "Seq2Seq", "source token replaced", "logits row"),
            (last, "Seq2Seq, target", "Seq2Seq", "target token replaced", "logits row"),
        )
        for ax, name, title, x, y in plots:
            cells(ax, (found[name] > 0).double(), title, x, y, lines=True)

    alt = (
        "Four tables of output rows by replaced tokens, shaded where the output moves. GPT and Llama: a lower "
        "triangle. Encoder: all shaded, but of the last column, padding, only the padding's own row. Seq2Seq, source: "
        f"the first {S - 1} columns in all rows, and nothing in the last column, padding. Seq2Seq, target: a lower "
        "triangle."
    )
    texts = {
        "reads-forbidden": f"{forbidden.max():.0f}",
        "reads-cells": str(len(forbidden)),
        "reads-allowed": f"{allowed.min():.3f}",
    }
    return draw(paint, alt, size=(6.2, 5.6)), texts


@one_thread()
def padded(S: int = 4, n_padding: int = 3, V: int = 13, seed: int = 0) -> dict[str, str]:
    """A text alone, and filled up with padding: how far the vectors of its tokens move."""
    model, ids = _shaken("Encoder", seed, vocab_size=V), torch.randint(1, V, (1, S), generator=rng(seed))
    filled = F.pad(ids, (0, n_padding))
    is_token = torch.arange(S + n_padding)[None] < S
    with torch.no_grad():
        moved = {
            name: (model(filled, mask)[:, :S] - model(ids)).abs().max().item()
            for name, mask in (("mask", is_token), ("none", None))
        }
    claim(moved["mask"] < 1e-12 and moved["none"] > 0.05, "with the padding mask a text does not see its padding")
    return {"padded-none": f"{moved['none']:.2f}"}


# --- three machines learn to repeat and to reverse -----------------------------------------------------------------
#
# A source of 6 symbols out of 10, and the same symbols as the answer: in order, or backwards. Id 1 starts an answer.

SYMBOLS, START, LENGTH, STEPS = 10, 1, 6, 200
VOCABULARY = SYMBOLS + 2


def _questions(B: int, generator: torch.Generator, reverse: bool) -> tuple[Tensor, Tensor]:
    """Sources (B, 6) and answers (B, 6)."""
    source = torch.randint(2, VOCABULARY, (B, LENGTH), generator=generator)
    return source, source.flip(1) if reverse else source


def _answer(model: nn.Module, source: Tensor, written: Tensor) -> Tensor:
    """Logits for the token after each written one: (B, 6), (B, T) -> (B, T, V)."""
    if isinstance(model, seq2seq.Seq2Seq):
        return model(source, written)
    return model(torch.cat([source, written], dim=1))[:, source.shape[1] :]  # a decoder reads both as one text


@functools.cache
def train(machine: str, reverse: bool, seed: int = 0) -> tuple[nn.Module, list[float]]:
    """Train on fresh questions at every step; returns the model and the loss of each step."""
    model = _build(
        machine,
        seed,
        n_layers=1 if machine == "Seq2Seq" else 2,  # one in each of its stacks
        d_model=64,
        n_heads=2,
        vocab_size=VOCABULARY,
        context_length=2 * LENGTH,
        **({"tied": True} if machine == "Llama" else {}),
    )
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    generator, losses = rng(seed), []
    with one_thread():
        for step in range(STEPS):
            rate = 0.003 * min(1, (step + 1) / 80, (STEPS - step) / 80)  # up, and down again
            optimizer.param_groups[0]["lr"] = rate
            source, answer = _questions(32, generator, reverse)
            start = torch.full((len(source), 1), START)
            logits = _answer(model, source, torch.cat([start, answer[:, :-1]], dim=1))
            loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


def _right(model: nn.Module, reverse: bool, n: int = 500) -> float:
    """The share of fresh questions that it answers without a fault, each token read from those it wrote itself."""
    source, answer = _questions(n, rng(1_000_003), reverse)
    written = torch.full((n, 1), START)
    with torch.no_grad():
        for _ in range(LENGTH):
            written = torch.cat([written, _answer(model, source, written)[:, -1:].argmax(-1)], dim=1)
    return (written[:, 1:] == answer).all(1).double().mean().item()


def _cross_weights(model: nn.Module, reverse: bool, n: int = 64) -> Tensor:
    """The cross-attention of the only decoder block, the mean of heads and questions: (T, S)."""
    caught, weigh = [], attention.attention_weights

    def spy(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        caught.append(weigh(q, k, mask))
        return caught[-1]

    source, answer = _questions(n, rng(1_000_003), reverse)
    with mock.patch.object(attention, "attention_weights", spy), torch.no_grad():
        model(source, torch.cat([torch.full((n, 1), START), answer[:, :-1]], dim=1))
    return caught[-1].mean((0, 1))  # the encoder's attention was first, the decoder's own second


@one_thread()
def learning(seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """Loss curves of three machines of like size on two tasks, and where the cross-attention looks."""
    names, tasks = ("GPT", "Llama", "Seq2Seq"), {False: "repeat", True: "reverse"}
    runs = {(name, reverse): train(name, reverse, seed) for reverse in tasks for name in names}
    looks = {reverse: _cross_weights(runs["Seq2Seq", reverse][0], reverse) for reverse in tasks}
    right = {key: _right(model, key[1]) for key, (model, _) in runs.items()}
    end = {key: sum(losses[-20:]) / 20 for key, (_, losses) in runs.items()}
    order = torch.arange(LENGTH)
    claim(looks[False].argmax(-1).equal(order), "to repeat, cross-attention looks most at the same place")
    claim(looks[True].argmax(-1).equal(order.flip(0)), "to reverse, it looks most at the opposite place")
    claim(max(loss for key, loss in end.items() if key != ("Llama", True)) < 0.1, "all others learn their task")
    llama_ = {task: sum(runs["Llama", reverse][1][115:125]) / 10 for reverse, task in tasks.items()}
    claim(llama_["repeat"] < 0.15 and llama_["reverse"] > 0.5, "Llama repeats early and reverses late")
    claim(min(runs["Seq2Seq", reverse][1][60] for reverse in tasks) > 2.1, "Seq2Seq first stays near ln 10")
    alike = [runs["GPT", reverse][1][50] for reverse in tasks]
    claim(abs(alike[0] - alike[1]) < 0.4, "with learned positions both tasks are alike")

    def paint(canvas):
        canvas.get_layout_engine().set(hspace=0.08)
        above, below = canvas.subplots(2, 2)
        titles = ("Repeat: a b c → a b c", "Reverse: a b c → c b a")
        for ax, reverse, title in zip(above, tasks, titles, strict=True):
            ax.axhline(math.log(SYMBOLS), color=ink(), linewidth=1, linestyle=":", label="ln 10")
            for name, style in zip(names, ("-", "--", "-."), strict=True):
                ax.plot(range(1, STEPS + 1), runs[name, reverse][1], linestyle=style, linewidth=1.8, label=name)
            ax.set(title=title, xlabel="training step", ylabel="" if reverse else "loss (nats)", ylim=(0, 2.75))
        for ax, reverse in zip(below, tasks, strict=True):
            texts = [[f"{w:.2f}" for w in row] for row in looks[reverse].tolist()]
            step = "" if reverse else "token of the answer"
            cells(ax, looks[reverse], "Seq2Seq: cross-attention", "token of the source", step, texts, lines=True)
        canvas.legend(*above[0].get_legend_handles_labels(), loc="outside lower center", fontsize=9, ncols=4)

    alt = (
        "Above: loss against training step for repeating and for reversing. GPT falls to zero first in both. Llama "
        f"falls almost as fast on repeating, and more slowly on reversing, to {end['Llama', True]:.2f}. Seq2Seq stays "
        "near 2.3 for a while and then falls to zero in both. Below: mean cross-attention weights of Seq2Seq. They lie "
        "on the diagonal for repeating, on the other diagonal for reversing."
    )
    texts = {f"right-{name}-{tasks[reverse]}": f"{100 * share:.0f}\u00a0%" for (name, reverse), share in right.items()}
    texts |= {f"llama-{task}": f"{loss:.2f}" for task, loss in llama_.items()}
    texts |= {f"n-{name}": f"{_n_parameters(runs[name, True][0]):,}" for name in names}
    return draw(paint, alt, size=(6.4, 6.2)), texts


# --- how a model starts --------------------------------------------------------------------------------------------


def _started(machine: str, how: str, seed: int, **sizes) -> nn.Module:
    """A fresh model: as init_weights makes it ("init"), with std 0.02 everywhere ("equal"), with torch's defaults."""
    model = _build(machine, seed, **sizes)
    with weights_from(seed):
        for name, module in model.named_modules():
            if how == "equal" and name.endswith(("o_proj", "down")):
                nn.init.normal_(module.weight, std=0.02)
            elif how == "torch" and isinstance(module, nn.Linear):
                module.reset_parameters()
        for module in model.modules():  # last, so that a tied head has what torch gives an embedding
            if how == "torch" and isinstance(module, nn.Embedding):
                module.reset_parameters()
    return model


@one_thread()
def depths(layers: tuple[int, ...] = (12, 48), C: int = 256, seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """How large the numbers of the residual stream of a fresh GPT are after each layer."""
    ids = torch.randint(0, 100, (4, 32), generator=rng(seed))
    sizes = {"d_model": C, "n_heads": 4, "vocab_size": 100, "context_length": 32}
    found = {}
    for how in ("equal", "init"):
        for L in layers:
            model, stream = _started("GPT", how, seed, n_layers=L, **sizes), []
            for block in model.blocks:
                block.register_forward_pre_hook(lambda module, args, s=stream: s.append(args[0].std().item()))
            model.norm.register_forward_pre_hook(lambda module, args, s=stream: s.append(args[0].std().item()))
            with torch.no_grad():
                model(ids)
            found[how, L] = stream  # L + 1 numbers
    few, many = layers
    growth = {how: found[how, many][-1] / found[how, few][-1] for how in ("equal", "init")}
    claim(1.8 < growth["equal"] < 2.4, "with std 0.02 everywhere, four times the layers double the stream")
    claim(0.9 < growth["init"] < 1.15, "with init_weights the end does not depend on the number of layers")

    def paint(canvas):
        ax = canvas.subplots()
        names = {"equal": "std 0.02 everywhere", "init": "init_weights"}
        for i, (how, name) in enumerate(names.items()):
            for L, style in zip(layers, ("--", "-"), strict=True):
                ax.plot(range(L + 1), found[how, L], style, color=colour(i), label=f"{name}, {L} layers")
        ax.set(yscale="log", xlabel="layers passed", ylabel="standard deviation", xlim=(0, many))
        ax.set_yticks([0.03, 0.1, 0.3, 1], ["0.03", "0.1", "0.3", "1"])
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_title(f"Residual stream of a fresh GPT, C = {C}")
        canvas.legend(loc="outside lower center", fontsize=9, ncols=2)

    alt = (
        "Standard deviation of the residual stream against layers passed, logarithmic. With 0.02 everywhere it grows "
        f"to {found['equal', few][-1]:.2f} after {few} layers and {found['equal', many][-1]:.2f} after {many}. With "
        f"init_weights it ends at {found['init', few][-1]:.3f} and {found['init', many][-1]:.3f}."
    )
    texts = {f"stream-{how}-{L}": f"{stream[-1]:.2f}" for (how, L), stream in found.items()}
    texts |= {f"stream-{how}-growth": f"{ratio:.2f}" for how, ratio in growth.items()}
    texts |= {"stream-start": f"{found['init', many][0]:.2f}", "stream-equal-first": f"{found['equal', many][1]:.2f}"}
    return draw(paint, alt, size=(6.2, 3.6)), texts


@one_thread()
def fresh(L: int = 4, C: int = 64, V: int = 256, seed: int = 0) -> dict[str, str]:
    """The loss of fresh models on random text, with our first weights and with torch's own."""
    ids = torch.randint(0, V, (8, 65), generator=rng(seed))
    sizes = {"n_layers": L, "d_model": C, "n_heads": 4, "vocab_size": V, "context_length": 64}
    x, labels = ids[:, :-1], ids[:, 1:].flatten()
    texts, kinds = {"ln-V": f"{math.log(V):.2f}"}, {"GPT": {}, "untied": {"tied": False}, "Llama": {}, "Seq2Seq": {}}
    for name, options in kinds.items():
        machine = "GPT" if options else name
        for how in ("init", "equal", "torch"):
            model = _started(machine, how, seed, **sizes, **options)
            with torch.no_grad():
                logits = model(x, x) if machine == "Seq2Seq" else model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), labels).item()
            own = logits.softmax(-1).gather(-1, x[..., None]).mean()  # the share of "the same token again"
            claim(how == "torch" or abs(loss - math.log(V)) < 0.05, "a fresh model's loss is close to ln V")
            texts |= {f"fresh-{name}-{how}": f"{loss:.2f}", f"own-{name}-{how}": f"{own:.2f}"}
    return texts


# --- where the parameters are, and what they do ----------------------------------------------------------------------

GPT2 = {"vocab_size": 50257, "context_length": 1024}
LLAMA = {"vocab_size": 32000, "context_length": 4096}
PUBLISHED = {  # name: machine, sizes, and the number of parameters in the published files
    "llama2.c checkpoint": (
        "Llama",
        {"n_layers": 4, "d_model": 64, "n_heads": 4, "d_ff": 172, "vocab_size": 512, "context_length": 128}
        | {"tied": True},
        230_976,
    ),
    "GPT-2": ("GPT", {"n_layers": 12, "d_model": 768, "n_heads": 12, **GPT2}, 124_439_808),
    "GPT-2 XL": ("GPT", {"n_layers": 48, "d_model": 1600, "n_heads": 25, **GPT2}, 1_557_611_200),
    "TinyLlama": (
        "Llama",
        {"n_layers": 22, "d_model": 2048, "n_heads": 32, "n_kv_heads": 4, "d_ff": 5632, **LLAMA},
        1_100_048_384,
    ),
    "Llama 2 7B": ("Llama", {"n_layers": 32, "d_model": 4096, "n_heads": 32, "d_ff": 11008, **LLAMA}, 6_738_415_616),
    "Llama 2 70B": (
        "Llama",
        {"n_layers": 80, "d_model": 8192, "n_heads": 64, "n_kv_heads": 8, "d_ff": 28672, **LLAMA},
        68_976_648_192,
    ),
}
KINDS = ("token embedding", "head of its own", "attention", "MLP", "positions and norms")


def _by_kind(model: nn.Module) -> dict[str, int]:
    """Parameters of each kind; a shared tensor is counted once, as the embedding."""
    found = dict.fromkeys(KINDS, 0)
    for name, p in model.named_parameters():
        where = {"token_embedding": 0, "head": 1, "attention": 2, "mlp": 3}
        found[KINDS[next((i for part, i in where.items() if part in name.split(".")), 4)]] += p.numel()
    return found


def shares() -> tuple[Figure, dict[str, str]]:
    """Where the parameters of published models are."""
    counted = {name: _by_kind(_outline(machine, **sizes)) for name, (machine, sizes, _) in PUBLISHED.items()}
    for name, (_, _, published) in PUBLISHED.items():
        claim(sum(counted[name].values()) == published, f"{name} has {published:,} parameters")

    def paint(canvas):
        ax = canvas.subplots()
        left = [0.0] * len(counted)
        for i, kind in enumerate(KINDS):
            part = [100 * found[kind] / sum(found.values()) for found in counted.values()]
            bars = ax.barh(range(len(part)), part, left=left, color=(*to_rgb(colour(i)), 0.65), label=kind)
            texts = [f"{share:.0f}" if share > 5 else "" for share in part]
            ax.bar_label(bars, texts, label_type="center", fontsize=9.5, weight="bold")
            left = [a + b for a, b in zip(left, part, strict=True)]
        ax.set(title="Where the parameters are", xlabel="share of all parameters (%)", xlim=(0, 100))
        ax.set_yticks(range(len(counted)), [f"{name}\n{sum(n.values()):,}" for name, n in counted.items()])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_axisbelow(True)
        canvas.legend(loc="outside lower center", fontsize=9, ncols=3)

    share = {
        name: {kind: 100 * n / sum(found.values()) for kind, n in found.items()} for name, found in counted.items()
    }
    alt = "Bars, each the parameters of one model by kind, in percent. " + " ".join(
        f"{name}, {sum(counted[name].values()):,}: "
        + ", ".join(f"{kind} {n:.1f}" for kind, n in found.items() if n)
        + "."
        for name, found in share.items()
    )
    texts = {f"share-{name}-{kind}": f"{n:.1f}\u00a0%" for name, found in share.items() for kind, n in found.items()}
    small = max(found[KINDS[4]] for name, found in share.items())
    return draw(paint, alt, size=(6.4, 4.4)), texts | {"share-smallest": f"{small:.1f}\u00a0%"}


def _short(n: int) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:,}"


def differences() -> dict[str, str]:
    """GPT-2 against a Llama of the same width and depth, part by part; all from models without numbers."""
    sizes = PUBLISHED["GPT-2"][1]
    ours, theirs = _outline("GPT", **sizes), _outline("Llama", **sizes, n_kv_heads=4)
    rows = {
        "positions": lambda name, p: "position" in name,
        "norms": lambda name, p: "norm" in name,
        "attention-matrices": lambda name, p: "attention" in name and p.ndim == 2,
        "mlp-matrices": lambda name, p: "mlp" in name and p.ndim == 2,
        "biases": lambda name, p: name.endswith("bias") and "norm" not in name,
        "head": lambda name, p: name.startswith("head"),
        "embedding": lambda name, p: name.startswith("token"),
    }
    texts = {}
    for column, model in (("gpt", ours), ("llama", theirs)):
        counted = {row: sum(p.numel() for n, p in model.named_parameters() if of(n, p)) for row, of in rows.items()}
        claim(sum(counted.values()) == _n_parameters(model), "the rows of the table add up")
        texts |= {f"{column}-{row}": f"{n:,}" for row, n in counted.items()}
        texts[f"{column}-total"] = f"{_n_parameters(model):,}"
    (F_gpt, F_llama) = (model.config.d_ff for model in (ours, theirs))
    return texts | {"gpt-F": f"{F_gpt:,}", "llama-F": f"{F_llama:,}"}


def work(T: int = 1024) -> dict[str, str]:
    """Parameters and operations of a forward pass, part by part, at three sizes; operations for each of T tokens."""
    small = ("GPT", {"n_layers": 4, "d_model": 128, "n_heads": 4, **GPT2})
    texts = {}
    for column, (machine, sizes) in {"small": small, **{n: PUBLISHED[n][:2] for n in ("GPT-2", "Llama 2 7B")}}.items():
        model = _outline(machine, **sizes)
        c, matrices = model.config, 2 if machine == "GPT" else 3
        L, C, H, K, D, V = c.n_layers, c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, c.vocab_size
        operations = {
            "projections": L * 2 * 2 * C * D * (H + K),
            "scores": L * 2 * 2 * T * H * D,
            "mlp": L * 2 * matrices * C * c.d_ff,
            "head": 2 * C * V,
        }
        total = sum(operations.values())
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, T, dtype=torch.long, device="meta"))
        claim(T * total == counter.get_total_flops(), "operations counted by formula and by PyTorch are equal")
        texts |= {f"work-{column}-{part}": f"{100 * n / total:.1f}\u00a0%" for part, n in operations.items()}
        texts[f"work-{column}-total"] = _short(total)
        texts[f"work-{column}-per"] = f"{total / _n_parameters(model):.2f}"
        table = C * V / _n_parameters(model)
        texts |= {f"work-{column}-n": _short(_n_parameters(model)), f"work-{column}-table": f"{100 * table:.1f}\u00a0%"}
    return texts


@one_thread()
def tied(seed: int = 0) -> dict[str, str]:
    """What sharing the table saves, and why a copy is not the same."""
    texts = {}
    for name, (L, C) in {"small": (12, 768), "medium": (24, 1024), "large": (36, 1280), "xl": (48, 1600)}.items():
        sizes = {"n_layers": L, "d_model": C, "n_heads": C // 64, **GPT2}
        with_, without = (_n_parameters(_outline("GPT", **sizes, tied=tied)) for tied in (True, False))
        claim(without - with_ == C * GPT2["vocab_size"], "tying saves V times C")
        texts |= {f"tied-{name}": f"{with_:,}", f"untied-{name}": f"{without:,}"}
        texts |= {
            f"saved-{name}": f"{without - with_:,}",
            f"saved-share-{name}": f"{100 * (without / with_ - 1):.0f}\u00a0%",
        }
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "vocab_size": 256, "context_length": 32}
    one, two = _build("GPT", seed, **sizes), _build("GPT", seed, **sizes, tied=False)
    two.load_state_dict(one.state_dict())  # the state of a tied model names its table twice
    ids = torch.randint(0, 256, (4, 33), generator=rng(seed))
    for model in (one, two):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        loss.backward()
        optimizer.step()
        texts[f"apart-{'one' if model is one else 'two'}"] = (
            f"{(model.head.weight - model.token_embedding.weight).abs().max():.3f}"
        )
    whole, parts = one.head.weight.grad, (two.head.weight.grad, two.token_embedding.weight.grad)
    claim(torch.allclose(whole, sum(parts), atol=1e-7), "the gradient of a shared table is the sum of both roles'")
    claim(one.head.weight is one.token_embedding.weight, "tied means one tensor")
    return texts


# --- weights that others trained -----------------------------------------------------------------------------------


def interleaved_rows(weight: Tensor, n_heads: int) -> Tensor:
    """The inverse of `half_split_rows`: the rows as a file with interleaved pairs keeps them."""
    return weight.unflatten(-2, (n_heads, 2, -1)).transpose(-3, -2).flatten(-4, -2)


def pairing(H: int = 2, D: int = 4, C: int = 8, T: int = 5, seed: int = 0) -> dict[str, str]:
    """Scores of weights for interleaved pairs, computed with half-split ones: rows reordered, and rows as they are."""
    generator = rng(seed)
    x, q, k = (torch.randn(*shape, generator=generator).double() for shape in ((1, T, C), (H * D, C), (H * D, C)))

    def scores(q: Tensor, k: Tensor, interleaved: bool) -> Tensor:
        turned = [
            positions.apply_rope(heads.split_heads(x @ rows.T, H), torch.arange(T), interleaved=interleaved)
            for rows in (q, k)
        ]
        return turned[0] @ turned[1].mT

    meant = scores(q, k, interleaved=True)
    right = scores(weights.half_split_rows(q, H), weights.half_split_rows(k, H), interleaved=False)
    wrong = scores(q, k, interleaved=False)
    claim(torch.allclose(right, meant, atol=1e-5, rtol=1e-5), "with reordered rows the scores agree")
    return {"pairing-wrong": f"{(wrong - meant).abs().max():.1f}", "pairing-size": f"{meant.abs().mean():.1f}"}


def _each_block(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    return lambda model: [change(block) for block in model.blocks]


def _interleave(block: nn.Module) -> None:
    mha = block.attention
    for projection, n in ((mha.q_proj, mha.n_heads), (mha.k_proj, mha.n_kv_heads)):
        projection.weight.copy_(interleaved_rows(projection.weight, n))


def _transpose(block: nn.Module) -> None:
    block.attention.o_proj.weight.copy_(block.attention.o_proj.weight.T.clone())


def _cut_by_head(block: nn.Module) -> None:
    mha = block.attention
    parts = [mha.q_proj, mha.k_proj, mha.v_proj]
    fused = torch.cat([part.weight for part in parts])  # (3*C, C): queries, keys, values
    for part, rows in zip(parts, fused.unflatten(0, (mha.n_heads, 3, -1)).unbind(1), strict=True):
        part.weight.copy_(rows.flatten(0, 1))


def _swap(block: nn.Module) -> None:
    gate, up = block.mlp.gate.weight.clone(), block.mlp.up.weight.clone()
    block.mlp.gate.weight.copy_(up)
    block.mlp.up.weight.copy_(gate)


def _eps(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-6


SILENT = {  # name: the trained model, and how the load goes wrong
    "transposed": ("GPT", _each_block(_transpose)),
    "cut": ("GPT", _each_block(_cut_by_head)),
    "gelu": ("GPT", _each_block(lambda block: setattr(block.mlp, "activation", F.gelu))),
    "eps": ("GPT", _eps),
    "pairs": ("Llama", _each_block(_interleave)),
    "base": ("Llama", _each_block(lambda block: setattr(block.attention, "rope_base", 500_000.0))),
    "swapped": ("Llama", _each_block(_swap)),
}


@one_thread()
def silent(seed: int = 0) -> dict[str, str]:
    """Loads that go wrong without an error: how far logits move, and how many questions are still answered right."""
    texts, shares_ = {}, {}
    for name, (machine, change) in SILENT.items():
        reverse = machine == "GPT"  # each on the task that it has learned
        right = train(machine, reverse, seed)[0]
        wrong = copy.deepcopy(right)
        source, answer = _questions(500, rng(1_000_003), reverse)
        written = torch.cat([torch.full((500, 1), START), answer[:, :-1]], dim=1)
        with torch.no_grad():
            change(wrong)
            before, after = (_answer(model, source, written) for model in (right, wrong))
        moved, shares_[name] = (after - before).abs().max().item(), _right(wrong, reverse)
        texts |= {f"moved-{name}": f"{moved:.1f}" if moved > 0.1 else f"{moved:.4f}"}
        texts |= {f"still-{name}": f"{100 * shares_[name]:.0f}\u00a0%", f"size-{machine}": f"{before.abs().max():.0f}"}
        claim(_right(right, reverse) > 0.98, "loaded rightly, both answer nearly all questions")
    claim(max(shares_[n] for n in ("transposed", "cut", "pairs")) < 0.1, "these mistakes destroy the answers")
    claim(min(shares_[n] for n in ("gelu", "eps", "base", "swapped")) > 0.9, "these hide behind right answers")
    return texts


def recorded() -> dict[str, str]:
    """What a real checkpoint wrote. It is not part of the course, so its text was recorded."""
    found = json.loads(Path(__file__).with_name("checkpoint.json").read_text(encoding="utf-8"))
    names = ("what", "text", "how", "torch", "date")
    return {f"recorded-{name}": str(found[name]).strip() for name in names} | {"recorded-sha256": found["sha256"][:12]}
