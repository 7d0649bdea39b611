"""langevin's own model with alibi positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import shaken
from transformers import AutoModelForCausalLM

import langevin
from langevin.errors import UsageError
from langevin.models.backbone import LangevinModel
from langevin.models.config import LangevinConfig
from langevin.models.heads import LangevinForCausalLM

MIXERS = [
    "softmax",
    "ssmax",
    "heat(t='adaptive')",
    "heat(t=1.0, distance='squared')",
    "heat(t=1.0, alpha=0.1)",
    "sigmoid",
]


def config(**changes: Any) -> LangevinConfig:
    small = {
        "vocab_size": 40,
        "hidden_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 24,
        "positions": "alibi",
    }
    return LangevinConfig(**{**small, **changes})


def model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return shaken(LangevinForCausalLM(config(**changes)))


@pytest.mark.parametrize("mixer", [*MIXERS, ["neighbor", "ssmax"]], ids=str)
def test_decoding_with_a_cache_equals_decoding_without(mixer: Any) -> None:
    made = model(mixer=mixer)
    ids = torch.randint(1, 40, (2, 6))
    settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = made.generate(ids, use_cache=False, **settings)
    assert plain.shape == (2, 46)  # well beyond the training length
    assert torch.equal(made.generate(ids, **settings), plain)
    settings["disable_compile"] = True
    assert torch.equal(made.generate(ids, cache_implementation="static", **settings), plain)


@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_on_the_left_changes_nothing(mixer: str) -> None:
    made = model(mixer=mixer)
    ids = torch.randint(1, 40, (1, 7))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = torch.tensor([[0] * 5 + [1] * 7])
    torch.testing.assert_close(
        made(padded, attention_mask=mask).logits[:, 5:], made(ids).logits, rtol=0, atol=1e-5
    )
    both = made.generate(padded, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
    alone = made.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert torch.equal(both[:, 5:], alone)


@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_documents_are_what_they_are_alone(mixer: str) -> None:
    made = model(mixer=mixer)
    first, second = torch.randint(1, 40, (1, 5)), torch.randint(1, 40, (1, 8))
    places = torch.cat([torch.arange(5), torch.arange(8)])[None]
    packed = made(torch.cat([first, second], 1), position_ids=places, use_cache=False).logits
    torch.testing.assert_close(packed[:, :5], made(first).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed[:, 5:], made(second).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_later_token_never_changes_an_earlier_output(mixer: str) -> None:
    made = model(mixer=mixer)
    ids = torch.randint(1, 40, (1, 12))
    other = ids.clone()
    other[0, 7] = (ids[0, 7] + 1) % 40
    before, after = made(ids).logits, made(other).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_order_is_seen_and_near_tokens_count_more() -> None:
    made = model(mixer="softmax", num_hidden_layers=1)
    ids = torch.randint(1, 40, (1, 9))
    swapped = ids[:, [1, 0, *range(2, 9)]]
    assert not torch.allclose(made(ids).logits[:, -1], made(swapped).logits[:, -1], atol=1e-4)
    with torch.no_grad():
        made.model.blocks[0].attention.q_proj.weight.zero_()
    (w,) = made(ids, output_attentions=True).attentions
    assert bool((w[0, :, -1].diff() > 0).all())


def test_a_saved_model_loads_and_keeps_its_promises(tmp_path: Path) -> None:
    made = model(mixer=["ssmax", "sigmoid"])
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 40, (2, 9))
    assert torch.equal(loaded(ids).logits, made(ids).logits)
    report = langevin.check(str(tmp_path))
    assert report.passed, str(report)


@pytest.mark.parametrize("mixer", ["softmax", "sigmoid"])
def test_a_model_compiles_without_graph_breaks(mixer: str) -> None:
    made = model(mixer=mixer)
    ids = torch.randint(0, 40, (2, 9))
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    actual = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(actual, made(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_a_bidirectional_model_sees_how_far_away_a_token_is() -> None:
    torch.manual_seed(0)
    made = LangevinModel(config(causal=False)).eval()
    ids = torch.randint(1, 40, (1, 7))
    alone = made(ids).last_hidden_state
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids, torch.zeros(1, 3, dtype=torch.long)], 1)
    out = made(padded, attention_mask=torch.tensor([[0] * 2 + [1] * 7 + [0] * 3])).last_hidden_state
    torch.testing.assert_close(out[:, 2:9], alone, rtol=0, atol=1e-5)
    mirrored = made(ids.flip(1)).last_hidden_state
    torch.testing.assert_close(mirrored.flip(1), alone, rtol=0, atol=1e-5)
    shuffled = made(ids[:, [0, 2, 1, *range(3, 7)]]).last_hidden_state
    assert not torch.allclose(shuffled[:, 0], alone[:, 0], atol=1e-6)


@pytest.mark.parametrize("mixer", ["sima", "neighbor"])
def test_a_mixer_without_logits_is_refused_in_words(mixer: str) -> None:
    with pytest.raises(UsageError, match=f"{mixer} has no logits"):
        model(mixer=mixer)
