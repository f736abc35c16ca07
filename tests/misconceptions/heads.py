"""Mistakes that people make in splitting, merging and sharing heads, and in the whole of multi-head attention."""

import torch
from torch import nn

from tfmlib import attention, positions

from . import wrong

# split_heads ---------------------------------------------------------------------------------------------------------


def _divisible(x, n_heads):
    if x.shape[-1] % n_heads:
        raise ValueError("width must divide into heads")


@wrong(
    "split_heads",
    caught_by="test_two_heads_by_hand",
    hint="`view(B, H, T, D)` cuts the memory in the wrong order and mixes tokens. "
    "View as (B, T, H, D), then transpose axes 1 and 2.",
)
def split_by_view_alone(x, n_heads):
    _divisible(x, n_heads)
    B, T, width = x.shape
    return x.reshape(B, n_heads, T, width // n_heads)


@wrong(
    "split_heads",
    caught_by="test_two_heads_by_hand",
    hint="The head axis is still behind the tokens: (B, T, H, D). Transpose axes 1 and 2.",
)
def split_without_transpose(x, n_heads):
    _divisible(x, n_heads)
    B, T, width = x.shape
    return x.view(B, T, n_heads, width // n_heads)


@wrong(
    "split_heads",
    caught_by="test_two_heads_by_hand",
    hint="Head h takes every H-th feature. Heads are blocks of neighbours: view the width as (H, D), not (D, H).",
)
def split_interleaved(x, n_heads):
    _divisible(x, n_heads)
    B, T, width = x.shape
    return x.view(B, T, width // n_heads, n_heads).permute(0, 3, 1, 2)


@wrong(
    "split_heads",
    caught_by="test_two_heads_by_hand",
    hint="The last two axes are exchanged: each head is (D, T). Attention expects (T, D).",
)
def split_with_tokens_last(x, n_heads):
    _divisible(x, n_heads)
    B, T, width = x.shape
    return x.view(B, T, n_heads, width // n_heads).permute(0, 2, 3, 1)


@wrong(
    "split_heads",
    caught_by="test_heads_must_divide_the_width",
    hint="Features are dropped when the width does not divide into heads. That must be a ValueError.",
)
def split_dropping_features(x, n_heads):
    B, T, width = x.shape
    D = width // n_heads
    return x[..., : n_heads * D].reshape(B, T, n_heads, D).transpose(1, 2)


@wrong(
    "split_heads",
    caught_by="test_heads_must_divide_the_width",
    hint="A width that does not divide ends in torch's error about shapes. "
    "Check it first and raise a ValueError that names both numbers.",
)
def split_without_a_check(x, n_heads):
    B, T, width = x.shape
    return x.view(B, T, n_heads, width // n_heads).transpose(1, 2)


# merge_heads ---------------------------------------------------------------------------------------------------------


@wrong(
    "merge_heads",
    caught_by="test_merge_by_hand",
    hint="The heads are merged without moving them behind the tokens first, which mixes tokens. "
    "Transpose axes 1 and 2, then reshape.",
)
def merge_without_transpose(x):
    B, H, T, D = x.shape
    return x.reshape(B, T, H * D)


@wrong(
    "merge_heads",
    caught_by="test_merge_by_hand",
    hint="The features of the heads are interleaved. Each head's D numbers stay together: "
    "(B, T, H, D), not (B, T, D, H).",
)
def merge_interleaved(x):
    return x.permute(0, 2, 3, 1).flatten(2)


@wrong(
    "merge_heads",
    caught_by="test_merge_by_hand",
    hint="`view` cannot merge axes that a transpose has moved apart in memory. Use reshape, or contiguous() before it.",
)
def merge_by_view(x):
    B, H, T, D = x.shape
    return x.transpose(1, 2).view(B, T, H * D)


@wrong(
    "merge_heads",
    caught_by="test_merge_by_hand",
    hint="The heads are averaged, which throws away what they found apart. Put them side by side.",
)
def merge_by_mean(x):
    return x.float().mean(1).to(x.dtype)


@wrong(
    "merge_heads",
    caught_by="test_merge_by_hand",
    hint="The heads are added up. Put them side by side: (B, T, H*D).",
)
def merge_by_sum(x):
    return x.sum(1)


# repeat_kv -----------------------------------------------------------------------------------------------------------


@wrong(
    "repeat_kv",
    caught_by="test_copies_stand_together",
    hint="The heads come out as a, b, a, b. Query heads 0 and 1 share a: the order is a, a, b, b (repeat_interleave).",
)
def repeat_in_turn(x, n_repeat):
    return x.repeat(1, n_repeat, 1, 1)


@wrong(
    "repeat_kv",
    caught_by="test_query_head_reads_its_group",
    hint="The tokens are repeated. Repeat the heads: axis 1.",
)
def repeat_tokens(x, n_repeat):
    return x.repeat_interleave(n_repeat, dim=2)


@wrong(
    "repeat_kv",
    caught_by="test_query_head_reads_its_group",
    hint="The features are repeated. Repeat the heads: axis 1.",
)
def repeat_features(x, n_repeat):
    return x.repeat_interleave(n_repeat, dim=-1)


@wrong(
    "repeat_kv",
    caught_by="test_query_head_reads_its_group",
    hint="The copies stand on an axis of their own. Merge it with the head axis: (B, K * n_repeat, S, D).",
)
def repeat_on_a_new_axis(x, n_repeat):
    return x[:, :, None].expand(-1, -1, n_repeat, -1, -1)


@wrong(
    "repeat_kv",
    caught_by="test_query_head_reads_its_group",
    hint="Nothing is repeated.",
)
def repeat_nothing(x, n_repeat):
    return x.clone()


@wrong(
    "repeat_kv",
    caught_by="test_repeated_heads_share_the_gradient",
    hint="The copies are detached, so the key and value projections learn nothing.",
)
def repeat_detached(x, n_repeat):
    return x.detach().repeat_interleave(n_repeat, dim=1)


# MultiHeadAttention --------------------------------------------------------------------------------------------------
#
# The variants share a correct body whose steps are methods; each variant gets one step wrong.


def _split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class _Steps(nn.Module):
    def __init__(self, d_model, n_heads, n_kv_heads=None, head_dim=None, bias=False, rope_base=None):
        super().__init__()
        self.H = n_heads
        self.K = self.key_heads(n_heads, n_kv_heads)
        self.C, self.D, self.base = d_model, self.width(d_model, n_heads, head_dim), rope_base
        self.q_proj = nn.Linear(d_model, self.H * self.D, bias=bias)
        self.k_proj = nn.Linear(d_model, self.K * self.D, bias=bias)
        self.v_proj = nn.Linear(d_model, self.K * self.D, bias=bias)
        self.o_proj = nn.Linear(self.H * self.D, d_model, bias=bias)

    def key_heads(self, n_heads, n_kv_heads):
        n_kv_heads = n_kv_heads or n_heads
        if n_heads % n_kv_heads:
            raise ValueError("K must divide H")
        return n_kv_heads

    def width(self, d_model, n_heads, head_dim):
        if head_dim is None and d_model % n_heads:
            raise ValueError("H must divide C")
        return head_dim or d_model // n_heads

    def forward(self, x, context=None, mask=None, positions=None, cache=None):
        self.complain(context, cache)
        q, k, v = self.project(x, context)
        if self.base is not None and self.turns(context):
            start = self.start(cache)
            where = self.place(torch.arange(start, start + x.shape[1]), positions)
            q, k, v = self.turn(q, k, v, where)
        k, v = self.remember(k, v, cache)
        k, v = self.share(k), self.share(v)
        return self.finish(self.merge(self.attend(q, k, v, self.seen(mask, q, k))))

    def complain(self, context, cache):
        if context is not None and cache is not None:
            raise ValueError("cache or context, not both")

    def project(self, x, context):
        source = x if context is None else context
        return self.split(self.q_proj(x), self.H), self.split(self.k_proj(source), self.K), self.split_v(source)

    def split_v(self, source):
        return self.split(self.v_proj(source), self.K)

    def split(self, x, heads):
        return _split(x, heads)

    def turns(self, context):
        return context is None

    def start(self, cache):
        return 0 if cache is None else cache.length

    def place(self, default, positions):
        return default if positions is None else positions

    def turn(self, q, k, v, where):
        return positions.apply_rope(q, where, self.base), positions.apply_rope(k, where, self.base), v

    def remember(self, k, v, cache):
        return (k, v) if cache is None else cache.append(k, v)

    def share(self, x):
        return x.repeat_interleave(self.H // self.K, dim=1)

    def seen(self, mask, q, k):
        return mask

    def attend(self, q, k, v, mask):
        return attention.scaled_dot_product_attention(q, k, v, mask)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def finish(self, x):
        return self.o_proj(x)


@wrong(
    "MultiHeadAttention",
    caught_by="test_equals_torch_multihead_attention",
    hint="The heads are cut by `view(B, H, T, D)`, which mixes tokens. View as (B, T, H, D), then transpose.",
)
class HeadsByView(_Steps):
    def split(self, x, heads):
        return x.reshape(x.shape[0], heads, x.shape[1], -1)


@wrong(
    "MultiHeadAttention",
    caught_by="test_equals_torch_multihead_attention",
    hint="The heads are merged without moving them behind the tokens first, which mixes tokens: use `merge_heads`.",
)
class MergedWithoutTranspose(_Steps):
    def merge(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


@wrong(
    "MultiHeadAttention",
    caught_by="test_equals_torch_multihead_attention",
    hint="The scores are divided by the root of the whole width, C or H*D. "
    "Each head has scores of its own: divide by sqrt(D), the width of one head.",
)
class ScaledByModelWidth(_Steps):
    def attend(self, q, k, v, mask):
        return attention.scaled_dot_product_attention(q / self.H**0.5, k, v, mask)


@wrong(
    "MultiHeadAttention",
    caught_by="test_equals_torch_multihead_attention",
    hint="Attention runs across the heads of one token: the head axis must come before the tokens, (B, H, T, D).",
)
class AttentionAcrossHeads(_Steps):
    def attend(self, q, k, v, mask):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@wrong(
    "MultiHeadAttention",
    caught_by="test_one_token_is_its_own_value",
    hint="The output projection `o_proj` exists, but is not applied.",
)
class OutputNotProjected(_Steps):
    def finish(self, x):
        return x + 0 * self.o_proj(x) if x.shape[-1] == self.C else self.o_proj(x)


@wrong(
    "MultiHeadAttention",
    caught_by="test_one_token_is_its_own_value",
    hint="Values are taken from the keys' projection: v_proj is not used.",
)
class KeysAsValues(_Steps):
    def split_v(self, source):
        return self.split(self.k_proj(source), self.K)


@wrong(
    "MultiHeadAttention",
    caught_by="test_query_heads_share_key_heads",
    hint="Key heads are repeated as a, b, a, b. Neighbouring query heads share one: a, a, b, b, as `repeat_kv` does.",
)
class SharedInTurn(_Steps):
    def share(self, x):
        return x.repeat(1, self.H // self.K, 1, 1)


@wrong(
    "MultiHeadAttention",
    caught_by="test_fewer_key_heads_make_smaller_projections",
    hint="n_kv_heads is ignored: k_proj and v_proj make keys and values for all query heads.",
)
class KeyHeadsIgnored(_Steps):
    def key_heads(self, n_heads, n_kv_heads):
        return super().key_heads(n_heads, n_kv_heads) and n_heads


@wrong(
    "MultiHeadAttention",
    caught_by="test_fewer_key_heads_make_smaller_projections",
    hint="head_dim is ignored: heads are always C / H wide.",
)
class HeadWidthIgnored(_Steps):
    def width(self, d_model, n_heads, head_dim):
        return super().width(d_model, n_heads, None)


@wrong(
    "MultiHeadAttention",
    caught_by="test_a_mask_reaches_every_head",
    hint="The mask is not handed on to attention.",
)
class MaskForgotten(_Steps):
    def seen(self, mask, q, k):
        return None


@wrong(
    "MultiHeadAttention",
    caught_by="test_a_mask_reaches_every_head",
    hint="A causal mask is always added. Without a mask everything is seen: who calls decides, encoders need it so.",
)
class AlwaysCausal(_Steps):
    def seen(self, mask, q, k):
        T, S = q.shape[-2], k.shape[-2]
        causal = torch.ones(T, S, dtype=torch.bool).tril(max(S - T, 0))
        return causal if mask is None else mask & causal


@wrong(
    "MultiHeadAttention",
    caught_by="test_a_mask_reaches_every_head",
    hint="The sense of the mask is inverted: True means that a query may look.",
)
class MaskInverted(_Steps):
    def seen(self, mask, q, k):
        return None if mask is None else ~mask


@wrong(
    "MultiHeadAttention",
    caught_by="test_cross_attention_reads_the_context",
    hint="The context is ignored: keys and values must come from it.",
)
class ContextIgnored(_Steps):
    def project(self, x, context):
        return super().project(x, None)


@wrong(
    "MultiHeadAttention",
    caught_by="test_cross_attention_reads_the_context",
    hint="The query comes from the context. x asks, the context answers: queries from x, keys and values from context.",
)
class ContextAsQuery(_Steps):
    def project(self, x, context):
        return super().project(*((x, None) if context is None else (context, x)))


@wrong(
    "MultiHeadAttention",
    caught_by="test_cross_attention_reads_the_context",
    hint="Values come from x. In cross-attention keys and values both come from the context.",
)
class ValuesFromX(_Steps):
    def project(self, x, context):
        q, k, _ = super().project(x, context)
        return q, k, self.split_v(x)


@wrong(
    "MultiHeadAttention",
    caught_by="test_rotation_by_position",
    hint="rope_base is ignored: nothing is rotated.",
)
class NeverTurned(_Steps):
    def turn(self, q, k, v, where):
        return q, k, v


@wrong(
    "MultiHeadAttention",
    caught_by="test_rotation_by_position",
    hint="Only the queries are rotated. Turn the keys too: it is the difference of the angles that counts.",
)
class QueriesTurnedAlone(_Steps):
    def turn(self, q, k, v, where):
        return positions.apply_rope(q, where, self.base), k, v


@wrong(
    "MultiHeadAttention",
    caught_by="test_rotation_by_position",
    hint="The values are rotated too. Positions belong into the scores: turn queries and keys only.",
)
class ValuesTurned(_Steps):
    def turn(self, q, k, v, where):
        return tuple(positions.apply_rope(x, where, self.base) for x in (q, k, v))


@wrong(
    "MultiHeadAttention",
    caught_by="test_rotation_by_position",
    hint="Interleaved pairs (0, 1), (2, 3) are turned. This course pairs entry i with i + D/2: interleaved=False.",
)
class TurnedInterleaved(_Steps):
    def turn(self, q, k, v, where):
        return *(positions.apply_rope(x, where, self.base, interleaved=True) for x in (q, k)), v


@wrong(
    "MultiHeadAttention",
    caught_by="test_rotation_by_position",
    hint="rope_base is not handed on: the angles are those of the base 10,000.",
)
class BaseForgotten(_Steps):
    def turn(self, q, k, v, where):
        return positions.apply_rope(q, where), positions.apply_rope(k, where), v


@wrong(
    "MultiHeadAttention",
    caught_by="test_positions_can_be_given",
    hint="`positions` is ignored: the angles are always those of 0, 1, 2 ...",
)
class PositionsIgnored(_Steps):
    def place(self, default, positions):
        return default


@wrong(
    "MultiHeadAttention",
    caught_by="test_cross_attention_does_not_rotate",
    hint="Cross-attention rotates as well. Positions of two different sequences do not compare: do not turn there.",
)
class TurnedInCrossAttention(_Steps):
    def turns(self, context):
        return True

    def turn(self, q, k, v, where):
        return *(positions.apply_rope(x, torch.arange(x.shape[2]), self.base) for x in (q, k)), v


@wrong(
    "MultiHeadAttention",
    caught_by="test_positions_follow_the_cache",
    hint="With a cache every chunk starts again at position 0. It starts at cache.length, read before appending.",
)
class PositionsRestart(_Steps):
    def start(self, cache):
        return 0


@wrong(
    "MultiHeadAttention",
    caught_by="test_positions_follow_the_cache",
    hint="The keys are rotated after they come out of the cache, by the angles of the newest positions. "
    "Turn the new keys once, before appending them.",
)
class TurnedAfterTheCache(_Steps):
    def forward(self, x, context=None, mask=None, positions=None, cache=None):
        if cache is None or self.base is None:
            return super().forward(x, context, mask, positions, cache)
        self.complain(context, cache)
        q, k, v = self.project(x, None)
        end = cache.length + x.shape[1]
        k, v = cache.append(k, v)
        q, _, _ = self.turn(q, q, v, torch.arange(end - x.shape[1], end))
        where = torch.full((k.shape[2],), end - 1)
        where[-x.shape[1] :] = torch.arange(end - x.shape[1], end)
        _, k, _ = self.turn(k, k, v, where)
        k, v = self.share(k), self.share(v)
        return self.finish(self.merge(self.attend(q, k, v, mask)))


@wrong(
    "MultiHeadAttention",
    caught_by="test_a_cache_changes_nothing",
    hint="The cache is ignored: each chunk sees only itself.",
)
class CacheIgnored(_Steps):
    def remember(self, k, v, cache):
        if cache is not None:
            cache.append(k, v)
        return k, v

    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, mask if mask is None else mask[..., -k.shape[2] :])


@wrong(
    "MultiHeadAttention",
    caught_by="test_a_cache_without_a_mask_shows_everything",
    hint="With a cache and without a mask, a causal mask is added. None means: everything is seen, with a cache too.",
)
class CausalWithACache(_Steps):
    def remember(self, k, v, cache):
        self.cached = cache is not None
        return super().remember(k, v, cache)

    def seen(self, mask, q, k):
        if mask is None and self.cached:
            T, S = q.shape[-2], k.shape[-2]
            return torch.ones(T, S, dtype=torch.bool).tril(S - T)
        return mask


@wrong(
    "MultiHeadAttention",
    caught_by="test_what_cannot_be_is_an_error",
    hint="A cache together with a context is accepted. It must be a ValueError: the cache belongs to self-attention.",
)
class CacheAndContext(_Steps):
    def complain(self, context, cache):
        pass


@wrong(
    "MultiHeadAttention",
    caught_by="test_what_cannot_be_is_an_error",
    hint="4 query heads cannot share 3 key heads equally: raise a ValueError unless n_kv_heads divides n_heads.",
)
class AnyNumberOfKeyHeads(_Steps):
    def key_heads(self, n_heads, n_kv_heads):
        return n_kv_heads or n_heads


@wrong(
    "MultiHeadAttention",
    caught_by="test_what_cannot_be_is_an_error",
    hint="d_model need not divide into the heads here, and features are lost: without head_dim, raise a ValueError.",
)
class AnyWidth(_Steps):
    def width(self, d_model, n_heads, head_dim):
        return head_dim or d_model // n_heads


@wrong(
    "MultiHeadAttention",
    caught_by="test_fewer_key_heads_make_smaller_projections",
    hint="o_proj never has a bias. With bias=True all four projections have one.",
)
class OutputWithoutBias(_Steps):
    def __init__(self, d_model, n_heads, n_kv_heads=None, head_dim=None, bias=False, rope_base=None):
        super().__init__(d_model, n_heads, n_kv_heads, head_dim, bias, rope_base)
        self.o_proj = nn.Linear(self.H * self.D, d_model, bias=False)


@wrong(
    "MultiHeadAttention",
    caught_by="test_four_projections",
    hint="The projections have a bias although bias=False, the default.",
)
class AlwaysWithBias(_Steps):
    def __init__(self, d_model, n_heads, n_kv_heads=None, head_dim=None, bias=False, rope_base=None):
        super().__init__(d_model, n_heads, n_kv_heads, head_dim, True, rope_base)
