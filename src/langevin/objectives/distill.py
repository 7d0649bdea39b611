"""Distillation: learn to compute what a teacher computes, such as the model before its mixer was swapped.

    at first:    loss = Σ_i m_i · mean_l  ‖s_il - t_il‖² / ‖t_il‖²
    afterwards:  loss = Σ_i m_i · [ (1 - λ) KL( p_i ‖ q_i ) - λ ln q_i(x_{i+1}) ]

t_il is the output of the teacher's layer l at position i and p_i its prediction there, s_il and q_i are the
student's; m_i says which targets count. `layers` is the part of training spent on the layers' outputs, λ is
`next_token`. Held-out text is measured by the plain loss of `ar`, so that curves can be compared.

B batch, L predictions, W width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from langevin.errors import UsageError
from langevin.kernels.view import wide
from langevin.models.pretrained import located, pretrained, trained_length
from langevin.objectives.ar import Autoregression, predicted, summed_loss
from langevin.objectives.objective import Batch, register
from langevin.settings import TrainConfig

_LEAST_SQUARE = 1e-12


def layer_error(student_BLW: Sequence[Tensor], teacher_BLW: Sequence[Tensor]) -> Tensor:
    """(B, L): the squared error of each layer's output over the teacher's square, the mean over layers."""
    relative = []
    for ours, theirs in zip(student_BLW, teacher_BLW, strict=True):
        theirs = theirs.to(wide(theirs.dtype))
        square = theirs.square().sum(-1).clamp_min(_LEAST_SQUARE)
        relative.append((ours - theirs).square().sum(-1) / square)
    return torch.stack(relative).mean(0)


def divergence(student_BLV: Tensor, teacher_BLV: Tensor) -> Tensor:
    """(B, L): KL(teacher ‖ student) of the predictions, in nats."""
    ours, theirs = (x.to(wide(x.dtype)).log_softmax(-1) for x in (student_BLV, teacher_BLV))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)


def summed_distance(
    student: Any,
    teacher: Any,
    targets_BL: Tensor,
    scored_BL: Tensor | None,
    early: Tensor,
    next_token: float,
) -> tuple[Tensor, Tensor | int]:
    """The loss of the moment over the targets that are scored, and how many there are.

    Both losses are computed at any time: a step is then the same work, which a CUDA graph replays, and
    every weight has a gradient, which processes exchange.
    """

    def total(x_BL: Tensor) -> Tensor:
        return x_BL.sum() if scored_BL is None else torch.where(scored_BL, x_BL, 0.0).sum()

    summed = total(divergence(student.logits, teacher.logits))
    if next_token:
        told, _ = summed_loss(student.logits, targets_BL, scored_BL)
        summed = (1 - next_token) * summed + next_token * told
    if teacher.hidden_states is not None:  # the first are embeddings
        apart = total(layer_error(student.hidden_states[1:], teacher.hidden_states[1:]))
        summed = torch.where(early, apart, summed)
    return summed, targets_BL.numel() if scored_BL is None else scored_BL.sum()


@register("distill")
@dataclass(frozen=True)
class Distillation(Autoregression):
    teacher: str | None = None
    """A saved model, a run or a name on the Hub; default: the model of --init, untouched."""
    layers: float = 0.3
    """The part of training that goes to the outputs of layers."""
    next_token: float = 0.0
    """The share of the plain next-token loss afterwards."""

    criterion = staticmethod(summed_distance)
    taught_by: ClassVar[Any] = None  # the teacher itself, once it is bound to a run

    def __post_init__(self) -> None:
        for key in ("layers", "next_token"):
            if not 0 <= getattr(self, key) <= 1:
                raise UsageError(f"distill({key}={getattr(self, key)}) must be from 0 to 1")

    def flops(self, model: Any, context: int) -> float:
        """The teacher's forward pass is a fourth beside three."""
        return super().flops(model, context) * 4 / 3

    def check(self, config: TrainConfig) -> None:
        name = self.teacher or config.init
        if name is None:
            raise UsageError("distill has no teacher", "Give --init, or distill(teacher='FOLDER').")
        if config.parallel == "fsdp":
            raise UsageError("the teacher of distill is not spread over processes", "Use --parallel ddp.")
        if config.context > trained_length(name):
            raise UsageError(
                f"the teacher {name} was made for {trained_length(name)} tokens, not {config.context}",
                "Use a shorter --context.",
            )

    def bound(self, config: TrainConfig, model: Any) -> Distillation:
        name = self.teacher or config.init or ""
        teacher = pretrained(located(name), None).to(model.device).eval().requires_grad_(False)
        alike = {"vocab_size": "tokens"}
        if self.layers:
            alike |= {"num_hidden_layers": "layers", "hidden_size": "channels"}
        for key, what in alike.items():
            ours, theirs = (getattr(m.config.get_text_config(), key) for m in (model, teacher))
            if ours != theirs:
                raise UsageError(
                    f"the teacher {name} has {theirs} {what}, the student {ours}",
                    "Choose another teacher; with layers=0 its vocabulary must be the same, and no more.",
                )
        changed = copy.copy(self)
        object.__setattr__(changed, "taught_by", teacher)
        return changed

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | int]:
        if not model.training:
            return Autoregression().loss(model, batch)
        wanted = {"output_hidden_states": self.layers > 0}
        student, targets, scored = predicted(model, batch, **wanted)
        with torch.no_grad():
            teacher, _, _ = predicted(self.taught_by, batch, **wanted)
        return self.criterion(
            student, teacher, targets, scored, batch["progress"] < self.layers, self.next_token
        )
