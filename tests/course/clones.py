"""Copies of the course for tests to work on."""

import shutil
import subprocess
from pathlib import Path


def copy_tracked(top: Path, target: Path) -> None:
    """Copy every file that git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=top, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (top / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(top / name, target / name)
