"""Tokens: text to integers and back, by byte-level byte-pair encoding (BPE).

Text is cut into pre-tokens (words, more or less). Each is a row of bytes, and merges join neighbours in it. A merge
never crosses from one pre-token to the next.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import regex
import torch
from torch import Tensor

from tfmlib import vocabularies

# How GPT-2 cuts text: endings such as 's, words, numbers and other signs, each with the space before it, and blanks.
GPT2_PATTERN = regex.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)


def split_specials(text: str, special_tokens: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Cut text at the special tokens: its parts in order, each with whether it is a special token.

    Where several begin at the same place the longest wins. Raises ValueError for an empty special token.

    >>> list(split_specials("a<b>c", ["<b>"]))
    [('a', False), ('<b>', True), ('c', False)]
    """
    if "" in special_tokens:
        raise ValueError("a special token must have at least one character, got ''")
    if not special_tokens:
        yield from [(text, False)] if text else []
        return
    longest_first = "|".join(map(regex.escape, sorted(special_tokens, key=len, reverse=True)))
    for i, part in enumerate(regex.split(f"({longest_first})", text)):
        if part:
            yield part, i % 2 == 1


def pair_counts(words: dict[tuple[bytes, ...], int]) -> Counter:
    """How often each pair of neighbours occurs: {word: how often} -> {(left, right): how often}.

    A word is a tuple of symbols. Every place counts, so the pair (a, a) occurs twice in "aaa".

    >>> pair_counts({(b"h", b"u", b"g"): 10, (b"h", b"u"): 1})
    Counter({(b'h', b'u'): 11, (b'u', b'g'): 10})
    """
    counts = Counter()
    for word, times in words.items():
        for pair in itertools.pairwise(word):
            counts[pair] += times
    return counts


def merge_pair(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    """Join a pair of neighbours wherever it stands in a word, from left to right, without overlap.

    >>> merge_pair((b"a", b"a", b"a"), (b"a", b"a"))
    (b'aa', b'a')
    """
    merged, i = [], 0
    while i < len(word):
        if word[i : i + 2] == pair:
            merged.append(pair[0] + pair[1])
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return tuple(merged)


def train_bpe(
    text: str, vocab_size: int, special_tokens: Sequence[str] = ()
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Learn a vocabulary from text: returns (vocab {id: bytes}, merges in the order they were learned).

    Ids are the 256 bytes, then one for each merge, then the special tokens; `vocab_size` counts all three. Each step
    merges the pair that occurs most often, of equals the lexicographically greater one. Merges stay inside pre-tokens
    (GPT-2's pattern). Special tokens are neither split nor merged: they are cut out first, the longest where several
    fit. Stops early when no pair is left. Raises ValueError if `vocab_size` is too small. Sennrich et al. (2016); on
    bytes, Radford et al. (2019).

    >>> train_bpe("hug hug hugs", 258)[1]
    [(b'u', b'g'), (b'h', b'ug')]
    """
    room = vocab_size - 256 - len(special_tokens)
    if room < 0:
        raise ValueError(f"{vocab_size=} must hold 256 bytes and {len(special_tokens)} special tokens")
    parts = (part for part, special in split_specials(text, special_tokens) if not special)
    times = Counter(pre_token for part in parts for pre_token in GPT2_PATTERN.findall(part))
    words = [tuple(bytes([byte]) for byte in pre_token.encode()) for pre_token in times]
    times = list(times.values())
    counts, places = Counter(), defaultdict(set)  # of each pair: how often, and in which words

    def count(i: int, sign: int) -> None:
        for pair, n in pair_counts({words[i]: times[i]}).items():
            counts[pair] += sign * n
            places[pair].add(i)  # a word that has lost the pair may stay listed: merging it changes nothing
            if not counts[pair]:
                del counts[pair], places[pair]

    for i in range(len(words)):
        count(i, +1)
    merges = []
    while len(merges) < room and counts:
        most = max(counts.values())
        best = max(pair for pair, n in counts.items() if n == most)
        merges.append(best)
        for i in places.pop(best):
            count(i, -1)
            words[i] = merge_pair(words[i], best)
            count(i, +1)
    symbols = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    return dict(enumerate(symbols + [special.encode() for special in special_tokens])), merges


class Tokenizer:
    """Text to ids and back, by a vocabulary {id: bytes} and merges, the first ones ranking lowest.

    `encode` cuts text at the special tokens, the rest into pre-tokens (GPT-2's pattern), and in each pre-token applies
    the merge of the lowest rank again and again, starting from bytes. A special token has one id; where several begin
    at the same place, the longest wins. Special tokens that `vocab` lacks get the ids from max(vocab) + 1 onwards, in
    the order given.

    Where several ids stand for equal bytes, the first one in `vocab` is used. A symbol without an id is given as its
    single bytes. `decode` takes a list or a 1-D tensor, and never fails on invalid UTF-8: it puts U+FFFD in its place.
    Raises ValueError for a byte or an id which `vocab` lacks.

    >>> tokenizer = Tokenizer({**{i: bytes([i]) for i in range(256)}, 256: b"hi"}, [(b"h", b"i")], ["<end>"])
    >>> tokenizer.encode("hi!<end>")
    [256, 33, 257]
    """

    def __init__(self, vocab: dict[int, bytes], merges: list[tuple[bytes, bytes]], special_tokens: Sequence[str] = ()):
        self.vocab = dict(vocab)
        self.merges = list(merges)
        self.special_tokens = tuple(special_tokens)
        for special in self.special_tokens:
            if special.encode() not in self.vocab.values():
                self.vocab[max(self.vocab, default=-1) + 1] = special.encode()
        self.ids = {}
        for i, symbol in self.vocab.items():
            self.ids.setdefault(symbol, i)
        self.ranks = {}
        for rank, pair in enumerate(self.merges):
            self.ranks.setdefault(tuple(pair), rank)
        self.seen = {}  # ids of the pre-tokens met so far: most of a text repeats

    def encode(self, text: str) -> list[int]:
        ids = []
        for part, special in split_specials(text, self.special_tokens):
            if special:
                ids.append(self.ids[part.encode()])
                continue
            for pre_token in GPT2_PATTERN.findall(part):
                if pre_token not in self.seen:
                    self.seen[pre_token] = self._encode_pre_token(pre_token)
                ids += self.seen[pre_token]
        return ids

    def _encode_pre_token(self, pre_token: str) -> list[int]:
        word = tuple(bytes([byte]) for byte in pre_token.encode())
        while len(word) > 1:
            best = min(itertools.pairwise(word), key=lambda pair: self.ranks.get(pair, math.inf))
            if best not in self.ranks:
                break
            word = merge_pair(word, best)
        known = [[symbol] if symbol in self.ids else [bytes([byte]) for byte in symbol] for symbol in word]
        try:
            return [self.ids[symbol] for symbols in known for symbol in symbols]
        except KeyError as missing:
            raise ValueError(f"the vocabulary has no id for the byte {missing}: give it all 256") from None

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        try:
            return b"".join([self.vocab[int(i)] for i in ids]).decode(errors="replace")
        except KeyError as missing:
            raise ValueError(f"id {missing} is not in the vocabulary of {len(self.vocab)} ids") from None

    @classmethod
    def from_gpt2(cls, encoder_json: str | Path, vocab_bpe: str | Path) -> "Tokenizer":
        """GPT-2's published vocabulary, from the files `encoder.json` and `vocab.bpe`."""
        return cls(*vocabularies.read_gpt2(encoder_json, vocab_bpe))

    @classmethod
    def from_llama2c(cls, path: str | Path) -> "Tokenizer":
        """A vocabulary in llama2.c's format, which wants a space before the text: `encode(" Once")`."""
        return cls(*vocabularies.read_llama2c(path))


def pad_batch(
    sequences: Sequence[Sequence[int]], pad_id: int, length: int | None = None, side: str = "right"
) -> tuple[Tensor, Tensor]:
    """Make one rectangle of sequences of any lengths: B sequences -> ids (B, T) int64, is_token (B, T) bool.

    T is `length`, by default that of the longest sequence. `pad_id` fills the rest at the `side`, "right" or "left".
    `is_token` is True where a sequence has a token, whatever its id. Raises ValueError for a sequence longer than
    `length`, and for another side.

    >>> pad_batch([[5, 6], [7]], pad_id=0)[0].tolist()
    [[5, 6], [7, 0]]
    """
    if side not in ("left", "right"):
        raise ValueError(f'side must be "left" or "right", got {side!r}')
    longest = max(map(len, sequences), default=0)
    length = longest if length is None else length
    if longest > length:
        raise ValueError(f"a sequence of {longest} tokens is longer than {length=}: cut it, or give more length")
    ids = torch.full((len(sequences), length), pad_id)
    is_token = torch.zeros(len(sequences), length, dtype=torch.bool)
    for b, sequence in enumerate(sequences):
        n = len(sequence)
        place = slice(n) if side == "right" else slice(length - n, length)
        ids[b, place] = torch.as_tensor(sequence, dtype=torch.int64)
        is_token[b, place] = True
    return ids, is_token
