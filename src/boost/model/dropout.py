"""Dropout whose masks are functions of where they are applied: no generator, no state, no word with the host.

Each element's bits are an integer hash of the run's seed, the sample, the layer, the site, the position and the global
column, computed on the device of what is dropped. So a mask is the same under every layout, and again in backward.

Products wrap around. torch shifts signed integers arithmetically, which costs a round one bit of its state: x and ~x
give the same. Sources: the finalisers of SplitMix64 (Steele et al., 2014) and of lowbias32 (C. Wellons).

Shapes: B samples, T = B * sequence tokens, i columns.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN_64, _ONE_64, _TWO_64 = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_GOLDEN_32, _ONE_32, _TWO_32 = 0x9E3779B1 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32


def dropout(x_Ti: Tensor, rate: float, samples_B: Tensor, seed: int, layer: int, site: str, first: int = 0) -> Tensor:
    """x with each element zero with probability `rate`, and divided by 1 - rate otherwise.

    Args:
        samples_B: each sequence's global sample index, int64 on x's device; x's rows are theirs, one after the other.
        layer, site: the place in the model.
        first: the global column that x begins with.
    """
    if rate == 0.0:
        return x_Ti
    rows_T = _rows(samples_B, len(x_Ti) // len(samples_B), seed, layer, site)
    return torch.where(_kept(rows_T, first, x_Ti.shape[-1], rate), x_Ti, 0) / (1 - rate)


def _rows(samples_B: Tensor, sequence: int, seed: int, layer: int, site: str) -> Tensor:
    """A hash of each token and place, int32 [T]."""
    place = int.from_bytes(hashlib.sha256(f"{seed}:{layer}:{site}".encode()).digest()[:8], "little", signed=True)
    positions_S = torch.arange(1, sequence + 1, device=samples_B.device) * _GOLDEN_64
    rows_BS = _mixed_64(_mixed_64(samples_B ^ place)[:, None] + positions_S)
    return (rows_BS >> 32).to(torch.int32).flatten()


def _mixed_64(x: Tensor) -> Tensor:
    x = (x ^ (x >> 30)) * _ONE_64
    x = (x ^ (x >> 27)) * _TWO_64
    return x ^ (x >> 31)


def _kept(rows_T: Tensor, first: int, width: int, rate: float) -> Tensor:
    """Which elements stay, bool [T, width].

    Few passes in int32: the last product has its best bits on top, where the threshold looks, and needs no more mixing.
    """
    columns_i = torch.arange(first, first + width, dtype=torch.int32, device=rows_T.device) * _GOLDEN_32
    x_Ti = rows_T[:, None] ^ columns_i
    x_Ti.bitwise_xor_(x_Ti >> 16).mul_(_ONE_32)
    x_Ti.bitwise_xor_(x_Ti >> 15).mul_(_TWO_32)
    return x_Ti >= int(rate * 2**32) - 2**31
