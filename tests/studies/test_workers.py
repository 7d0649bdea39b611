"""Processes that make runs: what they are given, and what becomes of it when they die or are stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_study import plan, shared_study, told

from langevin.studies.runner import run_jobs, timing_jobs
from langevin.studies.sharing import (
    BEGAN,
    Share,
)
from langevin.studies.work import Job, Outcome, finished, read_json, work
from langevin.studies.workers import Workers, _Worker


def test_one_process_trains_and_another_measures(tmp_path: Path) -> None:
    both = plan(tmp_path, seeds=(0, 1))
    jobs, alone = run_jobs(both, tmp_path / "crew"), run_jobs(both, tmp_path / "alone")
    outcomes: list[tuple[Job, Outcome]] = []
    began: list[str] = []
    with Workers(Share(2, 1, 3, shared=True), threads=1) as crew:
        crew.run(
            jobs,
            lambda job: began.append(job.label),
            lambda job, outcome: outcomes.append((job, outcome)),
            lambda: None,
        )
        assert len(crew.crew) == 2
    assert sorted(began) == sorted(job.label for job in jobs)
    assert told(outcomes) == {job.label: ["done"] for job in jobs}
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

    with Workers(Share(2, 1, 4, shared=True), threads=1) as crew:
        jobs = timing_jobs(run_jobs(one, tmp_path / "cmp"))
        crew.run(jobs, began, lambda job, outcome: running.remove(job.label), lambda: None)
    assert most == 1
    assert all(map(finished, jobs))


def test_a_worker_gets_nothing_more_before_it_is_ready(tmp_path: Path) -> None:
    """One that breaks after its last run, while it tidies up, must not take the next ones with it."""
    jobs = run_jobs(plan(tmp_path), tmp_path / "cmp")
    training, measuring = deque([[job] for job in jobs]), deque[list[Job]]()
    began: list[Job] = []
    ours, theirs = multiprocessing.Pipe()
    crew = Workers(Share(1), threads=1)
    process: Any = None
    crew.crew = [_Worker(process, ours)]

    def turn(*messages: Any) -> None:
        for message in messages:
            theirs.send(message)
            crew._listen(began.append, lambda job, outcome: None, training.append)
        crew._give_out(training, measuring)

    turn()
    assert theirs.recv() == (jobs[:1], 1)
    turn((jobs[0], BEGAN), (jobs[0], Outcome("done")))
    assert began == jobs[:1]
    assert not theirs.poll()
    turn(None)
    assert theirs.recv() == (jobs[1:2], 1)


def test_hired_workers_keep_to_a_smaller_share(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path), tmp_path / "cmp")
    training, measuring = deque[list[Job]](), deque([[job] for job in jobs])
    process: Any = None
    crew = Workers(Share(1), threads=1)
    pipes = [multiprocessing.Pipe() for _ in range(3)]
    crew.crew = [_Worker(process, ours) for ours, _ in pipes]
    crew._give_out(training, measuring)
    assert len(measuring) == len(jobs) - 1


def test_many_runs_that_wait_do_not_keep_a_worker_from_stopping(tmp_path: Path) -> None:
    """What is told of them would fill the line, to which nobody listens then."""
    jobs = run_jobs(plan(tmp_path, seeds=tuple(range(150)), shape={"steps": 10_000}), tmp_path / "cmp")
    begin = 0.0

    def began(job: Job) -> None:
        nonlocal begin
        if job.folder == jobs[1].folder:
            begin = time.monotonic()
            raise KeyboardInterrupt

    with Workers(Share(1, 1, 2), threads=1) as crew, pytest.raises(KeyboardInterrupt):
        crew.run(jobs, began, lambda job, outcome: None, lambda: None)
    assert time.monotonic() - begin < 30
    assert not any(job.folder.exists() for job in jobs[2:])


def test_what_a_dead_worker_had_not_begun_is_made_by_another(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path, seeds=(0, 1)), tmp_path / "cmp")
    ended: dict[str, Outcome] = {}
    with Workers(Share(2, 1, 2, shared=True), threads=1) as crew:

        def begin(job: Job) -> None:
            if job.folder == jobs[0].folder:
                at_work = next(worker for worker in crew.crew if worker.trains)
                os.kill(at_work.process.pid or 0, signal.SIGKILL)

        crew.run(jobs, begin, lambda job, outcome: ended.update({job.label: outcome}), lambda: None)
    assert ended[jobs[0].label].status == "failed"
    assert [ended[job.label].status for job in jobs[2:]] == ["done", "done"]


@pytest.mark.parametrize("told_before", [False, True])
def test_a_worker_that_dies_before_it_begins_a_run_fails_it_only_if_it_did_nothing_else(
    told_before: bool, tmp_path: Path
) -> None:
    """Or it would be replaced for ever; but what comes after a run that broke the GPU is not to blame."""
    jobs = run_jobs(plan(tmp_path), tmp_path / "cmp")
    training, began, ended = deque[list[Job]](), list[Job](), list[tuple[Job, Outcome]]()
    ours, theirs = multiprocessing.Pipe()
    crew = Workers(Share(1), threads=1)
    process: Any = SimpleNamespace(join=lambda: None, exitcode=-9)
    crew.crew = [_Worker(process, ours, list(jobs), ready=False)]
    if told_before:
        theirs.send((jobs[0], BEGAN))
        theirs.send((jobs[0], Outcome("failed", error="it broke")))
    theirs.close()
    while crew.crew:
        crew._listen(began.append, lambda job, outcome: ended.append((job, outcome)), training.append)
    assert began == jobs[:1]
    assert [(job, outcome.status) for job, outcome in ended] == [(jobs[0], "failed")]
    assert list(training) == [jobs[1:]]


def test_a_worker_that_is_asked_to_stop_leaves_the_rest_to_another(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path, seeds=(0, 1, 2), shape={"steps": 200}), tmp_path / "cmp")
    ended: dict[str, Outcome] = {}
    with Workers(Share(1, 1, 2, shared=True), threads=1) as crew:

        def begin(job: Job) -> None:
            if job.folder == jobs[1].folder:
                os.kill(crew.crew[0].process.pid or 0, signal.SIGTERM)

        crew.run(jobs, begin, lambda job, outcome: ended.update({job.label: outcome}), lambda: None)
    assert [ended[job.label].error for job in jobs[:2]] == ["its process was asked to stop"] * 2
    assert [ended[job.label].status for job in jobs[2:]] == ["done"] * 4
