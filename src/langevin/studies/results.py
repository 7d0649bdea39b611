"""Finding things in the results of a comparison."""

from __future__ import annotations

from typing import Any

Results = dict[str, Any]
Row = dict[str, Any]


def metric_named(results: Results, name: str) -> dict[str, str]:
    """How a metric is called; one that is not described goes by its own name."""
    found: dict[str, str] = next((m for m in results["metrics"] if m["name"] == name), {})
    told = {key: value for key, value in found.items() if value is not None}
    return {"name": name, "label": name, "unit": "", "better": "neither", **told}


def comparison(results: Results, arm: str, metric: str, at: str = "best") -> Row | None:
    """The paired comparison of this arm with the reference, if one was made."""
    for row in results.get("comparisons") or []:
        if row["arm"] == arm and row["metric"] == metric and row.get("at", "best") == at:
            return dict(row)
    return None


def width(row: Row) -> float:
    """Of the interval of a comparison; the size of its difference where it has none."""
    return float(abs(row["difference"]) if row["low"] is None else row["high"] - row["low"])


def done(arm: Row) -> list[Row]:
    """The runs of an arm that were finished."""
    return [run for run in arm["runs"] if run["status"] == "done"]


def names_in(parts: Any) -> list[str]:
    """The keys of several tables, some of which may be None, each once and in order."""
    return list(dict.fromkeys(name for part in parts for name in part or {}))
