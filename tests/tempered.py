"""A mixer in twenty lines: it reaches the matrix, the CLI, check and bench by being registered."""

from dataclasses import dataclass

from formulas import dots, formula
from langevin.mixers import SoftmaxMechanism, register


@register("tempered")
@dataclass(frozen=True)
class Tempered(SoftmaxMechanism):
    power: float = 0.25

    def scale(self, x):
        return x.view.log_visible(x.q_BHQD.dtype).exp() ** self.power * x.geometry.scale


@formula("tempered")
def tempered(config, p, q, keys, queries, distances, depth):
    return (dots(q, keys) * keys.shape[1] ** config.power / q.shape[1] ** 0.5).softmax(-1)
