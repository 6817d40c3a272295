"""Ranks that die or hang at any moment: everything ends in time and says why, and a restart loses nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from boost import launch
from boost.checkpoint.store import latest, open_checkpoint
from boost.config import TrainConfig
from boost.training.run_directory import RunDirectory
from tests.processes import boost, ranks_of, records, status, wait_for_step, write_config
from tests.training.conftest import tiny_settings
from tests.training.runs import run as run_loop

pytestmark = pytest.mark.slow

FULL = bool(os.environ.get("BOOST_FULL_PARITY"))
STEPS = 240 if FULL else 36
OPTIONS = ("checkpoint.every=3", "checkpoint.keep=2", f"train.steps={STEPS}")
TORCHRUN = ("-m", "torch.distributed.run")

LAYOUTS = {
    "tp": (),
    "pp": ("parallel.tp=1", "parallel.pp=2", "train.micro_batch_size=1"),
    "zero": ("parallel.tp=1", "parallel.dp=2", "parallel.zero=3"),
    "tp pp": ("parallel.pp=2", "train.micro_batch_size=1"),
    "tp zero": ("parallel.dp=2", "parallel.zero=1"),
}
WORLD = {layout: 4 if " " in layout else 2 for layout in LAYOUTS}
# When a rank dies: while another waits for it to start; before the first step; at a step; in a save.
MOMENTS = {
    "tp": ("step", "restore"),
    "tp pp": ("save", "start"),
    "zero": ("start",),
}
if FULL:
    MOMENTS = dict.fromkeys(LAYOUTS, 5 * ("step", "start", "save", "restore"))
    MOMENTS["tp zero"] = ("step", "start", "save", "restore")


@pytest.fixture(scope="module")
def wholes(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By layout, the run that nobody disturbs."""

    @cache
    def whole(layout: str) -> Path:
        directory = tmp_path_factory.mktemp("whole")
        config = write_config(tiny_settings(dataset, directory / "run"), directory)
        run_loop(TrainConfig.load(config, [*OPTIONS, *LAYOUTS[layout]]))
        return directory / "run"

    return whole


@pytest.fixture
def whole(wholes: Callable[[str], Path]) -> Path:
    """That of two tensor-parallel ranks."""
    return wholes("tp")


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


def wait_for_presence(pids: Iterable[int], process: subprocess.Popen[str]) -> None:
    """Returns when these ranks have locked their files in the run directory, and are about to meet the others."""
    missing = {str(pid) for pid in pids}
    while missing:
        assert process.poll() is None, process.communicate()
        locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
        missing -= {lock[4] for lock in locks if lock[1] == "FLOCK"}
        time.sleep(0.01)


@pytest.mark.timeout(1200 if FULL else 240)
@pytest.mark.parametrize("layout", MOMENTS)
def test_kills_at_random_moments(
    layout: str, config_file: Path, tmp_path: Path, wholes: Callable[[str], Path], start: Any
) -> None:
    """Any rank, at any moment: all gone within 15 s, one line that names the rank, and in the end the losses and the
    state of a run that was left alone, whether it saves at once or behind the training."""
    run, world = tmp_path / "run", WORLD[layout]
    draw = random.Random(layout)
    slowest = 0.0
    for moment in MOMENTS[layout]:
        newest = latest(run / "checkpoints")
        saved = int(newest.name.removeprefix("step-")) if newest else 0
        asynchronous = f"checkpoint.asynchronous={draw.choice(['true', 'false'])}"
        process = start("train", str(config_file), *OPTIONS, *LAYOUTS[layout], asynchronous)
        pids = ranks(process, world)
        victim = draw.randrange(world)
        if moment == "start":
            os.kill(pids[victim], signal.SIGSTOP)
            wait_for_presence([pid for rank, pid in pids.items() if rank != victim], process)
            time.sleep(0.5 + draw.random())
        elif moment == "restore":
            wait_for_presence(pids.values(), process)
            time.sleep(draw.random() * 0.5)
        else:
            wait_for_step(run, saved + draw.randint(4, 8), process)
            if moment == "save":
                wait_for_save(run, process)
            time.sleep(draw.random() * 0.02)
        os.kill(pids[victim], signal.SIGKILL)
        slowest = max(slowest, wait_until_gone([process.pid, *pids.values()], 15))
        _, errors = process.communicate()
        assert process.returncode == 3, errors
        assert errors.strip().splitlines()[-1].startswith(f"error: rank {victim}: killed by SIGKILL"), (moment, errors)
        assert status(run)["exit_code"] == 3
    print(f"{layout}: {len(MOMENTS[layout])} kills, all processes gone within {slowest:.1f} s")
    last = boost("train", str(config_file), *OPTIONS, *LAYOUTS[layout])
    assert last.returncode == 0, last.stderr
    whole = wholes(layout)
    assert losses(run) == losses(whole)
    assert state_hash(run) == state_hash(whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        path.name for path in (whole / "checkpoints").iterdir()
    )


def test_a_stuck_rank_is_named(config_file: Path, tmp_path: Path, start: Any) -> None:
    """Of four ranks one stops: within the timeout and a fifth of it the others have left, and have named it. One of
    them waits in a collective with it, one for what its stage sends."""
    options = ("parallel.pp=2", "train.micro_batch_size=1", "parallel.timeout_seconds=5")
    process = start("train", str(config_file), *options, "checkpoint.every=0", "train.steps=2000")
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


def test_a_stop_before_the_ranks_have_met(config_file: Path, tmp_path: Path, start: Any) -> None:
    process = start("train", str(config_file))
    pids = ranks(process, 2)
    os.kill(pids[1], signal.SIGSTOP)
    wait_for_presence([pids[0]], process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    wait_until_gone([pids[0]], 5)
    os.kill(pids[1], signal.SIGCONT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 3, errors
    assert errors.strip().splitlines()[-1] == "error: run: interrupted before it began"


def test_a_rank_that_misses_one_which_a_signal_ended(tmp_path: Path) -> None:
    """The signal is the cause, not the absence. A signal ends the launcher's ranks one after the other."""
    run = RunDirectory(tmp_path / "run")
    run.write_status("failed", 3, f"rank 0: {launch._ABSENT}")
    with pytest.raises(launch.RunFailed, match=r"^run: interrupted before it began$") as failure:
        launch._raise_for(run, {})
    assert failure.value.exit_code == status(run.path)["exit_code"] == 3
    assert status(run.path)["cause"] == "run: interrupted before it began"


@pytest.mark.parametrize(
    ("codes", "line"),
    [
        ({0: -15, 1: -9, 2: -6}, "rank 1: killed by SIGKILL"),
        ({0: -15, 1: -15, 3: -6}, "rank 3: killed by SIGABRT"),
        ({2: -15, 3: -15}, "rank 2: killed by SIGTERM"),
    ],
)
def test_of_several_signals_the_cause_is_told(tmp_path: Path, codes: dict[int, int], line: str) -> None:
    """NCCL aborts ranks that have waited in vain, the launcher ends the survivors."""
    with pytest.raises(launch.RunFailed, match=f"^{line};"):
        launch._raise_for(RunDirectory(tmp_path / "run"), codes)


def one_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, port: int) -> None:
    """Makes the next process a rank that some launcher has started."""
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def test_a_second_run_leaves_the_first_alone(
    config_file: Path, tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its ranks one finds its place taken, one has a place of its own and waits in vain for the others.

    Both may try again: a place may also be held by a dead machine's lock that has not dropped yet.
    """
    live = start("train", str(config_file), "train.steps=5000")
    wait_for_step(tmp_path / "run", 1, live)
    second = ("train", str(config_file), "parallel.dp=2", "parallel.timeout_seconds=1")
    meeting_place, others = TCPStore("localhost", 0, is_master=True, wait_for_workers=False), []
    for rank in (1, 2):
        one_rank(monkeypatch, rank, 4, meeting_place.port)
        others.append(start(*second))
    for process, line in zip(others, ("run.dir: ", "rank 3: did not start"), strict=True):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 3, errors
        assert errors.strip().splitlines()[-1].startswith(f"error: {line}"), errors
    assert not (tmp_path / "run" / "status.json").exists()
    assert (tmp_path / "run" / ".ranks" / "1").read_text() == ""
    assert live.poll() is None
    live.send_signal(signal.SIGTERM)
    live.communicate(timeout=60)
    assert live.returncode == 75


# gloo's timeouts stay five times as long as asked for, as NCCL's do.
PATIENT = """
import sys
from boost.cli import main
from boost.training import loop
loop.shorten_timeouts = lambda *_, **__: None
main()
"""


def test_a_stuck_rank_is_named_where_the_backend_does_not_tell(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's main thread waits in C++ and its launcher does nothing: a second thread ends it, in time."""
    meeting_place = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    options = ("parallel.timeout_seconds=5", "checkpoint.every=0", "train.steps=5000")
    processes = []
    for rank in range(2):
        one_rank(monkeypatch, rank, 2, meeting_place.port)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # the store is there, no rank has to make it
        command = [sys.executable, "-c", PATIENT, "train", str(config_file), *options]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    try:
        wait_for_step(tmp_path / "run", 5, processes[0])
        processes[1].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        _, errors = processes[0].communicate(timeout=20)
        assert 4 < time.monotonic() - began < 15, "gloo would raise after 25 s"
        assert processes[0].returncode == 3
        assert errors.strip().splitlines()[-1].startswith("error: rank 1: is stuck"), errors
        assert status(tmp_path / "run")["cause"].startswith("rank 1: is stuck")
        log = (tmp_path / "run" / "log.txt").read_text()
        assert "The main thread is at" in log and "all_reduce" in log
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_ranks_of_other_configurations(config_file: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines whose files differ: every rank says in what, before anything is trained."""
    port, nodes = free_port(), []
    for rank in range(2):
        one_rank(monkeypatch, rank, 2, port)
        nodes.append(start("train", str(config_file), f"optimizer.lr={0.25 + rank}"))
    for rank, node in enumerate(nodes):
        _, errors = node.communicate(timeout=60)
        assert node.returncode == 2, errors
        line = f"error: optimizer.lr: differs between ranks (got {0.25 + rank} on rank {rank})"
        assert errors.strip().splitlines()[-1] == line


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
    assert status(run) == {"status": "done", "step": STEPS, "exit_code": 0, "cause": ""}


def test_no_rank_outlives_its_launcher(config_file: Path, tmp_path: Path, start: Any) -> None:
    """`kill -9` of what has started the ranks: they save and end, and the same command goes on."""
    run, step = tmp_path / "run", 0
    for launcher in ((), (*TORCHRUN, "--standalone", "--nproc-per-node", "2")):
        process = start("train", str(config_file), "train.steps=5000", launcher=launcher)
        pids = ranks(process, 2)
        wait_for_step(run, step + 3, process)
        process.kill()
        try:
            seconds = wait_until_gone([process.pid, *pids.values()], 15)
        finally:
            for pid in filter(_runs, pids.values()):
                os.kill(pid, signal.SIGKILL)
        assert status(run)["status"] == "preempted"
        step = status(run)["step"]
        print(f"all ranks gone within {seconds:.1f} s, step {step} saved")
    last = boost("train", str(config_file), f"train.steps={step + 2}")
    assert last.returncode == 0, last.stderr
    assert f"resuming from {run / 'checkpoints' / f'step-{step}'}" in last.stdout
    assert [record["step"] for record in records(run)] == list(range(1, step + 3))


def test_a_rank_whose_launcher_died_before_it_began(config_file: Path, tmp_path: Path) -> None:
    result = boost("train", str(config_file), env={**os.environ, launch._CHILD: str(os.getppid()), "RANK": "0"})
    assert result.returncode == -signal.SIGTERM
    assert not (tmp_path / "run").exists()


def test_two_nodes(config_file: Path, tmp_path: Path, whole: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two torchrun agents, tensor-parallel across them; a rank dies on the way, and both start again."""
    run = tmp_path / "run"
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    port = free_port()
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
