"""Charts of the arms: paired differences, quality against cost, reliability, and what they learned."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from langevin.studies.report.svg import (
    WIDE,
    Axis,
    Box,
    Dot,
    Frame,
    Look,
    axis,
    exact_axis,
    figure,
    line,
    panel,
    place_label,
    scaffold,
    shortened,
    text,
)
from langevin.studies.results import Results, metric_named
from langevin.studies.statistics import cost_of
from langevin.studies.words import amount, interval, number, probability, sentence_case, with_unit


def forests(results: Results) -> list[str]:
    """Paired differences to the reference arm, one chart a metric: point, interval, zero line."""
    names = [m["name"] for m in results["metrics"]]
    order = sorted(range(len(names)), key=lambda i: names[i] != results["primary"])
    return [found for i in order if (found := _forest(results, names[i], f"forest-{i}"))]


def _forest(results: Results, name: str, key: str) -> str:
    rows = [
        c
        for c in results.get("comparisons") or []
        if c["metric"] == name and c.get("at", "best") == "best" and c.get("difference") is not None
    ]
    if not rows:
        return ""
    metric = metric_named(results, name)
    order = {arm["name"]: i for i, arm in enumerate(results["arms"])}
    ends = [0.0] + [c[k] for c in rows for k in ("low", "high", "difference") if c.get(k) is not None]
    each, top = 42.0, 26.0
    frame = Frame(axis(ends, pad=0.06), exact_axis(0, 1, ()), 16, top, WIDE - 32, each * len(rows))
    parts = [line((frame.across(0), top - 4), (frame.across(0), top + frame.height), "zero")]
    for i, c in enumerate(rows):
        y = top + each * i + 30
        parts.append(_estimate(frame, Look(order[c["arm"]]), y, c))
        judged = c["verdict"]
        if c.get("p") is not None and judged != "too few seeds":
            judged = f"{judged}, p {probability(c['p'])}"
        parts.append(text(frame.left, y - 14, shortened(c["arm"], 48 - len(judged)), "label halo"))
        parts.append(text(WIDE - 16, y - 14, judged, "label quiet halo", "end"))
    better = {"lower": "left of zero is better", "higher": "right of zero is better"}
    body = scaffold(
        frame,
        f"difference in {with_unit(metric['label'], metric['unit'])}",
        better.get(metric["better"], ""),
    )
    title = f"{sentence_case(metric['label'])}: difference to {rows[0]['against']}"
    told = "; ".join(
        f"{c['arm']} {number(c['difference'], sign=True)} {interval(c.get('low'), c.get('high'), True)}"
        for c in rows
    )
    size = (WIDE, top + frame.height + 46)
    return figure(key, title, f"{told}.", size, body + "".join(parts))


def _estimate(frame: Frame, look: Look, y: float, c: dict[str, Any]) -> str:
    """The interval as a bar with caps, and the mean on it."""
    bars = ""
    if c.get("low") is not None and c.get("high") is not None:
        low, high = frame.across(c["low"]), frame.across(c["high"])
        caps = (line((x, y - 4), (x, y + 4), "bar") for x in (low, high))
        bars = look.whisker(line((low, y), (high, y), "bar"), *caps)
    tip = f"{c['arm']}: {number(c['difference'], sign=True)} {interval(c.get('low'), c.get('high'), True)}"
    return bars + look.marker((frame.across(c["difference"]), y), 1.15, tip=tip)


COSTS = (
    ("tokens_per_second", "training speed", "tokens/s", 1.0),
    ("decode_ms_per_token", "decoding time", "ms/token", 1.0),
    ("flops_per_token", "model work", "FLOP/token", 1.0),
    ("peak_memory_bytes", "peak memory", "MB", 1e6),
    ("state_bytes", "decoding state", "kB", 1e3),
)


def scatters(results: Results) -> list[str]:
    """The primary metric against each cost that was measured and is not the same for every arm."""
    metric, drawn = metric_named(results, results["primary"]), []
    for name, label, unit, scale in COSTS:
        spots: dict[int, Dot] = {}
        for index, arm in enumerate(results["arms"]):
            cost, found = cost_of(arm, name), (arm.get("summary") or {}).get(metric["name"]) or {}
            if cost is not None and found.get("mean") is not None:
                x, y = cost / scale, found["mean"]
                tip = f"{arm['name']}: {number(y)} {metric['unit']} at {amount(x)} {unit}"
                ends = () if found.get("low") is None else (found["low"], found["high"])
                spots[index] = Dot(x, y, arm["name"], tip, ends)
        costs = [spot.x for spot in spots.values()]
        if len(spots) > 1 and max(costs) - min(costs) > 0.01 * max(costs):
            drawn.append(_scatter(metric, spots, f"cost-{name}", label, unit))
    return drawn


def _scatter(metric: dict[str, str], spots: dict[int, Dot], key: str, label: str, unit: str) -> str:
    dots = list(spots.values())
    costs = [dot.x for dot in dots]
    log = min(costs) > 0 and max(costs) / min(costs) >= 20
    x = axis(costs, pad=0.12, log=log)
    if min(costs) >= 0 > x.low:
        x = Axis(0.0, x.high, tuple(tick for tick in x.ticks if tick[0] >= 0))
    frame = panel(x, axis([y for dot in dots for y in (dot.y, *dot.ends)], pad=0.1))
    x_label = with_unit(label, unit) + (", log scale" if log else "")
    body = scaffold(frame, x_label, with_unit(metric["label"], metric["unit"])) + _names(frame, dots)
    body += "".join(dot.drawn(frame, Look(index), 1.25) for index, dot in spots.items())
    title = f"{sentence_case(metric['label'])} against {label}"
    told = "; ".join(f"{dot.shown}: {number(dot.y)} at {amount(dot.x)} {unit}" for dot in dots)
    return figure(key, title, f"{told}.", (WIDE, 296), body)


def _names(frame: Frame, dots: list[Dot]) -> str:
    """Each point's name beside it; a thin line leads to a name that had to move away."""
    room = (frame.left + 2, frame.top, frame.left + frame.width + 14, frame.top + frame.height)
    centres = [frame.at(dot.x, dot.y) for dot in dots]
    taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in centres]
    for dot, (x, _) in zip(dots, centres, strict=True):
        if dot.ends:
            low, high = (frame.at(dot.x, end)[1] for end in dot.ends)
            taken.append((x - 3, high, x + 3, low))
    leads, names = [], []
    for dot, (x, y) in sorted(zip(dots, centres, strict=True), key=lambda pair: pair[1][1]):
        short = shortened(dot.shown, 22)
        (left, base), anchor = place_label((x, y), short, taken, room)
        if abs(base - 5 - y) > 12:
            leads.append(line((x, y), (left + (-2 if anchor == "start" else 2), base - 5), "lead"))
        names.append(text(left, base, short, "label halo", anchor))
    return "".join(leads + names)


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
