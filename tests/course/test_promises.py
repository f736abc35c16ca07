"""The course keeps its promises about every piece: its checks judge rightly and name the mistake."""

import inspect
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from tfmlib_checks.alternatives import alternatives
from tfmlib_checks.misconceptions import known
from tfmlib_checks.same import seeded
from tfmlib_checks.toys import LayerCache

from tfmlib import (
    attention,
    cache,
    costs,
    flash,
    flash_triton,
    heads,
    kernels,
    pieces,
    positions,
    sampling,
    storyland,
    tokens,
    training,
)
from tfmlib import train as command
from tfmlib.course import check as judge
from tfmlib.course import limits, notebooks
from tfmlib.models import checkpoints, encoder, gpt, llama, seq2seq, weights

from .sources import made_from

NAMES = list(pieces.PIECES)
SEEDS = [0, 1, 20_261]

WRONG = [pytest.param(name, m, id=f"{name}-{m.name}") for name in NAMES for m in known(name)]
RIGHT = [pytest.param(name, f, id=f"{name}-{f.__name__}") for name in NAMES for f in alternatives(name)]
RIGHT += [pytest.param(name, pieces.reference(name), id=f"{name}-reference") for name in NAMES]


@pytest.fixture(params=SEEDS)
def seed(request):
    """The seed that the checks draw their inputs from."""
    with seeded(request.param):
        yield request.param


def examined(piece, name):
    """The report of a piece. Where this machine can run none of its checks, the test is skipped."""
    report = judge.examine(piece, name)
    if report.skipped:
        pytest.skip(report.results[0].message)
    return report


# 1. Every piece has checks, misconceptions and other correct implementations ------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_piece_is_well_provided(name):
    tests = judge.checks(name)
    assert len(tests) >= 3
    assert all(inspect.getdoc(test) for test in tests), "a check's docstring is the sentence that a learner sees"
    assert len(known(name)) >= 3
    assert len(alternatives(name)) >= 2
    assert callable(judge.probe(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_misconception_names_its_check(name):
    tests = {test.__name__ for test in judge.checks(name)}
    for misconception in known(name):
        assert misconception.caught_by in tests, misconception.name
        assert misconception.hint.endswith(".")


def test_every_check_belongs_to_a_piece():
    modules = {judge.check_module(name) for name in NAMES}
    tests = {f"{m.__name__}.{n}" for m in modules for n in vars(m) if n.startswith("test_")}
    used = {f"{test.__module__}.{test.__name__}" for name in NAMES for test in judge.checks(name)}
    assert tests == used


# 2. Every misconception is rejected and diagnosed as itself -----------------------------------------------------------


@pytest.mark.parametrize(("name", "misconception"), WRONG)
def test_misconception_is_rejected_and_named(name, misconception, seed, monkeypatch):
    """By all checks with the first seed; with the others by the one check that must catch it."""
    if seed != SEEDS[0]:
        (check,) = (test for test in judge.checks(name) if test.__name__ == misconception.caught_by)
        monkeypatch.setattr(judge, "checks", lambda name: [check])
    report = examined(misconception.implementation, name)
    failed = {result.name for result in report.results if result.status == judge.FAILED}
    assert not report.passed
    assert misconception.caught_by in failed
    assert report.hint == misconception.hint


# 3. No correct implementation is ever rejected or diagnosed -----------------------------------------------------------


@pytest.mark.parametrize(("name", "implementation"), RIGHT)
def test_correct_implementation_is_accepted(name, implementation, seed):
    report = examined(implementation, name)
    assert report.passed, str(report)
    assert report.hint is None
    with limits.state_kept(), judge._in_scope(implementation, name):
        assert judge.diagnose(implementation, name) is None


# 4. A replacement reaches whatever is built from the piece ------------------------------------------------------------


class Reached(Exception):
    """The replaced piece was called."""


def _attend_over(x):
    return heads.MultiHeadAttention(12, 4, n_kv_heads=2)(x, mask=torch.ones(5, 5, dtype=torch.bool))


def _decode(x):
    return heads.MultiHeadAttention(12, 2, rope_base=100.0)(x, cache=LayerCache())


SIZES = {"n_layers": 2, "d_model": 12, "n_heads": 2, "vocab_size": 31, "context_length": 8}
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def _gpt(x):
    return gpt.GPT(gpt.GPTConfig(**SIZES))(IDS, mask=torch.ones(1, 1, 1, 5, dtype=torch.bool))


def _llama(x):
    return llama.Llama(llama.LlamaConfig(**SIZES, n_kv_heads=1))(IDS)


def _encoder(x):
    return encoder.Encoder(encoder.EncoderConfig(**SIZES))(IDS, is_token=IDS > 0)


def _seq2seq(x):
    return seq2seq.Seq2Seq(seq2seq.Seq2SeqConfig(**SIZES))(IDS, IDS)


def _folder(kind):
    """A Hugging Face folder of a tiny model."""
    transformers = pytest.importorskip("transformers")
    folder = tempfile.TemporaryDirectory()
    if kind == "gpt2":
        sizes = {"n_embd": 12, "n_head": 2, "n_layer": 1, "n_positions": 8, "vocab_size": 31}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder.name)
    else:
        sizes = {"hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 20}
        config = transformers.BertConfig(**sizes, vocab_size=31, max_position_embeddings=8)
        transformers.BertModel(config).save_pretrained(folder.name)
    return folder


def _load_gpt2(x):
    with _folder("gpt2") as folder:
        return weights.load_gpt2(folder)


def _load_bert(x):
    with _folder("bert") as folder:
        return weights.load_bert(folder)


def _tokenizer(x):
    return tokens.Tokenizer({i: bytes([i]) for i in range(256)}, [(b"h", b"i")]).encode("hi")


def _checkpoint(x):
    """What a checkpoint is loaded into."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bin"
        path.write_bytes(struct.pack("<7i", 4, 4, 1, 1, 1, 3, 2) + bytes(4 * (12 + 4 + 64 + 4 + 48 + 4 + 8)))
        (Path(folder) / "tok3.bin").write_bytes(
            bytes(4) + b"".join(struct.pack("<fi", 0.0, 3) + text for text in (b"unk", b"<s>", b"end"))
        )
        found = next(checkpoints._within(Path(folder)))
        return found.load()


RECIPE = training.Recipe(steps=2, warmup=0)
BATCHES = [(IDS[:, :-1], IDS[:, 1:])] * 2


def _train(x):
    return training.train(gpt.GPT(gpt.GPTConfig(**SIZES)), BATCHES, RECIPE, BATCHES, progress=False)


def _train_with_checkpoints(x):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        model = gpt.GPT(gpt.GPTConfig(**SIZES))
        training.train(model, BATCHES, RECIPE, path=path, progress=False)
        return training.train(model, BATCHES, RECIPE, path=path, progress=False)


def _stories(x):
    return next(storyland.Storyland().batches(2, torch.Generator()))


def _text_task(x):
    task = command.prepare("python-docs", length=4, batch_size=2)
    return next(iter(task.batches))


def _report(x):
    """What a run with a text says at its end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notes.txt"
        path.write_text("hugs and bugs, " * 20, encoding="utf-8")
        sizes = ["--layers", "1", "--heads", "2", "--width", "8", "--length", "8", "--steps", "2", "--warmup", "0"]
        command.main(["--corpus", str(path), "--vocab-size", "258", *sizes, "--folder", folder, "--quiet"])


def _generate(x):
    model = gpt.GPT(gpt.GPTConfig(**SIZES))
    return sampling.generate(model, IDS, 2, temperature=0.8, top_k=9, top_p=0.9, generator=torch.Generator())


def _generate_cached(x):
    return cache.generate_cached(llama.Llama(llama.LlamaConfig(**SIZES, n_kv_heads=1)), IDS, 3)


def _attend_in_tiles(x):
    x = x[:, None].clone().requires_grad_()
    return flash.attend(x, x, x, causal=True).sum().backward()


def _kernel_in_models(x):
    model = llama.Llama(llama.LlamaConfig(**SIZES, head_dim=16, n_kv_heads=1))
    with flash_triton.flash_in_models(lambda *qkv: flash_triton.flash_attention_triton(*qkv)):
        return model(IDS)


# What is built from each piece: something that calls it, though it stands elsewhere.
BUILT_FROM = {
    "pair_counts": [lambda x: tokens.train_bpe("hug hugs", 258)],
    "merge_pair": [lambda x: tokens.train_bpe("hug hugs", 258), _tokenizer],
    "Tokenizer": [_checkpoint],
    "embed": [_gpt, _llama, _encoder, _seq2seq],
    "rope_angles": [lambda x: positions.apply_rope(x, torch.arange(5)), _llama, _decode],
    "sinusoidal": [_seq2seq],
    "apply_rope": [_decode, _llama],
    "softmax": [lambda x: attention.attention_weights(x, x), lambda x: attention.attention_weights(x, x, x[0] > 9)],
    "causal_mask": [_gpt, _llama, _seq2seq],
    "padding_mask": [_encoder],
    "attention_weights": [lambda x: attention.scaled_dot_product_attention(x, x, x), _attend_over, _gpt],
    "scaled_dot_product_attention": [_attend_over, _decode, _llama],
    "split_heads": [_attend_over, _decode, _gpt],
    "merge_heads": [_attend_over, _decode, _llama],
    "repeat_kv": [_attend_over, _decode, _llama],
    "MultiHeadAttention": [_gpt, _llama, _encoder, _seq2seq],
    "LayerNorm": [_gpt, _encoder, _seq2seq],
    "RMSNorm": [_llama],
    "MLP": [_gpt, _encoder, _seq2seq],
    "SwiGLU": [_llama],
    "PreNormBlock": [_gpt, _llama],
    "PostNormBlock": [_encoder, _seq2seq],
    "DecoderBlock": [_seq2seq],
    "init_weights": [_gpt, _llama, _encoder, _seq2seq],
    "decoder_inputs": [_gpt, _llama],
    "GPT": [_load_gpt2],
    "Llama": [_checkpoint],
    "Encoder": [_load_bert],
    "train_bpe": [_report],
    "pad_batch": [_stories],
    "shift_labels": [_stories],
    "cross_entropy": [_train],
    "bits_per_byte": [_report],
    "AdamW": [_train],
    "warmup_cosine": [_train],
    "clip_gradients": [_train],
    "parameter_groups": [_train],
    "token_batches": [_text_task],
    "accumulate_gradients": [_train],
    "evaluate": [_train],
    "save_checkpoint": [_train_with_checkpoints],
    "load_checkpoint": [_train_with_checkpoints],
    "apply_temperature": [_generate],
    "keep_top_k": [_generate],
    "keep_top_p": [_generate],
    "sample": [_generate, _report],
    "generate": [_generate_cached],
    "KVCache": [_generate_cached],
    "prefill": [_generate_cached],
    "decode_step": [_generate_cached],
    "flash_attention": [_attend_in_tiles],
    "flash_attention_backward": [_attend_in_tiles],
    "flash_attention_triton": [_kernel_in_models],
    "count_parameters": [lambda x: costs.training_bytes(llama.LlamaConfig(**SIZES), 1, 1)],
}
NOTHING_YET = {  # labs and lessons use them, and chapters to come
    "interpolate_positions",
    "Seq2Seq",
    "perplexity",
    "tail_loss",
    "group_advantages",
    "policy_gradient_loss",
    "warmup_inverse_sqrt",
    "forward_flops",
    "score_bytes",
    "kv_cache_bytes",
    "training_bytes",
    "roofline_seconds",
    "beam_search",
    "generate_cached",
    "online_softmax",
}


def test_every_piece_says_what_is_built_from_it():
    assert set(BUILT_FROM) | NOTHING_YET == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_replacement_reaches_what_is_built_from_it(name):
    def stub(*args, **kwargs):
        raise Reached

    stub.from_llama2c = stub.from_gpt2 = stub  # other ways to construct one
    x = torch.randn(5, 5, 12)[:, :, :5] if name == "softmax" else torch.randn(2, 5, 12)
    if name == "flash_attention_triton" and kernels.RUNS_ON == "missing":
        pytest.skip("Triton is missing")
    for build in BUILT_FROM.get(name, []):
        build(x)
        with pieces.using(stub, name), pytest.raises(Reached):
            build(x)
        build(x)
    with pieces.using(stub, name):
        assert pieces.in_use(name) is stub
        assert pieces.reference(name) is not stub
    assert pieces.in_use(name) is pieces.reference(name)


# 5. An untouched stub is not written yet, and never wrong -------------------------------------------------------------


def _stub(name):
    """The learner's untouched version, made as the labs make it."""
    return made_from(notebooks.stub_source(name), name, f"<stub of {name}>")


@pytest.mark.parametrize("name", NAMES)
def test_untouched_stub_is_not_written_yet(name, seed):
    report = examined(_stub(name), name)
    assert report.unwritten
    assert not report.passed
    assert report.hint is None
    assert report.share == 0
    assert "not written yet" in str(report)
    assert {result.status for result in report.results} == {judge.UNWRITTEN}
