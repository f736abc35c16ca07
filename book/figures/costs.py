"""Chapter 10's experiments. Each returns its figure, where it has one, and the texts which the page quotes by name."""

import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from matplotlib.ticker import NullFormatter, ScalarFormatter
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tfmlib import attention, blocks, costs, heads, optim, training
from tfmlib.course.meters import Alive, kept_tensors
from tfmlib.models.gpt import GPT, GPTConfig
from tfmlib.models.llama import Llama, LlamaConfig

from . import Figure, claim, colour, draw, ink, one_thread, rng, weights_from

GIB = 2**30
H100 = {"flops": 989e12, "sparse": 1979e12, "bytes": 3.35e12, "memory": 80e9}  # SXM, bf16; NVIDIA's data sheet

# --- models ------------------------------------------------------------------------------------------------------

TINY = LlamaConfig(n_layers=1, d_model=2, n_heads=1, d_ff=3, vocab_size=5, context_length=8)
SMALL = {"n_layers": 6, "d_model": 512, "n_heads": 8, "vocab_size": 30_000, "context_length": 512}
GPT2 = GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50_257, context_length=1024)
LLAMA2 = {"vocab_size": 32_000, "context_length": 4096}
LLAMA2_7B = LlamaConfig(n_layers=32, d_model=4096, n_heads=32, d_ff=11_008, **LLAMA2)
LLAMA2_70B = LlamaConfig(n_layers=80, d_model=8192, n_heads=64, n_kv_heads=8, d_ff=28_672, **LLAMA2)
LLAMA3 = {"vocab_size": 128_256, "context_length": 131_072, "n_kv_heads": 8}
LLAMA3_8B = LlamaConfig(n_layers=32, d_model=4096, n_heads=32, d_ff=14_336, **LLAMA3)
LLAMA3_405B = LlamaConfig(n_layers=126, d_model=16_384, n_heads=128, d_ff=53_248, **LLAMA3)
MODELS = {
    "GPT-2": GPT2,
    "Llama 2 7B": LLAMA2_7B,
    "Llama 2 70B": LLAMA2_70B,
    "Llama 3.1 8B": LLAMA3_8B,
    "Llama 3.1 405B": LLAMA3_405B,
}


def _machine(config: costs.Config, device: str = "cpu") -> nn.Module:
    """The model of a configuration; on the device "meta" it has shapes but no memory."""
    with torch.device(device), weights_from(0):
        return (GPT if isinstance(config, GPTConfig) else Llama)(config)


def _batch(config: costs.Config, B: int, T: int) -> tuple[Tensor, Tensor]:
    """Random inputs and labels, (B, T) both."""
    ids = torch.randint(0, config.vocab_size, (B, T + 1), generator=rng(0))
    return ids[:, :-1], ids[:, 1:]


def _count(n: float) -> str:
    """12345 -> "12,345"; from a million on "12.3 million" and so on, three digits."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if n >= size:
            return f"{_three(n / size)} {name}"
    return f"{n:,.0f}"


def _three(n: float) -> str:
    """Three digits: 1234.5 -> "1,234", 12.345 -> "12.3", 1.2345 -> "1.23"."""
    return f"{n:,.0f}" if n >= 100 else f"{n:.1f}" if n >= 10 else f"{n:.2f}"


def _gb(n: float) -> str:
    return f"{_three(n / 1e9)} GB"


def _per_token(config: costs.Config, T: int) -> float:
    """FLOPs of a forward pass for one of T tokens."""
    return costs.forward_flops(config, 1, T) / T


# --- by hand -----------------------------------------------------------------------------------------------------


def tiny(T: int = 3) -> dict[str, str]:
    """All costs of the model that is counted with a pencil."""
    step = costs.training_bytes(TINY, 1, T)
    states = step["total"] - step["activations"]
    counts = {
        "parameters": costs.count_parameters(TINY),
        "flops": costs.forward_flops(TINY, 1, T),
        "training": 3 * costs.forward_flops(TINY, 1, T),
        "cache": costs.kv_cache_bytes(TINY, 1, T, 2),
        "states": states,
        "activations": step["activations"],
    }
    claim(list(counts.values()) == [60, 336, 1008, 24, 960, 708], "the sums in the table by hand")
    return {f"tiny-{name}": f"{n:,}" for name, n in counts.items()}


def parameters() -> dict[str, str]:
    """The parameters of the page's model, part by part, as a GPT and as a Llama: from the models' own tensors."""
    texts = {}
    for name, config in (("gpt", GPTConfig(**SMALL)), ("llama", LlamaConfig(**SMALL))):
        model = _machine(config, "meta")
        block = model.blocks[0]
        parts = {
            "attention": block.attention,
            "mlp": block.mlp,
            "block": block,
            "blocks": model.blocks,
            "norm": model.norm,
        }
        counts = {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}
        counts["norms"] = counts["block"] - counts["attention"] - counts["mlp"]
        counts["tables"] = sum(p.numel() for n, p in model.named_parameters() if "embedding" in n or "head" in n)
        counts["total"] = sum(p.numel() for p in model.parameters())
        claim(counts["total"] == costs.count_parameters(config), "count_parameters counts what the model has")
        texts |= {f"n-{name}-{part}": f"{n:,}" for part, n in counts.items()}
    published = 124_439_808
    claim(costs.count_parameters(GPT2) == published, "GPT-2 has 124,439,808 parameters")
    texts |= {
        f"rule-{name}": _count(12 * config.n_layers * config.d_model**2)
        for name, config in (("small", GPTConfig(**SMALL)), ("7B", LLAMA2_7B))
    }
    texts["n-7B"] = _count(costs.count_parameters(LLAMA2_7B))
    untied = published + GPT2.vocab_size * GPT2.d_model
    return texts | {"n-gpt2": f"{published:,}", "n-gpt2-untied": f"{untied:,}"}


def _counted_flops(config: costs.Config, B: int, T: int) -> dict[str, int]:
    """FLOPs by PyTorch's counter: of a forward pass, of training, and of training with checkpointing."""
    model, batch = _machine(config), _batch(config, B, T)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(batch[0])
    found = {"forward": forward.get_total_flops()}
    for kind, checkpointing in (("training", False), ("checkpointing", True)):
        with training._recomputing(model, checkpointing), FlopCounterMode(display=False) as counted:
            training.accumulate_gradients(model, [batch])
        found[kind] = counted.get_total_flops()
    return found


def counter(B: int = 2, T: int = 40) -> dict[str, str]:
    """FLOPs by formula and by PyTorch's counter."""
    sizes = {"n_layers": 3, "d_model": 48, "n_heads": 4, "vocab_size": 101, "context_length": T}
    for config in (LlamaConfig(**sizes, n_kv_heads=2), GPTConfig(**sizes)):
        formula, found = costs.forward_flops(config, B, T), _counted_flops(config, B, T)
        claim(found["forward"] == formula, "the formula equals PyTorch's count")
        claim(found["training"] == 3 * formula, "training takes exactly three times the forward pass")
        claim(3 < found["checkpointing"] / formula <= 4, "checkpointing adds at most one forward pass")
    return {
        "formula": f"{formula:,}",  # of the GPT
        "counted-forward": f"{found['forward']:,}",
        "counted-training": f"{found['training']:,}",
        "counted-checkpointing": f"{found['checkpointing'] / found['training']:.2f}",
    }


def six_n_d() -> dict[str, str]:
    """What training really takes, divided by 6 N for each token: with all parameters, and without the tables."""
    small = GPTConfig(**SMALL)
    cases = {
        "small": (small, 512),
        "GPT-2": (GPT2, 1024),
        "7B": (LLAMA2_7B, 4096),
        "8B-long": (LLAMA3_8B, 131_072),
    }
    texts = {}
    for name, (config, T) in cases.items():
        exact, n = 3 * _per_token(config, T), costs.count_parameters(config)
        tables = config.vocab_size * config.d_model * (1 if config.tied else 2)
        tables += config.context_length * config.d_model if isinstance(config, GPTConfig) else 0
        texts |= {
            f"6nd-{name}-exact": f"{_three(exact / 1e9)}",
            f"6nd-{name}-all": f"{exact / (6 * n):.2f}",
            f"6nd-{name}-kaplan": f"{exact / (6 * (n - tables)):.2f}",
            f"6nd-{name}-T": f"{T:,}",
        }
    return texts


# --- which term dominates ----------------------------------------------------------------------------------------


def _seconds(works: Iterable[Callable[[], object]], repeats: int = 5) -> list[float]:
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


def lengths(C: int = 128, H: int = 4, measured: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)):
    """Where the scores overtake the rest of a layer: counted, by width, and measured, by length."""
    generator = rng(0)
    with weights_from(0):
        layer, mlp = heads.MultiHeadAttention(C, H, bias=True), blocks.MLP(C, 4 * C)
    projections, works = (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj), []
    for T in measured:
        x = torch.randn(1, T, C, generator=generator)
        q, k, v = torch.randn(3, 1, H, T, C // H, generator=generator)
        mask = attention.causal_mask(T)
        works += [
            lambda x=x: [projection(x) for projection in projections],
            lambda x=x: mlp(x),
            lambda q=q, k=k, v=v, mask=mask: attention.scaled_dot_product_attention(q, k, v, mask),
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v),
        ]
    times = _seconds(works)
    names = ("projections", "MLP", "plain attention", "fused attention")
    found = {name: [t / T for t, T in zip(times[i::4], measured, strict=True)] for i, name in enumerate(names)}
    at = measured.index(4 * C)
    plain, fused = (found[name][at] / found["MLP"][at] for name in ("plain attention", "fused attention"))
    claim(plain > 1.3, "at T = 4C the plain attention takes more time than the MLP")
    claim(fused < plain, "the fused kernel is faster than the plain code")
    slower = [T for T, a, b in zip(measured, found["plain attention"], found["MLP"], strict=True) if a > b]
    earlier = min(slower)
    claim(earlier < 4 * C, "the plain attention overtakes the MLP before the counts say so")

    def paint(canvas):
        left, right = canvas.subplots(1, 2)
        widths = [512, 16_384 * 2]
        for factor, style, name in (
            (2, ":", "projections, T = 2C"),
            (4, "--", "MLP, T = 4C"),
            (6, "-", "both, T = 6C"),
        ):
            left.plot(widths, [factor * width for width in widths], style, label=name, color=colour(0))
        short = {"Llama 2 7B": "7B", "Llama 2 70B": "70B", "Llama 3.1 8B": "3.1 8B", "Llama 3.1 405B": "405B"}
        for name, config in MODELS.items():
            left.plot(config.d_model, config.context_length, "o", color=colour(1))
            place = {"ha": "right", "xytext": (-6, 3)} if name.startswith("Llama 3") else {"xytext": (5, 4)}
            point = (config.d_model, config.context_length)
            left.annotate(short.get(name, name), point, textcoords="offset points", fontsize=9, **place)
        left.set(title="Counted: scores overtake …", xlabel="width C", ylabel="tokens T", xscale="log", yscale="log")
        left.set_xticks([1024, 4096, 16_384], ["1 Ki", "4 Ki", "16 Ki"])
        left.set_yticks([1024, 4096, 16_384, 65_536, 262_144], ["1 Ki", "4 Ki", "16 Ki", "64 Ki", "256 Ki"])
        styles = ("^:", "s--", "o-", "D-.")
        for i, (name, seconds) in enumerate(found.items()):
            right.plot(measured, [1e6 * s for s in seconds], styles[i], label=name, color=colour(i), markersize=5)
        right.axvline(4 * C, color=ink(), linewidth=1, linestyle="--")
        right.set(title=f"Measured, C = {C}", xlabel="tokens T", ylabel="µs a token", xscale="log", yscale="log")
        right.set_xticks(measured, [str(T) for T in measured])
        right.yaxis.set_major_formatter(ScalarFormatter())
        for ax in (left, right):
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.tick_params(which="minor", length=0)
        left.legend(fontsize=8.5, loc="lower right")
        right.legend(fontsize=8.5)

    alt = (
        "Left, both axes logarithmic: three rising lines of tokens against width, T = 2C, 4C and 6C. GPT-2, Llama 2 7B "
        "and 70B lie below all of them, Llama 3.1 8B and 405B with 131,072 tokens above all. Right: microseconds a "
        f"token against T. Projections and MLP stay about level. Plain attention rises and is above the MLP at T = "
        f"{earlier}, before the dashed line at T = {4 * C}. There the fused kernel lies below the plain code."
    )
    texts = {"plain-4C": f"{plain:.1f}", "fused-4C": f"{fused:.1f}", "four-C": str(4 * C)}
    return draw(paint, alt, size=(6.4, 3.6)), texts


# --- bytes -------------------------------------------------------------------------------------------------------


def scores_and_cache() -> dict[str, str]:
    """The score matrix, and the cache of a 70B model with all its heads and as published."""
    texts = {}
    for T in (512, 4096, 32_768):
        texts[f"scores-{T}"] = _count(T * T)
    twelve = GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50_257, context_length=4096)
    layer = costs.score_bytes(twelve, 8, 4096, 4)
    texts |= {"layer-scores": f"{layer / 1e9:.1f} GB", "all-scores": f"{12 * layer / 1e9:.1f} GB"}
    texts["all-scores-gib"] = f"{12 * layer / GIB:.1f} GiB"
    cache = costs.kv_cache_bytes(LLAMA2_70B, 1, 4096, 2)
    texts |= {"cache-70B": f"{cache / GIB:.2f} GiB", "cache-70B-mha": f"{8 * cache / GIB:.0f} GiB"}
    texts |= {"cache-70B-twice": f"{2 * cache / GIB:.1f} GiB"}
    texts |= {"cache-70B-token": f"{cache / 4096 / 1024:.0f} KiB"}
    return texts


def _kept_by_part(block: nn.Module, x: Tensor) -> dict[str, float]:
    """How many numbers for a token autograd keeps in each part of a block, each tensor once, for its first reader.

    The weights, and tensors of less than C numbers a token, are left out.
    """
    B, T, C = x.shape
    saved, counts = [], {}

    def run(part: str, module: nn.Module, x: Tensor, **options) -> Tensor:
        with kept_tensors([*block.parameters(), *saved]) as kept:
            out = module(x, **options)
        saved.extend(kept)
        sizes = [t.untyped_storage().nbytes() // 4 for t in kept if t.is_floating_point()]
        counts[part] = sum(n for n in sizes if n >= B * T * C) / (B * T)
        return out

    x = x + run("attention", block.attention, run("norm", block.norm1, x), mask=attention.causal_mask(T))
    run("mlp", block.mlp, run("norm2", block.norm2, x))
    return counts


def kept(C: int = 64, H: int = 4, T: int = 48, B: int = 2) -> dict[str, str]:
    """Numbers that wait for the backward pass, in each part of a block, for one token; small tensors left out."""
    sizes = {"n_layers": 1, "d_model": C, "n_heads": H, "vocab_size": 11, "context_length": T}
    for config, tensors in ((LlamaConfig(**sizes, n_kv_heads=2, d_ff=3 * C), 4), (GPTConfig(**sizes), 2)):
        found = _kept_by_part(_machine(config).blocks[0], torch.randn(B, T, C, generator=rng(0)).requires_grad_())
        wanted = {"norm": 2 * C, "attention": 5 * C + 2 * H * T, "norm2": 2 * C, "mlp": C + tensors * config.d_ff}
        claim(found == wanted, "what is kept is exactly what the formula says")
    return {f"kept-{part}": f"{count:,.0f}" for part, count in {**found, "block": sum(found.values())}.items()}  # GPT's


def peak_bytes(config: costs.Config, B: int, T: int, checkpointing: bool) -> int:
    """The most bytes alive at the same time in a training step: weights, gradients, moments and all the rest."""
    model, batch = _machine(config), _batch(config, B, T)
    optimizer = optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad(set_to_none=False)
        training.accumulate_gradients(model, [batch])
        optimizer.step()

    with one_thread(), training._recomputing(model, checkpointing):
        step()  # makes gradients and moments
        states = [s for p in model.parameters() for s in (p, p.grad, *optimizer.state[p].values())]
        with Alive(s for s in states if isinstance(s, Tensor)) as alive:
            step()
    return alive.peak


def memory(B: int = 8, T: int = 128) -> tuple[Figure, dict[str, str]]:
    """The formula's bytes of a training step against the measured peak."""
    sizes = {"n_layers": 6, "d_model": 192, "n_heads": 6, "vocab_size": 512, "context_length": T}
    configs = {"GPT": GPTConfig(**sizes), "Llama": LlamaConfig(**sizes, n_kv_heads=3)}
    cases = [(name, config, again) for name, config in configs.items() for again in (False, True)]
    counted = [costs.training_bytes(config, B, T, checkpointing=again) for _, config, again in cases]
    measured = [peak_bytes(config, B, T, again) for _, config, again in cases]
    ratios = [peak / count["total"] for peak, count in zip(measured, counted, strict=True)]
    claim(all(0.97 < ratio < 1.08 for ratio in ratios), "the formula is within 8 % of the measured peak")
    parts = ("weights", "gradients", "optimizer", "activations")
    labels = [f"{name},\n{'checkpointing' if again else 'plain'}" for name, _, again in cases]

    def paint(canvas):
        ax = canvas.subplots()
        left = [0.0] * len(cases)
        for i, part in enumerate(parts):
            width = [count[part] / 1e6 for count in counted]
            name = f"{part} (AdamW's two moments)" if part == "optimizer" else part
            ax.barh(range(len(cases)), width, left=left, label=name, color=colour(i), alpha=0.75, height=0.6)
            left = [a + b for a, b in zip(left, width, strict=True)]
        ax.plot([n / 1e6 for n in measured], range(len(cases)), "D", color=ink(), label="measured peak", markersize=6)
        ax.set(title="A training step: counted, and the measured peak", xlabel="MB")
        ax.set_yticks(range(len(cases)), labels)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_axisbelow(True)
        canvas.legend(loc="outside lower center", fontsize=9, ncols=3)

    alt = (
        "Bars of counted bytes: weights, gradients, optimizer, activations; a mark for the measured peak. "
        + " ".join(
            f"{label.replace(chr(10), ' ')}: counted {count['total'] / 1e6:.0f} MB, of which weights "
            f"{count['weights'] / 1e6:.0f}; measured {peak / 1e6:.0f}."
            for label, count, peak in zip(labels, counted, measured, strict=True)
        )
    )
    share = [count["weights"] / count["total"] for count in counted]
    texts = {
        "peak-low": f"{min(ratios):.2f}",
        "peak-high": f"{max(ratios):.2f}",
        "weights-share": f"{100 * share[0]:.0f} %",
        "activations-plain": f"{counted[0]['activations'] / 1e6:.0f} MB",
        "activations-checkpointing": f"{counted[1]['activations'] / 1e6:.0f} MB",
    }
    return draw(paint, alt, size=(6.4, 3.6)), texts


def step_bytes(B: int = 8, T: int = 512) -> dict[str, str]:
    """A training step of the page's model, as a GPT."""
    config = GPTConfig(**SMALL)
    plain, again = (costs.training_bytes(config, B, T, checkpointing=c) for c in (False, True))
    layer = B * T * (10 * 512 + 2 * 2048) + 2 * B * 8 * T * T
    end = 3 * B * T * (512 + 30_000)
    claim(4 * (6 * layer + end) == plain["activations"], "the sum by hand")
    n = costs.count_parameters(LLAMA2_7B)
    return {
        **{f"step-{name}": _gb(count) for name, count in plain.items()},
        "step-layers": _gb(4 * 6 * layer),
        "step-end": _gb(4 * end),
        "step-states": _gb(plain["total"] - plain["activations"]),
        "step-share": f"{100 * plain['weights'] / plain['total']:.0f} %",
        "step-again": _gb(again["total"]),
        "7B-weights": _gb(2 * n),
        "7B-states": _gb(16 * n),
        "7B-no-optimizer": _gb(8 * n),
    }


# --- time --------------------------------------------------------------------------------------------------------


def serving(S: int = 4096) -> dict[str, dict]:
    """Llama 3.1 8B on one H100, 16 bits, by roofline: reading a prompt, and writing one token for B sequences."""
    config = LLAMA3_8B
    weights = 2 * (costs.count_parameters(config) - config.vocab_size * config.d_model)  # a look-up reads a few rows
    found = {}
    for name, B, T in (("prefill", 1, S), ("decode-1", 1, 1), ("decode-16", 16, 1), ("decode-64", 64, 1)):
        flops = costs.forward_flops(config, B, T, S)
        n_bytes = weights + costs.kv_cache_bytes(config, B, S, 2)
        seconds = costs.roofline_seconds(flops, n_bytes, H100["flops"], H100["bytes"])
        found[name] = {
            "flops": flops,
            "bytes": n_bytes,
            "seconds": seconds,
            "bound": "computing" if flops / H100["flops"] > n_bytes / H100["bytes"] else "memory",
            "tokens": B * T / seconds,
        }
    return found


def on_h100() -> dict[str, str]:
    """The texts of `serving`, and the machine's balance."""
    texts = {"balance": f"{H100['flops'] / H100['bytes']:.0f}"}
    for name, row in serving().items():
        texts |= {
            f"{name}-gflop": f"{row['flops'] / 1e9:,.0f}",
            f"{name}-gb": _three(row["bytes"] / 1e9),
            f"{name}-intensity": _three(row["flops"] / row["bytes"]),
            f"{name}-ms": _three(1e3 * row["seconds"]),
            f"{name}-bound": row["bound"],
            f"{name}-tokens": f"{row['tokens']:,.0f}",
            f"{name}-compute": f"{_three(1e3 * row['flops'] / H100['flops'])} ms",
        }
    return texts


def roofline(n: int = 4096, batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)):
    """A batch of B tokens through one matrix of n x n, on this machine; and the H100's roof with `serving` under it."""
    generator = rng(0)
    weight = torch.randn(n, n, generator=generator)
    tokens = [torch.randn(B, n, generator=generator) for B in batches]
    large = torch.randn(2**24, generator=generator)
    target = torch.empty_like(large)
    works = [lambda x=x: x @ weight.T for x in tokens]
    *times, copy, add = _seconds(
        [*works, lambda: target.copy_(large), lambda: torch.add(large, 1, out=target)], repeats=3
    )
    flops = [2 * B * n * n for B in batches]
    n_bytes = [4 * (n * n + 2 * B * n) for B in batches]
    rates = [f / t for f, t in zip(flops, times, strict=True)]
    peak = max(rates)
    band = max(2 * large.nbytes / min(copy, add), *(b / t for b, t in zip(n_bytes, times, strict=True)))
    per_token = {B: t / B for B, t in zip(batches, times, strict=True)}
    claim(per_token[1] > 2 * per_token[64], "a token in a batch of 64 takes less than half the time of a single one")
    claim(rates[0] < peak / 2, "one token through a matrix does not reach half of the machine's rate")

    def roof(ax, top, slope, points, title, ticks):
        low, high = min(x for x, *_ in points) / 3, max(max(x for x, *_ in points), top / slope) * 4
        ax.plot([low, top / slope, high], [low * slope, top, top], "-", color=ink(), linewidth=1.5)
        ax.axvline(top / slope, color=ink(), linewidth=1, linestyle=":")
        for x, y, text, style, i in points:
            ax.plot(x, y, style, color=colour(i), markersize=5)
            if text:
                place = (-36, 5) if text == "B = 1" else (6, -11)
                ax.annotate(text, (x, y), place, textcoords="offset points", fontsize=9)
        ax.set(title=title, xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel=ticks)

    def paint(canvas):
        left, right = canvas.subplots(1, 2)
        names = {"prefill": "prefill", "decode-1": "decode, B = 1", "decode-16": "B = 16", "decode-64": "B = 64"}
        points = [
            (row["flops"] / row["bytes"], row["flops"] / row["seconds"] / 1e12, names[name], "o", 0)
            for name, row in serving().items()
        ]
        roof(left, H100["flops"] / 1e12, H100["bytes"] / 1e12, points, "Data sheet: H100, 16 bits", "TFLOP/s at most")
        left.set_xlim(right=2e5)
        points = [
            (f / b, rate / 1e9, f"B = {B}" if B in (1, 8, 64, 256) else "", "o", 0)
            for B, f, b, rate in zip(batches, flops, n_bytes, rates, strict=True)
        ]
        points.append((1 / 8, large.numel() / add / 1e9, "x + 1", "s", 1))
        roof(right, peak / 1e9, band / 1e9, points, "Measured: one core here", "GFLOP/s")
        for ax in (left, right):
            ax.xaxis.set_minor_formatter(NullFormatter())

    alt = (
        "Two rooflines, both axes logarithmic: a rising line up to the machine's balance, then a flat one. Left, from "
        "the H100's data sheet: decoding with B = 1, 16, 64 lies on the rising line, prefill on the flat one. Right, "
        f"measured here: B tokens through a matrix of {n} x {n}; the rate grows from {rates[0] / 1e9:.1f} GFLOP/s for "
        f"one token to {peak / 1e9:.0f} at most."
    )
    texts = {
        "here-peak": f"{peak / 1e9:.0f} GFLOP/s",
        "here-band": f"{band / 1e9:.0f} GB/s",
        "here-balance": _three(peak / band),
        "here-1": f"{1e3 * per_token[1]:.2f} ms",
        "here-64": f"{1e3 * per_token[64]:.2f} ms",
        "here-times": f"{per_token[1] / per_token[64]:.1f}",
        "here-rate-1": f"{100 * rates[0] / peak:.0f} %",
    }
    return draw(paint, alt, size=(6.4, 3.6)), texts


def steps() -> dict[str, str]:
    """A training step's time, predicted from the rate of one large product, and measured."""
    product = torch.randn(512, 512, generator=rng(0))
    seconds = min(_seconds([lambda: product @ product] * 5))
    rate, texts, reached = 2 * 512**3 / seconds, {}, {}
    cases = {
        "a": (GPTConfig(n_layers=4, d_model=128, n_heads=4, vocab_size=512, context_length=128), 8),
        "b": (GPTConfig(n_layers=6, d_model=384, n_heads=6, vocab_size=512, context_length=128), 4),
    }
    for name, (config, B) in cases.items():
        model, batch = _machine(config), _batch(config, B, 128)
        optimizer = optim.AdamW(model.parameters())
        times = []
        with one_thread():
            for _ in range(4):
                start = time.thread_time()
                optimizer.zero_grad()
                training.accumulate_gradients(model, [batch])
                optimizer.step()
                times.append(time.thread_time() - start)
        flops, measured = 3 * costs.forward_flops(config, B, 128), statistics.median(times[1:])
        reached[name] = flops / measured
        texts |= {
            f"run-{name}-parameters": f"{costs.count_parameters(config):,}",
            f"run-{name}-flops": _count(flops),
            f"run-{name}-predicted": f"{flops / rate:.3f} s",
            f"run-{name}-measured": f"{measured:.3f} s",
            f"run-{name}-share": f"{100 * flops / measured / rate:.0f} %",
        }
        if name == "b":
            guess = flops / reached["a"]
            texts |= {"run-b-guess": f"{guess:.3f} s", "run-b-factor": f"{max(guess / measured, measured / guess):.1f}"}
    for share in (r / rate for r in reached.values()):
        claim(0.1 < share < 1.2, "a step reaches between a tenth and all of the rate of one large product")
    return texts | {"run-rate": f"{rate / 1e9:.0f} GFLOP/s"}


def plan(tokens: float = 10e9, mfu: float = 0.4, B: int = 16, T: int = 1024) -> dict[str, str]:
    """GPT-2 on ten billion tokens, on one H100."""
    per_token, n = 3 * _per_token(GPT2, T), costs.count_parameters(GPT2)
    hours = {
        "hours": per_token * tokens / (mfu * H100["flops"]) / 3600,
        "hours-rule": 6 * n * tokens / (mfu * H100["flops"]) / 3600,
        "hours-sparse": per_token * tokens / (mfu * H100["sparse"]) / 3600,
        "hours-forward": per_token / 3 * tokens / (mfu * H100["flops"]) / 3600,
    }
    step = costs.training_bytes(GPT2, B, T)
    again = costs.training_bytes(GPT2, B, T, checkpointing=True)
    claim(step["total"] < H100["memory"], "the plan fits into 80 GB")
    return {
        **{f"plan-{name}": f"{value:.1f} hours" for name, value in hours.items()},
        "plan-per-token": _count(per_token),
        "plan-forward": _count(per_token / 3),
        "plan-macs": _count(per_token / 6),
        "plan-flops": f"{per_token * tokens / 1e18:.2f}",
        "plan-steps": f"{tokens / (B * T):,.0f}",
        "plan-step-ms": f"{1e3 * per_token * B * T / (mfu * H100['flops']):.0f} ms",
        "plan-states": _gb(step["total"] - step["activations"]),
        "plan-activations": _gb(step["activations"]),
        "plan-again": _gb(again["total"]),
        "plan-chinchilla": _count(20 * n),
    }
