"""What r-wide tensors look like on the wire where that is not the type of the activations.

`fp32` widens before the sum. `int8` and `fp8` are lossy: an all-reduce in two shots of bytes. Each rank owns T / tp
tokens; every other one sends it those rows quantised, it sums them in fp32, quantises the sum and sends it to all.
What all ranks then hold is what they read from the same bytes, so it is equal to the bit.

A row of bytes: the values in groups of at most 64, then an fp32 scale per group, then, where the bridge completes an
RMSNorm, the square of the norm as it is, which the owner sums like the rest. So the statistic is never quantised, and
is as exact as in an all-reduce.

Shapes: T tokens, R the ranks of a group side by side, G groups of W values, t = ceil(T / tp).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from boost.parallel.bridge import Activation, Bridge, Latent, Partial
from boost.parallel.collectives import (
    all_gather_rows,
    finish_behind,
    pack_online,
    reinterpreted,
    start_all_reduce,
    start_all_to_all,
    unpack_online,
)
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue

GROUP = 64
SCALE_BYTES = 4


class Wire(Protocol):
    """A way to sum over ranks."""

    def sum(
        self, x_TR: Tensor, norm_T: Tensor | None, group: Group, queue: WeightGradQueue | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The sum of x in its type, equal on all ranks, and that of the norms' squares. Not differentiable.

        Weight gradients in the queue are computed while the sum, or its first shot, is under way.
        """


class Widened:
    """An all-reduce in fp32, or in the type of the activations where that is wider still."""

    def sum(
        self, x_TR: Tensor, norm_T: Tensor | None, group: Group, queue: WeightGradQueue | None = None
    ) -> tuple[Tensor, Tensor | None]:
        wide_TR = x_TR.to(torch.promote_types(x_TR.dtype, torch.float32))
        payload = wide_TR.flatten().clone() if norm_T is None else pack_online(wide_TR, norm_T, group)
        finish_behind(start_all_reduce(payload, group), queue)
        if norm_T is None:
            return payload.view_as(wide_TR).to(x_TR.dtype), None
        total_TR, squares_T = unpack_online(payload, wide_TR, norm_T, group)
        return total_TR.to(x_TR.dtype), squares_T


@dataclass(frozen=True)
class BlockScaled:
    """The two-shot all-reduce of quantised values.

    Attributes:
        dtype: of a value, one byte.
        largest: the magnitude to which the largest value of a group is scaled.
    """

    dtype: torch.dtype
    largest: float

    def quantise(self, x_TR: Tensor) -> tuple[Tensor, Tensor]:
        """Values [T, G, W] and fp32 scales [T, G] such that values * scales is about x.

        What is not finite makes its whole group infinite or NaN.
        """
        groups, width = group_shape(x_TR.shape[1])
        x_TGW = F.pad(x_TR.float(), (0, groups * width - x_TR.shape[1])).unflatten(1, (groups, width))
        # Never 0 or subnormal, so that the division is safe; NaN stays NaN.
        scale_TG = (x_TGW.abs().amax(-1) / self.largest).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = x_TGW / scale_TG.unsqueeze(-1)
        return (scaled if self.dtype.is_floating_point else scaled.round()).to(self.dtype), scale_TG

    def dequantise(self, value_TGW: Tensor, scale_TG: Tensor, width: int) -> Tensor:
        """fp32 [T, width]."""
        return (value_TGW.float() * scale_TG.unsqueeze(-1)).flatten(1)[:, :width]

    def pack(self, x_TR: Tensor, square_T: Tensor | None) -> Tensor:
        """One row of bytes per token, `row_bytes` long."""
        value_TGW, scale_TG = self.quantise(x_TR)
        columns = [value_TGW.flatten(1), scale_TG]
        if square_T is not None:
            columns.append(square_T.unsqueeze(-1))
        return torch.cat([reinterpreted(column, torch.uint8) for column in columns], 1)

    def unpack(self, rows: Tensor, width: int, square_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
        """What `pack` was given, in fp32 and as far as it survived."""
        groups, per_group = group_shape(width)
        scales = groups * per_group
        value, scale, square = rows.tensor_split([scales, scales + groups * SCALE_BYTES], dim=1)
        x_TR = self.dequantise(
            reinterpreted(value, self.dtype).unflatten(1, (groups, per_group)),
            reinterpreted(scale, torch.float32),
            width,
        )
        return x_TR, None if square_dtype is None else reinterpreted(square, square_dtype).squeeze(-1)

    def sum(
        self, x_TR: Tensor, norm_T: Tensor | None, group: Group, queue: WeightGradQueue | None = None
    ) -> tuple[Tensor, Tensor | None]:
        tokens, width = x_TR.shape
        statistic = None if norm_T is None else norm_T.dtype
        rows = self.pack(x_TR, None if norm_T is None else norm_T.square())
        received, work = start_all_to_all(F.pad(rows, (0, 0, 0, -tokens % group.size)), group)
        finish_behind(work, queue)
        part_tR, square_t = (_sum_ranks(part, group) for part in self.unpack(received, width, statistic))
        assert part_tR is not None
        whole = all_gather_rows(self.pack(part_tR, square_t), tokens, group)
        total_TR, squares_T = self.unpack(whole, width, statistic)
        return total_TR.to(x_TR.dtype), squares_T


def _sum_ranks(rows: Tensor | None, group: Group) -> Tensor | None:
    return None if rows is None else rows.unflatten(0, (group.size, -1)).sum(0)


def group_shape(width: int) -> tuple[int, int]:
    """(G, W): a row is cut in as few equal groups of at most `GROUP` as it takes; fewer than G values are padding."""
    groups = -(-width // GROUP)
    return groups, -(-width // groups)


def row_bytes(width: int, statistic: torch.dtype | None = None) -> int:
    """Bytes per token of a quantised payload, with a norm's statistic of that type or without."""
    groups, per_group = group_shape(width)
    return groups * (per_group + SCALE_BYTES) + (0 if statistic is None else statistic.itemsize)


WIRES: Mapping[str, Wire] = {
    "fp32": Widened(),
    "int8": BlockScaled(torch.int8, 127.0),
    "fp8": BlockScaled(torch.float8_e4m3fn, 448.0),
}


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product_TR: Tensor, norm_T: Tensor | None, group: Group, wire: Wire
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(norm_T)
        return wire.sum(product_TR, norm_T, group)

    @staticmethod
    def backward(ctx: Any, grad_TR: Tensor, grad_T: Tensor | None) -> tuple[Tensor, Tensor | None, None, None]:
        (norm_T,) = ctx.saved_tensors
        return grad_TR, None if norm_T is None else 2 * norm_T * grad_T, None, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_TR: Tensor, group: Group, wire: Wire, queue: WeightGradQueue | None) -> Tensor:
        ctx.group, ctx.wire, ctx.queue = group, wire, queue
        return h_TR.view_as(h_TR)

    @staticmethod
    def backward(ctx: Any, grad_TR: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.wire.sum(grad_TR, None, ctx.group, ctx.queue)[0], None, None, None


class WireBridge(Bridge):
    """As `Bridge`, over another wire."""

    def __init__(self, tp: Group, hidden_size: int, eps: float, wire: Wire) -> None:
        super().__init__(tp, hidden_size, eps)
        self.wire = wire

    def sum(self, partial: Partial) -> tuple[Tensor, Tensor | None]:
        return _SumForward.apply(partial.product_TR, partial.norm_T, self.tp, self.wire)

    def spread(
        self, z_TR: Tensor, act: Activation, tokens: int, queue: WeightGradQueue | None, *, thrifty: bool
    ) -> Latent:
        return Latent(_SumBackward.apply(act(z_TR), self.tp, self.wire, queue), z_TR, act)
