"""Where the test data lies that is not part of the course: the folder TFM_DATA, else `../shared/data`."""

import os
from pathlib import Path

import pytest

from tfmlib.course import paths


def data(name: str) -> Path:
    """A file of the test data. Skips the test, and says so, where it is absent."""
    folder = Path(os.environ.get("TFM_DATA") or paths.root().parent / "shared" / "data")
    if not (folder / name).exists():
        pytest.skip(f"test data {name!r} is not in {folder}: set TFM_DATA to the folder that holds it")
    return folder / name
