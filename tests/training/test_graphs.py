"""Recording CUDA graphs: what breaks one is kept away while it is made. The rest needs a GPU, see
scripts/check_training_on_gpu.py."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from langevin.training import graphs


class Work:
    def __init__(self, fails: bool) -> None:
        self.fails, self.collecting = fails, [True]

    def do(self) -> None:
        self.collecting.append(gc.isenabled())
        if self.fails and not gc.isenabled():
            raise RuntimeError("it needs the host")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_a_graph_is_recorded(monkeypatch: Any, fails: bool) -> None:
    @contextmanager
    def recording(graph: Any, **_: Any) -> Any:
        yield

    class Graph:
        def pool(self) -> None:
            return None

    renewed, failed = [], []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(graphs, "_renew_generator", lambda: renewed.append(True))
    work = Work(fails)
    replayed = graphs.Replayed(
        work.do,
        object(),  # type: ignore[arg-type]
        after=1,
        what="steps",
        failed=lambda: failed.append(True),
    )
    replayed.graphs["another shape"] = Graph()  # type: ignore[assignment]
    if fails:
        with pytest.warns(UserWarning, match="steps are not replayed"):
            replayed()
    else:
        replayed()
    assert work.collecting == [True, True, False]
    assert gc.isenabled()
    assert bool(renewed) == bool(failed) == fails == (not replayed.graphs)
