"""Whatever stops a run, going on gives the bits of a run that was not stopped."""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import (
    DYING_WHILE_SAVING_STEP_8,
    dying_at_step,
    fingerprint,
    small,
    train_in_a_process,
)

import langevin
from langevin.errors import UsageError, WorkError
from langevin.runs import train
from langevin.training import checkpoint, loop, optim
from langevin.training.start import build


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))


def test_a_run_killed_twice_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """kill -9 at a step, then while a checkpoint is being written, then to the end."""
    config = small(tmp_path)
    train(config, tmp_path / "whole", quiet=True)
    settings = tmp_path / "settings.yaml"
    settings.write_text(config.as_yaml())
    out = tmp_path / "killed"
    assert train_in_a_process(settings, out, dying_at_step(6)) == -signal.SIGKILL
    assert train_in_a_process(settings, out, DYING_WHILE_SAVING_STEP_8) == -signal.SIGKILL
    assert [p.name for p in (out / "checkpoints").glob("step-*")] == ["step-4"]
    assert train_in_a_process(settings, out) == 0
    assert fingerprint(out, 12) == fingerprint(tmp_path / "whole", 12)

    def losses(run: Path) -> list[Any]:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [(r["step"], r["loss"]) for r in rows if r["split"] == "valid"]

    assert losses(out) == losses(tmp_path / "whole")


@pytest.mark.parametrize("harm", ["truncated", "changed", "missing", "without a manifest"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_used(
    harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(tmp_path)
    train(config, tmp_path / "whole", quiet=True)
    out = tmp_path / "harmed"
    train(config, out, quiet=True)
    weights = out / "checkpoints" / "step-12" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    if harm == "truncated":
        weights.write_bytes(data[:-100])
    elif harm == "changed":
        data[-5] ^= 1
        weights.write_bytes(data)
    elif harm == "missing":
        weights.unlink()
    else:
        (weights.parent / "manifest.json").unlink()
    refused: list[str] = []
    assert checkpoint.newest(out / "checkpoints", refused=refused) == out / "checkpoints" / "step-8"
    assert refused[0].startswith("step-12: ")
    train(config, out, resume=True)
    assert "step-12" in capsys.readouterr().err
    assert fingerprint(out, 12) == fingerprint(tmp_path / "whole", 12)


def test_a_signal_saves_and_stops_after_the_step_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(tmp_path)
    train(config, tmp_path / "whole", quiet=True)
    whole = loop.Trainer._step

    def step(self: loop.Trainer, number: int) -> Any:
        if number == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, number)

    monkeypatch.setattr(loop.Trainer, "_step", step)
    _, stopped_by = train(config, tmp_path / "stopped", quiet=True)
    assert stopped_by == signal.SIGTERM
    assert (tmp_path / "stopped" / "checkpoints" / "step-6").is_dir()
    monkeypatch.setattr(loop.Trainer, "_step", whole)
    train(config, tmp_path / "stopped", resume=True, quiet=True)
    assert fingerprint(tmp_path / "stopped", 12) == fingerprint(tmp_path / "whole", 12)


def test_a_second_ctrl_c_stops_at_once_and_the_last_checkpoint_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, before = small(tmp_path), signal.getsignal(signal.SIGINT)
    train(config, tmp_path / "whole", quiet=True)
    whole = loop.Trainer._step

    def step(self: loop.Trainer, number: int) -> Any:
        if number == 5:
            for signals in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # only Ctrl-C is impatient
                os.kill(os.getpid(), signals)
        return whole(self, number)

    monkeypatch.setattr(loop.Trainer, "_step", step)
    with pytest.raises(KeyboardInterrupt, match=r"stopped at once\. The checkpoint of step 4 is whole\."):
        train(config, tmp_path / "stopped", quiet=True)
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(loop.Trainer, "_step", whole)
    train(config, tmp_path / "stopped", resume=True, quiet=True)
    assert fingerprint(tmp_path / "stopped", 12) == fingerprint(tmp_path / "whole", 12)


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checkpoint.write_tensors

    def full(path: Path, tensors: Any) -> None:
        if "step-8" not in str(path):
            return whole(path, tensors)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            return whole(path, tensors)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(WorkError, match="step-8 could not be written"):
        train(small(tmp_path), tmp_path / "run", quiet=True)
    kept = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert kept is not None
    assert kept.name == "step-4"
    assert [p.name for p in kept.parent.iterdir()] == ["step-4"]


@pytest.mark.parametrize(
    "changes", [{"optimizer": "muon"}, {"precision": "fp16"}, {"ema": 0.9999}, {"ema": 0.9}], ids=str
)
def test_every_optimiser_and_the_scale_of_the_loss_are_resumed(
    changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim.Update, "PATIENCE", 5)  # good steps before the scale of the loss doubles
    config = small(tmp_path, **changes)
    train(config, tmp_path / "whole", quiet=True)
    step = loop.Trainer._step

    def dies(self: loop.Trainer, number: int) -> None:
        if number == 6:
            raise KeyboardInterrupt
        step(self, number)

    monkeypatch.setattr(loop.Trainer, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", quiet=True)
    monkeypatch.setattr(loop.Trainer, "_step", step)
    train(config, tmp_path / "cut", resume=True, quiet=True)
    assert fingerprint(tmp_path / "cut", 12) == fingerprint(tmp_path / "whole", 12)


def test_a_new_checkpoint_is_kept_where_a_damaged_later_one_lies(tmp_path: Path) -> None:
    config = small(tmp_path, keep=1, checkpoint_every=2)
    train(config, tmp_path / "run", quiet=True)
    folder = tmp_path / "run" / "checkpoints"
    checkpoint.prune(folder, 1, None, 12)
    (folder / "step-14").mkdir()
    checkpoint.prune(folder, 1, None, 12)
    assert [p.name for p in folder.iterdir()] == ["step-12"]


def test_a_run_folder_is_neither_overwritten_nor_continued_by_another_run(tmp_path: Path) -> None:
    config = small(tmp_path, steps=4)
    train(config, tmp_path / "run", quiet=True)
    with pytest.raises(UsageError, match="holds a run already"):
        train(config, tmp_path / "run", quiet=True)
    with pytest.raises(UsageError, match=r"was trained with lr=0\.001, not 0\.01"):
        train(small(tmp_path, steps=4, lr=0.01), tmp_path / "run", resume=True, quiet=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(UsageError, match="holds something else"):
        train(config, tmp_path / "other", quiet=True)


def test_no_pickle_is_in_a_checkpoint(tmp_path: Path) -> None:
    train(small(tmp_path, steps=4), tmp_path / "run", quiet=True)
    names = {p.suffix for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert names <= {".safetensors", ".json", ".jsonl", ".yaml"}


def test_a_finished_run_goes_on_with_a_larger_budget_and_no_smaller_one(tmp_path: Path) -> None:
    config = small(tmp_path, schedule="constant", warmup=0.0)
    whole, _ = train(config, tmp_path / "whole", quiet=True)
    out = tmp_path / "parts"
    train(replace(config, steps=8), out, quiet=True)
    train(config, out, resume=True, quiet=True)
    assert fingerprint(out, 12) == fingerprint(whole.path, 12)
    train(replace(config, steps=None), out, resume=True, quiet=True)  # no budget: its own
    assert langevin.load(out).config.steps == 12
    with pytest.raises(UsageError, match="at step 12 already"):
        train(replace(config, steps=4), out, resume=True, quiet=True)


def test_no_steps_keep_the_model_as_it_starts(tmp_path: Path) -> None:
    run, _ = train(small(tmp_path, steps=0), tmp_path / "run", quiet=True)
    assert [row["step"] for row in run.metrics("valid")] == [0]
    torch.manual_seed(run.config.seed)
    fresh = build(run.config, run.task.prepare(run.config))
    assert all(torch.equal(p, dict(run.model.named_parameters())[n]) for n, p in fresh.named_parameters())
    train(small(tmp_path, steps=4), run.path, resume=True, quiet=True)
    assert run.metrics()[-1]["step"] == 4
