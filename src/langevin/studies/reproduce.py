"""`langevin reproduce`: make the study of a recipe, and set what was published beside the results.

    results = reproduce("ssmax-text8", "small", Path("runs/ssmax-text8-small"))

The recipes of costs train nothing: they measure mixers alone and in training steps, or the memory and the
speed of classifiers in training, anew each time.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from langevin.bench.edge import bench_edge
from langevin.bench.mixers import bench_mixers
from langevin.bench.training import bench_training
from langevin.environment import environment, pick_device
from langevin.errors import UsageError
from langevin.mixers import parse
from langevin.runs.files import write_json, write_text
from langevin.studies.compare import compare
from langevin.studies.numbers import percent
from langevin.studies.plan import FILE, seeds_in_words
from langevin.studies.recipe import Recipe, SpeedClaim, recipe
from langevin.studies.report.page import render
from langevin.studies.report.speed import speed_page
from langevin.studies.results import Answer, Results

LEAST_ROUNDS = 5  # of a timing, for its spread to be known


def reproduce(
    name: str,
    scale: str,
    folder: Path,
    *,
    seeds: tuple[int, ...] = (),
    workers: int | None = None,
    on: Literal["local", "ray"] = "local",
    quiet: bool = False,
) -> Results:
    """Make a recipe in a folder, or go on with it; its results, with an answer to every claim."""
    words = ["langevin", "reproduce", name, "--scale", scale]
    command = shlex.join([*words, "--seeds", seeds_in_words(seeds)] if seeds else words)
    plan = recipe(name).plan(scale, seeds)
    return compare(plan, folder, workers=workers, on=on, quiet=quiet, command=command)


def reproduce_speed(
    chosen: Recipe, scale: str, folder: Path, say: Callable[[str], None] = lambda what: None
) -> list[Answer]:
    """Measure what a recipe of costs says; the answers to the claims. The page is in the folder."""
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if folder.is_file() or FILE in there or (there and "results.json" not in there):
        raise UsageError(f"{folder} holds something else", "Choose another --out.")
    benches = chosen.scale(scale).benches
    assert benches is not None
    device, arms = pick_device("auto"), list(chosen.arms)
    model = replace(benches.training, device=device)
    found: dict[str, Any] = {}
    if benches.mixers is None:
        own = {**benches.edge, "lengths": tuple(benches.edge["lengths"])}
        turns: dict[str, Any] = {"repeats": benches.rounds, "inference": False}
        found["edge"] = bench_edge(arms, model, vocab=benches.vocab, **turns, **own, progress=say)
    else:
        found["mixers"] = bench_mixers(arms, replace(benches.mixers, device=device), progress=say)
        turns = {"rounds": benches.rounds, "seconds": benches.seconds}
        found["training"] = bench_training(arms, model, vocab=benches.vocab, **turns, progress=say)
    answers = [_answer(claim, found) for claim in chosen.speeds]
    results = {
        "title": chosen.title,
        "commands": [shlex.join(["langevin", "reproduce", chosen.name, "--scale", scale])],
        "environment": environment(device),
        **found,
        "answers": [vars(answer) for answer in answers],
        "not_controlled": list(chosen.differs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.html", render(speed_page(results, answers)))
    write_json(folder / "results.json", results)
    return answers


def _answer(claim: SpeedClaim, found: dict[str, Any]) -> Answer:
    """The ratio at the longest length; what lies within the spread of the rounds stays open."""
    measured = _of_classifiers(claim, found["edge"]) if "edge" in found else _of_mixers(claim, found)
    if measured is None:
        return Answer("", claim.claim, claim.published, "not judged", "not measured on this machine")
    ratio, noise, rounds, length, ours = measured
    limit = 1 / claim.times
    if claim.expect == "same":
        apart = abs(ratio - 1)
        far = "opposite" if apart - noise > claim.margin else "not seen"
        direction = "seen" if apart + noise <= claim.margin else far
        ours += f"; the same means within {percent(claim.margin)}"
    else:
        less, more = ratio < limit * (1 - noise), ratio > 1 + noise
        if claim.expect == "slower":
            less, more = more, ratio < 1 - noise
        direction = "seen" if less else "opposite" if more else "not seen"
    if rounds < LEAST_ROUNDS or length < claim.length:
        direction = "not judged"
        tokens = f", or {claim.length:,} tokens," if claim.length else ""
        ours += f"; fewer than {LEAST_ROUNDS} rounds{tokens} cannot answer the claim"
    return Answer("", claim.claim, claim.published, direction, ours)  # type: ignore[arg-type]


Measured = tuple[float, float, int, float, str]
"""A ratio to another arm, its relative spread over so many rounds, the length, and both in words."""


def _of_mixers(claim: SpeedClaim, found: dict[str, Any]) -> Measured:
    """Of times, to softmax's."""
    if claim.measure == "training":
        rows, rounds = found["training"]["rows"], found["training"]["settings"]["rounds"]
        value, spread = "tokens_per_second", "spread"
        what = "a training step"
    else:
        mixers = found["mixers"]
        rows = [row for row in mixers["rows"] if row["part"] == claim.measure]
        longest = max(row["length"] for row in rows)
        rows, rounds = [row for row in rows if row["length"] == longest], mixers["settings"]["repeats"]
        value, spread = "forward_ms", "forward_spread_ms"
        what = f"the {claim.measure}, forward at {longest:,} tokens,"
    row, base = (next(r for r in rows if r["mixer"] == name) for name in (str(parse(claim.arm)), "softmax"))
    ratio = 1 / row["ratio"] if claim.measure == "training" else row["forward_ratio"]
    noise = max(r[spread] / r[value] for r in (row, base))
    ours = f"{what} takes {ratio:.2f} times as long as softmax's ({_spread(noise, rounds)})"
    return ratio, noise, rounds, row.get("length", math.inf), ours


def _of_classifiers(claim: SpeedClaim, edge: dict[str, Any]) -> Measured | None:
    """Of memory a text, or of times a token, at the longest length that both arms have."""
    names = [str(parse(claim.arm)), claim.against]
    by_length: dict[int, dict[str, Any]] = {}
    for row in edge["rows"]:
        by_length.setdefault(row["length"], {})[row["model"]] = row
    both = [length for length, rows in by_length.items() if all(name in rows for name in names)]
    if not both:
        return None
    row, base = (by_length[max(both)][name] for name in names)
    rounds, at = edge["settings"]["repeats"], f"at {max(both):,} tokens a text takes"
    if claim.measure == "memory":
        ratio, noise, rounds = row["mib_a_text"] / base["mib_a_text"], 0.0, LEAST_ROUNDS  # it is exact
        sizes = [f"{r['mib_a_text']:,.1f} MiB (in a batch of {r['batch']})" for r in (row, base)]
        share = f"{1 / ratio:.1f} times less" if ratio <= 1 else f"{ratio:.1f} times as much"
        ours = f"{at} {sizes[0]}, with {claim.against} {sizes[1]}: {share}"
    else:
        ratio = base["tokens_per_second"] / row["tokens_per_second"]
        noise = max(r["ms_p90"] / r["ms_p50"] - 1 for r in (row, base))
        ours = f"{at} {ratio:.2f} times as long as with {claim.against} ({_spread(noise, rounds)})"
    return ratio, noise, rounds, max(both), ours


def _spread(noise: float, rounds: int) -> str:
    return f"spread {percent(noise)} over {rounds} rounds"
