"""What a converted model cannot compute it refuses in words; nothing is left out silently."""

from __future__ import annotations

import pytest
import torch
from tiny_models import spec_of, tiny, tokens
from transformers import StaticCache

import langevin
from langevin.errors import UsageError
from langevin.mixers import parse

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot drop attention weights")


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
