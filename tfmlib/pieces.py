"""The pieces: what a learner writes, in teaching order, and how to put another implementation in place.

A piece is replaced by setting the attribute of the module it lives in. That reaches everything built from it,
because inside tfmlib modules are imported, never pieces.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True)
class Piece:
    """One exercise: the name of a public function or class of tfmlib, where it lives, and what it is worth."""

    name: str
    module: str  # "attention" means tfmlib.attention, "models.gpt" tfmlib.models.gpt
    chapter: str  # "03-attention", the name of its lesson and lab
    points: float
    parts: tuple[str, ...] = ()  # what else a learner writes in its cell
    given: bool = False  # the piece itself is given, and only its parts are to be written

    @property
    def topic(self) -> str:
        """The name of the files about its module: tests/test_<topic>.py and others. One for all of tfmlib.models."""
        return self.module.split(".")[0]

    @property
    def home(self) -> ModuleType:
        """The module that owns the piece."""
        return import_module(f"tfmlib.{self.module}")


PIECES = {
    piece.name: piece
    for piece in (
        Piece("pair_counts", "tokens", "01-tokens", 1),
        Piece("merge_pair", "tokens", "01-tokens", 2),
        Piece("train_bpe", "tokens", "01-tokens", 4),
        Piece("Tokenizer", "tokens", "01-tokens", 5),
        Piece("pad_batch", "tokens", "01-tokens", 2),
        Piece("embed", "positions", "02-positions", 1),
        Piece("rope_angles", "positions", "02-positions", 2),
        Piece("sinusoidal", "positions", "02-positions", 2),
        Piece("apply_rope", "positions", "02-positions", 4),
        Piece("interpolate_positions", "positions", "02-positions", 1),
        Piece("softmax", "attention", "03-attention", 2),
        Piece("causal_mask", "attention", "03-attention", 2),
        Piece("padding_mask", "attention", "03-attention", 1),
        Piece("attention_weights", "attention", "03-attention", 3),
        Piece("scaled_dot_product_attention", "attention", "03-attention", 2),
        Piece("split_heads", "heads", "04-heads", 2),
        Piece("merge_heads", "heads", "04-heads", 1),
        Piece("repeat_kv", "heads", "04-heads", 2),
        Piece("MultiHeadAttention", "heads", "04-heads", 5),
        Piece("LayerNorm", "blocks", "05-blocks", 2),
        Piece("RMSNorm", "blocks", "05-blocks", 2),
        Piece("MLP", "blocks", "05-blocks", 1),
        Piece("SwiGLU", "blocks", "05-blocks", 1),
        Piece("PreNormBlock", "blocks", "05-blocks", 2),
        Piece("PostNormBlock", "blocks", "05-blocks", 1),
        Piece("DecoderBlock", "blocks", "05-blocks", 2),
        Piece("init_weights", "models.shared", "06-models", 2),
        Piece("decoder_inputs", "models.shared", "06-models", 2),
        Piece("GPT", "models.gpt", "06-models", 4),
        Piece("Llama", "models.llama", "06-models", 3),
        Piece("Encoder", "models.encoder", "06-models", 3),
        Piece("Seq2Seq", "models.seq2seq", "06-models", 3),
        Piece("shift_labels", "losses", "07-losses", 1),
        Piece("cross_entropy", "losses", "07-losses", 3),
        Piece("perplexity", "losses", "07-losses", 1),
        Piece("bits_per_byte", "losses", "07-losses", 1),
        Piece("tail_loss", "losses", "07-losses", 2),
        Piece("group_advantages", "losses", "07-losses", 2),
        Piece("policy_gradient_loss", "losses", "07-losses", 2),
        Piece("AdamW", "optim", "08-optim", 5),
        Piece("warmup_inverse_sqrt", "optim", "08-optim", 1),
        Piece("warmup_cosine", "optim", "08-optim", 2),
        Piece("clip_gradients", "optim", "08-optim", 2),
        Piece("parameter_groups", "optim", "08-optim", 2),
        Piece("token_batches", "data", "09-training", 2),
        Piece("accumulate_gradients", "training", "09-training", 3),
        Piece("evaluate", "training", "09-training", 2),
        Piece("save_checkpoint", "training", "09-training", 3),
        Piece("load_checkpoint", "training", "09-training", 2),
        Piece("count_parameters", "costs", "10-costs", 2),
        Piece("forward_flops", "costs", "10-costs", 3),
        Piece("score_bytes", "costs", "10-costs", 1),
        Piece("kv_cache_bytes", "costs", "10-costs", 1),
        Piece("training_bytes", "costs", "10-costs", 3),
        Piece("roofline_seconds", "costs", "10-costs", 1),
        Piece("apply_temperature", "sampling", "11-sampling", 1),
        Piece("keep_top_k", "sampling", "11-sampling", 2),
        Piece("keep_top_p", "sampling", "11-sampling", 3),
        Piece("sample", "sampling", "11-sampling", 1),
        Piece("generate", "sampling", "11-sampling", 3),
        Piece("beam_search", "sampling", "11-sampling", 4),
        Piece("KVCache", "cache", "12-cache", 4, parts=("CacheLayer",)),
        Piece("prefill", "cache", "12-cache", 3),
        Piece("decode_step", "cache", "12-cache", 1),
        Piece("generate_cached", "cache", "12-cache", 4, parts=("CachedModel",)),
        Piece("online_softmax", "flash", "13-flash", 2),
        Piece("flash_attention", "flash", "13-flash", 4),
        Piece("flash_attention_backward", "flash", "13-flash", 4),
        Piece("flash_attention_triton", "flash_triton", "13-flash", 5, parts=("flash_kernel",), given=True),
    )
}

_references: dict[str, Callable] = {}  # what a replaced piece was before it was ever replaced


def find(name: str) -> Piece:
    """The table's row for a piece. Raises ValueError, naming the pieces, for anything else."""
    if name not in PIECES:
        raise ValueError(f"{name!r} is not a piece of the course; the pieces are {', '.join(PIECES)}")
    return PIECES[name]


def chapters() -> dict[str, list[Piece]]:
    """The pieces of each chapter, in teaching order."""
    table: dict[str, list[Piece]] = {}
    for piece in PIECES.values():
        table.setdefault(piece.chapter, []).append(piece)
    return table


def in_use(name: str) -> Callable:
    """The implementation that tfmlib calls now: the reference, or what `use` put there."""
    return getattr(find(name).home, name)


def reference(name: str) -> Callable:
    """The course's own implementation, whatever is in use."""
    return _references.get(name) or in_use(name)


def use(implementation: Callable, name: str | None = None) -> Callable:
    """From now on tfmlib calls this implementation of the piece `name`; returns the one it replaced.

    `name` defaults to the implementation's own name. Raises ValueError if that is not a piece.
    """
    piece = find(name or getattr(implementation, "__name__", repr(implementation)))
    old = in_use(piece.name)
    _references.setdefault(piece.name, old)
    setattr(piece.home, piece.name, implementation)
    return old


@contextmanager
def using(implementation: Callable, name: str | None = None) -> Iterator[None]:
    """The same for the length of a `with` block."""
    name = name or implementation.__name__
    old = use(implementation, name)
    try:
        yield
    finally:
        use(old, name)
