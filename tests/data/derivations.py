"""What can be known of a random program exactly, from the code that wrote the text itself.

A program is read backwards (`derivations`: every sequence of choices that writes a given text) and averaged
exactly (`expected_nats`).
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from langevin.data.synthetic.choices import Choice, S, Start, Step, T, Teller
from langevin.data.synthetic.story_world import Spot, World


def derivations(start: Start[S], step: Step[S], text: str) -> list[tuple[Choice, ...]]:
    """Every sequence of choices with which the program writes exactly this text.

    Depth first: a branch ends where what is said differs from the text.
    """
    found = []
    branches: list[_Branch] = [_Branch(start, 0, (), ())]
    while branches:
        branch = branches.pop()
        reader = _Reader(text, branch.at, branch.prefix)
        try:
            state = branch.run(reader)
        except _Differs:
            continue
        except _Undecided as undecided:
            branches += [
                branch._replace(prefix=(*branch.prefix, index)) for index in range(undecided.options)
            ]
            continue
        choices = (*branch.choices, *reader.choices)
        if state is not None:
            branches.append(_Branch(partial(_swapped, step, state), reader.at, choices, ()))
        elif reader.at == len(text):
            found.append(choices)
    return found


class _Branch(NamedTuple):
    """A part of the program to be read from `at`, after the choices made, with the first choices in it."""

    run: Callable[[Teller], Any]
    at: int
    choices: tuple[Choice, ...]
    prefix: tuple[int, ...]


def _swapped(step: Step[S], state: S, teller: Teller) -> S | None:
    return step(teller, state)


class _Differs(Exception):
    """The program said something that the text does not."""


class _Undecided(Exception):
    def __init__(self, options: int) -> None:
        self.options = options


class _Reader(Teller):
    """Takes the choices of a prefix and compares what is said with the text."""

    def __init__(self, text: str, at: int, prefix: tuple[int, ...]) -> None:
        self.text, self.at, self.prefix = text, at, prefix
        self.choices: list[Choice] = []

    def say(self, *pieces: str) -> None:
        for piece in pieces:
            if not self.text.startswith(piece, self.at):
                raise _Differs
            self.at += len(piece)

    def choose(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        count = len(options)
        if count == 1:
            return options[0]
        if len(self.choices) == len(self.prefix):
            raise _Undecided(count)
        index = self.prefix[len(self.choices)]
        probability = 1 / count if weights is None else weights[index] / sum(weights)
        self.choices.append(Choice(index, probability))
        return options[index]


def expected_nats(
    start: Start[S],
    step: Step[S],
    outline: Callable[[S], Hashable],
    representative: Callable[[int], int] = lambda count: 0,
) -> float:
    """The exact entropy, in nats, of the program that starts and then steps until the state is None.

    V(s) = Σ_path p(path | s) ( Σ_choices on it H(choice) + V(s') ), over the paths of `choose` through one
    step. States with the same `outline` must have the same V and are worked out once. Of a `vary` only its
    own entropy counts; `representative` says which of so many options stands for all.
    """
    values: dict[Hashable, float] = {}

    def value(state: S | None) -> float:
        if state is None:
            return 0.0
        key = outline(state)
        if key not in values:
            values[key] = average(_paths(partial(_swapped, step, state), representative))
        return values[key]

    def average(paths: Iterator[_Path]) -> float:
        return math.fsum(path.probability * (path.nats + value(path.result)) for path in paths)

    return average(_paths(start, representative))


class _Path(NamedTuple):
    probability: float
    nats: float
    result: Any


def _paths(program: Callable[[Teller], Any], representative: Callable[[int], int]) -> Iterator[_Path]:
    """Every way through the `choose`s of a program, by counting up the last one that can be."""
    prefix: list[int] = []
    while True:
        walker = _Walker(prefix, representative)
        result = program(walker)
        yield _Path(walker.probability, walker.nats, result)
        taken = walker.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        prefix = [index for index, _ in taken]
        prefix[-1] += 1


class _Walker(Teller):
    """Takes the choices of a prefix, then first options, adding up probability and entropy."""

    def __init__(self, prefix: list[int], representative: Callable[[int], int]) -> None:
        self.prefix, self.representative = prefix, representative
        self.taken: list[tuple[int, int]] = []
        self.probability = 1.0
        self.nats = 0.0

    def say(self, *pieces: str) -> None:
        pass

    def choose(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        count = len(options)
        if count == 1:
            return options[0]
        index = self.prefix[len(self.taken)] if len(self.taken) < len(self.prefix) else 0
        self.taken.append((index, count))
        self.nats += _entropy(count, weights)
        self.probability *= 1 / count if weights is None else weights[index] / sum(weights)
        return options[index]

    def vary(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        self.nats += _entropy(len(options), weights)
        return options[self.representative(len(options))]


def _entropy(count: int, weights: Sequence[float] | None) -> float:
    if weights is None:
        return math.log(count)
    total = sum(weights)
    return math.log(total) - sum([w * math.log(w) for w in weights]) / total


def outline(world: World) -> Hashable:
    """All that the entropy of the rest of a story depends on.

    That is the world up to renaming: which person, toy or place is which does not matter, nor does what
    changes only the words of the ending (the shape, the wish).
    """
    kept: dict[Spot, list[bool]] = {}
    for thing, spot in zip(world.things, world.spots, strict=True):
        kept.setdefault(spot, []).append(thing.food)

    def at(spot: Spot) -> tuple[bool, ...]:
        return tuple(sorted(kept.get(spot, ())))

    lost = at(Spot("lost"))
    people = sorted(
        (i == world.topic, bool(lost) and i == 0, at(Spot("held", i)), at(Spot("eaten", i)))
        for i in range(len(world.people))
    )
    places = sorted((i == world.here, at(Spot("lying", i))) for i in range(len(world.places)))
    return (tuple(people), tuple(places), lost, world.rained, world.events)
