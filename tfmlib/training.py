"""The training loop: gradients over several micro-batches, evaluation, checkpoints that are always whole, and `train`.

The same call of `train` runs in one process, or in several that `torchrun` started: then each takes its share of every
step's micro-batches, and all make the same step.
"""

import contextlib
import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tfmlib import attention, blocks, losses, optim

Batch = tuple[Tensor, Tensor]  # inputs and labels, (B, T) each

# The pieces -----------------------------------------------------------------------------------------------------------


def accumulate_gradients(model: nn.Module, micro_batches: Iterable[Batch]) -> float:
    """Add the gradient of one big batch, given in parts, to the parameters' gradients; returns the big batch's loss.

    Each micro-batch is a pair inputs, labels, (B, T) both; `model(inputs)` gives logits (B, T, V). The loss is the
    `cross_entropy` over all counted labels together, so a micro-batch with more of them weighs more. One micro-batch
    is run at a time, forward and backward, so that memory holds the activations of one. Without a counted label the
    loss is 0.0 and the gradients stay.
    """
    micro_batches = list(micro_batches)
    counts = [int((labels != losses.IGNORE).sum()) for _, labels in micro_batches]
    total = 0.0
    for (inputs, labels), n in zip(micro_batches, counts, strict=True):
        if n:
            loss = losses.cross_entropy(model(inputs), labels) * (n / sum(counts))
            loss.backward()
            total += loss.item()
    return total


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The loss over all counted labels of the batches, in nats, without training anything.

    Every label weighs the same, so batches with more of them weigh more. The model runs in eval mode and without
    gradients; afterwards, even after an error, each of its modules is in the mode that it had. Raises ValueError if no
    label counts.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    total, n_tokens = 0.0, 0
    try:
        with torch.no_grad():
            for inputs, labels in batches:
                n = int((labels != losses.IGNORE).sum())
                total += losses.cross_entropy(model(inputs), labels).item() * n
                n_tokens += n
    finally:
        for module, mode in modes.items():
            module.training = mode
    if n_tokens == 0:
        raise ValueError("no label of the batches counts: there is nothing to evaluate on")
    return total / n_tokens


def save_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write all that training needs to go on to a file, which is whole at every moment.

    `torch.save` of {"model": its state_dict, "optimizer": its state_dict, "step": step, "random": the states of the
    random generators of torch ("torch", and "cuda", a list), Python ("python", what random.getstate gives) and NumPy
    ("numpy", what np.random.get_state gives, its array as a list)}. It loads with weights_only=True. It is written to
    `path`.partial beside it, which then takes the place of `path`. If this fails, the error is raised, `path` is as it
    was, and nothing else is left. A killed process may leave `path`.partial, which the next call replaces.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    name, keys, *rest = np.random.get_state()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "random": {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": random.getstate(),
            "numpy": (name, keys.tolist(), *rest),
        },
    }
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load_checkpoint(path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bring a model, and with it its training, back to where `save_checkpoint` wrote it down; returns the step.

    With an optimizer its state and the random generators' are restored too, so that training goes on bit by bit as if
    it had never stopped. Without one only the model is. The file is loaded with weights_only=True, and to the devices
    of the model's parameters. Raises FileNotFoundError if there is none.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"]["torch"])
        if torch.cuda.is_available() and state["random"]["cuda"]:
            torch.cuda.set_rng_state_all(state["random"]["cuda"])
        version, internal, gauss = state["random"]["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = state["random"]["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    return state["step"]


# The loop -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. The defaults are nanoGPT's for a small model."""

    steps: int
    micro_batches: int = 1  # in a step, over all processes
    lr_peak: float = 1e-3
    lr_floor: float = 1e-4
    warmup: int = 100  # steps
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    max_norm: float = 1.0  # of the gradient
    autocast: torch.dtype | None = None  # torch.bfloat16: matrix products in half the bytes
    recompute: bool = False  # activation checkpointing: forget what is inside a block, compute it again
    fused: bool = False  # norms, attention and AdamW in PyTorch's fused kernels: the same numbers, up to rounding
    evaluate_every: int = 250  # steps
    save_every: int = 250  # steps

    def __post_init__(self):
        for name in ("steps", "micro_batches", "evaluate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps <= self.warmup + 1:
            raise ValueError(
                f"steps={self.steps} must be above warmup + 1 = {self.warmup + 1}: warm up for fewer steps"
            )
        if self.autocast not in (None, torch.bfloat16):
            why = "float16 would need its loss scaled" if self.autocast == torch.float16 else "it halves no bytes"
            raise ValueError(f"autocast must be torch.bfloat16 or None, got {self.autocast}: {why}")


@dataclass(frozen=True)
class Record:
    """What one step did. Losses are in nats a token."""

    step: int
    loss: float  # of the step's batch, before the step
    lr: float
    norm: float  # of the gradient, before clipping
    validation_loss: float | None = None  # after the step, every `evaluate_every` steps and at the end


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    recipe: Recipe,
    validation: Sequence[Batch] = (),
    path: str | Path | None = None,
    progress: bool = True,
    on_record: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Train a model and return a Record of every step that was made.

    `batches` gives the micro-batches from the first step on, the same ones in every run. With a `path`, checkpoints go
    there, and if there is one already, training goes on from it: the batches that it has seen are drawn again and
    skipped. `on_record` is called after every step. Batches are moved to the model's device.

    Where torch.distributed is initialized, every process gives the same `batches` and takes its share of each step's
    micro-batches; gradients are summed over the processes, weighted by counted labels, so that the step is that of one
    process. Process 0 shows the progress and writes checkpoints.

    Raises FloatingPointError, before the weights change, if a loss or a gradient is not finite, and ValueError if there
    are fewer micro-batches than processes.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if recipe.micro_batches < world:
        raise ValueError(f"micro_batches={recipe.micro_batches} a step must be at least the {world} processes")
    make = functools.partial(torch.optim.AdamW, fused=True) if recipe.fused else optim.AdamW
    optimizer = make(optim.parameter_groups(model, recipe.weight_decay), recipe.lr_peak, recipe.betas)
    start = 0
    if path is not None and Path(path).exists():
        start = load_checkpoint(path, model, optimizer)
    for p in model.parameters() if world > 1 else ():
        dist.broadcast(p.detach(), 0)
    validation = [_on_device(batch, model) for batch in validation]
    stream = itertools.islice(iter(batches), start * recipe.micro_batches, None)
    records = []
    model.train()
    bar = _bar(recipe.steps, start, hidden=not progress or rank > 0)
    kernels = fused_kernels(model) if recipe.fused else contextlib.nullcontext()
    with bar, kernels, _recomputing(model, recipe.recompute), _casting(model, recipe.autocast):
        for step in range(start, recipe.steps):
            own = [_on_device(batch, model) for batch in itertools.islice(stream, recipe.micro_batches)][rank::world]
            optimizer.zero_grad()
            loss = accumulate_gradients(model, own)
            if world > 1:
                loss = _sum_over_processes(model, loss, own)
            norm = optim.clip_gradients(model.parameters(), recipe.max_norm).item()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise FloatingPointError(
                    f"step {step}: the loss is {loss} and the gradient's norm {norm}; no step made"
                )
            lr = optim.warmup_cosine(step, recipe.warmup, recipe.steps, recipe.lr_peak, recipe.lr_floor)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            done = step + 1
            last = done == recipe.steps
            score = None
            if validation and (last or done % recipe.evaluate_every == 0):
                score = evaluate(model, validation)
            if path is not None and rank == 0 and (last or done % recipe.save_every == 0):
                save_checkpoint(path, model, optimizer, done)
            records.append(Record(step, loss, lr, norm, score))
            if on_record is not None:
                on_record(records[-1])
            bar.update()
            bar.set_postfix_str(f"loss {loss:.3f}" + (f", validation {score:.3f}" if score is not None else ""))
    return records


@contextlib.contextmanager
def fused_kernels(model: nn.Module) -> Iterator[None]:
    """Within the block the norms of `model`, and attention, run in PyTorch's fused kernels: the same numbers, sooner.

    A kernel passes over memory once, where the written-out formula passes once for each of its operations. Every
    `blocks.LayerNorm` and `blocks.RMSNorm` that keeps its epsilon as `eps` is computed by F.layer_norm and F.rms_norm,
    and `attention.scaled_dot_product_attention` is PyTorch's function of that name, for other models too. Results
    differ by rounding.
    """
    kernels = {blocks.LayerNorm: _layer_norm, blocks.RMSNorm: _rms_norm}
    norms = [module for module in model.modules() if type(module) in kernels and hasattr(module, "eps")]
    written_out = attention.scaled_dot_product_attention
    with _forwards({norm: functools.partial(kernels[type(norm)], norm) for norm in norms}):
        attention.scaled_dot_product_attention = F.scaled_dot_product_attention
        try:
            yield
        finally:
            attention.scaled_dot_product_attention = written_out


def _layer_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def _rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def _on_device(batch: Batch, model: nn.Module) -> Batch:
    device = next(model.parameters()).device
    inputs, labels = batch
    return inputs.to(device), labels.to(device)


def _bar(total: int, start: int, hidden: bool):
    from tqdm.auto import tqdm

    return tqdm(total=total, initial=start, unit="step", disable=hidden)


def _sum_over_processes(model: nn.Module, loss: float, own: list[Batch]) -> float:
    """Make every process's gradients those of all micro-batches together; returns the loss of all."""
    trained = [p for p in model.parameters() if p.requires_grad]
    n = sum(int((labels != losses.IGNORE).sum()) for _, labels in own)
    mine = [float(n), n * loss, *(float(p.grad is not None) for p in trained)]
    sums = torch.tensor(mine, dtype=torch.float64, device=trained[0].device)
    dist.all_reduce(sums)
    n_all, total, *has_gradient = sums.tolist()
    for p, somewhere in zip(trained, has_gradient, strict=True):
        if somewhere:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.mul_(n / n_all)
            dist.all_reduce(p.grad)
    return total / max(n_all, 1.0)


@contextlib.contextmanager
def _forwards(forwards: dict[nn.Module, Callable]) -> Iterator[None]:
    """Within the block each module's forward is the function given."""
    before = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _recomputing(model: nn.Module, wanted: bool) -> contextlib.AbstractContextManager:
    """Each of `model.blocks` keeps its input only, and is computed once more in the backward pass."""
    found = model.blocks if wanted else ()
    return _forwards({block: functools.partial(checkpoint, block.forward, use_reentrant=False) for block in found})


def _casting(model: nn.Module, dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    """The model's matrix products are computed in `dtype`; its weights stay as they are."""
    device = next(model.parameters()).device.type
    return _forwards({} if dtype is None else {model: torch.autocast(device, dtype)(model.forward)})
