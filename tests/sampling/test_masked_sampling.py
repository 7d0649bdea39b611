"""Texts come out of masks as the model says, in any order, around what is given."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import langevin
from enumerable import BlockDenoiser, ExactDenoiser, L, Tokens, V, markov
from langevin import cli
from langevin.errors import Diverged, UsageError
from langevin.objectives.masked import Masked
from langevin.runs import train
from langevin.sampling import denoising
from langevin.sampling.canvas import Canvas
from langevin.sampling.denoising import Denoising
from langevin.sampling.masked import MaskedSampling, generate
from langevin.sampling.orders import remasking
from langevin.sampling.text import Request, Step, Text
from objectives.test_masked import tiny
from training.small_run import small

ORDERS = ("ancestral", "first-hitting", "confidence", "margin", "entropy", "threshold")
OPEN = Canvas([V] * L, [True] * L)
COUNT = 6000


def written(
    model: Any,
    canvas: Canvas = OPEN,
    count: int = COUNT,
    share: Any = None,
    block: Any = None,
    **options: Any,
) -> Tensor:
    sampling = MaskedSampling(**{"temperature": 1.0, **options})
    more = {"block": block} if share is None else {"masked_share": share}
    writing = Denoising(model, [canvas] * count, sampling, list(range(count)), **more)
    while bool(writing.writing_B.any()):
        writing.step()
    assert int(writing.ids_BL.max()) < V  # the mask is never written
    return writing.ids_BL


@pytest.fixture(scope="module")
def floor() -> float:
    """How far as many true draws are from the truth."""
    model = markov()
    return model.distance(model.drawn(COUNT))


@pytest.mark.parametrize("schedule", ["linear", "cosine-a", "cosine-b", "polynomial"])
def test_many_ancestral_steps_sample_from_the_truth(schedule: str, floor: float) -> None:
    model = markov()
    texts = written(model, order="ancestral", steps=300, share=Masked(schedule).masked_share)  # type: ignore[arg-type]
    assert model.distance(texts) < floor + 0.02
    assert model.calls <= 300


def test_first_hitting_samples_from_the_truth_with_a_call_for_each_token(floor: float) -> None:
    model = markov()
    hit = written(model, order="first-hitting")
    assert model.distance(hit) < floor + 0.02
    assert model.calls == L


def test_first_hitting_is_the_limit_of_ancestral_steps() -> None:
    """Where no two positions fall into one step, a seed gives the very same text."""
    hit = written(markov(), count=300, order="first-hitting")
    stepped = written(markov(), count=300, order="ancestral", steps=3000)
    assert int((hit != stepped).any(-1).sum()) < 5


@pytest.mark.parametrize("order", ["first-hitting", "confidence", "margin", "entropy"])
def test_a_step_commits_one_of_each_so_many_neighbours_and_is_nearer_to_the_truth(order: Any) -> None:
    """Neighbours depend on each other the most, and are not drawn as if each were alone."""
    model = markov()
    sampling = MaskedSampling(order=order, steps=2)
    writing = Denoising(model, [OPEN] * COUNT, sampling, list(range(COUNT)))
    writing.step()
    assert ((writing.ids_BL != V).unflatten(1, (2, 2)).sum(-1) == 1).all()
    writing.step()
    assert not writing.writing_B.any()
    drawn = written(model, order="ancestral", steps=2)
    assert model.distance(writing.ids_BL) < 0.8 * model.distance(drawn)


@pytest.mark.parametrize("window", [1, 2])
def test_a_window_writes_from_left_to_right_and_samples_from_the_truth(window: int, floor: float) -> None:
    model = markov()
    sampling = MaskedSampling(order="first-hitting", window=window)
    writing = Denoising(model, [OPEN] * COUNT, sampling, list(range(COUNT)))
    for step in range(L):
        assert ((writing.ids_BL != V).sum(-1) == step).all()
        assert (writing.ids_BL[:, step + window - 1 :] == V).all()
        writing.step()
    assert model.distance(writing.ids_BL) < floor + 0.02
    assert model.calls == L


def test_a_window_holds_at_least_what_a_step_has_to_commit() -> None:
    sampling = MaskedSampling(order="confidence", window=1, steps=2)
    writing = Denoising(markov(), [OPEN] * 9, sampling, list(range(9)))
    writing.step()
    assert ((writing.ids_BL != V) == torch.tensor([True, True, False, False])).all()
    writing.step()
    assert not writing.writing_B.any()


@pytest.mark.parametrize("order", ["first-hitting", "confidence"])
def test_nothing_is_written_behind_the_end_of_a_text_and_its_steps_go_before_it(order: Any) -> None:
    model, ended = markov(), Canvas([V, V, 1, V], [True] * L)
    sampling = MaskedSampling(order=order, steps=2)
    writing = Denoising(model, [ended] * 50, sampling, list(range(50)), ends=[1])
    writing.step()
    assert ((writing.ids_BL[:, :2] != V).sum(-1) == 1).all()  # 1 of 2, not 2 of 3
    writing.step()
    assert not writing.writing_B.any()
    assert (writing.ids_BL[:, 3] == V).all()
    assert writing.end_B.max() <= 3


@pytest.mark.parametrize("block", [1, 2, L])
def test_block_after_block_samples_from_the_truth(
    block: int, floor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a call for each token, and one more to keep a block that another follows."""
    monkeypatch.setattr(denoising, "StaticCache", Tokens)
    model = markov(BlockDenoiser)
    texts = written(model, block=block, order="first-hitting")
    assert model.distance(texts) < floor + 0.02
    assert model.calls == L + L // block - 1


REMASKS = ("cap", "rescale", "conf", "loop")


@pytest.mark.parametrize("remask", REMASKS)
def test_opening_positions_again_does_not_change_what_is_sampled(remask: Any, floor: float) -> None:
    texts = written(markov(), order="ancestral", steps=200, remask=remask, eta=0.1)
    assert markov().distance(texts) < floor + 0.02


@pytest.mark.parametrize("remask", ["none", *REMASKS])
def test_only_what_is_opened_again_can_be_repaired(remask: Any) -> None:
    model, count = markov(), 1000
    sampling = MaskedSampling(order="ancestral", steps=100, remask=remask, eta=0.3)
    writing = Denoising(model, [OPEN] * count, sampling, list(range(count)))
    for _ in range(50):
        writing.step()
    unlikely = torch.tensor([0, 2, 2, 0])
    writing.ids_BL.copy_(torch.where(writing.ids_BL == V, V, unlikely))
    while bool(writing.writing_B.any()):
        writing.step()
    usual, found = (
        float(model.surprise(model.drawn(count)).mean()),
        float(model.surprise(writing.ids_BL).mean()),
    )
    assert found > usual + 1 if remask == "none" else found < usual + 0.4


def test_sweeps_lead_to_the_truth_from_any_text_and_stay_there(floor: float) -> None:
    """Each call opens a token of these short texts and draws it given the others."""
    model = markov()
    alone = written(model, order="ancestral", steps=1)
    assert model.distance(alone) > floor + 0.1
    model.calls = 0
    swept = written(model, order="ancestral", steps=1, sweeps=6)
    assert model.distance(swept) < floor + 0.02
    assert model.calls == 1 + 6 * L
    assert model.distance(written(model, order="first-hitting", sweeps=1)) < floor + 0.02


@pytest.mark.parametrize("order", ORDERS)
def test_sweeps_begin_when_a_text_is_whole_and_leave_what_is_given_and_where_it_ends(order: Any) -> None:
    model, canvas = markov(), Canvas([V, 0, V, 1], [True, False, True, True])
    sampling, frames = MaskedSampling(order=order, sweeps=3), list[tuple[int, Step]]()
    seeds = list(range(40))
    writing = Denoising(
        model,
        [canvas] * 40,
        sampling,
        seeds,
        ends=[1],
        watched=lambda row, step: frames.append((row, step)),
    )
    draft: dict[int, list[int]] = {}
    before = writing.ids_BL.clone()
    while bool(writing.writing_B.any()):
        writing.step()
        opened = (writing.ids_BL == V) & (before != V)
        assert not (opened & (before == 1)).any()
        before = writing.ids_BL.clone()
        for row in (writing.turn_B == 1).nonzero().flatten().tolist():
            draft.setdefault(row, [step.tokens for at, step in frames if at == row][-1])
    plain = Denoising(model, [canvas] * 40, MaskedSampling(order=order), seeds, ends=[1])
    while bool(plain.writing_B.any()):
        plain.step()
    assert all(row[: len(draft[i])] == draft[i] for i, row in enumerate(plain.ids_BL.tolist()))
    for row, end in enumerate(writing.end_B.tolist()):
        assert end == len(draft[row])
        now = writing.ids_BL[row, :end].tolist()
        assert now[1:2] == [0][: end - 1]
        assert now.index(1) == end - 1  # no other end was drawn
        shown = [step.tokens for at, step in frames if at == row]
        first = shown.index(draft[row])
        assert all(V not in tokens for tokens in shown[first:])
        assert torch.equal(writing.ids_BL[row, end:], plain.ids_BL[row, end:])
    assert not torch.equal(writing.ids_BL, plain.ids_BL)


def test_a_turn_of_a_sweep_opens_no_neighbours_of_the_one_before() -> None:
    model, places = tiny().eval(), list[list[int]]()
    canvas = Canvas([10] * 16, [True] * 16)
    writing = Denoising(model, [canvas], MaskedSampling(order="ancestral", steps=1, sweeps=1), [0])
    while bool(writing.writing_B.any()):
        writing.step()
        places.append((writing.ids_BL[0] == 10).nonzero().flatten().tolist())
    assert [p % 8 for p, _ in places[:-1]] == [0, 3, 6, 1, 4, 7, 2, 5]
    assert all(last - first == 8 for first, last in places[:-1])


def test_the_last_step_commits_all_whatever_is_rounded() -> None:
    m = torch.linspace(1e-6, 1, 10_001, dtype=torch.float64)[:, None]
    p, committed = torch.rand(len(m), 4, dtype=torch.float64), torch.rand(len(m), 4) < 0.5
    for kind in REMASKS:
        opens, commits = remasking(kind, 0.3, m, torch.zeros_like(m), p, committed)
        assert not opens.any()
        assert (commits == 1).all()


def test_a_loop_opens_positions_only_while_time_stands_still() -> None:
    m = torch.tensor([[0.5], [0.1]], dtype=torch.float64)
    after = torch.tensor([[0.4], [0.1]], dtype=torch.float64)
    opens, _ = remasking("loop", 0.03, m, after, torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool))
    assert opens.tolist() == [[0.0], [0.03]]


def test_confidence_opens_none_more_likely_than_what_leaves_the_share_as_it_is() -> None:
    m, after, p = torch.tensor([[0.5]]), torch.tensor([[0.1]]), torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    opens, commits = remasking("conf", 1.0, m, after, p, torch.ones(1, 4, dtype=torch.bool))
    assert opens[0, 0] == opens.max() == pytest.approx(0.2)  # σ_max
    assert 0.5 * (1 - float(commits)) + 0.5 * float(opens.mean()) == pytest.approx(0.1)


def test_one_step_draws_every_position_as_if_it_were_alone(floor: float) -> None:
    model = markov()
    texts = written(model, order="ancestral", steps=1)
    assert model.calls == 1
    assert model.distance(texts) > floor + 0.2
    marginal = torch.stack([(texts[:, 2] == v).double().mean() for v in range(V)])
    true = torch.stack([model.p[model.texts[:, 2] == v].sum() for v in range(V)])
    assert float((marginal - true).abs().max()) < 0.03


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [0, 2, 50])
def test_what_is_given_stays_and_texts_are_likely_given_it(order: Any, steps: int) -> None:
    model = markov()
    texts = written(model, Canvas([V, 1, V, 2], [True, False, True, False]), 500, order=order, steps=steps)
    assert (texts[:, 1] == 1).all()
    assert (texts[:, 3] == 2).all()
    if steps != 2 or order != "ancestral":
        given = model.p * (model.texts[:, 1] == 1) * (model.texts[:, 3] == 2)
        p = given / given.sum()
        seen = torch.bincount(model.number(texts), minlength=V**L) / 500
        assert float((seen - p).abs().sum() / 2) < 0.12


@pytest.mark.parametrize("order", ["confidence", "margin", "entropy", "threshold"])
def test_orders_commit_first_where_the_model_is_surest(order: Any) -> None:
    model = markov()
    likeliest = model.texts[model.p.argmax()]
    texts = written(model, count=20, order=order, temperature=0.0)
    assert (texts == texts[0]).all()
    assert float(model.p[model.number(texts[:1])]) >= 0.5 * float(model.p.max())
    assert likeliest.shape == texts[0].shape


def test_a_threshold_commits_all_that_is_sure_at_once() -> None:
    sure = torch.full((V**L,), 1e-9, dtype=torch.float64)
    sure[17] = 1.0
    model = ExactDenoiser(sure / sure.sum())
    texts = written(model, count=10, order="threshold", threshold=0.9)
    assert model.calls == 1
    assert (model.number(texts) == 17).all()


def test_a_prediction_stands_where_nothing_changed() -> None:
    """2.12 of 1,000 steps of one text need no more calls than it has tokens."""
    model = markov()
    written(model, count=1, order="ancestral", steps=1000)
    assert model.calls <= L


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writing")
    changes = {"objective": "masked", "mixer": "softmax", "dropout": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(folder / "cache"))
        config = small(folder, steps=60, lr=1e-2, context=48, **changes)
        return train(config, folder / "run", quiet=True)[0].path


PROMPTS = ([], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [4] * 5)


@pytest.mark.parametrize("mixer", ["softmax", "ssmax", "sigmoid", "heat(t='adaptive', distance='squared')"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_a_cache_of_blocks_changes_no_prediction(mixer: str, dtype: torch.dtype, close: float) -> None:
    model, objective = tiny(mixer=mixer, num_key_value_heads=1).to(dtype).eval(), Masked(block=4)
    canvases = [
        Canvas(p + [10] * (16 - len(p)), [False] * len(p) + [True] * (16 - len(p)), len(p))
        for p in PROMPTS[1:]
    ]
    writing = Denoising(model, canvases, MaskedSampling(order="margin"), [1, 2, 3], block=4)
    blocks = set()
    while bool(writing.writing_B.any()):
        writing._predict()
        here, hidden = writing.here, writing.ids_BL == 10
        tokens = torch.where(hidden, 0, writing.ids_BL)
        with torch.no_grad():
            whole, _ = objective.predicted(
                model, {"tokens": torch.nn.functional.pad(tokens, (1, 0))}, hidden
            )
        mine = hidden[:, here].any(-1) & writing.writing_B
        torch.testing.assert_close(writing.logits_BLV[mine], whole[mine, here], rtol=close, atol=close)
        blocks.add(here.start)
        writing.stale = False
        writing.step()
    assert blocks == {0, 4, 8, 12}
    assert writing.calls == 16 - 3 + 3


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 90), ({"order": "ancestral"}, 75), ({"order": "ancestral", "remask": "conf", "eta": 0.2}, 170)],
)
def test_a_step_launches_few_operations_besides_its_call(
    options: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host launches them one by one while the recorded network waits."""
    writing = Denoising(tiny().eval(), [Canvas([10] * 24, [True] * 24)], MaskedSampling(**options), [0])
    counted = Counted()
    monkeypatch.setattr(writing, "_call", counted.without(writing._call))
    writing.step()
    with counted:
        for _ in range(8):
            writing.step()
    assert counted.operations / 8 < most


class Counted(TorchDispatchMode):
    """Counts the operations that torch does, but for those of a function."""

    operations, counts = 0, True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += self.counts
        return function(*args, **(kwargs or {}))

    def without(self, function: Callable[[], None]) -> Callable[[], None]:
        def uncounted() -> None:
            self.counts = False
            function()
            self.counts = True

        return uncounted


def test_whole_blocks_of_a_prompt_are_read_at_once() -> None:
    model = tiny().eval()
    canvas = Canvas([1] * 9 + [10] * 3, [False] * 9 + [True] * 3, 9)
    alone = Denoising(model, [canvas], MaskedSampling(), [5], block=4)
    together = Denoising(model, [canvas, Canvas([10] * 12, [True] * 12)], MaskedSampling(), [5, 6], block=4)
    assert alone.here == slice(8, 12)
    assert together.here == slice(0, 4)
    for writing in (alone, together):
        while bool(writing.writing_B.any()):
            writing.step()
    assert torch.equal(alone.ids_BL[0], together.ids_BL[0])


@pytest.mark.parametrize("steps", [4, 7, 10, 13, 16])
def test_steps_are_spread_over_blocks(steps: int) -> None:
    canvas = Canvas([10] * 16, [True] * 16)
    sampling = MaskedSampling(order="confidence", steps=steps)
    writing = Denoising(tiny().eval(), [canvas], sampling, [5], block=4)
    taken = 0
    while bool(writing.writing_B.any()):
        writing.step()
        taken += 1
    assert taken == steps
    assert writing.calls == steps + 3  # and one to keep each block that another follows


def test_what_was_written_leaves_no_memory_behind() -> None:
    """A graph's memory is large, and nobody knows when Python looks for circles."""
    writing = Denoising(markov(), [OPEN], MaskedSampling(), [0])
    writing.step()
    known = weakref.ref(writing)
    gc.disable()
    try:
        del writing
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("watched", [None, lambda row, step: None])
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"temperature": 0.0}, {"top_p": 0.9}, {"steps": 1, "sweeps": 1}),
        {"steps": 1, "order": "ancestral", "remask": "conf", "eta": 0.2},
    ],
)
def test_a_model_that_diverged_writes_nothing(options: Any, watched: Any) -> None:
    model = tiny().eval()
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    canvas, sampling = Canvas([10] * 4, [True] * 4), MaskedSampling(**options)
    with pytest.raises(Diverged, match="not finite"):
        Denoising(model, [canvas], sampling, [0], watched=watched).step()


@pytest.mark.parametrize("block", [None, 4])
def test_what_a_graph_would_replay_stays_in_its_place(block: int | None) -> None:
    """And a text is the same whether all texts are read in a call or those that changed."""
    model, found = tiny().eval(), []
    canvases = [
        Canvas(p + [10] * (12 - len(p)), [False] * len(p) + [True] * (12 - len(p))) for p in PROMPTS
    ]
    for all_rows in (False, True):
        writing = Denoising(model, canvases, MaskedSampling(order="ancestral"), [1, 2, 3, 4], block=block)
        writing.all_rows = writing.all_rows or all_rows
        places = set()
        while bool(writing.writing_B.any()):
            writing.step()
            read = (writing.input_BN, writing.stale_B, writing.logits_BLV)
            places.add(tuple(x.data_ptr() for x in read if x is not None))
        found.append(writing.ids_BL)
        assert len(places) == 1
    assert torch.equal(*found)


@pytest.fixture(scope="module")
def of_blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("blocks")
    changes = {"objective": "masked(block=8)", "mixer": "softmax", "dropout": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(folder / "cache"))
        made = train(small(folder, steps=60, lr=1e-2, context=48, **changes), folder / "run", quiet=True)[0]
    opened = langevin.load(made.path)
    return opened.model.double(), opened.tokenizer


def in_blocks(loaded: Any, requests: list[Request], batch: int = 16, **options: Any) -> list[Text]:
    return generate(*loaded, requests, MaskedSampling(**options), batch=batch, context=48, block=8)


@pytest.mark.parametrize(
    "options",
    [
        {"order": "entropy", "steps": 20},
        {"order": "ancestral", "tokens": 60},
        {"order": "ancestral", "remask": "rescale", "eta": 0.3, "steps": 40},
    ],
)
def test_blocks_give_the_same_text_in_any_batch_and_around_any_prompt(
    of_blocks: Any, options: dict[str, Any]
) -> None:
    requests = [Request(prompt, seed) for prompt in ("Ann had", "", "Cleo gave one cup") for seed in (3, 4)]
    together = in_blocks(of_blocks, requests, **options)
    assert together == in_blocks(of_blocks, requests, batch=4, **options)
    assert together == [in_blocks(of_blocks, [request], **options)[0] for request in requests]
    assert all(t.text.startswith(t.prompt) for t in together)
    assert all(t.tokens == options.get("tokens", t.tokens) or t.ended == "end" for t in together)


def test_blocks_end_with_the_one_in_which_all_texts_have(of_blocks: Any) -> None:
    model, tokenizer = of_blocks
    end = tokenizer.eos_token_id

    class Ending:
        """Wants the end of a text at its tenth token."""

        config, device, calls = model.config, model.device, 0

        def __call__(self, *args: Any, past_key_values: Any, **options: Any) -> Any:
            at = 10 - int(past_key_values.layers[0].get_seq_length())
            out = model(*args, past_key_values=past_key_values, **options)
            out.logits[:, :, end] = -torch.inf
            if 0 <= at < 8:
                out.logits[:, at, end] = 1e4
            self.calls += 1
            return out

    ending = Ending()
    found = in_blocks((ending, tokenizer), [Request("Ann"), Request("Bob")])
    assert [(t.ended, t.tokens) for t in found] == [("end", 8)] * 2
    assert ending.calls <= 5 + 1 + 8
    assert {t.tokens for t in in_blocks((ending, tokenizer), [Request("Ann")], fixed=True)} == {45}


def test_blocks_are_not_swept(of_blocks: Any) -> None:
    with pytest.raises(UsageError, match="which a model of blocks does not read"):
        in_blocks(of_blocks, [Request("Ann")], sweeps=1)


def test_a_gap_is_filled_within_its_block_or_refused(of_blocks: Any) -> None:
    infill = ("A___xy",)
    (text,) = in_blocks(of_blocks, [Request(infill[0])], infill=infill, tokens=3)
    assert text.text[0] == "A"
    assert text.text.endswith("xy")
    infill = ("A___xyz and more",)
    with pytest.raises(UsageError, match="without what is given in later blocks"):
        in_blocks(of_blocks, [Request(infill[0])], infill=infill, tokens=3)


@pytest.fixture(scope="module")
def loaded(run: Path) -> tuple[Any, Any]:
    opened = langevin.load(run)
    return opened.model.double(), opened.tokenizer


def texts(loaded: Any, requests: list[Request], batch: int = 16, **options: Any) -> list[Text]:
    return generate(*loaded, requests, MaskedSampling(**options), batch=batch, context=48)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 9},
        {"order": "confidence", "tokens": 60, "top_k": 5},
        {"order": "ancestral", "remask": "conf", "eta": 0.3, "steps": 40},
        {"order": "ancestral", "remask": "conf", "eta": 0.3, "steps": 20, "sweeps": 1},
        {"order": "threshold", "sweeps": 2},
    ],
)
def test_a_prompt_and_a_seed_give_the_same_text_in_any_batch(loaded: Any, options: dict[str, Any]) -> None:
    requests = [Request(prompt, seed) for prompt in ("Ann had", "", "Cleo gave one") for seed in (3, 4)]
    together = texts(loaded, requests, **options)
    assert together == texts(loaded, requests, batch=4, **options)
    assert together == [texts(loaded, [request], **options)[0] for request in requests]
    assert len({t.text for t in together}) == len(requests)
    assert all(t.text.startswith(t.prompt) for t in together)


def test_torch_s_own_random_stream_is_neither_read_nor_moved(loaded: Any) -> None:
    before = texts(loaded, [Request("Ann")], steps=5)
    state = torch.get_rng_state()
    torch.manual_seed(99)
    assert texts(loaded, [Request("Ann")], steps=5) == before
    torch.set_rng_state(state)
    texts(loaded, [Request("Ann")], steps=5)
    assert torch.equal(torch.get_rng_state(), state)


def test_gaps_are_filled_between_what_is_given(loaded: Any) -> None:
    infill = ("Ann had ___ cups. Ann gave ___ left.",)
    requests = MaskedSampling(infill=infill).requests((), range(2))
    first, second = texts(loaded, requests, infill=infill, tokens=9)
    for text in (first, second):
        assert text.text.startswith("Ann had")
        assert " cups. Ann gave" in text.text
        assert text.text.endswith(" left.")
        assert (text.tokens, text.ended) == (9, "length")
        between = loaded[1].decode(text.ids[:4]), loaded[1].decode(text.ids[4:])
        assert text.text == f"Ann had{between[0]} cups. Ann gave{between[1]} left."
    assert first.text != second.text


def test_a_text_ends_with_its_end_unless_its_length_is_fixed(loaded: Any) -> None:
    model, tokenizer = loaded
    end = tokenizer.eos_token_id

    class Ending:
        """Wants the end of a text at the tenth token."""

        config, device = model.config, model.device

        def __call__(self, *args: Any, **options: Any) -> Any:
            out = model(*args, **options)
            out.logits[:, :, end] = -torch.inf
            out.logits[:, 10, end] = 1e4
            return out

    (text,) = texts((Ending(), tokenizer), [Request("Ann")])
    assert text.ended == "end"
    assert text.tokens == 8
    (text,) = texts((Ending(), tokenizer), [Request("Ann")], fixed=True)
    assert text.tokens == 45
    (text,) = texts((Ending(), tokenizer), [Request("Ann ___.")], infill=("Ann ___.",), tokens=20)
    assert text.ended == "length"  # a gap does not end the text around it
    assert end not in text.ids


def test_a_trace_tells_every_step(loaded: Any) -> None:
    model, tokenizer = loaded
    mask, trace = model.config.mask_token_id, list[Step]()
    (text,) = generate(
        model,
        tokenizer,
        [Request("Ann")],
        MaskedSampling(steps=7, order="confidence", fixed=True),
        context=48,
        watched=lambda index, step: trace.append(step),
    )
    assert len(trace) == 8
    begin, *_, end = trace
    assert begin.committed == [0, 0, 0, *[None] * 45]
    assert begin.tokens[3:] == [mask] * 45
    assert begin.confidence[:4] == [1, 1, 1, 0]
    assert mask not in end.tokens
    assert tokenizer.decode(end.tokens, skip_special_tokens=True) == text.text
    assert set(end.committed) == set(range(8))
    for k, (before, after) in enumerate(pairwise(trace)):
        for was, now, at in zip(before.tokens, after.tokens, after.committed, strict=True):
            assert now == was or (was == mask and at == k + 1)
        assert all(0 <= c <= 1 for c in after.confidence)


def test_the_command_line_has_the_flags_of_the_sampler(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*command: str, status: int = 0) -> str:
        assert cli.main(["generate", *command]) == status
        out, err = capsys.readouterr()
        return err if status else out

    fast = ("--steps", "4", "--order", "entropy")
    assert said(str(run), "--prompt", "Ann", *fast).startswith("Ann")
    (found,) = json.loads(said(str(run), "--infill", "Ann ___ left.", *fast, "--json"))
    assert found["text"].endswith(" left.")
    assert "has no gap to fill" in said(str(run), "--infill", "Ann", status=2)
    both = said(str(run), "--infill", "Ann ___", "--prompt", "Ann", status=2)
    assert "a prompt or gaps, not both" in both
    assert "steps=-1 must be" in said(str(run), "--steps", "-1", status=2)
    sure = ("--order", "threshold", "--steps", "4")
    assert "takes the steps that it needs" in said(str(run), *sure, status=2)
    assert "window=-1 must be" in said(str(run), "--window", "-1", status=2)
    anywhere = ("--order", "ancestral", "--window", "1")
    assert "ancestral steps commit anywhere" in said(str(run), *anywhere, status=2)
    assert said(str(run), "--prompt", "Ann", "--window", "1").startswith("Ann")
    assert "sweeps=-1 must be" in said(str(run), "--sweeps", "-1", status=2)
    (found,) = json.loads(said(str(run), "--infill", "Ann ___ left.", *fast, "--sweeps", "2", "--json"))
    assert found["text"].endswith(" left.")
    assert found["calls"] == 4 + 2 * 8
    assert "goes with ancestral steps" in said(str(run), "--remask", "cap", status=2)
    loops = ("--order", "ancestral", "--remask", "loop")
    assert said(str(run), "--prompt", "Ann", *loops, "--eta", "0.05").startswith("Ann")
    assert "eta=2.0 must be" in said(str(run), *loops, "--eta", "2", status=2)
    assert "threshold=1.5 must be" in said(str(run), "--threshold", "1.5", status=2)
    assert "changes nothing without --order threshold" in said(str(run), "--threshold", "0.5", status=2)
    assert "changes nothing without --remask" in said(str(run), "--eta", "0.5", status=2)
    assert "temperature=-1.0 must be" in said(str(run), "--temperature", "-1", status=2)
    long = said(str(run), "--prompt", "Ann had " * 9, status=2)
    assert "0 tokens are to be written after a prompt of" in long
    few = said(str(run), "--infill", "Ann ___ had ___", "--tokens", "1", status=2)
    assert "1 tokens are to be written in 2 gaps" in few
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))
        ar = train(small(tmp_path, steps=4), tmp_path / "ar", quiet=True)[0].path
    told = said(str(ar), "--steps", "4", status=2)
    assert "--steps is for the objective masked" in told
    assert "was trained with ar" in told
    assert "--infill is for the objective masked" in said(str(ar), "--infill=x ___", status=2)


def test_wrong_options_are_refused_before_anything_is_written(loaded: Any) -> None:
    with pytest.raises(UsageError, match="has no gap to fill"):
        texts(loaded, [Request("x")], infill=("x",))
    with pytest.raises(UsageError, match="must be 0"):
        texts(loaded, [Request("x")], tokens=-1)
