"""The pages of recipes of costs: mixers alone and in training steps, or classifiers in training by the
length of texts, beside what was published."""

from itertools import product
from typing import Any

from langevin import figures
from langevin.studies.numbers import number
from langevin.studies.report.page import Cell, Chart, Column, Page, Part, Section, Table
from langevin.studies.report.study import claims_table
from langevin.studies.results import Answer
from langevin.studies.words import claims_in_short

PARTS = {"core": "Mixing alone", "module": "Attention module"}
RATIOS = {"forward_ratio": "forward", "both_ratio": "forward and backward"}
BY_LENGTH = {"mib_a_text": "memory (MiB a text)", "tokens_per_second": "speed (tokens/s)"}


def speed_page(results: dict[str, Any], answers: list[Answer]) -> Page:
    machine = results["environment"]
    if "edge" in results:
        edge = results["edge"]
        rounds = edge["settings"]["repeats"]
        hero = [_chart(edge["rows"], "model", key, f"Training {of}", of) for key, of in BY_LENGTH.items()]
        left_out = Part("points", edge["left_out"], "What did not fit")
        measured = [Section("steps", "Training steps", [_classifiers(edge["rows"]), left_out])]
        settings = [Part("facts", edge["settings"], "Models")]
    else:
        mixers, training = results["mixers"], results["training"]
        rounds = training["settings"]["rounds"]
        drawn = []
        for (part, title), (ratio, what) in product(PARTS.items(), RATIOS.items()):
            own = [row for row in mixers["rows"] if row["part"] == part]
            drawn.append(_chart(own, "mixer", ratio, f"{title}, {what}", "time (× softmax)", level=1.0))
        hero = drawn[:2]
        measured = [
            Section("mixers", "Mixers alone", [Part("charts", drawn[2:]), _mixers(mixers["rows"])]),
            Section("training", "Training steps", [_training(training["rows"])]),
        ]
        settings = [
            Part("facts", mixers["settings"], "Mixers"),
            Part("facts", training["settings"], "Training"),
        ]
    sections = [
        *measured,
        Section("commands", "Commands", [Part("code", results["commands"])]),
        Section("versions", "Versions and settings", [Part("facts", machine, "Environment"), *settings]),
        Section("uncontrolled", "What was not controlled", [Part("points", results["not_controlled"])]),
    ]
    return Page(
        results["title"],
        claims_in_short(answers),
        f"{rounds} rounds in turn; what lies within their spread stays open.",
        facts=[str(machine["device"]), f"torch {machine['torch']}"],
        hero=hero,
        table=claims_table(answers),
        sections=sections,
    )


def _chart(
    rows: list[dict[str, Any]], name: str, key: str, title: str, label: str, level: float | None = None
) -> Chart:
    """By length, a line a mixer or a model."""
    lines, figure = figures.by_length(rows, name, key, label, level)
    return Chart(title, figure, [label], lines=lines)


def _table(caption: str, heads: list[tuple[str, str, str]], rows: list[dict[str, Any]]) -> Table:
    """heads: of each column its label, its unit and the key of its values; the first names the row."""
    columns = [Column(label, unit) for label, unit, _ in heads]
    body = [[row[heads[0][2]], *(_cell(row[key]) for _, _, key in heads[1:])] for row in rows]
    return Table(caption, columns, body)


def _cell(value: Any) -> Cell:
    shown = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else number(value)
    return Cell(shown, value)


def _training(rows: list[dict[str, Any]]) -> Table:
    heads = [("mixer", "", "mixer"), ("parameters", "", "parameters")]
    heads += [("speed", "tokens/s", "tokens_per_second")]
    heads += [("spread", "tokens/s", "spread"), ("speed", "× softmax", "ratio")]
    heads += [("loop", "× bare work", "host_ratio")]
    return _table("Times of whole training steps", heads, rows)


def _mixers(rows: list[dict[str, Any]]) -> Table:
    heads = [("mixer", "", "mixer"), ("part", "", "part"), ("length", "tokens", "length")]
    heads += [("forward", "ms", "forward_ms")]
    heads += [("forward", "× softmax", "forward_ratio"), ("forward and backward", "ms", "both_ms")]
    heads += [
        ("forward and backward", "× softmax", "both_ratio"),
        ("peak memory", "× softmax", "peak_ratio"),
    ]
    return _table("Times of the mixers alone", heads, rows)


def _classifiers(rows: list[dict[str, Any]]) -> Table:
    heads = [("model", "", "model"), ("length", "tokens", "length"), ("batch", "texts", "batch")]
    heads += [("parameters", "", "parameters"), ("forward", "GFLOPs a text", "gflops")]
    heads += [("peak memory", "MiB", "mib"), ("peak memory", "MiB a text", "mib_a_text")]
    heads += [("step", "ms, median", "ms_p50"), ("step", "ms, p90", "ms_p90")]
    heads += [("speed", "tokens/s", "tokens_per_second"), ("time", "× softmax", "ratio")]
    return _table("Training steps of classifiers by the length of texts", heads, rows)
