"""Gradients summed over a group in a few flat buckets: over dp where no state is sharded, and partial ones over tp.

The loss is already divided by the global number of tokens, so gradients are summed and never divided again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from boost.parallel.mesh import Group
from boost.parallel.sharding import held_rows

BUCKET_BYTES = 32 * 2**20


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor], group: Group) -> None:
    """Replaces every gradient, or the rows of it that are held here, by its sum over the group."""
    if group.size == 1:
        return
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient, _ = held_rows(parameter.grad)
        bucket.append(gradient)
        size += gradient.numel() * gradient.element_size()
        if size >= BUCKET_BYTES:
            _sum_bucket(bucket, group)
            bucket, size = [], 0
    _sum_bucket(bucket, group)


def _sum_bucket(gradients: list[Tensor], group: Group) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group.process_group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
