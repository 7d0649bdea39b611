"""A source as flat files of token ids, made once into a cache folder that is whole or not there.

CACHE/tokens/NAME-TOKENIZER-KEY/     KEY is a hash of all that the tokens depend on
    train.bin valid.bin test.bin     token ids; a document is `text eos`, or `bos text` where the tokenizer
                                     itself puts a beginning-of-text token before texts
    valid.sizes test.sizes           the characters and bytes that each token adds to the text (uint16)
    train.labels ...                 the class of each document, where they have one (int32)
    valid.json test.json             the documents themselves, where they have classes: to show mistakes
    tokenizer/ manifest.json
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import Progress

from langevin.data import tokenizers
from langevin.data.corpus import Corpus
from langevin.data.hub import cache_root
from langevin.data.sources import Source, fingerprint
from langevin.data.texts import SEPARATOR, SPLITS, Texts
from langevin.errors import UsageError
from langevin.runs.files import changed, read_json, sha256, write_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 2
"""Changes whenever the same recipe would give other files."""

SMALL = 1 << 16
"""Up to so many tokens, two bytes hold one."""

BATCH_CHARACTERS = 1 << 20
"""Pieces of text are encoded in batches of about this many characters."""

NOTHING = np.zeros((1, 2), "<u2")
"""Characters and bytes of a separator."""

LOOKED_AT = 1 << 20
"""Among so many tokens of train a text without documents finds what it can begin after."""


def tokenised(source: Source, tokenizer: str, progress: bool) -> Corpus:
    """The corpus of a source and a tokenizer: from the cache where it is whole, else built."""
    loaded = None if tokenizers.is_made_here(tokenizer) else tokenizers.load(tokenizer)
    made = {"name": tokenizer, "any text": True} if _takes_any(source, tokenizer) else {"name": tokenizer}
    recipe = {
        "format": FORMAT,
        "source": {"name": source.name, **source.identity},
        "tokenizer": made
        if loaded is None
        else {"name": Path(tokenizer).name, "sha256": tokenizers.fingerprint(loaded)},
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{source.name}-{Path(tokenizer).name}").strip(".-")
    folder = cache_root() / "tokens" / f"{label}-{key}"
    kept(folder, lambda place: build(place, source, tokenizer, loaded, recipe, progress), source.name)
    return _opened(folder, source)


def _takes_any(source: Source, tokenizer: str) -> bool:
    """Whether characters that no split has need a token: classes are asked for of texts that come later."""
    return source.labelled and tokenizer == "chars"


def kept(folder: Path, build: Callable[[Path], None], name: str) -> None:
    """Have a folder of the cache: as it stands where it is whole, else built."""
    if damage(folder) is None:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            if (found := damage(folder)) is None:
                return
            warnings.warn(f"{found}: preparing {name} again", stacklevel=4)
        write_folder(folder, build)


def damage(folder: Path) -> str | None:
    """What is wrong with a prepared folder, by the name of the file; None when it is whole."""
    try:
        manifest = read_json(folder / "manifest.json", {"files": {str: {"bytes": int, "sha256": str}}})
    except UsageError as error:
        return error.cause
    for name, facts in manifest["files"].items():
        problem = changed(folder / name, facts["bytes"], facts["sha256"])
        if problem is not None:
            return f"{folder / name} {problem}"
    return None


def _opened(folder: Path, source: Source) -> Corpus:
    """The corpus; what one should know of the data before believing its numbers is told each time."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if source.path is not None:
        manifest["path"] = str(source.path)
    for split, facts in manifest["splits"].items():
        if count := facts["unknown_characters"]:
            warnings.warn(
                f"{split} has {count:,} characters that train does not have: each is {tokenizers.UNKNOWN}, "
                "which is easier to predict than the character",
                stacklevel=4,
            )
    again = {
        split: count for split, count in manifest.get("repeated", {}).items() if split != "train" and count
    }
    if again:
        counts = " and ".join(
            f"{count:,} of {manifest['splits'][split]['documents']:,} {split} documents"
            for split, count in again.items()
        )
        warnings.warn(f"{counts} stand word for word in train, too", stacklevel=4)
    return Corpus(folder, manifest)


def build(
    folder: Path,
    source: Source,
    name: str,
    loaded: PreTrainedTokenizerFast | None,
    recipe: dict[str, Any],
    progress: bool,
) -> None:
    """Write the shards, the tokenizer (the loaded one, or made by name) and last the manifest."""
    console = Console(stderr=True)
    hidden = not (progress and console.is_terminal)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(f"reading {source.name}", total=None)
        texts = source.read()
        bar.update(task, description=f"making the tokenizer {name}")
        train, others = (
            (text for split in some for text, _ in texts.pieces(split)) for some in (SPLITS[:1], SPLITS[1:])
        )
        if loaded is None:
            tokenizer = tokenizers.make(name, train, others, any_text=_takes_any(source, name))
        else:
            tokenizer = loaded
        tokenizer.save_pretrained(folder / "tokenizer")
        size = tokenizers.vocabulary(tokenizer)
        dtype = np.dtype("<u2" if size <= SMALL else "<u4")
        total = sum(file["bytes"] for file in source.identity.get("files", {}).values())
        bar.update(task, description=f"tokenising {source.name}", total=total or None)
        shards = {split: Shard(split, texts, tokenizer, name, dtype) for split in SPLITS}
        for split, shard in shards.items():
            shard.write(folder, partial(bar.advance, task))
            if not shard.tokens:
                raise UsageError(f"{source.name} has no text for {split}", "Use a longer text.")
        labelled = {split: np.asarray(some, "<i4") for split, some in texts.labels.items()}
        for split, labels in labelled.items():
            labels.tofile(folder / f"{split}.labels")
            if split != "train":
                (folder / f"{split}.json").write_text(json.dumps(list(texts.splits[split]())))
    manifest = {
        **recipe,
        "facts": texts.facts,
        "documents": texts.documents,
        "layout": shards["train"].layout,
        "separator": shards["train"].separator,
        "start": _start(folder, texts, shards["train"]),
        "dtype": dtype.str,
        "tokenizer": {"name": name, "vocab_size": size, "eos": tokenizer.eos_token_id},
        "tokenizer_sha256": tokenizers.fingerprint(tokenizer),
        "splits": {
            split: shard.facts()
            | ({"labels_sha256": sha256(folder / f"{split}.labels")} if split in labelled else {})
            for split, shard in shards.items()
        },
        **_true_entropy(texts, shards),
        **_repeated(texts, shards),
    }
    seal(folder, manifest)


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, last, with the hash of every file that is there."""
    files = {
        path.relative_to(folder).as_posix(): fingerprint(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = json.dumps({**manifest, "files": files}, indent=1) + "\n"
    (folder / "manifest.json").write_text(text, encoding="utf-8")


class Shard:
    """One split on its way to the disk, and what is counted on the way."""

    def __init__(
        self, split: str, texts: Texts, tokenizer: PreTrainedTokenizerFast, name: str, dtype: np.dtype
    ) -> None:
        self.split, self.texts, self.dtype = split, texts, dtype
        self.encode = tokenizers.encoder(tokenizer, name)
        first = tokenizers.first_token(tokenizer)
        self.separator: int = tokenizer.eos_token_id if first is None else first
        self.layout = "text" if not texts.documents else "text eos" if first is None else "bos text"
        self.unknown = tokenizer.unk_token_id if tokenizer.unk_token == tokenizers.UNKNOWN else -1
        self.tokens = self.characters = self.bytes = self.unknowns = 0
        self.text_sha256 = hashlib.sha256()
        self.hashes = array("Q")
        """Of the documents, 64 bits each."""

    def write(self, folder: Path, advance: Callable[[int], None]) -> None:
        separator = [(np.array([self.separator]), NOTHING)]
        sized = self.split != "train"
        sizes_path = folder / f"{self.split}.sizes" if sized else Path(os.devnull)
        document, begins = hashlib.blake2b(digest_size=8), True
        with open(folder / f"{self.split}.bin", "wb") as tokens, open(sizes_path, "wb") as sizes:
            for batch in _batches(self.texts.pieces(self.split)):
                rows: list[tuple[np.ndarray, np.ndarray]] = []
                encoded = self.encode([text for text, _ in batch], sized)
                for (text, ends), (ids, places) in zip(batch, encoded, strict=True):
                    rows += separator * (begins and self.layout == "bos text")
                    rows.append((ids, NOTHING if places is None else _sizes(text, places)))
                    rows += separator * (ends and self.layout == "text eos")
                    data = text.encode()
                    self.characters += len(text)
                    self.bytes += len(data)
                    self.text_sha256.update(data)
                    document.update(data)
                    begins = ends
                    if ends:
                        self.text_sha256.update(SEPARATOR.encode())
                        self.hashes.append(int.from_bytes(document.digest()))
                        document = hashlib.blake2b(digest_size=8)
                row = np.concatenate([ids for ids, _ in rows]).astype(self.dtype)
                self.tokens += len(row)
                self.unknowns += int(np.count_nonzero(row == self.unknown))
                tokens.write(row.tobytes())
                sizes.write(b"".join(pairs.tobytes() for _, pairs in rows))
                advance(sum(len(text) for text, _ in batch))

    def facts(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "characters": self.characters,
            "bytes": self.bytes,
            "documents": len(self.hashes) if self.texts.documents else 1,
            "unknown_characters": self.unknowns,
            "text_sha256": self.text_sha256.hexdigest(),
        }


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _sizes(text: str, places: np.ndarray) -> np.ndarray:
    """Characters and bytes that each token adds, (tokens, 2); a character counts with its first token."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(widths)])
    places[-1:] = len(text)  # with the last token, what a tokenizer leaves out at the end
    ends = np.stack([places, bytes_before[places]], -1)
    return np.minimum(np.diff(ends, axis=0, prepend=0), np.iinfo(np.uint16).max).astype("<u2")


def _start(folder: Path, texts: Texts, train: Shard) -> list[int]:
    """What an empty prompt stands for: the separator, or in a text without documents a line end, else a
    space, else the first token, whichever the text has."""
    if texts.documents:
        return [train.separator]
    seen = np.fromfile(folder / "train.bin", train.dtype, LOOKED_AT)
    for ids, _ in train.encode(["\n", " "], False):
        if np.isin(ids, seen).all() and len(ids):
            return [int(token) for token in ids]
    return [int(seen[0])]


def _true_entropy(texts: Texts, shards: dict[str, Shard]) -> dict[str, Any]:
    """-ln p of each split under the distribution it was drawn from: what a perfect model would score."""
    found = {}
    for split, nats in texts.nats.items():
        shard = shards[split]
        asked_for = shard.tokens - len(shard.hashes) * (shard.layout == "bos text")
        found[split] = {"nats": nats, "nats_per_token": nats / asked_for}
    return {"true_entropy": found} if found else {}


def _repeated(texts: Texts, shards: dict[str, Shard]) -> dict[str, Any]:
    """How many documents of a split stand word for word in train (by 64-bit hashes)."""
    if not texts.documents:
        return {}
    train = np.unique(np.asarray(shards["train"].hashes, np.uint64))
    repeated = {
        split: int(np.isin(np.asarray(shards[split].hashes, np.uint64), train).sum())
        for split in SPLITS[1:]
    }
    return {"repeated": {"train": len(shards["train"].hashes) - len(train), **repeated}}
