"""A comparison small enough to be made many times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from langevin.settings import TrainConfig
from langevin.studies.compare import compare
from langevin.studies.plan import Part, Plan
from langevin.studies.results import Results

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
    "steps": 8,
    "lr": 1e-3,
    "eval_every": 4,
    "eval_tokens": 128,
    "device": "cpu",
}
TIMES = ("tokens_per_second", "time_ratio", "decode_ms_per_token", "decode_ratio", "peak_memory_bytes")


def text_in(folder: Path) -> Path:
    path = folder / "text.txt"
    if not path.exists():
        path.write_text(TEXT)
    return path


def settings(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{"data": str(text_in(folder)), **SHAPE, **changes})


def plan(
    folder: Path,
    *arms: str,
    seeds: tuple[int, ...] = (0, 1),
    shape: dict[str, Any] | None = None,
    **options: Any,
) -> Plan:
    own = {"data": str(text_in(folder)), **SHAPE, **(shape or {})}
    return Plan((Part(arms or ("softmax", "ssmax"), own),), seeds, **{"test_tokens": 128, **options})


def compared(plan: Plan, folder: Path, **options: Any) -> Results:
    return compare(plan, folder, **{"workers": 0, "quiet": True, **options})


def flags(folder: Path, **changes: Any) -> list[str]:
    """The same settings for the command line."""
    values = {"data": text_in(folder), **SHAPE, "test_tokens": 128, **changes}
    return [word for k, v in values.items() for word in (f"--{k.replace('_', '-')}", str(v))]


def results_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text()))


def arms_in(folder: Path) -> list[dict[str, Any]]:
    return [arm for part in results_in(folder)["parts"] for arm in part["arms"]]


def timeless(folder: Path, *others: str) -> str:
    """results.json as text, without its times (and what else is named)."""
    return json.dumps(_without(results_in(folder), others), indent=1)


def _without(value: Any, others: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {k: _without(v, others) for k, v in value.items() if k not in others}
    if isinstance(value, list):
        return [
            _without(v, others) for v in value if not (isinstance(v, dict) and v.get("metric") in TIMES)
        ]
    return value
