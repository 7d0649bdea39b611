"""What a run tells while it goes: metrics.jsonl always, a progress line on a terminal."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from langevin.environment import without_bars
from langevin.models.cost import peak_flops
from langevin.runs.files import append_json, write_folder, write_text
from langevin.runs.folder import Lock, read_metrics
from langevin.training.checkpoint import State, weights, write_tensors

if TYPE_CHECKING:
    from langevin.training.loop import Trainer
    from langevin.training.track import Tracker

LOG_SECONDS = 1.0


class Progress:
    """Writes metrics and shows them; losses are fetched from the device about once a second."""

    def __init__(
        self,
        folder: Path,
        quiet: bool = False,
        *,
        writes: bool = True,
        trackers: Sequence[Tracker] = (),
        lock: Lock | None = None,
    ) -> None:
        self.writes, self.trackers, self.lock = writes, trackers, lock  # of several processes, one writes
        self.file = folder / "metrics.jsonl"
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[valid]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet or not writes,
        )
        self.logged_at = 0.0
        self.logged_step = 0
        self.tokenizer: dict[Path, bytes] = {}

    def start(self, state: State, trainer: Trainer) -> None:
        self.task = self.bar.add_task(
            "training", total=state.total, completed=state.step, loss="", valid="", speed=""
        )
        self.bar.start()
        self.logged_at, self.logged_step = time.perf_counter(), state.step
        self.flops = trainer.objective.flops(trainer.model, trainer.config.context)
        counted = trainer.on_gpu and trainer.task.unit == "tokens"
        self.peak = peak_flops(torch.cuda.get_device_name(trainer.device)) if counted else None

    def step(self, state: State, trainer: Trainer, ended: bool = False) -> None:
        """Log the steps since the last row where that is due, and where a run ended."""
        steps = state.step - self.logged_step
        if not (steps > 0 if ended else self._due(state, trainer)):
            return
        loss = trainer.mean_loss()
        trainer.read_counters()
        now = time.perf_counter()
        rate = steps * trainer.a_step / max(1e-9, now - self.logged_at)
        row: dict[str, Any] = {
            "step": state.step,
            "tokens": state.step * trainer.a_step,
            "split": "train",
            "loss": loss,
            "gradient_norm": trainer.update.mean_norm(),
            "lr": float(trainer.update.optimizers[0].param_groups[0]["lr"]),
            "tokens_per_second": rate,
            "seconds": state.seconds,
        }
        speed = f"{rate:,.0f} {trainer.task.unit}/s"
        if state.bad_steps:
            row["skipped_steps"] = state.bad_steps
        if self.peak is not None:
            row["utilisation"] = rate * self.flops / self.peak / trainer.world.size
            speed += f"  {row['utilisation']:.0%} of peak"
        if trainer.on_gpu:
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(trainer.device)
            speed += f"  {row['peak_memory_bytes'] / 2**30:.1f} GiB"
        self.write(row)
        self.logged_at, self.logged_step = now, state.step
        lost = f"loss {loss:.3f}"
        self.bar.update(self.task, completed=state.step, total=state.total, loss=lost, speed=speed)

    def _due(self, state: State, trainer: Trainer) -> bool:
        """About once a second, and at the end; several processes agree on it every few steps."""
        if state.step >= state.total:
            return True
        late = time.perf_counter() - self.logged_at >= LOG_SECONDS
        if trainer.world.size == 1:
            return late
        return state.step % 8 == 0 and bool(trainer.world.agree(late))

    def evaluated(self, state: State, trainer: Trainer, loss: float) -> None:
        self.bar.update(self.task, valid=f"valid {loss:.3f}")
        tokens, best = state.step * trainer.a_step, state.best_step == state.step
        row = {"step": state.step, "tokens": tokens, "split": "valid", "loss": loss}
        self.write({**row, "seconds": state.seconds, "best": best})

    def keep(self, trainer: Trainer, target: Path) -> None:
        """Write the model as it is and its tokenizer, in the place of what was there, in one move."""
        model, spread = trainer.model, trainer.world.size > 1 and trainer.config.parallel == "fsdp"

        def fill(folder: Path) -> None:
            if spread:
                model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
                model.config.save_pretrained(folder)
                if model.can_generate():
                    model.generation_config.save_pretrained(folder)
                write_tensors(folder / "model.safetensors", weights(model))
            else:
                model.save_pretrained(folder)
            self._put_tokenizer(trainer, folder)

        if self.writes:
            with without_bars():
                write_folder(target, fill)
        elif spread:
            write_tensors(None, weights(model))

    def _put_tokenizer(self, trainer: Trainer, folder: Path) -> None:
        """Its files as they were written the first time: to make them takes longer than a model's."""
        if trainer.data.tokenizer is None:
            return
        if not self.tokenizer:
            with tempfile.TemporaryDirectory() as place:
                trainer.data.tokenizer.save_pretrained(place)
                files = [path for path in Path(place).rglob("*") if path.is_file()]
                self.tokenizer = {path.relative_to(place): path.read_bytes() for path in files}
        for name, content in self.tokenizer.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def stop(self) -> None:
        self.bar.stop()
        for tracker in self.trackers:
            tracker.close()
        if self.lock is not None:
            self.lock.release()

    def write(self, row: dict[str, Any]) -> None:
        if not self.writes:
            return
        for tracker in self.trackers:
            tracker.write(row)
        append_json(self.file, row)


def cut_metrics(path: Path, step: int) -> None:
    """Forget what was logged after a checkpoint that a run goes on from; at its start, everything."""
    rows = [row for row in read_metrics(path) if row["step"] <= step and step]
    if rows or path.exists():
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
