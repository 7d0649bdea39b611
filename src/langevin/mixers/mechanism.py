"""What a q,k,v mixer is: hooks around a kernel family, so that a mixer says only what is its own.

B batch, H heads, Q queries, K keys, D head width. Keys and values may have fewer heads than queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langevin.errors import UsageError
from langevin.kernels import banded, reference, sdpa
from langevin.kernels.view import View, as_many_heads, wide
from langevin.mixers import alibi
from langevin.mixers.spec import Spec

Parameters = dict[str, Tensor]
_SHARE = 16.0
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Geometry:
    """Where a mechanism stands in a model."""

    heads: int
    head_dim: int
    kv_heads: int
    layer: int = 0
    depth: int = 4
    train_length: int = 1024
    scale: float = None  # type: ignore[assignment]  # of q·k: 1/√d unless the host model has another
    alibi: bool = False  # whether -m_h |i - j| is added to the logits

    def __post_init__(self) -> None:
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a mechanism is called with."""

    q_BHQD: Tensor
    k_BHKD: Tensor
    v_BHKD: Tensor
    view: View
    p: Parameters  # the learned scalars
    geometry: Geometry
    past_queries: Tensor | None = None  # (B, H, K - Q, D), for a mechanism that needs them
    dropout: float = 0.0


def in_full_precision(method: Method) -> Method:
    """A method of Inputs with autocast off: it chooses the types it computes in."""

    @wraps(method)
    def run(self: Any, x: Inputs, *rest: Any) -> Any:
        with torch.autocast(x.q_BHQD.device.type, enabled=False):
            return method(self, x, *rest)

    return run  # type: ignore[return-value]


DIRECTIONS = ("causal", "bidirectional")


class Mechanism:
    """A q,k,v mixer. Subclasses are frozen dataclasses whose fields are the spec's keys."""

    name: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()  # specs that show its variants, for check and tests
    needs_past_queries: ClassVar[bool] = False  # a key-value cache alone cannot continue it
    recurrent: ClassVar[bool] = False  # `advance` continues from a state of constant size
    directions: ClassVar[tuple[str, ...]] = DIRECTIONS  # the forms it has
    has_alibi: ClassVar[bool] = False  # it has logits, and adds the penalty where the geometry asks for it

    @property
    def has_dropout(self) -> bool:
        """Whether dropping weights at random in training is defined."""
        return False

    @property
    def takes_blocks(self) -> bool:
        """Whether queries that see each other may go on from a key-value cache, and a text may come twice
        in one row: nothing but keys and values counts, wherever they stand."""
        return not self.needs_past_queries

    def parameters(self, geometry: Geometry) -> Parameters:
        """Learned scalars with their initial values; they stay in float32."""
        return {}

    def attend(self, x: Inputs) -> Tensor:
        """The mixed values, by the fastest exact way."""
        raise NotImplementedError(f"{type(self).__name__} must say how it attends")

    def weights(self, x: Inputs) -> Tensor:
        """The explicit (B, H, Q, K) weights."""
        raise NotImplementedError(f"{type(self).__name__} must say what its weights are")

    def advance(self, x: Inputs, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Mix new tokens after those summed up in `state`; the view covers both."""
        raise NotImplementedError(f"{type(self).__name__} keeps keys and values, not a state")

    def learned(self, p: Parameters, geometry: Geometry) -> Parameters:
        """The learned scalars in the terms of the formula, for reports."""
        return dict(p)

    def state_size(self, geometry: Geometry, length: int) -> int:
        """Numbers kept per sequence to decode the next token after `length` tokens."""
        return 2 * length * geometry.kv_heads * geometry.head_dim


class SoftmaxMechanism(Mechanism):
    """w_ij = softmax_j( τ_i ( q_i·k_j + κ_j - (α/2)(i - j)² ) - m_h |i - j| ).

    The hooks `scale`, `key_offset` and `decay` give τ, κ and α; plain softmax overrides none.
    m is zero but with alibi positions.
    """

    has_alibi = True

    @property
    def has_dropout(self) -> bool:
        return not self.decay

    @property
    def takes_blocks(self) -> bool:
        return not self.decay

    def scale(self, x: Inputs) -> float | Tensor:
        """τ: a number, or a tensor that broadcasts to (B, H, Q, 1)."""
        return x.geometry.scale

    def key_offset(self, x: Inputs) -> Tensor | None:
        """κ_j as (B, H, K, 1)."""
        return None

    @property
    def decay(self) -> float:
        """α."""
        return 0.0

    def attend(self, x: Inputs) -> Tensor:
        if self.decay:
            return self._attend_in_band(x)
        q, k, v, tau, offset = x.q_BHQD, x.k_BHKD, x.v_BHKD, self.scale(x), self.key_offset(x)
        width, with_alibi = v.shape[-1], x.geometry.alibi
        if offset is not None or with_alibi:
            q, k, v = (as_computed(y) for y in (q, k, v))
        if offset is not None:
            q, k = with_key_offset(q, k, offset)
        if isinstance(tau, Tensor) or (with_alibi and q.dtype != torch.bfloat16):
            # Rounded once. A kernel's scale would round positions, and slopes over a small one overflow
            # float16; any other number is left to the kernel.
            q, tau = (q.to(wide(q.dtype)) * tau).to(q.dtype), 1.0
        scale, bias = float(tau), None
        if with_alibi and x.view.causal:
            q, k = alibi.with_columns(q, k, x.view, scale)
        elif with_alibi:
            bias = alibi.bias(x.view, x.geometry.heads, q.dtype).to(q.dtype)
        if q.shape[-1] > width:
            v = F.pad(v, (0, q.shape[-1] - width))
        return sdpa.attention(q, k, v, x.view, scale, x.dropout, bias)[..., :width]

    @in_full_precision
    def _attend_in_band(self, x: Inputs) -> Tensor:
        dtype = wide(x.q_BHQD.dtype)
        q, k, v = (as_many_heads(y.to(dtype), x.q_BHQD) for y in (x.q_BHQD, x.k_BHKD, x.v_BHKD))
        in_full = x.view.dense_BQK is not None or torch.compiler.is_exporting()
        if in_full or not x.view.whole:  # a few last queries are cheap in full, too
            w = self.weights(replace(x, q_BHQD=q, k_BHKD=k))
            return (w @ v).to(x.v_BHKD.dtype)
        tau = torch.as_tensor(self.scale(x), device=q.device).to(dtype)
        offset = self.key_offset(x)
        if offset is not None:
            q, k = with_key_offset(q, k, as_many_heads(offset, q))
        penalty = (self.decay / 2 * tau).expand(*q.shape[:-1], 1)[..., 0]
        slopes = alibi.slopes(x.geometry.heads, q.device) if x.geometry.alibi else None
        return banded.attention(q * tau, k, v, penalty, x.view, slopes).to(x.v_BHKD.dtype)

    @in_full_precision
    def weights(self, x: Inputs) -> Tensor:
        q, k, offset = x.q_BHQD, as_many_heads(x.k_BHKD, x.q_BHQD), self.key_offset(x)
        offset = None if offset is None else as_many_heads(offset, q)
        z = reference.scores(q, k, x.view, self.scale(x), offset, self.decay)
        if x.geometry.alibi:
            z = z + alibi.bias(x.view, x.geometry.heads, z.dtype)
        w = reference.softmax_weights(z, x.view)
        return x.view.silence_padding(w) if self.decay else w  # as the band does


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

    def forward(self, y_BHLD: Tensor) -> Tensor:
        for config, scalars in zip(self.configs, self.scalars, strict=True):
            # None draws from torch's global stream, which gradient checkpointing replays.
            y_BHLD = config.apply(y_BHLD, scalars(), self.training, None)
        return y_BHLD


def as_computed(x: Tensor) -> Tensor:
    """x in the precision that autocast will give it: added columns must be made for that one."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def with_key_offset(q_BHQD: Tensor, k_BHKD: Tensor, offset_BHK1: Tensor) -> tuple[Tensor, Tensor]:
    """Columns such that q'·k' = q·k + κ. Half precision spends three columns on κ so that it loses
    nothing against float32, and shares it between q and k to stay in the range of float16; the width
    becomes a multiple of 8, as fused kernels want it."""
    parts, rest = [], offset_BHK1 / _SHARE
    for _ in range(1 if k_BHKD.dtype in (torch.float32, torch.float64) else 3):
        part = rest.to(k_BHKD.dtype)
        parts.append(part)
        rest = rest - part.to(rest.dtype)
    extra = len(parts)
    fill = -(q_BHQD.shape[-1] + extra) % 8
    share = torch.full_like(q_BHQD[..., :1], _SHARE).expand(*q_BHQD.shape[:-1], extra)
    q = F.pad(torch.cat([q_BHQD, share], -1), (0, fill))
    k = F.pad(torch.cat([k_BHKD, *parts], -1), (0, fill))
    return q, k


def per_head(x_H: Tensor) -> Tensor:
    """(H,) -> (H, 1, 1), to broadcast over queries and channels."""
    return x_H[:, None, None]


def initial(value: float, *shape: int) -> Tensor:
    """The start of a learned scalar, in float64; a module keeps it in float32."""
    return torch.full(shape, value, dtype=torch.float64)


def only_mechanism(spec: Spec, alibi: bool) -> Mechanism:
    """The spec's mixer, which must work on q, k and v, and have alibi positions where they are wanted."""
    if not isinstance(spec.mixer, Mechanism):
        raise UsageError(
            f"{spec.mixer.name} mixes tokens without q, k and v",
            "Use it as a module: langevin.mixers.build(spec, width=..., heads=...).",
        )
    if alibi and not spec.mixer.has_alibi:
        raise no_alibi(spec)
    return spec.mixer


def no_alibi(spec: Spec) -> UsageError:
    return UsageError(
        f"{spec.mixer.name} has no logits from which alibi positions could take away",
        "Choose rope, sinusoidal, learned or no positions, or a mixer with softmax or sigmoid weights.",
    )


def check_heads(width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise UsageError(
            f"{heads} heads do not divide a width of {width}",
            f"Choose a number of heads that divides {width}.",
        )
