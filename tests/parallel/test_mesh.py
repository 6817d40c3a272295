"""Groups of the mesh: who is in which, and how long they wait."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from boost.errors import EnvironmentFailure, PeerFailure, UserError
from boost.parallel.collectives import same_on_all_ranks
from boost.parallel.mesh import Mesh, build, check_same, restarts_share_a_store, shorten_timeouts, start
from tests.distributed.harness import run_ranks


def _members(mesh: Mesh) -> dict[str, list[int]]:
    members = {}
    for name in ("pp", "dp", "tp", "shards", "replicas"):
        group = getattr(mesh, name)
        members[name] = dist.get_process_group_ranks(group.process_group) if group.process_group else []
        assert group.rank == (members[name].index(mesh.world.rank) if members[name] else 0)
        assert group.size == max(1, len(members[name]))
    return members


def test_tp_ranks_are_neighbours() -> None:
    seen = run_ranks(4, _members, layout=(1, 2, 2))
    assert [s["tp"] for s in seen] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [s["dp"] for s in seen] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [s["pp"] for s in seen] == [[]] * 4


def test_shards_are_neighbours_among_dp_ranks() -> None:
    seen = run_ranks(8, _members, layout=(1, 4, 2), shards=2)
    assert [s["shards"] for s in seen] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [s["replicas"] for s in seen] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    for shards, members in ((1, "replicas"), (4, "shards")):
        (other,) = {"replicas", "shards"} - {members}
        for s in run_ranks(4, _members, layout=(1, 4, 1), shards=shards):
            assert (s[members], s[other]) == ([0, 1, 2, 3], [])


def _hang(mesh: Mesh) -> tuple[float, str]:
    """Rank 1 never joins a collective on the tp group of a mesh with a short timeout."""
    mine = build(1, 1, 2, torch.device("cpu"), timeout_seconds=2)
    began = time.monotonic()
    message = ""
    if mine.tp.rank == 0:
        try:
            dist.all_reduce(torch.zeros(1), group=mine.tp.process_group)
        except RuntimeError as error:
            message = str(error)
    else:
        time.sleep(4)
    return time.monotonic() - began, message


def test_the_timeout_reaches_every_group() -> None:
    seconds, message = run_ranks(2, _hang)[0]
    assert message
    assert 1.5 < seconds < 10


def _hang_after_the_first_step(mesh: Mesh) -> list[float]:
    """Rank 1 never joins a collective on groups whose timeout was shortened. The world's stays: the test needs it."""
    groups = [build(1, 1, 2, mesh.device, timeout_seconds=60).tp, build(1, 2, 1, mesh.device, timeout_seconds=60).dp]
    dist.all_reduce(torch.zeros(1), group=groups[0].process_group)
    shorten_timeouts(Mesh(tp=groups[0], dp=groups[1]), 1)
    waited = []
    for group in groups if mesh.world.rank == 0 else ():
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=group.process_group)
        waited.append(time.monotonic() - began)
    if mesh.world.rank == 1:
        time.sleep(4)
    return waited


def test_timeouts_can_be_shortened() -> None:
    waited = run_ranks(2, _hang_after_the_first_step)[0]
    assert len(waited) == 2 and all(0.5 < seconds < 3 for seconds in waited)


def _receive_after_the_first_step(mesh: Mesh) -> list[float]:
    """Rank 1 sends nothing, once where rank 0 receives only, and once where it also sends."""
    waited = []
    for kinds in (("recv",), ("send", "recv")):
        mine = build(2, 1, 1, mesh.device, timeout_seconds=1, patience=60)
        shorten_timeouts(Mesh(pp=mine.pp, prompt=mine.prompt), 1)
        if mesh.world.rank == 1:
            continue
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="imed out"):
            _exchange(mine, kinds)
        waited.append(time.monotonic() - began)
    if mesh.world.rank == 1:
        time.sleep(4)
    return waited


def _exchange(mesh: Mesh, kinds: tuple[str, ...]) -> None:
    operations: dict[str, Any] = {"send": dist.isend, "recv": dist.irecv}
    group = mesh.prompt.process_group
    ops = [dist.P2POp(operations[kind], torch.zeros(9), group=group, group_peer=1) for kind in kinds]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def test_sends_and_receives_end_too() -> None:
    """On gloo they keep the timeout with which their group was made."""
    waited = run_ranks(2, _receive_after_the_first_step, layout=(2, 1, 1))[0]
    assert len(waited) == 2 and all(0.5 < seconds < 3 for seconds in waited)


def _others_are_patient(mesh: Mesh) -> float:
    """With a timeout of a second, rank 1 arrives a little later than that where all save, and first on the pp group."""
    mine = build(2, 1, 1, mesh.device, timeout_seconds=1, patience=60)
    shorten_timeouts(Mesh(saving=mine.saving), 1)
    began = time.monotonic()
    for group in (mine.saving, mine.pp):
        if mesh.world.rank == 1:
            time.sleep(1.5)
        dist.all_reduce(torch.zeros(1), group=group.process_group)
    return time.monotonic() - began


def test_saving_and_the_first_step_may_take_longer() -> None:
    assert min(run_ranks(2, _others_are_patient, layout=(2, 1, 1))) > 2.5


def _start(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    start(1, 1, 2, torch.device("cpu"), timeout_seconds=0.2)


def test_a_port_that_takes_connections_and_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits there for ever."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port, began = other.getsockname()[1], time.monotonic()
        with pytest.raises(PeerFailure, match=f"^MASTER_ADDR.* did not meet at 127.0.0.1:{port} within 2 s"):
            _start(monkeypatch, 1, port)
        assert 1 < time.monotonic() - began < 10


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EnvironmentFailure, match=f"^MASTER_PORT: port {port} is in use") as caught:
            _start(monkeypatch, 0, port)
        assert not isinstance(caught.value, PeerFailure)


def _compare(mesh: Mesh) -> list[str]:
    same, messages = {"train.seed": 1, "optimizer.lr": 0.1}, []
    check_same(same)
    for settings in ({**same, "optimizer.lr": 0.1 + 0.1 * mesh.world.rank}, {**same, f"new{mesh.world.rank}": 1}):
        with pytest.raises(UserError) as caught:
            check_same(settings)
        messages.append(str(caught.value))
    return messages


def test_settings_that_differ_are_named_on_every_rank() -> None:
    for rank, messages in enumerate(run_ranks(2, _compare)):
        assert messages[0] == f"optimizer.lr: differs between ranks (got {0.1 + 0.1 * rank} on rank {rank})"
        assert messages[1].startswith("boost: ranks have other settings")


def test_which_restarts_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not restarts_share_a_store()
    for name, value in {
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        assert not restarts_share_a_store()
        monkeypatch.setenv(name, value)
    assert restarts_share_a_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # what TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 does
    assert not restarts_share_a_store()


def _agree(mesh: Mesh) -> tuple[bool, bool]:
    return same_on_all_ranks(7, mesh.world), same_on_all_ranks(mesh.world.rank, mesh.world)


def test_agreement() -> None:
    assert run_ranks(3, _agree) == [(True, False)] * 3


def test_a_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"pp\*dp\*tp = 1\*1\*2 = 2, got WORLD_SIZE = 3"):
        start(1, 1, 2, torch.device("cpu"), 10)


def test_ranks_without_a_meeting_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        start(1, 1, 2, torch.device("cpu"), 10)
