"""What `langevin plot` draws: of run folders, of a study, and of what `langevin bench` wrote."""

from pathlib import Path
from typing import Any

import torch

from langevin import figures
from langevin.data.images import read_image
from langevin.data.tokenizers import encode_prompt
from langevin.errors import UsageError, unknown
from langevin.evaluation.rows import Row
from langevin.figures import Grid
from langevin.runs import Run, load
from langevin.runs.files import read_json
from langevin.studies.compare import collect
from langevin.studies.numbers import MINUS, listed
from langevin.studies.plan import FILE, read_plan
from langevin.studies.report import charts
from langevin.studies.report.page import Chart
from langevin.studies.report.study import marks
from langevin.studies.results import ArmResult, PartResult, Results, RunResult
from langevin.studies.work import curve_of, details_of

TOKENS_SHOWN, BLANK = 40, {" ": "␣", "\n": "⏎"}
COSTS = {
    "both_ratio": "forward and backward (× softmax)",
    "both_ms": "forward and backward (ms)",
    "forward_ratio": "forward (× softmax)",
    "forward_ms": "forward (ms)",
    "peak_ratio": "peak memory (× softmax)",
    "peak_mib": "peak memory (MiB)",
    "ms_p50": "time (ms, median)",
    "ratio": "time (× softmax)",
    "tokens_per_second": "speed (tokens/s)",
    "mib_a_text": "memory (MiB a text)",
}


def curves(paths: list[Path]) -> list[Chart]:
    """Validation loss by tokens (or examples) seen, and training loss pale."""
    return _each_part(charts.curves, _results(paths, None), "was not evaluated twice", "Let it train on.")


def reliability(paths: list[Path], split: str) -> list[Chart]:
    """Accuracy against confidence, with the number of tokens in each bin."""
    remedy = "Give runs of lm or classify, and run langevin evaluate."
    return _each_part(charts.reliability, _results(paths, split), "has no calibration", remedy)


def times(paths: list[Path], split: str) -> list[Chart]:
    """Learned scalars over depth, a point per head."""
    results = _results(paths, split)
    drawn = [one for part in results.parts for one in charts.scalars(results, part)]
    if not drawn:
        raise UsageError("these runs learn no scalars", "Try ssmax, heat(t='head') or +drift.")
    return drawn


def needle(paths: list[Path], split: str, metric: str, by: str) -> list[Chart]:
    """How often what was hidden is found: heatmaps side by side."""
    return _places(_results(paths, split), metric, by or "depth")


def lengths(paths: list[Path], split: str, metric: str, by: str) -> list[Chart]:
    """Loss over length, or over position."""
    return _places(_results(paths, split), metric, by or "length")


def _places(results: Results, metric: str, by: str) -> list[Chart]:
    chosen, drawn = (metric or results.primary.name, by), []
    for part in results.parts:
        found = charts.measured(part)
        for arm in part.arms:
            own = [(name, axes[-1]) for (name, axes), arms in found.items() if arm.name in arms]
            if arm.done and chosen not in own:
                known = listed([f"--metric {name} --by {axis}" for name, axis in own] or [""])
                remedy = f"It has {known}." if own else "Give runs of --task needle or lengths."
                raise UsageError(f"{_who(arm)} has no {chosen[0]} by {by}", remedy)
        drawn += charts.grids(results, part, chosen, together=True)
    return drawn


def _each_part(draw: Any, results: Results, lacks: str, remedy: str) -> list[Chart]:
    """One drawing a part, in which every arm must be that has a run."""
    numbers, drawn = marks(results), []
    for part in results.parts:
        made = draw(results, part)
        shown = {line.index for one in made for line in one.lines}
        for arm in part.arms:
            if arm.done and numbers[arm.name] not in shown:
                raise UsageError(f"{_who(arm)} {lacks}", remedy)
        drawn += made
    return drawn


def _who(arm: ArmResult) -> str:
    """The folder of a run, or the name of a study's arm."""
    return str(arm.settings.get("out", arm.name))


def _results(paths: list[Path], split: str | None) -> Results:
    """Of a study as it stands; or of run folders, each an arm, whatever they were trained on. split: the
    evaluation that is read; None: none is needed."""
    if len(paths) == 1 and (paths[0] / FILE).is_file():
        if split == "valid":
            raise UsageError("a study is measured on test", "Leave --split out, or give run folders.")
        plan, facts = read_plan(paths[0])
        return collect(plan, paths[0], facts)
    runs = [load(path) for path in paths]
    units = {run.task.unit: run.path for run in runs}
    if len(units) > 1 and split is None:
        counts = listed([f"{path} counts {unit}" for unit, path in units.items()])
        raise UsageError(f"{counts}, which have no axis in common", "Draw them apart.")
    arms = []
    for run, name in zip(runs, _names(runs), strict=True):
        told = {"mixer": run.config.mixer, "context": run.config.context, "out": run.path}
        arms.append(ArmResult(name, told, (_run_result(run, split),)))
    metrics = dict.fromkeys(metric for run in runs for metric in run.task.metrics)
    part = PartResult("", tuple(arms))
    return Results("", tuple(metrics), runs[0].task.unit, (0,), (part,))


def _names(runs: list[Run]) -> list[str]:
    """Each by its mixer, and by its folder where two mixers are the same."""
    alike = len({run.config.mixer for run in runs}) < len(runs)
    return [f"{run.config.mixer} ({run.path.name})" if alike else run.config.mixer for run in runs]


def _run_result(run: Run, split: str | None) -> RunResult:
    if split is None:
        a_step, rows = run.task.tokens_a_step(run.config), run.metrics("train")
        training = [row["step"] * a_step for row in rows], [row["loss"] for row in rows]
        return RunResult(0, "done", curve=curve_of(run), details={"training": training})
    found = run.evaluation(split, {"rows": list})
    return RunResult(0, "done", rows=tuple(Row(**row) for row in found["rows"]), details=details_of(found))


def attention(paths: list[Path], text: str | None, image: str | None, layer: int, head: int) -> list[Chart]:
    """The weights of one head on a text or an image (default: how the test data begin), captured inside the
    real forward pass. Of an image: how much of the class token's weight, or of the mean of all patches',
    each patch gets."""
    if text is not None and not text.strip():
        raise UsageError("--text is empty", "Give a text for the model to read, or leave it out.")
    grids, labels, runs = [], ("key", "query"), [load(path) for path in paths]
    for run, called in zip(runs, _names(runs), strict=True):
        shown = run.model.config.grid if run.model.main_input_name == "pixel_values" else None
        if (image if shown is None else text) is not None:
            raise UsageError(f"{run.path} reads {'images' if shown else 'texts'}", "Give it such.")
        read, names = _tokens(run, text) if shown is None else ({"pixel_values": _pixels(run, image)}, [])
        layers, heads = run.model.config.num_hidden_layers, run.model.config.num_attention_heads
        if not (0 <= layer < layers and 0 <= head < heads):
            raise UsageError(
                f"{run.path} has {layers} layers of {heads} heads, not layer {layer}, head {head}",
                "Both count from 0.",
            )
        w_QK, picture = _weights(run.model, read, layer)[0, head], None
        name = f"{called}, layer {layer}, head {head}{_sums(w_QK)}"
        if shown is not None:
            picture = read["pixel_values"][0].permute(1, 2, 0).numpy()
            of_class = run.model.config.pooling == "class"
            labels = ("", "")
            name += f": what patches get of {'the class token' if of_class else 'all, on average'}"
            asked = w_QK[-1] if of_class else w_QK.mean(0)
            w_QK = asked[: shown[0] * shown[1]].reshape(shown)
        name += "; negative ones are blue" if w_QK.min() < 0 else ""
        grids.append(Grid(w_QK.tolist(), names, names, name, picture))
    if len({grid.picture is None for grid in grids}) > 1:
        raise UsageError("some of these runs read images and some texts", "Draw them one by one.")
    return [Chart("Attention", figures.heatmap(grids, labels, "weight"), [grid.name for grid in grids])]


@torch.no_grad()
def _weights(model: Any, read: dict[str, torch.Tensor], layer: int) -> torch.Tensor:
    """(B, H, Q, K) of a layer in a forward pass; of our own models that layer alone, as others may mix
    without weights."""
    if not hasattr(model.base_model, "blocks"):
        return model(**read, output_attentions=True, use_cache=False).attentions[layer]
    block, kept = model.base_model.blocks[layer], []

    def asked(_: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, {**options, "return_weights": True}

    hooks = (
        block.register_forward_pre_hook(asked, with_kwargs=True),
        block.register_forward_hook(lambda _, args, out: kept.append(out[1])),
    )
    model(**read, use_cache=False)
    for hook in hooks:
        hook.remove()
    return kept[0]


def _sums(w_QK: torch.Tensor) -> str:
    """Words for weights that are no shares of a whole."""
    low, high = float(w_QK.sum(-1).min()), float(w_QK.sum(-1).max())
    words = f"; rows sum to {low:.2g} … {high:.2g}, not to 1".replace("-", MINUS)
    return "" if max(1 - low, high - 1) < 1e-3 else words


def _tokens(run: Run, text: str | None) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What a model reads of a text, and its words where they are few."""
    if text is None:
        data = run.task.prepare(run.config)
        if not hasattr(data, "tokens"):  # such as noise with needles: the first row that validates
            row = run.task.held_out(data, run.config)[0]["tokens"][:1, : run.config.context]
            return {"input_ids": torch.from_numpy(row)}, []
        ids = data.tokens("test")[: min(TOKENS_SHOWN, run.config.context)].tolist()
    elif not any((run.path / "model").glob("tokenizer*")):
        raise UsageError(f"{run.path} reads no text, but tokens of its task", "Leave --text out.")
    else:
        ids = encode_prompt(run.tokenizer, text, run.environment["data"])[: run.config.context]
    names = [run.tokenizer.decode([i]) for i in ids] if len(ids) <= TOKENS_SHOWN else []
    names = [BLANK.get(name, name) for name in names]
    return {"input_ids": torch.tensor([ids])}, names


def _pixels(run: Run, image: str | None) -> torch.Tensor:
    if image is None:
        return torch.from_numpy(run.task.prepare(run.config).images("test")[:1].copy())
    return torch.from_numpy(read_image(Path(image), run.model.config.image_size)[0][None])


def bench(paths: list[Path], metric: str) -> list[Chart]:
    """What `langevin bench` measured by length, or a recipe of costs did: a figure for each part."""
    drawn = []
    for path in paths:
        remedy = "Give what langevin bench mixers --json or bench edge --json wrote."
        found = read_json(path / "results.json" if path.is_dir() else path, {}, remedy)
        tables = [one for one in (found, *found.values()) if isinstance(one, dict) and "rows" in one]
        rows = [row for table in tables for row in table["rows"] if "length" in row]
        if not rows:
            raise UsageError(f"{path} holds no times by length", remedy)
        known = [key for key in COSTS if key in rows[0]]
        key = metric or known[0]
        if key not in known:
            raise unknown("--metric of a benchmark", key, known)
        for part in dict.fromkeys(row["part"] for row in rows):
            own = [row for row in rows if row["part"] == part and row[key] and row[key] > 0]
            name = "mixer" if "mixer" in rows[0] else "model"
            level = 1.0 if key.endswith("ratio") else None
            lines, figure = figures.by_length(own, name, key, f"{part}: {COSTS[key]}", level)
            drawn.append(Chart(f"{path.stem} {part}" if len(paths) > 1 else part, figure, [], lines=lines))
    return drawn
