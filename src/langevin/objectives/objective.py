"""What an objective is: the loss of a batch, and what follows from it. One file an objective.

An objective says whether the model looks back only, which head it has, what likelihood it can report, and
how it writes text; the training loop knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from langevin.errors import UsageError
from langevin.registry import Registry

if TYPE_CHECKING:
    from langevin.settings import TrainConfig

OBJECTIVES = Registry("objective", 'name(key=value, ...), for example "ar"')
register = OBJECTIVES.register

Batch = dict[str, Tensor]


class Objective:
    """Subclasses are frozen dataclasses whose fields are the spec's keys."""

    name: ClassVar[str] = ""
    causal: ClassVar[bool] = True  # whether the model may look back only
    head: ClassVar[str] = "LangevinForCausalLM"  # the class of models/backbone.py that has it
    likelihood: ClassVar[Literal["exact", "bound"] | None] = None
    passes: ClassVar[int] = 3  # that a training step takes, counted in forward passes

    def check(self, config: TrainConfig) -> None:
        """Raise where it does not go with the settings of a run: before any work."""

    def bound(self, config: TrainConfig, model: Any) -> Objective:
        """The objective with what it needs besides the batches of a run; asked once, before training."""
        return self

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | int]:
        """The loss summed over what counts, in nats, and how much counts: so that the parts of a batch,
        and processes, add up. Random numbers come from the generator (None: torch's own stream). A
        model in training gets batches with `progress` in them: the part of the budget spent, 0 to 1."""
        raise NotImplementedError(f"{type(self).__name__} must say what its loss is")

    def with_compiled_loss(self) -> Objective:
        """The same with what follows the model compiled, for `compile="loss"`."""
        raise UsageError(
            f"the objective {self.name} has no loss that is compiled by itself", "Use --compile on or off."
        )

    def sampler(self) -> Callable[..., Any]:
        """How it writes: a function like `langevin.sampling.ar.generate`."""
        raise UsageError(
            f"the objective {self.name} does not write text", "Generate with a run of another objective."
        )
