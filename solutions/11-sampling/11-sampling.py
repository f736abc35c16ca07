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
# # Lab 11 · Sampling
#
# From logits to text: three ways to change a distribution, the draw, the loop, and a search.
#
# - You need: the lesson *Sampling*. Time: about three hours.
#
# **Letters.** `B` sequences, `T` tokens, `N` beams, `V` vocabulary. Logits have the shape `(..., V)`: any number of
# leading axes, each row a distribution of its own. A token that may not be chosen has the logit `-inf`.

# %% setup="11-sampling"
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tfmlib import sampling
from tfmlib.course.check import check
from tfmlib.course.workshop import begin

begin("11-sampling")

# %% [markdown]
# ## 1 · `apply_temperature`
#
# **Contract.** `logits / temperature`. Temperature 0 means greedy: the first of the largest logits keeps its value, all
# others become `-inf`. A negative temperature, or NaN, is a `ValueError`.
#
# **Example.** `[1, 3, 3]` at 0 gives `[-inf, 3, -inf]`, at 0.5 `[2, 6, 6]`.

# %% piece="apply_temperature"

# %% check="apply_temperature"

# %% [markdown]
# ## 2 · `keep_top_k`
#
# **Contract.** The `k` largest logits of each row keep their values, the rest become `-inf`. Exactly `k` stay: of equal
# ones those with the lower ids. All stay if `k >= V`. `k < 1` is a `ValueError`.
#
# **Example.** `[1, 3, 3, 3]` with `k = 2` gives `[-inf, 3, 3, -inf]`.
#
# **A hint.** A sort can be `stable`: it then leaves equal values in their order.

# %% piece="keep_top_k"

# %% check="keep_top_k"

# %% [markdown]
# ## 3 · `keep_top_p`
#
# **Contract.** Go down from the most likely token, of equal ones the lower id first, until the probabilities of what
# you have sum to `p` or more. These keep their logits, the rest become `-inf`. The token that crosses `p` stays, so
# there is always one. `p >= 1` keeps all. A negative `p`, or NaN, is a `ValueError`. Compute probabilities in at least
# float32.
#
# **Example.** Probabilities 0.5, 0.41, 0.09 and `p = 0.9`: 0.5 is not enough, 0.91 is. Two tokens stay.
#
# **A hint.** A token stays if what comes *before* it sums to less than `p`. `scatter` takes you back from sorted order.

# %% piece="keep_top_p"

# %% check="keep_top_p"

# %% [markdown]
# ## 4 · `sample`
#
# **Contract.** One token from each distribution `softmax(logits)`: `(..., V)` to ids `(...)`, int64. A logit of `-inf`
# is never drawn. `generator` is the only source of chance; torch's own if it is None. Probabilities in at least
# float32.
#
# You may use `torch.multinomial`, which takes at most two axes.

# %% piece="sample"

# %% check="sample"

# %% [markdown]
# ## 5 · `generate`
#
# **Contract.** Again and again: the model's logits at the last position, `apply_temperature`, then `keep_top_k`, then
# `keep_top_p` (a step whose argument is None is left out), `sample`, and the new token goes to the end.
#
# - `model(ids)` gives logits `(B, T, V)`.
# - With `eos_id`, a row that has chosen it is filled up with it, and the loop stops when all rows have.
# - While it runs the model is in eval mode, and no gradients are computed. Afterwards **every submodule's** mode is
#   what it was, also after an error.
#
# The result has the prompt in front: `(B, T + new)`.

# %% piece="generate"

# %% check="generate"

# %% [markdown]
# ## 6 · `beam_search`
#
# **Contract.** Keep the `n_beams` best continuations of one prompt `(T,)`, and return them as `(ids, score)`, the best
# first.
#
# - `log_probs(ids)` gives the next token's log-probabilities, `(N, T)` to `(N, V)`. Only beams that still grow are
#   asked about.
# - A beam's score is the sum of its new tokens' log-probabilities, divided by their number `** length_penalty`. `ids`
#   begin with the prompt.
# - In each step every growing beam is continued by every token. Finished beams and all continuations are ranked by
#   score together, and the best `n_beams` stay. Of equal scores that of the better beam of the step before comes first,
#   then the lower id.
# - A beam that chose `eos_id` is finished: it counts that token, and grows no more. The prompt may end with it.
# - A token of log-probability `-inf` is no continuation, so there may be fewer beams, or none.
# - The search ends after `max_new_tokens`, or when no beam grows. Without new tokens the score is 0. `n_beams < 1` is a
#   `ValueError`.

# %% piece="beam_search"

# %% check="beam_search"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### One distribution, reshaped
#
# The same five tokens through each of your functions.

# %%
logits = torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05]).log()
shapes = {
    "as it is": logits,
    "temperature 0.5": apply_temperature(logits, 0.5),
    "temperature 2": apply_temperature(logits, 2.0),
    "temperature 0": apply_temperature(logits, 0),
    "top-k 3": keep_top_k(logits, 3),
    "top-p 0.8": keep_top_p(logits, 0.8),
    "temperature 2, then top-p 0.8": keep_top_p(apply_temperature(logits, 2.0), 0.8),
    "top-p 0.8, then temperature 2": apply_temperature(keep_top_p(logits, 0.8), 2.0),
}
for name, reshaped in shapes.items():
    print(f"{name:30}", "  ".join(f"{p:.2f}" for p in reshaped.softmax(-1).tolist()))

# %% [markdown]
# ### A model that needs no training
#
# It has counted which character follows each six in the words of Python's documentation. That is a language model, too.

# %%
from collections import Counter, defaultdict

from tfmlib import data

words = [word for word in data.load_corpus("python-docs").split() if word.isascii() and word.strip("*.").isalpha()]
text = " ".join(words)
letters = data.Characters(text)
following = defaultdict(Counter)
for i in range(len(text) - 6):
    following[text[i : i + 6]][text[i + 6]] += 1


# %%
class SixLetters(nn.Module):
    """The logits of the next character, from the six before it: ids (B, T) -> (B, 1, V)."""

    def forward(self, ids):
        logits = torch.full((len(ids), 1, letters.vocab_size), -math.inf)
        for row, last in zip(logits, ids[:, -6:].tolist(), strict=True):
            for letter, count in following[letters.decode(last)].items():
                row[0, letters.encode(letter)[0]] = math.log(count)
        return logits


# %%
model, prompt = SixLetters(), torch.tensor([letters.encode("The function ")])
ways = {
    "greedy": {"temperature": 0},
    "temperature 0.5": {"temperature": 0.5},
    "as it is": {},
    "temperature 4": {"temperature": 4.0},
    "top-p 0.9": {"top_p": 0.9},
}
for name, how in ways.items():
    written = generate(model, prompt, 150, generator=torch.Generator().manual_seed(1), **how)
    print(f"--- {name}\n{letters.decode(written[0].tolist())}\n")

# %% [markdown]
# Greedy text goes in circles. Where it has been once, it goes the same way again.
#
# ### Likelier is not better
#
# Beam search finds likelier texts than greedy decoding. Read them.


# %%
def log_probs(ids):
    return model(ids)[:, 0].log_softmax(-1)


for n_beams in (1, 4, 16):
    ids, score = beam_search(log_probs, prompt[0], n_beams, max_new_tokens=60)[0]
    print(f"{n_beams:2} beams, log-probability {score:6.1f}: {letters.decode(ids.tolist())!r}")

# %% [markdown]
# ### Quality and diversity
#
# How many of the words that it writes exist, and how many different ones are there? Where do you want to be?

# %%
known = set(words)
for temperature in (0, 0.3, 0.6, 1.0, 2.0, 4.0):
    generator = torch.Generator().manual_seed(0)
    written = generate(model, prompt, 600, temperature=temperature, generator=generator)[0]
    found = letters.decode(written.tolist()).split()[:-1]
    exist, differ = sum(word in known for word in found) / len(found), len(set(found)) / len(found)
    print(f"temperature {temperature:3}: {exist:4.0%} of the words exist, {differ:4.0%} are different")

# %% [markdown]
# ### A trained model
#
# If a checkpoint is at hand (lab 06 says how to get one), your `generate` writes with it.

# %%
from tfmlib.models import checkpoints

found = checkpoints.find()
if found:
    trained, tokenizer, ids = found.load()
    how = {"temperature": 0.8, "top_p": 0.95, "generator": torch.Generator().manual_seed(0)}
    print(tokenizer.decode(generate(trained, torch.tensor([ids]), 100, **how)[0, 1:].tolist()))
else:
    print("skipped: no checkpoint is at hand")

# %% [markdown]
# ### Questions
#
# 1. Training handles all positions of a text at once. Why can generation not?
# 2. Two steps with the same `top_p` keep 1 token and 400. What does that say about the two distributions?
# 3. Why does beam search help in translation, and hurt in stories?
#
# The lesson answers all three.
