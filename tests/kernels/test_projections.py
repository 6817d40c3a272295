"""The grouped up-projections, in both ways in which devices compute them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from boost.kernels import projections
from boost.kernels.projections import grouped_up
from boost.parallel.overlap import WeightGradQueue

TOKENS, RANK, WIDTH = 7, 3, 5


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_groups_are_products_side_by_side(
    batched: bool, groups: int, whole: bool, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one batched GEMM and as single ones: outputs and gradients are those of each pair alone."""
    if batched:
        monkeypatch.setattr(projections, "SINGLE_GEMMS", frozenset())
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)[:groups, None]
    z = (torch.randn(TOKENS, groups, RANK, generator=generator, dtype=torch.float64) * scales).requires_grad_()
    weight = torch.randn(WIDTH, groups, RANK, generator=generator, dtype=torch.float64).requires_grad_()
    wanted = torch.randn(groups, TOKENS, WIDTH, generator=generator, dtype=torch.float64)

    expected = [F.silu(z[:, g]) @ weight[:, g].t() for g in range(groups)]
    expected_grads = torch.autograd.grad([(y * w).sum() for y, w in zip(expected, wanted, strict=True)], (z, weight))

    queue = WeightGradQueue() if queued else None
    outputs = grouped_up(F.silu(z), z, weight, F.silu, queue, whole=whole)
    if whole:
        (y,) = outputs
        assert y.shape == (groups, TOKENS, WIDTH)
        outputs = tuple(y.unbind(0))
    torch.autograd.backward([(y * w).sum() for y, w in zip(outputs, wanted, strict=True)])
    assert queue is None or weight.grad is None
    if queue is not None:
        queue.flush()
    for found, reference in zip([*outputs, z.grad, weight.grad], [*expected, *expected_grads], strict=True):
        assert found is not None
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)
