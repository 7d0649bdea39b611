"""Recipes: one small YAML file for each published table that is tried again.

A recipe says what was claimed, which arms test it, and what to train at three scales. Every key must be
known. Names in braces, as in "fixed=heat(t={t})", are filled with the `values` of a part, so that one line
serves every depth.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from langevin.bench.mixers import Settings
from langevin.errors import UsageError, unknown
from langevin.evaluation.quality import OF_SETS, TEMPERATURES
from langevin.settings import StudySettings, TrainConfig, parse_yaml
from langevin.studies import plan
from langevin.studies.plan import Claim, Plan

SCALES = ("smoke", "small", "full")
TERMS = (*(f.name for f in fields(StudySettings)), "temperatures", "sampling")  # of a study


@dataclass(frozen=True)
class SpeedClaim:
    """Is an arm faster than another, slower, within the margin of it, or does it take less (memory)? So
    many times at least, and at this length or longer."""

    claim: str
    published: str
    measure: Literal["training", "module", "core", "memory"]
    arm: str
    expect: Literal["faster", "slower", "same", "less"]
    against: str = "softmax"
    times: float = 1.0
    margin: float = 0.05
    length: int = 0


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
            return text.format_map(self.values) if self.values else text
        except (KeyError, ValueError, IndexError) as error:
            raise UsageError(f"part {self.name!r} has no value {error} for {text!r}") from error


@dataclass(frozen=True)
class Benches:
    """What a recipe of costs measures: with `mixers`, what `bench mixers` is given, and `bench train` with
    the model of `training`; with `edge`, training steps of classifiers as `bench edge` has them."""

    training: TrainConfig
    vocab: int
    rounds: int
    seconds: float = 1.0
    mixers: Settings | None = None
    edge: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale(StudySettings):
    """What it names goes before what the recipe does: it has the terms of both."""

    cost: str
    seeds: tuple[int, ...] = ()
    """Default: one more than the least with which a difference can be confirmed."""
    settings: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = (Part(),)
    arms: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = TEMPERATURES
    sampling: dict[str, Any] = field(default_factory=dict)
    benches: Benches | None = None


@dataclass(frozen=True)
class Recipe:
    name: str
    title: str
    retests: str
    source: str
    arms: tuple[str, ...]
    scales: dict[str, Scale]
    claims: tuple[Claim, ...] = ()
    speeds: tuple[SpeedClaim, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    differs: tuple[str, ...] = ()
    """How this differs from what was published."""

    @property
    def cost(self) -> str:
        return "; ".join(f"{name}: {self.scales[name].cost}" for name in SCALES)

    def scale(self, name: str) -> Scale:
        if name not in self.scales:
            raise unknown("scale", name, self.scales)
        return self.scales[name]

    def plan(self, scale: str, seeds: tuple[int, ...] = ()) -> Plan:
        chosen = self.scale(scale)
        parts = tuple(
            plan.Part(
                tuple(part.filled(arm) for arm in part.arms or chosen.arms or self.arms),
                {**self.settings, **chosen.settings, **part.settings},
                part.name,
            )
            for part in chosen.parts
        )
        terms: dict[str, Any] = {name: getattr(chosen, name) for name in TERMS}
        claims = tuple(claim for part in chosen.parts for claim in self._claims(part, chosen))
        return Plan(parts, seeds or chosen.seeds, **terms, claims=claims, notes=self.differs)

    def _claims(self, part: Part, chosen: Scale) -> list[Claim]:
        """The claims of a part; one about a trend belongs to the last, where there are several."""
        found = []
        for claim in self.claims:
            if claim.at == "trend" and (len(chosen.parts) < 2 or part is not chosen.parts[-1]):
                continue
            if claim.metric in OF_SETS and not chosen.judge:
                continue
            words: Any = {key: part.filled(getattr(claim, key)) for key in ("claim", "published", "arm")}
            found.append(replace(claim, part="" if claim.at == "trend" else part.name, **words))
        names = {plan.Arm.read(part.filled(arm)).name for arm in part.arms or chosen.arms or self.arms}
        return [claim for claim in found if claim.arm in (*names, "*")]


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
    found: Recipe = plan.made(Recipe, _passed_down(parse_yaml(text, where)), where)
    if found.name != name:
        raise UsageError(f"{where} calls itself {found.name!r}")
    if tuple(found.scales) != SCALES:
        raise UsageError(f"{where} has the scales {', '.join(found.scales)}, not {', '.join(SCALES)}")
    plans = [found.plan(scale) for scale, chosen in found.scales.items() if chosen.benches is None]
    arms = {arm.name for own in plans for part in own.parts for arm in part.read_arms}
    for claim in found.claims:
        if claim.arm not in ("*", *arms):
            raise unknown(f"arm in a claim of {name}", claim.arm, arms)
    for speed in found.speeds:
        if speed.arm not in found.arms:
            raise unknown(f"arm in a claim of {name}", speed.arm, found.arms)
    return found


def _passed_down(said: Any) -> Any:
    """What a file says, with the recipe's terms of a study in every scale that does not say otherwise."""
    if not isinstance(said, dict) or not isinstance(scales := said.get("scales"), dict):
        return said
    terms = {key: said[key] for key in TERMS if key in said}
    own = {key: value for key, value in said.items() if key == "title" or key not in TERMS}
    below = {key: {**terms, **scale} if isinstance(scale, dict) else scale for key, scale in scales.items()}
    return {**own, "scales": below}


def _folder() -> Any:
    return files("langevin.studies").joinpath("recipes")
