"""Idle time: the formulas of the literature, and torch's tables."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from boost.config_rules import STAGES_PER_RANK
from boost.model.stages import held_stages
from boost.parallel.bubble import Action, actions, idle_fraction
from boost.parallel.mesh import Mesh
from boost.parallel.pipeline import Pipeline
from tests.distributed.harness import run_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")
DOCUMENT = Path(__file__).parents[2] / "docs" / "parallelism.md"


def table(schedule: str, ranks: int, micro_batches: int) -> list[list[Action]]:
    """For schedules with one stage per rank, which need no process group."""
    pipeline = SimpleNamespace(name=schedule, micro_batches=micro_batches, pp=SimpleNamespace(size=ranks))
    return actions(cast(Pipeline, pipeline))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 4), (4, 8), (3, 17)])
def test_equal_stages_follow_the_formula(schedule: str, ranks: int, micro_batches: int) -> None:
    idle = idle_fraction(table(schedule, ranks, micro_batches), [1.0] * ranks)
    assert idle == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


def test_the_dearest_stage_sets_the_pace() -> None:
    """Two stages, the second twice as dear, two micro-batches."""
    # Rank 1 works from 1 on: F0 to 3, B0 to 7, F1 to 9, B1 to 13; then rank 0's last backward pass, to 15.
    assert idle_fraction(table("1f1b", 2, 2), [1.0, 2.0]) == pytest.approx(1 - (2 * 3 + 2 * 6) / (2 * 15))


def test_a_table_that_waits_for_itself() -> None:
    with pytest.raises(ValueError, match="waits for itself"):
        idle_fraction([[Action("B", 0, 0), Action("F", 0, 0)]], [1.0])


def fractions(mesh: Mesh, micro_batches: list[int]) -> dict[str, list[float]]:
    """Of stages of equal cost."""
    found: dict[str, list[float]] = {}
    for schedule in SCHEDULES:
        stages = mesh.pp.size * STAGES_PER_RANK.get(schedule, 1)
        modules = {index: nn.Identity() for index in held_stages(schedule, stages, mesh.pp)}
        like: Any = torch.empty(1, 1, device="meta")
        for count in micro_batches:
            pipeline = Pipeline(
                schedule, modules, stages, count, mesh.pp, like, like, mesh.device, lambda out, labels: out.sum()
            )
            # Two stages of half the size each: the same work per rank.
            found.setdefault(schedule, []).append(idle_fraction(actions(pipeline), [1.0] * stages))
    return found


def test_the_documented_table() -> None:
    """docs/parallelism.md, four ranks: every schedule's share in percent for as many micro-batches as its head says."""
    text = DOCUMENT.read_text(encoding="utf-8")
    (head,) = re.findall(r"^\| schedule \|.*?((?: \| \d+ micro-batches)+) \|$", text, re.MULTILINE)
    counts = [int(n) for n in re.findall(r"\d+", head)]
    assert len(counts) >= 2
    found = run_ranks(4, fractions, counts, layout=(4, 1, 1))
    assert found[1:] == found[:-1]
    speed = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 3, "zbv": 6}
    for schedule, values in found[0].items():
        for count, value in zip(counts, values, strict=True):
            if count >= (7 if schedule == "zbv" else 4):
                assert value == pytest.approx(3 / (speed[schedule] * count + 3)), "the document's formula"
        (row,) = re.findall(rf"^\| `{schedule}` \|.*?((?: \| [\d.]+%)+) \|$", text, re.MULTILINE)
        assert re.findall(r"[\d.]+", row) == [f"{100 * value:.1f}" for value in values], (schedule, values)
