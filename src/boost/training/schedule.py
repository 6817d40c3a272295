"""Learning-rate schedules: pure functions from a step to a multiplier of the peak rate."""

from __future__ import annotations

import math

from boost.config import ScheduleSection


def lr_multiplier(schedule: ScheduleSection, step: int, steps: int) -> float:
    """The multiplier of the update number `step` (0 is the first) of `steps`.

    Linear warm-up from 0, then cosine or linear decay to `min_lr_ratio`, or constant. Past the last step it stays
    at its end, so it never rises again.
    """
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    floor = schedule.min_lr_ratio
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    if schedule.name == "linear":
        return floor + (1 - floor) * (1 - progress)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
