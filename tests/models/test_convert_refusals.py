"""What a converted model cannot compute it refuses in words; nothing is left out silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import spec_of, tiny, tokens
from torch import nn
from transformers import StaticCache

import langevin
from langevin.errors import UsageError
from langevin.mixers import parse

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot drop attention weights")
SIZE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def built(name: str, **options: Any) -> Any:
    """A transformers model by the name of its class, of random weights."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**options)).eval()


def encoder_decoder() -> Any:
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return built("BartModel", vocab_size=61, d_model=16, **layers, **heads)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: nn.Linear(2, 2), "Linear is not a transformers model"),
        (encoder_decoder, "BartModel is an encoder-decoder model"),
        (
            lambda: tiny("gpt2", add_cross_attention=True),
            "crossattention of GPT2LMHeadModel attends to another",
        ),
        (lambda: tiny("bert", is_decoder=True, add_cross_attention=True), "attends to another sequence"),
        (
            lambda: built("MambaModel", vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4),
            "MambaModel has no attention module",
        ),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused(make: Any, cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as caught:
        langevin.convert(make(), "softmax")
    assert caught.value.remedy


@pytest.mark.parametrize("spec", ["sofmax", "heat(q=1)", "heat(t='head', t_max=0.1)"])
def test_a_wrong_spec_leaves_the_model_as_it_was(spec: str) -> None:
    model = tiny("gpt2")
    before = model(tokens(1, 5)).logits
    with pytest.raises(UsageError):
        langevin.convert(model, spec)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(tokens(1, 5)).logits, before)


@pytest.mark.parametrize(
    ("name", "options", "cause"),
    [
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 5.0}, r"caps its attention scores \(softcap\)"),
        ("GptOssForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 1}, "adds attention sinks"),
    ],
)
def test_scores_with_terms_no_mixer_has_are_refused(name: str, options: dict[str, Any], cause: str) -> None:
    model = langevin.convert(built(name, **SIZE, **options), "ssmax")
    with pytest.raises(UsageError, match=cause):
        model(tokens(1, 5))


def test_a_position_bias_and_a_learned_scale_are_refused() -> None:
    from langevin.models.convert_attention import attention

    module = tiny("llama", "softmax").model.layers[0].self_attn
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(UsageError, match="adds a position bias"):
        attention(module, q, k, k, None, position_bias=torch.zeros(1, 4, 3, 3))
    with pytest.raises(UsageError, match="scales its scores by a tensor"):
        attention(module, q, k, k, None, scaling=torch.ones(1))
    with pytest.raises(UsageError, match="mixes 2 heads of width 8"):
        attention(module, k, k, k, None)


def test_packed_documents_without_positions_are_refused() -> None:
    model = tiny("llama", "softmax")
    with pytest.raises(UsageError, match="cu_seq_lens without a mask"):
        model(tokens(1, 5), cu_seq_lens_q=torch.tensor([0, 2, 5]), use_cache=False)


def test_a_model_that_was_not_converted_is_refused() -> None:
    langevin.convert(tiny("gpt2"), "softmax")
    model = tiny("llama")
    model.set_attn_implementation("langevin")
    with pytest.raises(UsageError, match="was not converted"):
        model(tokens(1, 5))


@pytest.mark.parametrize(
    ("mask", "cause"),
    [
        (torch.zeros(1, 1, 5, 5) - 0.5, "adds numbers to scores"),
        (torch.ones(1, 4, 5, 5).tril().bool(), "the attention mask has shape"),
    ],
)
def test_masks_that_no_view_shows_are_refused(mask: torch.Tensor, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        tiny("llama", "softmax")(tokens(1, 5), attention_mask=mask)


def test_a_static_cache_is_refused_where_it_has_no_room() -> None:
    model = tiny("llama", "sima")
    static = StaticCache(config=model.config, max_cache_len=9)
    with pytest.raises(UsageError, match="no room for the past queries"):
        model(tokens(1, 5), past_key_values=static, output_attentions=True)
    assert getattr(model.model.layers[0].self_attn, "langevin_layer", None) is None


def test_a_mask_of_no_order_cannot_be_summed_up() -> None:
    model, odd = tiny("llama", "sima"), torch.eye(5).flip(0).bool()[None, None] | torch.eye(5).bool()
    with pytest.raises(UsageError, match="which a state could sum up"):
        model(tokens(1, 5), attention_mask=odd, use_cache=True)
    assert model(tokens(1, 5), attention_mask=odd, use_cache=False).logits.isfinite().all()


def test_a_cache_filled_by_another_mixer_cannot_continue_sima() -> None:
    model = tiny("llama", "softmax")
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    langevin.convert(model, "sima")
    with pytest.raises(UsageError, match="keys and values of another mixer"):
        model(tokens(1, 2), past_key_values=cache)


def test_neighbor_has_no_weights_to_show() -> None:
    for family in ("gpt2", "llama"):
        with pytest.raises(UsageError, match="neighbor has no attention weights"):
            tiny(family, "neighbor")(tokens(1, 5), output_attentions=True)


def test_neighbor_cannot_turn_bidirectional_after_conversion() -> None:
    with pytest.raises(UsageError, match="built with causal=True"):
        tiny("llama", "neighbor")(tokens(1, 5), is_causal=False)


def test_neighbor_cannot_be_turned_back_into_attention() -> None:
    model = tiny("gpt2", "neighbor")
    with pytest.raises(UsageError, match="has no q, k and v any more"):
        langevin.convert(model, "softmax")
    assert spec_of(langevin.convert(model, "neighbor(iters=2)")) == str(parse("neighbor(iters=2)"))
    assert model(tokens(1, 5)).logits.isfinite().all()
