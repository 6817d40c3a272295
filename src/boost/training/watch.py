"""Ending a rank whose main thread waits for one that is dead or stuck, and would not learn of it.

gloo raises where the main thread waits. NCCL does not: the thread waits in C++ for a kernel that never ends, and runs
neither handlers of signals nor anything else until NCCL's own timeout aborts the process without a word. But torch has
let go of the interpreter there, so another thread can look around and act.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from boost.errors import PeerFailure
from boost.training.presence import Presence
from boost.training.signals import StopRequest

_TICK = 0.5


class Watch:
    """A thread that ends the process when others have ended, or let the main thread wait, and that does not act.

    It acts at once where a signal has come and another rank has ended: the launcher has seen it. Without a signal it
    looks around when a wait takes twice as long as any before, from the first step on.

    Args:
        stop: knows of the signals.
        presence: knows which ranks have ended.
        timeout_seconds: how much longer than twice the longest wait so far a wait may be.
        leave: ends the process, with this cause.
    """

    def __init__(
        self,
        stop: StopRequest,
        presence: Presence,
        timeout_seconds: float,
        leave: Callable[[PeerFailure], object],
    ) -> None:
        self._stop, self._presence, self._timeout, self._leave = stop, presence, timeout_seconds, leave
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._over = threading.Event()
        self._limited = False
        self._since: float | None = None
        self._longest = 0.0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def finish(self) -> None:
        """Ends the watch: from here on ranks may end."""
        self._over.set()
        self._thread.join()

    def limit(self) -> None:
        """From here on no wait may be much longer than those before."""
        self._limited = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for other ranks."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.beat()
            self._since = None

    def beat(self) -> None:
        """Inside `waiting`: one wait is over, and another begins."""
        if self._since is not None:
            now = time.monotonic()
            self._longest, self._since = max(self._longest, now - self._since), now

    def _run(self) -> None:
        waited, seen, before = 0.0, None, time.monotonic()
        while not self._over.wait(_TICK):
            since, now = self._since, time.monotonic()
            # Counted here, so that the time for which all processes were suspended is no wait.
            waited = waited + min(now - before, 2 * _TICK) if since is not None and since == seen else 0.0
            seen, before = since, now
            late = waited - 2 * self._longest if self._limited else 0.0
            if (late > 2 * _TICK or self._stop.arrived()) and self._presence.ended():
                self._leave(self._failure("another rank has ended"))
            elif late > self._timeout:
                self._leave(self._failure(f"timed out: it has waited for {waited:.0f} s"))

    def _failure(self, what: str) -> PeerFailure:
        failure = PeerFailure("parallel", f"lost contact with another rank: {what}")
        frame = sys._current_frames().get(self._main)
        failure.add_note("The main thread is at:\n" + "".join(traceback.format_stack(frame)))
        return failure
