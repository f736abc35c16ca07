"""The checks of chapter 09: gradients in parts, evaluation, checkpoints. Outside truth: torch, files made by hand."""

import contextlib
import copy
import os
import random
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .same import (
    Broken,
    alike,
    expect,
    filled,
    first_optimizer,
    is_exception,
    outcome,
    raises,
    random_states,
    random_states_kept,
    rng,
    same,
)

before_the_clock = first_optimizer

IGNORE = -100
V = 7  # tokens in the vocabulary

# Models and batches to try the pieces on ------------------------------------------------------------------------------


class Trouble(Exception):
    """An error that comes on purpose."""


class Toy(nn.Module):
    """A little language model, (B, T) -> (B, T, V) in float64, that tells what happens to it.

    `note` is called with every event: "forward" or "backward" and the batch's shape. `fails` is the number of the call
    that raises an error.
    """

    def __init__(self, dropout=0.0, note=None, fails=None):
        super().__init__()
        self.table = nn.Embedding(V, V, dtype=torch.float64)
        self.mix = nn.Linear(V, V, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.zeros(V, dtype=torch.float64), requires_grad=False)
        self.inner = nn.Sequential(nn.Dropout(dropout), nn.Sequential(nn.Identity(), nn.Dropout(dropout)))
        self.note, self.fails, self.calls = note, fails, 0

    def forward(self, inputs):
        if inputs.ndim != 2:
            raise ValueError(f"expected inputs of shape (B, T), got {tuple(inputs.shape)}")
        self.calls += 1
        if self.calls == self.fails:
            raise Trouble("this model fails, on purpose")
        x = self.table(inputs)
        logits = self.mix(self.inner(x.cumsum(1))) + x * 3 + self.frozen
        if self.note:
            size = " x ".join(map(str, inputs.shape))
            self.note(f"forward {size}")
            if logits.requires_grad:
                logits.register_hook(lambda _: self.note(f"backward {size}"))
        return logits


class Uniform(nn.Module):
    """Finds all of four tokens equally likely, as long as its only parameter is zero."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))

    def forward(self, inputs):
        return self.table[inputs]


def _batch(B, T, salt, counted=None):
    """Inputs and labels, (B, T) each; all but `counted` of the labels are IGNORE."""
    ids = torch.randint(V, (2, B, T), generator=rng(salt))
    labels = ids[1].flatten()
    if counted is not None:
        labels[torch.randperm(B * T, generator=rng(salt + 1))[counted:]] = IGNORE
    return ids[0], labels.view(B, T)


def _unequal():
    """Micro-batches with 2, 33 and 5 counted labels."""
    return [_batch(1, 2, 20), _batch(3, 11, 30), _batch(5, 1, 40)]


def _padded():
    """Micro-batches with 3 of 26, 0 of 6 and 17 of 21 labels counted."""
    return [_batch(2, 13, 50, 3), _batch(3, 2, 60, 0), _batch(3, 7, 70, 17)]


@torch.enable_grad()  # whatever the piece has left behind
def _whole(model, batches):
    """The loss over all counted labels of the batches together, and its gradients by name."""
    n = sum(int((labels != IGNORE).sum()) for _, labels in batches)
    sums = [F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") for x, y in batches]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = sum(sums) / n
    return loss.item(), dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))


def _number(got, want, what):
    """Break the promise unless this is a float, right to a millionth."""
    kind = f"{type(got).__name__} of shape {tuple(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
    advice = ": .item() makes one" if isinstance(got, Tensor) else ". Is a `return` missing?" if got is None else ""
    expect(isinstance(got, float), f"{what}: expected a float, got {kind}{advice}")
    expect(abs(got - want) <= 1e-6 * max(1.0, abs(want)), f"{what}: expected {want:.7g}, got {got:.7g}")


def _gradients(model, want, what):
    """Break the promise unless the parameters' gradients are these, to a millionth."""
    for name, p in model.named_parameters():
        if name not in want:
            expect(p.grad is None, f"{what}: expected no gradient for {name}, which requires none; got one")
            continue
        if p.grad is None:
            raise Broken(f"{what}: expected a gradient of {name}, got None")
        expect(p.grad.shape == p.shape, f"{what}: the gradient of {name} has shape {tuple(p.grad.shape)}")
        expect(p.grad.dtype == p.dtype, f"{what}: the gradient of {name} has dtype {p.grad.dtype}")
        off = (p.grad - want[name]).abs()
        if not (off <= 1e-6).all():
            at = (~(off <= 1e-6)).nonzero()[0].tolist()
            pair = f"expected {want[name][tuple(at)]:.6g}, got {p.grad[tuple(at)]:.6g}"
            raise Broken(f"{what}: gradient of {name} at {at}: {pair}")


def _told(x):
    """A number, a gradient or a weight as a probe tells it: as a tensor, in which NaN equals NaN."""
    if isinstance(x, float):
        return torch.tensor(float(x))
    return "no gradient" if x is None else x.detach().float() if isinstance(x, nn.Parameter) or x.ndim else "a tensor"


def _modes(model):
    return {name or "the model": module.training for name, module in model.named_modules()}


def _set_modes(model):
    """Some parts in train mode, some in eval mode, and parts of parts otherwise than the part."""
    model.train()
    model.table.eval()
    model.inner.eval()
    model.inner[1].train()
    model.inner[1][1].eval()
    return model


def _same_modes(model, before, what):
    for name, mode in _modes(model).items():
        words = {True: "train", False: "eval"}
        expect(mode == before[name], f"{what}: expected {name} in {words[before[name]]} mode, got {words[mode]} mode")


# accumulate_gradients -------------------------------------------------------------------------------------------------


def _accumulated(accumulate_gradients, micro_batches, start=None, model=None):
    """The loss and all gradients that come about, and the weights."""
    model = filled(Toy()) if model is None else model
    for p in model.parameters():
        if p.requires_grad and start is not None:
            p.grad = torch.full_like(p, start)
    loss = accumulate_gradients(model, micro_batches)
    return _told(loss), [_told(p.grad) for p in model.parameters()], [_told(p) for p in model.parameters()]


def probe_accumulate_gradients(accumulate_gradients):
    """Results that tell the known mistakes apart."""

    def ask(*args, **kwargs):
        return outcome(lambda: _accumulated(accumulate_gradients, *args, **kwargs))

    def events():
        noted = []
        accumulate_gradients(filled(Toy(note=noted.append)), _unequal())
        return noted

    def modes():
        model = _set_modes(Toy())
        accumulate_gradients(model, _unequal())
        return sorted(_modes(model).items())

    answers = [ask(_unequal()), ask(_padded()), ask(_unequal(), start=1.0), ask(_unequal()[1:2])]
    answers += [ask([_batch(2, 3, 80, 0)]), ask([_batch(2, 3, 80, 0)], start=1.0), ask([])]
    # The loss and the gradients one by one, for mistakes in one of them.
    parts = [part for answer in answers for part in (answer if isinstance(answer, tuple) else [answer] * 3)]
    from_a_generator = alike(ask(iter(_unequal())), answers[0])  # and not its numbers: they tell other mistakes
    return [*parts, from_a_generator, outcome(events), outcome(modes)]


def test_a_uniform_model_by_hand(accumulate_gradients):
    """Of 4 equally likely tokens: the loss is log 4, and the gradient of logits is (p - 1 or p) / 2 for two labels."""
    model = Uniform()
    loss = accumulate_gradients(model, [(torch.tensor([[0, 1]]), torch.tensor([[1, 3]]))])
    _number(loss, 1.3862943611, "loss of a model that finds 4 tokens equally likely")
    want = torch.zeros(4, 4)
    want[0] = torch.tensor([1.0, -3.0, 1.0, 1.0]) / 8
    want[1] = torch.tensor([1.0, 1.0, 1.0, -3.0]) / 8
    _gradients(model, {"table": want}, "one micro-batch of two labels")


def test_parts_equal_the_whole(accumulate_gradients):
    """Micro-batches with 2, 33 and 5 labels give the loss and the gradients of one batch of 40 labels."""
    for batches in (_unequal(), _unequal()[1:], _unequal()[:1], [_batch(2, 3, salt) for salt in (1, 3, 5, 7)]):
        model = filled(Toy())
        loss, want = _whole(model, batches)
        what = f"micro-batches with {', '.join(str(y.numel()) for _, y in batches)} labels"
        _number(accumulate_gradients(model, batches), loss, f"loss of {what}")
        _gradients(model, want, what)


def test_ignored_labels_do_not_weigh(accumulate_gradients):
    """With 3, 0 and 17 labels counted the mean is over 20; a micro-batch without any adds nothing."""
    for batches in (_padded(), _padded()[::-1], _padded()[1:], _padded()[:1]):
        model = filled(Toy())
        loss, want = _whole(model, batches)
        what = f"micro-batches with {', '.join(str(int((y != IGNORE).sum())) for _, y in batches)} counted labels"
        _number(accumulate_gradients(model, batches), loss, f"loss of {what}")
        _gradients(model, want, what)


def test_gradients_are_added(accumulate_gradients):
    """What is in the gradients stays, and the new gradient is added: calling twice gives twice the gradient."""
    model = filled(Toy())
    old = {name: torch.randn(p.shape, generator=rng(3), dtype=p.dtype) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = old[name].clone() if p.requires_grad else None
    batches = [_batch(3, 11, 30, 20)]
    _, new = _whole(model, batches)
    accumulate_gradients(model, batches)
    _gradients(model, {name: old[name] + new[name] for name in new}, "old gradient plus new")
    model = filled(Toy())
    accumulate_gradients(model, batches)
    accumulate_gradients(model, batches)
    _gradients(model, {name: 2 * new[name] for name in new}, "after two calls")


def test_nothing_counted_changes_nothing(accumulate_gradients):
    """Without a counted label the loss is 0.0, and the gradients stay as they are, None where they were None."""
    for batches in ([_batch(2, 3, 1, 0)], [_batch(2, 3, 1, 0), _batch(1, 5, 3, 0)], []):
        what = f"{len(batches)} micro-batches without a counted label"
        model = filled(Toy())
        loss = accumulate_gradients(model, batches)
        expect(not isinstance(loss, Tensor) and loss == 0.0, f"{what}: expected 0.0, got {loss}")
        _gradients(model, {}, what)
        ones = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad}
        for name, p in model.named_parameters():
            p.grad = ones[name].clone() if name in ones else None
        accumulate_gradients(model, batches)
        _gradients(model, ones, what)


def test_one_micro_batch_at_a_time(accumulate_gradients):
    """A micro-batch runs forward once and backward before the next one starts, so memory holds one of them."""
    for batches in (_unequal(), _unequal()[::-1]):
        noted = []
        accumulate_gradients(filled(Toy(note=noted.append)), batches)
        sizes = [" x ".join(map(str, x.shape)) for x, _ in batches]
        want = [f"{way} {size}" for size in sizes for way in ("forward", "backward")]
        pairs = sorted(zip(noted[0::2], noted[1::2], strict=False))  # micro-batches in any order
        right = len(noted) == len(want) and pairs == sorted(zip(want[0::2], want[1::2], strict=True))
        expect(right, f"expected this order: {', '.join(want)}; got {', '.join(noted)}")


def test_micro_batches_may_come_from_a_generator(accumulate_gradients):
    """What gives each micro-batch only once, a generator, is as good as a list."""
    for batches in (_unequal(), _unequal()[:1]):
        model, other = filled(Toy()), filled(Toy())
        loss = accumulate_gradients(model, batches)
        got = accumulate_gradients(model=other, micro_batches=(batch for batch in batches))
        _number(got, loss, "loss of micro-batches from a generator, and from a list")
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        _gradients(other, grads, "micro-batches from a generator, and from a list")


def test_the_model_itself_stays(accumulate_gradients):
    """No step is made: weights and modes stay; the model runs in the mode that it is in."""
    model = _set_modes(filled(Toy(dropout=0.5)))
    modes, weights = _modes(model), copy.deepcopy(model.state_dict())
    seen = []
    model.register_forward_hook(lambda *_: seen.append(_modes(model)))
    accumulate_gradients(model, _unequal())
    expect(all(found == modes for found in seen), "expected the model to run in the mode that it is in, got another")
    for name, value in model.state_dict().items():
        same(value, weights[name], f"{name}, which only an optimizer's step may change")
    _same_modes(model, modes, "after accumulate_gradients")
    expect(
        all(p.requires_grad == (name != "frozen") for name, p in model.named_parameters()),
        "expected requires_grad as it was",
    )
    model = filled(Toy(dropout=0.5)).eval()
    batches = _unequal()[1:2]
    loss, want = _whole(model, batches)
    _number(accumulate_gradients(model, batches), loss, "loss of a model in eval mode")
    _gradients(model, want, "a model in eval mode")


# evaluate -------------------------------------------------------------------------------------------------------------


def probe_evaluate(evaluate):
    """Results that tell the known mistakes apart."""

    def run(*args):
        with torch.enable_grad():  # what is switched off must not reach the next question
            return evaluate(*args)

    def ask(batches, start=None):
        def asked():
            model = _set_modes(filled(Toy()))
            if start is not None:
                for p in model.parameters():
                    p.grad = torch.full_like(p, start)
            return _told(run(model, batches)), [_told(p.grad) for p in model.parameters()]

        return outcome(asked)

    def modes(model, batches):
        with contextlib.suppress(Exception):
            run(model, batches)
        return sorted(_modes(model).items())

    def seen(model):
        """What the model sees while it runs: its modes, and whether gradients are recorded."""
        noted = []

        def note(module, inputs, logits):
            noted.append((any(m.training for m in module.modules()), module.training, logits.requires_grad))

        model.register_forward_hook(note)
        run(model, _unequal())
        return sorted(set(noted))

    def enabled():
        with torch.enable_grad():
            evaluate(filled(Toy()), _unequal())
            return torch.is_grad_enabled()

    answers = [ask(_unequal()), ask(_padded()), ask(_unequal()[:1]), ask(_unequal(), start=1.0)]
    parts = [part for answer in answers for part in (answer if isinstance(answer, tuple) else [answer] * 2)]
    none = [outcome(lambda b=b: str(run(filled(Toy()), b))) for b in ([_batch(2, 3, 80, 0)], [])]
    return [
        *parts,
        *none,
        alike(ask(iter(_unequal())), answers[0]),
        outcome(lambda: seen(filled(Toy()))),
        outcome(lambda: seen(_set_modes(filled(Toy())))),
        outcome(lambda: seen(filled(Toy()).eval())),
        outcome(enabled),
        outcome(lambda: modes(filled(Toy()), _unequal())),
        outcome(lambda: modes(filled(Toy()).eval(), _unequal())),
        outcome(lambda: modes(_set_modes(filled(Toy())), _unequal())),
        outcome(lambda: modes(_set_modes(filled(Toy(fails=2))), _unequal())),
        outcome(lambda: modes(_set_modes(filled(Toy())), [_batch(2, 3, 80, 0)])),
    ]


def test_a_uniform_model_scores_log_4(evaluate):
    """A model that finds 4 tokens equally likely has a loss of log 4 = 1.386 nats, a float."""
    got = evaluate(Uniform(), [(torch.tensor([[0, 1]]), torch.tensor([[1, 3]]))])
    _number(got, 1.3862943611, "loss of a model that finds 4 tokens equally likely")


def test_every_label_weighs_the_same(evaluate):
    """Batches with 2, 33 and 5 labels: the mean is over all 40, not over three batches."""
    for batches in (_unequal(), _unequal()[1:], _unequal()[:1], _unequal()[::-1]):
        model = filled(Toy())
        what = f"loss of batches with {', '.join(str(y.numel()) for _, y in batches)} labels"
        _number(evaluate(model, batches), _whole(model, batches)[0], what)


def test_only_counted_labels_weigh(evaluate):
    """With 3, 0 and 17 labels counted the mean is over 20; a batch without any adds nothing."""
    for batches in (_padded(), _padded()[::-1], _padded()[:2], _padded()[2:]):
        model = filled(Toy())
        what = f"loss of batches with {', '.join(str(int((y != IGNORE).sum())) for _, y in batches)} counted labels"
        _number(evaluate(model, batches), _whole(model, batches)[0], what)


def test_batches_may_come_from_a_generator(evaluate):
    """What gives each batch only once, a generator, is as good as a list."""
    model = filled(Toy())
    for batches in (_unequal(), _unequal()[:1]):
        loss = evaluate(model, batches)
        got = evaluate(model=model, batches=(batch for batch in batches))
        _number(got, loss, "loss of batches from a generator, and from a list")


def test_it_runs_in_eval_mode(evaluate):
    """While it runs every part is in eval mode, so that dropout drops nothing."""
    for prepare in (nn.Module.train, _set_modes, nn.Module.eval):
        model = filled(Toy(dropout=0.5))
        prepare(model)
        found = []
        model.register_forward_hook(lambda m, *_, found=found: found.extend(n for n, on in _modes(m).items() if on))
        batches = _unequal()[1:2]
        got = evaluate(model, batches)
        parts = ", ".join(dict.fromkeys(found))
        expect(not found, f"expected every part in eval mode while it runs, but in train mode were: {parts}")
        _number(got, _whole(filled(Toy()).eval(), batches)[0], "loss of a model with dropout, in eval mode")


def test_it_leaves_gradients_alone(evaluate):
    """The model runs without recording for gradients; those of its parameters, and its weights, stay as they are."""
    torch.set_grad_enabled(True)
    recorded = []
    model = filled(Toy())
    weights = copy.deepcopy(model.state_dict())
    model.register_forward_hook(lambda m, inputs, logits: recorded.append(logits.requires_grad))
    evaluate(model, _unequal())
    after = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    expect(after, "expected torch to record gradients again afterwards, but they are switched off for everybody")
    expect(not any(recorded), "expected the model to run under torch.no_grad(), but its results had a graph")
    _gradients(model, {}, "after evaluate")
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = ones[name].clone()
    evaluate(model, _unequal())
    _gradients(model, ones, "gradients that were there before")
    for name, value in model.state_dict().items():
        same(value, weights[name], f"{name}, which an evaluation may not change")
    expect(
        all(p.requires_grad == (name != "frozen") for name, p in model.named_parameters()),
        "expected requires_grad as it was",
    )
    with torch.no_grad():
        evaluate(model, _unequal())
        expect(not torch.is_grad_enabled(), "called under no_grad, it switched gradients on for its caller")


def test_every_part_gets_its_own_mode_back(evaluate):
    """Afterwards each part is in the mode that it had: all in train mode, all in eval mode, or some of each."""
    for prepare in (nn.Module.train, nn.Module.eval, _set_modes, lambda m: _set_modes(m).inner.train()):
        model = filled(Toy())
        prepare(model)
        before = _modes(model)
        evaluate(model, _unequal())
        _same_modes(model, before, "after evaluate")


def _failing_batches():
    yield _batch(2, 3, 1)
    raise Trouble("these batches fail, on purpose")


def test_modes_come_back_after_an_error(evaluate):
    """If the model fails, or the batches do, the error is raised and each part is in its own mode again."""
    for prepare in (nn.Module.train, _set_modes):
        for fails, batches in ((1, _unequal()), (2, _unequal()), (None, _failing_batches())):
            model = filled(Toy(fails=fails))
            prepare(model)
            before = _modes(model)
            what = "batches that fail" if fails is None else f"a model that fails at call {fails}"
            raises(Trouble, lambda model=model, batches=batches: evaluate(model, batches), what)
            _same_modes(model, before, f"after {what}")
            expect(torch.is_grad_enabled(), f"after {what}: expected torch to record gradients again")


def test_nothing_to_evaluate_is_an_error(evaluate):
    """If no label counts, or there is no batch, that is a ValueError; the modes come back all the same."""
    model = _set_modes(filled(Toy()))
    before = _modes(model)
    for batches in ([_batch(2, 3, 1, 0)], [_batch(2, 3, 1, 0), _batch(1, 1, 3, 0)], []):
        what = f"{len(batches)} batches without a counted label"
        raises(ValueError, lambda batches=batches: evaluate(model, batches), what)
        _same_modes(model, before, f"after {what}")


# A training to save and to go on with ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder():
    """A folder of one's own, and random generators that may be moved; both are put right afterwards."""
    with tempfile.TemporaryDirectory() as folder, random_states_kept():
        _set_generators(0)
        yield Path(folder)


def _set_generators(salt):
    """Bring torch's generator for the CPU, Python's and NumPy's to a state that follows from the seed."""
    seed = rng(salt).initial_seed()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _adamw(model):
    groups = [{"params": list(model.parameters())[:2], "lr": 0.05}, {"params": list(model.parameters())[2:]}]
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1)


def _momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


def _training(make=_adamw, steps=3):
    """A model with dropout and running statistics, and its optimizer, in the middle of training."""
    model = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 2), nn.Dropout(0.5))
    model[4].eval()
    optimizer = make(model)
    _steps(model, optimizer, steps)
    return model, optimizer


def _steps(model, optimizer, n):
    """Make n steps with whatever the random generators give; returns the losses. All generators are used."""
    losses = []
    for _ in range(n):
        x = torch.randn(11, 3) * random.gauss(1.0, 0.5) + np.random.standard_normal()
        loss = (model(x) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        losses.append(loss.item())
    return losses


def _same_losses(got, want, optimizer):
    """Break the promise unless the losses are the same to the last bit."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        expect(g == w, f"loss of step {i + 1} afterwards, with {optimizer}: expected {w}, got {g}")


def _by_hand(model, optimizer, step):
    """What a checkpoint holds."""
    name, keys, *rest = np.random.get_state()
    generators = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "random": generators}
    return copy.deepcopy(state)


def _same_state(got, want, what):
    """Break the promise unless two states are the same to the last bit."""
    if isinstance(want, Tensor):
        same(got, want, what)
        expect(torch.equal(got, want), f"{what}: expected every bit kept, got values that are a little off")
    elif isinstance(want, dict):
        expect(isinstance(got, dict), f"{what}: expected a dict, got {type(got).__name__}")
        missing, extra = [k for k in want if k not in got], [k for k in got if k not in want]
        expect(not missing and not extra, f"{what}: expected the keys {list(want)}, got {list(got)}")
        for key in want:
            _same_state(got[key], want[key], f"{what}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        right = isinstance(got, (list, tuple)) and len(got) == len(want)
        expect(right, f"{what}: expected {len(want)} items in a list or tuple, got {_short(got)}")
        for i, item in enumerate(want):
            _same_state(got[i], item, f"{what}[{i}]")
    else:
        expect(not isinstance(got, Tensor) and got == want, f"{what}: expected {want!r}, got {_short(got)}")


def _short(x):
    text = f"{type(x).__name__} {x!r}"
    return text if len(text) < 60 else f"{text[:60]}..."


def _loaded(path, *parts):
    """What a file holds, if it loads with weights_only=True and has these parts."""
    expect(path.is_file(), f"expected a file {path.name}, but there is none; the folder has {_names(path.parent)}")
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it holds {found[1]}" if found else f"{type(error).__name__}"
        said = f"the file does not load with weights_only=True ({what}): save tensors, numbers, texts, and dicts,"
        raise Broken(f"{said} lists and tuples of them") from error
    expect(isinstance(state, dict), f"expected a dict in the file, got {type(state).__name__}")
    for part in parts:
        expect(part in state, f"expected {part!r} among the keys of the file, got {list(state)}")
    return state


def _readable(path):
    """Break the promise unless there is a file that torch can load, whatever it holds."""
    expect(path.is_file(), f"expected a file {path.name}, but there is none; the folder has {_names(path.parent)}")
    try:
        torch.load(path, weights_only=False)
    except Exception as error:
        raise Broken(f"expected {path.name} to load, got {type(error).__name__}: {error}") from error


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _set_back(generators):
    """Set the random generators to the states of a file."""
    try:
        torch.set_rng_state(generators["torch"])
        version, internal, gauss = generators["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = generators["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    except Exception as error:
        forms = "torch.get_rng_state(), random.getstate(), and np.random.get_state() with its array as a list"
        raise Broken(f"the random states in the file cannot be set again ({error}); expected {forms}") from error


# save_checkpoint ------------------------------------------------------------------------------------------------------


def _fails(call):
    """Whether a call raises an error."""
    try:
        call()
    except NotImplementedError:
        raise
    except Exception:
        return True
    return False


def _unsavable(optimizer):
    """Give an optimizer a function in its state, which cannot be written to a file."""
    optimizer.param_groups[0]["schedule"] = lambda step: 0.1
    return optimizer


class _Seen:
    """What was seen of a folder: the names in it, and how the file at `path` looked."""

    def __init__(self, path):
        self.path, self.names, self.states = path, set(), set()

    def look(self):
        self.names.update(os.listdir(self.path.parent))
        self.states.add(_looks(self.path))


def _looks(path):
    try:
        now = os.stat(path)
    except FileNotFoundError:
        return None
    return now.st_ino, now.st_size


@contextlib.contextmanager
def _watched(path):
    """Look at a file and its folder before every call of a function written in C, as those are that touch files."""
    seen = _Seen(path)

    def on_event(frame, event, called):
        if event == "c_call" and called is not isinstance:  # torch.save asks this thousands of times
            seen.look()

    if sys.getprofile() is not None:  # somebody is measuring already: nothing is seen then
        yield seen
        return
    sys.setprofile(on_event)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def probe_save_checkpoint(save_checkpoint):
    """Results that tell the known mistakes apart."""

    def form(x):
        """What kind of thing a file holds: short, and the same for every seed."""
        if isinstance(x, dict):
            return sorted((str(key), form(value)) for key, value in x.items())
        if isinstance(x, Tensor):
            return f"{x.dtype} {tuple(x.shape)}"
        return [form(item) for item in x[:9]] if isinstance(x, (list, tuple)) else f"{type(x).__name__}"

    def usual():
        """All there is to see when a file takes the place of an old one."""
        with _folder() as folder:
            model, optimizer = _training(steps=1)
            want, states, modes = _by_hand(model, optimizer, 12), random_states(), _modes(model)
            path, other, link = folder / "a.pt", folder / "a.partial", folder / "link"
            path.write_bytes(b"old")
            other.write_bytes(b"other")
            with contextlib.suppress(OSError):  # some file systems have no links
                os.link(path, link)
            kept = [(other, b"other"), *([(link, b"old")] if link.exists() else [])]
            old = _looks(path)
            with _watched(path) as seen:
                save_checkpoint(path, model, optimizer, 12)
            strange = {"empty or half" if state else "missing" for state in seen.states - {old, _looks(path)}}
            safe = outcome(lambda: sorted(torch.load(path, weights_only=True)))
            state = torch.load(path, weights_only=False)
            parts = [("model",), ("optimizer",), ("step",), *(("random", key) for key in ("torch", "python", "numpy"))]
            return [
                safe,
                form(state) if not is_exception(safe) else sorted(state),
                [outcome(lambda part=part: _fits(state, want, *part)) for part in parts],
                type(state.get("model")).__name__,
                sorted(strange),
                "a.pt.partial" in seen.names,
                len(seen.names - {"a.pt", "a.pt.partial", "a.partial", "link"}),
                [p.name for p, content in kept if not p.exists() or p.read_bytes() != content],
                random_states() == states,
                _modes(model) == modes,
            ]

    def left(prepare, ruin=False):
        """The error, if there is one, and the files in the folder afterwards."""
        with _folder() as folder:
            path = folder / "a.pt"
            prepare(path)
            model, optimizer = _training(steps=0)
            if ruin:
                _unsavable(optimizer)
            error = outcome(lambda: save_checkpoint(str(path) if not ruin else path, model, optimizer, 1))
            kept = path.is_file() and path.read_bytes() == b"old"
            return type(error).__name__ if ruin else str(error), _names(folder), kept

    def old_file(path):
        path.write_bytes(b"old")

    def killed(path):
        path.with_name("a.pt.partial").write_bytes(b"half")

    def blocked(path):
        path.mkdir()
        (path / "x").write_bytes(b"x")

    seen = outcome(usual)
    return [
        *(seen if isinstance(seen, list) else [seen] * 10),
        outcome(lambda: left(old_file)),
        outcome(lambda: left(old_file, ruin=True)),
        outcome(lambda: left(killed)),
        outcome(lambda: left(blocked)[1]),
    ]


def _fits(got, want, *keys):
    """Whether a part of a file is the wanted one."""
    for key in keys:
        got, want = got[key], want[key]
    try:
        _same_state(got, want, "part")
    except Broken:
        return False
    return True


def test_the_file_holds_model_optimizer_and_step(save_checkpoint):
    """The file is a dict with "model", "optimizer", "step" and "random", and loads with weights_only=True."""
    with _folder() as folder:
        model, optimizer = _training()
        want = _by_hand(model, optimizer, 12)
        save_checkpoint(folder / "last.pt", model, optimizer, 12)
        state = _loaded(folder / "last.pt", "model", "optimizer", "step", "random")
        expect(len(state) == 4, f"expected model, optimizer, step and random in the file, got {list(state)}")
        _same_state(state["model"], want["model"], "model")
        _same_state(state["optimizer"], want["optimizer"], "optimizer")
        expect(type(state["step"]) is int and state["step"] == 12, f"step: expected 12, got {state['step']!r}")


def test_the_file_holds_the_random_states(save_checkpoint):
    """Set back to the states in the file, the generators of torch, Python and NumPy draw the same numbers again."""
    with _folder() as folder:
        save_checkpoint(path=folder / "last.pt", model=(made := _training())[0], optimizer=made[1], step=3)
        want = random_states()
        state = _loaded(folder / "last.pt", "random")
        got, keys = state["random"], ["torch", "cuda", "python", "numpy"]
        got = list(got) if isinstance(got, dict) else type(got).__name__
        expect(sorted(got) == sorted(keys), f'expected the keys {keys} in "random", got {got}')
        _set_generators(1)
        _set_back(state["random"])
        for name, now in random_states().items():
            expect(now == want[name], f"{name}'s random state: expected the one at the time of saving, got another")
        cuda = state["random"]["cuda"]
        expect(isinstance(cuda, list), f'random["cuda"]: expected a list, got {type(cuda).__name__}')
        n = torch.cuda.device_count() if torch.cuda.is_available() else 0
        expect(len(cuda) == n, f'random["cuda"]: expected a state for each of {n} GPUs, got {len(cuda)}')


def test_training_can_go_on_from_the_file(save_checkpoint):
    """Loaded by hand into a new model and optimizer, the next four losses are the same to the last bit."""
    for make in (_adamw, _momentum):
        with _folder() as folder:
            model, optimizer = _training(make)
            save_checkpoint(folder / "last.pt", model, optimizer, 3)
            want = _steps(model, optimizer, 4)
            state = _loaded(folder / "last.pt", "model", "optimizer", "random")
            _set_generators(1)
            model, optimizer = _training(make, steps=1)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            _set_back(state["random"])
            got = _steps(model, optimizer, 4)
            _same_losses(got, want, type(optimizer).__name__)


def test_saving_disturbs_nothing(save_checkpoint):
    """Weights, gradients, modes, the optimizer and the random generators are as they were, and training goes on."""
    with _folder() as folder:
        model, optimizer = _training()
        before, states, modes = _by_hand(model, optimizer, 3), random_states(), _modes(model)
        grads = [p.grad.clone() for p in model.parameters()]
        save_checkpoint(folder / "last.pt", model, optimizer, 3)
        for name, state in random_states().items():
            expect(state == states[name], f"{name}'s random generator was moved by saving")
        after = _by_hand(model, optimizer, 3)
        _same_state(after["model"], before["model"], "the model's state after saving")
        _same_state(after["optimizer"], before["optimizer"], "the optimizer's state after saving")
        _same_modes(model, modes, "after saving")
        for p, old in zip(model.parameters(), grads, strict=True):
            _same_state(p.grad, old, "a gradient after saving")


def test_only_this_file_is_written(save_checkpoint):
    """A path may be a str or a Path, with or without dots; afterwards it is there, and no other file has changed."""
    for name, kind in (("last.pt", str), ("last", str), ("run.1.final.pt", Path)):
        with _folder() as folder:
            names = {"last.partial", "run.1.final.partial", "last.tmp", "run.1.pt"} - {f"{name}.partial"}
            others = [folder / other for other in sorted(names)]
            for other in others:
                other.write_bytes(b"another file")
            model, optimizer = _training()
            save_checkpoint(kind(folder / name), model, optimizer, 5)
            _readable(folder / name)
            want = sorted([name, *(other.name for other in others)])
            expect(_names(folder) == want, f"{name}: expected the files {want}, got {_names(folder)}")
            for other in others:
                expect(other.read_bytes() == b"another file", f"saving {name} changed {other.name}")


def test_the_file_is_whole_at_every_moment(save_checkpoint):
    """last.pt.partial is written beside last.pt and takes its place at once; till then the old file is there, whole."""
    with _folder() as folder:
        path = folder / "last.pt"
        torch.save({"step": 1}, path)
        old, content = _looks(path), path.read_bytes()
        model, optimizer = _training()
        with _watched(path) as seen:
            save_checkpoint(path, model, optimizer, 2)
        for state in seen.states - {old, _looks(path)}:
            found = "it was not there" if state is None else f"it had {state[1]:,} bytes"
            raise Broken(f"expected the old or the new {path.name} at every moment, but at one {found}")
        got = sorted(seen.names - {path.name})
        right = got == ["last.pt.partial"] or not seen.names
        expect(right, f"expected last.pt.partial to be written beside last.pt, saw {got}")
        _readable(path)
        expect(path.read_bytes() != content, "expected another file than before, got the old one")
        with contextlib.suppress(OSError):  # some file systems have no links
            path.write_bytes(content)
            os.link(path, folder / "second name")
            save_checkpoint(path, model, optimizer, 3)
            kept = (folder / "second name").read_bytes() == content
            expect(kept, "expected a new file in the place of the old one, but the old one was written over")


def test_a_failure_leaves_the_old_file(save_checkpoint):
    """If a state cannot be written, that is an error; the old file is as it was, and nothing else is left."""
    with _folder() as folder:
        path = folder / "last.pt"
        model, optimizer = _training()
        _unsavable(optimizer)
        for content in (None, b"the old file"):
            if content:
                path.write_bytes(content)
            failed = _fails(lambda: save_checkpoint(path, model, optimizer, 2))
            what = "a failure with an old file" if content else "a failure without an old file"
            want = ["last.pt"] if content else []
            expect(failed, f"{what}: expected an error for what cannot be written, but none was raised")
            expect(_names(folder) == want, f"{what}: expected the files {want} in the folder, got {_names(folder)}")
            expect(not content or path.read_bytes() == content, f"{what}: expected it as it was, but it has changed")
    with _folder() as folder:  # a folder stands where the file should go: the last step fails
        path = folder / "last.pt"
        path.mkdir()
        (path / "something").write_bytes(b"in it")
        if _fails(lambda: save_checkpoint(path, *_training(), 2)):
            got = _names(folder)
            expect(got == ["last.pt"], f"{path.name} is a folder: expected nothing else to be left, got {got}")
            expect(_names(path) == ["something"], f"{path.name} is a folder: what is in it changed")


def test_a_killed_process_is_no_hindrance(save_checkpoint):
    """A last.pt.partial that a killed process has left is replaced, and is gone afterwards."""
    for content in (b"half a file", b"half" * 50_000):
        with _folder() as folder:
            path = folder / "last.pt"
            (folder / "last.pt.partial").write_bytes(content)
            model, optimizer = _training()
            save_checkpoint(path, model, optimizer, 7)
            _readable(path)
            expect(content[:4] not in path.read_bytes()[:4], "the file begins with what the killed process had written")
            expect(_names(folder) == ["last.pt"], f"expected last.pt alone in the folder, got {_names(folder)}")


# load_checkpoint ------------------------------------------------------------------------------------------------------


def _saved(folder, make=_adamw, step=12, name="last.pt", following=1):
    """A checkpoint made by hand, its contents, and the losses of so many steps that follow it."""
    model, optimizer = _training(make)
    state = _by_hand(model, optimizer, step)
    torch.save(state, folder / name)
    return folder / name, state, _steps(model, optimizer, following)


def probe_load_checkpoint(load_checkpoint):
    """Results that tell the known mistakes apart."""

    def after(*, with_optimizer):
        """Which states are the file's afterwards, which are as they were, and what was returned."""
        with _folder() as folder:
            path, state, losses = _saved(folder, following=2)
            wanted = _from_hand(state)
            model, optimizer = _training(steps=1)
            parameters, before, old = list(model.parameters()), random_states(), _by_hand(model, optimizer, 0)
            got = load_checkpoint(path, model, optimizer) if with_optimizer else load_checkpoint(path, model)
            now, states = _by_hand(model, optimizer, 0), random_states()
            return [
                type(got).__name__ if isinstance(got, dict) else str(got),
                _fits(now, state, "model"),
                [_fits(now, state, "optimizer"), _fits(now, old, "optimizer")],
                [(name, states[name] == wanted[name], states[name] == before[name]) for name in states],
                all(a is b for a, b in zip(parameters, model.parameters(), strict=True)),
                sorted(_modes(model).items()),
                with_optimizer and _steps(model, optimizer, 2) == losses,
            ]

    def missing():
        with _folder() as folder:
            return str(load_checkpoint(folder / "none.pt", *_training(steps=0)))

    def trap():
        with _folder() as folder:
            model, optimizer = _training(steps=0)
            path = folder / "last.pt"
            torch.save({**_by_hand(model, optimizer, 1), "note": _Trap(folder / "sprung")}, path)
            failed = _fails(lambda: load_checkpoint(path, model, optimizer))
            return failed, (folder / "sprung").exists()

    without, together = (outcome(lambda on=on: after(with_optimizer=on)) for on in (False, True))
    parts = [part for facts in (without, together) for part in (facts if isinstance(facts, list) else [facts] * 7)]
    return [*parts, outcome(missing), outcome(trap)]


def _from_hand(state):
    """What `random_states` says where the generators are in the states of a file."""
    with random_states_kept():
        _set_back(state["random"])
        return random_states()


class _Trap:
    """Makes a folder when it is loaded by a loader that trusts everything."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_the_model_comes_back(load_checkpoint):
    """Parameters and running statistics are those of the file, and the step is returned: 12."""
    with _folder() as folder:
        path, state, _ = _saved(folder)
        content = path.read_bytes()
        model, _ = _training(steps=1)
        step = load_checkpoint(path, model)
        expect(type(step) is int and step == 12, f"expected the step 12, got {_short(step)}")
        _same_state(model.state_dict(), state["model"], "model")
        expect(path.read_bytes() == content, "the file was changed")
        expect(_names(folder) == ["last.pt"], f"expected last.pt alone in the folder, got {_names(folder)}")


def test_the_optimizer_comes_back(load_checkpoint):
    """With an optimizer its moments, step counts and learning rates are those of the file."""
    for make in (_adamw, _momentum):
        with _folder() as folder:
            path, state, _ = _saved(folder, make, step=3)
            model, optimizer = _training(make, steps=0)
            step = load_checkpoint(path, model, optimizer)
            expect(type(step) is int and step == 3, f"expected the step 3, got {_short(step)}")
            _same_state(optimizer.state_dict(), state["optimizer"], f"{type(optimizer).__name__}'s state")
            _same_state(model.state_dict(), state["model"], "model")


def test_the_random_generators_come_back(load_checkpoint):
    """With an optimizer the generators of torch, Python and NumPy go on where they were when the file was written."""
    with _folder() as folder:
        path, state, _ = _saved(folder)
        want = _from_hand(state)
        model, optimizer = _training(steps=1)
        load_checkpoint(path=path, model=model, optimizer=optimizer)
        for name, now in random_states().items():
            expect(now == want[name], f"{name}'s random generator: expected the file's state, got another")


def test_without_an_optimizer_only_the_model(load_checkpoint):
    """Without an optimizer no random generator is touched: to look at a model must not change what follows."""
    with _folder() as folder:
        path, state, _ = _saved(folder)
        model, _ = _training(steps=1)
        before = random_states()
        load_checkpoint(path, model, None)
        for name, now in random_states().items():
            expect(now == before[name], f"{name}'s random generator was moved, though no optimizer was given")
        _same_state(model.state_dict(), state["model"], "model")


def test_training_goes_on_bit_by_bit(load_checkpoint):
    """Four more steps of a new model and optimizer give the same four losses, as if training had never stopped."""
    for make in (_adamw, _momentum):
        with _folder() as folder:
            path, _, want = _saved(folder, make, following=4)
            model, optimizer = _training(make, steps=1)
            load_checkpoint(path, model, optimizer)
            got = _steps(model, optimizer, 4)
            _same_losses(got, want, type(optimizer).__name__)


def test_a_path_may_be_text(load_checkpoint):
    """A path may be a str or a Path, whatever the file's name; each file gives its own step."""
    for name, kind, step in (("last.pt", str, 0), ("last", Path, 5), ("run.1.pt", Path, 10_000)):
        with _folder() as folder:
            path, state, _ = _saved(folder, step=step, name=name)
            model, optimizer = _training(steps=1)
            got = load_checkpoint(kind(path), model, optimizer)
            expect(type(got) is int and got == step, f"{name}: expected the step {step}, got {_short(got)}")
            _same_state(model.state_dict(), state["model"], "model")


def test_a_missing_file_is_an_error(load_checkpoint):
    """Where there is no file, that is a FileNotFoundError, and the model is as it was."""
    with _folder() as folder:
        model, optimizer = _training(steps=1)
        before = copy.deepcopy(model.state_dict())
        for path in (folder / "none.pt", str(folder / "no folder" / "none.pt")):
            raises(
                FileNotFoundError, lambda path=path: load_checkpoint(path, model, optimizer), "a path without a file"
            )
            raises(FileNotFoundError, lambda path=path: load_checkpoint(path, model), "the same, without an optimizer")
        _same_state(model.state_dict(), before, "model")
        expect(_names(folder) == [], f"expected an empty folder, got {_names(folder)}")


def test_a_file_cannot_run_code(load_checkpoint):
    """The file is loaded with weights_only=True: one that would run code when it is loaded is refused."""
    with _folder() as folder:
        path, state, _ = _saved(folder)
        torch.save({**state, "note": _Trap(folder / "sprung")}, path)
        model, optimizer = _training(steps=1)
        failed = _fails(lambda: load_checkpoint(path, model, optimizer))
        expect(not (folder / "sprung").exists(), "code in the file was run: load it with weights_only=True")
        expect(
            failed, "expected an error for a file that holds more than tensors and plain values, but none was raised"
        )
