"""The options of the commands about studies: compare, report, reproduce."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from langevin.errors import UsageError
from langevin.studies.metrics import DEFAULT as METRICS
from langevin.training.config import TrainConfig

# Options of compare that are fields of its plan as they stand.
PLANNED = ("settings", "title", "metrics", "primary", "tune", "trials", "equalise", "test_tokens")


@dataclass(frozen=True)
class Compare:
    """Train several mixers on equal terms and say which is better, and how sure that is.

    Every arm sees the same tokens in the same order with the same schedule, once for each seed; runs are
    paired by seed. Started again on the same folder, it goes on where it stopped.

    Example: langevin compare softmax ssmax "warm=heat(t=0.28)" --data stories --tokens 300000 --seeds 0-5
    """

    arms: tyro.conf.Positional[tuple[str, ...]] = ()
    """Mixer specs, the first being what the others are compared with; name=spec gives one a name."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
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
    metrics: tuple[str, ...] = METRICS
    """What to report."""
    primary: str = "nll"
    """The metric that the verdict is about."""
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

    @classmethod
    def planned(cls, file: Path) -> Compare:
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
        arms, seeds = tuple(arm.text for arm in plan.arms), seeds_in_words(plan.seeds)
        return cls(arms, config=file, seeds=seeds, **{name: getattr(plan, name) for name in PLANNED})

    def run(self) -> int:
        from langevin.study_commands import compare_command

        return compare_command(self)


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
    metrics: tuple[str, ...] = METRICS
    """What to report."""
    primary: str = "nll"
    """The metric that the verdict is about."""
    title: str = ""

    def run(self) -> int:
        from langevin.study_commands import report_command

        return report_command(self)


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

    def run(self) -> int:
        from langevin.study_commands import reproduce_command

        return reproduce_command(self)
