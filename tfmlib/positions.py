"""Embeddings and positions: what a token is, and where it stands.

Letters: V size of the vocabulary, T tokens, C model width, D head width. The half-split pairing joins entry i with
entry i + D/2, the interleaved one entry 2i with 2i + 1.
"""

import torch
from torch import Tensor


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Look up the row of each id: (...) of integers, (V, C) -> (..., C).

    The same as a product of one-hot rows with the table. Raises an error for an id outside 0 ... V - 1.

    >>> embed(torch.tensor([2, 0]), torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
    tensor([[4., 5.],
            [0., 1.]])
    """
    return table.index_select(0, ids.flatten()).view(*ids.shape, table.shape[1])  # (..., C)


def rope_angles(positions: Tensor, D: int, base: float = 10_000.0) -> Tensor:
    """The angle in radians of each pair at each position: (T,) or (B, T) -> (..., T, D//2).

    Pair i turns by position * base ** (-2i / D). Positions may be fractions. For float64 positions the result is
    float64, with its digits; else float32. Raises ValueError if D is odd. Su et al. (2021), equation 15.

    >>> rope_angles(torch.tensor([0, 1]), 4)
    tensor([[0.0000, 0.0000],
            [1.0000, 0.0100]])
    """
    if D % 2:
        raise ValueError(f"D={D} must be even: rotary positions turn pairs of entries")
    dtype = torch.float64 if positions.dtype == torch.float64 else torch.float32
    positions = positions.to(torch.float64)  # a large position times a small frequency keeps its digits
    frequency = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device=positions.device) / D)
    return (positions[..., None] * frequency).to(dtype)


def sinusoidal(T: int, C: int, base: float = 10_000.0) -> Tensor:
    """The position vectors of 2017: (T, C) float32, sine and cosine interleaved.

    Entries 2i and 2i + 1 of row t are sin and cos of t * base ** (-2i / C). Raises ValueError if C is odd.
    Vaswani et al. (2017), section 3.5.

    >>> sinusoidal(2, 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    if C % 2:
        raise ValueError(f"C={C} must be even: positions are pairs of a sine and a cosine")
    angles = rope_angles(torch.arange(T), C, base)  # (T, C//2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)  # (T, C)


def apply_rope(x: Tensor, positions: Tensor, base: float = 10_000.0, interleaved: bool = False) -> Tensor:
    """Turn every pair of x by its position's angle: (..., T, D), (T,) or (B, T) -> (..., T, D).

    With (B, T) positions and x (B, H, T, D) a head axis is put between B and T. `interleaved` pairs entries 2i and
    2i + 1, otherwise i and i + D/2. Computed in at least float32, in float64 if x is, angles included; returned in x's
    dtype. Raises ValueError if D is odd. Su et al. (2021), equation 34.

    >>> apply_rope(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    tensor([[0.5403, 0.8415]])
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = rope_angles(positions.double() if wide == torch.float64 else positions, x.shape[-1], base)
    while positions.ndim > 1 and angles.ndim < x.ndim:
        angles = angles.unsqueeze(-3)  # heads lie between B and T
    cos, sin = angles.cos(), angles.sin()  # (..., T, D//2)
    if interleaved:
        a, b = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = x.to(wide).chunk(2, dim=-1)
    turned = a * cos - b * sin, a * sin + b * cos
    pairs = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return pairs.to(x.dtype)


def interpolate_positions(positions: Tensor, trained_length: int, length: int) -> Tensor:
    """Squeeze the positions of a longer text into the trained range: any shape -> the same shape.

    Positions are multiplied by trained_length / length, and become fractions: float32 for integers. Where
    length <= trained_length they are returned unchanged. Chen et al. (2023), equation 4.

    >>> interpolate_positions(torch.arange(4), trained_length=2, length=4)
    tensor([0.0000, 0.5000, 1.0000, 1.5000])
    """
    if length <= trained_length:
        return positions
    return positions * (trained_length / length)
