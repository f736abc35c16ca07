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
# # Lab 03 · Attention
#
# You write the five functions from which all attention is made. Each has a contract, a cell for your code, and a check.
# A check takes a second or less. It tells you which promise broke, what was expected and what came, and often the
# likely mistake.
#
# - A piece that passes is **kept** and used from then on, here and in all later labs.
# - A piece that is not done yet is replaced by the course's reference, so you can do the pieces in any order.
# - You need: tensors, broadcasting, and the lesson *Attention*. Time: about two hours.
#
# **Letters.** `B` batch, `T` queries, `S` keys, `D` width of a query and of a key, `Dv` width of a value. Three dots
# stand for any leading axes: none, a batch, or a batch and heads. A **mask** is boolean and `True` where a query may
# look.

# %% setup="03-attention"
import math

import torch
from torch import Tensor

from tfmlib.course.check import check
from tfmlib.course.workshop import begin

begin("03-attention")

# %% [markdown]
# ## 1 · `softmax`
#
# Scores become weights: positive numbers that sum to 1 along one axis.
#
# $$\text{softmax}(x)_i = \frac{e^{x_i}}{\sum_j e^{x_j}}$$
#
# **Contract.** `softmax(x, dim=-1)` returns a tensor of the same shape and dtype, which sums to 1 along `dim`.
#
# - It must be **stable**. $e^{1000}$ overflows, but only differences of scores matter: subtract each row's maximum
#   before you take exponentials. The result stays the same, since the factor $e^{-\max}$ cancels.
# - A score of `-inf` gets the weight 0. A row of nothing but `-inf` is not defined: no check asks for it.
# - Do not call torch's own: `torch.softmax`, `log_softmax`, `logsumexp`, in any form.
#
# **Example.** `softmax(tensor([0, ln 3]))` is `[0.25, 0.75]`: 1 to 3.

# %% piece="softmax"

# %% check="softmax"

# %% [markdown]
# ## 2 · `causal_mask`
#
# In a language model a token must not see what comes after it. The causal mask says so.
#
# **Contract.** `causal_mask(T, S=None)` returns a `(T, S)` **boolean** tensor, `True` where the query may see the key.
#
# - Without `S`, there are as many keys as queries.
# - With `S > T`, the queries are the **last** `T` of the `S` tokens: query `t` stands at position `S - T + t`. You will
#   need this when a cache already holds the first `S - T` keys.
# - More queries than keys is a `ValueError`.
#
# **Example.** `causal_mask(2, 3)`: two queries at positions 1 and 2, three keys at positions 0, 1, 2.
#
# | | key 0 | key 1 | key 2 |
# |---|---|---|---|
# | query at position 1 | True | True | False |
# | query at position 2 | True | True | True |

# %% piece="causal_mask"

# %% check="causal_mask"

# %% [markdown]
# ## 3 · `padding_mask`
#
# Sequences of unequal length travel in one tensor, filled up with padding. No query may read the padding.
#
# **Contract.** `padding_mask(is_token)` takes a `(B, S)` boolean tensor, `True` at tokens and `False` at padding, and
# returns a `(B, 1, 1, S)` boolean mask.
#
# Scores will have the shape `(B, H, T, S)`, with `H` heads. The two axes of 1 broadcast over heads and queries, so the
# padding is hidden **as a key**, from everyone.
#
# **Example.** `is_token = [[True, True, False]]` becomes a mask of shape `(1, 1, 1, 3)`.

# %% piece="padding_mask"

# %% check="padding_mask"

# %% [markdown]
# ## 4 · `attention_weights`
#
# Each query compares itself with every key, and spends a total weight of 1 on them.
#
# $$A = \text{softmax}\!\left(\frac{Q K^\top}{\sqrt D}\right)$$
#
# **Contract.** `attention_weights(q, k, mask=None)`
#
# | | shape |
# |---|---|
# | `q` | `(..., T, D)` |
# | `k` | `(..., S, D)` |
# | `mask` | boolean, broadcasts to `(..., T, S)`; `None` shows everything |
# | result | `(..., T, S)` |
#
# - A hidden key gets a weight of exactly 0, and the visible keys share the whole.
# - A query that may see **nothing** gets zeros, not NaN, and gradients stay finite. (A softmax over only `-inf` is
#   0/0.)
# - A mask that is not boolean is a `TypeError`.
# - You may call your `softmax` or torch's. Do not call `F.scaled_dot_product_attention`.
#
# **Example.** `D = 4` and scores `q·k` of `2 ln 3` and `0`: divided by $\sqrt 4$ they are `ln 3` and `0`, so the
# weights are 0.75 and 0.25.

# %% piece="attention_weights"

# %% check="attention_weights"

# %% [markdown]
# ## 5 · `scaled_dot_product_attention`
#
# The weights mix the values. That is the whole of attention.
#
# $$O = A V$$
#
# **Contract.** `scaled_dot_product_attention(q, k, v, mask=None)` with `q (..., T, D)`, `k (..., S, D)` and
# `v (..., S, Dv)` returns `(..., T, Dv)`. Masks as before. A query that may see nothing gets zeros. Do not call
# `F.scaled_dot_product_attention`.
#
# **Example.** A query of zeros prefers no key. Its output is the mean of the values: values 0 and 4 give 2.

# %% piece="scaled_dot_product_attention"

# %% check="scaled_dot_product_attention"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your functions where they passed, and the reference where they did not.
#
# ### The future does not reach the past
#
# Six tokens attend to themselves under a causal mask. Token 4 is changed. Which outputs move?

# %%
g = torch.Generator().manual_seed(0)
x = torch.randn(1, 6, 8, generator=g)
changed = x.clone()
changed[:, 4] += 1.0

for name, mask in [("causal", causal_mask(6)), ("no mask", None)]:
    before = scaled_dot_product_attention(x, x, x, mask)
    after = scaled_dot_product_attention(changed, changed, changed, mask)
    print(f"{name:8}", [f"{d:.3f}" for d in (after - before).norm(dim=-1)[0].tolist()])

# %% [markdown]
# Under the causal mask outputs 0 to 3 do not move at all: 0.000 is exact. This is what lets training use all positions
# of a text at once. Output `t` is a prediction from tokens `0 ... t` only, although all of them are in the tensor.
#
# ### Without the scale, a query reads one key
#
# How large is the largest of 16 weights, on average? With the scale the width does not matter.

# %%
for D in (4, 16, 64, 256):
    q, k = torch.randn(2000, D, generator=g), torch.randn(16, D, generator=g)
    scaled = attention_weights(q, k).amax(-1).mean().item()
    unscaled = attention_weights(q * math.sqrt(D), k).amax(-1).mean().item()
    print(f"D = {D:3}   scaled {scaled:.2f}   not scaled {unscaled:.2f}")

# %% [markdown]
# ### A sequence of nothing but padding
#
# One such row in a batch is enough to turn a whole training run into NaN. Compare yours with the formula written down
# naively.

# %%
is_token = torch.tensor([[True, True, True], [False, False, False]])
mask = padding_mask(is_token)[:, 0]  # (B, 1, S): no heads here
q, k, v = torch.randn(3, 2, 3, 4, generator=g)
naive = (q @ k.mT / 2).masked_fill(~mask, -math.inf).softmax(-1) @ v
print("naive:", naive[1, 0].tolist())
print("yours:", scaled_dot_product_attention(q, k, v, mask)[1, 0].tolist())

# %% [markdown]
# ### Questions
#
# 1. The mask for `T = 1` and `S = 100` has no `False`. Why does one new token need no causal mask?
# 2. A batch has 8 sequences, 12 heads and 4096 tokens. How many bytes do the weights of one layer take in float32?
# 3. A key gets the weight 0.9. Can its value still have no influence on the output at all?
#
# The lesson answers all three. Next: lab 04, where several heads share one matrix product and use what you wrote here.
