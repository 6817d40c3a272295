"""Damage of every kind is noticed, and named."""

from __future__ import annotations

import shutil

import pytest

from boost.checkpoint.store import list_checkpoints, open_checkpoint
from boost.errors import UserError

FILES = ["manifest.json", "state.json", "config.yaml", "tensors-00000.safetensors", "tensors-00001.safetensors"]


@pytest.fixture
def saved(kit, root):
    kit.save_all(root, 5, kit.make_tensors(), (2,), 2)
    assert sorted(path.name for path in (root / "step-5").iterdir()) == sorted(FILES)
    return root / "step-5"


def refused(path, *words):
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit(saved, name):
    whole = (saved / name).read_bytes()
    for position in range(0, len(whole), max(1, len(whole) // 150)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        (saved / name).write_bytes(damaged)
        refused(saved, name)
    (saved / name).write_bytes(whole)
    open_checkpoint(saved)


@pytest.mark.parametrize("name", FILES)
def test_truncated_grown_or_missing(saved, name):
    whole = (saved / name).read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        (saved / name).write_bytes(whole[:length])
        refused(saved, name)
    (saved / name).write_bytes(whole + b"\0")
    refused(saved, name)
    (saved / name).unlink()
    refused(saved, name, "missing")
    (saved / name).mkdir()
    refused(saved, name, "not a regular file")


def test_sizes_are_checked_even_without_verify(saved):
    shard = saved / "tensors-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"tensors-00000\.safetensors: truncated \(expected \d+ bytes, got \d+ bytes\)"):
        open_checkpoint(saved, verify=False)


def test_small_files_are_verified_even_without_verify(saved):
    for name in ("state.json", "config.yaml"):
        whole = (saved / name).read_bytes()
        (saved / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(UserError, match=f"{name}: checksum"):
            open_checkpoint(saved, verify=False).read_file(name)
        (saved / name).write_bytes(whole)


def test_swapped_shards_and_shards_of_another_step(kit, root, saved):
    tensors = kit.make_tensors(seed=1)
    kit.save_all(root, 6, tensors, (2,), 2)
    first, second = (saved / f"tensors-0000{rank}.safetensors" for rank in range(2))
    first.rename(saved / "x"), second.rename(first), (saved / "x").rename(second)
    refused(saved, "tensors-0000")
    shutil.copy(root / "step-6" / first.name, first)
    shutil.copy(root / "step-6" / second.name, second)
    refused(saved, "tensors-00000", "belongs to another checkpoint")
    shutil.copy(root / "step-6" / "manifest.json", saved)
    refused(saved, "manifest.json", "expected 5, got 6")
    assert [step for step, _ in list_checkpoints(root)] == [6]
    saved.rename(root / "best")  # a checkpoint may be renamed to something that names no step
    shutil.copy(root / "step-6" / "state.json", root / "best")
    assert open_checkpoint(root / "best").step == 6


def test_stray_files_are_tolerated_and_reported(saved, caplog):
    (saved / "tensors-00002.safetensors").write_bytes(b"stray")
    (saved / "notes").mkdir()
    assert open_checkpoint(saved).stray == ("notes", "tensors-00002.safetensors")
    assert "tensors-00002.safetensors" in caplog.text


def test_a_file_that_changes_after_opening_is_noticed(kit, saved):
    checkpoint = open_checkpoint(saved)
    (saved / "tensors-00000.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="tensors-00000"):
        checkpoint.tensor("embedding.weight")
    (saved / "tensors-00000.safetensors").unlink()
    with pytest.raises(UserError, match="tensors-00000"):
        checkpoint.tensor("embedding.weight")


def test_what_is_not_a_checkpoint(tmp_path, root, saved):
    refused(tmp_path / "nowhere", "no such directory")
    refused(saved / "state.json", "no such directory")
    (tmp_path / "step-3").mkdir()
    refused(tmp_path / "step-3", "missing manifest.json")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "missing manifest.json")
