"""The run directory's files and its lock, as ranks and runs that know nothing of each other meet there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from boost.errors import UserError
from boost.training.run_directory import RunDirectory, atomic_write


def both(work: Callable[[], object], times: int) -> list[Exception]:
    """What two threads raise that do the same at the same time: like ranks of two containers they have one pid."""
    raised: list[Exception] = []
    barrier = threading.Barrier(2)

    def repeat() -> None:
        for _ in range(times):
            barrier.wait()
            try:
                work()
            except Exception as error:
                raised.append(error)

    threads = [threading.Thread(target=repeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_ranks_with_one_process_id_do_not_meet_in_a_file(tmp_path: Path) -> None:
    assert both(lambda: RunDirectory(tmp_path), 2000) == []
    assert both(lambda: atomic_write(tmp_path / "status.json", "{}"), 50) == []
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(OSError):
        atomic_write(tmp_path / "config.yaml", "")
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_the_lock_of_a_run_that_has_just_ended(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.lock()
    began = time.monotonic()
    with pytest.raises(UserError, match="in use by another run"):
        second.lock(patience=0.2)
    assert 0.2 <= time.monotonic() - began < 2
    threading.Timer(0.3, first.unlock).start()
    second.lock(patience=30)
    with pytest.raises(UserError):
        first.lock(patience=0)
