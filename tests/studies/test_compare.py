"""langevin compare: equal terms, one folder, results that say what was done."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace

import pytest
import yaml
from small_study import flags, plan, results_in, settings, timeless

from langevin import cli
from langevin.errors import UsageError
from langevin.runs import load
from langevin.studies import terms, work
from langevin.studies.collect import matched_loss, tokens_to, unmatched
from langevin.studies.plan import FILE, Arm, Plan, read_arms, read_plan
from langevin.studies.runner import compare, run_jobs
from langevin.training import start


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished comparison of softmax with itself under another name, and with ssmax."""
    home = tmp_path_factory.mktemp("compare")
    plan_ = plan(home, "softmax", "again=softmax", "ssmax")
    return compare(plan_, home / "cmp", workers=0, quiet=True), home / "cmp"


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


def test_another_plan_on_the_same_folder_is_refused_with_the_first_difference(made):
    _, folder = made
    other = plan(folder.parent, "softmax", "again=softmax", "ssmax", shape={"lr": 2e-3})
    with pytest.raises(UsageError, match=r"planned with settings.lr=0.001, not 0.002"):
        compare(other, folder, workers=0, quiet=True)


@pytest.mark.parametrize("more", [{}, {"tune": "lr", "trials": 2}, {"shape": {"keep_evaluated": True}}])
def test_seeds_can_be_added_and_the_rest_is_kept(tmp_path, more):
    """The results are those of a comparison that had them all from the beginning, but for saying so."""
    grown, whole = tmp_path / "grown", tmp_path / "whole"
    compare(plan(tmp_path, seeds=(1,), **more), grown, workers=0, quiet=True)
    before = {path: path.stat().st_mtime_ns for path in grown.rglob("done.json")}
    compare(plan(tmp_path, seeds=(0, 1, 2), **more), grown, workers=0, quiet=True)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in grown.rglob("done.json")}.items()
    compare(plan(tmp_path, seeds=(0, 1, 2), **more), whole, workers=0, quiet=True)
    ours, theirs = (json.loads(timeless(folder)) for folder in (grown, whole))
    told = "Seeds 0 and 2 were added after results without them had been written; p takes all as planned."
    assert ours["not_controlled"].pop() == told
    assert ours == theirs
    assert read_plan(grown / FILE)[0] == read_plan(whole / FILE)[0]
    again = compare(plan(tmp_path, seeds=(0, 1, 2), **more), grown, workers=0, quiet=True)
    assert told in again["not_controlled"]


def test_seeds_added_before_anything_was_reported_were_not_chosen_by_results(tmp_path):
    folder = tmp_path / "cmp"
    compare(plan(tmp_path, seeds=(0,)), folder, workers=0, quiet=True)
    (folder / "results.json").unlink()
    results = compare(plan(tmp_path, seeds=(0, 1)), folder, workers=0, quiet=True)
    assert not [s for s in results["not_controlled"] if "added after results" in s]


def test_runs_that_were_made_elsewhere_are_told(tmp_path):
    compare(plan(tmp_path, seeds=(0,)), tmp_path / "cmp", workers=0, quiet=True)
    for file in (tmp_path / "cmp").glob("*/seed-0/environment.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "torch": "1.0"}))
    results = compare(plan(tmp_path, seeds=(0, 1)), tmp_path / "cmp", workers=0, quiet=True)
    now = json.loads((tmp_path / "cmp" / "softmax" / "seed-1" / "environment.json").read_text())["torch"]
    told = [s for s in results["not_controlled"] if "different conditions" in s]
    assert told == [f"Runs were made under different conditions: torch 1.0 and {now}."]


def test_too_few_seeds_come_with_how_to_get_enough(tmp_path, capsys):
    arguments = ["compare", "softmax", "ssmax", *flags(tmp_path), "--workers", "0", "--quiet"]
    assert cli.main([*arguments, "--seeds", "2", "--out", str(tmp_path / "cmp")]) == 0
    assert "--seeds 0-5 adds the seeds that are missing" in capsys.readouterr().out


def test_the_text_may_not_change_under_a_comparison(tmp_path):
    compare(plan(tmp_path, seeds=(0,)), tmp_path / "cmp", workers=0, quiet=True)
    text = tmp_path / "text.txt"
    text.write_text(text.read_text() + "Eve had nothing.\n" * 40)
    with pytest.raises(UsageError, match=r"planned with data\."):
        compare(plan(tmp_path, seeds=(0,)), tmp_path / "cmp", workers=0, quiet=True)


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


def test_names_that_cannot_be_folders_are_refused_or_shortened(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be called report\.html"):
        plan(tmp_path, "softmax", "report.html=ssmax")
    long = Arm("x" * 300, "softmax")
    assert len(long.slug) < 100
    assert long.slug != Arm("x" * 301, "softmax").slug


def test_differences_in_parameters_are_told_and_can_be_made_equal(tmp_path):
    unequal = plan(tmp_path, "softmax", "neighbor", shape={"width": 32})
    assert terms.unequal(terms.sizes(unequal, 300))[0].startswith("neighbor has")
    equal = terms.equalised(replace(unequal, equalise=True), 300)
    assert equal.arms[0].changes == {}
    assert equal.arms[1].changes.keys() == {"mlp_width"}
    assert terms.unequal(terms.sizes(equal, 300)) == []


def test_arms_that_cannot_be_made_equal_are_refused(tmp_path):
    small = plan(tmp_path, "softmax", "neighbor", shape={"width": 16, "heads": 4, "mlp_width": 2})
    with pytest.raises(UsageError, match="no width brings neighbor within 1 %"):
        terms.equalised(replace(small, equalise=True), 300)


def test_a_run_that_cannot_be_measured_at_the_matched_loss_is_told_and_tried_again(tmp_path, monkeypatch):
    one = plan(tmp_path, seeds=(0,), shape={"keep_evaluated": True})
    whole = work._matched

    def fails(job, loss):
        if job.config.mixer == "ssmax":
            raise RuntimeError("out of memory")
        return whole(job, loss)

    monkeypatch.setattr(work, "_matched", fails)
    first = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    assert unmatched(first) == [("ssmax", 0)]
    assert "ssmax seed 0 could not be measured at the matched loss." in first["not_controlled"]
    monkeypatch.setattr(work, "_matched", whole)
    assert unmatched(compare(one, tmp_path / "cmp", workers=0, quiet=True)) == []


def test_a_failed_run_is_told_and_does_not_sink_the_others(tmp_path, monkeypatch, capsys):
    whole = work.measured

    def fails_once(run, *rest, **more):
        if run.config.mixer == "ssmax" and run.config.seed == 1:
            raise RuntimeError("the disk\nis full")
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


def test_a_plan_makes_its_comparison_again(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    options = ["--seeds", "0-1", "--equalise", "--workers", "0", "--quiet"]
    command = ["compare", "softmax", "near=neighbor", *flags(tmp_path), *options, "--out", str(first)]
    assert cli.main(command) == 0
    again = ["compare", f"--config={first / FILE}", "--workers", "0", "--quiet", "--out", str(second)]
    assert cli.main(again) == 0
    assert timeless(second) == timeless(first)
    fewer = ["compare", "--config", str(first / FILE), "--seeds", "0", "--workers", "0", "--quiet"]
    assert cli.main([*fewer, "--out", str(tmp_path / "third")]) == 0
    assert results_in(tmp_path / "third")["seeds"] == [0]
    assert cli.main(["compare", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_a_plan_can_be_given_as_its_folder_and_with_another_budget(made, tmp_path):
    _, folder = made
    command = ["compare", "--config", str(folder), "--tokens", "256", "--eval-every", "2"]
    assert cli.main([*command, "--workers", "0", "--quiet", "--out", str(tmp_path / "cmp")]) == 0
    settings = results_in(tmp_path / "cmp")["settings"]
    assert (settings["tokens"], settings["steps"]) == (256, None)


def test_a_plan_that_the_command_line_cannot_say_is_refused(tmp_path, capsys):
    one = plan(tmp_path, seeds=(0,))
    odd = replace(one, arms=(one.arms[0], Arm("hot", "softmax", {"lr": 1e-2})))
    compare(odd, tmp_path / "cmp", workers=0, quiet=True)
    assert cli.main(["compare", "--config", str(tmp_path / "cmp"), "--out", str(tmp_path / "new")]) == 2
    assert "cannot say" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_run_that_diverges_fails_alone(tmp_path):
    one = plan(tmp_path, seeds=(0,), shape={"clip": 1e9, "max_bad_steps": 2})
    wild = replace(one, arms=(one.arms[0], Arm("wild", "ssmax", {"lr": 1e30})))
    results = compare(wild, tmp_path / "cmp", workers=0, quiet=True)
    assert [arm["runs"][0]["status"] for arm in results["arms"]] == ["done", "failed"]
    assert "\n" not in results["arms"][1]["runs"][0]["error"]


def test_a_run_killed_before_its_settings_were_whole_starts_anew(tmp_path):
    torn = tmp_path / "cmp" / "softmax" / "seed-0"
    one = plan(tmp_path, seeds=(0,))
    compare(one, tmp_path / "cmp", workers=0, quiet=True)
    expected = timeless(tmp_path / "cmp")
    for path in torn.iterdir():
        if path.is_file():
            path.unlink()
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


def test_a_spec_with_values_needs_no_name_and_may_have_one():
    bare, named = read_arms(("heat(t=0.28)", "warm=heat(t=0.28)"))
    assert (bare.name, bare.spec) == ("heat(t=0.28)", "heat(t=0.28)")
    assert (named.name, named.spec) == ("warm", "heat(t=0.28)")
    assert bare.slug == "heat-t-0.28"


def test_the_plan_survives_its_file(tmp_path, made):
    _, folder = made
    read, _ = read_plan(folder / FILE)
    assert isinstance(read, Plan)
    written = yaml.safe_load((folder / "compare.yaml").read_text())
    assert read.as_dict() == {key: written[key] for key in read.as_dict()}
    assert json.loads(json.dumps(read.as_dict())) == read.as_dict()


def test_settings_without_a_budget_get_the_one_of_training(tmp_path):
    one = Plan(read_arms(("softmax", "ssmax")), settings(tmp_path, steps=None), (0,))
    assert one.settings.tokens == 10_000_000


def test_a_run_is_measured_without_what_trained_it(tmp_path, monkeypatch):
    """Measuring may need the memory."""
    trainers, whole = [], work.conclude

    def seen(job):
        trainer, progress = started(job)
        trainers.append(weakref.ref(trainer))
        return trainer, progress

    def conclude(job, peak):
        gc.collect()
        assert [trainer() for trainer in trainers] == [None]
        return whole(job, peak)

    started = work.started
    monkeypatch.setattr(work, "started", seen)
    monkeypatch.setattr(work, "conclude", conclude)
    assert work.work(run_jobs(plan(tmp_path), tmp_path / "cmp")[0]).status == "done"
