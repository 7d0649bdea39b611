"""Finding things in the results of a comparison."""

from __future__ import annotations

from typing import Any

Results = dict[str, Any]


def metric_named(results: Results, name: str) -> dict[str, str]:
    """How a metric is called; one that is not described goes by its own name."""
    found: dict[str, str] = next((m for m in results["metrics"] if m["name"] == name), {})
    told = {key: value for key, value in found.items() if value is not None}
    return {"label": name, "unit": "", "better": "neither", **told}


def with_unit(label: str, unit: str) -> str:
    return f"{label} ({unit})" if unit else label


def comparison(results: Results, arm: str, metric: str, at: str = "best") -> dict[str, Any] | None:
    """The paired comparison of this arm with the reference, if one was made."""
    for c in results.get("comparisons") or []:
        if c["arm"] == arm and c["metric"] == metric and c.get("at", "best") == at:
            return dict(c)
    return None
