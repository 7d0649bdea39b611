"""Parameter groups, optimisers and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from langevin.mixers.attention import Scalars
from langevin.training.config import TrainConfig


def groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """matrices: hidden weights of two dimensions; embeddings; free: biases, norms and learned scalars,
    which want no weight decay. Shared weights are counted once."""
    free = {id(p) for m in model.modules() if isinstance(m, Scalars) for p in m.parameters()}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for n, m in model.named_modules() if n.endswith("lm_head")}
    found: dict[str, list[nn.Parameter]] = {"matrices": [], "embeddings": [], "free": []}
    for p in model.parameters():
        if id(p) in free or p.ndim < 2:
            found["free"].append(p)
        elif id(p) in embeddings | heads:
            found["embeddings"].append(p)
        else:
            found["matrices"].append(p)
    return found


def optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the rest."""
    parts = groups(model)
    fused = next(model.parameters()).is_cuda
    betas = (0.9, config.beta2)
    decayed = parts["embeddings"] + (parts["matrices"] if config.optimizer == "adamw" else [])
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": config.weight_decay, "peak": config.lr},
            {"params": parts["free"], "weight_decay": 0.0, "peak": config.lr},
        ],
        lr=config.lr,
        betas=betas,
        fused=fused,
    )
    if config.optimizer == "adamw":
        return [adamw]
    muon = torch.optim.Muon(
        [{"params": parts["matrices"], "peak": config.muon_lr}],
        lr=config.muon_lr,
        weight_decay=config.weight_decay,
    )
    return [adamw, muon]


def factor(step: int, total: int, config: TrainConfig) -> float:
    """The learning rate of a step, as a fraction of its peak.

    A linear rise over the warm-up, then: cosine down to final_lr; wsd: constant, and down linearly over
    the last fifth; constant.
    """
    warmup = max(1, round(config.warmup * total))
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        left = (total - step) / max(1.0, 0.2 * total)
        return config.final_lr + (1 - config.final_lr) * min(1.0, left)
    done = (step - warmup) / max(1, total - warmup)
    return config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def set_rate(every: Iterable[torch.optim.Optimizer], fraction: float) -> None:
    for optimizer in every:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * fraction
