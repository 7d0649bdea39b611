"""The report page: verdict first, then the evidence, then how it was made and what was not controlled.

One file with its styles, its drawings and thirty lines of script inside; its content security policy
forbids any request. A section without data is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from langevin.studies.report import arm_tables, charts, curves, tables
from langevin.studies.results import Results
from langevin.studies.words import counted, number

LONGEST_SAMPLE = 4000
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


Section = tuple[str, str, str]
"""Key, heading and content; a section without content is left out."""


def page(results: Results) -> str:
    """The whole page as text; the same results give the same text."""
    return document(results["title"], _facts(results), _sections(results))


def document(title: str, facts: Iterable[str], sections: Iterable[Section]) -> str:
    """The frame of every page: its policy, style, contents and script; facts stand in a line under the
    title."""
    sections = [section for section in sections if section[2]]
    links = "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in sections)
    content = "".join(
        f'<section id="{key}" aria-labelledby="{key}-h">'
        f'<h2 id="{key}-h">{escape(title)}</h2>{body}</section>'
        for key, title, body in sections
    )
    title, told = escape(title), " · ".join(escape(fact) for fact in facts if fact)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>\n{_asset('style.css')}</style>\n</head>\n<body>\n"
        f'<header><h1>{title}</h1><p class="facts">{told}</p></header>\n'
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>\n<main>\n{content}\n</main>\n'
        f"<script>\n{_asset('sort.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return files("langevin.studies.report").joinpath(name).read_text(encoding="utf-8")


def _sections(results: Results) -> Iterable[Section]:
    """Every section, in reading order."""
    differences = grid(charts.forests(results))
    reliability = grid(charts.reliabilities(results), "small-grid")
    yield "verdict", "Verdict", _verdict(results)
    yield "table", "Results", _results(results)
    yield "curves", "Learning curves", grid(curves.curves(results))
    yield "differences", "Paired differences", noted(DIFFERENCES, differences)
    yield "cost", "Quality against cost", noted(COST, grid(charts.scatters(results)))
    yield "reliability", "Reliability", noted(RELIABILITY, reliability)
    yield "scalars", "Learned scalars", grid(charts.scalars(results))
    yield "samples", "Samples", _samples(results)
    yield "matched", "At matched loss", _matched(results)
    yield "published", "Published claims", tables.published_table(results)
    yield "commands", "Commands", commands(results)
    yield "versions", "Versions, settings and data", _versions(results)
    yield "not-controlled", "What was not controlled", bullets(results.get("not_controlled") or [])
    yield "failed", "Failed runs", tables.failed_table(results)


DIFFERENCES = (
    "Arm minus reference, paired by seed: a point is the mean difference, a bar its 95 % interval. "
    "An interval that holds zero leaves the sign open. p: exact sign-flip test, before adjustment."
)
COST = "Points are means over seeds; bars are 95 % intervals of the mean."
RELIABILITY = (
    "Accuracy by confidence, all seeds pooled. On the dashed diagonal a model is right as often as it "
    "says; under it, it is too sure. Bars are darker where there are more tokens."
)


def noted(note: str, content: str) -> str:
    return f'<p class="note">{escape(note)}</p>{content}' if content else ""


def grid(figures: list[str], kind: str = "grid") -> str:
    return f'<div class="{kind}">{"".join(figures)}</div>' if figures else ""


def bullets(sentences: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(s)}</li>' for s in sentences)}</ul>" if sentences else ""


def _facts(results: Results) -> list[str]:
    """How many arms and seeds, on what data, for how many tokens."""
    seeds = len(results.get("seeds") or [])
    data, environment = results.get("data") or {}, results.get("environment") or {}
    runs = [run for arm in results["arms"] for run in arm["runs"]]
    spent = [int(tokens) for run in runs if (tokens := (run.get("cost") or {}).get("tokens"))]
    facts = [counted(len(results["arms"]), "arm"), counted(seeds, "seed") if seeds else ""]
    facts.append(", ".join(str(data[key]) for key in ("name", "tokenizer") if data.get(key)))
    if spent:
        facts.append(f"{max(spent):,} training tokens a run")
    facts.append(str(environment.get("device") or ""))
    facts.append(f"langevin {environment['langevin']}" if environment.get("langevin") else "")
    return facts


def _verdict(results: Results) -> str:
    sentences = results.get("verdict") or []
    return f'<p class="lead">{escape(sentences[0])}</p>' if len(sentences) == 1 else bullets(sentences)


def _results(results: Results) -> str:
    note = "A dash: not measured, or not finite."
    if results.get("comparisons"):
        note = f"Differences are arm minus reference, paired by seed. {note}"
    if len(results.get("seeds") or []) > 1:
        note = f"Means over seeds with 95 % intervals in brackets. {note}"
    return noted(note, arm_tables.main_table(results)) + arm_tables.metrics_table(results)


def _matched(results: Results) -> str:
    """The table at matched loss, under a line that says which loss and why one looks there."""
    loss = results.get("matched_loss")
    where = (
        f"validation loss {number(loss)}, which every arm reached" if loss is not None else "the same loss"
    )
    note = f"Measured where each run was at {where}: a difference here is not a difference in loss."
    return noted(note, arm_tables.matched_table(results))


def _samples(results: Results) -> str:
    """One text an arm, from its first seed that has one, side by side."""
    cards = []
    for arm in results["arms"]:
        run = next((run for run in arm["runs"] if run.get("sample")), None)
        if run:
            prompt, text = run["sample"].get("prompt") or "", run["sample"]["text"]
            written = text[len(prompt) :] if prompt and text.startswith(prompt) else text
            cut = "…" if len(written) > LONGEST_SAMPLE else ""
            cards.append(
                f'<article class="sample"><h3>{escape(arm["name"])}</h3>'
                f'<p class="fine">seed {run["seed"]}</p><blockquote><b>{escape(prompt)}</b>'
                f"{escape(written[:LONGEST_SAMPLE])}{cut}</blockquote></article>"
            )
    note = "The prompt is in bold; the rest is the model's own."
    return noted(note, f'<div class="samples">{"".join(cards)}</div>') if cards else ""


def commands(results: Results) -> str:
    """The commands as they are; an option's two hyphens are kept on one line."""
    shown = escape("\n".join(results.get("commands") or []))
    shown = re.sub(r"(--[\w-]+)", r'<span class="option">\1</span>', shown)
    return f'<pre tabindex="0"><code>{shown}</code></pre>' if shown else ""


def _versions(results: Results) -> str:
    data = dict(results.get("data") or {})
    data.pop("splits", None)
    environment, settings = (results.get(key) or {} for key in ("environment", "settings"))
    lists = {"Environment": environment, "Data": data, "Settings shared by every arm": settings}
    return facts_lists(lists) + tables.splits_table(results)


def facts_lists(lists: dict[str, dict[str, Any]]) -> str:
    """Tables of names and values, each under its title."""
    parts = []
    for title, facts in lists.items():
        rows = "".join(
            f"<div><dt>{escape(str(key).replace('_', ' '))}</dt><dd>{escape(_plainly(value))}</dd></div>"
            for key, value in facts.items()
            if value is not None
        )
        heading = f"<h3>{escape(title)}</h3>" if title else ""
        parts.append(f"<div>{heading}<dl>{rows}</dl></div>" if rows else "")
    return f'<div class="lists">{"".join(parts)}</div>' if any(parts) else ""


def _plainly(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return number(value) if 1e-3 <= abs(value) < 1e6 and round(value, 4) != value else f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(_plainly, value))
    return str(value)
