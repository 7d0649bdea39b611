"""Run folders: how one is made, what it holds, and how to read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from langevin.runs.load import Run, load

if TYPE_CHECKING:
    from langevin.settings import TrainConfig

__all__ = ["Run", "load", "train"]


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
