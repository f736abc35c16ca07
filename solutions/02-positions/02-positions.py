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
# # Lab 02 · Positions
#
# Ids become vectors, and vectors learn where they stand. You write the embedding, the sinusoids of 2017, and the rotary
# positions of today's models.
#
# - **The cells to edit** say `Write your code here`. Replace the `raise` line, run the cell, then run the check below.
# - You need: the lesson *Positions*, and PyTorch indexing and broadcasting. Time: about an hour and a half.
#
# **Letters.** `B` batch, `T` tokens, `V` vocabulary, `C` model width, `H` heads, `D` width of a head.

# %% setup="02-positions"
import torch
from torch import Tensor

from tfmlib import attention
from tfmlib.course.check import check
from tfmlib.course.workshop import begin

begin("02-positions")

# %% [markdown]
# ## 1 · `embed`
#
# **Contract.** `embed(ids, table)` gives the row of each id: `(...)` integers and `(V, C)` make `(..., C)`. An id
# outside `0 ... V - 1` is an error. Beware: `table[-1]` is no error in PyTorch, it reads the last row.
#
# **Example.** With the table `[[0, 1], [2, 3], [4, 5]]`, the ids `[2, 0]` give `[[4, 5], [0, 1]]`.
#
# Do not call `F.embedding` or `nn.Embedding`.

# %% piece="embed"

# %% check="embed"

# %% [markdown]
# ## 2 · `rope_angles`
#
# One angle for each position and each pair of features. Pair 0 turns fastest. The sinusoids use the same angles, so
# this comes first.
#
# **Contract.** `rope_angles(positions, D, base=10_000.0)` takes positions `(T,)` or `(B, T)` and gives `(..., T,
# D//2)`: `positions * base ** (-2i / D)` for `i = 0 ... D/2 - 1`, in radians.
#
# - Positions may be fractions. Compute in at least float32. For float64 positions the result is float64, with
#   all its digits. Beware: `torch.arange(0, D, 2) / D` is float32.
# - An odd `D` is a `ValueError`.
#
# **Example.** `D = 4`, so the factors are `1` and `10_000 ** -0.5 = 0.01`. Position 3 gives `[3, 0.03]`.

# %% piece="rope_angles"

# %% check="rope_angles"

# %% [markdown]
# ## 3 · `sinusoidal`
#
# **Contract.** `sinusoidal(T, C, base=10_000.0)` gives `(T, C)` in float32. Entries `2i` and `2i + 1` of row `t` are
# the sine and the cosine of `t * base ** (-2i / C)`: sines and cosines take turns. An odd `C` is a `ValueError`.
#
# **Example.** Row 0 is `[0, 1, 0, 1, ...]`. Row 1 for `C = 4` is `[sin 1, cos 1, sin 0.01, cos 0.01]`.

# %% piece="sinusoidal"

# %% check="sinusoidal"

# %% [markdown]
# ## 4 · `apply_rope`
#
# Turn each pair `(a, b)` of features by the angle of its position:
#
# $$(a, b) \to (a \cos\theta - b \sin\theta,\; a \sin\theta + b \cos\theta)$$
#
# **Contract.** `apply_rope(x, positions, base=10_000.0, interleaved=False)` takes `x (..., T, D)` and gives the same
# shape.
#
# | `interleaved` | pair i is | used by |
# |---|---|---|
# | `False` (half-split) | features `i` and `i + D/2` | this course, Llama in Hugging Face's layout |
# | `True` | features `2i` and `2i + 1` | the paper, Llama's first release |
#
# - `positions` is `(T,)`, or `(B, T)` with a row for each sequence. With `(B, T)` positions, `x` may have a head axis:
#   `(B, H, T, D)`. All heads of a sequence turn alike.
# - Compute in at least float32, and in float64 if `x` is float64: the angles too. Return `x`'s dtype. In half
#   precision, position 1001 is not even a number.
#
# **Example.** `[1, 0]` at position 1 becomes `[cos 1, sin 1] = [0.5403, 0.8415]`. At position 0 nothing changes.

# %% piece="apply_rope"

# %% check="apply_rope"

# %% [markdown]
# ## 5 · `interpolate_positions`
#
# A model was trained on `trained_length` positions, and a text has more. Squeeze the new positions into the old range.
#
# **Contract.** `interpolate_positions(positions, trained_length, length)` gives `positions * trained_length / length`
# where `length > trained_length`, and the positions unchanged otherwise.
#
# **Example.** Trained on 2, length 4: `[0, 1, 2, 3]` becomes `[0, 0.5, 1, 1.5]`.

# %% piece="interpolate_positions"

# %% check="interpolate_positions"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### Without positions, order is lost
#
# Attention over a shuffled sentence gives the shuffled result, and nothing else.

# %%
torch.manual_seed(0)
x = torch.randn(1, 6, 16)  # six tokens without positions
order = torch.randperm(6)
plain = attention.scaled_dot_product_attention(x, x, x)
shuffled = attention.scaled_dot_product_attention(x[:, order], x[:, order], x[:, order])
print("without positions:", torch.allclose(plain[:, order], shuffled, atol=1e-6))
placed = x + sinusoidal(6, 16)
a = attention.scaled_dot_product_attention(placed, placed, placed)
b = x[:, order] + sinusoidal(6, 16)
b = attention.scaled_dot_product_attention(b, b, b)
print("with positions:   ", torch.allclose(a[:, order], b, atol=1e-6))

# %% [markdown]
# ### Only the distance counts
#
# The same query and key, at different places with the same distance: the score stays.

# %%
q, k = torch.randn(2, 1, 64, dtype=torch.float64)
for m, n in [(5, 2), (105, 102), (4005, 4002), (5, 3)]:
    turned = apply_rope(q, torch.tensor([m])), apply_rope(k, torch.tensor([n]))
    print(f"query at {m:4}, key at {n:4}: score {(turned[0] * turned[1]).sum():.6f}")

# %% [markdown]
# ### The two pairings are the same up to the order of features
#
# But a model trained with one and run with the other gets wrong scores, without any error.

# %%
q, k = torch.randn(2, 8, 64)
places = torch.arange(8)
to_halves = torch.cat([torch.arange(0, 64, 2), torch.arange(1, 64, 2)])  # even features first
pairs = [apply_rope(x, places, interleaved=True) for x in (q, k)]
halves = [apply_rope(x[:, to_halves], places) for x in (q, k)]
mixed = [apply_rope(x, places) for x in (q, k)]
right = pairs[0] @ pairs[1].T
print(f"features reordered: scores differ by {(halves[0] @ halves[1].T - right).abs().max():.6f}")
print(f"wrong pairing:      scores differ by {(mixed[0] @ mixed[1].T - right).abs().max():.6f}")

# %% [markdown]
# ### Questions
#
# 1. Why does rotation act on queries and keys, and not on values?
# 2. How many parameters has a learned table for 4,096 positions of width 1,024? And rotary positions?
# 3. A model "accepts 128,000 tokens". Which two other things would you measure before you use it so?
#
# The lesson answers all three.
