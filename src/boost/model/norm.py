"""The gains of RMSNorms, whole or sharded over tp, and the norm of shards that sums its statistic by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from boost.kernels.norm import statistic_dtype
from boost.parallel.collectives import sum_both
from boost.parallel.mesh import Group
from boost.parallel.sharding import Init, Part, Sharded, exact_share


class Gain(Sharded):
    """The gain of an RMSNorm, [d] or this rank's shard of it."""

    def __init__(self, name: str, width: int, dtype: torch.dtype, tp: Group | None = None) -> None:
        super().__init__()
        self.name, self.width, self.sharded = name, width, tp is not None
        local = exact_share(width, tp, "hidden_size") if tp is not None else width
        self.weight = nn.Parameter(torch.empty(local, dtype=dtype))

    def parts(self) -> dict[str, tuple[Part, ...]]:
        return {"weight": (Part(self.name, (self.width,), Init("ones"), split=0 if self.sharded else None),)}


def sync_norm(x_Td: Tensor, gain_d: Tensor, width: int, eps: float, tp: Group) -> Tensor:
    """RMSNorm of this rank's shard: the statistic is summed first, forward and backward, by a collective of its own."""
    wide = x_Td.to(statistic_dtype(x_Td.dtype))
    squares_T = sum_both(wide.square().sum(-1), tp)
    inverse_T = torch.rsqrt(squares_T / width + eps)
    return (wide * inverse_T.unsqueeze(-1)).to(x_Td.dtype) * gain_d.to(x_Td.dtype)
