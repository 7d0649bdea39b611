"""`langevin bench generate`: what a token costs by the way `langevin generate` decodes, and what is kept.

Models of the same shape with random weights, one for each mixer, write in turns, so that a machine that
slows down slows all of them; a ratio is the median of the rounds' ratios to softmax.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from langevin.bench.mixers import BASELINE, DTYPES, beside_baseline, median_ratio
from langevin.environment import environment, pick_device
from langevin.errors import UsageError
from langevin.evaluation.cost import decode_times, state_bytes
from langevin.models.heads import LangevinForCausalLM
from langevin.settings import TrainConfig
from langevin.training.start import model_config

TOKENS = 128  # that each text is written with


def bench_decoding(
    specs: list[str],
    config: TrainConfig,
    *,
    vocab: int,
    batches: tuple[int, ...] = (1, 64),
    dtype: str = "float32",
    rounds: int = 5,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """A row for each spec and size of the batch: 128 tokens after a prompt of half a context."""
    device, prompt = pick_device(config.device), max(1, config.context // 2)
    if vocab < 2:
        raise UsageError(f"vocab={vocab} must be 2 or more")
    specs = beside_baseline(specs)
    rows = []
    for batch in batches:
        times: dict[str, list[float]] = {spec: [] for spec in specs}
        kept = {}
        for turn in range(rounds):
            for spec in specs:
                progress(f"{spec}, batch {batch}: round {turn + 1} of {rounds}")
                torch.manual_seed(0)
                own = model_config(replace(config, mixer=spec), vocab_size=vocab)
                model = LangevinForCausalLM(own).to(device=device, dtype=DTYPES[dtype]).eval()
                times[spec].append(statistics.median(decode_times(model, batch, prompt, TOKENS)))
                kept[spec] = [state_bytes(model, length) for length in (prompt, 2 * prompt)]
        for spec, mine in times.items():
            row = {"mixer": spec, "batch": batch, "ms_per_token": 1000 * statistics.median(mine)}
            row["spread_ms"] = 1000 * (max(mine) - min(mine))
            row["ratio"] = median_ratio(mine, times[BASELINE])
            row["state_bytes"], row["state_bytes_at_twice"] = kept[spec]
            rows.append(row)
    shape = {name: getattr(config, name) for name in ("layers", "width", "heads", "context", "positions")}
    return {
        "settings": {**shape, "vocab": vocab, "prompt": prompt, "tokens": TOKENS, "dtype": dtype},
        "machine": environment(device),
        "rows": rows,
    }
