"""The runs of a comparison as tasks on a Ray cluster, which must see the same folder."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from langevin.errors import UsageError, one_line
from langevin.studies.work import Job, Outcome, fail, tidied, work
from langevin.studies.workers import TICK, Began, Ended, Tick


def _task(job: Job) -> Outcome:
    outcome = work(job)
    with suppress(Exception):  # on a broken GPU it fails, and the outcome is worth more
        tidied(job)
    return outcome


class Cluster:
    """Ray in the place of local processes: the cluster at RAY_ADDRESS, or one on this machine."""

    def __init__(self, threads: int, on_gpu: bool) -> None:
        try:
            self.ray: Any = import_module("ray")
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
        """Make all runs; KeyboardInterrupt ends the tasks, which a second start goes on with."""
        task = self.ray.remote(**self.needs)(_task)
        jobs = [
            replace(job, folder=job.folder.absolute(), decoding=tuple(map(Path.absolute, job.decoding)))
            for job in jobs
        ]
        pending = {task.remote(job): job for job in jobs}
        waiting = {job.label: job for job in jobs}  # for a node to take them, as far as we can see
        try:
            while pending:
                ready = [pending[reference] for reference in self.ray.wait(list(pending), timeout=TICK)[0]]
                seen = [job for job in waiting.values() if (job.folder / "config.yaml").exists()]
                for job in {job.label: job for job in (*ready, *seen)}.values():
                    if waiting.pop(job.label, None) is not None:
                        began(job)
                for reference in [r for r, job in pending.items() if job in ready]:
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
            return fail(job, one_line(error))
        return outcome
