"""What a task is: its data, its batches, and what is measured. One file a task.

A task's own few settings are its fields: they are flags of the command line under a heading of their own.
Nothing heavy is imported before it is used, as `--help` shows them.
"""

from typing import Any, ClassVar

from langevin.errors import UsageError
from langevin.evaluation.rows import Metric, Row
from langevin.registry import Registry
from langevin.settings import CONTEXT, TrainConfig

TASKS = Registry("task", 'name(key=value, ...), for example "lm"')
register = TASKS.register


class Task:
    """Subclasses are frozen dataclasses whose fields are their settings."""

    name: ClassVar[str] = ""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    primary: ClassVar[str] = ""  # the metric that verdicts are about
    unit: ClassVar[str] = "tokens"  # of budgets
    objective: ClassVar[str] = "ar"  # what its models learn unless told otherwise
    head: ClassVar[str] = ""  # the class of models/heads.py, where it is not the objective's
    epochs: ClassVar[float | None] = None  # the usual budget; None: so much of the unit:
    budget: ClassVar[int] = 10_000_000
    usual: ClassVar[dict[str, Any]] = {}  # settings that the command line begins with
    reads: ClassVar[str] = "text"  # what an example is, in a word: predict has a flag of this name
    used_by: ClassVar[str] = "generate"  # the command that uses its models; "": there is none
    shows_training: ClassVar[bool] = False  # whether training ends with what is measured on validation
    reported: ClassVar[tuple[str, ...]] = ()  # what comparisons show; default: all that are better one way

    judged: ClassVar[tuple[str, ...]] = ()  # what a judge adds to that; (): its models write no texts

    def context(self, config: TrainConfig) -> int:
        """Tokens a sequence, unless told otherwise."""
        return CONTEXT

    def input_settings(self, config: TrainConfig) -> dict[str, Any]:
        """What it decides of a model before its data are there (keys of LangevinConfig)."""
        return {}

    def prepare(self, config: TrainConfig, progress: bool = False) -> Any:
        """The data of a run, with a `manifest` that says what they are, the sha256 of every split in it,
        and a `tokenizer` (or image processor) that is saved beside the model; None: there is none."""
        raise NotImplementedError(f"{type(self).__name__} must say what its data are")

    def model_settings(self, config: TrainConfig, data: Any) -> dict[str, Any]:
        """What the data decide of a model: at least vocab_size (keys of LangevinConfig)."""
        raise NotImplementedError(f"{type(self).__name__} must say what its models read")

    def tokens_a_step(self, config: TrainConfig) -> int:
        """What a step takes of the budget, in its unit."""
        return config.batch * config.context

    def an_epoch(self, data: Any, config: TrainConfig) -> int:
        """How much of the unit a pass over the training data takes."""
        raise UsageError(f"the task {self.name} has no epochs", "Give --tokens or --steps.")

    def batch(self, data: Any, config: TrainConfig, step: int) -> dict[str, Any]:
        """The arrays of a training batch over all processes: a pure function of (seed, step)."""
        raise NotImplementedError(f"{type(self).__name__} must say what its batches are")

    def held_out(self, data: Any, config: TrainConfig) -> list[dict[str, Any]]:
        """The validation batches that a run looks at while it trains."""
        raise NotImplementedError(f"{type(self).__name__} must say what validates its models")

    def feed(self, data: Any, config: TrainConfig, device: Any, share: Any) -> Any:
        """How batches reach the device (see `langevin.data.feed`); share takes a process's part of rows."""
        from langevin.data.feed import Feed

        return Feed(lambda step: self.batch(data, config, step), self.held_out(data, config), device, share)

    def measure(
        self, run: Any, model: Any, split: str, *args: Any, **options: Any
    ) -> tuple[list[Row], dict[str, Any]]:
        """What a model of a run is worth on valid or test, and details that are no single numbers.

        Every task takes the options device, batch (rows at a time), limit (the first so many tokens) and
        data (as prepared, where they are at hand); more of them are its own.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it measures")

    def not_measured(self, objective: Any) -> tuple[str, ...]:
        """The metrics that `measure` never gives of a model with this objective."""
        return ()

    def try_saved(
        self, model: Any, tokenizer: Any, *, data: str, device: str = "cpu", batch: int = 16
    ) -> tuple[list[Row], dict[str, Any]]:
        """What any causal language model is worth that reads text, without training on the task."""
        raise UsageError(
            f"the task {self.name} is not for this model", f"Give a run of the task {self.name}."
        )

    def metric(self, name: str) -> Metric:
        known = {metric.name: metric for metric in self.metrics}
        return known.get(name) or Metric(name, name.replace("_", " "), "", "neither")


def objective_of(config: TrainConfig) -> Any:
    from langevin.objectives import OBJECTIVES

    return OBJECTIVES.parse(config.objective)


def tokenizer_of(config: TrainConfig) -> str | None:
    """The one that is named, or that of the model of --init; None: the usual one of the data."""
    if config.tokenizer is not None or config.init is None:
        return config.tokenizer
    from langevin.models import pretrained

    return pretrained.tokenizer_of(config.init)
