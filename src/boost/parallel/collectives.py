"""The few differentiable collectives, and the counter that measures them on the wire.

Each is an `autograd.Function` that holds no weights, so that schedules which split or repeat a backward
never repeat communication. With a group of one rank each is the identity and leaves no trace in the graph.

The bridge convention (Megatron's g and f): `sum_forward` after a row-split matrix, `sum_backward` before a
column-split one. Between the two every tensor and its gradient are complete and equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue

# torch 2.13 renames both; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the group, in a new tensor. Not differentiable."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        dist.all_reduce(total, group=group.process_group)
    return total


def broadcast(x: Tensor, root: int, group: Group) -> None:
    """Replaces x by that of one rank of the group, in place. Not differentiable."""
    if group.size > 1:
        dist.broadcast(x, group=group.process_group, group_src=root)


def start_all_reduce(x: Tensor, group: Group) -> dist.Work | None:
    """Begins to sum x over the group in place; wait on what is returned before touching x."""
    if group.size == 1:
        return None
    return dist.all_reduce(x, group=group.process_group, async_op=True)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """The tensors of all ranks stacked in rank order, [size, *x.shape]. Not differentiable."""
    if group.size == 1:
        return x.detach().unsqueeze(0)
    stacked = x.new_empty(group.size, *x.shape)
    _all_gather(stacked.view(-1), x.detach().contiguous().view(-1), group=group.process_group)
    return stacked


def start_all_gather(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    """Begins to gather the tensors of all ranks, stacked in rank order, [size, *x.shape].

    Returns:
        Where they arrive, and what to wait for.
    """
    stacked = x.new_empty(group.size, *x.shape)
    flat = x.detach().contiguous().view(-1)
    return stacked, _all_gather(stacked.view(-1), flat, group=group.process_group, async_op=True)


def start_all_to_all(x: Tensor, group: Group) -> tuple[Tensor, dist.Work]:
    """Begins to send piece i of x, cut in `size` along its first dimension, to rank i.

    Returns:
        Where the pieces meant for this rank arrive, in rank order, and what to wait for.
    """
    received = torch.empty_like(x)
    work = dist.all_to_all_single(received, x, group=group.process_group, async_op=True)
    return received, work


def reduce_scatter_rows(x: Tensor, group: Group, queue: WeightGradQueue | None = None) -> Tensor:
    """This rank's share of the rows of the sum over the group, ceil(rows / size) of them. Not differentiable.

    Weight gradients in the queue are computed while the sum is under way.
    """
    padding = -len(x) % group.size
    rows = torch.cat([x.detach(), x.new_zeros(padding, *x.shape[1:])]) if padding else x.detach().contiguous()
    share = rows.new_empty(len(rows) // group.size, *x.shape[1:])
    work = _reduce_scatter(share.view(-1), rows.view(-1), group=group.process_group, async_op=True)
    finish_behind(work, queue)
    return share


def all_gather_rows(x: Tensor, rows: int, group: Group) -> Tensor:
    """The shares of all ranks as one tensor of that many rows, padding removed. Not differentiable."""
    return all_gather(x, group).flatten(0, 1)[:rows]


def reinterpreted(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of columns of rows as another type. A copy: where they lie need not be aligned for it."""
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


def swap(x: Tensor, peer: int, group: Group) -> Tensor:
    """Sends x to one rank of the group and returns the tensor of its shape that this rank sends here."""
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops = [
        dist.P2POp(dist.isend, x.detach().contiguous(), group=group.process_group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group.process_group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def finish_behind(work: dist.Work | None, queue: WeightGradQueue | None) -> None:
    """Waits for a collective, and computes what is in the queue first."""
    if queue is not None:
        queue.flush()
    if work is not None:
        work.wait()


def any_rank(flag: bool, group: Group) -> bool:
    """Whether any rank of the group raises the flag: the same answer on all of them. Host-side, over gloo."""
    if group.size == 1:
        return flag
    raised = torch.tensor([int(flag)])
    dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=group.process_group)
    return bool(raised.item())


def same_on_all_ranks(value: int, group: Group) -> bool:
    """Whether all ranks of the group hold the same number. Host-side, over gloo."""
    if group.size == 1:
        return True
    extremes = torch.tensor([value, -value])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group.process_group)
    return bool(extremes[0] == -extremes[1])


def first_text(text: str, group: Group) -> str:
    """The first text of the group that is not empty, cut to 2,000 bytes; "" if all are. Host-side, over gloo."""
    row = torch.zeros(2000, dtype=torch.uint8)
    data = torch.tensor(list(text.encode()[: len(row)]), dtype=torch.uint8)
    row[: len(data)] = data
    texts = (bytes(other.tolist()).rstrip(b"\0").decode(errors="replace") for other in all_gather(row, group))
    return next(filter(None, texts), "")


def barrier(group: Group) -> None:
    """Returns when every rank has arrived. Host-side, over gloo."""
    any_rank(False, group)


def _gather_last(x: Tensor, group: Group) -> Tensor:
    return all_gather(x, group).movedim(0, -2).flatten(-2)


def _reduce_scatter_last(x: Tensor, group: Group, queue: WeightGradQueue | None = None) -> Tensor:
    pieces = x.detach().unflatten(-1, (group.size, -1)).movedim(-2, 0).contiguous()
    piece = pieces.new_empty(pieces.shape[1:])
    work = _reduce_scatter(piece.view(-1), pieces.view(-1), group=group.process_group, async_op=True)
    finish_behind(work, queue)
    return piece


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, queue: WeightGradQueue | None) -> Tensor:
        ctx.group, ctx.queue = group, queue
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.queue is None:
            return all_reduce(grad, ctx.group), None, None
        total = grad.clone(memory_format=torch.contiguous_format)
        finish_behind(start_all_reduce(total, ctx.group), ctx.queue)
        return total, None, None


class _SumBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, queue: WeightGradQueue | None) -> Tensor:
        ctx.group, ctx.queue = group, queue
        return _gather_last(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter_last(grad, ctx.group, ctx.queue), None, None


class _ScatterLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scatter_last(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_last(grad, ctx.group), None


class _OwnLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.chunk(group.size, -1)[group.rank]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_last(grad, ctx.group), None


class _JoinLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather_last(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size, -1)[ctx.group.rank], None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, group: Group, queue: WeightGradQueue | None) -> Tensor:
        ctx.group, ctx.queue = group, queue
        return all_gather_rows(x, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter_rows(grad, ctx.group, ctx.queue), None, None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.rows, ctx.group = len(x), group
        return reduce_scatter_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather_rows(grad, ctx.rows, ctx.group), None


def sum_forward(x: Tensor, group: Group) -> Tensor:
    """All-reduce forward, identity backward: completes partial sums whose consumer is replicated."""
    return x if group.size == 1 else _SumForward.apply(x, group)


def sum_backward(x: Tensor, group: Group, queue: WeightGradQueue | None = None) -> Tensor:
    """Identity forward, all-reduce backward: before an operation of which each rank does one shard.

    Weight gradients in the queue are computed while the all-reduce is under way.
    """
    return x if group.size == 1 else _SumBackward.apply(x, group, queue)


def sum_both(x: Tensor, group: Group) -> Tensor:
    """All-reduce forward and backward: a sum over ranks whose result each rank then uses for its own shard."""
    return x if group.size == 1 else _SumBoth.apply(x, group)


def gather_last(x: Tensor, group: Group, queue: WeightGradQueue | None = None) -> Tensor:
    """[..., n] shards to [..., n * size] on every rank; backward sums the gradients and scatters them.

    Weight gradients in the queue are computed while that sum is under way.
    """
    return x if group.size == 1 else _GatherLast.apply(x, group, queue)


def scatter_last(x: Tensor, group: Group) -> Tensor:
    """Partial sums [..., n * size] to this rank's complete shard [..., n]; backward gathers the gradients."""
    return x if group.size == 1 else _ScatterLast.apply(x, group)


def own_last(x: Tensor, group: Group) -> Tensor:
    """This rank's columns [..., n] of what is equal on all ranks, [..., n * size]; backward gathers the gradients."""
    return x if group.size == 1 else _OwnLast.apply(x, group)


def join_last(x: Tensor, group: Group) -> Tensor:
    """Columns [..., n] to [..., n * size] on every rank, whose gradient is equal on all; backward takes its own."""
    return x if group.size == 1 else _JoinLast.apply(x, group)


def gather_rows(x: Tensor, rows: int, group: Group, queue: WeightGradQueue | None = None) -> Tensor:
    """Shares of rows to all `rows` of them on every rank; backward sums the gradients and scatters them.

    Weight gradients in the queue are computed while that sum is under way.
    """
    return x if group.size == 1 else _GatherRows.apply(x, rows, group, queue)


def scatter_rows(x: Tensor, group: Group) -> Tensor:
    """Partial sums [rows, ...] to this rank's complete rows, ceil(rows / size) of them, zeros where there are fewer.

    Backward gathers the gradients.
    """
    return x if group.size == 1 else _ScatterRows.apply(x, group)


# --- The bridge of Online RMSNorm: partial products and the norm statistic in one all-reduce ---


def statistic_elements(group: Group, dtype: torch.dtype) -> int:
    """Numbers per token that the statistic adds to a bridge's payload."""
    return 2 * group.size if dtype == torch.bfloat16 else 1


def pack_statistic(norm_T: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """This rank's share of the statistic, to be summed over the group: [T, statistic_elements] of `dtype`.

    In bf16 each rank writes its norm as a high and a low part (2^-17 relative) into its own two slots and zeros
    into the others': the sum then only ever adds zeros, exact in any order, whereas summed squares would lose
    accuracy that grows with the number of ranks. fp32 and fp64 carry the square itself in one column.
    """
    if dtype != torch.bfloat16:
        return norm_T.square().unsqueeze(-1).to(dtype)
    return _own_slots(norm_T, group, dtype)


def _own_slots(value_T: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    slots = value_T.new_zeros(value_T.shape[0], 2 * group.size, dtype=dtype)
    high = value_T.to(dtype)
    slots[:, 2 * group.rank] = high
    slots[:, 2 * group.rank + 1] = (value_T - high.to(value_T.dtype)).to(dtype)
    return slots


def unpack_statistic(summed: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of squares over all ranks, [T] of `dtype` (fp32 or fp64), from the summed slots."""
    if summed.dtype != torch.bfloat16:
        return summed.squeeze(-1).to(dtype)
    return summed.to(dtype).unflatten(-1, (-1, 2)).sum(-1).square().sum(-1)


def pack_online(partial_TR: Tensor, norm_T: Tensor, group: Group) -> Tensor:
    """One contiguous payload: the product, then the statistic's slots at its tail."""
    slots = pack_statistic(norm_T.detach(), group, partial_TR.dtype)
    return torch.cat([partial_TR.detach().reshape(-1), slots.view(-1)])


def unpack_online(payload: Tensor, partial_TR: Tensor, norm_T: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """The summed product and the sum of squares from a summed payload, in the shapes of what went in."""
    split = partial_TR.numel()
    slots = payload[split:].view(norm_T.shape[0], statistic_elements(group, partial_TR.dtype))
    return payload[:split].view_as(partial_TR), unpack_statistic(slots, norm_T.dtype)


class _OnlineBridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_TR: Tensor, norm_T: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(norm_T)
        payload = pack_online(partial_TR, norm_T, group)
        dist.all_reduce(payload, group=group.process_group)
        return unpack_online(payload, partial_TR, norm_T, group)

    @staticmethod
    def backward(ctx: Any, grad_TR: Tensor, grad_T: Tensor) -> tuple[Tensor, Tensor, None]:
        # Both gradients are complete on every rank: `sum_backward` stands between them and the next shard.
        (norm_T,) = ctx.saved_tensors
        return grad_TR, 2 * norm_T * grad_T, None


def online_bridge(partial_TR: Tensor, norm_T: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """One all-reduce of partial products and of the statistic of the RMSNorm before them.

    Args:
        partial_TR: this rank's partial sum x_i A_i, [T, R].
        norm_T: |x_i| of this rank's shard of each token, [T], fp32 (fp64 where the model is fp64).

    Returns:
        The complete sum [T, R] and S = sum_i |x_i|^2, [T], in norm_T's dtype. Backward needs no collective.
    """
    if group.size == 1:
        return partial_TR, norm_T.square()
    return _OnlineBridge.apply(partial_TR, norm_T, group)


class _SpreadOnline(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TR: Tensor, inverse_T: Tensor, group: Group, queue: WeightGradQueue | None
    ) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.queue = group, queue
        return h_TR.view_as(h_TR), inverse_T.view_as(inverse_T)

    @staticmethod
    def backward(ctx: Any, grad_TR: Tensor, grad_T: Tensor) -> tuple[Tensor, Tensor, None, None]:
        narrow = grad_TR.dtype == torch.bfloat16
        slots = _own_slots(grad_T, ctx.group, grad_TR.dtype) if narrow else grad_T.unsqueeze(-1).to(grad_TR.dtype)
        payload = torch.cat([grad_TR.reshape(-1), slots.view(-1)])
        finish_behind(start_all_reduce(payload, ctx.group), ctx.queue)
        split = grad_TR.numel()
        total_T = payload[split:].view_as(slots).to(grad_T.dtype).sum(-1)
        return payload[:split].view_as(grad_TR), total_T, None, None


def spread_online(
    h_TR: Tensor, inverse_T: Tensor, group: Group, queue: WeightGradQueue | None = None
) -> tuple[Tensor, Tensor]:
    """`sum_backward` of a latent and of the 1/rms [T] that each rank's own shard needs too, in one all-reduce.

    As the statistic in `online_bridge`, the gradient of 1/rms is exact to 2^-17 in bf16.
    """
    return (h_TR, inverse_T) if group.size == 1 else _SpreadOnline.apply(h_TR, inverse_T, group, queue)


# --- Counting ---


@dataclass(frozen=True)
class Collective:
    """One collective seen on the wire: its name, and the size of the tensor it reduces, gathers, scatters or swaps."""

    name: str
    elements: int
    bytes: int

    @property
    def all_reduced_elements(self) -> float:
        """In the unit of an all-reduce: a reduce-scatter, an all-gather or an all-to-all moves half of it."""
        return self.elements if self.name == "all_reduce" else self.elements / 2

    @property
    def all_reduced_bytes(self) -> float:
        """In the same unit."""
        return self.bytes if self.name == "all_reduce" else self.bytes / 2


def wraps_local_tensors(types: Any) -> bool:
    """Whether a dispatched operation is on DTensors: it comes again as operations on their local tensors."""
    return any(t.__name__ == "DTensor" for t in types)


class _Counter(TorchDispatchMode):
    """Records every c10d call that passes through the dispatcher, whoever makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if wraps_local_tensors(types):
            return NotImplemented
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._record(name.split("::")[1].split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: Any) -> None:
        if "allreduce" in name or "all_reduce" in name:
            self._add("all_reduce", args[0])
        elif "allgather" in name or "all_gather" in name:
            self._add("all_gather", args[0])  # the output
        elif "reduce_scatter" in name:
            self._add("reduce_scatter", args[1])  # the input
        elif "alltoall" in name or "all_to_all" in name:
            self._add("all_to_all", args[0])  # the output, as large as the input
        elif name not in ("wait_tensor", "barrier"):
            self._add(name, args[0])

    def _add(self, name: str, tensors: Any) -> None:
        flat = [tensors] if isinstance(tensors, Tensor) else tree_leaves(tensors)
        sizes = [(t.numel(), t.numel() * t.element_size()) for t in flat if isinstance(t, Tensor)]
        self.seen.append(Collective(name, sum(n for n, _ in sizes), sum(b for _, b in sizes)))


@contextmanager
def count_collectives() -> Iterator[list[Collective]]:
    """Yields a list that fills with every collective run inside the block, forward or backward."""
    with _Counter() as counter:
        yield counter.seen
