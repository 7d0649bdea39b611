"""What the backbone is put to: a head for the next token, for hidden tokens, and for classes.

B batch, L tokens, K candidates of a position, W width, V vocabulary, C classes.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GenerationMixin,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from langevin.errors import UsageError
from langevin.kernels.view import wide
from langevin.models.backbone import Feedback, LangevinModel, LangevinPreTrainedModel, Readout
from langevin.models.config import LangevinConfig
from langevin.models.ngrams import NGrams


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
        first       h_1
        last        h_n
        ends        GELU(W [h_1, h_n] + b)
        class       h_n of a learned token that stands behind an image

    over its n real tokens; ngrams: from none, by a linear model of tokens and pairs of them (`NGrams`).
    Padding may stand at either side; a text of nothing is the zero vector, or GELU(b).
    """

    def __init__(self, config: LangevinConfig) -> None:
        super().__init__(config)
        if config.pooling == "ngrams":
            self.model: NGrams | LangevinModel = NGrams(config.vocab_size, config.num_labels)
        else:
            self.model = LangevinModel(config)
            if config.pooling == "attention":
                self.attend = nn.Linear(config.hidden_size, 1, bias=False)
            if config.pooling == "ends":
                self.join = nn.Linear(2 * config.hidden_size, config.hidden_size)
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
        if given.shape[1] == 0:  # a text of nothing is one of padding
            given = given.new_zeros(len(given), 1, *given.shape[2:])
            attention_mask = given.new_zeros(given.shape[:2])
        real = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device)
        if attention_mask is not None:
            real = attention_mask.bool()
            if not (self.training or torch.compiler.is_exporting()):  # tokens first, then padding
                order = real.logical_not().byte().argsort(dim=1, stable=True)
                row = torch.arange(len(order), device=order.device)[:, None]
                real, given = real[row, order], given[row, order]
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
        pooling = self.config.pooling
        if pooling in ("first", "last", "ends", "class"):
            later_L = torch.arange(h_BLW.shape[1], device=h_BLW.device)
            ends = [real_BL.int().argmax(1), (real_BL * later_L).argmax(1)]  # the first of the largest
            places = ends if pooling == "ends" else [ends[0 if pooling == "first" else 1]]
            place_BN1 = torch.stack(places, 1)[..., None]
            h_BW = h_BLW.gather(1, place_BN1.expand(-1, -1, h_BLW.shape[2])).flatten(1)
            return F.gelu(self.join(h_BW)) if pooling == "ends" else h_BW
        share_BL = real_BL.to(wide(h_BLW.dtype))
        if pooling == "attention":
            a_BL = self.attend(h_BLW)[..., 0].to(share_BL.dtype)
            a_BL = torch.where(real_BL, a_BL, torch.finfo(a_BL.dtype).min)
            share_BL = share_BL * (a_BL - a_BL.amax(1, keepdim=True)).exp()
        total_BW = (share_BL[..., None] * h_BLW).sum(1)
        return (total_BW / share_BL.sum(1, keepdim=True).clamp_min(1.0)).to(h_BLW.dtype)


class LangevinForImageClassification(LangevinForSequenceClassification):
    """The same of an image: pixel_values (B, 3, side, side), bytes or numbers from 0 to 255."""

    main_input_name = "pixel_values"

    def forward(self, pixel_values: Tensor, **options: Any) -> SequenceClassifierOutput:
        side = self.config.image_size
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != (3, side, side):
            raise UsageError(
                f"pixel_values have shape {tuple(pixel_values.shape)}, expected (batch, 3, {side}, {side})",
                "Scale the images; the image processor saved with the model does so.",
            )
        return super().forward(inputs_embeds=self.model.embed(pixel_values), **options)


AutoModel.register(LangevinConfig, LangevinModel, exist_ok=True)
AutoModelForCausalLM.register(LangevinConfig, LangevinForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(LangevinConfig, LangevinForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    LangevinConfig, LangevinForSequenceClassification, exist_ok=True
)
AutoModelForImageClassification.register(LangevinConfig, LangevinForImageClassification, exist_ok=True)
