"""Texts as tokens: `prepare` a named source or a local file, and train on it in a fixed order. Images are
in `langevin.data.images`.

corpus = langevin.data.prepare("stories")
corpus.batch("train", step, seed=0, batch=32, context=256)

Nothing is imported before it is used: what runs an exported file has little memory, and reads texts here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from langevin.data.corpus import Corpus
    from langevin.data.examples import LabelledTexts

__all__ = ["names", "prepare", "prepare_labelled"]


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
    corpus = tokenised(source, tokenizer or source.tokenizer, progress)
    found = LabelledTexts(corpus.folder, corpus.manifest, first, context=context)
    if progress:
        found.tell()
    return found


def names() -> list[dict[str, Any]]:
    """The sources that have a name; here: whether they can be prepared without network."""
    from langevin.data import images, labelled, sources

    rows: list[dict[str, Any]] = []

    def add(name: str, kind: str, about: str, tokenizer: str, here: bool, *files: Path) -> None:
        row = {"name": name, "kind": kind, "about": about, "tokenizer": tokenizer, "here": here}
        rows.append({**row, "bytes": sum(path.stat().st_size for path in files) or None})

    for name, made in sources.GENERATED.items():
        add(name, "generated", made.about, made.tokenizer, True)
    for name, text in sources.NAMED.items():
        folder = text.folder(name)
        files = [] if folder is None else [folder / file for file in text.files]
        here = bool(files) and all(path.is_file() for path in files)
        add(name, "text", text.about, text.tokenizer, here, *(files if here else ()))
    for name, (about, _) in labelled.GENERATED.items():
        add(name, "generated, labelled", about, "spaces", True)
    for name, known in labelled.NAMED.items():
        some = known.here().values()
        add(name, "labelled", known.about, labelled.USUAL_TOKENIZER, bool(some), *some)
    for name, about in images.ABOUT.items():
        add(name, "images", about, "", name == "digits" or images.cifar_folder() is not None)
    return rows
