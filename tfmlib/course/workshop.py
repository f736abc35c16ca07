"""The learner's workshop: pieces that passed are kept as files, and used from then on in this and all later labs.

Kept pieces lie in `mine/<module>.py`, beside the labs' folders. Such a file is a real module: imports first, among them
the names of `tfmlib.<module>` that it does not define, then one section for each piece.
"""

import ast
import builtins
import linecache
import os
import re
import symtable
import sys
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path

from tfmlib import pieces

_folder: Path | None = None  # where pieces are kept; None before begin() and while nbgrader grades

_SECTION = re.compile(r"^# ---- piece: (\w+)(?:, passed ([\d-]+ [\d:]+))? -*\n(.*?)^# ---- end of \1 -*\n", re.M | re.S)


# The set-up cell -----------------------------------------------------------------------------------------------------


def begin(lab: str) -> None:
    """Start a lab: load the pieces kept so far, put them in use, and keep what passes from here on.

    Raises ValueError for an unknown lab. A kept file that cannot be loaded is reported and left alone; the lab goes
    on with the reference. While nbgrader grades, kept pieces are ignored: a lab is judged alone.
    """
    from tfmlib.course.check import examine

    global _folder
    if lab not in pieces.chapters():
        raise ValueError(f"no lab {lab!r}; the labs are {', '.join(pieces.chapters())}")
    first = pieces.chapters()[lab][0].name
    examine(pieces.reference(first), first)  # torch loads parts of itself late: now, not in the learner's first check
    if os.environ.get("NBGRADER_EXECUTION"):
        _folder = None
        return
    here = Path.cwd()
    _folder = (here.parent if here.name == lab else here) / "mine"
    loaded, problems = load(_folder)
    for problem in problems:
        print(problem)
    mine = f"your own {', '.join(loaded)}" if loaded else "none of your own yet"
    print(f"Lab {lab}. Pieces in use: {mine}; the reference for the rest.")


def load(folder: Path) -> tuple[list[str], list[str]]:
    """Put every piece that is kept in a folder in use; returns their names, and what could not be loaded and why."""
    loaded, problems = [], []
    for module in dict.fromkeys(piece.module for piece in pieces.PIECES.values()):
        path = folder / f"{module}.py"
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
            kept = _run(text, path)
        except (Exception, SystemExit) as error:
            said = f"{path}{_line_in(path, error)} cannot be loaded ({type(error).__name__}: {error})."
            problems.append(f"{said} It was left as it is; the reference is used instead.")
            continue
        for name in sections(text):
            if callable(kept.get(name)):
                pieces.use(kept[name], name)
                loaded.append(name)
    return loaded, problems


def _line_in(path: Path, error: BaseException) -> str:
    """Where in a file an exception arose, as " line 7", or "" if elsewhere."""
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1] if frames else None
    return f" line {line}" if line else ""


# Keeping a piece -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """One kept piece in a kept file: its source with what it needs, and when it passed."""

    source: str
    passed: str


def sections(text: str) -> dict[str, Section]:
    """The pieces of a kept file."""
    return {m[1]: Section(m[3].strip("\n"), m[2] or "") for m in _SECTION.finditer(text)}


def kept(folder: Path) -> dict[str, Section]:
    """All pieces that are kept in a folder."""
    found: dict[str, Section] = {}
    for path in sorted(folder.glob("*.py")):
        found |= sections(path.read_text(encoding="utf-8"))
    return {name: found[name] for name in pieces.PIECES if name in found}


def keep(piece: Callable, name: str, scope: dict) -> str:
    """Keep a piece that passed, with all that its source needs; returns what to tell the learner, or "".

    `scope` holds the notebook's names. Before a file is replaced, the new one is run, and what it defines is judged
    again: a kept piece must work alone after a restart.
    """
    from tfmlib.course.check import examine

    if _folder is None:
        return ""
    module = pieces.find(name).module
    path = _folder / f"{module}.py"
    try:
        source = _self_contained(piece, name, scope)
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        text = _with_section(old, module, name, source)
        made = _run(text, path)
    except (Exception, SystemExit) as error:
        return f"It passed, but could not be kept ({type(error).__name__}: {error}). Write it in one cell of its own."
    before, after = sections(old), sections(text)
    for other in after:
        if other != name and not _shares_names(before[other].source, source):
            continue
        if not examine(made[other], other).passed:
            what = "it needs something from another cell" if other == name else f"it breaks your kept `{other}`"
            return (
                f"It passed, but was not kept: in a file of its own {what}. "
                "Write all that it needs in its own cell, and give helpers names of their own."
            )
    _replace(path, text)
    return f"Kept in `{path.parent.name}/{path.name}`: your own `{name}` is in use from now on."


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _with_section(old: str, module: str, name: str, source: str) -> str:
    """A kept file with one section new or replaced. What a learner wrote between sections stays."""
    stamp = datetime.now().strftime("%Y-%m-%d %H:%M")
    section = f"# ---- piece: {name}, passed {stamp} ----\n{source}\n# ---- end of {name} ----\n"
    body = _without_header(old)
    if name in sections(old):
        body = _SECTION.sub(lambda m: section if m[1] == name else m[0], body)
    else:
        body = f"{body.rstrip()}\n\n\n{section}" if body.strip() else section
    return f"{_header(module, set(sections(body)))}\n\n{body.strip()}\n"


_HEADER_END = "# ---- your pieces ----"


def _without_header(text: str) -> str:
    return text.split(f"{_HEADER_END}\n", 1)[-1]


def _header(module: str, defined: set[str]) -> str:
    home = import_module(f"tfmlib.{module}")
    own = [
        n for n, v in vars(home).items() if getattr(v, "__module__", None) == home.__name__ and not n.startswith("_")
    ]
    rest = ", ".join(n for n in own if n not in defined)
    imports = [f"from tfmlib.{module} import {rest}"] if rest else []
    return "\n".join(
        [
            f'"""Your own pieces of tfmlib.{module}, each kept when it passed its checks."""',
            *imports,
            _HEADER_END,
        ]
    )


def _run(text: str, path: Path) -> dict:
    """Run a kept file as a module of its own; returns its names."""
    module = types.ModuleType(f"mine.{path.stem}")
    module.__file__ = str(path)
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    sys.modules[module.__name__] = module  # so that inspect and pickle find its classes
    exec(compile(text, str(path), "exec"), vars(module))
    return vars(module)


# A source that stands on its own -------------------------------------------------------------------------------------


def _self_contained(piece: Callable, name: str, scope: dict) -> str:
    """The source of a piece, preceded by the imports, constants and helpers it uses, taken from the learner's cells."""
    cells, module = _cells(piece), pieces.find(name).module
    needed, order = [name], []
    parts: dict[str, str] = {}
    while needed:
        wanted = needed.pop()
        if wanted in parts:
            continue
        part = _binding(wanted, cells) if wanted == name else _definition(wanted, cells, scope, module)
        if part is None:
            if wanted == name:
                raise OSError("its source was not found")
            continue
        parts[wanted] = part
        order.append(wanted)
        needed += [n for n in sorted(_free_names(part)) if n not in parts]
    imports = [parts[n] for n in order if parts[n].startswith(("import ", "from "))]
    others = [parts[n] for n in reversed(order) if not parts[n].startswith(("import ", "from "))]
    return "\n".join(sorted(set(imports))) + ("\n\n\n" if imports else "") + "\n\n\n".join(dict.fromkeys(others))


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
