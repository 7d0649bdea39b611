"""What must hold for every mixer. Each property tries to break the subject and says where it broke.

B batch, L tokens, W width. Outputs are compared bit for bit where nothing may change, and to rounding
error in float64 where the same thing is computed in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from langevin.checks.comparing import close, rms, same_bits, slope
from langevin.checks.report import Broken, NotOffered
from langevin.checks.subjects import HEADS, WIDTH, Subject

LENGTHS = (17, 150)  # odd, and past the blocks of the chunked kernels

Property = Callable[[Subject], str]
PROPERTIES: dict[str, Property] = {}


def named(name: str) -> Callable[[Property], Property]:
    def add(function: Property) -> Property:
        PROPERTIES[name] = function
        return function

    return add


@named("no future leak")
def no_future_leak(subject: Subject) -> str:
    """Changing token j changes no output before j, bit for bit, in training and evaluation."""
    _need_direction(subject, True)
    tried = 0
    for training in (False, True):
        module = subject.module(causal=True).train(training)
        for length in LENGTHS:
            for how, options in _masks(subject, length):
                x = _tokens(length)
                before = _run(module, x, **options)
                for j in {1, length // 2, length - 1}:
                    changed = x.clone()
                    changed[:, j] += torch.randn(WIDTH, dtype=x.dtype) * 3
                    after = _run(module, changed, **options)
                    mode = "training" if training else "evaluation"
                    said = f"changing token {j} of {length} ({how}, {mode})"
                    real = options.get("key_padding_mask")
                    same_bits(before[:, :j], after[:, :j], said, real)
                    tried += 1
    return f"{tried} perturbations, bit for bit"


@named("prefix = full")
def prefix_equals_full(subject: Subject) -> str:
    """The outputs for a prefix do not depend on whether the rest is there."""
    _need_direction(subject, True)
    module = subject.module(causal=True).eval()
    for length in LENGTHS:
        x = _tokens(length)
        full = _run(module, x)
        for m in {1, 2, length // 2, length - 1}:
            close(_run(module, x[:, :m]), full[:, :m], f"the prefix of {m} of {length} tokens")
    return "the same outputs for prefixes"


@named("cached = full")
def cached_equals_full(subject: Subject) -> str:
    """Token by token with a cache, after a prefill, equals one call; with padding and documents too."""
    _need_direction(subject, True)
    _need(subject, "cache")
    module = subject.module(causal=True).eval()
    length = LENGTHS[0]
    for how, options in _masks(subject, length):
        x = _tokens(length)
        full = _run(module, x, **options)
        for prefill in (1, 6):
            cache: Any = module.new_cache()  # type: ignore[operator]
            parts = []
            for start, stop in [(0, prefill), *((i, i + 1) for i in range(prefill, length))]:
                seen = {key: mask[:, :stop] for key, mask in options.items()}
                parts.append(_run(module, x[:, start:stop], cache=cache, **seen))
            said = f"cached decoding after {prefill} tokens ({how})"
            close(torch.cat(parts, 1), full, said, options.get("key_padding_mask"))
    return "token by token = one call"


@named("padding")
def padding_changes_nothing(subject: Subject) -> str:
    """Side, amount and content of padding change nothing at real tokens."""
    _need(subject, "key_padding_mask")
    tried = 0
    for causal in subject.directions:
        module = subject.module(causal).eval()
        for length in LENGTHS:
            x = _tokens(length)
            alone = _run(module, x)
            for side in ("left", "right"):
                for amount in (1, 5):
                    for size in (1.0, 30.0):
                        junk = torch.randn(x.shape[0], amount, WIDTH, dtype=x.dtype) * size
                        out = _padded(module, x, junk, side)
                        close(out, alone, f"{amount} padding tokens on the {side}")
                        tried += 1
    return f"{tried} paddings, same outputs"


@named("packed documents")
def documents_do_not_mix(subject: Subject) -> str:
    """A packed document gives what it gives alone, and no other document can change a bit of it."""
    _need(subject, "documents")
    for causal in subject.directions:
        module = subject.module(causal).eval()
        for lengths in ((5, 1, 11), (40, 90, 61)):
            ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            documents = ids.expand(2, -1)
            x = _tokens(sum(lengths))
            packed = _run(module, x, documents=documents)
            for i, part in enumerate(x.split(lengths, 1)):
                said = f"document {i} of lengths {lengths}"
                close(packed.split(lengths, 1)[i], _run(module, part), f"{said}, packed")
                changed = x + (ids != i)[:, None] * torch.randn_like(x) * 3
                after = _run(module, changed, documents=documents)
                inside = (ids == i).nonzero()[:, 0]
                same_bits(packed[:, inside], after[:, inside], f"changing the others ({said})")
    return "each as if alone"


@named("evaluation is deterministic")
def evaluation_is_deterministic(subject: Subject) -> str:
    """In evaluation mode nothing is random."""
    for causal in subject.directions:
        module = subject.module(causal).eval()
        x = _tokens(LENGTHS[0])
        first, second = _run(module, x, seed=1), _run(module, x, seed=2)
        same_bits(first, second, "running twice with different seeds")
    return "two seeds, same bits"


@named("gradients")
def gradients_are_right(subject: Subject) -> str:
    """Backpropagation agrees with central differences in float64, for x and every parameter."""
    worst = 0.0
    for causal in subject.directions:
        module = subject.module(causal).eval()
        x = _tokens(9).requires_grad_()
        cotangent = torch.randn(2, 9, WIDTH, dtype=x.dtype)
        tensors = {"x": x, **dict(module.named_parameters())}

        def value(x: Tensor = x, module: nn.Module = module, u: Tensor = cotangent) -> Tensor:
            return (_run(module, x) * u).sum()

        grads = torch.autograd.grad(value(), list(tensors.values()), allow_unused=True)
        for (name, tensor), grad in zip(tensors.items(), grads, strict=True):
            for attempt in range(3):  # a wrong gradient is wrong everywhere, a kink is not
                direction = torch.randn_like(tensor)
                backpropagated = 0.0 if grad is None else float((grad * direction).sum())
                measured = slope(value, tensor, direction)
                error = abs(backpropagated - measured) / max(1.0, abs(measured))
                if error < 1e-5:
                    worst = max(worst, error)
                    break
                if attempt == 2:
                    raise Broken(
                        f"the gradient of {name} is {backpropagated:.6g}, by differences {measured:.6g}"
                    )
    return f"relative error at most {worst:.0e}"


@named("low precision")
def low_precision_is_as_good_as_plain(subject: Subject) -> str:
    """The error in bf16 and fp16 is at most twice that of explicit weights in the same precision."""
    if subject.qkv is None or subject.spec is None:
        raise NotOffered("no explicit weights to compare with")
    worst = 0.0
    for causal in subject.directions:
        for dtype in (torch.bfloat16, torch.float16):
            torch.manual_seed(3)
            q, k, v = (torch.randn(2, HEADS, 96, 16).to(dtype) for _ in range(3))
            exact = subject.qkv(
                q.double(), k.double(), v.double(), causal=causal, implementation="reference"
            )
            ours = subject.qkv(q, k, v, causal=causal)
            plain = subject.qkv(q, k, v, causal=causal, implementation="reference")
            if ours.dtype != dtype:
                raise Broken(f"{dtype} in, {ours.dtype} out")
            our_error, plain_error = rms(ours - exact), rms(plain - exact)
            ratio = our_error / max(plain_error, 1e-12)
            worst = max(worst, ratio)
            if not ratio <= 2:
                place = int((ours - exact).abs().amax((0, 1, 3)).argmax())
                raise Broken(f"{dtype}: {ratio:.1f} times the plain error, most at position {place}")
    return f"{worst:.2f} times the error of the plain computation"


@named("finite")
def finite_everywhere(subject: Subject) -> str:
    """Huge, tiny and constant inputs and rows that see nothing give finite outputs and gradients."""
    for causal in subject.directions:
        module = subject.module(causal).float().eval()
        x = _tokens(LENGTHS[0]).float()
        cases = {
            "inputs of 100": x * 100,
            "inputs of 1e-30": x * 1e-30,
            "zeros": x * 0,
            "equal tokens": x[:, :1].expand_as(x),
        }
        for name, case in cases.items():
            _finite(module, case, name)
        if "key_padding_mask" in subject.takes:
            mask = torch.ones(2, LENGTHS[0], dtype=torch.bool)
            mask[0] = False
            _finite(module, x, "a fully padded sequence", key_padding_mask=mask)
    return "outputs and gradients finite"


@named("compiles")
def compiles_without_graph_breaks(subject: Subject) -> str:
    """torch.compile takes forward and backward as one graph and gives the same numbers."""
    for causal in subject.directions:
        module = subject.module(causal).float().eval()
        x = _tokens(LENGTHS[0]).float().requires_grad_()
        torch._dynamo.reset()
        try:
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            out = compiled(x)
            (grad,) = torch.autograd.grad(out.square().sum(), x)
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
        plain = module(x)
        (plain_grad,) = torch.autograd.grad(plain.square().sum(), x)
        close(out, plain, "compiled forward", tolerance=1e-4)
        close(grad, plain_grad, "compiled backward", tolerance=1e-3)
    return "one graph, forward and backward"


def formula(against: Subject) -> Property:
    """A property: the subject computes the published formula of `against`, at several scales."""

    def follows_the_formula(subject: Subject) -> str:
        if subject.qkv is None or against.qkv is None:
            raise NotOffered("no q, k and v")
        for causal in subject.directions:
            for size in (0.3, 1.0, 3.0):
                torch.manual_seed(4)
                shape = (2, HEADS, LENGTHS[0], 8)
                q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
                ours = subject.qkv(q * size, k, v, causal=causal)
                theirs = against.qkv(q * size, k, v, causal=causal, implementation="reference")
                said = f"the formula of {against.name} (queries scaled by {size})"
                close(ours.transpose(1, 2), theirs.transpose(1, 2), said)
        return f"equals {against.name}"

    return follows_the_formula


def _masks(subject: Subject, length: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The ways of masking the subject takes."""
    yield "plain", {}
    if "key_padding_mask" in subject.takes:
        left = torch.ones(2, length, dtype=torch.bool)
        left[0, :3] = False
        yield "left-padded", {"key_padding_mask": left}
    if "documents" in subject.takes:
        documents = (torch.arange(length) >= length // 3).long().expand(2, -1)
        yield "packed", {"documents": documents}


def _tokens(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(2, length, WIDTH, dtype=torch.float64, generator=generator)


def _run(module: nn.Module, x: Tensor, seed: int = 0, **options: Any) -> Tensor:
    torch.manual_seed(seed)
    out: Tensor = module(x, **options)
    if out.shape != x.shape:
        raise Broken(f"x of shape {tuple(x.shape)} gave {tuple(out.shape)}")
    return out


def _padded(module: nn.Module, x: Tensor, junk: Tensor, side: str) -> Tensor:
    amount = junk.shape[1]
    mask = torch.ones(x.shape[0], x.shape[1] + amount, dtype=torch.bool)
    if side == "left":
        mask[:, :amount] = False
        return _run(module, torch.cat([junk, x], 1), key_padding_mask=mask)[:, amount:]
    mask[:, -amount:] = False
    return _run(module, torch.cat([x, junk], 1), key_padding_mask=mask)[:, :-amount]


def _finite(module: nn.Module, x: Tensor, said: str, **options: Any) -> None:
    x = x.detach().clone().requires_grad_()
    out = _run(module, x, **options)
    bad = ~out.isfinite()
    if bool(bad.any()):
        raise Broken(f"{said}: the output at position {int(bad.nonzero()[0, 1])} is not finite")
    (grad,) = torch.autograd.grad(out.sum(), x)
    bad = ~grad.isfinite()
    if bool(bad.any()):
        raise Broken(f"{said}: the gradient at position {int(bad.nonzero()[0, 1])} is not finite")


def _need(subject: Subject, what: str) -> None:
    if what not in subject.takes:
        raise NotOffered(f"takes no {what}")


def _need_direction(subject: Subject, causal: bool) -> None:
    if causal not in subject.directions:
        raise NotOffered("not causal" if causal else "not bidirectional")
