"""Tokenise a source once, into a cache folder that is whole or not there.

    CACHE/tokens/NAME-TOKENIZER-KEY/   train.bin valid.bin test.bin ... tokenizer/ manifest.json

KEY is a hash of all that the tokens depend on. A folder is built under another name and renamed when it is
complete, by one process at a time; what an interrupted one left is removed by the next.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from pathlib import Path

from filelock import FileLock

from langevin.data import tokenizers
from langevin.data.corpus import Corpus
from langevin.data.shards import build
from langevin.data.sources import Source
from langevin.errors import UsageError
from langevin.runs.files import changed, read_json, write_folder

FORMAT = 2
"""Changes whenever the same recipe would give other files."""


def tokenised(source: Source, tokenizer: str, cache: Path, verify: bool, progress: bool) -> Corpus:
    """The corpus of a source and a tokenizer: from the cache where it is whole, else built."""
    loaded = None if tokenizers.is_made_here(tokenizer) else tokenizers.load(tokenizer)
    recipe = {
        "format": FORMAT,
        "source": {"name": source.name, **source.identity},
        "tokenizer": {"name": tokenizer}
        if loaded is None
        else {"name": Path(tokenizer).name, "sha256": tokenizers.fingerprint(loaded)},
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{source.name}-{Path(tokenizer).name}").strip(".-")
    folder = cache / "tokens" / f"{label}-{key}"
    if damage(folder, verify) is None:
        return _opened(folder, source)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if folder.exists():
            if (found := damage(folder, verify)) is None:
                return _opened(folder, source)
            warnings.warn(f"{found}: preparing {source.name} again", stacklevel=3)
        write_folder(folder, lambda place: build(place, source, tokenizer, loaded, recipe, progress))
    return _opened(folder, source)


def damage(folder: Path, verify: bool) -> str | None:
    """What is wrong with a prepared folder, by the name of the file; None when it is whole.

    Sizes are always compared with the manifest; with `verify`, also the sha256 of every file.
    """
    try:
        manifest = read_json(folder / "manifest.json", {"files": {str: {"bytes": int, "sha256": str}}})
    except UsageError as error:
        return error.cause
    for name, facts in manifest["files"].items():
        problem = changed(folder / name, facts["bytes"], facts["sha256"], verify)
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
