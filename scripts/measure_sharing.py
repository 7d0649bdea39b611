"""Six 4-layer models on one GPU, one after another and at once: tokens a second.

    python scripts/measure_sharing.py results.json [DATA ...]

For every DATA (stories, wikitext-2) a comparison of six mixers by `compare` itself, with evaluations, saved
models and measurements: all runs alone (--workers 1), and as many at once as it chooses. Then the bare
training steps of six equal models, one after another and in turns as `compare` takes them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from langevin.bench.training import ENDLESS, RandomTokens
from langevin.environment import environment
from langevin.models.backbone import LangevinForCausalLM
from langevin.runs import quiet_transformers
from langevin.settings import TrainConfig
from langevin.studies.plan import Plan, read_arms
from langevin.studies.runner import compare
from langevin.training.loop import WARM, Trainer
from langevin.training.progress import Progress
from langevin.training.start import model_config, resolved

MODELS, STEPS, ROUNDS = 6, 60, 3
SMALL = TrainConfig(layers=4, width=128, heads=4, context=128, batch=32)
WIDER = TrainConfig(layers=4, width=256, heads=4, context=256, batch=32)
CASES = [
    (SMALL, 512, "off"),
    (SMALL, 512, "on"),
    (WIDER, 512, "off"),
    (WIDER, 50257, "off"),
]
MIXERS = ["softmax", "ssmax", "heat", "sigmoid", "sima", "neighbor"]
STUDIES = {
    "stories": replace(SMALL, data="stories", steps=1500),
    "wikitext-2": replace(WIDER, data="wikitext-2", tokenizer="gpt2", steps=300, eval_every=60),
}


def trained(config: TrainConfig, vocab: int, folder: Path) -> Iterator[None]:
    """The steps of a run, warmed up."""
    torch.manual_seed(config.seed)
    model = LangevinForCausalLM(model_config(config, vocab, 0)).cuda().train()
    tokens: Any = RandomTokens(vocab, 20 * config.batch * config.context)
    steps = Trainer(config, model, tokens, folder).steps(Progress(folder, quiet=True))
    for _ in range(WARM + 2):
        next(steps)
    return steps


def seconds(order: list[Iterator[None]]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for steps in order:
        next(steps)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def bare_steps() -> list[dict[str, Any]]:
    rows = []
    for shape, vocab, compile_ in CASES:
        config = replace(shape, steps=ENDLESS, eval_every=ENDLESS, checkpoint_every=ENDLESS)
        config = resolved(replace(config, compile=compile_), "cuda")
        with tempfile.TemporaryDirectory() as folder:
            runs = [trained(replace(config, seed=s), vocab, Path(folder)) for s in range(MODELS)]
            after = [run for run in runs for _ in range(STEPS)]
            turns = [run for _ in range(STEPS) for run in runs]
            times = [(seconds(after), seconds(turns)) for _ in range(ROUNDS)]
        tokens = MODELS * STEPS * config.batch * config.context
        row = {
            **{k: v for k, v in asdict(config).items() if k in ("layers", "width", "context", "compile")},
            "vocab": vocab,
            "one after another, tokens/s": [tokens / a for a, _ in times],
            "in turns, tokens/s": [tokens / b for _, b in times],
            "ratio": sorted(a / b for a, b in times)[ROUNDS // 2],
        }
        print(row, flush=True)
        rows.append(row)
        del runs, after, turns
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return rows


def study(config: TrainConfig) -> dict[str, Any]:
    """A comparison made twice; seconds of training by the files of the runs, and of the whole."""
    plan = Plan(read_arms(MIXERS), config, (0,))
    tokens = len(MIXERS) * (config.steps or 0) * config.batch * config.context
    found: dict[str, Any] = {"settings": {k: v for k, v in asdict(config).items() if v is not None}}
    for name, workers in (("one after another", 1), ("at once", None)):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            results = compare(plan, Path(folder), workers=workers)
            whole = time.perf_counter() - begin
            spans = [span(Path(folder) / run["path"]) for arm in results["arms"] for run in arm["runs"]]
        together = max(end for _, end in spans) - min(start for start, _ in spans)
        training = sum(end - start for start, end in spans) if workers == 1 else together
        found[name] = {
            "runs at a time": results["environment"]["workers"],
            "training, s": training,
            "whole comparison, s": whole,
            "tokens/s of training": tokens / training,
            "tokens/s of the whole": tokens / whole,
            "losses": [run["best"]["valid_loss"] for arm in results["arms"] for run in arm["runs"]],
        }
        print(name, found[name], flush=True)
    for what in ("training", "the whole"):
        a, b = (found[name][f"tokens/s of {what}"] for name in ("one after another", "at once"))
        found[f"ratio of {what}"] = b / a
        print(f"ratio of {what}", b / a, flush=True)
    return found


def span(run: Path) -> tuple[float, float]:
    """When the training of a run began and ended."""
    last = max((run / "checkpoints").glob("step-*/manifest.json"), key=lambda p: p.stat().st_mtime)
    return (run / "config.yaml").stat().st_mtime, last.stat().st_mtime


def main() -> int:
    quiet_transformers()
    out, *data = sys.argv[1:]
    found: dict[str, Any] = {"command": "python " + " ".join(sys.argv), "machine": environment("cuda")}
    for name in data:
        found[name] = study(STUDIES[name])
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
    found["steps"] = bare_steps()
    Path(out).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
