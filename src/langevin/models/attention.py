"""THE attention module: projections, positions, cache and mixer, as it is trained, decoded and checked.

    q, k, v  =  W_q x, W_k x, W_v x   (placed, and joined by those of the cache)
    y        =  W_o mix(q, k, v)

B batch, H heads, L new tokens, K keys (cached ones included), D head width, W model width.
"""

from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicSlidingWindowLayer

from langevin.errors import UsageError
from langevin.kernels.view import View, as_many_heads, readable, wide
from langevin.mixers.mechanism import (
    Geometry,
    Inputs,
    Parameters,
    Scalars,
    Wrappers,
    check_heads,
    only_mechanism,
)
from langevin.mixers.neighbor import NeighborMixer
from langevin.mixers.spec import Spec
from langevin.models.cache import StateLayer, extent, state_layer

Positions = Literal["none", "rope", "alibi"]
Rotation = tuple[Tensor, Tensor]
ROPE_BASE = 10_000.0
GRID_BASE = 100.0  # of places in an image, which are few
_HIDDEN = -1e4  # an additive mask hides a key with this or less


class QKV(nn.Module):
    """A spec's mechanism and wrappers, with their learned scalars, on q, k and v."""

    def __init__(self, spec: Spec, geometry: Geometry) -> None:
        super().__init__()
        self.spec, self.geometry = spec, geometry
        self.mechanism = only_mechanism(spec, geometry.alibi)
        self.scalars = Scalars(spec.mixer, geometry)
        self.wrappers = Wrappers(spec, geometry)

    def own_layer(self, cache: Cache | None, index: int, keeps_tokens: bool) -> StateLayer | None:
        """Where this mixer keeps what ordinary layers of keys and values have no room for.

        keeps_tokens is True where a state of constant size would not do: with a window, or for weights.
        """
        mechanism = self.mechanism
        if cache is None or not (mechanism.needs_past_queries or mechanism.recurrent):
            return None
        return state_layer(cache, index, keeps_tokens or not mechanism.recurrent)

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHKD: Tensor,
        v_BHKD: Tensor,
        view: View,
        layer: StateLayer | None = None,
        dropout: float = 0.0,
        weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Mixed values (B, H, L, D), and where wanted the weights (B, H, L, K) they were made with.

        k and v are those of all keys; of the new tokens alone where the mixer has a layer of its own.
        """
        L, past = q_BHLD.shape[-2], None
        if layer is not None and not layer.keeps_tokens:
            if weights:
                raise UsageError(
                    f"the cache of {self.spec} holds sums, and no keys that weights could be given to",
                    "Ask for weights from the first call on, or without a cache.",
                )
            x = Inputs(q_BHLD, k_BHKD, v_BHKD, in_order(view), self.scalars(), self.geometry)
            y, state = self.mechanism.advance(x, layer.state)
            layer.store(state, L)
            return self.wrappers(y), None
        if layer is not None:
            k_BHKD, v_BHKD, q = layer.extended(k_BHKD, v_BHKD, q_BHLD)
            past = q[..., : q.shape[-2] - L, :]
        if k_BHKD.shape[-2] < view.keys:  # what has left a window is gone
            view = view.last(k_BHKD.shape[-2])
        x = Inputs(q_BHLD, k_BHKD, v_BHKD, view, self.scalars(), self.geometry, past, dropout)
        if not weights:
            return self.wrappers(self.mechanism.attend(x)), None
        w = self.mechanism.weights(x).to(v_BHKD.dtype)
        return self.wrappers(F.dropout(w, dropout) @ as_many_heads(v_BHKD, q_BHLD)), w

    def learned(self) -> Parameters:
        """Learned scalars in the terms of the formula."""
        return self.mechanism.learned(self.scalars(), self.geometry)

    def extra_repr(self) -> str:
        return str(self.spec)


def visible(attention_mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
    """A mask (B or 1, 1, Q, K) as (B, Q, K), True where a key is seen. One that is added to scores may hold
    0 and large negative numbers only."""
    if attention_mask.ndim != 4 or attention_mask.shape[1:] != (1, queries, keys):
        raise UsageError(
            f"the attention mask has shape {tuple(attention_mask.shape)}, "
            f"expected (batch, 1, {queries}, {keys})",
            "Pass a (batch, tokens) mask of real tokens, or position_ids for packed documents.",
        )
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    if seen is not attention_mask and (
        not readable(seen) or not bool((seen | (attention_mask <= _HIDDEN)).all())
    ):
        raise UsageError(
            "the attention mask adds numbers to scores",
            "Pass a boolean mask; a bias on scores has no meaning for every mixer.",
        )
    return seen[:, 0].expand(batch, queries, keys)


def in_order(view: View) -> View:
    """The view without a dense mask: a state sums up text, padding and documents in their order."""
    if view.dense_BQK is None:
        return view
    real, first = view.dense_BQK.any(1), view.dense_BQK.byte().argmax(-1)
    ordered = View(view.queries, view.keys, True, view.device, view.past, None, real, first)
    if readable(real) and not torch.equal(ordered.mask_BQK, view.dense_BQK):
        raise UsageError(
            "the attention mask is not one of text, padding and documents, which a state could sum up",
            "Pass such text in one piece, with use_cache=False.",
        )
    return ordered


class Mixing(nn.Module):
    """x -> x: a mixer in its place in a model, with a view of who sees whom and a cache."""

    window: int | None = None
    mixed: Any  # (x, view, cache, rotation, whether weights are wanted) -> (x, weights or None)

    def __init__(self, mixer: Any, width: int, causal: bool) -> None:
        super().__init__()
        self.langevin = mixer
        self.width, self.causal, self.layer_idx = width, causal, mixer.geometry.layer

    @property
    def mixer(self) -> Any:
        """The mixer by itself; checkpoints know it as `langevin`, among modules of other origin."""
        return self.langevin

    @property
    def spec(self) -> Spec:
        return self.langevin.spec

    def new_cache(self) -> Cache:
        """An empty cache; transformers' own caches do as well, and several modules may share one."""
        return DynamicCache()

    def forward(
        self,
        x_BLW: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
        view: View | None = None,
        rotation: Rotation | None = None,
    ) -> Any:
        """Mixed x, or (mixed x, weights). Masks cover all keys, those in the cache included.

        A model that has made the view (and the rotation) for all its layers passes it instead of masks.
        """
        if x_BLW.ndim != 3 or x_BLW.shape[2] != self.width:
            raise UsageError(f"x has shape {tuple(x_BLW.shape)}, expected (batch, tokens, {self.width})")
        blocks = view is not None and getattr(self.spec.mixer, "takes_blocks", False)
        if cache is not None and not self.causal and not blocks:
            raise UsageError(
                "a bidirectional mixer cannot continue from a cache",
                "Build it with causal=True, or pass the whole sequence.",
            )
        if view is None:
            past, keys = extent(cache, self.layer_idx, x_BLW.shape[1], return_weights)
            view = View.of(
                x_BLW.shape[1],
                keys,
                past=past,
                causal=self.causal,
                device=x_BLW.device,
                window=self.window,
                key_padding_mask=key_padding_mask,
                documents=documents,
                batch=x_BLW.shape[0],
            )
        out, weights = self.mixed(x_BLW, view, cache, rotation, return_weights)
        return (out, weights) if return_weights else out


class HeadNorm(nn.RMSNorm):
    """Of queries or keys, which under autocast are narrower than its weights: two types have no fused
    kernel, and torch warns of that."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Attention(Mixing):
    """Project to q, k, v, place (RoPE or ALiBi), mix, project back."""

    def __init__(
        self,
        spec: Spec,
        *,
        width: int,
        heads: int,
        causal: bool,
        kv_heads: int | None = None,
        layer: int = 0,
        depth: int = 4,
        max_length: int = 1024,
        window: int | None = None,
        positions: Positions = "none",
        dropout: float = 0.0,
        qk_norm: bool = False,
    ) -> None:
        check_heads(width, heads)
        kv_heads, d = kv_heads or heads, width // heads
        if heads % kv_heads:
            raise UsageError(f"{kv_heads} key heads do not divide {heads} query heads")
        if positions not in get_args(Positions):
            raise UsageError(f"positions={positions!r} must be 'none', 'rope' or 'alibi'")
        if positions == "rope" and d % 2:
            raise UsageError(f"rope needs an even head width, not {d}")
        geometry = Geometry(heads, d, kv_heads, layer, depth, max_length, alibi=positions == "alibi")
        super().__init__(QKV(spec, geometry), width, causal)
        if dropout and not self.langevin.mechanism.has_dropout:
            raise UsageError(f"dropout is not defined for {spec}", "Use dropout=0.")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, d
        self.window, self.positions, self.dropout = window, positions, dropout
        self.q_proj = nn.Linear(width, heads * d, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * d, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * d, bias=False)
        self.o_proj = nn.Linear(heads * d, width)
        self.q_norm = HeadNorm(d, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = HeadNorm(d, eps=1e-6) if qk_norm else nn.Identity()

    def new_cache(self) -> Cache:
        if self.window is None:
            return super().new_cache()
        return Cache(layer_class_to_replicate=partial(DynamicSlidingWindowLayer, self.window))

    def state_size(self, length: int) -> int:
        """Numbers kept per sequence after `length` tokens."""
        kept = length if self.window is None else min(length, self.window)
        mechanism, geometry = self.langevin.mechanism, self.langevin.geometry
        if self.window is not None and mechanism.needs_past_queries:
            return kept * self.head_dim * (2 * self.kv_heads + self.heads)
        return mechanism.state_size(geometry, kept)

    def mixed(
        self, x_BLW: Tensor, view: View, cache: Cache | None, rotation: Rotation | None, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        L, heads = x_BLW.shape[1], (-1, self.head_dim)
        q = self.q_norm(self.q_proj(x_BLW).unflatten(-1, heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BLW).unflatten(-1, heads)).transpose(1, 2)
        v = self.v_proj(x_BLW).unflatten(-1, heads).transpose(1, 2)
        if self.positions == "rope":
            if rotation is None:
                rotation = rotary(torch.arange(L, device=q.device) + view.past, self.head_dim, q.dtype)
            q, k = apply_rotary(q, *rotation), apply_rotary(k, *rotation)
        layer = self.langevin.own_layer(cache, self.layer_idx, weights or self.window is not None)
        if cache is not None:
            keys, values = cache.update(k, v, self.layer_idx)
            k, v = (keys, values) if view.keys > L else (k, v)
        dropout = self.dropout if self.training else 0.0
        y, w = self.langevin(q, k, v, view, layer, dropout, weights)
        return self.o_proj(y.transpose(1, 2).flatten(-2)), w


class NeighborMixing(Mixing):
    """A mixer on x itself, without q, k and v."""

    def __init__(self, mixer: NeighborMixer) -> None:
        super().__init__(mixer, mixer.width, mixer.causal)

    def state_size(self, length: int) -> int:
        """The last inputs of every iteration, whatever the length."""
        return self.width * sum(self.langevin.config.state_lengths)

    def mixed(
        self, x_BLW: Tensor, view: View, cache: Cache | None, rotation: Rotation | None, weights: bool
    ) -> tuple[Tensor, None]:
        if weights:
            remedy = "It mixes neighbours directly: ask for another layer."
            raise UsageError("neighbor has no attention weights", remedy)
        if self.causal and self.langevin.config.sums:
            view = in_order(view)
        layer = None if cache is None else state_layer(cache, self.layer_idx)
        y, state = self.langevin(x_BLW, view, None if layer is None else layer.state)
        if layer is not None:
            layer.store(state, x_BLW.shape[1])
        return y, None


def rotary(positions: Tensor, width: int, dtype: torch.dtype, base: float = ROPE_BASE) -> Rotation:
    """cos and sin of position · base^(-2c/width), (..., L, width/2), in float32 or better."""
    dtype = wide(dtype)
    channel = torch.arange(0, width, 2, device=positions.device, dtype=dtype)
    angle = positions[..., None].to(dtype) * base ** (-channel / width)
    return angle.cos(), angle.sin()


def planar(
    positions: Tensor, grid: tuple[int, int], width: int, dtype: torch.dtype, turned: Any = None
) -> Rotation:
    """The same of places in a grid, (..., L, width/2): half of the channels tell the row, half the column.
    What comes behind the last place, a class token, is not turned."""
    rows, columns = grid
    place = positions % (rows * columns)
    parts = [
        (turned or rotary)(axis, width // 2, dtype, GRID_BASE)
        for axis in (place // columns, place % columns)
    ]
    cos, sin = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return cos, sin


# `rotary`, closed to the compiler: it would work out every cosine again in every layer.
angles = library.custom_op("langevin::angles", rotary, mutates_args=())
angles.register_fake(rotary)


def apply_rotary(x_BHLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: channel pairs (c, c + D/2) turned by their angle."""
    a, b = x_BHLD.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BHLD.dtype)
