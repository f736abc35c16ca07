"""The commands: what they print, and that none of them touches a learner's work."""

import shutil
import subprocess
import sys

import pytest
import yaml

from tfmlib import pieces
from tfmlib.course import cli, notebooks, paths

from .clones import copy_tracked

TOP = paths.root()


@pytest.fixture
def clone(tmp_path):
    """A clone of the course, smaller and with this environment, in which a learner has worked."""
    clone = tmp_path / "course"
    copy_tracked(TOP, clone)
    keep_two_labs(clone)
    git(clone, "init", "-q")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "a version")
    environment = clone / ".venv" / "bin"
    environment.mkdir(parents=True)
    python = f'#!/bin/sh\nPYTHONPATH="{clone}" exec "{sys.executable}" "$@"\n'
    write_script(environment / "python", python)
    write_script(environment / "tfm", f'#!/bin/sh\nexec "{environment}/python" -m tfmlib.course.cli "$@"\n')
    write_script(environment / "ruff", f'#!/bin/sh\nexec "{sys.executable}" -m ruff "$@"\n')
    (clone / ".venv" / ".installed").touch()
    return clone


def keep_two_labs(clone):
    """Leave two labs, and a site of two short pages: the commands are the same, and take a minute in place of ten."""
    labs = ("03-attention", "04-heads")
    for lab in paths.labs(clone):
        if lab not in labs:
            shutil.rmtree(paths.source(clone, lab).parent)
            shutil.rmtree(paths.release(clone, lab).parent)
    for page in ("intro", *labs):
        (clone / "book" / f"{page}.md").write_text(f"# {page}\n\nA page.\n")
    chapters = [{"file": f"book/{lab}", "sections": [{"file": f"notebooks/{lab}/{lab}"}]} for lab in labs]
    contents = {"format": "jb-book", "root": "book/intro", "chapters": chapters}
    (clone / "_toc.yml").write_text(yaml.safe_dump(contents, sort_keys=False))


def write_script(path, text):
    path.write_text(text)
    path.chmod(0o755)


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def half_done(clone):
    """A learner's work: a notebook half done, one opened in place, and a kept piece. Returns the files."""
    cli.copy_labs(clone)
    own = paths.own_copy(clone, "03-attention")
    own.write_text(own.read_text().replace("raise NotImplementedError", "return x  # my half-done idea", 1))
    mine = clone / "work" / "mine" / "attention.py"
    mine.parent.mkdir(parents=True)
    mine.write_text('"""My pieces."""\n# ---- your pieces ----\n\nMINE = 1\n')
    in_place = paths.release(clone, "04-heads")
    in_place.write_text(in_place.read_text().replace("raise NotImplementedError", "return x  # worked in place", 1))
    beside = clone / "notebooks" / "mine" / "heads.py"
    beside.parent.mkdir()
    beside.write_text("# kept beside a lab that was opened in place\n")
    return [own, mine, in_place, beside]


def make(clone, target, *variables):
    return subprocess.run(
        ["make", target, "PYTEST=true", *variables], cwd=clone, capture_output=True, text=True, check=False, timeout=600
    )


def test_no_command_touches_a_learners_work(clone):
    """Work half done, then every make target, and a new version of the course."""
    files = half_done(clone)
    before = {path: path.read_bytes() for path in files}

    ended = {target: make(clone, target) for target in ("course", "test", "notebooks", "check", "grade-demo", "clean")}
    ended["lab"] = subprocess.run(
        [clone / ".venv" / "bin" / "tfm", "lab", "--no-open"], cwd=clone, capture_output=True, text=True, check=False
    )
    assert {path: path.read_bytes() for path in files} == before
    assert ended["course"].returncode == 0, ended["course"].stdout + ended["course"].stderr
    last = "\n".join(ended["course"].stdout.splitlines()[-4:])
    assert "The site is built. Open " in last
    assert "To do the labs: make lab" in last
    assert ended["grade-demo"].returncode == 0, ended["grade-demo"].stdout
    # The notebook opened in place differs from its source: the author's commands say so, and leave it.
    assert ended["notebooks"].returncode != 0
    assert "notebooks/04-heads/04-heads.ipynb: changed by hand" in ended["notebooks"].stdout

    # A new version of the course changes both labs. What lies in work/ is untouched, and make lab adds what is new.
    git(clone, "stash", "-q")  # what any git user does with a notebook changed in place
    for lab in paths.labs(clone):
        source = paths.source(clone, lab)
        source.write_text(source.read_text().replace("## What you can see with it", "## See it"))
    for path in clone.glob("solutions/*/*.ipynb"):
        path.unlink()
    assert make(clone, "notebooks").returncode == 0
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "a new version")
    shutil.rmtree(paths.own_copy(clone, "04-heads").parent)
    assert cli.copy_labs(clone) == ["04-heads"]
    assert "## See it" in paths.own_copy(clone, "04-heads").read_text()
    git(clone, "stash", "pop")  # comes back as it was, or as a conflict that git shows; nothing is lost
    for path in (files[0], files[1], files[3]):
        assert path.read_bytes() == before[path]


def test_lab_copies_once(clone, capsys):
    assert cli.copy_labs(clone) == paths.labs(clone)
    own = paths.own_copy(clone, "03-attention")
    own.write_text("mine")
    assert cli.copy_labs(clone) == []
    assert own.read_text() == "mine"


def test_progress_shows_what_is_kept(tmp_path, capsys):
    assert cli.main(["progress", "--mine", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    total = sum(piece.points for piece in pieces.PIECES.values())
    assert f"0 of {total:g} points in all" in out
    (tmp_path / "models").mkdir()
    for name, file in (("repeat_kv", "heads.py"), ("GPT", "models/gpt.py")):
        section = f"# ---- piece: {name}, passed 2026-01-02 03:04 ----\n{name} = ...\n# ---- end of {name} ----\n"
        (tmp_path / file).write_text(section)
    assert cli.main(["progress", "--mine", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "[x] repeat_kv" in out
    assert "[x] GPT" in out
    assert "passed 2026-01-02 03:04" in out
    assert "04-heads   2 of 10 points" in out


def test_check_judges_a_file(tmp_path, capsys):
    right, wrong, empty = (tmp_path / name for name in ("right.py", "wrong.py", "empty.py"))
    right.write_text(notebooks.solution_source("merge_heads").join(["from torch import Tensor\n", "\n"]))
    wrong.write_text("def merge_heads(x):\n    return x.sum(1)\n")
    empty.write_text("x = 1\n")
    assert cli.main(["check", str(right)]) == 0
    assert "merge_heads passes" in capsys.readouterr().out
    assert cli.main(["check", str(wrong)]) == 1
    assert "Likely: The heads are added up." in capsys.readouterr().out
    assert cli.main(["check", str(empty)]) == 1
    assert "no piece is defined there; the pieces are pair_counts" in capsys.readouterr().out
    assert cli.main(["check", str(tmp_path / "notes.txt")]) == 2
    assert cli.main(["check", "--mine", str(tmp_path / "none")]) == 1
    assert "no pieces in" in capsys.readouterr().out


def test_notebooks_check_fails_on_a_stale_notebook(clone, monkeypatch, capsys):
    monkeypatch.setattr(paths, "root", lambda: clone)
    assert cli.main(["notebooks", "--check"]) == 0
    source = paths.source(clone, "03-attention")
    source.write_text(source.read_text().replace("# # Lab 03", "# # Another title"))
    assert cli.main(["notebooks", "--check"]) == 1
    assert "notebooks/03-attention/03-attention.ipynb is not what" in capsys.readouterr().out


def test_grade_asks_for_a_lab_that_exists(capsys):
    assert cli.main(["grade", "99-nothing"]) == 2
    assert "03-attention, 04-heads" in capsys.readouterr().out


def test_the_table_of_pieces_is_sound():
    for piece in pieces.PIECES.values():
        assert hasattr(piece.home, piece.name)
        assert piece.points > 0
        assert piece.chapter.split("-", 1)[1] == piece.topic or piece.chapter[:2].isdigit()
    with pytest.raises(ValueError, match="'softmacks' is not a piece of the course"):
        pieces.find("softmacks")
