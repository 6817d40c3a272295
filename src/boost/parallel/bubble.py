"""How much of a step a pipeline's ranks idle: by the order of work that the schedule prescribes, and as it was.

By the order, every rank does its actions one after the other, each as soon as what it needs is there: a forward pass
the one of the stage before, a backward pass the one of the stage after. A stage's forward pass takes its cost, a
backward pass twice that, in halves where it is split in the gradients of inputs and of weights. Sending takes no time.
As it was is what a `Trace` of the passes says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from boost.parallel.pipeline import Pipeline


class Action(NamedTuple):
    """One piece of work: `F` forward, `B` backward, or its halves `I` (inputs) and `W` (weights)."""

    kind: str
    stage: int
    micro_batch: int


def actions(pipeline: Pipeline) -> list[list[Action]]:
    """What each rank does in a step, in order."""
    count, ranks = pipeline.micro_batches, pipeline.pp.size
    if pipeline.name == "gpipe":
        return [[Action(kind, rank, i) for kind in "FB" for i in range(count)] for rank in range(ranks)]
    if pipeline.name == "1f1b":
        return [_one_forward_one_backward(rank, min(count, ranks - rank), count) for rank in range(ranks)]
    table = pipeline.schedule.pipeline_order
    assert table is not None
    return [
        [Action(a.computation_type.value, a.stage_index, a.microbatch_index or 0) for a in order if a is not None]
        for _, order in sorted(table.items())
    ]


def _one_forward_one_backward(stage: int, warm_up: int, count: int) -> list[Action]:
    order = [Action("F", stage, i) for i in range(warm_up)]
    for i in range(count):
        order.append(Action("B", stage, i))
        if i + warm_up < count:
            order.append(Action("F", stage, i + warm_up))
    return order


def idle_fraction(orders: Sequence[Sequence[Action]], costs: Sequence[float]) -> float:
    """The share of all ranks' time in a step that is spent waiting.

    Args:
        orders: each rank's actions.
        costs: of every stage's forward pass.
    """
    ends: dict[Action, float] = {}
    now, waiting = [0.0] * len(orders), [list(order) for order in orders]
    busy, last = 0.0, len(costs) - 1
    while any(waiting):
        ran = False
        for rank, order in enumerate(waiting):
            while order:
                action = order[0]
                ready = _ready(action, ends, last)
                if ready is None:
                    break
                length = costs[action.stage] * (2 if action.kind == "B" else 1)
                now[rank] = ends[order.pop(0)] = max(now[rank], ready) + length
                busy += length
                ran = True
        if not ran:
            raise ValueError(f"the schedule waits for itself: {[order[0] for order in waiting if order]}")
    return 1 - busy / (len(orders) * max(now))


def _ready(action: Action, ends: dict[Action, float], last: int) -> float | None:
    """When what an action needs is there; None if that has not been done yet."""
    kind, stage, micro_batch = action
    if kind == "F":
        return 0.0 if stage == 0 else ends.get(Action("F", stage - 1, micro_batch))
    if kind == "W":
        return ends.get(Action("I", stage, micro_batch))
    if stage == last:
        return ends.get(Action("F", stage, micro_batch))
    after = (ends.get(Action(kind, stage + 1, micro_batch)) for kind in "BI")
    return next((end for end in after if end is not None), None)


class Trace:
    """When this rank computed during its last step, by the clock of its device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._passes: list[tuple[Any, Any]] = []
        self._whole: tuple[Any, Any] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step's schedule."""
        self._passes.clear()
        began = self._now()
        yield
        self._whole = began, self._now()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around one pass, or a part of it; never one in another."""
        began = self._now()
        yield
        self._passes.append((began, self._now()))

    def seconds(self) -> tuple[float, float]:
        """Of the last step: those in passes, and all. A GPU must have been synchronised since."""
        assert self._whole is not None, "no step was taken"
        return sum(self._between(*ends) for ends in self._passes), self._between(*self._whole)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        # What the host does says little of a stream, which waits for what it receives.
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return float(ended - began if self._device.type != "cuda" else began.elapsed_time(ended) / 1000)
