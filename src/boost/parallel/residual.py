"""How Megatron holds the residual stream between its pairs of linears: whole on every rank, or sharded over tokens.

Whole: the input of column-parallel linears has its gradient all-reduced, the output of row-parallel ones is
all-reduced. Sharded (sequence parallelism) each all-reduce is cut in two: a reduce-scatter over tokens after the
row-parallel linear, an all-gather before the next column-parallel one, backward in mirror image. Norms and residual
adds between the two work on T / tp tokens. What a column-parallel linear keeps for its weight gradient is the shard,
too, so backward gathers it once more. Source: Korthikanti et al., arXiv 2205.05198.

Shapes: T tokens, t = ceil(T / tp) of them on this rank where the stream is sharded, D hidden. T that tp does not
divide is padded with rows that no one reads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boost.parallel.collectives import gather_rows, scatter_rows, start_all_gather, sum_backward, sum_forward
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue


class Stream:
    """The residual stream whole on every rank, [T, D]."""

    def __init__(self, tp: Group) -> None:
        self.tp = tp

    def replicated(self, parameter: Tensor) -> Tensor:
        """A parameter that all ranks hold and apply to the stream."""
        return parameter

    def enter(self, h: Tensor, tokens: int, queue: WeightGradQueue | None = None) -> Tensor:
        """From the stream to the input of column-parallel linears, [T, D].

        Weight gradients in the queue are computed while its gradient is summed.
        """
        return sum_backward(h, self.tp, queue)

    def leave(self, partial_TD: Tensor) -> Tensor:
        """From the partial sums of a row-parallel linear, or of a sharded table, to the stream."""
        return sum_forward(partial_TD, self.tp)


class TokenShardedStream(Stream):
    """The residual stream sharded over tokens, [t, D]."""

    def replicated(self, parameter: Tensor) -> Tensor:
        # Each rank's gradient is that of its own tokens.
        return sum_backward(parameter, self.tp)

    def enter(self, h: Tensor, tokens: int, queue: WeightGradQueue | None = None) -> Tensor:
        return gather_rows(h, tokens, self.tp, queue)

    def leave(self, partial_TD: Tensor) -> Tensor:
        return scatter_rows(partial_TD, self.tp)


def make_stream(sequence_parallel: bool, tp: Group) -> Stream:
    """With one rank there is nothing to shard."""
    return TokenShardedStream(tp) if sequence_parallel and tp.size > 1 else Stream(tp)


class Regather:
    """Gathers rows again in backward, for operations that keep this rank's share instead of all of them.

    Args:
        share: this rank's rows.
        rows: how many there are on all ranks together.
        readers: how many operations will ask for the whole, before it is dropped.
    """

    def __init__(self, share: Tensor, rows: int, group: Group, readers: int) -> None:
        self.share, self.rows, self.group, self.readers = share.detach(), rows, group, readers
        self._asked = 0
        self._under_way: tuple[Tensor, dist.Work] | None = None

    def start(self) -> None:
        """Begins to gather, if that has not begun."""
        if self._under_way is None:
            self._under_way = start_all_gather(self.share, self.group)

    def whole(self, share: Tensor) -> Tensor:
        """All rows."""
        self.start()
        assert self._under_way is not None
        stacked, work = self._under_way
        work.wait()
        self._asked += 1
        if self._asked % self.readers == 0:
            self._under_way = None
        return stacked.flatten(0, 1)[: self.rows]


class _StartInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, regather: Regather) -> Tensor:
        ctx.regather = regather
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.regather.start()
        return grad, None


def start_in_backward(y: Tensor, regather: Regather) -> Tensor:
    """y; when its gradient is known, the gathering begins, beside whatever backward computes until it needs it."""
    return _StartInBackward.apply(y, regather)
