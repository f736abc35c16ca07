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
# # Lab 10 · Costs
#
# How many parameters, operations and bytes, before anything runs. All six pieces are plain arithmetic on a model's
# sizes.
#
# - You need: the lesson *Costs*, and paper. Time: about two hours.
#
# **Letters.** `B` sequences, `T` tokens, `S` keys, `C` d_model, `H` n_heads, `K` n_kv_heads, `D` head_dim, `F` d_ff,
# `V` vocab_size, `L` n_layers, `P` parameters. All results but the last are whole numbers, and exact: use `//` and not
# `/`.

# %% setup="10-costs"
from tfmlib import costs
from tfmlib.costs import Config, mlp_matrices
from tfmlib.course.check import check
from tfmlib.course.workshop import begin
from tfmlib.models.gpt import GPTConfig
from tfmlib.models.llama import LlamaConfig

begin("10-costs")

# %% [markdown]
# ## 1 · `count_parameters`
#
# **Contract.** What a `GPTConfig` or a `LlamaConfig` describes, part by part:
#
# | part | Llama | GPT: also |
# |---|---|---|
# | q and o, a layer | `2 * C * H*D` | biases `H*D + C` |
# | k and v, a layer | `2 * C * K*D` | biases `2 * K*D` |
# | MLP, a layer | 3 matrices `C * F` | 2 matrices; biases `F + C` |
# | two norms, a layer | `2 * C` | biases `2 * C` |
# | last norm | `C` | bias `C` |
# | embedding | `V * C` | positions `context_length * C` |
# | head, if not `tied` | `V * C` | |
#
# `mlp_matrices(config)` gives 2 or 3, and a `TypeError` for another config.
#
# **Example.** GPT-2 has 124,439,808.

# %% piece="count_parameters"

# %% check="count_parameters"

# %% [markdown]
# ## 2 · `forward_flops`
#
# **Contract.** The FLOPs of the matrix products of one forward pass over `B` sequences of `T` tokens, which see `S`
# keys each (`S = T` if None). A multiply-add is 2. In every layer:
#
# - a token pays 2 for each weight of q, k, v, o and the MLP,
# - a query pays `2 * H*D` for the score with each key, and `2 * H*D` for the weighted sum: masked keys too.
#
# And 2 for each weight of the head, for each token. Biases, norms and the embedding are no matrix products.

# %% piece="forward_flops"

# %% check="forward_flops"

# %% [markdown]
# ## 3 · `score_bytes`
#
# **Contract.** The bytes of one layer's scores, `(B, H, T, T)`.
#
# **Example.** `B=8`, 12 heads, `T=4096`, 4 bytes: 6.4 GB.

# %% piece="score_bytes"

# %% check="score_bytes"

# %% [markdown]
# ## 4 · `kv_cache_bytes`
#
# **Contract.** The bytes of keys and values, `(B, K, T, D)` each, in all layers.
#
# **Example.** 32 layers, 32 heads of width 128, `T=4096`, 2 bytes: 2,147,483,648, which is 2.1 GB, or 2 GiB.

# %% piece="kv_cache_bytes"

# %% check="kv_cache_bytes"

# %% [markdown]
# ## 5 · `training_bytes`
#
# **Contract.** A dictionary of the bytes of a training step with AdamW: `"weights"`, `"gradients"`, `"optimizer"`,
# `"activations"` and `"total"`, their sum. In elements:
#
# | | elements |
# |---|---|
# | weights | `P` |
# | gradients | `P` |
# | optimizer | `2 * P` |
# | one layer's activations | `B*T * (6*C + 4*H*D + m*F) + 2 * B*H*T*T`, with `m = 2` for a GPT, 4 for a Llama |
# | the end | `3 * B*T*C + 3 * B*T*V` |
# | activations | `L * layer + end` |
# | activations with `checkpointing` | `L * B*T*C` + the larger of `layer + B*T*F` and `end` |
#
# Each element has `bytes_per_element` bytes. The lesson says which operation keeps which tensor.

# %% piece="training_bytes"

# %% check="training_bytes"

# %% [markdown]
# ## 6 · `roofline_seconds`
#
# **Contract.** The least time for some work on a machine, if computing and moving bytes overlap: the larger of `flops /
# flops_per_second` and `n_bytes / bytes_per_second`. Unless both rates are above 0 it is a `ValueError`.
#
# **Example.** 4e12 FLOPs and 1e12 bytes at 1e12 FLOP/s and 5e11 bytes/s: 4 seconds against 2, so 4.

# %% piece="roofline_seconds"

# %% check="roofline_seconds"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### Published models
#
# Your count against what their authors say: 7 billion, 8 billion, 70 billion.

# %%
llama2 = {"vocab_size": 32_000, "context_length": 4096}
llama3 = {"vocab_size": 128_256, "context_length": 8192, "n_kv_heads": 8}
models = {
    "Llama-2-7B": LlamaConfig(n_layers=32, d_model=4096, n_heads=32, d_ff=11_008, **llama2),
    "Llama-2-70B": LlamaConfig(n_layers=80, d_model=8192, n_heads=64, n_kv_heads=8, d_ff=28_672, **llama2),
    "Llama-3-8B": LlamaConfig(n_layers=32, d_model=4096, n_heads=32, d_ff=14_336, **llama3),
}
for name, config in models.items():
    cache = kv_cache_bytes(config, B=1, T=4096, bytes_per_element=2) / 2**30
    print(f"{name:11} {count_parameters(config):>14,} parameters, cache at 4,096 tokens {cache:.2f} GiB")

# %% [markdown]
# ### Counted, and counted by PyTorch
#
# PyTorch can count the operations of a real run. Your number needs no run.

# %%
import torch
from torch.utils.flop_counter import FlopCounterMode

from tfmlib.models.gpt import GPT

small = GPTConfig(n_layers=3, d_model=48, n_heads=4, vocab_size=100, context_length=32)
counter = FlopCounterMode(display=False)
with counter, torch.no_grad():
    GPT(small)(torch.randint(100, (2, 32)))
print(f"PyTorch {counter.get_total_flops():,}, you {forward_flops(small, B=2, T=32):,}")

# %% [markdown]
# ### Which part is the most work?
#
# A layer of width 1024 at growing lengths: what the scores and the weighted sum take, and all the rest.

# %%
sizes = {"n_layers": 1, "d_model": 1024, "n_heads": 16, "vocab_size": 1}
for T in (512, 2048, 4096, 8192, 32_768):
    config = GPTConfig(**sizes, context_length=T)
    linear = T * forward_flops(config, B=1, T=1, S=1)  # T tokens that see one key each
    share = 1 - linear / forward_flops(config, B=1, T=T)
    scores = score_bytes(config, 1, T, 2) / 1e9
    print(f"T = {T:6,}: attention over keys is {share:4.0%} of a layer's FLOPs, its scores {scores:.2f} GB")

# %% [markdown]
# ### Will it fit, and how long will it take?
#
# GPT-2's size, trained in float32 with batches of 8 x 1024, on a machine with 24 GB.

# %%
gpt2 = GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50_257, context_length=1024)
for checkpointing in (False, True):
    parts = training_bytes(gpt2, B=8, T=1024, checkpointing=checkpointing)
    print(f"checkpointing {checkpointing!s:5}", {name: f"{n / 1e9:.1f} GB" for name, n in parts.items()})
weights = 2 * count_parameters(gpt2)  # bytes, at 16 bits
for T in (1, 128, 1024):
    seconds = roofline_seconds(forward_flops(gpt2, 1, T), weights, flops_per_second=1e13, bytes_per_second=1e11)
    print(f"{T:4} tokens in one pass: at least {seconds * 1e3:.2f} ms, {seconds / T * 1e6:.0f} us a token")

# %% [markdown]
# ### Questions
#
# 1. At which length do the scores of a GPT of width 4,096 take as much work as its MLP?
# 2. Why does one token in a pass take nearly as long as a hundred?
# 3. Which part of training memory does a smaller batch reduce, and which not?
#
# The lesson answers all three.
