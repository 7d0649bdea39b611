"""Recipes: one small YAML file for each published table that is tried again.

A recipe says what was claimed, which arms test it, and what to train at three scales. Every key must be
known. Names in braces, as in "heat(t={t})", are filled with the `values` of a part, so that one line serves
every depth.
"""

from __future__ import annotations

import typing
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from langevin.errors import UsageError, unknown
from langevin.settings import TrainConfig, check_type, parse_yaml
from langevin.studies import metrics
from langevin.studies.plan import Plan, read_arms

SCALES = ("smoke", "small", "full")
Place = Literal["best", "matched"]


@dataclass(frozen=True)
class Difference:
    """Is a metric of an arm lower, or higher, than that of the first arm? By this share of it, where a size
    was published."""

    metric: str
    arm: str
    expect: Literal["lower", "higher"]
    at: Place = "best"
    size: float = 0.0


@dataclass(frozen=True)
class NoWorse:
    """Is an arm's metric worse than the first arm's by no more than this share of it?"""

    metric: str
    arm: str
    by: float
    at: Place = "best"


@dataclass(frozen=True)
class Best:
    """Is the first arm better than every other?"""

    metric: str
    at: Place = "best"


@dataclass(frozen=True)
class Trend:
    """Is the relative difference to the first arm lower, or higher, in the last part than in the first?"""

    metric: str
    arm: str
    expect: Literal["lower", "higher"]
    at: Place = "best"


@dataclass(frozen=True)
class Speed:
    """Is an arm faster than softmax, slower, or within the margin of it? At this length or longer."""

    measure: Literal["training", "module", "core"]
    arm: str
    expect: Literal["faster", "slower", "same"]
    margin: float = 0.05
    length: int = 0


Test = Difference | NoWorse | Best | Trend | Speed
TESTS: dict[str, type[Any]] = {
    "difference": Difference,
    "no worse": NoWorse,
    "best": Best,
    "trend": Trend,
    "speed": Speed,
}


@dataclass(frozen=True)
class Claim:
    claim: str
    published: str
    test: Test


@dataclass(frozen=True)
class Part:
    """One comparison of a recipe, such as one depth."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    arms: tuple[str, ...] = ()
    """Instead of the recipe's own."""

    def filled(self, text: str) -> str:
        try:
            return text.format_map(self.values)
        except (KeyError, ValueError, IndexError) as error:
            raise UsageError(f"part {self.name!r} has no value {error} for {text!r}") from error


@dataclass(frozen=True)
class Benches:
    """What a speed recipe measures: settings of `bench mixers`, and of `bench train` with its model."""

    mixers: dict[str, Any]
    training: dict[str, Any]
    vocab: int
    rounds: int
    seconds: float = 1.0


@dataclass(frozen=True)
class Scale:
    cost: str
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = (Part(),)
    test_tokens: int = 65_536
    benches: Benches | None = None


@dataclass(frozen=True)
class Recipe:
    name: str
    title: str
    retests: str
    source: str
    arms: tuple[str, ...]
    claims: tuple[Claim, ...]
    scales: dict[str, Scale]
    settings: dict[str, Any] = field(default_factory=dict)
    metrics: tuple[str, ...] = ()
    primary: str = "nll"
    differs: tuple[str, ...] = ()
    """How this differs from what was published."""
    chart: str | None = None
    """What several parts are drawn over: a setting, or a key of the mixers."""

    @property
    def is_speed(self) -> bool:
        return any(scale.benches for scale in self.scales.values())

    @property
    def cost(self) -> str:
        return "; ".join(f"{name}: {self.scales[name].cost}" for name in SCALES)

    def scale(self, name: str) -> Scale:
        if name not in self.scales:
            raise unknown("scale", name, self.scales)
        return self.scales[name]

    def plans(self, scale: str, seeds: tuple[int, ...] | None = None) -> list[tuple[Part, Plan]]:
        """A comparison for each part; none for a speed recipe."""
        chosen = self.scale(scale)
        if chosen.benches:
            return []
        return [
            (
                part,
                Plan(
                    read_arms(tuple(part.filled(arm) for arm in part.arms or self.arms)),
                    train_config({**self.settings, **chosen.settings, **part.settings}, self.name),
                    seeds or chosen.seeds,
                    title=f"{self.title}: {part.name}" if part.name else self.title,
                    metrics=self.metrics,
                    primary=self.primary,
                    test_tokens=chosen.test_tokens,
                ),
            )
            for part in chosen.parts
        ]


def names() -> list[str]:
    found = (Path(entry.name) for entry in _folder().iterdir())
    return sorted(path.stem for path in found if path.suffix == ".yaml")


@cache
def recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in names():
        raise unknown("recipe", name, names())
    return read(_folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8"), name)


def described() -> list[dict[str, str]]:
    """What `langevin list recipes` shows."""
    return [
        {"name": r.name, "re-tests": r.retests, "source": r.source, "cost": r.cost}
        for r in map(recipe, names())
    ]


def read(text: str, name: str) -> Recipe:
    """A recipe from its YAML, checked: its keys, metrics, arms and the settings of every scale."""
    where = f"recipe {name}"
    found: Recipe = _made(Recipe, parse_yaml(text, where), where)
    if found.name != name:
        raise UsageError(f"{where} calls itself {found.name!r}")
    if tuple(found.scales) != SCALES:
        raise UsageError(f"{where} has the scales {', '.join(found.scales)}, not {', '.join(SCALES)}")
    for scale in SCALES:
        _check(found, scale)
    return found


def _check(found: Recipe, scale: str) -> None:
    """See that every claim is about arms and metrics that the scale has."""
    chosen = found.scale(scale)
    if not chosen.benches and not chosen.seeds:
        raise UsageError(f"recipe {found.name}, scale {scale} has no seeds")
    for part, plan in found.plans(scale):
        names = [arm.name for arm in plan.arms]
        for claim in found.claims:
            part.filled(claim.published), part.filled(claim.claim)
            arm, metric = getattr(claim.test, "arm", None), getattr(claim.test, "metric", None)
            if arm is not None and part.filled(arm) not in names[1:]:
                raise unknown(f"arm in a claim of {found.name}", part.filled(arm), names[1:])
            if metric not in plan.metrics:
                raise unknown(f"metric in a claim of {found.name}", str(metric), plan.metrics)
            if metrics.known(plan.settings.task)[str(metric)].better == "neither":
                raise UsageError(f"no claim of {found.name} can be about {metric}")
    if chosen.benches:
        train_config(chosen.benches.training, found.name)
        for claim in found.claims:
            arm = getattr(claim.test, "arm", None)
            if not isinstance(claim.test, Speed) or arm not in found.arms:
                raise unknown(f"arm in a claim of {found.name}", str(arm), found.arms)


def train_config(values: dict[str, Any], name: str) -> TrainConfig:
    """Training settings of a recipe; every key must be known."""
    return TrainConfig.of(values, f"recipe {name}")


def _made(kind: Any, values: Any, where: str) -> Any:
    """The dataclass of these values: none unknown, none missing, each of its type."""
    if not isinstance(values, dict):
        raise UsageError(f"{where} is not a table of keys and values")
    if kind is Test:
        name = str(values.get("kind", ""))
        if name not in TESTS:
            raise unknown(f"kind of test in {where}", name, TESTS)
        kind, values = TESTS[name], {key: value for key, value in values.items() if key != "kind"}
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise unknown(f"key in {where}", str(key), hints)
    for f in fields(kind):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise UsageError(f"{where} has no {f.name}")
    return kind(**{key: _value(hints[key], value, where, key) for key, value in values.items()})


def _value(hint: Any, value: Any, where: str, key: str) -> Any:
    """The value of a key as its type has it: lists become tuples, tables dataclasses."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, dict):
        if not isinstance(value, list if origin is tuple else dict):
            expected = "list" if origin is tuple else "table"
            raise UsageError(f"{where}: {key} must be a {expected}, not {value!r}")
        if isinstance(value, list):
            return tuple(_value(inner[0], item, where, key) for item in value)
        named = f"{where}, {key.removesuffix('s')}"
        return {str(name): _value(inner[1], item, f"{named} {name}", key) for name, item in value.items()}
    if hint in (Test, Claim, Part, Scale, Benches | None):
        return _made(Benches if hint == Benches | None else hint, value, where)
    if hint is not Any:
        check_type(f"{where}: {key}", value, hint)
    return value


def _folder() -> Any:
    return files("langevin.studies").joinpath("recipes")
