"""Who may see whom, and how many keys each query sees.

B batch, H heads, Q queries, K keys, D head width. A query sees an interval of keys, less the padding in it:

    visible(i, j)  =  first_i <= j <= last_i  and  real_j

Causality, sliding windows, packed documents and the offset of a cache only move the two ends of
the interval, so every kernel needs nothing else, and n_i costs O(K), never O(Q·K).
Query i stands at position past + i. Unless a cache has unused room behind them, the queries are the last.

A mask of any other shape is kept as it is (`dense_BQK`), and whatever needs the ends computes in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.errors import UsageError


def _once(compute: Callable[[Any], Any]) -> Any:
    """A property computed once, for all layers (a compiled graph finds out by itself what is the same)."""

    def get(view: Any) -> Any:
        if torch.compiler.is_compiling():
            return compute(view)
        if compute.__name__ not in view.__dict__:
            view.__dict__[compute.__name__] = compute(view)
        return view.__dict__[compute.__name__]

    return property(get, doc=compute.__doc__)


@dataclass(frozen=True, eq=False)
class View:
    queries: int
    keys: int
    causal: bool
    device: torch.device
    past: int | Tensor  # keys before the first query; a tensor where one graph must serve any number
    window: int | None = None
    real_BK: Tensor | None = None  # True where a key is a token, False where it is padding
    starts_BQ: Tensor | None = None  # first and last key of the document each query is in
    ends_BQ: Tensor | None = None  # (None in a causal view, where nobody asks)
    dense_BQK: Tensor | None = None  # visible(i, j) itself, instead of all that

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
        position_ids: Tensor | None = None,
        past: int | Tensor | None = None,
        batch: int | None = None,
    ) -> View:
        """The view of `queries` positions on `keys` keys; batch is only compared with.

        Packed documents come as ids (B, K), or as position_ids (B, Q) that start anew at each document.
        past, the position of the first query, is keys - queries unless a static cache has room for more
        keys than there are; a tensor makes one graph serve every position. key_padding_mask may then end
        with the last query. Without causality queries see all that the cache holds, and each other.
        """
        if queries > keys and (causal or window is not None):
            raise UsageError(
                f"{queries} queries cannot be the last ones of {keys} keys",
                "With causal=True or a window pass at least as many keys as queries.",
            )
        if window is not None and (type(window) is not int or window < 1):
            raise UsageError(f"window={window} is not a number of keys", "Pass 1 or more.")
        if window is not None and not torch.compiler.is_exporting() and window >= keys:
            window = None
        packed = documents is not None or position_ids is not None
        if not causal and packed and queries != keys:
            raise UsageError(
                "documents with fewer queries than keys need causal=True",
                "Without causality pass all queries.",
            )
        real = None
        if key_padding_mask is not None:
            room = 0 if past is None else keys - key_padding_mask.shape[-1]
            real = _per_key(F.pad(key_padding_mask, (0, room)), batch, keys, "key_padding_mask")
            if real.dtype != torch.bool:
                raise UsageError(
                    f"key_padding_mask is {real.dtype}, expected bool",
                    "True where a token is real: pass mask.bool() or mask == 1.",
                )
        if isinstance(past, Tensor):
            past = past.clone().reshape(())  # a cache counts on in place
        elif past is None:
            past = keys - queries
        view = View(queries, keys, causal, torch.device(device), past, window, real)
        if documents is not None:
            documents = _per_key(documents, batch, keys, "documents")
            changes = documents[:, 1:] != documents[:, :-1]
            _refuse_returning(documents, changes)
            here = torch.arange(keys, device=documents.device)
            starts = view.at_queries(_starts(changes, here, torch.zeros_like(documents[:, :1])))
        elif position_ids is not None:
            if real is not None:
                position_ids = _counted(position_ids, view.at_queries(real))
            changes, here = position_ids.diff(dim=1) != 1, view.positions_Q
            starts = _starts(changes, here, (past - position_ids[:, :1]).clamp_min(0))
            if readable(starts) and not bool(starts.any()):
                return view
        else:
            return view
        ends = None if causal else _ends(changes, here)
        return View(queries, keys, causal, view.device, past, window, real, starts, ends)

    @staticmethod
    def from_mask(mask_BQK: Tensor, *, causal: bool, past: int | Tensor | None = None) -> View:
        """The view of a dense boolean mask, of any shape; past as in `of`.

        Where values may be looked at, one that shows no more than padding becomes a view of intervals.
        """
        _, Q, K = mask_BQK.shape
        past = K - Q if past is None else past.clone() if isinstance(past, Tensor) else past
        if Q <= K and readable(mask_BQK):
            padded = View(Q, K, causal, mask_BQK.device, past, real_BK=mask_BQK.any(1))
            if torch.equal(padded.mask_BQK, mask_BQK):
                return padded
        return View(Q, K, False, mask_BQK.device, past, dense_BQK=mask_BQK)

    def to(self, device: torch.device | str | int, **options: Any) -> View:
        """The same view on another device, where a model is spread over several."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        own |= {name: x.to(device, **options) for name, x in own.items() if isinstance(x, Tensor)}
        return View(**{**own, "device": torch.device(device)})

    def last(self, keys: int) -> View:
        """The same view with only the last `keys` keys (the others must be out of sight)."""
        gone = self.keys - keys

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else (x - gone).clamp_min(0)

        real = None if self.real_BK is None else self.real_BK[:, gone:]
        dense = None if self.dense_BQK is None else self.dense_BQK[..., gone:]
        starts, ends, past = cut(self.starts_BQ), cut(self.ends_BQ), self.past - gone
        return View(
            self.queries, keys, self.causal, self.device, past, self.window, real, starts, ends, dense
        )

    SCHEMA: ClassVar[str] = (
        "Tensor? real, Tensor? starts, Tensor? ends, Tensor? dense, Tensor? at, "
        "bool causal, SymInt? window, SymInt past"
    )

    @property
    def parts(self) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
        """The view as arguments of an operator: tensors, and what is none."""
        at, past = (self.past, 0) if isinstance(self.past, Tensor) else (None, self.past)
        masks = (self.real_BK, self.starts_BQ, self.ends_BQ, self.dense_BQK, at)
        return masks, (self.causal, self.window, past)

    @staticmethod
    def joined(q_BHQD: Tensor, k_BHKD: Tensor, *parts: Any) -> View:
        """The view that came apart in `parts`."""
        *masks, at, causal, window, past = parts
        past = past if at is None else at
        return View(q_BHQD.shape[2], k_BHKD.shape[2], causal, q_BHQD.device, past, window, *masks)

    @property
    def plain(self) -> bool:
        """Whether nothing but causality restricts the view."""
        return (
            self.window is None
            and self.real_BK is None
            and self.starts_BQ is None
            and self.dense_BQK is None
            and not isinstance(self.past, Tensor)
            and self.past + self.queries == self.keys
        )

    @property
    def whole(self) -> bool:
        """Whether the queries are all the tokens there are."""
        return not isinstance(self.past, Tensor) and self.queries == self.keys

    @property
    def free(self) -> bool:
        """Whether only causality, documents and padding restrict the view."""
        return self.window is None and self.dense_BQK is None

    @property
    def positions_Q(self) -> Tensor:
        """Where each query stands among the keys."""
        if not isinstance(self.past, Tensor) and self.past < 0:
            raise UsageError(
                f"{self.queries} queries on {self.keys} keys have no distance to them",
                "Pass at least as many keys as queries, or a mixer and positions without distances.",
            )
        return torch.arange(self.queries, device=self.device) + self.past

    def distance(
        self, start: int = 0, stop: int | None = None, low: int = 0, high: int | None = None
    ) -> Tensor:
        """i - j of queries [start, stop) and keys [low, high): (rows, columns)."""
        keys = torch.arange(low, self.keys if high is None else high, device=self.device)
        return self.positions_Q[start:stop, None] - keys

    def at_queries(self, x_BK: Tensor) -> Tensor:
        """What x, given for every key, is at the queries' own positions."""
        if isinstance(self.past, Tensor):
            return x_BK.index_select(1, self.positions_Q)
        return x_BK[:, self.past : self.past + self.queries]

    @_once
    def bounds_BQ(self) -> tuple[Tensor, Tensor]:
        """First and last key of each query's interval, both inclusive; (B or 1, Q)."""
        assert self.dense_BQK is None
        first = last = torch.zeros(1, self.queries, dtype=torch.long, device=self.device)
        first = first if self.starts_BQ is None else self.starts_BQ
        last = last + (self.past + self.queries - 1) if self.ends_BQ is None else self.ends_BQ
        if self.window is not None:
            first = torch.maximum(first, self.positions_Q - self.window + 1)
            last = torch.minimum(last, self.positions_Q + self.window - 1)
        if self.causal:
            last = torch.minimum(last, self.positions_Q)
        return first, last

    @_once
    def visible_BQ(self) -> Tensor:
        """n_i, the number of keys each query sees, as int64; (B or 1, Q)."""
        if self.dense_BQK is not None:
            return self.dense_BQK.sum(-1)
        alike = self.whole and not self.causal and self.window is None and self.starts_BQ is None
        if alike and self.real_BK is not None:
            return self.real_BK.sum(-1, keepdim=True).expand(-1, self.queries)
        first, last = self.bounds_BQ
        if self.real_BK is None:
            return (last - first + 1).clamp_min(0)
        counts, first, last = _same_batch(F.pad(self.real_BK.cumsum(-1), (1, 0)), first, last + 1)
        return (counts.gather(1, last) - counts.gather(1, first)).clamp_min(0)

    def log_visible(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """ln n_i as (B or 1, 1, Q, 1), with ln 1 = 0 for queries that see nothing."""
        n = self.visible_BQ.clamp_min(1).to(wide(dtype))
        return n.log()[:, None, :, None]

    @property
    def may_be_blind(self) -> bool:
        """Whether some query may see no key at all (it then mixes to zero)."""
        return self.real_BK is not None or self.dense_BQK is not None

    def mask(
        self, start: int = 0, stop: int | None = None, low: int = 0, high: int | None = None
    ) -> Tensor:
        """visible(i, j) of queries [start, stop) and keys [low, high): (B or 1, 1, rows, columns)."""
        if self.dense_BQK is not None:
            return self.dense_BQK[:, None, start:stop, low:high]
        first, last = self.bounds_BQ
        index = torch.arange(low, self.keys if high is None else high, device=self.device)
        seen = (index >= first[:, start:stop, None]) & (index <= last[:, start:stop, None])
        if self.real_BK is not None:
            seen = seen & self.real_BK[:, None, low:high]
        return seen[:, None]

    @_once
    def mask_BQK(self) -> Tensor:
        return self.mask()[:, 0]

    def shows(self, hop: int) -> Tensor:
        """Whether each query may see the key `hop` before it (negative: after it); (B or 1, Q)."""
        j = self.positions_Q - hop
        if self.dense_BQK is None:
            first, last = self.bounds_BQ
            return (j >= first) & (j <= last)
        inside = (j >= 0) & (j < self.keys)
        index = j.clamp(0, self.keys - 1)[None, :, None].expand(self.dense_BQK.shape[0], -1, 1)
        return self.dense_BQK.gather(2, index)[..., 0] & inside

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Key range [low, high) outside which queries [start, stop) see nothing, known statically."""
        low, high = 0, self.keys
        if isinstance(self.past, Tensor) or self.dense_BQK is not None:
            return low, high
        if self.window is not None:
            low = max(0, self.past + start - self.window + 1)
            high = min(self.keys, self.past + stop - 1 + self.window)
        if self.causal:
            high = min(high, self.past + stop)
        return low, high

    def silence_blind(self, out_BHQD: Tensor) -> Tensor:
        """Zero at queries that see no key."""
        if not self.may_be_blind:
            return out_BHQD
        return torch.where((self.visible_BQ > 0)[:, None, :, None], out_BHQD, 0.0)

    def silence_padding(self, x_BHQ: Tensor) -> Tensor:
        """Zero at queries that are padding; (B, H, Q, anything)."""
        if self.real_BK is None:
            return x_BHQ
        return torch.where(self.at_queries(self.real_BK)[:, None, :, None], x_BHQ, 0.0)


def readable(x: Tensor) -> bool:
    """Whether the values of x may be looked at: not while a graph is made."""
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (torch.compiler.is_compiling() or capturing)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scales, sums and logarithms are computed: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_many_heads(x_BHKD: Tensor, q_BHQD: Tensor) -> Tensor:
    """Keys or values repeated for the query heads that share them."""
    groups = q_BHQD.shape[1] // x_BHKD.shape[1]
    return x_BHKD if groups == 1 else x_BHKD.repeat_interleave(groups, 1)


def _per_key(x: Tensor, batch: int | None, keys: int, name: str) -> Tensor:
    if x.ndim != 2 or x.shape[1] != keys or (batch is not None and x.shape[0] not in (1, batch)):
        raise UsageError(
            f"{name} has shape {tuple(x.shape)}, expected ({batch or 'batch'}, {keys})",
            "It covers every key, cached ones included.",
        )
    return x


def _starts(changes: Tensor, here_N: Tensor, first_B1: Tensor) -> Tensor:
    """The position at which the document of each position starts, from where documents change."""
    marks = torch.cat([first_B1, torch.where(changes, here_N[1:], 0)], 1)
    return marks.cummax(1).values


def _ends(changes: Tensor, here_N: Tensor) -> Tensor:
    """The position at which the document of each position ends."""
    last = here_N[-1:].expand(changes.shape[0], -1)
    marks = torch.cat([torch.where(changes, here_N[:-1], last), last], 1)
    return marks.flip(1).cummin(1).values.flip(1)


def _counted(position_ids: Tensor, real_BQ: Tensor) -> Tensor:
    """Positions that count on through padding, whatever is written there, and start anew where a real
    token does not follow the real one before it."""
    here = torch.arange(real_BQ.shape[1], device=real_BQ.device)
    jump = position_ids - real_BQ.cumsum(1)  # the same for all real tokens of a document
    before = torch.where(real_BQ, here, 0).cummax(1).values
    first = real_BQ.byte().argmax(1, keepdim=True)
    jump = jump.gather(1, torch.maximum(before, first))
    return here + jump - jump[:, :1]


def _refuse_returning(documents_BK: Tensor, changes: Tensor) -> None:
    if not readable(documents_BK):
        return
    ids = documents_BK.sort(1).values
    distinct = (ids[:, 1:] != ids[:, :-1]).sum(1)
    if not torch.equal(distinct, changes.sum(1)):
        raise UsageError(
            "a document id comes back after another document",
            "Packed documents must be contiguous; give each its own id.",
        )


def _same_batch(*tensors: Tensor) -> list[Tensor]:
    """(B or 1, ...) tensors as (B, ...)."""
    (B,) = torch.broadcast_shapes(*(x.shape[:1] for x in tensors))
    return [x.expand(B, *x.shape[1:]) for x in tensors]
