"""The run directory: who may write in it, its log, its resolved configuration, and how the run ended."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import IO
from uuid import uuid4

from boost.errors import EnvironmentFailure, UserError

logger = logging.getLogger("boost")


def atomic_write(path: Path, text: str) -> None:
    """Replaces a file by new content, so that a reader sees the old or the new one and never half of it."""
    # Not by the process id: on other machines, or in other containers, ranks have the same one.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class RunDirectory:
    """A directory that one run at a time writes into.

    Args:
        path: `run.dir`; created where it does not exist.

    Raises:
        UserError: it is a file, or cannot be created or written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[str] | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe.{uuid4().hex}"
            probe.touch()
            probe.unlink()
        except FileExistsError:
            raise UserError("run.dir", f"{self.path} is not a directory", hint="choose another run.dir") from None
        except OSError as error:
            raise UserError("run.dir", f"cannot write to {self.path}: {error.strerror}") from error

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def lock(self, patience: float = 2.0) -> None:
        """Keeps other runs out until this process ends.

        Args:
            patience: seconds to wait for a lock that is held; that of a process that has just died may drop late.

        Raises:
            UserError: another process holds it.
        """
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115 - held until `unlock` or the end of the process
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.05)
                    continue
                self.unlock()
                raise UserError(
                    "run.dir",
                    f"{self.path} is in use by another run",
                    hint="wait for it to end or choose another run.dir",
                ) from None
            except OSError as error:
                logger.warning(
                    "%s cannot be locked (%s): make sure that only one run uses it", self.path, error.strerror
                )
            return

    def unlock(self) -> None:
        """Lets other runs in again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def log_handler(self) -> logging.Handler:
        """Sends a log to log.txt, after whatever earlier runs wrote there."""
        handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        return handler

    def append_log(self, text: str) -> None:
        """Adds lines to log.txt from a process that does not log there, such as a failing rank."""
        with open(self.path / "log.txt", "a", encoding="utf-8") as file:
            file.write(text)

    def write_config(self, text: str) -> None:
        atomic_write(self.path / "config.yaml", text)

    # --- status.json ---

    def clear_status(self) -> None:
        (self.path / "status.json").unlink(missing_ok=True)

    def write_status(self, status: str, exit_code: int, cause: str, *, step: int | None = None) -> None:
        """How the run ended: `{status, step, exit_code, cause}`."""
        step = self.last_step() if step is None else step
        record = {"status": status, "step": step, "exit_code": exit_code, "cause": cause}
        atomic_write(self.path / "status.json", json.dumps(record) + "\n")

    def write_status_unless_written(self, status: str, exit_code: int, cause: str, patience: float = 1.0) -> None:
        """For a rank that only saw a peer vanish: the peer's own account comes first, if it gives one in time."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if (self.path / "status.json").exists():
                return
            time.sleep(0.05)
        self.write_status(status, exit_code, cause)

    def read_status(self) -> dict[str, object] | None:
        try:
            record = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    # --- metrics.jsonl ---

    def last_step(self) -> int:
        """The last step that metrics.jsonl records, 0 without any."""
        records = self.read_metrics()
        return int(records[-1]["step"]) if records else 0

    def read_metrics(self) -> list[dict[str, float]]:
        """The complete records; a half-written last line is dropped."""
        try:
            text = self.metrics.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        records = []
        for line in text.splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        return records

    def rewind_metrics(self, step: int) -> None:
        """Drops the records after `step`: those steps will be taken again."""
        if not self.metrics.exists():
            return
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        try:
            atomic_write(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        except OSError as error:
            raise EnvironmentFailure(str(self.metrics), f"cannot be rewritten: {error.strerror}") from error
