"""Masked diffusion: a bound that is one, whatever the schedule, and a run like any other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from enumerable import BlockDenoiser, ExactDenoiser, L, entropy, markov
from langevin import cli
from langevin.data.feed import chunks
from langevin.environment import can_compile
from langevin.evaluation.bounds import bounded, left_to_right
from langevin.mixers import MIXERS
from langevin.mixers.mechanism import DIRECTIONS
from langevin.models.config import LangevinConfig
from langevin.models.heads import LangevinForMaskedLM
from langevin.objectives import generator_of
from langevin.objectives.masked import LEAST_TIME, Masked, two_parts
from langevin.runs import train
from langevin.studies import work
from langevin.training import loop
from langevin.training.parallel import World
from langevin.training.start import prepared
from training.small_run import dying_at_step, fingerprint, small, train_in_a_process

SCHEDULES = ("linear", "cosine-a", "cosine-b", "polynomial")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))


def with_a_first(texts: Tensor) -> Tensor:
    """Rows as tasks make them: the first token is not predicted."""
    return torch.cat([torch.zeros_like(texts[:, :1]), texts], 1)


def tiny(**changes: Any) -> LangevinForMaskedLM:
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LangevinForMaskedLM(LangevinConfig(**{**shape, "causal": False, **changes})).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    return model


def masked(**changes: Any) -> dict[str, Any]:
    return {"objective": "masked", "mixer": "softmax", "dropout": 0.0, **changes}


class Trains:
    """A denoiser that calls itself in training, so that times are drawn as there."""

    training = True

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.model(*args, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("training", [False, True], ids=["count form", "continuous time"])
def test_with_the_exact_denoiser_the_bound_is_the_entropy(schedule: str, training: bool) -> None:
    """The error is that of the masks: -ln p of the very texts is taken off."""
    model, objective = markov(), Masked(schedule)
    excess = []
    for i, texts in enumerate(model.drawn(9000).split(300)):
        summed, count = objective.loss(
            Trains(model) if training else model, {"tokens": with_a_first(texts)}, generator_of(i)
        )
        assert count == texts.numel()
        excess.append((float(summed) - float(model.surprise(texts).sum())) / 300)
    mean, error = torch.tensor(excess).mean(), torch.tensor(excess).std() / math.sqrt(len(excess))
    assert abs(float(mean)) < 3 * float(error) + LEAST_TIME * L
    assert float(error) < 0.03 * entropy(model.p)


@pytest.mark.parametrize("block", [1, 2, 3, L])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_the_bound_of_blocks_is_the_entropy_too(block: int, training: bool) -> None:
    """Blocks of one token have no masks to draw, and no error."""
    model, objective = markov(BlockDenoiser), Masked(block=block)
    excess = []
    for i, texts in enumerate(model.drawn(3000).split(300)):
        batch = {"tokens": with_a_first(texts)}
        summed, count = objective.loss(Trains(model) if training else model, batch, generator_of(i))
        assert count == texts.numel()
        excess.append((float(summed) - float(model.surprise(texts).sum())) / 300)
    mean, error = torch.tensor(excess).mean(), torch.tensor(excess).std() / math.sqrt(len(excess))
    assert abs(float(mean)) < 3 * float(error) + 1e-5
    assert float(error) < (1e-6 if block == 1 else 0.05 * entropy(model.p))
    exact = objective.chain_rule(model, batch, at_once=70)
    assert exact.sum(-1).tolist() == pytest.approx(model.surprise(texts).tolist(), rel=1e-5)


@pytest.mark.parametrize("block", [None, 1, 2, 3])
@pytest.mark.parametrize("context", [[0], [0, 1], [1]], ids=str)
def test_what_is_not_scored_is_context_for_the_rest(block: int | None, context: list[int]) -> None:
    """The bound and the exact loss of the rest are those given the context, which itself costs nothing."""
    model, objective = markov(ExactDenoiser if block is None else BlockDenoiser), Masked(block=block)
    texts = model.drawn(3000)
    scored = torch.ones(L, dtype=torch.bool)
    scored[context] = False
    agrees = (texts[:, None, context] == model.texts[:, context]).all(-1)
    if block == 1 and context == [1]:  # a block sees nothing to its right
        agrees = (texts[:, None, :1] == model.texts[:, :1]).all(-1)
        first = -(agrees * model.p).sum(-1).log()
        agrees = (texts[:, None, :2] == model.texts[:, :2]).all(-1)
    else:
        first = torch.zeros(len(texts))
    truth = first + model.surprise(texts) + (agrees * model.p).sum(-1).log()
    windows = [(with_a_first(some), scored.expand(300, L)) for some in texts.split(300)]
    found = bounded(objective, model, windows, masks=8, device="cpu")
    assert len(found) == 3000 * int(scored.sum())
    error = 3 * (found.masks_se or 0) * len(found) / 3000
    assert found.nll.sum() / 3000 == pytest.approx(float(truth.mean()), abs=error + 1e-5)
    batch = {"tokens": windows[0][0], "scored": torch.nn.functional.pad(windows[0][1], (1, 0))}
    exact = objective.chain_rule(model, batch, at_once=70)
    assert not exact[:, context].any()
    assert exact.sum(-1).tolist() == pytest.approx(truth[:300].tolist(), rel=1e-4, abs=1e-5)


def test_blocks_of_one_token_are_autoregression() -> None:
    """Whatever is drawn; and the loss of a token is that of a mask which sees what was before it."""
    model, objective = tiny().eval(), Masked(block=1)
    tokens = torch.randint(0, 10, (3, 9), generator=generator_of(1))
    expected = torch.zeros(3, 8, dtype=torch.float64)
    for i in range(8):
        z = torch.cat([tokens[:, 1 : i + 1], torch.full((3, 1), 10)], 1)
        seen = torch.ones(i + 1, i + 1, dtype=torch.bool).tril()[None, None]
        p = model(z, attention_mask=seen).logits[:, -1].softmax(-1)
        expected[:, i] = -p.gather(-1, tokens[:, i + 1 : i + 2])[:, 0].log()
    for seed in range(3):
        found = objective.upper_bound(model, {"tokens": tokens}, generator_of(seed))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    by_rule = objective.chain_rule(model, {"tokens": tokens}, at_once=2)
    torch.testing.assert_close(by_rule.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mixer", ["softmax", "ssmax", "sigmoid", "heat(t='adaptive')"])
def test_a_block_sees_itself_as_it_is_masked_and_the_clean_ones_before(mixer: str) -> None:
    model, objective = tiny(mixer=mixer).eval(), Masked(block=3)
    tokens = torch.randint(0, 10, (1, 13), generator=generator_of(1))
    masked_BL = torch.tensor([[True, False, False] * 4])
    before, _ = objective.predicted(model, {"tokens": tokens}, masked_BL)
    assert before.shape == (1, 12, 10)
    for at in range(12):
        other = tokens.clone()
        other[0, 1 + at] = (other[0, 1 + at] + 1) % 10
        after, _ = objective.predicted(model, {"tokens": other}, masked_BL)
        changed = (before != after).any(-1)[0].view(4, 3)
        block, hidden = at // 3, at % 3 == 0
        assert not changed[:block].any()
        assert not (hidden and changed[block].any())
        assert hidden or changed[block].all()
        assert changed[block + 1 :].all()


def test_what_blocks_draw_is_stratified_over_all_of_them() -> None:
    drawn = Masked(block=4).draws({"tokens": torch.zeros(2, 17)}, 8, generator_of(1))
    assert drawn["times"].shape == (8, 4)
    assert sorted((drawn["times"].flatten() * 32).long().tolist()) == list(range(32))
    many = [Masked(block=4).draws({"tokens": torch.zeros(2, 17)}, 2, generator_of(i)) for i in range(400)]
    assert float(sum(one["times"][0, 0] for one in many)) / 400 == pytest.approx(0.5, abs=0.05)


def test_a_step_of_blocks_is_one_graph_in_low_precision() -> None:
    model, objective = tiny(num_hidden_layers=1).float().train(), Masked(block=4)
    batch = {"tokens": torch.randint(0, 10, (4, 17), generator=generator_of(1))}
    batch |= objective.draws(batch, 4, generator_of(2))

    def gradient(loss: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            summed, _ = loss(model, batch)
        return torch.autograd.grad(summed, model.model.embed.weight)[0]

    plain = gradient(objective.loss)
    compiled = gradient(torch.compile(objective.loss, backend="aot_eager", dynamic=False, fullgraph=True))
    assert float((plain - compiled).norm()) <= 0.02 * float(plain.norm())


@pytest.mark.skipif(not can_compile("cpu"), reason="needs a compiler")
def test_the_view_of_blocks_compiles() -> None:
    shape = (6, 2, torch.device("cpu"))
    assert torch.equal(torch.compile(two_parts)(*shape), two_parts(*shape))


def test_tokens_of_blocks_are_read_twice_and_predicted_once() -> None:
    """And see their own block and those before: half of the context on average, and half a block."""
    model, context = tiny(hidden_size=64, vocab_size=1001), 16
    head, a_key = 6 * model.lm_head.weight.numel(), 12 * 64 * 2  # width and layers
    matrices = Masked().flops(model, context) - a_key * context - head
    for block in (1, 4, context):
        expected = 2 * (matrices + a_key * (context + block) / 2) + head
        assert Masked(block=block).flops(model, context) == pytest.approx(expected)


def test_evaluation_reports_that_bound_with_its_error_and_the_exact_loss() -> None:
    model, objective = markov(), Masked()
    texts = model.drawn(400)
    windows = [(with_a_first(part), torch.ones(100, L, dtype=torch.bool)) for part in texts.split(100)]
    truth = float(model.surprise(texts).mean()) / L
    found = bounded(objective, model, windows, masks=8, device="cpu")
    assert found.masks_se is not None
    assert abs(found.nll.mean() - truth) < 3 * found.masks_se
    assert found.masks_se < 0.02
    one_batch = [tuple(torch.cat(parts) for parts in zip(*windows, strict=True))]
    same = bounded(objective, model, one_batch, masks=8, device="cpu")  # type: ignore[arg-type]
    assert (same.nll == found.nll).all()
    exact = left_to_right(objective, model, windows, rows=150, at_once=7, device="cpu")
    assert len(exact) == 150 * L
    assert exact.nll.mean() == pytest.approx(float(model.surprise(texts[:150]).mean()) / L, rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_model_that_knows_nothing_has_the_bound_log_v(schedule: str) -> None:
    model, objective = tiny(), Masked(schedule)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.requires_grad_(False)
    tokens = torch.randint(0, 10, (64, 65), generator=generator_of(1))
    summed, count = objective.loss(model.eval(), {"tokens": tokens}, generator_of(2))
    assert float(summed / count) == pytest.approx(math.log(10), rel=1e-6)
    model.train()
    found = []
    for i in range(40):
        summed, count = objective.loss(model, {"tokens": tokens}, generator_of(i))
        found.append(float(summed / count))
    error = torch.tensor(found).std() / math.sqrt(40)
    assert abs(sum(found) / 40 - math.log(10)) < 3 * float(error) + LEAST_TIME * math.log(10)


def formula(schedule: str, t: float) -> tuple[float, float]:
    """1 - α and -α'/(1 - α), as papers write them."""
    alpha = {
        "linear": lambda t: 1 - t,
        "cosine-a": lambda t: math.cos(math.pi * t / 2),
        "cosine-b": lambda t: 1 - math.cos(math.pi * (1 - t) / 2),
        "polynomial": lambda t: 1 - t**2,
    }[schedule]
    slope = (alpha(t + 1e-6) - alpha(t - 1e-6)) / 2e-6
    return 1 - alpha(t), -slope / (1 - alpha(t))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_is_its_formula(schedule: str) -> None:
    """With packed documents, and tokens that are not to be predicted: they stay visible."""
    model, objective = tiny().train(), Masked(schedule)
    tokens = torch.randint(0, 10, (4, 13), generator=generator_of(3))
    places = torch.tensor([[*range(5), *range(8)]] * 4)
    scored = torch.rand(4, 13, generator=generator_of(4)) < 0.8
    batch = {"tokens": tokens, "position_ids": places, "scored": scored}
    drawn = objective.draws(batch, 4, generator_of(5))
    summed, count = objective.loss(model, {**batch, **drawn})
    expected = 0.0
    for row in range(4):
        share, weight = formula(schedule, float(drawn["times"][row]))
        hidden = (drawn["noise"][row] < share) & scored[row, 1:]
        z = torch.where(hidden, 10, tokens[row, 1:])
        for begin, end in ((0, 4), (4, 12)):  # each document as if it were alone
            alone = places[row, 1 + begin : 1 + end] if begin else torch.arange(1, 5)
            logits = model(z[None, begin:end], position_ids=alone[None]).logits[0]
            for at in range(begin, end):
                if hidden[at]:
                    p = logits[at - begin].double().softmax(-1)[tokens[row, 1 + at]]
                    expected -= weight * float(p.log())
    assert int(count) == int(scored[:, 1:].sum())
    assert float(summed) == pytest.approx(expected, rel=1e-5)


def test_times_are_stratified_over_the_whole_batch_and_do_not_depend_on_parts() -> None:
    objective, tokens = Masked(), torch.zeros(16, 9, dtype=torch.long)
    drawn = objective.draws({"tokens": tokens[:4]}, 16, generator_of(0, 7))
    assert sorted((drawn["times"] * 16).long().tolist()) == list(range(16))
    model = tiny().train()
    batch = {"tokens": torch.randint(0, 10, (16, 9), generator=generator_of(1)), **drawn}
    whole, count = objective.loss(model, batch)
    parts = [objective.loss(model, part) for part in chunks(batch, 4)]
    assert sum(float(s) for s, _ in parts) == pytest.approx(float(whole), rel=1e-9)
    assert sum(int(c) for _, c in parts) == int(count)


def test_a_visible_token_never_scores_and_the_mask_has_no_logit() -> None:
    model, objective = tiny().eval(), Masked()
    tokens = torch.randint(0, 10, (8, 17), generator=generator_of(1))
    batch = {"tokens": tokens, **objective.draws({"tokens": tokens}, 8, generator_of(2))}
    shares = objective.upper_bound(model, batch)
    amount = (batch["times"] * 16).long() + 1
    assert ((shares > 0).sum(-1) == amount).all()
    assert model(tokens).logits.shape == (8, 17, 10)


def test_every_mixer_learns_from_both_sides() -> None:
    for name in MIXERS:
        model = tiny(mixer=name)
        x = torch.randint(0, 10, (1, 9), generator=generator_of(1))
        other = x.clone()
        other[0, 8] = (other[0, 8] + 1) % 10
        changed = (model(x).logits != model(other).logits).any(-1)[0]
        assert changed[7], name


@pytest.mark.parametrize(("objective", "has", "lacks"), [("masked", 0, 1), ("ar", 1, 0)])
def test_a_mixer_that_looks_back_only_is_refused_in_words_and_so_is_the_reverse(
    objective: str,
    has: int,
    lacks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(MIXERS["ssmax"], "directions", (DIRECTIONS[has],))
    config = tmp_path / "config.yaml"
    config.write_text(small(tmp_path, objective=objective, mixer="ssmax").as_yaml())
    assert cli.main(["train", "--config", str(config), "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert f"ssmax has no {DIRECTIONS[lacks]} form" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("objective", ["masked", "masked(block=4)"])
def test_killed_and_resumed_to_the_same_bits(tmp_path: Path, objective: str) -> None:
    changes = {"objective": objective, "mixer": "heat(t='head')", "dropout": 0.1, "ema": 0.9}
    config = small(tmp_path, **changes)
    whole, _ = train(config, tmp_path / "whole", quiet=True)
    settings = tmp_path / "settings.yaml"
    settings.write_text(config.as_yaml())
    assert train_in_a_process(settings, tmp_path / "killed", dying_at_step(6)) != 0
    assert train_in_a_process(settings, tmp_path / "killed") == 0
    assert fingerprint(whole.path, 12) == fingerprint(tmp_path / "killed", 12)


def test_accumulation_and_processes_share_one_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path, **masked())
    weights = []
    for parts in (1, 4):
        whole = small(tmp_path, **masked(accumulate=parts, steps=3))
        run, _ = train(whole, tmp_path / f"in-{parts}", quiet=True)
        weights.append(torch.cat([p.flatten() for p in run.model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
    trainer, progress = prepared(config, tmp_path / "alone", quiet=True)
    trainer.put(3)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(trainer, "world", World(rank, 2))
        shares.append(loop.Trainer._draws(trainer, 3)["times"])
    assert torch.equal(torch.cat(shares), trainer.drawn["times"])
    progress.stop()


def test_a_run_is_evaluated_by_a_bound_and_compared_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = train(small(tmp_path, **masked(steps=40, lr=1e-2)), tmp_path / "run", quiet=True)
    looks = [row["loss"] for row in run.metrics("valid")]
    assert looks[-1] < looks[0]
    assert run.model.config.vocab_size == 258
    command = ["evaluate", str(run.path), "--masks", "3", "--left-to-right", "2", "--json"]
    assert cli.main(command) == 0
    first = capsys.readouterr().out
    found = json.loads(first)
    rows = {row["metric"]: row for row in found["rows"]}
    assert rows["nll"]["kind"] == rows["bits_per_character"]["kind"] == "bound"
    assert rows["left_to_right_nll"]["kind"] == "exact"
    assert rows["left_to_right_bound"]["kind"] == "bound"
    assert rows["left_to_right_bound"]["n"] == rows["left_to_right_nll"]["n"] < rows["nll"]["n"]
    assert rows["left_to_right_bound"]["low"] < rows["left_to_right_bound"]["value"]
    assert rows["nll"]["se"] > 0
    assert found["masks"]["standard error by them alone"] > 0
    assert not {"ece", "accuracy", "temperature", "entropy"} & set(rows)
    assert cli.main(command) == 0
    assert capsys.readouterr().out == first
    assert cli.main(["plot", "reliability", str(run.path)]) == 2
    told = capsys.readouterr().err
    assert "calibration" in told
    assert cli.main(["evaluate", str(run.path)]) == 0
    assert "(upper bound)" in capsys.readouterr().out


def test_what_does_not_go_with_it_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*command: str) -> str:
        assert cli.main([*command, "--out", str(tmp_path / "run")]) == 2
        return capsys.readouterr().err

    by = ("train", "--objective")
    assert "unknown key of masked 'shedule'" in refused(*by, "masked(shedule='linear')")
    assert "'cosine-a' or 'cosine-b'" in refused(*by, "masked(schedule='cosine')")
    assert "must be positive" in refused(*by, "masked(schedule='polynomial', power=0)")
    assert "power=3) changes nothing" in refused(*by, "masked(power=3)")
    assert "give its length away" in refused(*by, "masked", "--mask-documents", "True")
    blocks = (*by, "masked(block=4)")
    for mixer in ("neighbor", "sima", "heat(t=0.3, alpha=1.0)", "softmax;sima;softmax;softmax"):
        assert "does not see a text in blocks" in refused(*blocks, "--mixer", mixer)
    assert "alibi positions are distances" in refused(*blocks, "--positions", "alibi")
    assert "do not fill a context of 30" in refused(*blocks, "--context", "30")
    assert "must be 1 or more" in refused(*by, "masked(block=0)")
    assert "sparse has no blocks" in refused(*by, "sparse(block=4)")
    assert "know no schedule" in refused(*by, "masked(block=4, schedule='cosine-a')")
    assert not (tmp_path / "run").exists()
    ar, _ = train(small(tmp_path), tmp_path / "ar", quiet=True)
    assert "masked has no --init" in refused(*by, "masked", "--init", str(ar.path))
    assert cli.main(["evaluate", str(ar.path), "--masks", "3"]) == 2
    assert "--masks is for likelihoods that are bounds" in capsys.readouterr().err


def test_compared_with_an_exact_arm_its_bound_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work, "ROUNDS", 2)
    monkeypatch.setattr(work, "SECONDS", 0.005)
    shape = {"data": small(tmp_path).data, "tokenizer": "bytes", "layers": 1, "width": 16, "heads": 2}
    shape |= {"context": 16, "batch": 4, "steps": 8, "eval-tokens": 128, "device": "cpu"}
    flags = [word for key, value in shape.items() for word in (f"--{key}", str(value))]
    arms = ["softmax", "mdlm=softmax, objective=masked"]
    command = ["compare", *arms, *flags, "--workers", "0", "--seeds", "0-1", "--quiet"]
    assert cli.main([*command, "--out", str(tmp_path / "cmp")]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert "≤" in rows["mdlm"]
    assert "≤" not in rows["softmax"]
    results = json.loads((tmp_path / "cmp" / "results.json").read_text())
    (part,) = results["parts"]
    kinds = [
        {row["kind"] for row in run["rows"] if row["metric"] == "nll" and not row["at"]}
        for arm in part["arms"]
        for run in arm["runs"]
    ]
    assert kinds == [{"exact"}, {"exact"}, {"bound"}, {"bound"}]
    assert all(run["details"]["sample"]["text"] for arm in part["arms"] for run in arm["runs"])
    assert "bound" in (tmp_path / "cmp" / "report.html").read_text()
