"""How a rule between fields says that it does not hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """A rule over several fields that does not hold.

    `fields` are all those it depends on, the one to blame first. It is not reported when one of them is itself wrong.
    """

    fields: tuple[str, ...]
    what: str
    expected: object = None
    got: object = None
    hint: str = ""


def near_multiples(of: int, number: int) -> str:
    """The multiples of `of` just below and just above a number that is not one."""
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


def near_divisors(of: int, number: int) -> str:
    """The divisors of `of` just below and just above a number that is not one."""
    small = [divisor for divisor in range(1, math.isqrt(of) + 1) if of % divisor == 0]
    divisors = {*small, *(of // divisor for divisor in small)}
    below = max(divisor for divisor in divisors if divisor <= number)
    above = [divisor for divisor in divisors if divisor > number]
    return f"{below} or {min(above)}" if above else str(below)


class RulesBroken(ValueError):
    """Raised inside the schema's validator, to carry all violations through pydantic at once."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(f"{violation.fields[0]}: {violation.what}" for violation in violations))
        self.violations = violations
