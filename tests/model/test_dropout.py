"""Dropout: masks are functions of where they are applied (seed, sample, layer, site, column) and of nothing else."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
from torch import Tensor

from boost.config import ModelSection, ParallelSection
from boost.model.context import Context
from boost.parallel.mesh import Mesh
from tests.distributed.harness import run_ranks
from tests.models import build, distance, loss_and_gradients, model_section, tokens, worst

RATE = 0.25
LAYOUTS = ["dense", "vanilla", "vanilla_sharded_heads", "btp"]


def context(samples: list[int], sequence: int = 5, seed: int = 1, rate: float = RATE) -> Context:
    empty = torch.empty(0)
    return Context(len(samples), sequence, empty, empty, None, rate, seed, torch.tensor(samples))


def mask(
    samples: list[int], layer: int = 0, site: str = "mlp", first: int = 0, *, width: int = 64, seed: int = 1
) -> Tensor:
    """What dropout makes of ones, [tokens, width]."""
    c = context(samples, seed=seed)
    return c.drop(torch.ones(len(samples) * c.sequence, width), RATE, layer, site, first)


def model(layout: str, rate: float = RATE) -> tuple[ModelSection, ParallelSection]:
    section = model_section(linear="dense" if layout == "dense" else "low_rank", dropout=rate)
    return section, ParallelSection(tensor_layout="btp" if layout == "dense" else layout)  # type: ignore[arg-type]


def test_a_mask_repeats_whatever_the_generators_state() -> None:
    """No global generator is read or moved."""
    first = mask([3, 4])
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(mask([3, 4]), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_place_has_its_own_mask() -> None:
    """Masks of other seeds, samples, layers, sites and columns are uncorrelated, within 5 standard deviations."""
    places = list(itertools.product((1, 2), (7, 8, 71), (0, 1), ("attention", "mlp"), (0, 512)))
    masks = [
        mask([sample], layer, site, first, width=512, seed=seed) > 0 for seed, sample, layer, site, first in places
    ]
    for one, other in itertools.combinations(range(len(places)), 2):
        assert correlation(masks[one], masks[other]) < 5, (places[one], places[other])


def test_neighbours_are_independent() -> None:
    """So are a mask's own columns and positions, near and far."""
    kept = mask(list(range(100, 108)), width=1000) > 0
    for shift in (1, 2, 3, 5, 16, 40, 64, 500):
        assert correlation(kept[:, shift:], kept[:, :-shift]) < 5, shift
    for shift in (1, 2, 3, 5, 10, 20):
        assert correlation(kept[shift:], kept[:-shift]) < 5, shift


def correlation(one: Tensor, other: Tensor) -> float:
    """|correlation| of two masks of rate RATE, in standard deviations of that of independent ones."""
    product = (one.double() - (1 - RATE)) * (other.double() - (1 - RATE)) / (RATE * (1 - RATE))
    return abs(float(product.mean())) * one.numel() ** 0.5


def test_masks_are_what_they_were() -> None:
    """The hash in Python's integers: what a run drops, it drops on any device and in any version."""

    def signed(value: int, bits: int) -> int:
        return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)

    def mixed(value: int) -> int:
        value = signed((value ^ value >> 30) * 0xBF58476D1CE4E5B9, 64)
        value = signed((value ^ value >> 27) * 0x94D049BB133111EB, 64)
        return value ^ value >> 31

    def is_kept(sample: int, position: int, column: int) -> bool:
        place = signed(int.from_bytes(hashlib.sha256(b"1:3:mlp").digest()[:8], "little"), 64)
        row = mixed(signed(mixed(sample ^ place) + (position + 1) * 0x9E3779B97F4A7C15, 64)) >> 32
        value = row ^ signed(column * 0x9E3779B1, 32)
        value = signed((value ^ value >> 16) * 0x7FEB352D, 32)
        value = signed((value ^ value >> 15) * 0x846CA68B, 32)
        return value + 2**31 >= RATE * 2**32

    expected = [
        [is_kept(sample, position, 90 + column) for column in range(64)]
        for sample in (2, 2**40)
        for position in range(5)
    ]
    assert (mask([2, 2**40], 3, "mlp", 90) > 0).tolist() == expected


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_rate_is_met_and_the_rest_scaled(rate: float) -> None:
    """Elements are dropped with probability p (within 4 standard deviations) or divided by 1 - p; the mean stays."""
    c = context(list(range(8)), sequence=64, rate=rate)
    x = torch.rand(8 * 64, 200, dtype=torch.float64) + 1
    y = c.drop(x, rate, 0, "mlp")
    dropped = y == 0
    n = x.numel()
    assert abs(float(dropped.double().mean()) - rate) < 4 * (rate * (1 - rate) / n) ** 0.5
    torch.testing.assert_close(y[~dropped], x[~dropped] / (1 - rate))
    # Also for every channel and every position: no direction is dropped more than another.
    per_channel, per_token = dropped.double().mean(0), dropped.double().mean(1)
    assert float((per_channel - rate).abs().max()) < 6 * (rate * (1 - rate) / len(x)) ** 0.5
    assert float((per_token - rate).abs().max()) < 6 * (rate * (1 - rate) / 200) ** 0.5


def test_a_sample_has_one_mask_in_any_batch() -> None:
    """A batch of four is two batches of two; order follows the samples. Nor does a shard change what it is of."""
    whole = mask([5, 6, 7, 8])
    assert torch.equal(whole, torch.cat([mask([5, 6]), mask([7, 8])]))
    assert torch.equal(mask([8, 5]), torch.cat([whole[15:], whole[:5]]))
    shards = [mask([5, 6, 7, 8], first=first, width=32) for first in (0, 32)]
    assert torch.equal(whole, torch.cat(shards, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_do_not_depend_on_micro_batching(layout: str) -> None:
    """The sum over two batches of two equals one batch of four, to rounding."""
    section, parallel = model(layout)
    ids, labels = tokens(section, batch=4)

    def run(batches: list[slice]) -> tuple[Tensor, Tensor]:
        decoder = build(section, parallel)
        losses = [decoder.loss(ids[rows], labels[rows], samples=range(10, 14)[rows]) for rows in batches]
        total = torch.stack(losses).sum()
        total.backward()
        return total.detach(), torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])

    loss, gradient = run([slice(0, 4)])
    parts_loss, parts_gradient = run([slice(0, 2), slice(2, 4)])
    assert distance(parts_loss, loss) <= 1e-12
    assert distance(parts_gradient, gradient) <= 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_a_model_in_training_drops(layout: str) -> None:
    """In eval mode the model is the one without dropout, bit for bit; in training it is not."""
    section, parallel = model(layout)
    ids, labels = tokens(section)
    plain = build(model(layout, rate=0.0)[0], parallel).loss(ids, labels)
    decoder = build(section, parallel)
    assert decoder.loss(ids, labels, samples=range(3)) != plain
    assert decoder.eval().loss(ids, labels) == plain
    assert decoder.train().loss(ids, labels, samples=range(3)) != plain


def test_training_without_samples_is_refused() -> None:
    """A mask needs to know its sample."""
    section, parallel = model("btp")
    ids, labels = tokens(section)
    with pytest.raises(ValueError, match=r"3 sequences, got 0"):
        build(section, parallel).loss(ids, labels)


def trained(mesh: Mesh) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    sections = {layout: model(layout) for layout in LAYOUTS}
    return {
        layout: loss_and_gradients(build(section, parallel, mesh.tp), *tokens(section))
        for layout, (section, parallel) in sections.items()
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_masks_do_not_depend_on_tp(tp: int) -> None:
    """Loss and gradients with dropout are those of one process, be the stream sharded or replicated."""
    expected = trained(Mesh())
    for found in run_ranks(tp, trained):
        for layout, (loss, gradients) in found.items():
            assert distance(loss, expected[layout][0]) <= 1e-10
            error, name = worst(gradients, expected[layout][1])
            assert error <= 1e-10, (layout, name)
