"""Texts as tokens: `prepare` a named source or a local file, and train on it in a fixed order. Images are
in `langevin.data.images`.

corpus = langevin.data.prepare("stories")
corpus.batch("train", step, seed=0, batch=32, context=256)

Nothing is imported before it is used: what runs an exported file has little memory, and reads texts here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langevin.data.corpus import Corpus, same_data
    from langevin.data.examples import LabelledTexts

__all__ = ["Corpus", "LabelledTexts", "names", "prepare", "prepare_labelled", "same_data"]

_MODULES = {"Corpus": "corpus", "same_data": "corpus", "LabelledTexts": "examples"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"langevin.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'langevin.data' has no attribute {name!r}")


def prepare(name: str, tokenizer: str | None = None, *, progress: bool = True, **settings: Any) -> Corpus:
    """Tokenise a text into `$LANGEVIN_CACHE` (or ~/.cache/langevin), or open what was tokenised before.

    name: a name from `names()`, a text or table file (CSV, TSV, JSONL), or a folder of them.
    tokenizer: `bytes`, `chars`, `bpe-N`, a tokenizer's folder or its name on the Hugging Face Hub; None for
        the usual one of the source.
    progress: show a progress bar on a terminal.
    settings: of the source: `stories` takes seed, train, valid and test (numbers of stories), a local text
        takes valid and test (fractions) and, in a table, text_column.
    """
    from langevin.data.shards import tokenised
    from langevin.data.sources import find

    source = find(name, settings)
    return tokenised(source, source.tokenizer if tokenizer is None else tokenizer, progress)


def prepare_labelled(
    name: str,
    tokenizer: str | None = None,
    *,
    context: int,
    text_column: str | None = None,
    label_column: str | None = None,
    first: int | None = None,
    progress: bool = True,
) -> LabelledTexts:
    """Texts with classes, tokenised and cached as by `prepare`, and read up to `context` tokens.

    name: a name from `names()`, a table (CSV, TSV, JSONL, Parquet), or a folder of them.
    text_column, label_column: of a table; None for text and label.
    first: how many of the training rows to take.
    progress: show a progress bar on a terminal, and warn of rows that were left out or are cut.
    """
    from langevin.data.examples import LabelledTexts
    from langevin.data.labelled import find
    from langevin.data.shards import tokenised

    source = find(name, text_column, label_column)
    found = LabelledTexts(tokenised(source, tokenizer or source.tokenizer, progress), context, first)
    if progress:
        found.tell()
    return found


def names() -> list[dict[str, Any]]:
    """The sources that have a name; here: whether they can be prepared without network."""
    from langevin.data import images, labelled
    from langevin.data.sources import GENERATED, NAMED, NamedText

    rows: list[dict[str, Any]] = []
    every: dict[str, Any] = {**GENERATED, **NAMED}
    for name, source in every.items():
        row = {"name": name, "kind": "generated", "about": source.about, "tokenizer": source.tokenizer}
        if isinstance(source, NamedText):
            folder = source.folder(name)
            paths = [] if folder is None else [folder / file for file in source.files]
            here = bool(paths) and all(path.is_file() for path in paths)
            size = sum(path.stat().st_size for path in paths) if here else None
            rows.append({**row, "kind": "text", "here": here, "bytes": size})
        else:
            rows.append({**row, "here": True, "bytes": None})
    for name, (about, _) in labelled.GENERATED.items():
        row = {"name": name, "kind": "generated, labelled", "about": about, "tokenizer": "spaces"}
        rows.append({**row, "here": True, "bytes": None})
    for name, known in labelled.NAMED.items():
        files = known.here()
        row = {
            "name": name,
            "kind": "labelled",
            "about": known.about,
            "tokenizer": labelled.USUAL_TOKENIZER,
        }
        size = sum(path.stat().st_size for path in files.values()) if files else None
        rows.append({**row, "here": bool(files), "bytes": size})
    for name, about in images.ABOUT.items():
        here = name == "digits" or images.cifar_folder() is not None
        row = {"name": name, "kind": "images", "about": about, "tokenizer": ""}
        rows.append({**row, "here": here, "bytes": None})
    return rows
