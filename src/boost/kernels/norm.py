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


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        wide = x.to(statistic_dtype(x.dtype))
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, inverse, gain)
        return (wide * inverse).to(x.dtype) * gain.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, inverse, gain = ctx.saved_tensors
        wide = x.to(inverse.dtype)
        grad_gain = (grad * (wide * inverse).to(x.dtype)).sum(0, dtype=inverse.dtype).to(gain.dtype)
        scaled = (grad * gain.to(grad.dtype)).to(inverse.dtype)
        inner = (scaled * wide).mean(-1, keepdim=True)
        return (inverse * (scaled - wide * inverse.square() * inner)).to(x.dtype), grad_gain, None


def rms_norm(x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over a whole hidden dimension, [T, D] to [T, D]; saves x and 1/rms."""
    return _RmsNorm.apply(x_TD, gain_D, eps)


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


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide = x.to(statistic_dtype(x.dtype))
        centred = wide - wide.mean(-1, keepdim=True)
        inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, inverse, weight)
        return torch.addcmul(bias.to(wide.dtype), centred * inverse, weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, inverse, weight = ctx.saved_tensors
        wide, grad = x.to(inverse.dtype), grad.to(inverse.dtype)
        normalised = (wide - wide.mean(-1, keepdim=True)) * inverse
        scaled = grad * weight.to(inverse.dtype)
        inner = (scaled * normalised).mean(-1, keepdim=True)
        grad_x = inverse * (scaled - scaled.mean(-1, keepdim=True) - normalised * inner)
        return grad_x.to(x.dtype), (grad * normalised).sum(0).to(weight.dtype), grad.sum(0).to(weight.dtype), None


def layer_norm(x_TGr: Tensor, weight_Gr: Tensor, bias_Gr: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; saves x and 1/deviation.

    Source: Ba et al., arXiv 1607.06450.
    """
    return _LayerNorm.apply(x_TGr, weight_Gr, bias_Gr, eps)
