"""Sparse distribution diffusion: candidates in the state, and a bound and samplers that are right."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import langevin
from enumerable import L, V, entropy, markov
from langevin import cli
from langevin.errors import UsageError
from langevin.evaluation.bounds import bounded, left_to_right
from langevin.mixers import MIXERS
from langevin.models.config import LangevinConfig
from langevin.models.cost import flops_of
from langevin.models.heads import LangevinForMaskedLM
from langevin.objectives import OBJECTIVES, generator_of
from langevin.objectives.masked import LEAST_TIME, Masked
from langevin.objectives.sparse import WRONG, Sparse, likeliest, slots
from langevin.runs import train
from langevin.sampling.canvas import Canvas
from langevin.sampling.masked import MaskedSampling
from langevin.sampling.text import Request
from langevin.studies import work
from training.small_run import dying_at_step, fingerprint, small, train_in_a_process

SOFT, FULL = Sparse(k=2), Sparse(state="full", k=3)
STATES = pytest.mark.parametrize("objective", [SOFT, FULL], ids=["soft", "full"])
ORDERS = ("ancestral", "first-hitting", "confidence", "margin", "entropy", "threshold")
COUNT = 6000
OPEN = Canvas([V] * L, [True] * L)
TEN = 10  # tokens of the vocabulary of tiny models


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))


class Exact:
    """The exact denoiser, called as a model that reads candidates. It has no use for soft ones; in
    a full state it knows a token by its probability alone: above 1/V, which others never are in so small a
    V."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, full: bool, training: bool = False) -> None:
        self.exact, self.full, self.training = markov(), full, training
        self.config = self.exact.config
        self.read: list[tuple[Tensor, Tensor]] = []

    def __call__(
        self,
        input_ids: Any = None,
        masked: Any = None,
        candidates: Any = None,
        probabilities: Any = None,
        **options: Any,
    ) -> Any:
        if candidates is not None:
            self.read.append((candidates, probabilities))
        if not self.full:
            return self.exact(input_ids, masked)
        best = probabilities.max(-1)
        ids = candidates.gather(-1, best.indices[..., None])[..., 0]
        return self.exact(torch.where(best.values > 1 / V + 1e-6, ids, V))


def with_a_first(texts: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(texts[:, :1]), texts], 1)


def tiny(objective: Masked, **changes: Any) -> LangevinForMaskedLM:
    torch.manual_seed(0)
    shape = {"vocab_size": TEN + 1, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LangevinConfig(**{**shape, "causal": False, **objective.model_settings(), **changes})
    model = LangevinForMaskedLM(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, TEN, shape, generator=generator_of(seed))


def sparse(objective: str = "sparse(k=3)", **changes: Any) -> dict[str, Any]:
    return {"objective": objective, "mixer": "softmax", "dropout": 0.0, **changes}


@STATES
@pytest.mark.parametrize("schedule", ["linear", "cosine-a"])
@pytest.mark.parametrize("training", [False, True], ids=["count form", "continuous time"])
def test_with_the_exact_denoiser_the_bound_is_the_entropy(
    objective: Sparse, schedule: Any, training: bool
) -> None:
    """The error is that of the masks: -ln p of the very texts is taken off."""
    objective = Sparse(schedule, state=objective.state, k=objective.k)
    model = Exact(objective.state == "full", training)
    excess = []
    for i, texts in enumerate(model.exact.drawn(9000).split(300)):
        summed, count = objective.loss(model, {"tokens": with_a_first(texts)}, generator_of(i))
        assert count == texts.numel()
        excess.append((float(summed) - float(model.exact.surprise(texts).sum())) / 300)
    mean, error = torch.tensor(excess).mean(), torch.tensor(excess).std() / math.sqrt(len(excess))
    assert abs(float(mean)) < 3 * float(error) + 2 * LEAST_TIME * L
    assert float(error) < 0.03 * entropy(model.exact.p)


@STATES
def test_evaluation_meets_the_masks_of_masked_and_the_chain_rule_is_exact(objective: Sparse) -> None:
    model = Exact(objective.state == "full")
    texts = model.exact.drawn(100)
    windows = [(with_a_first(texts), torch.ones(100, L, dtype=torch.bool))]
    found, same = (
        bounded(o, m, windows, masks=4, device="cpu") for o, m in ((objective, model), (Masked(), markov()))
    )
    assert (found.nll == same.nll).all()
    for _ in range(2):
        exact = left_to_right(objective, model, windows, rows=100, at_once=7, device="cpu")
        assert exact.nll.mean() == pytest.approx(float(model.exact.surprise(texts).mean()) / L, rel=1e-6)


@STATES
def test_a_model_that_knows_nothing_has_the_bound_log_v(objective: Sparse) -> None:
    model = tiny(objective)
    torch.nn.init.zeros_(model.lm_head.weight)
    summed, count = objective.loss(model.eval(), {"tokens": tokens(64, 65)}, generator_of(2))
    assert float(summed.detach() / count) == pytest.approx(math.log(TEN), rel=1e-6)


@STATES
def test_a_visible_token_never_scores(objective: Sparse) -> None:
    model, x = tiny(objective).eval(), tokens(8, 17)
    batch = {"tokens": x, **objective.draws({"tokens": x}, 8, generator_of(2))}
    shares = objective.upper_bound(model, batch)
    assert ((shares > 0).sum(-1) == (batch["times"] * 16).long() + 1).all()


@STATES
@pytest.mark.parametrize("training", [False, True])
def test_no_prediction_depends_on_a_token_that_is_masked(objective: Sparse, training: bool) -> None:
    """Not by the first call, either, in which all that is masked now was masked."""
    model, x = tiny(objective).train(training), tokens(8, 17)
    masked_BL = torch.rand(8, 16, generator=generator_of(3)) < 0.5
    batch = {"tokens": x, **objective.draws({"tokens": x}, 8, generator_of(2))}
    logits, _ = objective.predicted(model, batch, masked_BL)
    other = x.clone()
    other[:, 1:][masked_BL] = (other[:, 1:][masked_BL] + 1) % TEN
    changed, _ = objective.predicted(model, {**batch, "tokens": other}, masked_BL)
    assert torch.equal(logits, changed)
    assert logits.shape == (8, 16, TEN)
    seen, _ = objective.predicted(model, {**batch, "tokens": (x + 1) % TEN}, masked_BL)
    assert not torch.equal(logits, seen)


def test_without_candidates_it_is_masked_to_the_bit(tmp_path: Path) -> None:
    weights, found, texts = [], [], []
    for name in ("masked", "sparse(k=0)"):
        run, _ = train(small(tmp_path, **sparse(name, steps=6)), tmp_path / name[:6], quiet=True)
        weights.append({k: v.clone() for k, v in run.model.named_parameters()})
        windows = [(tokens(4, 17), torch.ones(4, 16, dtype=torch.bool))]
        found.append(bounded(run.objective, run.model, windows, masks=3, device="cpu").nll)
        sampling = MaskedSampling(steps=5, order="ancestral")
        texts.append(
            run.objective.sampler()(run.model, run.tokenizer, [Request("Ann")], sampling, context=16)
        )
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())
    assert (found[0] == found[1]).all()
    assert texts[0] == texts[1]


def test_soft_candidates_are_true_probabilities_and_count_at_masks_only() -> None:
    logits = torch.randn(2, 5, TEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = likeliest(logits, 3)
    expected = logits.softmax(-1).gather(-1, found["candidates"])
    torch.testing.assert_close(found["probabilities"], expected)
    assert (found["probabilities"].sum(-1) < 1).all()  # the rest is on the mask
    model, x = tiny(SOFT), tokens(2, 5)
    masked = torch.tensor([[True, False, True, False, False]] * 2)
    plain = model.model.embed(torch.where(masked, TEN, x))
    read = model._with_feedback(torch.where(masked, TEN, x), found["candidates"], found["probabilities"])
    assert torch.equal((read != plain).any(-1), masked)
    e = model.model.embed.weight
    at = found["probabilities"][1, 2] @ e[found["candidates"][1, 2]]
    torch.testing.assert_close(read[1, 2], e[TEN] + model.feedback.weight @ at)
    (gradient,) = torch.autograd.grad(read[masked].sum(), e)
    assert gradient.any(-1).nonzero().flatten().tolist() == [TEN]  # candidates train no embedding


def test_before_anything_is_learned_feedback_counts_for_nothing() -> None:
    shape = {"vocab_size": TEN + 1, "hidden_size": 16, "num_attention_heads": 2, "causal": False}
    x, masked = tokens(2, 9), torch.ones(2, 9, dtype=torch.bool)
    model = LangevinForMaskedLM(LangevinConfig(**shape, candidates="soft")).eval()
    first = model(x, masked).logits
    assert torch.equal(model(x, masked, **likeliest(first, 3)).logits, first)


def test_in_training_a_fixed_share_of_rows_gets_feedback_after_the_warm_up() -> None:
    objective, model, x = Sparse(k=2, feedback=0.75), Exact(full=False, training=True), tokens(8, L + 1) % V
    for progress, fed in ((0.0, []), (0.5, [1, 2, 3, 5, 6, 7])):
        model.read.clear()
        objective.loss(model, {"tokens": x, "progress": torch.tensor(progress)}, generator_of(1))
        ((_, p_BLK),) = model.read
        assert p_BLK.flatten(1).any(-1).nonzero().flatten().tolist() == fed
    assert objective.flops(tiny(objective), 8) == pytest.approx(1.25 * Masked().flops(tiny(objective), 8))
    assert Sparse(k=0).flops(tiny(objective), 8) == Masked().flops(tiny(objective), 8)


def test_the_state_before_hides_all_that_is_hidden_now_and_more() -> None:
    class Told(Exact):
        masks: list[Tensor] = []  # noqa: RUF012

        def __call__(self, *args: Any, **options: Any) -> Any:
            self.masks.append(options["masked"])
            return super().__call__(*args, **options)

    model, x = Told(full=False, training=True), tokens(400, L + 1) % V
    Sparse(k=2, feedback=1.0, gap=0.25).loss(model, {"tokens": x}, generator_of(1))
    before, now = model.masks
    assert (before | ~now).all()
    model.masks.clear()
    scored = torch.rand(400, L + 1, generator=generator_of(2)) < 0.5
    Sparse(k=2, feedback=1.0, gap=1.0).loss(model, {"tokens": x, "scored": scored}, generator_of(1))
    assert not any((mask & ~scored[:, 1:]).any() for mask in model.masks)  # context stays in sight
    assert 0 < float((before.float() - now.float()).mean()) < 0.25
    model.training = False
    model.masks.clear()
    Sparse(k=2).loss(model, {"tokens": x}, generator_of(1))
    assert torch.equal(*model.masks)


def test_a_full_state_is_the_forward_process() -> None:
    """And says no more of a token that is destroyed than that it is."""
    k, vocabulary, n = 5, 1000, 0.6
    x = torch.full((40, 500), 7)
    destroyed = torch.rand(40, 500, generator=generator_of(1)) < n**2
    random = torch.rand(40, 500, 2 * k + 1, generator=generator_of(2))
    found = slots(x, destroyed, torch.full((40,), n), random, vocabulary)
    ids, p = found["candidates"], found["probabilities"]
    right = 1 - WRONG * (k - 1)
    kept = torch.isclose(p, torch.tensor((1 - n) * right + n / vocabulary))
    wrong = torch.isclose(p, torch.tensor((1 - n) * WRONG + n / vocabulary))
    assert (kept.sum(-1) == ~destroyed).all()
    assert (ids[kept] == 7).all()
    assert torch.equal(p.argmax(-1)[~destroyed], kept.byte().argmax(-1)[~destroyed])
    swapped = p == 1 / vocabulary
    assert (kept | wrong | swapped).all()
    share = float(swapped.sum() - destroyed.sum()) / (x.numel() * (k - 1))
    assert share == pytest.approx(n * (1 - (1 - n) * WRONG / right), abs=0.01)
    places = kept.sum((0, 1)) / kept.sum()
    assert float((places - 1 / k).abs().max()) < 0.02  # slots are shuffled
    assert int(ids.max()) < vocabulary  # never the mask
    assert len(ids[~kept].unique()) == vocabulary
    other = slots(torch.where(destroyed, 8, x), destroyed, torch.full((40,), n), random, vocabulary)
    assert all(torch.equal(other[name], found[name]) for name in found)


def test_the_level_that_candidates_show_is_the_root_of_the_destroyed_share() -> None:
    """In training as in writing."""
    model, masked = Exact(full=True), torch.tensor([[True, False, False, False]])
    batch = {"tokens": torch.zeros(1, L + 1, dtype=torch.long)}
    FULL.predicted(model, {**batch, **FULL.draws(batch, 1, generator_of(1))}, masked)
    denoising(FULL, model, Canvas([V, 0, 0, 0], [True, False, False, False]), 1).step()
    n, right = 0.25**0.5, 1 - WRONG * (FULL.k - 1)
    for _, p in model.read:
        torch.testing.assert_close(p.amax(-1)[0, 1:], torch.full((3,), (1 - n) * right + n / V))


def test_at_most_noise_every_slot_is_one_over_v_and_a_mask_to_the_model() -> None:
    objective, x = Sparse(state="full", k=4), tokens(3, 7)
    batch = {"tokens": x, **objective.draws({"tokens": x}, 3, generator_of(1))}
    model, masked = tiny(objective), torch.ones(3, 6, dtype=torch.bool)
    found = slots(x[:, 1:], masked, torch.ones(3), batch["slots"], TEN)
    assert (found["probabilities"] == 1 / TEN).all()
    logits, _ = objective.predicted(model, batch, masked)
    others = objective.draws({"tokens": x}, 3, generator_of(9))
    torch.testing.assert_close(objective.predicted(model, {**batch, **others}, masked)[0], logits)


def test_candidates_grow_in_number_with_a_curriculum() -> None:
    objective = Sparse(state="full", k=8, curriculum=0.6)
    model, x = Exact(full=True, training=True), torch.zeros(2, L + 1, dtype=torch.long)
    for progress, held in ((0.0, 1), (0.3, 2), (0.5, 4), (0.7, 8)):
        drawn = {"times": torch.full((2,), 1e-3), "noise": torch.ones(2, L), "slots": torch.rand(2, L, 17)}
        objective.loss(model, {"tokens": x, "progress": torch.tensor(progress), **drawn})
        assert ((model.read[-1][1] != 1 / V).sum(-1) == held).all()


def test_slots_share_the_place_of_their_position_and_their_order_says_nothing() -> None:
    objective = Sparse(state="full", k=3)
    x = tokens(2, 8)
    drawn = objective.draws({"tokens": x}, 2, generator_of(1))
    masked = torch.rand(2, 7, generator=generator_of(2)) < 0.4
    found = slots(x[:, 1:], masked, torch.full((2,), 0.6), drawn["slots"], TEN)
    order = torch.rand(2, 7, 3, generator=generator_of(3)).argsort(-1)
    moved = {name: y.gather(-1, order) for name, y in found.items()}
    places = torch.tensor([[*range(3), *range(4)]] * 2)
    for name in MIXERS:
        if name == "neighbor":
            with pytest.raises(UsageError, match="several of them at one place"):
                tiny(objective, mixer=name)
            continue
        for positions in ("rope", "learned", "none"):
            model = tiny(objective, mixer=name, positions=positions).eval()
            torch.testing.assert_close(model(**moved).logits, model(**found).logits)
        packed = model(**found, position_ids=places).logits[:, :3]
        alone = model(**{key: y[:, :3] for key, y in found.items()}).logits
        torch.testing.assert_close(packed, alone)
        real = torch.tensor([[True] * 3 + [False] * 4] * 2)
        torch.testing.assert_close(model(**found, attention_mask=real).logits[:, :3], alone)
    model = tiny(objective, positions="rope").eval()
    turned = {key: y.flip(1) for key, y in found.items()}
    assert not torch.allclose(model(**turned).logits.flip(1), model(**found).logits)
    for wrong in ({"mixer": "heat(t=0.2, alpha=1.0)"}, {"positions": "alibi"}):
        with pytest.raises(UsageError, match="several of them at one place"):
            tiny(objective, **wrong)


def denoising(objective: Sparse, model: Any, canvas: Canvas, count: int, **options: Any) -> Any:
    sampling = MaskedSampling(**{"temperature": 1.0, **options})
    known = objective.sampler().keywords  # type: ignore[attr-defined]
    return known["denoising"](model, [canvas] * count, sampling, list(range(count)), known["masked_share"])


def written(
    objective: Sparse, model: Any, canvas: Canvas = OPEN, count: int = COUNT, **options: Any
) -> Tensor:
    writing = denoising(objective, model, canvas, count, **options)
    while bool(writing.writing_B.any()):
        writing.step()
    assert int(writing.ids_BL.max()) < V  # the mask is never written
    return writing.ids_BL


@STATES
@pytest.mark.parametrize(("order", "steps"), [("ancestral", 200), ("first-hitting", 0)])
def test_samplers_draw_from_the_truth(objective: Sparse, order: Any, steps: int) -> None:
    model = Exact(objective.state == "full")
    floor = model.exact.distance(model.exact.drawn(COUNT))
    texts = written(objective, model, order=order, steps=steps)
    assert model.exact.distance(texts) < floor + 0.02


@STATES
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_writes_around_what_is_given(objective: Sparse, order: Any) -> None:
    model = Exact(objective.state == "full")
    texts = written(
        objective, model, Canvas([V, 1, V, 2], [True, False, True, False]), order=order, count=300
    )
    assert (texts[:, 1] == 1).all()
    assert (texts[:, 3] == 2).all()
    given = model.exact.p * (model.exact.texts[:, 1] == 1) * (model.exact.texts[:, 3] == 2)
    seen = torch.bincount(model.exact.number(texts), minlength=V**L) / 300
    assert float((seen - given / given.sum()).abs().sum() / 2) < 0.12


def test_open_positions_carry_their_last_prediction_and_nothing_without_one() -> None:
    """Not what was predicted where a token stood: nobody learned to predict it there."""
    model = Exact(full=False)
    writing = denoising(SOFT, model, OPEN, 1, order="first-hitting")
    writing.step()
    chosen = (writing.ids_BL[0] != V).nonzero()[0]
    writing.step()
    (_, first), (candidates, p) = model.read
    assert not first.any()
    before = likeliest(markov()(torch.full((1, L), V)).logits, 2)
    assert torch.equal(candidates, before["candidates"])
    assert torch.equal(p, before["probabilities"])
    writing.ids_BL[0, chosen] = V
    writing.step()
    again, p = model.read[-1]
    assert torch.equal(again[0, chosen], before["candidates"][0, chosen])
    assert torch.equal(p[0, chosen], before["probabilities"][0, chosen])
    assert not torch.equal(p[0], before["probabilities"][0])  # of the others it is newer


def test_a_given_token_that_a_sweep_opens_carries_nothing_the_first_time() -> None:
    model = Exact(full=False)
    writing = denoising(SOFT, model, Canvas([0] * L, [True] * L), 1, sweeps=2)
    ever = torch.zeros(L, dtype=torch.bool)
    while bool(writing.writing_B.any()):
        opened, calls = writing.open_BL[0].clone(), len(model.read)
        writing.step()
        for _, p in model.read[calls:]:
            assert torch.equal(p[0].any(-1) & opened, ever & opened)
            ever |= opened
    assert ever.all()


@pytest.mark.parametrize("sweeps", [0, 2])
def test_a_text_is_the_same_whether_all_are_read_in_a_call_or_those_that_changed(sweeps: int) -> None:
    """A prediction that stands is not read again, with itself for feedback; nor is a text of which a turn
    of a sweep opens nothing."""
    model, found = tiny(SOFT).eval(), []
    canvases = [Canvas([1] * n + [TEN] * (12 - n), [False] * n + [True] * (12 - n)) for n in (0, 4, 9, 11)]
    known = SOFT.sampler().keywords
    for all_rows in (False, True):
        sampling = MaskedSampling(order="ancestral", steps=30, sweeps=sweeps)
        writing = known["denoising"](model, canvases, sampling, [1, 2, 3, 4], known["masked_share"])
        writing.all_rows, writing.weighs = all_rows, True
        while bool(writing.writing_B.any()):
            writing.step()
        found.append((writing.ids_BL, writing.confidence_BL))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_the_sampler_of_the_seed_collapses_and_ours_does_not() -> None:
    """Its state is the k likeliest tokens of each position by the prediction before, its next prediction
    the mean over what the other positions hold, and its text the likeliest candidates: no draw anywhere but
    the tokens that it starts from, which at 1/V say nothing. All starts end in one text."""
    exact, k, generator = markov(), 2, generator_of(3)
    texts = []
    for _ in range(20):
        candidates = torch.rand(L, V, generator=generator).topk(k).indices
        p = torch.full((L, k), 1 / V, dtype=torch.float64)
        for _ in range(25):
            rest = (1 - p.sum(-1, keepdim=True)) / (V - k)
            belief = rest.repeat(1, V).scatter(1, candidates, p)
            held = torch.stack([belief[i][exact.texts[:, i]] for i in range(L)])  # (L, texts)
            for i in range(L):
                others = torch.cat([held[:i], held[i + 1 :]]).prod(0)
                mean = torch.zeros(V, dtype=torch.float64).scatter_add(
                    0, exact.texts[:, i], exact.p * others
                )
                p[i], candidates[i] = (mean / mean.sum()).topk(k)
        texts.append(candidates[:, 0])
    collapsed = torch.stack(texts)
    assert len(collapsed.unique(dim=0)) == 1
    assert exact.distance(collapsed) > 0.7
    for objective in (SOFT, FULL):
        ours = written(objective, Exact(objective.state == "full"), count=400)
        assert len(ours.unique(dim=0)) > 20


@pytest.mark.parametrize(
    "objective", ["sparse(k=3, warmup=0.3)", "sparse(state='full', k=3, curriculum=0.8)"]
)
def test_killed_and_resumed_to_the_same_bits(tmp_path: Path, objective: str) -> None:
    config = small(tmp_path, **sparse(objective, mixer="heat(t='head')", dropout=0.1, ema=0.9))
    whole, _ = train(config, tmp_path / "whole", quiet=True)
    settings = tmp_path / "settings.yaml"
    settings.write_text(config.as_yaml())
    assert train_in_a_process(settings, tmp_path / "killed", dying_at_step(6)) != 0
    assert train_in_a_process(settings, tmp_path / "killed") == 0
    assert fingerprint(whole.path, 12) == fingerprint(tmp_path / "killed", 12)


@STATES
def test_parts_of_a_batch_add_up_in_low_precision_and_compiled(objective: Sparse) -> None:
    """As one graph without a break, with the gradients of the plain step; feedback adds to no weight but by
    the second pass."""
    model = tiny(objective).float().train()
    x = tokens(8, 17)
    batch = {
        "tokens": x,
        "progress": torch.tensor(0.5),
        **objective.draws({"tokens": x}, 8, generator_of(2)),
    }

    def step(part: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return objective.loss(model, part)[0]

    gradients = []
    for run in (step, torch.compile(step, backend="aot_eager", dynamic=False, fullgraph=True)):
        model.zero_grad()
        loss = run(batch)
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert float((ours - theirs).norm()) <= 0.03 * float(ours.norm())
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 3), slice(3, 8)):
        step({name: y[rows] if y.ndim else y for name, y in batch.items()}).backward()
    for ours, p in zip(gradients[0], model.parameters(), strict=True):
        assert float((ours - p.grad).norm()) <= 0.03 * float(ours.norm())


@pytest.mark.parametrize("objective", ["sparse(k=3)", "sparse(state='full', k=3)"])
def test_a_run_is_evaluated_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str
) -> None:
    config = small(tmp_path, **sparse(objective, steps=40, lr=1e-2))
    run, _ = train(config, tmp_path / "run", quiet=True)
    looks = [row["loss"] for row in run.metrics("valid")]
    assert looks[-1] < looks[0]
    assert run.model.config.candidates == run.objective.state
    again = langevin.from_pretrained(tmp_path / "run" / "model")
    assert type(again) is LangevinForMaskedLM
    assert all(torch.equal(x, y) for x, y in zip(again.parameters(), run.model.parameters(), strict=True))
    command = ["evaluate", str(run.path), "--masks", "2", "--left-to-right", "1", "--json"]
    assert cli.main(command) == 0
    first = capsys.readouterr().out
    assert {row["metric"]: row["kind"] for row in json.loads(first)["rows"]}["nll"] == "bound"
    assert cli.main(command) == 0
    assert capsys.readouterr().out == first
    sampling = MaskedSampling(steps=6)
    write, known = run.objective.sampler(), (run.model.double(), run.tokenizer)
    requests = [Request(prompt, seed) for prompt in ("Ann had", "", "Cleo") for seed in (3, 4)]
    together = write(*known, requests, sampling, context=16)
    assert together == [write(*known, [one], sampling, context=16)[0] for one in requests]
    assert len({text.text for text in together}) == len(requests)
    assert cli.main(["generate", str(run.path), "--infill", "Ann ___ left.", "--steps", "3"]) == 0
    assert capsys.readouterr().out.strip().endswith(" left.")


def test_two_passes_and_all_candidates_are_paid_for(tmp_path: Path) -> None:
    found = {}
    corpus = type("Corpus", (), {"vocab_size": 100, "separator": 0})()
    for spec in ("masked", "sparse(k=3)", "sparse(state='full', k=4)"):
        rows = work.sizes(small(tmp_path, **sparse(spec, width=64, heads=4)), corpus)
        found[spec] = {row.metric: row.value for row in rows}
    plain, soft, full = (row["flops_per_token"] for row in found.values())
    assert soft == pytest.approx(plain * 3.75 / 3, rel=0.2)  # and W
    assert full > 3.5 * plain
    head = 6 * 101 * 64
    model = LangevinForMaskedLM(
        LangevinConfig(vocab_size=101, hidden_size=64, num_hidden_layers=1, causal=False, candidates="full")
    )
    assert full == 4 * (flops_of(model, 4 * 16) - head) + head


def test_what_does_not_go_with_it_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(small(tmp_path, **sparse()).as_yaml())

    def refused(objective: str, *more: str) -> str:
        command = ["train", "--config", str(config), "--objective", objective, *more]
        assert cli.main([*command, "--out", str(tmp_path / "run")]) == 2
        told = capsys.readouterr().err
        assert "Traceback" not in told
        return told

    assert "more candidates than the vocabulary has tokens, 257" in refused("sparse(k=300)")
    assert "must have k 1 to 99" in refused("sparse(state='full', k=0)")
    assert "must have k 0 or more" in refused("sparse(k=-1)")
    assert "'soft' or 'full'" in refused("sparse(state='hard')")
    assert "gap=2.0) must be from 0 to 1" in refused("sparse(gap=2.0)")
    told = refused("sparse(k=2, feedback=0.2)", "--batch", "4")
    assert "feeds back to no row of a batch of 4" in told
    assert "--batch 5" in told
    assert "curriculum=0.5) changes nothing" in refused("sparse(curriculum=0.5)")
    assert "gap=0.5) changes nothing" in refused("sparse(state='full', gap=0.5)")
    assert "gap=0.5) changes nothing with state='soft' and k=0" in refused("sparse(k=0, gap=0.5)")
    assert OBJECTIVES.parse("sparse(state='full', gap=0.5)").gap == 0.5  # a run that has it can be read
    with pytest.raises(UsageError, match="sparse has no --init"):
        Sparse().check(small(tmp_path, init="gpt2"))
    assert "several of them at one place" in refused("sparse(state='full')", "--mixer", "neighbor")


@pytest.mark.parametrize("objective", [Masked(), SOFT, FULL], ids=["masked", "soft", "full"])
def test_what_the_rest_of_a_text_speaks_against_is_written_anew_and_all_else_stays(objective: Any) -> None:
    opening = MaskedSampling(order="ancestral", remask="cap", temperature=0.0)
    model, wrong = markov(), markov().drawn(200)
    wrong[::2, 1] = (wrong[::2, 1] + 1) % V
    repaired = objective.repaired(Exact(objective is FULL), wrong, opening)
    doubted = torch.zeros_like(wrong, dtype=torch.bool)
    for i in range(L):
        same = wrong[:, None, i] == model.texts[:, i]
        rest = (wrong[:, None] == model.texts).sum(-1) - same.long() == L - 1
        given = (rest & same).double() @ model.p / (rest.double() @ model.p)
        doubted[:, i] = given < same.double() @ model.p
    assert (repaired == wrong)[~doubted].all()
    assert not (repaired == wrong)[doubted].all()
    assert float(model.surprise(repaired).mean()) < float(model.surprise(wrong).mean()) - 0.3
    assert objective.repaired(model, wrong, MaskedSampling()) is None
