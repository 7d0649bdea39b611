"""The plan of a comparison: which arms, on what terms, how often; kept in compare.yaml.

All arms take the same data in the same order, the same number of tokens, the same batch and schedule; a run
of one arm is paired with the runs of the others that have its seed.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from langevin.errors import UsageError
from langevin.runs.files import write_text
from langevin.settings import TrainConfig, read_yaml
from langevin.studies import metrics as known_metrics

FILE = "compare.yaml"
TUNING_SEED = 1000  # of the learning-rate trials: no run of the comparison should have it
BUDGET = 10_000_000  # tokens, where neither tokens nor steps are given, as in training
LONGEST_NAME = 80  # of a folder
OURS = (
    *(FILE, "tuned.json", "decoding.json", "report.html", "results.json", "results.csv", "summary.csv"),
    "table.tex",
)


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a mixer, and settings in which it differs from the others besides."""

    name: str
    spec: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What the command line takes."""
        return self.spec if self.name == self.spec else f"{self.name}={self.spec}"

    @property
    def slug(self) -> str:
        return slug(self.name)


@dataclass(frozen=True)
class Plan:
    arms: tuple[Arm, ...]
    settings: TrainConfig
    seeds: tuple[int, ...]
    title: str = ""
    metrics: tuple[str, ...] = ()
    primary: str | None = None
    tune: Literal["lr"] | None = None
    trials: int = 5
    equalise: bool = False
    test_tokens: int = 65_536
    threads: int = 1
    """Threads of each run, fixed because sums of floats depend on it."""

    def __post_init__(self) -> None:
        if len(self.arms) < 1:
            raise UsageError("no arm came", "Name two or more mixers: langevin compare softmax ssmax.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"seeds {list(self.seeds)} must be one or more, each once")
        if self.tune and TUNING_SEED in self.seeds:
            raise UsageError(
                f"seed {TUNING_SEED} is the one that learning rates are tried with",
                "Choose other seeds, so that tuning and comparing stay apart.",
            )
        for name, least in (("trials", 1), ("test_tokens", 2), ("threads", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)} must be {least} or more")
        if self.settings.minutes is not None:
            raise UsageError(
                "a budget in minutes is not equal terms: a faster mixer would see more tokens",
                "Give --tokens or --steps.",
            )
        if self.settings.tokens is None and self.settings.steps is None:
            object.__setattr__(self, "settings", replace(self.settings, tokens=BUDGET))
        metrics, primary = known_metrics.chosen(self.settings.task, self.metrics, self.primary)
        object.__setattr__(self, "metrics", metrics)
        object.__setattr__(self, "primary", primary)
        _check_arms(self.arms)
        for arm in self.arms:
            self.config(arm, self.seeds[0])

    def config(self, arm: Arm, seed: int, **changes: Any) -> TrainConfig:
        """The settings of one run."""
        return replace(self.settings, mixer=arm.spec, seed=seed, **{**arm.changes, **changes})

    def learning_rates(self) -> list[float]:
        """The trials: lr · 2^k, k about 0; the given rate is one of them."""
        first = -((self.trials - 1) // 2)
        return [float(f"{self.settings.lr * 2.0**k:.4g}") for k in range(first, first + self.trials)]

    def shared_settings(self) -> dict[str, Any]:
        """What all arms have in common, for results.json."""
        shared = {k: v for k, v in plain(self.settings).items() if k not in ("mixer", "seed")}
        shared["test_tokens"] = self.test_tokens
        if self.tune:
            shared |= {"tune": self.tune, "trials": self.trials}
        if self.equalise:
            shared["equalise"] = True
        return shared

    def as_dict(self) -> dict[str, Any]:
        arms = [asdict(arm) for arm in self.arms]
        return {**plain(self), "arms": arms, "settings": plain(self.settings)}

    def command(self) -> str:
        """A command that makes this comparison."""
        words = ["langevin", "compare"]
        words += [arm.text for arm in self.arms]
        usual, first = known_metrics.chosen(self.settings.task, (), None)
        defaults = asdict(TrainConfig())
        for name, value in asdict(self.settings).items():
            if name == "data" or (value != defaults[name] and name not in ("mixer", "seed")):
                words += _flag(name, value)
        words += ["--seeds", seeds_in_words(self.seeds)]
        for f in fields(self):
            value = getattr(self, f.name)
            default = {"metrics": usual, "primary": first}.get(f.name, f.default)
            if f.name not in ("arms", "settings", "seeds", "title") and value != default:
                words += _flag(f.name, value)
        return shlex.join(words)


def slug(name: str) -> str:
    """The folder of what has this name."""
    plain = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "arm"
    if len(plain) <= LONGEST_NAME:
        return plain
    return f"{plain[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def read_arms(texts: tuple[str, ...]) -> tuple[Arm, ...]:
    """Arms from the command line: a spec, or name=spec."""
    arms = []
    for text in texts:
        before, equals, after = text.partition("=")
        named = bool(equals) and "(" not in before
        name, spec = (before.strip(), after.strip()) if named else (text.strip(), text.strip())
        if not name or not spec:
            raise UsageError(f"{text!r} is not an arm", "Write a mixer spec, or name=spec.")
        arms.append(Arm(name, spec))
    return tuple(arms)


def _check_arms(arms: tuple[Arm, ...]) -> None:
    from langevin.mixers import parse

    for arm in arms:
        for part in arm.spec.split(";"):
            parse(part.strip())
    for name, count in Counter(arm.name for arm in arms).items():
        if count > 1:
            raise UsageError(f"{name} comes twice", f"Give one of them a name: again={name}.")
        if name in OURS:
            raise UsageError(f"an arm cannot be called {name}", "A file of the report has that name.")
    for slug, count in Counter(arm.slug for arm in arms).items():
        if count > 1:
            one, two = [arm.name for arm in arms if arm.slug == slug][:2]
            raise UsageError(
                f"{one!r} and {two!r} would share the folder {slug}",
                f"Give one of them a name: other={two}.",
            )
    seen: dict[Any, str] = {}
    for arm in arms:
        means = (tuple(parse(p.strip()).in_full() for p in arm.spec.split(";")), str(arm.changes))
        if means in seen and arm.name == arm.spec:
            raise UsageError(
                f"{arm.name} is the same as {seen[means]}", f"Give it a name: again={arm.spec}."
            )
        seen.setdefault(means, arm.name)


def settle(plan: Plan, folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Write the plan and facts about it into the folder, or see that it is the plan that is there; seeds
    may have been added to it.

    Returns the facts that were written with the plan.
    """
    now = {**plan.as_dict(), "data": about["data"]}
    before = begun(folder)
    if before is not None:
        there = {key: before.get(key) for key in now}
        added = _added(there["seeds"], now["seeds"])
        found = difference(there | {"seeds": now["seeds"]} if added else there, now)
        if found is not None:
            where, old, new = found
            raise UsageError(
                f"{folder} was planned with {where}={old!r}, not {new!r}",
                "Give the same command to go on with it, more seeds to add them, or another --out.",
            )
        if not added:
            return {key: before.get(key) for key in about}
        seen = (folder / "results.json").exists()
        about = {**about, "added": [*(before.get("added") or []), *(added if seen else [])]}
    write_text(folder / FILE, yaml.safe_dump({**now, **about}, sort_keys=False, allow_unicode=True))
    return about


def begun(folder: Path) -> dict[str, Any] | None:
    """What stands in the compare.yaml of a folder; None where a comparison may begin."""
    path = folder / FILE
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", "Choose another --out.")
    if not path.exists():
        others = [p.name for p in folder.iterdir() if not p.name.startswith(".")] if folder.exists() else []
        if others:
            raise UsageError(f"{folder} holds something else ({others[0]})", "Choose another --out.")
        return None
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a plan", "Choose another --out.")
    return values


def _added(before: Any, now: list[int]) -> list[int]:
    """The seeds that are new, where none is missing."""
    if not isinstance(before, list) or not set(before) <= set(now):
        return []
    return [seed for seed in now if seed not in before]


def read_plan(path: Path) -> tuple[Plan, dict[str, Any]]:
    """The plan in a compare.yaml, and the facts written with it."""
    try:
        values = read_yaml(path)
        names = {f.name for f in fields(Plan)}
        plan = {key: values[key] for key in names}
        for key in ("data", "commands", "workers"):
            _ = values[key]
        plan["arms"] = tuple(Arm(**arm) for arm in values["arms"])
        plan["settings"] = TrainConfig(**values["settings"])
        plan = {key: tuple(v) if isinstance(v, list) else v for key, v in plan.items()}
        return Plan(**plan), {key: v for key, v in values.items() if key not in names}
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a plan that can be read ({type(error).__name__})",
            f"Give what langevin compare made: its folder, or the {FILE} in it.",
        ) from error


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


def seeds_in_words(seeds: tuple[int, ...]) -> str:
    """0-5 or 0,3,5: what the command line takes."""
    first, last = seeds[0], seeds[-1]
    if len(seeds) > 1 and seeds == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, seeds))


def plain(settings: Any) -> dict[str, Any]:
    """A dataclass as YAML and JSON have it: with lists for tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(settings).items()}


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else [flag.replace("--", "--no-", 1)]
    return [flag, *map(str, value)] if isinstance(value, tuple | list) else [flag, str(value)]
