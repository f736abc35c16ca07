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
# # Lab 09 · Training
#
# You write the parts of a training run: batches from a text, gradients of a batch that is too large for memory, a fair
# validation loss, and checkpoints from which a run goes on bit by bit. Then your library learns a language.
#
# - It uses the losses and the optimizer of labs 07 and 08, the GPT of lab 06, and what they are made of: **yours**
#   where it passed, the reference where it did not.
# - You need: the lesson *Training*, `torch.save` and `torch.load`. Time: about two and a half hours.
#
# **Letters.** `N` tokens of a text, `B` sequences, `T` tokens, `V` vocabulary.

# %% setup="09-training"
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tfmlib import data, losses, training
from tfmlib.course.check import check
from tfmlib.course.workshop import begin
from tfmlib.training import Batch

begin("09-training")

# %% [markdown]
# ## 1 · `token_batches`
#
# **Contract.** From `tokens` `(N,)` give pairs `inputs, labels` without end, both `(B, T)` of int64. A row is a window
# of the text, and its labels are the tokens one later.
#
# - The windows' starts are drawn one by one from `generator`. Every window that fits is equally likely: the first, the
#   last, and all between. A window needs `T + 1` tokens, for its last label.
# - Nothing else is random: the same state of the generator gives the same batches. Draw a batch when it is asked for.
# - `N < T + 1` is a `ValueError`.
#
# **Example.** `[5, 6, 7]` with `T = 2` holds one window: inputs `[5, 6]`, labels `[6, 7]`.

# %% piece="token_batches"

# %% check="token_batches"

# %% [markdown]
# ## 2 · `accumulate_gradients`
#
# The gradient of a big batch, from parts that fit into memory one at a time.
#
# **Contract.** `micro_batches` gives pairs `inputs, labels`. Add to the parameters' gradients the gradient of the mean
# loss over **all counted labels together**, and return that loss as a float.
#
# - `losses.cross_entropy` gives the mean over one micro-batch, so weigh it by the share of its counted labels, those
#   that are not `losses.IGNORE`.
# - Run the backward of one micro-batch before the forward of the next. Call `model(inputs)`.
# - `micro_batches` may be an iterator. Gradients that are there already stay in the sum.
# - Without a counted label: return 0.0 and leave the gradients.
#
# **Example.** Two micro-batches with the mean losses 1.0 over 30 labels and 3.0 over 10. All 40 together: 1.5, not 2.0.

# %% piece="accumulate_gradients"

# %% check="accumulate_gradients"

# %% [markdown]
# ## 3 · `evaluate`
#
# **Contract.** The mean loss over all counted labels of all batches, as a float.
#
# - The model runs in eval mode and without gradients.
# - Afterwards every one of `model.modules()` is in the mode it was in, also after an exception.
# - Where no label counts it is a `ValueError`.

# %% piece="evaluate"

# %% check="evaluate"

# %% [markdown]
# ## 4 · `save_checkpoint`
#
# **Contract.** `torch.save` a dictionary to `path`:
#
# - `"model"` and `"optimizer"`: what their `state_dict()` gives; `"step"`: the number,
# - `"random"`: a dictionary of the states of four generators. `"torch"`, by `torch.get_rng_state`. `"cuda"`, by
#   `torch.cuda.get_rng_state_all`, or an empty list where there is no CUDA. `"python"`, by `random.getstate`.
#   `"numpy"`, by `np.random.get_state`, but with its array as a list.
#
# It must load with `weights_only=True`. **The file at `path` is whole at every moment**: write to `path` with
# `.partial` at the end, then let that file take the place of `path` with `os.replace`, in one move. If anything fails,
# `path` is as it was, and no `.partial` is left.

# %% piece="save_checkpoint"

# %% check="save_checkpoint"

# %% [markdown]
# ## 5 · `load_checkpoint`
#
# **Contract.** Load such a file with `weights_only=True`, bring the model back to it, and return the step. With an
# optimizer, restore its state and the four random states too, so that training goes on as if it had never stopped.
# Without one leave the random states alone. A missing file is a `FileNotFoundError`.
#
# **A hint.** `random.setstate` wants tuples, and `np.random.set_state` an array of `np.uint32`.

# %% piece="load_checkpoint"

# %% check="load_checkpoint"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### One batch first
#
# A new model's loss is near `ln V`. Then let it learn one batch by heart. If it cannot, something is broken, and no
# amount of data will help.

# %%
import math

from tfmlib import optim, storyland
from tfmlib.models.gpt import GPT, GPTConfig

land = storyland.Storyland()
sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4}
config = GPTConfig(**sizes, vocab_size=len(land.vocabulary), context_length=land.longest)

# %%
torch.manual_seed(0)
model = GPT(config)
batch = next(land.batches(4, torch.Generator().manual_seed(0)))
optimizer = optim.AdamW(model.parameters(), lr=3e-3)
for step in range(61):
    optimizer.zero_grad()
    loss = accumulate_gradients(model, [batch])
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss:.3f}")
print(f"ln V = {math.log(config.vocab_size):.3f}")

# %% [markdown]
# ### Storyland
#
# A little language whose entropy is known exactly: no model can have a lower loss. `train` is the loop of the lesson.
# Some ten seconds on a CPU; with more steps the loss comes closer to the floor.

# %%
print(land.story(torch.Generator().manual_seed(3)))
torch.manual_seed(0)
model = GPT(config)
unseen = [next(land.batches(128, torch.Generator().manual_seed(1)))]
recipe = training.Recipe(steps=150, lr_peak=4e-3, warmup=20, evaluate_every=50)
stories = land.batches(16, torch.Generator().manual_seed(0))
for record in training.train(model, stories, recipe, unseen, progress=False):
    if record.validation_loss:
        over = record.validation_loss - land.entropy_per_token()
        print(f"step {record.step + 1:3}  loss {record.validation_loss:.3f}, {over:.3f} above the floor")

# %% [markdown]
# It writes a story. What is wrong in it?

# %%
ids, generator = [1], torch.Generator().manual_seed(0)
with torch.no_grad():
    while ids[-1] != 2 and len(ids) < land.longest:
        chances = model(torch.tensor([ids]))[0, -1].softmax(-1)
        ids.append(int(torch.multinomial(chances, 1, generator=generator)))
for verdict in land.judge(land.decode(ids)):
    print("ok   " if verdict.allowed else "wrong", verdict.sentence, verdict.reason and f"({verdict.reason})")

# %% [markdown]
# ### Stop, and go on
#
# Ten steps at once; or five, a checkpoint, and five more in a new model. The losses are the same, bit by bit.


# %%
def run(n_steps, path):
    """Train up to step n_steps, from the checkpoint if there is one."""
    torch.manual_seed(7)
    model = GPT(config)
    optimizer = optim.AdamW(model.parameters())
    start = load_checkpoint(path, model, optimizer) if Path(path).exists() else 0
    batches, got = land.batches(8, torch.Generator().manual_seed(0)), []
    for step, batch in zip(range(n_steps), batches, strict=False):
        if step >= start:
            optimizer.zero_grad()
            got.append(accumulate_gradients(model, [batch]))
            optimizer.step()
    save_checkpoint(path, model, optimizer, n_steps)
    return got


# %%
import tempfile

with tempfile.TemporaryDirectory() as folder:
    whole = run(10, f"{folder}/whole.pt")
    parts = run(5, f"{folder}/parts.pt") + run(10, f"{folder}/parts.pt")
print("the same, bit by bit:", whole == parts)

# %% [markdown]
# ### Real text
#
# To train on real text with your own pieces, from a terminal: `tfm train --corpus python-docs`, or `--corpus` with a
# text file of yours. `tfm train --help` lists the rest.
#
# ### Questions
#
# 1. Two micro-batches have 2 and 8 counted labels. What is wrong with the mean of their two mean losses?
# 2. Which four things must a checkpoint hold, and what happens if one is missing?
# 3. Memory runs out. What do you try, and in which order?
#
# The lesson answers all three.
