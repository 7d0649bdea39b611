"""Exact in every mode a call may run in: autocast, half precision, inference mode, fake tensors."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import langevin
from langevin.kernels import banded, sdpa
from langevin.mixers import View

SPECS = [
    "softmax",
    "ssmax",
    "heat(t='adaptive')",
    "heat(t='head', distance='squared')",
    "heat(t=0.28, distance='squared')",
    "heat(t=1, alpha=0.1)",
    "sigmoid",
    "sima",
]

LARGE = torch.tensor([40.0, 40.0, 1.0])[:, None, None, None, None]  # the rms of q, k and v


def tensors(length=9, dtype=torch.float32, heads=(4, 4, 4), width=8):
    return [torch.randn(2, h, length, width).to(dtype) for h in heads]


def error(ours, exact):
    return [float(((a.double() - e).norm() / e.norm()).detach()) for a, e in zip(ours, exact, strict=True)]


@pytest.mark.parametrize("view", ["plain", "packed"])
@pytest.mark.parametrize("spec", ["sima", "sima(scale='n')", "heat(t=1, alpha=0.1)", "sigmoid", "ssmax"])
def test_autocast_takes_no_precision_away(spec, view):
    """Outputs and gradients of the same bfloat16 tensors, with autocast and without."""
    torch.manual_seed(0)
    options = {"documents": (torch.arange(150) // 50).expand(2, -1)} if view == "packed" else {}
    inputs = tensors(150, torch.bfloat16, heads=(2, 2, 2), width=32)

    def run(dtype, autocast):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = langevin.attend(q, k, v, spec, causal=True, **options)
        return y, *torch.autograd.grad(y.square().sum(), (q, k, v))

    exact = run(torch.float64, False)
    plain, under_autocast = (error(run(torch.bfloat16, on), exact) for on in (False, True))
    for a, b in zip(under_autocast, plain, strict=True):
        assert a <= 1.5 * b


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("implementation", ["fused", "reference"])
@pytest.mark.parametrize("spec", SPECS)
def test_large_queries_and_keys_stay_finite_in_float16(spec, implementation, width):
    torch.manual_seed(0)
    q, k, v = (x.half().requires_grad_() for x in torch.randn(3, 1, 2, 30, width) * LARGE)
    out = langevin.attend(q, k, v, spec, causal=True, implementation=implementation)
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.float().sum(), (q, k, v)):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode])
@pytest.mark.parametrize("spec", ["ssmax", "heat(t='adaptive')", "softmax+drift"])
def test_a_call_leaves_nothing_behind(spec, mode):
    with mode():
        langevin.attend(*tensors(), spec, causal=True)
    q, k, v = (x.requires_grad_() for x in tensors())
    out = langevin.attend(q, k, v, spec, causal=True)
    assert type(out) is torch.Tensor
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_returned_weights_carry_gradients(spec):
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.float64))
    out, w = langevin.attend(q, k, v, spec, causal=True, return_weights=True)
    torch.testing.assert_close(out, langevin.attend(q, k, v, spec, causal=True))
    for gradient in torch.autograd.grad(w.square().sum(), (q, k)):
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_padding_does_not_widen_the_band(side, causal, monkeypatch):
    shifts = []
    outwards = banded._outwards
    monkeypatch.setattr(banded, "_outwards", lambda n, c: shifts.append(n) or outwards(n, c))
    real = torch.ones(2, 1000, dtype=torch.bool)
    real[0, :200] = False
    real = real if side == "left" else real.flip(1)
    q, k, v = tensors(1000, torch.float64)
    options = {"causal": causal, "key_padding_mask": real}
    out = langevin.attend(q, k, v, "heat(t=0.16, alpha=1.0)", **options)
    assert shifts == [1]
    plain = langevin.attend(q, k, v, "heat(t=0.16, alpha=1.0)", implementation="reference", **options)
    torch.testing.assert_close(out * real[:, None, :, None], plain * real[:, None, :, None])


def test_the_band_allows_for_products_that_a_gpu_rounds(monkeypatch):
    """Where the exact product of a far key is just out of reach, its product in TF32 (11 bits) is not."""
    q, k, v = (torch.zeros(1, 1, 192, 1) for _ in range(3))
    q[..., 64:, :], k[..., 63, :], v[..., 63, :] = 1600.51, 1600.51, 1.0
    penalty = torch.full((1, 1, 192), (1600.51**2 + 300) / 65**2)
    view = View.of(192, 192, causal=True)
    exact_scores, exact_reach = banded._Grid.scores, banded._Grid.reach

    def rounded(grid, shift):
        full = grid.q, grid.k
        grid.q, grid.k = ((x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for x in full)
        s = exact_scores(grid, shift)
        grid.q, grid.k = full
        return s

    def mixed(margin=banded._ROUNDED, reach=exact_reach):
        monkeypatch.setattr(banded, "_ROUNDED", margin)
        monkeypatch.setattr(banded._Grid, "reach", reach)
        return banded.attention(q, k, v, penalty, view)

    monkeypatch.setattr(banded._Grid, "scores", rounded)
    everything = mixed(reach=lambda grid, top: grid.N - 1)
    assert torch.equal(mixed(), everything)
    assert not torch.equal(mixed(margin=1.0), everything)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("view", ["plain", "masked", "alibi"])
def test_a_fused_kernel_never_gets_a_mask_together_with_shared_key_heads(queries, view, monkeypatch):
    """No GPU kernel takes both, and the fallback is quadratic in memory."""
    calls = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, **how):
        calls.append((q, k, how))
        return fused(q, k, v, **how)

    monkeypatch.setattr(sdpa.F, "scaled_dot_product_attention", noted)
    q, k, v = tensors(5, torch.float64, heads=(4, 2, 2))
    options = {"alibi": True, "causal": False} if view == "alibi" else {"causal": True}
    if view == "masked":
        options["key_padding_mask"] = torch.tensor([[False, True, True, True, True], [True] * 5])
    out = langevin.attend(q[:, :, -queries:], k, v, **options)
    ((q_in, k_in, how),) = calls
    assert (q_in.shape[1] == k_in.shape[1]) or (how["attn_mask"] is None and how["enable_gqa"])
    assert type(how["enable_gqa"]) is type(how["is_causal"]) is bool
    repeated = [x.repeat_interleave(2, 1) for x in (k, v)]
    torch.testing.assert_close(out, langevin.attend(q[:, :, -queries:], *repeated, **options))


def test_only_training_without_masks_is_left_to_a_kernel_that_plans_for_every_shape():
    q = torch.empty(1, 2, 5, 8, device="meta")
    training = q.clone().requires_grad_()
    assert sdpa.may_plan(training, None)
    assert not sdpa.may_plan(training, torch.ones(5, 5, dtype=torch.bool))
    assert not sdpa.may_plan(training[:, :, :1], None)
    assert not sdpa.may_plan(q, None)


def test_a_part_may_be_imported_first():
    subprocess.run([sys.executable, "-c", "import langevin.kernels.linear"], check=True, timeout=120)
