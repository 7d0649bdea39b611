"""Processes that make runs, one after another or several in turns: torch is imported once in each.

Where runs share a GPU, some processes train and the others measure what is trained.

A worker that dies takes with it what it was at, a run or several in turns, and is replaced; what it had not
begun is given to another. Workers end with the process that started them, however it ends.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from langevin.studies.sharing import BEGAN, Share, bundles, work_together
from langevin.studies.work import Job, Outcome, fail

TICK = 0.5  # seconds between looks at the running runs
PATIENCE = 60  # seconds for a worker to write its checkpoint when asked to stop
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Began = Callable[[Job], None]
Ended = Callable[[Job, Outcome], None]
Tick = Callable[[], None]


@dataclass
class _Worker:
    process: BaseProcess
    line: Connection
    jobs: list[Job] = field(default_factory=list)
    begun: list[Job] = field(default_factory=list)  # of them
    told: bool = False  # anything about what it was given last
    ready: bool = True  # for more

    @property
    def trains(self) -> bool:
        return any(job.trains for job in self.jobs)


class Workers:
    """A crew of processes, used as a context: `run` may be called several times."""

    def __init__(self, share: Share, threads: int) -> None:
        self.share, self.threads = share, threads
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
        """Make all runs; KeyboardInterrupt leaves every running one at a checkpoint."""
        jobs = [replace(job, shared=self.share.shared) for job in jobs]
        training = deque(bundles([job for job in jobs if job.trains], self.share))
        measuring = deque([job] for job in jobs if not job.trains)

        def settle(job: Job, outcome: Outcome) -> None:
            if outcome.status == "trained":
                measuring.append([replace(job, trained=True)])
            else:
                ended(job, outcome)

        try:
            if self.share.trainers < self.share.workers:  # those that measure get ready meanwhile
                self._start_all(min(self.share.workers, len(jobs)))
            while training or measuring or any(worker.jobs for worker in self.crew):
                self._give_out(training, measuring)
                self._listen(began, settle, training.appendleft)
                tick()
        except KeyboardInterrupt:
            self._stop()
            raise

    def _give_out(self, training: deque[list[Job]], measuring: deque[list[Job]]) -> None:
        while True:
            if sum(not worker.ready for worker in self.crew) >= self.share.workers:
                return
            busy = sum(worker.trains for worker in self.crew)
            waiting = training if training and busy < self.share.trainers else measuring
            if not waiting:
                return
            if waiting[0][0].alone and not all(worker.ready for worker in self.crew):
                return
            worker = next((w for w in self.crew if w.ready), None) or self._start()
            try:
                worker.line.send((waiting[0], self.share.runs))
            except OSError:  # it died while it had nothing to do
                self.crew.remove(worker)
                continue
            worker.jobs, worker.told, worker.ready = list(waiting.popleft()), False, False

    def _listen(self, began: Began, ended: Ended, again: Callable[[list[Job]], None]) -> None:
        def begins(worker: _Worker, job: Job) -> None:
            worker.told = True
            worker.begun.append(job)
            if not job.trained:
                began(job)

        busy = {worker.line: worker for worker in self.crew if not worker.ready}
        for line in wait(list(busy), TICK):
            worker = busy[line]  # type: ignore[index]
            try:
                told = worker.line.recv()
            except (EOFError, OSError):
                worker.process.join()
                self.crew.remove(worker)
                if worker.jobs and not worker.told:  # or it would be tried for ever
                    begins(worker, worker.jobs[0])
                for job in worker.begun:
                    ended(job, fail(job, _death(worker.process.exitcode)))
                left = [job for job in worker.jobs if job not in worker.begun]
                if left:
                    again(left)
                continue
            if told is None:
                worker.ready = True
                continue
            job, outcome = told
            if outcome == BEGAN:
                begins(worker, job)
            else:
                worker.jobs.remove(job)
                worker.begun.remove(job)
                ended(job, outcome)

    def _start_all(self, count: int) -> None:
        while len(self.crew) < count:
            self._start()

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
        with _environment({name: str(self.threads) for name in THREADS}):
            process.start()
        theirs.close()
        self.crew.append(_Worker(process, ours))
        return self.crew[-1]

    def _stop(self) -> None:
        busy = [worker for worker in self.crew if worker.jobs]
        for worker in busy:
            worker.process.terminate()
        for worker in busy:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()
            self.crew.remove(worker)


def _serve(line: Connection) -> None:
    """The life of a worker. While it trains, the loop itself heeds signals, with a checkpoint; at any other
    time it may end on the spot, for nothing is lost by that."""

    def stop(number: int, frame: FrameType | None) -> None:
        os._exit(0)

    stopped: list[Job] = []

    def tell(job: Job, outcome: Outcome) -> None:
        if outcome.status == "stopped":
            stopped.append(job)
        else:
            line.send((job, outcome))

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    importlib.import_module("langevin.evaluation.runs")  # slow, and wanted by every run
    importlib.import_module("langevin.training.start")
    while True:
        try:
            jobs, at_once = line.recv()
            work_together(jobs, tell, at_once)
            if stopped:
                os._exit(0)
            line.send(None)  # ready for more: whatever could break has not
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


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
