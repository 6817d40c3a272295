"""LaX: a bottleneck takes up the one of the block before, at each of a block's seven linears.

At linear m of block l, with z = x A as the bridge completes it:

    v = z + Gate_l(h_{l-1})     what is saved where bottlenecks are all that is kept
    h = act(LayerNorm_r(v))     what B reads, and what block l + 1 takes up

Block 0 has neither: h = act(z). v and h are r-wide and complete on every rank, and so are their gradients, because h is
tapped before the operation that sums the gradients of B's shards. So gates and norms are replicated, get complete
gradients without a collective, and the crossing costs none.

The gate of block l is held and run by block l - 1, behind its h: then backward finds there all that it needs to compute
h and the gate again from v, and what goes from block to block, Gate(h), is added and need not be kept.

Source: LaX, arXiv 2505.21732, and its published code. Shapes: T tokens, G linears in a group, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boost.config import ModelSection
from boost.kernels.activation import Activation
from boost.kernels.norm import layer_norm
from boost.model.low_rank import Linear
from boost.parallel.collectives import join_last, own_last
from boost.parallel.mesh import Group
from boost.parallel.sharding import Init, Part, Sharded, padded_share

NORM_EPS = 1e-6  # of the published code


class _PerLinear(Sharded):
    """Parameters of which each of G linears has its own, stacked along the first dimension.

    Args:
        linears: whose canonical names they bear.
        shapes: attribute to the canonical suffix, shape and initialisation of one linear's share.
    """

    def __init__(
        self, linears: Sequence[Linear], shapes: Mapping[str, tuple[str, tuple[int, ...], Init]], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.linears, self.shapes = tuple(linears), shapes
        for name, (_, (rows, *columns), _) in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(len(linears) * rows, *columns, dtype=dtype)))

    def parts(self) -> dict[str, tuple[Part, ...]]:
        return {
            name: tuple(
                Part(f"{linear.name}.crossing.{suffix}", shape, init, index=(slice(g * shape[0], (g + 1) * shape[0]),))
                for g, linear in enumerate(self.linears)
            )
            for name, (suffix, shape, init) in self.shapes.items()
        }

    def stacked(self, name: str, dtype: torch.dtype) -> Tensor:
        """A parameter as [G, *shape]."""
        parameter = self.get_parameter(name)
        return parameter.to(dtype).unflatten(0, (len(self.linears), -1))


class LatentNorm(_PerLinear):
    """LayerNorm over each linear's r, with gain and bias: [T, G, r] to [T, G, r]."""

    def __init__(self, linears: Sequence[Linear], rank: int, dtype: torch.dtype) -> None:
        shapes = {
            "weight": ("norm.weight", (rank,), Init("ones")),
            "bias": ("norm.bias", (rank,), Init("zeros")),
        }
        super().__init__(linears, shapes, dtype)

    def forward(self, v_TGr: Tensor) -> Tensor:
        groups = len(self.linears)
        weight_Gr, bias_Gr = (self.get_parameter(name).unflatten(0, (groups, -1)) for name in ("weight", "bias"))
        return layer_norm(v_TGr, weight_Gr, bias_Gr, NORM_EPS)


class IdentityGate(_PerLinear):
    """h."""

    def __init__(self, linears: Sequence[Linear], rank: int, dtype: torch.dtype) -> None:
        super().__init__(linears, {}, dtype)

    def forward(self, h_TGr: Tensor) -> Tensor:
        return h_TGr


class DiagonalGate(_PerLinear):
    """h * w, which starts as h. Not in the published code."""

    def __init__(self, linears: Sequence[Linear], rank: int, dtype: torch.dtype) -> None:
        super().__init__(linears, {"weight": ("weight", (rank,), Init("ones"))}, dtype)

    def forward(self, h_TGr: Tensor) -> Tensor:
        return h_TGr * self.stacked("weight", h_TGr.dtype)


class DenseGate(_PerLinear):
    """h W^T + b."""

    def __init__(self, linears: Sequence[Linear], rank: int, dtype: torch.dtype) -> None:
        shapes = {
            # Published as normal, truncated at 100 standard deviations.
            "weight": ("weight", (rank, rank), Init("normal", 0.02)),
            "bias": ("bias", (rank,), Init("zeros")),
        }
        super().__init__(linears, shapes, dtype)

    def forward(self, h_TGr: Tensor) -> Tensor:
        weight_Gor = self.stacked("weight", h_TGr.dtype)
        return torch.einsum("tgi,goi->tgo", h_TGr, weight_Gor) + self.stacked("bias", h_TGr.dtype)


class TensorGate(_PerLinear):
    """D^T H E, where H is h as an a x b matrix, as near to square as r allows, a <= b."""

    def __init__(self, linears: Sequence[Linear], rank: int, dtype: torch.dtype) -> None:
        a, b = balanced(rank)
        shapes = {
            # kaiming_uniform with its default slope of 0.
            "left": ("left.weight", (a, a), Init("uniform", math.sqrt(6 / a))),
            "right": ("right.weight", (b, b), Init("uniform", math.sqrt(6 / b))),
        }
        super().__init__(linears, shapes, dtype)
        self.sizes = a, b

    def forward(self, h_TGr: Tensor) -> Tensor:
        left_Gaa, right_Gbb = (self.stacked(name, h_TGr.dtype) for name in ("left", "right"))
        h_TGab = h_TGr.unflatten(-1, self.sizes)
        return torch.einsum("tgij,gik,gjl->tgkl", h_TGab, left_Gaa, right_Gbb).flatten(-2)


def balanced(rank: int) -> tuple[int, int]:
    """The two factors of the rank that are nearest to each other, the smaller first."""
    small = next(a for a in range(math.isqrt(rank), 0, -1) if rank % a == 0)
    return small, rank // small


LINEARS = 7  # of a block


def boundary_columns(model: ModelSection, tp: Group) -> int:
    """What this rank sends of the bottlenecks from one pipeline stage to the next, per token."""
    return 0 if model.crossing == "none" else padded_share(LINEARS * (model.rank or 0), tp)


def pack(x_Td: Tensor, taken_up: Sequence[Tensor], tp: Group) -> Tensor:
    """What leaves a pipeline stage: the residual stream, and this rank's columns of what the next block takes up."""
    taps_TR = torch.cat(list(taken_up), dim=-1)
    padded = F.pad(taps_TR, (0, -taps_TR.shape[-1] % tp.size))
    return torch.cat([x_Td, own_last(padded, tp)], dim=-1)


def unpack(packed: Tensor, width: int, columns: Sequence[int], tp: Group) -> tuple[Tensor, Sequence[Tensor]]:
    """The inverse of `pack`, on arrival: one all-gather, and in backward none.

    Args:
        width: of the residual stream.
        columns: of each tensor that a block takes up.
    """
    x_Td, share = packed.tensor_split([width], dim=-1)
    return x_Td, join_last(share, tp).narrow(-1, 0, sum(columns)).split(list(columns), dim=-1)


class Crossing(nn.Module):
    """How the bottlenecks of a group of linears become what B reads, and what the next block takes up.

    Args:
        model: with a crossing.
        here: the group's linears.
        above: the same linears of the next block; empty in the last.
        act: the bottleneck's activation.
        first: whether this is block 0, whose bottlenecks take up nothing.
    """

    GATES: ClassVar = {"identity": IdentityGate, "diagonal": DiagonalGate, "dense": DenseGate, "tensor": TensorGate}

    def __init__(
        self,
        model: ModelSection,
        here: Sequence[Linear],
        above: Sequence[Linear],
        act: Activation,
        dtype: torch.dtype,
        *,
        first: bool,
    ) -> None:
        super().__init__()
        assert model.rank is not None
        self.act, self.groups = act, len(here)
        self.norm = None if first else LatentNorm(here, model.rank, dtype)
        self.gate = self.GATES[model.crossing](above, model.rank, dtype) if above else None

    def forward(self, v_TR: Tensor) -> tuple[Tensor, Tensor | None]:
        """h and Gate(h) from v, [T, G * r] each; in the last block there is no gate."""
        h_TR = self.hidden(v_TR)
        if self.gate is None:
            return h_TR, None
        return h_TR, self.gate(h_TR.unflatten(-1, (self.groups, -1))).flatten(-2)

    def hidden(self, v_TR: Tensor) -> Tensor:
        """h = act(LayerNorm(v)), or act(z) in block 0; from [T, G, r] too."""
        if self.norm is not None:
            v_TR = self.norm(v_TR.view(len(v_TR), self.groups, -1)).view_as(v_TR)
        return self.act(v_TR)
