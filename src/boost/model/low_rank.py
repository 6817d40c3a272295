"""Low-rank pairs y = act(x A) B: grouped down-projections A, grouped up-projections B, and their initialisation.

Linears that read the same input are grouped: their A are one GEMM, their B one batched GEMM. Grouping is a matter of
execution: canonical tensors are always single, `down.weight [r, d_in]` and `up.weight [d_out, r]`.

Shapes: T tokens, G linears in the group, R rank, I input width, O output width; lower case for a local shard.
In memory the wide dimension comes first: A as [i, G * R], B as [o, G, R].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from boost.kernels.projections import Again, grouped_up, identity, matmul
from boost.parallel.bridge import Latent
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue
from boost.parallel.sharding import Init, Part, Sharded, padded_share

Split = Literal["wide", "rank"]  # which dimension of a factor is sharded over tp


@dataclass(frozen=True)
class Linear:
    """One linear of the dense model that a pair stands for.

    Attributes:
        name: canonical prefix, for example `blocks.0.attention.q`.
        d_in, d_out: its global widths.
        bias: whether it has one.
    """

    name: str
    d_in: int
    d_out: int
    bias: bool = False


FactorInit = Literal["cola", "xavier", "lora"]


def factor_inits(linear: Linear, rank: int, init: FactorInit) -> tuple[Init, Init]:
    """How A and B start, from the global widths.

    `cola`: normal, of one standard deviation such that A B has 1/sqrt(d_in + d_out). `xavier`: normal, a factor of
    width d with sqrt(2 / (d + r)), as in the published LORO runs. `lora`: A uniform in +-1/sqrt(d_in), B zero.
    """
    if init == "lora":
        return Init("uniform", linear.d_in**-0.5), Init("zeros")
    if init == "xavier":
        a, b = (Init("normal", (2 / (width + rank)) ** 0.5) for width in (linear.d_in, linear.d_out))
        return a, b
    both = Init("normal", float(rank**-0.25 * (linear.d_in + linear.d_out) ** -0.25))
    return both, both


class Down(Sharded):
    """A of one or more linears that share their input, as one GEMM: [T, i] to [T, G * r].

    Args:
        linears: of equal input width.
        rank: global rank r.
        split: "wide" shards d_in (BTP: the output is a partial sum), "rank" shards r (vanilla).
        init: how the factors start.
    """

    def __init__(
        self, linears: Sequence[Linear], rank: int, tp: Group, split: Split, dtype: torch.dtype, init: FactorInit
    ) -> None:
        super().__init__()
        self.linears, self.rank, self.split, self.init = tuple(linears), rank, split, init
        d_in = linears[0].d_in
        width = padded_share(d_in, tp) if split == "wide" else d_in
        self.local_rank = padded_share(rank, tp) if split == "rank" else rank
        self.weight = nn.Parameter(torch.empty(width, len(linears) * self.local_rank, dtype=dtype))

    def parts(self) -> dict[str, tuple[Part, ...]]:
        r = self.local_rank
        return {
            "weight": tuple(
                Part(
                    f"{linear.name}.down.weight",
                    (self.rank, linear.d_in),
                    factor_inits(linear, self.rank, self.init)[0],
                    split=1 if self.split == "wide" else 0,
                    index=(slice(None), slice(g * r, (g + 1) * r)),
                    transposed=True,
                )
                for g, linear in enumerate(self.linears)
            )
        }

    def forward(
        self,
        x_Ti: Tensor,
        queue: WeightGradQueue | None = None,
        *,
        kept: Sequence[Tensor] = (),
        again: Again = identity,
    ) -> Tensor:
        return matmul(x_Ti, self.weight, queue, kept=kept, again=again)


class Up(Sharded):
    """B of one or more linears of equal output width, as one batched GEMM: latents h [T, G, r] to G outputs [T, o].

    Args:
        linears: of equal output width.
        rank: global rank r.
        split: "wide" shards d_out (BTP), "rank" shards r (vanilla: outputs are partial sums, in one [G, T, o] for one
            collective, and the bias, which must be added once, is left to `add_bias`).
        init: how the factors start.
    """

    def __init__(
        self, linears: Sequence[Linear], rank: int, tp: Group, split: Split, dtype: torch.dtype, init: FactorInit
    ) -> None:
        super().__init__()
        self.linears, self.rank, self.split, self.init = tuple(linears), rank, split, init
        d_out = linears[0].d_out
        width = padded_share(d_out, tp) if split == "wide" else d_out
        local_rank = padded_share(rank, tp) if split == "rank" else rank
        self.weight = nn.Parameter(torch.empty(width, len(linears), local_rank, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, len(linears), dtype=dtype)) if linears[0].bias else None

    def parts(self) -> dict[str, tuple[Part, ...]]:
        wide = self.split == "wide"
        weight = tuple(
            Part(
                f"{linear.name}.up.weight",
                (linear.d_out, self.rank),
                factor_inits(linear, self.rank, self.init)[1],
                split=0 if wide else 1,
                index=(slice(None), g),
            )
            for g, linear in enumerate(self.linears)
        )
        bias = tuple(
            Part(
                f"{linear.name}.bias",
                (linear.d_out,),
                Init("uniform", linear.d_out**-0.5),
                split=0 if wide else None,
                index=(slice(None), g),
            )
            for g, linear in enumerate(self.linears)
        )
        return {"weight": weight, "bias": bias}

    def forward(
        self, h_TGr: Tensor, kept_TGr: Tensor, again: Again, queue: WeightGradQueue | None = None
    ) -> Sequence[Tensor]:
        if self.split == "rank":
            return grouped_up(h_TGr, kept_TGr, self.weight, again, queue, whole=True)
        return self.add_bias(grouped_up(h_TGr, kept_TGr, self.weight, again, queue))

    def add_bias(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Adds the biases to complete outputs, each [T, o]."""
        if self.bias is None:
            return outputs
        return [y_To + self.bias[:, g].to(y_To.dtype) for g, y_To in enumerate(outputs)]


class Pairs(nn.Module):
    """The A and B of linears that share their input, in the groups in which they are executed.

    Grouped: one A for all, and one B for each run of equal output widths (with GQA, q alone and k, v together), or
    with `group_b` false one for each linear. Ungrouped: every linear alone.

    Attributes:
        downs: one `Down` per A GEMM, hence per bridge.
        ups: for each `Down`, the `Up`s that read its output, in order.
    """

    def __init__(
        self,
        linears: Sequence[Linear],
        rank: int,
        tp: Group,
        *,
        grouped: bool,
        group_b: bool = True,
        down_split: Split,
        up_split: Split,
        dtype: torch.dtype,
        init: FactorInit = "cola",
    ) -> None:
        super().__init__()
        groups = [list(linears)] if grouped else [[linear] for linear in linears]
        self.downs = cast(
            Sequence[Down], nn.ModuleList(Down(group, rank, tp, down_split, dtype, init) for group in groups)
        )
        self.ups = cast(
            Sequence[Sequence[Up]],
            nn.ModuleList(
                nn.ModuleList(Up(run, rank, tp, up_split, dtype, init) for run in _runs(group, group_b))
                for group in groups
            ),
        )

    def up(self, latents: Sequence[Latent], queue: WeightGradQueue | None = None) -> list[Sequence[Tensor]]:
        """B: latents, one [T, G * r] per `Down`, to what each `Up` makes of them."""
        outputs = []
        for (h_TR, kept_TR, again), ups in zip(latents, self.ups, strict=True):
            total = sum(len(up.linears) for up in ups)
            h_TGr, kept_TGr = (tensor.unflatten(-1, (total, -1)) for tensor in (h_TR, kept_TR))
            start = 0
            for up in ups:
                group = slice(start, start + len(up.linears))
                outputs.append(up(h_TGr[:, group], kept_TGr[:, group], again, queue))
                start = group.stop
        return outputs


def _runs(linears: Sequence[Linear], grouped: bool) -> list[list[Linear]]:
    """Neighbours of equal output width together, or each alone."""
    runs: list[list[Linear]] = []
    for linear in linears:
        if grouped and runs and runs[-1][0].d_out == linear.d_out:
            runs[-1].append(linear)
        else:
            runs.append([linear])
    return runs
