"""Tables as HTML, sortable with JavaScript and plain without; here also those that are not about arms."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from langevin.studies.results import Results
from langevin.studies.words import NOTHING


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
    """The head of a column; its kind is also that of cells in it that are plain text."""

    label: str
    unit: str = ""
    kind: str = ""

    def html(self) -> str:
        unit = f'<span class="unit">{escape(self.unit)}</span>' if self.unit else ""
        name = f'<span class="name">{escape(self.label)}</span>'
        return f'<th scope="col"{_classed(self.kind)}>{name}{unit}</th>'


@dataclass(frozen=True)
class Head:
    """The first cell of a row, whose content is HTML already."""

    content: str
    value: str = ""
    kind: str = ""

    def html(self) -> str:
        value = f' data-value="{escape(self.value)}"' if self.value else ""
        return f'<th scope="row"{value}{_classed(self.kind)}>{self.content}</th>'


def table(columns: list[Column], rows: list[list[Any]], caption: str, sortable: bool = False) -> str:
    """A table in a box of its own, which scrolls where the page is narrower than the table; nothing without
    rows. A row is its head and its cells, or their text."""
    if not rows:
        return ""
    body = "".join(f"<tr>{_row(columns, row)}</tr>" for row in rows)
    sort = " data-sortable" if sortable and len(rows) > 1 else ""
    head = "".join(column.html() for column in columns)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{sort}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(columns: list[Column], row: list[Any]) -> str:
    head, *cells = row
    head = Head(escape(head), kind=columns[0].kind) if isinstance(head, str) else head
    pairs = zip(cells, columns[1:], strict=True)
    made = [Cell(cell, kind=column.kind) if isinstance(cell, str) else cell for cell, column in pairs]
    return "".join(part.html() for part in (head, *made))


def _classed(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def published_table(results: Results) -> str:
    """What was published beside what we found, and whether it held."""
    tones = {"yes": "better", "no": "worse"}
    columns = [Column("claim", kind="words"), Column("published", kind="wrap"), Column("ours", kind="wrap")]
    columns += [Column("held"), Column("in a sentence", kind="words")]
    rows = []
    for claim in results.get("published") or []:
        held = Cell(claim["held"], kind=tones.get(claim["held"], "quiet"))
        numbers = (_free(claim.get(key)) for key in ("published", "ours"))
        rows.append([str(claim["claim"]), *numbers, held, claim.get("sentence") or ""])
    return table(columns, rows, "Published claims and what we found")


def _free(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else NOTHING if value is None else str(value)


def failed_table(results: Results) -> str:
    """Every run that did not finish, with its error."""
    columns = [Column("arm"), Column("seed"), Column("folder", kind="words"), Column("error", kind="words")]
    rows = [
        [arm["name"], str(run["seed"]), run.get("path") or "", run.get("error") or "no error was recorded"]
        for arm in results["arms"]
        for run in arm["runs"]
        if run["status"] != "done"
    ]
    return table(columns, rows, "Failed runs")


def splits_table(results: Results) -> str:
    """The data, by split, with the hash of the text."""
    counts = ("tokens", "characters", "documents")
    columns = [Column(label) for label in ("split", *counts)]
    columns.append(Column("SHA-256 of the text", kind="words"))
    rows = []
    for name, split in ((results.get("data") or {}).get("splits") or {}).items():
        shown = (NOTHING if split.get(key) is None else f"{split[key]:,}" for key in counts)
        rows.append([name, *shown, Cell(split.get("text_sha256") or NOTHING, kind="hash")])
    return table(columns, rows, "Data by split")
