"""How many parts a step takes, how many steps a budget has and how much of it evaluations take, found by
trying on the device itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from langevin.errors import WorkError
from langevin.settings import TrainConfig
from langevin.tasks import Task
from langevin.training.checkpoint import random_state, set_random_state

if TYPE_CHECKING:
    from langevin.training.loop import Trainer

LOOKS = 10  # evaluations in a run, unless eval_every says otherwise
LEAST = 3  # evaluations in a run of a few minutes
SHARE = 0.05  # of a budget in minutes that evaluations take
AGAIN = 5.0  # seconds between two estimates of the pace
SETTLED = 5  # steps before the first: those before may compile


def budget(trainer: Trainer) -> int:
    """Steps the budget allows; minutes are turned into steps by timing a few first."""
    config = trainer.config
    if config.steps is not None:
        return config.steps
    if config.minutes is None:
        return max(1, math.ceil(units(config, trainer.task, trainer.data) / trainer.a_step))
    return max(1, int((1 - SHARE) * config.minutes * 60 / seconds_a_step(trainer)))


def units(config: TrainConfig, task: Task, data: Any) -> int:
    """What a budget in tokens, in epochs or as usual is in the unit of a task."""
    epochs = task.epochs if config.epochs is None and config.tokens is None else config.epochs
    return config.tokens or (task.budget if epochs is None else round(epochs * task.an_epoch(data, config)))


class Pace:
    """The steps that fit into so many minutes, by the pace of the last few seconds, which may change."""

    def __init__(self, minutes: float, first: int) -> None:
        self.seconds, self.first = minutes * 60, first
        self.since: tuple[int, float] | None = None  # step and seconds of training when it was last told

    def total(self, step: int, spent: float, trained: float) -> int | None:
        """Told every step: the seconds spent of the budget, and those of training; None: too early."""
        if spent >= self.seconds:
            return step
        if self.since is None:
            self.since = (step, trained) if step >= self.first + SETTLED else None
            return None
        steps, seconds = step - self.since[0], trained - self.since[1]
        if seconds < AGAIN:
            return None
        self.since = (step, trained)
        return max(step, int(step + (1 - SHARE) * (self.seconds - spent) * steps / seconds))


def looks_of(trainer: Trainer) -> tuple[int, int]:
    """How many evaluations there are, and at how many of the validation batches each looks."""
    config, batches = trainer.config, trainer.feed.held_out
    if config.minutes is None or config.eval_every is not None:
        return LOOKS, len(batches)
    times = []
    trainer.model.eval()
    with torch.no_grad():
        for _ in range(2):  # the first one warms up
            begin = time.perf_counter()
            float(trainer.loss(batches[0])[0])
            times.append(time.perf_counter() - begin)
    trainer.model.train()
    return looks_within(config.minutes * 60, times[-1], len(batches))


def looks_within(seconds: float, a_batch: float, batches: int) -> tuple[int, int]:
    """The looks, and the batches of each, that take a SHARE of the time: ten looks at all batches; where
    that is too much fewer looks, down to three; where these are, fewer batches."""
    room = SHARE * seconds / a_batch
    looks = min(LOOKS, max(LEAST, int(room / batches)))
    return looks, max(1, min(batches, int(room / looks)))


def seconds_a_step(trainer: Trainer) -> float:
    """The time of a backward pass over a batch, the middle of three."""
    trainer.parts = trainer.parts or fitting_parts(trainer)
    times = []
    for attempt in range(4):
        begin = time.perf_counter()
        _try(trainer, trainer.parts)
        if attempt:  # the first one warms up
            times.append((time.perf_counter() - begin) * trainer.parts)
    return sorted(times)[1]


def fitting_parts(trainer: Trainer) -> int:
    """As few parts a step as fit into the memory of the device."""
    rows = trainer.feed.rows
    if trainer.config.accumulate is not None or not trainer.on_gpu or trainer.world.size > 1:
        return min(rows, trainer.config.accumulate or 1)

    def fits(parts: int) -> bool:
        try:
            _try(trainer, parts)
        except torch.OutOfMemoryError:
            trainer.update.forget_gradients()
            torch.cuda.empty_cache()
            return False
        return True

    parts = fewest_parts(rows, fits)
    torch.cuda.reset_peak_memory_stats(trainer.device)
    return parts


def _try(trainer: Trainer, parts: int) -> None:
    """A backward pass that leaves no trace, finished when this returns."""
    random = random_state()
    trainer.put(trainer.feed.widest)
    trainer.backward(trainer.batch(parts)[0])
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    float(nn.utils.get_total_norm(gradients))
    trainer.update.forget_gradients()
    set_random_state(random)


def fewest_parts(rows: int, fits: Callable[[int], bool]) -> int:
    """The fewest equal parts of a batch that fit, doubling: 1, 2, 4, ... or what divides the rows next."""
    parts = 1
    while not fits(parts):
        if parts >= rows:
            raise WorkError(
                "not even one sequence a part fits into the memory of the device",
                "Use --checkpointing, a shorter --context or a smaller model.",
            )
        parts = next(n for n in range(min(parts * 2, rows), rows + 1) if rows % n == 0)
    return parts
