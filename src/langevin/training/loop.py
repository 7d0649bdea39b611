"""The training loop.

The data order is a pure function of (seed, step) and every random stream is in the checkpoint, and so a run
that was killed and resumed ends, on a CPU, with the same bits as one that was not. On a GPU the host only
launches: batches are gathered from tokens that live there, steps are replayed as one CUDA graph, and losses
are fetched about once a second.

B batch, L context.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from langevin.data.feed import chunks
from langevin.errors import Diverged, UsageError
from langevin.objectives import OBJECTIVES, Batch, Objective, generator_of
from langevin.settings import TrainConfig
from langevin.tasks import TASKS
from langevin.training import checkpoint, parallel
from langevin.training.checkpoint import State
from langevin.training.fitting import Pace, budget, fitting_parts, looks_of
from langevin.training.graphs import Replayed
from langevin.training.optim import Update, factor, set_rate
from langevin.training.parallel import World
from langevin.training.progress import Progress
from langevin.training.signals import heeding_signals

SAVE_SECONDS = 30.0  # at least so much training between checkpoints, unless checkpoint_every says otherwise
AHEAD = 8  # steps the host may be ahead of a GPU
WARM = 3  # steps before one is captured as a graph


class Trainer:
    """One run: a model, its data and where they stand."""

    def __init__(
        self, config: TrainConfig, model: Any, data: Any, folder: Path, world: World | None = None
    ) -> None:
        self.config, self.model, self.data, self.folder = config, model, data, folder
        self.task = TASKS.parse(config.task)
        self.objective: Objective = OBJECTIVES.parse(config.objective).bound(config, model)
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
        self.forward = model
        if self.world.size > 1 and config.parallel == "ddp":
            self.forward = nn.parallel.DistributedDataParallel(model)
        elif self.world.size > 1 and config.optimizer == "muon":
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
        for i, part in enumerate(self.feed.held_out):
            rows = len(next(iter(part.values())))
            part.update(self._on_device(self.objective.draws(part, rows, generator_of(i))))
        self.like = self.feed.batch()  # the shapes of what a step reads
        self.drawn = self._on_device(self._draws(0))
        self.spent = torch.zeros((), device=self.device)  # of the budget, from 0 to 1
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
        try:
            with heeding_signals(self.ask):
                for _ in self.steps(progress):
                    pass
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(checkpoint.remedy(self.folder, "stopped at once.")) from error
        return self.state

    def steps(self, progress: Progress) -> Generator[None]:
        """Train, giving way after every step: several runs can take turns on one device."""
        config, state = self.config, self.state
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._stream():
            self.parts = fitting_parts(self)
            if not state.total and config.steps != 0:
                state.total = int(self.world.agree(budget(self)))
            if not state.looks:
                looks, batches = (int(self.world.agree(n)) for n in looks_of(self))
                state.looks, state.looked_at = looks, state.looked_at or batches
            del self.feed.held_out[state.looked_at :]
            progress.start(state, self)
        try:
            yield from self._train(progress)
            with self._stream():
                progress.step(self.state, self, ended=True)
        finally:
            progress.stop()
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _train(self, progress: Progress) -> Iterator[None]:
        saved_at, trained = time.monotonic(), 0.0
        last = self.state.step - self.state.step % self._every()  # evaluation
        pace = Pace(self.config.minutes, self.state.step) if self.config.minutes is not None else None
        if self.state.step == 0 and (self.config.init is not None or not self.state.total):
            with self._stream():  # the model as it starts
                begin = time.perf_counter()
                self._evaluate(progress)
                self.state.seconds += time.perf_counter() - begin
                if not self.state.total:
                    self.save()
        while self.state.step < self.state.total and self.stopped_by is None:
            with self._stream():
                begin = time.perf_counter()
                self._step(self.state.step)
                self.state.step += 1
                self._heed()
                progress.step(self.state, self)
                took = time.perf_counter() - begin
                trained, self.state.seconds = trained + took, self.state.seconds + took
                if pace is not None:
                    self._estimate(pace, trained)
                looked = self.state.step - last >= self._every() or self.state.step == self.state.total
                if looked:
                    last = self.state.step
                    self._evaluate(progress)
                    self.state.seconds += time.perf_counter() - begin - took
                if self._due(looked, saved_at):
                    self.save()
                    saved_at = time.monotonic()
            yield

    def _every(self) -> int:
        """Steps between evaluations; those of a budget in minutes change with it."""
        return self.config.eval_every or max(1, math.ceil(self.state.total / self.state.looks))

    def _estimate(self, pace: Pace, trained: float) -> None:
        """The steps of a budget in minutes anew: alone at any step, among several when they next agree."""
        state = self.state
        total = pace.total(state.step, state.seconds, trained)
        if self.world.size == 1 or state.step % AHEAD == 0:
            state.total = int(self.world.agree(total or state.total))

    def _due(self, looked: bool, saved_at: float) -> bool:
        """Whether a checkpoint is to be written now."""
        if self.state.step >= self.state.total or self.stopped_by is not None:
            return True
        if self.config.checkpoint_every is not None:
            return self.state.step % self.config.checkpoint_every == 0
        return looked and bool(self.world.agree(time.monotonic() - saved_at > SAVE_SECONDS))

    def save(self) -> None:
        self.read_counters()
        folder = self.folder / "checkpoints"
        checkpoint.save(folder, self.state, self.held(), self.world)
        if self.world.first:
            checkpoint.prune(folder, self.config.keep, self.state.best_step, self.state.step)
        self.world.wait()

    def resume(self, path: Path) -> None:
        self.state = checkpoint.load(path, self.held(), self.world.rank)

    def held(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds."""
        return {"weights": checkpoint.weights(self.model), **self.update.tensors()}

    def _step(self, step: int) -> None:
        set_rate(self.update.optimizers, factor(step, self.state.total, self.config))
        self.spent.fill_(step / self.state.total)
        self.put(step)
        self.compute(self.feed.shape)
        if self.on_gpu:
            self._keep_close()
        else:
            self.read_counters()

    def put(self, step: int) -> None:
        """Hand over what a step reads, without waiting."""
        self.feed.put(step)
        for name, x in self._draws(step).items():
            self.drawn[name].copy_(x, non_blocking=True)

    def _draws(self, step: int) -> Batch:
        """This process's share of the random numbers of a step, a function of (seed, step)."""
        generator = generator_of(self.config.seed, step)
        drawn = self.objective.draws(self.like, self.config.batch, generator)
        return {name: self.world.share(x) for name, x in drawn.items()}

    def _on_device(self, batch: Batch) -> Batch:
        return {name: x.to(self.device) for name, x in batch.items()}

    def batch(self, parts: int) -> list[Batch]:
        """What was handed over, in equal parts."""
        return chunks({**self.feed.batch(), **self.drawn}, parts)

    def _compute(self) -> None:
        """Everything that a step does on the device."""
        self.update.forget_gradients()
        total = torch.zeros((), device=self.device)
        counted: Tensor | int = 0
        parts = self.batch(self.parts)
        for i, part in enumerate(parts):
            with parallel.gradients(self.forward, last=i + 1 == len(parts)):
                summed, count = self.backward(part)
            total, counted = total + summed, counted + count
        counted = self.world.summed(counted)
        # A plain count is what the gradients were divided by.
        self.update(self.a_step / counted.clamp_min(1) if isinstance(counted, Tensor) else None)
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
            return self.training_loss({**batch, "progress": self.spent})
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
        self.state.bad_steps, in_a_row = (int(x) for x in self.update.skipped.tolist())
        if in_a_row >= self.config.max_bad_steps:
            last = self.state.step - 1 if self.on_gpu else self.state.step
            raise Diverged(
                f"the gradient was not finite for {in_a_row} steps, the last being step {last} "
                f"({self.feed.where(last)})",
                checkpoint.remedy(self.folder, "Lower --lr, raise --warmup, or use --precision fp32."),
            )

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
                raise Diverged(
                    f"the validation loss at step {state.step} is {loss}",
                    checkpoint.remedy(self.folder, "Lower --lr or use --precision fp32."),
                )
            if loss < state.best_loss or self.config.keep_evaluated:
                self.objective.calibrate(self.model, self.feed.held_out)
            if loss < state.best_loss:
                state.best_loss, state.best_step = loss, state.step
                progress.keep(self, self.folder / "model")
            if self.config.keep_evaluated:
                progress.keep(self, self.folder / "evaluated" / f"step-{state.step}")
        progress.evaluated(state, self, loss)

    def valid_loss(self) -> float:
        """Mean loss on the validation batches that the task looks at while it trains."""
        if self.look is None and self.compute.graph is not None:
            pool = self.compute.graph.pool()
            again = self.compute.forget
            self.look = Replayed(
                self._look, self.stream, after=1, what="evaluations", failed=again, pool=pool
            )
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
