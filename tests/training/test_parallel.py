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


LIMITED = """
import resource, sys
from pathlib import Path
import torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
from langevin import runs
from langevin.settings import TrainConfig
from langevin.training import start
status = dict(line.split(":") for line in open("/proc/self/status"))
most = int(status["VmData"].split()[0]) * 1024 + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
runs.train(TrainConfig.read(Path(sys.argv[1])), Path(sys.argv[2]), quiet=True)
"""


@pytest.mark.slow  # starts four processes, and draws and writes some hundred megabytes
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of processes as Linux does")
def test_two_processes_train_a_model_that_neither_may_hold_and_one_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and moments take 379 MB; a process may have 350 MB more than it has when it starts."""
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    large = {"layers": 40, "width": 256, "heads": 4, "batch": 2, "steps": 4, "eval_tokens": 16}
    config = plain(tmp_path, **large, ema=0.0, checkpoint_every=2, parallel="fsdp")
    limit = 350_000_000
    data = prepare(config.data, "bytes", progress=False)
    assert 3 * 4 * sum(p.numel() for p in build(config, data).parameters()) > limit
    settings, script = tmp_path / "settings.yaml", tmp_path / "limited.py"
    settings.write_text(config.as_yaml())
    script.write_text(LIMITED)
    # What is freed goes back at once.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "200000"}

    def limited(out: str, *launcher: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *launcher, str(script), str(settings), str(tmp_path / out), str(limit)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    alone = limited("alone")
    assert alone.returncode == 1
    assert "can't allocate memory" in alone.stderr
    together = limited("two", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    assert together.returncode == 0, together.stderr[-3000:]
    two = losses(tmp_path / "two")
    assert two[4] < two[2]
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-4")
    run, _ = train(config, tmp_path / "two", resume=True, quiet=True)
    assert losses(run.path)[4] == pytest.approx(two[4], abs=1e-5)
    assert sum(p.numel() for p in run.model.parameters()) * 12 > limit


def test_processes_that_do_not_divide_the_batch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    config = plain(tmp_path, batch=3)
    corpus = prepare(config.data, "bytes", progress=False)
    with pytest.raises(UsageError, match="2 processes do not divide a batch of 3"):
        Trainer(config, build(config, corpus), corpus, tmp_path, World(0, 2))
