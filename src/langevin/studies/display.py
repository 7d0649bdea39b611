"""What a comparison tells while it goes: a line a running run, one for the whole, and what has ended."""

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from langevin.runs.folder import metrics_row
from langevin.studies.jobs import Job, Outcome


class Display:
    """Progress on stderr, read from the run folders: whoever trains only writes metrics.jsonl."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self.running: dict[str, tuple[Job, TaskID, float]] = {}
        self.left = self.total = self.done_steps = 0
        self.whole: TaskID | None = None

    def say(self, line: str, style: str | None = None) -> None:
        self.console.print(line, style=style, soft_wrap=True, markup=False)

    def phase(self, name: str, jobs: list[Job]) -> None:
        """Begin a part of the comparison."""
        self.total = self.left = len(jobs)
        self.done_steps = 0
        if self.whole is not None:
            self.bars.remove_task(self.whole)
        steps = sum(job.steps for job in jobs)
        self.whole = self.bars.add_task(f"[bold]{name}", total=steps, shown=f"{len(jobs)} to go")
        self.bars.start()

    def began(self, job: Job) -> None:
        task = self.bars.add_task(escape(job.label), total=job.steps, shown="")
        self.running[job.label] = (job, task, time.perf_counter())

    def ended(self, job: Job, outcome: Outcome) -> None:
        _, task, since = self.running.pop(job.label)
        self.bars.remove_task(task)
        self.left -= 1
        self.done_steps += job.steps
        seconds = time.perf_counter() - since
        place = f"{self.total - self.left}/{self.total}"
        if outcome.status == "failed":
            self.say(f"{place}  {job.label}  failed: {outcome.said}", style="red")
            return
        said = f"  {outcome.said}" if outcome.said else ""
        self.say(f"{place}  {job.label}{said}  ({seconds:.1f} s)")

    def tick(self) -> None:
        if self.bars.disable or self.whole is None:
            return
        steps = self.done_steps
        for job, task, _ in self.running.values():
            row = last_row(job.output.with_name("metrics.jsonl"))
            steps += int(row.get("step", 0))
            shown = f"loss {row['loss']:.3f}" if isinstance(row.get("loss"), float) else ""
            self.bars.update(task, completed=row.get("step", 0), shown=shown)
        self.bars.update(self.whole, completed=steps, shown=f"{self.left} to go")

    def stop(self) -> None:
        self.bars.stop()


def last_row(path: Path) -> dict[str, Any]:
    """The last whole line of a metrics file; {} where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2048))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        row = metrics_row(line)
        if row is not None:
            return row
    return {}
