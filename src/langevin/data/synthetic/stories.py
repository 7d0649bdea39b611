"""`stories`: small stories from a seeded grammar, with their exact probability.

Two or three children meet, go places, find, give, ask for, trade, leave and eat things; the end says who
has what. To predict a story well a model must keep names and genders across sentences, agree verbs and
pronouns with one or several things, and remember who holds what, what lies where, who was refused what
and whether it rained: answers and endings follow from the events with probability 1.

The text determines the choices (each choice shows in the words), so the entropy of the text is that of the
choices and is known exactly: NATS_PER_STORY.
"""

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

from langevin.data.synthetic.choices import Sample, Teller, sample
from langevin.data.synthetic.story_events import EVENTS, Event
from langevin.data.synthetic.story_frames import begin, finish
from langevin.data.synthetic.story_world import World
from langevin.data.texts import SPLITS, Texts
from langevin.errors import UsageError

ENDS = (0.0, 0.0, 0.0, 0.25, 0.5, 1.0)
"""The probability that the story ends after so many events."""

NATS_PER_STORY = 46.086605836999624
"""The exact entropy of a story: the mean of its -ln p over the whole grammar."""


def step(teller: Teller, world: World) -> World | None:
    """One more event, or the ending (None)."""
    end = ENDS[world.events]
    if end == 1 or (end > 0 and teller.choose((True, False), (end, 1 - end))):
        finish(teller, world)
        return None
    events, weights, ways = _possible(world)
    index = teller.choose(range(len(events)), weights)
    return events[index].tell(teller, world, *teller.choose(ways[index]))


@lru_cache(maxsize=1)
def _possible(world: World) -> tuple[list[Event], list[float], list[list[tuple[Any, ...]]]]:
    """The events that can happen now, their weights and the ways each can."""
    found = [(event, ways) for event in EVENTS if (ways := event.possible(world))]
    return [event for event, _ in found], [event.weight for event, _ in found], [ways for _, ways in found]


def stories(count: int, seed: int, split: str) -> Iterator[Sample]:
    """The first `count` stories of a seed and split. Splits draw from unrelated generators."""
    generator = random.Random(f"langevin stories {seed} {split}")
    return (sample(begin, step, generator) for _ in range(count))


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """sha256 of some stories: another one for another grammar."""
    return hashlib.sha256(
        "\n".join(one.text for one in stories(200, 0, "fingerprint")).encode()
    ).hexdigest()


@dataclass(frozen=True)
class Stories:
    """As a source: how many stories, from which seed."""

    seed: int = 0
    train: int = 20_000
    valid: int = 1_000
    test: int = 1_000

    about: ClassVar[str] = "small stories from a seeded grammar whose entropy is known"
    tokenizer: ClassVar[str] = "bpe-768"
    """Room for every word of the grammar to become one token."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "seed" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"stories: {name} must be a whole number from {least} on, not {value!r}")

    def identity(self) -> dict[str, Any]:
        return {"grammar_sha256": fingerprint(), "settings": asdict(self)}

    def read(self) -> Texts:
        told = {split: stories(getattr(self, split), self.seed, split) for split in SPLITS}
        known = {split: [(one.text, one.nats) for one in some] for split, some in told.items()}
        return Texts(
            {split: partial(iter, [text for text, _ in some]) for split, some in known.items()},
            documents=True,
            facts={"split": "unrelated seeds", "nats_per_story": NATS_PER_STORY},
            nats={split: math.fsum(nats for _, nats in some) for split, some in known.items()},
        )
