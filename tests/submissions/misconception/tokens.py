"""A learner whose tokenizer merges whatever is in the vocabulary, and who has everything else right."""

from collections import Counter
from itertools import pairwise

import torch

from tfmlib import vocabularies
from tfmlib.tokens import GPT2_PATTERN, split_specials


def pair_counts(words):
    counts = Counter()
    for word, times in words.items():
        for i in range(len(word) - 1):
            counts[word[i], word[i + 1]] += times
    return counts


def merge_pair(word, pair):
    merged = []
    i = 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(word[i] + word[i + 1])
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return tuple(merged)


def train_bpe(text, vocab_size, special_tokens=()):
    if vocab_size < 256 + len(special_tokens):
        raise ValueError("vocab_size is too small")
    words = Counter()
    for part, is_special in split_specials(text, special_tokens):
        if not is_special:
            for pre_token in GPT2_PATTERN.findall(part):
                words[tuple(bytes([byte]) for byte in pre_token.encode())] += 1
    vocab = {i: bytes([i]) for i in range(256)}
    merges = []
    while len(vocab) + len(special_tokens) < vocab_size:
        counts = pair_counts(words)
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        vocab[len(vocab)] = best[0] + best[1]
        merged = Counter()
        for word, times in words.items():
            merged[merge_pair(word, best)] += times
        words = merged
    for special in special_tokens:
        vocab[len(vocab)] = special.encode()
    return vocab, merges


class Tokenizer:
    def __init__(self, vocab, merges, special_tokens=()):
        self.vocab = dict(vocab)
        self.merges = merges
        self.special_tokens = special_tokens
        for special in special_tokens:
            if special.encode() not in self.vocab.values():
                self.vocab[max(self.vocab) + 1] = special.encode()
        self.ids = {}
        for i, symbol in self.vocab.items():
            if symbol not in self.ids:
                self.ids[symbol] = i

    def encode(self, text):
        ids = []
        for part, is_special in split_specials(text, self.special_tokens):
            if is_special:
                ids.append(self.ids[part.encode()])
            else:
                for pre_token in GPT2_PATTERN.findall(part):
                    ids.extend(self.encode_word(pre_token))
        return ids

    def encode_word(self, pre_token):
        word = tuple(bytes([byte]) for byte in pre_token.encode())
        while True:
            known = [pair for pair in pairwise(word) if pair[0] + pair[1] in self.ids]
            if not known:
                break
            word = merge_pair(word, min(known, key=lambda pair: self.ids[pair[0] + pair[1]]))
        ids = []
        for symbol in word:
            if symbol not in self.ids:
                raise ValueError(f"no id for {symbol}")
            ids.append(self.ids[symbol])
        return ids

    def decode(self, ids):
        data = b""
        for i in ids:
            if int(i) not in self.vocab:
                raise ValueError(f"no id {i}")
            data += self.vocab[int(i)]
        return data.decode("utf-8", errors="replace")

    @classmethod
    def from_gpt2(cls, encoder_json, vocab_bpe):
        return cls(*vocabularies.read_gpt2(encoder_json, vocab_bpe))

    @classmethod
    def from_llama2c(cls, path):
        return cls(*vocabularies.read_llama2c(path))


def pad_batch(sequences, pad_id, length=None, side="right"):
    if side not in ("right", "left"):
        raise ValueError("side must be right or left")
    longest = max(len(sequence) for sequence in sequences)
    if length is None:
        length = longest
    if longest > length:
        raise ValueError("a sequence is too long")
    ids, is_token = [], []
    for sequence in sequences:
        padding = [pad_id] * (length - len(sequence))
        tokens = list(sequence)
        if side == "right":
            ids.append(tokens + padding)
            is_token.append([True] * len(tokens) + [False] * len(padding))
        else:
            ids.append(padding + tokens)
            is_token.append([False] * len(padding) + [True] * len(tokens))
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(is_token, dtype=torch.bool)
