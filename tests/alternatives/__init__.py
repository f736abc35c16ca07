"""Other correct implementations of the pieces: another algorithm, another style. The checks must accept them all."""

from collections.abc import Callable
from importlib import import_module

_table: list[tuple[str, Callable]] = []


def correct(piece: str) -> Callable:
    """Enter a correct implementation in the table: a decorator."""

    def enter(implementation: Callable) -> Callable:
        _table.append((piece, implementation))
        return implementation

    return enter


def alternatives(piece: str) -> list[Callable]:
    """The other correct implementations of a piece, in the order they are written."""
    from tfmlib import pieces

    import_module(f".{pieces.find(piece).topic}", __name__)
    return [implementation for name, implementation in _table if name == piece]
