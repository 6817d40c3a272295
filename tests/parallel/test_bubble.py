"""Idle time: the formulas of the literature, torch's tables, and the trace of what torch runs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from boost.config_rules import STAGES_PER_RANK, ZERO_BUBBLE
from boost.model.stages import held_stages
from boost.parallel import bubble
from boost.parallel.bubble import Action, Trace, actions, idle_fraction
from boost.parallel.mesh import Group, Mesh
from boost.parallel.overlap import HeldWeightGrads, WeightGradQueue
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


def test_a_trace_adds_up_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes one second on whenever it is read; of the last step alone."""
    readings = iter(range(100))
    monkeypatch.setattr(bubble, "perf_counter", lambda: float(next(readings)))
    trace = Trace(torch.device("cpu"))
    for passes in (5, 3):
        with trace.step():
            for _ in range(passes):
                with trace.computing():
                    pass
    assert trace.seconds() == (3, 7)


HEAD = 0.25  # of a last stage's cost, for the loss


class VirtualClock:
    """A rank's own time: a pass takes its stage's cost, what is received was not there before it was sent, and a send
    does not end before its receive has begun, as nothing holds the message meanwhile."""

    def __init__(self, pp: Group, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        start, wait = schedules._batch_p2p, schedules._wait_batch_p2p

        def start_stamped(ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
            arriving = []
            for op in ops:
                # The other way goes a message that says when the receive began.
                begun = torch.tensor([self.now], dtype=torch.float64)
                back: dict[str, Any] = {"group": pp.process_group}
                if op.op is dist.isend:
                    op.tensor.detach().fill_(self.now)
                    arriving.append((begun, dist.irecv(begun, group_src=op.group_peer, **back)))
                else:
                    arriving.append((op.tensor.detach(), dist.isend(begun, group_dst=op.group_peer, **back)))
            return _Batch(start(ops, desc), arriving)

        def wait_in_time(works: list[dist.Work]) -> None:
            wait(works)
            for tensor, work in works.arriving if isinstance(works, _Batch) else ():
                work.wait()
                self.now = max(self.now, tensor.item())

        patch.setattr(bubble, "perf_counter", lambda: self.now)
        patch.setattr(schedules, "_batch_p2p", start_stamped)
        patch.setattr(schedules, "_wait_batch_p2p", wait_in_time)

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        self.now += HEAD
        return output.sum()


class _Batch(list[dist.Work]):
    """Messages on their way, each with where a time will arrive."""

    def __init__(self, works: list[dist.Work], arriving: list[tuple[Tensor, Any]]) -> None:
        super().__init__(works)
        self.arriving = arriving


class TimedStage(nn.Module):
    """A pass, and each half of a backward pass that is split, takes its cost; forward the head's is the loss's."""

    def __init__(self, clock: VirtualClock, cost: float, head: float, queue: WeightGradQueue | None) -> None:
        super().__init__()
        self.clock, self.cost, self.head, self.queue = clock, cost, head, queue
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor, samples: Tensor) -> Tensor:
        return _Timed.apply(x, self.weight, self)

    def spend(self, seconds: float) -> list[Tensor]:
        self.clock.now += seconds
        return []


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: TimedStage) -> Tensor:
        ctx.stage = stage
        stage.spend(stage.cost - stage.head)
        return weight.new_zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        stage = ctx.stage
        stage.spend(stage.cost if stage.queue else 2 * stage.cost)
        if stage.queue:
            stage.queue.put([], lambda: stage.spend(stage.cost))
        return torch.zeros_like(gradient) if ctx.needs_input_grad[0] else None, torch.zeros_like(stage.weight), None


class Share(NamedTuple):
    """Idle by the table, and what the trace has: seconds in passes and of the whole step."""

    predicted: float
    computed: float
    whole: float


def shares(mesh: Mesh, settings: list[tuple[int, float]]) -> dict[tuple[Any, ...], Share]:
    """Of a second step: of so many micro-batches, and of stages of cost 1 but for the last."""
    found = {}
    for schedule in SCHEDULES:
        stages = mesh.pp.size * STAGES_PER_RANK.get(schedule, 1)
        queue = HeldWeightGrads() if schedule in ZERO_BUBBLE else None
        for count, last in settings:
            costs = [1.0] * (stages - 1) + [last]
            heads = [0.0] * (stages - 1) + [HEAD]
            with pytest.MonkeyPatch.context() as patch:
                clock = VirtualClock(mesh.prompt, patch)
                pipeline = Pipeline(
                    schedule,
                    {
                        index: TimedStage(clock, costs[index], heads[index], queue)
                        for index in held_stages(schedule, stages, mesh.pp)
                    },
                    stages,
                    count,
                    mesh.pp,
                    torch.empty(1, 1, dtype=torch.int64, device="meta"),
                    torch.empty(1, 1, dtype=torch.float64, device="meta"),
                    mesh.device,
                    clock.loss,
                    queue,
                )
                ids = torch.zeros(count, 1, dtype=torch.int64)
                for _ in range(2):
                    clock.now = 0.0
                    pipeline.train(ids, ids, ids[:, 0])
                predicted = idle_fraction(actions(pipeline), costs)
                found[schedule, count, last] = Share(predicted, *pipeline.trace.seconds())
    return found


def test_what_torch_runs_idles_as_its_table_says() -> None:
    """Where sending takes no time, whether or not all stages cost the same, if the loss counts as the last stage's."""
    ranks = run_ranks(4, shares, [(4, 1.0), (8, 1.0), (8, 2.0)], layout=(4, 1, 1))
    for key, share in ranks[0].items():
        schedule, count, last = key
        of_all = [rank[key] for rank in ranks]
        passes = 3 * count * (4 * STAGES_PER_RANK.get(schedule, 1) - 1 + last)
        assert sum(s.computed for s in of_all) == passes, key
        assert 1 - passes / 4 / max(s.whole for s in of_all) == pytest.approx(share.predicted), key
