"""How many bytes some code holds: at its peak, and for the backward pass. For the figures of several chapters."""

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Adds up the bytes of the tensors that are alive at the same time, and keeps the peak."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.seen = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self.seen:
                storage = tensor.untyped_storage()
                self.seen.add(storage)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, n_bytes: int) -> None:
        self.live -= n_bytes


def peak_bytes(function, *inputs: Tensor) -> int:
    """The most bytes that tensors made by `function` hold at the same time, the inputs left out."""
    with Meter() as meter:
        function(*inputs)
    return meter.peak


def kept_bytes(function, *inputs: Tensor) -> int:
    """What autograd holds between forward and backward, the inputs themselves left out."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    known = {x.untyped_storage().data_ptr() for x in leaves}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = function(*leaves)
    del out
    return sum(kept.values())
