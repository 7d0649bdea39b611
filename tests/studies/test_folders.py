"""langevin report: results from any run folders, or a reason why they cannot be compared; and hindsight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_study import arms_in, compared, plan, results_in, settings, timeless

from langevin import cli
from langevin.runs import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two mixers, two seeds each, trained one by one; and one with another learning rate."""
    home = tmp_path_factory.mktemp("runs")
    for mixer in ("softmax", "sima"):
        for seed in (0, 1):
            train(settings(home, mixer=mixer, seed=seed), home / mixer / f"seed-{seed}", quiet=True)
    train(settings(home, lr=2e-3), home / "fast", quiet=True)
    return home


def report(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


# Runs that were not planned together


def test_runs_become_arms_of_an_exploratory_page(runs, tmp_path, capsys):
    seeds = [runs / "sima" / "seed-0", runs / "sima" / "seed-1"]
    assert report(runs / "softmax", *seeds, "--out", tmp_path) == 0
    results = results_in(tmp_path)
    assert [arm["name"] for arm in arms_in(tmp_path)] == ["softmax", "sima"]
    assert [[run["seed"] for run in arm["runs"]] for arm in arms_in(tmp_path)] == [[0, 1], [0, 1]]
    assert results["exploratory"] == "these runs were not planned as one study"
    assert all(c["p"] is None and c["state"] == "not judged" for c in results["contrasts"])
    assert results["parts"][0]["settings"]["lr"] == 1e-3
    assert results["data"]["splits"]["test"]["text_sha256"]
    told = capsys.readouterr().out
    assert "Seen, not confirmed: sima against softmax" in told
    assert "Exploratory" in told
    assert "xploratory" in (tmp_path / "report.html").read_text()


def test_a_run_that_was_not_evaluated_is_evaluated_and_that_is_said(runs, tmp_path, capsys):
    found = runs / "fast" / "evaluation-test.json"
    found.unlink(missing_ok=True)
    assert report(runs / "fast", runs / "softmax", "--out", tmp_path) == 0
    assert f"evaluating {runs / 'fast'} on test" in capsys.readouterr().err.replace("\n", " ")
    (expected,) = [row for row in json.loads(found.read_text())["rows"] if row["metric"] == "nll"]
    rows = arms_in(tmp_path)[0]["runs"][0]["rows"]
    assert expected["value"] in [row["value"] for row in rows if row["metric"] == "nll"]


def test_arms_that_differ_in_a_setting_say_so_in_their_names(runs, tmp_path):
    assert report(runs / "softmax" / "seed-0", runs / "fast", "--out", tmp_path) == 0
    assert [arm["name"] for arm in arms_in(tmp_path)] == ["softmax, lr=0.001", "softmax, lr=0.002"]
    assert [arm["settings"]["lr"] for arm in arms_in(tmp_path)] == [1e-3, 2e-3]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"mlp_width": 8}, ["softmax, mlp_width=null", "softmax, mlp_width=8"]),
        ({"tie": False}, ["softmax, tie=true", "softmax, tie=false"]),
        ({"steps": 12}, ["softmax, steps=8", "softmax, steps=12"]),
        ({"steps": None, "tokens": 640}, ["softmax, steps=8", "softmax, tokens=640"]),
    ],
)
def test_whatever_they_differ_in_is_told(runs, tmp_path, changes, names):
    train(settings(runs, seed=1, **changes), tmp_path / "run", quiet=True)
    assert report(runs / "softmax" / "seed-0", tmp_path / "run", "--out", tmp_path / "x") == 0
    assert [arm["name"] for arm in arms_in(tmp_path / "x")] == names


def test_one_run_has_a_page_too(runs, tmp_path):
    assert report(runs / "fast", "--out", tmp_path) == 0
    assert results_in(tmp_path)["verdict"]["answer"] == "One arm: there is nothing to compare it with."


def other_text(home: Path) -> Path:
    folder = home / "other"
    if not folder.exists():
        (home / "elsewhere").mkdir()
        (home / "elsewhere" / "text.txt").write_text("Eve had nothing, and gave it away.\n" * 80)
        train(settings(home / "elsewhere"), folder, quiet=True)
    return folder


def other_tokenizer(home: Path) -> Path:
    folder = home / "chars"
    if not folder.exists():
        train(settings(home, tokenizer="chars"), folder, quiet=True)
    return folder


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (other_text, "not the same train text"),
        (other_tokenizer, "not the same tokenizer ('bytes' and 'chars')"),
        (lambda home: home / "softmax" / "seed-0", "is the same arm with the same seed"),
        (lambda home: home / "nowhere", "is not a run folder"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_with_the_reason(make, said, runs, tmp_path, capsys):
    assert report(runs / "softmax" / "seed-0", make(runs), "--out", tmp_path / "x") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in "\n".join(lines)
    assert lines[-2].startswith("langevin: ")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "metrics.jsonl"])
def test_a_damaged_run_folder_is_refused(name, runs, tmp_path, capsys):
    damaged = tmp_path / "run"
    shutil.copytree(runs / "fast", damaged)
    (damaged / name).write_text("{")
    assert report(damaged, "--out", tmp_path / "x") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) <= 3


def test_an_evaluation_of_an_earlier_model_or_a_damaged_one_is_made_again(runs, tmp_path):
    folder = shutil.copytree(runs / "fast", tmp_path / "run")
    assert report(folder, "--out", tmp_path / "x") == 0
    path = folder / "evaluation-test.json"
    fresh = json.loads(path.read_text())
    for other in ({**fresh, "model_sha256": "0", "tokens": 0}, {}):
        path.write_text(json.dumps(other))
        assert report(folder, "--out", tmp_path / "x") == 0
        assert json.loads(path.read_text()) == fresh


def test_runs_scored_with_other_strides_are_refused(runs, capsys, tmp_path):
    one, two = (shutil.copytree(runs / name, tmp_path / name) for name in ("softmax/seed-0", "sima/seed-0"))
    for folder in (one, two):
        assert report(folder, "--out", tmp_path / "x") == 0
    path = two / "evaluation-test.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "stride": 1}))
    assert report(one, two, "--out", tmp_path / "y") == 2
    assert "stride" in capsys.readouterr().err


# A study, again


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("study")
    compared(plan(home, seeds=(0,)), home / "cmp")
    return home / "cmp"


def test_the_report_of_a_study_is_the_one_it_made(study, tmp_path):
    folder = shutil.copytree(study, tmp_path / "cmp")
    expected = (folder / "results.json").read_bytes()
    for name in ("results.json", "report.html"):
        (folder / name).unlink()
    assert report(folder) == 0
    assert (folder / "results.json").read_bytes() == expected
    assert (folder / "report.html").is_file()


def test_a_primary_chosen_afterwards_is_exploratory_and_has_a_page_of_its_own(study, capsys):
    """C6: `report --primary ece` rewrote a comparison's page, without a trace."""
    before = {path.name: path.read_bytes() for path in study.iterdir() if path.is_file()}
    assert report(study, "--primary", "ece") == 0
    assert {path.name: path.read_bytes() for path in study.iterdir() if path.is_file()} == before
    found = results_in(study / "exploratory-ece")
    said = "the plan named nll as the primary metric; ece was chosen afterwards"
    assert found["exploratory"] == said
    assert found["metrics"][0]["name"] == "ece"
    assert all(c["p"] is None and c["state"] == "not judged" for c in found["contrasts"])
    assert said in (study / "exploratory-ece" / "report.html").read_text()
    assert f"Exploratory: {said}. Nothing is confirmed." in capsys.readouterr().out
    shutil.rmtree(study / "exploratory-ece")


def test_the_planned_primary_is_not_hindsight_and_goes_where_it_is_asked_to(study, tmp_path):
    assert report(study, "--primary", "nll", "--title", "Mine", "--out", tmp_path / "x") == 0
    found = results_in(tmp_path / "x")
    assert (found["exploratory"], found["title"]) == ("", "Mine")
    assert timeless(study, "title") == timeless(tmp_path / "x", "title")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--primary", "foo"], "unknown metric 'foo'"),
        (["--primary", "entropy"], "neither better high nor low"),
        (["--metrics", "nll"], "fixed by its plan"),
    ],
)
def test_a_wrong_report_of_a_study_is_one_line(arguments, said, study, capsys):
    before = sorted(study.iterdir())
    assert report(study, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in "\n".join(lines)
    assert len(lines) <= 2
    assert sorted(study.iterdir()) == before


def test_the_report_needs_a_run(capsys):
    assert report() == 2
    assert "no run folder came" in capsys.readouterr().err
