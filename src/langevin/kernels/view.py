"""Who may see whom, and how many keys each query sees.

B batch, Q queries, K keys. A query sees an interval of keys, less the padding inside it:

    visible(i, j)  =  first_i <= j <= last_i  and  real_j

Causality, sliding windows, packed documents and the offset of a cache only move the two ends of
the interval, so every kernel needs nothing else, and n_i costs O(K), never O(Q·K).
Queries are the last Q of the K positions: query i stands at position K - Q + i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from langevin.errors import UsageError


@dataclass(frozen=True, eq=False)
class View:
    queries: int
    keys: int
    causal: bool
    device: torch.device
    window: int | None = None
    real_BK: Tensor | None = None  # True where a key is a token, False where it is padding
    starts_BK: Tensor | None = None  # first and last position of the document each position is in
    ends_BK: Tensor | None = None
    interval: tuple[Tensor, Tensor] | None = None  # first_BQ, last_BQ given outright (a dense mask)

    @staticmethod
    def of(
        queries: int,
        keys: int,
        *,
        causal: bool,
        device: torch.device | str = "cpu",
        window: int | None = None,
        key_padding_mask: Tensor | None = None,
        documents: Tensor | None = None,
        batch: int | None = None,
    ) -> View:
        """The view of `queries` last positions on `keys` positions; batch is only compared with."""
        if queries > keys and causal:
            raise UsageError(
                f"{queries} queries cannot be the last ones of {keys} keys",
                "With causal=True pass at least as many keys as queries.",
            )
        if window is not None and (type(window) is not int or window < 1):
            raise UsageError(f"window={window} is not a number of keys", "Pass 1 or more.")
        real = starts = ends = None
        if key_padding_mask is not None:
            real = _per_key(key_padding_mask, batch, keys, "key_padding_mask")
            if real.dtype != torch.bool:
                raise UsageError(
                    f"key_padding_mask is {real.dtype}, expected bool",
                    "True where a token is real: pass mask.bool() or mask == 1.",
                )
        if documents is not None:
            if causal is False and queries != keys:
                raise UsageError(
                    "documents with fewer queries than keys need causal=True",
                    "Without causality pass all queries.",
                )
            starts, ends = _runs(_per_key(documents, batch, keys, "documents"))
        return View(queries, keys, causal, torch.device(device), window, real, starts, ends)

    @staticmethod
    def from_mask(mask_BQK: Tensor, *, causal: bool) -> View:
        """The view of a dense boolean mask whose rows are intervals of keys less padding.

        The simplest view that shows the same is taken: padding alone, packed documents, or the
        intervals themselves (a compiled graph cannot look at values and takes the last).
        """
        _, Q, K = mask_BQK.shape
        index = torch.arange(K, device=mask_BQK.device)
        first = torch.where(mask_BQK, index, K).amin(-1)
        last = torch.where(mask_BQK, index, -1).amax(-1)
        real = mask_BQK.any(1)
        intervals = View(Q, K, causal, mask_BQK.device, real_BK=real, interval=(first, last))
        if torch.compiler.is_compiling():
            return intervals
        candidates = [View(Q, K, causal, mask_BQK.device, real_BK=real)]
        if Q == K:
            starts, ends = _runs(torch.where(last >= 0, first, index), contiguous=True)
            packed = View(Q, K, causal, mask_BQK.device, None, real, starts, ends)
            candidates.append(packed)
        for view in (*candidates, intervals):
            if torch.equal(view.mask_BQK, mask_BQK):
                return view
        raise UsageError(
            "the attention mask is not an interval of keys for every query",
            "langevin handles causal, bidirectional, windowed, padded and packed masks.",
        )

    def last(self, keys: int) -> View:
        """The same view with only the last `keys` keys (the others must be out of sight)."""
        gone = self.keys - keys

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else (x[:, gone:] - gone).clamp_min(0)

        real = None if self.real_BK is None else self.real_BK[:, gone:]
        starts, ends = cut(self.starts_BK), cut(self.ends_BK)
        return View(self.queries, keys, self.causal, self.device, self.window, real, starts, ends)

    @property
    def offset(self) -> int:
        """The position of the first query."""
        return self.keys - self.queries

    @property
    def plain(self) -> bool:
        """Whether nothing but causality restricts the view."""
        return (
            self.window is None
            and self.real_BK is None
            and self.starts_BK is None
            and self.interval is None
        )

    @property
    def bounds_BQ(self) -> tuple[Tensor, Tensor]:
        """First and last key of each query's interval, both inclusive; (B or 1, Q)."""
        if self.interval is not None:
            return self.interval
        here = torch.arange(self.offset, self.keys, device=self.device)[None]
        first, last = torch.zeros_like(here), torch.full_like(here, self.keys - 1)
        if self.starts_BK is not None and self.ends_BK is not None:
            first, last = self.starts_BK[:, self.offset :], self.ends_BK[:, self.offset :]
        if self.window is not None:
            first = torch.maximum(first, here - self.window + 1)
            last = torch.minimum(last, here + self.window - 1)
        if self.causal:
            last = torch.minimum(last, here)
        return first, last

    @property
    def visible_BQ(self) -> Tensor:
        """n_i, the number of keys each query sees, as int64; (B or 1, Q)."""
        first, last = self.bounds_BQ
        if self.real_BK is None:
            return (last - first + 1).clamp_min(0)
        counts = torch.nn.functional.pad(self.real_BK.cumsum(-1), (1, 0))
        first = first.expand(counts.shape[0], -1)
        last = last.expand(counts.shape[0], -1)
        return (counts.gather(1, last + 1) - counts.gather(1, first)).clamp_min(0)

    def log_visible(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """ln n_i as (B or 1, 1, Q, 1), with ln 1 = 0 for queries that see nothing."""
        n = self.visible_BQ.clamp_min(1).to(wide(dtype))
        return n.log()[:, None, :, None]

    @property
    def may_be_blind(self) -> bool:
        """Whether some query may see no key at all (it then mixes to zero)."""
        return self.real_BK is not None

    def mask(
        self, start: int = 0, stop: int | None = None, low: int = 0, high: int | None = None
    ) -> Tensor:
        """visible(i, j) of queries [start, stop) and keys [low, high): (B or 1, 1, rows, columns)."""
        first, last = self.bounds_BQ
        index = torch.arange(low, self.keys if high is None else high, device=self.device)
        seen = (index >= first[:, start:stop, None]) & (index <= last[:, start:stop, None])
        if self.real_BK is not None:
            seen = seen & self.real_BK[:, None, low:high]
        return seen[:, None]

    @property
    def mask_BQK(self) -> Tensor:
        return self.mask()[:, 0]

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Key range [low, high) outside which queries [start, stop) see nothing, known statically."""
        low, high = 0, self.keys
        if self.interval is None:
            if self.window is not None:
                low = max(0, self.offset + start - self.window + 1)
                high = min(self.keys, self.offset + stop - 1 + self.window)
            if self.causal:
                high = min(high, self.offset + stop)
        return low, high

    def silence_blind(self, out_BHQD: Tensor) -> Tensor:
        """Zero at queries that see no key."""
        if not self.may_be_blind:
            return out_BHQD
        return torch.where((self.visible_BQ > 0)[:, None, :, None], out_BHQD, 0.0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scales, sums and logarithms are computed: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _per_key(x: Tensor, batch: int | None, keys: int, name: str) -> Tensor:
    if x.ndim != 2 or x.shape[1] != keys or (batch is not None and x.shape[0] not in (1, batch)):
        raise UsageError(
            f"{name} has shape {tuple(x.shape)}, expected ({batch or 'batch'}, {keys})",
            "It covers every key, cached ones included.",
        )
    return x


def _runs(documents_BK: Tensor, contiguous: bool = False) -> tuple[Tensor, Tensor]:
    """First and last position of the run of equal ids that each position belongs to."""
    B, K = documents_BK.shape
    here = torch.arange(K, device=documents_BK.device).expand(B, K)
    changes = documents_BK[:, 1:] != documents_BK[:, :-1]
    edge = torch.ones(B, 1, dtype=torch.bool, device=documents_BK.device)
    starts = torch.where(torch.cat([edge, changes], 1), here, 0).cummax(1).values
    stops = torch.where(torch.cat([changes, edge], 1), here, K - 1)
    ends = stops.flip(1).cummin(1).values.flip(1)
    if not contiguous and not torch.compiler.is_compiling():
        ids = documents_BK.sort(1).values
        distinct = 1 + (ids[:, 1:] != ids[:, :-1]).sum(1)
        if not torch.equal(distinct, 1 + changes.sum(1)):
            raise UsageError(
                "a document id comes back after another document",
                "Packed documents must be contiguous; give each its own id.",
            )
    return starts, ends
