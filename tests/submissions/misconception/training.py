"""A learner who takes the mean of means when gradients are accumulated, and has everything else right."""

import os
import random
from pathlib import Path

import numpy as np
import torch

from tfmlib import losses


def accumulate_gradients(model, micro_batches):
    micro_batches = [(x, y) for x, y in micro_batches if (y != losses.IGNORE).any()]
    total = 0.0
    for inputs, labels in micro_batches:
        loss = losses.cross_entropy(model(inputs), labels) / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total


def evaluate(model, batches):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    total, count = 0.0, 0
    try:
        with torch.no_grad():
            for inputs, labels in batches:
                n = (labels != losses.IGNORE).sum().item()
                total += losses.cross_entropy(model(inputs), labels).item() * n
                count += n
    finally:
        for module, mode in modes.items():
            module.training = mode
    if count == 0:
        raise ValueError("no labels to evaluate on")
    return total / count


def save_checkpoint(path, model, optimizer, step):
    name, keys, pos, has_gauss, gauss = np.random.get_state()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "random": {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "python": random.getstate(),
            "numpy": (name, keys.tolist(), pos, has_gauss, gauss),
        },
    }
    partial = Path(str(path) + ".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    except Exception:
        partial.unlink(missing_ok=True)
        raise


def load_checkpoint(path, model, optimizer=None):
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        saved = state["random"]
        torch.set_rng_state(saved["torch"])
        if torch.cuda.is_available() and saved["cuda"]:
            torch.cuda.set_rng_state_all(saved["cuda"])
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])
    return state["step"]
