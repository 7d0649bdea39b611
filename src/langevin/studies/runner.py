"""Make a comparison: plan, tune, train every arm on every seed, measure, and write the report.

    results = compare(plan, Path("runs/cmp"))

It may be stopped or killed at any point: the same call on the same folder goes on, and ends with the same
results but for times. The same call with more seeds adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from langevin.environment import pick_device
from langevin.runs.files import write_json
from langevin.runs.folder import Lock
from langevin.studies import terms
from langevin.studies.collect import BEST, TUNED, collect, data_facts, run_folder, trial_folder, tuned
from langevin.studies.display import Display
from langevin.studies.measuring import EVALUATED, was_shared
from langevin.studies.plan import TUNING_SEED, Plan, begun, settle
from langevin.studies.report import write_report
from langevin.studies.sharing import divide, spelled_out
from langevin.studies.work import Job, finished, recorded, tidied, work
from langevin.studies.workers import Began, Ended, Tick, Workers
from langevin.tasks import TASKS
from langevin.training.signals import heeding_signals

On = Literal["local", "ray"]


class Crew(Protocol):
    """Whoever makes the runs."""

    def run(self, jobs: list[Job], began: Began, ended: Ended, tick: Tick) -> None: ...


def compare(
    plan: Plan,
    folder: Path,
    *,
    workers: int | None = None,
    on: On = "local",
    quiet: bool = False,
    finish: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    hired: Workers | None = None,
) -> dict[str, Any]:
    """Make or go on with the comparison in a folder; its results, whose report is written there.

    workers: processes; None for one a core on a CPU, or as many as share a GPU; 0 for this process itself.
    finish: a last change to the results before the report is written.
    hired: processes that serve several comparisons, so as to start only once.
    """
    device = pick_device(plan.settings.device)
    plan = replace(plan, settings=replace(plan.settings, device=device))
    data = TASKS.parse(plan.settings.task).prepare(plan.settings, progress=not quiet)
    if plan.equalise:
        plan = terms.equalised(plan, data)
    sizes = terms.sizes(plan, data)
    plan = spelled_out(plan, sizes, device, begun(folder))
    display = Display(quiet)
    for sentence in terms.unequal(sizes):
        hint = "" if plan.equalise else "; --equalise makes them equal"
        display.say(sentence + hint, style="yellow")
    workers = divide(plan, sizes, device, workers)
    if on == "ray" and device != "cpu":
        workers = 1  # each has a GPU to itself
    at_once = max(1, min(workers, len(plan.arms) * len(plan.seeds)))
    shared = at_once > 1 and device != "cpu"
    about = {
        "data": data_facts(data.manifest, plan.settings.data),
        "commands": [plan.command()],
        "workers": at_once,
        "added": [],
    }
    with Lock(folder):
        about = settle(plan, folder, about)
        if shared:
            display.say(f"up to {at_once} runs at a time share the GPU")
        with heeding_signals(_interrupt), crew(workers, plan, device, on, hired) as chosen:
            try:
                _make(plan, folder, shared, chosen, display)
            finally:
                display.stop()
        results = collect(plan, folder, about, sizes)
        results = finish(results) if finish else results
        write_report(results, folder)
    return results


def _make(plan: Plan, folder: Path, shared: bool, crew: Crew, display: Display) -> None:
    """Every job of the plan that is not done yet, in parts; each needs the one before."""

    def carry_out(name: str, jobs: list[Job]) -> None:
        left = [job for job in jobs if not finished(job)]
        if left:
            if len(left) < len(jobs):
                display.say(f"{name}: {len(jobs) - len(left)} of {len(jobs)} are done already")
            display.phase(name, left)
            crew.run(left, display.began, display.ended, display.tick)

    if plan.tune:
        if not (folder / TUNED).exists():
            carry_out("tuning", trial_jobs(plan, folder))
            write_json(folder / TUNED, tuned(plan, folder)[1])
        plan, _ = tuned(plan, folder)
    jobs = run_jobs(plan, folder, shared)
    carry_out("comparing", jobs)
    if plan.settings.keep_evaluated:
        carry_out("matching", matching_jobs(plan, jobs))
    carry_out("timing", timing_jobs(jobs))


def trial_jobs(plan: Plan, folder: Path) -> list[Job]:
    """The same number of learning rates for every arm, with the budget of a run and a seed of their own."""
    return [
        Job(
            f"{arm.name} lr {rate:g}",
            trial_folder(folder, arm, rate),
            plan.config(arm, TUNING_SEED, lr=rate, keep_evaluated=False),
            plan.test_tokens,
            plan.threads,
            trial=True,
        )
        for rate in plan.learning_rates()
        for arm in plan.arms
    ]


def run_jobs(plan: Plan, folder: Path, shared: bool = False) -> list[Job]:
    """Seed by seed, so that what is finished is always nearly paired; shared: several on one GPU."""
    return [
        Job(
            f"{arm.name} seed {seed}",
            run_folder(folder, arm, seed),
            plan.config(arm, seed),
            plan.test_tokens,
            plan.threads,
            shared=shared,
        )
        for seed in plan.seeds
        for arm in plan.arms
    ]


def matching_jobs(plan: Plan, jobs: list[Job]) -> list[Job]:
    """The finished runs at the loss they all reached, by the models they kept on the way."""
    done = [job for job in jobs if finished(job)]
    records = [recorded(job.record, BEST) for job in done]
    loss = max((record["best"]["valid_loss"] for record in records if record), default=None)
    if loss is None or len(plan.arms) < 2:
        return []
    return [
        replace(job, label=f"{job.label} at loss {loss:.4f}", at_loss=loss)
        for job in done
        if (job.folder / EVALUATED).is_dir()
    ]


def timing_jobs(jobs: list[Job]) -> list[Job]:
    """A finished run of each arm that shared its GPU, as a pattern; and decoding by one of each arm."""
    first: dict[Path, Job] = {}
    for job in jobs:
        if finished(job) and was_shared(job.folder):
            first.setdefault(job.folder.parent, job)
    found = [replace(job, label=f"{job.label} alone", timing=True) for job in first.values()]
    if found and found[0].config.context > 1:
        runs = tuple(job.folder for job in first.values())
        found.append(replace(next(iter(first.values())), label="decoding in turns", decoding=runs))
    return found


@contextmanager
def crew(workers: int, plan: Plan, device: str, on: On, hired: Workers | None) -> Iterator[Crew]:
    """Who makes the runs: processes here, this process, or a Ray cluster."""
    if on == "ray":
        from langevin.studies.cluster import Cluster

        with Cluster(plan.threads, device != "cpu") as cluster:
            yield cluster
    elif workers == 0:
        yield Here()
    elif hired is not None:
        hired.count = workers
        yield hired
    else:
        with Workers(workers, plan.threads) as crew:
            yield crew


class Here:
    """This process, one run after another."""

    def run(self, jobs: list[Job], began: Began, ended: Ended, tick: Tick) -> None:
        for job in jobs:
            began(job)
            outcome = work(job)
            if outcome.status == "stopped":
                raise KeyboardInterrupt
            ended(job, outcome)
            tidied(job)
            tick()


def _interrupt(number: int) -> None:
    """SIGTERM is as good as an interruption from the keyboard."""
    raise KeyboardInterrupt
