"""A conversion is tried first: it works as a whole, or the model stays as it was and one line says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SMALL, built, close, inputs, spec_of, tiny, tokens
from torch import nn
from transformers import AttentionInterface, GPT2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import langevin
from langevin.cli.main import main
from langevin.errors import UsageError
from langevin.mixers import parse

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot drop attention weights")

BART = {
    **{"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16},
    **{"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
MLA |= {"head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
HYBRID = {
    **SMALL,
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2},
    **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0},
}


def gemma2() -> Any:
    return built("Gemma2ForCausalLM", **SMALL, attn_logit_softcapping=5.0)


def qwen3_next() -> Any:
    return built("Qwen3NextForCausalLM", **HYBRID)


REFUSED = {
    "not transformers'": (lambda: nn.Linear(2, 2), "softmax", "Linear is not a transformers model"),
    "encoder-decoder": (lambda: built("BartModel", **BART), "softmax", "is an encoder-decoder model"),
    "cross-attention": (lambda: tiny("gpt2", add_cross_attention=True), "softmax", "attends to another"),
    "encoder states": (
        lambda: built("BartForCausalLM", **BART),
        "ssmax",
        r"encoder_attn .* is not reached",
    ),
    "no attention": (
        lambda: built("MambaModel", vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4),
        "softmax",
        "MambaModel has no attention module",
    ),
    "softcap": (gemma2, "ssmax", r"caps its attention scores \(softcap\)"),
    "sinks": (lambda: built("GptOssForCausalLM", **SMALL, **EXPERTS), "ssmax", "adds attention sinks"),
    "position bias": (lambda: built("T5EncoderModel", **T5), "softmax", "adds a position bias"),
    "a mask of numbers": (lambda: built("DogeForCausalLM", **SMALL), "heat", "the attention mask"),
    "MLA": (
        lambda: built("DeepseekV3ForCausalLM", **{**SMALL, **MLA}),
        "softmax",
        "mixes 4 heads of width 12",
    ),
    "hybrid": (qwen3_next, "ssmax", "model.layers 0 of Qwen3NextForCausalLM have no attention"),
    "called twice": (lambda: built("DiffLlamaForCausalLM", **SMALL), "sima", "is off by .* from a cache"),
    "a wrong name": (lambda: tiny("gpt2"), "sofmax", "unknown mixer"),
    "a wrong time": (lambda: tiny("gpt2"), "heat(t='head', t_max=0.1)", "outside"),
    "no weights": (lambda: tiny("gpt2").to("meta"), "ssmax", "on the meta device"),
}


def state(model: nn.Module) -> list[Any]:
    """All there is of the modules of a model, and what its config says."""
    configs = [
        m.config.to_json_string() + str(m.config._attn_implementation)
        for m in [model]
        if hasattr(m, "config")
    ]
    held = []
    for name, module in model.named_modules():
        held.append((name, type(module)))
        for key, value in vars(module).items():
            inside = [(k, id(v)) for k, v in value.items()] if isinstance(value, dict) else []
            held.append((name, key, id(value), inside))
    return [*configs, held]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused_and_left_as_it_was(case: str) -> None:
    make, spec, cause = REFUSED[case]
    model = make()
    before = state(model)
    with pytest.raises(UsageError, match=cause) as caught:
        langevin.convert(model, spec)
    assert "\n" not in caught.value.cause
    assert state(model) == before


@pytest.mark.parametrize("case", ["softcap", "hybrid"])
def test_the_command_writes_no_folder_for_a_model_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    make, spec, _ = REFUSED[case]
    make().save_pretrained(tmp_path / "plain")
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "plain"), spec, "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2
    assert not (tmp_path / "out").exists()


def test_a_term_that_nobody_thought_of_shows_as_a_difference() -> None:
    def shifted(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, q, k.roll(1, -1), v, mask, **options)

    AttentionInterface.register("shifted", shifted)
    model = tiny("llama", attn_implementation="shifted")
    with pytest.raises(UsageError, match="is no plain softmax of scaled scores: off by"):
        langevin.convert(model, "ssmax")
    assert model.config._attn_implementation == "shifted"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("OPTForCausalLM", {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 32}),
        ("EsmForMaskedLM", {**SMALL, "mask_token_id": 2}),
        ("Gemma3ForCausalLM", {**SMALL, "query_pre_attn_scalar": 99}),
        ("GraniteForCausalLM", {**SMALL, "attention_multiplier": 0.7}),
        *(("gpt2", {}), ("llama", {}), ("bert", {}), ("vit", {})),
    ],
)
@pytest.mark.parametrize("spec", ["heat(t='head')", "heat(t='adaptive')"])
def test_a_learned_time_starts_at_the_models_own_softmax(name: str, options: Any, spec: str) -> None:
    model = built(name, **options) if options else tiny(name)
    x = inputs(name)
    before = model(**x).logits.detach()
    assert close(langevin.convert(model, spec)(**x).logits, before, 1e-4 * float(before.abs().max()))


def test_softmax_elsewhere_and_the_mixer_in_the_layers_named(tmp_path: Path) -> None:
    x, whole, plain = inputs("llama"), tiny("llama"), tiny("llama")
    part = langevin.convert(tiny("llama"), "heat(t=0.5)", layers=[1])
    langevin.convert(whole, "heat(t=0.5)")
    first = [model(**x, output_hidden_states=True).hidden_states for model in (part, plain, whole)]
    assert close(first[0][1], first[1][1], 1e-5)
    assert not close(first[0][2], first[1][2], 1e-2)
    assert not close(first[0][1], first[2][1], 1e-2)
    assert [str(parse(spec)) for spec in part.config.langevin["spec"]] == ["softmax", "heat(t=0.5)"]
    part.save_pretrained(tmp_path)
    assert torch.equal(langevin.from_pretrained(tmp_path)(**x).logits, part(**x).logits)
    scalars = langevin.convert(part, "ssmax", layers=[0]).model.layers[0].self_attn.langevin
    assert [str(parse(spec)) for spec in part.config.langevin["spec"]] == ["ssmax", "heat(t=0.5)"]
    langevin.convert(part, "ssmax", layers=[1])
    assert part.model.layers[0].self_attn.langevin is scalars
    assert spec_of(part) == "ssmax"


def test_the_attention_layers_of_a_hybrid_are_converted_by_number() -> None:
    model = langevin.convert(qwen3_next(), "ssmax", layers=[1])
    assert spec_of(model) == "ssmax"
    assert model(tokens(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("layers", "cause"), [([2], "no layer 2 with attention"), ([], "no layers were named")]
)
def test_layers_that_are_not_there_are_named(layers: list[int], cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as caught:
        langevin.convert(tiny("gpt2"), "ssmax", layers=layers)
    assert "0, 1" in caught.value.remedy


def test_a_trial_leaves_no_trace_in_the_model_or_the_random_numbers() -> None:
    model = tiny("gpt2").train()
    random = torch.get_rng_state()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    langevin.convert(model, "ssmax")
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items() if name in before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_config_that_others_share_is_not_changed() -> None:
    one, other, x = tiny("gpt2"), tiny("gpt2"), inputs("gpt2")
    sharing = [module for module in other.modules() if hasattr(module, "config")]
    for module in sharing:
        module.config = one.config
    before = other(**x).logits
    langevin.convert(one, "ssmax")
    assert not hasattr(other.config, "langevin")
    assert torch.equal(other(**x).logits, before)
    own = [vars(module).get("config") for module in one.modules()]
    assert {id(config) for config in own if isinstance(config, GPT2Config)} == {id(one.config)}


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.base_model])
@pytest.mark.parametrize("other", ["sdpa", "eager", {"": "sdpa"}])
def test_another_attention_implementation_is_refused(part: Any, other: Any) -> None:
    model = tiny("llama", "ssmax")
    with pytest.raises(UsageError, match="does not compute the mixers of a converted model"):
        part(model).set_attn_implementation(other)
    part(model).set_attn_implementation("langevin")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(UsageError, match="'sdpa' does not compute the mixers"):
        model(tokens(1, 5))


def test_output_attentions_of_the_config_is_heard(tmp_path: Path) -> None:
    model = tiny("llama", "softmax", attn_implementation="eager", output_attentions=True)
    assert len(model(tokens(1, 5)).attentions) == 2
    assert not model(tokens(1, 5), output_attentions=False).attentions
    model.config.output_attentions = False
    assert not model(tokens(1, 5)).attentions
    model.config.output_attentions = True
    assert len(model(tokens(1, 5)).attentions) == 2
    model.save_pretrained(tmp_path)
    assert len(langevin.from_pretrained(tmp_path)(tokens(1, 5)).attentions) == 2


def test_inputs_of_ones_own_reach_what_tokens_do_not() -> None:
    vision = {"model_type": "clip_vision_model", **SMALL, "image_size": 8, "patch_size": 4}
    text = {"model_type": "llama", **SMALL}
    model = built(
        "LlavaForConditionalGeneration", text_config=text, vision_config=vision, image_token_index=5
    )
    with pytest.raises(
        UsageError, match=r"vision_tower\S* of Llava\w* is not reached by input_ids"
    ) as caught:
        langevin.convert(model, "ssmax")
    assert "inputs=" in caught.value.remedy
    x = {"input_ids": torch.tensor([[9, 5, 5, 5, 5, 8]]), "pixel_values": torch.randn(1, 3, 8, 8)}
    assert langevin.convert(model, "ssmax", inputs=x)(**x).logits.isfinite().all()


def test_a_wrong_name_is_answered_before_torch_is_imported() -> None:
    code = """
import socket, sys
def unreachable(*_): raise OSError("no network")
socket.getaddrinfo = unreachable
from langevin.cli.main import main
status = main(["convert", "nosuch", "ssmax", "--out", "x"])
assert "torch" not in sys.modules and "transformers" not in sys.modules
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    cause, remedy = done.stderr.strip().splitlines()
    assert "there is no model 'nosuch'" in cause
    assert "save_pretrained" in remedy
