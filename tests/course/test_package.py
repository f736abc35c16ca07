"""What a learner installs: the library with its checks, which needs nothing of the course's own tools."""

import subprocess
import sys
import zipfile

import pytest

from tfmlib.course import paths

from .clones import copy_tracked

TOP = paths.root()

# Colab and a plain install have none of these.
ABSENT = ["pytest", "hypothesis", "IPython", "jupyterlab", "nbgrader", "nbformat", "jupytext", "yaml"]
ABSENT += ["transformers", "tiktoken", "tokenizers"]

SCRIPT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
sys.path.insert(0, sys.argv[1])
sys.path.remove("") if "" in sys.path else None
import tfmlib, tfmlib_checks
assert tfmlib.__file__.startswith(sys.argv[1]) and tfmlib_checks.__file__.startswith(sys.argv[1])
from tfmlib import pieces
from tfmlib.course.check import check, examine
from tfmlib.course.workshop import begin
begin("04-heads")
for name in pieces.PIECES:
    assert examine(pieces.reference(name), name).passed
def merge_heads(x):
    return x.sum(1)
check(merge_heads, points=1)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy_tracked(TOP, copy)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, copy]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_the_library_and_its_checks(installed):
    names = {str(path.relative_to(installed)) for path in installed.rglob("*.py")}
    for name in ("same", "toys", "test_attention", "test_models", "misconceptions/tokens", "alternatives/blocks"):
        assert f"tfmlib_checks/{name}.py" in names
    assert "tfmlib/models/gpt.py" in names
    assert not [name for name in names if name.startswith(("tests/", "tfmlib_checks/course", "tfmlib_checks/parity"))]
    (license_file,) = installed.rglob("LICENSE")
    assert "MIT" in license_file.read_text()


def test_checks_work_without_the_courses_tools(installed, tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(installed)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Likely: The heads are added up. Put them side by side" in ended.stdout
    assert ended.stderr == ""
