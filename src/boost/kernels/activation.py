"""The activations that a configuration can name, each with its derivative, and the gate of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """Called like a function; `backward` takes the gradient of the result and the argument."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up. Without autograd: the product takes the place of act(gate)."""
        y = self.forward(gate)
        return y * up if y is gate else y.mul_(up)


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward.default),
    "none": Activation(lambda x: x, lambda grad, x: grad),
}


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act.gate(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return ctx.act.backward(grad * up, gate), ctx.act.gate(gate, grad), None


def gated(gate_Tf: Tensor, up_Tf: Tensor, act: Activation) -> Tensor:
    """act(gate) * up, of equal shapes; saves these two and nothing else."""
    return _Gated.apply(gate_Tf, up_Tf, act)
