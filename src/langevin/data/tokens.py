"""Tokenise a source once, into a cache folder that is whole or not there.

    CACHE/tokens/NAME-TOKENIZER-KEY/   train.bin valid.bin test.bin tokenizer/ manifest.json

KEY is a hash of all that the tokens depend on. A folder is built under another name and renamed when it is
complete, by one process at a time; what an interrupted one left is removed by the next.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
from filelock import FileLock

from langevin.data import tokenizers
from langevin.data.corpus import Corpus
from langevin.data.shards import build
from langevin.data.sources import Source, fingerprint
from langevin.data.texts import SPLITS

FORMAT = 1
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
        return _opened(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        _remove_leftovers(folder)
        if folder.exists():
            if (found := damage(folder, verify)) is None:
                return _opened(folder)
            warnings.warn(f"{found}: preparing {source.name} again", stacklevel=3)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".building", dir=folder.parent))
        try:
            build(building, source, tokenizer, loaded, recipe, progress)
            building.chmod(0o755)
            if folder.exists():
                folder.rename(building.with_suffix(".damaged.building"))
            building.rename(folder)
        finally:
            _remove_leftovers(folder)
    return _opened(folder)


def damage(folder: Path, verify: bool) -> str | None:
    """What is wrong with a prepared folder, by the name of the file; None when it is whole.

    Sizes are always compared with the manifest; with `verify`, also the sha256 of every file.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        width = np.dtype(manifest["dtype"]).itemsize
        shards = {folder / f"{split}.bin": manifest["splits"][split] for split in SPLITS}
        sizes = {shard: facts["tokens"] * width for shard, facts in shards.items()}
        hashes = {folder / "tokenizer" / name: sha for name, sha in manifest["tokenizer"]["files"].items()}
        hashes.update({shard: facts["sha256"] for shard, facts in shards.items()})
    except FileNotFoundError:
        return f"{path} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is damaged ({type(error).__name__}: {error})"
    for file, sha256 in hashes.items():
        if not file.is_file():
            return f"{file} is missing"
        size = file.stat().st_size
        if size != sizes.get(file, size):
            return f"{file} is damaged ({size:,} bytes instead of {sizes[file]:,})"
        if verify and fingerprint(file)["sha256"] != sha256:
            return f"{file} is damaged (its sha256 is not the one in manifest.json)"
    return None


def _opened(folder: Path) -> Corpus:
    return Corpus(folder, json.loads((folder / "manifest.json").read_text(encoding="utf-8")))


def _remove_leftovers(folder: Path) -> None:
    """What this process, or one that was killed, began. Only with the lock held."""
    for leftover in folder.parent.glob(f".{folder.name}.*.building"):
        shutil.rmtree(leftover, ignore_errors=True)
