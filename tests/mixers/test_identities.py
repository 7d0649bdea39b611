"""Equalities between mixers, and facts about their parts."""

import math

import pytest
import torch

import langevin
from langevin import mixers
from langevin.errors import UsageError
from langevin.kernels.view import View

LENGTH = 23


@pytest.fixture
def qkv():
    return tuple(torch.randn(2, 4, LENGTH, 16, dtype=torch.float64) for _ in range(3))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_heat_at_half_root_d_is_softmax(qkv, causal):
    heat = langevin.attend(*qkv, f"heat(t={math.sqrt(16) / 2})", causal=causal)
    same(heat, langevin.attend(*qkv, "softmax", causal=causal))


@pytest.mark.parametrize("spec", ["heat(t='head')", "heat(t='adaptive')"])
def test_learned_heat_starts_as_softmax(qkv, spec):
    same(langevin.attend(*qkv, spec, causal=True), langevin.attend(*qkv, causal=True))


@pytest.mark.parametrize("base", ["softmax", "ssmax", "heat(t=0.5)", "sigmoid", "sima"])
def test_no_gain_and_no_noise_are_the_bare_mixer(qkv, base):
    bare = langevin.attend(*qkv, base, causal=True)
    for wrapper in ("drift", "drift(gain=0)", "noise(std=0)", "drift(kind='gate', gate=-1000)"):
        same(langevin.attend(*qkv, f"{base}+{wrapper}", causal=True, training=True), bare)


def test_ssmax_with_s_ln_n_equal_one_is_softmax(qkv):
    s = 1 / math.log(LENGTH)
    same(langevin.attend(*qkv, f"ssmax(s={s!r})"), langevin.attend(*qkv, "softmax"))


def test_ssmax_starts_with_a_mean_temperature_of_one_over_the_training_length():
    for length, start in ((256, 0.219), (1024, 0.168), (4096, 0.137)):
        module = mixers.build("ssmax", width=8, heads=2, max_length=length)
        s = module.mixer.scalars.s.detach()
        assert s.tolist() == pytest.approx([start] * 2, abs=6e-4)
        mean_log = sum(math.log(n) for n in range(1, length + 1)) / length
        assert float(s[0]) * mean_log == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_sima_in_linear_order_is_sima_in_quadratic_order(qkv, causal):
    same(
        langevin.attend(*qkv, "sima", causal=causal),
        langevin.attend(*qkv, "sima", causal=causal, implementation="reference"),
    )


def test_squared_distance_is_the_explicit_distance(qkv):
    q, k, v = qkv
    explicit = torch.softmax(-torch.cdist(q, k).square() / (4 * 0.7), -1) @ v
    torch.testing.assert_close(
        langevin.attend(q, k, v, "heat(t=0.7, distance='squared')"), explicit, rtol=0, atol=1e-10
    )


def test_alpha_zero_is_no_band(qkv):
    same(
        langevin.attend(*qkv, "heat(t=0.5, alpha=1e-300)", causal=True),
        langevin.attend(*qkv, "heat(t=0.5)", causal=True),
    )


def test_the_depth_law_gives_the_published_times():
    heat = mixers.parse("heat(t='law')").mixer
    for depth, t in ((4, 0.28), (8, 0.20), (12, 0.16), (24, 0.11), (96, 0.06)):
        q = torch.zeros(1, 1, 1, 64)
        x = mixers.Inputs(
            q, q, q, mixers.View.of(1, 1, causal=True), {}, mixers.Geometry(1, 64, 1, depth=depth)
        )
        assert heat.time(x) == pytest.approx(t, abs=0.005)


def test_a_learned_time_stays_inside_its_bounds():
    heat = mixers.parse("heat(t='head', t_min=0.1, t_max=10)").mixer
    levels = torch.tensor([-100.0, 0.0, 100.0], dtype=torch.float64)
    assert heat.bounded(levels).tolist() == pytest.approx([0.1, 1.0, 10.0])


def test_sigmoid_rows_start_with_a_total_weight_near_one_at_every_length():
    q, k, v = (torch.randn(1, 1, 2048, 64) * 0.1 for _ in range(3))
    _, w = langevin.attend(q, k, v, "sigmoid", causal=True, return_weights=True)
    totals = w.sum(-1)[0, 0]
    assert totals[[15, 255, 2047]].tolist() == pytest.approx([1, 1, 1], abs=0.15)


def test_an_adaptive_time_depends_only_on_what_the_query_sees(qkv):
    parameters = {
        "time": torch.zeros(4, dtype=torch.float64),
        "adapt": torch.randn(4, 3, dtype=torch.float64),
    }
    q, k, v = qkv
    spec = "heat(t='adaptive')"
    full = langevin.attend(q, k, v, spec, causal=True, parameters=parameters)
    one = langevin.attend(q[:, :, -1:], k, v, spec, causal=True, parameters=parameters)
    same(one, full[:, :, -1:])
    assert not torch.allclose(full, langevin.attend(q, k, v, causal=True))


def test_a_band_that_depends_on_all_tokens_changes_no_bit(qkv):
    """A huge future key widens the band; earlier outputs keep their bits."""
    q, k, v = (torch.randn(1, 2, 400, 8) for _ in range(3))
    before = langevin.attend(q, k, v, "heat(t=0.5, alpha=0.5)", causal=True)
    k2 = k.clone()
    k2[:, :, 390] *= 200
    after = langevin.attend(q, k2, v, "heat(t=0.5, alpha=0.5)", causal=True)
    assert torch.equal(before[:, :, :390], after[:, :, :390])
    assert not torch.equal(before[:, :, 390:], after[:, :, 390:])


def test_learned_scalars_stay_in_float32_in_a_half_precision_model():
    module = mixers.build("heat+drift(kind='gate')+noise(std='head')", width=16, heads=2)
    module = module.to(torch.bfloat16)
    assert module.q_proj.weight.dtype == torch.bfloat16
    scalars = [m for m in module.modules() if isinstance(m, mixers.Scalars)]
    assert {p.dtype for m in scalars for p in m.parameters()} == {torch.float32}
    assert module(torch.randn(1, 5, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_noise_comes_from_the_given_generator_and_only_in_training(qkv):
    def run(seed, training):
        generator = torch.Generator().manual_seed(seed)
        return langevin.attend(
            *qkv, "softmax+noise(std=0.5)", causal=True, training=training, generator=generator
        )

    assert torch.equal(run(1, True), run(1, True))
    assert not torch.equal(run(1, True), run(2, True))
    assert torch.equal(run(1, False), run(2, False))
    difference = run(1, True) - run(1, False)
    assert float(difference.std()) == pytest.approx(0.5, rel=0.1)


def test_relative_noise_of_neighbor_scales_with_its_input():
    module = mixers.build("neighbor(noise=0.1, alpha=1.0, kind='linear')", width=64, heads=2)
    for size in (0.02, 5.0):
        x = torch.randn(4, 50, 64) * size
        assert float((module(x).detach() - x).std() / x.std()) == pytest.approx(0.1, rel=0.1)
        assert torch.equal(module.eval()(x), x)
        module.train()


@pytest.mark.parametrize("spec", mixers.MIXERS["neighbor"].examples)
@pytest.mark.parametrize("causal", [True, False])
def test_what_stands_at_padding_reaches_neither_output_nor_gradients_of_neighbor(spec, causal):
    module = mixers.build(spec, width=8, heads=2, causal=causal)
    x, real = torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool)
    real[0, :2] = real[1, 4:] = False
    found = []
    for content in (0.0, math.nan):
        given = torch.where(real[..., None], x, content).requires_grad_()
        out = module(given, key_padding_mask=real)[real]
        found.append([out, *torch.autograd.grad(out.square().sum(), [given, *module.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


MEAN = "neighbor(kind='content', hops='dilated', mean=True)"


def test_a_mean_of_many_tokens_does_not_overflow_in_half_precision():
    for causal in (True, False):
        module = mixers.build(MEAN, width=8, heads=2, causal=causal).half()
        torch.nn.init.constant_(module.mixer.content.into.bias[8:16], 40.0)
        out = module(torch.randn(1, 1, 8).half().expand(1, 4000, 8))  # sums of 80,000
        assert out.isfinite().all()
        torch.testing.assert_close(out[:, 3900], out[:, 20], rtol=1e-3, atol=0)


def test_a_mean_is_of_what_a_mask_of_any_shape_shows():
    module = mixers.build(MEAN, width=8, heads=2, causal=False).double()
    content, x, mask = module.mixer.content, torch.randn(2, 7, 8).double(), torch.rand(2, 7, 7) < 0.6
    content.taps.data[:-8] = 0
    given, taken = content.begin(x)
    seen = mask.double()
    mean = (seen @ given) / seen.sum(-1, keepdim=True).clamp_min(1)
    view = View.from_mask(mask, causal=False)
    torch.testing.assert_close(module(x, view=view), content.out(taken * content.taps[-8:] * mean))
    with torch.autocast("cpu", torch.bfloat16):  # sums are in float32 all the same
        narrow, _ = module.mixer._mean(given.float(), view, None)
    torch.testing.assert_close(narrow.double(), mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", [MEAN, "neighbor(kind='recurrent')"])
def test_a_sum_over_what_is_past_refuses_masks_it_cannot_follow(spec):
    module = mixers.build(spec, width=8, heads=2)
    mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    mask[0, 4, 1] = False  # seen by others
    with pytest.raises(UsageError, match="not one of text, padding and documents"):
        module(torch.randn(1, 5, 8), view=View.from_mask(mask, causal=True))


@pytest.mark.parametrize("spec", [MEAN, "neighbor(kind='recurrent')"])
def test_no_more_tokens_change_nothing_of_what_is_kept(spec):
    module = mixers.build(spec, width=8, heads=2)
    x, cache = torch.randn(2, 6, 8), module.new_cache()
    parts = [module(part, cache=cache) for part in x.split([4, 0, 2], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x))


def test_a_mean_of_patches_is_of_all_of_them():
    torch.manual_seed(0)
    spec = "neighbor(kind='content', mean=True)"
    plain = [mixers.build(spec, width=8, heads=2, causal=causal, grid=(2, 3)) for causal in (True, False)]
    plain[0].load_state_dict(plain[1].state_dict())
    x = torch.randn(1, 6, 8)
    assert torch.equal(plain[0](x), plain[1](x))


def test_state_sizes():
    def size(spec, length, **options):
        return mixers.build(spec, width=64, heads=4, **options).state_size(length)

    assert size("softmax", 100) == 2 * 100 * 64
    assert size("softmax", 100, kv_heads=2) == 100 * 64
    assert size("softmax", 100, window=10) == 2 * 10 * 64
    assert size("sima", 100) == size("sima", 100_000) == 4 * 16 * (16 + 2)
    assert size("neighbor", 100) == 4 * 64
    assert size("neighbor(hops='dilated')", 100) == 15 * 64
    assert size("neighbor(kind='content', hops='dilated', mean=True)", 100) == (8 + 1) * 64
    assert size("neighbor(kind='recurrent')", 100) == 64


def test_sima_decodes_with_a_state_that_does_not_grow():
    module = mixers.build("sima", width=32, heads=4)
    cache = module.new_cache()
    sizes = set()
    for _ in range(20):
        module(torch.randn(1, 1, 32), cache=cache)
        sizes.add(sum(x.numel() for x in cache.layers[0].state))
    assert sizes == {module.state_size(20)}


def test_the_band_reaches_every_weight_that_is_not_zero():
    """One far key, as well aligned as the bound allows, with a weight of e^-20."""
    q, k, v = (torch.zeros(1, 1, 400, 8, dtype=torch.float64) for _ in range(3))
    q[0, 0, 399, 0], k[0, 0, 99, 0], v[0, 0, 99] = 880.0, 1.0, 1e9
    spec = "heat(t=0.5, alpha=0.02)"  # 880 - 0.01 · 300² = -20
    fused = langevin.attend(q, k, v, spec, causal=True)
    assert float(fused[0, 0, 399, 0]) == pytest.approx(1e9 * math.exp(-20) / 9.36, rel=0.01)
    plain = langevin.attend(q, k, v, spec, causal=True, implementation="reference")
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)
