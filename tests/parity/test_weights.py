"""Loading what others trained: layouts as they are published, and a clear error for whatever does not fit."""

import hashlib
import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from tfmlib import positions
from tfmlib.course import paths
from tfmlib.models import llama, weights
from tfmlib.tokens import Tokenizer

from ..same import filled, rng, same
from .data import data

transformers = pytest.importorskip("transformers")


def _saved(kind, folder, **options):
    """A folder as transformers writes it; returns the model that was saved."""
    common = {"vocab_size": 31, "tie_word_embeddings": False}
    if kind == "gpt2":
        sizes = {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 16}
        config = transformers.GPT2Config(**common, **sizes, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 20}
        maker, config = {
            "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
            "bert": (transformers.BertForPreTraining, transformers.BertConfig),
        }[kind]
        model = maker(config(**common, **sizes, max_position_embeddings=16))
    filled(model.eval())
    model.save_pretrained(folder, **options)
    return model


LOADERS = {"gpt2": weights.load_gpt2, "llama": weights.load_llama, "bert": weights.load_bert}
KINDS = pytest.mark.parametrize("kind", LOADERS)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


def _edit_settings(folder, **changes):
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings.update(changes)
    path.write_text(json.dumps({name: value for name, value in settings.items() if value != "gone"}))


def _edit_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)


# Layouts --------------------------------------------------------------------------------------------------------------


@KINDS
def test_a_sharded_folder_loads_the_same(kind, tmp_path):
    _saved(kind, tmp_path / "one")
    _saved(kind, tmp_path / "many", max_shard_size="4KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = (LOADERS[kind](tmp_path / name) for name in ("one", "many"))
    for name, value in one.state_dict().items():
        same(many.state_dict()[name], value, name)


@KINDS
def test_names_without_the_prefix_load_the_same(kind, tmp_path):
    """The folders of the first GPT-2 and BERT models name their tensors so."""
    _saved(kind, tmp_path)
    want = LOADERS[kind](tmp_path)
    prefix = {"gpt2": "transformer.", "llama": "model.", "bert": "bert."}[kind]
    _edit_tensors(tmp_path, lambda tensors: {name.removeprefix(prefix): t for name, t in tensors.items()})
    same(LOADERS[kind](tmp_path)(IDS), want(IDS), "output")


def test_old_files_with_gamma_and_the_mask_as_a_tensor_load(tmp_path):
    bert = _saved("bert", tmp_path / "bert").bert

    def old(name):
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    _edit_tensors(tmp_path / "bert", lambda tensors: {old(name): t for name, t in tensors.items()})
    same(weights.load_bert(tmp_path / "bert")(IDS), bert(IDS).last_hidden_state, "output")
    gpt2 = _saved("gpt2", tmp_path / "gpt2")
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16), "transformer.h.1.attn.masked_bias": torch.ones(1)}
    _edit_tensors(tmp_path / "gpt2", lambda tensors: tensors | mask)
    same(weights.load_gpt2(tmp_path / "gpt2")(IDS), gpt2(IDS).logits, "logits")


@KINDS
def test_half_precision_is_read_as_float32(kind, tmp_path):
    _saved(kind, tmp_path)
    _edit_tensors(tmp_path, lambda tensors: {name: t.bfloat16() for name, t in tensors.items()})
    model = LOADERS[kind](tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_may_be_stored_or_not(stored, tmp_path):
    _saved("llama", tmp_path)
    _edit_settings(tmp_path, tie_word_embeddings=True)

    def tie(tensors):
        tensors.pop("lm_head.weight")
        return tensors | ({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()} if stored else {})

    _edit_tensors(tmp_path, tie)
    model = weights.load_llama(tmp_path)
    assert model.head.weight is model.token_embedding.weight


def test_the_older_way_to_write_the_rotary_base_is_read(tmp_path):
    _saved("llama", tmp_path)
    _edit_settings(tmp_path, rope_parameters="gone", rope_theta=500.0, rope_scaling=None)
    assert weights.load_llama(tmp_path).config.rope_base == 500.0


def test_half_split_rows_turn_one_pairing_into_the_other():
    H, D, C = 3, 10, 7
    weight, x = torch.randn(H * D, C, generator=rng(1)).double(), torch.randn(5, C, generator=rng(2)).double()
    places = torch.arange(5)
    theirs = positions.apply_rope((x @ weight.T).view(5, H, D).mT.mT.transpose(0, 1), places, interleaved=True)
    ours = positions.apply_rope((x @ weights.half_split_rows(weight, H).T).view(5, H, D).transpose(0, 1), places)
    same(ours @ ours.mT, theirs @ theirs.mT, "scores of each head")


# What does not fit ----------------------------------------------------------------------------------------------------


def _refused(call, *words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the words are looked for below
        call()
    for word in words:
        assert word in str(error.value), str(error.value)


@KINDS
def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(kind, tmp_path):
    _saved(kind, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    name = [name for name in whole if "norm" in name.lower() or "ln_1" in name][3]
    path = tmp_path / "model.safetensors"
    short = {n: t for n, t in whole.items() if n != name}
    for tensors, words in (
        (short, ("missing", name.split(".", 1)[1])),
        (whole | {"strange.weight": torch.ones(2)}, ("'strange.weight'", "no place")),
        (whole | {name: torch.ones(13)}, (name, "(12,)", "(13,)")),
        (whole | {name: torch.ones(12, dtype=torch.int64)}, (name, "int64")),
    ):
        save_file(tensors, path)
        _refused(lambda: LOADERS[kind](tmp_path), *words, str(tmp_path))


@KINDS
@pytest.mark.parametrize("kept", [4, 100, -10])
def test_a_truncated_file_is_named_with_its_byte(kind, kept, tmp_path):
    _saved(kind, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    size = len(whole[:kept])
    _refused(lambda: LOADERS[kind](tmp_path), "model.safetensors", f"byte {size}")
    path.write_bytes(b"not a checkpoint at all")
    _refused(lambda: LOADERS[kind](tmp_path), "model.safetensors")


@KINDS
def test_an_unknown_architecture_or_setting_is_named(kind, tmp_path):
    _saved(kind, tmp_path)
    original = (tmp_path / "config.json").read_text()
    wrong = {
        "gpt2": [("activation_function", "relu"), ("scale_attn_by_inverse_layer_idx", True), ("n_layer", "two")],
        "llama": [
            ("hidden_act", "gelu"),
            ("attention_bias", True),
            ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5}),
            ("rope_parameters", {"rope_type": "linear", "factor": 2.0}),
            ("hidden_size", -12),
        ],
        "bert": [("hidden_act", "relu"), ("position_embedding_type", "relative_key"), ("vocab_size", None)],
    }[kind]
    for name, value in [("model_type", "mamba"), *wrong]:
        _edit_settings(tmp_path, **{name: value})
        said = value["rope_type"] if isinstance(value, dict) else name
        _refused(lambda: LOADERS[kind](tmp_path), "config.json", said)
        (tmp_path / "config.json").write_text(original)
    (tmp_path / "config.json").write_text("{")
    _refused(lambda: LOADERS[kind](tmp_path), "config.json", "not JSON")


def test_a_head_that_is_tied_and_differs_is_named(tmp_path):
    _saved("gpt2", tmp_path)
    _edit_settings(tmp_path, tie_word_embeddings=True)
    _refused(lambda: weights.load_gpt2(tmp_path), "lm_head.weight", "ties")


def test_a_bad_index_is_named(tmp_path):
    _saved("llama", tmp_path, max_shard_size="4KB")
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    name, file = sorted(table["weight_map"].items())[0]
    for shards, words in (
        ({**table["weight_map"], name: "../elsewhere.safetensors"}, ("elsewhere", "not a file of this folder")),
        ({**table["weight_map"], "model.more.weight": file}, ("'model.more.weight'", file)),
    ):
        index.write_text(json.dumps({"weight_map": shards}))
        _refused(lambda: weights.load_llama(tmp_path), *words)
    index.write_text("[]")
    _refused(lambda: weights.load_llama(tmp_path), "index")
    index.write_text(json.dumps(table))
    (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        weights.load_llama(tmp_path)


def test_a_folder_of_pickles_is_not_opened(tmp_path):
    """Unpickling runs whatever a file says: only safetensors are read."""
    model = _saved("gpt2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        weights.load_gpt2(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        weights.load_gpt2(tmp_path / "nowhere")


# llama2.c -------------------------------------------------------------------------------------------------------------


def _as_llama2c(model):
    """A Llama in llama2.c's first format, rows interleaved."""
    c, blocks = model.config, model.blocks
    V = c.vocab_size if c.tied else -c.vocab_size
    header = struct.pack("<7i", c.d_model, c.d_ff, c.n_layers, c.n_heads, c.n_kv_heads, V, c.context_length)

    def interleaved(weight, n_heads):
        return weight.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    def each(part):
        return [block.get_submodule(part).weight for block in blocks]

    tensors = [
        model.token_embedding.weight,
        *each("norm1"),
        *(interleaved(w, c.n_heads) for w in each("attention.q_proj")),
        *(interleaved(w, c.n_kv_heads) for w in each("attention.k_proj")),
        *each("attention.v_proj"),
        *each("attention.o_proj"),
        *each("norm2"),
        *each("mlp.gate"),
        *each("mlp.down"),
        *each("mlp.up"),
        model.norm.weight,
        torch.zeros(c.context_length, c.head_dim),
        *([] if c.tied else [model.head.weight]),
    ]
    return header + b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)


@pytest.mark.parametrize(("H", "K", "tied"), [(4, 4, True), (4, 2, False), (6, 1, True)])
def test_llama2c_files_load(H, K, tied, tmp_path):
    sizes = {"n_layers": 3, "d_model": 24, "d_ff": 40, "vocab_size": 31, "context_length": 16}
    model = filled(llama.Llama(llama.LlamaConfig(**sizes, n_heads=H, n_kv_heads=K, tied=tied)))
    path = tmp_path / "model.bin"
    path.write_bytes(_as_llama2c(model))
    loaded = weights.load_llama2c(path)
    assert loaded.config == model.config
    same(loaded(IDS), model(IDS), "logits")


def test_a_damaged_llama2c_file_is_named_with_its_byte(tmp_path):
    model = llama.Llama(llama.LlamaConfig(n_layers=1, d_model=8, n_heads=2, vocab_size=5, context_length=4, tied=True))
    whole, path = _as_llama2c(model), tmp_path / "model.bin"
    for content, words in (
        (whole[:20], ("byte 20", "header")),
        (whole[:100], ("byte 100", "token_embedding.weight", "28")),
        (whole[:-1], (f"byte {len(whole) - 1}", "rotary angles")),
        (whole + b"xx", (f"byte {len(whole)}", f"{len(whole) + 2} bytes")),
        (struct.pack("<7i", 0x616B3432, 1, 8, 8, 1, 2, 2) + whole[28:], ("bytes 0 to 27",)),
        (bytes(28) + whole[28:], ("bytes 0 to 27",)),
    ):
        path.write_bytes(content)
        _refused(lambda: weights.load_llama2c(path), str(path), *words)


def _greedy(model, n_tokens):
    ids = [1]
    with torch.no_grad():
        while len(ids) <= n_tokens:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[1:]


def test_a_trained_checkpoint_speaks_the_text_that_the_lesson_shows():
    recorded = json.loads((paths.root() / "book" / "figures" / "checkpoint.json").read_text(encoding="utf-8"))
    file = data("aidreams260K.bin")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == recorded["sha256"]
    tokenizer = Tokenizer.from_llama2c(data("tok512.bin"))
    text = tokenizer.decode(_greedy(weights.load_llama2c(file), recorded["n_tokens"]))
    assert text == recorded["text"]
    assert text.startswith(' "Echoes of vectors unfold, a gentle hum of precision, as I sense the nodes,')
