"""What `langevin plot` draws of run folders."""

from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from langevin import figures
from langevin.data.images import read_image
from langevin.data.tokenizers import encode_prompt
from langevin.errors import UsageError
from langevin.figures import Grid, Heads, Line
from langevin.runs import Run

TOKENS_SHOWN = 40


def curves(runs: list[Run]) -> Figure:
    """Validation loss by tokens (or examples) seen, and training loss pale."""
    lines = []
    for i, run in enumerate(runs):
        a_step = run.task.tokens_a_step(run.config)
        train, valid = (
            ([row["step"] * a_step for row in rows], [row["loss"] for row in rows])
            for rows in (run.metrics("train"), run.metrics("valid"))
        )
        lines.append(Line(f"{run.config.mixer} ({run.path.name})", i, *valid, pale=[train]))
    unit = runs[0].task.unit
    loss = f"loss (nats per {unit.removesuffix('s')}); training pale"
    return figures.curves(lines, (f"training {unit}", loss))


def reliability(runs: list[Run], split: str) -> Figure:
    """Accuracy against confidence, with the number of tokens in each bin."""
    lines, counts = [], []
    for i, run in enumerate(runs):
        found = _evaluation(run, split, "calibration")
        bins = [b for b in found["reliability"] if b["count"]]
        name = f"{run.config.mixer} (ECE {found['ece']['value']:.3f})"
        lines.append(Line(name, i, [b["confidence"] for b in bins], [b["accuracy"]["value"] for b in bins]))
        counts.append([b["count"] for b in bins])
    return figures.reliability(lines, counts)


def attention(runs: list[Run], text: str | None, layer: int, head: int, image: str | None) -> Figure:
    """The weights of one head on a text or an image (default: how the test data begin), captured inside the
    real forward pass. Of an image: how much of the class token's weight, or of the mean of all patches',
    each patch gets."""
    grids, labels = [], ("key", "query")
    for run in runs:
        shown = run.model.config.grid if run.model.main_input_name == "pixel_values" else None
        if (image if shown is None else text) is not None:
            raise UsageError(f"{run.path} reads {'images' if shown else 'texts'}", "Give it such.")
        read, names = _tokens(run, text) if shown is None else ({"pixel_values": _pixels(run, image)}, [])
        with torch.no_grad():
            weights = run.model(**read, output_attentions=True, use_cache=False).attentions
        if not (0 <= layer < len(weights) and 0 <= head < weights[0].shape[1]):
            raise UsageError(
                f"{run.path} has {len(weights)} layers of {weights[0].shape[1]} heads, "
                f"not layer {layer}, head {head}",
                "Both count from 0.",
            )
        w_QK, picture = weights[layer][0, head], None
        if shown is not None:
            labels, picture = ("", "patches"), read["pixel_values"][0].permute(1, 2, 0).numpy()
            asked = w_QK[-1] if run.model.config.pooling == "class" else w_QK.mean(0)
            w_QK = asked[: shown[0] * shown[1]].reshape(shown)
        name = f"{run.config.mixer}, layer {layer}, head {head}: "
        grids.append(Grid(w_QK.tolist(), names, names, name, picture))
    return figures.heatmap(grids, labels, "weight")


def _tokens(run: Run, text: str | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What a model reads of a text, and its words where they are few."""
    if text is None:
        ids = run.task.prepare(run.config).tokens("test")[: min(TOKENS_SHOWN, run.config.context)].tolist()
    else:
        ids = encode_prompt(run.tokenizer, text, run.environment["data"])[: run.config.context]
    names = [run.tokenizer.decode([i]) for i in ids] if len(ids) <= TOKENS_SHOWN else []
    return {"input_ids": torch.tensor([ids])}, names


def _pixels(run: Run, image: str | None) -> torch.Tensor:
    if image is None:
        return torch.from_numpy(run.task.prepare(run.config).images("test")[:1].copy())
    return torch.from_numpy(read_image(Path(image), run.model.config.image_size)[0][None])


def times(runs: list[Run], split: str) -> Figure:
    """Learned scalars over depth, a point per head."""
    arms: list[Heads] = []
    for run in runs:
        rows = [row for row in _evaluation(run, split, "learned") if row.get("channel") is None]
        for name in sorted({row["name"] for row in rows}):
            heads = [(row["layer"], row["value"]) for row in rows if row["name"] == name]
            arms.append(Heads(f"{run.config.mixer}: {name}", len(arms), heads))
    if not arms:
        raise UsageError("these runs learn no scalars", "Try ssmax, heat(t='head') or +drift.")
    return figures.scalars(arms, "learned value")


def _evaluation(run: Run, split: str, part: str) -> Any:
    """A part of what was measured of the model that the run has now."""
    found = run.evaluation(split)
    if part not in found:
        raise UsageError(f"the evaluation of {run.path} on {split} has no {part}", "Draw something else.")
    return found[part]
