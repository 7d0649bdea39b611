"""Processes that make runs: what they are given, and what becomes of it when they die or are stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_study import plan, shared_study

from langevin.studies import work as working
from langevin.studies import workers
from langevin.studies.runner import run_jobs, timing_jobs
from langevin.studies.work import Job, Outcome, finished, read_json, work
from langevin.studies.workers import Workers, _serve, _Worker
from langevin.training import loop


def at_work(job: Job, crew: Workers) -> int:
    """The process that makes a run."""
    return next(worker.process.pid or 0 for worker in crew.crew if worker.job == job)


def test_several_processes_make_the_runs_that_one_makes(tmp_path: Path) -> None:
    both = plan(tmp_path, seeds=(0, 1), shape={"dropout": 0.1})
    jobs, alone = run_jobs(both, tmp_path / "crew"), run_jobs(both, tmp_path / "alone")
    began: list[Job] = []
    ended: list[tuple[Job, str]] = []
    with Workers(2, threads=1) as crew:
        crew.run(jobs, began.append, lambda job, outcome: ended.append((job, outcome.status)), lambda: None)
        assert len(crew.crew) == 2
    assert began == jobs
    assert sorted(ended, key=lambda pair: jobs.index(pair[0])) == [(job, "done") for job in jobs]
    for job, lone in zip(jobs, alone, strict=True):
        work(lone)
        assert (read_json(job.record) or {})["values"] == (read_json(lone.record) or {})["values"]


def test_timing_waits_until_nobody_else_is_busy(tmp_path: Path) -> None:
    one = shared_study(tmp_path, "softmax", "ssmax", "heat")
    running: list[str] = []
    most = 0

    def began(job: Job) -> None:
        nonlocal most
        running.append(job.label)
        most = max(most, len(running))

    with Workers(2, threads=1) as crew:
        jobs = timing_jobs(run_jobs(one, tmp_path / "cmp"))
        crew.run(jobs, began, lambda job, outcome: running.remove(job.label), lambda: None)
    assert most == 1
    assert all(map(finished, jobs))


def test_a_worker_gets_nothing_more_before_it_is_ready(tmp_path: Path) -> None:
    """One that breaks after its last run, while it tidies up, must not take the next one with it."""
    jobs = run_jobs(plan(tmp_path), tmp_path / "cmp")
    waiting, began, ended = deque(jobs), list[Job](), list[Job]()
    ours, theirs = multiprocessing.Pipe()
    crew = Workers(1, threads=1)
    process: Any = None
    crew.crew = [_Worker(process, ours)]

    def turn(*messages: Any) -> None:
        for message in messages:
            theirs.send(message)
            crew._listen(lambda job, outcome: ended.append(job))
        crew._give_out(waiting, began.append)

    turn()
    assert theirs.recv() == jobs[0]
    turn(Outcome("done"))
    assert began == ended == jobs[:1]
    assert not theirs.poll()
    turn(None)
    assert theirs.recv() == jobs[1]


def test_hired_workers_keep_to_a_smaller_share(tmp_path: Path) -> None:
    waiting = deque(run_jobs(plan(tmp_path), tmp_path / "cmp"))
    process: Any = None
    crew = Workers(1, threads=1)
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    crew.crew = [_Worker(process, ours) for ours, _ in pipes]
    crew._give_out(waiting, lambda job: None)
    assert len(waiting) == 3


@pytest.mark.parametrize("told", [False, True])
def test_a_dead_worker_fails_the_run_it_was_at_and_no_other(tmp_path: Path, told: bool) -> None:
    jobs = run_jobs(plan(tmp_path), tmp_path / "cmp")
    ended: list[tuple[Job, Outcome]] = []
    ours, theirs = multiprocessing.Pipe()
    crew = Workers(1, threads=1)
    process: Any = SimpleNamespace(join=lambda: None, exitcode=-9)
    crew.crew = [_Worker(process, ours, jobs[0], ready=False)]
    if told:
        theirs.send(Outcome("failed", error="it broke"))
    theirs.close()
    while crew.crew:
        crew._listen(lambda job, outcome: ended.append((job, outcome)))
    cause = "it broke" if told else "its process was killed: the machine may be out of memory"
    assert ended == [(jobs[0], Outcome("failed", error=cause))]


def test_a_worker_that_is_asked_to_stop_leaves_the_rest_to_another(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path, seeds=(0, 1), shape={"steps": 200}), tmp_path / "cmp")
    ended: dict[str, Outcome] = {}
    with Workers(1, threads=1) as crew:

        def begin(job: Job) -> None:
            if job == jobs[1]:
                os.kill(at_work(job, crew), signal.SIGTERM)

        crew.run(jobs, begin, lambda job, outcome: ended.update({job.label: outcome}), lambda: None)
    assert ended.pop(jobs[1].label).error == "its process was asked to stop"
    assert [outcome.status for outcome in ended.values()] == ["done"] * 3


def test_the_cause_of_a_failure_is_told_before_the_gpu_is_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is broken tidying fails too."""

    def fails(*_: Any) -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(workers, "tidied", fails)
    monkeypatch.setattr(working, "forget", fails)
    monkeypatch.setattr(loop.Trainer, "_compute", fails)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    ours, theirs = multiprocessing.Pipe()
    ours.send(run_jobs(plan(tmp_path), tmp_path / "cmp")[0])
    with pytest.raises(RuntimeError, match="device-side"):
        _serve(theirs, threads=1)
    assert ours.recv() == Outcome("failed", error="RuntimeError: device-side assert")
    assert not ours.poll()
