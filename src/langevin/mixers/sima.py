"""SimA: attention without softmax or exponentials, linear in the number of tokens.

    w_ij = Σ_c q_ic k_jc / ( ‖q‖_ic · ‖k‖_ic ),    ‖x‖_ic = Σ |x_mc| over the tokens m that i sees

Bidirectional, the norms run over all tokens, as published. Causal, they run over the prefix: both then
depend on i alone and move onto the query, which leaves plain causal linear attention with an O(1) state.
A key-value cache does not hold past queries, so that state (or the past queries) is kept beside it.

|w_ij| <= d, and a row's total decays like 1/n; scale='n' multiplies row i by n_i to undo that.
(Koohpayegani & Pirsiavash 2024, arXiv 2206.08898; the causal form is ours)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from langevin.errors import UsageError
from langevin.kernels import linear, pointwise, reference
from langevin.kernels.view import View, as_many_heads, wide
from langevin.mixers.mechanism import Geometry, Inputs, Mechanism, in_full_precision
from langevin.mixers.spec import register

_LEAST_NORM = 1e-12


@register("sima")
@dataclass(frozen=True)
class SimA(Mechanism):
    scale: Literal["none", "n"] = "none"

    examples = ("sima", "sima(scale='n')")

    needs_past_queries = True
    recurrent = True

    @in_full_precision
    def attend(self, x: Inputs) -> Tensor:
        view = x.view
        q, k = self.normalised(x)
        v = as_many_heads(_zero_unless(view.real_BK, x.v_BHKD.to(q.dtype)), q)
        if view.causal and view.free and view.whole:
            out = linear.causal(q, k, v, view.starts_BQ)
        elif not view.causal and view.free and view.starts_BQ is not None:
            out = linear.within_documents(q, k, v, view)
        elif not view.causal and view.free:
            out = q @ (k.transpose(-1, -2) @ v)
        else:
            none = torch.zeros(1, 1, 1, dtype=q.dtype, device=q.device)
            out = pointwise.attention(q, k, v, none, view, sigmoid=False)
        return out.to(x.v_BHKD.dtype)

    @in_full_precision
    def weights(self, x: Inputs) -> Tensor:
        q, k = self.normalised(x, reference.visible_sum)
        w = (q @ k.transpose(-1, -2)).masked_fill(~x.view.mask(), 0.0)
        return w.to(x.q_BHQD.dtype)

    def normalised(
        self, x: Inputs, visible_sum: Callable[[Tensor, View], Tensor] = linear.visible_sum
    ) -> tuple[Tensor, Tensor]:
        """q_i / (‖q‖_i ‖k‖_i) and k, in float32 or better, zero at padding."""
        view, dtype = x.view, wide(x.q_BHQD.dtype)
        k = _zero_unless(view.real_BK, x.k_BHKD.to(dtype))
        every_q = x.q_BHQD if x.past_queries is None else torch.cat([x.past_queries, x.q_BHQD], -2)
        if every_q.shape[-2] != view.keys:
            raise UsageError(
                f"sima normalises by past queries too: {view.keys} keys came with "
                f"{every_q.shape[-2]} queries",
                "Pass past_queries, decode with a module's cache, or pass all queries.",
            )
        every_q = _zero_unless(view.real_BK, every_q.to(dtype))
        q = every_q[..., every_q.shape[-2] - view.queries :, :]
        q = q / _nonzero(visible_sum(every_q.abs(), view))
        q = q / _nonzero(as_many_heads(visible_sum(k.abs(), view), q))
        if self.scale == "n":
            q = q * view.visible_BQ[:, None, :, None].to(dtype)
        return q, as_many_heads(k, q)

    @in_full_precision
    def advance(self, x: Inputs, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The state is Σ k vᵀ, Σ|q| and Σ|k| of the current document."""
        if not x.view.free:
            raise UsageError(
                "sums over all earlier tokens know no window, and no mask but padding and documents",
                "Keep the tokens instead, and pass past_queries to attend.",
            )
        view, dtype = x.view, wide(x.q_BHQD.dtype)
        real = None if view.real_BK is None else view.at_queries(view.real_BK)
        q, k, v = (_zero_unless(real, y.to(dtype)) for y in (x.q_BHQD, x.k_BHKD, x.v_BHKD))
        k, v = as_many_heads(k, q), as_many_heads(v, q)
        B, H, _, D = q.shape
        if state is None:
            state = (q.new_zeros(B, H, D, v.shape[-1]), q.new_zeros(B, H, 1, D), q.new_zeros(B, H, 1, D))
        local = goes_on = None
        if view.starts_BQ is not None:  # the state belongs to the document that began before these tokens
            local = (view.starts_BQ - view.past).clamp_min(-1)
            goes_on = (local < 0)[:, None, :, None]
        outer, q_norm, k_norm = state

        def after(x_new: Tensor, x_state: Tensor) -> Tensor:
            return x_new + (x_state if goes_on is None else torch.where(goes_on, x_state, 0.0))

        q_norms = after(linear.running_sum(q.abs(), local), q_norm)
        k_norms = after(linear.running_sum(k.abs(), local), k_norm)
        q_hat = q / _nonzero(q_norms) / _nonzero(k_norms)
        if self.scale == "n":
            q_hat = q_hat * view.visible_BQ[:, None, :, None].to(dtype)
        out = after(linear.causal(q_hat, k, v, local), q_hat @ outer)
        if local is not None and goes_on is not None:
            outer = torch.where(goes_on[:, :, -1:], outer, 0.0)
            k = torch.where((local == local[:, -1:])[:, None, :, None], k, 0.0)
        outer = outer + k.transpose(-1, -2) @ v
        return out.to(x.v_BHKD.dtype), (outer, q_norms[..., -1:, :], k_norms[..., -1:, :])

    def state_size(self, geometry: Geometry, length: int) -> int:
        """The d×d sum of k vᵀ and the two norms of every head."""
        return geometry.heads * geometry.head_dim * (geometry.head_dim + 2)


def _zero_unless(real_BK: Tensor | None, x_BHKD: Tensor) -> Tensor:
    return x_BHKD if real_BK is None else torch.where(real_BK[:, None, :, None], x_BHKD, 0.0)


def _nonzero(norm: Tensor) -> Tensor:
    """A norm to divide by: a channel that is zero so far stays zero, and gradients stay finite."""
    return norm.clamp_min(_LEAST_NORM)
