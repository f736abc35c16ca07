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
# # Lab 08 · Optimizers
#
# The gradient says where down is. You write what makes a step of it: AdamW, two schedules for the learning rate,
# clipping, and the choice of weights that decay.
#
# - It trains the GPT of lab 06: **yours** where it passed, the reference where it did not.
# - You need: the lesson *Optimizers*, and `torch.no_grad`. Time: about two hours.

# %% setup="08-optim"
import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tfmlib import optim
from tfmlib.course.check import check
from tfmlib.course.workshop import begin

begin("08-optim")

# %% [markdown]
# ## 1 · `AdamW`
#
# For each parameter $p$ with gradient $g$, at its $t$-th step, $t = 1, 2, \dots$, with $m = v = 0$ at first:
#
# $$p \leftarrow p - \text{lr} \cdot \text{decay} \cdot p$$
#
# $$m \leftarrow \beta_1 m + (1 - \beta_1)\, g \qquad v \leftarrow \beta_2 v + (1 - \beta_2)\, g^2$$
#
# $$p \leftarrow p - \text{lr} \cdot \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}$$
#
# **Contract.** A `torch.optim.Optimizer` that steps as `torch.optim.AdamW` does. `super().__init__(params, defaults)`,
# with a dictionary of the four settings, gives you `self.param_groups`, a list of dictionaries with `"params"` and the
# settings of each group, and `self.state[p]`, an empty dictionary for each parameter at first.
#
# - Keep `t`, `m` and `v` as `"step"`, `"exp_avg"` and `"exp_avg_sq"` in `self.state[p]`, so that checkpoints hold them.
# - Read the settings from the group at every step: a schedule changes `group["lr"]`.
# - A parameter whose `grad` is None is left alone, its `t` too. Gradients stay as they are.
# - `step(closure)` first calls the closure with gradients enabled, and returns what it gives; None without one.
# - An `lr`, `eps` or `weight_decay` below 0, or a beta outside `0 <= beta < 1`, is a `ValueError`.
#
# **Example.** `p = 1`, `g = 0.5`, `lr = 0.1`, no decay: `m' = 0.5` and `v' = 0.25`, so the step is `0.1 * 0.5 / 0.5`,
# and `p` becomes 0.9. With `g = 50` it becomes 0.9 as well.
#
# Do not use torch's own Adam or AdamW, nor derive from them.

# %% piece="AdamW"

# %% check="AdamW"

# %% [markdown]
# ## 2 · `warmup_inverse_sqrt`
#
# **Contract.** The learning rate of step 0, 1, 2, ...: `peak * (step + 1) / warmup` while `step < warmup`, then `peak *
# sqrt(warmup / (step + 1))`. Without warm-up, `peak / sqrt(step + 1)`.
#
# **Example.** `warmup=2`, `peak=1`: 0.5, 1.0, then 0.816, and 0.5 at step 7.

# %% piece="warmup_inverse_sqrt"

# %% check="warmup_inverse_sqrt"

# %% [markdown]
# ## 3 · `warmup_cosine`
#
# **Contract.** The same warm-up. Then half a cosine, from `peak` at step `warmup` down to `floor` at step `total - 1`,
# and `floor` after it. Unless `total > warmup + 1` it is a `ValueError`.
#
# **Example.** `warmup=2`, `total=5`, `peak=1`: 0.5, 1.0, 1.0, 0.5, 0.0, 0.0.

# %% piece="warmup_cosine"

# %% check="warmup_cosine"

# %% [markdown]
# ## 4 · `clip_gradients`
#
# **Contract.** Take the gradients of all parameters as one long vector. If it is longer than `max_norm`, shorten it:
# multiply every gradient, in place, by `max_norm / (norm + 1e-6)` where that is below 1. Return the norm as it was
# before, a scalar tensor.
#
# - `parameters` is any iterable, also one that can be read only once. Those without a gradient are left out.
# - Gradients never grow. If the norm is not finite they stay as they are. Without any gradient the norm is 0.
# - Compute the norm in float32, or in the gradients' dtype where that is wider.
#
# **Example.** Gradients `[3]` and `[4]` have the norm 5. With `max_norm=1` they become `[0.6]` and `[0.8]`.
#
# Do not call `nn.utils.clip_grad_norm_` or its parts.

# %% piece="clip_gradients"

# %% check="clip_gradients"

# %% [markdown]
# ## 5 · `parameter_groups`
#
# **Contract.** Two groups for an optimizer: `[{"params": [...], "weight_decay": weight_decay}, {"params": [...],
# "weight_decay": 0.0}]`. In the first stand the weights of every `nn.Linear`, unless an `nn.Embedding` shares them, as
# a tied head does. In the second stands everything else: biases, norms, tables. Frozen parameters, `requires_grad`
# False, stand in neither, and each of the others once.

# %% piece="parameter_groups"

# %% check="parameter_groups"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### The first hundred steps
#
# A small GPT on Python's documentation, with your optimizer: as it should be, and with one part taken away.

# %%
import torch.nn.functional as F

from tfmlib import data
from tfmlib.models.gpt import GPT, GPTConfig

text = data.python_docs()[:50_000]
characters = data.Characters(text)
tokens = torch.tensor(characters.encode(text))
sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "vocab_size": characters.vocab_size, "context_length": 32}


# %%
def train(peak=3e-3, warmup=20, max_norm=1.0, decay=0.1, n_steps=100):
    torch.manual_seed(0)
    model, history = GPT(GPTConfig(**sizes)), []
    optimizer = optim.AdamW(optim.parameter_groups(model, decay), betas=(0.9, 0.95))
    batches = data.token_batches(tokens, 16, 32, torch.Generator().manual_seed(0))
    for step, (inputs, labels) in zip(range(n_steps), batches, strict=False):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = optim.clip_gradients(model.parameters(), max_norm)
        for group in optimizer.param_groups:
            group["lr"] = optim.warmup_cosine(step, warmup, n_steps, peak)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history


# %%
for name, change in {"as it should be": {}, "no warm-up": {"warmup": 0}, "ten times the rate": {"peak": 3e-2}}.items():
    history = train(**change)
    shown = ", ".join(f"{history[step][0]:.2f}" for step in (0, 10, 25, 50, 99))
    print(f"{name:18} loss at steps 0, 10, 25, 50, 99: {shown}; largest norm {max(n for _, n in history):.1f}")

# %% [markdown]
# ### The size of a step does not depend on the size of the gradient
#
# The same problem, with a loss that is 1,000 times as large.

# %%
for scale in (1.0, 1000.0):
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = AdamW([p], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        (scale * p.square().sum()).backward()
        optimizer.step()
    print(f"loss times {scale:5.0f}: after 3 steps {p.tolist()}")

# %% [markdown]
# ### A NaN, and the batch that made it
#
# One batch of 40 holds an infinite value. The norm that `clip_gradients` returns is not finite: the run stops *before*
# the step, the weights are still good, and the batch is known.

# %%
torch.manual_seed(0)
batches = [torch.randn(8, 4) for _ in range(40)]
batches[23][5, 2] = math.inf
layer = nn.Linear(4, 1)
optimizer = AdamW(layer.parameters())
for step, x in enumerate(batches):
    optimizer.zero_grad()
    layer(x).square().mean().backward()
    if not clip_gradients(layer.parameters(), 1.0).isfinite():
        bad = [i for i, row in enumerate(x) if not layer(row).isfinite()]
        print(f"stopped at batch {step}, row {bad}; weights still finite: {bool(layer.weight.isfinite().all())}")
        break
    optimizer.step()

# %% [markdown]
# ### Questions
#
# 1. Without bias correction, how large would the first step be, for `betas=(0.9, 0.999)`?
# 2. Why is clipping each parameter's gradient by itself not the same as clipping all of them together?
# 3. Why does weight decay stand outside the gradient in AdamW?
#
# The lesson answers all three.
