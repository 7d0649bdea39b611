"""How numbers and lists are written: as many digits as the uncertainty leaves."""

import math
from collections.abc import Iterable

from langevin.studies.inference import ERROR_RATE

MINUS = "\N{MINUS SIGN}"
NOTHING = "–"


def number(value: float | None, spread: float | None = None, sign: bool = False) -> str:
    """A number to two digits of its spread, or to four of its own when no spread is known."""
    if value is None:
        return NOTHING
    if value == 0 and not spread:
        return "0"
    known = spread is not None and spread > 1e-9 * abs(value)
    size = spread if known and spread else abs(value)
    decimals = (1 if known else 3) - math.floor(math.log10(size))
    shown = f"{abs(value):,.{min(max(decimals, 0), 8)}f}"
    if not shown.strip("0."):
        return shown
    return (MINUS if value < 0 else "+" if sign else "") + shown


def in_words(value: float, width: float) -> str:
    """A number in a sentence: two digits of the width, or of itself; more where it would read as zero."""
    width = width if width > 1e-9 * abs(value) else abs(value)
    while value and width > 1e-8 and not number(value, width).strip("0."):
        width /= 10
    return number(value, width)


def interval(low: float | None, high: float | None, sign: bool = False, spread: float | None = None) -> str:
    """[low, high] to two digits of the spread, by default its half width; empty when there is none."""
    if low is None or high is None:
        return ""
    spread = spread or (high - low) / 2
    return f"[{number(low, spread, sign)}, {number(high, spread, sign)}]"


def half_width(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else (high - low) / 2


def common_spread(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """The middle half width of several intervals, so that a column shows as many decimals in every row."""
    widths = sorted(w for low, high in pairs if (w := half_width(low, high)))
    return widths[len(widths) // 2] if widths else None


def probability(p: float | None, digits: str = ".3f") -> str:
    """A p to three decimals, to more where it would read as the limit that it is over."""
    if p is None:
        return NOTHING
    shown = format(p, digits)
    return "< 0.001" if p < 0.001 else f"{p:.6g}" if float(shown) <= ERROR_RATE < p else shown


def p_value(p: float) -> str:
    """p = 0.031"""
    return f"p {'' if p < 0.001 else '= '}{probability(p, '.2g')}"


def amount(value: float | None, unit: str = "") -> str:
    """A count with a prefix: 12,400 → 12.4 k, 3.1e9 B → 3.1 GB."""
    if value is None:
        return NOTHING
    if value == 0:
        return f"0 {unit}".strip()
    rounded = float(f"{value:.2e}")
    step = min(max(math.floor(math.log10(abs(rounded)) / 3), 0), 5)
    scaled = rounded / 1000**step
    decimals = max(0, 2 - math.floor(math.log10(abs(scaled))))
    prefix = ("", "k", "M", "G" if unit else "B", "T", "P")[step]
    return f"{scaled:.{decimals}f} {prefix}{unit}".strip()


def percent(share: float, sign: bool = False) -> str:
    """0.0142 → 1.4 %"""
    shown = f"{100 * abs(share):.1f}" if abs(share) < 0.995 else f"{100 * abs(share):.0f}"
    shown = shown if float(shown) or not share else f"{100 * abs(share):.1g}"
    return f"{MINUS if share < 0 else '+' if sign else ''}{shown} %"


def listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def counted(count: int, noun: str) -> str:
    """1 seed, 2 seeds"""
    return f"{count} {noun}{'s' * (count != 1)}"


def with_unit(label: str, unit: str) -> str:
    return f"{label} ({unit})" if unit else label


def sentence_case(words: str) -> str:
    return words[:1].upper() + words[1:]
