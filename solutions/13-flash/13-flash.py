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
# # Lab 13 · FlashAttention
#
# Exact attention that never holds all scores: in PyTorch tiles first, then as a GPU kernel of your own.
#
# - You need: the lesson *FlashAttention*. Time: about half a day. A GPU is nice to have: without one the kernel runs in
#   Triton's interpreter, on small shapes. Triton exists for Linux; elsewhere the last check is skipped.
#
# **Letters.** `B` rows, `H` query heads, `K` key/value heads, `T` queries, `S` keys, `D` width of a query and a key,
# `Dv` of a value. Query head `h` reads key/value head `h // (H // K)`.
#
# **Not to be called:** torch's `softmax`, `log_softmax`, `logsumexp`, `logcumsumexp` and
# `scaled_dot_product_attention`; in the backward pass `autograd` and `backward`.

# %% setup="13-flash"
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tfmlib import flash, kernels
from tfmlib.course.check import check
from tfmlib.course.workshop import begin
from tfmlib.kernels import launch, tl, triton

begin("13-flash")

# %% [markdown]
# ## 1 · `online_softmax`
#
# **Contract.** The chunks are parts of one row, along the last axis: each `(..., any width)`. In one pass, give the
# row's maximum `(...)` and the sum of `exp(x - maximum)` `(...)`. Only one chunk is looked at at a time. A row of only
# `-inf` has the maximum `-inf` and the total 0. No chunk at all is a `ValueError`.
#
# **Example.** `[0, 0]`, then `[log 2]`. After the first chunk: maximum 0, total 2. The second raises the maximum to
# `log 2`, so the total so far shrinks by `exp(0 - log 2)` to 1, and with the new one it is 2.

# %% piece="online_softmax"

# %% check="online_softmax"

# %% [markdown]
# ## 2 · `flash_attention`
#
# **Contract.** `softmax(q k^T / sqrt(D)) v`, from tiles of `block_q` queries and `block_k` keys. Returns `out`
# `(B, H, T, Dv)` in q's dtype, and `logsumexp` `(B, H, T)`: the natural logarithm of each query's sum of `exp(score)`,
# scores scaled.
#
# - Nothing of size `T x S` may exist, in one tensor or in many: the check measures it. `T` and `S` need not be
#   multiples of the blocks.
# - `causal`: the queries are the last `T` of the `S` tokens, so query `t` sees keys up to `S - T + t`. Skip tiles that
#   lie wholly in the future.
# - A query that sees nothing (`T > S`) gets 0, and a `logsumexp` of `-inf`.
# - Compute in at least float32, and give `logsumexp` so.
#
# **For a tile of queries**, keep three things, and update them with each tile of keys: the `maximum`, the `total`, and
# `mixed`, the sum of `exp(score - maximum) * v`. When the maximum grows, both sums shrink by the same factor. Divide
# once, at the end. `logsumexp = maximum + log(total)`.
#
# **A hint for grouped heads.** `q` as `(B, K, H // K * n, D)` puts the queries of a group side by side.

# %% piece="flash_attention"

# %% check="flash_attention"

# %% [markdown]
# ## 3 · `flash_attention_backward`
#
# **Contract.** From the gradient of `out`, give the gradients of `q`, `k` and `v`, each in its shape and dtype. Again
# no `T x S` tensor; no autograd. For one tile, with `s` the scaled scores:
#
# | step | formula |
# |---|---|
# | the weights, again | `p = exp(s - logsumexp)`, 0 in the future |
# | values | `dv += p^T dout` |
# | weights | `dp = dout v^T` |
# | scores | `ds = p * (dp - delta)`, with `delta = sum over Dv of dout * out` |
# | queries | `dq += ds k / sqrt(D)` |
# | keys | `dk += ds^T q / sqrt(D)` |
#
# `dk` and `dv` sum over the query heads of their group. A query that sees nothing has `logsumexp = -inf`, and all its
# weights are 0.

# %% piece="flash_attention_backward"

# %% check="flash_attention_backward"

# %% [markdown]
# ## 4 · `flash_attention_triton`
#
# The launcher is given; the kernel is yours. One **program** makes one tile of `out`: it runs once for each `(i, h, b)`
# of the grid `(tiles of queries, H, B)`, in parallel.
#
# | in the kernel | means |
# |---|---|
# | `tl.program_id(0)`, `(1)`, `(2)` | which tile, which head, which row |
# | `tl.arange(0, BLOCK_Q)` | `0 ... BLOCK_Q - 1`, a vector in registers |
# | `q_ptr + t[:, None] * q_strides[2] + d[None, :] * q_strides[3]` | the addresses of a tile `(BLOCK_Q, D)` |
# | `tl.load(addresses, mask=..., other=0.0)` | reads where the mask is True. **Never read or write outside a tensor** |
# | `tl.dot(a, b, input_precision="ieee")` | matrix product, summed in float32 |
# | `tl.max(x, 1)`, `tl.sum(x, 1)`, `tl.where`, `tl.maximum`, `tl.log2` | as in torch |
# | `tl.exp2(x)` | 2 to the power of x; `exp(x)` is `exp2(x * log2(e))` |
# | `x.to(v.dtype)`, `out_ptr.dtype.element_ty` | a cast; the dtype behind a pointer |
# | `tl.store(addresses, x, mask=...)` | writes where the mask is True |
#
# **Contract.** Write the tile of `out`, and its `logsumexp` (natural logarithm) at `lse_ptr + (b * H + h) * T + t`. Any
# `T` and `S`; `D` is a power of two, at least 16. `causal` as before, future tiles skipped. Read key/value head `h //
# (H // K)` where it stands: nothing is repeated.
#
# **A way to go.** First not causal, with one loop `for start in range(0, S, BLOCK_K)`, all loads and scores masked.
# Then `causal`: mask, then a shorter loop. Then speed, if you have a GPU: tiles that every query sees need no mask.
# `causal`, `D` and the blocks are constants at compile time, so an `if causal:` costs nothing.

# %% piece="flash_attention_triton"

# %% check="flash_attention_triton"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### Memory
#
# What each way holds at its peak, beside its inputs: one head of width 64. The tiles' `out` is part of it.

# %%
from tfmlib import attention
from tfmlib.course.meters import peak_bytes

for T in (256, 512, 1024, 2048):
    q, k, v = torch.randn(3, 1, 1, T, 64)
    plain = peak_bytes(attention.scaled_dot_product_attention, q, k, v) / 2**20
    tiled = peak_bytes(flash_attention, q, k, v) / 2**20
    print(f"T = {T:4}: plain {plain:6.2f} MiB, tiles {tiled:5.2f} MiB")

# %% [markdown]
# ### The kernel against the tiles
#
# Two ways to the same numbers, forward and backward; grouped heads, and sizes that no block divides.

# %%
print(f"kernels run on: {kernels.RUNS_ON}")
device = "cuda" if kernels.RUNS_ON == "GPU" else "cpu"
q, k, v = (torch.randn(1, heads, T, 32, device=device, requires_grad=True) for heads, T in ((4, 37), (2, 53), (2, 53)))
if kernels.RUNS_ON == "missing":
    print("skipped: Triton is not installed")
else:
    found = [flash_attention_triton(q, k, v, True), flash.attend(q, k, v, True)]
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in found]
    print(f"out: largest difference {(found[0] - found[1]).abs().max():.1e}")
    for name, one, other in zip("qkv", *gradients, strict=True):
        print(f"d{name}: largest difference {(one - other).abs().max():.1e}")

# %% [markdown]
# ### How fast
#
# Only a GPU can tell. PyTorch has several backends of its own, and which one it takes by default depends on the
# version: so name it.

# %%
from functools import partial

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torchs_own

if kernels.RUNS_ON == "GPU":
    for T in (1024, 4096, 16_384):
        q, k, v = torch.randn(3, 1, 16, T, 64, device="cuda", dtype=torch.bfloat16)
        mine = triton.testing.do_bench(partial(flash_attention_triton, q, k, v, causal=True))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            theirs = triton.testing.do_bench(partial(torchs_own, q, k, v, is_causal=True))
        print(f"T = {T:6,}: {mine:6.3f} ms, PyTorch's flash backend {theirs:6.3f} ms")
else:
    print("skipped: no GPU here. In Colab: Runtime, Change runtime type, GPU.")

# %% [markdown]
# ### All yours
#
# A model of your own: your tokenizer cuts the text, your Llama with your blocks and your attention learns it with your
# loss and your AdamW. Then your cache, your sampling and your kernel write. Whatever you have not solved is the
# reference.

# %%
from tfmlib import cache, optim, pieces, sampling, tokens, train, training
from tfmlib.flash_triton import flash_in_models
from tfmlib.models import llama

torch.manual_seed(0)
task = train.prepare("python-docs", length=32, batch_size=12, vocab_size=400)
sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "context_length": 96}
model = llama.Llama(llama.LlamaConfig(**sizes, vocab_size=400)).to(device)
recipe = training.Recipe(steps=250, lr_peak=6e-3, lr_floor=3e-4, warmup=20)
records = training.train(model, task.batches, recipe, progress=False)
print(f"{task.vocab_size} tokens, loss {records[0].loss:.2f} -> {records[-1].loss:.2f}")

# %%
used = {
    "Tokenizer": tokens,
    "Llama": llama,
    "AdamW": optim,
    "generate_cached": cache,
    "KVCache": cache,
    "sample": sampling,
}
for name in (*used, "flash_attention_triton"):
    own = pieces.in_use(name)
    print(f"{own.__module__}.{own.__name__}")

# %%
calls = []


def counted(q, k, v, causal):
    calls.append(q.shape[2])
    return flash_attention_triton(q, k, v, causal)


prompt = torch.tensor([task.vocabulary.encode("The function returns ")], device=device)
how = {"temperature": 0.7, "top_p": 0.9}
with flash_in_models(None if kernels.RUNS_ON == "missing" else counted):
    written = cache.generate_cached(model, prompt, 30, **how, generator=torch.Generator(device).manual_seed(0))
plainly = cache.generate_cached(model, prompt, 30, **how, generator=torch.Generator(device).manual_seed(0))
print(f"{len(calls)} calls of the kernel, for {calls[:1]} queries first and one at a time from then on")
print("the same text without the kernel:", written.equal(plainly))
print(task.vocabulary.decode(written[0].tolist()))

# %% [markdown]
# ### Questions
#
# 1. FlashAttention computes more than plain attention. Why is it faster?
# 2. What does the backward pass need from the forward pass, and how large is it?
# 3. A kernel is right for `T = 64` and wrong for `T = 65`. Where do you look?
#
# The lesson answers all three.
