"""The attention function a converted transformers model calls, and the mask it is called with.

B batch, H heads, Q queries, K keys (cached ones included), D head width.

transformers hands an attention function projected q, k, v and a mask built beforehand. The function and the
builder of masks are looked up by one name: without a builder of that name a model passes no mask at all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.masking_utils import sdpa_mask

from langevin.errors import UsageError
from langevin.kernels.view import View
from langevin.mixers.attention import QKV
from langevin.mixers.mechanism import Inputs, SoftmaxMechanism

NAME = "langevin"
_HIDDEN = -1e4  # an additive mask hides a key with this or less
_UNKNOWN_TERMS = {
    "softcap": "caps its attention scores (softcap)",
    "s_aux": "adds attention sinks (s_aux)",
    "position_bias": "adds a position bias to its attention scores",
}

# The view of each mask made here, None until somebody asks: all layers of a forward share one mask. A mask
# made elsewhere might be changed in place between two forwards, so every layer reads it anew.
_views = WeakTensorKeyDictionary()


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """A boolean (B, 1, Q, K) mask, or None where causality (or nothing) restricts the view.

    None means that the queries are the last of the keys. A static cache has unused slots behind the last
    query, and there the mask is always spelt out.
    """
    last = q_length == kv_length or (
        q_length == 1 and isinstance(q_offset, int) and q_offset + 1 == kv_offset + kv_length
    )
    skip = (allow_is_causal_skip and last) or options.get("allow_is_bidirectional_skip", False)
    if skip and options.get("attention_mask") is None and options.get("local_size") is None:
        return None  # sdpa_mask comes to the same, except that it never skips in a compiled graph
    made = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        allow_is_causal_skip=allow_is_causal_skip and last,
        **options,
    )
    if made is not None and not torch.compiler.is_compiling():
        _views[made] = None
    return made


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Mix by the module's own mixer; (B, Q, H, D) and the weights where they are asked for."""
    mixer = _mixer(module, query, value)
    _refuse_unknown_terms(module, options)
    scale = mixer.geometry.head_dim**-0.5 if scaling is None else _number(module, scaling)
    if scale != mixer.geometry.scale:
        mixer.geometry = dataclasses.replace(mixer.geometry, scale=scale)
    causal = is_causal(module, options)
    cache, past = getattr(module, "langevin_cache", None), None
    used = _keys_in_use(cache, module, mixer, key.shape[2])
    if used < key.shape[2]:
        key, value = key[:, :, :used], value[:, :, :used]
    view = view_of(attention_mask, query.shape[0], query.shape[2], used, causal, query.device, options)
    if mixer.mechanism.needs_past_queries and causal and cache is not None:
        past = _past_queries(cache, module, mixer, query, used)
    out = mixer(query, key, value, view, past, dropout if mixer.mechanism.has_dropout else 0.0)
    weights = None
    if getattr(module, "langevin_weights", False) or options.get("output_attentions"):
        p = mixer.scalars.as_dict()
        x = Inputs(query, key, value, view, p, mixer.geometry, past)
        weights = mixer.mechanism.weights(x).to(query.dtype)
    return out.transpose(1, 2).contiguous(), weights


def is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether the module looks back only: as the call says, else the model's config, else the module."""
    configured = getattr(getattr(module, "config", None), "is_causal", None)
    for said in (options.get("is_causal"), configured, getattr(module, "is_causal", None)):
        if said is not None:
            return bool(said)
    return True


def view_of(
    attention_mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    causal: bool,
    device: torch.device,
    options: dict[str, Any],
) -> View:
    """The view a mask shows (its first `keys` keys), or the plain one where there is none."""
    if attention_mask is None:
        documents = options.get("cu_seq_lens_q")
        if documents is not None and documents.numel() > 2:
            raise UsageError(
                "packed documents came as cu_seq_lens without a mask",
                "Pass position_ids that start anew at every document, and attention_mask=None.",
            )
        window = options.get("sliding_window") if causal else None
        window = window if window is not None and window < keys else None
        return View.of(queries, keys, causal=causal, device=device, window=window)
    known = not torch.compiler.is_compiling() and attention_mask in _views
    if known and _views[attention_mask] is not None:
        return _views[attention_mask]
    seen = _boolean(attention_mask)[..., :keys]
    if seen.ndim != 4 or seen.shape[1] != 1 or seen.shape[2:] != (queries, keys):
        raise UsageError(
            f"the attention mask has shape {tuple(attention_mask.shape)}, "
            f"expected (batch, 1, {queries}, {keys})",
            "Pass a (batch, tokens) mask of real tokens, or position_ids for packed documents.",
        )
    view = View.from_mask(seen[:, 0].expand(batch, queries, keys), causal=causal)
    if known:
        _views[attention_mask] = view
    return view


def ask(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model runs: tell its attention modules whether weights are wanted (not every model does)."""
    only_ours(model.config._attn_implementation)
    wanted = kwargs.get("output_attentions")
    wanted = bool(model.config.output_attentions if wanted is None else wanted)
    if wanted != getattr(model, "langevin_weights", False):
        for module in model.modules():
            if module is model or hasattr(module, "langevin"):
                module.langevin_weights = wanted


def remember(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before an attention module runs: keep the cache, of which its attention function is not told."""
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    module.langevin_cache = cache


def forget(module: Any, args: tuple[Any, ...], output: Any) -> None:
    """After it has run, or failed: let go of the cache."""
    module.langevin_cache = None


def _keys_in_use(cache: Any, module: Any, mixer: QKV, keys: int) -> int:
    """The keys up to the last query: all of them, less the unused slots of a static cache."""
    index = getattr(module, "layer_idx", None)
    if cache is None or index is None or index >= len(cache.layers):
        return keys
    layer = cache.layers[index]
    if isinstance(layer, DynamicLayer):
        return keys
    if not torch.compiler.is_compiling():
        return min(int(layer.get_seq_length()), keys)
    softmax = isinstance(mixer.mechanism, SoftmaxMechanism)  # alibi is then a bias on keys alone
    if getattr(mixer.mechanism, "decay", 0.0) or (mixer.geometry.alibi and not softmax):
        raise UsageError(
            "a compiled graph cannot tell how far a query is from the keys of a static cache",
            f"Decode {mixer.spec} without compiling, or with a DynamicCache.",
        )
    return keys


def _past_queries(cache: Any, module: Any, mixer: QKV, query: Tensor, keys: int) -> Tensor | None:
    """The K - Q queries before these ones.

    They live in a layer of their own behind the model's layers, so that whatever generation does to a cache
    (beams reordered, drafts cropped, batches selected) happens to them too.
    """
    layers, place = cache.layers, mixer.geometry.layer
    own = layers[module.layer_idx]
    if not isinstance(own, DynamicLayer):
        raise UsageError(
            f"{mixer.spec.mixer.name} normalises by past queries, which a {type(cache).__name__} of "
            f"{type(own).__name__} has no room for",
            "Decode with a DynamicCache, the default.",
        )
    if not hasattr(cache, "langevin_queries"):
        cache.langevin_queries = {}
        if getattr(cache, "layer_class_to_replicate", None) is not None:
            while len(layers) < mixer.geometry.depth:  # layers made on demand come first
                layers.append(cache.layer_class_to_replicate())
    if place not in cache.langevin_queries:
        cache.langevin_queries[place] = len(layers)
        layers.append(DynamicLayer())
    every, _ = layers[cache.langevin_queries[place]].update(query, query[..., :0])
    past, wanted = every.shape[-2] - query.shape[-2], keys - query.shape[-2]
    return every[..., max(0, past - wanted) : past, :] if wanted else None


def _mixer(module: nn.Module, query: Tensor, value: Tensor) -> QKV:
    mixer = getattr(module, "langevin", None)
    if not isinstance(mixer, QKV):
        raise UsageError(
            f"{type(module).__name__} asks for langevin attention but was not converted",
            "Convert the model: langevin.convert(model, spec).",
        )
    came = (query.shape[1], query.shape[3], value.shape[3])
    if came != (mixer.geometry.heads, mixer.geometry.head_dim, mixer.geometry.head_dim):
        raise UsageError(
            f"{type(module).__name__} mixes {came[0]} heads of width {came[1]} (values {came[2]}), "
            f"expected {mixer.geometry.heads} of {mixer.geometry.head_dim}",
            "langevin.convert supports heads of one width, as the model's config names them.",
        )
    return mixer


def _refuse_unknown_terms(module: nn.Module, options: dict[str, Any]) -> None:
    for name, meaning in _UNKNOWN_TERMS.items():
        if options.get(name) is not None:
            raise UsageError(
                f"{type(module).__name__} {meaning}, which the mixers do not have",
                "Choose a model without it: leaving it out would change what the model computes.",
            )


def _number(module: nn.Module, scaling: float) -> float:
    if isinstance(scaling, Tensor):
        raise UsageError(
            f"{type(module).__name__} scales its scores by a tensor", "A plain number is supported."
        )
    return scaling


def _boolean(attention_mask: Tensor) -> Tensor:
    """True where a key is seen. Additive masks may hold 0 and large negative numbers only."""
    if attention_mask.dtype == torch.bool:
        return attention_mask
    seen = attention_mask == 0
    if torch.compiler.is_compiling() or not bool((seen | (attention_mask <= _HIDDEN)).all()):
        raise UsageError(
            "the attention mask adds numbers to scores",
            "Pass a boolean mask; a bias on scores has no meaning for every mixer.",
        )
    return seen


def call_ours(config: PreTrainedConfig) -> None:
    """Let the modules of this config call `attention`."""
    config._attn_implementation_internal = NAME
    checks = getattr(type(config), "__class_validators__", [])
    checks[:] = [_granting(check) if check is _WEIGHTS_CHECK else check for check in checks]


def only_ours(attn_implementation: str | dict[str, str] | None, *args: Any, **kwargs: Any) -> None:
    """In the place of set_attn_implementation, which would bring softmax back without a word."""
    asked = attn_implementation
    if set(asked.values() if isinstance(asked, dict) else [asked]) != {NAME}:
        raise UsageError(
            f"attn_implementation={asked!r} does not compute the mixers of a converted model",
            'For plain attention convert the model to "softmax".',
        )


def _granting(check: Callable[..., None]) -> Callable[..., None]:
    """A check of transformers' that lets eager attention alone return weights: ours returns them too."""

    @functools.wraps(check)
    def checked(config: PreTrainedConfig, *value: bool) -> None:
        if config._attn_implementation != NAME:
            check(config, *value)
        elif value:
            config._output_attentions = value[0]

    return checked


_WEIGHTS_CHECK: Any = PreTrainedConfig.validate_output_attentions
_WEIGHTS: Any = PreTrainedConfig.output_attentions
PreTrainedConfig.output_attentions = _WEIGHTS.setter(_granting(_WEIGHTS.fset))
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
