"""Texts in three splits, and how a text without an official split is cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langevin.errors import UsageError

SPLITS = ("train", "valid", "test")
SEPARATOR = "<|endoftext|>"
"""Between documents in a text file, and the end-of-text token of the tokenizers made here."""

FEW_DOCUMENTS = 20
"""With fewer documents than this, a cut goes through a document, at a line end."""


@dataclass(frozen=True)
class Texts:
    """The documents of each split. A source without documents is one long document, not ended by eos."""

    splits: dict[str, list[str]]
    documents: bool
    facts: dict[str, Any] = field(default_factory=dict)
    """What the manifest should say about the source."""
    nats: dict[str, float] = field(default_factory=dict)
    """-ln p of each split under the distribution it was drawn from, where that is known."""

    def sha256(self, split: str) -> str:
        digest = hashlib.sha256()
        for document in self.splits[split]:
            digest.update(document.encode())
            if self.documents:
                digest.update(SEPARATOR.encode())
        return digest.hexdigest()


def read_text(path: Path) -> str:
    """A UTF-8 text file, whole and unchanged (but for a byte order mark)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}", "Check the path.") from None
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", "Check the path and its rights."
        ) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}",
            f"Convert it, for example with iconv -f LATIN1 -t UTF-8 {path.name}",
        ) from None
    if not text.strip():
        raise UsageError(f"{path} is empty", "A text file must have some text in it.")
    return text


def split_documents(text: str) -> list[str]:
    """The documents of a text with separators, without the white space around them."""
    return [document for piece in text.split(SEPARATOR) if (document := piece.strip())]


def cut_by_position(documents: list[str], fractions: tuple[float, float], whole: bool) -> list[list[str]]:
    """Cut into three at these fractions of the characters, in order.

    A cut moves on to the next border between documents, or with `whole=False` to the next line end inside
    a document (else space, else exactly there), which makes two documents of one.
    """
    total = sum(len(document) for document in documents)
    parts: list[list[str]] = [[], [], []]
    cuts = [round(total * fraction) for fraction in fractions]
    at = 0
    for document in documents:
        while document:
            part = sum(at >= cut for cut in cuts)
            room = cuts[part] - at if part < 2 else len(document)
            taken = len(document) if whole or room >= len(document) else _border(document, room)
            parts[part].append(document[:taken])
            at += taken
            document = document[taken:]
    return parts


def _border(text: str, at: int) -> int:
    """The nearest place after a line end, else after a space, from `at` on; else `at` itself."""
    for mark in ("\n", " "):
        found = text.find(mark, max(at - 1, 0), at + len(text) // 50 + 1)
        if found >= 0:
            return found + 1
    return max(at, 1)


def chunks(text: str, size: int = 1 << 18) -> Iterator[str]:
    """A long text in pieces of about this many characters, for a tokenizer that takes one at a time.

    A piece ends before a space between two words: no byte-level BPE merges across that border, so the
    tokens are those of the whole text. Where there is no such space for long, at a line end or anywhere.
    """
    start = 0
    while len(text) - start > 2 * size:
        end = start + size
        limit = end + size
        space = text.find(" ", end, limit)
        while space >= 0 and (text[space - 1].isspace() or text[space + 1].isspace()):
            space = text.find(" ", space + 1, limit)
        line = text.find("\n", end, limit) + 1
        cut = space if space >= 0 else line or limit
        yield text[start:cut]
        start = cut
    yield text[start:]
