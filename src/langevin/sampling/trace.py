"""How a text came out of masks, step by step: what a viewer shows.

    trace = Trace(mask=model.config.mask_token_id)
    write(..., watched=lambda index, step: trace.steps.append(step))       # of one text

Lists have an entry for each position of the text: prompt, what is written, and what is still open. Step 0
is how it begins, and every step that commits something, or opens it again, is one more.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    tokens: list[int]
    """The mask's id where a position is open."""
    confidence: list[float]
    """The probability that the model gave: to the token where one was committed, 1 where it was given, to
    the likeliest token where a position is open (0 before the first call)."""
    committed: list[int | None]
    """The step that committed the token: 0 where it was given, None where the position is open."""


@dataclass(frozen=True)
class Trace:
    mask: int
    """The id that stands for an open position; the tokenizer does not know it."""
    steps: list[Step] = field(default_factory=list)
