"""Sparse matrices with a fixed random support, which SLTrain adds to low-rank pairs.

A support is a set of positions in the whole matrix [d_out, d_in], drawn from the seed and the linear's name alone, so
that no layout changes it. `uniform` draws from all of the matrix, as published: then every output shard needs all of
the input. `block_diagonal` draws as many from G blocks on the diagonal alone: then a shard of the output needs the
same shard of the input, and tp, which divides G, sends nothing.

Source: SLTrain, arXiv 2406.02214, and its published code. Shapes: T tokens, I input width, O the output widths of
linears side by side, G blocks (1 where uniform); lower case for a local share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from boost.config import ModelSection
from boost.kernels.projections import sparse_matmul
from boost.model.low_rank import Linear
from boost.parallel.collectives import gather_last
from boost.parallel.mesh import Group
from boost.parallel.overlap import WeightGradQueue
from boost.parallel.sharding import Init, Part, Sharded, Support, generator_of, padded_share

# The positions of a linear's support in the row-major matrix: ascending, an integer tensor [n] on the host.
Supports = Callable[[Linear], Tensor]


def values_name(linear: Linear) -> str:
    """The canonical name of the values."""
    return f"{linear.name}.sparse.values"


def entries(model: ModelSection, linear: Linear) -> int:
    """How many entries a linear's support has."""
    return int(model.sparse_density * linear.d_in * linear.d_out)


def blocks_of(model: ModelSection) -> int:
    """G."""
    return model.sparse_blocks if model.sparse_support == "block_diagonal" else 1


def drawn(model: ModelSection, seed: int) -> Supports:
    """Supports drawn without replacement from where the model allows entries."""

    def draw(linear: Linear) -> Tensor:
        blocks = blocks_of(model)
        rows, columns = linear.d_out // blocks, linear.d_in // blocks
        generator = generator_of(f"{linear.name}.sparse.support", seed)
        place = _distinct(blocks * rows * columns, entries(model, linear), generator)
        block, row, column = place // (rows * columns), place // columns % rows, place % columns
        return (block * rows + row) * linear.d_in + block * columns + column

    return draw


def unplaced(model: ModelSection) -> Supports:
    """Supports of which only the sizes are known, on the meta device: nothing is drawn. At tp = 1 alone."""
    return lambda linear: torch.empty(entries(model, linear), dtype=torch.int64, device="meta")


def _distinct(count: int, chosen: int, generator: torch.Generator) -> Tensor:
    """That many different numbers below `count`, ascending; every set of them is equally likely."""
    if 2 * chosen > count:
        kept = torch.ones(count, dtype=torch.bool, device="cpu")
        kept[_distinct(count, count - chosen, generator)] = False
        return kept.nonzero().flatten()
    found = torch.empty(0, dtype=torch.int64, device="cpu")
    while len(found) < chosen:
        more = torch.randint(count, (chosen - len(found),), generator=generator, device="cpu")
        found = torch.cat([found, more]).unique()
    return found


def check_support(model: ModelSection, linear: Linear, positions: Tensor) -> None:
    """Raises ValueError where positions, from a file say, are no support of this model."""
    count, size = entries(model, linear), linear.d_out * linear.d_in
    if positions.shape != (count,):
        raise ValueError(f"has {list(positions.shape)} positions, expected [{count}]")
    if (positions[1:] <= positions[:-1]).any() or (count and not 0 <= int(positions[0]) <= int(positions[-1]) < size):
        raise ValueError(f"has positions that are not ascending numbers below {size}")
    blocks = blocks_of(model)
    row, column = positions // linear.d_in, positions % linear.d_in
    if not torch.equal(row * blocks // linear.d_out, column * blocks // linear.d_in):
        raise ValueError(f"has positions outside of the {blocks} blocks on the diagonal")


class Sparse(Sharded):
    """S of linears that share their input, as one batched GEMM: this rank's [T, i] to one [T, o] per linear.

    Args:
        linears: of equal input width.
        supports: theirs.
    """

    def __init__(
        self, linears: Sequence[Linear], model: ModelSection, tp: Group, supports: Supports, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.linears, self.tp = tuple(linears), tp
        self.uniform = model.sparse_support == "uniform"
        share, blocks = padded_share(linears[0].d_in, tp), 1 if self.uniform else model.sparse_blocks // tp.size
        width = share * tp.size if self.uniform else share // blocks
        first_column = 0 if self.uniform else tp.rank * share
        self.heights = [padded_share(linear.d_out, tp) // blocks for linear in linears]
        self.dense_shape = (blocks, sum(self.heights), width)
        self.supports, self.counts, places, above = [], [], [], 0
        for linear, height in zip(linears, self.heights, strict=True):
            positions = supports(linear).long()
            first_row = tp.rank * blocks * height
            start, stop = 0, len(positions)
            if tp.size > 1:
                bounds = positions.new_tensor([first_row, first_row + blocks * height]) * linear.d_in
                start, stop = torch.searchsorted(positions, bounds).tolist()
            mine = positions[start:stop]
            row, column = mine // linear.d_in - first_row, mine % linear.d_in - first_column
            places.append((row // height * self.dense_shape[1] + above + row % height) * width + column % width)
            self.supports.append(Support(_small(mine, linear.d_out * linear.d_in), start))
            self.counts.append(len(positions))
            above += height
        # Not a buffer: it is no part of the state, and stays where memory without values is allocated for that.
        self.places = _small(torch.cat(places), blocks * above * width)
        self.values = nn.Parameter(torch.empty(len(self.places), dtype=dtype))

    def parts(self) -> dict[str, tuple[Part, ...]]:
        found, start = [], 0
        for linear, count, support in zip(self.linears, self.counts, self.supports, strict=True):
            stop = start + len(support.positions)
            init = Init("uniform", linear.d_in**-0.5)
            found.append(
                Part(values_name(linear), (count,), init, split=0, index=(slice(start, stop),), support=support)
            )
            start = stop
        return {"values": tuple(found)}

    def forward(self, x_Ti: Tensor, queue: WeightGradQueue | None = None) -> list[Tensor]:
        """Where uniform one all-gather of x, and in backward a reduce-scatter of its gradient."""
        if self.uniform:
            x_Ti = gather_last(x_Ti, self.tp, queue)
        if self.places.device != x_Ti.device:
            self.places = self.places.to(x_Ti.device)
        x_TGi = x_Ti.unflatten(-1, (self.dense_shape[0], -1))
        y_GTO = sparse_matmul(x_TGi, self.values, self.places, self.dense_shape, queue)
        return [y_GTo.transpose(0, 1).flatten(1) for y_GTo in y_GTO.split(self.heights, dim=-1)]


def _small(numbers: Tensor, below: int) -> Tensor:
    """In the smallest type that holds all numbers below that."""
    return numbers.to(torch.int32 if below <= 2**31 else torch.int64)
