"""What a q,k,v mixer is: hooks around a kernel family, so that a mixer says only what is its own.

B batch, H heads, Q queries, K keys, D head width. Keys and values may have fewer heads than queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.kernels import banded, reference, sdpa
from langevin.kernels.view import View, wide
from langevin.mixers import alibi

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Geometry:
    """Where a mechanism stands in a model."""

    heads: int
    head_dim: int
    kv_heads: int
    layer: int = 0
    depth: int = 4
    train_length: int = 1024
    scale: float | None = None
    alibi: bool = False  # whether -m_h |i - j| is added to the logits

    @property
    def sharpness(self) -> float:
        """1/√d, or the scale the host model asks for."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


class Mechanism:
    """A q,k,v mixer. Subclasses are frozen dataclasses whose fields are the spec's keys."""

    name: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()  # specs that show its variants, for check and tests
    needs_past_queries: ClassVar[bool] = False  # a key-value cache alone cannot continue it
    recurrent: ClassVar[bool] = False  # `advance` continues from a state of constant size
    has_alibi: ClassVar[bool] = False  # it has logits, and adds the penalty where the geometry asks for it

    @property
    def has_dropout(self) -> bool:
        """Whether dropping weights at random in training is defined."""
        return False

    def parameters(self, geometry: Geometry) -> Parameters:
        """Learned scalars with their initial values; they stay in float32."""
        return {}

    def attend(
        self,
        q_BHQD: Tensor,
        k_BHKD: Tensor,
        v_BHKD: Tensor,
        view: View,
        p: Parameters,
        geometry: Geometry,
        past_queries: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """The mixed values, by the fastest exact way."""
        raise NotImplementedError(f"{type(self).__name__} must say how it attends")

    def weights(
        self,
        q_BHQD: Tensor,
        k_BHKD: Tensor,
        view: View,
        p: Parameters,
        geometry: Geometry,
        past_queries: Tensor | None = None,
    ) -> Tensor:
        """The explicit (B, H, Q, K) weights."""
        raise NotImplementedError(f"{type(self).__name__} must say what its weights are")

    def advance(
        self,
        q_BHLD: Tensor,
        k_BHLD: Tensor,
        v_BHLD: Tensor,
        view: View,
        p: Parameters,
        geometry: Geometry,
        state: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
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

    τ is `sharpness`, κ `key_offset` and α `decay`: each has a hook, and plain softmax overrides none.
    m is zero but with alibi positions.
    """

    has_alibi = True

    @property
    def has_dropout(self) -> bool:
        return not self.decay

    def sharpness(
        self, q_BHQD: Tensor, k_BHKD: Tensor, view: View, p: Parameters, geometry: Geometry
    ) -> float | Tensor:
        """τ: a number, or a tensor that broadcasts to (B, H, Q, 1)."""
        return geometry.sharpness

    def key_offset(self, k_BHKD: Tensor) -> Tensor | None:
        """κ_j as (B, H, K, 1)."""
        return None

    @property
    def decay(self) -> float:
        """α."""
        return 0.0

    def attend(
        self,
        q_BHQD: Tensor,
        k_BHKD: Tensor,
        v_BHKD: Tensor,
        view: View,
        p: Parameters,
        geometry: Geometry,
        past_queries: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        if self.decay:
            return self._attend_in_band(q_BHQD, k_BHKD, v_BHKD, view, p, geometry)
        tau = self.sharpness(q_BHQD, k_BHKD, view, p, geometry)
        width = v_BHKD.shape[-1]
        offset = self.key_offset(k_BHKD)
        if offset is not None or geometry.alibi:
            q_BHQD, k_BHKD, v_BHKD = (as_computed(x) for x in (q_BHQD, k_BHKD, v_BHKD))
        if offset is not None:
            q_BHQD, k_BHKD = with_key_offset(q_BHQD, k_BHKD, offset)
        if geometry.alibi and q_BHQD.dtype != torch.bfloat16:
            # A kernel's scale would round positions, and slopes over a small one overflow float16.
            q_BHQD, tau = (q_BHQD.to(wide(q_BHQD.dtype)) * tau).to(q_BHQD.dtype), 1.0
        q_BHQD, scale = scaled(q_BHQD, tau)
        bias = None
        if geometry.alibi and view.causal:
            q_BHQD, k_BHKD = alibi.with_columns(q_BHQD, k_BHKD, view, scale)
        elif geometry.alibi:
            bias = alibi.bias(view, geometry.heads, q_BHQD.dtype).to(q_BHQD.dtype)
        if q_BHQD.shape[-1] > width:
            v_BHKD = F.pad(v_BHKD, (0, q_BHQD.shape[-1] - width))
        return sdpa.attention(q_BHQD, k_BHKD, v_BHKD, view, scale, dropout, bias)[..., :width]

    def _attend_in_band(
        self, q: Tensor, k: Tensor, v: Tensor, view: View, p: Parameters, geometry: Geometry
    ) -> Tensor:
        k, v = as_many_heads(k, q), as_many_heads(v, q)
        dtype = wide(q.dtype)
        if view.queries != view.keys:  # a few last queries: their rows are cheap in full
            w = self.weights(q.to(dtype), k.to(dtype), view, p, geometry)
            return (w @ v.to(dtype)).to(q.dtype)
        tau = torch.as_tensor(self.sharpness(q, k, view, p, geometry), device=q.device)
        tau = tau.to(dtype)
        offset = self.key_offset(k.to(dtype))
        if offset is not None:
            q, k = with_key_offset(q.to(dtype), k.to(dtype), offset)
        penalty = (self.decay / 2 * tau).expand(*q.shape[:-1], 1)[..., 0]
        slopes = alibi.slopes(geometry.heads, q.device) if geometry.alibi else None
        return banded.attention(q.to(dtype) * tau, k, v, penalty, view, slopes).to(v.dtype)

    def weights(
        self,
        q_BHQD: Tensor,
        k_BHKD: Tensor,
        view: View,
        p: Parameters,
        geometry: Geometry,
        past_queries: Tensor | None = None,
    ) -> Tensor:
        k_BHKD = as_many_heads(k_BHKD, q_BHQD)
        tau = self.sharpness(q_BHQD, k_BHKD, view, p, geometry)
        offset = self.key_offset(k_BHKD)
        z = reference.scores(q_BHQD, k_BHKD, view, tau, offset, self.decay)
        if geometry.alibi:
            z = z + alibi.bias(view, geometry.heads, z.dtype)
        return reference.softmax_weights(z, view)


def scaled(q_BHQD: Tensor, tau: float | Tensor) -> tuple[Tensor, float]:
    """q and the kernel's scale that together give τ·q: a number goes to the kernel, a tensor into q
    (multiplied in float32 and rounded once)."""
    if isinstance(tau, Tensor):
        return (q_BHQD.to(wide(q_BHQD.dtype)) * tau).to(q_BHQD.dtype), 1.0
    return q_BHQD, float(tau)


def as_computed(x: Tensor) -> Tensor:
    """x in the precision that autocast will give it: added columns must be made for that one."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def with_key_offset(q_BHQD: Tensor, k_BHKD: Tensor, offset_BHK1: Tensor) -> tuple[Tensor, Tensor]:
    """Columns such that q'·k' = q·k + κ. Half precision spends three columns on κ so that it loses
    nothing against float32; the width becomes a multiple of 8, as fused kernels want it."""
    parts, rest = [], offset_BHK1
    for _ in range(1 if k_BHKD.dtype in (torch.float32, torch.float64) else 3):
        part = rest.to(k_BHKD.dtype)
        parts.append(part)
        rest = rest - part.to(rest.dtype)
    extra = len(parts)
    fill = -(q_BHQD.shape[-1] + extra) % 8
    ones = torch.ones_like(q_BHQD[..., :1]).expand(*q_BHQD.shape[:-1], extra)
    q = F.pad(torch.cat([q_BHQD, ones], -1), (0, fill))
    k = F.pad(torch.cat([k_BHKD, *parts], -1), (0, fill))
    return q, k


def as_many_heads(x_BHKD: Tensor, q_BHQD: Tensor) -> Tensor:
    """Keys or values repeated for the query heads that share them."""
    groups = q_BHQD.shape[1] // x_BHKD.shape[1]
    return x_BHKD if groups == 1 else x_BHKD.repeat_interleave(groups, 1)


def per_head(x_H: Tensor) -> Tensor:
    """(H,) -> (H, 1, 1), to broadcast over queries and channels."""
    return x_H[:, None, None]


def initial(value: float, *shape: int) -> Tensor:
    """The start of a learned scalar, in float64; a module keeps it in float32."""
    return torch.full(shape, value, dtype=torch.float64)
