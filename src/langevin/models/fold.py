"""Fold drift into the output projection: the same function with fewer parts.

    W (a ⊙ y + c) + b   =   (W diag a) y + (b + W c)

Drift is affine in the mixed values y, and the projection W follows at once. H heads, D head width.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from langevin.errors import UsageError
from langevin.mixers.drift import Drift, Noise
from langevin.mixers.mechanism import Scalars
from langevin.mixers.neighbor import NeighborMixer
from langevin.models.attention import QKV
from langevin.models.convert_modules import write_spec

_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "dense", "proj", "wo", "out_lin")
# What an attention module may own beside it, if the projection is to follow the mixed values at once.
_HARMLESS = re.compile(
    r"(q|k|v|qkv)_proj|query|key|value|qkv|query_key_value|c_attn|(q|k)_(layer)?norm|rotary_emb|\w*dropout|langevin"
)


@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Fold every drift of the model into the projection behind it, in place; the model is returned.

    For inference: what a folded model computes in eval mode is unchanged. Training noise behind a drift is
    dropped with it. Works for modules of `langevin.mixers.build`, own models and converted ones.
    """
    folds = [fold for name, module in model.named_modules() for fold in _folds(model, name, module)]
    for mixer, first, projection, a, c in folds:
        _fold_into(projection, a, c)
        mixer.spec = replace(mixer.spec, wrappers=mixer.spec.wrappers[:first])
        mixer.wrappers.configs = mixer.spec.wrappers
        mixer.wrappers.scalars = mixer.wrappers.scalars[:first]
    if folds and isinstance(model, PreTrainedModel):
        write_spec(model)
    return model


def _folds(
    model: nn.Module, name: str, module: nn.Module
) -> Iterator[tuple[QKV, int, Any, Tensor, Tensor]]:
    """Of a module that drifts: its mixer, its first drift, the projection, and a and c. Raises where that
    cannot be done."""
    if isinstance(module, NeighborMixer) and any(isinstance(w, Drift) for w in module.spec.wrappers):
        raise UsageError(
            f"{module.spec} has no output projection to fold drift into", "Keep the model as it is."
        )
    mixer: Any = getattr(module, "langevin", None)
    wrappers = mixer.spec.wrappers if isinstance(mixer, QKV) else ()
    first = next((i for i, w in enumerate(wrappers) if isinstance(w, Drift)), None)
    if first is None:
        return
    a, c = _affine(mixer, first)
    projection = _projection(model, name, module)
    if bool(c.any()) and projection.bias is None:
        raise UsageError(
            f"the drift of {name} shifts its output, and the projection behind it has no bias",
            "Keep the model as it is, or train with drift(kind='gain') or baseline=0.",
        )
    yield mixer, first, projection, a, c


def _affine(mixer: QKV, first: int) -> tuple[Tensor, Tensor]:
    """(a, c), each (H·D,), of all drifts from the first on, applied in order."""
    shape = (mixer.geometry.heads, 1, mixer.geometry.head_dim)
    device = next(iter(mixer.parameters()), torch.empty(0)).device
    a = torch.ones(shape, dtype=torch.float64, device=device)
    c = torch.zeros_like(a)
    parts = zip(mixer.wrappers.configs[first:], list(mixer.wrappers.scalars)[first:], strict=True)
    for config, scalars in parts:
        assert isinstance(scalars, Scalars)
        if isinstance(config, Drift):
            gain, shift = config.affine({k: p.double() for k, p in scalars().items()})
            a, c = gain * a, gain * c + shift
        elif not isinstance(config, Noise) or config.eval:
            raise UsageError(
                f"{mixer.spec}: what {config.name} adds after a drift also acts in inference",
                "Fold a model without it, or write it before the drift.",
            )
    return a.expand(shape).flatten(), c.expand(shape).flatten()


def _fold_into(projection: Any, a: Tensor, c: Tensor) -> None:
    """W <- W diag a, b <- b + W c, in float64 and rounded once."""
    W: Tensor = projection.weight.T if isinstance(projection, Conv1D) else projection.weight  # (out, in)
    a, c = a.to(W.device), c.to(W.device)
    if bool(c.any()):
        projection.bias.copy_(projection.bias.double() + W.double() @ c)
    W.copy_(W.double() * a)


def _projection(model: nn.Module, name: str, module: nn.Module) -> Any:
    """The output projection of a converted attention module: its own, or its sibling `output.dense`."""
    children = dict(module.named_children())
    own = next((children.pop(n) for n in _PROJECTIONS if n in children), None)
    if own is None:
        parent = model.get_submodule(name.rpartition(".")[0])
        own = getattr(getattr(parent, "output", None), "dense", None)
    unknown = [child for child in children if not _HARMLESS.fullmatch(child)]
    if "sigmoid" in inspect.unwrap(type(module).forward).__code__.co_names:
        unknown.append("a gate")
    if type(own) not in (nn.Linear, Conv1D) or unknown:
        what = f"owns {', '.join(unknown)}" if unknown else "is not followed by a plain linear projection"
        raise UsageError(
            f"{name} ({type(module).__name__}) {what}: where its output goes is not known for certain",
            "Keep the model as it is.",
        )
    return own
