"""A run small enough to be made many times, and the ways in which it may die."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from langevin.settings import TrainConfig

TEXT = "".join(
    f"{name} had {n} {thing}. {name} gave one away, so {n - 1} were left.\n"
    for n in range(2, 12)
    for name in ("Ann", "Bob", "Cleo", "Dan")
    for thing in ("pears", "cups", "nuts")
)


def small(folder: Path, **changes: Any) -> TrainConfig:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    values: dict[str, Any] = {
        "data": str(text),
        "tokenizer": "bytes",
        "mixer": "heat(t='head')+noise(std=0.05)",
        "layers": 1,
        "width": 16,
        "heads": 2,
        "context": 16,
        "batch": 4,
        "dropout": 0.1,
        "steps": 12,
        "lr": 1e-3,
        "eval_every": 4,
        "checkpoint_every": 4,
        "precision": "fp32",
        "compile": "off",
        "eval_tokens": 128,
        "device": "cpu",
    }
    return TrainConfig(**{**values, **changes})


def fingerprint(run: Path, step: int) -> str:
    """The bits of the weights and of the optimiser after a step."""
    digest = hashlib.sha256()
    files = sorted((run / "checkpoints" / f"step-{step}").glob("*.safetensors"))
    assert len(files) >= 3
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def train_in_a_process(config_file: Path, out: Path, dies: str = "") -> int:
    """Train in a process of its own, resuming; `dies` is code run before, which may plan its death."""
    code = f"""
import os, signal, torch
torch.set_num_threads(1)
from pathlib import Path
from langevin import runs
from langevin.training import checkpoint, loop
from langevin.settings import TrainConfig
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
{dies}
runs.train(TrainConfig.read(Path({str(config_file)!r})), Path({str(out)!r}), resume=True, quiet=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    if done.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(done.stderr)
    return done.returncode


def dying_at_step(step: int) -> str:
    return f"""
whole = loop.Trainer._step
loop.Trainer._step = lambda self, step: die() if step == {step} else whole(self, step)
"""


DYING_WHILE_SAVING_STEP_8 = """
whole = checkpoint._seal
checkpoint._seal = lambda folder: die() if "step-8" in folder.name else whole(folder)
"""
