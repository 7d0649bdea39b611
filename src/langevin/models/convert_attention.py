"""The attention function a converted transformers model calls, and the mask it is called with.

B batch, H heads, Q queries, K keys (cached ones included), D head width.

transformers hands an attention function projected q, k, v and a mask built beforehand. The function and the
builder of masks are looked up by one name: without a builder of that name a model passes no mask at all.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import sdpa_mask

from langevin.errors import UsageError
from langevin.kernels.view import View
from langevin.models.attention import QKV, visible
from langevin.models.cache import StateLayer

NAME = "langevin"
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
    for name, meaning in _UNKNOWN_TERMS.items():
        if options.get(name) is not None:
            raise UsageError(
                f"{type(module).__name__} {meaning}, which the mixers do not have",
                "Choose a model without it: leaving it out would change what the model computes.",
            )
    if isinstance(scaling, Tensor):
        raise UsageError(
            f"{type(module).__name__} scales its scores by a tensor", "A plain number is supported."
        )
    scale = mixer.geometry.head_dim**-0.5 if scaling is None else scaling
    if scale != mixer.geometry.scale:
        mixer.geometry = dataclasses.replace(mixer.geometry, scale=scale)
    layer = getattr(module, "langevin_layer", None)
    own = layer if isinstance(layer, StateLayer) else None
    Q, K = query.shape[2], key.shape[2] if own is None else own.get_mask_sizes(query.shape[2])[0]
    view = view_of(attention_mask, query, K, _past(layer, Q, K), is_causal(module, options), options)
    weights = bool(getattr(module, "langevin_weights", False) or options.get("output_attentions"))
    dropout = dropout if mixer.mechanism.has_dropout else 0.0
    out, w = mixer(query, key, value, view, own, dropout, weights)
    return out.transpose(1, 2).contiguous(), w


def is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether the module looks back only: as the call says, else the model's config, else the module."""
    configured = getattr(getattr(module, "config", None), "is_causal", None)
    own = getattr(module, "is_causal", getattr(module, "causal", None))
    for said in (options.get("is_causal"), configured, own):
        if said is not None:
            return bool(said)
    return True


def view_of(
    attention_mask: Tensor | None,
    query: Tensor,
    keys: int,
    past: int | Tensor | None,
    causal: bool,
    options: dict[str, Any],
) -> View:
    """The view that a mask shows to queries (B, ..., tokens, width); the plain one where there is none."""
    B, Q = query.shape[0], query.shape[-2]
    if attention_mask is None:
        documents = options.get("cu_seq_lens_q")
        if documents is not None and documents.numel() > 2:
            raise UsageError(
                "packed documents came as cu_seq_lens without a mask",
                "Pass position_ids that start anew at every document, and attention_mask=None.",
            )
        window = options.get("sliding_window") if causal else None
        return View.of(Q, keys, causal=causal, device=query.device, window=window, past=past)
    known = not torch.compiler.is_compiling() and attention_mask in _views
    if known and _views[attention_mask] is not None:
        return _views[attention_mask]
    view = View.from_mask(visible(attention_mask, B, Q, keys), causal=causal, past=past)
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
    """Before an attention module runs: find its layer of the cache, of which its attention function is not
    told, and let the mixer have one of its own kind where it needs that."""
    cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, Cache)), None)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    index = getattr(module, "layer_idx", None)
    if cache is None or index is None:
        return
    config = module.config
    window = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    window = window or getattr(config, "attention_chunk_size", None)
    weights = getattr(module, "langevin_weights", False) or kwargs.get("output_attentions")
    module.langevin.own_layer(cache, index, bool(window or weights))
    module.langevin_layer = cache.layers[index] if index < len(cache.layers) else None


def forget(module: Any, args: tuple[Any, ...], output: Any) -> None:
    """After it has run, or failed: let go of the cache."""
    module.langevin_layer = None


def _past(layer: Any, queries: int, keys: int) -> int | Tensor | None:
    """The keys before the queries, where a static cache has unused ones behind them."""
    if getattr(layer, "max_cache_len", None) is None:
        return None
    length = layer.get_seq_length()  # a state is stored after the mixing, keys and values before
    if isinstance(layer, StateLayer):
        return length
    return length - queries if isinstance(length, Tensor) else min(length, keys) - queries


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
