"""Run labs as learners do, and show the whole grading cycle on five made-up learners.

The cycle itself is stock nbgrader, run as its command line in a folder laid out like the course's own.
"""

import ast
import csv
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tfmlib import pieces
from tfmlib.course import notebooks, paths

# Submissions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learner:
    """A made-up learner, the points that each lab should earn, and why."""

    name: str
    expected: dict[str, float]
    why: str
    hints: tuple[str, ...] = ()  # what the feedback must say


def learners() -> list[Learner]:
    """The five learners of the demonstration."""
    full = {lab: float(sum(piece.points for piece in table)) for lab, table in pieces.chapters().items()}
    wrong = {lab: full[lab] - pieces.find(name).points + _due("misconception", name) for lab, name in _WRONG.items()}
    half = {lab: sum(pieces.find(name).points for name in _sources(paths.root(), "half", lab)) for lab in full}
    # Other pieces use the reference where one is wrong, so they lose nothing.
    return [
        Learner("solved", full, "everything is right"),
        Learner("untouched", dict.fromkeys(full, 0.0), "nothing is written yet"),
        Learner(
            "misconception",
            wrong,
            "one piece wrong in each lab, the rest right",
            (
                "Neighbours are merged whenever their joined bytes are in the vocabulary",
                "Angles in the order t0, t0, t1, t1 meet half-split pairs",
                "The softmax runs over the queries",
                "The heads come out as a, b, a, b",
                "x is overwritten by its norm",
                "Source padding is hidden in the encoder, but not in the cross-attention",
                "Each answer is averaged, then the answers",
                "The decay is added to the gradient, as in plain Adam",
                "in which a label of a small micro-batch weighs more",
                "Scores are counted for the K key heads",
                "The token that crosses p is dropped",
                "Padding is hidden, but still takes positions",
                "The mixed values are not rescaled when the maximum moves",
            ),
        ),
        Learner("half", half, "some pieces of each lab done"),
        Learner("other_style", full, "right in another style, with warnings and prints"),
    ]


# The piece of each lab that the learner "misconception" has wrong.
_WRONG = {
    "01-tokens": "Tokenizer",
    "02-positions": "apply_rope",
    "03-attention": "attention_weights",
    "04-heads": "repeat_kv",
    "05-blocks": "PreNormBlock",
    "06-models": "Seq2Seq",
    "07-losses": "policy_gradient_loss",
    "08-optim": "AdamW",
    "09-training": "accumulate_gradients",
    "10-costs": "forward_flops",
    "11-sampling": "keep_top_p",
    "12-cache": "prefill",
    "13-flash": "flash_attention",
}


def _due(learner: str, name: str) -> float:
    """The points of one piece in a learner's file, judged without a notebook and without nbgrader."""
    from tfmlib.course.check import examine, points_of

    written = runpy.run_path(str(_file(paths.root(), learner, pieces.find(name).topic)))
    return points_of(examine(written[name], name), pieces.find(name).points)


def _file(top: Path, learner: str, topic: str) -> Path:
    return top / "tests" / "submissions" / learner / f"{topic}.py"


def submission(top: Path, learner: str, lab: str):
    """A learner's notebook: the released one, with the pieces that stand in the learner's files filled in."""
    import nbformat

    notebook = nbformat.read(paths.release(top, lab), as_version=4)
    sources = _sources(top, learner, lab)
    for cell in notebook.cells:
        identity = cell.metadata.get("nbgrader", {}).get("grade_id")
        if identity in sources:
            cell.source = sources[identity]
    return notebook


def _sources(top: Path, learner: str, lab: str) -> dict[str, str]:
    """What a learner wrote for each piece of a lab."""
    table = pieces.chapters()[lab]
    if learner == "solved":
        return {piece.name: notebooks.solution_source(piece.name) for piece in table}
    found: dict[str, str] = {}
    for topic in dict.fromkeys(piece.topic for piece in table):
        path = _file(top, learner, topic)
        if path.is_file():
            found |= _pieces_in(path.read_text(encoding="utf-8"))
    return found


def _pieces_in(text: str) -> dict[str, str]:
    """The pieces a file defines. The first one's cell also gets what stands outside pieces, as learners do it."""
    body = ast.parse(text).body
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))} & set(pieces.PIECES)
    shared = [node for node in body[1:] if getattr(node, "name", None) not in names]  # without the file's docstring
    found: dict[str, str] = {}
    for node in body:
        if getattr(node, "name", None) in names:
            parts = [node] if found else [*shared, node]
            found[node.name] = "\n\n".join(_segment(text, part) for part in parts)
    return found


def _segment(text: str, node: ast.stmt) -> str:
    """The source of a statement, decorators and all."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


# Running a notebook ---------------------------------------------------------------------------------------------------


def run(notebook, folder: Path, variables: dict[str, str] | None = None):
    """Run a notebook from top to bottom in a folder, as a learner would; returns it with outputs.

    An exception in a cell is kept as that cell's output, and the run goes on.
    """
    from nbclient import NotebookClient

    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **(variables or {})}
    client = NotebookClient(notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return notebook


def errors(notebook) -> list[str]:
    """The exceptions that a run notebook's cells ended with."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]


def points(notebook) -> dict[str, float]:
    """What nbgrader gives for each check of a run notebook, by piece."""
    from nbgrader.utils import determine_grade, is_grade

    cells = [cell for cell in notebook.cells if is_grade(cell)]
    return {cell.metadata.nbgrader.grade_id.removeprefix("check-"): determine_grade(cell)[0] for cell in cells}


# The whole cycle ------------------------------------------------------------------------------------------------------


def nbgrader(folder: Path, *arguments: str) -> str:
    """Run stock nbgrader's command line in a folder; returns what it said. Raises RuntimeError if it fails."""
    scripts = str(Path(sys.executable).parent)  # nbgrader calls alembic by name
    environment = {**os.environ, "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")])}
    command = [sys.executable, "-m", "nbgrader", *arguments]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    if ended.returncode:
        raise RuntimeError(f"`nbgrader {' '.join(arguments)}` failed in {folder}:\n{said}")
    return said


@dataclass(frozen=True)
class Grade:
    """What one learner got for one lab, and what it should have been."""

    learner: Learner
    lab: str
    points: float
    max_points: float

    @property
    def right(self) -> bool:
        return abs(self.points - self.learner.expected[self.lab]) < 1e-9


def demo(top: Path, folder: Path) -> Iterator[str]:
    """Make the submissions in a folder laid out like the course, and grade them; yields a line for each step."""
    import nbformat

    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    shutil.copy2(top / "nbgrader_config.py", folder)
    labs = paths.labs(top)
    for lab in labs:
        paths.solution(folder, lab).parent.mkdir(parents=True)
        nbformat.write(notebooks.solution_notebook(top, lab), paths.solution(folder, lab))
        yield f"nbgrader generate_assignment {lab}"
        nbgrader(folder, "generate_assignment", lab)
        for learner in learners():
            target = folder / "submitted" / learner.name / lab / f"{lab}.ipynb"
            target.parent.mkdir(parents=True)
            nbformat.write(submission(top, learner.name, lab), target)
    for lab in labs:
        for step in ("autograde", "generate_feedback"):
            yield f"nbgrader {step} {lab}"
            nbgrader(folder, step, lab)
    yield "nbgrader export"
    nbgrader(folder, "export")


def grades(folder: Path) -> list[Grade]:
    """The exported grades of the demonstration."""
    table = {learner.name: learner for learner in learners()}
    with open(folder / "grades.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = [
        Grade(table[row["student_id"]], row["assignment"], float(row["score"]), float(row["max_score"])) for row in rows
    ]
    return sorted(found, key=lambda grade: (list(table).index(grade.learner.name), grade.lab))


def feedback(folder: Path, learner: str, lab: str) -> str:
    """The HTML that a learner of the demonstration gets back."""
    return (folder / "feedback" / learner / lab / f"{lab}.html").read_text(encoding="utf-8")


def as_table(found: list[Grade]) -> str:
    """The grades as text, with what each should be."""
    lines = [f"{'learner':14}{'lab':15}{'points':>8}{'should be':>11}{'of':>5}   "]
    for grade in found:
        should = grade.learner.expected[grade.lab]
        verdict = "ok" if grade.right else "WRONG"
        numbers = f"{grade.points:8g}{should:11g}{grade.max_points:5g}"
        lines.append(f"{grade.learner.name:14}{grade.lab:15}{numbers}   {verdict:6} {grade.learner.why}")
    return "\n".join(lines)
