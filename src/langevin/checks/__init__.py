"""`langevin check`: does a mixer, or a saved causal model, keep its promises?

    langevin.check("heat(t='adaptive')").passed
    langevin.check("mine.py:Mixer", against="ssmax(s=0.43)").failures

Subjects are what is under test, properties what must hold.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from langevin.checks.properties import PROPERTIES
from langevin.checks.report import Broken, NotOffered, Report, Row
from langevin.checks.subjects import Subject, resolve
from langevin.errors import one_line, unknown
from langevin.mixers import Spec

__all__ = ["Report", "Row", "check"]


def check(
    target: str | Path | Spec | type | Callable[..., Any],
    *,
    against: str | None = None,
    only: list[str] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Try every property on a spec, a `file.py:Name`, a class or function, or a folder of a saved model.

    against compares with the formula of a registered mixer; only picks properties by name; progress is
    called with each property's name before it is tried.
    """
    for name in only or ():
        if name not in PROPERTIES:
            raise unknown("property", name, PROPERTIES)
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            subject = resolve(target)
            if against is not None:
                subject = replace(subject, against=resolve(against))
            if subject.embedding is None:
                torch.set_num_threads(1)  # the tensors are tiny: threads would mostly wait for each other
            return Report(subject.name, tuple(_try(name, subject, progress) for name in only or PROPERTIES))
    finally:
        torch.set_num_threads(threads)


def _try(name: str, subject: Subject, progress: Callable[[str], None]) -> Row:
    progress(name)
    torch.default_generator.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Row(name, True, PROPERTIES[name](subject) + subject.note)
    except NotOffered as reason:
        return Row(name, None, str(reason))
    except Broken as broken:
        return Row(name, False, str(broken) + subject.note)
    except Exception as error:  # whatever a stranger's code raises
        return Row(name, False, one_line(error))
