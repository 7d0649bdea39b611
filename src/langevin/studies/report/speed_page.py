"""The page of a recipe that measures times: training steps, and mixers alone by length."""

from __future__ import annotations

from langevin.studies.report.page import document, grid, noted
from langevin.studies.report.recipe_page import claimed, making
from langevin.studies.report.svg import Axis, Dot, axis, line, line_chart, panel
from langevin.studies.report.tables import Cell, Column, table
from langevin.studies.results import Results, Row
from langevin.studies.words import number

PARTS = {"module": "Module", "core": "Core"}
TIMES = {"forward_ratio": "forward", "both_ratio": "forward and backward"}


def speed_page(results: Results) -> str:
    """The claims, then the times of training steps and of the mixers alone."""
    training, mixers = results["training"], results["mixers"]
    steps = noted(_of_steps(training["settings"]), _training_table(training["rows"]))
    drawn = [_chart(mixers["rows"], part, time) for part in PARTS for time in TIMES]
    alone = grid([chart for chart in drawn if chart]) + _mixers_table(mixers["rows"])
    sections = [
        *claimed(results),
        ("training", "Training steps", steps),
        ("mixers", "Mixers alone", noted(_of_mixers(mixers["settings"]), alone)),
        *making(results),
    ]
    machine = results["environment"]
    return document(results["title"], [str(machine["device"]), f"torch {machine['torch']}"], sections)


def _of_steps(settings: Row) -> str:
    compiled = {"on": "compiled", "loss": "with a compiled loss"}.get(settings["compile"], "not compiled")
    return (
        f"{settings['layers']} layers, {settings['width']} wide, {settings['heads']} heads; "
        f"{settings['batch']} sequences of {settings['context']:,} tokens a step, vocabulary "
        f"{settings['vocab']:,}; {settings['precision']}, {compiled}, {settings['optimizer']}. "
        f"Medians of {settings['rounds']} rounds of {settings['seconds a round']:g} s, the mixers in turn."
    )


def _of_mixers(settings: Row) -> str:
    return (
        "Module: x to x with projections and positions; core: q, k, v to mixed values. "
        f"{settings['width']} wide, {settings['heads']} heads, {settings['tokens']:,} tokens a batch, "
        f"{'causal' if settings['causal'] else 'bidirectional'}; {settings['dtype']}, "
        f"{'compiled' if settings['compile'] else 'not compiled'}. Medians of {settings['repeats']} runs."
    )


def _chart(rows: list[Row], part: str, time: str) -> str:
    """Time as a multiple of softmax's by length, a line a mixer."""
    lines: dict[str, list[Dot]] = {}
    for row in rows:
        if row["part"] == part:
            tip = f"{row['mixer']}: {row[time]:.2f} at {row['length']:,} tokens"
            dot = Dot(row["length"], row[time], f"{row[time]:.2f}", tip)
            lines.setdefault(row["mixer"], []).append(dot)
    dots = [dot for line in lines.values() for dot in line]
    lengths = sorted({dot.x for dot in dots})
    if len(lengths) < 2:
        return ""
    across = axis(lengths, log=True)
    across = Axis(across.low, across.high, tuple((x, f"{x:,}") for x in lengths), log=True)
    frame = panel(across, axis([dot.y for dot in dots], log=True))
    same = line(frame.at(across.low, 1), frame.at(across.high, 1), "zero")
    labels = "length (tokens), log scale", "time (× softmax), log scale"
    title = f"{PARTS[part]}, {TIMES[time]}"
    return line_chart(f"speed-{part}-{time}", title, frame, labels, lines, under=same)


def _training_table(rows: list[Row]) -> str:
    columns = [Column("mixer"), Column("parameters"), Column("speed", "tokens/s")]
    columns += [Column("spread", "tokens/s"), Column("time", "× softmax"), Column("loop", "× bare work")]
    body = [
        [
            row["mixer"],
            Cell(f"{row['parameters']:,}", row["parameters"]),
            Cell(f"{row['tokens_per_second']:,.0f}", row["tokens_per_second"]),
            Cell(f"{row['spread']:,.0f}", row["spread"]),
            Cell(f"{1 / row['ratio']:.3f}", 1 / row["ratio"]),
            Cell(f"{row['host_ratio']:.3f}", row["host_ratio"]),
        ]
        for row in rows
    ]
    return table(columns, body, "Times of whole training steps", sortable=True)


def _mixers_table(rows: list[Row]) -> str:
    columns = [Column("mixer"), Column("part"), Column("length", "tokens"), Column("forward", "ms")]
    columns += [Column("forward", "× softmax"), Column("forward and backward", "ms")]
    columns += [Column("forward and backward", "× softmax"), Column("peak memory", "× softmax")]
    body = [
        [
            row["mixer"],
            Cell(row["part"], row["part"]),
            Cell(f"{row['length']:,}", row["length"]),
            Cell(number(row["forward_ms"]), row["forward_ms"]),
            Cell(f"{row['forward_ratio']:.2f}", row["forward_ratio"]),
            Cell(number(row["both_ms"]), row["both_ms"]),
            Cell(f"{row['both_ratio']:.2f}", row["both_ratio"]),
            Cell(f"{row['peak_ratio']:.2f}", row["peak_ratio"]),
        ]
        for row in rows
    ]
    return table(columns, body, "Times of the mixers alone", sortable=True)
