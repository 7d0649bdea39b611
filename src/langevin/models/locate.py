"""Where a model is, by its name. Without torch, so that a wrong name is answered at once."""

from __future__ import annotations

import os
import re
from pathlib import Path

from langevin.data.folders import data_root
from langevin.data.hub import reachable
from langevin.errors import UsageError

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def locate(name: str | os.PathLike[str]) -> str:
    """The folder of a saved model: the one named, a run's, or `$LANGEVIN_DATA/models/NAME`; else the name
    itself, where the Hugging Face Hub, or what was fetched from there before, may have it."""
    name, root = os.fspath(name), data_root()
    places = [Path(name).expanduser(), *([] if root is None else [root / "models" / name])]
    for place in places:
        if place.is_dir():
            of_a_run = place / "model"
            return str(of_a_run if (of_a_run / "config.json").is_file() else place)
    searched = f"no folder {' or '.join(map(str, places))}"
    if _HUB_NAME.fullmatch(name) and not os.path.exists(name) and not os.path.isdir(os.path.dirname(name)):
        if _fetched(name) or reachable():
            return name
        searched += ", and the Hugging Face Hub cannot be reached"
    raise UsageError(
        f"there is no model {name!r}: {searched}",
        "Give a folder written by save_pretrained, a run, or a name on the Hub"
        + ("." if root else " (or under $LANGEVIN_DATA/models/)."),
    )


def _fetched(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # no name the Hub could have
        return False
