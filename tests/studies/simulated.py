"""Studies whose runs were never trained: rows go in, as tasks give them, and sentences come out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from langevin.evaluation.rows import Kind, Row
from langevin.studies.compare import concluded
from langevin.studies.plan import Part, Plan
from langevin.studies.results import ArmResult, PartResult, Point, Results, RunResult

FACTS: dict[str, Any] = {"commands": ["langevin compare …"], "data": {"name": "stories"}}
DIVERGED, FAILED, MISSING = math.inf, math.nan, None


def plan_of(arms: int | Sequence[str], seeds: int = 0, parts: int = 1, **options: Any) -> Plan:
    """seeds: 0 for the default."""
    names = [f"m{i}=heat(t={i + 1})" for i in range(arms)] if isinstance(arms, int) else list(arms)
    named = [f"part {i}" if parts > 1 else "" for i in range(parts)]
    options = {"metrics": ("nll", "accuracy", "ece"), **options}
    return Plan(tuple(Part(tuple(names), {}, name) for name in named), tuple(range(seeds)), **options)


def run_of(
    seed: int, value: float | None, metric: str = "nll", kind: Kind = "exact", **more: Any
) -> RunResult:
    if value is MISSING:
        return RunResult(seed)
    if math.isinf(value):
        return RunResult(seed, "diverged", "the loss was not finite")
    if math.isnan(value):
        return RunResult(seed, "failed", "the disk is full")
    rows = {"nll": Row("nll", 3.0), metric: Row(metric, value, kind), **more.pop("rows", {})}
    return RunResult(seed, "done", rows=tuple(rows.values()), **more)


def judged(
    values: Mapping[str, Sequence[float | None]],
    *,
    kinds: Mapping[str, Kind] | None = None,
    examples: Mapping[str, Callable[[int], Sequence[float]]] | None = None,
    exploratory: str = "",
    facts: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Plan, Results]:
    """A study of one part: the primary metric of every arm by seed."""
    names = [f"{name}=heat(t={i + 1})" for i, name in enumerate(values)]
    seeds = len(next(iter(values.values())))
    plan = plan_of(names, seeds, **options)
    arms = []
    for name, own in values.items():
        kind: Kind = (kinds or {}).get(name, "exact")
        runs = [run_of(seed, value, plan.primary, kind) for seed, value in enumerate(own)]
        if examples is not None:
            runs = [RunResult(**{**vars(run), "examples": tuple(examples[name](run.seed))}) for run in runs]
        arms.append(ArmResult(name, {"mixer": "heat"}, tuple(runs)))
    part = PartResult("", tuple(arms))
    return plan, concluded(plan, (part,), {**FACTS, **(facts or {})}, exploratory)


def states(results: Results, metric: str | None = None) -> dict[str, str]:
    """Of the primary metric, by arm."""
    wanted = metric or results.primary.name
    return {
        c.key.arm: c.state for c in results.contrasts if c.key.metric == wanted and c.key.place == "best"
    }


def curve(*losses: float) -> tuple[Point, ...]:
    return tuple(Point(10 * (i + 1), 100 * (i + 1), loss) for i, loss in enumerate(losses))


def told(results: Results) -> str:
    """The verdict as it stands on the page."""
    return " ".join([results.verdict.answer, results.verdict.sure, *results.verdict.more])


def normal_parts(rng: np.random.Generator, plan: Plan, effect: float = 0.0) -> tuple[PartResult, ...]:
    """Runs that share a seed share its luck; paired differences have a standard deviation of 0.02, and the
    second arm of the first part has `effect` of them."""
    parts = []
    for p, part in enumerate(plan.parts):
        luck = rng.normal(0, 0.05, len(plan.seeds))
        arms = []
        for i, arm in enumerate(part.read_arms):
            own = luck + rng.normal(0, 0.02 / math.sqrt(2), len(plan.seeds))
            own = own + (0.02 * effect if (p, i) == (0, 1) else 0.0)
            other = rng.normal(0.1, 0.01, len(plan.seeds))
            runs = tuple(
                RunResult(
                    seed,
                    "done",
                    rows=(Row("nll", 3 + x), Row("accuracy", 0.5 + y), Row("ece", y, "diagnostic")),
                )
                for seed, x, y in zip(plan.seeds, own.tolist(), other.tolist(), strict=True)
            )
            arms.append(ArmResult(arm.name, arm.changes, runs))
        parts.append(PartResult(part.name, tuple(arms)))
    return tuple(parts)
