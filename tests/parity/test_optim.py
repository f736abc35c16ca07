"""The optimizer, the schedules and clipping against torch's own, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from tfmlib import optim
from tfmlib.models.gpt import GPT, GPTConfig

SIZES = {"n_layers": 2, "d_model": 20, "n_heads": 5, "vocab_size": 31, "context_length": 11}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def twins():
    """Two equal models in float64."""
    models = [GPT(GPTConfig(**SIZES)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return models


def test_adamw_follows_torchs_for_200_steps():
    ours, theirs = twins()
    kinds = (optim.AdamW, torch.optim.AdamW)
    optimizers = [
        kind(optim.parameter_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
        for kind, model in zip(kinds, (ours, theirs), strict=True)
    ]
    generator = rng()
    for step in range(200):
        ids = torch.randint(31, (3, 12), generator=generator)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = optim.warmup_cosine(step, 10, 200, 3e-3)
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    start, _ = twins()
    for (name, p), q, r in zip(ours.named_parameters(), theirs.parameters(), start.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-12, name
        if not name.endswith("k_proj.bias"):  # it adds the same to all scores of a query: its gradient is 0
            assert (p - r).abs().max() > 1e-4, name
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert (optimizers[0].state[p][key] - optimizers[1].state[q][key]).abs().max() < 1e-12


def test_torch_can_go_on_from_our_state_and_we_from_theirs():
    ours, theirs = twins()
    a, b = optim.AdamW(ours.parameters(), lr=1e-3), torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    ids = torch.randint(31, (3, 11), generator=rng())
    for _ in range(2):
        for _ in range(3):
            for model, optimizer in ((ours, a), (theirs, b)):
                optimizer.zero_grad()
                model(ids).square().mean().backward()
                optimizer.step()
        moments = [optimizer.state_dict()["state"] for optimizer in (a, b)]
        for i, state in moments[0].items():
            assert int(state["step"]) == int(moments[1][i]["step"])
            torch.testing.assert_close(state["exp_avg"], moments[1][i]["exp_avg"], rtol=1e-9, atol=1e-12)
        a, b = optim.AdamW(ours.parameters(), lr=1e-3), torch.optim.AdamW(theirs.parameters(), lr=1e-3)
        a.state.update(
            {p: {**moments[1][i], "step": int(moments[1][i]["step"])} for i, p in enumerate(ours.parameters())}
        )
        b.state.update(
            {
                p: {**moments[0][i], "step": torch.tensor(float(moments[0][i]["step"]))}
                for i, p in enumerate(theirs.parameters())
            }
        )
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("warmup", "total", "floor"), [(7, 50, 1e-4), (1, 30, 0.0), (20, 23, 1e-3)])
def test_the_cosine_schedule_is_torchs(warmup, total, floor):
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=max(warmup - 1, 1))
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - 1 - warmup, eta_min=floor)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[warmup])
    for step in range(total):
        want = optimizer.param_groups[0]["lr"]
        assert math.isclose(optim.warmup_cosine(step, warmup, total, 1.0, floor), want, rel_tol=1e-9, abs_tol=1e-12)
        optimizer.step()
        schedule.step()


def test_the_inverse_root_schedule_is_that_of_the_2017_paper():
    """lr = C^-0.5 * min(step^-0.5, step * warmup^-1.5), with steps from 1; its peak is at step = warmup."""
    C, warmup = 512, 4000
    peak = (C * warmup) ** -0.5
    for step in (1, 2, 1999, 3999, 4000, 4001, 100_000):
        want = C**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert math.isclose(optim.warmup_inverse_sqrt(step - 1, warmup, peak), want, rel_tol=1e-12)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_clipping_is_torchs(max_norm, dtype):
    shapes = [(3, 5), (7,), (), (2, 3, 2)]
    ours, theirs = ([torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes] for _ in range(2))
    generator = rng(3)
    for p, q in zip(ours, theirs, strict=True):
        p.grad = torch.randn(p.shape, generator=generator, dtype=dtype)
        q.grad = p.grad.clone()
    norm = optim.clip_gradients(iter(ours), max_norm)
    want = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    close = {"rtol": 1e-12, "atol": 0.0} if dtype == torch.float64 else {}
    torch.testing.assert_close(norm, want, **close)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, **close)
