"""Pictures, made from run folders only: PNG, SVG or PDF by the name of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from langevin.data.tokenizers import encode_prompt
from langevin.errors import UsageError
from langevin.runs import Run

FORMATS = (".png", ".svg", ".pdf")
TOKENS_SHOWN = 40


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


def reliability(runs: list[Run], split: str) -> Figure:
    """Accuracy against confidence, with the number of tokens in each bin."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(5.5, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1, label="perfectly calibrated")
    for i, run in enumerate(runs):
        found = _evaluation(run, split, "calibration")
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
    top.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), title=f"Reliability on {split}")
    top.legend()
    bottom.set(xlabel="confidence", ylabel="tokens", yscale="log")
    return figure


def attention(runs: list[Run], text: str | None, layer: int, head: int) -> Figure:
    """The weights of one head on a text (default: how the test data begin), captured inside the real
    forward pass."""
    figure, every = plt.subplots(
        1, len(runs), figsize=(5.5 * len(runs), 5), squeeze=False, layout="constrained"
    )
    for axes, run in zip(every[0], runs, strict=True):
        if text is None:
            start = run.task.prepare(run.config).tokens("test")[: min(TOKENS_SHOWN, run.config.context)]
            ids = torch.from_numpy(start.astype("int64"))[None]
        else:
            ids = torch.tensor(
                [encode_prompt(run.tokenizer, text, run.environment["data"])[: run.config.context]]
            )
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
        if len(labels) <= TOKENS_SHOWN:
            axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
            axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.set(xlabel="key", ylabel="query", title=f"{run.config.mixer}, layer {layer}, head {head}")
        figure.colorbar(picture, ax=axes, label="weight", shrink=0.8)
    return figure


def times(runs: list[Run], split: str) -> Figure:
    """Learned scalars over depth, a point per head."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    shown = False
    for i, run in enumerate(runs):
        rows = [r for r in _evaluation(run, split, "learned") if r.get("channel") is None]
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


def _evaluation(run: Run, split: str, part: str) -> Any:
    """A part of what was measured of the model that the run has now."""
    found = run.evaluation(split)
    if part not in found:
        raise UsageError(f"the evaluation of {run.path} on {split} has no {part}", "Draw something else.")
    return found[part]
