"""One descriptor per canonical tensor: its name, its global shape, and where a rank holds its share of it.

Modules hold parameters in whatever shape computes best: grouped, transposed, padded, sharded. A `Part` says which
region of such a parameter is which canonical tensor. Initialisation, gradient norms, weight decay, checkpoints
and exports all read these descriptors and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from boost.parallel.mesh import Group

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Init:
    """How a canonical tensor starts: normal with standard deviation `scale`, uniform in +-scale, ones or zeros."""

    kind: Literal["normal", "uniform", "ones", "zeros"]
    scale: float = 0.0


@dataclass(frozen=True, eq=False)
class Support:
    """Which entries of a sparse matrix the values on one tp rank are.

    Attributes:
        positions: theirs in the whole matrix, row by row: ascending, int32 or int64 [n], on the host (on meta where
            only names and shapes are asked for).
        start: how many entries the ranks before hold.
    """

    positions: Tensor
    start: int


@dataclass(frozen=True)
class Part:
    """One canonical tensor inside a parameter held in memory.

    Attributes:
        name: canonical name, for example `blocks.0.attention.q.down.weight`.
        shape: canonical global shape, without padding.
        index: the region of the local parameter that holds this tp rank's share; its rows are a slice.
        split: the canonical dimension that is sharded over tp; None where every rank holds all of it.
        transposed: the region is the canonical share's transpose.
        init: how it starts.
        owned: False where another pipeline stage holds the same tensor too, and counts and saves it.
        partial: every tp rank holds all of it, with a gradient that is its share of a sum over them; see
            `partial_parameters`. Said of the whole parameter.
        support: where the tensor is the values of a sparse matrix: what they stand for. Shares may then be uneven.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    split: int | None = None
    index: tuple[slice | int, ...] = ()
    transposed: bool = False
    owned: bool = True
    partial: bool = False
    support: Support | None = None

    @property
    def decayed(self) -> bool:
        """Matrices are decayed, sparse ones too; norm gains and biases are not, unless asked for."""
        return len(self.shape) > 1 or self.support is not None

    def mine(self, tp: Group) -> bool:
        """Whether this rank is the one that counts and saves its share; what several ranks hold, one of them owns."""
        return self.owned and (self.split is not None or tp.rank == 0)

    def offsets(self, parameter: Tensor, tp: Group) -> tuple[int, ...]:
        """Where this rank's share starts in the canonical tensor."""
        return self._share(parameter, tp)[1]

    def view(self, parameter: Tensor, tp: Group) -> Tensor:
        """This rank's share in canonical orientation, without padding: a view into `parameter`.

        Where ZeRO divides the parameter it is the rows of the share that this dp rank holds, perhaps none.
        """
        return self._share(parameter, tp)[0]

    def _share(self, parameter: Tensor, tp: Group) -> tuple[Tensor, tuple[int, ...]]:
        held, first = held_rows(parameter)
        rows, *columns = self.index or (slice(None),)
        assert isinstance(rows, slice), "a part is a range of rows, so that rows can be shared out"
        begin, end, _ = rows.indices(len(parameter))
        # The rows of the region that are held here; where there are none, its beginning or its end.
        low, high = (min(max(row, begin), end) for row in (first, first + len(held)))
        share = held[(slice(low - first, high - first), *columns)]
        if self.transposed:
            share = share.t()
        rows_dim = len(self.shape) - 1 if self.transposed else 0
        offsets = [low - begin if dim == rows_dim else 0 for dim in range(len(self.shape))]
        if self.support is not None:
            offsets[0] += self.support.start
        elif self.split is not None:
            offsets[self.split] += tp.rank * (end - begin if self.split == rows_dim else share.shape[self.split])
        for dim, size in enumerate(self.shape):
            # Padding lies past the canonical tensor's end.
            offsets[dim] = min(offsets[dim], size)
            share = share.narrow(dim, 0, min(share.shape[dim], size - offsets[dim]))
        return share, tuple(offsets)


def held_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """What of a parameter, or of a tensor of its shape, lies in this process: a plain tensor, and its first row.

    All of it, unless ZeRO divides its rows over dp: then as `torch.chunk` does.
    """
    if not hasattr(tensor, "device_mesh"):  # not a DTensor; importing that class takes a second
        return tensor, 0
    held = cast("DTensor", tensor.detach())
    mesh = held.device_mesh
    return held.to_local(), min(mesh.get_local_rank(mesh.ndim - 1) * -(-len(held) // mesh.size(-1)), len(held))


class Sharded(nn.Module):
    """A module that owns parameters and can say what they hold."""

    def parts(self) -> dict[str, tuple[Part, ...]]:
        """For each parameter that this module itself owns, by attribute name, the canonical tensors inside it."""
        raise NotImplementedError


def described(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[Part, ...]]]:
    """Every parameter of the model once, with its parts, in module order.

    Raises:
        ValueError: a parameter that no module describes.
    """
    seen: set[int] = set()
    for module in model.modules():
        parts = module.parts() if isinstance(module, Sharded) else {}
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            if name not in parts:
                raise ValueError(f"{type(module).__name__}.{name} has no sharding descriptor")
            seen.add(id(parameter))
            yield parameter, parts[name]


def partial_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Those whose gradients are complete only once they are summed over tp."""
    return (parameter for parameter, parts in described(model) if parts[0].partial)


def padded_share(size: int, group: Group) -> int:
    """The length of a shard when `size` is padded up to a multiple of the group."""
    return -(-size // group.size)


def exact_share(size: int, group: Group, what: str) -> int:
    """The length of a shard of a dimension that must divide."""
    if size % group.size:
        raise ValueError(f"{what} = {size} does not divide over {group.size} ranks")
    return size // group.size


def draw(part: Part, seed: int | str, dtype: torch.dtype) -> Tensor:
    """The whole canonical tensor at initialisation: a function of its name, shape and the seed alone.

    Drawn on the CPU in fp32, so that no layout and no device changes it.
    """
    if part.init.kind == "ones":
        return torch.ones(part.shape, dtype=dtype)
    if part.init.kind == "zeros":
        return torch.zeros(part.shape, dtype=dtype)
    generator = generator_of(part.name, seed)
    value = torch.empty(part.shape, dtype=torch.float32)
    if part.init.kind == "normal":
        value.normal_(0.0, part.init.scale, generator=generator)
    else:
        value.uniform_(-part.init.scale, part.init.scale, generator=generator)
    return value.to(dtype)


def generator_of(name: str, seed: int | str) -> torch.Generator:
    """What draws the tensor of that name, on the CPU."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialize(model: nn.Module, seed: int, group: Group) -> None:
    """Fills every parameter from the seed; padding becomes exact zeros. Values do not depend on the layout."""
    for parameter, parts in described(model):
        parameter.zero_()
        fill(parameter, parts, seed, group)


@torch.no_grad()
def fill(parameter: nn.Parameter, parts: Sequence[Part], seed: int | str, group: Group) -> None:
    """This rank's share of the canonical tensors in one parameter, as `draw` has them; padding stays as it is."""
    for part in parts:
        share = part.view(parameter, group)
        value = draw(part, seed, parameter.dtype)
        box = tuple(slice(o, o + n) for o, n in zip(part.offsets(parameter, group), share.shape, strict=True))
        share.copy_(value[box])


def canonical_names(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name to global shape of every canonical tensor of the model."""
    return {part.name: part.shape for _, parts in described(model) for part in parts}
