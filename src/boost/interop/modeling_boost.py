"""LLaMA whose linears are low-rank pairs, y = act(x A) B + bias, for Hugging Face transformers.

`boost export` puts this file beside the weights. It needs torch and transformers alone, and changes nothing of
transformers' LLaMA but its linears: attention, key/value cache and generation are those of the library.

With a crossing (LaX, arXiv 2505.21732) a pair also takes up the bottleneck of the same pair in the layer before:

    h = act(x A) in layer 0, then h = act(LayerNorm(x A + Gate(h of the layer before))), and y = h B + bias.

A token's bottlenecks take up those of the same token, so nothing of them is cached while generating. They are kept by
thread, not in modules: threads may share a model, and the replicas of nn.DataParallel share what they were copied from.
"""

from __future__ import annotations

import math
import threading
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

GATES = ("identity", "diagonal", "dense", "tensor")
FORMAT = 1  # of config.json and the weights' names; another one means that this file does not fit the weights

# `latents`: in the forward pass that this thread is in, the newest bottleneck of each kind of linear.
under_way = threading.local()


class BoostConfig(LlamaConfig):
    """A LLaMA configuration with low-rank linears.

    Args:
        rank: width of every bottleneck.
        bottleneck_activation: "silu" (CoLA) or "none" (SVD).
        crossing: "none", or the gate of LaX: "identity", "diagonal", "dense" or "tensor".
        export_format: of the directory; must be `FORMAT`.
    """

    model_type = "boost"
    base_model_tp_plan: ClassVar[dict[str, Any]] = {}  # LLaMA's plan names linears that are pairs here

    def __init__(
        self,
        rank: int = 8,
        bottleneck_activation: str = "silu",
        crossing: str = "none",
        export_format: int = FORMAT,
        **fields: Any,
    ) -> None:
        if export_format != FORMAT:
            raise ValueError(
                f"export_format: expected {FORMAT}, got {export_format!r}; this modeling_boost.py ({__file__}) is of "
                "another version of boost than the directory: install that one, or export again"
            )
        if bottleneck_activation not in ("silu", "none"):
            raise ValueError(f"bottleneck_activation: expected silu or none, got {bottleneck_activation!r}")
        if crossing not in ("none", *GATES):
            raise ValueError(f"crossing: expected none, {', '.join(GATES)}, got {crossing!r}")
        self.rank = rank
        self.bottleneck_activation = bottleneck_activation
        self.crossing = crossing
        self.export_format = export_format
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
        name: by which the layer after finds its bottleneck.
        first: whether it is in layer 0, which takes up nothing.
    """

    def __init__(self, linear: nn.Linear, config: BoostConfig, name: str, *, first: bool) -> None:
        super().__init__()
        self.down = nn.Linear(linear.in_features, config.rank, bias=False)
        self.act = nn.SiLU() if config.bottleneck_activation == "silu" else nn.Identity()
        self.up = nn.Linear(config.rank, linear.out_features, bias=linear.bias is not None)
        self.name, self.hands_on = name, config.crossing != "none"
        self.crossing = Crossing(config.rank, config.crossing) if self.hands_on and not first else None

    def forward(self, x: Tensor) -> Tensor:
        v = self.down(x)
        if self.crossing is not None:
            v = self.crossing(v, under_way.latents[self.name])
        h = self.act(v)
        if self.hands_on:
            under_way.latents[self.name] = h
        return self.up(h)


def reset(*_: Any) -> None:
    """Nothing of a forward pass is in the next, or outlives it."""
    under_way.latents = {}


class BoostForCausalLM(LlamaForCausalLM):
    """transformers' `LlamaForCausalLM` with a `Pair` in place of q, k, v, o, gate, up and down of every layer."""

    config_class = BoostConfig

    def __init__(self, config: BoostConfig) -> None:
        super().__init__(config)
        crossing = config.crossing != "none"
        # Recomputing one layer would miss what the layer before has handed on.
        self.supports_gradient_checkpointing = not crossing
        if crossing:
            self.model.register_forward_pre_hook(reset)
            self.model.register_forward_hook(reset, always_call=True)
        for number, layer in enumerate(self.model.layers):
            for parent in (layer.self_attn, layer.mlp):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(parent, name, Pair(child, config, name, first=number == 0))


# So that save_pretrained copies this file.
BoostConfig.register_for_auto_class()
BoostForCausalLM.register_for_auto_class("AutoModelForCausalLM")
