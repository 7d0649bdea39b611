"""One tiny trained run, made once, and copies of it to harm."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harm import TEXT

from langevin.runs import train
from langevin.settings import TrainConfig
from langevin.training.loop import Trainer

SETTINGS: dict[str, Any] = {
    "tokenizer": "bytes",
    "layers": 2,
    "width": 16,
    "heads": 2,
    "context": 16,
    "batch": 4,
    "steps": 8,
    "eval_every": 2,
    "checkpoint_every": 2,
    "keep": 9,
    "eval_tokens": 64,
    "precision": "fp32",
    "compile": "off",
    "device": "cpu",
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after six of eight steps, with checkpoints at 2, 4 and 6; never written to."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    config = TrainConfig(data=str(folder / "text.txt"), mixer="ssmax", **SETTINGS)
    whole = Trainer._step

    def step(trainer: Trainer, number: int) -> None:
        whole(trainer, number)
        if number == 5:
            trainer.ask(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(folder / "cache"))
        patch.setattr(Trainer, "_step", step)
        train(config, folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, with its data at hand."""
    monkeypatch.setenv("LANGEVIN_CACHE", str(trained.parent / "cache"))
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def again(run: Path) -> list[str]:
    """The command that goes on with the run."""
    return ["train", "--config", str(run / "config.yaml"), "--resume", "auto", "--out", str(run)]


@pytest.fixture
def unprivileged(tmp_path: Path, trained: Path) -> Iterator[Callable[[], None]]:
    """Call it to be nobody in particular from then on: to root every folder can be written."""
    before = os.geteuid()
    environment = Path(sys.prefix).resolve()
    closed = [path for path in (environment, *environment.parents) if not path.stat().st_mode & 0o001]
    if before == 0 and closed:
        pytest.skip(f"only its owner may read {closed[-1]}, and with it what Python imports")

    def drop() -> None:
        if before == 0:
            for path in (tmp_path, *tmp_path.parents[:-1], trained.parent):
                path.chmod(path.stat().st_mode | 0o055)
            os.seteuid(65534)

    yield drop
    os.seteuid(before)
