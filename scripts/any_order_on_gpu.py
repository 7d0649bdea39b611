"""The level table of ar-vs-diffusion, its texts and their times on one GPU, as docs/results.md has them.

    python scripts/any_order_on_gpu.py OUT [ARM ...] [--toy]
    python scripts/any_order_on_gpu.py OUT --times [--toy]

Each arm is trained once with what the recipe's full scale pays for, scored on test, and its texts are
judged by stories15M (in $LANGEVIN_DATA/models). Arms compile side by side, and then have the GPU to
themselves, one after the other: the others stand still. What dies goes on. OUT/ARM.json grows as things are
known. Temperatures, and of several ways to write with as many calls one, are chosen by texts of other seeds
beside validation text. --times: what a text of a whole context costs alone, in turns, with random weights.
--toy: tiny, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from langevin.data.tokenizers import encoder
from langevin.environment import environment, pick_device
from langevin.evaluation.judge import Judge
from langevin.evaluation.quality import Wanted, entropy_of, measure, real_texts, usual, write
from langevin.objectives import OBJECTIVES
from langevin.runs import load
from langevin.runs.files import write_json
from langevin.sampling.text import Request
from langevin.studies import terms, work
from langevin.studies.plan import slug
from langevin.studies.recipe import recipe
from langevin.tasks import TASKS
from langevin.training.start import build

PLAN = recipe("ar-vs-diffusion").plan("full", (0,))
JUDGE = "stories15M"
RATE = {"lr": 1e-3, "muon_lr": 0.01}  # by whole runs: short trials choose larger ones
OWN = {"ar": {**RATE, "ema": 0.999, "final_lr": 0.3}}  # in a small run on a CPU that was lower
TOY = {"layers": 1, "width": 32, "heads": 2, "mlp_width": 64, "context": 64, "batch": 4, "tokens": 2560}
TOY |= {"eval_every": 5, "eval_tokens": 512, "device": "cpu"}

Ways = list[dict[str, Any]]  # settings of a sampler, of which the best is taken
MANY = {"steps": 192, "order": "ancestral", "remask": "conf", "eta": 0.2, "sweeps": 8}
STEPS_32: Ways = [{"steps": 32}]
SHARED: dict[str, Ways] = {
    "32 steps": STEPS_32,
    "16 steps, 2 sweeps": [{"steps": 16, "sweeps": 2}],
    "192 steps with remasking, 8 sweeps": [MANY, {**MANY, "top_p": 0.9}],
}
WRITTEN = {  # other arms: in 32 steps
    "masked": SHARED,
    "soft 8": SHARED,
    "block 4": {"a step a token": [{}], "a step a token, top-p 0.95": [{"top_p": 0.95}]},
    "ar": {"a token a call": [{}], "a token a call, top-p 0.95": [{"top_p": 0.95}]},
}
TEXTS = {"full": 256}  # of an arm whose calls take ten times as long; elsewhere 1,024
OTHER_SEEDS = 10**6
Look = tuple[float, float, float]  # temperature, entropy less that of real text, judge gap
USUAL_SLOPE = 0.6  # nats of entropy a unit of temperature
LOOKS, HALF = 3, 0.05  # at temperatures; and how far from the one found those of the table are
TIMED = {  # calls of a text, by arm
    "ar": (0,),
    "block 4": (0,),
    "masked": (0, 64, 32, 16),
    "soft 8": (0, 64, 32, 16),
    "full": (32,),
}
ROUNDS = 5
THREADS, TRIES = 4, 3
STILL = 0.2  # seconds between looks at who may go on


def of_recipe(toy: bool) -> dict[str, Any]:
    """The settings of every arm, with the tokens that the FLOPs of the first one pay for."""
    data = [TASKS.parse(part.config.task).prepare(part.config, progress=False) for part in PLAN.parts]
    plan = terms.equal_in_flops(PLAN, terms.all_sizes(PLAN, data))
    (part,) = plan.parts
    small = TOY if toy else {}
    return {
        arm.name: replace(plan.config(part, arm, 0, **OWN.get(arm.name, RATE)), **small)
        for arm in part.read_arms
    }


class Entropies:
    """Of texts, as `quality` takes them: of the first `width` tokens, which nine in ten real ones have."""

    def __init__(self, run: Any, corpus: Any) -> None:
        self.encode = encoder(run.tokenizer)
        real = real_texts(corpus, "valid", 1024, run.config.context - 1, fewer=True)
        self.width = max(1, int(np.percentile([len(ids) for ids, _ in self.encode(real, False)], 10)))
        self.real, self.texts = self.of(real), real

    def of(self, texts: list[str]) -> float:
        rows = [ids for ids, _ in self.encode(texts, False)]
        own = [entropy_of(ids[: self.width]) for ids in rows if len(ids) >= self.width]
        return statistics.mean(own) if own else 0.0


def at_match(looks: list[Look]) -> tuple[float, float]:
    """Temperature and gap at the entropy of real text, on lines through all looks."""
    at, entropy, gap = np.array(looks).T
    if len(looks) < 2 or np.ptp(at) == 0 or np.ptp(entropy) == 0:
        return float(at[0] - entropy[0] / USUAL_SLOPE), float(gap[0])
    slope = np.clip(np.polyfit(at, entropy, 1)[0], USUAL_SLOPE / 2, USUAL_SLOPE * 3)
    matched = np.clip(at.mean() - entropy.mean() / slope, at.min() - 3 * HALF, at.max() + 3 * HALF)
    return float(matched), float(np.polyval(np.polyfit(entropy, gap, 1), 0.0))


def tried(run: Any, sampling: Any, entropies: Entropies, judge: Judge, count: int) -> dict[str, Any]:
    """Texts at temperatures nearer and nearer to the entropy of real text, and what is at the match."""
    real, looks, at = judge.judged(entropies.texts), list[Look](), 1.0
    while len(looks) < LOOKS and at not in [look[0] for look in looks]:
        requests = [Request("", OTHER_SEEDS + i) for i in range(count)]
        found = write(run, replace(sampling, temperature=at), requests, str(judge.model.device))
        judged = judge.judged([text.text for text in found])
        gap = judged.nll.sum() / judged.tokens.sum() - real.nll.sum() / real.tokens.sum()
        looks.append((at, entropies.of([text.text for text in found]) - entropies.real, float(gap)))
        moved = at_match(looks)[0] - at
        moved = moved if abs(moved) > HALF / 2 else np.copysign(HALF, moved)  # a line wants some distance
        at = round(max(0.5, at + min(3 * HALF, max(-3 * HALF, float(moved)))), 3)
    matched, gap = at_match(looks)
    return {"sampling": asdict(sampling), "looks": looks, "matched": matched, "gap": gap}


def one_arm(out: Path, arm: str, toy: bool) -> None:
    config = of_recipe(toy)[arm]
    place, device = out / f"{slug(arm)}.json", pick_device(config.device)
    known: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {"config": asdict(config)}
    if known["config"] != asdict(config):
        raise SystemExit(f"{place} is of other settings: choose another folder")

    def keep(**more: Any) -> None:
        known.update(more)
        write_json(place, known)

    if "level" not in known:
        keep(level=work.run(config, out / "runs" / slug(arm), THREADS, 2048 if toy else 10**9, False))
    if known["level"]["status"] != "done":
        keep(finished=known["level"]["error"])
        return
    run, texts = load(out / "runs" / slug(arm)), known.get("texts", {})
    run.model.to(device)
    corpus, judge = run.task.prepare(run.config), Judge.read(JUDGE, device)
    entropies, count = Entropies(run, corpus), 16 if toy else TEXTS.get(arm, 1024)
    for name, ways in WRITTEN.get(arm, {"32 steps": STEPS_32}).items():
        if name in texts:
            continue
        few = [{**way, "steps": min(way["steps"], 8)} if toy and "steps" in way else way for way in ways]
        samplings = [replace(usual(run.objective, config.context), **way) for way in few]
        looks = [tried(run, sampling, entropies, judge, count // 4) for sampling in samplings]
        best = min(range(len(looks)), key=lambda i: looks[i]["gap"])
        print(arm, name, json.dumps(looks), flush=True)
        temperatures = [round(looks[best]["matched"] + side, 2) for side in (-HALF, HALF)]
        for _ in range(3):
            wanted = Wanted(count, JUDGE, samplings[best], tuple(temperatures))
            rows, details = measure(run, corpus, "test", wanted, device=device, resamples=300)
            if details["matched"] is not None:
                break
            real, *written = (row.value for row in rows if row.metric == "unigram_entropy")
            warm = min(written, default=real) > real
            further = temperatures[0] - 2 * HALF if warm else temperatures[-1] + 2 * HALF
            temperatures = sorted([*temperatures, round(further, 2)])
        texts[name] = {"rows": [row.as_dict() for row in rows], **details, "tried": looks}
        keep(texts=texts)
        matched = {row.metric: round(row.value, 4) for row in rows if not row.at}
        print(arm, name, matched, details["said"], flush=True)
    keep(finished=True)


def times(out: Path, toy: bool) -> None:
    """Milliseconds of a text as long as the context, written alone: the median of rounds in turns."""
    configs = of_recipe(toy)
    context, device = configs["masked"].context, pick_device(configs["masked"].device)
    writers: dict[str, Any] = {}
    for arm, calls in TIMED.items():
        config = configs[arm]
        corpus, objective = TASKS.parse(config.task).prepare(config), OBJECTIVES.parse(config.objective)
        model = build(config, corpus).to(device).eval()
        if objective.causal:
            model.generation_config.eos_token_id = -1  # nothing ends a text
        for steps in calls:
            fixed = {"steps": min(steps, 8) if toy else steps, "fixed": True}
            own: dict[str, Any] = {} if objective.causal else fixed
            sampling = replace(objective.sampling()(tokens=context - 1), temperature=1.0, **own)
            known = {"data": corpus.manifest, "context": context}
            writers[f"{arm}, {steps} steps" if steps else arm] = (
                lambda seed, m=model, o=objective, t=corpus.tokenizer, s=sampling, k=known: o.sampler()(
                    m, t, [Request("", seed)], s, **k
                )[0]
            )
    found: dict[str, list[float]] = {name: [] for name in writers}
    made = {}
    half = torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=device != "cpu")
    for turn in range(1 + ROUNDS):
        for name, writer in writers.items():
            begin = time.perf_counter()
            with half:
                text = writer(turn)
            found[name].append(1000 * (time.perf_counter() - begin))
            made[name] = {"tokens": text.tokens, "calls": text.calls}
    rows = {
        name: {"ms": statistics.median(own[1:]), "rounds": own[1:], **made[name]}
        for name, own in found.items()
    }
    write_json(out / "times.json", {"environment": environment(device), "one text, in turns": rows})


def in_turn(out: Path, arms: list[str], toy: bool) -> int:
    """Start all arms; the first that is not finished has the GPU, another trains until it stands still."""

    def start(arm: str) -> subprocess.Popen[bytes]:
        caches = {
            f"{kind}_CACHE_DIR": str(out / "compiled" / kind / slug(arm))
            for kind in ("TORCHINDUCTOR", "TRITON")
        }
        command = [sys.executable, __file__, str(out), arm, "--alone", *(["--toy"] if toy else [])]
        with open(out / f"{slug(arm)}.txt", "ab") as log:
            return subprocess.Popen(command, env=os.environ | caches, stdout=log, stderr=log)

    def finished(arm: str) -> bool:
        place = out / f"{slug(arm)}.json"
        return place.exists() and "finished" in json.loads(place.read_text())

    def trains(arm: str) -> bool:
        metrics = out / "runs" / slug(arm) / "metrics.jsonl"
        return metrics.exists() and '"train"' in metrics.read_text()

    left = [arm for arm in arms if not finished(arm)]
    jobs, tries, still = {arm: start(arm) for arm in left}, dict.fromkeys(left, 1), set[str]()
    failed = 0
    try:
        while left:
            for arm in list(left):
                if jobs[arm].poll() is not None:
                    still.discard(arm)
                    if finished(arm) or tries[arm] == TRIES:
                        failed += not finished(arm)
                        log = out / f"{slug(arm)}.txt"
                        print(arm, "is finished" if finished(arm) else f"failed: see {log}", flush=True)
                        left.remove(arm)
                    else:
                        tries[arm] += 1
                        jobs[arm] = start(arm)
                elif arm == left[0] and arm in still:
                    jobs[arm].send_signal(signal.SIGCONT)
                    still.discard(arm)
                elif arm != left[0] and arm not in still and trains(arm):
                    jobs[arm].send_signal(signal.SIGSTOP)
                    still.add(arm)
            time.sleep(STILL)
    finally:  # what stands still would stay, with its memory on the GPU
        for job in (job for job in jobs.values() if job.poll() is None):
            job.terminate()
            job.send_signal(signal.SIGCONT)
            job.wait()
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    names = [arm.name for arm in PLAN.parts[0].read_arms]
    parser.add_argument("arms", nargs="*", help=f"of {', '.join(names)}; default: {', '.join(WRITTEN)}")
    parser.add_argument("--times", action="store_true", help="nothing but times")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--alone", action="store_true", help="this arm in this process")
    asked = parser.parse_args()
    for arm in set(asked.arms) - set(names):
        parser.error(f"no arm is called {arm!r}: there are {', '.join(names)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.times:
        times(asked.out, asked.toy)
        return 0
    if asked.alone:
        one_arm(asked.out, asked.arms[0], asked.toy)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return in_turn(asked.out, asked.arms or list(WRITTEN), asked.toy)


if __name__ == "__main__":
    sys.exit(main())
