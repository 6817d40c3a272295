"""Two halves of a batch take turns: while a bridge of one half is under way, the other half computes.

Forward, stage by stage: half 0 computes and starts its bridge, half 1 computes meanwhile. Backward the same in
reverse, with the sum of a latent's gradient in the bridge's place. Each stage of each half is an autograd graph of
its own, from leaves to partial products, so that the order of computation and communication is written down here and
not left to the engine. Weight gradients are put off until the sum that a stage's backward starts is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from boost.parallel.bridge import Bridge, Crossed, Partial, Pending
from boost.parallel.collectives import start_all_reduce
from boost.parallel.overlap import WeightGradQueue

# (residual stream, latents, half) to (residual stream, what the next bridges carry).
Stage = Callable[[Tensor, Sequence[Tensor], int], tuple[Tensor, list[Partial]]]


class _Ran(NamedTuple):
    """One stage of one half: what went in and what came out."""

    half: int
    x_in: Tensor
    latents: list[Crossed]
    x_out: Tensor


class _Interleave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_Td: Tensor,
        sizes: list[int],
        stages: Sequence[Stage],
        bridge: Bridge,
        queue: WeightGradQueue | None,
    ) -> Tensor:
        ctx.bridge, ctx.sizes, ctx.queue, ctx.ran = bridge, sizes, queue, []
        x = list(x_Td.detach().split(sizes))
        pending: list[list[Pending]] = [[], []]
        with torch.enable_grad():
            for stage in stages:
                for half in (0, 1):
                    latents = [bridge.finish(under_way) for under_way in pending[half]]
                    x_in = x[half].detach().requires_grad_()
                    x_out, partials = stage(x_in, [latent.z_TR for latent in latents], half)
                    pending[half] = [bridge.start(partial) for partial in partials]
                    ctx.ran.append(_Ran(half, x_in, latents, x_out))
                    x[half] = x_out
        return torch.cat([part.detach() for part in x])

    @staticmethod
    def backward(ctx: Any, grad_Td: Tensor) -> Any:
        grad_x = list(grad_Td.split(ctx.sizes))
        sums: list[list[tuple[Crossed, dist.Work | None]]] = [[], []]
        while ctx.ran:
            half, x_in, latents, x_out = ctx.ran.pop()
            reached = [(x_out, grad_x[half])]
            for latent, work in sums[half]:
                if work is not None:
                    work.wait()
                assert latent.z_TR.grad is not None
                reached += ctx.bridge.backward(latent, latent.z_TR.grad)
            torch.autograd.backward([tensor for tensor, _ in reached], [grad for _, grad in reached])
            assert x_in.grad is not None
            grad_x[half] = x_in.grad
            # Partial on each rank so far: completed while weight gradients and the other half are computed.
            sums[half] = [(latent, start_all_reduce(_gradient(latent), ctx.bridge.tp)) for latent in latents]
            if ctx.queue is not None:
                ctx.queue.flush()
        return torch.cat(grad_x), None, None, None, None


def _gradient(latent: Crossed) -> Tensor:
    assert latent.z_TR.grad is not None
    latent.z_TR.grad = latent.z_TR.grad.contiguous()
    return latent.z_TR.grad


def interleave(
    x_Td: Tensor, sizes: list[int], stages: Sequence[Stage], bridge: Bridge, queue: WeightGradQueue | None
) -> Tensor:
    """Runs all stages over two halves of x and returns the whole result, [T, d].

    Args:
        sizes: tokens of each half; they must not depend on each other.
        stages: each on local shards, without any collective in it, backward included.
        bridge: joins one stage to the next.
        queue: that the stages put weight gradients into, if they do.
    """
    return _Interleave.apply(x_Td, sizes, stages, bridge, queue)
