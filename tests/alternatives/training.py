"""Other correct implementations of gradients in parts, evaluation and checkpoints."""

import contextlib
import copy
import io
import itertools
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from . import correct

IGNORE = -100


def _sum(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


# accumulate_gradients -------------------------------------------------------------------------------------------------


@correct("accumulate_gradients")
def sums_over_one_count(model, micro_batches):
    """The sum of each micro-batch's losses, divided by the number of all counted labels."""
    first, second = itertools.tee(micro_batches)
    n = sum(torch.count_nonzero(labels != IGNORE).item() for _, labels in first)
    loss = 0.0
    for x, y in second:
        if bool((y == IGNORE).all()):
            continue
        part = _sum(model(x), y) / n
        part.backward()
        loss += float(part)
    return loss


@correct("accumulate_gradients")
def one_pass_and_a_division(model, micro_batches):
    """Nothing is counted before: old gradients are set aside, sums are added, divided, and put to the old."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    old = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    n, total = 0, 0.0
    for x, y in micro_batches:
        counted = int(y.ne(IGNORE).sum())
        if counted == 0:
            continue
        loss = _sum(model(x), y)
        loss.backward()
        n += counted
        total += loss.item()
    for p, before in zip(parameters, old, strict=True):
        if p.grad is None:
            p.grad = before
        else:
            p.grad.div_(n)
            if before is not None:
                p.grad.add_(before)
    return total / n if n else 0.0


@correct("accumulate_gradients")
def by_autograd_grad(model, micro_batches):
    """torch.autograd.grad in place of backward, weights in single precision."""
    batches = [batch for batch in micro_batches if (batch[1] != IGNORE).any()]
    counts = torch.tensor([(y != IGNORE).sum() for _, y in batches])
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    for (x, y), weight in zip(batches, counts / counts.sum(), strict=True):
        logits = model(x)
        loss = F.cross_entropy(logits.transpose(1, 2), y) * weight
        for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            if g is not None:
                p.grad = g if p.grad is None else p.grad + g
        losses.append(loss.detach())
    return torch.stack(losses).sum().item() if losses else 0.0


@correct("accumulate_gradients")
def counted_rows_only(model, micro_batches):
    """Logits of counted labels alone, the weight given to backward, runs through the whole list for its count."""
    micro_batches = tuple(micro_batches)
    n = torch.cat([labels.reshape(-1) for _, labels in micro_batches] or [torch.empty(0)]).ne(IGNORE).sum().item()
    sums = []
    for inputs, labels in micro_batches:
        keep = labels != IGNORE
        if not keep.any():
            continue
        rows = model(inputs)[keep]
        loss = (rows.logsumexp(-1) - rows[torch.arange(len(rows)), labels[keep]]).sum()
        loss.backward(torch.full_like(loss, 1 / n))
        sums.append(loss.item())
    return sum(sums) / n if n else 0


# evaluate -------------------------------------------------------------------------------------------------------------


@correct("evaluate")
@torch.no_grad()
def one_loss_a_label(model, batches):
    """A loss for each label, and the mean of the counted ones; modes set again by train(mode), outer parts first."""
    was = {name: module.training for name, module in model.named_modules()}
    found = []
    try:
        model.train(False)
        for x, y in batches:
            each = F.cross_entropy(model(x).movedim(-1, 1), y, reduction="none")
            found.append(each[y != IGNORE])
    finally:
        for name, module in model.named_modules():
            module.train(was[name])
    if not sum(map(len, found)):
        raise ValueError("nothing to evaluate")
    return torch.cat(found).mean().item()


@correct("evaluate")
def in_inference_mode(model, batches):
    """inference_mode, an ExitStack for the modes, the mean times its count."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        stack.enter_context(torch.inference_mode())
        model.eval()
        pairs = []
        for x, y in batches:
            n = (y != IGNORE).sum().item()
            if n:
                pairs.append((F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item(), n))
    n_all = sum(n for _, n in pairs)
    if n_all == 0:
        raise ValueError("no label counts")
    return sum(mean * n for mean, n in pairs) / n_all


@correct("evaluate")
def of_a_copy(model, batches):
    """A copy of the model is evaluated, so that the model itself is never touched."""
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    total, n = torch.zeros((), dtype=torch.float64), 0
    for x, y in batches:
        log_p = twin(x).log_softmax(-1)
        keep = y != IGNORE
        total -= log_p[keep].gather(-1, y[keep].unsqueeze(-1)).sum().double()
        n += keep.sum().item()
    if not n:
        raise ValueError("no labels")
    return float(total) / n


@correct("evaluate")
def all_batches_first(model, batches):
    """The batches are listed and counted before the model is touched."""
    batches = list(batches)
    n = sum((labels != IGNORE).sum().item() for _, labels in batches)
    if n == 0:
        raise ValueError("every label is ignored")
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    try:
        return sum(_sum(model(inputs), labels).item() / n for inputs, labels in batches)
    finally:
        torch.set_grad_enabled(before)
        for module in training:
            module.training = True


# save_checkpoint ------------------------------------------------------------------------------------------------------


@correct("save_checkpoint")
def bytes_first(path, model, optimizer, step):
    """All bytes are made in memory, before any file is touched."""
    states = {}
    states["torch"] = torch.random.get_rng_state()
    states["cuda"] = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states["python"] = random.getstate()
    kind, keys, place, has_gauss, gauss = np.random.get_state()
    states["numpy"] = [str(kind), [int(key) for key in keys], place, has_gauss, gauss]
    buffer = io.BytesIO()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "random": states}
    torch.save(whole, buffer)
    partial = Path(str(path) + ".partial")
    try:
        partial.write_bytes(buffer.getbuffer())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@correct("save_checkpoint")
def cleaned_up_by_a_context(path, model, optimizer, step):
    """Copies of all states on the CPU; an ExitStack removes what a failure leaves."""

    def copied(x):
        if isinstance(x, torch.Tensor):
            return x.detach().clone()
        if isinstance(x, dict):
            return {key: copied(value) for key, value in x.items()}
        return [copied(item) for item in x] if type(x) is list else x

    version, internal, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    generators = {
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }
    partial = f"{os.fspath(path)}.partial"
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: os.path.lexists(partial) and os.remove(partial))
        torch.save(
            {
                "random": generators,
                "step": step,
                "optimizer": copied(optimizer.state_dict()),
                "model": copied(model.state_dict()),
            },
            partial,
        )
        os.rename(partial, path)


@correct("save_checkpoint")
def moved_by_shutil(path, model, optimizer, step):
    """An old partial file is removed first; shutil moves the new one, by a rename since it is beside it."""
    target = Path(path)
    partial = target.parent / (target.name + ".partial")
    if partial.exists():
        partial.unlink()
    bits = np.random.get_state()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    state["random"] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": tuple(bit.tolist() if isinstance(bit, np.ndarray) else bit for bit in bits),
    }
    try:
        torch.save(state, str(partial))
        shutil.move(partial, target)
    except BaseException:
        if partial.exists():
            partial.unlink()
        raise


# load_checkpoint ------------------------------------------------------------------------------------------------------


@correct("load_checkpoint")
def from_an_open_file(path, model, optimizer=None):
    """The file is opened here; devices are those of the parameters."""
    device = next(model.parameters()).device
    with open(path, "rb") as file:
        saved = torch.load(file, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"], strict=True)
    if optimizer:
        optimizer.load_state_dict(saved["optimizer"])
        states = saved["random"]
        torch.random.set_rng_state(states["torch"].cpu())
        for i, state in enumerate(states["cuda"] if torch.cuda.is_available() else []):
            torch.cuda.set_rng_state(state.cpu(), i)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
    return saved["step"]


@correct("load_checkpoint")
def value_by_value(path, model, optimizer=None):
    """Values are copied one by one; the file is looked for first."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no checkpoint at {path}")
    parts = torch.load(str(path), weights_only=True)
    own = model.state_dict()
    with torch.no_grad():
        for name, value in parts["model"].items():
            own[name].copy_(value)
    if optimizer is None:
        return parts["step"]
    optimizer.load_state_dict(parts["optimizer"])
    version, internal, gauss = parts["random"]["python"]
    random.setstate((version, tuple(int(i) for i in internal), gauss))
    name, keys, place, has_gauss, gauss = parts["random"]["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), place, has_gauss, gauss))
    if torch.cuda.is_available() and len(parts["random"]["cuda"]):
        torch.cuda.set_rng_state_all(parts["random"]["cuda"])
    torch.default_generator.set_state(parts["random"]["torch"])
    return int(parts["step"])


@correct("load_checkpoint")
def generators_first(path, model, optimizer=None):
    """The order does not matter, since loading draws nothing."""
    saved = torch.load(Path(path).resolve(), "cpu", weights_only=True)
    if optimizer is not None:
        kinds = {"torch": torch.set_rng_state, "python": random.setstate, "numpy": np.random.set_state}
        for kind, set_state in kinds.items():
            set_state(saved["random"][kind])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(saved["random"]["cuda"])
        optimizer.load_state_dict(saved.pop("optimizer"))
    model.load_state_dict(saved.pop("model"))
    return saved["step"]
