"""The whole grading cycle, by stock nbgrader, gives every made-up learner exactly the points that are due."""

import pytest

from tfmlib import pieces
from tfmlib.course import grading, paths

TOP = paths.root()


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cycle") / "demo"
    steps = list(grading.demo(TOP, folder))
    assert steps[-1] == "nbgrader export"
    return folder


def test_every_learner_gets_exactly_what_is_due(graded):
    found = grading.grades(graded)
    assert len(found) == len(grading.learners()) * len(paths.labs(TOP))
    assert [g for g in found if not g.right] == [], grading.as_table(found)
    assert all(g.max_points == sum(piece.points for piece in pieces.chapters()[g.lab]) for g in found)


def test_feedback_shows_the_hint(graded):
    for learner in grading.learners():
        pages = "".join(grading.feedback(graded, learner.name, lab) for lab in paths.labs(TOP))
        for hint in learner.hints:
            assert hint in pages
        assert ("Likely:" in pages) == bool(learner.hints)
    assert "not written yet" in grading.feedback(graded, "untouched", "03-attention")


def test_stock_nbgrader_makes_the_learners_notebooks_that_are_committed(graded):
    for lab in paths.labs(TOP):
        assert paths.release(graded, lab).read_text() == paths.release(TOP, lab).read_text()


def test_stock_nbgrader_validates_the_solutions(graded):
    lab = paths.labs(TOP)[0]
    assert "Success! Your notebook passes all the tests." in grading.nbgrader(
        graded, "validate", str(paths.solution(graded, lab))
    )
    untouched = str(paths.release(graded, lab))
    assert f"VALIDATION FAILED ON {len(pieces.chapters()[lab])} CELL(S)" in grading.nbgrader(
        graded, "validate", untouched
    )


def test_grading_again_with_another_seed_changes_nothing(graded, monkeypatch):
    before = grading.grades(graded)
    monkeypatch.setenv("TFM_SEED", "7")
    grading.nbgrader(graded, "autograde", "03-attention", "--force")
    grading.nbgrader(graded, "export")
    assert grading.grades(graded) == before
