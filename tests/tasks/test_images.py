"""Classifying images from training to predictions, by the built-in digits."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import pipeline

import langevin
from langevin import cli
from langevin.data.images import prepare
from langevin.errors import UsageError
from langevin.objectives import OBJECTIVES
from langevin.settings import TrainConfig
from langevin.tasks import TASKS
from training.small_run import dying_at_step, fingerprint, train_in_a_process

SHAPE: dict[str, Any] = {"data": "digits", "layers": 1, "width": 32, "heads": 2, "batch": 32}
SHAPE |= {"device": "cpu", "precision": "fp32", "compile": "off", "optimizer": "muon"}
CHANGED = "images(crop=1, turn=10.0, colour=0.2, erase=0.3, mix=0.5)"


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{**SHAPE, "task": "images", "epochs": 4, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return langevin.train(config(), tmp_path_factory.mktemp("runs") / "run", quiet=True)[0]


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    data = prepare("digits", 8)
    Image.fromarray(data.images("test")[0].transpose(1, 2, 0)).save(tmp_path / "digit.png")
    return tmp_path / "digit.png"


def test_it_learns_digits_and_says_how_well(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.config.context == 16
    assert cli.main(["evaluate", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["metric"]: row["value"] for row in told["rows"] if not row["at"]}
    assert rows["accuracy"] > 0.9
    assert len(told["examples"]) == 177
    assert all(mistake["text"].startswith("digit ") for mistake in told["mistakes"])
    assert cli.main(["evaluate", str(run.path)]) == 0
    (heads,) = (line for line in capsys.readouterr().out.splitlines() if " predicted " in line)
    assert heads.split() == ["predicted", "sure", "is", "image"]
    assert cli.main(["plot", "attention", str(run.path)]) == 0
    assert cli.main(["plot", "curves", str(run.path)]) == 0


def test_predict_and_the_pipeline_say_the_same_of_a_file(
    run: Any, digit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = digit.with_name("large.png")
    with Image.open(digit) as image:
        image.convert("L").resize((50, 30)).save(large)
    assert cli.main(["predict", str(run.path), "--image", str(digit), str(large), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    classify = pipeline("image-classification", model=str(run.path / "model"), device="cpu")
    for one, other in zip(told, classify([str(digit), str(large)], top_k=10), strict=True):
        for score in other:
            assert one["probabilities"][score["label"]] == pytest.approx(score["score"], abs=1e-5)
    (digit.parent / "in.csv").write_text(f"text\n{digit}\n{large}\n")
    out = digit.with_name("out.csv")
    assert (
        cli.main(["predict", str(run.path), "--file", str(digit.parent / "in.csv"), "--out", str(out)]) == 0
    )
    with open(out) as file:
        assert [row["label"] for row in csv.DictReader(file)] == [one["label"] for one in told]


def test_what_is_no_image_is_refused_in_a_line(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.png").write_bytes(b"no image")
    for arguments, said in (
        (["predict", str(run.path), "--image", str(tmp_path / "x.png")], "cannot be read as an image"),
        (["predict", str(run.path), "--text", "a word"], "classifies images"),
        (["export", str(run.path)], "reads images"),
        (["plot", "attention", str(run.path), "--text", "a"], "reads images"),
        (["train", "--task", "images", "--data", "digits", "--context", "9"], "are 16 tokens"),
        (["train", "--task", "images", "--data", "digits", "--mix", "2"], "must be from 0 to 1"),
    ):
        assert cli.main(arguments) == 2
        assert said in capsys.readouterr().err


def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    one = config(epochs=None, steps=12, eval_every=4, checkpoint_every=4, task=CHANGED, batch=16, ema=0.9)
    whole, _ = langevin.train(one, tmp_path / "whole", quiet=True)
    (tmp_path / "settings.yaml").write_text(one.as_yaml())
    assert train_in_a_process(tmp_path / "settings.yaml", tmp_path / "killed", dying_at_step(6)) != 0
    assert train_in_a_process(tmp_path / "settings.yaml", tmp_path / "killed") == 0
    assert fingerprint(whole.path, 12) == fingerprint(tmp_path / "killed", 12)


def test_a_batch_is_a_function_of_seed_and_step_and_parts_of_processes_make_it_whole() -> None:
    one, task = config(task=CHANGED), TASKS.parse(CHANGED)
    data = task.prepare(one)
    whole, *parts = (
        task.feed(data, one, torch.device("cpu"), share)
        for share in (lambda x: x, lambda x: x[: len(x) // 2], lambda x: x[len(x) // 2 :])
    )
    rows = []
    for step in (3, 0, 3, 44, 45):
        for feed in (whole, *parts):
            feed.put(step)
        batch = whole.batch()
        halves = [feed.batch() for feed in parts]
        assert all(torch.equal(x, torch.cat([half[k] for half in halves])) for k, x in batch.items())
        rows.append(batch)
    assert torch.equal(rows[0]["pixel_values"], rows[2]["pixel_values"])
    assert not torch.equal(rows[0]["pixel_values"], rows[1]["pixel_values"])
    epoch = np.concatenate([data.examples(step, seed=0, batch=32) for step in range(46)])
    assert len(set(epoch[:1444])) == 1444


def test_a_mixed_image_is_learned_as_both_in_their_shares() -> None:
    torch.manual_seed(0)
    objective = OBJECTIVES.parse("classify(smoothing=0.1)")
    logits, labels, others = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor([1, 0, 0, 2])
    share = torch.tensor([1.0, 0.25, 0.5, 0.0])

    class Model:
        training, config = True, SimpleNamespace(model_type="langevin")

        def __call__(self, **_: Any) -> Any:
            return type("Out", (), {"logits": logits})

    batch = {"pixel_values": logits, "labels": labels, "other_labels": others, "share": share}
    summed, count = objective.loss(Model(), batch)
    targets = share[:, None] * torch.eye(3)[labels] + (1 - share)[:, None] * torch.eye(3)[others]
    expected = -((0.9 * targets + 0.1 / 3) * logits.log_softmax(-1)).sum()
    assert float(summed) == pytest.approx(float(expected), rel=1e-5)
    assert float(count) == pytest.approx(4)


def test_a_run_goes_on_from_another_that_reads_the_same(run: Any, tmp_path: Path) -> None:
    start = {"init": str(run.path), "layers": 4, "width": 128, "heads": 4}
    one = config(**start, epochs=None, steps=0)
    begun, _ = langevin.train(one, tmp_path / "begun", quiet=True)
    assert torch.equal(begun.model.score.weight, run.model.score.weight)
    with pytest.raises(UsageError, match="has stem='convolutions', not 'patches'"):
        langevin.train(config(**start, task="images(stem='patches')"), tmp_path / "other", quiet=True)
