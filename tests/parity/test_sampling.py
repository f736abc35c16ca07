"""Sampling chooses what transformers' processors choose, searches what its beam search finds, and draws fairly."""

import itertools
import math

import pytest
import torch
from torch import nn

from tfmlib import sampling
from tfmlib.models import gpt

from ..same import rng

transformers = pytest.importorskip("transformers")

V = 211


def random_logits(seed):
    """Rows of many kinds: flat, peaked, with ties, with tokens that are ruled out, huge and tiny."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(12, V, generator=generator) * torch.tensor([0.01, 1.0, 3.0, 10.0] * 3)[:, None]
    rows[4] = rows[4].round()  # many ties
    rows[5] = 0.0  # nothing but ties
    rows[6, torch.randperm(V, generator=generator)[: V // 2]] = -math.inf
    rows[7] = -math.inf
    rows[7, 17] = 2.0  # one token only
    rows[8] *= 1e4
    rows[9] *= 1e-30
    rows[10, :2] = 1e30
    return rows


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [0.01, 0.3, 0.8, 1.0, 1.7, 100.0])
def test_temperature_is_transformers(temperature, seed):
    logits = random_logits(seed)
    theirs = transformers.TemperatureLogitsWarper(temperature)(None, logits.clone())
    assert torch.equal(sampling.apply_temperature(logits, temperature), theirs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [1, 2, 5, 50, V, 1000])
def test_top_k_is_transformers_but_for_ties(k, seed):
    logits = random_logits(seed)
    theirs = transformers.TopKLogitsWarper(k)(None, logits.clone())
    ours = sampling.keep_top_k(logits, k)
    kept = ours > -math.inf
    assert (kept <= (theirs > -math.inf)).all()  # theirs keeps every token that equals the k-th
    assert torch.equal(ours[kept], logits[kept])
    assert kept.sum(1).tolist() == [min(k, int(n)) for n in (logits > -math.inf).sum(1)]
    without_ties = torch.tensor([row[row > -math.inf].unique().numel() == (row > -math.inf).sum() for row in logits])
    assert without_ties.sum() >= 7
    assert torch.equal(ours[without_ties], theirs[without_ties])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("p", [1e-6, 0.05, 0.3, 0.5, 0.9, 0.99, 1.0])
def test_top_p_is_transformers_but_for_ties(p, seed):
    """Where tokens are equally likely, both keep equally many, and perhaps others of them."""
    logits = random_logits(seed)
    ours = sampling.keep_top_p(logits, p)
    theirs = transformers.TopPLogitsWarper(p)(None, logits.clone())
    for row, mine, other in zip(logits.double(), ours.double(), theirs.double(), strict=True):
        likeliest = row.softmax(-1).sort(descending=True).values
        sums = likeliest.cumsum(-1)
        if (sums - p).abs().min() < 1e-6:  # rounding decides where the sum crosses p
            continue
        n = int((sums - likeliest < p).sum()) if p < 1 else int((row > -math.inf).sum())
        assert int((mine > -math.inf).sum()) == n
        assert torch.equal(mine.sort().values, other.sort().values)  # the same logits, whoever has them


@pytest.mark.parametrize("seed", range(3))
def test_all_three_together_are_transformers(seed):
    """As `generate` of transformers chains them: temperature, top_k, top_p."""
    logits = torch.randn(7, V, generator=torch.Generator().manual_seed(seed)) * 3
    chain = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(40),
            transformers.TopPLogitsWarper(0.9),
        ]
    )
    ours = sampling.keep_top_p(sampling.keep_top_k(sampling.apply_temperature(logits, 0.7), 40), 0.9)
    assert torch.equal(ours, chain(None, logits.clone()))


# Draws ----------------------------------------------------------------------------------------------------------------


def chi_square(counts, probabilities):
    """How far counts are from what probabilities expect, as the chance of being as far off or more."""
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    degrees = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, statistic / 2).item()


def test_the_chi_square_test_sees_a_wrong_distribution():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    fair = torch.multinomial(probabilities, 50_000, replacement=True, generator=rng()).bincount(minlength=4)
    assert chi_square(fair, probabilities) > 1e-3
    assert chi_square(fair, torch.tensor([0.42, 0.28, 0.2, 0.1])) < 1e-3


@pytest.mark.parametrize("seed", range(20))
def test_draws_follow_the_exact_distribution(seed):
    logits = torch.tensor([1.5, 0.0, -math.inf, 0.7, -2.0, 0.1, 3.0])
    generator = torch.Generator().manual_seed(seed)
    drawn = sampling.sample(logits.expand(100_000, 7), generator)
    assert chi_square(drawn.bincount(minlength=7), logits.softmax(-1)) > 1e-3


class Chain(nn.Module):
    """A Markov chain: the logits of the next token are the row of the last."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids):
        return self.table[ids]


@pytest.mark.parametrize("seed", range(5))
def test_generated_texts_follow_the_exact_distribution(seed):
    """All 64 texts of three tokens, after temperature, top-k and top-p, worked out by transformers' processors."""
    table = torch.tensor([[0.1, 1.2, -0.3, 0.8], [2.0, 0.0, 0.4, 0.3], [0.5, 0.6, 0.7, -1.0], [-1.0, 1.0, 1.1, 0.0]])
    how = {"temperature": 0.8, "top_k": 3, "top_p": 0.9}
    chain = [
        transformers.TemperatureLogitsWarper(0.8),
        transformers.TopKLogitsWarper(3),
        transformers.TopPLogitsWarper(0.9),
    ]
    rows = table
    for step in chain:
        rows = step(None, rows)
    p = rows.softmax(-1)
    exact = torch.tensor([p[0, a] * p[a, b] * p[b, c] for a, b, c in itertools.product(range(4), repeat=3)])
    start = torch.zeros(40_000, 1, dtype=torch.long)
    out = sampling.generate(Chain(table), start, 3, generator=torch.Generator().manual_seed(seed), **how)
    texts = out[:, 1] * 16 + out[:, 2] * 4 + out[:, 3]
    assert chi_square(texts.bincount(minlength=64), exact) > 1e-3


# Searches -------------------------------------------------------------------------------------------------------------


def every_text(table, length, eos_id, penalty):
    """All texts of up to `length` new tokens after token 0 that have ended or are full, with their scores."""
    scores = {}
    for text in itertools.product(range(table.shape[1]), repeat=length):
        text = text[: text.index(eos_id) + 1] if eos_id in text else text
        places = itertools.pairwise((0, *text))
        scores[text] = sum(table[a, b].item() for a, b in places) / len(text) ** penalty
    return sorted(scores.items(), key=lambda entry: -entry[1])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.5])
def test_a_wide_beam_finds_the_best_of_all_texts(penalty, seed):
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)
    beams = sampling.beam_search(lambda ids: table[ids[:, -1]], torch.tensor([0]), 5**4, 4, 3, penalty)
    want = every_text(table, 4, 3, penalty)
    assert len(beams) == len(want)
    for (ids, score), (_, best) in zip(beams, want, strict=True):
        assert score == pytest.approx(best, abs=1e-9)
        text = tuple(ids[1:].tolist())
        assert dict(want)[text] == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n_beams", "n_new"), [(1, 9), (3, 7), (5, 12)])
def test_beam_search_is_transformers(n_beams, n_new, seed):
    """Without an end token, where both rank the same candidates: the same texts with the same scores."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_embd=24, n_head=2, n_layer=2, vocab_size=37, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    for weight in theirs.parameters():
        weight.data *= 4  # so that logits differ
    prompt = torch.randint(37, (1, 5))
    found = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=n_beams, num_return_sequences=n_beams,
        max_new_tokens=n_new, do_sample=False, length_penalty=0.0, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip

    def log_probs(ids):
        with torch.no_grad():
            return theirs(ids).logits[:, -1].log_softmax(-1)

    ours = sampling.beam_search(log_probs, prompt[0], n_beams, n_new)
    assert torch.stack([ids for ids, _ in ours]).tolist() == found.sequences.tolist()
    if n_beams > 1:
        assert [score for _, score in ours] == pytest.approx(found.sequences_scores.tolist(), abs=1e-4)


def test_generate_leaves_a_model_as_it_was_after_an_error():
    model = gpt.GPT(gpt.GPTConfig(n_layers=2, d_model=8, n_heads=2, vocab_size=11, context_length=4)).train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="beyond context_length=4"):
        sampling.generate(model, torch.zeros(1, 2, dtype=torch.long), 9, temperature=0)
    assert [module.training for module in model.modules()] == before
