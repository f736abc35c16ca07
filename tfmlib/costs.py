"""What a model costs before it runs: parameters, operations, bytes, and which of them is the bottleneck.

Plain Python on a model's sizes, GPTConfig or LlamaConfig. Letters: B sequences, T tokens, S keys, C d_model, H heads, K
key/value heads, D head width, F d_ff, V vocabulary, L layers, P parameters. A multiply-add is 2 operations (FLOPs).
"""

from tfmlib.models.gpt import GPTConfig
from tfmlib.models.llama import LlamaConfig

Config = GPTConfig | LlamaConfig


def mlp_matrices(config: Config) -> int:
    """How many matrices of C x F an MLP has: 2 in a GPT, 3 in a Llama. Raises TypeError for another config."""
    if not isinstance(config, Config):
        raise TypeError(f"config must be a GPTConfig or a LlamaConfig, got {type(config).__name__}")
    return 2 if isinstance(config, GPTConfig) else 3


def count_parameters(config: Config) -> int:
    """How many numbers a model learns; a tied head is counted once.

    A layer of a Llama has the matrices of q and o, C * H*D each, of k and v, C * K*D each, a gated MLP of 3 * C*F, and
    two norms of C. A layer of a GPT has an MLP of 2 * C*F, norms with biases, and a bias for each linear layer. To the
    layers come the last norm, the embedding V * C, the head V * C unless it is tied, and for a GPT the table of
    positions, context_length * C. Raises TypeError for another config.

    >>> sizes = {"n_layers": 12, "d_model": 768, "n_heads": 12, "vocab_size": 50257, "context_length": 1024}
    >>> count_parameters(GPTConfig(**sizes))  # GPT-2
    124439808
    """
    C, F, V = config.d_model, config.d_ff, config.vocab_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    layer = 2 * C * q + 2 * C * kv + mlp_matrices(config) * C * F + 2 * C
    rest = C + (V * C if config.tied else 2 * V * C)
    if isinstance(config, GPTConfig):
        layer += (q + 2 * kv + C) + (F + C) + 2 * C  # biases of the projections, of the MLP, and of the norms
        rest += C + config.context_length * C
    return config.n_layers * layer + rest


def forward_flops(config: Config, B: int, T: int, S: int | None = None) -> int:
    """The FLOPs of the matrix products of one forward pass: B sequences of T new tokens that see S keys each.

    Every token pays 2 FLOPs for each weight of the projections, the MLP and the head, and every pair of query and key
    2 * H*D for the score and 2 * H*D for the weighted sum, in each layer. Dense: masked pairs are computed too. S is T
    if not given; S > T counts a step with a cache. Raises TypeError for another config.

    >>> forward_flops(LlamaConfig(n_layers=1, d_model=2, n_heads=1, d_ff=3, vocab_size=5, context_length=8), B=1, T=1)
    96
    """
    S = T if S is None else S
    C, F, V = config.d_model, config.d_ff, config.vocab_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    weights = 2 * C * q + 2 * C * kv + mlp_matrices(config) * C * F
    layer = 2 * B * T * weights + 4 * B * T * S * q
    return config.n_layers * layer + 2 * B * T * C * V


def score_bytes(config: Config, B: int, T: int, bytes_per_element: int) -> int:
    """The bytes of one layer's attention scores, (B, H, T, T).

    >>> sizes = {"n_layers": 12, "d_model": 768, "n_heads": 12, "vocab_size": 50257, "context_length": 4096}
    >>> score_bytes(GPTConfig(**sizes), B=8, T=4096, bytes_per_element=4) / 1e9
    6.442450944
    """
    return B * config.n_heads * T * T * bytes_per_element


def kv_cache_bytes(config: Config, B: int, T: int, bytes_per_element: int) -> int:
    """The bytes of the keys and values of B sequences of T tokens, in all layers: 2 * L * B * T * K*D elements.

    >>> llama = LlamaConfig(n_layers=32, d_model=4096, n_heads=32, vocab_size=32000, context_length=4096)
    >>> kv_cache_bytes(llama, B=1, T=4096, bytes_per_element=2) / 1e9
    2.147483648
    """
    return 2 * config.n_layers * B * T * config.n_kv_heads * config.head_dim * bytes_per_element


def training_bytes(
    config: Config, B: int, T: int, bytes_per_element: int = 4, checkpointing: bool = False
) -> dict[str, int]:
    """The bytes of a training step with AdamW: "weights", "gradients", "optimizer", "activations", and their "total".

    P elements of weights, P of gradients, 2 P of AdamW's moments, and the activations that the backward pass needs:

        layer       B*T * (6*C + 4*H*D + m*F) + 2 * B*H*T*T, with m = 2 for a GPT and m = 4 for a Llama
        end         3 * B*T*C + 3 * B*T*V, the last norm, the head's input, the log-probabilities and two gradients
        plain       L * layer + end
        checkpointing: L * B*T*C + the larger of layer + B*T*F and end: the blocks' inputs, and one block at a time

    All elements have `bytes_per_element`. The formula is that of tfmlib's own pieces, whose attention keeps two
    matrices of T x T a head; short-lived tensors are not in it. Raises TypeError for another config.
    """
    C, F, V, H = config.d_model, config.d_ff, config.vocab_size, config.n_heads
    kept = 2 if isinstance(config, GPTConfig) else 4  # tensors of width F that an MLP keeps
    layer = B * T * (6 * C + 4 * H * config.head_dim + kept * F) + 2 * B * H * T * T
    end = 3 * B * T * C + 3 * B * T * V
    if checkpointing:
        activations = config.n_layers * B * T * C + max(layer + B * T * F, end)
    else:
        activations = config.n_layers * layer + end
    n = count_parameters(config)  # a TypeError, too, for another config
    elements = {"weights": n, "gradients": n, "optimizer": 2 * n, "activations": activations}
    found = {name: count * bytes_per_element for name, count in elements.items()}
    return {**found, "total": sum(found.values())}


def roofline_seconds(flops: float, n_bytes: float, flops_per_second: float, bytes_per_second: float) -> float:
    """The least time for a piece of work on a machine: what takes longer, computing or moving bytes, if they overlap.

    max(flops / flops_per_second, n_bytes / bytes_per_second). Raises ValueError unless both rates are above 0. Williams
    et al. (2009).

    >>> roofline_seconds(flops=4e12, n_bytes=1e12, flops_per_second=1e12, bytes_per_second=5e11)
    4.0
    """
    for name, rate in {"flops_per_second": flops_per_second, "bytes_per_second": bytes_per_second}.items():
        if not rate > 0:
            raise ValueError(f"{name} must be above 0, got {rate}")
    return max(flops / flops_per_second, n_bytes / bytes_per_second)
