"""A learner who has done the batches and the evaluation, and nothing else."""

import torch
import torch.nn.functional as F


def evaluate(model, batches):
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    total = n = 0
    try:
        with torch.no_grad():
            for x, y in batches:
                total += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
                n += (y != -100).sum().item()
    finally:
        for module in was_training:
            module.training = True
    if not n:
        raise ValueError("nothing to evaluate")
    return total / n
