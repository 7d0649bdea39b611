"""A comparison small enough to be made many times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langevin.settings import TrainConfig
from langevin.studies.plan import Plan, read_arms
from langevin.studies.runner import compare, run_jobs
from langevin.studies.work import work

TEXT = "".join(
    f"{name} had {n} {thing}. {name} gave one away, so {n - 1} were left.\n"
    for n in range(2, 12)
    for name in ("Ann", "Bob", "Cleo", "Dan")
    for thing in ("pears", "cups", "nuts")
)
SHAPE = {
    "tokenizer": "bytes",
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 16,
    "batch": 4,
    "steps": 12,
    "lr": 1e-3,
    "eval_every": 4,
    "eval_tokens": 128,
    "device": "cpu",
}
TIMES = ("seconds", "tokens_per_second", "decode_ms_per_token", "peak_memory_bytes")


def text_in(folder: Path) -> Path:
    path = folder / "text.txt"
    if not path.exists():
        path.write_text(TEXT)
    return path


def settings(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{"data": str(text_in(folder)), **SHAPE, **changes})


def plan(
    folder: Path, *arms: str, seeds: tuple[int, ...] = (0, 1), shape: Any = None, **options: Any
) -> Plan:
    chosen = read_arms(arms or ("softmax", "ssmax"))
    return Plan(chosen, settings(folder, **(shape or {})), seeds, **{"test_tokens": 256, **options})


def flags(folder: Path, **changes: Any) -> list[str]:
    """The same settings for the command line."""
    values = {"data": text_in(folder), **SHAPE, "test_tokens": 256, **changes}
    return [word for k, v in values.items() for word in (f"--{k.replace('_', '-')}", str(v))]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def results_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text()))


def timeless(folder: Path) -> str:
    """results.json as text, without its times."""
    return json.dumps(without_times(results_in(folder)), indent=1)


def shared_study(folder: Path, *arms: str) -> Plan:
    """A comparison whose runs are said to have shared a GPU."""
    one = plan(folder, *arms, seeds=(0,))
    compare(one, folder / "cmp", workers=0, quiet=True)
    for job in run_jobs(one, folder / "cmp", shared=True):
        job.record.unlink()
        work(job)
    return one
