"""Made-up results, as typed as real ones: nothing is trained; intervals, p and states are computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from langevin.evaluation.rows import Metric, Row
from langevin.studies.results import (
    Answer,
    ArmResult,
    Key,
    Look,
    PartResult,
    Point,
    Results,
    RunResult,
    Trial,
    Verdict,
    contrasts,
)

METRICS = (
    Metric("nll", "test loss", "nats/token", "lower"),
    Metric("accuracy", "accuracy", "fraction", "higher"),
    Metric("ece", "expected calibration error", "fraction", "near zero"),
)
EFFECTS = {
    "softmax": 0.0,
    "ssmax": -0.021,
    "heat(t='head')": -0.006,
    "heat(t=0.28)": 0.034,
    "sigmoid": 0.011,
    "sima": 0.41,
    "neighbor(iters=4)": 0.047,
    "softmax+drift": 0.0008,
}
PUBLISHED = {"claim": "SSMax has a lower loss.", "published": "−0.8 %", "ours": "−0.7 % [−0.9, −0.5]"}


def study(
    arms: int = 6,
    seeds: int = 8,
    parts: tuple[str, ...] = ("",),
    *,
    ended: int | None = None,
    swap: bool = False,
    grid: bool = False,
    diverged: bool = False,
    claims: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> Results:
    """ended: how many runs of each arm have; renamed: arms with other names than their mixers'."""
    names = list(EFFECTS)[:arms]
    made = tuple(_part(part, names, seeds, p, ended, swap, grid, diverged) for p, part in enumerate(parts))
    for old, new in (renamed or {}).items():
        made = tuple(
            replace(
                part, arms=tuple(replace(arm, name=new) if arm.name == old else arm for arm in part.arms)
            )
            for part in made
        )
    results = Results(
        "Does the choice of attention change what a small story model learns?",
        METRICS,
        "tokens",
        tuple(range(seeds)),
        made,
        answers=(Answer(parts[-1], direction="seen", **PUBLISHED),) if claims else (),
        within=0.05 if swap else None,
        looks=(Look(tuple(range(seeds))),),
        not_controlled=("Learning rates are tuned on three values.", "One machine <only>."),
        commands=(
            "langevin compare softmax ssmax \"heat(t='head')\" --data stories --seeds 8 --out runs/cmp",
        ),
        environment={"langevin": "0.2", "torch": "2.12.0", "device": "NVIDIA H200", "commit": "c0ffee" * 6},
        data={
            "name": "stories",
            "tokenizer": "bpe-4096",
            "splits": {"test": {"sha256": "ab" * 32, "tokens": 99_000}},
        },
    )
    if results.finished:
        family = [Key(part.name, arm.name, "nll") for part in made for arm in part.arms[1:]]
        results = replace(results, contrasts=contrasts(results, family))
        answer = (
            "ssmax has a lower test loss than softmax; sima, neighbor and heat(t=0.28) a higher one; "
            "two are not told apart."
        )
        sure = f"{len(family)} contrasts, {seeds} pairs each: adjusted p at most 0.039 where it is said."
        more = (
            "ssmax is lower by 0.021 nats/token (95 % t interval 0.018 to 0.024).",
            "softmax+drift differs by 0.0008 at most, which is not confirmed.",
            "sima trains in 0.82 × softmax's time and loses 0.41 nats/token.",
        )
        results = replace(results, verdict=Verdict(answer, sure, more))
    return results


def _part(name, names, seeds, number, ended, swap, grid, diverged) -> PartResult:
    draw = np.random.default_rng(number)
    base = 1.62 - 0.11 * number + 0.01 * draw.standard_normal(seeds)
    arms = tuple(
        ArmResult(
            arm,
            {"mixer": arm, **({"lr": 1e-3} if arm == "sima" else {})},
            tuple(
                _run(arm, seed, base[seed] + EFFECTS[arm] + 0.004 * draw.standard_normal(), draw, grid)
                if ended is None or seed < ended
                else RunResult(seed)
                for seed in range(seeds)
            ),
            _costs(arm, index),
            tuple(
                Trial(lr, None if lr > 2e-3 and arm == "sima" else 1.7 + (lr - 1e-3) ** 2)
                for lr in (5e-4, 1e-3, 4e-3)
            ),
        )
        for index, arm in enumerate(names)
    )
    if diverged:
        last = arms[-1]
        lost = [
            replace(run, status="diverged", error="loss is not finite at step 812 <batch 3>", rows=())
            for run in last.runs[:2]
        ]
        arms = (*arms[:-1], replace(last, runs=(*lost, *last.runs[2:])))
    untouched = RunResult(-1, "done", curve=(Point(0, 0, 1.60),)) if swap else None
    settings = {"layers": 4 * (number + 1), "width": 256, "context": 256, "optimizer": "adamw"}
    return PartResult(name, arms, settings, untouched)


def _run(arm: str, seed: int, loss: float, draw: np.random.Generator, grid: bool) -> RunResult:
    steps = range(0, 4001, 100)
    curve = tuple(
        Point(
            step,
            step * 5000,
            loss
            + (7 - loss) * math.exp(-step / 250)
            + 0.3 * math.exp(-step / 1200)
            + 0.003 * draw.standard_normal(),
        )
        for step in steps
    )
    ece = 0.02 + 0.2 * abs(EFFECTS[arm]) + 0.002 * draw.standard_normal()
    rows = [Row("nll", loss), Row("accuracy", 0.6 - loss / 20), Row("ece", ece, "diagnostic")]
    rows += [Row("ece", ece * (2 - step / 4000), "diagnostic", {"step": step}) for step in steps]
    if grid:
        lengths = (128, 256, 512, 1024)
        rows += [
            Row("needle", max(0.0, 1 - n / 1500 * d - 0.01 * seed), "exact", {"depth": d, "length": n})
            for n in lengths
            for d in (0.1, 0.5, 0.9)
        ]
        rows += [Row("nll", loss + n / 4000, "exact", {"length": n}) for n in lengths]
    bins = [
        {
            "low": i / 10,
            "high": (i + 1) / 10,
            "count": 900 // (i + 1),
            "confidence": i / 10 + 0.05,
            "accuracy": min(1.0, i / 10 + 0.05 - ece),
        }
        for i in range(10)
    ]
    learned = [
        {
            "layer": layer,
            "head": head,
            "name": "t",
            "value": 0.3 + 0.05 * layer + 0.02 * draw.standard_normal(),
        }
        for layer in range(4)
        for head in range(4)
    ]
    sample = {
        "prompt": "Once upon a time",
        "text": f"Once upon a time there was a <b>{arm}</b> dog.\nIt ran far. " + "It slept well. " * 20,
    }
    details = {"reliability": bins, "sample": sample, **({"learned": learned} if "heat" in arm else {})}
    return RunResult(seed, "done", rows=tuple(rows), curve=curve, details=details)


def _costs(arm: str, index: int) -> tuple[Row, ...]:
    time = {"sima": 0.82, "neighbor(iters=4)": 1.9}.get(arm, 1 + 0.02 * index)
    ends = {"low": time - 0.015, "high": time + 0.015} if index else {}
    return (
        Row("parameters", 3_214_592 + 64 * index, "cost"),
        Row("flops_per_token", 2.1e7 + 1e5 * index, "cost"),
        Row("time_ratio", time, "cost", **ends),
        Row("tokens_per_second", 812_345 / time, "cost", low=800_000 / time, high=824_000 / time),
        Row("peak_memory_bytes", 3.2e9 + 1e7 * index, "cost"),
        Row("state_bytes", 524_288, "cost", {"context": 1024}),
    )
