"""Every preset is a model of the size that its source states, seen without allocating it."""

from __future__ import annotations

import math
import time

import pytest

from boost.config import TrainConfig, preset_names
from boost.model import costs
from boost.model.decoder import Decoder, outline
from boost.parallel.sharding import canonical_names, described
from tests.models import model_section

# Millions, as printed in the CoLA, LORO and GaLore tables and logs.
SIZES = ("60m", "130m", "350m", "1b", "7b")
LOW_RANK_MILLIONS = dict(zip(SIZES, ("42.77", "94.00", "185.22", "609.31", "2820.94"), strict=True))
DENSE_MILLIONS = dict(zip(SIZES, ("58.07", "134.11", "367.97", "1339.08", "6738.42"), strict=True))
PUBLISHED_MILLIONS = {f"paper/dense-{size}": value for size, value in DENSE_MILLIONS.items()}
PUBLISHED_MILLIONS |= {
    f"paper/{method}-{size}": LOW_RANK_MILLIONS[size] for method in ("cola", "svd", "loro") for size in SIZES
}
# Millions that LaX's published gates and norms add to the rest.
GATES_MILLIONS = dict(zip(SIZES, ("0.028", "0.079", "0.165", "0.371", "0.889"), strict=True))


@pytest.mark.parametrize("name", preset_names())
def test_preset_has_its_published_size(name: str) -> None:
    """Built on the meta device in seconds; the tensors it names add up to `costs.parameters` and the printed figure."""
    model = TrainConfig.load(name).model
    begin = time.perf_counter()
    decoder = outline(model)
    assert time.perf_counter() - begin < 5
    assert all(parameter.is_meta for parameter in decoder.parameters())
    total = sum(math.prod(shape) for shape in canonical_names(decoder).values())
    assert total == sum(parameter.numel() for parameter in decoder.parameters())  # one process pads nothing
    assert total == costs.parameters(model)
    if name in PUBLISHED_MILLIONS:
        assert f"{total / 1e6:.2f}" == PUBLISHED_MILLIONS[name]


@pytest.mark.parametrize("support", ["uniform", "block_diagonal"])
def test_an_outline_has_the_names_and_no_positions(support: str) -> None:
    model = model_section(linear="sltrain", sparse_support=support, sparse_blocks=4, sparse_density=0.2)
    assert canonical_names(outline(model)) == canonical_names(Decoder(model))
    supports = [part.support for _, parts in described(outline(model)) for part in parts if part.support]
    assert len(supports) == 7 * model.layers
    assert all(support.positions.is_meta for support in supports)


def test_every_published_figure_has_a_preset() -> None:
    """None of the figures above goes unchecked."""
    assert PUBLISHED_MILLIONS.keys() < set(preset_names())
    assert len(PUBLISHED_MILLIONS) == 20


@pytest.mark.parametrize(("size", "millions"), [("60m", "44"), ("130m", "97"), ("350m", "194"), ("1b", "646")])
def test_sltrain_has_its_published_size(size: str, millions: str) -> None:
    assert f"{costs.parameters(TrainConfig.load(f'paper/sltrain-{size}').model) / 1e6:.0f}" == millions


@pytest.mark.parametrize("size", SIZES)
def test_gates_have_their_published_size(size: str) -> None:
    lax, cola = (costs.parameters(TrainConfig.load(f"paper/{method}-{size}").model) for method in ("lax", "cola"))
    assert f"{(lax - cola) / 1e6:.3f}" == GATES_MILLIONS[size]
