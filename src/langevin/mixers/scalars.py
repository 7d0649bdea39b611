"""What a mixer learns besides matrices, as modules: its scalars, and the output wrappers with theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from langevin.mixers.mechanism import Geometry, Parameters
from langevin.mixers.spec import Spec


class Scalars(nn.Module):
    """Learned scalars. They are float32, or float64 in a model of float64, have their own initial values,
    and want no weight decay. Calling the module gives them by name, so that hooks on it are heard."""

    def __init__(self, config: Any, geometry: Geometry) -> None:
        super().__init__()
        self.config, self.geometry = config, geometry
        for name, value in self.start().items():
            self.register_parameter(name, nn.Parameter(value.float()))

    def start(self) -> Parameters:
        """The initial values."""
        start: Parameters = self.config.parameters(self.geometry)
        return start

    def forward(self) -> Parameters:
        return dict(self.named_parameters(recurse=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Scalars:
        def fn_in_float32(x: Tensor) -> Tensor:
            moved = fn(x)
            if moved.dtype in (torch.float16, torch.bfloat16):
                return x.to(device=moved.device, dtype=torch.float32)
            return moved

        return super()._apply(fn_in_float32, recurse)


class Wrappers(nn.Module):
    """The output wrappers of a spec, applied in order to (B, H, L, D)."""

    def __init__(self, spec: Spec, geometry: Geometry) -> None:
        super().__init__()
        self.configs = spec.wrappers
        self.scalars = nn.ModuleList(Scalars(w, geometry) for w in spec.wrappers)
        # None draws from torch's global stream, which gradient checkpointing replays.
        self.generator: torch.Generator | None = None

    def forward(self, y_BHLD: Tensor) -> Tensor:
        for config, scalars in zip(self.configs, self.scalars, strict=True):
            y_BHLD = config.apply(y_BHLD, scalars(), self.training, self.generator)
        return y_BHLD
