"""Other correct implementations of chapter 01: byte-pair encoding, the tokenizer, padding."""

import heapq
import re
from collections import Counter, defaultdict
from functools import reduce
from itertools import groupby, pairwise

import numpy as np
import regex
import torch

from tfmlib import vocabularies

from . import correct

_PATTERN = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

# pair_counts ---------------------------------------------------------------------------------------------------------


@correct("pair_counts")
def counts_in_a_plain_dict(words):
    """An index loop and a plain dict."""
    counts = {}
    for word in words:
        for i in range(len(word) - 1):
            pair = word[i], word[i + 1]
            counts[pair] = counts.get(pair, 0) + words[word]
    return counts


@correct("pair_counts")
def counts_summed(words):
    """A counter for each word, added up."""
    weighted = (Counter({pair: n * times for pair, n in Counter(pairwise(w)).items()}) for w, times in words.items())
    return reduce(lambda total, one: total + one, weighted, Counter())


@correct("pair_counts")
def counts_of_listed_pairs(words):
    """All pairs in a list, sorted and grouped."""
    listed = sorted((pair, times) for word, times in words.items() for pair in pairwise(word))
    counts = defaultdict(int)
    for pair, group in groupby(listed, key=lambda item: item[0]):
        counts[pair] = sum(times for _, times in group)
    return counts


@correct("pair_counts")
def counts_with_zeros(words):
    """A table of all pairs of symbols, those that never meet at zero."""
    symbols = {symbol for word in words for symbol in word}
    counts = Counter({(left, right): 0 for left in symbols for right in symbols})
    for word, times in words.items():
        counts.update(Counter({pair: times * list(pairwise(word)).count(pair) for pair in set(pairwise(word))}))
    return counts


# merge_pair ----------------------------------------------------------------------------------------------------------


@correct("merge_pair")
def merge_recursively(word, pair):
    """The head, then the rest."""
    if len(word) < 2:
        return tuple(word)
    if word[:2] == tuple(pair):
        return (pair[0] + pair[1], *merge_recursively(word[2:], pair))
    return (word[0], *merge_recursively(word[1:], pair))


@correct("merge_pair")
def merge_by_replacing_text(word, pair):
    """Each symbol a character, and `str.replace`."""
    symbols = list(dict.fromkeys((*word, *pair, pair[0] + pair[1])))
    character = {symbol: chr(0x4E00 + i) for i, symbol in enumerate(symbols)}
    text = "".join(character[symbol] for symbol in word)
    text = text.replace(character[pair[0]] + character[pair[1]], character[pair[0] + pair[1]])
    return tuple(symbols[ord(c) - 0x4E00] for c in text)


@correct("merge_pair")
def merge_while_appending(word, pair):
    """Append symbols; a right half joins the left half before it, unless that was just made."""
    out, fresh = [], False
    for symbol in word:
        if out and not fresh and (out[-1], symbol) == pair:
            out[-1] += symbol
            fresh = True
        else:
            out.append(symbol)
            fresh = False
    return tuple(out)


@correct("merge_pair")
def merge_from_match_to_match(word, pair):
    """Jump with `index` from one left half to the next."""
    left, right = pair
    out, at = [], 0
    while True:
        try:
            i = word.index(left, at)
        except ValueError:
            return tuple(out) + tuple(word[at:])
        out.extend(word[at:i])
        if word[i + 1 : i + 2] == (right,):
            out.append(left + right)
            at = i + 2
        else:
            out.append(left)
            at = i + 1


# train_bpe -----------------------------------------------------------------------------------------------------------


def _parts(text, specials):
    """The text between special tokens."""
    if not specials:
        return [text]
    longest = sorted(specials, key=len, reverse=True)
    return re.split("|".join(re.escape(special) for special in longest), text)


def _joined(word, pair):
    return merge_while_appending(tuple(word), pair)


@correct("train_bpe")
def train_counting_anew(text, vocab_size, special_tokens=()):
    """A list of all words of the text, also of equal ones; all counts anew at each step."""
    if vocab_size < 256 + len(special_tokens):
        raise ValueError("no room")
    words = [[bytes([b]) for b in w.encode()] for part in _parts(text, special_tokens) for w in _PATTERN.findall(part)]
    vocab = {i: bytes([i]) for i in range(256)}
    merges = []
    while len(vocab) + len(special_tokens) < vocab_size:
        counts = {}
        for word in words:
            for i in range(1, len(word)):
                counts[word[i - 1], word[i]] = counts.get((word[i - 1], word[i]), 0) + 1
        if counts == {}:
            break
        best = sorted(counts, key=lambda pair: (counts[pair], pair))[-1]
        vocab[len(vocab)] = best[0] + best[1]
        merges.append(best)
        words = [_joined(word, best) for word in words]
    for special in special_tokens:
        vocab[len(vocab)] = special.encode("utf-8")
    return vocab, merges


@correct("train_bpe")
def train_on_ids(text, vocab_size, special_tokens=()):
    """Ids in place of bytes, in one array for the whole text, with -1 between the words."""
    n_merges = vocab_size - 256 - len(special_tokens)
    if n_merges < 0:
        raise ValueError(vocab_size)
    ids = [-1]
    for part in _parts(text, special_tokens):
        for word in _PATTERN.findall(part):
            ids += [*word.encode(), -1]
    vocab = {i: bytes((i,)) for i in range(256)}
    merges = []
    for new in range(256, 256 + n_merges):
        counts = Counter(pair for pair in pairwise(ids) if -1 not in pair)
        if not counts:
            break
        # Two ids may stand for equal bytes, so ids are counted together by their bytes.
        as_bytes = Counter()
        for (a, b), n in counts.items():
            as_bytes[vocab[a], vocab[b]] += n
        left, right = max(as_bytes, key=lambda pair: (as_bytes[pair], *pair))
        merges.append((left, right))
        vocab[new] = left + right
        out, at = [], 0
        while at < len(ids):
            both = [vocab.get(i) for i in ids[at : at + 2]] == [left, right]
            out.append(new if both else ids[at])
            at += 2 if both else 1
        ids = out
    vocab |= {len(vocab) + i: special.encode() for i, special in enumerate(special_tokens)}
    return vocab, merges


@correct("train_bpe")
def train_with_a_heap(text, vocab_size, special_tokens=()):
    """A heap of pairs whose stale entries are thrown away when they come up; counts change where words change."""

    class Greatest:
        """Orders pairs so that the heap gives the greatest first."""

        def __init__(self, n, pair):
            self.n, self.pair = n, pair

        def __lt__(self, other):
            return (self.n, self.pair) > (other.n, other.pair)

    if vocab_size - len(special_tokens) < 256:
        raise ValueError(f"{vocab_size} is too small")
    times = Counter(word for part in _parts(text, special_tokens) for word in _PATTERN.findall(part))
    words = {word: tuple(word.encode()[i : i + 1] for i in range(len(word.encode()))) for word in times}
    counts, where = defaultdict(int), defaultdict(set)
    for word, symbols in words.items():
        for pair in pairwise(symbols):
            counts[pair] += times[word]
            where[pair].add(word)
    heap = [Greatest(n, pair) for pair, n in counts.items()]
    heapq.heapify(heap)
    merges = []
    while heap and len(merges) < vocab_size - len(special_tokens) - 256:
        top = heapq.heappop(heap)
        if counts[top.pair] != top.n or top.n == 0:
            continue
        merges.append(top.pair)
        changed = set()
        for word in where[top.pair]:
            for pair in pairwise(words[word]):
                counts[pair] -= times[word]
                changed.add(pair)
            words[word] = _joined(words[word], top.pair)
            for pair in pairwise(words[word]):
                counts[pair] += times[word]
                where[pair].add(word)
                changed.add(pair)
        for pair in changed:
            if counts[pair]:
                heapq.heappush(heap, Greatest(counts[pair], pair))
    symbols = [bytes([i]) for i in range(256)] + [a + b for a, b in merges] + [s.encode() for s in special_tokens]
    return dict(zip(range(len(symbols)), symbols, strict=True)), merges


@correct("train_bpe")
def train_changing_only_neighbours(text, vocab_size, special_tokens=()):
    """At each joined place only the counts of the pairs around it change."""
    if vocab_size < 256 + len(special_tokens):
        raise ValueError("too few ids")
    found = Counter()
    for part in _parts(text, special_tokens):
        found.update(_PATTERN.findall(part))
    rows = [([bytes([b]) for b in word.encode()], n) for word, n in found.items()]
    counts = Counter()
    for row, n in rows:
        for pair in pairwise(row):
            counts[pair] += n
    merges = []
    for _ in range(vocab_size - 256 - len(special_tokens)):
        alive = [pair for pair in counts if counts[pair] > 0]
        if not alive:
            break
        most = max(counts[pair] for pair in alive)
        left, right = max(pair for pair in alive if counts[pair] == most)
        merges.append((left, right))
        for row, n in rows:
            i = 0
            while i + 1 < len(row):
                if row[i] == left and row[i + 1] == right:
                    before, after = row[i - 1 : i] if i else [], row[i + 2 : i + 3]
                    counts[left, right] -= n
                    for b in before:
                        counts[b, left] -= n
                        counts[b, left + right] += n
                    for a in after:
                        counts[right, a] -= n
                        counts[left + right, a] += n
                    row[i : i + 2] = [left + right]
                i += 1
    vocab = {i: bytes([i]) for i in range(256)}
    for symbol in [a + b for a, b in merges] + [special.encode() for special in special_tokens]:
        vocab[len(vocab)] = symbol
    return vocab, merges


# Tokenizer -----------------------------------------------------------------------------------------------------------


class _FromFiles:
    """The two other ways to construct, as the lab gives them."""

    @classmethod
    def from_gpt2(cls, encoder_json, vocab_bpe):
        """From GPT-2's files."""
        return cls(*vocabularies.read_gpt2(encoder_json, vocab_bpe))

    @classmethod
    def from_llama2c(cls, path):
        """From a file of llama2.c."""
        return cls(*vocabularies.read_llama2c(path))


@correct("Tokenizer")
class OneMergeAtATime(_FromFiles):
    """The leftmost place of the lowest rank, again and again; special tokens by one regular expression."""

    def __init__(self, vocab, merges, special_tokens=()):
        self.byte_of = {**vocab}
        known = set(vocab.values())
        following = max(vocab) + 1
        for token in special_tokens:
            if token.encode() not in known:
                self.byte_of[following] = token.encode()
                following += 1
        self.id_of = {symbol: i for i, symbol in reversed(list(self.byte_of.items()))}
        self.rank = {pair: i for i, pair in reversed(list(enumerate(merges)))}
        self.specials = sorted(special_tokens, key=len, reverse=True)

    def encode(self, text):
        if not self.specials:
            return self._plain(text)
        out = []
        at = 0
        for match in re.finditer("|".join(map(re.escape, self.specials)), text):
            out += self._plain(text[at : match.start()])
            out.append(self.id_of[match.group().encode()])
            at = match.end()
        return out + self._plain(text[at:])

    def _plain(self, text):
        out = []
        for word in _PATTERN.findall(text):
            symbols = [bytes([b]) for b in word.encode()]
            while True:
                ranks = [self.rank.get(pair, 1 << 60) for pair in pairwise(symbols)]
                if not ranks or min(ranks) == 1 << 60:
                    break
                i = ranks.index(min(ranks))
                symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            for symbol in symbols:
                for part in [symbol] if symbol in self.id_of else [symbol[i : i + 1] for i in range(len(symbol))]:
                    if part not in self.id_of:
                        raise ValueError(f"no id for {part}")
                    out.append(self.id_of[part])
        return out

    def decode(self, ids):
        out = bytearray()
        for i in ids:
            if int(i) not in self.byte_of:
                raise ValueError(f"no token {i}")
            out.extend(self.byte_of[int(i)])
        return out.decode("utf-8", "replace")


@correct("Tokenizer")
class MergedWithAHeap(_FromFiles):
    """Linked symbols and a heap of (rank, place); special tokens found by walking through the text."""

    def __init__(self, vocab, merges, special_tokens=()):
        self.table = list(vocab.items())
        have = [symbol for _, symbol in self.table]
        new = [s.encode() for s in special_tokens if s.encode() not in have]
        top = max(i for i, _ in self.table)
        self.table += [(top + 1 + n, symbol) for n, symbol in enumerate(new)]
        self.special_tokens = list(special_tokens)
        self.order = {}
        for place, pair in enumerate(merges):
            if pair not in self.order:
                self.order[pair] = place

    def _number(self, symbol):
        return next((i for i, known in self.table if known == symbol), None)

    def encode(self, text):
        ids, start, at = [], 0, 0
        while at < len(text):
            begins = [s for s in self.special_tokens if text[at : at + len(s)] == s]
            if begins:
                longest = max(begins, key=len)
                ids.extend(self._ordinary(text[start:at]))
                ids.append(self._number(longest.encode()))
                at += len(longest)
                start = at
            else:
                at += 1
        return ids + self._ordinary(text[start:])

    def _ordinary(self, text):
        ids = []
        for word in _PATTERN.findall(text):
            for symbol in self._merged(word.encode()):
                number = self._number(symbol)
                numbers = [number] if number is not None else [self._number(bytes([b])) for b in symbol]
                if None in numbers:
                    raise ValueError("a byte without an id")
                ids.extend(numbers)
        return ids

    def _merged(self, data):
        symbol = [bytes([b]) for b in data]
        after = list(range(1, len(symbol) + 1))
        before = list(range(-1, len(symbol) - 1))
        heap = []

        def offer(i):
            if i >= 0 and after[i] < len(symbol) and (symbol[i], symbol[after[i]]) in self.order:
                pair = symbol[i], symbol[after[i]]
                heapq.heappush(heap, (self.order[pair], i, pair))

        for i in range(len(symbol)):
            offer(i)
        while heap:
            _, i, pair = heapq.heappop(heap)
            j = after[i]
            if symbol[i] is None or j >= len(symbol) or (symbol[i], symbol[j]) != pair:
                continue
            symbol[i], symbol[j] = pair[0] + pair[1], None
            after[i] = after[j]
            if after[j] < len(symbol):
                before[after[j]] = i
            offer(before[i])
            offer(i)
        return [s for s in symbol if s is not None]

    def decode(self, ids):
        table = dict(self.table)
        numbers = [int(i) for i in ids]
        missing = [i for i in numbers if i not in table]
        if missing:
            raise ValueError(f"unknown ids {missing}")
        return b"".join(map(table.get, numbers)).decode("utf-8", errors="replace")


@correct("Tokenizer")
class SplitOneSpecialAfterTheOther(_FromFiles):
    """Special tokens are cut out one kind after the other, the longest kind first; merging is recursive."""

    def __init__(self, vocab, merges, special_tokens=()):
        symbols = dict(vocab)
        for token in map(str.encode, special_tokens):
            if token not in set(symbols.values()):
                symbols[max(symbols) + 1] = token
        self._symbols = symbols
        self._merges = tuple(merges)
        self._specials = tuple(sorted(special_tokens, key=lambda token: -len(token)))
        self._ids = {}
        for i in symbols:
            if symbols[i] not in self._ids:
                self._ids[symbols[i]] = i

    def encode(self, text):
        parts = [text]
        for special in self._specials:
            cut = []
            for part in parts:
                if isinstance(part, bytes):
                    cut.append(part)
                    continue
                for n, plain in enumerate(part.split(special)):
                    cut += [special.encode()] * (n > 0) + [plain]
            parts = cut
        found = []
        for part in parts:
            words = [part] if isinstance(part, bytes) else map(self._symbols_of, _PATTERN.findall(part))
            for word in words:
                found += [word] if isinstance(word, bytes) else word
        try:
            return [i for symbol in found for i in self._ids_of(symbol)]
        except KeyError as error:
            raise ValueError(f"not in the vocabulary: {error}") from error

    def _ids_of(self, symbol):
        if symbol in self._ids:
            return (self._ids[symbol],)
        return tuple(self._ids[symbol[i : i + 1]] for i in range(len(symbol)))

    def _symbols_of(self, word):
        def merged(symbols):
            present = set(pairwise(symbols))
            for pair in self._merges:
                if pair in present:
                    return merged(_joined(symbols, pair))
            return list(symbols)

        return merged(tuple(bytes([b]) for b in word.encode()))

    def decode(self, ids):
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        if any(i not in self._symbols for i in ids):
            raise ValueError("unknown id")
        return str(b"".join(self._symbols[i] for i in ids), "utf-8", "replace")


# pad_batch -----------------------------------------------------------------------------------------------------------


@correct("pad_batch")
def pad_with_lists(sequences, pad_id, length=None, side="right"):
    """Lists of lists, made into tensors at the end."""
    if side not in {"left", "right"}:
        raise ValueError(side)
    T = max(len(s) for s in sequences) if length is None else length
    ids, marks = [], []
    for s in sequences:
        missing = T - len(s)
        if missing < 0:
            raise ValueError("too long")
        row, mark = list(s), [True] * len(s)
        fill, hole = [pad_id] * missing, [False] * missing
        ids.append(fill + row if side == "left" else row + fill)
        marks.append(hole + mark if side == "left" else mark + hole)
    return torch.tensor(ids, dtype=torch.long), torch.tensor(marks, dtype=torch.bool)


@correct("pad_batch")
def pad_by_comparing_places(sequences, pad_id, length=None, side="right"):
    """The mask from the lengths; the tokens flow into it in order."""
    lengths = torch.tensor([len(s) for s in sequences])
    if length is None:
        length = int(lengths.max())
    if (lengths > length).any():
        raise ValueError(f"longer than {length}")
    if side == "right":
        is_token = torch.arange(length)[None, :] < lengths[:, None]
    elif side == "left":
        is_token = torch.arange(length)[None, :] >= length - lengths[:, None]
    else:
        raise ValueError("left or right?")
    ids = torch.full(is_token.shape, pad_id, dtype=torch.long)
    ids[is_token] = torch.tensor([token for s in sequences for token in s], dtype=torch.long)
    return ids, is_token


@correct("pad_batch")
def pad_in_numpy(sequences, pad_id, length=None, side="right"):
    """numpy arrays, filled row by row."""
    if side != "right" and side != "left":
        raise ValueError(f"no side {side}")
    T = length if length is not None else max(map(len, sequences))
    ids = np.full((len(sequences), T), pad_id, dtype=np.int64)
    is_token = np.zeros_like(ids, dtype=bool)
    for row, mark, s in zip(ids, is_token, sequences, strict=True):
        if len(s) > T:
            raise ValueError(f"{len(s)} tokens do not fit into {T}")
        start = T - len(s) if side == "left" else 0
        row[start : start + len(s)] = s
        mark[start : start + len(s)] = True
    return torch.from_numpy(ids), torch.from_numpy(is_token)


@correct("pad_batch")
def pad_by_rows_of_torch(sequences, pad_id, length=None, side="right"):
    """Each row by torch's constant padding, then a stack."""
    if side not in ("right", "left"):
        raise ValueError("side")
    width = max(map(len, sequences)) if length is None else length
    if max(map(len, sequences)) > width:
        raise ValueError("length")
    ids, marks = [], []
    for s in sequences:
        row = torch.tensor(list(s)).long()
        room = (0, width - len(s)) if side == "right" else (width - len(s), 0)
        ids.append(torch.nn.functional.pad(row, room, value=pad_id))
        marks.append(torch.nn.functional.pad(torch.ones(len(s)), room) == 1)
    return torch.stack(ids), torch.stack(marks)
