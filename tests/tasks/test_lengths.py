"""Length generalisation: the same tokens at every length, by position too, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import langevin
from langevin import cli
from training.small_run import dying_at_step, fingerprint, small, train_in_a_process

TASK = "lengths(lengths='32,128')"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("lengths")
    return langevin.train(
        small(folder, task=TASK, mixer="ssmax", positions="none"), folder / "run", quiet=True
    )[0]


def test_a_loss_at_a_length_is_that_of_windows_which_begin_with_nothing(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(run.path), "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    tokens = torch.from_numpy(run.task.prepare(run.config).tokens("test").astype("int64"))
    windows = (len(tokens) - 1) // 128
    assert (told["windows"], told["tokens"]) == (windows, windows * 128)
    losses = {}
    for n in (16, 32, 128):  # 16 is the context
        inputs, targets = (tokens[i : i + windows * 128].view(-1, n) for i in (0, 1))
        with torch.no_grad():
            logits = run.model(inputs, use_cache=False).logits
        losses[n] = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    rows = {(row["metric"], *row["at"].items()): row for row in told["rows"]}
    for n, own in losses.items():
        assert rows["nll", ("length", n)]["value"] == pytest.approx(float(own.mean()), rel=1e-5)
        rise = float(own.mean() / losses[16].mean() - 1)
        assert rows["rise", ("length", n)]["value"] == pytest.approx(rise, abs=1e-5)
    for first, last in ((0, 16), (16, 32), (32, 64), (64, 128)):
        found = rows["nll", ("position", last)]
        assert found["value"] == pytest.approx(float(losses[128][:, first:last].mean()), rel=1e-5)
        assert found["n"] == windows * (last - first)
    assert rows["nll",]["value"] == rows["nll", ("length", 128)]["value"]
    assert rows["rise", ("length", 16)]["value"] == 0


def test_a_language_model_is_tried_at_lengths_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = langevin.train(small(tmp_path, positions="alibi", steps=0), tmp_path / "lm", quiet=True)
    command = ["evaluate", str(run.path), "--device", "cpu", "--task"]
    assert cli.main([*command, "lengths(lengths='16,64', at=16)"]) == 0
    shown = capsys.readouterr().out
    for row in (
        "loss (nats/token), at length 16 ",
        "relative change of the loss, at length 16 ",
        "loss (nats/token), length 16 (training) ",
        "relative change of the loss, length 64 ",
        "loss (nats/token), positions 1–16 ",
        "loss (nats/token), positions 33–64 ",
    ):
        assert row in shown
    assert not list(run.path.glob("evaluation-*"))
    assert cli.main([*command, "lengths(lengths='9000')"]) == 2
    assert "too few for a length of 9000" in capsys.readouterr().err


def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    config = small(tmp_path, task=TASK, positions="sinusoidal")
    whole, _ = langevin.train(config, tmp_path / "whole", quiet=True)
    (tmp_path / "settings.yaml").write_text(config.as_yaml())
    assert train_in_a_process(tmp_path / "settings.yaml", tmp_path / "killed", dying_at_step(6)) != 0
    assert train_in_a_process(tmp_path / "settings.yaml", tmp_path / "killed") == 0
    assert fingerprint(whole.path, 12) == fingerprint(tmp_path / "killed", 12)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--positions learned --lengths 129", "129 is beyond the 128 learned positions"),
        ("--lengths 0", "a length of 0 is too short"),
        ("--objective masked", "gives no token a loss of its own"),
        ("--mask-documents True", "nothing to gain where they are kept apart"),
        ("--lengths 9000000", "too few for a length of 9000000"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--task", "lengths", *flags.split(), "--out", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
