"""Equal terms: how many parameters the arms have, and how to give them the same number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from langevin.errors import UsageError
from langevin.evaluation.cost import parameter_count
from langevin.models.cost import flops_of
from langevin.settings import TrainConfig
from langevin.studies.controls import TOLERANCE
from langevin.studies.plan import Arm, Plan
from langevin.training.start import build


@dataclass(frozen=True)
class Size:
    parameters: int
    flops_per_token: float
    vocabulary: int


def size(config: TrainConfig, data: Any) -> Size:
    """Of the model of a config, which is not built in memory."""
    with torch.device("meta"):
        model = build(config, data)
    vocabulary = getattr(model.config, "vocab_size", 0)
    return Size(parameter_count(model), flops_of(model, config.context), vocabulary)


def sizes(plan: Plan, data: Any) -> dict[str, Size]:
    return {arm.name: size(plan.config(arm, plan.seeds[0]), data) for arm in plan.arms}


def unequal(counts: dict[str, Size]) -> list[str]:
    """A sentence for each arm whose parameters differ from the first arm's by more than 1 %."""
    first, *others = counts
    reference = counts[first].parameters
    return [
        f"{name} has {counts[name].parameters:,} parameters, "
        f"{100 * (counts[name].parameters / reference - 1):+.1f} % against {first} ({reference:,})"
        for name in others
        if abs(counts[name].parameters / reference - 1) > TOLERANCE
    ]


def equalised(plan: Plan, data: Any) -> Plan:
    """The plan with arms whose parameters match the first arm's, by the width of their MLPs.

    Where no MLP is narrow enough, by the width of the model. An arm within 1 % stays as it is.
    """
    first, *others = plan.arms
    target = size(plan.config(first, plan.seeds[0]), data).parameters
    return replace(plan, arms=(first, *(_matched(plan, arm, data, target) for arm in others)))


def _matched(plan: Plan, arm: Arm, data: Any, target: int) -> Arm:
    def count(**changes: Any) -> int:
        return size(plan.config(arm, plan.seeds[0], **changes), data).parameters

    if abs(count() / target - 1) <= TOLERANCE:
        return arm
    least = count(mlp_width=1)
    a_column = count(mlp_width=2) - least
    inner = 1 + round((target - least) / a_column)
    if inner >= 1 and abs(count(mlp_width=inner) / target - 1) <= TOLERANCE:
        return replace(arm, changes={**arm.changes, "mlp_width": inner})
    heads = plan.settings.heads
    step = heads * (2 if plan.settings.positions == "rope" else 1)
    widths = range(step, 4 * plan.settings.width + 1, step)
    width = min(widths, key=lambda w: abs(count(width=w) - target))
    if abs(count(width=width) / target - 1) > TOLERANCE:
        raise UsageError(
            f"no width brings {arm.name} within 1 % of {target:,} parameters (nearest: "
            f"{count(width=width):,} at {width})",
            "Compare without --equalise, or choose a larger --width.",
        )
    return replace(arm, changes={**arm.changes, "width": width})
