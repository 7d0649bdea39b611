"""The page of a recipe of several parts, over a common axis; and what every recipe's page has."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from langevin.studies.report.numbers import common_spread, interval, number, sentence_case
from langevin.studies.report.page import Section, bullets, document, grid
from langevin.studies.report.reading import Results, with_unit
from langevin.studies.report.svg import (
    WIDE,
    Look,
    axis,
    drawing,
    exact_axis,
    figure,
    legend,
    line,
    panel,
    scaffold,
)
from langevin.studies.report.tables import Cell, Column, Row, plain_head, published_table, table

Spot = tuple[float, dict[str, Any]]
"""Where a mean and its interval stand."""


NOTE = "Means over seeds; bars are 95 % intervals, drawn from three seeds on."


def parts_page(results: Results, over: str | None) -> str:
    """The claims, then every metric over the parts, then a table for each part that leads to its report."""
    drawn = [
        _chart(results, metric, at, over) for metric in results["metrics"] for at in ("summary", "matched")
    ]
    sections = [
        *claimed(results),
        ("charts", "By part", grid([chart for chart in drawn if chart])),
        *(
            (f"part-{i}", sentence_case(part["name"]), _part(results, part))
            for i, part in enumerate(results["parts"])
        ),
        *making(results),
    ]
    seeds = len(results["seeds"])
    facts = [f"{len(results['parts'])} parts", f"{seeds} seed{'s' * (seeds != 1)}", results["data"]["name"]]
    return titled(results, [*facts, str(results["environment"].get("device") or "")], sections)


def titled(results: Results, facts: list[str], sections: list[Section]) -> str:
    return document(results["title"], " · ".join(escape(fact) for fact in facts if fact), sections)


def claimed(results: Results) -> list[Section]:
    about = f"Recipe {results['recipe']} at scale {results['scale']}: {results['retests']}."
    note = f'<p class="note">{escape(about)} Published in: {escape(results["source"])}.</p>'
    return [
        ("verdict", "Did it hold?", note + bullets(results["verdict"])),
        ("published", "Published and found", published_table(_with_parts(results))),
    ]


def _with_parts(results: Results) -> Results:
    """The claims with the part they are about, for a table over several."""
    rows = [
        {**row, "claim": f"{row['part']}: {row['claim']}" if row["part"] else row["claim"]}
        for row in results["published"]
    ]
    return {**results, "published": rows}


def making(results: Results) -> list[Section]:
    commands = escape("\n".join(results["commands"]))
    shown = re.sub(r"(--[\w-]+)", r'<span class="option">\1</span>', commands)
    facts = "".join(
        f"<div><dt>{escape(str(key))}</dt><dd>{escape(str(value))}</dd></div>"
        for key, value in results["environment"].items()
        if value is not None
    )
    return [
        ("commands", "Commands", f'<pre tabindex="0"><code>{shown}</code></pre>'),
        ("versions", "Versions", f'<div class="lists"><div><dl>{facts}</dl></div></div>'),
        ("not-controlled", "What was not controlled", bullets(results["not_controlled"])),
    ]


def _part(results: Results, part: Results) -> str:
    """Means and intervals of every metric by arm; matched ones in a second table."""
    link = f'<p><a href="{escape(part["path"])}/report.html">The report of this part</a></p>'
    best = _means_table(results, part, "summary", f"{part['name']}, at the best checkpoint")
    loss = part["matched_loss"]
    where = f"{part['name']}, at the matched validation loss" + (
        "" if loss is None else f" of {number(loss)}"
    )
    return link + best + _means_table(results, part, "matched", where)


def _means_table(results: Results, part: Results, at: str, caption: str) -> str:
    known = [m for m in results["metrics"] if any(m["name"] in arm[at] for arm in part["arms"])]
    if not known:
        return ""
    spreads = {
        m["name"]: common_spread([(s.get("low"), s.get("high")) for s in _summaries(part, at, m["name"])])
        for m in known
    }
    rows = []
    for arm in part["arms"]:
        cells = []
        for metric in known:
            found = arm[at].get(metric["name"]) or {}
            spread, ends = spreads[metric["name"]], (found.get("low"), found.get("high"))
            shown = number(found.get("mean"), spread)
            cells.append(Cell(shown, found.get("mean"), (interval(*ends, spread=spread),)))
        rows.append(Row(plain_head(arm["name"]), cells))
    columns = [Column("arm"), *(Column(metric["label"], metric["unit"]) for metric in known)]
    return table(columns, rows, sentence_case(caption), sortable=True)


def _summaries(part: Results, at: str, name: str) -> list[dict[str, Any]]:
    return [arm[at][name] for arm in part["arms"] if name in arm[at]]


def _chart(results: Results, metric: dict[str, str], at: str, over: str | None) -> str:
    """A metric over a setting of the parts, a line an arm; or over a key of the mixers, a line a part."""
    if over is None:
        return ""
    by_part = over in results["parts"][0]["settings"]
    lines = (
        _by_setting(results, metric["name"], at, over)
        if by_part
        else _by_key(results, metric["name"], at, over)
    )
    spots = [spot for line_ in lines.values() for spot in line_]
    if len({x for x, _ in spots}) < 2:
        return ""
    heights = [value for _, s in spots for value in (s["mean"], *_ends(s))]
    places = sorted({x for x, _ in spots})
    room = 0.06 * (places[-1] - places[0])
    x_axis = exact_axis(places[0] - room, places[-1] + room, places) if by_part else axis(places, log=True)
    frame = panel(x_axis, axis(heights, pad=0.08))
    marks = []
    for index, drawn in enumerate(lines.values()):
        look = Look(index)
        marks.append(look.line([frame.at(x, s["mean"]) for x, s in drawn]))
        for x, s in drawn:
            if ends := _ends(s):
                bar = line(frame.at(x, ends[0]), frame.at(x, ends[1]), "bar")
                marks.append(f'<g class="whisker" style="{look.style}">{bar}</g>')
            marks.append(look.marker(frame.at(x, s["mean"]), tip=f"{number(s['mean'])} at {over} {x:g}"))
    where = "at the best checkpoint" if at == "summary" else "at the matched loss"
    title = f"{sentence_case(metric['label'])} {where}"
    label = f"{over}{'' if by_part else ', log scale'}"
    body = scaffold(frame, label, with_unit(metric["label"], metric["unit"])) + "".join(marks)
    told = "; ".join(f"{name}: " + ", ".join(number(s["mean"]) for _, s in d) for name, d in lines.items())
    key = f"part-{metric['name']}-{at}"
    picture = drawing(key, title, f"{told}.", (WIDE, 296), body)
    return figure(title, picture, legend(list(enumerate(lines))), NOTE)


def _ends(summary: dict[str, Any]) -> tuple[float, ...]:
    """The interval, where it is drawn: of two seeds it would be twelve times as wide as their distance."""
    return (summary["low"], summary["high"]) if summary["n"] > 2 and summary["low"] is not None else ()


def _by_setting(results: Results, name: str, at: str, setting: str) -> dict[str, list[Spot]]:
    """A line for every place in the list of arms: the same arm may have another number in each part."""
    lines: dict[str, list[Spot]] = {}
    for index in range(len(results["parts"][0]["arms"])):
        arms = [(part["settings"][setting], part["arms"][index]) for part in results["parts"]]
        spots = [(float(x), arm[at][name]) for x, arm in arms if name in arm[at]]
        names = list(dict.fromkeys(arm["name"] for _, arm in arms))
        if spots:
            lines[" / ".join(names)] = spots
    return lines


def _by_key(results: Results, name: str, at: str, key: str) -> dict[str, list[Spot]]:
    lines: dict[str, list[Spot]] = {}
    for part in results["parts"]:
        found = [(re.search(rf"\b{key}=([\d.]+)", arm["spec"]), arm) for arm in part["arms"]]
        spots = [(float(m[1]), arm[at][name]) for m, arm in found if m and name in arm[at]]
        if spots:
            lines[part["name"]] = sorted(spots, key=lambda spot: spot[0])
    return lines
