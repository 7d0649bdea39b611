"""One pre-norm transformer for every mixer, as a transformers model.

    x <- x + attention(norm(x))
    x <- x + mlp(norm(x))

B batch, L tokens, K keys (cached ones included), W width. Who sees whom is one view for all layers, made
of attention_mask (padding) and position_ids (packed documents, which start anew).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from langevin.errors import MissingWeights, UsageError
from langevin.kernels.view import View, readable
from langevin.mixers import build
from langevin.mixers.mechanism import Mechanism, Scalars
from langevin.mixers.neighbor import Content, Gates, Recurrent
from langevin.models.attention import ROPE_BASE, Rotation, angles, planar, rotary, visible
from langevin.models.cache import extent
from langevin.models.config import LangevinConfig
from langevin.models.ngrams import NGrams
from langevin.models.patches import Convolution, Patches


def norm_of(config: LangevinConfig, width: int) -> nn.Module:
    return nn.LayerNorm(width) if config.norm == "layernorm" else nn.RMSNorm(width, eps=1e-6)


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
        self.attention = mixing(config, layer)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BLW: Tensor, return_weights: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
        mixed = self.attention(self.norm1(x_BLW), return_weights=return_weights, **options)
        mixed, weights = mixed if return_weights else (mixed, None)
        x_BLW = x_BLW + self.dropout(mixed)
        return x_BLW + self.dropout(self.mlp(self.norm2(x_BLW))), weights


def mixing(config: LangevinConfig, layer: int) -> Any:
    """The layer's mixer in its place."""
    spec = config.mixers[layer]
    options: dict[str, Any] = {}
    if isinstance(spec.mixer, Mechanism):
        placed = config.positions if config.positions in ("rope", "alibi") else "none"
        options = {"kv_heads": config.num_key_value_heads, "positions": placed, "qk_norm": config.qk_norm}
    elif config.grid is not None and getattr(spec.mixer, "has_grid", False):
        options = {"grid": config.grid}
    return build(
        spec,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        causal=config.causal,
        layer=layer,
        depth=config.num_hidden_layers,
        max_length=config.max_position_embeddings,
        **options,
    )


class Feedback(nn.Linear):
    """W of what a position carries from the call before: zero at first, when that counts for nothing."""


class Readout(nn.Module):
    """h_i = Σ_j softmax_j( r·h_ij + s ln p_ij ) h_ij: one vector of the k candidates of a position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.zeros(width))
        self.share = nn.Parameter(torch.ones(1))

    def forward(self, h_BLKW: Tensor, log_p_BLK: Tensor) -> Tensor:
        score_BLK = (h_BLKW * self.direction).sum(-1) + self.share * log_p_BLK
        return (score_BLK.softmax(-1)[..., None] * h_BLKW).sum(-2).to(h_BLKW.dtype)


class LangevinPreTrainedModel(PreTrainedModel):
    config_class = LangevinConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embed"
    _no_split_modules = ("LangevinBlock",)
    _skip_keys_device_placement = ("past_key_values",)
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def __init__(self, config: LangevinConfig) -> None:
        super().__init__(config)
        # Drafts cannot be taken back from a state of constant size.
        self._is_stateful = any(getattr(s.mixer, "recurrent", True) for s in config.mixers)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers does it, but weights of the model itself must be there. Learned scalars that are
        not start as in a new model, so that weights of one mixer may begin another."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = [k for k in info["missing_keys"] if ".blocks." in f".{k}" and ".scalars." not in k]
        if missing and "state_dict" not in kwargs:
            raise MissingWeights(
                f"{args[0]} has {len(missing)} missing keys, the first being {min(missing)}",
                "Load it with the settings it was saved with, or save it again.",
            )
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Scalars | Content | Gates | Recurrent):
            for name, value in module.start().items():
                init.copy_(getattr(module, name), value)
        elif isinstance(module, Readout):
            init.zeros_(module.direction)
            init.ones_(module.share)
        elif isinstance(module, Feedback | NGrams):
            for weight in module.parameters():
                init.zeros_(weight)
        elif isinstance(module, Convolution):
            module.start()
        elif isinstance(module, Patches) and module.token is not None:
            init.zeros_(module.token)


class LangevinModel(LangevinPreTrainedModel):
    """Embeddings, blocks and a last norm."""

    def __init__(self, config: LangevinConfig) -> None:
        super().__init__(config)
        tokens = config.grid is None
        self.embed: Any
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if tokens else Patches(config)
        learned = config.positions == "learned" and tokens
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(LangevinBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm_of(config, config.hidden_size)
        self.gradient_checkpointing = False
        if any(".scalars." in name for name, _ in self.named_parameters()):
            self._keep_in_fp32_modules_strict = ("scalars",)
        self.post_init()

    @can_return_tuple
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
        slots: int = 1,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        """So many neighbours (slots) share a place; position_ids count slots."""
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        weighed = config.output_attentions if output_attentions is None else output_attentions
        shown = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        view = self._view(x, attention_mask, position_ids, past_key_values, weighed)
        recomputes = self.training and self.gradient_checkpointing  # a cache would hear tokens twice
        if past_key_values is None and config.causal and not recomputes:
            # Nobody goes on from packed documents unless they ask for it.
            text = view.starts_BQ is None and view.dense_BQK is None
            if config.use_cache and text if use_cache is None else use_cache:
                past_key_values = DynamicCache(config=config)
        if past_key_values is not None and view.starts_BQ is not None and readable(x):
            raise UsageError(
                "packed documents came with a cache, from which only one text can go on",
                "Pass use_cache=False, or each document as a row of its own.",
            )
        if position_ids is None:
            position_ids = (torch.arange(x.shape[1], device=x.device) + view.past)[None]
        if slots > 1:
            position_ids = position_ids // slots
        rotation = self._rotation(position_ids, x.dtype)
        x = self.dropout(self._placed(x, position_ids, view.keys))
        weights: list[Tensor | None] = []
        states = [x]
        for block in self.blocks:
            x, w = block(x, return_weights=weighed, view=view, cache=past_key_values, rotation=rotation)
            weights.append(w)
            states.append(x)
        states[-1] = x = self.norm(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=tuple(states) if shown else None,
            attentions=tuple(weights) if weighed else None,
        )

    def _view(
        self,
        x_BLW: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        whole: bool,
    ) -> View:
        """attention_mask is (B, K), True at real tokens, or (B or 1, 1, L, K), True where a query sees a
        key. position_ids tell documents apart as long as the cache is empty."""
        B, L, _ = x_BLW.shape
        past, keys = extent(cache, 0, L, whole)
        if attention_mask is not None and attention_mask.ndim == 4:
            seen = visible(attention_mask, len(attention_mask), L, keys)
            return View.from_mask(seen, causal=self.config.causal, past=past)
        real = None if attention_mask is None else attention_mask.bool()
        if real is not None and past is None and readable(real) and bool(real.all()):
            real = None
        first = keys == L if past is None else isinstance(past, int)
        return View.of(
            L,
            keys,
            causal=self.config.causal,
            device=x_BLW.device,
            key_padding_mask=real,
            position_ids=position_ids if first else None,
            past=past,
            batch=B,
        )

    def _rotation(self, position_ids: Tensor, dtype: torch.dtype) -> Rotation | None:
        if self.config.positions != "rope":
            return None
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        turned = angles if compiling else rotary
        if self.config.grid is not None:
            cos, sin = planar(position_ids, self.config.grid, head_dim, dtype, turned)
        else:
            cos, sin = turned(position_ids, head_dim, dtype, ROPE_BASE)
        return cos[:, None], sin[:, None]

    def _placed(self, x_BLW: Tensor, position_ids: Tensor, keys: int) -> Tensor:
        """x with its absolute positions added, where the model has such; patches have theirs already."""
        if self.places is not None:
            limit = self.config.max_position_embeddings
            if keys > limit and readable(position_ids) and int(position_ids.max()) >= limit:
                raise UsageError(
                    f"position {int(position_ids.max())} came to a model with {limit} learned positions",
                    "Shorten the input, or train with rope, alibi, sinusoidal or no positions.",
                )
            return x_BLW + self.places(position_ids)
        if self.config.positions == "sinusoidal" and self.config.grid is None:
            cos, sin = rotary(position_ids, x_BLW.shape[-1] + x_BLW.shape[-1] % 2, x_BLW.dtype)
            code = torch.cat([sin, cos], -1)[..., : x_BLW.shape[-1]]
            return x_BLW + self.config.initializer_range * code.to(x_BLW.dtype)
        return x_BLW


import langevin.models.heads  # noqa: E402, F401 - registers them all; transformers may want that at any import
