"""Text as it appears out of noise: live in a terminal, and afterwards as a player in one file of HTML.

The player's file holds its styles, its script and all steps, and its content security policy forbids any
request. A step is kept as what changed since the one before it, and all of them packed (zlib, base64).
"""

from __future__ import annotations

import base64
import json
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.console import Console, Group
from rich.live import Live as Screen
from rich.text import Text

from langevin.sampling.text import Step

Decode = Callable[[Sequence[int]], Sequence[str]]
"""What stands at each position, given the ids of all; what it says of open positions is not shown."""

FRAME_SECONDS = 0.05
BAR = 24
BLOCK = " ░░░"
END = "∎"
BROKEN = "\N{REPLACEMENT CHARACTER}"
BYTES = 4  # of a character in UTF-8, at most


def pieces(tokenizer: Any) -> Decode:
    """How a tokenizer writes each position. A character of several tokens stands at the first of them; the
    end of a text is an END, but for the one that a text begins after."""
    special = set(tokenizer.all_special_ids)
    singles = (
        (tokenizer.decode([i]), i) for i in sorted(tokenizer.get_vocab().values()) if i not in special
    )
    # A word keeps the space before it only when another one stands there.
    first = [
        next(i for text, i in singles if len(text) == 1 and text.isprintable() and text not in " \ufffd")
    ]
    skipped = len(tokenizer.decode(first))

    def joined(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode([*first, *ids], clean_up_tokenization_spaces=False)
        return text[skipped:]

    @cache
    def alone(token: int) -> str:
        return END if token in special else joined([token])

    def decode(ids: Sequence[int]) -> list[str]:
        found = ["" if at == 0 and token in special else alone(token) for at, token in enumerate(ids)]
        for at in range(len(found)):
            for end in range(at + 2, min(at + BYTES, len(found)) + 1):
                if not all(BROKEN in word for word in found[at:end]):
                    break
                if BROKEN not in (whole := joined(ids[at:end])):
                    found[at:end] = [whole] + [""] * (end - at - 1)
                    break
        return found

    return decode


def up_to(step: Step, decode: Decode, text: str) -> Step:
    """Without the tokens behind a text that was cut at a stop string."""
    words, end = [word.removesuffix(END) for word in decode(step.tokens)], 1
    while end < len(words) and len("".join(words[:end]).lstrip()) < len(text.lstrip()):
        end += 1
    return Step(step.tokens[:end], step.confidence[:end], step.committed[:end])


class Live:
    """A text in the terminal while it is written.

    with Live(decode, console) as live:
        write(..., watched=lambda index, step: live.show(step))
    """

    def __init__(self, decode: Decode, console: Console) -> None:
        self.decode, self.console = decode, console
        self.screen = Screen(console=console, auto_refresh=False, vertical_overflow="crop")
        self.steps = 0
        self.last: Step | None = None
        self.drawn: Step | None = None
        self.due = 0.0

    def __enter__(self) -> Live:
        self.screen.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._draw(fresh=False)
        self.screen.stop()

    def show(self, step: Step) -> None:
        """The next step, of which the first is how the text begins."""
        self.steps += self.last is not None
        self.last = step
        if time.monotonic() >= self.due:
            self._draw(fresh=True)
            self.due = time.monotonic() + FRAME_SECONDS

    def _draw(self, fresh: bool) -> None:
        if self.last is not None:
            text = self._text(self.last, self.drawn if fresh else None)
            self.screen.update(Group(self._progress(self.last), Text(), text), refresh=True)
            self.drawn = self.last

    def _progress(self, step: Step) -> Text:
        still = sum(one is None for one in step.committed)
        done = BAR if not still else BAR * (len(step.committed) - still) // len(step.committed)
        told = f"  step {self.steps} · {still} open"
        return Text.assemble(("━" * done, "cyan"), ("━" * (BAR - done), "dim"), told, no_wrap=True)

    def _text(self, step: Step, before: Step | None) -> Text:
        """before: the step drawn last; what was committed after it is fresh."""
        text = Text(overflow="fold")
        for at, one in enumerate(standing(step, self.decode)):
            if one is None:
                text.append(BLOCK, "dim")
            else:
                word, committed = plain(one[0]), one[1]
                fresh = before is not None and before.committed[at : at + 1] != [committed]
                bare = word.lstrip(" ")
                text.append(word[: len(word) - len(bare)])
                text.append(bare, "black on cyan" if fresh else "")
        return text


def plain(word: str) -> str:
    """What moves a terminal's cursor or changes its colours is shown as broken."""
    return "".join(c if c == "\n" or unicodedata.category(c) != "Cc" else BROKEN for c in word)


def standing(step: Step, decode: Decode) -> list[tuple[str, int] | None]:
    """The word at each position and the step that committed it, or None where it is open."""
    written = zip(decode(step.tokens), step.committed, strict=True)
    return [None if committed is None else (word, committed) for word, committed in written]


def changes(steps: Sequence[Step], decode: Decode, words: dict[str, int]) -> Iterator[list[int]]:
    """For each step, (position, word, confidence in percent) of every position that the step changed, one
    after another; an open position has the word -1. New words join the list, at the next number.

    The last step says how long the text is; what stood after its end for a while is left out.
    """
    length = len(steps[-1].tokens)
    before: list[tuple[str, int] | None] = [None] * length
    for step in steps:
        now = (standing(step, decode) + [None] * length)[:length]
        changed: list[int] = []
        for at, (old, new) in enumerate(zip(before, now, strict=True)):
            if new is None and old is not None:
                changed += at, -1, 0
            elif new is not None and new != old:
                changed += at, words.setdefault(new[0], len(words)), round(100 * step.confidence[at])
        yield changed
        before = now


def player(traces: Sequence[Sequence[Step]], decode: Decode, title: str, facts: Mapping[str, Any]) -> str:
    """One file of HTML that plays how texts were written, by the steps of each. facts: what a reader should
    know, by name."""
    words: dict[str, int] = {}
    samples = [
        {"length": len(trace[-1].tokens), "steps": list(changes(trace, decode, words))} for trace in traces
    ]
    packed = zlib.compress(json.dumps([list(words), samples]).encode(), 9)
    finals = [[one for one in standing(trace[-1], decode) if one is not None] for trace in traces]
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    source = files("langevin.sampling").joinpath("player.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=title, facts=facts, finals=finals, packed=base64.b64encode(packed).decode()
    )
