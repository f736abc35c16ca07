"""A learner who has done the two short ones about memory, and the roofline."""


def score_bytes(config, B, T, bytes_per_element):
    return B * config.n_heads * T * T * bytes_per_element


def kv_cache_bytes(config, B, T, bytes_per_element):
    return 2 * B * T * config.n_layers * config.n_kv_heads * config.head_dim * bytes_per_element


def roofline_seconds(flops, n_bytes, flops_per_second, bytes_per_second):
    if min(flops_per_second, bytes_per_second) <= 0:
        raise ValueError("both rates must be above 0")
    return max(flops / flops_per_second, n_bytes / bytes_per_second)
