"""Parameter groups, optimisers, the learning-rate schedule, and one guarded update of the weights."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from langevin.mixers.mechanism import Scalars
from langevin.settings import TrainConfig
from langevin.training.parallel import like, own


def groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """matrices: hidden weights of two dimensions; embeddings, and stems of images; free: biases, norms and
    learned scalars, which want no weight decay. Shared weights are counted once."""
    free = {id(p) for m in model.modules() if isinstance(m, Scalars) for p in m.parameters()}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.Conv2d)}
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
    Moments are there from the start, for a checkpoint to be read into. Of a model that is spread over
    processes each updates the rows that it holds.
    """
    parts = {kind: [own(p) for p in parameters] for kind, parameters in groups(model).items()}
    device = next(model.parameters()).device
    decayed = parts["embeddings"] + (parts["matrices"] if config.optimizer == "adamw" else [])

    def group(parameters: list[Tensor], peak: float, decay: float) -> dict[str, Any]:
        rate = torch.tensor(peak, dtype=torch.float32, device=device)
        return {"params": parameters, "weight_decay": decay, "lr": rate, "peak": peak}

    adamw = torch.optim.AdamW(
        [group(decayed, config.lr, config.weight_decay), group(parts["free"], config.lr, 0.0)],
        betas=(0.9, config.beta2),
        fused=True,
        capturable=device.type == "cuda",
    )
    for p in decayed + parts["free"]:
        moments = {name: torch.zeros_like(p, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        adamw.state[p] = {"step": torch.zeros((), device=device), **moments}
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
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"momentum_buffer": torch.zeros_like(p, requires_grad=False)}

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
        momenta = [self.state[p]["momentum_buffer"] for p in same]
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

    The average with decay d is at every step t the mean of the weights w seen so far, and of nothing else:

        a_t = Σ_{i=1..t} d^{t-i} w_i / Σ_{i=1..t} d^{t-i} = a_{t-1} + (w_t - a_{t-1}) (1 - d) / (1 - d^t)
    """

    PATIENCE = 2000

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.parameters = dict(model.named_parameters())
        self.held = [own(p) for p in self.parameters.values()]
        self.optimizers = optimizers(model, config)
        self.clip, self.ema = config.clip, config.ema
        self.spread = any(x is not p for x, p in zip(self.held, self.parameters.values(), strict=True))
        device = self.held[0].device
        self.norms = torch.zeros(2, device=device)  # sum and number of gradient norms since they were read
        self.skipped = torch.zeros(2, device=device)
        half = config.precision == "fp16"
        self.scale = torch.tensor(65536.0, device=device) if half else None
        self.good = torch.zeros((), device=device)
        self.averaged = torch.zeros((), dtype=torch.float64, device=device)  # steps the average is made of
        self.average: list[Tensor] | None = None
        if config.ema:
            self.average = [x.detach().clone() for x in self.held]

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a run that goes on must have besides its weights: counters, moments and the average."""
        counters = {"skipped": self.skipped, "good": self.good, "averaged": self.averaged}
        kept = {"counters": counters if self.scale is None else {**counters, "scale": self.scale}}
        names = dict(zip(self.held, self.parameters, strict=True))
        for i, optimizer in enumerate(self.optimizers):
            kept[f"optimizer-{i}"] = {
                f"{names[p]}.{key}": like(x, self.parameters[names[p]])
                for p, state in optimizer.state.items()
                for key, x in state.items()
            }
        if self.average is not None:
            average = zip(self.parameters.items(), self.average, strict=True)
            kept["average"] = {name: like(x, p) for (name, p), x in average}
        return kept

    @torch.no_grad()
    def __call__(self, times: Tensor | None = None) -> None:
        """Update the weights by their gradients, or by so many times those."""
        for x, p in zip(self.held, self.parameters.values(), strict=True):
            x.grad = None if p.grad is None else own(p.grad)
        gradients = [x.grad for x in self.held if x.grad is not None]
        if times is not None:
            torch._foreach_mul_(gradients, times)
        norm = nn.utils.get_total_norm(gradients)
        if self.spread:  # each process has the norm of what it holds
            squared = norm.square()
            dist.all_reduce(squared)
            norm = squared.sqrt()
        if self.scale is not None:
            norm = norm / self.scale
        bad = (~norm.isfinite()).float()
        self.norms += torch.stack([torch.where(bad > 0, 0.0, norm), 1 - bad])
        divide = (norm / self.clip).clamp_min(1.0)
        if self.scale is not None:
            divide = divide * self.scale
        for optimizer in self.optimizers:
            optimizer.grad_scale, optimizer.found_inf = divide, bad  # type: ignore[attr-defined]
            optimizer.step()
        if self.average is not None:  # as far as the weights moved: not at all where a step is left out
            self.averaged += 1 - bad
            share = (1 - self.ema) / -torch.expm1(self.averaged * math.log(self.ema))
            difference = torch._foreach_sub(self.held, self.average)
            torch._foreach_mul_(difference, torch.where(bad > 0, 0.0, share).float())
            torch._foreach_add_(self.average, difference)
        self.skipped.copy_(torch.stack([self.skipped[0] + bad, (self.skipped[1] + bad) * bad]))
        if self.scale is not None:
            self.good.copy_((self.good + 1) * (1 - bad))
            full = (self.good >= self.PATIENCE).float()
            self.scale.mul_((1 + full) * (1 - bad / 2)).clamp_(1.0, 2.0**24)
            self.good.mul_(1 - full)

    def mean_norm(self) -> float:
        """The mean norm of the gradient before clipping since it was last asked for."""
        total, steps = self.norms.tolist()
        self.norms.zero_()
        return total / steps if steps else math.nan

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The average in the place of the weights, where there is one."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for x, average in zip(self.held, self.average or (), strict=False):
            weights = x.clone()
            x.copy_(average)
            average.copy_(weights)

    def forget_gradients(self) -> None:
        for x, p in zip(self.held, self.parameters.values(), strict=True):
            x.grad = p.grad = None
