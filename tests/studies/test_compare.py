"""langevin compare: equal terms, one folder, results that say what was done."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from dataclasses import replace

import pytest
from langevin.studies.collect import matched_loss, tokens_to, unmatched
from langevin.studies.runner import compare, run_jobs
from small_study import flags, plan, results_in, timeless

from langevin import cli
from langevin.errors import UsageError
from langevin.runs import load
from langevin.studies import terms, work
from langevin.studies.plan import FILE, Arm, read_arms, read_plan
from langevin.tasks import TASKS
from langevin.training import start


def test_every_arm_has_a_run_for_every_seed_with_its_metrics_and_costs(made):
    results, folder = made
    assert [arm["name"] for arm in results["arms"]] == ["softmax", "again", "ssmax"]
    for arm in results["arms"]:
        assert [run["seed"] for run in arm["runs"]] == [0, 1]
        for run in arm["runs"]:
            assert run["status"] == "done"
            assert {"nll", "perplexity", "accuracy", "ece", "scaled_ece", "brier"} <= run["values"].keys()
            assert run["cost"]["tokens"] == 12 * 4 * 16
            assert run["cost"]["decode_ms_per_token"] > 0
            assert len(run["curve"]) == 3
            assert run["sample"]["prompt"]
            assert (folder / run["path"] / "done.json").is_file()
        assert arm["summary"]["nll"]["n"] == 2
        assert arm["state_bytes"] == 2 * 16 * 16 * 4  # keys and values, 16 tokens of 16 floats


def test_an_arm_under_another_name_has_the_same_results(made):
    results, _ = made
    first, again, other = results["arms"]
    for mine, same, else_ in zip(first["runs"], again["runs"], other["runs"], strict=True):
        assert mine["values"] == same["values"]
        assert mine["values"] != else_["values"]
    row = next(r for r in results["comparisons"] if r["arm"] == "again" and r["metric"] == "nll")
    assert row["difference"] == 0


def test_arms_see_the_same_data_order_and_the_same_budget(made):
    _, folder = made
    configs = [load(folder / arm / "seed-1").config for arm in ("softmax", "again", "ssmax")]
    assert len({replace(config, mixer="softmax") for config in configs}) == 1


def test_two_seeds_are_too_few_for_a_verdict(made):
    results, _ = made
    assert {row["verdict"] for row in results["comparisons"]} == {"too few seeds"}
    assert not any("significant" in sentence for sentence in results["verdict"])


def test_the_folder_holds_the_plan_and_the_report(made):
    results, folder = made
    assert read_plan(folder / FILE)[0].arms == read_arms(("softmax", "again=softmax", "ssmax"))
    assert results_in(folder)["verdict"] == results["verdict"]
    assert (folder / "report.html").is_file()


def test_the_results_hold_the_command_that_makes_them(made):
    results, _ = made
    command = results["commands"][0]
    assert command.startswith("langevin compare softmax again=softmax ssmax --data ")
    assert "--seeds 0-1" in command
    assert "--steps 12" in command


def test_a_finished_comparison_is_only_read_again(made, monkeypatch):
    _, folder = made
    before = timeless(folder)
    monkeypatch.setattr("langevin.training.start.prepared", lambda *a, **k: pytest.fail("it trained again"))
    compare(plan(folder.parent, "softmax", "again=softmax", "ssmax"), folder, workers=0, quiet=True)
    assert timeless(folder) == before


def test_runs_that_were_made_elsewhere_are_told(tmp_path):
    compare(plan(tmp_path, seeds=(0,)), tmp_path / "cmp", workers=0, quiet=True)
    for file in (tmp_path / "cmp").glob("*/seed-0/environment.json"):
        file.write_text(json.dumps([{**json.loads(file.read_text())[0], "torch": "1.0"}]))
    results = compare(plan(tmp_path, seeds=(0, 1)), tmp_path / "cmp", workers=0, quiet=True)
    now = json.loads((tmp_path / "cmp" / "softmax" / "seed-1" / "environment.json").read_text())[0]["torch"]
    told = [s for s in results["not_controlled"] if "different conditions" in s]
    assert told == [f"Runs were made under different conditions: torch 1.0 and {now}."]


def test_the_matched_loss_is_reached_by_all_and_tokens_are_interpolated():
    def arm(*losses):
        curve = [{"tokens": 100 * (i + 1), "split": "valid", "loss": x} for i, x in enumerate(losses)]
        best = {"valid_loss": min(losses)}
        return {"runs": [{"status": "done", "best": best, "curve": curve}]}

    arms = [arm(4.0, 2.0, 1.0), arm(3.0, 2.5, 1.5)]
    assert matched_loss(arms) == 1.5
    assert tokens_to(arms[0]["runs"][0]["curve"], 1.5) == 250
    assert tokens_to(arms[1]["runs"][0]["curve"], 1.5) == 300
    assert tokens_to(arms[1]["runs"][0]["curve"], 3.5) == 100  # below it from the start
    assert tokens_to(arms[1]["runs"][0]["curve"], 1.0) is None


def test_metrics_at_the_matched_loss_come_from_the_models_kept_on_the_way(tmp_path):
    one = plan(tmp_path, seeds=(0,), shape={"keep_evaluated": True})
    results = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    runs = [arm["runs"][0] for arm in results["arms"]]
    assert results["matched_loss"] == max(run["best"]["valid_loss"] for run in runs)
    worst = max(runs, key=lambda run: run["best"]["valid_loss"])
    assert worst["matched"]["nll"] == pytest.approx(worst["values"]["nll"], rel=1e-6)
    other = min(runs, key=lambda run: run["best"]["valid_loss"])
    assert other["matched"]["nll"] > other["values"]["nll"]
    assert other["matched"]["tokens_to_match"] < other["cost"]["tokens"]


def test_tuning_gives_every_arm_the_same_trials_and_takes_the_best_on_validation(tmp_path):
    one = plan(tmp_path, seeds=(0,), tune="lr", trials=3)
    assert one.learning_rates() == [5e-4, 1e-3, 2e-3]
    results = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    for arm in results["arms"]:
        assert [trial["lr"] for trial in arm["tuning"]] == [5e-4, 1e-3, 2e-3]
        best = min(arm["tuning"], key=lambda trial: trial["valid_loss"])
        assert arm["changes"] == {"lr": best["lr"]}
        config = load(tmp_path / "cmp" / arm["runs"][0]["path"]).config
        assert config.lr == best["lr"]
        trial = load(tmp_path / "cmp" / arm["name"] / "tune" / f"lr-{best['lr']:g}").config
        assert trial.seed not in one.seeds


def test_a_learning_rate_at_the_edge_of_those_tried_is_told(tmp_path):
    one = plan(tmp_path, seeds=(0,), tune="lr", trials=2, shape={"lr": 1e-4})
    results = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    told = [sentence for sentence in results["not_controlled"] if "is the largest tried" in sentence]
    assert len(told) == 2


def test_a_trial_that_succeeds_later_does_not_change_what_runs_were_trained_with(tmp_path, monkeypatch):
    one = plan(tmp_path, seeds=(0,), tune="lr", trials=3)
    whole = start.prepared

    def fails(config, *rest, **more):
        if config.lr == 2e-3 and config.mixer == "softmax":
            raise RuntimeError("out of memory")
        return whole(config, *rest, **more)

    monkeypatch.setattr(start, "prepared", fails)
    first = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    assert [trial["valid_loss"] is None for trial in first["arms"][0]["tuning"]] == [False, False, True]
    assert any("Trials of softmax that failed" in sentence for sentence in first["not_controlled"])
    monkeypatch.setattr(start, "prepared", whole)
    again = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    assert again["arms"][0]["changes"] == first["arms"][0]["changes"]
    config = load(tmp_path / "cmp" / again["arms"][0]["runs"][0]["path"]).config
    assert config.lr == again["arms"][0]["changes"]["lr"]


@pytest.mark.parametrize(
    ("file", "text"), [("done.json", "{}"), ("done.json", "[1]"), ("done.json", '{"a')]
)
def test_a_damaged_record_is_refused_in_one_line(file, text, tmp_path):
    one = plan(tmp_path, seeds=(0,))
    compare(one, tmp_path / "cmp", workers=0, quiet=True)
    (tmp_path / "cmp" / "ssmax" / "seed-0" / file).write_text(text)
    with pytest.raises(UsageError, match=file):
        compare(one, tmp_path / "cmp", workers=0, quiet=True)


def test_differences_in_parameters_are_told_and_can_be_made_equal(tmp_path):
    unequal = plan(tmp_path, "softmax", "neighbor", shape={"width": 32})
    data = TASKS.parse("lm").prepare(unequal.settings)
    assert terms.unequal(terms.sizes(unequal, data))[0].startswith("neighbor has")
    equal = terms.equalised(replace(unequal, equalise=True), data)
    assert equal.arms[0].changes == {}
    assert equal.arms[1].changes.keys() == {"mlp_width"}
    assert terms.unequal(terms.sizes(equal, data)) == []


def test_arms_that_cannot_be_made_equal_are_refused(tmp_path):
    small = plan(tmp_path, "softmax", "neighbor", shape={"width": 16, "heads": 4, "mlp_width": 2})
    with pytest.raises(UsageError, match="no width brings neighbor within 1 %"):
        terms.equalised(replace(small, equalise=True), TASKS.parse("lm").prepare(small.settings))


def test_a_run_that_cannot_be_measured_at_the_matched_loss_is_told_and_tried_again(tmp_path, monkeypatch):
    one = plan(tmp_path, seeds=(0,), shape={"keep_evaluated": True})
    whole = work.measured_at

    def fails(run, *rest):
        if run.config.mixer == "ssmax":
            raise RuntimeError("out of memory")
        return whole(run, *rest)

    monkeypatch.setattr(work, "measured_at", fails)
    first = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    assert unmatched(first) == [("ssmax", 0)]
    assert "ssmax seed 0 could not be measured at the matched loss." in first["not_controlled"]
    monkeypatch.setattr(work, "measured_at", whole)
    assert unmatched(compare(one, tmp_path / "cmp", workers=0, quiet=True)) == []


def test_a_failed_run_is_told_and_does_not_sink_the_others(tmp_path, monkeypatch, capsys):
    whole = work.measured

    def fails_once(run, *rest, **more):
        if run.config.mixer == "ssmax" and run.config.seed == 1:
            raise RuntimeError("the disk is full\nat /tmp")
        return whole(run, *rest, **more)

    monkeypatch.setattr(work, "measured", fails_once)
    out = tmp_path / "cmp"
    command = ["compare", "softmax", "ssmax", *flags(tmp_path), "--seeds", "0-1", "--out", str(out)]
    command += ["--workers", "0", "--quiet"]
    assert cli.main(command) == 1
    assert "1 runs failed: ssmax seed 1" in capsys.readouterr().out
    failed = results_in(out)["arms"][1]["runs"][1]
    assert failed["status"] == "failed"
    assert failed["error"] == "RuntimeError: the disk is full"
    assert (out / "report.html").is_file()
    monkeypatch.setattr(work, "measured", whole)
    assert cli.main(command) == 0
    assert results_in(out)["arms"][1]["runs"][1]["status"] == "done"


def test_a_run_that_diverges_fails_alone(tmp_path):
    one = plan(tmp_path, seeds=(0,), shape={"clip": 1e9, "max_bad_steps": 2})
    wild = replace(one, arms=(one.arms[0], Arm("wild", "ssmax", {"lr": 1e15})))
    results = compare(wild, tmp_path / "cmp", workers=0, quiet=True)
    assert [arm["runs"][0]["status"] for arm in results["arms"]] == ["done", "failed"]
    assert "\n" not in results["arms"][1]["runs"][0]["error"]


def test_a_run_killed_before_its_settings_were_whole_starts_anew(tmp_path):
    torn = tmp_path / "cmp" / "softmax" / "seed-0"
    one = plan(tmp_path, seeds=(0,))
    compare(one, tmp_path / "cmp", workers=0, quiet=True)
    expected = timeless(tmp_path / "cmp")
    shutil.rmtree(torn)
    torn.mkdir()
    (torn / "config.yaml").write_text("")
    compare(one, tmp_path / "cmp", workers=0, quiet=True)
    assert timeless(tmp_path / "cmp") == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["softmax", "ssmacs"], "Did you mean 'ssmax'"),
        (["softmax"], "1 arm came"),
        ([], "no arms came"),
        (["softmax", "softmax"], "softmax comes twice"),
        (["softmax", "standard"], "standard is the same as softmax"),
        (["a=softmax", "a=ssmax"], "a comes twice"),
        (["softmax", "b="], "'b=' is not an arm"),
        (["softmax", "ssmax", "--seeds", "0-"], "names no seeds"),
        (["softmax", "ssmax", "--seeds", "1,1"], "each once"),
        (["softmax", "ssmax", "--minutes", "1"], "not equal terms"),
        (["softmax", "ssmax", "--primary", "nil"], "Did you mean 'nll'"),
        (["softmax", "ssmax", "--metrics", "eces"], "unknown metric 'eces'"),
        (["softmax", "ssmax", "--primary", "entropy"], "neither better high nor low"),
        (["softmax", "ssmax", "--mixer", "heat"], "--mixer does not fit compare"),
        (["softmax", "ssmax", "--trials", "0"], "trials=0 must be 1 or more"),
        (["softmax", "ssmax", "--tune", "lr", "--seeds", "1000"], "seed 1000 is the one"),
    ],
)
def test_a_wrong_comparison_is_one_line_of_cause_and_one_of_remedy(arguments, said, capsys, tmp_path):
    assert cli.main(["compare", *arguments, "--out", str(tmp_path / "x")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in "\n".join(lines)
    assert len(lines) <= 2
    assert not (tmp_path / "x").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "cmp").mkdir()
    (tmp_path / "cmp" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds something else"):
        compare(plan(tmp_path), tmp_path / "cmp", workers=0, quiet=True)


def test_a_run_is_measured_without_what_trained_it(tmp_path, monkeypatch):
    """Measuring may need the memory."""
    trainers, whole, ready = [], work.conclude, start.prepared

    def seen(*place, **how):
        trainer, progress = ready(*place, **how)
        trainers.append(weakref.ref(trainer))
        return trainer, progress

    def conclude(job, peak):
        gc.collect()
        assert [trainer() for trainer in trainers] == [None]
        return whole(job, peak)

    monkeypatch.setattr(start, "prepared", seen)
    monkeypatch.setattr(work, "conclude", conclude)
    assert work.work(run_jobs(plan(tmp_path), tmp_path / "cmp")[0]).status == "done"
