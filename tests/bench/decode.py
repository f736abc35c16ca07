"""Tokens a second with and without a cache, beside transformers' `generate` and a bare cached loop of the same size.

    python -m tests.bench.decode [--threads N] [--tokens N]

All have the same weights, write greedily with batch 1, and must write the same tokens. They take turns, in a new order
each round; with one thread the time is the processor's. Then how the cost of one more token grows with the tokens that
are there. Prints Markdown tables; those that are kept are in README.md beside this file.
"""

import argparse
import copy
import math
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor

from tfmlib import cache, sampling, training
from tfmlib.models import gpt, llama, weights

PROMPT = 32
SIZES = {  # layers, width, heads
    "4 layers, width 128": (4, 128, 4),
    "6 layers, width 384": (6, 384, 6),
    "12 layers, width 768 (GPT-2)": (12, 768, 12),
}
VOCAB_SIZE, LENGTH = 8192, 1024


class BareGPT:
    """GPT-2 in as few calls of PyTorch as it takes: what a cached step costs without any framework around it."""

    def __init__(self, model: gpt.GPT):
        self.model, self.L = model, len(model.blocks)
        self.H = model.config.n_heads
        self.layers = []
        for block in model.blocks:
            a, mlp, norms = block.attention, block.mlp, (block.norm1, block.norm2)
            qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
            bias = torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias])
            self.layers.append((qkv, bias, a.o_proj, mlp, norms))

    def __call__(self, ids: Tensor, n_new: int) -> Tensor:
        model, C, H = self.model, self.model.config.d_model, self.H
        D, start = C // H, 0
        kept = torch.empty(self.L, 2, 1, H, ids.shape[1] + n_new, D)
        new = ids
        for _ in range(n_new):
            T = new.shape[1]
            x = F.embedding(new, model.token_embedding.weight) + model.position_embedding.weight[start : start + T]
            for i, (qkv, bias, out, mlp, (first, second)) in enumerate(self.layers):
                normed = F.layer_norm(x, (C,), first.weight, first.bias, first.eps)
                q, k, v = F.linear(normed, qkv, bias).view(1, T, 3, H, D).permute(2, 0, 3, 1, 4)
                kept[i, 0, :, :, start : start + T] = k
                kept[i, 1, :, :, start : start + T] = v
                keys, values = kept[i, :, :, :, : start + T]
                mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=T > 1)  # T > 1: nothing kept yet
                x = x + F.linear(mixed.transpose(1, 2).reshape(1, T, C), out.weight, out.bias)
                normed = F.layer_norm(x, (C,), second.weight, second.bias, second.eps)
                hidden = F.gelu(F.linear(normed, mlp.up.weight, mlp.up.bias), approximate="tanh")
                x = x + F.linear(hidden, mlp.down.weight, mlp.down.bias)
            x = F.layer_norm(x[:, -1], (C,), model.norm.weight, model.norm.bias, model.norm.eps)
            new = F.linear(x, model.head.weight).argmax(-1, keepdim=True)
            ids, start = torch.cat([ids, new], dim=1), start + T
        return ids


def theirs_of(model: gpt.GPT):
    """transformers' GPT-2 of the same size, and our model with its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = model.config
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.d_model,
            n_head=config.n_heads,
            n_layer=config.n_layers,
            n_positions=config.context_length,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    for weight in theirs.parameters():
        weight.data *= 3  # so that one token is clearly the likeliest, and all write the same
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, weights.load_gpt2(folder)


def seconds_of(runs: dict[str, Callable[[], Tensor]], n_rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The least seconds of each, from rounds in which all take turns. An AssertionError unless all write the same."""
    texts = {name: run() for name, run in runs.items()}  # also warms up
    first = next(iter(texts.values()))
    assert all(torch.equal(text, first) for text in texts.values()), "not the same text"
    found = {name: [] for name in runs}
    order = list(runs)
    for _ in range(n_rounds):
        random.shuffle(order)
        for name in order:
            start = clock()
            runs[name]()
            found[name].append(clock() - start)
    return {name: min(times) for name, times in found.items()}


def compare(n_new: int, n_rounds: int, clock: Callable[[], float]) -> None:
    """One table: tokens a second of each way to write."""
    print("| | " + " | ".join(f"{title}: tokens/s | cached | tuned" for title in SIZES) + " |")
    print("|---" * (1 + 3 * len(SIZES)) + "|")
    columns = []
    for L, C, H in SIZES.values():
        torch.manual_seed(0)
        config = gpt.GPTConfig(n_layers=L, d_model=C, n_heads=H, vocab_size=VOCAB_SIZE, context_length=LENGTH)
        theirs, ours = theirs_of(gpt.GPT(config))
        tuned = copy.deepcopy(ours)
        cache.store_by_columns(tuned)
        bare, prompt = BareGPT(ours), torch.randint(VOCAB_SIZE, (1, PROMPT))
        mask = torch.ones_like(prompt)
        how = {"attention_mask": mask, "max_new_tokens": n_new, "do_sample": False, "pad_token_id": 0}
        runs = {
            "tfmlib, cached": lambda m=ours, p=prompt: cache.generate_cached(m, p, n_new, temperature=0),
            "tfmlib, cached, fused kernels, stored by columns": lambda m=tuned, p=prompt: fused(m, p, n_new),
            "tfmlib, without a cache": lambda m=ours, p=prompt: sampling.generate(m, p, n_new, temperature=0),
            "transformers' `generate`": lambda m=theirs, p=prompt, h=how: m.generate(p, **h),
            "a bare cached loop": lambda b=bare, p=prompt: b(p, n_new),
        }
        with torch.no_grad():
            columns.append(seconds_of(runs, n_rounds, clock))
    ours, tuned, *_ = columns[0]
    for name in columns[0]:
        cells = [f"{n_new / c[name]:.1f} | {c[ours] / c[name]:.2f} | {c[tuned] / c[name]:.2f}" for c in columns]
        print(f"| {name} | {' | '.join(cells)} |")


def fused(model: gpt.GPT, prompt: Tensor, n_new: int) -> Tensor:
    """Write in PyTorch's fused kernels for norms and attention."""
    with training.fused_kernels(model):
        return cache.generate_cached(model, prompt, n_new, temperature=0)


def growth(clock: Callable[[], float]) -> None:
    """How the cost of one more token grows with T: milliseconds, and the power of T over the last doubling."""
    torch.manual_seed(0)
    sizes = {"n_layers": 4, "d_model": 256, "n_heads": 8, "vocab_size": 1000, "context_length": 8192}
    print("| T | without a cache: ms | slope | cached, 8 key heads: ms | slope | cached, 2 key heads: ms | slope |")
    print("|---" * 7 + "|")
    models = {K: llama.Llama(llama.LlamaConfig(**sizes, n_kv_heads=K)) for K in (8, 2)}
    before: dict[str, float] = {}
    for T in (256, 512, 1024, 2048, 4096, 8192):
        ids, now = torch.randint(1000, (1, T)), {}
        with torch.no_grad():
            if T <= 1024:
                now["without"] = once(lambda ids=ids: models[8](ids), clock, 3)
            for K, model in models.items():
                kept = cache.KVCache(4, 1, K, 32, capacity=T)
                for layer in kept.layers:  # as many keys and values as if a prompt had been fed
                    layer.append(torch.randn(1, K, T - 1, 32), torch.randn(1, K, T - 1, 32))

                def step(model=model, kept=kept, last=ids[:, -1:], T=T):
                    cache.decode_step(model, last, kept)
                    kept.trim(T - 1)

                now[f"{K} heads"] = once(step, clock, 30)
        cells = []
        for name in ("without", "8 heads", "2 heads"):
            power = f"{math.log2(now[name] / before[name]):.2f}" if name in now and name in before else ""
            cells.append(f"{now[name] * 1e3:.2f} | {power}" if name in now else " | ")
        print(f"| {T:,} | {' | '.join(cells)} |", flush=True)
        before = now


def once(call: Callable, clock: Callable[[], float], n: int) -> float:
    """The median seconds of a call."""
    times = []
    for _ in range(n + 1):
        start = clock()
        call()
        times.append(clock() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {version('transformers')}"
    print(f"{versions}, CPU, {options.threads} thread(s), prompt {PROMPT}, {options.tokens} new tokens, batch 1")
    print("ratios: the time of tfmlib's cached loop, as it is and tuned, divided by that of the row\n")
    compare(options.tokens, options.rounds, clock)
    print("\nOne more token after T others: 4 layers, width 256, 8 query heads of width 32\n")
    growth(clock)


if __name__ == "__main__":
    main()
