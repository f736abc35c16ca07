"""Text to train on: where it comes from, how it becomes tokens, and how tokens become batches.

Python's own documentation is in every CPython and needs no network. Any text file in UTF-8 will do, and Tiny
Shakespeare can be downloaded.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tfmlib import downloads

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


# Where text comes from ------------------------------------------------------------------------------------------------


def load_corpus(source: str | Path = "python-docs") -> str:
    """The text of a corpus: "python-docs", "tinyshakespeare", or the path of a text file.

    Raises what `python_docs`, `tiny_shakespeare` or `read_text` raises.
    """
    if source == "python-docs":
        return python_docs()
    if source == "tinyshakespeare":
        return tiny_shakespeare()
    return read_text(source)


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8. Line ends become a newline each.

    Raises FileNotFoundError if it is not there, and ValueError if it is a folder, empty, or no text in UTF-8: each says
    what to do.
    """
    path = Path(path)
    if not path.exists():
        known = '"python-docs" and "tinyshakespeare" are the corpora with a name'
        raise FileNotFoundError(f"there is no file {path}: give the path of a text file; {known}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give one text file")
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"byte {error.start:,} is 0x{raw[error.start]:02x}"
        raise ValueError(f"{path} is not text in UTF-8 ({what}): save it as UTF-8, or take another file") from None
    if "\0" in text:
        raise ValueError(f"{path} is not text: character {text.index(chr(0)):,} is NUL; take a text file")
    if not text.strip():
        raise ValueError(f"{path} is empty: there is nothing to learn from")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def python_docs() -> str:
    """Python's own reference, as `help("topics")` shows it: about half a million characters of English and code.

    It comes from the CPython that runs this, so it differs a little from version to version. Raises ModuleNotFoundError
    where a distribution has left it out.
    """
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        advice = "install the standard library's pydoc_data, or give the path of a text file"
        raise ModuleNotFoundError(f"this Python comes without its documentation: {advice}") from error
    return "\n".join(topics[name].strip() + "\n" for name in sorted(topics))


def tiny_shakespeare(path: str | Path = "data/tinyshakespeare.txt") -> str:
    """The 1,115,394 characters of Shakespeare that nanoGPT uses, from a file; downloaded if it is not there.

    Raises ValueError if the file is another one, by its SHA-256, and OSError if the download fails.
    """
    path = Path(path)
    if not path.exists():
        downloads.download(SHAKESPEARE_URL, SHAKESPEARE_SHA256, path)
    text = read_text(path)
    got = downloads.sha256_of(path)
    if got != SHAKESPEARE_SHA256:
        what = f"SHA-256 {got}, not {SHAKESPEARE_SHA256}"
        raise ValueError(f"{path} is not Tiny Shakespeare ({what}): move it away, or read it by its path")
    return text


# Text to tokens -------------------------------------------------------------------------------------------------------


class Characters:
    """The simplest tokenizer: each character of a text is a token. Ids follow the characters' code points.

    >>> abc = Characters("banana")
    >>> abc.encode("nab"), abc.decode([2, 0])
    ([2, 0, 1], 'na')
    """

    def __init__(self, text: str):
        self.characters = sorted(set(text))
        self._ids = {character: i for i, character in enumerate(self.characters)}

    @property
    def vocab_size(self) -> int:
        """How many characters there are."""
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        """The id of each character. Raises ValueError for one that the vocabulary lacks."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise ValueError(f"the vocabulary has no {error.args[0]!r}: it has {''.join(self.characters)!r}") from None

    def decode(self, ids) -> str:
        """The characters of the ids, as one text."""
        return "".join(self.characters[int(i)] for i in ids)


def split(tokens: Tensor, length: int, validation: float = 0.1) -> tuple[Tensor, Tensor]:
    """The first tokens to train on, the last ones, a share of `validation`, to validate on: (N,) -> two of them.

    Raises ValueError where one part has fewer than length + 1 tokens, which a window of `length` needs with its labels.
    """
    n = round(len(tokens) * (1 - validation))
    parts = tokens[:n], tokens[n:]
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) < length + 1:
            few = f"{len(tokens):,} tokens leave {len(part):,} for {name}"
            raise ValueError(
                f"{few}, and windows of {length=} need {length + 1}: take a longer text, or a shorter length"
            )
    return parts


# Tokens to batches ----------------------------------------------------------------------------------------------------


def token_batches(tokens: Tensor, B: int, T: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of a text, without end: tokens (N,) -> pairs inputs, labels, (B, T) of int64 each.

    The label of a token is the token after it. Each window begins at a place drawn by itself from `generator`, and
    every window that fits, with the label of its last token, is equally likely. The caller keeps the generator: batches
    follow from its state, and a batch is drawn when it is asked for. Raises ValueError if N < T + 1.

    >>> inputs, labels = next(token_batches(torch.tensor([5, 6, 7]), B=1, T=2, generator=torch.Generator()))
    >>> inputs, labels
    (tensor([[5, 6]]), tensor([[6, 7]]))
    """
    n_starts = len(tokens) - T
    if n_starts < 1:
        raise ValueError(f"{len(tokens)} tokens hold no window of {T=} with its labels: at least {T + 1} are needed")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            starts = torch.randint(n_starts, (B, 1), generator=generator)
            windows = tokens[starts + torch.arange(T + 1)].long()  # (B, T + 1)
            yield windows[:, :-1], windows[:, 1:]

    return batches()


def whole_windows(tokens: Tensor, B: int, T: int) -> list[tuple[Tensor, Tensor]]:
    """All of a text once, in windows of T that do not overlap, B a batch: tokens (N,) -> pairs inputs, labels.

    The last batch may have fewer windows; fewer than T tokens at the end are left out. For a loss on all of a
    validation text. Raises ValueError if N < T + 1.
    """
    n = (len(tokens) - 1) // T
    if n < 1:
        raise ValueError(f"{len(tokens)} tokens hold no window of {T=} with its labels: at least {T + 1} are needed")
    inputs, labels = (tokens[start : start + n * T].long().view(n, T) for start in (0, 1))
    return list(zip(inputs.split(B), labels.split(B), strict=True))
