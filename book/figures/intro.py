"""The front page's figure: a small GPT that is trained when the page is built, and what it writes."""

import time
from textwrap import fill

import torch

from figures import Figure, claim, draw, one_thread, weights_from
from tfmlib import losses, train, training
from tfmlib.models.gpt import GPT, GPTConfig

STEPS, LENGTH, VOCAB_SIZE = 800, 48, 512


def a_minute() -> tuple[Figure, dict[str, str], str]:
    """Train a GPT on Python's documentation; returns the loss curve, the page's numbers, and a text it wrote."""
    start = time.perf_counter()
    with one_thread(), weights_from(0):
        task = train.prepare("python-docs", length=LENGTH, batch_size=16, vocab_size=VOCAB_SIZE)
        model = GPT(GPTConfig(n_layers=2, d_model=128, n_heads=4, vocab_size=VOCAB_SIZE, context_length=LENGTH))
        recipe = training.Recipe(steps=STEPS, lr_peak=4e-3, lr_floor=2e-4, warmup=40, evaluate_every=100)
        records = training.train(model, task.batches, recipe, task.validation, progress=False)
        seconds = time.perf_counter() - start
        ids = train.write(model, task.start, 170, torch.Generator().manual_seed(1))
    steps = [record.step + 1 for record in records]
    seen = [record.loss for record in records]
    unseen = {record.step + 1: record.validation_loss for record in records if record.validation_loss is not None}
    loss = unseen[STEPS]
    n_labels = sum(labels.numel() for _, labels in task.validation)
    bits = losses.bits_per_byte(loss, n_labels, task.n_bytes)
    claim(seen[0] > 6 and loss < 4, "the loss falls from ln 512 = 6.2 to below 4")

    def paint(canvas):
        ax = canvas.subplots()
        ax.plot(steps, seen, linewidth=1, alpha=0.7, label="text it trains on")
        ax.plot(unseen.keys(), unseen.values(), marker="o", label="text it has not seen")
        ax.set(
            title="A small GPT learns Python's documentation",
            xlabel="step",
            ylabel="loss (nats a token)",
            ylim=(2, None),
        )
        ax.legend()

    alt = f"Loss against training steps. It falls from {seen[0]:.1f} to {loss:.1f} nats on text that was not seen."
    texts = {
        "front_parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "front_seconds": f"{seconds:.0f}",
        "front_steps": f"{STEPS:,}",
        "front_loss": f"{loss:.2f}",
        "front_bits": f"{bits:.2f}",
    }
    written = task.vocabulary.decode(ids[len(task.start) :])
    return draw(paint, alt, (7.2, 2.8)), texts, "\n".join(fill(line, 88) for line in written.strip().splitlines())
