"""How numbers and lists are written in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable

from langevin.studies.statistics import ERROR_RATE


def number(value: float, width: float) -> str:
    """As many decimals as show two digits of the width, and more where a number would read as zero."""
    scale = width if width > 1e-9 * abs(value) else abs(value)
    decimals = min(8, max(0, 1 - math.floor(math.log10(scale)))) if scale else 0
    while value and decimals < 8 and float(f"{value:.{decimals}f}") == 0:
        decimals += 1
    return f"{value:,.{decimals}f}".replace("-", "−")


def signed(value: float, width: float) -> str:
    return ("+" if value > 0 else "") + number(value, width)


def p_value(p: float) -> str:
    if p < 0.001:
        return "p < 0.001"
    text = f"{p:.2g}"
    # A p just over the limit must not read as the limit.
    return f"p = {p:.6g}" if float(text) <= ERROR_RATE < p else f"p = {text}"


def listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
