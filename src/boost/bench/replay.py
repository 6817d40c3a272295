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
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from boost.bench.intercept import Work, intercepted
from boost.bench.serial_link import Link, SerialLink
from boost.bench.step import Step
from boost.parallel import collectives
from boost.parallel import mesh as meshes
from boost.parallel.mesh import Mesh


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
        self.now = self.waited = 0.0
        self._serial = SerialLink(self.link)
        self._mark = self._cpu()

    def advance(self) -> float:
        """Adds the computation since the last event, and returns the time."""
        mark = self._cpu()
        self.now += mark - self._mark
        self._mark = mark
        return self.now

    def begin(self, name: str, size: int, ranks: int, move: Callable[[], object]) -> Work:
        end = self._serial.occupy(self.advance(), name, size, ranks)
        move()
        self._mark = self._cpu()
        return _Event(self, end)

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


def replayed(transport: Transport) -> AbstractContextManager[None]:
    """Inside the block every collective of `boost.parallel` goes to the transport."""
    return intercepted(lambda call: transport.begin(call.name, call.size, call.ranks, call.imitate))


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
