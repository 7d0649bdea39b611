"""Spec strings and the strict registry.

    heat(t=0.28)+drift   <->   Spec(Heat(t=0.28), (Drift(),))

A spec is a mixer and any number of output wrappers, each a frozen dataclass. Values are numbers,
strings (quotes may be left out), True, False or None. Unknown names and keys raise.
"""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

from langevin.errors import UsageError, unknown
from langevin.settings import check_type

T = TypeVar("T", bound=type)

MIXERS: dict[str, type] = {}
WRAPPERS: dict[str, type] = {}
ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "standard": ("softmax", {}),
    "logistic": ("sigmoid", {}),
    "softmax_free": ("sima", {}),
    "diffusion_fixed": ("heat", {"t": 1.0}),
    "diffusion_adaptive": ("heat", {"t": "adaptive"}),
}


def register(name: str) -> Callable[[T], T]:
    """Make a mixer's config class known by name."""
    return _registrar(MIXERS, name)


def register_wrapper(name: str) -> Callable[[T], T]:
    """Make an output wrapper's config class known by name."""
    return _registrar(WRAPPERS, name)


def _registrar(registry: dict[str, type], name: str) -> Callable[[T], T]:
    def add(cls: T) -> T:
        known = registry.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise UsageError(f"the name {name!r} is taken by {known.__module__}.{known.__name__}")
        cls.name = name  # type: ignore[attr-defined]
        registry[name] = cls
        parse.cache_clear()
        return cls

    return add


@dataclass(frozen=True)
class Spec:
    mixer: Any
    wrappers: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """The shortest spec that means this."""
        return "+".join(_written(part, in_full=False) for part in (self.mixer, *self.wrappers))

    def in_full(self) -> str:
        """Every key spelt out, for files that must mean the same after a default changes."""
        return "+".join(_written(part, in_full=True) for part in (self.mixer, *self.wrappers))


@lru_cache(maxsize=1024)
def parse(text: str) -> Spec:
    """Read a spec string; a UsageError says what is wrong and what is meant."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise UsageError(
            f"{text!r} is not a mixer spec",
            'Write name(key=value, ...)+wrapper(...), for example "heat(t=0.28)+drift".',
        ) from None
    parts: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        parts.insert(0, tree.right)
        tree = tree.left
    mixer = _config(text, tree, MIXERS, "mixer")
    return Spec(mixer, tuple(_config(text, part, WRAPPERS, "wrapper") for part in parts))


def _config(text: str, node: ast.expr, registry: dict[str, type], kind: str) -> Any:
    call = node if isinstance(node, ast.Call) else None
    function = call.func if call else node
    if not isinstance(function, ast.Name) or (call and call.args):
        raise UsageError(
            f"{text!r} is not a mixer spec",
            'Write name(key=value, ...)+wrapper(...), for example "heat(t=0.28)+drift".',
        )
    name, values = function.id, {}
    if kind == "mixer" and name in ALIASES:
        name, defaults = ALIASES[name]
        values.update(defaults)
    other = WRAPPERS if kind == "mixer" else MIXERS
    if name not in registry and name in other:
        article = "a wrapper" if kind == "mixer" else "a mixer"
        raise UsageError(f"{name} is {article}, not a {kind}", "Write mixer+wrapper+wrapper.")
    if name not in registry:
        raise unknown(kind, name, [*registry, *(ALIASES if kind == "mixer" else ())])
    cls = registry[name]
    keys = [f.name for f in fields(cls)]
    for keyword in call.keywords if call else ():
        if keyword.arg not in keys:
            raise _unknown_key(name, str(keyword.arg), keys)
        values[keyword.arg] = _value(text, keyword.value)
    return make(cls, values)


def make(cls: type, values: dict[str, Any]) -> Any:
    """A config of this class, its values checked against the declared types."""
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        check_type(f"{cls.name}({key}=...)", value, hints[key])  # type: ignore[attr-defined]
    return cls(**values)


def _unknown_key(name: str, key: str, keys: list[str]) -> UsageError:
    if not keys:
        return UsageError(f"{name} has no key {key!r}", f"{name} takes no keys.")
    error = unknown(f"key of {name}", key, keys)
    # A one-letter key is nearest to nothing: a repeated or contained letter is meant.
    if "Did you mean" not in error.remedy:
        near = [k for k in keys if k in key or key in k]
        if near:
            return UsageError(error.cause, f"Did you mean {near[0]!r}? {error.remedy}")
    return error


def _value(text: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise UsageError(
            f"{ast.unparse(node)!r} in {text!r} is not a value", "Use a number or a quoted string."
        ) from None


def _written(config: Any, in_full: bool) -> str:
    said = [
        f"{f.name}={getattr(config, f.name)!r}"
        for f in fields(config)
        if in_full or f.default is dataclasses.MISSING or getattr(config, f.name) != f.default
    ]
    return f"{config.name}({', '.join(said)})" if said else config.name
