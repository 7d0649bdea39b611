"""What is under test, made to look alike: a module x -> y that may take padding, documents and a cache.

A subject comes from a spec, a folder with a saved causal model (saved.py), or `file.py:Name`, where Name is
- a Mechanism (a frozen dataclass as in langevin/mixers),
- a function (q, k, v, *, causal, key_padding_mask, documents, window) -> out, like `langevin.attend`, or
- an nn.Module class x -> x, built from those of width, heads, causal, layer, depth, max_length, window and
  kv_heads it asks for, whose forward may take key_padding_mask, documents and cache (then with a method
  new_cache()).
Whatever a function or a module does not take is not tested, and the report says so.

B batch, L tokens, W width.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from langevin.checks.layouts import Layout, layouts
from langevin.checks.report import Broken, NotOffered
from langevin.errors import UsageError, unknown
from langevin.mixers import MIXERS, Mechanism, Spec, attend, build, parse

Tensors = dict[str, Tensor]
WIDTH, HEADS = 32, 4
PLACE: dict[str, Any] = {"width": WIDTH, "heads": HEADS, "layer": 1, "depth": 4, "max_length": 64}


@dataclass(frozen=True)
class Subject:
    name: str
    make: Callable[..., nn.Module]  # (causal=, and window= or kv_heads= where taken) -> module
    directions: tuple[bool, ...]  # the values of causal it can be built with
    takes: frozenset[str]  # of key_padding_mask, documents, cache, window, kv_heads
    without: tuple[tuple[set[str], str], ...] = ()  # what it does not take (together), and why
    qkv: Callable[..., Tensor] | None = None  # like langevin.attend, where there are q, k and v
    spec: Spec | None = None
    against: Subject | None = None  # whose formula it should compute
    embedding: nn.Embedding | None = None  # of a model that reads token ids
    lengths: tuple[int, int] = (17, 150)  # odd, and past the blocks of the chunked kernels

    def module(self, causal: bool, **options: int) -> nn.Module:
        """In evaluation mode, in `dtype`."""
        return self._built(self.dtype, causal, **options)

    def _built(self, dtype: torch.dtype, causal: bool, **options: int) -> nn.Module:
        torch.default_generator.manual_seed(0)
        module = self.make(causal=causal, **options).to(dtype).eval()
        if self.embedding is None:  # a new mixer: learned scalars at their start would hide mistakes
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.3)
        return module

    def tokens(self, batch: int, length: int) -> Tensor:
        """Token ids (B, L) for a model that reads them, else x (B, L, W)."""
        x = self._drawn(batch, length)
        return x.to(self.dtype) if x.is_floating_point() else x

    def inputs(self, batch: int, length: int) -> Tensor:
        """x (B, L, W)."""
        x = self._drawn(batch, length)
        return (x if self.embedding is None else self.embedding(x).detach()).to(self.dtype)

    def _drawn(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        if self.embedding is None:
            return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=generator)
        ids = self.embedding.weight.detach().abs().amax(1).nonzero()[:, 0]  # a padding token is all zeros
        return ids[torch.randint(len(ids), (batch, length), generator=generator)]

    def run(
        self, module: nn.Module, x: Tensor, *, seed: int = 0, moved: Tensors | None = None, **options: Any
    ) -> Tensor:
        """module(x), with its parameters moved to those that are given."""
        if moved is not None:
            moved = {name: p for name, p in moved.items() if name != "x"}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed, of every device, takes 1 ms
            out = module(x, **options) if moved is None else functional_call(module, moved, (x,), options)
        if not isinstance(out, Tensor):
            raise Broken(f"a {type(out).__name__} came out, not a tensor")
        if out.shape[:2] != x.shape[:2] or (self.embedding is None and out.shape != x.shape):
            raise Broken(f"x of shape {tuple(x.shape)} gave {tuple(out.shape)}")
        return out

    def _refused(self, *wanted: str) -> list[str]:
        """Why it does not take all of these together."""
        together = [reason for some, reason in self.without if some <= set(wanted)]
        return together + [f"takes no {name}" for name in wanted if name not in self.takes]

    def need(self, *wanted: str) -> None:
        for reason in self._refused(*wanted):
            raise NotOffered(reason)

    def layouts(self, length: int, *others: str) -> list[Layout]:
        """The layouts that it takes, together with what else is wanted."""
        return [one for one in layouts(length) if not self._refused(*one.masks, *others)]

    @cached_property
    def _precision(self) -> tuple[torch.dtype, torch.dtype]:
        """float64, or float32 where only that gives numbers; and the narrowest type it casts to inside."""
        for dtype in (torch.float64, torch.float32):
            casts = Casts(dtype)
            try:
                module = self._built(dtype, self.directions[0])
                x = self._drawn(3, 9)
                for layout in self.layouts(9):
                    with torch.no_grad(), casts:
                        out = module(x.to(dtype) if x.is_floating_point() else x, **layout.masks)
                    if not bool(out[layout.real_BL].isfinite().all()):
                        raise Broken("not finite")
            except Exception:
                continue
            return dtype, casts.narrowest
        return torch.float64, torch.float64  # every property will tell why

    @property
    def dtype(self) -> torch.dtype:
        return self._precision[0]

    @property
    def rounding(self) -> float:
        """ε of the narrowest type in which it computes."""
        return torch.finfo(self._precision[1]).eps

    @property
    def tolerance(self) -> float:
        """To what share of the largest entry two ways of computing the same must agree."""
        return self.rounding ** (2 / 3)

    @property
    def note(self) -> str:
        """What a row adds about precision."""
        outside, inside = self._precision
        if outside != torch.float64:
            return " (in float32, as float64 does not work)"
        return "" if inside == outside else f" ({str(inside).removeprefix('torch.')} inside)"


class Casts(TorchDispatchMode):
    """Watches to which floating types numbers are cast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.narrowest = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and args[0].is_floating_point()
        if cast and out.is_floating_point():
            self.narrowest = max(self.narrowest, out.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return out


def rms(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def resolve(target: str | Path | Spec | type | Callable[..., Any]) -> Subject:
    """The subject named by a spec, a folder, a `file.py:Name`, or given as a class or function."""
    if isinstance(target, Spec):
        return _of_spec(target)
    if isinstance(target, str | Path):
        if Path(target).is_dir():
            from langevin.checks import saved

            return saved.subject(Path(target))
        target = str(target)
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
    def make(**options: Any) -> nn.Module:
        return build(spec, **PLACE, **options)

    def qkv(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        return attend(q, k, v, spec, **options)

    takes = frozenset({"key_padding_mask", "documents", "cache"})
    found = Subject(str(spec), make, (True, False), takes, spec=spec)
    if not isinstance(spec.mixer, Mechanism):
        return found
    found = replace(found, takes=takes | {"window", "kv_heads"}, qkv=qkv)
    return replace(found, against=found)


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


def _of_module_class(cls: type[nn.Module], name: str) -> Subject:
    asked = dict(list(inspect.signature(cls.__init__).parameters.items())[1:])
    forward = set(inspect.signature(cls.forward).parameters)
    for key, parameter in asked.items():
        named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if named and parameter.default is parameter.empty and key not in {*PLACE, "causal"}:
            raise UsageError(
                f"{name} cannot be built: its constructor asks for {key}",
                f"It may ask for {', '.join(PLACE)} and causal, and nothing else without a default.",
            )

    def make(**options: Any) -> nn.Module:
        return cls(**{key: value for key, value in {**PLACE, **options}.items() if key in asked})

    takes = {"key_padding_mask", "documents"} & forward | {"window", "kv_heads"} & set(asked)
    if "cache" in forward and hasattr(cls, "new_cache"):
        takes.add("cache")
    directions = (True, False) if "causal" in asked else (True,)
    return Subject(name, make, directions, frozenset(takes))


def _of_function(function: Callable[..., Tensor], name: str) -> Subject:
    parameters = inspect.signature(function).parameters
    forwards = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = {*parameters, "causal"} if forwards else set(parameters)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return function(q, k, v, **{key: o for key, o in options.items() if key in accepted})

    def make(**options: Any) -> nn.Module:
        return FunctionMixer(call, **options)

    takes = frozenset({"key_padding_mask", "documents", "window"} & accepted | {"cache"})
    return Subject(name, make, _directions(make, "causal" in accepted), takes, qkv=call)


def _directions(make: Callable[..., nn.Module], takes_causal: bool) -> tuple[bool, ...]:
    """What a function makes of causal: it follows it, or is one or the other whatever is said."""
    x = torch.randn(1, 9, WIDTH)
    later = torch.cat([x[:, :8], x[:, 8:] + 3], 1)
    causal, bidirectional = make(causal=True), make(causal=False)
    bidirectional.load_state_dict(causal.state_dict())
    try:
        if takes_causal and not torch.equal(causal(x), bidirectional(x)):
            return True, False
        return (torch.equal(causal(x)[:, :8], causal(later)[:, :8]),)
    except Exception:  # every property will tell why
        return True, False


class FunctionMixer(nn.Module):
    """A function of q, k, v between projections, with a key-value cache."""

    def __init__(self, function: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def new_cache(self) -> Any:
        return DynamicCache()

    def forward(self, x_BLW: Tensor, *, cache: Any = None, **masks: Tensor) -> Tensor:
        B, L, _ = x_BLW.shape
        q, k, v = self.project(x_BLW).view(B, L, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        return self.function(q, k, v, **self.options, **masks).transpose(1, 2).flatten(-2)
