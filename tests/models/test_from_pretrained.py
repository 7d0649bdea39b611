"""A converted model comes back from disk as it was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import EVERY, FAMILIES, close, inputs, spec_of, tiny, tokens
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import langevin
from langevin.errors import UsageError, WorkError
from langevin.mixers import parse

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot drop attention weights")


def saved(folder: Path, family: str = "gpt2", spec: str | None = "ssmax") -> Any:
    model = tiny(family, spec)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("spec", [*EVERY, "sigmoid(bias='head')+drift(kind='gate')+noise(std='channel')"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_with_its_spec_and_scalars(tmp_path: Path, family: str, spec: str) -> None:
    model, x = saved(tmp_path, family, spec), inputs(family)
    loaded, info = langevin.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(model)
    assert not loaded.training
    assert spec_of(loaded) == str(parse(spec))
    assert torch.equal(loaded(**x).logits, model(**x).logits)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_learned_scalars_stay_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    spec = "heat(t='adaptive')+drift(kind='gate')"
    model = saved(tmp_path, "llama", spec)
    loaded = langevin.from_pretrained(tmp_path, dtype=torch.bfloat16)
    again = langevin.convert(tiny("llama").to(torch.bfloat16), spec)
    for name, p in model.named_parameters():
        learned = ".langevin." in name
        assert loaded.get_parameter(name).dtype == (torch.float32 if learned else torch.bfloat16)
        assert again.get_parameter(name).dtype == (torch.float32 if learned else torch.bfloat16)
        if learned:
            assert torch.equal(loaded.get_parameter(name), p)
    assert loaded(tokens(1, 5)).logits.dtype == torch.bfloat16
    loaded.save_pretrained(tmp_path / "half")
    half = langevin.from_pretrained(tmp_path / "half")
    assert torch.equal(half(tokens(1, 5)).logits, loaded(tokens(1, 5)).logits)


def test_a_loaded_model_can_be_trained_saved_and_converted_again(tmp_path: Path) -> None:
    model = saved(tmp_path, "gpt2", "ssmax")
    loaded = langevin.from_pretrained(tmp_path).train()
    loaded(tokens(2, 5), labels=tokens(2, 5)).loss.backward()
    assert loaded.get_parameter("transformer.h.0.attn.langevin.scalars.s").grad.abs().max() > 0
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]
    assert close(
        langevin.convert(loaded.eval(), "softmax")(tokens(1, 5)).logits,
        langevin.convert(model, "softmax")(tokens(1, 5)).logits,
        1e-6,
    )


def test_a_model_saved_in_pieces_loads(tmp_path: Path) -> None:
    model = tiny("llama", "ssmax")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(langevin.from_pretrained(tmp_path)(tokens(1, 5)).logits, model(tokens(1, 5)).logits)


@pytest.mark.parametrize(
    "auto_class", [None, AutoModelForCausalLM, "AutoModelForCausalLM", GPT2LMHeadModel]
)
def test_the_class_may_be_given_or_found(tmp_path: Path, auto_class: Any) -> None:
    saved(tmp_path)
    assert type(langevin.from_pretrained(str(tmp_path), auto_class=auto_class)) is GPT2LMHeadModel


def test_a_plain_folder_loads_as_the_plain_model(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama", None)
    loaded = langevin.from_pretrained(tmp_path)
    assert not hasattr(loaded.config, "langevin")
    assert loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(tokens(1, 5)).logits, model(tokens(1, 5)).logits)


def lose(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def lose_a_scalar(folder: Path) -> None:
    lose(folder, "transformer.h.1.attn.langevin.scalars.s")


def pickle_the_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def add_a_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "stray": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})


def change_a_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.1.attn.langevin.scalars.s"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("harm", "error", "cause"),
    [
        (lose_a_scalar, WorkError, "1 missing keys"),
        (add_a_weight, WorkError, "1 unexpected keys, the first being stray"),
        (change_a_shape, WorkError, "mismatched"),
        (cut_the_weights, WorkError, "cannot be read"),
        (pickle_the_weights, WorkError, "are pickled"),
        (lambda folder: lose(folder, "transformer.h.0.attn.c_attn.weight"), WorkError, "1 missing keys"),
        (lambda folder: change_config(folder, n_layer=1), WorkError, "unexpected keys"),
        (lambda folder: change_config(folder, n_embd=7), WorkError, "cannot be read"),
        (lambda folder: change_config(folder, n_embd="x"), UsageError, "no model config"),
        (
            lambda folder: change_config(folder, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
            UsageError,
            "no model config",
        ),
        (
            lambda folder: change_config(folder, langevin={"spec": ["ssmax"] * 3}),
            WorkError,
            "3 mixers for 2",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), WorkError, "cannot be read"),
        (lambda folder: (folder / "config.json").unlink(), UsageError, "no model config"),
        (lambda folder: (folder / "config.json").write_text("{"), UsageError, "no model config"),
        (
            lambda folder: change_config(folder, architectures=None),
            UsageError,
            "no transformers model class",
        ),
        (lambda folder: change_config(folder, langevin="ssmax"), WorkError, "no spec"),
        (lambda folder: change_config(folder, langevin={"spec": "sofmax"}), UsageError, "unknown mixer"),
    ],
)
def test_a_damaged_folder_is_named_with_its_remedy(
    tmp_path: Path, harm: Any, error: type, cause: str
) -> None:
    saved(tmp_path)
    harm(tmp_path)
    with pytest.raises(error, match=cause) as caught:
        langevin.from_pretrained(tmp_path)
    assert "\n" not in caught.value.cause
    assert caught.value.remedy


@pytest.mark.parametrize(
    "where", ["./nowhere", "/nowhere/at/all", "runs/some/where", "~/nowhere", "mine/nowhere"]
)
def test_a_missing_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UsageError, match="folder") as caught:
        langevin.from_pretrained(where)
    assert where in caught.value.cause


@pytest.mark.parametrize(
    ("family", "spec", "layer"),
    [
        ("llama", None, "model.layers.1.self_attn"),
        ("llama", "softmax", "model.layers.1.self_attn"),
        ("langevin", None, "model.blocks.1.attention"),
    ],
)
def test_a_weight_that_is_missing_is_never_made_up(
    tmp_path: Path, family: str, spec: str | None, layer: str
) -> None:
    saved(tmp_path, family, spec)
    lose(tmp_path, f"{layer}.q_proj.weight")
    with pytest.raises(WorkError, match=r"1 .*missing.* the first being \S*q_proj"):
        langevin.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "option", [{"attn_implementation": "sdpa"}, {"use_safetensors": False}, {"trust_remote_code": True}]
)
def test_options_that_would_load_something_else_are_refused(tmp_path: Path, option: Any) -> None:
    saved(tmp_path)
    with pytest.raises(UsageError, match=next(iter(option))):
        langevin.from_pretrained(tmp_path, **option)


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    capfd.readouterr()
    langevin.from_pretrained(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(UsageError, match="AutoModelForSpam"):
        langevin.from_pretrained(tmp_path, auto_class="AutoModelForSpam")
    with pytest.raises(UsageError, match="AutoModelForImageClassification has no class for GPT2Config"):
        langevin.from_pretrained(tmp_path, auto_class="AutoModelForImageClassification")
