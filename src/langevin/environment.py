"""What numbers depend on besides their settings."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any


def environment(device: str, data: dict[str, Any]) -> dict[str, Any]:
    """What a run depends on besides its config."""
    import torch
    import transformers

    from langevin import __version__

    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {
        "langevin": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(),
        "device": name,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "data": data,
    }


def _commit() -> str | None:
    """The commit of the source tree langevin runs from, if it is one."""
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None if done.returncode == 0 else None
