"""Change how a transformers model mixes tokens, and save and load the result.

    model = langevin.convert(AutoModelForCausalLM.from_pretrained("gpt2"), "ssmax")
    model.save_pretrained(folder)
    model = langevin.from_pretrained(folder)

Any model on transformers' attention interface will do. Its weights stay; learned scalars join them as
`<attention module>.langevin.*`, and the spec is written into config.json. Load such a folder with
`langevin.from_pretrained`: a plain AutoModel would report the scalars as unexpected and mix by softmax.
"""

import copy
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from langevin.environment import without_bars
from langevin.errors import UsageError, WorkError, one_line
from langevin.mixers.mechanism import Mechanism
from langevin.mixers.spec import Spec, parse
from langevin.models import heads
from langevin.models.config import LangevinConfig
from langevin.models.convert_attention import NAME
from langevin.models.convert_modules import attention_modules, install
from langevin.models.convert_trial import SOFTMAX, tried
from langevin.models.pretrained import located

_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_HUB_OPTIONS = (
    *("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"),
)


def convert(
    model: PreTrainedModel,
    spec: str | Spec,
    *,
    layers: Sequence[int] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Let the attention modules of the model mix by `spec`, in place; the model is returned.

    All of them, or those of the layers named; the others keep their softmax. Weights are kept, and a scale
    the model gives its scores is honoured by softmax, ssmax and sigmoid. neighbor, without q, k and v,
    takes the place of whole attention modules, with new weights. A converted model may be converted again:
    the scalars of the old spec are dropped.

    It is tried first, on a few tokens or a blank image (or on `inputs`, those of a call of the model). A
    model that does not pass is left as it was, with a UsageError that says why.
    """
    spec = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"{type(model).__name__} is not a transformers model",
            "Build other models with langevin.mixers.build.",
        )
    _refuse_cross_attention(model)
    plan = _planned(model, spec, layers)
    scales = tried(model, plan, inputs)
    _own_configs(model)
    install(model, plan, scales)
    _warn_of_dropout(model, spec)
    return model


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


def _planned(model: PreTrainedModel, spec: Spec, layers: Sequence[int] | None) -> dict[str, Spec]:
    """The spec of every attention module that gets a mixer: those to be converted, and softmax for others
    that have none yet, since all of a model's attention goes through one interface."""
    kind, found = type(model).__name__, dict(attention_modules(model))
    if not found:
        raise UsageError(
            f"{kind} has no attention module on transformers' attention interface",
            "Choose a model whose attention can be switched by attn_implementation.",
        )
    stacks: dict[str, dict[int, list[str]]] = {}  # the lists of layers, with the modules in each layer
    for name in found:
        numbered = re.fullmatch(r"(.+?)\.(\d+)\..+", name)
        if numbered:
            stacks.setdefault(numbered[1], {}).setdefault(int(numbered[2]), []).append(name)
    if layers is None:
        for path, members in stacks.items():
            others = set(range(len(cast(nn.ModuleList, model.get_submodule(path))))) - set(members)
            if others:
                raise UsageError(
                    f"{path} {_listed(others)} of {kind} have no attention on transformers' interface",
                    f"Name the layers to convert: {_listed(members)}.",
                )
        return dict.fromkeys(found, spec)
    if len(stacks) != 1:
        raise UsageError(f"{kind} has {len(stacks)} lists of layers, not one", "Convert it whole.")
    (members,) = stacks.values()
    unknown = set(layers) - set(members)
    if unknown or not layers:
        raise UsageError(
            f"{kind} has no layer {_listed(unknown)} with attention" if layers else "no layers were named",
            f"It has {_listed(members)}.",
        )
    chosen = {name for number in layers for name in members[number]}
    return {
        name: spec if name in chosen else SOFTMAX
        for name, module in found.items()
        if name in chosen or not hasattr(module, "langevin")
    }


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _own_configs(model: PreTrainedModel) -> None:
    """Give the model copies of its configs, of which others may be built too."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, memo)


def _warn_of_dropout(model: PreTrainedModel, spec: Spec) -> None:
    if isinstance(spec.mixer, Mechanism) and spec.mixer.has_dropout:
        return
    dropped = [name for name in _DROPOUTS if getattr(model.config, name, 0.0)]
    if dropped:
        warnings.warn(
            f"{spec} cannot drop attention weights: {', '.join(dropped)} of the model has no effect",
            stacklevel=3,
        )


def from_pretrained(name_or_path: str | os.PathLike[str], *, auto_class: Any = None, **kwargs: Any) -> Any:
    """A model saved after `convert`, converted again and with its weights; a plain one loads as it is.

    The name is that of a folder, a run, a folder in `$LANGEVIN_DATA/models/` or a model on the Hub. The
    class is the one it was saved from; auto_class (AutoModelForCausalLM, or its name) overrides that. All
    other arguments go to transformers' from_pretrained. Learned scalars are float32 in any dtype.

    Weights come from safetensors only, and no code comes with them. Every weight must be there, and in
    converted models and our own have a place: a WorkError names those that are missing or left over.
    """
    for option, only in (("use_safetensors", True), ("trust_remote_code", False)):
        if kwargs.pop(option, only) is not only:
            raise UsageError(
                f"{option}={not only} would let code run that comes with the weights",
                f"Leave {option} out.",
            )
    where = located(name_or_path)
    config, kwargs = read_config(where, kwargs)
    cls, building, specs = class_of(config, auto_class, where)
    if building is not cls and kwargs.pop("attn_implementation", NAME) != NAME:
        raise UsageError(
            f"{where} was converted, and no other attn_implementation computes its mixers",
            "Leave attn_implementation out.",
        )
    reported = kwargs.pop("output_loading_info", False)
    model, info = loaded(building, where, config, kwargs)
    model.__class__ = cls
    problems = ["unexpected_keys"] if specs else []
    if specs or cls.__name__ == (config.architectures or [None])[0]:  # another class may have a new head
        problems += ["missing_keys", "mismatched_keys"]
    for problem in problems:
        names = sorted(key if isinstance(key, str) else key[0] for key in info[problem])
        if names:
            raise WorkError(
                f"{where} has {len(names)} {problem.replace('_', ' ')}, the first being {names[0]}",
                f"Load it as the class it was saved from: {(config.architectures or ['?'])[0]}.",
            )
    return (model, info) if reported else model


def class_of(config: PreTrainedConfig, auto_class: Any, where: str) -> tuple[Any, Any, list[Spec]]:
    """The class of a saved model, one that builds it with its mixers, and these; none in a plain model."""
    cls = _model_class(config, auto_class, where)
    entry = getattr(config, "langevin", None)
    if entry is None:
        return cls, cls, config.mixers if isinstance(config, LangevinConfig) else []
    specs = _specs(entry, where)
    return cls, _converting(cls, specs, where), specs


def read_config(where: str, kwargs: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config of a saved model, and the arguments it had no use for."""
    if os.path.isdir(where):
        kwargs.setdefault("local_files_only", True)
    hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
    kept = {
        name: kwargs.pop(name) for name in ("dtype", "torch_dtype", "attn_implementation") if name in kwargs
    }
    try:
        config, rest = AutoConfig.from_pretrained(
            where, return_unused_kwargs=True, trust_remote_code=False, **hub, **kwargs
        )
    except Exception as error:  # of many kinds, when config.json is damaged
        raise UsageError(
            f"{where} holds no model config: {one_line(error)}",
            "Give a folder written by save_pretrained, with its config.json.",
        ) from error
    return config, {**rest, **hub, **kept}


def _specs(entry: Any, where: str) -> list[Spec]:
    """What config.json says of the mixers: one spec, or one for each attention module."""
    written = entry.get("spec") if isinstance(entry, dict) else None
    written = [written] if isinstance(written, str) else written
    if not isinstance(written, list) or not all(isinstance(spec, str) for spec in written) or not written:
        raise WorkError(f"config.json in {where} names no spec: {entry!r}", "Convert and save again.")
    return [parse(spec) for spec in written]


def _converting(cls: Any, specs: list[Spec], where: str) -> Any:
    """cls, whose instances are converted before weights are loaded into them."""

    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, config, *args, **kwargs)
        names = [name for name, _ in attention_modules(self)]
        if len(specs) not in (1, len(names)):
            raise WorkError(
                f"{where} names {len(specs)} mixers for {len(names)} attention modules",
                "Convert and save again.",
            )
        install(self, dict(zip(names, specs * (len(names) if len(specs) == 1 else 1), strict=True)))

    body = {"__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), body)


def _model_class(config: PreTrainedConfig, auto_class: Any, where: str) -> Any:
    chosen = getattr(transformers, auto_class, None) if isinstance(auto_class, str) else auto_class
    named = (config.architectures or [None])[0]
    if auto_class is None and named:
        chosen = getattr(transformers, named, None) or getattr(heads, named, None)
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


def loaded(cls: Any, where: str, config: PreTrainedConfig, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The model, and which of its weights do not fit; no bar of progress goes between a command's lines."""
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    try:
        with without_bars():
            return cls.from_pretrained(where, config=config, **kwargs)
    except (UsageError, WorkError):
        raise
    except Exception as error:  # of many kinds, when a file is damaged
        if isinstance(error, OSError) and any(Path(where).glob("*.bin")):
            raise WorkError(
                f"the weights in {where} are pickled, and might hold any code", "Save them as safetensors."
            ) from error
        raise WorkError(
            f"the weights in {where} cannot be read: {one_line(error)}", "Copy or save the folder again."
        ) from error
