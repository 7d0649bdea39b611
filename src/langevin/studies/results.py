"""What a study found: typed runs, arms and contrasts. results.json holds these as they stand.

The only currency are rows (`langevin.evaluation.rows`): nothing here knows tokens, logits or folders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from langevin.evaluation.rows import Kind, Metric, Row
from langevin.studies.inference import ERROR_RATE, Estimate, Scale, estimate, holm, least_seeds, sign_flip

Status = Literal["done", "diverged", "failed", "missing"]
Place = Literal["best", "matched", "trend"]
State = Literal[
    "better",  # confirmed, of the primary metric
    "worse",
    "lower",  # confirmed, of what has no winner: a diagnostic, or upper bounds of both arms' losses
    "higher",
    "as good",  # the 90 % interval lies inside the margin of the plan
    "does not survive",  # the 95 % interval leaves out 0, the corrected test does not
    "not confirmed",
    "not proven",  # an upper bound above an exact loss says nothing about the model
    "too few",  # pairs: nothing could be confirmed
    "not judged",  # another metric, an unfinished study, or a primary chosen afterwards
]
CONFIRMED = ("better", "worse", "lower", "higher")

TO_MATCH = "to_match"
COSTS = {
    metric.name: metric
    for metric in (
        Metric("parameters", "parameters", "", "lower"),
        Metric("flops_per_token", "training FLOPs a token", "FLOPs", "lower"),
        Metric("state_bytes", "decoding state after a context", "B", "lower"),
        Metric("peak_memory_bytes", "peak training memory", "B", "lower"),
        Metric("tokens_per_second", "training speed", "tokens/s", "higher"),
        Metric("time_ratio", "training time", "× reference", "lower"),
        Metric("decode_ms_per_token", "decoding time", "ms/token", "lower"),
        Metric("decode_ratio", "decoding time", "× reference", "lower"),
    )
}


@dataclass(frozen=True)
class Point:
    """Of a learning curve: the validation loss after so much of the budget."""

    step: int
    amount: int
    loss: float


@dataclass(frozen=True)
class RunResult:
    seed: int
    status: Status = "missing"
    error: str | None = None
    rows: tuple[Row, ...] = ()  # on test; those at {"step": n} of models on the way
    curve: tuple[Point, ...] = ()
    examples: tuple[float, ...] = ()  # the primary metric of each test example, where a task tells
    details: dict[str, Any] = field(default_factory=dict)  # sample, reliability, learned scalars
    environment: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(record: Mapping[str, Any]) -> RunResult:
        """From the JSON of a finished run."""
        rows = tuple(Row(**row) for row in record["rows"])
        curve = tuple(Point(**point) for point in record["curve"])
        kept = {key: value for key, value in record.items() if key != "said"}
        return RunResult(**{**kept, "rows": rows, "curve": curve, "examples": tuple(record["examples"])})

    @property
    def ended(self) -> bool:
        return self.status in ("done", "diverged")

    @property
    def best(self) -> Point | None:
        """The evaluation that chose the model: the first with the smallest loss."""
        return min(self.curve, key=lambda point: point.loss, default=None)

    def row(self, metric: str, at: Mapping[str, Any] | None = None) -> Row | None:
        return next((row for row in self.rows if row.metric == metric and row.at == (at or {})), None)

    def diverged(self, metric: str) -> bool:
        """In training, or in what was measured."""
        row = self.row(metric)
        return self.status == "diverged" or (row is not None and not math.isfinite(row.value))

    def amount_to(self, loss: float) -> float | None:
        """How much of the budget until the validation loss first was this, linear between evaluations."""
        return self._on_the_way(loss, lambda point: point.amount)

    def value_at(self, metric: str, loss: float) -> float | None:
        """A metric where the validation loss was this, linear between the models around it."""

        def of(point: Point) -> float | None:
            row = self.row(metric, {"step": point.step})
            return None if row is None else row.value

        return self._on_the_way(loss, of)

    def _on_the_way(self, loss: float, of: Callable[[Point], float | None]) -> float | None:
        before = None
        for point in self.curve:
            if point.loss <= loss:
                here = of(point)
                if before is None or here is None or point.loss == loss:
                    return here
                there = of(before)
                share = (before.loss - loss) / (before.loss - point.loss)
                return None if there is None else there + share * (here - there)
            before = point
        return None


@dataclass(frozen=True)
class Trial:
    """Of a learning rate, on validation; a loss of None: it diverged."""

    lr: float
    loss: float | None


@dataclass(frozen=True)
class ArmResult:
    name: str
    settings: dict[str, Any]  # in which it differs: at least its mixer
    runs: tuple[RunResult, ...]
    costs: tuple[Row, ...] = ()
    tuning: tuple[Trial, ...] = ()

    def by_seed(self, metric: Metric) -> dict[int, float]:
        """Of the runs that ended; one that diverged is worse than any that did not."""
        found: dict[int, float] = {}
        for run in self.runs:
            row = run.row(metric.name)
            own = None if row is None else metric.graded(row.value)
            value = metric.worst if run.diverged(metric.name) else own
            if run.ended and value is not None:
                found[run.seed] = value
        return found

    def estimate(self, metric: Metric) -> Estimate | None:
        return estimated(metric, list(self.by_seed(metric).values()))

    def kind(self, metric: str) -> Kind | None:
        rows = (run.row(metric) for run in self.runs)
        return next((row.kind for row in rows if row is not None), None)

    def cost(self, name: str) -> Row | None:
        return next((row for row in self.costs if row.metric == name), None)

    @property
    def done(self) -> list[RunResult]:
        return [run for run in self.runs if run.status == "done"]


@dataclass(frozen=True)
class PartResult:
    """One of the comparisons that a study is made of, such as one depth; often there is only one."""

    name: str
    arms: tuple[ArmResult, ...]
    settings: dict[str, Any] = field(default_factory=dict)  # what all its arms share
    untouched: RunResult | None = None  # the pretrained model that all arms began from

    @property
    def reference(self) -> ArmResult:
        return self.arms[0]

    def arm(self, name: str) -> ArmResult:
        return next(arm for arm in self.arms if arm.name == name)


@dataclass(frozen=True)
class Key:
    """What a contrast is about. At a trend: the last part against the first."""

    part: str
    arm: str
    metric: str
    place: Place = "best"
    against: str = ""  # an arm; default: the first of the part


@dataclass(frozen=True)
class Contrast:
    """An arm against the reference: the mean paired difference with its 95 % t interval.

    The differences of amounts to a matched loss, and of trends, are relative ones (0.1: 10 % more).
    p_adjusted is Holm's over all judged contrasts of the study, times the number of declared looks; only
    judged contrasts have one, and it stays that of the look that gave the verdict when seeds are added.
    """

    key: Key
    against: str
    pairs: int
    difference: float | None
    low: float | None
    high: float | None
    low90: float | None
    high90: float | None
    reference: float | None  # its mean over these pairs
    p: float | None = None
    p_adjusted: float | None = None
    state: State = "not judged"
    judged: int = 0  # pairs that p and state rest on
    lower: bool | None = None  # the direction of those

    @property
    def relative(self) -> float | None:
        """The difference as a share of the reference's mean."""
        if self.key.place == "trend" or self.key.metric == TO_MATCH:
            return self.difference
        known = self.difference is not None and self.reference and self.key.place == "best"
        return self.difference / abs(self.reference) if known else None  # type: ignore[operator,arg-type]


@dataclass(frozen=True)
class Look:
    """The runs that a verdict rests on: these seeds, without what was missing then."""

    seeds: tuple[int, ...]
    missing: tuple[tuple[str, str, int], ...] = ()  # part, arm, seed


@dataclass(frozen=True)
class Answer:
    """Of a published claim: was its direction seen, and what is our size beside the published one? It is
    not judged where too little was measured to see either direction."""

    part: str
    claim: str
    published: str
    direction: Literal["seen", "opposite", "not seen", "not judged"]
    ours: str


@dataclass(frozen=True)
class Verdict:
    """What the page says first: an answer of at most 30 words, how sure it is, and at most three more
    sentences."""

    answer: str
    sure: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    title: str
    metrics: tuple[Metric, ...]  # the primary one first
    unit: str  # of the budget
    seeds: tuple[int, ...]
    parts: tuple[PartResult, ...]
    contrasts: tuple[Contrast, ...] = ()
    verdict: Verdict = Verdict("", "")
    answers: tuple[Answer, ...] = ()
    exploratory: str = ""  # why nothing may be confirmed, where that is so
    margin: float | None = None
    within: float | None = None  # of the untouched model's loss: how near is near enough
    looks: tuple[Look, ...] = ()  # that the verdict rests on
    not_controlled: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()  # what could not be measured besides runs, and why
    commands: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def primary(self) -> Metric:
        return self.metrics[0]

    @property
    def placed_runs(self) -> list[tuple[PartResult, ArmResult, RunResult]]:
        return [(part, arm, run) for part in self.parts for arm in part.arms for run in arm.runs]

    @property
    def runs(self) -> list[RunResult]:
        return [run for _, _, run in self.placed_runs]

    @property
    def finished(self) -> bool:
        """Whether every planned run has ended, one way or another."""
        return all(run.status != "missing" for run in self.runs)

    @property
    def judged(self) -> list[Contrast]:
        return [contrast for contrast in self.contrasts if contrast.p_adjusted is not None]

    def arms(self, key: Key) -> tuple[ArmResult, ArmResult]:
        """The arm that a contrast is about, and what it is set against; of a trend, in the last part."""
        own = (part for part in self.parts if part.name == key.part)
        part = self.parts[-1] if key.place == "trend" else next(own)
        return part.arm(key.arm), part.arm(key.against) if key.against else part.reference

    def metric(self, name: str) -> Metric:
        known = {metric.name: metric for metric in (*self.metrics, to_match(self.unit))}
        return known.get(name) or Metric(name, name.replace("_", " "), "", "neither")

    def bounded(self, key: Key) -> bool:
        """Whether both arms have an upper bound of this metric, and neither its value."""
        return all(arm.kind(key.metric) == "bound" for arm in self.arms(key))

    def contrast(self, key: Key) -> Contrast | None:
        return next((contrast for contrast in self.contrasts if contrast.key == key), None)


def estimated(metric: Metric, values: Sequence[float]) -> Estimate | None:
    """The mean over seeds, with an interval that stays where values of the metric can be."""
    positive = metric.low_is_good and not metric.signed and all(value > 0 for value in values)
    scale: Scale = "log odds" if metric.unit == "fraction" else "log" if positive else "plain"
    return estimate(values, scale=scale)


def to_match(unit: str) -> Metric:
    return Metric(TO_MATCH, f"training {unit} to the same validation loss", unit, "lower")


def differences(results: Results, key: Key) -> dict[int, float]:
    """Arm minus reference by seed, where both runs ended: 0 where both diverged, infinite where one did."""
    metric = results.metric(key.metric)
    if key.place == "trend":
        first, last = (_log_ratios(part, key.arm, metric) for part in (results.parts[0], results.parts[-1]))
        return {seed: _minus(last[seed], first[seed]) for seed in last.keys() & first.keys()}
    ours, base = results.arms(key)
    kinds = {arm.kind(results.primary.name) for arm in (ours, base)} - {None}
    if key.place == "matched" and len(kinds) > 1:
        return {}  # the losses are not of one kind
    if key.place == "matched":
        pairs = {
            run.seed: (run, other) for run in ours.runs for other in base.runs if run.seed == other.seed
        }
        found = {seed: _at_matched_loss(metric, *pair) for seed, pair in pairs.items()}
        return {seed: value for seed, value in found.items() if value is not None}
    a, b = ours.by_seed(metric), base.by_seed(metric)
    return {seed: _minus(a[seed], b[seed]) for seed in a.keys() & b.keys()}


def _minus(a: float, b: float) -> float:
    """0 where both are infinite alike."""
    return 0.0 if a == b else a - b


def _at_matched_loss(metric: Metric, ours: RunResult, base: RunResult) -> float | None:
    """At the larger of the two runs' best losses, which both reached; amounts as the log of a ratio."""
    if not (ours.ended and base.ended):
        return None
    lost = [run.status == "diverged" for run in (ours, base)]
    if any(lost):
        worst, other = metric.worst, base if lost[0] else ours
        known = other.best is not None and other.value_at(metric.name, other.best.loss) is not None
        if worst is None or not (known or metric.name == TO_MATCH):
            return None
        return 0.0 if all(lost) else worst if lost[0] else -worst
    if ours.best is None or base.best is None:
        return None
    loss = max(ours.best.loss, base.best.loss)
    if metric.name == TO_MATCH:
        a, b = ours.amount_to(loss), base.amount_to(loss)
        return math.log(a / b) if a and b else None
    a, b = ours.value_at(metric.name, loss), base.value_at(metric.name, loss)
    return None if a is None or b is None else metric.graded(a) - metric.graded(b)


def _log_ratios(part: PartResult, arm: str, metric: Metric) -> dict[int, float]:
    a, b = (
        {
            seed: value if math.isinf(value) else math.log(value)
            for seed, value in one.by_seed(metric).items()
            if value > 0 or math.isinf(value)
        }
        for one in (part.arm(arm), part.reference)
    )
    return {seed: _minus(a[seed], b[seed]) for seed in a.keys() & b.keys()}


def contrasts(results: Results, judged: Iterable[Key], looks: int = 1) -> tuple[Contrast, ...]:
    """All contrasts of a study: each arm against the first of its part in every metric that has a better
    side, at the best model and, where it is known, at a matched loss; and what else is judged.

    judged: one family of hypotheses, fixed by the plan. looks: how many the plan declared; those that were
    reached stand in `results.looks`.
    """
    family = list(judged)
    described = [
        Key(part.name, arm.name, metric.name, place)
        for part in results.parts
        for metric in (*results.metrics, to_match(results.unit))
        for place in ("best", "matched")
        for arm in part.arms[1:]
        if metric.better != "neither"
    ]
    keys = dict.fromkeys((*family, *described))
    values = {key: differences(results, key) for key in keys}
    judgements = _judgements(results, family, values, looks)
    return tuple(
        _contrast(results, key, values[key], judgements.get(key), len(family) * looks)
        for key in keys
        if values[key] or key in family
    )


@dataclass(frozen=True)
class _Judgement:
    """p alone and corrected for the family and the declared looks, and the pairs that it rests on."""

    p: float
    adjusted: float
    pairs: dict[int, float]


def _judgements(
    results: Results, family: list[Key], values: dict[Key, dict[int, float]], looks: int
) -> dict[Key, _Judgement]:
    """By the first look that confirms, else by the last."""
    found: dict[Key, _Judgement] = {}
    for look in results.looks if results.finished and not results.exploratory else ():
        seen = [_seen(look, key, results.arms(key)[1].name, values[key]) for key in family]
        alone = [sign_flip(list(pairs.values())) for pairs in seen]
        for key, p, corrected, pairs in zip(family, alone, holm(alone), seen, strict=True):
            if key not in found or found[key].adjusted > ERROR_RATE:
                found[key] = _Judgement(p, min(1.0, looks * corrected), pairs)
    return found


def _seen(look: Look, key: Key, against: str, values: dict[int, float]) -> dict[int, float]:
    missing = [m for m in look.missing if m[0] == key.part or key.place == "trend"]
    gone = {seed for _, arm, seed in missing if arm in (key.arm, against)}
    return {seed: value for seed, value in values.items() if seed in look.seeds and seed not in gone}


def _contrast(
    results: Results, key: Key, values: dict[int, float], judged: _Judgement | None, hypotheses: int
) -> Contrast:
    metric, (_, reference) = results.metric(key.metric), results.arms(key)
    numbers = _interval(results, key, values)
    base = [x for seed, x in reference.by_seed(metric).items() if seed in values and math.isfinite(x)]
    mean = sum(base) / len(base) if base else None
    if key.place == "trend" or metric.name == TO_MATCH:
        numbers = {name: None if x is None else math.expm1(x) for name, x in numbers.items()}
    contrast = Contrast(key, reference.name, len(values), **numbers, reference=mean)
    if judged is None:
        return contrast
    pairs = list(judged.pairs.values())
    infinite = [math.copysign(1, x) for x in pairs if math.isinf(x)]
    lower = sum(infinite or pairs) < 0
    state = _state(results, key, judged, lower, hypotheses)
    found = {"p": judged.p, "p_adjusted": judged.adjusted, "state": state}
    return replace(contrast, **found, judged=len(pairs), lower=lower)  # type: ignore[arg-type]


def _interval(results: Results, key: Key, values: dict[int, float]) -> dict[str, Any]:
    """The mean of differences with its 95 and 90 % t intervals; nothing where a run diverged."""
    names = ("difference", "low", "high", "low90", "high90")
    runs = (run for arm in results.arms(key) for run in arm.runs)
    lost = any(run.diverged(key.metric) for run in runs if run.seed in values)
    seen, narrow = (estimate(list(values.values()), confidence) for confidence in (0.95, 0.9))
    if lost or seen is None or narrow is None or not math.isfinite(seen.mean):
        return dict.fromkeys(names)
    found = (seen.mean, seen.low, seen.high, narrow.low, narrow.high)
    return dict(zip(names, found, strict=True))


def _state(results: Results, key: Key, judged: _Judgement, lower: bool, hypotheses: int) -> State:
    """From the pairs that were judged: those that came later change no word."""
    ours, base = results.arms(key)
    kinds: tuple[Any, Any] = ours.kind(key.metric), base.kind(key.metric)
    primary = key.metric == results.primary.name and key.place == "best"
    if judged.adjusted <= ERROR_RATE:
        if not _examples_agree(ours, base, results, key, judged.pairs, lower):
            return "not confirmed"
        proves = {("bound", "exact"): lower, ("exact", "bound"): not lower}
        if key.place == "best" and not proves.get(kinds, True):
            return "not proven"
        if not primary or "diagnostic" in kinds:
            return "lower" if lower else "higher"
        good = lower == results.primary.low_is_good
        lost = any(run.diverged(key.metric) for run in ours.runs if run.seed in judged.pairs)
        if good and lost:
            return "not confirmed"
        if results.bounded(key):  # of two bounds the lower one may be only the tighter one
            return "lower" if lower else "higher"
        return "better" if good else "worse"
    if len(judged.pairs) < least_seeds(hypotheses):
        return "too few"
    then, margin = _interval(results, key, judged.pairs), results.margin if primary else None
    low, high = then["low90"], then["high90"]
    alike = kinds[0] == kinds[1]
    if margin is not None and low is not None and high is not None and alike and max(-low, high) <= margin:
        return "as good"
    low, high = then["low"], then["high"]
    leaves_out = low is not None and high is not None and not low <= 0 <= high
    return "does not survive" if leaves_out else "not confirmed"


def _examples_agree(
    ours: ArmResult, base: ArmResult, results: Results, key: Key, judged: Container[int], lower: bool
) -> bool:
    """Where examples are a second source of variance: whether the interval over them, of the paired
    difference of each example averaged over seeds, lies on the same side of 0."""
    if key.metric != results.primary.name or key.place != "best":
        return True
    a, b = ({run.seed: run.examples for run in arm.done if run.seed in judged} for arm in (ours, base))
    if not any((*a.values(), *b.values())):
        return True
    seeds = [seed for seed in a if seed in b]
    if len({len(values) for seed in seeds for values in (a[seed], b[seed])}) != 1:
        return False
    columns = zip(*([x - y for x, y in zip(a[s], b[s], strict=True)] for s in seeds), strict=True)
    over = estimate([sum(column) / len(seeds) for column in columns])
    if over is None or over.low is None or over.high is None:
        return False
    return over.high < 0 if lower else over.low > 0
