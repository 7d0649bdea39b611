"""Budgets in minutes: what evaluations take of them, and the pace as it changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from small_run import small

from langevin.runs import train
from langevin.training import fitting, loop
from langevin.training.fitting import SHARE, Pace, looks_within


@pytest.mark.parametrize(
    ("seconds", "a_batch", "expected"),
    [
        (3600, 0.01, (10, 8)),  # an hour: ten looks at everything
        (60, 0.05, (7, 8)),  # a minute has room for 60 batches: fewer looks
        (60, 0.2, (3, 5)),  # a slow machine: at fewer batches too
        (60, 30.0, (3, 1)),
        (0.6, 1e-3, (3, 8)),
    ],
)
def test_looks_take_their_share_of_the_minutes(seconds: float, a_batch: float, expected: Any) -> None:
    looks, batches = looks_within(seconds, a_batch, batches=8)
    assert (looks, batches) == expected
    assert looks * batches * a_batch <= SHARE * seconds or (looks, batches) == (3, 1)


def walk(pace: Pace, seconds_a_step: Any, total: int, spent: float = 0.0) -> tuple[int, float]:
    """Train by the clock: where a run ends, and when."""
    step = 0
    while step < total:
        took = seconds_a_step(step)
        step, spent = step + 1, spent + took
        total = pace.total(step, spent, spent) or total
    return step, spent


def test_a_machine_that_slows_down_ends_in_time() -> None:
    step, spent = walk(Pace(10.0, 0), lambda step: 0.1 if step < 100 else 2.0, total=6000)
    assert spent == pytest.approx(600, rel=2 * SHARE)
    assert 250 < step < 400


def test_a_machine_that_gets_faster_uses_its_time() -> None:
    step, spent = walk(Pace(2.0, 0), lambda step: 3.0 if step < 10 else 0.1, total=40)
    assert spent == pytest.approx(120, rel=2 * SHARE)
    assert step > 500


def test_a_first_step_that_compiles_does_not_end_the_run() -> None:
    step, _ = walk(Pace(1.0, 0), lambda step: 0.1 if step else 30.0, total=600)
    assert step > 200


def test_a_run_in_minutes_looks_less_often_where_looking_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations that take a hundred times a step."""
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    whole = loop.Trainer.loss

    def slow(self: loop.Trainer, batch: Any) -> Any:
        if not self.model.training:
            time.sleep(0.05)
        return whole(self, batch)

    monkeypatch.setattr(loop.Trainer, "loss", slow)
    monkeypatch.setattr(fitting, "AGAIN", 0.2)
    config = small(tmp_path, steps=None, minutes=2 / 60, eval_every=None, mixer="softmax", dropout=0.0)
    run, _ = train(config, tmp_path / "run", quiet=True)
    looks = run.metrics("valid")
    assert len(looks) <= 5
    assert looks[-1]["step"] == run.metrics("train")[-1]["step"]  # the last step is looked at
    train(config, run.path, resume=True, quiet=True)
    assert run.metrics("valid") == looks


def test_a_large_eval_every_does_not_keep_a_run_from_ending_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fitting, "AGAIN", 0.2)
    monkeypatch.setattr(loop, "budget", lambda trainer: 10**6)  # an estimate that was far too high
    config = small(tmp_path, steps=None, minutes=1 / 60, eval_every=10**6, checkpoint_every=10**6)
    run, _ = train(config, tmp_path / "run", quiet=True)
    assert run.metrics("valid")[-1]["seconds"] < 3
