"""A low-rank decoder block under the tensor parallelism that an ordinary framework gives it: the baseline.

Each pair is cut inside its bottleneck, A by columns and B by rows of the rank, so that everything wide is replicated
and each pair ends in a wide all-reduce: 5 d + 2 d_ff elements per token forward, 3 d + d_ff backward where q, k, v
and gate, up share one A (6 d + d_ff where they do not). Attention then runs over all heads on every rank.

With `sharded_heads` each rank attends with its own heads only, the fairer baseline: q, k, v end in a reduce-scatter
over heads and o begins with an all-gather. A rank that does not divide is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from boost.config import ModelSection, ParallelSection
from boost.model.activation import ACTIVATIONS
from boost.model.attention import attention
from boost.model.blocks.shapes import attention_linears, mlp_linears
from boost.model.context import Context
from boost.model.low_rank import Linear, Pairs, Up
from boost.model.norm import Gain, rms_norm
from boost.parallel.collectives import gather_last, scatter_last, sum_backward, sum_forward
from boost.parallel.mesh import Group


class VanillaBlock(nn.Module):
    """x_TD to x_TD, the whole residual stream on every rank."""

    def __init__(
        self, model: ModelSection, parallel: ParallelSection, layer: int, tp: Group, dtype: torch.dtype
    ) -> None:
        super().__init__()
        rank = model.rank
        assert rank is not None
        self.model, self.layer, self.tp = model, layer, tp
        self.act, self.gate_act = ACTIVATIONS[model.bottleneck_activation], ACTIVATIONS[model.gate_activation]
        self.sharded_heads = parallel.tensor_layout == "vanilla_sharded_heads"

        def pairs(linears: Sequence[Linear], grouped: bool = False) -> Pairs:
            return Pairs(linears, rank, tp, grouped=grouped, down_split="rank", up_split="rank", dtype=dtype)

        q, k, v, o = attention_linears(model, layer)
        gate, up, down = mlp_linears(model, layer)
        self.attention_norm = Gain(f"blocks.{layer}.attention.norm.weight", model.hidden_size, dtype)
        self.qkv = pairs([q, k, v], parallel.group_linears)
        self.o = pairs([o])
        self.mlp_norm = Gain(f"blocks.{layer}.mlp.norm.weight", model.hidden_size, dtype)
        self.gate_up = pairs([gate, up], parallel.group_linears)
        self.down = pairs([down])

    def forward(self, x_TD: Tensor, context: Context) -> Tensor:
        h_TD = rms_norm(x_TD, self.attention_norm.weight, self.model.norm_eps)
        q_TQ, k_TQ, v_TQ = self.pairs(self.qkv, h_TD, scatter_heads=self.sharded_heads)
        y_TQ = attention(q_TQ, k_TQ, v_TQ, self.model.head_size, self.layer, context)
        if self.sharded_heads:
            y_TQ = gather_last(y_TQ, self.tp)  # its backward sums the gradient over ranks
        (y_TD,) = self.pairs(self.o, y_TQ, complete_gradient=self.sharded_heads)
        x_TD = x_TD + context.drop(y_TD, self.layer, "attention", None)

        h_TD = rms_norm(x_TD, self.mlp_norm.weight, self.model.norm_eps)
        gate_TF, up_TF = self.pairs(self.gate_up, h_TD)
        (y_TD,) = self.pairs(self.down, self.gate_act(gate_TF) * up_TF)
        return x_TD + context.drop(y_TD, self.layer, "mlp", None)

    def pairs(
        self, pairs: Pairs, x_TI: Tensor, *, scatter_heads: bool = False, complete_gradient: bool = False
    ) -> list[Tensor]:
        """The outputs of pairs that read x, complete on every rank, or this rank's heads of them.

        Args:
            scatter_heads: a reduce-scatter instead of an all-reduce after B.
            complete_gradient: the operation before already sums x's gradient over ranks.
        """
        latents = []
        for down in pairs.downs:
            x = x_TI if complete_gradient else sum_backward(x_TI, self.tp)
            latents.append(self.act(down(x)))
        outputs: list[Tensor] = []
        ups = [up for group in pairs.ups for up in group]
        for up, partial_GTO in zip(ups, pairs.up_grouped(latents), strict=True):
            if scatter_heads:
                # The bias belongs to whole outputs: this rank adds its heads' share of it.
                outputs += self.add_head_bias(up, scatter_last(partial_GTO, self.tp)).unbind(0)
            else:
                outputs += up.add_bias(sum_forward(partial_GTO, self.tp)).unbind(0)
        return outputs

    def add_head_bias(self, up: Up, y_GTo: Tensor) -> Tensor:
        """Adds this rank's share of replicated biases; `sum_backward` completes their gradient."""
        if up.bias is None:
            return y_GTo
        width = y_GTo.shape[-1]
        bias_oG = sum_backward(up.bias, self.tp).narrow(0, self.tp.rank * width, width)
        return y_GTo + bias_oG.t().unsqueeze(1).to(y_GTo.dtype)
