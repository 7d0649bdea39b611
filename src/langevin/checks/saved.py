"""A saved causal language model as a subject: token ids, or their embeddings, to logits.

B batch, L tokens. Padding is told by attention_mask, packed documents by position_ids that start anew.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from langevin.checks.layouts import layouts
from langevin.checks.subjects import Subject
from langevin.errors import UsageError

LEAST_POSITIONS = 10


def subject(path: Path) -> Subject:
    from langevin.models.convert import from_pretrained

    model = from_pretrained(path)
    if not hasattr(model, "generate") or model.config.is_encoder_decoder:
        raise UsageError(
            f"{path} holds a {type(model).__name__}, not a causal language model",
            "Save a model of the kind AutoModelForCausalLM loads.",
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 150
    if limit < LEAST_POSITIONS:
        raise UsageError(
            f"the model of {path} has only {limit} positions", f"{LEAST_POSITIONS} are needed."
        )
    module = CausalModel(model).eval()
    takes = {"documents"}
    without = [({name}, f"has the {name} it was saved with") for name in ("window", "kv_heads")]
    if "attention_mask" in module.accepted:
        takes.add("key_padding_mask")
    if module.past:
        takes.add("cache")
    if model._is_stateful:
        without.append(({"cache", "key_padding_mask"}, "keeps a state, which padding is part of"))
    without.append(({"documents", "cache"}, "tells packed documents apart only without a cache"))
    if model.config.model_type != "langevin" and not _keeps_documents_apart(module):
        without.append(({"documents"}, "takes position_ids that start anew for one document"))
    if not _keeps_documents_apart(module, masked=True):
        together = {"documents", "key_padding_mask"}
        without.append((together, "tells packed documents apart only without an attention_mask"))
    return Subject(
        name=str(path),
        make=lambda causal: module,
        directions=(True,),
        takes=frozenset(takes),
        without=tuple(without),
        embedding=model.get_input_embeddings(),
        lengths=(min(17, limit), min(150, limit)),
    )


class CausalModel(nn.Module):
    """A transformers model as a module x -> logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.accepted = set(inspect.signature(model.forward).parameters)
        self.past = next((n for n in ("past_key_values", "cache_params") if n in self.accepted), "")

    def new_cache(self) -> dict[str, Any]:
        return {}

    def forward(self, x: Tensor, *, cache: dict[str, Any] | None = None, **masks: Tensor) -> Tensor:
        told: dict[str, Any] = {"inputs_embeds" if x.is_floating_point() else "input_ids": x}
        if "key_padding_mask" in masks:
            told["attention_mask"] = masks["key_padding_mask"].long()
        if masks and "position_ids" in self.accepted:
            told["position_ids"] = _positions(masks)[:, -x.shape[1] :]
        if "use_cache" in self.accepted:
            told["use_cache"] = cache is not None
        if cache is not None:
            told[self.past] = cache.get("past")
        out = self.model(**told)
        if cache is not None:
            cache["past"] = out[self.past]
        return out.logits


def _positions(masks: dict[str, Tensor]) -> Tensor:
    """The number of real tokens before each one in its document."""
    B, L = next(iter(masks.values())).shape
    before_BLL = torch.ones(B, L, L, dtype=torch.bool).tril(-1)
    if "documents" in masks:
        before_BLL &= masks["documents"][:, :, None] == masks["documents"][:, None]
    if "key_padding_mask" in masks:
        before_BLL &= masks["key_padding_mask"][:, None]
    return before_BLL.sum(-1)


def _keeps_documents_apart(module: CausalModel, masked: bool = False) -> bool:
    """Whether it reads position_ids that start anew as a new document; not every architecture does."""
    (layout,) = (layout for layout in layouts(LEAST_POSITIONS) if layout.name == "packed")
    ids = torch.arange(3 * LEAST_POSITIONS).view(3, -1) % module.model.get_input_embeddings().num_embeddings
    other = torch.where(layout.masks["documents"] == 1, ids.flip(1), ids)
    mask = layout.masks | ({"key_padding_mask": layout.real_BL} if masked else {})
    try:
        with torch.no_grad():
            change = (module(ids, **mask) - module(other, **mask))[1, 5:]
    except Exception:
        return False
    return float(change.abs().max()) == 0.0
