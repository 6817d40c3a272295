"""The gains of RMSNorms, whole or sharded over tp."""

from __future__ import annotations

import torch
from torch import nn

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
