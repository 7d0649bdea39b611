"""A text, and ways to harm a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TEXT = "".join(
    f"{name} had {n} {thing}. {name} gave one away, so {n - 1} were left.\n"
    for n in range(2, 7)
    for name in ("Ann", "Bob", "Cleo")
    for thing in ("pears", "cups")
)


def changed(path: Path, **values: Any) -> None:
    """Other values in a table of JSON; None takes a key out."""
    table = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def other_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Other tensors in a file of weights: those that the change returns, or changed in place."""
    tensors = load_file(path)
    save_file(change(tensors) or tensors, path, {"format": "pt"})


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)
