"""One cache, transformers': what a mixer keeps in it, and what may be done to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from tiny_models import ATTENTION, close, shaken, tiny, tokens
from torch import Tensor
from transformers import DynamicCache, StaticCache

from langevin import mixers
from langevin.errors import UsageError
from langevin.models.config import LangevinConfig
from langevin.models.heads import LangevinForCausalLM

OF_CONSTANT_SIZE = [
    *("sima", "sima(scale='n')+drift", "neighbor", "neighbor(hops='dilated')"),
    *("neighbor(kind='content', hops='dilated', mean=True)", "neighbor(kind='recurrent')"),
]
EVERY = [*ATTENTION, *OF_CONSTANT_SIZE[1:]]


def own(mixer: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    small = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LangevinConfig(
        **{**small, "num_key_value_heads": 2, "max_position_embeddings": 64, "mixer": mixer, **changes}
    )
    return shaken(LangevinForCausalLM(config))


def bytes_of(cache: Any) -> int:
    """What the tensors of a cache hold in memory."""
    parts = [x for layer in cache.layers for x in vars(layer).values()]
    parts += [x for part in parts if isinstance(part, tuple) for x in part]
    return sum(x.untyped_storage().nbytes() for x in parts if isinstance(x, Tensor))


def generated(model: Any, ids: Tensor, **options: Any) -> Tensor:
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    out: Tensor = model.generate(ids, **options)
    return out


def padded(ids: Tensor) -> dict[str, Tensor]:
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["own", "gpt2", "llama"])
@pytest.mark.parametrize("spec", OF_CONSTANT_SIZE)
def test_a_state_of_constant_size_does_not_grow_while_a_model_generates(spec: str, kind: str) -> None:
    model = own(spec) if kind == "own" else tiny(kind, spec)
    sizes = set()
    for prompt, new in ((1, 4), (7, 4), (7, 40)):
        out = model.generate(
            tokens(2, prompt),
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
            eos_token_id=None,
        )
        assert out.past_key_values.get_seq_length() == prompt + new - 1
        sizes.add(bytes_of(out.past_key_values))
    assert len(sizes) == 1


@pytest.mark.parametrize("spec", OF_CONSTANT_SIZE)
def test_beams_are_reordered_in_a_state_too(spec: str) -> None:
    model, ids = own(spec), tokens(2, 6)
    options = {"num_beams": 3, "num_return_sequences": 3}
    assert torch.equal(generated(model, ids, **options), generated(model, ids, use_cache=False, **options))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("spec", OF_CONSTANT_SIZE)
def test_a_cache_that_was_reset_starts_anew(spec: str, static: bool) -> None:
    model, ids = own(spec), tokens(2, 9)
    cache = (
        StaticCache(config=model.config, max_cache_len=12) if static else DynamicCache(config=model.config)
    )
    with torch.no_grad():
        model(tokens(2, 7, seed=1), past_key_values=cache)
        cache.reset()
        again = model(ids, past_key_values=cache).logits
    assert int(cache.get_seq_length()) == 9
    assert close(again, model(ids).logits)


@pytest.mark.parametrize("spec", ["softmax", *OF_CONSTANT_SIZE])
def test_rows_of_a_cache_are_repeated_and_selected(spec: str) -> None:
    model, ids = own(spec), tokens(2, 9)
    with torch.no_grad():
        cache = model(ids[:, :5]).past_key_values
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0, 4]))
        rest = model(ids[:, 5:], past_key_values=cache).logits
    assert close(rest, model(ids).logits[:, 5:])


@pytest.mark.parametrize("spec", OF_CONSTANT_SIZE)
def test_a_state_of_constant_size_refuses_to_forget_its_last_tokens(spec: str) -> None:
    for model in (own(spec), tiny("llama", spec)):
        cache = model(tokens(1, 5)).past_key_values
        cache.crop(0)
        with pytest.raises(UsageError, match="cannot be taken away"):
            cache.crop(-1)
        assert not getattr(cache, "is_croppable", False)


def test_keys_and_values_are_cropped_as_ever() -> None:
    model, ids = own("ssmax"), tokens(1, 8)
    with torch.no_grad():
        cache = model(ids).past_key_values
        cache.crop(-3)
        assert close(model(ids[:, 5:], past_key_values=cache).logits, model(ids).logits[:, 5:])


@pytest.mark.parametrize("spec", ["softmax", *OF_CONSTANT_SIZE])
def test_drafts_are_taken_back_from_keys_and_refused_in_words_of_a_state(spec: str) -> None:
    model, ids = own(spec), tokens(1, 4).repeat(1, 3)
    if spec == "softmax":
        drafted = generated(model, ids, prompt_lookup_num_tokens=3, eos_token_id=1)
        assert torch.equal(drafted, generated(model, ids, eos_token_id=1))
    else:
        with pytest.raises(ValueError, match="stateful"):
            generated(model, ids, prompt_lookup_num_tokens=3, eos_token_id=1)


@pytest.mark.parametrize("how", ["plain", "left-padded"])
@pytest.mark.parametrize("spec", EVERY)
def test_a_static_cache_gives_what_a_growing_one_gives(spec: str, how: str) -> None:
    model, ids = own(spec), tokens(2, 6)
    batch = padded(ids) if how == "left-padded" else {"input_ids": ids}
    dynamic = model.generate(
        **batch, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    static = model.generate(
        **batch,
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation="static",
    )
    assert torch.equal(static.sequences, dynamic.sequences)
    assert close(torch.stack(static.logits), torch.stack(dynamic.logits))


@pytest.mark.parametrize(
    ("spec", "positions"),
    [
        ("softmax", "learned"),
        ("ssmax", "alibi"),
        ("heat(t='adaptive')", "rope"),
        ("heat(t=1.0, alpha=0.05)", "alibi"),
        ("sigmoid", "alibi"),
        ("sima(scale='n')+drift", "rope"),
        ("neighbor(hops='dilated')", "learned"),
    ],
)
def test_decoding_from_a_static_cache_compiles_into_one_graph(spec: str, positions: str) -> None:
    """Token after token by the same graph, without position_ids, as in eager mode."""
    model, ids = own(spec, positions=positions, num_hidden_layers=1), tokens(2, 9)
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=graphs)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=12)
        parts = [model(ids[:, :5], past_key_values=cache).logits]
        parts += [step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(5, 9)]
    assert close(torch.cat(parts, 1), expected)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("spec", ["softmax", "sima", "neighbor"])
def test_compiled_decoding_from_a_static_cache_sees_no_padding(spec: str) -> None:
    model, ids = own(spec, num_hidden_layers=1), tokens(2, 9)
    mask = padded(ids)["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    torch._dynamo.reset()
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions).logits
        cache = StaticCache(config=model.config, max_cache_len=12)
        wide = torch.nn.functional.pad(mask, (0, 3), value=1)
        parts = [
            model(
                ids[:, :5], attention_mask=wide, position_ids=positions[:, :5], past_key_values=cache
            ).logits
        ]
        for i in range(5, 9):
            here = slice(i, i + 1)
            parts.append(
                step(
                    ids[:, here],
                    attention_mask=wide,
                    position_ids=positions[:, here],
                    past_key_values=cache,
                ).logits
            )
    seen = mask.bool()[..., None]
    assert close(torch.cat(parts, 1) * seen, expected * seen)


def test_weights_over_a_static_cache_have_one_shape_eager_and_compiled() -> None:
    model, ids = own("ssmax", num_hidden_layers=1), tokens(2, 6)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for run in (model, compiled):
        cache = StaticCache(config=model.config, max_cache_len=12)
        with torch.no_grad():
            first = model(ids[:, :5], past_key_values=cache, output_attentions=True).attentions[0]
            second = run(ids[:, 5:], past_key_values=cache, output_attentions=True).attentions[0]
        assert first.shape == (2, 4, 5, 12)
        assert second.shape == (2, 4, 1, 12)
        assert close(second.sum(-1), torch.ones(2, 4, 1))
        assert not second[..., 6:].any()


@pytest.mark.parametrize("spec", ["sima", "sima(scale='n')"])
def test_a_call_for_weights_is_remembered_too(spec: str) -> None:
    module = mixers.build(spec, width=16, heads=2).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    full = module(x)
    cache = module.new_cache()
    parts = [module(x[:, :4], cache=cache, return_weights=True)[0]]
    parts += [module(x[:, i : i + 1], cache=cache) for i in range(4, 7)]
    parts += [module(x[:, 7:], cache=cache, return_weights=True)[0]]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-12)


def test_weights_of_tokens_that_were_only_summed_are_refused_in_words() -> None:
    module = mixers.build("sima", width=16, heads=2)
    cache = module.new_cache()
    module(torch.randn(1, 4, 16), cache=cache)
    with pytest.raises(UsageError, match="holds sums, and no keys"):
        module(torch.randn(1, 1, 16), cache=cache, return_weights=True)


def test_a_state_is_not_laid_over_keys_of_another_mixer() -> None:
    cache = own("softmax")(tokens(1, 5)).past_key_values
    with pytest.raises(UsageError, match="keys and values of another mixer"):
        own("sima")(tokens(1, 2), past_key_values=cache)


@pytest.mark.parametrize("spec", ["softmax", "sima", "neighbor", "heat(t=1.0, alpha=0.05)"])
def test_several_modules_may_share_one_cache(spec: str) -> None:
    layers = [mixers.build(spec, width=16, heads=2, layer=i) for i in range(2)]
    x, cache = torch.randn(1, 7, 16), layers[0].new_cache()
    cached = []
    for part in (x[:, :4], x[:, 4:]):
        for layer in layers:
            part = layer(part, cache=cache)
        cached.append(part)
    torch.testing.assert_close(torch.cat(cached, 1), layers[1](layers[0](x)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["ssmax", "sigmoid", "sima", "neighbor"])
def test_a_step_from_a_static_cache_can_be_exported(spec: str) -> None:
    model, ids = own(spec, num_hidden_layers=1), tokens(1, 8)

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.cache = StaticCache(config=model.config, max_cache_len=12)
            with torch.no_grad():
                model(ids[:, :5], past_key_values=self.cache)
            for i, layer in enumerate(self.cache.layers):
                kept = [layer.keys, layer.values, layer.cumulative_length, *getattr(layer, "state", ())]
                for j, x in enumerate(x for x in kept if x is not None):
                    self.register_buffer(f"cache_{i}_{j}", x, persistent=False)

        def forward(self, token: Tensor) -> Tensor:
            return self.model(token, past_key_values=self.cache).logits

    with torch.no_grad():
        program = torch.export.export(Step(), (ids[:, 5:6],), strict=True).module()
        steps = [program(ids[:, i : i + 1]) for i in range(5, 8)]
        assert close(torch.cat(steps, 1), model(ids, use_cache=False).logits[:, 5:])
