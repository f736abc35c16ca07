"""A learner whose code is right, in another style, and noisy."""

import sys
import warnings
from math import prod

from tfmlib.models import gpt, llama


def shapes_of_a_layer(config):
    """Every matrix of a layer, as (inputs, outputs)."""
    if isinstance(config, gpt.GPTConfig):
        mlp = [(config.d_model, config.d_ff), (config.d_ff, config.d_model)]
    elif isinstance(config, llama.LlamaConfig):
        mlp = [(config.d_model, config.d_ff)] * 2 + [(config.d_ff, config.d_model)]
    else:
        raise TypeError(f"what is a {type(config).__name__}?")
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return [(config.d_model, q), (config.d_model, kv), (config.d_model, kv), (q, config.d_model), *mlp]


def count_parameters(config):
    print("counting", config)
    shapes = shapes_of_a_layer(config)
    vectors = 2
    layer = sum(map(prod, shapes))
    if isinstance(config, gpt.GPTConfig):
        layer += sum(outputs for _, outputs in shapes)
        vectors = 4
    rest = [vectors // 2, config.vocab_size] + [config.vocab_size] * (not config.tied)
    rest += [config.context_length] * (vectors == 4)
    return config.n_layers * (layer + vectors * config.d_model) + sum(rest) * config.d_model


def forward_flops(config, B, T, S=None):
    warnings.warn("this may take a while", UserWarning, stacklevel=2)
    products = shapes_of_a_layer(config) * config.n_layers + [(config.d_model, config.vocab_size)]
    keys = S if S is not None else T
    pairs = config.n_layers * config.n_heads * T * keys
    return 2 * B * (T * sum(map(prod, products)) + 2 * pairs * config.head_dim)


def score_bytes(config, B, T, bytes_per_element):
    sys.stderr.write("scores\n")
    return prod((B, config.n_heads, T, T)) * bytes_per_element


def kv_cache_bytes(config, B, T, bytes_per_element):
    a_layer = [prod((B, config.n_kv_heads, T, config.head_dim)) for _ in ("keys", "values")]
    return sum(a_layer) * config.n_layers * bytes_per_element


class Memory(dict):
    def add_up(self, size):
        for name in self:
            self[name] *= size
        self["total"] = sum(self.values())
        return self


def training_bytes(config, B, T, bytes_per_element=4, checkpointing=False):
    print("training", file=sys.stderr)
    tokens = B * T
    gated = len(shapes_of_a_layer(config)) == 7
    layer = tokens * (6 * config.d_model + 4 * config.n_heads * config.head_dim + (4 if gated else 2) * config.d_ff)
    layer += 2 * B * config.n_heads * T**2
    end = 3 * tokens * (config.d_model + config.vocab_size)
    kept = layer * config.n_layers + end
    if checkpointing:
        kept = config.n_layers * tokens * config.d_model + sorted((layer + tokens * config.d_ff, end))[-1]
    P = count_parameters(config)
    return Memory(weights=P, gradients=P, optimizer=P + P, activations=kept).add_up(bytes_per_element)


def roofline_seconds(flops, n_bytes, flops_per_second, bytes_per_second):
    warnings.warn("a machine", FutureWarning, stacklevel=2)
    times = []
    for work, rate in ((flops, flops_per_second), (n_bytes, bytes_per_second)):
        if not rate > 0:
            raise ValueError("rate", rate)
        times.append(work / rate)
    return sorted(times)[1]
