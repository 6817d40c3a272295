"""The factors of a model's low-rank linears, single however they are grouped in memory, as rows of their wide side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from boost.config import OptimizerSection
from boost.parallel.mesh import Group
from boost.parallel.sharding import Part, described


@dataclass(frozen=True)
class Factor:
    """One canonical factor inside a parameter, which may hold several: A [r, d_in] or B [d_out, r].

    Attributes:
        wide: the canonical dimension that is not the rank.
    """

    parameter: nn.Parameter
    part: Part
    wide: int

    def rows(self, tensor: Tensor, tp: Group) -> Tensor:
        """This rank's rows [., r] of A^T or B: a view into a tensor of the parameter's shape. All ranks' are all."""
        share = self.part.view(tensor, tp)
        return share if self.wide == 0 else share.t()


@dataclass(frozen=True)
class Pair:
    """The factors of one linear y = act(x A) B: `down` is A, `up` is B."""

    name: str
    down: Factor
    up: Factor

    @property
    def rank(self) -> int:
        return self.down.part.shape[0]


def factor_pairs(model: nn.Module) -> list[Pair]:
    """The low-rank linears of the model, in the same order on every rank of tp and dp."""
    held = {part.name: (parameter, part) for parameter, parts in described(model) for part in parts}
    pairs = []
    for name, down in held.items():
        prefix = name.removesuffix(".down.weight")
        up = held.get(f"{prefix}.up.weight")
        if prefix != name and up is not None:
            pairs.append(Pair(prefix, Factor(*down, wide=1), Factor(*up, wide=0)))
    return pairs


def parameter_groups(model: nn.Module, config: OptimizerSection, factors: Iterable[Factor]) -> list[dict[str, Any]]:
    """Groups of an optimiser, none empty: the factors, other parameters that are decayed, and those that are not."""
    held = {id(factor.parameter) for factor in factors}
    groups: list[dict[str, Any]] = [
        {"params": [], "decay": config.weight_decay, "factors": True},
        {"params": [], "decay": config.weight_decay, "factors": False},
        {"params": [], "decay": 0.0, "factors": False},
    ]
    for parameter, parts in described(model):
        regular = 1 if config.decay_norms or parts[0].decayed else 2
        groups[0 if id(parameter) in held else regular]["params"].append(parameter)
    return [group for group in groups if group["params"]]
