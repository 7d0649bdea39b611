"""A local text or table file, or a folder of them."""

from __future__ import annotations

import mmap
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from langevin.data import tables
from langevin.data.texts import SEPARATOR, SPLITS, Texts, cut_by_position, documents_of, read_text
from langevin.errors import UsageError

SUFFIXES = (".txt", ".text", ".md", *tables.SUFFIXES)

SPLIT_NAMES = {
    **{split: split for split in SPLITS},
    **dict.fromkeys(("val", "validation", "dev"), "valid"),
}
SPLIT_NAME = re.compile(rf"(?<![^/._-])({'|'.join(SPLIT_NAMES)})(?![a-z])", re.IGNORECASE)

Sets = dict[str, dict[str, list[str]]]


@dataclass(frozen=True)
class LocalText:
    """How a local text is split: by the names of its files, else its last parts are for valid and test.

    Rows of a table are documents; so is each file of a folder, and what stands between separators. A
    single file without them is one stream.
    """

    valid: float = 0.05
    test: float = 0.05
    text_column: str | None = None

    tokenizer: ClassVar[str] = "bpe-4096"

    def __post_init__(self) -> None:
        for name, value in (("valid", self.valid), ("test", self.test)):
            if not isinstance(value, int | float) or not 0 < value < 0.5:
                raise UsageError(f"{name} must be a fraction between 0 and 0.5, not {value!r}")
        if self.text_column == "":
            raise UsageError("the text column has no name", "Name a column, or leave it out.")

    def identity(self) -> dict[str, Any]:
        return {"settings": {name: value for name, value in asdict(self).items() if value is not None}}

    def files(self, path: Path) -> dict[str, Path]:
        """The files there that hold the text, by their path relative to the folder, in order."""
        if path.is_file():
            files = {path.name: path}
        else:
            found = (at for at in path.rglob("*") if at.is_file() and at.suffix.lower() in SUFFIXES)
            files = dict(sorted((at.relative_to(path).as_posix(), at) for at in found))
            if not files:
                raise UsageError(
                    f"no text files in {path}", f"A text file's name ends with {', '.join(SUFFIXES)}."
                )
            files = self._of_the_splits(path, files)
        kinds = {tables.is_table(at): name for name, at in files.items()}
        if len(kinds) == 2:
            raise UsageError(
                f"{path} holds both tables ({kinds[True]}) and texts ({kinds[False]})",
                "Name one file, or keep them in folders of their own.",
            )
        if self.text_column is not None and False in kinds:
            raise UsageError(
                f"{path} is no table: it has no column {self.text_column!r}",
                f"Columns are for {', '.join(tables.SUFFIXES)}.",
            )
        return files

    def _of_the_splits(self, path: Path, files: dict[str, Path]) -> dict[str, Path]:
        """The files of the set of splits that the folder holds; all of them where it holds none."""
        if (found := named_splits(path, list(files))) is None:
            return files
        used = {name for names in found.values() for name in names}
        if others := [name for name in files if name not in used]:
            shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            warnings.warn(f"{path} is split into {_shown(found)}: {shown} left out", stacklevel=2)
        return {name: at for name, at in files.items() if name in used}

    def read(self, path: Path, files: Mapping[str, Path]) -> Texts:
        found = None if path.is_file() else named_splits(path, list(files))
        groups = {"": list(files)} if found is None else found
        documents = any(
            len(names) > 1 or tables.is_table(files[name]) or _has_separator(files[name])
            for names in groups.values()
            for name in names
        )
        streams = {
            split: partial(self._documents, [files[name] for name in names])
            if documents
            else partial(read_text, files[names[0]])
            for split, names in groups.items()
        }
        if found is not None:
            return Texts(dict(streams), documents, {"split": _shown(found)})
        splits, border = cut_by_position(
            streams[""], documents, (1 - self.valid - self.test, 1 - self.test)
        )
        for split, stream in splits.items():
            if not any(True for _ in stream()):
                raise UsageError(
                    f"the text is too short to split: nothing is left for {split}",
                    "Use a longer text, or a folder with train.txt, valid.txt and test.txt.",
                )
        return Texts(splits, documents, {"split": f"by position, at {border}' borders"})

    def _documents(self, paths: list[Path]) -> Iterator[str]:
        for path in paths:
            yield from tables.rows(path, self.text_column) if tables.is_table(path) else documents_of(path)


def named_splits(path: Path, names: list[str]) -> dict[str, list[str]] | None:
    """The files of train, valid and test, where names say so; None where none does.

    Files of a set differ in the name of the split (and in numbers) alone: train.txt, val.txt, test.txt;
    wiki.train.txt, ...; train-00.jsonl, train-01.jsonl, ...; or everything in the folders train/, dev/,
    test/. A folder with a part of a set, with two sets or with two names for a split is refused: to cut it
    anew could train on its test text.
    """
    sets: Sets = {}
    for name in names:
        if match := SPLIT_NAME.search(name):
            rest = "/" if name[match.end() :].startswith("/") else name[match.end() :]
            pattern = re.sub(r"\d+", "#", f"{name[: match.start()]}*{rest}")
            sets.setdefault(pattern, {}).setdefault(match[1].lower(), []).append(name)
    found = {pattern: {SPLIT_NAMES[word] for word in words} for pattern, words in sets.items()}
    whole = [pattern for pattern, splits in found.items() if len(splits) == len(SPLITS)]
    begun = [
        pattern
        for pattern, splits in found.items()
        if pattern in ("*/", *(f"*{suffix}" for suffix in SUFFIXES))
        or ("train" in splits and len(splits) > 1)
    ]
    if len(whole) > 1:
        raise UsageError(
            f"{path} holds several sets of splits: {', '.join(whole)}",
            "Name the folder of one, or keep one.",
        )
    if not whole and begun:
        there = [word for pattern in begun for word in sets[pattern]]
        missing = [split for split in SPLITS if split not in {SPLIT_NAMES[word] for word in there}]
        lacks = " and no ".join(missing) or "whole set of one kind of files"
        raise UsageError(
            f"{path} holds {' and '.join(there)}, but no {lacks}",
            "Add what is missing (valid may be called val, validation or dev), rename what is no split, or "
            "name one file, which is then cut.",
        )
    if not whole:
        return None
    words = sets[whole[0]]
    if len(words) > len(SPLITS):
        raise UsageError(
            f"{path} has two names for one split: {', '.join(words)}", "Keep one of them in the folder."
        )
    chosen = {SPLIT_NAMES[word]: files for word, files in words.items()}
    return {split: chosen[split] for split in SPLITS}


def _shown(splits: Mapping[str, list[str]]) -> str:
    return ", ".join(
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        for names in splits.values()
    )


def _has_separator(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        return (
            size > 0 and mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).find(SEPARATOR.encode()) >= 0
        )
