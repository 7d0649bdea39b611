"""The commands about studies: compare, report, reproduce."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from langevin.cli.runs import WithSettings
from langevin.cli.tables import console_for, interval, table_of
from langevin.errors import UsageError
from langevin.settings import TrainConfig, check_count, read_seeds

# Options of compare that are fields of its plan as they stand.
PLANNED = ("settings", "title", "metrics", "primary", "tune", "trials", "equalise", "test_tokens")


@dataclass(frozen=True)
class Compare(WithSettings):
    """Train several mixers on equal terms and say which is better, and how sure that is.

    Every arm sees the same tokens in the same order with the same schedule, once for each seed; runs are
    paired by seed. Started again on the same folder, it goes on where it stopped.

    Example: langevin compare softmax ssmax "warm=heat(t=0.28)" --data stories --tokens 300000 --seeds 0-5
    """

    arms: tyro.conf.Positional[tuple[str, ...]] = ()
    """Mixer specs, the first being what the others are compared with; name=spec gives one a name."""
    out: Path | None = None
    """The folder of the comparison; default: runs/compare-DATA."""
    config: Path | None = None
    """Another comparison, or its compare.yaml, to make it again; flags on the command line go first."""
    seeds: str = "0-5"
    """0-5 or 0,3,5. With fewer than six no verdict is given."""
    tune: Literal["lr"] | None = None
    """lr: try the same number of learning rates for every arm, and take the best on validation."""
    trials: int = 5
    """Learning rates tried for each arm: --lr times powers of two."""
    equalise: bool = False
    """Match the parameters of the first arm by the width of the MLPs."""
    metrics: tuple[str, ...] = ()
    """What to report; default: what the task is about."""
    primary: str | None = None
    """The metric that the verdict is about; default: the task's."""
    test_tokens: int = 65_536
    """Test tokens that each run is scored on."""
    workers: int | None = None
    """Processes; default: one a core, or as many as share a GPU. 0: this one."""
    on: Literal["local", "ray"] = "local"
    """ray: send the runs to a Ray cluster (extra `ray`), which must see the same folder."""
    open: bool = False
    """Open the report in a browser, where there is a screen."""
    title: str = ""
    quiet: bool = False
    """Show no progress."""

    @staticmethod
    def read(file: Path) -> tuple[TrainConfig, dict[str, Any]]:
        """The options that make the comparison of a compare.yaml."""
        from langevin.studies.plan import FILE, read_arms, read_plan, seeds_in_words

        plan, _ = read_plan(file / FILE if file.is_dir() else file)
        named = [(arm.name, arm.spec) for arm in plan.arms]
        changed = any(arm.changes for arm in plan.arms) and not plan.equalise
        said = [(arm.name, arm.spec) for arm in read_arms(tuple(arm.text for arm in plan.arms))]
        if changed or plan.threads != 1 or said != named:
            raise UsageError(
                f"{file} has arms or threads that the command line cannot say",
                "Read it with langevin.studies.plan.read_plan, and give the plan to compare in Python.",
            )
        options = {name: getattr(plan, name) for name in PLANNED if name != "settings"}
        arms, seeds = tuple(arm.text for arm in plan.arms), seeds_in_words(plan.seeds)
        return plan.settings, {**options, "arms": arms, "seeds": seeds, "config": file}

    def __call__(self) -> int:
        settings, default = self.settings, TrainConfig()
        for name in ("mixer", "seed"):
            if getattr(settings, name) != getattr(default, name):
                raise UsageError(
                    f"--{name} does not fit compare, which sets it for every run",
                    "Name the mixers as arms and give --seeds: langevin compare softmax ssmax --seeds 0-5.",
                )
        if len(self.arms) < 2:
            raise UsageError(
                f"{len(self.arms) or 'no'} arm{'s' * (not self.arms)} came",
                "Name two or more mixers: langevin compare softmax ssmax.",
            )
        check_count("workers", self.workers, above=None)
        seeds = tuple(read_seeds(self.seeds))
        from langevin.studies.plan import Plan, read_arms

        options = {name: getattr(self, name) for name in PLANNED}
        return run_comparison(Plan(read_arms(self.arms), seeds=seeds, **options), self)


@dataclass(frozen=True)
class Report:
    """Write the report of any run folders: train's, or a comparison's.

    Runs that differ in their seed alone are one arm; the others are compared with the first folder's.

    Example: langevin report runs/softmax-0 runs/softmax-1 runs/heat-0 runs/heat-1 --out report
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Run folders, folders of seeds, or one folder made by compare."""
    out: Path | None = None
    """Where to write; default: report, or the folder of the comparison itself."""
    metrics: tuple[str, ...] = ()
    """What to report; default: what the task is about."""
    primary: str | None = None
    """The metric that the verdict is about; default: the task's."""
    title: str = ""

    def __call__(self) -> int:
        from langevin.studies.folders import gather
        from langevin.studies.plan import FILE
        from langevin.studies.report import write_report

        if not self.runs:
            raise UsageError("no run folder came", "Give folders made by langevin train or compare.")
        results = gather(
            list(self.runs),
            metrics=self.metrics,
            primary=self.primary,
            title=self.title,
            say=console_for(stderr=True).print,
        )
        in_place = len(self.runs) == 1 and (self.runs[0] / FILE).is_file()
        folder = self.out or (self.runs[0] if in_place else Path("report"))
        if _is_recipe(folder):
            raise UsageError(
                f"the report in {folder} was made by langevin reproduce and has more in it",
                "Run langevin reproduce again to renew it, or choose another --out.",
            )
        write_report(results, folder)
        show(results, folder)
        return 0


@dataclass(frozen=True)
class Reproduce:
    """Try a published claim again, and say whether it held.

    langevin list recipes shows what each recipe re-tests and what it costs. Started again on the same
    folder, it goes on where it stopped.

    Example: langevin reproduce ssmax-text8 --scale smoke
    """

    name: tyro.conf.Positional[str]
    """A recipe."""
    scale: Literal["smoke", "small", "full"] = "smoke"
    """smoke: does it run, on any machine; small: an answer from one GPU; full: the published size."""
    seeds: str | None = None
    """0-5 or 0,3,5; default: the recipe's. With fewer than six no claim is judged."""
    out: Path | None = None
    """The folder; default: runs/NAME-SCALE."""
    workers: int | None = None
    """Processes; default: one a core, or as many as share a GPU. 0: this one."""
    on: Literal["local", "ray"] = "local"
    """ray: send the runs to a Ray cluster (extra `ray`), which must see the same folder."""
    quiet: bool = False
    """Show no progress."""

    def __call__(self) -> int:
        """Make a recipe and say which published claims held; exit status as for compare."""
        from langevin.studies.recipe import recipe

        chosen = recipe(self.name)
        chosen.scale(self.scale)
        check_count("workers", self.workers, above=None)
        seeds = tuple(read_seeds(self.seeds)) if self.seeds else None
        folder = self.out or Path("runs") / f"{self.name}-{self.scale}"

        from langevin.studies.claims import in_short
        from langevin.studies.reproduce import reproduce

        console = console_for(stderr=True)
        settings: dict[str, Any] = {
            "seeds": seeds,
            "workers": self.workers,
            "on": self.on,
            "quiet": self.quiet,
        }
        try:
            if self.quiet:
                results = reproduce(self.name, self.scale, folder, **settings)
            elif chosen.is_speed:
                with console.status("measuring") as status:
                    results = reproduce(self.name, self.scale, folder, **settings, say=status.update)
            else:
                results = reproduce(self.name, self.scale, folder, **settings, say=console.print)
        except KeyboardInterrupt:
            print(f"{folder}: stopped; the same command goes on where it stopped")
            return 130
        print(in_short(results["published"]), *(row["sentence"] for row in results["published"]), sep="\n")
        print(f"The report: {folder / 'report.html'}")
        offer_seeds(results)
        failed = [f"{arm} seed {seed}" for arm, seed in _failed_seeds(results)]
        if failed:
            print(f"{len(failed)} runs failed: {', '.join(failed)}; the same command tries them again")
        return 1 if failed else 0


def run_comparison(plan: Any, options: Any) -> int:
    """Make a comparison and say what it found; exit status 1 when a run failed, 130 when interrupted."""
    from langevin.studies.collect import unmatched
    from langevin.studies.runner import compare

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


def _is_recipe(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "results.json").read_text())["kind"] == "recipe")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def show(results: dict[str, Any], folder: Path) -> None:
    """The primary metric by arm, the verdict, and where the rest is."""
    from langevin.studies.statistics import cost_of

    metric = next(m for m in results["metrics"] if m["name"] == results["primary"])
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    table = table_of(None, "arm", metric["label"] + unit, "95 % interval", "parameters", "tokens/s")
    for arm in results["arms"]:
        found = arm["summary"].get(results["primary"])
        pace = cost_of(arm, "tokens_per_second")
        table.add_row(
            arm["name"],
            "" if found is None else f"{found['mean']:.4f}",
            "" if found is None else interval(found["low"], found["high"]),
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
