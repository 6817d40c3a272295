"""What ranks do together before a run starts: compare their data, and verify the checkpoint that it goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from boost.checkpoint import reading
from boost.checkpoint.store import open_checkpoint
from boost.config import TrainConfig
from boost.data.prepare import prepare
from boost.errors import EnvironmentFailure, UserError
from boost.parallel.mesh import Mesh
from boost.training import loop
from boost.training.loop import train
from boost.training.run_directory import RunDirectory
from tests.distributed.harness import run_ranks
from tests.training.conftest import with_changes
from tests.training.runs import run


def _resume(mesh: Mesh, configs: list[TrainConfig]) -> tuple[list[str], str]:
    """The files whose hashes and sizes this rank compares, whether it looks for the newest, and how its run ends."""
    seen: list[str] = []
    hash_file, check_size, latest = reading.hash_file, reading.check_size, loop.latest

    def noted(path: Path) -> str:
        seen.append(path.name)
        return hash_file(path)

    def sized(directory: Path, name: str, entry: Any) -> Path:
        if name.startswith("tensors-"):
            seen.append(f"size of {name}")
        return check_size(directory, name, entry)

    def looked(root: Path) -> Path | None:
        seen.append("looked for the newest")
        return latest(root)

    config = configs[mesh.world.rank]
    reading.hash_file, reading.check_size, loop.latest = noted, sized, looked  # in this process only
    try:
        train(config, mesh, RunDirectory(config.run.dir))
    except UserError as error:
        return seen, f"{type(error).__name__} {error}"
    return seen, "done"


def test_every_file_is_verified_by_one_rank(settings: dict[str, Any], tmp_path: Path) -> None:
    config = with_changes(settings, parallel__dp=2, parallel__zero=1)
    run(config)
    longer = [with_changes(settings, parallel__dp=2, parallel__zero=1, train__steps=7)] * 2
    checkpoint = open_checkpoint(tmp_path / "run")
    seen, ends = zip(*run_ranks(2, _resume, longer, layout=(1, 2, 1)), strict=True)
    assert ends == ("done", "done")
    hashed = [[name for name in names if name in checkpoint.files] for names in seen]
    assert sorted(hashed[0] + hashed[1]) == sorted(checkpoint.files)
    assert min(map(len, hashed)) >= 2
    sized = [name for names in seen for name in names if name.startswith("size of")]
    assert sorted(sized) == sorted(f"size of {name}" for name in checkpoint.files if name.startswith("tensors-"))
    assert ["looked for the newest" in names for names in seen] == [True, False]


def _resume_where_rank_1_sees_nothing(mesh: Mesh, config: TrainConfig) -> str:
    """As on a file system that shows new directories late."""
    run = RunDirectory(config.run.dir)
    if mesh.world.rank == 1:
        RunDirectory.checkpoints = property(lambda self: self.path / "late")
    with pytest.raises(EnvironmentFailure) as caught:
        train(config, mesh, run)
    return str(caught.value)


def test_a_rank_that_does_not_see_the_checkpoint_is_told(settings: dict[str, Any], tmp_path: Path) -> None:
    config = with_changes(settings, parallel__dp=2)
    run(config)
    for end in run_ranks(2, _resume_where_rank_1_sees_nothing, config, layout=(1, 2, 1)):
        assert "not seen by every rank" in end


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_finds_damaged_all_name(settings: dict[str, Any], tmp_path: Path, rank: int) -> None:
    config = with_changes(settings, parallel__dp=2, parallel__zero=1)
    run(config)
    checkpoint = open_checkpoint(tmp_path / "run")
    name = next(name for name in list(checkpoint.files)[rank::2] if name.startswith("tensors-"))
    data = bytearray((checkpoint.path / name).read_bytes())
    data[-1] ^= 1
    (checkpoint.path / name).write_bytes(data)
    for _, end in run_ranks(2, _resume, [config] * 2, layout=(1, 2, 1)):
        assert end.startswith("UserError")
        assert f"{name}: checksum mismatch" in end


def test_ranks_that_start_from_other_weights_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """What counts is the checkpoint, not the path to it."""
    for name in ("one", "other"):
        run(with_changes(settings, run__dir=str(tmp_path / name), train__steps=1, train__seed=len(name)))
    (tmp_path / "same").symlink_to(tmp_path / "one")
    for name, refused in {"other": True, "same": False}.items():
        paths = [tmp_path / "one", tmp_path / name]
        fresh = {"parallel__dp": 2, "train__steps": 1}
        configs = [with_changes(settings, **fresh, run__init_from=str(path)) for path in paths]
        for (_, end), path in zip(run_ranks(2, _resume, configs, layout=(1, 2, 1)), paths, strict=True):
            got = f"state_hash {open_checkpoint(path).state_hash[:12]}"
            line = f"UserError run.init_from: ranks opened different checkpoints (got {got}"
            assert end.startswith(line if refused else "done"), end


def test_machines_without_a_common_run_directory_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """Before the first step, on all ranks, also where both have the same checkpoint."""
    runs = [tmp_path / "here", tmp_path / "there"]
    for path in runs:
        run(with_changes(settings, train__steps=1, run__dir=str(path)))
    before = [sorted(path.rglob("*")) for path in runs]
    configs = [with_changes(settings, parallel__dp=2, train__steps=2, run__dir=str(path)) for path in runs]
    for _, end in run_ranks(2, _resume, configs, layout=(1, 2, 1)):
        assert end.startswith("UserError run.dir: rank 1 does not see what rank 0 writes"), end
    assert [sorted(path.rglob("*")) for path in runs] == before


def test_machines_with_other_data_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """Each at the path where it has it."""
    text = tmp_path / "other.txt"
    text.write_text("another text of some length " * 200)
    prepare([str(text)], tmp_path / "other", "bpe4096")
    configs = [with_changes(settings, parallel__dp=2)]
    configs.append(with_changes(settings, parallel__dp=2, data__path=str(tmp_path / "other")))
    for _, end in run_ranks(2, _resume, configs, layout=(1, 2, 1)):
        assert end.startswith("UserError data.path: ranks see different datasets")
