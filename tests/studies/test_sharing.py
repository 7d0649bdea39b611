"""Several runs on one device: how many, which together, and that turns change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from small_study import plan

from langevin.studies.collect import read_json
from langevin.studies.runner import run_jobs
from langevin.studies.sharing import Share, bundles, share, work_together
from langevin.studies.work import Job, Outcome, work

GIB = 2.0**30


def test_runs_that_take_turns_are_the_runs_that_do_not(tmp_path: Path) -> None:
    both = plan(tmp_path, seeds=(0, 1), shape={"dropout": 0.1})
    together, alone = run_jobs(both, tmp_path / "together"), run_jobs(both, tmp_path / "alone")
    outcomes: dict[str, Outcome] = {}
    for same in bundles(together, 2):
        assert len(same) == 2
        work_together(same, lambda job, outcome: outcomes.update({job.label: outcome}))
    for job, lone in zip(together, alone, strict=True):
        assert outcomes[job.label].status == "done"
        assert work(lone).status == "done"
        ours, theirs = read_json(job.record), read_json(lone.record)
        assert ours is not None
        assert theirs is not None
        assert ours["values"] == theirs["values"]
        assert ours["cost"]["tokens_per_second"] is None  # it would be that of all together
        assert theirs["cost"]["tokens_per_second"] > 0
        assert [row["loss"] for row in ours["curve"]] == [row["loss"] for row in theirs["curve"]]


def test_a_run_that_fails_does_not_stop_those_it_shares_with(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path, seeds=(0, 1)), tmp_path / "cmp")
    jobs = [job for job in jobs if job.label.startswith("softmax")]
    broken = replace(jobs[0], config=replace(jobs[0].config, lr=1e30, clip=1e30, max_bad_steps=1))
    outcomes: list[tuple[Job, Outcome]] = []
    work_together([broken, jobs[1]], lambda job, outcome: outcomes.append((job, outcome)))
    assert {job.label: outcome.status for job, outcome in outcomes} == {
        jobs[0].label: "failed",
        jobs[1].label: "done",
    }


def test_a_small_model_shares_a_gpu_and_a_large_one_does_not(tmp_path: Path) -> None:
    six = plan(tmp_path, "softmax", "ssmax", "heat", "sigmoid", "sima", "neighbor", seeds=(0, 1, 2))
    found = share(six, 1e7, 1_000_000, 512, 80 * GIB)
    assert found.workers * found.runs > 1
    assert found.runs <= 3
    assert share(six, 1e12, 1_000_000, 512, 80 * GIB) == Share(1, 1)
    assert share(six, 1e7, 1_000_000, 512, 1 * GIB) == Share(1, 1)


def test_jobs_of_one_arm_go_together(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path, "softmax", "ssmax", seeds=(0, 1, 2)), tmp_path)
    found = bundles(jobs, 2)
    assert [len(same) for same in found] == [2, 1, 2, 1]
    for same in found:
        assert len({job.config.mixer for job in same}) == 1
    assert sorted(j.label for same in found for j in same) == sorted(j.label for j in jobs)
    measured = [replace(job, at_loss=2.0) for job in jobs]
    assert [len(same) for same in bundles(measured, 2)] == [1] * 6
