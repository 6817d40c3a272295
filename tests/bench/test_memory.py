"""Live storages: what a step's peak counts, and what it leaves out."""

from __future__ import annotations

import pytest
import torch

from boost.bench.memory import track_storages
from boost.bench.step import Step
from boost.bench.variants import chosen, layout_variants
from boost.parallel.mesh import Mesh
from tests.bench.tiny import tiny_config


def test_peak_is_the_most_alive_at_once() -> None:
    with track_storages(sample=True) as tracker:
        first = torch.ones(1000)
        del first
        second = torch.ones(600) + 1  # two of them for a moment
    assert second.nbytes == 2400
    assert tracker.peak == 4800


def test_views_of_what_existed_do_not_count() -> None:
    parameter = torch.ones(1000)
    with track_storages(sample=True, excluding=[parameter]) as tracker:
        copy = parameter.detach().view(10, 100)[0] + 1
    assert tracker.peak == tracker.live_bytes() == copy.nbytes == 400


@pytest.mark.parametrize("layout", ["dense", "BTP"])
def test_recomputation_does_not_count_parameters_twice(layout: str) -> None:
    """Saved parameters come back as views there. So many layers have more parameters than activations."""
    peaks = []
    for name in (layout, f"{layout}, recompute blocks"):
        (variant,) = chosen(layout_variants(), [name])
        peaks.append(Step(variant.config(tiny_config(tp=1)), Mesh(), layers=16).peak_bytes())
    assert peaks[1] < 1.01 * peaks[0]
