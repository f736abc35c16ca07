"""Chapter 1's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import argparse
import functools
import re
import statistics
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from pydoc_data import topics
from unittest import mock

import regex
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import NullFormatter, ScalarFormatter

from tfmlib import tokens, vocabularies
from tfmlib.tokens import Tokenizer

from . import Figure, colour, draw, ink

# --- texts -------------------------------------------------------------------------------------------------------

# A text written for this page, its words cut by hand with spaces, and the same in English.
CHINESE_WORDS = """
天 还 没 亮 ， 城南 的 菜市场 已经 热闹 起来 。 卖 鱼 的 老周 把 水箱 从 车上 搬 下来 ， 一边 倒 水 ， 一边 和
邻居 打招呼 。 他 每天 四点 起床 ， 先 去 码头 挑 鱼 ， 再 骑车 回来 摆摊 。 买 菜 的 人 多半 是 附近 的 老人 ，
他们 不 着急 ， 一个 摊位 一个 摊位 地 看 ， 摸摸 萝卜 ， 闻闻 香菜 ， 最后 才 问 价钱 。 七点 以后 ， 上班 的
年轻人 来 了 ， 他们 走 得 快 ， 话 也 少 ， 付 了 钱 就 走 。 如果 夜里 下过 雨 ， 地上 会 有 积水 ， 卖 豆腐 的
女人 就 在 摊位 前 铺 几 块 木板 ， 免得 客人 湿 了 鞋 。 到 了 中午 ， 大部分 菜 已经 卖完 ， 剩下 的 便宜 卖 。
老周 收好 水箱 ， 坐在 台阶 上 吃 一 碗 面 。 他 说 ， 市场 像 一 条 河 ， 每天 的 水 都 不 一样 ， 可是 河 还 在
那里 。 下午 三点 ， 清洁工 用 水管 冲洗 地面 ， 鱼鳞 和 菜叶 流 进 下水道 ， 街道 又 安静 下来 。 第二天 天 不
亮 ， 灯 又 会 一 盏 一 盏 地 亮 起来 。
"""
CHINESE = "".join(CHINESE_WORDS.split())
TRANSLATION = (
    "It is not yet light, and the vegetable market in the south of the city is already busy. Old Zhou, who sells fish, "
    "lifts the water tanks down from his truck, and greets his neighbours while he fills them. Every day he gets up at "
    "four, first goes to the harbour to choose fish, and then rides back to set up his stall. Most of the people who "
    "buy vegetables are old people from nearby. They are in no hurry. They look at one stall after another, touch the "
    "radishes, smell the coriander, and only at the end ask for the price. After seven the young people come, on their "
    "way to work. They walk fast, say little, pay and leave. If it has rained in the night, there are puddles on the "
    "ground, and the woman who sells tofu lays a few boards in front of her stall, so that her customers do not get "
    "wet shoes. By noon most of the vegetables are sold, and the rest goes cheaply. Old Zhou packs up his tanks, sits "
    "on the steps and eats a bowl of noodles. He says that the market is like a river: the water is different every "
    "day, but the river is still there. At three in the afternoon the cleaners wash the ground with a hose, fish "
    "scales and leaves run into the drain, and the street is quiet again. The next day, before it is light, the lamps "
    "will come on again, one by one."
)


@functools.cache
def english() -> tuple[str, str]:
    """The plain paragraphs of Python's documentation: text to learn from, and every fifth paragraph held out."""
    paragraphs = {}  # each once
    for name in sorted(topics.topics):
        for block in re.split(r"\n\s*\n", topics.topics[name]):
            lines = [line.strip() for line in block.split("\n")]
            text = " ".join(lines)
            plain = sum(c.isalpha() or c.isspace() for c in text) > 0.9 * len(text)
            if len(lines) > 1 and plain and text[0].isalpha() and text[-1] in ".:)":
                paragraphs[text] = True
    kept = list(paragraphs)
    return "\n".join(text for i, text in enumerate(kept) if i % 5 != 4), "\n".join(kept[4::5])


def code() -> str:
    """A module of the standard library, comments included."""
    return Path(argparse.__file__).read_text(encoding="utf-8")


LARGEST = 4096


@dataclass(frozen=True)
class Learned:
    """A vocabulary, and what each merge did: how often its pair occurred, and the pairs that were counted for it."""

    vocab: dict[int, bytes]
    merges: list[tuple[bytes, bytes]]
    occurrences: list[int]
    counted: list[int]  # by train_bpe, which counts only in the words that may hold the pair
    all_pairs: list[int]  # in all different words, just before the merge: what a full count has to visit


@functools.cache
def learned() -> Learned:
    """Train on English once, and watch the calls of `merge_pair`."""
    count, merge = tokens.pair_counts, tokens.merge_pair
    rows, last, now = [], {}, None  # a row for each merge: occurrences, pairs counted, symbols that disappeared

    def watched_count(words):
        nonlocal last
        last = words
        return count(words)

    def watched_merge(word, pair):  # train_bpe has just counted this word
        nonlocal now
        if pair != now:
            now = pair
            rows.append([0, 0, 0])
        after = merge(word, pair)
        new = (count(last)[pair], len(word) + len(after) - 2, len(word) - len(after))
        rows[-1] = [old + n for old, n in zip(rows[-1], new, strict=True)]
        return after

    with mock.patch.multiple(tokens, pair_counts=watched_count, merge_pair=watched_merge):
        vocab, merges = tokens.train_bpe(english()[0], LARGEST)
    occurrences, counted, removed = map(list, zip(*rows, strict=True))
    start = sum(len(word.encode()) - 1 for word in set(tokens.GPT2_PATTERN.findall(english()[0])))
    all_pairs = [start - gone for gone in accumulate([0, *removed[:-1]])]
    return Learned(vocab, merges, occurrences, counted, all_pairs)


def tokenizer(size: int = 2048, special_tokens: tuple[str, ...] = ()) -> Tokenizer:
    """Trained on English, once for all sizes: the first merges of a large vocabulary are the smaller one."""
    vocab, merges = learned().vocab, learned().merges
    return Tokenizer({i: vocab[i] for i in range(size)}, merges[: size - 256], special_tokens)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The text of each token, spaces made visible."""
    return [tokenizer.decode([i]).replace(" ", "␣") for i in tokenizer.encode(text)]


# --- the whole road ----------------------------------------------------------------------------------------------


def road(text: str = "It is true.") -> Figure:
    """The data flow of a transformer that continues a text: what each part makes of it, and in which chapter."""
    model = tokenizer()
    cut, ids = pieces(model, text), model.encode(text)
    rows = [  # height, what happens, result, chapter
        (12.0, "cut the text into tokens", " | ".join(cut), "1"),
        (10.9, "look up their ids", f"{', '.join(map(str, ids))}\n(B, T)", "1"),
        (9.8, "embedding: a row of a table for each id", "(B, T, C)", "2"),
        (8.7, "position", "(B, T, C)", "2"),
        (7.2, "norm, attention: read from other tokens", "(B, T, C)", "3, 4"),
        (5.3, "norm, MLP: change each token alone", "(B, T, C)", "5"),
        (3.3, "norm, output matrix: a score for each id", "logits (B, T, V)", "6"),
        (2.2, "softmax, choose the next token", "one new id\nfor each text", "11"),
    ]
    in_layer = (7.2, 5.3)
    middle, result_at, chapter_at = 3.25, 7.95, 9.85

    def paint(canvas):
        ax = canvas.subplots()
        ax.set(xlim=(-0.3, 10.3), ylim=(1.7, 13.5), title="From a text to its next token")
        ax.axis("off")
        here = {"ha": "center", "va": "center", "fontsize": 10}
        thin = {"color": ink(), "linewidth": 1}
        ax.text(middle, 13.1, f"“{text}”", **here, weight="bold")
        ax.text(result_at, 13.1, "result", **here, style="italic")
        ax.text(chapter_at, 13.1, "chapter", **here, style="italic")
        above = 12.85
        for y, name, result, chapter in rows:
            box = FancyBboxPatch((0.3, y - 0.32), 5.9, 0.64, boxstyle="round,pad=0.06", linewidth=1.4)
            box.set(facecolor="none", edgecolor=colour(1 if y in in_layer else 0))
            ax.add_patch(box)
            ax.text(middle, y, name, **here)
            ax.text(result_at, y, result, **here)
            ax.text(chapter_at, y, chapter, **here)
            ax.annotate("", (middle, y + 0.38), (middle, above), arrowprops={"arrowstyle": "-|>", **thin})
            above = y - 0.38
            if y in in_layer:  # what went in passes by the box and is added
                ax.plot([middle, 0, 0, middle - 0.25], [y + 0.62, y + 0.62, y - 0.75, y - 0.75], **thin)
                ax.plot([middle, middle], [y - 0.38, y - 0.55], **thin)
                ring = {"boxstyle": "circle,pad=0.12", "facecolor": "none", "edgecolor": ink()}
                ax.text(middle, y - 0.75, "+", **here, weight="bold", bbox=ring)
                above = y - 0.98
        frame = FancyBboxPatch((-0.2, 4.15), 6.65, 4.0, boxstyle="round,pad=0.05", linestyle="--", facecolor="none")
        frame.set_edgecolor(ink())
        ax.add_patch(frame)
        ax.text(6.7, 6.25, "one layer, L times", va="center", fontsize=10)

    alt = (
        f"The road of the text “{text}” from top to bottom. It is cut into {len(ids)} tokens, which become ids (B, T). "
        "Embedding and position make vectors (B, T, C). L layers follow, each with attention, which reads from other "
        "tokens, and an MLP, which changes each token alone; what goes into each of them is added to its result. The "
        "output matrix gives logits (B, T, V), and one new id is chosen."
    )
    return draw(paint, alt, size=(5.7, 6.0))


# --- characters, words, tokens -----------------------------------------------------------------------------------


def units(size: int = 2048) -> dict[str, str]:
    """Bytes, characters, words and tokens of the same text: how many kinds, how many in a text, how many unknown."""
    learn, held_out = english()
    model = tokenizer(size)
    cuts = {
        "byte": lambda text: list(text.encode()),
        "character": list,
        "word": lambda text: re.findall(r"\w+|[^\w\s]", text),
        "token": model.encode,
    }
    texts = {}
    for name, cut in cuts.items():
        seen, rest = Counter(cut(learn)), cut(held_out)
        kinds = {"byte": 256, "token": size}.get(name, len(seen))
        unknown = 0 if name in ("byte", "token") else sum(unit not in seen for unit in rest)
        texts[f"{name}-kinds"] = f"{kinds:,}"
        texts[f"{name}-length"] = f"{1000 * len(rest) / len(held_out):,.0f}"
        texts[f"{name}-unknown"] = f"{unknown:,} of {len(rest):,}"
        if name == "word":
            texts["word-once"] = f"{100 * sum(n == 1 for n in seen.values()) / len(seen):.0f} %"
            half = Counter(cut(learn[: len(learn) // 2]))
            texts["word-half"] = f"{len(half):,}"
    texts["learn-characters"] = f"{len(learn):,}"
    texts["held-characters"] = f"{len(held_out):,}"
    assigned = sum(unicodedata.category(chr(i)) not in ("Cn", "Co", "Cs", "Cc") for i in range(0x110000))
    return texts | {"unicode": f"{assigned:,}"}


# --- what a merge does -------------------------------------------------------------------------------------------


def history(model: Tokenizer, word: str) -> list[tuple[int, tuple[bytes, ...]]]:
    """The pieces of a word at the start and after each merge that changes it: (number of the merge, pieces)."""
    now = tuple(bytes([byte]) for byte in word.encode())
    rows = [(0, now)]
    for number, pair in enumerate(model.merges, start=1):
        after = tokens.merge_pair(now, pair)
        if after != now:
            rows.append((number, after))
            now = after
    return rows


def steps(word: str = " dictionary") -> tuple[Figure, dict[str, str]]:
    """A word after each merge that changes it, and how often each merged pair occurred."""
    model = tokenizer(LARGEST)
    rows = history(model, word)
    counts = learned().occurrences
    numbers = range(1, len(counts) + 1)
    assert len(rows[-1][1]) == 1, f"{word!r} must become one token, got {rows[-1]}"
    assert sorted(counts, reverse=True) == counts, "a later merge occurred more often than an earlier one"

    def paint(canvas):
        top, bottom = canvas.subplots(2, 1, height_ratios=[1.7, 1])
        for y, (_, parts) in enumerate(rows):
            x, before = 0, [] if y == 0 else list(rows[y - 1][1])
            for part in parts:
                new = y > 0 and part not in before
                box = FancyBboxPatch((x + 0.09, y - 0.31), len(part) - 0.18, 0.62, boxstyle="round,pad=0.03")
                box.set(facecolor="none", edgecolor=colour(1 if new else 0), linewidth=2 if new else 1)
                top.add_patch(box)
                top.text(x + len(part) / 2, y, part.decode().replace(" ", "␣"), ha="center", va="center", fontsize=9.5)
                x += len(part)
        top.set(xlim=(0, len(word)), ylim=(len(rows) - 0.4, -0.6), xticks=[])
        top.set_yticks(range(len(rows)), ["bytes"] + [f"after merge {number}" for number, _ in rows[1:]])
        top.set_title(f"The pieces of “{word.replace(' ', '␣')}”; the new piece is drawn thick")
        top.grid(False)
        top.tick_params(length=0)
        for spine in top.spines.values():
            spine.set_visible(False)
        bottom.plot(numbers, counts, color=colour(0))
        marked = [number for number, _ in rows[1:]]
        bottom.plot(marked, [counts[n - 1] for n in marked], "o", color=colour(1), markersize=5, label="merges above")
        bottom.set(xscale="log", yscale="log", xlabel="number of the merge", ylabel="occurrences")
        bottom.set_title("How often the merged pair occurred")
        bottom.legend(fontsize=9)
        for axis in (bottom.xaxis, bottom.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())

    alt = (
        f"Above: the word '{word}' as {len(rows[0][1])} bytes, and after each of the {len(rows) - 1} merges that "
        f"change it, until merge {rows[-1][0]} makes it one token. Below: occurrences of the merged pair against the "
        f"number of the merge, both logarithmic, falling from {counts[0]:,} to {counts[-1]}."
    )
    texts = {
        "steps-bytes": str(len(rows[0][1])),
        "steps-changes": str(len(rows) - 1),
        "steps-last": str(rows[-1][0]),
        "steps-often": f"{counts[rows[1][0] - 1]:,}",
        "steps-seldom": f"{counts[rows[-1][0] - 1]:,}",
        "count-first": f"{counts[0]:,}",
        "count-last": str(counts[-1]),
        "count-1000": str(counts[999]),
    }
    return draw(paint, alt, size=(6.6, 6.0)), texts


# --- how to encode -----------------------------------------------------------------------------------------------


def longest_match(model: Tokenizer, pre_token: str) -> tuple[bytes, ...]:
    """A mistake: always the longest symbol that fits, from left to right."""
    rest, found = pre_token.encode(), []
    while rest:
        n = next(n for n in range(len(rest), 0, -1) if rest[:n] in model.ids)
        found.append(rest[:n])
        rest = rest[n:]
    return tuple(found)


def leftmost_merge(model: Tokenizer, pre_token: str) -> tuple[bytes, ...]:
    """A mistake: always the first pair from the left that has a merge, whatever its rank."""
    word = [bytes([byte]) for byte in pre_token.encode()]
    i = 0
    while i < len(word) - 1:
        if (word[i], word[i + 1]) in model.ranks:
            word[i : i + 2] = [word[i] + word[i + 1]]
            i = 0
        else:
            i += 1
    return tuple(word)


def _by_hand() -> None:
    """The page's example by hand: h+e has rank 2 and e+n rank 0, so "hen" is h, en; longest match finds he, n."""
    model = Tokenizer(*tokens.train_bpe("her\nher\nhen\nten\nten\nten", 260))
    assert model.merges == [(b"e", b"n"), (b"t", b"en"), (b"h", b"e"), (b"he", b"r")]
    for word, right, wrong in (("hen", "h en", "he n"), ("then", "t h en", "t he n"), ("tenth", "ten t h", "ten t h")):
        assert b" ".join(model.vocab[i] for i in model.encode(word)).decode() == right
        assert b" ".join(longest_match(model, word)).decode() == wrong
    assert model.encode("hen") == [104, 256]


def rules(size: int = 2048) -> dict[str, str]:
    """How many different words of the held-out text two wrong rules cut in another way than the right one."""
    _by_hand()
    model = tokenizer(size)
    words = sorted(set(tokens.GPT2_PATTERN.findall(english()[1])))
    right = {word: tuple(model.vocab[i] for i in model.encode(word)) for word in words}
    texts = {"rule-words": f"{len(words):,}"}
    for name, rule in (("longest", longest_match), ("leftmost", leftmost_merge)):
        cuts = {word: rule(model, word) for word in words}
        assert all(b"".join(cut).decode() == word for word, cut in cuts.items())
        differ = sum(cuts[word] != right[word] for word in words)
        texts[f"rule-{name}"] = f"{100 * differ / len(words):.0f} %"
    return texts


# --- the pattern -------------------------------------------------------------------------------------------------


def without_pattern(n_merges: int = 100) -> dict[str, str]:
    """Train on whole paragraphs, with and without the pre-token pattern: which symbols mix words and other signs."""
    text = english()[1][:12_000]
    texts = {}
    for name, pattern in (("with", tokens.GPT2_PATTERN), ("without", regex.compile(r"[^\n]+|\n"))):
        with mock.patch.object(tokens, "GPT2_PATTERN", pattern):
            _, merges = tokens.train_bpe(text, 256 + n_merges)
        symbols = [(left + right).decode(errors="replace") for left, right in merges]
        mixed = [s for s in symbols if re.search(r"[a-z][^a-z]", s, re.IGNORECASE)]
        texts[f"mixed-{name}"] = str(len(mixed))
        if name == "without":
            texts["mixed-examples"] = ", ".join(f"“{s.replace(' ', '␣')}”" for s in sorted(mixed, key=len)[-4:])
    return texts | {"mixed-merges": str(n_merges)}


# --- training: how much work -------------------------------------------------------------------------------------


def train_naive(text: str, n_merges: int, key: Callable = lambda pair: pair) -> tuple[list, int, int, int]:
    """BPE that counts all pairs anew for every merge: (merges, pairs counted, counts compared, merges with a tie).

    Of pairs that occur equally often, the one with the greatest `key` is merged.
    """
    pre_tokens = Counter(tokens.GPT2_PATTERN.findall(text))
    words = {tuple(bytes([byte]) for byte in word.encode()): n for word, n in pre_tokens.items()}
    merges, visited, compared, ties = [], 0, 0, 0
    for _ in range(n_merges):
        counts = tokens.pair_counts(words)
        visited += sum(len(word) - 1 for word in words)
        compared += len(counts)
        most = max(counts.values())
        equal = [pair for pair, n in counts.items() if n == most]
        ties += len(equal) > 1
        merges.append(max(equal, key=key))
        words = {tokens.merge_pair(word, merges[-1]): n for word, n in words.items()}
    return merges, visited, compared, ties


def training_cost(n_merges: int = 200) -> tuple[Figure, dict[str, str]]:
    """Pairs visited for each merge: a full count against train_bpe's; and the time of both for a few merges."""
    work, every = learned(), 32
    numbers = range(1, len(work.merges) + 1, every)
    kept_mean = [statistics.mean(work.counted[i : i + every]) for i in range(0, len(work.counted), every)]

    def paint(canvas):
        ax = canvas.subplots()
        ax.plot(numbers, work.all_pairs[::every], "--", label="full count")
        ax.plot(numbers, kept_mean, label=f"only in the words that change (mean of {every} merges)")
        ax.set(yscale="log", xlabel="number of the merge", ylabel="pairs counted")
        ax.set_title("Pairs counted for one merge")
        ax.legend(fontsize=9)

    text = english()[0]
    start = time.thread_time()
    merges, visited, compared, ties = train_naive(text, n_merges)
    naive = time.thread_time() - start
    start = time.thread_time()
    _, same = tokens.train_bpe(text, 256 + n_merges)
    kept = time.thread_time() - start
    assert merges == same == work.merges[:n_merges], "the two trainers must agree"
    assert visited == sum(work.all_pairs[:n_merges]), "the full counts do not add up"
    assert kept < naive, "keeping the counts was slower"
    alt = (
        f"Pairs counted for one merge against the number of the merge, the vertical axis logarithmic. A full count "
        f"visits {work.all_pairs[0]:,} pairs for the first merge and {work.all_pairs[-1]:,} for the last. Counting "
        f"only in the words that change starts with {work.counted[0]:,} and falls to {work.counted[-1]}."
    )
    first = work.all_pairs[0]  # every way begins with one full count
    texts = {
        "work-merges": f"{len(work.merges):,}",
        "work-full": f"{sum(work.all_pairs) / 1e6:.1f} million",
        "work-kept": f"{(first + sum(work.counted)) / 1e6:.2f} million",
        "work-some-full": f"{visited / 1e6:.2f} million",
        "work-some-kept": f"{(first + sum(work.counted[:n_merges])) / 1e6:.2f} million",
        "work-n": str(n_merges),
        "work-seconds-full": f"{naive:.2f} s",
        "work-seconds-kept": f"{kept:.2f} s",
        "work-compared": f"{compared:,}",
        "work-ties": str(ties),
        "work-words": f"{len(set(tokens.GPT2_PATTERN.findall(text))):,}",
    }
    return draw(paint, alt, size=(6.6, 3.4)), texts


# --- vocabulary size ---------------------------------------------------------------------------------------------


def vocabulary_size(
    sizes: tuple[int, ...] = (256, 512, 1024, 2048, 4096), C: int = 768
) -> tuple[Figure, dict[str, str]]:
    """Tokens per 1000 characters against the size of an English vocabulary, for four texts; and what the size costs."""
    texts = {
        "Chinese, a market": CHINESE,
        "Python code": code(),
        "English, a market": TRANSLATION,
        "English, held-out documentation": english()[1],
    }
    models = {size: tokenizer(size) for size in sizes}
    rate = {name: [1000 * len(m.encode(text)) / len(text) for m in models.values()] for name, text in texts.items()}
    for name, rates in rate.items():
        assert sorted(rates, reverse=True) == rates, f"a larger vocabulary made {name} longer"
    chinese, python, market, held_out = rate.values()
    saved = [before - after for before, after in pairwise(held_out)]
    assert sorted(saved, reverse=True) == saved, "a doubling saved more than the one before"
    assert chinese[-1] > 0.95 * chinese[0], "the English vocabulary has learned Chinese"
    assert held_out[-1] < market[-1] < python[-1], "the order of the texts is not what the page says"

    def paint(canvas):
        ax = canvas.subplots()
        for (name, rates), style in zip(rate.items(), ("^-", "s--", "D-.", "o-"), strict=True):
            ax.plot(sizes, rates, style, label=name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set(xlabel="size V of the vocabulary", ylabel="tokens per 1,000 characters", ylim=(150, 4000))
        ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
        ax.set_yticks([200, 500, 1000, 3000], ["200", "500", "1,000", "3,000"])
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_title("One English vocabulary, four texts")
        canvas.legend(loc="outside lower center", fontsize=9, ncols=2)

    alt = (
        "Tokens per 1,000 characters against the size of a vocabulary trained on English, both logarithmic. Held-out "
        f"English falls from {held_out[0]:.0f} to {held_out[-1]:.0f}, another English text to {market[-1]:.0f}, Python "
        f"code to {python[-1]:.0f}. Chinese stays at {chinese[-1]:.0f}."
    )
    found = {}
    seen = {size: Counter(model.encode(english()[0])) for size, model in models.items()}
    for i, size in enumerate(sizes):
        rare = sum(seen[size][token] < 10 for token in range(256, size)) / max(1, size - 256)
        found[f"size-rate-{size}"] = f"{held_out[i]:,.0f}"
        found[f"size-saved-{size}"] = f"{held_out[i - 1] - held_out[i]:.0f}" if i else ""
        found[f"size-parameters-{size}"] = f"{size * C / 1e6:.2f}"
        found[f"size-rare-{size}"] = f"{100 * rare:.0f} %"
    return draw(paint, alt, size=(6.6, 4.2)), found


def fertility(size: int = 4096) -> dict[str, str]:
    """Tokens per word of four texts under one English vocabulary, and of Chinese under one that has seen Chinese."""
    model = tokenizer(size)
    source = code()
    texts = {
        "docs": (english()[1], len(english()[1].split())),
        "market": (TRANSLATION, len(TRANSLATION.split())),
        "code": (source, len(source.split())),
        "chinese": (CHINESE, len(re.findall(r"\w+", CHINESE_WORDS))),
    }
    found = {}
    for name, (text, n_words) in texts.items():
        n = len(model.encode(text))
        found |= {
            f"{name}-characters": f"{len(text):,}",
            f"{name}-words": f"{n_words:,}",
            f"{name}-tokens": f"{n:,}",
            f"{name}-per-word": f"{n / n_words:.1f}",
            f"{name}-per-token": f"{len(text.encode()) / n:.1f}",
        }
    ratio = len(model.encode(CHINESE)) / len(model.encode(TRANSLATION))
    assert ratio > 1.5, "the Chinese text is not much longer in tokens"
    blanks = sum(not model.vocab[i].strip() for i in model.encode(source)) / len(model.encode(source))
    half = len(CHINESE) // 2
    learned_half = Tokenizer(*tokens.train_bpe(CHINESE[:half], size))
    other = CHINESE[half:]
    found |= {
        "chinese-ratio": f"{ratio:.1f}",
        "code-blanks": f"{100 * blanks:.0f} %",
        "chinese-english": f"{len(model.encode(other)) / len(other):.1f}",
        "chinese-own": f"{len(learned_half.encode(other)) / len(other):.1f}",
        "chinese-half": str(half),
        "chinese-own-size": str(len(learned_half.vocab)),
    }
    return found


def uneven_numbers(size: int = 2048) -> dict[str, str]:
    """Two neighbouring numbers of three digits that are cut differently."""
    model = tokenizer(size)
    cuts = {n: pieces(model, f" {n}") for n in range(100, 1000)}
    n = next(n for n in range(100, 999) if len(cuts[n]) != len(cuts[n + 1]))
    return {f"number-{i}": f"␣{n + i} = " + " + ".join(cuts[n + i]) for i in (0, 1)}


def published() -> dict[str, str]:
    """Parameters of one table of V rows and C columns in published models."""
    sizes = {
        "gpt2": (50_257, 768),
        "bert": (30_522, 768),
        "llama2": (32_000, 4096),
        "llama3": (128_256, 4096),
        "qwen3": (151_936, 1024),
        "gemma": (256_000, 2048),
    }
    texts = {f"table-{name}": f"{V * C / 1e6:.0f} million" for name, (V, C) in sizes.items()}
    more = 2 * (128_256 - 32_000) * 4096  # input and output tables
    return texts | {"llama-more": f"{more / 1e9:.2f} billion", "llama-fewer": f"{100 * (1 - 3.17 / 3.94):.0f} %"}


# --- what breaks -------------------------------------------------------------------------------------------------


def merge_at_once(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    """A mistake: find all places of the pair first, then put the new symbol there and drop what follows each."""
    places = {i for i in range(len(word) - 1) if word[i : i + 2] == pair}
    return tuple(pair[0] + pair[1] if i in places else word[i] for i in range(len(word)) if i - 1 not in places)


def mistakes(size: int = 2048) -> dict[str, str]:
    """What mistakes do, on small examples."""
    model = tokenizer(size)
    learn, held_out = english()
    texts = {}
    run = (b"a", b"a", b"a")
    texts["overlap"] = b"".join(merge_at_once(run, run[:2])).decode()
    # ties: on the characters that stand for bytes in GPT-2's files, and the first pair met
    names = {byte: character for character, byte in vocabularies.gpt2_byte_names().items()}
    keys = {
        "right": lambda pair: pair,
        "names": lambda pair: tuple("".join(names[byte] for byte in symbol) for symbol in pair),
        "first": lambda pair: 0,
    }
    trained = {name: train_naive(held_out[:12_000], 300, key)[0] for name, key in keys.items()}
    for name in ("names", "first"):
        same = zip(trained["right"], trained[name], strict=True)
        texts[f"tie-{name}"] = str(next(i for i, (a, b) in enumerate(same, start=1) if a != b))
        texts[f"tie-{name}-other"] = str(len(set(trained["right"]) - set(trained[name])))
    # decoding with another vocabulary of the same size
    other = Tokenizer(*tokens.train_bpe(held_out, 1024))
    small = tokenizer(1024)
    texts["foreign-same"] = f"{100 * sum(small.vocab[i] == other.vocab[i] for i in range(256, 1024)) / 768:.0f} %"
    texts["foreign"] = other.decode(small.encode("The statement is true."))
    # two parts encoded apart
    words = [word for word in dict.fromkeys(held_out.split()) if len(word) > 5 and word.isalpha()]
    apart = [model.encode(word[:3]) + model.encode(word[3:]) for word in words]
    texts["apart"] = f"{100 * sum(a != model.encode(w) for a, w in zip(apart, words, strict=True)) / len(words):.0f} %"
    # a lone space in front of a word
    ids = model.encode(learn)
    after = [a for a, b in pairwise(ids) if model.vocab[b][:1].isalpha() and model.vocab[a][-1:] == b" "]
    before = [i for i in ids if model.vocab[i][:1] == b" " and model.vocab[i][1:2].isalpha()]
    texts["lone-space"] = f"{100 * len(after) / (len(after) + len(before)):.1f} %"
    return texts
