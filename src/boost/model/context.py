"""What one forward pass knows besides its tokens: positions, key/value cache, and the identity of its samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from boost.model.dropout import dropout
from boost.parallel.overlap import WeightGradQueue

Recompute = Literal["none", "block", "latent"]


@dataclass
class KeyValueCache:
    """Keys and values of the tokens seen so far, per layer [batch, kv heads, sequence, head_size]."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens held."""
        return next(iter(self.layers.values()))[0].shape[-2] if self.layers else 0

    def extend(self, layer: int, k_BHSK: Tensor, v_BHSK: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new tokens' keys and values and returns all of them."""
        if layer in self.layers:
            k, v = self.layers[layer]
            k_BHSK, v_BHSK = torch.cat([k, k_BHSK], dim=-2), torch.cat([v, v_BHSK], dim=-2)
        self.layers[layer] = (k_BHSK, v_BHSK)
        return k_BHSK, v_BHSK


@dataclass(frozen=True)
class Context:
    """Shared by all blocks of one forward pass.

    Attributes:
        batch, sequence: the shape of the token ids; T = batch * sequence tokens.
        cos_SK, sin_SK: rotary tables of these tokens' positions, [sequence, head_size].
        cache: keys and values of earlier tokens while generating, else None.
        dropout: the rate; 0 where the model is not training.
        seed, samples_B: with dropout, the run's seed and each sequence's global sample index, int64 on the device.
        recompute: what backward computes again instead of keeping it.
        interleaved: two halves of the batch take turns (`boost.parallel.interleave`), and latents' gradients are
            summed by hand.
        queue: takes weight gradients that can wait for an all-reduce to hide behind, or None.
        lora_dropout: the rate of what ReLoRA's factors read; 0 where the model is not training.
    """

    batch: int
    sequence: int
    cos_SK: Tensor
    sin_SK: Tensor
    cache: KeyValueCache | None = None
    dropout: float = 0.0
    seed: int = 0
    samples_B: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    recompute: Recompute = "none"
    queue: WeightGradQueue | None = None
    interleaved: bool = False
    lora_dropout: float = 0.0

    @property
    def tokens(self) -> int:
        """T."""
        return self.batch * self.sequence

    def drop(self, x_Ti: Tensor, rate: float, layer: int, site: str, first: int = 0) -> Tensor:
        """`boost.model.dropout` of these samples, at a place in the model; x begins with the global column `first`."""
        return dropout(x_Ti, rate, self.samples_B, self.seed, layer, site, first)
