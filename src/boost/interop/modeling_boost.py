"""LLaMA whose linears are low-rank pairs, y = act(x A) B + bias, for Hugging Face transformers.

`boost export` puts this file beside the weights. It needs torch and transformers alone, and changes nothing of
transformers' LLaMA but its linears: attention, key/value cache and generation are those of the library.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM


class BoostConfig(LlamaConfig):
    """A LLaMA configuration with low-rank linears.

    Args:
        rank: width of every bottleneck.
        bottleneck_activation: "silu" (CoLA) or "none" (SVD).
    """

    model_type = "boost"
    base_model_tp_plan: ClassVar[dict[str, Any]] = {}  # LLaMA's plan names linears that are pairs here

    def __init__(self, rank: int = 8, bottleneck_activation: str = "silu", **fields: Any) -> None:
        if bottleneck_activation not in ("silu", "none"):
            raise ValueError(f"bottleneck_activation: expected silu or none, got {bottleneck_activation!r}")
        self.rank = rank
        self.bottleneck_activation = bottleneck_activation
        super().__init__(**fields)


class Pair(nn.Module):
    """y = act(x A) B + bias: `down.weight` is A transposed, [r, d_in], and `up.weight` B transposed, [d_out, r]."""

    def __init__(self, linear: nn.Linear, rank: int, activation: str) -> None:
        super().__init__()
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.act = nn.SiLU() if activation == "silu" else nn.Identity()
        self.up = nn.Linear(rank, linear.out_features, bias=linear.bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.act(self.down(x)))


class BoostForCausalLM(LlamaForCausalLM):
    """transformers' `LlamaForCausalLM` with a `Pair` in place of q, k, v, o, gate, up and down of every layer."""

    config_class = BoostConfig

    def __init__(self, config: BoostConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(parent, name, Pair(child, config.rank, config.bottleneck_activation))
