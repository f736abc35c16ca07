"""Chapter 12's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from unittest import mock

import torch
from matplotlib.ticker import NullFormatter
from torch import Tensor, nn

from tfmlib import attention, cache, costs, heads, losses, optim, storyland, tokens
from tfmlib.course.meters import Alive
from tfmlib.models import shared
from tfmlib.models.gpt import GPT, GPTConfig
from tfmlib.models.llama import Llama, LlamaConfig

from . import Figure, cells, claim, colour, draw, ink, one_thread, rng, slope, weights_from

GIB = 2**30
H100 = {"flops": 989e12, "bytes": 3.35e12, "memory": 80e9}  # SXM, bf16; NVIDIA's data sheet
LLAMA2 = {"vocab_size": 32_000, "context_length": 4096}
LLAMA2_7B = LlamaConfig(n_layers=32, d_model=4096, n_heads=32, d_ff=11_008, **LLAMA2)
LLAMA2_70B = {"n_layers": 80, "d_model": 8192, "n_heads": 64, "d_ff": 28_672, **LLAMA2}
LLAMA3_8B = {"n_layers": 32, "d_model": 4096, "n_heads": 32, "d_ff": 14_336, "vocab_size": 128_256}


def llama(seed: int = 0, **sizes) -> Llama:
    """A Llama with weights that depend on the seed alone."""
    with weights_from(seed):
        return Llama(LlamaConfig(**sizes))


def empty_cache(model: nn.Module, B: int, capacity: int, kind: Callable = cache.KVCache) -> cache.KVCache:
    """A cache with the sizes and the dtype of a model."""
    config = model.config
    sizes = (config.n_layers, B, config.n_kv_heads, config.head_dim, capacity)
    return kind(*sizes, dtype=next(model.parameters()).dtype)


def _three(n: float) -> str:
    """Three digits: 1234.5 -> "1,234", 12.345 -> "12.3", 1.2345 -> "1.23"."""
    return f"{n:,.0f}" if n >= 100 else f"{n:.1f}" if n >= 10 else f"{n:.2f}"


# --- earlier tokens do not change --------------------------------------------------------------------------------


def unchanged(T: int = 12, more: int = 12, seeds: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, str]:
    """How far the keys and values of T tokens move when more tokens follow: with the causal mask, and without."""
    sizes = {"n_layers": 3, "d_model": 48, "n_heads": 4, "vocab_size": 31, "context_length": T + more}
    moved = {"causal": [], "free": []}
    for seed in seeds:
        model = llama(seed, **sizes).double()
        ids = torch.randint(0, 31, (1, T + more), generator=rng(seed))
        everything = mock.patch.object(
            attention, "causal_mask", lambda T, S=None: torch.ones(T, S or T, dtype=torch.bool)
        )
        for kind, mask in (("causal", contextlib.nullcontext()), ("free", everything)):
            kept = []
            for n in (T, T + more):
                held = empty_cache(model, 1, n)
                with mask:
                    cache.prefill(model, ids[:, :n], held)
                kept.append([x[:, :, :T] for layer in held.layers for x in (layer.keys, layer.values)])
            moved[kind].append(max((a - b).abs().max().item() for a, b in zip(*kept, strict=True)))
    claim(max(moved["causal"]) < 1e-12, "with the causal mask earlier keys and values stay, up to rounding")
    claim(min(moved["free"]) > 1e-4, "without it they move")
    return {
        "moved-causal": "0" if max(moved["causal"]) == 0 else _power(max(moved["causal"])),
        "moved-free": f"{min(moved['free']):.2f}",
    }


# --- the cost, counted -------------------------------------------------------------------------------------------


def counted(n: int = 4096) -> dict[str, str]:
    """The FLOPs of writing n tokens from nothing with Llama 2 7B, with a cache and without: matrices and attention."""
    config = LLAMA2_7B

    def parts(T: int, S: int) -> tuple[int, int]:
        matrices = costs.forward_flops(config, 1, T, 0)
        return matrices, costs.forward_flops(config, 1, T, S) - matrices

    found = {}
    for name, steps in (("with", ((1, t) for t in range(1, n + 1))), ("without", ((t, t) for t in range(1, n + 1)))):
        matrices, pairs = (sum(column) for column in zip(*(parts(T, S) for T, S in steps), strict=True))
        found |= {f"{name}-matrices": matrices, f"{name}-pairs": pairs, f"{name}-all": matrices + pairs}
    claim(2 * found["without-matrices"] == (n + 1) * found["with-matrices"], "matrices: (n + 1) / 2 times")
    claim(3 * found["without-pairs"] == (2 * n + 1) * found["with-pairs"], "attention: (2n + 1) / 3 times")
    texts = {f"flops-{name}": f"{_three(flops / 1e12)}" for name, flops in found.items()}
    for part in ("matrices", "pairs", "all"):
        texts[f"times-{part}"] = f"{found[f'without-{part}'] / found[f'with-{part}']:,.0f}"
    return texts


def sizes() -> dict[str, str]:
    """Bytes of a cache: the standard example, a model of the 70B class, and real tensors against the formula."""
    cases = {"example": LLAMA2_7B}
    cases |= {f"70B-{K}": LlamaConfig(**LLAMA2_70B, n_kv_heads=K) for K in (64, 8)}
    texts = {}
    for name, config in cases.items():
        n = costs.kv_cache_bytes(config, 1, 4096, 2)
        texts |= {f"cache-{name}": f"{n:,}", f"cache-{name}-gb": f"{n / 1e9:.1f} GB"}
        texts[f"cache-{name}-gib"] = f"{n / GIB:.2f}".rstrip("0").rstrip(".") + " GiB"
        texts[f"cache-{name}-token"] = f"{n / 4096 / 1024:.0f} KiB"
    small = {"n_layers": 4, "d_model": 256, "n_heads": 8, "vocab_size": 97, "context_length": 512}
    for dtype, b in ((torch.float32, 4), (torch.bfloat16, 2)):
        for K in (8, 2, 1):
            model = llama(**small, n_kv_heads=K).to(dtype)
            held = empty_cache(model, 2, 384)
            cache.prefill(model, torch.zeros(2, 384, dtype=torch.long), held)
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (y.keys for y in held.layers)}
            storages |= {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (y.values for y in held.layers)}
            n_bytes = sum(storage.nbytes() for storage in storages.values())
            expected = costs.kv_cache_bytes(model.config, 2, 384, b)
            claim(n_bytes == expected, "bytes measured equal bytes counted")
            texts[f"bytes-{K}-{b}"] = f"{n_bytes:,}"
    return texts


# --- the cost, measured ------------------------------------------------------------------------------------------


def seconds_of(works: Iterable[Callable[[], object]], repeats: int = 3) -> list[float]:
    """Median processor time of each piece of work, on one core; the pieces take turns."""
    torch.empty(31 * 2**20, dtype=torch.uint8)  # once freed, glibc keeps blocks of up to this size at hand
    works = list(works)
    spent = [[] for _ in works]
    with one_thread(), torch.inference_mode():
        for _ in range(repeats):
            for work, times in zip(works, spent, strict=True):
                work()  # does not count: it brings memory and caches to the state of this work
                start = time.thread_time()
                work()
                times.append(time.thread_time() - start)
    return [statistics.median(times) for times in spent]


def step_at(model: Llama, S: int) -> Callable[[], object]:
    """A decoding step that makes a cache of S tokens full; the S - 1 earlier keys and values are random."""
    held, config = empty_cache(model, 1, S), model.config
    shape = (2, 1, config.n_kv_heads, S - 1, config.head_dim)
    for i in range(config.n_layers):
        held.layer(i).append(*torch.randn(shape, generator=rng(i)))
    token = torch.zeros(1, 1, dtype=torch.long)

    def step():
        cache.decode_step(model, token, held)
        held.trim(S - 1)

    return step


def time_per_token(
    without: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096),
    cached: tuple[int, ...] = (64, 256, 1024, 4096, 16_384, 65_536, 131_072),
) -> tuple[Figure, dict[str, str]]:
    """Time of the next token against the tokens before it, with a cache and without."""
    model = llama(n_layers=1, d_model=64, n_heads=1, head_dim=128, vocab_size=64, context_length=max(cached))
    works = [lambda T=T: model(torch.zeros(1, T, dtype=torch.long)) for T in without]
    slow = seconds_of(works[:4], repeats=5) + seconds_of(works[4:])  # apart: after a large one a small one is slow
    fast = seconds_of([step_at(model, S) for S in cached], repeats=5)
    slopes = {"without": slope(without[-4:], slow[-4:]), "cached": slope(cached[-2:], fast[-2:])}
    flat = fast[cached.index(1024)] / fast[0]
    ratio = {T: slow[without.index(T)] / fast[cached.index(T)] for T in (256, 4096)}
    claim(1.5 < slopes["without"] < 2.8, "without a cache the slope is about 2")
    claim(0.5 < slopes["cached"] < 1.6, "with a cache the slope comes close to 1")
    claim(flat < 3, "up to 1,024 tokens the time of a cached step hardly grows")
    claim(ratio[4096] > 50, "at 4,096 tokens the cache saves a factor of more than 50")

    def paint(canvas):
        ax = canvas.subplots()
        ax.plot(without, [1e3 * t for t in slow], "s--", label="without a cache", color=colour(1))
        ax.plot(cached, [1e3 * t for t in fast], "o-", label="with a cache", color=colour(0))
        guides = ((without[-4:], slow[-1], 2, 1.8, (-26, 16)), (cached[-3:], fast[-1], 1, 0.5, (6, -8)))
        for x, end, power, factor, shift in guides:
            guide = [1e3 * factor * end * (n / x[-1]) ** power for n in x]
            ax.plot(x, guide, ":", color=ink(), linewidth=1.5)
            ax.annotate(f"slope {power}", (x[1], guide[1]), shift, textcoords="offset points", fontsize=9.5)
        ax.set(title="Time of one new token, one core", xlabel="tokens in the text, T", ylabel="milliseconds")
        ax.set(xscale="log", yscale="log")
        ax.set_xticks([64, 1024, 4096, 16_384, 131_072], ["64", "1 Ki", "4 Ki", "16 Ki", "128 Ki"])
        ax.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.legend(fontsize=9.5, loc="upper left")

    alt = (
        "Time of one new token against the length of the text, both axes logarithmic. Without a cache it rises with a "
        f"slope of {slopes['without']:.1f}, to {1e3 * slow[-1]:.0f} milliseconds at {without[-1]} tokens. With a cache "
        f"it stays near {1e3 * fast[0]:.1f} up to about 4,096 tokens and ends with a slope of {slopes['cached']:.1f}, "
        f"at {1e3 * fast[-1]:.0f} milliseconds for {cached[-1]} tokens."
    )
    texts = {f"slope-{name}": f"{value:.2f}" for name, value in slopes.items()}
    texts |= {"floor-ms": f"{1e3 * fast[0]:.1f} ms", "slow-4096": f"{1e3 * slow[-1]:,.0f} ms"}
    texts |= {"fast-4096": f"{1e3 * fast[cached.index(4096)]:.1f} ms", "ratio-4096": f"{ratio[4096]:,.0f}"}
    texts |= {"ratio-256": f"{ratio[256]:.1f}"}
    return draw(paint, alt, size=(6.4, 3.6)), texts


def grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """For one new token: (B, H, 1, D), (B, K, S, D), (B, K, S, D) -> (B, H, 1, D)."""
    B, H, _, D = q.shape
    rows = q.view(B, k.shape[1], -1, D)  # (B, K, H / K, D)
    return attention.scaled_dot_product_attention(rows, k, v).view(B, H, 1, D)


def sharing(S: int = 8192, H: int = 16, D: int = 64) -> dict[str, str]:
    """The time of one layer's attention for one new token, with 16, 4 and 1 key/value heads: repeated, and grouped."""
    counts, works = (16, 4, 1), []
    q = torch.randn(1, H, 1, D, generator=rng(0))
    for K in counts:
        k, v = torch.randn(2, 1, K, S, D, generator=rng(K))

        def repeated(k=k, v=v, n=H // K):
            return attention.scaled_dot_product_attention(q, heads.repeat_kv(k, n), heads.repeat_kv(v, n))

        def grouped(k=k, v=v):
            return grouped_attention(q, k, v)

        claim(torch.allclose(repeated(), grouped(), atol=1e-5), "both ways give the same")
        works += [repeated, grouped]
    spent = seconds_of(works, repeats=5)
    found = dict(zip(counts, zip(spent[::2], spent[1::2], strict=True), strict=True))
    claim(found[1][1] < found[16][1] / 2, "grouped, one key/value head is more than twice as fast as sixteen")
    claim(found[4][1] < found[4][0] / 1.5, "grouping is faster than repeating")
    claim(found[4][0] > 1.2 * found[16][0], "with copies GQA is slower than MHA")
    texts = {}
    for K, (repeated, grouped) in found.items():
        texts |= {f"repeated-{K}": f"{1e3 * repeated:.2f}", f"grouped-{K}": f"{1e3 * grouped:.2f}"}
        texts |= {f"layer-{K}": f"{2 * K * S * D * 4 / 1e6:.1f}"}
    return texts


def chunks(T: int = 1024, sizes: tuple[int, ...] = (1024, 256, 64)) -> dict[str, str]:
    """The same prompt in chunks of different size: the largest difference of the logits, and the peak of memory."""
    model = llama(n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, vocab_size=97, context_length=T)
    ids = torch.randint(0, 97, (1, T), generator=rng(0))
    found, texts = {}, {}
    for size in sizes:
        held = empty_cache(model, 1, T)
        with one_thread(), Alive() as alive:
            for part in ids.split(size, dim=1):
                logits = cache.prefill(model, part, held)
        found[size] = logits
        texts[f"chunk-{size}"] = f"{alive.peak / 1e6:.1f} MB"
    gap = max((found[size] - found[T]).abs().max().item() for size in sizes)
    claim(gap < 1e-5, "chunks change nothing but rounding")
    return texts | {"chunk-gap": _power(gap)}


# --- the cost, on a data sheet -----------------------------------------------------------------------------------


def batch_rates(S: int = 4096) -> tuple[Figure, dict[str, str]]:
    """Llama 3.1 8B on one H100 by roofline: tokens a second against sequences in the batch, for three K."""
    batches = [2**i for i in range(11)]
    configs = {K: LlamaConfig(**LLAMA3_8B, n_kv_heads=K, context_length=131_072) for K in (32, 8, 1)}
    published = configs[8]
    stored = 2 * costs.count_parameters(published)
    weights = stored - 2 * published.vocab_size * published.d_model  # a look-up reads a few rows

    def rate(K: int, B: int) -> float:
        flops = costs.forward_flops(configs[K], B, 1, S)
        n_bytes = weights + costs.kv_cache_bytes(configs[K], B, S, 2)  # the weights of K = 8 for all three
        return B / costs.roofline_seconds(flops, n_bytes, H100["flops"], H100["bytes"])

    for config in configs.values():
        computing = costs.forward_flops(config, 1024, 1, S) / H100["flops"]
        reading = (weights + costs.kv_cache_bytes(config, 1024, S, 2)) / H100["bytes"]
        claim(computing < reading, "memory is the bound up to 1,024 sequences")
    one = {K: costs.kv_cache_bytes(config, 1, S, 2) for K, config in configs.items()}
    room = {K: int((H100["memory"] - stored) // n) for K, n in one.items()}
    names = {32: "MHA, K = 32", 8: "GQA, K = 8 (as published)", 1: "MQA, K = 1"}

    def paint(canvas):
        ax = canvas.subplots()
        for i, (K, name) in enumerate(names.items()):
            fits = [B for B in batches if room[K] > B] + [room[K]]
            beyond = [room[K]] + [B for B in batches if room[K] < B]
            ax.plot(fits, [rate(K, B) for B in fits], "-", color=colour(i), label=name)
            ax.plot(beyond, [rate(K, B) for B in beyond], ":", color=colour(i))
            ax.plot(room[K], rate(K, room[K]), "o", color=colour(i))
        ax.plot(batches[:7], [rate(1, 1) * B for B in batches[:7]], "--", color=ink(), linewidth=1)
        ax.annotate("no cache to read", (26, rate(1, 1) * 32), (-92, 0), textcoords="offset points", fontsize=9.5)
        ax.set(title=f"Decode, {S:,} tokens a sequence, one H100: at most", xlabel="sequences in the batch, B")
        ax.set(ylabel="tokens a second", xscale="log", yscale="log")
        ax.set_xticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        ax.set_yticks([1000, 10_000], ["1,000", "10,000"])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.legend(fontsize=9.5, loc="lower right")

    ends = {K: H100["bytes"] / n for K, n in one.items()}
    alt = (
        "Tokens a second against the batch, both axes logarithmic. All three curves begin together and bend away from "
        "the straight line: MHA first, MQA last. The cache fills the memory at "
        + ", ".join(f"{room[K]} sequences with K = {K}, {rate(K, room[K]):,.0f} tokens a second" for K in names)
        + "."
    )
    texts = {"weights-gb": f"{weights / 1e9:.1f} GB", "stored-gb": f"{stored / 1e9:.1f} GB"}
    for K in names:
        texts |= {f"one-{K}": _three(one[K] / 1e9), f"room-{K}": f"{room[K]:,}", f"end-{K}": f"{ends[K]:,.0f}"}
        texts |= {f"equal-{K}": f"{weights / one[K]:.0f}", f"at-room-{K}": f"{rate(K, room[K]):,.0f}"}
        texts[f"at-1-{K}"] = f"{rate(K, 1):,.0f}"
    return draw(paint, alt, size=(6.4, 3.6)), texts


# --- broken caches -----------------------------------------------------------------------------------------------

LAND = storyland.Storyland(  # few names, so that a small model learns them soon
    girls=("Anna", "Mia", "Rosa"),
    boys=("Tom", "Ben", "Leo"),
    homes=("Rome", "Oslo", "Lima", "Bonn"),
    colours=("red", "blue", "green", "white"),
    things=("ball", "kite", "boat", "drum"),
    sites=("forest", "river", "market"),
)
PROMPTS, NEW, CHUNK = 32, 12, 5


@functools.cache
def trained(kind: str, seed: int = 0, steps: int = 240, lr_peak: float = 4e-3) -> nn.Module:
    """A GPT or a Llama of two layers after a few seconds of training on stories."""
    sizes = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "vocab_size": len(LAND.vocabulary)}
    with weights_from(seed):
        make = {"GPT": (GPT, GPTConfig), "Llama": (Llama, LlamaConfig)}[kind]
        model = make[0](make[1](**sizes, context_length=128))
    optimizer, batches = torch.optim.Adam(model.parameters()), LAND.batches(16, rng(seed))
    with one_thread():
        for step, (inputs, labels) in zip(range(steps), batches, strict=False):
            optimizer.param_groups[0]["lr"] = lr_peak * min(1, (step + 1) / 20) * (1 - step / steps)
            optimizer.zero_grad()
            losses.cross_entropy(model(inputs), labels).backward()
            optim.clip_gradients(model.parameters(), max_norm=1.0)
            optimizer.step()
    return model


def prompts(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """The beginnings of n stories, 12 to 20 tokens each, padded on the left: ids and is_token, (n, 20) both."""
    generator = rng(seed)
    cut = torch.randint(12, 21, (n,), generator=generator)
    cut[0] = 20
    stories = [LAND.encode(LAND.story(generator)) for _ in range(n)]
    return tokens.pad_batch([story[:c] for story, c in zip(stories, cut.tolist(), strict=True)], 0, side="left")


class OneStorage(cache.KVCache):
    """Broken: all layers write into the first one's tensors."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        first = self.layers[0]
        self.layers = [cache.CacheLayer(first.keys, first.values) for _ in self.layers]


class NeverReset(cache.KVCache):
    """Broken: what was there stays."""

    def reset(self) -> None:
        pass


def _inputs(change: Callable) -> Callable[[], contextlib.AbstractContextManager]:
    """Replace what a decoder makes of its inputs: `change(positions, visible, start)` gives both anew."""
    right = shared.decoder_inputs

    def wrong(ids, context_length, positions=None, mask=None, cache=None):
        start = 0 if cache is None else cache.length
        positions, visible = right(ids, context_length, positions, mask, cache)
        S, padding = start + ids.shape[1], torch.ones(1, 1, dtype=torch.bool) if mask is None else mask
        return (positions, visible) if cache is None else change(positions, visible, start, S, padding)

    return lambda: mock.patch.object(shared, "decoder_inputs", wrong)


def _all(T: int, S: int) -> Tensor:
    return torch.ones(T, S, dtype=torch.bool)


BROKEN: dict[str, tuple[Callable, type]] = {
    "right": (contextlib.nullcontext, cache.KVCache),
    "no mask in prefill": (
        _inputs(lambda p, visible, start, S, padding: (p, _all(S - start, S) & padding)),
        cache.KVCache,
    ),
    "mask only if T = S": (
        _inputs(lambda p, visible, start, S, padding: (p, _all(S - start, S) & padding if start else visible)),
        cache.KVCache,
    ),
    "mask aligned top left": (
        _inputs(lambda p, visible, start, S, padding: (p, _all(S - start, S).tril() & padding)),
        cache.KVCache,
    ),
    "positions restart at 0": (
        _inputs(lambda p, visible, start, S, padding: (torch.arange(S - start) if start else p, visible)),
        cache.KVCache,
    ),
    "own key left out": (
        _inputs(lambda p, v, start, S, padding: (p, v & (torch.arange(S) < S - 1) if start == S - 1 else v)),
        cache.KVCache,
    ),
    "one storage, all layers": (contextlib.nullcontext, OneStorage),
    "not reset": (contextlib.nullcontext, NeverReset),
    "padding counted": (
        _inputs(lambda p, visible, start, S, padding: (torch.arange(start, S), visible)),
        cache.KVCache,
    ),
}


@torch.no_grad()
def told(model: nn.Module, broken: str, right: Tensor | None = None, seed: int = 5) -> Tensor:
    """Logits of NEW steps after a batch of prompts, (B, NEW, V); `right` are the tokens to feed, else the likeliest."""
    (ids, is_token), (patch, kind) = prompts(PROMPTS, seed), BROKEN[broken]
    before = prompts(PROMPTS, seed + 1)
    held = empty_cache(model, PROMPTS, before[0].shape[1] + ids.shape[1] + NEW, kind)
    found, chunk = [], CHUNK if broken == "mask only if T = S" else ids.shape[1]
    with patch(), one_thread():
        if broken == "not reset":
            cache.prefill(model, before[0], held, before[1])
            held.reset()
            is_token = torch.cat([before[1], is_token], dim=1)  # else the shapes would tell
        for step in range(NEW):
            for part in ids.split(chunk, dim=1):
                logits = cache.prefill(model, part, held, is_token[:, : held.length + part.shape[1]])
            found.append(logits)
            ids = logits.argmax(-1, keepdim=True) if right is None else right[:, step : step + 1]
            is_token = torch.cat([is_token, torch.ones_like(ids, dtype=torch.bool)], dim=1)
    return torch.stack(found, dim=1)


def largest_gap(model: nn.Module, held: cache.KVCache, ids: Tensor, is_token: Tensor, seed: int) -> float:
    """Feed ids (B, T) in random chunks; how far the logits are from those of each row alone, without a cache."""
    held.reset()
    generator, fed, gap = rng(seed), 0, 0.0
    while fed < ids.shape[1]:
        size = int(torch.randint(1, 6, (), generator=generator))
        part = ids[:, fed : fed + size]
        fed += part.shape[1]
        logits = cache.prefill(model, part, held, is_token[:, :fed])
        for row in range(len(ids)):
            if is_token[row, fed - 1]:
                alone = model(ids[row, :fed][is_token[row, :fed]][None])[0, -1]
                gap = max(gap, (logits[row] - alone).abs().max().item())
    return gap


def found_by_test(seeds: tuple[int, ...] = (0, 1, 2)) -> dict[str, str]:
    """Run `largest_gap` on untrained models in float64: the right cache, and all broken ones."""
    gaps: dict[str, list[float]] = {"right": [], "broken": [], "padding counted": []}
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": len(LAND.vocabulary)}
    for make, config in ((GPT, GPTConfig), (Llama, LlamaConfig)):
        with weights_from(0):
            model = make(config(**sizes, context_length=64)).double()
        for name, (patch, kind) in BROKEN.items():
            held, gap = empty_cache(model, 3, 48, kind), 0.0
            with patch(), one_thread(), torch.no_grad():
                for seed in seeds:
                    try:
                        gap = max(gap, largest_gap(model, held, *prompts(3, seed), seed))
                    except ValueError:  # an error is a finding too: the old tokens are still there
                        gap = math.inf
            harmless = name == "padding counted" and make is Llama
            gaps["right" if name == "right" else name if harmless else "broken"].append(gap)
    claim(max(gaps["right"] + gaps["padding counted"]) < 1e-12, "the test passes what is right")
    claim(min(gaps["broken"]) > 1e-6, "the test finds every broken cache")
    return {"test-right": _power(max(gaps["right"])), "test-broken": _power(min(gaps["broken"]))}


def _power(x: float) -> str:
    """0.00023 -> "2 · 10⁻⁴"."""
    number, exponent = f"{x:.0e}".split("e")
    return f"{number} · 10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def fingerprints(shown: int = 8, seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """How far the logits of each new token are off, for each broken cache; and how many texts change."""
    names, gaps, changed, texts, longest = list(BROKEN), {}, {}, {}, 0.0
    for kind in ("GPT", "Llama"):
        model = trained(kind, seed)
        right = told(model, "right")
        best = right.argmax(-1)
        found = {name: told(model, name, best) for name in names}
        gaps[kind] = torch.stack([(found[name] - right).abs().amax(-1).mean(0) for name in names])  # (names, NEW)
        for name in names:
            changed[kind, name] = int((found[name].argmax(-1) != best).any(1).sum())
            texts[f"changed-{kind}-{name}"] = str(changed[kind, name])
        longest = max(longest, (found["padding counted"] - right)[0].abs().max().item())  # row 0 has no padding
    late = ("mask aligned top left", "positions restart at 0", "own key left out", "one storage, all layers")
    for kind, table in gaps.items():
        row = dict(zip(names, table, strict=True))
        claim(row["right"].max() < 1e-4, "the right cache is right")
        claim(all(row[name][0] < 1e-4 < 0.05 < row[name][1:].min() for name in late), "the first token is right")
        early = ["no mask in prefill", "mask only if T = S", "not reset"] + ["padding counted"] * (kind == "GPT")
        claim(all(row[name].min() > 0.02 for name in early), "wrong from the first token on")
        claim(changed[kind, "mask aligned top left"] > 0.75 * PROMPTS, "a mask aligned top left changes most texts")
    quiet = ("own key left out", "mask only if T = S")
    claim(all(changed["Llama", name] < PROMPTS / 2 for name in quiet), "two mistakes leave most of Llama's texts alone")
    claim(gaps["Llama"][names.index("padding counted")].max() < 1e-3, "counted padding does not move a Llama")
    claim(longest < 1e-4, "the longest prompt, without padding, is right")

    def paint(canvas):
        for ax, (kind, table) in zip(canvas.subplots(2, 1), gaps.items(), strict=True):
            part = table[:, :shown]
            numbers = [["0" if gap < 1e-3 else f"{gap:.1f}" for gap in row] for row in part.tolist()]
            cells(ax, part.sqrt(), f"{kind}: largest difference of a logit", "new token", "", numbers, top=2.0)
            ax.set_yticks(range(len(names)), names)
            ax.set_xticks(range(shown), range(1, shown + 1))
            ax.set_aspect("auto")

    alt = "Two tables of caches by new tokens: the mean over texts of the largest difference of a logit. " + " ".join(
        f"{kind}, {name}: {table[i, 0]:.1f} at the first token, {table[i, 1]:.1f} at the second."
        for kind, table in gaps.items()
        for i, name in enumerate(names)
    )
    return draw(paint, alt, size=(6.4, 5.8)), texts | {"n-prompts": str(PROMPTS), "n-new": str(NEW)}


def samples(kind: str = "Llama") -> dict[str, str]:
    """The same prompt continued by the right cache and by broken ones."""
    model, (ids, is_token) = trained(kind, 0), prompts(PROMPTS, 5)
    found = {name: told(model, name).argmax(-1) for name in ("right", "mask aligned top left", "own key left out")}
    same = (found["right"] == found["own key left out"]).all(1)
    i = int(same.nonzero()[0])
    texts = {f"sample-{name}": LAND.decode(rows[i]) for name, rows in found.items()}
    claim(texts["sample-mask aligned top left"] != texts["sample-right"], "the mask at the top left changes the text")
    claim(same.sum() > PROMPTS / 2, "most texts survive a missing own key")
    return texts | {"sample-prompt": LAND.decode(ids[i][is_token[i]]), "kept-own": str(int(same.sum()))}
