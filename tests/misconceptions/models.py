"""Mistakes that people make in first weights, in a decoder's inputs, and in putting the four models together."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from tfmlib import attention, blocks, heads
from tfmlib import positions as places
from tfmlib.models import shared

from . import wrong

# init_weights --------------------------------------------------------------------------------------------------------


def _draw(model, std_of, tables=True, biases=True):
    """Weights of linear layers and embeddings by a standard deviation that follows from name and module."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (tables and isinstance(module, nn.Embedding)):
            nn.init.normal_(module.weight, std=std_of(name, module))
        if biases and isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _ends(model, kinds=("o_proj", "down")):
    return [m for name, m in model.named_modules() if name.split(".")[-1] in kinds and isinstance(m, nn.Linear)]


def _scaled(model):
    ends = _ends(model)
    return lambda name, module: 0.02 / math.sqrt(len(ends)) if module in ends else 0.02


@wrong(
    "init_weights",
    caught_by="test_ends_of_branches_start_smaller",
    hint="No layer is scaled. Divide the standard deviation of `o_proj` and `down` by the root of their number.",
)
def init_unscaled(model):
    _draw(model, lambda name, module: 0.02)


@wrong(
    "init_weights",
    caught_by="test_weights_are_small_and_normal",
    hint="Every linear layer is scaled. Only those that end a branch are: `o_proj` and `down`.",
)
def init_all_scaled(model):
    n = max(len(_ends(model)), 1)
    _draw(model, lambda name, module: 0.02 / math.sqrt(n) if isinstance(module, nn.Linear) else 0.02)


@wrong(
    "init_weights",
    caught_by="test_ends_of_branches_start_smaller",
    hint="`o_proj` and `down` are divided by their number. Variances add up, so divide by its root.",
)
def init_scaled_by_the_number(model):
    ends = _ends(model)
    _draw(model, lambda name, module: 0.02 / len(ends) if module in ends else 0.02)


@wrong(
    "init_weights",
    caught_by="test_ends_of_branches_start_smaller",
    hint="The number under the root is that of the blocks. Each block adds to the stream twice: "
    "count all layers called `o_proj` or `down`.",
)
def init_scaled_by_blocks(model):
    ends, n = _ends(model), len(_ends(model, ["o_proj"])) or 1
    _draw(model, lambda name, module: 0.02 / math.sqrt(n) if module in ends else 0.02)


@wrong(
    "init_weights",
    caught_by="test_ends_of_branches_start_smaller",
    hint="Only `o_proj` is scaled. The MLP adds to the stream too: scale `down` as well.",
)
def init_down_forgotten(model):
    ends, n = _ends(model, ["o_proj"]), len(_ends(model))
    _draw(model, lambda name, module: 0.02 / math.sqrt(n) if module in ends else 0.02)


@wrong(
    "init_weights",
    caught_by="test_weights_are_small_and_normal",
    hint="0.02 is taken for the variance. It is the standard deviation.",
)
def init_by_variance(model):
    std = _scaled(model)
    _draw(model, lambda name, module: std(name, module) * 0.02**-0.5)


@wrong(
    "init_weights",
    caught_by="test_weights_are_small_and_normal",
    hint="Embeddings keep torch's own start, whose standard deviation is 1. Draw them with 0.02 as well.",
)
def init_embeddings_forgotten(model):
    _draw(model, _scaled(model), tables=False)


@wrong(
    "init_weights",
    caught_by="test_biases_start_at_zero",
    hint="The biases keep torch's random start. Set those of linear layers to 0.",
)
def init_biases_forgotten(model):
    _draw(model, _scaled(model), biases=False)


@wrong(
    "init_weights",
    caught_by="test_everything_else_stays",
    hint="Every parameter is drawn, whatever it belongs to. "
    "Norms and others keep their values: ask for nn.Linear and nn.Embedding.",
)
def init_every_parameter(model):
    _draw(model, _scaled(model))
    drawn = {id(p) for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding)) for p in m.parameters()}
    for name, p in model.named_parameters():
        if id(p) not in drawn:
            nn.init.zeros_(p) if name.endswith("bias") else nn.init.normal_(p, std=0.02)


@wrong(
    "init_weights",
    caught_by="test_everything_else_stays",
    hint="Everything called `bias` is set to 0, norms included. Only the biases of linear layers are.",
)
def init_every_bias(model):
    _draw(model, _scaled(model))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)


@wrong(
    "init_weights",
    caught_by="test_weights_are_small_and_normal",
    hint="The weights are drawn from a uniform distribution. Use a normal one: nn.init.normal_.",
)
def init_uniform(model):
    std = _scaled(model)
    _draw(model, std)
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            edge = 3**0.5 * std(name, module)
            nn.init.uniform_(module.weight, -edge, edge)


@wrong(
    "init_weights",
    caught_by="test_a_layer_is_known_by_its_own_name",
    hint="The names are searched for anywhere in a path, so that `down_path.0` is scaled too. "
    "Compare the last part of the name.",
)
def init_names_anywhere(model):
    ends = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and ("o_proj" in n or "down" in n)]
    _draw(model, lambda name, module: 0.02 / math.sqrt(len(ends)) if module in ends else 0.02)


@wrong(
    "init_weights",
    caught_by="test_a_model_without_such_layers",
    hint="A model without `o_proj` and `down` ends in a division by zero. Divide only where there is such a layer.",
)
def init_without_ends_fails(model):
    smaller = 0.02 / math.sqrt(len(_ends(model)))
    ends = _ends(model)
    _draw(model, lambda name, module: smaller if module in ends else 0.02)


@wrong(
    "init_weights",
    caught_by="test_parameters_stay_the_same_objects",
    hint="New nn.Parameters are put in place of the old, which unties shared weights "
    "and leaves the optimizer with the old ones. Fill the old ones in place.",
)
def init_by_new_parameters(model):
    std = _scaled(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight = nn.Parameter(torch.randn_like(module.weight) * std(name, module))
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias = nn.Parameter(torch.zeros_like(module.bias))


@wrong(
    "init_weights",
    caught_by="test_weights_are_small_and_normal",
    hint="Only the model's direct children are reached. `modules()` goes through all levels, `children()` through one.",
)
def init_of_children(model):
    std = _scaled(model)
    for name, module in model.named_children():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std(name, module))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


@wrong(
    "init_weights",
    caught_by="test_weights_are_small_and_normal",
    hint="Nothing is changed: the model keeps torch's own start. Fill the weights in place, in every module.",
)
def init_nothing(model):
    return model


# decoder_inputs ------------------------------------------------------------------------------------------------------


def _checked(ids, context_length, positions, cache):
    """The positions by the contract."""
    T = ids.shape[1]
    start = 0 if cache is None else cache.length
    positions = torch.arange(start, start + T) if positions is None else positions
    if int(positions.max()) >= context_length:
        raise ValueError("beyond the context")
    return positions


def _past(T, start=0):
    return torch.ones(T, start + T, dtype=torch.bool).tril(start)


def _start(cache):
    return 0 if cache is None else cache.length


@wrong(
    "decoder_inputs",
    caught_by="test_they_follow_what_the_cache_holds",
    hint="With a cache the positions start again at 0. They start at cache.length.",
)
def inputs_from_zero(ids, context_length, positions=None, mask=None, cache=None):
    positions = _checked(ids, context_length, positions, None)
    visible = _past(ids.shape[1], _start(cache))
    return positions, visible if mask is None else visible & mask


@wrong(
    "decoder_inputs",
    caught_by="test_they_follow_what_the_cache_holds",
    hint="The triangle is aligned top-left, so new tokens do not see what the cache holds. "
    "The T queries are the last of the S keys: causal_mask(T, S).",
)
def inputs_top_left(ids, context_length, positions=None, mask=None, cache=None):
    positions = _checked(ids, context_length, positions, cache)
    visible = torch.ones(ids.shape[1], _start(cache) + ids.shape[1], dtype=torch.bool).tril()
    return positions, visible if mask is None else visible & mask


@wrong(
    "decoder_inputs",
    caught_by="test_they_follow_what_the_cache_holds",
    hint="With a cache everything is visible, so that the tokens of one chunk see their own future. "
    "Causality holds there too.",
)
def inputs_open_with_a_cache(ids, context_length, positions=None, mask=None, cache=None):
    positions = _checked(ids, context_length, positions, cache)
    visible = _past(ids.shape[1]) if cache is None else torch.ones(ids.shape[1], _start(cache) + ids.shape[1]).bool()
    return positions, visible if mask is None else visible & mask


@wrong(
    "decoder_inputs",
    caught_by="test_they_follow_what_the_cache_holds",
    hint="The mask is (T, T), as if nothing were in the cache. Keys are cache.length + T.",
)
def inputs_square(ids, context_length, positions=None, mask=None, cache=None):
    positions = _checked(ids, context_length, positions, cache)
    visible = _past(ids.shape[1])
    return positions, visible if mask is None else visible & mask[..., -ids.shape[1] :]


@wrong(
    "decoder_inputs",
    caught_by="test_padding_is_hidden_too",
    hint="The padding mask is ignored. Join it with the causal one: `&`.",
)
def inputs_without_padding(ids, context_length, positions=None, mask=None, cache=None):
    return _checked(ids, context_length, positions, cache), _past(ids.shape[1], _start(cache))


@wrong(
    "decoder_inputs",
    caught_by="test_padding_is_hidden_too",
    hint="A given padding mask replaces the causal one, and the future is seen. Both must allow a look: `&`.",
)
def inputs_padding_alone(ids, context_length, positions=None, mask=None, cache=None):
    visible = _past(ids.shape[1], _start(cache))
    return _checked(ids, context_length, positions, cache), visible if mask is None else mask.expand(
        -1, -1, ids.shape[1], -1
    )


@wrong(
    "decoder_inputs",
    caught_by="test_padding_is_hidden_too",
    hint="The two masks are joined by `|`. A token is visible if it is in the past and no padding: `&`.",
)
def inputs_either(ids, context_length, positions=None, mask=None, cache=None):
    visible = _past(ids.shape[1], _start(cache))
    return _checked(ids, context_length, positions, cache), visible if mask is None else visible | mask


@wrong(
    "decoder_inputs",
    caught_by="test_padding_is_hidden_too",
    hint="The padding mask's sense is inverted. It is True for tokens, which may be seen.",
)
def inputs_inverted_padding(ids, context_length, positions=None, mask=None, cache=None):
    visible = _past(ids.shape[1], _start(cache))
    return _checked(ids, context_length, positions, cache), visible if mask is None else visible & ~mask


@wrong(
    "decoder_inputs",
    caught_by="test_three_tokens_by_hand",
    hint="The sense is inverted: True must mean that a token may look, not that the place is hidden.",
)
def inputs_inverted(ids, context_length, positions=None, mask=None, cache=None):
    visible = _past(ids.shape[1], _start(cache))
    return _checked(ids, context_length, positions, cache), ~(visible if mask is None else visible & mask)


@wrong(
    "decoder_inputs",
    caught_by="test_three_tokens_by_hand",
    hint="A token does not see itself. The diagonal is visible.",
)
def inputs_strictly_past(ids, context_length, positions=None, mask=None, cache=None):
    start = _start(cache)
    visible = _past(ids.shape[1], start).tril(start - 1)
    return _checked(ids, context_length, positions, cache), visible if mask is None else visible & mask


@wrong(
    "decoder_inputs",
    caught_by="test_three_tokens_by_hand",
    hint="The mask holds 0 and -inf, to be added to scores. Here it is boolean, True where a token may look.",
)
def inputs_added(ids, context_length, positions=None, mask=None, cache=None):
    visible = _past(ids.shape[1], _start(cache))
    visible = visible if mask is None else visible & mask
    hidden = torch.zeros(visible.shape).masked_fill(~visible, -math.inf)
    return _checked(ids, context_length, positions, cache), hidden


@wrong(
    "decoder_inputs",
    caught_by="test_given_positions_are_used",
    hint="Positions that are given are ignored. Return them in place of the usual ones.",
)
def inputs_own_positions(ids, context_length, positions=None, mask=None, cache=None):
    _checked(ids, context_length, positions, cache)
    start = _start(cache)
    visible = _past(ids.shape[1], start)
    return torch.arange(start, start + ids.shape[1]), visible if mask is None else visible & mask


@wrong(
    "decoder_inputs",
    caught_by="test_the_context_has_an_end",
    hint="Nothing is checked: a position beyond context_length must be a ValueError.",
)
def inputs_without_end(ids, context_length, positions=None, mask=None, cache=None):
    positions = _checked(ids, math.inf, positions, cache)
    visible = _past(ids.shape[1], _start(cache))
    return positions, visible if mask is None else visible & mask


@wrong(
    "decoder_inputs",
    caught_by="test_the_context_has_an_end",
    hint="Off by one: with context_length=8 the last position is 7, so 8 is beyond.",
)
def inputs_one_too_many(ids, context_length, positions=None, mask=None, cache=None):
    return inputs_without_end(ids, 0, _checked(ids, context_length + 1, positions, cache), mask, cache)


@wrong(
    "decoder_inputs",
    caught_by="test_the_context_has_an_end",
    hint="Off by one: exactly context_length tokens fit.",
)
def inputs_one_too_few(ids, context_length, positions=None, mask=None, cache=None):
    return inputs_without_end(ids, 0, _checked(ids, context_length - 1, positions, cache), mask, cache)


@wrong(
    "decoder_inputs",
    caught_by="test_the_context_has_an_end",
    hint="Only the new tokens are counted. With a cache they stand behind those that it holds.",
)
def inputs_end_without_cache(ids, context_length, positions=None, mask=None, cache=None):
    _checked(ids, context_length, positions, None)
    return inputs_without_end(ids, 0, positions, mask, cache)


@wrong(
    "decoder_inputs",
    caught_by="test_given_positions_have_the_same_end",
    hint="Positions that are given are not checked. The largest one must be below context_length.",
)
def inputs_given_unchecked(ids, context_length, positions=None, mask=None, cache=None):
    if positions is None:
        _checked(ids, context_length, None, cache)
    return inputs_without_end(ids, 0, positions, mask, cache)


@wrong(
    "decoder_inputs",
    caught_by="test_given_positions_have_the_same_end",
    hint="Only the last column of the positions is checked. A larger one may stand before it: take the maximum of all.",
)
def inputs_last_column_checked(ids, context_length, positions=None, mask=None, cache=None):
    last = positions if positions is None else positions[..., -1]
    _checked(ids, context_length, last, cache)
    return inputs_without_end(ids, 0, positions, mask, cache)


@wrong(
    "decoder_inputs",
    caught_by="test_given_positions_have_the_same_end",
    hint="Only the first sequence's positions are checked. Take the maximum over the whole batch.",
)
def inputs_first_row_checked(ids, context_length, positions=None, mask=None, cache=None):
    first = positions if positions is None or positions.ndim == 1 else positions[0]
    _checked(ids, context_length, first, cache)
    return inputs_without_end(ids, 0, positions, mask, cache)


@wrong(
    "decoder_inputs",
    caught_by="test_padding_takes_no_position",
    hint="The number of tokens is checked although positions are given. Then only these count: padding takes up none.",
)
def inputs_count_checked(ids, context_length, positions=None, mask=None, cache=None):
    _checked(ids, context_length, positions, cache)
    _checked(ids, context_length, None, cache)
    return inputs_without_end(ids, 0, positions, mask, cache)


# GPT and Llama -------------------------------------------------------------------------------------------------------
#
# A correct body whose steps are methods; each mistake is a class that gets one step wrong.


class _Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.more_tables()
        self.blocks = self.stack(config.n_layers)
        self.norm = self.make_norm()
        self.head = self.make_head()
        if self.ties():
            self.tie()
        self.start()

    def more_tables(self):
        pass

    def stack(self, n):
        return nn.ModuleList(self.make_block() for _ in range(n))

    def make_block(self):
        return self.arrange(self.make_attention(), self.make_mlp(), self.make_norm(), self.make_norm())

    def arrange(self, *parts):
        return blocks.PreNormBlock(*parts)

    def eps(self):
        return self.config.norm_eps

    def sizes(self):
        c = self.config
        return {"n_heads": c.n_heads, "n_kv_heads": c.n_kv_heads, "head_dim": c.head_dim}

    def hidden(self):
        return self.config.d_ff

    def make_head(self):
        return nn.Linear(self.config.d_model, self.config.vocab_size, bias=False)

    def ties(self):
        return self.config.tied

    def tie(self):
        self.head.weight = self.token_embedding.weight

    def start(self):
        shared.init_weights(self)

    def forward(self, ids, positions=None, mask=None, cache=None):
        positions, visible = self.inputs(ids, positions, mask, cache)
        x = self.embed(ids, positions)
        for i, block in enumerate(self.blocks):
            view = None if cache is None else self.view(cache, i)
            x = block(x, mask=visible, positions=self.handed_on(positions), cache=view)
        return self.finish(x, positions)

    def inputs(self, ids, positions, mask, cache):
        return shared.decoder_inputs(ids, self.config.context_length, positions, mask, cache)

    def embed(self, ids, positions):
        return self.token_embedding(ids)

    def handed_on(self, positions):
        return positions

    def view(self, cache, i):
        return cache.layer(i)

    def finish(self, x, positions):
        return self.head(self.norm(x))


class _GPT(_Decoder):
    def more_tables(self):
        self.position_embedding = nn.Embedding(self.config.context_length, self.config.d_model)

    def make_attention(self):
        return heads.MultiHeadAttention(self.config.d_model, **self.sizes(), bias=True)

    def make_mlp(self):
        return blocks.MLP(self.config.d_model, self.hidden(), activation=self.activation())

    def activation(self):
        return functools.partial(F.gelu, approximate="tanh")

    def make_norm(self):
        return blocks.LayerNorm(self.config.d_model, self.eps())

    def embed(self, ids, positions):
        return super().embed(ids, positions) + self.position_embedding(positions)


class _Llama(_Decoder):
    def make_attention(self):
        return heads.MultiHeadAttention(self.config.d_model, **self.sizes(), rope_base=self.base())

    def base(self):
        return self.config.rope_base

    def make_mlp(self):
        return blocks.SwiGLU(self.config.d_model, self.hidden())

    def make_norm(self):
        return blocks.RMSNorm(self.config.d_model, self.eps())


def _wrong_decoder(caught_by, hint):
    """Enter a mistake that GPT and Llama share: one wrong class for each."""

    def enter(mistake):
        for piece, body in (("GPT", _GPT), ("Llama", _Llama)):
            variant = type(f"{piece}{mistake.__name__}", (mistake, body), {})
            wrong(piece, caught_by=f"test_{piece.lower()}_{caught_by}", hint=hint)(variant)
        return mistake

    return enter


@_wrong_decoder(
    caught_by="with_a_cache",
    hint="The causal mask is left out when there is a cache, so that the tokens of a chunk see their own future. "
    "Hand on what `decoder_inputs` gives, with a cache too.",
)
class OpenWithACache:
    def inputs(self, ids, positions, mask, cache):
        positions, visible = super().inputs(ids, positions, mask, cache)
        return positions, visible if cache is None else mask


@_wrong_decoder(
    caught_by="with_a_cache",
    hint="The causal mask is left out when the cache already holds something. "
    "A later chunk of several tokens needs it too.",
)
class OpenAfterTheFirstChunk:
    def inputs(self, ids, positions, mask, cache):
        positions, visible = super().inputs(ids, positions, mask, cache)
        return positions, mask if cache is not None and cache.length else visible


@_wrong_decoder(
    caught_by="with_a_cache_and_padding",
    hint="A single new token gets no mask at all. It has no future to hide, but padding must stay hidden from it.",
)
class OpenForOneToken:
    def inputs(self, ids, positions, mask, cache):
        positions, visible = super().inputs(ids, positions, mask, cache)
        return positions, None if ids.shape[1] == 1 else visible


@_wrong_decoder(
    caught_by="with_a_cache",
    hint="With a cache the triangle is aligned top-left, so that new tokens do not see what the cache holds. "
    "The queries are the last of the keys.",
)
class TopLeft:
    def inputs(self, ids, positions, mask, cache):
        positions, visible = super().inputs(ids, positions, mask, cache)
        if cache is not None:
            visible = torch.ones(visible.shape[-2:], dtype=torch.bool).tril()
            visible = visible if mask is None else visible & mask
        return positions, visible


@_wrong_decoder(
    caught_by="with_a_cache",
    hint="All blocks write into layer 0 of the cache. Block i needs its own view: cache.layer(i).",
)
class LayerZeroForAll:
    def view(self, cache, i):
        return cache.layer(0)


@_wrong_decoder(
    caught_by="with_a_cache",
    hint="All blocks write into the last layer of the cache: "
    "a function made in a loop sees the loop's last i. Block i needs cache.layer(i).",
)
class LastLayerForAll:
    def view(self, cache, i):
        return cache.layer(len(self.blocks) - 1)


@_wrong_decoder(
    caught_by="with_a_cache",
    hint="The blocks get the whole cache. Each needs one layer's view, which has `append`: cache.layer(i).",
)
class WholeCache:
    def view(self, cache, i):
        return cache


@_wrong_decoder(
    caught_by="with_a_cache",
    hint="The cache does not reach the blocks. Hand cache.layer(i) to block i.",
)
class CacheNotHandedOn:
    def view(self, cache, i):
        return None


@_wrong_decoder(
    caught_by="with_a_cache",
    hint="With a cache every chunk starts again at position 0. They follow the cache.length tokens before them.",
)
class PositionsRestart:
    def inputs(self, ids, positions, mask, cache):
        where, visible = super().inputs(ids, positions, mask, cache)
        return torch.arange(ids.shape[1]) if positions is None else where, visible


@_wrong_decoder(
    caught_by="computes_what_torch_computes",
    hint="The last norm exists, but is not applied. With pre-norm the stream is not normal at its end: head(norm(x)).",
)
class LastNormForgotten:
    def finish(self, x, positions):
        return self.head(x)


@_wrong_decoder(
    caught_by="has_these_parameters",
    hint="The head has a bias. It is a plain matrix: bias=False.",
)
class HeadWithBias:
    def make_head(self):
        return nn.Linear(self.config.d_model, self.config.vocab_size)


@_wrong_decoder(
    caught_by="head_and_embedding",
    hint="The head is a copy of the token embedding, and they drift apart with the first step. "
    "Let both names mean one parameter: head.weight = token_embedding.weight.",
)
class TiedByCopy:
    def tie(self):
        pass

    def start(self):
        super().start()
        if self.ties():
            with torch.no_grad():
                self.head.weight.copy_(self.token_embedding.weight)


@_wrong_decoder(
    caught_by="head_and_embedding",
    hint="`config.tied` is ignored: the head always has a weight of its own. "
    "Where it is True, let head.weight be token_embedding.weight.",
)
class NeverTied:
    def ties(self):
        return False


@_wrong_decoder(
    caught_by="head_and_embedding",
    hint="`config.tied` is ignored: head and token embedding are always one parameter. Share it only where it is True.",
)
class AlwaysTied:
    def ties(self):
        return True


@_wrong_decoder(
    caught_by="starts_with_init_weights",
    hint="`init_weights` is not called: the model starts with torch's own, larger weights. "
    "Call it on the whole model at the end of `__init__`.",
)
class TorchsOwnStart:
    def start(self):
        pass


@_wrong_decoder(
    caught_by="starts_with_init_weights",
    hint="`o_proj` and `down` start with 0.02 like all others. "
    "Call `init_weights` once on the whole model, which makes them smaller.",
)
class EndsNotScaled:
    def start(self):
        _draw(self, lambda name, module: 0.02)


@_wrong_decoder(
    caught_by="starts_with_init_weights",
    hint="`init_weights` is called for each block by itself, and counts two scaled layers in each. "
    "Call it once, on the whole model.",
)
class StartedBlockByBlock:
    def start(self):
        _draw(self, lambda name, module: 0.02)
        for block in self.blocks:
            shared.init_weights(block)


@_wrong_decoder(
    caught_by="padding_changes_nothing",
    hint="The padding mask is ignored: padding is read like a token. Hand `mask` to `decoder_inputs`.",
)
class PaddingIgnored:
    def inputs(self, ids, positions, mask, cache):
        return super().inputs(ids, positions, None, cache)


@_wrong_decoder(
    caught_by="padding_changes_nothing",
    hint="The padding mask's sense is inverted. It is True for tokens, which may be seen.",
)
class PaddingInverted:
    def inputs(self, ids, positions, mask, cache):
        return super().inputs(ids, positions, None if mask is None else ~mask, cache)


@_wrong_decoder(
    caught_by="padding_changes_nothing",
    hint="A padding mask takes the place of the causal one, so that the future is seen. Join both: `&`.",
)
class PaddingInPlaceOfCausality:
    def inputs(self, ids, positions, mask, cache):
        positions, visible = super().inputs(ids, positions, mask, cache)
        return positions, visible if mask is None else mask


@_wrong_decoder(
    caught_by="future_cannot_change_the_past",
    hint="Every token sees the whole sequence. A decoder is causal: a token sees itself and what came before.",
)
class NotCausal:
    def inputs(self, ids, positions, mask, cache):
        return super().inputs(ids, positions, mask, cache)[0], mask


@_wrong_decoder(
    caught_by="context_has_an_end",
    hint="Nothing is checked: a position beyond context_length must be a ValueError. `decoder_inputs` does it.",
)
class WithoutEnd:
    def inputs(self, ids, positions, mask, cache):
        return shared.decoder_inputs(ids, 10**6, positions, mask, cache)


@_wrong_decoder(
    caught_by="context_has_an_end",
    hint="Only the number of new tokens is checked. With a cache they stand further on, and positions can be given.",
)
class EndOfNewTokensAlone:
    def inputs(self, ids, positions, mask, cache):
        if ids.shape[1] > self.config.context_length:
            raise ValueError("too many tokens")
        return shared.decoder_inputs(ids, 10**6, positions, mask, cache)


@_wrong_decoder(
    caught_by="computes_what_torch_computes",
    hint="The norms come after the sums, as in 2017. Here they come first in each branch: use PreNormBlock.",
)
class PostNorm:
    def arrange(self, *parts):
        return blocks.PostNormBlock(*parts)


@_wrong_decoder(
    caught_by="norms_use_norm_eps",
    hint="The norms use their default eps. Hand them config.norm_eps.",
)
class EpsForgotten:
    def eps(self):
        return 1e-5


@_wrong_decoder(
    caught_by="has_these_parameters",
    hint="config.n_kv_heads is not handed on: there are as many key heads as query heads. Give it to the attention.",
)
class KeyHeadsForgotten:
    def sizes(self):
        return super().sizes() | {"n_kv_heads": None}


@_wrong_decoder(
    caught_by="has_these_parameters",
    hint="config.head_dim is not handed on: heads are d_model / n_heads wide. Give it to the attention.",
)
class HeadWidthForgotten:
    def sizes(self):
        c = self.config
        return super().sizes() | {"head_dim": c.d_model // c.n_heads}


@_wrong_decoder(
    caught_by="has_these_parameters",
    hint="config.d_ff is not used: the MLP's hidden width is always 4 * d_model. Give d_ff to the MLP.",
)
class HiddenWidthForgotten:
    def hidden(self):
        return 4 * self.config.d_model


@_wrong_decoder(
    caught_by="computes_what_torch_computes",
    hint="All layers are one block, used again and again: `[block] * n` repeats the same object. "
    "Make a new block for each layer.",
)
class OneBlockForAll:
    def stack(self, n):
        return nn.ModuleList([self.make_block()] * n)


@_wrong_decoder(
    caught_by="has_these_parameters",
    hint="The blocks are in a plain list, so that their parameters are not the model's: "
    "no optimizer would find them. Use nn.ModuleList.",
)
class PlainList:
    def stack(self, n):
        return [self.make_block() for _ in range(n)]


@_wrong_decoder(
    caught_by="computes_what_torch_computes",
    hint="The model returns probabilities. It returns logits: the loss and the sampler take the softmax themselves.",
)
class Probabilities:
    def finish(self, x, positions):
        return super().finish(x, positions).softmax(-1)


@_wrong_decoder(
    caught_by="computes_what_torch_computes",
    hint="Only the last position's logits are returned. Training needs those of every position: (B, T, V).",
)
class LastPositionAlone:
    def finish(self, x, positions):
        return super().finish(x[:, -1:], positions)


@_wrong_decoder(
    caught_by="computes_what_torch_computes",
    hint="Token embeddings are multiplied by sqrt(C). That is the model of 2017's; here they are added as they are.",
)
class ScaledEmbedding:
    def embed(self, ids, positions):
        x = self.token_embedding(ids)
        return super().embed(ids, positions) - x + x * math.sqrt(self.config.d_model)


# GPT alone -----------------------------------------------------------------------------------------------------------


@wrong(
    "GPT",
    caught_by="test_gpt_positions_can_be_given",
    hint="`positions` is ignored: tokens always stand at 0, 1, 2 ... Use those that are given.",
)
class PositionsIgnored(_GPT):
    def inputs(self, ids, positions, mask, cache):
        _, visible = super().inputs(ids, positions, mask, cache)
        start = _start(cache)
        return torch.arange(start, start + ids.shape[1]), visible


@wrong(
    "GPT",
    caught_by="test_gpt_computes_what_torch_computes",
    hint="The position embedding is not added: without it a decoder hardly knows the order of tokens.",
)
class PositionsMissing(_GPT):
    def embed(self, ids, positions):
        return self.token_embedding(ids)


@wrong(
    "GPT",
    caught_by="test_gpt_computes_what_torch_computes",
    hint="The position embedding is added after the blocks, too late for attention. Add it to the token embedding.",
)
class PositionsAtTheEnd(_GPT):
    def embed(self, ids, positions):
        return self.token_embedding(ids)

    def finish(self, x, positions):
        return super().finish(x + self.position_embedding(positions), positions)


@wrong(
    "GPT",
    caught_by="test_gpt_computes_what_torch_computes",
    hint="The positions are rows of the token embedding. They have a table of their own: position_embedding.",
)
class PositionsFromTheTokens(_GPT):
    def embed(self, ids, positions):
        return self.token_embedding(ids) + self.token_embedding(positions % self.config.vocab_size)


@wrong(
    "GPT",
    caught_by="test_gpt_computes_what_torch_computes",
    hint='GELU is the exact one. GPT-2 uses the form with tanh: F.gelu(x, approximate="tanh").',
)
class ExactGELU(_GPT):
    def activation(self):
        return F.gelu


@wrong(
    "GPT",
    caught_by="test_gpt_computes_what_torch_computes",
    hint='The activation is ReLU. GPT-2 uses GELU in its form with tanh: F.gelu(x, approximate="tanh").',
)
class WithReLU(_GPT):
    def activation(self):
        return F.relu


@wrong(
    "GPT",
    caught_by="test_gpt_has_these_parameters",
    hint="The projections of the attention have no bias. In GPT-2 they have one: bias=True.",
)
class AttentionWithoutBias(_GPT):
    def make_attention(self):
        return heads.MultiHeadAttention(self.config.d_model, **self.sizes())


@wrong(
    "GPT",
    caught_by="test_gpt_computes_what_torch_computes",
    hint="Queries and keys are rotated as well. GPT-2 has its positions from the table alone: no rope_base.",
)
class TurnedToo(_GPT):
    def make_attention(self):
        sizes = self.sizes()
        rope_base = 10_000.0 if sizes["head_dim"] % 2 == 0 else None
        return heads.MultiHeadAttention(self.config.d_model, **sizes, bias=True, rope_base=rope_base)


# Llama alone ---------------------------------------------------------------------------------------------------------


@wrong(
    "Llama",
    caught_by="test_llama_has_these_parameters",
    hint="A table of positions is added. Llama has none: queries and keys are rotated in every layer.",
)
class LearnedPositions(_Llama):
    def more_tables(self):
        self.position_embedding = nn.Embedding(self.config.context_length, self.config.d_model)

    def embed(self, ids, positions):
        return self.token_embedding(ids) + self.position_embedding(positions)


@wrong(
    "Llama",
    caught_by="test_llama_computes_what_torch_computes",
    hint="Nothing is rotated, so the order of tokens is lost. Give the attention rope_base=config.rope_base.",
)
class NeverTurned(_Llama):
    def base(self):
        return None


@wrong(
    "Llama",
    caught_by="test_llama_turns_by_rope_base",
    hint="config.rope_base is not handed on: the angles are those of the base 10,000. Give it to the attention.",
)
class BaseForgotten(_Llama):
    def base(self):
        return 10_000.0


@wrong(
    "Llama",
    caught_by="test_llama_positions_can_be_given",
    hint="Given positions do not reach the attention, which rotates by them. "
    "Hand them on to every block: block(x, positions=positions, ...).",
)
class PositionsNotHandedOn(_Llama):
    def handed_on(self, positions):
        return None


class _Interleaved(nn.Module):
    """Attention that turns pairs (0, 1), (2, 3) ..."""

    def __init__(self, d_model, n_heads, n_kv_heads, head_dim, rope_base):
        super().__init__()
        self.sizes, self.base = (n_heads, n_kv_heads, n_kv_heads), rope_base
        self.q_proj = nn.Linear(d_model, n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(d_model, n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * head_dim, d_model, bias=False)

    def forward(self, x, context=None, mask=None, positions=None, cache=None):
        layers = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (heads.split_heads(layer(x), n) for layer, n in zip(layers, self.sizes, strict=True))
        q, k = (places.apply_rope(y, positions, self.base, interleaved=True) for y in (q, k))
        if cache is not None:
            k, v = cache.append(k, v)
        k, v = (heads.repeat_kv(y, self.sizes[0] // self.sizes[1]) for y in (k, v))
        return self.o_proj(heads.merge_heads(attention.scaled_dot_product_attention(q, k, v, mask)))


@wrong(
    "Llama",
    caught_by="test_llama_computes_what_torch_computes",
    hint="Interleaved pairs (0, 1), (2, 3) are turned. This course pairs entry i with i + D/2.",
)
class Interleaved(_Llama):
    def make_attention(self):
        return _Interleaved(self.config.d_model, **self.sizes(), rope_base=self.base())


class _Centred(nn.Module):
    """LayerNorm without a bias: it has RMSNorm's parameters."""

    def __init__(self, d_model, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d_model)), eps

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, eps=self.eps)


class _OnePlus(_Centred):
    """RMSNorm whose weight is what is added to 1."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


@wrong(
    "Llama",
    caught_by="test_llama_has_these_parameters",
    hint="The norms are LayerNorms. Llama's are RMSNorms, which have no bias and subtract no mean.",
)
class WithLayerNorm(_Llama):
    def make_norm(self):
        return blocks.LayerNorm(self.config.d_model, self.eps())


@wrong(
    "Llama",
    caught_by="test_llama_computes_what_torch_computes",
    hint="The norms subtract the mean, as LayerNorm does. RMSNorm only divides by the root mean square.",
)
class WithCentredNorm(_Llama):
    def make_norm(self):
        return _Centred(self.config.d_model, self.eps())


@wrong(
    "Llama",
    caught_by="test_llama_computes_what_torch_computes",
    hint="The norms multiply by 1 + weight, as Gemma's do. Llama's multiply by the weight.",
)
class WithOnePlusWeight(_Llama):
    def make_norm(self):
        return _OnePlus(self.config.d_model, self.eps())


class _Gated(nn.Module):
    """SwiGLU, but for how the gate is used."""

    def __init__(self, d_model, d_ff, mix):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)
        self.mix = mix

    def forward(self, x):
        return self.down(self.mix(self.gate(x), self.up(x)))


@wrong(
    "Llama",
    caught_by="test_llama_computes_what_torch_computes",
    hint="`gate` and `up` have changed places: silu goes around gate(x), and up(x) is multiplied as it is.",
)
class GateAndUpChanged(_Llama):
    def make_mlp(self):
        return _Gated(self.config.d_model, self.hidden(), lambda gate, up: gate * F.silu(up))


@wrong(
    "Llama",
    caught_by="test_llama_computes_what_torch_computes",
    hint="The gate goes through GELU. In SwiGLU it goes through silu: x * sigmoid(x).",
)
class GatedByGELU(_Llama):
    def make_mlp(self):
        return _Gated(self.config.d_model, self.hidden(), lambda gate, up: F.gelu(gate) * up)


@wrong(
    "Llama",
    caught_by="test_llama_has_these_parameters",
    hint="The MLP is GPT-2's, with two matrices and biases. Llama's is SwiGLU, with `gate`, `up` and `down`.",
)
class PlainMLP(_Llama):
    def make_mlp(self):
        return blocks.MLP(self.config.d_model, self.hidden())


@wrong(
    "Llama",
    caught_by="test_llama_has_these_parameters",
    hint="The projections of the attention have a bias. Llama has none: bias=False.",
)
class AttentionWithBias(_Llama):
    def make_attention(self):
        return heads.MultiHeadAttention(self.config.d_model, **self.sizes(), bias=True, rope_base=self.base())


# Encoder -------------------------------------------------------------------------------------------------------------


class _Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.d_model
        self.token_embedding = nn.Embedding(config.vocab_size, C)
        self.position_embedding = nn.Embedding(config.context_length, C)
        self.segment_embedding = nn.Embedding(config.n_segments, C)
        self.norm = self.make_norm()
        self.blocks = self.stack(config.n_layers)
        self.start()

    def eps(self):
        return self.config.norm_eps

    def make_norm(self):
        return blocks.LayerNorm(self.config.d_model, self.eps())

    def stack(self, n):
        return nn.ModuleList(self.make_block() for _ in range(n))

    def make_block(self):
        c = self.config
        mha = heads.MultiHeadAttention(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, bias=True)
        mlp = blocks.MLP(c.d_model, c.d_ff, activation=self.activation())
        return self.arrange(mha, mlp, self.make_norm(), self.make_norm())

    def activation(self):
        return F.gelu

    def arrange(self, *parts):
        return blocks.PostNormBlock(*parts)

    def start(self):
        shared.init_weights(self)

    def forward(self, ids, is_token=None, segments=None):
        self.complain(ids)
        x = self.begin(self.tokens(ids), self.places(ids), self.kinds(ids, segments))
        mask = self.mask(ids, is_token)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.finish(x)

    def complain(self, ids):
        if ids.shape[1] > self.config.context_length:
            raise ValueError("too many tokens")

    def tokens(self, ids):
        return self.token_embedding(ids)

    def places(self, ids):
        return self.position_embedding(torch.arange(ids.shape[1]))

    def kinds(self, ids, segments):
        return self.segment_embedding(torch.zeros_like(ids) if segments is None else segments)

    def begin(self, tokens, places, kinds):
        return self.norm(tokens + places + kinds)

    def mask(self, ids, is_token):
        return None if is_token is None else is_token[:, None, None]

    def finish(self, x):
        return x


@wrong(
    "Encoder",
    caught_by="test_encoder_sees_both_ways",
    hint="Attention is causal. An encoder sees both ways: only padding is hidden.",
)
class CausalEncoder(_Encoder):
    def mask(self, ids, is_token):
        causal = _past(ids.shape[1])
        return causal if is_token is None else causal & is_token[:, None, None]


@wrong(
    "Encoder",
    caught_by="test_encoder_hides_padding",
    hint="`is_token` is ignored: padding is read like a token. Make a mask of it with `padding_mask`.",
)
class PaddingRead(_Encoder):
    def mask(self, ids, is_token):
        return None


@wrong(
    "Encoder",
    caught_by="test_encoder_hides_padding",
    hint="The mask's sense is inverted: `is_token` is True for tokens, and a mask is True where one may look.",
)
class TokensHidden(_Encoder):
    def mask(self, ids, is_token):
        return None if is_token is None else ~is_token[:, None, None]


@wrong(
    "Encoder",
    caught_by="test_encoder_hides_padding",
    hint="The mask hides padding as a query. It must be hidden as a key: (B, 1, 1, T), one row for all queries.",
)
class PaddingHiddenAsQuery(_Encoder):
    def mask(self, ids, is_token):
        return None if is_token is None else is_token[:, None, :, None]


@wrong(
    "Encoder",
    caught_by="test_encoder_hides_padding",
    hint="Padding's vectors are set to zero at the start and seen all the same. A mask has to hide it in every layer.",
)
class PaddingZeroed(_Encoder):
    def forward(self, ids, is_token=None, segments=None):
        self.complain(ids)
        x = self.begin(self.tokens(ids), self.places(ids), self.kinds(ids, segments))
        x = x if is_token is None else x * is_token[..., None]
        for block in self.blocks:
            x = block(x)
        return x


@wrong(
    "Encoder",
    caught_by="test_encoder_uses_segments",
    hint="`segments` is ignored: all tokens are in segment 0. Look each token's segment up.",
)
class SegmentsIgnored(_Encoder):
    def kinds(self, ids, segments):
        return self.segment_embedding(torch.zeros_like(ids))


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="Without segments nothing is added. None means that all are 0, and segment 0 has a row of its own.",
)
class SegmentZeroForgotten(_Encoder):
    def kinds(self, ids, segments):
        return 0.0 if segments is None else self.segment_embedding(segments)


@wrong(
    "Encoder",
    caught_by="test_encoder_sees_both_ways",
    hint="The position embedding is not added: the order of tokens is lost.",
)
class OrderLost(_Encoder):
    def places(self, ids):
        return 0.0


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="Positions are sines and cosines. An encoder like BERT learns them: position_embedding.",
)
class SinusoidalEncoder(_Encoder):
    def places(self, ids):
        x = self.position_embedding.weight[: ids.shape[1]]
        return places.sinusoidal(*x.shape).to(x)


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="The first norm exists, but is not applied. It follows the sum of the three embeddings.",
)
class FirstNormForgotten(_Encoder):
    def begin(self, tokens, places, kinds):
        return tokens + places + kinds


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="`norm` is applied after the blocks. It belongs before them, after the sum of the three embeddings.",
)
class NormAtTheEnd(_Encoder):
    def begin(self, tokens, places, kinds):
        return tokens + places + kinds

    def finish(self, x):
        return self.norm(x)


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="`norm` is applied to the token embedding alone. Add all three embeddings first, then take the norm.",
)
class NormTooEarly(_Encoder):
    def begin(self, tokens, places, kinds):
        return self.norm(tokens) + places + kinds


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="The blocks take the norm first in each branch. BERT's come after the sums: use PostNormBlock.",
)
class PreNormEncoder(_Encoder):
    def arrange(self, *parts):
        return blocks.PreNormBlock(*parts)


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="GELU is in its tanh form. BERT's is the exact one: F.gelu.",
)
class TanhGELU(_Encoder):
    def activation(self):
        return functools.partial(F.gelu, approximate="tanh")


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="Token embeddings are multiplied by sqrt(C). That is the model of 2017's; BERT adds them as they are.",
)
class ScaledTokens(_Encoder):
    def tokens(self, ids):
        return self.token_embedding(ids) * math.sqrt(self.config.d_model)


@wrong(
    "Encoder",
    caught_by="test_encoder_context_has_an_end",
    hint="More than context_length tokens end in an IndexError of the table. "
    "Check first, and raise a ValueError that says what to do.",
)
class EncoderWithoutEnd(_Encoder):
    def complain(self, ids):
        pass


@wrong(
    "Encoder",
    caught_by="test_encoder_norms_use_norm_eps",
    hint="The norms use their default eps. Hand them config.norm_eps.",
)
class EncoderEpsForgotten(_Encoder):
    def eps(self):
        return 1e-12


@wrong(
    "Encoder",
    caught_by="test_encoder_starts_with_init_weights",
    hint="`init_weights` is not called: the model starts with torch's own, larger weights. "
    "Call it on the whole model at the end of `__init__`.",
)
class EncoderTorchsOwnStart(_Encoder):
    def start(self):
        pass


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="All layers are one block, used again and again: `[block] * n` repeats the same object. "
    "Make a new block for each layer.",
)
class EncoderOneBlockForAll(_Encoder):
    def stack(self, n):
        return nn.ModuleList([self.make_block()] * n)


@wrong(
    "Encoder",
    caught_by="test_encoder_equals_torchs_layers",
    hint="Only the first token's vector is returned. The encoder gives a vector for each token: (B, T, C).",
)
class FirstTokenAlone(_Encoder):
    def finish(self, x):
        return x[:, 0]


# Seq2Seq -------------------------------------------------------------------------------------------------------------


class _Seq2Seq(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = nn.ModuleList(
            self.arrange(self.attend(), self.mlp(), self.norm(), self.norm()) for _ in range(config.n_layers)
        )
        self.decoder = nn.ModuleList(
            blocks.DecoderBlock(self.attend(), self.attend(), self.mlp(), self.norm(), self.norm(), self.norm())
            for _ in range(config.n_layers)
        )
        self.head = self.make_head()
        self.tie()
        self.more()
        self.start()

    def attend(self):
        c = self.config
        return heads.MultiHeadAttention(c.d_model, c.n_heads, c.n_kv_heads, c.head_dim, bias=True)

    def mlp(self):
        return blocks.MLP(self.config.d_model, self.config.d_ff, activation=self.activation())

    def activation(self):
        return F.relu

    def eps(self):
        return self.config.norm_eps

    def norm(self):
        return blocks.LayerNorm(self.config.d_model, self.eps())

    def arrange(self, *parts):
        return blocks.PostNormBlock(*parts)

    def make_head(self):
        return nn.Linear(self.config.d_model, self.config.vocab_size, bias=False)

    def tie(self):
        self.head.weight = self.token_embedding.weight

    def more(self):
        pass

    def start(self):
        shared.init_weights(self)

    def forward(self, source, target, source_is_token=None, target_is_token=None):
        self.complain(source, target)
        hidden = None if source_is_token is None else source_is_token[:, None, None]
        first = self.vectors(source)
        contexts = self.contexts(first, self.encode(first, self.encoder_mask(hidden, source)))
        mask = self.target_mask(target, None if target_is_token is None else target_is_token[:, None, None])
        x = self.target_vectors(target)
        for block, context in zip(self.decoder, contexts, strict=True):
            x = self.decode(block, x, context, mask, self.cross_mask(hidden, mask, contexts))
        return self.finish(x)

    def complain(self, source, target):
        if max(source.shape[1], target.shape[1]) > self.config.context_length:
            raise ValueError("too many tokens")

    def scale(self):
        return math.sqrt(self.config.d_model)

    def sines(self, T):
        return places.sinusoidal(T, self.config.d_model)

    def vectors(self, ids):
        x = self.token_embedding(ids)
        return x * self.scale() + self.sines(ids.shape[1]).to(x)

    def target_vectors(self, ids):
        return self.vectors(ids)

    def encoder_mask(self, hidden, source):
        return hidden

    def encode(self, x, mask):
        """What every layer of the encoder gives."""
        outs = []
        for block in self.encoder:
            x = block(x, mask=mask)
            outs.append(x)
        return outs

    def contexts(self, first, outs):
        """What each layer of the decoder reads."""
        return [outs[-1]] * len(self.decoder)

    def target_mask(self, target, tokens):
        return _past(target.shape[1]) if tokens is None else _past(target.shape[1]) & tokens

    def cross_mask(self, hidden, target_mask, contexts):
        return hidden

    def decode(self, block, x, context, mask, context_mask):
        return block(x, context=context, mask=mask, context_mask=context_mask)

    def finish(self, x):
        return self.head(x)


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_token_vectors",
    hint="Token embeddings are not multiplied by sqrt(C), so that positions drown them. Scale them before the sum.",
)
class Unscaled(_Seq2Seq):
    def scale(self):
        return 1.0


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_token_vectors",
    hint="Token embeddings are divided by sqrt(C). Multiply: they start small, and positions are as large as 1.",
)
class ScaledTheWrongWay(_Seq2Seq):
    def scale(self):
        return 1 / super().scale()


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_token_vectors",
    hint="Positions are multiplied by sqrt(C) too. Scale the token embedding alone, then add the positions.",
)
class PositionsScaledToo(_Seq2Seq):
    def sines(self, T):
        return super().sines(T) * self.scale()


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_token_vectors",
    hint="No positions are added. Both sides need the sinusoids.",
)
class WithoutPositions(_Seq2Seq):
    def sines(self, T):
        return super().sines(T) * 0.0


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_token_vectors",
    hint="Only the source gets positions. The target needs them as well.",
)
class TargetWithoutPositions(_Seq2Seq):
    def target_vectors(self, ids):
        return self.token_embedding(ids) * self.scale()


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_token_vectors",
    hint="All sines come first, then all cosines. The table alternates: sine, cosine, sine, cosine.",
)
class SinesThenCosines(_Seq2Seq):
    def sines(self, T):
        table = super().sines(T)
        return torch.cat([table[:, 0::2], table[:, 1::2]], dim=-1)


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_target_cannot_see_its_future",
    hint="The target sees its own future. Its self-attention is causal: causal_mask(T).",
)
class TargetNotCausal(_Seq2Seq):
    def target_mask(self, target, tokens):
        return tokens


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_hides_padding_of_the_target",
    hint="Target padding takes the place of causality, so that the future is seen. Join both masks: `&`.",
)
class TargetPaddingAlone(_Seq2Seq):
    def target_mask(self, target, tokens):
        return super().target_mask(target, None) if tokens is None else tokens


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_hides_padding_of_the_target",
    hint="`target_is_token` is ignored: target padding is read like a token. Join its mask with the causal one.",
)
class TargetPaddingIgnored(_Seq2Seq):
    def target_mask(self, target, tokens):
        return super().target_mask(target, None)


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_hides_padding_of_the_source",
    hint="Source padding is hidden in the encoder, but not in the cross-attention. Hand its mask on: context_mask.",
)
class CrossAttentionSeesPadding(_Seq2Seq):
    def cross_mask(self, hidden, target_mask, contexts):
        return None


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_hides_padding_of_the_source",
    hint="Source padding is hidden in the cross-attention, but not in the encoder, where the tokens read it.",
)
class EncoderSeesPadding(_Seq2Seq):
    def encoder_mask(self, hidden, source):
        return None


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_hides_padding_of_the_source",
    hint="`source_is_token` is ignored: source padding is read like a token. "
    "Its mask belongs in the encoder and in the cross-attention.",
)
class SourcePaddingIgnored(_Seq2Seq):
    def encoder_mask(self, hidden, source):
        return None

    def cross_mask(self, hidden, target_mask, contexts):
        return None


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_hides_padding_of_the_source",
    hint="The sense of the source's mask is inverted. `source_is_token` is True for tokens, which may be seen.",
)
class SourceTokensHidden(_Seq2Seq):
    def encoder_mask(self, hidden, source):
        return None if hidden is None else ~hidden

    def cross_mask(self, hidden, target_mask, contexts):
        return None if hidden is None else ~hidden


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_source_is_seen_whole",
    hint="The encoder is causal. Source tokens see each other both ways.",
)
class EncoderCausal(_Seq2Seq):
    def encoder_mask(self, hidden, source):
        return _past(source.shape[1]) if hidden is None else _past(source.shape[1]) & hidden


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_source_is_seen_whole",
    hint="The cross-attention is causal. The first target token may already read the whole source.",
)
class CrossAttentionCausal(_Seq2Seq):
    def cross_mask(self, hidden, target_mask, contexts):
        T, S = target_mask.shape[-1], contexts[0].shape[1]
        causal = torch.ones(T, S, dtype=torch.bool).tril()
        return causal if hidden is None else causal & hidden


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_equals_torchs_layers",
    hint="The decoder reads the source's embeddings. It reads what the encoder makes of them.",
)
class EncoderSkipped(_Seq2Seq):
    def contexts(self, first, outs):
        return [first] * len(self.decoder)


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_equals_torchs_layers",
    hint="Decoder layer i reads encoder layer i. All of them read what the last encoder layer gives.",
)
class LayerByLayer(_Seq2Seq):
    def contexts(self, first, outs):
        return outs


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_equals_torchs_layers",
    hint="The cross-attention reads the target. Keys and values come from the encoded source: context.",
)
class TargetReadsItself(_Seq2Seq):
    def decode(self, block, x, context, mask, context_mask):
        x = block.norm1(x + block.self_attention(x, mask=mask))
        x = block.norm2(x + block.cross_attention(x, mask=mask))
        return block.norm3(x + block.mlp(x))


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_equals_torchs_layers",
    hint="The activation is GELU. In 2017 it was ReLU: activation=F.relu.",
)
class WithGELU(_Seq2Seq):
    def activation(self):
        return F.gelu


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_equals_torchs_layers",
    hint="The encoder takes the norm first in each branch. In 2017 it came after the sums: use PostNormBlock.",
)
class PreNormSource(_Seq2Seq):
    def arrange(self, *parts):
        return blocks.PreNormBlock(*parts)


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_has_these_parameters",
    hint="There is a last norm after the blocks. Post-norm blocks end with a norm already: leave it out.",
)
class LastNorm(_Seq2Seq):
    def more(self):
        self.last_norm = self.norm()

    def finish(self, x):
        return self.head(self.last_norm(x))


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_has_these_parameters",
    hint="The head has a bias. It is the embedding's matrix and nothing else: bias=False.",
)
class Seq2SeqHeadWithBias(_Seq2Seq):
    def make_head(self):
        return nn.Linear(self.config.d_model, self.config.vocab_size)


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_head_is_the_embedding",
    hint="Head and token embedding are two parameters. They are one: head.weight = token_embedding.weight.",
)
class HeadOfItsOwn(_Seq2Seq):
    def tie(self):
        pass


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_context_has_an_end",
    hint="More than context_length tokens are accepted. They must be a ValueError, on either side.",
)
class Seq2SeqWithoutEnd(_Seq2Seq):
    def complain(self, source, target):
        pass


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_context_has_an_end",
    hint="Only the source's length is checked. A target of more than context_length tokens is a ValueError too.",
)
class TargetWithoutEnd(_Seq2Seq):
    def complain(self, source, target):
        super().complain(source, source)


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_norms_use_norm_eps",
    hint="The norms use their default eps. Hand them config.norm_eps.",
)
class Seq2SeqEpsForgotten(_Seq2Seq):
    def eps(self):
        return 1e-5


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_starts_with_init_weights",
    hint="`init_weights` is not called: the model starts with torch's own, larger weights. "
    "Call it on the whole model at the end of `__init__`.",
)
class Seq2SeqTorchsOwnStart(_Seq2Seq):
    def start(self):
        pass


@wrong(
    "Seq2Seq",
    caught_by="test_seq2seq_equals_torchs_layers",
    hint="The model returns probabilities. It returns logits: the loss takes the softmax itself.",
)
class Seq2SeqProbabilities(_Seq2Seq):
    def finish(self, x):
        return self.head(x).softmax(-1)
