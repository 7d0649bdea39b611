"""Random programs that write text, and the probability of what they write.

A program is a start and a step: functions of a `Teller`, which they ask to choose and tell what to say.
`start` returns a state, and `step` goes from state to state until there is none.

If every text has one derivation, text and choices determine each other, and by the chain rule

    H(text) = H(choices) = E[ Σ_k -ln p(choice_k | choices before it) ].
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
S = TypeVar("S")


class Choice(NamedTuple):
    """The option taken and its probability among those there were."""

    taken: int
    probability: float


class Teller:
    """What a program may do: say text, `choose` what later choices depend on, `vary` what they do not.

    Choices are drawn from the generator, of which only `random()` is used. `vary` is for wording. It
    promises that the number and the probabilities of all later choices are the same whichever option is
    taken, so that an exact average need not branch on it.
    """

    def __init__(self, generator: random.Random) -> None:
        self.draw = generator.random
        self.pieces: list[str] = []
        self.choices: list[Choice] = []

    def say(self, *pieces: str) -> None:
        self.pieces.extend(pieces)

    def choose(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        count = len(options)
        if count == 1:
            return options[0]
        if weights is None:
            index = int(self.draw() * count)
            self.choices.append(Choice(index, 1 / count))
            return options[index]
        total = sum(weights)
        left = self.draw() * total
        index = 0
        while index < count - 1 and left >= weights[index]:
            left -= weights[index]
            index += 1
        self.choices.append(Choice(index, weights[index] / total))
        return options[index]

    def vary(self, options: Sequence[T], weights: Sequence[float] | None = None) -> T:
        return self.choose(options, weights)


Start: TypeAlias = Callable[[Teller], S]
Step: TypeAlias = Callable[[Teller, S], S | None]


@dataclass(frozen=True)
class Sample:
    """A text and the choices that wrote it."""

    text: str
    choices: tuple[Choice, ...]

    @property
    def nats(self) -> float:
        """-ln p of the text."""
        return -math.fsum(math.log(choice.probability) for choice in self.choices)


def sample(start: Start[S], step: Step[S], generator: random.Random) -> Sample:
    """Run a program with choices drawn from the generator."""
    teller = Teller(generator)
    state: S | None = start(teller)
    while state is not None:
        state = step(teller, state)
    return Sample("".join(teller.pieces), tuple(teller.choices))
