"""The losses against torch's own, in float64, with their gradients; and what training by them in parallel rests on."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tfmlib import losses
from tfmlib.models.gpt import GPT, GPTConfig
from tfmlib.models.llama import Llama, LlamaConfig


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
def test_cross_entropy_and_its_gradient_are_torchs(scale, ignored):
    ours = (torch.randn(5, 7, 11, generator=rng(), dtype=torch.float64) * scale).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    labels = torch.randint(11, (5, 7), generator=rng(1))
    labels[torch.rand(5, 7, generator=rng(2)) < ignored] = losses.IGNORE
    got = losses.cross_entropy(ours, labels)
    got.backward()
    if ignored == 1:  # torch's is 0 / 0
        assert got == 0
        assert (ours.grad == 0).all()
        return
    want = F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), ignore_index=losses.IGNORE)
    want.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("model_class", "config_class"), [(GPT, GPTConfig), (Llama, LlamaConfig)])
def test_one_parallel_pass_is_all_prefixes(model_class, config_class):
    """Teacher forcing: the losses of T tokens from one pass are those of T passes over the tokens before."""
    sizes = {"n_layers": 2, "d_model": 24, "n_heads": 4, "vocab_size": 31, "context_length": 13}
    model = model_class(config_class(**sizes)).double()
    inputs, labels = losses.shift_labels(torch.randint(31, (1, 14), generator=rng()))
    with torch.no_grad():
        together = losses.cross_entropy(model(inputs), labels)
        apart = [losses.cross_entropy(model(inputs[:, :t])[:, -1], labels[:, t - 1]) for t in range(1, 14)]
    torch.testing.assert_close(together, torch.stack(apart).mean(), rtol=1e-9, atol=1e-9)


def test_the_tail_is_numpys():
    values = torch.randn(101, generator=rng(), dtype=torch.float64)
    for fraction in (0.001, 0.1, 0.25, 1.0):
        largest = np.sort(values.numpy())[::-1][: max(1, round(fraction * 101))]
        assert math.isclose(losses.tail_loss(values, fraction), largest.mean(), rel_tol=1e-12)


def test_the_policy_gradient_raises_the_expected_reward():
    """A choice of 4 with known rewards: over all outcomes, weighted by their chances, the gradient is exact."""
    logits = torch.randn(4, generator=rng(), dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 1.0, 0.5, -2.0], dtype=torch.float64)
    (want,) = torch.autograd.grad((logits.softmax(0) * rewards).sum(), logits)
    chances = torch.distributions.Categorical(logits=logits.detach()).probs
    log_probs = torch.log_softmax(logits, 0)
    parts = [
        chances[i] * losses.policy_gradient_loss(log_probs[i].view(1, 1), rewards[i : i + 1], torch.ones(1, 1).bool())
        for i in range(4)
    ]
    (got,) = torch.autograd.grad(-sum(parts), logits)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_bits_per_byte_of_a_uniform_model():
    """256 equally likely bytes: 8 bits each, however they are cut into tokens."""
    assert math.isclose(losses.bits_per_byte(math.log(256), 70, 70), 8)
    assert math.isclose(losses.bits_per_byte(2 * math.log(256), 35, 70), 8)
    assert math.isclose(losses.perplexity(math.log(256)), 256)
