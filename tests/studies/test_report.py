"""The report: complete, self-contained, escaped, and in agreement with the results it was made from."""

from __future__ import annotations

import copy
import csv
import json
import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from example_results import example, recipe, single

from langevin.errors import UsageError, WorkError
from langevin.studies.report import write_report
from langevin.studies.report.charts import _pooled
from langevin.studies.report.curves import Series
from langevin.studies.report.svg import axis, tick_label
from langevin.studies.words import amount, interval, number, probability

FILES = ("report.html", "results.json", "results.csv", "summary.csv", "table.tex")


@pytest.fixture(scope="module")
def full():
    return example()


@pytest.fixture(scope="module")
def folder(full, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    assert write_report(full, folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def html(folder):
    return (folder / "report.html").read_text()


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def charts(html):
    return [
        ElementTree.fromstring(found) for found in re.findall(r'<svg class="chart".*?</svg>', html, re.S)
    ]


def headings(html):
    return re.findall(r"<h2[^>]*>(.*?)</h2>", html)


def test_exactly_the_five_files_are_written(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_the_page_asks_for_nothing_outside_itself(html):
    assert not re.search(r"https?://|@import|<iframe|<img|\ssrc=", html)
    assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", html))
    assert all(target.startswith(("#", "data:,")) for target in re.findall(r'href="(.*?)"', html))
    assert "default-src 'none'" in html


def test_all_sections_are_there_in_reading_order(html):
    assert headings(html) == [
        "Verdict",
        "Results",
        "Learning curves",
        "Paired differences",
        "Quality against cost",
        "Reliability",
        "Learned scalars",
        "Samples",
        "At matched loss",
        "Commands",
        "Versions, settings and data",
        "What was not controlled",
        "Failed runs",
    ]


def test_sections_without_data_are_left_out(tmp_path):
    found = write_report(single(), tmp_path).read_text()
    assert headings(found) == ["Verdict", "Results"]
    assert not charts(found)


def test_a_recipe_shows_the_published_claims_and_whether_they_held(tmp_path):
    results = recipe()
    found = write_report(results, tmp_path).read_text()
    assert "Published claims" in headings(found)
    for claim in results["published"]:
        assert claim["sentence"] in found
        assert f">{claim['held']}</td>" in found


def test_what_the_results_say_in_words_is_on_the_page(full, html):
    plain = re.sub(r"<[^>]+>", "", html)
    for sentence in [*full["verdict"], *full["not_controlled"], *full["commands"]]:
        assert sentence.replace("'", "&#x27;").replace('"', "&quot;") in plain
    assert "loss is not finite at step 812 &lt;batch 3&gt;" in html
    for split in full["data"]["splits"].values():
        assert split["text_sha256"] in html
    assert full["environment"]["commit"] in html


def test_the_table_says_what_the_comparisons_say(full, html):
    table = re.search(r"<table.*?</table>", html, re.S).group()
    body = {
        re.search(r'data-value="(.*?)"', row).group(1): row
        for row in re.findall(r"<tr><th scope=\"row\".*?</tr>", table)
    }
    assert len(body) == 6
    for c in full["comparisons"]:
        if c["metric"] == "nll" and c["at"] == "best":
            row = body[c["arm"].replace("'", "&#x27;")]
            assert f">{c['verdict']}</td>" in row
            assert f'data-value="{c["difference"]}"' in row
            assert f'data-value="{c["p"]}"' in row


def test_two_seeds_are_never_called_better_or_worse(tmp_path):
    found = write_report(example(arms=2, seeds=2), tmp_path).read_text()
    body = found[found.index("<main>") :]
    assert "too few seeds" in body
    assert not re.search(r">(better|worse)<|, (better|worse)<|>(better|worse), p", body)


def test_every_chart_has_a_name_a_description_and_labelled_axes(html):
    found = charts(html)
    assert len(found) > 15
    for chart in found:
        assert chart.get("role") == "img"
        assert chart.find("title").text
        assert chart.find("desc").text
        labels = {
            t.get("class"): t.text for t in chart.iter("text") if "axis-label" in (t.get("class") or "")
        }
        assert set(labels) == {"axis-label x", "axis-label y"}
        assert all(labels.values())
        assert sum(t.get("class") == "tick" for t in chart.iter("text")) >= 2


def test_no_two_elements_share_an_id(html):
    ids = re.findall(r'\sid="(.*?)"', html)
    assert len(ids) == len(set(ids))


def test_no_chart_draws_a_number_that_is_not_one(html):
    assert not re.search(r"\bnan\b|\binf\b", "".join(re.findall(r"<svg.*?</svg>", html, re.S)))


def test_text_of_the_user_is_escaped_everywhere(tmp_path):
    results = example(arms=2)
    evil = "<script>alert('x')</script>&\"'"
    results["title"] = results["verdict"][0] = results["not_controlled"][0] = results["commands"][0] = evil
    results["settings"][evil] = evil
    old = results["arms"][1]["name"]
    results["arms"][1].update(name=evil, spec=evil, changes={evil: evil})
    for c in results["comparisons"]:
        c["arm"] = evil if c["arm"] == old else c["arm"]
    results["arms"][1]["runs"][0].update(sample={"prompt": evil, "text": evil + "</blockquote>"})
    for row in results["arms"][1]["runs"][0]["learned"]:
        row["name"] = evil
    results["arms"][1]["runs"][1].update(status="failed", error=evil, path=evil)
    results["metrics"][0].update(label=evil, unit=evil)
    found = write_report(results, tmp_path).read_text()
    assert found.count("<script>") == 1
    assert found.count("</blockquote>") == 2
    assert "alert('x')" not in found
    assert len(charts(found)) > 5


def test_a_large_comparison_stays_under_three_megabytes(tmp_path):
    results = example()
    for run in results["arms"][0]["runs"]:
        run["curve"] = [
            {"tokens": 1000 * i, "seconds": 0.1 * i, "split": "valid", "loss": 2 + 4 / i}
            for i in range(1, 500)
        ]
        run["sample"]["text"] = "word " * 50_000
    crowd = []
    for i in range(12):
        arm = copy.copy(results["arms"][0])
        arm["name"] = f"heat(t='head', distance='squared', number={i})"
        arm["runs"] = [{**run, "seed": run["seed"] + 6 * k} for k in range(4) for run in arm["runs"]]
        crowd.append(arm)
    results.update(arms=crowd, seeds=list(range(24)))
    template = [c for c in results["comparisons"] if c["arm"] == "ssmax"]
    results["comparisons"] = [{**c, "arm": arm["name"]} for arm in crowd[1:] for c in template]
    assert write_report(results, tmp_path).stat().st_size < 3e6


def test_the_json_holds_the_results_as_they_were(full, folder):
    assert json.loads((folder / "results.json").read_text()) == full


def test_numbers_that_are_not_finite_become_null_and_a_dash(tmp_path):
    results = example(arms=2)
    results["arms"][1]["runs"][0]["values"]["nll"] = math.nan
    results["arms"][1]["runs"][0]["curve"][3]["loss"] = math.inf
    results["arms"][1]["summary"]["nll"] = {"mean": math.nan, "low": None, "high": None, "n": 6}
    results["arms"][1]["parameters"] = np.int64(12)
    html = write_report(results, tmp_path).read_text()
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["arms"][1]["runs"][0]["values"]["nll"] is None
    assert saved["arms"][1]["parameters"] == 12
    assert "<td>–</td>" in html
    assert "nan" not in (tmp_path / "results.csv").read_text()


def test_the_csv_has_a_row_a_run(full, folder):
    found = rows(folder / "results.csv")
    runs = [(arm["name"], run) for arm in full["arms"] for run in arm["runs"]]
    assert [(row["arm"], int(row["seed"])) for row in found] == [(name, run["seed"]) for name, run in runs]
    for row, (_, run) in zip(found, runs, strict=True):
        assert row["status"] == run["status"]
        assert row["nll"] == ("" if run["status"] == "failed" else repr(run["values"]["nll"]))
        assert row["error"] == (run["error"] or "")


def test_the_summary_has_a_row_an_arm_and_metric_with_its_difference(full, folder):
    found = {(row["arm"], row["metric"], row["at"]): row for row in rows(folder / "summary.csv")}
    assert len(found) == 6 * (7 + 2)
    for c in full["comparisons"]:
        row = found[c["arm"], c["metric"], c["at"]]
        for key, name in (("difference", "difference"), ("low", "difference_low"), ("p", "p")):
            assert float(row[name]) == c[key]
        assert row["verdict"] == c["verdict"]
    for arm in full["arms"]:
        row = found[arm["name"], "nll", "best"]
        assert float(row["mean"]) == arm["summary"]["nll"]["mean"]
        assert int(row["n"]) == arm["summary"]["nll"]["n"]


def test_the_latex_table_is_rectangular_and_escaped(tmp_path):
    results = example()
    results["arms"][0]["name"] = "100%_soft & {max}#$~^\\"
    for c in results["comparisons"]:
        c["against"] = results["arms"][0]["name"]
    write_report(results, tmp_path)
    found = (tmp_path / "table.tex").read_text()
    assert r"100\%\_soft \& \{max\}\#\$\textasciitilde{}\textasciicircum{}\textbackslash{}" in found
    assert [found.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    columns = len(re.search(r"\\begin\{tabular\}\{(l r*|lr*)\}", found).group(1))
    lines = [line for line in found.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 1 + len(results["arms"])
    assert {len(re.findall(r"(?<!\\)&", line)) + 1 for line in lines} == {columns}
    assert found.isascii()


def test_the_same_results_give_the_same_bytes(folder, full, tmp_path):
    write_report(copy.deepcopy(full), tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_a_write_that_fails_keeps_the_old_report(tmp_path, monkeypatch):
    page = write_report(example(arms=2), tmp_path)
    before = page.read_bytes()

    def full_disk(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(WorkError, match="No space left"):
        write_report(example(arms=3), tmp_path)
    assert page.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_results_that_are_not_a_comparison_are_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="primary, metrics, arms"):
        write_report({"title": "nothing"}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_comparison_whose_runs_all_failed_still_has_a_report(tmp_path):
    results = example(arms=2)
    for arm in results["arms"]:
        arm["summary"] = {}
        for run in arm["runs"]:
            run.update(status="failed", error="killed", values={}, matched=None, best=None, cost=None)
            run.update(curve=[], reliability=[], learned=[], sample=None)
    results.update(comparisons=[], verdict=["No run finished."])
    found = write_report(results, tmp_path).read_text()
    assert found.count(">killed</td>") == 12
    assert "0 of 6 runs" in found


def test_the_report_does_not_need_torch():
    code = (
        "import sys, langevin.studies.report; sys.exit({'torch', 'matplotlib'} & set(sys.modules) != set())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_numbers_show_the_digits_their_spread_leaves():
    assert number(2.01234, 0.013) == "2.012"
    assert number(-0.03781, 0.011, sign=True) == "−0.038"
    assert number(-0.00001, 0.01) == "0.000"
    assert number(0.00001, 0.01, sign=True) == "0.000"
    assert number(12345.6, 200) == "12,346"
    assert number(None) == "–"
    assert interval(-0.0487, -0.027) == "[−0.049, −0.027]"
    assert interval(None, None) == ""
    assert [probability(p) for p in (0.03125, 0.05, 0.0501, None)] == ["0.031", "0.050", "0.0501", "–"]
    assert probability(0.0001) == "< 0.001"
    assert number(2.5, 1e-17) == "2.500"
    assert [amount(v, "B") for v in (65_536, 1e9, 12, 0)] == ["65.5 kB", "1.00 GB", "12.0 B", "0 B"]
    assert amount(999_999) == "1.00 M"


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_round_inside_the_axis_and_told_apart(seed):
    rng = np.random.default_rng(seed)
    low = float(rng.normal(0, 10 ** rng.uniform(-4, 7)))
    values = [low, low + float(10 ** rng.uniform(-4, 7))]
    found = axis(values)
    assert 3 <= len(found.ticks) <= 8
    assert all(found.low <= value <= found.high for value, _ in found.ticks)
    assert found.low <= values[0] < values[1] <= found.high
    positive = axis([abs(low) + 1e-3, (abs(low) + 1e-3) * 10 ** rng.uniform(0.1, 6)], log=True)
    assert 2 <= len(positive.ticks) <= 8
    for labels in ([label for _, label in found.ticks], [label for _, label in positive.ticks]):
        assert len(set(labels)) == len(labels)
        assert max(map(len, labels)) <= 9


def test_a_tick_reads_as_its_value():
    assert [tick_label(v, 500_000) for v in (500_000, 1_500_000, 0)] == ["500k", "1.5M", "0"]
    assert tick_label(-0.02, 0.02) == "−0.02"
    assert tick_label(2.5, 0.5) == "2.5"


def test_the_mean_curve_is_over_what_every_seed_has_seen():
    one = np.array([[1.0, 4.0], [2.0, 2.0], [3.0, 1.0]])
    two = np.array([[1.0, 6.0], [3.0, 2.0]])
    assert np.allclose(Series(0, "a", [one, two]).mean(), [[1, 5], [2, 3], [3, 1.5]])
    assert np.allclose(Series(0, "a", [one, two[:1]]).mean(), [[1, 5]])


def test_pooled_reliability_weighs_by_count():
    a = {"low": 0.0, "high": 0.5, "count": 30, "confidence": 0.3, "accuracy": 0.2}
    b = {"low": 0.0, "high": 0.5, "count": 10, "confidence": 0.1, "accuracy": 0.6}
    empty = {"low": 0.5, "high": 1.0, "count": 0, "confidence": None, "accuracy": None}
    (found,) = _pooled([[a, empty], [b, empty]])
    assert found["count"] == 40
    assert found["confidence"] == pytest.approx(0.25)
    assert found["accuracy"] == pytest.approx(0.3)
