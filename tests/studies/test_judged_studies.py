"""A study may be about what its runs write: the judge's gap, at the entropy of real text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from langevin import cli
from langevin.errors import UsageError
from langevin.evaluation.rows import Metric, Row
from langevin.runs import train
from langevin.studies.results import ArmResult, RunResult
from studies.small_study import compared, flags, plan, results_in, settings

NEAR = Metric("judge_gap", "judge gap", "nats/token", "near zero")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("judge")
    return str(train(settings(folder, mixer="softmax", seed=7), folder / "run", quiet=True)[0].path)


def test_runs_of_a_study_write_for_a_judge(tmp_path: Path, judge: str) -> None:
    # Characters of a model that knows next to nothing: the cold ones have less entropy than real text, the
    # warm ones more.
    told = {"samples": 6, "temperatures": (0.01, 100.0), "sampling": {"steps": 4}}
    told |= {"shape": {"tokenizer": "chars"}}
    arms = ("ar=softmax", "masked=softmax, objective=masked")
    planned = plan(tmp_path, *arms, judge=judge, primary="judge_gap", seeds=(0,), **told)  # type: ignore[arg-type]
    results = compared(planned, tmp_path / "study")
    assert results.primary.name == "judge_gap"
    for name in ("ar", "masked"):
        record = json.loads((tmp_path / "study" / name / "seed-0" / "done.json").read_text())
        rows = {row["metric"]: row for row in record["rows"] if not row["at"]}
        assert {"judge_gap", "mauve", "repetition_4", "distinct_4", "infill_accuracy", "nll"} <= set(rows)
        assert rows["judge_gap"]["kind"] == "exact"
        assert record["details"]["quality"]["sampling"].get("steps") == (None if name == "ar" else 4)
    assert results_in(tmp_path / "study")["data"]["judge"]


def test_a_study_goes_on_only_with_the_judge_that_it_began_with(tmp_path: Path, judge: str) -> None:
    told = {"samples": 4, "temperatures": (1.0,), "seeds": (0,)}
    compared(plan(tmp_path, judge=judge, **told), tmp_path / "study")  # type: ignore[arg-type]
    other = train(settings(tmp_path, mixer="softmax", seed=8), tmp_path / "other", quiet=True)[0].path
    with pytest.raises(UsageError, match="was planned with"):
        compared(plan(tmp_path, judge=str(other), **told), tmp_path / "study")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("objective", "samples", "said"),
    [("masked", 4, "does not predict the next token"), ("ar", 5000, "and --samples asks for 5000")],
)
def test_a_judge_that_cannot_judge_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str, samples: int, said: str
) -> None:
    config = settings(tmp_path, mixer="softmax", objective=objective)
    judge = train(config, tmp_path / "judge", quiet=True)[0].path
    words = flags(tmp_path, judge=judge, samples=samples, workers=0, out=tmp_path / "study")
    assert cli.main(["compare", "softmax", "ssmax", "--seeds", "0", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"primary": "judge_gap"}, "judge_gap is what a judge says of texts"),
        ({"judge": "x", "sampling": {"stepz": 3}}, "stepz"),
        ({"judge": "x", "sampling": {"tokens": "many"}}, "sampling: tokens"),
        ({"judge": "x", "sampling": {"temperature": 0.3}}, "setting of a sampler 'temperature'"),
        ({"judge": "x", "sampling": {"stop": "."}}, "setting of a sampler 'stop'"),
        ({"sampling": {"steps": 3}}, "no texts are written"),
        ({"temperatures": (0.5, 0.6)}, "no texts are written"),
        ({"judge": "x", "samples": 1}, "samples=1"),
        ({"judge": "x", "sampling": {"sweeps": 1}, "shape": {"objective": "masked(block=4)"}}, "of blocks"),
        ({"judge": "x", "primary": "repetition_4"}, "neither better high nor low"),
    ],
)
def test_a_plan_that_cannot_be_judged_is_refused(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan(tmp_path, **options)  # type: ignore[arg-type]


def test_what_is_good_near_zero_is_compared_by_its_distance_from_zero() -> None:
    runs = [RunResult(s, "done", rows=(Row("judge_gap", v),)) for s, v in enumerate((-0.3, 0.1))]
    arm = ArmResult("a", {}, (*runs, RunResult(2, "diverged")))
    assert arm.by_seed(NEAR) == {0: 0.3, 1: 0.1, 2: float("inf")}
