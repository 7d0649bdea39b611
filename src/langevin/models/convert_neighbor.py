"""Neighbour diffusion in the place of an attention module of a transformers model.

B batch, Q new tokens, K all tokens (cached ones included), W model width.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from langevin.errors import UsageError
from langevin.kernels.view import View
from langevin.mixers.neighbor import NeighborMixer
from langevin.models.convert_attention import view_of


class NeighborAttention(nn.Module):
    """Takes the calls meant for an attention module; its projections are gone, the mixer works on x itself.

    A cache keeps the inputs x in the place of keys. A step recomputes the mixer on the last inputs it can
    hear, which is exact: what lies further back cannot reach the new tokens.
    """

    def __init__(
        self, mixer: NeighborMixer, config: Any, layer: int | None, names: tuple[str, ...]
    ) -> None:
        """names are those of the positional arguments that callers pass, the input first."""
        super().__init__()
        self.langevin, self.config, self.layer_idx, self.names = mixer, config, layer, names
        self.is_causal = mixer.causal

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if given.get("output_attentions") or getattr(self, "langevin_weights", False):
            raise UsageError(
                "neighbor has no attention weights", "Call the model without output_attentions."
            )
        if given.get("is_causal") not in (None, self.is_causal):
            raise UsageError(
                f"this neighbor mixer was built with causal={self.is_causal}",
                "Set config.is_causal before converting.",
            )
        x_BQW = self.langevin.noised(given[self.names[0]])
        cache = next((v for v in given.values() if isinstance(v, Cache)), None)
        x_BKW = x_BQW if cache is None else self._extend(cache, x_BQW)
        B, Q, K = x_BQW.shape[0], x_BQW.shape[1], x_BKW.shape[1]
        view = view_of(given.get("attention_mask"), B, Q, K, self.is_causal, x_BQW.device, given)
        if Q < K:
            view = self._near(view)
        return self.langevin.mix(x_BKW[:, -view.keys :], view)[:, -Q:], None

    def _extend(self, cache: Cache, x_BQW: Tensor) -> Tensor:
        """All inputs so far, the new ones stored."""
        keys, _ = cache.update(x_BQW[:, None], x_BQW[:, None, :, :0], self.layer_idx)
        if type(cache.layers[self.layer_idx]) is not DynamicLayer:
            raise UsageError(
                f"neighbor cannot continue from a {type(cache).__name__} of "
                f"{type(cache.layers[self.layer_idx]).__name__}",
                "Decode with a DynamicCache of full layers, the default.",
            )
        return keys[:, 0]

    def _near(self, view: View) -> View:
        """The view of the inputs that the new tokens can hear on each other."""
        if not view.free or view.starts_BQ is not None:
            raise UsageError(
                "neighbor continues from a cache with plain or padded text only",
                "Pass windowed or packed text in one piece, with use_cache=False.",
            )
        near = min(view.keys, view.queries + sum(self.langevin.config.distances))
        real = None if view.real_BK is None else view.real_BK[:, -near:]
        return View.of(near, near, causal=view.causal, device=view.device, key_padding_mask=real)


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the positional parameters of a module's forward, or of the one it stands for."""
    if isinstance(module, NeighborAttention):
        return module.names
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
