"""Ranks to groups: the (pp, dp, tp) grid, tp innermost so that its ranks are neighbours.

Every function that communicates takes the `Group` it acts on as an argument; there is no global group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from boost.errors import UserError


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
    """

    world: Group = field(default_factory=Group)
    pp: Group = field(default_factory=Group)
    dp: Group = field(default_factory=Group)
    tp: Group = field(default_factory=Group)
    shards: Group = field(default_factory=Group)
    replicas: Group = field(default_factory=Group)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def choose_device(device: str) -> torch.device:
    """`auto`, `cpu` or `cuda` to the device of this process (one GPU per local rank)."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device", "no CUDA device is visible", expected="cpu or auto", got="cuda")
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


def start(pp: int, dp: int, tp: int, device: torch.device, timeout_seconds: float, shards: int = 1) -> Mesh:
    """Joins the process group that the environment describes (RANK, WORLD_SIZE, ...) and builds the mesh.

    Args:
        shards: how many neighbouring dp ranks share what ZeRO divides.

    Raises:
        UserError: the number of processes is not pp * dp * tp.
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
    dist.init_process_group(
        # gloo stays beside NCCL for the small host-side agreements of each step.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
    )
    return build(pp, dp, tp, device, timeout_seconds, shards)


def build(pp: int, dp: int, tp: int, device: torch.device, timeout_seconds: float, shards: int = 1) -> Mesh:
    """The mesh over an initialised default process group; every group gets the timeout, which is not inherited."""
    ranks_pdt = torch.arange(pp * dp * tp).view(pp, dp, tp)
    rank = dist.get_rank()

    def along(dimension: int, grid: torch.Tensor = ranks_pdt) -> Group:
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
    if shards == 1:
        return replace(mesh, replicas=mesh.dp)
    if shards == dp:
        return replace(mesh, shards=mesh.dp)
    divided = ranks_pdt.unflatten(1, (dp // shards, shards))
    return replace(mesh, replicas=along(1, divided), shards=along(2, divided))


def stop() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
