"""Saving as the loop does it: behind the training, on a signal in a validation, and when a save fails."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from boost.checkpoint import store
from boost.config import TrainConfig
from boost.errors import Preempted, UserError
from boost.inference import evaluate
from boost.parallel.mesh import Mesh
from boost.training import loop
from boost.training.loop import train
from boost.training.run_directory import RunDirectory
from boost.training.signals import StopRequest
from tests.distributed.harness import run_ranks
from tests.training.conftest import with_changes
from tests.training.runs import losses, metrics, run, state_hash

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", [{}, {"parallel__tp": 2, "parallel__dp": 2, "parallel__zero": 3}], ids=str)
def test_three_saves_behind_the_training(settings: dict[str, Any], tmp_path: Path, layout: dict[str, Any]) -> None:
    common = {**layout, "train__steps": 3, "checkpoint__every": 1, "checkpoint__keep": 0}
    runs = [
        with_changes(settings, **common, run__dir=str(tmp_path / str(behind)), checkpoint__asynchronous=behind)
        for behind in (False, True)
    ]
    for config in runs:
        run(config)
    assert losses(runs[0]) == losses(runs[1])
    for step in (1, 2, 3):
        assert state_hash(runs[0], step) == state_hash(runs[1], step)


def _rank_1_cannot_write_step_2(mesh: Mesh, config: TrainConfig) -> str:
    write = store.write_shard

    def full(path: Path, slices: Any) -> Any:
        if mesh.world.rank == 1 and "step-2" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk")
        time.sleep(0.05)
        return write(path, slices)

    store.write_shard = full  # in this process only
    try:
        train(config, mesh, RunDirectory(config.run.dir))
    except UserError as error:
        return f"{type(error).__name__} {error}"
    return "no error"


def test_a_save_that_fails_behind_the_training_ends_all_ranks(settings: dict[str, Any], tmp_path: Path) -> None:
    config = with_changes(
        settings, parallel__tp=2, train__steps=500, checkpoint__every=2, checkpoint__asynchronous=True
    )
    first, second = run_ranks(2, _rank_1_cannot_write_step_2, config)
    assert first.startswith("PeerFailure")
    assert second.startswith("EnvironmentFailure disk: no space to save: No space left on device")
    assert metrics(config)[-1]["step"] < 500
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_stop_breaks_a_validation_off(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second batch of the validation after step 2 is not taken; the state of step 2 is saved."""
    config = with_changes(settings, train__validate_every=2, train__micro_batch_size=1)
    stop, passes = StopRequest(), 0
    sequence = evaluate.validation_sequence

    def counted(*arguments: Any) -> Any:
        nonlocal passes
        run_directory = RunDirectory(config.run.dir)
        if run_directory.last_step() == 1:  # step 2 is recorded after its validation
            passes += 1
            stop.requested = True
        return sequence(*arguments)

    monkeypatch.setattr(evaluate, "validation_sequence", counted)
    with pytest.raises(Preempted, match="after step 2"):
        train(config, Mesh(), RunDirectory(config.run.dir), stop)
    assert passes == 1
    assert "val_loss" in metrics(config)[0]
    assert "val_loss" not in metrics(config)[1]
    assert state_hash(config, 2)


def test_a_dataset_that_goes_does_not_take_the_state_along(
    settings: dict[str, Any], tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer is in the checkpoint all the same."""
    data = tmp_path / "tokens"
    shutil.copytree(dataset, data)
    update = loop.update

    def step(*args: Any, **options: Any) -> tuple[float, float]:
        (data / "tokenizer.json").unlink(missing_ok=True)
        return update(*args, **options)

    monkeypatch.setattr(loop, "update", step)
    config = with_changes(settings, data__path=str(data), train__steps=1)
    run(config)
    saved = store.open_checkpoint(config.run.dir)
    assert saved.read_file("tokenizer.json") == (dataset / "tokenizer.json").read_bytes()
