"""A learner who takes the mean of means when gradients are accumulated, and has everything else right."""

import torch


def token_batches(tokens, B, T, generator):
    if len(tokens) < T + 1:
        raise ValueError(f"need at least {T + 1} tokens, got {len(tokens)}")
    while True:
        starts = torch.randint(len(tokens) - T, (B,), generator=generator)
        inputs = torch.stack([tokens[s : s + T] for s in starts])
        labels = torch.stack([tokens[s + 1 : s + T + 1] for s in starts])
        yield inputs.long(), labels.long()
