"""What an objective is: the loss of a batch, and what follows from it. One file an objective.

An objective says whether the model looks back only, which head it has, what likelihood it can report, and
how it writes text; the training loop knows none of them by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from langevin.errors import UsageError
from langevin.models.cost import flops_of
from langevin.registry import Registry
from langevin.sampling.text import Sampling

if TYPE_CHECKING:
    from langevin.settings import TrainConfig

OBJECTIVES = Registry("objective", 'name(key=value, ...), for example "ar"')
register = OBJECTIVES.register

Batch = dict[str, Tensor]


def generator_of(*numbers: int) -> torch.Generator:
    """Random numbers that are a pure function of some whole ones, such as a seed and a step."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


class Objective:
    """Subclasses are frozen dataclasses whose fields are the spec's keys."""

    name: ClassVar[str] = ""
    causal: ClassVar[bool] = True  # whether the model may look back only
    head: ClassVar[str] = "LangevinForCausalLM"  # the class of models/heads.py
    extra_tokens: ClassVar[int] = 0  # ids that a model reads besides those of the data, such as a mask
    likelihood: ClassVar[Literal["exact", "bound"] | None] = None
    criterion: ClassVar[Callable[..., Any] | None] = None  # what follows the model, as one function

    def check(self, config: TrainConfig) -> None:
        """Raise where it does not go with the settings of a run: before any work."""

    def bound(self, config: TrainConfig, model: Any) -> Objective:
        """The objective with what it needs besides the batches of a run; asked once, before training."""
        return self

    def model_settings(self) -> dict[str, Any]:
        """What it asks of the model's config."""
        return {}

    def flops(self, model: Any, context: int) -> float:
        """Training FLOPs a token."""
        return flops_of(model, context)

    def draws(self, batch: Batch, rows: int, generator: torch.Generator | None) -> Batch:
        """Random numbers that join a batch, a row of them for each of its rows: drawn for a whole batch of
        `rows` rows, of which `batch` may be a part, so that parts and processes share one draw. In
        training the generator is a function of (seed, step), on held-out data always the same."""
        return {}

    def loss(
        self, model: Any, batch: Batch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor | int]:
        """The loss summed over what counts, in nats, and how much counts: so that the parts of a batch,
        and processes, add up. Random numbers are those of `draws` where the batch has them, else from the
        generator (None: torch's own stream). A model in training gets batches with `progress` in them: the
        part of the budget spent, 0 to 1."""
        raise NotImplementedError(f"{type(self).__name__} must say what its loss is")

    def calibrate(self, model: Any, held_out: list[Batch]) -> None:
        """What is fitted on validation batches before a model is kept, and kept with it."""

    def upper_bound(self, model: Any, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """(B, L), where the likelihood is a bound: an unbiased estimate of an upper bound of the negative
        log-likelihood of each row, in nats, as a sum over its tokens."""
        raise NotImplementedError(f"{type(self).__name__} must say what its bound is")

    def chain_rule(self, model: Any, batch: Batch, at_once: int) -> Tensor:
        """(B, L), where the likelihood is a bound: the exact negative log-likelihood of each token when a
        row is written from left to right, by passes over `at_once` rows."""
        raise UsageError(f"the objective {self.name} has no exact likelihood from left to right")

    def with_compiled_loss(self) -> Objective:
        """The same with what follows the model compiled, for `compile="loss"`."""
        if self.criterion is None:
            raise UsageError(
                f"the objective {self.name} has no loss that is compiled by itself",
                "Use --compile on or off.",
            )
        changed = copy.copy(self)
        object.__setattr__(changed, "criterion", torch.compile(self.criterion, dynamic=False))
        return changed

    def repaired(self, model: Any, tokens_BL: Tensor, sampling: Sampling) -> Tensor | None:
        """Whole texts in which some tokens are wrong, after the sampler could open and write them anew;
        None: it never opens what is committed."""
        return None

    @classmethod
    def sampling(cls) -> type[Sampling]:
        """The options of its sampler, which `langevin generate` shows as flags."""
        return Sampling

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise where its sampler cannot do what these options ask for."""

    def sampler(self) -> Callable[..., Any]:
        """How it writes: a function like `langevin.sampling.ar.generate`."""
        raise UsageError(
            f"the objective {self.name} does not write text", "Generate with a run of another objective."
        )
