"""`langevin reproduce`: make the comparisons of a recipe, and set what was published beside the results.

    results = reproduce("ssmax-text8", "small", Path("runs/ssmax-text8-small"))

A recipe of one part is a comparison in the folder itself. One of several, such as several depths, has a
comparison in a sub-folder for each, and a page over all of them. Started again on the same folder, it goes
on where it stopped.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from langevin.bench.mixers import Settings, bench_mixers
from langevin.bench.training import bench_training
from langevin.environment import environment, pick_device
from langevin.errors import UsageError, unknown
from langevin.runs.files import read_json, write_json, write_text
from langevin.studies.claims import in_short, published, published_speeds, published_trends
from langevin.studies.collect import unmatched
from langevin.studies.measuring import EVALUATED
from langevin.studies.plan import FILE, Plan, seeds_in_words, slug
from langevin.studies.recipe import Benches, Part, Recipe, recipe, train_config
from langevin.studies.report.recipe_page import parts_page
from langevin.studies.report.speed_page import speed_page
from langevin.studies.runner import On, compare
from langevin.studies.statistics import summarise
from langevin.studies.verdict import verdict
from langevin.studies.workers import Workers

Results = dict[str, Any]


def reproduce(
    name: str,
    scale: str,
    folder: Path,
    *,
    seeds: tuple[int, ...] | None = None,
    workers: int | None = None,
    on: On = "local",
    quiet: bool = False,
    say: Callable[[str], None] = lambda what: None,
) -> Results:
    """Make a recipe in a folder, or go on with it; its results, with a row for every claim."""
    chosen = recipe(name)
    command = _command(name, scale, seeds)
    if chosen.is_speed:
        if seeds:
            raise UsageError(f"{name} measures times and has no seeds", "Leave out --seeds.")
        return _speed(chosen, scale, folder, command, say)
    plans = chosen.plans(scale, seeds)
    several = len(plans) > 1
    if several:
        _see_whose(folder, [slug(part.name) for part, _ in plans])

    def made(part: Part, plan: Plan) -> tuple[Part, Results]:
        place = folder / slug(part.name) if several else folder

        def finish(results: Results) -> Results:
            return _with_claims(results, chosen, scale, part, command)

        if several:
            say(f"{part.name}: {place}")
        results = compare(plan, place, workers=workers, on=on, quiet=quiet, finish=finish, hired=hired)
        _tidy(results, place)
        return part, read_json(place / "results.json")

    with Workers(1, plans[0][1].threads) as hired:
        parts = [made(part, plan) for part, plan in plans]
    if not several:
        return parts[0][1]
    results = _together(chosen, scale, parts, command)
    return _written(results, parts_page(results, chosen.chart), folder)


def _with_claims(results: Results, chosen: Recipe, scale: str, part: Part, command: str) -> Results:
    """A comparison's results with the claims that it answers, their sentences before the verdict."""
    rows = published(chosen.claims, part, results)
    return {
        **results,
        "kind": "recipe",
        **_about(chosen, scale),
        "commands": [command, *results["commands"]],
        "published": rows,
        "verdict": [in_short(rows), *(row["sentence"] for row in rows), *results["verdict"]],
        "not_controlled": [*results["not_controlled"], *chosen.differs],
    }


def _together(chosen: Recipe, scale: str, parts: list[tuple[Part, Results]], command: str) -> Results:
    """The results of a recipe of several parts; each part's own results.json has its runs."""
    first = parts[0][1]
    rows = [row for _, results in parts for row in results["published"]]
    rows += published_trends(chosen.claims, parts)
    return {
        "kind": "recipe",
        **_about(chosen, scale),
        "title": chosen.title,
        **{key: first[key] for key in ("primary", "metrics", "seeds", "environment", "data")},
        "commands": [command, *(c for _, results in parts for c in results["commands"][1:])],
        "published": rows,
        "verdict": [in_short(rows), *(row["sentence"] for row in rows)],
        "parts": [_summary(part, results) for part, results in parts],
        "not_controlled": _uncontrolled(parts),
    }


def _uncontrolled(parts: list[tuple[Part, Results]]) -> list[str]:
    """What no part controlled, and then what is true of some, with their names."""
    everywhere = [
        s for s in parts[0][1]["not_controlled"] if all(s in r["not_controlled"] for _, r in parts)
    ]
    own = [f"{p.name}: {s}" for p, r in parts for s in r["not_controlled"] if s not in everywhere]
    return [*everywhere, *own]


def _summary(part: Part, results: Results) -> Results:
    """A part without its runs."""
    names = [metric["name"] for metric in results["metrics"]]
    arms = [
        {
            **{key: value for key, value in arm.items() if key != "runs"},
            "matched": summarise(arm, names, "matched"),
            "failed": [run["seed"] for run in arm["runs"] if run["status"] != "done"],
        }
        for arm in results["arms"]
    ]
    return {
        "name": part.name,
        "path": slug(part.name),
        **{key: results[key] for key in ("settings", "matched_loss", "comparisons")},
        "verdict": verdict(results),
        "arms": arms,
    }


def _speed(chosen: Recipe, scale: str, folder: Path, command: str, say: Callable[[str], None]) -> Results:
    """Measure mixers alone and in training steps; times are taken anew each time."""
    _see_whose(folder, ["results.json"])
    benches = chosen.scale(scale).benches
    if benches is None:
        raise UsageError(f"recipe {chosen.name} measures nothing at scale {scale}")
    device = pick_device("auto")
    mixers = bench_mixers(list(chosen.arms), mixer_settings(benches, device, chosen.name), progress=say)
    training = bench_training(
        list(chosen.arms),
        train_config({**benches.training, "device": device}, chosen.name),
        vocab=benches.vocab,
        rounds=benches.rounds,
        seconds=benches.seconds,
        progress=say,
    )
    results = {
        "kind": "speed",
        **_about(chosen, scale),
        "title": chosen.title,
        "commands": [command],
        "environment": environment(device),
        "mixers": mixers,
        "training": training,
        "not_controlled": list(chosen.differs),
    }
    results["published"] = published_speeds(chosen.claims, results)
    rows = results["published"]
    results["verdict"] = [in_short(rows), *(row["sentence"] for row in rows)]
    return _written(results, speed_page(results), folder)


def mixer_settings(benches: Benches, device: str, name: str) -> Settings:
    """What `bench mixers` is given; every key must be known."""
    known = [f.name for f in fields(Settings)]
    for key in benches.mixers:
        if key not in known:
            raise unknown(f"setting of bench mixers in recipe {name}", str(key), known)
    return Settings(**{**benches.mixers, "lengths": tuple(benches.mixers["lengths"]), "device": device})


def _about(chosen: Recipe, scale: str) -> Results:
    return {"recipe": chosen.name, "scale": scale, "retests": chosen.retests, "source": chosen.source}


def _command(name: str, scale: str, seeds: tuple[int, ...] | None) -> str:
    words = ["langevin", "reproduce", name, "--scale", scale]
    return shlex.join([*words, "--seeds", seeds_in_words(seeds)] if seeds else words)


def _see_whose(folder: Path, ours: list[str]) -> None:
    """A folder that holds something, but nothing of this recipe, is somebody else's."""
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", "Choose another --out.")
    if (folder / FILE).exists() or (there and not set(there) & set(ours)):
        raise UsageError(f"{folder} holds something else ({sorted(there)[0]})", "Choose another --out.")


def _tidy(results: Results, folder: Path) -> None:
    """Once all runs are done, drop what only served to finish them: their models stay."""
    runs = [run for arm in results["arms"] for run in arm["runs"]]
    if all(run["status"] == "done" for run in runs) and not unmatched(results):
        for run in runs:
            for name in (EVALUATED, "checkpoints"):
                shutil.rmtree(folder / run["path"] / name, ignore_errors=True)


def _written(results: Results, page: str, folder: Path) -> Results:
    """The page and the numbers in the folder; the numbers as they stand there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.html", page)
    write_json(folder / "results.json", results)
    return dict(read_json(folder / "results.json"))
