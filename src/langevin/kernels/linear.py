"""Linear attention and running sums, in chunks: O(L) time, no L×L matrix, O(1) state.

    o_i = q_i · Σ_j k_j v_jᵀ      over j <= i in the document of i

Inside a chunk the C×C scores are formed; between chunks a D×D state is carried. Documents reset the
state by a 0/1 factor and never by subtracting prefix sums, so not even a rounding error crosses a
document's border.

B batch, H heads, L tokens in N chunks of C, Q queries, K keys, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.kernels import pointwise
from langevin.kernels.view import View

_CHUNK = 128


def causal(
    q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, starts_BL: Tensor | None, strict: bool = False
) -> Tensor:
    """Σ_{first_i <= j <= i} (q_i·k_j) v_j, where starts holds first_i (None: 0); strict: j < i."""
    L = q_BHLD.shape[-2]
    q, k, v = _chunked(q_BHLD), _chunked(k_BHLD), _chunked(v_BHLD)
    inside, before, tail, links = _document_masks(L, starts_BL, q.device)
    if strict:
        inside = inside.tril(-1)
    scores = (q @ k.transpose(-1, -2)) * inside.to(q.dtype)
    out = scores @ v
    states = k.transpose(-1, -2) @ (v if tail is None else v * tail.to(v.dtype))
    carried = _carry(states, links)
    history = q @ carried
    out = out + (history if before is None else history * before.to(history.dtype))
    return _unchunked(out, L)


def within_documents(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, view: View) -> Tensor:
    """Σ_j (q_i·k_j) v_j over all j of the document of i, before and after it."""
    assert view.ends_BQ is not None
    q, k, v = (x.flip(-2) for x in (q_BHLD, k_BHLD, v_BHLD))
    starts = view.keys - 1 - view.ends_BQ.flip(-1)
    after = causal(q, k, v, starts, strict=True).flip(-2)
    return causal(q_BHLD, k_BHLD, v_BHLD, view.starts_BQ) + after


def visible_sum(x_BHKD: Tensor, view: View) -> Tensor:
    """Σ of x_j over the keys each query sees; (B, H, Q or 1, D). Padding in x is zero already."""
    known = not isinstance(view.past, Tensor)  # else a cache may hold more than is to be seen
    if known and view.free and not view.causal and view.starts_BQ is None:
        return x_BHKD.sum(-2, keepdim=True)
    if view.free and view.whole:
        summed = running_sum(x_BHKD, view.starts_BQ)
        if view.ends_BQ is None:
            return summed
        last = view.ends_BQ[:, None, :, None].expand_as(summed)
        return summed.gather(2, last)
    B, H, K, D = x_BHKD.shape
    heads_as_channels = x_BHKD.transpose(1, 2).reshape(B, 1, K, H * D)
    q, k = x_BHKD.new_zeros(B, 1, view.queries, 1), x_BHKD.new_zeros(B, 1, K, 1)
    ones = torch.ones_like(q[..., 0])  # the weight of every visible key
    out = pointwise.attention(q, k, heads_as_channels, ones, view, sigmoid=False)
    return out.reshape(B, view.queries, H, D).transpose(1, 2)


def running_sum(x_BHLD: Tensor, starts_BL: Tensor | None) -> Tensor:
    """Σ_{first_i <= j <= i} x_j."""
    L = x_BHLD.shape[-2]
    x = _chunked(x_BHLD)
    if starts_BL is None:  # two levels: a GPU scans many short chunks faster than a few long columns
        inside_chunk = x.cumsum(-2)
        return _unchunked(inside_chunk + _carry(inside_chunk[..., -1:, :], None), L)
    inside, before, tail, links = _document_masks(L, starts_BL, x.device)
    out = inside.to(x.dtype) @ x
    totals = (x if tail is None else x * tail.to(x.dtype)).sum(-2, keepdim=True)
    carried = _carry(totals, links)
    out = out + (carried if before is None else carried * before.to(carried.dtype))
    return _unchunked(out, L)


def _chunked(x_BHLD: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, H, N, C, D), zeros at the end."""
    L = x_BHLD.shape[-2]
    C = _chunk(L)
    if torch.compiler.is_exporting():  # where nothing may depend on what divides L
        n, c = (torch.arange(size, device=x_BHLD.device) for size in (L // C + 3, C))
        return F.pad(x_BHLD, (0, 0, 0, 3 * C))[:, :, n[:, None] * C + c]
    N = (L + C - 1) // C
    if L != N * C:
        x_BHLD = F.pad(x_BHLD, (0, 0, 0, N * C - L))
    return x_BHLD.reshape(*x_BHLD.shape[:2], N, C, x_BHLD.shape[3])


def _chunk(length: int) -> int:
    return _CHUNK if torch.compiler.is_exporting() or length >= _CHUNK else max(1, length)


def _unchunked(x_BHNCD: Tensor, length: int) -> Tensor:
    if torch.compiler.is_exporting():
        i, C = torch.arange(length, device=x_BHNCD.device), x_BHNCD.shape[3]
        return x_BHNCD[:, :, i // C, i % C]
    return x_BHNCD.flatten(2, 3)[:, :, :length]


def _document_masks(
    length: int, starts_BL: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """inside (.., C, C): i sees j of its chunk; before (.., C, 1): i sees the state carried into its
    chunk; tail (.., C, 1): j belongs to the document its chunk ends with; links (B, 1, N, N): chunk m
    ends with the document that the chunk before n ends with."""
    C = _chunk(length)
    lower = torch.ones(C, C, dtype=torch.bool, device=device).tril()
    if starts_BL is None:
        return lower, None, None, None
    ids = _chunked(starts_BL[:, None, :, None])[..., 0]
    last = ids[..., -1]
    inside = lower & (ids[..., :, None] == ids[..., None, :])
    previous = F.pad(last[..., :-1], (1, 0), value=-1)
    before = (ids == previous[..., None])[..., None]
    tail = (ids == last[..., None])[..., None]
    N = last.shape[-1]
    earlier = torch.ones(N, N, dtype=torch.bool, device=device).tril(-1)
    links = earlier & (previous[..., :, None] == last[..., None, :])
    return inside, before, tail, links


def _carry(states_BHNxy: Tensor, links_B1NN: Tensor | None) -> Tensor:
    """The sum of the states of earlier chunks (of the same document)."""
    if links_B1NN is None:
        summed = states_BHNxy.cumsum(2)
        return F.pad(summed, (0, 0, 0, 0, 1, 0))[:, :, :-1]
    flat = links_B1NN.to(states_BHNxy.dtype) @ states_BHNxy.flatten(-2)
    return flat.unflatten(-1, states_BHNxy.shape[-2:])
