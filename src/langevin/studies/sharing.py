"""Several runs on one GPU: small models leave most of it idle, and the host's part leaves it all.

Small runs take turns in one process: each has its own stream, its steps are replayed as graphs that nothing
waits for, and so the kernels of several are on the GPU at a time, which those of several processes are not.
Other processes measure what is trained. Larger ones have a process each, so that the host's part of one
goes on beside the GPU's of another. Compiled arms have processes of their own too, so that they compile at
the same time; their seeds take turns, or come one after another, and share what was compiled.
"""

from __future__ import annotations

import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from langevin.errors import one_line
from langevin.studies.plan import Plan
from langevin.studies.work import (
    Job,
    Outcome,
    conclude,
    fail,
    finished,
    forget,
    started,
    tidied,
    work,
)

BUSY = 5e12  # FLOPs of a step that leave no room for another run
FULL = 1e12  # FLOPs of the steps in turns that fill a GPU
TURNS = 2  # fewer runs than this many in turns are not worth it
WORTH = 1e16  # FLOPs of a comparison from which compiling pays: it takes half a minute or more
LARGE = 8192  # a vocabulary from which compiling the loss pays: it takes seconds
MOST = 16  # runs at a time
PART = 0.6  # of the memory of the GPU, for all runs together
OTHERS = 3  # processes besides one that trains
END = object()
BEGAN = Outcome("began")

Compile = Literal["on", "loss", "off"]
Told = Callable[[Job, Outcome], None]


@dataclass(frozen=True)
class Share:
    """How a device is divided among runs."""

    workers: int = 1  # processes
    trainers: int = 1  # of them that may train at a time; the others measure
    runs: int = 1  # that take turns in a process
    by_arm: bool = False  # only runs of one arm take turns
    shared: bool = False  # times and memory of a run are not its own

    @property
    def at_once(self) -> int:
        return max(1, self.trainers * self.runs)


def share(plan: Plan, flops_per_token: float, parameters: int, vocab_size: int, memory: float) -> Share:
    """As many runs at once as fill a GPU of so much memory, and fit into it."""
    config, every = plan.settings, len(plan.arms) * len(plan.seeds)
    step = flops_per_token * config.batch * config.context
    fit = min(MOST, every, math.floor(PART * memory / run_bytes(plan, parameters, vocab_size)))
    if step > BUSY or fit < 2:
        return Share()
    cores = os.cpu_count() or 1
    if config.compile == "on":
        workers = max(1, min(len(plan.arms), fit, cores // 2))
        runs = max(1, min(len(plan.seeds), fit // workers))
        return Share(workers, workers, runs, by_arm=True, shared=workers * runs > 1)
    workers = 1 + min(OTHERS, cores // 4)
    if step * TURNS < FULL:
        return Share(workers, 1, min(fit, math.ceil(FULL / step)), shared=True)
    workers = min(workers, fit)
    return Share(workers, workers, shared=workers > 1)


def run_bytes(plan: Plan, parameters: int, vocab_size: int) -> float:
    """Roughly: weights, gradients and moments; a batch's logits three times; 40 numbers a token, layer and
    channel for the backward pass; and what CUDA takes."""
    config = plan.settings
    tokens = config.batch * config.context
    return 16 * parameters + tokens * (10 * vocab_size + 80 * config.layers * config.width) + 2**29


def worth_compiling(plan: Plan, flops_per_token: float, vocab_size: int) -> Compile:
    """Models, where all runs together are long enough to gain what it costs (arms compile side by side);
    else the loss, where that is much of the work."""
    config = plan.settings
    tokens = config.tokens or config.batch * config.context * (config.steps or 0)
    if flops_per_token * tokens * len(plan.seeds) * len(plan.arms) > WORTH:
        return "on"
    return "loss" if vocab_size >= LARGE else "off"


def bundles(jobs: list[Job], share: Share) -> list[list[Job]]:
    """The jobs that one process is given at a time: one, all of an arm, or all."""
    if share.runs == 1 and not share.by_arm:
        return [[job] for job in jobs]
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        compiled_as = replace(job.config, seed=0, lr=1.0) if share.by_arm else None
        groups.setdefault(compiled_as, []).append(job)
    return list(groups.values())


def work_together(jobs: list[Job], told: Told, at_once: int = MOST) -> None:
    """Train several runs in turns of a step each, so many at a time; they are left to be measured by
    whoever has time. What is told: that a run begins, and what came of it."""
    if len(jobs) == 1:
        told(jobs[0], BEGAN)
        told(jobs[0], work(jobs[0]))
        tidied(jobs[0])  # after it is told: on a broken GPU it fails
        return
    import torch

    from langevin.training.signals import heeding_signals

    torch.set_num_threads(jobs[0].threads)
    training = _Training()
    with heeding_signals(training.stop):
        for job, outcome in training.take_turns(jobs, at_once):
            told(job, outcome)
    tidied(jobs[0])


class _Chance:
    """The random streams of one run among several in a process.

    On a GPU it is a state of the generator that no other run has: graphs of runs at the same time would
    otherwise read the numbers of one another.
    """

    def __init__(self, device: str) -> None:
        import torch

        self.generator: Any = None
        self.cpu = torch.get_rng_state()
        if device.startswith("cuda"):
            torch.cuda.init()
            index = torch.device(device).index
            index = torch.cuda.current_device() if index is None else index
            self.generator = torch.cuda.default_generators[index]
            self.gpu = self.generator.clone_state()

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Random numbers are this run's, and afterwards what they were before."""
        import torch

        cpu, gpu = torch.get_rng_state(), None
        torch.set_rng_state(self.cpu)
        if self.generator is not None:
            gpu = self.generator.graphsafe_get_state()
            self.generator.graphsafe_set_state(self.gpu)
        try:
            yield
        finally:
            self.cpu = torch.get_rng_state()
            torch.set_rng_state(cpu)
            if self.generator is not None:
                self.generator.graphsafe_set_state(gpu)


class _Training:
    """Runs that train at the same time."""

    def __init__(self) -> None:
        self.running: dict[Job, tuple[Any, Iterator[None]]] = {}
        self.chance: dict[Job, _Chance] = {}
        self.asked = False  # to stop

    def take_turns(self, jobs: list[Job], at_once: int) -> Iterator[tuple[Job, Outcome]]:
        """Train all to their ends, each with random numbers of its own; gives each when it begins, which
        the next does when one has ended, and when it ends."""
        waiting = deque(jobs)
        while self.running or waiting:
            while waiting and (self.asked or len(self.running) < at_once):
                job = waiting.popleft()
                if self.asked:
                    yield job, Outcome("stopped")
                    continue
                yield job, BEGAN
                outcome = self._begin(job)
                if outcome is not None:
                    yield job, outcome
                    forget()
            for job in list(self.running):
                outcome = self._turn(job)
                if outcome is not None:
                    del self.running[job], self.chance[job]
                    yield job, outcome
                    forget()

    def _begin(self, job: Job) -> Outcome | None:
        """Get a run ready; what came of it, if it does not train."""
        from langevin.environment import pick_device

        if finished(job):
            return Outcome("done")
        try:
            chance = _Chance(pick_device(job.config.device))
            with chance.ours():
                trainer, progress = started(job)
        except Exception as error:
            return fail(job, one_line(error))
        self.chance[job], self.running[job] = chance, (trainer, trainer.steps(progress))
        if self.asked:  # meanwhile
            trainer.ask(signal.SIGTERM)
        return None

    def _turn(self, job: Job) -> Outcome | None:
        """One step of a run; what came of it, if it was the last."""
        trainer, steps = self.running[job]
        try:
            with self.chance[job].ours():
                if next(steps, END) is not END:
                    return None
            if trainer.stopped_by is not None:
                return Outcome("stopped")
            # Of a trial nothing is measured, so it is done; of a run much is.
            return conclude(job) if job.trial else Outcome("trained")
        except Exception as error:
            return fail(job, one_line(error))

    def stop(self, number: int) -> None:
        """Every run saves after the step in hand, and none begins."""
        self.asked = True
        for trainer, _ in list(self.running.values()):
            trainer.ask(number)
