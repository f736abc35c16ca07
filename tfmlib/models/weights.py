"""Weights that others trained, loaded into our models: Hugging Face folders, and llama2.c's format.

A folder holds `config.json` and `*.safetensors`, in one file or in several with an index. Files are read as numbers
only: nothing in them is ever run. Every tensor must be there, of its shape, and no other. A model is made after all
this has been seen to hold. Whatever does not fit is a ValueError that names the setting, the tensor or the byte.
"""

import json
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfmlib.models import encoder, gpt, llama

# Models -------------------------------------------------------------------------------------------------------------


def load_gpt2(folder: str | Path) -> gpt.GPT:
    """A GPT with the weights of a Hugging Face GPT-2 folder, in float32.

    GPT-2 keeps its linear layers transposed, (in, out), and queries, keys and values in one matrix. Raises ValueError
    for what does not fit (see this module), FileNotFoundError for a file that is not there.
    """
    settings = _Settings(Path(folder), "gpt2")
    settings.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    settings.expect("scale_attn_weights", True)
    settings.expect("scale_attn_by_inverse_layer_idx", False)
    settings.expect("add_cross_attention", False)
    C = settings.size("n_embd")
    config = gpt.GPTConfig(
        n_layers=settings.size("n_layer"),
        d_model=C,
        n_heads=settings.size("n_head"),
        vocab_size=settings.size("vocab_size"),
        context_length=settings.size("n_positions"),
        d_ff=settings.get("n_inner", None) or 4 * C,
        tied=settings.get("tie_word_embeddings", True),
        norm_eps=settings.get("layer_norm_epsilon", 1e-5),
    )
    with _opened(Path(folder), prefix="transformer.") as tensors:
        ours = {
            "token_embedding.weight": tensors.take("wte.weight", config.vocab_size, C),
            "position_embedding.weight": tensors.take("wpe.weight", config.context_length, C),
            **_norm(tensors, "norm", "ln_f", C),
        }
        for i in range(config.n_layers):
            theirs, block = f"h.{i}", f"blocks.{i}"
            for part, norm in (("norm1", "ln_1"), ("norm2", "ln_2")):
                ours |= _norm(tensors, f"{block}.{part}", f"{theirs}.{norm}", C)
            weights = tensors.take(f"{theirs}.attn.c_attn.weight", C, 3 * C).T.chunk(3)
            biases = tensors.take(f"{theirs}.attn.c_attn.bias", 3 * C).chunk(3)
            for name, weight, bias in zip("qkv", weights, biases, strict=True):
                ours[f"{block}.attention.{name}_proj.weight"] = weight
                ours[f"{block}.attention.{name}_proj.bias"] = bias
            for part, name, n_in, n_out in (
                ("attention.o_proj", "attn.c_proj", C, C),
                ("mlp.up", "mlp.c_fc", C, config.d_ff),
                ("mlp.down", "mlp.c_proj", config.d_ff, C),
            ):
                ours[f"{block}.{part}.weight"] = tensors.take(f"{theirs}.{name}.weight", n_in, n_out).T
                ours[f"{block}.{part}.bias"] = tensors.take(f"{theirs}.{name}.bias", n_out)
        ours["head.weight"] = _head(tensors, config.tied, ours["token_embedding.weight"])
        tensors.expect_no_more(r"h\.\d+\.attn\.(bias|masked_bias)")  # the causal mask, kept as a tensor
    return _filled(gpt.GPT(config), ours)


def load_llama(folder: str | Path) -> llama.Llama:
    """A Llama with the weights of a Hugging Face Llama folder, in float32.

    Both pair rotary entries by halves, so every tensor fits as it is. Raises ValueError for what does not fit (see this
    module), for scaled rotary positions among others, and FileNotFoundError for a file that is not there.
    """
    settings = _Settings(Path(folder), "llama")
    settings.expect("hidden_act", "silu")
    settings.expect("attention_bias", False)
    settings.expect("mlp_bias", False)
    C, H = settings.size("hidden_size"), settings.size("num_attention_heads")
    config = llama.LlamaConfig(
        n_layers=settings.size("num_hidden_layers"),
        d_model=C,
        n_heads=H,
        n_kv_heads=settings.get("num_key_value_heads", None) or H,
        head_dim=settings.get("head_dim", None) or C // H,
        d_ff=settings.size("intermediate_size"),
        vocab_size=settings.size("vocab_size"),
        context_length=settings.size("max_position_embeddings"),
        rope_base=settings.rope_base(),
        tied=settings.get("tie_word_embeddings", False),
        norm_eps=settings.get("rms_norm_eps", 1e-6),
    )
    with _opened(Path(folder), prefix="model.") as tensors:
        ours = {
            "token_embedding.weight": tensors.take("embed_tokens.weight", config.vocab_size, C),
            "norm.weight": tensors.take("norm.weight", C),
        }
        queries, keys, F = H * config.head_dim, config.n_kv_heads * config.head_dim, config.d_ff
        for i in range(config.n_layers):
            for part, name, *shape in (
                ("norm1", "input_layernorm", C),
                ("norm2", "post_attention_layernorm", C),
                ("attention.q_proj", "self_attn.q_proj", queries, C),
                ("attention.k_proj", "self_attn.k_proj", keys, C),
                ("attention.v_proj", "self_attn.v_proj", keys, C),
                ("attention.o_proj", "self_attn.o_proj", C, queries),
                ("mlp.gate", "mlp.gate_proj", F, C),
                ("mlp.up", "mlp.up_proj", F, C),
                ("mlp.down", "mlp.down_proj", C, F),
            ):
                ours[f"blocks.{i}.{part}.weight"] = tensors.take(f"layers.{i}.{name}.weight", *shape)
        ours["head.weight"] = _head(tensors, config.tied, ours["token_embedding.weight"])
        tensors.expect_no_more(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # follows from the base
    return _filled(llama.Llama(config), ours)


def load_bert(folder: str | Path) -> encoder.Encoder:
    """An Encoder with the weights of a Hugging Face BERT folder, in float32.

    The parts that stand on top of the encoder, such as the pooler, are left out. Raises ValueError for what does not
    fit (see this module), FileNotFoundError for a file that is not there.
    """
    settings = _Settings(Path(folder), "bert")
    settings.expect("hidden_act", "gelu")
    settings.expect("position_embedding_type", "absolute")
    settings.expect("is_decoder", False)
    C = settings.size("hidden_size")
    config = encoder.EncoderConfig(
        n_layers=settings.size("num_hidden_layers"),
        d_model=C,
        n_heads=settings.size("num_attention_heads"),
        d_ff=settings.size("intermediate_size"),
        vocab_size=settings.size("vocab_size"),
        context_length=settings.size("max_position_embeddings"),
        n_segments=settings.size("type_vocab_size"),
        norm_eps=settings.get("layer_norm_eps", 1e-12),
    )
    with _opened(Path(folder), prefix="bert.") as tensors:
        ours = {
            "token_embedding.weight": tensors.take("embeddings.word_embeddings.weight", config.vocab_size, C),
            "position_embedding.weight": tensors.take(
                "embeddings.position_embeddings.weight", config.context_length, C
            ),
            "segment_embedding.weight": tensors.take("embeddings.token_type_embeddings.weight", config.n_segments, C),
            **_norm(tensors, "norm", "embeddings.LayerNorm", C),
        }
        for i in range(config.n_layers):
            theirs, block = f"encoder.layer.{i}", f"blocks.{i}"
            ours |= _norm(tensors, f"{block}.norm1", f"{theirs}.attention.output.LayerNorm", C)
            ours |= _norm(tensors, f"{block}.norm2", f"{theirs}.output.LayerNorm", C)
            for part, name, n_in, n_out in (
                ("attention.q_proj", "attention.self.query", C, C),
                ("attention.k_proj", "attention.self.key", C, C),
                ("attention.v_proj", "attention.self.value", C, C),
                ("attention.o_proj", "attention.output.dense", C, C),
                ("mlp.up", "intermediate.dense", C, config.d_ff),
                ("mlp.down", "output.dense", config.d_ff, C),
            ):
                ours[f"{block}.{part}.weight"] = tensors.take(f"{theirs}.{name}.weight", n_out, n_in)
                ours[f"{block}.{part}.bias"] = tensors.take(f"{theirs}.{name}.bias", n_out)
        tensors.expect_no_more(r"embeddings\.position_ids|(pooler|cls|classifier|qa_outputs)\..*")
    return _filled(encoder.Encoder(config), ours)


def load_llama2c(path: str | Path) -> llama.Llama:
    """A Llama with the weights of a llama2.c file (its first format), in float32.

    Seven int32 numbers, then the weights in float32, little-endian, in a fixed order. A negative vocabulary size
    says that the head has weights of its own. Rotary pairs lie side by side in this format; `half_split_rows` brings
    them into our order. Raises ValueError, naming the byte, for a file that is too short, too long or of another kind.
    """
    data = Path(path).read_bytes()
    if len(data) < 28:
        raise ValueError(f"{path} ends at byte {len(data)}: llama2.c's header alone has 28 bytes")
    C, F, L, H, K, V, length = struct.unpack_from("<7i", data)
    tied, V = V > 0, abs(V)
    if min(C, F, L, H, K, V, length) < 1 or C % H or H % K or (C // H) % 2:
        raise ValueError(
            f"{path} is not of llama2.c's first format: bytes 0 to 27 say dim={C}, hidden={F}, layers={L}, "
            f"heads={H}, kv heads={K}, vocabulary={V}, context={length}"
        )
    D = C // H
    shapes = {
        "token_embedding.weight": (V, C),
        "norm1": (L, C),
        "attention.q_proj": (L, H * D, C),
        "attention.k_proj": (L, K * D, C),
        "attention.v_proj": (L, K * D, C),
        "attention.o_proj": (L, C, H * D),
        "norm2": (L, C),
        "mlp.gate": (L, F, C),
        "mlp.down": (L, C, F),
        "mlp.up": (L, F, C),
        "norm.weight": (C,),
        "rotary angles": (2, length, D // 2),  # cosines and sines, which follow from the base
    } | ({} if tied else {"head.weight": (V, C)})
    read = _cut(data, 28, shapes, path)
    ours = {name: read[name] for name in ("token_embedding.weight", "norm.weight")}
    ours["head.weight"] = read["token_embedding.weight" if tied else "head.weight"]
    read["attention.q_proj"] = half_split_rows(read["attention.q_proj"], H)
    read["attention.k_proj"] = half_split_rows(read["attention.k_proj"], K)
    parts = [name for name in shapes if name.startswith(("norm1", "norm2", "attention.", "mlp."))]
    ours |= {f"blocks.{i}.{part}.weight": read[part][i] for i in range(L) for part in parts}
    config = llama.LlamaConfig(
        n_layers=L, d_model=C, n_heads=H, n_kv_heads=K, d_ff=F, vocab_size=V, context_length=length, tied=tied
    )
    return _filled(llama.Llama(config), ours)


def half_split_rows(weight: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of a query or key projection: interleaved rotary pairs become half-split ones.

    (..., H*D, C) -> (..., H*D, C). In each head, rows 0, 2, 4 ... come first and then rows 1, 3, 5 ... Queries and keys
    are reordered alike, so their dot products stay.

    >>> half_split_rows(torch.arange(4.0).view(4, 1), 1).flatten()
    tensor([0., 2., 1., 3.])
    """
    return weight.unflatten(-2, (n_heads, -1, 2)).transpose(-3, -2).flatten(-4, -2)


# What the loaders share ----------------------------------------------------------------------------------------------


class _Settings:
    """The `config.json` of a folder."""

    def __init__(self, folder: Path, kind: str):
        self.path = folder / "config.json"
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path} is not there: a checkpoint folder needs config.json and *.safetensors"
            )
        try:
            self.values = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.path} is not JSON: {error}") from None
        if not isinstance(self.values, dict) or self.values.get("model_type") != kind:
            found = self.values.get("model_type") if isinstance(self.values, dict) else None
            raise ValueError(f"{self.path}: model_type is {found!r}, and this function loads {kind!r}")

    def get(self, name: str, default):
        return self.values.get(name, default)

    def size(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.path}: {name} must be a positive whole number, got {value!r}")
        return value

    def expect(self, name: str, *allowed) -> None:
        """A setting that our model fixes: it must be one of these where it is given."""
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{self.path}: {name}={value!r} is not supported, only {' or '.join(map(repr, allowed))}")

    def rope_base(self) -> float:
        """The rotary base, in the older and the newer way to write it. Scaled positions are not supported."""
        rope = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{self.path}: rotary positions of type {kind!r} are not supported, only 'default'")
        return float(rope.get("rope_theta", self.values.get("rope_theta", 10_000.0)))


class _Tensors:
    """The tensors of a folder by name; remembers which were taken."""

    def __init__(self, files: dict, prefix: str):
        named = any(name.startswith(prefix) for name in files)
        self.files = {name.removeprefix(prefix) if named else name: (name, file) for name, file in files.items()}
        self.taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self.files:
            raise ValueError(f"tensor {name!r} of shape {shape} is missing")
        full, file = self.files[name]
        found = tuple(file.get_slice(full).get_shape())
        if found != shape:
            raise ValueError(f"tensor {full!r}: expected shape {shape} from config.json, got {found}")
        tensor = file.get_tensor(full)
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {full!r}: expected floating-point numbers, got {tensor.dtype}")
        self.taken.add(name)
        return tensor.to(torch.float32)

    def expect_no_more(self, known: str) -> None:
        """Every tensor was taken, except those whose names match what is known to be left over."""
        extra = [name for name in self.files if name not in self.taken and not re.fullmatch(known, name)]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise ValueError(f"tensor {self.files[extra[0]][0]!r}{more} has no place in this model")


@contextmanager
def _opened(folder: Path, prefix: str) -> Iterator[_Tensors]:
    """The tensors of a folder: of `model.safetensors`, or of the files which its index names."""
    index = folder / "model.safetensors.index.json"
    expected: dict[str, str] = {}
    if index.is_file():
        try:
            expected = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is not an index of tensors: {error!r}") from None
        outside = [file for file in expected.values() if not isinstance(file, str) or Path(file).name != file]
        if outside:
            raise ValueError(f"{index} names {outside[0]!r}, which is not a file of this folder")
    names = sorted(set(expected.values())) or ["model.safetensors"]
    with ExitStack() as stack:
        files = {}
        for name in names:
            path = folder / name
            if not path.is_file():
                raise FileNotFoundError(f"{path} is not there: tensors are read from safetensors files only")
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} cannot be read: {_why(path) or error}") from None
            files |= dict.fromkeys(file.keys(), file)
        missing = sorted(expected.keys() - files.keys())
        if missing:
            raise ValueError(f"tensor {missing[0]!r} is missing: {index.name} says {expected[missing[0]]} holds it")
        try:
            yield _Tensors(files, prefix)
        except SafetensorError as error:
            raise ValueError(f"{folder} cannot be read: {error}") from None
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None


def _why(path: Path) -> str:
    """What is wrong with a safetensors file: the tensor and the byte at which it ends too early, or ""."""
    with open(path, "rb") as file:
        head = file.read(8)
        if len(head) < 8:
            return f"it ends at byte {len(head)}, within the first number"
        n = struct.unpack("<Q", head)[0]
        size = path.stat().st_size
        if 8 + n > size:
            return f"it ends at byte {size}, within the header, which should end at byte {8 + n}"
        try:
            table = json.loads(file.read(n))
            ends = sorted((entry["data_offsets"][1], name) for name, entry in table.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"bytes 8 to {8 + n} are not a header of tensors"
    late = [(8 + n + end, name) for end, name in ends if 8 + n + end > size]
    return f"it ends at byte {size}, and tensor {late[0][1]!r} should end at byte {late[0][0]}" if late else ""


def _norm(tensors: _Tensors, ours: str, theirs: str, C: int) -> dict[str, Tensor]:
    """The two vectors of a LayerNorm. Old files call them gamma and beta."""
    old = f"{theirs}.gamma" in tensors.files
    weight, bias = ("gamma", "beta") if old else ("weight", "bias")
    return {
        f"{ours}.weight": tensors.take(f"{theirs}.{weight}", C),
        f"{ours}.bias": tensors.take(f"{theirs}.{bias}", C),
    }


def _head(tensors: _Tensors, tied: bool, embedding: Tensor) -> Tensor:
    """The head's weight. Where it is tied a file may hold it or not; if it does, it must be the embedding's."""
    if tied and "lm_head.weight" not in tensors.files:
        return embedding
    head = tensors.take("lm_head.weight", *embedding.shape)
    if tied and not torch.equal(head, embedding):
        raise ValueError("tensor 'lm_head.weight' differs from the embedding, though config.json ties them")
    return head


def _cut(data: bytes, start: int, shapes: dict[str, tuple[int, ...]], path: str | Path) -> dict[str, Tensor]:
    """Tensors of these shapes, one after the other, float32, from byte `start` to the end of the data."""
    read = {}
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        end = start + 4 * count
        if end > len(data):
            raise ValueError(f"{path} ends at byte {len(data)}, within {name!r} {shape}, bytes {start} to {end}")
        read[name] = torch.frombuffer(bytearray(data[start:end]), dtype=torch.float32).view(shape)
        start = end
    if start < len(data):
        raise ValueError(f"{path} goes on after byte {start}, where the last tensor ends: it has {len(data)} bytes")
    return read


def _filled(model: torch.nn.Module, state: dict[str, Tensor]):
    """The model with these weights, ready to use. A learner's model may have buffers of its own."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    parameters = dict(model.named_parameters())
    missing = [name for name in missing if name in parameters]
    if missing or unexpected:
        raise ValueError(f"{type(model).__name__} does not have the names it should: {[*missing, *unexpected]}")
    return model.eval()
