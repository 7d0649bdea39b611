"""Spec strings and the strict registries of mixers, objectives and tasks.

    heat(t=0.28)   <->   Heat(t=0.28)

What is registered is a frozen dataclass: its fields are the keys of the spec. Values are numbers, strings
(quotes may be left out), True, False or None. Unknown names and keys raise, and a key may come once.
"""

import ast
import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, TypeVar

from langevin.errors import UsageError, unknown
from langevin.settings import check_type

T = TypeVar("T", bound=type)


class Registry(dict[str, type]):
    """Classes by name. `kind` says what they are; aliases are other names, with values of their own."""

    def __init__(
        self, kind: str, example: str, aliases: Mapping[str, tuple[str, dict[str, Any]]] | None = None
    ) -> None:
        super().__init__()
        self.kind, self.example, self.aliases = kind, example, dict(aliases or {})
        self.changed: list[Callable[[], None]] = []  # called when a name is added

    def register(self, name: str) -> Callable[[T], T]:
        """Make a class known by name."""

        def add(cls: T) -> T:
            known = self.get(name)
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise UsageError(f"the name {name!r} is taken by {known.__module__}.{known.__name__}")
            cls.name = name  # type: ignore[attr-defined]
            self[name] = cls
            for tell in self.changed:
                tell()
            return cls

        return add

    def discover(self, package: str, path: Any) -> None:
        """Import every file of a package, and what installed packages add by entry points of its name."""
        for file in iter_modules(path):
            import_module(f"{package}.{file.name}")
        for plugin in entry_points(group=package):
            plugin.load()

    def parse(self, text: str, start: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The config that a spec string means; what it does not say is as in `start`, or the default."""
        return self.config(text, syntax(text, self.kind, self.example), start)

    def config(self, text: str, node: ast.expr, start: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The config of one `name` or `name(key=value)` of a spec."""
        call = node if isinstance(node, ast.Call) else None
        function = call.func if call else node
        if not isinstance(function, ast.Name) or (call and call.args):
            raise no_spec(text, self.kind, self.example)
        name, values = self.aliases.get(function.id, (function.id, {}))
        if name not in self:
            raise unknown(self.kind, name, [*self, *self.aliases])
        keys, given = [f.name for f in fields(self[name])], set()
        values = {**start, **values}
        for keyword in call.keywords if call else ():
            key = str(keyword.arg)
            if not keys:
                raise UsageError(f"{name} has no key {key!r}", f"{name} takes no keys.")
            if key not in keys:
                raise unknown(f"key of {name}", key, keys)
            if key in given:
                raise UsageError(f"{key} comes twice in {text!r}", "Give each key once.")
            given.add(key)
            values[key] = _value(text, keyword.value)
        return make(self[name], values)

    def described(self) -> list[dict[str, str]]:
        """Name, keys and first line of the documentation of everything that is registered."""
        rows = []
        for name, cls in self.items():
            keys = ", ".join(f"{f.name}={f.default!r}" for f in fields(cls))
            about = (sys.modules[cls.__module__].__doc__ or "").strip().partition("\n")[0]
            rows.append({"name": name, "keys": keys or "-", "about": about.rstrip(".")})
        return rows


def syntax(text: str, kind: str, example: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise no_spec(text, kind, example) from None


def no_spec(text: str, kind: str, example: str) -> UsageError:
    article = "an" if kind[0] in "aeiou" else "a"
    return UsageError(f"{text!r} is not {article} {kind} spec", f"Write {example}.")


def make(cls: type, values: dict[str, Any]) -> Any:
    """A config of this class, its values checked against the declared types."""
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        check_type(f"{cls.name}({key}=...)", value, hints[key])  # type: ignore[attr-defined]
    return cls(**values)


def written(config: Any, in_full: bool = False) -> str:
    """The shortest spec that means a config; in full, every key is spelt out, for files that must mean the
    same after a default changes."""
    said = [
        f"{f.name}={getattr(config, f.name)!r}"
        for f in fields(config)
        if in_full or f.default is dataclasses.MISSING or getattr(config, f.name) != f.default
    ]
    return f"{config.name}({', '.join(said)})" if said else str(config.name)


def _value(text: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise UsageError(
            f"{ast.unparse(node)!r} in {text!r} is not a value", "Use a number or a quoted string."
        ) from None
