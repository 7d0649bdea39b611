"""langevin: train, check and fairly compare how tokens mix and how text is generated.

Nothing heavy is imported until it is used: `import langevin` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_WHERE = {
    "attend": "langevin.mixers",
    "convert": "langevin.models.convert",
    "from_pretrained": "langevin.models.convert",
    "fold": "langevin.models.fold",
    "load": "langevin.runs",
    "train": "langevin.runs",
}
_MODULES = {"bench", "check", "data", "evaluation", "kernels", "mixers", "models", "runs"}

__all__ = [
    "__version__",
    "attend",
    "check",
    "convert",
    "fold",
    "from_pretrained",
    "load",
    "mixers",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    if name in _MODULES:
        return import_module(f"langevin.{name}")
    raise AttributeError(f"module 'langevin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
