"""Train a small model on a text, from the command line: in one process, or in several that torchrun starts.

    python -m tfmlib.train --corpus tinyshakespeare --steps 2000
    torchrun --nproc-per-node 2 -m tfmlib.train --corpus notes.txt --micro-batches 4

A run has a folder, with the model's sizes (model.json), a checkpoint, and a line of figures for each step (log.jsonl).
The same command goes on where it was stopped.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from tfmlib import data, losses, sampling, storyland, tokens, training
from tfmlib.models import gpt, llama

MODELS = {"gpt": (gpt.GPT, gpt.GPTConfig), "llama": (llama.Llama, llama.LlamaConfig)}


class Vocabulary(Protocol):
    """What turns text into ids and back."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class Task:
    """What there is to learn: batches to train on and to validate on, and how ids are written."""

    vocabulary: Vocabulary
    vocab_size: int
    context_length: int
    batches: Iterable[training.Batch]
    validation: Sequence[training.Batch]
    start: list[int]  # a text begins with these ids
    n_bytes: int | None = None  # of the validation text that is scored
    floor: float | None = None  # the least loss, in nats a token, where it is known


def prepare(corpus: str, *, length: int, batch_size: int, vocab_size: int | None = None, seed: int = 0) -> Task:
    """The task of a corpus: "storyland", or what `data.load_corpus` knows, by characters or by a BPE of `vocab_size`.

    The first 90 % of a text are for training, the rest for validation. Raises what `data.load_corpus` and `data.split`
    raise.
    """
    generator = torch.Generator().manual_seed(seed)
    if corpus == "storyland":
        land = storyland.Storyland()
        unseen = land.batches(256, torch.Generator().manual_seed(seed + 1))
        return Task(
            vocabulary=land,
            vocab_size=len(land.vocabulary),
            context_length=land.longest,
            batches=land.batches(batch_size, generator),
            validation=[next(unseen) for _ in range(8)],
            start=[1],
            floor=land.entropy_per_token(),
        )
    text = data.load_corpus(corpus)
    if vocab_size is None:
        vocabulary = data.Characters(text)
        size = vocabulary.vocab_size
    else:
        vocabulary = tokens.Tokenizer(*tokens.train_bpe(text, vocab_size))
        size = vocab_size
    ids = torch.tensor(vocabulary.encode(text))
    seen, unseen = data.split(ids, length)
    validation = data.whole_windows(unseen, 64, length)
    scored = torch.cat([labels.flatten() for _, labels in validation])
    return Task(
        vocabulary=vocabulary,
        vocab_size=size,
        context_length=length,
        batches=data.token_batches(seen, batch_size, length, generator),
        validation=validation,
        start=vocabulary.encode("\n"),
        n_bytes=len(vocabulary.decode(scored.tolist()).encode()),
    )


def write(model: nn.Module, ids: list[int], n: int, generator: torch.Generator, stop: int | None = None) -> list[int]:
    """Draw up to n more ids from the model's own probabilities, one after the other; `stop` ends the text."""
    length, device = model.config.context_length, next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        for _ in range(n):
            logits = model(torch.tensor([ids[-length:]], device=device))[0, -1]
            ids = [*ids, int(sampling.sample(logits.cpu(), generator))]
            if ids[-1] == stop:
                break
    return ids


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    options = _options(arguments)
    device = _start_processes()
    first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        _run(options, device, first)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _run(options: argparse.Namespace, device: torch.device, first: bool) -> None:
    task = prepare(
        options.corpus,
        length=options.length,
        batch_size=options.batch_size,
        vocab_size=options.vocab_size,
        seed=options.seed,
    )
    model_class, config_class = MODELS[options.model]
    config = config_class(
        n_layers=options.layers,
        d_model=options.width,
        n_heads=options.heads,
        vocab_size=task.vocab_size,
        context_length=task.context_length,
    )
    folder = Path(options.folder or Path("runs") / Path(options.corpus).stem)
    if first:
        _claim(folder, {"model": options.model, **dataclasses.asdict(config)})
    torch.manual_seed(options.seed)
    model = model_class(config).to(device)
    recipe = training.Recipe(
        steps=options.steps,
        micro_batches=options.micro_batches,
        lr_peak=options.lr,
        lr_floor=options.lr / 10,
        warmup=options.warmup,
        autocast=torch.bfloat16 if options.bf16 else None,
        recompute=options.recompute,
        fused=options.fused,
        evaluate_every=options.evaluate_every,
        save_every=options.save_every,
    )
    log = _Log(folder / "log.jsonl") if first else None
    path = folder / "checkpoint.pt"
    records = training.train(model, task.batches, recipe, task.validation, path, not options.quiet, log)
    if first:
        _report(records, model, task, options.seed)


def _report(records: list[training.Record], model: nn.Module, task: Task, seed: int) -> None:
    if not records:
        print("all steps were made before: raise --steps, or give another --folder")
        return
    loss = records[-1].validation_loss
    said = f"validation loss {loss:.4f} nats a token"
    if task.floor is not None:
        said += f", {loss - task.floor:.4f} above the floor of {task.floor:.4f}"
    if task.n_bytes is not None:
        n = sum(int((labels != losses.IGNORE).sum()) for _, labels in task.validation)
        said += f", {losses.bits_per_byte(loss, n, task.n_bytes):.3f} bits a byte"
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {said}")
    if isinstance(task.vocabulary, storyland.Storyland):
        generator = torch.Generator().manual_seed(seed)
        room = task.context_length - 1
        stories = [task.vocabulary.decode(write(model, [1], room, generator, stop=2)) for _ in range(100)]
        verdicts = [verdict for story in stories for verdict in task.vocabulary.judge(story)]
        allowed = sum(verdict.allowed for verdict in verdicts)
        print(f"{allowed} of {len(verdicts)} sentences in 100 stories are allowed. The first story:\n{stories[0]}")
    else:
        ids = write(model, task.start, 400, torch.Generator().manual_seed(seed))
        print(task.vocabulary.decode(ids[len(task.start) :]))


class _Log:
    """A line of JSON for each step. What a stopped run wrote after its last checkpoint is written anew."""

    def __init__(self, path: Path):
        self.path, self.lines = path, []
        if path.exists():
            self.lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        self.begun = False

    def __call__(self, record: training.Record) -> None:
        if not self.begun:
            kept = [line for line in self.lines if json.loads(line)["step"] < record.step]
            self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            self.begun = True
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def _claim(folder: Path, sizes: dict) -> None:
    """Make the run's folder, or see that it is a run of the same model."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.json"
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != sizes:
        sys.exit(
            f"{folder} holds a run of another model, {path.read_text(encoding='utf-8').strip()}: take another --folder"
        )
    path.write_text(json.dumps(sizes) + "\n", encoding="utf-8")


def _start_processes() -> torch.device:
    """This process's device; joins the others where torchrun started several."""
    several = "RANK" in os.environ
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if several:
        dist.init_process_group("nccl" if cuda else "gloo")
    return device


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tfmlib.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", default="python-docs", help="python-docs, tinyshakespeare, storyland, or the path of a text file")
    add("--vocab-size", type=int, help="tokens of a BPE that is trained on the corpus (default: characters)")
    add("--model", choices=MODELS, default="gpt")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--width", type=int, default=128, help="d_model")
    add("--length", type=int, default=64, help="tokens in a window")
    add("--batch-size", type=int, default=12, help="windows in a micro-batch")
    add("--micro-batches", type=int, default=1, help="in a step, over all processes")
    add("--steps", type=int, default=2000)
    add("--lr", type=float, default=1e-3, help="the peak; the floor is a tenth of it")
    add("--warmup", type=int, default=100, help="steps")
    add("--evaluate-every", type=int, default=250, help="steps")
    add("--save-every", type=int, default=250, help="steps")
    add("--bf16", action="store_true", help="matrix products in bfloat16")
    add("--recompute", action="store_true", help="activation checkpointing: less memory, one more forward pass")
    add("--fused", action="store_true", help="norms, attention and AdamW in PyTorch's fused kernels")
    add("--folder", help="of the run (default: runs/CORPUS)")
    add("--seed", type=int, default=0)
    add("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
