"""Watch a kernel's memory while it runs in Triton's interpreter: every address must belong to a tensor it was given.

A mask that is missing is seldom seen in the results: what lies beyond a tensor is read, or overwritten, in silence.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from torch import Tensor

from .same import Broken

_KINDS = {"reads": "load", "writes": "store"}


class OutOfBounds(Broken):
    """A kernel was about to touch memory that is none of its own. `tensor` names the one that it left."""

    def __init__(self, access: str, tensor: str, outside: int, lanes: int):
        super().__init__(
            f"the kernel {access} beyond `{tensor}`: {outside} of the {lanes} addresses of a {_KINDS[access]} lie in "
            "none of its tensors. Is the mask true only where there are elements, and are the strides right?"
        )
        self.access, self.tensor = access, tensor


@dataclass
class Traffic:
    """How many elements of each tensor kernels have read and written, by the tensors' names."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)


@contextmanager
def within_bounds() -> Iterator[Traffic]:
    """Raise OutOfBounds in the block, before it happens, where a kernel leaves the tensors that it was launched with.

    Only for kernels that run in the interpreter, which wraps the exception in an InterpreterError. Lanes that are
    masked out do not count. Yields the Traffic.
    """
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    traffic, elements = Traffic(), _Elements({})

    def launched(own: Callable) -> Callable:
        def init_args(self, args, kwargs):
            nonlocal elements
            here, named = own(self, args, kwargs)
            elements = _Elements(dict(zip(self.arg_names, here, strict=False)) | named)
            return here, named

        return init_args

    def watched(own: Callable, access: str, addresses: int, mask: int | None) -> Callable:
        """An operation of the builder, and which of its arguments are the addresses and the mask."""
        counter = traffic.read if access == "reads" else traffic.written

        def operation(self, *args, **named):
            lanes = True if mask is None else args[mask].data
            counter.update(elements.touched(args[addresses].data, lanes, access))
            return own(self, *args, **named)

        return operation

    wrappers = {
        (GridExecutor, "_init_args_hst"): launched,
        (InterpreterBuilder, "create_masked_load"): partial(watched, access="reads", addresses=0, mask=1),
        (InterpreterBuilder, "create_masked_store"): partial(watched, access="writes", addresses=0, mask=2),
        (InterpreterBuilder, "create_atomic_cas"): partial(watched, access="writes", addresses=0, mask=None),
        (InterpreterBuilder, "create_atomic_rmw"): partial(watched, access="writes", addresses=1, mask=3),
    }  # an access without a mask, or by a descriptor, goes through a masked one
    with ExitStack() as stack:
        for (owner, name), wrap in wrappers.items():
            before = getattr(owner, name)
            stack.callback(setattr, owner, name, before)
            setattr(owner, name, wrap(before))
        yield traffic


class _Elements:
    """The addresses of all elements of some tensors."""

    def __init__(self, arguments: dict[str, object]):
        tensors = {name: _tensor(value) for name, value in arguments.items()}
        tensors = {name.removesuffix("_ptr"): x for name, x in tensors.items() if x is not None}
        self.names = list(tensors)
        each = [_addresses(x) for x in tensors.values()]
        owners = np.repeat(np.arange(len(each)), [len(addresses) for addresses in each])
        self.addresses, first = np.unique(np.concatenate([*each, np.empty(0, np.int64)]), return_index=True)
        self.owners = owners[first]

    def touched(self, addresses: np.ndarray, mask: np.ndarray | bool, access: str) -> Counter[str]:
        """How many of the addresses belong to each tensor. Raises OutOfBounds if one belongs to none."""
        addresses = np.atleast_1d(addresses)
        wanted = addresses[np.broadcast_to(np.asarray(mask), addresses.shape)].view(np.int64)
        at = np.minimum(np.searchsorted(self.addresses, wanted), max(len(self.addresses) - 1, 0))
        inside = self.addresses[at] == wanted if len(self.addresses) else np.zeros(wanted.shape, bool)
        if not inside.all():
            if not self.names or not len(self.addresses):
                raise OutOfBounds(access, "anything", int((~inside).sum()), wanted.size)
            near = self.owners[at[inside]] if inside.any() else self._nearest(wanted, at)
            raise OutOfBounds(access, self._commonest(near), int((~inside).sum()), wanted.size)
        counts = np.bincount(self.owners[at], minlength=len(self.names)) if len(at) else []
        return Counter({name: int(n) for name, n in zip(self.names, counts, strict=False) if n})

    def _nearest(self, wanted: np.ndarray, above: np.ndarray) -> np.ndarray:
        below = np.maximum(above - 1, 0)
        is_below = np.abs(wanted - self.addresses[below]) < np.abs(self.addresses[above] - wanted)
        return self.owners[np.where(is_below, below, above)]

    def _commonest(self, owners: np.ndarray) -> str:
        return self.names[int(np.bincount(owners).argmax())]


def _tensor(argument) -> Tensor | None:
    """The tensor that an argument of a kernel is, or describes."""
    argument = getattr(argument, "base", argument) if not isinstance(argument, Tensor) else argument
    return argument if isinstance(argument, Tensor) else None


def _addresses(x: Tensor) -> np.ndarray:
    """Where each element of a tensor lies, in bytes."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).ravel()
    return x.data_ptr() + offsets * x.element_size()
