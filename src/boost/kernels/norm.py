"""RMSNorm where the hidden dimension is whole, and the division that ends an Online RMSNorm.

Source: Zhang and Sennrich, 2019. Statistics are fp32, fp64 where the model is fp64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def statistic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of norm statistics and losses beside activations of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over a whole hidden dimension, [T, D] to [T, D]."""
    wide = x_TD.to(statistic_dtype(x_TD.dtype))
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalised.to(x_TD.dtype) * gain_D.to(x_TD.dtype)


class _DivideByRms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, squares_T: Tensor, width: int, eps: float) -> Tensor:
        inverse = torch.rsqrt(squares_T / width + eps).unsqueeze(-1)
        z = (total * inverse).to(total.dtype)
        ctx.save_for_backward(z, inverse)
        ctx.width = width
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        z, inverse = ctx.saved_tensors
        inner = (grad.to(inverse.dtype) * z).sum(-1, keepdim=True)
        grad_squares = -inner * inverse.square() / (2 * ctx.width)
        return (grad * inverse).to(grad.dtype), grad_squares.squeeze(-1), None, None


def divide_by_rms(total_TR: Tensor, squares_T: Tensor, width: int, eps: float) -> Tensor:
    """z = total / sqrt(S / width + eps), row by row; saves z, which a bottleneck keeps anyway, and 1/rms."""
    return _DivideByRms.apply(total_TR, squares_T, width, eps)
