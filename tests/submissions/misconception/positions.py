"""A learner who mixes the two pairings of rotary positions, and has everything else right."""

import torch


def embed(ids, table):
    if ((ids < 0) | (ids >= table.shape[0])).any():
        raise IndexError("an id without a row")
    return table[ids]


def rope_angles(positions, D, base=10_000.0):
    if D % 2:
        raise ValueError("D must be even")
    wide = torch.float64 if positions.dtype == torch.float64 else torch.float32
    inv_freq = base ** (-torch.arange(0, D, 2, dtype=wide) / D)
    return positions.to(wide).unsqueeze(-1) * inv_freq


def sinusoidal(T, C, base=10_000.0):
    if C % 2:
        raise ValueError("C must be even")
    angles = torch.arange(T).unsqueeze(1) * base ** (-torch.arange(0, C, 2) / C)
    return torch.stack((torch.sin(angles), torch.cos(angles)), dim=2).reshape(T, C)


def apply_rope(x, positions, base=10_000.0, interleaved=False):
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = rope_angles(positions.to(wide), x.shape[-1], base).repeat_interleave(2, dim=-1)
    if positions.ndim == 2 and x.ndim == 4:
        angles = angles.unsqueeze(1)
    y = x.to(wide)
    if interleaved:
        swapped = torch.stack((-y[..., 1::2], y[..., 0::2]), dim=-1).flatten(-2)
    else:
        a, b = y.chunk(2, dim=-1)
        swapped = torch.cat((-b, a), dim=-1)
    return (y * angles.cos() + swapped * angles.sin()).to(x.dtype)


def interpolate_positions(positions, trained_length, length):
    if length <= trained_length:
        return positions
    return positions * (trained_length / length)
