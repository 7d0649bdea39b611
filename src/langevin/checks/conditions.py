"""The conditions under which a subject must give what it gives alone: in a batch, padded, packed, in a
window, with grouped heads. Each computes the same thing in two ways, for outputs and gradients alike.

B batch, L tokens, W width, H heads, D head width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from langevin.checks.layouts import Layout, layouts
from langevin.checks.report import NotOffered
from langevin.checks.subjects import HEADS, Subject, Tensors


@dataclass(frozen=True)
class Pair:
    """The same (B, L, W), computed in two ways from the same tensors, of which x is one."""

    said: str
    ours: Tensor
    theirs: Tensor
    tensors: Tensors


# Of a subject, whether it is causal, its length, and whether gradients are wanted.
Condition = Callable[[Subject, bool, int, bool], Iterator[Pair]]


def _laid_out(
    subject: Subject, causal: bool, derive: bool, layout: Layout, **options: int
) -> Iterator[Pair]:
    """Every document of a batch against itself alone. Padding is loud, so that it is heard."""
    module = subject.module(causal, **options)
    for part in (layout, layout.one_row):
        B, L = part.real_BL.shape
        x = subject.inputs(B, L) if derive else subject.tokens(B, L)
        if x.is_floating_point():
            x = (30 * x - 29 * part.without_padding(x)).requires_grad_(derive)
        ours = part.without_padding(subject.run(module, x, **part.masks))
        theirs = torch.zeros_like(ours)
        for row, place in part.segments:
            theirs[row, place] = subject.run(module, x[row : row + 1, place])[0]
        said = ", ".join([part.name, *(f"{name} {value}" for name, value in options.items())])
        yield Pair(f"{said}, {at(L, causal)}", ours, theirs, with_parameters(x, module))


def _named(subject: Subject, causal: bool, length: int, derive: bool, *, names: set[str]) -> Iterator[Pair]:
    for layout in layouts(length):
        if layout.name in names:
            subject.need(*layout.masks)
            yield from _laid_out(subject, causal, derive, layout)


def _windowed(subject: Subject, causal: bool, length: int, derive: bool) -> Iterator[Pair]:
    """A query in a window against the same query where the keys of its window are all there is."""
    subject.need("window")
    window = length // 4
    reach = window if causal else 2 * window - 1
    module, x = subject.module(causal, window=window), subject.inputs(2, length).requires_grad_(derive)
    tensors = with_parameters(x, module)
    slices = x.unfold(1, reach, 1).transpose(2, 3)  # (B, L - reach + 1, reach, W)
    out = subject.run(subject.module(causal), slices.flatten(0, 1), moved=tensors)
    theirs = out[:, window - 1].unflatten(0, slices.shape[:2])
    ours = subject.run(module, x)[:, window - 1 : length - reach + window]
    ours, theirs = (F.pad(y, (0, 0, window - 1, reach - window)) for y in (ours, theirs))
    yield Pair(f"window {window}, {at(length, causal)}", ours, theirs, tensors)
    yield from _laid_out(subject, causal, derive, subject.layouts(length)[-1], window=window)


def _grouped(subject: Subject, causal: bool, length: int, derive: bool) -> Iterator[Pair]:
    """Fewer key heads than query heads against every key head repeated for the queries that share it."""
    few = HEADS // 2
    if subject.qkv is None:
        subject.need("kv_heads")
    else:
        q, k, v = qkv(length, few, subject.dtype)
        tensors = {"x": as_rows(q), "k": k, "v": v}
        x, k, v = (y.requires_grad_(derive) for y in tensors.values())
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        try:
            ours = subject.qkv(q, k, v, causal=causal)
        except Exception as error:
            if "kv_heads" in subject.takes:
                raise
            raise NotOffered("refuses k and v with fewer heads than q") from error
        theirs = subject.qkv(q, *(y.repeat_interleave(HEADS // few, 1) for y in (k, v)), causal=causal)
        said = f"{HEADS} heads with {few} key heads, {at(length, causal)}"
        yield Pair(said, as_rows(ours), as_rows(theirs), tensors)
    if "kv_heads" in subject.takes:
        yield from _laid_out(subject, causal, derive, subject.layouts(length)[-1], kv_heads=few)


CONDITIONS: dict[str, Condition] = {
    "alone = in a batch": partial(_named, names={"plain"}),
    "padding": partial(_named, names={"left-padded", "right-padded"}),
    "packed documents": partial(_named, names={"packed"}),
    "padded and packed": partial(_named, names={"padded and packed"}),
    "window": _windowed,
    "grouped heads": _grouped,
}


def qkv(length: int, kv_heads: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """q, k and v (B, H, L, D)."""
    generator = torch.Generator().manual_seed(4)
    for heads in (HEADS, kv_heads, kv_heads):
        yield torch.randn(2, heads, length, 8, dtype=torch.float64, generator=generator).to(dtype)


def at(length: int, causal: bool) -> str:
    return f"{length} tokens" if causal else f"{length} tokens, bidirectional"


def as_rows(x_BHLD: Tensor) -> Tensor:
    return x_BHLD.transpose(1, 2).flatten(2)


def with_parameters(x: Tensor, module: nn.Module) -> Tensors:
    """x and the parameters that are learned, by name."""
    return {"x": x, **{name: p for name, p in module.named_parameters() if p.requires_grad}}
