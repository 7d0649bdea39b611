"""Processes that make runs, one after another: torch is imported once in each.

A worker that dies takes with it the run it was at, and is replaced. Workers end with the process that
started them, however it ends.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from langevin.studies.work import Job, Outcome, fail, tidied, work

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
    job: Job | None = None
    ready: bool = True  # for another


class Workers:
    """A crew of processes, used as a context: `run` may be called several times."""

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
        """Make all runs; KeyboardInterrupt leaves every running one at a checkpoint."""
        waiting = deque(jobs)
        try:
            while waiting or any(worker.job for worker in self.crew):
                self._give_out(waiting, began)
                self._listen(ended)
                tick()
        except KeyboardInterrupt:
            self._stop()
            raise

    def _give_out(self, waiting: deque[Job], began: Began) -> None:
        while waiting:
            busy = sum(not worker.ready for worker in self.crew)
            if busy >= (1 if waiting[0].alone else self.count):
                return
            worker = next((w for w in self.crew if w.ready), None) or self._start()
            try:
                worker.line.send(waiting[0])
            except OSError:  # it died while it had nothing to do
                self.crew.remove(worker)
                continue
            worker.job, worker.ready = waiting.popleft(), False
            began(worker.job)

    def _listen(self, ended: Ended) -> None:
        """What a worker tells: first what came of its run, and then, as None, that it is ready for more."""
        busy = {worker.line: worker for worker in self.crew if not worker.ready}
        for line in wait(list(busy), TICK):
            worker = busy[line]  # type: ignore[index]
            try:
                outcome = worker.line.recv()
            except (EOFError, OSError):
                worker.process.join()
                self.crew.remove(worker)
                outcome = worker.job and fail(worker.job, _death(worker.process.exitcode))
            if worker.job is None:
                worker.ready = True
            else:
                ended(worker.job, outcome)
                worker.job = None

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
    importlib.import_module("langevin.evaluation.runs")  # slow, and wanted by every run
    importlib.import_module("langevin.training.start")
    while True:
        try:
            job = line.recv()
            outcome = work(job)
            if outcome.status == "stopped":
                os._exit(0)
            line.send(outcome)
            tidied(job)  # after it is told: on a broken GPU it fails
            line.send(None)
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
