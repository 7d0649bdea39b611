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

from langevin.runs import load, train
from langevin.settings import TrainConfig
from langevin.studies.compare import compare
from langevin.studies.plan import Part, Plan
from langevin.training.start import prepared

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


def sharing_changes_nothing(folder: Path, tell: Callable[[str, bool, object], None]) -> None:
    """Runs with dropout that share the GPU, two at a time, are those that have it to themselves."""
    base = replace(SMALL, dropout=0.2, lr=5e-3, eval_every=10)
    settings = {key: value for key, value in vars(base).items() if key not in ("mixer", "seed")}
    plan = Plan((Part(("softmax", "sigmoid"), settings),), (0, 1), test_tokens=2048)
    results = compare(plan, folder / "shared", workers=2, quiet=True)
    for arm in results.parts[0].arms:
        for run in arm.runs:
            place = f"{arm.name}/seed-{run.seed}"
            shared = [point.loss for point in run.curve]
            alone = losses(load(folder / "shared" / place).config, folder / "alone" / place)
            tell(f"{place}: sharing changes nothing", shared == alone, (shared, alone))
        ratio = arm.cost("time_ratio")
        tell(f"{arm.name} is timed in turns", ratio is not None and ratio.low is not None, ratio)


def main() -> int:
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
            config = replace(SMALL, mixer=mixer, ema=0.9, dropout=0.1)
            trainer, progress = prepared(config, folder / mixer, quiet=True)
            state = trainer.run(progress)
            recorded = [w is not None and w.graph is not None for w in (trainer.compute, trainer.look)]
            told = (state.best_loss, f"recorded, steps and evaluation: {recorded}")
            good = state.best_loss < 5.5 and all(recorded) == ("alpha" not in mixer)
            tell(f"{mixer} trains, with averaged weights and dropout", good, told)
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
        sharing_changes_nothing(folder, tell)
        plain = losses(SMALL, folder / "not compiled")
        for what in ("loss", "on"):
            compiled = losses(replace(SMALL, compile=what), folder / f"compiled {what}")
            near = max(abs(a - b) for a, b in zip(compiled, plain, strict=True)) < 0.02
            tell(f"compiled ({what}) and captured it trains as it does plain", near, (compiled, plain))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
