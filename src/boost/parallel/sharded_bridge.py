"""The sequence-sharded bridge: latents stay sharded over tokens until B reads them.

An all-reduce is a reduce-scatter and an all-gather. This bridge does its work between the two, on T / tp tokens: the
division by rms and the activation. Backward mirrors it: the gradient of h is reduce-scattered, that of the sum
all-gathered. The volume is that of the all-reduce, and z takes 1 / tp of the memory.

Each token's statistic rides in extra columns of its row. T that tp does not divide is padded with rows of zeros.

Shapes: T tokens, t = ceil(T / tp) of them on this rank, R the ranks of a group side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from boost.parallel.bridge import Activation, Bridge, Latent, Partial
from boost.parallel.collectives import (
    all_gather_rows,
    gather_rows,
    pack_statistic,
    reduce_scatter_rows,
    reinterpreted,
    scatter_rows,
    unpack_statistic,
)
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue


class _SumToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product_TR: Tensor, norm_T: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.shape = group, product_TR.shape
        ctx.save_for_backward(norm_T)
        statistic = pack_statistic(norm_T, group, product_TR.dtype)
        rows = reduce_scatter_rows(torch.cat([product_TR, statistic], 1), group)
        total_tR, statistic = rows.tensor_split([product_TR.shape[1]], dim=1)
        return total_tR, unpack_statistic(statistic, norm_T.dtype)

    @staticmethod
    def backward(ctx: Any, grad_tR: Tensor, grad_t: Tensor) -> tuple[Tensor, Tensor, None]:
        (norm_T,) = ctx.saved_tensors
        tokens, width = ctx.shape
        # Nothing is summed here, so an fp32 number travels unchanged as the bytes of two bf16 ones.
        columns = reinterpreted(grad_t.unsqueeze(-1), grad_tR.dtype)
        rows = all_gather_rows(torch.cat([grad_tR, columns], 1), tokens, ctx.group)
        grad_T = reinterpreted(rows[:, width:], norm_T.dtype).squeeze(-1)
        return rows[:, :width].contiguous(), 2 * norm_T * grad_T, None


class ShardedBridge(Bridge):
    """Calling it: reduce-scatter over tokens; z is [t, R]. `spread`: all-gather of act(z)."""

    def sum(self, partial: Partial) -> tuple[Tensor, Tensor | None]:
        if partial.norm_T is None:
            return scatter_rows(partial.product_TR, self.tp), None
        return _SumToShards.apply(partial.product_TR, partial.norm_T, self.tp)

    def spread(
        self, z_tR: Tensor, act: Activation, tokens: int, queue: WeightGradQueue | None, *, thrifty: bool
    ) -> Latent:
        h_TR = gather_rows(act(z_tR), tokens, self.tp, queue)
        if thrifty:
            return Latent(h_TR, z_tR, lambda z: all_gather_rows(act(z), tokens, self.tp))
        return Latent(h_TR, h_TR, lambda h: h)
