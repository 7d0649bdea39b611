"""Checkpoints that are whole or not there.

A checkpoint is a folder `step-N`: tensors in safetensors files (never a pickle), `state.json`, and last of
all `manifest.json` with the size and hash of every file. It is written beside its place, flushed to the
disk and renamed, so an interruption at any moment leaves the checkpoints before it untouched. Tensors are
gathered, written and read one at a time. Only folders with exactly such a name are ever read or deleted.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from langevin.errors import UsageError, WorkError
from langevin.runs.files import changed, read_json, remove, sha256, write_folder
from langevin.training.parallel import World, fill, whole

Held = Mapping[str, Mapping[str, Tensor]]  # tensors by the file they are in and their name there

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass
class State:
    """What a run remembers besides tensors."""

    step: int = 0
    total: int = 0
    best_loss: float = math.inf
    best_step: int | None = None
    bad_steps: int = 0  # skipped in all
    seconds: float = 0.0  # with evaluations, over all sessions
    looks: int = 0  # evaluations in the run, where eval_every does not say
    looked_at: int = 0  # validation batches in each


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, each once, and the buffers that are saved with them."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: x for name, x in model.state_dict().items() if name not in parameters}
    return {**dict(model.named_parameters()), **buffers}


def save(folder: Path, state: State, tensors: Held, world: World) -> Path:
    """Write `folder/step-N`; a full disk keeps what was there. Of several processes the first writes, and
    all must ask, as they hold the tensors together."""
    streams = enumerate(world.every(random_state()))
    random = {f"{name}-{rank}": x for rank, held in streams for name, x in held.items()}
    target, files = folder / f"step-{state.step}", {**tensors, "random": random}

    def fill(place: Path) -> None:
        for name, some in files.items():
            write_tensors(place / f"{name}.safetensors", some)
        (place / "state.json").write_text(json.dumps(asdict(state)))
        _seal(place)

    if world.first:
        write_folder(target, fill)
    else:
        for some in files.values():
            write_tensors(None, some)
    return target


def write_tensors(path: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file, one tensor gathered and written at a time; None takes part in the gathering.

    The format: eight bytes with the length of a JSON header, the header, the tensors one after the other.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        x, begin = tensors[name], end
        end += x.numel() * x.element_size()
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") if path is not None else nullcontext() as file:
        if file is not None:
            file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            x = whole(tensors[name].detach())
            if file is not None:
                file.write(x.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def load(path: Path, tensors: Held, rank: int = 0) -> State:
    """Put a checkpoint back into its tensors and the random streams; its state.

    A process that was not there when it was written goes on with random numbers of its own.
    """
    read(path, tensors)
    streams = load_file(path / "random.safetensors")
    own = {name.removesuffix(f"-{rank}"): x for name, x in streams.items() if name.endswith(f"-{rank}")}
    if own:
        set_random_state(own)
    return State(**json.loads((path / "state.json").read_text()))


def read(path: Path, tensors: Held) -> None:
    """Put what a checkpoint holds into its tensors, which must be exactly such."""
    problem = misfit(path, tensors)
    if problem is not None:
        raise WorkError(f"refused checkpoint {path.name}: {problem}")
    for file, some in tensors.items():
        with safe_open(path / f"{file}.safetensors", "pt") as stored:
            for name, x in some.items():
                fill(x, stored.get_slice(name))


def newest(folder: Path, tensors: Held | None = None, refused: list[str] | None = None) -> Path | None:
    """The last whole checkpoint, of such tensors where they are given; None where there is no checkpoint.

    What is wrong with those that are refused is added to `refused`; where all are, that is an error: to
    start anew would delete them.
    """
    refused = [] if refused is None else refused
    for path in reversed(found(folder)):
        problem = damage(path) or (None if tensors is None else misfit(path, tensors))
        if problem is None:
            return path
        refused.append(f"{path.name}: {problem}")
    if refused:
        raise WorkError(
            f"refused checkpoint {refused[0]}, and none before it can be used",
            f"Train anew into another --out, or delete {folder} to start this run from its beginning.",
        )
    return None


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder by their steps, whole or not; copies under other names are not."""
    every = [path for path in folder.glob("step-*") if re.fullmatch("step-(0|[1-9][0-9]*)", path.name)]
    return sorted((path for path in every if path.is_dir()), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def remedy(run: Path, advice: str) -> str:
    """What to do about a run that failed; where it has a checkpoint, that is told."""
    last = found(run / "checkpoints")[-1:]
    return f"{advice} The checkpoint of step {step_of(last[0])} is whole." if last else advice


def damage(path: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    try:
        manifest = read_json(path / "manifest.json", {str: {"size": int, "sha256": str}})
    except UsageError as error:
        return error.cause
    if not {"weights.safetensors", "state.json"} <= manifest.keys():
        return "its manifest does not list its files"
    for name, expected in manifest.items():
        problem = changed(path / Path(name).name, expected["size"], expected["sha256"])
        if problem is not None:
            return f"{name} {problem}"
    return None


def misfit(path: Path, tensors: Held) -> str | None:
    """Where a checkpoint is not one of exactly such tensors, or None."""
    try:
        state = read_json(path / "state.json", {str: (float, type(None))})
    except UsageError as error:
        return error.cause
    odd = sorted({f.name for f in fields(State)} ^ state.keys())
    if odd:
        return f"state.json has or lacks {', '.join(odd)}, unlike this version's"
    if state["step"] != step_of(path):
        return f"it was made at step {state['step']}"
    for file, some in {**tensors, "random": {"cpu-0": torch.get_rng_state()}}.items():
        wanted = {name: (DTYPES[x.dtype], list(x.shape)) for name, x in some.items()}
        try:
            with safe_open(path / f"{file}.safetensors", "pt") as stored:
                slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118  (no dict)
                there = {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
        except (OSError, SafetensorError) as error:
            return f"{file}.safetensors cannot be read: {error}"
        for name in wanted if file == "random" else sorted(wanted.keys() | there.keys()):
            if there.get(name) != wanted.get(name):
                return f"{name} in {file}.safetensors is {there.get(name)}, not {wanted.get(name)}"
    return None


def prune(folder: Path, keep: int, best: int | None, step: int) -> None:
    """Delete all but the newest `keep` checkpoints up to a step, and the best; what lies beyond that step
    was refused when the run went on, and goes too."""
    here = found(folder)
    kept = [path for path in here if step_of(path) <= step][-keep:]
    for path in here:
        if path not in kept and path.name != f"step-{best}":
            shutil.rmtree(path)
    for path in folder.glob(".step-*"):  # what was interrupted
        remove(path)


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
    """Write the manifest, of what is there."""
    manifest = {p.name: {"size": p.stat().st_size, "sha256": sha256(p)} for p in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
