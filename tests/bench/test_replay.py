"""`--link replay`: the virtual clock's arithmetic, and that a lonely rank does what a real one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost.bench.layouts import bench_layouts
from boost.bench.replay import VirtualClock, check_replayed, replayed
from boost.bench.serial_link import LATENCY, Link
from boost.bench.variants import Variant
from boost.parallel import collectives
from boost.parallel.mesh import Group
from tests.bench.tiny import tiny_config

RANKS = 4
VARIANTS = [
    Variant("dense", "dense"),
    Variant("dense SP", "dense", {"parallel.sequence_parallel": True, "parallel.overlap": "weight_grads"}),
    Variant("vanilla", "vanilla", {"parallel.group_linears": False}),
    Variant("sharded heads", "vanilla_sharded_heads"),
    Variant("BTP int8", "btp", {"parallel.bridge_dtype": "int8"}),
    Variant("BTP tokens", "btp", {"parallel.sequence_sharded_bottleneck": True, "train.recompute": "latent"}),
    Variant("BTP split", "btp", {"parallel.overlap": "split_batch"}),
    Variant("BTP latent", "btp", {"train.recompute": "latent", "parallel.overlap": "weight_grads"}),
]


class Cpu:
    """A CPU clock that stands still until it is told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def work(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def cpu() -> Cpu:
    return Cpu()


@pytest.fixture
def clock(cpu: Cpu) -> VirtualClock:
    return VirtualClock(Link(bytes_per_second=100.0, latency=1.0), cpu)


@pytest.fixture
def group() -> Group:
    return Group(0, RANKS, SimpleNamespace(size=lambda: RANKS))  # type: ignore[arg-type]


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_link_is_a_ring() -> None:
    """2 (T - 1) / T of an all-reduced tensor, half of that for a gather or a scatter, after the latency."""
    link = Link(1000.0)
    assert link.seconds("all_reduce", 4000, 4) == LATENCY + 6.0
    assert link.seconds("all_gather", 4000, 4) == LATENCY + 3.0
    assert link.seconds("reduce_scatter", 4000, 2) == LATENCY + 2.0


def test_blocking_collective(cpu: Cpu, clock: VirtualClock, group: Group) -> None:
    with replayed(clock):
        cpu.work(2.0)
        collectives.all_reduce(zeros(200), group)  # 1 + 1.5 * 2 seconds
        cpu.work(0.5)
    assert clock.advance() == 6.5
    assert clock.waited == 4.0


def test_asynchronous_collectives_share_one_link(cpu: Cpu, clock: VirtualClock, group: Group) -> None:
    """The second begins when the first has ended; only what computation does not cover is waited for."""
    with replayed(clock):
        cpu.work(2.0)
        first = collectives.start_all_reduce(zeros(100), group)  # from 2 to 4.5
        cpu.work(1.0)
        second = collectives.start_all_reduce(zeros(100), group)  # from 4.5 to 7
        cpu.work(3.0)
        assert first is not None and second is not None
        first.wait()
        assert (clock.now, clock.waited) == (6.0, 0.0)
        second.wait()
        assert (clock.now, clock.waited) == (7.0, 1.0)
        second.wait()  # long over
        assert (clock.now, clock.waited) == (7.0, 1.0)


def test_gather_and_scatter_block(cpu: Cpu, clock: VirtualClock, group: Group) -> None:
    with replayed(clock):
        stacked = collectives.all_gather(zeros(50), group)  # makes 200 bytes: 1 + 0.75 * 2
        assert stacked.shape == (RANKS, 50)
        assert clock.now == clock.waited == 2.5
        piece = collectives._reduce_scatter_last(zeros(200), group)
        assert piece.shape == (50,)
        assert clock.now == clock.waited == 5.0


def test_all_to_all(cpu: Cpu, clock: VirtualClock, group: Group) -> None:
    with replayed(clock):
        received = torch.ones(400, dtype=torch.uint8)
        work = dist.all_to_all_single(received, zeros(400), group=group.process_group, async_op=True)  # 1 + 0.75 * 4
        assert not received.any()
        cpu.work(1.0)
        assert work is not None
        work.wait()
    assert (clock.now, clock.waited) == (4.0, 3.0)


def test_a_collective_that_escapes_is_refused(clock: VirtualClock) -> None:
    """Over a group that sends nothing: a broadcast would take no time."""

    class Escaping:
        def run(self) -> None:
            dist.broadcast(zeros(1), 0)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with pytest.raises(RuntimeError, match="broadcast"):
            check_replayed(Escaping(), clock)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


def test_moving_the_values_costs_nothing(cpu: Cpu, clock: VirtualClock) -> None:
    clock.begin("all_gather", 100, RANKS, lambda: cpu.work(50.0)).wait()
    assert clock.now == 1.75


def test_start_forgets(cpu: Cpu, clock: VirtualClock) -> None:
    clock.begin("all_reduce", 10000, RANKS, lambda: None)
    cpu.work(1.0)
    clock.start()
    cpu.work(3.0)
    clock.begin("all_reduce", 100, RANKS, lambda: None).wait()
    assert (clock.now, clock.waited) == (5.5, 2.5)


def test_collectives_are_put_back(clock: VirtualClock) -> None:
    def current() -> tuple[Any, ...]:
        return dist.all_reduce, dist.all_to_all_single, collectives._all_gather, collectives._reduce_scatter

    before = current()
    with pytest.raises(RuntimeError), replayed(clock):
        raise RuntimeError
    assert before == current()


def counts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timings = ("step_seconds", "step_seconds_spread", "tokens_per_second", "comm_wait_seconds", "peak_memory_bytes")
    return [{key: value for key, value in row.items() if key not in timings} for row in rows]


def test_a_lonely_rank_does_what_a_real_one_does() -> None:
    """Collectives, elements and kept bytes are those of two real ranks; the result says that it is replayed."""
    config = tiny_config(tp=2)
    real = bench_layouts(config, link="none", rounds=1, variants=VARIANTS)
    replay = bench_layouts(config, link="replay", rounds=1, variants=VARIANTS)
    assert counts(replay["rows"]) == counts(real["rows"])
    for mine, other in zip(replay["rows"], real["rows"], strict=True):
        # gloo's thread may hold a finished collective's tensors while the next operation allocates.
        assert mine["peak_memory_bytes"] == pytest.approx(other["peak_memory_bytes"], rel=0.1)
    assert (real["link"], replay["link"]) == ("none", "replay")
    assert replay["link_bytes_per_second"] > 0
    for row in replay["rows"]:
        assert 0 < row["comm_wait_seconds"] < row["step_seconds"]
