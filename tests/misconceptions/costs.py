"""Mistakes that people make in counting parameters, operations and bytes, and in naming the bottleneck."""

from tfmlib.models.gpt import GPTConfig
from tfmlib.models.llama import LlamaConfig

from . import wrong


def _is_gpt(config):
    if not isinstance(config, (GPTConfig, LlamaConfig)):
        raise TypeError("neither a GPT nor a Llama")
    return isinstance(config, GPTConfig)


# count_parameters ----------------------------------------------------------------------------------------------------
#
# The variants share a correct count whose terms can be given; each variant gives one that is wrong.


def _parameters(config, **given):
    """The right count, but for the terms that are given."""
    gpt = _is_gpt(config)
    C, D = config.d_model, given.get("D", config.head_dim)
    q, kv = config.n_heads * D, given.get("K", config.n_kv_heads) * D
    F, V = given.get("F", config.d_ff), config.vocab_size
    terms = {
        "projections": C * q + 2 * C * kv + q * C,
        "biases": (q + 2 * kv + C + F + C) * gpt,
        "matrices": 2 if gpt else 3,
        "norms": 2 * C * (1 + gpt),
        "last": C * (1 + gpt),
        "table": config.context_length * C * gpt,
        "tables": V * C if config.tied else 2 * V * C,
        "layers": config.n_layers,
    } | given
    layer = terms["projections"] + terms["biases"] + terms["matrices"] * C * F + terms["norms"]
    return terms["layers"] * layer + terms["last"] + terms["table"] + terms["tables"]


@wrong(
    "count_parameters",
    caught_by="test_a_tied_head_is_counted_once",
    hint="A tied head is counted although it is the embedding's own matrix: with `tied`, count V * C once.",
)
def tied_head_counted_twice(config):
    return _parameters(config, tables=2 * config.vocab_size * config.d_model)


@wrong(
    "count_parameters",
    caught_by="test_a_tied_head_is_counted_once",
    hint="The head is never counted. Where `config.tied` is False it is a matrix of its own: V * C more.",
)
def head_never_counted(config):
    return _parameters(config, tables=config.vocab_size * config.d_model)


@wrong(
    "count_parameters",
    caught_by="test_a_tied_head_is_counted_once",
    hint="The head is given a bias of V numbers where it is not tied. In both models the head is a matrix only.",
)
def head_with_a_bias(config):
    return _parameters(config) + (0 if config.tied else config.vocab_size)


@wrong(
    "count_parameters",
    caught_by="test_a_small_llama_by_hand",
    hint="Neither embedding nor head is counted. Both are learned: V * C, and twice that where the head is not tied.",
)
def tables_left_out(config):
    return _parameters(config, tables=0)


@wrong(
    "count_parameters",
    caught_by="test_a_small_gpt_by_hand",
    hint="A GPT's table of positions is missing: add context_length * C.",
)
def positions_forgotten(config):
    return _parameters(config, table=0)


@wrong(
    "count_parameters",
    caught_by="test_only_a_gpt_has_a_table_of_positions",
    hint="A Llama is given a table of positions. It rotates queries and keys instead and learns nothing for it.",
)
def positions_for_llama(config):
    return _parameters(config, table=config.context_length * config.d_model)


@wrong(
    "count_parameters",
    caught_by="test_a_small_gpt_by_hand",
    hint="A GPT's biases are missing: each linear layer but the head has one, as long as its output.",
)
def biases_forgotten(config):
    return _parameters(config, biases=0)


@wrong(
    "count_parameters",
    caught_by="test_a_small_gpt_by_hand",
    hint="In a GPT only the attention's linear layers have biases here. Those of the MLP have them, too: F and C.",
)
def biases_in_attention_only(config):
    return _parameters(config, biases=_is_gpt(config) * _attention_biases(config))


def _attention_biases(config):
    return (config.n_heads + 2 * config.n_kv_heads) * config.head_dim + config.d_model


@wrong(
    "count_parameters",
    caught_by="test_a_small_llama_by_hand",
    hint="A Llama's linear layers are given biases. They have none.",
)
def biases_for_llama(config):
    _is_gpt(config)
    gate = 0 if isinstance(config, GPTConfig) else config.d_ff
    return _parameters(config, biases=_attention_biases(config) + config.d_ff + config.d_model + gate)


@wrong(
    "count_parameters",
    caught_by="test_sizes_come_from_the_config",
    hint="k and v are counted for all H query heads. They have K heads: C * K*D each.",
)
def key_heads_ignored(config):
    return _parameters(config, K=config.n_heads)


@wrong(
    "count_parameters",
    caught_by="test_sizes_come_from_the_config",
    hint="The head width is taken to be C / H. Read `config.head_dim`: H*D need not be C.",
)
def head_width_ignored(config):
    return _parameters(config, D=config.d_model // config.n_heads)


@wrong(
    "count_parameters",
    caught_by="test_sizes_come_from_the_config",
    hint="q and o are counted as C * C. They are C x H*D and H*D x C, and H*D need not be C.",
)
def square_projections(config):
    C = config.d_model
    return _parameters(config, projections=2 * C * C + 2 * C * config.n_kv_heads * config.head_dim)


@wrong(
    "count_parameters",
    caught_by="test_a_small_llama_by_hand",
    hint="This is the rule of thumb 12 * L * C ** 2 and the tables. "
    "It holds where H*D = K*D = C and F = 4 * C, and leaves out biases, norms and positions: count each matrix.",
)
def rule_of_thumb(config):
    _is_gpt(config)
    tables = config.vocab_size * config.d_model * (1 if config.tied else 2)
    return 12 * config.n_layers * config.d_model**2 + tables


@wrong(
    "count_parameters",
    caught_by="test_a_small_llama_by_hand",
    hint="The MLP of a Llama is counted with two matrices. It is gated and has three: gate, up and down.",
)
def gate_forgotten(config):
    return _parameters(config, matrices=2)


@wrong(
    "count_parameters",
    caught_by="test_a_small_gpt_by_hand",
    hint="The MLP of a GPT is counted with three matrices. Only a Llama's is gated: here are two, up and down.",
)
def gate_in_a_gpt(config):
    return _parameters(config, matrices=3)


@wrong(
    "count_parameters",
    caught_by="test_sizes_come_from_the_config",
    hint="F is taken to be 4 * C. Read `config.d_ff`.",
)
def hidden_width_assumed(config):
    return _parameters(config, F=4 * config.d_model)


@wrong(
    "count_parameters",
    caught_by="test_a_small_llama_by_hand",
    hint="The norms are missing. Small as they are, they are learned: two a layer, and one at the end.",
)
def norms_forgotten(config):
    return _parameters(config, norms=0, last=0)


@wrong(
    "count_parameters",
    caught_by="test_a_small_llama_by_hand",
    hint="The last norm, between the layers and the head, is missing.",
)
def last_norm_forgotten(config):
    return _parameters(config, last=0)


@wrong(
    "count_parameters",
    caught_by="test_a_small_llama_by_hand",
    hint="One norm a layer is counted. There are two, one before attention and one before the MLP.",
)
def one_norm_a_layer(config):
    return _parameters(config, norms=config.d_model * (1 + _is_gpt(config)))


@wrong(
    "count_parameters",
    caught_by="test_a_small_gpt_by_hand",
    hint="A GPT's norms are counted without their biases. LayerNorm has a weight and a bias, 2 * C; RMSNorm only C.",
)
def norms_without_biases(config):
    return _parameters(config, norms=2 * config.d_model, last=config.d_model)


@wrong(
    "count_parameters",
    caught_by="test_every_layer_has_its_own_weights",
    hint="Only one layer is counted. Each of the L layers has weights of its own.",
)
def one_layer_counted(config):
    return _parameters(config, layers=1)


@wrong(
    "count_parameters",
    caught_by="test_counts_are_exact_and_whole",
    hint="The result is a float, and floats skip whole numbers beyond 2 ** 53. Count with ints: no `/`, no 1e9.",
)
def count_as_float(config):
    return float(_parameters(config))


@wrong(
    "count_parameters",
    caught_by="test_other_configs_have_no_count",
    hint="A config of another model is counted as if it were a GPT's or a Llama's. "
    "Raise a TypeError unless it is a GPTConfig or a LlamaConfig.",
)
def any_config_counted(config):
    if isinstance(config, (GPTConfig, LlamaConfig)):
        return _parameters(config)
    sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length")
    return _parameters(LlamaConfig(**{name: getattr(config, name) for name in sizes}))


# forward_flops -------------------------------------------------------------------------------------------------------


def _flops(config, B, T, S=None, **given):
    """The right count, but for the terms that are given."""
    gpt = _is_gpt(config)
    C, D, S = config.d_model, given.get("D", config.head_dim), given.get("S", T if S is None else S)
    q, kv = config.n_heads * D, given.get("K", config.n_kv_heads) * D
    terms = {
        "q": 2 * B * T * C * q,
        "kv": 2 * 2 * B * T * C * kv,
        "o": 2 * B * T * C * q,
        "matrices": 2 if gpt else 3,
        "pairs": 4 * B * T * S * q,
        "head": 2 * B * T * C * config.vocab_size,
        "layers": config.n_layers,
    } | given
    mlp = terms["matrices"] * 2 * B * T * C * config.d_ff
    return terms["layers"] * (terms["q"] + terms["kv"] + terms["o"] + mlp + terms["pairs"]) + terms["head"]


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="A multiply-add is counted as one operation. It is two, a product and a sum.",
)
def multiply_add_is_one(config, B, T, S=None):
    return _flops(config, B, T, S) // 2


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="The head's product is missing: 2 * B*T * C*V, often more than a layer.",
)
def head_not_computed(config, B, T, S=None):
    return _flops(config, B, T, S, head=0)


@wrong(
    "forward_flops",
    caught_by="test_the_head_is_always_multiplied",
    hint="The head is left out where it is tied. Tying saves weights, not work: its product is computed all the same.",
)
def tied_head_is_free(config, B, T, S=None):
    return _flops(config, B, T, S, **({"head": 0} if config.tied else {}))


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="The embedding is counted as a matrix product. It is a look-up. Only the head is a product.",
)
def embedding_multiplied(config, B, T, S=None):
    _is_gpt(config)
    return _flops(config, B, T, S) + 2 * B * T * config.d_model * config.vocab_size


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="Only one product of attention is counted. There are two: the scores, and the weighted sum of values.",
)
def one_product_of_attention(config, B, T, S=None):
    S = T if S is None else S
    return _flops(config, B, T, S, pairs=2 * B * T * S * config.n_heads * config.head_dim)


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="Scores and weighted sums are missing: 4 * B*T*S * H*D a layer, which no weight stands for.",
)
def weights_only(config, B, T, S=None):
    return _flops(config, B, T, S, pairs=0)


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="This is 2 FLOPs for each parameter and token. It misses the scores, and it counts norms, biases and tables, "
    "which are no matrix products.",
)
def two_per_parameter(config, B, T, S=None):
    return 2 * B * T * _parameters(config)


@wrong(
    "forward_flops",
    caught_by="test_a_step_with_a_cache",
    hint="S is ignored: T x T scores are counted although each of the T tokens meets S keys.",
)
def keys_ignored(config, B, T, S=None):
    return _flops(config, B, T)


@wrong(
    "forward_flops",
    caught_by="test_a_step_with_a_cache",
    hint="Scores are counted as S x S. Only the T new tokens ask: it is T x S.",
)
def all_keys_ask(config, B, T, S=None):
    S = T if S is None else S
    return _flops(config, B, T, S, pairs=4 * B * S * S * config.n_heads * config.head_dim)


@wrong(
    "forward_flops",
    caught_by="test_a_step_with_a_cache",
    hint="k and v are computed anew for all S tokens. The old ones come from the cache: only T are projected.",
)
def old_keys_projected(config, B, T, S=None):
    S = T if S is None else S
    return _flops(config, B, T, S, kv=4 * B * S * config.d_model * config.n_kv_heads * config.head_dim)


@wrong(
    "forward_flops",
    caught_by="test_a_step_with_a_cache",
    hint="All S tokens go through the whole model here. With a cache only the T new ones do.",
)
def everything_for_all_keys(config, B, T, S=None):
    return _flops(config, B, T if S is None else S)


@wrong(
    "forward_flops",
    caught_by="test_shared_keys_make_no_fewer_scores",
    hint="Scores are counted for the K key heads. Each of the H query heads has its own: 4 * B*T*S * H*D.",
)
def scores_of_key_heads(config, B, T, S=None):
    S = T if S is None else S
    return _flops(config, B, T, S, pairs=4 * B * T * S * config.n_kv_heads * config.head_dim)


@wrong(
    "forward_flops",
    caught_by="test_shared_keys_make_no_fewer_scores",
    hint="k and v are projected for all H heads. They have K heads: 2 * B*T * C * K*D each.",
)
def keys_for_every_head(config, B, T, S=None):
    return _flops(config, B, T, S, K=config.n_heads)


@wrong(
    "forward_flops",
    caught_by="test_shared_keys_make_no_fewer_scores",
    hint="Scores are counted with C in place of H*D. All heads together are H*D wide, and that need not be C.",
)
def scores_of_width_c(config, B, T, S=None):
    S = T if S is None else S
    return _flops(config, B, T, S, pairs=4 * B * T * S * config.d_model)


@wrong(
    "forward_flops",
    caught_by="test_shared_keys_make_no_fewer_scores",
    hint="The head width is taken to be C / H. Read `config.head_dim`: H*D need not be C.",
)
def flops_of_assumed_width(config, B, T, S=None):
    return _flops(config, B, T, S, D=config.d_model // config.n_heads)


@wrong(
    "forward_flops",
    caught_by="test_flops_equal_those_of_torchs_products",
    hint="Each head's products are counted as if it were H*D wide. A head is D wide; all of them together H*D.",
)
def every_head_full_width(config, B, T, S=None):
    S = T if S is None else S
    return _flops(config, B, T, S, pairs=4 * B * T * S * config.n_heads**2 * config.head_dim)


@wrong(
    "forward_flops",
    caught_by="test_tokens_pay_once_and_pairs_once",
    hint="Only half of the pairs are counted, those that a causal mask leaves. "
    "Here the count is dense: masked pairs are computed too, then thrown away.",
)
def causal_pairs_only(config, B, T, S=None):
    S = T if S is None else S
    pairs = T * S - T * (T - 1) // 2
    return _flops(config, B, T, S, pairs=4 * B * pairs * config.n_heads * config.head_dim)


@wrong(
    "forward_flops",
    caught_by="test_tokens_pay_once_and_pairs_once",
    hint="Attention's products are counted for one sequence. Each of the B sequences has its own pairs.",
)
def pairs_of_one_sequence(config, B, T, S=None):
    S = T if S is None else S
    return _flops(config, B, T, S, pairs=4 * T * S * config.n_heads * config.head_dim)


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="The MLP of a Llama is counted with two matrices. It is gated and has three: gate, up and down.",
)
def gate_not_computed(config, B, T, S=None):
    return _flops(config, B, T, S, matrices=2)


@wrong(
    "forward_flops",
    caught_by="test_a_gpt_has_two_matrices_in_its_mlp",
    hint="The MLP of a GPT is counted with three matrices. Only a Llama's is gated: here are two, up and down.",
)
def gate_computed_in_a_gpt(config, B, T, S=None):
    return _flops(config, B, T, S, matrices=3)


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="The gate is counted twice: a gated MLP has three matrices, not four.",
)
def gate_computed_twice(config, B, T, S=None):
    return _flops(config, B, T, S, matrices=2 if _is_gpt(config) else 4)


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="The output projection o is missing: 2 * B*T * H*D * C a layer.",
)
def output_not_computed(config, B, T, S=None):
    return _flops(config, B, T, S, o=0)


@wrong(
    "forward_flops",
    caught_by="test_every_layer_is_computed",
    hint="Only one layer is counted. All L layers are computed, one after the other.",
)
def one_layer_computed(config, B, T, S=None):
    return _flops(config, B, T, S, layers=1)


@wrong(
    "forward_flops",
    caught_by="test_every_layer_is_computed",
    hint="The head is counted in every layer. It stands once, at the end.",
)
def head_in_every_layer(config, B, T, S=None):
    head = 2 * B * T * config.d_model * config.vocab_size
    return _flops(config, B, T, S, head=head * config.n_layers)


@wrong(
    "forward_flops",
    caught_by="test_one_token_by_hand",
    hint="This is the forward and the backward pass, three times the forward pass alone.",
)
def backward_too(config, B, T, S=None):
    return 3 * _flops(config, B, T, S)


@wrong(
    "forward_flops",
    caught_by="test_flops_are_exact_and_whole",
    hint="The result is a float, and floats skip whole numbers beyond 2 ** 53. Count with ints: no `/`, no 1e9.",
)
def flops_as_float(config, B, T, S=None):
    return float(_flops(config, B, T, S))


@wrong(
    "forward_flops",
    caught_by="test_other_configs_have_no_flops",
    hint="A config of another model is counted as if it were a GPT's or a Llama's. "
    "Raise a TypeError unless it is a GPTConfig or a LlamaConfig.",
)
def any_config_computed(config, B, T, S=None):
    if isinstance(config, (GPTConfig, LlamaConfig)):
        return _flops(config, B, T, S)
    sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length")
    return _flops(LlamaConfig(**{name: getattr(config, name) for name in sizes}), B, T, S)


# score_bytes ---------------------------------------------------------------------------------------------------------


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="Scores are counted for one head. Each of the H heads has a matrix of its own.",
)
def scores_of_one_head(config, B, T, bytes_per_element):
    return B * T * T * bytes_per_element


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="Scores are counted for the K key heads. It is the H query heads that have scores.",
)
def score_bytes_of_key_heads(config, B, T, bytes_per_element):
    return B * config.n_kv_heads * T * T * bytes_per_element


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="These are elements, not bytes: multiply by `bytes_per_element`.",
)
def scores_as_elements(config, B, T, bytes_per_element):
    return B * config.n_heads * T * T


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="The batch is forgotten: each of the B sequences has scores of its own.",
)
def scores_of_one_sequence(config, B, T, bytes_per_element):
    return config.n_heads * T * T * bytes_per_element


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="All L layers are counted. Layers run one after the other: this is asked for one of them.",
)
def scores_of_all_layers(config, B, T, bytes_per_element):
    return config.n_layers * B * config.n_heads * T * T * bytes_per_element


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="There is one number for each token here. A score belongs to a pair of tokens: T * T of them.",
)
def scores_of_tokens(config, B, T, bytes_per_element):
    return B * config.n_heads * T * bytes_per_element


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="The head width counts here. A score is one number, however wide the query and the key are.",
)
def scores_of_width_d(config, B, T, bytes_per_element):
    return B * config.n_heads * T * T * config.head_dim * bytes_per_element


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="Only the pairs that a causal mask leaves are counted. The matrix is stored whole: T * T.",
)
def scores_below_the_diagonal(config, B, T, bytes_per_element):
    return B * config.n_heads * (T * (T + 1) // 2) * bytes_per_element


@wrong(
    "score_bytes",
    caught_by="test_scores_by_hand",
    hint="The length is the config's context_length. It is T, the tokens that are there.",
)
def scores_of_the_whole_context(config, B, T, bytes_per_element):
    return B * config.n_heads * config.context_length**2 * bytes_per_element


@wrong(
    "score_bytes",
    caught_by="test_scores_of_a_long_text",
    hint="The result is a float. Bytes are whole numbers: no `/`, no 1e9.",
)
def scores_as_float(config, B, T, bytes_per_element):
    return float(B * config.n_heads * T * T * bytes_per_element)


# kv_cache_bytes ------------------------------------------------------------------------------------------------------


@wrong(
    "kv_cache_bytes",
    caught_by="test_a_cache_by_hand",
    hint="The factor 2 is missing: keys and values are both kept.",
)
def keys_without_values(config, B, T, bytes_per_element):
    return config.n_layers * B * T * config.n_kv_heads * config.head_dim * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_only_key_heads_are_kept",
    hint="All H query heads are counted. Only the K key heads are kept: that is what sharing them saves.",
)
def cache_of_query_heads(config, B, T, bytes_per_element):
    return 2 * config.n_layers * B * T * config.n_heads * config.head_dim * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_only_key_heads_are_kept",
    hint="A token's keys are counted as C numbers. They are K*D: K heads of width D.",
)
def cache_of_width_c(config, B, T, bytes_per_element):
    return 2 * config.n_layers * B * T * config.d_model * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_only_key_heads_are_kept",
    hint="The head width is taken to be C / H. Read `config.head_dim`: H*D need not be C.",
)
def cache_of_assumed_width(config, B, T, bytes_per_element):
    D = config.d_model // config.n_heads
    return 2 * config.n_layers * B * T * config.n_kv_heads * D * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_a_cache_by_hand",
    hint="Only one key head is counted. A token has keys and values in each of the K heads.",
)
def cache_of_one_head(config, B, T, bytes_per_element):
    return 2 * config.n_layers * B * T * config.head_dim * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_a_cache_by_hand",
    hint="Only one layer is counted. Each of the L layers has keys and values of its own.",
)
def cache_of_one_layer(config, B, T, bytes_per_element):
    return 2 * B * T * config.n_kv_heads * config.head_dim * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_a_cache_by_hand",
    hint="`bytes_per_element` is applied twice, perhaps once for keys and once for values: multiply once.",
)
def bytes_applied_twice(config, B, T, bytes_per_element):
    return 2 * config.n_layers * B * T * config.n_kv_heads * config.head_dim * bytes_per_element**2


@wrong(
    "kv_cache_bytes",
    caught_by="test_a_cache_by_hand",
    hint="These are elements, not bytes: multiply by `bytes_per_element`.",
)
def cache_as_elements(config, B, T, bytes_per_element):
    return 2 * config.n_layers * B * T * config.n_kv_heads * config.head_dim


@wrong(
    "kv_cache_bytes",
    caught_by="test_a_cache_by_hand",
    hint="The batch is forgotten: each of the B sequences keeps keys and values of its own.",
)
def cache_of_one_sequence(config, B, T, bytes_per_element):
    return 2 * config.n_layers * T * config.n_kv_heads * config.head_dim * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_the_cache_grows_with_each_token",
    hint="This is the cache of one token. Each of the T tokens keeps its keys and values.",
)
def cache_of_one_token(config, B, T, bytes_per_element):
    return 2 * config.n_layers * B * config.n_kv_heads * config.head_dim * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_the_cache_grows_with_each_token",
    hint="The length is the config's context_length. It is T, the tokens that are there.",
)
def cache_of_the_whole_context(config, B, T, bytes_per_element):
    length = config.context_length
    return 2 * config.n_layers * B * length * config.n_kv_heads * config.head_dim * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_the_cache_grows_with_each_token",
    hint="The cache grows with T * T here. Each token adds its own keys and values only: T.",
)
def cache_of_pairs(config, B, T, bytes_per_element):
    return 2 * config.n_layers * B * T * T * config.n_kv_heads * config.head_dim * bytes_per_element


@wrong(
    "kv_cache_bytes",
    caught_by="test_published_caches",
    hint="The result is a float. Bytes are whole numbers: no `/`, no 1e9.",
)
def cache_as_float(config, B, T, bytes_per_element):
    return 2.0 * config.n_layers * B * T * config.n_kv_heads * config.head_dim * bytes_per_element


# training_bytes ------------------------------------------------------------------------------------------------------


def _training(config, B, T, bytes_per_element=4, checkpointing=False, **given):
    """The right answer, but for the terms that are given."""
    gpt, P = _is_gpt(config), _parameters(config)
    C, F, V, H, D = config.d_model, config.d_ff, config.vocab_size, config.n_heads, config.head_dim
    terms = {
        "widths": 6 * B * T * C,
        "heads": 4 * B * T * H * D,
        "mlp": (2 if gpt else 4) * B * T * F,
        "square": 2 * B * H * T * T,
        "end": 3 * B * T * C + 3 * B * T * V,
        "inputs": config.n_layers * B * T * C,
        "again": B * T * F,
        "layers": config.n_layers,
        "peak": max,
        "weights": P,
        "gradients": P,
        "optimizer": 2 * P,
        "size": bytes_per_element,
        "of_activations": bytes_per_element,
        "of_optimizer": bytes_per_element,
        "checkpointing": checkpointing,
    } | given
    layer = terms["widths"] + terms["heads"] + terms["mlp"] + terms["square"]
    if terms["checkpointing"]:
        activations = terms["inputs"] + terms["peak"](layer + terms["again"], terms["end"])
    else:
        activations = terms["layers"] * layer + terms["end"]
    found = {
        "weights": terms["weights"] * terms["size"],
        "gradients": terms["gradients"] * terms["size"],
        "optimizer": terms["optimizer"] * terms["of_optimizer"],
        "activations": activations * terms["of_activations"],
    }
    return found | {"total": sum(found.values())}


@wrong(
    "training_bytes",
    caught_by="test_weights_gradients_and_two_moments",
    hint="The optimizer is counted as P elements. AdamW keeps two moments for each weight: 2 P.",
)
def one_moment(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, optimizer=_parameters(config))


@wrong(
    "training_bytes",
    caught_by="test_weights_gradients_and_two_moments",
    hint="The optimizer is counted as 3 P or more. Weights and gradients stand apart: it holds two moments, 2 P.",
)
def weights_within_the_optimizer(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, optimizer=3 * _parameters(config))


@wrong(
    "training_bytes",
    caught_by="test_every_layer_keeps_its_activations",
    hint="The activations of one layer are counted. "
    "Without checkpointing each of the L layers keeps its own until the backward pass.",
)
def one_layers_activations(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, layers=1)


@wrong(
    "training_bytes",
    caught_by="test_checkpointing_keeps_one_block",
    hint="`checkpointing` is ignored: with it only the blocks' inputs and one block at a time are alive.",
)
def checkpointing_ignored(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element)


@wrong(
    "training_bytes",
    caught_by="test_activations_by_hand",
    hint="The meaning of `checkpointing` is inverted: it saves memory when it is True.",
)
def checkpointing_inverted(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, not checkpointing)


@wrong(
    "training_bytes",
    caught_by="test_checkpointing_keeps_one_block",
    hint="With checkpointing only the blocks' inputs are counted. "
    "In the backward pass one block is computed again, and is alive whole.",
)
def inputs_only(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, peak=lambda block, end: end)


@wrong(
    "training_bytes",
    caught_by="test_checkpointing_may_peak_at_the_end",
    hint="With checkpointing the end is left out. "
    "Logits and their gradients can be larger than a block: take the larger of the two.",
)
def end_left_out(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, peak=lambda block, end: block)


@wrong(
    "training_bytes",
    caught_by="test_checkpointing_keeps_one_block",
    hint="With checkpointing a block and the end are added. The end is gone when a block is alive again: take the max.",
)
def block_and_end(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, peak=lambda block, end: block + end)


@wrong(
    "training_bytes",
    caught_by="test_checkpointing_keeps_one_block",
    hint="With checkpointing the blocks' inputs, L * B*T*C, are left out. They are what everything is computed from.",
)
def inputs_forgotten(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, inputs=0)


@wrong(
    "training_bytes",
    caught_by="test_checkpointing_keeps_one_block",
    hint="With checkpointing the block's B*T*F more are missing: the gradient that flows back through its MLP.",
)
def gradient_in_the_block_forgotten(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, again=0)


@wrong(
    "training_bytes",
    caught_by="test_activations_by_hand",
    hint="The T x T matrices are missing from the activations: attention keeps two a head, 2 * B*H*T*T.",
)
def squares_forgotten(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, square=0)


@wrong(
    "training_bytes",
    caught_by="test_activations_by_hand",
    hint="One T x T matrix a head is counted. These pieces keep two: 2 * B*H*T*T.",
)
def one_square(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, square=B * config.n_heads * T * T)


@wrong(
    "training_bytes",
    caught_by="test_two_matrices_a_head_are_kept",
    hint="The T x T matrices are counted for the K key heads. Each of the H query heads has its own two.",
)
def squares_of_key_heads(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, square=2 * B * config.n_kv_heads * T * T)


@wrong(
    "training_bytes",
    caught_by="test_keys_are_kept_for_every_query_head",
    hint="k and v are counted at K*D. They are kept after they were repeated for every query head: H*D.",
)
def keys_before_repeating(config, B, T, bytes_per_element=4, checkpointing=False):
    heads = 2 * B * T * (config.n_heads + config.n_kv_heads) * config.head_dim
    return _training(config, B, T, bytes_per_element, checkpointing, heads=heads)


@wrong(
    "training_bytes",
    caught_by="test_keys_are_kept_for_every_query_head",
    hint="q, k, v and the mixed values are counted at width C. They are H*D wide, and that need not be C.",
)
def heads_of_width_c(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, heads=4 * B * T * config.d_model)


@wrong(
    "training_bytes",
    caught_by="test_activations_by_hand",
    hint="A Llama's MLP is counted with the two tensors of a GPT's. It is gated and keeps four of width F.",
)
def gate_not_kept(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, mlp=2 * B * T * config.d_ff)


@wrong(
    "training_bytes",
    caught_by="test_activations_by_hand",
    hint="A GPT's MLP is counted with the four tensors of a Llama's. It has no gate and keeps two of width F.",
)
def gate_kept_in_a_gpt(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, mlp=4 * B * T * config.d_ff)


@wrong(
    "training_bytes",
    caught_by="test_activations_by_hand",
    hint="The end is missing from the activations: last norm, log-probabilities and gradients, 3 * B*T * (C + V).",
)
def end_forgotten(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, end=0)


@wrong(
    "training_bytes",
    caught_by="test_activations_by_hand",
    hint="Logits are counted once. Three tensors of B*T*V are alive: log-probabilities and two gradients.",
)
def logits_once(config, B, T, bytes_per_element=4, checkpointing=False):
    end = 3 * B * T * config.d_model + B * T * config.vocab_size
    return _training(config, B, T, bytes_per_element, checkpointing, end=end)


@wrong(
    "training_bytes",
    caught_by="test_all_elements_have_the_same_bytes",
    hint="Activations are counted at 4 bytes whatever `bytes_per_element` says.",
)
def activations_in_float32(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, of_activations=4)


@wrong(
    "training_bytes",
    caught_by="test_activations_by_hand",
    hint="Activations are elements here, not bytes: multiply them by `bytes_per_element`, too.",
)
def activations_as_elements(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, of_activations=1)


@wrong(
    "training_bytes",
    caught_by="test_all_elements_have_the_same_bytes",
    hint="The moments are counted at 4 bytes whatever `bytes_per_element` says. Here all elements have the same size.",
)
def moments_in_float32(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing, of_optimizer=4)


@wrong(
    "training_bytes",
    caught_by="test_weights_gradients_and_two_moments",
    hint="These are elements, not bytes: multiply everything by `bytes_per_element`.",
)
def all_as_elements(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, 1, checkpointing)


@wrong(
    "training_bytes",
    caught_by="test_the_total_is_the_sum",
    hint="The total leaves out the activations. It is the sum of all four.",
)
def total_without_activations(config, B, T, bytes_per_element=4, checkpointing=False):
    found = _training(config, B, T, bytes_per_element, checkpointing)
    return found | {"total": found["total"] - found["activations"]}


@wrong(
    "training_bytes",
    caught_by="test_the_total_is_the_sum",
    hint="The total leaves out the gradients. It is the sum of all four.",
)
def total_without_gradients(config, B, T, bytes_per_element=4, checkpointing=False):
    found = _training(config, B, T, bytes_per_element, checkpointing)
    return found | {"total": found["total"] - found["gradients"]}


@wrong(
    "training_bytes",
    caught_by="test_weights_gradients_and_two_moments",
    hint='There is no total. Return it beside the four, under the key "total".',
)
def no_total(config, B, T, bytes_per_element=4, checkpointing=False):
    found = _training(config, B, T, bytes_per_element, checkpointing)
    del found["total"]
    return found


@wrong(
    "training_bytes",
    caught_by="test_weights_gradients_and_two_moments",
    hint="Only the total comes back. Return a dict with the four parts and their total.",
)
def total_alone(config, B, T, bytes_per_element=4, checkpointing=False):
    return _training(config, B, T, bytes_per_element, checkpointing)["total"]


@wrong(
    "training_bytes",
    caught_by="test_training_bytes_are_exact_and_whole",
    hint="The numbers are floats. Bytes are whole numbers: no `/`, no 1e9.",
)
def training_as_floats(config, B, T, bytes_per_element=4, checkpointing=False):
    return {name: float(n) for name, n in _training(config, B, T, bytes_per_element, checkpointing).items()}


@wrong(
    "training_bytes",
    caught_by="test_other_configs_have_no_training_bytes",
    hint="A config of another model is counted as if it were a GPT's or a Llama's. "
    "Raise a TypeError unless it is a GPTConfig or a LlamaConfig.",
)
def any_config_trained(config, B, T, bytes_per_element=4, checkpointing=False):
    if not isinstance(config, (GPTConfig, LlamaConfig)):
        sizes = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length")
        config = LlamaConfig(**{name: getattr(config, name) for name in sizes})
    return _training(config, B, T, bytes_per_element, checkpointing)


# roofline_seconds ----------------------------------------------------------------------------------------------------


def _checked(*rates):
    if not all(rate > 0 for rate in rates):
        raise ValueError("a rate must be above 0")


@wrong(
    "roofline_seconds",
    caught_by="test_computing_takes_longer",
    hint="The two times are added. Computing and moving overlap: the longer of the two decides, so take the max.",
)
def times_added(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    return flops / flops_per_second + n_bytes / bytes_per_second


@wrong(
    "roofline_seconds",
    caught_by="test_computing_takes_longer",
    hint="The shorter of the two times is taken. The work is done when the slower part is: take the max.",
)
def faster_part_decides(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    return min(flops / flops_per_second, n_bytes / bytes_per_second)


@wrong(
    "roofline_seconds",
    caught_by="test_computing_takes_longer",
    hint="The rates are swapped: divide FLOPs by FLOP/s, and bytes by bytes/s.",
)
def rates_swapped(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    return max(flops / bytes_per_second, n_bytes / flops_per_second)


@wrong(
    "roofline_seconds",
    caught_by="test_moving_takes_longer",
    hint="Only the computing is timed. Where bytes take longer to move, they decide.",
)
def computing_only(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    return flops / flops_per_second


@wrong(
    "roofline_seconds",
    caught_by="test_computing_takes_longer",
    hint="Only the moving of bytes is timed. Where computing takes longer, it decides.",
)
def moving_only(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    return n_bytes / bytes_per_second


@wrong(
    "roofline_seconds",
    caught_by="test_seconds_need_not_be_whole",
    hint="`//` throws away the part of a second. Times are not whole: divide with `/`.",
)
def whole_seconds(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    return max(flops // flops_per_second, n_bytes // bytes_per_second)


@wrong(
    "roofline_seconds",
    caught_by="test_computing_takes_longer",
    hint="A rate is divided by the work. Seconds are work divided by a rate.",
)
def rates_over_work(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    return max(flops_per_second / flops if flops else 0.0, bytes_per_second / n_bytes if n_bytes else 0.0)


@wrong(
    "roofline_seconds",
    caught_by="test_computing_takes_longer",
    hint="This is a rate, the roofline's attainable FLOP/s. Asked for is the time, FLOPs divided by that rate.",
)
def attainable_rate(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    return min(flops_per_second, flops / n_bytes * bytes_per_second) if n_bytes else flops_per_second


@wrong(
    "roofline_seconds",
    caught_by="test_no_work_takes_no_time",
    hint="FLOPs divided by bytes fails where no bytes are moved. Compare the two times instead.",
)
def by_intensity(flops, n_bytes, flops_per_second, bytes_per_second):
    _checked(flops_per_second, bytes_per_second)
    if flops / n_bytes > flops_per_second / bytes_per_second:
        return flops / flops_per_second
    return n_bytes / bytes_per_second


@wrong(
    "roofline_seconds",
    caught_by="test_rates_must_be_above_zero",
    hint="A rate of 0 or below is not refused. Raise a ValueError unless both rates are above 0, before dividing.",
)
def any_rate(flops, n_bytes, flops_per_second, bytes_per_second):
    return max(flops / flops_per_second, n_bytes / bytes_per_second)


@wrong(
    "roofline_seconds",
    caught_by="test_rates_must_be_above_zero",
    hint="A rate of 0 is refused, a negative one is not. Both must be above 0.",
)
def negative_rates(flops, n_bytes, flops_per_second, bytes_per_second):
    if flops_per_second == 0 or bytes_per_second == 0:
        raise ValueError("a rate is 0")
    return max(flops / flops_per_second, n_bytes / bytes_per_second)


@wrong(
    "roofline_seconds",
    caught_by="test_rates_must_be_above_zero",
    hint="A rate of 0 gives an infinite time. It must be a ValueError: a machine has both rates above 0.",
)
def zero_rate_is_forever(flops, n_bytes, flops_per_second, bytes_per_second):
    if flops_per_second <= 0 or bytes_per_second <= 0:
        return float("inf")
    return max(flops / flops_per_second, n_bytes / bytes_per_second)
