"""What is done for one run of a comparison, wherever it is done: train, measure, write done.json.

Everything here can be killed at any moment and called again: training goes on from its last checkpoint, the
rest is done anew, and `done.json` is written last and in one move. A run that has it is not touched again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from langevin.errors import one_line
from langevin.runs.files import read_json, write_json
from langevin.settings import TrainConfig
from langevin.studies.measuring import SHARED, best_of, measured, measured_at, was_shared

ALONE = "alone.json"  # of an arm: what it costs to train with the device to itself
DECODING = "decoding.json"  # of a comparison: what a token costs each arm


@dataclass(frozen=True)
class Job:
    """One run to be made: a run of the comparison, a trial of a learning rate, or more about a finished
    run: with `at_loss`, its measurement at a validation loss that it had on its way; with `timing`, what
    one like it costs with the device to itself; with `decoding`, what a token costs those runs in turns."""

    label: str
    folder: Path
    config: TrainConfig
    test_tokens: int
    threads: int
    trial: bool = False
    at_loss: float | None = None
    timing: bool = False
    decoding: tuple[Path, ...] = ()  # a run of every arm
    shared: bool = False  # with other runs on its GPU

    @property
    def alone(self) -> bool:
        """Whether it wants the device to itself."""
        return self.timing or bool(self.decoding)

    @property
    def later(self) -> bool:
        """Whether it is about a run that is finished."""
        return self.alone or self.at_loss is not None

    @property
    def record(self) -> Path:
        """The file that says the job is done."""
        if self.decoding:
            return self.folder.parent.parent / DECODING
        if self.timing:
            return self.folder.parent / ALONE
        return self.folder / ("done.json" if self.at_loss is None else "matched.json")

    @property
    def total_steps(self) -> int:
        a_step = self.config.batch * self.config.context
        return self.config.steps or -(-(self.config.tokens or a_step) // a_step)


@dataclass(frozen=True)
class Outcome:
    status: Literal["done", "failed", "stopped"]
    valid_loss: float | None = None
    error: str | None = None


def work(job: Job) -> Outcome:
    """Make one run, or go on with it; what happened. `tidied` is for afterwards."""
    import torch

    if finished(job):
        return Outcome("done")
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        if not job.later:
            return _made(job)
        write_json(job.record, _more(job))
        return Outcome("done")
    except Exception as error:  # whatever it is, it is this run's own affair
        return fail(job, one_line(error))
    finally:
        torch.set_num_threads(threads)


def tidied(job: Job) -> None:
    """Leave the GPU to the next run of this process: no memory kept, no compiled models counted towards a
    limit; a compiled loss serves the next run too."""
    import torch

    if torch.cuda.is_initialized() and job.config.compile == "on":
        torch.compiler.reset()
    forget()


def forget() -> None:
    """Give back the memory of a GPU that nobody holds any more: trainers and their graphs are cycles."""
    import gc

    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _made(job: Job) -> Outcome:
    from langevin.environment import pick_device
    from langevin.evaluation import cost
    from langevin.training.start import prepared

    (job.folder / "failed.json").unlink(missing_ok=True)
    peak = cost.PeakMemory(pick_device(job.config.device))
    trainer, progress = prepared(job.config, job.folder, resume=True, quiet=True)
    if job.shared:
        (job.folder / SHARED).touch()
    begun_at = trainer.state.step
    trainer.run(progress)
    stopped = trainer.stopped_by is not None
    used = peak() if trainer.state.step > begun_at else None
    del trainer, progress  # measuring may need their memory
    forget()
    return Outcome("stopped") if stopped else conclude(job, used)


def conclude(job: Job, peak_memory: int | None) -> Outcome:
    """What follows the training of a run: measure it, and write that it is done."""
    from langevin.environment import pick_device
    from langevin.runs import load

    run = load(job.folder)
    record: dict[str, Any] = {"seed": job.config.seed, "best": best_of(run)}
    if not job.trial:
        record |= measured(run, pick_device(job.config.device), job.test_tokens)
        if peak_memory is not None and not was_shared(job.folder):
            record["cost"]["peak_memory_bytes"] = peak_memory
    write_json(job.folder / "done.json", record)
    return Outcome("done", record["best"]["valid_loss"])


def _more(job: Job) -> dict[str, Any]:
    """What is wanted about finished runs."""
    from langevin.bench.training import alone
    from langevin.environment import pick_device
    from langevin.evaluation.cost import decode_ms_in_turns
    from langevin.runs import load
    from langevin.tasks import TASKS

    device = pick_device(job.config.device)
    if job.decoding:
        models = {folder.parent.name: load(folder).model.to(device) for folder in job.decoding}
        return decode_ms_in_turns(models, job.config.context)
    if job.at_loss is not None:
        values = measured_at(load(job.folder), job.at_loss, device, job.test_tokens)
        return {"loss": job.at_loss, "values": values}
    return alone(job.config, TASKS.parse(job.config.task).prepare(job.config), device)


def finished(job: Job) -> bool:
    """Whether the record of the job is there; at a matched loss, of that very loss; of decoding, with all
    arms."""
    record = recorded(job.record)
    if record is None:
        return False
    if job.decoding:
        return record.keys() == {folder.parent.name for folder in job.decoding}
    return job.at_loss is None or record.get("loss") == job.at_loss


def fail(job: Job, error: str) -> Outcome:
    """Write down that a run failed, in one line; what is more about a finished one is only missing then."""
    if job.later:
        return Outcome("failed", error=error)
    job.folder.mkdir(parents=True, exist_ok=True)
    write_json(job.folder / "failed.json", {"seed": job.config.seed, "error": error})
    return Outcome("failed", error=error)


def recorded(path: Path, shape: Any = dict) -> Any:
    """What a record holds, of a shape as in `files.misfit`; None where there is none."""
    return read_json(path, shape, "Delete it, and start again.", optional=True)
