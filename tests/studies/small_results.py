"""Results of comparisons with planted values, as small as the statistics allow."""

from __future__ import annotations

from langevin.studies.controls import not_controlled
from langevin.studies.statistics import compare_arms, summarise
from langevin.studies.verdict import verdict

METRICS = (
    {"name": "nll", "label": "test loss", "unit": "nats/token", "better": "lower"},
    {"name": "perplexity", "label": "perplexity", "unit": "", "better": "lower"},
    {"name": "accuracy", "label": "accuracy", "unit": "fraction", "better": "higher"},
    {"name": "entropy", "label": "predictive entropy", "unit": "nats", "better": "neither"},
)


def run(seed, values, *, matched=None, speed=1000.0, memory=None, error=None):
    return {
        "seed": seed,
        "status": "failed" if error else "done",
        "error": error,
        "values": {} if error else values,
        "matched": matched,
        "best": {"step": 8, "tokens": 800, "valid_loss": 2.0},
        "cost": {"tokens": 1000, "tokens_per_second": speed, "peak_memory_bytes": memory},
    }


def arm(name, nll, *, parameters=1000, changes=None, **facts):
    """An arm with these test losses at seeds 0, 1, ...; a text in place of a loss is a failure."""
    runs = [
        run(seed, {}, error=loss) if isinstance(loss, str) else run(seed, {"nll": loss}, **facts)
        for seed, loss in enumerate(nll)
    ]
    sizes = {"parameters": parameters, "flops_per_token": 6.0 * parameters}
    return {"name": name, "spec": name, "changes": changes or {}, "runs": runs, **sizes}


def results_of(*arms, primary="nll", settings=None, **facts):
    """The whole dict, judged."""
    results = {
        "primary": primary,
        "metrics": [dict(metric) for metric in METRICS],
        "seeds": list(range(max((len(a["runs"]) for a in arms), default=0))),
        "settings": settings or {},
        "environment": {},
        "data": {"name": "stories", "true_nats_per_token": None},
        "arms": list(arms),
        **facts,
    }
    for a in arms:
        a["summary"] = summarise(a, [metric["name"] for metric in METRICS])
    results["comparisons"] = compare_arms(results)
    results["verdict"] = verdict(results)
    results["not_controlled"] = not_controlled(results)
    return results
