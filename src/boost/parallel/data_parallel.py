"""Data parallelism without sharded state: gradients summed over dp in a few flat buckets.

The loss is already divided by the global number of tokens, so gradients are summed and never divided again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from boost.parallel.mesh import Group

BUCKET_BYTES = 32 * 2**20


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor], dp: Group) -> None:
    """Replaces every gradient by its sum over the group."""
    if dp.size == 1:
        return
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        bucket.append(parameter.grad)
        size += parameter.grad.numel() * parameter.grad.element_size()
        if size >= BUCKET_BYTES:
            _sum_bucket(bucket, dp)
            bucket, size = [], 0
    _sum_bucket(bucket, dp)


def _sum_bucket(gradients: list[Tensor], dp: Group) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=dp.process_group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
