"""From run folders to results: what every run found, and what follows from all of them together.

Nothing here trains or measures. The same folders give the same results, whoever made them and in whatever
order; times stand only under `seconds`, `tokens_per_second`, `decode_ms_per_token` and
`peak_memory_bytes`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langevin.runs.folder import sessions
from langevin.studies.controls import not_controlled
from langevin.studies.measuring import crossing
from langevin.studies.metrics import described
from langevin.studies.plan import Arm, Plan
from langevin.studies.results import Row, done
from langevin.studies.statistics import compare_arms, summarise
from langevin.studies.verdict import verdict
from langevin.studies.words import listed
from langevin.studies.work import ALONE, DECODING, recorded

if TYPE_CHECKING:
    from langevin.studies.terms import Size

TUNED = "tuned.json"
BEST = {"best": {"valid_loss": float}}  # in a run's record
ENVIRONMENT = ("langevin", "python", "torch", "transformers", "system", "device", "threads", "commit")


def run_folder(folder: Path, arm: Arm, seed: int) -> Path:
    return folder / arm.slug / f"seed-{seed}"


def trial_folder(folder: Path, arm: Arm, rate: float) -> Path:
    return folder / arm.slug / "tune" / f"lr-{rate:g}"


def tuned(plan: Plan, folder: Path) -> tuple[Plan, dict[str, list[dict[str, Any]]]]:
    """The plan with each arm's best learning rate by validation loss, and all trials by arm.

    An arm without a finished trial keeps the shared rate. What was found when the first run began stands
    in tuned.json and is final: a trial that succeeds later must not change what runs were trained with.
    """
    trials = recorded(folder / TUNED, {str: [{"lr": float, "valid_loss": (float, None)}]}) or {
        arm.name: [
            {"lr": rate, "valid_loss": record["best"]["valid_loss"] if record else None}
            for rate in plan.learning_rates()
            for record in [recorded(trial_folder(folder, arm, rate) / "done.json", BEST)]
        ]
        for arm in plan.arms
    }
    arms = []
    for arm in plan.arms:
        rows = trials[arm.name]
        found = [row for row in rows if row["valid_loss"] is not None]
        if found:
            best = min(found, key=lambda row: row["valid_loss"])
            arm = replace(arm, changes={**arm.changes, "lr": best["lr"]})
        arms.append(arm)
    return replace(plan, arms=tuple(arms)), trials


def collect(
    plan: Plan, folder: Path, about: dict[str, Any], sizes: dict[str, Size] | None = None
) -> dict[str, Any]:
    """The results of a comparison, finished or not; a run that is not there counts as failed. sizes: of the
    models, where they are known beforehand."""
    trials: dict[str, Any] = {}
    if plan.tune:
        plan, trials = tuned(plan, folder)
    arms = []
    decoding = recorded(folder / DECODING) or {}
    for arm in plan.arms:
        runs = [_record(run_folder(folder, arm, seed), seed, folder) for seed in plan.seeds]
        models = [run.pop("model", None) for run in runs]
        alone = recorded(folder / arm.slug / ALONE)
        if alone:
            alone["decode_ms_per_token"] = decoding.get(arm.slug)
        known: dict[str, Any] = next((model for model in models if model), {})
        size = asdict(sizes[arm.name]) if sizes else known
        arms.append(
            {
                "name": arm.name,
                "spec": arm.spec,
                "changes": arm.changes,
                "parameters": size.get("parameters"),
                "flops_per_token": size.get("flops_per_token"),
                "state_bytes": known.get("state_bytes"),
                "runs": runs,
                **({"alone": alone} if alone else {}),
                **({"tuning": trials[arm.name]} if trials else {}),
            }
        )
    made = [one for arm in arms for run in done(arm) for one in sessions(folder / run["path"])]
    results = {
        "kind": "comparison",
        "title": plan.title or f"{len(plan.arms)} mixers on {Path(plan.settings.data).name}",
        "primary": plan.primary,
        "metrics": described(plan.settings.task, plan.metrics),
        "seeds": list(plan.seeds),
        "settings": plan.shared_settings(),
        "commands": about["commands"],
        "environment": {**_environment(made, plan.threads), "workers": about["workers"]},
        "data": about["data"],
        "arms": arms,
    }
    results = complete(results)
    results["not_controlled"] += [*_at_the_edge(trials), *_not_measured(results), *_elsewhere(made)]
    results["not_controlled"] += _added(about.get("added") or [])
    return results


def complete(results: dict[str, Any]) -> dict[str, Any]:
    """Add what follows from the runs: matched loss, summaries, comparisons, the verdict."""
    names = [metric["name"] for metric in results["metrics"]]
    loss = matched_loss(results["arms"])
    for arm in results["arms"]:
        for run in done(arm):
            kept = run.pop("at_matched_loss", None)
            if loss is not None:
                run["matched"] = _matched(run, kept, loss, names)
        arm["summary"] = summarise(arm, names)
    results["matched_loss"] = loss
    results["comparisons"] = compare_arms(results)
    results["verdict"] = verdict(results)
    results["not_controlled"] = not_controlled(results)
    results.setdefault("published", [])
    return results


def matched_loss(arms: list[dict[str, Any]]) -> float | None:
    """The lowest validation loss that every finished run reached: the largest of their best ones."""
    best = [run["best"]["valid_loss"] for arm in arms for run in done(arm)]
    return max(best) if len(arms) > 1 and best else None


def tokens_to(curve: list[dict[str, Any]], loss: float) -> float | None:
    """Training tokens until the validation loss first was `loss`, linear between evaluations."""
    curve = [row for row in curve if row["split"] == "valid"]
    place = crossing(curve, loss)
    if place is None:
        return None
    index, share = place
    before = curve[index - 1]["tokens"] if index else curve[0]["tokens"]
    return float(before + share * (curve[index]["tokens"] - before))


def data_facts(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """What results say about the data, hashes with it."""
    kept = ("tokens", "characters", "documents", "text_sha256")
    entropy = manifest.get("true_entropy")
    return {
        "name": name,
        "tokenizer": manifest.get("tokenizer", {}).get("name"),
        "tokenizer_sha256": manifest.get("tokenizer_sha256"),
        "vocab_size": manifest.get("tokenizer", {}).get("vocab_size"),
        "true_nats_per_token": None if entropy is None else entropy["test"]["nats_per_token"],
        "splits": {
            split: {k: facts[k] for k in kept if k in facts}
            | ({} if entropy is None else {"true_nats_per_token": entropy[split]["nats_per_token"]})
            for split, facts in manifest["splits"].items()
        },
    }


def unmatched(results: dict[str, Any]) -> list[tuple[str, int]]:
    """Finished runs that kept their models and could not be measured at the matched loss."""
    if not results["settings"].get("keep_evaluated") or results["matched_loss"] is None:
        return []
    return [
        (arm["name"], run["seed"])
        for arm in results["arms"]
        for run in done(arm)
        if results["primary"] not in (run["matched"] or {})
    ]


def _not_measured(results: dict[str, Any]) -> Iterator[str]:
    """What is missing although the runs are there."""
    for arm, seed in unmatched(results):
        yield f"{arm} seed {seed} could not be measured at the matched loss."
    shared = [
        arm for arm in results["arms"] if any(run["cost"]["tokens_per_second"] is None for run in done(arm))
    ]
    if shared and not all(arm.get("alone") for arm in shared):
        yield "Runs shared a GPU, so their speed, memory and decoding time are not shown."
    elif shared:
        decoded = all(arm["alone"]["decode_ms_per_token"] for arm in shared)
        more = ", decoding times those of all arms in turns" if decoded else ""
        yield f"Runs shared a GPU: speed and memory are those of a few steps of each arm alone{more}."


def failed_run(seed: int, path: str, error: str) -> dict[str, Any]:
    return {
        "seed": seed,
        "path": path,
        "status": "failed",
        "error": error,
        "values": {},
        "matched": None,
        "best": None,
        "cost": None,
        "curve": [],
        "reliability": [],
        "learned": [],
        "sample": None,
    }


def _record(run: Path, seed: int, folder: Path) -> dict[str, Any]:
    path = run.relative_to(folder).as_posix()
    done = recorded(run / "done.json", {"status": str, "values": dict, "cost": dict, "curve": list, **BEST})
    if done is None:
        failed = recorded(run / "failed.json", {"error": str})
        return failed_run(seed, path, failed["error"] if failed else "it was not finished")
    matched = recorded(run / "matched.json", {"loss": float, "values": dict})
    return {**done, "path": path, "at_matched_loss": matched}


def _at_the_edge(trials: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Arms whose best learning rate is the smallest or largest tried: the best may lie beyond."""
    for name, rows in trials.items():
        found = [row for row in rows if row["valid_loss"] is not None]
        failed = [f"{row['lr']:g}" for row in rows if row["valid_loss"] is None]
        if failed:
            rates = ", ".join(failed)
            yield f"Trials of {name} that failed, at learning rates {rates}, left it fewer to choose from."
        best = min(found, key=lambda row: row["valid_loss"], default=None)
        if best is not None and best in (found[0], found[-1]) and len(rows) > 1:
            side = "smallest" if best is found[0] else "largest"
            chosen = f"The learning rate chosen for {name}, {best['lr']:g},"
            yield f"{chosen} is the {side} tried: a better one may lie beyond."


def _matched(run: Row, kept: Row | None, loss: float, names: list[str]) -> Row:
    """What a run was at the matched loss: the tokens it took, and metrics where its models were kept."""
    found = kept["values"] if kept and kept["loss"] == loss else {}
    values = {name: found[name] for name in names if name in found and name != "valid_loss"}
    if "tokens_to_match" in names:
        values["tokens_to_match"] = tokens_to(run["curve"], loss)
    return values


def _environment(made: list[dict[str, Any]], threads: int) -> dict[str, Any]:
    """Where the runs were made, as the first of them wrote it down."""
    here = {"python": platform.python_version(), "system": platform.platform(), "threads": threads}
    written = made[0] if made else here
    return {key: written[key] for key in ENVIRONMENT if key in written}


def _added(seeds: list[int]) -> Iterator[str]:
    """Whoever goes on because of what was seen finds differences more often than the stated rate."""
    if seeds:
        names = f"Seed{'s' * (len(seeds) > 1)} {listed(map(str, seeds))}"
        verb = "were" if len(seeds) > 1 else "was"
        yield f"{names} {verb} added after results without them had been written; p takes all as planned."


def _elsewhere(made: list[dict[str, Any]]) -> Iterator[str]:
    """What was not the same for all runs: a comparison may have gone on later, or on another machine."""
    for key in ENVIRONMENT:
        values = list(dict.fromkeys(str(written.get(key)) for written in made))
        if len(values) > 1:
            yield f"Runs were made under different conditions: {key} {listed(values)}."
