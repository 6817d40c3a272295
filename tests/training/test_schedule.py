"""Learning-rate multipliers against the published CoLA schedule, and the shapes' ends."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from boost.config import ScheduleSection
from boost.training.restart import steps_since_restart
from boost.training.schedule import jagged_cosine, lr_multiplier, restarted_cosine

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())


def test_cosine_is_the_published_one() -> None:
    golden = GOLDEN["cola_cosine"]
    schedule = ScheduleSection(warmup_steps=golden["params"]["warmup"], min_lr_ratio=golden["params"]["min_lr_ratio"])
    steps = golden["params"]["steps"]
    ours = [lr_multiplier(schedule, step, steps) for step in range(steps)]
    assert ours == pytest.approx(golden["lr"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("published", ["loro_130m", "loro_adjust0"])
def test_jagged_cosine_is_the_published_one(published: str) -> None:
    golden = GOLDEN[published]
    params = golden["params"]
    schedule = ScheduleSection(name="jagged_cosine", warmup_steps=params["warmup"], min_lr_ratio=params["min_lr_ratio"])
    steps, cycle = params["steps"], params["cycle"]
    ours = [jagged_cosine(schedule, step, steps, cycle, params["adjust"]) for step in range(steps)]
    assert ours == pytest.approx(golden["lr"], rel=1e-9, abs=1e-12)
    if params["adjust"] == -params["warmup"]:
        assert ours == [lr_multiplier(schedule, step, steps, cycle) for step in range(steps)]


@pytest.mark.parametrize("published", ["relora_jagged", "relora_jagged_adjusted"])
def test_restarted_cosine_is_the_published_one(published: str) -> None:
    golden = GOLDEN[published]
    params = golden["params"]
    schedule = ScheduleSection(
        name="jagged_cosine",
        warmup_steps=params["first_warmup"],
        restart_warmup_steps=params["restart_warmup"],
        min_lr_ratio=params["min_lr_ratio"],
    )
    steps, cycle = params["steps"], params["restart_every"]
    ours = [restarted_cosine(schedule, step, steps, cycle, params["adjust"]) for step in range(steps)]
    assert ours == pytest.approx(golden["lr"], rel=1e-9, abs=1e-12)
    if not params["adjust"]:
        assert ours == [lr_multiplier(schedule, step, steps, restart_every=cycle) for step in range(steps)]


def test_relora_restarts_after_the_updates_at_a_rate_of_zero() -> None:
    schedule = ScheduleSection(name="jagged_cosine", warmup_steps=4, restart_warmup_steps=2)
    idle = [step + 1 for step in range(60) if lr_multiplier(schedule, step, 60, restart_every=10) == 0]
    assert idle == [1, 11, 21, 31, 41, 51]
    assert [step for step in range(1, 61) if steps_since_restart(step, 10) == 0] == idle[1:]
    assert [steps_since_restart(step, 10) for step in (1, 10, 12, 21, 29)] == [1, 10, 1, 0, 8]


@pytest.mark.parametrize(("name", "end"), [("cosine", 0.2), ("linear", 0.2), ("constant", 1.0)])
def test_ends(name: str, end: float) -> None:
    schedule = ScheduleSection(name=name, warmup_steps=4, min_lr_ratio=0.2)
    values = [lr_multiplier(schedule, step, 20) for step in range(40)]
    assert values[:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert values[20:] == pytest.approx([end] * 20), "past its end a schedule never rises again"
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(values[4:]))


def test_linear_is_a_line() -> None:
    schedule = ScheduleSection(name="linear", warmup_steps=0, min_lr_ratio=0.0)
    assert [lr_multiplier(schedule, step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_run_shorter_than_its_warm_up() -> None:
    schedule = ScheduleSection(warmup_steps=100)
    assert lr_multiplier(schedule, 5, 10) == 0.05
