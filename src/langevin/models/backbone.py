"""One pre-norm transformer for every mixer, as a transformers model.

    x <- x + attention(norm(x))
    x <- x + mlp(norm(x))

B batch, L tokens, K keys (cached ones included), W width, V vocabulary. Who sees whom is one view for all
layers, made of attention_mask (padding) and position_ids (packed documents, which start anew).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from langevin.errors import UsageError, WorkError
from langevin.kernels.view import View, readable, wide
from langevin.mixers import build
from langevin.mixers.mechanism import Mechanism, Scalars
from langevin.models.attention import Attention, Rotation, angles, rotary, visible
from langevin.models.cache import extent
from langevin.models.config import LangevinConfig
from langevin.models.ngrams import NGrams


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
    spec, options = config.mixers[layer], {}
    if isinstance(spec.mixer, Mechanism):
        placed = config.positions if config.positions in ("rope", "alibi") else "none"
        options = {"kv_heads": config.num_key_value_heads, "positions": placed, "qk_norm": config.qk_norm}
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
            raise WorkError(
                f"{args[0]} has {len(missing)} missing keys, the first being {min(missing)}",
                "Load it with the settings it was saved with, or save it again.",
            )
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Scalars):
            for name, value in module.start().items():
                init.copy_(getattr(module, name), value)
        elif isinstance(module, Feedback):
            init.zeros_(module.weight)
        elif isinstance(module, Readout):
            init.zeros_(module.direction)
            init.ones_(module.share)
        elif isinstance(module, NGrams):
            for weight in module.parameters():
                init.zeros_(weight)
        elif isinstance(module, LangevinBlock):  # branches add up over 2 · depth residual additions
            small = self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers)
            init.normal_(module.mlp.down.weight, mean=0.0, std=small)
            if isinstance(module.attention, Attention):
                init.normal_(module.attention.o_proj.weight, mean=0.0, std=small)


class LangevinModel(LangevinPreTrainedModel):
    """Embeddings, blocks and a last norm."""

    def __init__(self, config: LangevinConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
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
        cos, sin = (angles if compiling else rotary)(position_ids, head_dim, dtype)
        return cos[:, None], sin[:, None]

    def _placed(self, x_BLW: Tensor, position_ids: Tensor, keys: int) -> Tensor:
        """x with its absolute positions added, where the model has such."""
        if self.places is not None:
            limit = self.config.max_position_embeddings
            if keys > limit and readable(position_ids) and int(position_ids.max()) >= limit:
                raise UsageError(
                    f"position {int(position_ids.max())} came to a model with {limit} learned positions",
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

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None, past_key_values: Cache, **options: Any
    ) -> Tensor | None:
        """The mask that `generate` passes with a static cache: as wide as the cache, whatever the step."""
        if attention_mask is None:
            return None
        unused = past_key_values.layers[0].max_cache_len - attention_mask.shape[1]
        return F.pad(attention_mask.bool(), (0, unused))

    @can_return_tuple
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
            return_dict=True,
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


class Feedback(nn.Linear):
    """W of E[MASK] + W Σ_j p_j E[v_j]: zero at first, when candidates count for nothing."""


class Readout(nn.Module):
    """h_i = Σ_j softmax_j( r·h_ij + s ln p_ij ) h_ij: one vector of the k candidates of a position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.zeros(width))
        self.share = nn.Parameter(torch.ones(1))

    def forward(self, h_BLKW: Tensor, log_p_BLK: Tensor) -> Tensor:
        score_BLK = (h_BLKW * self.direction).sum(-1) + self.share * log_p_BLK
        return (score_BLK.softmax(-1)[..., None] * h_BLKW).sum(-2).to(h_BLKW.dtype)


class LangevinForMaskedLM(LangevinPreTrainedModel):
    """The model with a head that predicts tokens from both sides. Its last id is the mask, which it reads
    and for which it has no logit.

    Positions may hold K candidates v_j with probabilities p_j, by config.candidates:

        none    a token or the mask
        soft    a masked position reads   E[MASK] + W Σ_j p_j E[v_j]   (E is not trained by this)
        full    every position is K inputs   E[MASK] + a_j (E[v_j] - E[MASK]),   a_j = ln(V p_j) / ln V,
                which share its place; all see all, and a learned readout makes one prediction of them.
                At probability 1/V a candidate is a mask, at 1 it is its token
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012

    def __init__(self, config: LangevinConfig) -> None:
        if config.mask_token_id is None:
            config.mask_token_id = config.vocab_size - 1
        super().__init__(config)
        if config.causal:
            raise UsageError("a masked language model needs causal=False")
        if config.mask_token_id != config.vocab_size - 1:
            raise UsageError(
                f"the mask is token {config.mask_token_id} of {config.vocab_size}, not the last one",
                "Leave mask_token_id out.",
            )
        self.model = LangevinModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.candidates == "soft":
            self.feedback = Feedback(config.hidden_size, config.hidden_size, bias=False)
        elif config.candidates == "full":
            self.readout = Readout(config.hidden_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        masked: Tensor | None = None,
        candidates: Tensor | None = None,
        probabilities: Tensor | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> MaskedLMOutput:
        """Logits (B, L, V) over all tokens but the mask, or of so many last tokens; masked (B, L) says
        which tokens are hidden behind it. Tokens see each other and those of a cache. candidates and their
        probabilities are (B, L, K); those of a full state take the place of input_ids, those of a soft one
        count where there is a mask."""
        if masked is not None and input_ids is not None:
            input_ids = torch.where(masked, self.config.vocab_size - 1, input_ids)
        if self.config.candidates == "full":
            out, h_BLW = self._all_candidates(candidates, probabilities, **options)
        else:
            if candidates is not None:
                options["inputs_embeds"] = self._with_feedback(input_ids, candidates, probabilities)
                input_ids = None
            out = self.model(input_ids=input_ids, return_dict=True, **options)
            h_BLW = out.last_hidden_state
        logits = F.linear(h_BLW[:, -logits_to_keep:], self.lm_head.weight[:-1])
        return MaskedLMOutput(logits=logits, hidden_states=out.hidden_states, attentions=out.attentions)

    def _with_feedback(self, ids_BL: Any, candidates_BLK: Tensor, p_BLK: Any) -> Tensor:
        table = self.model.embed.weight.detach()
        p_BLK = torch.where((ids_BL == self.config.vocab_size - 1)[..., None], p_BLK, 0.0).to(table.dtype)
        mean_BLW = (p_BLK[..., None] * F.embedding(candidates_BLK, table)).sum(-2)
        return self.model.embed(ids_BL) + self.feedback(mean_BLW)

    def _all_candidates(
        self,
        candidates_BLK: Any,
        p_BLK: Any,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[BaseModelOutputWithPast, Tensor]:
        mask, K = self.config.vocab_size - 1, candidates_BLK.shape[-1]
        log_p_BLK = p_BLK.log()
        hidden_W = self.model.embed.weight[mask]
        evidence = (1 + log_p_BLK / math.log(mask)).to(hidden_W.dtype)[..., None]
        x_BLKW = hidden_W + evidence * (self.model.embed(candidates_BLK) - hidden_W)
        if position_ids is not None:
            slot = torch.arange(K, device=position_ids.device)
            position_ids = (position_ids[..., None] * K + slot).flatten(1)
        if attention_mask is not None:
            attention_mask = attention_mask.repeat_interleave(K, 1)
        out = self.model(
            inputs_embeds=x_BLKW.flatten(1, 2),
            position_ids=position_ids,
            attention_mask=attention_mask,
            slots=K,
            return_dict=True,
            **options,
        )
        return out, self.readout(out.last_hidden_state.unflatten(1, (-1, K)), log_p_BLK)


class LangevinForSequenceClassification(LangevinPreTrainedModel):
    """The model with a head that says which class a text is of, from one vector of its tokens:

        mean        Σ_i h_i / n
        attention   Σ_i softmax_i(a·h_i) h_i
        last        h_n

    over its n real tokens; ngrams: from none, by a linear model of tokens and pairs of them (`NGrams`).
    Padding may stand at either side; a text of nothing is the zero vector.
    """

    def __init__(self, config: LangevinConfig) -> None:
        super().__init__(config)
        if config.pooling == "ngrams":
            self.model: NGrams | LangevinModel = NGrams(config.vocab_size, config.num_labels)
        else:
            self.model = LangevinModel(config)
            if config.pooling == "attention":
                self.attend = nn.Linear(config.hidden_size, 1, bias=False)
            self.dropout = nn.Dropout(config.dropout)
            self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        temperature: float | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput:
        """Logits (B, C) in float32 or better; outside training divided by the temperature, which is the
        config's unless given, so that their softmax is calibrated. labels (B,) give a loss of undivided
        ones."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        real = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
        if attention_mask is not None:
            real = attention_mask.bool()
            if not (self.training or torch.compiler.is_exporting()):  # tokens first, then padding
                order = real.logical_not().byte().argsort(dim=1, stable=True)
                real, given = real.gather(1, order), given[torch.arange(len(order))[:, None], order]
        if isinstance(self.model, NGrams):
            if inputs_embeds is not None or options.get("output_attentions"):
                raise UsageError("a bag of n-grams reads tokens, and has no attention weights")
            out, logits = BaseModelOutputWithPast(), self.model(given, real)
        else:
            out = self.model(
                **{"input_ids" if inputs_embeds is None else "inputs_embeds": given},
                attention_mask=None if attention_mask is None else real,
                **{**options, "use_cache": False, "return_dict": True},
            )
            logits = self.score(self.dropout(self._pooled(out.last_hidden_state, real)))
        logits = logits.to(wide(logits.dtype))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if not self.training:
            logits = logits / (self.config.temperature if temperature is None else temperature)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions
        )

    def _pooled(self, h_BLW: Tensor, real_BL: Tensor) -> Tensor:
        h_BLW = torch.where(real_BL[..., None], h_BLW, 0.0)
        if self.config.pooling == "last":
            last_B = (real_BL * torch.arange(h_BLW.shape[1], device=h_BLW.device)).argmax(1)
            return h_BLW.gather(1, last_B[:, None, None].expand(-1, 1, h_BLW.shape[2]))[:, 0]
        share_BL = real_BL.to(wide(h_BLW.dtype))
        if self.config.pooling == "attention":
            a_BL = self.attend(h_BLW)[..., 0].to(share_BL.dtype)
            a_BL = torch.where(real_BL, a_BL, torch.finfo(a_BL.dtype).min)
            share_BL = share_BL * (a_BL - a_BL.amax(1, keepdim=True)).exp()
        total_BW = (share_BL[..., None] * h_BLW).sum(1)
        return (total_BW / share_BL.sum(1, keepdim=True).clamp_min(1.0)).to(h_BLW.dtype)


AutoModel.register(LangevinConfig, LangevinModel, exist_ok=True)
AutoModelForCausalLM.register(LangevinConfig, LangevinForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(LangevinConfig, LangevinForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    LangevinConfig, LangevinForSequenceClassification, exist_ok=True
)
