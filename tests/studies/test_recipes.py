"""Recipes and langevin reproduce: strict files, honest answers, and every recipe at smoke scale."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from small_results import arm, results_of

from langevin import cli
from langevin.errors import UsageError
from langevin.studies import recipe as recipes
from langevin.studies.claims import in_short, published, published_speeds, published_trends
from langevin.studies.recipe import SCALES, Best, Claim, Difference, NoWorse, Part, Speed, Trend
from langevin.studies.reproduce import mixer_settings, reproduce

NAMES = ["drift-diffusion-gpt2", "heat-calibration", "heat-depth-law", "speed", "ssmax-text8"]
LOW = [2.00, 2.01, 2.02, 2.00, 2.01, 2.02]
HIGH = [2.31, 2.30, 2.33, 2.32, 2.30, 2.31]
MIXED = [2.01, 2.00, 2.03, 1.99, 2.02, 2.01]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each recipe at smoke scale, made when it is first asked for."""
    home = tmp_path_factory.mktemp("recipes")
    found = {}

    def make(name):
        if name not in found:
            found[name] = reproduce(name, "smoke", home / name, workers=0, quiet=True), home / name
        return found[name]

    return make


def test_the_recipes_are_these():
    assert recipes.names() == NAMES


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_scale_of_every_recipe_is_a_valid_plan(name, scale):
    found = recipes.recipe(name)
    plans = found.plans(scale)
    benches = found.scale(scale).benches
    if benches:
        assert not plans
        assert mixer_settings(benches, "cpu", name).repeats >= 3
        assert recipes.train_config(benches.training, name).layers >= 1
    else:
        assert {len(plan.seeds) for _, plan in plans} <= {2, 3, 6, 9}
        assert all(len(plan.arms) > 1 and plan.metrics[0] == found.primary for _, plan in plans)
    assert found.cost.count(";") == 2


@pytest.mark.parametrize("name", ["heat-calibration", "heat-depth-law"])
def test_the_fixed_times_are_those_of_the_depth_law(name):
    for scale in SCALES:
        for part, plan in recipes.recipe(name).plans(scale):
            law = 0.28 * math.sqrt(4 / plan.settings.layers)
            assert float(part.values["t"]) == round(law, 2)
            assert f"heat(t={part.values['t']})" in [a.name for a in plan.arms[:2]]


def test_the_arms_of_drift_and_noise_train_on_equal_terms():
    (_, plan), *_ = recipes.recipe("drift-diffusion-gpt2").plans("full")
    assert [a.name for a in plan.arms] == ["softmax", "drift", "noise", "both"]
    assert (plan.settings.layers, plan.settings.width, plan.settings.context) == (24, 1024, 1024)
    assert plan.settings.checkpointing
    assert plan.settings.precision == "bf16"
    assert not any(a.changes for a in plan.arms)


def text_of(**changes):
    """A recipe as YAML; a change to None leaves the key out."""
    scale = {"cost": "nothing", "seeds": [0, 1], "settings": {"steps": 2}}
    test = {"kind": "difference", "metric": "nll", "arm": "ssmax", "expect": "lower"}
    values = {
        "name": "mine",
        "title": "Mine",
        "retests": "nothing",
        "source": "nowhere",
        "arms": ["softmax", "ssmax"],
        "claims": [{"claim": "It is lower.", "published": "1 against 2", "test": test}],
        "scales": {name: dict(scale) for name in SCALES},
        **changes,
    }
    return yaml.safe_dump({k: v for k, v in values.items() if v is not None}, sort_keys=False)


def test_a_plain_recipe_is_read():
    found = recipes.read(text_of(), "mine")
    assert found.claims[0].test == Difference("nll", "ssmax", "lower")
    assert [plan.seeds for _, plan in found.plans("full", (4, 5, 6))] == [(4, 5, 6)]


def test_the_recipe_in_the_documentation_is_one():
    page = (Path(__file__).parents[2] / "docs" / "reproducing.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert len(recipes.read(example, "mine").plans("full")) == 1


def scales_with(**changes):
    return {name: {"cost": "nothing", "seeds": [0], **changes} for name in SCALES}


def claims_with(**changes):
    test = {"kind": "difference", "metric": "nll", "arm": "ssmax", "expect": "lower", **changes}
    return [{"claim": "It is lower.", "published": "-", "test": test}]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"titel": "Mine"}, "unknown key in recipe mine 'titel'"),
        ({"title": None}, "recipe mine has no title"),
        ({"title": 3}, "title must be a string"),
        ({"settings": {"layer": 2}}, "unknown setting in recipe mine 'layer'"),
        ({"settings": {"layers": "two"}}, "layers"),
        ({"scales": scales_with(sedes=[1])}, "unknown key in recipe mine, scale smoke 'sedes'"),
        ({"scales": scales_with(seeds=[])}, "has no seeds"),
        ({"scales": scales_with(parts=[{"nam": "x"}])}, "unknown key in recipe mine, scale smoke 'nam'"),
        ({"scales": {"smoke": {"cost": "nothing", "seeds": [0]}}}, "has the scales smoke"),
        ({"arms": ["softmax", "ssmaxx"]}, "ssmaxx"),
        ({"arms": ["softmax", "heat(t={t})"]}, "has no value 't'"),
        ({"metrics": ["elo"]}, "unknown metric 'elo'"),
        ({"claims": claims_with(kind="vote")}, "unknown kind of test in recipe mine 'vote'"),
        ({"claims": claims_with(arm="sima")}, "unknown arm in a claim of mine 'sima'"),
        ({"claims": claims_with(metric="ece")}, "unknown metric in a claim of mine 'ece'"),
        ({"claims": claims_with(expect="nicer")}, "expect"),
        ({"name": "other"}, "calls itself 'other'"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_by_name(changes, cause):
    with pytest.raises(UsageError, match=re.escape(cause)):
        recipes.read(text_of(**changes), "mine")


def judged(test, results, part=None):
    (row,) = published((Claim("It is so.", "they said so", test),), part or Part(), results)
    assert row["published"] == "they said so"
    assert row["sentence"].startswith("“It is so” ")
    assert row["sentence"].endswith(".")
    return row


@pytest.mark.parametrize(
    ("ours", "expect", "held"),
    [(LOW, "lower", "yes"), (LOW, "higher", "no"), (MIXED, "lower", "cannot tell")],
)
def test_a_claimed_difference_is_answered_by_the_paired_test(ours, expect, held):
    base = HIGH if ours is LOW else LOW
    row = judged(Difference("nll", "ssmax", expect), results_of(arm("softmax", base), arm("ssmax", ours)))
    assert row["held"] == held
    assert "6 pairs" in row["ours"]
    if held != "cannot tell":
        assert row["ours"].startswith("2.010 against 2.312 (−13.0 %)")
        assert "p = 0.031" in row["sentence"]


@pytest.mark.parametrize(
    ("expect", "size", "held", "said"),
    [
        ("lower", 0.0, "cannot tell", "allows either sign"),
        ("lower", 0.5, "no", "excludes the published −50.0 %"),
        ("higher", 0.5, "no", "excludes the published +50.0 %"),
        ("higher", 0.001, "cannot tell", "does not exclude the published +0.1 %"),
        ("lower", 0.001, "cannot tell", "does not exclude the published −0.1 %"),
    ],
)
def test_where_no_difference_is_found_the_interval_is_held_against_the_published_size(
    expect, size, held, said
):
    test = Difference("nll", "ssmax", expect, size=size)
    row = judged(test, results_of(arm("softmax", LOW), arm("ssmax", MIXED)))
    assert row["held"] == held
    assert "no difference in test loss was found" in row["sentence"]
    assert said in row["sentence"]


def test_an_interval_without_zero_is_not_said_to_allow_both_signs():
    """The test and the interval may disagree."""
    ours = [b + d for b, d in zip(LOW, (1, 1, 1, 1, 1, -0.01), strict=True)]
    row = judged(Difference("nll", "ssmax", "higher"), results_of(arm("softmax", LOW), arm("ssmax", ours)))
    assert row["held"] == "cannot tell"
    assert "excludes zero" in row["sentence"]
    same = judged(Difference("nll", "ssmax", "lower"), results_of(arm("softmax", LOW), arm("ssmax", LOW)))
    assert "all pairs are exactly equal" in same["sentence"]


@pytest.mark.parametrize(("size", "said"), [(0.0, False), (0.05, False), (0.5, True)])
def test_a_difference_smaller_than_the_published_one_holds_and_says_so(size, said):
    results = results_of(arm("softmax", HIGH), arm("ssmax", LOW))
    row = judged(Difference("nll", "ssmax", "lower", size=size), results)
    assert row["held"] == "yes"
    assert ("smaller than the published 50 %" in row["sentence"]) == said


@pytest.mark.parametrize(("expect", "points"), [("lower", "for"), ("higher", "against")])
def test_under_six_seeds_no_claim_is_judged_but_what_was_seen_is_said(expect, points):
    results = results_of(arm("softmax", HIGH[:5]), arm("ssmax", LOW[:5]))
    row = judged(Difference("nll", "ssmax", expect), results)
    assert row["held"] == "cannot tell"
    assert f"observed, {points} the claim" in row["sentence"]
    assert "2.008 against 2.312" in row["sentence"]


def test_a_claim_about_what_was_not_measured_cannot_be_told():
    results = results_of(arm("softmax", HIGH), arm("ssmax", LOW))
    row = judged(Difference("nll", "ssmax", "lower", at="matched"), results)
    assert (row["held"], row["ours"]) == ("cannot tell", "not measured")


@pytest.mark.parametrize(
    ("by", "held"), [(0.2, "yes"), (0.05, "no"), (0.15, "cannot tell")], ids=["within", "beyond", "across"]
)
def test_no_worse_by_a_share_is_answered_by_the_interval(by, held):
    results = results_of(arm("softmax", LOW), arm("ssmax", HIGH))
    assert judged(NoWorse("nll", "ssmax", by), results)["held"] == held


def test_being_better_is_no_worse_whatever_the_size():
    results = results_of(arm("softmax", HIGH), arm("ssmax", LOW))
    assert judged(NoWorse("nll", "ssmax", 0.01), results)["held"] == "yes"


@pytest.mark.parametrize(
    ("first", "others", "held"),
    [
        (LOW, [HIGH, HIGH[::-1]], "yes"),
        (HIGH + HIGH[:2], [LOW + LOW[:2], HIGH[::-1] + HIGH[2:4]], "no"),
        (HIGH, [LOW, HIGH[::-1]], "cannot tell"),  # p = 0.031 does not survive Holm over two arms
        (LOW, [HIGH, MIXED], "cannot tell"),
        (LOW[:2], [HIGH[:2], HIGH[:2]], "cannot tell"),
    ],
)
def test_the_best_of_several_must_be_better_than_each(first, others, held):
    results = results_of(arm("a", first), *(arm(f"b{i}", o) for i, o in enumerate(others)))
    assert judged(Best("nll"), results)["held"] == held


def test_a_trend_over_parts_compares_the_last_with_the_first():
    def two(gains, expect):
        test = Trend("nll", "ssmax", expect)
        parts = [
            (Part(f"{i} layers"), results_of(arm("softmax", HIGH), arm("ssmax", [g * h for h in HIGH])))
            for i, g in enumerate(gains)
        ]
        (row,) = published_trends((Claim("It grows.", "-", test),), parts)
        return row

    assert two([0.9, 0.7], "lower")["held"] == "yes"
    assert two([0.7, 0.9], "lower")["held"] == "no"
    assert two([0.9, 0.9], "lower")["held"] == "cannot tell"
    assert two([1.5, 1.2], "lower")["held"] == "no"  # less of a loss is no gain
    assert two([0.9, 0.7], "lower")["ours"] == "0 layers: −10.0 %, 1 layers: −30.0 %"


def speeds(ratio, spread=0.01, rounds=10, length=8192):
    def row(mixer, ratio):
        core = {"part": "core", "length": length, "forward_ms": 1.0, "forward_spread_ms": spread}
        return {"mixer": mixer, **core, "forward_ratio": ratio}

    def step(mixer, ratio):
        return {"mixer": mixer, "tokens_per_second": 1.0, "spread": spread, "ratio": 1 / ratio}

    return {
        "mixers": {"settings": {"repeats": rounds}, "rows": [row("softmax", 1.0), row("sima", ratio)]},
        "training": {"settings": {"rounds": rounds}, "rows": [step("softmax", 1.0), step("sima", ratio)]},
    }


@pytest.mark.parametrize(
    ("test", "facts", "held"),
    [
        (Speed("core", "sima", "faster"), {"ratio": 0.8}, "yes"),
        (Speed("core", "sima", "faster"), {"ratio": 1.2}, "no"),
        (Speed("core", "sima", "slower"), {"ratio": 1.2}, "yes"),
        (Speed("core", "sima", "slower"), {"ratio": 1.2, "spread": 0.3}, "cannot tell"),
        (Speed("core", "sima", "slower"), {"ratio": 1.2, "rounds": 3}, "cannot tell"),
        (Speed("core", "sima", "slower", length=16384), {"ratio": 1.2}, "cannot tell"),
        (Speed("training", "sima", "same"), {"ratio": 1.02}, "yes"),
        (Speed("training", "sima", "same"), {"ratio": 1.2}, "no"),
        (Speed("training", "sima", "same"), {"ratio": 1.05}, "cannot tell"),
    ],
)
def test_a_claim_about_speed_holds_beyond_the_spread_of_the_runs(test, facts, held):
    (row,) = published_speeds((Claim("It is so.", "-", test),), speeds(**facts))
    assert row["held"] == held


def test_the_claims_are_counted_in_one_sentence():
    rows = [{"held": held} for held in ("yes", "no", "no", "cannot tell")]
    assert in_short(rows) == "Of 4 published claims 1 held, 2 did not hold and 1 cannot be judged."


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_at_smoke_scale_ends_in_a_report_with_a_sentence_for_every_claim(made, name):
    results, folder = made(name)
    chosen = recipes.recipe(name)
    assert results == json.loads((folder / "results.json").read_text())
    assert results["kind"] == ("speed" if name == "speed" else "recipe")
    assert (results["recipe"], results["scale"]) == (name, "smoke")
    page = html.unescape((folder / "report.html").read_text())
    parts = len(chosen.scale("smoke").parts)
    trends = sum(isinstance(claim.test, Trend) for claim in chosen.claims)
    assert len(results["published"]) == parts * (len(chosen.claims) - trends) + trends
    for row in results["published"]:
        assert row["held"] in ("yes", "no", "cannot tell")
        assert row["ours"] != "not measured"
        assert row["sentence"] in results["verdict"]
        assert row["sentence"] in page
        assert row["published"] in page
    assert results["commands"][0] == f"langevin reproduce {name} --scale smoke"
    assert set(chosen.differs) <= set(results["not_controlled"])


def test_two_seeds_judge_no_claim(made):
    for name in ("ssmax-text8", "drift-diffusion-gpt2", "heat-depth-law"):
        results, _ = made(name)
        assert {row["held"] for row in results["published"]} == {"cannot tell"}


def test_each_depth_has_a_comparison_of_its_own_and_a_place_in_the_whole(made):
    results, folder = made("heat-calibration")
    page = (folder / "report.html").read_text()
    assert [part["name"] for part in results["parts"]] == ["1 layer", "2 layers"]
    for part in results["parts"]:
        own = json.loads((folder / part["path"] / "results.json").read_text())
        assert own["settings"]["layers"] == part["settings"]["layers"]
        assert [a["name"] for a in part["arms"]] == [a["name"] for a in own["arms"]]
        for ours, theirs in zip(part["arms"], own["arms"], strict=True):
            assert ours["summary"] == theirs["summary"]
            runs = [run["matched"]["ece"] for run in theirs["runs"]]
            assert ours["matched"]["ece"]["mean"] == pytest.approx(sum(runs) / len(runs))
        assert f'href="{part["path"]}/report.html"' in page
        assert (folder / part["path"] / "report.html").is_file()
    assert "Calibration error (ECE) at the matched loss" in page


def test_a_part_that_is_done_keeps_its_models_and_not_its_checkpoints(made):
    _, folder = made("heat-calibration")
    run = folder / "2-layers" / "softmax" / "seed-1"
    assert (run / "model").is_dir()
    assert not (run / "evaluated").exists()
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("name", ["heat-calibration", "drift-diffusion-gpt2"])
def test_a_recipe_that_is_done_is_not_made_again(made, name):
    results, folder = made(name)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("done.json")}
    assert reproduce(name, "smoke", folder, workers=0, quiet=True) == results
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("done.json")} == before


def test_another_plan_in_the_folder_of_a_recipe_is_refused(made):
    _, folder = made("heat-depth-law")
    with pytest.raises(UsageError, match="was planned with seeds"):
        reproduce("heat-depth-law", "smoke", folder, seeds=(7, 8), workers=0, quiet=True)
    with pytest.raises(UsageError, match="was planned with seeds"):
        reproduce("heat-depth-law", "smoke", folder, seeds=(0,), workers=0, quiet=True)


@pytest.mark.parametrize("name", ["heat-calibration", "speed", "ssmax-text8"])
def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tmp_path, name):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=re.escape("holds something else (thesis.tex)")):
        reproduce(name, "smoke", tmp_path, workers=0, quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_unknown_recipe_is_one_line_with_the_nearest_name(capsys):
    assert cli.main(["reproduce", "ssmax-text9"]) == 2
    error = capsys.readouterr().err
    assert "unknown recipe 'ssmax-text9'" in error
    assert "Did you mean 'ssmax-text8'?" in error


def test_speed_has_no_seeds(tmp_path, capsys):
    assert cli.main(["reproduce", "speed", "--seeds", "0-2", "--out", str(tmp_path / "x")]) == 2
    assert "has no seeds" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_command_prints_the_sentences_and_where_the_report_is(made, capsys):
    results, folder = made("ssmax-text8")
    command = ["reproduce", "ssmax-text8", "--out", str(folder), "--workers", "0", "--quiet"]
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    assert results["published"][0]["sentence"] in told
    assert str(folder / "report.html") in told


def test_the_list_of_recipes_says_what_each_re_tests_and_costs(capsys):
    assert cli.main(["list", "recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == NAMES
    for row in rows:
        assert row["re-tests"].startswith("whether ")
        assert re.fullmatch(r"smoke: .+; small: .+; full: .+", row["cost"])
        assert row["source"]


def test_a_report_of_the_runs_alone_does_not_replace_that_of_the_recipe(made, capsys):
    _, folder = made("ssmax-text8")
    before = (folder / "report.html").read_bytes()
    assert cli.main(["report", str(folder)]) == 2
    assert "was made by langevin reproduce" in capsys.readouterr().err
    assert (folder / "report.html").read_bytes() == before
