"""A piece as the checks see it: every call watched for changed inputs and for shortcuts.

Promises about calls hold for every check, so they are kept here and not in each of them.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator

import torch
from tfmlib_checks.same import Broken, is_tensor
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from tfmlib import pieces


class Shortcut(BaseException):
    """The piece called what it is meant to replace. Not an Exception: the piece must not be able to catch it."""


def _said(name: str, called: str) -> str:
    return f"{name} calls {called}, the very thing to be written here"


class _WatchFunctions(TorchFunctionMode):
    """Sees every torch function that is called, under whatever name it was imported."""

    def __init__(self, name: str, forbidden: list[Callable]):
        super().__init__()
        self.name, self.forbidden = name, forbidden

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if any(function is f for f in self.forbidden):
            raise Shortcut(_said(self.name, f"torch's own `{function.__name__}`"))
        return function(*args, **(kwargs or {}))


class _WatchOperations(TorchDispatchMode):
    """Sees every operation that torch carries out in the end, by whatever way it was reached."""

    def __init__(self, name: str, forbidden: tuple[str, ...]):
        super().__init__()
        self.name, self.forbidden = name, forbidden

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch loads its compiler, seconds long, at the first operation. No piece is compiled here."""
        return False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.name().startswith(self.forbidden):
            raise Shortcut(_said(self.name, f"torch's own `{operation.name().removeprefix('aten::')}`"))
        return operation(*args, **(kwargs or {}))


def _reference_called(*args, **kwargs):
    """What stands in for the reference's code; its global names are those of the reference."""
    from tfmlib.course.guard import Shortcut

    raise Shortcut


def _entrance(reference: Callable) -> str:
    """The attribute through which a call of the reference goes."""
    return "__init__" if inspect.isclass(reference) else "__code__"


class _Closed:
    """Stands in for a part of the reference, such as a kernel or a helper class, while a piece is judged."""

    def __init__(self, said: str):
        self._said = said

    def __call__(self, *args, **kwargs):
        raise Shortcut(self._said)

    def __getitem__(self, grid):
        raise Shortcut(self._said)


def _attributes_of(name: str) -> list[tuple[object, str, object]]:
    """What a closed reference has exchanged, as it is now: whose attribute, its name, its value; the entrance first."""
    piece, reference = pieces.find(name), pieces.reference(name)
    places = [(reference, _entrance(reference)), *((piece.home, part) for part in piece.parts)]
    return [(owner, attribute, getattr(owner, attribute)) for owner, attribute in places]


_closed: list[tuple[Callable, str, object]] = []  # of torch's, just now: whose, which attribute, what belongs there


@contextlib.contextmanager
def left_as_found(name: str) -> Iterator[None]:
    """Undo what an interrupt in the middle of a guarded call may have left behind."""
    own = _attributes_of(name)
    functions, operations = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    try:
        yield
    finally:
        for place in own:
            setattr(*place)
        while _closed:
            setattr(*_closed.pop())
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > operations:
            torch._C._pop_torch_dispatch_stack()


@contextlib.contextmanager
def _reference_closed(piece: Callable, name: str) -> Iterator[None]:
    """Within the block the reference cannot be called, even by somebody who took hold of it before."""
    reference = pieces.reference(name)
    if piece is reference:
        yield
        return
    own = _attributes_of(name)
    (_, entrance, _), *parts = own
    setattr(reference, entrance, _reference_called if entrance == "__init__" else _reference_called.__code__)
    for home, part, _ in parts:
        setattr(home, part, _Closed(_said(name, f"tfmlib's own `{part}`")))
    try:
        yield
    except Shortcut as shortcut:
        if shortcut.args:
            raise
        raise Shortcut(_said(name, f"tfmlib's own `{name}`")) from None
    finally:
        for place in own:
            setattr(*place)


def _can_be_closed(thing: Callable) -> bool:
    """Whether something of torch's is written in Python: a class, or a function whose code can be exchanged."""
    if inspect.isclass(thing):
        return True
    code = getattr(inspect.unwrap(thing), "__code__", None)
    return code is not None and not code.co_freevars


def _raises_shortcut(said: str) -> Callable:
    """What stands in for something of torch's. It uses no name from outside, so that its code can be lent."""
    source = f"""
def called(*args, **kwargs):
    from tfmlib.course.guard import Shortcut

    raise Shortcut({said!r})
"""
    made: dict = {}
    exec(source, made)
    return made["called"]


@contextlib.contextmanager
def _torch_closed(thing: Callable, stand_in: Callable) -> Iterator[None]:
    """Within the block a class or function of torch's cannot be called, however deep inside torch, by anybody.

    An optimizer, say, is no torch function and leaves no trace among the operations: only so can it be seen.
    """
    part = _entrance(thing)
    owner = inspect.unwrap(thing)
    _closed.append((owner, part, getattr(owner, part)))
    setattr(owner, part, stand_in if part == "__init__" else stand_in.__code__)
    try:
        yield
    finally:
        setattr(*_closed[-1])
        _closed.pop()


def guarded(piece: Callable, name: str, forbidden: list[Callable | str]) -> Callable:
    """The piece, whose calls raise Shortcut for something forbidden and Broken for a changed argument.

    `forbidden` holds functions and classes of torch, and beginnings of names of torch's operations. The reference is
    always forbidden.
    """
    operations = tuple(f for f in forbidden if isinstance(f, str))
    functions = [f for f in forbidden if not isinstance(f, str)]
    closed = [(f, _raises_shortcut(_said(name, f"torch's own `{f.__name__}`"))) for f in functions if _can_be_closed(f)]
    functions = [f for f in functions if not _can_be_closed(f)]

    @contextlib.contextmanager
    def watch() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_reference_closed(piece, name))
            for thing, stand_in in closed:
                stack.enter_context(_torch_closed(thing, stand_in))
            if operations:
                stack.enter_context(_WatchOperations(name, operations))
            if functions:
                stack.enter_context(_WatchFunctions(name, functions))
            yield

    reference = pieces.reference(name)
    if not inspect.isclass(piece):
        return _guarded_call(piece, name, watch, _returns_tensor(reference))
    construct = _guarded_call(piece, name, watch)
    own = {key: value for key, value in vars(reference).items() if not key.startswith("_")}
    methods = [key for key, value in own.items() if inspect.isfunction(value)]
    given = [key for key, value in own.items() if isinstance(value, classmethod)]
    gives_tensor = _returns_tensor(getattr(reference, "forward", reference))

    @functools.wraps(piece, updated=())
    def constructed(*args, **kwargs):
        made = construct(*args, **kwargs)
        if isinstance(made, nn.Module):
            if callable(getattr(made, "forward", None)):
                made.forward = _guarded_call(made.forward, name, watch, gives_tensor)
        else:
            for method in methods:
                if callable(getattr(made, method, None)):
                    with contextlib.suppress(AttributeError):  # an object with __slots__ cannot be watched so
                        object.__setattr__(made, method, _guarded_call(getattr(made, method), name, watch))
        return made

    for method in given:  # such as Tokenizer.from_gpt2: another way to construct
        setattr(constructed, method, _constructs(piece, method, constructed))
    return constructed


def _constructs(piece: type, method: str, constructed: Callable) -> Callable:
    """A class method that makes an object through `constructed` in place of the class."""
    found = inspect.getattr_static(piece, method, None)
    if not isinstance(found, classmethod):
        return getattr(piece, method, None)
    return functools.partial(found.__func__, constructed)


def _returns_tensor(function: Callable) -> bool:
    return inspect.signature(function).return_annotation is Tensor


def _guarded_call(function: Callable, name: str, watch: Callable, gives_tensor: bool = False) -> Callable:
    @functools.wraps(function, updated=())
    def call(*args, **kwargs):
        before = [(where, x, x.detach().clone(), x.requires_grad) for where, x in _tensors(function, args, kwargs)]
        with watch():
            result = function(*args, **kwargs)
        for where, x, copy, learns in before:
            if x.shape != copy.shape or x.dtype != copy.dtype or not _same_bits(x.detach(), copy):
                raise Broken(f"{name} changed its argument {where} in place: the caller still needs it")
            if x.requires_grad != learns:
                raise Broken(f"{name} changed requires_grad of its argument {where}: leave it to the caller")
        if gives_tensor:
            is_tensor(result, name)
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
