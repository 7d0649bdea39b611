"""A local text or table file, or a folder of them."""

import mmap
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from langevin.data import tables
from langevin.data.texts import SEPARATOR, SPLITS, Stream, Texts, cut_by_position, documents_of, read_text
from langevin.errors import UsageError

SUFFIXES = (".txt", ".text", ".md", *tables.SUFFIXES)

SPLIT_NAMES = {**{split: split for split in SPLITS}, "val": "valid", "validation": "valid", "dev": "valid"}
SPLIT_NAME = re.compile(rf"(?<![^/._-])({'|'.join(SPLIT_NAMES)})(?![a-z])", re.IGNORECASE)


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

    def find(self, path: Path) -> dict[str, list[Path]]:
        """The files of each split by their names; all under "" where names say nothing of splits."""
        if path.is_file():
            groups = {"": [path]}
        else:
            found = (at for at in path.rglob("*") if at.is_file() and at.suffix.lower() in SUFFIXES)
            names = sorted(at.relative_to(path).as_posix() for at in found)
            groups = by_split(path, names)
        kinds = {tables.is_table(at): at.name for files in groups.values() for at in files}
        if len(kinds) == 2:
            raise UsageError(
                f"{path} holds both tables ({kinds[True]}) and texts ({kinds[False]})",
                "Name one file, or keep them in folders of their own.",
            )
        if not kinds:
            raise UsageError(
                f"no text files in {path}", f"A text file's name ends with {', '.join(SUFFIXES)}."
            )
        if self.text_column is not None and False in kinds:
            raise UsageError(
                f"{path} is no table: it has no column {self.text_column!r}",
                f"Columns are for {', '.join(tables.SUFFIXES)}.",
            )
        return groups

    def read(self, groups: Mapping[str, list[Path]]) -> Texts:
        documents = any(
            len(files) > 1 or tables.is_table(files[0]) or _has_separator(files[0])
            for files in groups.values()
        )
        streams: dict[str, Stream] = {
            split: partial(self._documents, files) if documents else partial(read_text, files[0])
            for split, files in groups.items()
        }
        if "" not in streams:
            return Texts(streams, documents, {"split": "by the names of files"})
        fractions = (1 - self.valid - self.test, 1 - self.test)
        splits, border = cut_by_position(streams[""], documents, fractions)
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


def by_split(path: Path, names: list[str], needed: tuple[str, ...] = SPLITS) -> dict[str, list[Path]]:
    """The files of train, valid and test, where names say so; all of them under "" where none does.

    Files of a set differ in the name of the split (and in numbers) alone: train.txt, val.txt, test.txt;
    wiki.train.txt, ...; train-00.jsonl, train-01.jsonl, ...; or everything in the folders train/, dev/,
    test/. Other files are left out, and told of. A folder with a part of a set, with two sets or with two
    names for a split is refused: to cut it anew could train on its test text.
    """
    sets: dict[str, dict[str, list[str]]] = {}
    for name in names:
        if match := SPLIT_NAME.search(name):
            rest = "/" if name[match.end() :].startswith("/") else name[match.end() :]
            pattern = re.sub(r"\d+", "#", f"{name[: match.start()]}*{rest}")
            sets.setdefault(pattern, {}).setdefault(match[1].lower(), []).append(name)
    plain = ("*/", *(f"*{suffix}" for suffix in SUFFIXES))
    whole: list[str] = []
    begun: list[str] = []
    for pattern, words in sets.items():
        there = {SPLIT_NAMES[word] for word in words}
        if there >= set(needed):
            whole.append(pattern)
        elif pattern.lower() in plain or ("train" in there and len(there) > 1):
            begun += words
    if len(whole) > 1:
        raise UsageError(
            f"{path} holds several sets of splits: {', '.join(whole)}",
            "Name the folder of one, or keep one.",
        )
    if begun and not whole:
        missing = [split for split in needed if split not in {SPLIT_NAMES[word] for word in begun}]
        raise UsageError(
            f"{path} holds {' and '.join(begun)}, but no {' and no '.join(missing) or 'set of all three'}",
            "Add what is missing (valid may be called val, validation or dev), rename what is no split, or "
            "name one file, which is then cut.",
        )
    if not whole:
        return {"": [path / name for name in names]}
    words = sets[whole[0]]
    if len(words) > len({SPLIT_NAMES[word] for word in words}):
        raise UsageError(
            f"{path} has two names for one split: {', '.join(words)}", "Keep one of them in the folder."
        )
    groups = {SPLIT_NAMES[word]: files for word, files in words.items()}
    if others := sorted({*names}.difference(*groups.values())):
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        warnings.warn(f"{path} is split into {', '.join(words)}: {shown} left out", stacklevel=2)
    return {split: [path / name for name in groups[split]] for split in SPLITS if split in groups}


def _has_separator(path: Path) -> bool:
    if not path.stat().st_size:
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(SEPARATOR.encode()) >= 0
