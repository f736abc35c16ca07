"""Mistakes that people make in a FlashAttention kernel: a right one with a few lines changed."""

import functools
import inspect
import linecache

from tfmlib.kernels import launch, tl, triton

from ..alternatives.flash_triton import plain_kernel
from . import wrong


@functools.cache
def _plain_with(*changes: tuple[str, str]):
    """The plain kernel of the alternatives, with each piece of its text replaced by another."""
    source = inspect.getsource(getattr(plain_kernel, "fn", plain_kernel))
    for right, mistaken in changes:
        if source.count(right) != 1:
            raise ValueError(f"expected once in the kernel, but found {source.count(right)} times: {right}")
        source = source.replace(right, mistaken)
    file = f"<plain kernel {abs(hash(changes)):x}>"  # Triton looks its text up there
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"tl": tl, "triton": triton, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return scope["plain_kernel"]


# Masks ----------------------------------------------------------------------------------------------------------------


@wrong(
    "flash_attention_triton",
    caught_by="test_any_number_of_queries_and_keys",
    hint="out is stored without a mask: a last tile that is not full overwrites what lies behind it. "
    "Store only where t < T.",
)
def store_without_mask(q, k, v, causal=False):
    kernel = _plain_with(("out_ptr.dtype.element_ty), mask=t[:, None] < T)", "out_ptr.dtype.element_ty))"))
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_any_number_of_queries_and_keys",
    hint="Keys and values are loaded without a mask: the last tile reads beyond their end. "
    "Load where key < S, and 0 elsewhere.",
)
def load_without_mask(q, k, v, causal=False):
    kernel = _plain_with(
        ("k_strides[3], mask=there, other=0.0)", "k_strides[3])"),
        ("v_strides[3], mask=there, other=0.0)", "v_strides[3])"),
    )
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_any_number_of_queries_and_keys",
    hint="The zeros that fill up the last tile of keys count as keys with score 0. "
    "Set the scores to -inf where key >= S before the maximum.",
)
def padding_counts_as_keys(q, k, v, causal=False):
    kernel = _plain_with(("seen = key[None, :] < S", "seen = key[None, :] < start + BLOCK_K"))
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_queries_are_the_last_tokens",
    hint="Query t sees the keys 0 to t, as if the queries were the first tokens. They are the last T of S: "
    "let it see the keys up to S - T + t.",
)
def causal_from_the_first_token(q, k, v, causal=False):
    kernel = _plain_with(
        ("(key[None, :] <= S - T + t[:, None])", "(key[None, :] <= t[:, None])"),
        ("tl.maximum(S - T + first + BLOCK_Q, 0)", "first + BLOCK_Q"),
    )
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_the_future_is_hidden",
    hint="`causal` makes no difference: every query sees all keys. "
    "Where it is set, hide the keys behind S - T + t, and end the loop there.",
)
def causal_ignored(q, k, v, causal=False):
    return launch(plain_kernel, q, k, v, False)


@wrong(
    "flash_attention_triton",
    caught_by="test_the_future_is_hidden",
    hint="The loop ends at the last key that a tile's queries see, but within the last tiles "
    "each query still sees all keys. There each score needs its own mask: key <= S - T + t.",
)
def only_whole_tiles_are_hidden(q, k, v, causal=False):
    kernel = _plain_with(("seen = seen & (key[None, :] <= S - T + t[:, None])", "seen = seen"))
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_the_future_is_hidden",
    hint="A query does not see its own token. Hide the keys after S - T + t, and not that one: `<=`, not `<`.",
)
def own_token_hidden(q, k, v, causal=False):
    kernel = _plain_with(("(key[None, :] <= S - T + t[:, None])", "(key[None, :] < S - T + t[:, None])"))
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_tiles_of_the_future_are_skipped",
    hint="Tiles of keys in the future are loaded and mixed in with weight 0. "
    "End the loop over keys at S - T + the tile's last query.",
)
def future_tiles_not_skipped(q, k, v, causal=False):
    kernel = _plain_with(("end = tl.minimum(S, tl.maximum(S - T + first + BLOCK_Q, 0))", "end = S"))
    return launch(kernel, q, k, v, causal)


# Queries that see nothing ---------------------------------------------------------------------------------------------


@wrong(
    "flash_attention_triton",
    caught_by="test_a_query_that_sees_nothing_gets_zero",
    hint="A query that sees nothing becomes NaN, from -inf - -inf and 0 / 0. "
    "Subtract 0 where the maximum is -inf, and divide by 1 where the total is 0.",
)
def blind_queries_are_nan(q, k, v, causal=False):
    kernel = _plain_with(
        ('tl.where(higher == -float("inf"), 0.0, higher)', "higher"),
        ("tl.where(total == 0.0, 1.0, total)", "total"),
    )
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_a_query_that_sees_nothing_gets_zero",
    hint="A query that sees nothing has the total 0, and 0 / 0 is NaN. Divide by 1 where the total is 0.",
)
def blind_queries_divided_by_zero(q, k, v, causal=False):
    return launch(_plain_with(("tl.where(total == 0.0, 1.0, total)", "total")), q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_a_query_that_sees_nothing_gets_zero",
    hint="Hidden scores are a large negative number, so a query that sees nothing gets the mean of the values. "
    "Take -inf, and guard against -inf - -inf.",
)
def hidden_scores_are_finite(q, k, v, causal=False):
    kernel = _plain_with(('scores * 1.4426950408889634, -float("inf"))', "scores * 1.4426950408889634, -1e6)"))
    return launch(kernel, q, k, v, causal)


# Online softmax -------------------------------------------------------------------------------------------------------


@wrong(
    "flash_attention_triton",
    caught_by="test_the_maximum_moves_from_tile_to_tile",
    hint="When the maximum rises, the mixed values of earlier tiles keep their old scale. "
    "Multiply them by exp(old maximum - new maximum) first.",
)
def values_not_rescaled(q, k, v, causal=False):
    return launch(_plain_with(("mixed = mixed * shrink[:, None]", "mixed = mixed")), q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_the_maximum_moves_from_tile_to_tile",
    hint="When the maximum rises, the total of earlier tiles keeps its old scale. "
    "Multiply it by exp(old maximum - new maximum) first.",
)
def total_not_rescaled(q, k, v, causal=False):
    return launch(_plain_with(("total = total * shrink + tl.sum(p, 1)", "total += tl.sum(p, 1)")), q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_two_keys_by_hand",
    hint="Scores are not scaled. Multiply them by 1 / sqrt(D).",
)
def without_scale(q, k, v, causal=False):
    return launch(_plain_with(("scale = 1.0 / tl.sqrt(D * 1.0)", "scale = 1.0")), q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_two_keys_by_hand",
    hint="exp2 is 2 ** x, not e ** x: the weights are too even. Multiply the scores by log2(e) = 1.4427, or use exp.",
)
def powers_of_two(q, k, v, causal=False):
    kernel = _plain_with(("scores * 1.4426950408889634", "scores"), (") * 0.6931471805599453", ")"))
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_sums_are_kept_in_float32",
    hint="The mixed values are summed in the inputs' half precision, which overflows and rounds. "
    "Keep sums in tl.float32, and round when you store.",
)
def sums_in_half_precision(q, k, v, causal=False):
    kernel = _plain_with(
        ("tl.zeros((BLOCK_Q, D), tl.float32)", "tl.zeros((BLOCK_Q, D), q.dtype)"),
        ("mixed = mixed * shrink[:, None]", "mixed = mixed * shrink[:, None].to(q.dtype)"),
        (
            'tl.dot(p.to(v.dtype), v, input_precision="ieee")',
            'tl.dot(p.to(v.dtype), v, input_precision="ieee").to(q.dtype)',
        ),
    )
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_logsumexp_is_stored_for_the_backward_pass",
    hint="logsumexp is stored in base 2, so all gradients are wrong. Multiply it by ln 2 = 0.6931.",
)
def logsumexp_in_base_two(q, k, v, causal=False):
    return launch(_plain_with((") * 0.6931471805599453", ")")), q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_logsumexp_is_stored_for_the_backward_pass",
    hint="logsumexp is never stored: the backward pass reads what happens to be in memory. "
    "Store maximum + log(total) to lse_ptr.",
)
def logsumexp_not_stored(q, k, v, causal=False):
    kernel = _plain_with(("    tl.store(lse_ptr + (b * H + h) * T + t, lse, mask=t < T)\n", ""))
    return launch(kernel, q, k, v, causal)


# Where things lie -----------------------------------------------------------------------------------------------------


@wrong(
    "flash_attention_triton",
    caught_by="test_query_heads_share_keys_in_groups",
    hint="Query heads take the key heads in turn: 0, 1, 0, 1. Neighbours share one: head h reads h // (H // K).",
)
def key_heads_in_turn(q, k, v, causal=False):
    return launch(_plain_with(("kv_head = h // (H // K)", "kv_head = h % K")), q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_the_future_is_hidden",
    hint="Program i starts at query i. It owns a whole tile: start at i * BLOCK_Q.",
)
def tiles_start_at_their_number(q, k, v, causal=False):
    return launch(_plain_with(("first = tl.program_id(0) * BLOCK_Q", "first = tl.program_id(0)")), q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_any_strides",
    hint="Rows are taken to lie D apart, and their elements side by side. "
    "Transposed and sliced tensors differ: multiply each index by its own stride.",
)
def strides_taken_for_granted(q, k, v, causal=False):
    kernel = _plain_with(
        ("q_ptr += b * q_strides[0] + h * q_strides[1]", "q_ptr += (b * H + h) * T * D"),
        ("k_ptr += b * k_strides[0] + kv_head * k_strides[1]", "k_ptr += (b * K + kv_head) * S * D"),
        ("v_ptr += b * v_strides[0] + kv_head * v_strides[1]", "v_ptr += (b * K + kv_head) * S * D"),
        ("out_ptr += b * out_strides[0] + h * out_strides[1]", "out_ptr += (b * H + h) * T * D"),
        ("t[:, None] * q_strides[2] + d[None, :] * q_strides[3]", "t[:, None] * D + d[None, :]"),
        ("key[:, None] * k_strides[2] + d[None, :] * k_strides[3]", "key[:, None] * D + d[None, :]"),
        ("key[:, None] * v_strides[2] + d[None, :] * v_strides[3]", "key[:, None] * D + d[None, :]"),
        ("t[:, None] * out_strides[2] + d[None, :] * out_strides[3]", "t[:, None] * D + d[None, :]"),
    )
    return launch(kernel, q, k, v, causal)


@wrong(
    "flash_attention_triton",
    caught_by="test_any_strides",
    hint="out is written with the strides of q. It has its own: use out_strides.",
)
def out_stored_by_the_strides_of_q(q, k, v, causal=False):
    kernel = _plain_with(
        ("out_ptr += b * out_strides[0] + h * out_strides[1]", "out_ptr += b * q_strides[0] + h * q_strides[1]"),
        (
            "t[:, None] * out_strides[2] + d[None, :] * out_strides[3]",
            "t[:, None] * q_strides[2] + d[None, :] * q_strides[3]",
        ),
    )
    return launch(kernel, q, k, v, causal)
