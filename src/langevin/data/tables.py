"""Rows of CSV, TSV, JSON Lines and Parquet files: the text in one column, and others beside it."""

import csv
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from langevin.data.texts import read_text
from langevin.errors import UsageError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
SUFFIXES = (*DELIMITERS, *JSON_LINES, PARQUET)
USUAL_COLUMN = "text"
LONGEST_FIELD = (1 << 31) - 1


def is_table(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES


def rows(path: Path, column: str | None) -> Iterator[str]:
    """The text of every row, without the white space around it; rows without any are left out, and told.

    column: its name, or its number (1, 2, ...) in a CSV or TSV file without a header; None: `text`.
    """
    empty = 0
    for (field,) in records(path, [column or USUAL_COLUMN]):
        if text := field.strip():
            yield text
        else:
            empty += 1
    if empty:
        warnings.warn(f"{path}: {empty:,} rows have no text and are left out", stacklevel=2)


def records(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The fields of every row in these columns, the first of which holds texts; all by name, or all by
    number where a file has no header. What a row of JSON Lines or Parquet does not have is empty."""
    suffix = path.suffix.lower()
    if suffix in JSON_LINES:
        return _json_fields(path, columns)
    return _parquet_fields(path, columns) if suffix == PARQUET else _fields(path, columns)


def _fields(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    csv.field_size_limit(LONGEST_FIELD)
    delimiter = DELIMITERS[path.suffix.lower()]
    plain = delimiter == "\t" and not _quotes_hold_fields(path)
    table = csv.reader(
        _lines(read_text(path)),
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL,
        strict=True,
    )
    try:
        header = next(row for row in table if row)
        if all(header.count(column) == 1 for column in columns):
            places = [header.index(column) for column in columns]
        elif all(column.isdecimal() and 1 <= int(column) <= len(header) for column in columns):
            places = [int(column) - 1 for column in columns]
            yield tuple(header[place] for place in places)
        else:
            raise _no_column(path, columns, header)
        for row in table:
            if row and len(row) != len(header):
                raise UsageError(
                    f"{path} line {table.line_num} has {len(row)} fields instead of {len(header)}",
                    "Put quotes around a field that has the separator or a line end in it.",
                )
            if row:
                yield tuple(row[place] for place in places)
    except csv.Error as error:
        raise UsageError(
            f"{path} line {table.line_num} cannot be read: {error}",
            "Put a field that has quotes in it between quotes, and write each of its own twice.",
        ) from None


def _quotes_hold_fields(path: Path) -> bool:
    """Whether quotes in a TSV file stand around fields, as in CSV; often they are part of the text.

    Those of a text may pair up by chance and would then swallow the tabs and lines between them, which are
    the same in number as elsewhere. So they are characters where every line has as many tabs, one or more,
    and a row with quotes is not what its line is, unless quotes within are doubled there, as CSV has it.
    """
    lines = Counter(line.count("\t") for line in _lines(read_text(path)) if line.strip("\r\n"))
    rows, doubled = Counter[int](), False
    try:
        for row in csv.reader(_lines(read_text(path)), delimiter="\t", strict=True):
            if row:
                rows[len(row) - 1] += 1
                doubled |= any('"' in field and ("\t" in field or "\n" in field) for field in row)
    except csv.Error:
        return False
    even = len(lines) == 1 and 0 not in lines
    return rows == lines or doubled or not even


def _json_fields(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    missing, there = set(columns), dict[str, None]()
    for number, line in enumerate(_lines(read_text(path)), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("it is no object")
            fields = _told(columns, [row.get(column) for column in columns])
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path} line {number} cannot be read: {error}",
                f'Every line must be a JSON object such as {{"{columns[0]}": "Once upon a time ..."}}.',
            ) from None
        if missing:  # from every row so far
            missing.difference_update(row)
            there.update(dict.fromkeys(row))
        yield fields
    if missing:
        raise _no_column(path, columns, there)


def _parquet_fields(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            f"{path} cannot be read: pyarrow is not installed",
            "Run pip install 'langevin[data]', or save the table as CSV or JSONL.",
        ) from None
    try:
        table = parquet.ParquetFile(path)
        if not all(column in table.schema_arrow.names for column in columns):
            raise _no_column(path, columns, table.schema_arrow.names)
        for part in table.iter_batches(columns=list(columns)):
            for row in part.to_pylist():
                yield _told(columns, [row[column] for column in columns])
    except UsageError:
        raise
    except ValueError as error:  # what pyarrow raises is one
        raise UsageError(f"{path} cannot be read: {error}", "Save the table again.") from None


def _told(columns: Sequence[str], values: list[object]) -> tuple[str, ...]:
    """Values as they would stand in a CSV file; the first must be a text, or missing."""
    for column, value in zip(columns, values, strict=True):
        plain = value is None or isinstance(value, str)
        plain = plain or (column != columns[0] and not isinstance(value, list | dict))
        if not plain:
            raise ValueError(f"{column!r} is {json.dumps(value, default=str)[:40]}, not a text")
    fields = tuple("" if value is None else str(value) for value in values)
    "".join(fields).encode()  # \ud800 in JSON is half a character
    return fields


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines with their ends; other signs that Unicode calls line ends are characters of the text."""
    held = ""
    for text in texts:
        *whole, held = (held + text).split("\n")
        yield from (f"{line}\n" for line in whole)
    if held:
        yield held


def _no_column(path: Path, columns: Sequence[str], there: Iterable[str]) -> UsageError:
    there = list(there)
    which, column = next((i, c) for i, c in enumerate(columns) if there.count(c) != 1)
    names = ", ".join(repr(name if len(name) <= 30 else f"{name[:29]}…") for name in there)
    return UsageError(
        f"{path} has no column {column!r} of its own: it has {names}",
        f"Name the column of the {'label' if which else 'text'} (--{'label' if which else 'text'}-column "
        "NAME), or its number where there is no header (1 for the first).",
    )
