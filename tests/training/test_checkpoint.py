"""A checkpoint is exactly what a run needs, or it is refused in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import fingerprint, small

from langevin.errors import WorkError
from langevin.runs import train
from langevin.training import checkpoint, loop


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 4 and 8."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(folder / "cache"))
        train(small(folder, steps=8, ema=0.5), folder / "run", quiet=True)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that may be harmed."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


def go_on(run: Path, finished: Path, steps: int = 8) -> None:
    train(small(finished, steps=steps, ema=0.5), run, resume=True)


def test_copies_and_strays_beside_checkpoints_are_left_alone(tmp_path: Path) -> None:
    """`cp -r step-4 step-4-keep` while a run goes on, and a folder that only looks like a checkpoint."""
    config = small(tmp_path, keep=1)
    folder = tmp_path / "run" / "checkpoints"
    for name in ("step-4-keep", "step-abc", "step-", "step-07", "step-٣"):
        (folder / name).mkdir(parents=True)
    (folder / "step-99").write_text("a file")
    (tmp_path / "run" / "config.yaml").write_text(config.as_yaml())
    train(config, tmp_path / "run", resume=True, quiet=True)
    names = {path.name for path in folder.iterdir()}
    assert {"step-4-keep", "step-abc", "step-", "step-07", "step-٣", "step-99", "step-12"} <= names
    assert checkpoint.newest(folder) == folder / "step-12"
    train(config, tmp_path / "run", resume=True, quiet=True)


def sealed(path: Path) -> None:
    (path / "manifest.json").unlink()
    checkpoint._seal(path)


def rewrite(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the tensors of a file, with a manifest that says nothing of it."""

    def harm(path: Path) -> None:
        tensors = load_file(path / name)
        change(tensors)
        save_file(tensors, path / name)
        sealed(path)

    return harm


def restate(text: str) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        (path / "state.json").write_text(text)
        sealed(path)

    return harm


def remanifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        changed = change(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest if changed is None else changed))

    return harm


def pickled(path: Path) -> None:
    torch.save({"model.norm.weight": torch.ones(16)}, path / "weights.safetensors")
    sealed(path)


MOMENT = "model.norm.weight.exp_avg"
STATE = '{"step": 8, "total": 8, "best_loss": 5.0, "best_step": 8, "bad_steps": 0, "seconds": 1.0'
HARMS = {
    "a list for a manifest": (remanifest(lambda m: [1]), "manifest.json is damaged: it is not a table"),
    "an empty manifest": (remanifest(lambda m: {}), "its manifest does not list its files"),
    "a manifest of nonsense": (lambda p: (p / "manifest.json").write_text("[" * 20000), "nested too deep"),
    "a manifest not in UTF-8": (lambda p: (p / "manifest.json").write_bytes(b"\xff{}"), "not UTF-8"),
    "an entry that says nothing": (
        remanifest(lambda m: {**m, "state.json": 1}),
        "state.json is not a table",
    ),
    "an entry elsewhere": (
        remanifest(lambda m: {**m, "../step-4/odd.json": m["state.json"]}),
        "../step-4/odd.json is missing",
    ),
    "a file that is not there": (
        remanifest(lambda m: {**m, "more.safetensors": m["state.json"]}),
        "more.safetensors is missing",
    ),
    "no optimizer": (
        lambda p: ((p / "optimizer-0.safetensors").unlink(), sealed(p)),
        "optimizer-0.safetensors cannot be read",
    ),
    "an unknown key in the state": (restate(f'{STATE}, "odd": 1}}'), "odd"),
    "a state of version 0.1": (
        restate(f'{STATE}, "bad_in_a_row": 0, "loss_scale": null, "good_steps": 0}}'),
        "bad_in_a_row, good_steps",
    ),
    "a list for a state": (restate("[1]"), "state.json is damaged: it is not a table"),
    "words in the state": (restate(f'{STATE}, "looks": "many", "looked_at": 1}}'), "looks is 'many'"),
    "the state of another step": (
        restate(f'{STATE.replace("8", "4")}, "looks": 10, "looked_at": 1}}'),
        "made at step 4",
    ),
    "weights that would broadcast": (
        rewrite("weights.safetensors", lambda t: t.update({n: torch.ones(1, 1) for n in t})),
        "is ('F32', [1, 1]), not",
    ),
    "a weight that is missing": (
        rewrite("weights.safetensors", lambda t: t.pop("model.embed.weight")),
        "model.embed.weight in weights.safetensors is None",
    ),
    "a weight too many": (
        rewrite("weights.safetensors", lambda t: t.update(odd=torch.ones(1))),
        "odd in weights.safetensors",
    ),
    "weights of another type": (
        rewrite("weights.safetensors", lambda t: t.update({n: x.double() for n, x in t.items()})),
        "F64",
    ),
    "moments of another shape": (
        rewrite("optimizer-0.safetensors", lambda t: t.update({MOMENT: torch.ones(1)})),
        MOMENT,
    ),
    "an average of version 0.1, without the steps in it": (
        rewrite("counters.safetensors", lambda t: t.pop("averaged")),
        "averaged in counters.safetensors is None",
    ),
    "no random numbers": (rewrite("random.safetensors", lambda t: t.pop("cpu-0")), "cpu-0"),
    "a pickle": (pickled, "weights.safetensors cannot be read"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_checkpoint_that_is_not_exactly_right_is_refused_and_the_one_before_it_used(
    harm: str, run: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = HARMS[harm]
    change(run / "checkpoints" / "step-8")
    go_on(run, finished)
    told = capsys.readouterr().err
    assert "refused checkpoint step-8: " in told
    assert said in " ".join(told.split())
    assert "going on from step 4" in told
    assert fingerprint(run, 8) == fingerprint(finished / "run", 8)


def test_where_no_checkpoint_can_be_used_nothing_is_deleted(run: Path, finished: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    for path in (run / "checkpoints").iterdir():
        (path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(WorkError, match=r"refused checkpoint step-8: .* none before it can be used"):
        go_on(run, finished)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-4", "step-8"}
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_file_of_tensors_is_what_safetensors_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "ü": torch.randn(3, 5),
        "half": torch.randn(7, dtype=torch.float16),
        "brain": torch.randn(2, 3, dtype=torch.bfloat16),
        "double": torch.randn((), dtype=torch.float64),
        "bytes": torch.randint(256, (5,), dtype=torch.uint8),
        "none": torch.zeros(0, 4),
        "whole": torch.arange(3),
        "transposed": torch.randn(4, 6).mT,
    }
    checkpoint.write_tensors(tmp_path / "x.safetensors", tensors)
    for name, x in load_file(tmp_path / "x.safetensors").items():
        assert x.dtype == tensors[name].dtype
        assert torch.equal(x, tensors.pop(name))
    assert not tensors


def test_that_a_checkpoint_is_whole_is_only_said_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Trainer, "valid_loss", lambda self: float("nan"))
    with pytest.raises(WorkError, match="validation loss at step 4") as early:
        train(small(tmp_path), tmp_path / "early", quiet=True)
    assert "whole" not in early.value.remedy
    with pytest.raises(WorkError, match="validation loss at step 4") as late:
        train(small(tmp_path, checkpoint_every=2), tmp_path / "late", quiet=True)
    assert "The checkpoint of step 2 is whole." in late.value.remedy


def test_what_an_interrupted_checkpoint_left_is_cleared_away(run: Path, finished: Path) -> None:
    (run / "checkpoints" / ".step-7.writing").mkdir()
    shutil.rmtree(run / "checkpoints" / "step-8")
    go_on(run, finished)
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-4", "step-8"}
