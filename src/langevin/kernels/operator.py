"""Operators of our own: each is one node of a compiled graph, whatever its lengths and loops.

Inside, autocast is off: an operator is handed the types it shall compute in. Tensors of two and more
dimensions have the batch first, so `torch.func.vmap` joins its dimension to the batch.

B batch, V what vmap maps over.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as langevin::NAME; fake makes results of the right shape, with any content."""

    def add(run: Callable[..., Any]) -> Any:
        name = f"langevin::{run.__name__.strip('_')}"
        library.define(name, schema)

        def in_given_types(first: Tensor, *rest: Any) -> Any:
            with torch.autocast(first.device.type, enabled=False):
                return run(first, *rest)

        library.impl(name, "CompositeExplicitAutograd")(in_given_types)
        library.register_fake(name)(fake)
        called = getattr(torch.ops.langevin, run.__name__.strip("_")).default

        def mapped(info: Any, dims: tuple[int | None, ...], *given: Any) -> Any:
            V, (first, at) = info.batch_size, (given[0], dims[0])
            B = first.shape[0] if at is None else first.movedim(at, 0).shape[1]

            def join(x: Any, dim: int | None) -> Any:
                if not isinstance(x, Tensor) or (dim is None and x.ndim < 2):
                    return x
                x = x.expand(V, *x.shape) if dim is None else x.movedim(dim, 0)
                return x.expand(V, B, *x.shape[2:]).flatten(0, 1)

            out = called(*map(join, given, dims))
            every = out if isinstance(out, tuple) else (out,)
            split = tuple(x.unflatten(0, (V, B)) if x.ndim else x for x in every)
            out_dims = tuple(0 if x.ndim else None for x in every)
            return (split, out_dims) if isinstance(out, tuple) else (split[0], 0)

        library.register_vmap(name, mapped)
        return called

    return add


def differentiable(forward: Any, backward: Any) -> Callable[..., Any]:
    """Mixing as an operator (q, k, v, row, *masks, *flags), with gradients for q, k, v and row.

    masks are tensors or None, flags are not tensors. The operator's first result is the output. If there
    are more, backward gets them all: backward(dout, *results, q, k, v, row, *masks, *flags).
    """

    class Mixing(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(q: Tensor, k: Tensor, v: Tensor, row: Tensor, masks: Any, flags: Any) -> Any:
            return forward(q, k, v, row, *masks, *flags)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            *tensors, masks, ctx.flags = inputs
            results = output if isinstance(output, tuple) else ()
            if results:
                ctx.mark_non_differentiable(*results[1:])
            ctx.save_for_backward(*results, *tensors, *masks)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
            return *backward(dout.contiguous(), *ctx.saved_tensors, *ctx.flags), None, None

    return Mixing.apply
