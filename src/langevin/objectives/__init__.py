"""What a model is asked to learn: the loss of a batch, one file an objective.

A file dropped into this folder registers itself; installed packages may add theirs through the entry-point
group `langevin.objectives`.
"""

from langevin.objectives.objective import OBJECTIVES, Batch, Objective, generator_of, register

__all__ = ["OBJECTIVES", "Batch", "Objective", "generator_of", "register"]

OBJECTIVES.discover(__name__, __path__)
