"""Dropout: masks are functions of where they are applied (seed, sample, layer, site, shard) and of nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from boost.config import ModelSection, ParallelSection
from boost.model.context import Context
from boost.model.decoder import Decoder
from boost.parallel.mesh import Mesh
from tests.distributed.harness import run_ranks
from tests.models import build, distance, model_section, tokens

RATE = 0.25
LAYOUTS = ["dense", "vanilla", "vanilla_sharded_heads", "btp"]


def context(samples: list[int], sequence: int = 5, seed: int = 1, rate: float = RATE) -> Context:
    empty = torch.empty(0)
    return Context(len(samples), sequence, empty, empty, None, rate, seed, samples)


def mask(
    samples: list[int], layer: int = 0, site: str = "mlp", shard: int | None = None, *, width: int = 64, seed: int = 1
) -> Tensor:
    """What dropout makes of ones, [tokens, width]."""
    c = context(samples, seed=seed)
    return c.drop(torch.ones(len(samples) * c.sequence, width), layer, site, shard)


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
    """Masks differ by seed, sample, layer, site and shard, in about 2 p (1 - p) of the elements, as if independent."""
    places = list(itertools.product((1, 2), (7, 71), (0, 1), ("attention", "mlp"), (None, 0, 1)))
    masks = [mask([sample], layer, site, shard, seed=seed) > 0 for seed, sample, layer, site, shard in places]
    for one, other in itertools.combinations(range(len(places)), 2):
        share = float((masks[one] != masks[other]).float().mean())
        assert abs(share - 2 * RATE * (1 - RATE)) < 0.15, (places[one], places[other])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_rate_is_met_and_the_rest_scaled(rate: float) -> None:
    """Elements are dropped with probability p (within 4 standard deviations) or divided by 1 - p; the mean stays."""
    c = context(list(range(8)), sequence=64, rate=rate)
    x = torch.rand(8 * 64, 200, dtype=torch.float64) + 1
    y = c.drop(x, 0, "mlp", 0)
    dropped = y == 0
    n = x.numel()
    assert abs(float(dropped.double().mean()) - rate) < 4 * (rate * (1 - rate) / n) ** 0.5
    torch.testing.assert_close(y[~dropped], x[~dropped] / (1 - rate))
    # Also for every channel and every position: no direction is dropped more than another.
    per_channel, per_token = dropped.double().mean(0), dropped.double().mean(1)
    assert float((per_channel - rate).abs().max()) < 6 * (rate * (1 - rate) / len(x)) ** 0.5
    assert float((per_token - rate).abs().max()) < 6 * (rate * (1 - rate) / 200) ** 0.5


def test_a_sample_has_one_mask_in_any_batch() -> None:
    """A batch of four is two batches of two; order follows the samples."""
    whole = mask([5, 6, 7, 8])
    assert torch.equal(whole, torch.cat([mask([5, 6]), mask([7, 8])]))
    assert torch.equal(mask([8, 5]), torch.cat([whole[15:], whole[:5]]))


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


def run_ranks_dropout(mesh: Mesh) -> dict[str, tuple[Tensor, dict[tuple[int, str], Tensor]]]:
    """For each layout the hidden states, and by layer and site which elements were dropped."""
    found = {}
    for layout in LAYOUTS:
        section, parallel = model(layout)
        decoder: Decoder = build(section, parallel, mesh.tp, torch.float32)
        ids, _ = tokens(section)
        masks: dict[tuple[int, str], Tensor] = {}
        original = Context.drop

        def recorded(
            self: Context, x: Tensor, layer: int, site: str, shard: int | None, into: Any = masks, drop: Any = original
        ) -> Tensor:
            into[layer, site] = drop(self, torch.ones_like(x), layer, site, shard)
            return drop(self, x, layer, site, shard)

        Context.drop = recorded  # type: ignore[method-assign]
        try:
            hidden = decoder.hidden(ids, samples=range(3)).detach()
        finally:
            Context.drop = original  # type: ignore[method-assign]
        found[layout] = (hidden, masks)
    return found


@pytest.mark.parametrize("tp", [2, 4])
def test_shards_are_masked_apart_and_replicas_alike(tp: int) -> None:
    """BTP: each rank's shard has its own mask. Elsewhere masks are equal; hidden states are so bit for bit anywhere."""
    first, *others = run_ranks(tp, run_ranks_dropout)
    for layout in LAYOUTS:
        hidden, masks = first[layout]
        assert masks.keys() == set(itertools.product(range(2), ("attention", "mlp")))
        for other in others:
            assert torch.equal(other[layout][0], hidden), layout
            for place, kept in masks.items():
                assert torch.equal(other[layout][1][place], kept) is (layout != "btp"), (layout, place)
    for one, other in itertools.combinations([first, *others], 2):
        for place, kept in one["btp"][1].items():
            share = float((kept != other["btp"][1][place]).float().mean())
            assert share > RATE, place  # 2 p (1 - p) = 0.375 for independent masks
