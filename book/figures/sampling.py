"""Chapter 11's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import functools
import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tfmlib import cache, sampling, storyland, training
from tfmlib.models.gpt import GPT

from . import Figure, claim, colour, draw, ink, one_thread, rng
from .training import LAND, gpt

START, END = 1, 2  # Storyland's ids


def percent(x: float) -> str:
    """A share as 12 %."""
    return f"{100 * x:.0f} %"


# --- by hand ----------------------------------------------------------------------------------------------------------

TOY = (0.4, 0.3, 0.2, 0.1)  # the probabilities of tokens a, b, c, d


def _kept(logits: Tensor) -> str:
    """How many tokens can still be drawn."""
    return str(int(logits.isfinite().sum()))


def by_hand() -> dict[str, str]:
    """What temperature, top-k and top-p make of four probabilities, alone and one after another."""
    logits = torch.tensor(TOY).log()
    rows = {f"hot{t}": sampling.apply_temperature(logits, t) for t in (0.5, 1, 2)}
    rows |= {"k2": sampling.keep_top_k(logits, 2), "p6": sampling.keep_top_p(logits, 0.6)}
    half = sampling.apply_temperature(logits, 0.5)
    rows["half_nucleus"] = sampling.keep_top_p(half, 0.8)
    rows["nucleus_half"] = sampling.apply_temperature(sampling.keep_top_p(logits, 0.8), 0.5)
    texts = {}
    for name, row in rows.items():
        texts |= {f"{name}_{i}": f"{p:.3f}" if p else "0" for i, p in enumerate(row.softmax(-1).tolist())}
    texts |= {"kept_after": _kept(rows["half_nucleus"]), "kept_before": _kept(rows["nucleus_half"])}
    claim(texts["kept_after"] == "2" and texts["kept_before"] == "3", "the order changes the nucleus")
    top3 = sampling.keep_top_k(logits, 3)
    texts["kept_k_p"] = _kept(sampling.keep_top_p(top3, 0.75))
    texts["kept_p_k"] = _kept(sampling.keep_top_k(sampling.keep_top_p(logits, 0.75), 3))
    claim(texts["kept_k_p"] == "2" and texts["kept_p_k"] == "3", "top-k before top-p is not top-k after it")
    texts["crossing"] = _kept(sampling.keep_top_p(torch.tensor([0.5, 0.41, 0.09]).log(), 0.9))
    claim(texts["crossing"] == "2", "the token that crosses p stays")
    return texts


# --- the model that the page trains, and what it writes ---------------------------------------------------------------


@functools.cache
def model(seed: int = 0, steps: int = 300) -> GPT:
    """Chapter 9's GPT for Storyland, after a shorter run."""
    new = gpt(seed, L=1, C=128, H=8)
    recipe = training.Recipe(steps=steps, lr_peak=0.015, lr_floor=0.015 / 20, warmup=50, fused=True)
    with one_thread():
        training.train(new, LAND.batches(32, rng(seed)), recipe, progress=False)
    return new


def next_word(story: str) -> Tensor:
    """The model's logits for the word after a story that has begun: (V,)."""
    with torch.no_grad():
        return model()(torch.tensor([LAND.encode(story)[:-1]]))[0, -1]


# --- why generation is serial -----------------------------------------------------------------------------------------


def _milliseconds(function, repeats: int = 5) -> float:
    """Median processor time of a call."""
    times = []
    for _ in range(repeats + 1):
        start = time.thread_time()
        function()
        times.append(1e3 * (time.thread_time() - start))
    return statistics.median(times[1:])


@one_thread()
def serial(seed: int = 4) -> dict[str, str]:
    """One story: to score all its words, and to write as many."""
    net, ids = model(), torch.tensor([LAND.encode(LAND.story(rng(seed)))])
    n = ids.shape[1] - 1
    passes = []
    hook = net.register_forward_hook(lambda *_: passes.append(1))

    def score():
        with torch.no_grad():
            return net(ids[:, :-1])

    def go_on():
        return sampling.generate(net, ids[:, :1], n, generator=rng(0))

    counted = {}
    for name, function in (("train", score), ("write", go_on)):
        passes.clear()
        function()
        counted[name] = len(passes)
    hook.remove()
    claim(counted == {"train": 1, "write": n}, "one pass scores a story, and a word needs a pass to be written")
    together, apart = _milliseconds(score), _milliseconds(go_on)
    claim(apart > 4 * together, "to write takes several times as long as to score")
    texts = {"serial_n": str(n), "serial_passes": str(counted["write"]), "serial_words": f"{n * (n + 1) // 2:,}"}
    return texts | {
        "serial_ms": f"{together:.1f}",
        "serial_write_ms": f"{apart:.0f}",
        "serial_times": f"{apart / together:.0f}",
    }


def at_once(n: int = 2000, seed: int = 0) -> dict[str, str]:
    """Hero and pronoun of the grammar's own stories, and the same words drawn each for itself."""
    generator = rng(seed)
    words = [LAND.story(generator).replace(".", " .").split() for _ in range(n)]
    heroes, pronouns = [row[0] for row in words], [row[5] for row in words]
    shuffled = [pronouns[i] for i in torch.randperm(n, generator=generator).tolist()]

    def wrong(pronouns: list[str]) -> float:
        pairs = zip(heroes, pronouns, strict=True)
        return sum((hero in LAND.girls) != (pronoun == "She") for hero, pronoun in pairs) / n

    claim(wrong(pronouns) == 0 and abs(wrong(shuffled) - 0.5) < 0.05, "drawn apart, half of the pairs are wrong")
    return {"apart_wrong": f"{100 * wrong(shuffled):.0f} %", "apart_n": f"{n:,}"}


# --- how each rule reshapes one distribution --------------------------------------------------------------------------

BEGUN = "Anna lives in Rome. She has a red ball. It rains."
TRUE = {"She": 3 / 7, "Anna": 2 / 7, "It": 1 / 7, "The": 1 / 7}


def reshaped() -> tuple[Figure, dict[str, str]]:
    """The next word after BEGUN: the grammar's chances, the model's, and what each rule leaves of them."""
    logits = next_word(BEGUN)
    rules = {
        "the model, τ = 1": logits,
        "greedy, τ = 0": sampling.apply_temperature(logits, 0),
        "τ = 0.5": sampling.apply_temperature(logits, 0.5),
        "τ = 2": sampling.apply_temperature(logits, 2),
        "top-k, k = 2": sampling.keep_top_k(logits, 2),
        "top-p, p = 0.9": sampling.keep_top_p(logits, 0.9),
    }
    places = [LAND.vocabulary.index(word) for word in TRUE]
    shares = {}
    for name, row in rules.items():
        p = row.softmax(-1)
        shares[name] = [*p[places].tolist(), 1 - p[places].sum().item()]
    names = [*TRUE, f"{len(LAND.vocabulary) - len(TRUE)} others"]
    first, _, cold, hot, *_ = shares.values()
    claim(logits.argmax().item() == places[0], "the likeliest word is 'She'")
    claim(cold[0] > first[0] > hot[0], "a low temperature sharpens and a high one flattens")
    nucleus = shares["top-p, p = 0.9"]
    claim(min(nucleus[:-1]) > 0 and nucleus[-1] < first[-1], "top-p keeps the right words, and cuts from the tail")
    claim(cold[-1] < first[-1] < hot[-1], "a high temperature feeds the tail")

    def paint(canvas):
        axes = canvas.subplots(2, 3, sharex=True, sharey=True)
        for ax, (name, values) in zip(axes.flat, shares.items(), strict=True):
            ax.barh(range(len(names)), values, color=[colour(0)] * len(TRUE) + [colour(1)])
            for y, value in enumerate(values):
                mark = [*TRUE.values(), 0][y] if ax is axes[0, 0] else 0
                ax.text(max(value, mark) + 0.03, y, f"{value:.2f}" if value > 1e-6 else "0", va="center", fontsize=9)
            ax.set(title=name, xlim=(0, 1.18), xticks=[0, 0.5, 1], yticks=range(len(names)), yticklabels=names)
            ax.grid(axis="y", visible=False)
            ax.set_axisbelow(True)
        for i, chance in enumerate(TRUE.values()):
            axes[0, 0].plot([chance, chance], [i - 0.4, i + 0.4], color=ink())
        axes[0, 0].invert_yaxis()
        for ax in axes[1]:
            ax.set_xlabel("probability")

    def said(values: list[float]) -> str:
        return ", ".join(f"{word} {value:.2f}" for word, value in zip(names, values, strict=True))

    alt = "Six bar charts of the next word's probabilities. " + ". ".join(f"{k}: {said(v)}" for k, v in shares.items())
    texts = {"begun": BEGUN}
    texts |= {
        "tail_p": f"{nucleus[-1]:.3f}" if nucleus[-1] > 1e-6 else "0",
        "tail_1": f"{first[-1]:.3f}",
        "tail_half": f"{cold[-1]:.3f}",
        "tail_2": f"{hot[-1]:.2f}",
    }
    texts |= {"she_1": f"{first[0]:.2f}", "she_half": f"{cold[0]:.2f}", "she_2": f"{hot[0]:.2f}"}
    texts |= {"n_others": str(len(LAND.vocabulary) - len(TRUE))}
    return draw(paint, alt + ".", size=(6.6, 4.2)), texts


# --- quality against diversity ----------------------------------------------------------------------------------------

TEMPERATURES, NUCLEI = (0, 0.3, 0.6, 0.8, 1, 1.25, 1.5), (0.5, 0.7, 0.8, 0.9, 0.95)
WEATHER = ("It rains.", "The sun shines.")


@functools.cache
def beginnings(n: int, seed: int = 5) -> list[str]:
    """The first two sentences of n stories."""
    generator = rng(seed)
    return [". ".join(LAND.story(generator).split(". ")[:2]) + "." for _ in range(n)]


def own_end(begun: str, generator: torch.Generator) -> str:
    """A beginning, continued by the grammar itself."""
    scene = storyland.Scene()
    sentences = list(storyland._sentences(storyland.split_words(begun)))
    for sentence in sentences:
        rule, drawn = next(
            (r, d) for r, _ in LAND._choices(scene) if (d := LAND._match(r, scene, sentence)) is not None
        )
        scene = rule.after(scene, drawn)
    words = [word for sentence in sentences for word in sentence]
    while scene.stage != "over":
        rules, chances = zip(*LAND._choices(scene), strict=True)
        rule = rules[int(torch.multinomial(torch.tensor(chances), 1, generator=generator))]
        drawn = {}
        for slot in storyland._drawn_slots(rule):
            pool = LAND._pool(slot, scene)
            drawn[slot] = pool[int(torch.randint(len(pool), (), generator=generator))]
        words += LAND._sentence(rule, scene, drawn)
        scene = rule.after(scene, drawn)
    return " ".join(words).replace(" .", ".")


def repeated(words: list[str], n: int = 5) -> float:
    """The share of runs of n words that stood in the text before."""
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(runs)) / len(runs)


@dataclass(frozen=True)
class Judged:
    """What the grammar says of the ends of stories, of the sentences after the second."""

    allowed: float  # share of the sentences
    distinct: float  # share of the sentences, among the ends of one beginning
    weather: float  # share of the sentences
    length: float  # sentences
    again: float  # share of runs of five words that stood in the story before


def judged(ends: list[list[str]]) -> Judged:
    """Of each beginning there are several whole stories."""
    found = [[verdict for story in stories for verdict in LAND.judge(story)[2:]] for stories in ends]
    every = [verdict for verdicts in found for verdict in verdicts]
    distinct = sum(len({v.sentence for v in verdicts}) for verdicts in found)
    return Judged(
        sum(v.allowed for v in every) / len(every),
        distinct / len(every),
        sum(v.sentence in WEATHER for v in every) / len(every),
        len(every) / sum(map(len, ends)),
        statistics.mean(repeated(storyland.split_words(story)) for stories in ends for story in stories),
    )


def go_on(begun: list[str], times: int = 1, seed: int = 0, **how) -> list[list[str]]:
    """Each beginning, continued `times` times by the model."""
    ids = torch.tensor([LAND.encode(story)[:-1] for story in begun]).repeat_interleave(times, 0)
    net = model()
    out = cache.generate_cached(net, ids, LAND.longest - ids.shape[1], generator=rng(seed), eos_id=END, **how)
    stories = [LAND.decode(row) for row in out.tolist()]
    return [stories[i : i + times] for i in range(0, len(stories), times)]


def greedy() -> dict[str, str]:
    """What greedy decoding makes of the first beginning."""
    begun = beginnings(1)
    end = go_on(begun, temperature=0)[0][0].removeprefix(begun[0]).strip()
    claim(end.count("goes to the") > 2, "the greedy end goes from place to place")
    return {"begun0": begun[0], "greedy_text": end}


@functools.cache
@one_thread()
def measured(n: int = 12, times: int = 10, seed: int = 0) -> tuple[dict, dict, Judged]:
    """The model's stories at several temperatures and nuclei, and the grammar's own."""
    begun, own = beginnings(n), rng(seed)
    by_t = {t: judged(go_on(begun, times, seed, temperature=t)) for t in TEMPERATURES}
    by_p = {p: judged(go_on(begun, times, seed, top_p=p)) for p in NUCLEI}
    return by_t, by_p, judged([[own_end(story, own) for _ in range(times)] for story in begun])


def quality() -> tuple[Figure, dict[str, str]]:
    """The share of allowed sentences against the share of distinct ones."""
    by_t, by_p, grammar = measured()
    claim(max(by_t[t].allowed for t in (0, 1.5)) < by_t[1].allowed, "both ends have more mistakes than T = 1")
    claim(min(by_t[t].allowed for t in (0.6, 0.8)) > by_t[1].allowed, "somewhat lower temperatures have fewer")
    claim(by_p[0.9].allowed > by_t[1].allowed, "top-p with 0.9 has fewer mistakes than T = 1")
    claim(by_t[0].distinct < 0.1 < by_t[1].distinct < by_t[1.5].distinct, "the temperature makes sentences distinct")
    claim(by_t[0].again > 5 * by_t[1].again, "greedy ends repeat much more than drawn ones")
    claim(by_t[0].weather == 0 and by_t[0.6].weather < 0.75 * by_t[1].weather, "a low temperature loses the weather")

    def paint(canvas):
        ax = canvas.subplots()
        for found, name, style in ((by_t, "temperature", "o-"), (by_p, "top-p, τ = 1", "s--")):
            points = list(found.values())
            ax.plot([100 * x.distinct for x in points], [100 * x.allowed for x in points], style, label=name)
        names = {0: (8, -3), 0.3: (-8, 9), 0.6: (-6, -15), 1: (8, 0), 1.25: (8, 0), 1.5: (-32, -4)}
        points = [(f"τ={t:g}", by_t[t], shift) for t, shift in names.items()]
        points += [("p=0.5", by_p[0.5], (-8, 9)), ("p=0.9", by_p[0.9], (-12, 10))]
        for name, x, shift in points:
            place = (100 * x.distinct, 100 * x.allowed)
            ax.annotate(name, place, xytext=shift, textcoords="offset points", fontsize=9)
        ax.plot([100 * grammar.distinct], [100 * grammar.allowed], "*", color=ink(), markersize=13, label="the grammar")
        ax.set(title="Ten ends of each beginning", xlabel="distinct sentences (%)", ylabel="allowed sentences (%)")
        ax.legend(loc="lower center")

    texts = {
        "g_distinct": percent(grammar.distinct),
        "g_again": percent(grammar.again),
        "g_weather": percent(grammar.weather),
        "g_length": f"{grammar.length:.1f}",
    }
    for sign, found in (("t", by_t), ("p", by_p)):
        for key, x in found.items():
            name = f"{sign}{key:g}"
            texts |= {f"{name}_allowed": percent(x.allowed), f"{name}_distinct": percent(x.distinct)}
            texts |= {
                f"{name}_again": percent(x.again),
                f"{name}_weather": percent(x.weather),
                f"{name}_length": f"{x.length:.1f}",
            }
    alt = "Share of allowed sentences against share of distinct ones. "
    alt += "; ".join(
        f"τ = {t:g}: {percent(x.allowed)} allowed, {percent(x.distinct)} distinct" for t, x in by_t.items()
    )
    alt += "; " + "; ".join(f"p = {p:g}: {percent(x.allowed)}, {percent(x.distinct)}" for p, x in by_p.items())
    return draw(paint, f"{alt}; the grammar: 100 %, {percent(grammar.distinct)}.", size=(6.2, 4)), texts


# --- likelier text ----------------------------------------------------------------------------------------------------


@functools.cache
def _told(words: tuple[str, ...]) -> tuple[storyland.Scene, tuple[str, ...]]:
    """The scene after the last full stop of a story that is allowed so far, and the words since then."""
    if not words:
        return storyland.Scene(), ()
    scene, since = _told(words[:-1])
    since = (*since, words[-1])
    if words[-1] != ".":
        return scene, since
    pairs = ((rule, LAND._match(rule, scene, list(since))) for rule, _ in LAND._choices(scene))
    return next((rule.after(scene, drawn), ()) for rule, drawn in pairs if drawn is not None)


@functools.cache
def _next_words(words: tuple[str, ...]) -> Tensor:
    """The grammar's own log-probabilities of the next word: (V,)."""
    scene, since = _told(words)
    if scene.stage == "over":
        return torch.full((len(LAND.vocabulary),), -math.inf).index_fill(0, torch.tensor(END), 0.0)
    chances = torch.zeros(len(LAND.vocabulary))
    for rule, chance in LAND._choices(scene):
        for pattern, word in zip(rule.words, (*since, None), strict=False):
            slot = pattern.strip("[+]")
            may = [LAND._recall(slot, scene)] if pattern[0] == "[" else [pattern]
            may = LAND._pool(slot, scene) if pattern.startswith("[+") else may
            if word is None:
                for one in may:
                    chances[LAND.vocabulary.index(one)] += chance / len(may)
            elif word in may:
                chance /= len(may)
            else:
                break
    return (chances / chances.sum()).log()


def perfect(ids: Tensor) -> Tensor:
    """What a model without errors would give: (N, T) -> (N, V)."""
    return torch.stack([_next_words(tuple(LAND.vocabulary[i] for i in row[1:])) for row in ids.tolist()])


def likeliest(scene: storyland.Scene) -> float:
    """ln p of the likeliest way in which the grammar can end a story."""
    if scene.stage == "over":
        return 0.0
    ways = LAND._branches(scene)
    return max(math.log(chance) - math.log(n) + likeliest(after) for _, chance, n, after in ways)


def beams(n: int = 6, seed: int = 0) -> dict[str, str]:
    """Ends of stories with the grammar's own chances: greedy, found by beam search, and drawn."""
    begun, texts, found = beginnings(n), {"b_n": str(n)}, {}
    whole, room = LAND.log_prob, LAND.longest - len(LAND.encode(begun[0])) + 1
    first = -sum(math.log(len(pool)) for pool in (LAND.girls + LAND.boys, LAND.homes, LAND.colours, LAND.things))

    def note(name: str, stories: list[str]) -> None:
        found[name] = statistics.mean(whole(story) - first for story in stories)
        n_sentences = statistics.mean(len(LAND.judge(story)) - 2 for story in stories)
        texts.update(
            {f"{name}_logp": f"{found[name]:.2f}".replace("-", "−"), f"{name}_sentences": f"{n_sentences:.1f}"}
        )
        texts[f"{name}_text"] = stories[0].removeprefix(begun[0]).strip()

    for n_beams in (1, 4, 16):
        prompts = [torch.tensor(LAND.encode(story)[:-1]) for story in begun]
        best = [sampling.beam_search(perfect, prompt, n_beams, room, END) for prompt in prompts]
        note(f"b{n_beams}", [LAND.decode(beams[0][0]) for beams in best])
        if n_beams == 16:
            note("worst", [LAND.decode(beams[-1][0]) for beams in best])
    own = rng(seed)
    note("own", [own_end(story, own) for story in begun for _ in range(100)])
    scene = storyland.Scene(stage="event", hero="Anna", home="Rome", colour="red", thing="ball")
    top, entropy = likeliest(scene), LAND._outlook(scene, {})[0]
    texts |= {"top_share": percent(math.exp(top)), "top_logp": f"{top:.2f}".replace("-", "−")}
    claim(abs(found["own"] + entropy) < 0.6, "drawn ends have the entropy on average")
    claim(
        max(found["b1"], found["b4"]) < found["own"] - 3, "greedy and four beams find less likely ends than those drawn"
    )
    claim(
        abs(found["b16"] - top) < 1e-6 and found["worst"] < found["b1"] + 1,
        "sixteen beams find the likeliest end of all",
    )
    return texts | {"end_entropy": f"−{entropy:.2f}"}


# --- seeds, and rounding ----------------------------------------------------------------------------------------------


@one_thread()
def chance(n: int = 16) -> dict[str, str]:
    """What a seed fixes, and what it does not; and a sum in two orders."""
    begun = beginnings(n)
    together = [ends[0] for ends in go_on(begun, seed=1)]
    claim(together == [ends[0] for ends in go_on(begun, seed=1)], "the same seed gives the same texts")
    alone = [go_on([story], seed=1)[0][0] for story in begun]
    differ = sum(a != b for a, b in zip(alone, together, strict=True))
    claim(differ > n / 2, "most texts differ when they are drawn alone")
    big, one = torch.tensor(1e8), torch.tensor(1.0)
    orders = {"left": (big - big) + one, "right": big + (one - big)}
    claim(orders["left"].item() == 1 and orders["right"].item() == 0, "the order of a sum matters")
    return {"n_alone": str(differ), "n_batch": str(n)} | {f"order_{k}": f"{x.item():.0f}" for k, x in orders.items()}


# --- what choosing costs ----------------------------------------------------------------------------------------------


@one_thread()
def cost(V: int = 50257, C: int = 768, batches: tuple[int, ...] = (1, 16)) -> dict[str, str]:
    """Milliseconds of the steps of sampling, next to the product of GPT-2's head, on one core."""
    head, texts, grows = torch.randn(V, C, generator=rng(0)) / C**0.5, {}, {}
    for B in batches:
        x = 3 * torch.randn(B, C, generator=rng(1))
        logits = x @ head.T
        steps = {
            "head": lambda x=x: x @ head.T,
            "argmax": lambda logits=logits: logits.argmax(-1),
            "sample": lambda logits=logits: sampling.sample(logits),
            "sort": lambda logits=logits: sampling.keep_top_p(logits, 0.9),
            "ours": lambda logits=logits: sampling.keep_top_k(logits, 40),
            "topk": lambda logits=logits: logits.topk(40),
        }
        for name, step in steps.items():
            ms = _milliseconds(step)
            grows[name] = ms / grows.get(name, 1)
            texts[f"{name}_{B}"] = f"{ms:.2f}" if ms < 1 else f"{ms:.1f}"
    claim(grows["head"] < grows["sort"], "in a batch the sort grows by more than the product")
    return texts


# --- what breaks ------------------------------------------------------------------------------------------------------


def dropped_crossing(logits: Tensor, p: float) -> Tensor:
    """A common mistake: only tokens whose running sum stays within p are kept."""
    probabilities, order = logits.softmax(-1).sort(descending=True)
    keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, probabilities.cumsum(-1) <= p)
    return logits.masked_fill(~keep, -math.inf)


@one_thread()
def mistakes() -> dict[str, str]:
    """What mistakes do to the distribution after BEGUN, and to small ones."""
    logits = next_word(BEGUN)
    p = logits.softmax(-1)
    found = json.loads(Path(__file__).with_name("checkpoint.json").read_text(encoding="utf-8"))
    phrase = "a gentle hum of precision, as I"
    claim(found["text"].count(phrase) == 2 and found["n_tokens"] == 60, "the checkpoint repeats itself")
    she = LAND.vocabulary.index("She")
    texts = {"phrase": phrase, "wrong_multiplied": f"{(logits * 0.5).softmax(-1)[she]:.2f}"}
    halved = p / 0.5
    claim(torch.allclose(halved / halved.sum(), p), "dividing probabilities changes nothing")
    twice = p.softmax(-1)
    texts |= {"twice_she": f"{twice[she]:.3f}", "twice_others": percent(1 - twice.topk(4).values.sum().item())}
    texts["dropped"] = _kept(dropped_crossing(torch.tensor([0.5, 0.41, 0.09]).log(), 0.9))
    with torch.no_grad():
        ids = torch.tensor([LAND.encode(story) for story in [LAND.story(rng(11))]])
        sure = model()(ids[:, :-1]).softmax(-1).amax(-1)
    texts["sure"] = percent((sure > 0.9).float().mean().item())
    none = dropped_crossing(torch.tensor([0.95, 0.04, 0.01]).log(), 0.9)
    claim(_kept(none) == "0" and bool(none.softmax(-1).isnan().all()), "nothing is left, and the softmax is NaN")
    enough = int((p.sort().values.cumsum(0) < 0.9).sum()) + 1
    texts["wrong_end"] = str(enough)
    claim(enough == len(p), "a sum from the rare end cuts nothing")
    ties = torch.tensor([1.0, 3, 3, 3])
    texts["ties"] = str(int((ties >= ties.topk(2).values[-1]).sum()))
    tiny = (torch.tensor([4.0, 1.0]).half() / 1e-5).softmax(-1)
    claim(bool(tiny.isnan().all()), "a tiny temperature overflows in float16")
    even = torch.zeros(100)
    texts["reseeded"] = str(len({sampling.sample(even, rng(3)).item() for _ in range(50)}))
    once = rng(3)
    texts["not_reseeded"] = str(len({sampling.sample(even, once).item() for _ in range(50)}))
    out = sampling.generate(model(), torch.full((1, 1), START), LAND.longest - 1, temperature=0.7, generator=rng(1))[
        0
    ].tolist()
    after = out[out.index(END) + 1 :]
    texts["after_end"] = " ".join(LAND.vocabulary[i] for i in after[:8])
    return texts
