"""Tables as HTML, sortable with JavaScript and plain without; here also those that are not about arms."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from langevin.studies.report.numbers import NOTHING
from langevin.studies.report.reading import Results


@dataclass(frozen=True)
class Cell:
    """What a cell shows and what it is sorted by; `fine` are smaller lines under it."""

    shown: str
    value: float | str | None = None
    fine: tuple[str, ...] = ()
    kind: str = ""

    def html(self) -> str:
        value = "" if self.value is None else f' data-value="{escape(str(self.value))}"'
        fine = "".join(f'<span class="fine">{escape(part)}</span>' for part in self.fine if part)
        return f"<td{value}{_classed(self.kind)}>{escape(self.shown)}{fine}</td>"


@dataclass(frozen=True)
class Column:
    label: str
    unit: str = ""
    kind: str = ""

    def html(self) -> str:
        unit = f'<span class="unit">{escape(self.unit)}</span>' if self.unit else ""
        name = f'<span class="name">{escape(self.label)}</span>'
        return f'<th scope="col"{_classed(self.kind)}>{name}{unit}</th>'


@dataclass(frozen=True)
class Row:
    """The head of a row, as HTML, and its cells."""

    head: str
    cells: list[Cell]

    def html(self) -> str:
        return f"<tr>{self.head}{''.join(cell.html() for cell in self.cells)}</tr>"


def table(columns: list[Column], rows: list[Row], caption: str, sortable: bool = False) -> str:
    """A table in a box of its own, which scrolls where the page is narrower than the table."""
    head = "".join(column.html() for column in columns)
    body = "".join(row.html() for row in rows)
    sort = " data-sortable" if sortable and len(rows) > 1 else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{sort}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _classed(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def plain_head(name: str, kind: str = "") -> str:
    return f'<th scope="row"{_classed(kind)}>{escape(name)}</th>'


def published_table(results: Results) -> str:
    """What was published beside what we found, and whether it held."""
    tones = {"yes": "better", "no": "worse"}
    rows = [
        Row(
            plain_head(str(c["claim"]), "words"),
            [
                Cell(_free(c.get("published")), kind="wrap"),
                Cell(_free(c.get("ours")), kind="wrap"),
                Cell(c["held"], kind=tones.get(c["held"], "quiet")),
                Cell(c.get("sentence") or "", kind="words"),
            ],
        )
        for c in results.get("published") or []
    ]
    columns = [Column("claim"), Column("published"), Column("ours"), Column("held")]
    columns.append(Column("in a sentence", kind="words"))
    return table(columns, rows, "Published claims and what we found") if rows else ""


def _free(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else NOTHING if value is None else str(value)


def failed_table(results: Results) -> str:
    """Every run that did not finish, with its error."""
    rows = [
        Row(
            plain_head(arm["name"]),
            [
                Cell(str(run["seed"])),
                Cell(str(run.get("path") or ""), kind="words"),
                Cell(str(run.get("error") or "no error was recorded"), kind="words"),
            ],
        )
        for arm in results["arms"]
        for run in arm["runs"]
        if run["status"] != "done"
    ]
    columns = [Column("arm"), Column("seed"), Column("folder", kind="words"), Column("error", kind="words")]
    return table(columns, rows, "Failed runs") if rows else ""


def splits_table(results: Results) -> str:
    """The data, by split, with the hash of the text."""
    splits = (results.get("data") or {}).get("splits") or {}
    rows = [
        Row(
            plain_head(name),
            [
                *(Cell(_count(split.get(key))) for key in ("tokens", "characters", "documents")),
                Cell(str(split.get("text_sha256") or NOTHING), kind="hash"),
            ],
        )
        for name, split in splits.items()
    ]
    columns = [Column(label) for label in ("split", "tokens", "characters", "documents")]
    columns.append(Column("SHA-256 of the text", kind="words"))
    return table(columns, rows, "Data by split") if rows else ""


def _count(value: Any) -> str:
    return NOTHING if value is None else f"{value:,}"
