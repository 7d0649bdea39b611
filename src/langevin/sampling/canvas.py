"""Where a text starts that comes out of masks, and what is read from it when it is whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langevin.data.tokenizers import encode_prompt
from langevin.errors import UsageError
from langevin.sampling.text import Ended, Request, Text, up_to_stop

if TYPE_CHECKING:
    from langevin.sampling.masked import MaskedSampling

GAP = re.compile("_{3,}")
GAP_TOKENS = 16


@dataclass(frozen=True)
class Canvas:
    """Where a text starts: tokens with the mask's id where they are open, and which of these are asked for
    (the others stay open: the model is used to a whole context)."""

    tokens: list[int]
    asked: list[bool]
    prompt: int = 0  # tokens before the first that is asked for


def begun(
    tokenizer: Any,
    request: Request,
    sampling: MaskedSampling,
    config: Any,
    data: Mapping[str, Any] | None,
    context: int | None,
    block: int | None,
) -> Canvas:
    """What is given of a text, with masks where it is to be written, as long as the context; in blocks, up
    to the end of the last one."""
    mask = config.vocab_size - 1
    before, *after = GAP.split(request.prompt) if sampling.infill else (request.prompt,)
    tokens = encode_prompt(tokenizer, before.rstrip() if after else before, data)
    given, prompt = [True] * len(tokens), len(tokens)
    asked = sampling.tokens or (GAP_TOKENS * len(after) if after else (context or 0) - prompt)
    if asked < max(1, len(after)):
        where = f"in {len(after)} gaps" if after else f"after a prompt of {prompt}"
        raise UsageError(
            f"{max(0, asked)} tokens are to be written {where}", "Give more --tokens, or a shorter prompt."
        )
    parts = after or [""]
    for i, text in enumerate(parts):
        masks = (i + 1) * asked // len(parts) - i * asked // len(parts)
        last = i + 1 == len(parts)
        ids = encode_prompt(tokenizer, text if last else text.rstrip(), {}) if text.strip() else []
        tokens += [mask] * masks + ids
        given += [False] * masks + [True] * len(ids)
    if block is not None and any(given[(prompt // block + 1) * block :]):
        raise UsageError(
            f"in blocks of {block} tokens a gap is filled without what is given in later blocks",
            "Fill a shorter gap, or use a model without blocks.",
        )
    rest = max(0, (context or 0) - len(tokens)) if block is None else -len(tokens) % block
    return Canvas(tokens + [mask] * rest, [not known for known in given] + [False] * rest, prompt)


def ended(
    tokenizer: Any,
    request: Request,
    canvas: Canvas,
    tokens: list[int],
    ends: Sequence[int],
    sampling: MaskedSampling,
    calls: int,
) -> Text:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    why: Ended = "end" if tokens[-1] in ends and canvas.asked[len(tokens) - 1] else "length"
    if sampling.stop:
        cut = up_to_stop(
            text, tokenizer.decode(tokens[: canvas.prompt], skip_special_tokens=True), sampling.stop
        )
        text, why = (cut, "stop") if cut != text else (text, why)
    new = tuple(token for token, asked in zip(tokens, canvas.asked, strict=False) if asked)
    return Text(request.prompt, request.seed, text, len(new), why, calls, new)
