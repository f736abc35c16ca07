"""A learner who counts the scores of the K key heads in place of the H query heads, and has everything else right."""

from tfmlib.models.gpt import GPTConfig
from tfmlib.models.llama import LlamaConfig


def count_parameters(config):
    if not isinstance(config, (GPTConfig, LlamaConfig)):
        raise TypeError("GPT or Llama")
    C, F, V = config.d_model, config.d_ff, config.vocab_size
    query, key = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    attention = C * query + C * key + C * key + query * C
    tables = V * C if config.tied else V * C + C * V
    if isinstance(config, GPTConfig):
        attention += query + key + key + C
        mlp = C * F + F + F * C + C
        norm = 2 * C
        tables += config.context_length * C
    else:
        mlp = 3 * C * F
        norm = C
    return config.n_layers * (attention + mlp + 2 * norm) + norm + tables


def forward_flops(config, B, T, S=None):
    if not isinstance(config, (GPTConfig, LlamaConfig)):
        raise TypeError("GPT or Llama")
    if S is None:
        S = T
    C, D = config.d_model, config.head_dim
    query, key = config.n_heads * D, config.n_kv_heads * D
    matrices = 2 if isinstance(config, GPTConfig) else 3
    layer = 2 * B * T * (2 * C * query + 2 * C * key + matrices * C * config.d_ff)
    layer += 2 * (2 * B * T * S * key)
    return config.n_layers * layer + 2 * B * T * C * config.vocab_size


def score_bytes(config, B, T, bytes_per_element):
    return B * config.n_heads * T**2 * bytes_per_element


def kv_cache_bytes(config, B, T, bytes_per_element):
    keys = config.n_layers * B * T * config.n_kv_heads * config.head_dim
    values = keys
    return (keys + values) * bytes_per_element


def training_bytes(config, B, T, bytes_per_element=4, checkpointing=False):
    if not isinstance(config, (GPTConfig, LlamaConfig)):
        raise TypeError("GPT or Llama")
    C, F, V, H = config.d_model, config.d_ff, config.vocab_size, config.n_heads
    m = 2 if isinstance(config, GPTConfig) else 4
    layer = B * T * (6 * C + 4 * H * config.head_dim + m * F) + 2 * B * H * T * T
    end = 3 * B * T * C + 3 * B * T * V
    kept = config.n_layers * layer + end
    if checkpointing:
        kept = config.n_layers * B * T * C + max(layer + B * T * F, end)
    P = count_parameters(config)
    result = {"weights": P, "gradients": P, "optimizer": 2 * P, "activations": kept}
    result = {key: value * bytes_per_element for key, value in result.items()}
    result["total"] = sum(result.values())
    return result


def roofline_seconds(flops, n_bytes, flops_per_second, bytes_per_second):
    if flops_per_second <= 0 or bytes_per_second <= 0:
        raise ValueError("rates must be positive")
    return max(flops / flops_per_second, n_bytes / bytes_per_second)
