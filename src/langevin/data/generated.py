"""Texts that are generated: `stories`, as a source with settings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from langevin.data.texts import SPLITS, Texts
from langevin.errors import UsageError


@dataclass(frozen=True)
class Stories:
    """How many stories of the grammar in `synthetic/stories.py`, from which seed."""

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
        from langevin.data.synthetic.stories import fingerprint

        return {"grammar_sha256": fingerprint(), "settings": asdict(self)}

    def read(self) -> Texts:
        from langevin.data.synthetic.stories import NATS_PER_STORY, stories

        texts: dict[str, list[str]] = {split: [] for split in SPLITS}
        nats: dict[str, list[float]] = {split: [] for split in SPLITS}
        for split in SPLITS:
            for story in stories(getattr(self, split), self.seed, split):
                texts[split].append(story.text)
                nats[split].append(story.nats)
        return Texts(
            {split: partial(iter, some) for split, some in texts.items()},
            documents=True,
            facts={"split": "unrelated seeds", "nats_per_story": NATS_PER_STORY},
            nats={split: math.fsum(some) for split, some in nats.items()},
        )
