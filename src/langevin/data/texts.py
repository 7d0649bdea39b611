"""Texts in three splits, read piece by piece, and how a text without an official split is cut."""

import codecs
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from langevin.errors import UsageError

SPLITS = ("train", "valid", "test")
SEPARATOR = "<|endoftext|>"
"""Between documents in a text file, and the end-of-text token of the tokenizers made here."""

FEW_DOCUMENTS = 20
"""With fewer documents than this, a cut goes through a document, at a line end."""

BLOCK = 1 << 20
"""Bytes of a file that are read at once."""

Stream = Callable[[], Iterable[str]]
"""A text in blocks, or its documents, from the first on at every call: it is never held whole."""


@dataclass(frozen=True)
class Texts:
    """The documents of each split. A source without documents is one long text, not ended by eos."""

    splits: dict[str, Stream]
    documents: bool
    facts: dict[str, Any] = field(default_factory=dict)
    """What the manifest should say about the source."""
    nats: dict[str, float] = field(default_factory=dict)
    """-ln p of each split under the distribution it was drawn from, where that is known."""
    labels: dict[str, list[int]] = field(default_factory=dict)
    """The class of every document, where they have one."""

    def pieces(self, split: str) -> Iterator[tuple[str, bool]]:
        """The split in pieces for a tokenizer, and whether a document ends with each."""
        stream = self.splits[split]()
        for document in ([text] for text in stream) if self.documents else [stream]:
            held = None
            for piece in chunks(document):
                if held is not None:
                    yield held, False
                held = piece
            if held is not None:
                yield held, self.documents


def read_text(path: Path) -> Iterator[str]:
    """A UTF-8 text file in blocks, unchanged (but for a byte order mark)."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read, empty = 0, True
    with open(path, "rb") as file:
        while True:
            block = file.read(BLOCK)
            read += len(block)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = read - len(error.object) + error.start
                wide = offset == 0 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                raise UsageError(
                    f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {offset}",
                    f"Convert it, for example with iconv -f {'UTF-16' if wide else 'LATIN1'} -t UTF-8 "
                    f"{path.name}",
                ) from None
            empty = empty and not text.strip()
            if text:
                yield text
            if not block:
                break
    if empty:
        raise UsageError(f"{path} is empty", "A text file must have some text in it.")


def split_documents(texts: Iterable[str]) -> Iterator[str]:
    """The documents of a text with separators, without the white space around them."""
    held: list[str] = []
    end = ""  # a separator may begin in one block and end in the next
    for text in texts:
        first, *others = (end + text).split(SEPARATOR)
        for other in others:
            if document := "".join((*held, first)).strip():
                yield document
            held, first = [], other
        held.append(first[: -len(SEPARATOR)])
        end = first[-len(SEPARATOR) :]
    if document := "".join((*held, end)).strip():
        yield document


def documents_of(path: Path) -> Iterator[str]:
    return split_documents(read_text(path))


def between(stream: Stream, start: int, end: int) -> Iterator[str]:
    """The characters from start to end, in the blocks or documents they come in."""
    at = 0
    for text in stream():
        if at >= end:
            return
        if part := text[max(start - at, 0) : end - at]:
            yield part
        at += len(text)


def split_between(stream: Stream, cuts: tuple[int, int], total: int) -> dict[str, Stream]:
    """Train up to the first cut, valid up to the second, test the rest."""
    places = (0, *cuts, total)
    return {split: partial(between, stream, *places[i : i + 2]) for i, split in enumerate(SPLITS)}


def cut_by_position(
    stream: Stream, documents: bool, fractions: tuple[float, float]
) -> tuple[dict[str, Stream], str]:
    """Cut into three at these fractions of the characters, in order; the splits, and at which borders.

    A cut moves on to the next border between documents. Where there are few of them, or none, it moves to
    the next line end (else space, else exactly there), which makes two documents of one.
    """
    ends = array("q", accumulate(map(len, stream()), initial=0))
    total = ends[-1]
    whole = documents and len(ends) > FEW_DOCUMENTS

    def cut(wanted: int, reach: int) -> int:
        border = ends[bisect_left(ends, wanted)]
        return border if whole or (documents and border == wanted) else _border(stream, wanted, reach)

    first = cut(round(total * fractions[0]), total // 50)
    second = cut(round(total * fractions[1]), (total - first) // 50)
    splits = split_between(stream, (first, max(first, second)), total)
    return splits, "documents" if whole else "lines"


def _border(text: Stream, at: int, reach: int) -> int:
    """The nearest place after a line end, else after a space, from `at` on; else `at` itself."""
    for mark in ("\n", " "):
        place = start = max(at - 1, 0)
        for part in between(text, start, at + reach + 1):
            if (found := part.find(mark)) >= 0:
                return place + found + 1
            place += len(part)
    return max(at, 1)


def chunks(texts: Iterable[str], size: int = 1 << 16) -> Iterator[str]:
    """A long text, itself in blocks, in pieces of `size` to 2 · `size` characters for a tokenizer.

    A piece ends before a space between two words: no byte-level BPE merges across that border, so the
    tokens are those of the whole text. Where there is no such space for long, at a line end or anywhere.
    """
    held = ""
    for text in texts:
        held += text
        start = 0
        while len(held) - start > 2 * size:
            end = start + size
            limit = end + size
            space = held.find(" ", end, limit)
            while space >= 0 and (held[space - 1].isspace() or held[space + 1].isspace()):
                space = held.find(" ", space + 1, limit)
            line = held.find("\n", end, limit) + 1
            cut = space if space >= 0 else line or limit
            yield held[start:cut]
            start = cut
        held = held[start:]
    if held:
        yield held
