"""A local text file, or a folder of text files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from langevin.data.texts import (
    FEW_DOCUMENTS,
    SEPARATOR,
    SPLITS,
    Texts,
    cut_by_position,
    read_text,
    split_documents,
)
from langevin.errors import UsageError

SUFFIXES = (".txt", ".text", ".md")


@dataclass(frozen=True)
class LocalText:
    """How a local text is split: the last parts of it are for validation and test.

    A folder with train.txt, valid.txt and test.txt is split that way already. Otherwise each file of a
    folder is a document; so is what stands between separators; a single file without them is one stream.
    """

    valid: float = 0.05
    test: float = 0.05

    tokenizer: ClassVar[str] = "bpe-4096"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or not 0 < value < 0.5:
                raise UsageError(f"{name} must be a fraction between 0 and 0.5, not {value!r}")

    def identity(self) -> dict[str, Any]:
        return {"settings": asdict(self)}

    def files(self, path: Path) -> dict[str, Path]:
        """The text files there, by their path relative to the folder, in order."""
        if path.is_file():
            return {path.name: path}
        files = sorted(
            (at.relative_to(path).as_posix(), at)
            for at in path.rglob("*")
            if at.is_file() and at.suffix in SUFFIXES
        )
        if not files:
            raise UsageError(
                f"no text files in {path}", f"A text file's name ends with {', '.join(SUFFIXES)}."
            )
        return dict(files)

    def read(self, files: Mapping[str, Path]) -> Texts:
        texts = {name: read_text(path) for name, path in files.items()}
        if set(texts) == {f"{split}.txt" for split in SPLITS}:
            return self._split_already(texts)
        if len(texts) == 1 and SEPARATOR not in next(iter(texts.values())):
            return self._cut(list(texts.values()), documents=False)
        documents = [document for text in texts.values() for document in split_documents(text)]
        return self._cut(documents, documents=True)

    def _split_already(self, texts: Mapping[str, str]) -> Texts:
        documents = any(SEPARATOR in text for text in texts.values())
        splits = {
            split: split_documents(texts[f"{split}.txt"]) if documents else [texts[f"{split}.txt"]]
            for split in SPLITS
        }
        return Texts(splits, documents, {"split": "train.txt, valid.txt, test.txt"})

    def _cut(self, documents_: list[str], documents: bool) -> Texts:
        whole = documents and len(documents_) >= FEW_DOCUMENTS
        parts = cut_by_position(documents_, (1 - self.valid - self.test, 1 - self.test), whole)
        for split, part in zip(SPLITS, parts, strict=True):
            if not any(part):
                raise UsageError(
                    f"the text is too short to split: nothing is left for {split}",
                    "Use a longer text, or a folder with train.txt, valid.txt and test.txt.",
                )
        unit = "documents" if whole else "lines"
        return Texts(
            dict(zip(SPLITS, parts, strict=True)), documents, {"split": f"by position, at {unit}' borders"}
        )
