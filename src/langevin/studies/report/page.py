"""What a page shows, and how it becomes one file of HTML.

Its styles, drawings and script are inside; its content security policy forbids any request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from langevin.figures import Line

SYMBOLS = "●■▲◆▼★✚✖"
RELOAD_SECONDS = 15


@dataclass(frozen=True)
class Cell:
    """Text, what it is sorted by, quieter text beside it and lines under it. arm: whose mark it has."""

    shown: str
    value: float | str | None = None
    aside: str = ""
    fine: tuple[str, ...] = ()
    kind: str = ""  # good, bad, quiet, strong
    arm: int | None = None


@dataclass(frozen=True)
class Column:
    label: str
    unit: str = ""
    kind: str = ""  # words: of sentences, which are broken


@dataclass(frozen=True)
class Table:
    """Rows of cells, or of their text; the first cell is the head of its row."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | str]]
    sortable: bool = True
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Chart:
    """A figure: its title, what it tells those who cannot see it, and what its lines are."""

    title: str
    figure: Figure
    told: Sequence[str]
    note: str = ""
    lines: Sequence[Line] = ()

    @property
    def svg(self) -> str:
        from langevin import figures

        return figures.svg(self.figure, self.title)


@dataclass(frozen=True)
class Part:
    """Of a section: charts; points, one a sentence; lines of code; facts by name; or samples, each whose it
    is, what it was asked to go on with, and how it went on."""

    kind: Literal["charts", "points", "code", "facts", "samples"]
    items: Sequence[Any] | Mapping[str, Any]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """Folded until it is asked for, and open on paper; left out where its parts hold nothing."""

    key: str
    title: str
    parts: Sequence[Table | Part]
    note: str = ""

    @property
    def shown(self) -> list[Table | Part]:
        return [part for part in self.parts if (part.rows if isinstance(part, Table) else part.items)]


@dataclass(frozen=True)
class Page:
    """The question, its answer, how sure it is, and what shows it; all else in sections."""

    question: str
    answer: str
    sure: str = ""
    more: Sequence[str] = ()
    facts: Sequence[str] = ()
    hero: Sequence[Chart] = ()
    tall: bool = False  # whether the first chart stands beside the text and the others
    table: Table | None = None
    sections: Sequence[Section] = ()
    reload: bool = False  # until the study is done


def render(page: Page) -> str:
    """The whole page as text; the same page gives the same text."""
    shown = [section for section in page.sections if section.shown]
    return _template().render(page=page, sections=shown, seconds=RELOAD_SECONDS)


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"mark": _mark, "breakable": _breakable, "plainly": plainly}
    environment.globals |= {
        name: Markup(_asset(name.replace("_", "."))) for name in ("style_css", "page_js")
    }
    return environment.from_string(_asset("page.html.j2"))


def _asset(name: str) -> str:
    return files("langevin.studies.report").joinpath(name).read_text(encoding="utf-8")


def _mark(arm: int) -> Markup:
    """How an arm is drawn in every chart (`figures.look`)."""
    more, colour = divmod(arm, len(SYMBOLS))
    return Markup('<span class="mark" style="color:var(--c{})" aria-hidden="true">{}</span>').format(
        colour, SYMBOLS[(colour + more) % len(SYMBOLS)]
    )


def _breakable(spec: str) -> Markup:
    """A spec that may break before its arguments and its wrappers rather than inside a word."""
    return Markup(escape(spec).replace("(", Markup("(<wbr>")).replace("+", Markup("<wbr>+")))


def plainly(value: Any) -> str:
    """A setting or a fact as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(plainly, value))
    return str(value)
