"""Chapter 9's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name.

The long runs are recorded: `python -m book.figures.training` makes storyland.json anew.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import platform
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tfmlib import attention, costs, losses, optim, storyland, tokens, training
from tfmlib.course.meters import Alive, kept_tensors, total_bytes
from tfmlib.models.gpt import GPT, GPTConfig

from . import Figure, claim, colour, draw, ink, one_thread, rng, weights_from

LAND = storyland.Storyland()
FOLDER = Path(__file__).parent


def power(x: float, digits: int = 0) -> str:
    """A number as 3 · 10⁻⁷; a plain power of ten as 10⁻⁷."""
    number, exponent = f"{x:.{digits}e}".split("e")
    raised = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return raised if float(number) == 1 else f"{number} · {raised}"


def gpt(seed: int = 0, L: int = 2, C: int = 64, H: int = 4) -> GPT:
    """A new GPT for Storyland's words."""
    sizes = {"n_layers": L, "d_model": C, "n_heads": H}
    with weights_from(seed):
        return GPT(GPTConfig(**sizes, vocab_size=len(LAND.vocabulary), context_length=LAND.longest))


def batch_of(stories: list[str]) -> training.Batch:
    """Stories as one batch, inputs and labels, padding not counted."""
    ids, is_token = tokens.pad_batch([LAND.encode(story) for story in stories], pad_id=0)
    return losses.shift_labels(ids, is_token)


def told(n: int, seed: int) -> list[str]:
    """The first n stories of a seed."""
    generator = rng(seed)
    return [LAND.story(generator) for _ in range(n)]


# --- the loop --------------------------------------------------------------------------------------------------------


def by_hand(max_norm: float = 0.5, lr: float = 1.0) -> dict:
    """One step of the smallest model: three words, one context, so that the logits themselves are the weights."""
    logits, label = torch.zeros(1, 3, requires_grad=True), torch.tensor([0])
    loss = losses.cross_entropy(logits, label)
    loss.backward()
    gradient = logits.grad.clone()
    norm = optim.clip_gradients([logits], max_norm)
    moved = (logits - lr * logits.grad).detach()
    found = {"gradient": gradient, "clipped": logits.grad, "moved": moved}
    texts = {
        f"{name}{i}": f"{x:.3f}".replace("-", "−") for name, row in found.items() for i, x in enumerate(row[0].tolist())
    }
    after = losses.cross_entropy(moved, label)
    texts |= {"hand_loss": f"{loss.item():.4f}", "hand_norm": f"{norm.item():.3f}", "hand_after": f"{after.item():.3f}"}
    return texts | {"hand_scale": f"{max_norm / norm.item():.3f}", "hand_p": f"{moved.softmax(-1)[0, 0].item():.3f}"}


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[training.Batch]) -> list[float]:
    """The training loop."""
    seen = []
    for inputs, labels in batches:  # 1 batch
        loss = losses.cross_entropy(model(inputs), labels)  # 2 loss
        optimizer.zero_grad()
        loss.backward()  # 3 gradient
        optim.clip_gradients(model.parameters(), max_norm=1.0)  # 4 clip
        optimizer.step()  # 5 step
        seen.append(loss.item())
    return seen


# --- small first -----------------------------------------------------------------------------------------------------


def starts(seeds: tuple[int, ...] = (0, 1, 2, 3)) -> dict:
    """The loss of new models: as they should begin, and with tables as nn.Embedding makes them."""
    V, batch = len(LAND.vocabulary), batch_of(told(64, seed=1))

    def loss(seed: int, std: float) -> float:
        model = gpt(seed)
        if std:
            nn.init.normal_(model.token_embedding.weight, std=std, generator=rng(seed))
        return training.evaluate(model, [batch])

    good, large = ([loss(seed, std) for seed in seeds] for std in (0.0, 1.0))
    claim(all(abs(x - math.log(V)) < 0.15 for x in good), "a new model's loss is ln V")
    claim(min(large) > 2 * math.log(V), "with large tables it starts far above ln V")
    return {
        "V": str(V),
        "ln_V": f"{math.log(V):.3f}",
        "start": f"{good[0]:.3f}",
        "start_off": f"{max(abs(x - math.log(V)) for x in good):.2f}",
        "start_large": f"{large[0]:.0f}",
    }


def one_batch(n: int = 8, steps: int = 100, seeds: tuple[int, ...] = (0, 1)) -> tuple[Figure, dict]:
    """The same few stories at every step: the right loop, and three wrong ones."""
    stories = told(n, seed=3)
    inputs, labels = batch_of(stories)
    floor = n * math.log(n) / int((labels != losses.IGNORE).sum())
    claim(len(set(stories)) == n, "the stories are all different")

    def run(seed: int, lr: float = 3e-3, zero: bool = True, causal: bool = True) -> list[float]:
        model = gpt(seed, L=1)
        optimizer = optim.AdamW(model.parameters(), lr)
        if not zero:
            optimizer.zero_grad = lambda: None
        everything = mock.patch.object(
            attention, "causal_mask", lambda T, S=None: torch.ones(T, S or T, dtype=torch.bool)
        )
        with contextlib.nullcontext() if causal else everything:
            return loop(model, optimizer, itertools.repeat((inputs, labels), steps))

    kinds = {
        "right": {},
        "the future is visible": {"causal": False},
        "gradient not set to 0": {"zero": False},
        "learning rate 100 times too small": {"lr": 3e-5},
    }
    with one_thread():
        runs = {name: [run(seed, **change) for seed in seeds] for name, change in kinds.items()}
    end = {name: [sum(curve[-5:]) / 5 for curve in curves] for name, curves in runs.items()}
    right, leak, kept, slow = end.values()
    claim(max(abs(x - floor) for x in right) < 0.02, "the right loop reaches the floor of the batch")
    claim(max(leak) < floor / 2, "with the future in view it falls below the floor")
    claim(min(kept) > 2 * floor and min(slow) > 3, "the other two are far above")

    def paint(canvas):
        ax = canvas.subplots()
        for (name, curves), style in zip(runs.items(), ["-", "--", "-.", ":"], strict=True):
            ax.plot(range(steps), curves[0], linestyle=style, label=name)
        ax.axhline(floor, color=ink(), linewidth=1, linestyle=(0, (2, 3)))
        ax.set(title=f"The same {n} stories at every step", xlabel="step", ylabel="nats a token", yscale="log")
        ax.set(yticks=[0.01, 0.1, 1], yticklabels=["0.01", "0.1", "1"])
        canvas.legend(loc="outside lower center", fontsize=9, ncols=2)

    low, high = ({name: f"{pick(values):.2f}" for name, values in end.items()} for pick in (min, max))
    between = {name: low[name] if low[name] == high[name] else f"{low[name]} to {high[name]}" for name in end}
    texts = dict(zip(("one_right", "one_leak", "one_kept", "one_slow"), between.values(), strict=True))
    texts |= {"one_floor": f"{floor:.3f}", "one_n": str(n), "one_ln": f"{math.log(n):.3f}"}
    texts |= {"one_labels": str(int((labels != losses.IGNORE).sum()))}
    alt = (
        "Loss over 100 steps on one batch, on a logarithmic axis. The right loop falls from above 4 to the dotted "
        "floor. With the future visible it falls below the floor. With gradients that are not set to 0 it falls more "
        "slowly. With a learning rate that is too small it hardly falls."
    )
    return draw(paint, alt, size=(6.2, 3.8)), texts


# --- Storyland: which words the loss is made of ----------------------------------------------------------------------

PEOPLE = ("hero", "friend")
KINDS = {  # what stands in a label's place in the rule -> how the page calls it
    "home": "home",
    "colour": "colour",
    "thing": "thing",
    "other": "name, place",
    "pronoun": "he or she",
    "choice": "which sentence",
    "draw": "new word",
    "form": "fixed word",
}


@dataclasses.dataclass(frozen=True)
class Word:
    """A label of a story: what the grammar knows about it. Chances are exact, given all words before it."""

    text: str
    kind: str  # of KINDS
    entropy: float  # of the word in its place, in nats
    surprise: float  # -log of the chance of this word, in nats
    guess: float  # what is lost by guessing a word that the story has told: the log of how many there are


def words_of(story: str) -> list[Word]:
    """Every label of a story, END included."""
    scene, found = storyland.Scene(), []
    for sentence in storyland._sentences(storyland.split_words(story)):
        alive = LAND._choices(scene)
        rule = next(rule for rule, _ in alive if LAND._match(rule, scene, sentence) is not None)
        for i, word in enumerate(sentence):
            chances, left = {}, []
            for other, chance in alive:
                pattern = other.words[i]
                slot = pattern.strip("[+]")
                may = [LAND._recall(slot, scene)] if pattern[0] == "[" else [pattern]
                if pattern.startswith("[+"):
                    may = LAND._pool(slot, scene)
                for one in may:
                    chances[one] = chances.get(one, 0.0) + chance / len(may)
                if word in may:
                    left.append((other, chance / len(may)))
            alive, total = left, sum(chances.values())
            entropy = -sum(c / total * math.log(c / total) for c in chances.values())
            surprise = -math.log(chances[word] / total)
            found.append(Word(word, _kind(rule.words[i], entropy), entropy, surprise, _guess(rule.words[i])))
        scene = rule.after(scene, LAND._match(rule, scene, sentence))
    return [*found, Word(storyland.END, "form", 0.0, 0.0, 0.0)]


def _kind(pattern: str, entropy: float) -> str:
    slot = pattern.strip("[+]")
    if pattern.startswith("[+"):
        return "draw"
    if entropy > 1e-9:
        return "choice"
    if pattern[0] != "[":
        return "form"
    return "pronoun" if slot in storyland.PRONOUNS else slot if slot in KINDS else "other"


def _guess(pattern: str) -> float:
    """For a place, colour, thing or name that was told before: all that could stand there are equally likely."""
    slot = pattern.strip("[+]")
    if pattern[0] != "[" or pattern.startswith("[+") or slot in storyland.PRONOUNS:
        return 0.0
    return math.log(len(LAND._pool(slot, storyland.Scene())))


@functools.cache
def unseen(n: int = 160, seed: int = 99) -> tuple[training.Batch, list[Word]]:
    """Stories to validate on: as a batch, and word for word in the order of its counted labels."""
    stories = told(n, seed)
    words = [word for story in stories for word in words_of(story)]
    gap = sum(word.surprise for word in words) + sum(map(LAND.log_prob, stories))
    claim(abs(gap) < 1e-6, "the words' surprises add up to the stories' log-probabilities")
    return batch_of(stories), words


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def chain() -> dict:
    """The numbers of the entropy by hand, checked against the grammar."""
    hero, home, colours, things, sites = (
        len(x) for x in (LAND.girls + LAND.boys, LAND.homes, LAND.colours, LAND.things, LAND.sites)
    )
    first, second = math.log(hero) + math.log(home), math.log(colours) + math.log(things)
    choice = -(0.6 * math.log(0.6) + 2 * 0.2 * math.log(0.2))
    third = choice + 0.6 * math.log(sites)
    words = words_of(
        "Anna lives in Rome. She has a red ball. It rains. Anna comes home to Rome. She still has the red ball."
    )
    for got, want in (
        (sum(w.entropy for w in words[:5]), first),
        (sum(w.entropy for w in words[5:11]), second),
        (words[11].entropy, choice),
    ):
        claim(abs(got - want) < 1e-12, "the entropies by hand are those of the grammar")
    entropy, length = LAND._outlook(storyland.Scene(), {})
    claim(abs(entropy / (length + 1) - LAND.entropy_per_token()) < 1e-12, "entropy over length")
    values = {
        "first": first,
        "second": second,
        "choice": choice,
        "third": third,
        "ln_hero": math.log(hero),
        "ln_home": math.log(home),
    }
    values |= {"ln_colour": math.log(colours), "ln_thing": math.log(things), "ln_site": math.log(sites)}
    texts = {f"chain_{name}": f"{x:.3f}" for name, x in values.items()}
    texts |= {
        "story_entropy": f"{entropy:.3f}",
        "story_length": f"{length + 1:.2f}",
        "floor": f"{LAND.entropy_per_token():.4f}",
    }
    new = sum(p.numel() for p in gpt(0, 1, 128, 8).parameters())
    return texts | {"a_story": told(1, seed=4)[0], "x_parameters": f"{new:,}", "x_steps": str(STEPS)}


def model_surprise(model: nn.Module, batch: training.Batch) -> list[float]:
    """-log p of each counted label, in order."""
    inputs, labels = batch
    model.eval()
    with torch.no_grad():
        log_p = model(inputs).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    model.train()
    return (-log_p[labels != losses.IGNORE]).tolist()


def excess(model: nn.Module) -> dict[str, float]:
    """How far above the floor the loss is, for the words of each kind, and for all; "loss" is the loss itself."""
    batch, words = unseen()
    above = [got - word.surprise for got, word in zip(model_surprise(model, batch), words, strict=True)]
    found = {kind: mean(a for a, word in zip(above, words, strict=True) if word.kind == kind) for kind in KINDS}
    return found | {"all": mean(above)}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run on Storyland: what was measured every few steps."""

    model: nn.Module
    steps: list[int]
    excess: list[dict[str, float]]


def tell(steps: int, every: int, seed: int = 0, L: int = 1, C: int = 128, H: int = 8, lr: float = 0.015) -> Run:
    """Train a GPT on stories that are never told twice."""
    model = gpt(seed, L, C, H)
    recipe = training.Recipe(steps=steps, lr_peak=lr, lr_floor=lr / 20, warmup=50)
    at, found = [0], [excess(model)]

    def note(record: training.Record) -> None:
        if (record.step + 1) % every == 0:
            at.append(record.step + 1)
            found.append(excess(model))

    with one_thread():
        training.train(model, LAND.batches(32, rng(seed)), recipe, progress=False, on_record=note)
    return Run(model, at, found)


STEPS, EARLY, SEED = 400, 60, 0  # of the run on the page
SLOW = {"L": 2, "C": 96, "H": 4, "lr": 0.003}  # of a run that hardly learns to look back in as many steps


@functools.cache
def live() -> Run:
    """The run that is made while the page is built."""
    return tell(STEPS, every=20, seed=SEED)


def learning() -> tuple[Figure, dict]:
    """The loss of the live run against the floor, and what is above it by kind of word."""
    run, (_, words) = live(), unseen()
    floor = mean(word.surprise for word in words)
    forgetful = floor + mean(word.guess for word in words)
    recalled = ("home", "thing", "colour", "other")
    rest = ("pronoun", "choice", "draw", "form")
    early, after = run.excess[run.steps.index(EARLY)], run.excess[-1]
    slow = recorded("storyland.json")["slow"]
    flat = [loss for step, loss in zip(slow["steps"], slow["losses"], strict=True) if step >= 200]
    claim(all(abs(loss - forgetful) < 0.06 for loss in flat), "the slow run stays near the reader who forgets")
    learned = [kind for kind in recalled[:3] if after[kind] < 0.1]
    claim(-0.01 < after["all"] < 0.2, "the run comes close to the floor, and not below it")
    claim(len(learned) > 0, "a place, thing or colour is remembered in the end")
    claim(min(early[kind] for kind in recalled) > 1.5, f"after {EARLY} steps nothing that was told is remembered")
    claim(
        early["pronoun"] < 0.6 and early["form"] < 0.25,
        f"after {EARLY} steps fixed words and pronouns are mostly known",
    )

    def paint(canvas):
        top, left, right = canvas.subplot_mosaic([["all", "all"], ["recall", "rest"]], height_ratios=[1, 1.1]).values()
        top.plot(run.steps, [floor + x["all"] for x in run.excess], color=colour(0), label="the run of this page")
        top.plot(
            slow["steps"], slow["losses"], "--", color=colour(1), label="two layers, smaller learning rate (recorded)"
        )
        for y, up, name in ((floor, -0.015, "floor"), (forgetful, 0.015, "a reader who forgets")):
            top.axhline(y, color=ink(), linewidth=1, linestyle=(0, (2, 3)))
            top.text(run.steps[-1], y + up, name, ha="right", va="bottom" if up > 0 else "top", fontsize=9)
        top.set(title="Loss on new stories", ylabel="nats a token", ylim=(0.3, 1.3), xlim=(0, run.steps[-1]))
        top.legend(fontsize=9, loc="upper right")
        styles = ["-", "--", "-.", (0, (1, 1))]
        for ax, kinds, title in ((left, recalled, "Told before"), (right, rest, "All other words")):
            for kind, style in zip(kinds, styles, strict=True):
                ax.plot(run.steps, [x[kind] for x in run.excess], linestyle=style, linewidth=1.6, label=KINDS[kind])
            ax.set(title=title, xlabel="step", ylim=(0, 2.8), xlim=(0, run.steps[-1]))
            ax.legend(fontsize=8.5, loc="upper right")
        left.set(ylabel="nats above the floor")
        right.tick_params(labelleft=False)

    share = {kind: mean(word.kind == kind for word in words) for kind in KINDS}
    texts = {"run_forgetful": f"{forgetful:.2f}", "run_end": f"{floor + after['all']:.3f}"}
    texts |= {"run_above": f"{after['all']:.3f}", "run_early": f"{floor + early['all']:.2f}", "run_steps": str(STEPS)}
    texts |= {"run_guess": f"{forgetful - floor:.2f}", "share_told": f"{100 * sum(share[k] for k in recalled):.0f} %"}
    texts["part_told"] = f"{100 * sum(share[k] * early[k] for k in recalled) / early['all']:.0f} %"
    for kind in KINDS:
        mine = [word for word in words if word.kind == kind]
        texts |= {
            f"share-{kind}": f"{100 * share[kind]:.1f} %",
            f"floor-{kind}": f"{mean(word.surprise for word in mine):.2f}",
            f"guess-{kind}": f"{mean(word.guess for word in mine):.2f}",
            f"early-{kind}": f"{early[kind]:.2f}",
            f"after-{kind}": f"{max(after[kind], 0.0):.2f}",
            f"part-{kind}": f"{share[kind] * early[kind]:.3f}",
        }
    alt = (
        "Three charts over training steps. The loss falls fast, then slowly, passes the dotted level of a reader who "
        "forgets, and comes close to the floor. A slower run stays at that level. Below: words told before stay near 2 "
        "nats above the floor, and then fall, most of them to almost 0. All other words fall early or slowly."
    )
    return draw(paint, alt, size=(6.6, 5.6)), texts


def write(model: nn.Module, n: int, seed: int) -> list[str]:
    """n stories from the model's own probabilities."""
    ids, generator = torch.ones(n, 1, dtype=torch.long), rng(seed)  # START
    with torch.no_grad():
        while ids.shape[1] < LAND.longest and not (ids == 2).any(1).all():  # END
            p = model(ids)[:, -1].softmax(-1)  # (n, V)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], dim=1)
    return [LAND.decode(row) for row in ids.tolist()]


def judged(n: int = 100, seed: int = 0) -> dict:
    """What the live run's model writes, and what the grammar says about it."""
    model = live().model
    with one_thread():
        noise = write(gpt(0, 1, 128, 8), 1, seed)[0]
        stories = write(model, n, seed)
    verdicts = {story: LAND.judge(story) for story in stories}
    wrong = {story: [v for v in verdict if not v.allowed] for story, verdict in verdicts.items()}
    n_wrong, n_all = (sum(map(len, found.values())) for found in (wrong, verdicts))
    whole = [story for story in stories if LAND.log_prob(story) > -math.inf]
    claim(len(verdicts) == n, "no story is told twice")
    claim(n_wrong < 0.5 * n_all and 0 < len(whole) < n, "most sentences are allowed, and some stories are wrong")
    once = next(story for story in stories if len(wrong[story]) == 1)
    reasons = [v.reason for found in wrong.values() for v in found]
    texts = {"n_stories": str(n), "n_sentences": str(n_all), "n_wrong": str(n_wrong), "n_whole": str(len(whole))}
    texts |= {"allowed": f"{100 * (1 - n_wrong / n_all):.0f} %", "noise": " ".join(noise.split()[:9])}
    texts |= {"right_story": whole[0], "wrong_story": once}
    texts |= {"wrong_sentence": wrong[once][0].sentence, "wrong_reason": wrong[once][0].reason}
    texts["n_site"] = str(sum("new site" in reason for reason in reasons))
    texts["n_name"] = str(sum("about the hero" in reason or "about the friend" in reason for reason in reasons))
    return texts


# --- recorded runs ---------------------------------------------------------------------------------------------------


def recorded(name: str) -> dict:
    """A run that was made beforehand."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def record(steps: int = 1500, other_seeds: tuple[int, ...] = (1, 2, 3)) -> None:
    """Make storyland.json: a longer run like that of the page, and the ends of short ones with other seeds."""
    _, words = unseen()
    floor = mean(word.surprise for word in words)
    start = time.process_time()
    run = tell(steps, every=50, seed=SEED)
    seconds = time.process_time() - start
    slow = tell(STEPS, every=20, seed=SEED, **SLOW)
    stories = write(run.model, 100, seed=0)
    verdicts = [verdict for story in stories for verdict in LAND.judge(story)]
    found = {
        "what": f"a GPT of 1 layer, width 128, 8 heads on Storyland, {steps} steps of 32 new stories",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"one thread of a CPU ({platform.machine()})",
        "versions": {"python": platform.python_version(), "torch": torch.__version__.split("+")[0]},
        "command": "python -m book.figures.training",
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "seconds": round(seconds),
        "floor": round(floor, 4),
        "steps": run.steps,
        "losses": [round(floor + x["all"], 4) for x in run.excess],
        "above": {kind: round(x, 4) for kind, x in run.excess[-1].items()},
        "allowed": sum(verdict.allowed for verdict in verdicts),
        "sentences": len(verdicts),
        "whole": sum(LAND.log_prob(story) > -math.inf for story in stories),
        "slow": {"sizes": SLOW, "steps": slow.steps, "losses": [round(floor + x["all"], 4) for x in slow.excess]},
        "other_seeds": {
            seed: {kind: round(x, 4) for kind, x in tell(STEPS, STEPS, seed).excess[-1].items()} for seed in other_seeds
        },
    }
    (FOLDER / "storyland.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def longer() -> tuple[Figure, dict]:
    """The recorded run, beside the one on the page."""
    run, found = live(), recorded("storyland.json")
    floor = found["floor"]
    above = found["losses"][-1] - floor

    def paint(canvas):
        ax = canvas.subplots()
        ax.plot(found["steps"][1:], [x - floor for x in found["losses"][1:]], label="recorded")
        ax.plot(run.steps[1:], [x["all"] for x in run.excess[1:]], linestyle="--", label="on this page")
        ax.axhline(0.05, color=ink(), linewidth=1, linestyle=(0, (2, 3)))
        ax.set(title="How far above the floor", xlabel="step", ylabel="nats a token", yscale="log")
        ax.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.5], labels=["0.01", "0.02", "0.05", "0.1", "0.2", "0.5"])
        ax.minorticks_off()
        ax.legend()

    others = sorted(found["other_seeds"].values(), key=lambda end: end["all"])
    worst = max(("home", "thing", "colour", "other"), key=lambda kind: others[-1][kind])
    claim(above < 0.05, "the longer run is within 0.05 nats of the floor")
    claim(others[-1][worst] > 1, "with the worst seed a kind of word is still a guess")
    texts = {
        "long_above": f"{above:.3f}",
        "long_steps": f"{found['steps'][-1]:,}",
        "long_seconds": str(found["seconds"]),
    }
    texts |= {"long_date": found["date"], "long_whole": str(found["whole"]), "long_machine": found["machine"]}
    texts |= {"long_allowed": f"{100 * found['allowed'] / found['sentences']:.0f} %", "n_others": str(len(others))}
    texts |= {"others_low": f"{others[0]['all']:.2f}", "others_high": f"{others[-1]['all']:.2f}"}
    texts |= {"worst_kind": KINDS[worst], "worst": f"{others[-1][worst]:.2f}"}
    texts |= {f"long-{kind}": f"{x:.2f}" for kind, x in found["above"].items()}
    alt = (
        "The distance to the floor over training steps, on a logarithmic axis. Both runs fall in steps. The recorded "
        f"one ends at {above:.3f} nats a token, below the dotted line at 0.05."
    )
    return draw(paint, alt, size=(6.2, 3.2)), texts


def shakespeare() -> tuple[Figure, dict]:
    """The recorded run on real text."""
    found = recorded("shakespeare.json")

    def paint(canvas):
        ax = canvas.subplots()
        ax.plot(
            found["steps"], found["losses"], color=colour(2), linewidth=0.8, alpha=0.7, label="training, single batches"
        )
        ax.plot(found["validation_steps"], found["validation_losses"], color=colour(0), marker="o", label="validation")
        ax.axhline(math.log(65), color=ink(), linewidth=1, linestyle=(0, (2, 3)))
        ax.text(found["steps"][-1], math.log(65), "ln 65", ha="right", va="bottom", fontsize=9)
        ax.set(title="Tiny Shakespeare, one token a character", xlabel="step", ylabel="nats a character")
        ax.legend()

    end, theirs = found["validation_losses"][-1], found["published_lr"]["validation_loss"]
    claim(abs(theirs - 1.88) < 0.05, "with nanoGPT's learning rate the loss is about nanoGPT's")
    claim(found["command"].endswith("tfmlib.train --corpus tinyshakespeare --lr 2e-3"), "the command is on the page")
    claim(end < theirs - 0.03, "with twice the learning rate it is lower")

    texts = {
        "shake_theirs": f"{theirs:.2f}",
        "shake_end": f"{end:.2f}",
        "shake_seconds": f"{found['seconds']:.0f}",
        "shake_date": found["date"],
    }
    texts |= {
        "shake_parameters": f"{found['parameters']:,}",
        "shake_first": f"{found['losses'][0]:.2f}",
    }
    texts |= {"shake_ln": f"{math.log(65):.2f}"}
    alt = f"Loss over 2,000 steps: from ln 65, about 4.2, down to {end:.2f} nats a character on validation text."
    return draw(paint, alt, size=(6.2, 3.2)), texts


def sample() -> str:
    """What the recorded model of Shakespeare writes."""
    return recorded("shakespeare.json")["sample"]


# --- overfitting -----------------------------------------------------------------------------------------------------

CASES = {  # what is changed in a run on 64 stories
    "64 stories": {},
    "weight decay 10": {"decay": 10.0},
    "width 16": {"C": 16},
    "1,024 stories": {"n": 1024},
}


def drill(n: int = 64, C: int = 64, decay: float = 0.0, seed: int = 0, steps: int = 300, every: int = 25):
    """Train on the same n stories again and again; returns steps, losses on those stories, and on new ones."""
    stories, generator = told(n, seed=500 + seed), rng(seed)
    model = gpt(seed, L=1, C=C)
    optimizer = optim.AdamW(optim.parameter_groups(model, decay), lr=1e-2)
    old, new = batch_of(stories[:64]), batch_of(told(64, seed=99))

    def batches():
        while True:
            yield batch_of([stories[i] for i in torch.randint(n, (16,), generator=generator).tolist()])

    source, at, seen, unseen_losses = batches(), [], [], []
    with one_thread():
        for step in range(every, steps + 1, every):
            loop(model, optimizer, itertools.islice(source, every))
            at.append(step)
            seen.append(training.evaluate(model, [old]))
            unseen_losses.append(training.evaluate(model, [new]))
    return at, seen, unseen_losses


def overfitting(seed: int = 0) -> tuple[Figure, dict]:
    """Few stories, and what helps."""
    runs = {name: drill(seed=seed, **change) for name, change in CASES.items()}
    at, seen, new = runs["64 stories"]
    best = {name: min(new) for name, (_, _, new) in runs.items()}
    floor = LAND.entropy_per_token()
    claim(seen[-1] < floor - 0.1, "the loss on the 64 stories falls below the floor")
    claim(new[-1] > best["64 stories"] + 0.3, "the loss on new stories falls and rises again")
    for name in ("weight decay 10", "width 16"):
        claim(runs[name][2][-1] < new[-1] - 0.15, "decay and a smaller model soften the rise")
        claim(abs(best[name] - best["64 stories"]) < 0.15, "and their best is about as good")
    claim(best["1,024 stories"] < best["64 stories"] - 0.2, "only more stories make the best better")

    def paint(canvas):
        left, right = canvas.subplots(1, 2, sharey=True)
        left.plot(at, seen, "--", label="the 64 stories")
        left.plot(at, new, label="new stories")
        left.set(title="64 stories, again and again", xlabel="step", ylabel="nats a token", ylim=(0, 2.2))
        styles = ["-", "--", "-.", (0, (1, 1))]
        for i, ((name, (_, _, curve)), style) in enumerate(zip(runs.items(), styles, strict=True)):
            right.plot(at, curve, linestyle=style, color=colour((i + 1) % 5), label=name)
        right.set(title="Loss on new stories", xlabel="step")
        for ax in (left, right):
            ax.axhline(floor, color=ink(), linewidth=1, linestyle=(0, (2, 3)))
            ax.legend(fontsize=8.5)

    texts = {"over_seen": f"{seen[-1]:.2f}", "over_new": f"{new[-1]:.2f}", "over_steps": str(at[-1])}
    for key, name in zip(("plain", "decay", "small", "more"), runs, strict=True):
        curve = runs[name][2]
        texts |= {f"over_best_{key}": f"{best[name]:.2f}", f"over_at_{key}": str(at[curve.index(best[name])])}
        texts |= {f"over_end_{key}": f"{curve[-1]:.2f}", f"over_old_{key}": f"{runs[name][1][-1]:.2f}"}
    alt = (
        "Two charts over training steps. Left: the loss on 64 stories falls below the dotted floor, while the loss on "
        "new stories falls, and then rises. Right: the loss on new stories. With weight decay and with a smaller "
        "model it rises less. With 1,024 stories it keeps falling."
    )
    return draw(paint, alt, size=(6.8, 3.4)), texts


# --- one batch in parts ----------------------------------------------------------------------------------------------


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def _gradient(model: nn.Module, parts: list[training.Batch]) -> tuple[float, Tensor]:
    model.zero_grad()
    return training.accumulate_gradients(model, parts), _flat(model)


def accumulation(seeds: tuple[int, ...] = (0, 1, 2, 3)) -> dict:
    """The gradient of one batch, in one piece, in parts, as a mean of means, and by two shares."""
    rows = []
    for seed in seeds:
        model = gpt(seed)
        inputs, labels = batch_of(told(2, seed=20 + seed))
        labels = labels.clone()
        labels[0, 2:], labels[1, 8:] = losses.IGNORE, losses.IGNORE  # 2 labels and 8
        one, parts = (inputs, labels), [(inputs[:1], labels[:1]), (inputs[1:], labels[1:])]
        loss, whole = _gradient(model, [one])
        accumulated, again = _gradient(model, parts)
        (first, g_first), (second, g_second) = (_gradient(model, [part]) for part in parts)
        wrong = (g_first + g_second) / 2
        shares = (2 * g_first + 8 * g_second) / 10  # what two processes sum
        rows.append(
            {
                "loss": loss,
                "parts": abs(accumulated - loss),
                "means": (first + second) / 2,
                "gap": ((again - whole).norm() / whole.norm()).item(),
                "shares": ((shares - whole).norm() / whole.norm()).item(),
                "wrong": ((wrong - whole).norm() / whole.norm()).item(),
                "angle": torch.cosine_similarity(wrong, whole, dim=0).item(),
            }
        )
    claim(max(max(row["gap"], row["shares"]) for row in rows) < 1e-4, "accumulation and shares give the same gradient")
    claim(min(row["wrong"] for row in rows) > 0.2, "the mean of means is far off")
    worst = max(row["gap"] for row in rows), max(row["shares"] for row in rows)
    off = [row["wrong"] for row in rows]
    return {
        "parts_gap": power(10 ** math.ceil(math.log10(worst[0]))),
        "shares_gap": power(10 ** math.ceil(math.log10(worst[1]))),
        "wrong_low": f"{100 * min(off):.0f} %",
        "wrong_high": f"{100 * max(off):.0f} %",
    }


# --- number formats --------------------------------------------------------------------------------------------------


def formats() -> dict:
    """What the three formats can hold, what autocast makes of a model's tensors, and what it keeps."""
    texts = {}
    for name, dtype in (("32", torch.float32), ("16", torch.float16), ("b16", torch.bfloat16)):
        info = torch.finfo(dtype)
        texts[f"max-{name}"] = "65,504" if info.max < 1e5 else power(info.max, 1)
        texts |= {f"eps-{name}": power(info.eps), f"tiny-{name}": power(info.smallest_normal * info.eps)}
    half = torch.tensor(1e-8, dtype=torch.float16)
    scaled = (torch.tensor(1e-8) * 65536).half()
    claim(half.item() == 0 and scaled.item() > 0, "1e-8 is 0 in float16, and is not if scaled")
    claim((torch.tensor(1.0).bfloat16() + 0.002).item() == 1.0, "1 + 0.002 is 1 in bfloat16")
    texts["b16_sum"] = f"{(torch.tensor(1.0).bfloat16() + 0.002).item():.0f}"
    texts |= {
        "half": f"{half.item():.0f}",
        "scaled": power(scaled.item(), 2),
        "unscaled": power(scaled.float().item() / 65536, 0),
    }
    return texts


def autocast() -> dict:
    """The dtype of what each part of a block returns under autocast to bfloat16."""
    model, batch = gpt(), batch_of(told(8, seed=3))
    seen: dict[str, torch.dtype] = {}
    block = model.blocks[0]
    parts = {
        "q_proj": block.attention.q_proj,
        "norm": block.norm1,
        "up": block.mlp.up,
        "block": block,
        "head": model.head,
    }
    hooks = [
        m.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
        for name, m in parts.items()
    ]

    def weights(*args, **kwargs):
        found = attention_weights(*args, **kwargs)
        seen["attention"] = found.dtype
        return found

    attention_weights = attention.attention_weights
    with torch.autocast("cpu", torch.bfloat16), mock.patch.object(attention, "attention_weights", weights):
        logits = model(batch[0])
    loss = losses.cross_entropy(logits, batch[1])
    loss.backward()
    for hook in hooks:
        hook.remove()
    optimizer = optim.AdamW(model.parameters())
    optimizer.step()
    seen |= {"loss": loss.dtype, "weight": block.mlp.up.weight.dtype, "gradient": block.mlp.up.weight.grad.dtype}
    seen["moment"] = optimizer.state[block.mlp.up.weight]["exp_avg"].dtype
    big = gpt(0, L=4, C=128)
    plain, cast = (kept_bytes(big, batch, cast) for cast in (False, True))
    claim(0.5 < cast / plain < 0.95, "autocast keeps more than half, but not all")
    low, high = ("q_proj", "up", "head", "attention"), ("norm", "block", "loss", "weight", "gradient", "moment")
    claim({seen[name] for name in low} == {torch.bfloat16}, "products and attention weights are in bfloat16")
    claim({seen[name] for name in high} == {torch.float32}, "the rest is in float32")
    texts = {f"dtype-{name}": str(dtype).removeprefix("torch.") for name, dtype in seen.items()}
    return texts | {"autocast_kept": f"{100 * cast / plain:.0f} %"}


class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch runs, views aside."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += not func.is_view
        return func(*args, **(kwargs or {}))


@one_thread()
def fused(B: int = 12, T: int = 64, steps: int = 15) -> dict:
    """Operations of a norm and of a step, and the time of a step, written out and in fused kernels."""
    model = gpt(0, L=4, C=128)
    ids = torch.randint(len(LAND.vocabulary), (B, T + 1), generator=rng(0))
    batch, x = (ids[:, :-1], ids[:, 1:]), torch.randn(B, T, 128, generator=rng(0), requires_grad=True)
    kernels = {"plain": contextlib.nullcontext, "fused": functools.partial(training.fused_kernels, model)}
    groups = optim.parameter_groups(model, 0.1)
    optimizers = {"plain": optim.AdamW(groups), "fused": torch.optim.AdamW(groups, fused=True)}

    def step(kind):
        with kernels[kind]():
            loop(model, optimizers[kind], [batch])

    texts, seconds = {}, {kind: [] for kind in kernels}
    for kind in kernels:
        step(kind)
        with Operations() as counted:
            step(kind)
        texts[f"{kind}_ops"] = f"{counted.n:,}"
        with kernels[kind](), Operations() as counted:
            model.norm(x)
        texts[f"{kind}_norm"] = str(counted.n)
    for _ in range(steps):
        for kind, times in seconds.items():
            start = time.process_time()
            step(kind)
            times.append(time.process_time() - start)
    plain, quick = (sorted(times)[steps // 2] for times in seconds.values())
    return texts | {"fused_time": f"{quick / plain:.2f}"}


def kept_bytes(model: nn.Module, batch: training.Batch, autocast: bool) -> int:
    """The bytes that one forward pass keeps for the backward pass, besides the parameters."""
    with kept_tensors(model.parameters()) as kept, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses.cross_entropy(model(batch[0]), batch[1])
    return total_bytes(kept)


# --- memory ----------------------------------------------------------------------------------------------------------


def step_bytes(config: GPTConfig, B: int, n_parts: int = 1, recompute: bool = False) -> tuple[int, float, Tensor]:
    """The most bytes alive in a step with AdamW, its CPU seconds without the optimizer, and the gradient."""
    with weights_from(0):
        model = GPT(config)
        x = torch.randint(config.vocab_size, (B, config.context_length + 1))
    optimizer = optim.AdamW(model.parameters())
    parts = [(p[:, :-1], p[:, 1:]) for p in x.chunk(n_parts)]
    with training._recomputing(model, recompute):
        training.accumulate_gradients(model, parts)
        gradient = _flat(model)
        optimizer.step()
        seconds = []
        for _ in range(5):
            start = time.process_time()
            training.accumulate_gradients(model, parts)
            seconds.append(time.process_time() - start)
        optimizer.zero_grad(set_to_none=False)
        before = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
        with Alive(t for t in before if torch.is_tensor(t)) as alive:
            training.accumulate_gradients(model, parts)
            optimizer.step()
    return alive.peak, min(seconds), gradient


def memory(L: int = 8, C: int = 64, T: int = 128, B: int = 8) -> tuple[Figure, dict]:
    """The bytes of a step: plain, with activation checkpointing, in four parts, and with both."""
    config = GPTConfig(n_layers=L, d_model=C, n_heads=4, vocab_size=len(LAND.vocabulary), context_length=T)
    kinds = {"plain": (1, False), "checkpointing": (1, True), "4 parts": (4, False), "both": (4, True)}
    with one_thread():
        measured = {name: step_bytes(config, B, *kind) for name, kind in kinds.items()}
    counted = {n: costs.training_bytes(config, B // parts, T, checkpointing=r) for n, (parts, r) in kinds.items()}
    fixed = 16 * costs.count_parameters(config)
    for name, (got, _, _) in measured.items():
        claim(abs(counted[name]["total"] / got - 1) < 0.2, f"the count is within 20 % of the measurement ({name})")
    plain, again = measured["plain"], measured["checkpointing"]
    claim(torch.equal(plain[2], again[2]), "checkpointing changes no bit of the gradient")
    claim(again[0] < plain[0] / 2, "and saves more than half")

    def paint(canvas):
        ax = canvas.subplots()
        for i, (name, (got, _, _)) in enumerate(measured.items()):
            ax.barh(
                i, fixed / 1e6, color=colour(1), hatch="//", edgecolor=ink(), linewidth=0, label="16 bytes a parameter"
            )
            ax.barh(i, (got - fixed) / 1e6, left=fixed / 1e6, color=colour(0), label="activations")
            ax.text(got / 1e6, i, f" {got / 1e6:.0f} MB", va="center")
            ax.plot([counted[name]["total"] / 1e6] * 2, [i - 0.4, i + 0.4], color=ink(), linewidth=2, label="counted")
        ax.set(title="The most bytes alive in one step", xlabel="MB", yticks=range(len(measured)), yticklabels=measured)
        ax.set_xlim(0, 1.15 * plain[0] / 1e6)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_axisbelow(True)
        parts = {name: handle for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
        canvas.legend(parts.values(), parts.keys(), loc="outside lower center", ncols=3, fontsize=9)

    texts = {f"bytes-{name}": f"{got / 1e6:.1f} MB" for name, (got, _, _) in measured.items()}
    gaps = [abs(counted[name]["total"] / got - 1) for name, (got, _, _) in measured.items()]
    texts |= {
        "mem_gap": f"{100 * max(gaps):.0f} %",
        "mem_time": f"{again[1] / plain[1]:.2f}",
        "mem_fixed": f"{fixed / 1e6:.1f} MB",
    }
    texts["mem_parameters"] = f"{costs.count_parameters(config):,}"
    texts |= {"mem_act": f"{(plain[0] - fixed) / 1e6:.0f}", "mem_act_check": f"{(again[0] - fixed) / 1e6:.0f}"}
    alt = "Four bars of megabytes: " + ", ".join(f"{name} {got / 1e6:.0f}" for name, (got, _, _) in measured.items())
    alt += ". Each bar has a small part for weights, gradients and moments, the same for all; a mark shows the count."
    return draw(paint, alt, size=(6.4, 3.2)), texts


def gpt2_bytes(B: int = 8, T: int = 1024) -> dict:
    """What helps against too little memory, counted for the smallest GPT-2."""
    config = GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50257, context_length=1024)

    def activations(B=B, T=T, **options):
        return costs.training_bytes(config, B, T, **options)["activations"]

    plain, fixed = activations(), 16 * costs.count_parameters(config)
    scores = 2 * config.n_layers * costs.score_bytes(config, B, T, 4)
    values = {"act": plain, "fixed": fixed, "half_batch": activations(B=B // 2), "half_length": activations(T=T // 2)}
    values |= {"bf16": activations(bytes_per_element=2), "check": activations(checkpointing=True)}
    values |= {"eighth": activations(B=1), "flash": plain - scores, "sharded": fixed / 8, "head": 3 * B * T * 50257 * 4}
    return {f"gpt2_{name}": f"{n / 1e9:.1f} GB" for name, n in values.items()}


# --- to go on --------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """A run was stopped from outside."""


def drop_out() -> nn.Module:
    """A small model that draws random numbers while it trains: a tenth of the features becomes 0."""
    with weights_from(0):
        return nn.Sequential(
            nn.Embedding(len(LAND.vocabulary), 32), nn.Dropout(0.1), nn.Linear(32, len(LAND.vocabulary))
        )


def _losses_of(batches, path=None, stop=None) -> list[float]:
    seen = []

    def note(record):
        seen.append(record.loss)
        if record.step == stop:
            raise Stopped

    recipe = training.Recipe(steps=40, warmup=5, lr_peak=1e-2, save_every=10)
    with torch.random.fork_rng(), contextlib.suppress(Stopped):
        torch.manual_seed(1 if path is None or not Path(path).exists() else 2)
        training.train(drop_out(), batches, recipe, path=path, progress=False, on_record=note)
    return seen


def resume() -> dict:
    """A run that is stopped and goes on, with all that it needs and with something left out."""
    batches = [batch_of(told(8, seed=100 + i)) for i in range(40)]
    off = {}
    with tempfile.TemporaryDirectory() as folder, one_thread():
        whole = _losses_of(batches)
        path = Path(folder) / "run.pt"
        first = _losses_of(batches, path, stop=24)
        saved = torch.load(path, weights_only=True)
        full = first[:20] + _losses_of(batches, path)
        claim(saved["step"] == 20 and len(full) == 40, "it goes on from step 20")
        fresh = optim.AdamW(optim.parameter_groups(drop_out(), 0.1)).state_dict()
        other = {**saved["random"], "torch": torch.Generator().manual_seed(5).get_state()}
        left_out = {
            "optimizer": {**saved, "optimizer": {**saved["optimizer"], "state": fresh["state"]}},
            "random": {**saved, "random": other},
            "step": {**saved, "step": 0},
        }
        for name, state in left_out.items():
            torch.save(state, path)
            off[name] = _losses_of(batches, path)
        torch.save(saved, path)
        off["data"] = _losses_of(batches[:20] + batches[:20], path)
    claim(full == whole, "a stopped run goes on bit by bit")
    far = {name: max(abs(a - b) for a, b in zip(curve, whole[20:], strict=False)) for name, curve in off.items()}
    claim(min(far.values()) > 1e-4, "with anything left out it does not")
    texts = {f"resume-{name}": f"{x:.3f}" for name, x in far.items()}
    return texts | {"resume_steps": str(len(whole))}


# --- what breaks -----------------------------------------------------------------------------------------------------


def mistakes() -> dict:
    """A mistake that raises no error: the label is the input itself. The loss is that on new stories."""
    model = gpt(0)
    source = (
        (inputs, inputs.masked_fill(labels == losses.IGNORE, losses.IGNORE))
        for inputs, labels in LAND.batches(16, rng(7))
    )
    with one_thread():
        copying = loop(model, optim.AdamW(model.parameters(), 3e-3), itertools.islice(source, 60))[-1]
    claim(copying < LAND.entropy_per_token() / 2, "without the shift the loss falls below the floor")
    return {"copying": f"{copying:.2f}"}


if __name__ == "__main__":
    record()
