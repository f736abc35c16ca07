"""How much memory training takes: the most bytes that are alive at once, counted as torch makes and frees them."""

import contextlib
import weakref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tfmlib import training


class Peak(TorchDispatchMode):
    """Within the block, `peak` is the most bytes that all storages took at once: those added, and those made."""

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._alive: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's memory for as long as it lives; tensors that share it count once."""
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self._now += n_bytes
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._freed, key, n_bytes)

    def _freed(self, key: int, n_bytes: int) -> None:
        self._alive.discard(key)
        self._now -= n_bytes

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.add, out)
        return out


def training_peak(model: nn.Module, vocab_size: int, B: int, T: int, checkpointing: bool) -> int:
    """The most bytes alive at once while `train` makes two steps of two micro-batches (B, T) each.

    With two micro-batches the gradients of the first are alive while the second runs, as they are in every longer
    accumulation.
    """
    ids = torch.randint(vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    recipe = training.Recipe(steps=2, micro_batches=2, warmup=0, recompute=checkpointing)
    peak = Peak()
    for parameter in model.parameters():
        peak.add(parameter)
    with contextlib.ExitStack() as stack:
        stack.enter_context(peak)
        training.train(model, [batch] * 2 * recipe.steps, recipe, progress=False)
    return peak.peak
