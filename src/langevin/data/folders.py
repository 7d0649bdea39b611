"""Where data are looked for and kept."""

from __future__ import annotations

import os
from pathlib import Path


def data_root() -> Path | None:
    """`$LANGEVIN_DATA`, a folder with one folder a set; None when not set."""
    path = os.environ.get("LANGEVIN_DATA")
    return Path(path).expanduser() if path else None


def cache_root() -> Path:
    """`$LANGEVIN_CACHE`, or ~/.cache/langevin."""
    path = os.environ.get("LANGEVIN_CACHE")
    return Path(path).expanduser() if path else Path.home() / ".cache" / "langevin"
