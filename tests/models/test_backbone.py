"""langevin's own model is a transformers model with any mixer."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from safetensors.torch import load_file, save_file
from tiny_models import shaken
from transformers import AutoModelForCausalLM, DynamicCache

import langevin
from langevin.errors import UsageError, WorkError
from langevin.mixers import Scalars
from langevin.models.backbone import LangevinModel
from langevin.models.config import LangevinConfig
from langevin.models.heads import LangevinForCausalLM

MIXERS = ["softmax", "ssmax", "heat(t='adaptive')", "heat(t=1.0, alpha=0.1)", "sigmoid", "sima", "neighbor"]


def config(**changes: Any) -> LangevinConfig:
    small = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 48,
    }
    return LangevinConfig(**{**small, **changes})


def model(**changes: Any) -> Any:
    torch.manual_seed(0)
    return shaken(LangevinForCausalLM(config(**changes)))


@pytest.mark.parametrize("positions", ["none", "learned", "sinusoidal", "rope"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_decoding_with_a_cache_equals_decoding_without(mixer: str, positions: str) -> None:
    made = model(mixer=mixer, positions=positions)
    ids = torch.randint(1, 40, (2, 6))
    with_cache, without = (
        made.generate(ids, max_new_tokens=8, do_sample=False, use_cache=c, pad_token_id=0)
        for c in (True, False)
    )
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("mixer", [*MIXERS, ["ssmax", "sigmoid+drift"]])
def test_a_saved_model_is_found_by_the_auto_classes_and_passes_every_check(
    mixer: Any, tmp_path: Path
) -> None:
    made = model(mixer=mixer, num_key_value_heads=2, mlp="swiglu", norm="rmsnorm", qk_norm=True)
    made.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.randint(0, 40, (2, 9))
    assert torch.equal(loaded.eval()(ids).logits, made(ids).logits)
    report = langevin.check(str(tmp_path))
    assert report.passed, str(report)


def test_normed_queries_and_keys_have_one_kernel_under_autocast() -> None:
    """torch warns where a norm has another type than its weights, and computes it step by step."""
    made = model(norm="rmsnorm", qk_norm=True)
    ids = torch.randint(0, 40, (2, 9))
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
            warnings.simplefilter("error")
            made(ids)
    finally:
        torch.set_warn_always(False)


def test_learned_scalars_stay_in_float32_and_keep_their_own_start(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fresh = LangevinForCausalLM(config(mixer="ssmax+drift"))
    scalars = [p for m in fresh.modules() if isinstance(m, Scalars) for p in m.parameters()]
    start = langevin.mixers.build("ssmax", width=32, heads=4, max_length=48).mixer.scalars.s
    assert torch.equal(scalars[0], start)
    fresh.save_pretrained(tmp_path)
    low = langevin.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kept = {p.dtype for m in low.modules() if isinstance(m, Scalars) for p in m.parameters()}
    assert kept == {torch.float32}
    assert low.lm_head.weight.dtype == torch.bfloat16


def test_gradient_checkpointing_changes_no_gradient() -> None:
    ids = torch.randint(0, 40, (2, 9))
    grads = []
    for checkpointing in (False, True):
        made = model(mixer="sima+noise", dropout=0.1).train()
        if checkpointing:
            made.gradient_checkpointing_enable()
        torch.manual_seed(3)
        made(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in made.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_labels_are_the_tokens_themselves_and_are_shifted_once() -> None:
    made = model()
    ids = torch.randint(0, 40, (2, 9))
    out = made(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


def test_the_weights_of_every_layer_come_from_the_real_forward_pass() -> None:
    made = model(mixer="heat(t=0.5)")
    attentions = made(torch.randint(0, 40, (2, 9)), output_attentions=True).attentions
    assert len(attentions) == 2
    for w in attentions:
        assert w.shape == (2, 4, 9, 9)
        torch.testing.assert_close(w.sum(-1), torch.ones(2, 4, 9))


def test_a_bidirectional_model_sees_both_ways_and_ignores_padding() -> None:
    torch.manual_seed(0)
    made = LangevinModel(config(causal=False, mixer="sima")).eval()
    ids = torch.randint(0, 40, (1, 7))
    alone = made(ids).last_hidden_state
    assert not torch.allclose(
        made(torch.cat([ids[:, :-1], ids[:, :1]], 1)).last_hidden_state[:, 0], alone[:, 0]
    )
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], 1)
    mask = torch.tensor([[1] * 7 + [0] * 3])
    out = made(padded, attention_mask=mask).last_hidden_state[:, :7]
    torch.testing.assert_close(out, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 5}, "5 heads do not divide"),
        ({"positions": "ropes"}, "Did you mean 'rope'"),
        ({"mixer": "hear"}, "Did you mean 'heat'"),
        ({"mixer": ["softmax", "sima", "heat"]}, "3 mixers came for 2 layers"),
        ({"norm": "batch"}, "unknown norm"),
        ({"num_hidden_layers": 0}, "at least one layer"),
    ],
)
def test_a_wrong_config_is_refused_in_words(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        config(**changes)
    assert said in str(error.value)


def test_a_later_position_than_were_learned_is_refused() -> None:
    with pytest.raises(UsageError, match="position 48 came to a model with 48 learned positions"):
        model(positions="learned")(torch.zeros(1, 49, dtype=torch.long))


def test_learned_positions_count_positions_and_not_tokens() -> None:
    made, documents = model(positions="learned"), [torch.randint(0, 40, (1, n)) for n in (30, 25)]
    places = torch.cat([torch.arange(30), torch.arange(25)])[None]
    packed = made(torch.cat(documents, 1), position_ids=places).logits
    torch.testing.assert_close(packed, torch.cat([made(d).logits for d in documents], 1), rtol=0, atol=1e-4)


def test_the_loss_of_labels_is_the_mean_over_the_next_tokens_that_count() -> None:
    made = model(mixer="ssmax")
    ids = torch.randint(0, 40, (2, 7))
    labels = ids.clone()
    labels[1, 4:] = -100
    out = made(ids, labels=labels, use_cache=False)
    log = out.logits.double().log_softmax(-1)
    nll = [-log[b, i, ids[b, i + 1]] for b in range(2) for i in range(6) if b == 0 or i < 3]
    torch.testing.assert_close(out.loss.double(), torch.stack(nll).mean(), rtol=1e-6, atol=1e-6)
    part = made(ids, labels=labels, use_cache=False, num_items_in_batch=20)  # a part of a larger batch
    torch.testing.assert_close(part.loss.double(), torch.stack(nll).sum() / 20, rtol=1e-6, atol=1e-6)


def test_the_last_hidden_state_is_the_one_behind_the_final_norm() -> None:
    out = model().model(torch.randint(0, 40, (2, 9)), output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)


def test_what_the_config_says_of_outputs_is_heard() -> None:
    made, ids = model(), torch.randint(0, 40, (2, 9))
    assert made(ids).past_key_values.get_seq_length() == 9
    assert made(ids, use_cache=False).past_key_values is None
    logits, cache = made(ids, return_dict=False)
    assert logits.shape == (2, 9, 40)
    assert isinstance(cache, DynamicCache)
    made.config.use_cache = False
    made.config.output_hidden_states = made.config.output_attentions = True
    out = made(ids)
    assert out.past_key_values is None
    assert len(out.hidden_states) == 3
    assert len(out.attentions) == 2
    made.config.return_dict = False
    assert isinstance(made(ids), tuple)


@pytest.mark.parametrize("mixer", ["softmax", "ssmax", "sigmoid", "sima"])
def test_gradients_flow_through_the_weights_that_are_returned(mixer: str) -> None:
    out = model(mixer=mixer)(torch.randint(0, 40, (1, 7)), output_attentions=True)
    gradients = torch.autograd.grad(out.logits[0, -1].max(), out.attentions)
    assert all(g.abs().max() > 0 for g in gradients)


@pytest.mark.parametrize("mixer", MIXERS)
def test_padded_documents_in_a_row_are_what_they_are_alone(mixer: str) -> None:
    """Padding before, between and after them; what stands there as token and as position is any."""
    made = model(mixer=mixer)
    first, second = torch.randint(1, 40, (1, 5)), torch.randint(1, 40, (1, 6))
    junk = torch.full((1, 2), 7)
    row = torch.cat([junk, first, junk, second, junk], 1)
    mask = torch.tensor([[0] * 2 + [1] * 5 + [0] * 2 + [1] * 6 + [0] * 2])
    places = torch.cat([torch.zeros(2), torch.arange(5), torch.ones(2), torch.arange(6), torch.zeros(2)])
    out = made(row, attention_mask=mask, position_ids=places.long()[None]).logits
    torch.testing.assert_close(out[:, 2:7], made(first).logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(out[:, 9:15], made(second).logits, rtol=0, atol=1e-4)


def test_padding_inside_a_text_does_not_cut_it() -> None:
    made, ids = model(mixer="ssmax"), torch.randint(1, 40, (1, 9))
    row = torch.cat([ids[:, :4], torch.full((1, 3), 7), ids[:, 4:]], 1)
    mask = torch.tensor([[1] * 4 + [0] * 3 + [1] * 5])
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    out = made(row, attention_mask=mask, position_ids=places).logits
    torch.testing.assert_close(out[mask.bool()], made(ids).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mixer", ["softmax", "ssmax", "sigmoid", "sima"])
def test_texts_may_share_a_prefix_by_a_mask(mixer: str) -> None:
    made = model(mixer=mixer)
    prefix, ends = torch.randint(1, 40, (1, 4)), torch.randint(1, 40, (2, 3))
    mask = torch.ones(10, 10).tril().bool()
    mask[7:, 4:7] = False  # the second end does not see the first
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4, 5, 6]])
    row = torch.cat([prefix, ends[:1], ends[1:]], 1)
    out = made(row, attention_mask=mask[None, None], position_ids=places).logits
    apart = made(torch.cat([prefix.expand(2, -1), ends], 1)).logits[:, 4:]
    torch.testing.assert_close(out[0, 4:].view(2, 3, -1), apart, rtol=0, atol=1e-4)


def test_packed_documents_leave_no_cache_to_go_on_from() -> None:
    made, ids, places = model(), torch.randint(1, 40, (1, 6)), torch.arange(3).repeat(2)[None]
    assert made(ids, position_ids=places).past_key_values is None
    with pytest.raises(UsageError, match="packed documents came with a cache"):
        made(ids, position_ids=places, use_cache=True)


def test_one_graph_serves_other_lengths_and_batches() -> None:
    for mixer in ("softmax", "sigmoid"):
        made = model(mixer=mixer, num_hidden_layers=1)
        torch._dynamo.reset()
        graphs = torch._dynamo.testing.CompileCounterWithBackend("eager")
        compiled = torch.compile(made, fullgraph=True, backend=graphs)
        with torch.no_grad():
            for shape in ((2, 7), (2, 20), (3, 9), (4, 31), (5, 17)):
                ids = torch.randint(0, 40, shape)
                expected = made(ids, use_cache=False).logits
                torch.testing.assert_close(
                    compiled(ids, use_cache=False).logits, expected, rtol=0, atol=1e-4
                )
        assert graphs.frame_count <= 3  # the first shape, another length, another batch


def test_scalars_that_a_folder_lacks_start_as_in_a_new_model(tmp_path: Path) -> None:
    made = model(mixer="softmax")
    made.save_pretrained(tmp_path)
    spec = "ssmax+drift(kind='gate')"
    started = LangevinForCausalLM.from_pretrained(tmp_path, mixer=spec)
    fresh = dict(LangevinForCausalLM(config(mixer=spec)).named_parameters())
    for name, p in started.named_parameters():
        expected = fresh[name] if ".scalars." in name else made.get_parameter(name)
        assert torch.equal(p, expected), name


@pytest.mark.parametrize("kind", ["content", "recurrent"])
def test_the_gates_of_a_new_model_let_through_what_is_heard(kind: str, tmp_path: Path) -> None:
    mixer = f"neighbor(kind='{kind}'{', mean=True' if kind == 'content' else ''})"
    made = LangevinForCausalLM(config(mixer=mixer))
    for block in made.model.blocks:
        into = getattr(block.attention.langevin, kind).into
        b, v, c, *f = into.bias.chunk(into.out_features // into.in_features)
        torch.testing.assert_close(torch.nn.functional.silu(c), torch.ones_like(c), rtol=0, atol=1e-4)
        assert not any(x.any() for x in (b, v, *f))
        if kind == "content":
            assert torch.equal(
                block.attention.langevin.content.taps[-into.in_features :], torch.ones_like(c)
            )
        torch.nn.init.zeros_(into.bias)
    made.save_pretrained(tmp_path)
    again = LangevinForCausalLM.from_pretrained(tmp_path)
    assert not again.get_parameter(f"model.blocks.0.attention.langevin.{kind}.into.bias").any()


def test_weights_of_distances_that_do_not_fit_start_anew(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LangevinForCausalLM(config(mixer="neighbor(kind='content', iters=2)")).save_pretrained(tmp_path)
    wider = config(mixer="neighbor(kind='content', iters=3, mean=True)")
    made = LangevinForCausalLM.from_pretrained(tmp_path, config=wider, ignore_mismatched_sizes=True)
    for block in made.model.blocks:
        near, far = block.attention.langevin.content.taps.view(5, -1).split([4, 1])
        assert near.std().item() == pytest.approx(0.5, rel=0.2)
        assert torch.equal(far, torch.ones_like(far))


def test_a_weight_that_a_folder_lacks_is_missed(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.blocks.1.attention.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WorkError, match=r"1 missing keys.*blocks\.1\.attention\.q_proj"):
        LangevinForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(WorkError, match="missing keys"):
        LangevinForCausalLM.from_pretrained(tmp_path, mixer="neighbor")


def test_scalars_come_back_to_float32_from_double_precision() -> None:
    made = LangevinForCausalLM(config(mixer="ssmax")).double().half()
    assert made.model.blocks[0].attention.langevin.scalars.s.dtype == torch.float32
    assert made.lm_head.weight.dtype == torch.float16


def test_names_of_weights_are_those_of_version_0_1() -> None:
    """Saved runs still load."""
    names = {
        name
        for name, _ in LangevinForCausalLM(config(mixer=["ssmax+drift", "neighbor"])).named_parameters()
    }
    assert {name for name in names if "attention" in name} == {
        *(f"model.blocks.0.attention.{part}_proj.weight" for part in "qkvo"),
        "model.blocks.0.attention.o_proj.bias",
        "model.blocks.0.attention.langevin.scalars.s",
        "model.blocks.0.attention.langevin.wrappers.scalars.0.gain",
        "model.blocks.1.attention.langevin.steps.0.taps.weight",
        *(
            f"model.blocks.1.attention.langevin.steps.0.{part}.{kind}"
            for part in ("up", "down", "norm")
            for kind in ("weight", "bias")
        ),
    }


@pytest.mark.parametrize("first", ["langevin", "transformers", "langevin.models.backbone"])
def test_importing_langevin_is_enough_for_the_auto_classes(first: str, tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    lines = ["import langevin", "from transformers import AutoModelForCausalLM"]
    check = f"print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)"
    script = [lines[1] if first == "transformers" else f"import {first}", *lines, check]
    if first == "langevin":
        script.insert(1, "import sys; assert not {'torch', 'transformers'} & set(sys.modules)")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "LangevinForCausalLM"


@pytest.mark.parametrize(
    "mixer", ["ssmax", "heat(t='adaptive')+drift(kind='gate')", "sima+drift", "neighbor+drift"]
)
def test_an_offloaded_model_computes_the_same(mixer: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    made, ids = model(mixer=mixer), torch.randint(1, 40, (2, 6))
    before = made(ids).logits
    accelerate.cpu_offload(made, execution_device="cpu")
    assert next(made.model.blocks[0].attention.parameters()).device.type == "meta"
    assert torch.equal(made(ids).logits, before)
