"""Traces of texts whose tokens are words, with everything a viewer may meet: white space, wide characters,
what looks like markup, positions that are opened again."""

from __future__ import annotations

import random

from langevin.sampling.text import Step

WORDS = (
    *("Once", " upon", " a", " time", ",", " a", " cat", " saw", " the", " moon", ".", "\n", "\n\n", "It"),
    *(
        " was",
        " 月",
        "が",
        "きれい",
        "[b]",
        "[/b]",
        "[red]",
        "<script>",
        "alert(1)",
        "</script>",
        "&amp;",
        "",
    ),
    *(" ", "∎", "`${x}`", '"', "\\", " dog"),
)
MASK = len(WORDS)


def decode(ids):
    return [WORDS[i] if i < MASK else "?" for i in ids]


def trace(
    steps: int = 12, length: int = 40, *, seed: int = 0, given: int = 4, reopened: float = 0.0
) -> list[Step]:
    """Every step commits about as many positions as every other, and opens some of the others again."""
    drawn = random.Random(seed)
    tokens = [i % MASK if i < given else MASK for i in range(length)]
    confidence = [1.0 if i < given else 0.0 for i in range(length)]
    committed: list[int | None] = [0 if i < given else None for i in range(length)]
    found = []
    for step in range(steps + 1):
        if 0 < step < steps:
            for i in range(given, length):
                if committed[i] is not None and drawn.random() < reopened:
                    tokens[i], confidence[i], committed[i] = MASK, drawn.random(), None
        still = [i for i in range(length) if committed[i] is None]
        for i in drawn.sample(still, -(-len(still) // (steps - step + 1)) if step else 0):
            tokens[i] = i % MASK if not reopened else drawn.randrange(MASK)
            confidence[i], committed[i] = drawn.random(), step
        found.append(Step(list(tokens), list(confidence), list(committed)))
    return found
