"""What models cost: the numbers follow from their shape, or from a clock."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from langevin.evaluation import cost
from langevin.models.config import LangevinConfig
from langevin.models.cost import flops_of, peak_flops
from langevin.models.heads import LangevinForCausalLM

WIDTH, LAYERS, VOCAB, CONTEXT = 16, 2, 11, 24


def model(mixer: str = "softmax", **changes):
    values = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "max_position_embeddings": CONTEXT,
        "mixer": mixer,
        **changes,
    }
    return LangevinForCausalLM(LangevinConfig(**values)).eval()


def test_parameters_are_counted_once_where_they_are_shared():
    tied, untied = model(tie_word_embeddings=True), model(tie_word_embeddings=False)
    assert cost.parameter_count(untied) - cost.parameter_count(tied) == VOCAB * WIDTH
    a_layer = 4 * WIDTH**2 + WIDTH + 2 * 4 * WIDTH**2 + 5 * WIDTH + 4 * WIDTH
    assert cost.parameter_count(tied) == LAYERS * a_layer + 2 * WIDTH + VOCAB * WIDTH


def test_softmax_keeps_keys_and_values_of_every_token():
    assert cost.state_bytes(model(), CONTEXT) == 2 * LAYERS * CONTEXT * WIDTH * 4
    assert cost.state_bytes(model(), 10) == 2 * LAYERS * 10 * WIDTH * 4


def test_fewer_key_heads_keep_less():
    assert cost.state_bytes(model(num_key_value_heads=1), CONTEXT) == LAYERS * CONTEXT * WIDTH * 4


def test_a_state_of_constant_size_is_counted_as_it_is():
    for context in (10, CONTEXT):
        assert cost.state_bytes(model("neighbor(iters=3)"), context) == LAYERS * 3 * WIDTH * 4
        assert cost.state_bytes(model("sima"), context) == LAYERS * 2 * (8 * 8 + 8 + 8) * 4


@pytest.mark.parametrize("mixer", ["softmax", "ssmax", "heat", "sigmoid", "sima", "neighbor"])
@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_every_mixer_can_be_measured(mixer, positions):
    made = model(mixer, positions=positions)
    assert cost.decode_ms(made, CONTEXT) > 0
    assert cost.state_bytes(made, CONTEXT) > 0
    assert flops_of(made, CONTEXT) > 6 * LAYERS * 8 * WIDTH**2


def test_decoding_takes_the_time_of_one_token_through_the_cache(monkeypatch):
    m, lengths = model(), []
    whole = m.forward

    def seen(input_ids, **options):
        lengths.append(input_ids.shape[1])
        return whole(input_ids, **options)

    monkeypatch.setattr(m, "forward", seen)
    times = cost.decode_times(m, batch=2, prompt=7, steps=5)
    assert len(times) == 5
    assert lengths == [7, *[1] * (5 + cost.WARMUP)]


def test_peak_memory_is_known_on_cuda_only():
    assert cost.PeakMemory("cpu")() is None
    if torch.cuda.is_available():
        before = torch.zeros(2**20, device="cuda")
        peak = cost.PeakMemory("cuda")
        assert peak() == 0
        held = torch.zeros(2**19, device="cuda")
        assert before.numel() * 4 > peak() >= held.numel() * 4


@pytest.mark.parametrize(
    "mixer",
    [
        "neighbor",
        "neighbor(iters=8)",
        "neighbor(kind='linear')",
        "neighbor(shared=False)",
        "neighbor(kind='content')",
        "neighbor(kind='recurrent')",
    ],
)
def test_the_flops_of_an_attention_free_model_are_those_that_torch_counts(mixer):
    m = model(mixer, hidden_size=32).train()
    tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        m(tokens, use_cache=False).logits.sum().backward()
    assert flops_of(m, CONTEXT) * CONTEXT == pytest.approx(counted.get_total_flops(), rel=0.03)


def test_peaks_are_those_of_the_very_device():
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA RTX A1000") is None
    assert peak_flops("NVIDIA L40") is None
