"""What is asked of a sampler and what comes of it, the same for every objective.

Nothing heavy is imported here: `--help` shows the options.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from langevin.errors import UsageError

Ended = Literal["end", "stop", "length"]
MOST_TOKENS = 1_000_000
LEAST_TEMPERATURE = 1e-3


@dataclass(frozen=True)
class Request:
    prompt: str
    seed: int = 0


@dataclass(frozen=True)
class Text:
    """A prompt and what came after it; `ended` says whether by the end-of-text token, a stop string, or
    because it was long enough."""

    prompt: str
    seed: int
    text: str
    tokens: int
    ended: Ended
    calls: int = field(default=0, compare=False)
    """Of the network, since the batch it was written in began."""
    ids: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Of the tokens that were written."""

    def as_dict(self) -> dict[str, Any]:
        """What a reader wants to know."""
        return {name: value for name, value in vars(self).items() if name != "ids"}


@dataclass(frozen=True)
class Step:
    """How far a text has come out of masks: lists with an entry for each of its positions. The first is how
    it begins; every step that commits something, or opens it again, is one more."""

    tokens: list[int]
    """The mask's id where a position is open."""
    confidence: list[float]
    """The probability that the model gave: to the token where one was committed, 1 where it was given, to
    the likeliest token where a position is open (0 before the first call)."""
    committed: list[int | None]
    """The step that committed the token: 0 where it was given, None where the position is open."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a text ends."""

    least_tokens: ClassVar[int] = 1

    tokens: int = 200
    """The most tokens to add."""
    temperature: float = 0.8
    """0: always the likeliest token."""
    top_k: int = 0
    """Choose among the k likeliest; 0: all."""
    top_p: float = 1.0
    """Choose among the fewest that hold this probability."""
    stop: tuple[str, ...] = ()
    """Strings that end a text."""

    def check(self) -> None:
        """Raise where a value makes no sense; asked before anything is written."""
        if not self.least_tokens <= self.tokens <= MOST_TOKENS:
            raise UsageError(
                f"tokens={self.tokens} must be {self.least_tokens} or more and at most {MOST_TOKENS:,}"
            )
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature} must be 0 or more")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise UsageError(
                f"temperature={self.temperature} is too small to divide by",
                f"Use {LEAST_TEMPERATURE} or more, or 0, which always takes the likeliest token.",
            )
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k} must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p} must be above 0 and at most 1")
        if "" in self.stop:
            raise UsageError("an empty string stops nothing", "Give stop strings of a character or more.")

    def requests(self, prompts: Sequence[str], seeds: Iterable[int]) -> list[Request]:
        """A text for each prompt and seed; without prompts, from nothing."""
        seeds = list(seeds)
        return [Request(prompt, seed) for prompt in prompts or ("",) for seed in seeds]


def up_to_stop(text: str, prompt: str, stops: tuple[str, ...]) -> str:
    """The text up to and with the first stop string that ends after the prompt: tokens may overrun."""
    ends = []
    for stop in stops:
        at = text.find(stop, max(0, len(prompt) - len(stop) + 1))
        if at >= 0:
            ends.append(at + len(stop))
    return text[: min(ends)] if ends else text
