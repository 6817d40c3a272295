"""Clipping by the global gradient norm, with every parameter counted once whatever the layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Group
from boost.parallel.sharding import described


@torch.no_grad()
def gradient_norm(model: nn.Module, tp: Group, pp: Group | None = None) -> Tensor:
    """The norm of the whole model's gradient, a scalar equal on every rank, in fp32 (fp64 for an fp64 model).

    Shards are summed over tp and stages over pp; a replicated parameter, whose gradient is complete on every rank,
    counts on one rank only. Padding has exact zero gradients.
    """
    norms = []
    for parameter, parts in described(model):
        if parameter.grad is None or not parts[0].mine(tp):
            continue
        norms.append(torch.linalg.vector_norm(parameter.grad))
    if not norms:
        norms = [torch.zeros((), device=next(model.parameters()).device)]
    return all_reduce(all_reduce(torch.stack(norms).square().sum(), tp), pp or Group()).sqrt()


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, limit: float | None) -> None:
    """Scales all gradients so that their global norm is at most `limit`; None leaves them."""
    if limit is None:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
