"""langevin report: the same results from any run folders, or a reason why they cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_study import plan, results_in, settings, timeless

from langevin import cli
from langevin.runs import train
from langevin.studies.runner import compare


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two mixers, two seeds each, trained one by one; and one with another learning rate."""
    home = tmp_path_factory.mktemp("runs")
    for mixer in ("softmax", "sima"):
        for seed in (0, 1):
            config = settings(home, mixer=mixer, seed=seed)
            train(config, home / mixer / f"seed-{seed}", quiet=True)
    train(settings(home, lr=2e-3), home / "fast", quiet=True)
    return home


def report(*arguments: object) -> int:
    return cli.main(["report", *map(str, arguments)])


def test_runs_become_arms_and_a_report(runs, tmp_path, capsys):
    assert (
        report(runs / "softmax", runs / "sima" / "seed-0", runs / "sima" / "seed-1", "--out", tmp_path) == 0
    )
    results = results_in(tmp_path)
    assert [arm["name"] for arm in results["arms"]] == ["softmax", "sima"]
    assert [[run["seed"] for run in arm["runs"]] for arm in results["arms"]] == [[0, 1], [0, 1]]
    assert results["settings"]["lr"] == 1e-3
    assert results["data"]["splits"]["test"]["text_sha256"]
    assert (tmp_path / "report.html").is_file()
    assert "Too few seeds" in capsys.readouterr().out


def test_a_run_that_was_not_evaluated_is_evaluated_and_that_is_said(runs, tmp_path, capsys):
    found = runs / "fast" / "evaluation-test.json"
    found.unlink(missing_ok=True)
    assert report(runs / "fast", runs / "softmax", "--out", tmp_path) == 0
    assert f"evaluating {runs / 'fast'} on test" in capsys.readouterr().err
    value = json.loads(found.read_text())["likelihood"]["nll"]["value"]
    assert results_in(tmp_path)["arms"][0]["runs"][0]["values"]["nll"] == value


def test_arms_that_differ_in_a_setting_say_so_in_their_names(runs, tmp_path):
    assert report(runs / "softmax" / "seed-0", runs / "fast", "--out", tmp_path) == 0
    results = results_in(tmp_path)
    assert [arm["name"] for arm in results["arms"]] == ["softmax, lr=0.001", "softmax, lr=0.002"]
    assert [arm["changes"] for arm in results["arms"]] == [{"lr": 1e-3}, {"lr": 2e-3}]
    assert "lr" not in results["settings"]


def test_the_report_of_a_comparison_is_the_one_it_made(tmp_path):
    compare(plan(tmp_path, seeds=(0,)), tmp_path / "cmp", workers=0, quiet=True)
    expected = timeless(tmp_path / "cmp")
    for name in ("results.json", "report.html"):
        (tmp_path / "cmp" / name).unlink()
    assert report(tmp_path / "cmp") == 0
    assert timeless(tmp_path / "cmp") == expected
    assert (tmp_path / "cmp" / "report.html").is_file()


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
        (lambda home: home / "softmax" / "seed-0", "are the same arm with the same seed"),
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
    train(settings(runs), damaged, quiet=True)
    (damaged / name).write_text("{")
    assert report(damaged, "--out", tmp_path / "x") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_an_evaluation_of_an_earlier_model_or_a_damaged_one_is_made_again(runs, tmp_path):
    folder = tmp_path / "run"
    run, _ = train(settings(runs), folder, quiet=True)
    assert report(folder, "--out", tmp_path / "x") == 0
    path = folder / "evaluation-test.json"
    fresh = json.loads(path.read_text())
    assert fresh["step"] == min(run.metrics("valid"), key=lambda row: row["loss"])["step"]
    for other in (
        {**fresh, "model_sha256": "0", "tokens": 0},
        {"split": "test", "step": 1, "rows": []},
        {},
    ):
        path.write_text(json.dumps(other))
        assert report(folder, "--out", tmp_path / "x") == 0
        assert json.loads(path.read_text()) == fresh


def test_runs_scored_with_other_strides_are_refused(runs, capsys, tmp_path):
    one, two = runs / "softmax" / "seed-0", runs / "sima" / "seed-0"
    for folder in (one, two):
        assert report(folder, "--out", tmp_path / "x") == 0
    path = two / "evaluation-test.json"
    whole = path.read_text()
    path.write_text(json.dumps({**json.loads(whole), "stride": 1}))
    assert report(one, two, "--out", tmp_path / "y") == 2
    assert "stride" in capsys.readouterr().err
    path.write_text(whole)


def test_the_report_of_a_comparison_takes_another_metric_and_refuses_an_unknown_one(tmp_path, capsys):
    compare(plan(tmp_path, seeds=(0,)), tmp_path / "cmp", workers=0, quiet=True)
    assert report(tmp_path / "cmp", "--primary", "foo") == 2
    assert report(tmp_path / "cmp", "--primary", "ece", "--title", "Mine", "--out", tmp_path / "x") == 0
    made = json.loads((tmp_path / "x" / "results.json").read_text())
    assert (made["primary"], made["title"]) == ("ece", "Mine")


def test_the_report_needs_a_run(capsys):
    assert report() == 2
    assert "no run folder came" in capsys.readouterr().err
