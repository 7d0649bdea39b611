"""Evaluating a run on the first tokens of its splits only."""

from __future__ import annotations

import pytest

from langevin.evaluation.runs import evaluate
from langevin.runs import train
from langevin.settings import TrainConfig

TEXT = "Ann had two pears. Bob had öne nut, and gave it to Cleo.\n" * 60


def trained(tmp_path, data, tokenizer):
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 4, "steps": 3, "eval_tokens": 64}
    config = TrainConfig(data=str(data), tokenizer=tokenizer, device="cpu", **shape)
    return train(config, tmp_path / "run", quiet=True)[0]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(TEXT)
    return trained(tmp_path, tmp_path / "text.txt", "bytes")


def test_a_limit_scores_so_many_tokens_less_the_first(run):
    assert evaluate(run, resamples=20, limit=100)[0]["tokens"] == 99


def test_a_limit_beyond_the_text_changes_nothing(run):
    assert evaluate(run, resamples=20, limit=10**6) == evaluate(run, resamples=20)


def test_bits_are_per_character_and_byte_of_the_text_that_is_scored(run):
    found = evaluate(run, resamples=20, limit=150)[0]["likelihood"]
    per_token, per_byte = found["bits_per_token"]["value"], found["bits_per_byte"]["value"]
    assert per_byte == pytest.approx(per_token, rel=0.03)  # a byte a token, an end of text among them
    assert found["bits_per_character"]["value"] > per_byte  # ö is two bytes


@pytest.mark.filterwarnings("ignore:.* characters that train does not have")
@pytest.mark.parametrize("separator", ["", "<|endoftext|>"], ids=["one text", "documents"])
def test_unknown_characters_are_characters_of_the_text_that_is_scored(tmp_path, monkeypatch, separator):
    """A token of `chars` is a character, whether training knows it or not; an end is none."""
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    for split, letter in {"train": "a", "valid": "é", "test": "東"}.items():
        (tmp_path / "mine" / f"{split}.txt").write_text(f"{letter}bc {letter * 5} cab.{separator}\n" * 40)
    run = trained(tmp_path, tmp_path / "mine", "chars")
    found = evaluate(run, resamples=20, limit=120)[0]
    bits = {name: found["likelihood"][f"bits_per_{name}"]["value"] for name in ("token", "character")}
    ends = 120 // len("abc aaaaa cab. ") if separator else 0  # 8 documents of 15 tokens
    assert found["tokens"] == (120 if separator else 119)
    assert bits["character"] * (found["tokens"] - ends) == pytest.approx(bits["token"] * found["tokens"])


def test_attention_statistics_can_be_left_out(run):
    assert evaluate(run, resamples=20, limit=100, attention=False)[0]["attention"] == []
    assert evaluate(run, resamples=20, limit=100)[0]["attention"] != []
