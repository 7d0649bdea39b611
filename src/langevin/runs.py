"""Run folders: what a run leaves behind, and how to read it.

config.yaml  metrics.jsonl  environment.json  model/  checkpoints/step-N/  samples/  figures/
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from langevin.errors import UsageError
from langevin.training.config import TrainConfig


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


def load(path: str | os.PathLike[str]) -> Run:
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


def environment(device: str, data: dict[str, Any]) -> dict[str, Any]:
    """What a run depends on besides its config."""
    import torch
    import transformers

    from langevin import __version__

    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {
        "langevin": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(),
        "device": name,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "data": data,
    }


def _commit() -> str | None:
    """The commit of the source tree langevin runs from, if it is one."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None if done.returncode == 0 else None
