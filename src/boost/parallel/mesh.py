"""Ranks to groups: the (pp, dp, tp) grid, tp innermost so that its ranks are neighbours.

Every function that communicates takes the `Group` it acts on as an argument; there is no global group.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from boost.errors import EnvironmentFailure, PeerFailure, UserError

# Starting, the first step (compilation, first connections) and saving (disks) may take so many times as long as the
# configured timeout; a collective of any later step may not.
PATIENCE = 5


@dataclass(frozen=True)
class Group:
    """The ranks along one dimension of the mesh. A group of size 1 never communicates.

    Attributes:
        rank: this process's place in the group, in [0, size).
        size: the number of ranks.
        process_group: the torch group; None only where size is 1.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """This process's groups along every dimension, and the device it computes on.

    The dp ranks are a grid of their own: `shards` share what ZeRO divides, `replicas` hold the same of it. Without
    ZeRO all of dp are replicas.

    All groups are made when the run starts, while a signal may still end a rank that waits for a dead one.

    Attributes:
        prompt: the pp ranks again, for the time after `shorten_timeouts`.
        saving: all ranks again, where a thread can meet on the host while others communicate. It stays patient.
    """

    world: Group = field(default_factory=Group)
    pp: Group = field(default_factory=Group)
    dp: Group = field(default_factory=Group)
    tp: Group = field(default_factory=Group)
    shards: Group = field(default_factory=Group)
    replicas: Group = field(default_factory=Group)
    prompt: Group = field(default_factory=Group)
    saving: Group = field(default_factory=Group)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def choose_device(device: str, field: str = "train.device") -> torch.device:
    """`auto`, `cpu` or `cuda`, as `field` has it, to the device of this process (one GPU per local rank)."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(field, "no CUDA device is visible", expected="cpu or auto", got="cuda")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            "parallel",
            "there are more ranks on this machine than GPUs",
            expected=f"at most {torch.cuda.device_count()}",
            got=f"local rank {local_rank}",
            hint="lower tp, pp or dp, or start ranks on more machines",
        )
    return torch.device("cuda", local_rank)


def start(
    pp: int,
    dp: int,
    tp: int,
    device: torch.device,
    timeout_seconds: float,
    shards: int = 1,
    settings: Mapping[str, object] | None = None,
) -> Mesh:
    """Joins the process group that the environment describes (RANK, WORLD_SIZE, ...) and builds the mesh.

    Collectives wait `PATIENCE` times as long as the timeout, until `shorten_timeouts`.

    Args:
        shards: how many neighbouring dp ranks share what ZeRO divides.
        settings: what must be the same on all ranks, by name.

    Raises:
        UserError: the number of processes is not pp * dp * tp, or a setting is not the same on all of them.
        EnvironmentFailure: rank 0 cannot listen where the ranks are to meet, or nobody answers there.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != pp * dp * tp:
        raise UserError(
            "parallel",
            "the number of processes does not match the layout",
            expected=f"pp*dp*tp = {pp}*{dp}*{tp} = {pp * dp * tp}",
            got=f"WORLD_SIZE = {world_size}",
        )
    if world_size == 1:
        return Mesh(device=device)
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UserError(
            "MASTER_ADDR, MASTER_PORT",
            "the environment names ranks but not where they meet",
            hint="export both before srun, or use torchrun",
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=PATIENCE * timeout_seconds)

    def meet() -> Mesh:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            # gloo stays beside NCCL for the small host-side agreements of each step.
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore(f"attempt-{_attempt()}", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
        check_same({"pp, dp, tp": (pp, dp, tp, shards)} | dict(settings or {}))
        return build(pp, dp, tp, device, timeout_seconds, shards, patience=PATIENCE)

    # torch's own timeouts come first, but it has none where something takes a connection and never answers.
    return _within(2 * PATIENCE * timeout_seconds, meet)


def _within(seconds: float, meet: Callable[[], Mesh]) -> Mesh:
    """What `meet` returns or raises, or a failure after so many seconds; its thread stays behind then."""
    meeting: Future[Mesh] = Future()

    def work() -> None:
        try:
            meeting.set_result(meet())
        except BaseException as error:
            meeting.set_exception(error)

    threading.Thread(target=work, name="meeting", daemon=True).start()
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        return meeting.result(seconds)
    except TimeoutError:
        raise PeerFailure(
            "MASTER_ADDR, MASTER_PORT",
            f"timed out: the ranks did not meet at {place} within {seconds:g} s",
            hint="another program may listen there and never answer: then choose another port",
        ) from None
    except dist.DistNetworkError as error:
        if "failed to listen" not in str(error):
            raise
        why = "is in use" if "EADDRINUSE" in str(error) else "cannot be listened on"
        raise EnvironmentFailure(
            "MASTER_PORT",
            f"port {os.environ['MASTER_PORT']} {why} on this machine",
            hint="choose another for all ranks",
        ) from error


def check_same(settings: Mapping[str, object]) -> None:
    """Compares a mapping over all ranks of the default process group.

    Raises:
        UserError: on every rank, naming the first setting that differs.
    """
    if _differing([list(settings)]):
        raise UserError("boost", "ranks have other settings than each other", hint="start one version of it everywhere")
    for position in _differing(settings.values()):
        name = list(settings)[position]
        raise UserError(name, "differs between ranks", got=f"{settings[name]} on rank {dist.get_rank()}")


def _differing(values: Iterable[object]) -> list[int]:
    """Positions of values that are not the same on all ranks, by hashes of 56 bits."""
    hashes = torch.tensor([int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7]) for value in values])
    extremes = torch.stack([hashes, -hashes])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return (extremes[0] != -extremes[1]).nonzero().flatten().tolist()


def _attempt() -> int:
    """How often torchrun has restarted this rank, where that is the same number for all ranks.

    torchrun hands restarted ranks the store of the dead ones, whose addresses they would take for each other's. On one
    machine a prefix keeps them apart; on several the agents count differently, and only torchrun can give a new store.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return 0


def restarts_share_a_store() -> bool:
    """Whether this rank was started by a torchrun on several machines whose restarts cannot find each other."""
    return (
        os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def build(
    pp: int, dp: int, tp: int, device: torch.device, timeout_seconds: float, shards: int = 1, *, patience: float = 1
) -> Mesh:
    """The mesh over an initialised default process group; every group gets a timeout, which is not inherited.

    Args:
        patience: how many times as long the groups wait, all but `prompt`.
    """
    ranks_pdt = torch.arange(pp * dp * tp).view(pp, dp, tp)
    rank, patient = dist.get_rank(), patience * timeout_seconds

    def along(dimension: int, grid: torch.Tensor = ranks_pdt, timeout_seconds: float = patient) -> Group:
        mine = Group()
        # Every rank takes part in making every group, in the same order.
        for ranks in grid.movedim(dimension, -1).flatten(0, -2).tolist():
            if len(ranks) == 1:
                continue
            group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_seconds))
            if rank in ranks:
                mine = Group(ranks.index(rank), len(ranks), group)
        return mine

    world = Group(rank, dist.get_world_size(), dist.group.WORLD)
    mesh = Mesh(world, along(0), along(1), along(2), device=device)
    # NCCL's sends and receives take their group's timeout as it is set, gloo's the one that it was made with.
    prompt = along(0, timeout_seconds=timeout_seconds) if device.type == "cpu" else mesh.pp
    host = None if dist.get_backend() == "fake" else "gloo"  # fake: a rank alone, of `boost.bench.replay`
    saving = Group(rank, world.size, dist.new_group(backend=host, timeout=timedelta(seconds=patient)))
    mesh = replace(mesh, prompt=prompt, saving=saving)
    if shards == 1:
        return replace(mesh, replicas=mesh.dp)
    if shards == dp:
        return replace(mesh, shards=mesh.dp)
    divided = ranks_pdt.unflatten(1, (dp // shards, shards))
    return replace(mesh, replicas=along(1, divided), shards=along(2, divided))


def shorten_timeouts(mesh: Mesh, timeout_seconds: float, longest_wait: float = 0.0) -> None:
    """From here on a collective on any group of the mesh but `saving` fails after so many seconds.

    So does a send or a receive on `prompt`. With GPUs they stay patient: NCCL's timeout aborts the process without a
    word, and `boost.training.watch` is to come first.

    Args:
        longest_wait: seconds for which the ranks have waited for each other so far, as that watch counts them.
    """
    if mesh.device.type == "cuda":
        timeout_seconds = PATIENCE * max(timeout_seconds, longest_wait)
    for item in fields(mesh):
        group = getattr(mesh, item.name)
        if item.name != "saving" and isinstance(group, Group) and group.process_group is not None:
            group.process_group.set_timeout(timedelta(seconds=timeout_seconds))


def stop() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
