"""Several runs on one machine: how many at a time, and whether compiling them is worth it.

A small model leaves most of a GPU idle, and the host's part of every run leaves it all: processes that each
make one run at a time fill it better than one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Literal

import torch

from langevin.environment import can_compile
from langevin.studies.plan import Plan
from langevin.studies.terms import Size
from langevin.training.start import resolved

BUSY = 5e12  # FLOPs of a step that leave no room for another run
WORTH = 1e16  # FLOPs of a comparison from which compiling pays: it takes half a minute or more
LARGE = 8192  # a vocabulary from which compiling the loss pays: it takes seconds
MOST = 4  # runs at a time on a GPU
CORES = 4  # of the host, for each of them after the first
PART = 0.6  # of the memory of the GPU, for all runs together


def divide(plan: Plan, sizes: dict[str, Size], device: str, workers: int | None) -> int:
    """How many processes make runs: as the user says; else one a core, or as many as a GPU has time and
    memory for."""
    if workers is not None:
        return workers
    every = len(plan.arms) * len(plan.seeds)
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(cores // plan.threads, every))
    largest = max(sizes.values(), key=lambda size: size.parameters)
    if largest.flops_per_token * plan.settings.batch * plan.settings.context > BUSY:
        return 1
    memory = PART * torch.cuda.get_device_properties(device).total_memory
    fit = int(memory / run_bytes(plan, largest))
    return max(1, min(MOST, 1 + (os.cpu_count() or 1) // CORES, fit, every))


def run_bytes(plan: Plan, size: Size) -> float:
    """Roughly: weights, gradients and moments; a batch's logits three times; 40 numbers a token, layer and
    channel for the backward pass; and what CUDA takes."""
    config = plan.settings
    tokens = config.batch * config.context
    activations = 10 * size.vocabulary + 80 * config.layers * config.width
    return 16 * size.parameters + tokens * activations + 2**29


def spelled_out(plan: Plan, sizes: dict[str, Size], device: str, before: dict[str, Any] | None) -> Plan:
    """The plan with what `auto` means here; on a GPU, compiled as far as the runs are worth it, or as they
    were before, where seeds are added."""
    settings = plan.settings
    if settings.compile == "auto" and before is not None and isinstance(before.get("settings"), dict):
        settings = replace(settings, compile=before["settings"].get("compile", "auto"))
    if settings.compile == "auto" and device.startswith("cuda") and can_compile(device):
        largest = max(sizes.values(), key=lambda size: size.flops_per_token)
        settings = replace(settings, compile=worth_compiling(plan, largest))
    return replace(plan, settings=resolved(settings, device))


def worth_compiling(plan: Plan, size: Size) -> Literal["on", "loss", "off"]:
    """Models, where all runs together are long enough to gain what it costs (arms compile side by side);
    else the loss, where that is much of the work."""
    config = plan.settings
    tokens = config.tokens or config.batch * config.context * (config.steps or 0)
    if size.flops_per_token * tokens * len(plan.seeds) * len(plan.arms) > WORTH:
        return "on"
    return "loss" if size.vocabulary >= LARGE else "off"
