"""`langevin check FOLDER` passes healthy causal models and names what is wrong with others."""

import pytest
import torch
import transformers

import langevin
from langevin.checks.properties import PROPERTIES

TEXT = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SIZE = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 256}
FAMILIES = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Gemma": {**GROUPED, "head_dim": 8},
    "Mistral": {**GROUPED, "sliding_window": 32},
    "Mixtral": {**GROUPED, "num_local_experts": 4},
    "Mamba": {"state_size": 8},
}


def fresh(family, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TEXT, **SIZE, **FAMILIES[family], **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_model_passes(family, tmp_path):
    fresh(family).save_pretrained(tmp_path)
    report = langevin.check(str(tmp_path))
    assert report.passed, str(report)
    rows = {row.property: row for row in report.rows}
    tried = {"no future leak", "cached = full", "padding", "gradients", "autocast", "compiles"}
    assert all(rows[name].passed for name in tried)
    assert rows["packed documents"].passed is (None if family == "Mamba" else True)
    assert rows["window"].detail == "has the window it was saved with"
    assert ("in float32" in rows["gradients"].detail) is (family == "Mixtral")


def test_a_converted_model_passes(tmp_path):
    langevin.convert(fresh("Mistral"), "ssmax+drift").save_pretrained(tmp_path)
    report = langevin.check(tmp_path)
    assert report.passed, str(report)


def next_token_heard(module, inputs, logits):
    return logits + 0.01 * logits.roll(-1, 1)


def batch_heard(module, inputs, logits):
    return logits + logits.mean(0)


def gradient_lost_past_100_tokens(module, inputs, logits):
    return logits if logits.shape[1] < 100 else logits.detach() + 0 * logits


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (next_token_heard, {"no future leak", "prefix = full", "cached = full"}),
        (batch_heard, {"alone = in a batch"}),
        (gradient_lost_past_100_tokens, {"gradients"}),
    ],
)
def test_a_mistake_in_a_model_is_named(mistake, named, tmp_path, monkeypatch):
    model = fresh("Llama")
    model.lm_head.register_forward_hook(mistake)
    monkeypatch.setattr("langevin.models.convert.from_pretrained", lambda path: model)
    only = [name for name in PROPERTIES if name != "compiles"]
    assert named <= set(langevin.check(tmp_path, only=only).failures)


def test_a_model_with_few_positions_is_tried_at_the_lengths_it_has(tmp_path):
    fresh("Llama", max_position_embeddings=24).save_pretrained(tmp_path)
    assert langevin.check(tmp_path, only=["prefix = full", "padding"]).passed


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Bert", {}, "not a causal language model"),
        ("Llama", {"max_position_embeddings": 4}, "only 4 positions"),
    ],
)
def test_a_folder_with_something_else_is_refused_in_words(family, changes, said, tmp_path):
    if family == "Bert":
        transformers.BertModel(transformers.BertConfig(**TEXT, **SIZE)).save_pretrained(tmp_path)
    else:
        fresh(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        langevin.check(tmp_path)
