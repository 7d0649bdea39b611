"""The page of a recipe that measures times: training steps, and mixers alone by length."""

from __future__ import annotations

from typing import Any

from langevin.studies.report.numbers import number
from langevin.studies.report.page import grid, noted
from langevin.studies.report.reading import Results
from langevin.studies.report.recipe_page import claimed, making, titled
from langevin.studies.report.svg import (
    WIDE,
    Axis,
    Look,
    axis,
    drawing,
    figure,
    legend,
    line,
    panel,
    scaffold,
)
from langevin.studies.report.tables import Cell, Column, Row, plain_head, table

PARTS = {"module": "Module", "core": "Core"}
TIMES = {"forward_ratio": "forward", "both_ratio": "forward and backward"}


def speed_page(results: Results) -> str:
    """The claims, then the times of training steps and of the mixers alone."""
    training, mixers = results["training"], results["mixers"]
    sections = [
        *claimed(results),
        (
            "training",
            "Training steps",
            noted(_of_steps(training["settings"]), _training_table(training["rows"])),
        ),
        (
            "mixers",
            "Mixers alone",
            noted(_of_mixers(mixers["settings"]), _charts(mixers["rows"]) + _mixers_table(mixers["rows"])),
        ),
        *making(results),
    ]
    machine = results["environment"]
    return titled(results, [str(machine["device"]), f"torch {machine['torch']}"], sections)


def _of_steps(settings: dict[str, Any]) -> str:
    compiled = {"on": "compiled", "loss": "with a compiled loss"}.get(settings["compile"], "not compiled")
    return (
        f"{settings['layers']} layers, {settings['width']} wide, {settings['heads']} heads; "
        f"{settings['batch']} sequences of {settings['context']:,} tokens a step, vocabulary "
        f"{settings['vocab']:,}; {settings['precision']}, {compiled}, {settings['optimizer']}. "
        f"Medians of {settings['rounds']} rounds of {settings['seconds a round']:g} s, the mixers in turn."
    )


def _of_mixers(settings: dict[str, Any]) -> str:
    return (
        "Module: x to x with projections and positions; core: q, k, v to mixed values. "
        f"{settings['width']} wide, {settings['heads']} heads, {settings['tokens']:,} tokens a batch, "
        f"{'causal' if settings['causal'] else 'bidirectional'}; {settings['dtype']}, "
        f"{'compiled' if settings['compile'] else 'not compiled'}. Medians of {settings['repeats']} runs."
    )


def _charts(rows: list[dict[str, Any]]) -> str:
    drawn = [_chart(rows, part, time) for part in PARTS for time in TIMES]
    return grid([chart for chart in drawn if chart])


def _chart(rows: list[dict[str, Any]], part: str, time: str) -> str:
    """Time as a multiple of softmax's by length, a line a mixer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["part"] == part:
            lines.setdefault(row["mixer"], []).append((row["length"], row[time]))
    lengths = sorted({length for points in lines.values() for length, _ in points})
    if len(lengths) < 2:
        return ""
    across = axis(lengths, log=True)
    ticks = tuple((float(length), f"{length:,}") for length in lengths)
    heights = axis([ratio for points in lines.values() for _, ratio in points], log=True)
    x_axis = Axis(across.low, across.high, ticks, log=True)
    frame = panel(x_axis, heights)
    marks = [line(frame.at(x_axis.low, 1), frame.at(x_axis.high, 1), "zero")]
    for index, (mixer, points) in enumerate(lines.items()):
        look = Look(index)
        marks.append(look.line([frame.at(*point) for point in points]))
        for length, ratio in points:
            tip = f"{mixer}: {ratio:.2f} at {length:,} tokens"
            marks.append(look.marker(frame.at(length, ratio), tip=tip))
    title = f"{PARTS[part]}, {TIMES[time]}"
    body = scaffold(frame, "length (tokens), log scale", "time (× softmax), log scale") + "".join(marks)
    told = "; ".join(
        f"{name}: " + ", ".join(f"{r:.2f}" for _, r in points) for name, points in lines.items()
    )
    picture = drawing(f"speed-{part}-{time}", title, f"{told}.", (WIDE, 296), body)
    return figure(title, picture, legend(list(enumerate(lines))))


def _training_table(rows: list[dict[str, Any]]) -> str:
    columns = [
        Column("mixer"),
        Column("parameters"),
        Column("speed", "tokens/s"),
        Column("spread", "tokens/s"),
    ]
    columns += [Column("time", "× softmax"), Column("loop", "× bare work")]
    body = [
        Row(
            plain_head(row["mixer"]),
            [
                Cell(f"{row['parameters']:,}", row["parameters"]),
                Cell(f"{row['tokens_per_second']:,.0f}", row["tokens_per_second"]),
                Cell(f"{row['spread']:,.0f}", row["spread"]),
                Cell(f"{1 / row['ratio']:.3f}", 1 / row["ratio"]),
                Cell(f"{row['host_ratio']:.3f}", row["host_ratio"]),
            ],
        )
        for row in rows
    ]
    return table(columns, body, "Times of whole training steps", sortable=True)


def _mixers_table(rows: list[dict[str, Any]]) -> str:
    columns = [Column("mixer"), Column("part"), Column("length", "tokens"), Column("forward", "ms")]
    columns += [Column("forward", "× softmax"), Column("forward and backward", "ms")]
    columns += [Column("forward and backward", "× softmax"), Column("peak memory", "× softmax")]
    body = [
        Row(
            plain_head(row["mixer"]),
            [
                Cell(row["part"], row["part"]),
                Cell(f"{row['length']:,}", row["length"]),
                Cell(number(row["forward_ms"]), row["forward_ms"]),
                Cell(f"{row['forward_ratio']:.2f}", row["forward_ratio"]),
                Cell(number(row["both_ms"]), row["both_ms"]),
                Cell(f"{row['both_ratio']:.2f}", row["both_ratio"]),
                Cell(f"{row['peak_ratio']:.2f}", row["peak_ratio"]),
            ],
        )
        for row in rows
    ]
    return table(columns, body, "Times of the mixers alone", sortable=True)
