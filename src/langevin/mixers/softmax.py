"""Softmax attention, the baseline of every comparison.

    w_ij = softmax_j( q_i·k_j / √d )

(Vaswani et al. 2017, arXiv 1706.03762)
"""

from dataclasses import dataclass

from langevin.mixers.mechanism import SoftmaxMechanism
from langevin.mixers.spec import register


@register("softmax")
@dataclass(frozen=True)
class Softmax(SoftmaxMechanism):
    pass
