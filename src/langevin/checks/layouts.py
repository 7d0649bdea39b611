"""Batches of documents and padding: what they hold must come out as if each document were alone.

B batch, L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Each row is a list of documents by their lengths; a negative length is padding."""

    name: str
    rows: tuple[tuple[int, ...], ...]

    @property
    def segments(self) -> Iterator[tuple[int, slice]]:
        """The row and place of every document."""
        for row, lengths in enumerate(self.rows):
            start = 0
            for length in lengths:
                if length > 0:
                    yield row, slice(start, start + length)
                start += abs(length)

    @property
    def real_BL(self) -> Tensor:
        """True where a token belongs to a document."""
        real = torch.zeros(len(self.rows), sum(map(abs, self.rows[0])), dtype=torch.bool)
        for row, place in self.segments:
            real[row, place] = True
        return real

    @property
    def masks(self) -> dict[str, Any]:
        """What a module is told: padding, and documents by their ids. Padding has the id of a document
        beside it, so that only the mask tells it apart."""
        told: dict[str, Any] = {}
        if any(length < 0 for row in self.rows for length in row):
            told["key_padding_mask"] = self.real_BL
        if any(sum(length > 0 for length in row) > 1 for row in self.rows):
            told["documents"] = torch.zeros(self.real_BL.shape, dtype=torch.long)
            for row, place in self.segments:
                told["documents"][row, place.start :] += 1
            told["documents"].clamp_min_(1)
        return told

    def without_padding(self, x_BLW: Tensor) -> Tensor:
        """x, and 0 at padding: what comes out there is nobody's business."""
        return torch.where(self.real_BL[..., None], x_BLW, 0.0)

    @property
    def one_row(self) -> Layout:
        return Layout(f"{self.name}, one row", self.rows[1:2])


def layouts(length: int) -> list[Layout]:
    third, half = length // 3, length // 2
    return [
        Layout("plain", ((length,),) * 3),
        Layout("left-padded", ((length,), (-1, length - 1), (-third, length - third))),
        Layout("right-padded", ((length,), (length - 1, -1), (length - third, -third))),
        Layout("packed", ((length,), (5, 1, length - 6), (half, length - half))),
        Layout(
            "padded and packed",
            ((-3, 5, length - 8), (4, length - 6, -2), (-1, half, length - half - 2, -1)),
        ),
    ]
