"""Where things are in a clone of the course."""

from pathlib import Path

import tfmlib


def root() -> Path:
    """The folder of the clone that this tfmlib belongs to. Raises FileNotFoundError if there is none."""
    folder = Path(tfmlib.__file__).resolve().parents[1]
    if not (folder / "_toc.yml").is_file():
        raise FileNotFoundError(f"{folder} is not a clone of the course: this command needs one (git clone ...)")
    return folder


def labs(top: Path) -> list[str]:
    """The names of the labs, in teaching order."""
    return sorted(path.parent.name for path in top.glob("solutions/*/*.py") if path.stem == path.parent.name)


def source(top: Path, lab: str) -> Path:
    """The hand-written text of a lab, with its solutions."""
    return top / "solutions" / lab / f"{lab}.py"


def solution(top: Path, lab: str) -> Path:
    """The lab with solutions, as nbgrader reads it. Generated."""
    return source(top, lab).with_suffix(".ipynb")


def release(top: Path, lab: str) -> Path:
    """The learner's lab. Generated."""
    return top / "notebooks" / lab / f"{lab}.ipynb"


def own_copy(top: Path, lab: str) -> Path:
    """The copy on which a learner works."""
    return top / "work" / lab / f"{lab}.ipynb"
