"""Six 4-layer models on one GPU, one after another and in turns: tokens a second of their training steps.

    python scripts/measure_sharing.py [results.json]

In turns is how `langevin compare` trains runs of one arm: a stream each, steps replayed as CUDA graphs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from langevin.bench import machine
from langevin.bench_training import ENDLESS, RandomTokens
from langevin.models.backbone import LangevinForCausalLM
from langevin.training.config import TrainConfig
from langevin.training.loop import WARM, Trainer
from langevin.training.progress import Progress
from langevin.training.start import model_config, resolved

MODELS, STEPS, ROUNDS = 6, 200, 3
SHAPES = [
    (TrainConfig(layers=4, width=128, heads=4, context=128, batch=32), 512),
    (TrainConfig(layers=4, width=256, heads=4, context=256, batch=32), 512),
    (TrainConfig(layers=4, width=256, heads=4, context=256, batch=32), 50257),
]


def trained(config: TrainConfig, vocab: int, folder: Path) -> Iterator[None]:
    """The steps of a run, warmed up."""
    torch.manual_seed(config.seed)
    model = LangevinForCausalLM(model_config(config, vocab, 0)).cuda().train()
    tokens = RandomTokens(vocab, 20 * config.batch * config.context)
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


def main() -> int:
    rows = []
    for shape, vocab in SHAPES:
        for compile_ in ("off", "on"):
            config = replace(shape, steps=ENDLESS, eval_every=ENDLESS, checkpoint_every=ENDLESS)
            config = resolved(replace(config, compile=compile_), "cuda")
            with tempfile.TemporaryDirectory() as folder:
                runs = [trained(replace(config, seed=s), vocab, Path(folder)) for s in range(MODELS)]
                after = [run for run in runs for _ in range(STEPS)]
                turns = [run for _ in range(STEPS) for run in runs]
                times = [(seconds(after), seconds(turns)) for _ in range(ROUNDS)]
            tokens = MODELS * STEPS * config.batch * config.context
            row = {
                "width": config.width,
                "context": config.context,
                "vocab": vocab,
                "compile": compile_,
                "one after another, tokens/s": [tokens / a for a, _ in times],
                "in turns, tokens/s": [tokens / b for _, b in times],
                "ratio": sorted(a / b for a, b in times)[ROUNDS // 2],
            }
            print(row, flush=True)
            rows.append(row)
            torch.compiler.reset()
    if len(sys.argv) > 1:
        found = {"shape": asdict(SHAPES[0][0]), "machine": machine("cuda"), "rows": rows}
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
