"""Rotary position embedding, half-split form, with angles in fp32 whatever the model's precision.

Source: RoFormer (Su et al., 2021) in the layout of LLaMA checkpoints: dimension j rotates with j + head_size / 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_tables(
    positions: int, head_size: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, each [positions, head_size] of `dtype`.

    The angle is computed in fp32 and only its cosine and sine are rounded: angles in bf16 alias beyond position 256.
    """
    powers = torch.arange(0, head_size, 2, dtype=torch.int64, device=device).float() / head_size
    frequencies = 1.0 / (theta**powers)
    angles = torch.arange(positions, device=device).float()[:, None] * frequencies[None, :]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = x * cos
    (first, second), half_sin = x.chunk(2, dim=-1), sin.chunk(2, dim=-1)[0]
    rotated_first, rotated_second = y.chunk(2, dim=-1)
    rotated_first.addcmul_(second, half_sin, value=-1)
    rotated_second.addcmul_(first, half_sin)
    return y


def rotate(x_BHSK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Rotates queries or keys [batch, heads, sequence, head_size] by their positions' angles."""
    return _Rotate.apply(x_BHSK, cos_SK, sin_SK)
