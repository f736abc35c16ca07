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
# # Lab 05 · Blocks
#
# Attention lets tokens read each other. A layer needs more: a norm that sets the scale, an MLP that works on each
# token, and residual sums. You write them all, and put them together in three ways.
#
# - It uses the attention of labs 03 and 04: **yours** where it passed, the reference where it did not.
# - You need: the lesson *Blocks*, and `nn.Module`, `nn.Parameter` and `nn.Linear`. Time: about two hours.
#
# **Letters.** `B` batch, `T` tokens, `S` context tokens, `C` model width, `F` hidden width of the MLP.

# %% setup="05-blocks"
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfmlib import attention, heads
from tfmlib.course.check import check
from tfmlib.course.workshop import begin

begin("05-blocks")

# %% [markdown]
# ## 1 · `LayerNorm`
#
# $$y = \text{weight} \cdot \frac{x - \text{mean}}{\sqrt{\text{variance} + \epsilon}} + \text{bias}$$
#
# over the last axis: each token by itself.
#
# **Contract.** `LayerNorm(d_model, eps=1e-5)` has the parameters `weight`, ones at first, and `bias`, zeros at first,
# both `(C,)`. The variance is the biased one, divided by `C`. Compute in float32, or in
# float64 if `x` is; the result has `x`'s dtype.
#
# **Example.** `[1, 0, 0, 0]` has mean 0.25 and variance 0.1875. The first entry becomes 0.75 / 0.433 = 1.732. (With the
# unbiased variance, which is PyTorch's default, it would be 1.5.)
#
# Do not call `F.layer_norm` or `nn.LayerNorm`.

# %% piece="LayerNorm"

# %% check="LayerNorm"

# %% [markdown]
# ## 2 · `RMSNorm`
#
# The same without mean and bias: $y = \text{weight} \cdot x / \sqrt{\text{mean}(x^2) + \epsilon}$.
#
# **Contract.** `RMSNorm(d_model, eps=1e-5)` has the parameter `weight`, ones at first. Compute in float32, or in
# float64 if `x` is: in float16 the square of 300 is infinite. The result has `x`'s dtype. Do not call `F.rms_norm` or
# `nn.RMSNorm`.
#
# **Example.** `[3, 4]` has a mean square of 12.5. It becomes `[0.849, 1.131]`.

# %% piece="RMSNorm"

# %% check="RMSNorm"

# %% [markdown]
# ## 3 · `MLP`
#
# **Contract.** `MLP(d_model, d_ff, bias=True, activation=F.gelu)` computes `down(activation(up(x)))` with the linear
# layers `up` (C to F) and `down` (F to C). Both have a bias, or none has.

# %% piece="MLP"

# %% check="MLP"

# %% [markdown]
# ## 4 · `SwiGLU`
#
# **Contract.** `SwiGLU(d_model, d_ff)` computes `down(silu(gate(x)) * up(x))` with the linear layers `gate`, `up` (C
# to F) and `down` (F to C), without a bias. `silu` is `F.silu`.

# %% piece="SwiGLU"

# %% check="SwiGLU"

# %% [markdown]
# ## 5 · `PreNormBlock`
#
# From here on you get the parts ready-made, and only say how they are joined.
#
# **Contract.** `PreNormBlock(attention, mlp, norm1, norm2)` keeps the parts under these names. `forward` computes
#
# ```
# x = x + attention(norm1(x))
# x = x + mlp(norm2(x))
# ```
#
# `mask`, `positions` and `cache` are handed on to the attention, by keyword: `attention(..., mask=mask, ...)`.

# %% piece="PreNormBlock"

# %% check="PreNormBlock"

# %% [markdown]
# ## 6 · `PostNormBlock`
#
# **Contract.** The same parts, the other order:
#
# ```
# x = norm1(x + attention(x))
# x = norm2(x + mlp(x))
# ```

# %% piece="PostNormBlock"

# %% check="PostNormBlock"

# %% [markdown]
# ## 7 · `DecoderBlock`
#
# The decoder's layer of 2017 reads twice: its own tokens, and those of a context.
#
# **Contract.** `DecoderBlock(self_attention, cross_attention, mlp, norm1, norm2, norm3)` keeps the parts under these
# names. `forward(x, context, mask=None, context_mask=None)` computes
#
# ```
# x = norm1(x + self_attention(x))                      # with mask=mask
# x = norm2(x + cross_attention(x, context))            # with context=context, mask=context_mask
# x = norm3(x + mlp(x))
# ```
#
# Queries come from `x`, keys and values from the context. Give everything but `x` by keyword.

# %% piece="DecoderBlock"

# %% check="DecoderBlock"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### The gradient's road
#
# A stack of 24 layers. How much gradient arrives at the input, compared with the gradient at the output? And how alike
# are the tokens at the end? A cosine of 1 means that they are all the same.


# %%
class NoResidual(PreNormBlock):
    def forward(self, x, mask=None, positions=None, cache=None):
        x = self.attention(self.norm1(x), mask=mask)
        return self.mlp(self.norm2(x))


def layer(kind, C=32):
    return kind(heads.MultiHeadAttention(C, 4), MLP(C, 4 * C), LayerNorm(C), LayerNorm(C))


# %%
for kind in (PreNormBlock, PostNormBlock, NoResidual):
    torch.manual_seed(0)
    x = torch.randn(4, 16, 32, requires_grad=True)
    out = x
    for _ in range(24):
        out = layer(kind)(out)
    goal = torch.randn(out.shape)
    (out * goal).sum().backward()
    a, b = F.normalize(out[:, 0], dim=-1), F.normalize(out[:, 8], dim=-1)
    passed, alike = x.grad.norm() / goal.norm(), (a * b).sum(-1).mean()
    print(f"{kind.__name__:14} gradient passed on {passed:.2f}   cosine of two tokens {alike:.2f}")

# %% [markdown]
# ### Who mixes what
#
# Change one token. In the MLP only that token's output moves. Through attention, others move too.

# %%
torch.manual_seed(0)
x = torch.randn(1, 5, 32)
changed = x.clone()
changed[0, 2] = torch.randn(32)
for name, part in (("MLP", MLP(32, 128)), ("LayerNorm", LayerNorm(32)), ("attention", heads.MultiHeadAttention(32, 4))):
    moved = (part(changed) - part(x)).norm(dim=-1)[0] > 1e-6
    print(f"{name:9} moves tokens {moved.nonzero().flatten().tolist()}")

# %% [markdown]
# ### The size of the stream
#
# With norms inside the branches, nothing limits the sum: it grows with depth. With norms after the sum, it stays.

# %%
for kind in (PreNormBlock, PostNormBlock):
    torch.manual_seed(0)
    x, sizes = torch.randn(4, 16, 32), []
    with torch.no_grad():
        for depth in range(1, 25):
            x = layer(kind)(x)
            if depth in (1, 6, 12, 24):
                sizes.append(f"{depth} layers {x.square().mean().sqrt():.2f}")
    print(f"{kind.__name__:14}", ",  ".join(sizes))

# %% [markdown]
# ### Questions
#
# 1. `LayerNorm` of a token is the same for `x` and for `3 x + 5`. Why? And `RMSNorm`?
# 2. How many parameters has a block of width `C`, with `F = 4C` and without biases?
# 3. Which of the two blocks can do without a norm at the end of the stack?
#
# The lesson answers all three.
