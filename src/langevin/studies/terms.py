"""Equal terms: what the arms' models weigh, how to give them the same weight, and how many runs a machine
can take at a time."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from langevin.environment import can_compile
from langevin.errors import UsageError
from langevin.evaluation.rows import Row
from langevin.settings import TrainConfig
from langevin.studies.plan import Arm, Part, Plan
from langevin.studies.words import TOLERANCE
from langevin.studies.work import sizes
from langevin.tasks import TASKS
from langevin.training.fitting import units
from langevin.training.start import resolved

BUSY = 5e12  # FLOPs of a step that leave no room on a GPU for another run
WORTH = 1e16  # FLOPs of a study from which compiling models pays: it takes half a minute or more
LARGE = 8192  # a vocabulary from which compiling the loss pays: it takes seconds
MOST, CORES = 4, 4  # runs at a time on a GPU, and cores of the host for each of them after the first
MOST_MERGED, CORES_MERGED = 10, 2  # the same where a service merges what processes ask of a GPU
SHARE = 0.6  # of the memory of the GPU, for all runs together

Sizes = dict[tuple[str, str], list[Row]]  # by part and arm


def all_sizes(plan: Plan, data: list[Any]) -> Sizes:
    return {
        (part.name, arm.name): sizes(plan.config(part, arm, 0), own)
        for part, own in zip(plan.parts, data, strict=True)
        for arm in part.read_arms
    }


def in_units(plan: Plan, data: list[Any]) -> Plan:
    """The plan with budgets in epochs as what these are of the task's unit."""
    parts = []
    for part, own in zip(plan.parts, data, strict=True):
        if part.config.epochs is not None:
            amount = units(part.config, plan.task, own)
            part = replace(part, settings={**part.settings, "epochs": None, "tokens": amount})
        parts.append(part)
    return replace(plan, parts=tuple(parts))


def equalised(plan: Plan, data: list[Any]) -> Plan:
    """The plan with arms whose parameters match the first arm's, by the width of their MLPs.

    Where no MLP is narrow enough, by the width of the model. An arm within 1 % stays as it is.
    """
    parts = []
    for part, own in zip(plan.parts, data, strict=True):
        first, *others = part.read_arms
        target = _parameters(plan.config(part, first, 0), own)
        arms = [first, *(_matched(plan, part, arm, own, target) for arm in others)]
        parts.append(replace(part, arms=tuple(arm.text for arm in arms)))
    return replace(plan, parts=tuple(parts))


def equal_in_flops(plan: Plan, found: Sizes) -> Plan:
    """The plan with arms that train on as many tokens as the first arm's FLOPs pay for."""
    parts = []
    for part in plan.parts:
        first, *others = part.read_arms
        total = budget(plan.config(part, first, 0)) * found[part.name, first.name][1].value
        arms = [first]
        for arm in others:
            tokens = round(total / found[part.name, arm.name][1].value)
            same = tokens == budget(plan.config(part, arm, 0))
            arms.append(arm if same else arm.with_(tokens=tokens, steps=None))
        parts.append(replace(part, arms=tuple(arm.text for arm in arms)))
    return replace(plan, parts=tuple(parts))


def budget(config: TrainConfig) -> int:
    """Of a run, in the task's unit."""
    return config.tokens or TASKS.parse(config.task).tokens_a_step(config) * (config.steps or 0)


def _parameters(config: TrainConfig, data: Any) -> int:
    return int(sizes(config, data)[0].value)


def _matched(plan: Plan, part: Part, arm: Arm, data: Any, target: int) -> Arm:
    def count(**changes: Any) -> int:
        return _parameters(plan.config(part, arm, 0, **changes), data)

    if abs(count() / target - 1) <= TOLERANCE:
        return arm
    if part.config.init is not None:
        raise UsageError("--equalise cannot change a pretrained model", "Leave one of them out.")
    least = count(mlp_width=1)
    a_column = count(mlp_width=2) - least
    inner = 1 + round((target - least) / a_column)
    if inner >= 1 and abs(count(mlp_width=inner) / target - 1) <= TOLERANCE:
        return arm.with_(mlp_width=inner)
    config = part.config
    step = config.heads * (2 if config.positions == "rope" else 1)
    width = min(range(step, 4 * config.width + 1, step), key=lambda w: abs(count(width=w) - target))
    if abs(count(width=width) / target - 1) > TOLERANCE:
        raise UsageError(
            f"no width brings {arm.name} within 1 % of {target:,} parameters (nearest: "
            f"{count(width=width):,} at {width})",
            "Compare without --equalise, or choose a larger --width.",
        )
    return arm.with_(width=width)


def workers_for(plan: Plan, found: Sizes, data: list[Any], device: str, workers: int | None) -> int:
    """How many processes make runs: as the user says; else one a core, or as many as a GPU has time and
    memory for."""
    if workers is not None:
        return workers
    every = len(found) * len(plan.seeds)
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(cores // plan.threads, every))
    largest, needed = 0.0, 1.0
    for part, own in zip(plan.parts, data, strict=True):
        for arm in part.read_arms:
            config = plan.config(part, arm, 0)
            tokens = config.batch * config.context
            parameters, flops = (row.value for row in found[part.name, arm.name])
            largest = max(largest, flops * tokens)
            # Weights, gradients and moments; a batch's logits three times; 40 numbers a token, layer and
            # channel for the backward pass; and what CUDA takes.
            activations = 10 * getattr(own, "vocab_size", 0) + 80 * config.layers * config.width
            needed = max(needed, 16 * parameters + tokens * activations + 2**29)
    if largest > BUSY:
        return 1
    fit = int(SHARE * torch.cuda.get_device_properties(device).total_memory / needed)
    most, for_each = (MOST_MERGED, CORES_MERGED) if _merged() else (MOST, CORES)
    return max(1, min(most, 1 + (os.cpu_count() or 1) // for_each, fit, every))


def _merged() -> bool:
    """Whether NVIDIA's multi-process service runs, by which kernels of several processes run at once."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def spelled_out(
    plan: Plan, found: Sizes, data: list[Any], device: str, before: dict[str, Any] | None
) -> Plan:
    """The plan with what `auto` means here; on a GPU, compiled as far as the runs are worth it, or as they
    were before, where the study goes on."""
    there = before["plan"]["parts"] if before is not None else []
    parts = []
    for i, (part, own) in enumerate(zip(plan.parts, data, strict=True)):
        config = replace(part.config, device=device)
        if config.compile == "auto" and i < len(there):
            config = replace(config, compile=there[i]["settings"].get("compile", "auto"))
        if config.compile == "auto" and device.startswith("cuda") and can_compile(device):
            config = replace(config, compile=_worth_compiling(plan, part, found, own))
        settings = {**part.settings, "compile": config.compile, "device": device}
        for arm in part.read_arms:  # what cannot be trained is told before anything is
            full = resolved(plan.config(replace(part, settings=settings), arm, 0), device)
        settings |= {name: getattr(full, name) for name in ("data", "precision", "compile", "context")}
        if config.init is not None and Path(config.init).is_dir():
            settings["init"] = str(Path(config.init).absolute())
        parts.append(replace(part, settings=settings))
    return replace(plan, parts=tuple(parts))


def _worth_compiling(plan: Plan, part: Part, found: Sizes, data: Any) -> Literal["on", "loss", "off"]:
    """Models, where all runs together are long enough to gain what it costs (arms compile side by side);
    else the loss, where that is much of the work."""
    config, task = part.config, TASKS.parse(part.config.task)
    tokens = budget(config) * config.batch * config.context / task.tokens_a_step(config)
    flops = sum(found[part.name, arm.name][1].value for arm in part.read_arms)
    if flops * tokens * len(plan.seeds) > WORTH:
        return "on"
    return "loss" if task.unit == "tokens" and getattr(data, "vocab_size", 0) >= LARGE else "off"
