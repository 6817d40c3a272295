"""Runs a function on several local processes joined by gloo, from an ordinary test."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from boost.parallel.mesh import Group, Mesh, build

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.fsdp", "boost.training.loop", "boost.parallel.pipeline"])


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    layout: tuple[int, int, int] | None = None,
    shards: int = 1,
) -> list:
    """function(mesh, *args) on `world` processes; returns what each returned, in rank order.

    Args:
        layout: (pp, dp, tp); default all ranks on tp.
        shards: how many dp ranks ZeRO divides over.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    pp, dp, tp = layout or (1, 1, world)
    with tempfile.TemporaryDirectory() as directory:
        results = _context.SimpleQueue()
        store = f"file://{Path(directory) / 'store'}"
        processes = [
            _context.Process(
                target=_rank, args=(rank, world, (pp, dp, tp), shards, store, results, function, args), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        outcomes: dict[int, Any] = {}
        failures: dict[int, str] = {}
        try:
            for _ in processes:
                while results.empty():
                    died = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
                    assert not died or not results.empty(), f"ranks {died} died without a word"
                    time.sleep(0.01)
                rank, ok, value = results.get()
                (outcomes if ok else failures)[rank] = pickle.loads(value)
                if failures:
                    break
            if not failures:
                for process in processes:
                    process.join(30)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        if failures:
            rank, text = next(iter(failures.items()))
            raise AssertionError(f"rank {rank} of {world}:\n{text}")
        return [outcomes[rank] for rank in range(world)]


def _rank(
    rank: int,
    world: int,
    layout: tuple[int, int, int],
    shards: int,
    store: str,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        mesh = build(*layout, torch.device("cpu"), timeout_seconds=60, shards=shards)
        value = function(mesh, *args)
        # Bytes, because torch would send a tensor as a handle to memory that ends with this process.
        results.put((rank, True, pickle.dumps(value)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, pickle.dumps(traceback.format_exc())))
        os._exit(1)


def single_mesh() -> Mesh:
    """The mesh of one process."""
    return Mesh()


def gather_whole(share: torch.Tensor, split: int | None, size: int, group: Group) -> torch.Tensor:
    """A canonical tensor from every rank's share of it, padding already removed, on every rank."""
    if split is None or group.size == 1:
        return share.detach().clone()
    shares: list[Any] = [None] * group.size
    dist.all_gather_object(shares, share.detach().contiguous().numpy(), group=group.process_group)
    whole = torch.cat([torch.from_numpy(s) for s in shares], dim=split)
    assert whole.shape[split] == size, (whole.shape, split, size)
    return whole
