"""Build the site: Jupyter Book, from the root of the clone, with warnings as errors."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def build(top: Path) -> Path:
    """Build the site into `_build/html`; returns its first page. Raises RuntimeError if there is any warning.

    Jupyter Book keeps what a lesson's cells printed, and sees changes of the lesson only. The figures also depend on
    tfmlib and on the locked versions: when those have changed, everything is built anew.
    """
    target = top / "_build"
    key_file, key = target / "execution-key", execution_key(top)
    if not key_file.is_file() or key_file.read_text() != key:
        for folder in (".jupyter_cache", ".doctrees", "jupyter_execute", "html"):
            shutil.rmtree(target / folder, ignore_errors=True)
    main = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", main, "build", str(top), "-W", "--keep-going"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(command, cwd=top, env=environment, check=False)
    page = target / "html" / "index.html"
    if ended.returncode or not page.is_file():
        raise RuntimeError("the site was not built: the warnings and errors above say why")
    # Sphinx copies these only when it writes a page.
    shutil.copytree(top / "book" / "_static", target / "html" / "_static", dirs_exist_ok=True)
    key_file.write_text(key)
    return page


def execution_key(top: Path) -> str:
    """A digest of all that the lessons' cells depend on, besides the lessons."""
    digest = hashlib.sha256()
    code = [path for folder in ("tfmlib", "tests", "book") for path in top.glob(f"{folder}/**/*.py")]
    data = top.glob("book/figures/*.json")
    files = [*code, *data, top / "requirements.lock", top / "_config.yml"]
    for path in sorted(path for path in files if path.is_file()):
        digest.update(str(path.relative_to(top)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
