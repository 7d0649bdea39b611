"""Results from run folders that were not made together, if they can be compared at all.

Runs of one arm differ in their seed alone; arms differ in their mixer or in other settings. All must have
been trained on the same text with the same tokenizer, and be scored on the same tokens.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from langevin.errors import UsageError
from langevin.runs import Run, load
from langevin.runs.files import misfit
from langevin.studies.collect import ENVIRONMENT, collect, complete, data_facts
from langevin.studies.measuring import measured
from langevin.studies.metrics import chosen, described
from langevin.studies.plan import FILE, plain, read_plan

# Settings that do not tell arms apart: the same thing is computed, elsewhere or with other leftovers.
INCIDENTAL = (
    "seed",
    "device",
    "keep",
    "checkpoint_every",
    "keep_evaluated",
    "accumulate",
    "graphs",
    "track",
)

Say = Callable[[str], None]


def gather(
    paths: list[Path],
    *,
    metrics: tuple[str, ...] = (),
    primary: str | None = None,
    title: str = "",
    say: Say = print,
) -> dict[str, Any]:
    """The results of run folders, or of one folder made by compare, as compare itself gives them."""
    if len(paths) == 1 and (paths[0] / FILE).is_file():
        return _of_a_comparison(paths[0], metrics, primary, title)
    runs = [_open(path) for path in _expanded(paths)]
    names, primary = chosen(runs[0].config.task, metrics, primary)
    evaluations = [_evaluation(run, say) for run in runs]
    _comparable(runs, evaluations)
    arms = _arms(runs, evaluations, say)
    shared, first = _shared(runs), runs[0].environment
    results = {
        "kind": "comparison",
        "title": title or f"{len(runs)} runs on {Path(runs[0].config.data).name}",
        "primary": primary,
        "metrics": described(runs[0].config.task, names),
        "seeds": sorted({run.config.seed for run in runs}),
        "settings": shared,
        "commands": [shlex.join(["langevin", "report", *map(str, paths)])],
        "environment": {key: first[key] for key in ENVIRONMENT if key in first},
        "data": data_facts(first["data"], runs[0].config.data),
        "arms": arms,
    }
    return complete(results)


def _of_a_comparison(
    folder: Path, metrics: tuple[str, ...], primary: str | None, title: str
) -> dict[str, Any]:
    """With the metrics and the title of its plan, unless others are asked for."""
    plan, about = read_plan(folder / FILE)
    if metrics or primary:
        plan = replace(plan, metrics=metrics or plan.metrics, primary=primary or plan.primary)
    return collect(replace(plan, title=title or plan.title), folder, about)


def _expanded(paths: list[Path]) -> list[Path]:
    """Folders of runs (by seed, or of a comparison) stand for the runs in them."""
    found: list[Path] = []
    for path in paths:
        if (path / "config.yaml").is_file():
            found.append(path)
            continue
        inner = sorted(path.glob("seed-*/config.yaml")) or sorted(path.glob("*/seed-*/config.yaml"))
        if not inner:
            raise UsageError(
                f"{path} is not a run folder", "Give folders made by langevin train or compare."
            )
        found += [file.parent for file in inner]
    return found


def _open(path: Path) -> Run:
    """A run whose files can be read."""
    run = load(path)
    misfits = misfit(run.environment["data"], {"splits": dict})
    if misfits is not None:
        raise UsageError(
            f"{path} does not say what it was trained on: {misfits}", "Give whole run folders."
        )
    if not run.metrics("valid"):
        raise UsageError(f"{path} has no evaluation yet", "Let it train on (--resume auto).")
    return run


def _evaluation(run: Run, say: Say) -> dict[str, Any]:
    from langevin.environment import pick_device
    from langevin.evaluation.runs import evaluate

    try:
        return run.evaluation("test", {"rows": list})
    except UsageError as error:
        say(f"evaluating {run.path} on test: {error.cause}")
    return evaluate(run, "test", device=pick_device("auto"))[0]


def _comparable(runs: list[Run], evaluations: list[dict[str, Any]]) -> None:
    """Raise where a likelihood of one run says nothing about another's."""
    first = runs[0]

    def facts(run: Run, evaluation: dict[str, Any]) -> dict[str, Any]:
        data = run.environment["data"]
        return {
            "task": run.config.task,
            "objective": run.config.objective,
            "tokenizer": (data.get("tokenizer", {}).get("name"), data.get("tokenizer_sha256")),
            **{
                f"{split} text": str(facts.get("text_sha256"))[:12]
                for split, facts in data["splits"].items()
            },
            "number of test tokens scored": evaluation.get("tokens"),
            "stride of the evaluation": evaluation.get("stride"),
        }

    reference = facts(first, evaluations[0])
    for run, evaluation in zip(runs[1:], evaluations[1:], strict=True):
        for name, value in facts(run, evaluation).items():
            if value != reference.get(name):
                old, new = (v[0] if isinstance(v, tuple) else v for v in (reference.get(name), value))
                told = f"{old!r} and {new!r}" if old != new else "two that share a name"
                raise UsageError(
                    f"{first.path} and {run.path} cannot be compared: not the same {name} ({told})",
                    "Compare runs on the same task, text and tokenizer, scored on the same tokens.",
                )


def _shared(runs: list[Run]) -> dict[str, Any]:
    """The settings that all runs have in common."""
    every = [plain(run.config) for run in runs]
    common = {key: value for key, value in every[0].items() if all(other[key] == value for other in every)}
    return {key: value for key, value in common.items() if key not in ("mixer", "seed")}


def _arms(runs: list[Run], evaluations: list[dict[str, Any]], say: Say) -> list[dict[str, Any]]:
    from langevin.environment import pick_device

    shared = _shared(runs)
    groups: dict[str, dict[str, Any]] = {}
    for run, evaluation in zip(runs, evaluations, strict=True):
        told = {"mixer", *shared, *INCIDENTAL}
        changes = {key: value for key, value in plain(run.config).items() if key not in told}
        name = ", ".join([run.config.mixer, *(f"{key}={value}" for key, value in changes.items())])
        arm = groups.setdefault(
            name, {"name": name, "spec": run.config.mixer, "changes": changes, "runs": []}
        )
        twin = next((r for r in arm["runs"] if r["seed"] == run.config.seed), None)
        if twin is not None:
            raise UsageError(
                f"{twin['path']} and {run.path} are the same arm with the same seed",
                "Leave one of them out.",
            )
        say(f"measuring {run.path}")
        record = measured(run, pick_device("auto"), None, evaluation)
        arm |= record.pop("model")
        arm["runs"].append({**record, "path": str(run.path)})
    return list(groups.values())
