"""A dense decoder block under Megatron tensor parallelism: the other baseline.

q, k, v, gate and up are split by columns, o and down by rows; two all-reduces of d elements per token forward (after
o and down), two backward (before q, k, v and before gate, up). Source: Shoeybi et al., arXiv 1909.08053.

With sequence parallelism (`boost.parallel.residual`) each is a reduce-scatter and an all-gather, and the residual
stream between them is this rank's tokens: x_TD and h_TD are then [t, D]. Backward gathers the input of q, k, v and that
of gate, up a second time, 3 d elements in all, and sums the gradients of the two gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from boost.config import ModelSection, ParallelSection
from boost.kernels.activation import ACTIVATIONS, gated
from boost.kernels.norm import rms_norm
from boost.kernels.projections import Again, identity
from boost.kernels.projections import linear as apply_linear
from boost.model.attention import attention
from boost.model.blocks.shapes import attention_linears, mlp_linears
from boost.model.context import Context
from boost.model.low_rank import Linear
from boost.model.norm import Gain
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue
from boost.parallel.residual import Regather, Stream, TokenShardedStream, make_stream, start_in_backward
from boost.parallel.sharding import Init, Part, Sharded, padded_share


class ColumnParallel(Sharded):
    """Linears that share their input, split by outputs, as one GEMM: [T, D] to one [T, o] per linear."""

    def __init__(self, linears: Sequence[Linear], std: float, tp: Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.linears, self.std = tuple(linears), std
        self.widths = [padded_share(linear.d_out, tp) for linear in linears]
        self.weight = nn.Parameter(torch.empty(sum(self.widths), linears[0].d_in, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(sum(self.widths), dtype=dtype)) if linears[0].bias else None

    def parts(self) -> dict[str, tuple[Part, ...]]:
        weight, bias, start = [], [], 0
        for linear, width in zip(self.linears, self.widths, strict=True):
            rows = (slice(start, start + width),)
            weight.append(Part(f"{linear.name}.weight", (linear.d_out, linear.d_in), Init("normal", self.std), 0, rows))
            bias.append(Part(f"{linear.name}.bias", (linear.d_out,), Init("zeros"), 0, rows))
            start += width
        return {"weight": tuple(weight), "bias": tuple(bias)}

    def forward(
        self,
        x_TD: Tensor,
        queue: WeightGradQueue | None = None,
        *,
        kept: Sequence[Tensor] = (),
        again: Again = identity,
    ) -> list[Tensor]:
        y_To = apply_linear(x_TD, self.weight, queue, kept=kept, again=again)
        if self.bias is not None:
            y_To = y_To + self.bias.to(y_To.dtype)
        return list(y_To.split(self.widths, dim=-1))


class RowParallel(Sharded):
    """A linear split by inputs: [T, i] to the residual stream, with the collective that completes it."""

    def __init__(self, linear: Linear, std: float, stream: Stream, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.std, self.stream, tp = linear, std, stream, stream.tp
        self.weight = nn.Parameter(torch.empty(linear.d_out, padded_share(linear.d_in, tp), dtype=dtype))
        self.bias = nn.Parameter(torch.empty(linear.d_out, dtype=dtype)) if linear.bias else None

    def parts(self) -> dict[str, tuple[Part, ...]]:
        name, shape = self.linear.name, (self.linear.d_out, self.linear.d_in)
        return {
            "weight": (Part(f"{name}.weight", shape, Init("normal", self.std), split=1),),
            "bias": (Part(f"{name}.bias", shape[:1], Init("zeros")),),
        }

    def partial(
        self,
        x_Ti: Tensor,
        queue: WeightGradQueue | None = None,
        *,
        kept: Sequence[Tensor] = (),
        again: Again = identity,
    ) -> Tensor:
        """This rank's part of the sum, [T, D]."""
        return apply_linear(x_Ti, self.weight, queue, kept=kept, again=again)

    def leave(self, partial_TD: Tensor, regather: Regather | None) -> Tensor:
        """From partial sums to the stream. `regather`: what backward needs soon after, gathered behind its own work."""
        if regather is not None:
            partial_TD = start_in_backward(partial_TD, regather)
        y_TD = self.stream.leave(partial_TD)
        return y_TD if self.bias is None else y_TD + self.stream.replicated(self.bias).to(y_TD.dtype)


class Entered(NamedTuple):
    """What column-parallel linears read.

    Attributes:
        whole_TD: the normalised stream, of all tokens.
        kept, again: what is saved for their weight gradients in its place, and how it comes from that.
        regather: what backward will gather again, if it is to begin early.
    """

    whole_TD: Tensor
    kept: Sequence[Tensor] = ()
    again: Again = identity
    regather: Regather | None = None


class DenseBlock(nn.Module):
    """x_TD to x_TD, the residual stream."""

    # What `train.compile` compiles, each as one graph: what lies between collectives.
    LOCAL = ("norm", "attend", "gate_and_down")

    def __init__(
        self, model: ModelSection, parallel: ParallelSection, layer: int, tp: Group, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        self.stream = make_stream(parallel.sequence_parallel, tp)
        self.gate_act = ACTIVATIONS[model.gate_activation]

        def columns(linears: Sequence[Linear]) -> nn.ModuleList:
            groups = [linears] if parallel.group_linears else [[linear] for linear in linears]
            return nn.ModuleList(ColumnParallel(group, model.init_std, tp, dtype) for group in groups)

        q, k, v, o = attention_linears(model, layer)
        gate, up, down = mlp_linears(model, layer)
        self.attention_norm = Gain(f"blocks.{layer}.attention.norm.weight", model.hidden_size, dtype)
        self.qkv = columns([q, k, v])
        self.o = RowParallel(o, model.init_std, self.stream, dtype)
        self.mlp_norm = Gain(f"blocks.{layer}.mlp.norm.weight", model.hidden_size, dtype)
        self.gate_up = columns([gate, up])
        self.down = RowParallel(down, model.init_std, self.stream, dtype)

    def forward(self, x_TD: Tensor, context: Context) -> Tensor:
        entered = self.enter(x_TD, self.attention_norm, self.qkv, context)
        y_TD = self.o.leave(self.attend(entered, context), entered.regather)
        x_TD = x_TD + context.drop(y_TD, context.dropout, self.layer, "attention")

        entered = self.enter(x_TD, self.mlp_norm, self.gate_up, context)
        y_TD = self.down.leave(self.gate_and_down(entered, context), entered.regather)
        return x_TD + context.drop(y_TD, context.dropout, self.layer, "mlp")

    def attend(self, entered: Entered, context: Context) -> Tensor:
        """q, k, v; attention with the local heads; o's partial sum."""
        q_TQ, k_TQ, v_TQ = self.columns(self.qkv, entered, context)
        return self.o.partial(attention(q_TQ, k_TQ, v_TQ, self.model.head_size, self.layer, context), context.queue)

    def gate_and_down(self, entered: Entered, context: Context) -> Tensor:
        """gate, up; the gate; down's partial sum."""
        gate_Tf, up_Tf = self.columns(self.gate_up, entered, context)
        y_Tf = gated(gate_Tf, up_Tf, self.gate_act)
        return self.down.partial(y_Tf, context.queue, kept=(gate_Tf, up_Tf), again=self.gate_act.gate)

    def columns(self, columns: nn.ModuleList, entered: Entered, context: Context) -> list[Tensor]:
        whole_TD, kept, again, _ = entered
        return [y for column in columns for y in column(whole_TD, context.queue, kept=kept, again=again)]

    def enter(self, x_TD: Tensor, gain: Gain, columns: nn.ModuleList, context: Context) -> Entered:
        """norm(x) of all tokens, whose gradient is summed once for all linears that read it."""
        queue = context.queue
        h_TD = self.norm(x_TD, self.stream.replicated(gain.weight))
        whole_TD = self.stream.enter(h_TD, context.tokens, queue)
        # A block that is recomputed as a whole keeps nothing for long.
        if not isinstance(self.stream, TokenShardedStream) or context.recompute == "block":
            return Entered(whole_TD)
        regather = Regather(h_TD, context.tokens, self.stream.tp, readers=len(columns))
        return Entered(whole_TD, (h_TD,), regather.whole, regather if queue is not None else None)

    def norm(self, x_TD: Tensor, gain_D: Tensor) -> Tensor:
        return rms_norm(x_TD, gain_D, self.model.norm_eps)
