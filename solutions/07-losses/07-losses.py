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
# # Lab 07 · Losses
#
# What a model is asked to do: say the next token, be right on the hard cases too, or earn a reward. You write the
# labels, the loss, two ways to read it, and two objectives that are not the average.
#
# - It uses the models of lab 06: **yours** where they passed, the reference where they did not.
# - You need: the lesson *Losses*, `gather`, `masked_fill` and `topk`. Time: about two hours.
#
# **Letters.** `B` sequences, `T` tokens, `V` vocabulary, `G` groups, `n` answers in a group. Losses are in nats.

# %% setup="07-losses"
import math

import torch
from torch import Tensor

from tfmlib import losses
from tfmlib.course.check import check
from tfmlib.course.workshop import begin
from tfmlib.losses import IGNORE

begin("07-losses")

# %% [markdown]
# ## 1 · `shift_labels`
#
# The label of a token is the token after it.
#
# **Contract.** From `ids` `(B, T)` make `inputs` and `labels`, both `(B, T-1)`: all tokens but the last, and all but
# the first. With `is_token` `(B, T)`, boolean, a label is `IGNORE` (that is -100) where the input or the label is
# padding.
#
# **Example.** `[5, 6, 7, pad]` gives the inputs `[5, 6, 7]` and the labels `[6, 7, IGNORE]`.

# %% piece="shift_labels"

# %% check="shift_labels"

# %% [markdown]
# ## 2 · `cross_entropy`
#
# $$\text{loss} = \frac{1}{N} \sum_{\text{counted}} -\log p(\text{label}), \qquad p = \text{softmax}(\text{logits})$$
#
# **Contract.** `logits` `(..., V)` and `labels` `(...)` give a scalar: the mean over the labels that are not `IGNORE`.
# Where none counts the loss is 0, and can still run backward. Logits of 10,000 must not overflow. Compute in float32,
# or in the logits' dtype where that is wider; the result has that dtype. Other shapes are a `ValueError`.
#
# **Example.** Two equal logits: each token has probability 1/2, and the loss is `ln 2 = 0.693`.
#
# Do not call `F.cross_entropy` or `F.nll_loss`. You may call `torch.log_softmax` or `torch.logsumexp`.

# %% piece="cross_entropy"

# %% check="cross_entropy"

# %% [markdown]
# ## 3 · `perplexity`
#
# **Contract.** `e` to the mean loss, a float. Where that is too large for a float, `inf` and no error.
#
# **Example.** A loss of `ln 50` is a perplexity of 50: as unsure as between 50 equal tokens.

# %% piece="perplexity"

# %% check="perplexity"

# %% [markdown]
# ## 4 · `bits_per_byte`
#
# **Contract.** `loss` is the mean over `n_tokens` tokens in nats, and these tokens stand for `n_bytes` bytes of text.
# Give the bits for each byte: one nat is `1 / ln 2` bits. `n_bytes` below 1 is a `ValueError`.
#
# **Example.** 10 tokens at `4 ln 2` nats are 40 bits. For 40 bytes that is 1 bit a byte.

# %% piece="bits_per_byte"

# %% check="bits_per_byte"

# %% [markdown]
# ## 5 · `tail_loss`
#
# Not the mean of all losses, but of the worst: the conditional value at risk (CVaR).
#
# **Contract.** From `losses` `(n,)` take the `k = max(1, round(fraction * n))` largest, with Python's `round`, and give
# their mean. `fraction=1` is the plain mean. A fraction outside `0 < fraction <= 1`, or no losses, is a `ValueError`.
#
# **Example.** `[1, 5, 3, 2]` with `fraction=0.5`: the two largest are 5 and 3, and the result is 4.

# %% piece="tail_loss"

# %% check="tail_loss"

# %% [markdown]
# ## 6 · `group_advantages`
#
# A model gives `n` answers to each of `G` questions. How much better is each answer than the others to its question?
#
# **Contract.** `(reward - mean) / std` over the `n` rewards of a group, with the biased std (divided by `n`) and no
# epsilon. Where all rewards of a group are equal: exactly 0, also where their mean is off by a rounding. Compute in
# float32, or in float64 for rewards in float64; the result has that dtype. Rewards may be integers.
#
# **Example.** `[0, 0, 0, 2]`: the mean is 0.5 and the std 0.866, so the advantages are -0.577 three times, and 1.732.

# %% piece="group_advantages"

# %% check="group_advantages"

# %% [markdown]
# ## 7 · `policy_gradient_loss`
#
# **Contract.** `log_probs` `(B, T)` are those of the tokens that were drawn, `advantages` `(B,)` say how good each
# answer was. The loss is minus the mean of `advantage * log_prob` over all counted tokens, where `is_token` `(B, T)`
# is True.
#
# - The mean is over the tokens of all answers together, not over answers.
# - No gradient flows into the advantages.
# - What stands at padding never counts, be it `-inf`. Where no token counts the loss is 0, and can still run backward.
# - Compute in float32, or in the log-probabilities' dtype where that is wider; the result has that dtype.
#
# **Example.** Log-probabilities -1 and -3 with the advantage 2: the mean of -2 and -6 is -4, the loss 4.

# %% piece="policy_gradient_loss"

# %% check="policy_gradient_loss"

# %% [markdown]
# ## What you can see with it
#
# From here on, the plain names mean your versions where they passed, and the reference where they did not.
#
# ### One pass, all prefixes
#
# Teacher forcing: the losses of all tokens from one pass are those of as many passes, each over the tokens before.

# %%
from tfmlib.models.gpt import GPT, GPTConfig

sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "vocab_size": 50, "context_length": 16}
model = GPT(GPTConfig(**sizes)).double()
inputs, labels = shift_labels(torch.randint(50, (1, 9)))
with torch.no_grad():
    together = cross_entropy(model(inputs), labels)
    apart = [cross_entropy(model(inputs[:, : t + 1])[:, -1], labels[:, t]) for t in range(8)]
print(f"one pass {together:.15f}\n8 passes {sum(apart) / 8:.15f}")

# %% [markdown]
# ### Counting the padding
#
# The same batch, half of it padding, before and after a model has learned that padding follows padding.

# %%
is_token = torch.arange(9) < torch.tensor([[9], [3], [4], [2]])
ids = torch.randint(1, 50, (4, 9)).masked_fill(~is_token, 0)
inputs, labels = shift_labels(ids, is_token)
knows_padding = torch.zeros(4, 8, 50)
knows_padding[:, :, 0] = 20.0 * (ids[:, 1:] == 0)
print(f"padding ignored: {cross_entropy(knows_padding, labels):.3f}  (ln 50 = {math.log(50):.3f})")
print(f"padding counted: {cross_entropy(knows_padding, ids[:, 1:]):.3f}")

# %% [markdown]
# ### A mean, or the tail
#
# One number has to stand for all examples. Nine of ten are near 0, one is at 10. Which number is best?

# %%
examples = torch.cat([torch.randn(90) * 0.5, 10 + torch.randn(10) * 0.5])
for fraction in (1.0, 0.2, 0.05):
    guess = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([guess], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        tail_loss((examples - guess).square(), fraction).backward()
        optimizer.step()
    off = (examples - guess.detach()).square()
    many, few = off[:90].mean(), off[90:].mean()
    print(f"worst {fraction:4.0%}: guess {guess:5.2f}, loss of the many {many:5.1f}, of the few {few:5.1f}")

# %% [markdown]
# ### A reward, and what it really asks for
#
# A model draws four words of five. Word 0 is useful. The reward counts useful words, or it counts all words that are
# not the end, word 4: a stand-in for "long answers are good".


# %%
def learn(reward):
    torch.manual_seed(0)
    logits = torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(150):
        words = torch.multinomial(logits.detach().softmax(0), 32 * 4, replacement=True).view(32, 4)
        advantages = group_advantages(reward(words).view(1, 32))[0]
        log_probs = logits.log_softmax(0)[words]
        optimizer.zero_grad()
        policy_gradient_loss(log_probs, advantages, torch.ones(32, 4, dtype=torch.bool)).backward()
        optimizer.step()
    return logits.detach().softmax(0)


for name, reward in {"useful": lambda w: (w == 0).sum(1), "long": lambda w: (w != 4).sum(1)}.items():
    print(f"{name:6}", [f"{p:.2f}" for p in learn(reward).tolist()])

# %% [markdown]
# ### Questions
#
# 1. Two models have different tokenizers. Why can you not compare their perplexities, and what can you compare?
# 2. A group's answers are all right. What does it teach? And if all are wrong?
# 3. After training with rewards, a model solves more problems at its first try. Which three questions do you ask?
#
# The lesson answers all three.
