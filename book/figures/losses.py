"""Chapter 7's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import copy
import functools
import itertools
import math
import string
from collections import Counter
from unittest import mock

import torch
from torch import Tensor, nn

from tfmlib import attention, losses, tokens
from tfmlib.course.meters import kept_bytes, peak_bytes
from tfmlib.models import gpt

from . import Figure, claim, colour, draw, ink, one_thread, rng, weights_from
from .tokens import english

N_LETTERS = 26


def _gpt(seed: int, vocab_size: int, context_length: int, C: int = 32, L: int = 1) -> gpt.GPT:
    """A small GPT with weights that depend on the seed alone."""
    sizes = {"n_layers": L, "d_model": C, "n_heads": 2, "vocab_size": vocab_size, "context_length": context_length}
    with weights_from(seed):
        return gpt.GPT(gpt.GPTConfig(**sizes))


def _adam(model: nn.Module, lr: float, beta2: float = 0.999) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, beta2))


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """All gradients of the loss as one long vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])


# --- by hand -----------------------------------------------------------------------------------------------------


def by_hand(logits: Tensor, labels: Tensor) -> dict[str, str]:
    """The worked example: every row has the probabilities 1/2, 1/4, 1/8, 1/8; the last row does not count."""
    leaf = logits.clone().requires_grad_()
    loss = losses.cross_entropy(leaf, labels)
    loss.backward()
    each = [losses.cross_entropy(row, label).item() for row, label in zip(logits, labels, strict=True)]
    counted = [n for n, label in zip(each, labels.tolist(), strict=True) if label != losses.IGNORE]
    texts = {f"nats{t}": f"{n:.3f}" for t, n in enumerate(counted)}
    texts |= {f"bits{t}": f"{n / math.log(2):.0f}" for t, n in enumerate(counted)}
    texts |= {f"slope{t}": ", ".join(f"{n:z.3f}" for n in row).replace("-", "−") for t, row in enumerate(leaf.grad)}
    texts["hand-loss"] = f"{loss.item():.3f}"
    texts["hand-perplexity"] = f"{losses.perplexity(loss.item()):.0f}"
    texts["hand-counted-4"] = f"{sum(counted) / 4:.3f}"  # the padding counted, as if it were predicted perfectly
    texts["hand-counted-perplexity"] = f"{losses.perplexity(sum(counted) / 4):.2f}"
    claim(leaf.grad.sum(-1).abs().max() < 1e-6, "the gradient of each row sums to 0")
    return texts


def stability() -> dict[str, str]:
    """-log p of a label whose logit is `gap` below the only other one: two ways, and their gradients."""
    texts = {}
    for gap in (10, 100, 200):
        for name, function in {
            "naive": lambda x: -x.softmax(-1)[0].log(),
            "padded": lambda x: -(x.softmax(-1)[0] + 1e-9).log(),
            "ours": lambda x: losses.cross_entropy(x, torch.tensor(0)),
        }.items():
            x = torch.tensor([0.0, gap], requires_grad=True)
            loss = function(x)
            loss.backward()
            slope = x.grad[0].item()
            texts[f"{name}-{gap}"] = _plain(loss.item(), 2)
            texts[f"{name}-slope-{gap}"] = _plain(slope, 2)
    claim(texts["ours-200"] == "200.00" and texts["naive-200"] == "∞", "log_softmax is right where the log is infinite")
    for name, fails in (("limit", lambda x, loss: loss.isinf()), ("nan", lambda x, loss: x.grad.isnan().any())):
        for gap in range(1, 200):
            x = torch.tensor([0.0, gap], requires_grad=True)
            loss = -x.softmax(-1)[0].log()
            loss.backward()
            if fails(x, loss):
                texts[f"gap-{name}"] = str(gap)
                break
    fine = torch.linspace(10.8, 10.85, 51)
    texts["bf16-values"] = " or ".join(f"{n:.4f}" for n in sorted(set(fine.bfloat16().tolist())))
    texts["ln-gpt2"] = f"{math.log(50257):.4f}"
    return texts


def _plain(number: float, digits: int) -> str:
    """A number as a page writes it."""
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞"
    if 0 < abs(number) < 0.5 * 10**-digits:
        mantissa, exponent = f"{number:.0e}".replace("-", "−").split("e")
        power = str(int(exponent.replace("−", "-"))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"{mantissa}\N{NO-BREAK SPACE}·\N{NO-BREAK SPACE}10{power}"
    return f"{number:z.{digits}f}".replace("-", "−")


# --- one pass or many --------------------------------------------------------------------------------------------


def parallel(T: int = 32, V: int = 50, seed: int = 0) -> dict[str, str]:
    """The loss and its gradient from one pass over T tokens, and from T passes over the T prefixes; in float64."""
    model = _gpt(seed, V, T, L=2).double()
    inputs, labels = losses.shift_labels(torch.randint(V, (1, T + 1), generator=rng(seed)))
    logits = model(inputs)
    last = torch.stack([model(inputs[:, : t + 1])[:, -1] for t in range(T)], dim=1)
    together, apart = losses.cross_entropy(logits, labels), losses.cross_entropy(last, labels)
    moved = (_gradient(model, together) - _gradient(model, apart)).abs().max().item()
    difference = (logits - last).abs().max().item()
    claim(max(moved, difference, (together - apart).abs().item()) < 1e-13, "one pass equals T passes")
    return {
        "parallel-logits": _plain(difference, 2) if difference else "0",
        "parallel-gradient": _plain(moved, 2) if moved else "0",
        "parallel-tokens": f"{T * (T + 1) // 2}",
        "parallel-ratio": f"{(T + 1) / 2:g}",
    }


# --- which label -------------------------------------------------------------------------------------------------
#
# A language of letters: four times in five the next letter is the next one of the alphabet, a after z. Else it is any.

NOISE = 0.2


def alphabet(B: int, T: int, generator: torch.Generator) -> Tensor:
    """B texts of T letters as ids 0 to 25: (B, T)."""
    new = torch.randint(N_LETTERS, (B, T), generator=generator)
    jump = torch.rand(B, T, generator=generator) < NOISE
    ids = new.clone()
    for t in range(1, T):
        ids[:, t] = torch.where(jump[:, t], new[:, t], (ids[:, t - 1] + 1) % N_LETTERS)
    return ids


def floor(ahead: int = 1) -> float:
    """The entropy of the letter `ahead` places on, given the letters so far, in nats: no model can get below it."""
    shift = torch.eye(N_LETTERS, dtype=torch.float64).roll(1, 1)
    chances = torch.full_like(shift, NOISE / N_LETTERS) + (1 - NOISE) * shift
    return torch.special.entr(torch.linalg.matrix_power(chances, ahead)[0]).sum().item()


KINDS = {
    "right": "one step ahead",
    "twice": "shifted twice",
    "same": "not shifted",
    "leak": "no causal mask",
}


def _pair(kind: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and labels as this kind of code makes them."""
    if kind == "same":
        return ids, ids
    if kind == "twice":
        inputs, labels = losses.shift_labels(ids)
        return inputs[:, :-1], labels[:, 1:]  # the loss shifts labels that were shifted before
    return losses.shift_labels(ids)


@functools.cache
@one_thread()
def _train_letters(kind: str, seed: int, steps: int = 250, B: int = 16, T: int = 24) -> dict:
    """Train on labels of this kind; then the real loss of the next letter, and what the model writes after "abc"."""
    model, generator, found = _gpt(seed, N_LETTERS, T), rng(seed), []
    optimizer = _adam(model, 0.02)

    def everything(T: int, S: int | None = None) -> Tensor:
        return torch.ones(T, S or T, dtype=torch.bool)

    with mock.patch.object(attention, "causal_mask", everything if kind == "leak" else attention.causal_mask):
        for _ in range(steps):
            inputs, labels = _pair(kind, alphabet(B, T, generator))
            loss = losses.cross_entropy(model(inputs), labels)
            _step(optimizer, loss)
            found.append(loss.item())
    with torch.no_grad():
        inputs, labels = losses.shift_labels(alphabet(256, T, rng(seed + 1000)))
        real = losses.cross_entropy(model(inputs), labels).item()
        ids = torch.tensor([[0, 1, 2]])
        for _ in range(9):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    written = "".join(string.ascii_lowercase[i] for i in ids[0, 3:].tolist())
    return {"losses": found, "end": sum(found[-20:]) / 20, "real": real, "written": written}


def labels(seed: int = 1) -> tuple[Figure, dict[str, str]]:
    """The loss that training reports, for right labels and three mistakes, and what comes of it."""
    runs = {kind: _train_letters(kind, seed) for kind in KINDS}
    one, two = floor(1), floor(2)
    claim(one - 0.05 < runs["right"]["end"] < one + 0.15, "with right labels the loss comes close to the floor")
    claim(two - 0.05 < runs["twice"]["end"] < two + 0.2, "labels shifted twice: the loss falls to a floor of its own")
    claim(runs["same"]["end"] < 0.02, "labels that are not shifted: the loss goes to 0")
    claim(runs["leak"]["end"] < one - 0.2, "without the mask the loss falls below the floor")
    claim(runs["right"]["written"] == "defghijkl", "the right model continues the alphabet")
    claim(runs["twice"]["written"] == "egikmoqsu", "labels shifted twice: it skips every other letter")
    claim(set(runs["same"]["written"]) == {"c"}, "labels that are not shifted: it repeats")
    worst = min(runs[kind]["real"] for kind in ("twice", "same", "leak"))
    claim(worst > math.log(N_LETTERS), "on the real next letter the three mistakes are worse than a guess")

    def paint(canvas):
        ax = canvas.subplots()
        for (kind, name), style in zip(KINDS.items(), ("-", "--", "-.", (0, (6, 2, 1, 2, 1, 2))), strict=True):
            curve = torch.tensor(runs[kind]["losses"]).unfold(0, 10, 5).mean(1)  # means of 10 steps
            ax.plot([5 + 5 * i for i in range(len(curve))], curve, linestyle=style, label=name)
        ax.axhline(one, color=ink(), linewidth=1, linestyle=(0, (2, 3)))
        ax.set(title="What training reports", xlabel="training step", ylabel="loss (nats a letter)", ylim=(0, 3.3))
        ax.legend(fontsize=9, ncols=2)

    alt = (
        "Reported loss against training step for four kinds of labels. One step ahead: it falls to the dotted floor at "
        f"{one:.2f}. Shifted twice: it falls in the same way, to {runs['twice']['end']:.2f}. Not shifted: it is near 0 "
        f"at once. No causal mask: it first falls like that, then below the floor, to {runs['leak']['end']:.2f}."
    )
    texts = {"floor-1": f"{one:.2f}", "floor-2": f"{two:.2f}", "ln-26": f"{math.log(26):.2f}"}
    for kind, run in runs.items():
        texts |= {
            f"end-{kind}": f"{run['end']:.2f}" if run["end"] > 0.01 else "below 0.01",
            f"real-{kind}": f"{run['real']:.2f}",
            f"written-{kind}": run["written"],
        }
    return draw(paint, alt, size=(6.4, 3.5)), texts


# --- which rows count --------------------------------------------------------------------------------------------

STOP, PAD = N_LETTERS, N_LETTERS + 1


def stories(B: int, generator: torch.Generator, shortest: int = 4, longest: int = 40) -> tuple[Tensor, Tensor]:
    """Texts of unequal length, short ones more often, each with STOP at its end: ids and is_token, (B, longest + 1)."""
    lengths = (shortest * (longest / shortest) ** torch.rand(B, generator=generator)).long()
    ids = torch.nn.functional.pad(alphabet(B, longest, generator), (0, 1))
    place = torch.arange(longest + 1)
    ids = torch.where(place < lengths[:, None], ids, torch.where(place == lengths[:, None], STOP, PAD))
    return ids, place <= lengths[:, None]


@functools.cache
@one_thread()
def _train_padded(counted: bool, seed: int, steps: int = 250) -> dict:
    """Train with the padding counted, or not; then both losses and both gradients on fresh texts."""
    model, generator, found = _gpt(seed, N_LETTERS + 2, 40), rng(seed), []
    optimizer = _adam(model, 0.01)
    for _ in range(steps):
        ids, is_token = stories(16, generator)
        inputs, labels = losses.shift_labels(ids, None if counted else is_token)
        loss = losses.cross_entropy(model(inputs), labels)
        _step(optimizer, loss)
        found.append(loss.item())
    ids, is_token = stories(256, rng(seed + 1000))
    (inputs, right), (_, wrong) = losses.shift_labels(ids, is_token), losses.shift_labels(ids)
    logits = model(inputs)
    each = [losses.cross_entropy(logits[b], right[b]) for b in range(len(ids))]
    kinds = {
        "right": losses.cross_entropy(logits, right),
        "counted": losses.cross_entropy(logits, wrong),
        "means": torch.stack(each).mean(),  # each text a batch of its own
    }
    gradients = {name: _gradient(model, loss) for name, loss in kinds.items()}
    return {
        "end": sum(found[-20:]) / 20,
        "losses": {name: loss.item() for name, loss in kinds.items()},
        "norms": {name: g.norm().item() for name, g in gradients.items()},
        "cosine": {name: torch.cosine_similarity(gradients["right"], g, 0).item() for name, g in gradients.items()},
        "share": (right != losses.IGNORE).double().mean().item(),
        "lengths": is_token.sum(1).double(),
    }


def padding(seed: int = 0) -> dict[str, str]:
    """What counting the padding does to the loss, to the gradient, and to what is learned."""
    right, counted = _train_padded(False, seed), _train_padded(True, seed)
    share = counted["share"]
    ratio = counted["norms"]["counted"] / counted["norms"]["right"]
    claim(counted["losses"]["counted"] < 0.5 * right["losses"]["right"], "the counted loss looks far too good")
    claim(abs(ratio - share) < 0.02 and counted["cosine"]["counted"] > 0.99, "the gradient is scaled by the share")
    claim(counted["losses"]["right"] > right["losses"]["right"] - 0.01, "the real loss is no better")
    claim(right["cosine"]["means"] < 0.9, "the mean of means has another gradient")
    lengths = counted["lengths"] - 1  # labels of a text
    return {
        "pad-share": f"{100 * share:.0f} %",
        "pad-right": f"{right['losses']['right']:.2f}",
        "pad-counted": f"{counted['losses']['counted']:.2f}",
        "pad-real": f"{counted['losses']['right']:.2f}",
        "pad-ratio": f"{ratio:.2f}",
        "pad-share-2": f"{share:.2f}",
        "pad-means": f"{right['losses']['means']:.2f}",
        "pad-means-cosine": f"{right['cosine']['means']:.2f}",
        "pad-weight": f"{lengths.max() / lengths.min():.0f}",
    }


# --- perplexity and bits per byte --------------------------------------------------------------------------------


def _bigram_loss(train: list[int], test: list[int], V: int) -> float:
    """The loss of a table of pairs, in nats a token: p(y | x), mixed with p(y) where x has been seen rarely.

    The mixture is Witten and Bell's: x keeps its own counts, and as many more as it had different followers.
    """
    single, before, pairs = Counter(train), Counter(train[:-1]), Counter(itertools.pairwise(train))
    followers = Counter(x for x, _ in pairs)
    total = 0.0
    for x, y in itertools.pairwise(test):
        alone = (single[y] + 1) / (len(train) + V)
        chance = (pairs[x, y] + followers[x] * alone) / (before[x] + followers[x]) if before[x] else alone
        total -= math.log(chance)
    return total / (len(test) - 1)


def two_tokenizers(sizes: tuple[int, ...] = (256, 1024)) -> dict[str, str]:
    """The same kind of model on the same text, cut into bytes and into larger tokens."""
    train, test = english()
    texts, found = {"bpb-bytes": f"{len(test.encode()):,}"}, []
    for V in sizes:
        tokenizer = tokens.Tokenizer(*tokens.train_bpe(train, V))
        ids = tokenizer.encode(test)
        loss = _bigram_loss(tokenizer.encode(train), ids, V)
        n_bytes = len(test.encode()) - len(tokenizer.vocab[ids[0]])  # the first token is not predicted
        found.append((losses.perplexity(loss), losses.bits_per_byte(loss, len(ids) - 1, n_bytes)))
        texts |= {
            f"bpb-tokens-{V}": f"{len(ids):,}",
            f"bpb-loss-{V}": f"{loss:.2f}",
            f"bpb-perplexity-{V}": f"{found[-1][0]:.1f}",
            f"bpb-bits-{V}": f"{found[-1][1]:.2f}",
        }
    claim(found[0][0] < found[1][0] and found[0][1] > found[1][1], "the lower perplexity is the worse model")
    return texts


# --- mean or tail ------------------------------------------------------------------------------------------------
#
# A text is some letter of ten and four more: nine times in ten forwards, else backwards. The second letter decides.

RARE, FRACTION, LETTERS, LENGTH = 0.1, 0.3, 10, 5


def two_ways(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n texts, (n, 5), and which of them are of the rare kind, (n,)."""
    first = torch.randint(LETTERS, (n, 1), generator=generator)
    rare = torch.rand(n, generator=generator) < RARE
    return (first + torch.where(rare, -1, 1)[:, None] * torch.arange(LENGTH)) % LETTERS, rare


def text_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of each text, summed over its labels: (n, T) -> (n,), in nats a text."""
    inputs, labels = losses.shift_labels(ids)
    log_p = model(inputs).log_softmax(-1)
    return -log_p.gather(-1, labels[..., None])[..., 0].sum(1)


def best(fraction: float) -> tuple[float, float]:
    """The losses of a common and of a rare text at the best chance q of "forwards", for the tail of this fraction.

    By trying q: the tail is the mean of the largest losses, `fraction` of all.
    """
    q = torch.linspace(0.001, 0.999, 9981, dtype=torch.float64)
    common, rare = -q.log(), -(1 - q).log()
    rare_first = torch.minimum(torch.tensor(RARE), torch.tensor(fraction)) * rare + max(0, fraction - RARE) * common
    common_first = min(1 - RARE, fraction) * common + max(0, fraction - (1 - RARE)) * rare
    i = torch.where(rare >= common, rare_first, common_first).argmin()
    return common[i].item(), rare[i].item()


@functools.cache
@one_thread()
def _train_tail(fraction: float, seed: int, steps: int = 300, n: int = 256, every: int = 10) -> dict:
    """Train on the tail of each batch; fraction 1 is the mean. The losses of both kinds, and the model half-way."""
    model, generator = _gpt(seed, LETTERS, LENGTH - 1), rng(seed)
    optimizer = _adam(model, 0.006, beta2=0.99)  # a shorter memory: the tail's gradients change much in size
    test, rare = two_ways(2000, rng(seed + 1000))
    found = []
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                each = text_losses(model, test)
            found.append((step, each[~rare].mean().item(), each[rare].mean().item()))
        if step == steps // 5:
            early = copy.deepcopy(model)
        if step < steps:
            optimizer.param_groups[0]["lr"] = 0.006 * (1 - step / steps)
            ids, _ = two_ways(n, generator)
            _step(optimizer, losses.tail_loss(text_losses(model, ids), fraction))
    return {
        "curve": found,
        "common": found[-1][1],
        "rare": found[-1][2],
        "mean": each.mean().item(),
        "tail": losses.tail_loss(each, FRACTION).item(),
        "early": early,
    }


@one_thread()
def _noise(model: nn.Module, fraction: float, n: int = 64, repeats: int = 100, seed: int = 0) -> float:
    """The variance of the gradient over batches of n texts, summed over the parameters."""
    generator = rng(seed)
    batches = [two_ways(n, generator)[0] for _ in range(repeats)]
    gradients = [_gradient(model, losses.tail_loss(text_losses(model, ids), fraction)) for ids in batches]
    return torch.stack(gradients).var(0).sum().item()


def tail(seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """The same model, the same texts, two objectives: the losses of the two kinds of text, and the gradient's noise."""
    names = {1.0: "mean", FRACTION: "tail"}
    runs = {name: _train_tail(fraction, seed) for fraction, name in names.items()}
    ideal = {name: best(fraction) for fraction, name in names.items()}
    models = {"start": _gpt(seed, LETTERS, LENGTH - 1), "later": runs["mean"]["early"]}
    ratios = {when: _noise(model, FRACTION) / _noise(model, 1.0) for when, model in models.items()}
    mean, worst = runs["mean"], runs["tail"]
    claim(worst["rare"] < mean["rare"] - 0.5 and worst["common"] > mean["common"] + 0.1, "rare gains, common pays")
    claim(mean["mean"] < worst["mean"] and worst["tail"] < mean["tail"], "each is better at its own objective")
    claim(2.8 < ratios["start"] < 5.5, "at the start the tail's gradient has about 1 / fraction times the variance")
    claim(9 < ratios["later"] < 13, "later it is about the square of that")
    claim(worst["curve"][5][1] > 2 * mean["curve"][5][1], "tail training learns the common kind later")

    def paint(canvas):
        axes = canvas.subplots(1, 2, sharey=True)
        kinds = (("common texts (90 %)", 1), ("rare texts (10 %)", 2))
        for ax, (title, place) in zip(axes, kinds, strict=True):
            for i, (name, style) in enumerate(zip(names.values(), ("-", "--"), strict=True)):
                curve = runs[name]["curve"]
                ax.plot([row[0] for row in curve], [row[place] for row in curve], style, label=f"trained on the {name}")
                ax.axhline(ideal[name][place - 1], color=colour(i), linewidth=1, linestyle=(0, (2, 3)))
            ax.set(title=title, xlabel="training step", yscale="log")
        axes[0].set_ylabel("loss (nats a text)")
        axes[0].set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
        axes[0].legend(fontsize=9)

    alt = (
        "Loss against training step for common and rare texts, logarithmic, for the same model trained on the mean and "
        f"on the tail. Common texts end at {mean['common']:.2f} and {worst['common']:.2f} nats, rare texts at "
        f"{mean['rare']:.2f} and {worst['rare']:.2f}. Dotted lines show the best values for each objective."
    )
    texts = {}
    for name, run in runs.items():
        common, rare = ideal[name]
        texts |= {f"{name}-{key}": f"{run[key]:.2f}" for key in ("common", "rare", "mean", "tail")}
        texts |= {f"ideal-{name}-common": f"{common:.2f}", f"ideal-{name}-rare": f"{rare:.2f}"}
    texts |= {f"noise-{when}": f"{ratio:.1f}" for when, ratio in ratios.items()}
    texts["noise-k"] = str(round(FRACTION * 256))
    return draw(paint, alt, size=(6.6, 3.4)), texts


def one_number(outcomes: tuple[float, ...] = (0, 0, 0, 0, 10)) -> dict[str, str]:
    """The best single answer to these outcomes, for three losses; found by trying."""
    y, tried = torch.tensor(outcomes), torch.linspace(0, 10, 1001)[:, None]
    error = y - tried
    kinds = {
        "square": error.square(),
        "absolute": error.abs(),
        "quantile": torch.maximum(0.9 * error, -0.1 * error),
    }
    return {f"best-{name}": f"{tried[loss.mean(1).argmin()].item():.0f}" for name, loss in kinds.items()}


# --- rewards -----------------------------------------------------------------------------------------------------


def hand_advantages() -> dict[str, str]:
    """Group advantages of a few groups of rewards."""
    one, three = losses.group_advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0]])).tolist()
    texts = {f"group-one-{i}": _plain(a, 2) for i, a in enumerate(one)}
    texts["group-three"] = ", ".join(_plain(a, 2) for a in three)
    for n in range(2, 65):  # the sum of a few equal numbers may be exact
        centred = torch.full((n,), 0.1) - torch.full((n,), 0.1).mean()
        if centred[0] != 0:
            break
    texts |= {
        "group-rounding-n": str(n),
        "group-rounding": _plain((centred / centred.square().mean().sqrt())[0].item(), 2),
    }
    claim("1.00" in texts["group-rounding"], "a rounded mean makes advantages of size 1")
    unbiased = torch.tensor([1.0, 0, 0, 0])
    texts["group-unbiased"] = f"{((unbiased - unbiased.mean()) / unbiased.std())[0]:.2f}"
    return texts


def _pushes(p: float, n: int) -> dict[str, float]:
    """What a question with pass rate p gets from groups of n, on average: the chance that a group says anything,
    and the push on the logit of p, with advantages divided by the standard deviation and without."""
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    spread = [c / n * (1 - c / n) for c in range(n + 1)]
    return {
        "speaks": sum(chances[1:n]),
        "divided": sum(chance * math.sqrt(s) for chance, s in zip(chances, spread, strict=True)),
        "plain": sum(chance * s for chance, s in zip(chances, spread, strict=True)),
    }


def _measured_push(p: float, n: int, n_groups: int, seed: int = 0) -> float:
    """The same "divided" push, by the pieces of this chapter: one token, two answers, autograd."""
    theta = torch.tensor(math.log(p / (1 - p)), requires_grad=True)
    right = (torch.rand(n_groups, n, generator=rng(seed)) < p).float()
    log_probs = torch.where(right > 0, torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta))
    advantages = losses.group_advantages(right).flatten()
    loss = losses.policy_gradient_loss(log_probs.view(-1, 1), advantages, torch.ones(n_groups * n, 1).bool())
    loss.backward()
    return -theta.grad.item()


def signal(n: int = 8, n_groups: int = 20_000) -> tuple[Figure, dict[str, str]]:
    """How much a question contributes to learning, by how often it is answered rightly."""
    rates = [i / 100 for i in range(101)]
    curves = [_pushes(p, n) for p in rates]
    points = {p: _measured_push(p, n, n_groups) for p in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)}
    gap = max(abs(push - _pushes(p, n)["divided"]) for p, push in points.items())
    claim(gap < 0.01, "the measured push is the one that was counted")

    def paint(canvas):
        ax = canvas.subplots()
        names = {
            "speaks": ("share of groups with any signal", "-"),
            "divided": ("mean push, divided by std", "--"),
            "plain": ("mean push, not divided", "-."),
        }
        for name, (label, style) in names.items():
            ax.plot(rates, [curve[name] for curve in curves], style, label=label)
        ax.plot(points.keys(), points.values(), "o", color=colour(1), label="measured")
        ax.set(title=f"What a question teaches, groups of {n}", xlabel="pass rate of the question (0 to 1)")
        ax.set(ylabel="share, or push on the logit", ylim=(0, 1.05))
        canvas.legend(loc="outside lower center", fontsize=9, ncols=2)

    tiny, half = _pushes(0.01, n), _pushes(0.5, n)
    alt = (
        "Three curves against the pass rate of a question, all 0 at rates 0 and 1 and highest at a half. The share of "
        f"groups with any signal reaches {half['speaks']:.2f}, the push with division {half['divided']:.2f}, without "
        f"{half['plain']:.2f}. At a rate of 0.01 they are {tiny['speaks']:.2f}, {tiny['divided']:.3f} and "
        f"{tiny['plain']:.3f}. Measured points lie on the second curve."
    )
    texts = {"signal-groups": f"{n_groups:,}"}
    for p in (0.001, 0.01):
        texts[f"silent-{p}"] = f"{100 * (1 - _pushes(p, n)['speaks']):.1f} %"
    texts["push-ratio-divided"] = f"{half['divided'] / tiny['divided']:.0f}"
    texts["push-ratio-plain"] = f"{half['plain'] / tiny['plain']:.0f}"
    return draw(paint, alt, size=(6.4, 3.9)), texts


# A language of answers. The question is one of 12 letters. A right answer is the next letter and a stop; it may begin
# with the word "because", once or more. Before reinforcement learning the model learns from a text in which answers
# with "because" are right more often. It never sees the right answer to two hard questions.

QUESTIONS, BECAUSE, FULL_STOP, LONGEST = 12, 12, 13, 8
HARD, ASKED = (6, 7), 8  # g and h; the questions a to h are asked in reinforcement learning, i to l are not


def answers(B: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Questions with their answers, to learn from: ids and is_token, (B, 5)."""
    question = torch.randint(QUESTIONS, (B,), generator=generator)
    careful = torch.rand(B, generator=generator) < 0.3
    n_because = careful * (1 + (torch.rand(B, generator=generator) < 0.2).long())
    right = torch.rand(B, generator=generator) < torch.where(careful, 0.9, 0.4)
    right &= ~torch.isin(question, torch.tensor(HARD))
    off = torch.where(right, 0, torch.randint(1, QUESTIONS, (B,), generator=generator))
    place = torch.arange(5)
    ids = torch.where(place <= n_because[:, None], BECAUSE, FULL_STOP)
    ids[:, 0] = question
    ids.scatter_(1, n_because[:, None] + 1, ((question + 1 + off) % QUESTIONS)[:, None])
    return ids, place < n_because[:, None] + 3


@torch.no_grad()
def _sample(model: nn.Module, questions: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One answer to each question, drawn token by token: ids (N, 1 + T), and which of the T were drawn, (N, T)."""
    ids, done, drawn = questions[:, None], torch.zeros(len(questions), dtype=torch.bool), []
    while len(drawn) < LONGEST and not done.all():
        new = torch.multinomial(model(ids)[:, -1].softmax(-1), 1, generator=generator)[:, 0]
        new = torch.where(done, FULL_STOP, new)
        drawn.append(~done)
        done = done | (new == FULL_STOP)
        ids = torch.cat([ids, new[:, None]], dim=1)
    return ids, torch.stack(drawn, dim=1)


def _judge(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of each answer: how often it says "because", and whether it is right, 1 or 0. (N,) both."""
    answer = ids[:, 1:]
    n_because = (answer == BECAUSE).sum(1)
    leading = (answer == BECAUSE).long().cumprod(1).sum(1)
    last = answer.gather(1, n_because.clamp(max=answer.shape[1] - 1)[:, None])[:, 0]
    right = (leading == n_because) & ((answer < QUESTIONS).sum(1) == 1) & (answer == FULL_STOP).any(1)
    return n_because.float(), (right & (last == (ids[:, 0] + 1) % QUESTIONS)).float()


def _log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """The log-probability of each token of the answers: (N, 1 + T) -> (N, T)."""
    inputs, labels = losses.shift_labels(ids)
    return model(inputs).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def _trials(model: nn.Module, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """n answers to each of the 12 questions: words "because" and right or not, (12, n) both."""
    ids, _ = _sample(model, torch.arange(QUESTIONS).repeat_interleave(n), rng(seed))
    return tuple(found.view(QUESTIONS, n) for found in _judge(ids))


@functools.cache
@one_thread()
def _imitate(seed: int, steps: int = 300, B: int = 128) -> gpt.GPT:
    """The model before reinforcement learning: trained by cross-entropy on the text of answers."""
    model, generator = _gpt(seed, QUESTIONS + 2, 1 + LONGEST), rng(seed)
    optimizer = _adam(model, 0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
        inputs, labels = losses.shift_labels(*answers(B, generator))
        _step(optimizer, losses.cross_entropy(model(inputs), labels))
    return model


@functools.cache
@one_thread()
def _reinforce(reward: str, seed: int, penalty: float = 0.0, steps: int = 100, n: int = 8, every: int = 10) -> dict:
    """Policy gradient from the imitating model: n answers to each of the questions a to h in a step.

    `reward` is "right" or "because". `penalty` times log(p / p before) is taken off the reward of each answer.
    """
    start = _imitate(seed)
    model, generator, curve, silent = copy.deepcopy(start), rng(seed), [], []
    optimizer = _adam(model, 0.001)
    for step in range(steps + 1):
        if step % every == 0:
            said, right = _trials(model, 100, seed + 1000)
            curve.append((step, said[:ASKED].mean().item(), right[:ASKED].mean().item()))
        if step == steps:
            break
        ids, is_token = _sample(model, torch.arange(ASKED).repeat_interleave(n), generator)
        said, right = _judge(ids)
        rewards, log_probs = right if reward == "right" else said, _log_probs(model, ids)
        if penalty:
            with torch.no_grad():
                rewards = rewards - penalty * ((log_probs - _log_probs(start, ids)) * is_token).sum(1)
        advantages = losses.group_advantages(rewards.view(ASKED, n))
        silent.append((advantages == 0).all(1).float().mean().item())
        _step(optimizer, losses.policy_gradient_loss(log_probs, advantages.flatten(), is_token))
    said, right = _trials(model, 200, seed + 2000)
    return {"model": model, "curve": curve, "silent": silent, "said": said, "right": right}


REWARDS = {
    "right": ("right answers", ("right", 0.0)),
    "because": ("the word because", ("because", 0.0)),
    "held": ("the word, with a penalty", ("because", 1.0)),
}


def _written(model: nn.Module, question: int, seed: int) -> str:
    """One answer of the model, as text."""
    ids, drawn = _sample(model, torch.tensor([question]), rng(seed))
    names = {BECAUSE: "because", FULL_STOP: "."}
    words = [names.get(i, string.ascii_lowercase[i]) for i in ids[0, 1:][drawn[0]].tolist()]
    return " ".join(words).replace(" .", ".")


def rewards(seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """The same model trained on three rewards: what is rewarded, and what is wanted."""
    runs = {name: _reinforce(reward, seed, penalty) for name, (_, (reward, penalty)) in REWARDS.items()}
    said, right = _trials(_imitate(seed), 200, seed + 2000)
    with_word, without = right[said > 0].mean().item(), right[said == 0].mean().item()
    ends = {name: (run["said"][:ASKED].mean().item(), run["right"][:ASKED].mean().item()) for name, run in runs.items()}
    before = said[:ASKED].mean().item(), right[:ASKED].mean().item()
    claim(with_word > without + 0.1, "before, answers with the word are right more often")
    claim(ends["because"][0] > 6 and ends["because"][1] < 0.05, "the word is maximised and right answers vanish")
    claim(ends["right"][1] > before[1] + 0.3, "rewarding right answers makes them more frequent")
    claim(ends["held"][1] > before[1] - 0.05 and ends["held"][0] < 2, "the penalty holds it")

    def paint(canvas):
        axes = canvas.subplots(1, 2)
        for (name, run), style in zip(runs.items(), ("-", "--", "-."), strict=True):
            steps = [row[0] for row in run["curve"]]
            for place, ax in enumerate(axes, start=1):
                ax.plot(steps, [row[place] for row in run["curve"]], style, label=REWARDS[name][0])
        axes[0].set(title="The word because", xlabel="training step", ylabel="words an answer", ylim=(-0.2, 8.2))
        axes[1].set(title="Right answers", xlabel="training step", ylabel="share of answers", ylim=(-0.02, 1.02))
        handles, names = axes[0].get_legend_handles_labels()
        canvas.legend(handles, [f"reward: {n}" for n in names], loc="outside lower center", fontsize=9, ncols=2)

    alt = (
        "Two charts against the training step, three rewards each. Where the word is rewarded, answers end with "
        f"{ends['because'][0]:.1f} of them, and the share of right answers falls from {before[1]:.2f} to "
        f"{ends['because'][1]:.2f}. Where right answers are rewarded, their share rises to {ends['right'][1]:.2f}. "
        f"With a penalty the word stays at {ends['held'][0]:.1f} and right answers at {ends['held'][1]:.2f}."
    )
    texts = {
        "rl-with": f"{100 * with_word:.0f} %",
        "rl-without": f"{100 * without:.0f} %",
        "rl-before-said": f"{before[0]:.1f}",
        "rl-before-right": f"{100 * before[1]:.0f} %",
        "rl-answer": _written(runs["because"]["model"], 2, 0),
    }
    for name, (n_said, share) in ends.items():
        texts |= {f"rl-{name}-said": f"{n_said:.1f}", f"rl-{name}-right": f"{100 * share:.0f} %"}
    silent = runs["right"]["silent"]
    first, last = sum(silent[:10]) / 10, sum(silent[-10:]) / 10
    claim(last > first + 0.2, "more and more groups are silent")
    texts |= {"silent-first": f"{100 * first:.0f} %", "silent-last": f"{100 * last:.0f} %"}
    for name, model_right in (("before", right), ("after", runs["right"]["right"])):
        texts[f"rl-{name}-hard"] = f"{100 * model_right[list(HARD)].mean():.0f} %"
    return draw(paint, alt, size=(6.6, 3.6)), texts


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k answers, drawn from n of which c are right, contain a right one. Chen et al. (2021)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def passes(seed: int = 0, ks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> tuple[Figure, dict[str, str]]:
    """pass@k before and after reinforcement learning, on the questions that were asked in it and on others."""
    _, before = _trials(_imitate(seed), 200, seed + 2000)
    after = _reinforce("right", seed)["right"]
    groups = {"questions asked in training": range(ASKED), "questions not asked": range(ASKED, QUESTIONS)}

    def curve(right: Tensor, questions: range) -> list[float]:
        counts = right[list(questions)].sum(1).int().tolist()
        return [sum(pass_at_k(right.shape[1], c, k) for c in counts) / len(counts) for k in ks]

    found = {
        group: {"before": curve(before, questions), "after": curve(after, questions)}
        for group, questions in groups.items()
    }
    asked, new = found.values()
    claim(asked["before"][3] > asked["after"][0] - 0.1, "before, eight tries do about what one try does after")
    claim(new["after"][0] < new["before"][0] + 0.15, "the gain does not carry over to questions that were not asked")
    claim(new["after"][3] < new["before"][3], "with eight tries the model before is better on them")
    hard = [right[list(HARD)].mean().item() for right in (before, after)]
    claim(hard[0] < 0.12 and hard[1] > hard[0] + 0.2, "the hard questions were guessed before, and learned")

    def paint(canvas):
        for ax, (title, curves) in zip(canvas.subplots(1, 2, sharey=True), found.items(), strict=True):
            for (name, values), style in zip(curves.items(), ("o-", "s--"), strict=True):
                ax.plot(ks, values, style, label=name)
            ax.set_xscale("log", base=2)
            ax.set(title=title, xlabel="tries k", xticks=ks, xticklabels=ks, ylim=(0, 1.03))
        canvas.axes[0].set_ylabel("pass@k")
        canvas.axes[0].legend(fontsize=9)

    alt = (
        "pass at k against the number of tries k, before and after reinforcement learning. On questions asked in "
        f"training one try rises from {asked['before'][0]:.2f} to {asked['after'][0]:.2f}, and at {ks[-1]} tries both "
        f"are near {asked['before'][-1]:.2f}. On questions not asked, eight tries fall from {new['before'][3]:.2f} to "
        f"{new['after'][3]:.2f}."
    )
    texts = {}
    for name, curves in (("asked", asked), ("new", new)):
        for when, values in curves.items():
            texts |= {f"pass-{name}-{when}-{k}": f"{100 * values[ks.index(k)]:.0f} %" for k in (1, 8)}
    return draw(paint, alt, size=(6.6, 3.2)), texts


# --- what it costs -----------------------------------------------------------------------------------------------


def costs(N: int = 512, V: int = 8192, C: int = 64, n_chunks: int = 8, seed: int = 0) -> dict[str, str]:
    """Bytes of the logits, counted and measured, and of the same loss computed a few tokens at a time."""
    generator = rng(seed)
    hidden, weight = torch.randn(N, C, generator=generator), torch.randn(V, C, generator=generator) / 8
    labels = torch.randint(V, (N,), generator=generator)

    def whole(hidden: Tensor, weight: Tensor) -> None:
        losses.cross_entropy(hidden @ weight.T, labels).backward()

    def chunked(hidden: Tensor, weight: Tensor) -> None:
        for h, rows in zip(hidden.chunk(n_chunks), labels.chunk(n_chunks), strict=True):
            (losses.cross_entropy(h @ weight.T, rows) * (len(rows) / N)).backward()

    found = {}
    for name, function in (("whole", whole), ("chunked", chunked)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        peak = peak_bytes(function, *leaves)
        found[name] = peak, leaves[0].grad, leaves[1].grad
    for ours, other in zip(found["whole"][1:], found["chunked"][1:], strict=True):
        torch.testing.assert_close(ours, other)
    logits = N * V * 4
    kept = kept_bytes(lambda x: losses.cross_entropy(x, labels), torch.randn(N, V, generator=generator))
    gpt2 = 8 * 1024 * 50257 * 4
    return {
        "cost-gpt2": f"{gpt2 / 1e9:.2f} GB",
        "cost-stream": f"{8 * 1024 * 768 * 4 / 1e6:.0f} MB",
        "cost-scores": f"{8 * 12 * 1024**2 * 4 / 1e9:.2f} GB",
        "cost-ratio": f"{50257 / 768:.0f}",
        "cost-llama3": f"{8 * 1024 * 128256 * 4 / 1e9:.1f} GB",
        "cost-kept": f"{kept / logits:.1f}",
        "cost-peak": f"{found['whole'][0] / logits:.1f}",
        "cost-peak-gpt2": f"{found['whole'][0] / logits * gpt2 / 1e9:.1f} GB",
        "cost-chunked": f"{found['chunked'][0] / logits:.2f}",
        "cost-chunks": str(n_chunks),
    }


# --- mistakes ----------------------------------------------------------------------------------------------------


def mistakes() -> dict[str, str]:
    """Numbers for the table of what breaks."""
    sure = torch.nn.functional.one_hot(torch.tensor([3]), N_LETTERS).float()  # a perfect answer, as probabilities
    large = torch.nn.functional.one_hot(torch.tensor([3]), 50257).float()
    return {
        "twice-soft": f"{losses.cross_entropy(sure, torch.tensor([3])).item():.2f}",
        "twice-soft-large": f"{losses.cross_entropy(large, torch.tensor([3])).item():.2f}",
    }
