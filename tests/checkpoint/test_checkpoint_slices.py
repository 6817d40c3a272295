"""Boxes: overlap and cover against brute force, and what a save refuses because of them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from boost.checkpoint import slices as slices_module
from boost.checkpoint.slices import Piece, Pieces, Slice, overlap
from boost.checkpoint.store import save
from boost.errors import EnvironmentFailure, UserError


def packed(pieces):
    numbers = [[piece.offsets, piece.shape] for piece in pieces]
    dims = len(pieces[0].shape) if pieces else 0
    boxes = np.array(numbers, dtype=np.int64).reshape(len(pieces), 2, dims)
    return Pieces([piece.file for piece in pieces], [piece.key for piece in pieces], boxes)


def check_cover(shape, pieces):
    slices_module.check_cover(shape, packed(pieces))


def cells(offsets, shape):
    grid = torch.zeros(12, 12, dtype=torch.bool)
    grid[offsets[0] : offsets[0] + shape[0], offsets[1] : offsets[1] + shape[1]] = True
    return grid


def test_overlap_equals_brute_force():
    pick = random.Random(0)
    for _ in range(500):
        a, b = (((pick.randrange(7), pick.randrange(7)), (pick.randrange(6), pick.randrange(6))) for _ in range(2))
        both = cells(*a) & cells(*b)
        box = overlap(*a, *b)
        assert torch.equal(cells(*box) if box else torch.zeros_like(both), both)
    assert overlap((), (), (), ()) == ((), ())


def test_the_pieces_near_a_box_equal_brute_force():
    pick = random.Random(2)

    def box():
        return (pick.randrange(7), pick.randrange(7)), (pick.randrange(1, 6), pick.randrange(1, 6))

    for _ in range(100):
        pieces = [Piece("f", str(index), *box()) for index in range(10)]
        a = box()
        assert list(packed(pieces)) == pieces
        assert list(packed(pieces).near(*a)) == [piece for piece in pieces if overlap(*a, piece.offsets, piece.shape)]
    scalar = Piece("f", "k", (), ())
    assert list(packed([scalar]).near((), ())) == [scalar]
    assert list(packed([]).near((), ())) == []


def test_cover_equals_brute_force():
    pick = random.Random(1)
    verdicts = set()
    for _ in range(2000):
        shape = (pick.randrange(1, 4), pick.randrange(1, 4))
        boxes = []
        for _ in range(pick.randrange(1, 6)):
            start = [pick.randrange(size) for size in shape]
            boxes.append((start, [pick.randrange(1, size - a + 1) for a, size in zip(start, shape, strict=True)]))
        count = sum(cells(*box).int() for box in boxes)[: shape[0], : shape[1]]
        try:
            check_cover(shape, [Piece("f", "k", tuple(a), tuple(b)) for a, b in boxes])
            verdict = "exact"
        except ValueError as error:
            verdict = "overlap" if "overlap" in str(error) else "gap"
        assert verdict == ("overlap" if count.max() > 1 else "gap" if count.min() < 1 else "exact")
        verdicts.add(verdict)
    assert verdicts == {"exact", "overlap", "gap"}


def test_cover_of_scalars_and_empty_tensors():
    check_cover((), [Piece("f", "k", (), ())])
    check_cover((0, 4), [])
    for shape, pieces in [((), []), ((), [Piece("f", "k", (), ())] * 2), ((2,), [Piece("f", "k", (1,), (2,))])]:
        with pytest.raises(ValueError, match="piece"):
            check_cover(shape, pieces)


def test_cover_in_more_dimensions():
    halves = [((a, b, c), (1, 2, 3)) for a in (0, 1) for b in (0, 2) for c in (0, 3)]
    pieces = [Piece("f", "k", *box) for box in halves]
    check_cover((2, 4, 6), pieces)
    with pytest.raises(ValueError, match="cover 42 of 48"):
        check_cover((2, 4, 6), pieces[1:])
    with pytest.raises(ValueError, match="overlap"):
        check_cover((2, 4, 6), [*pieces[1:], pieces[1]])
    with pytest.raises(ValueError, match="cut along 5 dimensions"):
        check_cover((2,) * 5, [Piece("f", "k", (0,) * 5, (1,) * 5)])


def test_a_grid_of_many_pieces_is_checked_without_comparing_them_in_pairs(monkeypatch):
    compared = 0

    def counted(*boxes):
        nonlocal compared
        compared += 1
        assert compared < 1_000_000
        return overlap(*boxes)

    monkeypatch.setattr(slices_module, "overlap", counted)
    grid = [Piece("f", "k", (row, column), (1, 1)) for row in range(256) for column in range(256)]
    check_cover((256, 256), grid)
    with pytest.raises(ValueError, match="cover 65535 of 65536"):
        check_cover((256, 256), grid[:-1])
    with pytest.raises(ValueError, match="overlap"):
        check_cover((256, 256), [*grid[:-1], grid[0]])


def test_a_slice_checks_itself():
    for shape, offsets, tensor in [
        ((4,), (2,), torch.zeros(3)),
        ((4,), (-1,), torch.zeros(3)),
        ((4, 1), (0,), torch.zeros(3)),
    ]:
        with pytest.raises(ValueError, match=r"parameter w: a piece of shape"):
            Slice("w", "parameter", shape, offsets, tensor)
    with pytest.raises(ValueError, match="complex64 cannot be saved"):
        Slice("w", "parameter", (3,), (0,), torch.zeros(3, dtype=torch.complex64))


W = torch.arange(6.0)


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([(6, 0, W), (6, 0, W)], r"parameter w: .*tensors-00000.*tensors-00001.*overlap"),
        ([(6, 0, W[:4]), (6, 3, W[3:])], "parameter w: .*overlap"),
        ([(6, 0, W[:2]), (6, 3, W[3:])], "parameter w: .*cover 5 of 6"),
        ([(6, 0, W), (7, 7, W[:0])], r"parameter w: ranks disagree.*expected F32 \[6\], got F32 \[7\] on rank 1"),
        ([(6, 0, W[:3]), (6, 3, W[3:].double())], "parameter w: ranks disagree.*F32.*F64"),
        ([(6, 0, W[:0]), (6, 6, W[:0])], "parameter w: .*cover 0 of 6"),
    ],
)
def test_bad_cover_is_refused_by_all_ranks(kit, root, slices, message):
    def work(rank, barrier):
        size, offset, tensor = slices[rank]
        piece = Slice("w", "parameter", (size,), (offset,), tensor)
        return save(root, 1, [piece], {}, rank=rank, world=2, barrier=barrier)

    first, second = kit.run_ranks(2, work)
    assert isinstance(first, UserError)
    assert isinstance(second, EnvironmentFailure)
    with pytest.raises(UserError, match=message):
        raise first
    assert list(root.iterdir()) == []


def test_unfit_arguments_are_refused(root):
    x = torch.zeros(2)
    for state in ({1: 2}, {"a": (1, 2)}, {"a": float("nan")}, {"a": x}, {"a": {3}}):
        with pytest.raises(ValueError, match="state"):
            save(root, 1, [], state)
    for name in ("a b", "", "a\n", "x" * 1000):
        with pytest.raises(ValueError, match="cannot name"):
            save(root, 1, [Slice(name, "parameter", (2,), (0,), x)], {})
    for name in ("../x", "a/b", "/x", "a\0", "manifest.json", "state.json", "tensors-00000.safetensors", "..", ""):
        with pytest.raises(ValueError, match=r"file|own"):
            save(root, 1, [], {}, files={name: b""})
    for step, keep, rank, world in [(-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, 1, 1), (0, 0, -1, 1)]:
        with pytest.raises(ValueError, match="must"):
            save(root, step, [], {}, keep=keep, rank=rank, world=world)
    assert not root.exists() or list(root.iterdir()) == []
