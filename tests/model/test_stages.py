"""How layers are cut into stages."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from boost.model import costs
from boost.model.stages import cut, held_stages
from boost.parallel.mesh import Group
from tests.models import model_section

SEQUENCE = 16


def dearest(changes: dict[str, Any], counts: tuple[int, ...]) -> float:
    model = model_section(**changes)
    block, head = costs.block_flops_per_token(model, SEQUENCE), costs.head_flops_per_token(model)
    return max(count * block + (head if stage == len(counts) - 1 else 0) for stage, count in enumerate(counts))


@pytest.mark.parametrize("vocabulary", [10, 500, 3000, 100_000])
@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (3, 3), (7, 2), (9, 4), (11, 3), (16, 4)])
def test_every_layer_once_and_no_cut_is_better(layers: int, stages: int, vocabulary: int) -> None:
    changes = {"layers": layers, "vocab_size": vocabulary}
    ranges = cut(model_section(**changes), SEQUENCE, stages)
    assert [layer for held in ranges for layer in held] == list(range(layers))
    counts = tuple(len(held) for held in ranges)
    assert min(counts) >= 1
    others = [c for c in itertools.product(range(1, layers + 1), repeat=stages) if sum(c) == layers]
    assert dearest(changes, counts) == min(dearest(changes, other) for other in others)


def test_a_dear_head_takes_layers_from_the_last_stage() -> None:
    assert [len(held) for held in cut(model_section(layers=8, vocab_size=20), SEQUENCE, 2)] == [4, 4]
    assert [len(held) for held in cut(model_section(layers=8, vocab_size=300), SEQUENCE, 2)] == [6, 2]


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 stages"):
        cut(model_section(layers=3), SEQUENCE, 4)


def test_which_rank_has_which_stages() -> None:
    def ranks(schedule: str, stages: int) -> list[list[int]]:
        return [held_stages(schedule, stages, Group(rank, 4)) for rank in range(4)]

    assert ranks("1f1b", 4) == [[0], [1], [2], [3]]
    assert ranks("interleaved_1f1b", 8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ranks("zbv", 8) == [[0, 7], [1, 6], [2, 5], [3, 4]]
