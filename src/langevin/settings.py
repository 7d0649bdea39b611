"""Values that users set, checked against the types that configs declare."""

from __future__ import annotations

import math
import types
import typing
from typing import Any

from langevin.errors import UsageError


def check_type(where: str, value: Any, hint: Any) -> None:
    """Raise unless value fits the annotation (numbers, strings, Literal, None and unions of them)."""
    options = (
        typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    )
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} must be finite, not {value}")
    if any(_fits(value, option) for option in options):
        return
    raise UsageError(f"{where} must be {_options_in_words(options)}, not {value!r}")


def _fits(value: Any, option: Any) -> bool:
    if typing.get_origin(option) is typing.Literal:
        return any(value == a and type(value) is type(a) for a in typing.get_args(option))
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, option)


def _options_in_words(options: tuple[Any, ...]) -> str:
    words = {float: "a number", int: "a whole number", bool: "True or False", str: "a string"}
    parts = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            parts += [repr(a) for a in typing.get_args(option)]
        else:
            parts.append("None" if option is type(None) else words.get(option, str(option)))
    return " or ".join(parts)
