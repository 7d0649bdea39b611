"""Training on the GPU: captured steps against plain ones, skipped steps, precisions, optimisers, resuming.

    python scripts/check_training_on_gpu.py

Exit status 1 when something fails.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from langevin.runs import load, quiet_transformers, train
from langevin.settings import TrainConfig
from langevin.studies.sharing import work_together
from langevin.studies.work import Job
from langevin.training.start import prepared, resolved

SMALL = TrainConfig(
    data="stories",
    layers=2,
    width=64,
    heads=2,
    context=64,
    batch=8,
    steps=40,
    eval_every=20,
    checkpoint_every=20,
    compile="off",
    lr=1e-3,
)


def losses(config: TrainConfig, folder: Path) -> list[float]:
    run, _ = train(config, folder, quiet=True)
    return [row["loss"] for row in run.metrics("valid")]


def turns_change_nothing(folder: Path, tell: Callable[[str, bool, object], None]) -> None:
    """Runs with dropout that take turns, two at a time, are those that have the GPU to themselves."""
    base = resolved(replace(SMALL, dropout=0.2, lr=5e-3, eval_every=10), "cuda")
    jobs = [
        Job(f"{mixer} seed {seed}", folder / "turns" / f"{mixer}-{seed}", config, 2048, 1)
        for mixer in ("softmax", "sigmoid")
        for seed in (0, 1)
        for config in [replace(base, mixer=mixer, seed=seed, steps=40 + 20 * seed)]
    ]
    work_together(jobs, lambda job, outcome: None, at_once=2)
    for job in jobs:
        turns = [row["loss"] for row in load(job.folder).metrics("valid")]
        alone = losses(job.config, folder / "alone" / job.folder.name)
        tell(f"{job.label}: turns change nothing", turns == alone, (turns, alone))


def main() -> int:
    quiet_transformers()
    failed = 0

    def tell(what: str, good: bool, found: object) -> None:
        nonlocal failed
        failed += not good
        print("passed" if good else "FAILED", what, found)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for optimizer in ("adamw", "muon"):
            config = replace(SMALL, optimizer=optimizer)
            graph = losses(config, folder / f"{optimizer}-graph")
            plain = losses(replace(config, graphs=False), folder / f"{optimizer}-plain")
            near = max(abs(a - b) for a, b in zip(graph, plain, strict=True)) < 0.02
            tell(f"{optimizer}: captured steps train as plain ones do", near, (graph, plain))
        for mixer in ("ssmax", "heat(t='adaptive')", "sigmoid", "sima", "neighbor", "heat(alpha=1.0)"):
            trainer, progress = prepared(replace(SMALL, mixer=mixer), folder / mixer, quiet=True)
            state = trainer.run(progress)
            recorded = [w is not None and w.graph is not None for w in (trainer.compute, trainer.look)]
            told = (state.best_loss, f"recorded, steps and evaluation: {recorded}")
            tell(f"{mixer} trains", state.best_loss < 5.5, told)
        for precision in ("fp16", "fp32"):
            found = losses(replace(SMALL, precision=precision), folder / precision)
            tell(f"{precision} trains", found[-1] < found[0], found)
        trainer, progress = prepared(replace(SMALL, steps=30), folder / "bad", quiet=True)
        steps = trainer.steps(progress)
        for _ in range(10):
            next(steps)
        torch.cuda.synchronize()
        whole = [p.detach().clone() for p in trainer.model.parameters()]
        gain = trainer.model.model.norm.weight
        kept = gain.detach().clone()
        with torch.no_grad():
            gain.fill_(float("nan"))
        torch.cuda.synchronize()
        next(steps)
        torch.cuda.synchronize()
        with torch.no_grad():
            gain.copy_(kept)
        torch.cuda.synchronize()
        trainer.read_counters()
        same = all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), whole, strict=True))
        tell("a step that is not finite changes nothing", same, trainer.state.bad_steps)
        tell("and is counted", trainer.state.bad_steps == 1, trainer.state.bad_steps)
        for _ in steps:
            pass
        resumed, progress = prepared(replace(SMALL, steps=30), folder / "bad", resume=True, quiet=True)
        tell("a finished run resumes at its end", resumed.state.step == 30, resumed.state.step)
        turns_change_nothing(folder, tell)
        plain = losses(SMALL, folder / "not compiled")
        for what in ("loss", "on"):
            compiled = losses(replace(SMALL, compile=what), folder / f"compiled {what}")
            near = max(abs(a - b) for a, b in zip(compiled, plain, strict=True)) < 0.02
            tell(f"compiled ({what}) and captured it trains as it does plain", near, (compiled, plain))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
