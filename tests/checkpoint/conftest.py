"""A small training state, ways to cut it up, and ranks simulated by threads that meet in a real barrier."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from boost.checkpoint.slices import Slice
from boost.checkpoint.store import save

Tensors = dict[tuple[str, str], torch.Tensor]
STATE = {"data": {"position": 640}, "schedule": [1, 2.5], "note": "größer"}


def make_tensors(seed: int = 0) -> Tensors:
    """Canonical tensors by (kind, name): odd sizes, all the dtypes that training uses, a scalar, an empty one."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    return {
        ("parameter", "embedding.weight"): draw(7, 6),
        ("exp_avg", "embedding.weight"): draw(7, 6),
        ("exp_avg_sq", "embedding.weight"): draw(7, 6, dtype=torch.float64),
        ("parameter", "blocks.0.attention.q.down.weight"): draw(3, 6),
        ("parameter", "blocks.0.attention.norm.weight"): draw(6, dtype=torch.bfloat16),
        ("parameter", "blocks.0.crossing"): draw(2, 3, 5),
        ("step", "scalar"): torch.tensor(17 + seed),
        ("parameter", "nothing"): torch.zeros(0, 4),
        ("mask", "flags"): draw(5) > 0,
    }


def cut(name: str, kind: str, tensor: torch.Tensor, grid: Sequence[int]) -> list[Slice]:
    """Pieces of one tensor on a grid with so many parts per dimension, as `torch.chunk` cuts: the last may be empty."""
    axes = []
    for size, parts in itertools.zip_longest(tensor.shape, list(grid)[: tensor.dim()], fillvalue=1):
        width = math.ceil(size / parts)
        axes.append([(min(i * width, size), min((i + 1) * width, size)) for i in range(parts)])
    return [
        Slice(name, kind, tuple(tensor.shape), tuple(a for a, _ in box), tensor[tuple(slice(a, b) for a, b in box)])
        for box in itertools.product(*axes)
    ]


def shards(tensors: Tensors, grid: Sequence[int], world: int) -> list[list[Slice]]:
    """All pieces, dealt to the ranks."""
    ranks: list[list[Slice]] = [[] for _ in range(world)]
    for (kind, name), tensor in tensors.items():
        for index, piece in enumerate(cut(name, kind, tensor, grid)):
            ranks[index % world].append(piece)
    return ranks


def run_ranks(world: int, work: Callable[[int, Callable[[], None]], Any]) -> list[Any]:
    """Runs `work(rank, barrier)` on threads; its results, or the exceptions it raised."""
    meeting = threading.Barrier(world)
    results: list[Any] = [None] * world

    def barrier() -> None:
        meeting.wait(20)

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, barrier)
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, Exception):
                meeting.abort()  # a killed process never comes to the meeting

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def save_all(
    root: Path, step: int, tensors: Tensors, grid: Sequence[int] = (1,), world: int = 1, **more: Any
) -> list[Any]:
    """Saves from `world` ranks; what each of them returned or raised."""
    pieces = shards(tensors, grid, world)
    more.setdefault("files", {"config.yaml": b"model: {}\n"})

    def work(rank: int, barrier: Callable[[], None]) -> Path:
        return save(root, step, pieces[rank], STATE, rank=rank, world=world, barrier=barrier, **more)

    return run_ranks(world, work)


def empty_like(tensors: Tensors) -> Tensors:
    return {key: torch.full_like(tensor, True if tensor.dtype == torch.bool else 99) for key, tensor in tensors.items()}


class Kit:
    """What tests share, handed over by the fixture so that nothing depends on how tests are imported."""

    STATE = STATE
    make_tensors = staticmethod(make_tensors)
    cut = staticmethod(cut)
    shards = staticmethod(shards)
    run_ranks = staticmethod(run_ranks)
    save_all = staticmethod(save_all)
    empty_like = staticmethod(empty_like)


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"
