"""More ranks than cores: one rank's real computation, with collectives replayed on a modelled serial link.

The process belongs to a group that sends nothing. Between collectives the virtual clock runs with the thread's CPU
time, which other load on the machine does not touch; a collective occupies the link for as long as a ring would take,
and waiting for it moves the clock to its end. So asynchronous collectives overlap computation, and wait for those
before them. Shapes and work are those of a real rank; values are not, because nothing is summed.

`python -m boost.bench.replay JOB.json` measures a job of `boost bench layouts --link replay`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from boost.bench.step import Step
from boost.parallel import collectives
from boost.parallel import mesh as meshes
from boost.parallel.mesh import Mesh

LATENCY = 20e-6


@dataclass(frozen=True)
class Link:
    """How long a ring of ranks takes: a latency, and the bytes that each rank sends at a rate in each direction."""

    bytes_per_second: float
    latency: float = LATENCY

    def seconds(self, name: str, size: int, ranks: int) -> float:
        """Of one collective.

        Args:
            name: `all_reduce`; `all_gather`, `reduce_scatter` and `all_to_all` pass over the ring once, not twice.
            size: bytes of the whole tensor, which an all-gather makes and the others take.
        """
        passes = 2 if name == "all_reduce" else 1
        return self.latency + passes * (ranks - 1) / ranks * size / self.bytes_per_second


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...


class Transport(Protocol):
    """What stands in for the network."""

    def begin(self, name: str, size: int, ranks: int, move: Callable[[], object]) -> Work:
        """Starts a collective; `move` gives its result the right shape, and is no part of the cost."""
        ...


class VirtualClock:
    """The transport of a CPU: a clock that runs with CPU time and jumps over waits.

    Attributes:
        now: virtual seconds since `start`.
        waited: those of them spent waiting for collectives.
    """

    def __init__(self, link: Link, cpu: Callable[[], float] = time.thread_time) -> None:
        self.link, self._cpu = link, cpu
        self.start()

    def start(self) -> None:
        """Back to zero, the link idle."""
        self.now = self.waited = self._link_free = 0.0
        self._mark = self._cpu()

    def advance(self) -> float:
        """Adds the computation since the last event, and returns the time."""
        mark = self._cpu()
        self.now += mark - self._mark
        self._mark = mark
        return self.now

    def begin(self, name: str, size: int, ranks: int, move: Callable[[], object]) -> Work:
        began = max(self.advance(), self._link_free)
        self._link_free = began + self.link.seconds(name, size, ranks)
        move()
        self._mark = self._cpu()
        return _Event(self, self._link_free)

    def wait_until(self, end: float) -> None:
        """Waits for an event of the link."""
        early = end - self.advance()
        if early > 0:
            self.waited += early
            self.now = end


@dataclass(frozen=True)
class _Event:
    clock: VirtualClock
    end: float

    def wait(self) -> None:
        self.clock.wait_until(self.end)


@contextmanager
def replayed(transport: Transport) -> Iterator[None]:
    """Inside the block every collective of `boost.parallel` goes to the transport; torch.compile stops at each."""

    def begin(name: str, whole: Tensor, group: Any, async_op: bool, move: Callable[[], object]) -> Work | None:
        work = transport.begin(name, whole.nbytes, group.size(), move)
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Work | None:
        return begin("all_reduce", tensor, group, async_op, lambda: None)

    def all_to_all(output: Tensor, tensor: Tensor, *, group: Any = None, async_op: bool = False) -> Work | None:
        return begin("all_to_all", tensor, group, async_op, lambda: output.copy_(tensor))

    def all_gather(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Work | None:
        shares = output.view(group.size(), -1)
        return begin("all_gather", output, group, async_op, lambda: shares.copy_(tensor.view(1, -1)))

    def reduce_scatter(
        output: Tensor, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        share = tensor.view(group.size(), -1)[0].view_as(output)
        return begin("reduce_scatter", tensor, group, async_op, lambda: output.copy_(share))

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (dist, "all_reduce", all_reduce),
        (dist, "all_to_all_single", all_to_all),
        (collectives, "_all_gather", all_gather),
        (collectives, "_reduce_scatter", reduce_scatter),
    ]
    plain = [getattr(module, name) for module, name, _ in places]
    for module, name, function in places:
        setattr(module, name, torch.compiler.disable(function))
    try:
        yield
    finally:
        for (module, name, _), function in zip(places, plain, strict=True):
            setattr(module, name, function)


def check_replayed(step: Step, transport: Transport) -> None:
    """Runs a step and refuses one with a collective that does not go to the transport, and so would cost nothing."""
    with replayed(transport), collectives.count_collectives() as escaped:
        step.run()
    if escaped:
        raise RuntimeError(f"{len(escaped)} collectives are not replayed, such as {escaped[0].name}")


def lonely_mesh(tp: int, device: torch.device) -> Mesh:
    """The mesh of rank 0 of `tp` ranks of which the others do not exist: its collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    return meshes.build(1, 1, tp, device, timeout_seconds=60)


def timed(step: Step, clock: VirtualClock) -> tuple[float, float]:
    """Virtual seconds of one step, and those of them spent waiting in collectives."""
    with replayed(clock):
        clock.start()
        step.run()
        seconds = clock.advance()
    return seconds, clock.waited


def main() -> None:
    """Measures every variant of the job, in turns, and writes the rows."""
    from boost.bench.variants import Variant
    from boost.bench.worker import measure
    from boost.config import TrainConfig

    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    base = TrainConfig.from_dict(job["config"])
    clock = VirtualClock(Link(job["bytes_per_second"]))
    mesh = lonely_mesh(base.parallel.tp, torch.device("cpu"))
    variants = [Variant(**variant) for variant in job["variants"]]
    checked: set[Step] = set()

    def time_step(step: Step) -> tuple[float, float]:
        if step not in checked:
            check_replayed(step, clock)
            checked.add(step)
        return timed(step, clock)

    rows = measure(base, variants, mesh, job["rounds"], timed=time_step)
    Path(job["out"]).write_text(json.dumps(rows))
    meshes.stop()


if __name__ == "__main__":
    main()
