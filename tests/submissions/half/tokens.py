"""A learner who has done the second and the last piece, and not the first."""

import torch


def merge_pair(word, pair):
    if len(word) < 2:
        return word
    if word[:2] == pair:
        return (pair[0] + pair[1], *merge_pair(word[2:], pair))
    return (word[0], *merge_pair(word[1:], pair))


def pad_batch(sequences, pad_id, length=None, side="right"):
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    T = int(lengths.max()) if length is None else length
    if lengths.max() > T or side not in ("left", "right"):
        raise ValueError("too long, or no such side")
    places = torch.arange(T)
    is_token = places < lengths[:, None] if side == "right" else places >= T - lengths[:, None]
    ids = torch.full(is_token.shape, pad_id)
    ids[is_token] = torch.tensor([i for sequence in sequences for i in sequence], dtype=torch.int64)
    return ids, is_token
