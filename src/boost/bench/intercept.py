"""Every collective of `boost.parallel` passes one place: to be timed, slowed down, or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from boost.parallel import collectives


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...


@dataclass(frozen=True)
class Call:
    """One collective that is about to run.

    Attributes:
        name: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        size: bytes of the whole tensor, which an all-gather makes and the others take.
        ranks: how many take part.
        start: begins it; its result is there after what that returns has been waited for.
        imitate: gives the result its shape, and values of this rank alone.
    """

    name: str
    size: int
    ranks: int
    start: Callable[[], Work]
    imitate: Callable[[], object]


@contextmanager
def intercepted(begin: Callable[[Call], Work]) -> Iterator[None]:
    """Inside the block collectives go through `begin`; torch.compile stops at each. Blocks may be nested."""
    plain_all_reduce, plain_all_to_all = dist.all_reduce, dist.all_to_all_single
    plain_all_gather, plain_reduce_scatter = collectives._all_gather, collectives._reduce_scatter

    def carry(call: Call, async_op: bool) -> Work | None:
        work = begin(call)
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work | None:
        def start() -> Any:
            return plain_all_reduce(tensor, op=op, group=group, async_op=True)

        return carry(Call("all_reduce", tensor.nbytes, group.size(), start, lambda: None), async_op)

    def all_to_all(output: Tensor, tensor: Tensor, *, group: Any = None, async_op: bool = False) -> Work | None:
        def start() -> Any:
            return plain_all_to_all(output, tensor, group=group, async_op=True)

        return carry(Call("all_to_all", tensor.nbytes, group.size(), start, lambda: output.copy_(tensor)), async_op)

    def all_gather(output: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False) -> Work | None:
        def start() -> Any:
            return plain_all_gather(output, tensor, group=group, async_op=True)

        shares = output.view(group.size(), -1)
        imitate = lambda: shares.copy_(tensor.view(1, -1))  # noqa: E731
        return carry(Call("all_gather", output.nbytes, group.size(), start, imitate), async_op)

    def reduce_scatter(
        output: Tensor, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Work | None:
        def start() -> Any:
            return plain_reduce_scatter(output, tensor, op=op, group=group, async_op=True)

        share = tensor.view(group.size(), -1)[0].view_as(output)
        return carry(Call("reduce_scatter", tensor.nbytes, group.size(), start, lambda: output.copy_(share)), async_op)

    places: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = [
        (dist, "all_reduce", all_reduce, plain_all_reduce),
        (dist, "all_to_all_single", all_to_all, plain_all_to_all),
        (collectives, "_all_gather", all_gather, plain_all_gather),
        (collectives, "_reduce_scatter", reduce_scatter, plain_reduce_scatter),
    ]
    for module, name, function, _ in places:
        setattr(module, name, torch.compiler.disable(function))
    try:
        yield
    finally:
        for module, name, _, plain in places:
            setattr(module, name, plain)
