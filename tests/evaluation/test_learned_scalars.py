"""What a mixer has learned is told in the terms of its formula, by layer and head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import langevin
from langevin.evaluation.attention import learned_scalars
from langevin.mixers import build
from langevin.models.attention import QKV


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
