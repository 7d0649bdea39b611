"""`stories`: small stories from a seeded grammar, with their exact probability.

Two or three children meet, go places, find, give, ask for, trade, leave and eat things; the end says who
has what. To predict a story well a model must keep names and genders across sentences, agree verbs and
pronouns with one or several things, and remember who holds what, what lies where, who was refused what
and whether it rained: answers and endings follow from the events with probability 1.

The text determines the choices (each choice shows in the words), so the entropy of the text is that of the
choices and is known exactly: NATS_PER_STORY.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from langevin.data.synthetic.choices import Sample, Teller, sample
from langevin.data.synthetic.story_events import EVENTS, Event
from langevin.data.synthetic.story_frames import begin, finish
from langevin.data.synthetic.story_world import World

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
