"""The checks of chapter 04: heads, grouped heads, multi-head attention. Outside truth: torch, float64."""

import torch
import torch.nn.functional as F
from torch import nn

from .same import (
    Broken,
    expect,
    filled,
    gradients,
    is_exception,
    outcome,
    parameters_named,
    raises,
    random_gradient,
    rng,
    same,
)
from .toys import LayerCache, ListCache

# What a piece may not call, since it is torch's version of the same thing.
FORBIDDEN = {"MultiHeadAttention": [F.multi_head_attention_forward, "aten::_native_multi_head_attention"]}

B, T, S, C = 2, 5, 7, 12


def _x(*shape, salt=0, dtype=torch.float32):
    return torch.randn(shape, generator=rng(salt)).to(dtype)


# split_heads, merge_heads, repeat_kv ---------------------------------------------------------------------------------


def probe_split_heads(split_heads):
    """Results that tell the known mistakes apart."""
    return [
        outcome(lambda: split_heads(_x(2, 5, 21), 3)),
        outcome(lambda: split_heads(_x(2, 5, 21), 4)),
        outcome(lambda: split_heads(_x(2, 5, 7), 1)),
    ]


def test_two_heads_by_hand(split_heads):
    """Features 0-2 of every token go to head 0, features 3-5 to head 1."""
    x = torch.arange(12).view(1, 2, 6)  # two tokens: 0 ... 5 and 6 ... 11
    want = torch.tensor([[[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]])
    same(split_heads(x, 2), want, "split_heads of two tokens")


def test_each_head_sees_every_token(split_heads):
    """(B, T, H*D) becomes (B, H, T, D), and head h holds the h-th block of features of all tokens."""
    x = _x(2, 5, 21)
    same(split_heads(x, 3), torch.stack(x.split(7, dim=-1), dim=1), "split_heads(x, 3)")


def test_one_head_takes_all(split_heads):
    """A single head takes the whole width."""
    x = _x(2, 5, 7)
    same(split_heads(x, 1), x[:, None], "split_heads(x, 1)")


def test_split_takes_any_layout(split_heads):
    """A transposed (non-contiguous) input, one token, half precision: the same rule."""
    x = _x(2, 6, 5).transpose(1, 2)
    same(split_heads(x, 2), torch.stack(x.split(3, dim=-1), dim=1), "split_heads of a non-contiguous x")
    x = _x(1, 1, 6).half()
    same(split_heads(x, 3), x.view(1, 3, 1, 2), "split_heads of one token")
    for shape, n_heads in (((1, 5, 6), 2), ((2, 1, 6), 6), ((2, 2, 4), 2), ((2, 3, 22), 11)):
        x = _x(*shape, dtype=torch.float64)
        same(split_heads(x, n_heads), torch.stack(x.chunk(n_heads, -1), 1), f"split_heads of {shape} into {n_heads}")


def test_split_passes_the_gradient_on(split_heads):
    """The gradient of each feature is that of its place in its head."""
    (got,) = gradients(lambda x: split_heads(x, 3), _x(2, 5, 21))
    same(got, torch.cat(random_gradient((2, 3, 5, 7)).unbind(1), dim=-1), "gradient of split_heads")


def test_heads_must_divide_the_width(split_heads):
    """A width that does not divide into the heads is a ValueError."""
    same(split_heads(_x(2, 5, 21), 21), _x(2, 5, 21).mT[..., None], "split_heads of width 21 into 21 heads")
    raises(ValueError, lambda: split_heads(_x(2, 5, 21), 4), "split_heads of width 21 into 4 heads")
    raises(ValueError, lambda: split_heads(_x(2, 5, 2), 4), "split_heads of width 2 into 4 heads")


def probe_merge_heads(merge_heads):
    """Results that tell the known mistakes apart."""
    return [
        outcome(lambda: merge_heads(_x(2, 3, 5, 7))),
        outcome(lambda: merge_heads(_x(2, 5, 3, 7).transpose(1, 2))),
        outcome(lambda: merge_heads(_x(2, 3, 1, 7))),
    ]


def test_merge_by_hand(merge_heads):
    """Each token gets its heads side by side, head 0 first."""
    x = torch.tensor([[[[0, 1], [10, 11]], [[2, 3], [12, 13]]]])  # (1, 2 heads, 2 tokens, 2)
    same(merge_heads(x), torch.tensor([[[0, 1, 2, 3], [10, 11, 12, 13]]]), "merge_heads of two heads")


def test_merge_keeps_tokens_apart(merge_heads):
    """(B, H, T, D) becomes (B, T, H*D): a token's row holds that token's heads and nothing else."""
    x = _x(2, 3, 5, 7)
    want = torch.cat(x.unbind(1), dim=-1)
    same(merge_heads(x), want, "merge_heads(x)")


def test_merge_undoes_split(merge_heads):
    """Merging what was split gives the input back, whatever the memory layout."""
    x = _x(2, 5, 21)
    split = x.view(2, 5, 3, 7).transpose(1, 2)
    same(merge_heads(split), x, "merge_heads of split heads")
    same(merge_heads(split.contiguous()), x, "merge_heads of split heads, contiguous")
    same(merge_heads(_x(2, 1, 5, 7)), _x(2, 1, 5, 7)[:, 0], "merge_heads of a single head")
    for shape in ((1, 5, 3, 7), (2, 3, 1, 7), (1, 1, 1, 1), (2, 11, 3, 1), (3, 3, 3, 3)):
        for dtype in (torch.float64, torch.bfloat16):
            x = _x(*shape, dtype=dtype)
            same(merge_heads(x), torch.cat(x.unbind(1), dim=-1), f"merge_heads of {shape} in {dtype}")


def test_merge_passes_the_gradient_on(merge_heads):
    """The gradient of each head is that of its block of features."""
    (got,) = gradients(merge_heads, _x(2, 3, 5, 7))
    same(got, torch.stack(random_gradient((2, 5, 21)).chunk(3, dim=-1), dim=1), "gradient of merge_heads")


def probe_repeat_kv(repeat_kv):
    """Results that tell the known mistakes apart."""
    x = _x(2, 3, 5, 7).requires_grad_()
    return [
        outcome(lambda: repeat_kv(_x(2, 3, 5, 7), 2)),
        outcome(lambda: repeat_kv(_x(2, 3, 5, 7), 1)),
        outcome(lambda: torch.autograd.grad(repeat_kv(x, 2).square().sum(), x)),
    ]


def test_copies_stand_together(repeat_kv):
    """Heads a, b repeated twice are a, a, b, b: query heads 0 and 1 share key head 0."""
    x = torch.tensor([1, 2, 3]).view(1, 3, 1, 1)
    same(repeat_kv(x, 2).flatten(), torch.tensor([1, 1, 2, 2, 3, 3]), "heads of repeat_kv of heads 1, 2, 3")


def test_query_head_reads_its_group(repeat_kv):
    """(B, K, S, D) becomes (B, K*n, S, D), and head h is key head h // n."""
    x = _x(2, 3, 5, 7)
    want = torch.stack([x[:, h // 4] for h in range(12)], dim=1)
    same(repeat_kv(x, 4), want, "repeat_kv(x, 4)")


def test_one_group_serves_all(repeat_kv):
    """One key head (multi-query) serves every query head; n_repeat = 1 changes nothing."""
    x = _x(2, 1, 5, 7)
    same(repeat_kv(x, 3), torch.cat([x, x, x], dim=1), "repeat_kv of a single head")
    x = _x(2, 5, 3, 7).transpose(1, 2)
    same(repeat_kv(x, 1), x, "repeat_kv(x, 1)")
    for shape, n in (((1, 2, 5, 7), 3), ((3, 2, 1, 7), 2), ((3, 5, 3, 1), 6), ((1, 1, 1, 1), 1)):
        x = _x(*shape, dtype=torch.bfloat16)
        want = torch.stack([x[:, h // n] for h in range(shape[1] * n)], dim=1)
        same(repeat_kv(x, n), want, f"repeat_kv of {shape}, {n} times")


def test_copies_agree_with_torch(repeat_kv):
    """Grouped attention by copied heads equals torch's own grouped attention."""
    q, k, v = _x(2, 6, 5, 7).double(), _x(2, 3, 5, 7, salt=1).double(), _x(2, 3, 5, 7, salt=2).double()
    got = F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2))
    same(got, F.scaled_dot_product_attention(q, k, v, enable_gqa=True), "torch's attention with repeated heads")


def test_repeated_heads_share_the_gradient(repeat_kv):
    """The gradient of a key head is the sum over the query heads that read it."""
    for n in (1, 2):
        (got,) = gradients(lambda x, n=n: repeat_kv(x, n), _x(2, 3, 5, 7, dtype=torch.float64))
        g = random_gradient((2, 3 * n, 5, 7), torch.float64)
        same(got, g.unflatten(1, (3, n)).sum(2), f"gradient of repeat_kv, {n} times")


# MultiHeadAttention --------------------------------------------------------------------------------------------------


def _module(MultiHeadAttention, *args, dtype=torch.float64, **kwargs):
    return filled(MultiHeadAttention(*args, **kwargs).to(dtype))


def _turned(x, positions, base):
    """Rotary positions by complex numbers, half-split pairs: x (B, H, T, D), positions (T,) or (B, T)."""
    D = x.shape[-1]
    frequency = base ** (-torch.arange(0, D, 2).double() / D)
    angle = positions.double()[..., None] * frequency
    angle = angle[:, None] if positions.ndim == 2 else angle
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def _torch_attention(module, n_heads, n_kv_heads, x, context=None, mask=None, positions=None, rope_base=None):
    """The whole computation by torch's own functions, with the weights of a module (or given by name)."""
    weights = module if isinstance(module, dict) else module.state_dict()
    source = x if context is None else context

    def project(name, rows, heads):
        y = F.linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        return torch.stack(y.chunk(heads, dim=-1), dim=1)

    q = project("q_proj", x, n_heads)
    k, v = project("k_proj", source, n_kv_heads), project("v_proj", source, n_kv_heads)
    if rope_base is not None:
        positions = torch.arange(x.shape[1]) if positions is None else positions
        q, k = _turned(q, positions, rope_base), _turned(k, positions, rope_base)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return F.linear(torch.cat(mixed.unbind(1), dim=-1), weights["o_proj.weight"], weights.get("o_proj.bias"))


def _causal(T, S=None):
    S = T if S is None else S
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)


def _in_chunks(module, x, sizes):
    """Feed x through the module a chunk at a time, with a cache and the causal mask."""
    cache, done, rows = LayerCache(), 0, []
    for size in sizes:
        mask = _causal(size, done + size)
        rows.append(module(x[:, done : done + size], mask=mask, cache=cache))
        done += size
    return torch.cat(rows, dim=1)


def _after_two(module, x):
    """The rest of x after a cache of its first two tokens, without a mask."""
    cache = LayerCache()
    module(x[:, :2], cache=cache)
    return module(x[:, 2:], cache=cache), cache.length


def probe_MultiHeadAttention(MultiHeadAttention):
    """Results that tell the known mistakes apart."""
    x, context = _x(B, T, C, dtype=torch.float64), _x(B, S, C, salt=1, dtype=torch.float64)

    def ask(*questions, n_heads=4, **options):
        """Put several questions to one module."""
        module = outcome(lambda: _module(MultiHeadAttention, C, n_heads, **options))
        if is_exception(module):
            return [module for _ in questions]
        return [outcome(lambda question=question: question(module)) for question in questions]

    def shapes(m):
        return {name: tuple(value.shape) for name, value in sorted(m.state_dict().items())}

    def learning(m):
        m(x).mean().backward()
        return m.q_proj.weight.grad

    wide = {"n_kv_heads": 2, "head_dim": 6}
    return [
        *ask(
            shapes,
            lambda m: m(x),
            lambda m: m(x, mask=_causal(T)),
            lambda m: m(x, context),
            lambda m: m(x, context, mask=_causal(T, S)),
            lambda m: _after_two(m, x),
            lambda m: m(x, mask=torch.zeros(T, T, dtype=torch.bool)),
            lambda m: m(x, context, cache=LayerCache()),
            learning,
        ),
        *ask(lambda m: m(x), bias=True),
        *ask(shapes, bias=True, **wide),
        *ask(lambda m: m(x), n_kv_heads=2),
        *ask(lambda m: m(x), lambda m: _in_chunks(m, x, [3, 1, 1]), **wide),
        *ask(
            lambda m: m(x),
            lambda m: m(x, positions=torch.arange(3, 3 + T) * 2),
            lambda m: m(x, context),
            lambda m: _in_chunks(m, x, [3, 1, 1]),
            rope_base=100.0,
            **wide,
        ),
        *ask(lambda m: m(x), rope_base=10.0, **wide),
        *ask(lambda m: None, n_kv_heads=3),
        *ask(lambda m: None, n_heads=5),
    ]


def test_four_projections(MultiHeadAttention):
    """q_proj, k_proj, v_proj and o_proj are there, without a bias: C x C each for four heads of C / 4."""
    shapes = {f"{name}_proj.weight": (12, 12) for name in "qkvo"}
    parameters_named(MultiHeadAttention(12, 4), shapes)
    parameters_named(MultiHeadAttention(12, 2, rope_base=100.0), shapes)
    fresh = MultiHeadAttention(12, 4)
    expect(all(p.requires_grad for p in fresh.parameters()), "expected parameters that learn (requires_grad)")


def test_fewer_key_heads_make_smaller_projections(MultiHeadAttention):
    """With 2 key heads and D = 5, q_proj makes H*D = 20 numbers, k_proj and v_proj K*D = 10; bias on all."""
    shapes = {"q_proj": (20, 12), "k_proj": (10, 12), "v_proj": (10, 12), "o_proj": (12, 20)}
    want = {f"{name}.weight": shape for name, shape in shapes.items()}
    want |= {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    parameters_named(MultiHeadAttention(12, 4, n_kv_heads=2, head_dim=5, bias=True), want)
    parameters_named(MultiHeadAttention(12, 4, 2, 5, True), want)


def test_equals_torch_multihead_attention(MultiHeadAttention):
    """With the same weights it computes what nn.MultiheadAttention computes, in float64."""
    module = _module(MultiHeadAttention, 12, 4, bias=True)
    theirs = nn.MultiheadAttention(12, 4, batch_first=True, dtype=torch.float64)
    state = module.state_dict()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([state[f"{name}_proj.weight"] for name in "qkv"]))
        theirs.in_proj_bias.copy_(torch.cat([state[f"{name}_proj.bias"] for name in "qkv"]))
        theirs.out_proj.weight.copy_(state["o_proj.weight"])
        theirs.out_proj.bias.copy_(state["o_proj.bias"])
    x = _x(B, T, C, dtype=torch.float64)
    same(module(x), theirs(x, x, x, need_weights=False)[0], "MultiHeadAttention(12, 4, bias=True)")


def test_one_token_is_its_own_value(MultiHeadAttention):
    """A single token can only read itself: its value, projected by o_proj."""
    module = _module(MultiHeadAttention, 12, 3)
    x = _x(B, 1, C, dtype=torch.float64)
    state = module.state_dict()
    same(module(x), x @ state["v_proj.weight"].T @ state["o_proj.weight"].T, "attention of one token")


def test_a_mask_reaches_every_head(MultiHeadAttention):
    """A (T, T) and a (B, 1, 1, T) mask, True where a query may look; without one everything is seen."""
    module = _module(MultiHeadAttention, 12, 4)
    x = _x(B, T, C, dtype=torch.float64)
    tokens = (torch.arange(T) < torch.tensor([[T], [2]])).view(B, 1, 1, T)
    own = torch.rand(B, 4, T, T, generator=rng(12)) < 0.5
    own[..., 0] = True
    for mask in (None, _causal(T), tokens, tokens & _causal(T), own, own[:, :1], own[0]):
        what = f"attention with a mask of shape {None if mask is None else tuple(mask.shape)}"
        same(module(x, mask=mask), _torch_attention(module, 4, 4, x, mask=mask), what)
    got = module(x, mask=torch.zeros(T, T, dtype=torch.bool))
    same(got, torch.zeros(B, T, C).double(), "attention of queries that may see nothing, without biases")


def test_modes_and_repeats_make_no_difference(MultiHeadAttention):
    """There is no dropout and no memory: train and eval, a first and a second call, give the same."""
    module = _module(MultiHeadAttention, 12, 4, 2, 6, rope_base=100.0)
    x, context = _x(B, T, C, dtype=torch.float64), _x(B, S, C, salt=1, dtype=torch.float64)
    first = module(x)
    module(_x(1, 3, C, salt=2, dtype=torch.float64), context=context[:1])
    same(module(x), first, "a second call with the same x")
    same(module.eval()(x), first, "the module in eval mode")
    want = _torch_attention(module, 4, 2, x, context, _causal(T, S))
    with torch.no_grad():
        same(module(x, context, _causal(T, S)), want, "the module in eval mode, without gradients, under a mask")


def test_the_future_stays_hidden(MultiHeadAttention):
    """Under a causal mask a changed token changes nothing before it, and does change what follows."""
    module = _module(MultiHeadAttention, 12, 4, n_kv_heads=2)
    x = _x(B, T, C, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3] += 5.0
    before, after = module(x, mask=_causal(T)), module(changed, mask=_causal(T))
    same(after[:, :3], before[:, :3], "rows 0-2 after token 3 was changed")
    expect(not torch.allclose(after[:, 4], before[:, 4]), "expected row 4 to follow token 3, got the same row")


def test_query_heads_share_key_heads(MultiHeadAttention):
    """Grouped (K = 2) and multi-query (K = 1) attention agree with torch's, in float64."""
    x = _x(B, T, C, dtype=torch.float64)
    for n_kv_heads in (2, 1):
        module = _module(MultiHeadAttention, 12, 4, n_kv_heads=n_kv_heads)
        same(
            module(x),
            _torch_attention(module, 4, n_kv_heads, x),
            f"4 query heads on {n_kv_heads} key heads",
        )


def test_heads_may_have_any_width(MultiHeadAttention):
    """H * D need not equal C: with head_dim = 7 the four heads are 28 wide in a model of 12."""
    module = _module(MultiHeadAttention, 12, 4, head_dim=7, bias=True)
    x = _x(B, T, C, dtype=torch.float64)
    same(module(x), _torch_attention(module, 4, 4, x), "attention with head_dim=7")
    module = _module(MultiHeadAttention, 10, 3, head_dim=4)
    x = _x(1, 10, T, dtype=torch.float64).mT
    same(module(x), _torch_attention(module, 3, 3, x), "d_model=10, 3 heads of 4, one non-contiguous sequence")


def test_cross_attention_reads_the_context(MultiHeadAttention):
    """Queries come from x, keys and values from the context; S != T, with and without a mask."""
    module = _module(MultiHeadAttention, 12, 4, n_kv_heads=2, bias=True)
    x, context = _x(B, T, C, dtype=torch.float64), _x(B, S, C, salt=1, dtype=torch.float64)
    padding = (torch.arange(S) < torch.tensor([[S], [3]])).view(B, 1, 1, S)
    for mask in (None, _causal(T, S), padding):
        want = _torch_attention(module, 4, 2, x, context, mask)
        same(module(x, context=context, mask=mask), want, "cross-attention")
    same(module(x, context), _torch_attention(module, 4, 2, x, context), "cross-attention, context by position")
    same(module(x, x), _torch_attention(module, 4, 2, x), "cross-attention to x itself")


def test_inputs_get_gradients(MultiHeadAttention):
    """x and the context get the gradients that torch's own functions give."""
    module = _module(MultiHeadAttention, 12, 4, n_kv_heads=2)
    inputs = _x(B, T, C, dtype=torch.float64), _x(B, S, C, salt=1, dtype=torch.float64)
    for given in (inputs[:1], inputs):
        leaves = [x.clone().requires_grad_() for x in given]
        got = torch.autograd.grad(module(*leaves).square().sum(), leaves, allow_unused=True)
        want = torch.autograd.grad(_torch_attention(module, 4, 2, *leaves).square().sum(), leaves)
        for name, g, w in zip(("x", "context"), got, want, strict=False):
            if g is None:
                raise Broken(f"expected a gradient of {name}, got none")
            same(g, w, f"gradient of {name}")


def test_rotation_by_position(MultiHeadAttention):
    """With rope_base, queries and keys are turned by their position (half-split pairs), values are not."""
    x = _x(B, T, C, dtype=torch.float32)
    for base in (100.0, 10_000.0):
        module = _module(MultiHeadAttention, 12, 4, 2, 6, rope_base=base, dtype=torch.float32)
        want = _torch_attention(module, 4, 2, x, rope_base=base)
        same(module(x), want, f"attention with rope_base={base:g}")
    for n_heads, n_kv_heads, head_dim in ((3, None, None), (3, 1, None), (2, None, 8), (4, 1, 2)):
        module = _module(MultiHeadAttention, 12, n_heads, n_kv_heads, head_dim, rope_base=100.0, dtype=torch.float32)
        want = _torch_attention(module, n_heads, n_kv_heads or n_heads, x, rope_base=100.0)
        same(module(x), want, f"rotary attention with H={n_heads}, K={n_kv_heads}, head_dim={head_dim}")


def test_positions_can_be_given(MultiHeadAttention):
    """Positions (T,) or (B, T) replace 0, 1, 2 ...; shifting all of them changes nothing, spreading them does."""
    module = _module(MultiHeadAttention, 12, 4, 2, 6, rope_base=100.0, dtype=torch.float32)
    x = _x(B, T, C, dtype=torch.float32)
    own = torch.stack([torch.arange(T) * 2, torch.arange(T) + 3])
    for positions in (torch.arange(T) * 3, own):
        want = _torch_attention(module, 4, 2, x, positions=positions, rope_base=100.0)
        same(module(x, positions=positions), want, f"attention at positions {positions.tolist()}")
    same(module(x, positions=torch.arange(T) + 5), module(x), "attention with all positions shifted by 5")
    by_place = module(x, None, _causal(T), torch.arange(T) * 3)
    want = _torch_attention(module, 4, 2, x, None, _causal(T), torch.arange(T) * 3, 100.0)
    same(by_place, want, "context, mask and positions given in this order")


def test_cross_attention_does_not_rotate(MultiHeadAttention):
    """In cross-attention nothing is turned: positions of two sequences do not compare."""
    module = _module(MultiHeadAttention, 12, 4, 2, 6, rope_base=100.0)
    x, context = _x(B, T, C, dtype=torch.float64), _x(B, S, C, salt=1, dtype=torch.float64)
    same(
        module(x, context=context),
        _torch_attention(module, 4, 2, x, context),
        "cross-attention with rope_base",
    )
    same(module(x, context=x), _torch_attention(module, 4, 2, x), "cross-attention with rope_base, to x itself")


def test_a_cache_changes_nothing(MultiHeadAttention):
    """Fed in chunks with a cache, the output equals one pass: all keys so far, the new ones included."""
    x = _x(B, T, C, dtype=torch.float64)
    module = _module(MultiHeadAttention, 12, 4, n_kv_heads=2)
    want = _torch_attention(module, 4, 2, x, mask=_causal(T))
    for sizes in ([T], [3, 1, 1], [1, 4]):
        same(_in_chunks(module, x, sizes), want, f"attention fed in chunks of {sizes}")
    tokens = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], dtype=torch.bool).view(B, 1, 1, T)
    cache = LayerCache()
    module(x[:, :4], mask=tokens[..., :4], cache=cache)
    got = module(x[:, 4:], mask=tokens, cache=cache)
    same(got, _torch_attention(module, 4, 2, x, mask=tokens)[:, 4:], "a new token under a padding mask, with a cache")


def test_the_cache_holds_key_heads(MultiHeadAttention):
    """The cache gets the K key heads, not H copies; and each cache is a memory of its own."""
    module = _module(MultiHeadAttention, 12, 4, 2, 5)
    x = _x(B, T, C, dtype=torch.float64)
    one, other = LayerCache(), LayerCache()
    for t in range(T):
        module(x[:, t : t + 1], cache=one)
        module(-x[:, t : t + 1], cache=other)
    for name, kept, sign in (("keys", one.keys, 1), ("values", one.values, 1), ("keys", other.keys, -1)):
        weight = module.state_dict()[f"{name[0]}_proj.weight"]
        want = torch.stack(F.linear(sign * x, weight).chunk(2, dim=-1), dim=1)
        same(kept, want, f"{name} in the cache")


def test_positions_follow_the_cache(MultiHeadAttention):
    """With a cache of n tokens the next one stands at position n, not 0, and old keys are not turned again."""
    x = _x(B, T, C, dtype=torch.float32)
    module = _module(MultiHeadAttention, 12, 4, 2, 6, rope_base=100.0, dtype=torch.float32)
    want = _torch_attention(module, 4, 2, x, mask=_causal(T), rope_base=100.0)
    for sizes in ([T], [3, 1, 1], [1, 4]):
        same(_in_chunks(module, x, sizes), want, f"rotary attention fed in chunks of {sizes}")
    long, cache = _x(B, 8, C, salt=3, dtype=torch.float32), ListCache()
    got = torch.cat([module(long[:, t : t + 1], cache=cache) for t in range(8)], dim=1)
    same(got, _torch_attention(module, 4, 2, long, mask=_causal(8), rope_base=100.0), "8 tokens, one at a time")
    cache = LayerCache()
    module(x[:, :3], positions=torch.arange(3), cache=cache)
    same(module(x[:, 3:4], cache=cache), want[:, 3:4], "token 3 after a cache filled at positions 0, 1, 2")
    positions, cache = torch.arange(T) * 3, LayerCache()
    module(x[:, :2], positions=positions[:2], cache=cache)
    got = module(x[:, 2:], positions=positions[2:], cache=cache)
    want = _torch_attention(module, 4, 2, x, positions=positions, rope_base=100.0)[:, 2:]
    same(got, want, "the rest at positions 6, 9, 12 after a cache filled at 0, 3")


def test_a_cache_without_a_mask_shows_everything(MultiHeadAttention):
    """Without a mask, also with a cache, every query sees every key so far."""
    x = _x(B, T, C, dtype=torch.float64)
    module = _module(MultiHeadAttention, 12, 4)
    got, length = _after_two(module, x)
    want = _torch_attention(module, 4, 4, x)[:, 2:]
    same(got, want, "the last 3 tokens after a cache of 2, without a mask")
    expect(length == T, f"expected {T} tokens in the cache, got {length}")


def test_what_cannot_be_is_an_error(MultiHeadAttention):
    """ValueError: 4 query heads on 3 key heads, a width of 10 for 3 heads, and a cache together with a context."""
    module = MultiHeadAttention(12, 4)
    raises(ValueError, lambda: MultiHeadAttention(12, 4, n_kv_heads=3), "MultiHeadAttention(12, 4, n_kv_heads=3)")
    raises(ValueError, lambda: MultiHeadAttention(10, 3), "MultiHeadAttention(10, 3)")
    x = _x(B, T, C)
    filled_cache = LayerCache()
    module(x, cache=filled_cache)
    for cache in (LayerCache(), filled_cache):
        raises(ValueError, lambda cache=cache: module(x, context=x, cache=cache), "a cache together with a context")


def test_every_weight_learns(MultiHeadAttention):
    """All four projections get the gradients that torch's own functions give, and none starts at zero."""
    fresh = MultiHeadAttention(12, 4)(_x(B, T, C))
    expect(bool(fresh.abs().sum() > 0), "expected a fresh module to give numbers, got zeros only")
    module = _module(MultiHeadAttention, 12, 4, n_kv_heads=2, bias=True)
    x = _x(B, T, C, dtype=torch.float64)
    module(x, mask=_causal(T)).square().sum().backward()
    got = {name: p.grad for name, p in module.named_parameters()}
    weights = {name: value.clone().requires_grad_() for name, value in module.state_dict().items()}
    _torch_attention(weights, 4, 2, x, mask=_causal(T)).square().sum().backward()
    for name, weight in weights.items():
        if got[name] is None:
            raise Broken(f"expected a gradient of {name}, got none")
        same(got[name], weight.grad, f"gradient of {name}")


def test_half_precision_stays(MultiHeadAttention):
    """A module in bfloat16 gives bfloat16, rotation and all."""
    module = _module(MultiHeadAttention, 12, 4, 2, 6, rope_base=100.0, dtype=torch.bfloat16)
    x = _x(B, T, C, dtype=torch.bfloat16)
    got = module(x)
    expect(got.dtype == torch.bfloat16, f"expected dtype torch.bfloat16, got {got.dtype}")
    expect(bool(got.isfinite().all()), "expected finite numbers in bfloat16, got NaN or inf")
    far = module(x, positions=torch.arange(T) + 1001)
    moved = ((far - got).norm() / got.norm()).item()
    expect(moved < 0.05, f"1001 positions further: expected the same output, got {moved:.0%} off: angles need float32")
