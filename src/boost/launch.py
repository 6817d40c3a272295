"""Starting a run: in this process, as local ranks through torch's launcher, or as one rank of a given environment.

Every end of a run leaves status.json and raises or returns an exit code from `boost.errors`. No failure ends in a hang:
a failing rank exits, torch's launcher ends the others on its machine, and elsewhere they lose their connection (gloo)
or reach `parallel.timeout_seconds` (NCCL, and any rank that waits for one that is stuck).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from boost.errors import ENVIRONMENT, PREEMPTED, BoostError, EnvironmentFailure, PeerFailure, Preempted

if TYPE_CHECKING:
    from boost.config import TrainConfig
    from boost.training.presence import Presence
    from boost.training.run_directory import RunDirectory

logger = logging.getLogger("boost")

# The process id of `_launch_local`, for its ranks: it holds the lock and speaks for them on standard error.
_CHILD = "BOOST_LOCAL_RANK"
_TIMED_OUT = ("timed out", "Timed out", "timeout caused pair closure")
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", *_TIMED_OUT)
_LOST = "lost contact with another rank"
_DIED = "was killed or crashed"
_ABSENT = "did not start, or ended before all ranks had met"
_leaving = threading.Lock()
# Signals by which ranks die because of another, those that say the least about the cause last: NCCL aborts ranks that
# have waited in vain, and the launcher ends the survivors.
_OF_OTHERS: dict[int, int] = {signal.SIGABRT: 1, signal.SIGTERM: 2}


class RunFailed(BoostError):
    """A run that ended in another process, with that process's exit code and cause."""

    def __init__(self, exit_code: int, cause: str) -> None:
        super().__init__(cause)
        self.exit_code = exit_code


def train(config: TrainConfig) -> None:
    """Trains as the configuration says, starting local processes where it asks for several.

    Started under `torchrun` or `srun` (RANK and WORLD_SIZE are set) this process is one rank of what it finds; such a
    rank does not return from a failure but exits, so that the others learn of it.

    Raises:
        BoostError: the run ended early; `exit_code` says how.
    """
    _die_with_launcher()
    from boost.training.run_directory import RunDirectory
    from boost.training.signals import ended_by_signals

    _use_slurm_ranks()
    run = RunDirectory(config.run.dir)
    if _world_size(config) == 1:
        _train_here(config, run)
    elif "RANK" in os.environ:
        # Imports are a part of it: what a handler raises in the middle of one may be lost.
        with ended_by_signals():
            _train_here(config, run)
    else:
        _launch_local(config, run)


def _world_size(config: TrainConfig) -> int:
    return config.parallel.tp * config.parallel.pp * config.parallel.dp


def _use_slurm_ranks() -> None:
    """In a step of several tasks (`srun`), takes the ranks from Slurm's variables."""
    # SLURM_NTASKS and SLURM_PROCID are set in a batch script too; the step's own count is not above 1 there.
    if "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
    os.environ["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")


def _train_here(config: TrainConfig, run: RunDirectory) -> None:
    """Runs this process's rank to its end, and records that end."""
    from boost.parallel import mesh as meshes
    from boost.parallel.collectives import any_rank
    from boost.training.console import console_handler
    from boost.training.loop import train as run_loop
    from boost.training.presence import Presence
    from boost.training.signals import StopRequest
    from boost.training.watch import Watch

    rank, world = int(os.environ.get("RANK", "0")), _world_size(config)
    if rank == 0 and _CHILD not in os.environ:
        run.lock()
        run.clear_status()
    handlers = [console_handler(), run.log_handler()] if rank == 0 else [logging.NullHandler()]
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if rank == 0 and meshes.restarts_share_a_store():
        logger.warning("restarts on several machines need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun")
    presence: Presence | None = None
    met = world == 1
    try:
        if world > 1:
            presence = Presence(run.path / ".ranks", rank, world)
        device = meshes.choose_device(config.train.device)
        mesh = meshes.start(
            config.parallel.pp,
            config.parallel.dp,
            config.parallel.tp,
            device,
            config.parallel.timeout_seconds,
            config.parallel.shards,
            _common_settings(config),
        )
        met = True
        with ExitStack() as stack:
            stop, watch = stack.enter_context(StopRequest(deaf_after_failure=presence is not None)), None
            if presence is not None:
                # All are alive: whoever seems dead has a lock that does not show here.
                presence.locks_tell = not any_rank(bool(presence.ended()), mesh.world)
                if not presence.locks_tell and rank == 0:
                    logger.warning("%s: locks do not show on all machines; dead ranks cannot be named", run.path)
                leave = partial(_leave, config, run, presence, True)
                watch = stack.enter_context(Watch(stop, presence, config.parallel.timeout_seconds, leave))
            run_loop(config, mesh, run, stop, watch)
            if rank == 0:
                run.write_status("done", 0, "")
            meshes.stop()
        if presence is not None:
            presence.leave()
    except BaseException as error:
        if presence is not None:
            # The launcher ends the survivors of a failure at once; they are leaving, and have something to say first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _leave(config, run, presence, met, error)
        failure = _as_failure(error)
        if met or rank == 0 or _CHILD in os.environ:
            _record_failure(run, rank, failure, error)
        raise failure from error
    finally:
        run.unlock()
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def _leave(config: TrainConfig, run: RunDirectory, presence: Presence, met: bool, error: BaseException) -> NoReturn:
    """Records the failure of one of several ranks, says it and ends the process. The first thread to come here does."""
    with _leaving:
        failure = _as_failure(error)
        try:
            if isinstance(failure, PeerFailure):
                died = _DIED if met else _ABSENT
                failure = _name_the_lost(presence, failure, died, config.parallel.timeout_seconds / 5)
            # A rank that has met nobody may be one of a second run, of which rank 0 was refused: the directory is not
            # its.
            if met or presence.rank == 0 or _CHILD in os.environ or not isinstance(failure, PeerFailure):
                _record_failure(run, presence.rank, failure, error)
            presence.report()
            if _CHILD not in os.environ:
                print(f"error: {failure}", file=sys.stderr, flush=True)
            logging.shutdown()
            sys.stdout.flush()
        except Exception:
            traceback.print_exc()
        finally:
            # Peers may wait in a collective: leaving at once is what tells them, and no teardown can hang.
            os._exit(failure.exit_code)


def _common_settings(config: TrainConfig) -> dict[str, object]:
    """What all ranks must have been started with, by name."""
    import torch

    from boost import __version__

    settings: dict[str, object] = {"boost": __version__, "torch": torch.__version__}
    for section, values in config.model_dump().items():
        settings |= {f"{section}.{name}": value for name, value in values.items()}
    # Machines may have another path to the same place.
    for path in ("data.path", "run.dir", "run.init_from"):
        del settings[path]
    return settings


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
        return PeerFailure("parallel", f"{_LOST}: {text[:200]}")
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return EnvironmentFailure("train.micro_batch_size", f"out of memory: {text[:200]}", hint="lower it")
    return EnvironmentFailure("run", f"unexpected {type(error).__name__}: {text[:300]}", hint="see log.txt in run.dir")


def _name_the_lost(presence: Presence, failure: PeerFailure, died: str, patience: float) -> PeerFailure:
    """The failure with the ranks that caused it, if they are dead or stuck; the others give their own account."""
    presence.report()
    lost, what = presence.gone(), died
    if not lost and any(sign in str(failure) for sign in _TIMED_OUT):
        lost, what = presence.silent(patience), "is stuck: it did not reach a collective in time"
    if not lost:
        return failure
    who = f"rank {lost[0]}" if len(lost) == 1 else f"each of ranks {', '.join(map(str, lost))}"
    return PeerFailure(who, what, hint="the same command goes on from the last checkpoint")


def _record_failure(run: RunDirectory, rank: int, failure: BoostError, error: BaseException) -> None:
    """Leaves the traceback in log.txt and the cause in status.json; a true cause replaces a lost peer's."""
    try:
        if not isinstance(failure, Preempted):
            run.append_log(f"rank {rank}: {''.join(traceback.format_exception(error))}")
        status = "preempted" if isinstance(failure, Preempted) else "failed"
        if isinstance(failure, PeerFailure):
            run.write_status_unless_written(status, failure.exit_code, str(failure))
        elif rank == 0 or not isinstance(failure, Preempted):
            run.write_status(status, failure.exit_code, str(failure))
    except OSError as problem:
        print(f"warning: {run.path}: the end of the run could not be recorded: {problem}", file=sys.stderr)


def _die_with_launcher() -> None:
    """Asks the kernel for a SIGTERM when the launcher dies, so that no rank outlives it (Linux only).

    That is `_launch_local` or torchrun, which end their ranks unless they are killed; Slurm's daemons do in any case.
    """
    ours = _CHILD in os.environ
    if sys.platform == "linux" and (ours or "TORCHELASTIC_RUN_ID" in os.environ):
        launcher = int(os.environ[_CHILD]) if ours else os.getppid()
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
        # It died before the kernel was asked. Ranks whose torchrun was gone before that do not find its store.
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)


def _launch_local(config: TrainConfig, run: RunDirectory) -> None:
    """Starts one process per rank on this machine and waits for all of them.

    Raises:
        BoostError: with the exit code and cause that the ranks recorded, or the rank that died without a word.
    """
    from boost.data.dataset import open_dataset
    from boost.training.run_directory import atomic_write

    run.lock()
    resolved = run.path / ".launch.yaml"
    try:
        run.clear_status()
        open_dataset(config)  # a mistake shows before processes start
        atomic_write(resolved, config.to_yaml())
        ended = _run_ranks(_world_size(config), ["-m", "boost", "train", str(resolved.absolute())])
    except BaseException as error:
        failure = _as_failure(error)
        _record_failure(run, 0, failure, error)
        raise failure from error
    finally:
        resolved.unlink(missing_ok=True)
        run.unlock()
    _raise_for(run, ended)


def _run_ranks(world: int, arguments: list[str]) -> dict[int, int]:
    """Runs Python with these arguments once per rank; returns the exit codes of ranks that failed."""
    # torch's launcher passes a signal on and then waits this long for the ranks to save.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[_CHILD] = str(os.getpid())
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id="boost",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(launch, sys.executable)(*arguments)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException:
        pass  # passed on to the ranks, whose status says how they ended
    finally:
        del os.environ[_CHILD]
    return {}


def _raise_for(run: RunDirectory, ended: dict[int, int]) -> None:
    """Raises what ended a launched run, unless it is done: the ranks' own account, or the signal that killed one."""
    status = run.read_status()
    told = status is not None and not any(sign in str(status["cause"]) for sign in (_LOST, _DIED, _ABSENT))
    # The launcher itself ends the ranks that survive a failure, with SIGTERM and after a while with SIGKILL: where a
    # rank gave its own account and exited with its code, signals to others say nothing of the cause.
    if status is None or not (told and (not ended or status["exit_code"] in ended.values())):
        killed = {rank: -code for rank, code in ended.items() if code < 0}
        least = min((_OF_OTHERS.get(number, 0) for number in killed.values()), default=0)
        first = {rank: number for rank, number in killed.items() if _OF_OTHERS.get(number, 0) == least}
        if first:
            rank, number = min(first.items())
            name = signal.Signals(number).name
            status = {
                "exit_code": ENVIRONMENT,
                "cause": f"rank {rank}: killed by {name}; the same command goes on from the last checkpoint",
            }
        elif status is None or (not ended and _ABSENT in str(status["cause"])):
            # Without a rank that failed the launcher had a signal to pass on; one rank may miss another that obeyed it.
            how = "a rank ended without saying why; see log.txt in run.dir" if ended else "interrupted before it began"
            status = {"exit_code": ENVIRONMENT, "cause": f"run: {how}"}
        run.write_status("failed", int(str(status["exit_code"])), str(status["cause"]))
    if status["exit_code"] == PREEMPTED:
        raise Preempted(str(status["cause"]))
    if status["exit_code"] != 0:
        raise RunFailed(int(str(status["exit_code"])), str(status["cause"]))
