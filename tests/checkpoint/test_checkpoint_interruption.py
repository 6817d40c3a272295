"""Kills, full disks and failing ranks at every point: the previous checkpoint loads, and the next save works."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess

import pytest
import torch

from boost.checkpoint import manifest, shards, store
from boost.checkpoint.manifest import parse_json
from boost.checkpoint.slices import Slice
from boost.checkpoint.store import list_checkpoints, open_checkpoint, save
from boost.errors import EnvironmentFailure, PeerFailure, UserError


class Kill(BaseException):
    """Not an Exception, so nothing cleans up after it: as after kill -9."""


POINTS = [
    (store, "_sweep"),
    (store, "_make_room"),
    (store, "_write_part"),
    (store, "write_shard"),
    (store, "_write_plan"),
    (store, "_write_tensors"),
    (store, "_hash_share"),
    (store, "_commit"),
    (store, "_read_hashes"),
    (store, "encode_manifest"),
    (store, "sync_directory"),
    (store, "_retain"),
    (store, "_remove"),
    (os, "fsync"),
    (os, "replace"),
    (os, "rename"),
    (os, "unlink"),
    (shards, "raw_bytes"),
]


def fail_at(monkeypatch, module, name, error, *, call, before):
    """Makes the call-th call of a function raise, before or after its work."""
    real, numbers, reached = getattr(module, name), itertools.count(1), []

    def wrapped(*args, **kwargs):
        mine = next(numbers) == call  # `next` is atomic; ranks are threads
        if mine:
            reached.append(name)
        if mine and before:
            raise error
        result = real(*args, **kwargs)
        if mine:
            raise error
        return result

    monkeypatch.setattr(module, name, wrapped)
    return lambda: bool(reached)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("module", "name"), POINTS, ids=[name for _, name in POINTS])
def test_kill_at_any_point(kit, tmp_path, monkeypatch, module, name, before):
    for call in itertools.count(1):
        if not kill_and_recover(kit, tmp_path / str(call), monkeypatch, module, name, call, before):
            assert call > 1
            return


def kill_and_recover(kit, root, monkeypatch, module, name, call, before):
    """False if the function is not called so often in one save."""
    old, new = kit.make_tensors(0), kit.make_tensors(1)
    kit.save_all(root, 1, old)
    kit.save_all(root, 2, old, (2,), 2)
    with monkeypatch.context() as patch:
        reached = fail_at(patch, module, name, Kill(), call=call, before=before)
        results = kit.save_all(root, 3, new, (2,), 2, keep=2)
        if not reached():
            assert results == [root / "step-3"] * 2
            return False
        assert any(isinstance(result, Kill) for result in results)
    steps = [step for step, _ in list_checkpoints(root)]
    assert 2 in steps
    for step in steps:
        checkpoint = open_checkpoint(root / f"step-{step}")
        expected = new if step == 3 else old
        assert torch.equal(checkpoint.tensor("embedding.weight"), expected["parameter", "embedding.weight"])
    assert all(isinstance(result, type(root)) for result in kit.save_all(root, 3, new, (2,), 2, keep=2))
    kit.save_all(root, 4, new, (2,), 2, keep=2)
    assert sorted(os.listdir(root)) == ["step-3", "step-4"]
    return True


@pytest.mark.parametrize("name", ["fsync", "replace", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_an_error_on_any_rank_fails_all_ranks_and_leaves_nothing(kit, tmp_path, monkeypatch, code, name):
    for call in itertools.count(1):
        if not fail_and_recover(kit, tmp_path / str(call), monkeypatch, code, name, call):
            assert call > 1
            return


def fail_and_recover(kit, root, monkeypatch, code, name, call):
    """False if the function is not called so often in one save."""
    kit.save_all(root, 2, kit.make_tensors())
    with monkeypatch.context() as patch:
        error = OSError(code, os.strerror(code), "somewhere")
        reached = fail_at(patch, os, name, error, call=call, before=True)
        results = kit.save_all(root, 3, kit.make_tensors(1), (3,), 3)
        if not reached():
            return False
    if isinstance(results[0], type(root)):  # the directory's own sync may fail on some file systems: tolerated
        assert name == "fsync"
        return True
    failures = [result for result in results if isinstance(result, UserError)]
    assert len(failures) == 3
    assert any(os.strerror(code) in str(failure) and "somewhere" in str(failure) for failure in failures)
    assert any(failure.exit_code == (2 if code == errno.EACCES else 3) for failure in failures)
    assert os.listdir(root) == ["step-2"]
    open_checkpoint(root)
    assert kit.save_all(root, 3, kit.make_tensors(1), (3,), 3) == [root / "step-3"] * 3
    return True


@pytest.mark.parametrize("phase", ["_write_part", "_write_tensors", "_hash_share"])
def test_one_failing_rank_makes_no_other_wait(kit, root, monkeypatch, phase):
    real = getattr(store, phase)

    def failing(partial, *args):
        if 1 in args:  # the rank
            raise RuntimeError("boom")
        real(partial, *args)

    monkeypatch.setattr(store, phase, failing)
    results = kit.save_all(root, 3, {("parameter", "x"): torch.zeros(9)}, (3,), 3)
    assert [type(result) for result in results] == [PeerFailure, RuntimeError, PeerFailure]
    assert "rank 1" in str(results[0])
    assert os.listdir(root) == []


def test_space_is_checked_before_writing(root, monkeypatch):
    free = shutil.disk_usage(root.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    slices = [Slice("x", "parameter", (500,), (0,), torch.zeros(500))]
    with pytest.raises(EnvironmentFailure, match=r"step-7.*no space.*expected 2000 bytes, got 1000 bytes free"):
        save(root, 7, slices, {})
    assert os.listdir(root) == []


def test_the_space_for_all_ranks_is_checked(kit, root, monkeypatch):
    """Each rank's part would fit, all of them together do not."""
    tensors = {("parameter", "x"): torch.zeros(300)}
    kit.save_all(root, 1, tensors, (3,), 3)
    free = shutil.disk_usage(root)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    results = kit.save_all(root, 2, tensors, (3,), 3)
    assert [type(result) for result in results] == [EnvironmentFailure, PeerFailure, PeerFailure]
    assert "no space to save (expected 1200 bytes, got 1000 bytes free)" in str(results[0])
    assert os.listdir(root) == ["step-1"]


@pytest.mark.parametrize("limit", ["MAX_PIECES", "MAX_TENSORS", "MAX_FILES", "MAX_MANIFEST_BYTES"])
def test_a_list_that_readers_would_refuse_is_refused_before_writing(kit, root, monkeypatch, limit):
    tensors = {("parameter", name): torch.zeros(9) for name in "xyz"}
    kit.save_all(root, 1, tensors)
    written = []
    monkeypatch.setattr(store, "write_shard", lambda path, slices: written.append(path))
    monkeypatch.setattr(manifest, limit, 2)
    first, *others = kit.save_all(root, 2, tensors, (3,), 3)
    assert isinstance(first, UserError)
    assert first.exit_code == 2
    assert "so 3 tensors in 9 slices cannot be saved; divide the state among fewer ranks" in str(first)
    assert [type(other) for other in others] == [PeerFailure, PeerFailure]
    assert not written
    assert os.listdir(root) == ["step-1"]


def test_a_rank_reads_its_own_share_of_the_list_only(kit, root, monkeypatch):
    tensors = {("parameter", f"x{index:02d}"): torch.randn(8) for index in range(40)}
    parsed = []

    def noted(data, where):
        parsed.append((where.name, len(data)))
        return parse_json(data, where)

    monkeypatch.setattr(store, "parse_json", noted)
    assert kit.save_all(root, 1, tensors, (4,), 4) == [root / "step-1"] * 4
    shares = [size for name, size in parsed if name == "shares.json"]
    assert len(shares) == 4
    assert max(shares) < sum(shares) / 3
    lists = [size for name, size in parsed if name.startswith("part-")]
    assert len(lists) == 4, "rank 0 reads each once"
    assert max(size for name, size in parsed if name == "plan.json") < 100


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("told", [True, False], ids=["free space known", "free space unknown"])
def test_full_disk(small_disk, monkeypatch, told):
    root = small_disk / "checkpoints"

    def attempt(step, megabytes):
        tensor = torch.full((megabytes << 18,), float(step))
        return save(root, step, [Slice("x", "parameter", tuple(tensor.shape), (0,), tensor)], {})

    attempt(1, 1)
    if not told:  # as with a quota
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))
    with pytest.raises(EnvironmentFailure, match=r"no space.*2097152 bytes") as caught:
        attempt(2, 2)
    assert str(root / ".step-2.partial") in str(caught.value)
    assert os.listdir(root) == ["step-1"]
    assert open_checkpoint(root).tensor("x")[0] == 1
    attempt(3, 1)
    assert open_checkpoint(root).step == 3
