"""langevin's own model is a transformers model with any mixer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import shaken
from transformers import AutoModelForCausalLM

import langevin
from langevin.errors import UsageError
from langevin.mixers import Scalars
from langevin.models.backbone import LangevinForCausalLM, LangevinModel
from langevin.models.config import LangevinConfig

MIXERS = ["softmax", "ssmax", "heat(t='adaptive')", "heat(t=1.0, alpha=0.1)", "sigmoid", "sima", "neighbor"]


def config(**changes: Any) -> LangevinConfig:
    small = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 48,
    }
    return LangevinConfig(**{**small, **changes})


def model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return shaken(LangevinForCausalLM(config(**changes)))


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rope"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_decoding_with_a_cache_equals_decoding_without(mixer: str, positions: str) -> None:
    made = model(mixer=mixer, positions=positions)
    ids = torch.randint(1, 40, (2, 6))
    with_cache, without = (
        made.generate(ids, max_new_tokens=8, do_sample=False, use_cache=c, pad_token_id=0)
        for c in (True, False)
    )
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("mixer", [*MIXERS, ["ssmax", "sigmoid+drift"]])
def test_a_saved_model_is_found_by_the_auto_classes_and_passes_every_check(
    mixer: Any, tmp_path: Path
) -> None:
    made = model(mixer=mixer, num_key_value_heads=2, mlp="swiglu", norm="rmsnorm", qk_norm=True)
    made.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(0, 40, (2, 9))
    assert torch.equal(loaded.eval()(ids).logits, made(ids).logits)
    report = langevin.check(str(tmp_path))
    assert report.passed, str(report)


def test_learned_scalars_stay_in_float32_and_keep_their_own_start(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fresh = LangevinForCausalLM(config(mixer="ssmax+drift"))
    scalars = [p for m in fresh.modules() if isinstance(m, Scalars) for p in m.parameters()]
    start = langevin.mixers.build("ssmax", width=32, heads=4, max_length=48).mixer.scalars.s
    assert torch.equal(scalars[0], start)
    fresh.save_pretrained(tmp_path)
    low = langevin.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {p.dtype for m in low.modules() if isinstance(m, Scalars) for p in m.parameters()}
    assert kept == {torch.float32}
    assert low.lm_head.weight.dtype == torch.bfloat16


def test_gradient_checkpointing_changes_no_gradient() -> None:
    ids = torch.randint(0, 40, (2, 9))
    grads = []
    for checkpointing in (False, True):
        made = model(mixer="sima+noise", dropout=0.1).train()
        if checkpointing:
            made.gradient_checkpointing_enable()
        torch.manual_seed(3)
        made(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in made.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_labels_are_the_tokens_themselves_and_are_shifted_once() -> None:
    made = model()
    ids = torch.randint(0, 40, (2, 9))
    out = made(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


def test_the_weights_of_every_layer_come_from_the_real_forward_pass() -> None:
    made = model(mixer="heat(t=0.5)")
    attentions = made(torch.randint(0, 40, (2, 9)), output_attentions=True).attentions
    assert len(attentions) == 2
    for w in attentions:
        assert w.shape == (2, 4, 9, 9)
        torch.testing.assert_close(w.sum(-1), torch.ones(2, 4, 9))


def test_a_bidirectional_model_sees_both_ways_and_ignores_padding() -> None:
    torch.manual_seed(0)
    made = LangevinModel(config(causal=False, mixer="sima")).eval()
    ids = torch.randint(0, 40, (1, 7))
    alone = made(ids).last_hidden_state
    assert not torch.allclose(
        made(torch.cat([ids[:, :-1], ids[:, :1]], 1)).last_hidden_state[:, 0], alone[:, 0]
    )
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], 1)
    mask = torch.tensor([[1] * 7 + [0] * 3])
    out = made(padded, attention_mask=mask).last_hidden_state[:, :7]
    torch.testing.assert_close(out, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 5}, "5 heads do not divide"),
        ({"positions": "ropes"}, "Did you mean 'rope'"),
        ({"mixer": "hear"}, "Did you mean 'heat'"),
        ({"mixer": ["softmax", "sima", "heat"]}, "3 mixers came for 2 layers"),
        ({"norm": "batch"}, "unknown norm"),
        ({"num_hidden_layers": 0}, "at least one layer"),
    ],
)
def test_a_wrong_config_is_refused_in_words(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        config(**changes)
    assert said in str(error.value)


def test_more_tokens_than_learned_positions_are_refused() -> None:
    with pytest.raises(UsageError, match="48 learned positions"):
        model(positions="learned")(torch.zeros(1, 49, dtype=torch.long))


def test_the_loss_of_labels_is_the_mean_over_the_next_tokens_that_count() -> None:
    made = model(mixer="ssmax")
    ids = torch.randint(0, 40, (2, 7))
    labels = ids.clone()
    labels[1, 4:] = -100
    out = made(ids, labels=labels, use_cache=False)
    log = out.logits.double().log_softmax(-1)
    nll = [-log[b, i, ids[b, i + 1]] for b in range(2) for i in range(6) if b == 0 or i < 3]
    torch.testing.assert_close(out.loss.double(), torch.stack(nll).mean(), rtol=1e-6, atol=1e-6)
    part = made(ids, labels=labels, use_cache=False, num_items_in_batch=20)  # a part of a larger batch
    torch.testing.assert_close(part.loss.double(), torch.stack(nll).sum() / 20, rtol=1e-6, atol=1e-6)
