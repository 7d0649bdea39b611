"""Charts of what the models became: how calibrated they are, and the scalars they learned."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from langevin.studies.report.svg import (
    WIDE,
    Axis,
    Frame,
    Look,
    axis,
    exact_axis,
    figure,
    line,
    scaffold,
    shortened,
)
from langevin.studies.results import Results
from langevin.studies.words import number


def reliabilities(results: Results) -> list[str]:
    """One small diagram an arm: accuracy by confidence, seeds pooled, bars darker where tokens are many."""
    drawn = []
    for index, arm in enumerate(results["arms"]):
        bins = _pooled([run.get("reliability") or [] for run in arm["runs"]])
        if bins:
            drawn.append(_reliability(index, arm["name"], bins))
    return drawn


def _pooled(runs: list[list[dict[str, Any]]]) -> list[dict[str, float]]:
    """Bins with the same edges put together: counts add, confidence and accuracy weigh by count."""
    found: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for bins in runs:
        for b in bins:
            if b["count"] and b["accuracy"] is not None and b["confidence"] is not None:
                found.setdefault((b["low"], b["high"]), []).append(b)
    return [
        {
            "low": low,
            "high": high,
            "count": (count := sum(b["count"] for b in same)),
            "confidence": sum(b["count"] * b["confidence"] for b in same) / count,
            "accuracy": sum(b["count"] * b["accuracy"] for b in same) / count,
        }
        for (low, high), same in sorted(found.items())
    ]


def _reliability(index: int, name: str, bins: list[dict[str, float]]) -> str:
    wide, tall = 300.0, 290.0
    unit = exact_axis(0, 1, (0, 0.25, 0.5, 0.75, 1))
    frame = Frame(unit, unit, left=44, top=28, width=wide - 44 - 16, height=tall - 28 - 46)
    most, total = max(b["count"] for b in bins), sum(b["count"] for b in bins)
    look = Look(index)
    parts = []
    for b in bins:
        (x, top), (end, base) = frame.at(b["low"], b["accuracy"]), frame.at(b["high"], 0)
        shade = 0.1 + 0.5 * (b["count"] / most) ** 0.5
        across, down = max(end - x - 1, 1), max(base - top, 0)
        tip = f"{b['count']:,} tokens: confidence {b['confidence']:.3f}, accuracy {b['accuracy']:.3f}"
        parts.append(
            f'<rect class="bin" style="{look.style}" x="{x + 0.5:.1f}" y="{top:.1f}" '
            f'width="{across:.1f}" height="{down:.1f}" fill-opacity="{shade:.2f}">'
            f"<title>{tip}</title></rect>"
        )
    parts.append(line(frame.at(0, 0), frame.at(1, 1), "truth"))
    placed = [frame.at(b["confidence"], b["accuracy"]) for b in bins]
    parts.append(look.line(placed, "seed-strong"))
    parts += [look.marker(at, 0.7) for at in placed]
    gap = sum(b["count"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / total
    title = f"Reliability of {name}"
    told = f"Accuracy against confidence in {len(bins)} bins; mean distance to the diagonal {number(gap)}."
    body = scaffold(frame, "confidence", "accuracy") + "".join(parts)
    key, caption = f"reliability-{index}", shortened(name, 34)
    return figure(key, title, told, (wide, tall), body, caption=caption, kind="small")


def scalars(results: Results) -> list[str]:
    """Learned scalars by layer, one chart a name: each head a marker, the mean over heads a line."""
    runs = [run for arm in results["arms"] for run in arm["runs"]]
    names = dict.fromkeys(row["name"] for run in runs for row in run.get("learned") or [])
    return [found for i, name in enumerate(names) if (found := _scalar(results, name, i))]


def _scalar(results: Results, name: str, position: int) -> str:
    arms = []
    for index, arm in enumerate(results["arms"]):
        heads: dict[tuple[int, int | None], list[float]] = {}
        for run in arm["runs"]:
            for row in run.get("learned") or []:
                if row["name"] == name and row["value"] is not None:
                    heads.setdefault((row["layer"], row.get("head")), []).append(row["value"])
        if heads:
            arms.append((index, arm["name"], {key: fmean(found) for key, found in heads.items()}))
    if not arms:
        return ""
    layers = sorted({layer for *_, heads in arms for layer, _ in heads})
    step = max(1, len(layers) // 12)
    ticks = tuple((float(layer), str(layer)) for layer in layers[::step])
    x = Axis(layers[0] - 0.5, layers[-1] + 0.5, ticks)
    frame = Frame(
        x, axis([v for *_, heads in arms for v in heads.values()], pad=0.08), 56, 34, WIDE - 70, 190
    )
    parts = []
    for place, (index, arm_name, values) in enumerate(arms):
        look = Look(index)
        shift = 0.16 * (place - (len(arms) - 1) / 2)
        own = sorted({layer for layer, _ in values})
        means = [fmean(v for (at, _), v in values.items() if at == layer) for layer in own]
        parts.append(look.line(frame.at(layer + shift, v) for layer, v in zip(own, means, strict=True)))
        for (layer, head), value in sorted(values.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
            where = f"layer {layer}" + ("" if head is None else f", head {head}")
            parts.append(
                look.marker(
                    frame.at(layer + shift, value), 0.8, tip=f"{arm_name}, {where}: {number(value)}"
                )
            )
    title = f"Learned {name} by layer"
    several = any(len(arm["runs"]) > 1 for arm in results["arms"])
    note = "A marker a head; the line is the mean over heads." + (" Means over seeds." if several else "")
    told = f"{title} for {', '.join(arm_name for _, arm_name, _ in arms)}."
    body = scaffold(frame, "layer", f"{name} (learned value)") + "".join(parts)
    legend = [(i, n) for i, n, _ in arms]
    return figure(f"scalar-{position}", title, told, (WIDE, 264), body, legend=legend, note=note)
