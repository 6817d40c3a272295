"""The directory of checkpoints: order, retention, odd paths, links, and saving a step twice."""

from __future__ import annotations

import json
import os

import pytest
import torch

from boost.checkpoint import manifest, reading
from boost.checkpoint.manifest import read_files
from boost.checkpoint.slices import Slice
from boost.checkpoint.store import latest, list_checkpoints, open_checkpoint, save
from boost.errors import EnvironmentFailure, UserError


def put(root, step, value=0.0, **more):
    return save(root, step, [Slice("x", "parameter", (3,), (0,), torch.full((3,), value))], {"step": step}, **more)


def steps(root):
    return [step for step, _ in list_checkpoints(root)]


def test_numeric_order_and_retention(root):
    assert list_checkpoints(root) == []
    assert latest(root) is None
    for step in (1000, 9, 100, 10):
        put(root, step)
    assert list_checkpoints(root) == [(step, root / f"step-{step}") for step in (9, 10, 100, 1000)]
    assert latest(root) == root / "step-1000"
    put(root, 10_000, keep=3)
    assert steps(root) == [100, 1000, 10_000]
    put(root, 10_001, keep=0)
    assert steps(root) == [100, 1000, 10_000, 10_001]
    put(root, 10_002, keep=1)
    assert os.listdir(root) == ["step-10002"]


def test_the_checkpoint_just_written_is_kept_whatever_its_number(root):
    for step in (1000, 2000, 5):
        put(root, step, keep=1)
    assert steps(root) == [5, 2000]


def test_only_complete_checkpoints_count_and_only_they_are_removed(root, tmp_path):
    for step in (1, 2, 3):
        put(root, step)
    (root / "step-2" / "manifest.json").unlink()
    outside = tmp_path / "outside"
    put(tmp_path, 8).rename(outside)
    (root / "step-0").symlink_to(outside)
    others = ["step-7x", "xstep-7", "step-", "step--1", "step-٣", "notes", "step-1.bak", "step-1 "]
    for name in others:
        (root / name).mkdir()
    (root / "step-4").write_text("a file")
    assert steps(root) == [1, 3]
    put(root, 5, keep=1)
    assert sorted(os.listdir(root)) == sorted([*others, "step-0", "step-2", "step-4", "step-5"])
    assert open_checkpoint(outside).step == 8


@pytest.mark.parametrize("damage", ["truncated", "grown", "missing", "a directory"])
def test_a_checkpoint_without_all_its_files_costs_no_good_one(root, damage, caplog):
    for step in (1, 2, 3):
        put(root, step, float(step))
    shard = root / "step-3" / "tensors-00000.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    if damage == "a directory":
        shard.mkdir()
    elif damage != "missing":
        shard.write_bytes(whole[:-1] if damage == "truncated" else whole + b"x")
    put(root, 4, keep=2)
    assert steps(root) == [2, 3, 4], "the broken one is left to the user, and 2 is in its place"
    assert f"not counted by checkpoint.keep: {shard}" in caplog.text
    assert open_checkpoint(root / "step-2").tensor("x")[0] == 2
    assert latest(root) == root / "step-4"


def test_the_newest_checkpoint_is_not_passed_over_for_a_file_of_the_wrong_size(root):
    for step in (1, 2):
        put(root, step)
    (root / "step-2" / "tensors-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"step-2/tensors-00000\.safetensors: missing"):
        open_checkpoint(root)


def test_only_the_newest_manifests_are_read_and_no_tensors_in_them(root, monkeypatch):
    for step in range(1, 6):
        put(root, step)
    read, decoded = [], []
    monkeypatch.setattr(reading, "read_files", lambda path: read.append(path.name) or read_files(path))
    monkeypatch.setattr(manifest, "packed", lambda *given: decoded.append(given))
    assert latest(root) == root / "step-5"
    assert read == ["step-5"]
    assert steps(root) == [1, 2, 3, 4, 5]
    assert not decoded


def test_a_manifest_that_is_laid_out_otherwise_counts_too(root):
    put(root, 1, 1.0)
    path = put(root, 2, 2.0) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    assert steps(root) == [1, 2]
    assert open_checkpoint(root).tensor("x")[0] == 2
    path.write_text(path.read_text().replace("tensors-00000", "tensors-00001"))
    assert steps(root) == [1]


ODD = ["[x]", "with space", "ü漢字", "-dash", "step-500-ablation", "step-7", "*?", "a" * 250, "new\nline", "'\"%s{}"]


@pytest.mark.parametrize("name", ODD, ids=range(len(ODD)))
def test_odd_paths(tmp_path, monkeypatch, name):
    run = tmp_path / name
    run.mkdir()
    monkeypatch.chdir(tmp_path)
    for first, root in ((9, run / "checkpoints"), (99, (run / "checkpoints").relative_to(tmp_path))):
        for step in range(first, first + 3):
            put(root, step, keep=2)
        assert len(steps(root)) == 2
    if name != "step-7":  # that one reads as a checkpoint, and says what it lacks
        assert open_checkpoint(run).path == latest(run / "checkpoints")
    assert open_checkpoint(f"{run}/checkpoints/").step == max(steps(run / "checkpoints"))


def test_a_run_a_folder_a_checkpoint_or_a_link_to_one(root, tmp_path):
    for step in (9, 10):
        put(root, step)
    link = tmp_path / "link"
    link.symlink_to(root / "step-9")
    for path, step in [(tmp_path, 10), (root, 10), (root / "step-9", 9), (str(root / "step-10"), 10), (link, 9)]:
        assert open_checkpoint(path).step == step


def test_the_same_step_twice(kit, root, caplog):
    path = put(root, 5, 1.0)
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(path)}
    assert put(root, 5, 1.0) == path
    assert {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(path)} == before
    with pytest.raises(UserError, match=r"step-5: exists already and holds another state \(expected state_hash"):
        put(root, 5, 2.0)
    assert os.listdir(root) == ["step-5"]
    assert open_checkpoint(root).tensor("x")[0] == 1

    def other(rank, barrier):
        pieces = [Slice("x", "parameter", (3,), (rank,), torch.full((1,), 2.0))]
        return save(root, 5, pieces, {}, rank=rank, world=3, barrier=barrier)

    assert all("another state" in str(result) for result in kit.run_ranks(3, other))
    assert os.listdir(root) == ["step-5"]


def test_a_damaged_checkpoint_of_the_same_step_is_moved_aside(root):
    for round_ in range(2):
        path = put(root, 5, 1.0)
        (path / "tensors-00000.safetensors").write_bytes(b"damaged")
        assert put(root, 5, 2.0 + round_) == path
        assert open_checkpoint(root).tensor("x")[0] == 2 + round_
        (path / "manifest.json").unlink()
    assert sorted(os.listdir(root)) == ["step-5", "step-5.damaged", "step-5.damaged1", "step-5.damaged2"]


def test_stale_partials_are_removed_without_following_links(root, tmp_path):
    put(root, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (root / ".step-7.partial").mkdir()
    (root / ".step-7.partial" / "link").symlink_to(outside)
    (root / ".step-8.partial").symlink_to(outside)
    (root / ".step-9.partial").write_text("x")
    (root / ".step-x.partial").mkdir()
    put(root, 2)
    assert sorted(os.listdir(root)) == [".step-x.partial", "step-1", "step-2"]
    assert (outside / "precious").exists()


def test_a_directory_swapped_for_a_link_is_refused(root, tmp_path):
    for step in (1, 2):
        put(root, step)
    root.rename(tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="symbolic link"):
        put(root, 3, keep=1)
    assert steps(tmp_path / "elsewhere") == [1, 2]
    (tmp_path / "run").symlink_to(tmp_path)  # a link further up is the user's own affair
    put(tmp_path / "run" / "elsewhere", 3, keep=1)
    assert steps(tmp_path / "elsewhere") == [3]


def test_no_directory_to_save_in(tmp_path):
    with pytest.raises(EnvironmentFailure, match="gone"):
        put(tmp_path / "gone" / "checkpoints", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        put(tmp_path / "file", 1)
    with pytest.raises(UserError, match="file"):
        put(tmp_path / "file" / "checkpoints", 1)


@pytest.mark.parametrize(
    "name", ["manifest.json", "plan.json", "part-00000.json", "written-00000.json", "hash-00000.json"]
)
def test_names_of_the_checkpoints_own_files_are_refused(root, name):
    with pytest.raises(ValueError, match="one of the checkpoint's own files"):
        save(root, 1, [], {}, files={name: b""})
