"""A piece as the checks see it: every call watched for changed inputs and for shortcuts.

Promises about calls hold for every check, so they are kept here and not in each of them.
"""

import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from tfmlib_checks.same import Broken
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree


class Shortcut(BaseException):
    """The piece called what it is meant to replace. Not an Exception: the piece must not be able to catch it."""


class _Watch(TorchFunctionMode):
    """Sees every torch function that is called, under whatever name it was imported."""

    def __init__(self, name: str, forbidden: list[Callable]):
        super().__init__()
        self.name, self.forbidden = name, forbidden

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if any(function is f for f in self.forbidden):
            raise Shortcut(f"{self.name} calls torch's own `{function.__name__}`, the very thing to be written here")
        return function(*args, **(kwargs or {}))


def guarded(piece: Callable, name: str, forbidden: list[Callable]) -> Callable:
    """The piece, whose calls raise Shortcut for a forbidden function and Broken for a changed argument."""
    if not inspect.isclass(piece):
        return _guarded_call(piece, name, forbidden)

    construct = _guarded_call(piece, name, forbidden)

    @functools.wraps(piece, updated=())
    def constructed(*args, **kwargs):
        made = construct(*args, **kwargs)
        if isinstance(made, nn.Module) and callable(getattr(made, "forward", None)):
            made.forward = _guarded_call(made.forward, name, forbidden)
        return made

    return constructed


def _guarded_call(function: Callable, name: str, forbidden: list[Callable]) -> Callable:
    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        before = [(where, x, x.detach().clone()) for where, x in _tensors(function, args, kwargs)]
        with _Watch(name, forbidden):
            result = function(*args, **kwargs)
        for where, x, copy in before:
            if x.shape != copy.shape or x.dtype != copy.dtype or not _same_bits(x.detach(), copy):
                raise Broken(f"{name} changed its argument {where} in place: the caller still needs it")
        return result

    return call


def _tensors(function: Callable, args: tuple, kwargs: dict) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among the arguments, also inside containers, with the name of its argument."""
    try:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # the call itself will say what is wrong
        arguments = {f"number {i + 1}": value for i, value in enumerate(args)} | kwargs
    for name, value in arguments.items():
        for leaf in tree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield f"`{name}`", leaf


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
