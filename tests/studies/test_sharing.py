"""Several runs on one device: how many, which together, and that turns change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_study import plan

from langevin.studies.plan import Plan
from langevin.studies.runner import compare, run_jobs, timing_jobs
from langevin.studies.sharing import (
    FULL,
    MOST,
    WORTH,
    Share,
    bundles,
    share,
    work_together,
    worth_compiling,
)
from langevin.studies.statistics import cost_of
from langevin.studies.work import Job, Outcome, finished, read_json, started, work, write_json
from langevin.studies.workers import Workers

GIB = 2.0**30


def told(outcomes: list[tuple[Job, Outcome]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for job, outcome in outcomes:
        found.setdefault(job.label, []).append(outcome.status)
    return found


def test_runs_that_take_turns_are_the_runs_that_do_not(tmp_path: Path) -> None:
    both = plan(tmp_path, seeds=(0, 1), shape={"dropout": 0.1})
    together, alone = run_jobs(both, tmp_path / "together"), run_jobs(both, tmp_path / "alone")
    together = [replace(job, shared=True) for job in together]
    outcomes: list[tuple[Job, Outcome]] = []
    work_together(together, lambda job, outcome: outcomes.append((job, outcome)))
    assert told(outcomes) == {job.label: ["trained"] for job in together}
    for job, lone in zip(together, alone, strict=True):
        assert not finished(job)
        assert work(replace(job, trained=True)).status == "done"
        assert work(lone).status == "done"
        ours, theirs = read_json(job.record), read_json(lone.record)
        assert ours is not None
        assert theirs is not None
        assert ours["values"] == theirs["values"]
        for key in ("seconds", "tokens_per_second", "peak_memory_bytes", "decode_ms_per_token"):
            assert ours["cost"][key] is None  # it would be that of all together
        assert theirs["cost"]["tokens_per_second"] > 0
        assert [row["loss"] for row in ours["curve"]] == [row["loss"] for row in theirs["curve"]]


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


def test_a_run_that_was_shared_stays_without_times(tmp_path: Path) -> None:
    """Even if it was killed then, and goes on alone."""
    job = run_jobs(plan(tmp_path, seeds=(0,)), tmp_path / "cmp")[0]
    trainer, progress = started(replace(job, shared=True))
    for _ in zip(range(5), trainer.steps(progress), strict=False):
        pass
    assert work(job).status == "done"
    assert (read_json(job.record) or {})["cost"]["tokens_per_second"] is None


def test_timing_waits_until_nobody_else_is_busy(tmp_path: Path) -> None:
    one = plan(tmp_path, "softmax", "ssmax", "heat", seeds=(0,))
    compare(one, tmp_path / "cmp", workers=0, quiet=True)
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


def test_an_arm_is_timed_alone_after_runs_that_shared(tmp_path: Path) -> None:
    one = plan(tmp_path, seeds=(0,))
    compare(one, tmp_path / "cmp", workers=0, quiet=True)
    jobs = timing_jobs(run_jobs(one, tmp_path / "cmp"))
    assert [job.folder.parent.name for job in jobs] == ["softmax", "ssmax"]
    for job in jobs:
        record = read_json(job.folder / "done.json") or {}
        record["cost"] |= {"tokens_per_second": None, "decode_ms_per_token": None}
        write_json(job.folder / "done.json", record)
        assert not finished(job)
        assert work(job) == Outcome("done")
        assert finished(job)
    results = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    for arm in results["arms"]:
        assert cost_of(arm, "tokens_per_second") == arm["alone"]["tokens_per_second"] > 0
        assert cost_of(arm, "decode_ms_per_token") > 0
    assert any("each arm alone" in sentence for sentence in results["not_controlled"])


def test_a_run_that_fails_does_not_stop_those_it_shares_with(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path, seeds=(0, 1)), tmp_path / "cmp")
    jobs = [job for job in jobs if job.label.startswith("softmax")]
    broken = replace(jobs[0], config=replace(jobs[0].config, lr=1e30, clip=1e30, max_bad_steps=1))
    outcomes: list[tuple[Job, Outcome]] = []
    work_together([broken, jobs[1]], lambda job, outcome: outcomes.append((job, outcome)))
    assert {job.label: outcome.status for job, outcome in outcomes} == {
        jobs[0].label: "failed",
        jobs[1].label: "trained",
    }


def six(folder: Path, **shape: str) -> Plan:
    arms = ("softmax", "ssmax", "heat", "sigmoid", "sima", "neighbor")
    return plan(folder, *arms, seeds=(0, 1, 2), shape=shape)


def test_a_small_model_shares_a_gpu_and_a_large_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = share(six(tmp_path, compile="off"), 1e7, 1_000_000, 512, 80 * GIB)
    assert found.shared
    assert found.trainers == 1
    assert found.runs == found.at_once == MOST
    assert not found.by_arm
    a_step = 4 * 16  # tokens
    several = share(six(tmp_path, compile="off"), 0.21 * FULL / a_step, 1_000_000, 512, 80 * GIB)
    assert (several.trainers, several.runs) == (1, 5)  # as many as fill it
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    larger = share(six(tmp_path, compile="off"), 0.6 * FULL / a_step, 1_000_000, 512, 80 * GIB)
    assert larger == Share(4, 4, 1, shared=True)
    assert share(six(tmp_path, compile="off"), 1e12, 1_000_000, 512, 80 * GIB) == Share()
    assert share(six(tmp_path, compile="off"), 1e7, 1_000_000, 512, 1 * GIB) == Share()


def test_compiled_arms_have_a_process_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    found = share(six(tmp_path, compile="on"), 1e7, 1_000_000, 512, 80 * GIB)
    assert found == Share(6, 6, 2, by_arm=True, shared=True)


def test_short_runs_are_not_compiled(tmp_path: Path) -> None:
    short = plan(tmp_path, seeds=(0, 1), shape={"steps": 100})
    assert worth_compiling(short, 1e9, 512) == "off"
    assert worth_compiling(short, 1e9, 50257) == "loss"
    assert worth_compiling(short, 1.1 * WORTH / (2 * 2 * 100 * 4 * 16), 512) == "on"


def test_jobs_that_go_together(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path, "softmax", "ssmax", seeds=(0, 1, 2)), tmp_path)
    found = bundles(jobs, Share(2, 2, 2, by_arm=True))
    assert [len(same) for same in found] == [2, 1, 2, 1]
    for same in found:
        assert len({job.config.mixer for job in same}) == 1
    assert sorted(j.label for same in found for j in same) == sorted(j.label for j in jobs)
    assert [len(same) for same in bundles(jobs, Share(3, 1, 4))] == [3, 3]
    assert [len(same) for same in bundles(jobs, Share(2, 2))] == [1] * 6
    assert bundles([], Share(2, 1, 4)) == []
