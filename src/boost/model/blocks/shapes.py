"""The seven linears of a LLaMA block: canonical names and global widths, the same for every block file."""

from __future__ import annotations

from boost.config import ModelSection
from boost.model.low_rank import Linear


def attention_linears(model: ModelSection, layer: int) -> tuple[Linear, Linear, Linear, Linear]:
    """q, k, v, o."""
    d, bias = model.hidden_size, model.attention_bias
    q_width, kv_width = model.heads * model.head_size, model.kv_heads * model.head_size
    prefix = f"blocks.{layer}.attention"
    return (
        Linear(f"{prefix}.q", d, q_width, bias),
        Linear(f"{prefix}.k", d, kv_width, bias),
        Linear(f"{prefix}.v", d, kv_width, bias),
        Linear(f"{prefix}.o", q_width, d, bias),
    )


def mlp_linears(model: ModelSection, layer: int) -> tuple[Linear, Linear, Linear]:
    """gate, up, down."""
    d, f, bias, prefix = model.hidden_size, model.ffn_size, model.mlp_bias, f"blocks.{layer}.mlp"
    return (
        Linear(f"{prefix}.gate", d, f, bias),
        Linear(f"{prefix}.up", d, f, bias),
        Linear(f"{prefix}.down", f, d, bias),
    )
