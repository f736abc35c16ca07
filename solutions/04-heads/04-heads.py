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
# # Lab 04 · Heads
#
# One softmax gives one weighted mean. Here you let a layer take several at once: you cut the width into heads, share
# keys between them, and put it all into one module, `MultiHeadAttention`, which can be the attention of GPT-2, of Llama
# and of the 2017 encoder-decoder.
#
# - It uses the attention of lab 03: **yours** where it passed, the reference where it did not.
# - You need: the lesson *Heads*, and `nn.Module` and `nn.Linear`. Time: about two hours.
#
# **Letters.** `B` batch, `T` queries, `S` keys, `C` model width, `H` query heads, `K` key/value heads, `D` width of a
# head. A mask is boolean and `True` where a query may look.

# %% setup="04-heads"
import torch
from torch import Tensor, nn

from tfmlib import attention
from tfmlib import positions as rotary
from tfmlib.course.check import check
from tfmlib.course.workshop import begin

begin("04-heads")

# %% [markdown]
# ## 1 · `split_heads`
#
# One matrix product makes the features of all heads. Splitting gives each head its block.
#
# **Contract.** `split_heads(x, n_heads)` turns `(B, T, H*D)` into `(B, H, T, D)`. Head `h` holds the features
# `h*D ... h*D + D - 1` of every token. A width that does not divide into the heads is a `ValueError`.
#
# **Example.** Two tokens of width 6, two heads:
#
# ```
# token 0:  0  1  2 | 3  4  5         head 0: [[0, 1, 2], [6, 7, 8]]
# token 1:  6  7  8 | 9 10 11         head 1: [[3, 4, 5], [9, 10, 11]]
# ```
#
# Beware of the short way, `x.view(B, H, T, D)`. The shape is right, and the tokens are mixed.

# %% piece="split_heads"

# %% check="split_heads"

# %% [markdown]
# ## 2 · `merge_heads`
#
# **Contract.** `merge_heads(x)` turns `(B, H, T, D)` into `(B, T, H*D)`: each token gets its heads side by side, head 0
# first. It undoes `split_heads`, for any layout in memory.

# %% piece="merge_heads"

# %% check="merge_heads"

# %% [markdown]
# ## 3 · `repeat_kv`
#
# In grouped-query attention several query heads read the same key head. The plainest way is to copy the key heads.
#
# **Contract.** `repeat_kv(x, n_repeat)` turns `(B, K, S, D)` into `(B, K*n_repeat, S, D)`. Query head `h` reads key
# head `h // n_repeat`, so copies stand next to each other: heads `a, b` repeated twice are `a, a, b, b`.
#
# You may call `repeat_interleave`. Gradients must flow: a key head's gradient is the sum over its copies.

# %% piece="repeat_kv"

# %% check="repeat_kv"

# %% [markdown]
# ## 4 · `MultiHeadAttention`
#
# The whole layer. Take it in stages; the checks are in this order, and each names the stage that fails.
#
# **a. Projections.** `MultiHeadAttention(d_model, n_heads, n_kv_heads=None, head_dim=None, bias=False, rope_base=None)`
#
# | layer | in | out |
# |---|---|---|
# | `q_proj` | C | H·D |
# | `k_proj`, `v_proj` | C | K·D |
# | `o_proj` | H·D | C |
#
# All are `nn.Linear`; all have a bias or none has. `n_kv_heads` defaults to H and `head_dim` to C / H. It is a
# `ValueError` if K does not divide H, or if C does not divide into heads of a default width.
#
# **b. Self-attention.** `forward(x)` with `x (B, T, C)`: project, split, repeat the key and value heads, attend, merge,
# `o_proj`. `mask` is handed on to attention. Without one, every query sees everything.
#
# **c. Cross-attention.** With `context (B, S, C)`, queries still come from `x`, keys and values from the context.
#
# **d. Rotation.** With `rope_base`, queries and keys are turned by their positions before they meet:
# `rotary.apply_rope(q, positions, self.rope_base)`. Values never are, and in cross-attention nothing is. `positions`
# default to `0, 1, 2 ...`. (Chapter 02 explains the rotation; here you only call it.)
#
# **e. Cache.** `cache` is one layer's memory of earlier tokens. `cache.length` says how many it holds, and
# `keys, values = cache.append(k, v)` adds the new ones, `(B, K, T, D)`, and returns all so far. Positions then default
# to those that follow: `cache.length, cache.length + 1, ...`. Read the length before you append, and append keys that
# are already turned. A cache together with a context is a `ValueError`.
#
# Call `attention.scaled_dot_product_attention` for the attention itself: that is yours from lab 03, if it passed.
# `F.scaled_dot_product_attention` is allowed too; `nn.MultiheadAttention` is not.

# %% piece="MultiHeadAttention"

# %% check="MultiHeadAttention"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### Same parameters, any number of heads
#
# The number of heads changes how the features are read, not how many parameters there are. Fewer key heads do save
# some.

# %%
for H, K in [(1, 1), (4, 4), (8, 8), (8, 2), (8, 1)]:
    layer = MultiHeadAttention(64, H, n_kv_heads=K)
    count = sum(p.numel() for p in layer.parameters())
    print(f"H = {H}  K = {K}   parameters {count:6}   cached numbers a token {2 * K * (64 // H):3}")

# %% [markdown]
# The last column is why grouped heads exist. A model that generates keeps these numbers for every token so far, in
# every layer, and reads them all again for every new token.
#
# ### A cache changes the work, not the result
#
# Eight tokens in one pass under a causal mask, and the same eight one at a time. The cache here is a list of tensors.


# %%
class LayerCache:
    def __init__(self):
        self.keys, self.values = [], []

    @property
    def length(self):
        return sum(k.shape[2] for k in self.keys)

    def append(self, k, v):
        self.keys.append(k)
        self.values.append(v)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


# %%
torch.manual_seed(0)
layer, cache = MultiHeadAttention(64, 8, n_kv_heads=2, rope_base=10_000.0), LayerCache()
x = torch.randn(1, 8, 64)
with torch.no_grad():
    at_once = layer(x, mask=attention.causal_mask(8))
    one_by_one = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(8)], dim=1)
print(f"largest difference: {(at_once - one_by_one).abs().max().item():.1e}")

# %% [markdown]
# A single new token needs no mask: everything in the cache lies in its past.
#
# ### Take a head away
#
# `o_proj` adds up what the heads found: head `h` speaks through its columns `h*D ... h*D + D - 1`. Setting them to zero
# silences it. In this untrained layer all heads weigh about the same; the lesson shows a trained one.

# %%
D = 64 // 8
with torch.no_grad():
    whole = layer(x)
    for h in range(8):
        kept = layer.o_proj.weight.clone()
        layer.o_proj.weight[:, h * D : (h + 1) * D] = 0
        print(f"without head {h}: output moves by {(layer(x) - whole).norm() / whole.norm():.2f}")
        layer.o_proj.weight.copy_(kept)

# %% [markdown]
# ### Questions
#
# 1. What does a wrong `view` in `split_heads` do to a causal model, although every shape is right?
# 2. A model has 80 layers, 64 query heads of width 128 and 8 key heads. How many bytes of cache does one token take in
#    16 bits? And with 64 key heads?
# 3. Which of the three masks of an encoder-decoder is causal, and why only that one?
#
# The lesson answers all three.
