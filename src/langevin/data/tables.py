"""Rows of CSV, TSV and JSON Lines files as documents: the text in one of their columns."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from langevin.data.texts import read_text
from langevin.errors import UsageError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
SUFFIXES = (*DELIMITERS, *JSON_LINES)
USUAL_COLUMN = "text"
LONGEST_FIELD = (1 << 31) - 1


def is_table(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def rows(path: Path, column: str | None) -> Iterator[str]:
    """The text of every row, without the white space around it; rows without any are left out.

    column: its name, or its number (1, 2, ...) in a CSV or TSV file without a header; None: `text`.
    """
    read = _json_fields if path.suffix.lower() in JSON_LINES else _fields
    return (text for field in read(path, column or USUAL_COLUMN) if (text := field.strip()))


def _fields(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(LONGEST_FIELD)
    delimiter = DELIMITERS[path.suffix.lower()]
    plain = delimiter == "\t" and not _quotes_pair_up(path)
    table = csv.reader(
        _lines(read_text(path)),
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
        strict=True,
    )
    try:
        header = next(row for row in table if row)
        if header.count(column) == 1:
            index = header.index(column)
        elif column.isdecimal() and 1 <= int(column) <= len(header):
            index = int(column) - 1
            yield header[index]
        else:
            raise _no_column(path, column, header)
        for row in table:
            if row and len(row) != len(header):
                raise UsageError(
                    f"{path} line {table.line_num} has {len(row)} fields instead of {len(header)}",
                    "Put quotes around a field that has the separator or a line end in it.",
                )
            if row:
                yield row[index]
    except csv.Error as error:
        raise UsageError(
            f"{path} line {table.line_num} cannot be read: {error}",
            "Put a field that has quotes in it between quotes, and write each of its own twice.",
        ) from None


def _quotes_pair_up(path: Path) -> bool:
    """Whether quotes in a TSV file stand around fields, as in CSV; often they are part of the text."""
    try:
        for _ in csv.reader(_lines(read_text(path)), delimiter="\t", strict=True):
            pass
    except csv.Error:
        return False
    return True


def _json_fields(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_lines(read_text(path)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("it is no object")
            if column not in row:
                raise _no_column(path, column, row)
            if not isinstance(row[column], str):
                raise ValueError(f"{column!r} is {json.dumps(row[column])[:40]}, not a text")
            row[column].encode()  # \ud800 in JSON is half a character
        except UsageError:
            raise
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path} line {number} cannot be read: {error}",
                f'Every line must be a JSON object such as {{"{column}": "Once upon a time ..."}}.',
            ) from None
        yield row[column]


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines with their ends; other signs that Unicode calls line ends are characters of the text."""
    held = ""
    for text in texts:
        *whole, held = (held + text).split("\n")
        yield from (f"{line}\n" for line in whole)
    if held:
        yield held


def _no_column(path: Path, column: str, there: Iterable[str]) -> UsageError:
    names = ", ".join(repr(name if len(name) <= 30 else f"{name[:29]}…") for name in there)
    return UsageError(
        f"{path} has no column {column!r} of its own: it has {names}",
        "Name the column of the text (--text-column NAME), or its number where there is no header (1 for "
        "the first).",
    )
