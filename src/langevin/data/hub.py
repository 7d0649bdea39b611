"""Where data are looked for and kept: folders of this machine, and the Hugging Face Hub.

Texts from the Hub come through `datasets` and are written once, as the files we read.
"""

import importlib.util
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from filelock import FileLock

from langevin.data.texts import SEPARATOR
from langevin.errors import UsageError, one_line
from langevin.runs.files import write_folder


def data_root() -> Path | None:
    """`$LANGEVIN_DATA`, a folder with one folder a set; None when not set."""
    path = os.environ.get("LANGEVIN_DATA")
    return Path(path).expanduser() if path else None


def cache_root() -> Path:
    """`$LANGEVIN_CACHE`, or ~/.cache/langevin."""
    path = os.environ.get("LANGEVIN_CACHE")
    return Path(path).expanduser() if path else Path.home() / ".cache" / "langevin"


@dataclass(frozen=True)
class HubTexts:
    """Where a set is on the Hub, and which of its splits make which file."""

    repository: str
    files: dict[str, tuple[str, ...]]
    """Our file: the Hub splits whose rows it holds, in order; of none: one for each split, whose classes
    have their names."""
    config: str | None = None
    revision: str | None = None
    documents: bool = False
    """Rows are documents, ended by a separator line; else rows are joined as they are."""
    blank: str = ""
    """What an empty row stood for in the original file."""
    columns: tuple[str, ...] = ()
    """Write these as lines of JSON, and not the text alone."""

    def written(self, row: Mapping[str, Any]) -> bytes:
        """A row as it stands in our file."""
        if self.columns:
            return (json.dumps({name: row[name] for name in self.columns}) + "\n").encode()
        text = row["text"] or self.blank
        return (f"{text.strip()}\n{SEPARATOR}\n" if self.documents else text).encode()


def has_datasets() -> bool:
    return importlib.util.find_spec("datasets") is not None


def reachable() -> bool:
    """Whether the Hub's name resolves; libraries would retry for a minute to find that out."""
    proxies = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if any(os.environ.get(name) for name in proxies):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


SET_ROOT = "set LANGEVIN_DATA to a folder that has it"


def fetch(name: str, texts: HubTexts | None, folder: Path, looked_for: str, here: str = SET_ROOT) -> None:
    """Fetch a set into a folder, or say what was looked for and how to get it; here: without the Hub."""
    missing = f"{name} is not here: looked for {looked_for}"
    if texts is None:
        raise UsageError(missing, f"It is not on the Hugging Face Hub: {here}.")
    if not has_datasets():
        raise UsageError(
            missing, f"Run pip install 'langevin[data]' to fetch it from the Hugging Face Hub, or {here}."
        )
    if not reachable():
        raise UsageError(
            f"{missing}, and the Hugging Face Hub cannot be reached", f"Connect to the network, or {here}."
        )
    try:
        _fetch(texts, folder)
    except UsageError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{missing}, and fetching {texts.repository} from the Hub failed: {one_line(error)}",
            f"Try again, or {here}.",
        ) from error


def fetched(name: str, texts: HubTexts | None, file: str) -> Path:
    """The folder of a named set that is fetched, as `$LANGEVIN_DATA` does not have its file."""
    root, folder = data_root(), cache_root() / "sources" / name
    looked_for = f"{(root or Path('$LANGEVIN_DATA')) / file}"
    fetch(name, texts, folder, looked_for if root else f"{looked_for} (LANGEVIN_DATA is not set)")
    return folder


def _fetch(texts: HubTexts, folder: Path) -> None:
    """Write the files into the folder, all or none."""
    load = partial(import_module("datasets").load_dataset, texts.repository, texts.config)
    parts: dict[str, list[Iterable[dict[str, Any]]]] = {
        name: [load(split=split, revision=texts.revision) for split in splits]
        for name, splits in texts.files.items()
    }
    if not parts:
        every = load().items()
        lone = "rows.jsonl" if len(every) == 1 else None  # which is cut into splits
        parts = {lone or f"{split}.jsonl": [_with_names(rows, texts)] for split, rows in every}

    def write(place: Path) -> None:
        for name, rows in parts.items():
            with open(place / name, "wb") as file:
                file.writelines(texts.written(row) for row in chain.from_iterable(rows))

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not folder.is_dir():  # else another process was first
            write_folder(folder, write)


def _with_names(rows: Any, texts: HubTexts) -> Iterator[dict[str, Any]]:
    """Rows whose classes are words and not numbers, where the Hub knows them; -1 is none."""
    for column in texts.columns:
        if column not in rows.features:
            there = ", ".join(map(repr, rows.features))
            raise UsageError(
                f"{texts.repository} has no column {column!r}: it has {there}",
                "Name the columns of the text and the label (--text-column NAME, --label-column NAME).",
            )
    names = {column: getattr(rows.features[column], "names", None) for column in texts.columns}
    for row in rows:
        told = {column: row[column] for column in names}
        for column, known in names.items():
            if known is not None:
                told[column] = known[row[column]] if (row[column] or 0) >= 0 else None
        yield told
