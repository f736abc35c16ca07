"""Make the labs' notebooks from `solutions/*/*.py`: an author's tool.

A lab is text (py:percent) with cells of four kinds: prose; plain code; `# %% piece="softmax"`, filled from tfmlib; and
`# %% check="softmax"`, filled with the call that checks the piece. `# %% setup="03-attention"` marks the set-up cell.
The solution notebook is made from the text, the learner's notebook from the solution, by nbgrader.
"""

import ast
import hashlib
import inspect
import json
import logging
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tfmlib import pieces
from tfmlib.course import paths

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = ("# Write your code here.", "raise NotImplementedError")
_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


# The cell of a piece -------------------------------------------------------------------------------------------------


def solution_source(name: str) -> str:
    """The reference as an exercise: signature and docstring, and each body between BEGIN and END SOLUTION.

    Its parts come first, in the same cell.
    """
    *parts, own = reference_sources(name)
    return "\n\n\n".join([*map(_exercise, parts), own if pieces.find(name).given else _exercise(own)])


def reference_sources(name: str) -> list[str]:
    """The reference's source, after those of its parts."""
    piece = pieces.find(name)
    return [
        _source(definition)
        for definition in (*(getattr(piece.home, part) for part in piece.parts), pieces.reference(name))
    ]


def _source(definition) -> str:
    """The source of a function, a class or a Triton kernel."""
    return textwrap.dedent(inspect.getsource(getattr(definition, "fn", definition))).rstrip()


def _exercise(source: str) -> str:
    """A definition whose bodies stand between BEGIN and END SOLUTION."""
    lines = source.splitlines()
    (definition,) = ast.parse(source).body
    functions = [definition] if isinstance(definition, ast.FunctionDef) else _methods(definition)
    for function in reversed(functions):
        body = _to_write(function)
        first, last = body[0].lineno - 1, body[-1].end_lineno
        indent = " " * body[0].col_offset
        lines[first:last] = [indent + BEGIN, *lines[first:last], indent + END]
    return "\n".join(lines)


def stub_source(name: str) -> str:
    """What the learner finds: the same, with each solution replaced by a stub."""
    region = re.compile(rf"^( *){BEGIN}\n.*?^ *{END}", re.MULTILINE | re.DOTALL)
    return region.sub(lambda m: "\n".join(m[1] + line for line in STUB), solution_source(name))


def _methods(definition: ast.ClassDef) -> list[ast.FunctionDef]:
    """The methods to write. Those with a decorator, such as other ways to construct, are given."""
    return [node for node in definition.body if isinstance(node, ast.FunctionDef) and not node.decorator_list]


def _to_write(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements that are the exercise: without the docstring and `super().__init__()`."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    if body and ast.unparse(body[0]) == "super().__init__()":
        body = body[1:]
    return body


# The notebooks -------------------------------------------------------------------------------------------------------


def solution_notebook(top: Path, lab: str):
    """The lab with solutions, as a notebook whose bytes depend on nothing but the text, tfmlib and `_config.yml`."""
    import jupytext
    import nbformat

    text = jupytext.read(paths.source(top, lab), fmt="py:percent")
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    taken: set[str] = set()
    for cell in text.cells:
        kind = dict(cell.metadata)
        new = nbformat.v4.new_markdown_cell if cell.cell_type == "markdown" else nbformat.v4.new_code_cell
        source, grading = _filled(top, cell.source, kind)
        identity = grading.get("grade_id") or f"{cell.cell_type}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
        if identity in taken:
            raise ValueError(f"{paths.source(top, lab)}: two cells are the same: {identity}")
        taken.add(identity)
        metadata = {"nbgrader": grading} if grading else {}
        notebook.cells.append(new(source, id=identity, metadata=metadata))
    _expect_all_pieces(lab, taken)
    return notebook


def _filled(top: Path, source: str, kind: dict) -> tuple[str, dict]:
    """A cell's source and its nbgrader metadata, from what its line says of it."""
    grading = {"grade": False, "locked": False, "schema_version": 3, "solution": False, "task": False}
    if "piece" in kind:
        return solution_source(kind["piece"]), {**grading, "grade_id": kind["piece"], "solution": True}
    if "check" in kind:
        piece = pieces.find(kind["check"])
        call = f"check({piece.name}, points={piece.points:g})"
        graded = {"grade": True, "grade_id": f"check-{piece.name}", "locked": True, "points": piece.points}
        return call, {**grading, **graded}
    if "setup" in kind:
        return f"{_fetch(top)}\n\n{source}", {**grading, "grade_id": "setup", "locked": True}
    return source, {}


def _fetch(top: Path) -> str:
    """Install tfmlib where it is missing, from the address that stands in `_config.yml`."""
    repository = yaml.safe_load((top / "_config.yml").read_text(encoding="utf-8"))["repository"]
    return (
        "# Run this cell first. Where tfmlib is missing, as in Colab, it is installed.\n"
        "import importlib.util\n\n"
        'if importlib.util.find_spec("tfmlib") is None:\n'
        f'    %pip install -q "tfmlib @ git+{repository["url"]}@{repository["branch"]}"'
    )


def _expect_all_pieces(lab: str, identities: set[str]) -> None:
    for piece in pieces.chapters()[lab]:
        for needed in (piece.name, f"check-{piece.name}"):
            if needed not in identities:
                raise ValueError(f"lab {lab} has no cell {needed!r}: every piece of its chapter needs two")


def release_notebooks(top: Path, solutions: dict[str, str]) -> dict[str, str]:
    """What nbgrader makes of solution notebooks for the learner: lab -> text of the notebook."""
    from nbgrader.converters import GenerateAssignment
    from nbgrader.coursedir import CourseDirectory
    from traitlets.config import PyFileConfigLoader

    logging.getLogger("traitlets").setLevel(logging.WARNING)
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for lab, text in solutions.items():
            config = PyFileConfigLoader("nbgrader_config.py", path=str(top)).load_config()
            config.CourseDirectory.root = folder
            config.CourseDirectory.assignment_id = lab
            source = paths.solution(Path(folder), lab)
            source.parent.mkdir(parents=True)
            source.write_text(text, encoding="utf-8")
            config.GenerateAssignment.no_database = True
            config.SaveCells.enabled = False
            GenerateAssignment(coursedir=CourseDirectory(config=config), config=config).start()
            made[lab] = paths.release(Path(folder), lab).read_text(encoding="utf-8")
    return made


@dataclass(frozen=True)
class Made:
    """A notebook as it should be."""

    path: Path
    text: str

    @property
    def differs(self) -> bool:
        return not self.path.is_file() or self.path.read_text(encoding="utf-8") != self.text


def make(top: Path) -> Iterator[Made]:
    """Every notebook as it should be: the solutions, then the learner's."""
    import nbformat

    solutions = {lab: nbformat.writes(solution_notebook(top, lab)) + "\n" for lab in paths.labs(top)}
    for lab, text in solutions.items():
        yield Made(paths.solution(top, lab), text)
    for lab, text in release_notebooks(top, solutions).items():
        yield Made(paths.release(top, lab), text)


def out_of_date(top: Path) -> list[Path]:
    """The learner's notebooks that differ from what `write` would make."""
    return [made.path for made in make(top) if made.differs and made.path.is_relative_to(top / "notebooks")]


class Edited(RuntimeError):
    """A notebook holds changes that would be lost."""


def write(top: Path) -> list[Path]:
    """Write every notebook that differs; returns their paths.

    Raises Edited, and writes nothing, if one that would be replaced was edited: it is neither what this command wrote
    last nor what is committed.
    """
    differing = [made for made in make(top) if made.differs]
    stamps_file = top / "_build" / "notebooks.json"
    stamps = json.loads(stamps_file.read_text()) if stamps_file.is_file() else {}
    edited = [made.path for made in differing if made.path.is_file() and _is_edited(top, made.path, stamps)]
    if edited:
        names = ", ".join(str(path.relative_to(top)) for path in edited)
        raise Edited(f"{names}: changed by hand, and would be replaced. Commit, move or delete it first.")
    for made in differing:
        made.path.parent.mkdir(parents=True, exist_ok=True)
        made.path.write_text(made.text, encoding="utf-8")
        stamps[str(made.path.relative_to(top))] = _digest(made.path)
    stamps_file.parent.mkdir(exist_ok=True)
    stamps_file.write_text(json.dumps(stamps, indent=1))
    return [made.path for made in differing]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_edited(top: Path, path: Path, stamps: dict[str, str]) -> bool:
    if stamps.get(str(path.relative_to(top))) == _digest(path):
        return False
    if not path.is_relative_to(top / "notebooks"):
        return True  # a solution notebook is not in git
    status = subprocess.run(
        ["git", "status", "--porcelain", "--", str(path)], cwd=top, capture_output=True, text=True, check=False
    )
    return status.returncode != 0 or bool(status.stdout.strip())
