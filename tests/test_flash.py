"""The checks of chapter 13: attention in tiles, forward and backward. Outside truth: torch, float64, without tiles."""

import itertools
import math
import weakref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from .same import Broken, alike, expect, outcome, raises, random_gradient, rng, same

# What a piece may not call, since it is torch's version of the same thing: functions, and beginnings of the names of
# torch's inner operations, which all ways lead to.
_SOFTMAX = [
    "aten::_softmax",
    "aten::_log_softmax",
    "aten::_safe_softmax",
    "aten::logsumexp",
    "aten::logcumsumexp",
]
_ATTENTION = [
    *_SOFTMAX,
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product",
    "aten::_flash_attention",
    "aten::_efficient_attention",
]
FORBIDDEN = {
    "online_softmax": _SOFTMAX,
    "flash_attention": _ATTENTION,
    "flash_attention_backward": [*_ATTENTION, torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward],
}

# Loops in Python, row by row even, are right and slow: on a busy machine they take a while.
SECONDS = {"flash_attention": 30.0, "flash_attention_backward": 30.0}

INF = math.inf
HALVES = (torch.float16, torch.bfloat16)


def _randn(*shape, salt=0, dtype=torch.float64):
    return torch.randn(shape, generator=rng(salt)).to(dtype)


def _several(got, names, what):
    """The tensors of a tuple, one for each name. Broken if it is something else."""
    wanted = f"expected a tuple of {len(names)} tensors, {', '.join(names)}"
    expect(got is not None, f"{what}: {wanted}, got None. Is a `return` missing?")
    expect(isinstance(got, (tuple, list)), f"{what}: {wanted}, got {type(got).__name__}")
    expect(len(got) == len(names), f"{what}: {wanted}, got {len(got)} things")
    return tuple(got)


def _parts(number, call):
    """The tensors that a call returns, or as often what came in their place: for probes."""
    got = outcome(call)
    return list(got) if isinstance(got, (tuple, list)) and len(got) == number else [got] * number


def _after(function, x, *rest):
    """What x is after a call: a probe's calls are not watched."""
    x = x.clone()
    outcome(lambda: function(x, *rest))
    return x


def _too_wide(got, want):
    """Which numbers in half precision are further from the right ones than rounding once, at the end, explains."""
    return (got.double() - want).abs() > 0.6 * torch.finfo(got.dtype).eps * want.abs() + 4e-6


def _rounded_once(got, want, dtype, what):
    """Break the promise unless half-precision numbers are the right ones, rounded at the end and not before."""
    same(got, want.to(dtype), what)
    wide = _too_wide(got, want)
    if wide.any():
        at = tuple(wide.nonzero()[0].tolist())
        raise Broken(
            f"{what}: expected {want[at]:.6g}, rounded once at the end, got {got[at].item():.6g} at {list(at)} "
            f"({int(wide.sum())} of {wide.numel()} entries are further off): is it computed in half precision?"
        )


# What is measured ----------------------------------------------------------------------------------------------------


# Operations that multiply matrices, and which of their arguments is the first matrix.
PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "vdot": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
EXPONENTIALS = {"exp", "exp2", "expm1", "pow"}


class Meter(TorchDispatchMode):
    """Within the block, sees all that torch makes: the largest tensor, all of them together, and the work.

    A tensor counts by the memory behind it: a view, a slice or an expanded one costs nothing. `peak` is the most
    entries that were there at a time, and `work` the multiplications of all matrix products (without any: how many
    exponentials were taken).
    """

    def __init__(self):
        super().__init__()
        self.largest, self.shape, self.peak = 0, (), 0
        self._products = self._exponentials = 0
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}
        self._entries = 0  # of all in `_there`, also of those that are gone and not yet crossed out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch loads its compiler, seconds long, at the first operation. No piece is compiled here."""
        return False

    @property
    def work(self) -> int:
        return self._products or self._exponentials

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        made = [result] if isinstance(result, Tensor) else tree.tree_leaves(result)
        name = operation.name().removeprefix("aten::").split(".")[0].rstrip("_")
        if name in PRODUCTS:
            self._products += made[0].numel() * args[PRODUCTS[name]].shape[-1]
        elif name in EXPONENTIALS:
            self._exponentials += made[0].numel()
        for x in made:
            if isinstance(x, Tensor):
                self._see(x)
        return result

    def _see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        entries = storage.nbytes() // x.element_size()
        if entries > self.largest:
            self.largest, self.shape = entries, tuple(x.shape)
        if storage._cdata not in self._there:
            self._there[storage._cdata] = (StorageWeakRef(storage), entries)
            self._entries += entries
            if self._entries > self.peak:
                self._there = {key: seen for key, seen in self._there.items() if not seen[0].expired()}
                self._entries = sum(entries for _, entries in self._there.values())
                self.peak = max(self.peak, self._entries)


BLOCK = 16  # of the tiles that are measured


def _forward_meter(flash_attention, n, causal):
    """What one head costs with n queries and n keys of width 2, in tiles of 16 x 16."""
    q, k, v = (_randn(1, 1, n, 2, salt=salt, dtype=torch.float32) for salt in range(3))
    with Meter() as meter:
        flash_attention(q, k, v, causal, BLOCK, BLOCK)
    return meter


def _backward_meter(flash_attention_backward, n, causal):
    """The same for the gradients."""
    q, k, v, g = (_randn(1, 1, n, 2, salt=salt, dtype=torch.float32) for salt in range(4))
    out, logsumexp = (x.float() for x in _attention(q, k, v, causal))
    with Meter() as meter:
        flash_attention_backward(g, q, k, v, out, logsumexp, causal, BLOCK, BLOCK)
    return meter


# A right solution may look at a strip of tiles at a time, but not at more: `_is_small`. With three times the tokens it
# needs three times the memory, where scores that are kept would need nine times as much: `_is_linear`. It is to skip
# nearly half of the tiles, but may look at one too many in each row: `_is_spared`.


def _is_small(meter, n):
    return meter.largest <= BLOCK * n


def _is_linear(short, long):
    return long.peak <= 3.5 * short.peak


def _is_spared(causal, full):
    return causal.work <= 0.85 * full.work


def _habits(measure, piece):
    """What a piece shows of itself where it is measured, for probes: the sizes of tiles, what is kept or skipped."""

    def size(meter, n):
        return "small" if _is_small(meter, n) else "large" if meter.largest < n * n else "all"

    short, long = (measure(piece, n, False) for n in (32, 96))
    causal, full = (measure(piece, 64, causal) for causal in (True, False))
    return size(long, 96), size(causal, 64), _is_linear(short, long), _is_spared(causal, full)


def _expect_small(meter, n, what):
    expect(
        _is_small(meter, n),
        f"{what} of {n} queries and {n} keys, block_q=block_k={BLOCK}: expected scores in tiles of "
        f"{BLOCK} x {BLOCK}, got a tensor of shape {meter.shape}, {meter.largest:,} entries. All scores, or a mask "
        f"for all of them, would be {n * n:,}",
    )


def _expect_linear(short, long, what):
    expect(
        _is_linear(short, long),
        f"{what} of 32 and of 96 tokens: expected at most about 3 times the memory, got {long.peak / short.peak:.1f} "
        "times as much: are the tiles of scores or weights kept?",
    )


def _expect_spared(causal, full, what):
    expect(
        _is_spared(causal, full),
        f"{what} of 64 queries and 64 keys, block_q=block_k={BLOCK}: expected 10 of the 16 tiles, 62% of the work, "
        f"with causal=True, got {causal.work / max(full.work, 1):.0%}",
    )


# online_softmax ------------------------------------------------------------------------------------------------------


def _row(chunks):
    """Maximum and total of the whole row, in float64."""
    x = torch.cat([chunk.double() for chunk in chunks], dim=-1)
    maximum = x.amax(-1)
    return maximum, (x - maximum[..., None]).exp().nan_to_num(0.0).sum(-1)


def _same_row(online_softmax, chunks, what):
    got = _several(online_softmax(chunks), ("maximum", "total"), what)
    for name, g, w in zip(("maximum", "total"), got, _row(chunks), strict=True):
        same(g, w.to(chunks[0].dtype), f"{name} of {what}")


def _chunks(*widths, salt=0, shape=(2, 3), dtype=torch.float64):
    return [_randn(*shape, width, salt=salt + i, dtype=dtype) for i, width in enumerate(widths)]


class _Stream:
    """Chunks that can be gone through once, and how many earlier ones were still held when the next was asked for."""

    def __init__(self, number):
        self.number, self.most, self.starts = number, 0, 0
        self._seen = []

    def _make(self, i):
        chunk = _randn(2, 3, 5, salt=40 + i)
        self._seen.append(weakref.ref(chunk))
        return chunk

    def __iter__(self):
        self.starts += 1
        return iter(self._once()) if self.starts == 1 else iter(())

    def _once(self):
        for i in range(self.number):
            self.most = max(self.most, sum(ref() is not None for ref in self._seen))
            yield self._make(i)


def _held(online_softmax, number):
    stream = _Stream(number)
    online_softmax(stream)
    return stream.most


def probe_online_softmax(online_softmax):
    """Results that tell the known mistakes apart."""
    rising = [chunk + 3.0 * i for i, chunk in enumerate(_chunks(4, 1, 7))]
    blind = torch.full((2, 3, 4), -INF).double()

    def ask(chunks):
        return _parts(2, lambda: online_softmax(chunks))

    return [
        *ask(_chunks(5)),
        *ask(rising),
        *ask(rising[::-1]),
        *ask(x for x in rising),
        *ask([x - 20.0 for x in rising]),
        *ask([x * 1e3 for x in rising]),
        *ask([blind, *rising]),
        *ask([*rising, blind]),
        *ask([blind, blind]),
        outcome(lambda: online_softmax([])),
        outcome(lambda: online_softmax(iter(()))),
        outcome(lambda: _held(online_softmax, 8) <= 2),
    ]


def test_a_row_in_two_chunks_by_hand(online_softmax):
    """[0, 0] and then [ln 2]: the maximum is ln 2, the total 1/2 + 1/2 + 1 = 2."""
    row = [torch.tensor([0.0, 0.0]), torch.tensor([math.log(2.0)])]
    for chunks, what in ((row, "[0, 0], [ln 2]"), (row[::-1], "[ln 2], [0, 0]")):
        maximum, total = _several(online_softmax(chunks), ("maximum", "total"), f"online_softmax of {what}")
        same(maximum, torch.tensor(math.log(2.0)), f"maximum of {what}")
        same(total, torch.tensor(2.0), f"total of {what}")


def test_one_chunk_is_an_ordinary_softmax(online_softmax):
    """Of a single chunk exp(x - maximum) / total is its softmax, for rows (2, 3) of 5 numbers."""
    (x,) = _chunks(5)
    maximum, total = _several(online_softmax([x]), ("maximum", "total"), "online_softmax of one chunk")
    same(maximum, x.amax(-1), "maximum of one chunk")
    same((x - maximum[..., None]).exp() / total[..., None], torch.softmax(x, -1), "exp(x - maximum) / total")
    _same_row(online_softmax, [x.float()], "one chunk in float32")


def test_chunks_may_have_any_width(online_softmax):
    """Cut into chunks of 4, 1 and 7 numbers, or 12 of 1, a row has the same maximum and total."""
    for widths in ((4, 1, 7), (1, 1, 1, 1), (7, 4), (1,)):
        _same_row(online_softmax, _chunks(*widths, salt=10), f"chunks of {', '.join(map(str, widths))} numbers")
    x = _randn(2, 3, 12, salt=11)
    for width in (12, 5, 1):
        _same_row(online_softmax, list(x.split(width, -1)), f"12 numbers in chunks of {width}")


def test_what_was_summed_is_rescaled(online_softmax):
    """The maximum may grow with every chunk, never, or in some rows only: the total is that of the whole row."""
    chunks = _chunks(4, 1, 7, 2, salt=20)
    steps = torch.tensor([[3.0, -3.0, 1.0], [0.0, 5.0, -1.0]]).double()[..., None]
    for name, size in (("rise", 3.0), ("fall", -3.0), ("rise or fall by row", steps)):
        _same_row(online_softmax, [x + size * i for i, x in enumerate(chunks)], f"chunks that {name}")
    _same_row(online_softmax, [x - 50.0 for x in chunks], "chunks of numbers around -50")


def test_large_numbers_do_not_overflow(online_softmax):
    """Numbers of 10,000 or -10,000 are fine, whichever comes first: only differences meet exp."""
    far = torch.tensor([0.0, 1e4, -1e4, 1e4 + 1.0]).double()
    for order in (*itertools.permutations(far.tolist(), 3), (-1e4, -1e4 - 1.0, -1e4)):
        chunks = [torch.tensor([[x, x + 0.5]]).double() for x in order]
        _same_row(online_softmax, chunks, f"chunks around {', '.join(f'{x:g}' for x in order)}")
    _same_row(online_softmax, [x.float() * 1e3 for x in _chunks(4, 1, 7, salt=21)], "chunks of numbers around 1000")


def test_minus_infinity_adds_nothing(online_softmax):
    """-inf adds 0 to the total, in the first chunk, the last, or some rows; a row of only -inf gives -inf and 0."""
    a, b, c = _chunks(4, 2, 3, salt=30)
    blind = torch.full((2, 3, 4), -INF).double()
    rows = a.clone()
    rows[0, 1], rows[1, 2, :2] = -INF, -INF
    _same_row(online_softmax, [blind, a, b], "a chunk of -inf, then two others")
    _same_row(online_softmax, [a, blind, b, blind], "a chunk of -inf in the middle and one at the end")
    _same_row(online_softmax, [rows, blind, b, c], "a first chunk with -inf in some rows")
    _same_row(online_softmax, [blind[..., :1], blind], "chunks of only -inf")
    _same_row(online_softmax, [blind.float()[..., :1]], "a single -inf in each row")
    _same_row(online_softmax, [rows, blind[..., :1]], "chunks with one row of only -inf")


def test_only_one_chunk_at_a_time(online_softmax):
    """The chunks may come from a generator: gone through once, and no earlier chunk is kept."""
    stream = _Stream(8)
    got = _several(online_softmax(stream), ("maximum", "total"), "online_softmax of a stream of chunks")
    expect(stream.starts == 1, f"expected one pass over the chunks, got {stream.starts}")
    expect(stream.most <= 2, f"expected one chunk at a time, got {stream.most} that are kept of 8 chunks")
    for name, g, w in zip(("maximum", "total"), got, _row(_chunks(*[5] * 8, salt=40)), strict=True):
        same(g, w, f"{name} of a stream of 8 chunks")
    chunks = _chunks(4, 1, 7, salt=50)
    for kind, given in (("tuple", tuple(chunks)), ("iterator", iter(chunks)), ("generator", (x for x in chunks))):
        got = _several(online_softmax(given), ("maximum", "total"), f"online_softmax of a {kind}")
        for name, g, w in zip(("maximum", "total"), got, _row(chunks), strict=True):
            same(g, w, f"{name} of chunks in a {kind}")


def test_rows_of_any_shape(online_softmax):
    """Chunks (width,), (3, width), (2, 1, 3, width), also transposed: maximum and total have the leading shape."""
    for shape in ((), (3,), (1,), (2, 1, 3)):
        for dtype in (torch.float64, torch.float32):
            chunks = _chunks(3, 1, 5, salt=60, shape=shape, dtype=dtype)
            _same_row(online_softmax, chunks, f"chunks of rows {shape} in {dtype}")
    chunks = [x.transpose(0, 2) for x in _chunks(4, 4, salt=61)]  # (4, 3, 2)
    _same_row(online_softmax, chunks, "transposed (non-contiguous) chunks")


def test_no_chunk_is_an_error(online_softmax):
    """A softmax of nothing is a ValueError: for an empty list and for a generator that gives nothing."""
    _same_row(online_softmax, _chunks(5), "one chunk")
    raises(ValueError, lambda: online_softmax([]), "online_softmax([])")
    raises(ValueError, lambda: online_softmax(x for x in ()), "online_softmax of an empty generator")


# flash_attention -----------------------------------------------------------------------------------------------------


def _qkv(B=2, H=2, K=None, T=5, S=7, D=3, Dv=5, salt=0, dtype=torch.float64):
    K = H if K is None else K
    shapes = (B, H, T, D), (B, K, S, D), (B, K, S, Dv)
    return [_randn(*shape, salt=salt + i, dtype=dtype) for i, shape in enumerate(shapes)]


def _attention(q, k, v, causal=False):
    """The whole computation in float64, with all scores at once: out and logsumexp."""
    q, k, v = (x.double() for x in (q, k, v))
    group, T, S = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (torch.stack([x[:, h // group] for h in range(q.shape[1])], dim=1) for x in (k, v))
    future = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1) if causal else torch.zeros(T, S, dtype=torch.bool)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -INF)
    return torch.softmax(scores, -1).masked_fill(future, 0.0) @ v, torch.logsumexp(scores, -1)


def _same_attention(flash_attention, qkv, *args, what, **kwargs):
    """Compare with the whole computation. The first of args or `causal` says whether it is causal."""
    q, k, v = qkv
    got = _several(flash_attention(q, k, v, *args, **kwargs), ("out", "logsumexp"), what)
    out, logsumexp = _attention(q, k, v, args[0] if args else kwargs.get("causal", False))
    same(got[0], out.to(q.dtype), f"out of {what}")
    same(got[1], logsumexp.to(torch.promote_types(q.dtype, torch.float32)), f"logsumexp of {what}")


def _lines(*numbers):
    """Vectors of width 4 with these first numbers, (1, 1, n, 4): their scores are the products, divided by 2."""
    x = torch.zeros(1, 1, len(numbers), 4)
    x[0, 0, :, 0] = torch.tensor(numbers)
    return x


def _moving(order, dtype=torch.float64):
    """Five queries, the first of which has scores near 0, 1000 and -1000 in this order; each other its own."""
    q, k, v = _qkv(T=5, S=2 * len(order), D=4, salt=70)
    q[..., 0] = torch.tensor([2.0, -2.0, 1.0, 0.0, -1.0])
    k[..., 0] = torch.tensor(order).repeat_interleave(2) * 1000.0
    return [x.to(dtype) for x in (q, k, v)]


ORDERS = ((-1.0, 0.0, 1.0), (1.0, 0.0, -1.0), (0.0, 1.0, -1.0, 1.0))


def probe_flash_attention(flash_attention):
    """Results that tell the known mistakes apart."""

    def ask(qkv, *args):
        return _parts(2, lambda: flash_attention(*qkv, *args))

    qkv, grouped = _qkv(), _qkv(H=6, K=2)
    hand = _lines(2.0), _lines(0.0, math.log(3.0)), torch.eye(2)[None, None]
    half = _qkv(T=7, S=13, D=5, dtype=torch.float16)
    half[0] = half[0] * 4
    return [
        *ask(hand),
        *ask(hand, False, 1, 1),
        *ask(qkv, False, 5, 7),
        *ask(qkv, False, 3, 3),
        *ask(qkv, True, 3, 3),
        *ask(qkv, True, 5, 7),
        *ask(_qkv(T=5, S=5, salt=5), True, 2, 3),
        *ask(_qkv(T=7, S=3, salt=5), True, 5, 2),
        *ask(grouped, False, 5, 4),
        *ask(_moving(ORDERS[0]), False, 5, 2),
        *ask(_moving(ORDERS[1]), False, 5, 2),
        *ask(half, False, 8, 1),
        outcome(lambda: _after(flash_attention, *qkv)),
        *_parts(4, lambda: _habits(_forward_meter, flash_attention)),
    ]


def test_two_keys_by_hand(flash_attention):
    """Scores 0 and ln 3 (products 0 and 2 ln 3, over sqrt(4)): the mix is 0.25 to 0.75, the logsumexp ln 4."""
    q, k, v = _lines(2.0), _lines(0.0, math.log(3.0)), torch.eye(2)[None, None]
    out, logsumexp = _several(flash_attention(q, k, v), ("out", "logsumexp"), "flash_attention(q, k, v)")
    same(out, torch.tensor([[[[0.25, 0.75]]]]), "out of scores 0 and ln 3")
    same(logsumexp, torch.tensor([[[math.log(4.0)]]]), "logsumexp of scores 0 and ln 3")


def test_tiles_of_one_key_by_hand(flash_attention):
    """Scores 0, ln 2 and ln 5 in tiles of one key, upwards and downwards: weights 1/8, 2/8, 5/8, logsumexp ln 8."""
    weights = torch.tensor([1.0, 2.0, 5.0])
    for w in (weights, weights.flip(0)):
        q, k, v = _lines(2.0), _lines(*w.log().tolist()), torch.eye(3)[None, None]
        what = f"scores {', '.join(f'ln {x:g}' for x in w.tolist())}, one key a tile"
        got = flash_attention(q, k, v, block_q=1, block_k=1)
        out, logsumexp = _several(got, ("out", "logsumexp"), what)
        same(out, (w / 8).view(1, 1, 1, 3), f"out of {what}")
        same(logsumexp, torch.tensor([[[math.log(8.0)]]]), f"logsumexp of {what}")


def test_one_tile_is_ordinary_attention(flash_attention):
    """Where one tile holds all, it is attention: softmax(q k^T / sqrt(D)) v, in float64, with D = 3 and Dv = 5."""
    for blocks in ((5, 7), (64, 64), (11, 13)):
        what = "attention in a tile of {} x {}".format(*blocks)
        _same_attention(flash_attention, _qkv(), False, *blocks, what=what)
    _same_attention(flash_attention, _qkv(dtype=torch.float32), what="attention in float32")
    _same_attention(flash_attention, _qkv(B=1, H=3, D=7, Dv=2), what="attention with D=7, Dv=2")


def test_any_sizes_in_any_tiles(flash_attention):
    """5 queries in tiles of 2 and 7 keys in tiles of 3: the last tiles are smaller, and the result is the same."""
    for T, S, block_q, block_k in ((5, 7, 2, 3), (5, 7, 5, 1), (5, 7, 1, 7), (7, 5, 4, 4), (4, 6, 2, 3), (3, 11, 8, 2)):
        what = f"{T} queries and {S} keys in tiles of {block_q} x {block_k}"
        _same_attention(flash_attention, _qkv(T=T, S=S, salt=10), False, block_q, block_k, what=what)
    for T, S in ((1, 1), (1, 7), (5, 1)):
        _same_attention(flash_attention, _qkv(T=T, S=S, salt=11), False, 2, 3, what=f"{T} queries and {S} keys")
    for causal in (False, True):
        what = f"70 queries and 67 keys, the block sizes' defaults, causal={causal}"
        _same_attention(flash_attention, _qkv(B=1, H=1, T=70, S=67, salt=12), causal=causal, what=what)


def test_the_maximum_may_move(flash_attention):
    """Scores near -1000, 0 and 1000, tile by tile, in any order: no overflow, and old sums are rescaled."""
    for order in ORDERS:
        for block_k in (2, 1, 8):
            what = f"first scores near {', '.join(f'{1000 * x:g}' for x in order)}, block_k={block_k}"
            _same_attention(flash_attention, _moving(order), False, 5, block_k, what=what)
    q, k, v = _qkv(T=3, S=17, salt=21)
    _same_attention(flash_attention, (q * 3, k * 3, v), False, 3, 1, what="17 tiles of one key")
    qkv = _moving(ORDERS[0], torch.float32)
    what = "first scores near -1000, 0, 1000, in float32"
    got = _several(flash_attention(*qkv, False, 5, 2), ("out", "logsumexp"), what)
    for name, g, w in zip(("out", "logsumexp"), got, _attention(*qkv), strict=True):
        same(g.isfinite(), torch.ones(w.shape, dtype=torch.bool), f"finite numbers in {name} of {what}")
        apart = (g - w).abs().max().item()
        expect(apart < 0.05, f"{name} of {what}: expected the whole row's, got {apart:.3g} more or less")


def test_the_future_is_hidden(flash_attention):
    """With causal=True query i of the last T tokens sees keys 0 ... S - T + i: all where T = 1, a triangle at T = S."""
    for T, S, *tiles in (
        (5, 7, (2, 3), (3, 2)),
        (5, 5, (2, 3), (1, 1)),
        (1, 7, (2, 3)),
        (3, 11, (2, 4)),
        (6, 6, (3, 3)),
    ):
        for blocks in (*tiles, (64, 64)):
            what = f"{T} causal queries and {S} keys, tiles of {blocks[0]} x {blocks[1]}"
            _same_attention(flash_attention, _qkv(B=1, T=T, S=S, salt=30), True, *blocks, what=what)


def test_blind_queries_get_nothing(flash_attention):
    """7 causal queries and 3 keys: the first 4 see nothing. Their out is 0, their logsumexp -inf; no NaN."""
    qkv = _qkv(T=7, S=3, salt=40)
    for blocks in ((2, 2), (7, 1), (5, 2), (64, 64)):
        what = "7 causal queries and 3 keys, tiles of {} x {}".format(*blocks)
        _same_attention(flash_attention, qkv, True, *blocks, what=what)
    _same_attention(flash_attention, _qkv(T=3, S=1, salt=41), True, what="3 causal queries and a single key")


def test_query_heads_share_a_key_head(flash_attention):
    """6 query heads on 2 key heads: heads 0-2 read key head 0, heads 3-5 key head 1; likewise on 3, and on 1."""
    for K, tiles in ((2, ((2, 3), (64, 64))), (3, ((3, 4),)), (1, ((3, 4),)), (6, ((3, 4),))):
        for causal, blocks in itertools.product((False, True), tiles):
            what = f"6 query heads on {K} key heads, causal={causal}, tiles of {blocks[0]} x {blocks[1]}"
            _same_attention(flash_attention, _qkv(H=6, K=K, salt=50), causal, *blocks, what=what)
    _same_attention(flash_attention, _qkv(H=4, K=2, T=4, S=2), True, 3, 1, what="grouped heads with blind queries")


def test_half_precision_is_rounded_at_the_end(flash_attention):
    """In float16 or bfloat16 all is computed in float32: out is rounded once, at the end, and logsumexp not at all."""
    for dtype in HALVES:
        q, k, v = _qkv(T=7, S=23, D=5, salt=60, dtype=dtype)
        out, logsumexp = _attention(4 * q, k, v)
        what = f"attention in {dtype}"
        got = _several(flash_attention(4 * q, k, v, block_q=8, block_k=1), ("out", "logsumexp"), what)
        same(got[1], logsumexp.float(), f"logsumexp of {what}")
        _rounded_once(got[0], out, dtype, f"out of {what}")


def test_layouts_and_arguments(flash_attention):
    """Transposed (non-contiguous) inputs, arguments by position or by name: the same; causal only if asked."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in _qkv(H=4, K=2, salt=65))
    for options in ({}, {"causal": True}, {"causal": True, "block_k": 2}, {"block_q": 3, "block_k": 2}):
        _same_attention(flash_attention, (q, k, v), what=f"transposed inputs with {options}", **options)
    wide = _qkv(T=10, S=14, D=6, salt=66)
    sliced = [x[:, :, ::2, ::3] for x in wide]
    _same_attention(flash_attention, sliced, True, 2, 3, what="inputs that are every second row of larger ones")
    by_name = {"v": v, "k": k, "q": q, "block_k": 3, "block_q": 2, "causal": True}
    got = _several(flash_attention(**by_name), ("out", "logsumexp"), "attention with all arguments by name")
    for name, g, w in zip(("out", "logsumexp"), got, _attention(q, k, v, True), strict=True):
        same(g, w, f"{name} with all arguments by name")


def test_no_tensor_has_all_scores(flash_attention):
    """96 queries and keys in tiles of 16 x 16: no tensor of 96 x 96 scores, and none as a mask either."""
    for n, causal in ((64, True), (96, False)):
        meter = _forward_meter(flash_attention, n, causal)
        _expect_small(meter, n, f"attention, causal={causal},")
    _expect_linear(_forward_meter(flash_attention, 32, False), meter, "attention")


def test_future_tiles_are_skipped(flash_attention):
    """With causal=True tiles that lie in the future cost nothing: 10 of 16 tiles are left."""
    _expect_spared(*(_forward_meter(flash_attention, 64, causal) for causal in (True, False)), "attention")


# flash_attention_backward --------------------------------------------------------------------------------------------

NAMES = ("dq", "dk", "dv")


def _given(q, k, v, causal=False):
    """grad_out, q, k, v, out and logsumexp, as a forward pass leaves them."""
    out, logsumexp = _attention(q, k, v, causal)
    wide = torch.promote_types(q.dtype, torch.float32)
    return [random_gradient(out.shape, q.dtype), q, k, v, out.to(q.dtype), logsumexp.to(wide)]


def _gradients(grad_out, q, k, v, causal):
    """dq, dk and dv by torch's own backward pass through the whole computation, in float64."""
    leaves = [x.double().clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(_attention(*leaves, causal)[0], leaves, grad_out.double())


def _same_gradients(flash_attention_backward, given, *args, what, **kwargs):
    """Compare with torch's own. The first of args or `causal` says whether it is causal."""
    got = _several(flash_attention_backward(*given, *args, **kwargs), NAMES, what)
    want = _gradients(*given[:4], args[0] if args else kwargs.get("causal", False))
    for name, g, w in zip(NAMES, got, want, strict=True):
        same(g, w.to(given[1].dtype), f"{name} of {what}")


def _even(dtype):
    """Inputs in half precision whose out has no rounding error: all scores are 0, and the 64 values even out."""
    q, k, v = _qkv(B=1, H=4, K=2, T=17, S=64, D=4, salt=170, dtype=dtype)
    q[..., 2:], k[..., :2] = 0.0, 0.0
    return q, k, (v * 3).round()


def probe_flash_attention_backward(flash_attention_backward):
    """Results that tell the known mistakes apart."""

    def ask(qkv, *args):
        given = _given(*qkv, args[0] if args else False)
        return _parts(3, lambda: flash_attention_backward(*given, *args))

    even = _given(*_even(torch.float16))
    half = _parts(3, lambda: flash_attention_backward(*even, False, 5, 8))
    want = _gradients(*even[:4], False)
    rounded = None  # where the gradients are not even nearly right
    if alike(half, [w.half() for w in want]):
        rounded = not any(_too_wide(g, w).any() for g, w in zip(half, want, strict=True))
    qkv = _qkv(salt=100)
    return [
        *ask(qkv, False, 5, 7),
        *ask(qkv, False, 3, 3),
        *ask(qkv, True, 3, 3),
        *ask(qkv, True, 5, 7),
        *ask(_qkv(T=5, S=5, salt=105), True, 2, 3),
        *ask(_qkv(T=7, S=3, salt=105), True, 5, 2),
        *ask(_qkv(H=6, K=2, salt=110), False, 5, 4),
        *ask(_moving(ORDERS[0]), False, 5, 2),
        *half,
        rounded,
        *_parts(4, lambda: _habits(_backward_meter, flash_attention_backward)),
    ]


def test_two_keys_backward_by_hand(flash_attention_backward):
    """Weights 1/4 and 3/4 of the values 0 and 4: dv is 1/4 and 3/4, the scores' gradients are -3/4 and 3/4."""
    q, k, v = _lines(2.0), _lines(0.0, math.log(3.0)), torch.tensor([0.0, 4.0]).view(1, 1, 2, 1)
    out, logsumexp, ones = torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), math.log(4.0)), torch.ones(1, 1, 1, 1)
    for blocks in ((), (False, 1, 1)):
        what = "two keys in one tile" if not blocks else "two keys in two tiles"
        got = flash_attention_backward(ones, q, k, v, out, logsumexp, *blocks)
        dq, dk, dv = _several(got, NAMES, f"flash_attention_backward of {what}")
        same(dv, torch.tensor([0.25, 0.75]).view(1, 1, 2, 1), f"dv of {what}")
        same(dq, _lines(0.75 * math.log(3.0) / 2), f"dq of {what}")
        same(dk, _lines(-0.75, 0.75), f"dk of {what}")


def test_one_tile_gives_torchs_gradients(flash_attention_backward):
    """Where one tile holds all, dq, dk and dv are torch's own gradients, in float64, with D = 3 and Dv = 5."""
    for blocks in ((5, 7), (64, 64)):
        given = _given(*_qkv(salt=100))
        what = "attention in a tile of {} x {}".format(*blocks)
        _same_gradients(flash_attention_backward, given, False, *blocks, what=what)
    given = _given(*_qkv(B=1, H=3, D=7, Dv=2, salt=101))
    _same_gradients(flash_attention_backward, given, what="attention with D=7, Dv=2")


def test_gradients_add_up_over_tiles(flash_attention_backward):
    """5 queries in tiles of 2 and 7 keys in tiles of 3: dq adds up over key tiles, dk and dv over query tiles."""
    for T, S, block_q, block_k in ((5, 7, 2, 3), (5, 7, 5, 1), (5, 7, 1, 7), (7, 5, 4, 4), (4, 6, 2, 3)):
        what = f"{T} queries and {S} keys in tiles of {block_q} x {block_k}"
        given = _given(*_qkv(T=T, S=S, salt=110))
        _same_gradients(flash_attention_backward, given, False, block_q, block_k, what=what)
    for T, S in ((1, 1), (1, 7), (5, 1)):
        given = _given(*_qkv(T=T, S=S, salt=111))
        _same_gradients(flash_attention_backward, given, False, 2, 3, what=f"{T} queries and {S} keys")
    for causal in (False, True):
        what = f"70 queries and 67 keys, the block sizes' defaults, causal={causal}"
        given = _given(*_qkv(B=1, H=1, T=70, S=67, salt=112), causal)
        _same_gradients(flash_attention_backward, given, causal=causal, what=what)


def test_no_gradient_from_the_future(flash_attention_backward):
    """With causal=True a key gets gradients only from the queries that see it: T < S, and T = S."""
    for T, S, *tiles in ((5, 7, (2, 3), (3, 2)), (5, 5, (2, 3), (1, 1)), (1, 7, (2, 3)), (6, 6, (3, 3))):
        given = _given(*_qkv(B=1, T=T, S=S, salt=120), True)
        for blocks in (*tiles, (64, 64)):
            what = f"{T} causal queries and {S} keys, tiles of {blocks[0]} x {blocks[1]}"
            _same_gradients(flash_attention_backward, given, True, *blocks, what=what)


def test_blind_queries_get_no_gradient(flash_attention_backward):
    """7 causal queries and 3 keys: the first 4 see nothing (logsumexp -inf). Their dq is 0, and nothing is NaN."""
    given = _given(*_qkv(T=7, S=3, salt=130), True)
    for blocks in ((2, 2), (7, 1), (5, 2), (64, 64)):
        what = "7 causal queries and 3 keys, tiles of {} x {}".format(*blocks)
        _same_gradients(flash_attention_backward, given, True, *blocks, what=what)


def test_key_heads_sum_over_their_group(flash_attention_backward):
    """6 query heads on 2 key heads: dk and dv of a key head sum over the 3 heads that read it; likewise on 3, and 1."""
    for K, tiles in ((2, ((2, 3), (64, 64))), (3, ((3, 4),)), (1, ((3, 4),))):
        for causal, blocks in itertools.product((False, True), tiles):
            what = f"6 query heads on {K} key heads, causal={causal}, tiles of {blocks[0]} x {blocks[1]}"
            given = _given(*_qkv(B=1, H=6, K=K, salt=140), causal)
            _same_gradients(flash_attention_backward, given, causal, *blocks, what=what)
    given = _given(*_qkv(H=4, K=2, T=4, S=2, salt=141), True)
    _same_gradients(flash_attention_backward, given, True, 3, 1, what="grouped heads with blind queries")


def test_weights_come_from_the_logsumexp(flash_attention_backward):
    """Scores near -1000, 0 and 1000, tile by tile: exp(score - logsumexp) does not overflow and knows the whole row."""
    for order in ORDERS:
        given = _given(*_moving(order))
        what = f"first scores near {', '.join(f'{1000 * x:g}' for x in order)}"
        _same_gradients(flash_attention_backward, given, False, 3, 2, what=what)
    given = _given(*_qkv(salt=150, dtype=torch.float32), True)
    _same_gradients(flash_attention_backward, given, True, 2, 3, what="causal attention in float32")


def test_half_precision_gradients(flash_attention_backward):
    """In float16 or bfloat16 all is computed in float32, and dq, dk, dv are rounded once, at the end, to q's dtype."""
    for dtype in HALVES:
        given = _given(*_even(dtype))
        what = f"attention in {dtype}"
        got = _several(flash_attention_backward(*given, False, 5, 8), NAMES, what)
        for name, g, w in zip(NAMES, got, _gradients(*given[:4], False), strict=True):
            _rounded_once(g, w, dtype, f"{name} of {what}")
        given = _given(*_qkv(H=4, K=2, salt=151, dtype=dtype), True)
        _same_gradients(flash_attention_backward, given, True, 2, 3, what=f"causal grouped attention in {dtype}")


def test_backward_layouts_and_arguments(flash_attention_backward):
    """Transposed inputs, a grad_out that is one number expanded, arguments by name: the gradients are the same."""
    for options in ({}, {"causal": True}, {"causal": True, "block_k": 2}, {"block_q": 3, "block_k": 2}):
        given = _given(*_qkv(H=4, K=2, salt=160), options.get("causal", False))
        given[:5] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given[:5]]
        _same_gradients(flash_attention_backward, given, what=f"transposed inputs with {options}", **options)
    given = _given(*_qkv(salt=161), True)
    given[0] = torch.ones((), dtype=torch.float64).expand_as(given[0])
    _same_gradients(flash_attention_backward, given, True, 2, 3, what="a grad_out of ones, expanded")
    by_name = dict(zip(("grad_out", "q", "k", "v", "out", "logsumexp"), given, strict=True))
    by_name |= {"block_k": 3, "block_q": 2, "causal": True}
    got = _several(flash_attention_backward(**by_name), NAMES, "gradients with all arguments by name")
    for name, g, w in zip(NAMES, got, _gradients(*given[:4], True), strict=True):
        same(g, w, f"{name} with all arguments by name")


def test_no_tensor_has_all_weights(flash_attention_backward):
    """96 queries and keys in tiles of 16 x 16: no tensor of 96 x 96 weights is made, and none as a mask either."""
    for n, causal in ((64, True), (96, False)):
        meter = _backward_meter(flash_attention_backward, n, causal)
        _expect_small(meter, n, f"gradients, causal={causal},")
    _expect_linear(_backward_meter(flash_attention_backward, 32, False), meter, "gradients")


def test_future_tiles_need_no_gradient(flash_attention_backward):
    """With causal=True tiles that lie in the future cost nothing: 10 of 16 tiles are left."""
    _expect_spared(*(_backward_meter(flash_attention_backward, 64, causal) for causal in (True, False)), "gradients")
