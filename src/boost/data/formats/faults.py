"""What to do with a bad record: stop at the first one, or skip it and count."""

from __future__ import annotations

from typing import Literal

from boost.errors import UserError

OnError = Literal["stop", "skip"]
_EXAMPLES_KEPT = 5


class Faults:
    """Collects the bad records of one pass over the inputs.

    A damaged file (a truncated archive, an unreadable Parquet file) never comes here: how much of it is missing
    cannot be counted, so it always stops the run.

    Attributes:
        skipped: records left out so far.
        examples: the first few of them, as `file:line: what is wrong`.
    """

    def __init__(self, on_error: OnError = "stop") -> None:
        if on_error not in ("stop", "skip"):
            raise UserError("on_error", "unknown choice", expected="stop or skip", got=on_error)
        self.on_error = on_error
        self.skipped = 0
        self.examples: list[str] = []

    def report(self, where: str, what: str) -> None:
        """Raises UserError under "stop"; counts the record under "skip"."""
        if self.on_error == "stop":
            raise UserError(where, what, hint="correct the record, or leave bad records out with --on-error skip")
        self.skipped += 1
        if len(self.examples) < _EXAMPLES_KEPT:
            self.examples.append(f"{where}: {what}")
