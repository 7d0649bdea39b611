"""Run folders: how one is made, what it holds, and how to read it.

config.yaml  metrics.jsonl  environment.json  model/  checkpoints/step-N/  samples/  figures/
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from langevin.errors import UsageError
from langevin.settings import TrainConfig


@dataclass(frozen=True)
class Run:
    """A finished or interrupted run."""

    path: Path
    config: TrainConfig

    @cached_property
    def model(self) -> Any:
        """The best model by validation loss, as a transformers model in evaluation mode."""
        from langevin.models.convert import from_pretrained

        return from_pretrained(self.path / "model").eval()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        from langevin.models import backbone  # noqa: F401  (makes our own models known to transformers)

        return AutoTokenizer.from_pretrained(self.path / "model", local_files_only=True)

    @cached_property
    def objective(self) -> Any:
        from langevin.objectives import OBJECTIVES

        return OBJECTIVES.parse(self.config.objective)

    @cached_property
    def task(self) -> Any:
        from langevin.tasks import TASKS

        return TASKS.parse(self.config.task)

    def keep_sample(self, text: dict[str, Any]) -> None:
        (self.path / "samples").mkdir(exist_ok=True)
        with open(self.path / "samples" / "samples.jsonl", "a") as file:
            file.write(json.dumps(text, ensure_ascii=False) + "\n")

    @cached_property
    def environment(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "environment.json").read_text()))

    def metrics(self, split: str | None = None) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, of one split or all; a torn last line is left out."""
        rows = []
        for line in (self.path / "metrics.jsonl").read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return [row for row in rows if split in (None, row["split"])]


def train(
    config: TrainConfig, out: Path | None = None, *, resume: bool = False, quiet: bool = False
) -> tuple[Run, int | None]:
    """Train into a run folder; the run, and the signal that stopped it early (None: it is finished)."""
    from langevin.environment import pick_device
    from langevin.training.parallel import joined
    from langevin.training.start import prepared

    def trained() -> tuple[Run, int | None]:  # with it go the trainer and what it holds of the group
        trainer, progress = prepared(config, out, resume=resume, quiet=quiet, world=world, device=device)
        trainer.run(progress)
        return Run(trainer.folder, trainer.config), trainer.stopped_by

    with joined(pick_device(config.device)) as (world, device):
        return trained()


def load(path: str | os.PathLike[str], checkpoint: str = "best", data: str | None = None) -> Run:
    """Open a run folder."""
    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        raise UsageError(f"{folder} is not a run folder", "Give a folder made by langevin train.")
    if not (folder / "model" / "config.json").is_file():
        raise UsageError(
            f"{folder} holds no model yet", "Let it train until its first evaluation (--resume auto)."
        )
    return Run(folder, TrainConfig.read(folder / "config.yaml"))


def quiet_transformers() -> None:
    """No progress bars of loading between our lines."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
