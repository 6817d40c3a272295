"""A low-rank decoder block under bottleneck-aware tensor parallelism (BTP): four chunks joined by four bridges.

Everything wide is sharded over tp (the residual stream and the norms on hidden, attention on heads, the MLP on
d_ff); everything of rank r is replicated. A chunk runs from an up-projection to the next down-projection on local
shards; a bridge is one all-reduce of an r-wide tensor. Per token and block that is 4 all-reduces and 7 r elements
forward, the same backward, and a few numbers of norm statistics in two of the forward ones.

Shapes: T tokens, R the ranks of a group side by side (3 r for q, k, v), d / f / Q the local shards of hidden, d_ff
and the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from boost.config import ModelSection, ParallelSection
from boost.kernels.activation import ACTIVATIONS, gated
from boost.kernels.projections import identity, norm_down
from boost.model.attention import attention
from boost.model.blocks.shapes import attention_linears, mlp_linears
from boost.model.context import Context
from boost.model.crossing import Crossing
from boost.model.low_rank import Linear, Pairs
from boost.model.norm import Gain, sync_norm
from boost.parallel.bridge import Latent, Partial, local_latent
from boost.parallel.bridges import make_bridge
from boost.parallel.interleave import Stage
from boost.parallel.mesh import Group
from boost.parallel.recompute import call, recompute_chunk, recomputed

# (residual stream, latents, context) to (residual stream, what the next bridges carry, what the next block's latents
# take up, in order).
Chunk = Callable[[Tensor, Sequence[Tensor], Context], tuple[Tensor, list[Partial], list[Tensor]]]


class BottleneckBlock(nn.Module):
    """x_Td to x_Td, this rank's shard of the residual stream. Source: BOOST, arXiv 2512.12131.

    With a crossing (`boost.model.crossing`) latents [T, R] go from block to block beside it, one per bridge.
    """

    # What `train.compile` compiles, each as one graph: what lies between collectives.
    LOCAL = ("norm_and_down", "attend", "add_attention_and_down", "gate_and_down", "add_branch")

    def __init__(
        self, model: ModelSection, parallel: ParallelSection, layer: int, tp: Group, dtype: torch.dtype
    ) -> None:
        super().__init__()
        rank = model.rank
        assert rank is not None
        self.model, self.layer, self.tp = model, layer, tp
        self.online = parallel.norm == "online"
        self.act, self.gate_act = ACTIVATIONS[model.bottleneck_activation], ACTIVATIONS[model.gate_activation]

        def pairs(linears: Sequence[Linear], grouped: bool = False) -> Pairs:
            init = model.factor_init
            return Pairs(linears, rank, tp, grouped=grouped, down_split="wide", up_split="wide", dtype=dtype, init=init)

        q, k, v, o = attention_linears(model, layer)
        gate, up, down = mlp_linears(model, layer)
        self.attention_norm = Gain(f"blocks.{layer}.attention.norm.weight", model.hidden_size, dtype, tp)
        self.qkv = pairs([q, k, v], parallel.group_linears)
        self.o = pairs([o])
        self.mlp_norm = Gain(f"blocks.{layer}.mlp.norm.weight", model.hidden_size, dtype, tp)
        self.gate_up = pairs([gate, up], parallel.group_linears)
        self.down = pairs([down])
        above = (*attention_linears(model, layer + 1), *mlp_linears(model, layer + 1))
        last = layer + 1 == model.layers

        def crossings(pairs: Pairs, start: int) -> Sequence[Crossing]:
            """One per A; `start` counts the linears before."""
            made: list[Crossing] = []
            for a in pairs.downs if model.crossing != "none" else ():
                stop = start + len(a.linears)
                onward = () if last else above[start:stop]
                made.append(Crossing(model, a.linears, onward, self.act, dtype, first=layer == 0))
                start = stop
            return cast(Sequence[Crossing], nn.ModuleList(made))

        self.qkv_crossings, self.o_crossings = crossings(self.qkv, 0), crossings(self.o, 3)
        self.gate_up_crossings, self.down_crossings = crossings(self.gate_up, 4), crossings(self.down, 6)
        self.bridge = make_bridge(parallel, tp, model.hidden_size, model.norm_eps)

    def forward(
        self, x_Td: Tensor, context: Context, taken_up: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The residual stream, and with a crossing what the next block takes up.

        Args:
            taken_up: what the block before hands on: with a crossing one tensor [T, R] per bridge, in order.
        """
        z: Sequence[Tensor] = ()
        received, onward = iter(taken_up), []
        for chunk in self.chunks(context):
            x_Td, partials, taps = chunk(x_Td, z, context)
            onward += taps
            z = [self.bridge(part) for part in partials]
            if taken_up:
                z = [z_TR + next(received) for z_TR in z]
        x_Td, taps = self.finish(x_Td, z, context)
        return x_Td, [*onward, *taps]

    @property
    def columns(self) -> list[int]:
        """The widths of what it takes up, in order."""
        groups = (self.qkv_crossings, self.o_crossings, self.gate_up_crossings, self.down_crossings)
        return [crossing.groups * (self.model.rank or 0) for group in groups for crossing in group]

    def chunks(self, context: Context) -> list[Chunk]:
        """The block's four chunks in order; a bridge follows each. All take and return the residual stream."""
        if context.recompute != "latent":
            return [self.chunk_qkv, beside(self.chunk_attention), self.chunk_gate_up, beside(self.chunk_down)]
        # The first keeps its input alone, so there is nothing to recompute. What x passes by does not keep it.
        attention, down = beside(recomputed(self.chunk_attention)), beside(recomputed(self.chunk_down))
        return [self.chunk_qkv, attention, recomputed(self.chunk_gate_up), down]

    # A chunk takes the latents that its B read, then does its work in one function without collectives (`LOCAL`).

    def chunk_qkv(
        self, x_Td: Tensor, z: Sequence[Tensor], context: Context
    ) -> tuple[Tensor, list[Partial], list[Tensor]]:
        if not self.online:
            return x_Td, self.sync_norm_and_down(x_Td, self.attention_norm, self.qkv, context), []
        return x_Td, self.norm_and_down(x_Td, self.attention_norm, self.qkv, context), []

    def chunk_attention(self, z: Sequence[Tensor], context: Context) -> tuple[list[Partial], list[Tensor]]:
        latents, taps = self.latents(self.qkv_crossings, z, context)
        return [self.attend(latents, context)], taps

    def chunk_gate_up(
        self, x_Td: Tensor, z: Sequence[Tensor], context: Context
    ) -> tuple[Tensor, list[Partial], list[Tensor]]:
        latents, taps = self.latents(self.o_crossings, z, context)
        if not self.online:
            x_Td = self.add_branch(x_Td, self.o, latents, "attention", context)
            return x_Td, self.sync_norm_and_down(x_Td, self.mlp_norm, self.gate_up, context), taps
        return *self.add_attention_and_down(x_Td, latents, context), taps

    def chunk_down(self, z: Sequence[Tensor], context: Context) -> tuple[list[Partial], list[Tensor]]:
        latents, taps = self.latents(self.gate_up_crossings, z, context)
        return [self.gate_and_down(latents, context)], taps

    def finish(self, x_Td: Tensor, z: Sequence[Tensor], context: Context) -> tuple[Tensor, list[Tensor]]:
        """After the last bridge: the MLP's output joins the residual stream."""
        # Only this B lies outside the chunks that are recomputed, so what it saves stays.
        latents, taps = self.latents(self.down_crossings, z, context, thrifty=context.recompute == "latent")
        return self.add_branch(x_Td, self.down, latents, "mlp", context), taps

    def latents(
        self, crossings: Sequence[Crossing], z: Sequence[Tensor], context: Context, *, thrifty: bool = False
    ) -> tuple[list[Latent], list[Tensor]]:
        """The activations, and in backward the sum of the latents' gradients over the ranks.

        With a crossing z has taken up the block before, and what the next block takes up is returned too.
        """
        if context.interleaved:
            return [local_latent(z_TR, self.act) for z_TR in z], []
        if not crossings:
            spread = partial(self.bridge.spread, tokens=context.tokens, queue=context.queue, thrifty=thrifty)
            return [spread(z_TR, self.act) for z_TR in z], []
        latents, taps = [], []
        run = recompute_chunk if thrifty else call
        for z_TR, crossing in zip(z, crossings, strict=True):
            # The tap lies before the sum over the ranks: what comes back through it is complete on each of them.
            h_TR, tap_TR = run(crossing, z_TR)
            spread_TR = self.bridge.spread(h_TR, identity, context.tokens, context.queue, thrifty=False).h_TR
            kept = (z_TR, crossing.hidden) if thrifty else (h_TR, identity)
            latents.append(Latent(spread_TR, *kept))
            taps += [] if tap_TR is None else [tap_TR]
        return latents, taps

    def attend(self, latents: Sequence[Latent], context: Context) -> Partial:
        """B of q, k, v; attention with the local heads; A of o."""
        q_TQ, k_TQ, v_TQ = self.up(self.qkv, latents, context)
        y_TQ = attention(q_TQ, k_TQ, v_TQ, self.model.head_size, self.layer, context)
        return Partial(self.o.downs[0](y_TQ, context.queue))

    def add_attention_and_down(
        self, x_Td: Tensor, latents: Sequence[Latent], context: Context
    ) -> tuple[Tensor, list[Partial]]:
        """B of o joins the residual stream; norm; A of gate, up."""
        x_Td = self.add_branch(x_Td, self.o, latents, "attention", context)
        return x_Td, self.norm_and_down(x_Td, self.mlp_norm, self.gate_up, context)

    def gate_and_down(self, latents: Sequence[Latent], context: Context) -> Partial:
        """B of gate, up; the gate; A of down."""
        gate_Tf, up_Tf = self.up(self.gate_up, latents, context)
        y_Tf = gated(gate_Tf, up_Tf, self.gate_act)
        return Partial(self.down.downs[0](y_Tf, context.queue, kept=(gate_Tf, up_Tf), again=self.gate_act.gate))

    def norm_and_down(self, x_Td: Tensor, gain: Gain, pairs: Pairs, context: Context) -> list[Partial]:
        """RMSNorm and the A after it, on this rank's shard of x, online.

        z = (sum_i (x_i * gain_i) A_i) / rms(x), and the division commutes with the sum because rms(x) is the same
        number on every rank. So the raw shard is multiplied, and the bridge divides.
        """
        return [Partial(*norm_down(x_Td, gain.weight, down.weight, context.queue)) for down in pairs.downs]

    def sync_norm_and_down(self, x_Td: Tensor, gain: Gain, pairs: Pairs, context: Context) -> list[Partial]:
        """The same with the statistic summed first, in a collective of its own."""
        normalised = sync_norm(x_Td, gain.weight, self.model.hidden_size, self.model.norm_eps, self.tp)
        return [Partial(down(normalised, context.queue)) for down in pairs.downs]

    def up(self, pairs: Pairs, latents: Sequence[Latent], context: Context) -> list[Tensor]:
        """The pairs' outputs, one [T, o] per linear."""
        return [y_To for outputs in pairs.up(latents, context.queue) for y_To in outputs]

    def add_branch(self, x_Td: Tensor, pairs: Pairs, latents: Sequence[Latent], site: str, context: Context) -> Tensor:
        """The residual stream plus a branch's last up-projection."""
        (y_Td,) = self.up(pairs, latents, context)
        return x_Td + context.drop(y_Td, context.dropout, self.layer, site, self.tp.rank * y_Td.shape[-1])


def beside(chunk: Callable[[Sequence[Tensor], Context], tuple[list[Partial], list[Tensor]]]) -> Chunk:
    """A chunk that the residual stream passes by."""
    return lambda x_Td, z, context: (x_Td, *chunk(z, context))


def block_stages(blocks: Sequence[BottleneckBlock], halves: Sequence[Context]) -> Iterator[Stage]:
    """A stack of blocks as stages of `boost.parallel.interleave`: what lies between one bridge and the next.

    Without a crossing.
    """
    leave = None
    for block in blocks:
        for chunk in block.chunks(halves[0]):
            yield partial(_stage, leave, chunk, halves)
            leave = None
        leave = block.finish
    yield partial(_stage, leave, None, halves)


def _stage(
    leave: Callable[[Tensor, Sequence[Tensor], Context], tuple[Tensor, list[Tensor]]] | None,
    chunk: Chunk | None,
    halves: Sequence[Context],
    x_Td: Tensor,
    z: Sequence[Tensor],
    half: int,
) -> tuple[Tensor, list[Partial]]:
    """Ends one block, where it does, and runs the next chunk, where there is one."""
    context = halves[half]
    if leave is not None:
        x_Td, _ = leave(x_Td, z, context)
        z = ()
    if chunk is None:
        return x_Td, []
    x_Td, partials, _ = chunk(x_Td, z, context)
    return x_Td, partials
