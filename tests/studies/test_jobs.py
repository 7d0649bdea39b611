"""Whoever does the jobs: what becomes of them when a worker dies, is stopped, or is a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_jobs import badly, job, killed, once, slowly, well
from small_study import arms_in, compared, flags, plan, results_in, timeless

from langevin.errors import UsageError, WorkError
from langevin.studies import jobs
from langevin.studies.jobs import Cluster, Here, Job, Outcome, Workers, execute


def carried_out(crew, every: list[Job]) -> dict[str, Outcome]:
    ended: dict[str, Outcome] = {}
    began: list[str] = []
    crew.run(
        every,
        lambda job: began.append(job.label),
        lambda job, outcome: ended.update({job.label: outcome}),
        lambda: None,
    )
    assert sorted(began) == sorted(ended) == sorted(job.label for job in every)
    return ended


# One job


def test_a_job_that_is_done_has_its_output_and_is_not_done_again(tmp_path):
    one = job(tmp_path, "a", well, value=3)
    one.output.parent.mkdir()
    assert execute(one) == Outcome("done", "it is 3")
    assert json.loads(one.output.read_text())["value"] == 3
    assert execute(job(tmp_path, "a", badly, why="again")) == Outcome("done")


def test_a_job_that_fails_says_why_in_one_line_and_may_succeed_later(tmp_path):
    bad = job(tmp_path, "a", badly, why="the disk is full\nof stars")
    assert execute(bad) == Outcome("failed", "RuntimeError: the disk is full")
    failure = json.loads(bad.failure.read_text())
    assert failure["error"] == "RuntimeError: the disk is full"
    assert any("small_jobs.py" in line for line in failure["traceback"])
    assert execute(job(tmp_path, "a", well, value=1)).status == "done"
    assert not bad.failure.exists()


def test_a_failure_that_cannot_be_written_down_is_told(tmp_path, monkeypatch):
    def full(*_):
        raise WorkError("no space left", "Free some.")

    monkeypatch.setattr(jobs, "write_json", full)
    assert execute(job(tmp_path, "a", badly, why="no room")).said == "RuntimeError: no room"


def test_a_broken_gpu_does_not_hide_the_cause(tmp_path, monkeypatch):
    """On a GPU that is broken tidying fails too."""
    import torch

    def fails():
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    assert execute(job(tmp_path, "a", badly, why="the cause")).said == "RuntimeError: the cause"


def test_this_process_stops_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "execute", lambda job: Outcome("stopped"))
    with pytest.raises(KeyboardInterrupt):
        Here().run([job(tmp_path, "a", well, value=1)], lambda job: None, lambda *_: None, lambda: None)


# Processes


@pytest.fixture(scope="module")
def crew():
    with Workers(2, threads=1) as workers:
        yield workers


def test_a_worker_that_dies_takes_its_own_job_with_it_and_is_replaced(crew, tmp_path):
    every = [
        job(tmp_path, "a", well, value=1),
        job(tmp_path, "killed", killed, how=signal.SIGKILL),
        job(tmp_path, "b", well, value=2),
        job(tmp_path, "bad", badly, why="it broke"),
        job(tmp_path, "c", well, value=3),
    ]
    for one in every:
        one.output.parent.mkdir()
    ended = carried_out(crew, every)
    assert {name: outcome.status for name, outcome in ended.items()} == {
        "a": "done",
        "killed": "failed",
        "b": "done",
        "bad": "failed",
        "c": "done",
    }
    assert ended["killed"].said == "its process was killed: the machine may be out of memory"
    assert ended["bad"].said == "RuntimeError: it broke"
    assert [one.done for one in every] == [True, False, True, False, True]
    assert json.loads(every[1].failure.read_text())["error"] == ended["killed"].said


def test_a_worker_whose_job_failed_is_replaced(tmp_path):
    """An error on a GPU stays in the process that had it."""
    every = [job(tmp_path, mark, once, mark=mark) for mark in ("breaks", "works")]
    for one in every:
        one.output.parent.mkdir()
    with Workers(1, 1) as crew:
        ended = carried_out(crew, every)
    assert (ended["breaks"].said, ended["works"].status) == ("RuntimeError: launch failure", "done")


def test_a_job_that_must_be_alone_waits_until_nobody_is_busy(crew, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    every = [job(tmp_path, f"{i}", slowly, alone=i == 2, mark=str(marks / f"{i}.busy")) for i in range(4)]
    for one in every:
        one.output.parent.mkdir()
    carried_out(crew, every)
    others = [json.loads(one.output.read_text())["others"] for one in every]
    assert others[2:] == [0, 0]  # nobody begins beside it, either


def test_an_interruption_stops_the_busy_workers_and_what_is_done_stays(crew, tmp_path):
    every = [job(tmp_path, "a", well, value=1), job(tmp_path, "b", killed, how=0)]
    for one in every:
        one.output.parent.mkdir()

    def ended(job, outcome):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        crew.run(every, lambda job: None, ended, lambda: None)
    assert [one.done for one in every] == [True, False]
    assert not every[1].failure.exists()
    assert all(worker.job is None for worker in crew.crew)


# The command, killed from outside


def start(home: Path, out: Path, *more: str, **shape: int) -> subprocess.Popen[str]:
    """langevin compare in a process group of its own."""
    command = [sys.executable, "-m", "langevin", "compare", "softmax", "heat(t='head')"]
    command += [*flags(home, **shape), "--seeds", "0-1", "--workers", "1", "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # In the background of a shell interruptions are ignored, and whoever is started there ignores them too
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen([*command, *more], start_new_session=True, **pipes)
    finally:
        signal.signal(signal.SIGINT, before)


def when(happened: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something to happen while a process runs."""
    deadline = time.monotonic() + 120
    while not happened() and process.poll() is None:
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()[1]


def assert_the_group_goes(group: int) -> None:
    """All its processes end by themselves, soon."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError("a process outlives its comparison")


def test_a_killed_command_leaves_no_worker_behind_and_the_study_goes_on(tmp_path):
    """kill -9 of the command alone, in the middle of a run; this process goes on, and ends where it does
    alone."""
    shape = {"steps": 100, "eval_every": 50, "checkpoint_every": 10, "dropout": 0.1}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(tmp_path, killed, **shape)
    when(lambda: any(killed.glob("softmax/seed-0/checkpoints/step-*")), process)
    process.kill()
    process.communicate()
    assert_the_group_goes(process.pid)
    for folder in (killed, whole):
        compared(plan(tmp_path, "softmax", "heat(t='head')", shape=shape), folder)
    assert timeless(killed, "commands") == timeless(whole, "commands")
    assert results_in(killed)["commands"][0].startswith("langevin compare softmax")


def test_an_interruption_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path):
    out = tmp_path / "cmp"
    process = start(tmp_path, out, steps=100_000, eval_every=50_000, checkpoint_every=50_000)
    when(lambda: (out / "softmax" / "seed-0" / "metrics.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert any((out / "softmax" / "seed-0" / "checkpoints").glob("step-*"))
    assert not list(out.rglob("*failed.json"))
    assert_the_group_goes(process.pid)


# Ray


def test_a_missing_ray_is_one_line_and_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"--on ray needs ray\npip install 'langevin\[ray\]'"):
        Cluster(1, on_gpu=False)


def test_with_ray_a_study_goes_on_after_a_death_and_has_the_same_results(tmp_path, monkeypatch):
    """A worker that dies takes its own run with it; the next call makes that run and no other."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'langevin[ray]'")
    here, there = tmp_path / "here", tmp_path / "there"
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # workers there import small_jobs, too
    compared(plan(tmp_path), here)
    with Cluster(1, on_gpu=False) as cluster:
        every = [job(tmp_path, "a", well, value=1), job(tmp_path, "killed", killed, how=signal.SIGKILL)]
        for one in every:
            one.output.parent.mkdir()
        ended = carried_out(cluster, every)
        assert [ended[one.label].status for one in every] == ["done", "failed"]
        assert "\n" not in ended["killed"].said
        compared(plan(tmp_path), there, on="ray")
        assert timeless(there) == timeless(here)
        lost = there / "ssmax" / "seed-1" / "done.json"
        before = {path: path.stat().st_mtime_ns for path in there.rglob("done.json") if path != lost}
        lost.unlink()
        compared(plan(tmp_path), there, on="ray")
    assert timeless(there) == timeless(here)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in there.rglob("done.json")}.items()
    assert all(run["status"] == "done" for arm in arms_in(there) for run in arm["runs"])
