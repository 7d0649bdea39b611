"""The commands about studies: compare, report, reproduce."""

import os
import shlex
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import tyro

from langevin.cli.evaluate import temperatures_in
from langevin.cli.runs import WITHOUT_PREFIX, WithSettings
from langevin.cli.tables import console_for, interval, table_of
from langevin.errors import UsageError
from langevin.settings import StudySettings, TrainConfig, check_count, read_numbers, read_seeds
from langevin.tasks import TASKS


@dataclass(frozen=True)
class Compare(WithSettings):
    """Train several mixers, objectives or settings on equal terms and say which is better, and how sure.

    Every arm sees the same data in the same order with the same budget and schedule, once for each seed;
    runs are paired by seed. With --init every arm starts from the same pretrained weights. Started again on
    the same folder, it goes on where it stopped.

    Example: langevin compare softmax ssmax "warm=heat(t=0.28)" --data stories --tokens 300000

    Example: langevin compare softmax "slow=softmax, lr=1e-3" sima --init MODEL --data FILE --tokens 2000000
    """

    arms: tyro.conf.Positional[tuple[str, ...]] = ()
    """Mixer specs, the first being what the others are compared with; "name=spec, setting=value" names one
    and changes settings."""
    out: Path | None = None
    """The folder of the study; default: runs/compare-DATA."""
    config: Path | None = None
    """Another comparison, or its compare.yaml, to make it again; flags on the command line go first."""
    seeds: str | None = None
    """0-5 or 0,3,5; default: one more than the least with which a difference can be confirmed: 7 for two
    arms, 8 for three, 9 for six."""
    looks: str = ""
    """Numbers of seeds at which you will look, such as 7,10,14: each at the error rate divided by them.
    Without, the first look that can confirm something is the verdict."""
    temperatures: str = ""
    """At which the texts for --judge are written; default: 0.7,0.8,0.9,1.0."""
    sampling: str = ""
    """Settings of the samplers that have them: "steps=32, order=ancestral"."""
    workers: int | None = None
    """Processes; default: one a core, or as many as share a GPU. 0: this one."""
    on: Literal["local", "ray"] = "local"
    """ray: send the runs to a Ray cluster (extra `ray`), which must see the same folder."""
    open: bool = False
    """Open the page in a browser, where there is a screen."""
    quiet: bool = False
    """Show no progress."""
    study: WITHOUT_PREFIX[StudySettings] = field(default_factory=StudySettings)

    @staticmethod
    def read(file: Path) -> tuple[TrainConfig, dict[str, Any]]:
        """The options that make the comparison of a compare.yaml."""
        from langevin.studies.plan import read_plan, seeds_in_words

        plan, _ = read_plan(file)
        if len(plan.parts) > 1 or plan.claims:
            raise UsageError(
                f"{file} was made by langevin reproduce", "Make it again with langevin reproduce."
            )
        study = StudySettings(**{f.name: getattr(plan, f.name) for f in fields(StudySettings)})
        options: dict[str, Any] = {"study": study, "seeds": seeds_in_words(plan.seeds)}
        options |= {"looks": ",".join(map(str, plan.looks))}
        options |= {"temperatures": ",".join(map(str, plan.temperatures))}
        options |= {"sampling": ", ".join(f"{key}={value}" for key, value in plan.sampling.items())}
        return plan.parts[0].config, {**options, "arms": plan.parts[0].arms, "config": file}

    def __call__(self) -> int:
        settings = self.settings
        usual = {**asdict(TrainConfig()), **TASKS.parse(settings.task).usual}
        for name in ("mixer", "seed"):
            if getattr(settings, name) != usual[name]:
                raise UsageError(
                    f"--{name} does not fit compare, which sets it for every run",
                    "Name the mixers as arms and give --seeds: langevin compare softmax ssmax --seeds 0-6.",
                )
        if len(self.arms) < 2:
            raise UsageError(
                f"{len(self.arms) or 'no'} arm{'s' * (not self.arms)} came",
                "Name two or more mixers: langevin compare softmax ssmax.",
            )
        check_count("workers", self.workers, above=None)
        looks = tuple(read_numbers(self.looks, "numbers of seeds for --looks", int, "7,10,14"))
        own = temperatures_in(self.temperatures)
        seeds = tuple(read_seeds(self.seeds)) if self.seeds else ()
        from langevin.studies.compare import compare
        from langevin.studies.plan import Part, Plan, sampler_settings, settings_in, slug, split_at_commas

        if self.sampling:
            parts, known = split_at_commas(self.sampling), sampler_settings()
            own["sampling"] = settings_in(parts, "setting of a sampler", known)
        part = Part(self.arms, {k: v for k, v in vars(settings).items() if k not in ("mixer", "seed")})
        plan = Plan((part,), seeds, looks=looks, **vars(self.study), **own)
        folder = self.out or Path("runs") / f"compare-{slug(Path(settings.data).stem)}"

        def work() -> Any:
            command = shlex.join(["langevin", *sys.argv[1:]])
            options: Any = {"workers": self.workers, "on": self.on, "quiet": self.quiet}
            return compare(plan, folder, **options, command=command)

        return _made(work, folder, self.open)


@dataclass(frozen=True)
class Report:
    """Write the page of any run folders, or that of a comparison again.

    Runs that differ in their seed alone are one arm; the others are compared with the first folder's. What
    was not planned as one study, or is judged by another metric than its plan says, is exploratory.

    Example: langevin report runs/softmax-0 runs/softmax-1 runs/heat-0 runs/heat-1 --out report
    """

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Run folders, folders of seeds, or one folder made by compare or reproduce."""
    out: Path | None = None
    """Where to write; default: report, or the folder of the study itself."""
    metrics: tuple[str, ...] = ()
    """What to report of run folders; default: what the task is about."""
    primary: str = ""
    """The metric to begin with; default: the plan's, or the task's."""
    title: str = ""

    def __call__(self) -> int:
        from langevin.studies.compare import report_again
        from langevin.studies.folders import gather
        from langevin.studies.plan import FILE
        from langevin.studies.report import write_report

        if not self.runs:
            raise UsageError("no run folder came", "Give folders made by langevin train or compare.")
        if len(self.runs) == 1 and (self.runs[0] / FILE).is_file():
            if self.metrics:
                raise UsageError(
                    "a study's metrics are fixed by its plan",
                    "Leave --metrics out, or give its run folders.",
                )
            results = report_again(self.runs[0], self.primary or None, self.title)
            other = self.runs[0] / f"exploratory-{self.primary}" if results.exploratory else self.runs[0]
            folder = self.out or other
        else:
            say = console_for(stderr=True).print
            results = gather(
                list(self.runs), metrics=self.metrics, primary=self.primary, title=self.title, say=say
            )
            folder = self.out or Path("report")
        write_report(results, folder)
        show(results, folder)
        return 0


@dataclass(frozen=True)
class Reproduce:
    """Try a published claim again, and say whether its direction and its size were seen.

    langevin list recipes shows what each recipe re-tests and what it costs. Started again on the same
    folder, it goes on where it stopped.

    Example: langevin reproduce ssmax-text8 --scale smoke
    """

    name: tyro.conf.Positional[str]
    """A recipe."""
    scale: Literal["smoke", "small", "full"] = "smoke"
    """smoke: does it run, on any machine; small: a judged answer from one GPU in half an hour; full: the
    published size."""
    seeds: str | None = None
    """0-5 or 0,3,5; default: the recipe's."""
    out: Path | None = None
    """The folder; default: runs/NAME-SCALE."""
    workers: int | None = None
    """Processes; default: one a core, or as many as share a GPU. 0: this one."""
    on: Literal["local", "ray"] = "local"
    """ray: send the runs to a Ray cluster (extra `ray`), which must see the same folder."""
    quiet: bool = False
    """Show no progress."""

    def __call__(self) -> int:
        from langevin.studies.recipe import recipe

        chosen = recipe(self.name)
        folder = self.out or Path("runs") / f"{self.name}-{self.scale}"
        check_count("workers", self.workers, above=None)
        seeds = tuple(read_seeds(self.seeds)) if self.seeds else ()
        if chosen.scale(self.scale).benches is None:
            from langevin.studies.reproduce import reproduce

            options: dict[str, Any] = {"workers": self.workers, "on": self.on, "quiet": self.quiet}
            return _made(lambda: reproduce(self.name, self.scale, folder, seeds=seeds, **options), folder)
        if seeds:
            raise UsageError(f"{self.name} measures times and has no seeds", "Leave out --seeds.")
        from langevin.studies.reproduce import reproduce_speed

        with console_for(stderr=True).status("measuring") as status:
            answers = reproduce_speed(chosen, self.scale, folder, status.update)
        for answer in answers:
            print(f"{answer.claim} {answer.direction}: {answer.ours}")
        print(f"The page: {folder / 'report.html'}")
        return 0


def _made(work: Any, folder: Path, open_it: bool = False) -> int:
    """Make a study and say what it found; exit status 1 when a run failed, 130 when interrupted."""
    try:
        results = work()
    except KeyboardInterrupt:
        print(f"{folder}: stopped; the same command goes on where it stopped")
        return 130
    show(results, folder)
    if open_it:
        open_page(folder / "report.html")
    failed = [
        f"{part.name + ' ' if part.name else ''}{arm.name} seed {run.seed}"
        for part, arm, run in results.placed_runs
        if run.status == "failed"
    ]
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(failed)}; the same command tries them again")
    for trouble in results.troubles:
        print(f"not measured: {trouble}; the same command tries again")
    return 1 if failed or results.troubles else 0


def show(results: Any, folder: Path) -> None:
    """The primary metric by arm (≤: an upper bound), the answer, and where the rest is."""
    from rich.markup import escape

    from langevin.studies.numbers import with_unit

    metric = results.primary
    heads = (with_unit(metric.label, metric.unit), "95 % t interval", "parameters", "training time")
    for part in results.parts:
        table = table_of(escape(part.name) or None, "arm", *heads)
        for arm in part.arms:
            found, size, time = arm.estimate(metric), arm.cost("parameters"), arm.cost("time_ratio")
            bound = "≤ " if arm.kind(metric.name) == "bound" else ""
            table.add_row(
                escape(arm.name),
                "" if found is None else f"{bound}{found.mean:.4f}",
                "" if found is None else interval(found.low, found.high),
                "" if size is None else f"{size.value:,.0f}",
                "" if time is None else f"{time.value:.2f} × ({interval(time.low, time.high)})",
            )
        console_for().print(table)
    for sentence in (results.verdict.answer, results.verdict.sure, *results.verdict.more):
        print(sentence)
    for answer in results.answers:
        print(
            f"{answer.part + ': ' if answer.part else ''}{answer.claim} {answer.direction}: {answer.ours}"
        )
    print(f"The page: {folder / 'report.html'}")


def open_page(page: Path) -> None:
    """Show a page to whoever sits in front of a screen; elsewhere its path was printed already."""
    import webbrowser

    screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(v) for v in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if screen:
        webbrowser.open(page.resolve().as_uri())
