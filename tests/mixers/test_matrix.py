"""Every registered mixer × {causal, bidirectional} × {plain, left, right, packed, cached}
× {reference, fused}: forward and gradients against the independent float64 formulas."""

import pytest
import torch

import formulas
from langevin import mixers
from langevin.kernels.recurrence import recurrence
from langevin.models.attention import Attention

SPECS = [
    *(spec for spec in mixers.examples() if "noise" not in spec),
    "sigmoid(bias=-3.0)",
    "ssmax(s=0.43)",
    "heat(t='adaptive', distance='squared', alpha=0.05)",
    "neighbor(shared=False, alpha=0.7)",
    "sima+drift(gain=0.1)",
    "neighbor+drift(kind='gate', gate=-1.0, baseline=0.2)",
]
B, L, W, H = 2, 11, 16, 4


def make(spec, causal, **options):
    """A float64 module with every parameter off its initial value; two query heads share a key head."""
    if mixers.parse(spec).mixer.name != "neighbor":
        options.setdefault("kv_heads", 2)
    module = mixers.build(spec, width=W, heads=H, causal=causal, depth=7, max_length=L, **options)
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return module


def masks(view):
    if view in ("left-padded", "right-padded"):
        real = torch.ones(B, L, dtype=torch.bool)
        real[0, :3] = False
        return {"real": real if view == "left-padded" else real.flip(1)}
    if view == "packed":
        return {"documents": torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3], [5] * 6 + [4] * 5])}
    return {}


def ours(module, x, view, implementation, real=None, documents=None):
    is_attention = isinstance(module, Attention)
    options = {"return_weights": True} if implementation == "reference" and is_attention else {}

    def call(x, **more):
        out = module(x, **more, **options)
        return out[0] if options else out

    if view != "cached":
        return call(x, key_padding_mask=real, documents=documents)
    cache = module.new_cache()
    parts = [call(x[:, :4], cache=cache)]
    parts += [call(x[:, i : i + 1], cache=cache) for i in range(4, L)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("implementation", ["reference", "fused"])
@pytest.mark.parametrize("view", ["plain", "left-padded", "right-padded", "packed", "cached"])
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("spec", SPECS)
def test_forward_and_gradients_equal_the_formula(spec, direction, view, implementation):
    causal = direction == "causal"
    module = make(spec, causal)
    if view == "cached" and not causal:
        with pytest.raises(ValueError, match="cannot continue from a cache"):
            ours(module, torch.randn(B, L, W, dtype=torch.float64), view, implementation)
        return
    x = torch.randn(B, L, W, dtype=torch.float64, requires_grad=True)
    formula = formulas.attention_module if isinstance(module, Attention) else formulas.neighbor_module
    mask = masks(view)
    expected = formula(module, x, causal=causal, **mask)
    actual = ours(module, x, view, implementation, **mask)
    real = mask.get("real", torch.ones(B, L, dtype=torch.bool))[..., None]
    assert actual.shape == x.shape
    torch.testing.assert_close(actual * real, expected * real, rtol=0, atol=1e-10)

    cotangent = torch.randn_like(x) * real
    tensors = [x, *module.parameters()]
    gradients = (
        torch.autograd.grad((y * cotangent).sum(), tensors, allow_unused=True) for y in (actual, expected)
    )
    names = ["x", *(name for name, _ in module.named_parameters())]
    for name, a, e in zip(names, *gradients, strict=True):
        if a is None or e is None:
            assert a is None or not a.any(), name
            assert e is None or not e.any(), name
        else:
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("spec", [s for s in SPECS if mixers.parse(s).mixer.name != "neighbor"])
def test_a_window_shows_only_its_keys(spec, window, direction):
    causal = direction == "causal"
    module = make(spec, causal, window=window)
    x = torch.randn(B, L, W, dtype=torch.float64)
    expected = formulas.attention_module(module, x, causal=causal)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-10)
    if causal:
        torch.testing.assert_close(ours(module, x, "cached", "fused"), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 63, 130, 300])
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
@pytest.mark.parametrize(
    "spec", ["sigmoid", "sima", "heat(t=2.0, alpha=0.01)", "heat(t=0.16, alpha=1.0)", "heat(t='adaptive')"]
)
def test_blocks_and_chunks_join_without_a_seam(spec, direction, length, monkeypatch):
    """Kernels that work in blocks equal explicit weights at lengths around their block sizes."""
    from langevin.kernels import pointwise

    monkeypatch.setitem(pointwise._BLOCK_ELEMENTS, "cpu", 4 * 32 * 40)
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64) for _ in range(3))
    documents = torch.arange(length)[None] // 37
    for options in ({}, {"documents": documents}, {"window": 9}):
        options["causal"] = direction == "causal"
        fused = mixers.attend(q, k, v, spec, **options)
        plain = mixers.attend(q, k, v, spec, implementation="reference", **options)
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [2, 15, 16, 17, 256, 300])
@pytest.mark.parametrize("traced", [False, True])
def test_a_recurrence_passes_from_chunk_to_chunk(length, traced, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: traced)
    a, g = torch.rand(2, 1, length, 3, dtype=torch.float64).requires_grad_()
    expected = [g[:, 0]]
    for i in range(1, length):
        expected.append(a[:, i] * expected[-1] + g[:, i])
    actual, expected = recurrence(a, g), torch.stack(expected, 1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(actual)
    ours, theirs = (torch.autograd.grad((s * cotangent).sum(), (a, g)) for s in (actual, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 0, 4), (2, 1, 4), (2, 5, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_recurrence_of_no_token_of_one_or_of_one_channel(shape, causal):
    module = mixers.build("neighbor(kind='recurrent')", width=shape[2], heads=1, causal=causal)
    assert module(torch.randn(shape)).shape == shape
