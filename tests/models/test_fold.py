"""A folded model computes what it computed before, with its drifts gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, close, inputs, shake, spec_of, tiny, tokens
from torch import nn

import langevin
from langevin.errors import UsageError
from langevin.mixers import build, parse

DRIFTS = [
    "softmax+drift",
    "softmax+drift(gain=0.5)",
    "ssmax+drift(kind='gate')",
    "sima+drift(kind='gate', gate=0.7, baseline=0.3)",
    "softmax+drift(kind='gate')+drift",
    "softmax+drift+drift(kind='gate')",
]


@pytest.mark.filterwarnings("ignore:.*cannot drop attention weights")
@pytest.mark.parametrize("spec", DRIFTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folded_model_computes_the_same(family: str, spec: str) -> None:
    options = {"attention_bias": True} if family == "llama" else {}
    model, x = tiny(family, spec, **options), inputs(family)
    before = model(**x).logits
    assert not close(
        langevin.convert(tiny(family, **options), spec.split("+")[0])(**x).logits, before, 1e-2
    )
    assert langevin.fold(model) is model
    assert close(model(**x).logits, before)
    assert spec_of(model) == str(parse(spec.split("+")[0]))
    assert not [name for name in model.state_dict() if "wrappers" in name]


@pytest.mark.parametrize("spec", DRIFTS)
def test_a_folded_module_computes_the_same(spec: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(build(spec, width=32, heads=4, layer=i) for i in range(2))).double().eval()
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    before = model(x)
    assert close(langevin.fold(model)(x), before, 1e-9)
    assert str(model[0].spec) == spec.split("+")[0]
    assert close(langevin.fold(model)(x), before, 1e-9)


@pytest.mark.parametrize("family", ["gpt2", "langevin"])
def test_a_folded_model_is_saved_and_loaded(tmp_path: Path, family: str) -> None:
    model = tiny(family, "ssmax+drift(kind='gate')")
    before = model(tokens(1, 5)).logits
    langevin.fold(model).save_pretrained(tmp_path)
    loaded = langevin.from_pretrained(tmp_path)
    assert spec_of(loaded) == str(parse("ssmax"))
    assert close(loaded(tokens(1, 5)).logits, before)


def test_training_noise_goes_with_the_drift_before_it_and_stays_otherwise() -> None:
    after = langevin.fold(tiny("gpt2", "softmax+drift+noise(std='head')"))
    before = tiny("gpt2", "softmax+noise(std='head')+drift")
    noise = before.get_parameter("transformer.h.1.attn.langevin.wrappers.scalars.0.std").clone()
    langevin.fold(before)
    assert spec_of(after) == str(parse("softmax"))
    assert spec_of(before) == str(parse("softmax+noise(std='head')"))
    assert torch.equal(before.get_parameter("transformer.h.1.attn.langevin.wrappers.scalars.0.std"), noise)


@pytest.mark.parametrize("spec", [None, "ssmax", "softmax+noise(std='head')"])
def test_without_drift_nothing_changes(spec: str | None) -> None:
    model = tiny("gpt2", spec)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    assert langevin.fold(model) is model
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: tiny("llama", "softmax+drift(kind='gate')"), "has no bias"),
        (lambda: tiny("gpt2", "softmax+drift+noise(eval=True)"), "also acts in inference"),
        (lambda: tiny("gpt2", "neighbor+drift"), "no output projection"),
        (lambda: build("neighbor+drift", width=32, heads=4), "no output projection"),
        (lambda: with_a_norm(), "owns attn_sub_norm"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot drop attention weights")
def test_what_cannot_be_folded_is_refused_and_left_alone(make: Any, cause: str) -> None:
    model = make()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(UsageError, match=cause) as caught:
        langevin.fold(model)
    assert caught.value.remedy
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def with_a_norm() -> Any:
    """BitNet normalises the mixed values before it projects them."""
    from transformers import BitNetConfig, BitNetForCausalLM

    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = BitNetConfig(vocab_size=61, intermediate_size=32, pad_token_id=0, **sizes)
    model = langevin.convert(BitNetForCausalLM(config), "softmax+drift")
    shake(model)
    return model


def test_a_gate_without_baseline_folds_where_there_is_no_bias() -> None:
    model, ids = tiny("llama", "softmax+drift(kind='gate', baseline=0.0)"), tokens(1, 5)
    before = model(ids).logits
    assert close(langevin.fold(model)(ids).logits, before)
