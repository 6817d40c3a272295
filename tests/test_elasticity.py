"""Ranks that die or hang at any moment: everything ends in time and says why, and a restart loses nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from boost.checkpoint.store import latest, open_checkpoint
from tests.processes import boost, ranks_of, records, status, wait_for_step, write_config
from tests.training.conftest import tiny_settings

pytestmark = pytest.mark.slow

KILLS = 20 if os.environ.get("BOOST_FULL_PARITY") else 3
OPTIONS = ("checkpoint.every=3", "checkpoint.keep=2", f"train.steps={12 * KILLS}")
TORCHRUN = ("-m", "torch.distributed.run")


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    directory = tmp_path_factory.mktemp("whole")
    config = write_config(tiny_settings(dataset, directory / "run"), directory)
    assert boost("train", str(config), *OPTIONS).returncode == 0
    return directory / "run"


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run)]


def state_hash(run: Path) -> str:
    return open_checkpoint(run / "checkpoints").state_hash


def ranks(process: subprocess.Popen[str], count: int) -> dict[int, int]:
    """Rank to process id, once all are there."""
    deadline = time.monotonic() + 60
    while len(found := ranks_of(process)) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == count
    return found


def wait_until_gone(pids: list[int], seconds: float) -> float:
    """How long it took until none of the processes ran any more."""
    began = time.monotonic()
    while any(map(_runs, pids)):
        assert time.monotonic() - began < seconds, "processes are left"
        time.sleep(0.02)
    return time.monotonic() - began


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_save(run: Path, process: subprocess.Popen[str]) -> None:
    """Returns in the middle of a save: one is being written."""
    while not list((run / "checkpoints").glob(".step-*.partial")):
        assert process.poll() is None, process.communicate()


def test_kills_at_random_moments(config_file: Path, tmp_path: Path, whole: Path, start: Any) -> None:
    """Any rank, at any moment, every other time in a save: all gone within 15 s, one line that names the rank, and in
    the end the losses and the state of a run that was left alone, whether it saves at once or behind the training."""
    run = tmp_path / "run"
    draw = random.Random(KILLS)
    slowest = 0.0
    for number in range(KILLS):
        newest = latest(run / "checkpoints")
        saved = int(newest.name.removeprefix("step-")) if newest else 0
        asynchronous = f"checkpoint.asynchronous={draw.choice(['true', 'false'])}"
        process = start("train", str(config_file), *OPTIONS, asynchronous)
        pids = ranks(process, 2)
        wait_for_step(run, saved + draw.randint(1, 8), process)
        if number % 2:
            wait_for_save(run, process)
        time.sleep(draw.random() * 0.02)
        victim = draw.randrange(2)
        os.kill(pids[victim], signal.SIGKILL)
        slowest = max(slowest, wait_until_gone([process.pid, *pids.values()], 15))
        _, errors = process.communicate()
        assert process.returncode == 3, errors
        assert errors.strip().splitlines()[-1].startswith(f"error: rank {victim}: killed by SIGKILL")
        assert status(run)["exit_code"] == 3
    print(f"{KILLS} kills, all processes gone within {slowest:.1f} s")
    last = boost("train", str(config_file), *OPTIONS)
    assert last.returncode == 0, last.stderr
    assert losses(run) == losses(whole)
    assert state_hash(run) == state_hash(whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        path.name for path in (whole / "checkpoints").iterdir()
    )


def test_a_stuck_rank_is_named(config_file: Path, tmp_path: Path, start: Any) -> None:
    """Of four ranks one stops: within the timeout and a fifth of it the others have left, and have named it."""
    options = ("parallel.dp=2", "parallel.timeout_seconds=5", "checkpoint.every=0", "train.steps=2000")
    process = start("train", str(config_file), *options)
    pids = ranks(process, 4)
    wait_for_step(tmp_path / "run", 5, process)
    os.kill(pids[1], signal.SIGSTOP)
    seconds = wait_until_gone([pids[rank] for rank in (0, 2, 3)], 20)
    assert 4 < seconds < 9
    os.kill(pids[1], signal.SIGKILL)  # the launcher would do that after half a minute
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 3, errors
    assert errors.strip().splitlines()[-1].startswith("error: rank 1: is stuck"), errors
    assert status(tmp_path / "run")["cause"].startswith("rank 1: is stuck")


def test_torchrun_restarts_and_resumes(config_file: Path, tmp_path: Path, whole: Path, start: Any) -> None:
    """One rank dies: torchrun starts all of them again, and they go on from the last checkpoint."""
    run = tmp_path / "run"
    launcher = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    process = start("train", str(config_file), *OPTIONS, launcher=launcher)
    pids = ranks(process, 2)
    wait_for_step(run, 10, process)
    os.kill(pids[1], signal.SIGKILL)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "error: rank 1: was killed or crashed" in errors
    assert "resuming from" in output
    assert losses(run) == losses(whole)
    assert state_hash(run) == state_hash(whole)
    assert status(run) == {"status": "done", "step": 12 * KILLS, "exit_code": 0, "cause": ""}


def test_two_nodes(config_file: Path, tmp_path: Path, whole: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two torchrun agents, tensor-parallel across them; a rank dies on the way, and both start again."""
    run = tmp_path / "run"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    launcher = (*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1")
    launcher += ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost")
    nodes = [start("train", str(config_file), *OPTIONS, launcher=launcher) for _ in range(2)]
    pids = ranks(nodes[0], 1) | ranks(nodes[1], 1)
    assert sorted(pids) == [0, 1]
    wait_for_step(run, 10, nodes[0])
    os.kill(pids[1], signal.SIGKILL)
    for node in nodes:
        _, errors = node.communicate(timeout=120)
        assert node.returncode == 0, errors
    assert losses(run) == losses(whole)
    assert state_hash(run) == state_hash(whole)
