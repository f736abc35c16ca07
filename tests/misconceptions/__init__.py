"""Known wrong variants of the pieces, each with a sentence that helps whoever made that mistake."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Misconception:
    """A wrong implementation of a piece, the check that must catch it, and the hint a learner gets."""

    piece: str
    caught_by: str
    hint: str
    implementation: Callable

    @property
    def name(self) -> str:
        return self.implementation.__name__


_table: list[Misconception] = []


def wrong(piece: str, caught_by: str, hint: str) -> Callable:
    """Enter a wrong implementation in the table: a decorator."""

    def enter(implementation: Callable) -> Callable:
        _table.append(Misconception(piece, caught_by, hint, implementation))
        return implementation

    return enter


def known(piece: str) -> list[Misconception]:
    """The misconceptions about a piece, in the order they are written."""
    from tfmlib import pieces

    import_module(f".{pieces.find(piece).topic}", __name__)
    return [m for m in _table if m.piece == piece]
