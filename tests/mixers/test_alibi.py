"""ALiBi positions: every weight is the mixer's own, made smaller by e^(-m |i - j|)."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

import formulas
from langevin import mixers
from langevin.errors import UsageError
from langevin.mixers import Geometry, Inputs, View, alibi
from langevin.models.attention import QKV

SPECS = [
    "softmax",
    "ssmax(bias='head')",
    "heat(t=0.28)",
    "heat(t='adaptive')",
    "heat(t='head', distance='squared')",
    "heat(t=2.0, alpha=0.1)",
    "sigmoid",
    "sigmoid(bias='head')",
    "tempered",
    "softmax+drift",
]
DIRECTIONS = ("causal", "bidirectional")
VIEWS = ("plain", "left-padded", "right-padded", "packed")
PUBLISHED = {  # the slopes of the authors' code
    1: [2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    8: [2**-i for i in range(1, 9)],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    12: [*(2**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}
B, L, W, H = 2, 11, 18, 6


def reweighted(spec: mixers.Spec, w: torch.Tensor, heads: int) -> torch.Tensor:
    """Weights with the penalty from those without, in float64."""
    length = w.shape[-1]
    m = torch.tensor(PUBLISHED[heads], dtype=w.dtype)
    i = torch.arange(length)
    penalty = torch.exp(-m[:, None, None] * (i[:, None] - i).abs())
    if spec.mixer.name == "sigmoid":  # logit - m d
        seen = w > 0
        odds = torch.where(seen, w / (1 - w), 0.0) * penalty
        return odds / (1 + odds)
    w = w * penalty
    return w / w.sum(-1, keepdim=True).clamp_min(1e-300)


def expected(module: Any, x: torch.Tensor, **view: Any) -> torch.Tensor:
    def project(layer: Any, heads: int) -> torch.Tensor:
        return (x @ layer.weight.T).reshape(B, L, heads, -1).transpose(1, 2)

    q, k, v = project(module.q_proj, H), project(module.k_proj, 2), project(module.v_proj, 2)
    p = dict(module.mixer.scalars.named_parameters())
    _, w = formulas.attention(module.spec.mixer, p, q, k, v, window=module.window, depth=7, **view)
    y = reweighted(module.spec, w, H) @ v.repeat_interleave(H // 2, 1)
    scalars = [dict(s.named_parameters()) for s in module.mixer.wrappers.scalars]
    y = formulas.wrapped(module.spec.wrappers, scalars, y)
    return y.transpose(1, 2).reshape(B, L, -1) @ module.o_proj.weight.T + module.o_proj.bias


def make(spec: str, causal: bool, **options: Any) -> Any:
    """A float64 module whose parameters are off their start; three query heads share a key head."""
    place = {"width": W, "heads": H, "kv_heads": 2, "depth": 7, "max_length": L}
    module = mixers.build(spec, causal=causal, positions="alibi", **place, **options).double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return module


def masks(view: str) -> dict[str, torch.Tensor]:
    real = torch.ones(B, L, dtype=torch.bool)
    real[0, :3] = False
    return {
        "left-padded": {"real": real},
        "right-padded": {"real": real.flip(1)},
        "packed": {"documents": torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3], [5] * 6 + [4] * 5])},
    }.get(view, {})


@pytest.mark.parametrize("heads", PUBLISHED)
def test_slopes_are_those_of_the_paper(heads: int) -> None:
    torch.testing.assert_close(alibi.slopes(heads), torch.tensor(PUBLISHED[heads], dtype=torch.float64))


@pytest.mark.parametrize("implementation", ["reference", "fused"])
@pytest.mark.parametrize(("direction", "view"), [*product(DIRECTIONS, VIEWS), ("causal", "cached")])
@pytest.mark.parametrize("spec", SPECS)
def test_forward_and_gradients_equal_the_formula(
    spec: str, direction: str, view: str, implementation: str
) -> None:
    causal = direction == "causal"
    module = make(spec, causal)
    x = torch.randn(B, L, W, dtype=torch.float64, requires_grad=True)
    mask = masks(view)
    weights = implementation == "reference"

    def call(x: torch.Tensor, **more: Any) -> torch.Tensor:
        out: Any = module(x, return_weights=weights, **more)
        return out[0] if weights else out

    if view == "cached":
        cache = module.new_cache()
        parts = [call(x[:, :4], cache=cache)]
        parts += [call(x[:, i : i + 1], cache=cache) for i in range(4, L)]
        actual = torch.cat(parts, 1)
    else:
        actual = call(x, key_padding_mask=mask.get("real"), documents=mask.get("documents"))
    wanted = expected(module, x, causal=causal, **mask)
    real = mask.get("real", torch.ones(B, L, dtype=torch.bool))[..., None]
    torch.testing.assert_close(actual * real, wanted * real, rtol=0, atol=1e-10)
    cotangent = torch.randn_like(x) * real
    tensors = [x, *module.parameters()]
    ours, theirs = (
        torch.autograd.grad((y * cotangent).sum(), tensors, allow_unused=True) for y in (actual, wanted)
    )
    for a, e in zip(ours, theirs, strict=True):
        if a is not None and e is not None:
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)
        else:
            assert all(g is None or not g.any() for g in (a, e))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_window_keeps_its_distances(spec: str, direction: str) -> None:
    causal = direction == "causal"
    module = make(spec, causal, window=3)
    x = torch.randn(B, L, W, dtype=torch.float64)
    wanted = expected(module, x, causal=causal)
    torch.testing.assert_close(module(x), wanted, rtol=0, atol=1e-10)
    if causal:
        cache = module.new_cache()
        steps = torch.cat([module(x[:, i : i + 1], cache=cache) for i in range(L)], 1)
        torch.testing.assert_close(steps, wanted, rtol=0, atol=1e-10)


def mix(spec: str, x: torch.Tensor, last: int | None = None) -> torch.Tensor:
    """The last queries on all keys, in the precision of x (3, 1, H, L, D): q, k, v."""
    q, k, v = x
    q = q if last is None else q[:, :, -last:]
    geometry = Geometry(q.shape[1], q.shape[3], k.shape[1], alibi=True)
    view = View.of(q.shape[2], k.shape[2], causal=True)
    with torch.no_grad():
        out: torch.Tensor = QKV(mixers.parse(spec), geometry)(q, k, v, view)[0]
    return out


def exactly(spec: str, x: torch.Tensor, last: int | None = None) -> torch.Tensor:
    """The same by explicit weights in float64."""
    q, k, v = x.double()
    q = q if last is None else q[:, :, -last:]
    geometry = Geometry(q.shape[1], q.shape[3], k.shape[1], alibi=True)
    view = View.of(q.shape[2], k.shape[2], causal=True)
    with torch.no_grad():
        out: torch.Tensor = QKV(mixers.parse(spec), geometry).double()(q, k, v, view, weights=True)[0]
    return out


@pytest.mark.parametrize("spec", ["softmax", "ssmax", "heat(t=1.0, distance='squared')", "sigmoid"])
@pytest.mark.parametrize(("length", "last"), [(1000, None), (20_000, 3)])
def test_single_precision_keeps_its_digits_at_any_position(
    spec: str, length: int, last: int | None
) -> None:
    x = torch.randn(3, 1, 12, length, 20)
    ours, exact = mix(spec, x, last), exactly(spec, x, last)
    plain = sum_by_rows(spec, x, last)
    assert error(ours, exact) <= max(2 * error(plain, exact), 2e-6)


@pytest.mark.parametrize("spec", ["softmax", "ssmax", "heat(t=1.0, distance='squared')", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("length", "last"), [(700, None), (20_000, 3)])
def test_half_precision_errs_at_most_twice_as_much_as_an_explicit_bias(
    spec: str, dtype: torch.dtype, length: int, last: int | None
) -> None:
    x = torch.randn(3, 1, 12, length, 20).to(dtype)
    ours, exact = mix(spec, x, last), exactly(spec, x, last)
    plain = sum_by_rows(spec, x, last)
    assert error(ours, exact) <= 2 * error(plain, exact)


def sum_by_rows(spec: str, x: torch.Tensor, last: int | None) -> torch.Tensor:
    """The plain computation in the precision of x: scores, plus an explicit bias, softmax, times v."""
    q, k, v = x
    q = q if last is None else q[:, :, -last:]
    parsed, heads = mixers.parse(spec), q.shape[1]
    view = View.of(q.shape[2], k.shape[2], causal=True)
    m = torch.tensor(PUBLISHED[heads])[:, None, None]
    bias = (-m * (view.distance())).to(x.dtype)
    geometry = Geometry(heads, q.shape[3], heads)
    with torch.no_grad():
        inputs = Inputs(q, k, v, view, QKV(parsed, geometry).scalars(), geometry)
        if parsed.mixer.name == "sigmoid":
            tau, offset = geometry.scale, parsed.mixer.row_bias(inputs)[..., None]
        else:
            tau, kappa = parsed.mixer.scale(inputs), parsed.mixer.key_offset(inputs)
            offset = 0.0 if kappa is None else kappa.to(x.dtype).transpose(-1, -2) * tau
        z = ((q * tau).to(x.dtype) @ k.transpose(-1, -2) + offset).to(x.dtype) + bias
        if parsed.mixer.name == "sigmoid":
            w = z.sigmoid().masked_fill(~view.mask(), 0.0)
        else:
            w = z.masked_fill(~view.mask(), -math.inf).softmax(-1)
        return w @ v


def error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def test_a_bias_on_distance_needs_no_matrix_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The causal softmax family reaches the fused kernel with no mask, so it may be a flash kernel."""
    from langevin.kernels import sdpa

    masks = []
    fused = sdpa._sdpa
    monkeypatch.setattr(sdpa, "_sdpa", lambda *a: masks.append(a[3]) or fused(*a))
    for spec in ("softmax", "ssmax", "heat(t=1.0, distance='squared')"):
        mix(spec, torch.randn(3, 1, 4, 40, 16))
    assert masks == [None, None, None]


def test_autocast_does_not_round_positions() -> None:
    """In single precision a position is one column, which a kernel under autocast would round to 8 bits."""
    x = torch.randn(3, 1, 12, 600, 20)
    with torch.autocast("cpu", torch.bfloat16):
        ours = mix("softmax", x)
    exact = exactly("softmax", x)
    assert error(ours, exact) <= 2 * error(sum_by_rows("softmax", x.bfloat16(), None), exact)


@pytest.mark.parametrize("spec", ["softmax", "heat(t='adaptive')", "heat(t=2.0, alpha=0.1)", "sigmoid"])
def test_a_module_compiles_without_graph_breaks(spec: str) -> None:
    module = make(spec, True).float()
    x = torch.randn(B, L, W, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    compiled(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("implementation", ["reference", "fused"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_attend_takes_alibi_too(direction: str, implementation: str) -> None:
    q, k, v = torch.randn(3, B, H, L, 8, dtype=torch.float64)
    causal = direction == "causal"
    _, w = mixers.attend(q, k, v, "heat(t=0.5)", causal=causal, return_weights=True)
    wanted = reweighted(mixers.parse("heat(t=0.5)"), w, H) @ v
    ours = mixers.attend(q, k, v, "heat(t=0.5)", causal=causal, alibi=True, implementation=implementation)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-10)


def test_mixers_without_logits_refuse() -> None:
    with pytest.raises(UsageError, match="sima has no logits"):
        mixers.attend(*torch.randn(3, B, H, L, 8), "sima", alibi=True)
    with pytest.raises(UsageError, match="sima has no logits"):
        mixers.build("sima", width=16, heads=4, positions="alibi")


def test_a_small_scale_does_not_overflow_half_precision():
    q, k, v = (torch.randn(1, 4, 40, 16, dtype=torch.float16) for _ in range(3))
    exact = mixers.attend(*(x.double() for x in (q, k, v)), "heat(t=300.0)", causal=True, alibi=True)
    found = mixers.attend(q, k, v, "heat(t=300.0)", causal=True, alibi=True)
    torch.testing.assert_close(found.double(), exact, atol=5e-3, rtol=5e-3)
