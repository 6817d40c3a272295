"""Regions of parameters, as ZeRO cuts them."""

from __future__ import annotations

import pytest
import torch

from boost.parallel import sharding
from boost.parallel.mesh import Group
from boost.parallel.sharding import Init, Part


@pytest.mark.parametrize(
    ("held", "rows", "offset"),
    [((0, 26), 0, 0), ((26, 30), 0, 0), ((50, 26), 16, 0), ((70, 20), 20, 10), ((85, 15), 5, 25), ((90, 10), 0, 30)],
)
def test_a_share_lies_inside_its_tensor(
    monkeypatch: pytest.MonkeyPatch, held: tuple[int, int], rows: int, offset: int
) -> None:
    """Rows 60 to 90 of a parameter, of which this rank holds a range: before, across, inside, or after them."""
    parameter = torch.arange(100.0)[:, None].repeat(1, 3)
    first, count = held
    monkeypatch.setattr(sharding, "held_rows", lambda tensor: (tensor[first : first + count], first))
    part = Part("v", (30, 3), Init("zeros"), 0, (slice(60, 90),))
    assert part.offsets(parameter, Group()) == (offset, 0)
    assert torch.equal(part.view(parameter, Group()), parameter[60 + offset : 60 + offset + rows])
