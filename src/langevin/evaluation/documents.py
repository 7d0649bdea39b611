"""A corpus as rows of its own documents, for models that never see two of them at once.

B rows in a batch, L predictions in a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from langevin.data.corpus import Corpus
from langevin.errors import UsageError
from langevin.objectives import ar

_ROUND = 32  # rows are padded to a multiple of this: fewer shapes to plan for


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents as rows (tokens, scored, document), each from the separator before it or its own bos on.

    Every token of a document is scored exactly once, the first of its row is context; with `text eos` the
    eos is scored, with `bos text` there is none. A document of more than `length` tokens is read in windows
    of its own that start `stride` tokens apart, as in `ar.Strided`. Rows come in batches of similar length,
    the longest first, padded on the right with what is not scored. The unit resampled is the document.
    """

    corpus: Corpus
    split: str
    length: int
    stride: int | None = None  # default: length, without overlap
    batch: int = 8
    limit: int | None = None  # of the split's tokens; the last document may be cut

    def __post_init__(self) -> None:
        if not self.corpus.has_documents:
            raise UsageError(f"{self.corpus.folder} holds a text without documents", "Use ar.Strided.")
        ar.stride_of(self.length, self.stride, self.batch)

    @property
    def step(self) -> int:
        return ar.stride_of(self.length, self.stride, self.batch)

    @cached_property
    def rows(self) -> list[tuple[int, int, int, int]]:
        """Document, where its row starts and ends in the stream, and the first place that it scores.

        Places are of targets. The first document that ends with eos follows the last one's eos: place -1.
        """
        total = len(self.corpus.tokens(self.split)[: self.limit])
        starts = self.corpus.documents(self.split)
        starts = starts[starts < total]
        firsts = starts if self.corpus.begins_with_bos else starts - 1
        rows = []
        for document, (first, after) in enumerate(zip(firsts, (*starts[1:], total), strict=True)):
            last = max(first, after - 1 - self.length)
            fresh = first + 1
            for begin in (*range(first, last, self.step), last):
                end = min(begin + 1 + self.length, after)
                if fresh < end:
                    rows.append((document, begin, end, fresh))
                fresh = end
        return sorted(rows, key=lambda row: row[1] - row[2])

    def __iter__(self) -> Iterator[ar.Windows]:
        tokens = self.corpus.tokens(self.split)
        for at in range(0, len(self.rows), self.batch):
            document, begin, end, fresh = np.array(self.rows[at : at + self.batch]).T[:, :, None]
            longest = int((end - begin).max()) - 1
            width = min(-(-longest // _ROUND) * _ROUND, self.length)
            place = begin + np.arange(width + 1)
            inside = np.where(place < end, place, end - 1)
            row = np.where(place < end, tokens[inside], self.corpus.separator).astype(np.int64)
            scored = (place[:, 1:] >= fresh) & (place[:, 1:] < end)
            unit = np.broadcast_to(document, scored.shape).copy()
            yield torch.from_numpy(row), torch.from_numpy(scored), torch.from_numpy(unit)
