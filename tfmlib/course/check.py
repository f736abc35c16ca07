"""Judge a piece: run its checks, say which promise broke and why, and give points.

`examine(piece)` judges and returns a Report. `check(piece)` is what a lab calls: it also shows the report, keeps what
passed, and puts the piece in use.
"""

import contextlib
import functools
import html
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

import tfmlib_checks
from tfmlib_checks.misconceptions import Misconception, known
from tfmlib_checks.same import SEED_VARIABLE, Broken, Skip, alike, is_exception

from tfmlib import pieces
from tfmlib.course import limits
from tfmlib.course.guard import Shortcut, guarded, left_as_found

PASSED, FAILED, UNWRITTEN, SKIPPED, NOT_RUN = "ok", "no", "not written yet", "skipped", "not run"


@dataclass(frozen=True)
class Result:
    """How one check ended: its function's name, its promise, whether it held, and what to say if not."""

    name: str
    promise: str
    status: str
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.status == PASSED


@dataclass(frozen=True, repr=False)
class Report:
    """What the checks say of a piece. `hint` is the sentence of the misconception that it shows, or None."""

    piece: str
    results: tuple[Result, ...]
    hint: str | None = None
    printed: str = ""
    notes: tuple[str, ...] = field(default=())

    def _count(self, status: str) -> int:
        return sum(result.status == status for result in self.results)

    @property
    def passed(self) -> bool:
        """Every check that could run holds, and at least one could."""
        return self._count(PASSED) > 0 and self._count(PASSED) + self._count(SKIPPED) == len(self.results)

    @property
    def unwritten(self) -> bool:
        """Nothing has been written yet: no check got past the stub."""
        return self._count(PASSED) == 0 and self._count(UNWRITTEN) > 0 and self._count(FAILED) == 0

    @property
    def skipped(self) -> bool:
        """This machine can run no check at all."""
        return 0 < self._count(SKIPPED) == len(self.results)

    @property
    def share(self) -> float:
        """The share of the checks that hold, in [0, 1], of those that this machine can run."""
        judged = len(self.results) - self._count(SKIPPED)
        return self._count(PASSED) / judged if judged else 0.0

    @property
    def headline(self) -> str:
        if self.unwritten:
            return "not written yet"
        if self.skipped:
            return "skipped on this machine"
        skipped = f", {self._count(SKIPPED)} skipped" if self._count(SKIPPED) else ""
        return f"{self._count(PASSED)} of {len(self.results) - self._count(SKIPPED)} checks passed{skipped}"

    def __str__(self) -> str:
        lines = [f"{self.piece}   {self.headline}"]
        if not self.unwritten:
            for result in self.results:
                lines.append(f"[{result.status}]   {result.promise}")
                lines += [f"       {line}" for line in result.message.splitlines()]
        if self.hint:
            lines.append(f"Likely: {self.hint}")
        lines += self.notes
        if self.printed:
            lines += ["Your code printed:", *(f"   {line}" for line in self.printed.splitlines())]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        mark = "✓" if self.passed else "·" if self.unwritten else "✗"
        color = {"✓": "#2e8540", "·": "#8a8a8a", "✗": "#c4420f"}
        style = f"border-left:4px solid {color[mark]};padding:0.2em 0.9em;margin:0.3em 0"
        parts = [f'<div class="course-report" style="{style}">']
        parts.append(f"<div><b>{mark} <code>{html.escape(self.piece)}</code></b> &nbsp;{self.headline}</div>")
        if not self.passed and not self.unwritten:
            parts += [_result_html(result, color) for result in self.results]
        if self.hint:
            parts.append(f'<div style="margin-top:0.4em"><b>Likely:</b> {_ticks(self.hint)}</div>')
        parts += [f'<div style="margin-top:0.4em">{_ticks(note)}</div>' for note in self.notes]
        if self.printed:
            parts.append(
                f"<details><summary>Your code printed</summary><pre>{html.escape(self.printed)}</pre></details>"
            )
        return "".join([*parts, "</div>"])


def _result_html(result: Result, color: dict[str, str]) -> str:
    mark = {PASSED: "✓", FAILED: "✗"}.get(result.status, "·")
    said = "" if result.status in (PASSED, FAILED) else f" <i>({result.status})</i>"
    line = f'<div><span style="color:{color[mark]}">{mark}</span> {_ticks(result.promise)}{said}</div>'
    if result.message:
        line += f'<pre style="margin:0.1em 0 0.4em 1.4em;white-space:pre-wrap">{html.escape(result.message)}</pre>'
    return line


def _ticks(text: str) -> str:
    """Escape text for HTML and set `code` in code type."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


# Judging -------------------------------------------------------------------------------------------------------------


def check_module(name: str) -> ModuleType:
    """The module that holds the checks of a piece."""
    return import_module(f"tfmlib_checks.test_{pieces.find(name).topic}")


def checks(name: str) -> list[Callable]:
    """The checks of a piece, in the order they are written: those whose single argument bears its name."""
    found = [f for f in vars(check_module(name)).values() if callable(f) and f.__name__.startswith("test_")]
    return [f for f in found if list(inspect.signature(f).parameters) == [name]]


def probe(name: str) -> Callable:
    """The function that asks a piece what tells the known mistakes apart."""
    return getattr(check_module(name), f"probe_{name}")


def examine(piece: Callable, name: str | None = None, *, seconds: float | None = None) -> Report:
    """Judge a piece by its checks, without showing anything, giving points or keeping it.

    `name` says which piece it is, by default its own name. `seconds` limits all checks together; by default it is what
    their module says in `SECONDS`, else `limits.SECONDS`. Raises ValueError for what is not a piece of the course.
    """
    name = name or getattr(piece, "__name__", repr(piece))
    tests = checks(name)
    if seconds is None:
        seconds = getattr(check_module(name), "SECONDS", {}).get(name, limits.SECONDS)
    if not callable(piece):
        return Report(name, tuple(_result(test, FAILED, _not_callable(name, piece)) for test in tests))
    forbidden = getattr(check_module(name), "FORBIDDEN", {}).get(name, [])
    watched = guarded(piece, name, forbidden)
    getattr(check_module(name), "before_the_clock", lambda: None)()
    results: list[Result] = []
    hint = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_once())
        stack.enter_context(left_as_found(name))
        stack.enter_context(limits.state_kept())
        stack.enter_context(_in_scope(piece, name))
        output = stack.enter_context(limits.collected_output())
        stack.enter_context(limits.memory_limit(limits.BYTES))
        try:
            with limits.time_limit(seconds):
                for test in tests:
                    results.append(_judge(test, watched, name))
        except limits.OutOfTime as late:
            stopped, *rest = tests[len(results) :]
            results.append(_result(stopped, FAILED, f"{_out_of_time(seconds)}\n{_own_frames(late)}"))
            results += [_result(test, NOT_RUN) for test in rest]
        else:
            if any(result.status == FAILED for result in results):
                hint = _hint(piece, name, seconds)
    return Report(name, tuple(results), hint, _shortened(output.text))


_judging = False


@contextlib.contextmanager
def _once() -> Iterator[None]:
    """One piece is judged at a time: the limits hold for one."""
    global _judging
    if _judging:
        raise RuntimeError("a piece cannot have itself checked while it is checked")
    _judging = True
    try:
        yield
    finally:
        _judging = False


def _result(test: Callable, status: str, message: str = "") -> Result:
    promise = inspect.getdoc(test) or test.__name__.removeprefix("test_").replace("_", " ")
    return Result(test.__name__, promise, status, message.rstrip())


def _judge(test: Callable, piece: Callable, name: str) -> Result:
    """Run one check on a guarded piece."""
    status, message = PASSED, ""
    try:
        test(piece)
    except (KeyboardInterrupt, limits.OutOfTime):
        raise
    except Skip as reason:
        status, message = (FAILED, _told(reason, name)) if _is_raised_by_learner(reason) else (SKIPPED, str(reason))
    except (Broken, Shortcut) as broken:
        status, message = FAILED, str(broken)
        if broken.__cause__ is not None:
            message += "\n" + _own_frames(broken.__cause__)
    except BaseException as error:
        error = _of_the_learner(error)
        status, message = (UNWRITTEN, "") if _is_a_stub(error) else (FAILED, _told(error, name))
    return _result(test, status, message)


def diagnose(piece: Callable, name: str) -> Misconception | None:
    """The misconception that a wrong piece shows, if any.

    A misconception is known by the probe's results in which it departs from the reference. A piece shows it if it
    agrees with it in all of these. That both raise the same exception is not enough: many mistakes do. One of these
    results must be a value, or else all other results must be right. Where several fit, the one that agrees in the
    most results is named.
    """
    got = probe(name)(piece)
    right, variants = _answers(name, os.environ.get(SEED_VARIABLE, ""))
    best, best_score = None, 0
    for misconception, wrong in variants:
        apart = [not alike(w, r) for w, r in zip(wrong, right, strict=True)]
        agree = [alike(g, w) for g, w in zip(got, wrong, strict=True)]
        shown = any(apart) and all(a for a, told in zip(agree, apart, strict=True) if told)
        a_value = any(told and not is_exception(w) for w, told in zip(wrong, apart, strict=True))
        rest_right = all(told or alike(g, r) for g, r, told in zip(got, right, apart, strict=True))
        if shown and (a_value or rest_right) and sum(agree) > best_score:
            best, best_score = misconception, sum(agree)
    return best


@functools.cache
def _answers(name: str, seed: str) -> tuple[list, list[tuple[Misconception, list]]]:
    """What the reference and every misconception answer to a piece's probe under this seed."""
    ask = probe(name)
    return ask(pieces.reference(name)), [(m, ask(m.implementation)) for m in known(name)]


def _hint(piece: Callable, name: str, seconds: float) -> str | None:
    """The sentence of the misconception that a failing piece shows. A diagnosis must never be what fails."""
    try:
        with limits.time_limit(seconds):
            found = diagnose(piece, name)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None
    return found.hint if found else None


# What to say of an exception -----------------------------------------------------------------------------------------

_COURSE = tuple(f"{Path(file).resolve().parent}{os.sep}" for file in (tfmlib_checks.__file__, pieces.__file__))
_VARIANTS = tuple(f"{_COURSE[0]}{folder}{os.sep}" for folder in ("misconceptions", "alternatives"))


def _is_own(filename: str) -> bool:
    """Whether code stands in the learner's file and not in the course, torch or Python."""
    if filename.startswith(_VARIANTS):
        return True
    return not filename.startswith(_COURSE + limits.LIBRARIES) and not filename.startswith("<frozen")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]


def _own_frames(error: BaseException) -> str:
    """The lines of the learner's own code through which an exception passed."""
    frames = _frames(error)
    shown = frames if len(frames) <= 4 else [*frames[:2], *frames[-2:]]
    return "\n".join(f"  line {frame.lineno}, in {frame.name}:  {frame.line}" for frame in shown)


def _is_raised_by_learner(error: BaseException) -> bool:
    """Whether the exception was raised by a learner's line itself, and not from within torch or a check."""
    return _is_own(traceback.extract_tb(error.__traceback__)[-1].filename)


def _is_a_stub(error: BaseException) -> bool:
    """Whether a learner's own line says that nothing is written yet. A kernel's says so when it is compiled."""
    if type(error).__name__ == "CompilationError":
        return "raise NotImplementedError" in str(error)
    return isinstance(error, NotImplementedError) and _is_raised_by_learner(error)


def _of_the_learner(error: BaseException) -> BaseException:
    """What a kernel raised, if Triton's interpreter wrapped it in an error of its own."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def _told(error: BaseException, name: str) -> str:
    if limits.is_out_of_memory(error):
        traceback.clear_frames(error.__traceback__)  # gives the memory back: the next lines need some
        gib = limits.BYTES / 2**30
        said = f"{name} asked for more memory than a check allows ({gib:.0f} GiB). Is a tensor far too large?"
    elif isinstance(error, RecursionError):
        said = (
            f"{name} calls itself without end. While it is checked, "
            f"`tfmlib.{pieces.find(name).module}.{name}` is your own version, too."
        )
    elif isinstance(error, SystemExit):
        said = f"{name} ended the program (SystemExit): return a result instead"
    else:
        said = f"{type(error).__name__}: {_text(error)}"
    return f"{said}\n{_own_frames(error)}"


def _text(error: BaseException) -> str:
    """What an exception says, if it can say it."""
    try:
        return _shortened(str(error))
    except Exception:
        return "(its text cannot be shown)"


def _out_of_time(seconds: float) -> str:
    return f"stopped after {seconds:g} seconds: does a loop never end? The other checks were not run."


def _not_callable(name: str, value) -> str:
    return f"expected {name} to be a function or a class, got {type(value).__name__}"


def _shortened(text: str, most: int = 600) -> str:
    text = text.strip()
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters in all)"


# Names ---------------------------------------------------------------------------------------------------------------


def _own_function(piece: Callable) -> Callable | None:
    """A function written in Python that is the piece, or a method of it; None for a built-in."""
    for candidate in (piece, *vars(piece).values()) if inspect.isclass(piece) else (piece,):
        candidate = inspect.unwrap(candidate) if callable(candidate) else candidate
        while isinstance(candidate, functools.partial):
            candidate = candidate.func
        if inspect.isfunction(candidate):
            return candidate
    return None


def namespace_of(piece: Callable) -> dict:
    """The global names that a piece's own code sees; empty for a built-in."""
    function = _own_function(piece)
    return function.__globals__ if function else {}


def source_file(piece: Callable) -> str | None:
    """The name of the file, or of the notebook's cell, that a piece was written in."""
    function = _own_function(piece)
    return function.__code__.co_filename if function else None


@contextlib.contextmanager
def _in_scope(piece: Callable, name: str) -> Iterator[None]:
    """While a piece is judged, its own name means itself and every other piece's name the one in use.

    So a piece that calls an earlier one, by plain name or through the module, is judged alone: an earlier piece that
    is wrong or missing does not count against it. tfmlib's own modules are left to `pieces.using`.
    """
    scope = namespace_of(piece)
    at_home = any(scope is vars(p.home) for p in pieces.PIECES.values())
    changed = {}
    if not at_home:
        for other in pieces.PIECES:
            if other in scope:
                changed[other] = scope[other]
                scope[other] = piece if other == name else pieces.in_use(other)
    try:
        with pieces.using(piece, name):
            yield
    finally:
        scope.update(changed)


# What a lab calls ----------------------------------------------------------------------------------------------------

_submitted: dict[str, Callable] = {}  # the learner's latest version of each piece, also of those that did not pass


def check(piece: Callable, points: float | None = None) -> float:
    """Show how a piece does, keep it if it passes, and return the points it earns: a float in [0, points].

    `points` defaults to what the table of pieces says. Points are given in proportion to the checks that hold; a
    piece that is not written yet earns 0. Afterwards the piece's plain name, and the module's, mean the piece in use:
    the learner's own where it passes, else what was in use before. Raises ValueError for what is not a piece.
    """
    scope = sys._getframe(1).f_globals
    name = _name_of(piece, scope)
    points = pieces.find(name).points if points is None else points
    expect_points(points)
    piece = _learners_own(piece, name)
    if piece is None:
        note = f"`{name}` is tfmlib's own here. Run the cell above, in which you write yours, then this one."
        report = Report(name, tuple(_result(test, UNWRITTEN) for test in checks(name)), notes=(note,))
    else:
        _submitted[name] = piece
        report = examine(piece, name)
    report = _settle(report, piece, scope)
    _show(report)
    return points_of(report, points)


def points_of(report: Report, points: float) -> float:
    """The share of the points that a report earns, rounded down to two decimals; all of them only if it passed."""
    if report.passed:
        return float(points)
    hundredths = round(points * report.share * 100, 6)  # so that 3 * 0.7 is 2.1 and not 2.0999
    return min(math.floor(hundredths) / 100, float(points))


def expect_points(points: float) -> None:
    """Raises ValueError unless points are a positive, finite number: nbgrader takes anything else as it likes."""
    if not (isinstance(points, (int, float)) and math.isfinite(points) and points > 0):
        raise ValueError(f"points must be a positive number, got {points!r}")


def _name_of(piece, scope: dict) -> str:
    """Which piece is meant: by the name it is bound to where `check` is called, else by its own."""
    own = getattr(piece, "__name__", None)
    bound = [name for name in pieces.PIECES if scope.get(name) is piece]
    if own in bound or (not bound and own in pieces.PIECES):
        return own
    if bound:
        return bound[0]
    return pieces.find(own or repr(piece)).name


def _learners_own(piece: Callable, name: str) -> Callable | None:
    """The learner's version that is meant, or None where there is none.

    After a check that failed, the plain name means the piece in use. Checking again then means the learner's version.
    """
    if piece is pieces.reference(name) or (piece is pieces.in_use(name) and name in _submitted):
        return _submitted.get(name)
    return piece


def _settle(report: Report, piece: Callable | None, scope: dict) -> Report:
    """Put a piece that passed in use, and keep it; make the plain name mean the piece in use."""
    from tfmlib.course import workshop

    name, notes = report.piece, list(report.notes)
    if report.passed:
        kept, note = workshop.keep(piece, name, scope)
        pieces.use(kept or piece, name)  # the kept one does not change with the notebook's names
        notes += [note] if note else []
    elif pieces.in_use(name) is pieces.reference(name):
        notes.append("The lab goes on with the reference until yours passes.")
    else:
        notes.append("The lab goes on with the version of yours that passed before.")
    if name in scope:
        scope[name] = pieces.in_use(name)
    return Report(name, report.results, report.hint, report.printed, tuple(notes))


def _show(report: Report) -> None:
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    if get_ipython is not None and get_ipython() is not None:
        display(report)
    else:
        print(report)
