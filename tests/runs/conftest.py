"""One tiny trained run, made once, and copies of it to harm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from langevin.runs import train
from langevin.settings import TrainConfig

TEXT = "".join(
    f"{name} had {n} {thing}. {name} gave one away, so {n - 1} were left.\n"
    for n in range(2, 7)
    for name in ("Ann", "Bob", "Cleo")
    for thing in ("pears", "cups")
)
SETTINGS: dict[str, Any] = {
    "tokenizer": "bytes",
    "layers": 2,
    "width": 16,
    "heads": 2,
    "context": 16,
    "batch": 4,
    "steps": 6,
    "eval_every": 2,
    "checkpoint_every": 2,
    "eval_tokens": 64,
    "precision": "fp32",
    "compile": "off",
    "device": "cpu",
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints at 2, 4 and 6 (the last two are kept); never written to."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(folder / "cache"))
        config = TrainConfig(data=str(folder / "text.txt"), mixer="ssmax", **SETTINGS)
        train(config, folder / "run", quiet=True)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, with its data at hand."""
    monkeypatch.setenv("LANGEVIN_CACHE", str(trained.parent / "cache"))
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def again(run: Path) -> list[str]:
    """The command that goes on with the run for two more steps."""
    return [
        "train",
        "--config",
        str(run / "config.yaml"),
        "--resume",
        "auto",
        "--out",
        str(run),
        "--steps",
        "8",
    ]


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Call it to be nobody in particular from then on: to root every folder can be written."""
    before = os.geteuid()

    def drop() -> None:
        if before == 0:
            for path in (tmp_path, *tmp_path.parents[:-1]):
                path.chmod(path.stat().st_mode | 0o055)
            os.seteuid(65534)

    yield drop
    os.seteuid(before)


def changed(path: Path, **values: Any) -> None:
    """Other values in a JSON or YAML file; None takes a key out."""
    table = yaml.safe_load(path.read_text()) | values
    path.write_text(
        yaml.safe_dump({k: v for k, v in table.items() if v is not None}, default_flow_style=False)
    )
