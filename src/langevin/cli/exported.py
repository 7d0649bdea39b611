"""`predict FILE.onnx --text TEXT ...` in little memory: the parser of options takes more than most models.

What is typed most is read here, anything else by the parser. Both open files and show classes by what is
below.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from langevin.errors import UsageError
from langevin.export.runtime import OnnxClassifier


def light(given: list[str]) -> Callable[[], int] | None:
    """The command, if its options are those: FILE.onnx --text TEXT ... [--json]."""
    match given:
        case [file, "--text", *texts, "--json"] | [file, "--json", "--text", *texts]:
            as_json = True
        case [file, "--text", *texts]:
            as_json = False
        case _:
            return None
    if not file.endswith(".onnx") or not texts or any(part.startswith("-") for part in (file, *texts)):
        return None
    return partial(predict, Path(file), texts, as_json)


def predict(file: Path, texts: list[str], as_json: bool) -> int:
    check_texts(texts)
    classify = opened(file)
    names, found = classify.names, classify(texts)
    del classify
    _give_back()
    show("text", texts, names, found, as_json)
    return 0


def _give_back() -> None:
    """What was freed, to the system: a table takes less than a model did. Only glibc waits to be asked."""
    if sys.platform == "linux":
        import ctypes

        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def check_texts(texts: Sequence[str]) -> None:
    """A text of nothing has no class, here as in a table."""
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise UsageError(f"text {number} of {len(texts)} is empty", "Give every --text some words.")


def opened(file: Path, batch: int = 64) -> OnnxClassifier:
    if not file.is_file():
        raise UsageError(f"no such file: {file}", "Check the path.")
    return OnnxClassifier(file, batch=batch)


def show(kind: str, given: Sequence[str], names: list[str], found: Any, as_json: bool) -> None:
    """The class of each text or image, by the (B, C) probabilities of classes."""
    rows = [dict(zip(names, map(float, shares), strict=True)) for shares in found]
    best = [max(shares, key=lambda name: shares[name]) for shares in rows]
    if as_json:
        keys, told = (kind, "label", "probabilities"), zip(given, best, rows, strict=True)
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in told], indent=1))
        return
    from rich.markup import escape

    from langevin.cli.tables import console_for, table_of

    table = table_of(None, kind, "class", "probability", "then", left=2)
    for text, name, shares in zip(given, best, rows, strict=True):
        others = sorted((p, other) for other, p in shares.items() if other != name)[::-1][:2]
        then = ", ".join(f"{other} {p:.1%}" for p, other in others)
        shown = " ".join(text.split())
        table.add_row(escape(shown[:60]), escape(name), f"{shares[name]:.1%}", escape(then))
    console_for().print(table)
