"""The head for classes: what padding may not change, saving, and transformers' own pipeline."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, pipeline

from langevin.data.examples import reading
from langevin.data.tokenizers import make
from langevin.models.config import CHOICES, LangevinConfig
from langevin.models.convert import from_pretrained
from langevin.models.cost import flops_of
from langevin.models.heads import LangevinForSequenceClassification

MIXERS = (
    "neighbor",
    "neighbor(kind='content', hops='dilated', mean=True)",
    "neighbor(kind='recurrent')",
    "softmax",
    "ssmax",
    "sigmoid",
    "sima",
    "heat(t=0.28)",
)


def classifier(**changes: Any) -> LangevinForSequenceClassification:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "causal": False}
    shape |= {"num_attention_heads": 2, "num_labels": 3, "max_position_embeddings": 64}
    model = LangevinForSequenceClassification(LangevinConfig(**{**shape, **changes})).eval()
    with torch.no_grad():
        for p in model.parameters():  # the head and the branches start small, and would hide what leaks
            p.add_(0.1 * torch.randn_like(p))
    return model


def logits(model: Any, rows: torch.Tensor, left: int, right: int, filled: int = 7) -> torch.Tensor:
    ids = torch.nn.functional.pad(rows, (left, right), value=filled)
    mask = torch.nn.functional.pad(torch.ones_like(rows), (left, right))
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits


@pytest.mark.parametrize("pooling", ["mean", "attention", "first", "last", "ends"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_padding_changes_nothing(mixer: str, pooling: str) -> None:
    model = classifier(mixer=mixer, pooling=pooling, positions="rope")
    rows = torch.randint(50, (3, 11))
    plain = model(input_ids=rows).logits
    assert torch.equal(logits(model, rows, 0, 9), logits(model, rows, 0, 9, filled=31))
    for left, right in ((0, 5), (0, 21), (13, 0), (4, 6)):
        torch.testing.assert_close(logits(model, rows, left, right), plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("vocabulary", [50, 5000])
def test_a_bag_of_ngrams_adds_up_what_tokens_and_pairs_say(vocabulary: int) -> None:
    model = classifier(pooling="ngrams", vocab_size=vocabulary)
    rows = torch.randint(50, (3, 11))
    bag, found = model.model, []
    for row in rows.tolist():
        spread = vocabulary if vocabulary == 50 else 2_654_435_761
        pairs = [(a * spread + b) % bag.pairs.num_embeddings for a, b in pairwise(row)]
        said = [bag.embed.weight[i] for i in row] + [bag.pairs.weight[i] for i in pairs]
        found.append(bag.bias + torch.stack(said).sum(0) / len(said) ** 0.5)
    torch.testing.assert_close(logits(model, rows, 0, 0), torch.stack(found))
    assert torch.equal(logits(model, rows, 0, 9), logits(model, rows, 0, 9, filled=31))
    for left, right in ((0, 5), (13, 0), (4, 6)):
        torch.testing.assert_close(
            logits(model, rows, left, right), logits(model, rows, 0, 0), atol=1e-6, rtol=0
        )
    assert logits(model, rows[:, :1], 0, 0).isfinite().all()


def test_a_bag_of_ngrams_starts_from_zero_and_says_what_it_costs() -> None:
    config = LangevinConfig(pooling="ngrams", vocab_size=50, num_labels=3, causal=False)
    model = LangevinForSequenceClassification(config)
    assert all(not p.any() for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 3 * (50 + 50**2 + 1)
    assert flops_of(model, 128) == 6 * 2 * 3


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "alibi"])
def test_the_side_of_padding_does_not_move_positions(positions: str) -> None:
    model, rows = classifier(positions=positions), torch.randint(50, (2, 11))
    torch.testing.assert_close(logits(model, rows, 20, 0), logits(model, rows, 0, 3), atol=1e-6, rtol=0)


def test_the_first_and_the_last_token_are_not_neighbours() -> None:
    model = classifier(mixer="neighbor", num_hidden_layers=1, positions="none")
    rows = torch.randint(50, (1, 20))
    other = rows.clone()
    other[0, -1] = (other[0, -1] + 1) % 50
    mask = torch.ones_like(rows)
    with torch.no_grad():
        one, two = (model.model(x, attention_mask=mask).last_hidden_state for x in (rows, other))
    assert torch.equal(one[0, :15], two[0, :15])
    assert not torch.equal(one[0, -5:], two[0, -5:])


@pytest.mark.parametrize(("pooling", "place"), [("first", 2), ("last", 4)])
def test_a_pooled_token_is_a_real_one(pooling: str, place: int) -> None:
    model, states = classifier(pooling=pooling), torch.randn(2, 7, 4)
    real = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1]]).bool()
    assert torch.equal(model._pooled(states, real), torch.stack([states[0, place], states[1, 6]]))


def test_both_ends_of_a_text_are_joined() -> None:
    model, states = classifier(pooling="ends"), torch.randn(1, 7, 16)
    real = torch.tensor([[0, 0, 1, 1, 1, 0, 0]]).bool()
    joined = torch.nn.functional.gelu(model.join(torch.cat([states[:, 2], states[:, 4]], 1)))
    torch.testing.assert_close(model._pooled(states, real), joined)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_text_of_nothing_has_an_answer(mixer: str) -> None:
    for pooling in {*CHOICES["pooling"]} - {"class"}:
        model = classifier(pooling=pooling, mixer=mixer)
        for length in (3, 0):
            nothing = torch.zeros(2, length, dtype=torch.long)
            assert model(input_ids=nothing, attention_mask=nothing).logits.isfinite().all()


def test_it_is_saved_and_read_by_the_auto_class_and_the_pipeline(tmp_path: Path) -> None:
    texts = ["good film", "a bad film", "so so"]
    tokenizer = reading(make("words", texts * 2, []), 8)
    names = {0: "bad", 1: "fair", 2: "good"}
    model = classifier(
        mixer="neighbor",
        vocab_size=len(tokenizer),
        temperature=2.0,
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert type(again) is type(model) is type(from_pretrained(tmp_path))
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        plain, tempered = model(**batch, temperature=1.0).logits, again(**batch).logits
    torch.testing.assert_close(plain / 2, tempered)
    classify = pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)
    for found, row in zip(
        classify([*texts, "bad " * 50], truncation=True), tempered.softmax(-1), strict=False
    ):
        assert {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in found} == {
            names[i]: float(p) for i, p in enumerate(row)
        }
