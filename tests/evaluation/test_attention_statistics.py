"""Attention statistics on weights made by hand, against plain loops, and on real mixers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import langevin
from langevin.errors import UsageError
from langevin.evaluation.attention import SHARES, attention_statistics, learned_scalars
from langevin.mixers import View, build
from langevin.models.attention import QKV

L = 40


def causal(queries: int = L, keys: int = L) -> torch.Tensor:
    return View.of(queries, keys, causal=True).mask()


def test_uniform_causal_attention():
    seen = causal()
    n = torch.arange(1, L + 1)
    (head,) = attention_statistics(seen.float() / n[:, None], seen)
    counts = n.tolist()
    assert head.queries == L
    assert head.entropy == pytest.approx(np.mean([math.log(k) for k in counts]))
    assert head.relative_entropy == pytest.approx(1)
    assert head.sink == pytest.approx(np.mean([1 / k for k in counts]))
    for radius in head.radius:
        each = [math.ceil(radius.share * k - 1e-9) - 1 for k in counts]
        assert radius.mean == pytest.approx(np.mean(each))
        assert radius.median == np.median(each)
    assert head.row_sum == pytest.approx(1)


def test_attention_to_one_token_a_fixed_distance_back():
    seen = causal()
    w = torch.zeros(1, 2, L, L)
    for i in range(L):
        w[0, 0, i, i] = 1  # head 0 looks at itself
        w[0, 1, i, max(0, i - 6)] = 1  # head 1 six tokens back
    itself, back = attention_statistics(w, seen)
    assert (itself.entropy, itself.relative_entropy) == (0, 0)
    assert [r.mean for r in itself.radius] == [0] * 4
    assert itself.sink == 1 / L
    assert [r.median for r in back.radius] == [6] * 4
    assert back.radius[0].mean == pytest.approx((sum(range(6)) + 6 * (L - 6)) / L)
    assert back.sink == pytest.approx(7 / L)


def test_a_band_of_equal_weights_on_both_sides():
    near = (torch.arange(L)[:, None] - torch.arange(L)).abs() <= 4
    w = near.float() / near.sum(-1, keepdim=True)
    (head,) = attention_statistics(w[None, None], torch.ones(1, 1, L, L, dtype=torch.bool))
    middle = 9  # keys of a query away from the ends
    assert head.radius[0].median == 2  # 5 of 9 keys
    assert head.radius[3].median == 4
    assert head.entropy < math.log(middle) < math.log(L)


def plain(w, seen):
    """Entropy, relative entropy, sink and radii by loops over batch and queries."""
    B, Q, K = w.shape
    entropies, relatives, sinks, radii = [], [], [], []
    for b in range(B):
        for i in range(Q):
            size = sum(abs(w[b, i, j]) for j in range(K))
            if size == 0:
                continue
            p = [abs(w[b, i, j]) / size for j in range(K)]
            visible = [j for j in range(K) if seen[b, i, j]]
            entropies.append(-sum(x * math.log(x) for x in p if x > 0))
            if len(visible) > 1:
                relatives.append(entropies[-1] / math.log(len(visible)))
            sinks.append(p[visible[0]])
            here = K - Q + i

            def within(r, p=p, here=here):
                return sum(x for j, x in enumerate(p) if abs(here - j) <= r)

            radii.append([next(r for r in range(K) if within(r) >= s - 1e-6) for s in SHARES])
    means = [np.mean(x) for x in (entropies, relatives, sinks)]
    return means, np.mean(radii, 0), np.median(radii, 0)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("keys", [12, 19])
def test_statistics_equal_plain_loops_with_padding_and_cached_keys(signed, keys):
    real = torch.ones(3, keys, dtype=torch.bool)
    real[0, :2] = False
    real[1, 5] = False
    seen = View.of(12, keys, causal=True, key_padding_mask=real).mask()
    w = torch.randn(3, 2, 12, keys, dtype=torch.float64)
    w = (w if signed else w.abs()) * seen
    for h, head in enumerate(attention_statistics(w, seen)):
        means, radii, medians = plain(w[:, h].numpy(), seen[:, 0].numpy())
        assert [head.entropy, head.relative_entropy, head.sink] == pytest.approx(means)
        assert [r.mean for r in head.radius] == pytest.approx(radii)
        assert [r.median for r in head.radius] == pytest.approx(medians)


@pytest.mark.parametrize("spec", ["softmax", "heat(t=0.5)", "ssmax", "sigmoid", "sima"])
def test_weights_of_real_mixers_are_read_as_shares_and_say_whether_they_summed_to_one(spec):
    q, k, v = torch.randn(3, 2, 2, L, 8).unbind()
    _, w = langevin.attend(q, k, v, spec, causal=True, return_weights=True)
    for head in attention_statistics(w, causal()):
        assert (head.row_sum != pytest.approx(1, abs=1e-5)) == (spec in ("sigmoid", "sima"))
        assert 0 < head.relative_entropy < 1
        assert head.radius[0].mean <= head.radius[1].mean <= head.radius[2].mean <= head.radius[3].mean
        assert json.loads(json.dumps(asdict(head), allow_nan=False))["head"] == head.head


def test_queries_that_see_nothing_are_left_out():
    real = torch.ones(1, L, dtype=torch.bool)
    real[0, :10] = False
    seen = View.of(L, L, causal=True, key_padding_mask=real).mask()
    w = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    (head,) = attention_statistics(w, seen)
    assert head.queries == L - 10
    assert head.sink == pytest.approx(np.mean([1 / k for k in range(1, L - 9)]))


def test_weights_that_are_all_zero_are_refused():
    with pytest.raises(UsageError, match="gives weight to any key"):
        attention_statistics(torch.zeros(1, 1, L, L), causal())


def converted(spec: str) -> GPT2LMHeadModel:
    sizes = {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": 11}
    options = {"attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    model = langevin.convert(GPT2LMHeadModel(GPT2Config(**sizes, **options)), spec)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".langevin." in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


def test_learned_times_and_drifts_are_listed_by_layer_and_head():
    model = converted("heat(t='head')+drift+noise(std='head')")
    rows = learned_scalars(model)
    mixers = [m for m in model.modules() if isinstance(m, QKV)]
    assert [(r.layer, r.head) for r in rows if r.name == "time"] == [
        (i, h) for i in range(3) for h in range(2)
    ]
    for i, mixer in enumerate(mixers):
        gain, std = (dict(s.named_parameters()) for s in mixer.wrappers.scalars)
        expected = {
            "time": mixer.learned()["time"],
            "drift.gain": gain["gain"],
            "noise.std": F.softplus(std["std"][:, 0]),
        }
        for name, values in expected.items():
            found = [r.value for r in rows if r.layer == i and r.name == name]
            assert found == pytest.approx(values.tolist())
    assert len(rows) == 3 * 2 * 3
    assert all(r.value > 0 for r in rows if r.name in ("time", "noise.std"))


def test_scalars_of_channels_have_a_channel_and_gates_are_between_0_and_1():
    rows = learned_scalars(converted("softmax+drift(kind='gate')"))
    gates = [r for r in rows if r.name == "drift.gate"]
    assert len(gates) == 3 * 2 * 8
    assert [r.channel for r in gates[:8]] == list(range(8))
    assert all(0 < r.value < 0.5 for r in gates)
    assert {r.name for r in rows} == {"drift.gate", "drift.baseline"}


@pytest.mark.parametrize(("spec", "names"), [("ssmax(bias='head')", {"s", "bias"}), ("softmax", set())])
def test_each_mixer_lists_what_it_learns(spec, names):
    assert {r.name for r in learned_scalars(converted(spec))} == names


def test_drift_around_an_attention_free_mixer_is_listed_too():
    model = torch.nn.ModuleList(
        build("neighbor+drift", width=16, heads=2, causal=True, layer=i) for i in range(2)
    )
    assert [(r.layer, r.head, r.name) for r in learned_scalars(model)] == [
        (i, h, "drift.gain") for i in range(2) for h in range(2)
    ]
