"""Comparisons that are killed, interrupted or lose a worker, and end the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_study import flags, plan, results_in, text_in, timeless

from langevin.errors import UsageError
from langevin.studies import cluster
from langevin.studies.plan import Plan
from langevin.studies.runner import compare, run_jobs
from langevin.studies.sharing import divide
from langevin.studies.work import Job, Outcome, finished
from langevin.studies.workers import Workers

LONG = {"steps": 60, "eval_every": 10, "checkpoint_every": 5}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start(home: Path, out: Path, *more: str, **shape: int) -> subprocess.Popen[str]:
    """langevin compare in a process group of its own."""
    command = [sys.executable, "-m", "langevin", "compare", "softmax", "heat(t='head')"]
    command += [*flags(home, **{**LONG, **shape}), "--seeds", "0-1", "--workers", "1", "--out", str(out)]
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


def kill_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


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


@pytest.mark.slow  # four starts of Python with torch in two processes each
def test_a_comparison_killed_anywhere_ends_with_the_same_results(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    reference = plan(tmp_path, "softmax", "heat(t='head')", shape=LONG)
    compare(reference, whole, workers=0, quiet=True)
    moments = [
        lambda: (killed / "softmax" / "seed-0" / "config.yaml").exists(),
        lambda: any(killed.glob("heat*/seed-0/checkpoints/*step-*")),
        lambda: any(killed.glob("*/seed-1/checkpoints/*step-*")),
    ]
    for moment in moments:
        process = start(tmp_path, killed)
        when(moment, process)
        kill_group(process)
    process = start(tmp_path, killed)
    assert process.wait(120) == 0, process.communicate()[1]
    assert timeless(killed) == timeless(whole)


def test_workers_do_not_outlive_their_comparison(tmp_path: Path) -> None:
    process = start(tmp_path, tmp_path / "cmp", steps=100_000, eval_every=50_000)
    when(lambda: any((tmp_path / "cmp").glob("*/seed-0/checkpoints/step-*")), process)
    process.kill()
    process.communicate()
    assert_the_group_goes(process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path, number: int) -> None:
    out = tmp_path / "cmp"
    process = start(tmp_path, out, steps=100_000, eval_every=50_000, checkpoint_every=50_000)
    when(lambda: (out / "softmax" / "seed-0" / "metrics.jsonl").exists(), process)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert any((out / "softmax" / "seed-0" / "checkpoints").glob("step-*"))
    assert not (out / "softmax" / "seed-0" / "failed.json").exists()
    assert_the_group_goes(process.pid)


def test_a_worker_that_dies_fails_its_run_only_and_is_replaced(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path), tmp_path / "cmp")
    ended: dict[str, Outcome] = {}
    victim = jobs[1]
    with Workers(2, threads=1) as crew:

        def begin(job: Job) -> None:
            if job == victim:
                at_work = next(worker for worker in crew.crew if worker.job == job)
                os.kill(at_work.process.pid or 0, signal.SIGKILL)

        crew.run(jobs, begin, lambda job, outcome: ended.update({job.label: outcome}), lambda: None)
    assert {label: outcome.status for label, outcome in ended.items()} == {
        job.label: "failed" if job is victim else "done" for job in jobs
    }
    assert "killed" in (ended[victim.label].error or "")
    assert [finished(job) for job in jobs] == [True, False, True, True]


def test_hired_workers_serve_several_comparisons(tmp_path: Path) -> None:
    with Workers(1, threads=1) as hired:
        seen = []
        for name in ("one", "two"):
            compare(plan(tmp_path, seeds=(0,)), tmp_path / name, workers=1, quiet=True, hired=hired)
            seen += [worker.process.pid for worker in hired.crew]
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert timeless(tmp_path / "one") == timeless(tmp_path / "two")


def test_one_folder_takes_one_comparison_at_a_time(tmp_path: Path) -> None:
    from langevin.runs.folder import Lock

    one = plan(tmp_path, seeds=(0,))
    (tmp_path / "cmp").mkdir()
    with Lock(tmp_path / "cmp"), pytest.raises(UsageError, match="is being written by"):
        compare(one, tmp_path / "cmp", workers=0, quiet=True)


def test_a_cpu_takes_a_run_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)

    def workers(plan_: Plan, asked: int | None = None) -> int:
        return divide(plan_, {}, "cpu", asked)

    assert workers(plan(tmp_path)) == 4  # as many as there are runs
    assert workers(plan(tmp_path, seeds=tuple(range(9)))) == 8
    assert workers(plan(tmp_path), 3) == 3


def test_a_missing_ray_is_one_line_and_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"--on ray needs ray\npip install 'langevin\[ray\]'"):
        cluster.Cluster(1, on_gpu=False)


def test_ray_gives_the_same_results_as_this_process(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'langevin[ray]'")
    text_in(tmp_path)
    here, there = tmp_path / "here", tmp_path / "there"
    compare(plan(tmp_path), here, workers=0, quiet=True)
    compare(plan(tmp_path), there, workers=1, on="ray", quiet=True)
    assert all(run["status"] == "done" for arm in results_in(there)["arms"] for run in arm["runs"])
    assert timeless(there) == timeless(here)
