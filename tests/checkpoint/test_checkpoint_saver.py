"""Saves behind the training: the state of their moment, little memory, one at a time, and failures that reach all."""

from __future__ import annotations

import errno
import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.checkpoint import shards, store
from boost.checkpoint.saver import Saver, snapshot
from boost.checkpoint.slices import Slice
from boost.checkpoint.store import list_checkpoints, open_checkpoint
from boost.errors import NumericsError, UserError
from boost.parallel.mesh import Group, Mesh
from tests.distributed.harness import run_ranks

SHAPES = {"embedding.weight": (64, 1000), **{f"blocks.{n}.weight": (64, 250) for n in range(12)}}


def shares(group: Group) -> dict[str, Tensor]:
    """This rank's rows of each tensor."""
    random = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    return {name: tensor.chunk(group.size)[group.rank].clone() for name, tensor in whole.items()}


def slices(held: dict[str, Tensor], group: Group) -> list[Slice]:
    return [
        Slice(name, "parameter", SHAPES[name], (group.rank * len(tensor), 0), tensor) for name, tensor in held.items()
    ]


def put(saver: Saver, root: Path, step: int, held: dict[str, Tensor]) -> None:
    saver.save(root, step, slices(held, saver.group), {"step": step}, files={}, keep=0)


def _three_saves(mesh: Mesh, root: Path, asynchronous: bool) -> None:
    """Behind the training, nothing is written before the weights have changed."""
    group = mesh.saving
    held = shares(group)
    changed = threading.Event()
    write = store.write_shard

    def late(*arguments: Any) -> Any:
        assert changed.wait(20)
        return write(*arguments)

    if asynchronous:
        store.write_shard = late  # in this process only
    with Saver(group, asynchronous=asynchronous) as saver:
        for step in (1, 2, 3):
            put(saver, root, step, held)
            for tensor in held.values():
                tensor.mul_(1.5).add_(step)
            changed.set()
            saver.wait()
            changed.clear()
    if group.rank == 0:
        assert [step for step, _ in list_checkpoints(root)] == [1, 2, 3]


@pytest.mark.parametrize("world", [1, 2])
def test_asynchronous_saves_equal_synchronous_ones(tmp_path: Path, world: int) -> None:
    hashes = []
    for asynchronous in (False, True):
        root = tmp_path / str(asynchronous)
        run_ranks(world, _three_saves, root, asynchronous)
        hashes.append([open_checkpoint(path).state_hash for _, path in list_checkpoints(root)])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 3


def _live_bytes(known: set[int]) -> int:
    """Bytes of all tensors' storages but those known before."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is Tensor and tensor.device.type == "cpu"
    }
    return sum(size for place, size in found.items() if place not in known)


def _memory(mesh: Mesh, root: Path, asynchronous: bool) -> tuple[int, int, int, int]:
    """Most bytes held besides the model during a save, and while loading it; this rank's share, the largest tensor."""
    group = mesh.saving
    held = shares(group)
    gc.collect()
    known = {t.untyped_storage().data_ptr() for t in gc.get_objects() if type(t) is Tensor}
    peak = 0

    def watched(module: Any, name: str) -> None:
        real = getattr(module, name)

        def watch(*arguments: Any) -> Any:
            nonlocal peak
            peak = max(peak, _live_bytes(known))
            return real(*arguments)

        setattr(module, name, watch)

    for module, name in [
        (store, "write_file"),
        (store, "write_shard"),
        (store, "raw_bytes"),
        (store, "encode_manifest"),
        (shards, "indices"),  # after every piece that is read too
    ]:
        watched(module, name)
    with Saver(group, asynchronous=asynchronous) as saver:
        put(saver, root, 1, held)
        saver.wait()
    deadline = time.monotonic() + 10
    while _live_bytes(known) and time.monotonic() < deadline:  # the thread lets go a moment after it is done
        gc.collect()
    assert _live_bytes(known) == 0, "the snapshot is given back"
    while_saving, peak = peak, 0
    for tensor in held.values():
        tensor.zero_()
    open_checkpoint(root).load(slices(held, group))
    assert all(tensor.any() for tensor in held.values())
    share = sum(tensor.nbytes for tensor in held.values())
    return while_saving, peak, share, max(4 * rows * columns for rows, columns in SHAPES.values())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_host_holds_less_than_two_copies(tmp_path: Path, asynchronous: bool) -> None:
    """Over both of its ranks: the model, which is there, and what saving and loading it take.

    Behind the training that is a snapshot of each rank's own share; then the two copies do not count the model itself.
    While files are hashed, a rank has one whole tensor, another than the others', and the piece of it that is being
    read; nothing is gathered.
    """
    results = run_ranks(2, _memory, tmp_path / "checkpoints", asynchronous)
    model = sum(share for _, _, share, _ in results)
    for while_saving, while_loading, share, largest in results:
        assert largest // 4 < while_saving - share * asynchronous <= 1.5 * largest
        assert 0 < while_loading <= largest
    assert sum(saving for saving, *_ in results) < (2 if asynchronous else 1) * model
    assert sum(loading for _, loading, *_ in results) < model, "one piece at a time"


def _full_disk(mesh: Mesh, root: Path) -> tuple[bool, str, str, str]:
    group = mesh.saving
    held = shares(group)
    with Saver(group, asynchronous=True) as saver:
        put(saver, root, 1, held)
        saver.wait()
        if group.rank == 1:

            def full(*arguments: Any) -> Any:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")

            store.write_shard = full
        put(saver, root, 2, held)
        while not saver.failed:
            pass
        try:
            put(saver, root, 3, held)
        except UserError as error:
            return saver.failed, type(error).__name__, str(error), str(error.__cause__)
    raise AssertionError("no error")


def test_a_failure_behind_the_training_reaches_all_ranks(tmp_path: Path) -> None:
    results = run_ranks(2, _full_disk, tmp_path / "checkpoints")
    assert [(failed, name) for failed, name, _, _ in results] == [(False, "PeerFailure"), (False, "EnvironmentFailure")]
    assert "rank 1 could not save its part" in results[0][2]
    assert results[1][2].startswith("disk: no space to save: No space left on device")
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]
    open_checkpoint(tmp_path / "checkpoints")


def test_one_save_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    write = store.write_shard

    def late(*arguments: Any) -> Any:
        assert go.wait(20)
        return write(*arguments)

    monkeypatch.setattr(store, "write_shard", late)
    caplog.set_level("INFO")
    held = shares(Group())
    with Saver(Group(), asynchronous=True) as saver:
        put(saver, root, 1, held)
        assert list_checkpoints(root) == []
        threading.Timer(0.2, go.set).start()
        put(saver, root, 2, held)
        assert (1, root / "step-1") in list_checkpoints(root)
        saver.wait()
        go.clear()
        put(saver, root, 3, held)
        threading.Timer(0.2, go.set).start()
        saver.wait()
    assert [step for step, _ in list_checkpoints(root)] == [1, 2, 3]
    assert "step 2 is due to be saved while step 1 still is; waiting" in caplog.text
    first, second, third = map(float, re.findall(r"of which training stood still for ([\d.]+) s", caplog.text))
    assert second > 0.1, "the wait for the save before is counted"
    assert max(first, third) < second
    (last,) = map(float, re.findall(r"training stood still for ([\d.]+) s until step 3 was saved", caplog.text))
    assert last > 0.1


def test_numbers_that_are_not_finite_do_not_lose_the_save_before(root: Path) -> None:
    def train() -> None:
        with Saver(Group(), asynchronous=True) as saver:
            put(saver, root, 1, shares(Group()))
            raise NumericsError("step 2", "loss is nan")

    with pytest.raises(NumericsError):
        train()
    assert [step for step, _ in list_checkpoints(root)] == [1]


def test_a_snapshot_copies_views_as_they_are_seen() -> None:
    held = torch.randn(6, 4)
    (copy,) = snapshot([Slice("x", "parameter", (4, 6), (0, 0), held.T)])
    expected = held.T.clone()
    held.zero_()
    assert torch.equal(copy.tensor, expected)
    assert copy.tensor.is_contiguous()
