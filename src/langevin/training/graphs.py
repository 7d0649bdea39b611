"""Work that is launched over and over as one CUDA graph: the host then costs next to nothing."""

import gc
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch

from langevin.errors import one_line


class Replayed:
    """Called, it does its work: plainly at first, then recorded once for each shape and replayed.

    The work is a method of its owner, which is not held: a graph's memory is free as soon as its owner is
    gone. What the work reads and writes must stay in its place. Work that needs the host on its way cannot
    be recorded: it goes on plainly with a warning, and `failed` is called. Work in the `pool` of another
    graph shares its memory, and must never run at the same time.
    """

    def __init__(
        self,
        work: Callable[[], None],
        stream: torch.cuda.Stream | None,
        *,
        after: int,
        what: str,
        clear: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
        pool: Any = None,
    ) -> None:
        self.method, self.stream, self.what, self.clear = WeakMethod(work), stream, what, clear
        self.pool, self.after, self.failed = pool, after, failed
        self.left: dict[Any, int] = {}  # plain calls to go, by shape
        self.graphs: dict[Any, torch.cuda.CUDAGraph] = {}

    @property
    def graph(self) -> torch.cuda.CUDAGraph | None:
        """That of the first shape."""
        return next(iter(self.graphs.values()), None)

    def work(self) -> None:
        method = self.method()
        assert method is not None
        method()

    def __call__(self, shape: Any = None) -> None:
        if shape in self.graphs:
            self.graphs[shape].replay()
            return
        self.work()
        if self.stream is not None:
            self.left[shape] = self.left.get(shape, self.after) - 1
            if self.left[shape] <= 0:
                self._record(shape)

    def _record(self, shape: Any) -> None:
        self.clear()
        graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # a graph that is collected while another is recorded breaks that
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                self.work()
            self.pool = graph.pool()
        except BaseException as error:
            _renew_generator()
            self.forget()
            self.failed()
            self.clear()
            self.stream = None
            if not isinstance(error, RuntimeError):
                raise
            warnings.warn(f"{self.what} are not replayed as a CUDA graph: {one_line(error)}", stacklevel=1)
            return
        finally:
            if collecting:
                gc.enable()
        self.graphs[shape] = graph

    def forget(self) -> None:
        """Record anew what was recorded."""
        self.graphs.clear()
        self.left.clear()
        self.pool = None  # it was theirs


def _renew_generator() -> None:
    """A recording that failed leaves the generator in it, where plain work may draw nothing: another one
    takes its place, in the same state. Graphs that were recorded with the first must be recorded anew."""
    stuck = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(stuck.device)
    fresh.set_state(stuck.get_state())
    stuck.graphsafe_set_state(fresh.graphsafe_get_state())
