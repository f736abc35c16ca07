"""Mistakes that people make in looking up embeddings and in writing positions, absolute and rotary."""

import math

import torch
import torch.nn.functional as F

from . import wrong

# embed ---------------------------------------------------------------------------------------------------------------


def _checked(ids, table):
    if ((ids < 0) | (ids >= len(table))).any():
        raise IndexError("no such row")
    return ids


@wrong(
    "embed",
    caught_by="test_an_unknown_id_is_an_error",
    hint="Negative ids wrap around: `table[-1]` is the last row. Check that all ids lie in 0 ... V - 1, "
    "or use an operation that refuses them, such as index_select.",
)
def embed_wrapping_negative_ids(ids, table):
    return table[ids]


@wrong(
    "embed",
    caught_by="test_an_unknown_id_is_an_error",
    hint="Ids outside the vocabulary are clamped to the nearest row. Such an id is a mistake of the caller: "
    "raise an IndexError.",
)
def embed_clamped(ids, table):
    return table[ids.clamp(0, len(table) - 1)]


@wrong(
    "embed",
    caught_by="test_an_unknown_id_is_an_error",
    hint="Ids outside the vocabulary are taken modulo V, and get the row of another token. Raise an IndexError.",
)
def embed_modulo(ids, table):
    return table[ids % len(table)]


@wrong(
    "embed",
    caught_by="test_an_unknown_id_is_an_error",
    hint="An unknown id silently becomes a row of zeros. Raise an IndexError.",
)
def embed_zeros_for_unknown_ids(ids, table):
    return (ids[..., None] == torch.arange(len(table))).to(table.dtype) @ table


@wrong(
    "embed",
    caught_by="test_rows_by_hand",
    hint="Columns of the table are looked up. A token's vector is a row: table[id].",
)
def embed_columns(ids, table):
    return table.T[_checked(ids, table)]


@wrong(
    "embed",
    caught_by="test_every_row_can_be_looked_up",
    hint="Ids count from 1 here. Id 0 is the first row.",
)
def embed_from_one(ids, table):
    return table[_checked(ids, table) - 1]


@wrong(
    "embed",
    caught_by="test_ids_of_any_shape",
    hint="The shape of the ids is lost: they come out as one long list. "
    "Every id becomes a row where it stands: (..., C).",
)
def embed_flattened(ids, table):
    return table.index_select(0, ids.flatten())


@wrong(
    "embed",
    caught_by="test_ids_of_any_shape",
    hint="The ids must be (B, T) here. They may have any shape: use `ids.shape` as a whole.",
)
def embed_two_axes_only(ids, table):
    B, T = ids.shape
    return table.index_select(0, ids.flatten()).view(B, T, table.shape[1])


@wrong(
    "embed",
    caught_by="test_rows_by_hand",
    hint="The rows are multiplied by sqrt(C). The model of 2017 does that outside: "
    "the lookup gives the rows as they are.",
)
def embed_scaled(ids, table):
    return table[_checked(ids, table)] * math.sqrt(table.shape[1])


@wrong(
    "embed",
    caught_by="test_rows_by_hand",
    hint="Id 0 is treated as padding and gets zeros. Here it is a token like any other.",
)
def embed_padding_zero(ids, table):
    return table[_checked(ids, table)] * (ids != 0)[..., None]


@wrong(
    "embed",
    caught_by="test_every_row_can_be_looked_up",
    hint="The one-hot rows are as wide as the largest id that occurs. "
    "Their width is V: give one_hot the number of rows.",
)
def embed_one_hot_by_largest_id(ids, table):
    return F.one_hot(ids).to(table.dtype) @ table


@wrong(
    "embed",
    caught_by="test_rows_keep_the_dtype_of_the_table",
    hint="The rows come out in float32 whatever the table holds. Make the one-hot rows in the table's dtype.",
)
def embed_in_float32(ids, table):
    return F.one_hot(ids, len(table)).float() @ table.float()


@wrong(
    "embed",
    caught_by="test_rows_keep_the_dtype_of_the_table",
    hint="The one-hot rows are always float32, and torch multiplies only equal dtypes. Make them in the table's dtype.",
)
def embed_one_hot_float32(ids, table):
    return F.one_hot(ids, len(table)).float() @ table


@wrong(
    "embed",
    caught_by="test_repeated_ids_add_up_their_gradients",
    hint="The rows are cut from the graph, so the table learns nothing. Do not detach it or copy it into a new tensor.",
)
def embed_detached(ids, table):
    return table.detach()[_checked(ids, table)]


# rope_angles ---------------------------------------------------------------------------------------------------------


def _steps(width, base):
    """The angles by which the pairs turn at each position."""
    return base ** (-torch.arange(0, width, 2).double() / width)


def _even(width):
    if width % 2:
        raise ValueError("the width must be even")


def _rope_angles(positions, D, base, frequency=None):
    """The angles, right unless the frequencies are not."""
    _even(D)
    frequency = _steps(D, base) if frequency is None else frequency
    dtype = torch.float64 if positions.dtype == torch.float64 else torch.float32
    return (positions.double()[..., None] * frequency).to(dtype)


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="The exponent is -i / D, so the slowest pair turns far too fast. It is -2i / D for pair i.",
)
def angles_of_half_the_exponent(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base, base ** (-torch.arange(D // 2).double() / D))


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="The exponent is -4i / D: it is divided by D / 2 although it is already 2i. Pair i has -2i / D.",
)
def angles_of_twice_the_exponent(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base, _steps(D, base) ** 2)


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="The exponents run from 0 to -1 inclusive: they are divided by D/2 - 1. "
    "Pair i has -2i / D, which does not reach -1.",
)
def angles_up_to_the_base(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base, base ** -torch.linspace(0, 1, D // 2).double())


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="`//` rounds the exponents down to 0, so every pair turns alike. Divide with `/`.",
)
def angles_all_alike(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base, base ** (-(torch.arange(0, D, 2) // D).double()))


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="The exponent is positive, so angles grow from pair to pair. Later pairs turn slower: base ** (-2i / D).",
)
def angles_growing(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base, 1 / _steps(D, base))


@wrong(
    "rope_angles",
    caught_by="test_the_base_sets_the_angles",
    hint="The base is ignored: 10,000 is written into the formula.",
)
def angles_without_base(positions, D, base=10_000.0):
    return _rope_angles(positions, D, 10_000.0)


@wrong(
    "rope_angles",
    caught_by="test_the_given_positions_count",
    hint="Positions 0, 1, 2 ... are used in place of those given. Only the number of positions is read.",
)
def angles_of_a_count(positions, D, base=10_000.0):
    count = torch.arange(positions.shape[-1]).expand(positions.shape)
    return _rope_angles(count.to(positions.dtype), D, base)


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="The positions are counted from 1. Position 0 has the angle 0.",
)
def angles_from_one(positions, D, base=10_000.0):
    return _rope_angles(positions + 1, D, base)


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="The angles are multiplied by 2 pi. They are in radians already: the first pair turns by 1 radian a step.",
)
def angles_in_full_turns(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base, 2 * math.pi * _steps(D, base))


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="Every angle stands there twice, D in all, as two blocks. Return one angle a pair: D/2.",
)
def angles_in_two_blocks(positions, D, base=10_000.0):
    angles = _rope_angles(positions, D, base)
    return torch.cat([angles, angles], dim=-1)


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="Every angle stands there twice, D in all, side by side. Return one angle a pair: D/2.",
)
def angles_twice_each(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base).repeat_interleave(2, dim=-1)


@wrong(
    "rope_angles",
    caught_by="test_a_batch_of_positions",
    hint="Only (T,) positions work: torch.outer takes two vectors. "
    "`positions[..., None] * frequency` does the same for any axes in front.",
)
def angles_of_one_row_alone(positions, D, base=10_000.0):
    _even(D)
    dtype = torch.float64 if positions.dtype == torch.float64 else torch.float32
    return torch.outer(positions.double(), _steps(D, base)).to(dtype)


@wrong(
    "rope_angles",
    caught_by="test_a_batch_of_positions",
    hint="The batch axis is lost: the rows of positions come out as one. Keep the axes: `positions[..., None]`.",
)
def angles_of_flat_positions(positions, D, base=10_000.0):
    return _rope_angles(positions.flatten(), D, base)


@wrong(
    "rope_angles",
    caught_by="test_a_batch_of_positions",
    hint="The first row's positions serve the whole batch. Each row has its own.",
)
def angles_of_the_first_row(positions, D, base=10_000.0):
    first = positions if positions.ndim == 1 else positions[:1].expand(positions.shape)
    return _rope_angles(first, D, base)


@wrong(
    "rope_angles",
    caught_by="test_positions_may_be_fractions",
    hint="Fractions are cut off: 2.5 becomes 2. Positions may be fractions, as interpolation makes them.",
)
def angles_of_whole_positions(positions, D, base=10_000.0):
    return _rope_angles(positions.long().to(positions.dtype), D, base)


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="The frequencies are put into the positions' dtype. In integers 1, 0.01 ... become 1, 0 ...: "
    "keep them in float32 or more.",
)
def angles_in_the_dtype_of_positions(positions, D, base=10_000.0):
    _even(D)
    angles = positions[..., None] * _steps(D, base).to(positions.dtype)
    return angles.to(torch.promote_types(angles.dtype, torch.float32))


@wrong(
    "rope_angles",
    caught_by="test_two_angles_by_hand",
    hint="The angles are always float64. They are float32, unless positions are float64.",
)
def angles_always_float64(positions, D, base=10_000.0):
    return _rope_angles(positions.double(), D, base)


@wrong(
    "rope_angles",
    caught_by="test_float64_positions_keep_their_digits",
    hint="The angles are always float32. float64 positions keep their digits: return float64 for them.",
)
def angles_always_float32(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base).float()


@wrong(
    "rope_angles",
    caught_by="test_float64_positions_keep_their_digits",
    hint="float64 positions meet frequencies in float32, so the angles have float32's digits only. "
    "Whole numbers divide to float32: give torch.arange the dtype float64.",
)
def angles_of_float32_frequencies(positions, D, base=10_000.0):
    return _rope_angles(positions, D, base, 1.0 / base ** (torch.arange(0, D, 2).float() / D))


@wrong(
    "rope_angles",
    caught_by="test_positions_may_be_fractions",
    hint="The angles come back in the half precision of the positions. The result is float32 at least.",
)
def angles_in_half(positions, D, base=10_000.0):
    angles = _rope_angles(positions, D, base)
    return angles.to(positions.dtype) if positions.dtype in (torch.float16, torch.bfloat16) else angles


@wrong(
    "rope_angles",
    caught_by="test_an_odd_head_width_is_an_error",
    hint="An odd D is accepted, though its last entry has no partner. Raise a ValueError.",
)
def angles_of_odd_width(positions, D, base=10_000.0):
    return _rope_angles(positions, 2 * (D // 2), base, _steps(D, base)[: D // 2])


# sinusoidal ----------------------------------------------------------------------------------------------------------


def _woven(angles):
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).float()


def _waves(positions, steps):
    return _woven(positions.double()[:, None] * steps)


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="All sines come first, then all cosines. They take turns: entry 2i is a sine, entry 2i + 1 its cosine.",
)
def waves_in_two_blocks(T, C, base=10_000.0):
    _even(C)
    angles = torch.arange(T).double()[:, None] * _steps(C, base)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).float()


@wrong(
    "sinusoidal",
    caught_by="test_every_pair_has_its_wavelength",
    hint="`-log(base) / C // 2` divides first and rounds down after that, so the exponents are wrong. "
    "The exponent of pair i is -2i / C, without any rounding.",
)
def waves_by_rounded_exponents(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(T), torch.exp(torch.arange(0, C // 2).double() * (-math.log(base) / C // 2)))


@wrong(
    "sinusoidal",
    caught_by="test_the_base_sets_the_wavelengths",
    hint="The base is ignored: 10,000 is written into the formula.",
)
def waves_without_base(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(T), _steps(C, 10_000.0))


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="The base is 1,000 unless given. It should be 10,000.",
)
def waves_of_base_1000(T, C, base=1000.0):
    _even(C)
    return _waves(torch.arange(T), _steps(C, base))


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="The exponent is -i / C, so the slowest pair turns far too fast. It is -2i / C for pair i.",
)
def waves_of_half_the_exponent(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(T), base ** (-torch.arange(C // 2).double() / C))


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="The exponent is -4i / C: it is divided by C / 2 although it is already 2i. Pair i has -2i / C.",
)
def waves_of_twice_the_exponent(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(T), base ** (-torch.arange(0, C, 2).double() / (C // 2)))


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="The exponents run from 0 to -1 inclusive: they are divided by C/2 - 1. "
    "Pair i has -2i / C, which does not reach -1.",
)
def waves_up_to_the_base(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(T), base ** -torch.linspace(0, 1, C // 2).double())


@wrong(
    "sinusoidal",
    caught_by="test_sine_and_cosine_share_an_angle",
    hint="Every entry has a frequency of its own. Entries 2i and 2i + 1 share one: both use the exponent -2i / C.",
)
def waves_with_their_own_frequencies(T, C, base=10_000.0):
    _even(C)
    j = torch.arange(C)
    angles = torch.arange(T).double()[:, None] * base ** (-j.double() / C)
    return torch.where(j % 2 == 0, angles.sin(), angles.cos()).float()


@wrong(
    "sinusoidal",
    caught_by="test_counting_starts_at_zero",
    hint="The cosine comes first. Entry 2i is the sine, entry 2i + 1 the cosine.",
)
def waves_with_cosine_first(T, C, base=10_000.0):
    _even(C)
    angles = torch.arange(T).double()[:, None] * _steps(C, base)
    return torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(-2).float()


@wrong(
    "sinusoidal",
    caught_by="test_counting_starts_at_zero",
    hint="The first row is position 1. Counting starts at 0: the first row is 0, 1, 0, 1.",
)
def waves_from_one(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(1, T + 1), _steps(C, base))


@wrong(
    "sinusoidal",
    caught_by="test_counting_starts_at_zero",
    hint="All entries are sines. Odd entries are cosines.",
)
def waves_of_sines_alone(T, C, base=10_000.0):
    _even(C)
    return (torch.arange(T).double()[:, None] * _steps(C, base)).sin().repeat_interleave(2, dim=-1).float()


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="The angles are multiplied by 2 pi. They are in radians already: the first pair turns by 1 radian a step.",
)
def waves_in_full_turns(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(T), 2 * math.pi * _steps(C, base))


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="The exponent is positive, so angles grow from pair to pair. Later pairs turn slower: base ** (-2i / C).",
)
def waves_of_growing_frequency(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(T), 1 / _steps(C, base))


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="The table is float64, as numpy and Python numbers make it. Return float32.",
)
def waves_in_float64(T, C, base=10_000.0):
    _even(C)
    angles = torch.arange(T).double()[:, None] * _steps(C, base)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


@wrong(
    "sinusoidal",
    caught_by="test_two_positions_by_hand",
    hint="The table has a batch axis in front. Return (T, C): it will broadcast over a batch by itself.",
)
def waves_with_a_batch_axis(T, C, base=10_000.0):
    _even(C)
    return _waves(torch.arange(T), _steps(C, base))[None]


@wrong(
    "sinusoidal",
    caught_by="test_an_odd_width_is_an_error",
    hint="An odd C is accepted and the last cosine left out. Raise a ValueError: positions are pairs.",
)
def waves_of_odd_width(T, C, base=10_000.0):
    return _waves(torch.arange(T), _steps(C, base))[:, :C]


@wrong(
    "sinusoidal",
    caught_by="test_an_odd_width_is_an_error",
    hint="An odd C ends in torch's error about shapes. Check it first and raise a ValueError that names it.",
)
def waves_without_a_check(T, C, base=10_000.0):
    angles = torch.arange(T).double()[:, None] * _steps(C, base)
    table = torch.zeros(T, C)
    table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
    return table


# apply_rope ----------------------------------------------------------------------------------------------------------
#
# The variants share correct steps, and each gets one of them wrong.


def _whole_angles(x, positions, base):
    """The angles of each pair, in float64, ready to broadcast with x."""
    _even(x.shape[-1])
    return _with_heads(x, positions.double()[..., None] * _steps(x.shape[-1], base))


def _with_heads(x, angles):
    return angles[:, None] if angles.ndim == 3 and x.ndim == 4 else angles


def _apart(x, interleaved):
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


def _together(a, b, interleaved):
    return torch.stack([a, b], dim=-1).flatten(-2) if interleaved else torch.cat([a, b], dim=-1)


def _turn(x, angles, interleaved):
    """x turned by angles, in float64."""
    a, b = _apart(x.double(), interleaved)
    return _together(a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos(), interleaved)


def _rope(x, positions, base, interleaved):
    return _turn(x, _whole_angles(x, positions, base), interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_half_split_pairs",
    hint="Pairs are always interleaved, (0, 1), (2, 3). By default entry i is paired with entry i + D/2.",
)
def rope_always_interleaved(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, positions, base, True)


@wrong(
    "apply_rope",
    caught_by="test_interleaved_pairs",
    hint="`interleaved` is ignored: pairs are always half-split.",
)
def rope_never_interleaved(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, positions, base, False)


@wrong(
    "apply_rope",
    caught_by="test_half_split_pairs",
    hint="The two pairings are exchanged. interleaved=True means (2i, 2i + 1), otherwise (i, i + D/2).",
)
def rope_pairings_exchanged(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, positions, base, not interleaved)


def _by_long_angles(x, angles, swapped):
    """x times cos plus the swapped x times sin, with angles as wide as x."""
    return (x.double() * angles.cos() + swapped.double() * angles.sin()).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_half_split_pairs",
    hint="Angles in the order t0, t0, t1, t1 meet half-split pairs, so the two halves of a pair turn by different "
    "angles. Half-split pairs need t0, t1, t0, t1.",
)
def rope_half_split_with_doubled_angles(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    if interleaved:
        return _rope(x, positions, base, True)
    a, b = x.chunk(2, dim=-1)
    return _by_long_angles(x, angles.repeat_interleave(2, dim=-1), torch.cat([-b, a], dim=-1))


@wrong(
    "apply_rope",
    caught_by="test_interleaved_pairs",
    hint="Angles in the order t0, t1, t0, t1 meet interleaved pairs, so the two entries of a pair turn by different "
    "angles. Interleaved pairs need t0, t0, t1, t1.",
)
def rope_interleaved_with_blocks_of_angles(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    if not interleaved:
        return _rope(x, positions, base, False)
    swapped = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    return _by_long_angles(x, torch.cat([angles, angles], dim=-1), swapped)


@wrong(
    "apply_rope",
    caught_by="test_interleaved_pairs",
    hint="Interleaved pairs are turned, but come out as two blocks. Put each pair back to its places 2i and 2i + 1.",
)
def rope_pairs_left_in_blocks(x, positions, base=10_000.0, interleaved=False):
    turned = _rope(x, positions, base, interleaved)
    return torch.cat(_apart(turned, True), dim=-1) if interleaved else turned


@wrong(
    "apply_rope",
    caught_by="test_a_turn_by_hand",
    hint="Everything is turned backwards: the sign of the sine is exchanged. "
    "The first entry is a cos - b sin, the second a sin + b cos.",
)
def rope_backwards(x, positions, base=10_000.0, interleaved=False):
    return _turn(x, -_whole_angles(x, positions, base), interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_a_turn_by_hand",
    hint="The minus is missing: a cos + b sin, a sin + b cos is no rotation. The first entry is a cos - b sin.",
)
def rope_without_minus(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    a, b = _apart(x.double(), interleaved)
    cos, sin = angles.cos(), angles.sin()
    return _together(a * cos + b * sin, a * sin + b * cos, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_a_turn_by_hand",
    hint="Both entries get a minus: a cos - b sin, a sin - b cos is no rotation. The second entry is a sin + b cos.",
)
def rope_with_two_minuses(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    a, b = _apart(x.double(), interleaved)
    cos, sin = angles.cos(), angles.sin()
    return _together(a * cos - b * sin, a * sin - b * cos, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_a_turn_by_hand",
    hint="The second entry of each pair is computed from the first after that was overwritten. "
    "Keep the old pair until both results are there.",
)
def rope_overwritten(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    a, b = _apart(x.double(), interleaved)
    a = a * angles.cos() - b * angles.sin()
    b = a * angles.sin() + b * angles.cos()
    return _together(a, b, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_half_split_pairs",
    hint="Only half of the pairs are turned, and the rest is passed on. Turn all D/2 of them.",
)
def rope_of_half_the_pairs(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    turned = torch.arange(angles.shape[-1]) < (angles.shape[-1] + 1) // 2
    return _turn(x, angles * turned, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_half_split_pairs",
    hint="The exponent of the frequencies is -i / D. It is -2i / D for pair i: call `rope_angles`.",
)
def rope_of_half_the_exponent(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, positions, base**0.5, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_tokens_stand_where_positions_say",
    hint="The given positions are ignored: tokens are counted from 0. A token decoded alone at position 7 is not at 0.",
)
def rope_of_a_count(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, torch.arange(x.shape[-2]), base, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_tokens_stand_where_positions_say",
    hint="Only the first position is read, and the rest counted up from it. Positions may have gaps and repeat.",
)
def rope_counting_from_the_first(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, positions[..., :1] + torch.arange(x.shape[-2]), base, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_tokens_stand_where_positions_say",
    hint="Fractions of positions are cut off. Interpolated positions are fractions, and turn by fractions.",
)
def rope_of_whole_positions(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, positions.long(), base, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_the_base_reaches_the_angles",
    hint="The base is not handed on: the angles are those of 10,000.",
)
def rope_without_base(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, positions, 10_000.0, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_each_text_has_its_own_positions",
    hint="The first row's positions serve the whole batch. With (B, T) positions each row has its own.",
)
def rope_of_the_first_row(x, positions, base=10_000.0, interleaved=False):
    return _rope(x, positions[0] if positions.ndim == 2 else positions, base, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_each_text_has_its_own_positions",
    hint="(B, T) angles meet (B, H, T, D) without a head axis, so a head gets the positions of a batch row, "
    "or the shapes do not fit. Put an axis between B and T.",
)
def rope_without_head_axis(x, positions, base=10_000.0, interleaved=False):
    _even(x.shape[-1])
    return _turn(x, positions.double()[..., None] * _steps(x.shape[-1], base), interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_each_text_has_its_own_positions",
    hint="The head axis of the angles stands behind T, as if x were (B, T, H, D). "
    "x is (B, H, T, D): put it between B and T.",
)
def rope_with_heads_behind(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    angles = angles.transpose(1, 2) if angles.ndim == 4 else angles
    return _turn(x, angles, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_each_text_has_its_own_positions",
    hint="A head axis is added although x is (B, T, D) and has none. Add it only where x has one.",
)
def rope_with_heads_always(x, positions, base=10_000.0, interleaved=False):
    _even(x.shape[-1])
    angles = positions.double()[..., None] * _steps(x.shape[-1], base)
    return _turn(x, angles[:, None] if positions.ndim == 2 else angles, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_any_axes_before_the_tokens",
    hint="x must be (B, H, T, D) here. There may be any axes before T: use x.shape[-2] and x.shape[-1].",
)
def rope_of_four_axes_alone(x, positions, base=10_000.0, interleaved=False):
    _B, _H, _T, D = x.shape
    _even(D)
    return _rope(x, positions, base, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_half_precision_is_for_the_result_alone",
    hint="The angles are computed in the half precision of x. Far out they are wrong by whole radians: "
    "use float32 and go back to x's dtype at the end.",
)
def rope_in_half_precision(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    if x.dtype in (torch.float16, torch.bfloat16):
        angles = _with_heads(x, positions.to(x.dtype)[..., None] * _steps(x.shape[-1], base).to(x.dtype)).double()
    return _turn(x, angles, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_half_precision_is_for_the_result_alone",
    hint="cos and sin are rounded to x's half precision before they are used. "
    "Turn x in float32, and round the result alone.",
)
def rope_by_rounded_sines(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = _apart(x, interleaved)
    return _together(a * cos - b * sin, a * sin + b * cos, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_half_precision_is_for_the_result_alone",
    hint="The result is left in float32. Return it in x's dtype.",
)
def rope_left_in_float32(x, positions, base=10_000.0, interleaved=False):
    turned = _turn(x, _whole_angles(x, positions, base), interleaved)
    return turned.to(torch.promote_types(x.dtype, torch.float32))


@wrong(
    "apply_rope",
    caught_by="test_float64_is_turned_in_float64",
    hint="x is float64, but its angles are float32, which is what whole positions give. "
    "Make the positions float64 where x is.",
)
def rope_of_float32_angles(x, positions, base=10_000.0, interleaved=False):
    angles = _whole_angles(x, positions, base)
    angles = angles if positions.dtype == torch.float64 else angles.float().double()
    return _turn(x, angles, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_float64_is_turned_in_float64",
    hint="x in float64 is turned with the digits of float32 only, in its angles or its products. "
    "Work in the wider of x's dtype and float32 throughout.",
)
def rope_through_float32(x, positions, base=10_000.0, interleaved=False):
    return _rope(x.float(), positions, base, interleaved).to(x.dtype)


@wrong(
    "apply_rope",
    caught_by="test_the_gradient_turns_back",
    hint="The result is cut from the graph, so nothing before it learns. "
    "Keep no_grad and detach to the angles, if you use them.",
)
def rope_detached(x, positions, base=10_000.0, interleaved=False):
    return _rope(x.detach(), positions, base, interleaved)


@wrong(
    "apply_rope",
    caught_by="test_an_entry_without_a_partner_is_an_error",
    hint="An odd D is accepted, though its last entry has no partner. Raise a ValueError.",
)
def rope_of_odd_width(x, positions, base=10_000.0, interleaved=False):
    rest = x.shape[-1] % 2
    turned = _rope(x[..., : x.shape[-1] - rest], positions, base, interleaved)
    return torch.cat([turned, x[..., x.shape[-1] - rest :]], dim=-1)


@wrong(
    "apply_rope",
    caught_by="test_an_entry_without_a_partner_is_an_error",
    hint="An odd D ends in torch's error about shapes. Check it first and raise a ValueError that names it.",
)
def rope_without_a_check(x, positions, base=10_000.0, interleaved=False):
    if x.shape[-1] % 2:
        raise RuntimeError("The size of tensor a must match the size of tensor b")
    return _rope(x, positions, base, interleaved)


# interpolate_positions -----------------------------------------------------------------------------------------------


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="The factor is length / trained_length, which stretches. A long text is squeezed: trained_length / length.",
)
def stretched(positions, trained_length, length):
    return positions if length <= trained_length else positions * (length / trained_length)


@wrong(
    "interpolate_positions",
    caught_by="test_a_short_text_is_left_alone",
    hint="Short texts are stretched over the whole trained range. With length <= trained_length nothing changes.",
)
def short_texts_stretched(positions, trained_length, length):
    return positions * (trained_length / length)


@wrong(
    "interpolate_positions",
    caught_by="test_a_short_text_is_left_alone",
    hint="Short texts keep their numbers, but come back as fractions, since they are multiplied by 1. "
    "Return the positions as they are.",
)
def short_texts_in_floats(positions, trained_length, length):
    return positions * min(1.0, trained_length / length)


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="Positions are rounded down to whole numbers, so neighbours fall together. "
    "Keep the fractions: use `/`, not `//`.",
)
def rounded_down(positions, trained_length, length):
    return positions if length <= trained_length else (positions * trained_length // length).long()


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="Positions are rounded down to whole numbers, so neighbours fall together, though in a floating dtype. "
    "Keep the fractions.",
)
def floored(positions, trained_length, length):
    return positions if length <= trained_length else (positions * (trained_length / length)).floor()


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="Positions are rounded to whole numbers, so neighbours fall together. Keep the fractions.",
)
def rounded(positions, trained_length, length):
    return positions if length <= trained_length else (positions * (trained_length / length)).round()


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="`trained_length // length` is 0, so all tokens stand at position 0. Use `/`.",
)
def all_at_zero(positions, trained_length, length):
    return positions if length <= trained_length else positions * float(trained_length // length)


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="Positions beyond the trained range are clamped to its end, where they cannot be told apart. "
    "Squeeze all of them.",
)
def clamped(positions, trained_length, length):
    return positions if length <= trained_length else positions.clamp(max=trained_length - 1)


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="Positions beyond the trained range start again at 0. Squeeze all of them.",
)
def wrapped(positions, trained_length, length):
    return positions if length <= trained_length else positions % trained_length


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="Only positions beyond the trained range are squeezed, and land among the others. Squeeze all of them.",
)
def squeezed_beyond_the_range(positions, trained_length, length):
    if length <= trained_length:
        return positions
    return torch.where(positions < trained_length, positions, positions * (trained_length / length))


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="The factor is (trained_length - 1) / (length - 1). It is trained_length / length.",
)
def squeezed_between_the_ends(positions, trained_length, length):
    return positions if length <= trained_length else positions * ((trained_length - 1) / (length - 1))


@wrong(
    "interpolate_positions",
    caught_by="test_positions_shrink_by_one_factor",
    hint="The given positions are replaced by evenly spaced ones. Multiply those that are given: "
    "there may be one alone, or any order.",
)
def spaced_anew(positions, trained_length, length):
    if length <= trained_length:
        return positions
    count = torch.arange(positions.numel()).view(positions.shape)
    return count * (trained_length / length)


@wrong(
    "interpolate_positions",
    caught_by="test_positions_shrink_by_one_factor",
    hint="The length is read from the number of positions. It is given as `length`: "
    "positions may be a part of the text.",
)
def length_by_counting(positions, trained_length, length):
    if length <= trained_length:
        return positions
    return positions * (trained_length / max(positions.shape[-1] if positions.ndim else 1, 1))


@wrong(
    "interpolate_positions",
    caught_by="test_positions_shrink_by_one_factor",
    hint="The length is taken from the largest position. It is given as `length`: positions may be a part of the text.",
)
def length_by_the_last(positions, trained_length, length):
    if length <= trained_length:
        return positions
    last = positions.max().item() + 1 if positions.numel() else length
    return positions * (trained_length / last)


@wrong(
    "interpolate_positions",
    caught_by="test_twice_the_length_by_hand",
    hint="Nothing is squeezed: positions come back as they are, also from a long text.",
)
def unchanged(positions, trained_length, length):
    return positions
