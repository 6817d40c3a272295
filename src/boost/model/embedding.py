"""The two ends of the stack: token embeddings and the vocabulary-parallel head.

Shapes: T tokens, D hidden, V vocabulary; lower case for a local shard. A vocabulary that does not divide is padded in
memory: padded rows are never looked up and never enter a logit, and no checkpoint holds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from boost.parallel.collectives import scatter_last
from boost.parallel.mesh import Group
from boost.parallel.residual import Stream
from boost.parallel.sharding import Init, Part, Sharded, exact_share, padded_share


class HiddenShardedEmbedding(Sharded):
    """ids [T] to this rank's shard of the hidden dimension [T, d], with no collective. Weight [V, d]."""

    def __init__(self, vocab_size: int, hidden_size: int, std: float, tp: Group, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.std = (vocab_size, hidden_size), std
        self.weight = nn.Parameter(torch.empty(vocab_size, exact_share(hidden_size, tp, "hidden_size"), dtype=dtype))

    def parts(self) -> dict[str, tuple[Part, ...]]:
        return {"weight": (Part("embedding.weight", self.shape, Init("normal", self.std), split=1),)}

    def forward(self, ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids_T, self.weight).to(dtype)


class VocabShardedTable(Sharded):
    """A [V, D] table with its rows sharded over tp, for the head, and for the embedding where it is shared or dense.

    Args:
        name: canonical name.
        stream: where a lookup's sum over ranks goes; None for this rank's shard of hidden (a reduce-scatter).
        owned: False for a head whose table the pipeline's first stage holds as its embedding.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        std: float,
        tp: Group,
        dtype: torch.dtype,
        stream: Stream | None = None,
        *,
        owned: bool = True,
    ) -> None:
        super().__init__()
        self.name, self.shape, self.std, self.tp, self.stream = name, (vocab_size, hidden_size), std, tp, stream
        self.owned = owned
        self.weight = nn.Parameter(torch.empty(padded_share(vocab_size, tp), hidden_size, dtype=dtype))
        self.start = min(tp.rank * self.weight.shape[0], vocab_size)
        self.rows = min(self.weight.shape[0], vocab_size - self.start)

    def parts(self) -> dict[str, tuple[Part, ...]]:
        return {"weight": (Part(self.name, self.shape, Init("normal", self.std), split=0, owned=self.owned),)}

    def real_rows(self) -> Tensor:
        """The rows of this rank that are not padding, [v, D]."""
        # A view would cost its backward a gradient of the whole table.
        return self.weight if self.rows == len(self.weight) else self.weight[: self.rows]

    def forward(self, ids_T: Tensor, dtype: torch.dtype) -> Tensor:
        """ids [T] to the stream, or to this rank's [T, d]: rows of other ranks count as zero, then a sum over ranks."""
        if self.tp.size == 1:
            return F.embedding(ids_T, self.weight).to(dtype)
        local = ids_T - self.start
        mine = (local >= 0) & (local < self.rows)
        rows = F.embedding(local.where(mine, 0), self.weight).to(dtype)
        partial = rows.masked_fill(~mine.unsqueeze(-1), 0)
        return scatter_last(partial, self.tp) if self.stream is None else self.stream.leave(partial)
