"""Pieces of canonical tensors: what a rank hands over, and the geometry that turns any sharding into any other.

A piece is an n-dimensional box: `offsets` say where it starts in the unsharded tensor, its own shape how far it goes.
Nothing here knows why a tensor was cut the way it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Boxes: TypeAlias = NDArray[np.int64]

# The spelling of safetensors, which is also the spelling in `state_hash`.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_SPELLING = {dtype: spelling for spelling, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Slice:
    """One rank's piece of a canonical (unsharded) tensor, to be saved or to be filled.

    Attributes:
        name: canonical tensor name, e.g. `blocks.0.attention.q.down.weight`.
        kind: `parameter`, `exp_avg`, `exp_avg_sq`, ...
        shape: shape of the unsharded tensor.
        offsets: where this piece starts in it, one number per dimension.
        tensor: the piece, of any strides, on any device, possibly empty; any dtype in `DTYPES`.

    Raises:
        ValueError: the piece does not lie inside `shape`, or its dtype cannot be saved.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "offsets", tuple(int(offset) for offset in self.offsets))
        if self.tensor.dtype not in _SPELLING:
            allowed = ", ".join(DTYPES)
            raise ValueError(f"{self.kind} {self.name}: {self.tensor.dtype} cannot be saved; allowed: {allowed}")
        if not inside(self.shape, self.offsets, self.extent):
            raise ValueError(
                f"{self.kind} {self.name}: a piece of shape {list(self.extent)} at {list(self.offsets)} "
                f"does not lie inside {list(self.shape)}"
            )

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the piece itself."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """Spelling of the dtype in files, e.g. `BF16`."""
        return _SPELLING[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes that the piece takes in a file."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class Piece:
    """A box of a saved tensor, and the file it lies in.

    Attributes:
        file: name of the file inside the checkpoint directory.
        key: name of the piece inside that file.
        offsets, shape: the box, in the coordinates of the unsharded tensor.
    """

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class Pieces:
    """The pieces of one tensor, packed: a checkpoint of a thousand ranks has more than a million.

    Attributes:
        files, keys: those of each piece.
        boxes: int64 [pieces, 2, dimensions], the offsets and the shape of each.
    """

    def __init__(self, files: list[str], keys: list[str], boxes: Boxes) -> None:
        self.files, self.keys, self.boxes = files, keys, boxes

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Piece]:
        return map(self.at, range(len(self)))

    def at(self, index: int) -> Piece:
        """One of them."""
        offsets, shape = self.boxes[index].tolist()
        return Piece(self.files[index], self.keys[index], tuple(offsets), tuple(shape))

    def near(self, offsets: Sequence[int], shape: Sequence[int]) -> Iterator[Piece]:
        """Those that share elements with a box, and no others unless the box is empty."""
        if not len(self):
            return iter(())
        starts, ends = self.boxes[:, 0], self.boxes.sum(axis=1)
        first = np.array(offsets, dtype=np.int64)
        last = first + np.array(shape, dtype=np.int64)
        return map(self.at, np.flatnonzero(((starts < last) & (first < ends)).all(axis=1)).tolist())


def inside(shape: Sequence[int], offsets: Sequence[int], extent: Sequence[int]) -> bool:
    """Whether the box of shape `extent` at `offsets` lies inside a tensor of `shape`."""
    return len(shape) == len(offsets) == len(extent) and all(
        min(start, length) >= 0 and start + length <= size
        for size, start, length in zip(shape, offsets, extent, strict=True)
    )


def overlap(
    a_offsets: Sequence[int], a_shape: Sequence[int], b_offsets: Sequence[int], b_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The box that two boxes share, as (offsets, shape), or None where they share nothing."""
    starts, lengths = [], []
    for a, a_length, b, b_length in zip(a_offsets, a_shape, b_offsets, b_shape, strict=True):
        start = max(a, b)
        length = min(a + a_length, b + b_length) - start
        if length <= 0:
            return None
        starts.append(start)
        lengths.append(length)
    return tuple(starts), tuple(lengths)


def indices(box: tuple[tuple[int, ...], tuple[int, ...]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Indices that select `box` in a tensor whose first element lies at `origin`."""
    return tuple(slice(start - base, start - base + length) for start, length, base in zip(*box, origin, strict=True))


def check_cover(shape: tuple[int, ...], pieces: Pieces) -> None:
    """Checks that `pieces`, none of them empty, cover a tensor of `shape` exactly once.

    Raises:
        ValueError: a piece reaches outside, two overlap (replicas are overlaps too), some elements are missing, or the
            tensor is cut along more than four dimensions.
    """
    dims, offsets, extents = len(shape), pieces.boxes[:, 0], pieces.boxes[:, 1]
    sizes = np.array(shape, dtype=np.int64)
    outside: NDArray[np.bool_] = np.ones(len(pieces), dtype=bool)
    if pieces.boxes.shape[2] == dims:
        outside = np.any((offsets < 0) | (extents < 1) | (offsets + extents > sizes), axis=1)
    if outside.any():
        piece = pieces.at(int(outside.argmax()))
        raise ValueError(
            f"the piece of shape {list(piece.shape)} at {list(piece.offsets)} in {piece.file} "
            f"does not lie inside {list(shape)}"
        )
    cut = [dim for dim in range(dims) if len(pieces) and (extents[:, dim] != shape[dim]).any()]
    if len(cut) > _MOST_CUT:
        raise ValueError(f"it is cut along {len(cut)} dimensions; at most {_MOST_CUT} are read")
    whole = np.stack((np.zeros_like(sizes), sizes))[None][: math.prod(shape)]  # none where it has no elements
    if all(map(np.array_equal, _corners(whole, shape, cut), _corners(pieces.boxes, shape, cut))):
        return
    if len(pieces) <= _FEW:
        _name_overlap(list(pieces), dims)
    covered = sum(extents.prod(axis=1).tolist())
    if covered != math.prod(shape):
        raise ValueError(f"its pieces cover {covered} of {math.prod(shape)} elements of {list(shape)}")
    raise ValueError("its pieces overlap; every element belongs to exactly one rank")


# A file may claim anything: what is checked must not take long, however many pieces it names.
_MOST_CUT, _FEW = 4, 1000


def _corners(boxes: Boxes, shape: tuple[int, ...], dims: Sequence[int]) -> tuple[Boxes, NDArray[np.float64]]:
    """Where the number of boxes over a point changes: each box's corners, signed, added up; those that cancel left out.

    The differences of a function along all its axes say all about it, so boxes cover a box exactly once if and only if
    what remains of their corners is its corners.

    Args:
        boxes: [boxes, 2, dimensions], inside `shape`.
        dims: at most four dimensions, along which to look; so that a corner's number fits in 64 bits.
    Returns:
        The corners, numbered in row-major order, and their sums.
    """
    corners, signs = np.zeros((len(boxes), 1), dtype=np.int64), np.ones(1)
    for dim in dims:
        ends = boxes[:, :, dim].cumsum(axis=1)
        corners = (corners[:, :, None] * (shape[dim] + 1) + ends[:, None, :]).reshape(len(boxes), -1)
        signs = np.outer(signs, (1, -1)).reshape(-1)
    found, place = np.unique(corners, return_inverse=True)
    sums = np.bincount(place.reshape(-1), np.tile(signs, len(boxes)), minlength=len(found))
    return found[sums != 0], sums[sums != 0]


def _name_overlap(pieces: Sequence[Piece], dims: int) -> None:
    """Raises ValueError with two pieces that overlap, if there are any.

    A sweep along the axis that is cut most often compares each piece with its few neighbours only.
    """
    axis = max(range(dims), key=lambda dim: len({piece.offsets[dim] for piece in pieces}), default=None)

    def start(piece: Piece) -> int:
        return 0 if axis is None else piece.offsets[axis]

    def end(piece: Piece) -> int:
        return 1 if axis is None else piece.offsets[axis] + piece.shape[axis]

    active: list[Piece] = []
    for piece in sorted(pieces, key=start):
        active = [other for other in active if end(other) > start(piece)]
        for other in active:
            if overlap(piece.offsets, piece.shape, other.offsets, other.shape) is not None:
                raise ValueError(
                    f"its pieces at {list(other.offsets)} in {other.file} and at {list(piece.offsets)} in {piece.file} "
                    f"overlap; every element belongs to exactly one rank"
                )
        active.append(piece)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in row-major order as bytes; a copy only where strides or device demand one."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
