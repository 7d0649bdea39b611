"""Checkpoints that are whole or not there.

A checkpoint is a folder `step-N`: tensors in safetensors files (never a pickle), `state.json`, and last of
all `manifest.json` with the size and hash of every file. It is written beside its place, flushed to the
disk and renamed, so an interruption at any moment leaves the checkpoints before it untouched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from langevin.errors import WorkError
from langevin.training.parallel import World, like, whole


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    state: dict[str, Any],
    average: dict[str, Tensor] | None = None,
    *,
    world: World | None = None,
) -> Path:
    """Write `folder/step-N`; a full disk keeps what was there. Of several processes the first writes, and
    all must ask, as they hold the tensors together."""
    world = world or World()
    target = folder / f"step-{step}"
    temporary = folder / f".step-{step}.writing"
    files = {"weights": _own(dict(model.named_parameters()))}
    streams = enumerate(world.every(random_state()))
    files["random"] = {f"{name}-{rank}": x for rank, held in streams for name, x in held.items()}
    for i, optimizer in enumerate(optimizers):
        files[f"optimizer-{i}"], state[f"optimizer-{i}"] = _flattened(optimizer)
    if average is not None:
        files["average"] = _own(average)
    if not world.first:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name, tensors in files.items():
            save_file(tensors, temporary / f"{name}.safetensors")
        (temporary / "state.json").write_text(json.dumps({**state, "step": step}))
        _seal(temporary)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise WorkError(
            f"the checkpoint of step {step} could not be written: {error}",
            "Free some space and go on with --resume auto: the checkpoint before it is whole.",
        ) from error
    return target


def load(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], rank: int = 0
) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """Put a checkpoint back into model, optimisers and the random streams; its state and average.

    A process that was not there when it was written goes on with random numbers of its own.
    """
    state = json.loads((path / "state.json").read_text())
    weights = load_file(path / "weights.safetensors")
    own = dict(model.named_parameters())
    if weights.keys() != own.keys():
        odd = sorted(weights.keys() ^ own.keys())[0]
        raise WorkError(f"{path} holds another model: {odd} is on one side only")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(like(weights[name], p))
    for i, optimizer in enumerate(optimizers):
        tensors = load_file(path / f"optimizer-{i}.safetensors")
        _restore(optimizer, tensors, state.pop(f"optimizer-{i}"))
    random = load_file(path / "random.safetensors")
    held = {name.removesuffix(f"-{rank}"): x for name, x in random.items() if name.endswith(f"-{rank}")}
    if held:
        set_random_state(held)
    averaged = path / "average.safetensors"
    return state, load_file(averaged) if averaged.exists() else None


def newest(folder: Path, refused: list[str] | None = None) -> Path | None:
    """The last whole checkpoint; the names of damaged ones are added to `refused`."""
    found = sorted(folder.glob("step-*"), key=_step_of, reverse=True)
    for path in found:
        problem = damage(path)
        if problem is None:
            return path
        if refused is not None:
            refused.append(f"{path.name}: {problem}")
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError):
        return "it has no manifest"
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["size"]:
            return f"{name} has {file.stat().st_size} bytes, not {expected['size']}"
        if _hash(file) != expected["sha256"]:
            return f"{name} was changed"
    return None


def prune(folder: Path, keep: int, best: int | None, step: int) -> None:
    """Delete all but the newest `keep` checkpoints up to a step, and the best; what lies beyond that step
    was refused when the run went on, and goes too."""
    found = sorted(folder.glob("step-*"), key=_step_of)
    for path in found:
        if _step_of(path) > step:
            shutil.rmtree(path)
    for path in [path for path in found if _step_of(path) <= step][:-keep]:
        if path.name != f"step-{best}":
            shutil.rmtree(path)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2])


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder anew and put it in the place of the old one."""
    fresh, old = target.with_name(f".{target.name}.writing"), target.with_name(f".{target.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fill(fresh)
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(fresh, target)
    shutil.rmtree(old, ignore_errors=True)


def _own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(x.detach()).contiguous().cpu() for name, x in tensors.items()}


def _flattened(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = whole(value.detach()).contiguous().cpu()
            else:
                numbers[f"{index}.{key}"] = value
    return tensors, numbers


def _restore(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **numbers}.items():
        index, _, key = name.partition(".")
        p = parameters[int(index)]
        if isinstance(value, Tensor) and value.shape == p.shape:
            value = like(value, p)
        state.setdefault(int(index), {})[key] = value
    complete = optimizer.state_dict()
    complete["state"] = state
    optimizer.load_state_dict(complete)


def random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _seal(folder: Path) -> None:
    """Hash every file, flush them to the disk, and write the manifest last."""
    manifest = {p.name: {"size": p.stat().st_size, "sha256": _hash(p)} for p in sorted(folder.iterdir())}
    for p in folder.iterdir():
        _flush(p)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    _flush(folder / "manifest.json")
    _flush(folder)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
