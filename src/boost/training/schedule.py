"""Learning-rate schedules: pure functions from a step to a multiplier of the peak rate."""

from __future__ import annotations

import math

from boost.config import ScheduleSection

RESTART_STEPS = 5  # of warm-up after each exact step of LORO
RESTART_FROM = 1e-6


def lr_multiplier(
    schedule: ScheduleSection, step: int, steps: int, cycle: int | None = None, restart_every: int | None = None
) -> float:
    """The multiplier of the update number `step` (0 is the first) of `steps`.

    Linear warm-up from 0, then cosine or linear decay to `min_lr_ratio`, or constant. Past the last step it stays
    at its end, so it never rises again. The jagged cosines are other functions, below.

    Args:
        cycle: of LORO's jagged cosine: steps between two restarts.
        restart_every: of ReLoRA's: the same.
    """
    if schedule.name == "jagged_cosine" and restart_every is not None:
        return restarted_cosine(schedule, min(step, steps), steps, restart_every)
    if schedule.name == "jagged_cosine":
        assert cycle is not None
        return jagged_cosine(schedule, min(step, steps), steps, cycle, -schedule.warmup_steps)
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    floor = schedule.min_lr_ratio
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
    if schedule.name == "linear":
        return floor + (1 - floor) * (1 - progress)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def jagged_cosine(schedule: ScheduleSection, step: int, steps: int, cycle: int, adjust: int) -> float:
    """The published schedule of LORO: a cosine that starts again from almost 0 every `cycle` steps.

    The warm-up begins at `min_lr_ratio`. Afterwards the cosine is read `adjust` steps from where it stands: with the
    published `adjust` of minus the warm-up it goes on rising for a second warm-up's length, and ends above its floor.
    """
    floor, warmup = schedule.min_lr_ratio, schedule.warmup_steps
    span = max(1, steps - warmup)

    def cosine(progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress / span))

    def decayed(at: int) -> float:
        return floor + (1 - floor) * cosine(at - warmup)

    if step < warmup:
        place, top = step, cosine(-adjust)

        def plain(at: int) -> float:
            return floor + at / warmup * (top - floor)

    else:
        place, plain = step + adjust, decayed
    restarts, since = divmod(place, cycle)
    if since < RESTART_STEPS and restarts > 0:
        return RESTART_FROM + since / RESTART_STEPS * (plain(place - since) - RESTART_FROM)
    return plain(place)


def restarted_cosine(schedule: ScheduleSection, step: int, steps: int, cycle: int, adjust: int = 0) -> float:
    """The published schedule of ReLoRA: a cosine that starts again from 0 every `cycle` steps.

    A restart's warm-up rises in a line to where the cosine is at its end. The first cycle has the run's own warm-up.

    Args:
        adjust: the schedule stands that many steps further on than the run, once it has warmed up.
    """
    floor, warmup, again = schedule.min_lr_ratio, schedule.warmup_steps, schedule.restart_warmup_steps
    if step < warmup:
        return step / warmup

    def decayed(at: int) -> float:
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (at - warmup) / max(1, steps - warmup)))

    place = step + adjust
    since = place % cycle
    if since < again and step >= cycle:
        return since / again * decayed(place - since + again)
    return decayed(place)
