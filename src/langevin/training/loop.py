"""The training loop.

The data order is a pure function of (seed, step) and every random stream is in the checkpoint, and so a run
that was killed and resumed ends, on a CPU, with the same bits as one that was not. On a GPU the host only
launches: batches are gathered from tokens that live there, steps are replayed as one CUDA graph, and losses
are fetched about once a second.

B batch, L context.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from langevin.data.feed import chunks
from langevin.errors import UsageError, WorkError
from langevin.models.cost import flops_of
from langevin.objectives import OBJECTIVES, Batch, Objective
from langevin.settings import TrainConfig
from langevin.tasks import TASKS
from langevin.training import checkpoint, parallel
from langevin.training.fitting import LOOKS, budget, fitting_parts, within
from langevin.training.graphs import Replayed
from langevin.training.optim import Update, factor, set_rate
from langevin.training.parallel import World
from langevin.training.progress import Progress
from langevin.training.signals import heeding_signals

SAVE_SECONDS = 30.0  # at least so much training between checkpoints, unless checkpoint_every says otherwise
AHEAD = 8  # steps the host may be ahead of a GPU
WARM = 3  # steps before one is captured as a graph


@dataclass
class State:
    """What a run remembers besides weights."""

    step: int = 0
    total: int = 0
    best_loss: float = math.inf
    best_step: int | None = None
    bad_steps: int = 0  # skipped in all
    bad_in_a_row: int = 0
    loss_scale: float | None = None
    good_steps: int = 0  # since the scale of the loss last changed
    seconds: float = 0.0  # with evaluations, over all sessions


class Trainer:
    """One run: a model, its data and where they stand."""

    def __init__(
        self, config: TrainConfig, model: Any, data: Any, folder: Path, world: World | None = None
    ) -> None:
        self.config, self.model, self.data, self.folder = config, model, data, folder
        self.task, self.objective = TASKS.parse(config.task), OBJECTIVES.parse(config.objective)
        self.a_step = self.task.tokens_a_step(config)
        self.world = world or World()
        self.device = next(model.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        if config.batch % self.world.size:
            raise UsageError(
                f"{self.world.size} processes do not divide a batch of {config.batch}",
                "Choose another --batch or number of processes.",
            )
        self.forward: Any = parallel.spread(model, config.parallel, self.world)
        if self.world.size > 1 and config.parallel == "fsdp" and config.optimizer == "muon":
            raise UsageError("muon needs whole matrices, which fsdp does not keep", "Use --parallel ddp.")
        self.update = Update(model, config)
        if config.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        objective = self.objective.with_compiled_loss() if config.compile == "loss" else self.objective
        self.training_loss: Callable[[Batch], tuple[Tensor, Tensor | int]]
        self.training_loss = partial(self._loss, self.forward, objective)
        if config.compile == "on":
            self.training_loss = torch.compile(self.training_loss, dynamic=False)
        self.feed = self.task.feed(data, config, self.device, self.world.share)
        self.lost = torch.zeros(2, device=self.device)  # sum and number of losses since they were read
        self.parts = 0
        own = self.stream if config.graphs and self.world.size == 1 else None
        forget = self.update.forget_gradients
        self.compute = Replayed(self._compute, own, after=WARM, what="steps", clear=forget)
        self.look: Replayed | None = None
        self.looked = torch.zeros(2, device=self.device)  # validation loss, summed, and what it counts
        self.launched: deque[torch.cuda.Event] = deque()
        self.state = State()
        self.asked: int | None = None  # a signal that came
        self.stopped_by: int | None = None  # a signal that all processes heed

    def run(self, progress: Progress) -> State:
        """Train to the end of the budget, or until a signal asks to stop."""
        with heeding_signals(self.ask):
            for _ in self.steps(progress):
                pass
        return self.state

    def steps(self, progress: Progress) -> Generator[None]:
        """Train, giving way after every step: several runs can take turns on one device."""
        config = self.config
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._stream():
            self.parts = fitting_parts(self)
            if not self.state.total and config.steps != 0:
                self.state.total = int(self.world.agree(budget(self)))
            every = config.eval_every or max(1, math.ceil(self.state.total / LOOKS))
            progress.start(self.state, self)
        try:
            yield from self._train(progress, every)
            with self._stream():
                progress.last(self.state, self)
        finally:
            progress.stop()
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _train(self, progress: Progress, every: int) -> Iterator[None]:
        config, saved_at = self.config, time.monotonic()
        if not self.state.total:  # nothing to train: the model as it starts
            with self._stream():
                self._evaluate(progress)
                self.save()
        while self.state.step < self.state.total and self.stopped_by is None:
            with self._stream():
                begin = time.perf_counter()
                self._step(self.state.step)
                self.state.step += 1
                self._heed()
                progress.step(self.state, self)
                looked = self.state.step % every == 0 or self.state.step == self.state.total
                if looked:
                    self._evaluate(progress)
                self.state.seconds += time.perf_counter() - begin
                if config.minutes is not None and self.state.step % every == 0:
                    self.state.total = int(self.world.agree(within(self, config.minutes)))
                if self._due(looked, saved_at):
                    self.save()
                    saved_at = time.monotonic()
            yield

    def _due(self, looked: bool, saved_at: float) -> bool:
        """Whether a checkpoint is to be written now."""
        if self.state.step >= self.state.total or self.stopped_by is not None:
            return True
        if self.config.checkpoint_every is not None:
            return self.state.step % self.config.checkpoint_every == 0
        return looked and bool(self.world.agree(time.monotonic() - saved_at > SAVE_SECONDS))

    def save(self) -> None:
        self.read_counters()
        kept = {name: value for name, value in asdict(self.state).items() if name != "step"}
        folder, update = self.folder / "checkpoints", self.update
        checkpoint.save(
            folder,
            self.state.step,
            self.model,
            update.optimizers,
            kept,
            update.average,
            world=self.world,
        )
        if self.world.first:
            checkpoint.prune(folder, self.config.keep, self.state.best_step, self.state.step)
        self.world.wait()

    def resume(self, path: Path) -> None:
        values, average = checkpoint.load(path, self.model, self.update.optimizers, self.world.rank)
        self.state = State(**values)
        self.update.skipped.copy_(torch.tensor([self.state.bad_steps, self.state.bad_in_a_row]))
        if self.update.scale is not None and self.state.loss_scale is not None:
            self.update.scale.fill_(self.state.loss_scale)
            self.update.good.fill_(self.state.good_steps)
        if average is not None and self.update.average is not None:
            with torch.no_grad():
                for name, x in self.update.average.items():
                    x.copy_(parallel.like(average[name], x))

    def _step(self, step: int) -> None:
        set_rate(self.update.optimizers, factor(step, self.state.total, self.config))
        self.feed.put(step)
        self.compute()
        if self.on_gpu:
            self._keep_close()
        else:
            self.read_counters()

    def _compute(self) -> None:
        """Everything that a step does on the device."""
        self.update.forget_gradients()
        total = torch.zeros((), device=self.device)
        counted: Tensor | int = 0
        parts = chunks(self.feed.batch(), self.parts)
        for i, part in enumerate(parts):
            with parallel.gradients(self.forward, last=i + 1 == len(parts)):
                summed, count = self.backward(part)
            total, counted = total + summed, counted + count
        counted = self.world.summed(counted)
        if isinstance(counted, Tensor):  # else it is what the gradients were divided by
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, self.a_step / counted.clamp_min(1))
        self.update()
        loss = total / counted
        finite = loss.isfinite()
        self.lost += torch.stack([torch.where(finite, loss, 0.0), finite.float()])

    def backward(self, part: Batch) -> tuple[Tensor, Tensor | int]:
        """Add the gradients of a part of a batch, divided by the tokens of a step; its summed loss, and how
        much counts in it."""
        summed, count = self.loss(part)
        scale = self.update.scale
        spread = summed * (self.world.size / self.a_step)  # gradients are averaged over processes
        (spread if scale is None else spread * scale).backward()
        return summed.detach(), count

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor | int]:
        """Of training batches by the compiled model, of others by the plain one: a shape more to compile
        would cost more than it brings."""
        if self.model.training:
            return self.training_loss(batch)
        return self._loss(self.model, self.objective, batch)

    def _loss(self, model: Any, objective: Objective, batch: Batch) -> tuple[Tensor, Tensor | int]:
        with self._precision():
            return objective.loss(model, batch)

    def _keep_close(self) -> None:
        """Let the host be a few steps ahead of the GPU and no more, so that signals and times are true."""
        event = torch.cuda.Event()
        event.record()
        self.launched.append(event)
        if len(self.launched) > AHEAD:
            self.launched.popleft().synchronize()

    def read_counters(self) -> None:
        """Fetch from the device what steps were left out; too many in a row end the run."""
        skipped = self.update.skipped.tolist()
        self.state.bad_steps, self.state.bad_in_a_row = int(skipped[0]), int(skipped[1])
        if self.update.scale is not None:
            self.state.loss_scale = float(self.update.scale)
            self.state.good_steps = int(self.update.good)
        if self.state.bad_in_a_row >= self.config.max_bad_steps:
            last = self.state.step - 1 if self.on_gpu else self.state.step
            raise WorkError(
                f"the gradient was not finite for {self.state.bad_in_a_row} steps, the last being step "
                f"{last} ({self.feed.where(last)})",
                "Lower --lr, raise --warmup, or use --precision fp32; the last checkpoint is whole.",
            )

    def model_flops(self) -> float:
        """Training FLOPs a token."""
        return flops_of(self.model, self.config.context)

    def whole_weights(self) -> dict[str, Tensor] | None:
        """The weights in one piece where they are spread over processes; None: they are."""
        if self.world.size == 1 or self.config.parallel == "ddp":
            return None
        return {name: parallel.whole(x) for name, x in self.model.state_dict().items()}

    def mean_loss(self) -> float:
        """The mean training loss since it was last asked for, of the steps that had one."""
        total, steps = (self.world.agree(x, "sum") for x in self.lost.tolist())
        self.lost.zero_()
        return total / (steps / self.world.size) if steps else math.nan

    def _evaluate(self, progress: Progress) -> None:
        state = self.state
        with self.update.averaged_weights():
            loss = self.world.agree(self.valid_loss())
            if not math.isfinite(loss):
                raise WorkError(
                    f"the validation loss at step {state.step} is {loss}",
                    "Lower --lr or use --precision fp32; the last checkpoint is whole.",
                )
            if loss < state.best_loss:
                state.best_loss, state.best_step = loss, state.step
                progress.best(self)
            if self.config.keep_evaluated:
                progress.keep(self, self.folder / "evaluated" / f"step-{state.step}")
        progress.evaluated(state, self, loss)

    def valid_loss(self) -> float:
        """Mean loss on the validation batches that the task looks at while it trains."""
        if self.look is None and self.compute.graph is not None:
            pool = self.compute.graph.pool()
            self.look = Replayed(self._look, self.stream, after=1, what="evaluations", pool=pool)
        self.model.eval()
        (self.look or self._look)()
        self.model.train()
        summed, count = self.looked.tolist()
        return summed / count if count else math.nan

    @torch.no_grad()
    def _look(self) -> None:
        self.looked.zero_()
        for batch in self.feed.held_out:
            summed, count = self.loss(batch)
            self.looked[0] += summed
            self.looked[1] += count

    def ask(self, signal: int) -> None:
        """Ask the run to save and stop after the step in hand."""
        self.asked = signal

    def _precision(self) -> Any:
        if self.config.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype)

    def _stream(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _heed(self) -> None:
        """Stop for a signal: at once alone, among several processes when they next agree."""
        if self.world.size == 1:
            self.stopped_by = self.asked
        elif self.state.step % AHEAD == 0:
            self.stopped_by = int(self.world.agree(self.asked or 0, "largest")) or None
