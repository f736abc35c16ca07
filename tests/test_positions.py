"""The checks of chapter 02: embedding, sinusoidal and rotary positions. Outside truth: torch, complex numbers."""

import torch
import torch.nn.functional as F

from .same import expect, gradients, is_exception, is_tensor, outcome, raises, random_gradient, rng, same

# What a piece may not call, since it is torch's version of the same thing.
FORBIDDEN = {
    "embed": [
        F.embedding,
        F.embedding_bag,
        torch.embedding,
        torch.embedding_bag,
        "aten::embedding",
        "aten::_embedding_bag",
    ]
}

B, H, T, D = 2, 3, 5, 14


def _x(*shape, salt=0, dtype=torch.float32):
    return torch.randn(shape, generator=rng(salt)).to(dtype)


def _near(got, want, what):
    """Break the promise unless numbers in any floating dtype are right to the digits of float32."""
    is_tensor(got, what)
    expect(got.is_floating_point(), f"{what}: expected fractions (a floating dtype), got {got.dtype}")
    same(got.float(), want.float(), what)


# embed ---------------------------------------------------------------------------------------------------------------

V, C = 11, 7


def _refused(embed, ids, table):
    """True where the lookup is refused, else what it gave."""
    answer = outcome(lambda: embed(torch.tensor(ids), table))
    return True if is_exception(answer) else answer


def probe_embed(embed):
    """Results that tell the known mistakes apart."""
    table = _x(V, C)
    few = torch.tensor([[3, 0, 3], [1, 5, 2]])
    return [
        outcome(lambda: embed(torch.arange(V), table)),
        outcome(lambda: embed(few, table)),
        outcome(lambda: embed(few[0], table)),
        outcome(lambda: embed(torch.tensor(0), table)),
        outcome(lambda: embed(few.view(3, 1, 2), table)),
        outcome(lambda: embed(few, table.double())),
        outcome(lambda: embed(few, table.half())),
        outcome(lambda: gradients(lambda table: embed(few, table), table)),
        _refused(embed, [[1, V]], table),
        _refused(embed, [[1, -1]], table),
        _refused(embed, [[-V - 1, 1]], table),
    ]


def test_rows_by_hand(embed):
    """Ids 2 and 0 give rows 2 and 0 of the table."""
    table = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    same(embed(torch.tensor([2, 0]), table), torch.tensor([[4.0, 5.0], [0.0, 1.0]]), "embed([2, 0], table)")


def test_every_row_can_be_looked_up(embed):
    """(B, T) ids and a (V, C) table give (B, T, C): the product of one-hot rows with the table."""
    table = _x(V, C)
    same(embed(torch.arange(V), table), table, "embed of the ids 0 ... V - 1")
    for high in (V, 4):  # the second time only low ids occur
        ids = torch.randint(high, (3, 5), generator=rng(1))
        same(embed(ids, table), F.one_hot(ids, V).float() @ table, f"embed of {ids.tolist()}")
    same(embed(ids=ids, table=table), F.one_hot(ids, V).float() @ table, "embed(ids=..., table=...)")


def test_ids_of_any_shape(embed):
    """A single id, a row, a batch, more axes, no ids at all: each id becomes a row of C numbers."""
    table = _x(V, C)
    for shape in ((), (1,), (5,), (1, 1), (2, 3, 5), (3, 2, 1, 2)):
        ids = torch.randint(V, shape, generator=rng(2))
        same(embed(ids, table), F.one_hot(ids, V).float() @ table, f"embed of ids of shape {shape}")
    ids = torch.randint(V, (5, 3), generator=rng(3)).T
    same(embed(ids, table), F.one_hot(ids, V).float() @ table, "embed of transposed (non-contiguous) ids")
    for shape in ((0,), (2, 0)):
        same(embed(torch.zeros(shape, dtype=torch.int64), table), torch.zeros(*shape, C), f"embed of {shape} ids")


def test_rows_keep_the_dtype_of_the_table(embed):
    """The rows come out as they are, in float64, float16 or bfloat16, from a table of any layout."""
    ids = torch.tensor([[3, 0, 10], [10, 6, 3]])
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        table = _x(V, C, dtype=dtype)
        same(embed(ids, table), torch.stack([torch.stack([table[i] for i in row]) for row in ids]), f"rows in {dtype}")
    table = _x(C, V).T
    same(embed(ids[0], table), torch.stack([table[i] for i in ids[0]]), "rows of a transposed (non-contiguous) table")
    same(embed(torch.tensor([[0, 0]]), _x(1, 1)), _x(1, 1).expand(1, 2, 1), "rows of a table of one number")


def test_repeated_ids_add_up_their_gradients(embed):
    """A row's gradient is the sum over all places where its id stands; rows not asked for get 0."""
    ids = torch.tensor([[3, 0, 3], [3, 1, 0]])
    for dtype in (torch.float32, torch.float64):
        (got,) = gradients(lambda table: embed(ids, table), _x(V, C, dtype=dtype))
        g = random_gradient((2, 3, C), dtype)
        same(got, F.one_hot(ids.flatten(), V).to(dtype).T @ g.flatten(0, 1), f"gradient of the table in {dtype}")


def test_an_unknown_id_is_an_error(embed):
    """With V = 11 rows, the ids 11 and -1 are an IndexError: nothing wraps around, nothing is clamped."""
    table = _x(V, C)
    same(embed(torch.tensor([[V - 1]]), table), table[V - 1 :][None], "embed of the last id")
    for ids in ([V], [-1], [[0, V + 30]], [[2, -1], [0, 1]], -1, V, [-V], [[-V - 1]]):
        answer = outcome(lambda ids=ids: embed(torch.tensor(ids), table))
        what = f"embed of {ids} with a table of {V} rows"
        if is_exception(answer):  # what torch's own lookups raise
            known = answer.kind in ("IndexError", "RuntimeError", "ValueError")
            expect(known, f"{what}: expected IndexError, got {answer.kind}")
        expect(is_exception(answer), f"{what}: expected IndexError, but it returned a result")


# rope_angles ---------------------------------------------------------------------------------------------------------


def _angles(positions, D, base=10_000.0):
    """Position times frequency, one pair at a time, in float64."""
    return torch.stack([positions.double() * base ** (-2 * i / D) for i in range(D // 2)], dim=-1)


def _digits(got, want):
    """How right numbers are. float32 rounds in many ways, so probes ask this instead; what is wrong stays as it is."""
    for digits, gap in (("float64", 1e-9), ("float32", 1e-4)):
        if got.shape == want.shape and torch.allclose(got.double(), want, rtol=gap, atol=gap):
            return digits
    return got


def probe_rope_angles(rope_angles):
    """Results that tell the known mistakes apart."""
    own = torch.tensor([[4, 0, 9], [2, 2, 7]])
    halves = torch.tensor([0.5, 3.25, 7.75])
    return [
        outcome(lambda: rope_angles(torch.arange(7), 10)),
        outcome(lambda: rope_angles(own[0], 10)),
        outcome(lambda: rope_angles(own[0], 4, 100.0)),
        outcome(lambda: rope_angles(own[0], 2)),
        outcome(lambda: rope_angles(own, 10)),
        outcome(lambda: rope_angles(own, 10, 100.0)),
        outcome(lambda: rope_angles(halves, 10)),
        outcome(lambda: rope_angles(halves.double(), 10).dtype == torch.float64),
        outcome(lambda: _digits(rope_angles(halves.double(), 10), _angles(halves, 10))),
        outcome(lambda: rope_angles(halves.half(), 10)),
        outcome(lambda: rope_angles(own[0], 5)),
    ]


def test_two_angles_by_hand(rope_angles):
    """Position 1 with D = 4 turns its two pairs by 1 and by 0.01 radian; position 0 turns nothing."""
    want = torch.tensor([[0.0, 0.0], [1.0, 0.01], [3.0, 0.03]])
    same(rope_angles(torch.tensor([0, 1, 3]), 4), want, "rope_angles of positions 0, 1, 3")


def test_one_angle_a_pair(rope_angles):
    """Pair i turns by position * base ** (-2i / D): (T,) positions give (T, D/2) angles."""
    for T, D in ((7, 10), (5, 2), (3, 22), (1, 6), (11, 64)):
        same(rope_angles(torch.arange(T), D), _angles(torch.arange(T), D).float(), f"rope_angles(arange({T}), {D})")


def test_the_given_positions_count(rope_angles):
    """Positions stand in any order, leave gaps and repeat: one token at position 7 gets the angles of 7."""
    for positions in ([7], [5, 0, 3, 3, 11], [0, 0], [90, 2], [100_000, 4_096]):
        positions = torch.tensor(positions)
        same(
            rope_angles(positions, 10), _angles(positions, 10).float(), f"rope_angles of positions {positions.tolist()}"
        )


def test_a_batch_of_positions(rope_angles):
    """(B, T) positions give (B, T, D/2) angles: each row of the batch has its own."""
    for shape in ((2, 3), (3, 3), (1, 5), (5, 1), (7, 5)):
        positions = torch.randint(90, shape, generator=rng(1))
        same(rope_angles(positions, 10), _angles(positions, 10).float(), f"rope_angles of positions of shape {shape}")
    positions = torch.randint(90, (5, 2), generator=rng(2)).T
    same(
        rope_angles(positions, 6), _angles(positions, 6).float(), "rope_angles of transposed (non-contiguous) positions"
    )


def test_the_base_sets_the_angles(rope_angles):
    """Another base gives other angles; without one it is 10,000."""
    positions = torch.tensor([3, 1, 8])
    for base in (100.0, 7.5, 500_000.0):
        same(rope_angles(positions, 10, base), _angles(positions, 10, base).float(), f"rope_angles with base {base:g}")
    got = rope_angles(positions=positions, D=6, base=100.0)
    same(got, _angles(positions, 6, 100.0).float(), "rope_angles(positions=..., D=6, base=100)")
    same(rope_angles(positions, 6), _angles(positions, 6).float(), "rope_angles without a base")


def test_positions_may_be_fractions(rope_angles):
    """Position 2.5 turns half way between 2 and 3; the result is float32, also for float16 positions."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        positions = torch.tensor([0.5, 2.5, 7.75, 3.0], dtype=dtype)
        same(rope_angles(positions, 10), _angles(positions, 10).float(), f"rope_angles of positions in {dtype}")


def test_float64_positions_keep_their_digits(rope_angles):
    """float64 positions give float64 angles, right to its digits: frequencies too need float64."""
    for positions in (torch.tensor([0.1, 7.0, 1000.3]), torch.rand(5, generator=rng(3)) * 50):
        positions = positions.double() / 3
        for D, base in ((10, 10_000.0), (6, 100.0)):
            same(
                rope_angles(positions, D, base),
                _angles(positions, D, base),
                f"rope_angles in float64 to 9 digits, D = {D}",
            )


def test_an_odd_head_width_is_an_error(rope_angles):
    """Entries are turned in pairs: D = 5 is a ValueError."""
    positions = torch.arange(3)
    same(rope_angles(positions, 2), _angles(positions, 2).float(), "rope_angles with D = 2")
    for D, given in ((5, positions), (1, positions), (7, positions.double()[None])):
        raises(ValueError, lambda D=D, given=given: rope_angles(given, D), f"rope_angles with D = {D}")


# sinusoidal ----------------------------------------------------------------------------------------------------------


def _waves(T, C, base=10_000.0):
    """The table of sines and cosines by complex numbers, in float64."""
    angles = torch.arange(T).double()[:, None] * torch.tensor([base ** (-2 * i / C) for i in range(C // 2)]).double()
    points = torch.polar(torch.ones_like(angles), angles)
    return torch.stack([points.imag, points.real], dim=-1).view(T, C)


def probe_sinusoidal(sinusoidal):
    """Results that tell the known mistakes apart."""
    return [
        outcome(lambda: sinusoidal(7, 10)),
        outcome(lambda: sinusoidal(5, 4)),
        outcome(lambda: sinusoidal(5, 4, 150.0)),
        outcome(lambda: sinusoidal(3, 6, base=50.0)),
        outcome(lambda: sinusoidal(3, 2)),
        outcome(lambda: sinusoidal(3, 5)),
        outcome(lambda: sinusoidal(1, 6)),
    ]


def test_two_positions_by_hand(sinusoidal):
    """Position 1 with C = 4 is [sin 1, cos 1, sin 0.01, cos 0.01]."""
    want = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.841471, 0.540302, 0.0099998, 0.99995]])
    same(sinusoidal(2, 4), want, "sinusoidal(2, 4)")


def test_counting_starts_at_zero(sinusoidal):
    """Row 0 is 0, 1, 0, 1 ...: position 0 has the angle 0 everywhere."""
    for C in (2, 6, 10):
        same(sinusoidal(1, C), torch.tensor([[0.0, 1.0]]).repeat(1, C // 2), f"sinusoidal(1, {C})")
        same(sinusoidal(4, C)[:1], torch.tensor([[0.0, 1.0]]).repeat(1, C // 2), f"row 0 of sinusoidal(4, {C})")


def test_sine_and_cosine_share_an_angle(sinusoidal):
    """Entries 2i and 2i + 1 are sine and cosine of the same angle: their squares sum to 1."""
    for T, C in ((7, 10), (11, 6)):
        pairs = sinusoidal(T, C).square().unflatten(-1, (-1, 2)).sum(-1)
        same(pairs, torch.ones(T, C // 2), f"sine squared plus cosine squared in sinusoidal({T}, {C})")


def test_every_pair_has_its_wavelength(sinusoidal):
    """Pair i turns by base ** (-2i / C) at each step: 1 for the first, nearly 1 / base for the last."""
    for T, C in ((7, 10), (50, 2), (3, 22), (6, 6), (1, 1000), (40, 64)):
        same(sinusoidal(T, C), _waves(T, C).float(), f"sinusoidal({T}, {C})")


def test_the_base_sets_the_wavelengths(sinusoidal):
    """Another base gives other wavelengths; without one it is 10,000."""
    for base in (100.0, 7.5, 1e6):
        same(sinusoidal(7, 10, base), _waves(7, 10, base).float(), f"sinusoidal(7, 10, {base:g})")
        same(sinusoidal(T=11, C=4, base=base), _waves(11, 4, base).float(), f"sinusoidal(T=11, C=4, base={base:g})")
    same(sinusoidal(11, 4), _waves(11, 4).float(), "sinusoidal(11, 4)")


def test_only_the_distance_shows_in_products(sinusoidal):
    """The product of two rows depends on their distance alone; a row with itself gives C / 2."""
    rows = sinusoidal(13, 10)
    products = rows @ rows.T
    same(products.diagonal(), torch.full((13,), 5.0), "products of each row with itself")
    for distance in (1, 4, 9):
        got = products.diagonal(distance)
        same(got, got[:1].expand_as(got), f"products of rows {distance} apart")


def test_a_long_table_keeps_its_digits(sinusoidal):
    """Row 2499 is as right as row 9: positions and angles need float32 or more."""
    got, want = sinusoidal(2500, 6), _waves(2500, 6)
    expect(got.shape == want.shape, f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    apart = (got.double() - want).abs().max().item()
    expect(apart < 0.01, f"sinusoidal(2500, 6): expected sines and cosines, got {apart:.2g} more or less")


def test_an_odd_width_is_an_error(sinusoidal):
    """A sine without its cosine cannot be: C = 5 is a ValueError."""
    same(sinusoidal(3, 2), _waves(3, 2).float(), "sinusoidal(3, 2)")
    for C in (5, 1):
        raises(ValueError, lambda C=C: sinusoidal(3, C), f"sinusoidal(3, {C})")


# apply_rope ----------------------------------------------------------------------------------------------------------


def _turned(x, positions, base=10_000.0, interleaved=False):
    """Each pair as a complex number times exp(i angle), in float64."""
    angle = _angles(positions, x.shape[-1], base)
    if positions.ndim == 2 and x.ndim == 4:
        angle = angle[:, None]  # heads lie between B and T
    x = x.double()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    pair = turned.real, turned.imag
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def _right(apply_rope, x, positions, what, **options):
    """Break the promise unless x is turned right, to the digits of its own dtype."""
    same(apply_rope(x, positions, **options), _turned(x, positions, **options).to(x.dtype), what)


def _worst_rounding(apply_rope, dtype, interleaved=False):
    """The largest error, as a multiple of what one rounding of the right result to this dtype may cost."""
    x, positions = _x(3, 7, 22, salt=4, dtype=dtype), torch.arange(7)
    got, want = apply_rope(x, positions, interleaved=interleaved), _turned(x, positions, interleaved=interleaved)
    expect(got.shape == want.shape, f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    allowed = torch.finfo(dtype).eps / 2 * want.abs() + 5e-5
    return ((got.double() - want).abs() / allowed).max().item()


def _roundings(apply_rope, dtype):
    """How often the results in this dtype were rounded, for probes: None where they are wrong in float32 too."""
    if _worst_rounding(apply_rope, dtype) <= 1.1:
        return "once"
    return "often" if _worst_rounding(apply_rope, torch.float32) <= 1.1 else None


def _rounded_once(apply_rope, dtype, interleaved=False):
    """Break the promise unless the results in this dtype are the right ones, rounded once."""
    worst = _worst_rounding(apply_rope, dtype, interleaved)
    name = "interleaved" if interleaved else "half-split"
    said = f"x in {dtype}, {name} pairs: expected the exact result, rounded once; got errors {worst:.2g} times as large"
    expect(worst <= 1.1, f"{said}. Are cos and sin, or the products, in half precision?")


STEPS = [7, 0, 3, 3, 11]  # five positions: unordered, one of them twice
FAR = [1001, 1003, 1500, 2051, 1999]  # half precision cannot even count so far


def probe_apply_rope(apply_rope):
    """Results that tell the known mistakes apart."""
    x, square = _x(B, H, T, D), _x(3, 3, 3, 6, salt=1)
    line, steps = torch.arange(T) + 2, torch.tensor(STEPS)
    own, own_square = torch.stack([steps, line]), torch.tensor([[4, 0, 9], [2, 2, 7], [1, 5, 3]])
    return [
        outcome(lambda: apply_rope(x, torch.arange(T))),
        outcome(lambda: apply_rope(x, line)),
        outcome(lambda: apply_rope(x, steps, base=100.0)),
        outcome(lambda: apply_rope(x[0, 0], steps)),
        outcome(lambda: apply_rope(x[0], steps / 4)),
        outcome(lambda: apply_rope(x, own)),
        outcome(lambda: apply_rope(square, own_square)),
        outcome(lambda: apply_rope(x[:, 0], own)),
        outcome(lambda: apply_rope(x[0, 0].half(), steps)),
        outcome(lambda: apply_rope(x.bfloat16(), torch.tensor(FAR))),
        outcome(lambda: _roundings(apply_rope, torch.bfloat16)),
        outcome(lambda: apply_rope(x[0].double(), steps).dtype == torch.float64),
        outcome(lambda: _digits(apply_rope(x[0].double(), steps), _turned(x[0], steps))),
        outcome(lambda: _digits(apply_rope(x[0].double(), steps.double()), _turned(x[0], steps))),
        outcome(lambda: gradients(lambda x: apply_rope(x, steps), x[0])),
        outcome(lambda: apply_rope(x[..., :5], steps)),
        outcome(lambda: apply_rope(x, line, interleaved=True)),
        outcome(lambda: apply_rope(x, own, 100.0, True)),
        outcome(lambda: apply_rope(x[..., :5], steps, interleaved=True)),
    ]


def test_a_turn_by_hand(apply_rope):
    """At position 1 the pair [1, 0] becomes [cos 1, sin 1], and [0, 1] becomes [-sin 1, cos 1]."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    want = torch.tensor([[0.540302, 0.841471], [-0.841471, 0.540302]])
    same(apply_rope(x, torch.tensor([1, 1])), want, "apply_rope of [1, 0] and [0, 1] at position 1")


def test_turning_keeps_lengths(apply_rope):
    """Position 0 leaves x as it is, and at every position each pair keeps its length."""
    x = _x(B, H, T, D)
    same(apply_rope(x[:, :, :1], torch.tensor([0])), x[:, :, :1], "x at position 0")
    got = apply_rope(x, torch.arange(T))
    before, after = (torch.stack(y.chunk(2, dim=-1)).norm(dim=0) for y in (x, got))
    same(after, before, "lengths of the pairs")


def test_half_split_pairs(apply_rope):
    """By default entry i is paired with entry i + D/2: with D = 4, entries 0 and 2 turn by 1 radian a step."""
    got = apply_rope(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([1]))
    same(got, torch.tensor([[0.540302, 0.0, 0.841471, 0.0]]), "apply_rope of [1, 0, 0, 0] at position 1")
    for width in (2, 4, 6, 10, 22, 64):
        _right(apply_rope, _x(B, T, width), torch.arange(T), f"half-split pairs, D = {width}")


def test_tokens_stand_where_positions_say(apply_rope):
    """Positions may start anywhere, repeat, leave gaps, come in any order, and be fractions."""
    for positions in ([7], [11, 12, 13], STEPS, [19, 2, 9], [0.5, 2.0, 7.25]):
        x, positions = _x(B, H, len(positions), D), torch.tensor(positions)
        _right(apply_rope, x, positions, f"x at positions {positions.tolist()}")
    x, positions = _x(3, D), torch.tensor([0.5, 2.0, 7.25])
    for kind in (torch.float64, torch.float16):
        same(apply_rope(x, positions.to(kind)), _turned(x, positions).float(), f"float32 x at positions in {kind}")


def test_the_base_reaches_the_angles(apply_rope):
    """Another base turns by other angles; without one it is 10,000."""
    x, positions = _x(B, T, D), torch.arange(T)
    for base in (100.0, 7.5, 500_000.0):
        _right(apply_rope, x, positions, f"x turned with base {base:g}", base=base)
        same(apply_rope(x, positions, base), _turned(x, positions, base).float(), f"apply_rope(x, positions, {base:g})")
    _right(apply_rope, x, positions, "x turned without a base")


def test_any_axes_before_the_tokens(apply_rope):
    """(T,) positions serve x of shape (T, D), (B, T, D), (B, H, T, D) and more, of any layout in memory."""
    positions = torch.arange(T)
    for shape in ((), (2,), (5,), (2, 3), (5, 3), (3, 5), (5, 5), (1, 1), (2, 1, 3)):
        x = _x(*shape, T, D)
        _right(apply_rope, x, positions, f"x of shape {tuple(x.shape)}")
    for x in (_x(B, T, H, D).transpose(1, 2), _x(B, D, T).mT):
        _right(apply_rope, x, positions, f"a transposed (non-contiguous) x of shape {tuple(x.shape)}")


def test_each_text_has_its_own_positions(apply_rope):
    """(B, T) positions turn every head of row b by the positions of row b, whatever B, H and T are."""
    for batch, heads, tokens in (
        (2, 3, 5),
        (3, 3, 5),
        (5, 3, 5),
        (2, 5, 5),
        (3, 3, 3),
        (1, 3, 5),
        (2, 1, 5),
        (3, 2, 1),
    ):
        positions = torch.randint(20, (batch, tokens), generator=rng(2)) + torch.arange(batch)[:, None]
        for x in (_x(batch, heads, tokens, 6), _x(batch, tokens, 6)):
            what = f"x of shape {tuple(x.shape)} at positions of shape {tuple(positions.shape)}"
            _right(apply_rope, x, positions, what)


def test_only_the_distance_counts(apply_rope):
    """The product of q at m and k at n depends on m - n alone: 5 and 3 give the same as 9 and 7."""
    q, k = (F.normalize(_x(1, D, salt=salt), dim=-1) for salt in (1, 2))
    for m, n in ((5, 3), (0, 4)):
        at = [(m + shift, n + shift) for shift in (0, 1, 4, 7)]
        turned = [(apply_rope(q, torch.tensor([m])), apply_rope(k, torch.tensor([n]))) for m, n in at]
        products = torch.stack([(q * k).sum() for q, k in turned])
        same(products, products[:1].expand(4), f"products of q and k at {at}")


def test_half_precision_is_for_the_result_alone(apply_rope):
    """x in bfloat16 or float16 comes back in its dtype, but is turned in float32 and rounded once, far out too."""
    for dtype in (torch.bfloat16, torch.float16):
        what = f"x in {dtype} at positions around 1001 to 2051"
        _right(apply_rope, _x(B, H, T, D, dtype=dtype), torch.tensor(FAR), what)
        _rounded_once(apply_rope, dtype)


def test_float64_is_turned_in_float64(apply_rope):
    """x in float64 is right to the digits of float64, so its angles must be too, also for whole positions."""
    x, count = _x(B, H, T, D, dtype=torch.float64), torch.arange(T)
    for positions in (count, count * 9, count / 4, count.double() / 3):
        _right(apply_rope, x, positions, f"x in float64 to 9 digits, at positions in {positions.dtype}")


def test_the_gradient_turns_back(apply_rope):
    """The gradient of x is that of the result, turned by the negative angle."""
    x, positions = _x(B, H, T, D), torch.arange(T)
    (got,) = gradients(lambda x: apply_rope(x, positions), x)
    same(got, _turned(random_gradient(x.shape), -positions).float(), "gradient of x")


def test_an_entry_without_a_partner_is_an_error(apply_rope):
    """Entries are turned in pairs: D = 5 is a ValueError."""
    positions = torch.arange(3)
    _right(apply_rope, _x(3, 2), positions, "x with D = 2")
    for shape in ((3, 5), (2, 3, 1), (2, 2, 3, 7)):
        raises(ValueError, lambda shape=shape: apply_rope(_x(*shape), positions), f"apply_rope of x {shape}")


def test_interleaved_pairs(apply_rope):
    """With interleaved=True entries 2i and 2i + 1 are a pair, and the turned pair goes back to its places."""
    got = apply_rope(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([1]), interleaved=True)
    same(got, torch.tensor([[0.540302, 0.841471, 0.0, 0.0]]), "apply_rope of [1, 0, 0, 0] at 1, interleaved")
    for width in (2, 4, 6, 10, 22, 64):
        _right(apply_rope, _x(B, T, width), torch.arange(T), f"interleaved pairs, D = {width}", interleaved=True)


def test_interleaved_pairs_obey_the_same_rules(apply_rope):
    """Interleaved pairs too know positions, base, heads, layouts, dtypes, gradients, and the error for an odd D."""

    def turn(x, positions, base=10_000.0):
        return apply_rope(x, positions, base, True)

    x, steps = _x(B, H, T, D), torch.tensor(STEPS)
    own = torch.stack([steps, steps.flip(0) / 4])
    same(turn(x, own, 100.0), _turned(x, own, 100.0, True).float(), "interleaved pairs at positions (B, T), base 100")
    for shape in ((T, D), (H, T, D), (5, 5, T, D), (2, 1, 3, T, D)):
        y = _x(*shape)
        same(turn(y, steps), _turned(y, steps, interleaved=True).float(), f"interleaved pairs of x {shape}")
    for y in (_x(B, T, H, D).transpose(1, 2), _x(B, D, T).mT):
        what = f"interleaved pairs of a transposed x of shape {tuple(y.shape)}"
        same(turn(y, steps), _turned(y, steps, interleaved=True).float(), what)
    square, own = _x(3, 3, 3, 6), torch.tensor([[4, 0, 9], [2, 2, 7], [1, 5, 3]])
    for y in (square, square[0]):
        what = f"interleaved pairs of x {tuple(y.shape)} at positions (3, 3)"
        same(turn(y, own), _turned(y, own, interleaved=True).float(), what)
    for dtype in (torch.bfloat16, torch.float16):
        _right(apply_rope, x.to(dtype), torch.tensor(FAR), f"interleaved pairs in {dtype}", interleaved=True)
        _rounded_once(apply_rope, dtype, interleaved=True)
    (got,) = gradients(lambda x: turn(x, steps), x)
    same(got, _turned(random_gradient(x.shape), -steps, interleaved=True).float(), "gradient of x, interleaved pairs")
    x = x.double()
    same(turn(x, steps.double()), _turned(x, steps, interleaved=True), "interleaved pairs in float64 to 9 digits")
    raises(ValueError, lambda: turn(x[..., :5], steps), "apply_rope with D = 5, interleaved")


# interpolate_positions -----------------------------------------------------------------------------------------------


def probe_interpolate_positions(interpolate_positions):
    """Results that tell the known mistakes apart."""
    steps, halves = torch.tensor([6, 0, 3, 3]), torch.tensor([0.5, 2.25])
    return [
        outcome(lambda: interpolate_positions(torch.arange(7), 5, 7)),
        outcome(lambda: interpolate_positions(torch.arange(10), 5, 10)),
        outcome(lambda: interpolate_positions(steps, 5, 7)),
        outcome(lambda: interpolate_positions(steps.view(2, 2), 3, 11)),
        outcome(lambda: interpolate_positions(halves, 2, 7)),
        outcome(lambda: interpolate_positions(torch.arange(5), 5, 5)),
        outcome(lambda: interpolate_positions(torch.arange(4), 9, 4)),
        outcome(lambda: interpolate_positions(halves, 9, 4)),
    ]


def test_twice_the_length_by_hand(interpolate_positions):
    """A text of 4 tokens squeezed into a trained length of 2 stands at 0, 0.5, 1, 1.5."""
    got = interpolate_positions(torch.arange(4), trained_length=2, length=4)
    _near(got, torch.tensor([0.0, 0.5, 1.0, 1.5]), "interpolate_positions(arange(4), 2, 4)")


def test_positions_shrink_by_one_factor(interpolate_positions):
    """Every position, of any shape and order, is multiplied by trained_length / length, also a single one."""
    for shape in ((7,), (2, 3), (), (1,), (2, 1, 3), (0,)):
        positions = torch.randint(100, shape, generator=rng(1))
        for trained_length, length in ((5, 7), (64, 100), (3, 11), (50, 100), (3, 4), (99, 100)):
            want = positions.double() * trained_length / length
            what = f"interpolate_positions of shape {shape}, {trained_length}, {length}"
            _near(interpolate_positions(positions, trained_length, length), want, what)
    got = interpolate_positions(positions=torch.tensor([99]), trained_length=64, length=100)
    _near(got, torch.tensor([63.36]), "interpolate_positions([99], 64, 100)")


def test_fractions_shrink_too(interpolate_positions):
    """Positions that are fractions already, in float32 or float64, follow the same rule."""
    for dtype in (torch.float32, torch.float64):
        positions = torch.tensor([[0.5, 3.0], [9.75, 1.25]], dtype=dtype)
        _near(interpolate_positions(positions, 3, 10), positions * 0.3, f"interpolate_positions of {dtype}")


def test_a_long_text_fits_the_trained_range(interpolate_positions):
    """All 4096 positions lie below the trained length of 1000, evenly spaced, none twice."""
    got = interpolate_positions(torch.arange(4096), 1000, 4096)
    _near(got, torch.arange(4096).double() * 1000 / 4096, "interpolate_positions(arange(4096), 1000, 4096)")
    expect(got.max().item() < 1000, f"expected positions below 1000, got {got.max().item():g}")


def test_a_short_text_is_left_alone(interpolate_positions):
    """With length <= trained_length positions come back as they are: same numbers, same dtype."""
    for positions in (torch.arange(4), torch.tensor([[3, 0], [2, 2]]), torch.tensor([0.5, 2.25]), torch.tensor(9)):
        for trained_length in (4, 5, 100):
            what = f"interpolate_positions of {positions.tolist()}, {trained_length}, 4"
            same(interpolate_positions(positions, trained_length, 4), positions, what)
