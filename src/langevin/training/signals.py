"""Stopping when asked: SIGINT and SIGTERM end a loop after the step in hand, another SIGINT at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def heeding_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Hand the number of such a signal to `stop`, instead of dying of it, at the first Ctrl-C."""
    came: list[int] = []

    def heed(number: int, frame: FrameType | None) -> None:
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)
        stop(number)

    try:
        before = {s: signal.signal(s, heed) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
