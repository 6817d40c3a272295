"""A scaled-down cluster out of one machine: ranks in network namespaces of our own, joined by rate-limited links.

Each namespace has one interface on a bridge inside a further namespace, so nothing outside what is made here is
touched, and each interface sends through a token bucket (`tc tbf`). Needs root and iproute2. Everything carries a
prefix with this process's id and is removed at any end, SIGTERM and SIGHUP included; what a killed process left behind,
the next one removes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

OURS = re.compile(r"boost(\d+)-(?:hub|\d+)\b")
# Compute and communication of A100s over NVLink: bf16 FLOP/s over bytes per second and direction.
FLOP_PER_BYTE = 1300.0


class LinkError(Exception):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True)
class Cluster:
    """The namespaces of the ranks, in rank order.

    Attributes:
        names: network namespaces, one per rank.
        master: the address of rank 0.
        interface: the interface inside each.
    """

    names: list[str]
    master: str
    interface: str

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command, run inside a rank's namespace."""
        return ["ip", "netns", "exec", self.names[rank], *command]


@contextmanager
def limited_links(ranks: int, bytes_per_second: float) -> Iterator[Cluster]:
    """Namespaces joined by links of this rate in each direction; removed afterwards.

    Raises:
        LinkError: not permitted or not possible on this machine.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LinkError(f"{tool} is not installed (package iproute2)")
    if os.geteuid() != 0:
        raise LinkError("network namespaces need root")
    _remove(_left_behind())
    prefix = f"boost{os.getpid()}"
    hub, names = f"{prefix}-hub", [f"{prefix}-{rank}" for rank in range(ranks)]
    with _interruptible():
        try:
            _make(hub, names, bytes_per_second)
            yield Cluster(names, "10.77.0.1", "eth0")
        finally:
            _remove([*names, hub])


def _make(hub: str, names: Sequence[str], bytes_per_second: float) -> None:
    rate = ("rate", f"{int(bytes_per_second * 8)}bit", "burst", "128kb", "latency", "400ms")
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "add", "hub", "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "hub", "up")
    for rank, name in enumerate(names):
        _run("ip", "netns", "add", name)
        _run("ip", "-n", hub, "link", "add", f"port{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "-n", hub, "link", "set", f"port{rank}", "master", "hub", "up")
        _run("ip", "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        _run("ip", "netns", "exec", name, "true")


def _remove(names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _left_behind() -> list[str]:
    """Namespaces named as ours after processes that are no more."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    ours = [(line.split()[0], int(match[1])) for line in listed.splitlines() if (match := OURS.match(line))]
    return [name for name, process in ours if not Path(f"/proc/{process}").exists()]


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside the block SIGTERM and SIGHUP do what Ctrl-C does, so that `finally` runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise LinkError(f"{' '.join(command)}: {result.stderr.strip()}")
