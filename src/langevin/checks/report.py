"""The outcome of a check: one row per property."""

from dataclasses import asdict, dataclass
from typing import Any


class Broken(Exception):
    """A property does not hold; the message says where."""


class NotOffered(Exception):
    """The subject does not have what the property is about."""


@dataclass(frozen=True)
class Row:
    property: str
    passed: bool | None  # None: not offered by the subject
    detail: str


@dataclass(frozen=True)
class Report:
    subject: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed is not False for row in self.rows)

    @property
    def failures(self) -> list[str]:
        """The names of the properties that do not hold."""
        return [row.property for row in self.rows if row.passed is False]

    def as_dict(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"subject": self.subject, "passed": self.passed, "rows": rows}

    def __str__(self) -> str:
        mark = {True: "pass", False: "FAIL", None: "-"}
        lines = [f"{mark[row.passed]:5} {row.property}: {row.detail}" for row in self.rows]
        return "\n".join([self.subject, *lines])
