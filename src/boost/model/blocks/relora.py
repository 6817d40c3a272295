"""A decoder block of ReLoRA linears (`boost.model.relora`) under Megatron tensor parallelism.

The frozen matrices are wide, so what crosses ranks is as wide as in a dense block (`boost.model.blocks.dense`): two
all-reduces of d elements per token each way. The pairs add none to a pass: their outputs and input gradients are summed
with those of the matrices. Once per step the gradients of the factors that every rank holds are summed: 7 r d elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from boost.config import ModelSection, ParallelSection
from boost.kernels.activation import ACTIVATIONS, gated
from boost.kernels.norm import rms_norm
from boost.kernels.projections import Again, identity
from boost.model.attention import attention
from boost.model.blocks.shapes import attention_linears, mlp_linears
from boost.model.context import Context
from boost.model.low_rank import Linear
from boost.model.norm import Gain
from boost.model.relora import Read, ReloraLinears, dropped
from boost.parallel.collectives import sum_backward, sum_forward
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue


class ColumnParallel(ReloraLinears):
    """Split by outputs: what is read to one [T, o] per linear."""

    def __init__(self, linears: Sequence[Linear], model: ModelSection, tp: Group, dtype: torch.dtype) -> None:
        super().__init__(linears, model, tp, "outputs", dtype)

    def outputs(self, read: Read, queue: WeightGradQueue | None) -> list[Tensor]:
        y_To = self(read, queue)
        if self.bias is not None:
            y_To = y_To + self.bias.to(y_To.dtype)
        return list(y_To.split(self.widths, dim=-1))


class RowParallel(ReloraLinears):
    """One linear split by inputs: this rank's [T, i] to the whole [T, D]."""

    def __init__(self, linear: Linear, model: ModelSection, tp: Group, dtype: torch.dtype) -> None:
        super().__init__([linear], model, tp, "inputs", dtype)

    def output(
        self,
        x_Ti: Tensor,
        layer: int,
        site: str,
        context: Context,
        *,
        kept: Sequence[Tensor] = (),
        again: Again = identity,
    ) -> Tensor:
        first = self.tp.rank * x_Ti.shape[-1]
        read = dropped(x_Ti, context, layer, site, first=first, kept=kept, again=again)
        y_TD = sum_forward(self(read, context.queue), self.tp)
        return y_TD if self.bias is None else y_TD + self.bias.to(y_TD.dtype)


class ReloraBlock(nn.Module):
    """x_TD to x_TD, the whole residual stream on every rank."""

    LOCAL: ClassVar[tuple[str, ...]] = ()  # `train.compile` is refused

    def __init__(
        self, model: ModelSection, parallel: ParallelSection, layer: int, tp: Group, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.model, self.layer, self.tp = model, layer, tp
        self.gate_act = ACTIVATIONS[model.gate_activation]

        def columns(linears: Sequence[Linear]) -> Sequence[ColumnParallel]:
            groups = [linears] if parallel.group_linears else [[linear] for linear in linears]
            modules = nn.ModuleList(ColumnParallel(group, model, tp, dtype) for group in groups)
            return cast(Sequence[ColumnParallel], modules)

        q, k, v, o = attention_linears(model, layer)
        gate, up, down = mlp_linears(model, layer)
        self.attention_norm = Gain(f"blocks.{layer}.attention.norm.weight", model.hidden_size, dtype)
        self.qkv = columns([q, k, v])
        self.o = RowParallel(o, model, tp, dtype)
        self.mlp_norm = Gain(f"blocks.{layer}.mlp.norm.weight", model.hidden_size, dtype)
        self.gate_up = columns([gate, up])
        self.down = RowParallel(down, model, tp, dtype)

    def forward(self, x_TD: Tensor, context: Context) -> Tensor:
        q_TQ, k_TQ, v_TQ = self.columns(self.qkv, x_TD, self.attention_norm, "q, k, v", context)
        y_TQ = attention(q_TQ, k_TQ, v_TQ, self.model.head_size, self.layer, context)
        y_TD = self.o.output(y_TQ, self.layer, "o", context)
        x_TD = x_TD + context.drop(y_TD, context.dropout, self.layer, "attention")

        gate_Tf, up_Tf = self.columns(self.gate_up, x_TD, self.mlp_norm, "gate, up", context)
        y_Tf = gated(gate_Tf, up_Tf, self.gate_act)
        y_TD = self.down.output(y_Tf, self.layer, "down", context, kept=(gate_Tf, up_Tf), again=self.gate_act.gate)
        return x_TD + context.drop(y_TD, context.dropout, self.layer, "mlp")

    def columns(
        self, columns: Sequence[ColumnParallel], x_TD: Tensor, gain: Gain, site: str, context: Context
    ) -> list[Tensor]:
        """norm(x), whose gradient is summed once for all linears that read it; and what they make of it."""
        h_TD = sum_backward(rms_norm(x_TD, gain.weight, self.model.norm_eps), self.tp, context.queue)
        read = dropped(h_TD, context, self.layer, site)
        return [y for column in columns for y in column.outputs(read, context.queue)]
