"""Classification: which of C classes is a text, or an image, of?

    loss = - Σ_b w_y [ (1 - s) ln p_y + s/C Σ_c ln p_c ]  /  Σ_b w_y

with the label smoothing s and, where weights are balanced, w_c = N / (C n_c) for a class that n_c of N
training texts have; else w = 1. An image that is mixed with another has two labels, each with its share
of w. Held-out texts are measured by the plain -ln p_y. The model sees both sides. When it is kept, the
temperature that makes held-out labels likeliest is kept with it.

B rows, L tokens, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.errors import UsageError
from langevin.objectives.objective import Batch, Objective, register
from langevin.settings import TrainConfig


def weighted_loss(
    logits_BC: Tensor, labels_B: Tensor, weights_B: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor | int]:
    losses_B = F.cross_entropy(logits_BC, labels_B, reduction="none", label_smoothing=smoothing)
    if weights_B is None:
        return losses_B.sum(), len(labels_B)
    return (weights_B * losses_B).sum(), weights_B.sum()


def logits_of(model: Any, batch: Batch) -> Tensor:
    """(B, C), not divided by a temperature, of which models of transformers know nothing."""
    names = ("input_ids", "attention_mask", "pixel_values")
    read: dict[str, Any] = {name: batch[name] for name in names if name in batch}
    if _is_ours(getattr(model, "module", model)):
        read["temperature"] = 1.0
    logits: Tensor = model(**read).logits
    return logits


def temperature_of(model: Any) -> float:
    """By which logits are divided to be calibrated."""
    return float(getattr(model.config, _temperature_in(model), 1.0))


def _temperature_in(model: Any) -> str:
    """The config's name for it: transformers takes a temperature of its models for that of generation."""
    return "temperature" if _is_ours(model) else "fitted_temperature"


def _is_ours(model: Any) -> bool:
    return bool(model.config.model_type == "langevin")


@register("classify")
@dataclass(frozen=True)
class Classification(Objective):
    pooling: Literal["mean", "attention", "first", "last", "ends", "ngrams", "class"] = "mean"
    """How one vector is made of those of all tokens. ends: of the first and the last by a hidden layer;
    ngrams: a linear model of them, without layers; class: from a token added to an image."""
    weights: Literal["equal", "balanced"] = "equal"
    """balanced: every class counts the same, however many texts it has."""
    smoothing: float = 0.0
    """The share of a label that is spread over all classes."""

    causal = False
    head = "LangevinForSequenceClassification"
    criterion = staticmethod(weighted_loss)

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise UsageError(f"classify(smoothing={self.smoothing}) must be from 0 to below 1")

    def check(self, config: TrainConfig) -> None:
        from langevin.tasks import TASKS

        if TASKS.parse(config.task).objective != self.name:
            raise UsageError(
                f"the texts of the task {config.task} have no classes", "Give --task classify or images."
            )
        for name in ("init", "checkpointing"):
            if self.pooling == "ngrams" and getattr(config, name):
                raise UsageError(f"a bag of n-grams has no layers for --{name}", f"Leave --{name} out.")

    def model_settings(self) -> dict[str, Any]:
        return {"pooling": self.pooling}

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | int]:
        logits = logits_of(model, batch)
        if not model.training:
            return weighted_loss(logits, batch["labels"], None, 0.0)
        balanced = self.weights == "balanced"
        if "share" not in batch:
            weights = batch["weights"] if balanced else None
            return self.criterion(logits, batch["labels"], weights, self.smoothing)
        summed, counted = logits.new_zeros(()), logits.new_zeros(())
        for kind, share in (("", batch["share"]), ("other_", 1 - batch["share"])):
            weights = share * batch[f"{kind}weights"] if balanced else share
            loss, count = self.criterion(logits, batch[f"{kind}labels"], weights, self.smoothing)
            summed, counted = summed + loss, counted + count
        return summed, counted

    @torch.no_grad()
    def calibrate(self, model: Any, held_out: list[Batch]) -> None:
        from langevin.evaluation import classes

        model.eval()
        logits = torch.cat([logits_of(model, batch).cpu() for batch in held_out])
        labels = torch.cat([batch["labels"].cpu() for batch in held_out])
        model.train()
        setattr(model.config, _temperature_in(model), classes.fitted_temperature(logits, labels))
