"""SIGTERM and Ctrl-C as a request: finish the step, save, leave."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside the block a signal ends the process at once, also where it waits in C++ and no handler would run."""
    previous = {number: signal.signal(number, signal.SIG_DFL) for number in StopRequest.SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest:
    """Inside the `with` block, a signal only sets `requested`; the loop asks every step.

    Args:
        deaf_after_failure: SIGTERM is ignored once an exception has left the block: there is something left to say.

    A second Ctrl-C, at least three seconds after the first, interrupts at once (launchers forward the first one, so
    it may arrive twice).
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, *, deaf_after_failure: bool = False) -> None:
        self.requested = False
        self._deaf_after_failure = deaf_after_failure
        self._since = 0.0
        self._arrived = False

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._previous_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._deaf_after_failure:
            self._previous[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_writer)
        os.close(self._reader)
        os.close(self._writer)
        self._reader = -1

    def arrived(self) -> bool:
        """Inside the `with` block, for another thread: whether a signal has come, be its handler still to run."""
        try:
            numbers = os.read(self._reader, 256)
        except OSError:  # none has come, or the block is over
            numbers = b""
        self._arrived = self._arrived or any(number in self.SIGNALS for number in numbers)
        return self._arrived

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and time.monotonic() - self._since > 3:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._since = True, time.monotonic()
