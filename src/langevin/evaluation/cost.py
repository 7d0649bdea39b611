"""What a model costs to train, to keep and to decode with.

Decoding is measured as `langevin generate` decodes, one sequence at a time.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from langevin.models.cost import flops_of

WARMUP = 8
STEPS = 32  # timed tokens


@dataclass(frozen=True)
class Cost:
    parameters: int
    flops_per_token: float  # training, forward and backward
    state_bytes: int | None  # what the cache holds after a context of tokens
    decode_ms_per_token: float | None  # median, at the end of a context

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(model: Any, context: int) -> Cost:
    """Parameters, FLOPs, decoding state and decoding time of a langevin model."""
    cached = context >= 2
    return Cost(
        parameters=parameter_count(model),
        flops_per_token=flops_of(model, context),
        state_bytes=state_bytes(model, context) if cached else None,
        decode_ms_per_token=decode_ms(model, context) if cached else None,
    )


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
    from langevin.sampling.ar import Decoding, Sampling

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


def decode_ms_in_turns(models: dict[str, Any], context: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds a token of several models, timed in turns: the best of each, for what disturbs a host
    only adds, and for seconds on end."""
    times = [{name: decode_ms(model, context) for name, model in models.items()} for _ in range(rounds)]
    return {name: min(turn[name] for turn in times) for name in models}


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
