"""The one comparison helper, the one source of random numbers, and what a broken promise is."""

import functools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SEED_VARIABLE = "TFM_SEED"

# How far apart two numbers may be: (relative, absolute), by dtype.
TOLERANCE = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}


class Broken(AssertionError):
    """A promise does not hold. The message says what was expected, what came, and where first."""


class Skip(Exception):
    """This machine cannot run the check. The message says why."""


def rng(salt: int = 0) -> torch.Generator:
    """The generator of all random inputs. A grader sets its seed with TFM_SEED; `salt` makes streams differ."""
    return torch.Generator().manual_seed(int(os.environ.get(SEED_VARIABLE, "0")) * 1_000 + salt)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with another seed."""
    old = os.environ.get(SEED_VARIABLE)
    os.environ[SEED_VARIABLE] = str(seed)
    try:
        yield
    finally:
        if old is None:
            del os.environ[SEED_VARIABLE]
        else:
            os.environ[SEED_VARIABLE] = old


def random_states() -> dict[str, tuple]:
    """The states of the process's own random generators. Equal states compare equal."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": tuple(torch.get_rng_state().tolist()),
        "Python": random.getstate(),
        "NumPy": (name, tuple(keys.tolist()), *rest),
    }


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Within the block these generators may be moved; afterwards they are as they were."""
    ours, pythons, numpys = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(ours)
        random.setstate(pythons)
        np.random.set_state(numpys)


@functools.cache
def first_optimizer() -> None:
    """Make one: torch then loads parts of itself, seconds long, for which no learner's code should have to answer."""
    torch.optim.SGD([torch.zeros(1)])


def expect(condition: bool, message: str) -> None:
    """Break the promise with this message unless the condition holds."""
    if not condition:
        raise Broken(message)


def is_tensor(got, what: str) -> None:
    """Break the promise unless this is a Tensor."""
    if got is None:
        raise Broken(f"{what}: expected a Tensor, got None. Is a `return` missing?")
    expect(isinstance(got, Tensor), f"{what}: expected a Tensor, got {_kind(got)}")


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Break the promise unless two tensors agree in type, shape, dtype, device and value.

    Values may differ by TOLERANCE; booleans and integers may not. NaN equals nothing unless NaN is wanted.
    """
    is_tensor(got, what)
    expect(got.shape == want.shape, f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    expect(got.dtype == want.dtype, f"{what}: expected dtype {want.dtype}, got {got.dtype}")
    expect(got.device == want.device, f"{what}: expected device {want.device}, got {got.device}")
    if want.is_floating_point():
        stray = got.isnan() & ~want.isnan()
        if stray.any():
            raise Broken(f"{what}: expected {_at(want, stray)}, got NaN {_where(stray)}")
        relative, absolute = TOLERANCE[want.dtype]
        differ = ~torch.isclose(got.double(), want.double(), rtol=relative, atol=absolute, equal_nan=True)
    else:
        differ = got != want
    if differ.any():
        expected, came = (_at(x, differ) for x in (want, got))
        if expected == came:
            expected, came = (_at(x, differ, digits=12) for x in (want, got))
        raise Broken(f"{what}: expected {expected}, got {came} {_where(differ)}")


def alike(got, want) -> bool:
    """Whether two results agree as far as `same` can tell. Containers are compared item by item."""
    if isinstance(want, Tensor):
        try:
            same(got, want, "result")
        except Broken:
            return False
        return True
    if isinstance(want, (tuple, list)):
        same_kind = isinstance(got, type(want)) and len(got) == len(want)
        return same_kind and all(alike(g, w) for g, w in zip(got, want, strict=True))
    return type(got) is type(want) and got == want


def raises(kind: type[Exception], call: Callable, what: str) -> None:
    """Break the promise unless the call raises this kind of exception."""
    try:
        result = call()
    except kind:
        return
    except NotImplementedError:
        raise
    except Exception as error:
        raise Broken(f"{what}: expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise Broken(f"{what}: expected {kind.__name__}, but it returned {_kind(result)}")


@dataclass(frozen=True)
class Raised:
    """The call raised an exception of this type."""

    kind: str


def outcome(call: Callable):
    """The call's result, or Raised: for probes, which must not stop at an error."""
    try:
        return call()
    except Exception as error:
        return Raised(type(error).__name__)


def is_exception(answer) -> bool:
    """Whether an `outcome` is an exception."""
    return isinstance(answer, Raised)


def random_gradient(shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The gradient of an output of this shape that `gradients` sends back."""
    return torch.randn(tuple(shape), generator=rng(10)).to(dtype)


def gradients(function: Callable, *inputs: Tensor) -> list[Tensor]:
    """The gradients that the inputs get from a `random_gradient` of the output. Broken where the graph is cut."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    cut = "expected a gradient, got none: was the graph cut by detach(), item() or numpy()?"
    expect(isinstance(out, Tensor) and out.requires_grad, cut)
    out.backward(random_gradient(out.shape, out.dtype))
    expect(all(x.grad is not None for x in inputs), cut)
    return [x.grad for x in inputs]


def filled(module: torch.nn.Module, salt: int = 0) -> torch.nn.Module:
    """Give every parameter a value that follows from its name and shape, whatever the order they were made in."""
    state = module.state_dict()
    values = {
        name: torch.randn(old.shape, generator=rng(salt + sum(name.encode()))).to(old.dtype) * 0.5
        for name, old in state.items()
    }
    module.load_state_dict(values)
    return module


def parameters_named(module: torch.nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    """Break the promise unless the module's state has exactly these names and shapes."""
    expect(isinstance(module, torch.nn.Module), f"expected an nn.Module, got {_kind(module)}")
    got = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    missing, extra = _listed(shapes.keys() - got.keys()), _listed(got.keys() - shapes.keys())
    expect(not missing, f"expected parameters {_listed(shapes)}; missing: {missing}")
    expect(not extra, f"expected parameters {_listed(shapes)}; not expected: {extra}")
    for name, shape in shapes.items():
        expect(got[name] == shape, f"{name}: expected shape {shape}, got {got[name]}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _kind(x) -> str:
    return f"{type(x).__name__} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())


def _at(x: Tensor, where: Tensor, digits: int = 4) -> str:
    value = x[_first(where)].item()
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _where(where: Tensor) -> str:
    if where.numel() == 1:
        return "in the only entry"
    return f"at {list(_first(where))} ({int(where.sum())} of {where.numel()} entries differ)"
