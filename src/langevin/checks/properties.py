"""What must hold for every mixer and every causal model. Each property tries to break the subject and says
where it broke.

B batch, L tokens, W width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from langevin.checks.comparing import (
    close,
    close_gradients,
    close_to_differences,
    distance,
    gradients,
    largest,
)
from langevin.checks.conditions import CONDITIONS, Condition, as_rows, at, qkv, with_parameters
from langevin.checks.report import Broken, NotOffered
from langevin.checks.subjects import HEADS, Subject, Tensors, rms
from langevin.errors import one_line

Property = Callable[[Subject], str]


@torch.no_grad()
def no_future_leak(subject: Subject) -> str:
    """Changing token j changes no output before j, in training and evaluation: bit for bit, or, where past
    and future meet in one sum (an FFT), by no more than the rounding of the largest output."""
    _need_causal(subject)
    tried, exact = 0, True
    for training, length in product((False, True), subject.lengths):
        module = subject.module(causal=True).train(training)
        x = subject.inputs(3, length)
        for layout in subject.layouts(length):
            before = layout.without_padding(subject.run(module, x, **layout.masks))
            for j in (1, length // 2, length - 1):
                changed = x.clone()
                changed[:, j] += torch.randn(x.shape[2], dtype=x.dtype) * 5 * rms(x)
                after = layout.without_padding(subject.run(module, changed, **layout.masks))
                mode = "training" if training else "evaluation"
                said = f"changing token {j} of {length} ({layout.name}, {mode}): an earlier output"
                close(before[:, :j], after[:, :j], said, 64 * subject.rounding, largest(after))
                exact &= torch.equal(before[:, :j], after[:, :j])
                tried += 1
    return f"{tried} perturbations, {'bit for bit' if exact else 'to rounding'}"


@torch.no_grad()
def prefix_equals_full(subject: Subject) -> str:
    """The outputs for a prefix do not depend on whether the rest is there."""
    _need_causal(subject)
    module = subject.module(causal=True)
    for length in subject.lengths:
        x = subject.tokens(2, length)
        full = subject.run(module, x)
        for m in (1, 2, length // 2, length - 1):
            said = f"the prefix of {m} of {length} tokens"
            close(subject.run(module, x[:, :m]), full[:, :m], said, subject.tolerance)
    return "the same outputs for prefixes"


@torch.no_grad()
def cached_equals_full(subject: Subject) -> str:
    """Token by token with a cache, after a prefill, equals one call; under every condition."""
    _need_causal(subject)
    subject.need("cache")
    short, long = subject.lengths
    cases: list[tuple[int, int, dict[str, int]]] = [(short, 1, {}), (short, 6, {}), (long, long - 9, {})]
    cases += [(short, 6, {name: 2}) for name in ("window", "kv_heads") if name in subject.takes]
    for length, prefill, options in cases:
        module: Any = subject.module(causal=True, **options)
        for layout in subject.layouts(length, "cache"):
            x = subject.tokens(3, length)
            cache, parts = module.new_cache(), []
            for start, stop in [(0, prefill), *((i, i + 1) for i in range(prefill, length))]:
                seen = {key: mask[:, :stop] for key, mask in layout.masks.items()}
                parts.append(subject.run(module, x[:, start:stop], cache=cache, **seen))
            ours = layout.without_padding(torch.cat(parts, 1))
            full = layout.without_padding(subject.run(module, x, **layout.masks))
            how = ", ".join([layout.name, *(f"{name} {value}" for name, value in options.items())])
            close(
                ours, full, f"cached decoding after {prefill} of {length} tokens ({how})", subject.tolerance
            )
    return "token by token = one call"


def _as_alone(subject: Subject, condition: Condition) -> str:
    tried = 0
    with torch.no_grad():
        for causal, length in _cases(subject):
            for pair in condition(subject, causal, length, False):
                close(pair.ours, pair.theirs, f"{pair.said}: the output", subject.tolerance)
                tried += 1
    return f"{tried} cases, as if alone"


@torch.no_grad()
def evaluation_is_deterministic(subject: Subject) -> str:
    """In evaluation mode nothing is random."""
    for causal, length in _cases(subject):
        module, x = subject.module(causal), subject.tokens(2, length)
        first, second = (subject.run(module, x, seed=seed) for seed in (1, 2))
        close(first, second, "running twice with different seeds: the output", 0.0)
    return "two seeds, same bits"


def gradients_are_right(subject: Subject) -> str:
    """Of x and every parameter: alone they agree with central differences, and under every condition with
    what they are alone."""
    worst, tried = 0.0, 0
    for causal, length in _cases(subject):
        module = subject.module(causal)
        tensors = with_parameters(subject.inputs(1, length).requires_grad_(), module)
        u = torch.randn_like(subject.run(module, tensors["x"]))

        def value(moved: Tensors, module: nn.Module = module, u: Tensor = u) -> Tensor:
            return subject.run(module, moved["x"], moved=moved).double() * u

        worst = max(worst, close_to_differences(value, tensors, subject.rounding, at(length, causal)))
        for condition in CONDITIONS.values():
            try:
                for pair in condition(subject, causal, length, True):
                    if float(distance(pair.ours, pair.theirs).max()) > subject.tolerance:
                        continue  # the condition's own row tells
                    u = torch.randn_like(pair.ours)
                    ours, theirs = (
                        gradients((y * u).sum(), pair.tensors) for y in (pair.ours, pair.theirs)
                    )
                    close_gradients(ours, theirs, pair.said, subject.tolerance)
                    tried += 1
            except NotOffered:
                continue
    return f"{worst:.0e} from central differences, {tried} cases as if alone"


def low_precision_is_as_good_as_plain(subject: Subject) -> str:
    """The error in bf16 and fp16 is at most twice that of explicit weights in the same precision."""
    if subject.qkv is None or subject.spec is None:
        raise NotOffered("no explicit weights to compare with")
    attend, plainly = subject.qkv, partial(subject.qkv, implementation="reference")
    worst = 0.0
    for causal, dtype in product(subject.directions, (torch.bfloat16, torch.float16)):
        low = [x.to(dtype) for x in qkv(96, HEADS, torch.float32)]
        exact = plainly(*(x.double() for x in low), causal=causal)
        ours, plain = attend(*low, causal=causal), plainly(*low, causal=causal)
        if ours.dtype != dtype:
            raise Broken(f"{dtype} in, {ours.dtype} out")
        ratio = rms(ours - exact) / max(rms(plain - exact), 1e-12)
        worst = max(worst, ratio)
        if not ratio <= 2:
            place = int((ours - exact).abs().amax((0, 1, 3)).argmax())
            raise Broken(f"{dtype}: {ratio:.1f} times the plain error, most at position {place}")
    return f"{worst:.2f} times the error of the plain computation"


def autocast_is_as_good_as_rounding(subject: Subject) -> str:
    """In bf16 autocast outputs and gradients are finite, and their error is at most three times that of
    rounding x and the parameters to bf16 and computing exactly from there."""
    worst = 0.0
    for causal, length in _cases(subject):
        layout = subject.layouts(length)[-1]
        module, x = subject.module(causal), subject.inputs(3, length)
        exact = _output_and_gradient(subject, module, x, **layout.masks)
        moved = {name: y.bfloat16().to(y.dtype) for name, y in with_parameters(x, module).items()}
        rounded = _output_and_gradient(subject, module, moved["x"], moved=moved, **layout.masks)
        ours = _output_and_gradient(subject, module.float(), x.float(), autocast=True, **layout.masks)
        for name, y in ours.items():
            said = f"{layout.name}, {at(length, causal)}: the {name}"
            _finite(y, said)
            ratio = rms(y - exact[name]) / max(rms(rounded[name] - exact[name]), 1e-12)
            worst = max(worst, ratio)
            if not ratio <= 3:
                raise Broken(f"{said} is off by {ratio:.1f} times the error of rounded inputs")
    return f"{worst:.1f} times the error of rounded inputs"


def finite_everywhere(subject: Subject) -> str:
    """Huge, tiny and constant inputs and rows that see nothing give finite outputs and gradients."""
    length = subject.lengths[0]
    for causal in subject.directions:
        module, x = subject.module(causal).float(), subject.inputs(2, length).float()
        cases: dict[str, tuple[Tensor, dict[str, Any]]] = {
            "inputs 100 times as large": (x * 100, {}),
            "inputs of 1e-30": (x * 1e-30, {}),
            "zeros": (x * 0, {}),
            "equal tokens": (x[:, :1].expand_as(x), {}),
        }
        if "key_padding_mask" in subject.takes:
            mask = torch.tensor([[False], [True]]).expand(2, length)
            cases["a fully padded sequence"] = (x, {"key_padding_mask": mask})
        for said, (inputs, masks) in cases.items():
            for name, y in _output_and_gradient(subject, module, inputs, **masks).items():
                _finite(y, f"{said}: the {name}")
    return "outputs and gradients finite"


def compiles_without_graph_breaks(subject: Subject) -> str:
    """torch.compile takes one function without a graph break at two lengths and batch sizes, and gives the
    same outputs and gradients."""
    for causal in subject.directions:
        module = subject.module(causal).float()
        torch._dynamo.reset()
        backend = _traced_once if subject.embedding is None else "eager"
        compiled: Any = torch.compile(module, fullgraph=True, backend=backend)
        for batch, length in ((2, 7), (3, 11)):
            said, x = f"{batch} × {at(length, causal)}", subject.inputs(batch, length).float()
            try:
                ours = _output_and_gradient(subject, compiled, x)
            except Exception as error:
                cause: BaseException = error
                while cause.__cause__ is not None:  # torch wraps what went wrong
                    cause = cause.__cause__
                raise Broken(f"{said}: {one_line(cause)}") from error
            for name, y in _output_and_gradient(subject, module, x).items():
                close(ours[name], y, f"{said}: the compiled {name}", 1e-3)
    return "two shapes without a graph break, forward and backward"


def _traced_once(graph: Any, inputs: list[Any]) -> Any:
    """A backend that traces the backward pass too, but for symbolic lengths, where that takes seconds."""
    if any(isinstance(x, torch.SymInt) for x in inputs):
        return graph.forward
    return lookup_backend("aot_eager")(graph, inputs)


def formula(subject: Subject) -> str:
    """It computes the published formula of `against`, at several scales; a registered mixer its own."""
    if subject.against is None:
        raise NotOffered("no formula to compare with")
    if subject.qkv is None or subject.against.qkv is None:
        raise NotOffered("no q, k and v")
    for causal, length in _cases(subject):
        q, k, v = qkv(length, HEADS, torch.float64)
        for size in (0.3, 1.0, 3.0):
            ours = subject.qkv(q * size, k, v, causal=causal)
            theirs = subject.against.qkv(q * size, k, v, causal=causal, implementation="reference")
            said = f"the formula of {subject.against.name} (queries scaled by {size})"
            close(as_rows(ours), as_rows(theirs), said, subject.tolerance)
    return f"equals {subject.against.name}"


def _cases(subject: Subject) -> Iterator[tuple[bool, int]]:
    return product(subject.directions, subject.lengths)


def _need_causal(subject: Subject) -> None:
    if True not in subject.directions:
        raise NotOffered("not causal")


def _output_and_gradient(
    subject: Subject, module: nn.Module, x: Tensor, autocast: bool = False, **options: Any
) -> Tensors:
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):  # the backward pass is no part of it
        out = subject.run(module, x, **options)
    u = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"output": out, **gradients((out * u).sum(), {"gradient of x": x})}


def _finite(x_BLW: Tensor, said: str) -> None:
    bad = ~x_BLW.isfinite()
    if bool(bad.any()):
        raise Broken(f"{said} at position {int(bad.nonzero()[0, 1])} is not finite")


PROPERTIES: dict[str, Property] = {
    "no future leak": no_future_leak,
    "prefix = full": prefix_equals_full,
    "cached = full": cached_equals_full,
    **{name: partial(_as_alone, condition=condition) for name, condition in CONDITIONS.items()},
    "evaluation is deterministic": evaluation_is_deterministic,
    "gradients": gradients_are_right,
    "low precision": low_precision_is_as_good_as_plain,
    "autocast": autocast_is_as_good_as_rounding,
    "finite": finite_everywhere,
    "compiles": compiles_without_graph_breaks,
    "formula": formula,
}
