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
# # Lab 12 · The KV cache
#
# Keep the keys and values of earlier tokens, and a new token costs one token's work.
#
# - You need: the lesson *The KV cache*, and your `generate`. Time: about two hours.
#
# **Letters.** `B` rows, `T` new tokens, `S` tokens in the cache after the call, `K` key/value heads, `D` head width,
# `V` vocabulary.

# %% setup="12-cache"
import torch
from torch import Tensor, nn

from tfmlib import attention, cache, sampling
from tfmlib.course.check import check
from tfmlib.course.workshop import begin

begin("12-cache")

# %% [markdown]
# ## 1 · `KVCache`
#
# **Contract.** `KVCache(n_layers, batch, n_kv_heads, head_dim, capacity, dtype, device)` has room for `capacity` tokens
# in each of `batch` rows. It takes its memory at once. `layer(i)` is one layer's view:
#
# - `append(k, v)` adds the keys and values of `T` new tokens, `(B, K, T, D)` each, and returns all so far,
#   `(B, K, length, D)` each;
# - `length` is how many tokens this layer has.
#
# The cache itself has
#
# - `length`: the tokens that are complete in **every** layer;
# - `trim(length)`: forget all after the first `length` tokens, in every layer. Where there are no more, nothing
#   happens;
# - `reset()`: forget all.
#
# It is for inference: it keeps no gradients. A `ValueError`, and nothing is kept: no room for the new tokens; another
# batch, head number or width; `k` and `v` of different length; a layer that is not there (there are no negative ones);
# a negative length to trim to.
#
# The cell has two classes, one layer and all layers. You may write it in another way.

# %% piece="KVCache"

# %% check="KVCache"

# %% [markdown]
# ## 2 · `prefill`
#
# **Contract.** Feed the tokens that follow those in the cache, and return the last one's logits `(B, V)`, without
# gradients. The models of chapter 6 are called as `model(ids, positions=..., mask=..., cache=...)`; None means what
# they do by themselves.
#
# In a batch of unequal prompts, padded on the left, `is_token` `(B, S)` is False for padding. It covers **all** that
# the cache holds after the call. Then
#
# - the mask hides padding as a key: `attention.padding_mask` makes it;
# - positions count tokens only: a row's first token stands at 0. Padding may stand anywhere from 0 on.
#
# An `is_token` of another shape is a `ValueError`.
#
# **Example.** `is_token` `[0, 0, 1, 1, 1]`: positions `[0, 0, 0, 1, 2]`. If 3 tokens are in the cache already, the two
# new ones stand at 1 and 2.

# %% piece="prefill"

# %% check="prefill"

# %% [markdown]
# ## 3 · `decode_step`
#
# **Contract.** The same for exactly one token, `(B, 1)`; anything else is a `ValueError`.

# %% piece="decode_step"

# %% check="decode_step"

# %% [markdown]
# ## 4 · `generate_cached`
#
# **Contract.** What `sampling.generate` does, with the same arguments, but the prompt is fed once, and then one token
# at a time. The cache's sizes are in `model.config` (`n_layers`, `n_kv_heads`, `head_dim`); its dtype and device are
# those of the model's weights. The last token of all need not be fed.
#
# `is_token` `(B, T)` is for prompts of unequal length: each row goes on as if it were alone. Tokens that come later are
# tokens. A `ValueError`, before any work: padding in the last column; what is fed does not fit into
# `model.config.context_length`, padding not counted.
#
# **A hint.** `generate` needs something it can call with all ids so far, and that gives logits `(B, ..., V)`. Give it a
# module which holds the model and a cache, and feeds only what is new: `CachedModel`. Or write the loop again.

# %% piece="generate_cached"

# %% check="generate_cached"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### The same logits, however they are fed
#
# The one test that finds nearly every broken cache: cut a text at random, feed the pieces, compare with one pass over
# all.

# %%
from tfmlib.models.llama import Llama, LlamaConfig

torch.manual_seed(0)
sizes = {"n_layers": 4, "d_model": 128, "n_heads": 8, "vocab_size": 500, "context_length": 600}
model = Llama(LlamaConfig(**sizes, n_kv_heads=2))
ids = torch.randint(500, (1, 40))
whole = model(ids)[:, -1]
for cuts in ([40], [1] * 40, [13, 1, 20, 6]):
    kept = KVCache(4, 1, 2, 16, capacity=40)
    for chunk in ids.split(cuts, dim=1):
        logits = prefill(model, chunk, kept)
    print(f"{len(cuts):2} chunks: largest difference {(logits - whole).abs().max():.1e}")

# %% [markdown]
# ### What a token costs
#
# One more token after `T` others, with and without a cache. Read the columns downwards: what doubles, what does not?

# %%
import time


def milliseconds(call, *arguments):
    times = []
    with torch.no_grad():
        for _ in range(2):
            start = time.perf_counter()
            call(*arguments)
            times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def step(last, kept, length):
    """Decode one token after `length` others, and forget it again."""
    decode_step(model, last, kept)
    kept.trim(length)


# %%
for T in (64, 128, 256, 512):
    ids, kept = torch.randint(500, (1, T)), KVCache(4, 1, 2, 16, capacity=T)
    prefill(model, ids[:, :-1], kept)
    without, cached = milliseconds(model, ids), milliseconds(step, ids[:, -1:], kept, T - 1)
    print(f"T = {T:4}: without {without:6.1f} ms, with {cached:4.1f} ms")

# %% [markdown]
# ### Bytes
#
# What the cache holds, and what your `kv_cache_bytes` of lab 10 says. Fewer key/value heads, fewer bytes.

# %%
from tfmlib import costs
from tfmlib.course.meters import Alive

for kind, n_kv_heads in (("multi-head", 8), ("grouped", 2), ("multi-query", 1)):
    config = LlamaConfig(**sizes, n_kv_heads=n_kv_heads)
    with Alive() as alive:
        kept = KVCache(4, 3, n_kv_heads, 16, capacity=1000, dtype=torch.float16)
    counted = costs.kv_cache_bytes(config, B=3, T=1000, bytes_per_element=2)
    print(f"{kind:11} measured {alive.peak:,}, counted {counted:,} bytes")

# %% [markdown]
# ### Three prompts in one batch
#
# Prompts of 3, 7 and 5 tokens, padded on the left. Each row must be what it would be alone.

# %%
from tfmlib.sampling import generate

prompts = [torch.randint(500, (n,)) for n in (3, 7, 5)]
batch, is_token = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.bool)
for row, prompt in enumerate(prompts):
    batch[row, 7 - len(prompt) :], is_token[row, 7 - len(prompt) :] = prompt, True
together = generate_cached(model, batch, 20, temperature=0, is_token=is_token)
for row, prompt in enumerate(prompts):
    alone = generate(model, prompt[None], 20, temperature=0)[0]
    print(f"{len(prompt)} tokens: the same as alone: {together[row, 7 - len(prompt) :].equal(alone)}")

# %% [markdown]
# ### Break it
#
# A cache that is not emptied between two prompts. Nothing fails. The answer is wrong.

# %%
kept = KVCache(4, 1, 2, 16, capacity=100)
first, second = torch.randint(500, (2, 1, 12))
prefill(model, first, kept)
dirty = prefill(model, second, kept)
kept.reset()
clean = prefill(model, second, kept)
print(f"largest difference {(dirty - clean).abs().max():.2f}, of logits up to {clean.abs().max():.2f}")

# %% [markdown]
# ### Questions
#
# 1. Why are keys and values kept, and queries not?
# 2. A step with a cache is often called O(1). Of which part is that true?
# 3. A model answers well in a test without a cache, and badly with one. What do you compare first?
#
# The lesson answers all three.
