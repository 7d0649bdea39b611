"""One writer at a time, provenance that is kept, and nothing begun where it could not end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from langevin.errors import UsageError
from langevin.runs import folder
from langevin.runs.folder import Lock, add_session, check_data, opened, read_metrics, sessions

HOLDER = """
import sys, time
from pathlib import Path
from langevin.runs.folder import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def held(tmp_path: Path) -> Any:
    """A process that holds the lock of tmp_path / "run"."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_writer_is_refused_by_name_until_the_first_is_gone_however_it_went(
    held: subprocess.Popen[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"run is being written by process {held.pid} on ") as caught:
        Lock(tmp_path / "run")
    assert caught.value.remedy.startswith("Wait")
    with pytest.raises(UsageError, match=f"process {held.pid} on "):  # a refusal must not rub out the name
        Lock(tmp_path / "run")
    held.send_signal(signal.SIGKILL)
    held.wait()
    assert os.listdir(tmp_path / "run") == [".lock"]
    with Lock(tmp_path / "run"):
        pass
    assert os.listdir(tmp_path / "run") == []


def test_one_process_is_one_writer_too(tmp_path: Path) -> None:
    with Lock(tmp_path), pytest.raises(UsageError, match=f"by process {os.getpid()} on "):
        Lock(tmp_path)
    Lock(tmp_path).release()


def test_a_forked_process_does_not_let_go_of_its_parents_lock(tmp_path: Path) -> None:
    with Lock(tmp_path) as lock:
        child = os.fork()
        if not child:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(UsageError, match="is being written by"):
            Lock(tmp_path)


def test_a_lock_leaves_nothing_behind_where_nothing_was_written(tmp_path: Path) -> None:
    Lock(tmp_path / "a" / "b").release()
    assert os.listdir(tmp_path) == []
    lock = Lock(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "file").write_text("")
    lock.release()
    lock.release()
    assert os.listdir(tmp_path / "a" / "b") == ["file"]


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unable)
    with pytest.warns(UserWarning, match="cannot be locked: see that no other process"), Lock(tmp_path):
        pass


def test_what_killed_writers_left_is_cleaned_and_what_others_left_is_not(tmp_path: Path) -> None:
    for name in (".model.old", ".model.writing", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    for name in (".config.yaml.0123abcd.writing", ".evaluation-test.json.0123abcd.writing", ".notes.old"):
        (tmp_path / name).write_text("")
    os.utime(tmp_path / ".config.yaml.0123abcd.writing", (0, 0))
    Lock(tmp_path).release()
    kept = {".evaluation-test.json.0123abcd.writing", ".notes.old", "model"}  # it may be being written now
    assert set(os.listdir(tmp_path)) == kept
    (tmp_path / "model").rename(tmp_path / ".model.old")
    Lock(tmp_path).release()
    assert (tmp_path / "model" / "which").read_text() == "model"


def _file(path: Path) -> Path:
    path.write_text("")
    return path


def _dangling(path: Path) -> Path:
    path.symlink_to(path.parent / "nowhere")
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: _file(path / "a"), "is a file"),
        (lambda path: _file(path / "a") / "b", "Not a directory"),
        (lambda path: _dangling(path / "a"), "is a link to nothing"),
        (lambda path: path / ("a" * 300), "File name too long"),
        (lambda path: path / ("a/" * 3000), "File name too long"),
        (lambda path: path / "a\0b", "null"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(
    make: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        Lock(make(tmp_path))
    assert caught.value.remedy == "Choose another --out."
    assert len(caught.value.cause) < 600


def test_a_folder_of_somebody_else_and_a_full_disk_are_refused(
    tmp_path: Path, unprivileged: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match="No space left"):
            Lock(tmp_path / "new")
    assert os.listdir(tmp_path) == []
    tmp_path.chmod(0o555)
    unprivileged()
    for path in (tmp_path, tmp_path / "new"):
        with pytest.raises(UsageError, match="cannot be written to: Permission denied"):
            Lock(path)


@pytest.mark.parametrize(
    ("there", "resume", "finds"),
    [
        ([], False, "empty"),
        ([".lock", ".cache"], False, "empty"),
        (["config.yaml", "metrics.jsonl", "environment.json"], False, "begun"),
        (["config.yaml", "checkpoints/.step-4.writing/state.json", "samples/a"], True, "begun"),
        (["config.yaml", "checkpoints/step-4/state.json"], True, "trained"),
        (["config.yaml", "model/config.json", "notes.txt"], True, "trained"),
        (["config.yaml", ".model.old/config.json"], True, "trained"),
        (["config.yaml", "checkpoints/step-4/state.json"], False, "holds a run already"),
        (["config.yaml", "model/config.json"], False, "holds a run already"),
        (["thesis.tex"], True, r"holds something else \(thesis.tex\)"),
        (["model/config.json"], True, "holds something else"),
        ([".model.old/config.json"], True, "holds something else"),
    ],
)
def test_what_a_run_finds_in_its_folder(there: list[str], resume: bool, finds: str, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    if finds in ("empty", "begun", "trained"):
        assert opened(tmp_path, resume) == finds
    else:
        with pytest.raises(UsageError, match=finds):
            opened(tmp_path, resume)


def test_a_place_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert opened(tmp_path / "nowhere", False) == "empty"
    with pytest.raises(UsageError, match="Not a directory"):
        opened(_file(tmp_path / "a"), False)


def data(test: str = "0") -> dict[str, Any]:
    return {"tokenizer": {"name": "bytes"}, "splits": {"test": {"text_sha256": test}}}


def test_sessions_are_added_behind_those_that_were_also_behind_that_of_version_0_1(tmp_path: Path) -> None:
    assert sessions(tmp_path) == []
    (tmp_path / "environment.json").write_text(json.dumps({"torch": "2.11", "data": data()}))
    for step in (4, 8):
        add_session(tmp_path, {"step": step, "data": data()})
    found = sessions(tmp_path)
    assert [session.get("step") for session in found] == [None, 4, 8]
    assert found[0]["torch"] == "2.11"


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", "1", '{"data": {}}', '[{"data": {"splits": [1]}}]', "\0"]
)
def test_provenance_that_is_damaged_is_refused_and_stays(content: str, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(content)
    with pytest.raises(UsageError, match=r"environment.json is damaged"):
        add_session(tmp_path, {"step": 0, "data": data()})
    with pytest.raises(UsageError, match=r"environment.json is damaged"):
        check_data(tmp_path, data(), "text")
    assert (tmp_path / "environment.json").read_text() == content


def test_other_data_are_refused_by_name_and_the_same_data_taken_from_anywhere(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="does not say what it was trained on"):
        check_data(tmp_path, data(), "text")
    add_session(tmp_path, {"step": 0, "data": data()})
    check_data(tmp_path, data(), "elsewhere/text")
    with pytest.raises(UsageError, match="the test text of elsewhere/text is not what"):
        check_data(tmp_path, data(test="1"), "elsewhere/text")


def test_lines_that_are_no_rows_are_left_out_and_told_of_but_for_a_torn_last_one(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    row = {"step": 1, "tokens": 64, "split": "train", "loss": float("nan")}
    good = json.dumps(row).encode()
    path.write_bytes(good + b"\n" + good + b"\n" + good[:20])
    assert len(read_metrics(path)) == 2
    assert not recwarn.list
    bad = [b"1", b"{}", b"\xff\xfe", b'{"step": 1}', good[:-1], good.replace(b"64", b'"x"'), b"[" * 100_000]
    path.write_bytes(b"\n".join([good, *bad, good, b""]))
    with pytest.warns(
        UserWarning, match="metrics.jsonl is damaged: 7 lines, the first being line 2, left out"
    ):
        assert len(read_metrics(path)) == 2
    path.write_bytes(good)
    assert len(read_metrics(path)) == 1
    assert folder.metrics_row(good)["step"] == 1  # type: ignore[index]
