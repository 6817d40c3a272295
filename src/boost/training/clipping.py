"""Clipping by the global gradient norm, with every parameter counted once whatever the layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from boost.parallel.collectives import all_reduce
from boost.parallel.mesh import Group
from boost.parallel.sharding import described, held_rows


@torch.no_grad()
def gradient_norm(model: nn.Module, *groups: Group) -> Tensor:
    """The norm of the whole model's gradient, a scalar equal on every rank, in fp32 (fp64 for an fp64 model).

    A replicated parameter, whose gradient is complete on every rank, counts on one rank only. Padding has exact zero
    gradients.

    Args:
        groups: what gradients are divided over: first tp, then the dp ranks of ZeRO's shards, the pipeline's stages.
    """
    norms = []
    for parameter, parts in described(model):
        if parameter.grad is None or not parts[0].mine(groups[0]):
            continue
        norms.append(torch.linalg.vector_norm(held_rows(parameter.grad)[0]))
    if not norms:
        norms = [torch.zeros((), device=next(model.parameters()).device)]
    total = torch.stack(norms).square().sum()
    for group in groups:
        total = all_reduce(total, group)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, limit: float | None) -> None:
    """Scales all gradients so that their global norm is at most `limit`; None leaves them."""
    if limit is None:
        return
    gradients = [held_rows(p.grad)[0] for p in model.parameters() if p.grad is not None]
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
