"""Hiding collectives behind computation: weight gradients that wait for a backward all-reduce to hide behind them.

In backward each all-reduce of a partial gradient is followed by work that does not need its result: the weight
gradients of the operations before it. So those are not computed where autograd meets them but queued, and run while
the next all-reduce is under way. They accumulate into `.grad` themselves, past autograd's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor


class WeightGradQueue:
    """Weight gradients that have been put off. `flush` must follow every backward."""

    def __init__(self) -> None:
        self._pending: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]] = []

    def put(self, parameters: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        """Queues a function that computes the gradients of these parameters."""
        self._pending.append((parameters, compute))

    def flush(self) -> None:
        """Computes everything queued, oldest first, and adds it to `.grad` as autograd would."""
        self.take()()

    def take(self) -> Callable[[], None]:
        """Empties the queue; what is returned does what `flush` would have done."""
        pending, self._pending = self._pending, []
        return partial(_accumulate, pending)


class HeldWeightGrads(WeightGradQueue):
    """For pipelines that fill their bubbles with weight gradients: no all-reduce flushes it, the schedule takes all."""

    def flush(self) -> None:
        """Nothing: `take` is the only way out."""


@torch.no_grad()
def _accumulate(pending: list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]]) -> None:
    for parameters, compute in pending:
        for parameter, gradient in zip(parameters, compute(), strict=True):
            if parameter.grad is None:
                # In the parameter's own memory layout: fused optimisers walk both with the same strides.
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            else:
                parameter.grad += gradient
