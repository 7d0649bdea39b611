"""The commands data, train and plot, and how commands take the settings of a run."""

import math
import shlex
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import tyro

from langevin.cli.tables import print_pairs, print_rows, show
from langevin.errors import UsageError
from langevin.registry import written
from langevin.settings import BUDGET, GROUPS, TaskSettings, TrainConfig, read_seeds
from langevin.tasks import TASKS

WHOLE = 1 << 30  # tokens: nothing is cut


@dataclass(frozen=True)
class Data:
    """List data sets, or prepare some: fetch, tokenise and cache.

    Example: langevin data prepare stories text8
    """

    what: tyro.conf.Positional[Literal["list", "prepare"]] = "list"
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Names, text files or folders of text files."""
    tokenizer: str | None = None
    """bytes, chars, bpe-N, or a transformers tokenizer; default: what suits the data."""
    text_column: str | None = None
    """The column of a CSV, TSV or JSONL file that holds the texts; default: text."""
    json: bool = False
    """Print the list as JSON."""

    def __call__(self) -> int:
        from langevin import data

        if self.what == "list":
            if self.names:
                raise UsageError(
                    f"data list takes no names, not {self.names[0]}", "To fetch one: langevin data prepare."
                )
            print_rows(data.names(), self.json)
            return 0
        if not self.names:
            raise UsageError("no data set was named", "See langevin data list.")
        from langevin.data import images, labelled

        own: dict[str, Any] = {} if self.text_column is None else {"text_column": self.text_column}
        for name in self.names:
            if name in images.ABOUT:
                found = images.prepare(name, images.SIZES[name])
                sizes = {f"{split} images": s["images"] for split, s in found.manifest["splits"].items()}
                print_pairs({"data": name, **sizes, "kept in": found.folder})
                continue
            if name in labelled.NAMED or name in labelled.GENERATED:
                corpus = data.prepare_labelled(name, self.tokenizer, context=WHOLE).corpus
            else:
                corpus = data.prepare(name, tokenizer=self.tokenizer, **own)
            sizes = {
                f"{split} {what}": facts[what]
                for split, facts in corpus.manifest["splits"].items()
                for what in ("tokens", "characters", "documents")
            }
            print_pairs({"data": name, "vocabulary": corpus.vocab_size, **sizes, "kept in": corpus.folder})
        return 0


WITHOUT_PREFIX: Any = tyro.conf.OmitArgPrefixes
GROUPED = [(name, WITHOUT_PREFIX[kind], field(default_factory=kind)) for name, kind in GROUPS.items()]
Groups: Any = make_dataclass("Groups", GROUPED, frozen=True)


@dataclass(frozen=True)
class WithSettings(Groups):
    """The settings of training runs, in groups; those of the task itself join them when it is known."""

    @classmethod
    def started(cls, arguments: list[str]) -> Any:
        """What stands before the flags are read: the defaults, or the file of --config."""
        file = flag(arguments, "--config")
        if file is None and flag(arguments, "--resume") == "auto":  # a run goes on with its own settings
            own = Path(flag(arguments, "--out") or "") / "config.yaml"
            file = str(own) if flag(arguments, "--out") and own.is_file() else None
        if file is None:
            return cls.of(arguments, {})
        if not file:
            raise UsageError("--config names no file", "Give a YAML file, such as a run's config.yaml.")
        config, options = cls.read(Path(file))
        budgets = [f"--{name}" for name in BUDGET]
        if any(a.partition("=")[0] in budgets for a in arguments):  # one takes the place of another
            config = config.with_budget()
        return cls.of(arguments, asdict(config), **options)

    @classmethod
    def of(cls, arguments: list[str], settings: dict[str, Any], /, **options: Any) -> Any:
        """The options with these settings, and those of the task under a heading of its own."""
        task = TASKS.parse(flag(arguments, "--task") or settings.get("task") or TaskSettings().task)
        settings = {**task.usual, **settings}
        parts = {
            name: group(**{f.name: settings[f.name] for f in fields(group) if f.name in settings})
            for name, group in GROUPS.items()
        }
        if not fields(task):
            return cls(**parts, **options)
        own = (task.name, WITHOUT_PREFIX[type(task)], field(default=task))
        kind: Any = make_dataclass(cls.__name__, [own], bases=(cls,), frozen=True)
        kind.__doc__ = cls.__doc__
        return kind(**parts, **options)

    @staticmethod
    def read(file: Path) -> tuple[TrainConfig, dict[str, Any]]:
        """The settings in a file, and the other options that it holds."""
        return TrainConfig.read(file), {}

    @property
    def settings(self) -> TrainConfig:
        values = {k: v for name in GROUPS for k, v in vars(getattr(self, name)).items()}
        task = TASKS.parse(values["task"])
        return TrainConfig(**{**values, "task": written(getattr(self, task.name, task))})


def flag(arguments: list[str], name: str) -> str | None:
    """What a flag is given, before the flags are read; it may come once."""
    found = []
    for i, word in enumerate(arguments):
        before, equals, after = word.partition("=")
        if before == name:
            found.append(after if equals else "".join(arguments[i + 1 : i + 2]))
    if len(found) > 1:
        raise UsageError(f"{name} comes twice", "Give it once.")
    return found[0] if found else None


@dataclass(frozen=True)
class Train(WithSettings):
    """Train a model with any mixer, objective and task.

    Example: langevin train --data stories --mixer "heat(t='head')" --minutes 1 --out runs/x
    """

    out: Path | None = None
    """The run folder; default: runs/DATA-MIXER-SEED."""
    config: Path | None = None
    """A YAML file of settings, such as another run's config.yaml; flags on the command line go first."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the last whole checkpoint of the run folder, if there is one, with its settings; a
    finished run goes on when it is given a larger budget."""
    seeds: str | None = None
    """Several runs, 0-2 or 0,3,5, one after another."""
    dry_run: bool = False
    """Print parameters, FLOPs and memory, and train nothing."""

    def __call__(self) -> int:
        config = self.settings
        numbers = read_seeds(self.seeds) if self.seeds is not None else [config.seed]
        from langevin.environment import pick_device
        from langevin.runs import train
        from langevin.training.start import default_folder, estimate

        if self.dry_run:
            print_pairs(estimate(config))
            return 0
        for seed in numbers:
            one = replace(config, seed=seed)
            folder = self.out or default_folder(one)
            folder = folder / f"seed-{seed}" if self.seeds is not None and self.out is not None else folder
            run, signal = train(one, folder, resume=self.resume == "auto")
            rows = run.metrics()
            if signal is not None:
                step = int(rows[-1]["step"]) if rows else 0
                print(f"{run.path}: stopped at step {step}; go on with --resume auto")
                return 130
            if run.task.shows_training:
                from langevin.evaluation.runs import evaluate

                result = evaluate(run, "valid", device=pick_device(one.device))[0]
                show(f"{run.path} on valid, model of step {result['step']}", run.task, result)
            print(f"{run.path}: {_ended(run)}\nNext: {_next(run)}")
        return 0


def _ended(run: Any) -> str:
    """The loss after the last step, and of the model that is kept, where this is another."""
    losses = {row["step"]: row["loss"] for row in run.metrics("valid")}
    last, kept = max(losses, default=0), run.step
    kind = "upper bound of the validation" if run.objective.likelihood == "bound" else "validation"
    per = f"nats per {run.task.unit.removesuffix('s')}"
    told = f"{kind} loss {losses.get(last, math.nan):.4f} {per} at the end (step {last})"
    if kept in (None, last):
        return told
    return f"{told}; the best model, {losses[kept]:.4f} at step {kept}, is kept"


def _next(run: Any) -> str:
    """Commands that work as they stand, but for the name of a file of your own."""
    path, task = shlex.quote(str(run.path)), run.task
    example = ' --text "..."' if task.reads == "text" else f" --{task.reads} FILE"
    used = f"; langevin {task.used_by} {path}" if task.used_by else ""
    return f"langevin evaluate {path}{used}{example if task.used_by == 'predict' else ''}"


Picture = Literal["curves", "reliability", "attention", "times", "needle", "lengths", "bench"]


@dataclass(frozen=True)
class Plot:
    """Draw run folders side by side, a study, or the numbers of langevin bench.

    curves: loss in training. attention: the weights of a head. After evaluate: needle (what was found, by
    length and place), lengths (loss by length or position), reliability, times (learned scalars). bench:
    time and memory by length.

    Examples: langevin plot needle runs/softmax runs/ssmax --by position ;
    langevin plot lengths runs/compare-text8 --metric rise --out rise.pdf ; langevin plot bench bench.json
    """

    what: tyro.conf.Positional[Picture]
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Run folders, or the folder of one study; bench: the file that --json named."""
    out: Path | None = None
    """PNG, SVG or PDF; default: figures/ in the first folder, or beside the file."""
    split: Literal["test", "valid"] = "test"
    """needle, lengths, reliability, times: the evaluation that is drawn."""
    metric: str = ""
    """needle, lengths, bench: what was measured; default: what the task is about; both_ratio or ms_p50."""
    by: str = ""
    """needle: depth (default), position, distance, length or state; lengths: length (default) or
    position."""
    text: str | None = None
    """attention: what the model reads; default: how the test data begin."""
    image: str | None = None
    """attention: the file of an image that the model reads; default: the first of the test data."""
    layer: int = 0
    head: int = 0

    def __call__(self) -> int:
        if not self.runs:
            raise UsageError("no folder came", "Give one or more folders made by langevin train.")
        from langevin import figures
        from langevin.cli import pictures
        from langevin.studies.plan import slug

        draw = getattr(pictures, self.what)
        own = [name for name in signature(draw).parameters if name != "paths"]
        for option in fields(self):
            known = option.name in ("what", "runs", "out", *own)
            if not known and getattr(self, option.name) != option.default:
                takes = ", ".join(f"--{name}" for name in own) or "no other options"
                raise UsageError(f"{self.what} takes no --{option.name}", f"It takes {takes}.")
        drawn = draw(list(self.runs), **{name: getattr(self, name) for name in own})
        first = self.runs[0]
        head = f"layer-{self.layer}-head-{self.head}" if self.layer or self.head else ""
        told = "-".join(word for word in (self.what, self.metric, self.by, head) if word)
        out = self.out or (first / "figures" if first.is_dir() else first.parent) / f"{told}.png"
        for one in drawn:
            name = f"{out.stem}-{slug(one.title)}{out.suffix}" if len(drawn) > 1 else out.name
            figures.save(one.figure, out.with_name(name), one.note)
            print(out.with_name(name))
        return 0
