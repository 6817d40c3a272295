"""A main thread that waits in C++ for ranks that are dead or stuck."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from boost import launch
from boost.config import TrainConfig
from boost.errors import NumericsError
from boost.training.presence import Presence
from boost.training.run_directory import RunDirectory

# One wait of half a second, then one that never ends: torch has let go of the interpreter in both.
RANK = """
import os, sys
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore
from boost.training.presence import Presence
from boost.training.signals import StopRequest
from boost.training.watch import Watch

def leave(failure):
    print(failure, *failure.__notes__, flush=True)
    os._exit(3)

store = TCPStore("localhost", int(sys.argv[2]), is_master=False)
with StopRequest() as stop, Watch(stop, Presence(Path(sys.argv[1]), 0, 2), float(sys.argv[3]), leave) as watch:
    watch.limit()
    for key, seconds in (("soon", 60), ("never", 60)):
        print("waits", flush=True)
        with watch.waiting():
            store.wait([key], timedelta(seconds=seconds))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts rank 0 with a timeout and returns its process once it waits for what never comes."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[str]] = []

    def start(timeout: float) -> subprocess.Popen[str]:
        script = tmp_path / "rank.py"
        script.write_text(RANK)
        command = [sys.executable, str(script), str(tmp_path), str(store.port), str(timeout)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == "waits\n"
        time.sleep(0.5)
        store.set("soon", "here")
        assert process.stdout.readline() == "waits\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_another_rank_dies(tmp_path: Path, start: Any) -> None:
    other = Presence(tmp_path, 1, 2)
    process = start(60)
    time.sleep(3)
    assert process.poll() is None, "one that waits longer than before has no reason to leave"
    other._file.close()  # as when its process ends
    output, _ = process.communicate(timeout=5)
    assert process.returncode == 3
    assert output.startswith("parallel: lost contact with another rank: another rank has ended")
    assert "store.wait" in output, "says where the main thread is"


def test_another_rank_dies_and_the_launcher_says_so(tmp_path: Path, start: Any) -> None:
    """After a signal the dead are looked for at once, also in a wait that is no longer than others were."""
    process = start(60)  # there never was another
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=3)
    assert process.returncode == 3


def test_another_rank_is_stuck(tmp_path: Path, start: Any) -> None:
    _other = Presence(tmp_path, 1, 2)
    began = time.monotonic()
    output, _ = start(2).communicate(timeout=20)
    assert time.monotonic() - began > 2
    assert output.startswith("parallel: lost contact with another rank: timed out")


def test_time_for_which_all_were_suspended_is_no_wait(tmp_path: Path, start: Any) -> None:
    _other = Presence(tmp_path, 1, 2)
    process = start(2)
    process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert process.poll() is None
    process.communicate(timeout=20)
    assert process.returncode == 3


def test_a_rank_leaves_with_its_code_whatever_fails_on_the_way(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has to say cannot be said: the disk is full, nobody reads. It must not stay for that."""

    def broken(*_: object) -> None:
        raise BrokenPipeError

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(launch, "_record_failure", broken)
    monkeypatch.setattr(launch.os, "_exit", end)
    config, run = TrainConfig.load(config_file), RunDirectory(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        launch._leave(config, run, Presence(tmp_path / "ranks", 0, 2), True, NumericsError("step 1", "loss is nan"))
    assert ended.value.code == 4
