"""A run folder: who may write into it, what is there, and where and on what data it was trained.

config.yaml  metrics.jsonl  environment.json  model/  checkpoints/step-N/  evaluation-SPLIT.json  samples/
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from langevin.errors import UsageError
from langevin.runs.files import misfit, not_read, read_json, reason, remove, standing, write_json

LOCK = ".lock"
ENVIRONMENT = "environment.json"
STALE_SECONDS = 3600.0  # after which a file half written was left by a process that was killed

ROW = {"step": int, "tokens": int, "split": str, "loss": float}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl. A torn last line is left out; so are other lines that are no rows, and a
    warning tells of them."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise not_read(path, error) from error
    rows, bad = [], []
    for number, line in enumerate(lines, 1):
        row = metrics_row(line)
        if row is not None:
            rows.append(row)
        elif line.strip() and number < len(lines):
            bad.append(number)
    if bad:
        some = f"line {bad[0]}" if len(bad) == 1 else f"{len(bad)} lines, the first being line {bad[0]},"
        warnings.warn(f"{path} is damaged: {some} left out", stacklevel=2)
    return rows


def metrics_row(line: bytes) -> dict[str, Any] | None:
    """A row of metrics.jsonl; None where the line is not one."""
    try:
        row = json.loads(line.decode())
        return row if misfit(row, ROW) is None else None
    except (ValueError, RecursionError):
        return None


def sessions(folder: Path) -> list[dict[str, Any]]:
    """Where and when a run was trained and on what data: a record for each time it began or went on, the
    first first; version 0.1 kept only the last."""
    shape = {"data": {"splits": {str: dict}}}
    found = read_json(
        folder / ENVIRONMENT,
        (shape, [shape]),
        "Bring it back from a copy, or delete it: then nobody knows what the run was trained on.",
        optional=True,
    )
    return [] if found is None else [found] if isinstance(found, dict) else found


def add_session(folder: Path, session: dict[str, Any]) -> None:
    """Tell of one more session (see `langevin.environment.session`) behind those that were."""
    write_json(folder / ENVIRONMENT, [*sessions(folder), session])


def check_data(folder: Path, manifest: dict[str, Any], name: str) -> None:
    """Raise unless these data, called so, are what the run was trained on, by their hashes."""
    from langevin.data.corpus import same_data

    before = sessions(folder)
    if not before:
        warnings.warn(f"{folder / ENVIRONMENT} does not say what it was trained on", stacklevel=2)
        return
    changed = same_data(before[-1]["data"], manifest)
    if changed is not None:
        raise UsageError(
            f"{changed} of {name} is not what {folder} was trained with",
            "Bring the same data back, say where they are by --data, or train anew into another --out.",
        )


State = Literal["empty", "begun", "trained"]


def opened(folder: Path, resume: bool) -> State:
    """What a run that wants this folder finds there; raises where it must not write.

    empty: nothing. begun: settings and perhaps a few rows of a run of which no weights were kept, so that
    it may begin again, with other settings too. trained: a run to go on with.
    """
    try:
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        steps = (folder / "checkpoints").iterdir() if "checkpoints" in names else ()
        trained = any(re.fullmatch(r"step-\d+", path.name) for path in steps)
    except FileNotFoundError:
        return "empty"
    except OSError as error:
        raise _no_target(folder, error) from error
    trained = trained or standing(folder / "model").is_dir()
    if "config.yaml" not in names:
        if names or trained:
            first = min(names, default="a model")
            raise UsageError(f"{folder} holds something else ({first})", "Choose another --out.")
        return "empty"
    if not trained:
        return "begun"
    if not resume:
        raise UsageError(
            f"{folder} holds a run already", "Go on with it by --resume auto, or choose another --out."
        )
    return "trained"


class Lock:
    """One writer at a time: held from when it is made until it is released, or the process ends.

    A second writer is refused and told who has it. The operating system lets go of the lock of a process
    that was killed, so none is ever stale. On a file system without locks a warning is all there is.
    What cannot be written to is a UsageError, before any work. A folder that was made for the lock and is
    still empty when it is released is removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, os.getpid()
        self.file: TextIO | None = None
        self.made: list[Path] = []
        try:
            if folder.is_symlink() and not folder.exists():
                raise UsageError(f"{folder} is a link to nothing", "Choose another --out.")
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"{folder} is a file", "Choose another --out.")
            while self.file is None:
                self._take()
            self.file.truncate(0)
            self.file.write(f"process {self.process} on {socket.gethostname()}")
            self.file.flush()
            os.fsync(self.file.fileno())
            _tidy(folder)
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            self.release()
            if isinstance(error, UsageError):
                raise
            raise _no_target(folder, error) from error

    def _take(self) -> None:
        """Try once; there is no file yet where its last holder removed it meanwhile."""
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.made = missing or self.made
        file = open(self.folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  (open: held)
        try:
            from fcntl import LOCK_EX, LOCK_NB, flock

            flock(file, LOCK_EX | LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                file.seek(0)
                holder = file.read(200).strip() or "another process"
            raise UsageError(
                f"{self.folder} is being written by {holder}",
                "Wait until it ends, or choose another --out.",
            ) from None
        except (OSError, ImportError):
            warnings.warn(
                f"{self.folder} cannot be locked: see that no other process writes there", stacklevel=4
            )
            self.file = file
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.folder / LOCK), os.fstat(file.fileno())):
                self.file = file
                return
        file.close()

    def release(self) -> None:
        if self.process != os.getpid():  # a fork has a copy, and the lock is not its own
            return
        with suppress(OSError):
            if self.file is not None and not self.file.closed:
                (self.folder / LOCK).unlink()  # while it is held: who has it open sees that it is gone
                self.file.close()
            for path in self.made:
                path.rmdir()

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _no_target(folder: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{str(folder)!r:.200} cannot be written to: {reason(error)}", "Choose another --out."
    )


def _tidy(folder: Path) -> None:
    """Remove what writers that were killed left, and bring back a model that one had moved aside."""
    if (folder / ".model.old").exists() and not (folder / "model").exists():
        os.replace(folder / ".model.old", folder / "model")
    for name in (".model.old", ".model.writing"):
        remove(folder / name)
    for path in folder.glob(".*.writing"):
        left = re.fullmatch(r"\..+\.[0-9a-f]{8}\.writing", path.name) and path.is_file()
        if left and time.time() - path.stat().st_mtime > STALE_SECONDS:
            path.unlink()
