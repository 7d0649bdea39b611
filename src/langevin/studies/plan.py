"""The plan of a study: which arms, on what terms, how often, judged by what; kept in compare.yaml.

All arms of a part take the same data in the same order, the same budget and schedule, but for the settings
in which an arm says that it differs; a run of one arm is paired with the runs of the others that have its
seed. What is judged is fixed here, before anything has been trained.
"""

from __future__ import annotations

import hashlib
import re
import typing
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from langevin.errors import UsageError, unknown
from langevin.evaluation.quality import TEMPERATURES, Wanted, usual
from langevin.objectives import OBJECTIVES
from langevin.runs.files import misfit, write_text
from langevin.settings import BUDGET, StudySettings, TrainConfig, check_type, parse_yaml, read_yaml
from langevin.studies.inference import least_seeds
from langevin.studies.results import TO_MATCH, Key, Look, Place
from langevin.tasks import TASKS

FILE = "compare.yaml"
TUNING_SEED = 1000  # of the learning-rate trials: no run that is judged has it
LONGEST_NAME = 80  # of a folder
WRITTEN = (  # into the folder of a study, beside those of the arms
    *("report.html", "results.json", "results.csv", "summary.csv", "table.tex", "costs.json", "untouched"),
    *("figures", FILE),
)
FIXED = ("seed", "task", "data", "tokenizer", "minutes", "device")  # what arms cannot differ in
NAMED = re.compile(r"""\s*("(?P<quoted>[^"]*)"|(?P<plain>[^"'(=]*))\s*=(?P<spec>.*)""", re.DOTALL)  # an arm
# What changes no number; weights are told by their hash.
INCIDENTAL = ("device", "init", "keep", "checkpoint_every", "accumulate", "graphs", "track")


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a name, and the settings in which it differs from the others."""

    name: str
    changes: dict[str, Any]

    @staticmethod
    def read(text: str) -> Arm:
        """`spec`, or `name=spec`, and perhaps more settings: "mdlm=softmax, objective=masked, lr=1e-3".

        A name that could be read as something else stands in double quotes.
        """
        first, *others = split_at_commas(text)
        named = NAMED.fullmatch(first)
        name, spec = (named["quoted"] or named["plain"] or "", named["spec"]) if named else (text, first)
        name, spec = name.strip().replace('"', "'"), spec.strip()
        if not name or not spec:
            raise UsageError(f"{text!r} is not an arm", "Write a mixer spec, or name=spec, setting=value.")
        known = [f.name for f in fields(TrainConfig) if f.name not in (*FIXED, "mixer")]
        return Arm(name, {"mixer": spec, **settings_in(others, f"setting in the arm {text!r}", known)})

    @property
    def plain(self) -> str:
        """Its settings, without a name."""
        others = [f"{key}={_written(value)}" for key, value in self.changes.items() if key != "mixer"]
        return ", ".join([self.changes["mixer"], *others])

    @property
    def text(self) -> str:
        """What the command line takes."""
        if self.name == self.plain:
            return self.plain
        name = self.name if re.fullmatch(r"[^=()\[\],']+", self.name) else f'"{self.name}"'
        return f"{name}={self.plain}"

    @property
    def slug(self) -> str:
        return slug(self.name)

    def with_(self, **changes: Any) -> Arm:
        return Arm(self.name, {**self.changes, **changes})


@dataclass(frozen=True)
class Claim:
    """Something published: is a metric of an arm ("*": of each) lower or higher than the first arm's, or
    not worse by more than a share of it? At a trend: is the ratio in the last part lower than in the first?
    """

    claim: str
    published: str
    arm: str
    metric: str
    expect: Literal["lower", "higher", "no worse"]
    at: Place = "best"
    size: float | None = None  # as published: signed; no worse: the most that is allowed
    relative: bool = True  # the size is a share of the first arm's value, not in the metric's unit
    against: str = ""  # an arm; default: the first
    part: str = ""


@dataclass(frozen=True)
class Part:
    """One comparison of a study, such as one depth. Arms as the command line has them."""

    arms: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @cached_property
    def read_arms(self) -> tuple[Arm, ...]:
        return tuple(map(Arm.read, self.arms))

    @cached_property
    def config(self) -> TrainConfig:
        return TrainConfig.of(self.settings, "the plan")


@dataclass(frozen=True)
class Plan(StudySettings):
    parts: tuple[Part, ...]
    seeds: tuple[int, ...] = ()
    """Default: one more than the least with which a difference can be confirmed."""
    looks: tuple[int, ...] = ()
    """Numbers of seeds after which one will look at the results; each at the error rate divided by them."""
    temperatures: tuple[float, ...] = TEMPERATURES
    sampling: dict[str, Any] = field(default_factory=dict)
    """Settings of the samplers that have them, such as steps."""
    threads: int = 1
    """Threads of each run, fixed because sums of floats depend on it."""
    claims: tuple[Claim, ...] = ()
    notes: tuple[str, ...] = ()
    """What else was not controlled."""

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("parts", tuple(_with_a_budget(part) for part in self.parts))
        least = {"trials": 1, "trial_tokens": 1, "test_tokens": 2, "threads": 1, "within": 0, "margin": 0}
        for name, fewest in least.items():
            if getattr(self, name) is not None and not getattr(self, name) >= fewest:
                raise UsageError(f"{name}={getattr(self, name)} must be {fewest} or more")
        task = TASKS.parse(self.parts[0].config.task)
        put("primary", self.primary or task.primary)
        if self.judge and not task.judged:
            raise UsageError(f"the task {task.name} has no texts to judge", "Leave --judge out.")
        if not self.judge and (self.sampling or self.temperatures != TEMPERATURES):
            raise UsageError("no texts are written, and there is nothing to sample", "Give --judge.")
        usual = task.reported or tuple(m.name for m in task.metrics if m.better != "neither")
        usual += task.judged if self.judge else ()
        put("metrics", tuple(dict.fromkeys((self.primary, *(self.metrics or usual)))))
        for part in self.parts:
            self._check(part)
        slugs = [slug(part.name) for part in self.parts]
        if len(self.parts) > 1 and (len(set(slugs)) < len(slugs) or set(slugs) & set(WRITTEN)):
            raise UsageError(f"parts {[part.name for part in self.parts]} need folders of their own")
        for claim in self.claims:
            if claim.at == "trend" and claim.against:
                raise UsageError("a trend is one of ratios to the first arm", "Leave `against` out.")
            if claim.at != "trend" and not claim.part and len(self.parts) > 1:
                raise UsageError(f"the claim {claim.claim!r} names no part", "Say which part it is about.")
            if claim.part not in ("", *(part.name for part in self.parts)):
                raise unknown("part in a claim", claim.part, [part.name for part in self.parts])
        if self.looks and (sorted(set(self.looks)) != list(self.looks) or self.looks[0] < 1):
            raise UsageError(
                f"looks {list(self.looks)} must grow", "Write numbers of seeds: --looks 7,10,14."
            )
        put("seeds", self.seeds or tuple(range(max((*self.looks, self.least + 1)))))
        if len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"seeds {list(self.seeds)} must be one or more, each once")
        if self.tune and TUNING_SEED in self.seeds:
            raise UsageError(
                f"seed {TUNING_SEED} is the one that learning rates are tried with",
                "Choose other seeds, so that tuning and comparing stay apart.",
            )

    def _check(self, part: Part) -> None:
        task = TASKS.parse(part.config.task)
        known = {metric.name: metric for metric in task.metrics}
        for name in self.metrics:
            if name not in known:
                raise unknown("metric", name, known)
        if known[self.primary].better == "neither":
            raise UsageError(
                f"{self.primary} is neither better high nor low, so no verdict can be about it",
                f"Choose another --primary, such as {task.primary}.",
            )
        _check_arms(part.read_arms)
        for name in {*self.metrics} & {*task.judged} if not self.judge else ():
            raise UsageError(f"{name} is what a judge says of texts", "Give --judge.")
        for arm in part.read_arms:
            objective = OBJECTIVES.parse(self.config(part, arm, 0).objective)
            if self.primary in task.not_measured(objective):
                raise UsageError(
                    f"the objective {objective.name} of {arm.name} gives no {self.primary} to judge it by",
                    f"Choose another --primary, such as {task.primary}.",
                )
        for name in self.sampling:
            if name not in sampler_settings():
                raise unknown("setting of a sampler", name, sampler_settings())
        for config in (self.config(part, arm, 0) for arm in part.read_arms):
            if (wanted := self.texts(config)) is not None:
                wanted.check()
                OBJECTIVES.parse(config.objective).check_sampling(wanted.sampling)
        names = [arm.name for arm in part.read_arms][1:]
        for claim in self.claims:
            for name in (claim.arm, claim.against or "*"):
                if claim.part in (part.name, "") and name not in ("*", *names):
                    raise unknown("arm in a claim", name, names)
            if claim.metric not in (*self.metrics, TO_MATCH):
                raise unknown("metric in a claim", claim.metric, self.metrics)

    @property
    def task(self) -> Any:
        return TASKS.parse(self.parts[0].config.task)

    @cached_property
    def family(self) -> list[Key]:
        """Every contrast that is judged: the primary metric of each arm, and what claims are about."""
        own = [Key(p.name, a.name, self.primary) for p in self.parts for a in p.read_arms[1:]]
        claimed = [
            key for claim in self.claims if claim.expect != "no worse" for key in self.keys_of(claim)
        ]
        return list(dict.fromkeys((*own, *claimed)))

    def keys_of(self, claim: Claim) -> list[Key]:
        part = next((part for part in self.parts if part.name == claim.part), self.parts[-1])
        names = [arm.name for arm in part.read_arms[1:]] if claim.arm == "*" else [claim.arm]
        return [Key(claim.part, name, claim.metric, claim.at, claim.against) for name in names]

    @property
    def least(self) -> int:
        """The least number of pairs with which a contrast can survive the correction."""
        return least_seeds(len(self.family), max(1, len(self.looks)))

    def config(self, part: Part, arm: Arm, seed: int, **changes: Any) -> TrainConfig:
        """The settings of one run."""
        return replace(part.config, **{**arm.changes, "seed": seed, **changes})

    def texts(self, config: TrainConfig) -> Wanted | None:
        """What a run writes for the judge."""
        if not self.judge:
            return None
        sampling = usual(OBJECTIVES.parse(config.objective), config.context)
        own = {name: value for name, value in self.sampling.items() if hasattr(sampling, name)}
        for name, value in own.items():
            check_type(f"sampling: {name}", value, typing.get_type_hints(type(sampling))[name])
        return Wanted(self.samples, self.judge, replace(sampling, **own), self.temperatures)

    def learning_rates(self, part: Part, arm: Arm) -> list[float]:
        """The trials: lr · 2^k, k about 0; the given rate is one of them."""
        lr, first = self.config(part, arm, 0).lr, -((self.trials - 1) // 2)
        return [float(f"{lr * 2.0**k:.4g}") for k in range(first, first + self.trials)]

    def at_rate(self, part: Part, arm: Arm, lr: float) -> Arm:
        """The arm with a learning rate, and under muon with that of the matrices in proportion."""
        config = self.config(part, arm, 0)
        muon_lr = float(f"{config.muon_lr * lr / config.lr:.4g}")
        return arm.with_(lr=lr, **({"muon_lr": muon_lr} if config.optimizer == "muon" else {}))

    def as_dict(self) -> dict[str, Any]:
        whole = _plain(asdict(self))
        return {"parts": whole.pop("parts"), **whole}  # first, as the rest follows from them


def _with_a_budget(part: Part) -> Part:
    """The part with every setting spelled out, and a budget that is the same for all arms."""
    config = part.config
    if config.minutes is not None:
        raise UsageError(
            "a budget in minutes is not equal terms: a faster mixer would see more",
            "Give --tokens, --epochs or --steps.",
        )
    if all(getattr(config, name) is None for name in BUDGET):
        task = TASKS.parse(config.task)
        usual = {"tokens": task.budget} if task.epochs is None else {"epochs": task.epochs}
        config = replace(config, **usual)
    return replace(part, settings={k: v for k, v in asdict(config).items() if k not in ("mixer", "seed")})


def _check_arms(arms: tuple[Arm, ...]) -> None:
    from langevin.mixers import parse

    if not arms:
        raise UsageError("no arm came", "Name two or more mixers: langevin compare softmax ssmax.")
    specs = [[parse(p.strip()) for p in arm.changes["mixer"].split(";")] for arm in arms]
    for name, count in Counter(arm.name for arm in arms).items():
        if count > 1:
            raise UsageError(f"{name} comes twice", f"Give one of them a name: again={name}.")
        if slug(name) in WRITTEN:
            raise UsageError(f"an arm cannot be called {name}: the study writes a file of that name")
    for folder, count in Counter(arm.slug for arm in arms).items():
        if count > 1:
            one, two = [arm.name for arm in arms if arm.slug == folder][:2]
            raise UsageError(
                f"{one!r} and {two!r} would share the folder {folder}",
                f"Give one of them a name: other={two}.",
            )
    seen: dict[str, str] = {}
    for arm, mixers in zip(arms, specs, strict=True):
        means = str([[mixer.in_full() for mixer in mixers], {**arm.changes, "mixer": ""}])
        if means in seen and arm.name == arm.text:
            raise UsageError(
                f"{arm.name} is the same as {seen[means]}", f"Give it a name: again={arm.text}."
            )
        seen.setdefault(means, arm.name)


def settle(plan: Plan, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Write the plan and facts about it (data, sizes, commands) into the folder, or see that it is the one
    that is there; seeds may have been added to it. The facts as they stand there."""
    before = begun(folder)
    now = {"plan": plan.as_dict(), **facts}
    if before is not None:
        there = made(Plan, before["plan"], str(folder / FILE)).as_dict()
        first = list(plan.seeds[: len(there["seeds"])])
        if set(there["seeds"]) < set(plan.seeds) and (first == there["seeds"] or not plan.looks):
            there = {**there, "seeds": list(plan.seeds)}
        found = difference(_comparable(there), _comparable(now["plan"]))
        if found is None:
            found = difference(before.get("data"), facts["data"], "data")
        if found is not None:
            where, old, new = found
            raise UsageError(
                f"{folder} was planned with {where}={old!r}, not {new!r}",
                "Give the same command to go on with it, more seeds to add them, or another --out.",
            )
        grown = there["seeds"] != before["plan"]["seeds"]
        names = ("plan", "commands", "sizes") if grown else ("sizes",)
        now = {**before, **{name: now[name] for name in names if name in now}}
        if now == before:
            return before
    keep(folder, now)
    return now


def keep(folder: Path, facts: dict[str, Any]) -> None:
    write_text(folder / FILE, yaml.safe_dump(_plain(facts), sort_keys=False, allow_unicode=True))


def _comparable(plan: dict[str, Any]) -> dict[str, Any]:
    """Without what changes no number; where the data are is told by their hashes."""
    parts = [
        {**part, "settings": {k: v for k, v in part["settings"].items() if k not in (*INCIDENTAL, "data")}}
        for part in plan["parts"]
    ]
    return {**plan, "parts": parts}


def begun(folder: Path) -> dict[str, Any] | None:
    """What stands in the compare.yaml of a folder; None where a study may begin."""
    path = folder / FILE
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", "Choose another --out.")
    if not path.exists():
        others = [p.name for p in folder.iterdir() if not p.name.startswith(".")] if folder.exists() else []
        if others:
            raise UsageError(f"{folder} holds something else ({others[0]})", "Choose another --out.")
        return None
    values = read_yaml(path)
    problem = misfit(values, {"plan": dict, "data": dict, "commands": [str]})
    problem = problem or misfit(values.get("looks", []), [{"seeds": [int], "missing": [list]}], "looks")
    problem = problem or misfit(values.get("sizes", {}), {str: {str: {str: float}}}, "sizes")
    missing = [] if problem else [run for look in values.get("looks", []) for run in look["missing"]]
    if any(len(run) != 3 for run in missing):
        problem = "looks: a missing run is a part, an arm and a seed"
    if problem is not None:
        raise UsageError(f"{path} is not a plan that can be read: {problem}", "Choose another --out.")
    made(Plan, values["plan"], str(path))
    return values


def read_plan(path: Path) -> tuple[Plan, dict[str, Any]]:
    """The plan in a compare.yaml or in its folder, and the facts that stand beside it."""
    folder = path if path.is_dir() else path.parent
    facts = begun(folder) if (folder / FILE).is_file() else None
    if facts is None:
        raise UsageError(
            f"{path} is no plan", f"Give what langevin compare made: its folder, or its {FILE}."
        )
    return made(Plan, facts["plan"], str(path)), facts


def looked(facts: dict[str, Any]) -> tuple[Look, ...]:
    return tuple(
        Look(tuple(look["seeds"]), tuple((p, a, s) for p, a, s in look["missing"]))
        for look in facts.get("looks", [])
    )


def difference(before: Any, now: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two plans differ, and what stands there in each."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(str(key), before.get(key), now.get(key)) for key in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(before, now, strict=True))]
    else:
        return None if before == now else (where, before, now)
    found = (difference(a, b, f"{where}.{key}" if where else key) for key, a, b in pairs)
    return next((f for f in found if f is not None), None)


def made(kind: Any, values: Any, where: str) -> Any:
    """The dataclass of these values: none unknown, none missing, each of its type; lists become tuples."""
    if not isinstance(values, dict):
        raise UsageError(f"{where} is not a table of keys and values")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise unknown(f"key in {where}", str(key), hints)
    for f in fields(kind):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise UsageError(f"{where} has no {f.name}")
    return kind(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    nested = next((kind for kind in (hint, *inner) if is_dataclass(kind)), None)
    if origin in (tuple, dict):
        if not isinstance(value, list if origin is tuple else dict):
            raise UsageError(f"{where} must be a {'list' if origin is tuple else 'table'}, not {value!r}")
        if isinstance(value, list):
            return tuple(_value(inner[0], item, where) for item in value)
        return {str(name): _value(inner[1], item, f"{where} {name}") for name, item in value.items()}
    if nested is not None and value is not None:
        return made(nested, value, where)
    if hint is not Any and nested is None:
        check_type(where, value, hint)
    return value


def slug(name: str) -> str:
    """The folder of what has this name."""
    plain = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "arm"
    if len(plain) <= LONGEST_NAME:
        return plain
    return f"{plain[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def seeds_in_words(seeds: tuple[int, ...]) -> str:
    """0-5 or 0,3,5: what the command line takes."""
    first, last = seeds[0], seeds[-1]
    if len(seeds) > 1 and seeds == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, seeds))


def settings_in(parts: Iterable[str], what: str, known: Collection[str]) -> dict[str, Any]:
    """Of setting=value, each, by the names that are known."""
    found = {}
    for part in parts:
        key, equals, value = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if not equals or key not in known:
            raise unknown(what, key, known)
        found[key] = _scalar(value)
    return found


def sampler_settings() -> list[str]:
    """What any objective's sampler can be told, but for its temperature, which is swept."""
    own = [f for kind in OBJECTIVES.values() for f in fields(kind.sampling())]  # type: ignore[attr-defined]
    return sorted({f.name for f in own if not isinstance(f.default, tuple) and f.name != "temperature"})


def split_at_commas(text: str) -> list[str]:
    """At the commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        depth += (character in "([") - (character in ")]") if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _scalar(text: str) -> Any:
    """A number, a truth value, null or a word, as in YAML."""
    try:
        value = parse_yaml(text, "an arm")
    except UsageError:
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text


def _written(value: Any) -> str:
    """What `_scalar` reads."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    """As YAML and JSON have it: lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
