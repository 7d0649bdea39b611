"""The training loop.

The data order is a pure function of (seed, step) and every random stream is in the checkpoint, and so a run
that was killed and resumed ends, on a CPU, with the same bits as one that was not.

B batch, L context.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from langevin.data import Corpus
from langevin.errors import WorkError
from langevin.objectives import ar
from langevin.training import checkpoint
from langevin.training.config import TrainConfig
from langevin.training.optim import factor, optimizers, set_rate
from langevin.training.progress import Progress

LOOKS = 10  # evaluations in a run, unless eval_every says otherwise


@dataclass
class State:
    """What a run remembers besides weights."""

    step: int = 0
    total: int = 0
    best_loss: float = math.inf
    best_step: int | None = None
    bad_steps: int = 0  # skipped in all
    bad_in_a_row: int = 0
    seconds: float = 0.0  # with evaluations, over all sessions
    losses: list[Tensor] = field(default_factory=list)


class Trainer:
    """One run: a model, its data and where they stand."""

    def __init__(self, config: TrainConfig, model: Any, corpus: Corpus, folder: Path) -> None:
        self.config, self.model, self.corpus, self.folder = config, model, corpus, folder
        self.device = next(model.parameters()).device
        self.optimizers = optimizers(model, config)
        self.forward = torch.compile(model) if config.compile else model
        self.tokens = {split: corpus.device_tokens(split, self.device) for split in ("train", "valid")}
        self.average: dict[str, Tensor] | None = None
        if config.ema:
            self.average = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.state = State()
        self.stopped_by: int | None = None

    def run(self, progress: Progress) -> State:
        """Train to the end of the budget, or until a signal asks to stop."""
        state, config = self.state, self.config
        if not state.total:
            state.total = self._budget()
        every = config.eval_every or max(1, math.ceil(state.total / LOOKS))
        save_every = config.checkpoint_every or every
        progress.start(state, self)
        with self._signals():
            while state.step < state.total and self.stopped_by is None:
                begin = time.perf_counter()
                state.losses.append(self._step(state.step))
                state.step += 1
                progress.step(state, self)
                if state.step % every == 0 or state.step == state.total:
                    self._evaluate(progress)
                state.seconds += time.perf_counter() - begin
                if config.minutes is not None and state.step % every == 0:
                    state.total = self._within(config.minutes)
                last = state.step >= state.total
                if state.step % save_every == 0 or last or self.stopped_by is not None:
                    self.save()
        progress.stop()
        return state

    def save(self) -> None:
        state = self.state
        kept = {
            name: getattr(state, name)
            for name in ("total", "best_loss", "best_step", "bad_steps", "bad_in_a_row", "seconds")
        }
        folder = self.folder / "checkpoints"
        checkpoint.save(folder, state.step, self.model, self.optimizers, kept, self.average)
        checkpoint.prune(folder, self.config.keep, state.best_step)

    def resume(self, path: Path) -> None:
        values, average = checkpoint.load(path, self.model, self.optimizers)
        self.state = State(**values)
        if average is not None:
            self.average = {name: x.to(self.device) for name, x in average.items()}

    def batch(self, split: str, starts: Any) -> Tensor:
        """Windows of context + 1 tokens, gathered on the device."""
        tokens = self.tokens[split]
        index = torch.as_tensor(starts, device=self.device)[:, None]
        index = index + torch.arange(self.config.context + 1, device=self.device)
        return tokens[index % len(tokens)].long()

    def _step(self, step: int) -> Tensor:
        config = self.config
        set_rate(self.optimizers, factor(step, self.state.total, config))
        starts = self.corpus.windows(
            "train", step, seed=config.seed, batch=config.batch, context=config.context
        )
        total = torch.zeros((), device=self.device)
        count = config.batch * config.context
        for part in self.batch("train", starts).chunk(config.accumulate):
            loss = self.loss(part, count)
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        if bool(norm.isfinite()):
            for optimizer in self.optimizers:
                optimizer.step()
            self.state.bad_in_a_row = 0
            self._update_average()
        else:
            self._skip(step, starts)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return total

    def loss(self, tokens: Tensor, count: int | None = None) -> Tensor:
        inputs, targets = ar.shift(tokens)
        with self._precision():
            logits = self.forward(input_ids=inputs, use_cache=False).logits
        return ar.loss(logits, targets, total=count)

    def _skip(self, step: int, starts: Any) -> None:
        """Leave a step out whose gradient is not finite; too many in a row end the run."""
        self.state.bad_steps += 1
        self.state.bad_in_a_row += 1
        if self.state.bad_in_a_row >= self.config.max_bad_steps:
            raise WorkError(
                f"the gradient was not finite for {self.state.bad_in_a_row} steps, the last being step "
                f"{step} (windows starting at {[int(s) for s in starts[:4]]} ...)",
                "Lower --lr, raise --warmup, or use --precision fp32; the last checkpoint is whole.",
            )

    @torch.no_grad()
    def _update_average(self) -> None:
        if self.average is not None:
            own = dict(self.model.named_parameters())
            averaged = list(self.average.values())
            torch._foreach_lerp_(averaged, [own[n] for n in self.average], 1 - self.config.ema)

    def _evaluate(self, progress: Progress) -> None:
        state = self.state
        with self.averaged():
            loss = self.valid_loss()
            better = loss < state.best_loss
            if better:
                state.best_loss, state.best_step = loss, state.step
                progress.best(self)
        progress.evaluated(state, loss)

    @torch.no_grad()
    def valid_loss(self) -> float:
        """Mean loss on the first eval_tokens validation tokens, in windows without overlap."""
        context, tokens = self.config.context, self.tokens["valid"]
        windows = max(1, min(self.config.eval_tokens, len(tokens) - 1) // context)
        starts = torch.arange(windows) * context
        self.model.eval()
        losses = [
            self.loss(self.batch("valid", part)) * len(part) for part in starts.split(self.config.batch)
        ]
        self.model.train()
        return float(torch.stack(losses).sum()) / windows

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights in the place of the model's, where there are such."""
        if self.average is None:
            yield
            return
        own = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self._put(self.average)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])

    def _precision(self) -> Any:
        if self.config.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _within(self, minutes: float) -> int:
        """The steps that fit into the minutes, by the pace so far: a machine may slow down."""
        left = minutes * 60 - self.state.seconds
        return max(self.state.step, int(self.state.step + left * self.state.step / self.state.seconds))

    def _budget(self) -> int:
        """Steps the budget allows; minutes are turned into steps by timing a few first."""
        config = self.config
        a_step = config.batch * config.context
        if config.steps is not None:
            return config.steps
        if config.minutes is None:
            return max(1, math.ceil((config.tokens or 10_000_000) / a_step))
        random = torch.get_rng_state()
        times = []
        for attempt in range(4):
            begin = time.perf_counter()
            starts = torch.arange(config.batch) * config.context % max(1, len(self.tokens["train"]))
            for part in self.batch("train", starts).chunk(config.accumulate):
                self.loss(part, a_step).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), config.clip).item()
            if attempt:  # the first one warms up
                times.append(time.perf_counter() - begin)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(random)
        a_look = min(config.eval_tokens, len(self.tokens["valid"])) / a_step / 3
        return max(20, int(config.minutes * 60 / sorted(times)[1] - LOOKS * a_look))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the loop after the step in hand, with a checkpoint."""

        def stop(number: int, frame: FrameType | None) -> None:
            self.stopped_by = number

        try:
            before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us handles signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
