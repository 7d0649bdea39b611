"""Several runs on one GPU: small models leave most of it idle.

Runs of one arm share a process, and with it what was compiled: each has its own stream, its steps are
replayed as graphs that nothing waits for, and the runs take turns at launching them. Arms have processes of
their own, so that they compile at the same time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from langevin.studies.plan import Plan
from langevin.studies.work import Job, Outcome, conclude, fail, finished, one_line, tidied, work

BUSY = 5e12  # FLOPs of a step that fill a GPU by itself
MOST = 16  # runs at once
PART = 0.6  # of the memory of the GPU, for all runs together


@dataclass(frozen=True)
class Share:
    """How a GPU is divided: processes, and runs in each."""

    workers: int = 1
    runs: int = 1


def share(plan: Plan, flops_per_token: float, parameters: int, vocab_size: int, memory: float) -> Share:
    """As many runs at once as the memory holds, if one alone leaves the GPU idle."""
    config = plan.settings
    tokens = config.batch * config.context
    if flops_per_token * tokens > BUSY:
        return Share()
    fit = math.floor(PART * memory / run_bytes(plan, parameters, vocab_size))
    at_once = max(1, min(MOST, fit, len(plan.arms) * len(plan.seeds)))
    cores = os.cpu_count() or 1
    workers = max(1, min(len(plan.arms), at_once, cores // 2))
    return Share(workers, max(1, min(len(plan.seeds), at_once // workers)))


def run_bytes(plan: Plan, parameters: int, vocab_size: int) -> float:
    """Roughly: weights, gradients and moments; a batch's logits three times; 40 numbers a token, layer and
    channel for the backward pass; and what CUDA takes."""
    config = plan.settings
    tokens = config.batch * config.context
    return 16 * parameters + tokens * (10 * vocab_size + 80 * config.layers * config.width) + 2**29


def bundles(jobs: list[Job], size: int) -> list[list[Job]]:
    """Jobs of one arm together, `size` at a time; measurements one by one."""
    arms: dict[Any, list[Job]] = {}
    for job in jobs:
        alone = job.at_loss is not None
        arms.setdefault((replace(job.config, seed=0), job.folder if alone else None), []).append(job)
    return [same[i : i + size] for same in arms.values() for i in range(0, len(same), size)]


def work_together(jobs: list[Job], ended: Callable[[Job, Outcome], None]) -> None:
    """Make several runs in turns of a step each; each is measured when all are trained."""
    if len(jobs) == 1:
        ended(jobs[0], work(jobs[0]))
        return
    import torch

    from langevin.training.signals import heeding_signals

    torch.set_num_threads(jobs[0].threads)
    training = _Training()
    for job in jobs:
        if finished(job):
            ended(job, Outcome("done"))
            continue
        try:
            training.add(job)
        except Exception as error:
            ended(job, fail(job, one_line(error)))
    with heeding_signals(training.stop):
        for job, cause in training.take_turns():
            ended(job, fail(job, cause))
    for job, stopped, run in training.trained:
        try:
            outcome = Outcome("stopped") if stopped else conclude(job, run, training.device, shared=True)
        except Exception as error:
            outcome = fail(job, one_line(error))
        ended(job, outcome)
    tidied()


class _Training:
    """Runs that train at the same time."""

    def __init__(self) -> None:
        self.running: dict[Job, tuple[Any, Iterator[None]]] = {}
        self.random: dict[Job, dict[str, Any]] = {}
        self.trained: list[tuple[Job, bool, Any]] = []
        self.device = "cpu"

    def add(self, job: Job) -> None:
        from langevin.runs import quiet_transformers
        from langevin.studies.work import fresh
        from langevin.training.checkpoint import random_state
        from langevin.training.start import pick_device, prepared

        quiet_transformers()
        fresh(job)
        self.device = pick_device(job.config.device)
        trainer, progress = prepared(job.config, job.folder, resume=True, quiet=True)
        self.running[job] = (trainer, trainer.steps(progress))
        self.random[job] = random_state()

    def take_turns(self) -> Iterator[tuple[Job, str]]:
        """Train all to their ends, each with random numbers of its own; gives those that fail, and why."""
        from langevin.runs import Run
        from langevin.training.checkpoint import random_state, set_random_state

        while self.running:
            for job, (trainer, steps) in list(self.running.items()):
                try:
                    set_random_state(self.random[job])
                    next(steps)
                    self.random[job] = random_state()
                    continue
                except StopIteration:
                    run = Run(trainer.folder, trainer.config)
                    self.trained.append((job, trainer.stopped_by is not None, run))
                except Exception as error:
                    yield job, one_line(error)
                del self.running[job]

    def stop(self, signal: int) -> None:
        """Every run saves after the step in hand."""
        for trainer, _ in self.running.values():
            trainer.ask(signal)
