"""The checks of chapter 06: first weights, a decoder's inputs, GPT, Llama, an encoder, the encoder-decoder.

Outside truth: the same models written with torch's own functions, from weights by name, in float64. Positions may be
computed in float32 where weights are float64, so results are compared as float32 numbers.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tfmlib.models.encoder import EncoderConfig
from tfmlib.models.gpt import GPTConfig
from tfmlib.models.llama import LlamaConfig
from tfmlib.models.seq2seq import Seq2SeqConfig

from .same import Broken, expect, is_tensor, outcome, raises, random_gradient, rng, same
from .toys import ModelCache

# No piece of this chapter has a ready-made version in torch that keeps the parameters' names, so nothing is forbidden.
FORBIDDEN = {}


def _with_seed(make, salt=0):
    """What `make` returns, with torch's global generator seeded from ours, and left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=rng(salt))))
        return make()


def _some(names):
    """The first few of many names."""
    names = list(names)
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


# init_weights --------------------------------------------------------------------------------------------------------


def _layer(C, hidden):
    """The parts of one layer that matter here, under the course's names."""
    attention = {"q_proj": nn.Linear(C, C), "o_proj": nn.Linear(C, C, bias=False)}
    mlp = {"up": nn.Linear(C, hidden), "down": nn.Linear(hidden, C)}
    parts = {"attention": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), "norm1": nn.LayerNorm(C)}
    return nn.ModuleDict(parts)


def _toy(n_layers=2, C=64, hidden=128, V=97):
    """A toy model: an embedding, layers with two scaled ends each, and a head. Norms are not at 1 and 0."""
    parts = {"table": nn.Embedding(V, C), "layers": nn.ModuleList(_layer(C, hidden) for _ in range(n_layers))}
    toy = nn.ModuleDict({**parts, "head": nn.Linear(C, V)})
    for module in toy.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return toy


def _started(init_weights, make, salt=0, times=1):
    """A new toy after init_weights, and its state before."""

    def start():
        toy = make()
        before = {name: value.clone() for name, value in toy.state_dict().items()}
        for _ in range(times):
            init_weights(toy)
        return toy, before

    return _with_seed(start, salt)


def _drawn(toy, ends=("o_proj", "down")):
    """The weights of embeddings and linear layers: those of the scaled ends, and the others, by name."""
    scaled, plain = {}, {}
    for name, module in toy.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            (scaled if name.split(".")[-1] in ends else plain)[f"{name}.weight".lstrip(".")] = module.weight.detach()
    return scaled, plain


def _expect_spread(weights, std, tolerance=0.08):
    """Break the promise unless every weight has this standard deviation, and mean 0."""
    for name, w in weights.items():
        got = w.double().std().item()
        wrong = f"expected {name} to have a standard deviation near {std:.4g}, got {got:.4g}"
        expect(abs(got - std) < tolerance * std, wrong)
        mean = w.double().mean().item()
        expect(abs(mean) < 7 * std / math.sqrt(w.numel()), f"expected {name} to have mean 0, got {mean:.2g}")


def _spread(weights):
    """The standard deviation of all weights together, on a coarse scale: 0 means 0.02, two steps a factor of 2."""
    weights = [w.detach().double().flatten() for w in weights]
    std = torch.cat(weights).std().item() if weights else 0.0
    return round(2 * math.log2(std / 0.02)) if std > 0 else "constant"


def probe_init_weights(init_weights):
    """Results that tell the known mistakes apart."""

    def spreads(n_layers, C, hidden):
        toy, before = _started(init_weights, lambda: _toy(n_layers, C, hidden))
        scaled, plain = _drawn(toy)
        state = toy.state_dict()
        kinds = [_spread(w for name, w in scaled.items() if name.split(".")[-2] == end) for end in ("o_proj", "down")]
        return [
            kinds,
            _spread([w for name, w in plain.items() if name != "table.weight"]),
            _spread([plain["table.weight"]]),
            [bool((value != 0).any()) for name, value in state.items() if name.endswith(("proj.bias", "up.bias"))],
            [torch.equal(value, before[name]) for name, value in state.items() if "norm1" in name],
        ]

    def tails():
        toy, _ = _started(init_weights, lambda: nn.Linear(160, 160))
        return round(10 * (toy.weight.abs() > 2 * toy.weight.std()).double().mean().item(), 1)

    def untouched():
        toy, before = _started(init_weights, _others)
        return [torch.equal(value, before[name]) for name, value in sorted(toy.state_dict().items())]

    def names():
        toy, _ = _started(init_weights, _names_alike)
        scaled, plain = _drawn(toy)
        lookalike = plain.pop("down_path.0.weight")
        return [_spread(scaled.values()), _spread([lookalike]), _spread(plain.values())]

    def kept():
        toy = _with_seed(_toy)
        before = dict(toy.named_parameters())
        _with_seed(lambda: init_weights(toy))
        return [p is before[name] for name, p in toy.named_parameters()]

    return [
        *_spread_out(outcome(lambda: spreads(2, 64, 128)), 5),
        *_spread_out(outcome(lambda: spreads(8, 64, 64)), 5),
        outcome(tails),
        outcome(untouched),
        outcome(names),
        outcome(kept),
        outcome(lambda: _spread(_started(init_weights, lambda: nn.Sequential(nn.Linear(64, 64)))[0].parameters())),
    ]


def _spread_out(answer, n):
    """A list of n answers as they are; anything else n times."""
    return answer if isinstance(answer, list) else [answer] * n


def _others():
    """A module with parameters of other kinds: convolution, norm, plain parameters, a buffer; all at random."""
    toy = nn.ModuleDict({"convolution": nn.Conv1d(3, 5, 2), "norm": nn.LayerNorm(7), "batch": nn.BatchNorm1d(3)})
    toy["linear"] = nn.Linear(3, 5)
    toy.register_parameter("weight", nn.Parameter(torch.randn(3, 5)))
    toy.register_parameter("bias", nn.Parameter(torch.randn(5)))
    toy.register_buffer("table", torch.randn(5, 3))
    for module in (toy["norm"], toy["batch"]):
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
    return toy


def _names_alike(C=64):
    """Four layers called o_proj and one called down, two of the five at the top, beside names that only look alike."""
    parts = {name: nn.Linear(C, C) for name in ("o_proj", "down", "up", "gate", "out", "proj")}
    parts |= {name: nn.ModuleDict({"o_proj": nn.Linear(C, C)}) for name in ("self", "cross", "third")}
    return nn.ModuleDict({**parts, "down_path": nn.ModuleList([nn.Linear(C, C)])})


def test_weights_are_small_and_normal(init_weights):
    """Linear and embedding weights are drawn from a normal distribution of mean 0 and standard deviation 0.02."""
    toy, _ = _started(init_weights, lambda: _toy(n_layers=1))
    _, plain = _drawn(toy)
    _expect_spread(plain, 0.02)
    toy, _ = _started(init_weights, lambda: nn.Sequential(nn.Embedding(160, 160), nn.ReLU(), nn.Linear(160, 160)))
    for name, w in _drawn(toy)[1].items():
        _expect_spread({name: w}, 0.02, tolerance=0.05)
        share = (w.abs() > 0.04).double().mean().item()
        said = f"{name}: expected about 4.6% of the weights beyond 0.04, as in a normal distribution, got {share:.1%}"
        expect(0.035 < share < 0.057, said)


def test_ends_of_branches_start_smaller(init_weights):
    """`o_proj` and `down` are divided by the root of their number: 0.02 / 2 with two of each, 0.02 / 4 with eight."""
    for n_layers, width, hidden in ((2, 64, 128), (8, 64, 64)):
        toy, _ = _started(init_weights, lambda sizes=(n_layers, width, hidden): _toy(*sizes))
        scaled, plain = _drawn(toy)
        _expect_spread(scaled, 0.02 / math.sqrt(2 * n_layers))
        _expect_spread(plain, 0.02)


def test_a_layer_is_known_by_its_own_name(init_weights):
    """A linear layer called `o_proj` or `down`, at any depth, is scaled, by the number of both; down_path.0 is not."""
    toy, _ = _started(init_weights, _names_alike)
    scaled, plain = _drawn(toy)
    _expect_spread(scaled, 0.02 / math.sqrt(5))
    _expect_spread(plain, 0.02)


def test_a_model_without_such_layers(init_weights):
    """A model may have no `o_proj` and no `down`, and may be a single layer: everything gets 0.02."""
    for make in (lambda: nn.Linear(64, 64), lambda: nn.Sequential(nn.Linear(64, 64), nn.Embedding(97, 64))):
        toy, _ = _started(init_weights, make)
        _expect_spread(_drawn(toy)[1], 0.02)
    toy, _ = _started(init_weights, lambda: nn.ModuleDict({"down": nn.Linear(64, 64)}))
    _expect_spread(_drawn(toy)[0], 0.02)


def test_biases_start_at_zero(init_weights):
    """The bias of every linear layer is 0; a layer without one is fine."""
    toy, _ = _started(init_weights, _toy)
    for name, module in toy.named_modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            same(module.bias.detach(), torch.zeros_like(module.bias), f"{name}.bias")


def test_everything_else_stays(init_weights):
    """Norms, convolutions, plain parameters and buffers keep their values, whatever their names."""
    for make in (_others, _toy):
        toy, before = _started(init_weights, make)
        linear = [m for m in toy.modules() if isinstance(m, (nn.Linear, nn.Embedding))]
        drawn = {p.data_ptr() for m in linear for p in m.parameters()}
        for name, value in toy.state_dict().items():
            if value.data_ptr() not in drawn:
                same(value, before[name], f"{name}, which is no weight of a linear layer or an embedding")


def test_parameters_stay_the_same_objects(init_weights):
    """Weights change in place: a shared one stays shared, types stay, and all still learn (requires_grad)."""

    def make():
        toy = _toy(n_layers=1).double()
        toy["head"].weight = toy["table"].weight
        return toy

    toy = _with_seed(make)
    before = dict(toy.named_parameters(remove_duplicate=False))
    _with_seed(lambda: init_weights(toy))
    after = dict(toy.named_parameters(remove_duplicate=False))
    for name, p in before.items():
        expect(after.get(name) is p, f"expected {name} to be the same parameter as before, got another object")
        expect(p.dtype == torch.float64, f"{name}: expected dtype torch.float64 as before, got {p.dtype}")
        expect(p.requires_grad, f"expected {name} to learn as before, got requires_grad=False")


def test_layers_start_apart_each_time(init_weights):
    """No two layers start alike, and calling it twice is like calling it once."""
    once, twice = (_started(init_weights, _toy, times=n)[0] for n in (1, 2))
    for (name, a), b in zip(once.named_parameters(), twice.parameters(), strict=True):
        if a.ndim == 2:
            wrong = f"expected {name} to be as large after a second call, {a.std():.4g}, got {b.std():.4g}"
            expect(bool((a.std() / b.std()).log().abs() < 0.15), wrong)
    scaled, _ = _drawn(once)
    first, second = scaled["layers.0.mlp.down.weight"], scaled["layers.1.mlp.down.weight"]
    expect(not torch.equal(first, second), "expected two layers to get weights of their own, got the same numbers")


# decoder_inputs ------------------------------------------------------------------------------------------------------


def _cache_of(n):
    """A cache of two layers that holds n tokens."""
    cache = ModelCache(2)
    for i in range(2):
        cache.layer(i).append(torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1))
    return cache


def _ids(*shape, salt=0, V=17):
    return torch.randint(V, shape, generator=rng(salt))


def _both(answer):
    """(positions, visible), or Broken."""
    right = isinstance(answer, (tuple, list)) and len(answer) == 2
    expect(right, f"expected two results, positions and visible, got {type(answer).__name__}")
    return answer


def _same_positions(got, want, what):
    """(T,) or (B, T), with the same numbers."""
    is_tensor(got, what)
    rows = got.expand(want.shape) if want.ndim == 2 and got.ndim == 1 and got.shape[0] == want.shape[1] else got
    if want.ndim == 1 and got.ndim == 2 and got.shape[1] == want.shape[0]:
        want = want.expand(got.shape)
    same(rows, want, what)


def _same_visible(got, want, B, what):
    """Boolean, of a shape that broadcasts to (B, 1, T, S), and there the same."""
    is_tensor(got, what)
    expect(got.dtype == torch.bool, f"{what}: expected dtype torch.bool, True where a token may look, got {got.dtype}")
    full = (B, 1, *want.shape[-2:])
    axes = (1,) * (4 - got.ndim) + tuple(got.shape)
    fits = len(axes) == 4 and all(a in (1, f) for a, f in zip(axes, full, strict=True))
    expect(fits, f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    same(got.expand(full), want.expand(full), what)


def _hidden(*rows):
    """A padding mask (B, 1, 1, S) from rows of 0 and 1."""
    return torch.tensor(rows, dtype=torch.bool)[:, None, None]


def probe_decoder_inputs(decoder_inputs):
    """Results that tell the known mistakes apart."""

    def ask(*args, **kwargs):
        def asked():
            positions, visible = decoder_inputs(*args, **kwargs)
            positions = positions if positions.ndim == 1 else (positions, positions.shape)
            return [positions, visible.expand(2, 1, *visible.shape[-2:]) if visible.dtype == torch.bool else visible]

        return _spread_out(outcome(asked), 2)

    mask = _hidden([0, 1, 1, 0, 1], [1, 1, 0, 1, 1])
    own = torch.tensor([[0, 0, 1, 2, 3], [0, 1, 1, 2, 9]])
    return [
        *ask(_ids(2, 5), 11),
        *ask(_ids(2, 5), 5),
        *ask(_ids(2, 6), 5),
        *ask(_ids(2, 8), 5),
        *ask(_ids(2, 5), 11, mask=mask),
        *ask(_ids(2, 5), 11, own, mask),
        *ask(_ids(2, 2), 11, None, mask, _cache_of(3)),
        *ask(_ids(2, 2), 11, None, None, _cache_of(3)),
        *ask(_ids(2, 2), 11, own[:, 2:4], mask, _cache_of(3)),
        *ask(_ids(2, 2), 5, None, None, _cache_of(3)),
        *ask(_ids(2, 3), 5, None, None, _cache_of(3)),
        *ask(_ids(2, 5), 10, own),
        *ask(_ids(2, 5), 9, own),
        *ask(_ids(2, 5), 9, own.flip(0)),
        *ask(_ids(2, 5), 9, own.flip(1)),
        *ask(_ids(2, 4), 5, own[:, :4], None, _cache_of(3)),
    ]


def test_three_tokens_by_hand(decoder_inputs):
    """Three tokens stand at 0, 1, 2; the first sees itself, the second two, the third all three."""
    positions, visible = _both(decoder_inputs(torch.tensor([[7, 7, 7]]), 8))
    _same_positions(positions, torch.tensor([0, 1, 2]), "positions")
    want = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    _same_visible(visible, want, 1, "visible")


def test_they_follow_what_the_cache_holds(decoder_inputs):
    """After 4 tokens in the cache, two new ones stand at 4 and 5, and see all 4, each other's past, and themselves."""
    positions, visible = _both(decoder_inputs(_ids(3, 2), context_length=8, cache=_cache_of(4)))
    _same_positions(positions, torch.tensor([4, 5]), "positions after a cache of 4 tokens")
    want = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    _same_visible(visible, want, 3, "visible after a cache of 4 tokens")
    for T, held in ((1, 6), (5, 0), (3, 2)):
        positions, visible = _both(decoder_inputs(_ids(2, T), 8, cache=_cache_of(held)))
        what = f"of {T} tokens after a cache of {held}"
        _same_positions(positions, torch.arange(held, held + T), f"positions {what}")
        want = torch.ones(T, held + T, dtype=torch.bool).tril(held)
        _same_visible(visible, want, 2, f"visible {what}")


def test_padding_is_hidden_too(decoder_inputs):
    """A padding mask (B, 1, 1, S) hides keys in its own sequence, and the future stays hidden: (B, 1, T, S)."""
    mask = _hidden([0, 1, 1], [1, 1, 1])
    _, visible = _both(decoder_inputs(_ids(2, 3), 8, mask=mask))
    rows = [[[0, 0, 0], [0, 1, 0], [0, 1, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    _same_visible(visible, torch.tensor(rows, dtype=torch.bool)[:, None], 2, "visible under a padding mask")
    mask = torch.rand(3, 1, 1, 7, generator=rng(1)) < 0.6
    positions, visible = _both(decoder_inputs(_ids(3, 7), 8, None, mask))
    _same_positions(positions, torch.arange(7), "positions under a padding mask")
    _same_visible(visible, mask & torch.ones(7, 7, dtype=torch.bool).tril(), 3, "visible under a padding mask")


def test_padding_in_the_cache_is_hidden(decoder_inputs):
    """With a cache the padding mask covers the S = cache.length + T tokens that it will hold."""
    mask = torch.rand(2, 1, 1, 7, generator=rng(2)) < 0.6
    for T in (1, 2, 5):
        positions, visible = _both(decoder_inputs(_ids(2, T), 8, None, mask, _cache_of(7 - T)))
        _same_positions(positions, torch.arange(7 - T, 7), f"positions of {T} tokens after {7 - T}")
        want = mask & torch.ones(T, 7, dtype=torch.bool).tril(7 - T)
        _same_visible(visible, want, 2, f"visible of {T} tokens after {7 - T}, with a padding mask over all 7")


def test_given_positions_are_used(decoder_inputs):
    """Positions (T,) or (B, T) that are given come back as they are; what is visible depends on order alone."""
    own = torch.tensor([[0, 0, 0, 1, 2], [3, 1, 4, 1, 5]])
    for given in (torch.tensor([2, 3, 5, 7, 7]), own):
        positions, visible = _both(decoder_inputs(_ids(2, 5), 8, given))
        _same_positions(positions, given, "positions that were given")
        _same_visible(visible, torch.ones(5, 5, dtype=torch.bool).tril(), 2, "visible, with positions given")
    positions, visible = _both(decoder_inputs(_ids(2, 2), 8, positions=own[:, 3:], cache=_cache_of(3)))
    _same_positions(positions, own[:, 3:], "positions that were given, with a cache of 3")
    _same_visible(visible, torch.ones(2, 5, dtype=torch.bool).tril(3), 2, "visible, with positions given and a cache")


def test_the_context_has_an_end(decoder_inputs):
    """With context_length=8 there are positions 0 ... 7: eight tokens in all are fine, nine are a ValueError."""
    positions, _ = _both(decoder_inputs(_ids(2, 8), 8))
    _same_positions(positions, torch.arange(8), "positions of 8 tokens")
    positions, _ = _both(decoder_inputs(_ids(2, 3), 8, cache=_cache_of(5)))
    _same_positions(positions, torch.tensor([5, 6, 7]), "positions of 3 tokens after 5")
    raises(ValueError, lambda: decoder_inputs(_ids(2, 9), 8), "9 tokens, context_length=8")
    raises(ValueError, lambda: decoder_inputs(_ids(1, 1), 8, None, None, _cache_of(8)), "1 token after 8")
    raises(ValueError, lambda: decoder_inputs(_ids(1, 4), 8, cache=_cache_of(5)), "4 tokens after 5")


def test_given_positions_have_the_same_end(decoder_inputs):
    """A given position of 8 is a ValueError when context_length=8, even if it is the only one; 7 is fine."""
    fine = torch.tensor([[0, 1, 2], [7, 6, 5]])
    positions, _ = _both(decoder_inputs(_ids(2, 3), 8, fine))
    _same_positions(positions, fine, "positions up to 7")
    for row, column in ((0, 0), (0, 2), (1, 0), (1, 1), (1, 2)):
        beyond = torch.zeros(2, 3, dtype=torch.int64)
        beyond[row, column] = 8
        raises(ValueError, lambda p=beyond: decoder_inputs(_ids(2, 3), 8, p), f"positions {beyond.tolist()}")
    raises(ValueError, lambda: decoder_inputs(_ids(2, 2), 8, torch.tensor([7, 8])), "positions [7, 8]")


def test_padding_takes_no_position(decoder_inputs):
    """More tokens than context_length may be held, if the positions given stay below it: padding takes up none."""
    own = torch.tensor([[0, 1], [3, 4]])
    mask = _hidden([0] * 7 + [1] * 2, [0] * 4 + [1] * 5)
    positions, visible = _both(decoder_inputs(_ids(2, 2), 5, own, mask, _cache_of(7)))
    _same_positions(positions, own, "positions of 2 tokens after 7, with padding")
    want = mask & torch.ones(2, 9, dtype=torch.bool).tril(7)
    _same_visible(visible, want, 2, "visible of 2 tokens after 7, with padding")


# The four models by torch's own functions ----------------------------------------------------------------------------
#
# `w` holds weights by name, `c` is a config. Sizes are small and unequal.

SIZES = {"n_layers": 2, "d_model": 12, "n_heads": 3, "vocab_size": 17, "context_length": 11}
WIDE = SIZES | {"d_model": 14, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "d_ff": 19}
ONE_KEY_HEAD = SIZES | {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 13, "context_length": 7}


def _causal(T):
    return torch.ones(T, T, dtype=torch.bool).tril()


def _linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def _layer_norm(w, name, c, x):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], c.norm_eps)


def _rms_norm(w, name, c, x):
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], c.norm_eps)


def _turned(x, positions, base):
    """Rotary positions by complex numbers, half-split pairs: x (B, H, T, D), positions (T,) or (B, T)."""
    D = x.shape[-1]
    angle = positions.double()[..., None] * base ** (-torch.arange(0, D, 2).double() / D)
    angle = angle[:, None] if positions.ndim == 2 else angle
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _attend(w, name, c, x, context=None, visible=None, positions=None, base=None):
    def heads(part, rows, n):
        return torch.stack(_linear(w, f"{name}.{part}", rows).chunk(n, dim=-1), dim=1)

    source = x if context is None else context
    q = heads("q_proj", x, c.n_heads)
    k, v = heads("k_proj", source, c.n_kv_heads), heads("v_proj", source, c.n_kv_heads)
    if base is not None:
        q, k = _turned(q, positions, base), _turned(k, positions, base)
    if visible is not None:
        visible = visible | ~visible.any(-1, keepdim=True)  # rows that see nothing are padding: nobody reads them
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return _linear(w, f"{name}.o_proj", torch.cat(mixed.unbind(1), dim=-1))


def _mlp(w, name, x, activation):
    return _linear(w, f"{name}.down", activation(_linear(w, f"{name}.up", x)))


def _swiglu(w, name, x):
    return _linear(w, f"{name}.down", F.silu(_linear(w, f"{name}.gate", x)) * _linear(w, f"{name}.up", x))


def _gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


def _torch_gpt(w, c, ids, positions=None, mask=None):
    positions = torch.arange(ids.shape[1]) if positions is None else positions
    visible = _causal(ids.shape[1]) if mask is None else _causal(ids.shape[1]) & mask
    x = F.embedding(ids, w["token_embedding.weight"]) + F.embedding(positions, w["position_embedding.weight"])
    for i in range(c.n_layers):
        block = f"blocks.{i}"
        x = x + _attend(w, f"{block}.attention", c, _layer_norm(w, f"{block}.norm1", c, x), visible=visible)
        x = x + _mlp(w, f"{block}.mlp", _layer_norm(w, f"{block}.norm2", c, x), _gelu_tanh)
    return F.linear(_layer_norm(w, "norm", c, x), w["head.weight"])


def _torch_llama(w, c, ids, positions=None, mask=None):
    turn = {"positions": torch.arange(ids.shape[1]) if positions is None else positions, "base": c.rope_base}
    visible = _causal(ids.shape[1]) if mask is None else _causal(ids.shape[1]) & mask
    x = F.embedding(ids, w["token_embedding.weight"])
    for i in range(c.n_layers):
        block = f"blocks.{i}"
        x = x + _attend(w, f"{block}.attention", c, _rms_norm(w, f"{block}.norm1", c, x), visible=visible, **turn)
        x = x + _swiglu(w, f"{block}.mlp", _rms_norm(w, f"{block}.norm2", c, x))
    return F.linear(_rms_norm(w, "norm", c, x), w["head.weight"])


def _post_norm(w, block, c, x, visible, activation):
    x = _layer_norm(w, f"{block}.norm1", c, x + _attend(w, f"{block}.attention", c, x, visible=visible))
    return _layer_norm(w, f"{block}.norm2", c, x + _mlp(w, f"{block}.mlp", x, activation))


def _keys(is_token):
    return None if is_token is None else is_token[:, None, None]


def _torch_encoder(w, c, ids, is_token=None, segments=None):
    segments = torch.zeros_like(ids) if segments is None else segments
    x = F.embedding(ids, w["token_embedding.weight"]) + w["position_embedding.weight"][: ids.shape[1]]
    x = _layer_norm(w, "norm", c, x + F.embedding(segments, w["segment_embedding.weight"]))
    for i in range(c.n_layers):
        x = _post_norm(w, f"blocks.{i}", c, x, _keys(is_token), F.gelu)
    return x


def _sines(T, C):
    angle = torch.arange(T).double()[:, None] / 10_000.0 ** (torch.arange(0, C, 2).double() / C)
    table = torch.empty(T, C, dtype=torch.float64)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
    return table


def _torch_seq2seq(w, c, source, target, source_is_token=None, target_is_token=None):
    def embed(ids):
        return F.embedding(ids, w["token_embedding.weight"]) * c.d_model**0.5 + _sines(ids.shape[1], c.d_model)

    memory = embed(source)
    for i in range(c.n_layers):
        memory = _post_norm(w, f"encoder.{i}", c, memory, _keys(source_is_token), F.relu)
    visible = _causal(target.shape[1]) if target_is_token is None else _causal(target.shape[1]) & _keys(target_is_token)
    x = embed(target)
    for i in range(c.n_layers):
        block = f"decoder.{i}"
        x = _layer_norm(w, f"{block}.norm1", c, x + _attend(w, f"{block}.self_attention", c, x, visible=visible))
        read = _attend(w, f"{block}.cross_attention", c, x, memory, _keys(source_is_token))
        x = _layer_norm(w, f"{block}.norm2", c, x + read)
        x = _layer_norm(w, f"{block}.norm3", c, x + _mlp(w, f"{block}.mlp", x, F.relu))
    return F.linear(x, w["head.weight"])


# What the four models' checks share ----------------------------------------------------------------------------------


def _linear_shapes(name, into, out, bias=True):
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def _norm_shapes(names, C, bias=True):
    return {f"{name}.{part}": (C,) for name in names for part in (("weight", "bias") if bias else ("weight",))}


def _attention_shapes(name, c, bias=True):
    C, wide, narrow = c.d_model, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = _linear_shapes(f"{name}.q_proj", C, wide, bias)
    shapes |= _linear_shapes(f"{name}.k_proj", C, narrow, bias) | _linear_shapes(f"{name}.v_proj", C, narrow, bias)
    return shapes | _linear_shapes(f"{name}.o_proj", wide, C, bias)


def _mlp_shapes(name, c):
    return _linear_shapes(f"{name}.up", c.d_model, c.d_ff) | _linear_shapes(f"{name}.down", c.d_ff, c.d_model)


def _block_shapes(block, c):
    norms = _norm_shapes([f"{block}.norm1", f"{block}.norm2"], c.d_model)
    return _attention_shapes(f"{block}.attention", c) | _mlp_shapes(f"{block}.mlp", c) | norms


def _gpt_shapes(c):
    tables = {
        "token_embedding.weight": (c.vocab_size, c.d_model),
        "position_embedding.weight": (c.context_length, c.d_model),
    }
    for i in range(c.n_layers):
        tables |= _block_shapes(f"blocks.{i}", c)
    return tables | _norm_shapes(["norm"], c.d_model) | {"head.weight": (c.vocab_size, c.d_model)}


def _llama_shapes(c):
    shapes = {"token_embedding.weight": (c.vocab_size, c.d_model)}
    for i in range(c.n_layers):
        block = f"blocks.{i}"
        shapes |= _attention_shapes(f"{block}.attention", c, bias=False)
        shapes |= _linear_shapes(f"{block}.mlp.gate", c.d_model, c.d_ff, bias=False)
        shapes |= _linear_shapes(f"{block}.mlp.up", c.d_model, c.d_ff, bias=False)
        shapes |= _linear_shapes(f"{block}.mlp.down", c.d_ff, c.d_model, bias=False)
        shapes |= _norm_shapes([f"{block}.norm1", f"{block}.norm2"], c.d_model, bias=False)
    return shapes | _norm_shapes(["norm"], c.d_model, bias=False) | {"head.weight": (c.vocab_size, c.d_model)}


def _encoder_shapes(c):
    rows = {"token": c.vocab_size, "position": c.context_length, "segment": c.n_segments}
    shapes = {f"{name}_embedding.weight": (n, c.d_model) for name, n in rows.items()} | _norm_shapes(
        ["norm"], c.d_model
    )
    for i in range(c.n_layers):
        shapes |= _block_shapes(f"blocks.{i}", c)
    return shapes


def _seq2seq_shapes(c):
    shapes = {"token_embedding.weight": (c.vocab_size, c.d_model), "head.weight": (c.vocab_size, c.d_model)}
    for i in range(c.n_layers):
        shapes |= _block_shapes(f"encoder.{i}", c) | _mlp_shapes(f"decoder.{i}.mlp", c)
        for part in ("self_attention", "cross_attention"):
            shapes |= _attention_shapes(f"decoder.{i}.{part}", c)
        shapes |= _norm_shapes([f"decoder.{i}.norm{n}" for n in (1, 2, 3)], c.d_model)
    return shapes


@dataclass(frozen=True)
class _Kind:
    """What the checks know of a model: its config, the shapes of its parameters, and what it must compute."""

    config: type
    shapes: Callable
    truth: Callable
    has_head: bool = True


GPT_KIND = _Kind(GPTConfig, _gpt_shapes, _torch_gpt)
LLAMA_KIND = _Kind(LlamaConfig, _llama_shapes, _torch_llama)
ENCODER_KIND = _Kind(EncoderConfig, _encoder_shapes, _torch_encoder, has_head=False)
SEQ2SEQ_KIND = _Kind(Seq2SeqConfig, _seq2seq_shapes, _torch_seq2seq)


def _is_tied(c):
    return getattr(c, "tied", isinstance(c, Seq2SeqConfig))


def _parameters(model):
    """All parameters by name; one that is shared stands under each of its names."""
    expect(isinstance(model, nn.Module), f"expected an nn.Module, got {type(model).__name__}")
    return dict(model.named_parameters(remove_duplicate=False))


def _expect_parameters(model, shapes):
    """Break the promise unless the model has exactly these parameters."""
    got = {name: tuple(p.shape) for name, p in _parameters(model).items()}
    missing, extra = [n for n in shapes if n not in got], [n for n in got if n not in shapes]
    said = [f"missing: {_some(missing)}"] if missing else []
    said += [f"not expected: {_some(extra)}"] if extra else []
    expect(not said, f"expected {len(shapes)} parameters by name; {'; '.join(said)}\n{_listed(shapes)}")
    for name, shape in shapes.items():
        expect(got[name] == shape, f"{name}: expected shape {shape}, got {got[name]}")


def _listed(shapes):
    """The parts of a model and of its first layers that have parameters, and which."""
    parts = {}
    for name in shapes:
        part, kind = name.rsplit(".", 1)
        if ".1." not in name and ".2." not in name:
            parts.setdefault(part, []).append(kind)
    return "All, but for further layers: " + ", ".join(f"{part} ({', '.join(own)})" for part, own in parts.items())


def _value(name, shape, dtype):
    return torch.randn(shape, generator=rng(zlib.crc32(name.encode()))).to(dtype) * 0.5


def _load(model, c):
    """Give each parameter a value that follows from its name; returns the values. A tied head has the embedding's."""
    own = {"head.weight": "token_embedding.weight"} if _is_tied(c) else {}
    values = {name: _value(own.get(name, name), p.shape, p.dtype) for name, p in _parameters(model).items()}
    with torch.no_grad():
        for name, p in _parameters(model).items():
            p.copy_(values[name])
    return values


def _built(model_class, kind, **sizes):
    """A model with known weights, the weights by name, and its config."""
    c = kind.config(**(SIZES | sizes))
    model = model_class(c)
    _expect_parameters(model, kind.shapes(c))
    w = _load(model.double(), c)
    state = model.state_dict()
    for name, value in w.items():
        expect(torch.equal(state[name], value), f"{name} is the same parameter as another one: each needs its own")
    return model, w, c


def _close(got, want, what):
    """Like `same`, but as float32 numbers: positions may have been computed in float32."""
    is_tensor(got, what)
    expect(got.shape == want.shape, f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    expect(got.dtype == want.dtype, f"{what}: expected dtype {want.dtype}, got {got.dtype}")
    same(got.float(), want.float(), what)


def _expect_gradients(model):
    """Break the promise unless every parameter has a gradient."""
    without = [name for name, p in _parameters(model).items() if p.grad is None]
    expect(not without, f"expected a gradient of every parameter, got none of: {_some(without)}")


def _check_gradients(model, w, c, truth, inputs, rows=None, **options):
    """Every parameter gets the gradient that torch's own functions give. `rows`: the outputs that count."""
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    if _is_tied(c) and "head.weight" in leaves:
        leaves["head.weight"] = leaves["token_embedding.weight"]
    for out, name in ((model(*inputs, **options), "the model"), (truth(leaves, c, *inputs, **options), "torch")):
        expect(out.requires_grad, f"expected an output of {name} that can run backward, got one without a graph")
        out = out if rows is None else out[rows]
        (out * random_gradient(out.shape, out.dtype)).sum().backward()
    _expect_gradients(model)
    for name, p in _parameters(model).items():
        _close(p.grad, leaves[name].grad, f"gradient of {name}")


def _fresh(model_class, kind, n_layers=2, salt=0, **sizes):
    """A new model, large enough for its first weights to be judged."""
    large = {"n_layers": n_layers, "d_model": 32, "n_heads": 4, "vocab_size": 211, "context_length": 64}
    c = kind.config(**(large | sizes))
    return _with_seed(lambda: model_class(c), salt)


def _is_end(name):
    return name.endswith((".o_proj.weight", ".down.weight"))


def _is_matrix(name):
    return name.endswith(".weight") and "norm" not in name


def _check_fresh(model_class, kind, n_layers=2, ends_per_layer=2, **sizes):
    """The first weights are those of init_weights."""
    model = _fresh(model_class, kind, n_layers, **sizes)
    parameters = _parameters(model)
    ends = {name: p.detach() for name, p in parameters.items() if _is_end(name)}
    plain = {name: p.detach() for name, p in parameters.items() if _is_matrix(name) and not _is_end(name)}
    _expect_spread(plain, 0.02, tolerance=0.2)
    _expect_spread(ends, 0.02 / math.sqrt(ends_per_layer * n_layers), tolerance=0.2)
    for name, p in parameters.items():
        expect(p.requires_grad, f"expected {name} to learn, got requires_grad=False")
        if "norm" in name or name.endswith(".bias"):
            value = float("norm" in name and name.endswith("weight"))
            same(p.detach(), torch.full_like(p, value), f"{name} at the start")


def _fresh_answer(model_class, kind, **sizes):
    """The start of a fresh model, on a coarse scale: the spread of ends, of embeddings and of others; whether a bias is
    not 0; whether the head is like the embedding.
    """
    parameters = _parameters(_fresh(model_class, kind, **sizes))
    groups = {"ends": [], "tables": [], "plain": []}
    for name, p in parameters.items():
        if _is_matrix(name):
            groups["ends" if _is_end(name) else "tables" if "embedding" in name else "plain"].append(p)
    biased = any(bool((p != 0).any()) for name, p in parameters.items() if name.endswith(("proj.bias", "up.bias")))
    head = parameters.get("head.weight")
    same_start = head is not None and torch.equal(head, parameters["token_embedding.weight"])
    return [*map(_spread, groups.values()), biased, same_start]


def _count(model):
    return sum(p.numel() for p in model.parameters())


def _shapes_of(model):
    return sorted((name, tuple(p.shape)) for name, p in _parameters(model).items())


def _lenient(model_class, kind, **sizes):
    """A model with known weights, whatever its parameters are called: for probes."""
    c = kind.config(**(SIZES | sizes))
    model = model_class(c).double()
    _load(model, c)
    return model


def _asker(model_class, kind, **sizes):
    """A function that puts a question to one model and gives the answer, or the exception."""
    model = outcome(lambda: _lenient(model_class, kind, **sizes))

    def ask(question):
        with torch.no_grad():
            return outcome(lambda: _rounded(question(model))) if isinstance(model, nn.Module) else model

    return ask


def _rounded(answer):
    """Floating point results as float32: positions may have been computed in float32."""
    if isinstance(answer, torch.Tensor) and answer.is_floating_point():
        return answer.detach().float()
    return answer


# What the two decoders' checks share ---------------------------------------------------------------------------------

# Row 1 has padding at its left and one hole. Its tokens stand at 0 ... 3.
IS_TOKEN = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1]], dtype=torch.bool)
PLACES = (IS_TOKEN.cumsum(1) - 1).clamp(min=0)


def _padded(model, ids):
    return model(ids, positions=PLACES, mask=_keys(IS_TOKEN))


def _in_chunks(model, c, ids, sizes, is_token=None, positions=None):
    """Feed ids a chunk at a time, with a cache; returns all logits, and the cache."""
    cache, done, rows = ModelCache(c.n_layers), 0, []
    for size in sizes:
        end = done + size
        given = {} if positions is None else {"positions": positions[:, done:end]}
        given |= {} if is_token is None else {"mask": _keys(is_token[:, :end])}
        try:
            rows.append(model(ids[:, done:end], cache=cache, **given))
        except NotImplementedError:
            raise
        except Exception as error:
            held = _held(cache)
            if set(held) <= {done, end}:
                raise
            raise Broken(f"{_uneven(held, end)}; then {type(error).__name__}: {error}") from error
        expect(_held(cache) == [end] * c.n_layers, _uneven(_held(cache), end))
        done = end
    return torch.cat(rows, dim=1), cache


def _held(cache):
    return [layer.length for layer in cache.layers]


def _uneven(held, n):
    return f"after {n} tokens: expected the cache's layers to hold {[n] * len(held)} tokens, got {held}"


def _check_truth(model_class, kind, what, shapes=((2, 5),), **sizes):
    """Logits equal those of torch's own functions, for ids of several shapes, which are not contiguous."""
    model, w, c = _built(model_class, kind, **sizes)
    for B, T in shapes:
        ids = _ids(T, B, V=c.vocab_size).T
        _close(model(ids), kind.truth(w, c, ids), f"logits of {what}, ids of shape {tuple(ids.shape)}")


def _check_modes(model_class, kind, *inputs):
    """There is no dropout and no memory."""
    model, w, c = _built(model_class, kind, n_layers=1)
    first = model(*inputs)
    model(*(x[:1, :3] for x in inputs))
    _close(model(*inputs), first, "a second call with the same ids")
    with torch.no_grad():
        _close(model.eval()(*inputs), kind.truth(w, c, *inputs), "the model in eval mode")


def _check_half(model_class, kind, *inputs):
    """A model in bfloat16 gives bfloat16."""
    model = model_class(kind.config(**SIZES)).bfloat16()
    try:
        got = model(*inputs)
    except NotImplementedError:
        raise
    except Exception as error:
        raise Broken(f"a model in bfloat16: expected a result, got {type(error).__name__}: {error}") from error
    is_tensor(got, "a model in bfloat16")
    expect(got.dtype == torch.bfloat16, f"a model in bfloat16: expected dtype torch.bfloat16, got {got.dtype}")
    expect(bool(got.isfinite().all()), "a model in bfloat16: expected finite numbers, got NaN or inf")


def _check_future(model_class, kind):
    model, w, c = _built(model_class, kind)
    ids = _ids(2, 7)
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 3) % 17
    before, after = model(ids), model(changed)
    _close(after[:, :4], before[:, :4], "logits 0-3 after token 4 was changed")
    _close(after, kind.truth(w, c, changed), "logits after token 4 was changed")
    _close(model(ids[:, :4]), before[:, :4], "logits of the first 4 tokens alone")


def _check_positions(model_class, kind):
    model, w, c = _built(model_class, kind)
    ids = _ids(2, 5)
    for positions in (torch.arange(5) * 2, torch.tensor([[3, 4, 5, 6, 7], [0, 0, 10, 1, 2]])):
        want = kind.truth(w, c, ids, positions)
        _close(model(ids, positions=positions), want, f"logits at positions {positions.tolist()}")
    _close(model(ids, positions), want, "logits, positions as second argument")


def _check_padding(model_class, kind):
    model, w, c = _built(model_class, kind)
    ids = _ids(2, 7)
    got = model(ids, PLACES, _keys(IS_TOKEN))
    want = kind.truth(w, c, ids, PLACES, _keys(IS_TOKEN))
    _close(got[IS_TOKEN], want[IS_TOKEN], "logits of tokens in a padded batch")
    alone = model(ids[1:, [2, 3, 5, 6]])
    _close(got[1:, [2, 3, 5, 6]], alone, "logits of a padded sequence, next to those of the sequence alone")
    other = torch.where(IS_TOKEN, ids, (ids + 5) % 17)
    _close(_padded(model, other)[IS_TOKEN], got[IS_TOKEN], "logits of tokens after the padding's ids were changed")
    got, want = model(ids, mask=_keys(IS_TOKEN)), kind.truth(w, c, ids, None, _keys(IS_TOKEN))
    _close(got[IS_TOKEN], want[IS_TOKEN], "logits of tokens with a mask, at the usual positions 0, 1, 2 ...")
    shown = model(ids, mask=torch.ones(2, 1, 1, 7, dtype=torch.bool))
    _close(shown, kind.truth(w, c, ids), "logits under a mask that hides nothing")
    right = torch.arange(7) < torch.tensor([[7], [3]])
    got, want = model(ids, mask=_keys(right)), kind.truth(w, c, ids)
    _close(got[right], want[right], "logits of tokens with padding at the right")


def _check_cache(model_class, kind, **sizes):
    ids = _ids(2, 7, V=13)
    for given, chunks in (({}, ([7], [3, 1, 2, 1])), (sizes, ([1, 4, 2],))):
        model, w, c = _built(model_class, kind, **given)
        want = kind.truth(w, c, ids)
        for chunk in chunks:
            with torch.no_grad():
                got, cache = _in_chunks(model, c, ids, chunk)
            _close(got, want, f"logits of ids fed in chunks of {chunk}")
        kept, holds = tuple(cache.layer(0).keys.shape), (2, c.n_kv_heads, 7, c.head_dim)
        expect(kept == holds, f"keys in layer 0 of the cache, (B, K, S, D): expected shape {holds}, got {kept}")
    changed = torch.cat([(ids[:, :1] + 3) % 13, ids[:, 1:]], dim=1)
    _, other = _in_chunks(model, c, changed, [7])
    one, two = (x.layer(0).keys[:, :, 1:].detach() for x in (cache, other))
    _close(two, one, "keys in layer 0 of the cache, block 0's, of tokens 1-6 after token 0 was changed")


def _check_padded_cache(model_class, kind):
    ids = _ids(2, 7)
    for given, chunk in (({}, [4, 2, 1]), (WIDE, [1, 4, 1, 1])):
        model, w, c = _built(model_class, kind, **given)
        want = kind.truth(w, c, ids, PLACES, _keys(IS_TOKEN))
        with torch.no_grad():
            got, _ = _in_chunks(model, c, ids, chunk, IS_TOKEN, PLACES)
        _close(got[IS_TOKEN], want[IS_TOKEN], f"logits of tokens in a padded batch, fed in chunks of {chunk}")


def _check_context(model_class, kind):
    model, w, c = _built(model_class, kind, context_length=7, n_layers=1)
    ids = _ids(2, 8)
    _close(model(ids[:, :7]), kind.truth(w, c, ids[:, :7]), "logits of 7 tokens, context_length=7")
    raises(ValueError, lambda: model(ids), "8 tokens, context_length=7")
    beyond = torch.tensor([[0, 1, 2], [5, 7, 6]])
    raises(ValueError, lambda: model(ids[:, :3], positions=beyond), f"positions {beyond.tolist()}, context_length=7")
    _, cache = _in_chunks(model, c, ids[:, :7], [5, 2])
    raises(ValueError, lambda: model(ids[:, 7:], cache=cache), "one token after 7 in the cache, context_length=7")


def _check_tied(model_class, kind):
    """Tied: one parameter under two names. Untied: two parameters."""
    for tied in (True, False):
        sizes = {"n_layers": 1} | ({} if kind is SEQ2SEQ_KIND else {"tied": tied})
        model, w, c = _built(model_class, kind, **sizes)
        ids = (_ids(2, 5),) if kind is not SEQ2SEQ_KIND else (_ids(2, 5), _ids(2, 5, salt=1))
        _close(model(*ids), kind.truth(w, c, *ids), f"logits with tied={tied}")
        total = sum(math.prod(shape) for shape in kind.shapes(c).values()) - tied * c.vocab_size * c.d_model
        got = sum(p.numel() for p in model.parameters())
        said = "one matrix under two names" if tied else "a matrix each"
        expect(got == total, f"token_embedding and head are {said}: expected {total} numbers in all, got {got}")
        model(*ids).square().sum().backward()
        _expect_gradients(model)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        state = model.state_dict()
        together = torch.equal(state["head.weight"], state["token_embedding.weight"])
        expect(together == tied, f"{said}, after a step: expected {'equal' if tied else 'different'} weights")
        if kind is SEQ2SEQ_KIND:
            break


def _check_uniform(model_class, kind):
    """Fresh logits are near 0, so that the loss is near ln V."""
    model = _fresh(model_class, kind)
    ids, labels = _ids(2, 61, V=211), _ids(2, 61, salt=1, V=211)
    with torch.no_grad():
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).item()
    expect(abs(loss - math.log(211)) < 0.1, f"loss of a fresh model: expected about ln 211 = 5.35, got {loss:.3g}")


def _decoder_answers(model_class, kind, **more):
    """What both decoders are asked. `more` is for the config of the wide one."""
    ids, own = _ids(2, 7), torch.tensor([[3, 4, 5, 6, 7, 8, 9], [0, 0, 10, 1, 2, 3, 4]])
    c = kind.config(**SIZES)
    ask = _asker(model_class, kind, tied=True)
    wide = _asker(model_class, kind, **WIDE | {"n_layers": 1, "norm_eps": 0.3, "tied": False} | more)

    def held(model):
        cache = ModelCache(c.n_layers)
        outcome(lambda: model(ids[:, :3], cache=cache))
        return _held(cache)

    def after_the_end(model):
        cache = ModelCache(c.n_layers)
        for layer in cache.layers:
            layer.append(torch.zeros(2, 3, 8, 4).double(), torch.zeros(2, 3, 8, 4).double())
        return model(ids[:, :4], cache=cache)

    return [
        ask(_shapes_of),
        ask(lambda m: m(ids)),
        ask(lambda m: m(ids, positions=own)),
        ask(lambda m: _padded(m, ids)[IS_TOKEN]),
        ask(lambda m: _in_chunks(m, c, ids, [4, 3])[0]),
        ask(lambda m: _in_chunks(m, c, ids, [4, 2, 1], IS_TOKEN, PLACES)[0][IS_TOKEN]),
        ask(held),
        ask(lambda m: m(_ids(1, 12))),
        ask(lambda m: m(ids, positions=own + 1)),
        ask(after_the_end),
        ask(_count),
        wide(_shapes_of),
        wide(lambda m: m(ids)),
        wide(_count),
        *_spread_out(outcome(lambda: _fresh_answer(model_class, kind, tied=True)), 5),
    ]


# GPT -----------------------------------------------------------------------------------------------------------------


def probe_GPT(GPT):
    """Results that tell the known mistakes apart."""
    return _decoder_answers(GPT, GPT_KIND)


def test_gpt_has_these_parameters(GPT):
    """Parameters by name: `token_embedding`, `position_embedding`, `blocks.0.norm1` ..., `norm`, `head` (no bias)."""
    for sizes in (SIZES, WIDE | {"n_layers": 3}, ONE_KEY_HEAD | {"tied": False}):
        c = GPTConfig(**sizes)
        _expect_parameters(GPT(c), _gpt_shapes(c))


def test_gpt_keeps_its_config(GPT):
    """`model.config` is the config that the model was made from."""
    c = GPTConfig(**SIZES)
    model = GPT(c)
    expect(
        getattr(model, "config", None) == c, f"expected model.config to be {c}, got {getattr(model, 'config', None)}"
    )


def test_gpt_computes_what_torch_computes(GPT):
    """With the same weights its logits are those of torch's own functions: pre-norm, tanh GELU, a last norm."""
    _check_truth(GPT, GPT_KIND, "GPT", shapes=((2, 5), (3, 1), (1, 11), (1, 1)))


def test_gpt_takes_any_sizes(GPT):
    """n_layers, d_model, n_kv_heads, head_dim and d_ff are those of the config; H * D need not be C."""
    _check_truth(GPT, GPT_KIND, "4 heads of 6 on 2 key heads, d_model=14, d_ff=19", **WIDE)
    _check_truth(GPT, GPT_KIND, "2 heads on 1 key head", **ONE_KEY_HEAD)


def test_gpt_norms_use_norm_eps(GPT):
    """Every norm adds the config's norm_eps to the variance: seen with 0.3 in place of 0.00001."""
    _check_truth(GPT, GPT_KIND, "norm_eps=0.3", norm_eps=0.3, n_layers=1)


def test_gpt_head_and_embedding(GPT):
    """With tied=True head and token embedding are one parameter, before and after a step; with False they are two."""
    _check_tied(GPT, GPT_KIND)


def test_gpt_future_cannot_change_the_past(GPT):
    """A token's logits depend on itself and on what came before, on nothing after it."""
    _check_future(GPT, GPT_KIND)


def test_gpt_positions_can_be_given(GPT):
    """Positions (T,) or (B, T) choose the rows of the position embedding, in place of 0, 1, 2 ..."""
    _check_positions(GPT, GPT_KIND)


def test_gpt_padding_changes_nothing(GPT):
    """With mask and positions, tokens in a padded batch get the logits that they get alone."""
    _check_padding(GPT, GPT_KIND)


def test_gpt_with_a_cache(GPT):
    """Fed in chunks with a cache, logits equal those of one pass; each layer has its own view, cache.layer(i)."""
    _check_cache(GPT, GPT_KIND, **WIDE)


def test_gpt_with_a_cache_and_padding(GPT):
    """The same with padding, where mask and positions are given with each chunk."""
    _check_padded_cache(GPT, GPT_KIND)


def test_gpt_context_has_an_end(GPT):
    """Positions end at context_length - 1, with and without a cache, given or not: beyond is a ValueError."""
    _check_context(GPT, GPT_KIND)


def test_gpt_every_parameter_learns(GPT):
    """Every parameter gets the gradient that torch's own functions give, tied or not."""
    ids = _ids(2, 7)
    model, w, c = _built(GPT, GPT_KIND)
    _check_gradients(model, w, c, _torch_gpt, [ids])
    model, w, c = _built(GPT, GPT_KIND, **WIDE, tied=False)
    right = torch.arange(7) < torch.tensor([[7], [3]])
    _check_gradients(model, w, c, _torch_gpt, [ids], rows=right, mask=_keys(right))


def test_gpt_starts_with_init_weights(GPT):
    """A new model has the weights of `init_weights`, so its loss is near ln V: it has no opinion yet."""
    _check_fresh(GPT, GPT_KIND)
    _check_fresh(GPT, GPT_KIND, n_layers=4, tied=False)
    _check_uniform(GPT, GPT_KIND)


def test_gpt_has_no_dropout_and_no_memory(GPT):
    """Train and eval mode, a first and a second call give the same."""
    _check_modes(GPT, GPT_KIND, _ids(2, 7))


def test_gpt_keeps_half_precision(GPT):
    """A model in bfloat16 gives bfloat16."""
    _check_half(GPT, GPT_KIND, _ids(2, 7))


# Llama ---------------------------------------------------------------------------------------------------------------


def probe_Llama(Llama):
    """Results that tell the known mistakes apart."""
    return _decoder_answers(Llama, LLAMA_KIND, rope_base=50.0)


def test_llama_has_these_parameters(Llama):
    """Parameters by name, weights only, without a bias: `token_embedding`, `blocks.0.norm1` ..., `norm`, `head`."""
    for sizes in (SIZES, WIDE | {"n_layers": 3}, ONE_KEY_HEAD | {"tied": True}):
        c = LlamaConfig(**sizes)
        _expect_parameters(Llama(c), _llama_shapes(c))


def test_llama_keeps_its_config(Llama):
    """`model.config` is the config that the model was made from."""
    c = LlamaConfig(**SIZES)
    model = Llama(c)
    expect(
        getattr(model, "config", None) == c, f"expected model.config to be {c}, got {getattr(model, 'config', None)}"
    )


def test_llama_computes_what_torch_computes(Llama):
    """With the same weights its logits are those of torch's functions: RMSNorm first, rotation, SwiGLU, a last norm."""
    _check_truth(Llama, LLAMA_KIND, "Llama", shapes=((2, 5), (3, 1), (1, 11), (1, 1)))


def test_llama_takes_any_sizes(Llama):
    """n_layers, d_model, n_kv_heads, head_dim and d_ff are those of the config; H * D need not be C."""
    _check_truth(Llama, LLAMA_KIND, "4 heads of 6 on 2 key heads, d_model=14, d_ff=19", **WIDE)
    _check_truth(Llama, LLAMA_KIND, "2 heads on 1 key head", **ONE_KEY_HEAD)


def test_llama_turns_by_rope_base(Llama):
    """The config's rope_base sets the angles, of half-split pairs: seen with 50 in place of 10,000."""
    _check_truth(Llama, LLAMA_KIND, "rope_base=50", rope_base=50.0)


def test_llama_norms_use_norm_eps(Llama):
    """Every norm adds the config's norm_eps to the mean square: seen with 0.3 in place of 0.00001."""
    _check_truth(Llama, LLAMA_KIND, "norm_eps=0.3", norm_eps=0.3, n_layers=1)


def test_llama_head_and_embedding(Llama):
    """With tied=True head and token embedding are one parameter, before and after a step; with False they are two."""
    _check_tied(Llama, LLAMA_KIND)


def test_llama_future_cannot_change_the_past(Llama):
    """A token's logits depend on itself and on what came before, on nothing after it."""
    _check_future(Llama, LLAMA_KIND)


def test_llama_positions_can_be_given(Llama):
    """Positions (T,) or (B, T) turn queries and keys in every layer, in place of 0, 1, 2 ..."""
    _check_positions(Llama, LLAMA_KIND)


def test_llama_padding_changes_nothing(Llama):
    """With mask and positions, tokens in a padded batch get the logits that they get alone."""
    _check_padding(Llama, LLAMA_KIND)


def test_llama_with_a_cache(Llama):
    """Fed in chunks with a cache, logits equal those of one pass; each layer has its own view, cache.layer(i)."""
    _check_cache(Llama, LLAMA_KIND, **WIDE)


def test_llama_with_a_cache_and_padding(Llama):
    """The same with padding, where mask and positions are given with each chunk."""
    _check_padded_cache(Llama, LLAMA_KIND)


def test_llama_context_has_an_end(Llama):
    """Positions end at context_length - 1, with and without a cache, given or not: beyond is a ValueError."""
    _check_context(Llama, LLAMA_KIND)


def test_llama_every_parameter_learns(Llama):
    """Every parameter gets the gradient that torch's own functions give, tied or not."""
    ids = _ids(2, 7)
    model, w, c = _built(Llama, LLAMA_KIND, tied=True)
    _check_gradients(model, w, c, _torch_llama, [ids])
    model, w, c = _built(Llama, LLAMA_KIND, **WIDE)
    right = torch.arange(7) < torch.tensor([[7], [3]])
    _check_gradients(model, w, c, _torch_llama, [ids], rows=right, mask=_keys(right))


def test_llama_starts_with_init_weights(Llama):
    """A new model has the weights of `init_weights`, so its loss is near ln V: it has no opinion yet."""
    _check_fresh(Llama, LLAMA_KIND)
    _check_fresh(Llama, LLAMA_KIND, n_layers=4, tied=True)
    _check_uniform(Llama, LLAMA_KIND)


def test_llama_has_no_dropout_and_no_memory(Llama):
    """Train and eval mode, a first and a second call give the same."""
    _check_modes(Llama, LLAMA_KIND, _ids(2, 7))


def test_llama_keeps_half_precision(Llama):
    """A model in bfloat16 gives bfloat16."""
    _check_half(Llama, LLAMA_KIND, _ids(2, 7))


# Encoder -------------------------------------------------------------------------------------------------------------

# Padding at the right of row 1, at the left and in the middle of row 2.
KNOWN = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)


def _segments(*shape, n=2):
    return torch.randint(n, shape, generator=rng(7))


def _torch_layers(layer, w, blocks, c, activation):
    """torch's own encoder or decoder layers with these weights, one for each of `blocks`."""
    made = []
    for block in blocks:
        options = {"dropout": 0.0, "batch_first": True, "layer_norm_eps": c.norm_eps, "dtype": torch.float64}
        theirs = layer(c.d_model, c.n_heads, c.d_ff, activation=activation, **options)
        decodes = layer is nn.TransformerDecoderLayer
        mine = {"self_attn": "self_attention" if decodes else "attention"}
        mine |= {"multihead_attn": "cross_attention"} if decodes else {}
        state = {}
        for part in ("weight", "bias"):
            for their, own in mine.items():
                joined = [w[f"{block}.{own}.{name}_proj.{part}"] for name in "qkv"]
                state[f"{their}.in_proj_{part}"] = torch.cat(joined)
                state[f"{their}.out_proj.{part}"] = w[f"{block}.{own}.o_proj.{part}"]
            for their, own in {"linear1": "mlp.up", "linear2": "mlp.down"}.items():
                state[f"{their}.{part}"] = w[f"{block}.{own}.{part}"]
            for n in range(1, 4 if decodes else 3):
                state[f"norm{n}.{part}"] = w[f"{block}.norm{n}.{part}"]
        theirs.load_state_dict(state)
        made.append(theirs)
    return made


def probe_Encoder(Encoder):
    """Results that tell the known mistakes apart."""
    ids = _ids(3, 7)
    ask = _asker(Encoder, ENCODER_KIND)
    wide = _asker(Encoder, ENCODER_KIND, **WIDE | {"n_layers": 1, "norm_eps": 0.3, "n_segments": 3})
    return [
        ask(_shapes_of),
        ask(lambda m: m(ids)),
        ask(lambda m: m(ids[:, :1])),
        ask(lambda m: m(ids, KNOWN)[KNOWN]),
        ask(lambda m: m(ids, KNOWN)[0]),
        ask(lambda m: m(ids, segments=_segments(3, 7))),
        ask(lambda m: m(_ids(1, 12))),
        ask(_count),
        wide(_shapes_of),
        wide(lambda m: m(ids, KNOWN, _segments(3, 7, n=3))[KNOWN]),
        *_spread_out(outcome(lambda: _fresh_answer(Encoder, ENCODER_KIND)), 5),
    ]


def test_encoder_has_these_parameters(Encoder):
    """By name: `token_embedding`, `position_embedding`, `segment_embedding`, `norm`, and `blocks.0.norm1` ..."""
    for sizes in (SIZES, WIDE | {"n_layers": 3, "n_segments": 3}, ONE_KEY_HEAD):
        c = EncoderConfig(**sizes)
        _expect_parameters(Encoder(c), _encoder_shapes(c))


def test_encoder_equals_torchs_layers(Encoder):
    """With the same weights its layers are torch's own nn.TransformerEncoderLayer: post-norm, exact GELU."""
    model, w, c = _built(Encoder, ENCODER_KIND)
    layers = _torch_layers(nn.TransformerEncoderLayer, w, [f"blocks.{i}" for i in range(2)], c, F.gelu)
    for ids in (_ids(2, 5), _ids(3, 1, salt=1), _ids(11, 1).T):
        x = F.embedding(ids, w["token_embedding.weight"]) + w["position_embedding.weight"][: ids.shape[1]]
        x = _layer_norm(w, "norm", c, x + w["segment_embedding.weight"][0])
        for layer in layers:
            x = layer(x)
        _close(model(ids), x, f"vectors of ids of shape {tuple(ids.shape)}")


def test_encoder_takes_any_sizes(Encoder):
    """n_layers, d_model, n_kv_heads, head_dim, d_ff and n_segments are those of the config; H * D need not be C."""
    for sizes in (WIDE | {"n_segments": 3}, ONE_KEY_HEAD):
        model, w, c = _built(Encoder, ENCODER_KIND, **sizes)
        ids, segments = _ids(2, 7, V=13), _segments(2, 7, n=c.n_segments)
        what = f"vectors with H={c.n_heads}, K={c.n_kv_heads}, D={c.head_dim}, C={c.d_model}, F={c.d_ff}"
        _close(model(ids, None, segments), _torch_encoder(w, c, ids, None, segments), what)


def test_encoder_norms_use_norm_eps(Encoder):
    """Every norm adds the config's norm_eps to the variance: seen with 0.3 in place of 1e-12."""
    model, w, c = _built(Encoder, ENCODER_KIND, norm_eps=0.3, n_layers=1)
    ids = _ids(2, 7)
    _close(model(ids), _torch_encoder(w, c, ids), "vectors with norm_eps=0.3")


def test_encoder_sees_both_ways(Encoder):
    """A token is read in the light of what stands before it and what stands after it, and of where it stands."""
    model, w, c = _built(Encoder, ENCODER_KIND)
    ids = _ids(2, 7)
    for t in (0, 6):
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 3) % 17
        _close(model(changed), _torch_encoder(w, c, changed), f"vectors after token {t} was changed")
    _close(model(ids.flip(1)), _torch_encoder(w, c, ids.flip(1)), "vectors of the tokens in reverse order")


def test_encoder_hides_padding(Encoder):
    """`is_token` is True for tokens: padding, wherever it stands, cannot change their vectors."""
    model, w, c = _built(Encoder, ENCODER_KIND)
    ids = _ids(3, 7)
    got, want = model(ids, is_token=KNOWN), _torch_encoder(w, c, ids, KNOWN)
    _close(got[KNOWN], want[KNOWN], "vectors of tokens in a padded batch")
    _close(got[1:2, :3], model(ids[1:2, :3]), "vectors of a padded sequence, next to those of the sequence alone")
    other = torch.where(KNOWN, ids, (ids + 5) % 17)
    _close(model(other, KNOWN)[KNOWN], got[KNOWN], "vectors of tokens after the padding's ids were changed")
    _close(model(ids, torch.ones_like(KNOWN)), _torch_encoder(w, c, ids), "vectors where all are tokens")


def test_encoder_uses_segments(Encoder):
    """Each token's segment adds a row of `segment_embedding`; without segments all tokens are in segment 0."""
    model, w, c = _built(Encoder, ENCODER_KIND)
    ids, segments = _ids(3, 7), _segments(3, 7)
    _close(model(ids, segments=segments), _torch_encoder(w, c, ids, None, segments), "vectors with segments")
    _close(
        model(ids, segments=torch.ones_like(ids)), _torch_encoder(w, c, ids, None, torch.ones_like(ids)), "segment 1"
    )
    _close(model(ids, segments=torch.zeros_like(ids)), model(ids), "vectors with all segments 0, next to none given")
    got, want = model(ids, KNOWN, segments), _torch_encoder(w, c, ids, KNOWN, segments)
    _close(got[KNOWN], want[KNOWN], "vectors of tokens with padding and segments")


def test_encoder_context_has_an_end(Encoder):
    """As many tokens as context_length are fine, one more is a ValueError."""
    model, w, c = _built(Encoder, ENCODER_KIND, context_length=7, n_layers=1)
    ids = _ids(2, 7)
    _close(model(ids), _torch_encoder(w, c, ids), "vectors of 7 tokens, context_length=7")
    raises(ValueError, lambda: model(_ids(2, 8)), "8 tokens, context_length=7")


def test_encoder_every_parameter_learns(Encoder):
    """Every parameter gets the gradient that torch's own functions give."""
    ids = _ids(3, 7)
    model, w, c = _built(Encoder, ENCODER_KIND)
    _check_gradients(model, w, c, _torch_encoder, [ids])
    model, w, c = _built(Encoder, ENCODER_KIND, **WIDE)
    _check_gradients(model, w, c, _torch_encoder, [ids, KNOWN, _segments(3, 7)], rows=KNOWN)


def test_encoder_starts_with_init_weights(Encoder):
    """A new model has the weights of `init_weights`."""
    _check_fresh(Encoder, ENCODER_KIND, n_segments=41)
    _check_fresh(Encoder, ENCODER_KIND, n_layers=4, n_segments=41)


def test_encoder_has_no_dropout_and_no_memory(Encoder):
    """Train and eval mode, a first and a second call give the same."""
    _check_modes(Encoder, ENCODER_KIND, _ids(2, 7))


def test_encoder_keeps_half_precision(Encoder):
    """A model in bfloat16 gives bfloat16."""
    _check_half(Encoder, ENCODER_KIND, _ids(2, 7))


# Seq2Seq -------------------------------------------------------------------------------------------------------------

# Padding at the right of row 1 and in the middle of row 2, source and target.
SOURCE_KNOWN = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]], dtype=torch.bool)
TARGET_KNOWN = KNOWN


def _pair(B=3, S=5, T=7, V=17):
    return _ids(B, S, V=V), _ids(B, T, salt=1, V=V)


def probe_Seq2Seq(Seq2Seq):
    """Results that tell the known mistakes apart."""
    source, target = _pair()
    ask = _asker(Seq2Seq, SEQ2SEQ_KIND)
    wide = _asker(Seq2Seq, SEQ2SEQ_KIND, **WIDE | {"n_layers": 1, "norm_eps": 0.3})

    def source_ends(model):
        return model(_ids(1, 12), target[:1])

    def target_ends(model):
        return model(source[:1], _ids(1, 12))

    return [
        ask(_shapes_of),
        ask(lambda m: m(source, target)),
        ask(lambda m: m(source[:, :1], target[:, :1])),
        ask(lambda m: m(source, target, SOURCE_KNOWN)),
        ask(lambda m: m(source, target, None, TARGET_KNOWN)[TARGET_KNOWN]),
        ask(source_ends),
        ask(target_ends),
        ask(_count),
        wide(_shapes_of),
        wide(lambda m: m(source, target, SOURCE_KNOWN, TARGET_KNOWN)[TARGET_KNOWN]),
        *_spread_out(outcome(lambda: _fresh_answer(Seq2Seq, SEQ2SEQ_KIND, n_layers=1)), 5),
    ]


def test_seq2seq_has_these_parameters(Seq2Seq):
    """Parameters by name: `token_embedding`, `head` without a bias, `encoder.0.norm1` ..., `decoder.0.norm1` ..."""
    for sizes in (SIZES, WIDE | {"n_layers": 3}, ONE_KEY_HEAD):
        c = Seq2SeqConfig(**sizes)
        _expect_parameters(Seq2Seq(c), _seq2seq_shapes(c))


def test_seq2seq_equals_torchs_layers(Seq2Seq):
    """With the same weights it gives what torch's own layers give: post-norm, ReLU, all reading the encoder's last."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND)
    encoder = _torch_layers(nn.TransformerEncoderLayer, w, ["encoder.0", "encoder.1"], c, F.relu)
    decoder = _torch_layers(nn.TransformerDecoderLayer, w, ["decoder.0", "decoder.1"], c, F.relu)
    for shape in ((3, 5, 7), (2, 11, 1)):
        source, target = _pair(*shape)
        memory, x = (F.embedding(ids, w["token_embedding.weight"]) * 12**0.5 for ids in (source, target))
        memory, x = memory + _sines(shape[1], 12), x + _sines(shape[2], 12)
        for layer in encoder:
            memory = layer(memory)
        for layer in decoder:
            x = layer(x, memory, tgt_mask=~_causal(shape[2]))
        got = model(source, target)
        _close(got, F.linear(x, w["head.weight"]), f"logits of {shape[2]} target tokens, {shape[1]} source tokens")


def test_seq2seq_token_vectors(Seq2Seq):
    """Both sides begin with token_embedding * sqrt(C) + sines and cosines: seen with one token on a side."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND, n_layers=1)
    for S, T in ((1, 1), (1, 11)):
        source, target = _pair(2, S, T)
        want = _torch_seq2seq(w, c, source, target)
        _close(model(source, target), want, f"logits of {T} target tokens, {S} source tokens, one layer a side")


def test_seq2seq_takes_any_sizes(Seq2Seq):
    """n_layers, d_model, n_kv_heads, head_dim and d_ff are those of the config; H * D need not be C."""
    for sizes in (WIDE, ONE_KEY_HEAD):
        model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND, **sizes)
        source, target = _pair(V=13)
        what = f"logits with H={c.n_heads}, K={c.n_kv_heads}, D={c.head_dim}, C={c.d_model}, F={c.d_ff}"
        _close(model(source, target), _torch_seq2seq(w, c, source, target), what)


def test_seq2seq_norms_use_norm_eps(Seq2Seq):
    """Every norm adds the config's norm_eps to the variance: seen with 0.3 in place of 0.00001."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND, norm_eps=0.3, n_layers=1)
    _close(model(*_pair()), _torch_seq2seq(w, c, *_pair()), "logits with norm_eps=0.3")


def test_seq2seq_head_is_the_embedding(Seq2Seq):
    """Head and token embedding are one parameter, before and after a step of training."""
    _check_tied(Seq2Seq, SEQ2SEQ_KIND)


def test_seq2seq_target_cannot_see_its_future(Seq2Seq):
    """A target token's logits depend on itself and on the target before it, on nothing after it."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND)
    source, target = _pair()
    changed = target.clone()
    changed[:, 4] = (changed[:, 4] + 3) % 17
    before, after = model(source, target), model(source, changed)
    _close(after[:, :4], before[:, :4], "logits 0-3 after target token 4 was changed")
    _close(after, _torch_seq2seq(w, c, source, changed), "logits after target token 4 was changed")


def test_seq2seq_source_is_seen_whole(Seq2Seq):
    """The first target token already reads the whole source, and source tokens read each other both ways."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND, n_layers=1)
    source, target = _pair()
    for t in (0, 4):
        changed = source.clone()
        changed[:, t] = (changed[:, t] + 3) % 17
        want = _torch_seq2seq(w, c, changed, target)
        _close(model(changed, target), want, f"logits after source token {t} was changed")


def test_seq2seq_hides_padding_of_the_source(Seq2Seq):
    """Source padding is hidden from the source's own tokens and from the target's: it changes no logits."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND)
    source, target = _pair()
    got = model(source, target, source_is_token=SOURCE_KNOWN)
    _close(got, _torch_seq2seq(w, c, source, target, SOURCE_KNOWN), "logits with padding in the source")
    alone = model(source[1:2, :3], target[1:2])
    _close(got[1:2], alone, "logits with a padded source, next to those with the source alone")
    other = torch.where(SOURCE_KNOWN, source, (source + 5) % 17)
    _close(model(other, target, SOURCE_KNOWN), got, "logits after the ids of the source's padding were changed")


def test_seq2seq_hides_padding_of_the_target(Seq2Seq):
    """Target padding is hidden from the target's tokens, and the future stays hidden."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND)
    source, target = _pair()
    got = model(source, target, target_is_token=TARGET_KNOWN)
    want = _torch_seq2seq(w, c, source, target, None, TARGET_KNOWN)
    _close(got[TARGET_KNOWN], want[TARGET_KNOWN], "logits of target tokens with padding in the target")
    other = torch.where(TARGET_KNOWN, target, (target + 5) % 17)
    got = model(source, other, SOURCE_KNOWN, TARGET_KNOWN)
    want = _torch_seq2seq(w, c, source, target, SOURCE_KNOWN, TARGET_KNOWN)
    _close(got[TARGET_KNOWN], want[TARGET_KNOWN], "logits of target tokens with padding on both sides")


def test_seq2seq_context_has_an_end(Seq2Seq):
    """As many tokens as context_length are fine on either side, one more is a ValueError."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND, context_length=7, n_layers=1)
    source, target = _pair(2, 7, 7)
    _close(model(source, target), _torch_seq2seq(w, c, source, target), "logits of 7 tokens, context_length=7")
    raises(ValueError, lambda: model(_ids(2, 8), target), "8 source tokens, context_length=7")
    raises(ValueError, lambda: model(source, _ids(2, 8)), "8 target tokens, context_length=7")


def test_seq2seq_every_parameter_learns(Seq2Seq):
    """Every parameter gets the gradient that torch's own functions give."""
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND)
    _check_gradients(model, w, c, _torch_seq2seq, _pair())
    model, w, c = _built(Seq2Seq, SEQ2SEQ_KIND, **WIDE | {"n_layers": 1})
    masks = [SOURCE_KNOWN[:2], TARGET_KNOWN[:2]]
    _check_gradients(model, w, c, _torch_seq2seq, [*_pair(2), *masks], rows=masks[1])


def test_seq2seq_starts_with_init_weights(Seq2Seq):
    """A new model has the weights of `init_weights`, in both stacks."""
    _check_fresh(Seq2Seq, SEQ2SEQ_KIND, n_layers=1, ends_per_layer=5)
    _check_fresh(Seq2Seq, SEQ2SEQ_KIND, n_layers=2, ends_per_layer=5)


def test_seq2seq_has_no_dropout_and_no_memory(Seq2Seq):
    """Train and eval mode, a first and a second call give the same."""
    _check_modes(Seq2Seq, SEQ2SEQ_KIND, *_pair())


def test_seq2seq_keeps_half_precision(Seq2Seq):
    """A model in bfloat16 gives bfloat16."""
    _check_half(Seq2Seq, SEQ2SEQ_KIND, *_pair())
