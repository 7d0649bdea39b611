"""Results as a comparison leaves them, made up from numpy alone: six arms, six seeds, one failed run."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json

import numpy as np

METRICS = [
    {"name": "nll", "label": "test loss", "unit": "nats/token", "better": "lower"},
    {"name": "perplexity", "label": "perplexity", "unit": "", "better": "lower"},
    {"name": "bits_per_character", "label": "bits per character", "unit": "bits", "better": "lower"},
    {"name": "accuracy", "label": "accuracy", "unit": "", "better": "higher"},
    {"name": "ece", "label": "calibration error (ECE)", "unit": "", "better": "lower"},
    {"name": "scaled_ece", "label": "ECE after temperature scaling", "unit": "", "better": "lower"},
    {"name": "entropy", "label": "predictive entropy", "unit": "nats", "better": "neither"},
]
ARMS = {  # spec: (loss beyond softmax's, tokens/s, state bytes, learned scalar)
    "softmax": (0.0, 41_000, 65_536, None),
    "ssmax": (-0.035, 40_200, 65_536, "s"),
    "heat(t='head')": (-0.012, 40_500, 65_536, "t"),
    "sigmoid(bias='-log n')": (0.01, 31_000, 65_536, None),
    "sima": (0.09, 35_800, 8_704, None),
    "neighbor(iters=4, alpha=0.5)": (0.31, 52_000, 1_024, "alpha"),
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
TRUE = 1.62
LAYERS, HEADS = 4, 4
STORY = "Once upon a time there was a <small> fox & her name was Mira. Mira had a red ball. "


def example(arms: int = 6, seeds: int = 6) -> dict:
    """A whole comparison; the last seed of the fourth arm failed."""
    rng = np.random.default_rng(0)
    easy = rng.normal(0, 0.02, seeds)  # some seeds are easier for every arm: why differences are paired
    found = [_arm(rng, spec, range(seeds), easy) for spec in list(ARMS)[:arms]]
    if arms > 3 and seeds > 1:
        broken = found[3]["runs"][-1]
        broken.update(
            status="failed", error="loss is not finite at step 812 <batch 3>", values={}, matched=None
        )
        broken.update(best=None, cost={}, curve=[], reliability=[], learned=[], sample=None)
    for arm in found:
        arm["summary"] = {m["name"]: _summary(arm, m["name"]) for m in METRICS}
    results = {
        "kind": "comparison",
        "title": "Six mixers on stories",
        "primary": "nll",
        "metrics": copy.deepcopy(METRICS),
        "seeds": list(range(seeds)),
        "settings": {
            "data": "stories",
            "layers": LAYERS,
            "width": 128,
            "context": 128,
            "lr": 3e-3,
            "compile": False,
        },
        "commands": [
            "langevin compare softmax ssmax \"heat(t='head')\" \"sigmoid(bias='-log n')\" sima "
            '"neighbor(iters=4, alpha=0.5)" --data stories --tokens 2000000 --seeds 0-5 --out runs/mixers'
        ],
        "environment": {
            "langevin": "0.1.0",
            "python": "3.12.3",
            "torch": "2.11.0",
            "transformers": "5.10.1",
            "system": "Linux x86_64",
            "device": "cpu",
            "threads": 1,
            "commit": "0123456789abcdef0123456789abcdef01234567",
        },
        "data": {
            "name": "stories",
            "tokenizer": "bpe-512",
            "vocab_size": 512,
            "true_nats_per_token": TRUE,
            "splits": {
                split: {
                    "tokens": tokens,
                    "characters": 4 * tokens,
                    "documents": tokens // 100,
                    "text_sha256": hashlib.sha256(split.encode()).hexdigest(),
                    "true_nats_per_token": TRUE,
                }
                for split, tokens in (("train", 4_000_000), ("valid", 200_000), ("test", 200_000))
            },
        },
        "arms": found,
        "matched_loss": 2.31,
        "comparisons": [],
        "not_controlled": [
            "The learning rate was not tuned for each arm: all use 0.003.",
            "neighbor(iters=4, alpha=0.5) has 6.1 % fewer parameters than softmax.",
            "One data set, one size, one schedule.",
        ],
        "published": [],
    }
    for arm, metric, at in itertools.product(found[1:], METRICS, ("best", "matched")):
        if metric["better"] != "neither" and (compared := _compared(found[0], arm, metric, at)):
            results["comparisons"].append(compared)
    results["verdict"] = _verdict(results)
    return json.loads(json.dumps(results, default=float))


def recipe() -> dict:
    """A recipe's results: three arms beside the published numbers."""
    results = example(arms=3)
    results.update(kind="recipe", title="heat-calibration: does a heat kernel calibrate?")
    results["published"] = [
        {
            "claim": "Heat attention halves ECE at 4 layers",
            "published": "0.041 → 0.019",
            "ours": "0.034 → 0.033",
            "held": "no",
            "sentence": "ECE differs by −0.001 [−0.004, 0.002]; the published halving lies outside.",
        },
        {
            "claim": "Perplexity does not suffer",
            "published": 38.1,
            "ours": 9.8734,
            "held": "yes",
            "sentence": "No difference in perplexity was found over six seeds.",
        },
        {
            "claim": "The depth law t = 0.28 · L^−0.5 is best",
            "published": None,
            "ours": None,
            "held": "cannot tell",
            "sentence": "Too few depths at this scale.",
        },
    ]
    return results


def single() -> dict:
    """One arm, one seed, nothing optional: the least a report is made of."""
    results = example(arms=1, seeds=1)
    arm = results["arms"][0]
    for key in ("flops_per_token", "state_bytes"):
        arm[key] = None
    for run in arm["runs"]:
        run.update(matched=None, curve=[], reliability=[], learned=[], sample=None)
        run["cost"] = {"tokens": 1000, "seconds": 1.5, "tokens_per_second": 666.0}
    results.update(data={}, environment={}, commands=[], not_controlled=[], settings={}, matched_loss=None)
    results["verdict"] = ["One arm: there is nothing to compare."]
    return results


def _arm(rng: np.random.Generator, spec: str, seeds: range, easy: np.ndarray) -> dict:
    _, _, state, _ = ARMS[spec]
    return {
        "name": spec,
        "spec": spec,
        "changes": {"lr": 0.0015} if spec == "sima" else {},
        "parameters": 853_504 if spec.startswith("neighbor") else 909_312,
        "flops_per_token": 4.6e6 if spec.startswith("neighbor") else 5.9e6,
        "state_bytes": state,
        "runs": [_run(rng, spec, seed, easy[seed]) for seed in seeds],
    }


def _run(rng: np.random.Generator, spec: str, seed: int, easy: float) -> dict:
    beyond, speed, _, scalar = ARMS[spec]
    final = 2.02 + beyond + easy + rng.normal(0, 0.008)
    speed = speed * rng.normal(1, 0.02)
    tokens = np.linspace(50_000, 2_000_000, 40)
    loss = final + (6.2 - final) * np.exp(-((tokens / 160_000) ** 0.62)) + rng.normal(0, 0.006, len(tokens))
    values = {
        "nll": final,
        "perplexity": float(np.exp(final)),
        "bits_per_character": final / np.log(2) / 3.9,
        "accuracy": 0.60 - 0.12 * beyond + rng.normal(0, 0.003),
        "ece": 0.02 + abs(beyond) * 0.05 + abs(rng.normal(0, 0.003)),
        "scaled_ece": 0.008 + abs(rng.normal(0, 0.001)),
        "entropy": final - 0.05 + rng.normal(0, 0.01),
    }
    return {
        "seed": seed,
        "path": f"{spec}/seed-{seed}",
        "status": "done",
        "error": None,
        "values": values,
        "matched": {"nll": 2.31 + rng.normal(0, 0.002), "ece": 0.018 + rng.normal(0, 0.002)},
        "best": {"step": 488, "tokens": 2_000_000, "valid_loss": float(loss.min())},
        "cost": {
            "tokens": 2_000_000,
            "seconds": 2_000_000 / speed,
            "tokens_per_second": speed,
            "peak_memory_bytes": None,
            "decode_ms_per_token": 1.9 + 3e4 / speed + rng.normal(0, 0.03),
        },
        "curve": [
            {"tokens": int(t), "seconds": t / speed, "split": split, "loss": float(value + shift)}
            for split, shift in (("train", -0.02), ("valid", 0.0))
            for t, value in zip(tokens, loss, strict=True)
        ],
        "reliability": _reliability(rng, 0.04 + 0.2 * max(beyond, 0)),
        "learned": [
            {
                "layer": layer,
                "head": head,
                "name": scalar,
                "value": 0.3 + 0.05 * layer + rng.normal(0, 0.03),
            }
            for layer in range(LAYERS if scalar else 0)
            for head in range(HEADS)
        ],
        "sample": {
            "prompt": "Once upon a time",
            "text": STORY + "She gave the ball to Tom.\n\nTom was happy. " * 3,
        },
    }


def _reliability(rng: np.random.Generator, too_sure: float) -> list[dict]:
    bins = []
    for low, high in itertools.pairwise(np.linspace(0, 1, 16)):
        confidence = (low + high) / 2
        count = int(4000 * (0.25 + confidence**2))
        accuracy = float(np.clip(confidence - too_sure * confidence + rng.normal(0, 0.01), 0, 1))
        bins.append(
            {"low": low, "high": high, "count": count, "confidence": confidence, "accuracy": accuracy}
        )
    bins[0].update(count=0, confidence=None, accuracy=None)
    return bins


def _values(arm: dict, metric: str, at: str = "best") -> dict[int, float]:
    part = "values" if at == "best" else "matched"
    return {run["seed"]: run[part][metric] for run in arm["runs"] if metric in (run[part] or {})}


def _summary(arm: dict, metric: str) -> dict:
    values = np.array(list(_values(arm, metric).values()))
    n, mean = len(values), float(values.mean())
    half = STUDENT[n] * values.std(ddof=1) / np.sqrt(n) if n > 1 else None
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n} if n > 1 else _alone(mean)


def _alone(mean: float) -> dict:
    return {"mean": mean, "low": None, "high": None, "n": 1}


def _compared(reference: dict, arm: dict, metric: dict, at: str) -> dict | None:
    ours, theirs = (_values(a, metric["name"], at) for a in (arm, reference))
    differences = np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    n = len(differences)
    if n == 0:
        return None
    mean = float(differences.mean())
    half = STUDENT[n] * differences.std(ddof=1) / np.sqrt(n) if n > 1 else None
    flips = np.array(list(itertools.product((1, -1), repeat=n)))
    p = float(np.mean(np.abs(flips @ differences / n) >= abs(mean) - 1e-15))
    found = {
        "arm": arm["name"],
        "against": reference["name"],
        "metric": metric["name"],
        "at": at,
        "pairs": n,
    }
    low, high = (mean - half, mean + half) if half is not None else (None, None)
    found |= {"difference": mean, "low": low, "high": high, "p": p, "p_adjusted": min(1.0, 5 * p)}
    good = (mean < 0) == (metric["better"] == "lower")
    clear = half is not None and p <= 0.05 and abs(mean) > half
    judged = ("better" if good else "worse") if clear else "no difference found"
    return found | {"verdict": judged if n >= 6 else "too few seeds"}


def _verdict(results: dict) -> list[str]:
    primary = [c for c in results["comparisons"] if c["metric"] == "nll" and c["at"] == "best"]
    sentences = [
        f"{c['arm']}: {c['verdict']} (test loss {c['difference']:+.4f} nats/token, "
        f"95 % interval {c['low']:+.4f} to {c['high']:+.4f}, p = {c['p']:.3f}, {c['pairs']} seed pairs)."
        for c in primary
        if c["low"] is not None
    ]
    return [" ".join(sentences[:2]), *sentences[2:], f"The data's true entropy is {TRUE} nats/token."]
