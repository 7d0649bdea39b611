"""The page and its files: the answer first, the whole of the results, and no word more than they allow."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from html import unescape

import pytest
from example_results import study

from langevin import figures
from langevin.evaluation.rows import Row
from langevin.studies.report import charts, render, study_page, write_report
from langevin.studies.report.page import SYMBOLS, Column, Page, Part, Section, Table, _mark
from langevin.studies.results import Contrast, Key, RunResult, contrasts

FULL = {"claims": True, "grid": True, "diverged": True, "swap": True}
VERDICT_WORDS = r"\b(better|worse|winner|significant)\b"


@pytest.fixture(scope="module")
def full():
    return study(**FULL)


@pytest.fixture(scope="module")
def folder(full, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    assert write_report(full, folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def html(folder):
    return (folder / "report.html").read_text()


def text_of(html: str) -> str:
    """What a reader may read: no script, no style."""
    body = re.sub(r"<(script|style)>.*?</\1>", "", html[html.index("<body>") :], flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def said(results) -> str:
    return text_of(render(study_page(results, figures=False)))


def headings(html: str) -> list[str]:
    return re.findall(r"<summary><h2>(.*?)</h2>", html)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_answer_comes_first_then_what_shows_it_then_all_else(full, html):
    verdict = full.verdict
    text = text_of(html)
    parts = [full.title, verdict.answer, verdict.sure, *verdict.more]
    parts += [
        "Test loss: difference to softmax",
        "Test loss against training time",
        "difference to softmax",
    ]
    places = [text.index(part) for part in parts[:-1]] + [text.rindex(parts[-1])]
    assert places == sorted(places)
    assert places[-1] < text.index("Judged contrasts")


def test_all_sections_are_there_in_reading_order(html):
    assert headings(html) == [
        "Judged contrasts",
        "Published claims",
        "Other metrics",
        "Learning curves",
        "Calibration",
        "Learned scalars",
        "By depth and length",
        "At matched loss",
        "Samples",
        "Costs",
        "Tuning",
        "Commands",
        "Versions, data and settings",
        "What was not controlled",
        "Runs that failed or diverged",
    ]


def test_a_section_without_content_is_left_out():
    empty = Section("empty", "Empty", [Part("charts", []), Table("none", [Column("arm")], [])])
    full = Section("full", "Full", [Part("points", ["a sentence"])])
    assert headings(render(Page("Why?", "Because.", sections=[empty, full]))) == ["Full"]


def test_the_page_asks_for_nothing_outside_itself(html):
    assert not re.search(r"https?://|@import|<iframe|<img|\ssrc=", html)
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", html))
    assert all(target.startswith(("#", "data:,")) for target in re.findall(r'href="(.*?)"', html))
    assert "default-src 'none'" in html


def test_what_came_from_outside_is_escaped(html):
    assert "there was a &lt;b&gt;softmax&lt;/b&gt; dog" in html
    assert "not finite at step 812 &lt;batch 3&gt;" in html
    assert "One machine &lt;only&gt;." in html


def test_the_table_says_what_the_contrasts_say(full):
    table = study_page(full, figures=False).table
    assert [column.label for column in table.columns][:5] == [
        *("arm", "test loss", "difference to softmax", "p", "state")
    ]
    shown = {row[0].shown: row for row in table.rows}
    assert list(shown) == [arm.name for arm in full.parts[0].arms]
    assert shown["softmax"][2].shown == "reference"
    for arm in list(shown)[1:]:
        contrast = full.contrast(Key("", arm, "nll"))
        assert shown[arm][2].value == contrast.difference
        assert shown[arm][3].value == contrast.p_adjusted
        assert shown[arm][4].value == contrast.state
    assert shown["ssmax"][4].shown == "better"


def test_an_arm_that_diverged_is_shown_as_such_without_an_interval(full, html):
    row = next(row for row in study_page(full, figures=False).table.rows if row[0].shown == "sima")
    assert [(cell.shown, cell.aside) for cell in row[1:3]] == [
        ("diverged", "2 of 8 runs"),
        ("diverged", ""),
    ]
    assert "diverged on 2 of 8" in html


def test_where_nothing_is_confirmed_no_verdict_word_stands_anywhere():
    quiet = study(arms=3, seeds=4)
    assert {c.state for c in quiet.judged} == {"too few"}
    quiet = replace(quiet, verdict=replace(quiet.verdict, more=()))
    assert not re.search(VERDICT_WORDS, said(quiet))
    assert "too few seeds" in said(quiet)


def test_other_metrics_get_direction_and_interval_and_no_verdict_word(full):
    section = next(s for s in study_page(full, figures=False).sections if s.key == "metrics")
    cell = next(row for row in section.shown[0].rows if row[0].shown == "ssmax")[1]
    contrast = full.contrast(Key("", "ssmax", "accuracy"))
    assert contrast.difference > 0
    assert re.fullmatch(r"\+0\.\d+ \[\+0\.\d+, \+0\.\d+\]", cell.fine[0])
    only = Page("", "", sections=[section])
    assert not re.search(VERDICT_WORDS, text_of(render(only)))


def test_a_state_is_worded_with_what_it_is_about(full):
    def worded(state):
        changed = [replace(c, state=state) if c.key.arm == "ssmax" else c for c in full.contrasts]
        return study_page(replace(full, contrasts=tuple(changed)), figures=False).table.rows[1][4].shown

    assert worded("does not survive") == "does not survive 5 contrasts"
    assert worded("as good") == "as good as softmax"
    assert worded("not proven") == "not proven"


def test_a_bound_is_called_one_wherever_it_is_copied_from(tmp_path):
    results = study(arms=3, seeds=7)
    part = results.parts[0]

    def bounded(arm):
        return replace(arm, runs=tuple(replace(r, rows=tuple(map(bound, r.rows))) for r in arm.runs))

    def bound(row):
        return replace(row, kind="bound") if row.metric in ("nll", "accuracy") else row

    exact, *others = part.arms
    results = replace(results, parts=(replace(part, arms=(exact, *map(bounded, others))),))
    (section,) = [s for s in study_page(results, figures=False).sections if s.key == "metrics"]
    fine = [row[1].fine for row in section.parts[0].rows]
    assert [one[:1] == ("upper bound",) for one in fine] == [False, True, True]
    assert all(re.search(r"[+−]0\.", one[-1]) for one in fine[1:])
    write_report(results, tmp_path)
    kinds = {(row["arm"], row["metric"]): row["kind"] for row in rows(tmp_path / "summary.csv")}
    assert [kinds[arm.name, "nll"] for arm in part.arms] == ["exact", "bound", "bound"]
    assert kinds["ssmax", "ece"] == "diagnostic"
    lines = (tmp_path / "table.tex").read_text().splitlines()
    told = {line.split(" & ")[0]: line.split(" & ")[1] for line in lines if " & " in line}
    assert told["softmax"].startswith("1.")
    assert told["ssmax"].startswith(r"$\le$ 1.")


def test_an_unfinished_study_tells_how_far_it_is_and_judges_nothing():
    results = study(ended=3)
    page = study_page(results)
    html = render(page)
    text = text_of(html)
    assert "18 of 48 runs have ended" in text
    assert '<meta http-equiv="refresh" content="15">' in html
    assert not re.search(VERDICT_WORDS + r"|\bp\b|difference", text)
    assert "Validation loss by training tokens" in text
    assert "peak training memory" in text


def test_a_finished_study_does_not_reload(html):
    assert 'http-equiv="refresh"' not in html


def test_a_study_of_several_parts_is_one_page():
    results = study(arms=3, seeds=8, parts=("4 layers", "8 layers"))
    html = render(study_page(results))
    forest = re.search(r'<svg class="drawing".*?</svg>', html, re.S).group()
    assert re.findall(r"\d layers", forest) == ["4 layers", "8 layers"]
    table = study_page(results, figures=False).table
    assert [column.label for column in table.columns][:2] == ["arm", "part"]
    assert len(table.rows) == 6
    assert "Validation loss by training tokens, 8 layers" in html


def test_swapping_shows_the_untouched_model_and_what_it_took_to_come_near_it():
    page = study_page(study(arms=5, swap=True))
    curves = next(section for section in page.sections if section.key == "curves")
    charts, reached = curves.shown
    assert "stroke-dasharray" in charts.items[0].svg
    assert "the untouched model, 1.600" in charts.items[0].note
    cells = {row[0].shown: row[1] for row in reached.rows}
    assert cells["heat(t=0.28)"].shown == "not within the budget"
    assert cells["ssmax"].fine == ("8 of 8 seeds",)
    assert re.fullmatch(r"\[[\d.]+ M, [\d.]+ M\]", cells["ssmax"].aside)


def test_grids_are_drawn_as_lines_over_one_coordinate_and_heatmaps_over_two():
    page = study_page(study(arms=3, grid=True))
    section = next(section for section in page.sections if section.key == "grids")
    titles = [chart.title for chart in section.shown[0].items]
    assert titles == [
        f"{arm}: needle by depth and length" for arm in ("softmax", "ssmax", "heat(t='head')")
    ] + ["Test loss by length"]
    assert "nothing here is judged" in section.note


def test_grids_of_all_arms_can_stand_in_one_picture():
    results = study(arms=3, grid=True)
    (drawn,) = charts.grids(results, results.parts[0], ("needle", "length"), together=True)
    names = [axes.get_title(loc="left") for axes in drawn.figure.axes[:3]]
    assert names == ["softmax\ndepth", "ssmax\n", "heat(t='head')\n"]
    assert len(drawn.figure.axes) == 4  # and one bar of colours


def test_lengths_are_ticks_of_their_axis_however_few():
    results = study(arms=2, seeds=2)
    rows = tuple(Row("nll", 1.0, "exact", {"length": n}) for n in (256, 512))
    part = results.parts[0]
    arms = tuple(replace(arm, runs=tuple(replace(r, rows=rows) for r in arm.runs)) for arm in part.arms)
    part = replace(part, arms=arms)
    (drawn,) = charts.grids(replace(results, parts=(part,)), part, ("nll", "length"))
    assert [tick.get_text() for tick in drawn.figure.axes[0].get_xticklabels()] == ["512", "256"]


def test_arms_that_differ_in_width_alone_are_a_line_of_states():
    results = study(arms=4, seeds=2)
    specs = (("softmax", "rope"), ("sima", "rope"), ("sima", "none"), ("sima", "none"))
    arms = []
    for i, (arm, (mixer, positions)) in enumerate(zip(results.parts[0].arms, specs, strict=True)):
        rows = tuple(Row("nll", i / 4, "exact", at) for at in ({"state": 100 - i}, {"length": 9}))
        settings = {"mixer": mixer, "positions": positions, "width": i}
        runs = tuple(replace(run, rows=rows) for run in arm.runs)
        arms.append(replace(arm, settings=settings, runs=runs))
    part = replace(results.parts[0], arms=tuple(arms))
    results = replace(results, parts=(part,))
    (drawn,) = charts.grids(results, part, ("nll", "state"))
    assert [(line.name, [*line.x], [*line.y]) for line in drawn.lines] == [
        ("softmax", [100], [0]),
        ("ssmax", [99], [0.25]),
        ("sima", [97, 98], [0.75, 0.5]),
    ]
    (drawn,) = charts.grids(results, part, ("nll", "length"))
    assert [line.x for line in drawn.lines] == [[9]] * 4


def test_matched_loss_comes_with_the_caveat_of_the_schedule(full):
    section = next(s for s in study_page(full, figures=False).sections if s.key == "matched")
    assert "mid-schedule" in section.note
    assert [column.unit for column in section.shown[0].columns[1:]] == [
        "difference, fraction",
        "difference, %",
    ]


def test_claims_samples_commands_and_facts_are_told(full, html):
    text = text_of(html)
    told = full.answers[0]
    for part in (
        told.claim,
        told.published,
        told.direction,
        told.ours,
        *full.commands,
        *full.not_controlled,
    ):
        assert " ".join(part.split()) in text
    assert full.data["splits"]["test"]["sha256"] in text
    assert full.environment["commit"] in text


def test_every_drawing_has_labels_and_no_id_stands_twice(html):
    drawings = re.findall(r'<svg class="drawing".*?</svg>', html, re.S)
    assert len(drawings) > 8
    for drawing in drawings:
        assert 'class="axis-label x"' in drawing
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))


def test_colours_are_the_pages_own_and_marks_are_those_of_the_charts(html):
    drawings = "".join(re.findall(r'<svg class="drawing".*?</svg>', html, re.S))
    assert (
        set(re.findall("#[0-9a-f]{6}", drawings)) & {*figures.COLOURS, figures.INK, figures.QUIET} == set()
    )
    style = html[html.index(":root") : html.index("@media")]
    assert re.findall(r"--c\d: (#\w+);", style) == list(figures.COLOURS)
    assert len(SYMBOLS) == len(figures.MARKERS) == len(figures.COLOURS)
    for arm in range(20):
        colour, marker = figures.look(arm)
        shown = SYMBOLS[figures.MARKERS.index(marker)]
        assert f"--c{figures.COLOURS.index(colour)})" in _mark(arm)
        assert f">{shown}<" in _mark(arm)


def test_the_largest_study_stays_under_a_megabyte_and_is_the_same_every_time():
    results = study(arms=8, seeds=9, parts=("4 layers", "8 layers", "12 layers"), claims=True)
    pages = [render(study_page(results)) for _ in range(2)]
    assert len(pages[0].encode()) < 1_000_000
    assert pages[0] == pages[1]


def test_without_figures_a_page_takes_milliseconds_and_no_drawing_library():
    results = study(arms=6, seeds=8)
    render(study_page(results, figures=False))
    started = time.perf_counter()
    for _ in range(10):
        render(study_page(results, figures=False))
    assert (time.perf_counter() - started) / 10 < 0.1
    code = "import sys, langevin.studies.report; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


ODD = {
    "one arm": lambda results: _with_arms(results, results.parts[0].arms[:1]),
    "nothing has ended": lambda results: study(arms=2, seeds=7, ended=0),
    "all diverged": lambda results: _with_runs(results, lambda run: RunResult(run.seed, "diverged")),
    "all failed": lambda results: _with_runs(results, lambda run: RunResult(run.seed, "failed", "killed")),
    "one seed": lambda results: study(arms=3, seeds=1),
    "all alike": lambda results: _with_runs(
        results, lambda run: replace(run, rows=(Row("nll", 2.0), Row("nll", 0.5, at={"set": "hard"})))
    ),
    "holes in a grid": lambda results: _with_runs(
        results,
        lambda run: replace(run, rows=tuple(Row("nll", 1.0, at={"a": a, "b": 3 - a}) for a in (1, 2))),
    ),
    "no costs": lambda results: _with_arms(results, [replace(a, costs=()) for a in results.parts[0].arms]),
}


def _with_arms(results, arms):
    results = replace(results, parts=(replace(results.parts[0], arms=tuple(arms)),))
    family = [Key("", arm.name, "nll") for arm in arms[1:]]
    return replace(results, contrasts=contrasts(results, family) if results.finished else ())


def _with_runs(results, change):
    arms = results.parts[0].arms
    return _with_arms(results, [replace(arm, runs=tuple(change(run) for run in arm.runs)) for arm in arms])


@pytest.mark.parametrize("kind", ODD)
def test_odd_studies_have_a_page_too(kind, tmp_path):
    results = ODD[kind](study(arms=2, seeds=7))
    assert results.title in write_report(results, tmp_path).read_text()


def test_exactly_the_five_files_are_written(folder):
    names = ("report.html", "results.csv", "results.json", "summary.csv", "table.tex")
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_json_holds_the_results_as_they_stand_with_null_for_what_is_not_finite(full, folder, tmp_path):
    kept = json.loads((folder / "results.json").read_text())
    assert kept["verdict"]["answer"] == full.verdict.answer
    found = [Contrast(**{**c, "key": Key(**c["key"])}) for c in kept["contrasts"]]
    assert found == list(full.contrasts)
    odd = replace(full, environment={"loss": float("nan"), "time": float("inf")})
    write_report(odd, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["environment"] == {
        "loss": None,
        "time": None,
    }


def test_the_runs_are_kept_with_a_row_for_all_that_was_measured(full, folder):
    found = rows(folder / "results.csv")
    measured = [row for row in found if row["metric"]]
    assert len(measured) == sum(len(run.rows) for run in full.runs)
    assert {row["at"] for row in measured if row["metric"] == "needle"} >= {'{"depth": 0.5, "length": 256}'}
    assert sum(row["status"] == "diverged" for row in found) == 2


def test_the_summary_holds_means_and_contrasts(full, folder):
    found = {(row["arm"], row["metric"], row["place"]): row for row in rows(folder / "summary.csv")}
    contrast = full.contrast(Key("", "ssmax", "nll"))
    row = found["ssmax", "nll", "best"]
    assert float(row["difference"]) == contrast.difference
    assert float(row["difference_low"]) == contrast.low
    assert row["state"] == contrast.state
    assert float(row["mean"]) == full.parts[0].arm("ssmax").estimate(full.primary).mean
    assert ("ssmax", "to_match", "matched") in found


def test_the_latex_table_has_a_row_an_arm_and_nothing_unescaped(full, folder):
    lines = (folder / "table.tex").read_text().splitlines()
    body = lines[lines.index("\\midrule") + 1 : lines.index("\\bottomrule")]
    assert len(body) == 6
    assert all(line.count(" & ") == 7 and line.endswith(r"\\") for line in body)
    assert "heat(t=\\textquotesingle{}head\\textquotesingle{})" in body[2]
    assert not re.search(r"(?<!\\)[%_#]|−", "".join(body))
