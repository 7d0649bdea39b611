"""Make a study: plan, tune, train every arm on every seed, measure, conclude, and write the page.

    results = compare(plan, Path("runs/cmp"))

It may be stopped or killed at any point: the same call on the same folder goes on, and ends with the same
results but for times. It needs the records of finished runs (done.json) and not their weights, so it can go
on elsewhere. The same call with more seeds adds them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from langevin.environment import pick_device
from langevin.errors import UsageError, WorkError, one_line
from langevin.evaluation.judge import Judge
from langevin.evaluation.quality import held_out
from langevin.evaluation.rows import Row
from langevin.models import pretrained
from langevin.runs.files import read_json, sha256
from langevin.runs.folder import Lock
from langevin.runs.load import weight_files
from langevin.studies import terms, words, work
from langevin.studies.display import Display
from langevin.studies.jobs import Crew, Job, crew
from langevin.studies.plan import TUNING_SEED, Arm, Part, Plan, begun, keep, looked, read_plan, settle, slug
from langevin.studies.report import write_report
from langevin.studies.results import ArmResult, Look, PartResult, Results, RunResult, Trial, contrasts
from langevin.tasks import TASKS
from langevin.training.signals import heeding_signals

ROW = {"metric": str, "value": float, "kind": str, "at": dict}
POINT = {"step": int, "amount": int, "loss": float}
RECORD = {"seed": int, "status": ("done", "diverged"), "rows": [ROW], "curve": [POINT], "examples": [float]}
REMEDY = "Delete it, and start again."
Made = TypeVar("Made")
SHARE_OF_TIME = 0.05  # that may go into pages while runs go on


def compare(
    plan: Plan,
    folder: Path,
    *,
    workers: int | None = None,
    on: Literal["local", "ray"] = "local",
    quiet: bool = False,
    command: str = "",
) -> Results:
    """Make or go on with the study in a folder; its results, whose page is written there.

    workers: processes; None for one a core on a CPU, or as many as share a GPU; 0 for this process itself.
    """
    before = begun(folder)
    device = pick_device(plan.parts[0].config.device)
    data = [TASKS.parse(p.config.task).prepare(_any_run(plan, p), progress=not quiet) for p in plan.parts]
    judge = _judge(plan, data) if plan.judge else {}
    plan = terms.in_units(plan, data)
    sizes = terms.all_sizes(plan, data)
    plan = terms.spelled_out(plan, sizes, data, device, before)
    if plan.equalise:
        plan = terms.equalised(plan, data)
        sizes = terms.all_sizes(plan, data)
    if plan.equal_flops:
        plan = terms.equal_in_flops(plan, sizes)
    display = Display(quiet)
    workers = (
        1 if on == "ray" and device != "cpu" else terms.workers_for(plan, sizes, data, device, workers)
    )
    about = _all_data(
        [(own.manifest, part.config.data) for own, part in zip(data, plan.parts, strict=True)]
    )
    about |= {"weights": [_weights(part.config.init) for part in plan.parts]}
    about |= judge
    facts: dict[str, Any] = {"data": about, "commands": [command] if command else []}
    facts["sizes"] = {
        part.name: {
            arm.name: {row.metric: row.value for row in sizes[part.name, arm.name]}
            for arm in part.read_arms
        }
        for part in plan.parts
    }
    with Lock(folder):
        facts = settle(plan, folder, facts)
        if workers > 1 and device != "cpu":
            display.say(f"up to {workers} runs at a time share the GPU")
        for part in collect(plan, folder, facts).parts:
            for sentence in words.unequal(part, "parameters"):
                hint = "" if part.settings["init"] else " --equalise makes them equal."
                display.say(sentence + hint, style="yellow")
        study = _Study(plan, folder, facts, display)
        with heeding_signals(_interrupt), crew(workers, plan.threads, device, on) as who:
            try:
                study.make(who)
            finally:
                display.stop()
        results = study.conclude()
        write_report(results, folder)
    return results


def _weights(init: str | None) -> str | None:
    """What the pretrained weights are, where they lie in a folder."""
    place = Path(pretrained.located(init)) if init is not None else None
    return sha256(*weight_files(place)) if place is not None and place.is_dir() else None


def _judge(plan: Plan, data: list[Any]) -> dict[str, str | None]:
    """What the judge's weights are. It reads the real texts that each arm's will stand beside, so that what
    evaluating a run would refuse is refused before any is trained."""
    judge = Judge.read(plan.judge, "cpu")
    for part, corpus in zip(plan.parts, data, strict=True):
        for config in (plan.config(part, arm, plan.seeds[0]) for arm in part.read_arms):
            wanted = plan.texts(config)
            assert wanted is not None  # as there is a judge
            real, _ = held_out(corpus, "test", wanted, config.context)
            judge.rows(real)
    return {"judge": judge.sha256}


def _any_run(plan: Plan, part: Part) -> Any:
    return plan.config(part, part.read_arms[0], plan.seeds[0])


class _Study:
    """The jobs of a study, and a page that is written as they end."""

    def __init__(self, plan: Plan, folder: Path, facts: dict[str, Any], display: Display):
        self.plan, self.folder, self.facts, self.display = plan, folder, facts, display
        self.written = time.monotonic()
        self.pages = 0.0  # seconds that the last page took

    def make(self, who: Crew) -> None:
        """Every job that is not done yet, in groups; each needs the one before."""
        plan, folder = self.plan, self.folder
        if plan.tune:
            trials = list(_trials(plan, folder))
            self._carry_out(who, "tuning", trials)
            failed = [job.label for job in trials if not job.done]
            if failed:
                raise WorkError(
                    f"{len(failed)} of {len(trials)} trials failed: {failed[0]}",
                    "The same command tries them again.",
                )
        tuned_plan, _ = tuned(plan, folder)
        try:
            self._carry_out(who, "comparing", [*_untouched(plan, folder), *_runs(tuned_plan, folder)])
        finally:
            self._write()  # how far it is, also when it is stopped
        self._show(self.conclude())  # costs follow
        self._carry_out(who, "timing", list(_timings(tuned_plan, folder)))

    def _carry_out(self, who: Crew, name: str, jobs: list[Job]) -> None:
        left = [job for job in jobs if not job.done]
        if not left:
            return
        if len(left) < len(jobs):
            self.display.say(f"{name}: {len(jobs) - len(left)} of {len(jobs)} are done already")
        self.display.phase(name, left)
        who.run(left, self.display.began, self.display.ended, self._tick)

    def _tick(self) -> None:
        self.display.tick()
        if time.monotonic() - self.written > max(5.0, self.pages / SHARE_OF_TIME):
            self._write()

    def _write(self) -> None:
        """The page of a study that is on its way."""
        results = collect(self.plan, self.folder, self.facts)
        if any(run.status != "missing" for run in results.runs) and not results.finished:
            self._show(results)
        self.written = time.monotonic()

    def _show(self, results: Results) -> None:
        """A page that cannot be written is no reason to stop."""
        begin = time.monotonic()
        try:
            write_report(results, self.folder)
        except WorkError as error:
            self.display.say(one_line(error), style="red")
        self.pages = time.monotonic() - begin

    def conclude(self) -> Results:
        """The results; the first look at which something could be confirmed is written down."""
        results = collect(self.plan, self.folder, self.facts)
        self.facts = remembered(self.plan, self.folder, self.facts, results)
        return results


def remembered(plan: Plan, folder: Path, facts: dict[str, Any], results: Results) -> dict[str, Any]:
    """The facts with the looks that this is: the first at which something could be confirmed, or those that
    were declared and are reached. They are written down before anyone sees the results."""
    if not results.finished or results.exploratory:
        return facts
    known = [look["seeds"] for look in facts.get("looks", [])]
    new = [look for look in results.looks if list(look.seeds) not in known]
    enough = any(c.pairs >= plan.least for c in results.contrasts if c.key in plan.family)
    if new and (plan.looks or (not known and enough)):  # only where something could be confirmed
        kept = [{"seeds": list(look.seeds), "missing": [list(m) for m in look.missing]} for look in new]
        facts = {**facts, "looks": [*facts.get("looks", []), *kept]}
        keep(folder, facts)
    return facts


def collect(plan: Plan, folder: Path, facts: dict[str, Any], *, primary: str | None = None) -> Results:
    """The results of a study, finished or not, from the records of its runs: the same records give the same
    results, whoever made them and in whatever order."""
    plan, trials = tuned(plan, folder)
    exploratory = ""
    if primary is not None and primary != plan.primary:
        exploratory = (
            f"the plan named {plan.primary} as the primary metric; {primary} was chosen afterwards"
        )
        plan = replace(plan, primary=primary, margin=None, claims=())
    parts, troubles = [], []
    for part in plan.parts:
        costs = _read(_place(plan, folder, part) / "costs.json", {str: [ROW]}, _rows_by_name) or {}
        arms = []
        for arm in part.read_arms:
            known = facts.get("sizes", {}).get(part.name, {}).get(arm.name, {})
            rows = costs.get(arm.name) or tuple(Row(name, x, "cost") for name, x in known.items())
            runs = tuple(
                _run_result(_run_folder(plan, folder, part, arm, seed), seed) for seed in plan.seeds
            )
            arms.append(ArmResult(arm.name, arm.changes, runs, rows, trials.get((part.name, arm.name), ())))
        untouched = _run_result(_place(plan, folder, part) / "untouched", 0)
        own = untouched if untouched.status == "done" else None
        failed = {
            "costs": read_json(_place(plan, folder, part) / "costs-failed.json", optional=True),
            "the untouched model": {"error": untouched.error} if untouched.error else None,
        }
        troubles += [f"{what}: {why.get('error')}" for what, why in failed.items() if why]
        parts.append(PartResult(part.name, tuple(arms), part.settings, own))
    return replace(concluded(plan, tuple(parts), facts, exploratory), troubles=tuple(troubles))


def concluded(
    plan: Plan, parts: tuple[PartResult, ...], facts: dict[str, Any], exploratory: str
) -> Results:
    """From rows to sentences: what follows from the runs of a plan."""
    results = Results(
        title=plan.title or f"Which is best on {Path(plan.parts[0].config.data).name}?",
        metrics=tuple(map(plan.task.metric, plan.metrics)),
        unit=plan.task.unit,
        seeds=plan.seeds,
        parts=parts,
        exploratory=exploratory,
        margin=plan.margin,
        within=plan.within if any(part.untouched for part in parts) else None,
        commands=tuple(facts["commands"]),
        environment=next(
            (r.environment for p in parts for a in p.arms for r in a.runs if r.environment), {}
        ),
        data=facts["data"],
    )
    missing = [(p.name, a.name, run.seed) for p, a, run in results.placed_runs if not run.ended]
    known = looked(facts)
    reached = [plan.seeds[:count] for count in plan.looks if count <= len(plan.seeds)]
    for seeds in reached if plan.looks else [] if known else [plan.seeds]:
        if all(look.seeds != seeds for look in known):
            known += (Look(seeds, tuple(run for run in missing if run[2] in seeds)),)
    results = replace(results, looks=known if results.finished else ())
    results = replace(results, contrasts=contrasts(results, plan.family, max(1, len(plan.looks))))
    results = replace(results, answers=words.answers(plan, results))
    return replace(
        results,
        verdict=words.verdict(plan, results),
        not_controlled=tuple(words.not_controlled(plan, results)),
    )


def report_again(folder: Path, primary: str | None, title: str) -> Results:
    """The results of a study's folder, by another primary metric or with another title if asked."""
    plan, facts = read_plan(folder)
    results = collect(replace(plan, title=title or plan.title), folder, facts, primary=primary)
    remembered(plan, folder, facts, results)
    return results


def data_facts(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """What results say about the data, hashes with it."""
    kept = ("tokens", "characters", "documents", "text_sha256", "sha256")
    entropy = manifest.get("true_entropy") or {}
    tokenizer = manifest.get("tokenizer", {})
    return {
        "name": Path(name).name,
        "tokenizer": Path(tokenizer.get("name") or "").name or None,
        "tokenizer_sha256": manifest.get("tokenizer_sha256"),
        "vocab_size": tokenizer.get("vocab_size"),
        "true_nats_per_token": entropy.get("test", {}).get("nats_per_token"),
        "splits": {
            split: {key: about[key] for key in kept if key in about}
            for split, about in manifest["splits"].items()
        },
    }


def _all_data(sets: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
    """Of the one set that all parts have, or of each."""
    every = {(facts := data_facts(*one))["name"]: facts for one in sets}
    one, *others = every.values()
    return {"name": ", ".join(every), "sets": every} if others else one


def tuned(plan: Plan, folder: Path) -> tuple[Plan, dict[tuple[str, str], tuple[Trial, ...]]]:
    """The plan with each arm's best learning rate by validation loss, and all trials by part and arm.

    An arm whose trials all diverged keeps its own rate.
    """
    if not plan.tune:
        return plan, {}
    trials: dict[tuple[str, str], tuple[Trial, ...]] = {}
    parts = []
    for part in plan.parts:
        arms = []
        for arm in part.read_arms:
            rates = {
                rate: _trial_folder(plan, folder, part, arm, rate)
                for rate in plan.learning_rates(part, arm)
            }
            records = {
                rate: read_json(at / "done.json", {"loss": (float, None)}, optional=True)
                for rate, at in rates.items()
            }
            found = tuple(Trial(rate, record["loss"]) for rate, record in records.items() if record)
            trials[part.name, arm.name] = found
            losses = {trial.lr: trial.loss for trial in found if trial.loss is not None}
            best = min(losses, key=lambda lr: losses[lr], default=None)
            arms.append(arm if best is None else plan.at_rate(part, arm, best))
        parts.append(replace(part, arms=tuple(arm.text for arm in arms)))
    return replace(plan, parts=tuple(parts)), trials


def _place(plan: Plan, folder: Path, part: Part) -> Path:
    return folder / slug(part.name) if len(plan.parts) > 1 else folder


def _run_folder(plan: Plan, folder: Path, part: Part, arm: Arm, seed: int) -> Path:
    return _place(plan, folder, part) / arm.slug / f"seed-{seed}"


def _trial_folder(plan: Plan, folder: Path, part: Part, arm: Arm, rate: float) -> Path:
    return _place(plan, folder, part) / arm.slug / "tune" / f"lr-{rate:g}"


def _run_result(folder: Path, seed: int) -> RunResult:
    record = _read(folder / "done.json", RECORD, RunResult.of)
    if record is not None:
        return record
    failure = read_json(folder / "done-failed.json", {"error": str}, REMEDY, optional=True)
    return RunResult(seed, "failed", failure["error"]) if failure else RunResult(seed)


def _rows_by_name(values: dict[str, Any]) -> dict[str, tuple[Row, ...]]:
    return {name: tuple(Row(**row) for row in rows) for name, rows in values.items()}


def _read(path: Path, shape: Any, made: Callable[[Any], Made]) -> Made | None:
    """What was made of the JSON in a file; None where there is none."""
    values = read_json(path, shape, REMEDY, optional=True)
    try:
        return None if values is None else made(values)
    except TypeError as error:
        raise UsageError(f"{path} is damaged: {one_line(error)}", REMEDY) from error


def _trials(plan: Plan, folder: Path) -> Iterator[Job]:
    """The same number of learning rates for every arm, with the budget of a run or the same part of it, and
    a seed of their own."""
    for part in plan.parts:
        first = terms.budget(plan.config(part, part.read_arms[0], TUNING_SEED))
        for arm in part.read_arms:
            for rate in plan.learning_rates(part, arm):
                place = _trial_folder(plan, folder, part, arm, rate)
                config = plan.config(part, plan.at_rate(part, arm, rate), TUNING_SEED)
                if plan.trial_tokens:
                    tokens = max(1, plan.trial_tokens * terms.budget(config) // first)
                    config = config.with_budget(tokens=tokens)
                arguments = {"config": config, "folder": place.absolute(), "threads": plan.threads}
                label = f"{part.name} {arm.name} lr {rate:g}".strip()
                output, like = place / "done.json", _compiled(part, arm)
                yield Job(label, work.try_rate, arguments, output, _steps(config), like=like)


def _runs(plan: Plan, folder: Path) -> Iterator[Job]:
    """Seed by seed, so that what is finished is always nearly paired."""
    for seed in plan.seeds:
        for part in plan.parts:
            for arm in part.read_arms:
                place = _run_folder(plan, folder, part, arm, seed)
                label = f"{part.name} {arm.name} seed {seed}".strip()
                yield _run_job(plan, plan.config(part, arm, seed), place, label, _compiled(part, arm))


def _untouched(plan: Plan, folder: Path) -> Iterator[Job]:
    """The pretrained model as it stands, where the arms begin from one."""
    for part in plan.parts:
        init = part.config.init
        if init is not None:
            config = _any_run(plan, part).with_budget(steps=0)
            config = replace(config, mixer=pretrained.own_mixer(init), objective=plan.task.objective)
            place, like = _place(plan, folder, part) / "untouched", _compiled(part, part.read_arms[0])
            yield _run_job(plan, config, place, "the untouched model", like)


def _compiled(part: Part, arm: Arm) -> str:
    """What its runs compile, and one process should do; "" where that is nothing."""
    return f"{part.name} {arm.name}" if part.config.compile == "on" else ""


def _run_job(plan: Plan, config: Any, place: Path, label: str, like: str) -> Job:
    arguments = {"config": config, "folder": place.absolute(), "threads": plan.threads}
    arguments |= {"test_tokens": plan.test_tokens, "along": plan.along, "texts": plan.texts(config)}
    return Job(label, work.run, arguments, place / "done.json", _steps(config), like=like)


def _timings(plan: Plan, folder: Path) -> Iterator[Job]:
    for part in plan.parts:
        configs = {arm.name: plan.config(part, arm, plan.seeds[0]) for arm in part.read_arms}
        arguments = {"configs": configs, "threads": plan.threads}
        label = f"{part.name} costs in turns".strip()
        yield Job(label, work.time_arms, arguments, _place(plan, folder, part) / "costs.json", alone=True)


def _steps(config: Any) -> int:
    a_step = TASKS.parse(config.task).tokens_a_step(config)
    return config.steps if config.steps is not None else -(-(config.tokens or a_step) // a_step)


def _interrupt(number: int) -> None:
    """SIGTERM is as good as an interruption from the keyboard."""
    raise KeyboardInterrupt
