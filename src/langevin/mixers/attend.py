"""`langevin.attend`: any q,k,v mixer as a function."""

from contextlib import nullcontext

import torch
from torch import Tensor

from langevin.errors import UsageError
from langevin.kernels.view import View, as_many_heads, wide
from langevin.mixers.mechanism import Geometry, Inputs, Parameters, only_mechanism
from langevin.mixers.spec import Spec, parse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: str | Spec = "softmax",
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    alibi: bool = False,
    past_queries: Tensor | None = None,
    return_weights: bool = False,
    implementation: str = "fused",
    parameters: Parameters | None = None,
    training: bool = False,
    generator: torch.Generator | None = None,
    depth: int = 4,
    train_length: int = 1024,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mix values by a mixer spec.

    q is (B, H, Q, D); k and v are (B, H or fewer, K, D). Queries are the last Q of the K positions.
    key_padding_mask (B, K) is True where a token is real; window is the number of keys a causal query
    sees back to, itself included (bidirectional: |i - j| < window); documents (B, K) are ids of packed
    documents. alibi adds -m_h |i - j| to the logits. past_queries (B, H, K - Q, D) are needed by causal
    sima alone, and only when Q < K.

    Learned scalars take their initial values unless `parameters` gives them: {"s": ...} for ssmax,
    {"drift.gain": ...} for a wrapper's. depth and train_length tell mixers whose formula depends on
    them (heat's depth law, ssmax's start) what model the call stands in.
    implementation='reference' computes by explicit weights; return_weights=True also returns them.
    """
    _check(q, k, v, past_queries)
    if implementation not in ("fused", "reference"):
        raise UsageError(f"implementation={implementation!r} must be 'fused' or 'reference'")
    if isinstance(spec, str):
        _remember(spec)
    parsed = _KNOWN[spec] if isinstance(spec, str) else spec
    mechanism = only_mechanism(parsed, alibi)
    geometry = Geometry(q.shape[1], q.shape[3], k.shape[1], 0, depth, train_length, alibi=alibi)
    view = View.of(
        q.shape[2],
        k.shape[2],
        causal=causal,
        device=q.device,
        window=window,
        key_padding_mask=key_padding_mask,
        documents=documents,
        batch=q.shape[0],
    )
    own, *wrapped = _scalars(parsed, geometry, parameters or {}, q)
    x = Inputs(q, k, v, view, own, geometry, past_queries)
    w = None
    if return_weights or implementation == "reference":
        w = mechanism.weights(x).to(v.dtype)
        y = w @ as_many_heads(v, q)
    else:
        y = mechanism.attend(x)
    for wrapper, p in zip(parsed.wrappers, wrapped, strict=True):
        y = wrapper.apply(y, p, training, generator)
    return (y, w) if return_weights and w is not None else y


_KNOWN: dict[str, Spec] = {}


@torch.compiler.assume_constant_result
def _remember(text: str) -> bool:
    """Parse once, outside any graph: a compiled `attend` only looks the result up."""
    _KNOWN[text] = parse(text)
    return True


def _scalars(spec: Spec, geometry: Geometry, given: Parameters, like: Tensor) -> list[Parameters]:
    """Learned scalars of the mixer and of each wrapper: the given ones, else their initial values."""
    start = []
    for part in (spec.mixer, *spec.wrappers):
        # Made where they are used: to copy them to a GPU would stall it (a graph has them as constants).
        with nullcontext() if torch.compiler.is_compiling() else like.device:
            values = part.parameters(geometry)
        start.append({name: x.to(like.device, wide(like.dtype)) for name, x in values.items()})
    if not given:
        return start
    known: list[str] = []
    for prefix, values in zip(("", *(f"{part.name}." for part in spec.wrappers)), start, strict=True):
        for key, value in values.items():
            name = prefix + key
            known.append(name)
            values[key] = torch.as_tensor(given.get(name, value)).to(value)
            if values[key].shape != value.shape:
                shapes = f"{tuple(values[key].shape)}, expected {tuple(value.shape)}"
                raise UsageError(f"{name} has shape {shapes}")
    for name in given:
        if name not in known:
            raise UsageError(f"{spec} learns no {name!r}", f"It learns: {', '.join(known) or '-'}.")
    return start


def _check(q: Tensor, k: Tensor, v: Tensor, past: Tensor | None) -> None:
    def refuse(what: str) -> UsageError:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        return UsageError(f"{what}: {shapes}", "Expected (batch, heads, tokens, head width).")

    if not q.ndim == k.ndim == v.ndim == 4:
        raise refuse("q, k and v must have four dimensions")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise refuse("q, k and v differ in batch")
    if q.shape[3] != k.shape[3]:
        raise refuse("q and k differ in head width")
    if k.shape[:3] != v.shape[:3]:
        raise refuse("k and v differ in heads or tokens")
    if q.shape[1] % k.shape[1]:
        raise refuse(f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise UsageError(f"q, k and v must share one floating type, not {q.dtype}, {k.dtype}, {v.dtype}")
    expected = (q.shape[0], q.shape[1], k.shape[2] - q.shape[2], q.shape[3])
    if past is not None and past.shape != expected:
        raise UsageError(f"past_queries has shape {tuple(past.shape)}, expected {expected}")
