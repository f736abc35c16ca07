"""Other correct implementations of embedding and of positions, absolute and rotary."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from tfmlib import positions as places

from . import correct


@correct("embed")
def embed_by_checked_indexing(ids, table):
    """Indexing, after a look at the ids."""
    if torch.any(ids < 0) or torch.any(ids >= table.size(0)):
        raise IndexError(f"ids must lie in 0 ... {table.size(0) - 1}")
    return table[ids]


@correct("embed")
def embed_by_one_hot_product(ids, table):
    """One-hot rows times the table, which refuses unknown ids by itself."""
    return F.one_hot(ids, num_classes=len(table)).to(table.dtype) @ table


@correct("embed")
def embed_by_gather(ids, table):
    """Gather along the rows."""
    wanted = ids.reshape(-1, 1).expand(-1, table.shape[1])
    return torch.gather(table, 0, wanted).reshape(*ids.shape, table.shape[1])


@correct("embed")
def embed_one_at_a_time(ids, table):
    """A loop that writes into a new tensor."""
    V, C = table.shape
    out = table.new_zeros(ids.numel(), C)
    for place, row in enumerate(ids.flatten().tolist()):
        if not 0 <= row < V:
            raise IndexError(row)
        out[place] = table[row]
    return out.unflatten(0, ids.shape) if ids.ndim else out[0]


@correct("embed")
def embed_by_comparison(ids, table):
    """One-hot rows by comparison, checked by their sums."""
    hot = ids.unsqueeze(-1) == torch.arange(table.shape[0])
    if not hot.any(-1).all():
        raise ValueError("unknown id")
    return torch.einsum("...v,vc->...c", hot.to(table.dtype), table)


@correct("rope_angles")
def angles_in_float32(positions, D, base=10_000.0):
    """In float32, unless positions are float64."""
    if D % 2:
        raise ValueError("odd width")
    dtype = torch.promote_types(positions.dtype, torch.float32)
    inv_freq = 1.0 / (base ** (torch.arange(0, D, 2, dtype=dtype) / D))
    return positions.to(dtype).unsqueeze(-1) * inv_freq


@correct("rope_angles")
def angles_by_einsum(positions, D, base=10_000.0):
    """An outer product of float64 numbers, with frequencies by exp."""
    if D % 2:
        raise ValueError("odd width")
    frequencies = torch.exp(-math.log(base) * torch.arange(D // 2, dtype=torch.float64) / (D // 2))
    angles = torch.einsum("...t,f->...tf", positions.double(), frequencies)
    return angles if positions.dtype is torch.float64 else angles.float()


@correct("rope_angles")
def angles_pair_by_pair(positions, D, base=10_000.0):
    """One pair after the other, each slower than the one before by the same factor."""
    half, rest = divmod(D, 2)
    if rest:
        raise ValueError("odd width")
    wide = positions if positions.dtype == torch.float64 else positions.float()
    return torch.stack([wide * (base ** (-2.0 / D)) ** i for i in range(half)], dim=-1)


@correct("rope_angles")
def angles_by_division(positions, D, base=10_000.0):
    """Positions divided by powers of the base, in float64 throughout."""
    if D % 2 == 1:
        raise ValueError("odd width")
    powers = torch.tensor([base ** (2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    angles = torch.div(positions.to(torch.float64).reshape(-1, 1), powers).reshape(*positions.shape, -1)
    return angles.type(
        torch.float64 if positions.is_floating_point() and positions.element_size() == 8 else torch.float
    )


@correct("sinusoidal")
def waves_in_place(T, C, base=10_000.0):
    """Every second column filled, with frequencies by exp, all in float32: as most tutorials do it."""
    if C % 2 != 0:
        raise ValueError("odd width")
    table = torch.zeros(T, C)
    position = torch.arange(0, T, dtype=torch.float).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, C, 2).float() * (-math.log(base) / C))
    table[:, 0::2] = torch.sin(position * div_term)
    table[:, 1::2] = torch.cos(position * div_term)
    return table


@correct("sinusoidal")
def waves_by_loop(T, C, base=10_000.0):
    """Python numbers, one at a time."""
    if C % 2:
        raise ValueError("odd width")
    rows = []
    for t in range(T):
        row = []
        for i in range(0, C, 2):
            row += [math.sin(t / base ** (i / C)), math.cos(t / base ** (i / C))]
        rows.append(row)
    return torch.tensor(rows)


@correct("sinusoidal")
def waves_by_phase(T, C, base=10_000.0):
    """A cosine is a sine a quarter turn ahead."""
    if C & 1:
        raise ValueError("odd width")
    j = torch.arange(C)
    angles = torch.arange(T)[:, None] / torch.pow(base, 2 * (j // 2) / C)
    return torch.sin(angles + (j % 2) * (math.pi / 2))


@correct("sinusoidal")
def waves_by_turning(T, C, base=10_000.0):
    """Each row is the row before, turned by complex numbers; the rows are made in float64."""
    if C % 2:
        raise ValueError("odd width")
    step = torch.polar(torch.ones(C // 2).double(), base ** (-torch.arange(0, C, 2).double() / C))
    rows = torch.cat([torch.ones_like(step)[None], step.expand(T - 1, -1)]).cumprod(0)
    return torch.view_as_real(rows).flip(-1).flatten(1).float()


@correct("sinusoidal")
def waves_by_numpy(T, C, base=10_000.0):
    """numpy, in float64."""
    if C % 2:
        raise ValueError("odd width")
    angles = np.arange(T)[:, None] / np.power(base, np.arange(0, C, 2) / C)
    return torch.from_numpy(np.dstack([np.sin(angles), np.cos(angles)]).reshape(T, C)).float()


def _heads_between(angles, x):
    """(B, T, ...) angles get a head axis where x has one."""
    return angles.unsqueeze(1) if angles.ndim == 3 and x.ndim == 4 else angles


@correct("apply_rope")
def rope_by_complex_numbers(x, positions, base=10_000.0, interleaved=False):
    """Pairs as complex numbers, with rope_angles."""
    work = x.double() if x.dtype == torch.float64 else x.float()
    angles = places.rope_angles(positions.to(work.dtype), x.shape[-1], base)
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = work.unflatten(-1, (-1, 2)) if interleaved else work.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * _heads_between(turn, x))
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return turned.type_as(x)


@correct("apply_rope")
def rope_by_rotate_half(x, positions, base=10_000.0, interleaved=False):
    """cos and sin as wide as x, and the swapped x: as in Llama's published code."""
    D = x.shape[-1]
    if D % 2:
        raise ValueError("odd width")
    dtype = torch.promote_types(x.dtype, torch.float32)
    inv_freq = 1.0 / base ** (torch.arange(0, D, 2, dtype=dtype) / D)
    angles = _heads_between(positions.to(dtype)[..., None] * inv_freq, x)
    x_wide = x.to(dtype)
    if interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
        swapped = torch.stack([-x_wide[..., 1::2], x_wide[..., ::2]], dim=-1).flatten(-2)
    else:
        angles = torch.cat([angles, angles], dim=-1)
        swapped = torch.cat([-x_wide[..., D // 2 :], x_wide[..., : D // 2]], dim=-1)
    return (x_wide * angles.cos() + swapped * angles.sin()).to(x.dtype)


@correct("apply_rope")
def rope_by_matrices(x, positions, base=10_000.0, interleaved=False):
    """A rotation matrix a token, D x D, in float64."""
    D = x.shape[-1]
    if D % 2:
        raise ValueError("odd width")
    angles = _heads_between(positions.double()[..., None] / base ** (torch.arange(0, D, 2).double() / D), x)
    pair = torch.arange(D // 2)
    first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + D // 2)
    matrix = torch.zeros(*angles.shape[:-1], D, D, dtype=torch.float64)
    matrix[..., first, first] = matrix[..., second, second] = angles.cos()
    matrix[..., first, second], matrix[..., second, first] = -angles.sin(), angles.sin()
    return (matrix @ x.double()[..., None])[..., 0].to(x.dtype)


@correct("apply_rope")
def rope_by_permuting(x, positions, base=10_000.0, interleaved=False):
    """Interleaved entries are brought into halves, turned there, and brought back; in place on a copy."""
    D = x.shape[-1]
    if D % 2 == 1:
        raise ValueError("odd width")
    order = torch.cat([torch.arange(0, D, 2), torch.arange(1, D, 2)]) if interleaved else torch.arange(D)
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide[..., order]
    angles = places.rope_angles(positions.double(), D, base).to(wide.dtype)
    angles = _heads_between(angles, x)
    a, b = wide[..., : D // 2], wide[..., D // 2 :]
    out = torch.empty_like(wide)
    out[..., : D // 2] = a * angles.cos() - b * angles.sin()
    out[..., D // 2 :] = b * angles.cos() + a * angles.sin()
    return out[..., order.argsort()].to(x.dtype)


@correct("apply_rope")
def rope_pair_by_pair(x, positions, base=10_000.0, interleaved=False):
    """A loop over pairs, with the token axis moved to the front."""
    D = x.shape[-1]
    half, rest = divmod(D, 2)
    if rest:
        raise ValueError("odd width")
    if positions.ndim == 2:
        return torch.stack([rope_pair_by_pair(y, p, base, interleaved) for y, p in zip(x, positions, strict=True)])
    entries = list(x.to(torch.float64).unbind(-1))
    for i in range(half):
        m, n = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = positions.double() * base ** (-2 * i / D)
        a, b = entries[m], entries[n]
        entries[m], entries[n] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(entries, dim=-1).to(x.dtype)


@correct("interpolate_positions")
def squeezed_by_division(positions, trained_length, length):
    """Divided by how many times too long the text is."""
    return positions / (length / trained_length) if length > trained_length else positions


@correct("interpolate_positions")
def squeezed_in_float64(positions, trained_length, length):
    """Multiplied, then divided, in float64; a short text comes back as a copy."""
    if trained_length >= length:
        return positions.clone()
    return positions.double().mul(trained_length).div(length)


@correct("interpolate_positions")
def squeezed_one_at_a_time(positions, trained_length, length):
    """A list of Python numbers."""
    if not length > trained_length:
        return positions + 0
    return torch.tensor([p * trained_length / length for p in positions.flatten().tolist()]).view(positions.shape)
