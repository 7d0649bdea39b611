"""Several runs on one device: how many, and that what is told of them is their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_study import plan, shared_study

from langevin.studies.display import Display
from langevin.studies.folders import gather
from langevin.studies.plan import Plan
from langevin.studies.runner import compare, run_jobs, timing_jobs
from langevin.studies.sharing import BUSY, WORTH, divide, run_bytes, worth_compiling
from langevin.studies.statistics import cost_of
from langevin.studies.terms import Size
from langevin.studies.work import DECODING, Outcome, finished, read_json, work, write_json

GIB = 2**30
A_STEP = 4 * 16  # tokens


def test_a_run_that_shares_is_the_run_alone_without_its_times(tmp_path: Path) -> None:
    one = plan(tmp_path, seeds=(0,), shape={"dropout": 0.1})
    shared, alone = (run_jobs(one, tmp_path / str(how), how)[0] for how in (True, False))
    assert [work(job).status for job in (shared, alone)] == ["done", "done"]
    ours, theirs = ((read_json(job.record) or {}) for job in (shared, alone))
    assert ours["values"] == theirs["values"]
    assert [row["loss"] for row in ours["curve"]] == [row["loss"] for row in theirs["curve"]]
    assert theirs["cost"]["tokens_per_second"] > 0
    for key in ("seconds", "tokens_per_second", "peak_memory_bytes", "decode_ms_per_token"):
        assert ours["cost"][key] is None  # it would be that of all together


def test_a_run_that_was_shared_stays_without_times(tmp_path: Path) -> None:
    """Even if it was killed then, and goes on alone."""
    job = run_jobs(plan(tmp_path, seeds=(0,)), tmp_path / "cmp", shared=True)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("langevin.studies.work.conclude", lambda *_: pytest.fail("it was killed"))
        with pytest.raises(pytest.fail.Exception):
            work(job)
    assert work(replace(job, shared=False)).status == "done"
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Properties", (), {"total_memory": 80 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr("os.cpu_count", lambda: 16)


@pytest.mark.parametrize(
    ("flops", "parameters", "asked", "workers"),
    [
        (1e6, 1_000_000, None, 4),
        (0.9 * BUSY / A_STEP, 1_000_000, None, 4),
        (1.1 * BUSY / A_STEP, 1_000_000, None, 1),  # a step that fills the GPU
        (1e6, 1_000_000_000, None, 3),  # what its memory holds
        (1e6, 4_000_000_000, None, 1),
        (1e12, 1_000_000, 3, 3),  # too large to share, but it was asked for
        (1e6, 1_000_000, 1, 1),
        (1e6, 1_000_000, 0, 0),
    ],
)
def test_a_gpu_is_divided_by_its_time_and_memory_or_as_the_user_says(
    gpu: None, flops: float, parameters: int, asked: int | None, workers: int, tmp_path: Path
) -> None:
    sizes = {"softmax": Size(parameters, flops, 256), "small": Size(10, 10.0, 256)}
    assert divide(plan(tmp_path, seeds=(0, 1, 2)), sizes, "cuda", asked) == workers


def test_no_more_runs_than_there_are_or_the_host_can_feed(
    gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"softmax": Size(1_000_000, 1e6, 256)}
    assert divide(plan(tmp_path, seeds=(0,)), sizes, "cuda", None) == 2
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert divide(plan(tmp_path, seeds=(0, 1, 2)), sizes, "cuda", None) == 1


def test_the_memory_of_a_run_grows_with_its_batch_its_model_and_its_vocabulary(tmp_path: Path) -> None:
    def taken(parameters: int = 10**6, vocabulary: int = 256, **shape: int) -> float:
        return run_bytes(plan(tmp_path, shape=shape), Size(parameters, 1e6, vocabulary))

    assert taken() < min(taken(batch=64), taken(layers=8), taken(2 * 10**6), taken(vocabulary=50_257))


def test_short_runs_are_not_compiled(tmp_path: Path) -> None:
    short: Plan = plan(tmp_path, seeds=(0, 1), shape={"steps": 100})
    assert worth_compiling(short, Size(1, 1e9, 512)) == "off"
    assert worth_compiling(short, Size(1, 1e9, 50257)) == "loss"
    assert worth_compiling(short, Size(1, 1.1 * WORTH / (2 * 2 * 100 * A_STEP), 512)) == "on"
