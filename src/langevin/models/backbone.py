"""One pre-norm transformer for every mixer, as a transformers model.

    x <- x + attention(norm(x))
    x <- x + mlp(norm(x))

B batch, L tokens, W width, H heads, D head width, V vocabulary. The attention modules are those of a
converted model, so generation, caches, padding and packed documents (position_ids that start anew) work
the same way here and there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from langevin.errors import UsageError
from langevin.mixers.attention import QKV, rotary, turn
from langevin.mixers.mechanism import Geometry, Mechanism
from langevin.models import convert_attention
from langevin.models.config import LangevinConfig
from langevin.models.convert_neighbor import NeighborAttention


@library.custom_op("langevin::angles", mutates_args=())
def angles(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rotary`, closed to the compiler: it would work out every cosine again in every layer."""
    return rotary(positions, width, dtype)


@angles.register_fake
def _(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rotary(positions, width, dtype)


def norm_of(config: LangevinConfig, width: int) -> nn.Module:
    return nn.LayerNorm(width) if config.norm == "layernorm" else nn.RMSNorm(width, eps=1e-6)


class LangevinAttention(nn.Module):
    """q, k, v projections, positions, the layer's mixer, the output projection."""

    def __init__(self, config: LangevinConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer, config.causal
        heads = config.num_attention_heads
        kv_heads = config.num_key_value_heads or heads
        if heads % kv_heads:
            raise UsageError(f"{kv_heads} key heads do not divide {heads} query heads")
        width, self.head_dim = config.hidden_size, config.hidden_size // heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6) if config.qk_norm else nn.Identity()
        length = config.max_position_embeddings
        depth, alibi = config.num_hidden_layers, config.positions == "alibi"
        geometry = Geometry(heads, self.head_dim, kv_heads, layer, depth, length, alibi=alibi)
        self.langevin = QKV(config.mixers[layer], geometry)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        B, L, _ = hidden_states.shape
        shape = (B, L, -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if rotation is not None:
            q, k = turn(q, *rotation), turn(k, *rotation)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        self.langevin_cache = past_key_values
        try:
            y, weights = convert_attention.attention(self, q, k, v, attention_mask, **options)
        finally:
            self.langevin_cache = None
        return self.o_proj(y.flatten(-2)), weights


class MLP(nn.Module):
    """W₂ GELU(W₁ x), or W₂ (SiLU(W₁ x) ⊙ W₃ x) with 2/3 of the width, for as many parameters."""

    def __init__(self, config: LangevinConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        width = config.hidden_size
        inner = config.intermediate_size or (8 * width // 3 if self.gated else 4 * width)
        self.up = nn.Linear(width, inner)
        self.gate = nn.Linear(width, inner) if self.gated else None
        self.down = nn.Linear(inner, width)

    def forward(self, x_BLW: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x_BLW)) * self.up(x_BLW))
        return self.down(F.gelu(self.up(x_BLW)))


class LangevinBlock(GradientCheckpointingLayer):
    def __init__(self, config: LangevinConfig, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm_of(config, config.hidden_size), norm_of(config, config.hidden_size)
        self.attention = _mixing(config, layer)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLW: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        mixed, weights = self.attention(hidden_states=self.norm1(x_BLW), **options)
        x_BLW = x_BLW + self.dropout(mixed)
        return x_BLW + self.dropout(self.mlp(self.norm2(x_BLW))), weights


def _mixing(config: LangevinConfig, layer: int) -> nn.Module:
    spec = config.mixers[layer]
    if isinstance(spec.mixer, Mechanism):
        return LangevinAttention(config, layer)
    mixer = spec.mixer.module(
        spec,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        causal=config.causal,
        layer=layer,
        depth=config.num_hidden_layers,
        max_length=config.max_position_embeddings,
    )
    return NeighborAttention(mixer, config, layer, ("hidden_states",))


class LangevinPreTrainedModel(PreTrainedModel):
    config_class = LangevinConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("LangevinBlock",)
    _skip_keys_device_placement = ("past_key_values",)
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = ("scalars",)

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, LangevinBlock):  # branches add up over 2 · depth residual additions
            small = std / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.mlp.down.weight, mean=0.0, std=small)
            if isinstance(module.attention, LangevinAttention):
                init.normal_(module.attention.o_proj.weight, mean=0.0, std=small)


class LangevinModel(LangevinPreTrainedModel):
    """Embeddings, blocks and a last norm."""

    def __init__(self, config: LangevinConfig) -> None:
        super().__init__(config)
        config._attn_implementation_internal = convert_attention.NAME
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(LangevinBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm_of(config, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.embed = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None and self.config.causal:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        mask = None
        if not (attention_mask is None and position_ids is None and past_key_values is None):
            mask = self._mask(x, attention_mask, position_ids, past_key_values)
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        rotation = self._rotation(position_ids, x.dtype)
        x = self.dropout(self._placed(x, position_ids, past))
        weights: list[Tensor | None] = []
        states = [x]
        for block in self.blocks:
            x, w = block(
                x,
                attention_mask=mask,
                past_key_values=past_key_values,
                rotation=rotation,
                output_attentions=output_attentions,
            )
            weights.append(w)
            states.append(x)
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(x),
            past_key_values=past_key_values,
            hidden_states=tuple(states) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
        )

    def _mask(
        self, x: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past: Cache | None
    ) -> Tensor | None:
        """What transformers makes of padding, packed documents and caches; a plain batch needs none."""
        if not self.config.causal:
            return create_bidirectional_mask(
                config=self.config, inputs_embeds=x, attention_mask=attention_mask, past_key_values=past
            )
        if position_ids is None:
            length = past.get_seq_length() if past is not None else 0
            position_ids = torch.arange(length, length + x.shape[1], device=x.device)[None]
        return create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past,
            position_ids=position_ids,
        )

    def _rotation(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope":
            return None
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        cos, sin = (angles if compiling else rotary)(position_ids, head_dim, dtype)
        return cos[:, None], sin[:, None]

    def _placed(self, x_BLW: Tensor, position_ids: Tensor, past: int) -> Tensor:
        """x with its absolute positions added, where the model has such."""
        if self.places is not None:
            limit = self.config.max_position_embeddings
            if past + x_BLW.shape[1] > limit and not torch.compiler.is_compiling():
                raise UsageError(
                    f"{past + x_BLW.shape[1]} tokens came to a model with {limit} learned positions",
                    "Shorten the input, or train with rope, alibi, sinusoidal or no positions.",
                )
            return x_BLW + self.places(position_ids)
        if self.config.positions == "sinusoidal":
            cos, sin = rotary(position_ids, x_BLW.shape[-1] + x_BLW.shape[-1] % 2, x_BLW.dtype)
            code = torch.cat([sin, cos], -1)[..., : x_BLW.shape[-1]]
            return x_BLW + self.config.initializer_range * code.to(x_BLW.dtype)
        return x_BLW


class LangevinForCausalLM(LangevinPreTrainedModel, GenerationMixin):
    """The model with a head that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012

    def __init__(self, config: LangevinConfig) -> None:
        super().__init__(config)
        if not config.causal:
            raise UsageError("a causal language model needs causal=True")
        self.model = LangevinModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: Any) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, V). labels are the tokens themselves, -100 where none counts; they are shifted
        once, by transformers' own loss, to which its Trainer tells how many count in all parts."""
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **options,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **options)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


AutoConfig.register("langevin", LangevinConfig, exist_ok=True)
AutoModel.register(LangevinConfig, LangevinModel, exist_ok=True)
AutoModelForCausalLM.register(LangevinConfig, LangevinForCausalLM, exist_ok=True)
