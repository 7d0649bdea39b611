"""The page of the recipe `speed`: mixers alone and in training steps, beside what was published."""

from typing import Any

from langevin import figures
from langevin.studies.numbers import number
from langevin.studies.report.page import Cell, Chart, Column, Page, Part, Section, Table
from langevin.studies.report.study import claims_table
from langevin.studies.results import Answer
from langevin.studies.words import claims_in_short

PARTS = {"core": "Mixing alone", "module": "Attention module"}
RATIOS = {"forward_ratio": "forward", "both_ratio": "forward and backward"}


def speed_page(results: dict[str, Any], answers: list[Answer]) -> Page:
    mixers, training = results["mixers"], results["training"]
    drawn = [_chart(mixers["rows"], part, ratio) for part in PARTS for ratio in RATIOS]
    machine = results["environment"]
    sections = [
        Section("mixers", "Mixers alone", [Part("charts", drawn[2:]), _mixers(mixers["rows"])]),
        Section("training", "Training steps", [_training(training["rows"])]),
        Section("commands", "Commands", [Part("code", results["commands"])]),
        Section(
            "versions",
            "Versions and settings",
            [
                Part("facts", machine, "Environment"),
                Part("facts", mixers["settings"], "Mixers"),
                Part("facts", training["settings"], "Training"),
            ],
        ),
        Section("uncontrolled", "What was not controlled", [Part("points", results["not_controlled"])]),
    ]
    return Page(
        results["title"],
        claims_in_short(answers),
        f"{training['settings']['rounds']} rounds in turn; what lies within their spread stays open.",
        facts=[str(machine["device"]), f"torch {machine['torch']}"],
        hero=[chart for chart in drawn[:2] if chart],
        table=claims_table(answers),
        sections=sections,
    )


def _chart(rows: list[dict[str, Any]], part: str, ratio: str) -> Chart:
    """Time as a multiple of softmax's by length, a line a mixer."""
    names = list(dict.fromkeys(row["mixer"] for row in rows))
    lines = []
    for index, name in enumerate(names):
        own = [row for row in rows if row["mixer"] == name and row["part"] == part]
        lines.append(figures.Line(name, index, [r["length"] for r in own], [r[ratio] for r in own]))
    title = f"{PARTS[part]}, {RATIOS[ratio]}"
    labels = "length (tokens), log scale", "time (× softmax), log scale"
    drawn = figures.curves(lines, labels, level=1.0, log="xy")
    legend = tuple(enumerate(names))
    return Chart(title, figures.svg(drawn, f"speed-{part}-{ratio}"), told=title, legend=legend)


def _table(caption: str, heads: list[tuple[str, str, str]], rows: list[dict[str, Any]]) -> Table:
    """heads: of each column its label, its unit and the key of its values."""
    columns = [Column("mixer"), *(Column(label, unit) for label, unit, _ in heads)]
    body = [[row["mixer"], *(_cell(row[key]) for _, _, key in heads)] for row in rows]
    return Table(caption, columns, body)


def _cell(value: Any) -> Cell:
    shown = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else number(value)
    return Cell(shown, value)


def _training(rows: list[dict[str, Any]]) -> Table:
    heads = [("parameters", "", "parameters"), ("speed", "tokens/s", "tokens_per_second")]
    heads += [("spread", "tokens/s", "spread"), ("speed", "× softmax", "ratio")]
    heads += [("loop", "× bare work", "host_ratio")]
    return _table("Times of whole training steps", heads, rows)


def _mixers(rows: list[dict[str, Any]]) -> Table:
    heads = [("part", "", "part"), ("length", "tokens", "length"), ("forward", "ms", "forward_ms")]
    heads += [("forward", "× softmax", "forward_ratio"), ("forward and backward", "ms", "both_ms")]
    heads += [
        ("forward and backward", "× softmax", "both_ratio"),
        ("peak memory", "× softmax", "peak_ratio"),
    ]
    return _table("Times of the mixers alone", heads, rows)
