"""Starting a run: in this process, as local ranks through torch's launcher, or as one rank of a given environment.

Every end of a run leaves status.json and raises or returns an exit code from `boost.errors`; no failure ends in a
hang, because a failing rank exits at once and the others lose their connection to it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from boost.errors import ENVIRONMENT, PREEMPTED, BoostError, EnvironmentFailure, Preempted

if TYPE_CHECKING:
    from boost.config import TrainConfig
    from boost.training.run_directory import RunDirectory

logger = logging.getLogger("boost")

# Set for ranks that `_launch_local` starts: it speaks for them on standard error.
_CHILD = "BOOST_LOCAL_RANK"
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "timed out", "Timed out", "Broken pipe")


class RunFailed(BoostError):
    """A run that ended in another process, with that process's exit code and cause."""

    def __init__(self, exit_code: int, cause: str) -> None:
        super().__init__(cause)
        self.exit_code = exit_code


def train(config: TrainConfig) -> None:
    """Trains as the configuration says, starting local processes where it asks for several.

    Started under `torchrun` or `srun` (RANK and WORLD_SIZE are set) this process is one rank of what it finds.

    Raises:
        BoostError: the run ended early; `exit_code` says how.
    """
    _use_slurm_ranks()
    if "RANK" in os.environ or _world_size(config) == 1:
        _train_here(config)
    else:
        _launch_local(config)


def _world_size(config: TrainConfig) -> int:
    return config.parallel.tp * config.parallel.pp * config.parallel.dp


def _use_slurm_ranks() -> None:
    """Under `srun` with several tasks, takes the ranks from Slurm's variables."""
    if "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) == 1 or "SLURM_PROCID" not in os.environ:
        return
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")


def _train_here(config: TrainConfig) -> None:
    """Runs this process's rank to its end, and records that end."""
    from boost.parallel import mesh as meshes
    from boost.training.console import log_to_console
    from boost.training.loop import train as run_loop
    from boost.training.run_directory import RunDirectory

    rank, world = int(os.environ.get("RANK", "0")), _world_size(config)
    run = RunDirectory(config.run.dir)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if rank == 0:
        run.lock()
        run.clear_status()
        log_to_console()
        run.log_to_file()
    else:
        logger.addHandler(logging.NullHandler())
    if _CHILD in os.environ:
        _die_with_parent()
    try:
        device = meshes.choose_device(config.train.device)
        mesh = meshes.start(
            config.parallel.pp, config.parallel.dp, config.parallel.tp, device, config.parallel.timeout_seconds
        )
        run_loop(config, mesh, run)
        if rank == 0:
            run.write_status("done", 0, "")
        meshes.stop()
    except BaseException as error:
        failure = _as_failure(error)
        _record_failure(run, rank, failure, error)
        if world == 1:
            raise failure from error
        # Peers may wait in a collective: leaving at once is what tells them, and no teardown can hang.
        if _CHILD not in os.environ:
            print(f"error: {failure}", file=sys.stderr, flush=True)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(failure.exit_code)
    finally:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()


def _as_failure(error: BaseException) -> BoostError:
    """Any exception as one line with an exit code."""
    import torch

    if isinstance(error, BoostError):
        return error
    text = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return EnvironmentFailure("run", "interrupted before its state was saved")
    if isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _LOST_PEER)
    ):
        return _LostPeer("parallel", f"lost contact with another rank: {text[:200]}")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return EnvironmentFailure("train.micro_batch_size", f"out of memory: {text[:200]}", hint="lower it")
    return EnvironmentFailure("run", f"unexpected {type(error).__name__}: {text[:300]}", hint="see log.txt in run.dir")


class _LostPeer(EnvironmentFailure):
    """This rank only saw another one vanish; that one knows why."""


def _record_failure(run: RunDirectory, rank: int, failure: BoostError, error: BaseException) -> None:
    """Leaves the traceback in log.txt and the cause in status.json; the first true cause wins."""
    try:
        if not isinstance(failure, Preempted):
            run.append_log(f"rank {rank}: {''.join(traceback.format_exception(error))}")
        status = "preempted" if isinstance(failure, Preempted) else "failed"
        if isinstance(failure, _LostPeer):
            run.write_status_unless_written(status, failure.exit_code, str(failure))
        elif rank == 0 or not isinstance(failure, Preempted):
            run.write_status(status, failure.exit_code, str(failure))
    except OSError as problem:
        print(f"warning: {run.path}: the end of the run could not be recorded: {problem}", file=sys.stderr)


def _die_with_parent() -> None:
    """Asks the kernel for a SIGTERM when the launcher dies, so that no rank outlives it (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _launch_local(config: TrainConfig) -> None:
    """Starts one process per rank on this machine and waits for all of them.

    Raises:
        RunFailed: with the exit code and cause that the ranks recorded, or the rank that died without a word.
    """
    from boost.data.dataset import open_dataset
    from boost.training.run_directory import RunDirectory, atomic_write

    # Mistakes show before processes start.
    run = RunDirectory(config.run.dir)
    run.check_free()
    open_dataset(config)
    # torch's launcher passes a signal on and then waits this long for the ranks to save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[_CHILD] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    resolved = run.path / ".launch.yaml"
    atomic_write(resolved, config.to_yaml())
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=_world_size(config),
        run_id="boost",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    started = _status_age(run)
    try:
        elastic_launch(launch, sys.executable)("-m", "boost", "train", str(resolved.absolute()))
        return
    except ChildFailedError as error:
        ended = {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException:
        ended = {}
    finally:
        del os.environ[_CHILD]
        resolved.unlink(missing_ok=True)
    status = run.read_status() if _status_age(run) != started else None
    # The launcher itself ends the ranks that survive a failure with SIGTERM, so that says the least of the cause.
    killed = {rank: -code for rank, code in ended.items() if code < 0}
    first = {rank: number for rank, number in killed.items() if number != signal.SIGTERM}
    killed = first or ({} if status is not None else killed)
    if killed:
        rank, number = min(killed.items())
        cause = (
            f"rank {rank}: killed by {signal.Signals(number).name}; the same command goes on from the last checkpoint"
        )
        run.write_status("failed", ENVIRONMENT, cause)
        raise RunFailed(ENVIRONMENT, cause)
    if status is None:
        cause = "run: a rank ended without saying why; see log.txt in run.dir"
        run.write_status("failed", ENVIRONMENT, cause)
        raise RunFailed(ENVIRONMENT, cause)
    if status["exit_code"] == PREEMPTED:
        raise Preempted(str(status["cause"]))
    if status["exit_code"] != 0:
        raise RunFailed(int(str(status["exit_code"])), str(status["cause"]))


def _status_age(run: RunDirectory) -> int | None:
    try:
        return (run.path / "status.json").stat().st_mtime_ns
    except OSError:
        return None
