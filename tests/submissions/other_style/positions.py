"""A learner whose code is right, in another style, and noisy."""

import math
import sys
import warnings

import torch
import torch.nn.functional as F


def even(width):
    if width & 1:
        raise ValueError(f"{width} is odd")
    return width // 2


def embed(ids, table):
    print("looking up", ids.numel(), "ids", file=sys.stderr)
    return torch.einsum("...v,vc->...c", F.one_hot(ids, num_classes=table.size(0)).type_as(table), table)


def rope_angles(positions, D, base=10_000.0):
    sys.stderr.write("angles\n")
    slower = torch.pow(base, -torch.arange(even(D), dtype=torch.double) / (D / 2))
    angles = torch.einsum("...t,i->...ti", positions.double(), slower)
    return angles if positions.dtype == torch.double else angles.float()


def sinusoidal(T, C, base=10_000.0):
    warnings.warn("a slow loop", UserWarning, stacklevel=2)
    half = even(C)
    table = torch.zeros(T, C)
    for t in range(T):
        for i in range(half):
            angle = t / math.pow(base, i / half)
            table[t, 2 * i], table[t, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table


def apply_rope(x, positions, base=10_000.0, interleaved=False):
    warnings.warn("turning", FutureWarning, stacklevel=2)
    angles = rope_angles(positions.double(), x.size(-1), base)
    if positions.dim() == 2:
        angles = angles.view(angles.size(0), *[1] * (x.dim() - 3), angles.size(1), angles.size(2))
    turn = torch.exp(1j * angles)
    if interleaved:
        z = torch.complex(x[..., ::2].double(), x[..., 1::2].double()) * turn
        return torch.view_as_real(z).flatten(start_dim=-2).to(x.dtype)
    z = torch.complex(*x.double().split(x.size(-1) // 2, dim=-1)) * turn
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)


def interpolate_positions(positions, trained_length, length):
    print(f"{length} tokens, trained on {trained_length}")
    return positions if length <= trained_length else positions.div(length / trained_length)
