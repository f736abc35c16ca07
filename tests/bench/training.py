"""A training step of tfmlib's GPT beside plain PyTorch models and transformers' GPT-2 of the same size.

    python -m tests.bench.training [--threads N] [--steps N]

All models take turns, step by step, in one process, in a new order each time: forward, loss, backward, clipping, AdamW.
tfmlib uses its own pieces for all of it, or, as with `Recipe(fused=True)`, PyTorch's kernels for norms, attention and
AdamW; the others use PyTorch's defaults. With one thread the time is the processor's, so that other work on the machine
counts for little. Prints a Markdown table; the one that is kept is in README.md beside this file.
"""

import argparse
import math
import platform
import random
import statistics
import time
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfmlib import optim, training
from tfmlib.models.gpt import GPT, GPTConfig

SIZES = {  # layers, width, heads, vocabulary, sequences, tokens
    "4 layers, width 128, 12 x 64 tokens (nanoGPT's for a CPU)": (4, 128, 4, 65, 12, 64),
    "6 layers, width 384, 4 x 256 tokens": (6, 384, 6, 65, 4, 256),
}


class Block(nn.Module):
    """A pre-norm layer of plain PyTorch, with its fused attention or with softmax(q k^T) v in three lines."""

    def __init__(self, C: int, n_heads: int, fused: bool):
        super().__init__()
        self.n_heads, self.fused = n_heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        B, T, C = x.shape
        parts = self.qkv(self.norm1(x)).split(C, dim=-1)
        q, k, v = (part.view(B, T, self.n_heads, -1).transpose(1, 2) for part in parts)  # (B, H, T, D)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            mixed = F.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Plain(nn.Module):
    """GPT-2's architecture in plain PyTorch, with a tied head."""

    def __init__(self, config: GPTConfig, fused: bool):
        super().__init__()
        C = config.d_model
        self.tokens, self.places = nn.Embedding(config.vocab_size, C), nn.Embedding(config.context_length, C)
        self.blocks = nn.ModuleList(Block(C, config.n_heads, fused) for _ in range(config.n_layers))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        future = torch.ones(T, T, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tokens(ids) + self.places(torch.arange(T, device=ids.device))
        for block in self.blocks:
            x = block(x, future)
        return self.head(self.norm(x))


class TorchLayers(nn.Module):
    """The same out of PyTorch's ready-made layers."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.d_model
        self.tokens, self.places = nn.Embedding(config.vocab_size, C), nn.Embedding(config.context_length, C)
        layer = nn.TransformerEncoderLayer(
            C,
            config.n_heads,
            config.d_ff,
            dropout=0.0,
            activation=lambda x: F.gelu(x, approximate="tanh"),
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, config.n_layers, norm=nn.LayerNorm(C), enable_nested_tensor=False)
        self.head = nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=ids.device)
        x = self.tokens(ids) + self.places(torch.arange(T, device=ids.device))
        return self.head(self.layers(x, mask=mask, is_causal=True))


class HuggingFace(nn.Module):
    """transformers' GPT-2, with the attention it takes by itself."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=config.vocab_size,
                n_embd=config.d_model,
                n_head=config.n_heads,
                n_layer=config.n_layers,
                n_positions=config.context_length,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def their_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    inputs, labels = batch
    optimizer.zero_grad()
    F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def our_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    training.accumulate_gradients(model, [batch])
    optim.clip_gradients(model.parameters(), 1.0)
    optimizer.step()


def our_fused_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    with training.fused_kernels(model):
        our_step(model, optimizer, batch)


def medians(config: GPTConfig, B: int, n_steps: int, device: torch.device) -> dict[str, float]:
    """The median seconds of a step of each model."""
    torch.manual_seed(0)
    ours, fused = GPT(config).to(device), GPT(config).to(device)
    peers = {
        "plain PyTorch": Plain(config, fused=False),
        "plain PyTorch, fused attention": Plain(config, fused=True),
        "PyTorch's TransformerEncoder": TorchLayers(config),
        "transformers' GPT-2": HuggingFace(config),
    }
    runs = {
        "tfmlib": (our_step, ours, optim.AdamW(ours.parameters(), lr=1e-4)),
        "tfmlib, fused kernels": (our_fused_step, fused, torch.optim.AdamW(fused.parameters(), lr=1e-4, fused=True)),
    }
    for name, model in peers.items():
        model.to(device).train()
        runs[name] = their_step, model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    n = sum(p.numel() for p in ours.parameters())
    assert all(sum(p.numel() for p in model.parameters()) == n for _, model, _ in runs.values()), "not the same size"
    ids = torch.randint(config.vocab_size, (B, config.context_length + 1), device=device)
    seconds = {name: [] for name in runs}
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    order, clock = list(runs), time.process_time if alone else time.perf_counter
    for i in range(n_steps + 3):
        random.shuffle(order)
        for name in order:
            step, model, optimizer = runs[name]
            start = clock()
            step(model, optimizer, (ids[:, :-1], ids[:, 1:]))
            if device.type == "cuda":
                torch.cuda.synchronize()
            if i >= 3:  # the first ones warm up
                seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {version('transformers')}"
    print(f"{versions}, {device}, {options.threads} thread(s), median of {options.steps} steps")
    for title, (L, C, H, V, B, T) in SIZES.items():
        config = GPTConfig(n_layers=L, d_model=C, n_heads=H, vocab_size=V, context_length=T)
        found = medians(config, B, options.steps if C < 200 else max(options.steps // 4, 3), device)
        print(f"\n{title}\n\n| | ms a step | tfmlib's time as a ratio | with fused kernels |\n|---|---|---|---|")
        for name, seconds in found.items():
            ratios = [found[ours] / seconds for ours in ("tfmlib", "tfmlib, fused kernels")]
            print(f"| {name} | {seconds * 1e3:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
