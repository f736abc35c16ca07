"""Rotary positions: turn pairs of numbers by an angle that grows with the position.

Shapes: T tokens, D head width. The half-split pairing joins entry i with entry i + D/2, the interleaved one
entry 2i with 2i + 1.
"""

import torch
from torch import Tensor


def rope_angles(positions: Tensor, D: int, base: float = 10_000.0) -> Tensor:
    """The angle in radians of each pair at each position: (T,) or (B, T) -> (..., T, D//2).

    Pair i turns by position * base ** (-2i / D). At least float32. Raises ValueError if D is odd.
    Su et al. (2021), equation 15.

    >>> rope_angles(torch.tensor([0, 1]), 4)
    tensor([[0.0000, 0.0000],
            [1.0000, 0.0100]])
    """
    if D % 2:
        raise ValueError(f"D={D} must be even: rotary positions turn pairs of entries")
    positions = positions.to(torch.float64)  # a large position times a small frequency keeps its digits
    frequency = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device=positions.device) / D)
    return (positions[..., None] * frequency).float()


def apply_rope(x: Tensor, positions: Tensor, base: float = 10_000.0, interleaved: bool = False) -> Tensor:
    """Turn every pair of x by its position's angle: (..., T, D), (T,) or (B, T) -> (..., T, D).

    With (B, T) positions and x (B, H, T, D) a head axis is put between B and T. `interleaved` pairs entries 2i and
    2i + 1, otherwise i and i + D/2. Computed in at least float32, returned in x's dtype. Su et al. (2021).

    >>> apply_rope(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    tensor([[1., 0.]])
    """
    angles = rope_angles(positions, x.shape[-1], base)  # (..., T, D//2)
    while positions.ndim > 1 and angles.ndim < x.ndim:
        angles = angles.unsqueeze(-3)  # heads lie between B and T
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.to(wide).cos(), angles.to(wide).sin()
    if interleaved:
        a, b = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    else:
        a, b = x.to(wide).chunk(2, dim=-1)
    turned = a * cos - b * sin, a * sin + b * cos
    pairs = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return pairs.to(x.dtype)
