"""What `langevin train` does with the folder it is given, and with what it finds there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from harm import TEXT

from langevin.cli import main
from langevin.runs import load
from langevin.runs.files import sha256
from langevin.runs.folder import Lock, sessions
from langevin.settings import TrainConfig


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_goes_on(
    run: Path, again: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: sha256(path) for path in run.rglob("*") if path.is_file()}
    with Lock(run):
        assert main(again) == 2
        assert f"{run} is being written by process {os.getpid()} on " in capsys.readouterr().err
        assert main(["generate", str(run), "--tokens", "2"]) == 0  # reading needs no lock
    assert {path: sha256(path) for path in before} == before
    assert main(again) == 0
    assert not (run / ".lock").exists()


def test_provenance_is_added_each_time_a_run_goes_on(run: Path, again: list[str]) -> None:
    first = sessions(run)
    assert main(again) == 0
    after = sessions(run)
    assert after[:1] == first
    assert [session["step"] for session in after] == [0, 6]
    assert {"langevin", "torch", "device", "commit", "host", "started", "data"} <= after[1].keys()


def test_changed_data_are_refused_when_a_run_goes_on_and_their_hashes_stay(
    run: Path, again: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.txt").write_text(TEXT.replace("Ann", "Eve"))
    before = (run / "environment.json").read_bytes()
    assert main([*again, "--data", str(tmp_path / "other.txt")]) == 2
    assert "is not what" in capsys.readouterr().err
    assert (run / "environment.json").read_bytes() == before
    assert main(["evaluate", str(run), "--data", str(tmp_path / "other.txt")]) == 2


def test_data_that_were_moved_are_taken_from_where_they_are(
    trained: Path, run: Path, again: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run made with a relative path is evaluated from another folder; moved data are told by --data."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shutil.copy(trained.parent / "text.txt", "moved.txt")
    assert main([*again, "--data", "moved.txt"]) == 0
    assert TrainConfig.read(run / "config.yaml").data == str(tmp_path / "here" / "moved.txt")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(run)]) == 0
    shutil.move("here", "there")
    assert main(["evaluate", str(run)]) == 2
    assert main(["evaluate", str(run), "--data", "there/moved.txt"]) == 0


def test_an_evaluation_is_not_taken_for_one_of_a_later_model(
    run: Path, again: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run)]) == 0
    assert main(["plot", "reliability", str(run)]) == 0
    step = load(run).step
    assert main(again) == 0
    assert load(run).step != step
    capsys.readouterr()
    assert main(["plot", "reliability", str(run)]) == 2
    assert "was trained on since it was evaluated on test" in capsys.readouterr().err


def test_a_run_that_blew_up_before_anything_was_kept_does_not_block_its_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--config", str(run / "config.yaml"), "--out", str(tmp_path / "new")]
    assert main([*command, "--lr", "1e14", "--max-bad-steps", "1"]) == 1
    assert "is whole" not in capsys.readouterr().err
    assert (tmp_path / "new" / "config.yaml").exists()
    assert main(command) == 0
    rows = load(tmp_path / "new").metrics()
    assert [row["step"] for row in rows if row["split"] == "valid"] == [2, 4, 6, 8]
    assert main(command) == 2  # now there is something to lose
    assert "holds a run already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "what", ["a file", "a link to nothing", "a long name", "something else", "a file above"]
)
def test_a_place_that_is_no_folder_for_a_run_is_a_mistake_and_stays_as_it_is(
    what: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / ("a" * 270 if what == "a long name" else "out")
    if what == "a file":
        out.write_text("mine")
    elif what == "a link to nothing":
        out.symlink_to(tmp_path / "nowhere")
    elif what == "something else":
        out.mkdir()
        (out / "thesis.tex").write_text("mine")
    elif what == "a file above":
        out.write_text("mine")
        out = out / "run"
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", "--config", str(run / "config.yaml"), "--out", str(out)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_a_command_that_fails_for_other_reasons_leaves_no_folder(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "new"
    assert main(["train", "--config", str(run / "config.yaml"), "--data", "nosuch", "--out", str(out)]) == 2
    assert not out.parent.exists()


def test_a_folder_of_version_0_1_is_read_and_gone_on_with(run: Path, again: list[str]) -> None:
    (only,) = sessions(run)
    old = {key: value for key, value in only.items() if key not in ("host", "started", "step")}
    (run / "environment.json").write_text(json.dumps(old, indent=1))
    assert load(run).environment == old
    assert main(["evaluate", str(run)]) == 0
    assert main(again) == 0
    assert sessions(run)[0] == old
