"""Texts with a class each: named sets, tables with two columns, and how they are split and laid out.

Where there is no validation set, every tenth training row of each class, in a seeded order, makes one; a
single table gives a ninth of ten to test as well. What stands in test is dropped from valid and train, and
what stands in valid from train. All splits share the tokenizer and the classes of train.

B rows, L tokens a batch is padded to.
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from langevin.data import order, tables
from langevin.data.corpus import Corpus
from langevin.data.hub import HubTexts, cache_root, data_root, fetch
from langevin.data.local import by_split
from langevin.data.sources import Source, fingerprint
from langevin.data.synthetic.listops import LRA, NYU, ListOps
from langevin.data.texts import SPLITS, Texts
from langevin.errors import UsageError, unknown
from langevin.reading import laid_out

Rows = list[tuple[str, str]]  # texts and labels
Read = Callable[[Path], Iterator[tuple[str, str]]]

LENGTHS = 6  # to which batches are padded; a GPU plans, compiles and records each of them once
MOST_CLASSES, FEW_CLASSES = 0.5, 10  # of the rows of train: more are no classes, unless they are few
USUAL_LABEL = "label"


@dataclass(frozen=True)
class NamedSet:
    """A well-known set: its folder and files under `$LANGEVIN_DATA`, and where the Hub has it."""

    about: str
    tokenizer: str
    folder: str
    files: dict[str, str]  # of each split; "" is cut
    read: Read
    hub: HubTexts | None = None

    def here(self) -> dict[str, Path]:
        """Its files, where `$LANGEVIN_DATA` has them all."""
        folder = (data_root() or Path()) / self.folder
        files = {split: folder / file for split, file in self.files.items()}
        return files if all(file.is_file() for file in files.values()) else {}

    def find(self, name: str) -> tuple[dict[str, Path], Read]:
        if files := self.here():
            return files, self.read
        place = cache_root() / "sources" / name
        if not place.is_dir():
            root = data_root()
            looked_for = str(
                (root or Path("$LANGEVIN_DATA")) / self.folder / next(iter(self.files.values()))
            )
            fetch(name, self.hub, place, looked_for + ("" if root else " (LANGEVIN_DATA is not set)"))
        read = partial(_columns, text=("text",), label="label")
        return {split: place / f"{split}.jsonl" for split in ("train", "test")}, read


def _columns(
    path: Path, text: tuple[str, ...], label: str, names: tuple[str, ...] = (), first: int = 0
) -> Iterator[tuple[str, str]]:
    """Texts, joined from columns, and labels, which may be numbers of names."""
    for *texts, told in tables.records(path, [*text, label]):
        yield " ".join(part for part in texts if part), names[int(told) - first] if names else told


def _lines(path: Path, names: tuple[str, ...], encoding: str) -> Iterator[tuple[str, str]]:
    """A number and a text a line."""
    for line in path.read_text(encoding=encoding).split("\n"):
        label, _, text = line.partition(" ")
        if text:
            yield text, names[int(label)]


def _hub(repository: str) -> HubTexts:
    splits: dict[str, tuple[str, ...]] = {f"{split}.jsonl": (split,) for split in TRAIN_TEST}
    return HubTexts(repository, splits, columns=("text", "label"))


FEELINGS = ("negative", "positive")
FINE = ("very negative", "negative", "neutral", "positive", "very positive")
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
QUESTIONS = ("description", "entity", "abbreviation", "human", "location", "number")
TRAIN_TEST = ("train", "test")


def _sentences(
    about: str, files: dict[str, str], names: tuple[str, ...], encoding: str = "utf-8"
) -> NamedSet:
    read = partial(_lines, names=names, encoding=encoding)
    return NamedSet(about, "words", "sentences/sst2_trec_small", files, read)


NAMED: dict[str, NamedSet] = {
    "ag_news": NamedSet(
        "news in four topics",
        "words",
        "ag_news",
        {split: f"{split}.csv" for split in TRAIN_TEST},
        partial(_columns, text=("2", "3"), label="1", names=TOPICS, first=1),
        _hub("fancyzhx/ag_news"),
    ),
    "imdb": NamedSet(
        "film reviews, positive or negative",
        "words",
        "imdb",
        {split: f"{split}.tsv" for split in TRAIN_TEST},
        partial(_columns, text=("4",), label="1", names=FEELINGS),
        _hub("stanfordnlp/imdb"),
    ),
    "sst2": _sentences(
        "sentences of film reviews, two classes",
        {split: f"stsa.binary.{'dev' if split == 'valid' else split}" for split in SPLITS},
        FEELINGS,
    ),
    "sst5": _sentences(
        "sentences of film reviews, five classes",
        {split: f"stsa.fine.{'dev' if split == 'valid' else split}" for split in SPLITS},
        FINE,
    ),
    "trec": _sentences(
        "questions by what they ask for",
        {split: f"TREC.{split}.all" for split in TRAIN_TEST},
        QUESTIONS,
        encoding="latin-1",
    ),
    "mr": _sentences("film reviews in a sentence", {"": "rt-polarity.all"}, FEELINGS, encoding="latin-1"),
    "subj": _sentences(
        "opinion or plot", {"": "subj.all"}, ("subjective", "objective"), encoding="latin-1"
    ),
    "cr": _sentences("product reviews", {"": "custrev.all"}, FEELINGS),
}
GENERATED: dict[str, tuple[str, ListOps]] = {
    "listops": ("nested operations on digits, parameters of Nangia & Bowman", NYU),
    "listops-lra": ("the same, 500 to 2,000 tokens: parameters of the Long Range Arena", LRA),
}


def find(name: str, text_column: str | None, label_column: str | None) -> Source:
    """The set of this name, or the table, or the folder of tables; a UsageError says what is missing."""
    if name in GENERATED:
        made = GENERATED[name][1]
        return Source(name, "spaces", made.identity(), lambda: texts_of(made.read(), name))
    if name in NAMED:
        files, read = NAMED[name].find(name)
        groups, usual, path = {split: [file] for split, file in files.items()}, NAMED[name].tokenizer, None
        columns: dict[str, str] = {}
    else:
        path = Path(name).expanduser()
        if not name or not os.path.exists(path):
            missing = unknown("labelled data", name, [*GENERATED, *NAMED])
            raise UsageError(missing.cause, f"{missing.remedy} Or the path of a table or a folder of them.")
        path = path.resolve()
        groups, usual = _tables(path), "bpe-4096"
        columns = {"text": text_column or tables.USUAL_COLUMN, "label": label_column or USUAL_LABEL}
        read = partial(_columns, text=(columns["text"],), label=columns["label"])
    every = [file for files in groups.values() for file in files]
    identity = {"files": {str(i): fingerprint(file) for i, file in enumerate(every)}, "columns": columns}

    def opened() -> Texts:
        rows = {split: [row for file in files for row in read(file)] for split, files in groups.items()}
        return texts_of(rows, name if path is None else path.name)

    return Source(name if path is None else path.name, usual, identity, opened, path)


def _tables(path: Path) -> dict[str, list[Path]]:
    files = [path] if path.is_file() else sorted(at for at in path.rglob("*") if tables.is_table(at))
    if not files or not all(tables.is_table(file) for file in files):
        raise UsageError(f"{path} is no table", f"A table's name ends with {', '.join(tables.SUFFIXES)}.")
    if path.is_file():
        return {"": files}
    names = [file.relative_to(path).as_posix() for file in files]
    return {
        split: [path / name for name in some] for split, some in by_split(path, names, TRAIN_TEST).items()
    }


def texts_of(rows: dict[str, Rows], name: str) -> Texts:
    """Rows as train, valid and test that share no text, with the number of each one's class."""
    gone: Counter[str] = Counter()
    kept: dict[str, Rows] = {}
    for split, some in rows.items():
        stripped = [(text.strip(), label.strip()) for text, label in some]
        kept[split] = [row for row in stripped if all(row)]
        gone["rows without a text"] += sum(not text for text, _ in stripped)
        gone["rows without a label"] += sum(bool(text) and not label for text, label in stripped)
    splits = _cut(kept)
    for later, earlier in (("valid", ("test",)), ("train", ("valid", "test"))):
        there = {text for split in earlier for text, _ in splits[split]}
        alone = [row for row in splits[later] if row[0] not in there]
        gone[f"{later} rows that also stand in {' or '.join(earlier)}"] = len(splits[later]) - len(alone)
        splits[later] = alone
    classes = _classes(splits, name)
    number = {label: i for i, label in enumerate(classes)}
    return Texts(
        {split: partial(_texts, splits[split]) for split in SPLITS},
        documents=True,
        facts={"classes": classes, "left out": {what: n for what, n in gone.items() if n}},
        labels={split: [number[label] for _, label in splits[split]] for split in SPLITS},
    )


def _texts(rows: Rows) -> list[str]:
    return [text for text, _ in rows]


def _cut(rows: dict[str, Rows]) -> dict[str, Rows]:
    """Train, valid and test, the last two out of train where they are missing."""
    if "valid" in rows:
        return dict(rows)
    from_train = rows["train" if "train" in rows else ""]
    to = {9: "valid"} if "test" in rows else {8: "test", 9: "valid"}
    splits: dict[str, Rows] = {"train": [], "valid": [], "test": list(rows.get("test", ()))}
    seen: Counter[str] = Counter()
    for i in order.permutation(len(from_train), 0):
        label = from_train[i][1]
        splits[to.get(seen[label] % 10, "train")].append(from_train[i])
        seen[label] += 1
    return splits


def _classes(splits: dict[str, Rows], name: str) -> list[str]:
    """The labels of train, numbers in their order; raises where nothing can be learned from them."""
    labels = {split: Counter(label for _, label in rows) for split, rows in splits.items()}
    found = labels["train"]
    if len(found) > MOST_CLASSES * len(splits["train"]) and len(found) > FEW_CLASSES:
        raise UsageError(
            f"{name} has {len(found):,} labels in {len(splits['train']):,} training rows",
            "Name the column of the classes (--label-column NAME).",
        )
    for split, rows in splits.items():
        if not rows:
            raise UsageError(
                f"{name} has no rows for {split}", "Ten rows of a class or more make all three splits."
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
    whole = all(label.removeprefix("-").isdecimal() for label in found)
    return sorted(found, key=(lambda label: (int(label), label)) if whole else None)


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """A prepared set: a corpus whose documents have classes, cut to `context` tokens.

    A row is what the tokenizer makes of the text, with the tokens that it puts around one.
    """

    corpus: Corpus
    context: int
    first: int | None = None  # so many training rows, of a seeded order

    def tell(self) -> None:
        """What one should know of the data before believing its numbers."""
        for what, count in self.manifest["facts"]["left out"].items():
            warnings.warn(f"left out: {count:,} {what}", stacklevel=3)
        longer = int((self.spans("train")[1] > self.context - len(self.around[0] + self.around[1])).sum())
        if longer:
            warnings.warn(
                f"{longer:,} of {len(self.labels('train')):,} training rows are longer than the context of "
                f"{self.context} tokens: their ends are not read",
                stacklevel=3,
            )

    @property
    def manifest(self) -> dict[str, Any]:
        return self.corpus.manifest

    @property
    def vocab_size(self) -> int:
        return self.corpus.vocab_size

    @property
    def classes(self) -> list[str]:
        return list(self.manifest["facts"]["classes"])

    @cached_property
    def tokenizer(self) -> Any:
        return reading(self.corpus.tokenizer, self.context)

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        return around(self.tokenizer)

    @lru_cache(maxsize=3)  # noqa: B019  (of the few sets of a process)
    def spans(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        """Where the text of each row starts in the corpus, and its tokens."""
        starts, total = self.corpus.documents(split), len(self.corpus.tokens(split))
        lengths = np.diff(starts, append=total) - 1
        return starts + self.corpus.begins_with_bos, lengths

    @lru_cache(maxsize=3)  # noqa: B019
    def labels(self, split: str) -> np.ndarray:
        return np.fromfile(self.corpus.folder / f"{split}.labels", "<i4").astype(np.int64)

    @cached_property
    def train(self) -> np.ndarray:
        """The rows that are trained on."""
        count = len(self.labels("train"))
        return order.permutation(count, 0)[: self.first] if self.first else np.arange(count)

    @cached_property
    def weights(self) -> np.ndarray:
        """Of each class, such that all classes weigh the same in train and rows 1 on average."""
        counts = np.bincount(self.labels("train")[self.train], minlength=len(self.classes))
        return (len(self.train) / len(self.classes) / np.maximum(counts, 1)).astype(np.float32)

    @cached_property
    def lengths(self) -> np.ndarray:
        """To which batches are padded."""
        return few_lengths(self._read("train", self.train), LENGTHS, self.context)

    def _read(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row as it is read."""
        return np.minimum(self.spans(split)[1][rows] + sum(map(len, self.around)), self.context)

    def padded(self, split: str, rows: np.ndarray) -> np.ndarray:
        """To which of the lengths each row is padded at least."""
        longest = self.lengths[-1]
        fits = self.lengths[np.searchsorted(self.lengths, np.minimum(self._read(split, rows), longest))]
        return np.where(self._read(split, rows) > longest, self.context, fits)

    @lru_cache(maxsize=2)  # noqa: B019
    def epoch(self, number: int, seed: int, batch: int) -> np.ndarray:
        lengths = self.padded("train", self.train)
        return self.train[order.epoch_of_examples(lengths, number, seed=seed, batch=batch)]

    def batch(self, step: int, *, seed: int, batch: int) -> dict[str, np.ndarray]:
        """A training batch, a pure function of (seed, step)."""
        slots, count = np.arange(step * batch, (step + 1) * batch), len(self.train)
        rows = [self.epoch(int(slot // count), seed, batch)[slot % count] for slot in slots]
        found = self.rows("train", np.array(rows))
        return {**found, "weights": self.weights[found["labels"]]}

    def widest(self, seed: int, batch: int) -> int:
        """A step of the first epoch whose batch is padded the most."""
        whole = self.epoch(0, seed, batch)[: len(self.train) // batch * batch].reshape(-1, batch)
        return int(self.padded("train", whole).max(-1).argmax()) if len(whole) else 0

    def rows(self, split: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        starts, lengths = self.spans(split)
        tokens = self.corpus.tokens(split)
        texts = [tokens[starts[row] : starts[row] + min(lengths[row], self.context)] for row in rows]
        length = int(self.padded(split, rows).max())
        found = laid_out(texts, self.around, length, self.context, self.tokenizer.pad_token_id)
        return {**found, "labels": self.labels(split)[rows]}

    def texts(self, split: str) -> list[str]:
        """The rows of valid or test as they stood."""
        return list(json.loads((self.corpus.folder / f"{split}.json").read_text()))

    def in_batches(self, split: str, rows: np.ndarray, batch: int) -> Iterator[np.ndarray]:
        """Rows of about the same length together."""
        ordered = rows[np.argsort(self._read(split, rows), kind="stable")]
        yield from np.array_split(ordered, range(batch, len(rows), batch))


def few_lengths(sizes: np.ndarray, most: int, longest: int) -> np.ndarray:
    """So many lengths, multiples of 8 or the longest, that rows padded to the next of them have the fewest
    tokens: least(j) = min_i least(i) + e_j (n_j - n_i) over ends e, with n_j rows up to e_j."""
    ends = np.minimum(np.arange(8, int(sizes.max()) + 8, 8), longest)
    rows = np.searchsorted(np.sort(sizes), ends, side="right")
    more = np.where(np.tri(len(ends), k=-1, dtype=bool).T, ends * (rows - rows[:, None]), np.inf)
    least, before = ends * rows.astype(float), []
    for _ in range(most - 1):
        cost = least[:, None] + more
        before.append(np.where(cost.min(0) < least, cost.argmin(0), -1))
        least = np.minimum(least, cost.min(0))
    chosen = [len(ends) - 1]
    for back in reversed(before):
        if back[chosen[0]] >= 0:
            chosen.insert(0, int(back[chosen[0]]))
    return ends[chosen]


def reading(tokenizer: Any, context: int) -> Any:
    """A tokenizer that pads, and cuts to the context."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = context
    return tokenizer


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before and behind a text."""
    whole, bare = (tokenizer("a", add_special_tokens=added).input_ids for added in (True, False))
    before = next(i for i in range(len(whole) + 1) if whole[i : i + len(bare)] == bare)
    return whole[:before], whole[before + len(bare) :]
