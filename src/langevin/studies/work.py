"""What the jobs of a study do: train and measure a run, try a learning rate, time the arms in turns."""

import inspect
import math
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from langevin.bench.training import in_turns
from langevin.environment import pick_device
from langevin.errors import Diverged, UsageError, one_line
from langevin.evaluation import cost
from langevin.evaluation.quality import at_once
from langevin.evaluation.rows import Row
from langevin.evaluation.runs import evaluate
from langevin.evaluation.runs import measured as evaluate_model
from langevin.models.convert import from_pretrained
from langevin.objectives import OBJECTIVES
from langevin.runs import Run, load
from langevin.sampling.text import Request
from langevin.settings import TrainConfig
from langevin.studies.inference import estimate
from langevin.studies.jobs import EVALUATED, Stopped, forget
from langevin.studies.results import Point, RunResult, Status
from langevin.tasks import TASKS
from langevin.training.start import build, prepared

RESAMPLES = 100  # the intervals that count are over seeds
SAMPLE_PROMPT, SAMPLE_TOKENS = 12, 60
ENVIRONMENT = ("langevin", "python", "torch", "transformers", "system", "device", "threads", "commit")
MODELS = 1000  # that one process may compile: each arm once
STILL = 1e-9  # a learning rate at which no arm diverges while it is timed
ROUNDS, SECONDS = 7, 0.2  # of timing: how often, and how long an arm's turn is


def run(
    config: TrainConfig, folder: Path, threads: int, test_tokens: int, along: bool, texts: Any = None
) -> dict[str, Any]:
    """Train a run, or go on with it, and measure it: the record of a RunResult. along: the models on the
    way are measured as well, and not kept. texts: what it writes for a judge (`quality.Wanted`)."""
    trouble = _train(replace(config, keep_evaluated=along), folder, threads)
    if trouble is not None:
        return asdict(_begun(Run(folder, config), "diverged", trouble))  # which may hold no model yet
    found = load(folder)
    device, data = pick_device(config.device), found.task.prepare(found.config)
    try:
        record = measured(found, data, device, test_tokens, texts=texts)
    except Diverged as error:
        return asdict(_begun(found, "diverged", one_line(error)))
    for point in record.curve if along else ():
        model = from_pretrained(folder / EVALUATED / f"step-{point.step}").eval()
        then = evaluate_model(found, model, data=data, device=device, limit=test_tokens, **_quick(found))
        rows = (replace(Row(**row), at={"step": point.step}) for row in then["rows"] if not row["at"])
        record = replace(record, rows=(*record.rows, *rows))
    least = "≤ " if found.objective.likelihood == "bound" else ""
    said = f"validation loss {least}{record.best.loss:.4f}" if record.best else ""
    return {**asdict(record), "said": said}


def try_rate(config: TrainConfig, folder: Path, threads: int) -> dict[str, Any]:
    """The best validation loss with a learning rate; None where it diverged."""
    if _train(config, folder, threads) is not None:
        return {"loss": None, "said": "diverged"}
    loss = min(point.loss for point in curve_of(load(folder)))
    return {"loss": loss, "said": f"validation loss {loss:.4f}"}


def _train(config: TrainConfig, folder: Path, threads: int) -> str | None:
    """Train to the end; why not, where a run diverged."""
    torch.set_num_threads(threads)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MODELS
    trainer, progress = prepared(config, folder, resume=True, quiet=True)
    try:
        trainer.run(progress)
    except Diverged as error:
        return one_line(error)
    if trainer.stopped_by is not None:
        raise Stopped
    del trainer, progress  # measuring may need their memory
    forget()
    return None


def measured(
    found: Any,
    data: Any,
    device: str,
    test_tokens: int | None,
    evaluation: dict[str, Any] | None = None,
    texts: Any = None,
) -> RunResult:
    """A trained run with what the task measures of it on test, unless that is known."""
    if evaluation is None:
        options = {"device": device, "limit": test_tokens, **_quick(found)}
        options |= {} if device == "cpu" else {"batch": at_once(found, device)}
        options |= {} if texts is None else {"texts": texts}
        evaluation, _ = evaluate(found, "test", data=data, **options)
    details = details_of(evaluation) | {"sample": sample(found, data, device)}
    rows, examples = tuple(Row(**row) for row in evaluation["rows"]), tuple(details.pop("examples") or ())
    details = {name: value for name, value in details.items() if value}
    return replace(_begun(found, "done"), rows=rows, examples=examples, details=details)


def _begun(found: Any, status: Status, error: str | None = None) -> RunResult:
    kept = {key: found.environment[key] for key in ENVIRONMENT if key in found.environment}
    return RunResult(found.config.seed, status, error, curve=curve_of(found), environment=kept)


def details_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """What pages show of an evaluation besides its rows."""
    reliability = [
        {**row, "accuracy": None if row["accuracy"] is None else row["accuracy"]["value"]}
        for row in evaluation.get("calibration", {}).get("reliability", [])
    ]
    learned = [
        {key: row[key] for key in ("layer", "head", "name", "value")}
        for row in evaluation.get("learned", [])
        if row.get("channel") is None
    ]
    others = {name: evaluation.get(name) for name in ("examples", "quality", "mistakes")}
    return {"reliability": reliability, "learned": learned, **others}


def curve_of(found: Any) -> tuple[Point, ...]:
    """Validation losses over the run."""
    a_step = found.task.tokens_a_step(found.config)
    return tuple(Point(r["step"], r["step"] * a_step, r["loss"]) for r in found.metrics("valid"))


def _quick(found: Any) -> dict[str, Any]:
    """Options of a task's measure that leave out what only a single run's evaluation shows."""
    wanted = {"resamples": RESAMPLES, "attention": False}
    return {k: v for k, v in wanted.items() if k in inspect.signature(found.task.measure).parameters}


def sample(found: Any, corpus: Any, device: str) -> dict[str, str] | None:
    """A text that goes on from how the test text begins; None: the objective writes none."""
    try:
        write = found.objective.sampler()
    except UsageError:
        return None
    if corpus.tokenizer is None:
        return None
    context = found.config.context
    start = corpus.tokens("test")[: min(SAMPLE_PROMPT, context // 2 or 1)]
    prompt = corpus.tokenizer.decode(start, skip_special_tokens=True)
    more = found.objective.sampling()(tokens=max(1, min(SAMPLE_TOKENS, context - len(start) - 1)))
    model, known = found.model.to(device), {"data": corpus.manifest, "context": context}
    (text,) = write(model, corpus.tokenizer, [Request(prompt)], more, **known)
    return {"prompt": text.prompt, "text": text.text.removeprefix(text.prompt)}


def time_arms(configs: dict[str, TrainConfig], threads: int) -> dict[str, Any]:
    """What each arm costs: sizes, and times in turns on a machine of their own, as ratios to the first arm
    in the same round with a 95 % t interval over rounds (of the logarithms). Needs no trained weights."""
    torch.set_num_threads(threads)
    first = next(iter(configs.values()))
    device, data = pick_device(first.device), TASKS.parse(first.task).prepare(first)
    found = {name: sizes(config, data) for name, config in configs.items()}
    still = {name: replace(config, lr=STILL, muon_lr=STILL) for name, config in configs.items()}
    turns = in_turns(still, data, device, ROUNDS, SECONDS)
    base = next(iter(turns.values()))[0]
    for name, (seconds, a_step, peak) in turns.items():
        found[name] += [_timed("tokens_per_second", [a_step / s for s in seconds])]
        found[name] += [_timed("time_ratio", [a / b for a, b in zip(seconds, base, strict=True)])]
        if peak is not None:
            found[name] += [Row("peak_memory_bytes", peak, "cost")]
    forget()
    for name, rows in decoding(configs, data, device).items():
        found[name] += rows
    return {name: [asdict(row) for row in rows] for name, rows in found.items()}


def sizes(config: TrainConfig, data: Any) -> list[Row]:
    """Parameters and FLOPs of the model of a config; a new one is not built in memory."""
    with torch.device("meta") if config.init is None else nullcontext():
        model = build(config, data)
    flops = OBJECTIVES.parse(config.objective).flops(model, config.context)
    return [
        Row("parameters", cost.parameter_count(model), "cost"),
        Row("flops_per_token", flops, "cost"),
    ]


def decoding(configs: dict[str, TrainConfig], data: Any, device: str) -> dict[str, list[Row]]:
    """Milliseconds a token and bytes of state, of arms that all decode; elsewhere nothing."""
    every = configs.values()
    if any(config.context < 2 or not OBJECTIVES.parse(config.objective).causal for config in every):
        return {}
    models = {name: build(config, data).eval().to(device) for name, config in configs.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            times[name].append(cost.decode_ms(model, configs[name].context))
    base = next(iter(times.values()))
    return {
        name: [
            _timed("decode_ms_per_token", times[name]),
            _timed("decode_ratio", [a / b for a, b in zip(times[name], base, strict=True)]),
            Row("state_bytes", cost.state_bytes(model, configs[name].context), "cost"),
        ]
        for name, model in models.items()
    }


def _timed(name: str, rounds: list[float]) -> Row:
    """The geometric mean over rounds, with the t interval of the logarithms."""
    found = estimate([math.log(x) for x in rounds])
    assert found is not None
    low, high = (None if x is None else math.exp(x) for x in (found.low, found.high))
    return Row(name, math.exp(found.mean), "cost", n=found.n, low=low, high=high)
