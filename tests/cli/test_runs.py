"""What `langevin train` says when it ends."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from PIL import Image

from langevin import cli
from langevin.training import loop
from training.small_run import TEXT

SMALL = "--layers 1 --width 16 --heads 2 --batch 4 --device cpu --precision fp32 --compile off"
OWN = {
    "lm": "--data text.txt --context 16 --eval-tokens 64",
    "lengths": "--data text.txt --context 16 --lengths 32 --positions alibi --eval-tokens 64",
    "classify": "--data rows.csv --context 16",
    "images": "--data digits",
    "needle": "--mixer ssmax --context 16 --lengths 16 --needles 1 --rows 4 --eval-tokens 64",
}


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    rows = [f"{word} {i},{word}" for i in range(30) for word in ("good", "bad")]
    Path("rows.csv").write_text("\n".join(["text,label", *rows]))
    Image.new("L", (8, 8)).save("FILE", "png")


def trained(task: str, *flags: str) -> int:
    return cli.main(["train", "--task", task, *OWN[task].split(), *SMALL.split(), *flags])


@pytest.mark.parametrize("task", OWN)
def test_the_commands_that_come_next_work_as_they_are_printed(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(task, "--steps", "2", "--out", "my run") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Next: langevin evaluate 'my run'")
    for command in last.removeprefix("Next: ").split("; "):
        assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["generate", "no", "--infill", "a ___ b"], ["evaluate", "no", "--steps", "8"]]
)
def test_a_folder_that_is_no_run_is_what_is_wrong_whatever_flags_come_with_it(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command) == 2
    assert "no is not a run folder" in capsys.readouterr().err


def test_it_says_which_model_is_kept_and_the_bar_ends_with_the_last_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter((3.0, 1.25, 2.5))
    monkeypatch.setattr(loop.Trainer, "valid_loss", lambda self: next(losses))
    assert trained("images", "--steps", "6", "--eval-every", "2", "--out", "run") == 0
    shown = capsys.readouterr()
    assert "run on valid, model of step 4" in shown.out
    assert (
        "run: validation loss 2.5000 nats per example at the end (step 6); "
        "the best model, 1.2500 at step 4, is kept\n"
    ) in shown.out
    assert "6/6" in shown.err
    assert shown.err.count("valid ") == 1
    assert "valid 2.500" in shown.err
