"""The learned scalars of attention, in the terms of their formulas."""

from dataclasses import dataclass

from torch import nn

from langevin.mixers.neighbor import NeighborMixer
from langevin.models.attention import QKV


@dataclass(frozen=True)
class LearnedScalar:
    """One learned number, in the terms of its mixer's formula."""

    layer: int
    head: int
    name: str  # time, s, bias, drift.gain, drift.gate, ...
    value: float
    channel: int | None = None  # where a head has one for each channel (or, in adapt, for each feature)


def learned_scalars(model: nn.Module) -> list[LearnedScalar]:
    """The learned times, s, biases and drifts of every mixer in a model, by layer and head."""
    rows: list[LearnedScalar] = []
    mixers = [m for m in model.modules() if isinstance(m, QKV | NeighborMixer)]
    for mixer in mixers:
        layer = mixer.geometry.layer
        terms = list(mixer.learned().items()) if isinstance(mixer, QKV) else []
        for config, scalars in zip(mixer.wrappers.configs, mixer.wrappers.scalars, strict=True):
            terms += [(f"{config.name}.{name}", x) for name, x in config.learned(scalars()).items()]
        for name, values in terms:  # (H,), (H, 1) or (H, channels)
            rows += [
                LearnedScalar(layer, h, name, value, channel if len(channels) > 1 else None)
                for h, channels in enumerate(values.detach().double().reshape(len(values), -1).tolist())
                for channel, value in enumerate(channels)
            ]
    return rows
