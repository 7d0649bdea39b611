"""A mechanism at work: on q, k, v (`QKV`), and as a module x -> x with projections, positions and cache.

B batch, H heads, L tokens, K keys (cached ones included), D head width, W model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from langevin.errors import UsageError
from langevin.kernels.view import View, as_many_heads, wide
from langevin.mixers.mechanism import Geometry, Inputs, Mechanism, Parameters
from langevin.mixers.spec import Spec

Positions = Literal["none", "rope", "alibi"]
ROPE_BASE = 10_000.0


def only_mechanism(spec: Spec) -> Mechanism:
    """The spec's mixer, which must work on q, k and v."""
    if not isinstance(spec.mixer, Mechanism):
        raise UsageError(
            f"{spec.mixer.name} mixes tokens without q, k and v",
            "Use it as a module: langevin.mixers.build(spec, width=..., heads=...).",
        )
    return spec.mixer


def no_alibi(spec: Spec) -> UsageError:
    return UsageError(
        f"{spec.mixer.name} has no logits from which alibi positions could take away",
        "Choose rope, sinusoidal, learned or no positions, or a mixer with softmax or sigmoid weights.",
    )


class Scalars(nn.Module):
    """Learned scalars. They stay in float32 when the model is cast to half precision, have their own
    initial values, and want no weight decay."""

    def __init__(self, values: Parameters) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.float()))

    def as_dict(self) -> Parameters:
        return dict(self.named_parameters(recurse=False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Scalars:
        def fn_in_float32(x: Tensor) -> Tensor:
            moved = fn(x)
            if moved.dtype in (torch.float16, torch.bfloat16):
                return x.to(moved.device)
            return moved

        return super()._apply(fn_in_float32, recurse)


class QKV(nn.Module):
    """A spec's mechanism and wrappers, with their learned scalars, on q, k and v."""

    def __init__(self, spec: Spec, geometry: Geometry) -> None:
        super().__init__()
        self.spec = spec
        self.geometry = geometry
        self.mechanism = only_mechanism(spec)
        if geometry.alibi and not self.mechanism.has_alibi:
            raise no_alibi(spec)
        self.scalars = Scalars(spec.mixer.parameters(geometry))
        self.wrappers = Wrappers(spec, geometry)

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHKD: Tensor,
        v_BHKD: Tensor,
        view: View,
        past_queries: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        p = self.scalars.as_dict()
        x = Inputs(q_BHLD, k_BHKD, v_BHKD, view, p, self.geometry, past_queries, dropout)
        y = self.mechanism.attend(x)
        return self.wrappers(y)

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, view: View, state: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        p = self.scalars.as_dict()
        y, state = self.mechanism.advance(Inputs(q, k, v, view, p, self.geometry), state)
        return self.wrappers(y), state

    def reference(
        self,
        q_BHLD: Tensor,
        k_BHKD: Tensor,
        v_BHKD: Tensor,
        view: View,
        past_queries: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output by explicit weights, and the weights."""
        p = self.scalars.as_dict()
        x = Inputs(q_BHLD, k_BHKD, v_BHKD, view, p, self.geometry, past_queries)
        w = self.mechanism.weights(x).to(v_BHKD.dtype)
        return self.wrappers(w @ as_many_heads(v_BHKD, q_BHLD)), w

    def learned(self) -> Parameters:
        """Learned scalars in the terms of the formula."""
        return self.mechanism.learned(self.scalars.as_dict(), self.geometry)

    def extra_repr(self) -> str:
        return str(self.spec)


class Wrappers(nn.Module):
    """The output wrappers of a spec, applied in order to (B, H, L, D)."""

    def __init__(self, spec: Spec, geometry: Geometry) -> None:
        super().__init__()
        self.configs = spec.wrappers
        self.scalars = nn.ModuleList(Scalars(w.parameters(geometry)) for w in spec.wrappers)
        # None draws from torch's global stream, which gradient checkpointing replays.
        self.generator: torch.Generator | None = None

    def forward(self, y_BHLD: Tensor) -> Tensor:
        for config, scalars in zip(self.configs, self.scalars, strict=True):
            assert isinstance(scalars, Scalars)
            y_BHLD = config.apply(y_BHLD, scalars.as_dict(), self.training, self.generator)
        return y_BHLD


@dataclass
class Cache:
    """What a mixer remembers between calls: keys and values, or a state of constant size."""

    length: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    state: tuple[Tensor, ...] | None = None

    def append(self, name: str, x_BHLD: Tensor) -> Tensor:
        past = self.tensors.get(name)
        self.tensors[name] = x_BHLD if past is None else torch.cat([past, x_BHLD], -2)
        return self.tensors[name]


class Attention(nn.Module):
    """x -> x: project to q, k, v, place (RoPE or ALiBi), mix, project back."""

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
    ) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if heads < 1 or width % heads:
            raise UsageError(
                f"{heads} heads do not divide a width of {width}",
                f"Choose a number of heads that divides {width}.",
            )
        if heads % kv_heads:
            raise UsageError(f"{kv_heads} key heads do not divide {heads} query heads")
        if positions not in get_args(Positions):
            raise UsageError(f"positions={positions!r} must be 'none', 'rope' or 'alibi'")
        d = width // heads
        if positions == "rope" and d % 2:
            raise UsageError(f"rope needs an even head width, not {d}")
        self.width, self.heads, self.kv_heads, self.head_dim = width, heads, kv_heads, d
        self.causal, self.window, self.positions, self.dropout = causal, window, positions, dropout
        geometry = Geometry(heads, d, kv_heads, layer, depth, max_length, alibi=positions == "alibi")
        self.mixer = QKV(spec, geometry)
        if dropout and not self.mixer.mechanism.has_dropout:
            raise UsageError(f"dropout is not defined for {spec}", "Use dropout=0.")
        self.q = nn.Linear(width, heads * d, bias=False)
        self.k = nn.Linear(width, kv_heads * d, bias=False)
        self.v = nn.Linear(width, kv_heads * d, bias=False)
        self.out = nn.Linear(heads * d, width)

    @property
    def spec(self) -> Spec:
        return self.mixer.spec

    def new_cache(self) -> Cache:
        return Cache()

    def state_size(self, length: int) -> int:
        """Numbers kept per sequence after `length` tokens."""
        kept = length if self.window is None else min(length, self.window)
        mechanism, geometry = self.mixer.mechanism, self.mixer.geometry
        if self.window is not None and mechanism.needs_past_queries:
            return kept * self.head_dim * (2 * self.kv_heads + self.heads)
        return mechanism.state_size(geometry, kept)

    def forward(
        self,
        x_BLW: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Mixed x, or (mixed x, weights). Masks cover all keys, those in the cache included."""
        check_input(x_BLW, self.width)
        L = x_BLW.shape[1]
        if cache is not None and not self.causal:
            raise UsageError(
                "a bidirectional mixer cannot continue from a cache",
                "Build it with causal=True, or pass the whole sequence.",
            )
        past = cache.length if cache is not None else 0
        q, k, v = self._project(x_BLW, past)
        view = View.of(
            L,
            past + L,
            causal=self.causal,
            device=x_BLW.device,
            window=self.window,
            key_padding_mask=key_padding_mask,
            documents=documents,
            batch=x_BLW.shape[0],
        )
        y, w = self._mix(q, k, v, view, cache, return_weights)
        out = self.out(y.transpose(1, 2).flatten(-2))
        return (out, w) if return_weights else out

    def _project(self, x_BLW: Tensor, past: int) -> tuple[Tensor, Tensor, Tensor]:
        B, L, _ = x_BLW.shape
        q = self.q(x_BLW).view(B, L, self.heads, self.head_dim).transpose(1, 2)
        k = self.k(x_BLW).view(B, L, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x_BLW).view(B, L, self.kv_heads, self.head_dim).transpose(1, 2)
        if self.positions == "rope":
            here = torch.arange(past, past + L, device=x_BLW.device)
            cos, sin = rotary(here, self.head_dim, x_BLW.dtype)
            q, k = turn(q, cos, sin), turn(k, cos, sin)
        return q, k, v

    def _mix(
        self, q: Tensor, k: Tensor, v: Tensor, view: View, cache: Cache | None, weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        mechanism = self.mixer.mechanism
        past_queries = None
        if cache is not None:
            cache.length = view.keys
            if mechanism.recurrent and self.window is None and not weights:
                y, cache.state = self.mixer.advance(q, k, v, view, cache.state)
                return y, None
            k, v = cache.append("k", k), cache.append("v", v)
            if mechanism.needs_past_queries:
                past_queries = cache.append("q", q)[..., : -q.shape[-2], :]
            if self.window is not None:
                view, k, v, past_queries = self._forget(view, k, v, past_queries, cache)
        if weights:
            return self.mixer.reference(q, k, v, view, past_queries)
        dropout = self.dropout if self.training else 0.0
        return self.mixer(q, k, v, view, past_queries, dropout), None

    def _forget(
        self, view: View, k: Tensor, v: Tensor, past_queries: Tensor | None, cache: Cache
    ) -> tuple[View, Tensor, Tensor, Tensor | None]:
        """Drop the keys that have left the window of every query, now and for later calls."""
        assert self.window is not None
        keep = min(k.shape[-2], view.queries + self.window - 1)
        k, v = k[..., -keep:, :], v[..., -keep:, :]
        if past_queries is not None:
            past_queries = past_queries[..., past_queries.shape[-2] - (keep - view.queries) :, :]
        for name, x in cache.tensors.items():
            cache.tensors[name] = x[..., -self.window :, :]
        return view.last(keep), k, v, past_queries


def check_input(x_BLW: Tensor, width: int) -> None:
    if x_BLW.ndim != 3 or x_BLW.shape[2] != width:
        raise UsageError(f"x has shape {tuple(x_BLW.shape)}, expected (batch, tokens, {width})")


def rotary(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position · base^(-2c/width), (..., L, width/2), in float32 or better."""
    dtype = wide(dtype)
    channel = torch.arange(0, width, 2, device=positions.device, dtype=dtype)
    angle = positions[..., None].to(dtype) * ROPE_BASE ** (-channel / width)
    return angle.cos(), angle.sin()


def turn(x_BHLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: channel pairs (c, c + D/2) turned by their angle."""
    a, b = x_BHLD.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BHLD.dtype)
