"""Two processes under torchrun train the same run as one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import small

from langevin.data import prepare
from langevin.errors import UsageError
from langevin.runs import train
from langevin.settings import TrainConfig
from langevin.training.loop import Trainer
from langevin.training.parallel import World
from langevin.training.start import build


def in_two_processes(config: TrainConfig, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    settings = out.with_suffix(".yaml")
    settings.write_text(config.as_yaml())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "langevin", "train", "--config", str(settings), "--out", str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["split"] == "valid"}


def plain(tmp_path: Path, **changes: Any) -> TrainConfig:
    values = {"mixer": "heat(t='head')", "dropout": 0.0, "steps": 8, "eval_every": 2, "ema": 0.5}
    return small(tmp_path, **{**values, **changes})


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one_and_one_goes_on_for_two(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    config = plain(tmp_path, accumulate=2, parallel=kind)
    train(config, tmp_path / "one", quiet=True)
    done = in_two_processes(config, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one.keys() == two.keys() == {2, 4, 6, 8}
    for step in one:
        assert two[step] == pytest.approx(one[step], abs=1e-5)
    for damaged in (tmp_path / "two" / "checkpoints").glob("step-8/manifest.json"):
        damaged.unlink()  # as if the last checkpoint had not been finished
    train(replace(config, parallel="ddp"), tmp_path / "two", resume=True, quiet=True)
    assert losses(tmp_path / "two")[8] == pytest.approx(one[8], abs=1e-5)


def test_two_processes_with_dropout_go_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    config = plain(tmp_path, dropout=0.3)
    done = in_two_processes(config, tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    (tmp_path / "broken" / "checkpoints" / "step-8" / "manifest.json").unlink()
    done = in_two_processes(config, tmp_path / "broken", "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "going on from step 4" in done.stderr
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def test_processes_that_do_not_divide_the_batch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    config = plain(tmp_path, batch=3)
    corpus = prepare(config.data, "bytes", progress=False)
    with pytest.raises(UsageError, match="2 processes do not divide a batch of 3"):
        Trainer(config, build(config, corpus), corpus, tmp_path, World(0, 2))
