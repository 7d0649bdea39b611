"""Named texts and local files: where they are found and how they are split. A strict registry.

A name is looked for in `$LANGEVIN_DATA/NAME/`, then among what was fetched before, then on the Hugging
Face Hub. Anything else must be a text or table file, or a folder of them.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from langevin.data.hub import HubTexts, cache_root, data_root, fetched
from langevin.data.local import LocalText
from langevin.data.synthetic.stories import Stories
from langevin.data.texts import SPLITS, Stream, Texts, documents_of, read_text, split_between
from langevin.errors import UsageError, unknown
from langevin.runs.files import sha256


@dataclass(frozen=True)
class Source:
    """A text that has been found: `read` gives it, `identity` is all that its text depends on."""

    name: str
    tokenizer: str
    """The usual tokenizer for it."""
    identity: dict[str, Any]
    read: Callable[[], Texts]
    path: Path | None = None
    """Where a local text was found."""
    labelled: bool = False
    """Whether its documents have classes."""


@dataclass(frozen=True)
class NamedText:
    """A well-known text: its files, its usual split and where the Hub has it."""

    about: str
    tokenizer: str
    files: tuple[str, ...]
    split: Callable[[Mapping[str, Path]], Texts]
    hub: HubTexts | None = None
    official: Mapping[str, str] = field(default_factory=dict)
    """sha256 of the files everybody has, where there is one such file."""

    def find(self, name: str) -> Source:
        folder = self.folder(name) or fetched(name, self.hub, f"{name}/{self.files[0]}")
        paths = {file: folder / file for file in self.files}
        for path in paths.values():
            if not path.is_file():
                raise UsageError(
                    f"{name} is not complete: no file {path}", "Put it there, or fetch it again."
                )
        identity = {"files": {file: fingerprint(path) for file, path in paths.items()}}
        for file, expected in self.official.items():
            if identity["files"][file]["sha256"] != expected:
                warnings.warn(
                    f"{paths[file]} is not the usual file: numbers on it cannot be compared with others'",
                    stacklevel=2,
                )
        return Source(name, self.tokenizer, identity, lambda: self.split(paths))

    def folder(self, name: str) -> Path | None:
        """The folder that holds the set on this machine."""
        roots = [data_root(), cache_root() / "sources"]
        return next((root / name for root in roots if root is not None and (root / name).is_dir()), None)


def fingerprint(path: Path) -> dict[str, Any]:
    digest = sha256(path)
    return {"bytes": path.stat().st_size, "sha256": digest}


def _one_file_a_split(files: Mapping[str, Path], documents: bool) -> Texts:
    streams = [partial(documents_of if documents else read_text, path) for path in files.values()]
    return Texts(dict(zip(SPLITS, streams, strict=True)), documents, {"split": "official files"})


def _shakespeare(files: Mapping[str, Path]) -> Texts:
    """The first 90 % train, as usual; the usual 10 % for validation are halved into valid and test."""
    text, total = _only(files)
    splits = split_between(text, (int(0.9 * total), int(0.95 * total)), total)
    return Texts(splits, False, {"split": "90/5/5 % by position"})


def _text8(files: Mapping[str, Path]) -> Texts:
    """90/5/5 M characters of the full 100 M; a prefix by proportion, in whole millions from 20 M on."""
    text, total = _only(files)
    unit = 1_000_000 if total >= 20_000_000 else 1
    train = total * 9 // 10 // unit * unit
    valid = (total - train) // 2 // unit * unit
    sizes = [train, valid, total - train - valid]
    facts = {
        "split": f"{'/'.join(f'{size:,}' for size in sizes)} characters",
        "comparable": total == 100_000_000 or f"no: the first {total:,} of 100,000,000 characters",
    }
    return Texts(split_between(text, (train, train + valid), total), False, facts)


def _only(files: Mapping[str, Path]) -> tuple[Stream, int]:
    """The text of the only file, and its number of characters."""
    (path,) = files.values()
    return partial(read_text, path), sum(len(text) for text in read_text(path))


def _tinystories(files: Mapping[str, Path]) -> Texts:
    train, test = (partial(documents_of, path) for path in files.values())
    count = sum(1 for _ in train())
    cut = count - max(round(0.05 * count), 1)
    splits: dict[str, Stream] = {
        "train": lambda: islice(train(), cut),
        "valid": lambda: islice(train(), cut, None),
        "test": test,
    }
    return Texts(splits, True, {"split": "test.txt is test; the last 5 % of train.txt are valid"})


WIKITEXT_FILES = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")


def _wikitext_hub(config: str) -> HubTexts:
    splits = (("train",), ("validation",), ("test",))
    # On the Hub an empty row stands for a line with one space.
    return HubTexts(
        "Salesforce/wikitext", dict(zip(WIKITEXT_FILES, splits, strict=True)), config=config, blank=" \n"
    )


NAMED: dict[str, NamedText] = {
    "wikitext-2": NamedText(
        "Wikipedia articles, word level with <unk>: 2.1 M words",
        "gpt2",
        WIKITEXT_FILES,
        partial(_one_file_a_split, documents=False),
        _wikitext_hub("wikitext-2-v1"),
        {
            "wiki.train.tokens": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            "wiki.valid.tokens": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "wiki.test.tokens": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
    "wikitext-103": NamedText(
        "Wikipedia articles, word level with <unk>: 103 M words",
        "gpt2",
        WIKITEXT_FILES,
        partial(_one_file_a_split, documents=False),
        _wikitext_hub("wikitext-103-v1"),
    ),
    "tinystories": NamedText(
        "short stories in simple words, written by GPT-3.5 and GPT-4",
        "bpe-4096",
        ("train.txt", "test.txt"),
        _tinystories,
        HubTexts(
            "roneneldan/TinyStories",
            {"train.txt": ("train",), "test.txt": ("validation",)},
            documents=True,
        ),
    ),
    "sampled-stories": NamedText(
        "223 k stories drawn from a small Llama: its distribution is known",
        "bpe-4096",
        ("train.txt", "valid.txt", "test.txt"),
        partial(_one_file_a_split, documents=True),
    ),
    "text8": NamedText(
        "Wikipedia in a–z and spaces: 100 M characters",
        "chars",
        ("text8",),
        _text8,
        HubTexts("afmck/text8", {"text8": ("train", "validation", "test")}),
    ),
    "tinyshakespeare": NamedText(
        "Shakespeare: 1.1 M characters",
        "chars",
        ("input.txt",),
        _shakespeare,
        HubTexts(
            "karpathy/tiny_shakespeare",
            {"input.txt": ("train", "validation", "test")},
            revision="refs/convert/parquet",
        ),
        {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    ),
}

GENERATED = {"stories": Stories}


def find(name: str, settings: Mapping[str, Any]) -> Source:
    """The source of this name, or the local file or folder; a UsageError says what is missing."""
    if name in GENERATED:
        stories = _settings(name, GENERATED[name], settings)
        return Source(name, stories.tokenizer, stories.identity(), stories.read)
    if name in NAMED:
        if settings:
            raise unknown(f"setting of {name}", next(iter(settings)), ())
        return NAMED[name].find(name)
    if not name:
        raise UsageError("no data were named", "See langevin data list, or give the path of a text.")
    path = Path(name).expanduser()
    if not os.path.exists(path):  # Path.exists raises where a name is too long
        if path.suffix or len(path.parts) > 1:
            raise UsageError(f"no such file or folder: {path}", "Check the path.")
        ways = "Or the path of a text or table file, or of a folder of them."
        raise unknown("data", name, [*GENERATED, *NAMED], ways)
    local = _settings(name, LocalText, settings)
    path = path.resolve()
    groups = local.find(path)
    files = {at.relative_to(path.parent).as_posix(): at for some in groups.values() for at in some}
    identity = {"files": {file: fingerprint(at) for file, at in files.items()}, **local.identity()}
    return Source(path.name, local.tokenizer, identity, lambda: local.read(groups), path)


def _settings(name: str, kind: Any, settings: Mapping[str, Any]) -> Any:
    known = [field.name for field in fields(kind)]
    for key in settings:
        if key not in known:
            raise unknown(f"setting of {name}", key, known)
    return kind(**settings)
