"""The plan of a comparison: what its folder holds, what may be added to it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from langevin.studies.runner import compare
from small_study import flags, plan, results_in, settings, timeless

from langevin import cli
from langevin.errors import UsageError
from langevin.studies.plan import FILE, Arm, Plan, read_arms, read_plan


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


def test_names_that_cannot_be_folders_are_refused_or_shortened(tmp_path):
    with pytest.raises(UsageError, match=r"cannot be called report\.html"):
        plan(tmp_path, "softmax", "report.html=ssmax")
    long = Arm("x" * 300, "softmax")
    assert len(long.slug) < 100
    assert long.slug != Arm("x" * 301, "softmax").slug


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
