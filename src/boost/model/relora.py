"""ReLoRA's linears: a frozen matrix and a trained pair beside it, which is merged into it from time to time.

    y = x W^T + (alpha / r) (dropout(x) A^T) B^T

W gets no gradient and no optimiser state. A merge adds (alpha / r) B A to W, and the pair begins again with a new A
and B = 0, so that the function stays and the sum of many pairs is of any rank. The first A is not zero either: with
A = B = 0, as the published code starts, neither would have a gradient.

W is split as in Megatron, by outputs or by inputs, and one factor with it. The other factor is replicated; its gradient
is on each rank a share of a sum over tp, which is taken once per step. A merge multiplies what the rank has.

Source: Lialin et al., arXiv 2307.05695, and its published code. Shapes: T tokens, G linears in a group, r rank,
R = G r; i / o a rank's input and output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from boost.config import ModelSection
from boost.kernels.projections import Again, add_products, identity
from boost.kernels.projections import linear as apply_linear
from boost.model.context import Context
from boost.model.low_rank import Linear
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue
from boost.parallel.sharding import Init, Part, Sharded, padded_share


class Read(NamedTuple):
    """What linears read: x for their W, and for their A x with some elements dropped.

    Attributes:
        kept, again: what is saved for A's gradient in the place of `dropped_Ti`, and how it comes from that.
    """

    x_Ti: Tensor
    dropped_Ti: Tensor
    kept: Sequence[Tensor]
    again: Again


def dropped(
    x_Ti: Tensor,
    context: Context,
    layer: int,
    site: str,
    *,
    first: int = 0,
    kept: Sequence[Tensor] = (),
    again: Again = identity,
) -> Read:
    """LoRA's dropout: what linears with a pair make of x. In backward its mask is computed again, not kept.

    Args:
        layer, site: the place in the model; linears that read one x have one mask.
        first: the global column that x begins with.
        kept, again: what x comes from and was saved anyway.
    """

    def drop(x_Ti: Tensor) -> Tensor:
        return context.drop(x_Ti, context.lora_dropout, layer, site, first)

    return Read(x_Ti, drop(x_Ti), kept or (x_Ti,), lambda *kept: drop(again(*kept)))


class ReloraLinears(Sharded):
    """Linears that share their input. What `forward` gives is without biases.

    Args:
        linears: of equal input width.
        split: "outputs" or "inputs" are sharded over tp; with inputs the output is a partial sum.
    """

    def __init__(
        self,
        linears: Sequence[Linear],
        model: ModelSection,
        tp: Group,
        split: Literal["outputs", "inputs"],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        assert model.rank is not None
        self.linears, self.tp, self.by_outputs = tuple(linears), tp, split == "outputs"
        self.rank, self.scale, self.std = model.rank, model.lora_alpha / model.rank, model.init_std
        self.widths = [padded_share(linear.d_out, tp) if self.by_outputs else linear.d_out for linear in linears]
        o, i = sum(self.widths), linears[0].d_in if self.by_outputs else padded_share(linears[0].d_in, tp)
        self.weight = nn.Parameter(torch.empty(o, i, dtype=dtype), requires_grad=False)
        self.down = nn.Parameter(torch.empty(len(linears) * self.rank, i, dtype=dtype))
        self.up = nn.Parameter(torch.empty(o, self.rank, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(o, dtype=dtype)) if linears[0].bias else None

    def parts(self) -> dict[str, tuple[Part, ...]]:
        found: dict[str, list[Part]] = {"weight": [], "down": [], "up": [], "bias": []}
        outputs, inputs = (0, None) if self.by_outputs else (None, 1)  # which dimension is split, of what has them
        start = 0
        for g, (linear, width) in enumerate(zip(self.linears, self.widths, strict=True)):
            name, d_out, d_in, r = linear.name, linear.d_out, linear.d_in, self.rank
            rows, ranks = (slice(start, start + width),), (slice(g * r, (g + 1) * r),)
            uniform = Init("uniform", d_in**-0.5)  # kaiming_uniform(a=sqrt(5)) of the published code
            split = 0 if self.by_outputs else 1
            found["weight"].append(Part(f"{name}.weight", (d_out, d_in), Init("normal", self.std), split, rows))
            found["down"].append(
                Part(f"{name}.down.weight", (r, d_in), uniform, inputs, ranks, partial=self.by_outputs)
            )
            found["up"].append(
                Part(f"{name}.up.weight", (d_out, r), Init("zeros"), outputs, rows, partial=not self.by_outputs)
            )
            found["bias"].append(Part(f"{name}.bias", (d_out,), Init("zeros"), outputs, rows))
            start += width
        return {attribute: tuple(parts) for attribute, parts in found.items()}

    def forward(self, read: Read, queue: WeightGradQueue | None = None) -> Tensor:
        y_To = apply_linear(read.x_Ti, self.weight)
        z_TR = apply_linear(read.dropped_Ti, self.down, queue, kept=read.kept, again=read.again)
        return add_products(y_To, z_TR, self.up, self.widths, self.scale, queue)

    def factors(self) -> list[tuple[nn.Parameter, tuple[Part, ...]]]:
        """A and B of all linears, each with its parts."""
        parts = self.parts()
        return [(self.down, parts["down"]), (self.up, parts["up"])]

    @torch.no_grad()
    def merge(self) -> None:
        """W += (alpha / r) B A, of the rows that are held here. Every rank of ZeRO's shards calls it."""
        parts = self.parts()
        down = _whole(self.down)
        for w, a, b in zip(parts["weight"], parts["down"], parts["up"], strict=True):
            # W and B have the same rows in memory, so ZeRO deals them out alike.
            w.view(self.weight, self.tp).addmm_(b.view(self.up, self.tp), a.view(down, self.tp), alpha=self.scale)


def factor_names(model: nn.Module) -> frozenset[str]:
    """The canonical names of all factors of ReLoRA's linears."""
    found = (module.factors() for module in model.modules() if isinstance(module, ReloraLinears))
    return frozenset(part.name for factors in found for _, parts in factors for part in parts)


def _whole(parameter: Tensor) -> Tensor:
    """All rows of a parameter that ZeRO may divide."""
    return cast(Tensor, parameter.full_tensor()) if hasattr(parameter, "full_tensor") else parameter
