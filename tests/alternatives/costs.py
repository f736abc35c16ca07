"""Other correct implementations of the counts and of the roofline."""

import math
from collections import Counter, OrderedDict
from fractions import Fraction

import torch
from torch import nn

from tfmlib.models import gpt, llama

from . import correct


def _kind(config):
    """ "gpt" or "llama"."""
    match config:
        case gpt.GPTConfig():
            return "gpt"
        case llama.LlamaConfig():
            return "llama"
        case _:
            raise TypeError(f"no costs are known of {config!r}")


def _matrices(config):
    """The weights of one layer's linear layers: name -> (inputs, outputs)."""
    C, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    found = {"q": (C, q), "k": (C, kv), "v": (C, kv), "o": (q, C), "up": (C, config.d_ff), "down": (config.d_ff, C)}
    if _kind(config) == "llama":
        found["gate"] = found["up"]
    return found


@correct("count_parameters")
def count_by_building(config):
    """Build the model itself without memory, and ask it."""
    kind = {"gpt": gpt.GPT, "llama": llama.Llama}[_kind(config)]
    with torch.device("meta"):
        return sum(p.numel() for p in kind(config).parameters())


@correct("count_parameters")
def count_from_a_list(config):
    """A list of all shapes, and the sum of their products."""
    is_gpt = _kind(config) == "gpt"
    shapes = [(config.vocab_size, config.d_model)]
    for _ in range(config.n_layers):
        for inputs, outputs in _matrices(config).values():
            shapes.append((inputs, outputs))
            if is_gpt:
                shapes.append((outputs,))
        shapes += [(config.d_model,)] * (4 if is_gpt else 2)
    shapes += [(config.d_model,)] * (2 if is_gpt else 1)
    if is_gpt:
        shapes.append((config.context_length, config.d_model))
    if not config.tied:
        shapes.append((config.d_model, config.vocab_size))
    return sum(map(math.prod, shapes))


@correct("count_parameters")
def count_part_by_part(config):
    """A table of the parts, added up."""
    parts, C, L = Counter(), config.d_model, config.n_layers
    for name, (inputs, outputs) in _matrices(config).items():
        parts[name] += L * inputs * outputs
    if isinstance(config, gpt.GPTConfig):
        parts["biases"] = L * sum(outputs for _, outputs in _matrices(config).values())
        parts["positions"] = config.context_length * C
    parts["norms"] = (2 * L + 1) * C * (2 if _kind(config) == "gpt" else 1)
    parts["tables"] = (2 - bool(config.tied)) * config.vocab_size * C
    return parts.total()


@correct("forward_flops")
def flops_from_products(config, B, T, S=None):
    """Every product as (rows, inner, columns), and how often it is computed."""
    S = S or T
    D, every = config.head_dim, config.n_layers * B * config.n_heads
    products = [((B * T, inputs, outputs), config.n_layers) for inputs, outputs in _matrices(config).values()]
    products += [((T, D, S), every), ((T, S, D), every), ((B * T, config.d_model, config.vocab_size), 1)]
    return sum(2 * a * b * c * times for (a, b, c), times in products)


@correct("forward_flops")
def flops_by_watching(config, B, T, S=None):
    """Carry the products out on tensors without memory, and add up what they take."""
    kind, flops = _kind(config), []
    S = T if S is None else S

    def times(a, b):
        flops.append(2 * math.prod(a.shape[:-1]) * a.shape[-1] * b.shape[-1])
        return torch.matmul(a, b)

    with torch.device("meta"):
        x = torch.empty(B * T, config.d_model)
        for _ in range(config.n_layers):
            for name in ("q", "k", "v"):
                times(x, torch.empty(_matrices(config)[name]))
            q = torch.empty(B, config.n_heads, T, config.head_dim)
            scores = times(q, torch.empty(B, config.n_heads, config.head_dim, S))
            y = times(scores, torch.empty(B, config.n_heads, S, config.head_dim))
            times(y.transpose(1, 2).reshape(B * T, -1), torch.empty(_matrices(config)["o"]))
            hidden = [times(x, torch.empty(_matrices(config)["up"])) for _ in range(1 + (kind == "llama"))]
            times(hidden[0], torch.empty(_matrices(config)["down"]))
        times(x, torch.empty(config.d_model, config.vocab_size))
    return sum(flops)


@correct("forward_flops")
def flops_by_token(config, B, T, S=None):
    """What one token costs, times the tokens."""
    keys = T if S is None else S
    C, D, F = config.d_model, config.head_dim, config.d_ff
    if isinstance(config, gpt.GPTConfig):
        mlp = 4 * C * F
    elif isinstance(config, llama.LlamaConfig):
        mlp = 6 * C * F
    else:
        raise TypeError(type(config))
    attention = 4 * C * D * (config.n_heads + config.n_kv_heads) + 4 * keys * config.n_heads * D
    return B * T * (config.n_layers * (attention + mlp) + 2 * C * config.vocab_size)


@correct("score_bytes")
def scores_of_a_tensor(config, B, T, bytes_per_element):
    """The entries of such a tensor, without memory."""
    one = torch.empty(config.n_heads, T, 1, dtype=torch.bool, device="meta")
    return one.numel() * one.element_size() * T * B * bytes_per_element


@correct("score_bytes")
def scores_by_product(config, B, T, bytes_per_element):
    """One product of all sizes."""
    return math.prod([T**2, config.n_heads, B, bytes_per_element])


@correct("kv_cache_bytes")
def cache_by_sum(config, B, T, bytes_per_element):
    """Two tensors a layer, added up."""
    total = 0
    for _layer in range(config.n_layers):
        for _tensor in ("keys", "values"):
            total += B * config.n_kv_heads * T * config.head_dim
    return int(total) * bytes_per_element


@correct("kv_cache_bytes")
def cache_by_token(config, B, T, bytes_per_element):
    """A token's bytes, times the tokens."""
    a_token = bytes_per_element * config.head_dim * config.n_kv_heads * 2 * config.n_layers
    return B * T * a_token


@correct("training_bytes")
def training_by_shapes(config, B, T, bytes_per_element=4, checkpointing=False):
    """The shape of every tensor that is alive."""
    gated = _kind(config) == "llama"
    C, V = (B, T, config.d_model), (B, T, config.vocab_size)
    inner, heads, square = (B, T, config.d_ff), (B, config.n_heads, T, config.head_dim), (B, config.n_heads, T, T)
    block = 6 * [C] + 4 * [heads] + [inner] * (4 if gated else 2) + 2 * [square]
    end = 3 * [C] + 3 * [V]

    def size(shapes):
        return sum(math.prod(shape) for shape in shapes) * bytes_per_element

    if checkpointing:
        alive = size([C] * config.n_layers) + max(size([*block, inner]), size(end))
    else:
        alive = size(config.n_layers * block) + size(end)
    found = OrderedDict(activations=alive)
    found["weights"] = found["gradients"] = count_from_a_list(config) * bytes_per_element
    found["optimizer"] = found["weights"] + found["gradients"]
    found["total"] = sum(found.values())
    return found


@correct("training_bytes")
def training_by_token(config, B, T, bytes_per_element=4, checkpointing=False):
    """What one token keeps, times the tokens."""
    kept = {"gpt": 2, "llama": 4}[_kind(config)]
    layer = 6 * config.d_model + 4 * config.n_heads * config.head_dim + kept * config.d_ff + 2 * config.n_heads * T
    end = 3 * (config.d_model + config.vocab_size)
    L = config.n_layers
    block = layer + config.d_ff
    a_token = L * config.d_model + (block if block > end else end) if checkpointing else L * layer + end
    P = count_part_by_part(config)
    return {
        "total": bytes_per_element * (4 * P + B * T * a_token),
        "weights": bytes_per_element * P,
        "gradients": bytes_per_element * P,
        "optimizer": bytes_per_element * P * 2,
        "activations": bytes_per_element * B * T * a_token,
    }


@correct("training_bytes")
class TrainingBytes(dict):
    """A class that is a dict."""

    def __init__(self, config, B, T, bytes_per_element=4, checkpointing=False):
        super().__init__()
        n = count_by_building(config) * bytes_per_element
        self.update(weights=n, gradients=n, optimizer=n + n)
        matrices = 2 + 2 * isinstance(config, llama.LlamaConfig)
        tokens = nn.Parameter(torch.empty(B, T, device="meta")).numel()
        layer = tokens * 6 * config.d_model + tokens * 4 * config.n_heads * config.head_dim
        layer += tokens * matrices * config.d_ff + 2 * B * config.n_heads * T**2
        end = 3 * tokens * config.d_model + 3 * tokens * config.vocab_size
        kept = config.n_layers * layer + end
        if checkpointing:
            kept = config.n_layers * tokens * config.d_model
            kept += max(layer + tokens * config.d_ff, end)
        self["activations"] = kept * bytes_per_element
        self["total"] = 4 * n + self["activations"]


@correct("roofline_seconds")
def by_the_ridge(flops, n_bytes, flops_per_second, bytes_per_second):
    """Compare the work's intensity with the machine's, by products."""
    if flops_per_second <= 0:
        raise ValueError("flops_per_second")
    if bytes_per_second <= 0:
        raise ValueError("bytes_per_second")
    if flops * bytes_per_second >= n_bytes * flops_per_second:
        return flops / flops_per_second
    return n_bytes / bytes_per_second


@correct("roofline_seconds")
def by_the_attainable_rate(flops, n_bytes, flops_per_second, bytes_per_second):
    """FLOPs by the rate under the roof."""
    if min(flops_per_second, bytes_per_second) <= 0:
        raise ValueError("rates must be above 0")
    if flops == 0:
        return n_bytes / bytes_per_second
    if n_bytes == 0:
        return flops / flops_per_second
    return flops / min(flops_per_second, flops / n_bytes * bytes_per_second)


@correct("roofline_seconds")
def by_fractions(flops, n_bytes, flops_per_second, bytes_per_second):
    """Exact, rounded once at the end."""
    rates = Fraction(flops_per_second), Fraction(bytes_per_second)
    if any(rate <= 0 for rate in rates):
        raise ValueError(rates)
    return float(max(Fraction(work) / rate for work, rate in zip((flops, n_bytes), rates, strict=True)))
