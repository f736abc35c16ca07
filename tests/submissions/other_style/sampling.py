"""A learner whose code is right, in another style, and noisy."""

import contextlib
import sys
import warnings

import torch
from torch.nn.functional import softmax

NEVER = float("-inf")


def without(logits, out):
    return logits.masked_fill(out, NEVER)


def place(logits):
    """Where each token stands in its row, the likeliest at 0."""
    return logits.sort(descending=True, stable=True).indices.argsort()


@contextlib.contextmanager
def resting(model):
    modes = {name: part.training for name, part in model.named_modules()}
    model.train(False)
    try:
        with torch.inference_mode():
            yield model
    finally:
        for name, part in model.named_modules():
            part.training = modes[name]


def apply_temperature(logits, temperature):
    warnings.warn("reshaping", UserWarning, stacklevel=2)
    if temperature > 0:
        return torch.true_divide(logits, temperature)
    if temperature == 0:
        return without(logits, place(logits) != 0)
    raise ValueError("not a temperature")


def keep_top_k(logits, k):
    print("top", k)
    if k >= 1:
        return without(logits, place(logits) >= k)
    raise ValueError("not a number of tokens")


def keep_top_p(logits, p):
    sys.stderr.write(f"nucleus of {p}\n")
    if p >= 1:
        return logits
    if p >= 0:
        mine = softmax(logits.double(), -1)
        sorted_sums = mine.sort(descending=True).values.cumsum(-1)
        size = (sorted_sums < p).sum(-1, keepdim=True) + 1
        return without(logits, place(logits) >= size)
    raise ValueError("not a share")


def sample(logits, generator=None):
    probabilities = softmax(logits.double(), -1)
    waits = torch.empty_like(probabilities).exponential_(generator=generator)
    return probabilities.div(waits).argmax(-1)


def generate(model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None, eos_id=None):
    columns = list(ids.unbind(1))
    open_rows = torch.ones_like(columns[0], dtype=torch.bool)
    with resting(model) as sleeper:
        while len(columns) < ids.size(1) + max_new_tokens and open_rows.any():
            logits = sleeper(torch.stack(columns, 1)).select(1, -1)
            for step, setting in ((apply_temperature, temperature), (keep_top_k, top_k), (keep_top_p, top_p)):
                if setting is not None:
                    logits = step(logits, setting)
            column = sample(logits, generator)
            if eos_id is not None:
                column = torch.where(open_rows, column, eos_id)
                open_rows = open_rows & column.ne(eos_id)
            columns.append(column)
    return torch.stack(columns, 1)


def beam_search(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    if n_beams < 1:
        raise ValueError("not a number of beams")
    print("searching with", n_beams)
    start = prompt.tolist()
    beams = {(): 0.0}

    def score(new):
        return beams_now[new] / (len(new) or 1) ** length_penalty

    for _ in range(max_new_tokens):
        growing = [new for new in beams if not new or new[-1] != eos_id]
        if not growing:
            break
        answers = dict(zip(growing, log_probs(torch.tensor([start + list(new) for new in growing])), strict=True))
        beams_now = {}
        for new, total in beams.items():
            if new not in answers:
                beams_now[new] = total
                continue
            for token, log_p in enumerate(answers[new].tolist()):
                if log_p > NEVER:
                    beams_now[(*new, token)] = total + log_p
        best = sorted(beams_now, key=score, reverse=True)[:n_beams]
        beams = {new: beams_now[new] for new in best}
    return [
        (torch.tensor(start + list(new)), total / (len(new) or 1) ** length_penalty) for new, total in beams.items()
    ]
