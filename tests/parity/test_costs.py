"""The counts agree with published models, with torch's own counter of operations, and with memory that is measured."""

import csv

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tfmlib import costs, training
from tfmlib.course.meters import Alive
from tfmlib.models.gpt import GPT, GPTConfig
from tfmlib.models.llama import Llama, LlamaConfig

from ..toys import ModelCache
from .data import data

MODELS = {GPTConfig: GPT, LlamaConfig: Llama}

# Published models -----------------------------------------------------------------------------------------------------

# What a family has that neither config says: how many parameters more than the count, of its nearest config.
EXTRA = {
    "gpt2": (GPTConfig, lambda c: 0),
    "llama": (LlamaConfig, lambda c: 0),
    "mistral": (LlamaConfig, lambda c: 0),
    "gemma": (LlamaConfig, lambda c: 0),
    "qwen2": (LlamaConfig, lambda c: c.n_layers * (c.n_heads + 2 * c.n_kv_heads) * c.head_dim),  # biases of q, k, v
    "qwen3": (LlamaConfig, lambda c: c.n_layers * 2 * c.head_dim),  # a norm for q and one for k
    "gemma2": (LlamaConfig, lambda c: c.n_layers * 2 * c.d_model),  # norms behind both parts of a layer, too
    "neox": (GPTConfig, lambda c: -c.context_length * c.d_model),  # rotary positions in place of a table
}
EXPRESSIBLE = {"gpt2": 4, "llama": 10, "mistral": 1, "gemma": 2}  # rows


@pytest.fixture(scope="module")
def published():
    """Rows of the published models, each with the config that is nearest to it."""
    with data("models.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        kind, _ = EXTRA[row["family"]]
        row["config"] = kind(
            n_layers=int(row["n_layer"]), d_model=int(row["d_model"]), n_heads=int(row["n_heads"]),
            n_kv_heads=int(row["n_kv_heads"]), head_dim=int(row["head_dim"]), d_ff=int(row["d_ff"]),
            vocab_size=int(row["vocab"]), context_length=int(row["max_ctx"]), tied=row["tied"] == "True",
        )  # fmt: skip
    return rows


def test_every_published_model_is_counted_exactly_or_by_how_much_it_differs_is_known(published):
    assert len(published) == 24
    for row in published:
        config, (_, extra) = row["config"], EXTRA[row["family"]]
        assert costs.count_parameters(config) + extra(config) == int(row["params_total"]), row["model"]


def test_the_two_configs_express_most_published_models(published):
    exact = [row for row in published if costs.count_parameters(row["config"]) == int(row["params_total"])]
    assert {family: sum(row["family"] == family for row in exact) for family in EXTRA} == {
        family: EXPRESSIBLE.get(family, 0) for family in EXTRA
    }
    assert len(exact) == sum(EXPRESSIBLE.values())


def test_every_published_cache_is_counted_exactly(published):
    for row in published:
        assert costs.kv_cache_bytes(row["config"], 1, 1, 2) == int(row["kv_bytes_per_token_16bit"]), row["model"]


# Our own models -------------------------------------------------------------------------------------------------------

SIZES = [
    {"n_layers": 1, "d_model": 8, "n_heads": 1, "vocab_size": 11, "context_length": 13},
    {"n_layers": 3, "d_model": 24, "n_heads": 4, "vocab_size": 37, "context_length": 31},
    {"n_layers": 2, "d_model": 20, "n_heads": 6, "n_kv_heads": 2, "head_dim": 10, "d_ff": 44, "vocab_size": 53,
     "context_length": 29},
    {"n_layers": 2, "d_model": 32, "n_heads": 8, "n_kv_heads": 1, "d_ff": 90, "vocab_size": 7, "context_length": 64},
]  # fmt: skip
CASES = [
    pytest.param(kind(**sizes, tied=tied), id=f"{kind.__name__}-{i}-{'tied' if tied else 'untied'}")
    for kind in MODELS
    for i, sizes in enumerate(SIZES)
    for tied in (True, False)
]


@pytest.fixture(params=CASES)
def config(request):
    return request.param


def _flops(model, ids, cache=None) -> int:
    """What torch's counter sees in one forward pass."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, cache=cache)
    return counter.get_total_flops()


def test_a_model_has_as_many_parameters_as_counted(config):
    assert sum(p.numel() for p in MODELS[type(config)](config).parameters()) == costs.count_parameters(config)


def test_torchs_counter_counts_the_same_flops(config):
    model = MODELS[type(config)](config)
    for B, T in ((1, 1), (2, 5), (3, config.context_length)):
        ids = torch.zeros(B, T, dtype=torch.long)
        assert _flops(model, ids) == costs.forward_flops(config, B, T)


def test_torchs_counter_counts_the_same_flops_with_a_cache(config):
    model, cache = MODELS[type(config)](config), ModelCache(config.n_layers)
    done = 0
    for T in (7, 1, 3):
        done += T
        assert _flops(model, torch.zeros(2, T, dtype=torch.long), cache) == costs.forward_flops(config, 2, T, done)
    held = [x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)]
    assert sum(held) == costs.kv_cache_bytes(config, 2, done, 4)


def test_scores_take_the_bytes_that_are_counted(config, monkeypatch):
    from tfmlib import attention

    found, B, T = [], 3, 7
    softmax = attention.softmax
    monkeypatch.setattr(attention, "softmax", lambda x, dim=-1: found.append(x.nbytes) or softmax(x, dim))
    MODELS[type(config)](config)(torch.zeros(B, T, dtype=torch.long))
    assert found == [costs.score_bytes(config, B, T, 4)] * config.n_layers


# Memory ---------------------------------------------------------------------------------------------------------------

TRAINED = [  # layers, width, heads, vocabulary, B, T
    (4, 96, 4, 65, 4, 64),
    (3, 128, 4, 512, 2, 64),
    (4, 64, 4, 50, 2, 128),
    (2, 64, 2, 3000, 2, 64),  # most is at the end: logits
]


def _training_peak(model, vocab_size, B, T, checkpointing) -> int:
    """The most bytes alive at once while `train` makes two steps of two micro-batches (B, T) each.

    With two micro-batches the gradients of the first are alive while the second runs, as they are in every longer
    accumulation.
    """
    ids = torch.randint(vocab_size, (B, T + 1), generator=torch.Generator().manual_seed(1))
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    recipe = training.Recipe(steps=2, micro_batches=2, warmup=0, recompute=checkpointing)
    with Alive(model.parameters()) as alive:
        training.train(model, [batch] * 2 * recipe.steps, recipe, progress=False)
    return alive.peak


def _counted_and_measured(kind, sizes, checkpointing) -> tuple[int, int]:
    L, C, H, V, B, T = sizes
    grouped = {"n_kv_heads": H // 2} if kind is LlamaConfig else {}
    config = kind(n_layers=L, d_model=C, n_heads=H, vocab_size=V, context_length=T, **grouped)
    counted = costs.training_bytes(config, B, T, checkpointing=checkpointing)["total"]
    return counted, _training_peak(MODELS[kind](config), V, B, T, checkpointing)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("sizes", TRAINED, ids=str)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_training_takes_the_memory_that_is_counted(kind, sizes, checkpointing):
    counted, measured = _counted_and_measured(kind, sizes, checkpointing)
    assert counted == pytest.approx(measured, rel=0.1)


def test_a_long_text_in_a_narrow_model_takes_more_with_checkpointing():
    """There the T x T matrices are nearly all, and a third one of them, alive for a moment only, is not counted."""
    sizes = (6, 64, 4, 100, 1, 256)
    plain, measured = _counted_and_measured(GPTConfig, sizes, checkpointing=False)
    assert plain == pytest.approx(measured, rel=0.1)
    counted, measured = _counted_and_measured(GPTConfig, sizes, checkpointing=True)
    assert counted < measured < 1.25 * counted
