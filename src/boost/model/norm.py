"""RMSNorm where the hidden dimension is whole, and the statistic where it is sharded.

Source: Zhang and Sennrich, 2019. Statistics are fp32, fp64 where the model is fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

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


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of norm statistics and losses beside activations of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over a whole hidden dimension, [T, D] to [T, D]."""
    wide = x_TD.to(statistic_dtype(x_TD.dtype))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalised.to(x_TD.dtype) * gain_D.to(x_TD.dtype)
