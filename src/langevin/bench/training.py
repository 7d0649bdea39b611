"""`langevin bench train`: tokens a second of whole training steps, as ratios to softmax in the same run.

Every mixer trains the same model on the same random tokens by the loop that `langevin train` uses. Runs of
the mixers alternate. Beside the loop stands the bare device work of its steps, launched back to back
without any bookkeeping: their ratio is what the host costs. FLOP/s are set against a large matrix product
timed in the same run, and against what the vendor states.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from langevin.bench.mixers import BASELINE, beside_baseline, median_ratio, spread
from langevin.data.corpus import Corpus
from langevin.data.texts import SPLITS
from langevin.environment import environment, pick_device
from langevin.errors import UsageError
from langevin.evaluation.cost import PeakMemory
from langevin.models.cost import peak_flops
from langevin.settings import TrainConfig
from langevin.training.loop import WARM, Trainer
from langevin.training.progress import Progress
from langevin.training.start import build, resolved

ENDLESS = 10**9


class RandomTokens(Corpus):
    """A corpus with nothing to learn in it."""

    def __init__(self, vocab: int, count: int) -> None:
        manifest = {"tokenizer": {"vocab_size": vocab}, "separator": 0, "layout": "text", "count": count}
        super().__init__(Path(), manifest)

    @cached_property
    def _tokens(self) -> dict[str, Any]:
        count = self.manifest["count"]
        some = np.random.default_rng(0).integers(self.vocab_size, size=min(count, 2**20))
        return dict.fromkeys(SPLITS, np.resize(some.astype(np.int32), count))


def bench_training(
    specs: list[str],
    config: TrainConfig,
    *,
    vocab: int,
    rounds: int = 5,
    seconds: float = 1.0,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Training speed of every spec, each timed for `seconds` in each of the rounds."""
    if rounds < 1 or seconds <= 0 or vocab < 2:
        raise UsageError("rounds, seconds and vocab must be positive (vocab 2 or more)")
    device = pick_device(config.device)
    config = resolved(replace(config, task="lm(mask_documents=False)"), device)
    tokens = RandomTokens(vocab, max(100_000, 20 * config.batch * config.context))
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for spec in beside_baseline(specs):
            progress(f"{spec}: compiling and warming up")
            cases[spec] = _Case(replace(config, mixer=spec), tokens, device, Path(folder), seconds)
        product = matmul_flops(device)
        for turn in range(rounds):
            for spec, case in cases.items():
                progress(f"{spec}: round {turn + 1} of {rounds}")
                case.round()
    base = cases[BASELINE].loop
    vendor = peak_flops(torch.cuda.get_device_name()) if device.startswith("cuda") else None
    shape = {k: v for k, v in asdict(config).items() if k in SHAPE}
    return {
        "settings": {**shape, "vocab": vocab, "rounds": rounds, "seconds a round": seconds},
        "machine": environment(device),
        "matmul FLOP/s": product,
        "rows": [case.row(base, product, vendor) for case in cases.values()],
    }


def in_turns(
    configs: dict[str, TrainConfig], data: Any, device: str, rounds: int, seconds: float
) -> dict[str, tuple[list[float], int, int | None]]:
    """Training steps of several runs on these data, taking turns of so many seconds: seconds a step in each
    round, what a step takes of the budget, and peak bytes (CUDA)."""
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for name, config in configs.items():
            peak = PeakMemory(device)
            cases[name] = _Case(config, data, device, Path(folder), seconds)
            peaks[name] = peak()
        for _ in range(rounds):
            for case in cases.values():
                case.round(bare=False)
        for case in cases.values():
            case.steps.close()
    return {name: (case.loop, case.a_step, peaks[name]) for name, case in cases.items()}


SHAPE = (
    *("layers", "width", "heads", "kv_heads", "context", "batch", "positions", "mlp", "mlp_width", "norm"),
    *("qk_norm", "tie", "optimizer", "precision", "compile", "graphs", "checkpointing", "accumulate"),
)


class _Case:
    """One mixer, ready to train; times are seconds a step."""

    def __init__(
        self,
        config: TrainConfig,
        data: Any,
        device: str,
        folder: Path,
        seconds: float,
    ) -> None:
        config = replace(config.with_budget(steps=ENDLESS), eval_every=ENDLESS, checkpoint_every=ENDLESS)
        torch.manual_seed(0)
        self.trainer = Trainer(config, build(config, data).to(device), data, folder)
        self.spec, self.a_step = config.mixer, self.trainer.a_step
        self.steps: Generator[None] = self.trainer.steps(Progress(folder, quiet=True))
        self.loop: list[float] = []
        self.bare: list[float] = []
        finished(lambda: self._take(WARM + 2), device)
        once = finished(lambda: self._take(3), device) / 3
        self.count = max(3, math.ceil(seconds / once))
        self.device = device

    def _take(self, count: int) -> None:
        for _ in range(count):
            next(self.steps)

    def _bare(self) -> None:
        graph = self.trainer.compute.graph
        with self.trainer._stream():
            for _ in range(self.count):
                if graph is None:
                    self.trainer._compute()
                else:
                    graph.replay()

    def round(self, *, bare: bool = True) -> None:
        self.loop.append(finished(lambda: self._take(self.count), self.device) / self.count)
        if bare:
            self.bare.append(finished(self._bare, self.device) / self.count)

    def row(self, base: list[float], product: float, vendor: float | None) -> dict[str, Any]:
        """Medians over rounds. ratio: of speed to softmax's; host_ratio: of the loop's seconds to those of
        its bare device work; parts: that a step is computed in; captured: as a CUDA graph."""
        trainer, rates = self.trainer, [self.a_step / s for s in self.loop]
        rate = statistics.median(rates)
        flops = rate * trainer.objective.flops(trainer.model, trainer.config.context)
        return {
            "mixer": self.spec,
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "parts": trainer.parts,
            "captured": trainer.compute.graph is not None,
            "tokens_per_second": rate,
            "spread": spread(rates),
            "ratio": median_ratio(base, self.loop),
            "host_ratio": median_ratio(self.loop, self.bare),
            "flops": flops,
            "of_matmul": flops / product,
            "of_vendor_peak": None if vendor is None else flops / vendor,
        }


def finished(work: Callable[[], None], device: str) -> float:
    begin = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def matmul_flops(device: str) -> float:
    """FLOP/s of a large matrix product: bfloat16 on a GPU, float32 on a CPU; the best of five."""
    on_gpu = device.startswith("cuda")
    n, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))

    def products() -> None:
        for _ in range(5):
            torch.mm(a, b)

    finished(products, device)
    return max(5 * 2 * n**3 / finished(products, device) for _ in range(5))
