"""Storyland: a small language of stories whose entropy is known exactly, so that a model's loss has a floor to reach.

A story names its hero, home and thing once; later sentences must remember them, and call the hero he or she. Which
sentence comes next, and which name, place or thing is new in it, is drawn with known probabilities. All else follows.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfmlib import losses, tokens

PAD, START, END = "<pad>", "<story>", "<end>"
MAX_EVENTS = 6
PRONOUNS = {"She": "He", "she": "he", "her": "him"}  # of a girl, of a boy


@dataclass(frozen=True)
class Scene:
    """What a story has told so far. `stage` is "open", "thing", "event", "last" or "over"; `holder` has the thing."""

    stage: str = "open"
    hero: str | None = None
    home: str | None = None
    colour: str | None = None
    thing: str | None = None
    site: str | None = None
    friend: str | None = None
    holder: str = "hero"  # or "friend", or "nobody"
    thanked: bool = False
    n_events: int = 0

    @property
    def shape(self) -> tuple:
        """All that the chances of what follows depend on: who and where it is makes no difference."""
        return self.stage, self.site is None, self.friend is None, self.holder, self.thanked, self.n_events


@dataclass(frozen=True)
class Rule:
    """A kind of sentence. In `words`, [hero] recalls what the scene knows and [+hero] draws something new.

    `weight` gives its share of the chances in a scene, 0 where it cannot come; `why` says when it can; `then` are the
    changes of the scene, besides what is drawn.
    """

    words: tuple[str, ...]
    weight: Callable[[Scene], float]
    why: str
    then: dict

    def after(self, scene: Scene, drawn: dict[str, str]) -> Scene:
        """The scene after this sentence."""
        n = scene.n_events + (scene.stage == "event")
        return replace(scene, **{"n_events": n, **self.then, **drawn})


def _rule(words: str, weight: Callable[[Scene], float], why: str, **then) -> Rule:
    return Rule(tuple(words.split()), weight, why, then)


def _event(weight: float, when: Callable[[Scene], bool] = lambda scene: True) -> Callable[[Scene], float]:
    """The weight of an event: some room must be left, and `when` must hold."""
    return lambda s: weight if s.stage == "event" and s.n_events < MAX_EVENTS and when(s) else 0.0


RULES = (
    _rule("[+hero] lives in [+home] .", lambda s: s.stage == "open", "it opens a story", stage="thing"),
    _rule("[She] has a [+colour] [+thing] .", lambda s: s.stage == "thing", "it is the second sentence", stage="event"),
    _rule("[She] goes to the [+site] .", _event(3), "up to six events come after the second sentence"),
    _rule("It rains .", _event(1), "up to six events come after the second sentence"),
    _rule("The sun shines .", _event(1), "up to six events come after the second sentence"),
    _rule(
        "There [she] meets [+friend] .",
        _event(3, lambda s: s.site is not None and s.friend is None),
        "the hero meets one friend, and must have gone somewhere before",
    ),
    _rule(
        "[She] gives [her] the [thing] .",
        _event(2, lambda s: s.friend is not None and s.holder == "hero"),
        "the hero gives what the hero has, to a friend who was met",
        holder="friend",
    ),
    _rule(
        "[friend] thanks [hero] .",
        _event(3, lambda s: s.holder == "friend" and not s.thanked),
        "a friend thanks once, for a thing that was given",
        thanked=True,
    ),
    _rule(
        "[She] loses the [colour] [thing] .",
        _event(1, lambda s: s.site is not None and s.holder == "hero"),
        "the hero loses what the hero has, away from home",
        holder="nobody",
    ),
    _rule(
        "[She] finds the [thing] in the [site] .",
        _event(3, lambda s: s.holder == "nobody"),
        "only a thing that was lost is found",
        holder="hero",
    ),
    _rule(
        "[hero] comes home to [home] .",
        lambda s: 2.0 if s.stage == "event" and s.n_events > 0 else 0.0,
        "the hero comes home once, after an event",
        stage="last",
    ),
    _rule(
        "[She] still has the [colour] [thing] .",
        lambda s: s.stage == "last" and s.holder == "hero",
        "it ends a story in which the hero has the thing",
        stage="over",
    ),
    _rule(
        "Now [friend] has the [colour] [thing] .",
        lambda s: s.stage == "last" and s.holder == "friend",
        "it ends a story in which a friend got the thing",
        stage="over",
    ),
    _rule(
        "The [colour] [thing] is gone .",
        lambda s: s.stage == "last" and s.holder == "nobody",
        "it ends a story in which the thing is lost",
        stage="over",
    ),
)


@dataclass(frozen=True)
class Verdict:
    """Whether the grammar allows a sentence where it stands, and if not, why."""

    sentence: str
    allowed: bool
    reason: str = ""


@dataclass(frozen=True)
class Storyland:
    """The language with its names and things. Smaller ones can be listed in full, story by story.

    >>> land = Storyland()
    >>> round(land.entropy_per_token(), 4)
    0.4248
    >>> [verdict.reason for verdict in land.judge("Anna lives in Rome. He has a red ball.")]
    ['', "'He' should be 'She': it stands for Anna"]
    """

    girls: tuple[str, ...] = ("Anna", "Mia", "Lena", "Rosa", "Nora", "Ida")
    boys: tuple[str, ...] = ("Tom", "Ben", "Leo", "Max", "Paul", "Finn")
    homes: tuple[str, ...] = ("Rome", "Oslo", "Lima", "Bonn", "Cairo", "Quito", "Delhi", "Perth")
    colours: tuple[str, ...] = ("red", "blue", "green", "white", "yellow", "brown")
    things: tuple[str, ...] = ("ball", "kite", "boat", "drum", "book", "hat", "cup", "key")
    sites: tuple[str, ...] = ("forest", "river", "market", "garden", "school", "bridge")

    # Words and ids ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """All words, by id. PAD is 0, START 1 and END 2."""
        words = {*self.girls, *self.boys, *self.homes, *self.colours, *self.things, *self.sites}
        words |= {word for rule in RULES for word in rule.words if word[0] != "["}
        words |= {*PRONOUNS, *PRONOUNS.values()}
        return (PAD, START, END, *sorted(words))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.vocabulary)}

    def encode(self, text: str) -> list[int]:
        """A story's ids, with START before and END after it. Raises ValueError for a word that is not in Storyland."""
        words = split_words(text)
        for word in words:
            if word not in self._ids:
                raise ValueError(f"{word!r} is not a word of Storyland")
        return [1, *(self._ids[word] for word in words), 2]

    def decode(self, ids) -> str:
        """The text of the ids up to END, as prose: no START, no PAD, and no space before a full stop."""
        words = itertools.takewhile(lambda word: word != END, (self.vocabulary[int(i)] for i in ids))
        return " ".join(word for word in words if word not in (PAD, START)).replace(" .", ".")

    # Telling stories --------------------------------------------------------------------------------------------------

    def story(self, generator: torch.Generator) -> str:
        """A story, drawn with the generator."""
        draws = iter(torch.rand(64, generator=generator, dtype=torch.float64).tolist())
        scene, words = Scene(), []
        while scene.stage != "over":
            rules, chances = zip(*self._choices(scene), strict=True)
            rule = rules[_pick(chances, next(draws))]
            drawn: dict[str, str] = {}
            for slot in _drawn_slots(rule):
                pool = self._pool(slot, scene)
                drawn[slot] = pool[int(next(draws) * len(pool))]
            words += self._sentence(rule, scene, drawn)
            scene = rule.after(scene, drawn)
        return " ".join(words).replace(" .", ".")

    def batches(self, B: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """New stories without end: pairs inputs, labels, (B, T) each, T as the longest of the B stories needs.

        Every story begins at START, and its last label is END; the labels of padding do not count.
        """
        while True:
            ids, is_token = tokens.pad_batch([self.encode(self.story(generator)) for _ in range(B)], pad_id=0)
            yield losses.shift_labels(ids, is_token)

    # What is known about them -----------------------------------------------------------------------------------------

    @functools.cached_property
    def longest(self) -> int:
        """The most ids that a story has, START and END included."""
        return 2 + self._most_words(Scene(), {})

    def entropy_per_token(self) -> float:
        """The least mean loss that any model can reach, in nats a token: exact, since all chances are known.

        The entropy of a whole story over the tokens that a story has on average, END included and START not.
        """
        entropy, length = self._outlook(Scene(), {})
        return entropy / (length + 1)

    def log_prob(self, text: str) -> float:
        """The logarithm of a story's probability; -inf for what is no whole story of Storyland."""
        scene, total = Scene(), 0.0
        for sentence in _sentences(split_words(text)):
            for rule, chance in self._choices(scene):
                drawn = self._match(rule, scene, sentence)
                if drawn is not None:
                    ways = math.prod(len(self._pool(slot, scene)) for slot in drawn)
                    total += math.log(chance / ways)
                    scene = rule.after(scene, drawn)
                    break
            else:
                return -math.inf
        return total if scene.stage == "over" else -math.inf

    def judge(self, text: str) -> list[Verdict]:
        """A verdict on each sentence of a story: is it allowed here, and if not, what is wrong.

        After a sentence that is wrong the story goes on as if it had been right, so that one mistake counts once.
        """
        scene, verdicts = Scene(), []
        for sentence in _sentences(split_words(text)):
            reason, scene = self._examine(sentence, scene)
            verdicts.append(Verdict(" ".join(sentence).replace(" .", "."), not reason, reason))
        return verdicts

    def _examine(self, sentence: list[str], scene: Scene) -> tuple[str, Scene]:
        """What is wrong with a sentence, "" if nothing is, and the scene after it."""
        if sentence[-1] != ".":
            return "the sentence has no end", scene
        alike = [rule for rule in RULES if self._looks_like(rule, sentence)]
        if not alike:
            return "the grammar has no such sentence", scene
        possible = [rule for rule in alike if rule.weight(scene)]
        if not possible:
            return f"not here: {alike[0].why}", scene
        rule = possible[0]
        drawn = self._match(rule, scene, sentence)
        if drawn is not None:
            return "", rule.after(scene, drawn)
        faults, drawn = [], {}
        for pattern, word in zip(rule.words, sentence, strict=True):
            slot = pattern.strip("[+]")
            if pattern.startswith("[+"):
                pool = self._pool(slot, scene)
                drawn[slot] = word if word in pool else pool[0]
                if word not in pool:
                    faults.append(f"{word!r} cannot be the new {slot} here")
            elif pattern[0] == "[" and word != self._recall(slot, scene):
                who = {"She": scene.hero, "she": scene.hero, "her": scene.friend}.get(slot)
                told = f"it stands for {who}" if who else f"the story said so about the {slot}"
                faults.append(f"{word!r} should be {self._recall(slot, scene)!r}: {told}")
        return "; ".join(faults), rule.after(scene, drawn)

    # The grammar at work ----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _known_choices(self) -> dict[tuple, list[tuple[Rule, float]]]:
        return {}

    def _pool(self, slot: str, scene: Scene) -> tuple[str, ...]:
        """What may be drawn: a friend is not the hero, and a new site is not the one where the hero is."""
        names = self.girls + self.boys
        pools = {"hero": names, "friend": names, "home": self.homes, "colour": self.colours}
        pool = {**pools, "thing": self.things, "site": self.sites}[slot]
        taken = {"friend": scene.hero, "site": scene.site}.get(slot)
        return tuple(word for word in pool if word != taken)

    def _recall(self, slot: str, scene: Scene) -> str | None:
        """The word that the scene prescribes."""
        if slot not in PRONOUNS:
            return getattr(scene, slot)
        person = scene.friend if slot == "her" else scene.hero
        return slot if person in self.girls else PRONOUNS[slot]

    def _choices(self, scene: Scene) -> list[tuple[Rule, float]]:
        """The sentences that may come, with their probabilities. Worked out once for each shape of a scene."""
        if scene.shape not in self._known_choices:
            weights = [(rule, float(rule.weight(scene))) for rule in RULES]
            total = sum(weight for _, weight in weights)
            self._known_choices[scene.shape] = [(rule, weight / total) for rule, weight in weights if weight]
        return self._known_choices[scene.shape]

    def _sentence(self, rule: Rule, scene: Scene, drawn: dict[str, str]) -> list[str]:
        known = rule.after(scene, drawn)
        return [self._recall(word.strip("[+]"), known) if word[0] == "[" else word for word in rule.words]

    def _match(self, rule: Rule, scene: Scene, sentence: list[str]) -> dict[str, str] | None:
        """What a sentence draws if it follows a rule in this scene; None if it does not."""
        if len(sentence) != len(rule.words):
            return None
        drawn = {
            pattern.strip("[+]"): word
            for pattern, word in zip(rule.words, sentence, strict=True)
            if pattern.startswith("[+")
        }
        if any(word not in self._pool(slot, scene) for slot, word in drawn.items()):
            return None
        return drawn if self._sentence(rule, scene, drawn) == sentence else None

    def _looks_like(self, rule: Rule, sentence: list[str]) -> bool:
        """Whether a sentence has a rule's form, with any word of the right kind in each slot."""

        def fits(pattern: str, word: str) -> bool:
            if pattern[0] != "[":
                return word == pattern
            slot = pattern.strip("[+]")
            return word in ((slot, PRONOUNS[slot]) if slot in PRONOUNS else self._pool(slot, Scene()))

        return len(sentence) == len(rule.words) and all(map(fits, rule.words, sentence))

    def _branches(self, scene: Scene) -> Iterator[tuple[Rule, float, int, Scene]]:
        """Each sentence that may come, its probability, the number of its equally likely forms, and what follows."""
        for rule, chance in self._choices(scene):
            drawn = {slot: self._pool(slot, scene)[0] for slot in _drawn_slots(rule)}  # any will do
            ways = math.prod(len(self._pool(slot, scene)) for slot in drawn)
            yield rule, chance, ways, rule.after(scene, drawn)

    def _outlook(self, scene: Scene, known: dict[tuple, tuple[float, float]]) -> tuple[float, float]:
        """The entropy of what follows a scene, in nats, and how many words follow on average."""
        if scene.stage == "over":
            return 0.0, 0.0
        if scene.shape not in known:
            entropy = length = 0.0
            for rule, chance, ways, after in self._branches(scene):
                more_entropy, more_words = self._outlook(after, known)
                entropy += chance * (math.log(ways) - math.log(chance) + more_entropy)
                length += chance * (len(rule.words) + more_words)
            known[scene.shape] = entropy, length
        return known[scene.shape]

    def _most_words(self, scene: Scene, known: dict[tuple, int]) -> int:
        if scene.stage == "over":
            return 0
        if scene.shape not in known:
            branches = self._branches(scene)
            known[scene.shape] = max(len(rule.words) + self._most_words(after, known) for rule, _, _, after in branches)
        return known[scene.shape]


def split_words(text: str) -> list[str]:
    """The words of a story; a full stop is one too.

    >>> split_words("It rains.")
    ['It', 'rains', '.']
    """
    return re.findall(r"[^\s.]+|\.", text)


def _sentences(words: list[str]) -> Iterator[list[str]]:
    sentence: list[str] = []
    for word in words:
        sentence.append(word)
        if word == ".":
            yield sentence
            sentence = []
    if sentence:
        yield sentence


def _drawn_slots(rule: Rule) -> list[str]:
    return [word.strip("[+]") for word in rule.words if word.startswith("[+")]


def _pick(chances: tuple[float, ...], draw: float) -> int:
    """The index that a draw from 0 to 1 falls on."""
    for i, bound in enumerate(itertools.accumulate(chances)):
        if draw < bound:
            return i
    return len(chances) - 1
