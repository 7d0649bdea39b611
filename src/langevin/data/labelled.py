"""Texts with a class each: named sets, tables with two columns, and how they are split.

Where there is no validation set, every tenth training row of each class, in a seeded order, makes one; a
single table gives a ninth of ten to test as well. What stands in test is dropped from valid and train, and
what stands in valid from train. All splits share the tokenizer and the classes of train.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from langevin.data import order, tables
from langevin.data.hub import HubTexts, cache_root, data_root, fetch, fetched
from langevin.data.local import by_split
from langevin.data.sources import Source, fingerprint
from langevin.data.synthetic.listops import LRA, NYU, ListOps
from langevin.data.texts import SPLITS, Texts
from langevin.errors import UsageError, unknown

Rows = list[tuple[str, str]]  # texts and labels
Read = Callable[[Path], Iterator[tuple[str, str]]]

MOST_CLASSES, FEW_CLASSES = 0.5, 10  # of the rows of train: more are no classes, unless they are few
MOST_DIGITS = 4000  # of a label that is a number; Python reads 4,300
USUAL_LABEL = "label"
ON_THE_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class NamedSet:
    """A well-known set: its folder and files under `$LANGEVIN_DATA`, how these are read, its classes by the
    number they have there, and where the Hub has it."""

    about: str
    folder: str
    files: dict[str, str]  # of each split; "" is cut
    read: Read
    classes: tuple[str, ...]
    first: int = 0  # the number of the first class
    hub: str | None = None

    def here(self) -> dict[str, Path]:
        """Its files, where `$LANGEVIN_DATA` has them all."""
        folder = (data_root() or Path()) / self.folder
        files = {split: folder / file for split, file in self.files.items()}
        return files if all(file.is_file() for file in files.values()) else {}

    def find(self, name: str) -> tuple[dict[str, Path], Read]:
        if files := self.here():
            return files, partial(self._named, self.read, self.first)
        place = cache_root() / "sources" / name
        if not place.is_dir():
            made = HubTexts(self.hub, HUB_FILES, columns=("text", "label")) if self.hub else None
            fetched(name, made, f"{self.folder}/{next(iter(self.files.values()))}")
        read = partial(self._named, partial(_columns, text=("text",), label="label"), 0)
        return {split: place / f"{split}.jsonl" for split in TRAIN_TEST}, read

    def _named(self, read: Read, first: int, path: Path) -> Iterator[tuple[str, str]]:
        return ((text, self.classes[int(label) - first]) for text, label in read(path))


def _columns(path: Path, text: tuple[str, ...], label: str) -> Iterator[tuple[str, str]]:
    """Texts, joined from columns, and labels."""
    for *texts, told in tables.records(path, [*text, label]):
        yield " ".join(part for part in texts if part), told


def _lines(path: Path, encoding: str = "utf-8") -> Iterator[tuple[str, str]]:
    """A label and a text a line."""
    for line in path.read_text(encoding=encoding).split("\n"):
        label, _, text = line.partition(" ")
        if text:
            yield text, label


TRAIN_TEST = ("train", "test")
HUB_FILES: dict[str, tuple[str, ...]] = {f"{split}.jsonl": (split,) for split in TRAIN_TEST}
USUAL_TOKENIZER = "words"  # of named sets
FEELINGS = ("negative", "positive")
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
DEGREES = ("very negative", "negative", "neutral", "positive", "very positive")
QUESTIONS = ("description", "entity", "abbreviation", "human", "location", "number")
SENTENCES = "sentences/sst2_trec_small"


def _stanford(kind: str, classes: tuple[str, ...], about: str) -> NamedSet:
    files = {"train": f"stsa.{kind}.train", "valid": f"stsa.{kind}.dev", "test": f"stsa.{kind}.test"}
    return NamedSet(f"sentences of film reviews, {about}", SENTENCES, files, _lines, classes)


def _one_file(file: str, classes: tuple[str, ...], about: str) -> NamedSet:
    return NamedSet(about, SENTENCES, {"": file}, partial(_lines, encoding="cp1252"), classes)


NAMED: dict[str, NamedSet] = {
    "ag_news": NamedSet(
        "news in four topics",
        "ag_news",
        {split: f"{split}.csv" for split in TRAIN_TEST},
        partial(_columns, text=("2", "3"), label="1"),
        TOPICS,
        first=1,
        hub="fancyzhx/ag_news",
    ),
    "imdb": NamedSet(
        "film reviews, positive or negative",
        "imdb",
        {split: f"{split}.tsv" for split in TRAIN_TEST},
        partial(_columns, text=("4",), label="1"),
        FEELINGS,
        hub="stanfordnlp/imdb",
    ),
    "sst2": _stanford("binary", FEELINGS, "positive or negative"),
    "sst5": _stanford("fine", DEGREES, "from very negative to very positive"),
    "mr": _one_file("rt-polarity.all", FEELINGS, "sentences of film reviews, positive or negative"),
    "subj": _one_file("subj.all", ("subjective", "objective"), "sentences about films, opinion or plot"),
    "cr": _one_file("custrev.all", FEELINGS, "customers' reviews of products, positive or negative"),
    "trec": NamedSet(
        "questions by what they ask for",
        SENTENCES,
        {split: f"TREC.{split}.all" for split in TRAIN_TEST},
        partial(_lines, encoding="latin-1"),
        QUESTIONS,
    ),
}
GENERATED: dict[str, tuple[str, ListOps]] = {
    "listops": ("nested operations on digits, parameters of Nangia & Bowman", NYU),
    "listops-lra": ("the same, 500 to 2,000 tokens: parameters of the Long Range Arena", LRA),
}


def find(name: str, text_column: str | None, label_column: str | None) -> Source:
    """The set of this name, or the table, or the folder of tables; a UsageError says what is missing."""
    if name in GENERATED:
        made = GENERATED[name][1]
        return Source(name, "spaces", made.identity(), lambda: texts_of(made.read(), name), labelled=True)
    if name in NAMED:
        files, read = NAMED[name].find(name)
        groups, usual, path = {split: [file] for split, file in files.items()}, USUAL_TOKENIZER, None
        columns: dict[str, str] = {}
    else:
        columns = {"text": text_column or tables.USUAL_COLUMN, "label": label_column or USUAL_LABEL}
        path, place = None, Path(name).expanduser()
        if name and os.path.exists(place):
            place = path = place.resolve()
        elif ON_THE_HUB.fullmatch(name) and not tables.is_table(place):
            place = _from_the_hub(name, columns)
        else:
            ways = "Or the path of a table or a folder of them, or owner/name on the Hugging Face Hub."
            raise unknown("labelled data", name, [*GENERATED, *NAMED], ways)
        groups, usual = _tables(place), "bpe-4096"
        read = partial(_columns, text=(columns["text"],), label=columns["label"])
    every = [file for files in groups.values() for file in files]
    identity = {"files": {str(i): fingerprint(file) for i, file in enumerate(every)}, "columns": columns}

    def opened() -> Texts:
        rows = {split: [row for file in files for row in read(file)] for split, files in groups.items()}
        return texts_of(rows, name if path is None else path.name)

    return Source(name if path is None else path.name, usual, identity, opened, path, labelled=True)


def _from_the_hub(name: str, columns: dict[str, str]) -> Path:
    """The folder of what was fetched of a set: a file a split, with these columns."""
    own = re.sub(r"[^\w.-]+", "_", "--".join([*name.split("/"), *columns.values()]))
    place = cache_root() / "sources" / own
    if not place.is_dir():
        wanted = HubTexts(name, {}, columns=tuple(columns.values()))
        fetch(name, wanted, place, "a file or folder of that name", "give the path of a table")
    return place


def _tables(path: Path) -> dict[str, list[Path]]:
    files = [path] if path.is_file() else sorted(at for at in path.rglob("*") if tables.is_table(at))
    if not files or not all(tables.is_table(file) for file in files):
        raise UsageError(f"{path} is no table", f"A table's name ends with {', '.join(tables.SUFFIXES)}.")
    if path.is_file():
        return {"": files}
    names = [file.relative_to(path).as_posix() for file in files]
    return by_split(path, names, TRAIN_TEST)


def texts_of(rows: dict[str, Rows], name: str) -> Texts:
    """Rows as train, valid and test that share no text, with the number of each one's class."""
    gone: Counter[str] = Counter()
    kept: dict[str, Rows] = {}
    for split, some in rows.items():
        stripped = [(text.strip(), label.strip()) for text, label in some]
        kept[split] = [row for row in stripped if all(row)]
        gone["rows without a text"] += sum(not text for text, _ in stripped)
        gone["rows without a label"] += sum(bool(text) and not label for text, label in stripped)
    splits, facts = apart(kept, name, gone)
    number = {label: i for i, label in enumerate(facts["classes"])}
    return Texts(
        {split: partial(iter, [text for text, _ in splits[split]]) for split in SPLITS},
        documents=True,
        facts=facts,
        labels={split: [number[label] for _, label in splits[split]] for split in SPLITS},
    )


def apart(rows: dict[str, Rows], name: str, gone: Counter[str]) -> tuple[dict[str, Rows], dict[str, Any]]:
    """Rows as train, valid and test that share none, and what the manifest should say of them: the classes,
    and what was left out, of which some is known."""
    splits = _cut(rows)
    for later, earlier in (("valid", ("test",)), ("train", ("valid", "test"))):
        there = {text for split in earlier for text, _ in splits[split]}
        alone = [row for row in splits[later] if row[0] not in there]
        gone[f"{later} rows that also stand in {' or '.join(earlier)}"] = len(splits[later]) - len(alone)
        splits[later] = alone
    left_out = {what: count for what, count in gone.items() if count}
    return splits, {"classes": _classes(splits, name, left_out), "left out": left_out}


def _cut(rows: dict[str, Rows]) -> dict[str, Rows]:
    """Train, valid and test, the last two out of train where they are missing."""
    to = {place: split for place, split in ((8, "test"), (9, "valid")) if split not in rows}
    if not to:
        return dict(rows)
    from_train = rows["train" if "train" in rows else ""]
    splits: dict[str, Rows] = {"train": [], **{split: list(rows.get(split, ())) for split in SPLITS[1:]}}
    seen: Counter[str] = Counter()
    for i in order.permutation(len(from_train), 0):
        label = from_train[i][1]
        splits[to.get(seen[label] % 10, "train")].append(from_train[i])
        seen[label] += 1
    return splits


def _classes(splits: dict[str, Rows], name: str, left_out: dict[str, int]) -> list[str]:
    """The labels of train, numbers in their order; raises where nothing can be learned from them."""
    if not any(splits.values()) and not left_out:
        raise UsageError(f"{name} has no rows", "A table has a row for each text, below its header.")
    labels = {split: Counter(label for _, label in rows) for split, rows in splits.items()}
    found = labels["train"]
    if len(found) > MOST_CLASSES * len(splits["train"]) and len(found) > FEW_CLASSES:
        raise UsageError(
            f"{name} has {len(found):,} labels in {len(splits['train']):,} training rows",
            "Name the column of the classes (--label-column NAME).",
        )
    for split, rows in splits.items():
        if not rows:
            others = tuple(f"{other} rows" for other in SPLITS if other != split)
            gone = [f"{n:,} {what}" for what, n in left_out.items() if not what.startswith(others)]
            told = f": left out are {', '.join(gone)}" if gone else ""
            raise UsageError(
                f"{name} has no rows for {split}{told}",
                "Each split needs its own; ten different ones of a class or more make all three.",
            )
    if len(found) < 2:
        raise UsageError(
            f"{name} has one class only, {next(iter(found))!r}", "A classifier needs two or more."
        )
    for split in SPLITS[1:]:
        other = [label for label in labels[split] if label not in found]
        if other:
            count = sum(labels[split][label] for label in other)
            raise UsageError(
                f"{split} of {name} has {count} rows of classes that train does not have: "
                f"{', '.join(map(repr, other[:5]))}{' ...' if other[5:] else ''}",
                "Add such rows to train, or take them out.",
            )
    whole = all(label.removeprefix("-").isdecimal() and len(label) <= MOST_DIGITS for label in found)
    return sorted(found, key=(lambda label: (int(label), label)) if whole else None)
