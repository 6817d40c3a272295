"""The head's loss over shards of the vocabulary, uneven ones and an empty one, against torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from boost.model.loss import IGNORED, head_loss
from boost.parallel.mesh import Mesh
from tests.distributed.harness import run_ranks
from tests.models import distance

TP, TOKENS, HIDDEN, VOCABULARY, CHUNK = 4, 23, 12, 5, 7
SHARE = 2  # rows of a shard: 2, 2, 1, 0
FAR, FAR_IGNORED = 4, 7  # tokens whose hidden states are 300 times as large


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head weights and labels, the first two exact in `dtype`.

    The label of the far token lies in a shard that has nothing of its probability: not in fp64 either.
    """
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    h[[FAR, FAR_IGNORED]] *= 300
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    h, weight = h.to(dtype).double(), weight.to(dtype).double()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[[0, FAR_IGNORED, 22]] = IGNORED
    labels[FAR] = (h[FAR] @ weight.t()).argmin()
    return h, weight, labels


def reference(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in fp64."""
    h, weight, labels = case(dtype)
    loss = F.cross_entropy(h.requires_grad_() @ weight.requires_grad_().t(), labels, reduction="sum")
    loss.backward()
    assert h.grad is not None
    assert weight.grad is not None
    return loss.detach(), h.grad, weight.grad


def sharded(mesh: Mesh, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's loss, the sum of the gradients of h, and the gradient of its own rows."""
    h, weight, labels = case(dtype)
    start = min(mesh.tp.rank * SHARE, VOCABULARY)
    mine = weight[start : start + SHARE].to(dtype).requires_grad_()
    h = h.to(dtype).requires_grad_()
    loss = head_loss(h, mine, labels, start, mesh.tp, CHUNK)
    loss.backward()
    assert h.grad is not None
    assert mine.grad is not None
    total = h.grad.double()
    dist.all_reduce(total, group=mesh.tp.process_group)
    return loss.detach(), total, mine.grad


def test_the_far_label_underflows() -> None:
    """What the other test needs: the shard of that label has a share of 0 even in fp64; other logits are ordinary."""
    h, weight, labels = case(torch.float64)
    logits = h @ weight.t()
    first = int(labels[FAR]) // SHARE * SHARE
    share = (logits[FAR, first : first + SHARE].logsumexp(0) - logits[FAR].logsumexp(0)).exp()
    assert share == 0
    assert logits[labels != IGNORED].abs().amax(-1).sort().values[-2] < 12


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_shards_equal_cross_entropy(dtype: torch.dtype) -> None:
    """Exact in fp64. In bf16 logits of up to 12 are rounded by up to 12 x 2^-8, and probabilities p by p (1 - p) times
    twice that; the far token, nearly all of the loss, is wrong by 2^-8 of it at most."""
    near, nearer = (1e-12, 1e-12) if dtype == torch.float64 else (6 * 2**-8, 2**-7)
    loss, grad_h, grad_weight = reference(dtype)
    results = run_ranks(TP, sharded, dtype)
    assert [len(own) for _, _, own in results] == [2, 2, 1, 0]
    found = torch.cat([own for _, _, own in results])
    assert found.isfinite().all()
    assert distance(found, grad_weight) < near
    for value, total, _ in results:
        assert distance(value, loss) < nearer
        assert total.isfinite().all()
        assert distance(total, grad_h) < near
