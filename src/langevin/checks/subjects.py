"""What is under test, made to look alike: a module x -> x that may take padding, documents and a cache.

A subject comes from a spec, or from `file.py:Name` where Name is
- a Mechanism (a frozen dataclass as in langevin/mixers),
- a function (q, k, v, *, causal, key_padding_mask, documents) -> out, like `langevin.attend`, or
- an nn.Module class x -> x, built from those of width, heads, causal, layer, depth, max_length it asks
  for, whose forward may take key_padding_mask, documents and cache (then with a method new_cache()).
Whatever a function or a module does not take is not tested, and the report says so.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from langevin.errors import UsageError, unknown
from langevin.mixers import Mechanism, Spec, attend, build, parse
from langevin.mixers.spec import MIXERS

WIDTH, HEADS = 32, 4


@dataclass(frozen=True)
class Subject:
    name: str
    make: Callable[[bool, int], nn.Module]  # (causal, width) -> module
    directions: tuple[bool, ...]  # the values of causal it can be built with
    takes: frozenset[str]  # of key_padding_mask, documents, cache
    qkv: Callable[..., Tensor] | None = None  # like langevin.attend, where there are q, k and v
    spec: Spec | None = None

    def module(self, causal: bool, width: int = WIDTH, seed: int = 0) -> nn.Module:
        """A fresh module with every parameter, learned scalars included, off its initial value."""
        torch.manual_seed(seed)
        module = self.make(causal, width).double()
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.3)
        return module


def resolve(target: str | Spec | type | Callable[..., Any]) -> Subject:
    """The subject named by a spec, a `file.py:Name`, or given as a class or function."""
    if isinstance(target, Spec):
        return _of_spec(target)
    if isinstance(target, str):
        if ".py:" in target or target.endswith(".py"):
            return _of_object(load(target), target.rpartition(":")[2])
        return _of_spec(parse(target))
    return _of_object(target, getattr(target, "__name__", str(target)))


def load(target: str) -> Any:
    """The object `Name` of the file `file.py` in 'file.py:Name'."""
    path_text, _, name = target.rpartition(":")
    if not path_text:
        raise UsageError(f"{target} does not say what to check in it", f"Give {target}:Name.")
    path = Path(path_text)
    if not path.is_file():
        raise UsageError(f"no such file: {path}", "Give file.py:Name, a path from here.")
    module_name = f"langevin_checked_{path.stem}"
    found = importlib.util.spec_from_file_location(module_name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} does not import: {type(error).__name__}: {error}") from error
    candidates = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    if name not in candidates:
        raise unknown(f"name in {path}", name, candidates)
    return getattr(module, name)


def _of_spec(spec: Spec) -> Subject:
    def make(causal: bool, width: int) -> nn.Module:
        return build(spec, width=width, heads=HEADS, causal=causal, layer=1, depth=4, max_length=64)

    def qkv(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return attend(q, k, v, spec, **options)

    takes = frozenset({"key_padding_mask", "documents", "cache"})
    is_mechanism = isinstance(spec.mixer, Mechanism)
    return Subject(str(spec), make, (True, False), takes, qkv if is_mechanism else None, spec)


def _of_object(found: Any, name: str) -> Subject:
    if inspect.isclass(found) and issubclass(found, Mechanism):
        found.name = found.name or name
        return _of_spec(Spec(found()))
    if found in MIXERS.values():
        return _of_spec(Spec(found()))
    if inspect.isclass(found) and issubclass(found, nn.Module):
        return _of_module_class(found, name)
    if inspect.isfunction(found):
        return _of_function(found, name)
    raise UsageError(
        f"{name} is neither a Mechanism, an nn.Module class nor a function of q, k, v",
        "See docs/checking.md for the three forms.",
    )


def _accepted(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _of_module_class(cls: type[nn.Module], name: str) -> Subject:
    wanted = _accepted(cls.__init__)

    def make(causal: bool, width: int) -> nn.Module:
        place = {
            "width": width,
            "heads": HEADS,
            "causal": causal,
            "layer": 1,
            "depth": 4,
            "max_length": 64,
        }
        try:
            return cls(**{key: value for key, value in place.items() if key in wanted})
        except TypeError as error:
            raise UsageError(
                f"{name} cannot be built: {error}",
                f"Its constructor may ask for {', '.join(place)}, and nothing else without a default.",
            ) from error

    takes = {"key_padding_mask", "documents"} & _accepted(cls.forward)
    if "cache" in _accepted(cls.forward) and hasattr(cls, "new_cache"):
        takes.add("cache")
    directions = (True, False) if "causal" in wanted else (True,)
    return Subject(name, make, directions, frozenset(takes))


def _of_function(function: Callable[..., Tensor], name: str) -> Subject:
    accepted = _accepted(function)
    takes = {"key_padding_mask", "documents"} & accepted

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return function(q, k, v, **{key: o for key, o in options.items() if key in accepted})

    def make(causal: bool, width: int) -> nn.Module:
        return FunctionMixer(call, width, HEADS, causal)

    directions = (True, False) if "causal" in accepted else (True,)
    return Subject(name, make, directions, frozenset({*takes, "cache"}), call)


class FunctionMixer(nn.Module):
    """A function of q, k, v between projections, with a key-value cache."""

    def __init__(self, function: Callable[..., Tensor], width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.function, self.heads, self.causal = function, heads, causal
        self.project = nn.Linear(width, 3 * width, bias=False)

    def new_cache(self) -> Any:
        return DynamicCache()

    def forward(
        self,
        x_BLW: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        B, L, _ = x_BLW.shape
        q, k, v = self.project(x_BLW).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        options: dict[str, Any] = {"causal": self.causal}
        if key_padding_mask is not None:
            options["key_padding_mask"] = key_padding_mask
        if documents is not None:
            options["documents"] = documents
        return self.function(q, k, v, **options).transpose(1, 2).flatten(-2)
