"""Any causal model that converts is a start for training, by the name of a folder, a run or the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import close, tiny, tokens
from transformers import AutoConfig, AutoModelForSequenceClassification

import langevin
from langevin.errors import UsageError
from langevin.mixers import parse
from langevin.models import pretrained as module
from langevin.models.pretrained import located, own_mixer, pretrained, tokenizer_of, trained_length


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data with a half-precision Llama under models/mine; the Hub is out of reach."""
    monkeypatch.setenv("LANGEVIN_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(module, "reachable", lambda: False)
    monkeypatch.chdir(tmp_path)
    tiny("llama").half().save_pretrained(tmp_path / "data" / "models" / "mine")
    return tmp_path


@pytest.mark.parametrize("spec", [None, "softmax", "heat(t='head')", "ssmax"])
def test_a_pretrained_model_starts_in_float32_with_the_mixer(data: Path, spec: str | None) -> None:
    plain, ids = tiny("llama"), tokens(2, 9)
    for p in plain.parameters():
        p.data = p.data.half().float()
    model = pretrained("mine", spec)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert close(model(ids).logits, plain(ids).logits, 1e-4) == (spec != "ssmax")
    model.train()(ids, labels=ids).loss.backward()


def test_a_converted_folder_is_converted_again_or_left(data: Path) -> None:
    converted = tiny("gpt2", "ssmax")
    converted.save_pretrained(data / "converted")
    ids = tokens(1, 5)
    assert torch.equal(pretrained("converted", None)(ids).logits, converted(ids).logits)
    again = pretrained(str(data / "converted"), "softmax")
    assert close(again(ids).logits, langevin.convert(converted, "softmax")(ids).logits, 1e-5)


def test_the_mixer_a_model_has_is_told(data: Path) -> None:
    assert own_mixer("mine") == "softmax"
    tiny("gpt2", "heat(t='head')").save_pretrained(data / "converted")
    assert own_mixer("converted") == str(parse("heat(t='head')"))
    tiny("langevin", mixer=["softmax", "sima"]).save_pretrained(data / "ours")
    assert own_mixer("ours") == "softmax; sima"


def test_a_model_is_found_by_folder_then_data_then_hub(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert located("mine") == str(data / "data" / "models" / "mine")
    (data / "run" / "model").mkdir(parents=True)
    (data / "run" / "model" / "config.json").write_text("{}")
    assert located("run") == "run/model"
    (data / "mine").mkdir()
    assert located("mine") == "mine"
    monkeypatch.setattr(module, "reachable", lambda: True)
    assert located("org/name") == "org/name"


@pytest.mark.parametrize("name", ["nosuch", "org/nosuch", "./nosuch", "a/b/c", "~/nosuch", "", "x..y"])
def test_a_model_that_is_nowhere_is_named(data: Path, name: str) -> None:
    with pytest.raises(UsageError, match="there is no model") as caught:
        located(name)
    assert "\n" not in caught.value.cause
    assert caught.value.remedy


def test_what_predicts_no_next_token_is_no_start(data: Path) -> None:
    tiny("bert").save_pretrained(data / "bert")
    with pytest.raises(UsageError, match="BertForMaskedLM, which does not predict the next token"):
        pretrained("bert", "softmax")


def test_the_tokenizer_and_the_length_come_with_the_model(data: Path) -> None:
    assert trained_length("mine") == 64
    with pytest.raises(UsageError, match="has no tokenizer"):
        tokenizer_of("mine")
    (data / "data" / "models" / "mine" / "tokenizer.json").write_text("{}")
    assert tokenizer_of("mine") == located("mine")


@pytest.mark.parametrize(
    ("family", "kind", "longest"),
    [
        ("ibert", {}, 14),
        ("esm", {}, 14),
        ("esm", {"position_embedding_type": "rotary"}, 16),
        ("bert", {}, 16),
    ],
)
def test_encoders_that_count_from_behind_the_padding_read_fewer_tokens(data, family, kind, longest):
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    size |= {"vocab_size": 9, "max_position_embeddings": 16, "pad_token_id": 1}
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(family, **size, **kind)
    ).eval()
    model.save_pretrained(data / family)
    assert trained_length(family) == longest
    model(torch.full((1, longest), 5))
    if "position_embedding_type" not in kind:
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, longest + 1), 5))
