"""What a model costs to train, to keep and to decode with.

Decoding is measured as `langevin generate` decodes, one sequence at a time.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

WARMUP = 8
STEPS = 32  # timed tokens


def parameter_count(model: nn.Module) -> int:
    """Each parameter once, shared ones too."""
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def state_bytes(model: Any, context: int) -> int:
    """Bytes of the cache after reading `context` tokens of one sequence."""
    tokens = torch.zeros((1, context), dtype=torch.long, device=model.device)
    cache = model(tokens, use_cache=True).past_key_values
    kept = [
        x
        for layer in cache.layers
        for x in (layer.keys, layer.values, *(getattr(layer, "state", None) or ()))
    ]
    return sum(x.untyped_storage().nbytes() for x in kept if x is not None)


def decode_times(model: Any, batch: int, prompt: int, steps: int = STEPS) -> list[float]:
    """Seconds of each of the tokens that `langevin generate` writes after prompts of this length."""
    from langevin.sampling.ar import Decoding
    from langevin.sampling.text import Sampling

    sampling = Sampling(tokens=1 + WARMUP + steps, temperature=1.0)
    decoding = Decoding(model, [[0] * prompt] * batch, sampling, list(range(batch)))
    times = []
    for _ in range(sampling.tokens):
        begin = time.perf_counter()
        decoding.next()  # the tokens are on the host when it returns
        times.append(time.perf_counter() - begin)
    return times[1 + WARMUP :]


def decode_ms(model: Any, context: int) -> float:
    """Median milliseconds of a token towards the end of a context, in a batch of one."""
    steps = min(STEPS, max(1, context - 1 - WARMUP))
    return 1000 * statistics.median(decode_times(model, 1, max(1, context - WARMUP - steps), steps))


class PeakMemory:
    """The most bytes that tensors take from here on, beyond what was held before; known on CUDA only.

    What was held is not only tensors: a library keeps a workspace for every stream that ever was.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.held = 0
        if self.device.type == "cuda":
            self.held = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def __call__(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.max_memory_allocated(self.device)) - self.held
