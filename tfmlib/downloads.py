"""Fetch a file once: checked by its SHA-256, tried again if the network fails, and in place only when it is right."""

import hashlib
import os
import time
import urllib.error
import urllib.request
from pathlib import Path


def download(url: str, sha256: str, path: str | Path, attempts: int = 3, wait_seconds: float = 2.0) -> None:
    """Download a file and show how far it is. What goes wrong leaves nothing behind.

    An attempt that the network breaks is repeated, `attempts` in all, after a wait that doubles each time. Raises
    OSError, which says what to do instead, when the last one fails too, and ValueError if the file's SHA-256 is another
    than `sha256`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        for attempt in range(1, attempts + 1):
            try:
                _fetch(url, partial)
                break
            except (OSError, EOFError) as error:
                gone = isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404, 410)
                if gone or attempt == attempts:
                    advice = f"put the file there yourself, as {path}"
                    raise OSError(f"{url} could not be downloaded ({error}); {advice}") from error
                time.sleep(wait_seconds * 2 ** (attempt - 1))
        got = sha256_of(partial)
        if got != sha256:
            raise ValueError(f"{url} has SHA-256 {got}, not {sha256}: it is damaged, or was changed")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _fetch(url: str, path: Path) -> None:
    """One attempt. Raises EOFError if fewer bytes came than were announced."""
    from tqdm.auto import tqdm

    with urllib.request.urlopen(url, timeout=30) as source, open(path, "wb") as target:
        total = int(source.headers.get("Content-Length") or 0) or None
        with tqdm(total=total, unit="B", unit_scale=True, desc=path.name.removesuffix(".partial")) as bar:
            while block := source.read(2**20):
                target.write(block)
                bar.update(len(block))
    if total is not None and path.stat().st_size < total:
        raise EOFError(f"it broke off after {path.stat().st_size:,} of {total:,} bytes")


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
