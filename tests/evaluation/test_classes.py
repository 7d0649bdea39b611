"""What is measured of a classifier, against plain formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from langevin.evaluation import classes
from langevin.evaluation.likelihood import wilson

NAMES = ["a", "b", "c"]


def drawn(count: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (count,), generator=generator)
    return torch.randn(count, 3, generator=generator) + 1.5 * torch.eye(3)[labels], labels


def test_rows_are_what_the_formulas_say() -> None:
    logits, labels = drawn()
    rows, details = classes.measure(logits, labels, NAMES, 2.0, 50)
    found = {row.metric: row for row in rows if not row.at}
    p, said = (logits.double() / 2).softmax(-1), logits.argmax(-1)
    right = said == labels
    assert found["accuracy"].value == pytest.approx(float(right.double().mean()))
    assert found["accuracy"].n == 400
    assert details["examples"] == right.double().tolist()
    assert found["nll"].value == pytest.approx(float(-p.log()[range(400), labels].mean()), rel=1e-5)
    assert found["brier"].value == pytest.approx(
        float((p - torch.eye(3)[labels]).square().sum(-1).mean()), rel=1e-5
    )
    scores = []
    for i, name in enumerate(NAMES):
        true, claimed = int((labels == i).sum()), int((said == i).sum())
        both = int(((labels == i) & (said == i)).sum())
        scores.append(2 * both / (true + claimed))
        own = {row.metric: row.value for row in rows if row.at == {"class": name}}
        assert own == pytest.approx({"precision": both / claimed, "recall": both / true, "f1": scores[-1]})
        assert details["confusion"]["counts"][i][i] == both
    assert found["macro_f1"].value == pytest.approx(np.mean(scores))
    for row in found.values():
        if row.low is not None and row.high is not None:
            assert row.low <= row.value <= row.high


def test_an_oracle_is_right_and_calibrated() -> None:
    labels = torch.arange(30) % 3
    rows, _ = classes.measure(50 * torch.eye(3)[labels], labels, NAMES, 1.0, 20)
    found = {row.metric: row.value for row in rows if not row.at}
    assert found["accuracy"] == found["macro_f1"] == 1
    assert found["nll"] == pytest.approx(0, abs=1e-6)
    assert found["ece"] == pytest.approx(0, abs=1e-6)
    share = wilson(30, 30)
    assert rows[0].low == share.low
    assert 0.88 < rows[0].low < 0.9  # thirty right answers are no proof of all
    low = {row.metric: row.low for row in rows if row.at == {"class": "a"}}
    of_ten = wilson(10, 10).low
    assert low == pytest.approx({"precision": of_ten, "recall": of_ten, "f1": 2 * of_ten / (1 + of_ten)})


def test_a_class_that_is_never_said_has_no_precision_to_be_sure_of() -> None:
    labels = torch.arange(30) % 3
    logits = torch.tensor([1.0, 0.0, -1.0]).repeat(30, 1)
    rows, _ = classes.measure(logits, labels, NAMES, 1.0, 20)
    of_c = {row.metric: row for row in rows if row.at == {"class": "c"}}
    assert [row.value for row in of_c.values()] == [0, 0, 0]
    assert of_c["precision"].low is None
    assert of_c["recall"].high == pytest.approx(0.2775, abs=1e-4)


def test_the_temperature_undoes_a_scale() -> None:
    logits, labels = drawn(4000)
    one, three = (classes.fitted_temperature(k * logits, labels) for k in (1, 3))
    assert three == pytest.approx(3 * one, rel=2e-3)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_a_model_that_makes_no_mistake_on_validation_is_sure_of_so_many_texts(scale: float) -> None:
    labels = torch.arange(200) % 3
    logits = scale * torch.eye(3)[labels]
    sure = (logits / classes.fitted_temperature(logits, labels)).softmax(-1).amax(-1)
    assert float(sure[0]) == pytest.approx(200 / 201, abs=1e-3)


def test_a_class_that_nobody_knows_of_does_not_count_in_the_mean() -> None:
    logits, labels = drawn()
    wide = torch.cat([logits, torch.full((400, 1), -9.0)], 1)
    three, four = (
        classes.measure(some, labels, names, 1.0, 20)[0]
        for some, names in ((logits, NAMES), (wide, [*NAMES, "d"]))
    )
    macro = [{row.metric: row.value for row in rows if not row.at}["macro_f1"] for rows in (three, four)]
    assert macro[0] == pytest.approx(macro[1])


def test_the_surest_mistakes_come_first() -> None:
    logits = torch.tensor([[9.0, 0, 0], [5.0, 0, 0], [0.0, 7, 0], [1.0, 0, 0]])
    found = classes.surest_mistakes(logits, torch.tensor([0, 1, 2, 1]), 1.0)
    assert [(text, said) for text, said, _ in found] == [(2, 1), (1, 0), (3, 0)]
    assert found[0][2] == pytest.approx(1 / (1 + 2 * math.exp(-7)))
