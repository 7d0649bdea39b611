"""Values that users set: training settings in groups, their types and bounds, and a strict YAML reader.

Nothing heavy is imported here: `langevin --help` is made of it.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from langevin.errors import UsageError, unknown

T = TypeVar("T")

LARGEST_SEED = 2**63 - 1
MOST_SEEDS = 1000
CONTEXT = 128
BUDGET = ("tokens", "epochs", "steps", "minutes")
_MOST = {"layers": 4096, "heads": 4096, "kv_heads": 4096}
_MOST_OF_ANY = 10**15


@dataclass(frozen=True)
class TaskSettings:
    """What the model is tried on."""

    task: str = "lm"
    """See langevin list tasks."""


@dataclass(frozen=True)
class DataSettings:
    """What it is trained on."""

    data: str = "stories"
    """A named data set (langevin data list), a file or a folder."""
    tokenizer: str | None = None
    """bytes, chars, words, bpe-N, or a transformers tokenizer; default: what suits the data."""
    train_tokens: int | None = None
    """Train on only the first so many tokens (or examples) of the data, over and over."""


@dataclass(frozen=True)
class ObjectiveSettings:
    """What the model is asked to learn."""

    objective: str = ""
    """See langevin list objectives; default: what the task is about, ar or classify."""


@dataclass(frozen=True)
class ModelSettings:
    """The model: its mixer and its shape."""

    mixer: str = "softmax"
    """A mixer spec, or one per layer separated by semicolons."""
    init: str | None = None
    """Start from pretrained weights, converted to the mixer: a saved model, a run, or a name on the Hub."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None
    context: int = 0
    """Tokens a sequence; default: 128, the patches of an image, or what a pretrained model was made for."""
    positions: Literal["none", "learned", "sinusoidal", "rope", "alibi"] = "rope"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    mlp_width: int | None = None
    """Hidden width of the MLP; default: 4 widths, or 8/3 for swiglu."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    qk_norm: bool = False
    dropout: float = 0.0
    tie: bool = True
    """Share the input and output embeddings."""


@dataclass(frozen=True)
class OptimisationSettings:
    """How it learns."""

    batch: int = 32
    """Sequences a step, whatever the number of parts or processes they are computed in."""
    accumulate: int | None = None
    """Parts a step is computed in; default: as few as fit into the memory of the device."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-3
    muon_lr: float = 0.02
    """Learning rate of the matrices under muon; everything else takes lr."""
    weight_decay: float = 0.1
    beta2: float = 0.95
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = 0.05
    """Fraction of the steps over which the learning rate rises."""
    final_lr: float = 0.1
    """Fraction of the learning rate left at the end."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.0
    """Decay of an exponential average of the weights, which is then what is evaluated; 0: none."""
    max_bad_steps: int = 10
    """Steps with a loss or gradient that is not finite, in a row, before the run stops."""


@dataclass(frozen=True)
class BudgetSettings:
    """How long it learns: one of these; default: ten million tokens, or ten epochs of examples."""

    tokens: int | None = None
    """Training tokens, or examples where a task counts these."""
    epochs: float | None = None
    """Passes over the training data."""
    steps: int | None = None
    """0: train nothing, and keep the model as it starts."""
    minutes: float | None = None


@dataclass(frozen=True)
class RunSettings:
    """How it is computed, and what is kept on the way."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 on a GPU that has it, fp32 elsewhere; weights and moments stay in fp32."""
    compile: Literal["auto", "on", "loss", "off"] = "auto"
    """torch.compile; auto: on a GPU. loss: only the loss, which takes seconds and not half a minute."""
    graphs: bool = True
    """On one GPU, replay whole steps as a CUDA graph."""
    checkpointing: bool = False
    """Compute activations again in the backward pass, for less memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: copies of the model (ddp), or one spread over the processes (fsdp)."""
    device: str = "auto"
    """cpu, cuda, cuda:1 ...; auto: a GPU where there is one."""
    seed: int = 0
    eval_every: int | None = None
    """Steps between evaluations; default: ten over the run, fewer where they would take long."""
    eval_tokens: int = 32_768
    """Validation tokens (or examples) an evaluation during training looks at, the same ones every time."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; default: with an evaluation, half a minute or more after the last."""
    keep_evaluated: bool = False
    """Keep the model of every evaluation, in evaluated/step-N."""
    keep: int = 2
    """Checkpoints kept, besides the best."""
    track: str | None = None
    """Also send the metrics to tensorboard, wandb, or both separated by a comma (extra `track`)."""


GROUPS = {
    "task": TaskSettings,
    "data": DataSettings,
    "objective": ObjectiveSettings,
    "model": ModelSettings,
    "optimisation": OptimisationSettings,
    "budget": BudgetSettings,
    "run": RunSettings,
}

_POSITIVE = (
    *("layers", "width", "heads", "kv_heads", "mlp_width", "batch", "accumulate", "keep"),
    *("lr", "muon_lr", "clip", "max_bad_steps"),
    *("tokens", "epochs", "minutes", "eval_every", "eval_tokens", "checkpoint_every", "train_tokens"),
)
_FRACTIONS = ("warmup", "final_lr", "ema", "dropout", "beta2")


@dataclass(frozen=True)
class TrainConfig(
    RunSettings,
    BudgetSettings,
    OptimisationSettings,
    ModelSettings,
    ObjectiveSettings,
    DataSettings,
    TaskSettings,
):
    """What a training run is: every choice in one frozen record, written into the run folder."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            check_type(f"{f.name}=...", getattr(self, f.name), hints[f.name])
        for name in _POSITIVE:
            check_count(name, getattr(self, name), above=0)
        if not self.objective or not (self.context or self.init):
            from langevin.tasks import TASKS

            task = TASKS.parse(self.task)
            object.__setattr__(self, "objective", self.objective or task.objective)
            if self.init is None:
                object.__setattr__(self, "context", self.context or task.context(self))
        for name in ("steps", "weight_decay", "context"):
            check_count(name, getattr(self, name), above=None)
        check_seed(self.seed)
        for name in _FRACTIONS:
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be from 0 to below 1")
        for name in ("task", "data", "mixer", "device", "tokenizer", "init", "track"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise UsageError(f"{name} is empty", f"Leave --{name} out, or give it a value.")
        given = [n for n in BUDGET if getattr(self, n) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} both set a budget", "Give one of them.")
        if self.batch % (self.accumulate or 1):
            raise UsageError(
                f"{self.accumulate} parts do not divide a batch of {self.batch}",
                "Choose another accumulate or batch.",
            )

    def with_budget(self, **budget: Any) -> TrainConfig:
        """The same with this budget and no other."""
        return replace(self, **{**dict.fromkeys(BUDGET), **budget})

    @property
    def mixers(self) -> str | list[str]:
        parts = [part.strip() for part in self.mixer.split(";")]
        return parts[0] if len(parts) == 1 else parts

    def as_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)

    @staticmethod
    def read(path: Path) -> TrainConfig:
        """A config file; every key must be known."""
        return TrainConfig.of(read_yaml(path), str(path))

    @staticmethod
    def of(values: Any, where: str) -> TrainConfig:
        """Settings as a table; every key must be known."""
        if not isinstance(values, dict):
            raise UsageError(f"{where} is not a table of settings", "Write one `key: value` a line.")
        known = [f.name for f in fields(TrainConfig)]
        for key in values:
            if key not in known:
                raise unknown(f"setting in {where}", str(key), known)
        return TrainConfig(**values)


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """What is judged, and on what terms."""

    margin: float | None = None
    """How much of the primary metric makes no difference: within it an arm is called as good."""
    within: float = 0.05
    """With --init: how near the untouched model's loss is near enough."""
    tune: Literal["lr"] | None = None
    """lr: try the same number of learning rates for every arm, and take the best on validation."""
    trials: int = 5
    """Learning rates tried for each arm: its rate times powers of two."""
    trial_tokens: int | None = None
    """The budget of a trial of the first arm, and in proportion of the others'; default: that of a run."""
    equalise: bool = False
    """Match the parameters of the first arm by the width of the MLPs."""
    equal_flops: bool = False
    """Give every arm the training FLOPs of the first, and as many tokens as these pay for."""
    along: bool = False
    """Measure the models on the way, too, for metrics at a matched loss."""
    metrics: tuple[str, ...] = ()
    """What to report; default: what the task is about."""
    primary: str = ""
    """The metric that the verdict is about; default: the task's."""
    test_tokens: int = 65_536
    """Test tokens that each run is scored on."""
    judge: str = ""
    """A causal language model that reads what every run writes: a folder, a run or a name on the Hub."""
    samples: int = 1024
    """Texts that the judge reads at each temperature."""
    title: str = ""
    """The question that the page answers."""


def check_count(name: str, value: float | None, above: float | None = 0) -> None:
    """Raise unless a number is positive (above=None: zero or more) and no larger than anything can be."""
    if value is None:
        return
    if value < 0 or (above is not None and value <= above):
        raise UsageError(f"{name}={value} must be {'0 or more' if above is None else 'positive'}")
    most = _MOST.get(name, _MOST_OF_ANY)
    if value > most:
        raise UsageError(f"{name}={value} is too large", f"The most is {most:,}.")


def check_seed(value: int) -> None:
    if not 0 <= value <= LARGEST_SEED:
        raise UsageError(f"seed={value} must be from 0 to {LARGEST_SEED}")


def read_seeds(text: str) -> list[int]:
    """'0-2' or '0,3,5' -> numbers."""
    span = re.fullmatch(r"\s*(\d{1,20})\s*-\s*(\d{1,20})\s*", text)
    if span and int(span[2]) - int(span[1]) >= MOST_SEEDS:
        raise UsageError(f"--seeds {text} are too many", f"The most is {MOST_SEEDS}.")
    try:
        found = list(range(int(span[1]), int(span[2]) + 1)) if span else [int(x) for x in text.split(",")]
    except ValueError:
        found = []
    if not found:
        raise UsageError(f"--seeds {text} names no seeds", "Write 0-2 or 0,3,5.")
    for seed in found:
        check_seed(seed)
    return found


def read_numbers(text: str, what: str, kind: Callable[[str], T], such_as: str = "128,256") -> list[T]:
    """Numbers with commas between them; none where nothing is said."""
    try:
        return [kind(word) for word in text.split(",")] if text.strip() else []
    except ValueError:
        raise UsageError(f"{text!r} names no {what}", f"Write numbers with commas: {such_as}.") from None


class _Yaml12(yaml.SafeLoader):
    """YAML 1.2 as far as settings need it: 3e-4 is a number, off a word, and a key stands once."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (none of YAML 1.1's)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} comes twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


for _tag, _pattern in (
    ("null", r"~|null|Null|NULL|"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?[0-9]+"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"),
):
    _Yaml12.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)
_Yaml12.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def read_yaml(path: Path) -> Any:
    """What a YAML 1.2 file holds; a UsageError says why it cannot be read."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{path} cannot be read: {cause}", "Give a YAML file.") from error


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Yaml12)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        problem = "it is nested too deep" if isinstance(error, RecursionError) else problem
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        raise UsageError(f"{where} is not YAML that can be read: {problem}{line}", "Mend it.") from error


def check_type(where: str, value: Any, hint: Any) -> None:
    """Raise unless value fits the annotation (numbers, strings, Literal, None and unions of them)."""
    options = (
        typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    )
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} must be finite, not {value}")
    if any(_fits(value, option) for option in options):
        return
    raise UsageError(f"{where} must be {_options_in_words(options)}, not {value!r}")


def _fits(value: Any, option: Any) -> bool:
    if typing.get_origin(option) is typing.Literal:
        return any(value == a and type(value) is type(a) for a in typing.get_args(option))
    if option is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, option)


def _options_in_words(options: tuple[Any, ...]) -> str:
    words = {float: "a number", int: "a whole number", bool: "True or False", str: "a string"}
    parts = []
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            parts += [repr(a) for a in typing.get_args(option)]
        else:
            parts.append("None" if option is type(None) else words.get(option, str(option)))
    return " or ".join(parts)
