"""How outputs are compared: bit for bit, or to rounding error; a difference is named by its position."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from langevin.checks.report import Broken

TOLERANCE = 1e-9


def same_bits(a: Tensor, b: Tensor, said: str, real: Tensor | None = None) -> None:
    if real is not None:  # what a mixer gives at padding is nobody's business
        a, b = (x.masked_fill(~real[:, : x.shape[1], None], 0.0) for x in (a, b))
    if torch.equal(a, b):
        return
    difference = (a - b).detach().abs().amax((0, 2))
    position = int((difference > 0).nonzero()[0, 0]) if bool((difference > 0).any()) else 0
    size = float(difference.max())
    raise Broken(f"{said} changed the output at position {position} (by up to {size:.1e})")


def close(
    a: Tensor, b: Tensor, said: str, real: Tensor | None = None, tolerance: float = TOLERANCE
) -> None:
    error = (a - b).detach().abs().amax(-1) / (1 + b.detach().abs().amax())
    if real is not None:
        error = error.masked_fill(~real, 0.0)
    if bool((error <= tolerance).all()):
        return
    worst = error.nan_to_num(math.inf).amax(0)
    position = int((worst > tolerance).nonzero()[0, 0])
    raise Broken(f"{said} differs at position {position} (by {float(worst.max()):.1e})")


def slope(value: Callable[[], Tensor], tensor: Tensor, direction: Tensor) -> float:
    """The central difference of value() along a direction of tensor, Richardson-extrapolated. The step
    is small beside the tensor's own values, so that it rarely crosses a kink."""

    def difference(step: float) -> float:
        with torch.no_grad():
            tensor.add_(direction, alpha=step)
            up = float(value())
            tensor.add_(direction, alpha=-2 * step)
            down = float(value())
            tensor.add_(direction, alpha=step)
        return (up - down) / (2 * step)

    h = 1e-5 * (rms(tensor.detach()) or 1.0)
    return (4 * difference(h / 2) - difference(h)) / 3


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
