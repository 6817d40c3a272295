"""Any sharding to any other, bit by bit, with one hash."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from boost.checkpoint.slices import DTYPES, Slice
from boost.checkpoint.store import open_checkpoint, save
from boost.errors import UserError

LAYOUTS = [((1,), 1), ((2,), 2), ((1, 2), 2), ((4,), 4), ((2, 2), 4), ((4, 3), 5), ((1, 1, 5), 3), ((3, 2, 2), 12)]


@pytest.mark.parametrize(("grid", "world"), LAYOUTS)
def test_any_sharding_to_any_other(kit, root, grid, world):
    tensors = kit.make_tensors()
    assert kit.save_all(root, 10, tensors, grid, world) == [root / "step-10"] * world
    checkpoint = open_checkpoint(root / "step-10")
    assert (checkpoint.step, checkpoint.state, checkpoint.stray) == (10, kit.STATE, ())
    assert checkpoint.read_file("config.yaml") == b"model: {}\n"
    for other, ranks in LAYOUTS:
        filled = kit.empty_like(tensors)
        for pieces in kit.shards(filled, other, ranks):  # pieces are views, so this fills the whole tensors
            checkpoint.load(pieces)
        for key, tensor in tensors.items():
            assert torch.equal(filled[key], tensor), (key, other)


def test_hash_depends_on_the_state_alone(kit, root):
    tensors = kit.make_tensors()
    hashes = set()
    for step, (grid, world) in enumerate(LAYOUTS):
        kit.save_all(root, step, tensors, grid, world)
        hashes.add(open_checkpoint(root / f"step-{step}").state_hash)
    assert len(hashes) == 1
    tensors["parameter", "blocks.0.crossing"][1, 2, 3] += 1
    kit.save_all(root, 99, tensors)
    assert open_checkpoint(root / "step-99").state_hash not in hashes


def test_hash_is_the_documented_one(kit, root):
    tensors = kit.make_tensors()
    kit.save_all(root, 1, tensors, (2, 2), 4)
    spelling = {dtype: name for name, dtype in DTYPES.items()}
    lines = ""
    for kind, name in sorted(tensors, key=lambda key: (key[1], key[0])):
        tensor = tensors[kind, name].contiguous()
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        shape = "x".join(str(size) for size in tensor.shape) or "scalar"
        lines += f"{name} {kind} {spelling[tensor.dtype]} {shape} {hashlib.sha256(raw).hexdigest()}\n"
    checkpoint = open_checkpoint(root)
    assert checkpoint.state_hash == hashlib.sha256(lines.encode()).hexdigest()
    manifest = json.loads((root / "step-1" / "manifest.json").read_text())
    assert set(manifest["files"]) == {path.name for path in (root / "step-1").iterdir()} - {"manifest.json"}


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_every_dtype(root, dtype):
    tensor = torch.arange(15).reshape(3, 5).to(dtype)
    save(root, 0, [Slice("x", "parameter", (3, 5), (0, 0), tensor)], {})
    assert torch.equal(open_checkpoint(root).tensor("x"), tensor)


def test_transposed_and_strided_views_both_ways(root):
    held = torch.randn(6, 2, 4)  # in memory: input dimension first, two grouped linears
    pieces = [Slice(f"{n}.weight", "parameter", (4, 6), (0, 0), held[:, i].T) for i, n in enumerate("qk")]
    save(root, 3, pieces, {})
    checkpoint = open_checkpoint(root)
    assert torch.equal(checkpoint.tensor("k.weight"), held[:, 1].T)
    other = torch.zeros(6, 2, 4)
    checkpoint.load(Slice(f"{n}.weight", "parameter", (4, 6), (0, 0), other[:, i].T) for i, n in enumerate("qk"))
    assert torch.equal(other, held)
    rows = torch.zeros(2, 6, requires_grad=True)  # a parameter is filled too
    checkpoint.load([Slice("q.weight", "parameter", (4, 6), (1, 0), rows)])
    assert torch.equal(rows, held[:, 0].T[1:3])


def test_a_rank_may_hold_nothing_or_many_pieces_of_a_tensor(kit, root):
    tensor = torch.randn(6, 3)
    pieces = kit.cut("a", "m/n", tensor, (6, 3)) + kit.cut("n/a", "m", -tensor, (2, 1))
    pieces += kit.cut("n/a#1", "m", tensor, (1,))  # the keys of these collide in the file unless told apart
    results = kit.run_ranks(
        3, lambda rank, barrier: save(root, 1, pieces if rank == 1 else [], {}, rank=rank, world=3, barrier=barrier)
    )
    assert results == [root / "step-1"] * 3
    checkpoint = open_checkpoint(root)
    assert [n for n in checkpoint.files if n.startswith("tensors")] == ["tensors-00001.safetensors"]
    assert torch.equal(checkpoint.tensor("a", "m/n"), tensor)
    assert torch.equal(checkpoint.tensor("n/a", "m"), -tensor)


def test_no_tensors_at_all(root):
    save(root, 1, [], {})
    assert open_checkpoint(root).tensors == {}


def test_load_says_what_does_not_fit_and_fills_nothing(kit, root, caplog):
    tensors = kit.make_tensors()
    kit.save_all(root, 1, tensors)
    checkpoint = open_checkpoint(root)
    good = torch.zeros(7, 6)

    def target(name, shape, kind="parameter", tensor=None):
        return Slice(name, kind, shape, (0,) * len(shape), torch.zeros(shape) if tensor is None else tensor)

    first = target("embedding.weight", (7, 6), tensor=good)
    with pytest.raises(UserError, match=r"lacks exp_avg head\.weight$"):
        checkpoint.load([first, target("head.weight", (7, 6), kind="exp_avg")])
    with pytest.raises(UserError, match=r"q\.down\.weight.*shape.*expected \[4, 6\], got \[3, 6\]"):
        checkpoint.load([first, target("blocks.0.attention.q.down.weight", (4, 6))])
    with pytest.raises(UserError, match=r"norm\.weight.*dtype.*expected F32, got BF16"):
        checkpoint.load([first, target("blocks.0.attention.norm.weight", (6,))])
    assert not good.any()
    checkpoint.load([first, target("head.weight", (7, 6))], partial=True)
    assert torch.equal(good, tensors["parameter", "embedding.weight"])
    assert "head.weight" in caplog.text
    with pytest.raises(UserError, match="lacks parameter head"):
        checkpoint.tensor("head")
    with pytest.raises(UserError, match="holds no file"):
        checkpoint.read_file("../../secret")


def test_cast_and_unused(kit, root):
    tensors = kit.make_tensors()
    kit.save_all(root, 1, tensors, (3, 2), 2)
    checkpoint = open_checkpoint(root)
    low = torch.zeros(7, 6, dtype=torch.bfloat16)
    targets = [Slice("embedding.weight", "parameter", (7, 6), (0, 0), low)]
    checkpoint.load(targets, cast=True)
    assert torch.equal(low, tensors["parameter", "embedding.weight"].bfloat16())
    assert checkpoint.unused(targets, ["exp_avg"]) == ["embedding.weight"]
    assert checkpoint.unused(targets, ["parameter", "mask"]) == [
        "blocks.0.attention.norm.weight",
        "blocks.0.attention.q.down.weight",
        "blocks.0.crossing",
        "flags",
        "nothing",
    ]
