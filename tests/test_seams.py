"""An objective of twenty lines and a task of thirty go through the whole house without another edit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import langevin
from langevin import cli
from langevin.evaluation.rows import Metric, Row
from langevin.objectives import Objective
from langevin.objectives import register as register_objective
from langevin.objectives.ar import shift, summed_loss
from langevin.settings import TrainConfig
from langevin.studies import work
from langevin.studies.compare import concluded
from langevin.studies.plan import Part, Plan
from langevin.studies.results import ArmResult, PartResult, RunResult
from langevin.tasks import Task
from langevin.tasks import register as register_task
from training.small_run import dying_at_step, fingerprint, train_in_a_process

SHAPE = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 4, "steps": 12, "device": "cpu"}
SHAPE |= {"eval_every": 4, "checkpoint_every": 4, "lr": 1e-2, "precision": "fp32", "compile": "off"}


@register_objective("smoothed")
@dataclass(frozen=True)
class Smoothed(Objective):
    """Next-token prediction in which every other token is worth a little, too."""

    share: float = 0.1

    def loss(self, model: Any, batch: Any, generator: Any = None) -> Any:
        inputs, targets = shift(batch["tokens"])
        logits = model(input_ids=inputs, use_cache=False).logits
        right, count = summed_loss(logits, targets)
        any_token = -logits.log_softmax(-1).mean(-1).sum()
        return (1 - self.share) * right + self.share * any_token, count


@register_task("counting")
@dataclass(frozen=True)
class Counting(Task):
    """Go on counting modulo a base."""

    base: int = 5
    """Numbers are 0 to base - 1."""

    metrics = (Metric("wrong", "wrong numbers", "fraction", "lower"),)
    primary = "wrong"
    unit = "numbers"

    def prepare(self, config: TrainConfig, progress: bool = False) -> Any:
        facts = {split: {"sha256": f"{self.base}"} for split in ("train", "valid", "test")}
        return SimpleNamespace(manifest={"splits": facts}, tokenizer=None)

    def model_settings(self, config: TrainConfig, data: Any) -> dict[str, Any]:
        return {"vocab_size": self.base}

    def batch(self, data: Any, config: TrainConfig, step: int) -> dict[str, Any]:
        first = np.random.default_rng((config.seed, step)).integers(self.base, size=(config.batch, 1))
        return {"tokens": (first + np.arange(config.context + 1)) % self.base}

    def held_out(self, data: Any, config: TrainConfig) -> list[dict[str, Any]]:
        return [{"tokens": (np.arange(3)[:, None] + np.arange(config.context + 1)) % self.base}]

    def measure(self, run: Any, model: Any, split: str, **options: Any) -> Any:
        tokens = (torch.arange(self.base)[:, None] + torch.arange(run.config.context + 1)) % self.base
        with torch.no_grad():
            wrong = (model(tokens[:, :-1]).logits.argmax(-1) != tokens[:, 1:]).double()
        grid = [
            Row("wrong", float(part.mean()), at={"first": first, "half": half})
            for first, row in enumerate(wrong)
            for half, part in enumerate(row.chunk(2))
        ]
        rows = [Row("wrong", float(wrong.mean()), n=wrong.numel()), *grid]
        return rows, {"examples": wrong.mean(1).tolist()}


SPECS = {"task": "counting(base=7)", "objective": "smoothed(share=0.2)"}


def test_train_is_killed_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    config = TrainConfig(**SHAPE, **SPECS)
    whole, _ = langevin.train(config, tmp_path / "whole", quiet=True)
    settings = tmp_path / "settings.yaml"
    settings.write_text(config.as_yaml())
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_seams\n"
    assert train_in_a_process(settings, tmp_path / "killed", here + dying_at_step(6)) != 0
    assert train_in_a_process(settings, tmp_path / "killed", here) == 0
    assert fingerprint(whole.path, 12) == fingerprint(tmp_path / "killed", 12)


def test_the_command_line_has_the_flags_of_the_task_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for k, v in SHAPE.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    out = tmp_path / "run"
    command = ["train", "--task", "counting", "--objective", "smoothed(share=0.2)", *flags]
    assert cli.main([*command, "--base", "7", "--out", str(out)]) == 0
    assert langevin.load(out).config.task == "counting(base=7)"
    assert cli.main([*command, "--mask-documents", "--out", str(out)]) == 2
    assert cli.main(["train", "--base", "7", "--out", str(out)]) == 2
    with pytest.raises(SystemExit):
        cli.main(["train", "--task", "counting", "--help"])
    shown = capsys.readouterr().out
    assert "counting options" in shown
    assert "Numbers are 0 to base - 1" in shown
    assert cli.main(["evaluate", str(out), "--json"]) == 0
    row, *grid = json.loads(capsys.readouterr().out)["rows"]
    assert row["metric"] == "wrong"
    assert 0 <= row["value"] <= 1
    assert len(grid) == 7 * 2
    assert cli.main(["generate", str(out)]) == 2
    assert "smoothed does not write text" in capsys.readouterr().err
    for kind, name in (("tasks", "counting"), ("objectives", "smoothed")):
        assert cli.main(["list", kind]) == 0
        assert name in capsys.readouterr().out


def test_compare_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: version 0.1 knew tokens, logits and a language model's losses."""
    monkeypatch.setattr(work, "ROUNDS", 2)
    monkeypatch.setattr(work, "SECONDS", 0.005)
    flags = [word for k, v in SHAPE.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    flags += ["--task", "counting", "--base", "3", "--workers", "0", "--seeds", "0,1", "--quiet"]
    arms = ["softmax", "soft=softmax, objective=smoothed(share=0.2)", "slow=ssmax, lr=1e-4"]
    out = tmp_path / "cmp"
    assert cli.main(["compare", *arms, *flags, "--out", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    assert [metric["name"] for metric in results["metrics"]] == ["wrong"]
    assert results["unit"] == "numbers"
    (part,) = results["parts"]
    assert [arm["name"] for arm in part["arms"]] == ["softmax", "soft", "slow"]
    assert part["arms"][1]["settings"]["objective"] == "smoothed(share=0.2)"
    for arm in part["arms"]:
        for run in arm["runs"]:
            assert [row["at"] for row in run["rows"]].count({"first": 1, "half": 1}) == 1
            assert len(run["examples"]) == 3
            assert run["curve"][-1]["amount"] == 12 * 4 * 16
    (judged,) = [
        c for c in results["contrasts"] if c["key"]["arm"] == "soft" and c["key"]["place"] == "best"
    ]
    assert (judged["key"]["metric"], judged["pairs"], judged["state"]) == ("wrong", 2, "too few")
    told = " ".join(results["not_controlled"])
    assert "soft (objective smoothed(share=0.2))" in told
    assert "12 steps" in told
    page = (out / "report.html").read_text()
    assert "wrong numbers" in page
    assert "training numbers" in page
    assert "nats" not in page
    assert "By first and half" in page
    before = (out / "results.json").read_bytes()
    assert cli.main(["report", str(out)]) == 0
    assert (out / "results.json").read_bytes() == before


@pytest.mark.parametrize(("spread", "state"), [(0.0, "better"), (3.0, "not confirmed")])
def test_examples_are_a_second_source_of_variance(spread: float, state: str) -> None:
    """Of a task that tells them, better is said only where they agree, too."""
    plan = Plan((Part(("softmax", "ssmax"), {"task": "counting(base=3)", "steps": 1}),))
    arms = []
    for arm, by in zip(plan.parts[0].read_arms, (0.0, -0.1), strict=True):
        own = [0.5 + by + spread * by * (x - 4.5) for x in range(10)]
        runs = [
            RunResult(s, "done", rows=(Row("wrong", 0.5 + by + s / 1000),), examples=tuple(own))
            for s in plan.seeds
        ]
        arms.append(ArmResult(arm.name, arm.changes, tuple(runs)))
    facts = {"commands": [], "data": {"name": "counting"}}
    results = concluded(plan, (PartResult("", tuple(arms)),), facts, "")
    assert results.contrasts[0].state == state
