"""The checks of chapter 01: pairs, merges, training, tokenizer, padding. Outside truth: values worked out by hand, and
plain versions that count everything anew at each step."""

import json
import struct
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import regex
import torch

from .same import Broken, expect, is_exception, outcome, raises, rng, same

# What a piece may not call, since it is torch's version of the same thing.
FORBIDDEN = {
    "pad_batch": [torch._C._nn.pad_sequence, torch._pad_packed_sequence, torch.Tensor.to_padded_tensor],
}


# What came, what was expected ----------------------------------------------------------------------------------------


def _shown(x) -> str:
    """A value as one reads it: bytes as text where they are text, and only the beginning of a long list."""
    if isinstance(x, bytes):
        try:
            return f"b{x.decode()!r}"
        except UnicodeDecodeError:
            return repr(x)
    if type(x) in (tuple, list):
        items = [_shown(item) for item in x[:12]] + ["..."] * (len(x) > 12)
        inside = ", ".join(items) + "," * (isinstance(x, tuple) and len(x) == 1)
        return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
    text = repr(x)
    return text if len(text) <= 100 else f"{text[:100]} ..."


def _is_a(kind: type, got, what: str) -> None:
    """Break the promise unless this is a dict, a tuple, a list or a str."""
    if got is None:
        raise Broken(f"{what}: expected a {kind.__name__}, got None. Is a `return` missing?")
    expect(isinstance(got, kind), f"{what}: expected a {kind.__name__}, got {type(got).__name__} {_shown(got)}")


def _all_are(kind: type, got, what: str) -> None:
    """Break the promise unless all items are of this type."""
    for i, item in enumerate(got):
        good = isinstance(item, kind) and not isinstance(item, bool)
        said = f"{what}: expected {kind.__name__} objects, got {type(item).__name__} {_shown(item)} at index {i}"
        expect(good, said)


def _two(got, what: str) -> tuple:
    """The two things that a call returns."""
    if got is None:
        raise Broken(f"{what}: expected two results, got None. Is a `return` missing?")
    two = isinstance(got, (tuple, list)) and len(got) == 2
    expect(two, f"{what}: expected two results, got {type(got).__name__}")
    return tuple(got)


def _same_counts(got, want: dict, what: str) -> None:
    """Break the promise unless two tables of counts agree. A pair that is counted zero times may stand there or not."""
    _is_a(dict, got, what)
    stray = [pair for pair, n in got.items() if n != 0 and pair not in want]
    for pair, n in want.items():
        said = f"{what}: expected {n} for {_shown(pair)}, got {_shown(got.get(pair, 0))}"
        expect(got.get(pair, 0) == n, said + (f"; and got {_shown(stray[0])} as a key" if stray else ""))
    expect(not stray, f"{what}: {_shown(stray[0]) if stray else ''} is not one of the pairs that occur")


def _same_word(got, want: tuple, what: str) -> None:
    """Break the promise unless this is the word that is wanted: a tuple of bytes objects."""
    _is_a(tuple, got, what)
    expect(got == want, f"{what}: expected {_shown(want)}, got {_shown(got)}")
    _all_are(bytes, got, what)


def _trained(got, what: str) -> tuple[dict, list]:
    """The two results of train_bpe, (vocab, merges), if they are of the types that the Tokenizer takes."""
    vocab, merges = _two(got, what)
    _is_a(dict, vocab, f"{what}, vocab")
    for i, symbol in vocab.items():
        good = isinstance(i, int) and isinstance(symbol, bytes)
        said = f"{what}, vocab: expected {{id: bytes}}, got {_shown(i)}: {_shown(symbol)}"
        expect(good, said)
    _is_a(list, merges, f"{what}, merges")
    for i, pair in enumerate(merges):
        good = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(side, bytes) for side in pair)
        expect(good, f"{what}: expected a tuple of two bytes objects as merge {i}, got {_shown(pair)}")
    return vocab, merges


def _same_merges(got, want: list, what: str) -> None:
    """Break the promise unless train_bpe learned these merges, in this order."""
    _, merges = _trained(got, what)
    want_n = f"{len(want)} merge{'s' * (len(want) != 1)}"
    for i, (g, w) in enumerate(zip(merges, want, strict=False)):
        after = f", after {_shown(want[max(0, i - 3) : i])}" if i else ""
        expect(g == w, f"{what}: expected {_shown(w)} as merge {i}{after}, got {_shown(g)}")
    if len(merges) > len(want):
        raise Broken(
            f"{what}: expected no more than {want_n}, got {len(merges)}; {_shown(merges[len(want)])} is too many"
        )
    if len(merges) < len(want):
        raise Broken(f"{what}: expected {want_n}, got {len(merges)}; {_shown(want[len(merges)])} is the next one")


def _same_vocab(got, want: dict, what: str) -> None:
    """Break the promise unless train_bpe returned this vocabulary."""
    vocab, _ = _trained(got, what)
    for i, symbol in want.items():
        expect(i in vocab, f"{what}, vocab: expected id {i} for {_shown(symbol)}, but there is no id {i}")
        expect(vocab[i] == symbol, f"{what}, vocab: expected {_shown(symbol)} for id {i}, got {_shown(vocab[i])}")
    extra = sorted(vocab.keys() - want.keys())
    expect(not extra, f"{what}, vocab: expected {len(want)} ids, got {len(vocab)}, among them {extra[:3]}")


def _same_ids(got, want: list[int], what: str, symbols: dict | None = None) -> None:
    """Break the promise unless these are the ids that are wanted. `symbols` says what an id stands for."""
    _is_a(list, got, what)
    _all_are(int, got, what)
    if got == want:
        return

    def at(ids: list, i: int) -> str:
        if i == len(ids):
            return "the end"
        return f"{ids[i]} for {_shown(symbols[ids[i]])}" if symbols and ids[i] in symbols else str(ids[i])

    i = next(i for i in range(len(want) + 1) if got[: i + 1] != want[: i + 1])
    whole = f"expected {_shown(want)}, got {_shown(got)}; " if max(len(got), len(want)) <= 12 else ""
    raise Broken(f"{what}: {whole}first at index {i}: expected {at(want, i)}, got {at(got, i)}")


def _same_text(got, want: str, what: str) -> None:
    """Break the promise unless this is the text that is wanted."""
    _is_a(str, got, what)
    expect(got == want, f"{what}: expected {_shown(want)}, got {_shown(got)}")


def _unchanged(now, before, what: str) -> None:
    expect(now == before, f"{what} was changed: the caller still needs it as it was")


def _pick(generator: torch.Generator, items, n: int) -> list:
    """n of the items, drawn with repetition."""
    return [items[i] for i in torch.randint(len(items), (n,), generator=generator).tolist()]


# Plain versions to compare with --------------------------------------------------------------------------------------

# GPT-2's pattern as it was published.
_PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _cut(text: str, specials=()) -> list[tuple[str, bool]]:
    """Pre-tokens and special tokens of a text in order, each with whether it is a special token."""
    parts, plain, at = [], "", 0

    def close():
        parts.extend((pre_token, False) for pre_token in _PATTERN.findall(plain))

    while at < len(text):
        here = max((s for s in specials if text.startswith(s, at)), key=len, default="")
        if here:
            close()
            parts.append((here, True))
        plain = "" if here else plain + text[at]
        at += len(here) or 1
    close()
    return parts


def _joined(word, pair) -> list[bytes]:
    """A word in which one place after another has been joined."""
    word = list(word)
    for i in range(len(word)):
        if tuple(word[i : i + 2]) == pair:
            word[i : i + 2] = [pair[0] + pair[1]]
    return word


def _as_bytes(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def _plain_merges(text: str, n_merges: int, specials=()) -> list[tuple[bytes, bytes]]:
    """The merges that training must find: everything is counted anew at each step."""
    words = [_as_bytes(part) for part, special in _cut(text, specials) if not special]
    merges: list[tuple[bytes, bytes]] = []
    while len(merges) < n_merges:
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        words = [_joined(word, merges[-1]) for word in words]
    return merges


def _plain_ids(text: str, vocab: dict, merges: list, specials=()) -> list[int]:
    """The ids that encoding must give: one merge of the lowest rank at a time, the leftmost first."""
    ids = {symbol: i for i, symbol in vocab.items()}
    for special in specials:
        ids.setdefault(special.encode(), max(ids.values()) + 1)
    out = []
    for part, special in _cut(text, specials):
        word = [part.encode()] if special else _as_bytes(part)
        while True:
            places = [(merges.index(pair), i) for i, pair in enumerate(pairwise(word)) if pair in merges]
            if not places:
                break
            _, i = min(places)
            word[i : i + 2] = [word[i] + word[i + 1]]
        out += [ids[symbol] for symbol in word]
    return out


# pair_counts ---------------------------------------------------------------------------------------------------------

_A, _B, _C = b"a", b"b", b"c"
_HUGS = {(b"h", b"u", b"g"): 10, (b"h", b"u"): 1}


def probe_pair_counts(pair_counts):
    """Results that tell the known mistakes apart."""
    words = [
        _HUGS,
        {(_A, _A, _A): 1},
        {(_A, _B, _A, _B, _A): 2},
        {(_B, _A): 3, (_A, _B, _C): 5},
        {(_A, b"bc"): 1, (b"ab", _C): 1},
        {(_A,): 4},
    ]
    return [outcome(lambda w=w: dict(pair_counts(dict(w)))) for w in words]


def test_pairs_of_two_words(pair_counts):
    """With hug 10 times and hu once, (h, u) occurs 11 times and (u, g) 10 times."""
    _same_counts(pair_counts(dict(_HUGS)), {(b"h", b"u"): 11, (b"u", b"g"): 10}, "pair_counts of hug, hug ... hu")


def test_every_place_counts(pair_counts):
    """In aaa the pair (a, a) occurs twice, in aaaaa four times; in abab the pair (a, b) occurs twice."""
    _same_counts(pair_counts({(_A, _A, _A): 1}), {(_A, _A): 2}, "pair_counts of aaa")
    _same_counts(pair_counts({(_A,) * 5: 3}), {(_A, _A): 12}, "pair_counts of aaaaa, 3 times")
    _same_counts(pair_counts({(_A, _B, _A, _B): 1}), {(_A, _B): 2, (_B, _A): 1}, "pair_counts of abab")


def test_a_pair_has_an_order(pair_counts):
    """(a, b) is the left and the right one: in ab, 3 times, and ba, twice, they are two pairs."""
    want = {(_A, _B): 3, (_B, _A): 2}
    _same_counts(pair_counts({(_A, _B): 3, (_B, _A): 2}), want, "pair_counts of ab and ba")
    _same_counts(pair_counts({(_B, _A): 1}), {(_B, _A): 1}, "pair_counts of ba")


def test_symbols_may_be_longer(pair_counts):
    """Symbols of several bytes are one: (a, bc) and (ab, c) are two pairs."""
    words = {(_A, b"bc"): 2, (b"ab", _C): 5, (b"abc", _A, b"bc"): 1}
    want = {(_A, b"bc"): 3, (b"ab", _C): 5, (b"abc", _A): 1}
    _same_counts(pair_counts(words), want, "pair_counts of a-bc, ab-c and abc-a-bc")


def test_words_stand_alone(pair_counts):
    """No pair reaches from one word into the next, or from a word's end to its beginning."""
    _same_counts(pair_counts({(_A, _B): 1, (_C, _A): 1}), {(_A, _B): 1, (_C, _A): 1}, "pair_counts of ab and ca")
    _same_counts(pair_counts({(_A,): 7, (_B,): 2}), {}, "pair_counts of a and b")
    _same_counts(pair_counts({}), {}, "pair_counts of no words")


def test_counts_of_many_words(pair_counts):
    """For 40 words every pair has its count, and the table of words is not changed."""
    generator = rng()
    symbols = [_A, _A, _A, _B, b"ab", b" ", b"\xc3", b"\x00"]
    words = {}
    for times in torch.randint(1, 10_000, (40,), generator=generator).tolist():
        words[tuple(_pick(generator, symbols, len(words) % 7 + 1))] = times
    want = {}
    for word, times in words.items():
        for i in range(1, len(word)):
            want[word[i - 1], word[i]] = want.get((word[i - 1], word[i]), 0) + times
    given = dict(words)
    _same_counts(pair_counts(given), want, "pair_counts of random words")
    _unchanged(given, words, "the table of words that pair_counts was given")
    _same_counts(pair_counts(given), want, "pair_counts of the same words again")


# merge_pair ----------------------------------------------------------------------------------------------------------


def probe_merge_pair(merge_pair):
    """Results that tell the known mistakes apart."""
    questions = [
        ((b"h", b"u", b"g", b"s"), (b"u", b"g")),
        ((b"h", b"u", b"g"), (b"u", b"g")),
        ((_A, _A, _A), (_A, _A)),
        ((_A,) * 7, (_A, _A)),
        ((_A, _B, _C, _A, _B), (_A, _B)),
        ((_B, _A, _C), (_A, _B)),
        ((_A, b"bc", _A), (b"ab", _C)),
        ((_A, _C, _B), (_A, _B)),
        ((_A,), (_A, _A)),
    ]
    return [outcome(lambda q=q: merge_pair(*q)) for q in questions]


def _merges_to(merge_pair, word: tuple, pair: tuple, want: tuple) -> None:
    _same_word(merge_pair(word, pair), want, f"merge_pair({_shown(word)}, {_shown(pair)})")


def test_two_symbols_become_one(merge_pair):
    """In h, u, g, s the pair (u, g) becomes one symbol: h, ug, s."""
    _merges_to(merge_pair, (b"h", b"u", b"g", b"s"), (b"u", b"g"), (b"h", b"ug", b"s"))


def test_merged_at_either_end(merge_pair):
    """A pair is joined at the beginning of a word, at its end, and where it is the whole word."""
    _merges_to(merge_pair, (b"u", b"g", b"s"), (b"u", b"g"), (b"ug", b"s"))
    _merges_to(merge_pair, (b"h", b"u", b"g"), (b"u", b"g"), (b"h", b"ug"))
    _merges_to(merge_pair, (b"h", b"ug"), (b"h", b"ug"), (b"hug",))


def test_merged_wherever_it_stands(merge_pair):
    """Every place is joined: abcab with (a, b) becomes ab, c, ab."""
    _merges_to(merge_pair, (_A, _B, _C, _A, _B), (_A, _B), (b"ab", _C, b"ab"))
    _merges_to(merge_pair, (_A, _B, _A, _B, _A, _B), (_A, _B), (b"ab", b"ab", b"ab"))


def test_runs_are_merged_from_the_left(merge_pair):
    """In aaa the pair (a, a) is joined once, from the left: aa, a. Five a become aa, aa, a."""
    for n in (2, 3, 4, 5):
        _merges_to(merge_pair, (_A,) * n, (_A, _A), (b"aa",) * (n // 2) + (_A,) * (n % 2))
    _merges_to(merge_pair, (_B, _A, _A, _A, _B), (_A, _A), (_B, b"aa", _A, _B))


def test_only_this_pair_is_merged(merge_pair):
    """Nothing else is joined: not (b, a), not a and b apart, not a-bc for (ab, c); one symbol stays as it is."""
    for word in ((_B, _A), (_A, _C, _B), (_A,), (_B,), (_A, _A), (_B, _B), (b"ab",), (_A, b"bb"), (b"aa", _B)):
        _merges_to(merge_pair, word, (_A, _B), word)
    _merges_to(merge_pair, (_A, b"bc"), (b"ab", _C), (_A, b"bc"))
    _merges_to(merge_pair, (b"ab", _A, _B), (_A, _B), (b"ab", b"ab"))


def test_any_bytes_may_be_merged(merge_pair):
    """Spaces, commas, zero bytes and bytes that are no text are symbols like all others."""
    for left, right in ((b" ", _A), (_A, b" "), (b" ", b" "), (b"\x00", b","), (b"\xe4", b"\xb8"), (b"|", b"'")):
        _merges_to(merge_pair, (_C, left, right, _C), (left, right), (_C, left + right, _C))
    _merges_to(merge_pair, (b" ", b" a", _A), (b" ", _A), (b" ", b" a", _A))


def test_random_words_are_merged(merge_pair):
    """In random words of a, b and ab the result is the one that joining place by place gives."""
    generator = rng()
    for n in (1, 2, 7, 19, 31, 61):
        word = tuple(_pick(generator, [_A, _A, _A, _B, b"ab"], n))
        for pair in ((_A, _A), (_A, _B), (_B, _A), (b"ab", b"ab"), (_A, b"ab"), (b"ab", _B)):
            _same_word(merge_pair(word, pair), tuple(_joined(word, pair)), f"{_shown(pair)} merged in {_shown(word)}")


# train_bpe -----------------------------------------------------------------------------------------------------------

# A line break is a pre-token of its own, of one byte: it makes no pair. So these are words and nothing else.
_CATS = "cat\n" * 5 + "cart\n" * 4 + "art\n" * 2 + "at\n" * 3
_CAT_MERGES = [(b"c", b"a"), (b"r", b"t"), (b"ca", b"t"), (b"ca", b"rt"), (b"a", b"t"), (b"a", b"rt")]
_BYTES = {i: bytes([i]) for i in range(256)}
_CUTS = [
    "a b a b",
    "a1a1a1",
    "we'll we'll it's it's don't I'd I'm they've you're",
    "IT'S IT'S 'tis 's",
    "x!y!x!y!",
    "a  b   c",
    "a \n b\n\nc\t\td  ",
    "é!é! 中文。中文。 1½1½ e\u0301e\u0301",
    "a_b a_b a-b (a) ...",
    "  two  \u00a0\u00a0spaces \r\n\r\n",
    "a\u3000b 1234567",
]


def _ranked(*symbols: bytes) -> dict:
    """The 256 bytes, then these symbols."""
    return dict(enumerate([*_BYTES.values(), *symbols]))


def probe_train_bpe(train_bpe):
    """Results that tell the known mistakes apart."""

    def ask(text, *rest, of=1):
        """The merges (of=1) or the vocabulary (of=0)."""
        return outcome(lambda: train_bpe(text, *rest)[of])

    return [
        ask(_CATS, 258),
        ask(_CATS, 999),
        ask("aaaa\nbc\nbc", 257),
        ask("aaaaaa\nbc\nbc\nbc\nde\nde", 258),
        ask("ab\ncd\nba", 257),
        ask("aba\nzx\naba\nzx\nab", 258),
        ask("aba\naz\naba\naz\nab", 258),
        ask("cd b", 257),
        ask("de de de", 258),
        ask("x!x!", 257),
        ask("a1a1", 257),
        ask("ab, ab, ab", 300),
        ask("aaaa abab abab aabb bbaa", 264),
        ask("é", 300),
        ask("a<|x|>b<|x|>a<|x|>b", 300, ["<|x|>"]),
        ask("ab<|x|>ab", 300, ["<|x|>"], of=0),
        ask("abc abc", 260, ["<x>", "<y>"], of=0),
        ask("abcde abcde", 260, ["<x>", "<y>"]),
        ask("", 300),
        ask("ab", 256, ["<x>"]),
        ask("ab", 100),
        ask("ab", 257, of=0),
    ]


def _merges_whole_words(got, text: str, specials, what: str) -> None:
    """Break the promise unless all merges stay inside pre-tokens, and make a symbol of each. Any order will do."""
    _, merges = _trained(got, what)
    words = list(dict.fromkeys(part.encode() for part, special in _cut(text, specials) if not special))
    made = [left + right for left, right in merges]
    for symbol in made:
        expect(any(symbol in word for word in words), f"{what}: {_shown(symbol)} is not inside one of {_shown(words)}")
    for word in words:
        expect(len(word) == 1 or word in made, f"{what}: expected {_shown(word)} to become one symbol, it never did")


def test_merges_worked_by_hand(train_bpe):
    """cat 5 times, cart 4, art 2, at 3: (c, a) occurs 9 times and is first, then (r, t) 6, (ca, t) 5, (ca, rt) 4."""
    for n in (1, 2, 3, 4):
        _same_merges(train_bpe(_CATS, 256 + n), _CAT_MERGES[:n], f"train_bpe of cat, cart, art, at to {256 + n} ids")
    got = train_bpe("ab\n" * 300 + "cd\n" * 299, 257)
    _same_merges(got, [(b"a", b"b")], "train_bpe of ab 300 times, cd 299 times")


def test_bytes_then_merges_then_specials(train_bpe):
    """Ids 0 to 255 are the bytes, then come the merges in order, then the special tokens in the order given."""
    _same_vocab(train_bpe(_CATS, 258), _ranked(b"ca", b"rt"), "train_bpe of cat, cart, art, at to 258 ids")
    want = _ranked(b"ca", b"rt", b"<pad>", b"<end>")
    for specials in (["<pad>", "<end>"], ("<pad>", "<end>")):
        got = train_bpe(_CATS, vocab_size=260, special_tokens=specials)
        _same_merges(got, _CAT_MERGES[:2], "train_bpe to 260 ids, two of them special tokens")
        _same_vocab(got, want, "train_bpe to 260 ids, two of them special tokens")
    _same_vocab(train_bpe("ab", 257, ["中"]), _ranked("中".encode()), "train_bpe to 257 ids, one a special token")


def test_vocab_size_must_hold_bytes_and_specials(train_bpe):
    """256 ids leave no room for a merge; 255, or 257 with two special tokens, are a ValueError."""
    _same_merges(train_bpe("abab", 256), [], "train_bpe to 256 ids")
    _same_vocab(train_bpe("abab", 258, ["<a>", "<b>"]), _ranked(b"<a>", b"<b>"), "train_bpe to 258 ids, two special")
    raises(ValueError, lambda: train_bpe("abab", 255), "train_bpe to 255 ids")
    raises(ValueError, lambda: train_bpe("abab", 1), "train_bpe to one id")
    raises(ValueError, lambda: train_bpe("abab", 257, ["<a>", "<b>"]), "train_bpe to 257 ids, two of them special")
    raises(ValueError, lambda: train_bpe("", 256, ["<a>"]), "train_bpe of no text to 256 ids, one of them special")


def test_stops_when_no_pair_is_left(train_bpe):
    """With room to spare, training goes on down to pairs that occur once, and ends when every word is one symbol."""
    _same_merges(train_bpe(_CATS, 999), _CAT_MERGES, "train_bpe of cat, cart, art, at to 999 ids")
    got = train_bpe("ab", 300, ["<x>"])
    _same_merges(got, [(b"a", b"b")], "train_bpe of ab to 300 ids")
    _same_vocab(got, _ranked(b"ab", b"<x>"), "train_bpe of ab to 300 ids, one of them special")
    for text in ("", "a", "a\nb\nc"):
        _same_vocab(train_bpe(text, 300, ["<x>"]), _ranked(b"<x>"), f"train_bpe of {text!r}")


def test_of_equals_the_greater_pair(train_bpe):
    """Of pairs that occur equally often the greater one is merged: compare bytes, the left first, then the right."""
    for text, want in [
        ("ab\ncd\nba", [(b"c", b"d"), (b"b", b"a"), (b"a", b"b")]),
        ("ab\nac", [(b"a", b"c"), (b"a", b"b")]),
        ("aba\naz\naba\naz\nab", [(b"a", b"b"), (b"ab", b"a"), (b"a", b"z")]),
        ("aba\nzx\naba\nzx\nab", [(b"a", b"b"), (b"z", b"x"), (b"ab", b"a")]),
        ("cd b", [(b"c", b"d"), (b" ", b"b")]),
        ("zz\né", [(b"\xc3", b"\xa9"), (b"z", b"z")]),
        ("\n\n\n\t", [(b"\n", b"\n"), (b"\n\n", b"\n"), (b"\n\n\n", b"\t")]),
        ("é\nĀ", [(b"\xc4", b"\x80"), (b"\xc3", b"\xa9")]),
        ("Ā\né", [(b"\xc4", b"\x80"), (b"\xc3", b"\xa9")]),
    ]:
        _same_merges(train_bpe(text, 256 + len(want)), want, f"train_bpe of {text!r}")


def test_overlapping_places_count(train_bpe):
    """In aaa the pair (a, a) occurs twice; so in aaaa and bc, bc it beats (b, c), 3 to 2."""
    _same_merges(train_bpe("aaa\nbc\nbc\naa", 257), [(b"a", b"a")], "train_bpe of aaa, bc, bc, aa")
    _same_merges(train_bpe("aaaa\nbc\nbc", 258), [(b"a", b"a"), (b"b", b"c")], "train_bpe of aaaa, bc, bc")


def test_merges_stay_inside_pre_tokens(train_bpe):
    """Text is cut by GPT-2's pattern first: a space belongs to the word behind it, and no merge crosses a cut."""
    _same_merges(train_bpe("a b b", 999), [(b" ", b"b")], "train_bpe of 'a b b'")
    _same_merges(train_bpe("a1a1a1", 999), [], "train_bpe of 'a1a1a1'")
    for text in _CUTS:
        _merges_whole_words(train_bpe(text, 999), text, [], f"train_bpe of {text!r} to 999 ids")


def test_text_is_bytes(train_bpe):
    """A character beyond ASCII starts as several bytes: é is C3 A9, 中 is E4 B8 AD."""
    _same_merges(train_bpe("é", 999), [(b"\xc3", b"\xa9")], "train_bpe of 'é'")
    _same_merges(train_bpe("中\n丮", 257), [(b"\xe4", b"\xb8")], "train_bpe of E4 B8 AD and E4 B8 AE")


def test_specials_take_no_part(train_bpe):
    """A special token is cut out first: nothing of it is counted, and nothing merges across it."""
    got = train_bpe("ab<|end|>ab<|end|>xy", 300, ["<|end|>"])
    _same_merges(got, [(b"a", b"b"), (b"x", b"y")], "train_bpe of 'ab<|end|>ab<|end|>xy', <|end|> special")
    got = train_bpe("a<|end|>b<|end|>a", 300, ["<|end|>"])
    _same_merges(got, [], "train_bpe of 'a<|end|>b<|end|>a', <|end|> special")
    for text, specials in [
        ("<s>de de<s><s>de<t> de<t>", ["<s>", "<t>"]),
        ("<e>abc <e>abc <e>xabc", ["<e>", "<e>xabc"]),
        ("a.b a+b (a) [ab] ab", ["a.b", "a+b", "(a)"]),
        ("de de<s> de", []),
        ("no special token here here", ["<s>"]),
        (" a <s> a <s>a", ["<s>"]),
    ]:
        given = list(specials)
        what = f"train_bpe of {text!r} to 999 ids with special tokens {specials}"
        _merges_whole_words(train_bpe(text, 999, given), text, specials, what)
        _unchanged(given, specials, "the list of special tokens that train_bpe was given")


def test_counts_follow_every_merge(train_bpe):
    """Every merge is the one that counting anew after each merge gives: in a text of runs, then in random texts."""
    text = "aaaaa aaaa aaa abab babab abaab aab aab"
    _same_merges(train_bpe(text, 296), _plain_merges(text, 40), f"train_bpe of {text!r}")
    generator = rng()
    for letters, n_letters, n_merges in (
        ("ab", 60, 20),
        ("aab ", 150, 40),
        ("abc  ", 150, 40),
        ("aé中\n ", 80, 40),
        ("a1'st!  \n\t", 120, 60),
    ):
        text = "".join(_pick(generator, letters, n_letters))
        want = _plain_merges(text, n_merges)
        _same_merges(train_bpe(text, 256 + n_merges), want, f"train_bpe of {text!r}")


# Tokenizer -----------------------------------------------------------------------------------------------------------

_SHUFFLED = {(i * 7 + 3) % 256: bytes([i]) for i in range(256)}  # byte 0 has id 3, byte 1 has id 10 ...
_TEXTS = [
    "",
    "hello, world",
    "你好，世界。",
    "👩‍👩‍👧 🇩🇪 👍🏽",
    "e\u0301 is é; n\u0303; \u200d\u200b\ufeff",
    "\ttabs\tand\n\nlines\r\n",
    "zero \x00 byte \x7f\x80\x1b",
    "     ",
    " ",
    "\n",
    "  two  spaces  ",
    "it's we'll 'tis I'M",
    "x = [a_1, 2.5e-3]  # ½ of ⅷ",
    "\u2028\u00a0\u3000 blanks \ufffd",
    "<|end|> <end> <",
]


def _tokenizer(Tokenizer, merges: list, specials=(), symbols: tuple | None = None):
    """A tokenizer whose vocabulary is the 256 bytes, then these symbols, by default those that the merges make."""
    symbols = tuple(dict.fromkeys(a + b for a, b in merges)) if symbols is None else symbols
    vocab = _ranked(*symbols)
    return Tokenizer(dict(vocab), list(merges), specials), vocab


def _encodes(Tokenizer, text: str, merges: list, want: list, specials=(), symbols: tuple | None = None) -> None:
    """Break the promise unless the text is encoded as these symbols."""
    tokenizer, vocab = _tokenizer(Tokenizer, merges, specials, symbols)
    full = vocab | {len(vocab) + i: special.encode() for i, special in enumerate(specials)}
    ids = {symbol: i for i, symbol in full.items()}
    ranked = f" and merges {_shown(merges)}" if merges else ""
    special = f" and special tokens {list(specials)}" if specials else ""
    got = tokenizer.encode(text)
    _same_ids(got, [ids[symbol] for symbol in want], f"encode({text!r}) with 256 bytes{ranked}{special}", full)


def probe_Tokenizer(Tokenizer):
    """Results that tell the known mistakes apart."""
    ab, bc, aa = (_A, _B), (_B, _C), (_A, _A)

    def ask(*questions, vocab=None, merges=(), specials=()):
        """Put several questions to one tokenizer."""
        vocab = _ranked(*(a + b for a, b in merges)) if vocab is None else vocab
        made = outcome(lambda: Tokenizer(dict(vocab), list(merges), specials))
        if is_exception(made):
            return [made for _ in questions]
        return [outcome(lambda question=question: question(made)) for question in questions]

    def encode(text):
        return lambda t: t.encode(text)

    def decode(*ids):
        return lambda t: t.decode(list(ids))

    def twice(special):
        """Two tokenizers made from one vocabulary."""
        vocab = _ranked()
        Tokenizer(vocab, [ab], ["<x>"])
        return Tokenizer(vocab, [], [special]).encode(special)

    def side_by_side():
        one, other = Tokenizer(_ranked(b"ab"), [ab]), Tokenizer(_ranked(), [])
        return [one.encode("ab"), other.encode("ab"), one.encode("ab")]

    return [
        *ask(encode("hé"), decode(4, 5), vocab={1: b"h", 4: b"\xc3", 5: b"\xa9"}),
        *ask(encode("abc"), encode("abcbc"), merges=[bc, ab]),
        *ask(encode("abcde"), merges=[(b"d", b"e"), ab, (_C, b"d"), bc]),
        *ask(encode("abc"), merges=[bc, (b"ab", _C)]),
        *ask(encode("abc"), vocab=_ranked(b"ab", b"abc", b"bc"), merges=[bc, ab]),
        *ask(encode("ab"), encode("abc"), vocab=_ranked(b"ab", b"abc"), merges=[bc]),
        *ask(encode("bcab"), encode("abc"), vocab=_ranked(b"bc", b"ab"), merges=[ab, bc]),
        *ask(encode("abc"), encode("abcde"), merges=[(b"ab", _C), ab, (b"d", b"e")]),
        *ask(encode("aaa"), encode("aaaaaaa"), merges=[aa, (b"aa", b"aa")]),
        *ask(encode("b ab a"), encode("ab ab"), encode("a\tb"), merges=[(_B, b" "), (b" ", _A)]),
        *ask(encode("a!a1"), merges=[(_A, b"!"), (_A, b"1")]),
        *ask(
            encode("a<|x|>b<|x|><|x|>"),
            encode("<|x|>yz"),
            encode("a|b"),
            decode(97, 256, 97),
            merges=[],
            specials=["<|x|>", "<|x|>y"],
        ),
        *ask(encode("<e>x<e>"), specials=["<e>x", "<e>"]),
        *ask(encode("<y>a<x>"), decode(301), decode(302), vocab=_BYTES | {300: b"hi"}, specials=["<y>", "<x>"]),
        *ask(encode("<x>"), decode(9, 11), decode(12), vocab={9: b"<x>", 11: _A}, specials=["<x>"]),
        *ask(encode("ab"), vocab={5: _A, 2: _A, 7: _B, 8: _B}),
        *ask(encode("abcde"), encode("ab"), vocab=_ranked(b"abc", b"de"), merges=[ab, (b"ab", _C), (b"d", b"e")]),
        *ask(encode("c"), decode(5), decode(-1), vocab={0: _A, 1: _B}),
        *ask(decode(104, 255, 105), decode(228, 184, 173), decode(), lambda t: t.decode(torch.tensor([104, 105]))),
        *ask(encode(""), encode("a  b\n")),
        outcome(lambda: twice("<y>")),
        outcome(side_by_side),
    ]


def test_bytes_have_the_ids_of_the_vocabulary(Tokenizer):
    """Without merges each byte of the text gives its id in `vocab`: é is two bytes, C3 and A9."""
    small = {1: b"h", 0: b"i", 7: b"\xc3", 5: b"\xa9"}
    _same_ids(Tokenizer(small, []).encode("hié"), [1, 0, 7, 5], f"encode('hié') with vocab {small}", small)
    for text in ("", "Abc", "a b\n", "中"):
        want = [(byte * 7 + 3) % 256 for byte in text.encode()]
        _same_ids(Tokenizer(dict(_SHUFFLED), []).encode(text), want, f"encode({text!r}), id = (7 * byte + 3) % 256")


def test_the_lowest_rank_is_merged_first(Tokenizer):
    """In abc with merges (b, c), (a, b) the first one ranks lower, so abc is a, bc and not ab, c."""
    ab, bc = (_A, _B), (_B, _C)
    _encodes(Tokenizer, "abc", [bc, ab], [_A, b"bc"])
    _encodes(Tokenizer, "abc", [ab, bc], [b"ab", _C])
    _encodes(Tokenizer, "abcabab", [bc, ab], [_A, b"bc", b"ab", b"ab"])
    cd, abcd = (_C, b"d"), (b"ab", b"cd")
    _encodes(Tokenizer, "abcd", [cd, bc, ab, abcd], [b"abcd"])
    _encodes(Tokenizer, "abcd", [bc, ab, cd, abcd], [_A, b"bc", b"d"])


def test_merges_decide_not_the_vocabulary(Tokenizer):
    """Only pairs in `merges` are merged, whatever is in `vocab`: (ab, c) does not merge a and bc. Ids are no ranks."""
    ab, bc = (_A, _B), (_B, _C)
    _encodes(Tokenizer, "abc ab", [bc], [_A, b"bc", b" ", _A, _B], symbols=(b"ab", b"abc", b"bc", b" ab"))
    _encodes(Tokenizer, "abc", [bc, ab], [_A, b"bc"], symbols=(b"ab", b"bc"))
    _encodes(Tokenizer, "abc", [ab, bc], [b"ab", _C], symbols=(b"bc", b"ab"))
    _encodes(Tokenizer, "abab", [ab], [b"ab", b"ab"], symbols=(b"abab", b"aba", b"ab"))
    _encodes(Tokenizer, "abc", [bc, (b"ab", _C), ab], [_A, b"bc"])


def test_after_a_merge_the_lowest_rank_again(Tokenizer):
    """After each merge all ranks are looked at again: with (ab, c) before (a, b), abc is still one symbol."""
    _encodes(Tokenizer, "abc", [(b"ab", _C), (_A, _B)], [b"abc"])
    merges = [(b"ab", _C), (_B, b"d"), (_A, _B)]
    _encodes(Tokenizer, "abcabd", merges, [b"abc", _A, b"bd"])


def test_a_run_is_merged_from_the_left(Tokenizer):
    """With the merges (a, a), (aa, aa) three a are aa, a and seven are aaaa, aa, a."""
    merges = [(_A, _A), (b"aa", b"aa")]
    for n, want in ((1, [1]), (2, [2]), (3, [2, 1]), (4, [4]), (5, [4, 1]), (7, [4, 2, 1]), (8, [4, 4])):
        _encodes(Tokenizer, "a" * n, merges, [_A * size for size in want])
    _encodes(Tokenizer, "baaab", [(_A, _A), (_A, _B)], [_B, b"aa", b"ab"])


def test_encode_cuts_by_the_pattern_first(Tokenizer):
    """Merges stay inside GPT-2's pre-tokens: in "b a" the merge (b, space) has no place, (space, a) has."""
    _encodes(Tokenizer, "b a", [(_B, b" "), (b" ", _A)], [_B, b" a"])
    _encodes(Tokenizer, "a1 a!", [(_A, b"1"), (_A, b"!"), (b" ", _A)], [_A, b"1", b" a", b"!"])
    for text in _CUTS:
        symbols = _as_bytes(text)
        forward = list(dict.fromkeys(pairwise(symbols)))
        for merges in (forward, forward[::-1]):
            vocab = _ranked(*(a + b for a, b in merges))
            want = _plain_ids(text, vocab, merges)
            got = Tokenizer(vocab, merges).encode(text)
            _same_ids(got, want, f"encode({text!r}) with a merge for every two neighbours", vocab)


def test_a_special_token_is_one_id(Tokenizer):
    """A special token is one id and merges with nothing. Where <e> and <e>x both begin, the longest wins."""
    ab, end = (_A, _B), "<|end|>"
    _encodes(Tokenizer, "ab<|end|>ab", [ab], [b"ab", end.encode(), b"ab"], [end])
    _encodes(Tokenizer, "<|end|><|end|>", [], [end.encode()] * 2, (end,))
    _encodes(Tokenizer, "a|b<end|", [], _as_bytes("a|b<end|"), [end])
    _encodes(Tokenizer, "a<|end|>b", [ab, (b">", _B), (_A, b"<")], [_A, end.encode(), _B], [end])
    for specials in (["<e>", "<e>x"], ["<e>x", "<e>"]):
        _encodes(Tokenizer, "<e>x<e>y", [], [b"<e>x", b"<e>", b"y"], specials)
    _encodes(Tokenizer, "a.b a+b aab", [(_A, _B)], [b"a.b", b" ", b"a+b", b" ", _A, b"ab"], ["a.b", "a+b"])
    _encodes(Tokenizer, "x <s> y", [(b" ", b"y")], [b"x", b" ", b"<s>", b" y"], ["<s>"])
    _encodes(Tokenizer, "你好[中 文]a", [], [*_as_bytes("你好"), "[中 文]".encode(), _A], ["[中 文]"])


def test_ids_of_special_tokens(Tokenizer):
    """A special token that `vocab` has keeps its id; others get max(vocab) + 1 onwards, in the order given."""
    vocab = _BYTES | {300: b"<old>", 290: b"hi"}
    tokenizer = Tokenizer(vocab=dict(vocab), merges=[(b"h", b"i")], special_tokens=["<y>", "<old>", "<x>"])
    what = "with ids 0 to 255, 300 for <old>, 290 for hi, and special tokens <y>, <old>, <x>"
    _same_ids(tokenizer.encode("<y><old><x>hi"), [301, 300, 302, 290], f"encode('<y><old><x>hi') {what}")
    _same_text(tokenizer.decode([301, 300, 302, 290]), "<y><old><x>hi", f"decode([301, 300, 302, 290]) {what}")


def test_the_first_of_equal_bytes(Tokenizer):
    """Where several ids stand for equal bytes, the one that comes first in `vocab` is used, and all are decoded."""
    vocab = {5: _A, 2: _A, 7: _B, 9: _B, 8: b"ab", 3: b"ab"}
    _same_ids(Tokenizer(dict(vocab), []).encode("ab"), [5, 7], f"encode('ab') with vocab {vocab}", vocab)
    tokenizer = Tokenizer(dict(vocab), [(_A, _B)])
    _same_ids(tokenizer.encode("aab"), [5, 8], f"encode('aab') with vocab {vocab} and merge (a, b)", vocab)
    _same_text(tokenizer.decode([2, 5, 9, 3]), "aabab", f"decode([2, 5, 9, 3]) with vocab {vocab}")


def test_a_symbol_without_an_id(Tokenizer):
    """A merged symbol that `vocab` lacks is given as its single bytes; it may still be merged further."""
    ab, abc = (_A, _B), (b"ab", _C)
    _encodes(Tokenizer, "ab abc", [ab, abc], [_A, _B, b" ", b"abc"], symbols=(b"abc",))
    _encodes(Tokenizer, "abcab", [ab, abc], [_A, _B, _C, b"ab"], symbols=(b"ab", b"bc"))


def test_what_has_no_id_is_an_error(Tokenizer):
    """With ids for a and b only, encoding c is a ValueError, and so is decoding 2 or -1."""
    vocab = {0: _A, 1: _B}
    tokenizer = Tokenizer(dict(vocab), [])
    _same_ids(tokenizer.encode("abba"), [0, 1, 1, 0], f"encode('abba') with vocab {vocab}", vocab)
    raises(ValueError, lambda: tokenizer.encode("abc"), f"encode('abc') with vocab {vocab}")
    raises(ValueError, lambda: tokenizer.encode("é"), f"encode('é') with vocab {vocab}")
    raises(ValueError, lambda: tokenizer.decode([0, 2]), f"decode([0, 2]) with vocab {vocab}")
    raises(ValueError, lambda: tokenizer.decode([-1]), f"decode([-1]) with vocab {vocab}")
    gap = Tokenizer(_BYTES | {300: b"hi"}, [])
    raises(ValueError, lambda: gap.decode([104, 299]), "decode([104, 299]) with ids 0 to 255 and 300")


def test_decode_joins_the_bytes_first(Tokenizer):
    """decode joins all bytes, then reads them as UTF-8: E4 B8 AD is 中. It takes a list or a tensor of ids."""
    tokenizer = Tokenizer(_ranked(b"\xb8\xad", b"hi"), [])
    for ids, want in (
        ([228, 184, 173], "中"),
        ([228, 256], "中"),
        ([257, 33], "hi!"),
        ([], ""),
        ([195, 169, 0], "é\0"),
    ):
        _same_text(tokenizer.decode(ids), want, f"decode({ids})")
        _same_text(tokenizer.decode(torch.tensor(ids, dtype=torch.int64)), want, f"decode of the tensor {ids}")


def test_invalid_bytes_are_replaced(Tokenizer):
    """Ids whose bytes are not UTF-8, as a model may write them, decode to U+FFFD, without an error."""
    tokenizer = Tokenizer(_ranked(b"\xffhi"), [])
    for ids, want in (([104, 255, 105], "h\ufffdi"), ([128], "\ufffd"), ([256, 128], "\ufffdhi\ufffd")):
        _same_text(tokenizer.decode(ids), want, f"decode({ids})")


def test_text_comes_back(Tokenizer):
    """decode(encode(text)) is the text: Chinese, emoji, combining marks, tabs, line breaks, zero bytes, only spaces."""
    merges = [(b" ", b" "), (b"\xe4", b"\xbd"), (b"\xf0", b"\x9f"), (b"l", b"l"), (b"\xcc", b"\x81"), (b"\r", b"\n")]
    vocab = dict(_SHUFFLED) | {256 + i: a + b for i, (a, b) in enumerate(merges)}
    for tokenizer in (Tokenizer(vocab, merges), Tokenizer(vocab, merges, ["<|end|>", "  "])):
        for text in _TEXTS:
            got = tokenizer.encode(text)
            _is_a(list, got, f"encode({text!r})")
            _same_text(tokenizer.decode(got), text, f"decode(encode({text!r}))")


def _random_merges(generator: torch.Generator, letters: str, n: int) -> list[tuple[bytes, bytes]]:
    """Merges such as training finds, but each chosen at random from the pairs in a random text."""
    words = [_as_bytes(part) for part, _ in _cut("".join(_pick(generator, letters, 200)))]
    merges: list[tuple[bytes, bytes]] = []
    while len(merges) < n:
        taken = {left + right for left, right in merges}
        pairs = {(a, b) for word in words for a, b in pairwise(word) if a + b not in taken}
        merges += _pick(generator, sorted(pairs), 1)
        words = [_joined(word, merges[-1]) for word in words]
    return merges


def test_random_merges(Tokenizer):
    """With random merges and shuffled ids the ids are those of merging one place at a time, a second time as well."""
    generator = rng()
    for letters, specials in (("aab", ()), ("ab1'  é", ("<s>",)), ("abab\n 中", ("ab", "aba"))):
        merges = _random_merges(generator, letters, 24)
        ids = torch.randperm(300, generator=generator).tolist()
        vocab = dict(zip(ids, [*_BYTES.values(), *(a + b for a, b in merges)], strict=False))
        tokenizer = Tokenizer(dict(vocab), list(merges), specials)
        for n in (1, 17, 53, 53):
            text = "".join(_pick(generator, [*letters, *letters, *specials], n))
            want = _plain_ids(text, vocab, merges, specials)
            what = f"encode({text!r}) with random merges and special tokens {list(specials)}"
            _same_ids(tokenizer.encode(text), want, what, vocab)
            _same_ids(tokenizer.encode(text), want, f"{what}, again", vocab)


def test_each_tokenizer_stands_alone(Tokenizer):
    """Two tokenizers share nothing, and what they were given, vocabulary, merges, special tokens, stays as it was."""
    vocab, merges, specials = _ranked(b"ab"), [(_A, _B)], ["<x>"]
    one, other = Tokenizer(vocab, merges, specials), Tokenizer(vocab, [], ["<y>"])
    for _ in range(2):
        _same_ids(one.encode("ab<x>"), [256, 257], "encode('ab<x>') with merge (a, b) and special token <x>")
        _same_ids(other.encode("ab<y>"), [97, 98, 257], "encode('ab<y>') without merges, special token <y>")
        _same_ids(other.encode("<x>"), [60, 120, 62], "encode('<x>') where <y> is the only special token")
    _same_text(one.decode([257]), "<x>", "decode([257]) of the one with <x>")
    _same_text(other.decode([257]), "<y>", "decode([257]) of the one with <y>")
    _unchanged(vocab, _ranked(b"ab"), "the vocabulary that a Tokenizer was given")
    _unchanged(merges, [(_A, _B)], "the list of merges that a Tokenizer was given")
    _unchanged(specials, ["<x>"], "the list of special tokens that a Tokenizer was given")


def test_published_vocabularies_are_read(Tokenizer):
    """from_gpt2 and from_llama2c make a working tokenizer from files in the formats of GPT-2 and llama2.c."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = {"h": 0, "i": 1, "Ġ": 2, "hi": 3, "Ġhi": 4, "<|endoftext|>": 5}
        (folder / "encoder.json").write_text(json.dumps(table), encoding="utf-8")
        (folder / "vocab.bpe").write_text("#version: 0.2\nh i\nĠ hi\n", encoding="utf-8")
        gpt2 = Tokenizer.from_gpt2(folder / "encoder.json", str(folder / "vocab.bpe"))
        _same_ids(gpt2.encode("hi hi<|endoftext|>i"), [3, 4, 5, 1], "encode of a tiny vocabulary in GPT-2's format")
        _same_text(gpt2.decode([3, 4, 5]), "hi hi<|endoftext|>", "decode of a tiny vocabulary in GPT-2's format")
        # Ids 0 to 2 are special, 3 to 258 the single bytes; then come pieces of text, each with a score.
        pieces = [(0.0, "<unk>"), (0.0, "\n<s>\n"), (0.0, "\n</s>\n")]
        pieces += [(0.0, f"<0x{byte:02X}>") for byte in range(256)]
        pieces += [(-9.0, "a"), (-9.0, "b"), (-9.0, " "), (-9.0, "中"), (-2.0, " ab"), (-1.0, "ab")]
        data = b"".join(struct.pack("<fi", score, len(text.encode())) + text.encode() for score, text in pieces)
        (folder / "tok.bin").write_bytes(struct.pack("<i", 7) + data)
        llama = Tokenizer.from_llama2c(folder / "tok.bin")
        what = "a tiny vocabulary in llama2.c's format"
        want = [263, 260, 259, 262, 3 + 0x0A]  # " ab", "b", "a", "中", and the line break as a byte
        _same_ids(llama.encode(" abba中\n"), want, f"encode of {what}")
        _same_ids(llama.encode("é</s>"), [3 + 0xC3, 3 + 0xA9, 2], f"encode of {what}")
        _same_text(llama.decode([263, 262, 198, 172, 2]), " ab中é</s>", f"decode of {what}")


# pad_batch -----------------------------------------------------------------------------------------------------------


def probe_pad_batch(pad_batch):
    """Results that tell the known mistakes apart."""
    batch = [[5, 6, 7], [8], [9, 4]]

    def padded_twice():
        given = [list(row) for row in batch]
        pad_batch(given, 0)
        return given

    questions = [
        lambda: pad_batch([list(row) for row in batch], 3),
        lambda: pad_batch([list(row) for row in batch], 6),
        lambda: pad_batch([list(row) for row in batch], 0, 5),
        lambda: pad_batch([list(row) for row in batch], 1, side="left"),
        lambda: pad_batch([list(row) for row in batch], 0, 5, "left"),
        lambda: pad_batch([list(row) for row in batch], 0, 2),
        lambda: pad_batch([list(row) for row in batch], 0, 2, "left"),
        lambda: pad_batch([list(row) for row in batch], 0, side="middle"),
        lambda: pad_batch([[1, 2]], 0, 0),
        padded_twice,
    ]
    return [outcome(question) for question in questions]


def _pads_to(pad_batch, want: list, where: list, *args, **kwargs) -> None:
    """Break the promise unless pad_batch gives these ids, and tokens where there is a 1."""
    said = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
    ids, is_token = _two(pad_batch(*args, **kwargs), f"pad_batch({said})")
    same(ids, torch.tensor(want, dtype=torch.int64), f"ids of pad_batch({said})")
    same(is_token, torch.tensor(where, dtype=torch.bool), f"is_token of pad_batch({said})")


def test_shorter_ones_are_filled(pad_batch):
    """[5, 6] and [7] with pad_id 0 become [[5, 6], [7, 0]], int64; is_token, bool, is False for the 0 alone."""
    _pads_to(pad_batch, [[5, 6], [7, 0]], [[1, 1], [1, 0]], [[5, 6], [7]], 0)
    _pads_to(pad_batch, [[5, 6], [8, 7]], [[1, 1], [0, 1]], sequences=[[5, 6], [7]], pad_id=8, side="left")


def test_a_token_may_equal_the_padding(pad_batch):
    """is_token follows the lengths, not the ids: a token whose id is pad_id is a token."""
    _pads_to(pad_batch, [[0, 0], [0, 0]], [[1, 1], [1, 0]], [[0, 0], [0]], 0)
    _pads_to(pad_batch, [[2, 9, 2], [2, 2, 2]], [[1, 1, 1], [1, 1, 0]], [[2, 9, 2], [2, 2]], 2)
    _pads_to(pad_batch, [[9, 9, 1], [9, 9, 9]], [[0, 1, 1], [1, 1, 1]], [[9, 1], [9, 9, 9]], 9, side="left")


def test_length_can_be_given(pad_batch):
    """With length=4 every row has four places, though the longest sequence has two tokens."""
    rows = [[5, 6], [7]]
    _pads_to(pad_batch, [[5, 6, 0, 0], [7, 0, 0, 0]], [[1, 1, 0, 0], [1, 0, 0, 0]], rows, 0, 4)
    _pads_to(pad_batch, [[5, 6], [7, 0]], [[1, 1], [1, 0]], rows, 0, length=2)
    _pads_to(pad_batch, [[0, 5, 6], [0, 0, 7]], [[0, 1, 1], [0, 0, 1]], rows, 0, 3, "left")
    _pads_to(pad_batch, [[3], [4]], [[1], [1]], [[3], [4]], 0)


def test_padding_on_the_left(pad_batch):
    """With side="left" tokens end in the last place, in their order, and is_token moves with them."""
    rows = [[1, 2], [3, 4, 5, 6], [7]]
    want = [[9, 9, 1, 2], [3, 4, 5, 6], [9, 9, 9, 7]]
    _pads_to(pad_batch, want, [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]], rows, 9, side="left")
    _pads_to(pad_batch, [[1, 2, 9, 9]], [[1, 1, 0, 0]], [[1, 2]], 9, 4, side="right")


def test_too_long_is_an_error(pad_batch):
    """Nothing is cut off: a sequence of 3 tokens and length=2, or length=0, is a ValueError."""
    rows = [[1, 2], [3, 4, 5]]
    _pads_to(pad_batch, [[1, 2, 0], [3, 4, 5]], [[1, 1, 0], [1, 1, 1]], rows, 0, 3)
    for side in ("right", "left"):
        for length in (2, 1, 0):
            call = f"pad_batch({rows}, 0, length={length}, side={side!r})"
            raises(ValueError, lambda length=length, side=side: pad_batch(rows, 0, length, side), call)


def test_there_are_two_sides(pad_batch):
    """Any side but "right" and "left" is a ValueError, also where nothing has to be filled."""
    _pads_to(pad_batch, [[1, 2]], [[1, 1]], [[1, 2]], 0, side="left")
    for rows in ([[1, 2], [3]], [[1, 2]]):
        for side in ("middle", ""):
            call = f"pad_batch({rows}, 0, side={side!r})"
            raises(ValueError, lambda rows=rows, side=side: pad_batch(rows, 0, side=side), call)


def test_empty_sequences_and_tuples(pad_batch):
    """A sequence of no tokens is a row of padding; sequences may be tuples; ids may be large, pad_id negative."""
    _pads_to(pad_batch, [[4, 5], [0, 0]], [[1, 1], [0, 0]], [[4, 5], []], 0)
    _pads_to(pad_batch, [[0, 0], [4, 5]], [[0, 0], [1, 1]], [[], [4, 5]], 0, side="left")
    _pads_to(pad_batch, [[7, 7, 7]], [[0, 0, 0]], [[]], 7, 3)
    _pads_to(pad_batch, [[4, 5], [6, 0]], [[1, 1], [1, 0]], ((4, 5), (6,)), 0)
    _pads_to(pad_batch, [[2**40 + 1, -100], [3, 2**24 + 1]], [[1, 0], [1, 1]], [[2**40 + 1], [3, 2**24 + 1]], -100)


def test_many_sequences_are_padded(pad_batch):
    """A random batch has every id in its place on either side, and its lists are not changed."""
    generator = rng()
    lengths = [3, 11, 1, 7, 0, 2]
    rows = [torch.randint(5, (n,), generator=generator).tolist() for n in lengths]
    given = [list(row) for row in rows]
    for length in (11, 13):
        right = [row + [2] * (length - len(row)) for row in rows]
        left = [[2] * (length - len(row)) + row for row in rows]
        marks = [[1] * n + [0] * (length - n) for n in lengths]
        _pads_to(pad_batch, right, marks, given, 2, length)
        _pads_to(pad_batch, left, [mark[::-1] for mark in marks], given, 2, length, "left")
        _unchanged(given, rows, "the list of sequences that pad_batch was given")
    _pads_to(pad_batch, [row + [2] * (11 - len(row)) for row in rows], [mark[:11] for mark in marks], given, 2)
    _unchanged(given, rows, "the list of sequences that pad_batch was given")
