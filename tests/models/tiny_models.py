"""Tiny transformers models with weights large enough that a wrong mixer shows."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import langevin
from langevin.mixers import parse
from langevin.models.config import LangevinConfig
from langevin.models.heads import LangevinForCausalLM

VOCABULARY = 61
ATTENTION = [
    "softmax",
    "ssmax",
    "heat(t=0.5)",
    "heat(t='head')",
    "heat(t='adaptive')",
    "heat(t=1.0, alpha=0.05)",
    "heat(t=1.0, distance='squared')",
    "sigmoid",
    "sima",
    "softmax+drift(kind='gate')",
]
EVERY = [*ATTENTION, "neighbor", "neighbor(kind='content', mean=True)", "neighbor(kind='recurrent')"]
CAUSAL = ["gpt2", "llama"]
FAMILIES = [*CAUSAL, "bert", "vit"]
_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_SIZE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


def tiny(family: str, spec: str | None = None, seed: int = 0, **options: Any) -> Any:
    """A model of a family in eval mode, converted to a spec whose learned scalars are random."""
    torch.manual_seed(seed)
    if family == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(**{**sizes, **_TEXT, **options}))
    elif family == "llama":
        grouped = {"num_key_value_heads": 2, "max_position_embeddings": 64}
        model = LlamaForCausalLM(LlamaConfig(**{**_SIZE, **_TEXT, **grouped, **options}))
    elif family == "bert":
        text = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}
        model = BertForMaskedLM(BertConfig(**{**_SIZE, **text, **options}))
    elif family == "langevin":
        model = LangevinForCausalLM(
            LangevinConfig(**{**_SIZE, **_TEXT, "max_position_embeddings": 64, **options})
        )
    else:
        model = ViTForImageClassification(
            ViTConfig(**{**_SIZE, "image_size": 16, "patch_size": 4, **options})
        )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn_like(p) + (1.0 if p.ndim == 1 else 0.0))
    if spec is not None:
        langevin.convert(model, spec)
        shake(model)
    return model.eval()


SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
}


def built(name: str, **options: Any) -> Any:
    """A transformers model by the name of its class, with weights that tell models apart."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return shaken(cls(cls.config_class(**options)))


def shake(model: Any) -> None:
    """Move everything a conversion has added away from where it starts."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".langevin." in name:
                p.add_(0.3 * torch.randn_like(p))


def shaken(model: Any) -> Any:
    """Move every parameter: fresh weights are too small to tell models apart. In evaluation mode."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model.eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def inputs(family: str) -> dict[str, Tensor]:
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": tokens(2, 9)}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance)


def spec_of(model: Any) -> str:
    """The spec in a converted model's config, at its shortest."""
    if isinstance(model.config, LangevinConfig):
        return str(parse(model.config.mixer))
    assert set(model.config.langevin) == {"spec"}
    return str(parse(model.config.langevin["spec"]))
