"""How many parts a step takes and how many steps a budget has, found by trying on the device itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from langevin.data.feed import chunks
from langevin.errors import WorkError
from langevin.training.checkpoint import random_state, set_random_state

if TYPE_CHECKING:
    from langevin.training.loop import Trainer

LOOKS = 10  # evaluations in a run, unless eval_every says otherwise


def budget(trainer: Trainer) -> int:
    """Steps the budget allows; minutes are turned into steps by timing a few first."""
    config = trainer.config
    if config.steps is not None:
        return config.steps
    if config.minutes is None:
        return max(1, math.ceil((config.tokens or 10_000_000) / trainer.a_step))
    a_look = config.eval_tokens / trainer.a_step / 3
    return max(20, int(config.minutes * 60 / seconds_a_step(trainer) - LOOKS * a_look))


def within(trainer: Trainer, minutes: float) -> int:
    """The steps that fit into the minutes, by the pace so far: a machine may slow down."""
    state = trainer.state
    left = minutes * 60 - state.seconds
    return max(state.step, int(state.step + left * state.step / state.seconds))


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
    fresh = not any(optimizer.state for optimizer in trainer.update.optimizers)

    def fits(parts: int) -> bool:
        try:
            # Room for the moments, where they are not there yet.
            held = [torch.empty_like(p) for p in trainer.model.parameters() for _ in range(2 * fresh)]
            _try(trainer, parts)
            del held
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
    trainer.feed.put(0)
    trainer.backward(chunks(trainer.feed.batch(), parts)[0])
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
