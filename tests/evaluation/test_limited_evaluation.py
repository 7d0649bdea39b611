"""Evaluating a run on the first tokens of its splits only."""

from __future__ import annotations

import pytest

from langevin.evaluation.runs import evaluate
from langevin.runs import train
from langevin.settings import TrainConfig

TEXT = "Ann had two pears. Bob had öne nut, and gave it to Cleo.\n" * 60


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    shape = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 4, "steps": 3, "eval_tokens": 64}
    config = TrainConfig(data=str(text), tokenizer="bytes", device="cpu", **shape)
    return train(config, tmp_path / "run", quiet=True)[0]


def test_a_limit_scores_so_many_tokens_less_the_first(run):
    assert evaluate(run, resamples=20, limit=100)[0]["tokens"] == 99


def test_a_limit_beyond_the_text_changes_nothing(run):
    assert evaluate(run, resamples=20, limit=10**6) == evaluate(run, resamples=20)


def test_bits_are_per_character_and_byte_of_the_text_that_is_scored(run):
    found = evaluate(run, resamples=20, limit=150)[0]["likelihood"]
    per_token, per_byte = found["bits_per_token"]["value"], found["bits_per_byte"]["value"]
    assert per_byte == pytest.approx(per_token, rel=0.03)  # a byte a token, an end of text among them
    assert found["bits_per_character"]["value"] > per_byte  # ö is two bytes


def test_attention_statistics_can_be_left_out(run):
    assert evaluate(run, resamples=20, limit=100, attention=False)[0]["attention"] == []
    assert evaluate(run, resamples=20, limit=100)[0]["attention"] != []
