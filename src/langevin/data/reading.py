"""Texts as a classifier reads them: tokens between those that stand around every text, cut to the context,
padded at the right, texts of about the same length together.

This needs numpy alone: exported classifiers run without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Around = tuple[list[int], list[int]]  # tokens before and behind a text


def laid_out(
    texts: Sequence[Any], around: Around, length: int, context: int, pad: int
) -> dict[str, NDArray[Any]]:
    """Tokens of texts between those around them, cut to a context and padded to a length at the right."""
    before, behind = around
    ids = np.full((len(texts), length), pad, np.int64)
    real = np.zeros((len(texts), length), bool)
    for row, text in enumerate(texts):
        whole = np.concatenate([before, text[: context - len(before) - len(behind)], behind])
        ids[row, : len(whole)], real[row, : len(whole)] = whole, True
    return {"input_ids": ids, "attention_mask": real}


def classified(
    texts: Sequence[Any],
    around: Around,
    context: int,
    pad: int,
    batch: int,
    probabilities: Callable[..., NDArray[Any]],
) -> NDArray[Any]:
    """What a function of padded batches says of each of the texts, which are tokens."""
    order = np.argsort([len(text) for text in texts], kind="stable")
    found = []
    for some in np.array_split(order, range(batch, len(order), batch)):
        length = min(context, len(texts[some[-1]]) + sum(map(len, around)))
        rows = laid_out([texts[i] for i in some], around, max(1, length), context, pad)
        found.append(probabilities(**rows))
    return np.concatenate(found)[np.argsort(order)]
