"""A converted transformers model computes what its mixer says, in every way it may be called."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ATTENTION, CAUSAL, EVERY, FAMILIES, close, inputs, shake, spec_of, tiny, tokens
from torch import Tensor
from transformers import DynamicCache

import langevin
from langevin.mixers import View, parse
from langevin.models import convert_attention

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot drop attention weights")
NEW = 12


def generated(model: Any, ids: Tensor, **options: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(
        ids,
        attention_mask=mask,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )


def left_padded(prompts: list[Tensor], fill: Tensor) -> dict[str, Tensor]:
    """Prompts as one batch, padded on the left with whatever `fill` holds."""
    longest = max(p.shape[1] for p in prompts)
    rows = [torch.cat([fill[:, : longest - p.shape[1]], p], 1) for p in prompts]
    real = torch.stack([torch.arange(longest) >= longest - p.shape[1] for p in prompts]).long()
    return {"input_ids": torch.cat(rows), "attention_mask": real}


@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_conversion_gives_the_original_logits(family: str) -> None:
    model, x = tiny(family), inputs(family)
    before = model(**x).logits
    assert close(langevin.convert(model, "softmax")(**x).logits, before, 1e-5)


@pytest.mark.parametrize(
    "options", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}]
)
def test_a_scale_of_the_models_own_is_honoured(options: dict[str, bool]) -> None:
    model, x = tiny("gpt2", **options), inputs("gpt2")
    before = model(**x).logits
    assert close(langevin.convert(model, "softmax")(**x).logits, before, 1e-5)
    assert not close(tiny("gpt2", "softmax")(**x).logits, before, 1e-2)


@pytest.mark.parametrize("spec", EVERY[1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_mixer_changes_the_logits(family: str, spec: str) -> None:
    x = inputs(family)
    logits = tiny(family, spec)(**x).logits
    assert logits.isfinite().all()
    assert not close(logits, tiny(family)(**x).logits, 1e-2)


@pytest.mark.parametrize("spec", EVERY)
@pytest.mark.parametrize("family", CAUSAL)
def test_decoding_with_a_cache_equals_decoding_without(family: str, spec: str) -> None:
    model, ids = tiny(family, spec), tokens(2, 9)
    cached, whole = generated(model, ids), generated(model, ids, use_cache=False)
    assert torch.equal(cached.sequences, whole.sequences)
    assert close(torch.stack(cached.logits), torch.stack(whole.logits))


@pytest.mark.parametrize("spec", EVERY)
@pytest.mark.parametrize("family", CAUSAL)
def test_a_prompt_in_two_pieces_equals_the_prompt_in_one(family: str, spec: str) -> None:
    model, ids = tiny(family, spec), tokens(2, 13)
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], past_key_values=first.past_key_values)
    assert close(torch.cat([first.logits, second.logits], 1), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("spec", EVERY)
@pytest.mark.parametrize("family", CAUSAL)
def test_a_left_padded_batch_equals_each_prompt_alone(family: str, spec: str) -> None:
    model = tiny(family, spec)
    prompts = [tokens(1, n, seed=n) for n in (5, 9, 3)]
    batch = left_padded(prompts, tokens(1, 9, seed=99))
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    logits = model(**batch, position_ids=positions).logits
    together = generated(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for row, prompt in enumerate(prompts):
        assert close(logits[row, -prompt.shape[1] :], model(prompt).logits[0])
        alone = generated(model, prompt)
        assert torch.equal(together.sequences[row, -NEW:], alone.sequences[0, -NEW:])
        assert close(torch.stack(together.logits)[:, row], torch.stack(alone.logits)[:, 0])


@pytest.mark.parametrize("spec", EVERY)
def test_right_padding_changes_nothing_at_real_tokens_of_bert(spec: str) -> None:
    model, ids = tiny("bert", spec), tokens(2, 7)
    alone = model(ids).logits
    for padding in (1, 6):
        padded = torch.cat([ids, tokens(2, padding, seed=padding)], 1)
        real = torch.arange(7 + padding).expand(2, -1) < 7
        assert close(model(padded, attention_mask=real.long()).logits[:, :7], alone)
        assert not close(model(padded).logits[:, :7], alone)


@pytest.mark.parametrize("spec", EVERY)
@pytest.mark.parametrize("family", CAUSAL)
def test_documents_packed_by_position_ids_equal_the_documents_alone(family: str, spec: str) -> None:
    model = tiny(family, spec)
    documents = [tokens(1, n, seed=n) for n in (4, 7, 2)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    packed = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
    assert close(packed, torch.cat([model(d).logits for d in documents], 1))


@pytest.mark.parametrize("spec", ["softmax", "sima", "neighbor"])
@pytest.mark.parametrize("family", CAUSAL)
def test_beam_search_with_a_cache_equals_beam_search_without(family: str, spec: str) -> None:
    model, ids = tiny(family, spec), tokens(2, 6)
    cached = generated(model, ids, num_beams=3, num_return_sequences=3)
    whole = generated(model, ids, num_beams=3, num_return_sequences=3, use_cache=False)
    assert torch.equal(cached.sequences, whole.sequences)
    assert close(cached.sequences_scores, whole.sequences_scores)


def test_drafts_that_are_cropped_from_the_cache_leave_no_trace() -> None:
    model, ids = tiny("llama", "ssmax"), tokens(1, 4).repeat(1, 3)
    drafted = generated(model, ids, prompt_lookup_num_tokens=3, eos_token_id=1)
    assert torch.equal(drafted.sequences, generated(model, ids, eos_token_id=1).sequences)


@pytest.mark.parametrize(
    "make", [lambda model: DynamicCache(), lambda model: DynamicCache(config=model.config)]
)
def test_a_copied_cache_of_a_prefix_continues_sima(make: Any) -> None:
    model, ids = tiny("llama", "sima"), tokens(2, 11)
    prefix = make(model)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=prefix)
    for _ in range(2):
        rest = model(ids[:, 6:], past_key_values=copy.deepcopy(prefix)).logits
        assert close(rest, model(ids, use_cache=False).logits[:, 6:])


@pytest.mark.parametrize("spec", EVERY)
@pytest.mark.parametrize("family", CAUSAL)
def test_the_unused_slots_of_a_static_cache_are_not_seen(family: str, spec: str) -> None:
    model, ids = tiny(family, spec), tokens(2, 6)
    static = generated(model, ids, cache_implementation="static")
    dynamic = generated(model, ids)
    assert torch.equal(static.sequences, dynamic.sequences)
    assert close(torch.stack(static.logits), torch.stack(dynamic.logits))


def test_a_mask_is_left_out_only_where_the_queries_are_the_last_keys() -> None:
    mask = convert_attention.mask
    assert mask(1, 5, 5) is None
    assert mask(1, 1, 4, q_offset=3) is None
    assert mask(1, 1, 4, q_offset=13, kv_offset=10) is None
    assert mask(1, 1, 8, q_offset=3).tolist() == [[[[True] * 4 + [False] * 4]]]
    assert mask(1, 1, 8, q_offset=torch.tensor(3)).tolist() == [[[[True] * 4 + [False] * 4]]]
    assert mask(1, 2, 4, q_offset=0).tolist() == [
        [[[True, False, False, False], [True, True, False, False]]]
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_attentions_gives_the_weights_and_the_same_logits(family: str) -> None:
    x = inputs(family)
    eager = tiny(family, attn_implementation="eager")(**x, output_attentions=True).attentions
    model = tiny(family, "softmax")
    out = model(**x, output_attentions=True)
    assert close(out.logits, model(**x).logits, 1e-5)
    assert len(out.attentions) == 2
    assert all(close(ours, theirs, 1e-5) for ours, theirs in zip(out.attentions, eager, strict=True))
    assert not model(**x).attentions


def test_the_view_of_a_mask_is_computed_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny("llama", "ssmax"), left_padded([tokens(1, 3), tokens(1, 5)], tokens(1, 5))
    read, calls = View.from_mask, []
    monkeypatch.setattr(
        convert_attention.View, "from_mask", staticmethod(lambda *a, **k: calls.append(1) or read(*a, **k))
    )
    model(**batch)
    assert len(calls) == 1
    model(**batch)
    assert len(calls) == 2


def test_additive_masks_of_zero_and_minus_infinity_are_read_as_boolean() -> None:
    model, ids = tiny("llama", "ssmax"), tokens(1, 5)
    causal = torch.ones(5, 5).tril().bool()[None, None]
    for hidden in (float("-inf"), torch.finfo(torch.float32).min):
        additive = torch.zeros(1, 1, 5, 5).masked_fill(~causal, hidden)
        assert close(model(ids, attention_mask=additive).logits, model(ids).logits, 1e-5)


def test_nothing_holds_on_to_a_cache_after_the_forward() -> None:
    model = tiny("llama", "sima")
    cache = DynamicCache()
    model(tokens(1, 4), past_key_values=cache)
    seen = weakref.ref(cache)
    del cache
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    "spec", ["heat(t='head')+drift(kind='gate')+noise(std='channel')", "sima", "neighbor(noise=0.3)"]
)
@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(family: str, spec: str) -> None:
    x = inputs(family)
    plain = {} if family == "bert" else {"use_cache": False}  # as checkpointing has it
    results = []
    for checkpointing in (False, True):
        model = tiny(family, spec).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        loss = model(**x, **plain, labels=x["input_ids"]).loss
        loss.backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    (loss, gradients), (again, replayed) = results
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        if ".langevin." in name:
            assert gradient.abs().max() > 0, name
        if gradient is not None:
            assert close(gradient, replayed[name], 1e-6 * (1 + float(gradient.abs().max()))), name


@pytest.mark.parametrize(
    "spec",
    [
        "softmax+drift(kind='gate')",
        "softmax+noise(std='channel')",
        "softmax+drift(kind='gate')+noise(std='channel')",
    ],
)
def test_drift_diffusion_gpt2_is_one_line(spec: str) -> None:
    model = langevin.convert(tiny("gpt2"), spec).train()
    added = [name for name, _ in model.named_parameters() if ".langevin." in name]
    per_layer = {"gate", "baseline"} if "drift" in spec else set()
    per_layer |= {"std"} if "noise" in spec else set()
    assert {name.rpartition(".")[2] for name in added} == per_layer
    ids = tokens(2, 9)
    model(ids, labels=ids).loss.backward()
    assert all(model.get_parameter(name).grad is not None for name in added)


def test_converting_again_drops_the_old_scalars() -> None:
    model, x = tiny("llama"), inputs("llama")
    before = model(**x).logits
    for spec in ("ssmax", "sima", "heat(t='adaptive')", "softmax"):
        langevin.convert(model, spec)
        assert spec_of(model) == str(parse(spec))
    assert close(model(**x).logits, before, 1e-5)
    assert not [name for name in model.state_dict() if "langevin" in name]


@pytest.mark.parametrize("spec", ["softmax", "heat", "ssmax+drift", "sima", "neighbor"])
def test_our_own_model_is_converted_like_any_other(tmp_path: Path, spec: str) -> None:
    model, x = tiny("langevin"), inputs("langevin")
    before = model(**x).logits
    langevin.convert(model, spec)
    assert close(model(**x).logits, before, 1e-5) == (spec in ("softmax", "heat"))
    assert spec_of(model) == str(parse(spec))
    shake(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(langevin.from_pretrained(tmp_path)(**x).logits, model(**x).logits)


@pytest.mark.parametrize("spec", ["sigmoid(bias='head')+drift(kind='gate')", "neighbor"])
def test_transformers_initialisation_leaves_what_was_added_alone(spec: str) -> None:
    model = tiny("gpt2", spec)
    before = {n: p.clone() for n, p in model.named_parameters() if ".langevin." in n}
    model.init_weights()
    assert before
    assert all(torch.equal(model.get_parameter(n), p) for n, p in before.items())


@pytest.mark.parametrize("spec", ["sigmoid", "sima", "heat(t=1.0, alpha=0.05)", "neighbor"])
def test_a_mixer_without_attention_dropout_says_so_once(spec: str) -> None:
    with pytest.warns(UserWarning, match="attn_pdrop of the model has no effect") as caught:
        langevin.convert(tiny("gpt2"), spec)
    assert len(caught) == 1


def test_attention_dropout_goes_on_with_softmax() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = tiny("llama", "softmax", attention_dropout=0.5).train()
    assert not torch.equal(model(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


@pytest.mark.parametrize("spec", [ATTENTION[0], "heat(t='adaptive')", "sima", "neighbor"])
@pytest.mark.parametrize("family", CAUSAL)
def test_a_converted_model_compiles_without_graph_breaks(family: str, spec: str) -> None:
    model, x = tiny(family, spec), inputs(family)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**x, use_cache=False).logits
        assert close(compiled, model(**x, use_cache=False).logits)
