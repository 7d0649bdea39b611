"""A student learns to compute what its teacher computes, and is measured as any other model is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import langevin
from langevin import cli
from langevin.data.feed import chunks
from langevin.errors import UsageError
from langevin.models.pretrained import own_mixer, pretrained
from langevin.objectives import OBJECTIVES
from langevin.objectives.ar import Autoregression
from langevin.objectives.distill import Distillation
from langevin.runs import train
from langevin.settings import TrainConfig
from langevin.training import loop
from models.tiny_models import tiny, tokens
from training.small_run import fingerprint, small

PRETRAINED = {"layers": 4, "width": 128, "heads": 4, "dropout": 0.0}  # the defaults: the model decides


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGEVIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Llama that has learned the small text."""
    folder = tmp_path_factory.mktemp("original")
    model = tiny("llama", vocab_size=257)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.1 if p.ndim == 2 else 1.0)
    model.save_pretrained(folder / "blank")
    changes = {"init": str(folder / "blank"), "mixer": "softmax", "steps": 60, "lr": 1e-2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LANGEVIN_CACHE", str(folder / "cache"))
        run, _ = train(small(folder, **{**PRETRAINED, **changes}), folder / "run", quiet=True)
    return str(run.path)


def swapped(tmp_path: Path, original: str, **changes: Any) -> TrainConfig:
    values = {"init": original, "mixer": "sima", "objective": "distill", "lr": 3e-3}
    return small(tmp_path, **{**PRETRAINED, **values, **changes})


def losses(run: Path, split: str = "valid") -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["loss"]) for row in rows if row["split"] == split]
    assert len(dict(found)) == len(found)
    return dict(found)


def bound(spec: str, folder: Path, teacher: Any, student: Any) -> Distillation:
    """The objective with this teacher, in float64."""
    teacher.save_pretrained(folder / "teacher")
    config = TrainConfig(init=str(folder / "teacher"), objective=spec)
    objective: Distillation = OBJECTIVES.parse(spec).bound(config, student)
    objective.taught_by.double()
    return objective


def packed(progress: float) -> dict[str, Tensor]:
    """Two rows of two documents each, in which some tokens are not to be predicted."""
    places = torch.tensor([[*range(4), *range(6)], [*range(7), *range(3)]])
    scored = torch.rand(2, 10, generator=torch.Generator().manual_seed(1)) < 0.7
    moment = torch.tensor(progress)
    return {"tokens": tokens(2, 10), "position_ids": places, "scored": scored, "progress": moment}


@pytest.mark.parametrize("progress", [0.0, 0.29, 0.3, 0.9])
def test_the_loss_is_its_formula_in_float64(progress: float, tmp_path: Path) -> None:
    student, teacher = tiny("llama", "sigmoid").double(), tiny("llama", seed=1)
    objective = bound("distill(layers=0.3, next_token=0.25)", tmp_path, teacher, student)
    batch = packed(progress)
    summed, count = objective.loss(student.train(), batch)
    teacher.double()
    student.eval().requires_grad_(False), teacher.requires_grad_(False)
    expected = 0.0
    for row in range(2):
        places = batch["position_ids"][row, :-1].tolist()
        starts = [i for i, place in enumerate(places) if place == 0]
        for start, end in zip(starts, [*starts[1:], len(places)], strict=True):
            ids = batch["tokens"][row : row + 1, start:end]  # a document by itself
            ours, theirs = (m(ids, output_hidden_states=True) for m in (student, teacher))
            for i in range(end - start):
                if not batch["scored"][row, start + i + 1]:
                    continue
                states = zip(ours.hidden_states[1:], theirs.hidden_states[1:], strict=True)
                error = [float(((s[0, i] - t[0, i]) ** 2).sum() / (t[0, i] ** 2).sum()) for s, t in states]
                q, p = (x.logits[0, i].softmax(-1).tolist() for x in (ours, theirs))
                apart = sum(b * math.log(b / a) for a, b in zip(q, p, strict=True))
                surprise = -math.log(q[int(batch["tokens"][row, start + i + 1])])
                early = progress < 0.3
                expected += sum(error) / len(error) if early else 0.75 * apart + 0.25 * surprise
    assert float(summed.detach()) == pytest.approx(expected, rel=1e-9)
    assert int(count) == int(batch["scored"][:, 1:].sum())


@pytest.mark.parametrize("progress", [0.0, 0.9])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(progress: float, tmp_path: Path) -> None:
    teacher = tiny("gpt2", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    objective = bound("distill", tmp_path, teacher, teacher)
    student = langevin.from_pretrained(tmp_path / "teacher").double().train()
    summed, _ = objective.loss(student, packed(progress))
    assert float(summed) == 0
    summed.backward()
    assert all(float(p.grad.abs().max()) < 1e-12 for p in student.parameters())


def test_the_parts_of_a_batch_add_up_and_the_teacher_learns_nothing(tmp_path: Path) -> None:
    student = tiny("llama", "sima").double().train()
    objective = bound("distill", tmp_path, tiny("llama", seed=1), student)
    before = {name: x.clone() for name, x in objective.taught_by.state_dict().items()}
    batch = packed(0.2)
    moment = batch.pop("progress")
    parts = [objective.loss(student, {**part, "progress": moment}) for part in chunks(batch, 2)]
    whole, count = objective.loss(student, {**batch, "progress": moment})
    assert float(whole) == pytest.approx(sum(float(s) for s, _ in parts), rel=1e-12)
    assert int(count) == sum(int(n) for _, n in parts)
    whole.backward()
    assert not objective.taught_by.training
    assert all(p.grad is None for p in objective.taught_by.parameters())
    assert all(torch.equal(x, before[name]) for name, x in objective.taught_by.state_dict().items())


def test_held_out_text_is_measured_by_the_plain_loss(tmp_path: Path) -> None:
    student = tiny("llama", "sima")
    objective = bound("distill", tmp_path, tiny("llama", seed=1), student)
    batch = packed(0.0)
    del batch["progress"]
    assert torch.equal(objective.loss(student, batch)[0], Autoregression().loss(student, batch)[0])


def test_a_run_lowers_the_loss_from_the_swap_on_and_saves_the_student_alone(
    tmp_path: Path, original: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = train(swapped(tmp_path, original, steps=40, eval_every=20), tmp_path / "run", quiet=True)
    curve = losses(run.path)
    untouched, _ = train(
        swapped(tmp_path, original, objective="ar", mixer=own_mixer(original), steps=0),
        tmp_path / "untouched",
        quiet=True,
    )
    assert list(curve) == [0, 20, 40]
    assert losses(untouched.path)[0] < curve[40] < curve[20] < curve[0]
    weights = load_file(run.path / "checkpoints" / "step-40" / "weights.safetensors")
    assert weights.keys() == dict(run.model.named_parameters()).keys()
    assert cli.main(["generate", str(run.path), "--prompt", "Ann", "--tokens", "5"]) == 0
    assert cli.main(["evaluate", str(run.path)]) == 0
    assert "loss" in capsys.readouterr().out


def test_a_run_that_broke_off_goes_on_to_the_same_bits(
    tmp_path: Path, original: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = swapped(tmp_path, original, objective="distill(layers=0.6, next_token=0.1)")
    whole, _ = train(config, tmp_path / "whole", quiet=True)
    step = loop.Trainer._step
    for last in (2, 6):  # before the first checkpoint, and after it

        def breaking(self: loop.Trainer, number: int, last: int = last) -> None:
            if number == last:
                raise RuntimeError("broke off")
            step(self, number)

        monkeypatch.setattr(loop.Trainer, "_step", breaking)
        with pytest.raises(RuntimeError, match="broke off"):
            train(config, tmp_path / "broken", quiet=True, resume=True)
    monkeypatch.setattr(loop.Trainer, "_step", step)
    train(config, tmp_path / "broken", quiet=True, resume=True)
    assert fingerprint(whole.path, 12) == fingerprint(tmp_path / "broken", 12)
    assert losses(whole.path) == losses(tmp_path / "broken")


def test_zero_steps_keep_the_model_that_was_given(tmp_path: Path, original: str) -> None:
    config = swapped(tmp_path, original, objective="ar", mixer=own_mixer(original), steps=0)
    for resume in (False, True):
        run, _ = train(config, tmp_path / "kept", quiet=True, resume=resume)
        assert list(losses(run.path)) == [0]
    ids = tokens(1, 9)
    assert torch.equal(run.model(ids).logits, pretrained(original, None).eval()(ids).logits)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init": None}, "distill has no teacher"),
        ({"objective": "distill(teacher='nowhere')"}, "there is no model 'nowhere'"),
        ({"objective": "distill(teacher='words')"}, "has 99 tokens, the student 257"),
        ({"objective": "distill(teacher='deep')"}, "has 3 layers, the student 2"),
        ({"objective": "distill(teacher='short')"}, "was made for 8 tokens, not 16"),
        ({"objective": "distill(layers=1.5)"}, "must be from 0 to 1"),
        ({"parallel": "fsdp"}, "not spread over processes"),
    ],
    ids=str,
)
def test_a_teacher_that_will_not_do_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shapes = {
        "student": {},
        "words": {"vocab_size": 99},
        "deep": {"num_hidden_layers": 3},
        "short": {"max_position_embeddings": 8},
    }
    for name, shape in shapes.items():
        tiny("llama", **{"vocab_size": 257, **shape}).save_pretrained(name)
    config = swapped(tmp_path, "student", **changes)
    with pytest.raises(UsageError, match=said):
        train(config, tmp_path / "run", quiet=True)


def test_of_another_depth_the_predictions_alone_are_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("llama", vocab_size=257, num_hidden_layers=3).save_pretrained("deep")
    spec = "distill(teacher='deep', layers=0)"
    run, _ = train(small(tmp_path, objective=spec, lr=1e-2), tmp_path / "run", quiet=True)
    assert losses(run.path)[12] < math.log(257) + 1
