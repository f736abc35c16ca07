"""A learner whose code is right, in another style, and noisy."""

import contextlib
import io
import os
import random
import sys
import warnings

import numpy
import torch
import torch.nn.functional as fn

COUNTED = "counted labels:"


def how_many(labels):
    return torch.sum(labels != -100).item()


def summed(model, inputs, labels):
    return fn.cross_entropy(model(inputs).movedim(-1, 1), labels, reduction="sum")


class Resting:
    def __init__(self, model):
        self.model, self.modes = model, [(part, part.training) for part in model.modules()]

    def __enter__(self):
        return self.model.eval()

    def __exit__(self, *error):
        for part, mode in self.modes:
            part.train(mode)


def accumulate_gradients(model, micro_batches):
    todo = [(inputs, labels, how_many(labels)) for inputs, labels in micro_batches]
    todo = [job for job in todo if job[2]]
    count = sum(n for _, _, n in todo)
    print(COUNTED, count)
    loss = 0.0
    for inputs, labels, _ in todo:
        part = summed(model, inputs, labels).div(count)
        part.backward()
        loss += part.item()
    return loss


def evaluate(model, batches):
    warnings.warn("this may take a while", FutureWarning, stacklevel=2)
    with Resting(model) as sleeper, torch.inference_mode():
        pairs = [(summed(sleeper, inputs, labels).item(), how_many(labels)) for inputs, labels in batches]
    total, count = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    if count > 0:
        return total / count
    raise ValueError("There are no labels.")


def save_checkpoint(path, model, optimizer, step):
    sys.stderr.write(f"saving {path}\n")
    kind, keys, *rest = numpy.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    dice = {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}
    dice["numpy"] = [kind, list(map(int, keys)), *rest]
    everything = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "random": dice}
    torch.save(everything, memory := io.BytesIO())
    partial = os.fspath(path) + ".partial"
    try:
        with open(partial, "wb") as file:
            file.write(memory.getvalue())
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)


def load_checkpoint(path, model, optimizer=None):
    everything = torch.load(path, weights_only=True, map_location=torch.device("cpu"))
    print(model.load_state_dict(everything["model"]))
    if optimizer is None:
        return everything["step"]
    optimizer.load_state_dict(everything["optimizer"])
    dice = everything["random"]
    version, internal, gauss = dice["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy.random.set_state(tuple(dice["numpy"]))
    torch.set_rng_state(dice["torch"])
    if dice["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(dice["cuda"])
    return everything["step"]
