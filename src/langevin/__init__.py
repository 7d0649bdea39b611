"""langevin: train, check and fairly compare how tokens mix and how text is generated.

Nothing heavy is imported until it is used: `import langevin` does not import torch.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

__version__ = "0.2.0"

_WHERE = {
    "attend": "langevin.mixers",
    "check": "langevin.checks",
    "convert": "langevin.models.convert",
    "from_pretrained": "langevin.models.convert",
    "fold": "langevin.models.fold",
    "load": "langevin.runs",
    "run_experiment": "langevin.experiment",
    "train": "langevin.runs",
}
_MODULES = {"bench", "checks", "data", "evaluation", "kernels", "mixers", "models", "runs"}

__all__ = [
    "__version__",
    "attend",
    "check",
    "convert",
    "fold",
    "from_pretrained",
    "load",
    "mixers",
    "run_experiment",
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


class _AutoClasses:
    """Lets transformers' auto classes know our models, whichever is imported first: when the module of
    theirs is loaded, ours that registers with it follows."""

    ours = {  # noqa: RUF012
        "transformers.models.auto.configuration_auto": "langevin.models.config",
        "transformers.models.auto.modeling_auto": "langevin.models.backbone",
    }

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in cls.ours else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: Any) -> None:
            load(module)
            import_module(cls.ours[name])

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AutoClasses)
for _name, _module in _AutoClasses.ours.items():
    if _name in sys.modules:
        import_module(_module)
