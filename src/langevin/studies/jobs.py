"""Jobs and who does them: processes here, this process, or a Ray cluster.

A job is a function, its arguments and its output file, which is written whole when it is done. A job that
is killed is called again and goes on; one whose output is there is not touched again. A worker that dies
takes with it the job it was at, and is replaced; workers end with the process that started them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from langevin.errors import UsageError, WorkError, one_line
from langevin.runs.files import write_json

TICK = 0.5  # seconds between looks at the running jobs
PATIENCE = 60  # seconds for a worker to write its checkpoint when asked to stop
EVALUATED = "evaluated"  # where training keeps the model of every evaluation, if asked to
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Stopped(Exception):
    """A job was asked to stop, and has saved what it had."""


@dataclass(frozen=True)
class Job:
    label: str
    work: Callable[..., dict[str, Any]]  # of a module, so that it can be sent
    arguments: dict[str, Any]
    output: Path
    steps: int = 1  # which it counts in the metrics.jsonl beside its output
    alone: bool = False  # on the machine
    like: str = ""  # jobs that share compiled code, and are best done by one process

    @property
    def done(self) -> bool:
        return self.output.exists()

    @property
    def failure(self) -> Path:
        """Where it stands why the job failed."""
        return self.output.with_name(f"{self.output.stem}-failed.json")


@dataclass(frozen=True)
class Outcome:
    status: Literal["done", "failed", "stopped"]
    said: str = ""


Began = Callable[[Job], None]
Ended = Callable[[Job, Outcome], None]
Tick = Callable[[], None]


class Crew(Protocol):
    def run(self, jobs: list[Job], began: Began, ended: Ended, tick: Tick) -> None:
        """Do all jobs; KeyboardInterrupt leaves every one that runs at a checkpoint."""


def execute(job: Job) -> Outcome:
    """Do a job, or go on with it; what happened. A failure is this job's own affair."""
    if job.done:
        return Outcome("done")
    try:
        job.failure.unlink(missing_ok=True)
        record = job.work(**job.arguments)
        write_json(job.output, record)
        for served in (EVALUATED, "checkpoints"):  # to make the record, which is there now
            shutil.rmtree(job.output.with_name(served), ignore_errors=True)
    except Stopped:
        return Outcome("stopped")
    except Exception as error:
        return failed(job, one_line(error), traceback.format_exc().splitlines())
    finally:
        forget()
    return Outcome("done", str(record.get("said", "")))


def failed(job: Job, why: str, trace: list[str] | None = None) -> Outcome:
    with suppress(OSError, WorkError):  # a full disk is told, too
        job.failure.parent.mkdir(parents=True, exist_ok=True)
        write_json(job.failure, {"error": why} | ({"traceback": trace} if trace else {}))
    return Outcome("failed", why)


def forget() -> None:
    """Give back the memory of a GPU that nobody holds any more: trainers and their graphs are cycles."""
    import gc

    import torch

    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a broken GPU; what came of the job is worth more
            gc.collect()
            torch.cuda.empty_cache()


def crew(
    workers: int, threads: int, device: str, on: Literal["local", "ray"]
) -> AbstractContextManager[Crew]:
    """Whoever does the jobs; no workers: this process."""
    if on == "ray":
        return Cluster(threads, device != "cpu")
    return Workers(workers, threads) if workers else nullcontext(Here())


class Here:
    """This process, one job after another."""

    def run(self, jobs: list[Job], began: Began, ended: Ended, tick: Tick) -> None:
        for job in jobs:
            began(job)
            outcome = execute(job)
            if outcome.status == "stopped":
                raise KeyboardInterrupt
            ended(job, outcome)
            tick()


@dataclass
class _Worker:
    process: BaseProcess
    line: Connection
    job: Job | None = None
    done: set[str] = field(default_factory=set)  # kinds of jobs


class Workers:
    """Processes that do one job after another: torch is imported once in each."""

    def __init__(self, count: int, threads: int) -> None:
        self.count, self.threads = count, threads
        self.crew: list[_Worker] = []
        self.context = multiprocessing.get_context("spawn")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in self.crew:
            worker.line.close()  # an idle worker ends by that
        for worker in self.crew:
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
        self.crew.clear()

    def run(self, jobs: list[Job], began: Began, ended: Ended, tick: Tick) -> None:
        waiting = deque(jobs)
        try:
            while waiting or any(worker.job for worker in self.crew):
                self._give_out(waiting, began)
                self._listen(ended)
                tick()
        except BaseException:
            self._stop()
            raise

    def _give_out(self, waiting: deque[Job], began: Began) -> None:
        while waiting:
            busy = [worker.job for worker in self.crew if worker.job is not None]
            if len(busy) >= (1 if any(job.alone for job in (waiting[0], *busy)) else self.count):
                return
            worker = next((w for w in self.crew if w.job is None), None) or self._start()
            job = self._next(worker, waiting)
            try:
                worker.line.send(job)
            except OSError:  # it died while it had nothing to do
                self.crew.remove(worker)
                continue
            waiting.remove(job)
            worker.job = job
            worker.done.add(job.like)
            began(job)

    def _next(self, worker: _Worker, waiting: deque[Job]) -> Job:
        """The first that is like what the worker did, or like nothing that another did, or the first."""
        others = {kind for other in self.crew if other is not worker for kind in other.done}
        known = (job for job in waiting if job.like in worker.done)
        fresh = (job for job in waiting if job.like not in others)
        return next(known, None) or next(fresh, None) or waiting[0]

    def _listen(self, ended: Ended) -> None:
        busy = {worker.line: worker for worker in self.crew if worker.job is not None}
        for line in wait(list(busy), TICK):
            worker = busy[line]  # type: ignore[index]
            job, worker.job = worker.job, None
            assert job is not None
            try:
                outcome = worker.line.recv()
            except (EOFError, OSError):
                worker.process.join()
                self.crew.remove(worker)
                outcome = failed(job, _death(worker.process.exitcode))
            else:
                if outcome.status == "failed":  # what broke a GPU for it breaks every job that follows
                    worker.line.close()
                    self.crew.remove(worker)
            ended(job, outcome)

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs, self.threads), daemon=True)
        process.start()
        theirs.close()
        self.crew.append(_Worker(process, ours))
        return self.crew[-1]

    def _stop(self) -> None:
        busy = [worker for worker in self.crew if worker.job]
        for worker in busy:
            worker.process.terminate()
        for worker in busy:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
            self.crew.remove(worker)


def _serve(line: Connection, threads: int) -> None:
    """The life of a worker. While it trains, the loop itself heeds signals, with a checkpoint; at any other
    time it may end on the spot, for nothing is lost by that."""

    def stop(number: int, frame: FrameType | None) -> None:
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.environ.update(dict.fromkeys(THREADS, str(threads)))  # which torch reads when it is imported
    importlib.import_module("langevin.studies.work")  # slow, and wanted by every job
    while True:
        try:
            outcome = execute(line.recv())
            if outcome.status == "stopped":
                os._exit(0)
            line.send(outcome)
        except (EOFError, OSError):
            return


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _death(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed: the machine may be out of memory"
    if code is not None and code < 0:
        return f"its process died of {signal.Signals(-code).name}"
    return "its process was asked to stop" if code == 0 else f"its process ended with status {code}"


class Cluster:
    """Ray in the place of local processes: the cluster at RAY_ADDRESS, which must see the same folder, or
    one on this machine."""

    def __init__(self, threads: int, on_gpu: bool) -> None:
        try:
            self.ray: Any = importlib.import_module("ray")
        except ImportError:
            raise UsageError("--on ray needs ray", "pip install 'langevin[ray]'") from None
        self.needs: dict[str, Any] = {"num_cpus": threads, "num_gpus": 1 if on_gpu else 0, "max_retries": 0}

    def __enter__(self) -> Cluster:
        self.started = not self.ray.is_initialized()
        if self.started:
            address = "auto" if os.environ.get("RAY_ADDRESS") else None
            options = {} if address else {"include_dashboard": False}
            self.ray.init(address=address, log_to_driver=False, logging_level="error", **options)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.started:
            self.ray.shutdown()

    def run(self, jobs: list[Job], began: Began, ended: Ended, tick: Tick) -> None:
        if len(jobs) > 1 and any(job.alone for job in jobs):
            for job in jobs:
                self.run([job], began, ended, tick)
            return
        task = self.ray.remote(**self.needs)(execute)
        absolute = [replace(job, output=job.output.absolute()) for job in jobs]
        pending = {task.remote(job): job for job in absolute}
        waiting = {job.label: job for job in absolute}  # for a node to take them, as far as we can see
        try:
            while pending:
                ready = self.ray.wait(list(pending), timeout=TICK)[0]
                begun = [job for job in waiting.values() if job.output.with_name("config.yaml").exists()]
                for job in (*begun, *(pending[reference] for reference in ready)):
                    if waiting.pop(job.label, None) is not None:
                        began(job)
                for reference in ready:
                    job = pending.pop(reference)
                    ended(job, self._outcome(job, reference))
                tick()
        except KeyboardInterrupt:
            for reference in pending:
                self.ray.cancel(reference, force=True)
            raise

    def _outcome(self, job: Job, reference: Any) -> Outcome:
        try:
            outcome: Outcome = self.ray.get(reference)
        except Exception as error:  # Ray's own: the worker died, the node left
            return failed(job, one_line(error))
        return outcome
