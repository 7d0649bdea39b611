"""A module that can be called, so that `langevin.check(...)` works beside `langevin.check.Report`."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def callable_module(name: str, function: Callable[..., Any]) -> None:
    """Make the module `name` callable: a call of it calls `function`."""

    class CallableModule(types.ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    sys.modules[name].__class__ = CallableModule
