"""An SLTrain block under bottleneck-aware tensor parallelism: every linear is a low-rank pair plus a sparse matrix.

y = s x A B + x S^T with s = lora_alpha / rank and no activation in between. The pairs travel as in `bottleneck.py`, in
bridges of rank r. What the sparse matrices need depends on their support (`boost.model.sparse`): with `uniform` the
whole input, one all-gather for each of the four inputs (d, the heads' width, d, d_ff) and a reduce-scatter of its
gradient; with `block_diagonal` nothing.

Behind an online norm both parts are computed from the raw x * gain and divided by rms(x) afterwards, the pair's by the
bridge. The sparse part's share of that number's gradient is added up in the all-reduce of the latent's.

Shapes: T tokens, R the ranks of a group side by side, d / f / Q the local shards of hidden, d_ff and the heads, i / o a
shard's input and output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from boost.config import ModelSection, ParallelSection
from boost.kernels.activation import ACTIVATIONS, gated
from boost.kernels.norm import divide_by_rms
from boost.kernels.projections import norm_down
from boost.model.attention import attention
from boost.model.blocks.shapes import attention_linears, mlp_linears
from boost.model.context import Context
from boost.model.low_rank import Linear, Pairs
from boost.model.norm import Gain, sync_norm
from boost.model.sparse import Sparse, Supports
from boost.parallel.bridge import Bridge, Latent, Partial
from boost.parallel.collectives import spread_online
from boost.parallel.mesh import Group


class PairsPlusSparse(nn.Module):
    """The linears of one input: this rank's [T, i] to one [T, o] per linear."""

    def __init__(
        self,
        linears: Sequence[Linear],
        model: ModelSection,
        parallel: ParallelSection,
        tp: Group,
        supports: Supports,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert model.rank is not None
        grouped = parallel.group_linears
        self.pairs = Pairs(
            linears, model.rank, tp, grouped=grouped, down_split="wide", up_split="wide", dtype=dtype, init="lora"
        )
        self.sparse = Sparse(linears, model, tp, supports, dtype)
        self.bridge = Bridge(tp, model.hidden_size, model.norm_eps)
        self.scaled = partial(torch.mul, other=model.lora_alpha / model.rank)

    def forward(self, x_Ti: Tensor, context: Context) -> list[Tensor]:
        """The linears of x."""
        latents = []
        for down in self.pairs.downs:
            z_TR = self.bridge(Partial(down(x_Ti, context.queue)))
            latents.append(self.bridge.spread(z_TR, self.scaled, context.tokens, context.queue, thrifty=False))
        return self.add(latents, self.sparse(x_Ti, context.queue), context)

    def behind_norm(self, x_Td: Tensor, gain: Gain, context: Context) -> list[Tensor]:
        """The linears of x / rms(x) * gain, with the norm online."""
        bridge, latents, inverse_T1 = self.bridge, list[Latent](), None
        for down in self.pairs.downs:
            product_TR, norm_T = norm_down(x_Td, gain.weight, down.weight, context.queue)
            total_TR, squares_T = bridge.sum(Partial(product_TR, norm_T))
            assert squares_T is not None
            z_TR = divide_by_rms(total_TR, squares_T, bridge.hidden_size, bridge.eps)
            if inverse_T1 is None:
                # One for all: every bridge of this norm has the same number.
                inverse_T = torch.rsqrt(squares_T / bridge.hidden_size + bridge.eps)
                h_TR, inverse_T = spread_online(self.scaled(z_TR), inverse_T, bridge.tp, context.queue)
                latents.append(Latent(h_TR, z_TR, self.scaled))
                inverse_T1 = inverse_T.unsqueeze(-1)
            else:
                latents.append(bridge.spread(z_TR, self.scaled, context.tokens, context.queue, thrifty=False))
        raw = self.sparse(x_Td * gain.weight.to(x_Td.dtype), context.queue)
        return self.add(latents, [(y_To * inverse_T1).to(x_Td.dtype) for y_To in raw], context)

    def add(self, latents: Sequence[Latent], sparse: Sequence[Tensor], context: Context) -> list[Tensor]:
        low_rank = [y_To for outputs in self.pairs.up(latents, context.queue) for y_To in outputs]
        return [y_To + s_To for y_To, s_To in zip(low_rank, sparse, strict=True)]


class SLTrainBlock(nn.Module):
    """x_Td to x_Td, this rank's shard of the residual stream. Source: SLTrain, arXiv 2406.02214."""

    LOCAL = ()  # of what `train.compile` compiles

    def __init__(
        self,
        model: ModelSection,
        parallel: ParallelSection,
        layer: int,
        tp: Group,
        dtype: torch.dtype,
        supports: Supports,
    ) -> None:
        super().__init__()
        self.model, self.layer, self.tp = model, layer, tp
        self.online = parallel.norm == "online"
        self.gate_act = ACTIVATIONS[model.gate_activation]

        def linears(*linears: Linear) -> PairsPlusSparse:
            return PairsPlusSparse(linears, model, parallel, tp, supports, dtype)

        q, k, v, o = attention_linears(model, layer)
        gate, up, down = mlp_linears(model, layer)
        self.attention_norm = Gain(f"blocks.{layer}.attention.norm.weight", model.hidden_size, dtype, tp)
        self.qkv, self.o = linears(q, k, v), linears(o)
        self.mlp_norm = Gain(f"blocks.{layer}.mlp.norm.weight", model.hidden_size, dtype, tp)
        self.gate_up, self.down = linears(gate, up), linears(down)

    def forward(self, x_Td: Tensor, context: Context) -> Tensor:
        first = self.tp.rank * x_Td.shape[-1]
        q_TQ, k_TQ, v_TQ = self.normed(self.qkv, x_Td, self.attention_norm, context)
        y_TQ = attention(q_TQ, k_TQ, v_TQ, self.model.head_size, self.layer, context)
        (y_Td,) = self.o(y_TQ, context)
        x_Td = x_Td + context.drop(y_Td, context.dropout, self.layer, "attention", first)

        gate_Tf, up_Tf = self.normed(self.gate_up, x_Td, self.mlp_norm, context)
        (y_Td,) = self.down(gated(gate_Tf, up_Tf, self.gate_act), context)
        return x_Td + context.drop(y_Td, context.dropout, self.layer, "mlp", first)

    def normed(self, linears: PairsPlusSparse, x_Td: Tensor, gain: Gain, context: Context) -> list[Tensor]:
        """RMSNorm, and the linears after it."""
        if self.online:
            return linears.behind_norm(x_Td, gain, context)
        return linears(sync_norm(x_Td, gain.weight, self.model.hidden_size, self.model.norm_eps, self.tp), context)
