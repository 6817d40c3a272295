"""One descriptor per canonical tensor: its name, its global shape, and where a rank holds its share of it.

Modules hold parameters in whatever shape computes best: grouped, transposed, padded, sharded. A `Part` says which
region of such a parameter is which canonical tensor. Initialisation, gradient norms, weight decay, checkpoints
and exports all read these descriptors and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from boost.parallel.mesh import Group


@dataclass(frozen=True)
class Init:
    """How a canonical tensor starts: normal with standard deviation `scale`, uniform in +-scale, ones or zeros."""

    kind: Literal["normal", "uniform", "ones", "zeros"]
    scale: float = 0.0


@dataclass(frozen=True)
class Part:
    """One canonical tensor inside a parameter held in memory.

    Attributes:
        name: canonical name, for example `blocks.0.attention.q.down.weight`.
        shape: canonical global shape, without padding.
        index: the region of the local parameter that holds this rank's share.
        split: the canonical dimension that is sharded over tp; None where every rank holds all of it.
        transposed: the region is the canonical share's transpose.
        init: how it starts.
        owned: False where another pipeline stage holds the same tensor too, and counts and saves it.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    split: int | None = None
    index: tuple[slice | int, ...] = ()
    transposed: bool = False
    owned: bool = True

    @property
    def decayed(self) -> bool:
        """Matrices are decayed; norm gains and biases are not, unless asked for."""
        return len(self.shape) > 1

    def mine(self, group: Group) -> bool:
        """Whether this rank is the one that counts and saves its share; what several ranks hold, one of them owns."""
        return self.owned and (self.split is not None or group.rank == 0)

    def offsets(self, parameter: Tensor, group: Group) -> tuple[int, ...]:
        """Where this rank's share starts in the canonical tensor."""
        if self.split is None:
            return (0,) * len(self.shape)
        length = self._region(parameter).shape[self.split]
        start = min(group.rank * length, self.shape[self.split])
        return tuple(start if dim == self.split else 0 for dim in range(len(self.shape)))

    def view(self, parameter: Tensor, group: Group) -> Tensor:
        """This rank's share in canonical orientation, without padding: a view into `parameter`."""
        region = self._region(parameter)
        if self.split is None:
            return region
        start = self.offsets(parameter, group)[self.split]
        length = min(region.shape[self.split], self.shape[self.split] - start)
        return region.narrow(self.split, 0, length)

    def _region(self, parameter: Tensor) -> Tensor:
        region = parameter[self.index] if self.index else parameter
        return region.t() if self.transposed else region


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


def padded_share(size: int, group: Group) -> int:
    """The length of a shard when `size` is padded up to a multiple of the group."""
    return -(-size // group.size)


def exact_share(size: int, group: Group, what: str) -> int:
    """The length of a shard of a dimension that must divide."""
    if size % group.size:
        raise ValueError(f"{what} = {size} does not divide over {group.size} ranks")
    return size // group.size


def draw(part: Part, seed: int, dtype: torch.dtype) -> Tensor:
    """The whole canonical tensor at initialisation: a function of its name, shape and the seed alone.

    Drawn on the CPU in fp32, so that no layout and no device changes it.
    """
    if part.init.kind == "ones":
        return torch.ones(part.shape, dtype=dtype)
    if part.init.kind == "zeros":
        return torch.zeros(part.shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}:{part.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    value = torch.empty(part.shape, dtype=torch.float32)
    if part.init.kind == "normal":
        value.normal_(0.0, part.init.scale, generator=generator)
    else:
        value.uniform_(-part.init.scale, part.init.scale, generator=generator)
    return value.to(dtype)


@torch.no_grad()
def initialize(model: nn.Module, seed: int, group: Group) -> None:
    """Fills every parameter from the seed; padding becomes exact zeros. Values do not depend on the layout."""
    for parameter, parts in described(model):
        parameter.zero_()
        for part in parts:
            share = part.view(parameter, group)
            value = draw(part, seed, parameter.dtype)
            box = tuple(slice(o, o + n) for o, n in zip(part.offsets(parameter, group), share.shape, strict=True))
            share.copy_(value[box])


def canonical_names(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name to global shape of every canonical tensor of the model."""
    return {part.name: part.shape for _, parts in described(model) for part in parts}
