"""What a run tells while it goes: metrics.jsonl always, a progress line on a terminal."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from langevin.training.checkpoint import replace_folder

if TYPE_CHECKING:
    from langevin.training.loop import State, Trainer

LOG_SECONDS = 1.0


class Progress:
    """Writes metrics and shows them; losses are fetched from the device about once a second."""

    def __init__(self, folder: Path, quiet: bool = False) -> None:
        self.file = folder / "metrics.jsonl"
        self.model_folder = folder / "model"
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self.logged_at = 0.0
        self.logged_step = 0
        self.valid = float("nan")

    def start(self, state: State, trainer: Trainer) -> None:
        self.task = self.bar.add_task("training", total=state.total, completed=state.step, shown="")
        self.bar.start()
        self.logged_at, self.logged_step = time.perf_counter(), state.step

    def step(self, state: State, trainer: Trainer) -> None:
        now = time.perf_counter()
        if now - self.logged_at < LOG_SECONDS and state.step < state.total:
            return
        loss = float(torch.stack(state.losses).mean())
        a_step = trainer.config.batch * trainer.config.context
        rate = (state.step - self.logged_step) * a_step / max(1e-9, now - self.logged_at)
        row: dict[str, Any] = {
            "step": state.step,
            "tokens": state.step * a_step,
            "split": "train",
            "loss": loss,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "tokens_per_second": rate,
            "seconds": state.seconds,
        }
        if state.bad_steps:
            row["skipped_steps"] = state.bad_steps
        if trainer.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        self.write(row)
        state.losses.clear()
        self.logged_at, self.logged_step = now, state.step
        shown = f"loss {loss:.3f}  valid {self.valid:.3f}  {rate:,.0f} tokens/s"
        self.bar.update(self.task, completed=state.step, shown=shown)

    def evaluated(self, state: State, loss: float) -> None:
        self.valid = loss
        row = {"step": state.step, "split": "valid", "loss": loss, "seconds": state.seconds}
        self.write({**row, "best": state.best_step == state.step})

    def best(self, trainer: Trainer) -> None:
        """Keep the best model where `langevin.load` looks for it; replaced in one move."""

        def fill(folder: Path) -> None:
            trainer.model.save_pretrained(folder)
            trainer.corpus.tokenizer.save_pretrained(folder)

        replace_folder(self.model_folder, fill)

    def stop(self) -> None:
        self.bar.stop()

    def write(self, row: dict[str, Any]) -> None:
        with open(self.file, "a") as file:
            file.write(json.dumps(row) + "\n")


def cut_metrics(path: Path, step: int) -> None:
    """Forget what was logged after a checkpoint that a run goes on from."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    temporary = path.with_suffix(".writing")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
