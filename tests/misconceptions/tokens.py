"""Mistakes that people make in byte-pair encoding, in the tokenizer built on it, and in padding."""

import re
from collections import Counter
from itertools import pairwise

import torch

from tfmlib import tokens, vocabularies

from . import wrong

# pair_counts ---------------------------------------------------------------------------------------------------------


@wrong(
    "pair_counts",
    caught_by="test_pairs_of_two_words",
    hint="How often a word occurs is ignored. Each of its pairs occurs that many times: add the word's count, not 1.",
)
def counts_each_word_once(words):
    return Counter(pair for word in words for pair in pairwise(word))


@wrong(
    "pair_counts",
    caught_by="test_pairs_of_two_words",
    hint="A pair's count is overwritten by each word that has it. Add to what is there: `+=`.",
)
def counts_overwritten(words):
    counts = {}
    for word, times in words.items():
        for pair, n in Counter(pairwise(word)).items():
            counts[pair] = times * n
    return counts


@wrong(
    "pair_counts",
    caught_by="test_every_place_counts",
    hint="A pair is counted once a word. It counts at every place: in abab, (a, b) occurs twice.",
)
def counts_once_a_word(words):
    counts = Counter()
    for word, times in words.items():
        for pair in set(pairwise(word)):
            counts[pair] += times
    return counts


@wrong(
    "pair_counts",
    caught_by="test_every_place_counts",
    hint="Places that overlap are counted once. Each place counts: (a, a) occurs twice in aaa.",
)
def counts_without_overlap(words):
    counts = Counter()
    for word, times in words.items():
        i = 0
        while i + 1 < len(word):
            counts[word[i], word[i + 1]] += times
            i += 2 if word[i : i + 2] == word[i + 1 : i + 3] else 1
    return counts


@wrong(
    "pair_counts",
    caught_by="test_a_pair_has_an_order",
    hint="(a, b) and (b, a) are counted as one pair. The left symbol comes first: they are two.",
)
def counts_without_order(words):
    counts = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            counts[tuple(sorted(pair))] += times
    return counts


@wrong(
    "pair_counts",
    caught_by="test_a_pair_has_an_order",
    hint="The pairs are the wrong way round. The left symbol comes first, then the right one.",
)
def counts_right_to_left(words):
    counts = Counter()
    for word, times in words.items():
        for left, right in pairwise(word):
            counts[right, left] += times
    return counts


@wrong(
    "pair_counts",
    caught_by="test_pairs_of_two_words",
    hint="The keys are the joined bytes. Keep the two symbols apart, as a tuple: b'abc' may be (a, bc) or (ab, c).",
)
def counts_of_joined_bytes(words):
    counts = Counter()
    for word, times in words.items():
        for left, right in pairwise(word):
            counts[left + right] += times
    return counts


@wrong(
    "pair_counts",
    caught_by="test_words_stand_alone",
    hint="Pairs are counted across the end of a word. Each word stands alone: count inside each of them.",
)
def counts_across_words(words):
    counts = Counter()
    before = None
    for word, times in words.items():
        for symbol in word:
            if before is not None:
                counts[before, symbol] += times
            before = symbol
    return counts


@wrong(
    "pair_counts",
    caught_by="test_words_stand_alone",
    hint="A word's last symbol is paired with its first one, perhaps by `word[i - 1]` at i = 0. A word is no ring.",
)
def counts_in_a_ring(words):
    counts = Counter()
    for word, times in words.items():
        for i in range(len(word)):
            counts[word[i - 1], word[i]] += times
    return counts


@wrong(
    "pair_counts",
    caught_by="test_pairs_of_two_words",
    hint="The last pair of each word is left out. A word of n symbols has n - 1 pairs.",
)
def counts_without_the_last(words):
    counts = Counter()
    for word, times in words.items():
        for i in range(len(word) - 2):
            counts[word[i], word[i + 1]] += times
    return counts


@wrong(
    "pair_counts",
    caught_by="test_pairs_of_two_words",
    hint="Single symbols are counted. Count neighbours: two symbols, one behind the other.",
)
def counts_of_symbols(words):
    counts = Counter()
    for word, times in words.items():
        for symbol in word:
            counts[symbol] += times
    return counts


# merge_pair ----------------------------------------------------------------------------------------------------------


@wrong(
    "merge_pair",
    caught_by="test_runs_are_merged_from_the_left",
    hint="Places that overlap are merged at once, and a symbol is lost: aaa becomes aa. "
    "Go from left to right, and step over both symbols after a merge.",
)
def merge_everywhere_at_once(word, pair):
    starts = [pair == both for both in pairwise(word)]
    second = [False, *starts]
    first = [*starts, False]
    return tuple(pair[0] + pair[1] if a else s for s, a, b in zip(word, first, second, strict=True) if not b)


@wrong(
    "merge_pair",
    caught_by="test_two_symbols_become_one",
    hint="After a merge its right symbol is looked at once more, and kept. Step over both symbols.",
)
def merge_without_skipping(word, pair):
    joined = [pair[0] + pair[1] if word[i : i + 2] == pair else word[i] for i in range(len(word))]
    return tuple(joined)


@wrong(
    "merge_pair",
    caught_by="test_merged_wherever_it_stands",
    hint="Only the first place is merged. Go on to the end of the word.",
)
def merge_the_first_place(word, pair):
    for i in range(len(word)):
        if word[i : i + 2] == pair:
            return (*word[:i], pair[0] + pair[1], *word[i + 2 :])
    return word


@wrong(
    "merge_pair",
    caught_by="test_runs_are_merged_from_the_left",
    hint="Runs are merged from the right: aaa becomes a, aa. Begin at the left: aa, a.",
)
def merge_from_the_right(word, pair):
    out, i = [], len(word)
    while i > 0:
        both = i > 1 and word[i - 2 : i] == pair
        out.append(pair[0] + pair[1] if both else word[i - 1])
        i -= 2 if both else 1
    return tuple(reversed(out))


@wrong(
    "merge_pair",
    caught_by="test_two_symbols_become_one",
    hint="The last symbol is lost where it is not merged. The loop over pairs ends one early: append what is left.",
)
def merge_losing_the_last(word, pair):
    out, i = [], 0
    while i < len(word) - 1:
        both = word[i : i + 2] == pair
        out.append(pair[0] + pair[1] if both else word[i])
        i += 2 if both else 1
    return tuple(out)


@wrong(
    "merge_pair",
    caught_by="test_two_symbols_become_one",
    hint="The result is a list. A word is a tuple, since it is a key of the table of words: return tuple(...).",
)
def merge_into_a_list(word, pair):
    return _merged(list(word), pair)


def _merged(word, pair):
    """The right way, for lists."""
    out, i = [], 0
    while i < len(word):
        both = tuple(word[i : i + 2]) == pair
        out.append(pair[0] + pair[1] if both else word[i])
        i += 2 if both else 1
    return out


@wrong(
    "merge_pair",
    caught_by="test_only_this_pair_is_merged",
    hint="The joined bytes are compared, so a, bc is merged by the pair (ab, c). Compare both symbols one by one.",
)
def merge_equal_bytes(word, pair):
    out, i = [], 0
    while i < len(word):
        both = i + 1 < len(word) and word[i] + word[i + 1] == pair[0] + pair[1]
        out.append(pair[0] + pair[1] if both else word[i])
        i += 2 if both else 1
    return tuple(out)


@wrong(
    "merge_pair",
    caught_by="test_only_this_pair_is_merged",
    hint="The pair is merged the other way round, too: b, a by (a, b). The left symbol must be the first one.",
)
def merge_in_any_order(word, pair):
    out, i = [], 0
    while i < len(word):
        both = word[i : i + 2] in (pair, pair[::-1])
        out.append(b"".join(word[i : i + 2]) if both else word[i])
        i += 2 if both else 1
    return tuple(out)


@wrong(
    "merge_pair",
    caught_by="test_two_symbols_become_one",
    hint="The pair itself is put into the word. The new symbol is one bytes object: pair[0] + pair[1].",
)
def merge_into_the_pair(word, pair):
    return tuple(pair if symbol == pair[0] + pair[1] else symbol for symbol in _merged(word, pair))


@wrong(
    "merge_pair",
    caught_by="test_two_symbols_become_one",
    hint="The whole word becomes one bytes object. Only the two symbols are joined: the others stay apart.",
)
def merge_the_word(word, pair):
    return b"".join(_merged(word, pair))


# train_bpe -----------------------------------------------------------------------------------------------------------
#
# The variants share a plain and correct training whose steps are arguments; each variant gets one step wrong.


def _room(vocab_size, specials):
    room = vocab_size - 256 - len(specials)
    if room < 0:
        raise ValueError("no room for 256 bytes and the special tokens")
    return room


def _cut_out(text, specials):
    return [part for part, special in tokens.split_specials(text, specials) if not special]


def _greatest(counts):
    return max(counts, key=lambda pair: (counts[pair], pair))


def _to_bytes(pre_token):
    return [bytes([byte]) for byte in pre_token.encode()]


def _finish(merges, specials):
    symbols = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    return dict(enumerate(symbols + [special.encode() for special in specials])), merges


def _train(
    text,
    vocab_size,
    specials,
    *,
    room=_room,
    cut=_cut_out,
    pre_tokens=tokens.GPT2_PATTERN.findall,
    start=_to_bytes,
    count=lambda words: Counter(pair for word in words for pair in pairwise(word)),
    best=_greatest,
    finish=_finish,
):
    left = room(vocab_size, specials)
    words = [start(pre_token) for part in cut(text, specials) for pre_token in pre_tokens(part)]
    merges = []
    while len(merges) < left:
        counts = count(words)
        if not counts:
            break
        pair = best(counts)
        if pair is None:
            break
        merges.append(pair)
        words = [_merged(word, pair) for word in words]
    return finish(merges, specials)


@wrong(
    "train_bpe",
    caught_by="test_of_equals_the_greater_pair",
    hint="Of pairs that occur equally often the one seen first is merged, as `max(counts, key=counts.get)` does. "
    "Take the greater pair: compare (count, pair).",
)
def ties_to_the_first(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, best=lambda counts: max(counts, key=counts.get))


@wrong(
    "train_bpe",
    caught_by="test_of_equals_the_greater_pair",
    hint="Of pairs that occur equally often the one seen last is merged. Take the greater pair: compare (count, pair).",
)
def ties_to_the_last(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, best=lambda counts: sorted(counts, key=counts.get)[-1])


@wrong(
    "train_bpe",
    caught_by="test_of_equals_the_greater_pair",
    hint="Of pairs that occur equally often the smaller one is merged. Take the greater: max of (count, pair).",
)
def ties_to_the_smaller(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, best=lambda counts: min(counts, key=lambda p: (-counts[p], p)))


@wrong(
    "train_bpe",
    caught_by="test_of_equals_the_greater_pair",
    hint="Equal counts are decided by the joined bytes. Compare the pairs, left symbol first: (ab, a) is above (a, z).",
)
def ties_by_joined_bytes(text, vocab_size, special_tokens=()):
    return _train(
        text, vocab_size, special_tokens, best=lambda counts: max(counts, key=lambda p: (counts[p], p[0] + p[1]))
    )


@wrong(
    "train_bpe",
    caught_by="test_of_equals_the_greater_pair",
    hint="Equal counts are decided by GPT-2's printable characters, in which a space is Ġ, above all letters. "
    "Compare the bytes themselves.",
)
def ties_by_printable_characters(text, vocab_size, special_tokens=()):
    printable = {byte: character for character, byte in vocabularies.gpt2_byte_names().items()}

    def best(counts):
        return max(counts, key=lambda p: (counts[p], *("".join(printable[byte] for byte in side) for side in p)))

    return _train(text, vocab_size, special_tokens, best=best)


@wrong(
    "train_bpe",
    caught_by="test_of_equals_the_greater_pair",
    hint="Equal counts are decided by ids, in which a merged symbol is above every byte. Compare the symbols' bytes.",
)
def ties_by_ids(text, vocab_size, special_tokens=()):
    ids = {bytes([byte]): byte for byte in range(256)}

    def best(counts):
        pair = max(counts, key=lambda p: (counts[p], ids[p[0]], ids[p[1]]))
        ids.setdefault(pair[0] + pair[1], len(ids))
        return pair

    return _train(text, vocab_size, special_tokens, best=best)


@wrong(
    "train_bpe",
    caught_by="test_merges_stay_inside_pre_tokens",
    hint="The text is not cut into pre-tokens, so merges cross from one word to the next. "
    "Cut with GPT2_PATTERN first, and count inside each pre-token.",
)
def training_without_pre_tokens(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, pre_tokens=lambda part: [part])


@wrong(
    "train_bpe",
    caught_by="test_merges_stay_inside_pre_tokens",
    hint="`str.split()` drops the spaces and leaves signs at the words. Cut with GPT2_PATTERN, which keeps every byte.",
)
def training_on_split_words(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, pre_tokens=str.split)


@wrong(
    "train_bpe",
    caught_by="test_merges_stay_inside_pre_tokens",
    hint="Letters and digits are taken as one kind, as by the pattern `\\w+`. Cut with GPT2_PATTERN.",
)
def training_on_word_characters(text, vocab_size, special_tokens=()):
    pattern = re.compile(r" ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+")
    return _train(text, vocab_size, special_tokens, pre_tokens=pattern.findall)


@wrong(
    "train_bpe",
    caught_by="test_merges_worked_by_hand",
    hint="Each different word is counted once. A word that occurs 5 times brings each of its pairs 5 times.",
)
def training_on_different_words(text, vocab_size, special_tokens=()):
    def count(words):
        return Counter(pair for word in dict.fromkeys(map(tuple, words)) for pair in pairwise(word))

    return _train(text, vocab_size, special_tokens, count=count)


@wrong(
    "train_bpe",
    caught_by="test_overlapping_places_count",
    hint="Places that overlap are counted once: in aaa the pair (a, a) occurs twice. `pair_counts` counts every place.",
)
def training_without_overlap(text, vocab_size, special_tokens=()):
    def count(words):
        counts = Counter()
        for word in words:
            i = 0
            while i + 1 < len(word):
                counts[word[i], word[i + 1]] += 1
                i += 2 if word[i : i + 2] == word[i + 1 : i + 3] else 1
        return counts

    return _train(text, vocab_size, special_tokens, count=count)


@wrong(
    "train_bpe",
    caught_by="test_merges_worked_by_hand",
    hint="The pairs are counted once, before the first merge. Each merge changes its neighbours' counts: count again.",
)
def training_on_first_counts(text, vocab_size, special_tokens=()):
    first = Counter()
    chosen = set()

    def count(words):
        if not first:
            first.update(pair for word in words for pair in pairwise(word))
        return {pair: n for pair, n in first.items() if pair not in chosen}

    def best(counts):
        chosen.add(_greatest(counts))
        return _greatest(counts)

    return _train(text, vocab_size, special_tokens, count=count, best=best)


def _with_kept_counts(text, vocab_size, specials, *, take, give):
    """Training that keeps its counts from merge to merge: old neighbours are taken off, new ones are added."""
    counts = Counter()
    last = []

    def count(words):
        if not last:
            counts.update(pair for word in words for pair in pairwise(word))
        else:
            now, before = Counter(pair for word in words for pair in pairwise(word)), last[-1]
            for pair in before.keys() | now.keys():
                change = now[pair] - before[pair]
                if (change < 0 and take) or (change > 0 and give):
                    counts[pair] += change
            counts[chosen[-1]] = 0
        last.append(Counter(pair for word in words for pair in pairwise(word)))
        return {pair: n for pair, n in counts.items() if n > 0}

    chosen = []

    def best(counts):
        chosen.append(_greatest(counts))
        return chosen[-1]

    return _train(text, vocab_size, specials, count=count, best=best)


@wrong(
    "train_bpe",
    caught_by="test_merges_worked_by_hand",
    hint="The pairs that a new symbol makes with its neighbours are not counted, so it is never merged further. "
    "After each merge add these new pairs.",
)
def new_neighbours_forgotten(text, vocab_size, special_tokens=()):
    return _with_kept_counts(text, vocab_size, special_tokens, take=True, give=False)


@wrong(
    "train_bpe",
    caught_by="test_merges_worked_by_hand",
    hint="The pairs that a merge has taken apart keep their counts. After (c, a) became ca, the (a, t) in cat is gone: "
    "take it off.",
)
def old_neighbours_kept(text, vocab_size, special_tokens=()):
    return _with_kept_counts(text, vocab_size, special_tokens, take=False, give=True)


@wrong(
    "train_bpe",
    caught_by="test_specials_take_no_part",
    hint="Special tokens are counted as text, and merged. Cut the text at them first, and train on the parts between.",
)
def training_on_specials(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, cut=lambda text, specials: [text])


@wrong(
    "train_bpe",
    caught_by="test_specials_take_no_part",
    hint="Special tokens are deleted from the text, so the parts on both sides join and merge. Keep these parts apart.",
)
def specials_deleted(text, vocab_size, special_tokens=()):
    def cut(text, specials):
        return ["".join(_cut_out(text, specials))]

    return _train(text, vocab_size, special_tokens, cut=cut)


@wrong(
    "train_bpe",
    caught_by="test_bytes_then_merges_then_specials",
    hint="Special tokens are not counted in vocab_size, so there are too many merges: 256 + merges + special tokens.",
)
def specials_beyond_the_size(text, vocab_size, special_tokens=()):
    def room(vocab_size, specials):
        _room(vocab_size, specials)
        return vocab_size - 256

    return _train(text, vocab_size, special_tokens, room=room)


@wrong(
    "train_bpe",
    caught_by="test_merges_worked_by_hand",
    hint="vocab_size is taken as the number of merges. It counts all ids: the 256 bytes and the special tokens, too.",
)
def size_as_merges(text, vocab_size, special_tokens=()):
    def room(vocab_size, specials):
        _room(vocab_size, specials)
        return vocab_size

    return _train(text, vocab_size, special_tokens, room=room)


@wrong(
    "train_bpe",
    caught_by="test_bytes_then_merges_then_specials",
    hint="Special tokens get the ids from 256, before the merges. They come last.",
)
def specials_before_merges(text, vocab_size, special_tokens=()):
    def finish(merges, specials):
        symbols = [bytes([byte]) for byte in range(256)] + [special.encode() for special in specials]
        return dict(enumerate(symbols + [left + right for left, right in merges])), merges

    return _train(text, vocab_size, special_tokens, finish=finish)


@wrong(
    "train_bpe",
    caught_by="test_bytes_then_merges_then_specials",
    hint="Special tokens stand in the vocabulary as text. All its symbols are bytes: use special.encode().",
)
def specials_as_text(text, vocab_size, special_tokens=()):
    def finish(merges, specials):
        vocab, _ = _finish(merges, [])
        return vocab | {len(vocab) + i: special for i, special in enumerate(specials)}, merges

    return _train(text, vocab_size, special_tokens, finish=finish)


@wrong(
    "train_bpe",
    caught_by="test_bytes_then_merges_then_specials",
    hint="The vocabulary is the wrong way round. It tells the bytes of an id: {id: bytes}.",
)
def vocabulary_turned_round(text, vocab_size, special_tokens=()):
    def finish(merges, specials):
        vocab, _ = _finish(merges, specials)
        return {symbol: i for i, symbol in vocab.items()}, merges

    return _train(text, vocab_size, special_tokens, finish=finish)


@wrong(
    "train_bpe",
    caught_by="test_merges_worked_by_hand",
    hint="The merges are pairs of ids. Give pairs of symbols, which are bytes objects.",
)
def merges_as_ids(text, vocab_size, special_tokens=()):
    def finish(merges, specials):
        vocab, _ = _finish(merges, specials)
        ids = {symbol: i for i, symbol in reversed(vocab.items())}
        return vocab, [(ids[left], ids[right]) for left, right in merges]

    return _train(text, vocab_size, special_tokens, finish=finish)


@wrong(
    "train_bpe",
    caught_by="test_merges_worked_by_hand",
    hint="The merges are joined symbols. Keep both sides apart, as a tuple: (ab, c) and (a, bc) are two merges.",
)
def merges_as_symbols(text, vocab_size, special_tokens=()):
    def finish(merges, specials):
        return _finish(merges, specials)[0], [left + right for left, right in merges]

    return _train(text, vocab_size, special_tokens, finish=finish)


@wrong(
    "train_bpe",
    caught_by="test_stops_when_no_pair_is_left",
    hint="Training fails when no pair is left to merge: `max` of nothing. Stop early then, and return what there is.",
)
def fails_without_pairs(text, vocab_size, special_tokens=()):
    room = _room(vocab_size, special_tokens)
    vocab, merges = _train(text, vocab_size, special_tokens)
    if len(merges) < room:
        raise ValueError("max() arg is an empty sequence")
    return vocab, merges


@wrong(
    "train_bpe",
    caught_by="test_stops_when_no_pair_is_left",
    hint="Training stops at pairs that occur once. It goes on until vocab_size is reached or no pair is left.",
)
def stops_at_single_pairs(text, vocab_size, special_tokens=()):
    def best(counts):
        return _greatest(counts) if max(counts.values()) > 1 else None

    return _train(text, vocab_size, special_tokens, best=best)


@wrong(
    "train_bpe",
    caught_by="test_text_is_bytes",
    hint="Words start as characters. They start as single bytes: é is two, C3 and A9, which a merge may join.",
)
def training_on_characters(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, start=lambda word: [character.encode() for character in word])


@wrong(
    "train_bpe",
    caught_by="test_vocab_size_must_hold_bytes_and_specials",
    hint="A vocab_size that cannot hold the 256 bytes and the special tokens is accepted. It must be a ValueError.",
)
def any_vocab_size(text, vocab_size, special_tokens=()):
    return _train(text, vocab_size, special_tokens, room=lambda size, specials: size - 256 - len(specials))


# Tokenizer -----------------------------------------------------------------------------------------------------------
#
# The variants share a correct body whose steps are methods; each variant gets one step wrong.


class _Steps:
    def __init__(self, vocab, merges, special_tokens=()):
        self.vocab = self.keep(vocab)
        self.specials = list(special_tokens)
        for special in self.specials:
            if self.is_new(special):
                self.vocab[self.new_id()] = special.encode()
        self.ids = self.by_symbol()
        self.ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}

    @classmethod
    def from_gpt2(cls, encoder_json, vocab_bpe):
        return cls(*vocabularies.read_gpt2(encoder_json, vocab_bpe))

    @classmethod
    def from_llama2c(cls, path):
        return cls(*vocabularies.read_llama2c(path))

    def keep(self, vocab):
        return dict(vocab)

    def is_new(self, special):
        return special.encode() not in self.vocab.values()

    def new_id(self):
        return max(self.vocab) + 1

    def by_symbol(self):
        return {symbol: i for i, symbol in reversed(self.vocab.items())}

    def encode(self, text):
        out = []
        for part, special in self.parts(text):
            if special:
                out.append(self.ids[part.encode()])
                continue
            for pre_token in self.pre_tokens(part):
                out += self.encode_pre_token(pre_token)
        return out

    def parts(self, text):
        return tokens.split_specials(text, self.specials)

    def pre_tokens(self, part):
        return tokens.GPT2_PATTERN.findall(part)

    def encode_pre_token(self, pre_token):
        return [i for symbol in self.merge_all(self.start(pre_token)) for i in self.ids_of(symbol)]

    def start(self, pre_token):
        return _to_bytes(pre_token)

    def merge_all(self, word):
        while True:
            pairs = [pair for pair in pairwise(word) if pair in self.ranks]
            if not pairs:
                return word
            word = self.merge(word, min(pairs, key=self.ranks.get))

    def merge(self, word, pair):
        return _merged(word, pair)

    def ids_of(self, symbol):
        symbols = [symbol] if symbol in self.ids else [bytes([byte]) for byte in symbol]
        return [self.id_of(symbol) for symbol in symbols]

    def id_of(self, symbol):
        if symbol not in self.ids:
            raise ValueError("no id for this byte")
        return self.ids[symbol]

    def decode(self, ids):
        return self.as_text(b"".join(self.symbol_of(int(i)) for i in ids))

    def symbol_of(self, i):
        if i not in self.vocab:
            raise ValueError("no such id")
        return self.vocab[i]

    def as_text(self, data):
        return data.decode(errors="replace")


@wrong(
    "Tokenizer",
    caught_by="test_bytes_have_the_ids_of_the_vocabulary",
    hint="The text is taken character by character. It must be taken byte by byte: text.encode().",
)
class EncodesCharacters(_Steps):
    def start(self, pre_token):
        return list(pre_token)

    def merge_all(self, word):
        if all(character.isascii() for character in word):
            return super().merge_all([character.encode() for character in word])
        return word

    def ids_of(self, symbol):
        return [ord(symbol)] if isinstance(symbol, str) else super().ids_of(symbol)


@wrong(
    "Tokenizer",
    caught_by="test_bytes_have_the_ids_of_the_vocabulary",
    hint="A byte's value is taken for its id. Only `vocab` tells which id a byte has: in GPT-2's, `!` is 0.",
)
class BytesAreIds(_Steps):
    def ids_of(self, symbol):
        return [self.ids[symbol]] if len(symbol) > 1 and symbol in self.ids else list(symbol)


@wrong(
    "Tokenizer",
    caught_by="test_merges_decide_not_the_vocabulary",
    hint="The id of a merged symbol is taken to be 256 + rank. Look the joined symbol up in `vocab`.",
)
class IdsFollowRanks(_Steps):
    def ids_of(self, symbol):
        joined = {left + right: rank for (left, right), rank in reversed(self.ranks.items())}
        return [256 + joined[symbol]] if symbol in joined else super().ids_of(symbol)


@wrong(
    "Tokenizer",
    caught_by="test_merges_decide_not_the_vocabulary",
    hint="encode takes the longest symbol of the vocabulary at each place. "
    "BPE starts from bytes and applies merges, the lowest rank first.",
)
class LongestMatch(_Steps):
    def merge_all(self, word):
        data, out = b"".join(word), []
        while data:
            n = next((n for n in range(len(data), 1, -1) if data[:n] in self.ids), 1)
            out.append(data[:n])
            data = data[n:]
        return out


@wrong(
    "Tokenizer",
    caught_by="test_merges_decide_not_the_vocabulary",
    hint="Neighbours are merged whenever their joined bytes are in the vocabulary. "
    "Only pairs in `merges` are merged, the one of the lowest rank first.",
)
class MergesByVocabulary(_Steps):
    def merge_all(self, word):
        while True:
            pairs = [pair for pair in pairwise(word) if pair[0] + pair[1] in self.ids]
            if not pairs:
                return word
            word = _merged(word, min(pairs, key=lambda pair: self.ids[pair[0] + pair[1]]))


@wrong(
    "Tokenizer",
    caught_by="test_merges_decide_not_the_vocabulary",
    hint="Ranks are looked up by the joined bytes, so (ab, c) merges a and bc, too. Look up the pair of symbols.",
)
class RanksOfJoinedBytes(_Steps):
    def merge_all(self, word):
        ranks = {left + right: rank for (left, right), rank in reversed(self.ranks.items())}
        while True:
            pairs = [pair for pair in pairwise(word) if pair[0] + pair[1] in ranks]
            if not pairs:
                return word
            word = _merged(word, min(pairs, key=lambda pair: ranks[pair[0] + pair[1]]))


@wrong(
    "Tokenizer",
    caught_by="test_the_lowest_rank_is_merged_first",
    hint="The first pair from the left that can be merged is merged. "
    "Of all pairs in the word, the one of the lowest rank comes first.",
)
class LeftmostFirst(_Steps):
    def merge_all(self, word):
        while True:
            pair = next((pair for pair in pairwise(word) if pair in self.ranks), None)
            if pair is None:
                return word
            word = _merged(word, pair)


@wrong(
    "Tokenizer",
    caught_by="test_after_a_merge_the_lowest_rank_again",
    hint="The merges are gone through once, in order. After each merge look at all ranks again: "
    "a lower one may have become possible.",
)
class OnePassOverMerges(_Steps):
    def merge_all(self, word):
        for pair in sorted(self.ranks, key=self.ranks.get):
            word = _merged(word, pair)
        return word


@wrong(
    "Tokenizer",
    caught_by="test_a_run_is_merged_from_the_left",
    hint="In a run such as aaa overlapping places are merged at once, and a byte is lost. "
    "Merge from left to right, without overlap, as `merge_pair` does.",
)
class RunsLoseBytes(_Steps):
    def merge(self, word, pair):
        return list(merge_everywhere_at_once(tuple(word), pair))


@wrong(
    "Tokenizer",
    caught_by="test_a_run_is_merged_from_the_left",
    hint="Runs are merged from the right: aaa becomes a, aa. Begin at the left: aa, a.",
)
class RunsFromTheRight(_Steps):
    def merge(self, word, pair):
        return list(merge_from_the_right(tuple(word), pair))


@wrong(
    "Tokenizer",
    caught_by="test_encode_cuts_by_the_pattern_first",
    hint="The text is not cut into pre-tokens, so merges cross from one word to the next. Cut with GPT2_PATTERN first.",
)
class NoPreTokens(_Steps):
    def pre_tokens(self, part):
        return [part]


@wrong(
    "Tokenizer",
    caught_by="test_encode_cuts_by_the_pattern_first",
    hint="`str.split()` throws spaces and line breaks away, and decode cannot bring them back. Cut with GPT2_PATTERN.",
)
class SplitAtBlanks(_Steps):
    def pre_tokens(self, part):
        return part.split()


@wrong(
    "Tokenizer",
    caught_by="test_a_special_token_is_one_id",
    hint="Special tokens in the text are encoded as text. Cut the text at them first; each is one id.",
)
class SpecialsAsText(_Steps):
    def parts(self, text):
        return [(text, False)]


@wrong(
    "Tokenizer",
    caught_by="test_a_special_token_is_one_id",
    hint="Where two special tokens begin at the same place the one given first wins. Try the longest first.",
)
class FirstSpecialWins(_Steps):
    def order(self):
        return self.specials

    def parts(self, text):
        if not self.specials:
            return [(text, False)]
        pattern = "|".join(map(re.escape, self.order()))
        return [(part, i % 2 == 1) for i, part in enumerate(re.split(f"({pattern})", text)) if part]


@wrong(
    "Tokenizer",
    caught_by="test_a_special_token_is_one_id",
    hint="Where two special tokens begin at the same place the shorter one wins. Try the longest first.",
)
class ShortestSpecialWins(FirstSpecialWins):
    def order(self):
        return sorted(self.specials, key=len)


@wrong(
    "Tokenizer",
    caught_by="test_a_special_token_is_one_id",
    hint="Signs such as | in a special token are read as a regular expression. Use regex.escape on each special token.",
)
class SpecialsNotEscaped(_Steps):
    def parts(self, text):
        at, out = 0, []
        longest_first = sorted(self.specials, key=len, reverse=True)
        for match in re.finditer("|".join(longest_first), text) if self.specials else []:
            if match.group() in self.specials:
                out += [(text[at : match.start()], False), (match.group(), True)]
                at = match.end()
        return [*out, (text[at:], False)]


@wrong(
    "Tokenizer",
    caught_by="test_ids_of_special_tokens",
    hint="New special tokens get the ids from len(vocab). Ids may have gaps: take max(vocab) + 1.",
)
class SpecialIdsFromTheLength(_Steps):
    def new_id(self):
        return len(self.vocab)


@wrong(
    "Tokenizer",
    caught_by="test_ids_of_special_tokens",
    hint="A special token that `vocab` has gets a second id. Only those that `vocab` lacks get new ones.",
)
class SpecialsAlwaysNew(_Steps):
    def is_new(self, special):
        return True

    def by_symbol(self):
        return super().by_symbol() | {s.encode(): i for i, s in self._new().items()}

    def _new(self):
        return {max(i for i, symbol in self.vocab.items() if symbol == s.encode()): s for s in self.specials}


@wrong(
    "Tokenizer",
    caught_by="test_ids_of_special_tokens",
    hint="Special tokens get their ids in alphabetical order. Give them in the order in which they came.",
)
class SpecialsSorted(_Steps):
    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, sorted(special_tokens))


@wrong(
    "Tokenizer",
    caught_by="test_the_first_of_equal_bytes",
    hint="Where several ids stand for equal bytes the last one is used: turning `vocab` round overwrites the first. "
    "Use setdefault.",
)
class LastOfEqualBytes(_Steps):
    def by_symbol(self):
        return {symbol: i for i, symbol in self.vocab.items()}


@wrong(
    "Tokenizer",
    caught_by="test_the_first_of_equal_bytes",
    hint="Where several ids stand for equal bytes the smallest id is used. Use the one that comes first in `vocab`.",
)
class SmallestOfEqualBytes(_Steps):
    def by_symbol(self):
        return {symbol: i for i, symbol in sorted(self.vocab.items(), reverse=True)}


@wrong(
    "Tokenizer",
    caught_by="test_a_symbol_without_an_id",
    hint="A merged symbol that `vocab` lacks is an error here. Give the ids of its single bytes instead.",
)
class EverySymbolNeedsAnId(_Steps):
    def ids_of(self, symbol):
        return [self.id_of(symbol)]


@wrong(
    "Tokenizer",
    caught_by="test_a_symbol_without_an_id",
    hint="Merges whose symbol `vocab` lacks are left out. The symbol may be merged further: look for ids at the end.",
)
class OnlyMergesWithAnId(_Steps):
    def merge_all(self, word):
        self.ranks = {(a, b): rank for (a, b), rank in self.ranks.items() if a + b in self.ids}
        return super().merge_all(word)


@wrong(
    "Tokenizer",
    caught_by="test_what_has_no_id_is_an_error",
    hint="A byte or an id that `vocab` lacks ends in a KeyError. Raise a ValueError that names it.",
)
class KeyErrors(_Steps):
    def id_of(self, symbol):
        return self.ids[symbol]

    def symbol_of(self, i):
        return self.vocab[i]


@wrong(
    "Tokenizer",
    caught_by="test_what_has_no_id_is_an_error",
    hint="A byte or an id that `vocab` lacks is passed over in silence. Raise a ValueError.",
)
class UnknownIsDropped(_Steps):
    def ids_of(self, symbol):
        symbols = [symbol] if symbol in self.ids else [bytes([byte]) for byte in symbol]
        return [self.ids[symbol] for symbol in symbols if symbol in self.ids]

    def symbol_of(self, i):
        return self.vocab.get(i, b"")


@wrong(
    "Tokenizer",
    caught_by="test_decode_joins_the_bytes_first",
    hint="Each id is decoded on its own, so a character that is spread over several ids is lost. "
    "Join all bytes, then decode once.",
)
class DecodesOneByOne(_Steps):
    def decode(self, ids):
        return "".join(self.as_text(self.symbol_of(int(i))) for i in ids)


@wrong(
    "Tokenizer",
    caught_by="test_decode_joins_the_bytes_first",
    hint='Symbols are joined with spaces. Spaces are part of the symbols: b"".join.',
)
class DecodesWithSpaces(_Steps):
    def decode(self, ids):
        return self.as_text(b" ".join(self.symbol_of(int(i)) for i in ids))


@wrong(
    "Tokenizer",
    caught_by="test_decode_joins_the_bytes_first",
    hint="The entries of a tensor are looked up as they are, and a tensor is no key of a dict. Make an int of each id.",
)
class DecodesListsOnly(_Steps):
    def decode(self, ids):
        return self.as_text(b"".join(self.symbol_of(i) for i in ids))


@wrong(
    "Tokenizer",
    caught_by="test_invalid_bytes_are_replaced",
    hint='decode fails on bytes that are no UTF-8, which a model may well write. Use decode(errors="replace").',
)
class DecodesStrictly(_Steps):
    def as_text(self, data):
        return data.decode()


@wrong(
    "Tokenizer",
    caught_by="test_invalid_bytes_are_replaced",
    hint='decode drops bytes that are no UTF-8. They must show, as U+FFFD: errors="replace", not "ignore".',
)
class DecodesIgnoring(_Steps):
    def as_text(self, data):
        return data.decode(errors="ignore")


@wrong(
    "Tokenizer",
    caught_by="test_each_tokenizer_stands_alone",
    hint="Special tokens are added to the dict that was handed in, which other tokenizers use, too. Copy it first.",
)
class ChangesTheVocabulary(_Steps):
    def keep(self, vocab):
        return vocab


@wrong(
    "Tokenizer",
    caught_by="test_each_tokenizer_stands_alone",
    hint="The merges are kept in a global or class variable, so each new tokenizer changes all others. "
    "Keep them in the object: self.",
)
class MergesOfTheLatest(_Steps):
    latest = None

    def __init__(self, vocab, merges, special_tokens=()):
        super().__init__(vocab, merges, special_tokens)
        MergesOfTheLatest.latest = self.ranks

    def merge_all(self, word):
        self.ranks = MergesOfTheLatest.latest
        return super().merge_all(word)


# pad_batch -----------------------------------------------------------------------------------------------------------


def _pad(sequences, pad_id, length, side, *, fits=True):
    """The right way, as two lists of lists."""
    longest = max(map(len, sequences))
    T = longest if length is None else length
    if longest > T and fits:
        raise ValueError("too long")
    if side not in ("left", "right"):
        raise ValueError("no such side")
    ids, marks = [], []
    for sequence in sequences:
        row, hole = list(sequence)[:T], max(0, T - len(sequence))
        left, right = (hole, 0) if side == "left" else (0, hole)
        ids.append([pad_id] * left + row + [pad_id] * right)
        marks.append([0] * left + [1] * len(row) + [0] * right)
    return ids, marks


def _tensors(ids, marks):
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(marks, dtype=torch.bool)


@wrong(
    "pad_batch",
    caught_by="test_a_token_may_equal_the_padding",
    hint="is_token is `ids != pad_id`, so a real token with that id counts as padding. Make it from the lengths.",
)
def mask_from_ids(sequences, pad_id, length=None, side="right"):
    ids, _ = _tensors(*_pad(sequences, pad_id, length, side))
    return ids, ids != pad_id


@wrong(
    "pad_batch",
    caught_by="test_shorter_ones_are_filled",
    hint="is_token is inverted. It is True where there is a token, False where there is padding.",
)
def mask_inverted(sequences, pad_id, length=None, side="right"):
    ids, is_token = _tensors(*_pad(sequences, pad_id, length, side))
    return ids, ~is_token


@wrong(
    "pad_batch",
    caught_by="test_shorter_ones_are_filled",
    hint="is_token holds numbers. Masks are boolean in this course: dtype=torch.bool.",
)
def mask_of_numbers(sequences, pad_id, length=None, side="right"):
    ids, is_token = _tensors(*_pad(sequences, pad_id, length, side))
    return ids, is_token.long()


@wrong(
    "pad_batch",
    caught_by="test_shorter_ones_are_filled",
    hint="The ids are float numbers. Ids are integers: dtype=torch.int64.",
)
def ids_of_floats(sequences, pad_id, length=None, side="right"):
    ids, is_token = _tensors(*_pad(sequences, pad_id, length, side))
    return ids.float(), is_token


@wrong(
    "pad_batch",
    caught_by="test_padding_on_the_left",
    hint="`side` is ignored, the padding always stands on the right. With side='left' tokens end in the last place.",
)
def always_right(sequences, pad_id, length=None, side="right"):
    _pad(sequences, pad_id, length, side)
    return _tensors(*_pad(sequences, pad_id, length, "right"))


@wrong(
    "pad_batch",
    caught_by="test_padding_on_the_left",
    hint="With side='left' the ids move, but is_token does not. Both must tell the same places.",
)
def mask_stays_right(sequences, pad_id, length=None, side="right"):
    return _tensors(_pad(sequences, pad_id, length, side)[0], _pad(sequences, pad_id, length, "right")[1])


@wrong(
    "pad_batch",
    caught_by="test_padding_on_the_left",
    hint="With side='left' the tokens come out in reverse. Fill in front of them and keep their order.",
)
def left_by_reversing(sequences, pad_id, length=None, side="right"):
    ids, marks = _pad(sequences, pad_id, length, side)
    if side == "left":
        ids = [row[::-1] for row in _pad(sequences, pad_id, length, "right")[0]]
    return _tensors(ids, marks)


@wrong(
    "pad_batch",
    caught_by="test_too_long_is_an_error",
    hint="A sequence longer than `length` is cut in silence. Raise a ValueError: who calls decides what to cut.",
)
def cuts_in_silence(sequences, pad_id, length=None, side="right"):
    return _tensors(*_pad(sequences, pad_id, length, side, fits=False))


@wrong(
    "pad_batch",
    caught_by="test_length_can_be_given",
    hint="`length` is ignored, the rows are as long as the longest sequence. With a length, T is that length.",
)
def length_ignored(sequences, pad_id, length=None, side="right"):
    _pad(sequences, pad_id, length, side)
    return _tensors(*_pad(sequences, pad_id, None, side))


@wrong(
    "pad_batch",
    caught_by="test_there_are_two_sides",
    hint='Any other side is taken for one of the two. Raise a ValueError unless it is "left" or "right".',
)
def any_side(sequences, pad_id, length=None, side="right"):
    return _tensors(*_pad(sequences, pad_id, length, "right" if side == "right" else "left"))


@wrong(
    "pad_batch",
    caught_by="test_shorter_ones_are_filled",
    hint="The result is (T, B). Each sequence is a row: (B, T).",
)
def one_column_each(sequences, pad_id, length=None, side="right"):
    ids, is_token = _tensors(*_pad(sequences, pad_id, length, side))
    return ids.T, is_token.T


@wrong(
    "pad_batch",
    caught_by="test_many_sequences_are_padded",
    hint="The padding is appended to the lists that were handed in, which the caller still needs. Make new ones.",
)
def lists_changed(sequences, pad_id, length=None, side="right"):
    ids, is_token = _tensors(*_pad(sequences, pad_id, length, side))
    for sequence, row in zip(sequences, ids.tolist(), strict=True):
        if isinstance(sequence, list):
            sequence[:] = row
    return ids, is_token
