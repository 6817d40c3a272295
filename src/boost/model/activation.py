"""The activations that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def _none(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Activation] = {"silu": F.silu, "none": _none}
