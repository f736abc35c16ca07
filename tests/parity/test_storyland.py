"""Storyland's numbers are exact: its stories can be listed, counted and parsed, and each mistake in one has a name."""

import itertools
import math

import pytest
import torch

from tfmlib import storyland
from tfmlib.losses import IGNORE
from tfmlib.storyland import END, Scene, Storyland

LAND = Storyland()
TINY = Storyland(("Anna",), ("Tom", "Ben"), ("Rome",), ("red",), ("ball",), ("forest", "river"))


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def stories():
    generator = rng(7)
    return [LAND.story(generator) for _ in range(2000)]


def listed(land):
    """Every story of a small land with its probability, by walking through all that can be drawn."""
    stack = [(Scene(), [], 1.0)]
    while stack:
        scene, words, p = stack.pop()
        if scene.stage == "over":
            yield " ".join(words), p
            continue
        for rule, chance in land._choices(scene):
            slots = storyland._drawn_slots(rule)
            for drawn in itertools.product(*(land._pool(slot, scene) for slot in slots)):
                names = dict(zip(slots, drawn, strict=True))
                ways = math.prod(len(land._pool(slot, scene)) for slot in slots)
                stack.append((rule.after(scene, names), words + land._sentence(rule, scene, names), p * chance / ways))


def test_all_stories_of_a_small_land_sum_to_one_and_have_the_entropy_that_it_states():
    table = dict(listed(TINY))
    n_tokens = {story: len(TINY.encode(story)) - 1 for story in table}  # START is not predicted
    assert len(table) > 10_000
    assert math.isclose(sum(table.values()), 1, rel_tol=1e-9)
    entropy = -sum(p * math.log(p) for p in table.values())
    length = sum(p * n_tokens[story] for story, p in table.items())
    assert math.isclose(TINY.entropy_per_token(), entropy / length, rel_tol=1e-9)
    assert TINY.longest == 1 + max(n_tokens.values())
    for story in list(table)[::997]:
        assert math.isclose(TINY.log_prob(story), math.log(table[story]), rel_tol=1e-9)


def test_no_two_ways_lead_to_one_story():
    table = [story for story, _ in listed(TINY)]
    assert len(table) == len(set(table))


def test_the_floor_is_the_mean_surprise_of_stories(stories):
    surprise = torch.tensor([-LAND.log_prob(story) for story in stories], dtype=torch.float64)
    length = torch.tensor([len(LAND.encode(story)) - 1.0 for story in stories], dtype=torch.float64)
    off = surprise - LAND.entropy_per_token() * length
    assert abs(off.mean()) < 5 * off.std() / len(stories) ** 0.5


def test_the_generator_alone_decides(stories):
    generator = rng(7)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert [LAND.story(generator) for _ in range(5)] == stories[:5]
    assert torch.equal(torch.get_rng_state(), before)


def test_every_story_is_allowed_and_can_be_read_back(stories):
    for story in stories[:300]:
        assert all(verdict.allowed for verdict in LAND.judge(story)), story
        ids = LAND.encode(story)
        assert LAND.decode(ids) == story
        assert (ids[0], ids[-1]) == (1, 2)
        assert LAND.vocabulary[2] == END
    assert max(len(LAND.encode(story)) for story in stories) <= LAND.longest


BEGIN = "Anna lives in Rome. She has a red ball. She goes to the river."
WRONG = {
    "He lives in Rome.": "no such sentence",
    "It rains.": "not here",
    "Anna lives in Rome. He has a red ball.": "'He' should be 'She': it stands for Anna",
    f"{BEGIN} There she meets Tom. She gives her the ball.": "'her' should be 'him': it stands for Tom",
    f"{BEGIN} There she meets Anna.": "'Anna' cannot be the new friend",
    f"{BEGIN} She goes to the river.": "'river' cannot be the new site",
    f"{BEGIN} Anna comes home to Oslo.": "'Oslo' should be 'Rome'",
    f"{BEGIN} Tom comes home to Rome.": "'Tom' should be 'Anna'",
    f"{BEGIN} She loses the blue ball.": "'blue' should be 'red'",
    f"{BEGIN} She finds the ball in the river.": "only a thing that was lost is found",
    f"{BEGIN} She gives her the ball.": "to a friend who was met",
    f"{BEGIN} Anna comes home to Rome. Now Tom has the red ball.": "in which a friend got the thing",
    f"{BEGIN} Anna comes home to Rome. She still has the red ball. It rains.": "not here",
    f"{BEGIN} She goes to the": "the sentence has no end",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_is_named_where_it_stands(text):
    *before, last = LAND.judge(text)
    assert [verdict.reason for verdict in before] == [""] * len(before)
    assert not last.allowed
    assert WRONG[text] in last.reason
    assert LAND.log_prob(text) == -math.inf


def test_one_mistake_counts_once():
    text = f"{BEGIN} She loses the blue ball. She finds the ball in the river. Anna comes home to Rome."
    assert [verdict.allowed for verdict in LAND.judge(text)] == [True, True, True, False, True, True]


def test_a_story_that_stops_early_is_none():
    assert LAND.log_prob(BEGIN) == -math.inf
    assert LAND.log_prob("") == -math.inf


def test_batches_count_no_padding():
    inputs, labels = next(LAND.batches(16, rng()))
    assert inputs.shape == labels.shape
    assert (inputs[:, 0] == 1).all()
    for row, wanted in zip(inputs, labels, strict=True):
        n = int((wanted != IGNORE).sum())
        assert wanted[n - 1] == 2
        assert (wanted[n:] == IGNORE).all()
        assert torch.equal(row[1:n], wanted[: n - 1])


def test_a_word_from_elsewhere_is_an_error():
    with pytest.raises(ValueError, match="'Zoe' is not a word of Storyland"):
        LAND.encode("Zoe lives in Rome.")
