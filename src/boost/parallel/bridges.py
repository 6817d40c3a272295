"""Which bridge a configuration asks for."""

from __future__ import annotations

from boost.config import ParallelSection
from boost.parallel.bridge import Bridge
from boost.parallel.mesh import Group
from boost.parallel.sharded_bridge import ShardedBridge
from boost.parallel.wire import WIRES, WireBridge


def make_bridge(parallel: ParallelSection, tp: Group, hidden_size: int, eps: float) -> Bridge:
    """All have one interface; with one rank there is nothing to choose."""
    if tp.size > 1 and parallel.sequence_sharded_bottleneck:
        return ShardedBridge(tp, hidden_size, eps)
    if tp.size > 1 and parallel.bridge_dtype != "compute":
        return WireBridge(tp, hidden_size, eps, WIRES[parallel.bridge_dtype])
    return Bridge(tp, hidden_size, eps)
