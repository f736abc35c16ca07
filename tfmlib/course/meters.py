"""How many bytes some code holds: at its peak, and for the backward pass. For the book's figures and for tests."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Within the block, `peak` is the most bytes that tensors hold at the same time.

    Counted are the tensors `before`, and those that are made in the block; tensors that share memory count once.
    """

    def __init__(self, before: Iterable[Tensor] = ()):
        super().__init__()
        self.peak = self._now = 0
        self._seen = weakref.WeakSet()
        for tensor in before:
            self._add(tensor)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, n_bytes: int) -> None:
        self._now -= n_bytes


def peak_bytes(function: Callable, *inputs: Tensor) -> int:
    """The most bytes that tensors made by `function` hold at the same time, the inputs left out."""
    with Alive(inputs) as alive:
        before = alive.peak
        function(*inputs)
    return alive.peak - before


@contextlib.contextmanager
def kept_tensors(without: Iterable[Tensor] = ()) -> Iterator[list[Tensor]]:
    """Within the block, lists what autograd keeps for the backward pass: one tensor for each piece of memory.

    What shares its memory with a tensor of `without`, such as the parameters, is left out. The listed tensors stay
    alive with the list, so that no memory is taken for another's.
    """
    kept: list[Tensor] = []
    seen = {tensor.untyped_storage().data_ptr() for tensor in without}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in seen:
            seen.add(address)
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of memory behind tensors of which no two share it."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def kept_bytes(function: Callable, *inputs: Tensor) -> int:
    """What autograd keeps between the forward and the backward pass of a function, its inputs left out."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with kept_tensors(leaves) as kept:
        function(*leaves)
    return total_bytes(kept)
