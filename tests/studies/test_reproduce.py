"""langevin reproduce: the study of a recipe, with what was published beside what was found."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace

import pytest
import torch
from small_study import SHAPE, results_in, text_in

from langevin import cli
from langevin.errors import UsageError
from langevin.studies import compare as comparing
from langevin.studies import recipe as recipes
from langevin.studies import reproduce as reproducing
from langevin.studies import work
from langevin.studies.plan import read_plan
from langevin.studies.reproduce import reproduce, reproduce_speed
from models.tiny_models import tiny

TRAINING = [
    "ar-vs-diffusion",
    "drift-diffusion-gpt2",
    "heat-calibration",
    "heat-depth-law",
    "ssmax-text8",
    "swap-softmax",
]


def tiny_recipe(name, home):
    """The recipe as it is, with models and texts that take seconds."""
    chosen = recipes.recipe(name)
    smoke = chosen.scale("smoke")
    small = {**SHAPE, "data": str(text_in(home))}
    if "init" in smoke.settings:
        tiny("llama", vocab_size=257).save_pretrained(home / "model")
        small |= {
            "init": str(home / "model"),
            "layers": 4,
            "width": 128,
            "heads": 4,
            "steps": 2,
            "eval_every": 1,
        }
    parts = tuple(
        replace(part, settings={k: v for k, v in part.settings.items() if k in ("layers", "lr")})
        for part in smoke.parts
    )
    smoke = replace(smoke, settings={**smoke.settings, **small}, parts=parts, test_tokens=128)
    smoke = replace(smoke, trials=min(smoke.trials, 1))
    return replace(chosen, scales={**chosen.scales, "smoke": smoke})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each recipe in a tiny form, made when it is first asked for."""
    found = {}

    def make(name):
        if name not in found:
            home = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                chosen = tiny_recipe(name, home)
                patch.setattr(reproducing, "recipe", lambda _: chosen)
                found[name] = reproduce(name, "smoke", home / "out", workers=0, quiet=True), home / "out"
        return found[name]

    return make


@pytest.mark.parametrize("name", TRAINING)
def test_a_recipe_ends_in_a_page_with_an_answer_to_every_claim(made, name):
    results, folder = made(name)
    plan, facts = read_plan(folder)
    page = html.unescape((folder / "report.html").read_text())
    assert [answer.claim for answer in results.answers] == [claim.claim for claim in plan.claims]
    for answer, claim in zip(results.answers, plan.claims, strict=True):
        assert answer.ours != "not measured"
        if claim.expect != "no worse":
            assert answer.direction == "not judged"  # two seeds judge no claim
        assert answer.published in page
    assert facts["commands"] == [f"langevin reproduce {name} --scale smoke"]
    assert set(recipes.recipe(name).differs) <= set(results.not_controlled)
    assert results_in(folder)["answers"][0]["direction"] == results.answers[0].direction


def test_the_parts_of_a_recipe_are_one_study(made):
    """C11: version 0.1 made a study of each part and read their results again for a second page."""
    results, folder = made("heat-calibration")
    assert [part.name for part in results.parts] == ["1 layer", "2 layers"]
    assert [part.settings["layers"] for part in results.parts] == [1, 2]
    assert (folder / "1-layer" / "adaptive" / "seed-1" / "done.json").is_file()
    assert not (folder / "1-layer" / "report.html").exists()
    trend = results.answers[-1]
    assert trend.part == ""
    assert "2 layers against 1 layer" in trend.ours
    matched = [answer for answer in results.answers if "at equal loss" in answer.claim]
    assert len(matched) == 2


def test_a_recipe_that_is_done_is_not_made_again_and_another_plan_is_refused(made, monkeypatch, capsys):
    results, folder = made("ssmax-text8")
    chosen = tiny_recipe("ssmax-text8", folder.parent)
    monkeypatch.setattr(reproducing, "recipe", lambda _: chosen)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("done.json")}
    command = ["reproduce", "ssmax-text8", "--out", str(folder), "--workers", "0", "--quiet"]
    assert cli.main(command) == 0
    told = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("done.json")} == before
    for answer in results.answers:
        assert f"{answer.claim} {answer.direction}: {answer.ours}" in told
    assert str(folder / "report.html") in told
    with pytest.raises(UsageError, match="was planned with seeds"):
        reproduce("ssmax-text8", "smoke", folder, seeds=(7, 8), workers=0, quiet=True)


@pytest.mark.parametrize("name", ["heat-calibration", "speed"])
def test_a_folder_of_something_else_is_refused_and_stays_as_it_is(tmp_path, name, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    assert cli.main(["reproduce", name, "--out", str(tmp_path), "--workers", "0", "--quiet"]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ssmax-text9"], "Did you mean 'ssmax-text8'?"),
        (["speed", "--seeds", "0-2"], "has no seeds"),
        (["ssmax-text8", "--seeds", "x"], "names no seeds"),
        (["ssmax-text8", "--scale", "huge"], "huge"),
        (["ssmax-text8", "--workers", "-2"], "workers"),
        ([], "Missing"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, said, tmp_path, capsys):
    assert cli.main(["reproduce", *arguments, "--out", str(tmp_path / "x")]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert said in "\n".join(lines)
    assert len(lines) <= 2
    assert not (tmp_path / "x").exists()


def test_the_list_of_recipes_says_what_each_re_tests_and_costs(capsys):
    assert cli.main(["list", "recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == recipes.names()
    for row in rows:
        assert row["re-tests"].startswith(("whether ", "how "))
        assert re.fullmatch(r"smoke: .+; small: .+; full: .+", row["cost"])
        assert row["source"]


def test_a_recipe_of_classifiers_has_a_part_for_each_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "ROUNDS", 2)
    monkeypatch.setattr(work, "SECONDS", 0.005)
    chosen = recipes.recipe("neighbor-classification")
    small = chosen.scale("small")
    parts = []
    for part in small.parts:
        table = tmp_path / f"{part.settings['data']}.csv"
        rows = (f"{part.name} word{i % 3} {i},{i % 2}\n" for i in range(80))
        table.write_text("text,label\n" + "".join(rows))
        tiny = {**SHAPE, "data": str(table), "epochs": 1, "steps": None, "batch": 16}
        parts.append(replace(part, settings=tiny))
    scale = replace(small, parts=tuple(parts), settings={}, seeds=(0,), tune=None)
    chosen = replace(chosen, scales={**chosen.scales, "small": scale})
    monkeypatch.setattr(reproducing, "recipe", lambda _: chosen)
    monkeypatch.setattr(comparing, "write_report", lambda *arguments: None)  # pages have tests of their own
    results = reproduce("neighbor-classification", "small", tmp_path / "out", workers=0, quiet=True)
    assert [part.name for part in results.parts] == ["IMDB", "AG News"]
    assert results.margin == 0.01
    assert [answer.part for answer in results.answers] == ["IMDB", "AG News"]
    assert "86.3 % against 94 to 96 %" in results.answers[0].published
    assert set(results.data["sets"]) == {"ag_news.csv", "imdb.csv"}
    told = "2 data sets (imdb.csv, ag_news.csv) and one budget each (64 examples, cosine schedule)"
    assert f"{told}: others were not tried." in results.not_controlled
    for part in results.parts:
        flops = {arm.name: arm.cost("flops_per_token").value for arm in part.arms}
        assert flops["bag"] == min(flops.values()) > 0


# Costs


def test_speed_answers_its_claims_and_a_smoke_test_cannot(tmp_path):
    chosen = recipes.recipe("speed")
    smoke = chosen.scale("smoke")
    benches = replace(smoke.benches, mixers=replace(smoke.benches.mixers, lengths=(64,)), seconds=0.005)
    chosen = replace(chosen, scales={**chosen.scales, "smoke": replace(smoke, benches=benches)})
    answers = reproduce_speed(chosen, "smoke", tmp_path / "speed")
    assert [answer.claim for answer in answers] == [claim.claim for claim in chosen.speeds]
    assert {answer.direction for answer in answers} == {"not judged"}
    assert all("times as long as softmax's (spread " in answer.ours for answer in answers)
    page = html.unescape((tmp_path / "speed" / "report.html").read_text())
    assert all(answer.claim in page and answer.ours in page for answer in answers)
    assert results_in(tmp_path / "speed")["answers"][0]["direction"] == "not judged"


@pytest.mark.parametrize(
    ("expect", "ratio", "spread", "direction"),
    [
        ("faster", 0.5, 0.1, "seen"),
        ("faster", 2.0, 0.1, "opposite"),
        ("faster", 0.95, 0.1, "not seen"),
        ("slower", 2.0, 0.1, "seen"),
        ("same", 1.01, 0.02, "seen"),
        ("same", 1.2, 0.02, "opposite"),
        ("same", 1.04, 0.03, "not seen"),
    ],
)
def test_a_ratio_of_times_within_the_spread_of_its_rounds_stays_open(expect, ratio, spread, direction):
    """C8: "ssmax trained at 1.07 × softmax's tokens/s": it only adds work."""

    def row(name, time):
        return {"part": "core", "length": 4096, "mixer": name, "forward_ms": time, "forward_ratio": time}

    rows = [{**row(n, t), "forward_spread_ms": spread * t} for n, t in (("softmax", 1.0), ("sima", ratio))]
    claim = recipes.SpeedClaim("", "", "core", "sima", expect, length=4096)
    for rounds, expected in ((10, direction), (3, "not judged")):
        found = {"mixers": {"rows": rows, "settings": {"repeats": rounds}}}
        assert reproducing._answer(claim, found).direction == expected


def test_memory_answers_its_claims_and_a_smoke_test_cannot(tmp_path):
    chosen = recipes.recipe("neighbor-memory")
    smoke = chosen.scale("smoke")
    benches = replace(smoke.benches, edge={**smoke.benches.edge, "lengths": [16, 32]}, vocab=50, rounds=2)
    chosen = replace(chosen, scales={**chosen.scales, "smoke": replace(smoke, benches=benches)})
    answers = reproduce_speed(chosen, "smoke", tmp_path / "memory")
    assert [answer.claim for answer in answers] == [claim.claim for claim in chosen.speeds]
    assert {answer.direction for answer in answers} == {"not judged"}
    for claim, answer in zip(chosen.speeds, answers, strict=True):
        if "materialised" in claim.against and not torch.cuda.is_available():
            assert answer.ours == "not measured on this machine"
        else:
            assert "at 32 tokens a text takes" in answer.ours
    page = html.unescape((tmp_path / "memory" / "report.html").read_text())
    assert all(answer.claim in page and answer.ours in page for answer in answers)
    assert {row["part"] for row in results_in(tmp_path / "memory")["edge"]["rows"]} == {"training"}


@pytest.mark.parametrize(
    ("measure", "arm", "base", "times", "direction"),
    [
        ("memory", 10.0, 300.0, 10, "seen"),
        ("memory", 10.0, 90.0, 10, "not seen"),  # less, but not ten times
        ("memory", 10.0, 9.0, 1, "opposite"),
        ("training", 10.0, 70.0, 6, "seen"),
        ("training", 10.0, 62.0, 6, "not seen"),  # within the spread of six times
        ("training", 10.0, 8.0, 1, "opposite"),
    ],
)
def test_so_many_times_less_is_seen_beyond_the_spread_and_where_both_were_measured(
    measure, arm, base, times, direction
):
    def row(model, length, size):
        times = {"ms_p50": size, "ms_p90": 1.1 * size, "tokens_per_second": 1000 / size}
        return {"model": model, "length": length, "batch": 4, "mib_a_text": size, **times}

    rows = [row("neighbor", 1024, 1.0), row("sima", 1024, 1.0)]
    rows += [row("neighbor", 4096, arm), row("sima", 4096, base), row("neighbor", 8192, 2 * arm)]
    expect = "less" if measure == "memory" else "faster"
    claim = recipes.SpeedClaim("", "", measure, "neighbor", expect, "sima", times, length=4096)
    edge = {"rows": rows, "settings": {"repeats": 5}}
    assert reproducing._answer(claim, {"edge": edge}).direction == direction
    assert "at 4,096 tokens" in reproducing._answer(claim, {"edge": edge}).ours
    longer = replace(claim, length=8192)
    assert reproducing._answer(longer, {"edge": edge}).direction == "not judged"
    nowhere = replace(claim, against="heat")
    assert "not measured" in reproducing._answer(nowhere, {"edge": edge}).ours
