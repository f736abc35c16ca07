"""Find, or download, a trained checkpoint that our models can run.

Looked for, in this order: what TFM_CHECKPOINT names; the folder `checkpoints` here or one folder up; the course's test
data, in the folder TFM_DATA or, for a clone, in `../shared/data`. Nothing is downloaded unless `download_gpt2` is
called.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tfmlib import downloads, tokens
from tfmlib.models import weights

HOW_TO_GET_ONE = """No trained checkpoint was found. To get one:
- run checkpoints.download_gpt2(): GPT-2, 548 MB, checked by its SHA-256; or
- put llama2.c's model (such as stories15M.bin) and its tokenizer.bin into a folder `checkpoints` beside the labs; or
- set TFM_CHECKPOINT to a folder or a file that you have: GPT-2's config.json, *.safetensors, vocab.json and merges.txt,
  or a llama2.c model with its tokenizer beside it."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's files and its tokenizer's. `kind` is "gpt2" or "llama2c"."""

    kind: str
    model: Path
    tokenizer: tuple[Path, ...]

    def load(self) -> tuple[nn.Module, tokens.Tokenizer, list[int]]:
        """The model, its tokenizer, and the ids that a text begins with. Both are made of the pieces in use."""
        if self.kind == "gpt2":
            tokenizer = tokens.Tokenizer.from_gpt2(*self.tokenizer)
            return weights.load_gpt2(self.model), tokenizer, tokenizer.encode("<|endoftext|>")
        tokenizer = tokens.Tokenizer.from_llama2c(*self.tokenizer)
        return weights.load_llama2c(self.model), tokenizer, tokenizer.encode("<s>")


def find() -> Checkpoint | None:
    """The first checkpoint that is at hand, or None. Raises ValueError if TFM_CHECKPOINT names none."""
    named = os.environ.get("TFM_CHECKPOINT")
    if named:
        found = next(_within(Path(named)), None)
        if found is None:
            raise ValueError(f"TFM_CHECKPOINT={named} holds no checkpoint that can be run.\n{HOW_TO_GET_ONE}")
        return found
    clone = Path(__file__).resolve().parents[2]
    places = [Path("checkpoints"), Path("..") / "checkpoints"]
    places.append(Path(os.environ.get("TFM_DATA") or clone.parent / "shared" / "data"))
    return next((found for place in places for found in _within(place)), None)


def _within(place: Path) -> Iterator[Checkpoint]:
    """The checkpoints in a folder and the folders below it; or the one that a file is."""
    if place.is_file():
        yield from _llama2c(place)
        return
    for folder in [place, *sorted(path for path in place.glob("*") if path.is_dir())]:
        if (folder / "config.json").is_file():
            yield from _gpt2(folder)
        for path in sorted(folder.glob("*.bin")):
            yield from _llama2c(path)


def _gpt2(folder: Path) -> Iterator[Checkpoint]:
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind != "gpt2" or not list(folder.glob("*.safetensors")):
        return
    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        files = tuple(folder / name for name in names)
        if all(file.is_file() for file in files):
            yield Checkpoint("gpt2", folder, files)


def _llama2c(path: Path) -> Iterator[Checkpoint]:
    if path.name.startswith("tok"):
        return
    with open(path, "rb") as file:
        header = file.read(28)
    vocab_size = abs(int.from_bytes(header[20:24], "little", signed=True))
    for name in (f"tok{vocab_size}.bin", "tokenizer.bin"):
        if (path.parent / name).is_file():
            yield Checkpoint("llama2c", path, (path.parent / name,))
            return


# Download -------------------------------------------------------------------------------------------------------------

_GPT2 = "https://huggingface.co/openai-community/gpt2/resolve/607a30d783dfa663caf39e06633721c8d4cfcd7e"
_SHA256 = {
    "config.json": "0daed7749b4f02b8f76240d5444551d7b08712dab4d0adb8239c56ba823bb7b4",
    "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "model.safetensors": "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707",
}


def download_gpt2(folder: str | Path = "checkpoints/gpt2") -> Path:
    """Download GPT-2 (124 million parameters, 548 MB) into a folder, where `find` will see it; returns the folder.

    Every file is checked by its SHA-256, and put in place only if it is right. What is there already stays.
    """
    for name, sha256 in _SHA256.items():
        path = Path(folder) / name
        if not path.is_file() or downloads.sha256_of(path) != sha256:
            downloads.download(f"{_GPT2}/{name}", sha256, path)
    return Path(folder)
