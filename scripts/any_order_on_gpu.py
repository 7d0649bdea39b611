"""The level table of ar-vs-diffusion and its texts on one GPU, as docs/results.md has them.

    python scripts/any_order_on_gpu.py OUT [ARM ...] [--toy]

Each arm is trained once with what the recipe's full scale pays for, scored on test, and its texts are
judged by stories15M (in $LANGEVIN_DATA/models). Arms compile side by side, and then have the GPU to
themselves, one after the other: the others stand still. What dies goes on. OUT/ARM.json grows as things are
known. --toy: tiny, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from langevin.environment import pick_device
from langevin.evaluation.quality import Wanted, measure, usual
from langevin.runs import load
from langevin.runs.files import write_json
from langevin.studies import terms, work
from langevin.studies.plan import slug
from langevin.studies.recipe import recipe
from langevin.tasks import TASKS

PLAN = recipe("ar-vs-diffusion").plan("full", (0,))
JUDGE = "stories15M"
RATE = {"lr": 1e-3, "muon_lr": 0.01}  # by whole runs: short trials choose larger ones
TOY = {"layers": 1, "width": 32, "heads": 2, "mlp_width": 64, "context": 64, "batch": 4, "tokens": 2560}
TOY |= {"eval_every": 5, "eval_tokens": 512, "device": "cpu"}
REMASK = {"order": "ancestral", "remask": "conf", "eta": 0.2}
SHARED = {  # how texts are written, and the temperatures around the entropy of real text
    "32 steps": ({"steps": 32}, (0.9, 0.95, 1.0)),
    "16 steps, 2 sweeps": ({"steps": 16, "sweeps": 2}, (0.85, 0.9, 0.95)),
    "192 steps with remasking, 8 sweeps": ({"steps": 192, **REMASK, "sweeps": 8}, (0.95, 1.0, 1.05)),
}
WRITTEN: dict[str, dict[str, tuple[dict[str, Any], tuple[float, ...]]]] = {
    "masked": SHARED,
    "soft 8": SHARED,
    "block 4": {
        "a step a token": ({}, (0.9, 0.95, 1.0)),
        "192 steps": ({"steps": 192}, (0.85, 0.9, 0.95, 1.0)),
    },
    "ar": {"a token a call": ({}, (0.9, 0.95, 1.0, 1.05))},
}
OTHERS = {"32 steps": SHARED["32 steps"]}  # of the arms that are not named
THREADS, TRIES = 4, 3
STILL = 0.2  # seconds between looks at who may go on


def of_recipe() -> dict[str, Any]:
    """The settings of every arm, with the tokens that the FLOPs of the first one pay for."""
    data = [TASKS.parse(part.config.task).prepare(part.config, progress=False) for part in PLAN.parts]
    plan = terms.equal_in_flops(PLAN, terms.all_sizes(PLAN, data))
    (part,) = plan.parts
    return {arm.name: plan.config(part, arm, 0, **RATE) for arm in part.read_arms}


def one_arm(out: Path, arm: str, toy: bool) -> None:
    config = replace(of_recipe()[arm], **(TOY if toy else {}))
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
    corpus = run.task.prepare(run.config)
    for name, (own, temperatures) in WRITTEN.get(arm, OTHERS).items():
        if name in texts:
            continue
        steps = {"steps": min(own["steps"], 8)} if toy and "steps" in own else {}
        sampling = replace(usual(run.objective, config.context), **{**own, **steps})
        wanted = Wanted(8 if toy else 1024, JUDGE, sampling, temperatures)
        rows, details = measure(run, corpus, "test", wanted, device=device, resamples=300)
        texts[name] = {"rows": [row.as_dict() for row in rows], **details}
        keep(texts=texts)
        matched = {row.metric: round(row.value, 4) for row in rows if not row.at}
        print(arm, name, matched, details["said"], flush=True)
    keep(finished=True)


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
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--alone", action="store_true", help="this arm in this process")
    asked = parser.parse_args()
    for arm in set(asked.arms) - set(names):
        parser.error(f"no arm is called {arm!r}: there are {', '.join(names)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.alone:
        one_arm(asked.out, asked.arms[0], asked.toy)
        return 0
    return in_turn(asked.out, asked.arms or list(WRITTEN), asked.toy)


if __name__ == "__main__":
    sys.exit(main())
