"""Sixty damaged run folders, drawn from a seed: commands say what is wrong, and nothing whole is lost."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harm import changed, cut, other_tensors
from safetensors import SafetensorError
from safetensors.torch import load_file

from langevin.cli import main
from langevin.errors import UsageError, WorkError
from langevin.runs import load
from langevin.runs.files import sha256
from langevin.runs.folder import read_metrics, sessions
from langevin.settings import TrainConfig
from langevin.training import checkpoint

SEED, CASES = 10, 60
Harm = Callable[[Path], Any]

FILES = [
    *("config.yaml", "metrics.jsonl", "environment.json", "evaluation-test.json", "model/config.json"),
    *("model/model.safetensors", "model/tokenizer.json", "model/tokenizer_config.json"),
    *("model/generation_config.json", "samples/samples.jsonl", "checkpoints/step-6/manifest.json"),
    *("checkpoints/step-6/state.json", "checkpoints/step-6/weights.safetensors"),
    *("checkpoints/step-6/random.safetensors", "checkpoints/step-6/optimizer-0.safetensors"),
]
TABLES = [name for name in FILES if name.endswith((".json", ".yaml"))]
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "random bytes": random.Random(SEED).randbytes(300),
    "an empty table": b"{}",
    "a list": b"[1]",
    "a number": b"1",
    "null": b"null",
    "not UTF-8": b"\xff\xfe\x00a",
    "nested deep": b"[" * 20_000,
    "a pickle": pickle.dumps({"step": 6}),
    "a web page": b"<html>moved</html>\n",
}
VALUES: dict[str, Any] = {
    "no": None,
    "a string as": "x",
    "a list as": [1],
    "-1 as": -1,
    "1e9 as": 10**9,
    "infinity as": 1e999,
}


def _replaced(name: str, data: bytes) -> Harm:
    return lambda run: (run / name).write_bytes(data)


def _tree(run: Path, name: str) -> None:
    """A folder in the place of a file."""
    (run / name).unlink()
    (run / name).mkdir()


def _link(target: str) -> Callable[[Path, str], None]:
    def harm(run: Path, name: str) -> None:
        (run / name).unlink()
        (run / name).symlink_to(target)

    return harm


def _swapped(run: Path, one: str, two: str) -> None:
    (run / one).rename(run / "swap")
    (run / two).rename(run / one)
    (run / "swap").rename(run / two)


def _flipped(run: Path, name: str, where: float) -> None:
    data = bytearray((run / name).read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x55
    (run / name).write_bytes(data)


def _valued(run: Path, name: str, value: Any, which: float) -> None:
    """Another value, or none, for one key of a table."""
    table = yaml.safe_load((run / name).read_text())
    inner = table[0] if isinstance(table, list) else table
    key = sorted(inner)[int(which * len(inner))]
    inner |= {key: value}
    if value is None:
        del inner[key]
    (run / name).write_text(json.dumps(table))


WHOLE: dict[str, Harm] = {  # nothing is wrong with these
    "nothing": lambda run: None,
    "a copy of a checkpoint": lambda run: shutil.copytree(
        run / "checkpoints/step-6", run / "checkpoints/step-6-keep"
    ),
    "a copy with a zero": lambda run: shutil.copytree(
        run / "checkpoints/step-4", run / "checkpoints/step-04"
    ),
    "stray files": lambda run: [
        (run / place / name).write_text("mine")
        for place in (".", "model", "checkpoints", "samples")
        for name in ("notes.txt", ".DS_Store", "step-5", ".x.old", ".y.0123abcd.writing")
    ],
    "leftovers of a killed writer": lambda run: [
        shutil.copytree(run / "model", run / ".model.writing"),
        shutil.copytree(run / "checkpoints/step-6", run / "checkpoints/.step-8.writing"),
        (run / ".lock").write_text("process 1 on moon"),
    ],
    "a model moved aside": lambda run: (run / "model").rename(run / ".model.old"),
    "a torn last row": lambda run: (run / "metrics.jsonl").open("a").write('{"step": 6, "tok'),
}

BROKEN: dict[str, Harm] = {
    "no model": lambda run: shutil.rmtree(run / "model"),
    "no checkpoints": lambda run: shutil.rmtree(run / "checkpoints"),
    "a file as checkpoints": lambda run: [
        shutil.rmtree(run / "checkpoints"),
        (run / "checkpoints").touch(),
    ],
    "a file as a checkpoint": lambda run: (run / "checkpoints/step-8").touch(),
    "an empty checkpoint": lambda run: (run / "checkpoints/step-8").mkdir(),
    "an empty manifest": lambda run: (run / "checkpoints/step-6/manifest.json").write_text("{}"),
    "every checkpoint empty": lambda run: [
        (path / "manifest.json").write_text("[]") for path in (run / "checkpoints").iterdir()
    ],
    "nan in the weights": lambda run: other_tensors(
        run / "model/model.safetensors", lambda t: {k: x * torch.nan for k, x in t.items()}
    ),
    "weights of another shape": lambda run: other_tensors(
        run / "model/model.safetensors", lambda t: {k: torch.ones(1, 1) for k in t}
    ),
    "weights of a checkpoint as the model's": lambda run: other_tensors(
        run / "model/model.safetensors", lambda t: {k.removeprefix("model."): x for k, x in t.items()}
    ),
    "a step of another checkpoint": lambda run: shutil.move(
        run / "checkpoints/step-6", run / "checkpoints/step-7"
    ),
    "another vocabulary": lambda run: changed(run / "model/config.json", vocab_size=10**10),
    "another width in the settings": lambda run: (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("width: 16", "width: 32")
    ),
    "a key twice in the settings": lambda run: (run / "config.yaml").open("a").write("seed: 1\n"),
    "other data": lambda run: (run / "environment.json").write_text(
        (run / "environment.json").read_text().replace('"text_sha256": "', '"text_sha256": "0')
    ),
    "a model without its tokenizer": lambda run: (run / "model/tokenizer.json").unlink(),
}


def cases() -> dict[str, Harm]:
    """The named ones, and as many more by chance as make sixty."""
    found = {**WHOLE, **BROKEN}
    dice = random.Random(SEED)

    def some(table: dict[str, Any], count: int) -> list[tuple[str, Any]]:
        return dice.sample(list(table.items()), count)

    while len(found) < CASES:
        name, other = dice.sample(FILES, 2)
        where = dice.random()
        title, harm = dice.choice(
            [
                (f"{name} cut", lambda run, name=name: cut(run / name)),
                (f"{name} missing", lambda run, name=name: (run / name).unlink()),
                (f"{name} a folder", lambda run, name=name: _tree(run, name)),
                (f"{name} a link to nothing", lambda run, name=name: _link("nowhere")(run, name)),
                (f"{name} a link to itself", lambda run, name=name: _link(Path(name).name)(run, name)),
                (f"{name} and {other} swapped", lambda run, a=name, b=other: _swapped(run, a, b)),
                (f"{name} with a byte changed", lambda run, name=name, x=where: _flipped(run, name, x)),
                *(
                    (f"{name} {what}", _replaced(name, data))
                    for what, data in dice.sample([*CONTENTS.items()], 3)
                ),
                *(
                    (
                        f"{what} key {where:.2f} of {table}",
                        lambda run, table=table, value=value, x=where: _valued(run, table, value, x),
                    )
                    for table in dice.sample(TABLES, 3)
                    for what, value in some(VALUES, 1)
                ),
            ]
        )
        found.setdefault(title, harm)
    return found


@pytest.fixture
def used(run: Path, evaluated: dict[str, bytes]) -> Path:
    """The run with an evaluation and a sample."""
    for name, data in evaluated.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(data)
    return run


@pytest.fixture(scope="module")
def evaluated(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    run = shutil.copytree(trained, tmp_path_factory.mktemp("evaluated") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(trained.parent / "cache"))
        assert main(["evaluate", str(run)]) == 0
        assert main(["generate", str(run), "--tokens", "3"]) == 0
    return {name: (run / name).read_bytes() for name in ("evaluation-test.json", "samples/samples.jsonl")}


@pytest.mark.parametrize("name", DAMAGED := cases())
def test_a_damaged_run_folder_is_told_of_and_nothing_whole_in_it_is_lost(
    name: str, used: Path, again: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run, config = used, used.parent / "settings.yaml"
    shutil.copy(run / "config.yaml", config)
    again[again.index("--config") + 1] = str(config)
    DAMAGED[name](run)
    before, whole = contents(run), what_is_whole(run)
    statuses = {}
    for command in (
        ["evaluate", str(run), "--split", "valid"],
        ["generate", str(run), "--tokens", "3"],
    ):
        statuses[command[0]] = said(command, capfd)
        after = contents(run)
        added = {path for path in after if path not in before}
        assert all(path.startswith(("evaluation-valid.json", "samples/")) for path in added)
        assert {path for path in before if after.get(path) != before[path]} <= {"samples/samples.jsonl"}
    before = contents(run)
    statuses["train"] = said(again, capfd)
    if name in WHOLE:
        assert statuses == dict.fromkeys(statuses, 0)
    after = contents(run)
    for path, data in before.items():
        if statuses["train"] == 2 or not path.startswith(TRAINED):
            assert after.get(path) == data or path.startswith(LEFT), path
    found = what_is_whole(run)
    assert {name: found.get(name) for name in whole} == whole


TRAINED = ("config.yaml", "environment.json", "metrics.jsonl", "model/", ".model.", "checkpoints/")
LEFT = (".lock", ".model.", "checkpoints/.step-")  # by writers that were killed


def said(command: list[str], capfd: pytest.CaptureFixture[str]) -> int:
    """The exit status of a command, which must have said in words what was wrong."""
    status = main(command)
    out, err = capfd.readouterr()
    assert status in (0, 1, 2)
    assert "Traceback" not in out + err
    assert "not foreseen" not in err, err
    assert status == 0 or "langevin: " in err, err
    return status


def contents(run: Path) -> dict[str, str]:
    """What is in every file, link and folder."""
    found = {}
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = sha256(path)
    return found


def what_is_whole(run: Path) -> dict[str, Any]:
    """What can be read of a run, which must not become less."""
    found: dict[str, Any] = {}

    def look(name: str, read: Callable[[], Any]) -> None:
        with suppress(UsageError, WorkError, OSError, SafetensorError, IndexError):
            found[name] = read()

    look("settings", lambda: bool(TrainConfig.read(run / "config.yaml")))
    look("model", lambda: load(run).model is not None)
    look("tokenizer", lambda: load(run).tokenizer is not None)
    look("first session", lambda: sessions(run)[0])
    for step in (2, 4, 6):
        place = run / "checkpoints" / f"step-{step}"
        if place.is_dir() and checkpoint.damage(place) is None:
            look(place.name, lambda place=place: len(load_file(place / "weights.safetensors")))
    with warnings.catch_warnings(action="ignore"):
        look("rows", lambda: read_metrics(run / "metrics.jsonl"))
    return found | {f"row {r['step']}": True for r in found.pop("rows", ()) if r["split"] == "valid"}
