"""Charts that compare the arms: paired differences, and quality against cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langevin.studies.report.svg import (
    WIDE,
    Axis,
    Box,
    Frame,
    Look,
    Point,
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
    side = {"lower": "left of zero is better", "higher": "right of zero is better"}.get(
        metric["better"], ""
    )
    body = scaffold(frame, f"difference in {with_unit(metric['label'], metric['unit'])}", side)
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


@dataclass(frozen=True)
class Spot:
    """An arm in a scatter: what it costs, and the primary metric with its interval."""

    index: int
    name: str
    cost: float
    mean: float
    low: float | None
    high: float | None


def scatters(results: Results) -> list[str]:
    """The primary metric against each cost that was measured and is not the same for every arm."""
    drawn = []
    for name, label, unit, scale in COSTS:
        spots = _spots(results, name, scale)
        costs = [spot.cost for spot in spots]
        if len(spots) > 1 and max(costs) - min(costs) > 0.01 * max(costs):
            drawn.append(
                _scatter(metric_named(results, results["primary"]), spots, f"cost-{name}", label, unit)
            )
    return drawn


def _spots(results: Results, name: str, scale: float) -> list[Spot]:
    found = []
    for index, arm in enumerate(results["arms"]):
        cost, summary = cost_of(arm, name), (arm.get("summary") or {}).get(results["primary"]) or {}
        if cost is not None and summary.get("mean") is not None:
            ends = summary.get("low"), summary.get("high")
            found.append(Spot(index, arm["name"], cost / scale, summary["mean"], *ends))
    return found


def _scatter(metric: dict[str, str], spots: list[Spot], key: str, label: str, unit: str) -> str:
    costs = [spot.cost for spot in spots]
    log = min(costs) > 0 and max(costs) / min(costs) >= 20
    x = axis(costs, pad=0.12, log=log)
    if min(costs) >= 0 > x.low:
        x = Axis(0.0, x.high, tuple(tick for tick in x.ticks if tick[0] >= 0))
    heights = [v for spot in spots for v in (spot.low, spot.mean, spot.high) if v is not None]
    frame = panel(x, axis(heights, pad=0.1))
    centres = [frame.at(spot.cost, spot.mean) for spot in spots]
    marks = []
    for spot, centre in zip(spots, centres, strict=True):
        look = Look(spot.index)
        if spot.low is not None and spot.high is not None:
            low, high = (frame.at(spot.cost, end) for end in (spot.low, spot.high))
            marks.append(look.whisker(line(low, high, "bar")))
        tip = f"{spot.name}: {number(spot.mean)} {metric['unit']} at {amount(spot.cost)} {unit}"
        marks.append(look.marker(centre, 1.25, tip=tip))
    x_label = with_unit(label, unit) + (", log scale" if log else "")
    body = scaffold(frame, x_label, with_unit(metric["label"], metric["unit"]))
    body += _names(frame, spots, centres) + "".join(marks)
    title = f"{sentence_case(metric['label'])} against {label}"
    told = "; ".join(f"{spot.name}: {number(spot.mean)} at {amount(spot.cost)} {unit}" for spot in spots)
    return figure(key, title, f"{told}.", (WIDE, 296), body)


def _names(frame: Frame, spots: list[Spot], centres: list[Point]) -> str:
    """Each point's name beside it; a thin line leads to a name that had to move away."""
    room = (frame.left + 2, frame.top, frame.left + frame.width + 14, frame.top + frame.height)
    taken: list[Box] = [(x - 7, y - 7, x + 7, y + 7) for x, y in centres]
    for spot, (x, _) in zip(spots, centres, strict=True):
        if spot.low is not None and spot.high is not None:
            taken.append(
                (x - 3, frame.at(spot.cost, spot.high)[1], x + 3, frame.at(spot.cost, spot.low)[1])
            )
    leads, names = [], []
    for spot, (x, y) in sorted(zip(spots, centres, strict=True), key=lambda pair: pair[1][1]):
        short = shortened(spot.name, 22)
        (left, base), anchor = place_label((x, y), short, taken, room)
        if abs(base - 5 - y) > 12:
            leads.append(line((x, y), (left + (-2 if anchor == "start" else 2), base - 5), "lead"))
        names.append(text(left, base, short, "label halo", anchor))
    return "".join(leads + names)
