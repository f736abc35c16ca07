"""Our tokenizer gives tiktoken's ids on GPT-2's merges, and llama2.c's on its own; training learns as tokenizers."""

import os
import random
import struct
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmlib import tokens

from ..bench.tokens import ties, trained_by_tokenizers
from ..same import SEED_VARIABLE
from .data import data

tiktoken = pytest.importorskip("tiktoken")

PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END = "<|endoftext|>"

REAL = {
    "english": "I'd say it's 10 o'clock; they'll've known that we're late -- don't you think?\n\n\tYes  ,   I DO.",
    "chinese": "市场上人很多,天气也好。\n我们买了三斤苹果(一共12.5元),然后回家。",
    "emoji": "👍🏽 👩‍👩‍👧‍👦 🇨🇳🇧🇷 ☕️ é é ﬁ ⅷ ½ ¼",
    "code": "def f(x):\n    return {k: v**2 for k, v in x.items() if k != '__init__'}  # 0x1F\r\n\treturn",
    "blanks": " \n \n\n   \t\t \u00a0\u2003 x \u3000y\u200b  ",
    "special": f"a{END}b{END}{END} <|endof text|> <|endoftext",
    "numbers": "3.14159 1,000,000 2026-11-29 ٣٤٥ 一二三 x2 2x",
    "nothing": "",
    "scripts": "Привет, мир! こんにちは世界 안녕하세요 שלום مرحبا नमस्ते Ελληνικά",
    "zeros": "\x00\x01\x7f\x80\x85\ufeff\uffff\U0010ffff",
}  # fmt: skip


@pytest.fixture(scope="module")
def ours():
    return tokens.Tokenizer.from_gpt2(data("gpt2/encoder.json"), data("gpt2/vocab.bpe"))


@pytest.fixture(scope="module")
def theirs(ours):
    ranks = {symbol: i for i, symbol in ours.vocab.items() if symbol != END.encode()}
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={END: 50_256})


def _agree(ours, theirs, text):
    ids = ours.encode(text)
    assert ids == theirs.encode(text, allowed_special="all"), text
    assert ours.decode(ids) == text


def test_the_published_vocabulary_is_whole(ours):
    assert len(ours.vocab) == 50_257
    assert len(ours.merges) == 50_000
    assert ours.encode("Hello,") == [15_496, 11]
    assert ours.encode(END) == [50_256]
    assert [ours.vocab[256 + rank] for rank in range(50_000)] == [left + right for left, right in ours.merges]


@pytest.mark.parametrize("name", REAL)
def test_real_text_equals_tiktoken(name, ours, theirs):
    _agree(ours, theirs, REAL[name])
    _agree(ours, theirs, REAL[name] * 7)


def test_every_line_of_tiny_shakespeare_equals_tiktoken(ours, theirs):
    text = data("tinyshakespeare.txt").read_text()
    lines = text.splitlines(keepends=True)
    assert len(lines) == 40_000
    for line in lines:
        _agree(ours, theirs, line)
    _agree(ours, theirs, text)


def _random_texts(n):
    """Strings of any Unicode but surrogates, which no UTF-8 can hold: whole planes, single scripts, and mixtures."""
    random_ = random.Random(int(os.environ.get(SEED_VARIABLE, "0")))
    usual = [chr(c) for c in range(0x3000) if unicodedata.category(chr(c)) not in ("Cs", "Cn")]
    for i in range(n):
        length = random_.randrange(40)
        if i % 3 == 0:
            codes = (random_.randrange(sys.maxunicode + 1) for _ in range(length))
            yield "".join(chr(c) for c in codes if not 0xD800 <= c < 0xE000)
        elif i % 3 == 1:
            yield "".join(random_.choices(usual, k=length))
        else:
            yield "".join(random_.choices(" \n\t'.,-_019aeinorstTHELS你é🙂", k=length))


def test_ten_thousand_random_texts_equal_tiktoken(ours, theirs):
    count = 0
    for text in _random_texts(10_000):
        _agree(ours, theirs, text)
        count += 1
    assert count == 10_000


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_equals_tiktoken(ours, theirs, text):
    _agree(ours, theirs, text)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 50_256), max_size=12))
def test_any_ids_decode_as_tiktokens(ours, theirs, ids):
    """Also where the bytes are not valid UTF-8."""
    assert ours.decode(ids) == theirs.decode(ids)


def test_malformed_bytes_decode_as_tiktokens(ours, theirs):
    single = {symbol[0]: i for i, symbol in ours.vocab.items() if len(symbol) == 1}
    for raw in (b"\xff", b"\xe4\xbd", b"a\xc3", b"\xf0\x9f\x98 \xf0\x9f\x98\x80", b"\xed\xa0\x80", b"\xc0\xaf\x80"):
        ids = [single[byte] for byte in raw]
        assert ours.decode(ids) == theirs.decode(ids) == raw.decode(errors="replace")


# Training -------------------------------------------------------------------------------------------------------------


def test_training_differs_from_tokenizers_in_ties_only():
    """Each of their merges has the largest count, too; ours is the greatest pair of those that tie."""
    text, n_merges = data("tinyshakespeare.txt").read_text()[:60_000], 200
    _, ours = tokens.train_bpe(text, 256 + n_merges)
    pytest.importorskip("tokenizers")
    _, theirs = trained_by_tokenizers(text, 256 + n_merges)
    decided = 0
    for pair, tied in zip(theirs, ties(text, theirs), strict=True):
        assert pair in tied
        decided += len(tied) == 1
    for pair, tied in zip(ours, ties(text, ours), strict=True):
        assert pair == max(tied)
    assert decided > 100  # else the counts would decide little
    assert len(set(ours) & set(theirs)) > 190
    first = next(i for i, tied in enumerate(ties(text, ours)) if len(tied) > 1)
    assert ours[:first] == theirs[:first]


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="abc '\n你", max_size=80), room=st.integers(0, 12))
def test_training_equals_counting_anew_each_time(text, room):
    _, merges = tokens.train_bpe(text, 256 + room)
    tied = list(ties(text, merges))
    assert [max(pairs) for pairs in tied] == merges
    if len(merges) < room:  # it stopped early: no pair is left
        words = [tuple(bytes([b]) for b in word.encode()) for word in tokens.GPT2_PATTERN.findall(text)]
        for pair in merges:
            words = [tokens.merge_pair(word, pair) for word in words]
        assert all(len(word) == 1 for word in words)


# llama2.c -------------------------------------------------------------------------------------------------------------


def _llama2c_encode(tokens_with_scores, text):
    """llama2.c's own way: characters, or bytes where a character is no token; then the best score first, leftmost."""
    index = {piece: i for i, (_, piece) in reversed(list(enumerate(tokens_with_scores)))}
    ids = []
    for character in text:
        raw = character.encode()
        ids += [index[raw]] if raw in index else [byte + 3 for byte in raw]
    pieces = [piece for _, piece in tokens_with_scores]
    while True:
        best = None
        for i in range(len(ids) - 1):
            joined = index.get(pieces[ids[i]] + pieces[ids[i + 1]])
            if joined is not None and (best is None or tokens_with_scores[joined][0] > best[0]):
                best = (tokens_with_scores[joined][0], i, joined)
        if best is None:
            return ids
        ids[best[1] : best[1] + 2] = [best[2]]


def test_a_llama2c_vocabulary_gives_llama2cs_ids():
    raw = data("tok512.bin").read_bytes()
    at, listed = 4, []
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        listed.append((score, raw[at + 8 : at + 8 + length]))
        at += 8 + length
    ours = tokens.Tokenizer.from_llama2c(data("tok512.bin"))
    shakespeare = data("tinyshakespeare.txt").read_text()
    texts = [' "Echoes of vectors unfold, a gentle hum of precision', " – σ 25° ö ε λ μ ’ 日本 🙂", *REAL.values()]
    for text in [*texts, *shakespeare[:60_000].splitlines()]:
        text = text.replace(END, "")
        ids = ours.encode(text)
        assert ids == _llama2c_encode(listed, text), text
        assert ours.decode(ids) == text


def test_damaged_vocabulary_files_are_errors_that_name_the_place(tmp_path):
    raw = data("tok512.bin").read_bytes()
    path = tmp_path / "tok.bin"
    for n in (0, 7, len(raw) - 1):
        path.write_bytes(raw[:n])
        with pytest.raises(ValueError, match=r"byte \d+"):
            tokens.Tokenizer.from_llama2c(path)
    encoder, bpe = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    encoder.write_text('{"a": 0, "b": 1, "ab": 2}', encoding="utf-8")
    bpe.write_text("#version: 0.2\na b\na b c\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab\.bpe, line 3"):
        tokens.Tokenizer.from_gpt2(encoder, bpe)
    bpe.write_text("#version: 0.2\na 你\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 2.*'你'"):
        tokens.Tokenizer.from_gpt2(encoder, bpe)
    encoder.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"encoder\.json"):
        tokens.Tokenizer.from_gpt2(encoder, bpe)
