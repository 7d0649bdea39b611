"""The commands about runs: data, train, evaluate, generate, plot."""

import json
import math
import shlex
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import tyro

from langevin.cli.tables import (
    check_folder,
    class_tables,
    console_for,
    grid_tables,
    interval,
    print_pairs,
    print_rows,
    quality_table,
    table_of,
)
from langevin.errors import UsageError
from langevin.registry import written
from langevin.sampling.text import Sampling, Text
from langevin.settings import (
    BUDGET,
    GROUPS,
    TaskSettings,
    TrainConfig,
    check_count,
    check_seed,
    read_numbers,
    read_seeds,
)
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
                _show(f"{run.path} on valid, model of step {result['step']}", run.task, result)
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


def temperatures_in(text: str) -> dict[str, Any]:
    """As an option, where some are given."""
    found = read_numbers(text, "temperatures", float, "0.7,0.8,0.9,1.0")
    return {"temperatures": tuple(found)} if found else {}


@dataclass(frozen=True)
class WithSampling:
    """How the texts of a run are written: its objective's sampler decides what can be said of that."""

    sampling: WITHOUT_PREFIX[Sampling] = field(default_factory=Sampling, kw_only=True)

    @staticmethod
    def usual(objective: Any, context: int) -> Sampling:
        """What stands before the flags are read."""
        return objective.sampling()()

    @classmethod
    def started(cls, arguments: list[str]) -> Any:
        """The options, with those that the sampler of the run's objective has: another may have others."""
        kind: Any = cls
        words = [a for before, a in zip(("", *arguments), arguments, strict=False) if before != "--judge"]
        run = next((Path(a) for a in words if (Path(a) / "config.yaml").is_file()), None)
        if run is None:
            if arguments and not arguments[0].startswith("-") and flag(arguments, "--task") is None:
                from langevin.runs import load

                load(arguments[0])  # refused
            return kind(tyro.MISSING)
        from langevin.objectives import OBJECTIVES

        config = TrainConfig.read(run / "config.yaml")
        objective = OBJECTIVES.parse(config.objective)
        own = objective.sampling()
        known = {f"--{f.name.replace('_', '-')}" for f in fields(own)}
        others: list[Any] = list(OBJECTIVES.values())
        for other in others:
            flags = {f"--{f.name.replace('_', '-')}" for f in fields(other.sampling())} - known
            given = flags.intersection(a.partition("=")[0] for a in arguments)
            if given:
                raise UsageError(
                    f"{min(given)} is for the objective {other.name}, and {run} was trained with "
                    f"{objective.name}",
                    f"Leave it out. See langevin {cls.__name__.lower()} {run} --help.",
                )
        usual = cls.usual(objective, config.context)
        changed = ("sampling", WITHOUT_PREFIX[own], field(default=usual, kw_only=True))
        kind = make_dataclass(cls.__name__, [changed], bases=(cls,), frozen=True)
        kind.__doc__ = cls.__doc__
        return kind(tyro.MISSING)


@dataclass(frozen=True)
class Evaluate(WithSampling):
    """What a run's model is worth on data that it was not trained on, with intervals.

    Example: langevin evaluate MODEL --task "needle(lengths='512,2048')" --data FILE
    """

    path: tyro.conf.Positional[Path]
    """A run folder; with --task also a saved causal model that has a tokenizer."""
    task: str | None = None
    """What else to try it on: the run's task with other settings, lengths for a run of lm, or needle for
    any model that reads text. This is shown, and not kept."""
    split: Literal["test", "valid"] = "test"
    stride: int | None = None
    """Tokens between windows, where there are such; default: half the context."""
    checkpoint: str = "best"
    """best: the model with the lowest validation loss; last; or the number of a step that was kept."""
    data: str | None = None
    """Where the data are now, if they were moved: they must be the same. Of a saved model: the text that it
    reads; default: stories."""
    device: str = "auto"
    batch: int = 16
    """Rows at a time."""
    masks: int | None = None
    """Where the likelihood is a bound: masks of each window over which it is the mean; default: 8."""
    left_to_right: int | None = None
    """Where the likelihood is a bound: windows that are also scored exactly, written token by token."""
    samples: int | None = None
    """Texts that are written and judged, too, at each of the temperatures."""
    judge: str | None = None
    """Who judges them: any causal language model (a folder, a run or a name on the Hub)."""
    temperatures: str = ""
    """At which they are written; default: 0.7,0.8,0.9,1.0."""
    json: bool = False
    """Print JSON."""

    @staticmethod
    def usual(objective: Any, context: int) -> Sampling:
        from langevin.evaluation.quality import usual

        return usual(objective, context)

    def __call__(self) -> int:
        for name in ("stride", "batch", "masks", "left_to_right"):
            check_count(name, getattr(self, name))
        if (self.samples is None) != (self.judge is None):
            raise UsageError(
                "--samples and --judge go together: texts are written to be judged",
                "Give both: --samples 1024 --judge MODEL.",
            )
        from langevin.environment import pick_device
        from langevin.evaluation.runs import evaluate
        from langevin.runs import load

        device = pick_device(self.device)
        if self.task is not None:
            return self._elsewhere(self.task, device)
        run = load(self.path, checkpoint=self.checkpoint, data=self.data)
        own = {name: getattr(self, name) for name in ("stride", "masks", "left_to_right")}
        own = {name: value for name, value in own.items() if value is not None}
        for name in ("masks", "left_to_right"):
            if name in own and run.objective.likelihood != "bound":
                raise UsageError(
                    f"--{name.replace('_', '-')} is for likelihoods that are bounds, not the objective "
                    f"{run.objective.name}",
                    "Leave it out.",
                )
        for name in set(own) - set(signature(run.task.measure).parameters):
            raise UsageError(f"--{name} is not for the task {run.task.name}", "Leave it out.")
        from langevin.evaluation import quality

        usual = quality.usual(run.objective, run.config.context)
        texts = None
        if self.samples is None or self.judge is None:
            if self.sampling != usual or self.temperatures:
                raise UsageError(
                    "no texts are written, and there is nothing to sample", "Give --samples and --judge."
                )
        else:
            if self.sampling.temperature != usual.temperature:
                raise UsageError(
                    "texts to be judged are written at --temperatures", "Leave --temperature out."
                )
            swept = temperatures_in(self.temperatures)
            texts = quality.Wanted(self.samples, self.judge, self.sampling, **swept)
            texts.check()
            if not run.task.judged:
                raise UsageError(
                    f"the task {run.task.name} has no texts to judge", "Leave --samples and --judge out."
                )
        console = console_for(stderr=True)
        doing = f"evaluating {self.path} on {self.split}"
        with console.status(doing) as status:

            def told(what: str, done: int, total: int | None) -> None:
                status.update(f"{doing}: {what}" + (f", {done} of {total}" if total else ""))

            own |= {} if texts is None else {"texts": texts, "told": told}
            result, kept = evaluate(run, self.split, device=device, batch=self.batch, **own)
        if self.json:
            print(json.dumps(result, indent=1))
        else:
            of_texts = [row for row in result["rows"] if row["metric"] in quality.OF_SETS]
            title = f"{self.path} on {self.split}, model of step {result['step']}"
            _show(title, run.task, result, of_texts)
            if texts is not None:
                console_for().print(quality_table(of_texts, run.task))
                print(result["quality"]["said"])
                print(f"Infill: {result['quality']['infill']}. Repair: {result['quality']['recovery']}.")
        console.print(f"Everything is in {kept}" if kept else f"Not kept: {self.path} cannot be written to")
        return 0

    def _elsewhere(self, text: str, device: str) -> int:
        """On another task, or with other settings: the data of a run where they fit, else as any model."""
        for name in ("stride", "masks", "left_to_right", "samples", "temperatures"):
            if getattr(self, name) not in (None, ""):
                raise UsageError(f"--{name.replace('_', '-')} does not go with --task", "Leave it out.")
        from langevin.evaluation.runs import measured
        from langevin.runs import load

        options: dict[str, Any] = {"device": device, "batch": self.batch}
        run, task = None, TASKS.parse(text)
        if (self.path / "config.yaml").is_file():
            run = load(self.path, checkpoint=self.checkpoint, data=self.data)
        if self.sampling != (Sampling() if run is None else self.usual(run.objective, run.config.context)):
            raise UsageError("no texts are written, and there is nothing to sample", "Leave out how.")
        with console_for(stderr=True).status(f"trying {self.path} on {task.name}"):
            if run is not None and isinstance(task, type(run.task)):
                task = TASKS.parse(text, vars(run.task))  # as it was trained, unless it is said anew
                run = replace(run, config=replace(run.config, task=written(task)))
                result = measured(run, run.model, self.split, **options)
            else:
                if self.split != "test":
                    raise UsageError(f"a saved model has no split {self.split}", "Leave --split out.")
                if run is not None and not run.task.used_by:
                    raise UsageError(
                        f"a run of the task {run.task.name} reads no words",
                        f"Try it on {run.task.name}, or another run on {task.name}.",
                    )
                model, tokenizer = _reader(str(self.path), run)
                rows, more = task.try_saved(model, tokenizer, data=self.data or "stories", **options)
                result = {"task": written(task), "rows": [row.as_dict() for row in rows], **more}
        if self.json:
            print(json.dumps(result, indent=1))
        else:
            _show(f"{self.path} on {written(task)}", task, result)
        return 0


def _reader(where: str, run: Any | None) -> tuple[Any, Any]:
    """The causal language model of a run or a folder, and its tokenizer."""
    from langevin.data.tokenizers import load_tokenizer
    from langevin.models.pretrained import causal, pretrained, tokenizer_of

    if run is not None:
        return causal(run.model, where), run.tokenizer
    return pretrained(where, None), load_tokenizer(Path(tokenizer_of(where)))


def _show(title: str, task: Any, result: dict[str, Any], elsewhere: list[Any] | None = None) -> None:
    """What was measured, but for rows that are shown elsewhere."""
    table = table_of(title, "metric", "value", "95 % interval")
    table.columns[0].no_wrap = False  # where it is narrow, words fold before numbers are cut
    rows = [row for row in result["rows"] if row not in (elsewhere or ()) and "class" not in row["at"]]
    passed = 0  # positions in the ranges so far
    for row in rows:
        if len(row["at"]) > 1:
            continue
        metric = task.metric(row["metric"])
        label = f"{metric.label} ({metric.unit})" if metric.unit else metric.label
        label += " (upper bound)" if row["kind"] == "bound" else ""
        if not row["at"] and "at" in result:
            label += f", at length {result['at']:,}"
        for name, place in row["at"].items():
            if name == "position":
                label, passed = f"{label}, positions {passed + 1:,}–{place:,}", place
            else:
                label += f", {place:.0%} taken" if name == "gap" else f", {name} {place:,}"
            label += " (training)" if (name, place) == ("length", result.get("context")) else ""
        table.add_row(label, f"{row['value']:.4f}", interval(row["low"], row["high"]))
    console_for().print(table)
    for more in grid_tables(rows, task):
        console_for().print(more)
    for more in class_tables(result, task) if "confusion" in result else ():
        console_for().print(more)


@dataclass(frozen=True)
class Generate(WithSampling):
    """Write texts with a run's best model, as they come.

    A prompt and a seed give the same text in any batch.

    Example: langevin generate runs/x --prompt "Once upon a time" "The dog" --samples 3
    """

    run_folder: tyro.conf.Positional[Path]
    """A run folder."""
    prompt: tuple[str, ...] = ()
    """One or more beginnings; none: from nothing."""
    samples: int = 1
    """Texts for each prompt."""
    seed: int = 0
    """Of the first sample; each further one takes the next number."""
    batch: int = 16
    """Texts written at the same time."""
    checkpoint: str = "best"
    """best: the model with the lowest validation loss; last; or the number of a step that was kept."""
    device: str = "auto"
    json: bool = False
    """Print JSON when all are done."""
    watch: bool = False
    """Show how the first text appears, where the terminal can."""
    html: Path | None = None
    """Write a page that plays how the texts appeared."""

    def __call__(self) -> int:
        self.sampling.check()
        for name in ("samples", "batch"):
            check_count(name, getattr(self, name))
        check_seed(self.seed + self.samples)
        check_folder(self.html)
        if self.watch and self.json:
            raise UsageError("--watch and --json both write to the output", "Give one of them.")
        from rich.console import Console
        from rich.status import Status
        from transformers import TextStreamer

        from langevin.environment import pick_device
        from langevin.runs import load
        from langevin.sampling.text import Step
        from langevin.sampling.watch import Live, pieces, player

        device = pick_device(self.device)
        run = load(self.run_folder, checkpoint=self.checkpoint)
        write = run.objective.sampler()
        if not run.task.used_by:
            raise UsageError(f"a run of the task {run.task.name} has no words to write", "Use evaluate.")
        seeds = range(self.seed, self.seed + self.samples)
        requests = self.sampling.requests(self.prompt, seeds)
        watching: dict[str, Any] = {}
        if self.watch or self.html:
            if "watched" not in signature(write).parameters:
                raise UsageError(
                    f"texts of the objective {run.objective.name} appear word by word",
                    "Leave out --watch and --html.",
                )
            decode = pieces(run.tokenizer)
            live = Live(decode, Console(highlight=False))
            traces: list[list[Step]] = [[] for _ in requests]

            def watched(index: int, step: Step) -> None:
                traces[index].append(step)
                if self.watch and index == 0:
                    live.show(step)

            watching = {"watched": watched}
        streams = len(requests) == 1 and not self.json and not self.watch
        status = Status("", console=Console(stderr=True))
        console = console_for(stderr=True)

        def stepped(texts: range, tokens: int) -> None:
            which = f"{texts.start + 1} to {texts.stop} of {len(requests)}"
            status.update(f"texts {which}: {tokens} tokens")

        def finished(index: int, text: Text) -> None:
            run.keep_sample(text.as_dict())
            if streams:
                status.stop()
            if not streams and not self.json and not (self.watch and index == 0):
                if not self.watch:
                    status.stop()
                print(f"--- {text.prompt!r}, seed {text.seed}\n{text.text}", flush=True)
                if not self.watch:
                    status.start()

        shown = status if not streams or "watched" in signature(write).parameters else nullcontext()
        with live if self.watch else shown:
            texts = write(
                run.model.to(device),
                run.tokenizer,
                requests,
                self.sampling,
                data=run.environment["data"],
                context=run.config.context,
                batch=self.batch,
                streamer=TextStreamer(run.tokenizer, skip_special_tokens=True) if streams else None,
                finished=finished,
                stepped=stepped,
                note=lambda text: console.print(text, style="dim"),
                **watching,
            )
        if self.html is not None:
            default = asdict(type(self.sampling)())
            changed = {k: v for k, v in asdict(self.sampling).items() if v != default[k]}
            facts = {"run": self.run_folder.name, **changed, "seed": self.seed}
            self.html.write_text(player(traces, decode, "How texts appeared", facts), encoding="utf-8")
            console.print(f"The page is {self.html}")
        if self.json:
            print(json.dumps([text.as_dict() for text in texts], indent=2))
        return 0


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
