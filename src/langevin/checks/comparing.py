"""How results are compared. A difference is named by its position.

B batch, L tokens, W width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from langevin.checks.report import Broken
from langevin.checks.subjects import Tensors, rms


def largest(x: Tensor) -> float:
    return float(x.detach().abs().max())


def distance(a_BLW: Tensor, b_BLW: Tensor, scale: float | None = None) -> Tensor:
    """|a - b| at each position, as a share of a scale, by default the largest of b."""
    error_L = (a_BLW - b_BLW).detach().abs().amax((0, 2))
    return (error_L / max(largest(b_BLW) if scale is None else scale, 1e-30)).nan_to_num(torch.inf)


def close(a_BLW: Tensor, b_BLW: Tensor, said: str, tolerance: float, scale: float | None = None) -> None:
    far = distance(a_BLW, b_BLW, scale)
    if bool((far > tolerance).any()):
        position = int((far > tolerance).nonzero()[0, 0])
        raise Broken(f"{said} differs at position {position} (by {float(far.max()):.1e})")


def gradients(value: Tensor, tensors: Tensors) -> Tensors:
    grads = torch.autograd.grad(value, list(tensors.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(tensors, grads, strict=True))


def close_gradients(ours: Tensors, theirs: Tensors, said: str, tolerance: float) -> None:
    """The gradients of x at every position, and of the parameters."""
    close(ours["x"], theirs["x"], f"{said}: the gradient of x", tolerance)
    whole = max(largest(grad) for grad in theirs.values())
    for name, grad in theirs.items():
        error = largest(ours[name] - grad) / max(largest(grad), 0.01 * whole, 1e-30)
        if not error <= tolerance:
            raise Broken(f"{said}: the gradient of {name} differs (by {error:.1e})")


def close_to_differences(
    value: Callable[[Tensors], Tensor], tensors: Tensors, rounding: float, said: str
) -> float:
    """The gradients of a sum of values agree with central differences: first along one direction of all
    tensors, then, where that fails, tensor by tensor, to name the one that is wrong. Returns the error.

    With values rounded to ε, a step of √ε gives differences good to √ε, and rarely crosses a kink; ⁴√ε is
    asked for. A wrong gradient is wrong everywhere, a kink is not: three directions.
    """
    step, tolerance = rounding**0.5, rounding**0.25
    values = value(tensors)
    noise = 16 * step * float(values.detach().norm())
    grads = gradients(values.sum(), tensors)

    def error(*names: str) -> tuple[float, str]:
        along = {name: torch.randn_like(tensors[name]) * (rms(tensors[name]) or 1.0) for name in names}
        up, down = (
            float(value({**tensors, **{n: tensors[n] + sign * step * d for n, d in along.items()}}).sum())
            for sign in (1, -1)
        )
        measured = (up - down) / (2 * step)
        backpropagated = sum(float((grads[name] * d).sum()) for name, d in along.items())
        size = abs(measured) + noise / tolerance
        return abs(backpropagated - measured) / size, f"{backpropagated:.6g}, by differences {measured:.6g}"

    with torch.no_grad():
        least, _ = error(*tensors)
        if least <= tolerance:
            return least
        for name in tensors:
            least, seen = min(error(name) for _ in range(3))
            if not least <= tolerance:
                raise Broken(f"{said}: the gradient of {name} is {seen}")
    return least
