"""The page of a recipe of several parts, over a common axis; and what every recipe's page has."""

from __future__ import annotations

import re
from html import escape

from langevin.studies.report.arm_tables import Measured
from langevin.studies.report.page import Section, bullets, commands, document, facts_lists, grid
from langevin.studies.report.svg import Dot, axis, exact_axis, line_chart, panel
from langevin.studies.report.tables import Column, published_table, table
from langevin.studies.results import Results, Row
from langevin.studies.words import counted, number, sentence_case, with_unit

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
    facts = [f"{len(results['parts'])} parts", counted(len(results["seeds"]), "seed")]
    facts += [results["data"]["name"], str(results["environment"].get("device") or "")]
    return document(results["title"], facts, sections)


def claimed(results: Results) -> list[Section]:
    """The claims, each with the part it is about, and whether they held."""
    about = f"Recipe {results['recipe']} at scale {results['scale']}: {results['retests']}."
    note = f'<p class="note">{escape(about)} Published in: {escape(results["source"])}.</p>'
    rows = [
        {**row, "claim": f"{row['part']}: {row['claim']}" if row["part"] else row["claim"]}
        for row in results["published"]
    ]
    return [
        ("verdict", "Did it hold?", note + bullets(results["verdict"])),
        ("published", "Published and found", published_table({"published": rows})),
    ]


def making(results: Results) -> list[Section]:
    return [
        ("commands", "Commands", commands(results)),
        ("versions", "Versions", facts_lists({"": results["environment"]})),
        ("not-controlled", "What was not controlled", bullets(results["not_controlled"])),
    ]


def _part(results: Results, part: Results) -> str:
    """Means and intervals of every metric by arm; matched ones in a second table."""
    link = f'<p><a href="{escape(part["path"])}/report.html">The report of this part</a></p>'
    best = _means_table(results, part, "summary", f"{part['name']}, at the best checkpoint")
    loss = "" if part["matched_loss"] is None else f" of {number(part['matched_loss'])}"
    where = f"{part['name']}, at the matched validation loss{loss}"
    return link + best + _means_table(results, part, "matched", where)


def _means_table(results: Results, part: Results, at: str, caption: str) -> str:
    known = [m for m in results["metrics"] if any(m["name"] in arm[at] for arm in part["arms"])]
    if not known:
        return ""
    found = [
        Measured(m["name"], {arm["name"]: arm[at].get(m["name"]) or {} for arm in part["arms"]}, {})
        for m in known
    ]
    columns = [Column("arm"), *(Column(metric["label"], metric["unit"]) for metric in known)]
    rows = [[arm["name"], *(m.value(arm["name"]) for m in found)] for arm in part["arms"]]
    return table(columns, rows, sentence_case(caption), sortable=True)


def _chart(results: Results, metric: dict[str, str], at: str, over: str | None) -> str:
    """A metric over a setting of the parts, a line an arm; or over a key of the mixers, a line a part."""
    if over is None:
        return ""
    by_part = over in results["parts"][0]["settings"]
    of = _by_setting if by_part else _by_key
    lines = {
        name: [
            Dot(x, s["mean"], number(s["mean"]), f"{number(s['mean'])} at {over} {x:g}", _ends(s))
            for x, s in spots
        ]
        for name, spots in of(results, metric["name"], at, over).items()
    }
    dots = [dot for line in lines.values() for dot in line]
    places = sorted({dot.x for dot in dots})
    if len(places) < 2:
        return ""
    room = 0.06 * (places[-1] - places[0])
    x_axis = exact_axis(places[0] - room, places[-1] + room, places) if by_part else axis(places, log=True)
    frame = panel(x_axis, axis([y for dot in dots for y in (dot.y, *dot.ends)], pad=0.08))
    where = "at the best checkpoint" if at == "summary" else "at the matched loss"
    title = f"{sentence_case(metric['label'])} {where}"
    labels = f"{over}{'' if by_part else ', log scale'}", with_unit(metric["label"], metric["unit"])
    return line_chart(f"part-{metric['name']}-{at}", title, frame, labels, lines, note=NOTE)


def _ends(summary: Row) -> tuple[float, ...]:
    """The interval, where it is drawn: of two seeds it would be twelve times as wide as their distance."""
    return (summary["low"], summary["high"]) if summary["n"] > 2 and summary["low"] is not None else ()


Spots = list[tuple[float, Row]]
"""Where means and their intervals stand."""


def _by_setting(results: Results, name: str, at: str, setting: str) -> dict[str, Spots]:
    """A line for every place in the list of arms: the same arm may have another number in each part."""
    lines: dict[str, Spots] = {}
    for index in range(len(results["parts"][0]["arms"])):
        arms = [(part["settings"][setting], part["arms"][index]) for part in results["parts"]]
        spots = [(float(x), arm[at][name]) for x, arm in arms if name in arm[at]]
        if spots:
            lines[" / ".join(dict.fromkeys(arm["name"] for _, arm in arms))] = spots
    return lines


def _by_key(results: Results, name: str, at: str, key: str) -> dict[str, Spots]:
    lines: dict[str, Spots] = {}
    for part in results["parts"]:
        found = [(re.search(rf"\b{key}=([\d.]+)", arm["spec"]), arm) for arm in part["arms"]]
        spots = [(float(m[1]), arm[at][name]) for m, arm in found if m and name in arm[at]]
        if spots:
            lines[part["name"]] = sorted(spots, key=lambda spot: spot[0])
    return lines
