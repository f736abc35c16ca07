"""The command `tfm`: what the Makefile does, for people without make, and a look at one's own progress."""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tfmlib import pieces
from tfmlib.course import paths


def lab(options: argparse.Namespace) -> int:
    """Copy each lab that is not there yet to work/, and open JupyterLab on it."""
    top = paths.root()
    for name in copy_labs(top):
        print(f"new: work/{name}")
    print("work/ holds your labs and, in work/mine/, the pieces of yours that passed.")
    if not options.open:
        return 0
    command = [sys.executable, "-m", "jupyter", "lab", "--notebook-dir", str(top / "work"), *options.jupyter]
    return subprocess.run(command, check=False).returncode


def copy_labs(top: Path) -> list[str]:
    """Copy the labs that a learner does not have yet to work/; returns their names. Never replaces one."""
    new = []
    for name in paths.labs(top):
        target = paths.own_copy(top, name)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(paths.release(top, name), target)
            new.append(name)
    return new


def _mine(given: str | None) -> Path:
    return Path(given) if given else paths.root() / "work" / "mine"


def progress(options: argparse.Namespace) -> int:
    """Show which pieces are kept, chapter by chapter."""
    from tfmlib.course import workshop

    kept = workshop.kept(_mine(options.mine))
    done = total = 0.0
    for chapter, table in pieces.chapters().items():
        have = sum(piece.points for piece in table if piece.name in kept)
        of = sum(piece.points for piece in table)
        done, total = done + have, total + of
        print(f"{chapter}   {have:g} of {of:g} points")
        for piece in table:
            when = f"passed {kept[piece.name].passed}" if piece.name in kept else ""
            print(f"  [{'x' if piece.name in kept else ' '}] {piece.name:32}{piece.points:3g}   {when}".rstrip())
    print(f"{done:g} of {total:g} points in all")
    return 0


def check(options: argparse.Namespace) -> int:
    """Run the checks of every piece that Python files define; without files, of the kept pieces."""
    import runpy

    from tfmlib.course.check import examine

    files = [Path(file) for file in options.files] or sorted(_mine(options.mine).glob("*.py"))
    if not files:
        print(f"no pieces in {_mine(options.mine)} yet: pass one in a lab first, or name a file")
        return 1
    failed = found = 0
    for file in files:
        if file.suffix != ".py":
            print(f"{file}: expected a Python file (.py) that defines pieces")
            return 2
        try:
            names = runpy.run_path(str(file))
        except (Exception, SystemExit) as error:
            line = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
            print(f"{file}{line} cannot be run ({type(error).__name__}: {error})")
            return 2
        own = [name for name in pieces.PIECES if _is_defined_in(names.get(name), file)]
        found += len(own)
        for name in own:
            report = examine(names[name], name)
            failed += not report.passed
            print(f"{file}: {report}\n" if not report.passed else f"{file}: {name} passes")
    if not found:
        print(f"{', '.join(map(str, files))}: no piece is defined there; the pieces are {', '.join(pieces.PIECES)}")
    return 1 if failed or not found else 0


def train(options: argparse.Namespace) -> int:
    """Train a small model on a text, with your own pieces where they are kept (tfm train --help lists the options)."""
    from tfmlib import train as training_command
    from tfmlib.course import workshop

    loaded, problems = workshop.load(_mine(options.mine))
    for problem in problems:
        print(problem)
    print(f"your own {', '.join(loaded)}" if loaded else "none of your own pieces yet: the reference trains")
    training_command.main(options.rest)
    return 0


def _is_defined_in(value, file: Path) -> bool:
    from tfmlib.course.check import source_file

    return callable(value) and source_file(value) == str(file)


def make_notebooks(options: argparse.Namespace) -> int:
    """(Authors) Make the solution and the learner's notebooks from solutions/**/*.py."""
    from tfmlib.course import notebooks

    top = paths.root()
    if options.check:
        stale = notebooks.out_of_date(top)
        for path in stale:
            print(f"{path.relative_to(top)} is not what solutions/ and tfmlib make: run `make notebooks`")
        return 1 if stale else 0
    try:
        written = notebooks.write(top)
    except notebooks.Edited as error:
        print(error)
        return 1
    for path in written:
        print(f"wrote {path.relative_to(top)}")
    if not written:
        print("every notebook is up to date")
    return 0


def site(options: argparse.Namespace) -> int:
    """Build the site in _build/html, with warnings as errors."""
    from tfmlib.course import site as builder

    try:
        page = builder.build(paths.root())
    except RuntimeError as error:
        print(error)
        return 1
    print(f"\nThe site is built. Open {page} in a browser.\nTo do the labs: make lab (or: tfm lab)")
    return 0


def grade(options: argparse.Namespace) -> int:
    """Grade what lies in submitted/ by stock nbgrader: autograde, feedback, export. Or show it on made-up learners."""
    from tfmlib.course import grading

    top = paths.root()
    if options.demo:
        folder = top / "_build" / "grade-demo"
        for line in grading.demo(top, folder):
            print(line, flush=True)
        found = grading.grades(folder)
        print(f"\n{grading.as_table(found)}\n\nThe feedback is in {folder / 'feedback'}")
        return 0 if all(g.right for g in found) else 1
    if options.lab not in paths.labs(top):
        print(f"which lab? One of: {', '.join(paths.labs(top))}")
        return 2
    again = ["--force"] if options.force else []
    try:
        for command in (["autograde", options.lab, *again], ["generate_feedback", options.lab, *again], ["export"]):
            print(f"nbgrader {' '.join(command)}", flush=True)
            print(grading.nbgrader(top, *command))
    except RuntimeError as error:
        print(f"{error}\nThe guide for instructors (book/instructors.md) says what must come before.")
        return 1
    print("The grades are in grades.csv, the feedback in feedback/")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="tfm", description="Transformers, from Input to Inference: the course.")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name, function, **settings):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__, **settings)
        command.set_defaults(run=function)
        return command

    command = add("lab", lab)
    command.add_argument("--no-open", dest="open", action="store_false", help="copy the labs only")
    command.add_argument("jupyter", nargs="*", help="arguments for JupyterLab, after --")
    command = add("progress", progress)
    command.add_argument("--mine", help="the folder of kept pieces (default: work/mine)")
    command = add("check", check)
    command.add_argument("files", nargs="*", help="Python files that define pieces (default: the kept pieces)")
    command.add_argument("--mine", help="the folder of kept pieces (default: work/mine)")
    command = add("train", train, add_help=False)
    command.add_argument("--mine", help="the folder of kept pieces (default: work/mine)")
    command = add("notebooks", make_notebooks)
    command.add_argument("--check", action="store_true", help="write nothing; fail if one is out of date")
    add("site", site)
    command = add("grade", grade)
    command.add_argument("lab", nargs="?", help="the lab, for example 03-attention")
    command.add_argument("--force", action="store_true", help="grade again what has been graded")
    command.add_argument("--demo", action="store_true", help="grade five made-up learners in _build/grade-demo")

    options, options.rest = parser.parse_known_args(arguments)
    if options.rest and options.run is not train:
        parser.error(f"unrecognized arguments: {' '.join(options.rest)}")
    try:
        return options.run(options)
    except FileNotFoundError as error:
        print(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
