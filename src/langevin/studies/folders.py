"""Results from run folders that were not made together, if they can be compared at all.

Runs of one arm differ in their seed alone; arms differ in their mixer or in other settings. All must have
been trained on the same text with the same tokenizer, and be scored on the same tokens. What was not
planned as one study is exploratory: it has intervals, and nothing is confirmed.
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from langevin.environment import pick_device
from langevin.errors import UsageError
from langevin.evaluation.runs import evaluate
from langevin.runs import Run, load
from langevin.settings import BUDGET
from langevin.studies import work
from langevin.studies.compare import concluded, data_facts
from langevin.studies.plan import FIXED, INCIDENTAL, Arm, Part, Plan
from langevin.studies.results import ArmResult, PartResult, Results, RunResult

Say = Callable[[str], None]
WHY = "these runs were not planned as one study"


def gather(
    paths: list[Path],
    *,
    metrics: tuple[str, ...] = (),
    primary: str = "",
    title: str = "",
    say: Say = print,
) -> Results:
    """The results of run folders."""
    runs = [_open(path) for path in _expanded(paths)]
    evaluations = [_evaluation(run, say) for run in runs]
    _comparable(runs, evaluations)
    shared = _shared(runs)
    groups: dict[str, tuple[Arm, list[RunResult], Run]] = {}
    for run, evaluation in zip(runs, evaluations, strict=True):
        arm = _arm(run, shared)
        _, found, _ = groups.setdefault(arm.name, (arm, [], run))
        if any(other.seed == run.config.seed for other in found):
            raise UsageError(
                f"{run.path} is the same arm with the same seed as another run", "Leave one of them out."
            )
        found.append(work.measured(run, run.task.prepare(run.config), "cpu", None, evaluation))
    arms = tuple(
        ArmResult(
            arm.name, arm.changes, tuple(found), tuple(work.sizes(run.config, run.task.prepare(run.config)))
        )
        for arm, found, run in groups.values()
    )
    seeds = tuple(sorted({run.config.seed for run in runs}))
    part = Part(tuple(arm.text for arm, _, _ in groups.values()), shared)
    title = title or f"{len(runs)} runs on {Path(runs[0].config.data).name}"
    plan = Plan((part,), seeds, title=title, metrics=metrics, primary=primary)
    facts = {
        "data": data_facts(runs[0].environment["data"], runs[0].config.data),
        "commands": [shlex.join(["langevin", "report", *map(str, paths)])],
    }
    return concluded(plan, (PartResult("", arms, shared),), facts, WHY)


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
    """A run whose files can be read, which is seen before any is evaluated."""
    run = load(path)
    if not (run.sessions and run.metrics("valid")):
        raise UsageError(f"{path} has no evaluation yet", "Let it train on (--resume auto).")
    return run


def _evaluation(run: Run, say: Say) -> dict[str, Any]:
    try:
        return run.evaluation("test", {"rows": list})
    except UsageError as error:
        say(f"evaluating {run.path} on test: {error.cause}")
    return evaluate(run, "test", device=pick_device("auto"))[0]


def _comparable(runs: list[Run], evaluations: list[dict[str, Any]]) -> None:
    """Raise where a measurement of one run says nothing about another's."""

    def facts(run: Run, evaluation: dict[str, Any]) -> dict[str, Any]:
        data = run.environment["data"]
        splits = data["splits"].items()
        return {
            "task": run.config.task,
            "tokenizer": (data.get("tokenizer", {}).get("name"), data.get("tokenizer_sha256")),
            **{f"{split} text": str(about.get("text_sha256"))[:12] for split, about in splits},
            "number of test tokens scored": evaluation.get("tokens"),
            "stride of the evaluation": evaluation.get("stride"),
        }

    reference = facts(runs[0], evaluations[0])
    for run, evaluation in zip(runs[1:], evaluations[1:], strict=True):
        for name, value in facts(run, evaluation).items():
            if value != reference.get(name):
                old, new = (v[0] if isinstance(v, tuple) else v for v in (reference.get(name), value))
                told = f"{old!r} and {new!r}" if old != new else "two that share a name"
                raise UsageError(
                    f"{runs[0].path} and {run.path} cannot be compared: not the same {name} ({told})",
                    "Compare runs on the same task, text and tokenizer, scored on the same tokens.",
                )


def _shared(runs: list[Run]) -> dict[str, Any]:
    """The settings that all runs have in common; the budget as a whole, or not."""
    every = [asdict(run.config) for run in runs]
    common = {key: value for key, value in every[0].items() if all(other[key] == value for other in every)}
    own = {"mixer", "seed", "minutes", *(BUDGET if any(key not in common for key in BUDGET) else ())}
    return {key: value for key, value in common.items() if key not in own}


def _arm(run: Run, shared: dict[str, Any]) -> Arm:
    told = {"mixer", *shared, *INCIDENTAL, *FIXED}
    changes = {key: value for key, value in asdict(run.config).items() if key not in told}
    named = {key: value for key, value in changes.items() if key not in BUDGET or value is not None}
    mixer = {"mixer": run.config.mixer}
    return Arm(Arm("", {**mixer, **named}).plain, {**mixer, **changes})
