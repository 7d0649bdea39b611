"""`langevin reproduce`: make the study of a recipe, and set what was published beside the results.

    results = reproduce("ssmax-text8", "small", Path("runs/ssmax-text8-small"))

The recipe `speed` trains nothing: it measures mixers alone and in training steps, anew each time.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from langevin.bench.mixers import Settings, bench_mixers
from langevin.bench.training import bench_training
from langevin.environment import environment, pick_device
from langevin.errors import UsageError, unknown
from langevin.mixers import parse
from langevin.runs.files import write_json, write_text
from langevin.settings import TrainConfig
from langevin.studies.compare import compare
from langevin.studies.numbers import percent
from langevin.studies.plan import FILE, seeds_in_words
from langevin.studies.recipe import Benches, Recipe, SpeedClaim, recipe
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
    """Measure mixers alone and in training steps; the answers to the claims. The page is in the folder."""
    there = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    if folder.is_file() or FILE in there or (there and "results.json" not in there):
        raise UsageError(f"{folder} holds something else", "Choose another --out.")
    benches = chosen.scale(scale).benches
    assert benches is not None
    device = pick_device("auto")
    mixers = bench_mixers(list(chosen.arms), mixer_settings(benches, device, chosen.name), progress=say)
    training = bench_training(
        list(chosen.arms),
        TrainConfig.of({**benches.training, "device": device}, f"recipe {chosen.name}"),
        vocab=benches.vocab,
        rounds=benches.rounds,
        seconds=benches.seconds,
        progress=say,
    )
    answers = [_answer(claim, mixers, training) for claim in chosen.speeds]
    results = {
        "title": chosen.title,
        "commands": [shlex.join(["langevin", "reproduce", chosen.name, "--scale", scale])],
        "environment": environment(device),
        "mixers": mixers,
        "training": training,
        "answers": [vars(answer) for answer in answers],
        "not_controlled": list(chosen.differs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "report.html", render(speed_page(results, answers)))
    write_json(folder / "results.json", results)
    return answers


def mixer_settings(benches: Benches, device: str, name: str) -> Settings:
    """What `bench mixers` is given; every key must be known."""
    known = [f.name for f in fields(Settings)]
    for key in benches.mixers:
        if key not in known:
            raise unknown(f"setting of bench mixers in recipe {name}", str(key), known)
    return Settings(**{**benches.mixers, "lengths": tuple(benches.mixers["lengths"]), "device": device})


def _answer(claim: SpeedClaim, mixers: dict[str, Any], training: dict[str, Any]) -> Answer:
    """The ratio of times at the longest length; what lies within the spread of the rounds stays open."""
    if claim.measure == "training":
        rows, rounds = training["rows"], training["settings"]["rounds"]
        value, spread = "tokens_per_second", "spread"
        what = "a training step"
    else:
        rows = [row for row in mixers["rows"] if row["part"] == claim.measure]
        longest = max(row["length"] for row in rows)
        rows, rounds = [row for row in rows if row["length"] == longest], mixers["settings"]["repeats"]
        value, spread = "forward_ms", "forward_spread_ms"
        what = f"the {claim.measure}, forward at {longest:,} tokens,"
    row, base = (next(r for r in rows if r["mixer"] == name) for name in (str(parse(claim.arm)), "softmax"))
    ratio = 1 / row["ratio"] if claim.measure == "training" else row["forward_ratio"]
    noise = max(r[spread] / r[value] for r in (row, base))
    spread_in_words = f"spread {percent(noise)} over {rounds} rounds"
    ours = f"{what} takes {ratio:.2f} times as long as softmax's ({spread_in_words})"
    short = rounds < LEAST_ROUNDS or row.get("length", math.inf) < claim.length
    if claim.expect == "same":
        apart = abs(ratio - 1)
        far = "opposite" if apart - noise > claim.margin else "not seen"
        direction = "seen" if apart + noise <= claim.margin else far
        ours += f"; the same means within {percent(claim.margin)}"
    else:
        far = "seen" if (ratio < 1) == (claim.expect == "faster") else "opposite"
        direction = "not seen" if abs(ratio - 1) <= noise else far
    if short:
        direction = "not seen"
        ours += f"; fewer than {LEAST_ROUNDS} rounds, or {claim.length:,} tokens, cannot answer the claim"
    return Answer("", claim.claim, claim.published, direction, ours)  # type: ignore[arg-type]
