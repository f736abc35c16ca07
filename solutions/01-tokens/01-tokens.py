# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lab 01 · Tokens
#
# A transformer reads integers. Here you write the way from text to integers and back: byte-pair encoding, as GPT-2 does
# it. At the end your tokenizer gives the ids of the published GPT-2 vocabulary, and you pad sequences into one batch.
#
# - **The cells to edit** say `Write your code here`. Replace the `raise` line, run the cell, then run the check below.
# - A check takes about a second. It says which promise broke, and often which mistake it is.
# - A piece that passes is kept in `mine/`, and it is used from then on. Until then the lab uses the reference.
# - You need: the lesson *Tokens*, and Python's `bytes`, `dict` and `Counter`. Time: about two hours.
#
# **Words.** A *symbol* is a `bytes` object, at first a single byte. A *word* is a tuple of symbols. A *pair* is a
# tuple of two symbols that are neighbours in a word.

# %% setup="01-tokens"
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tfmlib import vocabularies
from tfmlib.course.check import check
from tfmlib.course.workshop import begin
from tfmlib.tokens import GPT2_PATTERN, split_specials

begin("01-tokens")

# %% [markdown]
# Two things are given. `GPT2_PATTERN.findall(text)` cuts text into pre-tokens, each with the space before it.
# `split_specials(text, special_tokens)` cuts it at the special tokens: it yields `(part, is_special)`.

# %%
print(GPT2_PATTERN.findall("I'd like 2 hugs, please!"))
print(list(split_specials("Hello<end>Bye<end>", ["<end>"])))

# %% [markdown]
# ## 1 · `pair_counts`
#
# **Contract.** `pair_counts(words)` takes `{word: how often it occurs}` and returns a `Counter` of pairs. A word that
# occurs 10 times gives 10 to each of its pairs. Every place counts: the pair `(a, a)` occurs twice in `aaa`.
#
# **Example.** `hug` 10 times and `hu` once: the pair `(h, u)` occurs 11 times, `(u, g)` 10 times.

# %% piece="pair_counts"

# %% check="pair_counts"

# %% [markdown]
# ## 2 · `merge_pair`
#
# **Contract.** `merge_pair(word, pair)` joins the pair wherever it stands, from left to right, without overlap. It
# returns a tuple.
#
# **Example.** The pair `(a, a)` in `a a a a a` gives `aa aa a`: two merges, and one `a` is left at the end.

# %% piece="merge_pair"

# %% check="merge_pair"

# %% [markdown]
# ## 3 · `train_bpe`
#
# Count the pre-tokens of the text. Turn each into a word of single bytes. Then, again and again: count the pairs,
# choose the one that occurs most often, remember it, merge it in every word.
#
# **Contract.** `train_bpe(text, vocab_size, special_tokens=())` returns `(vocab, merges)`.
#
# - `vocab` maps ids to bytes: first the 256 bytes, then one id for each merge, then the special tokens. `vocab_size`
#   counts all three. If it is too small for bytes and special tokens, raise a `ValueError`.
# - `merges` is the list of merged pairs, in the order they were learned.
# - Of pairs that occur equally often, take the greater one, as Python compares tuples of bytes: `max(pairs)`.
# - Merges stay inside pre-tokens. Special tokens in the text are cut out: they are not counted.
# - Stop early when no pair is left.
#
# **Example.** `"hug hug hugs"`, two merges. The pre-tokens are `hug` once, ` hug` once, ` hugs` once. The pairs `(h,
# u)` and `(u, g)` both occur 3 times. `u` is greater than `h`, so `(u, g)` is first, and then `(h, ug)`.
#
# Counting all pairs anew after each merge is right, and fast enough here. The reference updates the counts of the words
# that changed, and is a hundred times faster on long texts.

# %% piece="train_bpe"

# %% check="train_bpe"

# %% [markdown]
# ## 4 · `Tokenizer`
#
# Encoding repeats what training did, in the same order. In each pre-token, look at all pairs of neighbours. Merge the
# one that was learned first (the lowest rank). Repeat until no pair is a merge. It is *not* the longest match.
#
# **Contract.** `Tokenizer(vocab, merges, special_tokens=())`.
#
# - `encode(text)` returns a list of ids. Text is cut at the special tokens, then into pre-tokens. Each special token is
#   one id. The rest starts from single bytes.
# - `decode(ids)` takes a list or a 1-D tensor, and returns the text. Join all bytes first, then decode. Invalid UTF-8
#   becomes `U+FFFD`, never an error.
# - Special tokens that `vocab` lacks get the ids from `max(vocab) + 1` onwards, in the order given.
# - Where several ids stand for equal bytes, `encode` uses the first one in `vocab`. A merged symbol that has no id is
#   given as its single bytes. A byte without an id, or an unknown id in `decode`, is a `ValueError`.
#
# `from_gpt2` and `from_llama2c` are given: other ways to make a `Tokenizer`. The method `_encode_pre_token` is a
# suggestion: you may write it, or do without it.

# %% piece="Tokenizer"

# %% check="Tokenizer"

# %% [markdown]
# ## 5 · `pad_batch`
#
# **Contract.** `pad_batch(sequences, pad_id, length=None, side="right")` makes one rectangle of sequences. It returns
# `ids (B, T)`, int64, and `is_token (B, T)`, bool: `True` where there is a token and `False` where there is padding.
# `T` is `length`, or that of the longest sequence. A longer sequence is a `ValueError`, and so is a side other than
# `"right"` and `"left"`.
#
# **Example.** `[[5, 6], [7]]` with `pad_id=0` gives `[[5, 6], [7, 0]]`, and `[[5, 6], [0, 7]]` on the left.
#
# Beware: the pad id may be the id of a real token. GPT-2 has no pad token, and people pad it with `<|endoftext|>`. So
# `is_token` follows from the lengths, not from the ids.

# %% piece="pad_batch"

# %% check="pad_batch"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### A vocabulary of your own
#
# Python's documentation comes with every Python. Train on a part of it, and look at the longest symbols.

# %%
from pydoc_data.topics import topics

text = "".join(topics.values())[:100_000]
vocab, merges = train_bpe(text, 256 + 200, ["<end>"])
tokenizer = Tokenizer(vocab, merges, ["<end>"])
print("first merges: ", [left + right for left, right in merges[:8]])
print("longest symbols:", sorted(vocab.values(), key=len)[-8:])

# %% [markdown]
# ### How many tokens does a text take?
#
# The vocabulary was learned from English. Other texts are cut into smaller symbols, down to single bytes.

# %%
samples = {
    "English": "The value of the expression is the value of the last object.",
    "code": "for i in range(10):\n    print(i, i ** 2)\n",
    "Chinese": "表达式的值是最后一个对象的值。",
}
for name, sample in samples.items():
    ids = tokenizer.encode(sample)
    assert tokenizer.decode(ids) == sample
    print(f"{name:8} {len(sample):3} characters {len(sample.encode()):3} bytes {len(ids):3} tokens")

# %% [markdown]
# ### Merge after merge
#
# One word, cut with the first n merges only. Each row joins some symbols of the row before, as long as it has merges.

# %%
for n in (0, 10, 20, 40, 80, 120, 160, 200):
    first = Tokenizer(vocab, merges[:n])
    print(f"{n:3} merges:", "|".join(first.decode([i]) for i in first.encode(" expression")))

# %% [markdown]
# ### A batch
#
# Three texts of different lengths in one rectangle. The attention of chapter 3 takes `is_token` as its padding mask.

# %%
texts = ["Hello", "What is a lambda expression?", "No."]
ids, is_token = pad_batch([tokenizer.encode(t) for t in texts], pad_id=tokenizer.encode("<end>")[0])
print(ids.shape, is_token.sum(-1).tolist(), "tokens of", ids.shape[1])
print(f"{1 - is_token.float().mean():.0%} of the batch is padding")

# %% [markdown]
# ### Questions
#
# 1. Why is `is_token` not `ids != pad_id`?
# 2. Decode each id of an emoji by itself and join the results. What do you get, and why?
# 3. What does a larger vocabulary save, and what does it cost?
#
# The lesson answers all three.
