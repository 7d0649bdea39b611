"""Mixers put into the attention modules of a transformers model."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from langevin.errors import UsageError
from langevin.mixers.mechanism import Geometry, Mechanism
from langevin.mixers.neighbor import NeighborMixer
from langevin.mixers.spec import Spec
from langevin.models.attention import QKV, Mixing, NeighborMixing
from langevin.models.cache import extent
from langevin.models.config import LangevinConfig
from langevin.models.convert_attention import (
    ask,
    call_ours,
    forget,
    is_causal,
    only_ours,
    remember,
    view_of,
)

DEFAULT_LENGTH = 1024
_WIDTHS = ("hidden_size", "n_embd", "d_model", "embed_dim")


class NeighborAttention(NeighborMixing):
    """Takes the calls meant for an attention module; its projections are gone, the mixer works on x."""

    def __init__(
        self, mixer: NeighborMixer, config: Any, layer: int | None, names: tuple[str, ...]
    ) -> None:
        """names are those of the positional arguments that callers pass, the input first."""
        super().__init__(mixer)
        self.config, self.layer_idx, self.names = config, layer, names
        self.is_causal = mixer.causal

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if given.get("is_causal") not in (None, self.is_causal):
            raise UsageError(
                f"this neighbor mixer was built with causal={self.is_causal}",
                "Set config.is_causal before converting.",
            )
        x = given[self.names[0]]
        cache = next((v for v in given.values() if isinstance(v, Cache)), None)
        past, keys = extent(cache, self.layer_idx or 0, x.shape[1], whole=True)
        view = view_of(given.get("attention_mask"), x, keys, past, self.is_causal, given)
        weights = bool(given.get("output_attentions") or getattr(self, "langevin_weights", False))
        return self.mixed(x, view, cache, None, weights)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that call transformers' attention interface or took the place of one, and our own."""
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        names = forward.__code__.co_names if inspect.isfunction(forward) else ()
        if isinstance(module, Mixing) or "ALL_ATTENTION_FUNCTIONS" in names:
            yield name, module


def _is_our_own(module: nn.Module) -> bool:
    return isinstance(module, Mixing) and not isinstance(module, NeighborAttention)


def install(
    model: PreTrainedModel, plan: Mapping[str, Spec], scales: Mapping[str, float] | None = None
) -> None:
    """Let the attention modules of the plan mix by their specs; nothing changes until every mixer is built.

    scales are those the model multiplies q·k by, where they are known better than from its attributes.
    """
    found = dict(attention_modules(model))
    mixers: dict[str, Any] = {}
    for layer, (name, module) in enumerate(found.items()):
        if name in plan:
            geometry = geometry_of(module, layer, len(found))
            geometry = replace(geometry, scale=(scales or {}).get(name, geometry.scale))
            mixers[name] = _placed(_mixer(name, module, plan[name], geometry), module)
    for name, mixer in mixers.items():
        module = found[name]
        if isinstance(mixer, QKV):
            module.langevin = mixer
        else:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _in_the_place_of(module, mixer))
        if not _is_our_own(module):
            call_ours(module.config)
            if remember not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(remember, with_kwargs=True)
                module.register_forward_hook(forget, always_call=True)
    for part in model.modules():
        inside = [m for _, m in attention_modules(part)] if isinstance(part, PreTrainedModel) else []
        if any(not _is_our_own(module) for module in inside):
            call_ours(part.config)
            part.set_attn_implementation = only_ours
            if ask not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(ask, with_kwargs=True)
    write_spec(model)


def write_spec(model: PreTrainedModel) -> None:
    """Note the mixers in the model's config: one spec, or a list with one for each attention module."""
    mixers: list[Any] = [module.langevin for _, module in attention_modules(model)]
    specs = [mixer.spec for mixer in mixers]
    if isinstance(model.config, LangevinConfig):
        model.config.mixer = str(specs[0]) if len(set(specs)) == 1 else list(map(str, specs))
    else:
        written = [spec.in_full() for spec in specs]
        model.config.langevin = {"spec": written[0] if len(set(specs)) == 1 else written}


def geometry_of(module: Any, layer: int, depth: int) -> Geometry:
    """Where an attention module stands, as far as it and its config tell."""
    if hasattr(module, "langevin"):
        return module.langevin.geometry
    config = module.config
    heads = _first(module, ("num_heads", "num_attention_heads", "n_heads", "n_head"))
    heads = heads or _first(config, ("num_attention_heads", "n_head", "num_heads", "n_heads"))
    width = _first(config, _WIDTHS)
    if heads is None or width is None:
        raise UsageError(f"{type(module).__name__} does not say how many heads of what width it has")
    head_dim = _first(module, ("head_dim", "attention_head_size")) or _first(config, ("head_dim",))
    head_dim = head_dim or width // heads
    kv_heads = _first(module, ("num_key_value_heads",)) or _first(config, ("num_key_value_heads",))
    depth = _first(config, ("num_hidden_layers", "n_layer", "num_layers")) or depth
    scale = getattr(module, "scaling", None)
    scale = scale if isinstance(scale, float) else head_dim**-0.5
    return Geometry(heads, head_dim, kv_heads or heads, layer, depth, train_length(config), scale)


def _mixer(name: str, module: Any, spec: Spec, geometry: Geometry) -> QKV | NeighborMixer:
    if isinstance(spec.mixer, Mechanism):
        if isinstance(module, NeighborMixing):
            raise UsageError(
                f"{name} was replaced by neighbor and has no q, k and v any more",
                "Load the original model and convert that.",
            )
        return QKV(spec, geometry)
    mixer = spec.mixer.module(
        spec,
        width=module.width if isinstance(module, Mixing) else _first(module.config, _WIDTHS),
        heads=geometry.heads,
        causal=is_causal(module, {}),
        layer=geometry.layer,
        depth=geometry.depth,
        max_length=geometry.train_length,
    )
    if not isinstance(mixer, NeighborMixer):
        raise UsageError(f"{spec.mixer.name} cannot take the place of attention in {name}")
    return mixer


def _in_the_place_of(module: Any, mixer: NeighborMixer) -> nn.Module:
    if _is_our_own(module):
        return NeighborMixing(mixer).train(module.training)
    if isinstance(module, NeighborAttention):
        names = module.names
    else:
        parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
        names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]
    place = getattr(module, "layer_idx", None)
    return NeighborAttention(mixer, module.config, place, names).train(module.training)


def _placed(mixer: nn.Module, module: nn.Module) -> Any:
    """The mixer on the module's device, in its dtype and mode; transformers leaves its weights alone."""
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    if like is not None:
        mixer.to(device=like.device, dtype=like.dtype)
    for p in mixer.parameters():
        p._is_hf_initialized = True  # type: ignore[attr-defined]
    return mixer.train(module.training)


def _first(owner: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def train_length(config: Any) -> int:
    """The longest input the model was built for: tokens, or patches and a class token."""
    length = _first(config, ("max_position_embeddings", "n_positions", "max_seq_len"))
    if length is not None and length > 0:
        return length
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if image is None or patch is None:
        return DEFAULT_LENGTH
    sides, steps = ((x, x) if isinstance(x, int) else tuple(x) for x in (image, patch))
    return (sides[0] // steps[0]) * (sides[1] // steps[1]) + 1
