"""What is done for one run of a comparison, wherever it is done: train, evaluate, measure, write done.json.

Everything here can be killed at any moment and called again: training goes on from its last checkpoint, the
rest is done anew, and `done.json` is written last and in one move. A run that has it is not touched again.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from langevin.errors import UsageError
from langevin.studies.metrics import values_of
from langevin.training.config import TrainConfig

RESAMPLES = 100  # the intervals that count are over seeds
SAMPLE_PROMPT, SAMPLE_TOKENS = 12, 60
ALONE = "alone.json"  # of an arm: what it costs with the device to itself
SHARED = "shared"  # a file that says a run was not alone on its GPU
OWN_TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes", "decode_ms_per_token")
EVALUATED = "evaluated"  # where training keeps the model of every evaluation, if asked to


@dataclass(frozen=True)
class Job:
    """One run to be made: a run of the comparison, a trial of a learning rate, or more about a finished
    run: with `at_loss`, its measurement at a validation loss that it had on its way; with `timing`, what
    one like it costs with the device to itself."""

    label: str
    folder: Path
    config: TrainConfig
    test_tokens: int
    threads: int
    trial: bool = False
    at_loss: float | None = None
    timing: bool = False
    shared: bool = False  # with other runs on its GPU
    trained: bool = False  # already: only the measuring is left

    @property
    def trains(self) -> bool:
        return self.at_loss is None and not self.timing and not self.trained

    @property
    def record(self) -> Path:
        """The file that says the job is done."""
        if self.timing:
            return self.folder.parent / ALONE
        return self.folder / ("done.json" if self.at_loss is None else "matched.json")

    @property
    def total_steps(self) -> int:
        a_step = self.config.batch * self.config.context
        return self.config.steps or -(-(self.config.tokens or a_step) // a_step)


@dataclass(frozen=True)
class Outcome:
    status: Literal["done", "trained", "failed", "stopped"]
    valid_loss: float | None = None
    error: str | None = None


def work(job: Job) -> Outcome:
    """Make one run, or go on with it; what happened. `tidied` is for afterwards."""
    import torch

    from langevin.runs import quiet_transformers

    quiet_transformers()
    if finished(job):
        return Outcome("done")
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        if job.at_loss is not None:
            return _matched(job, job.at_loss)
        if job.timing:
            return _timed(job)
        return conclude(job) if job.trained else _made(job)
    except Exception as error:  # whatever it is, it is this run's own affair
        return fail(job, one_line(error))
    finally:
        torch.set_num_threads(threads)


def started(job: Job) -> tuple[Any, Any]:
    """The trainer and the progress of a run that begins or goes on."""
    from langevin.runs import quiet_transformers
    from langevin.training.start import prepared

    quiet_transformers()
    (job.folder / "failed.json").unlink(missing_ok=True)
    _drop_torn(job.folder)
    trainer, progress = prepared(job.config, job.folder, resume=True, quiet=True)
    if job.shared:
        (job.folder / SHARED).touch()
    return trainer, progress


def tidied(job: Job) -> None:
    """Leave the GPU to the next run of this process: no memory kept, no compiled models counted towards a
    limit; a compiled loss serves the next run too."""
    import torch

    if torch.cuda.is_initialized() and job.config.compile == "on":
        torch.compiler.reset()
    forget()


def forget() -> None:
    """Give back the memory of a GPU that nobody holds any more: trainers and their graphs are cycles."""
    import gc

    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _made(job: Job) -> Outcome:
    from langevin.evaluation import cost
    from langevin.training.start import pick_device

    device = pick_device(job.config.device)
    peak = cost.PeakMemory(device)
    trainer, progress = started(job)
    begun_at = trainer.state.step
    trainer.run(progress)
    stopped = trainer.stopped_by is not None
    used = peak() if trainer.state.step > begun_at else None
    del trainer, progress  # measuring may need their memory
    forget()
    return Outcome("stopped") if stopped else conclude(job, used)


def conclude(job: Job, peak_memory: int | None = None) -> Outcome:
    """What follows the training of a run: measure it, and write that it is done."""
    from langevin.runs import load
    from langevin.training.start import pick_device

    run = load(job.folder)
    record: dict[str, Any] = {"seed": job.config.seed, "best": best_of(run)}
    if not job.trial:
        record |= measured(run, pick_device(job.config.device), job.test_tokens)
        if peak_memory is not None and not was_shared(job.folder):
            record["cost"]["peak_memory_bytes"] = peak_memory
    write_json(job.folder / "done.json", record)
    return Outcome("done", record["best"]["valid_loss"])


def measured(run: Any, device: str, test_tokens: int | None, evaluation: Any = None) -> dict[str, Any]:
    """The record of a trained run: its metrics on test, cost, curve, reliability, scalars and a sample.

    Of a run that shared its device, times and memory say more about the others than about it: they are
    left out.
    """
    from langevin.evaluation import cost
    from langevin.evaluation.runs import evaluate

    if evaluation is None:
        evaluation = evaluate(
            run, "test", device=device, resamples=RESAMPLES, limit=test_tokens, attention=False
        )
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
            {key: row[key] for key in ("low", "high", "count", "confidence", "accuracy")}
            for row in map(_plain_bin, evaluation["calibration"]["reliability"])
        ],
        "learned": [
            {key: row[key] for key in ("layer", "head", "name", "value")}
            for row in evaluation["learned"]
            if row.get("channel") is None
        ],
        "sample": sample(run, device),
        "test_tokens": evaluation["tokens"],
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


def _matched(job: Job, loss: float) -> Outcome:
    """The metrics on test where the validation loss was `loss`: linear between the two models around it."""
    from langevin.evaluation.runs import evaluate_model
    from langevin.models.convert import from_pretrained
    from langevin.runs import load
    from langevin.training.start import pick_device

    run, device = load(job.folder), pick_device(job.config.device)
    curve = valid_curve(run)
    place = crossing(curve, loss)
    if place is None:
        raise UsageError(f"{job.folder} never had a validation loss of {loss}")
    index, share = place
    parts: list[tuple[float, dict[str, float | None]]] = []
    for i, weight in ((index - 1, 1 - share), (index, share)):
        if weight:
            step = curve[i]["tokens"] // (run.config.batch * run.config.context)
            model = from_pretrained(run.path / EVALUATED / f"step-{step}").eval()
            found = evaluate_model(
                run, model, device=device, resamples=RESAMPLES, limit=job.test_tokens, attention=False
            )
            parts.append((weight, values_of(found, curve[i]["loss"])))
    values = {}
    for name in parts[0][1]:
        numbers = [(weight, v[name]) for weight, v in parts]
        known = [(weight, x) for weight, x in numbers if x is not None]
        values[name] = sum(weight * x for weight, x in known) if len(known) == len(numbers) else None
    write_json(job.record, {"loss": loss, "values": values})
    return Outcome("done")


def _timed(job: Job) -> Outcome:
    from langevin.bench_training import alone
    from langevin.data import prepare
    from langevin.evaluation import cost
    from langevin.runs import load
    from langevin.training.start import pick_device

    run, device = load(job.folder), pick_device(job.config.device)
    model, corpus = run.model, prepare(run.config.data, tokenizer=run.config.tokenizer, progress=False)
    tokens = len(corpus.tokens("train"))
    tokens = min(tokens, job.config.train_tokens or tokens)
    found: dict[str, float | None] = {**alone(job.config, corpus.vocab_size, tokens, device)}
    found["decode_ms_per_token"] = cost.measure(model.to(device), job.config.context).decode_ms_per_token
    write_json(job.record, found)
    return Outcome("done")


def sample(run: Any, device: str) -> dict[str, str]:
    """A text that goes on from how the test text begins, drawn at temperature 0.8."""
    import torch

    from langevin.data import prepare

    corpus = prepare(run.config.data, tokenizer=run.config.tokenizer, progress=False)
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


def finished(job: Job) -> bool:
    """Whether the record of the job is there; at a matched loss, of that very loss."""
    record = read_json(job.record)
    return record is not None and (job.at_loss is None or record.get("loss") == job.at_loss)


def fail(job: Job, error: str) -> Outcome:
    """Write down that a run failed, in one line; what is more about a finished one is only missing then."""
    if job.at_loss is not None or job.timing:
        return Outcome("failed", error=error)
    job.folder.mkdir(parents=True, exist_ok=True)
    write_json(job.folder / "failed.json", {"seed": job.config.seed, "error": error})
    return Outcome("failed", error=error)


def read_json(path: Path) -> dict[str, Any] | None:
    """A record, or None where there is none."""
    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict):
            raise ValueError("it is not a table")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "Delete it, and start again.") from error
    return value


def write_json(path: Path, value: Any) -> None:
    """In one move: the file is whole or not there."""
    temporary = path.with_name(f".{path.name}.writing")
    with open(temporary, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def one_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or f"{type(error).__name__}: {error}"
    return " ".join(str(cause).split())[:500]


def _drop_torn(folder: Path) -> None:
    """Remove a folder that was killed before its settings were whole: nothing was trained in it."""
    if not folder.exists():
        return
    try:
        TrainConfig.read(folder / "config.yaml")
    except UsageError:
        shutil.rmtree(folder)


def _pace(run: Any, curve: list[dict[str, Any]]) -> float:
    """Training tokens a second: the median of what was logged, evaluations mostly left out by that."""
    import statistics

    logged = [row["tokens_per_second"] for row in run.metrics("train") if row.get("tokens_per_second")]
    if logged:
        return float(statistics.median(logged))
    return float(curve[-1]["tokens"] / max(1e-9, curve[-1]["seconds"]))


def _plain_bin(row: dict[str, Any]) -> dict[str, Any]:
    """A bin of the reliability diagram with plain numbers; an empty one has none."""
    plain = {key: value["value"] if isinstance(value, dict) else value for key, value in row.items()}
    return {k: None if isinstance(v, float) and v != v else v for k, v in plain.items()}
