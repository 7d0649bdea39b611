"""The command evaluate, and how commands say how a run writes texts."""

import json
from dataclasses import dataclass, field, fields, make_dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import tyro

from langevin.cli.runs import WITHOUT_PREFIX, flag
from langevin.cli.tables import console_for, quality_table, show
from langevin.errors import UsageError
from langevin.registry import written
from langevin.sampling.text import Sampling
from langevin.settings import TrainConfig, check_count, read_numbers
from langevin.tasks import TASKS


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

    langevin evaluate RUN --help has the options of the run's sampler, too.

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
            show(title, run.task, result, of_texts)
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
            show(f"{self.path} on {written(task)}", task, result)
        return 0


def _reader(where: str, run: Any | None) -> tuple[Any, Any]:
    """The causal language model of a run or a folder, and its tokenizer."""
    from langevin.data.tokenizers import load_tokenizer
    from langevin.models.pretrained import causal, pretrained, tokenizer_of

    if run is not None:
        return causal(run.model, where), run.tokenizer
    return pretrained(where, None), load_tokenizer(Path(tokenizer_of(where)))
