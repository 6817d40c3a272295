"""Ranks to groups: the (pp, dp, tp) grid, tp innermost so that its ranks are neighbours.

Every function that communicates takes the `Group` it acts on as an argument; there is no global group.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
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
    """This process's groups along every dimension, and the device it computes on."""

    world: Group = field(default_factory=Group)
    pp: Group = field(default_factory=Group)
    dp: Group = field(default_factory=Group)
    tp: Group = field(default_factory=Group)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def choose_device(device: str) -> torch.device:
    """`auto`, `cpu` or `cuda` to the device of this process (one GPU per local rank)."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device", "no CUDA device is visible", expected="cpu or auto", got="cuda")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def start(pp: int, dp: int, tp: int, device: torch.device, timeout_seconds: float) -> Mesh:
    """Joins the process group that the environment describes (RANK, WORLD_SIZE, ...) and builds the mesh.

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
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        # gloo stays beside NCCL for the small host-side agreements of each step.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
    )
    return build(pp, dp, tp, device)


def build(pp: int, dp: int, tp: int, device: torch.device) -> Mesh:
    """The mesh over an already initialised default process group."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))

    def along(name: str) -> Group:
        group = grid.get_group(name)
        return Group(dist.get_rank(group), dist.get_world_size(group), group)

    world = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    return Mesh(world, along("pp"), along("dp"), along("tp"), device)


def stop() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
