"""Which ranks are still there: a file per rank in the run directory, locked for as long as its process lives.

When a collective fails, a rank knows only that some other one is gone or late. The kernel drops a dead process's lock,
and a rank that notices a failure says so in its file; so those that are dead, or alive and silent, can be named, across
machines and without a connection.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import TextIO

from boost.errors import EnvironmentFailure

logger = logging.getLogger("boost")

_NOTICED = "failed"
# A dead rank's lock may drop a moment late, and others lock for an instant to see who is there.
_PATIENCE = 5.0


class Presence:
    """This rank's file, and a look at the others'.

    Args:
        directory: on a file system that all ranks share; created where it does not exist.

    Attributes:
        locks_tell: whether a living rank's lock is seen on other machines; where not, nobody is taken for dead.

    Raises:
        EnvironmentFailure: another process has this rank's place and keeps it.
    """

    def __init__(self, directory: Path, rank: int, world: int) -> None:
        self.directory, self.rank, self.world = directory, rank, world
        directory.mkdir(exist_ok=True)
        self.locks_tell = True
        self._file = self._locked(directory / str(rank))
        self._file.truncate(0)
        os.utime(self._file.fileno())
        self._since = os.fstat(self._file.fileno()).st_mtime_ns

    def _locked(self, path: Path) -> TextIO:
        """The file, locked until the end of the process."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            # Not emptied by opening: it may be a living rank's.
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    return file
            except FileNotFoundError:
                pass
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.close()
                    raise EnvironmentFailure(
                        "run.dir",
                        f"{self.directory.parent} is in use by another run, which has a rank {self.rank} too",
                        hint="wait for it to end or choose another run.dir",
                    ) from None
            except OSError:
                return file  # no locks on this file system: then nobody is taken for dead
            # Held for now, or removed by a rank that was leaving.
            file.close()
            time.sleep(0.05)

    def report(self) -> None:
        """Says that this rank has noticed a failure."""
        try:
            os.pwrite(self._file.fileno(), _NOTICED.encode(), 0)
            os.fsync(self._file.fileno())  # over a network the others would see it when the process ends
        except OSError as error:  # a full disk, say: then the others can only tell that this rank has ended
            logger.warning("%s: cannot be written: %s", self._file.name, error.strerror)

    def leave(self) -> None:
        """Ends the presence of a rank that is done."""
        (self.directory / str(self.rank)).unlink(missing_ok=True)
        self._file.close()

    def gone(self, patience: float = 0.5) -> list[int]:
        """Ranks whose process has ended without a word; waits that long for the first, as locks drop a moment late."""
        deadline = time.monotonic() + patience
        while not (gone := [rank for rank in self._others() if self._dead(rank)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return gone

    def ended(self) -> list[int]:
        """Some of the ranks whose process has ended, with a word or without.

        Each looks at the ranks 1, 2, 4, ... after it. If they leave when they see one that has, all others soon will.
        """
        neighbours = {(self.rank + (1 << power)) % self.world for power in range((self.world - 1).bit_length())}
        return [rank for rank in sorted(neighbours - {self.rank}) if self._dead(rank)]

    def silent(self, patience: float) -> list[int]:
        """Ranks that have not noticed the failure after so many seconds, when a rank that only waits would have."""
        deadline = time.monotonic() + patience
        while (silent := self._others()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return silent

    def _others(self) -> list[int]:
        """Ranks that have not said that they noticed a failure, of the attempt that this rank is in."""
        return [rank for rank in range(self.world) if rank != self.rank and not self._has_noticed(rank)]

    def _has_noticed(self, rank: int) -> bool:
        path = self.directory / str(rank)
        try:
            return path.read_text() == _NOTICED and path.stat().st_mtime_ns >= self._since
        except OSError:
            return False

    def _dead(self, rank: int) -> bool:
        if not self.locks_tell:
            return False
        try:
            with open(self.directory / str(rank)) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # it holds its lock, or there are none here
        return True
