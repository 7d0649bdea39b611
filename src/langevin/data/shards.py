"""Write a source as flat files of token ids, with the tokenizer and a manifest that says what they are."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from langevin.data import tokenizers
from langevin.data.sources import Source, fingerprint
from langevin.data.texts import SPLITS, Texts
from langevin.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SMALL = 1 << 16
"""Up to so many tokens, two bytes hold one."""

BATCH_CHARACTERS = 1 << 22
"""Documents are encoded in batches of about this many characters."""


def build(
    folder: Path,
    source: Source,
    name: str,
    loaded: PreTrainedTokenizerFast | None,
    recipe: dict[str, Any],
    progress: bool,
) -> None:
    """Write the shards, the tokenizer (the loaded one, or made by name) and last the manifest."""
    with _bar(progress) as bar:
        task = bar.add_task(f"reading {source.name}", total=None)
        texts = source.read()
        for split in SPLITS:
            if not any(texts.splits[split]):
                raise UsageError(f"{source.name} has no text for {split}", "Use a longer text.")
        bar.update(task, description=f"making the tokenizer {name}")
        made = _tokenizer(name, loaded, texts)
        made.tokenizer.save_pretrained(folder / "tokenizer")
        dtype = np.dtype("<u2" if len(made.tokenizer) <= SMALL else "<u4")
        total = sum(len(text) for documents in texts.splits.values() for text in documents)
        bar.update(task, description=f"tokenising {source.name}", total=total)

        def advance(characters: int) -> None:
            bar.advance(task, characters)

        splits = {split: _write(folder, split, texts, made, dtype, advance) for split in SPLITS}
    manifest = {
        **recipe,
        "facts": texts.facts,
        "documents": texts.documents,
        "dtype": dtype.str,
        "tokenizer": _described(name, made, folder / "tokenizer"),
        "tokenizer_sha256": tokenizers.fingerprint(made.tokenizer),
        "source_sha256": _joint(splits[split]["text_sha256"] for split in SPLITS),
        "splits": splits,
        **_true_entropy(texts, splits),
        **_repeated(texts),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _tokenizer(name: str, loaded: PreTrainedTokenizerFast | None, texts: Texts) -> tokenizers.Made:
    if loaded is not None:
        return tokenizers.Made(loaded, tokenizers.encoder(loaded))
    others = [text for split in SPLITS[1:] for text in texts.splits[split]]
    return tokenizers.make(name, texts.splits["train"], others)


def _write(
    folder: Path,
    split: str,
    texts: Texts,
    made: tokenizers.Made,
    dtype: np.dtype,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Write one shard; returns its part of the manifest."""
    documents = texts.splits[split]
    end = np.array([made.tokenizer.eos_token_id] if texts.documents else [], dtype)
    unknown = made.tokenizer.convert_tokens_to_ids(tokenizers.UNKNOWN) if made.has_unknown else -1
    digest = hashlib.sha256()
    tokens = unknowns = 0
    with open(folder / f"{split}.bin", "wb") as file:
        for batch in _batches(documents):
            for ids in made.encode(batch):
                row = np.concatenate([ids.astype(dtype), end])
                unknowns += int(np.count_nonzero(ids == unknown))
                tokens += len(row)
                data = row.tobytes()
                digest.update(data)
                file.write(data)
            advance(sum(len(text) for text in batch))
    if unknowns:
        warnings.warn(
            f"{split} has {unknowns:,} characters that train does not have: each is {tokenizers.UNKNOWN}, "
            "which is easier to predict than the character",
            stacklevel=2,
        )
    return {
        "tokens": tokens,
        "characters": sum(len(text) for text in documents),
        "bytes": sum(len(text.encode()) for text in documents),
        "documents": len(documents),
        "unknown_characters": unknowns,
        "sha256": digest.hexdigest(),
        "text_sha256": texts.sha256(split),
    }


def _batches(documents: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _described(name: str, made: tokenizers.Made, folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {
        "name": name,
        "vocab_size": len(made.tokenizer),
        "eos": made.tokenizer.eos_token_id,
        "files": {path.name: fingerprint(path)["sha256"] for path in files},
    }


def _joint(hashes: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _true_entropy(texts: Texts, splits: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """-ln p of each split under the distribution it was drawn from: what a perfect model would score."""
    if not texts.nats:
        return {}
    return {
        "true_entropy": {
            split: {
                "nats": nats,
                "nats_per_document": nats / splits[split]["documents"],
                "nats_per_character": nats / splits[split]["characters"],
                "nats_per_token": nats / splits[split]["tokens"],
            }
            for split, nats in texts.nats.items()
        }
    }


def _repeated(texts: Texts) -> dict[str, Any]:
    """How many documents of a split stand word for word in train."""
    if not texts.documents:
        return {}
    seen = set(texts.splits["train"])
    repeated = {split: sum(text in seen for text in texts.splits[split]) for split in SPLITS[1:]}
    return {"repeated": {"train": len(texts.splits["train"]) - len(seen), **repeated}}


def _bar(wanted: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (wanted and console.is_terminal),
    )
