"""The appendix on debugging: tools to copy, and the experiments of the page with the texts which it quotes by name."""

import contextlib
import copy
import html
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from IPython.display import HTML
from myst_nb import glue
from torch import Tensor, nn

from tfmlib import attention, cache, costs, heads, losses, sampling
from tfmlib.models.llama import Llama, LlamaConfig

from . import Figure, claim, colour, draw, ink, one_thread, put, rng, weights_from
from .attention import naive_attention
from .blocks import floor, sentences
from .costs import H100, LLAMA3_8B, _count, _gb

# --- tools to copy -----------------------------------------------------------------------------------------------


def watch(model: nn.Module, *inputs, **options) -> dict[str, tuple[Tensor, Tensor]]:
    """Run the model once: what each innermost module got and gave, in the order of calls."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        if not list(module.children()):

            def hook(module, got, gave, name=name):
                seen[name] = got[0].detach().clone(), gave.detach().clone()

            hooks.append(module.register_forward_hook(hook))
    try:
        with torch.no_grad():
            model(*inputs, **options)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def first_difference(right: nn.Module, other: nn.Module, *inputs, **options) -> str:
    """Where two models with the same module names first disagree."""
    theirs = watch(other, *inputs, **options)
    for name, tensors in watch(right, *inputs, **options).items():
        for place, a, b in zip(("input", "output"), tensors, theirs[name], strict=True):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                return f"{place} of {name}"
    return "nowhere"


def reads(model: nn.Module, ids: Tensor, **options) -> Tensor:
    """Which outputs move if one token is replaced: (T, T), output t in row t, token s in column s."""
    columns = []
    with torch.no_grad():
        before = model(ids, **options)  # (B, T, V)
        for s in range(ids.shape[1]):
            changed = ids.clone()
            changed[:, s] = (ids[:, s] + 1) % before.shape[-1]
            columns.append((model(changed, **options) - before).abs().amax((0, 2)) > 1e-6)
    return torch.stack(columns, dim=1)


def smoke_test(model: nn.Module, ids: Tensor, V: int, steps: int = 100, lr: float = 0.003) -> None:
    """Four tests of a new causal model on one small batch of ids (B, T). It is trained by them."""
    inputs, labels = ids[:, :-1], ids[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps + 1):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        if step in (0, steps):
            print(f"step {step}: loss {loss.item():.3f}, ln V = {math.log(V):.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    print("parameters without a gradient:", idle or "none")
    model.eval()
    with torch.no_grad():
        right = (model(inputs).argmax(-1) == labels).float().mean()
        changed = torch.cat([inputs[:, :-1], (inputs[:, -1:] + 1) % V], dim=1)
        leak = (model(changed) - model(inputs))[:, :-1].abs().max()
    print(f"labels predicted: {right:.0%}, leak from the last token: {leak:.1e}")


# --- somebody else's model ---------------------------------------------------------------------------------------

B, T, V = 3, 7, 11
SIZES = {"n_layers": 2, "d_model": 20, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "d_ff": 32, "vocab_size": V}


def somebodys(seed: int = 0, **changes) -> Llama:
    """A small Llama whose sizes all differ, with weights large enough that everything has an effect; float64."""
    with weights_from(seed):
        model = Llama(LlamaConfig(**SIZES, context_length=64, **changes)).double().eval()
        for p in model.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.4)
    return model


def some_ids(seed: int = 0) -> Tensor:
    return torch.randint(V, (B, T), generator=rng(seed))


def show_shapes(seen: dict[str, tuple[Tensor, Tensor]], of: str = "") -> None:
    """Print a line for each module whose name begins with `of`, or that is in no block."""
    for name, (got, gave) in seen.items():
        if name.startswith(of) or "blocks" not in name:
            print(f"{name:26} {tuple(got.shape)!s:12} -> {tuple(gave.shape)}")


def show_reads(**found: Tensor) -> None:
    """Print tables of who reads whom side by side."""
    width = 2 * T + 4
    print("".join(f"{name:{width}}" for name in found))
    for t in range(T):
        rows = (" ".join(".x"[int(seen)] for seen in table[t]) for table in found.values())
        print("".join(f"{row:{width}}" for row in rows).rstrip())


def readers(layer: nn.Module, kv_head: int) -> list[int]:
    """Which query heads read a key/value head: those whose part of the output moves with its values."""
    D = layer.q_proj.out_features // layer.n_heads
    x = torch.randn(1, T, layer.q_proj.in_features, generator=rng(0), dtype=layer.q_proj.weight.dtype)
    changed = copy.deepcopy(layer)
    with torch.no_grad():
        changed.v_proj.weight[kv_head * D : (kv_head + 1) * D] += 1
    moved = (watch(layer, x)["o_proj"][0] - watch(changed, x)["o_proj"][0]).abs() > 1e-6  # (1, T, H*D)
    return heads.split_heads(moved, layer.n_heads).flatten(2).any(-1)[0].nonzero().flatten().tolist()


def without_branches(block: nn.Module) -> nn.Module:
    """A copy of a block whose attention and MLP add nothing."""
    block = copy.deepcopy(block)
    for name, p in block.named_parameters():
        if name.split(".")[-2] in ("o_proj", "down"):
            nn.init.zeros_(p)
    return block


def masks() -> dict[str, str]:
    """What True, and what 1, mean to PyTorch's attention: two equal keys, values 0 and 1."""
    q, k, v = torch.zeros(1, 1, 4), torch.zeros(1, 2, 4), torch.tensor([[[0.0] * 4, [1.0] * 4]])
    second_hidden = torch.tensor([[True, False]])
    found = {
        "bool": F.scaled_dot_product_attention(q, k, v, attn_mask=second_hidden)[0, 0, 0].item(),
        "inverted": F.scaled_dot_product_attention(q, k, v, attn_mask=~second_hidden)[0, 0, 0].item(),
        "ones": F.scaled_dot_product_attention(q, k, v, attn_mask=second_hidden.float())[0, 0, 0].item(),
    }
    with weights_from(0):
        layer = nn.MultiheadAttention(4, 1, batch_first=True)
    for name in ("key_padding_mask", "attn_mask"):
        weights = layer(q, k, v, **{name: second_hidden})[1][0, 0]
        claim(weights.tolist() == [0, 1], "in nn.MultiheadAttention True hides")
    claim((found["bool"], found["inverted"]) == (0, 1), "in F.scaled_dot_product_attention True shows")
    claim(math.isclose(found["ones"], 1 / (1 + math.e), rel_tol=1e-5), "a mask of numbers is added to the scores")
    return {f"mask-{name}": f"{value:.2f}" for name, value in found.items()}


def suspects() -> dict[str, nn.Module]:
    """Copies of somebody's model with the same weights and one mistake each."""
    right = somebodys()
    other = {"RoPE's base": somebodys(rope_base=1_000.0), "eps of the norms": somebodys(norm_eps=1e-2)}
    for name in ("gate and up exchanged", "q and k rows of the other pairing"):
        other[name] = copy.deepcopy(right)
    for block in other["gate and up exchanged"].blocks:
        block.mlp.gate, block.mlp.up = block.mlp.up, block.mlp.gate
    D = SIZES["head_dim"]
    pairs = torch.arange(D).view(2, D // 2).T.flatten()  # 0, 3, 1, 4, 2, 5
    with torch.no_grad():
        for block in other["q and k rows of the other pairing"].blocks:
            for projection in (block.attention.q_proj, block.attention.k_proj):
                rows = projection.weight.view(-1, D, SIZES["d_model"])
                projection.weight.copy_(rows[:, pairs].flatten(0, 1))
    return other


# --- curves ------------------------------------------------------------------------------------------------------


def _peek(T: int, S: int | None = None) -> Tensor:
    """A common mistake: the causal mask is one diagonal too wide."""
    S = T if S is None else S
    return torch.ones(T, S, dtype=torch.bool).tril(S - T + 1)


def curve(kind: str, seed: int = 0, steps: int = 160, n: int = 16, T: int = 12) -> list[float]:
    """The losses of a small Llama on the language of chapter 5, with one thing wrong."""
    with weights_from(seed):
        model = Llama(LlamaConfig(n_layers=2, d_model=32, n_heads=2, vocab_size=16, context_length=T))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05 if kind == "lr" else 0.005)
    generator, found, patched = rng(seed), [], contextlib.ExitStack()
    is_token = torch.ones(n, T, dtype=torch.bool)
    if kind == "leak":
        patched.enter_context(mock.patch.object(attention, "causal_mask", _peek))
    if kind == "nan":  # one empty sequence, and code that divides 0 by 0
        is_token[0] = False
        patched.enter_context(mock.patch.object(attention, "scaled_dot_product_attention", naive_attention))
    with one_thread(), patched:
        for step in range(steps):
            inputs, labels = sentences(n, T, generator)
            if kind == "stuck":
                labels = labels.roll(1, 0)  # those of another sequence
            logits = model(inputs, mask=attention.padding_mask(is_token) if kind == "nan" else None)
            loss = losses.cross_entropy(logits, labels.masked_fill(~is_token, losses.IGNORE))
            found.append(loss.item())
            if math.isnan(found[-1]):
                break
            optimizer.zero_grad()
            (loss * (1000 if kind == "bad" and step == 80 else 1)).backward()
            optimizer.step()
    return found


def _end(found: list[float]) -> float:
    return statistics.mean(found[-20:])


KINDS = {
    "right": "As it should be",
    "nan": "NaN at once",
    "lr": "Learning rate ten times too large",
    "bad": "Rise after fall",
    "stuck": r"Stuck at $\ln V$",
    "leak": "Too good",
}


def curves(seed: int = 0) -> tuple[Figure, dict[str, str]]:
    """Six loss curves to recognise."""
    found = {kind: curve(kind, seed) for kind in KINDS}
    least, guess = floor(12), math.log(16)
    end = {kind: _end(losses) for kind, losses in found.items()}
    jump = max(found["bad"][81:])
    claim(all(abs(losses[0] - guess) < 0.1 for losses in found.values()), "every run starts near ln V")
    claim(least < end["right"] < 1.4, "the right run comes near the floor")
    claim(len(found["nan"]) == 2 and math.isnan(found["nan"][1]), "the loss is NaN after one step")
    claim(end["lr"] > end["right"] + 0.5, "with ten times the rate the loss stays high")
    claim(jump > statistics.mean(found["bad"][70:80]) + 0.8, "one bad batch throws the loss back")
    claim(abs(end["stuck"] - guess) < 0.05, "without the right labels nothing is learned")
    claim(end["leak"] < least - 0.2, "with a leak the loss falls below the floor")

    def paint(canvas):
        for i, (ax, (kind, title)) in enumerate(
            zip(canvas.subplots(3, 2, sharex=True).flat, KINDS.items(), strict=True)
        ):
            ax.axhline(guess, color=ink(), linewidth=1, linestyle="--")
            ax.axhline(least, color=ink(), linewidth=1, linestyle=":")
            if kind == "nan":
                ax.plot([1], found[kind][:1], "x", color=colour(1), markersize=9, markeredgewidth=2)
                ax.annotate("NaN from step 2 on", (1, guess), (14, 1.7), fontsize=9)
            else:
                ax.plot(
                    range(1, len(found[kind]) + 1),
                    found[kind],
                    color=colour(0 if kind == "right" else 1),
                    linewidth=1.6,
                )
            ax.set(title=title, ylim=(0, 4), xlim=(-4, 164))
            ax.set(xlabel="training step" if i > 3 else "", ylabel="" if i % 2 else "loss (nats)")

    alt = (
        f"Six curves of the loss over 160 steps, with a dashed line at ln V, {guess:.2f}, and a dotted one at the "
        f"floor, {least:.2f}. As it should be: falls to {end['right']:.2f}. NaN at once: one point, then nothing. "
        f"Learning rate ten times too large: stays at {end['lr']:.2f}. Rise after fall: jumps to {jump:.2f} after step "
        f"81. Stuck: flat at {end['stuck']:.2f}. Too good: falls below the floor, to {end['leak']:.2f}."
    )
    texts = {f"end-{kind}": f"{value:.2f}" for kind, value in end.items() if kind != "nan"}
    texts |= {"curve-floor": f"{least:.2f}", "curve-guess": f"{guess:.2f}", "curve-jump": f"{jump:.2f}"}
    return draw(paint, alt, size=(6.6, 6.0)), texts


# --- small first -------------------------------------------------------------------------------------------------


def fresh(seed: int = 0) -> Llama:
    with weights_from(seed):
        return Llama(LlamaConfig(n_layers=2, d_model=32, n_heads=4, vocab_size=100, context_length=32))


def random_tokens(seed: int = 0) -> Tensor:
    return torch.randint(100, (4, 17), generator=rng(seed))


def peeking() -> contextlib.AbstractContextManager:
    """In this block causal masks are one diagonal too wide."""
    return mock.patch.object(attention, "causal_mask", _peek)


# --- messages ----------------------------------------------------------------------------------------------------


def put_messages(snippets: dict[str, str]) -> None:
    """Run each snippet and name what the page shows of its error: the first sentence, as code."""
    names = {"torch": torch, "nn": nn, "F": F, "heads": heads, "KVCache": cache.KVCache, "model": somebodys().float()}
    found = {}
    for name, snippet in snippets.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(snippet, names | {"w": torch.ones(2, requires_grad=True)})
            except Exception as error:
                lines = [line.strip() for line in str(error).splitlines()]
                text = lines[0] + (f" {lines[1]}" if lines[0].endswith(":") else "")  # load_state_dict's second line
                text = re.sub(r"(?<=[a-z)])\. [A-Z].*", " …", text) if len(text) > 170 else text
                found[f"error-{name}"] = f"{type(error).__name__}: {text}"
    claim(len(found) == len(snippets), f"every snippet raises an error: {snippets.keys()}, {found.keys()}")
    row = torch.full((3,), -math.inf).softmax(0)
    claim(bool(row.isnan().all()), "the softmax of a row of -inf is NaN")
    put({"torch-version": torch.__version__.split("+")[0]})
    for name, text in (found | {"nan-row": str(row)}).items():
        glue(name, HTML(f"<code>{html.escape(text)}</code>"), display=False)


# --- memory and time ---------------------------------------------------------------------------------------------

TINYLLAMA = LlamaConfig(
    n_layers=22, d_model=2048, n_heads=32, n_kv_heads=4, d_ff=5632, vocab_size=32_000, context_length=2048
)


def _activations(B: int, itemsize: int = 4, checkpointing: bool = False, flash: bool = False, T: int = 2048) -> int:
    """Bytes of activations; with `flash` the two matrices of T x T a head are not kept."""
    L, C, F, V, H = (getattr(TINYLLAMA, n) for n in ("n_layers", "d_model", "d_ff", "vocab_size", "n_heads"))
    end = 3 * B * T * (C + V)
    one = costs.training_bytes(replace(TINYLLAMA, n_layers=1), B, T, itemsize)["activations"] // itemsize
    layer = one - end - (2 * B * H * T * T if flash else 0)
    count = L * B * T * C + max(layer + B * T * F, end) if checkpointing else L * layer + end
    if not flash:
        claim(
            count * itemsize == costs.training_bytes(TINYLLAMA, B, T, itemsize, checkpointing)["activations"],
            "the page counts as training_bytes does",
        )
    return count * itemsize


def training_memory(B: int = 8, T: int = 2048) -> dict[str, str]:
    """What each remedy leaves: used alone, and after those above it."""
    steps = costs.training_bytes(TINYLLAMA, B, T)
    states = steps["total"] - steps["activations"]
    alone = {
        "start": _activations(B),
        "batch": _activations(B // 2),
        "bf16": _activations(B, 2),
        "check": _activations(B, checkpointing=True),
        "length": _activations(B, T=T // 2),
        "parts": _activations(1),
        "flash": _activations(B, flash=True),
    }
    then = {
        "start": _activations(B),
        "batch": _activations(B // 2),
        "bf16": _activations(B // 2, 2),
        "check": _activations(B // 2, 2, True),
        "parts": _activations(1, 2, True),
        "flash": _activations(1, 2, True, True),
    }
    fits = states + then["bf16"] > H100["memory"] > states + then["check"]
    claim(fits, "checkpointing is the remedy that makes it fit into 80 GB")
    texts = {f"alone-{name}": _gb(states + n) for name, n in alone.items()}
    texts |= {f"then-{name}": _gb(states + n) for name, n in then.items()}
    texts |= {"alone-zero": _gb(states / 8 + alone["parts"]), "then-zero": _gb(states / 8 + then["flash"])}
    texts |= {
        "train-states": _gb(states),
        "train-act": _gb(alone["start"]),
        "train-n": _count(costs.count_parameters(TINYLLAMA)),
    }
    return texts


def serving_memory(B: int = 64, T: int = 8192) -> dict[str, str]:
    """The bytes that hold a model and its caches, in 16 bits, and what makes them fewer."""
    weights = 2 * costs.count_parameters(LLAMA3_8B)
    kept = costs.kv_cache_bytes(LLAMA3_8B, B, T, 2)
    mha = costs.kv_cache_bytes(replace(LLAMA3_8B, n_kv_heads=LLAMA3_8B.n_heads), B, T, 2)
    claim(
        weights + kept > H100["memory"] > weights + kept / 2,
        "it does not fit into 80 GB, with half of the cache it does",
    )
    return {
        "serve-weights": _gb(weights),
        "serve-cache": _gb(kept),
        "serve-start": _gb(weights + kept),
        "serve-half": _gb(weights + kept / 2),
        "serve-mha": _gb(weights + mha),
        "serve-int4": _gb(weights / 4 + kept),
    }


def _bound(flops: float, n_bytes: float) -> float:
    return costs.roofline_seconds(flops, n_bytes, H100["flops"], H100["bytes"])


def _decode(B: int, S: int, weight_bytes: float = 2) -> float:
    """Seconds, at least, in which a Llama 3.1 8B writes a token in each of B sequences that see S tokens."""
    read = weight_bytes * (costs.count_parameters(LLAMA3_8B) - LLAMA3_8B.vocab_size * LLAMA3_8B.d_model)
    return _bound(costs.forward_flops(LLAMA3_8B, B, 1, S), read + costs.kv_cache_bytes(LLAMA3_8B, B, S, 2))


def serving_time(prompt: int = 4096, new: int = 256) -> dict[str, str]:
    """Bounds for one H100, from its data sheet: with the cache, in a batch, with fewer bits, with a draft."""
    weights = 2 * costs.count_parameters(LLAMA3_8B)
    prefill = _bound(costs.forward_flops(LLAMA3_8B, 1, prompt), weights)
    again = sum(_bound(costs.forward_flops(LLAMA3_8B, 1, prompt + t), weights) for t in range(new))
    cached = prefill + sum(_decode(1, prompt + t) for t in range(1, new))
    scores = 4 * LLAMA3_8B.n_layers * costs.score_bytes(LLAMA3_8B, 1, prompt, 2)
    return {
        "again": f"{again:.1f} s",
        "cached": f"{cached:.2f} s",
        "again-times": f"{again / cached:.0f}",
        "rate-1": f"{1 / _decode(1, prompt):,.0f}",
        "rate-64": f"{64 / _decode(64, prompt):,.0f}",
        "wait-64": f"{_decode(64, prompt) / _decode(1, prompt):.1f}",
        "prefill": f"{1e3 * prefill:.0f} ms",
        "scores": f"{scores / 1e9:.0f} GB",
        "scores-ms": f"{1e3 * scores / H100['bytes']:.0f} ms",
        "step-16": f"{1e3 * _decode(1, prompt):.1f} ms",
        "step-4": f"{1e3 * _decode(1, prompt, 0.5):.1f} ms",
        "step-64-16": f"{1e3 * _decode(64, prompt):.1f} ms",
        "step-64-4": f"{1e3 * _decode(64, prompt, 0.5):.1f} ms",
        "drafted": f"{sum(0.8**n for n in range(5)):.2f}",
    }


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median processor time on one core, after one run that does not count."""
    work()
    spent = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        spent.append(time.thread_time() - start)
    return statistics.median(spent)


def measured(prompt: int = 128, new: int = 64) -> dict[str, str]:
    """The first three remedies on one core, with a small model."""
    with weights_from(0):
        sizes = {"n_layers": 2, "d_model": 128, "n_heads": 4, "vocab_size": 1000, "context_length": prompt + new}
        model = Llama(LlamaConfig(**sizes))
    ids = torch.randint(1000, (16, prompt), generator=rng(0))
    q, k, v = torch.randn(3, 1, 4, 512, 64, generator=rng(0))
    causal = attention.causal_mask(512)
    with one_thread(), torch.inference_mode():
        plain = _seconds(lambda: sampling.generate(model, ids[:1], new, temperature=0), 1)
        cached = _seconds(lambda: cache.generate_cached(model, ids[:1], new, temperature=0))
        batch = _seconds(lambda: cache.generate_cached(model, ids, new, temperature=0))
        written = _seconds(lambda: attention.scaled_dot_product_attention(q, k, v, causal))
        fused = _seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    claim(plain > 1.2 * cached, "the cache saves time")
    claim(16 * cached > 1.5 * batch, "a batch of 16 writes more tokens a second")
    claim(written > 1.2 * fused, "the fused kernel is faster")
    return {
        "here-cache": f"{plain / cached:.1f}",
        "here-batch": f"{16 * cached / batch:.1f}",
        "here-kernel": f"{written / fused:.1f}",
    }
