"""LLaMA whose linears are low-rank pairs, y = act(x A) B + bias, for Hugging Face transformers.

`boost export` puts this file beside the weights. It needs torch and transformers alone, and changes nothing of
transformers' LLaMA but its linears: attention, key/value cache and generation are those of the library.

With a crossing (LaX, arXiv 2505.21732) a pair also takes up the bottleneck of the same pair in the layer before:

    h = act(x A) in layer 0, then h = act(LayerNorm(x A + Gate(h of the layer before))), and y = h B + bias.

A token's bottlenecks take up those of the same token, so nothing of them is cached while generating.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

GATES = ("identity", "diagonal", "dense", "tensor")


class BoostConfig(LlamaConfig):
    """A LLaMA configuration with low-rank linears.

    Args:
        rank: width of every bottleneck.
        bottleneck_activation: "silu" (CoLA) or "none" (SVD).
        crossing: "none", or the gate of LaX: "identity", "diagonal", "dense" or "tensor".
    """

    model_type = "boost"
    base_model_tp_plan: ClassVar[dict[str, Any]] = {}  # LLaMA's plan names linears that are pairs here

    def __init__(
        self, rank: int = 8, bottleneck_activation: str = "silu", crossing: str = "none", **fields: Any
    ) -> None:
        if bottleneck_activation not in ("silu", "none"):
            raise ValueError(f"bottleneck_activation: expected silu or none, got {bottleneck_activation!r}")
        if crossing not in ("none", *GATES):
            raise ValueError(f"crossing: expected none, {', '.join(GATES)}, got {crossing!r}")
        self.rank = rank
        self.bottleneck_activation = bottleneck_activation
        self.crossing = crossing
        super().__init__(**fields)


class Crossing(nn.Module):
    """LayerNorm(z + Gate(h)), with h the bottleneck of the same pair in the layer before; [..., r] all of them.

    The gate is h itself, h * weight, h weight^T + bias, or left^T H right with H the h as an a x b matrix, as near to
    square as r allows, a <= b.
    """

    def __init__(self, rank: int, gate: str) -> None:
        super().__init__()
        self.kind = gate
        self.norm = nn.LayerNorm(rank, eps=1e-6)
        if gate == "diagonal":
            self.weight = nn.Parameter(torch.ones(rank))
        elif gate == "dense":
            self.weight = nn.Parameter(0.02 * torch.randn(rank, rank))
            self.bias = nn.Parameter(torch.zeros(rank))
        elif gate == "tensor":
            a = next(a for a in range(math.isqrt(rank), 0, -1) if rank % a == 0)
            # They hold a matrix each, and are not called.
            self.left, self.right = nn.Linear(a, a, bias=False), nn.Linear(rank // a, rank // a, bias=False)

    def forward(self, z: Tensor, h: Tensor) -> Tensor:
        return self.norm(z + self.gate(h.to(z.device)))

    def gate(self, h: Tensor) -> Tensor:
        if self.kind == "diagonal":
            return h * self.weight
        if self.kind == "dense":
            return F.linear(h, self.weight, self.bias)
        if self.kind == "tensor":
            left, right = self.left.weight, self.right.weight
            return (left.t() @ h.unflatten(-1, (len(left), len(right))) @ right).flatten(-2)
        return h


class Pair(nn.Module):
    """y = act(x A) B + bias: `down.weight` is A transposed, [r, d_in], and `up.weight` B transposed, [d_out, r].

    Args:
        linear: whose place it takes.
        below: the same pair of the layer before, with a crossing.
        hands_on: whether the layer after has a crossing.
    """

    def __init__(self, linear: nn.Linear, config: BoostConfig, below: Pair | None, *, hands_on: bool) -> None:
        super().__init__()
        self.down = nn.Linear(linear.in_features, config.rank, bias=False)
        self.act = nn.SiLU() if config.bottleneck_activation == "silu" else nn.Identity()
        self.up = nn.Linear(config.rank, linear.out_features, bias=linear.bias is not None)
        self.crossing = None if below is None else Crossing(config.rank, config.crossing)
        self.below = [] if below is None else [below]  # in a list, so that it is not part of this module too
        self.hands_on = hands_on
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        v = self.down(x)
        if self.crossing is not None:
            v = self.crossing(v, self.below[0].take())
        h = self.act(v)
        if self.hands_on:
            self.h = h
        return self.up(h)

    def take(self) -> Tensor:
        """The bottleneck of the forward pass under way, once: nothing of a pass outlives it."""
        h, self.h = self.h, None
        assert h is not None, "with a crossing, layers run one after the other, each once"
        return h


class BoostForCausalLM(LlamaForCausalLM):
    """transformers' `LlamaForCausalLM` with a `Pair` in place of q, k, v, o, gate, up and down of every layer."""

    config_class = BoostConfig

    def __init__(self, config: BoostConfig) -> None:
        super().__init__(config)
        crossing = config.crossing != "none"
        # Recomputing one layer would miss what the layer before has handed on.
        self.supports_gradient_checkpointing = not crossing
        below: dict[str, Pair] = {}
        for number, layer in enumerate(self.model.layers):
            hands_on = crossing and number + 1 < len(self.model.layers)
            for parent in (layer.self_attn, layer.mlp):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        pair = Pair(child, config, below.get(name), hands_on=hands_on)
                        setattr(parent, name, pair)
                        if crossing:
                            below[name] = pair
