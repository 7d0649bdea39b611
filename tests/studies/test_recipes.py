"""Recipes and langevin reproduce: strict files, honest answers, and every recipe at smoke scale."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path

import pytest
import yaml

from langevin import cli
from langevin.errors import UsageError
from langevin.studies import recipe as recipes
from langevin.studies.recipe import SCALES, Difference, Trend
from langevin.studies.reproduce import mixer_settings, reproduce

NAMES = ["drift-diffusion-gpt2", "heat-calibration", "heat-depth-law", "speed", "ssmax-text8"]


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
        ({"claims": claims_with(metric="brie")}, "unknown metric in a claim of mine 'brie'"),
        ({"claims": claims_with(expect="nicer")}, "expect"),
        ({"name": "other"}, "calls itself 'other'"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_by_name(changes, cause):
    with pytest.raises(UsageError, match=re.escape(cause)):
        recipes.read(text_of(**changes), "mine")


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
