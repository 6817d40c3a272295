"""The GEMMs of a block, each one Function that saves the master weight and its input (or what that comes from).

Weights are held in fp32 beside bf16 activations; the bf16 copy is made where it is used and never saved. With a
`WeightGradQueue` the weight's gradient is put off until an all-reduce can hide it.

Shapes: T tokens, i / o a shard's input and output width, R the ranks of a group side by side, G linears in a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from boost.kernels.norm import statistic_dtype
from boost.kernels.replay import output_is_unused

if TYPE_CHECKING:
    from boost.parallel.overlap import WeightGradQueue

Again = Callable[..., Tensor]
# Devices whose batched GEMMs are slower than as many single ones.
SINGLE_GEMMS = frozenset({"cpu"})


def _keep(ctx: Any, queue: WeightGradQueue | None, *parameters: Tensor) -> None:
    """Remembers where put-off gradients belong: under recomputation a saved parameter comes back as another tensor."""
    ctx.queue, ctx.parameters = queue, parameters if queue is not None else ()


def _now_or_later(ctx: Any, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor | None]:
    """The parameters' gradients, for autograd to accumulate; or none, and the queue accumulates them later."""
    if ctx.queue is None:
        return compute()
    ctx.queue.put(ctx.parameters, compute)
    return [None] * len(ctx.parameters)


class _MatMul(torch.autograd.Function):
    """x W, or x W^T where the weight is held as [o, i]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, out_first: bool, queue: WeightGradQueue | None, again: Again, *kept: Tensor
    ) -> Tensor:
        # A frozen weight has no gradient that would need them.
        ctx.save_for_backward(weight, *(kept if weight.requires_grad else ()))
        ctx.out_first, ctx.again = out_first, again
        _keep(ctx, queue, weight)
        w = weight.to(x.dtype)
        if output_is_unused():
            return x.new_empty(x.shape[0], weight.shape[0 if out_first else 1])
        return x @ (w.t() if out_first else w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, *kept = ctx.saved_tensors
        w = weight.to(grad.dtype)

        def grad_weight() -> list[Tensor]:
            x = ctx.again(*kept)
            return [(grad.t() @ x if ctx.out_first else x.t() @ grad).to(weight.dtype)]

        grad_x = grad @ (w if ctx.out_first else w.t()) if ctx.needs_input_grad[0] else None
        grad_w = _now_or_later(ctx, grad_weight) if ctx.needs_input_grad[1] else [None]
        return grad_x, *grad_w, None, None, None, *(None for _ in ctx.needs_input_grad[5:])


def identity(x: Tensor) -> Tensor:
    return x


def matmul(
    x_Ti: Tensor,
    weight_io: Tensor,
    queue: WeightGradQueue | None = None,
    *,
    kept: Sequence[Tensor] = (),
    again: Again = identity,
) -> Tensor:
    """x W, [T, i] times [i, o], in x's dtype. The last operation of a chunk (`boost.parallel.recompute`).

    With `again`, saves `kept` instead of x = again(*kept): what the operation before saves anyway.
    """
    return _matmul(x_Ti, weight_io, False, queue, kept, again)


def linear(
    x_Ti: Tensor,
    weight_oi: Tensor,
    queue: WeightGradQueue | None = None,
    *,
    kept: Sequence[Tensor] = (),
    again: Again = identity,
) -> Tensor:
    """x W^T, [T, i] times [o, i] transposed, in x's dtype; as `matmul` in all else."""
    return _matmul(x_Ti, weight_oi, True, queue, kept, again)


def _matmul(
    x: Tensor, weight: Tensor, out_first: bool, queue: WeightGradQueue | None, kept: Sequence[Tensor], again: Again
) -> Tensor:
    # Detached: what is kept only stands for x.
    return _MatMul.apply(x, weight, out_first, queue, again, *(tensor.detach() for tensor in kept or (x,)))


class _GroupedUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        kept: Tensor,
        weight: Tensor,
        again: Callable[[Tensor], Tensor],
        queue: WeightGradQueue | None,
        whole: bool,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(kept, weight)
        ctx.again, ctx.whole = again, whole
        _keep(ctx, queue, weight)
        y_GTo = _products(h.transpose(0, 1), weight.to(h.dtype).permute(1, 2, 0))
        return (_joined(y_GTo, 0),) if whole else tuple(y_GTo)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kept_TGr, weight = ctx.saved_tensors
        grad_GTo: Sequence[Tensor] | Tensor = grads
        if ctx.whole:
            (grad_GTo,) = grads
        elif weight.device.type not in SINGLE_GEMMS:
            grad_GTo = _joined(grads, 0)
        grad_h = _joined(_products(grad_GTo, weight.to(grads[0].dtype).transpose(0, 1)), 1)

        def grad_weight() -> list[Tensor]:
            h_GTr = ctx.again(kept_TGr).transpose(0, 1)
            grad_GoT = grad_GTo.mT if isinstance(grad_GTo, Tensor) else [grad_To.t() for grad_To in grad_GTo]
            return [_joined(_products(grad_GoT, h_GTr), 1).to(weight.dtype)]

        return grad_h, None, *_now_or_later(ctx, grad_weight), None, None, None


def _products(left_Gmk: Tensor | Sequence[Tensor], right_Gkn: Tensor) -> Tensor | Sequence[Tensor]:
    """G products [m, n]: of a tensor as one batched GEMM where that is the faster way."""
    if isinstance(left_Gmk, Tensor) and left_Gmk.device.type not in SINGLE_GEMMS and len(left_Gmk) > 1:
        return torch.bmm(left_Gmk, right_Gkn)
    return [left @ right for left, right in zip(left_Gmk, right_Gkn, strict=True)]


def _joined(tensors: Tensor | Sequence[Tensor], dim: int) -> Tensor:
    """G tensors [m, n], or one [G, m, n], as one with G at `dim`; copied only if there are several."""
    if isinstance(tensors, Tensor):
        return tensors.movedim(0, dim)
    return tensors[0].unsqueeze(dim) if len(tensors) == 1 else torch.stack(list(tensors), dim)


def grouped_up(
    h_TGr: Tensor,
    kept_TGr: Tensor,
    weight_oGr: Tensor,
    again: Callable[[Tensor], Tensor],
    queue: WeightGradQueue | None = None,
    *,
    whole: bool = False,
) -> tuple[Tensor, ...]:
    """G products h_g B_g at once: latents [T, G, r] and weights [o, G, r] to G outputs [T, o].

    Saves `kept` instead of h = again(kept): z, say, which an activation saves anyway. With `whole` the outputs are one
    tensor [G, T, o].
    """
    return _GroupedUp.apply(h_TGr, kept_TGr.detach(), weight_oGr, again, queue, whole)


class _AddProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        z: Tensor,
        weight: Tensor,
        widths: Sequence[int],
        scale: float,
        queue: WeightGradQueue | None,
    ) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(z, weight)
        ctx.widths, ctx.scale = widths, scale
        _keep(ctx, queue, weight)
        weights = weight.to(z.dtype).split(widths)
        for y_To, z_Tr, w_or in zip(y.split(widths, -1), z.chunk(len(widths), -1), weights, strict=True):
            y_To.addmm_(z_Tr, w_or.t(), alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        z, weight = ctx.saved_tensors
        grads = grad.split(ctx.widths, -1)
        weights = weight.to(grad.dtype).split(ctx.widths)
        grad_z = ctx.scale * torch.cat([g_To @ w_or for g_To, w_or in zip(grads, weights, strict=True)], -1)

        def grad_weight() -> list[Tensor]:
            latents = z.chunk(len(ctx.widths), -1)
            products = [g_To.t() @ z_Tr for g_To, z_Tr in zip(grads, latents, strict=True)]
            return [(ctx.scale * torch.cat(products)).to(weight.dtype)]

        return grad, grad_z, *_now_or_later(ctx, grad_weight), None, None, None


def add_products(
    y_To: Tensor,
    z_TR: Tensor,
    weight_or: Tensor,
    widths: Sequence[int],
    scale: float,
    queue: WeightGradQueue | None = None,
) -> Tensor:
    """Adds scale z_g B_g^T to y_g, in place, for linears g that lie side by side.

    Args:
        y_To: [T, o], o the sum of `widths`; an output that no operation has saved.
        z_TR: [T, G r].
        weight_or: every B_g [widths[g], r], one below the other.
    """
    return _AddProducts.apply(y_To, z_TR, weight_or, widths, scale, queue)


class _SparseMatMul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, index: Tensor, shape: tuple[int, int, int], queue: WeightGradQueue | None
    ) -> Tensor:
        ctx.save_for_backward(x, values, index)
        ctx.shape = shape
        _keep(ctx, queue, values)
        return torch.bmm(x.transpose(0, 1), _dense(values, index, shape, x.dtype).transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad_Gto: Tensor) -> Any:
        x_TGi, values, index = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.bmm(grad_Gto, _dense(values, index, ctx.shape, grad_Gto.dtype)).transpose(0, 1)

        def grad_values() -> list[Tensor]:
            grad_Goi = torch.bmm(grad_Gto.transpose(1, 2), x_TGi.transpose(0, 1))
            return [grad_Goi.view(-1)[index.long()].to(values.dtype)]

        return grad_x, *_now_or_later(ctx, grad_values), None, None, None


def _dense(values: Tensor, index: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    flat = torch.zeros(math.prod(shape), dtype=dtype, device=values.device)
    flat[index.long()] = values.to(dtype)
    return flat.view(shape)


def sparse_matmul(
    x_TGi: Tensor,
    values: Tensor,
    index: Tensor,
    shape: tuple[int, int, int],
    queue: WeightGradQueue | None = None,
) -> Tensor:
    """x S^T for G sparse matrices at once: [T, G, i] to [G, T, o].

    S is made dense where it is used, once forward and once backward, and never saved: at the densities of SLTrain a
    dense GEMM is faster than a sparse one.

    Args:
        values: the entries that are not zero, [n].
        index: their distinct places in [G, o, i], row by row, int32 or int64 [n].
        shape: (G, o, i).
    """
    return _SparseMatMul.apply(x_TGi, values, index, shape, queue)


class _NormDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, weight: Tensor, queue: WeightGradQueue | None
    ) -> tuple[Tensor, Tensor]:
        norm_T = torch.linalg.vector_norm(x, dim=-1, dtype=statistic_dtype(x.dtype))
        ctx.save_for_backward(x, norm_T, gain, weight)
        _keep(ctx, queue, gain, weight)
        if output_is_unused():
            return x.new_empty(x.shape[0], weight.shape[1]), norm_T
        return x @ (gain.unsqueeze(-1) * weight).to(x.dtype), norm_T

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_norm: Tensor) -> Any:
        x, norm_T, gain, weight = ctx.saved_tensors
        folded = (gain.unsqueeze(-1) * weight).to(x.dtype)
        # d|x| / dx = x / |x|, and 0 where x is 0. One GEMM adds both terms.
        scale_T = torch.where(norm_T > 0, grad_norm / norm_T, 0)
        grad_x = torch.addmm((x * scale_T.unsqueeze(-1)).to(x.dtype), grad, folded.t())

        def grad_weights() -> list[Tensor]:
            grad_folded = (x.t() @ grad).to(weight.dtype)
            return [(weight * grad_folded).sum(-1), gain.unsqueeze(-1) * grad_folded]

        return grad_x, *_now_or_later(ctx, grad_weights), None


def norm_down(
    x_Td: Tensor, gain_d: Tensor, weight_dR: Tensor, queue: WeightGradQueue | None = None
) -> tuple[Tensor, Tensor]:
    """What one rank contributes to RMSNorm followed by A: (x * gain) A without the division, and |x|.

    The gain is folded into the weight, so that no normalised copy of x exists.

    Returns:
        product [T, R] in x's dtype and norm [T] in fp32 (fp64 where x is fp64).
    """
    return _NormDown.apply(x_Td, gain_d, weight_dR, queue)
