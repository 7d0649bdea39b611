"""Specs of mixers: a mixer and any number of output wrappers, each a frozen dataclass.

heat(t=0.28)+drift   <->   Spec(Heat(t=0.28), (Drift(),))
"""

import ast
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from langevin.errors import UsageError
from langevin.registry import Registry, syntax, written

_EXAMPLE = 'name(key=value, ...)+wrapper(...), for example "heat(t=0.28)+drift"'

MIXERS = Registry(
    "mixer",
    _EXAMPLE,
    aliases={
        "standard": ("softmax", {}),
        "logistic": ("sigmoid", {}),
        "softmax_free": ("sima", {}),
        "diffusion_fixed": ("heat", {"t": 1.0}),
        "diffusion_adaptive": ("heat", {"t": "adaptive"}),
    },
)
WRAPPERS = Registry("wrapper", _EXAMPLE)
register, register_wrapper = MIXERS.register, WRAPPERS.register


@dataclass(frozen=True)
class Spec:
    mixer: Any
    wrappers: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """The shortest spec that means this."""
        return "+".join(written(part) for part in (self.mixer, *self.wrappers))

    def in_full(self) -> str:
        """Every key spelt out, for files that must mean the same after a default changes."""
        return "+".join(written(part, in_full=True) for part in (self.mixer, *self.wrappers))


@lru_cache(maxsize=1024)
def parse(text: str) -> Spec:
    """Read a spec string; a UsageError says what is wrong and what is meant."""
    tree = syntax(text, MIXERS.kind, _EXAMPLE)
    parts: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        parts.insert(0, tree.right)
        tree = tree.left
    _refuse_wrong_place(tree, WRAPPERS, "a wrapper, not a mixer")
    for part in parts:
        _refuse_wrong_place(part, MIXERS, "a mixer, not a wrapper")
    return Spec(MIXERS.config(text, tree), tuple(WRAPPERS.config(text, part) for part in parts))


def _refuse_wrong_place(node: ast.expr, others: Registry, what: str) -> None:
    name = getattr(node.func if isinstance(node, ast.Call) else node, "id", None)
    if name in others:
        raise UsageError(f"{name} is {what}", "Write mixer+wrapper+wrapper.")


MIXERS.changed.append(parse.cache_clear)
WRAPPERS.changed.append(parse.cache_clear)
