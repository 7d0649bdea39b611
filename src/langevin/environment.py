"""What numbers depend on besides their settings."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from langevin.errors import UsageError


def environment(device: str) -> dict[str, Any]:
    """What a run or a measurement depends on besides its settings and data."""
    import torch

    from langevin import __version__

    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {
        "langevin": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "system": platform.platform(),
        "device": name,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def session(device: str, step: int, data: dict[str, Any]) -> dict[str, Any]:
    """What a run writes down each time it begins or goes on, from a step, with the manifest of its data."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {**environment(device), "host": platform.node(), "started": now, "step": step, "data": data}


def pick_device(name: str) -> str:
    """The device of this name, which must be here; auto: a GPU where there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() and len(index) < 5 if ":" in name else True):
        raise UsageError(f"no device is called {name!r}", "Use --device cpu, cuda or cuda:1.")
    if kind == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device is here", "Use --device cpu.")
    if index and int(index) >= torch.cuda.device_count():
        raise UsageError(f"there is no {name}: {torch.cuda.device_count()} are here", "Use --device cuda.")
    return name


@contextmanager
def without_bars() -> Iterator[None]:
    """No bars and remarks of transformers between our own lines, which tell what is wrong."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def can_compile(device: str) -> bool:
    """Whether torch.compile finds the compiler that it needs: of C++ for a CPU, of C for a GPU."""
    own, names = ("CXX", ("g++", "clang++")) if device == "cpu" else ("CC", ("gcc", "clang"))
    wanted = [os.environ[own]] if os.environ.get(own) else list(names)
    return any(map(shutil.which, wanted))


def _commit() -> str | None:
    """The commit of the source tree langevin runs from, if it is one; "-dirty" where files were changed."""
    here = Path(__file__)

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=here.parent, capture_output=True, text=True, check=False
            )
        except OSError:  # there is no git
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", here.name) is None:  # installed inside somebody else's tree
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
