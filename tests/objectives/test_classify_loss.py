"""The loss of classes: its formula, its weights, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from langevin.errors import UsageError
from langevin.objectives import OBJECTIVES
from langevin.settings import TrainConfig
from langevin.training.start import model_config


class Fixed(torch.nn.Module):
    """Says the same of every batch."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.config = logits, SimpleNamespace(model_type="langevin", temperature=1.0)

    def forward(self, temperature: float, **read: Any) -> Any:
        assert temperature == 1
        return SimpleNamespace(logits=self.logits)


LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
BATCH = {
    "input_ids": torch.zeros(6, 2),
    "attention_mask": torch.ones(6, 2),
    "labels": torch.tensor([0, 1, 2, 3, 3, 3]),
    "weights": torch.tensor([2.0, 2, 2, 0.5, 0.5, 0.5]),
}


@pytest.mark.parametrize("weights", ["equal", "balanced"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_its_formula(weights: str, smoothing: float) -> None:
    model = Fixed(LOGITS)
    summed, count = OBJECTIVES.parse(f"classify(weights={weights}, smoothing={smoothing})").loss(
        model, BATCH
    )
    log_p = LOGITS.double().log_softmax(-1)
    rows = (1 - smoothing) * log_p[range(6), BATCH["labels"]] + smoothing * log_p.mean(-1)
    w = BATCH["weights"].double() if weights == "balanced" else torch.ones(6).double()
    assert float(summed) == pytest.approx(float(-(w * rows).sum()), rel=1e-6)
    assert float(count) == float(w.sum())


def test_held_out_texts_are_measured_plainly() -> None:
    model = Fixed(LOGITS).eval()
    summed, count = OBJECTIVES.parse("classify(weights=balanced, smoothing=0.3)").loss(model, BATCH)
    assert float(summed) == pytest.approx(-float(LOGITS.log_softmax(-1)[range(6), BATCH["labels"]].sum()))
    assert count == 6


def test_a_kept_model_has_the_temperature_of_its_validation() -> None:
    model = Fixed(10 * LOGITS)
    OBJECTIVES.parse("classify").calibrate(model, [BATCH])
    assert model.config.temperature > 3
    assert model.training


def test_it_sees_both_sides_and_pools_as_asked() -> None:
    config = model_config(TrainConfig(task="classify", objective="classify(pooling=last)"), vocab_size=5)
    assert (config.causal, config.pooling) == (False, "last")
    assert TrainConfig(task="classify").objective == "classify"
    assert TrainConfig().objective == "ar"
    with pytest.raises(UsageError, match="smoothing=1"):
        OBJECTIVES.parse("classify(smoothing=1.0)")
    with pytest.raises(UsageError, match="have no classes"):
        OBJECTIVES.parse("classify").check(TrainConfig(task="lm", objective="classify"))
