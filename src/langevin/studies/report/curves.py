"""Learning curves: loss by tokens and by time, and the paired difference to the reference by tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from langevin.studies.report.svg import (
    WIDE,
    Axis,
    Frame,
    Look,
    axis,
    clipped,
    figure,
    line,
    scaffold,
    text,
)
from langevin.studies.results import Results
from langevin.studies.words import number, sentence_case

LINE_POINTS = 24_000
"""Points of all lines of a chart together: keeps the page small when there are many runs."""
START = 0.15
"""The share of training whose losses may lie above the frame, so that the ends can be told apart."""


@dataclass(frozen=True)
class Series:
    """The curves of an arm: (x, y) rows for every seed."""

    index: int
    name: str
    seeds: list[np.ndarray]

    def mean(self) -> np.ndarray:
        """The mean over seeds where all of them have been; the longest seed if they never overlap."""
        low, high = max(rows[0, 0] for rows in self.seeds), min(rows[-1, 0] for rows in self.seeds)
        if low > high:
            return max(self.seeds, key=len)
        grid = np.unique(np.concatenate([rows[:, 0] for rows in self.seeds]))
        grid = grid[(grid >= low) & (grid <= high)]
        return np.stack([grid, np.mean([np.interp(grid, *rows.T) for rows in self.seeds], axis=0)], axis=1)


def curves(results: Results) -> list[str]:
    """Every learning curve there are data for."""
    rows = [row for arm in results["arms"] for run in arm["runs"] for row in run.get("curve") or []]
    split = "valid" if any(row["split"] == "valid" for row in rows) else "train"
    loss = "validation loss" if split == "valid" else "training loss"
    held = ((results.get("data") or {}).get("splits") or {}).get(split) or {}
    true = held.get("true_nats_per_token") if split == "valid" else None
    tokens, seconds = (_series(results, split, by) for by in ("tokens", "seconds"))
    drawn = []
    if tokens:
        drawn.append(_losses("curve-tokens", f"{loss} by tokens", "training tokens", loss, tokens, true))
    if shifts := _differences(results, split):
        drawn.append(_shifts(shifts, loss, results["arms"][0]["name"]))
    if seconds:
        per, unit = _time_unit(max(seed[-1, 0] for series in seconds for seed in series.seeds))
        scaled = [Series(s.index, s.name, [rows / [per, 1] for rows in s.seeds]) for s in seconds]
        drawn.append(
            _losses("curve-time", f"{loss} by time", f"training time ({unit})", loss, scaled, true)
        )
    return drawn


def _series(results: Results, split: str, by: str) -> list[Series]:
    found = []
    for index, arm in enumerate(results["arms"]):
        seeds = [rows for run in arm["runs"] if len(rows := _rows(run, split, by))]
        if seeds:
            found.append(Series(index, arm["name"], seeds))
    return found


def _rows(run: dict[str, Any], split: str, by: str) -> np.ndarray:
    found = {
        row[by]: row["loss"]
        for row in run.get("curve") or []
        if row["split"] == split and row.get(by) is not None and row["loss"] is not None
    }
    return np.array(sorted(found.items()), dtype=float).reshape(-1, 2)


def _differences(results: Results, split: str) -> list[Series]:
    """Arm minus reference at the same seed and the same number of tokens."""
    first, *others = results["arms"]
    reference = {run["seed"]: _rows(run, split, "tokens") for run in first["runs"]}
    found = []
    for index, arm in enumerate(others, start=1):
        seeds = []
        for run in arm["runs"]:
            ours, theirs = _rows(run, split, "tokens"), reference.get(run["seed"], np.empty((0, 2)))
            at, i, j = np.intersect1d(ours[:, 0], theirs[:, 0], return_indices=True)
            if len(at):
                seeds.append(np.stack([at, ours[i, 1] - theirs[j, 1]], axis=1))
        if seeds:
            found.append(Series(index, arm["name"], seeds))
    return found


def _time_unit(longest: float) -> tuple[float, str]:
    return (3600.0, "h") if longest >= 3 * 3600 else (60.0, "min") if longest >= 180 else (1.0, "s")


def _losses(key: str, title: str, x_label: str, loss: str, arms: list[Series], true: float | None) -> str:
    seeds = [rows for series in arms for rows in series.seeds]
    ends = [rows[-1, 0] for rows in seeds]
    log = min(ends) > 0 and max(ends) / min(ends) >= 5
    if log:
        arms = [Series(s.index, s.name, [rows[rows[:, 0] > 0] for rows in s.seeds]) for s in arms]
    starts = [rows[0, 0] for series in arms for rows in series.seeds]
    x = axis([min(starts), max(ends)], pad=0.0, log=True) if log else axis([0, max(ends)], pad=0.0)
    late = [rows[rows[:, 0] >= START * rows[-1, 0], 1] for rows in seeds]
    low, high = min(values.min() for values in late), max(values.max() for values in late)
    cut = high < max(rows[:, 1].max() for rows in seeds)
    if true is not None and low - 1.2 * (high - low) < true < low:
        low = true
    frame = _frame(x, axis([low, high]))
    under = ""
    if true is not None and frame.y.low <= true <= frame.y.high:
        height = frame.at(x.low, true)[1]
        under = line((frame.left, height), (frame.left + frame.width, height), "truth")
        under += text(frame.left + 6, height - 6, f"true entropy {number(true)}", "label quiet halo")
    told = "; ".join(f"{series.name} ends at {number(series.mean()[-1, 1])}" for series in arms)
    label = x_label + (", log scale" if log else "")
    note = "The start lies above the frame." if cut else ""
    return _lines(
        key, sentence_case(title), told, frame, (label, f"{loss} (nats/token)"), arms, under, note
    )


def _shifts(arms: list[Series], loss: str, reference: str) -> str:
    late = [rows[rows[:, 0] >= START * rows[-1, 0], 1] for series in arms for rows in series.seeds]
    x = axis([0, max(rows[-1, 0] for series in arms for rows in series.seeds)], pad=0.0)
    frame = _frame(x, axis([0.0, *(v.min() for v in late), *(v.max() for v in late)]))
    zero = line(frame.at(x.low, 0), frame.at(x.high, 0), "zero")
    told = "; ".join(f"{series.name} ends at {number(series.mean()[-1, 1], sign=True)}" for series in arms)
    title = f"{sentence_case(loss)} beyond that of {reference}, by tokens"
    labels = ("training tokens", f"difference in {loss} (nats/token)")
    return _lines(
        "curve-difference", title, told, frame, labels, arms, zero, "Paired by seed; under zero is better."
    )


def _frame(x: Axis, y: Axis) -> Frame:
    return Frame(x, y, left=56, top=28, width=WIDE - 56 - 16, height=226)


def _lines(
    key: str,
    title: str,
    told: str,
    frame: Frame,
    labels: tuple[str, str],
    arms: list[Series],
    under: str,
    note: str,
) -> str:
    """Seeds thin under their mean, which ends in the arm's marker."""
    points = max(12, min(160, LINE_POINTS // sum(len(series.seeds) for series in arms)))
    thin, thick = [], []
    for series in arms:
        look = Look(series.index)
        average = [frame.at(x, y) for x, y in _thinned(series.mean(), points)]
        thick += [look.line(average), look.marker(average[-1])]
        if len(series.seeds) > 1:
            thin += [
                look.line([frame.at(x, y) for x, y in _thinned(s, points)], "seed") for s in series.seeds
            ]
    body = scaffold(frame, *labels) + under + clipped(key, frame, "".join(thin + thick))
    note = f"{'Thick: mean over seeds; thin: each seed. ' if thin else ''}{note}".strip()
    legend = [(series.index, series.name) for series in arms]
    return figure(key, title, f"{told}.", (WIDE, 300), body, legend=legend, note=note)


def _thinned(rows: np.ndarray, points: int) -> np.ndarray:
    if len(rows) <= points:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, points).round().astype(int))]
