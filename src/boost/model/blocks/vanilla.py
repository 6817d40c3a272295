"""A low-rank decoder block under the tensor parallelism that an ordinary framework gives it: the baseline.

Each pair is cut inside its bottleneck, A by columns and B by rows of the rank, so that everything wide is replicated
and each pair ends in a wide all-reduce: 5 d + 2 d_ff elements per token forward, 3 d + d_ff backward where q, k, v
and gate, up share one A (6 d + d_ff where they do not). In how many all-reduces forward, 4 or 7, depends on whether
their B are summed together too. Attention then runs over all heads on every rank.

With `sharded_heads` each rank attends with its own heads only, the fairer baseline: q, k, v end in a reduce-scatter
over heads and o begins with an all-gather. A rank that does not divide is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from boost.config import ModelSection, ParallelSection
from boost.kernels.activation import ACTIVATIONS, gated
from boost.kernels.norm import rms_norm
from boost.kernels.projections import Again, identity
from boost.model.attention import attention
from boost.model.blocks.shapes import attention_linears, mlp_linears
from boost.model.context import Context
from boost.model.low_rank import Linear, Pairs, Up
from boost.model.norm import Gain
from boost.parallel.bridge import local_latent
from boost.parallel.collectives import gather_last, scatter_last, sum_backward, sum_forward
from boost.parallel.mesh import Group
from boost.parallel.recompute import call, recompute_chunk


class VanillaBlock(nn.Module):
    """x_TD to x_TD, the whole residual stream on every rank."""

    # What `train.compile` compiles, each as one graph. A collective stands beside every GEMM, so they are not in it.
    LOCAL = ("norm", "attend", "gate")

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
            return Pairs(
                linears,
                rank,
                tp,
                grouped=grouped,
                group_b=parallel.group_b,
                down_split="rank",
                up_split="rank",
                dtype=dtype,
                init=model.factor_init,
            )

        q, k, v, o = attention_linears(model, layer)
        gate, up, down = mlp_linears(model, layer)
        self.attention_norm = Gain(f"blocks.{layer}.attention.norm.weight", model.hidden_size, dtype)
        self.qkv = pairs([q, k, v], parallel.group_linears)
        self.o = pairs([o])
        self.mlp_norm = Gain(f"blocks.{layer}.mlp.norm.weight", model.hidden_size, dtype)
        self.gate_up = pairs([gate, up], parallel.group_linears)
        self.down = pairs([down])

    def forward(self, x_TD: Tensor, context: Context) -> Tensor:
        # With `recompute: latent` the chunks between latents are repeated, the wide all-reduces in them included.
        run = recompute_chunk if context.recompute == "latent" else call
        z_qkv = run(self.chunk_qkv, x_TD, context)
        z_o = run(self.chunk_attention, z_qkv, context)
        x_TD, z_gate_up = run(self.chunk_gate_up, x_TD, z_o, context)
        z_down = run(self.chunk_down, z_gate_up, context)
        return self.add_branch(x_TD, self.down, z_down, "mlp", context)

    def chunk_qkv(self, x_TD: Tensor, context: Context) -> list[Tensor]:
        return self.norm_and_down(x_TD, self.attention_norm, self.qkv, context)

    def chunk_attention(self, z: Sequence[Tensor], context: Context) -> list[Tensor]:
        q_TQ, k_TQ, v_TQ = self.up(self.qkv, z, context, scatter_heads=self.sharded_heads)
        y_TQ = self.attend(q_TQ, k_TQ, v_TQ, context)
        if self.sharded_heads:
            # The backward of the gather sums the gradient over the ranks.
            return [self.o.downs[0](gather_last(y_TQ, self.tp), context.queue)]
        return self.down_all(self.o, y_TQ, context)

    def chunk_gate_up(self, x_TD: Tensor, z: Sequence[Tensor], context: Context) -> tuple[Tensor, list[Tensor]]:
        x_TD = self.add_branch(x_TD, self.o, z, "attention", context)
        return x_TD, self.norm_and_down(x_TD, self.mlp_norm, self.gate_up, context)

    def chunk_down(self, z: Sequence[Tensor], context: Context) -> list[Tensor]:
        gate_TF, up_TF = self.up(self.gate_up, z, context)
        y_TF = self.gate(gate_TF, up_TF)
        return self.down_all(self.down, y_TF, context, kept=(gate_TF, up_TF), again=self.gate_act.gate)

    def norm_and_down(self, x_TD: Tensor, gain: Gain, pairs: Pairs, context: Context) -> list[Tensor]:
        """RMSNorm of the whole residual stream, and the A after it."""
        return self.down_all(pairs, self.norm(x_TD, gain.weight), context)

    def norm(self, x_TD: Tensor, gain_D: Tensor) -> Tensor:
        return rms_norm(x_TD, gain_D, self.model.norm_eps)

    def attend(self, q_TQ: Tensor, k_TQ: Tensor, v_TQ: Tensor, context: Context) -> Tensor:
        return attention(q_TQ, k_TQ, v_TQ, self.model.head_size, self.layer, context)

    def gate(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        return gated(gate_TF, up_TF, self.gate_act)

    def down_all(
        self, pairs: Pairs, x_TI: Tensor, context: Context, *, kept: Sequence[Tensor] = (), again: Again = identity
    ) -> list[Tensor]:
        """This rank's share of the latents of linears that read x, one [T, G * r] per A."""
        queue = context.queue
        return [down(sum_backward(x_TI, self.tp, queue), queue, kept=kept, again=again) for down in pairs.downs]

    def up(self, pairs: Pairs, z: Sequence[Tensor], context: Context, *, scatter_heads: bool = False) -> list[Tensor]:
        """The pairs' outputs, complete on every rank, or with `scatter_heads` this rank's heads of them."""
        outputs: list[Tensor] = []
        ups = [up for group in pairs.ups for up in group]
        latents = [local_latent(part, self.act) for part in z]
        for up, (partial_GTO,) in zip(ups, pairs.up(latents, context.queue), strict=True):
            if scatter_heads:
                # The bias belongs to whole outputs: this rank adds its heads' share of it.
                outputs += _apart(self.add_head_bias(up, scatter_last(partial_GTO, self.tp)))
            else:
                outputs += up.add_bias(_apart(sum_forward(partial_GTO, self.tp)))
        return outputs

    def add_branch(self, x_TD: Tensor, pairs: Pairs, z: Sequence[Tensor], site: str, context: Context) -> Tensor:
        """The residual stream plus a branch's last up-projection."""
        (y_TD,) = self.up(pairs, z, context)
        return x_TD + context.drop(y_TD, context.dropout, self.layer, site)

    def add_head_bias(self, up: Up, y_GTo: Tensor) -> Tensor:
        """Adds this rank's share of replicated biases; `sum_backward` completes their gradient."""
        if up.bias is None:
            return y_GTo
        width = y_GTo.shape[-1]
        bias_oG = sum_backward(up.bias, self.tp).narrow(0, self.tp.rank * width, width)
        return y_GTo + bias_oG.t().unsqueeze(1).to(y_GTo.dtype)


def _apart(y_GTo: Tensor) -> Sequence[Tensor]:
    """Outputs [T, o] one by one; of a single one no copy is made in backward."""
    return [y_GTo.squeeze(0)] if len(y_GTo) == 1 else y_GTo.unbind(0)
