"""Neighbour diffusion in the place of an attention module of a transformers model."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from langevin.errors import UsageError
from langevin.mixers.neighbor import NeighborMixer
from langevin.models.attention import NeighborMixing
from langevin.models.cache import extent
from langevin.models.convert_attention import view_of


class NeighborAttention(NeighborMixing):
    """Takes the calls meant for an attention module; its projections are gone, the mixer works on x."""

    def __init__(
        self, mixer: NeighborMixer, config: Any, layer: int | None, names: tuple[str, ...]
    ) -> None:
        """names are those of the positional arguments that callers pass, the input first."""
        super().__init__(mixer)
        self.config, self.layer_idx, self.names = config, layer, names
        self.is_causal = mixer.causal

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if given.get("is_causal") not in (None, self.is_causal):
            raise UsageError(
                f"this neighbor mixer was built with causal={self.is_causal}",
                "Set config.is_causal before converting.",
            )
        x = given[self.names[0]]
        cache = next((v for v in given.values() if isinstance(v, Cache)), None)
        past, keys = extent(cache, self.layer_idx or 0, x.shape[1], whole=True)
        view = view_of(given.get("attention_mask"), x, keys, past, self.is_causal, given)
        weights = bool(given.get("output_attentions") or getattr(self, "langevin_weights", False))
        return self.mixed(x, view, cache, None, weights)


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the positional parameters of a module's forward, or of the one it stands for."""
    if isinstance(module, NeighborAttention):
        return module.names
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
