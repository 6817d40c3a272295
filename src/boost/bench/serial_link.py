"""A modelled link that carries one collective after another: in virtual time for a replay, in real time as a bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from boost.bench.intercept import Call, Work

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


class SerialLink:
    """A link and until when it is occupied."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free = 0.0

    def occupy(self, now: float, name: str, size: int, ranks: int) -> float:
        """When a collective that is begun now has been carried: it waits for those before it."""
        self.free = max(now, self.free) + self.link.seconds(name, size, ranks)
        return self.free


class TokenBucket:
    """Slows the collectives of CPU ranks: none ends before the modelled link would have carried it.

    Each rank charges a link of its own from when it begins the collective. A wait sleeps, so what is computed before it
    overlaps. To be used with `intercepted`.
    """

    def __init__(
        self,
        link: Link,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.clock, self.sleep = clock, sleep
        self._serial = SerialLink(link)

    def begin(self, call: Call) -> Work:
        end = self._serial.occupy(self.clock(), call.name, call.size, call.ranks)
        return _Slowed(call.start(), end, self)


@dataclass(frozen=True)
class _Slowed:
    work: Work
    end: float
    bucket: TokenBucket

    def wait(self) -> None:
        self.work.wait()
        early = self.end - self.bucket.clock()
        if early > 0:
            self.bucket.sleep(early)
