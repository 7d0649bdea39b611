"""Jobs that workers can be sent: they do next to nothing, in various ways."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from langevin.studies.jobs import Job


def well(value: int) -> dict[str, Any]:
    return {"value": value, "said": f"it is {value}"}


def badly(why: str) -> dict[str, Any]:
    raise RuntimeError(why)


def once(mark: str) -> dict[str, Any]:
    """Fails where this process did it before."""
    if os.environ.get("BROKEN"):
        raise RuntimeError("still broken")
    os.environ["BROKEN"] = "yes"
    if mark == "breaks":
        raise RuntimeError("launch failure")
    return {"pid": os.getpid()}


def killed(how: int) -> dict[str, Any]:
    os.kill(os.getpid(), how)
    time.sleep(60)
    return {}


def slowly(mark: str) -> dict[str, Any]:
    """Tells when it is at work, and how many others are."""
    here = Path(mark)
    others = len(list(here.parent.glob("*.busy")))
    here.write_text("")
    time.sleep(0.05)
    here.unlink()
    return {"others": others}


def job(folder: Path, name: str, work: Any, alone: bool = False, **arguments: Any) -> Job:
    return Job(name, work, arguments, folder / name / "done.json", alone=alone)
