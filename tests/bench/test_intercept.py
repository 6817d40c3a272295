"""Collectives that pass through one place: none escapes, results stay, waiting is counted, a bucket slows."""

from __future__ import annotations

import time

import pytest
import torch

from boost.bench.intercept import Call, Work, intercepted
from boost.bench.serial_link import Link, TokenBucket
from boost.bench.step import Step, Stopwatch
from boost.bench.variants import chosen, layout_variants
from boost.parallel.collectives import count_collectives
from boost.parallel.mesh import Mesh
from tests.bench.tiny import tiny_config
from tests.distributed.harness import run_ranks

VARIANTS = [
    "dense, overlap",
    "dense, sequence parallel, overlap",
    "vanilla, sharded heads",
    "BTP, overlap split batch",
    "BTP, int8 bridges (lossy)",
    "BTP, sequence-sharded bottleneck",
]
CPU = torch.device("cpu")


def test_waiting_is_timed_and_overlap_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Late:
        def wait(self) -> None:
            clock[0] += 2.0

    def start() -> Work:
        clock[0] += 0.5
        return Late()

    watch = Stopwatch(CPU)
    work = watch._begin(Call("all_reduce", 8, 2, start, lambda: None))
    assert watch.seconds == 0.5
    clock[0] += 10.0  # computation
    work.wait()
    assert watch.seconds == 2.5


def test_bucket_sleeps_until_its_link_is_free() -> None:
    """Two collectives of 1 + 4 seconds share the link; the second is waited for after 3 seconds of computation."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    class Done:
        def wait(self) -> None:
            now[0] += 0.25  # the real transfer

    bucket = TokenBucket(Link(bytes_per_second=100.0, latency=1.0), lambda: now[0], sleep)
    call = Call("all_reduce", 400, 2, Done, lambda: None)
    first, second = bucket.begin(call), bucket.begin(call)
    now[0] += 3.0
    first.wait()
    assert slept == [1.75]  # 0 to 5
    now[0] += 6.0
    second.wait()  # over at 10
    assert (slept, now[0]) == ([1.75], 11.25)


def steps(mesh: Mesh, rate: float) -> list[tuple[str, int, int, bool, float, float, float]]:
    """For each variant: collectives seen by either counter, whether losses are equal, and seconds of a slowed step."""
    out = []
    for variant in chosen(layout_variants(), VARIANTS):
        step = Step(variant.config(tiny_config(tp=mesh.tp.size)), mesh)
        plain = step.forward()
        step.backward(plain)
        seen: list[Call] = []
        bucket = TokenBucket(Link(rate))

        def begin(call: Call, seen: list[Call] = seen, bucket: TokenBucket = bucket) -> Work:
            seen.append(call)
            return bucket.begin(call)

        watch = Stopwatch(CPU)
        began = time.perf_counter()
        with intercepted(begin), watch.timing(), count_collectives() as counted:
            loss = step.forward()
            step.backward(loss)
        seconds = time.perf_counter() - began
        assert [(call.name, call.size) for call in seen] == [(c.name, c.bytes) for c in counted]
        modelled = sum(Link(rate).seconds(call.name, call.size, call.ranks) for call in seen)
        out.append((variant.name, len(seen), torch.equal(loss, plain), modelled, seconds, watch.seconds))
    return out


def test_real_ranks_pass_every_collective_and_get_the_same_results() -> None:
    """On two ranks: as many collectives as the dispatcher sees, no fewer seconds than the link's, equal losses."""
    for result in run_ranks(2, steps, 1e6):
        assert [name for name, *_ in result] == [v.name for v in chosen(layout_variants(), VARIANTS)]
        for name, count, equal, modelled, seconds, waited in result:
            assert count >= 7, name
            assert equal, name
            assert seconds > waited > 0, name
            assert seconds >= modelled > 0.01, name
