"""A trained checkpoint is found where the course says, downloaded only as the file it should be, and runs."""

import hashlib
import json
import os
import shutil

import pytest
import torch

from tfmlib import downloads, vocabularies
from tfmlib.models import checkpoints, llama

from .data import data


@pytest.fixture
def labs(tmp_path, monkeypatch):
    """A learner's folder of labs, in which no checkpoint is at hand."""
    monkeypatch.delenv("TFM_CHECKPOINT", raising=False)
    monkeypatch.setenv("TFM_DATA", str(tmp_path / "no data"))
    (tmp_path / "labs" / "06-models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "labs" / "06-models")
    return tmp_path / "labs"


@pytest.fixture(scope="module")
def trained():
    """The trained model and its tokenizer, of the test data."""
    return data("aidreams260K.bin"), data("tok512.bin")


def test_where_there_is_none_it_says_how_to_get_one(labs, monkeypatch):
    assert checkpoints.find() is None
    assert "download_gpt2()" in checkpoints.HOW_TO_GET_ONE
    monkeypatch.setenv("TFM_CHECKPOINT", str(labs))
    with pytest.raises(ValueError, match="holds no checkpoint that can be run"):
        checkpoints.find()


@pytest.mark.parametrize("where", ["checkpoints", "06-models/checkpoints/small", "elsewhere"])
def test_a_llama2c_model_is_found_and_speaks(where, labs, trained, monkeypatch):
    folder = labs / where
    folder.mkdir(parents=True)
    shutil.copy(trained[0], folder / "model.bin")
    assert checkpoints.find() is None  # without its tokenizer it cannot speak
    shutil.copy(trained[1], folder / "tok512.bin")
    if where == "elsewhere":
        monkeypatch.setenv("TFM_CHECKPOINT", str(folder / "model.bin"))
    model, tokenizer, start = checkpoints.find().load()
    assert isinstance(model, llama.Llama)
    ids = list(start)
    with torch.no_grad():
        for _ in range(24):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert tokenizer.decode(ids[1:]).startswith(' "Echoes of vectors unfold, a gentle hum')


def test_the_test_data_is_the_last_resort(labs, trained, monkeypatch):
    monkeypatch.setenv("TFM_DATA", str(trained[0].parent))
    assert checkpoints.find().model == trained[0]


def test_a_gpt2_folder_is_found(labs):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 12, "n_head": 3, "n_layer": 1, "n_positions": 16, "vocab_size": 257}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    folder = labs / "checkpoints" / "gpt2"
    model.save_pretrained(folder)
    assert checkpoints.find() is None
    vocab = vocabularies.gpt2_byte_names() | {"<|endoftext|>": 256}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    ours, tokenizer, start = checkpoints.find().load()
    assert start == [256]
    assert ours(torch.tensor([start])).shape == (1, 1, 257)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_a_download_is_checked_and_leaves_nothing_if_it_is_wrong(tmp_path):
    source, target = tmp_path / "source", tmp_path / "new" / "file"
    source.write_bytes(b"weights" * 1000)
    right = hashlib.sha256(source.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="SHA-256"):
        downloads.download(source.as_uri(), "0" * 64, target)
    assert os.listdir(target.parent) == []
    downloads.download(source.as_uri(), right, target)
    assert target.read_bytes() == source.read_bytes()
    assert os.listdir(target.parent) == ["file"]


def test_gpt2_is_downloaded_once(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    for name in checkpoints._SHA256:
        (source / name).write_bytes(name.encode())
    monkeypatch.setattr(checkpoints, "_GPT2", source.as_uri())
    monkeypatch.setattr(
        checkpoints, "_SHA256", {n: hashlib.sha256(n.encode()).hexdigest() for n in checkpoints._SHA256}
    )
    folder = checkpoints.download_gpt2(tmp_path / "gpt2")
    assert sorted(os.listdir(folder)) == sorted(checkpoints._SHA256)
    (folder / "vocab.json").write_bytes(b"damaged")
    (source / "config.json").unlink()  # what is right is not asked for again
    checkpoints.download_gpt2(folder)
    assert (folder / "vocab.json").read_bytes() == b"vocab.json"


def test_the_checksums_are_those_of_the_published_files():
    """GPT-2's vocabulary is in the test data under its first names."""
    for ours, theirs in (("vocab.json", "gpt2/encoder.json"), ("merges.txt", "gpt2/vocab.bpe")):
        assert downloads.sha256_of(data(theirs)) == checkpoints._SHA256[ours]
