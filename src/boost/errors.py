"""Errors with exit codes: what a user sees, in one line, when a run cannot go on.

Exit codes: 0 done; 2 the user can fix it; 3 environment, worth a retry; 4 numerics; 75 preempted with state saved.
"""

from __future__ import annotations

DONE = 0
USER = 2
ENVIRONMENT = 3
NUMERICS = 4
PREEMPTED = 75


class BoostError(Exception):
    """Base of every error that is shown to the user as one line instead of a traceback."""

    exit_code = ENVIRONMENT


class UserError(BoostError):
    """Configuration, data or checkpoint identity: the user can fix it.

    Args:
        where: the file or the field that is wrong.
        what: what is wrong with it.
        expected, got: the two sides of the mismatch, where there are two.
        hint: what to do about it.
    """

    exit_code = USER

    def __init__(self, where: str, what: str, *, expected: object = None, got: object = None, hint: str = "") -> None:
        sides = [f"{label} {value}" for label, value in (("expected", expected), ("got", got)) if value is not None]
        line = f"{where}: {what}" + (f" ({', '.join(sides)})" if sides else "") + (f"; {hint}" if hint else "")
        super().__init__(" ".join(line.split()))


class EnvironmentFailure(UserError):
    """Disk, port, lost peer, hang: nothing is wrong with the input and a retry may succeed."""

    exit_code = ENVIRONMENT


class PeerFailure(EnvironmentFailure):
    """This rank only learned that another one failed; that one knows why."""


class NumericsError(UserError):
    """A loss or a gradient is not finite."""

    exit_code = NUMERICS


class Preempted(BoostError):
    """The run was asked to stop and has saved its state."""

    exit_code = PREEMPTED
