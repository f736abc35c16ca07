"""A learner whose code is right, in another style, and noisy."""

import sys
import warnings
from itertools import pairwise

import numpy as np
import regex
import torch

from tfmlib import vocabularies

WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def in_bytes(word):
    data = word.encode("utf-8")
    return tuple(data[i : i + 1] for i in range(len(data)))


def around(specials, text):
    """Where special tokens stand in a text: (begin, end) of each."""
    at = 0
    while at < len(text):
        found = [s for s in specials if text.startswith(s, at)]
        if found:
            yield at, at + max(map(len, found))
        at += max(map(len, found)) if found else 1


def pair_counts(words):
    print("counting", len(words), "words", file=sys.stderr)
    every = [(pair, n) for word, n in words.items() for pair in pairwise(word)]
    return {pair: sum(n for other, n in every if other == pair) for pair, _ in every}


def merge_pair(word, pair):
    warnings.warn("merging", UserWarning, stacklevel=2)
    out = []
    symbols = iter(range(len(word)))
    for i in symbols:
        if word[i : i + 2] == pair:
            out.append(b"".join(pair))
            next(symbols)
        else:
            out.append(word[i])
    return tuple(out)


def train_bpe(text, vocab_size, special_tokens=()):
    n_merges = vocab_size - len(special_tokens) - 256
    if n_merges < 0:
        raise ValueError("vocab_size")
    words, start = {}, 0
    for begin, end in [*around(special_tokens, text), (len(text), len(text))]:
        for word in map(in_bytes, WORDS.findall(text[start:begin])):
            words[word] = words.get(word, 0) + 1
        start = end
    merges = []
    for _ in range(n_merges):
        counts = {}
        for word, n in words.items():
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + n
        if not counts:
            print("nothing left to merge")
            break
        best = max((n, pair) for pair, n in counts.items())[1]
        merges.append(best)
        words = {merge_pair(word, best): n for word, n in words.items()}
    symbols = [bytes([i]) for i in range(256)]
    symbols.extend(left + right for left, right in merges)
    symbols.extend(token.encode() for token in special_tokens)
    return dict(zip(range(len(symbols)), symbols, strict=True)), merges


class Tokenizer:
    def __init__(self, vocab, merges, special_tokens=()):
        warnings.warn("a new tokenizer", FutureWarning, stacklevel=2)
        self.vocab = {**vocab}
        for token in special_tokens:
            if not any(symbol == token.encode() for symbol in self.vocab.values()):
                self.vocab[max(self.vocab) + 1] = token.encode()
        self.rank = {pair: n for n, pair in enumerate(merges)}
        self.special_tokens = special_tokens
        self.number = {}
        for i in self.vocab:
            self.number.setdefault(self.vocab[i], i)

    def _word(self, word):
        symbols = list(in_bytes(word))
        while len(symbols) > 1:
            ranked = [(self.rank[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in self.rank]
            if not ranked:
                break
            i = min(ranked)[1]
            symbols[i] += symbols.pop(i + 1)
        for symbol in symbols:
            if symbol in self.number:
                yield self.number[symbol]
            else:
                for i in range(len(symbol)):
                    if symbol[i : i + 1] not in self.number:
                        raise ValueError(f"what is {symbol[i : i + 1]}?")
                    yield self.number[symbol[i : i + 1]]

    def encode(self, text):
        ids, start = [], 0
        for begin, end in [*around(self.special_tokens, text), (len(text), len(text))]:
            for word in WORDS.findall(text[start:begin]):
                ids.extend(self._word(word))
            if end > begin:
                ids.append(self.number[text[begin:end].encode()])
            start = end
        return ids

    def decode(self, ids):
        out = b""
        for i in map(int, ids):
            try:
                out += self.vocab[i]
            except KeyError as error:
                raise ValueError(f"no id {i}") from error
        return str(out, "utf-8", "replace")

    @classmethod
    def from_gpt2(cls, encoder_json, vocab_bpe):
        return cls(*vocabularies.read_gpt2(encoder_json, vocab_bpe))

    @classmethod
    def from_llama2c(cls, path):
        return cls(*vocabularies.read_llama2c(path))


def pad_batch(sequences, pad_id, length=None, side="right"):
    print("padding", len(sequences), "sequences")
    if side != "right" and side != "left":
        raise ValueError(side)
    T = max(map(len, sequences)) if length is None else length
    ids = np.full((len(sequences), T), pad_id, dtype="int64")
    mask = np.zeros((len(sequences), T), dtype="bool")
    for b, sequence in enumerate(sequences):
        n = len(sequence)
        if n > T:
            raise ValueError(n)
        first = 0 if side == "right" else T - n
        ids[b, first : first + n] = np.array(sequence, dtype="int64")
        mask[b, first : first + n] = True
    return torch.tensor(ids), torch.tensor(mask)
