"""The checks of chapter 10: parameters, FLOPs, bytes, the roofline. Outside truth: the shapes of torch's modules and
products, published counts, values worked out by hand."""

import functools
import math

import torch
from torch import nn

from tfmlib.models.encoder import EncoderConfig
from tfmlib.models.gpt import GPTConfig
from tfmlib.models.llama import LlamaConfig

from .same import Broken, expect, is_exception, outcome, raises, rng

# C = 2, one head of width 2, F = 3, V = 5: small enough to count with a pencil.
TINY = {"n_layers": 1, "d_model": 2, "n_heads": 1, "d_ff": 3, "vocab_size": 5, "context_length": 7}
# No two sizes are equal, H*D is not C, and three query heads share a key head.
ODD = {
    "n_layers": 3, "d_model": 11, "n_heads": 6, "n_kv_heads": 2, "head_dim": 7, "d_ff": 13, "vocab_size": 17,
    "context_length": 29,
}  # fmt: skip
# Products of these sizes need more digits than a float has.
HUGE = {
    "n_layers": 1, "d_model": 200_000_001, "n_heads": 9, "n_kv_heads": 3, "head_dim": 11, "d_ff": 800_000_002,
    "vocab_size": 2_000_003, "context_length": 1_000_003,
}  # fmt: skip

# Models as they were published: the kind of config, its sizes, the parameters.
PUBLISHED = [
    ("GPT-2", GPTConfig, (12, 768, 12, 12, 64, 3072, 50257, 1024), True, 124_439_808),
    ("GPT-2 XL", GPTConfig, (48, 1600, 25, 25, 64, 6400, 50257, 1024), True, 1_557_611_200),
    ("Llama-2-7B", LlamaConfig, (32, 4096, 32, 32, 128, 11008, 32000, 4096), False, 6_738_415_616),
    ("TinyLlama-1.1B", LlamaConfig, (22, 2048, 32, 4, 64, 5632, 32000, 2048), False, 1_100_048_384),
    ("SmolLM2-135M", LlamaConfig, (30, 576, 9, 3, 64, 1536, 49152, 8192), True, 134_515_008),
    ("Llama-3.2-1B", LlamaConfig, (16, 2048, 32, 8, 64, 8192, 128256, 131072), True, 1_235_814_400),
    ("Gemma-2B", LlamaConfig, (18, 2048, 8, 1, 256, 16384, 256000, 8192), True, 2_506_172_416),
    ("Llama-3.1-405B", LlamaConfig, (126, 16384, 128, 8, 128, 53248, 128256, 131072), False, 405_853_388_800),
]
# The cache of one token in all layers, at 2 bytes an element.
PUBLISHED_CACHE = {
    "GPT-2": 36_864,
    "Llama-2-7B": 524_288,
    "TinyLlama-1.1B": 22_528,
    "SmolLM2-135M": 23_040,
    "Llama-3.2-1B": 32_768,
    "Gemma-2B": 18_432,
    "Llama-3.1-405B": 516_096,
}

KINDS = (GPTConfig, LlamaConfig)


def _published(name: str):
    """The config of a published model, and its parameters."""
    _, kind, sizes, tied, parameters = next(row for row in PUBLISHED if row[0] == name)
    names = ("n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length")
    return kind(**dict(zip(names, sizes, strict=True)), tied=tied), parameters


def _drawn(salt: int):
    """Configs of both kinds, tied and not, of random sizes."""
    generator = rng(salt)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for kind in KINDS:
        for tied in (True, False):
            K = pick(1, 5)
            yield kind(
                n_layers=pick(1, 4), d_model=pick(1, 40), n_heads=K * pick(1, 5), n_kv_heads=K, head_dim=pick(1, 20),
                d_ff=pick(1, 60), vocab_size=pick(1, 90), context_length=pick(30, 50), tied=tied,
            )  # fmt: skip


def _letters(config) -> str:
    """A config as the lesson writes it."""
    kind = "GPT" if isinstance(config, GPTConfig) else "Llama"
    letters = {
        "L": config.n_layers, "C": config.d_model, "H": config.n_heads, "K": config.n_kv_heads,
        "D": config.head_dim, "F": config.d_ff, "V": config.vocab_size,
    }  # fmt: skip
    sizes = ", ".join(f"{letter}={n}" for letter, n in letters.items())
    return f"{'a tied' if config.tied else 'an untied'} {kind} with {sizes}, context_length={config.context_length}"


def _exactly(got, want: int, what: str) -> None:
    """Break the promise unless this is exactly the whole number that is wanted."""
    if got is None:
        raise Broken(f"{what}: expected {want:,}, got None. Is a `return` missing?")
    if isinstance(got, float):
        raise Broken(f"{what}: expected the int {want:,}, got the float {got}. Count in whole numbers: no `/`, no 1e9")
    whole = isinstance(got, int) and not isinstance(got, bool)
    expect(whole, f"{what}: expected the int {want:,}, got {type(got).__name__} {got}")
    apart = f"{abs(got - want):,} too {'many' if got > want else 'few'}"
    expect(got == want, f"{what}: expected {want:,}, got {got:,} ({apart})")


def _encoder() -> EncoderConfig:
    """A config that is neither a GPT's nor a Llama's."""
    return EncoderConfig(**TINY)


def _of_another(call):
    """What comes of a config of another model: the exception, or that there was none, whatever the number."""
    answer = outcome(call)
    return answer if is_exception(answer) else "an answer"


# count_parameters ----------------------------------------------------------------------------------------------------


@functools.cache
def _parameters_of_modules(config) -> int:
    """All weights of a model as torch's own modules have them, built without memory on the meta device."""
    gpt = isinstance(config, GPTConfig)
    C, F, V = config.d_model, config.d_ff, config.vocab_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    norm = nn.LayerNorm if gpt else nn.RMSNorm
    with torch.device("meta"):
        rows = [V, config.context_length] if gpt else [V]
        tables = [torch.empty(n, C) for n in rows]  # given, so that none is drawn: that would load half of torch
        modules = [norm(C), *(nn.Embedding.from_pretrained(table, freeze=False) for table in tables)]
        if not config.tied:
            modules.append(nn.Linear(C, V, bias=False))
        for _ in range(config.n_layers):
            shapes = [(C, q), (C, kv), (C, kv), (q, C), (C, F), (F, C)] + ([] if gpt else [(C, F)])
            modules += [norm(C), norm(C), *(nn.Linear(*shape, bias=gpt) for shape in shapes)]
    return sum(p.numel() for p in nn.ModuleList(modules).parameters())


def probe_count_parameters(count_parameters):
    """Results that tell the known mistakes apart."""
    plain = {**TINY, "n_layers": 2, "d_model": 12, "n_heads": 3}
    configs = [kind(**sizes, tied=tied) for kind in KINDS for sizes in (TINY, plain, ODD) for tied in (True, False)]
    configs += [GPTConfig(**ODD | {"d_ff": 44}), LlamaConfig(**ODD | {"n_kv_heads": 6})]
    answers = [outcome(lambda config=config: count_parameters(config)) for config in configs]
    return [*answers, _of_another(lambda: count_parameters(_encoder()))]


def test_a_small_llama_by_hand(count_parameters):
    """A Llama with L=1, C=2, F=3, V=5 has 60: 16 in q, k, v and o, 18 in the MLP, 6 in three norms, 10 and 10 in two
    tables."""
    _exactly(count_parameters(LlamaConfig(**TINY)), 60, f"count_parameters of {_letters(LlamaConfig(**TINY))}")


def test_a_small_gpt_by_hand(count_parameters):
    """A GPT of these sizes has 77: 16 + 8 in q, k, v and o with biases, 12 + 5 in the MLP, 12 in three norms, 10 in the
    tied table, 14 for 7 positions."""
    _exactly(count_parameters(GPTConfig(**TINY)), 77, f"count_parameters of {_letters(GPTConfig(**TINY))}")


def test_a_tied_head_is_counted_once(count_parameters):
    """The head costs V * C more, and no bias, where it is not tied to the embedding; in both models."""
    for kind in KINDS:
        for tied in (True, False):
            config = kind(**TINY, tied=tied)
            want = {GPTConfig: 77, LlamaConfig: 50}[kind] + 10 * (not tied)
            _exactly(count_parameters(config), want, f"count_parameters of {_letters(config)}")


def test_every_layer_has_its_own_weights(count_parameters):
    """Five layers have five times the weights of one; embedding, head and last norm stay."""
    for kind, layer, rest in ((LlamaConfig, 38, 22), (GPTConfig, 49, 28)):
        for n in (2, 5):
            config = kind(**TINY | {"n_layers": n})
            _exactly(count_parameters(config), n * layer + rest, f"count_parameters of {_letters(config)}")


def test_sizes_come_from_the_config(count_parameters):
    """H*D need not be C, K may be below H, F need not be 4*C: q is C x H*D, k and v are C x K*D."""
    for kind in KINDS:
        for changes in ({"head_dim": 5}, {"n_heads": 4, "n_kv_heads": 2, "head_dim": 2}, {"d_ff": 31}, ODD):
            config = kind(**TINY | changes)
            _exactly(
                count_parameters(config), _parameters_of_modules(config), f"count_parameters of {_letters(config)}"
            )


def test_only_a_gpt_has_a_table_of_positions(count_parameters):
    """One more position costs a GPT C numbers, and a Llama nothing: it rotates instead."""
    for kind in KINDS:
        for length in (8, 9, 1000):
            config = kind(**ODD | {"context_length": length})
            _exactly(
                count_parameters(config), _parameters_of_modules(config), f"count_parameters of {_letters(config)}"
            )


def test_published_counts(count_parameters):
    """GPT-2 has 124,439,808 parameters, Llama-2-7B 6,738,415,616, Llama-3.2-1B (tied) 1,235,814,400."""
    for name, *_ in PUBLISHED:
        config, want = _published(name)
        _exactly(count_parameters(config), want, f"count_parameters of {name}, {_letters(config)}")


def test_counts_equal_torchs_modules(count_parameters):
    """Whatever the sizes, the count is that of torch's own modules of these shapes."""
    for config in _drawn(1):
        _exactly(count_parameters(config), _parameters_of_modules(config), f"count_parameters of {_letters(config)}")


def test_counts_are_exact_and_whole(count_parameters):
    """The result is an int, and exact beyond 2 ** 53, where floats begin to skip whole numbers."""
    for kind in KINDS:
        config = kind(**HUGE)
        _exactly(count_parameters(config), _parameters_of_modules(config), f"count_parameters of {_letters(config)}")


def test_other_configs_have_no_count(count_parameters):
    """An EncoderConfig is neither a GPT's nor a Llama's: a TypeError, not a wrong number."""
    raises(TypeError, lambda: count_parameters(_encoder()), "count_parameters of an EncoderConfig")


# forward_flops -------------------------------------------------------------------------------------------------------


@functools.cache
def _flops_of_products(config, B: int, T: int, S: int) -> int:
    """The FLOPs of the matrix products of a forward pass that torch carries out here, from their shapes."""
    total = 0

    def product(a, b):
        nonlocal total
        out = a @ b
        total += 2 * out.numel() * a.shape[-1]  # an entry of the result is a multiply-add for each inner index
        return out

    def linear(x, width):
        return product(x, torch.zeros(x.shape[-1], width))

    H, D = config.n_heads, config.head_dim
    x = torch.zeros(B, T, config.d_model)
    for _ in range(config.n_layers):
        q = linear(x, H * D).unflatten(-1, (H, D)).transpose(1, 2)
        for _ in ("k", "v"):
            linear(x, config.n_kv_heads * D)
        scores = product(q, torch.zeros(B, H, D, S))
        mixed = product(scores, torch.zeros(B, H, S, D)).transpose(1, 2).flatten(2)
        x = linear(mixed, config.d_model)
        for _ in ("up", "gate") if isinstance(config, LlamaConfig) else ("up",):
            hidden = linear(x, config.d_ff)
        x = linear(hidden, config.d_model)
    linear(x, config.vocab_size)
    return total


def probe_forward_flops(forward_flops):
    """Results that tell the known mistakes apart."""
    plain = {**TINY, "n_layers": 2, "d_model": 12, "n_heads": 3}
    answers = []
    for kind in KINDS:
        for sizes in (TINY, plain, ODD):
            for tied in (True, False):
                config = kind(**sizes, tied=tied)
                answers += [
                    outcome(lambda config=config: forward_flops(config, 1, 1)),
                    outcome(lambda config=config: forward_flops(config, 2, 5)),
                    outcome(lambda config=config: forward_flops(config, 2, 5, 7)),
                    outcome(lambda config=config: forward_flops(config, 3, 1, 4)),
                ]
    return [*answers, _of_another(lambda: forward_flops(_encoder(), 2, 5))]


def _check_flops(forward_flops, config, B: int, T: int, S: int | None = None, want: int | None = None) -> None:
    got = forward_flops(config, B, T) if S is None else forward_flops(config, B, T, S)
    want = _flops_of_products(config, B, T, T if S is None else S) if want is None else want
    _exactly(got, want, f"forward_flops with B={B}, T={T}{'' if S is None else f', S={S}'} of {_letters(config)}")


def test_one_token_by_hand(forward_flops):
    """One token in a Llama with C=2, F=3, V=5: 2 * 34 for 34 weights, 4 + 4 for one score and its sum, 2 * 10 for the
    head: 96."""
    _check_flops(forward_flops, LlamaConfig(**TINY), 1, 1, want=96)


def test_a_gpt_has_two_matrices_in_its_mlp(forward_flops):
    """One token in a GPT of these sizes: 2 * (16 + 12) + 8 + 20 = 84. Biases and norms are no matrix products."""
    _check_flops(forward_flops, GPTConfig(**TINY), 1, 1, want=84)


def test_tokens_pay_once_and_pairs_once(forward_flops):
    """Three tokens in this Llama: 3 * 88 for the weights and the head, 9 pairs * 8: 336. Two sequences: twice that."""
    _check_flops(forward_flops, LlamaConfig(**TINY), 1, 3, want=336)
    _check_flops(forward_flops, LlamaConfig(**TINY), 2, 3, want=672)
    _check_flops(forward_flops, GPTConfig(**TINY), 5, 3, want=5 * (3 * 76 + 72))


def test_the_head_is_always_multiplied(forward_flops):
    """A tied head has no weights of its own, but its product is computed all the same: 2 * B*T * C*V."""
    for kind in KINDS:
        for tied in (True, False):
            _check_flops(forward_flops, kind(**TINY | {"vocab_size": 400}, tied=tied), 2, 3)


def test_every_layer_is_computed(forward_flops):
    """Four layers cost four times one layer, and the head is computed once."""
    _check_flops(forward_flops, LlamaConfig(**TINY | {"n_layers": 4}), 1, 3, want=4 * 276 + 60)
    _check_flops(forward_flops, GPTConfig(**TINY | {"n_layers": 4}), 1, 3, want=4 * 240 + 60)


def test_a_step_with_a_cache(forward_flops):
    """With S given, T new tokens are projected, and each of them meets S keys: 4 * B*T*S * H*D a layer."""
    _check_flops(forward_flops, LlamaConfig(**TINY), 1, 1, 6, want=68 + 6 * 8 + 20)
    for kind in KINDS:
        for T, S in ((1, 1), (1, 29), (3, 3), (3, 11)):
            _check_flops(forward_flops, kind(**ODD), 2, T, S)
    config = LlamaConfig(**ODD)
    got = forward_flops(config=config, B=2, T=3, S=11)
    _exactly(got, _flops_of_products(config, 2, 3, 11), "forward_flops(config=config, B=2, T=3, S=11)")


def test_shared_keys_make_no_fewer_scores(forward_flops):
    """Fewer key heads make k and v smaller, but all H query heads still have scores of width D."""
    for kind in KINDS:
        for changes in ({"n_kv_heads": 6}, {"n_kv_heads": 3}, {"n_kv_heads": 1}, {"head_dim": 2}, {"head_dim": 30}):
            _check_flops(forward_flops, kind(**ODD | changes), 2, 5)


def test_flops_equal_those_of_torchs_products(forward_flops):
    """Whatever the sizes, it is the count of the matrix products that torch carries out, with a cache or without."""
    for config in _drawn(2):
        _check_flops(forward_flops, config, 3, 5)
        _check_flops(forward_flops, config, 2, 3, 7)


def test_flops_are_exact_and_whole(forward_flops):
    """The result is an int, and exact beyond 2 ** 53."""
    for kind, weights in ((GPTConfig, 320_000_055_200_000_268), (LlamaConfig, 480_000_056_400_000_270)):
        head = 200_000_001 * 2_000_003
        for S in (7, 11):
            want = 2 * 3 * 7 * (weights + head) + 4 * 3 * 7 * S * 99
            _check_flops(forward_flops, kind(**HUGE), 3, 7, S, want=want)


def test_other_configs_have_no_flops(forward_flops):
    """An EncoderConfig is neither a GPT's nor a Llama's: a TypeError, not a wrong number."""
    raises(TypeError, lambda: forward_flops(_encoder(), 2, 5), "forward_flops of an EncoderConfig")


# score_bytes ---------------------------------------------------------------------------------------------------------


def _bytes_of(*shape: int, bytes_per_element: int) -> int:
    """The bytes of a tensor of torch, without memory on the meta device."""
    return torch.empty(shape, dtype=torch.uint8, device="meta").nbytes * bytes_per_element


def probe_score_bytes(score_bytes):
    """Results that tell the known mistakes apart."""
    configs = [kind(**sizes) for kind in KINDS for sizes in (TINY, ODD)]
    questions = [(config, B, T, size) for config in configs for B, T, size in ((1, 1, 1), (2, 5, 4), (3, 7, 2))]
    return [outcome(lambda question=question: score_bytes(*question)) for question in questions]


def test_scores_by_hand(score_bytes):
    """Two sequences of 5 tokens, 6 heads, 4 bytes: 2 * 6 * 25 * 4 = 1200. Neither layers nor widths count."""
    for kind in KINDS:
        _exactly(
            score_bytes(kind(**ODD), 2, 5, 4), 1200, f"score_bytes with B=2, T=5, 4 bytes of {_letters(kind(**ODD))}"
        )


def test_scores_grow_with_the_square(score_bytes):
    """Twice the tokens, four times the bytes: there is a score for every pair of tokens, masked or not."""
    for T, want in ((1, 12), (2, 48), (4, 192), (8, 768)):
        _exactly(score_bytes(GPTConfig(**ODD), 1, T, 2), want, f"score_bytes with B=1, T={T}, 2 bytes and 6 heads")


def test_every_query_head_has_scores(score_bytes):
    """It is the H query heads that have scores, however few key heads they share."""
    for H, K in ((6, 1), (6, 6), (8, 2), (5, 1)):
        config = LlamaConfig(**ODD | {"n_heads": H, "n_kv_heads": K})
        got = score_bytes(config, 3, 7, 4)
        _exactly(got, 3 * 7 * 7 * 4 * H, f"score_bytes with B=3, T=7, 4 bytes of {_letters(config)}")


def test_scores_equal_torchs_bytes(score_bytes):
    """It is what a tensor of shape (B, H, T, T) takes, in any type of number: 1, 2, 4 or 8 bytes."""
    for config, size in zip(_drawn(3), (1, 2, 4, 8), strict=True):
        want = _bytes_of(3, config.n_heads, 23, 23, bytes_per_element=size)
        got = score_bytes(config, B=3, T=23, bytes_per_element=size)
        _exactly(got, want, f"score_bytes with B=3, T=23, {size} bytes of {_letters(config)}")


def test_scores_of_a_long_text(score_bytes):
    """8 sequences of 4096 tokens in GPT-2's 12 heads, float32: 6,442,450,944 bytes in a single layer. Always an int."""
    config, _ = _published("GPT-2")
    _exactly(score_bytes(config, 8, 1024, 4), 402_653_184, "score_bytes of GPT-2 with B=8, T=1024, 4 bytes")
    longer = GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50257, context_length=4096)
    _exactly(score_bytes(longer, 8, 4096, 4), 6_442_450_944, "score_bytes with B=8, T=4096, 12 heads, 4 bytes")
    huge = LlamaConfig(**HUGE)
    want = 999_999_937 * 9 * 1_000_003**2
    _exactly(score_bytes(huge, 999_999_937, 1_000_003, 1), want, "score_bytes with B=999999937, T=1000003, 9 heads")


# kv_cache_bytes ------------------------------------------------------------------------------------------------------


def probe_kv_cache_bytes(kv_cache_bytes):
    """Results that tell the known mistakes apart."""
    plain = {**TINY, "n_layers": 2, "d_model": 12, "n_heads": 3}
    configs = [kind(**sizes) for kind in KINDS for sizes in (TINY, plain, ODD)]
    questions = [(config, B, T, size) for config in configs for B, T, size in ((1, 1, 1), (2, 5, 4), (3, 7, 2))]
    return [outcome(lambda question=question: kv_cache_bytes(*question)) for question in questions]


def test_a_cache_by_hand(kv_cache_bytes):
    """3 layers, 2 sequences of 5 tokens, 2 key heads of width 7, 4 bytes: 2 * 3 * 2*5 * 2*7 * 4 = 3360."""
    for kind in KINDS:
        got = kv_cache_bytes(kind(**ODD), 2, 5, 4)
        _exactly(got, 3360, f"kv_cache_bytes with B=2, T=5, 4 bytes of {_letters(kind(**ODD))}")


def test_only_key_heads_are_kept(kv_cache_bytes):
    """Only the K key heads are kept, of width D: neither the query heads nor C count."""
    for changes in ({"n_kv_heads": 1}, {"n_kv_heads": 6}, {"n_heads": 12}, {"head_dim": 1}, {"d_model": 36}):
        config = LlamaConfig(**ODD | changes)
        want = 2 * 3 * 2 * 5 * config.n_kv_heads * config.head_dim * 4
        _exactly(kv_cache_bytes(config, 2, 5, 4), want, f"kv_cache_bytes with B=2, T=5, 4 bytes of {_letters(config)}")


def test_the_cache_grows_with_each_token(kv_cache_bytes):
    """Twice the tokens, or twice the sequences: twice the bytes. The context's length does not count."""
    for B, T, want in ((1, 1, 168), (1, 2, 336), (2, 1, 336), (1, 28, 4704), (3, 7, 3528)):
        got = kv_cache_bytes(GPTConfig(**ODD), B, T, 2)
        _exactly(got, want, f"kv_cache_bytes with B={B}, T={T}, 2 bytes of {_letters(GPTConfig(**ODD))}")


def test_a_cache_equals_torchs_bytes(kv_cache_bytes):
    """It is what two tensors (B, K, T, D) a layer take, in any type of number: 1, 2, 4 or 8 bytes."""
    for config, size in zip(_drawn(4), (8, 4, 2, 1), strict=True):
        shape = (config.n_layers, 2, 3, config.n_kv_heads, 23, config.head_dim)
        got = kv_cache_bytes(config, B=3, T=23, bytes_per_element=size)
        want = _bytes_of(*shape, bytes_per_element=size)
        _exactly(got, want, f"kv_cache_bytes with B=3, T=23, {size} bytes of {_letters(config)}")


def test_published_caches(kv_cache_bytes):
    """At 2 bytes an element a token takes 524,288 bytes in Llama-2-7B and 22,528 in TinyLlama, which shares keys."""
    for name, want in PUBLISHED_CACHE.items():
        config, _ = _published(name)
        _exactly(kv_cache_bytes(config, 1, 1, 2), want, f"kv_cache_bytes with B=1, T=1, 2 bytes of {name}")
    huge = LlamaConfig(**HUGE)
    want = 2 * 999_999_937 * 1_000_003 * 33
    _exactly(kv_cache_bytes(huge, 999_999_937, 1_000_003, 1), want, "kv_cache_bytes with B=999999937, T=1000003")


# training_bytes ------------------------------------------------------------------------------------------------------

NAMES = ("weights", "gradients", "optimizer", "activations", "total")


def _kept(config, B: int, T: int, checkpointing: bool) -> int:
    """How many activations are kept, tensor by tensor."""
    inner, kept = (B, T, config.d_ff), 2 if isinstance(config, GPTConfig) else 4
    heads = (B, T, config.n_heads * config.head_dim)
    square = (B, config.n_heads, T, T)
    width, vocabulary = (B, T, config.d_model), (B, T, config.vocab_size)
    layer = [width] * 6 + [heads] * 4 + [inner] * kept + [square] * 2
    end = [width] * 3 + [vocabulary] * 3

    def elements(shapes):
        return sum(math.prod(shape) for shape in shapes)

    if checkpointing:
        return elements([width] * config.n_layers) + max(elements([*layer, inner]), elements(end))
    return elements(layer * config.n_layers + end)


def _trained(got, name: str, what: str):
    """One entry of what training_bytes returns."""
    if got is None:
        raise Broken(f"{what}: expected a dict, got None. Is a `return` missing?")
    expect(isinstance(got, dict), f"{what}: expected a dict, got {type(got).__name__} {got}")
    missing = ", ".join(key for key in NAMES if key not in got)
    expect(not missing, f"{what}: expected the keys {', '.join(NAMES)}; missing: {missing}")
    extra = ", ".join(str(key) for key in got if key not in NAMES)
    expect(not extra, f"{what}: expected the keys {', '.join(NAMES)}; not expected: {extra}")
    return got[name]


def _check_training(got, config, want: dict[str, int], what: str) -> None:
    for name, n in want.items():
        _exactly(_trained(got, name, what), n, f"{what} of {_letters(config)}, {name!r}")


def _expected(config, B: int, T: int, size: int, checkpointing: bool) -> dict[str, int]:
    P = _parameters_of_modules(config)
    found = {"weights": P, "gradients": P, "optimizer": 2 * P, "activations": _kept(config, B, T, checkpointing)}
    found = {name: n * size for name, n in found.items()}
    return found | {"total": sum(found.values())}


def probe_training_bytes(training_bytes):
    """Results that tell the known mistakes apart."""
    plain = {**TINY, "n_layers": 2, "d_model": 12, "n_heads": 3}
    answers = []

    def ask(*question, **options):
        got = outcome(lambda: training_bytes(*question, **options))
        answers.extend([got.get(name) for name in NAMES] if isinstance(got, dict) else [got] * len(NAMES))

    for kind in KINDS:
        for config in (kind(**TINY), kind(**plain), kind(**ODD), kind(**ODD | {"vocab_size": 500})):
            ask(config, 1, 1)
            ask(config, 2, 5)
            ask(config, 2, 5, 2)
            ask(config, 2, 5, checkpointing=True)
            ask(config, 3, 7, 2, True)
    return [*answers, _of_another(lambda: training_bytes(_encoder(), 2, 5))]


def test_weights_gradients_and_two_moments(training_bytes):
    """A Llama with 60 parameters: 240 bytes of weights, 240 of gradients, 480 of AdamW's two moments."""
    config = LlamaConfig(**TINY)
    want = {"weights": 240, "gradients": 240, "optimizer": 480}
    _check_training(training_bytes(config, 1, 1), config, want, "training_bytes with B=1, T=1")
    config = GPTConfig(**TINY)
    want = {"weights": 308, "gradients": 308, "optimizer": 616}
    _check_training(training_bytes(config, 3, 5), config, want, "training_bytes with B=3, T=5")


def test_activations_by_hand(training_bytes):
    """One token in a Llama with C=2, H*D=2, F=3, V=5: 12 + 8 + 12 + 2 in its layer, 6 + 15 at the end, 55 * 4 bytes. A
    GPT's MLP keeps 6 in place of 12."""
    for kind, want in ((LlamaConfig, 220), (GPTConfig, 196)):
        config = kind(**TINY)
        got = training_bytes(config, 1, 1)
        _check_training(got, config, {"activations": want}, "training_bytes with B=1, T=1")


def test_every_layer_keeps_its_activations(training_bytes):
    """Three layers keep three times as much as one: 3 * 34 + 21. The end is kept once."""
    for kind, layer in ((LlamaConfig, 34), (GPTConfig, 28)):
        for L in (2, 3):
            config = kind(**TINY | {"n_layers": L})
            want = {"activations": (L * layer + 21) * 4}
            _check_training(training_bytes(config, 1, 1), config, want, "training_bytes with B=1, T=1")


def test_two_matrices_a_head_are_kept(training_bytes):
    """Tokens count once in most tensors and squared in attention's two T x T matrices a head: 2 * B*H*T*T."""
    for kind in KINDS:
        for T in (1, 2, 4, 28):
            config = kind(**ODD)
            want = {"activations": 4 * _kept(config, 3, T, False)}
            _check_training(training_bytes(config, 3, T), config, want, f"training_bytes with B=3, T={T}")


def test_keys_are_kept_for_every_query_head(training_bytes):
    """q, k, v and the mixed values are kept at H*D each: shared keys were repeated. H*D need not be C."""
    for kind in KINDS:
        for changes in ({"n_kv_heads": 6}, {"n_kv_heads": 1}, {"head_dim": 3}, {"d_ff": 44}, {"vocab_size": 999}):
            config = kind(**ODD | changes)
            want = _expected(config, 2, 5, 4, False)
            _check_training(training_bytes(config, 2, 5), config, want, "training_bytes with B=2, T=5")


def test_checkpointing_keeps_one_block(training_bytes):
    """Checkpointing keeps each layer's input, here 2 numbers a token, and one block whole with B*T*F more: in three
    layers 3 * 2 + 34 + 3."""
    for kind, block in ((LlamaConfig, 37), (GPTConfig, 31)):
        for L in (1, 3):
            config = kind(**TINY | {"n_layers": L})
            want = {"activations": (L * 2 + block) * 4}
            got = training_bytes(config, 1, 1, checkpointing=True)
            _check_training(got, config, want, "training_bytes with B=1, T=1, checkpointing=True")


def test_checkpointing_may_peak_at_the_end(training_bytes):
    """A large vocabulary makes the end larger than a block. The two are not alive at once, so the larger one counts."""
    for kind in KINDS:
        for V in (5, 8, 12, 14, 100):
            config = kind(**TINY | {"n_layers": 3, "vocab_size": V})
            want = {"activations": 4 * _kept(config, 1, 1, True)}
            got = training_bytes(config, 1, 1, checkpointing=True)
            _check_training(got, config, want, "training_bytes with B=1, T=1, checkpointing=True")
        for T in (1, 28):
            config = kind(**ODD)
            want = _expected(config, 3, T, 4, True)
            got = training_bytes(config, 3, T, checkpointing=True)
            _check_training(got, config, want, f"training_bytes with B=3, T={T}, checkpointing=True")


def test_all_elements_have_the_same_bytes(training_bytes):
    """`bytes_per_element` holds for weights, gradients, moments and activations alike; it is 4 if not given."""
    config = LlamaConfig(**ODD)
    for size in (1, 2, 8):
        for checkpointing in (False, True):
            want = _expected(config, 2, 5, size, checkpointing)
            got = training_bytes(config, 2, 5, size, checkpointing)
            _check_training(got, config, want, f"training_bytes with B=2, T=5, {size} bytes, {checkpointing}")
    got = training_bytes(config=config, B=2, T=5, bytes_per_element=2, checkpointing=False)
    _check_training(got, config, _expected(config, 2, 5, 2, False), "training_bytes with every argument by keyword")


def test_the_total_is_the_sum(training_bytes):
    """The total is the sum of the four, with checkpointing too: 240 + 240 + 480 + 220 = 1180 in the small Llama."""
    config = LlamaConfig(**TINY)
    _check_training(training_bytes(config, 1, 1), config, {"total": 1180}, "training_bytes with B=1, T=1")
    got = training_bytes(config, 1, 1, checkpointing=True)
    _check_training(got, config, {"total": 1116}, "training_bytes with B=1, T=1, checkpointing=True")


def test_training_bytes_follow_the_formula(training_bytes):
    """Whatever the sizes: all five numbers, plain and with checkpointing, as ints."""
    for config in _drawn(5):
        for checkpointing in (False, True):
            want = _expected(config, 3, 11, 2, checkpointing)
            got = training_bytes(config, 3, 11, 2, checkpointing)
            what = f"training_bytes with B=3, T=11, 2 bytes, checkpointing={checkpointing}"
            _check_training(got, config, want, what)


def test_training_bytes_are_exact_and_whole(training_bytes):
    """All five numbers are ints, and exact beyond 2 ** 53."""
    for kind in KINDS:
        config = kind(**HUGE)
        for checkpointing in (False, True):
            want = _expected(config, 100_003, 1_000_003, 4, checkpointing)
            got = training_bytes(config, 100_003, 1_000_003, checkpointing=checkpointing)
            _check_training(got, config, want, "training_bytes with B=100003, T=1000003")


def test_other_configs_have_no_training_bytes(training_bytes):
    """An EncoderConfig is neither a GPT's nor a Llama's: a TypeError, not a wrong number."""
    raises(TypeError, lambda: training_bytes(_encoder(), 2, 5), "training_bytes of an EncoderConfig")


# roofline_seconds ----------------------------------------------------------------------------------------------------


def _near(got, want: float, what: str) -> None:
    """Break the promise unless this is the number that is wanted, up to rounding."""
    if got is None:
        raise Broken(f"{what}: expected {want:g}, got None. Is a `return` missing?")
    number = isinstance(got, (int, float)) and not isinstance(got, bool)
    expect(number, f"{what}: expected the number {want:g}, got {type(got).__name__} {got}")
    expect(math.isclose(got, want, rel_tol=1e-9), f"{what}: expected {want:g} seconds, got {got:g}")


QUESTIONS = [  # FLOPs, bytes, FLOP/s, bytes/s
    (12.0, 10.0, 3.0, 5.0),
    (6.0, 20.0, 3.0, 5.0),
    (7.0, 9.0, 2.0, 4.0),
    (1.0, 1.0, 8.0, 4.0),
    (0.0, 3.0, 2.0, 4.0),
    (3.0, 0.0, 2.0, 4.0),
    (12, 10, 5, 3),
    (30, 10, 4, 5),
    (4e12, 1e12, 1e12, 5e11),
    (1.0, 1.0, 0.0, 1.0),
    (1.0, 1.0, 1.0, 0.0),
    (1.0, 1.0, -1.0, 1.0),
    (1.0, 1.0, 1.0, -1.0),
    (0.0, 0.0, 0.0, 1.0),
]


def probe_roofline_seconds(roofline_seconds):
    """Results that tell the known mistakes apart."""
    return [outcome(lambda question=question: roofline_seconds(*question)) for question in QUESTIONS]


def _check_roofline(roofline_seconds, flops, n_bytes, flops_per_second, bytes_per_second, want: float) -> None:
    got = roofline_seconds(flops, n_bytes, flops_per_second, bytes_per_second)
    work, machine = (
        f"{flops:g} FLOPs and {n_bytes:g} bytes",
        f"{flops_per_second:g} FLOP/s and {bytes_per_second:g} bytes/s",
    )
    _near(got, want, f"roofline_seconds of {work} at {machine}")


def test_computing_takes_longer(roofline_seconds):
    """12 FLOPs at 3 a second take 4 s, 10 bytes at 5 a second 2 s. Both go on at once: 4 s."""
    _check_roofline(roofline_seconds, 12.0, 10.0, 3.0, 5.0, 4.0)


def test_moving_takes_longer(roofline_seconds):
    """6 FLOPs at 3 a second take 2 s, 20 bytes at 5 a second 4 s: 4 s. More FLOP/s would not help."""
    _check_roofline(roofline_seconds, 6.0, 20.0, 3.0, 5.0, 4.0)
    _check_roofline(roofline_seconds, 6.0, 20.0, 300.0, 5.0, 4.0)


def test_seconds_need_not_be_whole(roofline_seconds):
    """Whole numbers in, seconds out: 7 FLOPs at 2 a second take 3.5 s. Nothing is rounded."""
    _check_roofline(roofline_seconds, 7, 9, 2, 4, 3.5)
    _check_roofline(roofline_seconds, 1, 1, 8, 4, 0.25)
    _check_roofline(roofline_seconds, 4e12, 1e12, 1e12, 5e11, 4.0)


def test_no_work_takes_no_time(roofline_seconds):
    """Without FLOPs only the bytes count, without bytes only the FLOPs, without both it is 0 s."""
    _check_roofline(roofline_seconds, 0, 3, 2, 4, 0.75)
    _check_roofline(roofline_seconds, 3, 0, 2, 4, 1.5)
    _check_roofline(roofline_seconds, 0, 0, 2, 4, 0.0)


def test_the_slower_of_the_two_decides(roofline_seconds):
    """Whatever the numbers, it is the longer of the two times."""
    for flops, n_bytes, fast, wide in (10 ** (4 * torch.rand(20, 4, generator=rng(6)).double())).tolist():
        longer = sorted([flops / fast, n_bytes / wide])[1]
        _check_roofline(roofline_seconds, flops, n_bytes, fast, wide, longer)
    got = roofline_seconds(flops=8, n_bytes=9, flops_per_second=2, bytes_per_second=3)
    _near(got, 4.0, "roofline_seconds(flops=8, n_bytes=9, flops_per_second=2, bytes_per_second=3)")


def test_rates_must_be_above_zero(roofline_seconds):
    """A rate of 0 or below is a ValueError, for either of the two rates, and even where there is no work."""
    _check_roofline(roofline_seconds, 1, 1, 1, 1, 1.0)
    for work in ((1.0, 1.0), (0.0, 0.0), (1.0, 9.0), (9.0, 1.0)):
        for rates in ((0, 1), (1, 0), (-1.0, 1.0), (1.0, -1.0), (-2.0, -1.0), (0.0, 0.0)):
            what = f"roofline_seconds of {work[0]:g} FLOPs and {work[1]:g} bytes at rates {rates}"
            raises(ValueError, lambda work=work, rates=rates: roofline_seconds(*work, *rates), what)
