"""The currency between evaluation, studies and reports: a number with its name, its kind and its place."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["exact", "bound", "diagnostic", "cost"]


@dataclass(frozen=True)
class Metric:
    """What a number means, and which way is better."""

    name: str
    label: str
    unit: str
    better: Literal["lower", "higher", "near zero", "neither"]
    signed: bool = False  # may be negative, though low is good

    @property
    def low_is_good(self) -> bool:
        return self.better in ("lower", "near zero")

    @property
    def worst(self) -> float | None:
        return None if self.better == "neither" else math.inf if self.low_is_good else -math.inf

    def graded(self, value: float) -> float:
        """What is compared: of what is good near zero, the distance from it."""
        return abs(value) if self.better == "near zero" else value


@dataclass(frozen=True)
class Row:
    """A measured value. `at` holds its coordinates ({"length": 1024}, {"checkpoint": "best"}); se is its
    standard error, n what it was measured on, and low to high a 95 % interval where there is one."""

    metric: str
    value: float
    kind: Kind = "exact"
    at: dict[str, Any] = field(default_factory=dict)
    se: float | None = None
    n: int | None = None
    low: float | None = None
    high: float | None = None

    @staticmethod
    def of(metric: str, found: Any, kind: Kind, n: int, at: dict[str, Any] | None = None) -> "Row":
        """Of an estimate with an interval, by which the standard error is that of a normal one."""
        low, high = found.low, found.high
        se = None if low is None or high is None else (high - low) / 3.92
        return Row(metric, found.value, kind, at or {}, se, n, low, high)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
