"""The commands about studies: compare, report, reproduce."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from langevin.commands import console_for
from langevin.errors import UsageError
from langevin.run_commands import read_seeds
from langevin.runs import quiet_transformers

if TYPE_CHECKING:
    from langevin.cli_studies import Compare, Report, Reproduce


def compare_command(options: Compare) -> int:
    from langevin.cli_studies import PLANNED
    from langevin.studies.plan import Plan, read_arms

    default = type(options.settings)()
    for name in ("mixer", "seed"):
        if getattr(options.settings, name) != getattr(default, name):
            raise UsageError(
                f"--{name} does not fit compare, which sets it for every run",
                "Name the mixers as arms and give --seeds: langevin compare softmax ssmax --seeds 0-5.",
            )
    if len(options.arms) < 2:
        raise UsageError(
            f"{len(options.arms) or 'no'} arm{'s' * (not options.arms)} came",
            "Name two or more mixers: langevin compare softmax ssmax.",
        )
    if options.workers is not None and options.workers < 0:
        raise UsageError(f"--workers {options.workers} must be 0 or more")
    arms, seeds = read_arms(options.arms), tuple(read_seeds(options.seeds))
    plan = Plan(arms, seeds=seeds, **{name: getattr(options, name) for name in PLANNED})
    return run_comparison(plan, options)


def run_comparison(plan: Any, options: Any) -> int:
    """Make a comparison and say what it found; exit status 1 when a run failed, 130 when interrupted."""
    from langevin.studies.collect import unmatched
    from langevin.studies.runner import compare

    quiet_transformers()
    folder = options.out or default_folder(plan.settings.data)
    try:
        results = compare(plan, folder, workers=options.workers, on=options.on, quiet=options.quiet)
    except KeyboardInterrupt:
        print(f"{folder}: stopped; the same command goes on where it stopped")
        return 130
    show(results, folder)
    offer_seeds(results)
    if options.open:
        open_page(folder / "report.html")
    failed = [f"{arm['name']} seed {run['seed']}" for arm, run in _failures(results)]
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(failed)}; the same command tries them again")
    missing = [f"{arm} seed {seed}" for arm, seed in unmatched(results)]
    if missing:
        print(f"not measured at the matched loss: {', '.join(missing)}; the same command tries again")
    trials = [
        a["name"] for a in results["arms"] if any(t["valid_loss"] is None for t in a.get("tuning", []))
    ]
    if trials:
        print(f"some learning rates of {', '.join(trials)} failed: see what was not controlled")
    return 1 if failed or missing or trials else 0


def report_command(options: Report) -> int:
    from langevin.studies.folders import gather
    from langevin.studies.plan import FILE
    from langevin.studies.report import write_report

    quiet_transformers()
    if not options.runs:
        raise UsageError("no run folder came", "Give folders made by langevin train or compare.")
    console = console_for(stderr=True)
    results = gather(
        list(options.runs),
        metrics=options.metrics,
        primary=options.primary,
        title=options.title,
        say=console.print,
    )
    in_place = len(options.runs) == 1 and (options.runs[0] / FILE).is_file()
    folder = options.out or (options.runs[0] if in_place else Path("report"))
    if _is_recipe(folder):
        raise UsageError(
            f"the report in {folder} was made by langevin reproduce and has more in it",
            "Run langevin reproduce again to renew it, or choose another --out.",
        )
    write_report(results, folder)
    show(results, folder)
    return 0


def _is_recipe(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "results.json").read_text())["kind"] == "recipe")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def show(results: dict[str, Any], folder: Path) -> None:
    """The primary metric by arm, the verdict, and where the rest is."""
    from langevin.studies.statistics import cost_of

    metric = next(m for m in results["metrics"] if m["name"] == results["primary"])
    table = Table(box=box.SIMPLE_HEAD)
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    table.add_column("arm")
    for head in (metric["label"] + unit, "95 % interval", "parameters", "tokens/s"):
        table.add_column(head, justify="right")
    for arm in results["arms"]:
        found = arm["summary"].get(results["primary"])
        pace = cost_of(arm, "tokens_per_second")
        table.add_row(
            arm["name"],
            "" if found is None else f"{found['mean']:.4f}",
            "" if found is None or found["low"] is None else f"{found['low']:.4f} to {found['high']:.4f}",
            f"{arm['parameters']:,}",
            "" if pace is None else f"{pace:,.0f}",
        )
    console_for().print(table)
    for sentence in results["verdict"]:
        print(sentence)
    print(f"The report: {folder / 'report.html'}")


def offer_seeds(results: dict[str, Any]) -> None:
    """Where there are too few to judge by: how to get enough."""
    from langevin.studies.plan import seeds_in_words
    from langevin.studies.statistics import LEAST_PAIRS

    seeds = results.get("seeds", [])
    if 0 < len(seeds) < LEAST_PAIRS:
        others = (seed for seed in itertools.count() if seed not in seeds)
        enough = sorted([*seeds, *itertools.islice(others, LEAST_PAIRS - len(seeds))])
        words = seeds_in_words(tuple(enough))
        print(f"For a judgement, the same command with --seeds {words} adds the seeds that are missing")
        parts = results.get("parts", [results])
        if results["kind"] == "recipe" and any(part["settings"].get("keep_evaluated") for part in parts):
            print("At the matched loss the runs of now may then be missing; for that, take another --out")


def open_page(page: Path) -> None:
    """Show a page to whoever sits in front of a screen; elsewhere its path was printed already."""
    import os
    import sys
    import webbrowser

    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(v) for v in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if screen:
        webbrowser.open(page.resolve().as_uri())


def default_folder(data: str) -> Path:
    name = re.sub(r"[^a-z0-9.]+", "-", Path(data).stem.lower()).strip("-")
    return Path("runs") / f"compare-{name}"


def _failures(results: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(arm, run) for arm in results["arms"] for run in arm["runs"] if run["status"] == "failed"]


def reproduce_command(options: Reproduce) -> int:
    """Make a recipe and say which published claims held; exit status as for compare."""
    from langevin.studies.recipe import recipe

    chosen = recipe(options.name)
    chosen.scale(options.scale)
    if options.workers is not None and options.workers < 0:
        raise UsageError(f"--workers {options.workers} must be 0 or more")
    seeds = tuple(read_seeds(options.seeds)) if options.seeds else None
    folder = options.out or Path("runs") / f"{options.name}-{options.scale}"

    from langevin.studies.reproduce import reproduce

    quiet_transformers()
    console = console_for(stderr=True)
    settings: dict[str, Any] = {
        "seeds": seeds,
        "workers": options.workers,
        "on": options.on,
        "quiet": options.quiet,
    }
    try:
        if options.quiet:
            results = reproduce(options.name, options.scale, folder, **settings)
        elif chosen.is_speed:
            with console.status("measuring") as status:
                results = reproduce(options.name, options.scale, folder, **settings, say=status.update)
        else:
            results = reproduce(options.name, options.scale, folder, **settings, say=console.print)
    except KeyboardInterrupt:
        print(f"{folder}: stopped; the same command goes on where it stopped")
        return 130
    for sentence in results["verdict"][: 1 + len(results["published"])]:
        print(sentence)
    print(f"The report: {folder / 'report.html'}")
    offer_seeds(results)
    failed = [f"{arm} seed {seed}" for arm, seed in _failed_seeds(results)]
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(failed)}; the same command tries them again")
    return 1 if failed else 0


def _failed_seeds(results: dict[str, Any]) -> list[tuple[str, int]]:
    """Of a recipe of one part, or of several."""
    if "parts" in results:
        return [
            (f"{part['name']} {arm['name']}", seed)
            for part in results["parts"]
            for arm in part["arms"]
            for seed in arm["failed"]
        ]
    if "arms" not in results:
        return []
    return [(arm["name"], run["seed"]) for arm, run in _failures(results)]
