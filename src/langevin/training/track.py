"""Metrics to TensorBoard and Weights & Biases, beside metrics.jsonl (extra `track`).

A tracker gets the same rows that go into metrics.jsonl. Numbers are named `split/name` and stand at the
row's step; what is no number stays in the file.
"""

import secrets
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from langevin.errors import UsageError, unknown


class TensorBoard:
    """Event files in `tensorboard/` of the run folder: `tensorboard --logdir runs`.

    A run that goes on from a checkpoint takes back what an earlier process wrote after that step.
    """

    def __init__(self, folder: Path, config: dict[str, Any], step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        self.writer = make(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
        if not step:
            text = "\n".join(f"    {name}: {value}" for name, value in config.items())
            self.writer.add_text("settings", text, 0)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in _numbers(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases, named and identified by the run folder, so that a resumed run goes on.

    Project, entity and mode come from wandb's own environment variables (`WANDB_MODE=offline`). The step is
    a value like any other there: wandb's own counter cannot go back to a checkpoint.
    """

    def __init__(self, folder: Path, config: dict[str, Any], step: int = 0) -> None:
        wandb: Any = import_module("wandb")
        file = folder / "wandb-id.txt"
        if not step or not file.exists():
            file.write_text(secrets.token_hex(4))
        options = {"dir": str(folder), "name": folder.name, "id": file.read_text(), "config": config}
        # Runs of a comparison that take turns are in one process.
        self.run: Any = wandb.init(**options, resume="allow", reinit="create_new")
        self.run.define_metric("*", step_metric="step")

    def write(self, row: dict[str, Any]) -> None:
        self.run.log({**_numbers(row), "step": row["step"]})

    def close(self) -> None:
        self.run.finish()


Tracker = TensorBoard | WandB
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


def chosen(names: str | None) -> list[type[Tracker]]:
    """The trackers of `--track`; raises for unknown ones and those whose package is not here."""
    wanted = [name.strip() for name in names.split(",")] if names else []
    for name in wanted:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        if (sys.modules[name] if name in sys.modules else find_spec(name)) is None:
            raise UsageError(
                f"tracking needs the package {name}, which is not here", "pip install 'langevin[track]'"
            )
    return [TRACKERS[name] for name in dict.fromkeys(wanted)]


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """What a row measured, as `split/name`."""
    split = row.get("split", "run")
    return {
        f"{split}/{name}": float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
