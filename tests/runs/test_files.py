"""A file is the old one or the new, whatever happens; what is read is what it should be, or refused."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from langevin.errors import UsageError, WorkError
from langevin.runs import files


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"step": 1})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(WorkError, match="could not be written: No space left") as caught:
        files.write_json(path, {"step": 2})
    assert caught.value.remedy
    assert os.listdir(tmp_path) == ["a.json"]
    assert files.read_json(path) == {"step": 1}


def test_several_writers_at_once_never_tear_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    values = [{"writer": i, "rows": [i] * 3000} for i in range(3)]
    files.write_json(path, values[0])

    def write(value: Any) -> None:
        for _ in range(20):
            files.write_json(path, value)

    writers = [threading.Thread(target=write, args=(value,)) for value in values]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert files.read_json(path) in values
    assert os.listdir(tmp_path) == ["a.json"]


def test_text_that_is_no_unicode_is_written_all_the_same(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"prompt": "caf\udce9 é"})
    files.append_json(tmp_path / "samples" / "b.jsonl", {"prompt": "caf\udce9 é"})
    assert files.read_json(tmp_path / "a.json") == {"prompt": "caf\udce9 é"}
    assert "é" in (tmp_path / "a.json").read_text()
    assert json.loads((tmp_path / "samples" / "b.jsonl").read_text()) == {"prompt": "caf\udce9 é"}


@pytest.mark.parametrize("dies", ["while it is filled", "between the moves", "after them"])
def test_a_folder_is_the_old_one_or_the_new_when_its_writer_is_killed(
    dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def fill(value: str, dies: bool = False) -> Any:
        def filled(folder: Path) -> None:
            (folder / "value").write_text(value)
            if dies:
                raise Killed

        return filled

    target = tmp_path / "model"
    files.write_folder(target, fill("old"))
    whole, moves = os.replace, []

    def move(source: Path, place: Path) -> None:
        moves.append(place)
        if len(moves) == 2 and dies == "between the moves":
            raise Killed
        whole(source, place)

    monkeypatch.setattr(os, "replace", move)
    if dies == "after them":
        monkeypatch.setattr(
            files, "flush", lambda path: None if path != tmp_path else (_ for _ in ()).throw(Killed)
        )
    with pytest.raises(Killed):
        files.write_folder(target, fill("new", dies == "while it is filled"))
    monkeypatch.undo()
    expected = "new" if dies == "after them" else "old"
    assert (files.standing(target) / "value").read_text() == expected
    files.write_folder(target, fill("newer"))
    assert os.listdir(tmp_path) == ["model"]
    assert (target / "value").read_text() == "newer"


def test_a_folder_that_cannot_be_filled_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    files.write_folder(target, lambda folder: (folder / "a").write_text("a") and None)

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WorkError, match="model could not be written: No space left"):
        files.write_folder(target, full)
    assert os.listdir(tmp_path) == ["model"]
    (tmp_path / ".model.writing").write_text("a stray file of that name")
    files.write_folder(target, lambda folder: (folder / "b").write_text("b") and None)
    assert os.listdir(target) == ["b"]


SHAPE = {"step": int, "loss": float, "best": (bool, None), "splits": {str: {"sha256": str}}, "rows": [list]}
FITS = {"step": 1, "loss": 2, "best": None, "splits": {"test": {"sha256": "0"}}, "rows": [[]], "more": 1}


def test_a_table_of_the_right_shape_is_read(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", FITS)
    assert files.read_json(tmp_path / "a.json", SHAPE) == FITS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{", "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b"{}", "has no step"),
        (b"[1]", "not a table"),
        (b"null", "not a table"),
        ({"step": "1"}, "step is '1', not a whole number"),
        ({"step": True}, "step is True, not a whole number"),
        ({"step": 1.5}, "step is 1.5, not a whole number"),
        ({"loss": None}, "loss is None, not a number"),
        ({"best": 1}, "best is 1"),
        ({"splits": []}, "splits is not a table"),
        ({"splits": {"test": {}}}, "splits.test has no sha256"),
        ({"splits": {"test": {"sha256": 5}}}, "splits.test.sha256 is 5, not a string"),
        ({"rows": {}}, "rows is not a list"),
        ({"rows": [[], 3]}, r"rows\[1\] is 3, not a list"),
    ],
)
def test_a_file_of_another_shape_is_refused_in_two_lines(content: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(FITS | content).encode())
    with pytest.raises(UsageError, match=said) as caught:
        files.read_json(path, SHAPE)
    assert str(path) in caught.value.cause
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_file_is_an_error_or_none(tmp_path: Path) -> None:
    assert files.read_json(tmp_path / "a.json", optional=True) is None
    with pytest.raises(UsageError, match="there is no"):
        files.read_json(tmp_path / "a.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        files.read_json(tmp_path, optional=True)
