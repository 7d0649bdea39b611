"""Change how a transformers model mixes tokens, and save and load the result.

    model = langevin.convert(AutoModelForCausalLM.from_pretrained("gpt2"), "ssmax")
    model.save_pretrained(folder)
    model = langevin.from_pretrained(folder)

Any model on transformers' attention interface will do. Its weights stay; learned scalars join them as
`<attention module>.langevin.*`, and the spec is written into config.json. Load such a folder with
`langevin.from_pretrained`: a plain AutoModel would report the scalars as unexpected and mix by softmax.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from langevin.errors import UsageError, WorkError
from langevin.mixers.mechanism import Geometry, Mechanism
from langevin.mixers.neighbor import NeighborMixer
from langevin.mixers.spec import Spec, parse
from langevin.models import backbone
from langevin.models.attention import QKV
from langevin.models.convert_attention import NAME, ask, forget, is_causal, remember
from langevin.models.convert_neighbor import NeighborAttention, parameter_names

DEFAULT_LENGTH = 1024
_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)


def convert(model: PreTrainedModel, spec: str | Spec) -> PreTrainedModel:
    """Let every attention module of the model mix by `spec`, in place; the model is returned.

    Weights are kept, and a scale the model gives its scores is honoured by softmax, ssmax and sigmoid.
    neighbor has no use for q, k and v: it takes the place of whole attention modules, with new weights.
    A converted model may be converted again; the scalars of the old spec are dropped.
    """
    spec = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"{type(model).__name__} is not a transformers model",
            "Build other models with langevin.mixers.build.",
        )
    _refuse_cross_attention(model)
    found = dict(attention_modules(model))
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no attention module on transformers' attention interface",
            "Choose a model whose attention can be switched by attn_implementation.",
        )
    if isinstance(spec.mixer, Mechanism):
        _install_mixers(found, spec)
    else:
        _replace_modules(model, found, spec)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and ask not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(ask, with_kwargs=True)
    model.set_attn_implementation(NAME)
    for name, module in found.items():
        if getattr(module.config, "_attn_implementation", NAME) != NAME:
            raise UsageError(f"{name} of {type(model).__name__} does not let its attention be switched")
    _warn_of_dropout(model, spec)
    model.config.langevin = {"spec": spec.in_full()}
    return model


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that call transformers' attention interface, or that took the place of one."""
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        names = forward.__code__.co_names if inspect.isfunction(forward) else ()
        if isinstance(module, NeighborAttention) or "ALL_ATTENTION_FUNCTIONS" in names:
            yield name, module


def geometry_of(module: nn.Module, layer: int, depth: int) -> Geometry:
    """Where an attention module stands, as far as it and its config tell."""
    config = module.config
    heads = _first(module, ("num_heads", "num_attention_heads", "n_heads", "n_head"))
    heads = heads or _first(config, ("num_attention_heads", "n_head", "num_heads", "n_heads"))
    width = _first(config, ("hidden_size", "n_embd", "d_model", "embed_dim"))
    if heads is None or width is None:
        raise UsageError(f"{type(module).__name__} does not say how many heads of what width it has")
    head_dim = _first(module, ("head_dim", "attention_head_size")) or _first(config, ("head_dim",))
    kv_heads = _first(module, ("num_key_value_heads",)) or _first(config, ("num_key_value_heads",))
    depth = _first(config, ("num_hidden_layers", "n_layer", "num_layers")) or depth
    scale = getattr(module, "scaling", None)
    return Geometry(
        heads,
        head_dim or width // heads,
        kv_heads or heads,
        layer,
        depth,
        _train_length(config),
        scale if isinstance(scale, float) else (head_dim or width // heads) ** -0.5,
    )


def from_pretrained(name_or_path: str | os.PathLike[str], *, auto_class: Any = None, **kwargs: Any) -> Any:
    """A model saved after `convert`, converted again and with its weights; a plain one loads as it is.

    The class is the one the folder was saved from; auto_class (AutoModelForCausalLM, or its name) overrides
    it. All other arguments go to transformers' from_pretrained. Learned scalars are float32 in any dtype.
    Every weight must be there and have a place: a WorkError names those that are missing or left over.
    """
    where = os.fspath(name_or_path)
    if os.path.isdir(where):
        kwargs.setdefault("local_files_only", True)
    elif os.path.exists(where) or os.path.isdir(os.path.dirname(where)) or not _HUB_NAME.fullmatch(where):
        raise UsageError(f"there is no folder {where}", "Give a folder written by save_pretrained.")
    config, kwargs = _read_config(where, kwargs)
    cls = _model_class(config, auto_class, where)
    entry = getattr(config, "langevin", None)
    if entry is None:
        return _load(cls, where, config, kwargs)
    if not isinstance(entry, dict) or not isinstance(entry.get("spec"), str):
        raise WorkError(
            f"the langevin entry of {where} holds no spec: {entry!r}", "Convert and save again."
        )
    if kwargs.pop("attn_implementation", NAME) != NAME:
        raise UsageError(
            f"{where} mixes by {entry['spec']}, which no other attn_implementation computes",
            "Leave attn_implementation out.",
        )
    reported = kwargs.pop("output_loading_info", False)
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # all three are errors below
    model, info = _load(_converting(cls, parse(entry["spec"])), where, config, kwargs)
    model.__class__ = cls
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(key if isinstance(key, str) else key[0] for key in info[problem])
        if names:
            raise WorkError(
                f"{where} has {len(names)} {problem.replace('_', ' ')}, the first being {names[0]}",
                f"Load it as the class it was saved from: {(config.architectures or ['?'])[0]}.",
            )
    return (model, info) if reported else model


def _refuse_cross_attention(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise UsageError(
            f"{type(model).__name__} is an encoder-decoder model",
            "Mixers work on one sequence: convert a decoder or an encoder.",
        )
    for name, module in model.named_modules():
        if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
            raise UsageError(
                f"{name} of {type(model).__name__} attends to another sequence",
                "Mixers work on one sequence: build the model without cross-attention.",
            )


def _install_mixers(found: dict[str, nn.Module], spec: Spec) -> None:
    """Give each attention module its own mixer, and hooks that tell it about the cache."""
    for name, module in found.items():
        if isinstance(module, NeighborAttention):
            raise UsageError(
                f"{name} was replaced by neighbor and has no q, k and v any more",
                "Load the original model and convert that.",
            )
    mixers = [QKV(spec, geometry_of(module, i, len(found))) for i, module in enumerate(found.values())]
    for module, mixer in zip(found.values(), mixers, strict=True):
        module.langevin = _placed(mixer, module)
        if remember not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(remember, with_kwargs=True)
            module.register_forward_hook(forget, always_call=True)


def _replace_modules(model: nn.Module, found: dict[str, nn.Module], spec: Spec) -> None:
    """Put a mixer x -> x in the place of each attention module."""
    replacements = {}
    for layer, (name, module) in enumerate(found.items()):
        g = geometry_of(module, layer, len(found))
        mixer = spec.mixer.module(
            spec,
            width=_first(module.config, ("hidden_size", "n_embd", "d_model", "embed_dim")),
            heads=g.heads,
            causal=is_causal(module, {}),
            layer=layer,
            depth=g.depth,
            max_length=g.train_length,
        )
        if not isinstance(mixer, NeighborMixer):
            raise UsageError(f"{spec.mixer.name} cannot take the place of attention in {name}")
        place = getattr(module, "layer_idx", None)
        names = parameter_names(module)
        replacements[name] = NeighborAttention(_placed(mixer, module), module.config, place, names)
    for name, replacement in replacements.items():
        replacement.train(found[name].training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)


def _placed(mixer: nn.Module, module: nn.Module) -> Any:
    """The mixer on the module's device, in its dtype and mode; transformers leaves its weights alone."""
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    if like is not None:
        mixer.to(device=like.device, dtype=like.dtype)
    for p in mixer.parameters():
        p._is_hf_initialized = True  # type: ignore[attr-defined]
    return mixer.train(module.training)


def _warn_of_dropout(model: PreTrainedModel, spec: Spec) -> None:
    if isinstance(spec.mixer, Mechanism) and spec.mixer.has_dropout:
        return
    dropped = [name for name in _DROPOUTS if getattr(model.config, name, 0.0)]
    if dropped:
        warnings.warn(
            f"{spec} cannot drop attention weights: {', '.join(dropped)} of the model has no effect",
            stacklevel=3,
        )


def _first(owner: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _train_length(config: Any) -> int:
    """The longest input the model was built for: tokens, or patches and a class token."""
    length = _first(config, ("max_position_embeddings", "n_positions", "max_seq_len"))
    if length is not None and length > 0:
        return length
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if image is None or patch is None:
        return DEFAULT_LENGTH
    sides, steps = ((x, x) if isinstance(x, int) else tuple(x) for x in (image, patch))
    return (sides[0] // steps[0]) * (sides[1] // steps[1]) + 1


def _read_config(where: str, kwargs: dict[str, Any]) -> tuple[PretrainedConfig, dict[str, Any]]:
    """The config, and the arguments it had no use for."""
    hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
    kept = {
        name: kwargs.pop(name) for name in ("dtype", "torch_dtype", "attn_implementation") if name in kwargs
    }
    try:
        config, rest = AutoConfig.from_pretrained(where, return_unused_kwargs=True, **hub, **kwargs)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{where} holds no model config: {_line(error)}",
            "Give a folder written by save_pretrained, with its config.json.",
        ) from error
    return config, {**rest, **hub, **kept}


def _model_class(config: PretrainedConfig, auto_class: Any, where: str) -> Any:
    chosen = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
    named = (config.architectures or [None])[0]
    if auto_class is None and named:
        chosen = getattr(transformers, named, None) or getattr(backbone, named, None)
    if chosen is None:
        raise UsageError(
            f"{auto_class or named or where} names no transformers model class",
            "Pass auto_class, for example auto_class='AutoModelForCausalLM'.",
        )
    if not hasattr(chosen, "_model_mapping"):
        return chosen
    try:
        classes = chosen._model_mapping[type(config)]
    except KeyError:
        raise UsageError(
            f"{chosen.__name__} has no class for {type(config).__name__}", "Pass another auto_class."
        ) from None
    classes = classes if isinstance(classes, list | tuple) else [classes]
    return next((c for c in classes if c.__name__ == named), classes[0])


def _converting(cls: Any, spec: Spec) -> Any:
    """cls, whose instances are converted before weights are loaded into them."""

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        convert(self, spec)

    body = {"__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), body)


def _load(cls: Any, where: str, config: PretrainedConfig, kwargs: dict[str, Any]) -> Any:
    try:
        return cls.from_pretrained(where, config=config, **kwargs)
    except SafetensorError as error:
        raise WorkError(
            f"the weights in {where} are damaged: {_line(error)}", "Copy or save the folder again."
        ) from error
    except OSError as error:
        raise WorkError(
            f"the weights in {where} cannot be read: {_line(error)}", "Copy or save the folder again."
        ) from error


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
