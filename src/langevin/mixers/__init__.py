"""How tokens mix. `langevin.mixers()` lists the mixers by name; `langevin.mixers.build` makes one.

A mixer is one file: a frozen dataclass with the formula in its docstring, registered by name. Installed
packages may add theirs through the entry-point group `langevin.mixers`.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from torch import nn

from langevin.errors import UsageError, unknown
from langevin.kernels.view import View
from langevin.mixers.attend import attend
from langevin.mixers.drift import Wrapper
from langevin.mixers.mechanism import Geometry, Inputs, Mechanism, Scalars, SoftmaxMechanism
from langevin.mixers.neighbor import NeighborMixer
from langevin.mixers.spec import MIXERS, WRAPPERS, Spec, parse, register, register_wrapper

__all__ = [
    "MIXERS",
    "WRAPPERS",
    "Geometry",
    "Inputs",
    "Mechanism",
    "Scalars",
    "SoftmaxMechanism",
    "Spec",
    "View",
    "Wrapper",
    "attend",
    "build",
    "examples",
    "names",
    "parse",
    "register",
    "register_wrapper",
]


def names() -> list[str]:
    """Every registered mixer."""
    order = ["softmax", "ssmax", "heat", "sigmoid", "sima", "neighbor"]
    return sorted(MIXERS, key=lambda name: order.index(name) if name in order else len(order))


def examples() -> list[str]:
    """Specs that show every mixer and wrapper with its variants."""
    known = [(name, MIXERS[name]) for name in names()] + list(WRAPPERS.items())
    return [spec for name, cls in known for spec in getattr(cls, "examples", ()) or (name,)]


def build(
    spec: str | Spec,
    *,
    width: int,
    heads: int,
    causal: bool = True,
    layer: int = 0,
    depth: int = 4,
    max_length: int = 1024,
    **options: Any,
) -> nn.Module:
    """A mixer as a module x -> x.

    layer and depth say where it stands; max_length is the training length. Attention mixers also take
    kv_heads, window, positions ('none', 'rope' or 'alibi') and dropout; neighbor takes the grid of an
    image, (rows, columns). Call it as
    module(x, key_padding_mask=, documents=, cache=module.new_cache(), return_weights=).
    """
    spec = parse(spec) if isinstance(spec, str) else spec
    if max_length < 1 or depth < 1:
        raise UsageError(f"max_length={max_length} and depth={depth} must be 1 or more")
    from langevin.models.attention import Attention, NeighborMixing

    make: Any = Attention if isinstance(spec.mixer, Mechanism) else spec.mixer.module
    place = {"width": width, "heads": heads, "causal": causal, "layer": layer, "depth": depth}
    accepted = set(inspect.signature(make).parameters) - {*place, "spec", "max_length", "place"}
    for option in options:
        if option not in accepted:
            raise unknown(f"option of {spec.mixer.name}", option, accepted)
    module: nn.Module = make(spec, **place, max_length=max_length, **options)
    return NeighborMixing(module) if isinstance(module, NeighborMixer) else module


MIXERS.discover(__name__, __path__)


class _Callable(ModuleType):
    def __call__(self) -> list[str]:
        return names()


sys.modules[__name__].__class__ = _Callable
