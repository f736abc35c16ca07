"""The reference, broken on purpose in small ways that nobody's misconception describes: its checks must notice."""

from importlib import import_module

import pytest

from tfmlib import pieces
from tfmlib.course.check import examine
from tfmlib.course.notebooks import reference_sources

from .sources import made_from

TOPICS = dict.fromkeys(piece.topic for piece in pieces.PIECES.values())
MUTANTS = {}
for topic in TOPICS:
    MUTANTS |= import_module(f".mutants.{topic}", __package__).MUTANTS

CASES = [(name, old, new) for name, table in MUTANTS.items() for old, new in table]


def test_every_piece_is_broken_in_at_least_three_ways():
    assert list(MUTANTS) == list(pieces.PIECES)
    assert min(map(len, MUTANTS.values())) >= 3


@pytest.mark.parametrize(("name", "old", "new"), CASES, ids=[f"{n}-{new[:40]}" for n, _, new in CASES])
def test_a_mutant_of_the_reference_is_rejected(name, old, new):
    source = "\n\n".join(reference_sources(name)) + "\n"
    assert old in source
    report = examine(made_from(source.replace(old, new), name, f"<mutant of {name}>"), name)
    if report.skipped:
        pytest.skip(report.results[0].message)
    assert not report.passed
