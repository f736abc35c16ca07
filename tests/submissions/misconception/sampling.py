"""A learner who drops the token that crosses p, and has everything else right."""

import math

import torch


def apply_temperature(logits, temperature):
    if not temperature >= 0:
        raise ValueError("temperature must not be negative")
    if temperature == 0:
        best = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
        return torch.where(best > 0, logits, -math.inf)
    return logits / temperature


def keep_top_k(logits, k):
    if k < 1:
        raise ValueError("k must be at least 1")
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return logits.scatter(-1, order[..., k:], -math.inf)


def keep_top_p(logits, p):
    if not p >= 0:
        raise ValueError("p must not be negative")
    if p >= 1:
        return logits.clone()
    probabilities = torch.softmax(logits.float(), dim=-1)
    probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
    drop = probabilities.cumsum(-1) > p
    drop[..., 0] = False  # at least one
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)


def sample(logits, generator=None):
    probabilities = torch.softmax(logits.float(), dim=-1)
    flat = probabilities.view(-1, logits.shape[-1])
    return torch.multinomial(flat, num_samples=1, generator=generator).reshape(logits.shape[:-1])


def generate(model, ids, max_new_tokens, *, temperature=1.0, top_k=None, top_p=None, generator=None, eos_id=None):
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    done = torch.zeros(ids.shape[0], dtype=torch.bool)
    try:
        with torch.no_grad():
            for _ in range(max_new_tokens):
                logits = apply_temperature(model(ids)[:, -1], temperature)
                if top_k is not None:
                    logits = keep_top_k(logits, top_k)
                if top_p is not None:
                    logits = keep_top_p(logits, top_p)
                next_id = sample(logits, generator)
                if eos_id is not None:
                    next_id[done] = eos_id
                    done = done | (next_id == eos_id)
                ids = torch.cat([ids, next_id.unsqueeze(1)], dim=1)
                if done.all():
                    break
    finally:
        for m, training in modes:
            m.training = training
    return ids


def beam_search(log_probs, prompt, n_beams, max_new_tokens, eos_id=None, length_penalty=0.0):
    if n_beams < 1:
        raise ValueError("n_beams must be at least 1")
    beams = [{"ids": prompt, "sum": 0.0, "new": 0, "done": False}]

    def score(beam):
        return beam["sum"] / max(beam["new"], 1) ** length_penalty

    for _ in range(max_new_tokens):
        growing = [beam for beam in beams if not beam["done"]]
        if not growing:
            break
        rows = log_probs(torch.stack([beam["ids"] for beam in growing]))
        found, i = [], 0
        for beam in beams:
            if beam["done"]:
                found.append(beam)
                continue
            for token, log_p in enumerate(rows[i].tolist()):
                if log_p == -math.inf:
                    continue
                ids = torch.cat([beam["ids"], torch.tensor([token])])
                done = token == eos_id
                found.append({"ids": ids, "sum": beam["sum"] + log_p, "new": beam["new"] + 1, "done": done})
            i += 1
        beams = sorted(found, key=score, reverse=True)[:n_beams]
    return [(beam["ids"], score(beam)) for beam in beams]
