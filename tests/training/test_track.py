"""Metrics reach TensorBoard and W&B as they reach metrics.jsonl."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from langevin.errors import UsageError
from langevin.training.track import Tracker, chosen

ROWS = [
    {"step": 5, "tokens": 640, "split": "train", "loss": 3.5, "lr": 1e-3, "note": "no number"},
    {"step": 5, "split": "valid", "loss": 3.75, "best": True, "missing": None},
]
EXPECTED = [
    {"train/tokens": 640.0, "train/loss": 3.5, "train/lr": 1e-3},
    {"valid/loss": 3.75},
]
CONFIG = {"mixer": "ssmax", "seed": 0}


def trackers(names: list[str], folder: Path, config: dict[str, Any], step: int = 0) -> list[Tracker]:
    return [kind(folder, config, step) for kind in chosen(",".join(names))]


class FakeWriter:
    made: list[FakeWriter]

    def __init__(self, place: str, purge_step: int | None = None) -> None:
        self.place, self.purge_step = place, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.text = ""
        self.closed = False
        FakeWriter.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.text += text

    def close(self) -> None:
        self.closed = True


class FakeRun:
    def __init__(self, **options: Any) -> None:
        self.options, self.rows, self.finished, self.steps = options, [], False, ("", "")

    def define_metric(self, name: str, step_metric: str) -> None:
        self.steps = (name, step_metric)

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> list[FakeWriter]:
    FakeWriter.made = []
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    return FakeWriter.made


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    made: list[FakeRun] = []
    module = types.ModuleType("wandb")

    def start(**options: Any) -> FakeRun:
        made.append(FakeRun(**options))
        return made[-1]

    module.init = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


def test_tensorboard_gets_every_number_at_its_step(tmp_path: Path, board: list[FakeWriter]) -> None:
    (tracker,) = trackers(["tensorboard"], tmp_path, CONFIG)
    for row in ROWS:
        tracker.write(row)
    (writer,) = board
    assert writer.place == str(tmp_path / "tensorboard")
    assert writer.scalars == [(n, v, 5) for row in EXPECTED for n, v in row.items()]
    assert "mixer: ssmax" in writer.text
    assert not writer.closed
    tracker.close()
    assert writer.closed


def test_tensorboard_forgets_what_was_logged_after_the_checkpoint(
    tmp_path: Path, board: list[FakeWriter]
) -> None:
    trackers(["tensorboard"], tmp_path, CONFIG)
    trackers(["tensorboard"], tmp_path, CONFIG, step=8)
    assert [writer.purge_step for writer in board] == [None, 9]


def test_tensorboard_s_own_files_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = trackers(["tensorboard"], tmp_path, CONFIG)
    for row in ROWS:
        tracker.write(row)
    tracker.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("valid/loss")] == [(5, 3.75)]


def test_wandb_gets_every_number_with_its_step(tmp_path: Path, wandb: list[FakeRun]) -> None:
    (tracker,) = trackers(["wandb"], tmp_path, CONFIG)
    for row in ROWS:
        tracker.write(row)
    tracker.close()
    (run,) = wandb
    assert run.rows == [{**row, "step": 5} for row in EXPECTED]
    assert run.steps == ("*", "step")
    assert run.options["config"] == CONFIG
    assert run.options["name"] == tmp_path.name
    assert run.finished


def test_a_resumed_run_goes_on_in_wandb_and_another_starts_anew(
    tmp_path: Path, wandb: list[FakeRun]
) -> None:
    for step in (0, 8, 0):
        trackers(["wandb"], tmp_path, CONFIG, step)
    first, resumed, again = (run.options["id"] for run in wandb)
    assert first == resumed != again


def test_each_is_opened_once(tmp_path: Path, board: list[FakeWriter], wandb: list[FakeRun]) -> None:
    assert len(trackers(["wandb", "tensorboard", "wandb"], tmp_path, CONFIG)) == 2
    assert (len(board), len(wandb)) == (1, 1)
    assert trackers([], tmp_path, CONFIG) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"package {name}") as error:
        trackers([name], tmp_path, CONFIG)
    assert error.value.remedy == "pip install 'langevin[track]'"


def test_an_unknown_tracker_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean 'wandb'"):
        trackers(["wandbb"], tmp_path, CONFIG)
