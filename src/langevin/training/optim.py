"""Parameter groups, optimisers, the learning-rate schedule, and one guarded update of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from langevin.mixers.scalars import Scalars
from langevin.training.config import TrainConfig
from langevin.training.parallel import whole


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
    """AdamW for everything, or Muon for the matrices and AdamW for the rest.

    Learning rates are tensors on the device, so that a CUDA graph of a step reads the rate of the moment.
    """
    parts = groups(model)
    device = next(model.parameters()).device
    decayed = parts["embeddings"] + (parts["matrices"] if config.optimizer == "adamw" else [])

    def group(parameters: list[nn.Parameter], peak: float, decay: float) -> dict[str, Any]:
        rate = torch.tensor(peak, dtype=torch.float32, device=device)
        return {"params": parameters, "weight_decay": decay, "lr": rate, "peak": peak}

    adamw = torch.optim.AdamW(
        [group(decayed, config.lr, config.weight_decay), group(parts["free"], config.lr, 0.0)],
        betas=(0.9, config.beta2),
        fused=True,
        capturable=device.type == "cuda",
    )
    if config.optimizer == "adamw":
        return [adamw]
    return [adamw, Muon([group(parts["matrices"], config.muon_lr, config.weight_decay)])]


class Muon(torch.optim.Optimizer):
    """Momentum made nearly orthogonal (Jordan 2024), for the hidden matrices W.

        m ← μ m + (1 - μ) g;    u = (1 - μ) g + μ m
        W ← (1 - η λ) W - η √max(1, rows / columns) · NS(u),    NS: five Newton–Schulz iterations

    The formula of torch.optim.Muon; but matrices of one shape go through as one batch, the rate may be a
    tensor, and `grad_scale` and `found_inf` are obeyed on the device as fused AdamW does.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(self, parameters: Any, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"momentum": momentum, "weight_decay": 0.0, "lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        divide, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for same in shapes.values():
                self._update(same, group, divide, skip)

    def _update(
        self, same: list[Tensor], group: dict[str, Any], divide: Tensor | None, skip: Tensor | None
    ) -> None:
        momenta = [
            self.state[p].setdefault("momentum_buffer", torch.zeros_like(p, requires_grad=False))
            for p in same
        ]
        g = torch.stack([p.grad for p in same if p.grad is not None])
        before, old = torch.stack(same), torch.stack(momenta)
        if divide is not None:
            g = g / divide
        m = old.lerp(g, 1 - group["momentum"])
        direction = orthogonal(g.lerp(m, group["momentum"]), self.COEFFICIENTS)
        rate = group["lr"] * math.sqrt(max(1.0, g.shape[-2] / g.shape[-1]))
        after = before * (1 - group["lr"] * group["weight_decay"]) - rate * direction
        if skip is not None:
            after, m = torch.where(skip > 0, before, after), torch.where(skip > 0, old, m)
        torch._foreach_copy_(same, list(after.unbind()))
        torch._foreach_copy_(momenta, list(m.unbind()))


def orthogonal(x_NRC: Tensor, coefficients: tuple[float, float, float], iterations: int = 5) -> Tensor:
    """Each matrix with its singular values pushed towards 1, in bfloat16."""
    a, b, c = coefficients
    x = x_NRC.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(x_NRC.dtype)


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
            group["lr"].fill_(group["peak"] * fraction)


class Update:
    """One update of the weights: clip, leave out what is not finite, step, average.

    Nothing here waits for the device. Whether the gradient is finite is decided there, and the optimisers
    leave such a step out; `skipped` counts them: in all, and in a row. Under float16 the loss is multiplied
    by `scale`, which halves with every step left out and doubles after two thousand good ones.
    """

    PATIENCE = 2000

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.parameters = list(model.parameters())
        self.optimizers = optimizers(model, config)
        self.clip, self.ema = config.clip, config.ema
        device = self.parameters[0].device
        self.skipped = torch.zeros(2, device=device)
        half = config.precision == "fp16"
        self.scale = torch.tensor(65536.0, device=device) if half else None
        self.good = torch.zeros((), device=device)
        self.average: dict[str, Tensor] | None = None
        if config.ema:
            self.average = {n: p.detach().clone() for n, p in model.named_parameters()}
            self.averaged: list[Tensor] = [p for _, p in model.named_parameters()]

    @torch.no_grad()
    def __call__(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        local, norm = norm, whole(norm)
        spread = norm is not local
        if self.scale is not None:
            norm = norm / self.scale
        bad = (~norm.isfinite()).float()
        divide = (norm / self.clip).clamp_min(1.0)
        if self.scale is not None:
            divide = divide * self.scale
        if spread:  # sharded optimisers take no guard of one device: the host decides
            if not bool(bad):
                torch._foreach_div_(gradients, float(divide))
                self._step(bad)
        else:
            for optimizer in self.optimizers:
                optimizer.grad_scale, optimizer.found_inf = divide, bad  # type: ignore[attr-defined]
            self._step(bad)
        self.skipped.copy_(torch.stack([self.skipped[0] + bad, (self.skipped[1] + bad) * bad]))
        if self.scale is not None:
            self.good.copy_((self.good + 1) * (1 - bad))
            full = (self.good >= self.PATIENCE).float()
            self.scale.mul_((1 + full) * (1 - bad / 2)).clamp_(1.0, 2.0**24)
            self.good.mul_(1 - full)

    def _step(self, bad: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.average is not None:  # as far as the weights moved: not at all where a step is left out
            average = list(self.average.values())
            difference = torch._foreach_sub(self.averaged, average)
            torch._foreach_mul_(difference, (1 - self.ema) * (1 - bad))
            torch._foreach_add_(average, difference)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The average in the place of the weights, where there is one."""
        if self.average is None:
            yield
            return
        own = [p.detach().clone() for p in self.averaged]
        self._put(list(self.average.values()))
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for p, value in zip(self.averaged, weights, strict=True):
            p.copy_(value)

    def forget_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
