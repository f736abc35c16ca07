"""Training goes on where it was stopped, and makes the same steps however a batch is cut or shared."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from tfmlib import attention, data, losses, optim, train, training
from tfmlib.course.meters import kept_tensors, total_bytes
from tfmlib.models.gpt import GPT, GPTConfig
from tfmlib.models.llama import Llama, LlamaConfig

SIZES = {"n_layers": 2, "d_model": 20, "n_heads": 5, "vocab_size": 31, "context_length": 13}
HERE = {**os.environ, "OMP_NUM_THREADS": "1"}


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def new_model(dtype=torch.float32, kind=GPT, config=GPTConfig):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return kind(config(**SIZES)).to(dtype)


class Dropping(nn.Module):
    """A model that draws random numbers while it trains, from all three generators."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(6)
            self.table, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.drop = nn.Dropout(0.3)

    def forward(self, ids):
        noise = (random.random() + np.random.rand()) * 0.1 if self.training else 0.0
        return self.head(self.drop(self.table(ids)) + noise)


def unequal_batches(n, B=4, seed=0):
    """Micro-batches with unequal numbers of counted labels."""
    generator = rng(seed)
    found = []
    for i in range(n):
        ids = torch.randint(31, (B, 14), generator=generator)
        is_token = torch.arange(14) < torch.randint(2, 15, (B, 1), generator=generator)
        is_token[0, : 3 + i % 11] = True
        found.append(losses.shift_labels(ids, is_token))
    return found


def together(batches):
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return inputs, labels


RECIPE = {"steps": 12, "warmup": 2, "lr_peak": 1e-2, "evaluate_every": 5, "save_every": 4}

# However a batch is cut or shared -------------------------------------------------------------------------------------


def gradients_of(model, batches):
    model.zero_grad()
    loss = training.accumulate_gradients(model, batches)
    return loss, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulation_is_one_big_batch(dtype):
    model, parts = new_model(dtype), unequal_batches(5)
    loss, got = gradients_of(model, parts)
    want_loss, want = gradients_of(model, [together(parts)])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert abs(loss - want_loss) < tolerance
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    means = [gradients_of(model, [part])[1] for part in parts]  # the mean of means is something else
    off = [
        (torch.stack(parts).mean(0) - b).abs().max() for parts, b in zip(zip(*means, strict=True), want, strict=True)
    ]
    assert max(off) > 1e-3


def steps_of(batches, **recipe):
    """The losses of two steps without clipping, and the gradients and weights after them."""
    model = new_model()
    recipe = training.Recipe(steps=2, warmup=0, max_norm=1e9, **recipe)
    records = training.train(model, batches, recipe, progress=False)
    return [record.loss for record in records], [p.grad for p in model.parameters()], list(model.parameters())


def _worker(rank, world, folder):
    """One of several processes; module level, so that a new process finds it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    got, gradients, weights = steps_of(unequal_batches(6), micro_batches=3)
    torch.save((got, gradients, [w.detach() for w in weights]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_make_the_steps_of_one(tmp_path):
    mp.spawn(_worker, args=(2, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for a, b in zip(first[1] + first[2], second[1] + second[2], strict=True):
        assert torch.equal(a, b)  # the processes agree to the bit
    parts = unequal_batches(6)
    for cut in ({"micro_batches": 3}, {"micro_batches": 1}):  # the same by accumulation, and as big batches
        batches = parts if cut["micro_batches"] == 3 else [together(parts[:3]), together(parts[3:])]
        want_losses, gradients, weights = steps_of(batches, **cut)
        assert max(abs(a - b) for a, b in zip(first[0], want_losses, strict=True)) < 1e-6
        for a, b in zip(first[1], gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        for a, b in zip(first[2], weights, strict=True):
            torch.testing.assert_close(
                a, b, rtol=0, atol=1e-4
            )  # AdamW turns the last bits of a small gradient into more


def test_each_process_needs_a_micro_batch(monkeypatch):
    for name, answer in {"is_initialized": True, "get_rank": 0, "get_world_size": 2}.items():
        monkeypatch.setattr(dist, name, lambda answer=answer: answer)
    with pytest.raises(ValueError, match="must be at least the 2 processes"):
        training.train(new_model(), unequal_batches(2), training.Recipe(**RECIPE), progress=False)


COMMAND = ["--corpus", "python-docs", "--layers", "1", "--heads", "2", "--width", "16", "--length", "8"]
COMMAND += ["--batch-size", "3", "--micro-batches", "2", "--warmup", "2", "--quiet", "--save-every", "2"]


def logged(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_torchrun_starts_the_same_run_in_two_processes(tmp_path):
    command = [*COMMAND, "--steps", "6", "--evaluate-every", "100"]
    train.main([*command, "--folder", str(tmp_path / "one")])
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    starter += ["-m", "tfmlib.train", *command, "--folder", str(tmp_path / "two")]
    ended = subprocess.run(starter, env=HERE, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("parameters, validation loss") == 1  # one process speaks
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert [line["step"] for line in two] == list(range(6))
    for a, b in zip(one, two, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-5
        assert abs(a["norm"] - b["norm"]) < 1e-4
    assert abs(one[-1]["validation_loss"] - two[-1]["validation_loss"]) < 1e-5


# Where it was stopped -------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """The run was stopped here."""


def run_until(stop, path, kind=Dropping):
    """Train until step `stop`, as a fresh process would: from the first batch, with other random numbers at first."""
    got = []

    def note(record):
        got.append(record)
        if record.step == stop:
            raise Stopped

    seed = 99 if path.exists() else 0
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    recipe = training.Recipe(**RECIPE, micro_batches=2)
    with contextlib.suppress(Stopped):
        training.train(kind(), iter(unequal_batches(24)), recipe, unequal_batches(2, seed=9), path, False, note)
    return got


@pytest.mark.parametrize("kind", [Dropping, new_model], ids=["random", "gpt"])
def test_a_run_that_stops_anywhere_goes_on_bit_by_bit(tmp_path, kind):
    whole = run_until(None, tmp_path / "whole.pt", kind)
    assert len(whole) == 12
    for stop in range(11):
        path = tmp_path / f"{stop}.pt"
        first = run_until(stop, path, kind)
        rest = run_until(None, path, kind)
        start = rest[0].step
        assert start == (stop + 1) // 4 * 4  # the last checkpoint
        assert first[:start] + rest == whole
    assert sorted(os.listdir(tmp_path)) == sorted({"whole.pt", *(f"{stop}.pt" for stop in range(11))})


def test_a_run_that_is_killed_goes_on_bit_by_bit(tmp_path):
    """The real thing: processes that are ended from outside, at any moment."""
    command = [*COMMAND, "--steps", "60", "--evaluate-every", "20"]
    train.main([*command, "--folder", str(tmp_path / "whole")])
    start = [sys.executable, "-m", "tfmlib.train", *command, "--folder", str(tmp_path / "killed")]
    for lines in (7, 32):
        process = subprocess.Popen(start, env=HERE, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        log = tmp_path / "killed" / "log.jsonl"
        while not log.exists() or len(log.read_text().splitlines()) < lines:
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    train.main([*command, "--folder", str(tmp_path / "killed")])
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")


KILLED_WHILE_WRITING = """
import os, signal, sys, torch
from tests.parity.test_training import new_model
from tfmlib import optim, training

model = new_model()
optimizer = optim.AdamW(model.parameters())
training.save_checkpoint(sys.argv[1], model, optimizer, 1)

def half(state, file):
    file.write(b"half of it")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = half
training.save_checkpoint(sys.argv[1], model, optimizer, 2)
"""


def test_a_run_that_is_killed_while_it_writes_loses_nothing(tmp_path):
    path = tmp_path / "checkpoint.pt"
    script = [sys.executable, "-c", KILLED_WHILE_WRITING, str(path)]
    ended = subprocess.run(script, env=HERE, cwd=train.Path(__file__).parents[2], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.pt", "checkpoint.pt.partial"]
    model = new_model()
    optimizer = optim.AdamW(model.parameters())
    assert training.load_checkpoint(path, model, optimizer) == 1
    training.save_checkpoint(path, model, optimizer, 2)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    assert training.load_checkpoint(path, model) == 2


# What a step may cost less --------------------------------------------------------------------------------------------


def kept_bytes(model, batch):
    """The bytes that the graph of one forward pass keeps, besides the parameters."""
    with kept_tensors(model.parameters()) as kept:
        losses.cross_entropy(model(batch[0]), batch[1])
    return total_bytes(kept)


@pytest.mark.parametrize(("kind", "config"), [(GPT, GPTConfig), (Llama, LlamaConfig)])
def test_recomputing_keeps_less_and_changes_no_bit(kind, config):
    model, parts = new_model(kind=kind, config=config), unequal_batches(2)
    loss, want = gradients_of(model, parts)
    plain = kept_bytes(model, parts[0])
    with training._recomputing(model, True):
        again, got = gradients_of(model, parts)
        little = kept_bytes(model, parts[0])
    assert loss == again
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert little < plain / 3
    assert "forward" not in vars(model.blocks[0])  # as it was


def test_autocast_computes_products_in_bfloat16_and_keeps_float32_weights():
    seen = set()
    model = new_model()
    model.blocks[0].mlp.up.register_forward_hook(lambda module, inputs, out: seen.add(out.dtype))
    recipes = [training.Recipe(**RECIPE, autocast=dtype) for dtype in (None, torch.bfloat16)]
    plain = training.train(new_model(), unequal_batches(12), recipes[0], unequal_batches(2), progress=False)
    low = training.train(model, unequal_batches(12), recipes[1], unequal_batches(2), progress=False)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert abs(plain[-1].validation_loss - low[-1].validation_loss) < 0.05
    assert plain[0].loss != low[0].loss


# Fused kernels --------------------------------------------------------------------------------------------------------


def has_kernels(model):
    return any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("kind", "config"), [(GPT, GPTConfig), (Llama, LlamaConfig)])
@pytest.mark.parametrize("n_kv_heads", [1, 5])
@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_fused_kernels_compute_the_same(kind, config, n_kv_heads, padding):
    torch.manual_seed(5)
    model = kind(config(**SIZES, n_kv_heads=n_kv_heads, norm_eps=0.03)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)  # norms' weights and biases too
    ids = torch.randint(31, (3, 13), generator=rng())
    mask = None
    if padding is not None:  # with padding on the left some queries see nothing at all
        is_token = torch.arange(13) < torch.tensor([[13], [6], [1]])
        mask = attention.padding_mask(is_token if padding == "right" else is_token.flip(1))
    weights = torch.randn(3, 13, 31, dtype=torch.float64, generator=rng(1))

    def results():
        logits = model(ids, mask=mask)
        return [logits.detach(), *torch.autograd.grad((logits * weights).sum(), list(model.parameters()))]

    plain = results()
    with training.fused_kernels(model):
        assert has_kernels(model)
        fused = results()
    for got, want in zip(fused, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    assert any(not torch.equal(got, want) for got, want in zip(fused, plain, strict=True))  # other code did run
    assert not has_kernels(model)
    assert all(torch.equal(got, want) for got, want in zip(results(), plain, strict=True))


def test_fused_kernels_are_put_back_after_an_error():
    model, written_out = new_model(), attention.scaled_dot_product_attention
    with pytest.raises(KeyError), training.fused_kernels(model), training.fused_kernels(model.blocks[0]):
        raise KeyError
    assert attention.scaled_dot_product_attention is written_out
    assert not has_kernels(model)


def test_an_inner_block_of_fused_kernels_leaves_the_outer_one_as_it_was():
    model = new_model()
    with training.fused_kernels(model):
        kernels = attention.scaled_dot_product_attention, model.blocks[0].norm1.forward
        with training.fused_kernels(model.blocks[0]):
            pass
        assert (attention.scaled_dot_product_attention, model.blocks[0].norm1.forward) == kernels
    assert not has_kernels(model)


def test_a_norm_without_an_epsilon_of_that_name_stays_itself():
    model = new_model()
    del model.norm.eps
    with training.fused_kernels(model):
        assert "forward" not in vars(model.norm)
        assert "forward" in vars(model.blocks[0].norm1)


@pytest.mark.parametrize("others", [{}, {"recompute": True}, {"autocast": torch.bfloat16}])
def test_a_fused_run_makes_the_same_steps(others):
    runs = {}
    for fused in (False, True):
        recipe = training.Recipe(**RECIPE, **others, fused=fused)
        runs[fused] = training.train(new_model(), unequal_batches(12), recipe, unequal_batches(2), progress=False)
    close = {"rtol": 1e-4, "atol": 1e-4} if "autocast" not in others else {"rtol": 0.02, "atol": 0.02}
    for name in ("loss", "norm"):
        plain, fused = ([getattr(record, name) for record in runs[kind]] for kind in (False, True))
        torch.testing.assert_close(fused, plain, **close)
    assert runs[False] != runs[True]


@pytest.mark.parametrize("stop", [1, 5, 8])
def test_a_fused_run_goes_on_bit_for_bit_and_a_plain_one_can_take_it_over(stop, tmp_path):
    recipe = training.Recipe(**{**RECIPE, "save_every": 1}, fused=True)
    whole = training.train(new_model(), unequal_batches(12), recipe, progress=False)

    class Stopped(Exception):
        pass

    def interrupt(record):
        if record.step + 1 == stop:
            raise Stopped

    for kind in (True, False):
        path = tmp_path / f"{kind}.pt"
        with pytest.raises(Stopped):
            training.train(new_model(), unequal_batches(12), recipe, (), path, progress=False, on_record=interrupt)
        rest = training.Recipe(**{**RECIPE, "save_every": 1}, fused=kind)
        records = training.train(new_model(), unequal_batches(12), rest, (), path, progress=False)
        if kind:
            assert records == whole[stop:]
        else:
            torch.testing.assert_close([r.loss for r in records], [r.loss for r in whole[stop:]], rtol=1e-4, atol=1e-4)


# What train refuses, and what it tells --------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path):
    model = new_model()

    def poison(record):
        if record.step == 5:
            model.norm.weight.data[0] = float("nan")
            weights.update({name: value.clone() for name, value in model.state_dict().items()})

    weights = {}
    with pytest.raises(FloatingPointError, match="step 6: the loss is nan"):
        training.train(
            model,
            unequal_batches(12),
            training.Recipe(**RECIPE),
            (),
            tmp_path / "run.pt",
            progress=False,
            on_record=poison,
        )
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], equal_nan=True, rtol=0, atol=0)
    assert training.load_checkpoint(tmp_path / "run.pt", new_model()) == 4


def test_records_tell_what_happened():
    recipe, same_batch = training.Recipe(**RECIPE), unequal_batches(1) * 12
    records = training.train(new_model(), same_batch, recipe, unequal_batches(2), progress=False)
    assert [record.step for record in records] == list(range(12))
    assert [record.step for record in records if record.validation_loss is not None] == [4, 9, 11]
    assert [record.lr for record in records] == [optim.warmup_cosine(s, 2, 12, 1e-2, 1e-4) for s in range(12)]
    assert records[-1].loss < records[0].loss
    assert all(record.norm > 0 for record in records)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps": 3}, "must be above warmup"),
        ({"micro_batches": 0}, "micro_batches must be at least 1"),
        ({"autocast": torch.float16}, "float16 would need its loss scaled"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(change, why):
    with pytest.raises(ValueError, match=why):
        training.Recipe(**{**RECIPE, **change})


def test_progress_is_shown(capsys):
    training.train(new_model(), unequal_batches(12), training.Recipe(**RECIPE), unequal_batches(2))
    shown = capsys.readouterr().err
    assert "12/12" in shown
    assert "validation" in shown


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_trains_on_a_file_with_a_bpe(tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text(data.load_corpus()[:20_000], encoding="utf-8")
    command = ["--corpus", str(path), "--vocab-size", "300", "--model", "llama", *COMMAND[2:], "--steps", "4"]
    train.main([*command, "--folder", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "bits a byte" in said
    train.main([*command, "--folder", str(tmp_path / "run")])
    assert "all steps were made before" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="holds a run of another model"):
        train.main([*command, "--layers", "2", "--folder", str(tmp_path / "run")])


def test_the_command_trains_with_fused_kernels(tmp_path):
    for name, extra in {"plain": [], "fused": ["--fused"]}.items():
        train.main([*COMMAND, "--steps", "4", "--folder", str(tmp_path / name), *extra])
    plain, fused = ([line["loss"] for line in logged(tmp_path / name)] for name in ("plain", "fused"))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=0)
    assert fused != plain


def test_the_command_trains_on_storyland(tmp_path, capsys):
    train.main(["--corpus", "storyland", *COMMAND[2:], "--steps", "4", "--folder", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "above the floor of 0.4248" in said
    assert "sentences in 100 stories are allowed" in said
