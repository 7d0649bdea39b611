"""What is written down about the source tree."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from langevin import environment


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree of one file, and langevin running from it."""
    if shutil.which("git") is None:
        pytest.skip("git is not here")
    git(tmp_path, "init", "--quiet")
    file = tmp_path / "environment.py"
    file.write_text("one")
    monkeypatch.setattr(environment, "__file__", str(file))
    return file


def test_the_commit_says_whether_files_were_changed(tree: Path) -> None:
    git(tree.parent, "add", tree.name)
    git(tree.parent, "commit", "--quiet", "-m", "one")
    git(tree.parent, "tag", "v1")
    head = git(tree.parent, "rev-parse", "HEAD")
    assert environment._commit() == head
    tree.write_text("two")
    assert environment._commit() == f"{head}-dirty"


def test_a_tree_that_langevin_only_lies_in_is_not_its_own(tree: Path) -> None:
    (tree.parent / "other").write_text("other")
    git(tree.parent, "add", "other")
    git(tree.parent, "commit", "--quiet", "-m", "other")
    assert environment._commit() is None


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._commit() is None
