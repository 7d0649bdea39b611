"""Several runs on one device: how many, which together, and that turns change nothing."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_study import plan, shared_study, told

from langevin.studies import sharing
from langevin.studies.display import Display
from langevin.studies.folders import gather
from langevin.studies.plan import Plan
from langevin.studies.runner import compare, run_jobs, timing_jobs, trial_jobs
from langevin.studies.sharing import (
    BEGAN,
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
from langevin.studies.work import DECODING, Job, Outcome, finished, read_json, started, work, write_json
from langevin.training import loop

GIB = 2.0**30


def test_runs_that_take_turns_are_the_runs_that_do_not(tmp_path: Path) -> None:
    both = plan(tmp_path, seeds=(0, 1), shape={"dropout": 0.1})
    together, alone = run_jobs(both, tmp_path / "together"), run_jobs(both, tmp_path / "alone")
    together = [replace(job, shared=True) for job in together]
    outcomes: list[tuple[Job, Outcome]] = []
    work_together(together, lambda job, outcome: outcomes.append((job, outcome)))
    assert told(outcomes) == {job.label: ["began", "trained"] for job in together}
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


def test_a_run_that_was_shared_stays_without_times(tmp_path: Path) -> None:
    """Even if it was killed then, and goes on alone."""
    job = run_jobs(plan(tmp_path, seeds=(0,)), tmp_path / "cmp")[0]
    trainer, progress = started(replace(job, shared=True))
    for _ in zip(range(5), trainer.steps(progress), strict=False):
        pass
    assert work(job).status == "done"
    assert (read_json(job.record) or {})["cost"]["tokens_per_second"] is None


def test_arms_are_timed_alone_after_runs_that_shared(tmp_path: Path) -> None:
    """Also where the comparison goes on in another way than it began."""
    one = shared_study(tmp_path)
    jobs = timing_jobs(run_jobs(one, tmp_path / "cmp"))
    assert [job.folder.parent.name for job in jobs if job.timing] == ["softmax", "ssmax"]
    assert [[folder.parent.name for folder in job.decoding] for job in jobs] == [
        [],
        [],
        ["softmax", "ssmax"],
    ]
    assert not any(map(finished, jobs))
    results = compare(one, tmp_path / "cmp", workers=0, quiet=True)
    assert all(map(finished, jobs))
    for arm in results["arms"]:
        assert arm["runs"][0]["cost"]["tokens_per_second"] is None
        assert cost_of(arm, "tokens_per_second") == arm["alone"]["tokens_per_second"] > 0
        assert (
            cost_of(arm, "decode_ms_per_token") == read_json(tmp_path / "cmp" / DECODING)[arm["name"]] > 0
        )
    assert any("each arm alone" in sentence for sentence in results["not_controlled"])
    (tmp_path / "cmp" / "ssmax" / "alone.json").unlink()  # an arm that failed altogether has none
    (tmp_path / "cmp" / "ssmax" / "seed-0" / "done.json").unlink()
    write_json(tmp_path / "cmp" / "ssmax" / "seed-0" / "failed.json", {"seed": 0, "error": "no"})
    results = gather([tmp_path / "cmp"], metrics=one.metrics, primary="nll")
    assert any("each arm alone" in sentence for sentence in results["not_controlled"])


def test_timing_and_decoding_of_one_run_are_shown_side_by_side(tmp_path: Path) -> None:
    """A cluster makes them at the same time."""
    one = shared_study(tmp_path)
    jobs = timing_jobs(run_jobs(one, tmp_path / "cmp"))
    display = Display(quiet=True)
    display.phase("timing", jobs)
    for job in jobs:
        display.began(job)
    for job in jobs:
        display.ended(job, Outcome("done"))
    display.stop()
    assert display.left == 0


def test_runs_that_shared_have_no_times_in_a_report_of_runs_either(tmp_path: Path) -> None:
    one = shared_study(tmp_path)
    results = gather(
        [job.folder for job in run_jobs(one, tmp_path / "cmp")], metrics=one.metrics, primary="nll"
    )
    for arm in results["arms"]:
        assert arm["runs"][0]["cost"]["tokens_per_second"] is None
        assert all(row["seconds"] is None for row in arm["runs"][0]["curve"])


def test_a_trial_that_cannot_be_written_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = trial_jobs(plan(tmp_path, tune="lr", trials=2), tmp_path / "cmp")
    whole = sharing.conclude

    def full(job: Job) -> Outcome:
        if job is jobs[1]:
            raise OSError(28, "No space left on device")
        return whole(job)

    monkeypatch.setattr(sharing, "conclude", full)
    outcomes: list[tuple[Job, Outcome]] = []
    work_together(jobs, lambda job, outcome: outcomes.append((job, outcome)))
    assert told(outcomes) == {job.label: ["began", "failed" if job is jobs[1] else "done"] for job in jobs}


@pytest.mark.parametrize("together", [1, 2])
def test_the_cause_of_a_failure_is_told_before_the_gpu_is_tidied(
    together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is broken tidying fails too."""
    jobs = run_jobs(plan(tmp_path), tmp_path / "cmp")[:together]

    def fails(*_: Any) -> None:
        raise RuntimeError("device-side assert")

    for name in ("tidied", "forget"):
        monkeypatch.setattr(sharing, name, fails)
    monkeypatch.setattr(loop.Trainer, "_compute", fails)
    outcomes: list[tuple[Job, Outcome]] = []
    with pytest.raises(RuntimeError):
        work_together(jobs, lambda job, outcome: outcomes.append((job, outcome)))
    failed = Outcome("failed", error="RuntimeError: device-side assert")
    assert outcomes == [*((job, BEGAN) for job in jobs), (jobs[0], failed)]


def test_a_run_that_fails_does_not_stop_those_it_shares_with(tmp_path: Path) -> None:
    jobs = run_jobs(plan(tmp_path, seeds=(0, 1)), tmp_path / "cmp")
    jobs = [job for job in jobs if job.label.startswith("softmax")]
    broken = replace(jobs[0], config=replace(jobs[0].config, lr=1e30, clip=1e30, max_bad_steps=1))
    outcomes: list[tuple[Job, Outcome]] = []
    work_together([broken, jobs[1]], lambda job, outcome: outcomes.append((job, outcome)))
    assert told(outcomes) == {jobs[0].label: ["began", "failed"], jobs[1].label: ["began", "trained"]}


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
    both = plan(tmp_path, "softmax", "ssmax", seeds=(0, 1, 2), tune="lr", trials=3)
    for jobs in (run_jobs(both, tmp_path), trial_jobs(both, tmp_path)):
        found = bundles(jobs, Share(2, 2, 2, by_arm=True))  # each compiles once
        assert [{job.config.mixer for job in same} for same in found] == [{"softmax"}, {"ssmax"}]
        assert sorted(j.label for same in found for j in same) == sorted(j.label for j in jobs)
        assert bundles(jobs, Share(3, 1, 4)) == [jobs]
        assert bundles(jobs, Share(2, 2)) == [[job] for job in jobs]
    assert bundles([], Share(2, 1, 4)) == []


def unequal(folder: Path) -> list[Job]:
    """Four runs of which the first is the shortest."""
    jobs = run_jobs(plan(folder, seeds=(0, 1)), folder / "cmp")
    return [replace(job, config=replace(job.config, steps=4 + 8 * (job is not jobs[0]))) for job in jobs]


def test_a_run_begins_when_another_has_ended(tmp_path: Path) -> None:
    jobs = unequal(tmp_path)
    told: list[tuple[Job, str]] = []
    work_together(jobs, lambda job, outcome: told.append((job, outcome.status)), at_once=2)
    one, two, three, four = jobs
    assert told[:4] == [(one, "began"), (two, "began"), (one, "trained"), (three, "began")]
    assert sorted(status for _, status in told[4:]) == ["began", "trained", "trained", "trained"]
    assert told.index((two, "trained")) < told.index((four, "began"))
    assert [work(replace(job, trained=True)).status for job in jobs] == ["done"] * 4


@pytest.mark.parametrize("when", ["began", "getting ready"])
def test_asked_to_stop_all_runs_save_and_those_that_wait_do_not_begin(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = unequal(tmp_path)
    outcomes: list[tuple[Job, Outcome]] = []
    ready = sharing.started

    def started_late(job: Job) -> Any:
        found = ready(job)
        if when == "getting ready" and job is jobs[2]:
            signal.raise_signal(signal.SIGTERM)
        return found

    def tell(job: Job, outcome: Outcome) -> None:
        outcomes.append((job, outcome))
        if when == "began" and job is jobs[2] and outcome == BEGAN:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(sharing, "started", started_late)
    work_together(jobs, tell, at_once=2)
    one, two, three, four = (job.label for job in jobs)
    assert told(outcomes) == {
        one: ["began", "trained"],
        two: ["began", "stopped"],
        three: ["began", "stopped"],
        four: ["stopped"],  # nothing is sent for it: whoever asked may not listen any more
    }
    assert any((jobs[1].folder / "checkpoints").glob("step-*"))
    assert not jobs[3].folder.exists()
