"""Pictures, made from run folders only: PNG, SVG or PDF by the name of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from langevin.errors import UsageError
from langevin.runs import Run

FORMATS = (".png", ".svg", ".pdf")


def curves(runs: list[Run]) -> Figure:
    """Training and validation loss by tokens seen."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for i, run in enumerate(runs):
        colour = f"C{i}"
        a_step = run.config.batch * run.config.context
        train, valid = run.metrics("train"), run.metrics("valid")
        axes.plot([r["tokens"] for r in train], [r["loss"] for r in train], colour, alpha=0.3, linewidth=1)
        axes.plot(
            [r["step"] * a_step for r in valid],
            [r["loss"] for r in valid],
            colour,
            marker=".",
            label=f"{run.config.mixer} ({run.path.name})",
        )
    axes.set(xlabel="training tokens", ylabel="loss (nats per token)", title="Learning curves")
    axes.legend(title="validation; training pale")
    axes.grid(alpha=0.3)
    return figure


def reliability(runs: list[Run]) -> Figure:
    """Accuracy against confidence, with the number of tokens in each bin."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(5.5, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1, label="perfectly calibrated")
    for i, run in enumerate(runs):
        found = _evaluation(run)["calibration"]
        bins = [b for b in found["reliability"] if b["count"]]
        confidence = [b["confidence"] for b in bins]
        ece = found["ece"]["value"]
        top.plot(
            confidence,
            [b["accuracy"]["value"] if isinstance(b["accuracy"], dict) else b["accuracy"] for b in bins],
            f"C{i}",
            marker="o",
            markersize=4,
            label=f"{run.config.mixer} (ECE {ece:.3f})",
        )
        bottom.step(confidence, [b["count"] for b in bins], f"C{i}", where="mid")
    top.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), title="Reliability")
    top.legend()
    bottom.set(xlabel="confidence", ylabel="tokens", yscale="log")
    return figure


def attention(runs: list[Run], text: str, layer: int, head: int) -> Figure:
    """The weights of one head on a text, captured inside the real forward pass."""
    figure, every = plt.subplots(
        1, len(runs), figsize=(5.5 * len(runs), 5), squeeze=False, layout="constrained"
    )
    for axes, run in zip(every[0], runs, strict=True):
        ids = run.tokenizer(text, return_tensors="pt").input_ids[:, : run.config.context]
        with torch.no_grad():
            weights = run.model(ids, output_attentions=True, use_cache=False).attentions
        if not (0 <= layer < len(weights) and 0 <= head < weights[0].shape[1]):
            raise UsageError(
                f"{run.path} has {len(weights)} layers of {weights[0].shape[1]} heads, "
                f"not layer {layer}, head {head}",
                "Both count from 0.",
            )
        picture = axes.imshow(weights[layer][0, head], cmap="viridis", aspect="equal")
        labels = [run.tokenizer.decode([i]) for i in ids[0].tolist()]
        if len(labels) <= 40:
            axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
            axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.set(xlabel="key", ylabel="query", title=f"{run.config.mixer}, layer {layer}, head {head}")
        figure.colorbar(picture, ax=axes, label="weight", shrink=0.8)
    return figure


def times(runs: list[Run]) -> Figure:
    """Learned scalars over depth, a point per head."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    shown = False
    for i, run in enumerate(runs):
        rows = [r for r in _evaluation(run)["learned"] if r.get("channel") is None]
        for j, name in enumerate(sorted({r["name"] for r in rows})):
            mine = [r for r in rows if r["name"] == name]
            axes.scatter(
                [r["layer"] for r in mine],
                [r["value"] for r in mine],
                marker="os^Dv"[j % 5],
                color=f"C{i}",
                label=f"{run.config.mixer}: {name}",
            )
            shown = True
    if not shown:
        raise UsageError("these runs learn no scalars", "Try ssmax, heat(t='head') or +drift.")
    axes.set(xlabel="layer", ylabel="learned value", title="Learned scalars over depth")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def save(figure: Figure, path: Path) -> None:
    if path.suffix not in FORMATS:
        raise UsageError(f"{path} is no picture", f"End the name in {', '.join(FORMATS)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _evaluation(run: Run) -> dict[str, Any]:
    for split in ("test", "valid"):
        path = run.path / f"evaluation-{split}.json"
        if path.is_file():
            return dict(json.loads(path.read_text()))
    raise UsageError(f"{run.path} was not evaluated yet", f"Run: langevin evaluate {run.path}")
