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
# # Lab 06 · Models
#
# All parts are there. You assemble four machines: GPT-2, Llama, a BERT-style encoder and the encoder-decoder of 2017.
# At the end somebody else's trained weights run in your own code.
#
# - It uses the pieces of labs 01 to 05: **yours** where they passed, the reference where they did not.
# - You need: the lesson *Models*. Time: about three hours.
#
# **Letters.** `B` batch, `T` tokens, `S` all tokens so far, `C` model width, `V` vocabulary, `L` layers.

# %% setup="06-models"
import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfmlib import attention, blocks, heads
from tfmlib import positions as places
from tfmlib.course.check import check
from tfmlib.course.workshop import begin
from tfmlib.models import shared

begin("06-models")

# %% [markdown]
# The configurations are given. Each is a frozen dataclass; what you leave out is filled in. Write your models with its
# fields: `config.n_layers`, `config.d_model`, `config.head_dim` and so on.

# %%
from tfmlib.models.encoder import EncoderConfig
from tfmlib.models.gpt import GPTConfig
from tfmlib.models.llama import LlamaConfig
from tfmlib.models.seq2seq import Seq2SeqConfig

print(GPTConfig(n_layers=2, d_model=32, n_heads=4, vocab_size=100, context_length=16))
print(LlamaConfig(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, vocab_size=100, context_length=16))

# %% [markdown]
# ## 1 · `init_weights`
#
# **Contract.** `init_weights(model)` gives a model its first weights, in place.
#
# | parameter | becomes |
# |---|---|
# | weight of every `nn.Linear` and `nn.Embedding` | normal, mean 0, standard deviation 0.02 |
# | weight of a linear layer called `o_proj` or `down` | standard deviation 0.02 / sqrt(n), for n such layers |
# | bias of every `nn.Linear` | 0 |
# | everything else | stays |
#
# `o_proj` and `down` end the branches that are added to the residual stream. `model.named_modules()` gives names such
# as `blocks.0.mlp.down`.

# %% piece="init_weights"

# %% check="init_weights"

# %% [markdown]
# ## 2 · `decoder_inputs`
#
# Both decoders begin alike: where do the new tokens stand, and what may they see?
#
# **Contract.** `decoder_inputs(ids, context_length, positions=None, mask=None, cache=None)` returns
# `(positions, visible)`.
#
# - `positions` are as given, or those that follow the `cache.length` tokens in the cache: for 3 new tokens after 5 old
#   ones, `[5, 6, 7]`. A position beyond `context_length - 1` is a `ValueError`, given or not.
# - `visible` is boolean, `True` where a token may look. The T new tokens are the last of `S = cache.length + T`:
#   `attention.causal_mask(T, S)`. With `mask (B, 1, 1, S)`, a token sees what both allow: `(B, 1, T, S)`.

# %% piece="decoder_inputs"

# %% check="decoder_inputs"

# %% [markdown]
# ## 3 · `GPT`
#
# **Contract.** `GPT(config)` has these parts, under these names:
#
# | name | what |
# |---|---|
# | `config` | the configuration |
# | `token_embedding`, `position_embedding` | `nn.Embedding`, V x C and context_length x C |
# | `blocks` | `nn.ModuleList` of L `PreNormBlock`: attention with biases, `MLP` with tanh GELU, two `LayerNorm` |
# | `norm` | a last `LayerNorm` |
# | `head` | `nn.Linear`, C to V, no bias; its weight *is* the token embedding's if `config.tied` |
#
# All norms take `config.norm_eps`. At the end of `__init__` call `shared.init_weights(self)`. Logits have the weights'
# dtype: a model in bfloat16 gives bfloat16. This holds for all four models.
#
# `forward(ids, positions=None, mask=None, cache=None)` gives logits `(B, T, V)`: embed tokens and positions and add
# them, run the blocks, `norm`, `head`. Look rows up with `places.embed(ids, self.token_embedding.weight)`. Block `i`
# gets `mask=visible`, `positions`, and `cache.layer(i)` if there is a cache.
#
# GELU's tanh form: `functools.partial(F.gelu, approximate="tanh")`.

# %% piece="GPT"

# %% check="GPT"

# %% [markdown]
# ## 4 · `Llama`
#
# **Contract.** As `GPT`, with four parts exchanged:
#
# | GPT | Llama |
# |---|---|
# | `position_embedding` | none; the attention rotates: `rope_base=config.rope_base` |
# | `LayerNorm` | `RMSNorm` |
# | `MLP` | `SwiGLU` |
# | biases | none |
#
# `config.n_kv_heads` may be less than `config.n_heads`, in both models.

# %% piece="Llama"

# %% check="Llama"

# %% [markdown]
# ## 5 · `Encoder`
#
# **Contract.** `Encoder(config)` has `token_embedding`, `position_embedding`, `segment_embedding` (`config.n_segments`
# rows), `norm`, and `blocks`: L `PostNormBlock` of attention with biases, `MLP` with the exact GELU, and two
# `LayerNorm`.
#
# `forward(ids, is_token=None, segments=None)` gives `(B, T, C)`: the sum of the three embeddings, then `norm`, then the
# blocks. Every token sees every token; only padding is hidden. Segments are all 0 if none are given. More tokens than
# `config.context_length` are a `ValueError`.

# %% piece="Encoder"

# %% check="Encoder"

# %% [markdown]
# ## 6 · `Seq2Seq`
#
# **Contract.** `Seq2Seq(config)` has `token_embedding`, `encoder` (L `PostNormBlock`), `decoder` (L `DecoderBlock`) and
# `head`, whose weight is the embedding's. All attention has biases, the `MLP` uses `F.relu`, the norms are `LayerNorm`.
# There is no norm at the end.
#
# `forward(source, target, source_is_token=None, target_is_token=None)` gives logits `(B, T, V)`:
#
# 1. Both sides are embedded alike: the token's row times `sqrt(C)`, plus `places.sinusoidal(T, C)`.
# 2. The encoder's blocks run over the source. Padding is hidden.
# 3. The decoder's blocks run over the target. They see the past of the target, without padding, and the whole encoded
#    source, without padding.
#
# More tokens than `config.context_length` on a side are a `ValueError`. The method `_embed` is a suggestion.

# %% piece="Seq2Seq"

# %% check="Seq2Seq"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### A fresh model knows nothing
#
# All tokens are about equally likely, so the loss is near `ln V`.

# %%
sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "vocab_size": 1000, "context_length": 32}
torch.manual_seed(0)
ids = torch.randint(0, 1000, (4, 32))
for model in (GPT(GPTConfig(**sizes)), Llama(LlamaConfig(**sizes, n_kv_heads=2))):
    logits = model(ids)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    count = sum(p.numel() for p in model.parameters())
    print(f"{type(model).__name__:6} {count:7,} parameters, loss {loss:.3f}, ln V = {math.log(1000):.3f}")

# %% [markdown]
# ### The future cannot change the past
#
# Another last token, and all logits before it stay as they are. In the encoder, all of them move.

# %%
other = ids.clone()
other[:, -1] = (other[:, -1] + 1) % 1000
for model in (GPT(GPTConfig(**sizes)), Encoder(EncoderConfig(**sizes))):
    moved = (model(other) - model(ids)).abs().amax(dim=(0, 2)) > 0
    print(f"{type(model).__name__:7} {int(moved[:-1].sum())} of the 31 earlier tokens move")

# %% [markdown]
# ### Learn to reverse
#
# The encoder-decoder reads a row of digits and writes it backwards. It gets the right digits so far, and has to say the
# next one. Some ten seconds on a CPU.

# %%
torch.manual_seed(0)
model = Seq2Seq(Seq2SeqConfig(n_layers=1, d_model=64, n_heads=4, vocab_size=11, context_length=8))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(201):
    source = torch.randint(0, 10, (64, 6))
    target = torch.cat([torch.full((64, 1), 10), source.flip(1)], dim=1)  # 10: begin
    logits = model(source, target[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        right = (logits.argmax(-1) == target[:, 1:]).float().mean()
        print(f"step {step:3}  loss {loss:.3f}  digits right {right:.0%}")

# %% [markdown]
# ### Somebody else's weights
#
# A trained checkpoint, run by your own pieces. It is looked for in a folder `checkpoints` beside the labs, in the
# course's test data, and where the variable `TFM_CHECKPOINT` points. Set `DOWNLOAD = True` to get GPT-2: 548 MB,
# checked by its SHA-256.

# %%
from tfmlib.models import checkpoints

DOWNLOAD = False
if DOWNLOAD:
    checkpoints.download_gpt2()
found = checkpoints.find()
print(f"found {found.model}" if found else checkpoints.HOW_TO_GET_ONE)

# %% [markdown]
# The model says the likeliest next token, again and again. Each step runs over the whole text so far; chapter 12 does
# it without that waste.

# %%
if found:
    model, tokenizer, ids = found.load()
    print(f"{type(model).__module__}.{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters")
    with torch.no_grad():
        for _ in range(60):
            logits = model(torch.tensor([ids]))
            ids.append(int(logits[0, -1].argmax()))
    print(tokenizer.decode(ids[1:]))
else:
    print("skipped: no checkpoint is at hand")

# %% [markdown]
# ### Questions
#
# 1. Where are most parameters of a small model? Of a large one?
# 2. Why does a loader for llama2.c reorder the rows of `q_proj` and `k_proj`, and not those of `v_proj`?
# 3. Which of the four models would you take to search in documents? To translate? To write code?
#
# The lesson answers all three.
