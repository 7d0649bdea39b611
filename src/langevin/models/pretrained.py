"""Pretrained models as a start for training: a saved model, a run, or a name on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langevin.data.folders import data_root
from langevin.errors import UsageError


def located(name: str) -> str:
    """The folder of a model, or its name on the Hub: a run's best model, a saved one, or one of
    `$LANGEVIN_DATA/models/`."""
    root = data_root()
    places = [Path(name).expanduser() / "model", Path(name).expanduser()]
    places += [root / "models" / name] if root is not None else []
    return str(next((p for p in places if (p / "config.json").is_file()), name))


def pretrained(name: str, spec: str) -> Any:
    """The model, mixing by `spec`, with weights in float32."""
    import torch

    from langevin.models.convert import convert, from_pretrained

    model = from_pretrained(located(name), auto_class="AutoModelForCausalLM", dtype=torch.float32)
    return convert(model, spec)


def trained_length(name: str) -> int:
    """The longest text it was made for."""
    from langevin.models.convert import _read_config, _train_length

    return _train_length(_read_config(located(name), {})[0])


def tokenizer_of(name: str) -> str:
    """The folder or name of its tokenizer."""
    where = located(name)
    if Path(where).is_dir() and not (Path(where) / "tokenizer.json").is_file():
        raise UsageError(f"{where} has no tokenizer", "Give --tokenizer.")
    return where
