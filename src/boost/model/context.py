"""What one forward pass knows besides its tokens: positions, key/value cache, and the identity of its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

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
        seed, samples: with dropout, the run's seed and each sequence's global sample index.
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
    samples: Sequence[int] = ()
    recompute: Recompute = "none"
    queue: WeightGradQueue | None = None
    interleaved: bool = False
    lora_dropout: float = 0.0

    @property
    def tokens(self) -> int:
        """T."""
        return self.batch * self.sequence

    def drop(self, x: Tensor, layer: int, site: str, shard: int | None) -> Tensor:
        """Dropout on x [T, n] with a mask that is a function of where it is applied, never of generator state.

        Args:
            layer, site: the place in the model.
            shard: the tp rank where x is a shard (each shard its own mask); None where x is replicated.
        """
        if self.dropout == 0.0:
            return x
        keep = self.mask(self.dropout, x.shape[-1], layer, site, "" if shard is None else str(shard))
        return x * keep.to(device=x.device) / (1.0 - self.dropout)

    def mask(self, rate: float, width: int, layer: int, site: str, shard: str = "") -> Tensor:
        """What dropout keeps of [T, width], bool, on the host."""
        masks = []
        for sample in self.samples:
            key = f"{self.seed}:{sample}:{layer}:{site}:{shard}"
            generator = torch.Generator().manual_seed(
                int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
            )
            masks.append(torch.rand(self.sequence, width, generator=generator) >= rate)
        return torch.cat(masks)
