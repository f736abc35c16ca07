"""The learner's workshop: pieces that passed are kept as files, and used from then on in this and all later labs.

Kept pieces lie in `mine/<module>.py` (`mine/models/gpt.py` for `models.gpt`), beside the labs' folders. Such a file is
a real module: imports first, among them the names of `tfmlib.<module>` that it does not define, then one section for
each piece.
"""

import ast
import builtins
import hashlib
import linecache
import os
import re
import symtable
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path

from tfmlib import pieces

_folder: Path | None = None  # where pieces are kept; None before begin() and while nbgrader grades

_SECTION = re.compile(
    r"^# ---- piece: (\w+)(?:, passed ([\d-]+ [\d:]+))?(?:, digest (\w+))? -*\n(.*?)^# ---- end of \1 -*\n", re.M | re.S
)


_LEFT_ALONE = "It was left as it is; the reference is used instead."


# The set-up cell -----------------------------------------------------------------------------------------------------


def begin(lab: str) -> None:
    """Start a lab: load the pieces kept so far, put them in use, and keep what passes from here on.

    Every piece of the lab that the notebook has not defined yet gets its plain name too: it means the piece in use.
    Raises ValueError for an unknown lab. What cannot be loaded is reported and left alone; the lab goes on with the
    reference. While nbgrader grades, kept pieces are ignored: a lab is judged alone.
    """
    from tfmlib.course.check import examine

    global _folder
    if lab not in pieces.chapters():
        raise ValueError(f"no lab {lab!r}; the labs are {', '.join(pieces.chapters())}")
    first = pieces.chapters()[lab][0].name
    examine(pieces.reference(first), first)  # torch loads parts of itself late: now, not in the learner's first check
    if os.environ.get("NBGRADER_EXECUTION"):
        _folder = None
    else:
        here = Path.cwd()
        _folder = (here.parent if here.name == lab else here) / "mine"
        loaded, problems = load(_folder)
        for problem in problems:
            print(problem)
        mine = f"your own {', '.join(loaded)}" if loaded else "none of your own yet"
        print(f"Lab {lab}. Pieces in use: {mine}; the reference for the rest.")
    scope = sys._getframe(1).f_globals
    for piece in pieces.chapters()[lab]:
        scope.setdefault(piece.name, pieces.in_use(piece.name))


def load(folder: Path) -> tuple[list[str], list[str]]:
    """Put every piece that is kept in a folder in use; returns their names, and what could not be loaded and why.

    A piece that was changed by hand since it passed is judged again first.
    """
    from tfmlib.course.check import examine

    loaded, problems = [], []
    for module in dict.fromkeys(piece.module for piece in pieces.PIECES.values()):
        path = _kept_file(folder, module)
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        made, wrong = _run_by_sections(text, path)
        problems += [f"{problem} {_LEFT_ALONE}" for problem in wrong]
        for name, section in sections(text).items():
            if not callable(made.get(name)):
                continue
            if section.digest != _digest(section.source) and not examine(made[name], name).passed:
                said = f"`{name}` was changed since it passed, and does not pass now"
                problems.append(f"{path}: {said}. {_LEFT_ALONE}")
                continue
            pieces.use(made[name], name)
            loaded.append(name)
    return loaded, problems


def _run_by_sections(text: str, path: Path) -> tuple[dict, list[str]]:
    """Run a kept file; where it fails, what can be run of it, piece by piece. Returns its names, and what failed."""
    try:
        return _run(text, path), []
    except (Exception, SystemExit) as error:
        problems = [_not_loaded(path, error)]
    found = list(_SECTION.finditer(text))
    made: dict = {}
    for start, end in [(0, found[0].start() if found else 0), *(match.span() for match in found)]:
        part = "\n" * text[:start].count("\n") + text[start:end]  # so that line numbers are those of the file
        try:
            made |= _run(part, path, made)
        except (Exception, SystemExit) as error:
            problems.append(_not_loaded(path, error))
    return made, list(dict.fromkeys(problems))


def _not_loaded(path: Path, error: BaseException) -> str:
    return f"{path}{_line_in(path, error)} cannot be loaded ({type(error).__name__}: {error})."


def _line_in(path: Path, error: BaseException) -> str:
    """Where in a file an exception arose, as " line 7", or "" if elsewhere."""
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else None
    return f" line {line}" if line else ""


# Keeping a piece -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """One kept piece in a kept file: its source with what it needs, when it passed, and the source's digest then."""

    source: str
    passed: str
    digest: str


def sections(text: str) -> dict[str, Section]:
    """The pieces of a kept file."""
    return {m[1]: Section(m[4].strip("\n"), m[2] or "", m[3] or "") for m in _SECTION.finditer(text)}


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def kept(folder: Path) -> dict[str, Section]:
    """All pieces that are kept in a folder."""
    found: dict[str, Section] = {}
    for path in sorted(folder.rglob("*.py")):
        found |= sections(path.read_text(encoding="utf-8"))
    return {name: found[name] for name in pieces.PIECES if name in found}


def keep(piece: Callable, name: str, scope: dict) -> tuple[Callable | None, str]:
    """Keep a piece that passed, with all that its source needs, as it stands in the learner's cells.

    `scope` holds the notebook's names. Returns the kept piece, which depends on its file alone, and what to tell the
    learner; None and the reason if it could not be kept. Never raises: the points are earned, kept or not.
    """
    if _folder is None:
        return None, ""
    path = _kept_file(_folder, pieces.find(name).module)
    try:
        return _keep(piece, name, scope, path)
    except (Exception, SystemExit) as error:
        return None, f"It passed, but could not be kept ({type(error).__name__}: {error})."


def _kept_file(folder: Path, module: str) -> Path:
    """Where the pieces of a module are kept: `mine/attention.py`, `mine/models/gpt.py`."""
    return folder.joinpath(*module.split(".")).with_suffix(".py")


def _keep(piece: Callable, name: str, scope: dict, path: Path) -> tuple[Callable | None, str]:
    """Before the file is replaced, the new one is run, and what changed is judged again."""
    from tfmlib.course.check import examine

    module = pieces.find(name).module
    where = _kept_file(Path("mine"), module).as_posix()
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    before = sections(old)
    reason = "its source was not found"
    for source in _sources(piece, name, scope):
        text = _with_section(old, module, name, source)
        try:
            made = _run(text, path)
        except (Exception, SystemExit) as error:
            _, problems = _run_by_sections(old, path)
            if problems:
                return None, f"It passed, but was not kept: {problems[0]} Repair that file, or move it away."
            reason = f"in a file of its own it fails ({type(error).__name__}: {error})"
            continue
        if not callable(made.get(name)) or not examine(made[name], name).passed:
            reason = "in a file of its own it does not pass: it needs something from another cell"
            continue
        others = [other for other in before if other != name and _shares_names(before[other].source, source)]
        broken = [other for other in others if not examine(made[other], other).passed]
        if broken:
            reason = f"it would break your kept `{broken[0]}`, which uses the same names. Give helpers other names"
            continue
        _replace(path, text)
        return made[name], f"Kept in `{where}`: your own `{name}` is in use from now on."
    return None, f"It passed, but was not kept: {reason}. Write all that it needs in its own cell."


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _with_section(old: str, module: str, name: str, source: str) -> str:
    """A kept file with one section new or replaced. What a learner wrote between sections stays."""
    stamp = datetime.now().strftime("%Y-%m-%d %H:%M")
    marker = f"# ---- piece: {name}, passed {stamp}, digest {_digest(source)} ----"
    section = f"{marker}\n{source}\n# ---- end of {name} ----\n"
    top, _, body = old.rpartition(f"{_HEADER_END}\n")
    if name in sections(old):
        body = _SECTION.sub(lambda m: section if m[1] == name else m[0], body)
    else:
        body = f"{body.rstrip()}\n\n\n{section}" if body.strip() else section
    return f"{_header(module, set(sections(body)), top)}\n\n{body.strip()}\n"


_HEADER_END = "# ---- your pieces ----"


def _header(module: str, defined: set[str], old: str) -> str:
    """The top of a kept file. Lines that a learner added to it stay."""
    home = import_module(f"tfmlib.{module}")
    own = [n for n, v in vars(home).items() if n in pieces.PIECES or getattr(v, "__module__", "") == home.__name__]
    rest = ", ".join(n for n in own if n[0] != "_" and n not in defined)
    title = f'"""Your own pieces of tfmlib.{module}, each kept when it passed its checks."""'
    imports = f"from {home.__name__}"
    added = [line for line in old.splitlines() if line.strip() and line != title and not line.startswith(imports)]
    return "\n".join([title, *([f"{imports} import {rest}"] if rest else []), *added, _HEADER_END])


def _run(text: str, path: Path, names: dict | None = None) -> dict:
    """Run a kept file as a module of its own, in which `names` are known; returns its names."""
    place = path.with_suffix("").parts
    full = place[len(place) - 1 - place[::-1].index("mine") :]  # ("mine", "models", "gpt")
    for n in range(1, len(full)):  # so that inspect and pickle find its classes
        package = ".".join(full[:n])
        sys.modules.setdefault(package, types.ModuleType(package))
    module = types.ModuleType(".".join(full))
    module.__file__ = str(path)
    vars(module).update(names or {})
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec"), vars(module))
    sys.modules[module.__name__] = module
    for n in range(1, len(full)):
        setattr(sys.modules[".".join(full[:n])], full[n], sys.modules[".".join(full[: n + 1])])
    return vars(module)


# A source that stands on its own -------------------------------------------------------------------------------------


def _sources(piece: Callable, name: str, scope: dict) -> Iterator[str]:
    """Sources of a piece to try: with just what it needs; then its whole cell, with what that needs."""
    cells, module = _cells(piece), pieces.find(name).module
    if cells and _binding(name, cells) is not None:
        yield _self_contained(name, _binding(name, cells), cells, scope, module)
        yield _self_contained(name, cells[0].strip("\n"), cells, scope, module)


def _self_contained(name: str, source: str, cells: list[str], scope: dict, module: str) -> str:
    """A source, preceded by the imports, constants and helpers it uses, taken from the learner's cells."""
    order, parts = [name], {name: source}
    needed = sorted(_free_names(source))
    while needed:
        wanted = needed.pop()
        part = None if wanted in parts else _definition(wanted, cells, scope, module)
        if part is not None:
            parts[wanted] = part
            order.append(wanted)
            needed += sorted(_free_names(part))
    imports = sorted({parts[n] for n in order if parts[n].startswith(("import ", "from "))} - {source})
    others = [parts[n] for n in reversed(order) if parts[n] not in imports]
    return "\n".join(imports) + ("\n\n\n" if imports else "") + "\n\n\n".join(dict.fromkeys(others))


def _cells(piece: Callable) -> list[str]:
    """The learner's sources, the one that defines the piece first, then the newest."""
    from tfmlib.course.check import source_file

    own = source_file(piece)
    names = [own] if own else []
    names += [n for n in reversed(list(linecache.cache)) if "ipykernel" in n or n.startswith("<ipython-input")]
    return ["".join(linecache.getlines(n)) for n in dict.fromkeys(names)]


def _binding(name: str, cells: list[str]) -> str | None:
    """The last top-level statement that binds a name, in the first cell that has one."""
    for cell in cells:
        try:
            tree = ast.parse(cell)
        except SyntaxError:
            continue
        found = [statement for statement in tree.body if name in _bound_names(statement)]
        if found:
            lines, statement = cell.splitlines(), found[-1]
            first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
            return "\n".join(lines[first - 1 : statement.end_lineno])
    return None


def _bound_names(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _free_names(source: str) -> set[str]:
    """The names that a source takes from outside: globals it reads but does not define."""
    top = symtable.symtable(source, "<piece>", "exec")
    read = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        read |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        tables += table.get_children()
    bound = set().union(*(_bound_names(statement) for statement in ast.parse(source).body))
    return read - bound - set(vars(builtins))


def _definition(name: str, cells: list[str], scope: dict, module: str) -> str | None:
    """How to get a name that a piece uses: an import, or the learner's own definition. None if it needs nothing.

    Another piece of the same module needs nothing: the kept file imports it, or defines it in its own section.
    """
    if name not in scope:
        return None
    if name in pieces.PIECES:
        home = pieces.find(name).module
        return None if home == module else f"from tfmlib.{home} import {name}"
    value = scope[name]
    if isinstance(value, types.ModuleType):
        return _import_of_module(value.__name__, name)
    home, own_name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if home not in (None, "__main__") and own_name and getattr(sys.modules.get(home), own_name, None) is value:
        return f"from {home} import {own_name}" + (f" as {name}" if own_name != name else "")
    return _binding(name, cells)


def _import_of_module(full: str, name: str) -> str:
    parent, _, last = full.rpartition(".")
    if full == name:
        return f"import {full}"
    if parent and last == name:
        return f"from {parent} import {last}"
    return f"import {full} as {name}"


def _shares_names(one: str, other: str) -> bool:
    """Whether two sections define a name in common, so that one may change what the other means."""

    def defined(source: str) -> set[str]:
        imports = (ast.Import, ast.ImportFrom)
        return set().union(*(_bound_names(s) for s in ast.parse(source).body if not isinstance(s, imports)))

    return bool(defined(one) & defined(other))
