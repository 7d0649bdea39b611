"""`langevin check`: does a mixer, or a trained causal model, keep its promises?

langevin.check("heat(t='adaptive')").passed
langevin.check("mine.py:Mixer", against="ssmax(s=0.43)").failures
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from langevin.callable_module import callable_module
from langevin.checks.properties import PROPERTIES, formula
from langevin.checks.report import Broken, NotOffered, Report, Row
from langevin.checks.subjects import Subject, resolve
from langevin.errors import UsageError
from langevin.mixers import Spec

__all__ = ["Report", "Row", "check"]


def check(
    target: str | Spec | type | Callable[..., Any],
    *,
    against: str | None = None,
    only: list[str] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Try every property on a spec, a `file.py:Name`, a class or function, or a saved causal model.

    against compares with the formula of a registered mixer; only picks properties by name; progress is
    called with each property's name before it is tried.
    """
    if isinstance(target, str | Path) and Path(target).is_dir():
        from langevin.checks import causal_model

        model = causal_model.load(Path(target))
        name, properties = str(target), causal_model.PROPERTIES
        subject: Any = model
    else:
        subject = resolve(target)
        name, properties = subject.name, dict(PROPERTIES)
        reference = resolve(against) if against is not None else _itself(subject)
        if reference is not None:
            properties["formula"] = formula(reference)
    if only is not None:
        missing = [wanted for wanted in only if wanted not in properties]
        if missing:
            valid = ", ".join(properties)
            raise UsageError(f"unknown property {missing[0]!r}", f"Properties: {valid}.")
        properties = {wanted: properties[wanted] for wanted in only}
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny: threads would mostly wait for each other
    try:
        for title, trial in properties.items():
            progress(title)
            rows.append(_try(title, trial, subject))
    finally:
        torch.set_num_threads(threads)
    return Report(name, tuple(rows))


def _itself(subject: Subject) -> Subject | None:
    """A registered mixer must agree with its own explicit weights."""
    return subject if subject.spec is not None and subject.qkv is not None else None


def _try(title: str, trial: Callable[[Any], str], subject: Any) -> Row:
    random_state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        return Row(title, True, trial(subject))
    except Broken as broken:
        return Row(title, False, str(broken))
    except NotOffered as reason:
        return Row(title, None, str(reason))
    except UsageError as error:
        if isinstance(subject, Subject) and subject.spec is None:
            raise
        return Row(title, False, error.cause)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        return Row(title, False, f"{type(error).__name__}: {first_line}")
    finally:
        torch.set_rng_state(random_state)


callable_module(__name__, check)
