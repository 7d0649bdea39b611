"""What is measured of a trained run for its record: quality on test, cost, curve, a sample."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from langevin.errors import UsageError
from langevin.studies.metrics import values_of

RESAMPLES = 100  # the intervals that count are over seeds
SAMPLE_PROMPT, SAMPLE_TOKENS = 12, 60
SHARED = "shared"  # a file that says a run was not alone on its GPU
OWN_TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes", "decode_ms_per_token")
EVALUATED = "evaluated"  # where training keeps the model of every evaluation, if asked to


def measured(run: Any, device: str, test_tokens: int | None, evaluation: Any = None) -> dict[str, Any]:
    """The record of a trained run: its metrics on test, cost, curve, reliability, scalars and a sample.

    Of a run that shared its device, times and memory say more about the others than about it: they are
    left out.
    """
    from langevin.evaluation import cost
    from langevin.evaluation.runs import evaluate

    if evaluation is None:
        evaluation, _ = evaluate(run, "test", device=device, limit=test_tokens, **_quick(run))
    best = best_of(run)
    curve = valid_curve(run)
    model = cost.measure(run.model.to(device), run.config.context)
    record = {
        "seed": run.config.seed,
        "status": "done",
        "error": None,
        "values": values_of(evaluation, best["valid_loss"]),
        "matched": None,
        "best": best,
        "cost": {
            "tokens": curve[-1]["tokens"],
            "seconds": curve[-1]["seconds"],
            "tokens_per_second": _pace(run, curve),
            "peak_memory_bytes": max((r.get("peak_memory_bytes", 0) for r in run.metrics()), default=0)
            or None,
            "decode_ms_per_token": model.decode_ms_per_token,
        },
        "curve": curve,
        "reliability": [
            {**row, "accuracy": None if row["accuracy"] is None else row["accuracy"]["value"]}
            for row in evaluation.get("calibration", {}).get("reliability", [])
        ],
        "learned": [
            {key: row[key] for key in ("layer", "head", "name", "value")}
            for row in evaluation.get("learned", [])
            if row.get("channel") is None
        ],
        "sample": sample(run, device),
        "test_tokens": evaluation.get("tokens"),
        "model": {
            "parameters": model.parameters,
            "flops_per_token": model.flops_per_token,
            "state_bytes": model.state_bytes,
        },
    }
    if was_shared(run.path):
        record["cost"] |= dict.fromkeys(OWN_TIMES)
        record["curve"] = [{**row, "seconds": None} for row in curve]
    return record


def was_shared(folder: Path) -> bool:
    return (folder / SHARED).exists()


def valid_curve(run: Any) -> list[dict[str, Any]]:
    """Validation losses over the run; training losses are logged by the clock, so their rows vary."""
    a_step = run.config.batch * run.config.context
    return [
        {"tokens": row["step"] * a_step, "seconds": row["seconds"], "split": "valid", "loss": row["loss"]}
        for row in run.metrics("valid")
    ]


def best_of(run: Any) -> dict[str, Any]:
    """The evaluation that chose the model: the first with the smallest loss."""
    rows = [row for row in run.metrics("valid") if row["loss"] == row["loss"]]
    if not rows:
        raise UsageError(f"{run.path} has no validation loss that is a number", "Lower --lr.")
    row = min(rows, key=lambda r: r["loss"])
    tokens = row["step"] * run.config.batch * run.config.context
    return {"step": row["step"], "tokens": tokens, "valid_loss": row["loss"]}


def crossing(curve: list[dict[str, Any]], loss: float) -> tuple[int, float] | None:
    """Where a curve first falls to a loss: between the evaluations i - 1 and i, this far on the way.

    A curve that begins below it has its first evaluation for an answer; one that never gets there, none.
    """
    for i, row in enumerate(curve):
        if row["loss"] <= loss:
            if i == 0:
                return 0, 1.0
            above = curve[i - 1]["loss"]
            return i, (above - loss) / (above - row["loss"])
    return None


def measured_at(run: Any, loss: float, device: str, test_tokens: int) -> dict[str, float | None]:
    """The metrics on test where the validation loss was `loss`: linear between the two models around it."""
    from langevin.evaluation.runs import measured as evaluate_model
    from langevin.models.convert import from_pretrained

    curve = valid_curve(run)
    place = crossing(curve, loss)
    if place is None:
        raise UsageError(f"{run.path} never had a validation loss of {loss}")
    index, share = place
    parts: list[tuple[float, dict[str, float | None]]] = []
    for i, weight in ((index - 1, 1 - share), (index, share)):
        if weight:
            step = curve[i]["tokens"] // (run.config.batch * run.config.context)
            model = from_pretrained(run.path / EVALUATED / f"step-{step}").eval()
            found = evaluate_model(run, model, device=device, limit=test_tokens, **_quick(run))
            parts.append((weight, values_of(found, curve[i]["loss"])))
    values = {}
    for name in parts[0][1]:
        numbers = [(weight, v[name]) for weight, v in parts]
        known = [(weight, x) for weight, x in numbers if x is not None]
        values[name] = sum(weight * x for weight, x in known) if len(known) == len(numbers) else None
    return values


def _quick(run: Any) -> dict[str, Any]:
    """Options of a task's measure that leave out what only a single run's evaluation shows."""
    wanted = {"resamples": RESAMPLES, "attention": False}
    return {k: v for k, v in wanted.items() if k in inspect.signature(run.task.measure).parameters}


def sample(run: Any, device: str) -> dict[str, str] | None:
    """A text that goes on from how the test text begins, drawn at temperature 0.8; None: it writes none."""
    import torch

    try:
        run.objective.sampler()
    except UsageError:
        return None
    corpus = run.task.prepare(run.config)
    if corpus.tokenizer is None:
        return None
    start = corpus.tokens("test")[: min(SAMPLE_PROMPT, run.config.context // 2 or 1)].astype("int64")
    ids = torch.from_numpy(start)[None].to(device)
    more = min(SAMPLE_TOKENS, run.config.context - ids.shape[1])
    torch.manual_seed(0)
    out = run.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=more,
        do_sample=True,
        temperature=0.8,
        top_k=0,
    )
    decode = corpus.tokenizer.decode
    return {
        "prompt": decode(out[0, : ids.shape[1]], skip_special_tokens=True),
        "text": decode(out[0, ids.shape[1] :], skip_special_tokens=True),
    }


def _pace(run: Any, curve: list[dict[str, Any]]) -> float:
    """Training tokens a second: the median of what was logged, evaluations mostly left out by that."""
    import statistics

    logged = [row["tokens_per_second"] for row in run.metrics("train") if row.get("tokens_per_second")]
    if logged:
        return float(statistics.median(logged))
    return float(curve[-1]["tokens"] / max(1e-9, curve[-1]["seconds"]))
