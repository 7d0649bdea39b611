"""Output wrappers: what happens to a head's output y before the output projection.

    drift(kind='gain')   y (1 + γ_h)                          γ learned per head, starting at 0
    drift(kind='gate')   y + σ(γ) ⊙ (y - b)                    γ and b learned per head and channel
    noise                y + std · ε,  ε ~ N(0, 1)             in training only, unless eval=True

Drift is affine in y, so `langevin.fold` moves it into the output projection: it changes how a model trains,
never what it can express. (The drift-diffusion GPT-2 study)
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.errors import UsageError
from langevin.mixers.mechanism import Geometry, Parameters, initial, per_head
from langevin.mixers.spec import register_wrapper

GATE_START = -4.0  # σ(-4) = 0.018: almost the bare mixer
NOISE_START = 0.01
Generator = torch.Generator | None


class Wrapper:
    """An output wrapper; subclasses are frozen dataclasses whose fields are the spec's keys."""

    name: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()  # specs that show its variants, for check and tests

    def parameters(self, geometry: Geometry) -> Parameters:
        return {}

    def learned(self, p: Parameters) -> Parameters:
        """The learned scalars in the terms of the formula, for reports."""
        return dict(p)

    def apply(self, y_BHLD: Tensor, p: Parameters, training: bool, generator: Generator) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must say what it does to y")


@register_wrapper("drift")
@dataclass(frozen=True)
class Drift(Wrapper):
    kind: Literal["gain", "gate"] = "gain"
    gain: float | Literal["head"] = "head"
    gate: float | Literal["channel"] = "channel"
    baseline: float | Literal["channel"] = "channel"

    examples = ("softmax+drift", "softmax+drift(kind='gate')")

    def __post_init__(self) -> None:
        if self.kind == "gain" and (self.gate, self.baseline) != ("channel", "channel"):
            raise UsageError("drift(kind='gain') has no gate or baseline", "Use kind='gate'.")
        if self.kind == "gate" and self.gain != "head":
            raise UsageError("drift(kind='gate') has no gain", "Use kind='gain', the default.")

    def parameters(self, geometry: Geometry) -> Parameters:
        channels = (geometry.heads, geometry.head_dim)
        if self.kind == "gain":
            return {"gain": initial(0.0, geometry.heads)} if self.gain == "head" else {}
        p = {}
        if self.gate == "channel":
            p["gate"] = initial(GATE_START, *channels)
        if self.baseline == "channel":
            p["baseline"] = initial(0.0, *channels)
        return p

    def learned(self, p: Parameters) -> Parameters:
        return {name: x.sigmoid() if name == "gate" else x for name, x in p.items()}

    def affine(self, p: Parameters) -> tuple[Tensor | float, Tensor | float]:
        """(a, c) with y -> a ⊙ y + c; each a number or broadcasting to (H, 1, D)."""
        if self.kind == "gain":
            return 1 + (per_head(p["gain"]) if "gain" in p else float(self.gain)), 0.0
        fixed = 0.0 if isinstance(self.gate, str) else (1 + math.tanh(self.gate / 2)) / 2
        gate = p["gate"][:, None, :].sigmoid() if "gate" in p else fixed
        baseline = p["baseline"][:, None, :] if "baseline" in p else float(self.baseline)
        return 1 + gate, -gate * baseline

    def apply(self, y_BHLD: Tensor, p: Parameters, training: bool, generator: Generator) -> Tensor:
        a, c = self.affine(p)
        return (y_BHLD * a + c).to(y_BHLD.dtype)


@register_wrapper("noise")
@dataclass(frozen=True)
class Noise(Wrapper):
    std: float | Literal["head", "channel"] = 0.1
    eval: bool = False

    examples = ("softmax+noise", "softmax+noise(std='channel')")

    def __post_init__(self) -> None:
        if not isinstance(self.std, str) and self.std < 0:
            raise UsageError(f"noise(std={self.std}) must be 0 or more")

    def parameters(self, geometry: Geometry) -> Parameters:
        if not isinstance(self.std, str):
            return {}
        shape = (geometry.heads, 1 if self.std == "head" else geometry.head_dim)
        return {"std": initial(math.log(math.expm1(NOISE_START)), *shape)}  # softplus^-1

    def learned(self, p: Parameters) -> Parameters:
        return {name: F.softplus(x) for name, x in p.items()}

    def apply(self, y_BHLD: Tensor, p: Parameters, training: bool, generator: Generator) -> Tensor:
        if not (training or self.eval):
            return y_BHLD
        std = F.softplus(p["std"])[:, None, :] if "std" in p else float(self.std)
        noise = torch.randn(y_BHLD.shape, dtype=y_BHLD.dtype, device=y_BHLD.device, generator=generator)
        return (y_BHLD + noise * std).to(y_BHLD.dtype)
